"""The run's log files: resume without duplicate steps, a header that grows, rows that survive a kill.

    python -m pytest tests/test_runlog.py
"""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import types

import pytest
import torch

from errors import UserError
from runlog import COLUMNS, RunLog, progress, read_csv, replacing, write_json

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def test_rows_are_on_disk_at_once_and_exact(tmp_path):
    log = RunLog(tmp_path)
    log.log(1, {"reward": 0.1 + 0.2, "acc": torch.tensor(0.25), "n": 3, "lr": torch.tensor(1e-7, dtype=torch.float64)})
    assert read(tmp_path / "metrics.csv") == "step,reward,acc,n,lr\n1,0.30000000000000004,0.25,3,1e-07\n"
    log.log(2, {"reward": math.nan, "acc": math.inf, "n": True})  # lr is missing
    assert read(tmp_path / "metrics.csv").splitlines()[2] == "2,nan,inf,1,"
    columns = read_csv(tmp_path / "metrics.csv")
    assert columns["step"] == [1, 2] and columns["reward"][0] == 0.1 + 0.2 and columns["acc"][1] == math.inf
    assert math.isnan(columns["lr"][1])


def test_later_metric_widens_the_header(tmp_path):
    log = RunLog(tmp_path)
    log.log(1, {"reward": 0.5})
    log.log(2, {"reward": 0.75, "acc": 0.5})
    log.log(3, {"acc": None, "reward": 1.0})
    assert read(tmp_path / "metrics.csv") == "step,reward,acc\n1,0.5,\n2,0.75,0.5\n3,1.0,\n"
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "samples.jsonl"]  # no temporary file stays


def test_steps_only_go_up(tmp_path):
    log = RunLog(tmp_path)
    log.log(3, {"reward": 0.5})
    with pytest.raises(AssertionError, match="step 3 after step 3"):
        log.log(3, {"reward": 0.5})


def test_resume_gives_the_file_of_an_uninterrupted_run(tmp_path):
    def metrics(step):
        return {"reward": step / 3, "len/mean": 10 * step} | ({"acc": step / 7} if step % 2 == 0 else {})

    def steps(log, first, last):
        for step in range(first, last + 1):
            log.log(step, metrics(step))
            log.samples(step, [{"text": f"é\n\u2028\ud800{step}", "reward": torch.tensor(0.5)}, {"reward": math.nan}])
        log.close()

    steps(RunLog(tmp_path / "whole"), 1, 6)
    steps(RunLog(tmp_path / "cut"), 1, 5)
    for name, tail in (("metrics.csv", "6,2.0,6"), ("samples.jsonl", '{"step": 6, "te')):
        with open(tmp_path / "cut" / name, "a") as f:
            f.write(tail)  # killed in the middle of a row
    steps(RunLog(tmp_path / "cut", resume_step=3), 4, 6)
    for name in ("metrics.csv", "samples.jsonl"):
        assert read(tmp_path / "cut" / name) == read(tmp_path / "whole" / name)
    records = [json.loads(line) for line in read(tmp_path / "cut/samples.jsonl").splitlines()]
    assert [r["step"] for r in records] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert records[0] == {"step": 1, "text": "é\n\u2028\ud8001", "reward": 0.5} and records[1]["reward"] is None


def test_resume_at_step_0_and_in_an_empty_folder(tmp_path):
    log = RunLog(tmp_path, resume_step=0)
    log.log(1, {"reward": 0.5})
    log.close()
    log = RunLog(tmp_path, resume_step=0)
    log.log(1, {"reward": 0.25})
    assert read_csv(tmp_path / "metrics.csv") == {"step": [1], "reward": [0.25]}


def test_new_run_keeps_the_old_files_aside(tmp_path):
    RunLog(tmp_path).log(1, {"reward": 0.5})
    RunLog(tmp_path).log(1, {"reward": 0.25})
    assert read_csv(tmp_path / "metrics.csv")["reward"] == [0.25]
    assert read_csv(tmp_path / "metrics.csv.bak")["reward"] == [0.5]


def test_rows_survive_kill_9(tmp_path):
    code = ("import os, signal, sys; from runlog import RunLog\n"
            "log = RunLog(sys.argv[1])\n"
            "for step in (1, 2): log.log(step, {'reward': 0.5}); log.samples(step, [{'text': 'a'}])\n"
            "os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert read_csv(tmp_path / "metrics.csv")["step"] == [1, 2]
    assert len(read(tmp_path / "samples.jsonl").splitlines()) == 2


def test_read_csv_names_the_place(tmp_path):
    path = tmp_path / "metrics.csv"
    with pytest.raises(UserError, match="metrics.csv: No such file"):
        read_csv(path)
    path.write_text("")
    with pytest.raises(UserError, match="no header"):
        read_csv(path)
    path.write_text("step,reward\n1,0.5\n2,half\n")
    with pytest.raises(UserError, match="line 3, column reward: 'half'"):
        read_csv(path)
    path.write_text("step,reward\n1\n")
    with pytest.raises(UserError, match="line 2: 1 fields, the header has 2"):
        read_csv(path)
    path.write_text("step,reward\n1,0.5\n2,0.")  # being written
    assert read_csv(path) == {"step": [1], "reward": [0.5]}


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file"):
        RunLog(tmp_path / "file")


def test_line_has_fixed_columns(tmp_path, capsys):
    log = RunLog(tmp_path)
    values = [0.0, 1.0, -1.2345678e-05, 0.00012345, 123.456, 1234567.0, 1.5e12, -1e-100, math.nan, math.inf, -math.inf]
    wide = [log.line(123456789, 123456789, dict.fromkeys(COLUMNS.values(), value)) for value in values]
    assert {len(line) for line in wide} == {max(map(len, capsys.readouterr().out.splitlines()))} and len(wide[0]) <= 120
    missing = log.line(3, 100, {"reward": torch.tensor(0.5), "tok_per_s/rollout": 12345.6, "grad_norm": math.nan})
    assert missing.split() == ["3/100", "0.5", "-", "-", "-", "-", "-", "-", "-", "nan", "-", "12346"]
    assert capsys.readouterr().out == missing + "\n"


def test_heading_stands_over_its_columns(tmp_path, capsys):
    log = RunLog(tmp_path)
    for step in range(1, 22):
        log.line(step, 21, {"reward": 0.5})
    lines = capsys.readouterr().out.splitlines()
    headings = [i for i, line in enumerate(lines) if "reward" in line]
    assert headings == [0, 21] and len(lines) == 23
    ends = [[m.end() for m in re.finditer(r"\S+", line)] for line in lines[:2]]
    assert ends[0] == ends[1] and len(ends[0]) == 12


def test_write_json_is_atomic(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"acc": torch.tensor(0.5), "se": math.nan, "list": (1, math.inf), "text": "é"})
    before = read(path)
    assert json.loads(before) == {"acc": 0.5, "se": None, "list": [1, None], "text": "é"}
    with pytest.raises(TypeError):
        write_json(path, {"a": 1, "b": object()})  # fails when half of it is written
    with pytest.raises(KeyboardInterrupt), replacing(path) as f:
        f.write("half")
        f.flush()
        raise KeyboardInterrupt
    assert read(path) == before and os.listdir(tmp_path) == ["summary.json"]


def test_tensorboard_gets_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = RunLog(tmp_path, tensorboard=True)
    log.log(1, {"reward": torch.tensor(0.5), "acc": None})
    log.log(2, {"reward": 0.75})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert events.Tags()["scalars"] == ["reward"]


def test_no_tensorboard_import_without_the_flag(tmp_path):
    code = ("import sys; from runlog import RunLog; RunLog(sys.argv[1])\n"
            "print('tensorboard' in sys.modules, 'torch' in sys.modules)")
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False False\n"


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for resume_step, first, last in ((None, 1, 5), (3, 4, 6)):  # killed after step 5, its last checkpoint was of step 3
        log = RunLog(tmp_path, tensorboard=True, resume_step=resume_step)
        for step in range(first, last + 1):
            log.log(step, {"reward": step + (resume_step or 0) / 8})
            log.samples(step, [{"reward": step}])
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = [(1, 1), (2, 2), (3, 3), (4, 4.375), (5, 5.375), (6, 6.375)]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == rows
    columns = read_csv(tmp_path / "metrics.csv")
    assert list(zip(columns["step"], columns["reward"], strict=True)) == rows
    assert [json.loads(line)["step"] for line in read(tmp_path / "samples.jsonl").splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_default_run_opens_no_connection(tmp_path):
    """Neither a socket nor a name look-up, nor a child process that could do it; wandb is not even imported."""
    code = ("import sys; from runlog import RunLog, progress, write_json\n"
            "seen = []\n"
            "names = ('socket.', 'subprocess.', 'os.fork', 'os.exec', 'os.posix_spawn', 'os.system', 'urllib.', 'http.')\n"
            "sys.addaudithook(lambda name, args: seen.append(name) if name.startswith(names) else None)\n"
            "for resume_step in (None, 1):\n"
            "    log = RunLog(sys.argv[1], resume_step=resume_step)\n"
            "    for step in progress([2, 3], 'steps') if resume_step else [1]:\n"
            "        log.log(step, {'reward': 0.5}); log.samples(step, [{'a': 1}]); log.line(step, 3, {})\n"
            "    log.close(); write_json(sys.argv[1] + '/summary.json', {})\n"
            "print(seen, [name for name in sys.modules if 'wandb' in name or 'tensorboard' in name])")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] []"
    assert read_csv(tmp_path / "metrics.csv")["step"] == [1, 2, 3]


@pytest.fixture
def fake(monkeypatch):
    """fake(...) puts a module with wandb's names in its place and returns the list of calls (name, arguments).

    logged_in; old: a wandb before 0.30, whose login has no `prompt`; and name=error makes that call raise it.
    """
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)

    def install(logged_in=True, old=False, **errors):
        wandb, calls = types.ModuleType("wandb"), []

        def call(name, **arguments):
            calls.append((name, arguments))
            if name in errors:
                error = errors[name]
                raise error if isinstance(error, Exception) else wandb.Error(error)

        def init(**arguments):
            call("init", **arguments)
            return types.SimpleNamespace(log=log, finish=lambda exit_code=None: call("finish"))

        def log(data, step=None, commit=None):
            call("log", step=step, data=data, commit=commit)

        def login(key=None, relogin=None, timeout=None, verify=False, prompt=True):
            call("login")
            assert prompt is False, "it would ask"
            return logged_in

        wandb.Error = type("Error", (Exception,), {})
        wandb.init, wandb.login = init, login
        if old:
            wandb.login = lambda key=None, relogin=None, timeout=None, verify=False: pytest.fail("it would ask")
            wandb.api = types.SimpleNamespace(api_key="0" * 40 if logged_in else None)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        return calls

    return install


def wandb_run(out, steps, **keywords):
    log = RunLog(out, wandb=True, config={"lr": 1e-6, "resume": None}, **keywords)
    for step in steps:
        log.log(step, {"reward": torch.tensor(0.5), "n": 3, "acc": None})
    log.close()
    assert read_csv(os.path.join(out, "metrics.csv"))["step"] == list(range(1, steps[-1] + 1))


def of(calls, name):
    return [arguments for called, arguments in calls if called == name]


@pytest.mark.parametrize("old", [False, True])
def test_wandb_gets_the_rows(tmp_path, fake, capsys, monkeypatch, old):
    calls = fake(old=old)
    monkeypatch.chdir(tmp_path)
    wandb_run("out", [1, 2])
    assert capsys.readouterr().out == ""
    [init] = of(calls, "init")
    assert init.pop("id") == read(tmp_path / "out/wandb_id").strip()
    assert init == {"project": "lowprec-rl", "dir": str(tmp_path / "out"), "config": {"lr": 1e-6, "resume": None},
                    "allow_val_change": True, "mode": None, "resume": "allow"}
    assert of(calls, "log") == [{"step": step, "data": {"reward": 0.5, "n": 3}, "commit": True} for step in (1, 2)]
    assert calls[-1] == ("finish", {})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", "/scratch")
    wandb_run("other", [1])
    assert of(calls, "init")[1]["project"] == "mine" and of(calls, "init")[1]["dir"] == "/scratch"


def test_a_resumed_run_is_the_same_wandb_run(tmp_path, fake):
    random_state = torch.get_rng_state()
    calls = fake()
    wandb_run(tmp_path, [1, 2])
    wandb_run(tmp_path, [2, 3], resume_step=1)
    wandb_run(tmp_path, [1])  # a new run in the old one's folder
    RunLog(tmp_path).close()  # one without wandb: a resume with it must not fall into another run
    wandb_run(tmp_path, [1], resume_step=0)
    first, resumed, new, last = (init["id"] for init in of(calls, "init"))
    assert first == resumed and len({first, new, last}) == 3 and re.fullmatch("[0-9a-f]{16}", first)
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.parametrize("old", [False, True])
def test_wandb_without_a_login_writes_offline(tmp_path, fake, capsys, monkeypatch, old):
    calls = fake(logged_in=False, old=old)
    wandb_run(tmp_path, [1])
    assert of(calls, "init")[0]["mode"] == "offline" and len(of(calls, "log")) == 1
    line = "--wandb: not logged in, so it writes offline; `wandb login` before a run, `wandb sync` after it\n"
    assert capsys.readouterr().out == line
    for mode in ("offline", "disabled"):  # the user has decided
        monkeypatch.setenv("WANDB_MODE", mode)
        calls.clear()
        wandb_run(tmp_path / mode, [1])
        assert of(calls, "init")[0]["mode"] is None and not of(calls, "login") and capsys.readouterr().out == ""


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")], ids=["absent", "a folder of that name"])
def test_wandb_that_is_not_installed(tmp_path, monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, "wandb", module)  # None makes the import fail
    wandb_run(tmp_path, [1, 2])
    line = capsys.readouterr().out
    assert line.startswith("--wandb: ") and line.endswith("(pip install wandb); the run goes on with metrics.csv\n")
    assert line.count("\n") == 1 and not os.path.exists(tmp_path / "wandb_id")


@pytest.mark.parametrize("name", ["login", "init", "log", "finish"])
@pytest.mark.parametrize("error, text", [("no answer\n from the server", "no answer from the server"),
                                         (BrokenPipeError(), "BrokenPipeError")])
def test_trouble_in_wandb_is_one_line(tmp_path, fake, capsys, name, error, text):
    calls = fake(**{name: error})
    wandb_run(tmp_path, [1, 2, 3])
    assert capsys.readouterr().out == f"--wandb: {text}; the run goes on with metrics.csv\n"
    assert [called for called, _ in calls][-1] == name  # the first trouble is the last call
    assert len(of(calls, "log")) == {"login": 0, "init": 0, "log": 1, "finish": 3}[name]


def test_a_mistake_in_our_use_of_wandb_keeps_its_traceback(tmp_path, fake):
    fake(init=TypeError("no such argument"))
    with pytest.raises(TypeError, match="no such argument"):
        wandb_run(tmp_path, [1])


def test_progress_is_quiet_without_a_terminal(capsys):
    assert list(progress([1, 2, 3], "eval")) == [1, 2, 3]
    with progress(2, "rollout") as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")


# -----------------------------------------------------------------------------
# a full disk


@pytest.mark.parametrize("name", ["csv_file", "samples_file"])
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, name):
    log = RunLog(tmp_path)
    log.log(1, {"reward": 0.5})
    getattr(log, name).close()
    setattr(log, name, open("/dev/full", "a"))
    with pytest.raises(UserError, match="(metrics.csv|samples.jsonl): No space left on device; make room"):
        log.log(2, {"reward": 0.5})
        log.samples(2, [{"reward": 0.5}])
    assert read_csv(str(tmp_path / "metrics.csv"))["step"][0] == 1


def test_a_file_that_cannot_be_written_in_full_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="summary.json: No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["summary.json"]
