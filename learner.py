"""The learner's half of a step: micro-batches, old pass, sampler correction, shadow passes, and one optimiser step.

    minis = split(samples, args, pad_id)                        M mini-batches of micro-batches
    metrics = old_pass(model, minis, args, acrl, shadow, ref)   old_logp at the step's starting weights; correction weights
    for mini in minis:
        update(model, masters, optimizer, mini, args, calib, shadow)      new_logp, loss, gradient, AdamW

Several processes (parallel.py): every rank holds all answers of a mini-batch and takes its share of them. Counts, norms and
metrics are those of all ranks; a rank short of a micro-batch runs a blank one, since FSDP2 gathers weights in every forward.
KL to the starting model (--kl-coef): ref_logp comes from a frozen copy in the learner's own precision, so that the divergence
starts at 0; the term is added to the loss, not to the reward.

Shadow passes (Calibrated Clipping, calibrated.py). On a calibration step the same tokens also go through the same module with
quantisation off: at the starting weights in `old_pass`, at a mini-batch's own weights in `update`, just before its FP8 forward.
Same micro-batches, same padding, same attention: only the linear layers' precision differs (with --activations fp32 the BF16
reference takes BF16 activations). Two forwards of the batch in all, of --calib-share of its answers when a part is enough.

Where bounds come from (--clip): vanilla, the two flags; calibrated, the last calibration; bapo, a search on the mini-batch
itself, which costs a forward without gradient.
"""

import math
import time

import torch

import clipping
import parallel
import precision
import rivals
from errors import UserError
from logprob import Batch, collate, micro_batches, token_logps


class Micro:
    """One micro-batch: the padded batch, and per response token what the loss needs (all (B, T), FP32)."""

    def __init__(self, samples, pad_id, device):
        completions = [s["completion"] for s in samples]
        self.batch = collate([s["row"]["prompt_ids"] for s in samples], [c.token_ids for c in completions], pad_id, device)
        T = self.batch.mask.shape[1]
        mu = torch.tensor([c.logps + [0.0] * (T - len(c.logps)) for c in completions], dtype=torch.float32)
        self.mu_logp = mu.to(device)
        self.adv = torch.tensor([s["adv"] for s in samples], dtype=torch.float32, device=device)  # (B,)
        usable = torch.tensor([not (math.isnan(s["reward"]) or s.get("left_out")) for s in samples], device=device)
        self.mask = self.batch.mask & usable[:, None]  # a sample without a reward trains nothing
        self.old_logp = self.old_logp_hp = self.ref_logp = self.entropy = self.weight = None
        self.shadow_rows = [i for i, s in enumerate(samples) if s.get("shadow")]  # what a shadow pass measures, if there is one
        self.shadow_pass, self.shadow_seconds = bool(self.shadow_rows), 0.0


def split(samples, args, pad_id):
    """M mini-batches of equal size in sampling order (whole groups where G allows), each a list of this rank's micro-batches by
    length: the mini-batch's answers, longest first, are dealt to the ranks in turn, so that all get about as many tokens."""
    size, world, rank = len(samples) // args.updates_per_step, parallel.world(), parallel.rank()
    minis = []
    for k in range(0, len(samples), size):
        mini = sorted(samples[k : k + size], key=lambda s: -sequence_length(s))  # stable: equal lengths stay in order
        mini = [s | {"shadow": in_share(k + i, args.calib_share)} for i, s in enumerate(mini)]
        hands = [mini[r::world] for r in range(world)]
        groups = [[[hand[i] for i in group] for group in micro_batches([sequence_length(s) for s in hand], args.micro_tokens)]
                  for hand in hands]  # of every rank: micro-batches of samples
        blank = [mini[-1] | {"left_out": True, "shadow": False}]
        for own in groups:
            own += [blank] * (max(map(len, groups)) - len(own))
        micros = [Micro(group, pad_id, args.device) for group in groups[rank]]
        for i, m in enumerate(micros):  # a forward that one rank has, all have
            m.shadow_pass = any(s["shadow"] for own in groups for s in own[i])
        minis.append(micros)
    return minis


def in_share(i, share):
    """Whether the i-th answer, longest first, is among the share of answers that shadow passes look at."""
    return math.floor((i + 1) * share) > math.floor(i * share)


def sequence_length(sample):
    return len(sample["row"]["prompt_ids"]) + len(sample["completion"].token_ids)


def merged(parts):
    """Metrics of all micro-batches of all ranks."""
    return clipping.merge_metrics(parallel.gather([{k: float(v) for k, v in part.items()} for part in parts]))


def make_calibration(args):
    """Calibrated Clipping's bounds; with other clips the same object only measures (--shadow-every). Raises UserError."""
    for name, bound, ends in zip(("LOW", "HIGH"), args.calib_init, (args.calib_range_low, args.calib_range_high), strict=True):
        if args.clip == "calibrated" and args.calib_lower == "grid" and not ends[0] <= bound <= ends[1]:
            raise UserError(f"--calib-init {name} {bound} is outside --calib-range-{name.lower()} {ends[0]} {ends[1]}")
    if args.calib_range_high[1] > 100:
        raise UserError(f"--calib-range-high {args.calib_range_high}: ratios above 100 are not calibrated; lower it")
    moving = args.clip == "calibrated"
    low, high = args.calib_init if moving else (args.clip_low, args.clip_high)
    try:
        return clipping.CalibratedClipping(
            args.clip_low, args.clip_high, low, high, args.calib_interval, *args.calib_delta,
            grid_low=tuple(args.calib_range_low), grid_high=tuple(args.calib_range_high), stages=args.calib_stages,
            upper=args.calib_upper, lower=args.calib_lower, pool=args.calib_pool, freeze_after=args.calib_freeze_after,
            pi_samp=not args.calib_no_pi_samp,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"--calib-init, --calib-range-low, --calib-range-high or --clip-low/high: {error}") from error


def shadow_due(args, calib, step):
    """Whether this step, counted from 1, has shadow passes: to calibrate, or (--shadow-every) only to measure."""
    if args.clip == "calibrated":
        return calib.due(step)
    return args.shadow_every > 0 and (step - 1) % args.shadow_every == 0


@torch.no_grad()
def shadow_logps(model, m, args):
    """Log-probs without quantisation of the micro-batch's shadow rows: (rows, T) FP32; of its first row if it has none."""
    start = time.perf_counter()
    batch = Batch(*(x[m.shadow_rows or [0]] for x in m.batch))
    with precision.high_precision(model, {"bf16": torch.bfloat16, "fp32": torch.float32}[args.calib_reference]):
        logp, _ = token_logps(model, batch, args.temperature)
    m.shadow_seconds += time.perf_counter() - start
    return logp


@torch.no_grad()
def old_pass(model, minis, args, acrl=None, shadow=False, reference=None):
    """old_logp (and ref_logp) and entropy at the step's starting weights, on exactly the micro-batches of the training forward
    (tensor scales see the whole micro-batch), then the sampler correction. Returns mismatch, correction and entropy metrics.
    """
    micros = [m for mini in minis for m in mini]
    for m in micros:
        m.old_logp, m.entropy = token_logps(model, m.batch, args.temperature)
        if reference is not None:
            m.ref_logp, _ = token_logps(reference, m.batch, args.temperature)
        if shadow and m.shadow_pass:
            m.old_logp_hp = shadow_logps(model, m, args)
    names = ("old_logp", "mu_logp", "entropy")
    if hasattr(reference, "reshard"):
        reference.reshard()  # no backward frees its root's whole parameters
    old, mu, entropy = (parallel.joined(torch.cat([getattr(m, name)[m.mask] for m in micros])) for name in names)
    ones = torch.ones(1, len(old), dtype=torch.bool, device=old.device)
    metrics = clipping.mismatch_metrics(old[None], mu[None], ones)
    metrics["entropy"] = entropy.mean() if len(entropy) else float("nan")
    per_answer = parallel.joined(torch.cat([answer_entropy(m)[m.mask.any(1)] for m in micros]))
    edges = [0.0, 0.2, 0.5, 1.0, math.inf]  # the bins of arXiv:2609.22870: garbled answers live in the last
    for low, high in zip(edges, edges[1:], strict=False):
        share = ((per_answer >= low) & (per_answer < high)).float().mean()  # NaN if no answer counts
        metrics[f"entropy_bins/{low:g}-{high:g}" if high < math.inf else f"entropy_bins/{low:g}+"] = share
    return metrics | correct(micros, args, acrl)


def answer_entropy(m):
    """Mean entropy of each answer's tokens, (B,), nats."""
    return (m.entropy * m.mask).sum(1) / m.mask.sum(1).clamp(min=1)


def correct(micros, args, acrl=None):
    """The sampler correction (--correction): sets each micro-batch's weight, or its mask (mis). Returns the metrics."""
    if args.correction == "acrl":  # one measured gap for the whole batch: micro-batches padded to one width
        T = max(m.mask.shape[1] for m in micros)
        wide = [torch.cat([pad(getattr(m, k), T) for m in micros]) for k in ("old_logp", "mu_logp", "mask")]
        weight, metrics = acrl.weight(*wide[:2], torch.cat([m.adv for m in micros]), wide[2])
        for m, w in zip(micros, weight.split([len(m.adv) for m in micros]), strict=True):
            m.weight = w[:, : m.mask.shape[1]]
        return merged([metrics]) if parallel.world() > 1 else metrics
    parts = []
    for m in micros:
        logps = (m.old_logp, m.mu_logp, m.mask)
        if args.correction == "tis":
            m.weight, metrics = clipping.tis_weight(*logps, args.tis_cap, args.tis_level)
        elif args.correction == "icepop":
            m.weight, metrics = clipping.icepop_weight(*logps, args.icepop_low, args.icepop_high)
        elif args.correction == "mis":
            m.mask, metrics = clipping.mis_mask(*logps, args.mis_low, args.mis_high)
        else:
            return {}
        parts.append(metrics)
    return merged(parts)


def pad(x, T):
    """(B, t) -> (B, T), zeros or False at the end."""
    return torch.nn.functional.pad(x, (0, T - x.shape[1]))


def loss_denom(mini, args):
    """What divides the summed loss of a mini-batch, so that the losses of all micro-batches of all ranks add up to its loss."""
    if args.loss_agg == "token-mean":
        return parallel.total(sum(int(m.mask.sum()) for m in mini))
    sequences = parallel.total(sum(int(m.mask.any(1).sum()) for m in mini))
    return sequences * (args.max_tokens if args.loss_agg == "seq-mean-token-sum-norm" else 1)


@torch.no_grad()
def bapo_bounds(model, mini, args):
    """BAPO's bounds for this mini-batch, from a forward of its own: (low, high, metrics)."""
    sums = 0
    for m in mini:
        new_logp, _ = token_logps(model, m.batch, args.temperature)
        sums = sums + rivals.bapo_sums(new_logp, m.old_logp, m.mu_logp, m.adv, m.mask)
    return rivals.bapo_solve(sums, args.bapo_target)


def observe(calib, m, new_logp, new_logp_hp, args):
    """Give a micro-batch's shadow rows to the calibration."""
    start, rows = time.perf_counter(), m.shadow_rows
    weight = m.weight if m.weight is None else m.weight[rows]
    calib.observe(new_logp_hp, m.old_logp_hp, new_logp.detach()[rows], m.old_logp[rows], m.mu_logp[rows], weight, m.adv[rows],
                  m.mask[rows], answer_entropy(m)[rows])
    m.shadow_seconds += time.perf_counter() - start


def update(model, masters, optimizer, mini, args, calib=None, shadow=False):
    """One optimiser step on one mini-batch. A gradient that is not finite, or no token to train on, skips it; groups of equal
    rewards do not: their gradient is 0, and AdamW's momentum moves on."""
    denom = loss_denom(mini, args)
    if not denom:
        return {"skipped": 1}
    low, high, found = args.clip_low, args.clip_high, {}
    if args.clip == "calibrated":
        low, high = calib.low, calib.high
    elif args.clip == "bapo":
        low, high, found = bapo_bounds(model, mini, args)
    parts, loss_sum = [], 0.0
    for m in mini:
        new_logp_hp = shadow_logps(model, m, args) if shadow and m.shadow_pass else None
        new_logp, _ = token_logps(model, m.batch, args.temperature)
        if new_logp_hp is not None and m.shadow_rows:
            observe(calib, m, new_logp, new_logp_hp, args)
        tensors = (new_logp, m.old_logp, m.adv, m.mask)
        if args.objective == "cispo":
            loss, metrics = rivals.cispo_loss(*tensors, low, high, m.weight, args.loss_agg, denom)
        else:
            loss, metrics = clipping.policy_loss(*tensors, low, high, args.dual_clip or None, m.weight, args.loss_agg, denom)
        if m.ref_logp is not None:
            kl, kl_metrics = clipping.kl_loss(new_logp, m.ref_logp, m.mask, args.kl_estimator, args.loss_agg, denom)
            loss, metrics = loss + args.kl_coef * kl, metrics | kl_metrics
        loss.backward()
        loss_sum += loss.item()
        parts.append(metrics)
    loss_sum = parallel.total(loss_sum)
    norm = parallel.full(torch.nn.utils.clip_grad_norm_(masters.parameters(), args.grad_clip)).item()
    finite = math.isfinite(norm) and math.isfinite(loss_sum)
    if finite:
        optimizer.step()
        masters.publish()
    masters.zero_grad()
    if not finite:
        return {"skipped": 1}
    loop = {"loss": loss_sum, "grad_norm": norm, "clip/low": low, "clip/high": high, "skipped": 0}
    return merged(parts) | {k: float(v) for k, v in found.items()} | loop


def learning_rate(args, step):
    """Of a step, counted from 1: linear warm-up, then constant, or a decay over the steps up to --lr-decay-steps."""
    warm = args.lr * min(1.0, step / max(1, args.warmup))
    if args.lr_schedule == "constant":
        return warm
    t = min(1.0, max(0, step - 1 - args.warmup) / (args.lr_decay_steps - args.warmup))
    shape = 1 - t if args.lr_schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    return warm * (args.lr_min_ratio + (1 - args.lr_min_ratio) * shape)
