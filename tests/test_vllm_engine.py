"""The real vLLM on a CPU, on an untrained tiny model: python -m pytest tests/test_vllm_engine.py (three engine starts)."""

import copy

import pytest
import torch

import fp8
import precision
import tiny
from clipping import mismatch_metrics
from errors import UserError
from logprob import collate, token_logps
from rollout import make_engine

pytest.importorskip("vllm")
if torch.cuda.is_available():
    pytest.skip("these engines are sized for a CPU", allow_module_level=True)

PROMPTS = [[5, 6, 7, 13, 8, 9, 3, 14], [4, 13, 5, 14], [9, 9, 9, 13, 9, 9, 9, 14]]


def make(recipe, seed=0, tied=True, kv_heads=2):
    """An untrained model; with one KV head of 64 rows, 128 x 128 blocks of the fused q, k, v straddle its parts."""
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed).eval()
    if kv_heads != 2:
        model.config.num_key_value_heads = kv_heads
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = type(model)(model.config).eval()
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(tiny.make_model(tokenizer, seed + 100).lm_head.weight.detach())
    with torch.no_grad():
        for p in model.parameters():  # larger weights: a flat distribution would hide differences
            p.mul_(3.0) if p.dim() == 2 else None
    precision.convert(model, recipe)
    precision.Masters(model, precision.recipe_of(recipe)["dtype"])
    return model, tokenizer


@pytest.fixture(scope="module", params=["bf16", "fp8-row", "fp8-block"])
def pair(request):
    model, tokenizer = make(request.param, kv_heads=1)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    engine = make_engine("vllm", model, tokenizer, request.param, max_rows=64)
    engine.sync(model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())  # vLLM's start and reload leave our generators alone
    torch.set_num_threads(threads)  # and torch's own function is back
    yield request.param, model, tokenizer, engine
    engine.close()


def logps_of_learner(model, prompts, completions, n):
    batch = collate([p for p in prompts for _ in range(n)], [c.token_ids for c in completions], 0)
    with torch.no_grad():
        logp, _ = token_logps(model, batch)
    T = batch.mask.shape[1]
    return logp, torch.tensor([c.logps + [0.0] * (T - len(c.logps)) for c in completions]), batch.mask


def test_log_probs_are_the_learners(pair):
    recipe, model, _, engine = pair
    completions = engine.generate(PROMPTS, 16, 1.0, 24, seed=1)
    old, mu, mask = logps_of_learner(model, PROMPTS, completions, 16)
    gap = mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"]
    assert gap < (0.03 if recipe == "bf16" else 0.15), gap
    other = make(recipe, seed=1, kv_heads=1)[0]  # another model is far away: the bound above means something
    old, mu, mask = logps_of_learner(other, PROMPTS, completions, 16)
    assert mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"] > 0.5


def test_temperature_is_in_the_log_probs(pair):
    _, model, _, engine = pair
    completions = engine.generate(PROMPTS, 8, 0.5, 12, seed=1)
    batch = collate([p for p in PROMPTS for _ in range(8)], [c.token_ids for c in completions], 0)
    with torch.no_grad():
        at_half, _ = token_logps(model, batch, 0.5)
        at_one, _ = token_logps(model, batch, 1.0)
    mu = torch.tensor([c.logps + [0.0] * (batch.mask.shape[1] - len(c.logps)) for c in completions])
    right, wrong = ((x - mu)[batch.mask].abs().mean() for x in (at_half, at_one))
    assert right < 0.5 * wrong


def test_order_seeds_and_finish_reasons(pair):
    _, _, tokenizer, engine = pair
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, 4, 1.0, 6, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert len(first) == 12 and first == engine.generate(PROMPTS, 4, 1.0, 6, seed=3)
    assert first != engine.generate(PROMPTS, 4, 1.0, 6, seed=4)
    assert len({tuple(c.token_ids) for c in first[:4]}) > 1  # members of a group differ
    for c in first:
        assert len(c.token_ids) == len(c.logps) <= 6 and all(i < len(tokenizer) for i in c.token_ids)
        assert (c.finish_reason == "stop") == (c.token_ids[-1] in engine.eos)
        assert not set(c.token_ids[:-1]) & set(engine.eos)
        assert c.finish_reason == "stop" or len(c.token_ids) == 6


def operand_pointers(vllm_model):
    layers = [m for m in vllm_model.modules() if hasattr(m, "operands")]
    return [x.data_ptr() for layer in layers for operand in layer.operands for x in operand]


def test_sync_brings_new_weights_and_brings_back_the_old(pair):
    recipe, model, tokenizer, engine = pair
    before = engine.generate(PROMPTS, 2, 1.0, 8, seed=5)
    other, _ = make(recipe, seed=2, kv_heads=1)
    pointers = engine.llm.apply_model(operand_pointers)
    print_before = engine.sync(model.named_parameters())
    assert engine.sync(other.named_parameters()) != print_before
    changed = engine.generate(PROMPTS, 2, 1.0, 8, seed=5)
    assert changed != before
    old, mu, mask = logps_of_learner(other, PROMPTS, changed, 2)
    assert mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"] < 0.15
    assert engine.sync(model.named_parameters()) == print_before
    assert engine.llm.apply_model(operand_pointers) == pointers  # in place, as captured CUDA graphs need it
    assert recipe == "bf16" or len(pointers[0]) == 2 * 4 * 4  # codes and scales of four layers' four matrices
    assert engine.generate(PROMPTS, 2, 1.0, 8, seed=5) == before  # bit for bit, prefix cache included


def test_wrong_weights_are_refused_and_the_next_sync_mends(pair):
    _, model, _, engine = pair
    weights = dict(model.named_parameters())
    some = {k: w for k, w in weights.items() if not k.endswith("layers.1.self_attn.k_proj.weight")}
    with pytest.raises((UserError, ValueError, AssertionError, RuntimeError)):
        engine.sync(some.items())
    with pytest.raises((UserError, ValueError, KeyError)):
        engine.sync((weights | {"model.layers.0.unheard_of.weight": torch.zeros(4)}).items())
    assert engine.sync(weights.items())


def test_fused_shards_have_the_learners_scales(pair):
    recipe, model, _, engine = pair
    if recipe == "bf16":
        pytest.skip("nothing is quantised")
    attention = model.model.layers[0].self_attn
    parts = [fp8.make_operand(p.weight.detach(), p.granularity, torch.float8_e4m3fn, "emulate", (128, 128))
             for p in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def fused(vllm_model):
        return vllm_model.model.layers[0].self_attn.qkv_proj.operands[0]

    operand = engine.llm.apply_model(fused)[0]
    assert torch.equal(operand.codes, torch.cat([o.codes for o in parts]))
    scales = [fp8.expand_scale(o.scale, (len(o.codes), o.scale.shape[1])).expand(len(o.codes), -1) for o in parts]
    assert torch.equal(operand.scale, torch.cat(scales))
    whole = torch.cat([p.weight.detach() for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    one = fp8.make_operand(whole, attention.q_proj.granularity, torch.float8_e4m3fn, "emulate", (128, 128))
    assert torch.equal(one.codes, operand.codes) == (recipe == "fp8-row")  # quantising the fused matrix would not do for blocks


def test_prompts_that_do_not_fit_are_refused(pair):
    engine = pair[3]
    with pytest.raises(UserError, match="prompt 1 has 0 tokens"):
        engine.generate([[3], []], 1, 1.0, 4)
    with pytest.raises(UserError, match="prompt 0 has 250 tokens"):
        engine.generate([[3] * 250], 1, 1.0, 10)


def test_more_prompt_tokens_than_fit_into_one_batch(pair):
    """Prompts prefilled in pieces rewind a seeded request's generator, which a CPU generator refuses."""
    completions = pair[3].generate([[3 + i % 10] * 200 for i in range(60)], 1, 1.0, 2, seed=1)
    assert len(completions) == 60 and all(1 <= len(c.token_ids) <= 2 for c in completions)


def test_log_prob_is_found_by_the_sampled_id_and_a_missing_one_is_nan():
    from types import SimpleNamespace as Fake

    from vllm_engine import VLLMEngine

    logprobs = [{11: Fake(logprob=-0.1), 42: Fake(logprob=-3.0)}, {7: Fake(logprob=-0.5)}]  # the likeliest is not the sampled
    out = Fake(token_ids=[42, 9], logprobs=logprobs, finish_reason="length")
    completion = VLLMEngine.completion(None, out)
    assert completion.logps[0] == -3.0 and completion.logps[1] != completion.logps[1]  # NaN: counted in is/missing
    assert completion.finish_reason == "length"


def test_native_kernels_are_refused_on_a_cpu():
    model, tokenizer = make("fp8-row")
    with pytest.raises(UserError, match="--rollout-kernels native"):
        make_engine("vllm", model, tokenizer, "fp8-row", kernels="native")


def test_learner_is_left_alone(pair):
    recipe, model, _, engine = pair
    weights = copy.deepcopy(model.state_dict())
    engine.generate(PROMPTS, 1, 1.0, 4)
    engine.sync(model.named_parameters())
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert len(precision.converted_layers(model)) == (0 if recipe == "bf16" else 28)


class FakeLLM:
    """Records what a sleeping engine is asked to do, in order."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        assert dict(kwargs["weights_iterator"]).keys() == {"a.weight"}

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


def fake_engine(llm, sleep_level):
    from vllm_engine import VLLMEngine

    engine = object.__new__(VLLMEngine)
    engine.llm, engine.sleep_level, engine.asleep, engine.tied, engine.packed = llm, sleep_level, False, False, {}
    engine.dtype, engine.names, engine.memory_fraction = torch.bfloat16, {"a.weight"}, 0.4
    return engine


def test_wake_order_weights_then_reload_then_kv_cache_then_prefix_reset():
    engine = fake_engine(FakeLLM(), sleep_level=2)
    weights = {"a.weight": torch.ones(4)}
    engine.sleep()
    engine.sleep()  # twice is once
    assert engine.sync(weights.items(), check=False) is None
    engine.sync(weights.items(), check=False)  # awake: nothing to wake
    order = ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset", "reload_weights", "reset"]
    assert engine.llm.calls == order
    engine = fake_engine(FakeLLM(), sleep_level=0)
    engine.sleep()
    assert engine.llm.calls == [] and not engine.asleep


def test_a_sleeping_engine_does_not_sample():
    engine = fake_engine(FakeLLM(), sleep_level=1)
    engine.sleep()
    with pytest.raises(UserError, match="sync its weights before the next generate"):
        engine.generate([[3]], 1, 1.0, 4)


@pytest.mark.slow
def test_a_start_that_vllm_refuses_is_one_line():
    model, tokenizer = make("bf16")
    model.config.max_position_embeddings = 4_000_000  # more KV cache than the CPU's share
    with pytest.raises(UserError, match="vLLM: .*KV cache"):
        make_engine("vllm", model, tokenizer, "bf16", max_rows=4)


def test_names_are_compared_even_without_a_fingerprint():
    engine = fake_engine(FakeLLM(), 0)
    engine.names = {"a.weight", "b.weight"}
    with pytest.raises(UserError, match="1 tensors sent, 2 held by vLLM; first odd name 'b.weight'"):
        engine.sync({"a.weight": torch.ones(4)}.items(), check=False)


def test_out_of_memory_at_wake_and_a_dead_engine_are_one_line():
    from vllm.v1.engine.exceptions import EngineDeadError

    class Dead(FakeLLM):
        def wake_up(self, tags):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

        def collective_rpc(self, method, kwargs):
            raise EngineDeadError() from RuntimeError("worker 0 left")

    engine = fake_engine(Dead(), 1)
    with pytest.raises(UserError, match=r"engine died \(RuntimeError: worker 0 left\); go on with --resume"):
        engine.sync({}.items(), check=False)
    engine.asleep = True
    engine.llm.collective_rpc = None
    with pytest.raises(UserError, match=r"Tried to allocate 20.00 GiB.\); lower --vllm-memory 0.4 or --micro-tokens"):
        engine.sync({}.items(), check=False)


def test_fingerprints_of_sharded_and_replicated_weights():
    from vllm_engine import compare_sums

    sent = {"norm": (3.0, 5.0), "linear": (-1.0, 8.0)}
    compare_sums(sent, {"norm": (3.0, 5.0), "linear": (-1.0, 8.0)})
    compare_sums(sent, {"norm": (6.0, 10.0), "linear": (-1.0, 8.0)}, copies=2)
    with pytest.raises(UserError, match="vLLM's norm sums to"):
        compare_sums(sent, {"norm": (6.0, 10.0), "linear": (-1.0, 8.0)})
    with pytest.raises(UserError, match="vLLM's linear sums to"):
        compare_sums(sent, {"norm": (3.0, 5.0), "linear": (-1.0, 8.001)})


def test_tensor_parallel_needs_its_processes(monkeypatch):
    from vllm_engine import check_tensor_parallel

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_tensor_parallel(1, 2)
    with pytest.raises(UserError, match="--vllm-tp 2 needs a multiple of 2 processes, found 1"):
        check_tensor_parallel(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_tensor_parallel(2, 2)
    with pytest.raises(UserError, match="--vllm-tp 4: the model has 2 key-value heads"):
        check_tensor_parallel(4, 2)


def test_ids_without_text_are_never_sampled(pair):
    """Padded embeddings: their ids are pushed out of reach, and the others keep their log-probs."""
    _, model, _, engine = pair
    before = engine.generate(PROMPTS, 4, 1.0, 6, seed=3)
    engine.no_text = {3: -100.0, 4: -100.0}
    try:
        ids = {i for c in engine.generate(PROMPTS, 64, 1.0, 6, seed=3) for i in c.token_ids}
    finally:
        engine.no_text = {}
    assert not ids & {3, 4} and {i for c in before for i in c.token_ids} & {3, 4}


# -----------------------------------------------------------------------------
# slow: one engine start each


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", list(precision.RECIPES))
def test_sync_there_and_back(recipe, tied):
    """Perturb the learner, sync: greedy answers and log-probs move as the learner's do; sync back: bitwise the first output."""
    model, tokenizer = make(recipe, seed=0, tied=tied)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine("vllm", model, tokenizer, recipe, max_rows=16)
    engine.sync(model.named_parameters())
    n, bound = 4, {"fp32": 1e-4, "bf16": 0.03}.get(recipe, 0.15)

    def sampled():
        greedy, drawn = engine.generate(PROMPTS, 1, 0.0, 16), engine.generate(PROMPTS, n, 1.0, 16, seed=2)
        old, mu, mask = logps_of_learner(model, PROMPTS, drawn, n)
        return greedy, drawn, float(mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"])

    greedy, drawn, gap = sampled()
    assert gap < bound
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((torch.randn(p.shape, generator=generator) * 0.3 * p.float().std()).to(p.dtype))
    precision.weights_changed(model)
    old, mu, mask = logps_of_learner(model, PROMPTS, drawn, n)
    assert mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"] > 5 * max(gap, 0.01)  # the learner has moved away
    engine.sync(model.named_parameters())
    greedy_moved, drawn_moved, gap_moved = sampled()
    assert greedy_moved != greedy and drawn_moved != drawn and gap_moved < bound  # and the engine with it
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    engine.sync(model.named_parameters())
    assert engine.generate(PROMPTS, 1, 0.0, 16) == greedy and engine.generate(PROMPTS, n, 1.0, 16, seed=2) == drawn
    engine.close()


RANKS = """
import sys, torch
torch.distributed.init_process_group("gloo")
sys.path[:0] = ["tests", "."]
import fp8
from test_vllm_engine import PROMPTS, make, logps_of_learner
from clipping import mismatch_metrics
from rollout import make_engine
recipe, tensor_parallel = sys.argv[1], int(sys.argv[2])
model, tokenizer = make(recipe)
engine = make_engine("vllm", model, tokenizer, recipe, max_rows=16, tensor_parallel=tensor_parallel)
engine.sync(model.named_parameters())
drawn = engine.generate(PROMPTS, 4, 1.0, 16, seed=2)
old, mu, mask = logps_of_learner(model, PROMPTS, drawn, 4)

def check_codes(vllm_model):  # this rank's shard of o_proj holds the learner's codes: its scales span both ranks
    layer = vllm_model.model.layers[0].self_attn.o_proj
    if not hasattr(layer, "operands"):
        return True
    o_proj = model.model.layers[0].self_attn.o_proj
    whole = fp8.make_operand(o_proj.weight.detach(), o_proj.granularity, torch.float8_e4m3fn, "emulate", (128, 128))
    width = layer.operands[0].codes.shape[1]
    start = width * torch.distributed.get_rank() if width < whole.codes.shape[1] else 0
    return torch.equal(layer.operands[0].codes, whole.codes[:, start : start + width])

assert engine.llm.apply_model(check_codes)[0]
gap, ids = mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"], [c.token_ids for c in drawn]
print("RESULT", torch.distributed.get_rank(), float(gap), hash(str(ids)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-row", "fp8-tensor"])
def test_two_ranks_with_an_engine_each_or_one_over_both(recipe, tensor_parallel, tmp_path):
    import os
    import subprocess
    import sys

    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29511"]
    command = [*launcher, str(path), recipe, str(tensor_parallel)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    lines = [line.split()[-3:] for line in done.stdout.splitlines() if "RESULT" in line]
    assert done.returncode == 0 and len(lines) == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert all(float(gap) < (0.03 if recipe == "bf16" else 0.15) for _, gap, _ in lines)
    assert lines[0][2] == lines[1][2]  # the same seeds, the same answers on both ranks
