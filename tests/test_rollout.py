"""Sampling: log-probs against the learner's, greedy against `generate`, random numbers, the batch and its cache, weight sync.

    python -m pytest tests/test_rollout.py
"""

import copy
from collections import Counter

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

import fp8
import precision
import rollout
import tiny
from errors import UserError
from logprob import collate, token_logps
from rollout import GrowingLayer, eos_ids, fingerprint, make_engine, row_seed, row_uniforms

TOKENIZER = tiny.make_tokenizer()  # 17 ids: 0 <pad>, 1 <eos>, 2 <unk>, 3 to 15 characters, 16 ####
EOS = 1
PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 3], [7, 8, 4], [5]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine: threads that wait for each other cost six times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(recipe="fp32", vocab=17, seed=0, tied=True, sliding=None):
    """Two layers, weights large enough that the next token depends on the whole prompt; converted to `recipe`."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2}
    ids = {"eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": None}
    if sliding:
        config = MistralConfig(**sizes, **heads, **ids, sliding_window=sliding, tie_word_embeddings=tied)
        model = MistralForCausalLM(config).eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ids, tie_word_embeddings=tied)).eval()
    for p in model.parameters():
        p.data = p.data.to(precision.RECIPES[recipe]["dtype"])  # RoPE frequencies stay FP32, as from_pretrained leaves them
    precision.convert(model, recipe)
    return model


def make(recipe="fp32", max_rows=256, **kwargs):
    model = make_model(recipe, **kwargs)
    return model, make_engine("hf", model, TOKENIZER, recipe, max_rows)


def learner_logps(model, prompts, completions, temperature=1.0):
    """Per completion, the learner's log-probs of its ids; n completions per prompt."""
    n = len(completions) // len(prompts)
    responses = [c.token_ids for c in completions]
    with torch.no_grad():
        logps, _ = token_logps(model, collate([p for p in prompts for _ in range(n)], responses, 0), temperature)
    return [row[: len(r)] for row, r in zip(logps, responses, strict=True)]


def gaps(model, prompts, completions, temperature=1.0):
    """|mu_logp - old_logp| of all sampled tokens."""
    learner = learner_logps(model, prompts, completions, temperature)
    return (torch.cat(learner) - torch.tensor([x for c in completions for x in c.logps])).abs()


def step(model, lr=0.05, seed=5):
    """An optimiser step on the FP32 masters, published; the gradient is random."""
    masters = precision.Masters(model)
    generator = torch.Generator().manual_seed(seed)
    for w in masters.parameters():
        w.grad = torch.randn(w.shape, generator=generator)
    torch.optim.SGD(masters.parameters(), lr=lr).step()
    masters.publish()


def forward_shapes(model):
    """A list that fills with the (rows, tokens) of each call of the model."""
    shapes = []
    model.register_forward_pre_hook(lambda m, a, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


def ids_of(completions):
    return [c.token_ids for c in completions]


# -----------------------------------------------------------------------------
# log-probs


# FP32 differs by rounding alone. BF16 layers (8 bits) round differently with and without a cache; FP8 codes turn such
# differences into steps of 1/16.
@pytest.mark.parametrize(
    "recipe, mean, largest", [("fp32", 1e-5, 1e-4), ("bf16", 0.05, 0.5), ("fp8-row", 0.2, 2.0), ("fp8-block", 0.2, 2.0)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_learners(recipe, mean, largest, temperature):
    model, engine = make(recipe, max_rows=6)  # 5 prompts x 3 in batches of two prompts, left-padded
    completions = engine.generate(PROMPTS, 3, temperature, 24, seed=1)
    gap = gaps(model, PROMPTS, completions, temperature)
    assert len(gap) > 100
    assert gap.mean() < mean and gap.max() < largest
    wrong = gaps(model, PROMPTS, completions, 0.8)  # the same tokens scored at another temperature
    assert wrong.mean() > 2 * gap.mean() and wrong.mean() > 0.05


def test_eos_is_part_of_the_answer_and_keeps_its_own_log_prob():
    model, engine = make()
    completions = engine.generate(PROMPTS, 16, 1.0, 40, seed=2)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert len(stopped) > 20
    assert all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in stopped)
    learner = learner_logps(model, PROMPTS, completions)
    for c, logps in zip(completions, learner, strict=True):
        assert len(c.logps) == len(c.token_ids)
        assert abs(c.logps[-1] - logps[-1].item()) < 1e-4
    assert min(c.logps[-1] for c in stopped) < -1  # not 0, as of an EOS appended by the framework


def test_log_probs_are_fp32_and_plain_python():
    _, engine = make("bf16")
    c = engine.generate([[3, 4]], 1, 1.0, 8)[0]
    assert all(type(i) is int for i in c.token_ids) and all(type(x) is float for x in c.logps)
    x = torch.tensor(c.logps)
    assert (x.bfloat16().float() != x).any()


def test_per_tensor_scales_stay_finite_with_padded_prompts():
    _, engine = make("fp8-tensor")
    completions = engine.generate(PROMPTS, 2, 1.0, 8)
    assert all(torch.tensor(c.logps).isfinite().all() for c in completions)


# -----------------------------------------------------------------------------
# greedy


def library_greedy(model, prompts, max_tokens):
    """model.generate on each prompt alone."""
    out = []
    for p in prompts:
        ids = torch.tensor([p])
        kwargs = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0}
        out.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs)[0, len(p) :].tolist())
    return out


@pytest.mark.parametrize("max_rows", [1, 2, 256])
def test_greedy_is_the_librarys(max_rows):
    model, engine = make(max_rows=max_rows)
    completions = engine.generate(PROMPTS, 1, 0, 40)
    assert ids_of(completions) == library_greedy(model, PROMPTS, 40)
    assert len(set(map(tuple, ids_of(completions)))) == len(PROMPTS)  # five different answers
    assert gaps(model, PROMPTS, completions).max() < 1e-4  # scored at temperature 1


@pytest.mark.parametrize("max_rows", [1, 256])
def test_sliding_window_layers(max_rows):
    model, engine = make(sliding=6, max_rows=max_rows)
    assert ids_of(engine.generate(PROMPTS, 1, 0, 40)) == library_greedy(model, PROMPTS, 40)
    completions = engine.generate(PROMPTS, 3, 1.0, 30, seed=4)
    assert {c.finish_reason for c in completions} == {"stop", "length"}  # rows left the batch and its cache
    assert gaps(model, PROMPTS, completions).max() < 1e-4


def test_sampling_fields_of_the_generation_config_have_no_effect():
    model, engine = make()
    plain = engine.generate(PROMPTS, 4, 1.0, 20, seed=3), engine.generate(PROMPTS, 1, 0, 20)
    config = model.generation_config
    config.do_sample, config.top_k, config.top_p, config.repetition_penalty, config.temperature = True, 1, 0.1, 1.5, 0.3
    config.min_new_tokens, config.max_new_tokens = 5, 7
    assert (engine.generate(PROMPTS, 4, 1.0, 20, seed=3), engine.generate(PROMPTS, 1, 0, 20)) == plain


# -----------------------------------------------------------------------------
# how an answer ends


def test_finish_reasons():
    _, engine = make()
    completions = engine.generate(PROMPTS, 64, 1.0, 12, seed=2)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        if c.finish_reason == "length":
            assert len(c.token_ids) == 12 and EOS not in c.token_ids
        else:
            assert c.token_ids.index(EOS) == len(c.token_ids) - 1
    assert any(len(c.token_ids) == 12 and c.finish_reason == "stop" for c in completions)  # EOS as the last token allowed


def test_one_token_answers():
    _, engine = make()
    for c in engine.generate(PROMPTS, 16, 1.0, 1, seed=2):
        assert len(c.token_ids) == len(c.logps) == 1
        assert c.finish_reason == ("stop" if c.token_ids == [EOS] else "length")


def test_any_of_several_eos_ids_ends_an_answer():
    model = make_model()
    model.generation_config.eos_token_id = [5, 9]  # chat models: the tokenizer names one, generation_config a list
    assert eos_ids(model, TOKENIZER) == [1, 5, 9]
    engine = make_engine("hf", model, TOKENIZER, "fp32")
    completions = engine.generate(PROMPTS, 16, 1.0, 30, seed=2)
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} == {1, 5, 9}
    assert all(not {1, 5, 9} & set(c.token_ids[:-1]) for c in completions)


def test_eos_id_zero():
    # unwritten output is zero too: an answer that ends by length must not look stopped
    model = make_model()
    model.generation_config.eos_token_id = 0
    completions = make_engine("hf", model, TOKENIZER, "fp32").generate(PROMPTS, 16, 1.0, 6, seed=2)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert all((c.finish_reason == "stop") == (c.token_ids[-1] in (0, 1)) for c in completions)


def test_no_eos_at_all_is_refused():
    model = make_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="EOS"):
        make_engine("hf", model, tokenizer, "fp32")


# -----------------------------------------------------------------------------
# random numbers


def test_same_seed_same_answers_other_seed_other_answers():
    _, engine = make()
    first = engine.generate(PROMPTS, 4, 1.0, 20, seed=7)
    assert engine.generate(PROMPTS, 4, 1.0, 20, seed=7) == first
    assert ids_of(engine.generate(PROMPTS, 4, 1.0, 20, seed=8)) != ids_of(first)


def test_members_of_a_group_and_equal_prompts_differ():
    _, engine = make()
    answers = ids_of(engine.generate([[3, 4], [3, 4]], 8, 1.0, 20, seed=7))
    assert len(set(map(tuple, answers))) > 12  # 16 draws; one per-request seed would give 8 or 1


def test_seeds_of_rows():
    seeds = {row_seed(s, i, j) for s in range(12) for i in range(12) for j in range(12)}
    assert len(seeds) == 12**3  # (1, 23, 4) and (12, 3, 4) are different rows
    assert all(0 <= s < 2**63 for s in seeds)
    assert row_seed(0, 0, 0) == 3882903725285577553  # the same on every machine and in every version
    u = torch.stack([row_uniforms(0, i, j, 50) for i in range(20) for j in range(20)])
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(torch.corrcoef(u).fill_diagonal_(0).mean()) < 0.01
    assert torch.equal(row_uniforms(3, 2, 1, 10), row_uniforms(3, 2, 1, 64)[:10])  # a longer limit, the same beginning


def test_a_row_does_not_depend_on_its_neighbours():
    model, engine = make()
    together = engine.generate(PROMPTS, 4, 1.0, 30, seed=7)
    # the same prompt indices, other prompts around them: much longer, so that the padding changes too
    for k in range(len(PROMPTS)):
        others = [p if i == k else [3, 9] * 12 for i, p in enumerate(PROMPTS)]
        answers = engine.generate(others, 4, 1.0, 30, seed=7)[4 * k : 4 * k + 4]
        assert ids_of(answers) == ids_of(together[4 * k : 4 * k + 4])
    one_by_one = make_engine("hf", model, TOKENIZER, "fp32", 1).generate(PROMPTS, 4, 1.0, 30, seed=7)
    assert ids_of(one_by_one) == ids_of(together)
    fewer = engine.generate(PROMPTS, 2, 1.0, 30, seed=7)
    assert ids_of(fewer) == [a for k in range(len(PROMPTS)) for a in ids_of(together[4 * k : 4 * k + 2])]


def test_a_part_of_the_prompts_gets_the_whole_batchs_answers():
    """What a rank samples that has been given the prompts from number 2 on."""
    _, engine = make()
    whole = engine.generate(PROMPTS, 4, 1.0, 30, seed=7)
    assert ids_of(engine.generate(PROMPTS[2:], 4, 1.0, 30, seed=7, first=2)) == ids_of(whole[8:])
    assert ids_of(engine.generate(PROMPTS[2:], 4, 1.0, 30, seed=7)) != ids_of(whole[8:])


def test_an_own_copy_is_filled_by_sync_and_shares_nothing():
    model, shared = make()
    engine = make_engine("hf", model, TOKENIZER, "fp32", own_copy=True)
    expected = ids_of(shared.generate(PROMPTS, 2, 1.0, 16, seed=1))  # ids: a copy lies elsewhere, which moves last bits
    assert engine.model is not model and ids_of(engine.generate(PROMPTS, 2, 1.0, 16, seed=1)) == expected
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    assert ids_of(engine.generate(PROMPTS, 2, 1.0, 16, seed=1)) == expected  # not before the sync
    engine.sync(model.named_parameters())
    moved = ids_of(shared.generate(PROMPTS, 2, 1.0, 16, seed=1))
    assert ids_of(engine.generate(PROMPTS, 2, 1.0, 16, seed=1)) == moved != expected


def test_global_random_state_is_left_alone():
    _, engine = make()
    before = torch.get_rng_state()
    engine.generate(PROMPTS, 2, 1.0, 8, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_distribution(temperature):
    _, engine = make()
    engine.vocab = 6
    p = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.15, 0.05])
    expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    N = 8000
    uniforms = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logps = engine.sample(p.log().expand(N, 6), temperature, uniforms)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[0] == counts[3] == 0
    some = expected > 0
    chi2 = ((counts - N * expected)[some] ** 2 / (N * expected)[some]).sum()
    assert chi2 < 16.3  # 3 degrees of freedom: exceeded once in a thousand
    torch.testing.assert_close(logps, expected.log()[tokens], atol=1e-5, rtol=0)


def test_sampling_at_the_edges_by_hand():
    # cdf [0, 0.25, 0.25, 1]: ids 0 and 2 have probability zero, whatever the draw
    _, engine = make()
    engine.vocab = 4
    logits = torch.tensor([0.0, 0.25, 0.0, 0.75]).log().expand(5, 4)
    draws = torch.tensor([0.0, 0.2499, 0.2501, 0.75, 1 - 2**-53], dtype=torch.float64)
    tokens, logps = engine.sample(logits, 1.0, draws)
    assert tokens.tolist() == [1, 1, 3, 3, 3]
    torch.testing.assert_close(logps.exp(), torch.tensor([0.25, 0.25, 0.75, 0.75, 0.75]))
    tokens, _ = engine.sample(torch.tensor([[1.0, 1.0, 1.0, -torch.inf]]), 1.0, draws[-1:])
    assert tokens.tolist() == [2]  # the last id has probability zero


def test_the_end_of_a_large_vocabulary_is_sampled_at_its_rate():
    # 150,000 ids, the first with probability 0.99: the others' 6.7e-8 each is one FP32 step of a sum near 1
    _, engine = make()
    V = engine.vocab = 150_000
    tail = 0.01 / (V - 1)
    logits = torch.full((1, V), tail, dtype=torch.float64)
    logits[0, 0] = 0.99
    draws = 1 - (torch.arange(40, 0, -1, dtype=torch.float64) - 0.5) * tail
    tokens, _ = engine.sample(logits.log().float().expand(40, V), 1.0, draws)
    assert tokens.tolist() == list(range(V - 40, V))


def test_ids_without_text_are_never_sampled():
    model, engine = make(vocab=32)  # embeddings padded from 17 to 32
    with torch.no_grad():
        model.model.embed_tokens.weight[17:] *= 3  # and likely ones: tied, so these rows are also the head's
    sampled = engine.generate(PROMPTS, 8, 1.0, 20, seed=1)
    assert max(i for c in sampled for i in c.token_ids) < 17
    assert max(i for c in engine.generate(PROMPTS, 1, 0, 20) for i in c.token_ids) < 17
    assert gaps(model, PROMPTS, sampled).max() < 1e-4  # over the whole vocabulary, as the learner's
    logits = model(input_ids=torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    assert logits[17:].sum() > 0.2


def test_logits_that_are_nan_are_not_sampled_from():
    model, engine = make(vocab=32)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises((UserError, AssertionError, ValueError)):
        engine.generate([[3, 4]], 1, 1.0, 4)


# -----------------------------------------------------------------------------
# the batch and its cache


def test_each_prompt_is_prefilled_once_and_finished_rows_leave():
    model, engine = make(max_rows=256)
    shapes = forward_shapes(model)
    completions = engine.generate(PROMPTS, 8, 1.0, 40, seed=2)
    assert shapes[0] == (5, 9)  # prompts once each, padded to the longest
    rows = [r for r, tokens in shapes[1:] if tokens == 1]
    assert len(rows) == len(shapes) - 1 == max(len(c.token_ids) for c in completions) - 1
    lengths = [len(c.token_ids) for c in completions]
    for t, r in enumerate(rows, 1):  # at step t the batch holds the rows still running, and at most a quarter more
        running = sum(k > t for k in lengths)
        assert running <= r <= max(running / 0.8, 1)
    assert rows[0] > 30 and rows[-1] < rows[0] / 1.5 and sorted(rows, reverse=True) == rows


def test_max_rows_splits_by_length():
    model, engine = make(max_rows=6)
    shapes = forward_shapes(model)
    engine.generate(PROMPTS, 3, 1.0, 4, seed=2)
    assert [s for s in shapes if s[1] > 1 or s == (1, 1)] == [(2, 2), (2, 4), (1, 9)]  # lengths 1, 2 | 3, 4 | 9
    assert max(rows for rows, _ in shapes) <= 6


def test_more_members_than_max_rows():
    model, engine = make(max_rows=4)
    shapes = forward_shapes(model)
    completions = engine.generate(PROMPTS[:2], 10, 1.0, 6, seed=2)
    assert ids_of(completions) == ids_of(make()[1].generate(PROMPTS[:2], 10, 1.0, 6, seed=2))
    assert max(rows for rows, _ in shapes) <= 4  # "sequences decoded at once"


def test_prompts_of_one_length_run_without_a_mask():
    model, engine = make()
    masks = []
    model.register_forward_pre_hook(lambda m, a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    prompts = [[3, 4, 5], [6, 7, 8]]
    completions = engine.generate(prompts, 4, 1.0, 12, seed=1)
    assert len(masks) > 5 and all(m is None for m in masks)
    assert gaps(model, prompts, completions).max() < 1e-4


def test_growing_layer_equals_dynamic_cache():
    config = make_model().config
    ours, library = rollout.make_cache(config), DynamicCache(config=config)
    assert all(type(layer) is GrowingLayer for layer in ours.layers)
    generator = torch.Generator().manual_seed(0)
    B, keep = 3, {0: [0, 0, 1, 2], 3: [3, 1], 20: [1, 0, 0], 21: [1]}
    for t, tokens in enumerate([5, 1, 1, 40, 1, 90, *[1] * 30]):
        k, v = torch.randn(2, B, 1, tokens, 16, generator=generator)
        for layer in range(2):
            got, want = ours.update(k + layer, v - layer, layer), library.update(k + layer, v - layer, layer)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert ours.get_seq_length() == library.get_seq_length()
        assert ours.get_mask_sizes(1, 0) == library.get_mask_sizes(1, 0)
        if t in keep:  # repeated, dropped, reordered, twice in a row; growth follows each
            rows = torch.tensor(keep[t])
            rollout.select_rows(ours, rows)
            library.batch_select_indices(rows)
            B = len(rows)
            assert ours.get_seq_length() == library.get_seq_length()


def test_growing_layer_writes_in_place():
    layer = GrowingLayer()
    layer.update(*torch.randn(2, 2, 1, 10, 4))
    layer.update(*torch.randn(2, 2, 1, 1, 4))
    addresses = set()
    for _ in range(20):
        keys, _ = layer.update(*torch.randn(2, 2, 1, 1, 4))
        addresses.add(keys.data_ptr())
    assert len(addresses) == 1


def test_weights_are_quantised_at_most_once(monkeypatch):
    model, engine = make("fp8-row")
    layers = precision.converted_layers(model)
    weights = {tuple(layer.weight.shape) for layer in layers}
    engine.sync(model.named_parameters())
    made, original = [], fp8.make_operand
    monkeypatch.setattr(fp8, "make_operand", lambda x, *args: made.append(tuple(x.shape)) or original(x, *args))
    completions = engine.generate([[3, 4, 5], [6, 7]], 1, 0, 30)
    assert max(len(c.token_ids) for c in completions) > 10
    weight_calls = Counter(s for s in made if s in weights)
    # activations of the prefill have (2 x 3) or 2 or 1 rows, never a weight's shape
    assert weight_calls == Counter(tuple(layer.weight.shape) for layer in layers)


# -----------------------------------------------------------------------------
# refusals


def test_prompts_that_do_not_fit():
    _, engine = make()  # a context of 128
    assert len(engine.generate([[3] * 120], 1, 1.0, 8)) == 1
    with pytest.raises(UserError, match="prompt 1 has 121 tokens; the model takes 1 to 120 with --max-tokens 8"):
        engine.generate([[3], [3] * 121], 1, 1.0, 8)
    with pytest.raises(UserError, match="prompt 1 has 0 tokens") as error:
        engine.generate([[3], []], 1, 1.0, 8)
    assert "\n" not in str(error.value)


def test_a_limit_longer_than_the_context_is_not_called_the_prompts_fault():
    _, engine = make()
    with pytest.raises(UserError) as error:
        engine.generate([[3, 4]], 1, 1.0, 300)
    assert "1 to -" not in str(error.value)  # "the model takes 1 to -172" helps nobody


def test_no_prompts_give_no_completions():
    assert make()[1].generate([], 4, 1.0, 8) == []


def test_unknown_engines_and_recipes_are_refused():
    with pytest.raises(UserError, match="is not one of hf, vllm"):
        make_engine("sglang", make_model(), TOKENIZER, "fp32")
    with pytest.raises(UserError, match="fp9"):
        make_engine("hf", make_model(), TOKENIZER, "fp9")


# -----------------------------------------------------------------------------
# weights


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8-row", "fp8-block"])
def test_sync_with_shared_weights(recipe):
    model, engine = make(recipe)
    assert engine.model is model
    before = engine.generate(PROMPTS, 2, 1.0, 16, seed=1)
    print_before = engine.sync(model.named_parameters())
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model)
    print_after = engine.sync(model.named_parameters())
    after = engine.generate(PROMPTS, 2, 1.0, 16, seed=1)
    assert ids_of(after) != ids_of(before) and print_after != print_before
    fresh = make_model(recipe)
    fresh.load_state_dict(model.state_dict())
    assert make_engine("hf", fresh, TOKENIZER, recipe).generate(PROMPTS, 2, 1.0, 16, seed=1) == after
    for name, p in model.named_parameters():
        p.data.copy_(saved[name])
    assert engine.sync(model.named_parameters()) == print_before
    assert engine.generate(PROMPTS, 2, 1.0, 16, seed=1) == before


def test_sync_drops_quantised_copies():
    model, engine = make("fp8-row")
    before = engine.generate([[3, 4]], 2, 1.0, 16, seed=1)
    for layer in precision.converted_layers(model):
        layer.weight.data.mul_(torch.linspace(0.5, 1.5, layer.weight.shape[1]))  # unseen by any counter
    engine.sync(model.named_parameters())
    assert engine.generate([[3, 4]], 2, 1.0, 16, seed=1) != before


def test_sync_takes_weights_that_are_not_the_engines_own():
    # a checkpoint's, or a reference model's: same names, other tensors
    _, engine = make()
    other = make_model(seed=3)
    print_sent = fingerprint(other.named_parameters())
    assert engine.sync(other.named_parameters()) == print_sent
    expected = make_engine("hf", other, TOKENIZER, "fp32").generate(PROMPTS, 1, 0, 12)
    assert ids_of(engine.generate(PROMPTS, 1, 0, 12)) == ids_of(expected)


PAIRS = [("bf16", "fp8-row"), ("fp8-row", "bf16"), ("fp8-block", "fp8-row"), ("bf16", "fp32")]


@pytest.mark.parametrize("learner, sampler", PAIRS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_in_another_precision_equals_a_freshly_converted_model(learner, sampler, tied):
    model = make_model(learner, tied=tied)
    precision.Masters(model)  # its hooks on the learner's parameters must not come along
    token_logps(model, collate([[3]], [[4]], 0))[0].sum().backward()
    model.zero_grad()
    engine = make_engine("hf", model, TOKENIZER, sampler)
    assert engine.model is not model and model.precision_recipe == learner
    assert not any(p.requires_grad for p in engine.model.parameters())
    first = engine.sync(model.named_parameters())
    before = engine.generate(PROMPTS, 2, 1.0, 16, seed=1)
    step(model)
    assert ids_of(engine.generate(PROMPTS, 2, 1.0, 16, seed=1)) == ids_of(before)  # not before sync
    assert engine.sync(model.named_parameters()) != first
    after = engine.generate(PROMPTS, 2, 1.0, 16, seed=1)
    assert ids_of(after) != ids_of(before)
    fresh = make_model(sampler, tied=tied)
    fresh.load_state_dict(model.state_dict())
    expected = make_engine("hf", fresh, TOKENIZER, sampler).generate(PROMPTS, 2, 1.0, 16, seed=1)
    assert ids_of(expected) == ids_of(after)
    for c, want in zip(after, expected, strict=True):  # one ulp here and there, by the alignment of memory
        torch.testing.assert_close(torch.tensor(c.logps), torch.tensor(want.logps), atol=1e-5, rtol=0)
    learner_engine = make_engine("hf", model, TOKENIZER, learner)
    assert learner_engine.model is model and learner_engine.generate(PROMPTS, 2, 1.0, 16, seed=1) != after


def test_a_copy_keeps_rope_frequencies_in_fp32():
    # rounded to BF16 a frequency is up to 0.2 % off: at position 500 up to 0.2 radian
    engine = make_engine("hf", make_model("bf16"), TOKENIZER, "fp8-row")
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_copy_of_a_converted_learner_has_no_quantiser_left():
    engine = make_engine("hf", make_model("fp8-row"), TOKENIZER, "bf16")
    assert precision.converted_layers(engine.model) == []


@pytest.mark.parametrize("sampler", ["bf16", "fp8-row"])
def test_quantiser_settings_reach_a_copy(sampler):
    engine = make_engine("hf", make_model("fp32"), TOKENIZER, sampler, power_of_two=True, keep_bf16="first:1")
    layers = precision.converted_layers(engine.model)
    assert len(layers) == (7 if sampler == "fp8-row" else 0)  # the second of two layers: q, k, v, o, gate, up, down
    assert all(layer.power_of_two for layer in layers)


def test_tied_embeddings_after_sync():
    model = make_model("bf16", tied=True)
    engine = make_engine("hf", model, TOKENIZER, "fp32")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    engine.sync(model.named_parameters())
    inner = engine.model
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    assert torch.equal(inner.lm_head.weight, model.lm_head.weight.float())


@pytest.mark.parametrize("sampler", ["bf16", "fp8-row"])
def test_unknown_or_missing_names_are_refused_and_nothing_is_changed(sampler):
    model = make_model("bf16")
    engine = make_engine("hf", model, TOKENIZER, sampler)
    before = fingerprint(engine.model.named_parameters())
    doubled = [(name, 2 * p.detach()) for name, p in model.named_parameters()]
    for sent in (
        doubled[:-1],
        doubled + [("model.extra.weight", torch.zeros(1))],
        [(f"_orig_mod.{name}", w) for name, w in doubled],
    ):
        with pytest.raises(UserError, match=f"{len(sent)} names sent, {len(doubled)} expected"):
            engine.sync(sent)
    assert fingerprint(engine.model.named_parameters()) == before


def test_a_weight_of_another_shape_is_refused():
    model = make_model("bf16")
    engine = make_engine("hf", model, TOKENIZER, "fp8-row")
    sent = {name: p.detach() for name, p in model.named_parameters()}
    sent["model.norm.weight"] = torch.ones(1)  # would broadcast
    with pytest.raises((UserError, RuntimeError)):
        engine.sync(sent.items())


def test_fingerprint():
    named = [(f"w{i}", torch.full((2,), float(i) - 3)) for i in range(4)]
    assert fingerprint(named)["w1"] == (-4.0, 4.0)
    for size in (1, 7, 8, 15, 46, 310):
        assert 1 <= len(fingerprint([(str(i), torch.ones(1)) for i in range(size)])) <= 8
    model = make_model("bf16")
    first = fingerprint(model.named_parameters())
    step(model, lr=1e-3)
    second = fingerprint(model.named_parameters())
    assert first.keys() == second.keys() and sum(first[name] != second[name] for name in first) >= 3  # norms near 1 stay


def test_the_same_prompt_after_a_step_uses_no_old_cache():
    model, engine = make()
    first = engine.generate([[3, 4, 5]], 1, 1.0, 1, seed=1)[0]
    step(model)
    engine.sync(model.named_parameters())
    second = engine.generate([[3, 4, 5]], 1, 1.0, 1, seed=1)[0]
    assert second.logps != first.logps
    assert gaps(model, [[3, 4, 5]], [second]).max() < 1e-4


def test_the_learner_can_train_after_sampling():
    # sampling runs without gradients; it must leave no inference tensors behind in the learner
    model, engine = make("fp8-row")
    completions = engine.generate(PROMPTS, 1, 1.0, 8, seed=1)
    logps, _ = token_logps(model, collate(PROMPTS, ids_of(completions), 0))
    logps.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_sleep_wake_close():
    model, engine = make()
    before = engine.generate(PROMPTS, 1, 1.0, 8, seed=1)
    engine.sleep()
    engine.wake()
    assert engine.generate(PROMPTS, 1, 1.0, 8, seed=1) == before
    engine.close()
    assert model(input_ids=torch.tensor([[3]])).logits.isfinite().all()  # the learner is not the engine's to destroy


def test_a_copy_does_not_touch_the_learner():
    model = make_model("bf16")
    before = copy.deepcopy(model.state_dict())
    make_engine("hf", model, TOKENIZER, "fp8-row").generate(PROMPTS, 1, 1.0, 4)
    assert precision.converted_layers(model) == [] and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(w, before[name]) and w.dtype == torch.bfloat16 for name, w in model.state_dict().items())
