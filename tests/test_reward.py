r"""python -m pytest tests/test_reward.py"""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
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
    assert reward._started == set() and reward._idle is None


@pytest.mark.parametrize("answer, gold, right", [
    ("1/2", r"\dfrac{1}{2}", 1),
    ("0.5", "1/2", 1),
    ("1/3", r"\dfrac{9}{7}", 0),
    ("5.0", "5", 1),
    ("x = 5", "5", 1),
    (r"x = \boxed{5}", "5", 1),
    ("1,234.50", "1234.5", 1),
    ("1.234", "1234", 0),
    ("12,34", "1234", 0),
    ("1,2", "1", 0),
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
    ("1/2^{99}", "1/2^{98}", 1),
    (r"50\%", "0.5", 1),
    (r"50\%", "50", 1),
    ("50", r"50\%", 1),
    (r"5\text{ km}", r"5\text{ cm}", 1),
    ("0.333", "1/3", 0),  # strict
    ("0.333333", "1/3", 1),
    ("1.414", r"\sqrt{2}", 0),
    ("3.14159", r"\pi", 0),
    (r"\pm 5", "5", 0),
    ("y=x", "x", 0),
    ("ba", "ab", 0),
    ("x=1,234", "1234", 0),  # odd
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


def test_default_limit_is_five_seconds():
    start = time.monotonic()
    assert grade(TOWER, "3") == 0.0
    assert 4.9 < time.monotonic() - start < 7


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
    assert worker_pids() == parents and grade(*HARD) == 1.0


def test_fork_while_another_thread_holds_the_lock():
    with reward._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if reward._lock.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


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
