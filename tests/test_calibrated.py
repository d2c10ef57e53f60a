"""Calibrated Clipping: numbers by hand, the paper's pseudo-code written apart, sums under splitting, two processes.

    python -m pytest tests/test_calibrated.py
"""

import functools
import json
import math
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clipping
from calibrated import CalibratedClipping

NAN, INF = math.nan, math.inf
NAMES = ("new_logp_hp", "old_logp_hp", "new_logp", "old_logp", "mu_logp", "weight", "adv", "mask", "entropy")
quick = settings(max_examples=30, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def log_of(r):
    """An FP32 d with exp(d) exactly the FP32 nearest to r: bounds can be met with equality."""
    d, r = torch.tensor([math.log(r)]), torch.tensor([r])
    for _ in range(8):
        if d.exp() == r:
            return d.item()
        d = torch.nextafter(d, torch.where(d.exp() < r, INF, -INF))
    raise AssertionError(f"no FP32 logarithm of {r}")


def batch(neg=(), pos=(), **changes):
    """One row: pairs (r16, r8) with A = -1, then pairs with A = 1; pi = w = 1. -> the arguments of `observe`."""
    r16, r8 = torch.tensor([[log_of(float(r)) for r in pair] for pair in (*neg, *pos)]).T[:, None]
    adv = torch.tensor([[-1.0] * len(neg) + [1.0] * len(pos)])
    zero = torch.zeros_like(adv)
    args = {"new_logp_hp": r16, "old_logp_hp": zero, "new_logp": r8, "old_logp": zero, "mu_logp": zero, "weight": None,
            "adv": adv, "mask": adv == adv}  # fmt: skip
    return args | changes


def calibrate(*batches, **kwargs):
    calib = CalibratedClipping(**kwargs)
    for args in batches:
        calib.observe(**args)
    return calib, calib.update()


def rows(args, index):
    """The same arguments for some of the rows."""
    return {k: None if x is None else x[index] for k, x in args.items()}


def random_batch(lengths, width=12, seed=0, noise=0.2, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    b = len(lengths)
    draw = lambda: torch.randn(b, width, generator=g, dtype=torch.float64)  # noqa: E731
    old = -draw().abs() - 0.1
    d16 = 0.3 * draw()
    args = {"old_logp_hp": old, "new_logp_hp": old + d16, "new_logp": old + d16 + noise * draw(), "old_logp": old,
            "mu_logp": old + 0.1 * draw(), "weight": (0.3 * draw()).exp().clamp(max=2), "adv": draw()}  # fmt: skip
    args["adv"][:, 5] = 0
    args["mask"] = torch.arange(width) < torch.tensor(lengths)[:, None]
    args["entropy"] = draw()[:, 0].abs()
    return {k: args[k].to(dtype) if args[k].dtype == torch.float64 else args[k] for k in NAMES}


NEG = [(0.70, 0.60), (0.79, 0.65), (0.90, 0.75), (1.0, 1.0), (1.1, 1.1)]
POS = [(1.0, 1.0), (1.2, 1.35), (1.3, 1.5)]
# k16 = 2. #(r8 <= l) = 1 on .60 - .64, 2 on .66 - .74, 3 from .76 on: L* = .74.   N16 = 3.0, P16 = 2.2
# N8(.74) = 2.85. P8(h) = 1.0 up to 1.34, 2.35 on 1.36 - 1.50, 3.85 beyond, over 2.85: .35, .82, 1.35, wanted .73


# -----------------------------------------------------------------------------
# one calibration by hand


def test_both_stages_by_hand():
    calib, m = calibrate(batch(NEG, POS))
    want = {
        "clip/low": 0.6, "clip/high": 1.8, "calib/low_star": 0.74, "calib/high_star": 1.5, "calib/low_quantile": 0.65,
        "calib/high_tail": 1.5, "calib/low_new": 0.65, "calib/high_new": 1.7, "calib/kept_low": 0, "calib/kept_high": 0,
        "calib/alpha_low": 0.4, "calib/rho_hp": 2.2 / 3, "calib/rho_ref": 1 / 2.1, "calib/rho_used": 3.85 / 3.5,
        "calib/rho": 2.35 / 2.85, "calib/rho_new": 3.85 / 2.85,
        "calib/neg_lo": 0.6, "calib/neg_lo_hp": 0.4, "calib/neg_lo_used": 0.2,  # 0.60 <= 0.60 is clipped
        "calib/pos_hi": 2 / 3, "calib/pos_hi_hp": 1 / 3, "calib/pos_hi_used": 0,
        "clip/over": 0.2, "clip/under": 0, "calib/over_used": 0, "calib/under_used": 0.2,
        "calib/precision": 3 / 5, "calib/recall": 1, "calib/f1": 0.75,
        "calib/precision_used": 1, "calib/recall_used": 1 / 3, "calib/f1_used": 0.5,
        "calib/nmae_ratio": 0.74 / 7.99, "calib/nmae_prob": 0.74 / 7.99, "calib/nmae_quotient": 1,  # old = 0: p is r
        "calib/n_neg": 5, "calib/n_pos": 3, "calib/n_missing": 0, "calib/n_nan": 0,
    }  # fmt: skip
    for which, name in ((0, "calib/std_logr_hp"), (1, "calib/std_logr")):
        logs = [math.log(pair[which]) for pair in NEG + POS]
        want[name] = math.sqrt(sum((x - sum(logs) / 8) ** 2 for x in logs) / 8)
    assert m == pytest.approx(want, rel=1e-6)  # the same keys too: nothing on entropy was given
    assert all(type(x) is float for x in m.values())
    assert (calib.low, calib.high) == (m["calib/low_new"], m["calib/high_new"])


@pytest.mark.parametrize("high, want", [(1.8, 1.5), (1.44, 1.44), (1.43, 1.42), (1.3, 1.36)])
def test_ties_go_to_the_h_nearest_to_the_bound_in_use(high, want):
    assert calibrate(batch(NEG, POS), high=high)[1]["calib/high_star"] == want


def test_equality_is_clipped():
    # r16 = 0.8 is in the tail, r8 = 0.70 is at or below 0.70: 1 up to 0.72, 2 from 0.74 on
    _, m = calibrate(batch([(0.8, 0.7), (0.9, 0.74), (1, 1)], [(1.24, 1.4), (1, 1.3), (1, 1)]))
    assert (m["calib/low_star"], m["calib/low_quantile"], m["calib/alpha_low"]) == (0.72, 0.7, pytest.approx(1 / 3))
    # r16 = 1.24 adds nothing to P16 = 2.0, r16 = 0.8 nothing to N16 = 1.9; N8(.72) = 1.74; P8 = 1 | 2.3 from 1.32 | 3.7
    assert m["calib/rho_hp"] == pytest.approx(2 / 1.9)
    assert (m["calib/high_star"], m["calib/high_tail"]) == (1.4, 1.4)  # 2.3 / 1.74 is nearest, up to h = 1.40 inclusive
    assert m["calib/pos_hi_hp"] == pytest.approx(1 / 3)


def test_mass_is_weight_times_sampler_probability_times_ratio_times_advantage():
    args = batch([(0.7, 0.7), (1.0, 0.9)], [(1.1, 1.0), (1.3, 1.3)], mu_logp=torch.tensor([[0.9, 0.5, 0.25, 0.9]]).log(),
                 weight=torch.tensor([[9.0, 2.0, 0.5, 9.0]]), adv=torch.tensor([[-9.0, -3.0, 1.5, 9.0]]))
    _, m = calibrate(args)
    assert m["calib/rho_hp"] == pytest.approx((0.5 * 0.25 * 1.1 * 1.5) / (2.0 * 0.5 * 1.0 * 3.0))
    assert m["calib/rho_ref"] == pytest.approx((0.5 * 0.25 * 1.0 * 1.5) / (2.0 * 0.5 * 0.9 * 3.0))
    _, m = calibrate(args, pi_samp=False)
    assert m["calib/rho_hp"] == pytest.approx((0.5 * 1.1 * 1.5) / (2.0 * 1.0 * 3.0))
    _, m = calibrate(args | {"weight": None})
    assert m["calib/rho_hp"] == pytest.approx((0.25 * 1.1 * 1.5) / (0.5 * 1.0 * 3.0))


def test_worked_number_of_the_docstring():
    neg = [(0.75, 0.7)] * 5 + [(0.9, 0.75)] * 23 + [(1.0, 1.0)] * 9972
    calib, m = calibrate(batch(neg, [(1, 1)]))
    assert m["calib/low_star"] == 0.74  # 5 up to 0.74: the largest of the ties
    assert calibrate(batch(neg[:5] + [(0.9, 0.72)] * 23 + neg[28:], [(1, 1)]))[1]["calib/low_star"] == 0.70
    assert (m["calib/neg_lo"], m["calib/neg_lo_hp"], m["clip/over"]) == (0.0028, 0.0005, 0.0023)
    assert calib.low == pytest.approx(0.65)


def test_noise_of_probability_and_ratio():
    f64 = lambda *x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    p16, p8, q16, q8 = f64(0.5, 0.2), f64(0.4, 0.3), f64(0.5, 0.4), f64(0.5, 0.2)
    _, m = calibrate({"new_logp_hp": p16.log(), "old_logp_hp": q16.log(), "new_logp": p8.log(), "old_logp": q8.log(),
                      "mu_logp": q8.log(), "weight": None, "adv": f64(1, -1), "mask": p16 == p16})  # fmt: skip
    assert m["calib/nmae_prob"] == pytest.approx(0.2 / 0.7)
    assert m["calib/nmae_ratio"] == pytest.approx((0.2 + 1.0) / 1.5)  # r16 = 1.0, 0.5; r8 = 0.8, 1.5
    assert m["calib/nmae_quotient"] == pytest.approx(0.8 / (0.2 / 0.7))
    assert m["calib/std_logr_hp"] == pytest.approx(math.log(2) / 2)


def test_entropy_bins():
    over, fine, good = (1.0, 0.7), (1.0, 1.0), (1.0, 1.5)
    one = batch([over, over, fine], [good])
    args = {k: None if x is None else x.expand(5, -1) for k, x in one.items()}
    _, m = calibrate(args | {"entropy": torch.tensor([0.1, 0.2, 0.5, 1.0, NAN])})  # an edge opens its bin; NaN is in none
    assert [m[f"calib/over_bins/{b}"] for b in ("0-0.2", "0.2-0.5", "0.5-1", "1+")] == [0.25] * 4
    assert [m[f"calib/over_rate/{b}"] for b in ("0-0.2", "0.2-0.5", "0.5-1", "1+")] == [pytest.approx(2 / 3)] * 4
    _, m = calibrate(one | {"entropy": torch.tensor([3.0])}, one)  # the second micro-batch came without
    assert m["calib/over_bins/1+"] == 1 and m["calib/over_bins/0-0.2"] == 0
    assert m["calib/over_rate/1+"] == pytest.approx(2 / 3) and math.isnan(m["calib/over_rate/0-0.2"])
    assert m["clip/over"] == pytest.approx(2 / 3)


def test_over_and_under_are_of_negative_advantages_at_the_lower_bound():
    _, m = calibrate(batch([(0.9, 0.5), (0.7, 0.9), (0.7, 0.7), (1, 1)], [(0.9, 0.5), (1.0, 1.5)]), low=0.55)
    assert (m["clip/over"], m["clip/under"]) == (0.25, 0.25)
    assert (m["calib/over_used"], m["calib/under_used"]) == (0.25, 0.5)
    assert m["calib/precision"] == pytest.approx(1 / 3) and m["calib/recall"] == 0.5 and m["calib/f1"] == pytest.approx(0.4)


# -----------------------------------------------------------------------------
# the tests the notes ask for: damping, the reference as fixed point, the loss


def test_damping():
    from calibrated import _damped

    assert _damped(0.60, 0.70, 0.05, 0.5, 0.9) == pytest.approx(0.65)
    assert _damped(0.60, 0.64, 0.05, 0.5, 0.9) == pytest.approx(0.62)
    assert _damped(1.8, 1.2, 0.10, 1.2, 2.0) == pytest.approx(1.7)
    assert _damped(0.60, NAN, 0.05, 0.5, 0.9) == 0.60
    assert _damped(0.40, 0.50, 0.01, 0.5, 0.9) == 0.5 and _damped(2.5, 2.0, 0.1, 1.2, 2.0) == 2.0  # into the range


def test_without_noise_the_bounds_go_to_the_reference_at_the_damped_rate():
    args = random_batch([200] * 20, 200, noise=0)
    calib = CalibratedClipping()
    lows, highs, steps = [], [], []
    for step in range(1, 162):
        if calib.due(step):
            calib.observe(**args)
            m = calib.update()
            assert (m["calib/low_star"], m["calib/high_star"]) == (0.8, 1.24)
            assert m["calib/f1"] == 1 and m["clip/over"] == m["clip/under"] == m["calib/nmae_ratio"] == 0
            assert m["calib/rho"] == pytest.approx(m["calib/rho_hp"], rel=1e-12)
            steps, lows, highs = steps + [step], lows + [calib.low], highs + [calib.high]
    assert steps == [1, 21, 41, 61, 81, 101, 121, 141, 161]
    assert lows == pytest.approx([0.65, 0.70, 0.75, 0.775, 0.7875, 0.79375, 0.796875, 0.7984375, 0.79921875], abs=1e-12)
    assert highs == pytest.approx([1.7, 1.6, 1.5, 1.4, 1.32, 1.28, 1.26, 1.25, 1.245], abs=1e-12)


def test_fine_rules_without_noise_return_the_reference_to_their_resolution():
    _, m = calibrate(random_batch([200] * 20, 200, noise=0))
    assert 0.8 - 0.005 < m["calib/low_quantile"] <= 0.8 and 1.24 <= m["calib/high_tail"] < 1.24 + 0.005


def test_the_loss_has_no_gradient_at_the_calibrated_bounds():
    calib, _ = calibrate(batch(NEG, POS))
    (low, high), inside = (calib.low, calib.high), 1e-3  # 0.65, 1.70
    r = [low, low - inside, high, high + inside, low + inside, high - inside, low, high]
    adv = torch.tensor([[-1.0, -1, 1, 1, -1, 1, 1, -1]])
    new = torch.tensor([[log_of(x) for x in r]], requires_grad=True)
    loss, metrics = clipping.policy_loss(new, torch.zeros_like(adv), adv, adv == adv, low, high)
    (grad,) = torch.autograd.grad(loss, new)
    assert (grad[0] == 0).tolist() == [True] * 4 + [False] * 4

    args = {"new_logp_hp": new, "old_logp_hp": 0 * adv, "new_logp": new, "old_logp": 0 * adv, "mu_logp": 0 * adv,
            "weight": None, "adv": adv, "mask": adv == adv}  # fmt: skip
    calib.observe(**args)  # what the loss clips is what is counted
    m = calib.update()
    assert m["calib/neg_lo_used"] == metrics["clip/neg_lo"].item() and m["calib/pos_hi_used"] == metrics["clip/pos_hi"].item()
    assert not any(s.requires_grad for s in calib.sums.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_counted_is_what_the_loss_clips(dtype):
    args = random_batch([12, 7, 3, 0] * 8, seed=3, dtype=dtype)
    _, m = calibrate(args)
    for suffix, new, low, high in (("", "new_logp", 0.8, 1.24), ("_used", "new_logp", 0.6, 1.8),
                                   ("_hp", "new_logp_hp", 0.8, 1.24)):  # fmt: skip
        _, want = clipping.policy_loss(args[new], args["old_logp"], args["adv"], args["mask"], low, high)
        assert m[f"calib/neg_lo{suffix}"] == want["clip/neg_lo"].item()
        assert m[f"calib/pos_hi{suffix}"] == want["clip/pos_hi"].item()


def test_the_class_is_reachable_from_clipping():
    assert clipping.CalibratedClipping is CalibratedClipping


# -----------------------------------------------------------------------------
# the pseudo-code of the notes, written apart

RATIOS = [0.31, 0.5, 0.57, 0.6, 0.7, 0.79, 0.8, 0.81, 0.9, 1.0, 1.2, 1.23, 1.24, 1.3, 1.42, 1.6, 1.8, 2.0, 2.3]


def reference(tokens, low, high):
    """tokens: (A, r16, r8, w * pi) -> L*, H*; None where a bound is kept."""
    f = lambda x: torch.tensor(float(x)).item()  # as FP32  # noqa: E731
    tokens = [(a, f(r16), f(r8), v * abs(a)) for a, r16, r8, v in tokens]
    grid_low, grid_high = [(50 + 2 * i) / 100 for i in range(21)], [(120 + 2 * i) / 100 for i in range(41)]
    k16 = sum(a < 0 and r16 <= f(0.8) for a, r16, _, _ in tokens)
    count = lambda l: sum(a < 0 and r8 <= f(l) for a, _, r8, _ in tokens)  # noqa: E731
    low_star = None
    if k16:
        best = min(abs(count(l) - k16) for l in grid_low)
        low_star = max(l for l in grid_low if abs(count(l) - k16) == best)
    held = low if low_star is None else low_star
    P16 = sum(v * r16 for a, r16, _, v in tokens if a > 0 and r16 < f(1.24))
    N16 = sum(v * r16 for a, r16, _, v in tokens if a < 0 and r16 > f(0.8))
    N8 = sum(v * r8 for a, _, r8, v in tokens if a < 0 and r8 > f(held))
    if not (P16 and N16 and N8):
        return low_star, None
    gaps = {h: abs(sum(v * r8 for a, _, r8, v in tokens if a > 0 and r8 < f(h)) / N8 - P16 / N16) for h in grid_high}
    ties = [h for h in grid_high if gaps[h] <= min(gaps.values()) + 1e-12]
    return low_star, min(ties, key=lambda h: (round(abs(h - high), 9), h))


@quick
@given(st.lists(st.tuples(st.sampled_from([-1, 1]), st.sampled_from(RATIOS), st.sampled_from(RATIOS)), max_size=40),
       st.sampled_from([(0.6, 1.8), (0.8, 1.24), (0.713, 1.51)]), st.integers(0, 99))
def test_against_the_pseudo_code(drawn, bounds, seed):
    g = torch.Generator().manual_seed(seed)
    mu = -torch.rand(max(len(drawn), 1), generator=g)
    drawn = sorted(drawn)
    neg, pos = ([t[1:] for t in drawn if t[0] == sign] for sign in (-1, 1))
    if not drawn:
        calib, m = calibrate(low=bounds[0], high=bounds[1])
    else:
        calib, m = calibrate(batch(neg, pos, mu_logp=mu[None]), low=bounds[0], high=bounds[1])
    tokens = [(*t, v) for t, v in zip(drawn, mu.double().exp().tolist(), strict=False)]
    for side, want in zip(("low", "high"), reference(tokens, *bounds), strict=True):
        got = m[f"calib/{side}_star"]
        assert (None if math.isnan(got) else got) == want
        assert m[f"calib/kept_{side}"] == (want is None)
        if want is None:
            assert getattr(calib, side) == m[f"clip/{side}"] == m[f"calib/{side}_new"]


@quick
@given(st.integers(0, 99), st.sampled_from([0.02, 0.1, 0.3]))
def test_invariants(seed, noise):
    args = random_batch([40] * 20, 40, seed=seed, noise=noise)
    calib, m = calibrate(args)
    neg, r8 = args["mask"] & (args["adv"] < 0), (args["new_logp"] - args["old_logp"]).exp()
    k16 = m["calib/neg_lo_hp"] * m["calib/n_neg"]
    count = lambda l: (neg & (r8 <= l)).sum().item()  # noqa: E731
    L = m["calib/low_star"]
    others = [count(l / 100) for l in range(50, 91, 2)]
    assert abs(count(L) - k16) == min(abs(c - k16) for c in others)
    assert count(m["calib/low_quantile"]) >= k16 - 1e-6 > count(m["calib/low_quantile"] - 5e-4)
    pos = args["mask"] & (args["adv"] > 0)
    t16, tail = m["calib/pos_hi_hp"] * m["calib/n_pos"], m["calib/high_tail"]
    assert (pos & (r8 >= tail)).sum() >= t16 - 1e-6 > (pos & (r8 >= tail + 5e-4)).sum()
    assert 0.5 <= calib.low <= 0.9 and 1.2 <= calib.high <= 2.0
    assert abs(calib.low - 0.6) <= 0.05 + 1e-12 and abs(calib.high - 1.8) <= 0.1 + 1e-12
    assert m["calib/neg_lo"] - m["calib/neg_lo_hp"] == pytest.approx(m["clip/over"] - m["clip/under"])
    assert sum(m[f"calib/over_bins/{b}"] for b in ("0-0.2", "0.2-0.5", "0.5-1", "1+")) == pytest.approx(1) or not m["clip/over"]


def test_rho_rises_with_high_and_high_star_with_the_target():
    args = random_batch([40] * 20, 40)
    rhos = [calibrate(args, low=0.7, high=h)[1]["calib/rho_used"] for h in (1.2, 1.3, 1.5, 1.8, 2.0)]
    assert rhos == sorted(rhos) and rhos[0] < rhos[-1]
    stars, targets = [], []
    for scale in (-0.1, 0.0, 0.05, 0.1, 0.2):  # the shadow's good tokens gain mass, and nothing else changes
        good = (args["adv"] > 0) & (args["new_logp_hp"] - args["old_logp_hp"] < 0)
        _, m = calibrate(args | {"new_logp_hp": torch.where(good, args["new_logp_hp"] + scale, args["new_logp_hp"])})
        stars, targets = stars + [m["calib/high_star"]], targets + [m["calib/rho_hp"]]
    assert targets == sorted(set(targets)) and stars == sorted(stars) and stars[0] < stars[-1]


def test_synthetic_noise_moves_the_bounds_as_far_as_published():
    """Laplace drift on one token in ten (alpha_low 0.053 %) and noise 1.33 times as wide: FP8 clips 5.6 times as much."""
    n, g = 1_000_000, torch.Generator().manual_seed(1)
    u = lambda: torch.rand(1, n, generator=g)  # noqa: E731
    laplace = lambda: (u() - 0.5).sign() * -(1 - u()).log()  # noqa: E731
    scale = torch.where(u() < 0.1, 0.0491, 0.0)
    drift, zero = scale * laplace(), torch.zeros(1, n)
    mu, adv = torch.where(scale > 0, 0.3, 0.95).log(), torch.where(u() < 0.5, -1.0, 1.0)
    got = {}
    for noise in (0.0, 1.33):
        new = drift + noise * scale * laplace()
        got[noise] = calibrate(dict(zip(NAMES, (drift, zero, new, zero, mu, None, adv, adv == adv), strict=False)))[1]
    m = got[1.33]
    assert (got[0.0]["calib/low_star"], got[0.0]["calib/high_star"]) == (0.8, 1.24)
    assert m["calib/alpha_low"] == pytest.approx(0.00053, rel=0.2)
    assert m["calib/neg_lo"] / m["calib/neg_lo_hp"] == pytest.approx(5.6, rel=0.2)
    assert m["calib/low_star"] == pytest.approx(0.70, abs=0.021) and m["calib/high_star"] == pytest.approx(1.42, abs=0.061)
    assert m["calib/low_quantile"] == pytest.approx(0.708, abs=0.015) and m["calib/high_tail"] == pytest.approx(1.41, abs=0.03)


# -----------------------------------------------------------------------------
# what is left out, what is kept


def test_padding_and_zero_advantage_are_excluded():
    args = batch(NEG, POS)
    _, want = calibrate(args | {"entropy": torch.tensor([0.3])})
    pad = {k: torch.full((1, 4), NAN) for k in NAMES[:7]} | {"mask": torch.zeros(1, 4, dtype=torch.bool)}
    zero = {k: torch.full((1, 2), 0.5) for k in NAMES[:7]} | {"adv": torch.tensor([[0.0, NAN]]), "mask": torch.ones(1, 2) > 0}
    args["weight"] = torch.ones(1, 8)
    args = {k: torch.cat([args[k], zero[k], pad[k]], 1) for k in NAMES[:8]}
    _, got = calibrate(args | {"entropy": torch.tensor([0.3])})
    assert got == want
    row = {k: torch.full_like(x, NAN) for k, x in args.items() if k != "mask"} | {"mask": args["mask"] & False}
    both = {k: torch.cat([args[k], row[k]]) for k in args} | {"entropy": torch.tensor([0.3, NAN])}
    assert calibrate(both)[1] == want


def test_a_missing_sampler_log_prob_counts_in_stage_1_only():
    mu = torch.zeros(1, 8)
    mu[0, 2] = mu[0, 5] = NAN  # r16 = 0.90 with A < 0, r16 = 1.0 with A > 0
    for pi_samp in (True, False):  # the ablation changes a factor, not the set of tokens
        _, m = calibrate(batch(NEG, POS, mu_logp=mu), pi_samp=pi_samp)
        assert (m["calib/n_missing"], m["calib/n_neg"], m["calib/alpha_low"], m["calib/low_star"]) == (2, 5, 0.4, 0.74)
        assert m["calib/rho_hp"] == pytest.approx(1.2 / 2.1) and m["calib/kept_high"] == 0
        assert m["calib/rho_ref"] == 0  # the only good token left below 1.24 was the one with r8 = 1.0
    _, m = calibrate(batch(NEG, POS, mu_logp=mu * NAN))
    assert (m["calib/low_star"], m["calib/kept_low"], m["calib/kept_high"], m["calib/n_missing"]) == (0.74, 0, 1, 8)
    mu[0, 5] = -INF  # cannot have been sampled: no mass
    assert calibrate(batch(NEG, POS, mu_logp=mu))[1]["calib/rho_hp"] == pytest.approx(1.2 / 2.1)


def test_a_weight_of_zero_takes_a_token_out_of_stage_2_only():
    weight = torch.ones(1, 8)
    weight[0, 2] = weight[0, 5] = 0
    _, m = calibrate(batch(NEG, POS, weight=weight))
    assert m["calib/alpha_low"] == 0.4 and m["calib/rho_hp"] == pytest.approx(1.2 / 2.1) and m["calib/n_missing"] == 0


def test_one_nan_ratio_keeps_both_bounds_and_is_in_no_sum():
    args = batch([*NEG, (1, 1)], POS)
    args["new_logp"] = args["new_logp"].clone()
    args["new_logp"][0, 5] = NAN
    calib, m = calibrate(args)
    assert (m["calib/n_nan"], m["calib/n_neg"], m["calib/kept_low"], m["calib/kept_high"]) == (1, 5, 1, 1)
    assert (calib.low, calib.high) == (0.6, 1.8) and m["calib/rho_hp"] == pytest.approx(2.2 / 3)
    calib.observe(**batch(NEG, POS))  # the next one is as usual
    assert calib.update()["calib/low_star"] == 0.74
    _, m = calibrate(batch(NEG, POS, weight=torch.tensor([[1.0] * 7 + [NAN]])))
    assert (m["calib/kept_low"], m["calib/kept_high"]) == (0, 1)  # 1.3 >= 1.24: in P8 alone
    _, m = calibrate(args, stages="upper")
    assert (m["calib/low_star"], m["calib/kept_low"], m["calib/kept_high"]) == (0.8, 0, 1)


@pytest.mark.parametrize("neg, pos, kept", [
    ([(0.9, 0.7), (1, 1)], [(1, 1.3), (1, 1)], (1, 0)),  # nothing clipped in BF16: Stage 2 holds the low in use, 0.6
    ([(0.7, 0.7), (0.8, 0.8)], POS, (0, 1)),  # N16 = 0
    ([(0.7, 0.5), (1.0, 0.5)], POS, (0, 1)),  # N8 = 0: both at 0.50, the count is nearest to 1 everywhere, L* = 0.90
    (NEG, [(1.3, 1.0)], (0, 1)),  # P16 = 0
    (NEG, [], (0, 1)),
    ([], POS, (1, 1)),
])
def test_empty_tails_keep_the_bound(neg, pos, kept):
    calib, m = calibrate(batch(neg, pos))
    assert (m["calib/kept_low"], m["calib/kept_high"]) == kept
    for side, was in zip(kept, ((calib.low, 0.6, m["calib/low_star"]), (calib.high, 1.8, m["calib/high_star"])), strict=True):
        assert (was[0] == was[1]) and math.isnan(was[2]) if side else not math.isnan(was[2])
    if kept == (1, 0):  # rho16 = 2 / 1.9; rho8(0.6, h) = 1 / 1.7 up to 1.30, then 2.3 / 1.7
        assert m["calib/high_star"] == 1.8 and m["calib/rho"] == pytest.approx(2.3 / 1.7)


def test_nothing_observed():
    calib, m = calibrate()
    assert (calib.low, calib.high, m["calib/kept_low"], m["calib/kept_high"]) == (0.6, 1.8, 1, 1)
    assert math.isnan(m["clip/over"]) and math.isnan(m["calib/std_logr"]) and m["calib/n_neg"] == 0


def test_on_policy_keeps_low():
    _, m = calibrate(random_batch([12] * 8) | {k: torch.zeros(8, 12) for k in ("new_logp_hp", "old_logp_hp")})
    assert m["calib/kept_low"] == 1 and math.isnan(m["calib/low_quantile"]) and math.isnan(m["calib/high_tail"])


def test_log_ratios_are_clamped():
    args = batch(NEG, POS)
    args["new_logp"] = torch.where(args["adv"] > 0, 1e4, -INF)
    _, m = calibrate(args, low=0.6)
    assert m["calib/n_nan"] == 0 and m["calib/neg_lo_used"] == m["calib/pos_hi_used"] == 1
    assert m["calib/std_logr"] == pytest.approx(20 * math.sqrt(1 - 0.25**2))  # -20 five times, 20 three times


# -----------------------------------------------------------------------------
# sums: micro-batches, ranks, pool, state


def assert_same(got, want):
    """Counts and bounds equal; what is made of float sums within 1e-12."""
    assert got == pytest.approx(want, rel=1e-12, abs=1e-12, nan_ok=True)
    for k in want:
        if k.startswith("clip/") or k.endswith(("_star", "_new", "_quantile", "_tail")) or "/n_" in k or "/kept" in k:
            assert got[k] == want[k] or math.isnan(want[k]), k


@quick
@given(st.lists(st.integers(0, 12), min_size=2, max_size=8), st.integers(1, 7), st.integers(0, 99))
def test_micro_batches_give_the_same_sums(lengths, cut, seed):
    args = random_batch(lengths, seed=seed)
    whole, parts = CalibratedClipping(), CalibratedClipping()
    whole.observe(**args)
    parts.observe(**rows(args, slice(cut, None)))
    parts.observe(**rows(args, slice(0, cut)))
    floats = {"P16", "N16", "P8", "N8", "d_ratio", "ratio", "d_prob", "prob", "log8", "log16", "log8_sq", "log16_sq"}
    assert floats < set(whole.sums)
    for k, want in whole.sums.items():
        assert want.dtype == torch.float64
        torch.testing.assert_close(parts.sums[k], want, rtol=1e-12 if k in floats else 0, atol=1e-12 if k in floats else 0)
    assert_same(parts.update(), whole.update())


def test_advantage_and_weight_per_answer():
    args = random_batch([12, 5, 7])
    args["adv"], args["weight"] = args["adv"][:, 0], args["weight"][:, 0]
    spread = {k: args[k][:, None].expand(3, 12) for k in ("adv", "weight", "entropy")}
    assert json.dumps(calibrate(args)[1]) == json.dumps(calibrate(args | spread)[1])


def worker(rank, port, folder):
    """One of two processes: two calibrations of a pool, the first on half the rows each, the second on rank 0 alone."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        calib = CalibratedClipping(pool=2)
        first, second = random_batch([12, 3, 9, 12, 0, 7, 12], seed=1), random_batch([12] * 5, seed=2)
        calib.observe(**rows(first, slice(0, 3) if rank == 0 else slice(3, None)))
        metrics = [calib.update()]
        if rank == 0:
            calib.observe(**second)
        metrics.append(calib.update())
        (folder / f"{rank}.json").write_text(json.dumps([calib.low, calib.high, metrics]))
    finally:
        dist.destroy_process_group()


def test_two_processes_give_the_bounds_of_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, tmp_path), nprocs=2)
    texts = [(tmp_path / f"{rank}.json").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    calib = CalibratedClipping(pool=2)
    want = []
    for args in (random_batch([12, 3, 9, 12, 0, 7, 12], seed=1), random_batch([12] * 5, seed=2)):
        calib.observe(**args)
        want.append(calib.update())
    low, high, got = json.loads(texts[0])
    assert (low, high) == (calib.low, calib.high) and (low, high) != (0.6, 1.8)
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)


def test_pool_solves_on_the_last_calibrations_together():
    a, b, c = (random_batch([12] * 6, seed=s) for s in range(3))
    calib = CalibratedClipping(pool=2)
    for new, pooled in ((a, [a]), (b, [a, b]), (c, [b, c])):
        bounds = {"low": calib.low, "high": calib.high}
        calib.observe(**new)
        got = calib.update()
        _, want = calibrate(*pooled, **bounds)
        for k in ("alpha_low", "rho_hp", "rho", "low_star", "high_star", "low_quantile", "high_tail", "low_new", "high_new"):
            assert got[f"calib/{k}"] == pytest.approx(want[f"calib/{k}"], rel=1e-12)
        _, alone = calibrate(new, **bounds)
        assert got["calib/n_neg"] == alone["calib/n_neg"] and got["clip/over"] == alone["clip/over"]  # of this step
    assert len(calib.past) == 1


def test_pool_by_hand():
    calib, m = calibrate(batch([(1, 1)] * 5, POS), pool=2)  # no tail of its own
    assert m["calib/kept_low"] == 1 and m["calib/alpha_low"] == 0
    calib.observe(**batch(NEG, POS))
    m = calib.update()
    assert (m["calib/alpha_low"], m["calib/low_star"], m["calib/neg_lo_hp"]) == (0.2, 0.74, 0.4)
    calib.observe(**batch([(1, 1)] * 5, POS))
    m = calib.update()  # pooled with NEG: a tail
    assert (m["calib/alpha_low"], m["calib/low_star"], m["calib/neg_lo_hp"]) == (0.2, 0.74, 0)


@pytest.mark.parametrize("pool", [1, 3])
def test_state_survives_json_in_the_middle_of_a_step(pool):
    calib = CalibratedClipping(pool=pool, freeze_after=4)
    for seed in range(2):
        calib.observe(**random_batch([12] * 6, seed=seed))
        calib.update()
    calib.observe(**random_batch([12] * 6, seed=2))
    text = json.dumps(calib.state_dict(), allow_nan=False)
    other = CalibratedClipping(pool=pool, freeze_after=4)
    other.load_state_dict(json.loads(text))
    assert json.dumps(other.state_dict()) == text
    for seed in (3, 4):
        for c in (calib, other):
            c.observe(**random_batch([12] * 6, seed=seed))
        assert json.dumps(calib.update()) == json.dumps(other.update()) and calib.frozen == other.frozen
    assert calib.frozen and (calib.low, calib.high) == (other.low, other.high)


def test_state_of_another_configuration_is_refused():
    state = CalibratedClipping(grid_low=(0.4, 0.9)).state_dict()
    with pytest.raises(ValueError, match=r"grid_low was \[0.4, 0.9\], is \[0.5, 0.9\]$"):
        CalibratedClipping().load_state_dict(state)
    with pytest.raises(ValueError, match="ref_high was 1.24, is 1.28, pool was 1, is 2"):
        CalibratedClipping(ref_high=1.28, pool=2).load_state_dict(CalibratedClipping().state_dict())
    calib = CalibratedClipping(low=0.7, high=1.5)  # initial bounds are no configuration: they move
    calib.load_state_dict(CalibratedClipping().state_dict())
    assert (calib.low, calib.high) == (0.6, 1.8)


def test_schedule_and_freeze():
    calib = CalibratedClipping(freeze_after=2)
    assert [s for s in range(1, 62) if calib.due(s)] == [1, 21, 41, 61]
    assert all(CalibratedClipping(interval=1).due(s) for s in (1, 2, 3))
    for _ in range(3):
        calib.observe(**batch(NEG, POS))
        m = calib.update()
    assert (calib.low, calib.high) == pytest.approx((0.695, 1.6)) and not calib.due(41)  # 0.65 + 0.09 / 2
    assert m["calib/low_new"] == m["clip/low"] and m["calib/low_star"] == 0.74  # frozen: measured, not moved


def test_move_false_only_measures():
    calib = CalibratedClipping(freeze_after=1)
    calib.observe(**batch(NEG, POS))
    m = calib.update(move=False)
    assert (calib.low, calib.high, calib.calibrations) == (0.6, 1.8, 0) and calib.due(21)
    assert (m["calib/low_star"], m["calib/low_new"], m["calib/high_new"]) == (0.74, 0.6, 1.8)
    assert m["calib/rho_new"] == m["calib/rho_used"]
    assert math.isnan(calib.update()["calib/low_star"])  # the sums were cleared


# -----------------------------------------------------------------------------
# ablations by hand, on the tokens above


@pytest.mark.parametrize("kwargs, low_star, high_star", [
    ({"stages": "lower"}, 0.74, 1.24),
    ({"stages": "lower", "upper": "tail"}, 0.74, 1.24),
    ({"stages": "upper"}, 0.8, 1.24),  # 1.0 / 2.1 is nearest to .73; ties 1.20 - 1.34, see below
    ({"stages": "upper", "upper": "inverse"}, 0.8, 1.25),
    ({"lower": "quantile"}, 0.65, 1.5),  # N8(.65) = 2.85
    ({"upper": "tail"}, 0.74, 1.5),
    ({"upper": "inverse"}, 0.74, 1 / 0.74),
    ({"upper": "proportion"}, 0.74, 1 + 0.26 * 0.24 / 0.2),
    ({"upper": "inverse", "lower": "quantile"}, 0.65, 1 / 0.65),
    ({"ref_high": 1.31}, 0.74, 2.0),  # P16 = 3.5, rho16 = 1.17: 3.85 / 2.85
    ({"ref_low": 0.7}, 0.64, 1.5),  # k16 = 1; N16 = 3.79, rho16 = .58; N8(.64) = 3.5: 2.35 / 3.5 = .67
])
def test_ablations(kwargs, low_star, high_star):
    high = {"upper": 1.24, "lower": 1.8}.get(kwargs.get("stages"), 2.0 if "ref_high" in kwargs else 1.8)
    calib = CalibratedClipping(**kwargs, high=high)
    fixed = {"lower": ("high", 1.24), "upper": ("low", 0.8)}.get(kwargs.get("stages"))
    assert fixed is None or getattr(calib, fixed[0]) == fixed[1]
    calib.observe(**batch(NEG, POS))
    m = calib.update()
    assert (m["calib/low_star"], m["calib/high_star"]) == pytest.approx((low_star, high_star), abs=1e-12)
    assert m["calib/kept_low"] == m["calib/kept_high"] == 0
    assert fixed is None or getattr(calib, fixed[0]) == fixed[1]


def test_a_fixed_side_outside_the_grid_stays():
    calib = CalibratedClipping(stages="lower", ref_high=1.1)
    calib.observe(**batch(NEG, POS))
    assert calib.update()["calib/high_star"] == calib.high == 1.1


def test_ranges():
    deep = [(0.7, 0.31), (1, 1)]
    calib, m = calibrate(batch(deep, [(1.3, 2.3), (1, 1)]), lower="quantile", upper="tail", low=0.5)
    assert (m["calib/low_star"], calib.low) == (0.31, 0.45)  # no grid, no range
    assert m["calib/high_star"] == m["calib/high_tail"] == 2.0  # the last edge
    assert calibrate(batch(deep, POS), low=0.5)[1]["calib/low_star"] == 0.90  # 1 from 0.50 to 0.90
    _, m = calibrate(batch([(0.7, 1.3), (1, 1.4)], POS), lower="quantile", upper="inverse")
    assert m["calib/low_quantile"] == 1.3 and m["calib/low_star"] == 1 - 1 / 2000 and m["calib/high_star"] == 1.2
    _, m = calibrate(batch(deep, POS), lower="quantile", upper="inverse")
    assert m["calib/high_star"] == 2.0  # of 1 / 0.31
    _, m = calibrate(batch(NEG, [(1.25, 1.1), (1, 1)]), upper="tail")
    assert m["calib/high_tail"] == pytest.approx(1.1) and m["calib/high_star"] == 1.2


@pytest.mark.parametrize("upper", ["inverse", "proportion"])
def test_rules_of_low_keep_high_when_low_is_kept(upper):
    calib, m = calibrate(batch([(1, 0.9)], [(1.3, 1.4)]), upper=upper)
    assert (m["calib/kept_low"], m["calib/kept_high"], calib.high) == (1, 1, 1.8)
    calib, m = calibrate(batch(NEG, [(1, 1.4)]), upper="tail")  # nothing clipped above
    assert (m["calib/kept_low"], m["calib/kept_high"], calib.high) == (0, 1, 1.8)


def test_grids():
    calib = CalibratedClipping()
    assert calib.grid_low == [round(0.50 + 0.02 * i, 2) for i in range(21)] and calib.grid_low[7] == 0.64
    assert calib.grid_high == [round(1.20 + 0.02 * i, 2) for i in range(41)] and calib.grid_high[-1] == 2.0
    assert set(calib.grid_low + calib.grid_high) < set(calib.edges) and len(calib.edges) == 4001
    calib, m = calibrate(batch(NEG, [(1, 1), (1.3, 2.7)]), grid_high=(1.2, 3.0), grid_step=0.005, upper="tail")
    assert len(calib.grid_high) == 361 and m["calib/high_tail"] == 2.7 and m["calib/low_star"] == 0.745


@pytest.mark.parametrize("kwargs, match", [
    ({"stages": "all"}, "stages is one of both, lower, upper, got 'all'"),
    ({"upper": "grid"}, "upper is one of"),
    ({"lower": "rho"}, "lower is one of"),
    ({"low": 1.0}, "got 1.0 and 1.8"),
    ({"ref_high": 0.24}, "got 0.8 and 0.24"),
    ({"grid_low": (0.5, 1.1)}, "got 1.1 and 2.0"),
    ({"interval": 0}, "interval is 1 or more, got 0"),
    ({"pool": 0}, "pool is 1 or more"),
    ({"freeze_after": -1}, "freeze_after is 0 or more"),
    ({"delta_low": -0.1}, "delta_low is 0 or more"),
    ({"grid_step": 0.03}, "0.5 to 0.9 in steps of 0.03"),
    ({"grid_low": (0.5001, 0.9001)}, "multiples of 0.0005"),
    ({"grid_step": 0}, "in steps of 0"),
])
def test_bad_configurations(kwargs, match):
    with pytest.raises(ValueError, match=match):
        CalibratedClipping(**kwargs)


def test_bad_inputs():
    calib, args = CalibratedClipping(), batch(NEG, POS)
    with pytest.raises(ValueError, match="mask is a bool tensor"):
        calib.observe(**args | {"mask": args["mask"].float()})
    with pytest.raises(ValueError, match=r"old_logp_hp has shape \(1, 7\), the mask \(1, 8\)"):
        calib.observe(**args | {"old_logp_hp": args["old_logp"][:, 1:]})
    for name in ("adv", "weight", "entropy"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(8,\)"):
            calib.observe(**args | {name: torch.ones(8)})
