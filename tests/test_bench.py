"""The checks that a GPU run rests on: they pass here, and they notice a broken quantiser.

    python -m pytest tests/test_bench.py
"""

import argparse
import sys

import pytest
import torch
from transformers import GenerationConfig

import bench
import fp8
import tiny
from errors import run_main

EVERY = {g: ["emulate"] for g in fp8.GRANULARITIES}


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        run_main(bench.main)
    return stop.value.code


def test_all_checks_pass_on_a_cpu(monkeypatch, capsys):
    code = call(monkeypatch, "gpu", "--device", "cpu", "--demo-steps", 0)
    out = capsys.readouterr().out
    assert "scaled_mm, block: scaled_mm has no block-scaled kernel on cpu; use --fp8-backend emulate" in out
    assert "scaled_mm, row" not in out and "FAILED" not in out
    # 5 shapes x 3 ways x (2 backends for tensor and row, 1 for block), and 4 layouts
    assert out.splitlines()[-1] == f"{5 * 3 * 5 + 4} checks, 0 failed" and code == 0
    assert torch.__version__ in out.splitlines()[0]


def test_layouts_are_refused():
    results = bench.check_layouts("cpu")
    assert len(results) == 4 and all(ok for _, ok in results)


def test_a_layout_let_through_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(bench, "check_recipes", lambda device, backends: [])
    assert call(monkeypatch, "gpu", "--device", "cpu", "--demo-steps", 0) == 0
    monkeypatch.setattr(fp8, "check_scaled_mm", lambda *a: None)
    assert call(monkeypatch, "gpu", "--device", "cpu", "--demo-steps", 0) == 1
    assert "4 checks, 4 failed" in capsys.readouterr().out


def zeros(t, dtype):
    return t.zero_()


def towards_zero(t, dtype):
    mantissa_bits, e_min = fp8.FORMAT[dtype]
    spacing = 2.0 ** (t.abs().clamp(min=2.0**e_min).log2().floor() - mantissa_bits)
    return t.copy_((t / spacing).trunc() * spacing)


def fewer_bits(t, dtype):
    mantissa_bits, e_min = fp8.FORMAT[dtype]
    spacing = 2.0 ** (t.abs().clamp(min=2.0**e_min).log2().floor() - mantissa_bits + 1)
    return t.copy_((t / spacing).round() * spacing)


@pytest.mark.parametrize("broken", [zeros, towards_zero, fewer_bits])
def test_a_broken_quantiser_is_noticed(monkeypatch, capsys, broken):
    monkeypatch.setattr(fp8, "round_to_grid", broken)
    rows = bench.check_recipes("cpu", EVERY)
    failed = {row[0] for row in rows if not row[-1]}
    assert {row[0] for row in rows} == failed  # every recipe
    monkeypatch.setattr(bench, "check_recipes", lambda device, backends: rows)
    assert call(monkeypatch, "gpu", "--device", "cpu", "--demo-steps", 0) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_backend_that_disagrees_is_noticed(monkeypatch):
    real = fp8.gemm_scaled_mm
    monkeypatch.setattr(fp8, "gemm_scaled_mm", lambda *a: real(*a) * 1.02)
    rows = bench.check_recipes("cpu", EVERY | {"row": ["emulate", "scaled_mm"]})
    by_backend = {b: [row[-1] for row in rows if row[4] == b] for b in ("emulate", "scaled_mm")}
    assert all(by_backend["emulate"]) and not any(by_backend["scaled_mm"]) and len(by_backend["scaled_mm"]) == 15


def test_gemms_leave_their_operands_alone():
    """Each call measures its own gradients."""
    x, w, dy = (torch.randn(*s, dtype=torch.bfloat16) for s in ((32, 64), (48, 64), (32, 48)))
    first = bench.gemms("row", "emulate", x, w, dy, torch.float8_e4m3fn, False)
    again = bench.gemms("row", "emulate", x, w, dy, torch.float8_e4m3fn, False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not x.requires_grad and x.grad is None


@pytest.mark.parametrize("arguments, words", [
    (["gpu", "--device", "tpu9"], "tpu9"), (["rollout", "--model", "nowhere"], "--model nowhere"), (["speed"], "rollout"),
    (["gpu", "--demo-steps", "-1"], "--demo-steps"), (["gpu", "--out", "."], "--out ."),
])  # fmt: skip
def test_mistakes(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(bench, "check_recipes", lambda *a: [])
    assert call(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err


def test_demo_steps_that_fail_fail_the_check(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "check_recipes", lambda *a: [])
    calls = []
    for code in (0, 2):
        done = argparse.Namespace(returncode=code)
        monkeypatch.setattr(bench.subprocess, "run", lambda command, done=done: calls.append(command) or done)
        assert call(monkeypatch, "gpu", "--device", "cpu", "--out", tmp_path / "demo") == bool(code)
    flags = " ".join(calls[0])
    assert "train_grpo.py --preset demo --steps 10" in flags and f"--out {tmp_path / 'demo'}" in flags
    assert "10 steps of the demo: FAILED, exit code 2" in capsys.readouterr().out


def test_generate_baseline_counts_to_the_first_eos():
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer).eval()
    asked, vocab, eos = {}, len(tokenizer), tokenizer.eos_token_id

    def generate(input_ids, attention_mask, **kwargs):
        asked.update(kwargs, lengths=attention_mask.sum(1).tolist())
        new = torch.tensor([[5, 6, eos, 0, 0], [eos, 0, 0, 0, 0], [5, 6, 7, 8, 9], [5, eos, eos, 7, eos]])
        logits = tuple(torch.zeros(4, vocab) for _ in range(5))
        return argparse.Namespace(sequences=torch.cat([input_ids, new], 1), logits=logits)

    model.generate = generate
    prompts = [[3, 4], [3, 4, 5], [3], [4]]
    assert bench.generate_baseline(model, tokenizer, prompts, 5, [eos]) == 3 + 1 + 5 + 2
    assert asked["lengths"] == [2, 3, 1, 1] and asked["do_sample"] and asked["max_new_tokens"] == 5
    assert asked["temperature"] == 1.0 and asked["top_k"] == 0 and asked["top_p"] == 1.0


def test_rollout_prints_every_engine(monkeypatch, capsys, tmp_path):
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = f"bench.py rollout --device cpu --model {tmp_path} --sequences 4 --max-tokens 6 --repeats 1"
    monkeypatch.setattr(sys, "argv", flags.split() + ["--precisions", "bf16", "fp8-row"])
    run_main(bench.main)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["generate bf16", "engine bf16", "generate fp8-row", "engine fp8-row"]
    assert "1.00 of generate bf16" in lines[1] and "4 prompts of 8 to 8 tokens, up to 6 sampled" in lines[0]
