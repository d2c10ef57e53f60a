"""The alignment study: its parts on an untrained tiny model; slow: with real vLLM, the bars its table is held to."""

import csv

import pytest
import torch
from test_vllm_engine import make

import align
import tiny
from errors import UserError
from rollout import Completion, make_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    model, tokenizer = make("fp32")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_learner_holds_bf16_values_whatever_its_dtype(folder):
    narrow, _ = align.make_learner(folder, "fp8-row", "cpu", {})
    wide, _ = align.make_learner(folder, "fp8-row", "cpu", {}, torch.float32)
    for (name, a), b in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and b.dtype == torch.float32 and torch.equal(a.float(), b), name
    exact, _ = align.make_learner(folder, "fp8-row", "cpu", {}, None, ("attention",))
    assert exact.config._attn_implementation == "exact" and narrow.config._attn_implementation == "sdpa"


def test_score_puts_log_probs_where_they_belong(folder):
    model, _ = align.make_learner(folder, "fp32", "cpu", {})
    prompts = [[5, 6, 13], [4, 13, 5, 14]]
    completions = [Completion([7, 8], [-1.0, -2.0], "length"), Completion([9], [-3.0], "stop")] * 2
    old, mu, mask = align.score(model, prompts, completions, 2, 1.0)
    assert mask.tolist() == [[True, True], [True, False]] * 2 and mu[0].tolist() == [-1.0, -2.0] and mu[1, 0] == -3.0
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 13, 7]])).logits.double()
    expected = torch.log_softmax(logits, -1)[0, [2, 3], [7, 8]]
    assert torch.allclose(old[0].double(), expected, atol=1e-5)


def test_study_writes_a_row_per_sampler(folder, tmp_path):
    out = tmp_path / "out"
    flags = ["--model", folder, "--prompts", "4", "--n", "2", "--max-tokens", "8", "--engines", "hf", "--out", str(out)]
    align.main([*flags, "--precisions", "bf16", "fp8-row"])
    rows = list(csv.DictReader(open(out / "align.csv")))
    assert [(r["engine"], r["recipe"], r["arm"]) for r in rows] == [("hf", "bf16", "plain"), ("hf", "fp8-row", "plain")]
    assert float(rows[0]["ratio"]) == 1.0 and 0 < float(rows[1]["aligned mean"]) < float(rows[1]["bf16 mean"])
    assert float(rows[1]["ratio_low"]) <= float(rows[1]["ratio"]) <= float(rows[1]["ratio_high"])
    assert open(out / "align.md").read().count("\n") == 4


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="--arms 'nothing' is not one of plain"):
        align.main(["--arms", "nothing"])
    with pytest.raises(UserError, match="--precisions 'fp7' is not one of fp32"):
        align.main(["--precisions", "fp7"])


@pytest.mark.slow
def test_alignment_bars_with_real_vllm():
    """Sharing the quantiser brings vLLM and learner together: at most 0.75 of the BF16 learner's gap, FP32 activations 0.05."""
    path = tiny.prepare()
    _, tokenizer = align.make_learner(path, "bf16", "cpu", {})
    prompts = [row["prompt_ids"] for row in align.data.load("arith:test", tokenizer)[:200]]
    bf16, _ = align.make_learner(path, "bf16", "cpu", {})
    for recipe in ("fp8-row", "fp8-block"):
        for dtype, bar in ((None, 0.75), (torch.float32, 0.05)):
            aligned, _ = align.make_learner(path, recipe, "cpu", {}, dtype)
            engine = make_engine("vllm", aligned, tokenizer, recipe, 200, dtype=dtype)
            engine.sync(aligned.named_parameters())
            completions = engine.generate(prompts, 1, 1.0, 40, 0)
            engine.close()
            gaps = []
            for learner in (aligned, bf16):
                old, mu, mask = align.score(learner, prompts, completions, 1, 1.0)
                gaps.append((old - mu).abs()[mask].mean().item())
            assert mask.sum() > 2000 and gaps[0] <= bar * gaps[1], (recipe, dtype, gaps)
