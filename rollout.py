"""Sampling: the engines' interface and the transformers engine (vLLM: vllm_engine.py). Text is never tokenised twice.

    engine = make_engine("hf", model, tokenizer, recipe="fp8-row")
    completions = engine.generate(prompt_ids, n=8, temperature=1.0, max_tokens=256, seed=step)   # flat, n per prompt, in order
    fingerprint = engine.sync(named_weights)      # after every optimiser step, before the next generate
    engine.sleep(); engine.wake(); engine.close()

A `Completion` holds the sampled ids (with the EOS if one was sampled), each token's own log-prob, and how it ended: `stop` at
one of the EOS ids, `length` at max_tokens. Log-probs are FP32 and *processed*: of the distribution sampled from, temperature
applied, over the whole vocabulary (top-p and top-k would renormalise it and are not offered in training).

HFEngine runs a transformers module: the learner's own, quantised layers and all, when both sides use one recipe, else a
converted copy that `sync` fills. Per call: prompts sorted by length and left-padded, each prompt's KV computed once and
repeated n times, one token per row and step, finished rows dropped from the batch and the cache. Random numbers: row (prompt
i, member j) draws its uniforms from its own generator seeded by (seed, i, j) and samples by the inverse CDF, so members of a
group differ, a call is reproducible, and a row's draws do not depend on its neighbours (its logits may, by rounding, and with
fp8-tensor scales).

`python bench.py rollout` measures it against `model.generate`.
"""

import copy
import hashlib
from collections import Counter
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicCache, DynamicLayer

import exact
import parallel
import precision
from errors import UserError
from logprob import log_softmax


class Completion(NamedTuple):
    """One sampled answer: ids (EOS included), FP32 log-prob of each id under the sampler, "stop" or "length"."""

    token_ids: list
    logps: list
    finish_reason: str


def make_engine(kind, model, tokenizer, recipe, max_rows=256, kernels="aligned", own_copy=False, **convert_kwargs):
    """An engine that samples from `model` (a transformers module, converted or not) in precision `recipe`.

    kind       "hf": HFEngine below; "vllm": vllm_engine.VLLMEngine, to be filled by `sync` before the first generate
    max_rows   sequences decoded at once; kernels: aligned | native, of the vLLM engine; exact: exact.py's, of the hf engine,
               applied to the module sampled from, the learner's own where both sides use one recipe
    own_copy   of the hf engine: sample from a copy in any case, since the learner's module is about to be sharded
    convert_kwargs: device: where it runs, if not where the model is; precision.convert's, for a copy that has to be
               converted; dtype: of what is not quantised, by default the
               recipe's; the vLLM engine's own arguments
    """
    if kernels == "exact" and kind != "hf":
        raise UserError(f"--rollout-kernels exact is the transformers engine's, not --engine {kind}'s; it needs --engine hf")
    if kind == "hf":
        engine = HFEngine(model, tokenizer, recipe, max_rows, own_copy=own_copy, **convert_kwargs)
        if kernels == "exact":
            exact.apply(engine.model)
        return engine
    if kind == "vllm":
        from vllm_engine import VLLMEngine  # here: importing vLLM takes seconds

        return VLLMEngine(model, tokenizer, recipe, max_rows, kernels, **convert_kwargs)
    raise UserError(f"--engine {kind!r} is not one of hf, vllm")


def eos_ids(model, tokenizer):
    """Every id that ends an answer: the tokenizer's and those of generation_config (chat models have several)."""
    ids = {tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        value = config.eos_token_id
        ids.update(value if isinstance(value, list) else [value])
    ids.discard(None)
    if not ids:
        raise UserError("the tokenizer and the model name no EOS token; set eos_token in the tokenizer's folder")
    return sorted(ids)


def check_prompts(prompt_ids, max_tokens, limit):
    """Raise UserError on an empty prompt or one that leaves no room for max_tokens in a context of `limit` (or None)."""
    if limit and max_tokens >= limit:
        raise UserError(f"--max-tokens {max_tokens} leaves no room for a prompt: the model's context is {limit} tokens")
    for i, ids in enumerate(prompt_ids):
        if not ids or (limit and len(ids) + max_tokens > limit):
            room = f"1 to {limit - max_tokens} with --max-tokens {max_tokens}" if limit else "at least 1"
            raise UserError(f"prompt {i} has {len(ids)} tokens; the model takes {room}")


def fingerprint(named_weights, count=8):
    """Sum and absolute sum (float64) of up to `count` tensors spread over the model: cheap, and different after a step."""
    named = list(named_weights)
    chosen = named[:: -(-len(named) // count) or 1]
    return {name: (w.double().sum().item(), w.double().abs().sum().item()) for name, w in chosen}


def row_seed(seed, prompt, member):
    """A 63-bit seed from (seed, prompt, member): well mixed, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {prompt} {member}".encode(), digest_size=8).digest(), "big") >> 1


def row_uniforms(seed, prompt, member, count):
    """(count,) FP64 uniforms in [0, 1) of one row, from its own generator."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(row_seed(seed, prompt, member)))


def nucleus(logp, top_p):
    """Log-probs of the fewest ids whose probability reaches top_p, renormalised; -inf for the others. Evaluation only."""
    probs, order = logp.double().exp_().sort(dim=-1, descending=True, stable=True)
    drop = probs.cumsum(-1) - probs >= top_p  # the ids before it are enough; the likeliest always stays
    return torch.log_softmax(logp.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf), dim=-1)


class GrowingLayer(DynamicLayer):
    """A KV cache layer written in place into a buffer that doubles, where DynamicLayer copies all of it at every token."""

    def lazy_initialization(self, key_states, value_states):
        super().lazy_initialization(key_states, value_states)
        self.length, self.buffers = 0, [key_states[:, :, :0], value_states[:, :, :0]]

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        for i, states in enumerate((key_states, value_states)):
            if end > self.buffers[i].shape[2]:
                B, H, _, D = states.shape
                grown = states.new_empty(B, H, max(2 * self.buffers[i].shape[2], end + 32), D)
                grown[:, :, : self.length] = self.buffers[i][:, :, : self.length]
                self.buffers[i] = grown
            self.buffers[i][:, :, self.length : end] = states
        self.length = end
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        return self.keys, self.values

    def select(self, rows):
        """Keep (or repeat) batch rows."""
        self.buffers = [b[:, :, : self.length].index_select(0, rows) for b in self.buffers]
        self.keys, self.values = self.buffers


def make_cache(config):
    """A DynamicCache whose full-attention layers grow in place; sliding-window layers stay the library's."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def select_rows(cache, rows):
    for layer in cache.layers:
        layer.select(rows) if isinstance(layer, GrowingLayer) else layer.batch_select_indices(rows)


class HFEngine:
    """Batched sampling on a transformers module; see the module docstring."""

    def __init__(self, model, tokenizer, recipe, max_rows=256, dtype=None, own_copy=False, device=None, **convert_kwargs):
        self.model = model
        if own_copy or getattr(model, "precision_recipe", None) != recipe:
            self.model = copy.deepcopy(model).requires_grad_(False)
            for p in self.model.parameters():  # parameters alone: RoPE's buffer stays FP32, as from_pretrained leaves it
                p.data = p.data.to(dtype or precision.recipe_of(recipe)["dtype"])
            self.model.to(device or model.device)
            precision.convert(self.model, recipe, **convert_kwargs)
        self.max_rows = max_rows
        self.eos = eos_ids(model, tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos[0]
        self.vocab = len(tokenizer)  # ids past it (padded embeddings) have no text: they are never sampled

    @torch.no_grad()
    def generate(self, prompt_ids, n=1, temperature=1.0, max_tokens=64, seed=0, progress=False, top_p=1.0, first=0):
        """Sample n completions per prompt: a flat list of Completion, n per prompt, in the order of the prompts.

        prompt_ids   list of lists of token ids, none empty; temperature > 0, or 0 for greedy (log-probs then at temperature 1)
        max_tokens   at most so many sampled tokens; seed: see row_seed; progress: a bar over sampled sequences
        first        number of the first prompt, which seeds its draws: a rank that samples a part gets the batch's answers
        Raises UserError on an empty prompt or one that leaves no room in the model's context.
        """
        check_prompts(prompt_ids, max_tokens, getattr(self.model.config.get_text_config(), "max_position_embeddings", None))
        assert not self.model.training, "the sampler's module must be in eval mode: dropout would make the log-probs noise"
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        members = [(i, j) for i in order for j in range(n)]
        done = [None] * (len(prompt_ids) * n)
        with tqdm(total=len(done), desc="sampling", leave=False, disable=None if progress else True) as bar:
            for k in range(0, len(members), self.max_rows):
                batch = members[k : k + self.max_rows]
                completions = self.generate_batch(prompt_ids, batch, temperature, max_tokens, seed, bar, top_p, first)
                for (i, j), completion in zip(batch, completions, strict=True):
                    done[i * n + j] = completion
        return done

    def generate_batch(self, prompt_ids, members, temperature, max_tokens, seed, bar, top_p=1.0, first=0):
        """One Completion for each (prompt, member) of `members`, sampled together; a prompt's members are adjacent."""
        device = self.model.device
        uniforms = torch.stack([row_uniforms(seed, first + i, j, max_tokens) for i, j in members]).to(device)
        counts = Counter(i for i, _ in members)  # in order of first appearance
        logits, cache, mask = self.prefill([prompt_ids[i] for i in counts], torch.tensor(list(counts.values()), device=device))
        positions = mask.sum(1)  # (rows,) position of the next token
        mask = mask if not mask.all() else None  # equal lengths need no mask, which is faster
        eos = torch.tensor(self.eos, device=device)
        rows = torch.arange(len(members), device=device)  # rows of the output that are still in the batch
        ids, logps = (torch.zeros(len(members), max_tokens, dtype=t, device=device) for t in (torch.long, torch.float32))
        lengths = torch.full((len(members),), max_tokens, device=device)
        live = torch.ones(len(members), dtype=torch.bool, device=device)  # per row of the batch
        for t in range(max_tokens):
            token, logp = self.sample(logits, temperature, uniforms[rows, t], top_p)
            ids[rows[live], t], logps[rows[live], t] = token[live], logp[live]
            stopped = live & torch.isin(token, eos)
            lengths[rows[stopped]] = t + 1
            live &= ~stopped
            alive = int(live.sum())
            bar.update(int(stopped.sum()))
            if alive == 0 or t + 1 == max_tokens:
                break
            if alive <= 0.8 * len(rows):  # dropping rows copies the cache: worth it when a fifth of them is done
                keep = live.nonzero().squeeze(1)
                select_rows(cache, keep)
                rows, token, positions, live = rows[keep], token[keep], positions[keep], live[keep]
                mask = mask if mask is None else mask[keep]
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            out = self.model(
                input_ids=token[:, None],
                attention_mask=mask,
                position_ids=positions[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits, positions = out.logits[:, -1], positions + 1
        bar.update(alive)
        if not logps.isfinite().all():
            where = "the weights or an FP8 operand hold NaN or inf"
            raise UserError(f"sampling: the log-probs are not finite: {where}; go back to a checkpoint, or lower --lr")
        ids, logps, lengths = ids.tolist(), logps.tolist(), lengths.tolist()
        reasons = ["stop" if row[k - 1] in self.eos else "length" for row, k in zip(ids, lengths, strict=True)]
        fields = zip(ids, logps, lengths, reasons, strict=True)
        return [Completion(row[:k], row_logps[:k], reason) for row, row_logps, k, reason in fields]

    def prefill(self, prompts, counts):
        """Left-padded prompts through the model once each, row i repeated counts[i] times: (logits, cache, mask (rows, L))."""
        device = self.model.device
        L = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (L - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (L - len(p)) + [1] * len(p) for p in prompts], device=device)
        cache = make_cache(self.model.config)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids,
            attention_mask=None if mask.all() else mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        rows = torch.arange(len(prompts), device=device).repeat_interleave(counts)
        select_rows(cache, rows)
        return out.logits[:, -1][rows], cache, mask[rows]

    def sample(self, logits, temperature, uniform, top_p=1.0):
        """Inverse-CDF sampling: (rows,) ids and their FP32 log-probs. The CDF is summed in FP64: at 150,000 ids FP32 would
        give the last ones a probability that is all rounding."""
        logp = log_softmax(logits, temperature or 1.0, self.model.get_output_embeddings())
        if top_p < 1:
            logp = nucleus(logp[:, : self.vocab], top_p)
        if temperature == 0:
            token = logp[:, : self.vocab].argmax(-1)
        else:
            cdf = logp[:, : self.vocab].double().exp_().cumsum(-1)
            token = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(1)
            token = token.clamp_(max=self.vocab - 1)  # a CDF of NaN: reported at the end of the batch
        return token, logp.gather(1, token[:, None]).squeeze(1)

    @torch.no_grad()
    def sync(self, named_weights, check=True):
        """Take the learner's weights: pairs (name, tensor); quantised copies are dropped. Returns the fingerprint of what the
        engine now holds (None without check); raises UserError if names and shapes are not exactly the engine's."""
        own = dict(self.model.named_parameters())
        sent = dict(named_weights)
        if own.keys() != sent.keys():
            odd = sorted(own.keys() ^ sent.keys())
            raise UserError(f"weight sync: {len(sent)} names sent, {len(own)} expected; first odd one {odd[0]!r}")
        odd = [name for name, w in sent.items() if w.shape != own[name].shape]
        if odd:
            shapes = f"{tuple(sent[odd[0]].shape)}, expected {tuple(own[odd[0]].shape)}"
            raise UserError(f"weight sync: {odd[0]} has shape {shapes}")
        for name, w in sent.items():
            if own[name] is not w:  # the learner's own module needs no copy
                own[name].copy_(parallel.full(w))
        precision.weights_changed(self.model)
        return fingerprint(own.items()) if check else None

    def sleep(self):
        """Nothing to free: the weights are the learner's and the KV cache lives only inside `generate`."""

    def wake(self):
        """Nothing to bring back, see sleep."""

    def close(self):
        """Forget the model."""
        self.model = None
