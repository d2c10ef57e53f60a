r"""python -m pytest tests/test_reward.py        the fuzz, minutes long: python -m pytest -m slow tests/test_reward.py"""

import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import reward
from errors import UserError
from reward import extract_answer, gold_problem, grade, grade_batch

ROOT = Path(reward.__file__).parent
TOWER = r"\boxed{5^{5^{5^{5^5}}}}"
CASES = [json.loads(line) for line in (Path(__file__).parent / "reward_cases.jsonl").read_text().splitlines()]
HARD = (r"\boxed{\sqrt{8}}", r"2\sqrt{2}")  # right, and only sympy can tell


def boxed(answer, gold, **kwargs):
    return grade("so " + r"\boxed{" + answer + "}", gold, **kwargs)


def worker_pids():
    return {process.pid for process in reward._started}


def gone(pid):
    """No such process, or only its exit status is left (then the adopting init is slow)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases(case):
    assert grade(case["completion"], case["gold"], case["truncated"], limit=1) == case["reward"]


def test_there_are_37_cases():
    assert len(CASES) == 37 and sum(case["reward"] for case in CASES) == 24


@pytest.mark.parametrize("text, answer", [
    (None, None),
    ("", None),
    ("The total is 72 clips, altogether.", None),
    (r"\boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{2,1\}}", r"\{2,1\}"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),  # a lone escaped brace
    (r"\fbox{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"$\boxed 2$", "2"),
    (r"$\boxed2$", "2"),
    (r"\boxed -12.5 units", "-12.5"),
    (r"the answer is $\boxed E$.", "E"),
    (r"I will use \boxed notation. \boxed{4} is the value.", "4"),
    (r"\boxed{4} is the value, written with \boxed as you asked", "4"),
    (r"\boxed", None),
    (r"\boxed{4} hmm, so \boxed{", None),
    (r"\boxed{4} hmm, so \boxed{\frac{1}{2}", None),
    (r"the brace { of a set, then \boxed{4}", "4"),
    (r"a } too many, then \boxed{4}", "4"),
    (r"\boxed{ was left open, but \boxed{4}", "4"),
    (r"\boxed{\boxed{4}}", "4"),
    (r"\boxed{ \fbox{ \boxed 4 } }", "4"),
    (r"\boxed{x = \boxed{4}}", r"x = \boxed{4}"),
    (r"\boxed{}", ""),
    ("24 + 48 = 72\n#### 72\n", "72"),
    ("#### 1\n#### 2 \nmore", "2"),
    ("#### 1 \\boxed{3}", "3"),
    ("####", ""),
    (r"\boxed{1} \\boxed", "1"),
])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_extraction_is_linear_in_a_degenerate_completion():
    """100,000 boxes opened, then as many nested and closed: a scan per box would take minutes."""
    start = time.monotonic()
    assert extract_answer(r"\boxed{" * 100_000) is None
    assert extract_answer(r"\boxed{" * 100_000 + "4" + "}" * 100_000) == "4"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("answer, gold, right", [
    ("033", "33", 1),
    ("33", "033", 1),
    ("711", "11", 0),
    ("016", "16", 1),
    ("1,234", "1234", 1),
    (r"1{,}234", "1,234", 1),
    (r"1,\!234", "1234", 1),
    (r"1\,234", "1234", 1),
    (r"\$8,000", "8000", 1),
    (r"-\$5", "-5", 1),
    ("5", "#### -5", 0),
    ("-5", "He owes 10 - 5 = 5.\n#### -5", 1),
    ("\u22125", "-5", 1),
    ("+5", "5", 1),
    ("$5$", r"$\boxed{5}$", 1),
    (r"\text{13}", "13", 1),
    ("13.", r"\text{13}", 1),
    ("**73**", "73", 1),
    ("73", "**73**", 1),
    ("5 dollars", "5", 1),
    ("5 cm^2", "5", 1),
    ("5", 5, 1),
    ("tuesday", "Tuesday", 1),
    (r"\text{New  york}", "New York", 1),
    (r"\textbf{(E)}", "E", 1),
    ("E", r"\text{(E)}", 1),
    ("Monday", "Tuesday", 0),
    ("yadseut", "Tuesday", 0),  # the product of the same letters
    (r"\text{}", "Tuesday", 0),
    ("12345678901234567890123", "12345678901234567890124", 0),  # equal as floats
])
def test_integer_and_text_answers_need_no_worker(answer, gold, right, monkeypatch):
    monkeypatch.setattr(reward, "_ask", None)  # calling it would raise
    assert boxed(answer, gold) == right


def test_integers_never_start_the_pool():
    reward.close()
    golds = [str(i) for i in range(2000)]
    assert grade_batch([rf"\boxed{{{i:,}}}" for i in range(2000)], golds, [False] * 2000) == [1.0] * 2000
    assert gold_problem("#### 1,234") is None and gold_problem("Tuesday") is None
    assert reward._started == set()


@pytest.mark.parametrize("answer, gold, right", [
    ("1/2", r"\dfrac{1}{2}", 1),
    ("0.5", "1/2", 1),
    ("1/3", r"\dfrac{9}{7}", 0),
    ("5.0", "5", 1),
    ("x = 5", "5", 1),
    ("5", "x=5", 1),
    (r"x = \boxed{5}", "5", 1),
    ("1,234.50", "1234.5", 1),
    ("1.234", "1234", 0),
    ("12,34", "1234", 0),
    ("1,2", "1", 0),
    ("1", "1,2", 0),
    ("$1331$ and $1728$", "1728", 0),
    (r"\text{}", "1/2", 0),
    (r"5\text{ dollars}", "5", 1),
    (r"\{2,1\}", r"\{1,2\}", 1),
    ("(2,1)", "(1,2)", 0),
    (r"\frac{1}{", "1/2", 0),
    (r"\frac{}{}", "1/2", 0),
    (r"\{", "1/2", 0),
])
def test_math_answers(answer, gold, right):
    assert boxed(answer, gold) == right


@pytest.mark.parametrize("answer, gold, right", [
    ("10_2", "10", 1),  # lenient: false positives
    ("10", "10_2", 1),
    ("1/2^{99}", "1/2^{98}", 1),
    (r"50\%", "0.5", 1),
    (r"50\%", "50", 1),
    ("50", r"50\%", 1),
    (r"5\text{ km}", r"5\text{ cm}", 1),
    (r"45^\circ", "45", 1),
    ("0.333", "1/3", 0),  # strict
    ("0.333333", "1/3", 1),
    ("1.414", r"\sqrt{2}", 0),
    ("3.14159", r"\pi", 0),
    (r"\pm 5", "5", 0),
    ("y=x", "x", 0),
    ("ba", "ab", 0),
    ("x=1,234", "1234", 0),  # odd
    (r"-5", r"\pm 5", 0),
    ("12:01", "12:00", 0),
])
def test_known_limits_are_as_documented(answer, gold, right):
    assert boxed(answer, gold) == right


@pytest.mark.parametrize("gold, reason", [
    ("", "empty"),
    ("  ", "empty"),
    (r"\boxed{}", "empty"),
    ("####", "empty"),
    (r"\boxed{4} and \boxed{", "never closed"),
    (r"\frac{1}{2", "unbalanced"),
    ("1}{2", "unbalanced"),
    ("???", "cannot be parsed"),
    (r"\frac{1}{}", "cannot be parsed"),
    ("1" * 1001, "longer than 1000"),
    (None, "NoneType"),
    (1.5, "float"),
    (["70"], "list"),
])
def test_unusable_gold_is_nan_even_for_an_equal_or_truncated_answer(gold, reason):
    assert reason in gold_problem(gold)
    for completion in (rf"\boxed{{{gold}}}", "", None, r"\boxed{1}"):
        assert math.isnan(grade(completion, gold))
        assert math.isnan(grade(completion, gold, truncated=True))


def test_usable_golds_have_no_problem():
    for gold in ("1/2", r"\dfrac{9}{7}", "Tuesday", r"\boxed{2}", r"\boxed 2", "a\n#### 1,234", "x^2+1", "(0,1)", "5 cm", 7):
        assert gold_problem(gold) is None


def test_no_answer_is_wrong():
    for completion in (None, "", r"\boxed{}", "7", "The total is 7, altogether.", r"\boxed{7} or \boxed{}"):
        assert grade(completion, "7") == 0.0
    assert grade(r"\boxed{5} \boxed{6} \boxed{7} \boxed{8}", "7") == 0.0  # every guess in a box of its own


def test_truncated_is_wrong():
    assert grade(r"\boxed{4}", "4", truncated=True) == 0.0
    assert grade(*HARD, truncated=True) == 0.0


def test_long_answer_is_a_string_comparison():
    one = "+".join(["0"] * 600)  # sympy would say 0
    start = time.monotonic()
    assert boxed(one, "0") == 0.0 and boxed("0" * 1001, "0") == 0.0
    assert time.monotonic() - start < 0.2


def test_grade_batch_keeps_the_order():
    answers = list(range(60))
    random.Random(0).shuffle(answers)
    completions = [rf"\boxed{{\frac{{{2 * a}}}{{2}} }}" if a % 2 else rf"\boxed{{{a}}}" for a in answers]
    golds = [str(a if a % 3 else a + 1) for a in answers]
    truncated = [a % 5 == 0 for a in answers]
    want = [float(a % 3 != 0 and a % 5 != 0) for a in answers]
    assert grade_batch(completions, golds, truncated) == want
    assert len(worker_pids()) <= reward.WORKERS
    assert grade_batch([], [], []) == []
    with pytest.raises(AssertionError, match="lengths differ"):
        grade_batch(["a"], ["1", "2"], [False])


def test_progress_draws_a_bar_on_a_terminal_only(capsys, monkeypatch):
    assert grade_batch([r"\boxed{1}"] * 3, ["1"] * 3, [False] * 3, progress=True) == [1.0] * 3
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert grade_batch([r"\boxed{1}"] * 3, ["1"] * 3, [False] * 3, progress=True) == [1.0] * 3
    assert "grading" in capsys.readouterr().err


# --- score: any reward -----------------------------------------------------------------------------------------------


def rows_of(*answers, **more):
    return [{"prompt": r"Say \boxed{7}.", "answer": answer, "id": 11 + i, **more} for i, answer in enumerate(answers)]


def test_score_grades_completions_and_never_the_prompt():
    texts = [r"\boxed{7}", "no box here", r"\boxed{\frac{2}{4}}", r"\boxed{7}", r"\boxed{7}"]
    got = reward.score(rows_of("7", "7", "1/2", "7", ""), texts, [False, False, False, True, False])
    assert got[:4] == [1.0, 0.0, 1.0, 0.0] and math.isnan(got[4])
    assert reward.score([], [], []) == reward.score([], [], [], function=len) == []
    with pytest.raises(ValueError, match="shorter"):
        reward.score(rows_of("7", "7"), ["a"], [False, False])


@pytest.mark.parametrize("value, want", [
    (0.25, 0.25), (-3, -3.0), (True, 1.0), (False, 0.0), (None, None), (math.nan, None), (torch.tensor([[0.5]]), 0.5),
    (torch.tensor(2), 2.0), (Fraction(1, 4), 0.25),
])
def test_value_of_a_function(value, want):
    (got,) = reward.score(rows_of("7"), ["a"], [False], function=lambda text, row, truncated: value)
    assert type(got) is float and (math.isnan(got) if want is None else got == want)


@pytest.mark.parametrize("value, shown", [
    (math.inf, "inf"), (-math.inf, "-inf"), ("1.0", "'1.0'"), (b"1", "b'1'"), ([1.0], "[1.0]"), (torch.ones(2), "tensor"),
    (10**400, "1000"), (1j, "1j"), ((1, 0), "(1, 0)"), (float, "<class 'float'>"), (torch.tensor(-math.inf), "tensor"),
])
def test_value_that_is_no_reward_is_a_user_error(value, shown):
    def broken(text, row, truncated):
        return value if row["id"] == 12 else 1

    with pytest.raises(UserError, match=f"reward function broken, row 12: returned {re.escape(shown)}.*finite number, or None"):
        reward.score(rows_of("7", "8"), ["a", "b"], [False] * 2, function=broken)


def test_function_sees_completion_row_and_truncated_of_every_sample_in_order():
    rows, seen = rows_of("7", "", "x", check=lambda answer: 1 / 0), []  # the function comes before the check and the rules

    def record(*args):
        seen.append(args)
        return len(seen)

    assert reward.score(rows, ["a", "b", None], [False, True, False], function=record, progress=True) == [1.0, 2.0, 3.0]
    assert seen == [("a", rows[0], False), ("b", rows[1], True), (None, rows[2], False)]


def test_exception_of_a_function_is_a_user_error_with_its_line():
    def helper(row):
        return {}[row["answer"]]

    def broken(text, row, truncated):
        return 1.0 if row["id"] == 11 else helper(row)

    line = broken.__code__.co_firstlineno + 1
    want = f"reward function broken, row 12: test_reward.py line {line}: KeyError: 'eight'"
    with pytest.raises(UserError, match=f"^{want}$") as caught:
        reward.score(rows_of("7", "eight"), ["a", "b"], [False] * 2, function=broken)
    assert isinstance(caught.value.__cause__, KeyError)
    for error in (SystemExit(0), AssertionError(), UserError("his own")):  # none may end the run unexplained
        with pytest.raises(UserError, match=f"row 11: .*{type(error).__name__}"):
            reward.score(rows_of("7"), ["a"], [False], function=mock.Mock(side_effect=error))
    with pytest.raises(KeyboardInterrupt):
        reward.score(rows_of("7"), ["a"], [False], function=mock.Mock(side_effect=KeyboardInterrupt))


def test_check_of_a_row_replaces_the_rules():
    seen = []

    def check(answer):
        seen.append(answer)
        return {"7": 0.75, "odd": None}.get(answer, 0)

    rows = rows_of("1", "1", "1", "1", "1", check=check) + rows_of("7", "8") + rows_of("7", check=None)
    texts = [r"\boxed{7}", "no box: 7", r"\boxed{7}", r"\boxed{}", r"\boxed{ odd }", r"\boxed{7}", r"\boxed{7}", r"\boxed{7}"]
    got = reward.score(rows, texts, [False, False, True, False, False, False, False, False])
    assert got[:4] == [0.75, 0.0, 0.0, 0.0] and math.isnan(got[4]) and got[5:] == [1.0, 0.0, 1.0]
    assert seen == ["7", "odd"]
    with pytest.raises(UserError, match="check of row 11: test_reward.py line .*ZeroDivisionError"):
        reward.score(rows_of("7", check=lambda answer: 1 / 0), [r"\boxed{7}"], [False])
    with pytest.raises(UserError, match="check of row 11: returned 'yes'"):
        reward.score(rows_of("7", check=lambda answer: "yes"), [r"\boxed{7}"], [False])


# --- load_function ---------------------------------------------------------------------------------------------------

MINE = """
from __future__ import annotations
import dataclasses
from sibling import POINTS

@dataclasses.dataclass
class Settings:
    points: float = POINTS

def mine(completion, row, truncated):
    return Settings().points * (row["answer"] in completion)

def defaults(completion, row, truncated=False, *, weight=1): return 1
def anything(*args): return 1
def two(completion, row): return 1
def four(completion, row, truncated, extra): return 1
def keyword(completion, row, truncated, *, needed): return 1
class Callable:
    def __call__(self, completion, row, truncated): return 1
callable_object, number = Callable(), 3
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "sibling.py").write_text("POINTS = 2.5")
    (tmp_path / "mine.py").write_text(MINE)
    yield str(tmp_path / "mine.py")
    sys.modules.pop("sibling", None)


def test_load_function_from_a_file_and_its_folder(mine, monkeypatch):
    path = sys.path[:]
    function = reward.load_function(mine + ":mine")
    assert reward.score(rows_of("7", "8"), ["it is 7"] * 2, [False] * 2, function=function) == [2.5, 0.0]
    for name in ("defaults", "anything", "callable_object"):
        assert reward.score(rows_of("7"), [""], [False], function=reward.load_function(f"{mine}:{name}")) == [1.0]
    assert sys.path == path
    monkeypatch.chdir(Path(mine).parent)
    assert reward.load_function("mine.py:mine")("it is 7", {"answer": "7"}, False) == 2.5


@pytest.mark.parametrize("spec, message", [
    ("mine.py", "'mine.py': write FILE.py:function"),
    ("mine.py:", "'mine.py:': write FILE.py:function"),
    (":mine", "':mine': write FILE.py:function"),
    ("other.py:mine", "there is no .py file other.py"),
    (".:mine", r"there is no .py file \."),
    ("folder.py:mine", r"there is no .py file folder.py"),
    ("text.txt:mine", "there is no .py file text.txt"),
    ("mine.py:yours", "mine.py has no 'yours', only Settings, mine, defaults, anything, two, four, keyword, Callable"),
    ("empty.py:mine", "empty.py has no 'mine', only no function at all"),
    ("mine.py:two", "two.completion, row, truncated., but: too many positional arguments"),
    ("mine.py:four", "but: missing a required argument: 'extra'"),
    ("mine.py:keyword", "but: missing a required argument: 'needed'"),
    ("mine.py:number", "but: 3 is not a callable object"),
    ("syntax.py:mine", r"syntax.py cannot be imported: SyntaxError: .*line 3"),
    ("fails.py:mine", "fails.py cannot be imported: fails.py line 2: ZeroDivisionError: division by zero"),
    ("missing.py:mine", "missing.py line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("exits.py:mine", "exits.py cannot be imported: exits.py line 1: SystemExit: 0"),
    ("null.py:mine", "null.py cannot be imported: .*null bytes"),
])
def test_load_function_mistakes(spec, message, mine, monkeypatch):
    monkeypatch.chdir(Path(mine).parent)
    files = {"empty": "", "syntax": "x = 1\n\ndef mine(:\n", "fails": "\nx = 1 / 0", "missing": "import no_such_module",
             "exits": "raise SystemExit(0)", "null": "\0", "folder.py/x": ""}
    Path("folder.py").mkdir()
    for name, text in files.items():
        Path(name + ".py").write_text(text)
    Path("text.txt").write_text(MINE)
    path = sys.path[:]
    with pytest.raises(UserError, match=f"^reward function .*{message}"):
        reward.load_function(spec)
    assert sys.path == path


# --- the pool --------------------------------------------------------------------------------------------------------


def test_tower_costs_its_limit_and_its_worker_and_nothing_else():
    assert grade(*HARD) == 1.0
    before = worker_pids()
    start = time.monotonic()
    assert grade(TOWER, "3", limit=0.5) == 0.0
    assert 0.5 <= time.monotonic() - start < 2.5
    lost = before - worker_pids()
    assert len(lost) == 1 and gone(lost.pop())
    assert grade(*HARD) == 1.0


def test_default_limit_is_five_seconds(monkeypatch):
    assert reward.LIMIT == 5 and grade(*HARD) == 1.0
    monkeypatch.setattr(reward, "LIMIT", 0.5)
    start = time.monotonic()
    assert grade(TOWER, "3") == 0.0
    assert 0.5 <= time.monotonic() - start < 2.5


def test_gold_that_hangs_is_unusable(monkeypatch):
    monkeypatch.setattr(reward, "_ask", lambda gold, answer, limit: "timeout")
    assert "more than 5 s" in gold_problem(r"\sqrt{77}")
    assert math.isnan(grade(r"\boxed{\sqrt{77}}", r"\sqrt{77}"))
    reward._parse_problem.cache_clear()


def test_thread():
    """A timeout by signal raises in any thread but the main one."""
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(grade(*HARD)))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_several_threads_each_get_their_own_answer():
    def one(i):
        gold = f"{i + 1}/7"
        return grade(rf"\boxed{{\frac{{{i + 1 + i % 2}}}{{7}}}}", gold)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(40))) == [float(i % 2 == 0) for i in range(40)]


def test_forked_child_builds_its_own_pool():
    assert grade(*HARD) == 1.0
    parents = worker_pids()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child():
        results.put((len(worker_pids()), grade(*HARD), boxed("5.0", "5"), sorted(worker_pids())))
        reward.close()

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    inherited, first, second, pids = results.get()
    assert inherited == 0 and first == second == 1.0
    assert pids and not parents & set(pids) and all(gone(pid) for pid in pids)
    assert grade(*HARD) == 1.0 and worker_pids() == parents


def test_two_processes_at_once():
    """Both start, hang, kill and restart workers at the same time; each gets its own verdicts."""
    script = ("import reward\n"
              "answers = ['\\\\boxed{%d/7}' % i for i in range(20)]\n"
              "golds = ['%d/7' % (i + i % 2) for i in range(20)]\n"
              f"answers[4:4] = [r'{TOWER}']; golds[4:4] = ['3']\n"
              "print(*map(int, reward.grade_batch(answers, golds, [False] * 21, limit=0.5)))\n")
    command = [sys.executable, "-c", script]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    want = [1 - i % 2 for i in range(20)]
    want[4:4] = [0]
    for process in both:
        assert process.communicate(timeout=60)[0].split() == [str(verdict) for verdict in want]


def test_fork_while_another_thread_holds_the_locks():
    """The child must neither wait for them nor touch the parent's worker."""
    assert grade(*HARD) == 1.0
    worker = next(iter(reward._started))
    with reward._idle.mutex, worker._waitpid_lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if reward._idle.mutex.acquire(timeout=1) else 1)
    ended = wait_until(lambda: gone(pid), 5)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert worker.poll() is None


def test_worker_killed_while_idle_is_replaced():
    assert grade(*HARD) == 1.0
    pids = worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert grade(*HARD) == 1.0
    assert worker_pids() - pids


def test_worker_killed_while_busy_gets_one_more_try():
    reward.close()
    assert grade(*HARD) == 1.0
    (first,) = worker_pids()
    killer = threading.Timer(0.3, os.kill, (first, signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    assert grade(TOWER, "3", limit=1) == 0.0
    killer.join()
    assert time.monotonic() - start > 1.3  # 0.3 in the killed worker, 1 in the next
    assert grade(*HARD) == 1.0


def test_answer_that_crashes_two_workers_is_wrong(monkeypatch):
    """A worker that starts, then dies of its first answer."""
    reward.close()
    monkeypatch.setattr(reward, "_parse_problem", lambda answer: None)
    real, started = subprocess.Popen, []

    def dies(command, **kwargs):
        started.append(1)
        script = "import os, sys; print('[0, 0]', flush=True); sys.stdin.readline(); os.kill(os.getpid(), 11)"
        return real([sys.executable, "-c", script], **kwargs)

    monkeypatch.setattr(reward.subprocess, "Popen", dies)
    assert grade(*HARD) == 0.0 and len(started) == 2
    monkeypatch.undo()
    assert grade(*HARD) == 1.0


def test_worker_that_cannot_start_is_a_user_error(monkeypatch):
    reward.close()
    monkeypatch.setattr(reward.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="did not start"):
        grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
    monkeypatch.undo()
    assert grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}") == 1.0


def test_exploding_memory_ends_in_its_worker(monkeypatch):
    """2^(10^10) needs more than a gigabyte and minutes; the cap ends it well before the limit of 30 s."""
    reward.close()
    monkeypatch.setattr(reward, "MEMORY", 120 << 20)
    start = time.monotonic()
    assert grade(r"\boxed{2^{10^{10}}}", "3", limit=30) == 0.0
    assert time.monotonic() - start < 20
    assert grade(*HARD) == 1.0


def test_workers_have_the_default_memory_cap():
    reward.close()
    assert grade(*HARD) == 1.0
    (pid,) = worker_pids()
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max address space")]
    assert line.split()[3:5] == [str(2 << 30)] * 2


def test_worker_retires_before_its_caches_reach_the_cap(monkeypatch):
    reward.close()
    monkeypatch.setattr(reward, "MEMORY", 110 << 20)  # sympy alone is above half of it
    assert grade(r"\boxed{\sqrt{20}}", r"2\sqrt{5}") == 1.0
    assert worker_pids() == set()


def test_interrupted_answer_does_not_leak_into_the_next():
    """Ctrl-C while a worker computes: its late reply must not be taken for the next answer's."""
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            grade(TOWER, "3", limit=20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert grade(*HARD) == 1.0


def test_close_reaps_and_the_pool_comes_back():
    assert grade(*HARD) == 1.0
    pids = worker_pids()
    reward.close()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)  # not even a zombie
    assert grade(*HARD) == 1.0


def test_worker_imports_no_torch_not_our_main_and_none_of_our_files(tmp_path):
    for name in ("reward.py", "errors.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "sympy.py").write_text("raise ImportError('a file of ours with the name of a library')")
    script = tmp_path / "user.py"
    script.write_text("import os, sys, reward\n"
                      "print('main runs', flush=True)\n"
                      "assert reward.grade(*sys.argv[1:]) == 1.0\n"
                      "(worker,) = reward._started\n"
                      "maps = open(f'/proc/{worker.pid}/maps').read()\n"
                      "print(worker.pid, 'torch' in maps, flush=True)\n")
    out = subprocess.run([sys.executable, script, *HARD], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and out.stderr == ""
    first, second = out.stdout.splitlines()  # "main runs" once: no worker ran it again
    pid, torch = second.split()
    assert first == "main runs" and torch == "False"
    assert gone(pid)  # atexit closed the pool


def test_worker_dies_with_a_killed_parent_even_when_busy():
    script = ("import reward, threading, time\n"
              "reward.grade(r'\\boxed{\\sqrt{8}}', r'2\\sqrt{2}')\n"
              "print(*[process.pid for process in reward._started], flush=True)\n"
              f"reward.grade(r'{TOWER}', '3', limit=1.5)\n")
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = parent.stdout.readline().strip()
    time.sleep(0.5)
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: gone(pid), 4)


def test_idle_worker_dies_with_a_killed_parent():
    script = ("import os, reward\n"
              "reward.grade(r'\\boxed{\\sqrt{8}}', r'2\\sqrt{2}')\n"
              "print(*[process.pid for process in reward._started], flush=True)\n"
              "os.kill(os.getpid(), 9)\n")
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode == -9 and wait_until(lambda: gone(out.stdout.strip()), 2)


PIECES = [
    "\\boxed{", "\\boxed ", "\\fbox{", "{", "}", "\\{", "\\}", "####", "\n", "$", "\\", "\\frac", "\\sqrt", "\\text{",
    "^", "_", "1", "23", "1,234", "0.5", "x", "+", "-", "=", "(", ",", ")", "%", "\\pi", "Tuesday", " ", "\u2212", "\u0663",
    "\ud800", "\0",
]
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=10).map("".join))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(completion=st.one_of(TEXTS, TEXTS.map(lambda text: r"\boxed{" + text + "}")), gold=TEXTS, truncated=st.booleans())
def test_grade_never_raises(completion, gold, truncated):
    got = grade(completion, gold, truncated, limit=1)
    if gold_problem(gold):
        assert math.isnan(got)
    else:
        assert got in (0.0, 1.0) and not (truncated and got)


# --- the fuzz, minutes long ------------------------------------------------------------------------------------------

FUZZ_GOLDS = ["7", "1,234", "Tuesday", r"\frac{1}{2}", r"2\sqrt{2}", r"\{1,2\}", "(0,1]", "x^2+1", "", r"\frac{1}{"]
NUMBERS = st.sampled_from(["0", "1", "2", "7", "0.5", "-3", "1,234", "1e99", "x", r"\pi", r"\infty", "9" * 40, "", "\u0664"])
SHAPES = [  # nested at random; no power of a power and no factorial of a big number: those are in `expensive`
    "{}+{}", "{}-{}", "{}{}", r"\frac{{{}}}{{{}}}", r"\sqrt[{}]{{{}}}", r"\left({},{}\right]", r"[{},{})", r"\{{{},{}\}}",
    r"\left\{{{}\right.{}", r"\begin{{pmatrix}}{}&{}\\1&2\end{{pmatrix}}", r"\begin{{cases}}{}\\{}\end{{cases}}",
    "{}={}", r"{}\le {}", r"{}\cup{}", r"\text{{{}}}{}", "{}_{}", r"\binom{{{}}}{{{}}}", r"|{}|\pm{}", r"\overline{{{}}}{}",
    r"\log_{{{}}}{}", r"{}\%\circ{}", r"{}\text{{ and }}{}", r"\int_{}^{}x", r"\sin{}\cdot{}", "${}$ ${}$",
]
LATEX = st.recursive(NUMBERS, lambda parts: st.builds(str.format, st.sampled_from(SHAPES), parts, parts), max_leaves=6)
RIGHT = st.sampled_from(["7", "1234", "tuesday", "0.5", r"\frac{2}{4}", r"\sqrt{8}", r"\{2,1\}", r"\left(0,1\right]", "1+x^2"])
REPEATED = st.builds(
    lambda text, count, end: text * count + end,
    st.sampled_from(["\\boxed{", "\\boxed{7}", "{", "}", "{}", "\\{", "\\left(", "\\frac{", "(", "-", "9", "1,", "\0", "####\n",
                     "\\sqrt{", "x+", "\u202e\u05d0", "\\boxed{a", "^{2}", "\\\\", "$"]),
    st.sampled_from([3, 30, 300, 3000, 30000]),
    st.sampled_from(["", "}", "7}", "}" * 300, "}" * 30000, "\\boxed{7}", "\\boxed"]))
RANDOM = st.text(max_size=40)
PIECES_JOINED = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
INSIDE = st.one_of(RIGHT, RIGHT, LATEX, LATEX, LATEX, RANDOM, PIECES_JOINED, REPEATED)
BOX = st.sampled_from([r"\boxed{"] * 5 + [r"\fbox{", r"\boxed {", r"{\boxed{", ""])
CHEAP = st.tuples(RANDOM, BOX, INSIDE, st.sampled_from(["}", "}.", "}$ ok", "}\n"] * 2 + [""])).map("".join)


def expensive(count):
    """Answers that keep sympy busy, or out of memory: towers, factorials, huge sums and roots."""
    shapes = [r"{0}^{{{0}^{{{0}^{{{0}^{0}}}}}}}", r"{0}^{{10^{{{0}0}}}}", "(({0}!)!)!", r"\binom{{10^{{{0}0}}}}{{10^{{{0}}}}}",
              r"\sqrt{{{0}^{{{0}^{{{0}^{{{0}}}}}}}}}", r"(x+{0})^{{10^{0}}}", r"{0}^{{99999999}}-{0}^{{99999998}}",
              r"\frac{{1}}{{{0}^{{{0}^{{{0}^{{{0}}}}}}}}}"]
    return [r"so \boxed{" + shapes[i % len(shapes)].format(5 + i // len(shapes)) + "}" for i in range(count)]


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_fuzz(monkeypatch):
    """10,000 hostile completions on 2 workers: a verdict for each, in time, and a parent that does not grow."""
    limit, cases, starting, real = 0.5, [], threading.local(), reward._start

    @settings(max_examples=9_940, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(st.tuples(CHEAP, st.sampled_from(FUZZ_GOLDS), st.sampled_from([False] * 9 + [True])))
    def collect(case):
        cases.append(case)

    def start():
        begin = time.monotonic()
        try:
            return real()
        finally:
            starting.seconds += time.monotonic() - begin

    def one(case):
        starting.seconds, begin = 0, time.monotonic()
        try:
            got = grade(*case, limit=limit)
        except Exception as error:
            raise AssertionError(f"grade{case!r:.500} raised") from error
        return got, time.monotonic() - begin - starting.seconds

    collect()
    cases += [(text, ("7", "x^2+1")[i % 2], False) for i, text in enumerate(expensive(60))]
    random.Random(0).shuffle(cases)
    monkeypatch.setattr(reward, "WORKERS", 2)
    monkeypatch.setattr(reward, "_start", start)
    reward.close()
    starting.seconds = 0
    unusable = [gold for gold in FUZZ_GOLDS if gold_problem(gold)]
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(one, cases[:2000]))
        before = resident()
        results += threads.map(one, cases[2000:])
    seconds, growth = time.monotonic() - begin, resident() - before
    late = [result[1] for result in results if result[1] >= limit]
    verdicts = [got for got, _ in results]
    print(f"{len(cases)} answers in {seconds:.0f} s, {len(late)} timeouts, longest {max(late):.2f} s, "
          f"{verdicts.count(1.0)} right, parent grew by {growth / 2**20:.1f} MiB")
    for (text, gold, truncated), (got, took) in zip(cases, results, strict=True):
        good = math.isnan(got) if gold in unusable else got == 0.0 or got == 1.0 and not truncated
        assert good and took < limit + 10, f"{got} after {took:.1f} s: {(text, gold, truncated)!r:.500}"
    assert unusable == ["", r"\frac{1}{"] and len(cases) == 10_000
    assert len(late) > 30 and verdicts.count(1.0) > 50  # the cases are as hostile, and as friendly, as meant
    assert growth < 32 << 20


# --- tasks that grade themselves -------------------------------------------------------------------------------------


def test_a_tasks_own_grading_runs_in_a_worker_and_cannot_hurt_the_run():
    import reasoning_gym

    settings = {"size": 5}
    entry = reasoning_gym.create_dataset("countdown", seed=0, **settings)[0]
    assert reward.check_task("countdown", settings, entry, entry["answer"]) == 1.0
    os.environ.pop("FROM_AN_ANSWER", None)
    evil = "__import__('os').environ.setdefault('FROM_AN_ANSWER','1')"
    assert reward.check_task("countdown", settings, entry, evil) < 1.0 and "FROM_AN_ANSWER" not in os.environ
    assert reward.check_task("countdown", settings, entry, "1+1") < 1.0
    other = reasoning_gym.create_dataset("prime_factorization", seed=0, size=1)[0]
    assert reward.check_task("prime_factorization", {"size": 1}, other, "two times three") == 0.0


def test_answer_line_is_the_last_resort():
    assert extract_answer("So it is 34.\nAnswer: 34") == "34" == extract_answer("Answer: 7\nNo.\nAnswer: $34$")
    assert extract_answer("Answer: 7\n#### 8") == "8" and extract_answer("\\boxed{9}\nAnswer: 7") == "9"
    assert extract_answer("The Answer: 34") is None and extract_answer("Answer:\n34") is None
    assert grade("thus\nAnswer: $\\frac{1}{2}$", "0.5") == 1.0
