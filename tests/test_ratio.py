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
        rows.append({"row": row, "completion": completion, "text": "", "adv": 1.0 - 2 * (i % 2), "reward": 0.0})
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
        old, _ = ratio.score(model, samples(), 20, 1.0)
    ratio.load_weights(model, weights, "row+frozen")
    with ratio.scales(store, replay=True):
        assert torch.equal(ratio.score(model, samples(), 20, 1.0)[0], old)
    moved = {name: w * 1.01 for name, w in weights.items()}
    ratio.load_weights(model, moved, "row+frozen")
    calls, original = [], fp8.make_operand
    with ratio.scales(store, replay=True):
        replaying = fp8.make_operand
        fp8.make_operand = lambda *a, **k: calls.append(replaying(*a, **k)) or calls[-1]
        changed, _ = ratio.score(model, samples(), 20, 1.0)
    assert fp8.make_operand is original and not torch.equal(changed, old)
    assert len(calls) == len(store) and all(torch.equal(c.scale, s) for c, s in zip(calls, store, strict=True))


def test_another_packing_is_the_same_policy():
    model, _ = make("fp32")
    weights = weights_of(model)
    gaps = {}
    for name in ("fp32", "fp8-tensor"):
        ratio.load_weights(model, weights, name)
        (old, entropy), (new, _) = (ratio.score(model, samples(), 20, 1.0, shuffle) for shuffle in (False, True))
        assert old.shape == new.shape == (6, 8) and old[0, 3:].eq(0).all() and old[5].lt(0).all() and entropy[5].gt(0).all()
        gaps[name] = (new - old).abs().max().item()
    assert gaps["fp32"] < 1e-4 < gaps["fp8-tensor"]


def test_updates_leave_the_starting_weights_alone_and_stop_before_the_last(folder):
    args = ratio.parse_flags(["--model", folder, "--precision", "bf16", "--correction", "none", "--updates-per-step", "3",
                              "--group-size", "2", "--prompts-per-step", "3", "--device", "cpu", "--clip-low", "0"])
    model, _ = make("fp32")
    weights = weights_of(model)
    before = {name: w.clone() for name, w in weights.items()}
    thetas = ratio.updated(model, weights, samples(), args, 1e-3)
    assert all(torch.equal(w, before[name]) for name, w in weights.items()) and thetas[0] is weights and len(thetas) == 3
    m = ratio.moved(thetas)
    assert 1e-3 < m["moved"] < 2.1e-3 and 0.5 < m["changed"] <= 1  # two steps of about 1e-3 each
    assert ratio.moved([weights, weights]) == {"moved": 0, "changed": 0}


def test_study_from_sampling_to_picture_and_its_second_call(folder, tmp_path, monkeypatch, capsys):
    out, stability = tmp_path / "ratio", ratio_report.stability
    monkeypatch.setattr(ratio_report, "stability", lambda *a: stability(*a, draws=5))
    flags = f"--model {folder} --prompts 4 --n 4 --max-tokens 8 --seeds 2 --sizes 1e-4 --lr 1e-3 --sweep-prompts 2 --out {out}"
    ratio.main([*flags.split(), "--device", "cpu"])
    rows = list(csv.DictReader(open(out / "ratio.csv")))
    sets = ("main", "phantom", "0.0001")
    pairs = {(s, r) for s in sets for r in ("bf16", "fp32")} | {("main", "bf16w")}
    assert {(r["set"], r["reference"]) for r in rows} == pairs
    main = {r["arithmetic"]: r for r in rows if r["set"] == "main" and r["reference"] == "bf16"}
    assert main.keys() == ratio.ARITHMETICS.keys() and float(main["bf16"]["NMAE ratio"]) == 0
    assert float(main["fp8-row"]["NMAE ratio"]) > 0 and 0 < float(main["fp32"]["moved"]) < 3.1e-3
    phantom = {r["arithmetic"]: r for r in rows if r["set"] == "phantom" and r["reference"] == "bf16"}
    assert float(phantom["fp32"]["std log r"]) < 1e-4 < float(phantom["fp8-tensor"]["std log r"])
    assert float(phantom["fp32"]["moved"]) == 0
    stamps = {path: os.path.getmtime(path) for path in out.rglob("*.pt")}
    assert {name: r["seeds"] for name, r in main.items()} == {n: "2" if n in ratio.PLAIN else "1" for n in ratio.ARITHMETICS}
    assert len(stamps) == 2 * 9 + 2 * 5 + 5 + 2 * 5 and (out / "ratio.png").stat().st_size > 10_000
    assert (out / "stability.csv").exists() and "| fp8-block |" in capsys.readouterr().out
    ratio.main([*flags.split(), "--device", "cpu", "--all-seeds", "0"])  # fewer arithmetics than were measured
    monkeypatch.setattr(ratio, "score", None)  # everything measured is kept
    monkeypatch.setattr(ratio, "updated", None)
    ratio.main([*flags.split(), "--device", "cpu"])
    with pytest.raises(UserError, match="holds a study with --temperature 1.0, not 0.5; use another"):
        ratio.main([*flags.split(), "--device", "cpu", "--temperature", "0.5"])
    assert stamps == {path: os.path.getmtime(path) for path in out.rglob("*.pt")}


def test_flags_that_do_not_fit(folder, tmp_path):
    with pytest.raises(UserError, match="--sweep-prompts x --n 5 = 5 answers do not split into --updates 4"):
        ratio.main(["--model", folder, "--prompts", "4", "--n", "5", "--sweep-prompts", "1", "--out", str(tmp_path)])


# -----------------------------------------------------------------------------
# statistics


def tokens(n=20_000, answers=200, noise=0.15, seed=0):
    """A reference log r and the same with noise; equally long answers, alternating signs, four to a prompt, two seeds."""
    g = torch.Generator().manual_seed(seed)
    answer = torch.arange(n) // (n // answers)
    signal = 0.12 * torch.randn(n, generator=g)
    old = torch.log(torch.rand(n, generator=g) * 0.98 + 0.01)
    shared = {"answer": answer, "adv": 1.0 - 2 * (answer % 2), "prompt": answer // 4, "half": (answer // 4) % 2}
    shared |= {"mu": old.clone(), "seed": answer // (answers // 2), "entropy": torch.rand(answers, generator=g)[answer] * 1.5}
    ref = shared | {"old": old, "new": old + signal, "logr": signal}
    logr = signal + noise * torch.randn(n, generator=g)
    return shared | {"old": old, "new": old + logr, "logr": logr}, ref


def test_held_out_clip_fraction_returns_to_the_reference():
    t, ref = tokens()
    row = ratio_report.held_out(t, ref)
    assert ratio_report.spread(t, ref, ref)["neg_lo ratio low"] > 3  # noise clips several times as many
    for half in (0, 1):
        assert row[f"half {half}: refit low"] < 1 < row[f"half {half}: refit high"]
        width = [row[f"half {half}: {k} high"] - row[f"half {half}: {k} low"] for k in ("test", "refit")]
        assert 0 < width[0] < width[1] < 0.9  # the fitted half adds its own error
        assert row[f"half {half}: L"] < 0.75
    assert row["seeds: smallest"] <= 1.3 and row["seeds: largest"] >= 0.7
    assert row["quantile over %"] < row["plain over %"] and row["quantile F1 neg"] > row["plain F1 neg"]


def test_held_out_without_noise_is_the_reference():
    t, ref = tokens(noise=0.0)
    row = ratio_report.held_out(t, ref)
    assert row["plain F1 neg"] == 1 and row["plain over %"] == 0
    for half in (0, 1):
        assert row[f"half {half}: L"] == pytest.approx(0.8, abs=0.002)
        assert row[f"half {half}: ratio"] == pytest.approx(1, abs=0.02)
        assert row[f"half {half}: refit low"] <= 1 <= row[f"half {half}: refit high"]


def test_refitted_interval_covers_the_truth():
    """Fresh data each time: the one-way held-out ratio is 1 on average; an interval that refits covers it, one that does not
    is too narrow."""
    inside = {"test": 0, "refit": 0}
    for k in range(40):
        t, ref = tokens(n=4_000, seed=k)
        neg = t["adv"] < 0
        _, _, *intervals = ratio_report.direction(t, ref, neg & (t["half"] == 0), neg & (t["half"] == 1), draws=200)
        for name, (low, high) in zip(inside, intervals, strict=True):
            inside[name] += low <= 1 <= high
    assert inside["refit"] >= 35 and inside["test"] < inside["refit"]


def test_bound_is_between_the_kth_and_the_next():
    logr = torch.tensor([-0.5, 0.1, -0.1, -0.3])
    low = torch.tensor([False, False, True, True])
    assert ratio_report.bound_of(logr, low) == pytest.approx(-0.2)  # k = 2: between -0.3 and -0.1
    assert ratio_report.bound_of(logr, torch.zeros(4, dtype=torch.bool)) == -math.inf
    assert ratio_report.bound_of(logr, torch.ones(4, dtype=torch.bool)) == pytest.approx(0.1)  # no next
    twice = torch.tensor([[1.0, 1, 1, 1], [2, 1, 1, 0]])  # second draw: -0.5 twice, -0.3 not; k = 1
    assert ratio_report.bound_of(logr, low, twice).tolist() == pytest.approx([-0.2, -0.5])


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
    row = ratio_report.spread(t, ref, ref)
    assert row["tokens"] == 20_000 and row["std log r"] == pytest.approx(math.hypot(0.12, 0.3), rel=0.02)
    assert row["std low"] < row["std log r"] < row["std high"]
    assert row["noise std"] == pytest.approx(0.3, rel=0.02) and row["policy std"] == pytest.approx(0.12, rel=0.02)
    neg = t["adv"] < 0
    assert row["neg_lo n"] == 10_000 and row["neg_lo clipped"] == int((t["logr"][neg] <= math.log(0.8)).sum())
    assert row["neg_lo %"] == row["neg_lo clipped"] / 100
    r, r_ref = t["logr"].exp(), ref["logr"].exp()
    assert row["NMAE ratio"] == pytest.approx(((r - r_ref).abs().mean() / r_ref.mean()).item(), rel=1e-4)
    p, p_ref = t["new"].exp(), ref["new"].exp()
    assert row["NMAE prob"] == pytest.approx(((p - p_ref).abs().mean() / p_ref.mean()).item(), rel=1e-4)
    width = row["quotient high"] - row["quotient low"]
    assert row["quotient low"] < row["NMAE quotient"] < row["quotient high"] and width < 0.15 * row["NMAE quotient"]


def test_ratios_of_few_tokens_are_not_printed():
    t, ref = tokens(n=400, answers=8)
    row = ratio_report.spread(t, ref, ref)
    assert row["neg_lo clipped ref"] < ratio_report.FEWEST and math.isnan(row["neg_lo ratio"])


def test_stability_shrinks_with_tokens(monkeypatch):
    t, ref = tokens(n=8_000, answers=80)
    monkeypatch.setattr(ratio_report, "flat", lambda seeds, what, name: ref if name == "bf16" else t)
    rows = ratio_report.stability(None, "fp8-row", "bf16", draws=40)
    assert [row["answers"] for row in rows] == [8, 16, 32, 64] and [row["tokens"] for row in rows] == [800, 1600, 3200, 6400]
    assert rows[0]["L* exact sd"] > 1.5 * rows[-1]["L* exact sd"] > 0
