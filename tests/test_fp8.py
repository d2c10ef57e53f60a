"""FP8 quantisers and FP8Linear: hand-worked numbers, float64 references, both backends, caches, CUDA's rules on the CPU.

    python -m pytest tests/test_fp8.py
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fp8
from fp8 import BLOCK, FORMAT, FP8Linear, dequantize, quantize
from precision import weights_changed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
GRANULARITIES = ("tensor", "row", "block")
CPU_RECIPES = [("tensor", "emulate"), ("row", "emulate"), ("block", "emulate"), ("tensor", "scaled_mm"), ("row", "scaled_mm")]
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine: threads that wait for each other cost six times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gauss(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def error(got, want):
    """Relative error in the Frobenius norm."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def make_layer(weight, granularity, backend, bias=None, **options):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return FP8Linear.of(layer, granularity, backend, **options)


def passes(layer, x, dy):
    """Output, input gradient, weight gradient."""
    x = x.clone().requires_grad_()
    y = layer(x)
    layer.weight.grad = None
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


# -----------------------------------------------------------------------------
# the formats


def codes_of(dtype):
    """All finite non-negative values of a format, ascending, in float64, and whether each code is even."""
    bits = torch.arange(128, dtype=torch.uint8)
    values = bits.view(dtype).double()
    finite = values.isfinite()
    return values[finite], (bits[finite] % 2 == 0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_limits_and_tiny_values_of_the_formats(dtype):
    values, _ = codes_of(dtype)
    mantissa, e_min = FORMAT[dtype]
    assert values[-1] == LARGEST[dtype] == torch.finfo(dtype).max
    assert values[1] == 2.0 ** (e_min - mantissa)  # the smallest subnormal: 2^-9, 2^-16
    assert values[2**mantissa] == 2.0**e_min  # the smallest normal: 2^-6, 2^-14


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_midpoints_round_to_even_codes(dtype):
    values, even = codes_of(dtype)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact in FP32
    want = torch.where(even[:-1], low, high)
    above = torch.nextafter(middle.float(), torch.tensor(INF))
    below = torch.nextafter(middle.float(), torch.tensor(0.0))
    for sign in (1.0, -1.0):
        for x, expected in ((middle.float(), want), (above, high), (below, low)):
            assert torch.equal(fp8.round_to_grid(sign * x, dtype).double(), sign * expected)
            assert torch.equal((sign * x).to(dtype).double(), sign * expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_round_to_grid_equals_the_cast_for_every_bf16_pattern(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = every.clamp(-LARGEST[dtype], LARGEST[dtype])
    got, want = fp8.round_to_grid(x.clone(), dtype), x.to(dtype).float()
    assert len(every.unique()) > 65000 and torch.equal(got.isnan(), every.isnan())
    finite = ~every.isnan()
    assert torch.equal(got[finite].view(torch.int32), want[finite].view(torch.int32))  # signs of zeros too
    fine = gauss(100_000, seed=1) * torch.exp2(torch.linspace(-25, 8, 100_000))  # FP32 values between BF16 ones
    fine = fine.clamp(-LARGEST[dtype], LARGEST[dtype])
    assert torch.equal(fp8.round_to_grid(fine.clone(), dtype), fine.to(dtype).float())


# -----------------------------------------------------------------------------
# quantize and dequantize


def test_tensor_scale_by_hand():
    x = torch.tensor([[448.0, -224.0, 1.0], [100.0, 0.3, 0.0]])
    q, scale = quantize(x)
    assert scale.shape == () and scale.dtype == torch.float32 and scale == 1.0
    assert q.dtype == E4M3 and q.shape == x.shape
    # 100 = 1.5625 * 64, step 8: 96 and 104 are equally far, 96 = 12 * 8 is even; 0.3 = 1.2 * 0.25, step 1/32: 10/32 = 0.3125
    assert dequantize(q, scale).tolist() == [[448.0, -224.0, 1.0], [96.0, 0.3125, 0.0]]
    q, scale = quantize(x * 2)
    assert scale == 2.0 and dequantize(q, scale)[1].tolist() == [192.0, 0.625, 0.0]


def test_row_scale_by_hand_along_both_dimensions():
    x = torch.tensor([[448.0, 1.0], [0.5, -896.0]])
    q, scale = quantize(x, "row")
    assert scale.tolist() == [[1.0], [2.0]]
    assert q.float().tolist() == [[448.0, 1.0], [0.25, -448.0]]
    q, scale = quantize(x, "row", dim=0)  # contraction over rows: one scale per column
    assert scale.tolist() == [[1.0, 2.0]]
    assert q.float().tolist() == [[448.0, 0.5], [0.5, -448.0]]
    assert torch.equal(dequantize(q, scale), x)


def test_block_scales_by_hand():
    x = torch.ones(3, 300)
    x[0, 0], x[1, 128], x[2, 299] = 448.0, 896.0, 1792.0
    q, scale = quantize(x, "block")  # 1 x 128
    one = 1 / torch.tensor(448.0)
    assert torch.equal(scale, torch.stack([torch.stack(r) for r in (
        (torch.tensor(1.0), one, one), (one, torch.tensor(2.0), one), (one, one, torch.tensor(4.0)))]))
    _, scale = quantize(x, "block", block=(128, 128))
    assert scale.tolist() == [[1.0, 2.0, 4.0]]
    _, scale = quantize(x.t(), "block", dim=0)  # blocks run down the columns
    assert scale.shape == (3, 3) and scale.diagonal().tolist() == [1.0, 2.0, 4.0]
    _, scale = quantize(x, "block", block=(2, 256))
    assert scale.shape == (2, 2) and scale[0, 0] == 2.0 and scale[1, 1] == 4.0


@pytest.mark.parametrize("dtype, largest", [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("amax", [448.0, 464.0, 465.0, 1e6, 57344.0, 61440.0])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_element_becomes_the_largest_code(granularity, amax, dtype, largest):
    x = gauss(16, 256, scale=0.1)
    x[:, ::128] = torch.tensor(amax) * torch.tensor([1.0, -1.0])
    q, scale = quantize(x, granularity, dtype=dtype)
    assert (q.float()[:, 0] == largest).all() and (q.float()[:, 128] == -largest).all()
    assert torch.allclose(dequantize(q, scale)[:, ::128], x[:, ::128], rtol=1e-6)
    assert q.float().abs().max() == largest


@pytest.mark.parametrize("dtype, largest", [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1e6, 57344.0, 61440.0, 3e38])
def test_a_scale_too_small_for_a_value_saturates(monkeypatch, value, dtype, largest):
    # a scale is amax / F_max, so only rounding can push x / scale over the limit; with a scale of 1 forced, the clamp must hold
    monkeypatch.setattr(fp8, "compute_scale", lambda x, *rest: torch.ones(1, 1))
    x = torch.tensor([[value, -value]])
    nearest = codes_of(dtype)[0][(codes_of(dtype)[0] - min(value, largest)).abs().argmin()].item()
    for backend in fp8.BACKENDS:
        operand = fp8.make_operand(x, "tensor", dtype, backend)
        assert operand.codes.float().tolist() == [[nearest, -nearest]]
    assert quantize(x, dtype=dtype)[0].float().tolist() == [[nearest, -nearest]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_have_a_positive_scale(granularity, dtype, power_of_two):
    x = torch.zeros(16, 256)
    x[3] = 1.0  # a neighbour
    for y in (x, torch.zeros(16, 16), torch.zeros(16, 16, dtype=torch.bfloat16)):
        q, scale = quantize(y, granularity, dtype=dtype, power_of_two=power_of_two)
        assert scale.isfinite().all() and (scale > 0).all()
        assert torch.equal(dequantize(q, scale) == 0, y == 0)


@pytest.mark.parametrize("dtype, bound", [(E4M3, 2.0**-4), (E5M2, 2.0**-3)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiny_values_divide_without_overflow(granularity, dtype, bound, power_of_two):
    for amax in (1e-20, 1e-30, 1e-36):
        x = gauss(8, 256, seed=2).clamp(-1, 1) * amax
        q, scale = quantize(x, granularity, dtype=dtype, power_of_two=power_of_two)
        assert scale.isfinite().all() and (scale > 0).all()
        assert error(dequantize(q, scale), x) < bound
    x = torch.full((8, 256), 1e-40)  # the scale itself is subnormal: few bits, but finite and of the right size
    q, scale = quantize(x, granularity, dtype=dtype, power_of_two=power_of_two)
    got = dequantize(q, scale)
    assert scale.isfinite().all() and (scale > 0).all() and got.isfinite().all() and error(got, x) < 0.3


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_inf_and_nan_come_out_as_nan_where_the_scale_is_shared(bad, dtype, power_of_two):
    x = torch.ones(4, 256)
    x[1, 130] = bad
    spoiled = {"tensor": torch.ones(4, 256), "row": torch.zeros(4, 256), "block": torch.zeros(4, 256)}
    spoiled["row"][1] = 1
    spoiled["block"][1, 128:] = 1
    for granularity, where in spoiled.items():
        got = dequantize(*quantize(x, granularity, dtype=dtype, power_of_two=power_of_two))
        assert torch.equal(got.isnan(), where.bool())
        assert (got[~where.bool()] - 1).abs().max() < 1e-6 if not where.all() else True
        assert not got.isinf().any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (128, 1), (5, 127), (129, 130), (3, 257), (300, 300)])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_ragged_blocks_share_their_own_amax(shape, block, dim):
    x = gauss(*shape, seed=3) * torch.exp2(torch.arange(shape[1]) % 7.0)
    q, scale = quantize(x, "block", dim=dim, block=block)
    rows, cols = block if dim else block[::-1]
    assert scale.shape == (-(-shape[0] // rows), -(-shape[1] // cols))
    for i in range(scale.shape[0]):
        for j in range(0, scale.shape[1], max(1, scale.shape[1] - 1)):
            part = x[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            assert scale[i, j] == part.abs().max() / 448
    for sizes in (None, (rows, cols)):
        assert error(dequantize(q, scale, sizes), x) < 0.04


def test_other_block_sizes_need_the_block_argument():
    x = gauss(64, 192)
    q, scale = quantize(x, "block", block=(1, 32))
    assert scale.shape == (64, 6) and error(dequantize(q, scale, (1, 32)), x) < 0.04
    with pytest.raises(ValueError, match="does not fit"):
        dequantize(q, scale)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_three_dimensions(dim):
    x = gauss(3, 5, 7)
    q, scale = quantize(x, "row", dim=dim)
    shape = [3, 5, 7]
    shape[dim] = 1
    assert list(scale.shape) == shape and torch.equal(scale, x.abs().amax(dim, keepdim=True) / 448)
    assert error(dequantize(q, scale), x) < 0.04
    q, scale = quantize(x, "tensor", dim=dim)
    assert scale.shape == () and error(dequantize(q, scale), x) < 0.04


def test_a_vector_and_a_scalar():
    q, scale = quantize(torch.tensor([1.0, 448.0]), "row")
    assert scale.tolist() == [1.0] and dequantize(q, scale).tolist() == [1.0, 448.0]
    assert quantize(torch.tensor([1.0, 448.0]))[1].shape == ()
    assert dequantize(*quantize(torch.tensor(448.0))).tolist() == 448.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_floating_dtype_divides_in_at_least_fp32(dtype):
    x = gauss(16, 256, dtype=dtype)
    for granularity in GRANULARITIES:
        q, scale = quantize(x, granularity)
        want, want_scale = quantize(x.float(), granularity)
        assert scale.dtype == torch.float32 and torch.equal(scale, want_scale)
        assert torch.equal(q.float(), want.float())
        assert dequantize(q, scale).dtype == torch.float32


def test_power_of_two_scales_round_up():
    x = torch.tensor([[448.0], [449.0], [896.0], [1000.0], [3.5], [3.0]])
    _, scale = quantize(x, "row", power_of_two=True)
    assert scale.flatten().tolist() == [1.0, 2.0, 2.0, 4.0, 2.0**-7, 2.0**-7]
    x = gauss(64, 256, seed=4)
    for granularity in GRANULARITIES:
        _, exact = quantize(x, granularity)
        q, scale = quantize(x, granularity, power_of_two=True)
        assert (scale >= exact).all() and (scale < 2 * exact).all() and (torch.frexp(scale)[0] == 0.5).all()
        assert error(dequantize(q, scale), x) < 0.04


def test_bad_arguments():
    x = gauss(4, 32)
    with pytest.raises(ValueError, match="'channel' is not one of tensor, row, block"):
        quantize(x, "channel")
    with pytest.raises(ValueError, match="2-D.*flatten"):
        quantize(gauss(2, 4, 32), "block")
    q, scale = quantize(x, "row")
    with pytest.raises(ValueError, match="as many dimensions"):
        dequantize(q, scale.flatten())  # (N,) would broadcast along the wrong dimension
    with pytest.raises(ValueError, match="does not fit"):
        dequantize(q, torch.ones(3, 1))
    # the shapes an engine's `weight_scale` may have
    for one in (torch.tensor(2.0), torch.full((1,), 2.0), torch.full((1, 1), 2.0)):
        assert torch.equal(dequantize(q, one), q.float() * 2)


def test_quantize_leaves_its_input_alone():
    for x in (gauss(4, 256), gauss(4, 256).t(), torch.full((4, 256), NAN)):
        before = x.clone()
        for granularity in GRANULARITIES:
            quantize(x, granularity)
            fp8.make_operand(x, granularity, E4M3, "emulate")
        assert torch.equal(x.nan_to_num(9), before.nan_to_num(9))


@settings(max_examples=40, deadline=None)
@given(
    granularity=st.sampled_from(GRANULARITIES), dtype=st.sampled_from([E4M3, E5M2]), dim=st.sampled_from([0, 1]),
    rows=st.integers(1, 200), cols=st.integers(1, 300), spread=st.integers(0, 12), exponent=st.integers(-60, 60),
    seed=st.integers(0, 999), power_of_two=st.booleans(),
)
def test_error_is_at_most_half_a_step(granularity, dtype, dim, rows, cols, spread, exponent, seed, power_of_two):
    x = gauss(rows, cols, seed=seed) * torch.exp2(gauss(rows, cols, seed=seed + 1) * spread) * 2.0**exponent
    q, scale = quantize(x, granularity, dim=dim, dtype=dtype, power_of_two=power_of_two)
    got = dequantize(q, scale).double()
    sizes = (1, BLOCK) if dim == 1 else (BLOCK, 1)
    wide = scale if scale.dim() == 0 else fp8.expand_scale(scale, x.shape, sizes if granularity == "block" else None)
    wide = wide.double().expand(x.shape)
    mantissa, e_min = FORMAT[dtype]
    ratio = x.double().abs() / wide
    step = torch.exp2(torch.frexp(ratio)[1].sub(1).clamp(min=e_min).double() - mantissa)
    off = (got - x.double()).abs()
    assert (off <= step * wide * (0.5 + 1e-5)).all()  # 1e-5: the division is rounded to FP32
    normal = ratio >= 2.0**e_min
    assert (off[normal] <= x.double().abs()[normal] * 2.0 ** -(mantissa + 1) * (1 + 1e-5)).all()
    assert q.float().abs().max() <= LARGEST[dtype] and torch.equal(torch.signbit(q.float()), torch.signbit(x))


@settings(max_examples=30, deadline=None)
@given(granularity=st.sampled_from(GRANULARITIES), seed=st.integers(0, 999), shift=st.integers(-40, 40))
def test_quantising_commutes_with_powers_of_two_and_negation(granularity, seed, shift):
    x = gauss(7, 200, seed=seed)
    q, scale = quantize(x, granularity)
    shifted, scale2 = quantize(x * -(2.0**shift), granularity)
    assert torch.equal(shifted.float(), -q.float()) and torch.equal(scale2, scale * 2.0**shift)


# -----------------------------------------------------------------------------
# the three GEMMs against float64

T, K, N = 512, 768, 1024


@pytest.fixture(scope="module")
def case():
    """x, weight, dy in BF16, and the float64 results."""
    x, w, dy = (gauss(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate([(T, K), (N, K), (T, N)]))
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    return x, w, dy, (x64 @ w64.t(), dy64 @ w64, dy64.t() @ x64)


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_output_and_gradients_close_to_float64(case, granularity, backend):
    x, w, dy, want = case
    for power_of_two in (False, True):
        got = passes(make_layer(w, granularity, backend, power_of_two=power_of_two), x, dy)
        assert [t.dtype for t in got] == [torch.bfloat16] * 3
        for g, r in zip(got, want, strict=True):
            assert 0.01 < error(g, r) < (0.05 if granularity == "tensor" else 0.04)  # not 0: something was quantised


def test_e5m2_gradients_err_more_but_not_much_more(case):
    x, w, dy = case[0][:256, :256], case[1][:384, :256], case[2][:256, :384]
    want = None, dy.double() @ w.double(), dy.double().t() @ x.double()
    for granularity, backend in CPU_RECIPES:
        y, *grads = passes(make_layer(w, granularity, backend, grad_dtype=E5M2), x, dy)
        y3, *grads3 = passes(make_layer(w, granularity, backend), x, dy)
        assert torch.equal(y, y3)  # only dY changes its format
        for g, g3, r in zip(grads, grads3, want[1:], strict=True):
            assert 1.3 * error(g3, r) < error(g, r) < 0.08


@pytest.mark.parametrize("granularity, bound", [("tensor", 1e-2), ("row", 4e-3)])
def test_the_backends_agree(case, granularity, bound):
    x, w, dy, _ = case
    real = passes(make_layer(w, granularity, "scaled_mm"), x, dy)
    for a, b in zip(real, passes(make_layer(w, granularity, "emulate"), x, dy), strict=True):
        assert error(a, b) < bound
    x, w, dy = x.float(), w.float(), dy.float()
    real = passes(make_layer(w, granularity, "scaled_mm"), x, dy)
    for a, b in zip(real, passes(make_layer(w, granularity, "emulate"), x, dy), strict=True):
        assert a.dtype == torch.float32 and error(a, b) < 1e-4


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fp32_products_differ_only_by_the_rounding_of_the_output(case, granularity):
    x, w, dy, _ = case
    low = passes(make_layer(w, granularity, "emulate", fp32_products=True), x, dy)
    full = passes(make_layer(w, granularity, "emulate"), x.float(), dy.float())
    assert full[0].dtype == torch.float32
    for a, b in zip(low, full, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())  # the same sums, rounded once


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("tokens", [256, 200])  # 200 and 272: ragged blocks
def test_each_operand_is_quantised_along_the_contraction_of_its_own_gemm(case, granularity, grad_dtype, tokens):
    # outliers in single rows and columns make every choice of dimension show
    x, w, dy = case[0][:tokens, :384].float(), case[1][:272, :384].float(), case[2][:tokens, :272].float()
    for t, row, column in ((x, 3, 5), (w, 7, 11), (dy, 13, 17)):
        t[row] *= 50
        t[:, column] *= 70

    def deq(t, dim, dtype=E4M3, block=(1, 128)):
        q, scale = quantize(t, granularity, dim=dim, dtype=dtype, block=block)
        sizes = (block if dim else block[::-1]) if granularity == "block" else None
        return dequantize(q, scale, sizes).double()

    square = (128, 128)
    w16 = w.bfloat16()
    want = (
        deq(x, 1) @ deq(w16, 1, block=square).t(),  # over K
        deq(dy, 1, grad_dtype) @ deq(w16, 0, block=square),  # over N
        deq(dy, 0, grad_dtype).t() @ deq(x, 0),  # over the tokens
    )
    got = passes(make_layer(w, granularity, "emulate", grad_dtype=grad_dtype), x, dy)
    assert [error(g, r) < 1e-5 for g, r in zip(got, want, strict=True)] == [True] * 3
    if granularity == "row":  # the other dimension gives something else: the comparison can fail
        assert error(deq(x, 0) @ deq(w16, 1).t(), want[0]) > 1e-3
        assert error(deq(dy, 1, grad_dtype) @ deq(w16, 1), want[1]) > 1e-3


def test_weights_are_rounded_to_bf16_before_they_are_quantised():
    w, x, dy = gauss(48, 32, seed=5), gauss(9, 32), gauss(9, 48)
    for granularity, backend in CPU_RECIPES:
        masters = passes(make_layer(w, granularity, backend), x, dy)
        copies = passes(make_layer(w.bfloat16().float(), granularity, backend), x, dy)
        for a, b in zip(masters, copies, strict=True):
            assert torch.equal(a, b)
        assert masters[2].dtype == torch.float32
    assert not torch.equal(quantize(w, "row")[1], quantize(w.bfloat16(), "row")[1])  # rounding matters here


def test_zero_padding_does_not_change_a_product():
    a, b = gauss(13, 48, dtype=torch.bfloat16), gauss(32, 48, seed=1, dtype=torch.bfloat16)
    for granularity in ("tensor", "row"):
        def product(a, b, granularity=granularity):
            a, b = (fp8.make_operand(t, granularity, E4M3, "scaled_mm") for t in (a, b))
            return fp8.gemm(a, b, granularity, "scaled_mm", torch.float32)

        assert torch.equal(product(F.pad(a, (0, 16)), F.pad(b, (0, 16))), product(a, b))
        odd = a[:, :37], b[:, :37]  # padded inside gemm
        assert torch.equal(product(*odd), product(*(F.pad(t, (0, 11)) for t in odd)))


# -----------------------------------------------------------------------------
# shapes, tokens, biases, zeros


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
@pytest.mark.parametrize("tokens", [1, 13, 17, 130])
def test_zero_tokens_change_no_gradient(granularity, backend, tokens):
    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend)
    x, dy = gauss(tokens, 48, seed=1, dtype=torch.bfloat16), gauss(tokens, 32, seed=2, dtype=torch.bfloat16)
    more = -tokens % 16
    y, dx, dw = passes(layer, x, dy)
    y16, dx16, dw16 = passes(layer, F.pad(x, (0, 0, 0, more)), F.pad(dy, (0, 0, 0, more)))
    # BF16 sums may be taken in another order for another number of rows
    assert error(y16[:tokens], y) < 2e-3 and error(dx16[:tokens], dx) < 2e-3 and error(dw16, dw) < 2e-3
    assert not y16[tokens:].any() and not dx16[tokens:].any()


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_shapes_of_any_rank(granularity, backend):
    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend, bias=gauss(32, seed=3, dtype=torch.bfloat16))
    x = gauss(2, 5, 48, seed=1, dtype=torch.bfloat16)
    dy = gauss(2, 5, 32, seed=2, dtype=torch.bfloat16)
    y, dx, dw = passes(layer, x, dy)
    flat = passes(layer, x.reshape(10, 48), dy.reshape(10, 32))
    assert y.shape == (2, 5, 32) and dx.shape == x.shape
    for a, b in zip((y, dx, dw), flat, strict=True):
        assert torch.equal(a.reshape(b.shape), b)
    y, dx, _ = passes(layer, x[0, 0], dy[0, 0])
    assert y.shape == (32,) and dx.shape == (48,)
    assert torch.equal(y, layer(x[0, :1])[0])
    for shape in ((0, 48), (2, 0, 48)):
        empty = torch.zeros(shape, dtype=torch.bfloat16)
        y, dx, dw = passes(layer, empty, torch.zeros(*shape[:-1], 32, dtype=torch.bfloat16))
        assert y.shape == (*shape[:-1], 32) and dx.shape == shape and not dw.any() and dw.shape == (32, 48)


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_strided_inputs(granularity, backend):
    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend)
    wide = gauss(5, 96, seed=1, dtype=torch.bfloat16)
    last = gauss(1, 7, 48, seed=2, dtype=torch.bfloat16)[:, -1]  # the last token of one sequence
    turned = gauss(48, 5, dtype=torch.bfloat16).t()
    for x in (wide[:, :48], wide[:, ::2], turned, wide[:1, :48].expand(5, 48), last, last[:, None]):
        dy = torch.ones((), dtype=torch.bfloat16).expand(*x.shape[:-1], 32)  # what .sum() sends back: strides of 0
        want = passes(layer, x.contiguous(), dy.contiguous())
        for a, b in zip(passes(layer, x, dy), want, strict=True):
            assert error(a, b) < 2e-3


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bias_is_added_after_the_gemm(granularity, backend, dtype):
    bias = gauss(32, seed=3, dtype=dtype)
    x, w = gauss(6, 48, seed=1, dtype=dtype), gauss(32, 48, dtype=dtype)
    layer = make_layer(w, granularity, backend, bias=bias)
    y = layer(x)
    assert y.dtype == dtype and torch.equal(y, make_layer(w, granularity, backend)(x) + bias)
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 6.0, dtype=dtype))
    zero = make_layer(torch.zeros_like(w), granularity, backend, bias=bias)
    assert torch.equal(zero(x), bias.expand(6, 32))
    assert error(y, F.linear(x, w, bias)) < 0.06


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_zero_operands_give_zeros(granularity, backend):
    w, x, dy = (gauss(*s, dtype=torch.bfloat16) for s in ((32, 48), (6, 48), (6, 32)))
    for zero in range(3):
        operands = [torch.zeros_like(t) if i == zero else t for i, t in enumerate((w, x, dy))]
        y, dx, dw = passes(make_layer(operands[0], granularity, backend), *operands[1:])
        for result, involved in ((y, (0, 1)), (dx, (0, 2)), (dw, (1, 2))):
            assert result.isfinite().all() and result.any() == (zero not in involved)


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_number_is_never_hidden(granularity, backend, bad):
    w, x, dy = (gauss(*s, dtype=torch.bfloat16) for s in ((32, 48), (6, 48), (6, 32)))
    x[2, 3] = bad
    y, dx, dw = passes(make_layer(w, granularity, backend), x, dy)
    assert y[2].isnan().all() and dx.isfinite().all() and dw[:, 3].isnan().all()
    if granularity == "row":
        assert torch.equal(y.isnan().any(1), torch.arange(6) == 2) and torch.equal(dw.isnan().any(0), torch.arange(48) == 3)
    x[2, 3], w[7, 5] = 1.0, bad
    y, dx, dw = passes(make_layer(w, granularity, backend), x, dy)
    assert y[:, 7].isnan().all() and dx[:, 5].isnan().all() and dw.isfinite().all()
    w[7, 5], dy[4, 1] = 1.0, bad
    y, dx, dw = passes(make_layer(w, granularity, backend), x, dy)
    assert y.isfinite().all() and dx[4].isnan().all() and dw[1].isnan().all()


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
@pytest.mark.parametrize("size", [1e-30, 1e-40])
def test_tiny_operands_stay_finite(granularity, backend, size):
    w, dy = gauss(32, 48), gauss(6, 32)
    for result in passes(make_layer(w, granularity, backend), gauss(6, 48, seed=1) * size, dy):
        assert result.isfinite().all()
    for result in passes(make_layer(w * size, granularity, backend), gauss(6, 48, seed=1), dy * size):
        assert result.isfinite().all()


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_gradients_arrive_and_frozen_parts_get_none(granularity, backend):
    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend)
    x = gauss(6, 48, dtype=torch.bfloat16).requires_grad_()
    layer(x).square().sum().backward()
    plain = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    z = x.detach().clone().requires_grad_()
    plain(z).square().sum().backward()
    assert error(x.grad, z.grad) < 0.1 and error(layer.weight.grad, plain.weight.grad) < 0.1
    layer.weight.requires_grad_(False)
    layer.weight.grad = x.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


# -----------------------------------------------------------------------------
# CUDA's rules, checked on the CPU


def test_operands_in_the_wrong_layout_are_named():
    a, b = torch.ones(32, 48).to(E4M3), torch.ones(16, 48).to(E4M3)
    fp8.check_scaled_mm(a, b.t(), "tensor")
    with pytest.raises(ValueError, match="first operand must be row-major"):
        fp8.check_scaled_mm(torch.ones(48, 32).to(E4M3).t(), b.t(), "tensor")
    with pytest.raises(ValueError, match="first operand must be row-major"):
        fp8.check_scaled_mm(torch.ones(32, 96).to(E4M3)[:, :48], b.t(), "tensor")
    with pytest.raises(ValueError, match="second operand must be column-major"):
        fp8.check_scaled_mm(a, torch.ones(48, 16).to(E4M3), "tensor")
    with pytest.raises(ValueError, match="second operand must be column-major"):
        fp8.check_scaled_mm(a, torch.ones(16, 96).to(E4M3)[:, :48].t(), "tensor")
    with pytest.raises(ValueError, match="first operand must be an FP8 matrix, got torch.float8_e4m3fn of shape .2, 32, 48"):
        fp8.check_scaled_mm(torch.ones(2, 32, 48).to(E4M3), b.t(), "tensor")
    with pytest.raises(ValueError, match="second operand must be an FP8 matrix, got torch.bfloat16"):
        fp8.check_scaled_mm(a, torch.ones(48, 16, dtype=torch.bfloat16), "tensor")


def test_formats_and_sizes_that_cuda_refuses():
    def check(m, k, n, granularity="tensor", first=E4M3, second=E4M3, k2=None):
        fp8.check_scaled_mm(torch.ones(m, k).to(first), torch.ones(n, k2 or k).to(second).t(), granularity)

    for first, second in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        check(1, 16, 16, first=first, second=second)  # any number of rows
    with pytest.raises(ValueError, match="both operands are E5M2"):
        check(16, 16, 16, first=E5M2, second=E5M2)
    for m, k, n, granularity in ((16, 60, 16, "tensor"), (16, 16, 47, "row"), (16, 64, 16, "block"), (16, 192, 16, "block")):
        with pytest.raises(ValueError, match="multiple of (16|128) and N of 16"):
            check(m, k, n, granularity)
    check(16, 256, 48, "block")
    with pytest.raises(ValueError, match="K must agree"):
        check(16, 16, 16, k2=32)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_capability(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    fp8.check_backend("emulate", "block", "cuda")
    for granularity in ("tensor", "row"):
        if capability in ((7, 5), (8, 0), (8, 6)):
            message = f">= 8.9, found {capability[0]}.{capability[1]}; use --fp8-backend emulate"
            with pytest.raises(ValueError, match=message):
                fp8.check_backend("scaled_mm", granularity, "cuda:0")
        else:
            fp8.check_backend("scaled_mm", granularity, "cuda:0")
    if capability == (9, 0):
        fp8.check_backend("scaled_mm", "block", "cuda")
    else:
        with pytest.raises(ValueError, match="use --fp8-backend emulate"):
            fp8.check_backend("scaled_mm", "block", "cuda")


def test_backends_that_cannot_run_are_refused_at_conversion():
    with pytest.raises(ValueError, match="--fp8-backend 'cutlass' is not one of emulate, scaled_mm"):
        FP8Linear.of(nn.Linear(16, 16), "tensor", "cutlass")
    layer = nn.Linear(128, 128)
    with pytest.raises(ValueError, match="no block-scaled kernel on cpu; use --fp8-backend emulate"):
        FP8Linear.of(layer, "block", "scaled_mm")
    assert type(layer) is nn.Linear
    with pytest.raises(ValueError, match="'channel' is not one of"):
        FP8Linear.of(nn.Linear(16, 16), "channel", "emulate")
    for sizes in ((1368, 16), (16, 1368)):
        with pytest.raises(ValueError, match="in_features .* and out_features .* multiples of 16"):
            FP8Linear.of(nn.Linear(*sizes), "tensor", "emulate")
    with pytest.raises(ValueError, match="multiples of 128"):
        FP8Linear.of(nn.Linear(128, 144), "block", "scaled_mm")
    FP8Linear.of(nn.Linear(128, 144), "block", "emulate")


def test_scales_handed_to_scaled_mm_have_the_shapes_and_strides_it_wants(monkeypatch):
    calls = []

    def record(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
        calls.append((a, b, scale_a, recipe_a, scale_b, recipe_b))
        return torch.zeros(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", record)
    monkeypatch.setattr(fp8, "check_backend", lambda *_: None)  # blocks are not run on the CPU, only their layout is looked at
    t, k, n = 200, 384, 256  # 3 blocks of features, 2 blocks of outputs, 2 ragged blocks of tokens
    for granularity in GRANULARITIES:
        passes(make_layer(gauss(n, k), granularity, "scaled_mm"), gauss(t, k), gauss(t, n))
    assert len(calls) == 9 and all(scale.dtype == torch.float32 for c in calls for scale in (c[2], c[4]))
    for _, _, scale_a, recipe_a, scale_b, recipe_b in calls[:3]:
        assert scale_a.numel() == scale_b.numel() == 1 and recipe_a == recipe_b == F.ScalingType.TensorWise
    for a, b, scale_a, recipe_a, scale_b, recipe_b in calls[3:6]:
        assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
        assert scale_a.is_contiguous() and scale_b.is_contiguous() and recipe_a == recipe_b == F.ScalingType.RowWise
    assert [tuple(c[0].shape) + (c[1].shape[1],) for c in calls[6:]] == [(t, k, n), (t, n, k), (n, 256, k)]  # 200 -> 256 tokens
    one, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    assert [(c[3], c[5]) for c in calls[6:]] == [(one, square), (one, square), (one, one)]
    for a, b, scale_a, _, scale_b, recipe_b in calls[6:]:
        blocks = a.shape[1] // 128
        assert scale_a.shape == (a.shape[0], blocks) and scale_a.stride() == (1, a.shape[0])
        if recipe_b == one:
            assert scale_b.shape == (b.shape[1], blocks) and scale_b.stride() == (1, b.shape[1])
        else:
            padded = -(-blocks // 4) * 4
            assert scale_b.shape == (padded, b.shape[1] // 128) and scale_b.stride() == (1, padded)


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("features", [128, 384])
def test_block_scales_of_few_tokens_have_the_strides_cuda_compares(tokens, features):
    operand = fp8.make_operand(gauss(tokens, features), "block", E4M3, "scaled_mm")
    kind, scale = fp8.block_layout(operand)
    assert kind == F.ScalingType.BlockWise1x128 and scale.shape == (tokens, features // 128)
    assert torch.equal(scale, operand.scale)
    assert scale.stride(0) == 1  # also where that dimension has one element
    assert scale.stride(1) == tokens or (scale.shape[1] == 1 and scale.stride(1) == 1)


# -----------------------------------------------------------------------------
# cached weights


@pytest.fixture
def quantised(monkeypatch):
    """Counts quantisations of weights and of everything else."""
    count = {"weight": 0, "other": 0}
    real = fp8.make_operand

    def counting(x, granularity, dtype, backend, block=(1, BLOCK), *rest):
        count["weight" if block == (BLOCK, BLOCK) else "other"] += 1
        return real(x, granularity, dtype, backend, block, *rest)

    monkeypatch.setattr(fp8, "make_operand", counting)
    return count


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
def test_weights_are_quantised_once_a_step(quantised, granularity, backend):
    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend)
    x = gauss(4, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(100):
            layer(x)
    assert quantised == {"weight": 1, "other": 100}
    for _ in range(3):
        layer(x.clone().requires_grad_()).sum().backward()
    assert quantised["weight"] == (2 if granularity == "row" else 1)  # along N for the input gradient
    weights_changed(layer)
    layer(x)
    layer(x)
    assert quantised["weight"] == (3 if granularity == "row" else 2)


@pytest.mark.parametrize("granularity, backend", CPU_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_fused_step_the_layer_equals_a_new_one(granularity, backend, dtype):
    layer = make_layer(gauss(32, 48, dtype=dtype), granularity, backend, bias=gauss(32, dtype=dtype))
    x, dy = gauss(4, 48, seed=1, dtype=dtype), gauss(4, 32, seed=2, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    before = passes(layer, x, dy)
    new = gauss(32, 48, seed=9)
    for change in (optimizer.step, lambda: layer.weight.data.mul_(-1.5), lambda: layer.weight.data.copy_(new)):
        change()
        weights_changed(layer)
        after = passes(layer, x, dy)
        fresh = make_layer(layer.weight.detach(), granularity, backend, bias=layer.bias.detach())
        for a, b in zip(after, passes(fresh, x, dy), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
        before = after


def test_loading_moving_and_copying_drop_the_cache():
    layer = make_layer(gauss(32, 48), "row", "emulate")
    other = {"weight": gauss(32, 48, seed=7)}
    x = gauss(4, 48, seed=1)
    want = make_layer(other["weight"], "row", "emulate")(x)
    for load in (lambda m: m.load_state_dict(other), lambda m: m.load_state_dict(other, assign=True)):
        changed = copy.deepcopy(layer)
        changed(x).sum().backward()
        assert changed.cache
        load(changed)
        assert not changed.cache and torch.equal(changed(x), want)
        parent = nn.Sequential(copy.deepcopy(layer))  # loading reaches inner layers
        parent(x)
        parent.load_state_dict({"0.weight": other["weight"]})
        assert torch.equal(parent(x), want)
    for move in (lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: nn.Sequential(m).to("cpu")):
        layer(x)
        assert layer.cache
        move(layer)
        assert not layer.cache


def test_quantised_weights_stay_out_of_the_state_dict():
    layer = make_layer(gauss(32, 48), "row", "emulate", bias=gauss(32))
    layer(gauss(4, 48)).sum().backward()
    assert list(layer.state_dict()) == ["weight", "bias"] and len(list(layer.buffers())) == 0
    assert layer.state_dict()["weight"].dtype == torch.float32


def test_memory_of_the_cache_is_what_the_docstring_says():
    def cached_bytes(layer):  # an operand that is a view of another one costs nothing
        operands = [o for key, o in layer.cache.items() if key != "of"]
        storages = {o.codes.untyped_storage().data_ptr(): o.codes.untyped_storage().nbytes() for o in operands}
        return sum(storages.values()) / layer.weight.numel()

    x = gauss(4, 256, dtype=torch.bfloat16)
    for (granularity, backend), (forward, backward) in zip(CPU_RECIPES, [(2, 2), (2, 4), (2, 2), (1, 2), (1, 2)], strict=True):
        layer = make_layer(gauss(256, 256, dtype=torch.bfloat16), granularity, backend)
        y = layer(x.clone().requires_grad_())
        assert cached_bytes(layer) == forward
        y.sum().backward()
        assert cached_bytes(layer) == backward


def test_sampling_in_inference_mode_does_not_break_training():
    for granularity, backend in CPU_RECIPES:
        layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), granularity, backend)
        x, dy = gauss(4, 48, seed=1, dtype=torch.bfloat16), gauss(4, 32, dtype=torch.bfloat16)
        with torch.inference_mode():
            layer(x)
        fresh = make_layer(layer.weight.detach(), granularity, backend)
        for a, b in zip(passes(layer, x, dy), passes(fresh, x, dy), strict=True):
            assert torch.equal(a, b)


def test_recomputed_activations_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    layer = make_layer(gauss(32, 48, dtype=torch.bfloat16), "row", "emulate")
    x, dy = gauss(4, 48, seed=1, dtype=torch.bfloat16), gauss(4, 32, dtype=torch.bfloat16)
    want = passes(layer, x, dy)
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    checkpoint(layer, x, use_reentrant=False).backward(dy)
    assert torch.equal(x.grad, want[1]) and torch.equal(layer.weight.grad, want[2])


def test_results_do_not_depend_on_the_call():
    for granularity, backend in CPU_RECIPES:
        layer = make_layer(gauss(32, 256, dtype=torch.bfloat16), granularity, backend)
        x, dy = gauss(4, 256, seed=1, dtype=torch.bfloat16), gauss(4, 32, dtype=torch.bfloat16)
        first = passes(layer, x, dy)
        for _ in range(3):
            for a, b in zip(passes(layer, x, dy), first, strict=True):
                assert torch.equal(a, b)
        assert f"fp8-{granularity}, backend={backend}" in repr(layer)


def test_another_tensor_in_the_weights_place_is_not_answered_from_the_cache():
    layer = fp8.FP8Linear.of(nn.Linear(32, 48, bias=False), "row", "emulate")
    x, other = torch.randn(4, 32), torch.randn(48, 32)
    first = layer(x)
    swapped = torch.func.functional_call(layer, {"weight": other}, x)
    fresh = nn.Linear(32, 48, bias=False)
    fresh.weight.data.copy_(other)
    assert torch.equal(swapped, fp8.FP8Linear.of(fresh, "row", "emulate")(x))
    assert torch.equal(layer(x), first)


def test_activation_checkpointing_quantises_a_weight_once(monkeypatch):
    """Its backward hands the layer an alias of the weight, which is no other weight."""
    from torch.utils.checkpoint import checkpoint

    made, original = [], fp8.make_operand
    monkeypatch.setattr(fp8, "make_operand", lambda x, *a, **k: made.append(tuple(x.shape)) or original(x, *a, **k))
    layer = fp8.FP8Linear.of(nn.Linear(32, 48, bias=False), "row", "emulate")
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert made.count((48, 32)) == made.count((32, 48)) == 1  # W and W^T
    layer.drop_cache()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert made.count((48, 32)) == 2


def test_float64_input_is_quantised_like_float32():
    layer = fp8.FP8Linear.of(nn.Linear(32, 48), "row", "emulate")
    x = torch.randn(4, 32)
    y = layer(x.double())
    assert y.dtype == torch.float64
    assert (y.float() - layer(x)).abs().max() < 1e-6


def test_empty_tensor_quantises_to_nothing():
    for granularity in fp8.GRANULARITIES:
        q, scale = fp8.quantize(torch.zeros(0, 16), granularity)
        assert q.shape == (0, 16) and scale.isfinite().all()
