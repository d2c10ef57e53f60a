"""Numbers by hand, the four quadrants, freezing, resume, two processes. `python -m pytest tests/test_acrl.py`"""

import json
import math
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acrl import ACRL
from clipping import policy_loss

NAN, INF = math.nan, math.inf
quick = settings(max_examples=40, deadline=None, derandomize=True)
PAIR = [(0.5, 0.4), (0.2, 0.4)]  # (pi, mu): above mu by 0.1, and half of it


def f64(*x):
    return torch.tensor(x, dtype=torch.float64)


def floats(metrics):
    return {k: float(v) for k, v in metrics.items()}


def call(controller, rows, adv, mask=None, make=f64):
    """Rows of (pi, mu) -> weight, metrics as floats."""
    pi, mu = (make(*[[math.log(p[i]) if p[i] else -INF for p in row] for row in rows]) for i in (0, 1))
    mask = torch.ones_like(pi, dtype=torch.bool) if mask is None else mask
    w, m = controller.weight(pi, mu, torch.as_tensor(adv, dtype=pi.dtype), mask)
    return w, floats(m)


def primed(X, **kwargs):
    """A controller whose set point is frozen at X."""
    controller = ACRL(baseline_batches=1, **kwargs)
    controller.load_state_dict({"X": X, "batches": 1, "distance": controller.distance})
    return controller


# -----------------------------------------------------------------------------
# the law


def test_four_quadrants():
    rows = [[(0.2, 0.4), (0.4, 0.2)]] * 2  # pi / mu = 0.5 and 2; Y = 0.2
    up, down = 2**0.65, 2**-0.65
    w, m = call(primed(0.1), rows, [3, -3])  # Y = 2 X, alpha = -0.65 where A > 0
    assert w[0].tolist() == pytest.approx([up, down])  # A > 0: below mu amplified, above damped
    assert w[1].tolist() == pytest.approx([down, up])
    assert m["acrl/alpha_pos"] == pytest.approx(-0.65) and m["acrl/Y"] == pytest.approx(0.2) and m["acrl/X"] == 0.1
    w, m = call(primed(0.4), rows, [3, -3])  # Y = X / 2, alpha = +0.325
    assert w[0].tolist() == pytest.approx([2**-0.325, 2**0.325])
    assert w[1].tolist() == pytest.approx([2**0.325, 2**-0.325])
    assert m["acrl/alpha_pos"] == pytest.approx(0.325)
    assert [up, down, 2**0.325, 2**-0.325] == pytest.approx([1.569, 0.637, 1.253, 0.798], abs=5e-4)  # the docstring's


def test_the_gap_closes_when_too_wide_and_opens_when_too_narrow():
    """One gradient step on log pi with these weights: tokens pulled to mu gain on those pushed away, and the reverse."""
    rows, adv = [[(0.2, 0.4), (0.4, 0.2)]] * 2, f64(1, -1)
    pi, mu = (f64(*[[p[i] for p in row] for row in rows]) for i in (0, 1))
    change = {}
    for X in (0.1, 0.2, 0.4):
        w, _ = primed(X).weight(pi.log(), mu.log(), adv, pi > 0)
        new = pi.log().requires_grad_()
        policy_loss(new, pi.log(), adv, pi > 0, weight=w)[0].backward()
        after = (pi.log() - 0.01 * new.grad).exp()
        change[X] = float((after - mu).abs().mean() - (pi - mu).abs().mean())
    assert change[0.1] < change[0.2] < change[0.4] and change[0.1] < 0 < change[0.4]


def test_no_action_at_the_set_point_or_without_an_advantage():
    rows = [[(0.5, 0.4), (0.2, 0.4), (0.1, 0.1)], [(0.9, 0.3), (0.4, 0.1), (0.3, 0.8)]]
    controller = ACRL(baseline_batches=3)
    for _ in range(5):
        w, m = call(controller, rows, [1, -1])
        assert (w == 1).all() and m["acrl/alpha_pos"] == 0 and m["acrl/X"] == m["acrl/Y"]  # bitwise
    w, _ = call(primed(1e-3), rows, [0, 1])
    assert (w[0] == 1).all() and (w[1] != 1).any()
    w, _ = call(primed(1e-3), rows, [[0, 1, 1], [NAN, 1, 1]])
    assert w[0, 0] == w[1, 0] == 1 and w[0, 1] != 1


def test_clamps():
    rows = [[(0.4, 0.1), (0.1, 0.4), (0.11, 0.1)]]  # Y = 0.61 / 3
    w, m = call(primed(0.01), rows, [-1])  # gamma (1 - Y / X) = -12.6: alpha = +2
    assert m["acrl/alpha_pos"] == -2 and m["is/frac_capped"] == pytest.approx(1 / 3) and m["is/max"] == 2
    assert w[0].tolist() == pytest.approx([2, 1 / 16, 1.21])  # 16 capped
    w, _ = call(primed(0.01, alpha_max=0.5, weight_max=3.0), rows, [-1])
    assert w[0].tolist() == pytest.approx([2, 0.5, math.sqrt(1.1)])
    w, m = call(primed(1000.0, gamma=5.0), rows, [1])  # Y far below X: alpha = +2
    assert m["acrl/alpha_pos"] == 2 and w[0].tolist() == pytest.approx([2, 1 / 16, 1.21])
    w, _ = call(primed(0.01, alpha_max=100.0, weight_max=1e12), [[(1.0, 1e-9), (1e-9, 1.0)]], [-1])
    assert w[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_measure_is_a_mean_over_sequences_of_means_over_tokens():
    rows = [[(0.5, 0.1), (0.9, 0.9), (0.9, 0.1)], [(0.2, 0.4), (0.7, 0.1), (0.7, 0.1)], [(0.9, 0.1)] * 3]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()  # means 0.2 and 0.2; the last row is no sequence
    _, m = call(ACRL(), rows, [1, 1, 1], mask)
    assert m["acrl/Y"] == pytest.approx(0.2) and m["n/is"] == 3
    mask[1, 1] = True  # second mean (0.2 + 0.6) / 2
    assert call(ACRL(), rows, [1, 1, 1], mask)[1]["acrl/Y"] == pytest.approx(0.3)
    logs = [math.log(5), 0, math.log(2), math.log(7)]
    want = ((logs[0] + logs[1]) / 2 + (logs[2] + logs[3]) / 2) / 2
    assert call(ACRL(distance="logp"), rows, [1, 1, 1], mask)[1]["acrl/Y"] == pytest.approx(want)


def test_metrics():
    rows = [[(0.4, 0.2), (0.1, 0.2), (0.2, 0.2), (0.4, 0.1)]]  # Y = 0.15; ratios 2, 0.5, 1, 4
    _, m = call(primed(0.15 / 2, gamma=1.0), rows, [-1])  # alpha = +1: the ratios, 4 capped
    w = [2, 0.5, 1, 2]
    assert m["is/mean"] == pytest.approx(1.375) and m["is/max"] == 2 and m["is/frac_capped"] == 0.25
    assert m["is/ess"] == pytest.approx(5.5**2 / (4 * sum(x * x for x in w)))
    assert (m["n/is"], m["is/missing"]) == (4, 0)
    assert [m[f"acrl/w_{p}"] for p in ("p01", "p50", "p99")] == pytest.approx([0.5, 1, 2])
    rows = [[(0.5, 0.5 * (100 + i) / 300) for i in range(200)]]  # weights 300 / (100 + i), descending, never capped
    w, m = call(primed(1e-9, gamma=1e-12, alpha_max=1.0, weight_max=9.0), rows, [-1])
    w = sorted(w[0].tolist())
    assert [m[f"acrl/w_{p}"] for p in ("p01", "p50", "p99")] == [w[1], w[99], w[197]]  # ranks 2, 100, 198


# -----------------------------------------------------------------------------
# the set point


def test_set_point_is_a_running_mean_that_freezes():
    controller, gaps = ACRL(gamma=1.0, baseline_batches=3), [0.1, 0.3, 0.2, 0.4, 0.05]
    seen = [call(controller, [[(0.5, 0.5 - g)]], [1])[1] for g in gaps]
    assert [m["acrl/Y"] for m in seen] == pytest.approx(gaps)
    assert [m["acrl/X"] for m in seen] == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2])
    assert [m["acrl/alpha_pos"] for m in seen] == pytest.approx([0, -0.5, 0, -1, 0.75])  # each with its own batch in X
    assert controller.state_dict() == {"X": pytest.approx(0.2), "batches": 3, "distance": "prob"}


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_state_round_trip(cut):
    batches = [[[(0.5, 0.5 - g), (0.3, 0.3 + g)]] for g in (0.1, 1 / 3, 0.2, 0.05, 0.4)]
    whole = ACRL(baseline_batches=3)
    want = [call(whole, rows, [1]) for rows in batches]
    first, second = ACRL(baseline_batches=3), ACRL(baseline_batches=3)
    for rows in batches[:cut]:
        call(first, rows, [1])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for rows, (w, m) in zip(batches[cut:], want[cut:], strict=True):
        got, metrics = call(second, rows, [1])
        assert torch.equal(got, w) and metrics == m
    assert second.state_dict() == whole.state_dict()


def test_nothing_usable_leaves_the_state():
    controller = ACRL(baseline_batches=2)
    call(controller, [[(0.5, 0.4)]], [1])
    before, x = controller.state_dict(), f64([-1, -2])
    for old, mu, mask in [(x, x + NAN, x < 0), (x, None, x < 0), (x, 2 * x, x > 0), (x + NAN, x, x < 0),
                          (x[:0], x[:0], x[:0] < 0), (x[:, :0], x[:, :0], x[:, :0] < 0)]:
        w, m = controller.weight(old, mu, f64(1)[: len(old)], mask)
        assert torch.equal(w, mask.double()) and controller.state_dict() == before
        assert math.isnan(m["acrl/Y"]) and m["acrl/alpha_pos"] == 0 and m["acrl/X"] == before["X"]
        assert m["n/is"] == mask.sum()
    call(controller, [[(0.5, 0.3)]], [1])
    assert controller.state_dict() == {"X": pytest.approx(0.15), "batches": 2, "distance": "prob"}


def test_learner_equal_to_sampler():
    rows, controller = [[(0.5, 0.5), (0.1, 0.1)]], ACRL(baseline_batches=2)
    for _ in range(3):
        w, m = call(controller, rows, [1])
        assert (w == 1).all() and m["acrl/X"] == m["acrl/Y"] == m["acrl/alpha_pos"] == 0
    w, m = call(controller, [PAIR], [1])  # the set point froze at 0: nothing to hold
    assert (w == 1).all() and m["acrl/Y"] > 0
    controller = primed(0.2)
    w, m = call(controller, rows, [1])  # a gap of 0 under a set point above it: alpha = gamma, yet every ratio is 1
    assert (w == 1).all() and m["acrl/alpha_pos"] == 0.65


# -----------------------------------------------------------------------------
# masks, missing and impossible tokens, dtypes


def test_masked_positions_reach_nothing():
    rows = [[*PAIR, (0.3, 0.1)], [(0.6, 0.1), (0.2, 0.4), (0.3, 0.1)], [(0.3, 0.1)] * 3]
    pi, mu = (f64(*[[math.log(p[i]) for p in row] for row in rows]) for i in (0, 1))
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    adv = f64(1, -1, 1)
    w, m = primed(0.1).weight(pi, mu, adv, mask)
    adv[2] = NAN
    for bad in (NAN, INF, -INF):
        got = primed(0.1).weight(torch.where(mask, pi, bad), torch.where(mask, mu, bad), adv, mask)
        assert torch.equal(got[0], w) and floats(got[1]) == floats(m)
    assert (w[~mask] == 0).all() and (w[mask] > 0).all()


def test_missing_sampler_log_prob():
    pi, mu = f64([0.5, 0.9, 0.2]).log(), f64([0.4, NAN, 0.4]).log()
    w, m = primed(0.3).weight(pi, mu, f64(1), pi < 0)  # Y = 0.15, alpha = 0.325
    assert w[0].tolist() == pytest.approx([1.25**0.325, 1, 0.5**0.325])
    assert m["acrl/Y"] == pytest.approx(0.15) and m["is/missing"] == 1 and m["n/is"] == 3
    assert primed(0.3).weight(pi, mu, f64(1), pi > -1)[1]["is/missing"] == 1
    assert primed(0.3).weight(pi, mu, f64(1), pi < -0.5)[1]["is/missing"] == 0  # the missing one is masked


@pytest.mark.parametrize("distance, Y", [("prob", 0.5), ("logp", 20)])
def test_impossible_token(distance, Y):
    for X, adv, w in [(Y, 1, 1), (Y / 2, 1, math.exp(-20)), (Y / 2, -1, 2), (Y / 2, 0, 1)]:
        got, m = call(primed(X, distance=distance), [[(0.5, 0)]], [adv])
        assert got.item() == pytest.approx(w) and m["acrl/Y"] == pytest.approx(Y)


def test_dtypes_and_gradients():
    pi, mu = (torch.tensor([[p[i] for p in PAIR]]).log().bfloat16().requires_grad_() for i in (0, 1))
    w, m = primed(0.1).weight(pi, mu, torch.tensor([1.0], requires_grad=True), pi < 0)
    assert w.dtype == torch.float32 and not w.requires_grad
    assert all(v.dtype == torch.float64 and v.dim() == 0 and not v.requires_grad for v in m.values())
    assert call(primed(0.1), [PAIR], [1])[0].dtype == torch.float64
    ids = torch.tensor([1])  # an integer advantage
    assert torch.equal(primed(0.1).weight(pi, mu, ids, pi < 0)[0], w)


def test_errors():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in ({"gamma": 0}, {"gamma": NAN}, {"baseline_batches": 0}, {"alpha_max": 0}, {"weight_max": 0.5}):
        with pytest.raises(ValueError, match="gamma and alpha_max are positive"):
            ACRL(**bad)
    with pytest.raises(ValueError, match="'prob' or 'logp', got 'kl'"):
        ACRL(distance="kl")
    with pytest.raises(TypeError):
        ACRL(0.65, 8, "logp")
    for match, args in [("mu_logp has shape", (x, x[:1], x, mask)), ("mask is a bool", (x, x, x, x)),
                        ("adv has shape", (x, x, torch.zeros(3), mask))]:
        with pytest.raises(ValueError, match=match):
            ACRL().weight(*args)


logp = st.one_of(st.floats(-40, 0), st.sampled_from([-INF, NAN]))


@quick
@given(st.lists(logp, min_size=12, max_size=12), st.lists(st.integers(0, 3), min_size=2, max_size=2),
       st.sampled_from(["prob", "logp"]), st.floats(1e-6, 50), st.sampled_from([[1.0, -1.0], [-2.0, 0.0], [0.5, 0.5]]))
def test_weights_are_bounded_and_symmetric(x, lengths, distance, X, adv):
    pi, mu = torch.tensor(x, dtype=torch.float64).nan_to_num(nan=-1).clamp(min=-40)[:6].view(2, 3), f64(x[6:]).view(2, 3)
    mask, adv = torch.arange(3)[None] < torch.tensor(lengths)[:, None], f64(*adv)
    w, m = primed(X, distance=distance).weight(pi, mu, adv, mask)
    assert ((w >= 0) & (w <= 2)).all() and (w[~mask] == 0).all()
    assert all(math.isfinite(v) or k == "acrl/Y" for k, v in floats(m).items()) and abs(m["acrl/alpha_pos"]) <= 2
    # whatever narrows is amplified and whatever widens is damped if Y > X, the reverse if Y < X
    toward = (adv.sign()[:, None] * (mu - pi)).nan_to_num(nan=0)  # > 0: this update brings pi nearer to mu
    if not math.isnan(m["acrl/Y"]):
        narrowing = (w - 1) * toward * (1 if m["acrl/Y"] >= m["acrl/X"] else -1)
        assert (narrowing[mask] >= 0).all()
    # turning A over turns the exponent over
    turned, _ = primed(X, distance=distance).weight(pi, mu, -adv, mask)
    free = mask & (w < 2) & (turned < 2) & (w > 1e-8) & (turned > 1e-8)
    assert torch.allclose((w * turned)[free], torch.ones(()).double())


# -----------------------------------------------------------------------------
# ranks


def batches():
    """Three batches of five sequences, ragged, with a token that the sampler lost. -> old, mu, adv, mask"""
    g = torch.Generator().manual_seed(0)
    for step in range(3):
        old = -torch.rand(5, 4, generator=g, dtype=torch.float64)
        mu = old + (0.1 + step) * 0.3 * torch.randn(5, 4, generator=g, dtype=torch.float64)
        mu[1, 0] = NAN
        yield old, mu.clamp(max=0), f64(1, -1, 0.5, -2, 1), torch.arange(4)[None] < torch.tensor([4, 1, 0, 3, 2])[:, None]


def worker(rank, port, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        controller, out = ACRL(baseline_batches=2), []
        for step, batch in enumerate(batches()):
            rows = [slice(0, 4), slice(4, 5)][rank] if step else [slice(0, 5), slice(5, 5)][rank]  # unequal; then an empty rank
            w, m = controller.weight(*(x[rows] for x in batch))
            out.append((w, floats(m)))
        torch.save((out, controller.state_dict()), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, tmp_path), nprocs=2)
    (first, state), (second, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = ACRL(baseline_batches=2)
    for batch, (a, x), (b, y) in zip(batches(), first, second, strict=True):
        w, m = alone.weight(*batch)
        torch.testing.assert_close(torch.cat([a, b]), w, rtol=1e-12, atol=0)
        for name in ("acrl/X", "acrl/Y", "acrl/alpha_pos"):
            assert x[name] == y[name] == pytest.approx(float(m[name]), rel=1e-12)
        assert x["n/is"] + y["n/is"] == m["n/is"] == 10
    assert x["acrl/alpha_pos"] < -0.1  # the third batch is wider than the first two: the controller acts
    assert state == other == {"X": pytest.approx(alone.X, rel=1e-12), "batches": 2, "distance": "prob"}
