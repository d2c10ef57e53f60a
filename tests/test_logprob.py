"""Chunked log-probs against log_softmax over full logits, entropies, masks, gradients, memory; micro-batches.

    python -m pytest tests/test_logprob.py
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import logprob
import precision
from logprob import chunk_logps, collate, micro_batches, token_logps

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [5], [4, 4, 9, 3]]
RESPONSES = [[5, 7, 1], [8, 2, 13, 4, 9, 1], [12, 3, 3, 8], []]
PAD = 0


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine: threads that wait for each other cost six times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype=torch.float32, tied=False, vocab=40):
    """Two layers, weights large enough that the next-token distributions are far from uniform."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=tied)).eval()
    for p in model.parameters():
        p.data = p.data.to(dtype)  # not model.to(dtype): RoPE frequencies stay in FP32, as from_pretrained leaves them
    return model


def reference(model, prompts, responses, temperature=1.0):
    """Per row, one sequence at a time: log-probs and entropies of the response from the full logits."""
    rows = []
    for p, r in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([p + r])).logits[0].float() / temperature
        logp = logits.log_softmax(-1)[len(p) - 1 : len(p) + len(r) - 1]
        rows.append((logp[torch.arange(len(r)), r], -(logp.exp() * logp).sum(-1)))
    return rows


def head_inputs(model):
    """A list that fills with the shapes of what goes through the output head."""
    shapes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    return shapes


# -----------------------------------------------------------------------------
# values


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_log_softmax_over_full_logits(temperature, tied):
    model = make_model(tied=tied)
    with torch.no_grad():
        logps, entropies = token_logps(model, collate(PROMPTS, RESPONSES, PAD), temperature)
        expected = reference(model, PROMPTS, RESPONSES, temperature)
    assert logps.shape == entropies.shape == (4, 6)
    assert logps.dtype == entropies.dtype == torch.float32
    for i, (logp, entropy) in enumerate(expected):
        k = len(RESPONSES[i])
        torch.testing.assert_close(logps[i, :k], logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies[i, :k], entropy, atol=1e-5, rtol=0)
        assert (logps[i, k:] == 0).all() and (entropies[i, k:] == 0).all()
    assert logps.min() < -4  # far from uniform, log 40 = 3.69: a wrong row or position would show


def test_temperature_by_hand():
    # logits [2, 0] at T = 0.5 are [4, 0]: log p_0 = -log(1 + e^-4) = -0.018150, log p_1 = -4.018150
    head = nn.Linear(2, 2, bias=False)
    head.weight.data = torch.eye(2)
    logp, entropy = chunk_logps(head, torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), 0.5)
    torch.testing.assert_close(logp, torch.tensor([-0.018150, -4.018150]), atol=1e-5, rtol=0)
    p = 1 / (1 + math.exp(-4))
    torch.testing.assert_close(entropy, torch.full((2,), -p * math.log(p) - (1 - p) * math.log(1 - p)), atol=1e-6, rtol=0)


def test_temperature_is_applied_once_on_the_whole_path():
    # T = 0.7 is one division: the same as a head whose weights are divided by 0.7, at T = 1
    model, divided = make_model(), make_model()
    divided.lm_head.weight.data /= 0.7
    batch = collate(PROMPTS, RESPONSES, PAD)
    torch.testing.assert_close(token_logps(model, batch, 0.7)[0], token_logps(divided, batch)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_entropy_of_uniform_logits_does_not_depend_on_length(length):
    model = make_model(vocab=4)
    model.lm_head.weight.data.zero_()
    logps, entropies = token_logps(model, collate([[1, 2], [3]], [[2] * length, [1]], PAD))
    torch.testing.assert_close(entropies[0], torch.full((length,), 1.3863), atol=1e-4, rtol=0)
    torch.testing.assert_close(logps[0], torch.full((length,), -1.3863), atol=1e-4, rtol=0)


def test_entropy_with_a_token_of_probability_zero():
    head = nn.Linear(3, 3, bias=True)
    head.weight.data.zero_()
    head.bias.data = torch.tensor([0.0, 0.0, -torch.inf])
    logp, entropy = chunk_logps(head, torch.zeros(1, 3), torch.tensor([1]), 1.0)
    torch.testing.assert_close((logp, entropy), (torch.tensor([-math.log(2)]), torch.tensor([math.log(2)])))


def test_a_row_alone_and_in_a_padded_batch():
    model = make_model()
    logps, entropies = token_logps(model, collate(PROMPTS, RESPONSES, PAD))
    for i in range(3):
        alone, entropy = token_logps(model, collate([PROMPTS[i]], [RESPONSES[i]], PAD))
        torch.testing.assert_close(logps[i, : alone.shape[1]], alone[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies[i, : alone.shape[1]], entropy[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad", [0, 1, 39])
def test_the_pad_id_does_not_matter(pad):
    model = make_model()
    first, second = (token_logps(model, collate(PROMPTS, RESPONSES, p))[0] for p in (7, pad))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-row", "fp8-block", "fp8-tensor"])
def test_two_passes_of_a_bf16_model_are_exactly_equal(recipe):
    model = make_model(torch.bfloat16)
    precision.convert(model, recipe)
    batch = collate(PROMPTS, RESPONSES, PAD)
    with torch.no_grad():
        old, _ = token_logps(model, batch, 0.6)
    new, _ = token_logps(model, batch, 0.6)
    assert new.requires_grad and torch.equal(old, new)
    assert ((new - old).exp() == 1).all()  # the first step's ratio


def test_log_probs_of_a_bf16_model_are_not_rounded_to_bf16():
    model = make_model(torch.bfloat16)
    logps, entropies = token_logps(model, collate(PROMPTS, RESPONSES, PAD))
    assert logps.dtype == entropies.dtype == torch.float32
    for x in (logps, entropies):  # 13 response tokens: FP32 values that all happen to be BF16 numbers are a rounding
        assert (x.bfloat16().float() != x).sum() > 8


# -----------------------------------------------------------------------------
# batches


def test_collate_by_hand():
    batch = collate([[2, 3], [4]], [[5], [6, 7, 8]], pad_id=9)
    assert batch.input_ids.tolist() == [[2, 3, 5, 9], [4, 6, 7, 8]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.targets.tolist() == [[5, 9, 9], [6, 7, 8]]
    assert batch.at[0, 0] == 1 and batch.at[1].tolist() == [0, 1, 2]
    assert batch.at.max() < 4


@pytest.mark.parametrize("pad", [0, 1])
def test_mask_comes_from_lengths_where_pad_is_eos(pad):
    # the sampled EOS (1) is trained, the padding after it is not, also where the pad id is 1
    batch = collate([[3], [3]], [[5, 7, 1], [5, 7, 8, 9, 4]], pad)
    assert batch.mask.tolist() == [[True, True, True, False, False], [True] * 5]
    batch = collate([[3], [3]], [[pad, 1, pad], [pad] * 5], pad)  # even where a sampled id is the pad id
    assert batch.mask.sum(1).tolist() == [3, 5]


def test_collate_refuses_an_empty_prompt():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        collate([[1], []], [[1], [1]], PAD)


def test_collate_refuses_lists_of_different_lengths():
    with pytest.raises(ValueError):
        collate([[1], [2]], [[1]], PAD)


# -----------------------------------------------------------------------------
# gradients


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weighted(logps):
    """A loss in which every token has its own weight."""
    return (logps * torch.linspace(-1, 2, logps.numel()).reshape(logps.shape)).sum()


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_gradients_equal_a_plain_reference_however_chunked(monkeypatch, tokens_per_chunk):
    model = make_model(tied=True)
    rows = [torch.cat([logp, logp.new_zeros(6 - len(logp))]) for logp, _ in reference(model, PROMPTS, RESPONSES, 0.8)]
    expected = gradients(model, weighted(torch.stack(rows)))
    monkeypatch.setattr(logprob, "CHUNK", tokens_per_chunk * 40)
    logps, entropies = token_logps(model, collate(PROMPTS, RESPONSES, PAD), 0.8)
    assert not entropies.requires_grad
    grads = gradients(model, weighted(logps))
    assert grads.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], atol=2e-5, rtol=1e-4, msg=name)


def test_an_all_empty_batch_has_zero_loss_and_zero_gradients():
    model = make_model()
    logps, entropies = token_logps(model, collate([[3, 4], [5]], [[], []], PAD))
    assert logps.shape == entropies.shape == (2, 1)
    assert (logps == 0).all() and (entropies == 0).all()
    grads = gradients(model, logps.sum())
    assert "model.layers.0.mlp.up_proj.weight" in grads  # every rank takes part in a sharded backward
    assert all((g == 0).all() for g in grads.values())


# -----------------------------------------------------------------------------
# memory


@pytest.mark.parametrize("grad", [False, True])
def test_only_response_tokens_go_through_the_head_and_in_chunks(monkeypatch, grad):
    model = make_model()
    seen = head_inputs(model)
    monkeypatch.setattr(logprob, "CHUNK", 4 * 40 + 39)  # room for four tokens of 40 logits, not five
    with torch.set_grad_enabled(grad):
        logps, _ = token_logps(model, collate(PROMPTS, RESPONSES, PAD))
    chunks = [(4, 32), (4, 32), (4, 32), (1, 32)]  # 3 + 6 + 4 + 0 response tokens
    assert seen == chunks
    if grad:
        logps.sum().backward()
        assert sorted(seen[4:]) == sorted(chunks)  # recomputed in backward, once each


def test_no_logits_are_kept_for_backward(monkeypatch):
    model = make_model(vocab=1000)
    monkeypatch.setattr(logprob, "CHUNK", 2000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        token_logps(model, collate(PROMPTS, RESPONSES, PAD))
    assert len(saved) > 20
    assert not [s for s in saved if s[-1:] == (1000,)]


# -----------------------------------------------------------------------------
# models that are not a linear head over hidden states


def test_softcapping_and_logit_scaling_are_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=30.0))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        token_logps(model, collate([[3]], [[4]], PAD))
    model = make_model()
    for name in ("logits_scaling", "logit_scale"):
        setattr(model.config, name, 8.0)
        with pytest.raises(ValueError, match=name):
            token_logps(model, collate([[3]], [[4]], PAD))
        setattr(model.config, name, 1.0)
    assert token_logps(model, collate([[3]], [[4]], PAD))[0] < 0


# -----------------------------------------------------------------------------
# micro-batches


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches(lengths, budget):
    groups = micro_batches(lengths, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for g in groups:
        assert g and (len(g) == 1 or max(lengths[i] for i in g) * len(g) <= budget)
    assert groups == micro_batches(list(lengths), budget)
    flat = [lengths[i] for g in groups for i in g]
    assert flat == sorted(lengths, reverse=True)


def test_micro_batches_by_hand():
    assert micro_batches([10, 3, 12, 10, 2], 24) == [[2, 0], [3, 1], [4]]
    # 12 x 2 = 24 fits and 12 x 3 does not; 10 x 2 fits and 10 x 3 does not
    assert micro_batches([30, 5], 24) == [[0], [1]]
    assert micro_batches([4] * 6, 24) == [[0, 1, 2, 3, 4, 5]]
    assert micro_batches([], 24) == []
