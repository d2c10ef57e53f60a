r"""Reward of a math completion: 1.0 right, 0.0 wrong, NaN when the gold answer itself is unusable.

Only the completion is graded, never prompt + completion (an answer echoed from the prompt would score). Rules, in order:

  1. gold       unusable -> NaN: the sample leaves its group. Never 1, and not a 0 that no completion can mend.
                `gold_problem` says why, so that the data loader can report it before training.
  2. truncated  -> 0: generation hit the token limit, the answer did not finish, even if a complete box stands in it.
  3. extract    the last \boxed{..} or \fbox{..} (braces counted, \{ and \} are not braces), or the form `\boxed 2` of
                the MATH data set. If the box opened last is never closed there is no answer: an earlier box is not a
                fallback. Without any box, the rest of the line after the last GSM8K `####`. A number is never guessed
                from prose. No answer -> 0.
  4. long       an answer above MAX_CHARS characters scores by string equality only; no parser sees it.
  5. integer    gold and answer both plain integers: compared as ints. 033 = 33, 1,234 = 1234, \$8,000 = 8000.
  6. text       gold of letters only, once \text{} is off (`Tuesday`, `(E)`): equality after folding case and space.
  7. the rest   math-verify (LaTeX -> sympy -> equal?), in a worker process.

Integer against integer and text never need a worker. Any other gold is parsed by a worker once; the verdict is cached.

Why a pool of processes. `\boxed{5^{5^{5^{5^5}}}}` keeps sympy busy for ever. math-verify's own timeout is a SIGALRM
with a Python handler: it works only in the main thread (elsewhere it raises, and callers score every answer 0), never
inside one long big-integer operation. The clock that always works is another process: the parent waits LIMIT seconds,
then kills the worker, scores 0 and starts a new one. Each worker caps its address space at MEMORY, so that an exploding
expression dies alone. It speaks JSON lines over pipes and imports only math-verify: no torch, no CUDA context, not the
user's __main__. Its imports are not charged to the answer: the parent first waits for a ready line. It ends on EOF of
its stdin; while it computes, a kernel alarm with the default action (death) covers a parent that was SIGKILLed. If a
worker dies, its answer is asked once more in a new one, as the death may have come from outside; an answer that kills
two workers scores 0.

Known limits (tests/test_reward.py pins them, so that a new math-verify that moves one is noticed):
  lenient  10 = 10_2 (the base is dropped). 1/2^98 = 1/2^99 (finite precision). 50\% = 0.5 = 50. Units are dropped, not
           compared: `5\text{ cm}^2`, `5 dollars`, `45^\circ` are right for 5, and so is `x=5`.
  strict   1/3 = 0.333333 but not 0.333; \sqrt{2} is not 1.414; \pi is not 3.14159; \pm 5 is not 5. Tuples are ordered,
           sets are not. A gold of letters only is text: for `x` the answer `y=x` is wrong, and `ab` is not `ba`.
  odd      1,234 is one integer, not a list of two, but x=1,234 is read as a list. Clock times (12:00) parse to nonsense.

Run:   python reward.py 'so \boxed{\sqrt{8}}' '2\sqrt{2}'       prints 1.0
Test:  python -m pytest tests/test_reward.py
"""

import atexit
import functools
import json
import logging
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from errors import UserError

LIMIT = 5.0  # wall-clock seconds a worker may spend on one answer
WORKERS = min(4, os.cpu_count() or 1)
MEMORY = 2 << 30  # bytes of address space per worker; about 70 MB are used once sympy is imported
MAX_CHARS = 1000  # longer answers are compared as strings, longer golds are unusable
START_LIMIT = 120.0  # seconds for a worker to import sympy (a cold network disk is slow)
THIS_FILE = os.path.abspath(__file__)  # taken at import: the caller may change directory later

# ----------------------------------------------------------------------------------------------------------------------
# Extraction: which characters are the answer

# `\\.` takes an escaped brace (or the start of any other command) in one step, so \{ and \} never reach the brace count.
# Without a brace, \boxed is a box only before a number or a letter that ends its formula; else it is a word of the prose.
TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s*(?P<number>[+-]?[0-9]+(?:[.,/][0-9]+)*)"
    r"|\\(?:boxed|fbox)\s+(?P<letter>[A-Za-z])(?=\s*(?:[$.]|\Z))|\\.|[{}]", re.DOTALL)


def _last_box(text):
    """(has a box, content of the last): None as content if the box opened last is not closed. One pass, linear time."""
    stack = []  # open braces: the match for a box, None for a plain brace
    opened = None  # start of the box opened last
    opened_closes = False
    last = None  # (start, end, content) of the box closed last
    for match in TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind in ("number", "letter"):
            opened, opened_closes = match.start(), True
            last = (match.start(), match.end(), match.group(kind))
        elif kind == "box":
            stack.append(match)
            opened, opened_closes = match.start(), False
        elif token == "{":
            stack.append(None)
        elif token == "}" and stack:
            box = stack.pop()
            if box is None:
                continue
            opened_closes = opened_closes or opened == box.start()
            # The outer of two nested boxes closes last and decides, except that \boxed{\boxed{4}} just says 4
            inner = last is not None and last[0] >= box.end()
            if inner and not text[box.end():last[0]].strip() and not text[last[1]:match.start()].strip():
                content = last[2]
            else:
                content = text[box.end():match.start()].strip()
            last = (box.start(), match.end(), content)
    if opened is None:
        return False, None
    return True, last[2] if opened_closes else None


def extract_answer(text):
    """The answer of a completion by rule 3, or None."""
    if not text:
        return None
    found, content = _last_box(text)
    if found:
        return content
    _, mark, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() if mark else None


# ----------------------------------------------------------------------------------------------------------------------
# Comparison without a worker

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# The dollar sign stands before or after the minus. Thousands come as 1,234, 1{,}234, 1\,234 or 1,\!234 (see _integer).
INTEGER = re.compile(r"(?:\\?\$\s*)?([+-]?)(?:\\?\$\s*)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
# math-verify drops \text{ cm}, but reads bare words as products of letters. Words only: `5 m` may be a product.
UNIT = re.compile(
    r"(?<=[0-9])\s*(?:dollars?|cents?|degrees?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|miles?|feet|foot"
    r"|inch(?:es)?|meters?|cm|mm|km|kg|mph|units?)(?:\^\{?[23]\}?)?\Z")


def _clean(text):
    """Take off what surrounds an answer and never changes its value: spaces, $..$, **..**, \\text{..}, a full stop, a unit."""
    previous = None
    while text != previous:
        previous = text
        text = text.strip().strip("*").rstrip(".")
        if len(text) > 2 and text[0] == text[-1] == "$" and text[-2] != "\\":
            text = text[1:-1]
        if whole := TEXT.fullmatch(text):
            text = whole.group(1)
        text = UNIT.sub("", text)
    return text


def _integer(text):
    text = text.replace("\u2212", "-").replace("\\!", "").replace("{,}", ",").replace("\\,", ",")
    match = INTEGER.fullmatch(text)
    return int(match.group(1) + match.group(2).replace(",", "")) if match else None


def _text(text):
    """The folded form of a text answer, or None if it is not letters only."""
    folded = "".join(TEXT.sub(r"\1", text).split()).casefold()
    if len(folded) == 3 and folded[0] == "(" and folded[2] == ")":  # the choice (E) is E
        folded = folded[1]
    return folded if folded.isalpha() else None


@functools.lru_cache(maxsize=1 << 17)
def _parse_problem(answer):
    """Why math-verify cannot use this gold, or None. Cached: a group shares its gold, and each epoch comes back to it."""
    problems = {"parsed": None, "unparsed": "cannot be parsed by math-verify", "crash": "kills the worker that parses it",
                "timeout": f"takes math-verify more than {LIMIT:g} s to parse"}
    return problems[_ask(answer, None, LIMIT)]


def _read_gold(gold):
    """(answer, None), or (None, why the gold is unusable)."""
    if not isinstance(gold, (str, int)):
        return None, f"is not a string but {type(gold).__name__}"
    gold = str(gold)
    found, answer = _last_box(gold)
    if found and answer is None:
        return None, "has a \\boxed{ that is never closed"
    if not found:
        answer = (extract_answer(gold) if "####" in gold else gold).strip()
        if _last_box("\\boxed{" + answer + "}") != (True, answer):
            return None, "has unbalanced braces"
    if len(answer) > MAX_CHARS:
        return None, f"is longer than {MAX_CHARS} characters"
    answer = _clean(answer)
    plain = _integer(answer) is not None or _text(answer) is not None
    problem = "is empty" if not answer else None if plain else _parse_problem(answer)
    return (None, problem) if problem else (answer, None)


def gold_problem(gold):
    """Why a gold is unusable, as the end of a sentence ("the gold of row 7 ..."), or None if it can be graded against."""
    return _read_gold(gold)[1]


def grade(completion, gold, truncated=False, limit=None):
    """1.0, 0.0 or NaN by the rules in the module docstring. `limit`: seconds for the answer, LIMIT if None."""
    target, problem = _read_gold(gold)
    if problem:
        return float("nan")
    answer = None if truncated else extract_answer(completion)
    if not answer:
        return 0.0
    if len(answer) > MAX_CHARS:
        return float(answer == target)
    answer = _clean(answer)
    gold_int, answer_int = _integer(target), _integer(answer)
    if gold_int is not None and answer_int is not None:
        return float(gold_int == answer_int)
    if _text(target) is not None:
        return float(_text(target) == _text(answer))
    if not answer:  # nothing but \text{} or $$
        return 0.0
    if gold_int is not None:
        target = str(gold_int)  # without commas and leading zeros
    # Equal strings are right even where sympy cannot compare them
    return float(answer == target or _ask(target, answer, limit or LIMIT) == "right")


def grade_batch(completions, golds, truncated, limit=None, progress=False):
    """`grade` for each triple, in order, on all workers at once. `progress`: show a tqdm bar."""
    assert len(completions) == len(golds) == len(truncated), \
        f"lengths differ: {len(completions)} completions, {len(golds)} golds, {len(truncated)} truncated flags"
    threads = ThreadPoolExecutor(WORKERS)  # they only wait for their worker
    try:
        rewards = threads.map(functools.partial(grade, limit=limit), completions, golds, truncated)
        if progress:
            from tqdm import tqdm  # only the evaluation draws a bar
            rewards = tqdm(rewards, total=len(completions), desc="grading", leave=False, disable=None)
        return list(rewards)
    finally:
        threads.shutdown(cancel_futures=True)  # on Ctrl-C do not grade the rest first


# ----------------------------------------------------------------------------------------------------------------------
# The pool, seen from the parent

_lock = threading.Lock()
_idle = None  # LIFO queue of WORKERS slots: an idle worker, or None for one not started yet; a lone thread starts only one
_started = set()  # all live workers, idle or busy, for close()


def _start():
    process = subprocess.Popen([sys.executable, THIS_FILE, "--worker", str(MEMORY)], bufsize=0,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _started.add(process)
    try:
        _receive(process, START_LIMIT)
    except BaseException as error:  # KeyboardInterrupt too: no half-started worker may stay behind
        _stop(process)
        if isinstance(error, (EOFError, TimeoutError)):
            raise UserError("the math-verify worker did not start (its own error is above, if any); check that "
                            f"`{sys.executable} -c 'import math_verify'` works") from error
        raise
    return process


def _stop(process):
    process.kill()
    process.wait()  # reap it: no zombie
    process.stdin.close()
    process.stdout.close()
    _started.discard(process)


def _receive(process, seconds):
    """The next JSON line. TimeoutError when it is late, EOFError when the worker is dead."""
    deadline, line = time.monotonic() + seconds, b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            raise EOFError
        line += chunk
    return json.loads(line)


def _ask(gold, answer, limit):
    """Verdict of a worker: parsed / unparsed (of the gold, when answer is None), right / wrong, timeout, crash."""
    global _idle
    with _lock:
        if _idle is None:
            _idle = queue.LifoQueue()
            for _ in range(WORKERS):
                _idle.put(None)
        idle = _idle
    worker, keep = idle.get(), False
    try:
        for _ in range(2):  # a second try if the worker died, see the module docstring
            if worker is not None and worker.poll() is not None:
                _stop(worker)
                worker = None
            worker = worker or _start()
            try:
                worker.stdin.write(json.dumps([gold, answer, limit]).encode() + b"\n")
                verdict, keep = _receive(worker, limit)
                return verdict
            except TimeoutError:
                return "timeout"
            except (EOFError, BrokenPipeError):
                _stop(worker)  # and go round with a new one
                worker = None
        return "crash"
    finally:
        # Also on KeyboardInterrupt: a worker that still owes a reply would hand it to the next answer
        if worker is not None and not keep:
            _stop(worker)
            worker = None
        idle.put(worker)


@atexit.register
def close():
    """Kill and reap all workers. The next answer that needs one starts a new pool."""
    global _idle
    with _lock:
        _idle = None
        for process in list(_started):
            _stop(process)


def _forget_after_fork():
    """In a forked child: the workers belong to the parent, and a lock may be held by a thread that does not exist here."""
    global _lock, _idle
    for process in _started:
        process.returncode = 0  # not our child: Popen must not wait for it
        process.stdin.close()  # or the worker never sees EOF while this child lives
        process.stdout.close()
    _started.clear()
    _lock, _idle = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_after_fork)

# ----------------------------------------------------------------------------------------------------------------------
# The worker process


def _worker(memory):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes the pipe
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land among the replies
    here = os.path.dirname(THIS_FILE)
    sys.path[:] = [path for path in sys.path if path != here]  # our file names must not shadow a library's
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off: that is the point
    from math_verify import parse, verify

    def parsed(latex):  # [] if it cannot be parsed; math-verify swallows its own exceptions, MemoryError included
        return parse("\\boxed{" + latex + "}", fallback_mode="no_fallback", parsing_timeout=None)

    print('["ready", true]', file=replies, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit + 1)  # only an orphan lives to hear it
        if answer is None:
            verdict = "parsed" if parsed(gold) else "unparsed"
        else:  # an answer that cannot be parsed is wrong by definition: verify(.., []) is False
            verdict = "right" if verify(parsed(gold), parsed(answer), timeout_seconds=None) else "wrong"
        signal.setitimer(signal.ITIMER_REAL, 0)
        # sympy's caches grow: retire before they, and not the expression, hit the cap and turn right answers into wrong ones
        with open("/proc/self/statm") as statm:
            keep = int(statm.read().split()[0]) * resource.getpagesize() < memory / 2
        print(json.dumps([verdict, keep]), file=replies, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(int(sys.argv[2]))
    else:
        print(grade(*sys.argv[1:3]))
