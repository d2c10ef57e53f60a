"""Precision recipes: what is converted and what is not, caches after an optimiser step (FSDP2 on two processes included), FP32
master weights.

    python -m pytest tests/test_precision.py
"""

import copy
import socket

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8
import precision
from errors import UserError
from precision import Masters, convert, converted_layers, high_precision, weights_changed

FP8_RECIPES = ("fp8-tensor", "fp8-row", "fp8-block")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine: threads that wait for each other cost six times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_qwen3(seed=0, tied=True):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 72, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=tied))


def toy(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False), nn.Tanh(), nn.Linear(32, 16))


class Decoder(nn.Module):
    """Layers named as in large models, whose sizes `tiny_qwen3` does not have."""

    def __init__(self, layers=3):
        super().__init__()
        self.embed_tokens = nn.Embedding(50257, 16)
        self.embed_proj = nn.Linear(16, 16)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            mlp = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("gate_proj", "up_proj", "shared_expert_gate")})
            mlp["gate"] = nn.Linear(16, 5)
            self.layers.append(nn.ModuleDict({"mlp": mlp, "router": nn.Linear(16, 6)}))
        self.lm_head = nn.Linear(16, 50257)


# -----------------------------------------------------------------------------
# convert


def test_the_table():
    assert {"fp32", "bf16", *FP8_RECIPES} <= set(precision.RECIPES)
    for name in ("fp32", "bf16"):
        model = toy()
        report = convert(model, name)
        assert not converted_layers(model) and report["converted"] == [] and list(report["skipped"]) == ["0", "2", "4"]
    for name in FP8_RECIPES:
        model = toy()
        report = convert(model, name)
        assert report["converted"] == report.converted == ["0", "2", "4"] and report["skipped"] == {}
        assert [layer.granularity for layer in converted_layers(model)] == [name.removeprefix("fp8-")] * 3
        assert [layer.backend for layer in converted_layers(model)] == ["emulate"] * 3  # the default on the CPU
    with pytest.raises(UserError, match="unknown precision recipe 'fp8'; choose one of .*fp8-row"):
        convert(toy(), "fp8")


def test_defaults_by_device():
    assert precision.default_backend("cpu") == precision.default_backend(torch.device("cpu")) == "emulate"
    assert precision.default_backend("cuda:1") == precision.default_backend(torch.device("cuda")) == "scaled_mm"


def test_options_reach_every_layer():
    model = toy()
    convert(model, "fp8-row", backend="scaled_mm", grad_dtype="e5m2", power_of_two=True, fp32_products=True)
    for layer in converted_layers(model):
        assert layer.backend == "scaled_mm" and layer.grad_dtype == torch.float8_e5m2
        assert layer.power_of_two is True and layer.fp32_products is True
    with pytest.raises(UserError, match="'e3m4' is not one of e4m3, e5m2"):
        convert(toy(), "fp8-row", grad_dtype="e3m4")
    model = toy()
    with pytest.raises(UserError, match="--fp8-backend 'cutlass'"):
        convert(model, "fp8-row", backend="cutlass")
    with pytest.raises(UserError, match="no block-scaled kernel on cpu"):
        convert(nn.Sequential(nn.Linear(128, 128)), "fp8-block", backend="scaled_mm")
    assert not converted_layers(model)


def test_a_bare_linear():
    layer = nn.Linear(32, 16)
    weight = layer.weight
    report = convert(layer, "fp8-row")
    assert type(layer) is fp8.FP8Linear and layer.weight is weight and report.converted == [""]
    with pytest.raises(UserError, match="'Linear': in_features 20"):
        convert(nn.Linear(20, 16), "fp8-row")


def test_layers_are_skipped_by_name_only():
    model = Decoder()
    report = convert(model, "fp8-tensor")
    assert report.converted == [f"layers.{i}.mlp.{part}_proj" for i in range(3) for part in ("gate", "up")]  # small or not
    assert set(report.skipped) == {"embed_proj", "lm_head"} | {
        f"layers.{i}.{part}" for i in range(3) for part in ("mlp.gate", "mlp.shared_expert_gate", "router")
    }
    assert report.skipped["lm_head"] == "named lm_head" and report.skipped["layers.1.mlp.gate"] == "named gate"
    assert type(model.lm_head) is nn.Linear and type(model.embed_tokens) is nn.Embedding
    assert "6 linear layers in fp8-tensor" in str(report) and "layers.2.router (named router)" in str(report)


@pytest.mark.parametrize("sizes, numbers", [((1368, 32), "1368.*32"), ((32, 40), "32.*40")])
def test_a_refused_layer_is_named_and_nothing_is_converted(sizes, numbers):
    model = nn.ModuleDict({"good": nn.Linear(32, 32), "odd": nn.Linear(*sizes), "last": nn.Linear(32, 32)})
    for recipe in FP8_RECIPES:
        with pytest.raises(UserError, match=f"'odd': in_features {numbers}.*multiples of 16.*--precision bf16"):
            convert(model, recipe)
        assert not converted_layers(model)
    assert convert(model, "bf16").converted == []


def test_a_layer_refused_by_its_backend_leaves_the_others_unconverted(monkeypatch):
    monkeypatch.setattr(fp8, "check_backend", lambda *_: None)  # as on an H100
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 144))
    with pytest.raises(UserError, match="layer '1': .*144 must be multiples of 128"):
        convert(model, "fp8-block", backend="scaled_mm")
    assert not converted_layers(model)


def test_subclasses_of_linear_are_left_alone():
    model = nn.MultiheadAttention(32, 2)
    report = convert(model, "fp8-row")
    assert report.converted == [] and "not a plain nn.Linear" in report.skipped["out_proj"]


def test_converting_twice_takes_the_second_recipe():
    model, x = toy(), torch.randn(5, 32)
    convert(model, "fp8-row")
    model(x)
    assert convert(model, "fp8-tensor").converted == ["0", "2", "4"]
    want = toy()
    convert(want, "fp8-tensor")
    assert torch.equal(model(x), want(x))
    convert(model, "bf16")
    assert not converted_layers(model) and torch.equal(model(x), toy()(x))


def test_a_second_conversion_that_keeps_a_layer_undoes_the_first():
    model = Decoder()
    convert(model, "fp8-row")
    report = convert(model, "fp8-row", keep_bf16="first:1")
    quantised = [name for name, layer in model.named_modules() if isinstance(layer, fp8.FP8Linear)]
    assert quantised == report.converted


# -----------------------------------------------------------------------------
# layers kept by position


@pytest.mark.parametrize("keep, kept", [
    ("", []), ("first:1", [0]), ("last:1", [4]), ("first:1,last:1", [0, 4]), ("first:2, last:2", [0, 1, 3, 4]), ("first:0", []),
    ("last:4", [1, 2, 3, 4]),
])
def test_first_and_last_layers_stay_in_bf16(keep, kept):
    report = convert(Decoder(5), "fp8-row", keep_bf16=keep)
    assert sorted({int(name.split(".")[1]) for name, why in report.skipped.items() if "keep-bf16" in why}) == kept
    assert sorted({int(name.split(".")[1]) for name in report.converted}) == [i for i in range(5) if i not in kept]
    reasons = {why for name, why in report.skipped.items() if name.endswith(("gate_proj", "up_proj"))}
    assert reasons == ({f"--keep-bf16 {keep}"} if kept else set())


def test_keeping_every_layer_is_refused():
    with pytest.raises(UserError, match="--keep-bf16 last:5 leaves no layer to convert"):
        convert(Decoder(5), "fp8-row", keep_bf16="last:5")


def test_layers_are_counted_by_number_not_by_text():
    report = convert(Decoder(12), "fp8-row", keep_bf16="last:2")
    assert {name.split(".")[1] for name, why in report.skipped.items() if "keep-bf16" in why} == {"10", "11"}


@pytest.mark.parametrize("keep", ["first", "first:", "first:x", "first:-1", "middle:1", "1", "first:1;last:1", "first:1,", ","])
def test_bad_positions_are_refused(keep):
    model = Decoder()
    with pytest.raises(UserError, match="--keep-bf16 .*is not first:N or last:N"):
        convert(model, "fp8-row", keep_bf16=keep)
    assert not converted_layers(model)


def test_positions_need_numbered_layers():
    with pytest.raises(UserError, match="--keep-bf16 'first:1': the model has no numbered decoder layers"):
        convert(toy(), "fp8-row", keep_bf16="first:1")


# -----------------------------------------------------------------------------
# checkpoints and transformers


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_converted_model_saves_what_plain_transformers_loads(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_qwen3()
    before = {name: w.clone() for name, w in model.state_dict().items()}
    report = convert(model, recipe)
    assert len(report.converted) == 14 and report.skipped == {"lm_head": "named lm_head"}
    ids = torch.arange(24).reshape(2, 12)
    out = model(ids).logits
    out.square().sum().backward()  # fills both caches
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not converted_layers(plain)
    with high_precision(model), torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    convert(plain, recipe)
    assert torch.equal(plain(ids).logits, out)
    assert not torch.equal(out, tiny_qwen3()(ids).logits)  # it was quantised


def test_a_plain_state_dict_loads_into_a_converted_model():
    model, other = tiny_qwen3(), tiny_qwen3(seed=1)
    convert(model, "fp8-row")
    ids = torch.arange(10).reshape(1, 10)
    model(ids)
    model.load_state_dict(other.state_dict())
    convert(other, "fp8-row")
    assert torch.equal(model(ids).logits, other(ids).logits)


# -----------------------------------------------------------------------------
# high_precision


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_high_precision_is_the_unconverted_model_bitwise(recipe):
    model, plain = toy().bfloat16(), toy().bfloat16()
    x = torch.randn(7, 32, dtype=torch.bfloat16)
    convert(model, recipe)
    quantised = model(x)
    with high_precision(model) as inside:
        assert inside is model and torch.equal(model(x), plain(x))
        model(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(model(x), quantised) and not torch.equal(quantised, plain(x))


def test_high_precision_of_fp32_masters_is_the_bf16_model():
    model, x = toy(), torch.randn(7, 32, dtype=torch.bfloat16)
    convert(model, "fp8-row")
    with high_precision(model):
        assert torch.equal(model(x), toy().bfloat16()(x))


def test_high_precision_nests_and_survives_exceptions():
    model, x = toy(), torch.randn(3, 32)
    convert(model, "fp8-tensor")
    quantised, plain = model(x), toy()(x)
    with high_precision(model):
        with high_precision(model[0]):
            assert torch.equal(model(x), plain)
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), quantised)
    with pytest.raises(KeyError):
        with high_precision(model), high_precision(model):
            raise KeyError
    assert torch.equal(model(x), quantised)
    with high_precision(model[0]):  # a part only
        assert not model[0].quantized and model[2].quantized


def test_high_precision_keeps_the_cache():
    model, x = toy(), torch.randn(3, 32)
    convert(model, "fp8-row")
    model(x)
    cached = {key: operand.codes for key, operand in model[0].cache.items() if key != "of"}
    with high_precision(model):
        model(x)
    assert cached and all(model[0].cache[key].codes is codes for key, codes in cached.items())


# -----------------------------------------------------------------------------
# weights_changed


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("build", [toy, tiny_qwen3])
def test_after_a_fused_step_the_model_equals_a_new_one(recipe, build):
    model = build()
    convert(model, recipe)
    inputs = torch.randn(6, 32) if build is toy else torch.arange(12).reshape(2, 6)
    output = (lambda m: m(inputs)) if build is toy else (lambda m: m(inputs).logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        stale = output(model).detach()
        output(model).square().sum().backward()
        optimizer.step()
        weights_changed(model)
        fresh = build(seed=1)
        fresh.load_state_dict(model.state_dict())
        convert(fresh, recipe)
        assert torch.equal(output(model), output(fresh)) and not torch.equal(output(model), stale)


def fsdp_worker(rank, port, folder):
    """One of two processes: each case shards a converted model, takes a fused step and compares with a copy built afresh."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ids = torch.arange(24).reshape(2, 12)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))

    def parts(model):
        return list(model.model.layers) if hasattr(model, "model") else [model[0], model[2]]

    def output(model):
        y = model(ids).logits if hasattr(model, "model") else model(x.bfloat16())
        assert y.dtype == torch.bfloat16
        return y

    def fresh_copy(model, build, recipe):
        full = {name: w.full_tensor() for name, w in model.state_dict().items()}
        copy = build(seed=1)
        copy.load_state_dict(full)
        for p in copy.parameters():
            p.data = p.data.to(torch.bfloat16)
        convert(copy, recipe)
        return copy

    def assert_nothing_cached(model):
        assert converted_layers(model) and all(not layer.cache for layer in converted_layers(model))

    def check(build, recipe):
        model = build()
        convert(model, recipe)
        for part in parts(model):
            fully_shard(part, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        weights_changed(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        previous = None
        for step in range(2):
            y = output(model)
            assert_nothing_cached(model)
            y.float().square().sum().backward()
            assert_nothing_cached(model)
            assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            weights_changed(model)
            with torch.no_grad():
                want, got = output(fresh_copy(model, build, recipe)), output(model)
            assert torch.equal(got, want), f"{build.__name__} {recipe} step {step}"
            assert previous is None or not torch.equal(got, previous)
            previous = got
            assert_nothing_cached(model)

    def check_whole_root():
        """After a forward without a backward FSDP2 leaves the root's own parameters whole; that is no leave to cache them."""
        model = toy()
        convert(model, "fp8-row")
        fully_shard(model, mp_policy=policy)
        weights_changed(model)
        for _ in range(2):
            with torch.no_grad():
                output(model)
            weights_changed(model)
        assert_nothing_cached(model)
        output(model).sum().backward()
        assert_nothing_cached(model)

    def check_converted_after_sharding():
        model = toy()
        fully_shard(model, mp_policy=policy)
        with pytest.raises(UserError, match="call precision.convert before fully_shard"):
            convert(model, "fp8-row")

    try:
        for recipe in FP8_RECIPES:
            check(toy, recipe)
        check(tiny_qwen3, "fp8-row")
        check(tiny_qwen3, "fp8-block")
        check_whole_root()
        check_converted_after_sharding()
        (folder / f"done{rank}").touch()
    finally:
        dist.destroy_process_group()


def test_fsdp2_on_two_processes_uses_no_stale_weights_and_caches_none(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(fsdp_worker, args=(port, tmp_path), nprocs=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["done0", "done1"]


# -----------------------------------------------------------------------------
# FP32 masters


def test_a_small_step_moves_fp32_masters_but_not_bf16_weights():
    model = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(0.02)
    start = model.weight.detach().clone()
    masters = Masters(model)
    (w,) = masters.parameters()
    assert w.dtype == torch.float32 and torch.equal(w, start.float())
    assert torch.equal(start + 1e-6, start)  # its step there is 1.2e-4
    for step in range(1, 101):
        with torch.no_grad():
            w.add_(1e-6)
        masters.publish()
        assert torch.equal(model.weight, (start.float() + step * 1e-6).bfloat16()) or step > 60  # near the tie sums differ
    assert (w > start.float() + 0.9e-4).all() and (model.weight > start).all()  # a hundred steps of 1e-6 make one of 1.2e-4


def test_micro_batch_gradients_are_summed_in_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).bfloat16()
    plain = copy.deepcopy(model)
    masters = Masters(model)
    want = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    for i in range(7):
        x = torch.randn(5, 16, dtype=torch.bfloat16) * 10.0 ** (i % 3)
        model(x).square().sum().backward()
        plain.zero_grad()
        plain(x).square().sum().backward()
        for name, p in plain.named_parameters():
            want[name] += p.grad.float()
    assert all(p.grad is None for p in model.parameters())  # freed at once
    for name, w in masters.weights.items():
        assert w.grad.dtype == torch.float32 and torch.equal(w.grad, want[name])
        assert not torch.equal(want[name], want[name].bfloat16().float())  # a BF16 sum would have lost bits
    masters.zero_grad()
    assert not any(w.grad.any() for w in masters.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_optimisers_own_zero_grad_works_too(set_to_none):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, dtype=torch.bfloat16)
    masters = Masters(model)
    optimizer = torch.optim.AdamW(masters.parameters())
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    for _ in range(2):
        model(x).sum().backward()
        once = masters.weights["weight"].grad.clone()
        optimizer.zero_grad(set_to_none=set_to_none)
    model(x).sum().backward()
    assert torch.equal(masters.weights["weight"].grad, once)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_publish_rounds_once_and_drops_the_quantised_copies(recipe):
    model = toy().bfloat16()
    convert(model, recipe)
    masters, x = Masters(model), torch.randn(4, 32, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, fused=True)
    model(x).square().sum().backward()
    before = model(x)
    optimizer.step()
    masters.publish()
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16 and torch.equal(p, masters.weights[name].bfloat16())
    fresh = toy(seed=1).bfloat16()
    fresh.load_state_dict(model.state_dict())
    convert(fresh, recipe)
    assert torch.equal(model(x), fresh(x)) and not torch.equal(model(x), before)


def test_tied_weights_have_one_master():
    model = tiny_qwen3().bfloat16()
    masters = Masters(model)
    assert len(masters.parameters()) == len(list(model.parameters())) and "lm_head.weight" not in masters.weights
    model(torch.arange(12).reshape(2, 6)).logits.square().sum().backward()
    with torch.no_grad():
        for w in masters.parameters():
            w.sub_(w.grad, alpha=1e-3)
    masters.publish()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, masters.weights["model.embed_tokens.weight"].bfloat16())


def test_masters_of_an_fp32_model_are_its_parameters():
    model = toy()
    convert(model, "fp8-row")
    masters, x = Masters(model), torch.randn(4, 32)
    assert all(a is b for a, b in zip(masters.parameters(), model.parameters(), strict=True))
    masters.zero_grad()  # no gradients yet
    model(x).sum().backward()
    before = model(x)
    torch.optim.SGD(masters.parameters(), lr=0.1).step()
    masters.publish()
    assert not torch.equal(model(x), before)
    masters.zero_grad()
    assert not any(p.grad.any() for p in model.parameters())


def test_frozen_weights_have_no_master():
    model = toy().bfloat16()
    model[0].requires_grad_(False)
    assert list(Masters(model).weights) == ["2.weight", "4.weight", "4.bias"]


def test_masters_save_and_load():
    model = toy().bfloat16()
    masters = Masters(model)
    with torch.no_grad():
        for w in masters.parameters():
            w.add_(1e-6)
    saved = {name: w.detach().clone() for name, w in masters.weights.items()}
    other = toy(seed=1).bfloat16()
    convert(other, "fp8-row")
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    other(x)
    again = Masters(other)
    pointers = [w.data_ptr() for w in again.parameters()]
    again.load(saved)
    assert all(torch.equal(again.weights[name], w) for name, w in saved.items())
    assert [w.data_ptr() for w in again.parameters()] == pointers  # the optimiser's own tensors
    masters.publish()
    convert(model, "fp8-row")
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("change", ["missing", "extra", "size", "broadcast"])
def test_masters_refuse_another_models_weights_and_stay_as_they_were(change):
    model = toy().bfloat16()
    masters = Masters(model)
    before = {name: w.detach().clone() for name, w in masters.weights.items()}
    weights = {name: w + 1 for name, w in before.items()}
    if change == "missing":
        del weights["2.weight"]
    elif change == "extra":
        weights["6.weight"] = torch.zeros(16, 16)
    elif change == "size":
        weights["2.weight"] = torch.zeros(48, 64)
    else:
        weights["2.weight"] = torch.zeros(64)  # would broadcast over the 32 rows
    with pytest.raises(UserError, match="[26].weight"):
        masters.load(weights)
    assert all(torch.equal(w, before[name]) for name, w in masters.weights.items())


def test_training_with_masters_follows_fp32_training():
    """BF16 copies of FP32 masters: the loss falls as it does with FP32 weights."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    target = F.linear(x, torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) / 6)
    last = {}
    for recipe, dtype in (("fp32", torch.float32), ("fp8-row", torch.bfloat16), ("fp8-block", torch.bfloat16)):
        model = toy().to(dtype)
        convert(model, recipe)
        masters = Masters(model)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
        for _ in range(40):
            loss = (model(x.to(dtype)).float() - target).square().mean()
            loss.backward()
            optimizer.step()
            masters.publish()
            masters.zero_grad()
        last[recipe] = loss.item()
    assert last["fp32"] < 0.1 and last["fp8-row"] < last["fp32"] + 0.05 and last["fp8-block"] < last["fp32"] + 0.05


def test_masters_held_in_fp32_round_to_bf16_all_the_same():
    """--activations fp32: the model's parameters are FP32 tensors of BF16 values, before and after a step."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters = precision.Masters(model, torch.bfloat16, held_in=torch.float32)
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, start[name].bfloat16().float())
        assert torch.equal(masters.weights[name], start[name])  # the masters keep every bit
    model(torch.randn(4, 16)).sum().backward()
    optimizer = torch.optim.SGD(masters.parameters(), lr=1e-3)
    optimizer.step()
    masters.publish()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, masters.weights[name].bfloat16().float())
        assert not torch.equal(masters.weights[name], start[name])
