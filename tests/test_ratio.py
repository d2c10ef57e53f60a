"""The ratio study: its measuring parts on an untrained tiny model, its statistics on tokens with known noise."""

import csv
import math
import os

import pytest
import torch
from test_vllm_engine import make

import fp8
import precision
import ratio
import ratio_report
from errors import UserError
from rollout import Completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    model, tokenizer = make("fp32")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def samples(count=6):
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 17, (3 + i,), generator=g).tolist()
        row = {"id": str(i // 2), "prompt": "", "answer": "", "prompt_ids": [5, 6, 13]}
        completion = Completion(ids, [-1.0] * len(ids), "stop")
        rows.append({"row": row, "completion": completion, "text": "", "adv": 1.0 - 2 * (i % 2)})
    return rows


@pytest.mark.parametrize("name", list(ratio.ARITHMETICS))
def test_arithmetics_hold_the_same_weights(name):
    model, _ = make("fp32")
    weights = weights_of(model)
    ratio.load_weights(model, weights, name)
    recipe, quantiser, rounded, held = ratio.ARITHMETICS[name]
    for key, p in model.named_parameters():
        assert p.dtype == held and torch.equal(p.double(), weights[key].to(rounded).double()), key
    layers = precision.converted_layers(model)
    assert len(layers) == (28 if recipe.startswith("fp8") else 0)
    assert all(layer.power_of_two == bool(quantiser) for layer in layers)


def test_spread_masters_round_to_the_same_bf16_weights():
    w = torch.cat([torch.randn(50_000, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 1.0, -2.0, 0.5])])
    moved = ratio.spread(w, torch.Generator().manual_seed(1))
    assert torch.equal(moved.bfloat16(), w.bfloat16()) and moved[-4] == 0
    place = (moved - w.bfloat16().float()) / w.bfloat16().float().abs()
    assert place.abs()[:-4].max() <= 2.0**-8 and abs(place[:-4].mean()) < 1e-5  # half a BF16 step either way
    step = 2.0**-10 * w.abs()  # a quarter to an eighth of a BF16 step: a share like that of the weights changes its rounding
    assert 0.1 < ((moved + step).bfloat16() != w.bfloat16()).float().mean() < 0.3


def test_frozen_scales_are_replayed_call_by_call():
    x, store = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), []
    with ratio.scales(store, replay=False):
        first = [fp8.make_operand(k * x, "row", torch.float8_e4m3fn, "emulate") for k in (1, 3)]
    with ratio.scales(store, replay=True):
        again = [fp8.make_operand(5 * x, "row", torch.float8_e4m3fn, "emulate") for _ in (1, 3)]
    assert all(torch.equal(a.scale, b.scale) for a, b in zip(first, again, strict=True))
    assert again[0].codes.abs().max() == 448 and not torch.equal(again[0].codes, first[0].codes)  # too large: saturated
    own = fp8.make_operand(5 * x, "row", torch.float8_e4m3fn, "emulate")  # and afterwards everything is as before
    assert torch.allclose(own.scale, 5 * first[0].scale)


def test_frozen_scales_at_unchanged_weights_change_nothing():
    model, _ = make("fp32")
    weights, store = weights_of(model), []
    ratio.load_weights(model, weights, "row+frozen")
    with ratio.scales(store, replay=False):
        old = ratio.score(model, samples(), 20, 1.0)
    ratio.load_weights(model, weights, "row+frozen")
    with ratio.scales(store, replay=True):
        assert torch.equal(ratio.score(model, samples(), 20, 1.0), old)


def test_another_packing_is_the_same_policy():
    model, _ = make("fp32")
    weights = weights_of(model)
    gaps = {}
    for name in ("fp32", "fp8-tensor"):
        ratio.load_weights(model, weights, name)
        old, new = (ratio.score(model, samples(), 20, 1.0, shuffle) for shuffle in (False, True))
        assert old.shape == new.shape == (6, 8) and old[0, 3:].eq(0).all() and old[5].lt(0).all()
        gaps[name] = (new - old).abs().max().item()
    assert gaps["fp32"] < 1e-4 < gaps["fp8-tensor"]


def test_study_from_sampling_to_picture_and_its_second_call(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "ratio"
    flags = f"--model {folder} --prompts 4 --n 4 --max-tokens 8 --seeds 2 --sizes 1e-4 --lr 1e-3 --sweep-prompts 2 --out {out}"
    ratio.main([*flags.split(), "--device", "cpu"])
    rows = list(csv.DictReader(open(out / "ratio.csv")))
    sets = ("main", "phantom", "0.0001")
    assert {(r["set"], r["reference"]) for r in rows} == {(s, r) for s in sets for r in ("bf16", "fp32")}
    main = {r["arithmetic"]: r for r in rows if r["set"] == "main" and r["reference"] == "bf16"}
    assert main.keys() == ratio.ARITHMETICS.keys() and float(main["bf16"]["NMAE ratio"]) == 0
    assert float(main["fp8-row"]["NMAE ratio"]) > 0 and 0 < float(main["fp32"]["moved"]) < 4.1e-3
    phantom = {r["arithmetic"]: r for r in rows if r["set"] == "phantom" and r["reference"] == "bf16"}
    assert float(phantom["fp32"]["std log r"]) < 1e-4 < float(phantom["fp8-tensor"]["std log r"])
    assert float(phantom["fp32"]["moved"]) == 0
    stamps = {path: os.path.getmtime(path) for path in out.rglob("*.pt")}
    assert len(stamps) == 2 * (9 + 5 * 2 + 9 + 5) and (out / "ratio.png").stat().st_size > 10_000
    assert (out / "stability.csv").exists() and "| fp8-block |" in capsys.readouterr().out
    monkeypatch.setattr(ratio, "score", None)  # everything measured is kept
    monkeypatch.setattr(ratio, "updated", None)
    ratio.main([*flags.split(), "--device", "cpu"])
    assert stamps == {path: os.path.getmtime(path) for path in out.rglob("*.pt")}


def test_flags_that_do_not_fit(folder, tmp_path):
    with pytest.raises(UserError, match="--sweep-prompts x --n 5 = 5 answers do not split into --updates 4"):
        ratio.main(["--model", folder, "--prompts", "4", "--n", "5", "--sweep-prompts", "1", "--out", str(tmp_path)])


# -----------------------------------------------------------------------------
# statistics


def tokens(n=20_000, answers=200, noise=0.15, seed=0):
    """A reference log r and the same with noise; equally long answers, alternating signs, halves by pairs of answers."""
    g = torch.Generator().manual_seed(seed)
    answer = torch.arange(n) // (n // answers)
    signal = 0.12 * torch.randn(n, generator=g)
    old = torch.log(torch.rand(n, generator=g) * 0.98 + 0.01)
    shared = {"answer": answer, "adv": 1.0 - 2 * (answer % 2), "half": (answer // 2) % 2, "mu": old.clone()}
    ref = shared | {"old": old, "new": old + signal, "logr": signal}
    logr = signal + noise * torch.randn(n, generator=g)
    return shared | {"old": old, "new": old + logr, "logr": logr}, ref


def test_held_out_clip_fraction_returns_to_the_reference():
    t, ref = tokens()
    row = ratio_report.held_out(t, ref)
    assert row["plain ratio low"] > 3  # noise clips several times as many
    assert row["quantile ratio low"] < 1 < row["quantile ratio high"]
    assert row["quantile ratio high"] - row["quantile ratio low"] < 0.4
    assert row["L half 0"] < 0.75 and row["L half 1"] < 0.75
    assert max(row["quantile over"], row["shrunk over"]) < row["plain over"]


def test_held_out_without_noise_is_the_reference():
    t, ref = tokens(noise=0.0)
    row = ratio_report.held_out(t, ref)
    assert row["plain ratio"] == 1 and row["plain F1"] == 1 and row["plain over"] == 0
    assert row["quantile ratio"] == pytest.approx(1, abs=0.1)


def test_calibrate_is_the_class_of_the_trainer():
    t, ref = tokens()
    m = ratio_report.calibrate(t, ref)
    neg = t["adv"] < 0
    k = int((ref["logr"].exp()[neg] <= 0.8).sum())
    exact = t["logr"][neg].exp().sort().values[k - 1].item()
    assert exact <= m["calib/low_quantile"] <= exact + 5e-4
    assert m["calib/neg_lo_hp"] == pytest.approx(k / int(neg.sum()))


def test_spread_by_hand():
    t, ref = tokens(noise=0.3)
    row = ratio_report.spread(t, ref)
    assert row["tokens"] == 20_000 and row["std log r"] == pytest.approx(math.hypot(0.12, 0.3), rel=0.02)
    assert row["std low"] < row["std log r"] < row["std high"]
    neg = t["adv"] < 0
    assert row["neg_lo %"] == pytest.approx(100 * (t["logr"][neg].exp() <= 0.8).float().mean().item(), abs=0.02)
    r, r_ref = t["logr"].exp(), ref["logr"].exp()
    assert row["NMAE ratio"] == pytest.approx(((r - r_ref).abs().mean() / r_ref.mean()).item(), rel=1e-4)
    p, p_ref = t["new"].exp(), ref["new"].exp()
    assert row["NMAE prob"] == pytest.approx(((p - p_ref).abs().mean() / p_ref.mean()).item(), rel=1e-4)
    assert row["quotient low"] < row["NMAE quotient"] < row["quotient high"]


def test_quantile_and_fractions_at_the_edges():
    assert ratio_report.quantile(torch.tensor([3.0, 1.0, 2.0]), 2) == 2.0
    assert ratio_report.quantile(torch.tensor([3.0]), 0) == -math.inf
    t, _ = tokens(n=40, answers=4)
    nothing = torch.zeros(40, dtype=torch.bool)
    assert all(math.isnan(x) for x in ratio_report.fractions(nothing, nothing, ~nothing, t))
