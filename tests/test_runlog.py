"""The run's log files: resume without duplicate steps, a header that grows, rows that survive a kill.

    python -m pytest tests/test_runlog.py
"""

import json
import math
import os
import re
import signal
import subprocess
import sys

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


def test_progress_is_quiet_without_a_terminal(capsys):
    assert list(progress([1, 2, 3], "eval")) == [1, 2, 3]
    with progress(2, "rollout") as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")
