"""Studies: what low precision does, measured on the reader's own model, with intervals, a table and pictures.

    python lab.py align --model out/smollm2      sampler against learner at equal weights (align.py)
    python lab.py ratio --model out/smollm2      new against old policy: the importance ratio and its clip (ratio.py)

`python lab.py STUDY --help` lists a study's flags.
"""

import sys

from errors import UserError, run_main

STUDIES = ("align", "ratio")


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in STUDIES:
        if "-h" in sys.argv or "--help" in sys.argv:
            print(__doc__)
            return
        raise UserError(f"lab.py: the first argument is the study, one of {', '.join(STUDIES)}")
    study = sys.argv[1]
    module = __import__(study)
    sys.argv[0] = f"lab.py {study}"
    module.main(sys.argv[2:])


if __name__ == "__main__":
    run_main(main)
