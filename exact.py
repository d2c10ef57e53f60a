"""Learner and sampler that agree bit for bit, whatever the batch, KV cache, padding or packing. This docstring is the lecture.

Two noises meet in low-precision RL, and papers mix them: sampler against learner at equal weights (mu_logp, old_logp), and new
against old policy (old_logp, new_logp). The first is there because a floating-point sum depends on its order, a kernel picks
the order by the shapes it is given, and a rollout (one token, cached keys, left padding) has other shapes than a training
forward. FP8 makes it large: a last bit of BF16 that differs flips a code, a step of 1/16. Here the first noise is zero, not
small; what remains in a run is the second. The price is speed: for study, and for small models.

How: a sum that can be exact is exact; every other sum is made in FP64 and rounded once to the working dtype.

    FP8 linear    an E4M3 code is an integer times 2^-9, at most 448, so a product is an integer times 2^-18, below 2^17.7, and
                  a sum of K = 1536 takes 18 + 17.7 + 10.6 < 47 of FP64's 53 bits (K = 2^17 still fits): no partial sum is ever
                  rounded, and all orders give the same number
        row       Y = round(sum_k x_k w_k  s_x  s_w): scales after the sum, in this order, in FP64
        block     each 128-wide K-block's sum is exact, then scaled and added in FP64, one block after the other
    other sums    linear layers in BF16 (lm_head, kept layers, all of recipe bf16), RMSNorm, attention (scores, softmax and P V
                  in one go), log-softmax (rounded to FP32). A product of two BF16 numbers has 16 bits, and most sums of them
                  fit 53 (of 24,000 random ones none depended on the order). Where FP64 does round, another order shows only if
                  the true value is within some 2^-52 of a tie between two neighbours of the working dtype: one in about
                  2^40 for BF16; for FP32 (recipe fp32) one in about 2^25, a last bit now and then
    elementwise   RoPE, residual sums, gate * up: one IEEE operation an element, nothing to do. Activations run in FP64, since
                  a vector loop and the scalars at its end compute different exponentials (GELU in BF16: 1 % of inputs
                  differ). GELU by tanh is refused: 1 + tanh cancels near -7.2, and FP64 does not hide which loop it was

PyTorch rounds FP64 to BF16 by way of FP32; that is a function of the number alone, so no order enters.

    exact.apply(model)     # a transformers model, in place, after precision.convert; deepcopy and a later convert keep it exact
    python train_grpo.py --preset demo --rollout-kernels exact       # gate before the first update: mean |dlogp| 0.0000

Backward is what it was: emulate's GEMMs in FP8Linear, BF16 ones elsewhere; gradients pass through the roundings. On CUDA
`apply` switches FP8 layers to `emulate`: the sums of FP8 tensor cores are not FP64 and of no known order.

Refused: fp8-tensor (the batch's scale depends on the batch), modules with weights of a kind not known here (experts, routers,
convolutions, norms of another formula), RoPE that depends on a batch's longest row, attention with dropout, soft caps or sinks.
Nonlinearities that a model calls as functions, not as modules, are not seen: compare two batch sizes when you add a family.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import fp8
from errors import UserError

WIDEST = 2**17  # input features up to which a sum of E4M3 products is exact
CHUNK = {"cpu": 2**18}  # weights widened at once: 2 MB of FP64 stay in a CPU's cache; a GPU takes them in larger pieces
ACTIVATIONS = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "ReLU")
TENSOR = "fp8-tensor has one scale for the whole batch, so a row's values depend on the others; use fp8-row or fp8-block"

# -----------------------------------------------------------------------------
# linear layers


def product(a, b):
    """a @ b^T in FP64, from (M, K) and (N, K); b is widened a few rows at a time and never kept in 8 bytes an element."""
    a, rows = a.double(), max(1, CHUNK.get(b.device.type, 2**26) // b.shape[1])
    parts = [a @ part.double().t() for part in b.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def gemm(a, b, granularity):
    """fp8.gemm in FP64: operands a (M, K) and b (N, K) -> (M, N), the same number whatever the order of summation."""
    if granularity == "tensor":
        raise UserError(TENSOR)
    if granularity == "row":
        return product(a.codes, b.codes).mul_(a.scale).mul_(b.scale.t())
    M, K, N = *a.codes.shape, b.codes.shape[0]
    scale_b = fp8.expand_scale(b.scale, (N, b.scale.shape[1]))  # (N, blocks)
    out = torch.zeros(M, N, dtype=torch.float64, device=a.codes.device)
    for i, k in enumerate(range(0, K, fp8.BLOCK)):
        part = product(a.codes[:, k : k + fp8.BLOCK], b.codes[:, k : k + fp8.BLOCK])
        out += part.mul_(a.scale[:, i, None]).mul_(scale_b[None, :, i])
    return out


class Linear(torch.autograd.Function):
    """X W^T + b summed in FP64, rounded once; backward as nn.Linear's, in the working dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = product(x, weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dw, db = ctx.needs_input_grad
        return dy @ weight if dx else None, dy.t() @ x if dw else None, dy.sum(0) if db else None


def output(self, x, weight):
    """FP8Linear.output."""
    return gemm(self.activation(x), self.weight_operand(weight, self.products(x)), self.granularity).to(x.dtype)


def linear(self, x):
    """forward of nn.Linear and of FP8Linear, quantised or not."""
    if isinstance(self, fp8.FP8Linear) and self.quantized:
        return fp8.FP8Linear.forward(self, x)  # calls self.output
    y = Linear.apply(x.reshape(-1, x.shape[-1]), self.weight.to(x.dtype), self.bias)
    return y.reshape(*x.shape[:-1], self.out_features)


# -----------------------------------------------------------------------------
# norms, activations, attention


def rms_norm(self, x):
    wide = x.double()
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * self.weight.double()).to(x.dtype)


def layer_norm(self, x):
    weight, bias = (None if w is None else w.double() for w in (self.weight, self.bias))
    return F.layer_norm(x.double(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def activation(self, x):
    return type(self).forward(self, x.double()).to(x.dtype)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Softmax attention in FP64, rounded once: q (B, H, L, D), k and v (B, H / G, S, D), mask bool (True: seen) or additive,
    (B, 1, L, S) -> (B, L, H, D). A masked key adds exactly 0; a row that sees nothing gives 0."""
    if dropout or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise UserError("--rollout-kernels exact: attention with dropout, soft caps or sinks is not built; use another model")
    (B, H, L, D), (_, heads, S, _) = query.shape, key.shape
    if attention_mask is None:
        attention_mask = torch.ones(L, S, dtype=torch.bool, device=query.device).tril(S - L)[None, None]
    q = query.double().reshape(B, heads, H // heads * L, D)  # the G query heads of a key head, one below the other
    scores = (q @ key.double().transpose(2, 3) * (D**-0.5 if scaling is None else scaling)).view(B, heads, -1, L, S)
    mask = attention_mask[:, :, None, :, :S]  # the same for all heads
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    highest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)  # no inf - inf
    p = torch.exp(scores - highest)
    p = (p / p.sum(-1, keepdim=True).clamp(min=1)).view(B, heads, -1, S)  # the highest adds 1; less: nothing is seen
    out = (p @ value.double()).view(B, H, L, -1).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def whole_mask(*args, **kwargs):
    """transformers' boolean mask, also where SDPA would do without one."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register("exact", attention)
AttentionMaskInterface.register("exact", whole_mask)

# -----------------------------------------------------------------------------
# a model


@torch.no_grad()
def check_norm(name, norm):
    """A class called RMSNorm may hold another formula (1 + weight): compare the two forwards on random numbers."""
    x = torch.randn(4, norm.weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(norm.weight)
    if not torch.allclose(rms_norm(norm, x), type(norm).forward(norm, x), rtol=2.0**-6, atol=1e-6, equal_nan=True):
        raise UserError(f"{name!r}: {type(norm).__name__} is not x / rms(x) * weight, the only one known; use another model")


def forward_of(name, module):
    """The exact forward of a module, or None where its own is exact. UserError for what is neither."""
    kind, rope = type(module), str(getattr(module, "rope_type", ""))
    weights = next(module.parameters(recurse=False), None) is not None
    if kind is fp8.FP8Linear and module.granularity == "tensor":
        raise UserError(f"layer {name!r}: {TENSOR}")
    if kind in (nn.Linear, fp8.FP8Linear):
        if module.in_features > WIDEST:
            raise UserError(f"layer {name!r}: {module.in_features} input features; a sum is exact up to {WIDEST}")
        return linear
    if kind is nn.LayerNorm:
        return layer_norm
    if kind.__name__.endswith("RMSNorm") and weights and (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        check_norm(name, module)
        return rms_norm
    if "dynamic" in rope or "longrope" in rope:
        raise UserError(f"{name!r}: RoPE of type {rope} depends on the longest row of a batch; use another model")
    if not isinstance(module, nn.Embedding) and (weights or "norm" in kind.__name__.lower()):
        raise UserError(f"{name!r} is a {kind.__name__}, which --rollout-kernels exact does not know; use another model")
    if kind.__module__ not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    if kind.__name__ not in ACTIVATIONS or getattr(module, "approximate", "none") != "none":
        raise UserError(f"{name!r}: the activation {module} is not one of {', '.join(ACTIVATIONS)}; use another model")
    return activation


def apply(model):
    """Make a transformers model exact, in place, after `precision.convert`; again is harmless. Returns it. UserError names what
    cannot be exact, and leaves the model as it was."""
    if not (isinstance(model, PreTrainedModel) and model._supports_attention_backend and model._can_set_attn_implementation()):
        raise UserError(f"{type(model).__name__}: its attention does not go through transformers' AttentionInterface")
    found = [(module, f) for name, module in model.named_modules() if (f := forward_of(name, module)) is not None]
    model.set_attn_implementation("exact")
    for module, forward in found:
        module.forward, module.exact = MethodType(forward, module), True  # `exact`: logprob.py and rollout.py ask the head
        if forward is linear:
            module.output = MethodType(output, module)
            if isinstance(module, fp8.FP8Linear) and module.backend != "emulate":
                module.backend = "emulate"
                module.drop_cache()
    return model
