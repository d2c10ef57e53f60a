"""Ending a run early without losing anything: SIGTERM, SIGINT (Ctrl-C), and a wall-clock limit (--save-before-seconds).

    with Stop(args.save_before_seconds) as stop:
        for step in ...:
            with stop.interruptible():           # sampling and grading: the weights are still the last step's
                ...
            ...                                  # the updates: a signal now waits for the step's end
            if stop.now(): save, leave

A signal while answers are sampled, which is most of a step, ends it at once (`Interrupted`): the step is thrown away and will
be sampled again after a resume, from the same prompts and seeds. An evaluation is ended as well, and left out. During the
updates the step is finished first. A second signal ends the process on the spot, with what the last checkpoint holds.

The limit is for queues with a time limit: a run stops before the step that would not end in time, judged by the longest step,
evaluation and save so far (the first save: by the bytes it has to write). Time counts from the process's start.

Several processes: a rank that is signalled leaves its sampling, meets the others (parallel.meet), and all stop; if the launcher
signals all ranks, as torchrun does, that is at once. Ranks that share an engine (--vllm-tp) sample to the end first. torchrun,
under accelerate launch, kills after 30 seconds what has not ended: a limit, or a signal to the ranks themselves, has no such
haste. Its own exit code is then 1.
"""

import contextlib
import signal
import time

import psutil

import parallel
from errors import Interrupted

BYTES_PER_SECOND = 300e6  # of a save, until one was measured


class Stop:
    """Signal handlers while it is entered. `reason`: the signal's name, or the limit's flag, or None; `longest`: seconds of the
    longest step, evaluation and save so far."""

    def __init__(self, limit=0.0, save_bytes=0):
        """limit: seconds of wall-clock time from the process's start, 0 = none."""
        self.limit, self.start = limit, psutil.Process().create_time()
        self.longest = {"step": 0.0, "evaluation": 0.0, "save": save_bytes / BYTES_PER_SECOND}
        self.reason, self.signals, self.safe, self.before = None, 0, False, {}

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_signal(self, number, frame):
        self.signals += 1
        if self.signals > 1:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name
        if self.safe and (parallel.world() == 1 or parallel.working):
            raise Interrupted(self.reason)
        print(f"{self.reason}: what is under way is finished and saved first; once more to stop at once", flush=True)

    @contextlib.contextmanager
    def interruptible(self):
        """A signal inside raises Interrupted, on all ranks; so does one that came before."""
        try:
            self.agree()
            self.safe = True
            yield
            self.safe = False
            self.agree()
        except Interrupted as interrupted:
            self.reason = self.reason or str(interrupted)
            raise
        finally:
            self.safe = False

    def agree(self):
        """Interrupted on all ranks if any of them has a reason to stop."""
        self.reason = next((r for r in parallel.gather([self.reason]) if r), None)
        if self.reason:
            raise Interrupted(self.reason)

    @contextlib.contextmanager
    def timed(self, what):
        """Measure a step, an evaluation or a save."""
        start = time.monotonic()
        yield
        self.longest[what] = max(self.longest[what], time.monotonic() - start)

    def now(self, evaluates):
        """Whether to stop after this step; the same on every rank. evaluates: whether the next step has an evaluation."""
        need = self.longest["step"] + self.longest["save"] + (self.longest["evaluation"] if evaluates else 0.0)
        if not self.reason and self.limit and time.time() - self.start + need > self.limit:
            self.reason = f"--save-before-seconds {self.limit:g}"
        self.reason = next((r for r in parallel.gather([self.reason]) if r), None)
        return self.reason is not None

    def exit_code(self):
        """128 + the signal's number, as shells count; 0 for the limit."""
        return 128 + signal.Signals[self.reason] if self.reason in signal.Signals.__members__ else 0
