"""Log-probs of sampled tokens under the learner, in FP32, from chunks of tokens: the whole (B, T, V) tensor is never built.

    logp_t = log_softmax(logits_t / temperature)[y_t]          entropy_t = -sum_v p_v log p_v, at the same temperature

`collate` right-pads prompt + response; with causal attention the padding cannot reach a real token, so no attention mask is
needed, positions start at 0 in every row, and a row's values do not depend on how it was padded. Masks come from lengths,
never from pad or EOS ids: a sampled EOS is trained, padding is not, even where pad == EOS.

The temperature is the sampler's: learner and sampler must describe the same distribution. The hidden states of the response
tokens alone go through the head, `CHUNK` logits at a time, recomputed in backward: a few FP32 copies of 64 MB at the peak
(about 275 MB measured), whatever B and T.
"""

from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from errors import UserError

CHUNK = 2**24  # logits alive at once


class Batch(NamedTuple):
    """Sequences padded to a rectangle. input_ids (B, L) prompt + response; at (B, T) index of the hidden state that predicts
    each response token; targets (B, T) response ids; mask (B, T) bool, True on response tokens. T: longest response."""

    input_ids: torch.Tensor
    at: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


def collate(prompts, responses, pad_id, device="cpu"):
    """Batch from lists of token ids; a prompt has at least one token, a response may be empty (its row is fully masked)."""
    L = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    T = max(1, max(len(r) for r in responses))
    input_ids = torch.full((len(prompts), L), pad_id)
    targets = torch.full((len(prompts), T), pad_id)
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        if not p:
            raise ValueError(f"prompt {i} is empty: the first response token has nothing to be predicted from")
        input_ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        targets[i, : len(r)] = torch.tensor(r, dtype=torch.long)
    lengths = torch.tensor([len(r) for r in responses])
    mask = torch.arange(T) < lengths[:, None]
    starts = torch.tensor([len(p) - 1 for p in prompts])
    at = (starts[:, None] + torch.arange(T)).clamp(max=L - 1)
    return Batch(*(x.to(device) for x in (input_ids, at, targets, mask)))


def check_head(model):
    """Raise UserError for a model whose head does more than a linear map: hidden states go straight through it here."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UserError(f"--model: its config sets {name}, which chunked log-probs do not apply; use another model")


def token_logps(model, batch, temperature=1.0):
    """Log-probs and entropies of the response tokens: two (B, T) FP32 tensors, 0 where the mask is False.

    Gradients flow into the log-probs when enabled; the entropy is detached. Raises UserError as `check_head`.
    """
    return model.score(batch, temperature) if isinstance(model, FSDPModule) else score(model, batch, temperature)


def score(model, batch, temperature=1.0):
    """`token_logps` of a whole model; parallel.shard makes it a method of a sharded one."""
    check_head(model)
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # (B, L, H)
    rows = torch.arange(len(hidden), device=hidden.device)[:, None].expand_as(batch.at)
    hidden, targets = hidden[rows[batch.mask], batch.at[batch.mask]], batch.targets[batch.mask]  # (tokens, H), (tokens,)
    head = model.get_output_embeddings()
    step = max(1, CHUNK // head.weight.shape[0])
    logps, entropies = [], []
    for h, y in zip(hidden.split(step), targets.split(step), strict=True):
        logp, entropy = (
            checkpoint(chunk_logps, head, h, y, temperature, use_reentrant=False)
            if torch.is_grad_enabled()
            else chunk_logps(head, h, y, temperature)
        )
        logps.append(logp)
        entropies.append(entropy)
    zeros = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
    return zeros.masked_scatter(batch.mask, torch.cat(logps)), zeros.masked_scatter(batch.mask, torch.cat(entropies))


def log_softmax(logits, temperature, head):
    """FP32 log-probs, the learner's and the transformers engine's; summed in FP64 and rounded once if exact.py has the head."""
    wide = torch.float64 if getattr(head, "exact", False) else None
    return torch.log_softmax(logits.float() / temperature, dim=-1, dtype=wide).float()


def chunk_logps(head, h, y, temperature):
    """(n,) log-probs of y and (n,) entropies for hidden states h (n, H)."""
    logp = log_softmax(head(h), temperature, head)
    chosen = logp.gather(-1, y[:, None]).squeeze(-1)  # first: a recomputation in backward stops here
    with torch.no_grad():
        entropy = torch.special.entr(logp.exp()).sum(-1)  # 0 log 0 = 0, NaN stays
    return chosen, entropy


def micro_batches(lengths, max_tokens):
    """Split sequences into micro-batches of at most `max_tokens` padded tokens each (a longer sequence stands alone), sorted by
    length so that little is padding. lengths: tokens per sequence; returns lists of indices, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = []
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
