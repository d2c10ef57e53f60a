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


def make(recipe, seed=0):
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed).eval()
    with torch.no_grad():
        for p in model.parameters():  # larger weights: a flat distribution would hide differences
            p.mul_(3.0) if p.dim() == 2 else None
    precision.convert(model, recipe)
    precision.Masters(model, precision.recipe_of(recipe)["dtype"])
    return model, tokenizer


@pytest.fixture(scope="module", params=["bf16", "fp8-row", "fp8-block"])
def pair(request):
    model, tokenizer = make(request.param)
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
    other = make(recipe, seed=1)[0]  # another model is far away: the bound above means something
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


def test_sync_brings_new_weights_and_brings_back_the_old(pair):
    recipe, model, tokenizer, engine = pair
    before = engine.generate(PROMPTS, 2, 1.0, 8, seed=5)
    other, _ = make(recipe, seed=2)
    print_before = engine.sync(model.named_parameters())
    assert engine.sync(other.named_parameters()) != print_before
    changed = engine.generate(PROMPTS, 2, 1.0, 8, seed=5)
    assert changed != before
    old, mu, mask = logps_of_learner(other, PROMPTS, changed, 2)
    assert mismatch_metrics(old, mu, mask)["mismatch/abs_dlogp_mean"] < 0.15
    assert engine.sync(model.named_parameters()) == print_before
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
