"""Evaluation: accuracy and its standard error by hand, samples without a gold answer left out, the same seed the same table.

    python -m pytest tests/test_eval.py
"""

import json
import math
import sys

import pytest
import torch

import eval as evaluation
import precision
import reward
import tiny
from errors import UserError, run_main
from rollout import Completion, make_engine


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    tokenizer = tiny.make_tokenizer()
    tiny.make_model(tokenizer).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    sums = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(100, 106)]
    (home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return home


class Stub:
    """An engine that says what it is told, and notes what it was asked."""

    def __init__(self, tokenizer, answers, truncated=()):
        ids = [tokenizer(a).input_ids for a in answers]
        self.completions = [Completion(x, [0.0] * len(x), "length" if i in truncated else "stop") for i, x in enumerate(ids)]

    def generate(self, prompts, n, temperature, max_tokens, seed, progress=False):
        self.asked = (prompts, n, temperature, max_tokens, seed)
        assert len(self.completions) == len(prompts) * n
        return self.completions


def rows_of(golds):
    return [{"prompt": f"p{i}", "answer": gold, "prompt_ids": [3 + i], "id": i + 1} for i, gold in enumerate(golds)]


def table(answers, golds, n, truncated=()):
    engine = Stub(tiny.make_tokenizer(), answers, truncated)
    return *evaluation.evaluate(engine, tiny.make_tokenizer(), rows_of(golds), n, progress=False), engine


def test_hand_numbers():
    # problem 1: 2 of 2, problem 2: 0 of 2, problem 3: 1 of 2
    answers = ["####12", "####12", "####1", "1+1=2;####13", "####5", "####6"]
    summary, records, engine = table(answers, ["12", "12", "5"], 2)
    assert summary["acc"] == 0.5
    assert summary["se"] == pytest.approx(0.5 / math.sqrt(3))  # the std of 1, 0, 1/2 is 1/2
    assert (summary["problems"], summary["n"], summary["trunc_frac"]) == (3, 2, 0)
    assert summary["len_mean"] == pytest.approx((3 + 3 + 2 + 9 + 2 + 2) / 6)
    assert [r["reward"] for r in records] == [1, 1, 0, 0, 1, 0] and [r["id"] for r in records] == [1, 1, 2, 2, 3, 3]
    assert records[3] == {"id": 2, "prompt": "p1", "completion": "1+1=2;####13", "gold": "12", "reward": 0.0,
                          "finish_reason": "stop"}  # fmt: skip
    assert engine.asked == ([[3], [4], [5]], 2, 1.0, 64, 0)


def test_answers_cut_off_are_wrong():
    summary, records, _ = table(["####12", "####12"], ["12", "12"], 1, truncated={1})
    assert summary["acc"] == 0.5 and summary["trunc_frac"] == 0.5 and records[1]["finish_reason"] == "length"


def test_gold_answers_that_cannot_be_graded_are_left_out(monkeypatch):
    scores = [1.0, 0.0, math.nan, math.nan, 1.0, math.nan]
    monkeypatch.setattr(reward, "grade_batch", lambda *a, **k: scores)
    summary, records, _ = table(["1"] * 6, ["1", "x", "1"], 2)
    assert summary["acc"] == 0.75 and summary["problems"] == 2  # 1/2 and 1 of 1
    assert summary["se"] == pytest.approx(torch.tensor([0.5, 1.0]).std().item() / math.sqrt(2))
    assert len(records) == 6 and math.isnan(records[2]["reward"])
    monkeypatch.setattr(reward, "grade_batch", lambda *a, **k: [math.nan] * 2)
    with pytest.raises(UserError, match="no problem"):
        table(["1"] * 2, ["x", "y"], 1)


def test_one_problem_has_no_standard_error():
    summary = table(["####12", "####1"], ["12"], 2)[0]
    assert summary["acc"] == 0.5 and math.isnan(summary["se"])


@pytest.mark.parametrize("recipe", ["fp32", "fp8-row"])
def test_same_seed_same_answers(home, recipe):
    model, tokenizer, _ = precision.load_model(str(home / "model"), recipe)
    engine = make_engine("hf", model, tokenizer, recipe)
    rows = [{"prompt": p, "answer": "1", "prompt_ids": tokenizer(p).input_ids, "id": p} for p in ("1+1=", "23+4=")]

    def texts(seed):
        torch.rand(1)
        return [r["completion"] for r in evaluation.evaluate(engine, tokenizer, rows, 3, 1.0, 10, seed, progress=False)[1]]

    assert texts(0) == texts(0) != texts(1)
    assert len(set(texts(0))) > 1  # the answers to one problem differ


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, arguments)])
    run_main(evaluation.main)


def test_command_line(home, tmp_path, monkeypatch, capsys):
    flags = ["--model", home / "model", "--data", home / "sums.jsonl", "--device", "cpu", "--n", 3, "--max-tokens", 8]
    flags += ["--problems", 4, "--precision", "fp8-row"]
    call(monkeypatch, *flags, "--save", tmp_path / "answers.jsonl")
    out = capsys.readouterr().out
    assert "fp8-row" in out and "avg@3 0.0000 +- 0.0000 over 4 problems" in out and "cut off" in out
    records = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(records) == 12 and [r["id"] for r in records] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert records[0]["gold"] == "201" and records[0]["prompt"] == "100+101="
    call(monkeypatch, *flags)
    assert capsys.readouterr().out == out
    call(monkeypatch, *flags, "--problems", 0, "--n", 1)
    assert "over 6 problems" in capsys.readouterr().out


@pytest.mark.parametrize("extra, words", [
    (["--precision", "fp9"], "fp8-row"), (["--n", "0"], "--n"), (["--temperature", "nan"], "--temperature"),
    (["--model", "nowhere"], "--model nowhere"), (["--data", "none.jsonl"], "no such file"), (["--device", "tpu9"], "tpu9"),
    (["--save", "/nowhere/x.jsonl"], "--save /nowhere/x.jsonl"), (["--fp8-backend", "magic"], "--fp8-backend"),
], ids=lambda x: x[0] if isinstance(x, list) else "")  # fmt: skip
def test_mistakes(home, monkeypatch, capsys, extra, words):
    flags = ["--model", home / "model", "--data", home / "sums.jsonl", "--device", "cpu", "--problems", 2, "--n", 1]
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *flags, "--max-tokens", 2, *extra)
    assert stop.value.code == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(line) == 1 and words in line[0]
