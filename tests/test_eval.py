"""Evaluation: avg@n, maj@n, pass@k and their standard errors by hand and by brute force, what is left out, nothing graded
twice, the same seed the same table.

    python -m pytest tests/test_eval.py
"""

import csv
import json
import math
import os
import shutil
import sys
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_home

import checkpoint
import data
import eval as evaluation
import precision
import reward
import tiny
from errors import UserError, run_main
from eval import average, majority, pass_at_k, summarise
from rollout import Completion, make_engine

NAN = math.nan


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory, sums=range(100, 106), more=range(200, 206))


class Stub:
    """An engine that says what it is told, and notes what it was asked."""

    def __init__(self, tokenizer, answers, truncated=()):
        ids = [tokenizer(a).input_ids for a in answers]
        self.completions = [Completion(x, [0.0] * len(x), "length" if i in truncated else "stop") for i, x in enumerate(ids)]

    def generate(self, prompts, n, temperature, max_tokens, seed, progress=False, **options):
        self.asked, self.options = (prompts, n, temperature, max_tokens, seed), options
        assert len(self.completions) == len(prompts) * n
        return self.completions


def rows_of(golds):
    return [{"prompt": f"p{i}", "answer": gold, "prompt_ids": [3 + i], "id": i + 1} for i, gold in enumerate(golds)]


def evaluated(answers, golds, n, truncated=(), **options):
    engine = Stub(tiny.make_tokenizer(), answers, truncated)
    return *evaluation.evaluate(engine, tiny.make_tokenizer(), rows_of(golds), n, progress=False, **options), engine


def scores_are(monkeypatch, scores):
    monkeypatch.setattr(reward, "score", lambda *a, **k: list(scores))


# -----------------------------------------------------------------------------
# pass@k


def test_pass_at_k_hand_numbers():
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6, abs=1e-15)  # of 6 pairs one has no right answer
    assert pass_at_k(5, 1, 3) == pytest.approx(3 / 5, abs=1e-15)
    assert [pass_at_k(4, 0, k) for k in (1, 2, 3, 4)] == [0] * 4 and [pass_at_k(4, 4, k) for k in (1, 2, 3, 4)] == [1] * 4
    assert pass_at_k(4, 3, 2) == 1  # one wrong answer cannot fill a pair
    assert isinstance(pass_at_k(4, 0, 1), float)


@pytest.mark.parametrize("n, c, k", [(4, 2, 5), (4, 0, 5), (4, 2, 0), (4, 2, -1), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_pass_at_k_is_the_share_of_subsets():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15), (n, c, k)


def test_pass_at_1_is_the_mean():
    assert all(pass_at_k(n, c, 1) == c / n for n in (1, 3, 7, 10, 49, 256) for c in range(n + 1))


def test_pass_at_k_of_many_samples():
    for c, k in [(1, 1), (1, 128), (3, 64), (128, 128), (1, 256), (17, 200), (200, 2)]:
        miss = Fraction(1)
        for i in range(k):
            miss *= Fraction(max(256 - c - i, 0), 256 - i)
        assert pass_at_k(256, c, k) == float(1 - miss), (c, k)
    assert pass_at_k(10_000, 1, 5_000) == 0.5  # C(10000, 5000) is above the largest float


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
@settings(deadline=None, max_examples=50)
def test_pass_at_k_rises_with_k(n_c):
    n, c = n_c
    curve = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert all(a <= b for a, b in zip(curve, curve[1:], strict=False)) and curve[-1] == (c > 0)


# -----------------------------------------------------------------------------
# votes


@pytest.mark.parametrize("answers, winner", [
    (["5", "7", "7"], "7"),
    (["7", "5", "5", "7"], "7"), (["5", "7", "7", "5"], "5"),  # ties: the answer seen first
    (["8", "1,000", "1000", " 1000 "], "1,000"),  # one answer in three forms, the first form is returned
    (["7", "7", "033", "33", "33"], "033"),
    (["7", "1  2", "1 2"], "1  2"),
    ([r"\text{(E)}", "D", "E"], r"\text{(E)}"),
    ([None, None, "", "  ", "3"], "3"), ([None, ""], None), ([], None),
    (["5}", "5}", "5"], "5}"), (["5", "5}", "5"], "5"),  # what cannot be read votes by its text
    (["9" * 2000, "9" * 2000, "4"], "9" * 2000),
    ([3, 4, 4], 4),
], ids=str)  # fmt: skip
def test_majority(answers, winner):
    assert majority(answers) == winner


def test_majority_groups_equal_values():
    assert majority(["0.25", "0.5", r"\frac{1}{2}", "0.25", r"\frac12"]) == "0.5"  # by text 0.25 would win
    assert majority(["4", r"\frac{8}{2}", "5", "5", r"\sqrt{16}"]) == "4"


# -----------------------------------------------------------------------------
# summaries


def test_summary_by_hand():
    # c of 4: 2, 0, 4; votes: problem 1 right by 2 against 1 and 1, problem 2 wrong, problem 3 right
    scores = [1, 0, 1, 0] + [0, 0, 0, 0] + [1, 1, 1, 1]
    answers = ["1", "2", "1", "3"] + ["4", "4", None, "4"] + ["9"] * 4
    s = summarise(list(map(float, scores)), answers, 4)
    assert list(s) == ["acc", "se", "maj", "maj_se", "pass@1", "pass@1_se", "pass@2", "pass@2_se", "pass@4", "pass@4_se",
                       "reward", "problems", "excluded", "n"]  # fmt: skip
    assert (s["acc"], s["se"]) == (0.5, pytest.approx(0.5 / math.sqrt(3)))  # of 1/2, 0, 1
    assert (s["maj"], s["maj_se"]) == (pytest.approx(2 / 3), pytest.approx(math.sqrt(1 / 3 / 3)))  # of 1, 0, 1
    assert (s["pass@1"], s["pass@1_se"]) == (s["acc"], s["se"])
    assert s["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert s["pass@2_se"] == pytest.approx(torch.tensor([5 / 6, 0, 1]).std().item() / math.sqrt(3))
    assert (s["pass@4"], s["pass@4_se"]) == (pytest.approx(2 / 3), pytest.approx(math.sqrt(1 / 3 / 3)))
    assert (s["reward"], s["problems"], s["excluded"], s["n"]) == (0.5, 3, 0, 4)
    assert [k for k in summarise([1.0] * 4, ["1"] * 4, 4, ks=[3]) if k.startswith("pass")] == ["pass@3", "pass@3_se"]
    assert [evaluation.default_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_rewards_that_are_not_0_or_1():
    s = summarise([0.4, 0.6, -1.0, 2.0], [None] * 4, 2)
    assert s["acc"] == 0.5 and s["pass@2"] == 1 and s["reward"] == pytest.approx(0.5)
    assert math.isnan(s["maj"])  # right answers, and none that could vote
    assert summarise([0.0] * 4, [None] * 4, 2)["maj"] == 0
    assert summarise([0.0, 0.0, 1.0, 0.0], [None, None, "3", None], 2)["maj"] == 0.5


def test_what_cannot_be_graded_is_left_out():
    scores, answers = [1.0, 0.0, NAN, NAN, 1.0, NAN], ["1", "2", "3", "3", "4", "5"]
    s = summarise(scores, answers, 2)
    assert (s["acc"], s["problems"], s["excluded"]) == (0.75, 2, 1)  # 1/2 and 1 of 1
    assert s["se"] == pytest.approx(0.25)  # the std of 1/2, 1 is 1/2 / sqrt(2)
    assert s["pass@2"] == 1 and math.isnan(s["pass@2_se"])  # one problem has two graded answers
    assert s["maj"] == 1 and s["reward"] == pytest.approx(2 / 3)
    assert summarise([NAN] * 2, ["1"] * 2, 1)["problems"] == 0


@given(st.lists(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.3]), st.sampled_from(["1", "2", "3", None])),
                         min_size=6, max_size=6), min_size=1, max_size=4), st.randoms())  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_the_order_of_samples_does_not_matter(problems, random):
    flat = [sample for problem in problems for sample in problem]
    before = summarise([s for s, _ in flat], [a for _, a in flat], 6)
    flat = [sample for problem in problems for sample in random.sample(problem, 6)]
    after = summarise([s for s, _ in flat], [a for _, a in flat], 6)
    for key in before:
        if not key.startswith("maj"):  # a tied vote goes to the answer seen first
            assert before[key] == pytest.approx(after[key], abs=0, nan_ok=True), key
    assert before["pass@1"] <= before["pass@2"] <= before["pass@4"] <= before["pass@6"]


def test_average_of_data_sets():
    a = {"acc": 0.25, "se": 0.03, "pass@2": NAN, "pass@2_se": 0.3, "len_mean": 10.0, "problems": 10, "excluded": 1, "n": 4,
         "tokens": 5, "seconds": 1.5, "precision": "bf16"}  # fmt: skip
    b = a | {"acc": 0.75, "se": 0.04, "pass@2_se": 0.4, "len_mean": 20.0, "problems": 30}
    c = average([a, b])
    assert c["acc"] == 0.5 and c["se"] == pytest.approx(0.025) and c["pass@2_se"] == pytest.approx(0.25)
    assert (c["problems"], c["excluded"], c["tokens"], c["seconds"], c["n"], c["len_mean"]) == (40, 2, 10, 3, 4, 15)
    assert math.isnan(c["pass@2"]) and "precision" not in c


# -----------------------------------------------------------------------------
# evaluate


def test_hand_numbers():
    # problem 1: 2 of 2, problem 2: 0 of 2, problem 3: 1 of 2
    answers = ["####12", "####12", "####1", "1+1=2;####13", "####5", "####6"]
    summary, records, engine = evaluated(answers, ["12", "12", "5"], 2)
    assert summary["acc"] == 0.5
    assert summary["se"] == pytest.approx(0.5 / math.sqrt(3))  # the std of 1, 0, 1/2 is 1/2
    assert (summary["problems"], summary["n"], summary["trunc_frac"], summary["excluded"]) == (3, 2, 0, 0)
    assert summary["pass@2"] == summary["maj"] == pytest.approx(2 / 3)  # a tie, won by 5
    assert summary["tokens"] == 3 + 3 + 2 + 9 + 2 + 2 and summary["len_mean"] == pytest.approx(21 / 6)
    assert summary["seconds"] > 0 and summary["tok_per_s"] >= summary["tokens"] / summary["seconds"]
    assert [r["reward"] for r in records] == [1, 1, 0, 0, 1, 0] and [r["id"] for r in records] == [1, 1, 2, 2, 3, 3]
    assert records[3] == {"id": 2, "sample": 1, "prompt": "p1", "completion": "1+1=2;####13", "gold": "12", "answer": "13",
                          "reward": 0.0, "finish_reason": "stop"}  # fmt: skip
    assert engine.asked == ([[3], [4], [5]], 2, 1.0, 64, 0) and engine.options == {}


def test_options_reach_the_engine_and_the_grader(monkeypatch):
    def score(rows, texts, truncated, function=None, progress=False):
        assert [row["id"] for row in rows] == [1, 1, 2, 2] and truncated == [False, True, False, False]
        return [float(function(text)) for text in texts]

    monkeypatch.setattr(reward, "score", score)
    summary, _, engine = evaluated(["1", "2", "3", "12"], ["5", "6"], 2, {1}, top_p=0.9, ks=[2], function=lambda t: "2" in t)
    assert engine.options == {"top_p": 0.9} and (summary["acc"], summary["pass@2"]) == (0.5, 1) and "pass@1" not in summary


def test_answers_cut_off_are_wrong_and_do_not_vote():
    summary, records, _ = evaluated(["####12", "####12"], ["12", "12"], 1, truncated={1})
    assert summary["acc"] == 0.5 and summary["trunc_frac"] == 0.5 and records[1]["finish_reason"] == "length"
    summary, records, _ = evaluated(["####12", "####12", "####5"], ["5"], 3, truncated={0, 1})
    assert summary["maj"] == 1 and [r["answer"] for r in records] == [None, None, "5"]


def test_no_problem_that_can_be_graded(monkeypatch):
    scores_are(monkeypatch, [1.0, 0.0, NAN, NAN])
    summary, records, _ = evaluated(["1"] * 4, ["1", "x"], 2)
    assert (summary["problems"], summary["excluded"], len(records)) == (1, 1, 4) and math.isnan(records[2]["reward"])
    scores_are(monkeypatch, [NAN] * 2)
    with pytest.raises(UserError, match="no problem"):
        evaluated(["1"] * 2, ["x", "y"], 1)


def test_one_problem_has_no_standard_error():
    summary = evaluated(["####12", "####1"], ["12"], 2)[0]
    assert summary["acc"] == 0.5 and math.isnan(summary["se"]) and math.isnan(summary["pass@2_se"])


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


def test_thirty_problems_in_batches_of_eight_are_scored_once_each(home, monkeypatch):
    model, tokenizer, _ = precision.load_model(str(home / "model"), "fp32")
    graded, score = [], reward.score
    monkeypatch.setattr(reward, "score", lambda rows, *a, **k: graded.append([r["id"] for r in rows]) or score(rows, *a, **k))
    rows = data.load("arith:test", tokenizer)[:30]
    engine = make_engine("hf", model, tokenizer, "fp32", max_rows=8)
    summary, records = evaluation.evaluate(engine, tokenizer, rows, 3, 1.0, 2, progress=False)
    once = [(i, j) for i in range(1, 31) for j in range(3)]
    assert [(r["id"], r["sample"]) for r in records] == once and graded == [[i for i, _ in once]]
    assert (summary["problems"], summary["excluded"]) == (30, 0)
    assert [r["prompt"] for r in records[::3]] == [row["prompt"] for row in rows]


# -----------------------------------------------------------------------------
# the command line


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, arguments)])
    run_main(evaluation.main)


def table_of(out):
    with open(out / "results.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_command_line(home, tmp_path, monkeypatch, capsys):
    (home / "reward.py").write_text("def even(completion, row, truncated):\n    return float(len(completion) % 2 == 0)\n")
    flags = ["--model", home / "model", "--data", home / "sums.jsonl", home / "more.jsonl", "--device", "cpu"]
    flags += ["--n", 3, "--max-tokens", 6, "--problems", 4, "--precision", "fp32", "fp8-row", "--rows", 5]
    flags += ["--reward", f"{home}/reward.py:even"]
    call(monkeypatch, *flags, "--out", tmp_path / "a")
    out = capsys.readouterr().out
    assert "4 of 6 problems" in out and "avg@3" in out and "maj@3" in out and "pass@2" in out and "cut off" in out
    names = [str(home / "sums.jsonl"), str(home / "more.jsonl")]
    table = table_of(tmp_path / "a")
    records = [json.loads(line) for line in (tmp_path / "a/generations.jsonl").read_text().splitlines()]
    assert [(r["precision"], r["data"]) for r in table] == [(p, d) for p in ("fp32", "fp8-row") for d in [*names, "average"]]
    assert [int(r["problems"]) for r in table] == [4, 4, 8] * 2
    for row, row_more, mean in (table[:3], table[3:]):
        assert float(mean["acc"]) == pytest.approx((float(row["acc"]) + float(row_more["acc"])) / 2)
        for r in (row, row_more):
            mine = [x for x in records if (x["data"], x["precision"]) == (r["data"], r["precision"])]
            assert [(x["id"], x["sample"]) for x in mine] == [(i, j) for i in range(1, 5) for j in range(3)]
            assert float(r["acc"]) == pytest.approx(sum(x["reward"] for x in mine) / 12)
            groups = [[x["reward"] for x in mine[i : i + 3]] for i in range(0, 12, 3)]
            assert float(r["pass@3"]) == sum(map(max, groups)) / 4
    assert 0 < float(table[0]["acc"]) < 1  # so that the comparisons say something
    assert records[0]["gold"] == "201" and records[0]["prompt"] == "100+101="
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["flags"]["n"] == 3 and summary["results"][2]["seconds"] > 0 and len(summary["results"]) == 6

    call(monkeypatch, *flags, "--out", tmp_path / "b")
    for name in ("results.csv", "generations.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    before = (tmp_path / "b/generations.jsonl").read_bytes()
    call(monkeypatch, *flags, "--out", tmp_path / "b", "--seed", 1)
    assert (tmp_path / "b/generations.jsonl").read_bytes() != before
    assert (tmp_path / "b/generations.jsonl.bak1").read_bytes() == before


def test_data_flags_reach_the_loader(home, tmp_path, monkeypatch):
    asked, load, sums = [], data.load, str(home / "sums.jsonl")
    monkeypatch.setattr(data, "load", lambda spec, tokenizer, *a, **k: asked.append((spec, a, k)) or load(sums, tokenizer))
    flags = ["--model", home / "model", "--data", "x", "y", "--device", "cpu", "--n", 1, "--problems", 1, "--out", tmp_path]
    call(monkeypatch, *flags, "--max-tokens", 56, "--prompt-column", "q", "--answer-column", "a", "--system-prompt", "s",
         "--template-args", '{"b": false}', "--prompt-format", "f")  # fmt: skip
    options = dict(prompt_column="q", answer_column="a", system_prompt="s", template_args={"b": False}, prompt_format="f")
    assert asked == [("x", (200,), options), ("y", (200,), options)]  # a context of 256 less 56 tokens
    call(monkeypatch, *flags, "--max-prompt-tokens", 9)
    assert asked[2][1] == (9,)


def test_prompts_too_long_for_the_context_are_dropped(home, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (4, 6, 7, 300)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call(monkeypatch, "--model", home / "model", "--data", tmp_path / "long.jsonl", "--device", "cpu", "--n", 1,
         "--max-tokens", 250, "--out", tmp_path)  # fmt: skip
    assert "dropped 2" in capsys.readouterr().out
    assert table_of(tmp_path)[0]["problems"] == "2"


def test_names_of_data_sets():
    names = {"aime24=x/y.parquet": "aime24", "gsm8k:test=b": "gsm8k:test", "gsm8k:test": "gsm8k:test"}
    names |= {spec: spec for spec in ("rg:a:test,b=3", "out/lr=1.jsonl", "Owner/name:test")}
    assert {spec: evaluation.set_name(spec) for spec in names} == names


def test_models_by_run_folder(home, tmp_path, monkeypatch):
    run = tmp_path / "run"
    for step in (2, 10):
        folder = run / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(home / "model", folder)
        torch.save({}, folder / "optimizer.pt")
        (folder / "state.json").write_text("{}")
    assert evaluation.find_model(str(run)) == checkpoint.latest(str(run)) == str(run / "checkpoints/step_000010")
    assert evaluation.find_model(str(home / "model")) == str(home / "model") and evaluation.find_model("a/b") == "a/b"
    monkeypatch.setattr(tiny, "prepare", lambda: "made")
    assert evaluation.find_model("tiny") == "made"
    monkeypatch.chdir(tmp_path)  # the default of --out
    for model in (run, run / "checkpoints/step_000002"):
        call(monkeypatch, "--model", model, "--device", "cpu", "--n", 1, "--problems", 1, "--max-tokens", 1)
    assert sorted(os.listdir("out/eval")) == ["run-step_000002", "run-step_000010"]
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        evaluation.find_model(str(run))


def test_the_table_fits():
    ks = evaluation.default_ks(256)
    row = summarise([1.0, 0.0] * 256, ["1", "2"] * 256, 256)
    row |= {"precision": "fp8-tensor", "data": "a/long/path/" * 9 + "aime24"}
    row |= {"len_mean": 12345.6, "trunc_frac": 1.0, "seconds": 123456.7, "tok_per_s": 123456.0}
    lines = evaluation.table([row, row | {"data": "average", "acc": NAN}], 256, ks).splitlines()
    assert max(map(len, lines)) <= 120 and len({len(s) for s in lines[1:4]}) == 1
    words = " ".join(lines).split()
    for name in ("avg@256", "maj@256", "problems", "excluded", "seconds", "tok/s", *(f"pass@{k}" for k in ks)):
        assert words.count(name) == 1, name
    assert "0.500+-0.000" in words and "nan+-0.000" in words and "12345.6" in words and any(w.endswith("aime24") for w in words)


@pytest.mark.parametrize("extra, words", [
    (["--precision", "fp9"], "fp8-row"), (["--precision", "bf16", "bf16"], "twice"), (["--n", "0"], "--n"),
    (["--temperature", "nan"], "--temperature"), (["--temperature", "0", "--n", "2"], "--temperature 0"),
    (["--k", "1", "2"], "--k 2 is above --n 1"), (["--k", "0"], "--k"), (["--top-p", "0"], "--top-p"),
    (["--top-p", "1.1"], "--top-p"),
    (["--model", "nowhere"], "--model nowhere"), (["--data", "none.jsonl"], "none.jsonl"), (["--device", "tpu9"], "tpu9"),
    (["--data", "arith:test", "arith:test"], "twice"), (["--out", "/proc/x"], "--out /proc/x"),
    (["--fp8-backend", "magic"], "--fp8-backend"), (["--template-args", "[1]"], "--template-args"), (["--rows", "0"], "--rows"),
    (["--template-args", "{"], "--template-args"), (["--max-tokens", "256"], "--max-tokens 256"),
    (["--reward", "nowhere.py:f"], "nowhere.py"), (["--keep-bf16", "some", "--precision", "fp8-row"], "--keep-bf16"),
], ids=lambda x: "_".join(x)[:30] if isinstance(x, list) else "")  # fmt: skip
def test_mistakes(home, tmp_path, monkeypatch, capsys, extra, words):
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: pytest.fail("sampled before the mistake was seen"))
    flags = ["--model", home / "model", "--data", home / "sums.jsonl", "--device", "cpu", "--problems", 2, "--n", 1]
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *flags, "--max-tokens", 2, "--out", tmp_path / "out", *extra)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in lines].count(True) == 1
    assert words in next(line for line in lines if line.startswith("error: "))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="eval.py runs on one process"):
        evaluation.parse_flags([])
