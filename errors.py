"""One line for a user's mistake, exit code 2; everything else keeps its traceback.

`UserError` says what is wrong, where (flag, file, line, key) and how to fix it. It is a ValueError, so that the libraries'
callers may catch it as one. Scripts end with `run_main(main)`.
"""

import sys


class UserError(ValueError):
    """A mistake the user can mend: the message is one line that names the flag, file or layer and the fix."""


def run_main(main):
    """Call `main()`; print a UserError as one line on stderr and exit with 2, let every other exception through."""
    try:
        main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
