"""Runs that are stopped: signals at every stage, the wall-clock limit, the best checkpoint, kills at random moments.

    python -m pytest tests/test_stopping.py          with -m slow: thirty kills
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from small import first_letter_even, make_home, untimed_rows

import checkpoint
import flags
import plot
import reward
import train_grpo
from errors import Interrupted, UserError
from rollout import HFEngine
from stopping import Stop

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory, sums=range(100, 112))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    monkeypatch.setattr(plot, "draw", lambda *a: None)


def argv(home, out, *extra):
    line = f"--model {home / 'model'} --data {home / 'sums.jsonl'} --out {out} --device cpu --steps 4 --prompts-per-step 4 "
    line += "--group-size 4 --updates-per-step 2 --max-tokens 12 --lr 1e-3 --eval-every 0 --save-every 0"
    return line.split() + [str(x) for x in extra]


def train(home, out, *extra):
    train_grpo.train(flags.parse_flags(argv(home, out, *extra)))


def weights(out, step):
    return checkpoint.load(str(out / "checkpoints" / f"step_{step:06d}"))[0]


@pytest.fixture(scope="module")
def whole(home):
    """A run that nobody stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "grade_batch", first_letter_even)
        patch.setattr(plot, "draw", lambda *a: None)
        train(home, home / "whole")
    return home / "whole"


def assert_goes_on_as_if_nothing_had_happened(home, out, whole):
    train(home, out, "--resume")
    a, b = untimed_rows(out), untimed_rows(whole)
    assert all(x == y or x != x and y != y for k in b for x, y in zip(a[k], b[k], strict=True))
    mine, other = weights(out, 4), weights(whole, 4)
    assert all(torch.equal(mine[k], other[k]) for k in other)


# -----------------------------------------------------------------------------
# signals


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("where", ["sampling", "update"])
def test_a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one(home, whole, tmp_path, monkeypatch, quick, capsys, number,
                                                                     code, where):
    """While sampling step 3: step 2 is saved at once, the sample thrown away. During its updates: step 3 is finished first."""
    out, calls = tmp_path / "out", []
    real_generate, real_update = HFEngine.generate, train_grpo.update

    def strike(name, real, at):
        def call(*a, **k):
            calls.append(name)
            if where == name and calls.count(name) == at:
                signal.raise_signal(number)
            return real(*a, **k)
        return call

    monkeypatch.setattr(HFEngine, "generate", strike("sampling", real_generate, 3))
    monkeypatch.setattr(train_grpo, "update", strike("update", real_update, 5))  # two a step
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop:
        train(home, out)
    done = 2 if where == "sampling" else 3
    assert stop.value.code == code and signal.getsignal(number) is before
    assert checkpoint.latest(str(out)).endswith(f"step_00000{done}") and untimed_rows(out)["step"] == list(range(1, done + 1))
    assert f"stopped by {number.name}: step {done} is saved" in capsys.readouterr().out
    assert not (out / "summary.json").exists()
    monkeypatch.setattr(HFEngine, "generate", real_generate)
    monkeypatch.setattr(train_grpo, "update", real_update)
    assert_goes_on_as_if_nothing_had_happened(home, out, whole)


def test_a_signal_before_the_first_step_ends_leaves_no_checkpoint(home, tmp_path, monkeypatch, quick):
    real = HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", lambda *a, **k: signal.raise_signal(signal.SIGTERM) or real(*a, **k))
    with pytest.raises(SystemExit) as stop:
        train(home, tmp_path / "out")
    assert stop.value.code == 143 and checkpoint.latest(str(tmp_path / "out")) is None
    monkeypatch.setattr(HFEngine, "generate", real)
    train(home, tmp_path / "out", "--steps", 1)  # and the folder is free


def test_a_signal_during_a_save_lets_it_finish(home, tmp_path, monkeypatch, quick):
    """The limit has begun the last save when the queue's SIGTERM arrives: it is the process's first signal, not its second."""
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: signal.raise_signal(signal.SIGTERM) or real(*a, **k))
    with pytest.raises(SystemExit) as stop:
        train(home, tmp_path / "out", "--save-before-seconds", 0.001)
    assert stop.value.code == 0 and checkpoint.latest(str(tmp_path / "out")).endswith("step_000001")


def test_a_signal_cuts_an_evaluation_short_and_saves(home, whole, tmp_path, monkeypatch, quick):
    out, real, calls = tmp_path / "out", train_grpo.evaluate, []

    def evaluate(*a, **k):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the evaluation goes on")
        return real(*a, **k)

    monkeypatch.setattr(train_grpo, "evaluate", evaluate)
    flags_ = ("--eval-every", 2, "--eval-data", home / "sums.jsonl", "--eval-problems", 2)
    with pytest.raises(SystemExit) as stop:
        train(home, out, *flags_)
    assert stop.value.code == 143 and checkpoint.latest(str(out)).endswith("step_000002")
    assert "eval/acc" not in untimed_rows(out)
    train(home, out, *flags_, "--resume")
    assert untimed_rows(out)["loss"] == untimed_rows(whole)["loss"]


def test_a_step_whose_evaluation_fails_is_saved(home, whole, tmp_path, monkeypatch, quick):
    out, real, calls = tmp_path / "out", train_grpo.evaluate, []

    def evaluate(*a, **k):
        calls.append(1)
        if len(calls) == 2:
            raise UserError("reward function r, row 3: boom")
        return real(*a, **k)

    monkeypatch.setattr(train_grpo, "evaluate", evaluate)
    flags_ = ("--eval-every", 2, "--eval-data", home / "sums.jsonl", "--eval-problems", 2)
    with pytest.raises(UserError, match="boom"):
        train(home, out, *flags_)
    assert checkpoint.latest(str(out)).endswith("step_000002") and untimed_rows(out)["step"] == [1, 2]
    train(home, out, *flags_, "--resume")
    assert untimed_rows(out)["loss"] == untimed_rows(whole)["loss"]


def test_weights_that_are_not_finite_are_not_saved(home, tmp_path, monkeypatch, quick):
    """A step makes a weight NaN: the checkpoint before it stays the newest, whether the save is due (at once) or an emergency
    (the next step's sampling fails)."""
    out, real = tmp_path / "out", train_grpo.update
    train(home, out, "--steps", 2, "--save-every", 2, "--keep-last", 1)

    def poison(model, masters, *rest):
        metrics = real(model, masters, *rest)
        with torch.no_grad():
            masters.parameters()[0][0] = float("nan")
        masters.publish()
        return metrics

    monkeypatch.setattr(train_grpo, "update", poison)
    for every, words in ((1, "after step 3 some weights are not finite: not saved"), (0, "log-probs are not finite")):
        with pytest.raises(UserError, match=words):
            train(home, out, "--save-every", every, "--resume", "--keep-last", 1)
        assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_000002"]
    monkeypatch.setattr(train_grpo, "update", real)
    train(home, out, "--steps", 3, "--resume")


def test_one_command_starts_and_goes_on(home, whole, tmp_path, monkeypatch, quick):
    """--auto-resume: a job killed before its first checkpoint starts again, one killed later goes on."""
    out, real = tmp_path / "out", train_grpo.update
    monkeypatch.setattr(train_grpo, "update", lambda *a: 1 / 0 if (out / "samples.jsonl").stat().st_size else real(*a))
    with pytest.raises(ZeroDivisionError):
        train(home, out, "--auto-resume")
    assert untimed_rows(out)["step"] == [1] and checkpoint.latest(str(out)) is None
    monkeypatch.setattr(train_grpo, "update", real)
    with pytest.raises(SystemExit):
        train(home, out, "--auto-resume", "--save-before-seconds", 0.001)
    assert untimed_rows(out)["step"] == [1] and checkpoint.latest(str(out)).endswith("step_000001")
    train(home, out, "--auto-resume")
    assert untimed_rows(out)["step"] == [1, 2, 3, 4] and untimed_rows(out)["loss"] == untimed_rows(whole)["loss"]


def test_a_second_signal_ends_at_once():
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM" and stop.now(False)
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        assert not isinstance(caught.value, Interrupted)


def test_a_signal_just_before_sampling_is_not_lost():
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), stop.interruptible():
            raise AssertionError("the block must not start")
        assert stop.exit_code() == 130


@pytest.mark.slow
def test_a_signal_while_vllm_samples(home, tmp_path):
    """The real script, in a process of its own: real vLLM, SIGTERM after the first row, exit code 143, and --resume goes on."""
    out = tmp_path / "out"
    command = [sys.executable, os.path.join(HERE, "train_grpo.py"), *argv(home, out, "--engine", "vllm", "--steps", 500)]
    command += ["--max-tokens", "200", "--precision", "bf16"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    csv = out / "metrics.csv"
    while run.poll() is None and not (csv.exists() and len(csv.read_text().splitlines()) > 2):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    text, err = run.communicate(timeout=60)
    assert run.returncode == 143 and "stopped by SIGTERM" in text, text[-2000:] + err[-2000:]
    assert "Traceback" not in err, err[-3000:]
    steps = untimed_rows(out)["step"]
    assert checkpoint.latest(str(out)).endswith(f"step_{int(steps[-1]):06d}") and len(steps) < 500
    done = subprocess.run([*command, "--steps", str(int(steps[-1]) + 1), "--resume"], capture_output=True, text=True)
    assert done.returncode == 0 and untimed_rows(out)["step"] == [*steps, steps[-1] + 1], done.stderr[-2000:]


# -----------------------------------------------------------------------------
# the wall-clock limit


def test_the_limit_counts_step_save_and_evaluation_from_the_start_of_the_process(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 10**9 + clock[0])
    stop = Stop(limit=100)
    stop.start = 10**9 + 1000.0
    for what, seconds in (("step", 30), ("step", 5), ("evaluation", 8)):
        with stop.timed(what):
            clock[0] += seconds
    clock[0] = 1060.0
    assert not stop.now(True) and stop.longest == {"step": 30, "evaluation": 8, "save": 0}  # 60 + 30 + 8 fit
    stop.longest["save"] = 5
    assert not stop.now(False)  # 60 + 30 + 5
    assert stop.now(True) and stop.reason == "--save-before-seconds 100" and stop.exit_code() == 0  # 103 do not
    assert not Stop().now(True)


def test_the_process_started_before_this_test_and_a_first_save_is_estimated():
    assert 0 < time.time() - Stop().start < 24 * 3600
    assert Stop(save_bytes=6e9).longest["save"] == pytest.approx(20)


def test_a_run_stops_before_its_limit_and_goes_on(home, whole, tmp_path, monkeypatch, quick, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        train(home, out, "--save-before-seconds", 0.001)
    assert stop.value.code == 0 and untimed_rows(out)["step"] == [1] and checkpoint.latest(str(out)).endswith("step_000001")
    assert "stopped by --save-before-seconds 0.001: step 1 is saved" in capsys.readouterr().out
    assert_goes_on_as_if_nothing_had_happened(home, out, whole)


def test_a_run_that_finishes_within_the_limit_is_finished(home, tmp_path, quick):
    train(home, tmp_path / "out", "--steps", 1, "--save-before-seconds", 0.001)
    assert (tmp_path / "out" / "summary.json").exists()


def test_the_best_checkpoint_is_saved_and_kept(home, tmp_path, monkeypatch, quick):
    accs = iter([0.1, 0.2, 0.9, 0.3, 0.4])
    result = dict.fromkeys(("se", "len_mean", "problems"), 1.0)
    monkeypatch.setattr(train_grpo, "evaluate", lambda *a, **k: (result | {"acc": next(accs)}, []))
    train(home, tmp_path / "out", "--eval-every", 1, "--eval-data", home / "sums.jsonl", "--keep-best", "--keep-last", 1)
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["best_step"] == 2 and summary["best_acc"] == 0.9 and summary["acc_after"] == 0.4


# -----------------------------------------------------------------------------
# SIGKILL at random moments


SCRIPT = """
import sys, torch
sys.path.insert(0, {here!r})
torch.set_num_threads(1)
import plot, reward, train_grpo
from flags import parse_flags
reward.grade_batch = lambda texts, *a, **k: [float(t[:1] in set("02468")) for t in texts]
plot.draw = lambda *a: None
train_grpo.train(parse_flags(sys.argv[1:]))
"""


@pytest.mark.slow
def test_thirty_kills_at_random_moments(home, tmp_path):
    """A run of 90 steps that saves after every step is killed 30 times with SIGKILL, saving included, and goes on each time; at
    the end weights, optimiser and rows are those of the run that nobody killed."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(here=HERE))
    options = ("--steps", 90, "--save-every", 1, "--precision", "fp8-row", "--clip", "calibrated", "--calib-interval", 3)

    def start(out, *extra):
        command = [sys.executable, str(script), *argv(home, out, *options, *extra)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE)

    run = start(tmp_path / "whole")
    assert run.communicate(timeout=300) and run.returncode == 0
    out, rng, saving = tmp_path / "out", random.Random(0), 0
    root = out / "checkpoints"
    for kill in range(30):
        if checkpoint.latest(str(out)) is None:  # killed before anything was saved: there is nothing to go on from
            shutil.rmtree(out, ignore_errors=True)
        known = set(os.listdir(root)) if root.exists() else set()
        run = start(out, *(["--resume"] if known else []))
        # most of a start is loading; a kill there shows nothing: wait until a save begins, which a new name shows
        while run.poll() is None and not (root.exists() and set(os.listdir(root)) - known):
            time.sleep(0.001)
        if kill % 3:  # one of three in that very moment, two somewhere in the next steps
            time.sleep(rng.random() / 2)
        assert run.poll() is None, f"the run ended before kill {kill}: {run.communicate()}"
        run.kill()
        run.communicate()
        saving += any(name.startswith(".") for name in os.listdir(root))
    assert saving >= 5, f"only {saving} kills hit a save"
    run = start(out, "--resume")
    assert run.communicate(timeout=300) and run.returncode == 0
    a, b = untimed_rows(out), untimed_rows(tmp_path / "whole")
    assert all(x == y or x != x and y != y for k in b for x, y in zip(a[k], b[k], strict=True))
    (mine, optimizer, _), other = (checkpoint.load(str(x / "checkpoints" / "step_000090")) for x in (out, tmp_path / "whole"))
    assert all(torch.equal(mine[k], other[0][k]) for k in mine)
    assert all(torch.equal(s[k], other[1]["state"][i][k]) for i, s in optimizer["state"].items() for k in s)
    assert (out / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()
