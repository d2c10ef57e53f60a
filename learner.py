"""The learner's half of a step: micro-batches, old pass, sampler correction, shadow passes, and one optimiser step.

    minis = split(samples, args, pad_id)                        M mini-batches of micro-batches
    metrics = old_pass(model, minis, args, acrl, shadow)        old_logp at the step's starting weights; correction weights
    for mini in minis:
        update(model, masters, optimizer, mini, args, calib, shadow)      new_logp, loss, gradient, AdamW

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
        usable = torch.tensor([not math.isnan(s["reward"]) for s in samples], device=device)
        self.mask = self.batch.mask & usable[:, None]  # a sample without a reward trains nothing
        self.old_logp = self.old_logp_hp = self.entropy = self.weight = self.shadow_rows = None
        self.shadow_seconds = 0.0


def split(samples, args, pad_id):
    """M mini-batches of equal size in sampling order (whole groups where G allows), each a list of micro-batches by length."""
    size = len(samples) // args.updates_per_step
    minis = []
    for k in range(0, len(samples), size):
        mini = samples[k : k + size]
        lengths = [len(s["row"]["prompt_ids"]) + len(s["completion"].token_ids) for s in mini]
        groups = micro_batches(lengths, args.micro_tokens)
        minis.append([Micro([mini[i] for i in group], pad_id, args.device) for group in groups])
    return minis


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
    """Log-probs without quantisation of the micro-batch's shadow rows: (rows, T) FP32."""
    start = time.perf_counter()
    batch = Batch(*(x[m.shadow_rows] for x in m.batch))
    with precision.high_precision(model, {"bf16": torch.bfloat16, "fp32": torch.float32}[args.calib_reference]):
        logp, _ = token_logps(model, batch, args.temperature)
    m.shadow_seconds += time.perf_counter() - start
    return logp


def choose_shadow_rows(minis, share):
    """Mark a share of the answers for shadow passes, by a count that runs on over all micro-batches: these are sorted by
    length, and the first rows of each would be its longest."""
    i = 0
    for m in (m for mini in minis for m in mini):
        n = len(m.adv)
        m.shadow_rows = [row for row in range(n) if math.floor((i + row + 1) * share) > math.floor((i + row) * share)]
        i += n


@torch.no_grad()
def old_pass(model, minis, args, acrl=None, shadow=False):
    """old_logp and entropy at the step's starting weights, on exactly the micro-batches of the training forward (tensor scales
    see the whole micro-batch), then the sampler correction. Returns the mismatch, correction and entropy metrics."""
    micros = [m for mini in minis for m in mini]
    choose_shadow_rows(minis, args.calib_share)
    for m in micros:
        m.old_logp, m.entropy = token_logps(model, m.batch, args.temperature)
        if shadow and m.shadow_rows:
            m.old_logp_hp = shadow_logps(model, m, args)
    old, mu, entropy = (torch.cat([getattr(m, name)[m.mask] for m in micros]) for name in ("old_logp", "mu_logp", "entropy"))
    ones = torch.ones(1, len(old), dtype=torch.bool, device=old.device)
    metrics = clipping.mismatch_metrics(old[None], mu[None], ones)
    metrics["entropy"] = entropy.mean() if len(entropy) else float("nan")
    per_answer = torch.cat([answer_entropy(m)[m.mask.any(1)] for m in micros])
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
        return metrics
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
    return clipping.merge_metrics(parts)


def pad(x, T):
    """(B, t) -> (B, T), zeros or False at the end."""
    return torch.nn.functional.pad(x, (0, T - x.shape[1]))


def loss_denom(mini, args):
    """What divides the summed loss of a mini-batch, so that its micro-batches' losses add up to the mini-batch's loss."""
    if args.loss_agg == "token-mean":
        return sum(int(m.mask.sum()) for m in mini)
    sequences = sum(int(m.mask.any(1).sum()) for m in mini)
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
        new_logp_hp = shadow_logps(model, m, args) if shadow and m.shadow_rows else None
        new_logp, _ = token_logps(model, m.batch, args.temperature)
        if new_logp_hp is not None:
            observe(calib, m, new_logp, new_logp_hp, args)
        tensors = (new_logp, m.old_logp, m.adv, m.mask)
        if args.objective == "cispo":
            loss, metrics = rivals.cispo_loss(*tensors, low, high, m.weight, args.loss_agg, denom)
        else:
            loss, metrics = clipping.policy_loss(*tensors, low, high, args.dual_clip or None, m.weight, args.loss_agg, denom)
        loss.backward()
        loss_sum += loss.item()
        parts.append(metrics)
    norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), args.grad_clip).item()
    finite = math.isfinite(norm) and math.isfinite(loss_sum)
    if finite:
        optimizer.step()
        masters.publish()
    masters.zero_grad()
    if not finite:
        return {"skipped": 1}
    loop = {"loss": loss_sum, "grad_norm": norm, "clip/low": low, "clip/high": high, "skipped": 0}
    return clipping.merge_metrics(parts) | {k: float(v) for k, v in found.items()} | loop
