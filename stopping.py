"""Ending a run early without losing anything: SIGTERM, SIGINT (Ctrl-C), and a wall-clock limit (--save-before-seconds).

    with Stop(args.save_before_seconds) as stop:
        for step in ...:
            with stop.interruptible():       # sampling and grading: the weights are still the last step's
                ...
            ...                              # the updates: a signal now waits for the step's end
            if stop.now(seconds_of_this_step):
                save, leave

A signal while answers are sampled, which is most of a step, ends it at once (`Interrupted`): the step is thrown away and will
be sampled again after a resume, from the same prompts and seeds. During the updates the step is finished first. A second signal
ends the process on the spot, with what the last checkpoint holds.

The limit is for queues with a time limit: a run stops before the step that would not end in time, judged by the longest so far
and by the longest save.

Several processes: a signal reaches them at different moments, so that they agree at two points only, after sampling and at a
step's end (`now`), and stop together if any of them has got one. torchrun, under accelerate launch, passes SIGTERM on.
"""

import contextlib
import signal
import time

import parallel


class Interrupted(KeyboardInterrupt):
    """A signal came while a step could still be thrown away."""


class Stop:
    """Signal handlers while it is entered. `reason`: the signal's name, or the limit's flag, or None."""

    def __init__(self, limit=0.0):
        """limit: seconds of wall-clock time from now on, 0 = none."""
        self.limit, self.start, self.longest, self.saving = limit, time.monotonic(), 0.0, 0.0
        self.reason, self.safe, self.before = None, False, {}

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_signal(self, number, frame):
        if self.reason:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        if self.safe:
            raise Interrupted
        print(f"{self.reason}: the step is finished and saved first; once more to stop at once", flush=True)

    @contextlib.contextmanager
    def interruptible(self):
        """A signal inside raises Interrupted: at once with one process; with several at the end, on all of them."""
        self.safe = parallel.world() == 1
        try:
            if self.safe and self.reason:
                raise Interrupted
            yield
        finally:
            self.safe = False
        self.reason = next((r for r in parallel.gather([self.reason]) if r), None)
        if self.reason:
            raise Interrupted

    def now(self, seconds):
        """Whether to stop after a step that took `seconds`; the same on every rank."""
        self.longest = max(self.longest, seconds)
        if not self.reason and self.limit and time.monotonic() - self.start + self.longest + self.saving > self.limit:
            self.reason = f"--save-before-seconds {self.limit:g}"
        self.reason = next((r for r in parallel.gather([self.reason]) if r), None)
        return self.reason is not None

    def exit_code(self):
        """128 + the signal's number, as shells count; 0 for the limit."""
        return 128 + signal.Signals[self.reason] if self.reason in signal.Signals.__members__ else 0
