"""Shadow passes, calibrated and searched bounds, the controller and recorded rollouts inside the loop."""

import json
import math

import pytest
import torch
from test_train_grpo import argv, home, one_thread, parts, quick, rows_of, run, same, samples_of, tensors, without_timings

import calibrated
import checkpoint
import clipping
import learner
import precision
import recorded
import rivals
import train_grpo
from errors import UserError
from logprob import token_logps

__all__ = ["home", "one_thread", "quick"]  # fixtures
CALIBRATED = ("--clip", "calibrated", "--calib-interval", 1, "--precision", "fp8-row")


def passes(home, *extra, shadow=True, lengths=(4, 7, 2, 5, 3, 6, 1, 8)):
    args, model, masters = parts(home, *extra)
    minis = learner.split(samples_of(list(lengths)), args, 0)
    learner.old_pass(model, minis, args, None, shadow)
    return args, model, masters, minis


def test_shadow_passes_are_the_module_without_quantisation(home):
    args, model, _, minis = passes(home, *CALIBRATED)
    for m in [m for mini in minis for m in mini]:
        with torch.no_grad(), precision.high_precision(model):
            expected, _ = token_logps(model, m.batch)
        assert torch.equal(m.old_logp_hp, expected) and not torch.equal(m.old_logp_hp, m.old_logp)


def test_fp32_reference_is_the_same_weights_in_fp32(home):
    model = parts(home, "--precision", "fp8-row")[1]
    precision.Masters(model, torch.bfloat16)
    args, _, _ = parts(home, *CALIBRATED, "--calib-reference", "fp32")
    wide = parts(home, "--precision", "fp32")[1]
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_(p.bfloat16())
    m = learner.split(samples_of([4, 7]), args, 0)[0][0]
    with torch.no_grad():
        expected, _ = token_logps(wide, m.batch)
    m.shadow_rows = [0]
    held = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert torch.equal(learner.shadow_logps(model, m, args), expected)
    assert held == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}  # as it was


@pytest.mark.parametrize("share,rows", [(1.0, [0, 1, 2, 3, 4, 5, 6, 7]), (0.5, [1, 3, 5, 7]), (0.25, [3, 7]), (0.3, [3, 6])])
def test_a_share_of_the_rows_is_spread_over_the_lengths(home, share, rows):
    minis = passes(home, *CALIBRATED, "--calib-share", share, "--micro-tokens", 30)[3]
    micros = [m for mini in minis for m in mini]
    assert len(micros) > 2
    chosen, i = [], 0
    for m in micros:
        chosen += [i + row for row in m.shadow_rows]
        i += len(m.adv)
        assert m.shadow_pass == bool(m.shadow_rows)
        assert m.old_logp_hp is None if not m.shadow_rows else m.old_logp_hp.shape == (len(m.shadow_rows), m.mask.shape[1])
    assert chosen == rows


def test_update_observes_the_ratio_of_the_loss(home):
    """After one optimiser step the next mini-batch's ratio in the calibration is the one that policy_loss clipped by."""
    args, model, masters, minis = passes(home, *CALIBRATED, "--lr", 0.05)
    calib = learner.make_calibration(args)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.02)
    shares = [learner.update(model, masters, optimizer, mini, args, calib, True) for mini in minis]
    metrics = calib.update()
    for name in ("neg_lo", "pos_hi"):
        count = {"neg_lo": "n/neg", "pos_hi": "n/pos"}[name]
        total = sum(float(s[f"clip/{name}"] * s[count]) for s in shares) / sum(float(s[count]) for s in shares)
        assert metrics[f"calib/{name}_used"] == pytest.approx(total, abs=1e-12)
    assert metrics["calib/pos_hi_used"] + metrics["calib/neg_lo_used"] > 0 and metrics["calib/std_logr"] > 0.05


def test_calibrated_bounds_are_used_from_the_next_step(home, tmp_path):
    rows = run(home, tmp_path / "out", *CALIBRATED, "--steps", 4, "--lr", 1e-2)
    assert (float(rows[0]["clip/low"]), float(rows[0]["clip/high"])) == (0.6, 1.8)
    for before, after in zip(rows, rows[1:], strict=False):
        assert before["calib/low_new"] == after["clip/low"] and before["calib/high_new"] == after["clip/high"]
    assert any(row["clip/low"] != "0.6" or row["clip/high"] != "1.8" for row in rows)
    rows = run(home, tmp_path / "vanilla", "--precision", "fp8-row", "--shadow-every", 2, "--steps", 3, "--lr", 1e-2)
    assert [row["calib/nmae_ratio"] != "" for row in rows] == [True, False, True]  # measured, not moved
    assert {(row["clip/low"], row["clip/high"]) for row in rows} == {("0.8", "1.24")}


def test_measuring_changes_nothing_in_the_training(home, tmp_path):
    flags = ("--precision", "fp8-row", "--steps", 2)
    plain, measured = run(home, tmp_path / "a", *flags), run(home, tmp_path / "b", *flags, "--shadow-every", 1)
    keys = [k for k in plain[0] if not k.startswith(("sec/", "tok_per_s", "mem"))]
    assert [[row[k] for k in keys] for row in plain] == [[row[k] for k in keys] for row in measured]
    assert same(*(tensors(tmp_path / x / "checkpoints" / "step_000002") for x in "ab"))


@pytest.mark.parametrize("method", [
    ("--clip", "calibrated", "--calib-interval", 1, "--calib-pool", 2, "--correction", "acrl"),
    ("--clip", "bapo", "--correction", "icepop"),
    ("--objective", "cispo", "--correction", "acrl"),
])  # fmt: skip
def test_resume_carries_the_method_s_state(home, tmp_path, method):
    flags = ("--precision", "fp8-row", "--save-every", 2, "--keep-last", 0, "--lr", 1e-2, *method)
    run(home, tmp_path / "whole", *flags, "--steps", 4)
    run(home, tmp_path / "out", *flags, "--steps", 2)
    run(home, tmp_path / "out", *flags, "--steps", 4, "--resume")
    assert without_timings(rows_of(tmp_path / "out")) == without_timings(rows_of(tmp_path / "whole"))
    states = [checkpoint.load(str(tmp_path / x / "checkpoints" / "step_000004"))[2] for x in ("out", "whole")]
    assert states[0].get("calib") == states[1].get("calib") and states[0].get("acrl") == states[1].get("acrl")
    assert ("calib" in states[0]) == ("calibrated" in method) and ("acrl" in states[0]) == ("acrl" in method)
    assert "calib" not in states[0] or states[0]["calib"]["calibrations"] == 4
    assert same(*(tensors(tmp_path / x / "checkpoints" / "step_000004") for x in ("out", "whole")))


def test_changed_calibration_starts_anew_with_a_line(home, tmp_path, capsys):
    run(home, tmp_path / "out", *CALIBRATED, "--steps", 1)
    capsys.readouterr()
    run(home, tmp_path / "out", *CALIBRATED, "--steps", 2, "--resume", "--calib-delta", 0.01, 0.1)
    assert "delta_low was 0.05, is 0.01; calib starts anew" in capsys.readouterr().out


def test_another_clip_or_distance_starts_anew_on_resume(home, tmp_path, capsys):
    flags = ("--precision", "fp8-row", "--correction", "acrl")
    run(home, tmp_path / "out", *flags, "--steps", 1)
    capsys.readouterr()
    changed = ("--clip", "calibrated", "--acrl-distance", "logp")
    rows = run(home, tmp_path / "out", *flags, "--steps", 2, "--resume", *changed)
    out = capsys.readouterr().out
    assert "no state of calib, which starts anew" in out and "a distance of prob, not of logp; acrl starts anew" in out
    assert (rows[1]["clip/low"], rows[1]["clip/high"]) == ("0.6", "1.8") and float(rows[1]["acrl/alpha_pos"]) == 0


def test_bf16_reference_is_bf16_when_activations_are_fp32(home):
    args, _, _ = parts(home, *CALIBRATED, "--activations", "fp32")
    narrow, wide = parts(home, "--precision", "bf16")[1], parts(home, "--precision", "fp8-row")[1]
    precision.Masters(narrow, torch.bfloat16)
    precision.Masters(wide, torch.bfloat16, held_in=torch.float32)
    m = learner.split(samples_of([4, 7]), args, 0)[0][0]
    m.shadow_rows = [0]
    with torch.no_grad():
        expected, _ = token_logps(narrow, m.batch)
    assert torch.equal(learner.shadow_logps(wide, m, args), expected)
    assert all(p.dtype == torch.float32 for p in wide.parameters())


def test_bapo_bounds_come_from_the_mini_batch_itself(home):
    args, model, masters, minis = passes(home, "--clip", "bapo", "--precision", "fp32", "--bapo-target", 0.9, shadow=False)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.05)
    learner.update(model, masters, optimizer, minis[0], args)
    with torch.no_grad():
        sums = sum(rivals.bapo_sums(token_logps(model, m.batch)[0], m.old_logp, m.mu_logp, m.adv, m.mask) for m in minis[1])
    low, high, _ = rivals.bapo_solve(sums, 0.9)
    metrics = learner.update(model, masters, optimizer, minis[1], args)
    assert (metrics["clip/low"], metrics["clip/high"]) == (low, high) == (metrics["bapo/low"], metrics["bapo/high"])


def test_acrl_weights_are_those_of_the_whole_batch(home):
    """Micro-batches of several widths: the controller sees one batch, and each row gets its own weights back."""
    from acrl import ACRL

    args, model, _, minis = passes(home, "--precision", "fp32", "--correction", "none", shadow=False)
    micros = [m for mini in minis for m in mini]
    assert len({m.mask.shape[1] for m in micros}) > 1
    controller, twin = ACRL(baseline_batches=1), ACRL(baseline_batches=1)
    controller.X = twin.X = 0.01  # a set point this batch is far from
    controller.batches = twin.batches = 1
    args.correction = "acrl"
    metrics = learner.correct(micros, args, controller)
    T = max(m.mask.shape[1] for m in micros)
    wide = [torch.cat([learner.pad(getattr(m, k), T) for m in micros]) for k in ("old_logp", "mu_logp", "mask")]
    expected, _ = twin.weight(*wide[:2], torch.cat([m.adv for m in micros]), wide[2])
    row = 0
    for m in micros:
        for i in range(len(m.adv)):
            assert torch.equal(m.weight[i][m.mask[i]], expected[row][: m.mask.shape[1]][m.mask[i]])
            row += 1
    assert row == 8 and float(metrics["acrl/Y"]) > 0 and expected[wide[2]].std() > 0.01


def test_cispo_gradient_never_stops(home):
    args, model, masters, minis = passes(home, "--objective", "cispo", "--precision", "fp32", shadow=False)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.5)
    learner.update(model, masters, optimizer, minis[0], args)
    metrics = learner.update(model, masters, optimizer, minis[1], args)
    assert float(metrics["clip/frac"]) > 0 and metrics["grad_norm"] > 0


# -----------------------------------------------------------------------------
# recorded rollouts


def test_training_on_recorded_rollouts_is_the_recording_run(home, tmp_path, monkeypatch):
    flags = ("--precision", "fp8-row", "--steps", 3)
    run(home, tmp_path / "a", *flags, "--save-rollouts")
    monkeypatch.setattr(train_grpo, "sample_and_grade", None)  # nothing is sampled
    run(home, tmp_path / "b", *flags, "--load-rollouts", tmp_path / "a" / "rollouts")
    assert same(*(tensors(tmp_path / x / "checkpoints" / "step_000003") for x in "ab"))
    drop = ("sec/", "tok_per_s", "mem")
    rows = [[{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows_of(tmp_path / x)] for x in "ab"]
    assert rows[0] == rows[1]


def test_recorded_rollouts_that_do_not_fit_are_refused(home, tmp_path):
    run(home, tmp_path / "a", "--save-rollouts")
    folder = tmp_path / "a" / "rollouts"
    for extra, message in (
        (("--steps", 3), "no step_000003.jsonl; it holds steps 1 to 2; lower --steps"),
        (("--temperature", 0.5), "was recorded with temperature 1.0, this run has 0.5; change --temperature"),
        (("--group-size", 2), "was recorded with group_size 4, this run has 2; change --group-size"),
    ):
        with pytest.raises(UserError, match=message):
            run(home, tmp_path / f"b{extra[0]}", "--load-rollouts", folder, *extra)
    lines = (folder / "step_000001.jsonl").read_text().splitlines()
    (folder / "step_000001.jsonl").write_text("\n".join(lines[:5]) + "\n")
    with pytest.raises(UserError, match="holds 4 answers, not --prompts-per-step x --group-size"):
        run(home, tmp_path / "c", "--load-rollouts", folder)
    (folder / "step_000001.jsonl").write_text("\n".join([*lines[:3], lines[3][:20]]))
    with pytest.raises(UserError, match="step_000001.jsonl line 4 is not JSON"):
        run(home, tmp_path / "d", "--load-rollouts", folder)
    with pytest.raises(UserError, match="there is no such folder"):
        run(home, tmp_path / "e", "--load-rollouts", tmp_path / "nowhere", "--dry-run")
    unknown = ('"token_ids": [', '"token_ids": [99, ', "token ids that the model's")
    for old, new, message in (('"text"', '"txet"', "line 2 has no 'text'"), unknown):
        broken = [lines[0], *(line.replace(old, new) for line in lines[1:])]
        (folder / "step_000001.jsonl").write_text("\n".join(broken))
        with pytest.raises(UserError, match=message):
            run(home, tmp_path / f"f{len(new)}", "--load-rollouts", folder)
    assert not (tmp_path / "e").exists()


def test_missing_log_probs_and_rewards_survive_recording(home, tmp_path):
    args = train_grpo.parse_flags(argv(home, "unused", "--prompts-per-step", 1, "--group-size", 2, "--updates-per-step", 1))
    samples = samples_of([2, 2], rewards=[1.0, math.nan])
    samples[0]["completion"].logps[1] = math.nan
    recorded.save(str(tmp_path), 1, samples, args, range(17))
    back = recorded.load(str(tmp_path), 1, args, range(17))
    assert math.isnan(back[0]["completion"].logps[1]) and back[0]["completion"].logps[0] == samples[0]["completion"].logps[0]
    assert math.isnan(back[1]["reward"]) and [s["adv"] for s in back] == [0.0, 0.0]
    assert json.loads(open(recorded.path_of(str(tmp_path), 1)).readline())["vocabulary"] == 17


# -----------------------------------------------------------------------------
# flags


@pytest.mark.parametrize("extra,words", [
    (("--objective", "cispo", "--clip", "calibrated"), ("--objective cispo", "--clip calibrated")),
    (("--objective", "cispo", "--dual-clip", "3"), ("--objective cispo", "--dual-clip 3")),
    (("--clip", "calibrated", "--updates-per-step", "1"), ("--clip calibrated", "--updates-per-step 1")),
    (("--calib-pool", "3"), ("--calib-pool", "--clip vanilla")),
    (("--clip", "calibrated", "--shadow-every", "2"), ("--shadow-every", "--clip calibrated")),
    (("--bapo-target", "0.3"), ("--bapo-target", "--clip vanilla")),
    (("--acrl-gamma", "1"), ("--acrl-gamma", "--correction tis")),
    (("--save-rollouts", "--load-rollouts", "x"), ("--save-rollouts", "--load-rollouts")),
    (("--load-rollouts", "x", "--engine", "vllm"), ("--engine vllm", "--load-rollouts")),
    (("--vllm-memory", "0.5"), ("--vllm-memory", "--engine hf")),
    (("--vllm-sleep", "1", "--engine", "vllm"), ("--vllm-sleep", "on cpu")),
    (("--clip", "bapo", "--clip-low", "0.7"), ("--clip-low", "--clip bapo")),
    (("--clip", "calibrated", "--calib-stages", "lower", "--calib-upper", "tail"), ("--calib-upper", "--calib-stages lower")),
    (("--clip", "calibrated", "--calib-stages", "upper", "--calib-lower", "quantile"), ("--calib-lower", "--calib-stages up")),
    (("--rollout-precision", "fp32", "--activations", "fp32"), ("--activations fp32", "--rollout-precision fp32")),
    (("--activations", "fp32", "--fp8-backend", "scaled_mm"), ("--activations fp32", "--fp8-backend scaled_mm")),
    (("--engine", "vllm", "--vllm-tp", "2"), ("--vllm-tp 2", "found 1")),
    (("--engine", "vllm", "--device", "cuda:1"), ("--engine vllm", "--device cuda:1", "CUDA_VISIBLE_DEVICES=1")),
    (("--clip", "calibrated", "--calib-init", "0.3", "1.8"), ("--calib-init", "--calib-range-low")),
    (("--clip", "calibrated", "--calib-init", "1.1", "1.8"), ("--calib-init",)),
    (("--clip", "calibrated", "--calib-range-low", "0.5", "0.91"), ("--calib-range-low",)),
    (("--clip", "calibrated", "--calib-range-high", "1.2", "100000"), ("--calib-range-high",)),
    (("--activations", "fp32", "--precision", "fp32"), ("--activations fp32", "--precision fp32")),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_both_named(home, extra, words):
    with pytest.raises(UserError) as error:
        train_grpo.parse_flags(argv(home, "unused", *extra))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_cispo_has_no_lower_bound_unless_asked_for(home):
    bounds = lambda *extra: (lambda a: (a.clip_low, a.clip_high))(train_grpo.parse_flags(argv(home, "unused", *extra)))  # noqa: E731
    assert bounds() == (0.8, 1.24) and bounds("--objective", "cispo") == (0.0, 1.24)
    assert bounds("--objective", "cispo", "--clip-low", "0.8") == (0.8, 1.24)


def test_activations_in_fp32_train_and_agree_with_the_sampler(home, tmp_path):
    rows = run(home, tmp_path / "a", "--precision", "fp8-row", "--activations", "fp32", "--steps", 2)
    plain = run(home, tmp_path / "b", "--precision", "fp8-row", "--steps", 2)
    assert float(rows[0]["mismatch/abs_dlogp_mean"]) < 0.3 * float(plain[0]["mismatch/abs_dlogp_mean"])
    assert not same(*(tensors(tmp_path / x / "checkpoints" / "step_000002") for x in "ab"))


def test_contract_name():
    assert clipping.CalibratedClipping is calibrated.CalibratedClipping
