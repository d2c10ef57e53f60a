"""One line for a user's mistake, exit code 2; everything else keeps its traceback.

`UserError` says what is wrong, where (flag, file, line, key) and how to fix it. It is a ValueError, so that callers of the
library parts may catch it as one. Scripts end with `run_main(main)` and read their flags with `Flags`.
"""

import argparse
import json
import math
import os
import sys
import time


class UserError(ValueError):
    """A mistake the user can mend: the message is one line that names the flag, file or layer and the fix."""


class Everywhere(UserError):
    """A UserError that every process of a run raises: told once."""


class Interrupted(KeyboardInterrupt):
    """A signal came while a step could still be thrown away (stopping.py); its text is the signal's name."""


class Flags(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors: one line, where argparse would print its usage as well."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def number(kind, low=-math.inf, high=math.inf, above=-math.inf):
    """An argparse type: an int or float in [low, high] and > above, else one clear line."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value > above) or value in (math.inf, -math.inf):  # NaN fails too
            bounds = [f"at least {low}"] * (low > -math.inf) + [f"above {above}"] * (above > -math.inf)
            bounds += [f"at most {high}"] * (high < math.inf)
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {' and '.join(bounds)}".rstrip())
        return value

    return parse


def json_object(text):
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as {{\"enable_thinking\": false}}")
    return value


def check_device(device):
    """Raise UserError unless tensors can live on `device`."""
    import torch  # here: the grading workers import this file and start without torch

    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def run_main(main):
    """Call `main()`; print a UserError as one line on stderr and exit with 2, Ctrl-C as one line and 130; let every other
    exception through. Of several processes the first speaks: the others wait before they tell a mistake, and are ended by the
    launcher meanwhile if the first one has made it too; an Everywhere they leave to it. (The launcher's own exit code is 1.)"""
    rank = os.environ.get("RANK", "0")
    try:
        main()
    except UserError as error:
        if rank != "0":
            time.sleep(5)
        if rank == "0" or not isinstance(error, Everywhere):
            print(f"error: {f'rank {rank}: ' * (rank != '0')}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: rows and samples up to the last finished step are in the run folder, a training run goes on with "
              "--resume from its last checkpoint, if it has one", file=sys.stderr)
        sys.exit(130)
