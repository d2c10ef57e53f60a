"""The GRPO loop: gradients, ratios, skipped steps, resume, the run folder, and every mistake answered by one line.

    python -m pytest tests/test_train_grpo.py
"""

import collections
import csv
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from small import TIMINGS, first_letter_even, make_home
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import clipping
import flags
import plot
import precision
import reward
import tiny
import train_grpo
from errors import UserError, run_main
from logprob import token_logps
from rollout import Completion, HFEngine
from runlog import read_csv

DRAW = plot.draw
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory, sums=range(100, 112))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """That reward, and no picture: drawing one takes longer than two steps."""
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    monkeypatch.setattr(plot, "draw", lambda *a: None)


def argv(home, out, *extra):
    flags = f"--model {home / 'model'} --data {home / 'sums.jsonl'} --out {out} --device cpu --steps 2 --prompts-per-step 4 "
    flags += "--group-size 4 --updates-per-step 2 --micro-tokens 128 --max-tokens 12 --lr 1e-3 --eval-every 0"
    return flags.split() + [str(x) for x in extra]


def run(home, out, *extra):
    """Train in this process and return metrics.csv as a list of rows of text."""
    train_grpo.train(train_grpo.parse_flags(argv(home, out, *extra)))
    return rows_of(out)


def rows_of(out):
    with open(out / "metrics.csv", newline="") as f:
        return list(csv.DictReader(f))


def without_timings(rows):
    return [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in rows]


def tensors(folder):
    return checkpoint.load(str(folder))[0]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -----------------------------------------------------------------------------
# gradients


class Recorder:
    """Stands in for the optimizer and keeps the gradients it is given."""

    def __init__(self, masters):
        self.masters, self.grads = masters, None

    def step(self):
        self.grads = {name: w.grad.double().clone() for name, w in self.masters.weights.items()}


def parts(home, *extra):
    args = train_grpo.parse_flags(argv(home, "unused", *extra))
    model, tokenizer, _ = precision.load_model(args.model, args.precision)
    return args, model, precision.Masters(model)


def samples_of(lengths, vocab=17, rewards=None, seed=0):
    """Hand-made samples: answers of the given lengths with sampler log-probs a little off uniform; advantages of both signs."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i, n in enumerate(lengths):
        ids = torch.randint(3, vocab, (n,), generator=g).tolist()
        logps = (-math.log(vocab) + 0.3 * torch.randn(n, generator=g)).tolist()
        row = {"prompt_ids": torch.randint(3, vocab, (2 + i % 3,), generator=g).tolist(), "answer": "0", "prompt": "", "id": i}
        adv = 1.0 - 0.4 * i if i % 2 else -0.7 - 0.1 * i
        reward = 0.0 if rewards is None else rewards[i]
        samples.append(dict(row=row, completion=Completion(ids, logps, "stop"), text="", reward=reward, adv=adv))
    return samples


def nudge(model, size=0.7):
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=g) * p.abs().mean())


def one_update(home, samples, *extra):
    """(gradients by name, update's metrics, old_pass's metrics, args, minis) at weights nudged after the old pass."""
    args, model, masters = parts(home, "--precision", "fp32", "--updates-per-step", 1, "--grad-clip", 1e9, *extra)
    minis = train_grpo.split(samples, args, 0)
    before = train_grpo.old_pass(model, minis, args)
    nudge(model)
    recorder = Recorder(masters)
    metrics = train_grpo.update(model, masters, recorder, minis[0], args)
    return recorder.grads, metrics, before, args, minis


def distance(a, b):
    """Relative distance of two sets of gradients as one vector."""
    difference = sum((a[k] - b[k]).square().sum() for k in b).sqrt()
    return (difference / sum(v.square().sum() for v in b.values()).sqrt()).item()


@pytest.mark.parametrize("agg", clipping.AGGS)
@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_many_micro_batches_give_the_gradient_of_one(home, agg, correction):
    lengths = [1, 2, 30, 3, 12, 1, 7, 25]
    rewards = [0.0, 1.0, 0.0, 1.0, math.nan, 1.0, 0.0, 1.0]  # a sample without a reward is in no count
    samples = samples_of(lengths, rewards=rewards)
    flags = ("--loss-agg", agg, "--correction", correction, "--max-tokens", 30)
    one, one_metrics, one_old, _, one_minis = one_update(home, samples, *flags, "--micro-tokens", 10**6)
    many, many_metrics, many_old, _, minis = one_update(home, samples, *flags, "--micro-tokens", 1)
    assert len(one_minis[0]) == 1 and len(minis[0]) == len(lengths)
    if correction == "mis":  # its band is narrow: with these log-probs nothing is left, and both skip
        assert one is None and many is None and one_metrics["skipped"] == many_metrics["skipped"] == 1
    else:
        assert distance(many, one) < 1e-5
        assert one_metrics["clip/frac"] > 0 and abs(one_metrics["loss"]) > 1e-3
    for a, b in ((one_metrics, many_metrics), (one_old, many_old)):
        assert a.keys() == b.keys()
        for k in a:
            assert float(b[k]) == pytest.approx(float(a[k]), rel=1e-4, abs=1e-6), k


def test_gradient_is_that_of_the_formula(home):
    """Written out again from the logits of whole sequences: temperature, correction before the weights moved, clipping."""
    samples = samples_of([3, 1, 9, 30])
    grads, metrics, _, args, minis = one_update(home, samples, "--temperature", 0.7, "--micro-tokens", 20, "--max-tokens", 30)
    model = precision.load_model(args.model, "fp32")[0]

    def logps(s):
        p, y = s["row"]["prompt_ids"], s["completion"].token_ids
        logits = model(torch.tensor([p + y])).logits[0, len(p) - 1 : -1]
        return torch.log_softmax(logits / 0.7, -1)[torch.arange(len(y)), y]

    with torch.no_grad():
        old = [logps(s) for s in samples]
    nudge(model)
    loss = 0
    for s, o in zip(samples, old, strict=True):
        weight = (o - torch.tensor(s["completion"].logps)).exp().clamp(max=2)
        r = (logps(s) - o).exp()
        loss = loss - (weight * torch.minimum(r * s["adv"], r.clamp(0.8, 1.24) * s["adv"])).sum()
    loss = loss / sum(len(o) for o in old)
    loss.backward()
    expected = {name: p.grad.double() for name, p in model.named_parameters()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert distance(grads, expected) < 1e-4
    norm = sum(v.square().sum() for v in expected.values()).sqrt().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_gradient_norm_is_bounded(home):
    args, model, masters = parts(home, "--precision", "fp32", "--updates-per-step", 1, "--grad-clip", 0.01, "--max-tokens", 30)
    minis = train_grpo.split(samples_of([5, 9, 2]), args, 0)
    train_grpo.old_pass(model, minis, args)
    recorder = Recorder(masters)
    metrics = train_grpo.update(model, masters, recorder, minis[0], args)
    assert metrics["grad_norm"] > 0.02  # the norm before clipping
    assert sum(g.square().sum() for g in recorder.grads.values()).sqrt().item() == pytest.approx(0.01, rel=1e-3)
    assert all(not w.grad.any() for w in masters.parameters())  # nothing is left over for the next mini-batch


def test_split_keeps_groups_and_order(home):
    args = train_grpo.parse_flags(argv(home, "unused", "--updates-per-step", 4, "--micro-tokens", 24))
    samples = samples_of([1 + i % 7 for i in range(16)])
    minis = train_grpo.split(samples, args, 0)
    assert len(minis) == 4
    for k, mini in enumerate(minis):
        advs = sorted(x for m in mini for x in m.adv.tolist())
        assert advs == pytest.approx(sorted(s["adv"] for s in samples[4 * k : 4 * k + 4]))
        assert all(m.batch.input_ids.numel() <= 24 for m in mini)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_moves_log_probs_the_way_of_the_advantage(home, sign):
    args, model, masters = parts(home, "--precision", "fp8-row", "--updates-per-step", 1)
    samples = [s | {"adv": sign} for s in samples_of([4, 7, 2])]
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3, weight_decay=0.0)
    minis = train_grpo.split(samples, args, 0)
    train_grpo.old_pass(model, minis, args)
    train_grpo.update(model, masters, optimizer, minis[0], args)
    with torch.no_grad():
        change = sum((token_logps(model, m.batch)[0] - m.old_logp).sum().item() for m in minis[0])
    assert change * sign > 1.0


def test_learns_a_first_letter(home, tmp_path):
    flags = ("--steps", 10, "--precision", "bf16", "--lr", 3e-3, "--max-tokens", 4, "--group-size", 8, "--micro-tokens", 1000)
    rows = run(home, tmp_path / "out", *flags, "--save-every", 0)
    rewards = [float(row["reward"]) for row in rows]
    assert sum(rewards[:2]) / 2 < 0.5 and sum(rewards[-2:]) / 2 > 0.9, rewards


# -----------------------------------------------------------------------------
# steps that must not move the weights


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_gradient_that_is_not_finite_is_skipped(home, where):
    args, model, masters = parts(home, "--precision", "bf16", "--updates-per-step", 2)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    minis = train_grpo.split(samples_of([3, 5, 4, 2]), args, 0)
    train_grpo.old_pass(model, minis, args)
    before = {name: w.detach().clone() for name, w in masters.weights.items()}
    if where == "loss":
        minis[0][0].adv[0] = math.nan
        metrics = train_grpo.update(model, masters, optimizer, minis[0], args)
    else:
        hook = model.model.norm.weight.register_hook(lambda g: g * math.inf)
        metrics = train_grpo.update(model, masters, optimizer, minis[0], args)
        hook.remove()
    assert metrics["skipped"] == 1 and same(before, masters.weights) and not optimizer.state
    metrics = train_grpo.update(model, masters, optimizer, minis[1], args)  # and the next one is as if nothing had been
    assert metrics["skipped"] == 0 and math.isfinite(metrics["grad_norm"])
    assert all(w.isfinite().all() for w in masters.parameters()) and not same(before, masters.weights)


def test_step_with_a_bad_gradient_is_counted_and_the_run_goes_on(home, tmp_path, monkeypatch):
    def poisoned(rewards, group_size, scale):
        adv = clipping_advantages(rewards, group_size, scale)
        adv[0] = math.nan if not calls else adv[0]
        calls.append(1)
        return adv

    calls, clipping_advantages = [], clipping.group_advantages
    monkeypatch.setattr(clipping, "group_advantages", poisoned)
    rows = run(home, tmp_path / "out")
    assert [row["skipped"] for row in rows] == ["1", "0"]
    assert math.isfinite(float(rows[1]["loss"])) and float(rows[1]["grad_norm"]) > 0


@pytest.mark.parametrize("correction", flags.CORRECTIONS)
def test_no_reward_at_all_skips_the_step(home, tmp_path, monkeypatch, correction):
    monkeypatch.setattr(reward, "grade_batch", lambda texts, *a, **k: [math.nan] * len(texts))
    rows = run(home, tmp_path / "out", "--correction", correction, "--steps", 1)
    assert rows[0]["skipped"] == "2" and rows[0]["reward"] == "nan"
    start = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)  # the masters, not their BF16 rounding
    weights = tensors(tmp_path / "out" / "checkpoints" / "step_000001")
    assert all(torch.equal(weights[name], p) for name, p in start.named_parameters())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_groups_of_equal_rewards_cost_nothing(home, tmp_path, monkeypatch, value):
    monkeypatch.setattr(reward, "grade_batch", lambda texts, *a, **k: [value] * len(texts))
    row = run(home, tmp_path / "out", "--steps", 1)[0]
    assert float(row["loss"]) == 0 and float(row["grad_norm"]) == 0 and float(row["reward"]) == value
    assert [float(row[f"frac_groups_all{x}"]) for x in (0, 1)] == [1 - value, value]


def test_first_step_costs_nothing_but_has_a_gradient(home, tmp_path):
    row = run(home, tmp_path / "out", "--steps", 1, "--updates-per-step", 1, "--loss-agg", "seq-mean-token-mean",
              "--correction", "none", "--precision", "fp32")[0]
    assert abs(float(row["loss"])) < 1e-6 and float(row["grad_norm"]) > 1e-3


# -----------------------------------------------------------------------------
# a whole run


NAMES = """reward acc len/mean len/max len/trunc_frac entropy clip/pos_hi clip/pos_lo clip/neg_lo clip/neg_hi clip/low clip/high
mismatch/kl_k1 mismatch/kl_k3 mismatch/abs_dlogp_mean mismatch/abs_dlogp_p99 mismatch/abs_dlogp_max frac_groups_all0
frac_groups_all1 grad_norm lr loss sec/rollout sec/reward sec/logp sec/train sec/sync sec/step tok_per_s/rollout tok_per_s/train
mem_gb skipped tokens ratio/mean ratio/max kl_new_old clip/frac entropy_bins/0-0.2 entropy_bins/0.2-0.5 entropy_bins/0.5-1
entropy_bins/1+""".split()
IS_NAMES = ["is/mean", "is/max", "is/ess", "is/frac_capped"]


class Spy:
    """Records what the loop passes between its parts, step by step."""

    def __init__(self, monkeypatch):
        self.minis, self.updates, self.weights, self.prompts = [], [], [], []
        for name in ("old_pass", "update", "sample_and_grade"):
            monkeypatch.setattr(train_grpo, name, self.wrap(getattr(self, name), getattr(train_grpo, name)))
        monkeypatch.setattr(clipping, "policy_loss", self.wrap(self.policy_loss, clipping.policy_loss))

    @staticmethod
    def wrap(record, real):
        def call(*a, **k):
            result = real(*a, **k)
            record(a, result)
            return result
        return call

    def sample_and_grade(self, a, result):
        self.prompts.append([row["prompt"] for row in a[1]])

    def old_pass(self, a, result):
        self.minis.append(a[1])

    def update(self, a, result):
        self.updates.append(result)

    def policy_loss(self, a, result):
        self.weights.append(a[7])


CASES = [("fp8-row", "tis"), ("bf16", "icepop"), ("fp32", "mis"), ("fp8-block", "none"), ("fp8-tensor", "tis")]


@pytest.mark.parametrize("recipe, correction", CASES)
def test_run_folder(home, tmp_path, monkeypatch, recipe, correction, capsys):
    monkeypatch.setattr(plot, "draw", DRAW)
    spy, out = Spy(monkeypatch), tmp_path / "out"
    flags = ("--steps", 3, "--precision", recipe, "--correction", correction, "--save-every", 2, "--log-samples", 5)
    rows = run(home, out, *flags)
    text = capsys.readouterr().out
    # the folder
    flags = json.loads((out / "flags.json").read_text())
    assert flags["precision"] == flags["rollout_precision"] == recipe and flags["steps"] == 3 and flags["lr"] == 1e-3
    assert f'"precision": "{recipe}"' in text and "picture: " in text
    header = (out / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header[0] == "step" and [row["step"] for row in rows] == ["1", "2", "3"]
    missing = set(NAMES + (IS_NAMES if correction != "none" else [])) - set(header)
    assert not missing and not any(name.startswith("n/") for name in header)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [1] * 5 + [2] * 5 + [3] * 5
    assert {"prompt", "completion", "gold", "reward", "adv", "tokens", "finish_reason", "id"} <= samples[0].keys()
    assert sorted(os.listdir(out / "checkpoints")) == ["step_000002", "step_000003"]
    final = out / "checkpoints" / "step_000003"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert model.dtype == torch.float32 and AutoTokenizer.from_pretrained(final).eos_token == "<eos>"
    start = AutoModelForCausalLM.from_pretrained(home / "model")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["tokens"] == sum(int(row["tokens"]) for row in rows) > 0
    assert summary["train_seconds"] == pytest.approx(sum(float(row["sec/step"]) for row in rows))
    assert not any(key.startswith(("acc_", "se_")) for key in summary)
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    # the numbers
    for row in rows:
        assert 0 <= float(row["reward"]) <= 1 and 1 <= float(row["len/mean"]) <= 12 and float(row["entropy"]) > 1
        assert sum(float(row[k]) for k in header if k.startswith("entropy_bins/")) == pytest.approx(1)
    assert float(rows[0]["mismatch/abs_dlogp_mean"]) < {"fp32": 1e-5, "bf16": 0.02}.get(recipe, 0.1)
    if correction == "mis":  # equal weights in FP32: every sequence is within a thousandth
        assert float(rows[0]["is/mean"]) == 1
    # the first mini-batch of a step sees the weights of old_logp, exactly; the second does not
    for first, second in zip(spy.updates[::2], spy.updates[1::2], strict=True):
        assert first["ratio/max"] == 1 and first["ratio/mean"] == 1 and first["kl_new_old"] == 0
        assert second["ratio/max"] > 1 and second["kl_new_old"] > 0
    assert all(moved)
    # the correction of a token is the same in every inner step: that of the starting weights
    micros = [m for minis in spy.minis for mini in minis for m in mini]
    assert len(micros) == len(spy.weights) > 6
    for m, used in zip(micros, spy.weights, strict=True):
        w = (m.old_logp - m.mu_logp).exp()
        expected = {"tis": w.clamp(max=2), "icepop": torch.where((w >= 0.5) & (w <= 5), w, 0)}.get(correction)
        if expected is None:
            assert used is None
        else:
            torch.testing.assert_close(used[m.mask], expected[m.mask])


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-tensor", "bf16", "fp32"])
def test_ratio_is_exactly_one_with_one_update(home, tmp_path, recipe):
    for row in run(home, tmp_path / "out", "--updates-per-step", 1, "--precision", recipe, "--micro-tokens", 60):
        assert float(row["ratio/max"]) == float(row["ratio/mean"]) == 1 and float(row["kl_new_old"]) == 0
        assert float(row["grad_norm"]) > 0


def test_several_updates_clip(home, tmp_path):
    rows = run(home, tmp_path / "out", "--updates-per-step", 4, "--lr", 2e-2, "--clip-low", 0.95, "--clip-high", 1.05)
    assert max(float(row["clip/frac"]) for row in rows) > 0.01
    assert rows[0]["clip/low"] == "0.95" and rows[0]["clip/high"] == "1.05"


def test_samplers_recipe_can_differ(home, tmp_path, monkeypatch):
    engines = []
    real = HFEngine.generate

    def generate(self, *a, **k):
        engines.append({name: p.clone() for name, p in self.model.named_parameters()})
        return real(self, *a, **k)

    monkeypatch.setattr(HFEngine, "generate", generate)
    out = tmp_path / "out"
    rows = run(home, out, "--precision", "fp32", "--rollout-precision", "fp8-row", "--save-every", 1, "--keep-last", 0)
    assert float(rows[0]["mismatch/abs_dlogp_mean"]) > 1e-4
    weights = tensors(out / "checkpoints" / "step_000001")  # the second step samples from the weights of the first
    assert all(torch.equal(engines[1][name], w.to(torch.bfloat16)) for name, w in weights.items())
    assert not same(engines[0], engines[1])


@pytest.mark.parametrize("recipe", ["fp8-row", "fp32"])
def test_same_seed_same_run(home, tmp_path, recipe):
    a = run(home, tmp_path / "a", "--precision", recipe)
    torch.rand(3)  # the global generator plays no part
    b = run(home, tmp_path / "b", "--precision", recipe)
    c = run(home, tmp_path / "c", "--precision", recipe, "--seed", 1)
    assert without_timings(a) == without_timings(b) != without_timings(c)
    assert (tmp_path / "a" / "samples.jsonl").read_text() == (tmp_path / "b" / "samples.jsonl").read_text()


def test_evaluation_in_the_run(home, tmp_path):
    flags = ("--eval-every", 2, "--eval-data", home / "sums.jsonl", "--eval-problems", 5, "--eval-n", 2, "--steps", 3)
    rows = run(home, tmp_path / "out", *flags)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"acc_before", "acc_after", "se_before", "se_after", "train_seconds", "tokens"} <= summary.keys()
    assert [bool(row["eval/acc"]) for row in rows] == [False, True, True]
    assert float(rows[2]["eval/acc"]) == summary["acc_after"] and float(rows[2]["eval/se"]) == summary["se_after"]
    # evaluating changes nothing in the training
    plain = run(home, tmp_path / "plain", "--steps", 3)
    assert [row["loss"] for row in plain] == [row["loss"] for row in rows]


def test_warmup_is_linear_and_then_constant(home, tmp_path):
    rows = run(home, tmp_path / "out", "--steps", 4, "--warmup", 3, "--lr", 3e-3)
    assert [float(row["lr"]) for row in rows] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3])


@pytest.mark.parametrize("schedule,want", [
    ("linear", [0.5, 1.0, 1.0, 0.8125, 0.625, 0.4375, 0.25]),
    ("cosine", [0.5, 1.0, 1.0, 0.890165, 0.625, 0.359835, 0.25]),
])  # fmt: skip
def test_learning_rate_decays_to_its_own_horizon(schedule, want):
    """Two steps of warm-up, four of decay to a quarter, by hand; --steps plays no part."""
    line = ["--device", "cpu", "--lr", "1", "--warmup", "2", "--lr-schedule", schedule, "--lr-decay-steps", "6"]
    for steps in (7, 500):
        args = train_grpo.parse_flags([*line, "--lr-min-ratio", "0.25", "--steps", str(steps)])
        assert [train_grpo.learning_rate(args, step) for step in range(1, 8)] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_to_the_starting_model(home, tmp_path, estimator):
    """0 in a run's first update, as learner and reference are one; then it grows, less with a larger coefficient. The
    reference stays --model's weights after a resume."""
    flags = ("--precision", "fp8-row", "--lr", 3e-3, "--steps", 4, "--kl-estimator", estimator, "--save-every", 2)
    rows = run(home, tmp_path / "a", *flags, "--kl-coef", 1e-6, "--updates-per-step", 1)
    values = [float(row["kl_ref/k3"]) for row in rows]
    assert values[0] == 0 and values[3] > values[1] > 0
    strong = run(home, tmp_path / "b", *flags, "--kl-coef", 5, "--updates-per-step", 1)
    assert float(strong[3]["kl_ref/k3"]) < 0.8 * values[3]
    run(home, tmp_path / "c", *flags[:4], *flags[4 + 2 :], "--kl-coef", 1e-6, "--updates-per-step", 1, "--steps", 2)
    again = run(home, tmp_path / "c", *flags, "--kl-coef", 1e-6, "--updates-per-step", 1, "--resume")
    assert without_timings(again) == without_timings(rows)


def test_dropout_is_off_wherever_log_probs_are_taken(home, tmp_path):
    """A model trained with dropout: in one update a step the ratio is 1, and learner and sampler agree."""
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "model")
    flags = ("--precision", "fp32", "--updates-per-step", 1, "--model", tmp_path / "model")
    rows = run(home, tmp_path / "out", *flags)
    assert all(float(row["ratio/max"]) == float(row["ratio/mean"]) == 1 for row in rows)
    assert max(float(row["mismatch/abs_dlogp_max"]) for row in rows) < 1e-4


def test_activation_checkpointing_changes_nothing(home, tmp_path):
    plain = run(home, tmp_path / "a", "--precision", "fp8-row")
    again = run(home, tmp_path / "b", "--precision", "fp8-row", "--activation-checkpointing")
    assert without_timings(plain) == without_timings(again)
    a, b = (tensors(tmp_path / name / "checkpoints" / "step_000002") for name in "ab")
    assert same(a, b)


def test_answers_without_a_reward_are_in_no_entropy_bin(home):
    args, model, _ = parts(home, "--precision", "fp32", "--updates-per-step", 1)
    samples = samples_of([4, 4, 4, 4], rewards=[0.0, math.nan, math.nan, 1.0])
    metrics = train_grpo.old_pass(model, train_grpo.split(samples, args, 0), args)
    assert float(metrics["entropy"]) > 1 and float(metrics["entropy_bins/0-0.2"]) == 0
    assert float(metrics["entropy_bins/1+"]) == 1


# -----------------------------------------------------------------------------
# resume


def test_resume_is_bitwise(home, tmp_path, monkeypatch):
    flags = ("--precision", "fp8-row", "--rollout-precision", "bf16", "--warmup", 3, "--save-every", 2, "--keep-last", 0)
    whole, spy = tmp_path / "whole", Spy(monkeypatch)
    run(home, whole, *flags, "--steps", 4)
    straight = list(spy.prompts)
    spy.prompts.clear()
    out = tmp_path / "out"
    run(home, out, *flags, "--steps", 2)
    torch.rand(5)

    events, held = [], {}
    real_sync, real_generate = HFEngine.sync, HFEngine.generate

    def sync(self, *a, **kw):
        events.append("sync")
        return real_sync(self, *a, **kw)

    def generate(self, *a, **k):
        if "generate" not in events:
            held.update({name: p.clone() for name, p in self.model.named_parameters()})
        events.append("generate")
        return real_generate(self, *a, **k)

    monkeypatch.setattr(HFEngine, "sync", sync)
    monkeypatch.setattr(HFEngine, "generate", generate)
    at_two = {name: w.to(torch.bfloat16) for name, w in tensors(out / "checkpoints" / "step_000002").items()}
    run(home, out, *flags, "--steps", 4, "--resume")
    assert events[:2] == ["sync", "generate"] and same(held, at_two)  # the engine holds the checkpoint's weights
    assert spy.prompts == straight  # no prompt twice, none left out
    assert [row["step"] for row in rows_of(out)] == ["1", "2", "3", "4"]
    assert without_timings(rows_of(out)) == without_timings(rows_of(whole))
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    (weights, optimizer, state), other = (checkpoint.load(str(x / "checkpoints" / "step_000004")) for x in (out, whole))
    assert same(weights, other[0]) and not same(weights, tensors(whole / "checkpoints" / "step_000002"))
    assert optimizer["state"].keys() == other[1]["state"].keys()
    assert all(same(optimizer["state"][k], other[1]["state"][k]) for k in optimizer["state"])
    assert state["data"] == other[2]["data"] and state["summary"]["tokens"] == other[2]["summary"]["tokens"]


def test_resume_after_a_kill_drops_the_rows_past_the_checkpoint(home, tmp_path, monkeypatch):
    flags = ("--steps", 4, "--save-every", 2, "--precision", "bf16")
    run(home, tmp_path / "whole", *flags)
    real, out = train_grpo.old_pass, tmp_path / "out"

    def killed(*a):
        if len(rows_of(out)) == 3:
            raise KeyboardInterrupt
        return real(*a)

    monkeypatch.setattr(train_grpo, "old_pass", killed)
    with pytest.raises(KeyboardInterrupt):
        run(home, out, *flags)
    assert len(rows_of(out)) == 3
    monkeypatch.setattr(train_grpo, "old_pass", real)
    run(home, out, *flags, "--resume")
    assert without_timings(rows_of(out)) == without_timings(rows_of(tmp_path / "whole"))
    assert len(read_csv(str(out / "metrics.csv"))["step"]) == 4


def test_resumed_run_takes_the_flags_it_is_given(home, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []
    run(home, out, "--steps", 1, "--weight-decay", 0.01)
    real = train_grpo.update

    def update(model, masters, optimizer, *rest):
        seen.extend((group["lr"], group["weight_decay"]) for group in optimizer.param_groups)
        return real(model, masters, optimizer, *rest)

    monkeypatch.setattr(train_grpo, "update", update)
    run(home, out, "--steps", 2, "--resume", "--lr", 5e-4, "--weight-decay", 0.3)
    assert json.loads((out / "flags.json").read_text())["weight_decay"] == 0.3
    assert set(seen) == {(5e-4, 0.3)}


# -----------------------------------------------------------------------------
# mistakes: one line, exit code 2, nothing written


def fails(monkeypatch, capsys, arguments, status=2):
    """Run the script's main with these arguments; its one line on stderr (progress bars aside)."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: train_grpo.train(train_grpo.parse_flags()))
    assert stop.value.code == status
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


BAD_FLAGS = [
    (["--precision", "fp9"], "--precision 'fp9'", "fp8-row"),
    (["--rollout-precision", "fp9"], "--rollout-precision 'fp9'", "fp8-row"),
    (["--preset", "huge"], "--preset", "demo"),
    (["--lr", "nan"], "--lr", "'nan'"),
    (["--lr", "0"], "--lr", "above 0"),
    (["--lr", "inf"], "--lr", "'inf'"),
    (["--temperature", "-1"], "--temperature", "at least 0"),
    (["--temperature", "0"], "--temperature 0", "1.0"),
    (["--steps", "many"], "--steps", "whole number"),
    (["--steps", "0"], "--steps", "at least 1"),
    (["--steps", "1.5"], "--steps", "whole number"),
    (["--max-tokens", "-1"], "--max-tokens", "at least 1"),
    (["--tis-cap", "nan"], "--tis-cap", "'nan'"),
    (["--grad-clip", "0"], "--grad-clip", "above 0"),
    (["--group-size", "1"], "--group-size 1", "2 or more"),
    (["--prompts-per-step", "3", "--group-size", "5", "--updates-per-step", "4"], "= 15", "[1, 3, 5, 15]"),
    (["--clip-low", "1.2"], "--clip-low 1.2", "low < 1 < high"),
    (["--clip-high", "0.9"], "--clip-high 0.9", "low < 1 < high"),
    (["--dual-clip", "1.1"], "--dual-clip 1.1", "--clip-high 1.24"),
    (["--correction", "acrl9"], "--correction", "icepop"),
    (["--loss-agg", "mean"], "--loss-agg", "token-mean"),
    (["--engine", "sglang"], "--engine", "hf"),
    (["--fp8-backend", "magic"], "--fp8-backend", "emulate"),
    (["--no-such-flag"], "--no-such-flag", "--help"),
    (["--device", "tpu9"], "--device tpu9", ""),
    (["--device", "meta"], "--device meta", ""),
    (["--seed", str(10**20)], "--seed", ""),
    (["--keep-bf16", "middle:1"], "--keep-bf16", "first:N"),
    (["--keep-bf16", "first:4"], "--keep-bf16 first:4", "--precision bf16"),
    (["--precision", "fp8-block", "--fp8-backend", "scaled_mm"], "block-scaled", "--fp8-backend emulate"),
    (["--system-prompt", "think"], "--system-prompt", "no chat template"),
    (["--max-prompt-tokens", "3"], "longer than 3 tokens (--max-prompt-tokens", "the shortest has 8"),
    (["--max-tokens", "250"], "longer than 6 tokens", "context less --max-tokens"),  # 256 positions, prompts of 8
    (["--resume"], "--resume", "no complete checkpoint"),
    (["--lr-schedule", "cosine"], "--lr-schedule cosine", "--lr-decay-steps"),
    (["--lr-schedule", "linear", "--warmup", "9", "--lr-decay-steps", "9"], "--lr-schedule linear", "--warmup 9"),
    (["--lr-schedule", "cosine", "--lr-decay-steps", "1"], "--steps 2 goes past --lr-decay-steps 1", "--lr-min-ratio"),
    (["--lr-decay-steps", "9"], "--lr-decay-steps", "--lr-schedule constant"),
    (["--kl-estimator", "k2"], "--kl-estimator", "--kl-coef 0"),
    (["--kl-coef", "-1"], "--kl-coef", "at least 0"),
    (["--keep-best"], "--keep-best", "--eval-every"),
    (["--keep-best", "--eval-every", "2", "--eval-data", ""], "--keep-best", "--eval-data"),
    (["--save-before-seconds", "-1"], "--save-before-seconds", "at least 0"),
    (["--cpu-offload"], "--cpu-offload", "several GPU processes"),
    (["--correction", "none", "--tis-cap", "3"], "--tis-cap has no effect", "--correction none"),
    (["--correction", "icepop", "--tis-level", "sequence"], "--tis-level has no effect", "--correction icepop"),
    (["--mis-low", "0.9"], "--mis-low has no effect", "--correction tis"),
    (["--precision", "bf16", "--pow2-scales"], "--pow2-scales has no effect", "--precision bf16"),
    (["--model", "tests/a-typo"], "--model tests/a-typo", "no such folder"),
    (["--data", "tests/a-typo"], "tests/a-typo", "no such file"),
    (["--engine", "hf", "--rollout-kernels", "native"], "--rollout-kernels native", "--engine vllm"),
]


@pytest.mark.parametrize("extra, first, second", BAD_FLAGS, ids=[" ".join(case[0])[:40] for case in BAD_FLAGS])
def test_bad_flags(home, tmp_path, monkeypatch, capsys, extra, first, second):
    line = fails(monkeypatch, capsys, argv(home, tmp_path / "out", *extra))
    assert first in line and second in line
    assert not (tmp_path / "out").exists()


def copy_model(home, to, without=None, **config):
    to.mkdir()
    for source in (home / "model").iterdir():
        if source.name not in (without or ()):
            (to / source.name).write_bytes(source.read_bytes())
    if config:
        settings = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(settings | config))
    return to


def test_bad_models(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def line(model):
        return fails(monkeypatch, capsys, argv(home, out, "--model", model))

    assert "no such folder" in line(tmp_path / "nowhere")
    bare = copy_model(home, tmp_path / "bare", without=["config.json"])
    assert "no config.json" in line(bare) and str(bare) in line(bare)
    mute = copy_model(home, tmp_path / "mute", without=["tokenizer.json", "tokenizer_config.json"])
    assert "tokenizer" in line(mute)  # for some architectures the library makes an empty one up
    hollow = copy_model(home, tmp_path / "hollow", without=["model.safetensors"])
    assert "its model does not load" in line(hollow)
    tokenizer = tiny.make_tokenizer()
    odd = tiny.make_model(tokenizer).config
    odd.intermediate_size = 100
    AutoModelForCausalLM.from_config(odd).save_pretrained(tmp_path / "odd")
    tokenizer.save_pretrained(tmp_path / "odd")
    said = line(tmp_path / "odd")
    assert "gate_proj" in said and "100" in said and "multiples of 16" in said
    assert not out.exists()


def test_model_whose_head_does_more_is_refused_at_start(home, tmp_path, monkeypatch, capsys):
    capped = copy_model(home, tmp_path / "capped", final_logit_softcapping=30.0)
    assert "final_logit_softcapping" in fails(monkeypatch, capsys, argv(home, tmp_path / "out", "--model", capped))
    assert not (tmp_path / "out").exists()


def test_bad_data(home, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer"\n')

    def line(*extra):
        return fails(monkeypatch, capsys, argv(home, tmp_path / "out", *extra))

    assert f"{broken} line 2" in line("--data", broken)
    assert "'question'" in line("--prompt-column", "question") and "'prompt'" in line("--prompt-column", "question")
    assert "no such file" in line("--data", tmp_path / "none.jsonl")
    assert "no such split" in line("--data", "arith:dev")
    assert f"{broken} line 2" in line("--eval-every", 1, "--eval-data", broken)
    assert not (tmp_path / "out").exists()


def test_gpu_without_fp8_units_is_refused(home, tmp_path, monkeypatch, capsys):
    """At the level of the conversion, where the device decides: no GPU is needed to pretend."""
    import fp8

    real = fp8.check_backend
    monkeypatch.setattr(fp8, "check_backend", lambda backend, granularity, device: real(backend, granularity, "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    line = fails(monkeypatch, capsys, argv(home, tmp_path / "out", "--fp8-backend", "scaled_mm"))
    assert "8.9" in line and "8.0" in line and "--fp8-backend emulate" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["abc", "0", "-1"])
def test_a_world_size_that_is_none_is_refused(home, tmp_path, monkeypatch, capsys, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert f"WORLD_SIZE is '{size}'" in fails(monkeypatch, capsys, argv(home, tmp_path / "out"))


def test_a_world_size_without_a_launcher_is_refused(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "accelerate launch" in fails(monkeypatch, capsys, argv(home, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def listing(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folder_of_another_run_is_left_alone(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    run(home, out, "--steps", 1)
    before = listing(out)
    assert "holds another run" in fails(monkeypatch, capsys, argv(home, out))
    other = tiny.make_model(tiny.make_tokenizer()).config
    other.hidden_size = 256
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "wide")
    tiny.make_tokenizer().save_pretrained(tmp_path / "wide")
    line = fails(monkeypatch, capsys, argv(home, out, "--resume", "--model", tmp_path / "wide"))
    assert "not those of --model" in line
    line = fails(monkeypatch, capsys, argv(home, out, "--resume", "--seed", 5))
    assert "--seed 0" in line
    assert listing(out) == before


def test_output_folder_that_cannot_be_made(home, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("here already")
    assert str(tmp_path / "file") in fails(monkeypatch, capsys, argv(home, tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "here already"


def test_disk_full_leaves_the_checkpoint_before(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    run(home, out, "--steps", 1)
    before = listing(out / "checkpoints")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: Usage(1, 1, 1000))
    line = fails(monkeypatch, capsys, argv(home, out, "--resume"))
    assert "step_000002" in line and "step_000001 is intact" in line and "--save-every" in line
    assert listing(out / "checkpoints") == before
    monkeypatch.undo()
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    assert [row["step"] for row in run(home, out, "--resume")] == ["1", "2"]


def test_gate(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    line = fails(monkeypatch, capsys, argv(home, out, "--gate", 1e-9))
    assert "gate: mean" in line and "--gate" in line
    assert not (out / "checkpoints").exists()
    run(home, out, "--gate", 0, "--steps", 1)  # what was left is no run: the same folder can be used again
    assert "report only" in capsys.readouterr().out


def test_gate_bounds():
    def bound(learner, sampler, gap, gate=None):
        args = train_grpo.parse_flags(["--precision", learner, "--rollout-precision", sampler, "--device", "cpu"])
        args.gate = gate
        gaps = {"mismatch/abs_dlogp_mean": gap, "mismatch/abs_dlogp_max": 1.0}
        train_grpo.check_gate(args, gaps | {"n/mu": 10.0, "entropy": 1.0})

    for learner, sampler, good, bad in [("fp32", "fp32", 9e-4, 2e-3), ("bf16", "bf16", 0.04, 0.06),
                                        ("fp8-row", "fp8-row", 0.19, 0.21), ("bf16", "fp8-row", 0.49, 0.51)]:
        bound(learner, sampler, good)
        for gap in (bad, math.nan):
            with pytest.raises(UserError, match="gate"):
                bound(learner, sampler, gap)
        bound(learner, sampler, bad, gate=0.0)


def script(*arguments, **environment):
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, os.path.join(HERE, "train_grpo.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_mistakes_of_the_real_script(home, tmp_path):
    for arguments, environment in ((["--lr", "nan"], {}), (["--model", str(tmp_path / "none")], {"WORLD_SIZE": "1"})):
        done = script(*argv(home, tmp_path / "out", *arguments), **environment)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and arguments[0] in done.stderr
        assert not (tmp_path / "out").exists()


# -----------------------------------------------------------------------------
# flags


def test_explicit_flags_beat_the_preset():
    preset = flags.PRESETS["demo"]
    args = train_grpo.parse_flags(["--preset", "demo"])
    assert {k: getattr(args, k) for k in preset} == preset
    default = train_grpo.parse_flags([])
    assert default.steps != preset["steps"]
    # also where the explicit value is the flag's own default
    args = train_grpo.parse_flags(["--steps", str(default.steps), "--preset", "demo", "--precision", "bf16"])
    assert args.steps == default.steps and args.precision == args.rollout_precision == "bf16"
    assert args.max_tokens == preset["max_tokens"]


def test_defaults_run_on_the_embedded_model():
    """`python train_grpo.py` without a flag: the answers fit the model's context."""
    args = train_grpo.parse_flags([])
    assert args.model == "tiny"
    limit = tiny.make_model(tiny.make_tokenizer()).config.max_position_embeddings
    assert len("347+586=") + args.max_tokens <= limit


def test_dry_run_writes_nothing(home, tmp_path, capsys):
    out = tmp_path / "out"
    train_grpo.train(train_grpo.parse_flags(argv(home, out, "--dry-run")))
    text = capsys.readouterr().out
    assert "28 linear layers in fp8-row" in text and '"dry_run": true' in text and not out.exists()


def test_help_lists_the_core_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        train_grpo.parse_flags(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    core = """--model --data --eval-data --out --preset --seed --dry-run --steps --prompts-per-step --group-size
        --updates-per-step --micro-tokens --max-tokens --temperature --lr --warmup --grad-clip --precision --rollout-precision
        --fp8-backend --engine --clip-low --clip-high --correction --save-every --eval-every --resume""".split()
    words = set(text.replace("[", " ").replace("]", " ").replace(",", " ").split())
    assert [flag for flag in core if flag not in words] == []


def test_evaluation_needs_data():
    assert train_grpo.parse_flags(["--eval-every", "5"]).eval_every == 0
    assert train_grpo.parse_flags(["--eval-every", "5", "--eval-data", "arith:test"]).eval_every == 5


def test_training_uses_the_engines_ids_where_the_text_has_other_tokens(home):
    """Decoding and encoding again could turn [a, b] into [ab]; the learner is scored on exactly what was sampled."""
    args, model, _ = parts(home, "--precision", "fp32", "--updates-per-step", 1)
    sampled = [15, 15, 4, 1]  # any ids: two special answer marks in a row, which no text would be encoded to
    sample = samples_of([4])[0] | {"completion": Completion(sampled, [-1.0] * 4, "stop"), "text": "something else"}
    micro = train_grpo.split([sample, sample], args, 0)[0][0]
    prompt = sample["row"]["prompt_ids"]
    assert micro.batch.input_ids[0].tolist() == prompt + sampled
    assert micro.batch.targets[0].tolist() == sampled and micro.batch.mask[0].tolist() == [True] * 4


def test_model_without_an_eos_is_one_line(home, tmp_path, monkeypatch, capsys):
    folder = copy_model(home, tmp_path / "model", eos_token_id=None)
    generation = folder / "generation_config.json"
    if generation.exists():
        generation.write_text(json.dumps({"_from_model_config": False}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    line = fails(monkeypatch, capsys, argv(home, tmp_path / "out", "--model", folder))
    assert "EOS" in line and not (tmp_path / "out").exists()


def test_gate_fails_where_the_engine_returned_no_log_prob():
    args = train_grpo.parse_flags(["--device", "cpu"])
    gaps = {"mismatch/abs_dlogp_mean": 0.0, "mismatch/abs_dlogp_max": 0.0, "n/mu": 0.0}
    with pytest.raises(UserError, match="no log-prob of any token"):
        train_grpo.check_gate(args, gaps | {"entropy": 0.5})
    train_grpo.check_gate(args, gaps | {"entropy": math.nan})  # no answer has a reward: nothing to compare


def test_gate_is_tight_where_activations_are_fp32():
    args = train_grpo.parse_flags(["--device", "cpu", "--activations", "fp32"])
    gaps = {"mismatch/abs_dlogp_mean": 0.03, "mismatch/abs_dlogp_max": 0.1, "n/mu": 9.0, "entropy": 1.0}
    with pytest.raises(UserError, match="is above 0.02"):
        train_grpo.check_gate(args, gaps)
    mixed = "--device cpu --activations fp32 --rollout-precision fp8-row --precision bf16"
    two = train_grpo.parse_flags(mixed.split())
    train_grpo.check_gate(two, gaps)  # two recipes: the difference is the subject, not an error
