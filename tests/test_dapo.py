"""DAPO: overlong punishment, dynamic sampling, its cap, filtering, defaults, resume. `python -m pytest tests/test_dapo.py`"""

import math
from types import SimpleNamespace

import pytest
import torch
from small import first_letter_even, make_home, untimed_rows

import checkpoint
import flags
import plot
import reward
import train_dapo
import train_grpo
from data import Shuffled
from errors import Everywhere, UserError
from learner import make_calibration, split
from rollout import Completion
from runlog import read_csv
from train_dapo import add_dapo_flags, check, collect, kind, shape, soft_overlong


def parse(*argv, presets=flags.PRESETS):
    return check(flags.parse_flags([str(x) for x in argv], presets=presets, extend=add_dapo_flags))


# -----------------------------------------------------------------------------
# overlong answers


@pytest.mark.parametrize("length,penalty", [(0, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1), (25, -1)])
def test_soft_overlong_by_hand(length, penalty):
    assert soft_overlong(length, 20, 4) == penalty


def test_soft_overlong_is_off_without_a_cache():
    assert soft_overlong(10**6, 20, 0) == 0.0
    assert soft_overlong(5, 20, 20) == -0.25  # the cache may be the whole answer


def sample(length, acc, reason="stop"):
    completion = Completion([3] * length, [-1.0] * length, reason)
    return {"row": {"prompt_ids": [3, 4], "id": 0}, "completion": completion, "text": "", "reward": acc, "acc": acc}


def test_shaping_by_hand():
    """R = 2 acc - 1 + R_len, in tokens; the accuracy stays what it was."""
    args = SimpleNamespace(overlong_max=20, overlong_cache=4, overlong_filter=False)
    samples = [sample(16, 1.0), sample(18, 1.0), sample(20, 0.0, "length"), sample(3, 0.0), sample(3, math.nan)]
    metrics = shape(samples, args)
    assert [s["reward"] for s in samples[:4]] == [1.0, 0.5, -2.0, -1.0] and math.isnan(samples[4]["reward"])
    assert [s["acc"] for s in samples[:4]] == [1.0, 1.0, 0.0, 0.0]
    assert metrics == {"dapo/overlong": pytest.approx(-0.3), "dapo/overlong_frac": 0.4, "dapo/filtered": 0.0}


def test_filtered_answers_are_in_no_loss_but_in_the_mean_of_their_group():
    args = parse("--group-size", 4, "--prompts-per-step", 1, "--updates-per-step", 1, "--max-tokens", 20, "--overlong-cache", 4,
                 "--overlong-filter", "--device", "cpu")
    samples = [sample(4, 1.0), sample(6, 0.0), sample(20, 0.0, "length"), sample(5, 0.0)]
    assert shape(samples, args)["dapo/filtered"] == 0.25
    train_grpo.add_advantages(samples, args)
    rewards = torch.tensor([1.0, -1.0, -2.0, -1.0])
    assert [s["adv"] for s in samples] == pytest.approx(((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist())
    (micros,) = split(samples, args, 0)
    assert sorted(int(n) for m in micros for n in m.mask.sum(1)) == [0, 4, 5, 6]


# -----------------------------------------------------------------------------
# dynamic sampling


def test_kinds_of_groups_go_by_accuracy_not_by_shaped_reward():
    group = [dict(sample(n, 1.0), reward=r) for n, r in ((4, 1.0), (18, 0.5), (20, 0.0))]
    assert kind(group) == "all1"  # a shaped reward would call it mixed
    assert kind([sample(4, 0.0)] * 3) == "all0" and kind([sample(4, 0.0), sample(4, 1.0)]) == "mixed"
    nan = sample(4, math.nan)
    assert kind([nan, nan]) == "all0" and kind([nan, sample(4, 1.0)]) == "all1"
    assert kind([nan, sample(4, 1.0), sample(4, 0.0)]) == "mixed"


def collected(monkeypatch, plan, *flags_, rows=100):
    """collect() on prompts 0, 1, .. whose groups are as `plan(number)` says: (samples, metrics, numbers drawn, args)."""
    args = parse("--group-size", 2, "--prompts-per-step", 3, "--updates-per-step", 1, "--max-tokens", 20, "--overlong-cache", 0,
                 "--device", "cpu", *flags_)
    drawn, seeds = [], []

    def sample_and_grade(run, rows, args, seed, sec):
        drawn.extend(row["id"] for row in rows)
        seeds.append(seed)
        accs = {"all0": (0.0, 0.0), "all1": (1.0, 1.0), "mixed": (1.0, 0.0)}
        return [dict(sample(4, acc), row=row) for row in rows for acc in accs[plan(row["id"])]]

    monkeypatch.setattr(train_dapo, "sample_and_grade", sample_and_grade)
    run = SimpleNamespace(shuffled=Shuffled([{"id": i, "prompt_ids": [3]} for i in range(rows)], 0))
    run.shuffled._order = list(range(rows))
    samples, metrics = collect(run, args, 1, {})
    assert len(set(seeds)) == metrics["dapo/rounds"]  # every round draws its own answers
    return samples, metrics, drawn, args


def test_the_batch_is_refilled_to_exactly_B_groups_in_order(monkeypatch):
    plan = lambda i: ("all0", "mixed", "all1", "mixed", "all0", "mixed", "mixed", "mixed", "mixed")[i]  # noqa: E731
    samples, metrics, drawn, _ = collected(monkeypatch, plan)
    assert [s["row"]["id"] for s in samples] == [1, 1, 3, 3, 5, 5] and drawn == [0, 1, 2, 3, 4, 5]
    assert metrics["dapo/rounds"] == 2 and metrics["dapo/efficiency"] == 0.5 and metrics["dapo/surplus"] == 0
    assert metrics["dapo/all0"] == pytest.approx(2 / 6) and metrics["dapo/all1"] == pytest.approx(1 / 6)
    assert [s["adv"] for s in samples] == pytest.approx([2**-0.5, -(2**-0.5)] * 3, rel=1e-5)


def test_surplus_groups_are_dropped_and_counted(monkeypatch):
    samples, metrics, drawn, _ = collected(monkeypatch, lambda i: "all1" if i == 0 else "mixed", "--gen-prompts", 6)
    assert [s["row"]["id"] for s in samples] == [1, 1, 2, 2, 3, 3] and len(drawn) == 6
    assert metrics["dapo/surplus"] == 2 and metrics["dapo/efficiency"] == 0.5 and metrics["dapo/rounds"] == 1


@pytest.mark.parametrize("what,words", [("all1", "0% all wrong, 100% all right"), ("all0", "100% all wrong, 0% all right")])
def test_data_too_easy_or_too_hard_end_with_the_flags_name(monkeypatch, what, words):
    with pytest.raises(Everywhere) as caught:
        collected(monkeypatch, lambda i: what, "--max-gen-batches", 4)
    assert words in str(caught.value) and "12 groups sampled, 0 of them mixed" in str(caught.value)
    assert "--max-gen-batches 4 is reached" in str(caught.value) and "too easy or too hard" in str(caught.value)


def test_data_that_only_needed_another_round_are_not_called_hard(monkeypatch):
    with pytest.raises(Everywhere, match="3 groups sampled, 2 of them mixed.*raise --max-gen-batches or --gen-prompts"):
        collected(monkeypatch, lambda i: "mixed" if i else "all0", "--max-gen-batches", 1)


def test_a_run_is_resumed_by_its_own_script(home, tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    run(home, tmp_path / "out", "--steps", 1)
    line = f"--model {home / 'model'} --data {home / 'sums.jsonl'} --out {tmp_path / 'out'} --device cpu --max-tokens 12"
    with pytest.raises(UserError, match="written by train_dapo.py"):
        train_grpo.train(flags.parse_flags([*line.split(), "--eval-every", "0", "--resume"]))


def test_speed_counts_all_rounds(home, tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    real, counts = train_dapo.sample_and_grade, []

    def counted(*a):
        samples = real(*a)
        counts.append(sum(len(s["completion"].token_ids) for s in samples))
        return samples

    monkeypatch.setattr(train_dapo, "sample_and_grade", counted)
    run(home, tmp_path / "out", "--steps", 1, "--gen-prompts", 2)
    row = {k: v[0] for k, v in read_csv(str(tmp_path / "out" / "metrics.csv")).items()}
    assert row["dapo/rounds"] == len(counts) > 1 and row["tokens"] < sum(counts)
    assert row["tok_per_s/rollout"] * row["sec/rollout"] == pytest.approx(sum(counts))
    assert "sec/sampled" not in row and 0 < row["dapo/acc"] < 1


def test_without_dynamic_sampling_every_group_counts(monkeypatch):
    samples, metrics, drawn, _ = collected(monkeypatch, lambda i: "all1", "--no-dynamic-sampling")
    assert drawn == [0, 1, 2] and len(samples) == 6 and metrics["dapo/rounds"] == 1 and metrics["dapo/all1"] == 1


# -----------------------------------------------------------------------------
# flags


def test_defaults_are_the_papers():
    args = parse("--device", "cpu")
    paper = dict(prompts_per_step=512, group_size=16, updates_per_step=16, lr=1e-6, warmup=10, weight_decay=0.1, grad_clip=1.0)
    paper |= dict(max_tokens=20480, overlong_max=20480, overlong_cache=4096, clip_low=0.8, clip_high=1.28, dual_clip=0.0)
    paper |= dict(kl_coef=0.0, loss_agg="token-mean", adv_scale="std", temperature=1.0, dynamic_sampling=True, gen_prompts=512)
    assert {name: getattr(args, name) for name in paper} == paper
    assert make_calibration(args).ref_high == 1.28
    assert parse("--device", "cpu", "--clip-high", 1.3, "--dual-clip", 10).dual_clip == 10


def test_grpo_keeps_its_own_defaults():
    parse("--device", "cpu")
    args = flags.parse_flags(["--device", "cpu"])
    assert (args.clip_high, args.prompts_per_step, args.warmup, args.weight_decay) == (1.24, 32, 0, 0.01)


@pytest.mark.parametrize("extra,words", [
    (("--max-tokens", 100), "--overlong-cache 4096 is longer"),
    (("--overlong-max", 4000), "--overlong-cache 4096 is longer"),
    (("--no-dynamic-sampling", "--gen-prompts", 8), "--gen-prompts 8 has no effect with --no-dynamic-sampling"),
    (("--no-dynamic-sampling", "--max-gen-batches", 3), "--max-gen-batches 3 has no effect with --no-dynamic-sampling"),
    (("--load-rollouts", "x"), "--no-dynamic-sampling"),
    (("--load-rollouts", "x", "--no-dynamic-sampling", "--overlong-filter"), "--overlong-filter has no effect"),
    (("--overlong-cache", 0, "--overlong-max", 30000), "--overlong-max 30000 has no effect with --overlong-cache 0"),
    (("--overlong-max", 30000), "nothing would be punished"),
    (("--max-tokens", 40, "--overlong-max", 100, "--overlong-cache", 12), "nothing would be punished"),
    (("--max-gen-batches", 0), "at least 1"),
])  # fmt: skip
def test_flags_that_do_not_go_together(extra, words):
    with pytest.raises(UserError) as caught:
        parse("--device", "cpu", *extra)
    assert words in str(caught.value)


# -----------------------------------------------------------------------------
# whole runs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory, sums=range(100, 112))


def run(home, out, *extra):
    line = f"--model {home / 'model'} --data {home / 'sums.jsonl'} --out {out} --device cpu --steps 2 --prompts-per-step 4 "
    line += "--group-size 4 --updates-per-step 2 --max-tokens 12 --overlong-cache 4 --lr 1e-3 --warmup 0 --eval-every 0"
    train_grpo.train(parse(*line.split(), *extra), collect)
    return untimed_rows(out)


def test_a_run_and_its_picture_and_resume_is_bitwise(home, tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda folders, path: drawn.append(path))
    save = ("--save-every", 3, "--keep-last", 0, "--clip", "calibrated", "--calib-interval", 2)
    whole = run(home, tmp_path / "whole", *save, "--steps", 6)
    run(home, tmp_path / "part", *save, "--steps", 3)
    part = run(home, tmp_path / "part", *save, "--steps", 6, "--resume")
    assert whole.keys() == part.keys()
    assert all(a == b or a != a and b != b for k in whole for a, b in zip(whole[k], part[k], strict=True))
    assert (tmp_path / "whole" / "samples.jsonl").read_text() == (tmp_path / "part" / "samples.jsonl").read_text()
    a, b = (checkpoint.load(str(tmp_path / x / "checkpoints" / "step_000006")) for x in ("whole", "part"))
    assert all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[2]["data"] == b[2]["data"] and a[2]["calib"] == b[2]["calib"]
    assert whole["frac_groups_all0"] == whole["frac_groups_all1"] == [0.0] * 6  # nothing but mixed groups reaches the loss
    assert all(0 < e <= 1 for e in whole["dapo/efficiency"]) and min(whole["reward"]) < 0 < max(whole["acc"])
    monkeypatch.undo()
    plot.draw([str(tmp_path / "whole")], str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 20000


def test_the_cap_ends_a_run_with_its_last_step_saved(home, tmp_path, monkeypatch):
    """All-easy data from the second step on: the error names the flag, and nothing of the first step is lost."""
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    calls = []

    def easy_later(texts, *a, **k):
        calls.append(len(texts))
        return first_letter_even(texts, *a, **k) if sum(calls) <= 64 else [1.0] * len(texts)

    monkeypatch.setattr(reward, "grade_batch", easy_later)
    with pytest.raises(UserError, match="--max-gen-batches"):
        run(home, tmp_path / "out", "--steps", 9, "--max-gen-batches", 20, "--save-every", 0)
    steps = read_csv(str(tmp_path / "out" / "metrics.csv"))["step"]
    path = checkpoint.latest(str(tmp_path / "out"))
    assert steps and path.endswith(f"step_{int(steps[-1]):06d}")
    state = checkpoint.load(path)[2]
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    resumed = run(home, tmp_path / "out", "--steps", int(steps[-1]) + 1, "--resume")
    assert resumed["step"] == [*steps, steps[-1] + 1] and state["step"] == steps[-1]
