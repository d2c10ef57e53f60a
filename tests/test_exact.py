"""Exact kernels: no difference between sampler and learner in any batch, sums against fractions, gradients, refusals.

    python -m pytest tests/test_exact.py        SmolLM2, minutes: python -m pytest -m slow tests/test_exact.py
"""

import copy
import csv
import json
import os
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small import first_letter_even
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.activations import ACT2FN

import exact
import fp8
import plot
import precision
import reward
import tiny
import train_grpo
from errors import UserError
from flags import parse_flags
from logprob import collate, log_softmax, token_logps
from rollout import make_engine

TOKENIZER = tiny.make_tokenizer()
SMOLLM2 = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "out", "smollm2")
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 17, (1 + 5 * i % 12,), generator=GENERATOR).tolist() for i in range(16)]  # 1 to 12 tokens


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(recipe, seed=0):
    """The tiny model, untrained, weights three times larger: a flat distribution would hide differences."""
    model = tiny.make_model(TOKENIZER, seed).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0) if p.dim() == 2 else None
    precision.convert(model, recipe)
    precision.Masters(model, precision.recipe_of(recipe)["dtype"])
    return model


def exact_model(recipe, seed=0):
    return exact.apply(make(recipe, seed))


def sample(model, recipe, rows, n=4, tokens=48, prompts=PROMPTS, temperature=1.0, tokenizer=TOKENIZER):
    engine = make_engine("hf", model, tokenizer, recipe, max_rows=rows)
    return engine.generate(prompts, n, temperature, tokens, seed=1)


@torch.no_grad()
def differences(model, prompts, completions, size, temperature=1.0, seed=0):
    """old_logp - mu_logp of all tokens, scored in shuffled micro-batches of `size` answers."""
    n = len(completions) // len(prompts)
    order = torch.randperm(len(completions), generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for k in range(0, len(order), size):
        chosen = order[k : k + size]
        batch = collate([prompts[i // n] for i in chosen], [completions[i].token_ids for i in chosen], 0)
        logps, _ = token_logps(model, batch, temperature)
        for row, i in zip(logps, chosen, strict=True):
            found.append(row[: len(completions[i].logps)] - torch.tensor(completions[i].logps))
    return torch.cat(found)


# -----------------------------------------------------------------------------
# sampler against learner


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block", "bf16"])
def test_no_difference_between_sampler_and_learner(recipe):
    model = exact_model(recipe)
    together = sample(model, recipe, 64, n=10, tokens=40)
    assert sum(len(c.token_ids) for c in together) >= 2000
    for size in (7, 160) if recipe == "fp8-row" else (7,):
        assert (differences(model, PROMPTS, together, size, seed=size) == 0).all()
    assert (differences(model, PROMPTS[:2], together[: 10 * 2], 1) == 0).all()  # no padding at all
    alone = sample(model, recipe, 1, n=1, tokens=40, prompts=PROMPTS[:4])  # no neighbours, no left padding
    assert alone == together[: 10 * 4 : 10]


@pytest.mark.parametrize("recipe", ["fp8-row", "bf16"])
def test_the_plain_model_does_differ(recipe):
    model = make(recipe)
    gap = differences(model, PROMPTS, sample(model, recipe, 64, n=2, tokens=24), 7)
    assert (gap != 0).float().mean() > 0.5 and gap.abs().max() > 1e-3


def test_exact_means_nearly_the_same_model():
    plain, model = make("fp8-row"), exact_model("fp8-row")
    gap = differences(plain, PROMPTS, sample(model, "fp8-row", 64, n=2, tokens=24), 64).abs()
    assert 0 < gap.mean() < 0.05


@pytest.mark.parametrize("recipe, temperature", [("fp8-row", 0.7), ("fp8-block", 1.3), ("bf16", 0)])
def test_temperatures(recipe, temperature):
    model = exact_model(recipe)
    completions = sample(model, recipe, 16, n=1, tokens=24, temperature=temperature)
    assert (differences(model, PROMPTS, completions, 5, temperature or 1.0) == 0).all()


def test_fp32():
    # sums of 48-bit products are not exact in FP64, a last bit may differ now and then
    gap = differences((model := exact_model("fp32")), PROMPTS, sample(model, "fp32", 64, n=2), 7).abs()
    assert gap.mean() < 1e-8 and gap.max() < 1e-5


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block"])
def test_high_precision_is_exact(recipe):
    model = exact_model(recipe)
    with precision.high_precision(model):
        completions = sample(model, recipe, 64, n=2, tokens=24)
        assert (differences(model, PROMPTS, completions, 7) == 0).all()
    reference = exact_model("bf16")
    assert (differences(reference, PROMPTS, completions, 3) == 0).all()  # the same model as the recipe bf16
    assert (differences(model, PROMPTS, completions, 7) != 0).any()  # and quantised again outside


def test_options_of_the_quantiser_and_kept_layers():
    model = make("fp32")
    precision.convert(model, "fp8-row", power_of_two=True, keep_bf16="first:1", grad_dtype="e5m2")
    precision.Masters(model, torch.bfloat16)
    exact.apply(model)
    assert 0 < len(precision.converted_layers(model)) < sum(isinstance(m, nn.Linear) for m in model.modules()) - 1
    assert (differences(model, PROMPTS, sample(model, "fp8-row", 64, n=2, tokens=24), 7) == 0).all()


SIZES = dict(vocab_size=17, hidden_size=48, intermediate_size=80, num_hidden_layers=2, max_position_embeddings=128, head_dim=16)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
SIZES |= dict(eos_token_id=1, pad_token_id=0, bos_token_id=None)


def family(name):
    torch.manual_seed(3)
    if name == "llama":  # biases and another activation
        config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu")
        model = LlamaForCausalLM(config)
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.normal_(layer.bias, std=0.3)
    else:
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    model = model.eval().bfloat16()
    model.model.rotary_emb.float()
    return model


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_families_with_biases_and_sliding_windows(name, recipe):
    model = family(name)
    precision.convert(model, recipe)
    exact.apply(model)
    assert (differences(model, PROMPTS, sample(model, recipe, 64, n=2, tokens=24), 7) == 0).all()


def test_a_sliding_window_is_kept():
    model, ids = family("mistral"), torch.randint(3, 17, (2, 20), generator=GENERATOR)
    want = model(input_ids=ids).logits
    got = exact.apply(model)(input_ids=ids).logits
    assert (got - want).abs().max() < 0.15 * want.abs().max()
    changed = ids.clone()
    changed[:, 0] = 3 + (ids[:, 0] - 2) % 14  # two layers of window 5 reach 8 tokens back
    assert torch.equal(model(input_ids=changed).logits[:, 9:], got[:, 9:])
    assert not torch.equal(model(input_ids=changed).logits[:, :9], got[:, :9])


# -----------------------------------------------------------------------------
# the parts


def test_a_sum_by_hand():
    # 448 * 448 + 2^-9 * 2^-9 - 448 * 448: FP32 loses the middle term, FP64 does not
    a = torch.tensor([[448.0, 2.0**-9, -448.0] + [0.0] * 13]).bfloat16()
    b = torch.tensor([[448.0, 2.0**-9, 448.0] + [0.0] * 13]).bfloat16()
    assert exact.product(a, b).item() == 2.0**-18
    assert (a.float() @ b.float().t()).item() == 0
    scales = torch.tensor([[3.0]]), torch.tensor([[0.5]])
    got = exact.gemm(fp8.Operand(a, scales[0]), fp8.Operand(b, scales[1]), "row")
    assert got.item() == 1.5 * 2.0**-18


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 128, 336, 1536]), st.sampled_from(["row", "block"]))
def test_gemm_against_fractions(seed, K, granularity):
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(2, K, generator=g) * torch.exp(3 * torch.randn(2, K, generator=g)) for _ in range(2))
    a = fp8.make_operand(x.bfloat16(), granularity, torch.float8_e4m3fn, "emulate")
    b = fp8.make_operand(w.bfloat16(), granularity, torch.float8_e4m3fn, "emulate", (128, 128))
    out = exact.gemm(a, b, granularity)
    order = torch.randperm(K, generator=g) if granularity == "row" else torch.arange(K)
    mixed = exact.gemm(a._replace(codes=a.codes[:, order]), b._replace(codes=b.codes[:, order]), granularity)
    assert torch.equal(out, mixed)
    width = K if granularity == "row" else 128
    for i in range(2):
        for j in range(2):
            total = Fraction(0)
            for block, k in enumerate(range(0, K, width)):
                codes = zip(a.codes[i, k : k + width].tolist(), b.codes[j, k : k + width].tolist(), strict=True)
                part = sum(Fraction(p) * Fraction(q) for p, q in codes)
                assert float(part) == part  # it fits FP64
                total += part * Fraction(a.scale[i, block].item()) * Fraction(b.scale[min(j, len(b.scale) - 1), block].item())
            assert abs(Fraction(out[i, j].item()) - total) <= 2**-45 * max(abs(total), Fraction(2) ** -30)


def test_the_largest_sum_still_has_its_last_bit():
    K = exact.WIDEST
    a = torch.full((1, K), 448.0, dtype=torch.bfloat16)
    a[0, -1] = 2.0**-9
    b = a.clone()
    assert Fraction(exact.product(a, b).item()) == (K - 1) * 448**2 + Fraction(1, 2**18)
    b[0, -1] = -(2.0**-9)
    assert Fraction(exact.product(a, b).item()) == (K - 1) * 448**2 - Fraction(1, 2**18)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def in_pieces(function, x, size):
    return torch.cat([function(x[i : i + size]) for i in range(0, len(x), size)])


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_activations_of_every_bf16_number(name):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    module = ACT2FN[name]
    assert exact.forward_of("act", module) is exact.activation

    def function(x):
        return exact.activation(module, x)

    whole = function(x)
    small = x.abs() < 2.0**100
    assert torch.allclose(whole[small].float(), module(x[small].float()), rtol=2.0**-8, atol=1e-6)
    for size in (7, 13):  # with 8 FP64 numbers in a vector, all of them scalars, and some
        assert torch.equal(bits(whole), bits(in_pieces(function, x, size)))


def test_rope_does_not_depend_on_the_shape():
    rope = make("bf16").model.rotary_emb
    assert exact.forward_of("rope", rope) is None
    positions, x = torch.arange(4096), torch.zeros(1, dtype=torch.bfloat16)
    whole = rope(x, positions[None])
    for size in (1, 7):
        for k in (0, 1):
            assert torch.equal(whole[k][0], in_pieces(lambda p, k=k: rope(x, p[None])[k][0], positions, size))
    wide = rope(x, positions.view(64, 64))
    assert torch.equal(wide[0].view_as(whole[0]), whole[0])


@pytest.mark.parametrize("vocab", [17, 1000, 49152])
@pytest.mark.parametrize("wide", [True, False])
def test_log_softmax_does_not_depend_on_the_rows(vocab, wide):
    logits = (3 * torch.randn(30, vocab, generator=torch.Generator().manual_seed(1))).bfloat16()
    head = nn.Linear(1, 1)
    head.exact = wide

    def function(x):
        return log_softmax(x, 0.7, head)

    whole = function(logits)
    assert whole.dtype == torch.float32
    assert all(torch.equal(whole, in_pieces(function, logits, size)) for size in (1, 7))
    assert torch.allclose(whole, F.log_softmax(logits.double() / 0.7, -1).float(), atol=1e-5)


def test_rms_norm_and_layer_norm():
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = make("bf16").model.norm
    norm.weight.data = torch.randn(96, generator=torch.Generator().manual_seed(2)).bfloat16()
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.double()
    assert torch.equal(exact.rms_norm(norm, x), want.bfloat16())
    plain = nn.LayerNorm(96, bias=True).bfloat16()
    nn.init.normal_(plain.bias)
    assert exact.forward_of("norm", plain) is exact.layer_norm
    assert torch.allclose(exact.layer_norm(plain, x), plain(x), atol=0.05)


def attend(q, k, v, mask, **kwargs):
    out, _ = exact.attention(None, q, k, v, mask, **kwargs)
    return out.transpose(1, 2)


def test_attention_against_sdpa():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=g) for h, n in ((6, 5), (2, 9), (2, 9)))
    mask = torch.rand(2, 1, 5, 9, generator=g) < 0.5
    mask[..., 0] = True
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True).float()
    assert torch.allclose(attend(q, k, v, mask), want, atol=1e-7)
    additive = torch.zeros(2, 1, 5, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(attend(q, k, v, additive), attend(q, k, v, mask))
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4)[None, None]
    assert torch.equal(attend(q, k, v, None), attend(q, k, v, causal))
    assert torch.equal(attend(q, k, v, None, scaling=0.25), attend(q, k, v, None))


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
    q, k, v = (torch.randn(1, 1, 3, 16).bfloat16().requires_grad_() for _ in range(3))
    mask = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)[None, None]
    out = attend(q, k, v, mask)
    out.float().square().sum().backward()
    assert (out[0, 0, 0] == 0).all() and out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v)) and v.grad[0, 0, 0].abs().sum() > 0
    assert torch.equal(out[0, 0, 1], v[0, 0, 0])


@pytest.mark.parametrize("dropout", [{"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(1)}])
def test_attention_that_is_not_built_is_refused(dropout):
    q = torch.randn(1, 1, 2, 16)
    with pytest.raises(UserError, match="--rollout-kernels exact"):
        exact.attention(None, q, q, q, None, **dropout)


def test_nan_in_a_weight_comes_out():
    model = exact_model("fp8-row")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    precision.weights_changed(model)
    assert model(input_ids=torch.tensor([[3, 4]])).logits.isnan().any()


# -----------------------------------------------------------------------------
# gradients, weights, copies


def gradients(model):
    responses = [[7, 8, 9, 10], [5, 6], [11] * 9]
    logps, _ = token_logps(model, collate(PROMPTS[:3], responses, 0))
    logps.sum().backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block", "bf16", "fp32"])
def test_gradients_are_close_to_emulates(recipe):
    models = [tiny.make_model(TOKENIZER).eval().to(precision.RECIPES[recipe]["dtype"]) for _ in range(2)]
    for model in models:
        precision.convert(model, recipe)
    want, got = gradients(models[0]), gradients(exact.apply(models[1]))
    for name, g in want.items():
        assert g.norm() > 0
        assert (g - got[name]).norm() < {"fp32": 1e-4, "bf16": 0.05}.get(recipe, 0.15) * g.norm(), name


def test_backward_of_a_linear_layer_is_that_of_nn_linear():
    plain, layer = (nn.Linear(32, 16).bfloat16() for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 32).bfloat16()
    for forward in (plain.forward, lambda x: exact.linear(layer, x)):
        forward(x).float().square().sum().backward()
    assert torch.allclose(plain.weight.grad, layer.weight.grad, rtol=0.03, atol=0.03)
    assert torch.allclose(plain.bias.grad, layer.bias.grad, rtol=0.03, atol=0.03)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[3], PROMPTS[3][::-1]])).logits


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block", "bf16"])
def test_weights_changed_drops_operands(recipe):
    model = exact_model(recipe)
    before = logits_of(model)
    for p in model.parameters():
        p.data.mul_(torch.linspace(0.5, 1.5, p.shape[-1]).to(p.dtype))
    precision.weights_changed(model)
    after = logits_of(model)
    fresh = exact_model(recipe, seed=1)
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(before, after) and torch.equal(after, logits_of(fresh))


def test_weights_are_quantised_once(monkeypatch):
    model = exact_model("fp8-row")
    shapes, made, original = {tuple(p.shape) for p in model.parameters()}, [], fp8.make_operand
    monkeypatch.setattr(fp8, "make_operand", lambda x, *a, **k: made.append(tuple(x.shape)) or original(x, *a, **k))
    for _ in range(3):
        logits_of(model)
    assert sum(shape in shapes for shape in made) == len(precision.converted_layers(model))


def test_a_copy_stays_exact_and_has_its_own_weights():
    model = exact_model("fp8-row")
    logits_of(model)  # fills the caches
    other = copy.deepcopy(model)
    assert torch.equal(logits_of(other), logits_of(model))
    assert (differences(other, PROMPTS, sample(other, "fp8-row", 64, n=2, tokens=16), 5) == 0).all()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    precision.weights_changed(other)
    assert logits_of(other).abs().max() == 0 and logits_of(model).abs().max() > 0


@pytest.mark.parametrize("to", ["bf16", "fp8-block", "fp8-row"])
def test_convert_keeps_it_exact(to):
    model = exact_model("fp8-row")
    precision.convert(model, to)
    want = exact_model("bf16")
    precision.convert(want, to)
    assert len(precision.converted_layers(model)) == (0 if to == "bf16" else len(precision.converted_layers(want)))
    assert torch.equal(logits_of(model), logits_of(want)) and torch.equal(logits_of(model), logits_of(exact_model(to)))
    assert torch.equal(logits_of(model), logits_of(exact.apply(model)))


def test_apply_twice_is_once():
    model = exact_model("fp8-block")
    assert torch.equal(logits_of(exact.apply(model)), logits_of(exact_model("fp8-block")))


def test_a_saved_model_is_an_ordinary_one(tmp_path):
    exact_model("fp8-row").save_pretrained(tmp_path)
    assert "exact" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_the_engine_applies_it():
    model = make("fp8-row")
    engine = make_engine("hf", model, TOKENIZER, "fp8-row", kernels="exact")
    assert engine.model is model and torch.equal(logits_of(model), logits_of(exact_model("fp8-row")))
    model = make("bf16")
    before = logits_of(model)
    engine = make_engine("hf", model, TOKENIZER, "fp8-row", kernels="exact")
    assert torch.equal(logits_of(engine.model), logits_of(exact_model("fp8-row")))
    assert torch.equal(logits_of(model), before)  # the learner is another recipe's and stays plain
    with pytest.raises(UserError, match="--rollout-kernels exact .*--engine hf"):
        make_engine("vllm", model, TOKENIZER, "fp8-row", kernels="exact")


# -----------------------------------------------------------------------------
# refusals


def test_tensor_scales_are_refused_and_the_model_stays_as_it_was():
    model = make("fp8-tensor")
    before = logits_of(model)
    with pytest.raises(UserError, match="q_proj.*fp8-tensor.*fp8-row or fp8-block"):
        exact.apply(model)
    assert torch.equal(before, logits_of(model)) and model.config._attn_implementation != "exact"
    model = precision.convert(model, "bf16") and exact.apply(model)
    precision.convert(model, "fp8-tensor")
    with pytest.raises(UserError, match="fp8-tensor"):
        logits_of(model)


def test_models_it_does_not_know_are_refused():
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    with pytest.raises(UserError, match="Qwen3Moe"):
        exact.apply(experts)
    with pytest.raises(UserError, match="GemmaRMSNorm is not x / rms"):  # 1 + weight
        exact.apply(GemmaForCausalLM(GemmaConfig(**SIZES, hidden_act="silu")))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UserError, match="dynamic"):
        exact.apply(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)))
    with pytest.raises(UserError, match="Linear: its attention"):
        exact.apply(nn.Linear(16, 16))
    with pytest.raises(UserError, match="'model.layers.0.mlp.act_fn': the activation GELUTanh"):
        exact.apply(LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh")))
    model = make("bf16")
    model.extra = nn.Linear(2**17 + 16, 1, device="meta")
    with pytest.raises(UserError, match="131088 input features"):
        exact.apply(model)
    for layer in (nn.Conv1d(1, 1, 1), nn.MultiheadAttention(4, 1), nn.PReLU(), nn.Sigmoid(), nn.BatchNorm1d(4, affine=False)):
        model.extra = layer
        with pytest.raises(UserError, match=type(layer).__name__):
            exact.apply(model)


@pytest.mark.parametrize("extra, first, second", [
    ("--precision fp8-tensor", "--rollout-kernels exact", "--precision fp8-tensor"),
    ("--precision fp8-row --rollout-precision bf16", "--rollout-precision bf16", "--precision fp8-row"),
    ("--engine vllm", "--rollout-kernels exact", "--engine hf"),
    ("--fp8-backend scaled_mm", "--rollout-kernels exact", "--fp8-backend scaled_mm"),
])  # fmt: skip
def test_flags_are_refused(extra, first, second):
    with pytest.raises(UserError) as error:
        parse_flags(["--rollout-kernels", "exact", *extra.split()])
    assert first in str(error.value) and second in str(error.value) and "\n" not in str(error.value)


def test_flags():
    assert parse_flags([]).rollout_kernels == "aligned"
    assert parse_flags(["--rollout-kernels", "exact"]).fp8_backend == "emulate"
    assert parse_flags(["--rollout-kernels", "exact", "--precision", "bf16"]).fp8_backend is None


# -----------------------------------------------------------------------------
# training


@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block", "bf16"])
def test_a_run_has_no_mismatch(tmp_path, monkeypatch, capsys, recipe):
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    make("fp32").save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    sums = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in (7, 95, 100, 101, 102)]  # prompts of 4 to 8 tokens
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    flags = f"--model {tmp_path / 'model'} --data {tmp_path / 'sums.jsonl'} --out {tmp_path / 'out'} --device cpu --steps 2 "
    flags += "--prompts-per-step 4 --group-size 4 --updates-per-step 2 --micro-tokens 64 --max-tokens 12 --lr 1e-3 "
    flags += f"--eval-every 0 --rollout-kernels exact --precision {recipe}"
    train_grpo.train(train_grpo.parse_flags(flags.split()))
    assert "bound 1e-09: ok" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out" / "metrics.csv").open()))
    assert [float(row["mismatch/abs_dlogp_max"]) for row in rows] == [0, 0]  # after an update too
    assert float(rows[1]["grad_norm"]) > 0


def test_the_gate_is_zero():
    args = parse_flags(["--rollout-kernels", "exact"])
    with pytest.raises(UserError, match="gate"):
        gaps = {"mismatch/abs_dlogp_mean": 1e-6, "mismatch/abs_dlogp_max": 1e-3, "n/mu": 9.0, "entropy": 1.0}
        train_grpo.check_gate(args, gaps)


# -----------------------------------------------------------------------------
# a real model


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(os.path.join(SMOLLM2, "model.safetensors")), reason="make smollm2 makes it")
@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block"])
def test_smollm2(recipe):
    model, tokenizer, _ = precision.load_model(SMOLLM2, recipe)
    exact.apply(model)
    texts = ["2 + 2 =", "The capital of France is", "Once upon a time there was a small robot who", "Water boils at"]
    texts += [f"Question: Tom has {n} apples and buys {n + 3} more. How many has he now? Answer:" for n in range(12)]
    prompts = [tokenizer(text).input_ids for text in texts]
    together = sample(model, recipe, 64, n=4, tokens=48, prompts=prompts, tokenizer=tokenizer)
    gap = differences(model, prompts, together, 7)
    print(f"\n{recipe}: {len(gap)} tokens, largest difference {gap.abs().max().item()}")
    assert len(gap) >= 2000 and (gap == 0).all()
    assert sample(model, recipe, 1, n=1, tokens=48, prompts=prompts[:3], tokenizer=tokenizer) == together[: 4 * 3 : 4]
