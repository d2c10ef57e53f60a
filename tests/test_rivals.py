"""CISPO and BAPO by hand, against scalar references, two processes. `python -m pytest tests/test_rivals.py`"""

import math
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipping import AGGS, merge_metrics, policy_loss
from rivals import bapo_bounds, bapo_solve, bapo_sums, cispo_loss

NAN, INF = math.nan, math.inf
quick = settings(max_examples=40, deadline=None, derandomize=True)


def f64(*x):
    return torch.tensor(x, dtype=torch.float64)


def floats(metrics):
    return {k: float(v) for k, v in metrics.items()}


def near(got, want, tol=1e-12):
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, atol=tol, rtol=0)


def random_batch(lengths, width, seed=0):
    """-> new, old, mu, adv (some 0), mask, weight in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    b = len(lengths)
    old, adv = -draw(b, width).abs(), draw(b)
    adv[2::3] = 0
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return old + 0.5 * draw(b, width), old, old - 0.2 * draw(b, width), adv, mask, (0.5 * draw(b, width)).exp()


def loss_and_grad(new, *args, loss=cispo_loss, **kwargs):
    new = new.clone().requires_grad_()
    value, metrics = loss(new, *args, **kwargs)
    (grad,) = torch.autograd.grad(value, new)
    return value.detach(), grad, floats(metrics)


# -----------------------------------------------------------------------------
# CISPO


def test_cispo_by_hand():
    r, adv = [3, 0.1, 1, 3, 0.1, 2], [2, 2, 2, -1, -1, 0]
    new, a, w = f64([-0.5, -1, -2, -3, -4, -5]), f64(adv), f64([1, 1, 3, 1, 0.5, 1])
    old, mask = new - f64(r).log(), new < 0
    loss, grad, m = loss_and_grad(new, old, a, mask, 0.8, 1.24, w, denom=10)
    near(grad, f64([-0.248, -0.16, -0.6, 0.124, 0.04, 0]))  # -w A clip(r) / denom: no token is left out
    near(loss, (1.24 * 2 * 0.5 + 0.8 * 2 * 1 + 3 * 2 * 2 - 1.24 * 3 - 0.5 * 0.8 * 4) / 10)
    assert m["clip/frac"] == pytest.approx(5 / 6)  # A = 0 is counted: its ratio was outside
    assert (m["n/tok"], m["n/pos"], m["n/neg"]) == (6, 3, 2)
    assert m["clip/pos_hi"] == pytest.approx(1 / 3) and m["clip/pos_lo"] == pytest.approx(1 / 3)
    assert m["clip/neg_hi"] == m["clip/neg_lo"] == 0.5
    assert m["ratio/max"] == pytest.approx(3) and m["ratio/mean"] == pytest.approx(sum(r) / 6)
    assert m["kl_new_old"] == pytest.approx(sum(x - 1 - math.log(x) for x in r) / 6)
    _, ppo, _ = loss_and_grad(new, old, a, mask, 0.8, 1.24, None, w, denom=10, loss=policy_loss)
    near(ppo, f64([0, -0.02, -0.6, 0.3, 0, 0]))  # for comparison: two of them have lost their gradient


def test_cispo_has_no_lower_bound_by_default():
    new = f64([-1, -1])
    loss, grad, m = loss_and_grad(new, new - f64([0.01, 9]).log(), f64(1), new < 0, denom=1)
    near(grad, f64([-0.01, -1.24]))
    assert m["clip/frac"] == 0.5
    near(loss, 1.25)


def test_cispo_at_the_bounds_and_at_the_clamp():
    new = f64([-1, -1, -1, -1])
    low, _, high = f64([0.8, 1, 1.24]).log().exp()[0].tolist()  # as this machine's exp has them
    _, grad, m = loss_and_grad(new * 0, -f64([0.8, 1.24, 1, 1]).log(), f64(1), new < 0, low, high, denom=1)
    near(grad, f64([-0.8, -1.24, -1, -1]))
    assert m["clip/frac"] == 0 and m["clip/pos_lo"] == m["clip/pos_hi"] == 0.25  # at the bound: nothing was changed
    _, grad, m = loss_and_grad(f64([0, -900]), f64([-900, 0]), f64(-1), f64([1, 1]) > 0, high=INF, denom=1)
    near(grad, f64([math.exp(20), math.exp(-20)]), 1e-6)
    assert m["ratio/max"] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("agg", AGGS)
def test_cispo_gradient_is_ppos_inside_the_bounds(agg):
    new, old, _, adv, mask, weight = random_batch([3, 0, 5, 1], 5)
    _, want, _ = loss_and_grad(new, old, adv, mask, 0, 1e6, None, weight, agg, loss=policy_loss)
    _, grad, m = loss_and_grad(new, old, adv, mask, 0, 1e6, weight, agg)
    near(grad, want)
    assert m["clip/frac"] == 0 and (grad[~mask] == 0).all()
    for name in ("ratio/mean", "ratio/max", "kl_new_old", "n/tok"):
        assert m[name] == floats(policy_loss(new, old, adv, mask)[1])[name]


@pytest.mark.parametrize("agg", AGGS)
def test_cispo_against_a_scalar_reference(agg):
    new, old, _, adv, mask, weight = random_batch([7, 0, 4, 1, 12], 12, seed=3)
    loss, grad, m = loss_and_grad(new, old, adv, mask, 0.8, 1.24, weight, agg)
    want, slope, clamped, rows = 0.0, torch.zeros_like(new), 0, 4
    for b in range(5):
        for t in range(int(mask[b].sum())):
            share = {AGGS[0]: 24, AGGS[1]: rows * int(mask[b].sum()), AGGS[2]: rows * 12}[agg]
            r = math.exp(new[b, t] - old[b, t])
            clamped += not 0.8 <= r <= 1.24
            slope[b, t] = -float(weight[b, t] * adv[b]) * min(max(r, 0.8), 1.24) / share
            want += float(slope[b, t] * new[b, t])
    near(loss, want)
    near(grad, slope)
    assert m["clip/frac"] == pytest.approx(clamped / 24) and clamped > 4


@pytest.mark.parametrize("agg, denom", list(zip(AGGS, [9, 3, 15], strict=True)))
def test_cispo_micro_batches_add_up(agg, denom):
    new, old, _, adv, mask, weight = random_batch([3, 0, 5, 1], 5)
    loss, grad, m = loss_and_grad(new, old, adv, mask, weight=weight, agg=agg)
    parts = [loss_and_grad(new[i], old[i], adv[i], mask[i], weight=weight[i], agg=agg, denom=denom)
             for i in ([0, 1], [2], [3])]
    near(sum(p[0] for p in parts), loss)
    near(torch.cat([p[1] for p in parts]), grad)
    assert floats(merge_metrics([p[2] for p in parts])) == pytest.approx(m, rel=1e-12)
    near(cispo_loss(new, old, adv, mask, agg=AGGS[2], norm_length=100)[0] * 300,
         cispo_loss(new, old, adv, mask, denom=1)[0], 1e-9)


def test_cispo_masks_and_dtypes():
    new, old, _, adv, mask, weight = random_batch([3, 0, 5], 5)
    want = loss_and_grad(new, old, adv, mask, weight=weight)
    adv[1] = NAN
    got = loss_and_grad(*(torch.where(mask, x, bad) for x, bad in [(new, NAN), (old, -INF)]), adv, mask,
                        weight=torch.where(mask, weight, INF))
    assert got[0] == want[0] and torch.equal(got[1], want[1]) and got[2] == want[2]
    for denom in (None, 0, 7):
        loss, grad, m = loss_and_grad(new, old, adv, mask & False, denom=denom)
        assert loss == 0 and (grad == 0).all() and set(m.values()) == {0}
    x = new.bfloat16().requires_grad_()
    loss, m = cispo_loss(x, old.requires_grad_(), adv.nan_to_num().requires_grad_(), mask, weight=weight.requires_grad_())
    loss.backward()
    assert x.grad is not None and old.grad is adv.grad is weight.grad is None and not any(v.requires_grad for v in m.values())
    assert cispo_loss(new.float(), old.float(), adv.nan_to_num().float(), mask)[0].dtype == torch.float32


def test_cispo_errors():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for match, args, kwargs in [
        ("mask is a bool", (x, x, x, x), {}),
        ("old_logp has shape", (x, x[:1], x, mask), {}),
        ("adv has shape", (x, x, torch.zeros(3), mask), {}),
        ("weight has shape", (x, x, x, mask), {"weight": x[:, :2]}),
        ("low and high", (x, x, x, mask), {"high": 0.28}),
        ("agg is one of", (x, x, x, mask), {"agg": "mean"}),
        ("denom is", (x, x, x, mask), {"denom": 0}),
        ("norm_length is", (x, x, x, mask), {"norm_length": 3}),
    ]:
        with pytest.raises(ValueError, match=match):
            cispo_loss(*args, **kwargs)


# -----------------------------------------------------------------------------
# BAPO


def bapo(r, adv, pi, old=0.5, **kwargs):
    """One row of tokens with these ratios, advantages and sampler probabilities -> low, high, metrics as floats."""
    old = torch.full((1, len(r)), math.log(old), dtype=torch.float64)
    low, high, m = bapo_bounds(old + f64(r).log(), old, f64(pi).log(), f64(adv), old < 1, **kwargs)
    assert (low, high) == (m["bapo/low"], m["bapo/high"]) and isinstance(low, float) and isinstance(high, float)
    return low, high, floats(m)


def test_bapo_only_high_moves():
    # P = 0.5 min(2, h) + 0.25 * 0.4 * 0.5, N = 0.5 * 4 * max(0.3, 0.6) + 0.25 * 6 * 1 = 2.7; A = 0 counts nowhere
    r, adv, pi = [2, 0.5, 0.3, 1, 9], [1, 0.4, -4, -6, 0], [0.5, 0.25, 0.5, 0.25, 1]
    low, high, m = bapo(r, adv, pi)
    rho = {h: (h / 2 + 0.05) / (2.65 - h / 2) for h in (1.2, 1.35, 1.4, 1.45)}
    assert rho[1.2] < rho[1.35] < 0.4 > 0.38 and rho[1.4] == pytest.approx(0.75 / 1.95) and rho[1.45] > 0.4
    assert (low, high) == (0.6, 1.45) and m["bapo/rho"] == pytest.approx(rho[1.45]) and m["bapo/reached"] == 1
    assert bapo(r, adv, pi, target=0.36)[:2] == (0.6, 1.35) and rho[1.35] == pytest.approx(0.725 / 1.975)


def test_bapo_docstring_number():
    low, high, m = bapo([2, 1], [1, -5], [0.5, 0.5])
    assert (low, high) == (0.6, 1.45) and m["bapo/rho"] == pytest.approx(1.45 / 3.55)
    assert bapo([2, 1], [1, -5], [0.5, 0.5], target=0.3)[2]["bapo/rho"] == pytest.approx(1.2 / 3.8)


def test_bapo_starts_where_it_suffices():
    low, high, m = bapo([1, 1, 1, 1], [1, 1, -1, -1], [0.5, 0.5, 0.5, 0.4])  # P = 1, N = 0.9
    assert (low, high) == (0.6, 1.2) and m["bapo/rho"] == pytest.approx(10) and m["bapo/reached"] == 1
    _, _, m = bapo([1, 1], [1, -1], [0.5, 0.5])  # P = N
    assert (m["bapo/low"], m["bapo/high"], m["bapo/rho"], m["bapo/reached"]) == (0.6, 1.2, INF, 1)
    assert bapo([1, 1], [1, 0], [0.5, 0.5])[:2] == (0.6, 1.2)  # no negative: rho = 1


def test_bapo_low_moves_after_high():
    # P = 1.5, N = 0.5 max(0.5, low): rho = 3 / (3 - low) rises with low only because P > N, with a target above 1
    low, high, m = bapo([1, 1, 0.5, 0.5], [1, 2, -0.5, -0.5], [0.5] * 4, target=1.35)
    assert (low, high) == (0.78, 3.0) and m["bapo/rho"] == pytest.approx(3 / 2.22) and m["bapo/reached"] == 1
    # the usual case, N > P: rho = 1 / 3.2 with high at its end, and every step of low takes it further away
    low, high, m = bapo([2, 0.7, 0.7, 0.7], [1, -4, -4, -4], [0.5] * 4)
    assert (low, high) == (0.9, 3.0) and m["bapo/rho"] == pytest.approx(1 / (5.4 - 1)) and m["bapo/reached"] == 0
    assert bapo([2, 0.7, 0.7, 0.7], [1, -4, -4, -4], [0.5] * 4, target=0.312)[:2] == (0.6, 2.0)


def test_bapo_sums_by_hand():
    old, r, adv = f64([0.2, 0.4, 0.5, 0.8]).log(), f64([2, 1.5, 0.5, 0.7]), f64([1, -3, -1, 2])
    grid = ((0.6, 0.9), (1.2, 3.0), 0.1, 0.9)
    sums = bapo_sums(old + r.log(), old, f64([0.1, 0.5, 0.25, NAN]).log(), adv, old < 0, *grid)
    p = [0.1 * min(2, h) + 0.8 * 2 * 0.7 for h in (1.2, 2.1, 3.0)]  # pi_samp, not pi_old; pi_old = 0.8 where it is missing
    n = [0.5 * 3 * 1.5 + 0.25 * low for low in (0.6, 0.7, 0.8, 0.9)]
    near(sums, p + n)
    assert sums.dtype == torch.float64
    near(bapo_sums(old + r.log(), old, None, adv, old < 0, *grid)[0], 0.2 * 1.2 + 0.8 * 2 * 0.7)
    near(bapo_sums(old + r.log(), old, f64([0, 0.5, 0.25, 0.5]).log(), adv, old < 0, *grid)[:3], [0.7] * 3)
    assert bapo_sums(old, old, old, adv, old < 0).shape == (37 + 16,)


def test_bapo_guards():
    new, old, mu, adv, mask, _ = random_batch([3, 0, 5], 5)
    for args in [(new, old, mu, adv, mask & False), (new, old, mu, -adv.abs(), mask), (new, old, mu, adv * 0, mask),
                 (new + NAN, old, mu, adv, mask), (new, old, mu - INF, adv, mask)]:
        low, high, m = bapo_bounds(*args)
        assert (low, high) == (0.6, 1.2) and m["bapo/rho"] == m["bapo/reached"] == 0
    want = bapo_bounds(new, old, mu, adv, mask, 2.0)
    adv[1] = NAN
    got = bapo_bounds(*(torch.where(mask, x, bad) for x, bad in [(new, NAN), (old, -INF), (mu, INF)]), adv, mask, 2.0)
    assert floats(got[2]) == floats(want[2]) and want[1] > 1.2
    assert all(v.dim() == 0 and v.dtype == torch.float64 for v in want[2].values())
    assert bapo_bounds(*(x.float().requires_grad_() for x in (new, old, mu)), adv, mask, 2.0)[1] == want[1]


def test_bapo_grids():
    kwargs = {"low": (0.8, 0.8), "high": (1.2, 1.33)}  # one low; 1.2, 1.25, 1.3: the end is no multiple of the step
    assert bapo([2, 1], [1, -9], [0.5, 0.5], **kwargs)[:2] == (0.8, 1.3)
    assert bapo([2, 1], [1, -9], [0.5, 0.5], low=(0.6, 0.65), high=(1.2, 1.2))[:2] == (0.64, 1.2)
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for match, kwargs in [("a range is", {"low": (0.9, 0.6)}), ("a range is", {"step_high": 0}), ("target is", {"target": 0}),
                          ("low and high", {"low": (0.6, 1.1)}), ("low and high", {"high": (0.2, 0.3)})]:
        with pytest.raises(ValueError, match=match):
            bapo_bounds(x, x, x, x, mask, **kwargs)
    with pytest.raises(ValueError, match="mu_logp has shape"):
        bapo_bounds(x, x, x[:1], x, mask)
    with pytest.raises(ValueError, match="sums has shape.*37 highs and 16 lows"):
        bapo_solve(torch.ones(52))


def scalar_bapo(r, adv, pi, target):
    """Algorithm 1 as printed, from the textbook min and clip. The caps keep their last digit out of the float noise."""
    def rho(low, high):
        clip = lambda x, a, b: min(max(x, a), b)  # noqa: E731
        top = sum(p * min(x * a, clip(x, 0, high) * a) for x, a, p in zip(r, adv, pi, strict=True) if a > 0)
        return abs(top) / abs(sum(p * min(x * a, clip(x, low, high) * a) for x, a, p in zip(r, adv, pi, strict=True)))

    low, high = 0.6, 1.2
    while rho(low, high) < target and low + 0.02 <= 0.9 + 1e-9:
        if high + 0.05 <= 3.0 + 1e-9:
            high = round(high + 0.05, 10)
        else:
            low = round(low + 0.02, 10)
    return low, high, rho(low, high)


@quick
@given(st.integers(0, 10**6), st.floats(0.2, 6), st.sampled_from([0.1, 0.4, 1.0, 1.7, 4.0]))
def test_bapo_against_algorithm_1(seed, imbalance, target):
    g = torch.Generator().manual_seed(seed)
    r, adv, pi = (torch.randn(6, generator=g).double() for _ in range(3))
    r, pi, adv = (r * 0.7).exp(), pi.sigmoid(), torch.where(adv < 0, imbalance * adv, adv)
    adv[0] = adv[0].abs()
    low, high, m = bapo(r.tolist(), adv.tolist(), pi.tolist(), target=target)
    want = scalar_bapo(r.tolist(), adv.tolist(), pi.tolist(), target)
    assert (low, high) == want[:2] and m["bapo/rho"] == pytest.approx(want[2], rel=1e-9)
    assert m["bapo/reached"] == (want[2] >= target)
    if target <= 1:  # what the docstring says of (3): low stays, or both bounds end at their ends with the target missed
        assert low == 0.6 if m["bapo/reached"] else (low, high) == (0.9, 3.0)


def parts():
    """A mini-batch as two micro-batches of unequal width, and whole. target 2 makes high move."""
    new, old, mu, adv, mask, _ = random_batch([3, 0, 5, 2], 5, seed=102)
    yield from ((new[:1, :3], old[:1, :3], mu[:1, :3], adv[:1], mask[:1, :3]), (new[1:], old[1:], mu[1:], adv[1:], mask[1:]))
    yield new, old, mu, adv, mask


def test_bapo_sums_add_over_micro_batches():
    first, second, whole = (bapo_sums(*part) for part in parts())
    near(first + second, whole)
    want = bapo_solve(whole, 2.0)
    assert bapo_solve(first + second, 2.0)[:2] == want[:2] and want[:2] == (0.6, 1.6)


def worker(rank, port, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        sums = bapo_sums(*list(parts())[rank])
        kept = sums.clone()
        low, high, m = bapo_solve(sums, 2.0)
        assert torch.equal(sums, kept)  # solving twice gives the same
        torch.save((low, high, floats(m), bapo_bounds(*list(parts())[rank], 2.0)[:2]), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_bapo_on_two_processes_is_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, tmp_path), nprocs=2)
    (low, high, m, again), other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    want = bapo_bounds(*list(parts())[2], 2.0)
    assert (low, high, m, again) == other and (low, high) == again == want[:2]
    assert m == pytest.approx(floats(want[2]), rel=1e-12)
    assert all(bapo_bounds(*part, 2.0)[:2] != want[:2] for part in list(parts())[:2])  # each alone would have gone elsewhere
