"""The memory planner against real tensors: state, saved activations, peaks of the allocator, and numbers worked out by hand.

    pytest tests/test_memory.py
"""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3Config

import logprob
import memory
import parallel
import precision
import tiny
from errors import UserError
from logprob import collate, token_logps

SMALL = dict(vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             intermediate_size=384, max_position_embeddings=512)  # fmt: skip
WIDE = dict(intermediate_size=512, vocab_size=1024)
CONFIGS = {
    "tiny": lambda: tiny.make_model(tiny.make_tokenizer()).config,  # tied
    "small": lambda: Qwen3Config(**SMALL, tie_word_embeddings=False),
    "wide": lambda: Qwen3Config(**SMALL | WIDE, tie_word_embeddings=False),
    "tied": lambda: Qwen3Config(**SMALL | WIDE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_of(rows=2, length=128):
    """A batch without padding whose prompts are two tokens long."""
    return collate([[1, 2]] * rows, [[3 + i % 9 for i in range(length - 2)]] * rows, 0)


def trained(name, recipe, activations="bf16", checkpointing=False, shard=None):
    """(model, masters, optimizer) after one update, gradients zeroed in place; quantised weights dropped."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="sdpa").eval()
    precision.convert(model, recipe, backend="emulate")
    if checkpointing:
        parallel.checkpoint_layers(model)
    wide = torch.float32 if activations == "fp32" else None
    masters = precision.Masters(model, precision.recipe_of(recipe)["dtype"], held_in=wide, shard=shard)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-4, fused=True)
    token_logps(model, batch_of(1, 8))[0].sum().backward()
    optimizer.step()
    masters.publish()
    masters.zero_grad()
    return model, masters, optimizer


@contextlib.contextmanager
def processes(n):
    """A group of n processes of which this is one: collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        yield functools.partial(parallel.shard, device="cpu")
    finally:
        dist.destroy_process_group()


def nbytes(tensors):
    """Bytes of this rank's part of distinct storages."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in local if t.numel()}.values())


def planned(name, recipe, micro_tokens=256, processes=1, **flags):
    return memory.budget(CONFIGS[name](), processes, micro_tokens, recipe, backend="emulate", **flags)


def compare_state(model, masters, optimizer, b):
    weights, states = masters.parameters(), optimizer.state.values()
    published = [] if b["published"] == 0 else list(model.parameters())
    assert nbytes(published) == b["published"] and nbytes(weights) == b["masters"]
    assert nbytes([w.grad for w in weights]) == b["gradients"]
    assert nbytes([s[k] for s in states for k in ("exp_avg", "exp_avg_sq")]) == b["adamw"]


@pytest.mark.parametrize("name", ["tiny", "small"])
@pytest.mark.parametrize("recipe,activations", [("bf16", "bf16"), ("fp8-row", "bf16"), ("fp32", "bf16"), ("fp8-block", "fp32")])
def test_state_is_exact(name, recipe, activations):
    model, masters, optimizer = trained(name, recipe, activations)
    b = planned(name, recipe, activations=activations)
    compare_state(model, masters, optimizer, b)
    assert b["parameters"] == sum(p.numel() for p in model.parameters())
    assert b["learner"] == sum(b[k] for k in ("published", "masters", "gradients", "adamw", "weight_codes"))
    token_logps(model, batch_of(1, 8))[0].sum().backward()
    operands = [o for layer in precision.converted_layers(model) for k, o in layer.cache.items() if k != "of"]
    assert nbytes(t for o in operands for t in o) == b["weight_codes"]


@pytest.mark.parametrize("recipe", ["fp8-tensor", "fp8-row"])
def test_operands_of_scaled_mm_are_exact(recipe):
    model = AutoModelForCausalLM.from_config(CONFIGS["small"](), dtype=torch.bfloat16)
    precision.convert(model, recipe, backend="scaled_mm")
    for layer in precision.converted_layers(model):
        operands = [layer.weight_operand(layer.weight, torch.bfloat16, transposed) for transposed in (False, True)]
        whole, first = nbytes(t for o in operands for t in o), nbytes(operands[0])
        assert (first, whole - first) == memory.operand_bytes(layer, 2)


@pytest.mark.parametrize("recipe,activations", [("fp8-row", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_shards_are_exact(recipe, activations):
    with processes(8) as shard:
        b = planned("small", recipe, processes=8, activations=activations)
        compare_state(*trained("small", recipe, activations, shard=shard), b)


def saved_bytes(model, batch):
    """Bytes of distinct storages that autograd saves for the backward of the log-probs, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x  # held: a freed storage's address would be used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        token_logps(model, batch)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name,recipe,activations", [
    ("small", "bf16", "bf16"), ("wide", "fp8-row", "bf16"), ("small", "fp8-block", "fp32"), ("small", "fp32", "bf16"),
    ("llama", "bf16", "bf16"),
])  # fmt: skip
def test_saved_activations(name, recipe, activations, checkpointing):
    measured = saved_bytes(trained(name, recipe, activations, checkpointing)[0], batch_of())
    b = planned(name, recipe, activations=activations, checkpointing=checkpointing)
    assert b["activations"] == pytest.approx(measured, rel=0.02), (measured, b["activations"])
    assert b["activations"] <= measured  # what it leaves out are rotary tables and indices
    if checkpointing:  # what the hooks cannot see is one layer of the model without checkpointing
        inner = saved_bytes(trained(name, recipe, activations)[0], batch_of()) - measured
        config, e = CONFIGS[name](), 4 if "fp32" in (recipe, activations) else 2
        inputs = config.num_hidden_layers * 256 * config.hidden_size * e
        assert b["recomputed"] == pytest.approx((inner + inputs) / config.num_hidden_layers, rel=0.02)


def peak_bytes(model, batch):
    """The allocator's highest level over a forward and backward, above its level before."""
    token_logps(model, batch)[0].sum().backward()  # what is cached for good is there afterwards
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        token_logps(model, batch)[0].sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("name,recipe,n,tokens,checkpointing", [
    ("wide", "bf16", 1, 512, True), ("wide", "bf16", 1, 288, False), ("tiny", "bf16", 1, 256, False),
    ("wide", "fp8-row", 1, 256, False), ("wide", "bf16", 8, 512, True), ("wide", "fp8-row", 8, 256, False),
    ("wide", "fp8-block", 8, 128, True), ("tied", "bf16", 8, 64, True),
])  # fmt: skip
def test_peak_of_the_allocator(name, recipe, n, tokens, checkpointing, monkeypatch):
    """Alone and as one of eight ranks. Not one process with FP8 and checkpointing: the cache is remade, which would count
    as if it came on top of the old one."""
    for module in (logprob, memory):
        monkeypatch.setattr(module, "CHUNK", 2**17)  # several chunks of logits
    with processes(n) if n > 1 else contextlib.nullcontext() as shard:
        model = trained(name, recipe, "bf16", checkpointing, shard)[0]
        measured = peak_bytes(model, batch_of(tokens // 32, 32))
    b = planned(name, recipe, tokens, n, checkpointing=checkpointing)
    expected = b["training_peak"] - b["learner"] - b["overhead"]
    assert 0.98 * measured <= expected <= 1.15 * measured


# -----------------------------------------------------------------------------
# numbers by hand


@pytest.mark.parametrize("size,count", [("8B", 8_190_735_360), ("14B", 14_768_307_200), ("32B", 32_762_123_264)])
def test_published_sizes(size, count):
    b = memory.budget(memory.qwen3(size))
    assert b["parameters"] == count  # 8.2, 14.8 and 32.8 billion
    assert (b["published"], b["masters"], b["adamw"]) == (2 * count // 8, 4 * count // 8, 8 * count // 8)
    assert b["learner"] == 18 * count // 8 and b["weight_codes"] == b["reference"] == b["host_train"] == 0
    assert (b["host_start"], b["host_save"]) == (6 * count * 8, 12 * count)


def test_qwen3_8b_by_hand():
    b = memory.budget(memory.qwen3("8B"), tp=2, vllm_memory=0.5)
    layer, matrices, root = 192_946_432, 192_937_984, 1_244_663_808  # a layer; its linear layers; embeddings, norm, lm_head
    assert (b["unsharded_root"], b["unsharded_layers"], b["layer_gradients"]) == (2 * root, 4 * layer, 6 * layer)
    per_token = 2 * 8 * 4096 + 8 + 6 * (4096 + 1024) + 4 * 40 + 4 * (4096 + 1024) + 4 * 32 + 8 * 12288
    assert per_token == 215_336
    assert b["activations"] == 16384 * (36 * per_token + 8 * 4096 + 12) and b["recomputed"] == 0
    assert b["head_gradient"] == 2 * 151_936 * 4096 and b["head_chunk"] == 16 * (2**24 // 151_936) * 151_936 + 2 * 16384 * 4096
    assert b["work"] == 10 * 16384 * 12288
    moment = b["activations"] + b["work"] + b["unsharded_layers"] + b["layer_gradients"] + b["head_gradient"]
    assert b["at_layers"] == moment and b["training_peak"] == b["learner"] + memory.OVERHEAD + 2 * root + moment
    assert b["vllm"] == 40 * 2**30 and b["sampling_peak"] == b["learner"] + 40 * 2**30
    scales = 4 * 36 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)  # one for each output channel
    assert b["vllm_weights"] == (2 * b["parameters"] + 36 * matrices + scales) // 2
    assert b["kv_tokens"] == (40 * 2**30 - memory.OVERHEAD - b["vllm_weights"]) // (2 * 36 * 4 * 128 * 2)


def test_flags_move_what_they_should():
    config = memory.qwen3("8B")
    plain, P = memory.budget(config), 8_190_735_360
    checkpointed = memory.budget(config, checkpointing=True)
    assert checkpointed["activations"] == 16384 * (36 * 2 * 4096 + 8 * 4096 + 12) < plain["activations"] / 20
    assert checkpointed["recomputed"] == 16384 * 215_336
    offloaded = memory.budget(config, offload=True)
    assert offloaded["learner"] == 0 and offloaded["host_start"] == plain["host_start"]
    assert offloaded["host_train"] == 18 * P and offloaded["host_save"] == 30 * P
    assert offloaded["training_peak"] == plain["training_peak"] - plain["learner"]
    reference = memory.budget(config, reference=True)
    assert reference["learner"] == plain["learner"] + 2 * P // 8 and reference["host_start"] == 64 * P
    assert memory.budget(config, precision="fp32")["published"] == 0
    wide = memory.budget(config, activations="fp32", backend="emulate")
    assert (wide["published"], wide["masters"]) == (4 * P // 8, 4 * P // 8)
    alone = memory.budget(config, processes=1)
    assert alone["weight_codes"] == 36 * 2 * 192_937_984 + 4 * 36 * (2 * (5120 + 8192 + 16384) + 16384)
    assert alone["host_start"] == 4 * P and alone["unsharded_root"] == alone["unsharded_layers"] == 0
    assert alone["layer_gradients"] == 2 * 4096 * 12288
    assert memory.budget(config, vllm_memory=0.2)["kv_tokens"] == 0  # its weights do not fit


# -----------------------------------------------------------------------------
# mistakes and the command line


@pytest.mark.parametrize("argv,words", [
    (["--size", "7B"], "--size"),
    (["--model", "nowhere"], "config.json"),
    (["--model", "nowhere", "--size", "8B"], "leave one of the two out"),
    (["--processes", "0"], "--processes"),
    (["--vllm-memory", "1.5"], "--vllm-memory"),
    (["--vllm-tp", "3"], "--vllm-tp 3"),
    (["--vllm-tp", "16", "--processes", "16"], "key-value heads"),
    (["--precision", "int4"], "--precision"),
    (["--cpu-offload", "--processes", "1"], "--cpu-offload"),
    (["--activations", "fp32", "--fp8-backend", "scaled_mm"], "--fp8-backend scaled_mm"),
])  # fmt: skip
def test_mistakes(argv, words):
    with pytest.raises(UserError, match=words):
        memory.main(argv)


def test_mistakes_of_the_library():
    for flags in (dict(precision="int4"), dict(backend="triton"), dict(tp=3),
                  dict(processes=1, offload=True)):
        with pytest.raises(UserError):
            memory.budget(CONFIGS["small"](), **flags)
    with pytest.raises(UserError, match="multiples of 128"):
        memory.budget(Qwen3Config(**SMALL | dict(intermediate_size=400)), precision="fp8-block")
    with pytest.raises(UserError, match="mlp.gate_proj"):
        memory.budget(MixtralConfig(**SMALL))
    with pytest.raises(UserError, match="language model"):
        memory.budget(PreTrainedConfig())


def test_command_line(tmp_path, capsys):
    memory.main([])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "| GiB | Qwen3-8B | Qwen3-14B | Qwen3-32B |" and "| parameters | 8.19e9 | 14.77e9 | 32.76e9 |" in lines
    assert all(f"Qwen3-{size} does not fit: training takes" in out for size in memory.SIZES)
    memory.main(["--size", "8B", "--activation-checkpointing"])
    out = capsys.readouterr().out
    assert "Qwen3-8B fits" in out and "14B" not in out and "recomputed" in out and "reference" not in out
    CONFIGS["small"]().save_pretrained(tmp_path)
    memory.main(["--model", str(tmp_path), "--processes", "1", "--activations", "fp32"])
    assert f"{tmp_path} fits" in capsys.readouterr().out
    memory.main(["--size", "32B", "--vllm-memory", "0.1"])
    assert "no KV cache: raise --vllm-memory or --vllm-tp" in capsys.readouterr().out
