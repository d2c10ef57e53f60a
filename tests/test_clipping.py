"""Numbers by hand, a scalar reference written apart, invariants under splitting. `python -m pytest tests/test_clipping.py`"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipping import (
    group_advantages,
    group_metrics,
    icepop_weight,
    kl_loss,
    merge_metrics,
    mis_mask,
    mismatch_metrics,
    policy_loss,
    tis_weight,
)

NAN, INF = math.nan, math.inf
AGGS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
quick = settings(max_examples=30, deadline=None, derandomize=True)


def f32(*x):
    return torch.tensor(x, dtype=torch.float32)


def f64(*x):
    return torch.tensor(x, dtype=torch.float64)


def floats(metrics):
    return {k: float(v) for k, v in metrics.items()}


def near(got, want, tol=1e-6):
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, atol=tol, rtol=0)


def lengths_mask(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def loss_and_grad(new, *args, **kwargs):
    new = new.clone().requires_grad_()
    loss, metrics = policy_loss(new, *args, **kwargs)
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad, floats(metrics)


def tokens(r, adv, make=f64, **kwargs):
    """One row of tokens with these ratios and advantages -> summed loss, gradient per token, metrics."""
    new = make([math.log(x) for x in r])
    loss, grad, metrics = loss_and_grad(new, torch.zeros_like(new), make(adv), new == new, denom=1, **kwargs)
    return float(loss), grad[0].tolist(), metrics


def random_batch(lengths, width, seed=0):
    """-> new, old, adv (some 0), mask, weight in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    b = len(lengths)
    old, adv = -draw(b, width).abs(), draw(b)
    adv[2::3] = 0
    return old + 0.5 * draw(b, width), old, adv, lengths_mask(lengths, width), (0.5 * draw(b, width)).exp()


# -----------------------------------------------------------------------------
# advantages


def test_advantage_numbers():
    near(group_advantages(f32(1, 0, 0, 0), 4), f32(1.5, -0.5, -0.5, -0.5), 1e-5)
    near(group_advantages(f32(1, 0, 0, 0), 4, scale="none"), f32(0.75, -0.25, -0.25, -0.25))
    near(group_advantages(f32(1, 0, 0, 0, 10, 30), 2), f32(0.70711, -0.70711, 0, 0, -0.70711, 0.70711), 1e-5)
    exact = 0.5 / (math.sqrt(0.5) + 1e-6)  # the 1e-6 is outside the root
    near(group_advantages(f64(1, 0), 2), f64(exact, -exact), 1e-12)


def test_advantage_dtypes():
    assert group_advantages(torch.tensor([1, 0, 0, 0]), 4).dtype == torch.float32
    assert group_advantages(f32(1, 0).bfloat16(), 2).dtype == torch.float32
    assert group_advantages(f64(1, 0), 2).dtype == torch.float64


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("value, size", [(0.95, 8), (0.9, 3), (0.1, 8), (1.0, 4), (0.0, 4)])
def test_constant_group_is_exactly_zero(value, size, scale):
    adv = group_advantages(torch.cat([torch.full((size,), value), torch.arange(size) ** 2.0]), size, scale)
    assert (adv[:size] == 0).all() and (adv[size:] != 0).all()


def test_group_metrics():
    m = floats(group_metrics(f32(1, 1, 1, 1, 0, 0, 0, 0), 4))
    assert m == {"frac_groups_all0": 0.5, "frac_groups_all1": 0.5, "n/groups": 2}
    m = group_metrics(f32(1, 0, 1, NAN, NAN, NAN, 0, NAN), 2)  # mixed, all 1, no valid member (in no count), all 0
    assert list(floats(m).values()) == [pytest.approx(1 / 3), pytest.approx(1 / 3), 3]


def test_nan_reward_is_left_out():
    adv = group_advantages(f32(1, NAN, 0, 0, NAN, NAN, NAN, NAN, 1, NAN, NAN, NAN, 0.95, NAN, 0.95, 0.95), 4)
    top = (2 / 3) / math.sqrt(1 / 3)  # three valid members: mean 1/3, unbiased std sqrt(1/3)
    near(adv[:4], f32(top, 0, -top / 2, -top / 2), 1e-5)
    assert (adv[4:] == 0).all()  # none valid, one valid, constant


def test_advantage_errors():
    with pytest.raises(ValueError, match="10.*4"):
        group_advantages(torch.zeros(10), 4)
    with pytest.raises(ValueError, match="group_size is 1.*use 2 or more"):
        group_advantages(torch.zeros(4), 1, scale="none")
    with pytest.raises(ValueError, match="'std' or 'none', got 'z'"):
        group_advantages(torch.zeros(4), 2, scale="z")
    with pytest.raises(ValueError, match="infinity"):
        group_advantages(f32(1, INF), 2)


@quick
@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.95, 1.0, -3.0, NAN]), min_size=4, max_size=4), min_size=1))
def test_advantages_are_centered_with_unit_variance(groups):
    adv = group_advantages(torch.tensor(groups, dtype=torch.float64).flatten(), 4).view(-1, 4).tolist()
    for rewards, a in zip(groups, adv, strict=True):
        valid = [x for x in rewards if x == x]
        assert abs(sum(a)) < 1e-9
        assert all(y == 0 for x, y in zip(rewards, a, strict=True) if x != x)
        want = len(valid) - 1 if len(set(valid)) > 1 else 0
        assert sum(y * y for y in a) == pytest.approx(want, rel=1e-4)


# -----------------------------------------------------------------------------
# the clip


def test_sign_and_side():
    r, adv = [5, 0.5, 1.5, 0.5, 1.5, 0.5, 1.1], [-1, -1, 1, 1, -1, 0, 0]
    loss, grad, m = tokens(r, adv, low=0.8, high=1.2)
    near(grad, [5, 0, 0, -0.5, 1.5, 0, 0])  # -r A where it flows
    assert loss == pytest.approx(5 + 0.8 - 1.2 - 0.5 + 1.5)  # vanilla: A = -1 and r = 5 cost 5
    assert m["clip/neg_lo"] == pytest.approx(1 / 3) and m["clip/neg_hi"] == pytest.approx(2 / 3)
    assert m["clip/pos_hi"] == m["clip/pos_lo"] == 0.5
    assert (m["n/tok"], m["n/pos"], m["n/neg"]) == (7, 2, 3)
    assert m["clip/frac"] == pytest.approx(2 / 7)
    assert m["ratio/mean"] == pytest.approx(sum(r) / 7) and m["ratio/max"] == pytest.approx(5)


def test_dual_clip():
    loss, grad, m = tokens([5, 2, 5, 0.5], [-2, -2, 2, -2], dual_clip=3)
    assert loss == pytest.approx(3 * 2 + 2 * 2 - 1.24 * 2 + 0.8 * 2)
    near(grad, [0, 4, 0, 0])
    assert m["clip/frac"] == 0.75


@pytest.mark.parametrize("make", [f32, f64])
def test_equality_counts_as_clipped(make):
    r, adv = [0.8, 1.24, 0.8, 1.24, 2.0], [-1, 1, 1, -1, -1]
    low, high, *_, dual = make([math.log(x) for x in r]).exp()[0].tolist()  # 0.8, 1.24, 2 as this machine's exp has them
    loss, grad, m = tokens(r, adv, make, low=low, high=high, dual_clip=dual)
    assert grad[0] == grad[1] == grad[4] == 0  # exactly
    near(grad[2:4], [-0.8, 1.24])  # the other side of the bound: all of it, not half
    assert m["clip/pos_lo"] == m["clip/pos_hi"] == 0.5
    assert m["clip/neg_lo"] == pytest.approx(1 / 3) and m["clip/neg_hi"] == pytest.approx(2 / 3)
    assert m["clip/frac"] == pytest.approx(3 / 5)


def test_first_step_has_zero_loss_and_some_gradient():
    old = f32([-1, -2], [-3, -0.5])
    loss, grad, m = loss_and_grad(old, old, f32(1, -1), old < 0)
    assert loss == 0 and m["ratio/mean"] == m["ratio/max"] == 1 and m["kl_new_old"] == m["clip/frac"] == 0
    near(grad, f32([-0.25, -0.25], [0.25, 0.25]))


@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_a_step_moves_the_sampled_token_the_right_way(adv):
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    logp = logits.log_softmax(-1)[..., 1]
    policy_loss(logp, logp.detach(), f32(adv), logp < 0)[0].backward()
    after = (logits - 0.1 * logits.grad).log_softmax(-1)[..., 1]
    assert (after > logp).item() == (adv > 0)


def test_kl_direction():
    p, q = [0.75, 0.75, 0.75, 0.25], [0.5] * 4  # tokens in the exact proportions of p: means are expectations under p
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    p, q = f64(p).log(), f64(q).log()  # (1, 4)
    assert float(policy_loss(q, p, f64(1), q < 0)[1]["kl_new_old"]) == pytest.approx(kl)  # KL(old || new)
    m = floats(mismatch_metrics(q, p, q < 0))  # KL(mu || old)
    assert m["mismatch/kl_k1"] == pytest.approx(kl) and m["mismatch/kl_k3"] == pytest.approx(kl)


def test_log_probs_are_upcast_before_they_are_subtracted():
    x = f32([-12.3, -0.3]).bfloat16()
    _, _, m = loss_and_grad(x, x, f32(1), x < 0)
    assert m["ratio/mean"] == m["ratio/max"] == 1
    loss, _ = policy_loss(x, x - f32([0.0625, 0]).bfloat16(), f32(1), x < 0, high=9)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(-(math.exp(0.0625) + 1) / 2, rel=1e-6)
    w, _ = tis_weight(x, x - f32([0.0625, 0]).bfloat16(), x < 0)
    near(w, f32([math.exp(0.0625), 1]))
    assert policy_loss(f64([-1.0]), f64([-1.0]), f32(1), x[:, :1] < 0)[0].dtype == torch.float64


def test_huge_log_ratio_stays_finite():
    loss, grad, m = loss_and_grad(f32([-1, -500]), f32([-500, -1]), f32(-1), f32([0, 0]) == 0)
    assert float(loss) == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-6)
    assert grad.tolist() == [[0, 0]] and m["ratio/max"] == pytest.approx(math.exp(20), rel=1e-6)


# -----------------------------------------------------------------------------
# masks, weights, aggregation


@pytest.mark.parametrize("agg", AGGS)
def test_nothing_counted(agg):
    x, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    for denom in (None, 0, torch.tensor(0), 7):
        loss, grad, m = loss_and_grad(x, x, f32(NAN, 1), mask, weight=x, agg=agg, denom=denom, dual_clip=3)
        assert loss == 0 and (grad == 0).all() and set(m.values()) == {0}
    for weigh in (tis_weight, icepop_weight, mis_mask):
        w, m = weigh(x, x, mask)
        assert not w.any() and set(floats(m).values()) == {0}
    assert set(floats(mismatch_metrics(x, x, mask)).values()) == {0}


@pytest.mark.parametrize("agg", AGGS)
def test_masked_positions_reach_nothing(agg):
    new, old, adv, mask, weight = random_batch([3, 0, 5], 5)
    want = loss_and_grad(new, old, adv, mask, weight=weight, agg=agg, dual_clip=3)
    new, old, weight = (torch.where(mask, x, bad) for x, bad in [(new, NAN), (old, -INF), (weight, INF)])
    adv[1] = NAN  # the row that is masked as a whole
    loss, grad, m = loss_and_grad(new, old, adv, mask, weight=weight, agg=agg, dual_clip=3)
    assert loss == want[0] and torch.equal(grad, want[1]) and m == want[2]
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("level, want", [("token", [-0.25, -0.0208333, -0.2083333]), ("sequence", [-0.3, -0.125, -0.25])])
def test_sampler_weight_in_every_aggregation(level, want):
    old, mask = f32([-1, -1, -1], [-1, -1, -1]), lengths_mask([3, 2], 3)
    mu = old - f32([2, 0.5, 1], [3, 0.25, 9]).log()  # w; the 3 is capped to 2, the 9 masked; products 1 and 0.75
    weight, _ = tis_weight(old, mu, mask, level=level)
    for agg, loss in zip(AGGS, want, strict=True):
        near(policy_loss(old, old, f32(1, -1), mask, weight=weight, agg=agg)[0], loss)


def test_weight_and_advantage_shapes():
    new, old, adv, mask, _ = random_batch([3, 4], 4)
    w = f64(2, 0.5)
    want = loss_and_grad(new, old, adv, mask, weight=w[:, None].expand(2, 4))
    for a, x in [(adv, w), (adv, w[:, None]), (adv[:, None].expand(2, 4), w)]:
        loss, grad, _ = loss_and_grad(new, old, a, mask, weight=x)
        assert loss == want[0] and torch.equal(grad, want[1])


def test_only_new_logp_gets_a_gradient():
    new, old, adv, mask, weight = (x.requires_grad_() if x.is_floating_point() else x for x in random_batch([2, 3], 3))
    loss, metrics = policy_loss(new, old, adv, mask, weight=weight)
    loss.backward()
    assert new.grad.abs().sum() > 0 and old.grad is adv.grad is weight.grad is None
    assert not any(v.requires_grad for v in metrics.values())
    for weigh in (tis_weight, icepop_weight):
        assert not weigh(old, new, mask)[0].requires_grad


def test_sampler_weight_does_not_follow_the_update():
    old, mu, mask = f64([-1.0]), f64([-1.4]), torch.ones(1, 1, dtype=torch.bool)
    weight, _ = tis_weight(old, mu, mask)
    for step in (0.0, 0.1):  # two inner steps: the gradient is -w r A with the same w
        grad = loss_and_grad(old + step, old, f64(1), mask, weight=weight)[1]
        assert float(grad) == pytest.approx(-math.exp(0.4) * math.exp(step))


@pytest.mark.parametrize("agg, denom", list(zip(AGGS, [10, 2, 2 * 9], strict=True)))
def test_micro_batches_of_lengths_1_and_9(agg, denom):
    new, old, adv, mask, weight = random_batch([1, 9], 9)
    whole = loss_and_grad(new, old, adv, mask, weight=weight, agg=agg)  # own count
    parts = [loss_and_grad(new[i], old[i], adv[i], mask[i], weight=weight[i], agg=agg, denom=denom)
             for i in ([0], [1])]
    near(parts[0][0] + parts[1][0], whole[0], 1e-12)
    near(torch.cat([parts[0][1], parts[1][1]]), whole[1], 1e-12)
    weights = (whole[1] / loss_and_grad(new, old, adv, mask, weight=weight, agg=agg, denom=1)[1])[whole[1] != 0]
    near(weights, torch.full_like(weights, 1 / denom), 1e-12)  # every token divided alike


def test_denom_and_norm_length():
    new, old, adv, mask, _ = random_batch([2, 0, 3], 4)
    for agg, count in zip(AGGS, [5, 2, 2 * 4], strict=True):  # the empty row is not a sequence
        total = policy_loss(new, old, adv, mask, agg=agg, denom=1)[0]
        near(policy_loss(new, old, adv, mask, agg=agg)[0] * count, total, 1e-12)
        near(policy_loss(new, old, adv, mask, agg=agg, denom=torch.tensor(50))[0] * 50, total, 1e-12)
    near(policy_loss(new, old, adv, mask, agg=AGGS[2], norm_length=100)[0] * 200, total, 1e-12)
    for bad in ({"denom": 0}, {"denom": -1}, {"norm_length": 4}, {"agg": AGGS[2], "norm_length": 4, "denom": 8}):
        with pytest.raises(ValueError, match="denom is|norm_length is"):
            policy_loss(new, old, adv, mask, **bad)


def scalar_loss(new, old, adv, mask, weight, low, high, dual_clip, agg):
    """One token at a time in Python floats, from the textbook min and max. -> loss, gradient"""
    loss, grad, rows = 0.0, torch.zeros_like(new), [b for b in range(len(new)) if mask[b].any()]
    for b in rows:
        n = int(mask[b].sum())
        share = {AGGS[0]: int(mask.sum()), AGGS[1]: len(rows) * n, AGGS[2]: len(rows) * new.shape[1]}[agg]
        for j in range(n):
            a, w, r = float(adv[b]), float(weight[b, j]) / share, math.exp(float(new[b, j]) - float(old[b, j]))
            surrogate = min(r * a, min(max(r, low), high) * a)
            if dual_clip and a < 0:
                surrogate = max(surrogate, dual_clip * a)
            loss -= w * surrogate
            grad[b, j] = -w * r * a if surrogate == r * a else 0
    return loss, grad


@pytest.mark.parametrize("agg", AGGS)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_against_the_scalar_reference(agg, dual_clip):
    batch = random_batch([7, 0, 4, 1, 12, 9, 12], 12, seed=3)
    loss, grad, m = loss_and_grad(*batch[:4], weight=batch[4], agg=agg, dual_clip=dual_clip)
    want, want_grad = scalar_loss(*batch, 0.8, 1.24, dual_clip, agg)
    near(loss, want, 1e-12)
    near(grad, want_grad, 1e-12)
    assert m["clip/frac"] * m["n/tok"] == pytest.approx(int((batch[3] & (batch[2] != 0)[:, None] & (want_grad == 0)).sum()))
    near(policy_loss(*(x.float() if x.is_floating_point() else x for x in batch[:4]), weight=batch[4].float(), agg=agg,
                     dual_clip=dual_clip)[0], want, 1e-5)


@pytest.mark.parametrize("agg", AGGS)
def test_gradcheck(agg):
    new, old, adv, mask, weight = random_batch([2, 0, 4, 3], 4, seed=1)
    f = lambda x: policy_loss(x, old, adv, mask, weight=weight, dual_clip=1.5, agg=agg)[0]  # noqa: E731
    assert torch.autograd.gradcheck(f, new.requires_grad_())


def test_policy_loss_errors():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for match, args, kwargs in [
        ("mask is a bool", (x, x, x, x), {}),
        ("old_logp has shape", (x, x[:1], x, mask), {}),
        ("adv has shape", (x, x, torch.zeros(3), mask), {}),
        ("weight has shape", (x, x, x, mask), {"weight": x[:, :2]}),
        ("low and high", (x, x, x, mask), {"low": 0.2, "high": 0.28}),
        ("low and high", (x, x, x, mask), {"low": 1.0}),
        ("agg is one of", (x, x, x, mask), {"agg": "mean"}),
        ("dual_clip", (x, x, x, mask), {"dual_clip": 0.5}),
    ]:
        with pytest.raises(ValueError, match=match):
            policy_loss(*args, **kwargs)


# -----------------------------------------------------------------------------
# sampler corrections


def test_weight_numbers():
    mu, old, mask = f32([-2, -1, 0]), f32([-1, -1, 0]), lengths_mask([2], 3)
    w, m = tis_weight(old, mu, mask)
    assert w.tolist() == [[2, 1, 0]] and w.dtype == torch.float32  # 2.718 capped; 0 where masked
    assert floats(m) == {"is/mean": 1.5, "is/max": 2, "is/ess": 0.9, "is/frac_capped": 0.5, "is/missing": 0, "n/is": 2}
    w, m = icepop_weight(old, mu, mask, low=0.5, high=2)
    assert w.tolist() == [[0, 1, 0]]
    assert floats(m) == {"is/mean": 0.5, "is/max": 1, "is/ess": 0.5, "is/frac_capped": 0.5, "is/missing": 0, "n/is": 2}
    w, _ = icepop_weight(f32([-1, -1, -1]), f32([-1.5, -0.1, -2.7]), lengths_mask([3], 3))  # 1.65, 0.41, 5.47
    near(w, f32([math.exp(0.5), 0, 0]))


def test_icepop_band_is_closed():
    w, _ = icepop_weight(f32([0, 0]), f32([0.5, 2]).log(), lengths_mask([2], 2), low=0.5, high=2)
    assert w.tolist() == [[2, 0.5]]


def test_sequence_weight_numbers():
    d = f32([0.5, 0.1, 9], [1, 1, 0], [-1, 0.5, 0], [9, 9, 9])
    w, m = tis_weight(d, torch.zeros(4, 3), lengths_mask([2, 2, 3, 0], 3), level="sequence")
    a, c = math.exp(0.6), math.exp(-0.5)
    near(w, f32([a, a, 0], [2, 2, 0], [c, c, c], [0, 0, 0]))
    m = floats(m)  # over the three sequences that have a token
    assert m["n/is"] == 3 and m["is/frac_capped"] == pytest.approx(1 / 3)
    assert m["is/mean"] == pytest.approx((a + 2 + c) / 3, rel=1e-6)
    assert m["is/ess"] == pytest.approx((a + 2 + c) ** 2 / (3 * (a * a + 4 + c * c)), rel=1e-6)


def test_mis_numbers():
    d = f32([0.0005, 0.0005, 5], [0.0033, 0, 0], [0.01, -0.01, 0], [-0.0033, 0, 0], [0, 0, 0])
    mask = lengths_mask([2, 3, 3, 3, 0], 3)
    kept, m = mis_mask(d, torch.zeros(5, 3), mask)
    assert kept.dtype == torch.bool and kept.tolist() == (mask & torch.tensor([1, 0, 1, 0, 0]).bool()[:, None]).tolist()
    assert m["is/frac_capped"] == m["is/mean"] == m["is/ess"] == 0.5 and m["n/is"] == 4
    assert mis_mask(d, torch.zeros(5, 3), mask, low=0.99, high=1.01)[0].equal(mask)


def test_missing_sampler_log_prob():
    old, mask = f32([-1, -1, -1]), lengths_mask([3], 3)
    mu = f32([-1.4, NAN, -0.8])
    w, m = tis_weight(old, mu, mask)
    near(w, f32([math.exp(0.4), 1, math.exp(-0.2)]))
    assert m["is/missing"] == 1 and tis_weight(old, mu, lengths_mask([1], 3))[1]["is/missing"] == 0
    near(icepop_weight(old, mu, mask)[0], w)
    near(tis_weight(old, mu, mask, level="sequence")[0], torch.full((1, 3), math.exp(0.2)))
    assert torch.isfinite(policy_loss(old, old, f32(1), mask, weight=w)[0])
    m = floats(mismatch_metrics(old, mu, mask))
    assert m["n/mu"] == 2 and m["mismatch/kl_k1"] == pytest.approx(-0.1) and m["mismatch/abs_dlogp_max"] == pytest.approx(0.4)
    for weigh in (tis_weight, icepop_weight, mis_mask):
        w, m = weigh(old, None, lengths_mask([2], 3))
        assert w.tolist() == [[1, 1, 0]] and m["is/missing"] == 2


def test_missing_token_does_not_dilute_the_geometric_mean():
    old = f32([0.0015, 7], [0.0007, 7])  # exp(0.0015) is outside, and 0.0015 / 2 would be inside
    assert mis_mask(old, f32([0, NAN], [0, NAN]), old < 9)[0].tolist() == [[False, False], [True, True]]


def test_impossible_token_is_capped_dropped_or_masked():
    old, mu, mask = f32([-1, -1, -30]), f32([-INF, -1, -1]), lengths_mask([3], 3)
    w, m = tis_weight(old, mu, mask)
    near(w, f32([2, 1, math.exp(-20)]), 1e-12)
    assert m["is/frac_capped"] == pytest.approx(1 / 3)
    assert tis_weight(old, mu, mask, level="sequence")[0].tolist() == [[2, 2, 2]]
    assert icepop_weight(old, mu, mask)[0].tolist() == [[0, 1, 0]]
    assert not mis_mask(old, mu, mask)[0].any()
    loss, grad, _ = loss_and_grad(old, old, f32(1), mask, weight=w)
    assert float(loss) == pytest.approx(-1, rel=1e-6) and grad.isfinite().all()
    m = floats(mismatch_metrics(old, mu, mask))
    assert m["mismatch/abs_dlogp_max"] == 20 and math.isfinite(m["mismatch/kl_k3"])


def test_mismatch_numbers():
    m = floats(mismatch_metrics(f32([-1.5, -1.75, 0]), f32([-1, -2, NAN]), lengths_mask([2], 3)))  # d = -0.5, 0.25
    assert m["mismatch/kl_k1"] == pytest.approx(0.125)
    assert m["mismatch/kl_k3"] == pytest.approx(0.0702780, abs=1e-6)
    assert m["mismatch/abs_dlogp_mean"] == pytest.approx(0.375) and m["mismatch/abs_dlogp_p99"] == 0.5
    d = torch.arange(200, 0, -1.0)[None] / 1000
    d[:, ::2] *= -1
    m = floats(mismatch_metrics(d, torch.zeros(1, 200), d < 9))
    assert m["mismatch/abs_dlogp_p99"] == pytest.approx(0.198) and m["mismatch/abs_dlogp_max"] == pytest.approx(0.2)


def test_weight_errors():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for weigh in (tis_weight, icepop_weight, mis_mask, mismatch_metrics):
        with pytest.raises(ValueError, match="mu_logp has shape"):
            weigh(x, x[:1], mask)
        with pytest.raises(ValueError, match="mask is a bool"):
            weigh(x, x, x)
    for match, call in [
        ("cap", lambda: tis_weight(x, x, mask, cap=0)),
        ("level", lambda: tis_weight(x, x, mask, level="seq")),
        ("low and high", lambda: icepop_weight(x, x, mask, low=1.5)),
        ("low and high", lambda: mis_mask(x, x, mask, low=0, high=0.001)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


logps = st.lists(st.one_of(st.floats(-40, 0), st.sampled_from([-INF, NAN])), min_size=6, max_size=6)


@quick
@given(logps, st.floats(0.1, 50), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_weights_are_bounded_and_finite(mu, cap, lengths):
    old, mu, mask = torch.full((2, 3), -2.0), torch.tensor(mu).view(2, 3), lengths_mask(lengths, 3)
    for level in ("token", "sequence"):
        w, m = tis_weight(old, mu, mask, cap, level)
        assert ((w >= 0) & (w <= torch.tensor(cap))).all() and (w[~mask] == 0).all()
        assert all(math.isfinite(v) for v in floats(m).values()) and 0 <= m["is/ess"] <= 1 + 1e-12
    assert all(len(set(row[ok].tolist())) <= 1 for row, ok in zip(w, mask, strict=True))  # sequence: one value a row
    w, m = icepop_weight(old, mu, mask, 0.5, 5)
    assert ((w == 0) | ((w >= 0.5) & (w <= 5))).all() and 0 <= m["is/ess"] <= 1 + 1e-12


# -----------------------------------------------------------------------------
# splitting a batch


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.data())
def test_any_split_adds_up(lengths, data):
    """Loss, gradient and metrics of micro-batches are those of the whole, whatever the split, empty rows included."""
    new, old, adv, mask, weight = random_batch(lengths, 5, seed=len(lengths))
    mu = torch.where(weight > 1.8, NAN, torch.where(weight < 0.5, -INF, old - weight.log()))
    cuts = sorted(data.draw(st.lists(st.integers(1, len(lengths)), max_size=3, unique=True)) + [0, len(lengths)])
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
    agg, dual_clip = data.draw(st.sampled_from(AGGS)), data.draw(st.sampled_from([None, 1.5]))
    denom = {AGGS[0]: sum(lengths), AGGS[1]: sum(n > 0 for n in lengths), AGGS[2]: sum(n > 0 for n in lengths) * 5}[agg]

    def step(s, **kwargs):
        return loss_and_grad(new[s], old[s], adv[s], mask[s], weight=weight[s], agg=agg, dual_clip=dual_clip, **kwargs)

    loss, grad, metrics = step(slice(None))
    micro = [step(s, denom=denom) for s in parts]
    near(sum(m[0] for m in micro), loss, 1e-12)
    near(torch.cat([m[1] for m in micro]), grad, 1e-12)
    assert floats(merge_metrics([m[2] for m in micro])) == pytest.approx(metrics, rel=1e-12, abs=1e-14)

    for f in (tis_weight, icepop_weight, mis_mask, lambda *x: tis_weight(*x, level="sequence"),
              lambda *x: (None, mismatch_metrics(*x)), lambda o, _, m: (None, group_metrics((o[:, 0] > -0.5).float(), 1))):
        whole = floats(f(old, mu, mask)[1])
        merged = floats(merge_metrics([f(old[s], mu[s], mask[s])[1] for s in parts]))
        if "mismatch/abs_dlogp_p99" in whole:  # a percentile only gets a bound
            assert merged.pop("mismatch/abs_dlogp_p99") >= whole.pop("mismatch/abs_dlogp_p99")
        assert merged == pytest.approx(whole, rel=1e-12, abs=1e-14)


def test_merge_weighs_each_share_by_its_own_count():
    a = tokens([1.5, 1, 1, 1], [1, 1, -1, 0])[2]  # half of 2 positives at the bound
    b = tokens([1, 1, 0.5], [1, 1, -1])[2]
    m = floats(merge_metrics([merge_metrics([a]), b]))
    assert m["clip/pos_hi"] == 0.25 and m["clip/neg_lo"] == 0.5 and m["clip/frac"] == pytest.approx(2 / 7)
    assert m["n/tok"] == 7 and m["ratio/max"] == 1.5
    assert m["ratio/mean"] == pytest.approx(7 / 7) and m["ratio/mean"] != a["ratio/mean"]
    for bad in ([], [a, {"n/tok": 1}]):
        with pytest.raises(ValueError, match="same keys"):
            merge_metrics(bad)


# -----------------------------------------------------------------------------
# KL to a reference


@pytest.mark.parametrize("estimator,value,slope", [("k1", -math.log(2), 1), ("k2", math.log(2) ** 2 / 2, -math.log(2)),
                                                   ("k3", 1 - math.log(2), -1)])  # fmt: skip
def test_kl_estimators_by_hand(estimator, value, slope):
    """log pi = 0, log ref = ln 2: k1 -0.6931, k2 0.2402, k3 0.3069; and what each does to the token's log-prob."""
    new = f64([0.0]).requires_grad_()
    loss, metrics = kl_loss(new, f64([math.log(2)]), torch.tensor([[True]]), estimator)
    (grad,) = torch.autograd.grad(loss, new)
    near([loss.item(), grad.item()], [value, slope])
    near([metrics["kl_ref/k1"], metrics["kl_ref/k3"]], [-math.log(2), 1 - math.log(2)])


def test_kl_gradients_are_those_of_the_table():
    """Exactly, over a vocabulary of five: the mean of each estimator's gradient over tokens drawn from the policy."""
    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
    logits, log_ref = logits.requires_grad_(), ref.log_softmax(-1)
    p = logits.detach().softmax(-1)

    def divergence(a, b):
        return (a.exp() * (a - b)).sum()

    (to_ref,) = torch.autograd.grad(divergence(logits.log_softmax(-1), log_ref), logits)
    (from_ref,) = torch.autograd.grad(divergence(log_ref, logits.log_softmax(-1)), logits)
    for estimator, want in (("k1", torch.zeros(5)), ("k2", to_ref), ("k3", from_ref)):
        logp, mask = logits.log_softmax(-1)[None], torch.ones(1, 1, dtype=torch.bool)
        losses = [kl_loss(logp[:, i : i + 1], log_ref[None, i : i + 1], mask, estimator)[0] for i in range(5)]
        (grad,) = torch.autograd.grad((p * torch.stack(losses)).sum(), logits)  # the drawing itself is not differentiated
        near(grad, want, 1e-12)


@quick
@given(st.lists(st.floats(-40, 40), min_size=1, max_size=6), st.integers(0, 3))
def test_k3_is_never_negative_and_masked_tokens_reach_nothing(d, masked):
    new = f64(d + [NAN] * masked)
    mask = lengths_mask([len(d)], len(d) + masked)
    new = new.requires_grad_()
    for agg in AGGS:
        loss, metrics = kl_loss(new, torch.zeros_like(new), mask, "k3", agg)
        (grad,) = torch.autograd.grad(loss, new)
        assert loss >= 0 and metrics["kl_ref/k3"] >= 0 and grad.isfinite().all() and not grad[~mask].any()


def test_kl_splits_and_aggregates_as_the_policy_loss_does():
    new, ref = f64([0.1, 0.2, 0.3, 0.0], [0.4, 0.0, 0.0, 0.0]).log(), torch.full((2, 4), -1.0, dtype=torch.float64)
    new = new.nan_to_num(neginf=0.0)
    mask = lengths_mask([3, 1], 4)
    for agg, denom in (("token-mean", 4), ("seq-mean-token-mean", 2), ("seq-mean-token-sum-norm", 2 * 4)):
        whole, _ = kl_loss(new, ref, mask, "k2", agg)
        parts = [kl_loss(new[i : i + 1], ref[i : i + 1], mask[i : i + 1], "k2", agg, denom)[0] for i in range(2)]
        near(sum(parts), whole)
    value = (new + 1).square() / 2
    near(kl_loss(new, ref, mask, "k2", "seq-mean-token-mean")[0], (value[0, :3].mean() + value[1, 0]) / 2)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_loss(new, ref, mask, "k4")
