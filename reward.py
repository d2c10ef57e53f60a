r"""Reward of a completion: 1.0 right, 0.0 wrong, NaN = the sample leaves its group. `score` is the entry point.

Three kinds of reward:
  function      the user's own `FILE.py:function`, called as function(completion, row, truncated) on every sample: a finite
                number, or None for NaN. Anything else stops the run, an exception too: nobody should train on a broken reward.
  row["check"]  of a task that grades itself: check(answer) is 0 to 1. No answer, or a truncated one: 0.
  the rules     `grade` compares the answer with row["answer"]

Only the completion is graded, never prompt + completion (an answer echoed from the prompt would score). The rules, in order:

  1. gold       unusable -> NaN: never 1, and not a 0 that no completion can mend. `gold_problem` says why, so that the data
                loader can report it before training.
  2. truncated  -> 0: generation hit the token limit, the answer did not finish, even if a complete box stands in it.
  3. extract    the last \boxed{..} or \fbox{..} (\{ and \} are not braces), or `\boxed 2` as in the MATH data set. If the box
                opened last is never closed there is no answer, an earlier box is not a fallback. Without any box, the rest of
                the line after the last GSM8K `####`; without that, the last line that starts with `Answer:` (DAPO's prompts
                ask for it). A number is never guessed from prose. No answer -> 0.
  4. long       an answer above MAX_CHARS characters scores by string equality only; no parser sees it.
  5. integer    gold and answer both plain integers: compared as ints. 033 = 33, 1,234 = 1234, \$8,000 = 8000.
  6. text       gold of letters only, once \text{} is off (`Tuesday`, `(E)`): equality after folding case and space.
  7. the rest   math-verify (LaTeX -> sympy -> equal?), in a worker process. The verdict on a gold is cached.

Why a pool of processes. `\boxed{5^{5^{5^{5^5}}}}` keeps sympy busy for ever. math-verify's own timeout is a SIGALRM with a
Python handler: it works only in the main thread (elsewhere it raises, and callers score every answer 0), never inside one
long big-integer operation. The clock that always works is another process: the parent waits LIMIT seconds, not counting the
imports of the worker, then kills it, scores 0 and starts a new one. Each worker caps its address space at MEMORY, so that an
exploding expression dies alone. It imports only math-verify: no torch, no CUDA context, not the user's __main__. It ends on
EOF of its stdin; while it computes, a kernel alarm with the default action (death) covers a parent that was SIGKILLed. If it
dies, its answer is asked once more in a new one, as the death may have come from outside; killing two scores 0.

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
import base64
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import pickle
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import traceback
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
    stack = []  # matches of the open braces
    opened = last = None  # match of the box opened last; (start, end, start and end of the content) of the box closed last
    for match in TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        opened = match if kind else opened
        if kind in ("number", "letter"):
            last = (*match.span(), *match.span(kind))
        elif kind == "box" or token == "{":
            stack.append(match)
        elif token == "}" and stack and (box := stack.pop()).lastgroup:
            # The outer of two nested boxes closes last and decides, except that \boxed{\boxed{4}} just says 4
            start, end = box.end(), match.start()
            if last and last[0] >= start and not text[start:last[0]].strip() and not text[last[1]:end].strip():
                start, end = last[2:]
            last = (box.start(), match.end(), start, end)
    return opened is not None, text[last[2]:last[3]].strip() if opened and opened not in stack else None


def extract_answer(text):
    """The answer of a completion by rule 3, or None."""
    text = text or ""
    found, content = _last_box(text)
    if found:
        return content
    if "####" in text:
        return text.rpartition("####")[2].split("\n", 1)[0].strip()
    lines = re.findall(r"(?m)^Answer:[ \t]*(\S.*)$", text)
    return lines[-1].strip().strip("$").strip() if lines else None


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
        text = UNIT.sub("", TEXT.sub(r"\1", text) if TEXT.fullmatch(text) else text)
    return text


def _integer(text):
    text = text.replace("\u2212", "-").replace("\\!", "").replace("{,}", ",").replace("\\,", ",")
    match = INTEGER.fullmatch(text)
    return int(match.group(1) + match.group(2).replace(",", "")) if match else None


def _text(text):
    """The folded form of a text answer, or None if it is not letters only."""
    folded = "".join(TEXT.sub(r"\1", text).split()).casefold()
    folded = folded[1] if re.fullmatch(r"\(.\)", folded) else folded  # the choice (E) is E
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
    if gold_int is not None:
        target = str(gold_int)  # without commas and leading zeros
    # Equal strings are right even where sympy cannot compare them
    return float(answer == target or _ask(target, answer, limit or LIMIT) == "right")


def _bar(items, progress, total=None):
    from tqdm import tqdm  # here: the workers do without it

    return tqdm(items, total=total, desc="grading", leave=False, disable=None if progress else True)  # None: off a terminal


def grade_batch(completions, golds, truncated, limit=None, progress=False):
    """`grade` for each triple, in order, on all workers at once. `progress`: show a tqdm bar."""
    assert len(completions) == len(golds) == len(truncated), \
        f"lengths differ: {len(completions)} completions, {len(golds)} golds, {len(truncated)} truncated flags"
    threads = ThreadPoolExecutor(WORKERS)  # they only wait for their worker
    try:
        rewards = threads.map(functools.partial(grade, limit=limit), completions, golds, truncated)
        return list(_bar(rewards, progress, len(completions)))
    finally:
        threads.shutdown(cancel_futures=True)  # on Ctrl-C do not grade the rest first


# ----------------------------------------------------------------------------------------------------------------------
# Any reward: a user's function, a task that grades itself, or the rules above


def score(rows, completions, truncated, function=None, progress=False):
    """The reward of each completion as a float, NaN if excluded; rows[i] belongs to completions[i]."""
    samples = list(zip(rows, completions, truncated, strict=True))
    if function:
        name = f"reward function {getattr(function, '__name__', type(function).__name__)}, row"
        return [_call(f"{name} {row['id']}", function, text, row, cut) for row, text, cut in _bar(samples, progress)]
    plain = [(text, row["answer"], cut) for row, text, cut in samples if not row.get("check")]
    graded = iter(grade_batch(*([sample[i] for sample in plain] for i in range(3)), progress=progress))
    rewards = []
    for row, text, cut in samples:
        answer = extract_answer(text) if row.get("check") and not cut else None
        checked = _call(f"check of row {row['id']}", row["check"], answer) if answer else 0.0
        rewards.append(checked if row.get("check") else next(graded))
    return rewards


def check_task(name, settings, entry, answer):
    """The score of an answer text by a reasoning-gym task, in a worker: some tasks hand the answer to sympy or eval. The
    reference answer scores 1.0 without one; a hang, a crash or an answer that the task cannot read scores 0.0."""
    if answer is None:
        return 0.0
    if answer.strip() == str(entry["answer"]).strip():
        return 1.0
    task = {"task": name, "settings": settings, "entry": base64.b64encode(pickle.dumps(entry)).decode()}
    verdict = _ask(task, answer, LIMIT)
    return verdict if isinstance(verdict, float) else 0.0


def _call(name, function, *args):
    """function(*args) as a float, NaN for None."""
    try:
        value = function(*args)
    except (Exception, SystemExit) as error:
        raise UserError(f"{name}: {_failure(error)}") from error
    try:
        number = math.nan if value is None else value.__float__()  # float() would read a string, too
    except Exception:  # of whatever type the object likes
        number = math.inf
    if math.isinf(number):
        raise UserError(f"{name}: returned {value!r:.80}; return a finite number, or None to leave the sample out")
    return number


def _failure(error):
    """The exception in one line, after the line of the first file that is the user's on the way to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"]
    where = f"{os.path.basename(frames[0].filename)} line {frames[0].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}".rstrip(": ")  # a SyntaxError says its line itself


def load_function(spec):
    """The function that `FILE.py:function` names. Modules beside FILE.py can be imported while it loads, not later."""
    path, _, name = spec.rpartition(":")
    if not (path and name):
        raise UserError(f"reward function {spec!r}: write FILE.py:function")
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise UserError(f"reward function {spec}: there is no .py file {path}")
    module_spec = importlib.util.spec_from_file_location("reward_function", os.path.abspath(path))
    module = sys.modules["reward_function"] = importlib.util.module_from_spec(module_spec)  # dataclasses look it up there
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"reward function {spec}: {path} cannot be imported: {_failure(error)}") from error
    finally:
        sys.path.remove(folder)
    function = getattr(module, name, None)
    if function is None:
        found = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == "reward_function"]
        raise UserError(f"reward function {spec}: {path} has no {name!r}, only {', '.join(found) or 'no function at all'}")
    try:
        inspect.signature(function).bind("completion", {}, False)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward function {spec}: is called as {name}(completion, row, truncated), but: {error}") from error
    return function


# ----------------------------------------------------------------------------------------------------------------------
# The pool, seen from the parent


def _slots():
    """WORKERS slots, each an idle worker or None (not started). Last in, first out: a lone thread never starts a second."""
    slots = queue.LifoQueue()
    for _ in range(WORKERS):
        slots.put(None)
    return slots


_idle = _slots()
_started = set()  # all live workers, idle or busy, for close()


def _start():
    command, pipe = [sys.executable, THIS_FILE, "--worker", str(MEMORY)], subprocess.PIPE
    process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe)
    _started.add(process)
    try:
        _receive(process, START_LIMIT)
    except (EOFError, TimeoutError) as error:
        _stop(process)
        raise UserError("the math-verify worker did not start (its own error is above, if any); check that "
                        f"`{sys.executable} -c 'import math_verify'` works") from error
    return process


def _stop(process):
    """Kill and reap it (no zombie). Returns None, which is what its slot then holds."""
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    _started.discard(process)


def _receive(process, seconds):
    """The next JSON line, which comes whole, being shorter than PIPE_BUF. TimeoutError: late; EOFError: the worker is dead."""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise TimeoutError
    line = process.stdout.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def _ask(gold, answer, limit):
    """A worker's verdict: parsed / unparsed (of the gold, if answer is None), right / wrong, a task's score, timeout, crash."""
    idle = _idle
    worker, keep = idle.get(), False
    try:
        for _ in range(2):  # a second try if the worker died, see the module docstring
            if worker is not None and worker.poll() is not None:
                worker = _stop(worker)
            worker = worker or _start()
            try:
                worker.stdin.write(json.dumps([gold, answer, limit]).encode() + b"\n")
                verdict, keep = _receive(worker, limit)
                return verdict
            except TimeoutError:
                return "timeout"
            except (EOFError, BrokenPipeError):
                worker = _stop(worker)  # and go round with a new one
        return "crash"
    finally:
        # Also on KeyboardInterrupt: a worker that still owes a reply would hand it to the next answer
        idle.put(worker if keep or worker is None else _stop(worker))


@atexit.register
def close():
    """Kill and reap all workers. The next answer that needs one starts a new pool."""
    global _idle
    _idle = _slots()  # a new queue: in a forked child the lock of the old may be held by a thread that does not exist there
    for process in list(_started):
        _stop(process)


def _forget_after_fork():
    """In a forked child: close its ends of the pipes (else the workers see no EOF while it lives), leave the workers alone."""
    for process in _started:
        process.returncode = 0  # Popen then neither kills nor waits for it
    close()


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
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(THIS_FILE)]  # our files must not shadow a library's
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off: that is the point
    from math_verify import parse, verify

    def parsed(latex):  # [] if it cannot be parsed; math-verify swallows its own exceptions, MemoryError included
        return parse("\\boxed{" + latex + "}", fallback_mode="no_fallback", parsing_timeout=None)

    tasks = {}

    def task_score(gold, answer):
        import reasoning_gym  # only where a task asks for it

        key = json.dumps([gold["task"], gold["settings"]])
        tasks[key] = tasks.get(key) or reasoning_gym.create_dataset(gold["task"], seed=0, **gold["settings"])
        try:
            return float(tasks[key].score_answer(answer, pickle.loads(base64.b64decode(gold["entry"]))))
        except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
            return 0.0  # an answer that the task cannot read: prime_factorization raises on any that is not a number

    print('["ready", true]', file=replies, flush=True)
    for line in sys.stdin:
        gold, answer, limit = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit + 1)  # only an orphan lives to hear it
        if isinstance(gold, dict):
            verdict = task_score(gold, answer)
        elif answer is None:
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
