"""FP8 linear layers: quantisers and `FP8Linear`, whose three GEMMs all take FP8 operands. This docstring is the lecture.

A linear layer Y = X W^T (X is (T, K) tokens x features, W is (N, K)) costs three GEMMs in training:

    output            Y  (T, N) = X   (T, K) @ W^T (K, N)     contraction over K, the input features
    input gradient    dX (T, K) = dY  (T, N) @ W   (N, K)     contraction over N, the output features
    weight gradient   dW (N, K) = dY^T(N, T) @ X   (T, K)     contraction over T, the tokens

An FP8 GEMM multiplies 8-bit codes and applies the scales afterwards, so a scale may vary along the two outer dimensions but
not inside a sum. Hence the one rule of this file: **each operand is quantised along the contraction dimension of the GEMM it
enters, from the high-precision tensor.** X is therefore quantised twice (along K, later along T), dY twice, and W twice with
row scales (tensor and 128 x 128 scales do not depend on the direction).

    scale = amax / F_max            F_max = 448 for E4M3, 57344 for E5M2 (torch.finfo, nothing hard-coded)
    q     = cast(clamp(x / scale, -F_max, F_max))      x ~ q * scale: `scale` is the inverse scale, what GEMMs want

Granularity, the set over which amax is taken:

    tensor   one scale for the whole operand
    row      one per row of X, W (per token, per output channel); per column where the contraction runs over rows
    block    1 x 128 along the contraction for X and dY, 128 x 128 for W (DeepSeek-V3, arXiv:2412.19437); the K-blocks' partial
             sums are scaled and added in FP32, one after the other, in that order

E4M3 (3 mantissa bits) is used for all operands by default; `grad_dtype=torch.float8_e5m2` gives dY more range and 2 bits.
`power_of_two=True` rounds scales up to a power of two, so that scaling itself adds no rounding error.

Weights. The weight is rounded to BF16 and *that* tensor is quantised, whatever dtype the parameter has: FP32 masters, their
BF16 copy and a sampler that was sent BF16 weights then hold the same codes. Quantised weights are kept until `drop_cache` (call
`precision.weights_changed` after each optimiser step): a thousand sampled tokens quantise once. The cache is not keyed on
`weight._version`: fused AdamW, `.data` writes and FSDP2's all-gather leave that counter alone.

Memory. Saved for backward per call: X in its own dtype (2 bytes an element in BF16; q, k and v share the same X) and a
reference to W; operands are quantised again in backward. Cached per weight element: `scaled_mm` 1 byte for the output GEMM
plus 1 for the transposed copy once a backward has run; `emulate` 2 bytes (BF16 codes; 4 with FP32 products), doubled by the
first backward for `row` only. Under FSDP2 nothing is cached across a reshard.

Backends (`--fp8-backend`), never exchanged silently:

    scaled_mm   torch.nn.functional.scaled_mm on FP8 tensors. CUDA's rules (K and N multiples of 16, 128 for blocks; row-major x
                column-major; never E5M2 x E5M2; FP32 scales of the right shape) are checked here on every device, since the
                CPU kernel accepts much that CUDA refuses. `tensor` and `row` on the CPU; `block` needs an H100 or H200.
    emulate     the codes, exact in BF16, are multiplied by an ordinary matmul and the scales applied afterwards. The product is
                rounded to BF16 before scaling (differs from scaled_mm by about 2.8e-3), or kept in FP32 when X is FP32 or
                `fp32_products=True` (about 4e-5). Hopper's tensor cores accumulate in fewer bits than FP32: no emulation here.

Numbers that break others: an all-zero row gives codes 0 and a positive scale; a tiny amax (1e-40) divides without overflow;
inf or NaN in an operand comes out as NaN, never as a finite wrong number; casts never overflow, because of the clamp.
The bias is added after the GEMM in the output dtype. Tokens are padded with zeros to a multiple of 16 (128 for blocks) in the
weight-gradient GEMM of `scaled_mm`.

Run `python bench.py gpu` on a GPU to check every recipe against float64 there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

GRANULARITIES = ("tensor", "row", "block")
BACKENDS = ("emulate", "scaled_mm")
BLOCK = 128
SMALLEST = 2.0**-149  # smallest positive FP32: a scale never becomes 0, and 0 / SMALLEST is 0
# (mantissa bits, exponent of the smallest normal number)
FORMAT = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}


# -----------------------------------------------------------------------------
# quantisers


def compute_scale(x, granularity, dim, dtype, block=(1, BLOCK), power_of_two=False):
    """Inverse scales, FP32, with as many dimensions as x: size 1 where the amax ran over the whole dimension."""
    if granularity == "tensor":
        amax = (x.abs().amax() if x.numel() else x.new_zeros(())).reshape([1] * x.dim())
    elif granularity == "row":
        amax = x.abs().amax(dim, keepdim=True)
    elif granularity == "block":
        rows, cols = block_size(x, dim, block)
        R, C = x.shape
        padded = F.pad(x.abs(), (0, -C % cols, 0, -R % rows))  # zeros never change an amax
        amax = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).amax((1, 3))
    else:
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    scale = (amax.float() / torch.finfo(dtype).max).clamp(min=SMALLEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        scale = torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()), scale)
    return scale


def block_size(x, dim, block):
    """(rows, columns) of one block of the 2-D x when the contraction runs over `dim`."""
    if x.dim() != 2:
        raise ValueError(f"block granularity takes a 2-D tensor, got shape {tuple(x.shape)}; flatten the leading dimensions")
    return block if dim in (-1, 1) else block[::-1]


def expand_scale(scale, shape, block=None):
    """Repeat block scales so that they broadcast against `shape`; sizes of 1 and full sizes stay as they are."""
    for d, n in enumerate(shape):
        if scale.shape[d] not in (1, n):
            size = block[d] if block else BLOCK
            if scale.shape[d] != -(-n // size):
                raise ValueError(f"scale of shape {tuple(scale.shape)} does not fit {tuple(shape)} in blocks of {size}")
            scale = scale.repeat_interleave(size, d).narrow(d, 0, n)
    return scale


def scale_and_clamp(x, granularity, dim, dtype, block, power_of_two, scale=None):
    """(x / scale clamped to the format's range, FP32; scale: the given one, or that of `compute_scale`)."""
    scale = compute_scale(x, granularity, dim, dtype, block, power_of_two) if scale is None else scale
    limit = torch.finfo(dtype).max
    sizes = block_size(x, dim, block) if granularity == "block" else None
    return torch.div(x, expand_scale(scale, x.shape, sizes)).float().clamp_(-limit, limit), scale


@torch.no_grad()
def quantize(x, granularity="tensor", dim=-1, dtype=torch.float8_e4m3fn, block=(1, BLOCK), power_of_two=False):
    """Quantise x to FP8 codes and inverse scales, x ~ q * scale.

    x            any floating dtype and shape (2-D for blocks); dim is the contraction dimension: amax runs along it
    block        block size (across, along the contraction); weights pass (128, 128); ragged edges allowed
    returns      q: x's shape, `dtype`; scale FP32: 0-D (tensor), x's shape with `dim` of size 1 (row), one per block (block)
    NaN and inf in x come out as NaN after dequantising everything that shares their scale. Raises ValueError on an unknown
    granularity and on blocks of a tensor that is not 2-D. Source: S = amax / F_max, arXiv:2609.22870 section 1.
    """
    scaled, scale = scale_and_clamp(x, granularity, dim, dtype, block, power_of_two)
    return scaled.to(dtype), scale.reshape(()) if granularity == "tensor" else scale


def dequantize(q, scale, block=None):
    """q * scale in FP32. The granularity follows from the shapes: 0-D scale: tensor; broadcastable: row; else blocks of 128
    along each dimension where the sizes differ, or of `block` (rows, columns). Raises ValueError if the shapes do not fit."""
    if scale.numel() == 1:
        return q.float() * scale.reshape(())
    if scale.dim() != q.dim():
        raise ValueError(f"scale of shape {tuple(scale.shape)} needs as many dimensions as the codes, {tuple(q.shape)}")
    return q.float() * expand_scale(scale, q.shape, block)


def round_to_grid(t, dtype):
    """Round the FP32 tensor t, |t| <= F_max, to the nearest value of an FP8 format, in place, ties to even: what a cast there
    and back gives, which is several times slower on a CPU. The grid's spacing is 2^(max(exponent, e_min) - mantissa bits)."""
    mantissa_bits, e_min = FORMAT[dtype]
    spacing = t.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)  # 2^exponent: the float with its mantissa cleared
    spacing.clamp_min_(2.0**e_min).mul_(2.0**-mantissa_bits)
    return t.div_(spacing).round_().mul_(spacing)


# -----------------------------------------------------------------------------
# the GEMM a @ b^T of two operands (rows, contraction)


class Operand(NamedTuple):
    """A quantised matrix (rows, contraction). codes: FP8 (scaled_mm), or the codes' values in BF16 or FP32 (emulate); scale:
    (1, 1), (rows, 1), (rows, blocks) or (row blocks, blocks) FP32 inverse scales."""

    codes: torch.Tensor
    scale: torch.Tensor

    def t_copy(self):
        """The transposed operand; valid where the scales do not depend on the contraction dimension (tensor, 128 x 128)."""
        codes = self.codes.t()
        return Operand(codes.contiguous() if codes.element_size() == 1 else codes, self.scale.t())


def make_operand(x, granularity, dtype, backend, block=(1, BLOCK), power_of_two=False, products=torch.bfloat16, scale=None):
    """Quantise the matrix x (rows, contraction) along its last dimension for `gemm`; scale: one taken over more than x."""
    scaled, scale = scale_and_clamp(x, granularity, -1, dtype, block, power_of_two, scale)
    codes = scaled.to(dtype).contiguous() if backend == "scaled_mm" else round_to_grid(scaled, dtype).to(products)
    return Operand(codes, scale)


def gemm(a, b, granularity, backend, out_dtype):
    """a @ b^T: a (M, K), b (N, K) -> (M, N) in out_dtype."""
    if backend == "scaled_mm":
        return gemm_scaled_mm(a, b, granularity, out_dtype)
    if granularity != "block":
        return (a.codes @ b.codes.t()).mul(a.scale).mul_(b.scale.t()).to(out_dtype)  # FP32 from the first scale on
    M, K, N = *a.codes.shape, b.codes.shape[0]
    scale_a = expand_scale(a.scale, (M, a.scale.shape[1]))  # (M, blocks)
    scale_b = expand_scale(b.scale, (N, b.scale.shape[1]))  # (N, blocks)
    out = torch.zeros(M, N, dtype=torch.float32, device=a.codes.device)
    for i, k in enumerate(range(0, K, BLOCK)):  # fixed order: the sum is the same whatever the batch
        partial = (a.codes[:, k : k + BLOCK] @ b.codes[:, k : k + BLOCK].t()).float()
        out += partial.mul_(scale_a[:, i, None]).mul_(scale_b[None, :, i])
    return out.to(out_dtype)


def gemm_scaled_mm(a, b, granularity, out_dtype):
    """The same on FP8 tensors by torch.nn.functional.scaled_mm, zero-padding the contraction dimension to its alignment."""
    step = BLOCK if granularity == "block" else 16
    short = -a.codes.shape[1] % step
    if short:  # only the weight gradient: its contraction runs over the tokens; zero codes add exactly nothing
        a, b = (Operand(F.pad(o.codes.view(torch.uint8), (0, short)).view(o.codes.dtype), o.scale) for o in (a, b))
    check_scaled_mm(a.codes, b.codes.t(), granularity)
    kind = F.ScalingType
    if granularity == "tensor":
        recipes, scales = (kind.TensorWise, kind.TensorWise), (a.scale.reshape(()), b.scale.reshape(()))
    elif granularity == "row":
        recipes, scales = (kind.RowWise, kind.RowWise), (a.scale.contiguous(), b.scale.t().contiguous())
    else:
        recipes, scales = zip(block_layout(a), block_layout(b), strict=True)
    # CUDA's row-wise kernels are safest with BF16 output; FP32 is asked for only where it is known to work
    kernel_dtype = out_dtype if granularity == "tensor" or not a.codes.is_cuda else torch.bfloat16
    out = F.scaled_mm(a.codes, b.codes.t(), scales[0], recipes[0], scales[1], recipes[1], output_dtype=kernel_dtype)
    return out.to(out_dtype)


def block_layout(operand):
    """(ScalingType, scales) in the strides cuBLASLt wants: 1 x 128: (rows, blocks) with strides (1, rows);
    128 x 128: (blocks along the contraction padded to a multiple of 4, row blocks) with strides (1, that)."""
    if operand.scale.shape[0] == operand.codes.shape[0]:
        scale = torch.empty_strided(operand.scale.shape, (1, operand.scale.shape[0]), device=operand.scale.device)
        return F.ScalingType.BlockWise1x128, scale.copy_(operand.scale)  # .t().contiguous() leaves odd strides when rows == 1
    padded = F.pad(operand.scale, (0, -operand.scale.shape[1] % 4)).contiguous()  # (row blocks, P)
    return F.ScalingType.BlockWise128x128, padded.t()


def check_scaled_mm(a, b, granularity):
    """CUDA's rules for scaled_mm(a (M, K), b (K, N)), checked on every device. Raises ValueError naming the wrong operand."""
    for name, x in (("first", a), ("second", b)):
        if x.dim() != 2 or x.dtype not in FORMAT:
            raise ValueError(f"scaled_mm: the {name} operand must be an FP8 matrix, got {x.dtype} of shape {tuple(x.shape)}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("scaled_mm: both operands are E5M2, which CUDA refuses; keep one of them E4M3")
    if a.stride(1) != 1 or a.stride(0) != a.shape[1]:
        raise ValueError(f"scaled_mm: the first operand must be row-major, got strides {a.stride()} for shape {tuple(a.shape)}")
    if b.stride(0) != 1 or b.stride(1) != b.shape[0]:
        raise ValueError(f"scaled_mm: the second operand must be column-major, got strides {b.stride()} for {tuple(b.shape)}")
    step = BLOCK if granularity == "block" else 16
    if a.shape[1] != b.shape[0] or a.shape[1] % step or b.shape[1] % 16:
        shapes = f"{tuple(a.shape)} @ {tuple(b.shape)}"
        raise ValueError(f"scaled_mm: K must agree and be a multiple of {step} and N of 16, got {shapes}")


def check_backend(backend, granularity, device):
    """Refuse a backend that cannot run here. Raises ValueError that names the flag; nothing falls back silently."""
    if backend not in BACKENDS:
        raise ValueError(f"--fp8-backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "emulate":
        return
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ValueError(f"FP8 GEMM needs compute capability >= 8.9, found {major}.{minor}; use --fp8-backend emulate")
        if granularity == "block" and major != 9:
            found = f"found {major}.{minor}; use --fp8-backend emulate"
            raise ValueError(f"block-scaled scaled_mm needs compute capability 9.x, {found}")
    elif granularity == "block":
        raise ValueError(f"scaled_mm has no block-scaled kernel on {device.type}; use --fp8-backend emulate")


# -----------------------------------------------------------------------------
# the layer


class FP8Matmul(torch.autograd.Function):
    """Y = X W^T with FP8 operands in all three GEMMs; `layer` carries the settings and the cached weight operands."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.output(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        layer, dx, dw = ctx.layer, None, None
        if ctx.needs_input_grad[0]:
            # dX (T, K) = dY (T, N) @ W (N, K): the second operand is W^T (K, N), quantised along N
            a, b = layer.activation(dy, layer.grad_dtype), layer.weight_operand(weight, layer.products(x), transposed=True)
            dx = gemm(a, b, layer.granularity, layer.backend, x.dtype)
        if ctx.needs_input_grad[1]:
            # dW (N, K) = dY^T (N, T) @ X (T, K): both operands quantised along T
            a, b = layer.activation(dy.t(), layer.grad_dtype), layer.activation(x.t())
            dw = gemm(a, b, layer.granularity, layer.backend, weight.dtype)
        return dx, dw, None


class FP8Linear(nn.Linear):
    """nn.Linear whose GEMMs take FP8 operands: same parameters, same state_dict. Made in place by `FP8Linear.of(linear)`."""

    @classmethod
    def of(cls, linear, granularity, backend, grad_dtype=torch.float8_e4m3fn, power_of_two=False, fp32_products=False,
           device=None):
        """Turn an nn.Linear into an FP8Linear in place (its parameters and hooks stay the same objects) and return it.
        device: where it will run, if not where it is. Raises ValueError as `check` does."""
        cls.check(linear, granularity, backend, device)
        linear.__class__ = cls
        linear.granularity, linear.backend, linear.grad_dtype = granularity, backend, grad_dtype
        linear.power_of_two, linear.fp32_products = power_of_two, fp32_products
        linear.quantized = True  # precision.high_precision sets it to False for a while
        linear.cache = {}  # (transposed, products dtype) -> Operand, and "of" -> the weight they were made from
        linear.cache_allowed = not hasattr(linear.weight, "device_mesh")
        return linear

    @staticmethod
    def check(linear, granularity, backend, device=None):
        """Raises ValueError if K or N is not a multiple of 16 (128 for blocks through scaled_mm) or the backend cannot run."""
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
        step = BLOCK if (granularity, backend) == ("block", "scaled_mm") else 16
        if linear.in_features % step or linear.out_features % step:
            sizes = f"in_features {linear.in_features} and out_features {linear.out_features}"
            raise ValueError(f"{sizes} must be multiples of {step} for an FP8 GEMM; pad them or use --precision bf16")
        if linear.weight.device.type != "meta":
            check_backend(backend, granularity, device or linear.weight.device)

    def forward(self, x):
        if not self.quantized or x.numel() == 0:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        flat = x.reshape(-1, x.shape[-1])
        # Sampling skips the autograd function, whose call alone costs as much as a small GEMM
        y = FP8Matmul.apply(flat, self.weight, self) if torch.is_grad_enabled() else self.output(flat, self.weight)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def output(self, x, weight):
        """Y (T, N) = X (T, K) @ W^T (K, N)."""
        b = self.weight_operand(weight, self.products(x))
        return gemm(self.activation(x), b, self.granularity, self.backend, x.dtype)

    def activation(self, x, dtype=torch.float8_e4m3fn):
        """X, dY or their transposes as an operand (rows, contraction), quantised along the last dimension."""
        return make_operand(x, self.granularity, dtype, self.backend, (1, BLOCK), self.power_of_two, self.products(x))

    def products(self, x):
        """The dtype in which `emulate` multiplies codes."""
        return torch.float32 if self.fp32_products or x.dtype in (torch.float32, torch.float64) else torch.bfloat16

    def weight_operand(self, weight, products, transposed=False):
        """The cached operand of W (N, K), or of W^T (K, N), made from the weight rounded to BF16."""
        of = self.cache.get("of")  # held, so that no other tensor can come to lie at its address
        if of is not weight and (of is None or of.data_ptr() != weight.data_ptr() or of.shape != weight.shape):
            # another tensor in the weight's place (torch.func.functional_call); activation checkpointing passes an alias
            self.cache = {"of": weight} if self.cache_allowed else {}
        key = (transposed, products)
        if key in self.cache:
            return self.cache[key]
        if transposed and self.granularity != "row":
            operand = self.weight_operand(weight, products).t_copy()
        else:
            w = weight.detach().to(torch.bfloat16)
            w = w.t() if transposed else w
            dtype, block = torch.float8_e4m3fn, (BLOCK, BLOCK)
            operand = make_operand(w, self.granularity, dtype, self.backend, block, self.power_of_two, products)
        if self.cache_allowed:
            self.cache[key] = operand
        return operand

    def drop_cache(self):
        """Forget quantised weights. Sharded parameters (FSDP2) are never cached: their full size must not outlive a reshard."""
        self.cache = {}
        self.cache_allowed = self.cache_allowed and not hasattr(self.weight, "device_mesh")

    def _apply(self, fn, recurse=True):
        self.cache = {}  # .to(), .cuda(), .float() change the weight
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):
        self.cache = {}
        return super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self):
        return f"{super().extra_repr()}, fp8-{self.granularity}, backend={self.backend}"
