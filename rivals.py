"""CISPO and BAPO: the two clips that Calibrated Clipping (arXiv:2609.22870) sets beside its own. Notation of clipping.py.

CISPO (MiniMax-M1, arXiv:2506.13585) clips the ratio, not the update. The clipped ratio is a detached weight on a plain
policy gradient, so no token loses its gradient, whatever r is:

    loss = sum of -w sg(clip(r, low, high)) A new_logp, aggregated, / denom                                          (1)
    gradient of a token = -w A clip(r, low, high) / denom          clipping.policy_loss: -w A r / denom, or 0 if clipped

Inside the bounds both gradients are the same; the value of the loss is not (here it is no surrogate: it is not 0 at r = 1
and its size says nothing). M1 has no lower bound (low = 0) and does not print high; verl has 1.2, Trinity-RFT 1.28.
Worked number: A = -1, r = 3, high = 1.24, one token: gradient +1.24, where PPO has +3. A = +1, r = 3: -1.24, PPO 0.

BAPO (arXiv:2510.18927) searches the bounds of PPO's clip anew for each mini-batch, until the tokens of A > 0 have a given
part in the objective. Its eq. 8 and Algorithm 1, with pi_samp = exp(mu_logp):

    rho = |sum_{A>0} pi_samp min(r A, clip(r, 0, high) A)| / |sum_all pi_samp min(r A, clip(r, low, high) A)| >= target   (2)
    start at low = 0.6, high = 1.2; while rho < target: high += 0.05 up to 3.0; then low += 0.02 up to 0.9

min() leaves min(r, high) A where A > 0 and -max(r, low) |A| where A < 0: one sum depends on high only, the other on low only,

    P(high) = sum_{A>0} pi_samp A min(r, high)      N(low) = sum_{A<0} pi_samp |A| max(r, low)      rho = P / |P - N|    (3)

So `bapo_sums` holds P at 37 highs and N at 16 lows, which add over micro-batches; `bapo_solve` adds over ranks and walks the
path. Worked number, r = 2 at A = 1 and r = 1 at A = -5, both with pi_samp = 0.5: P = high / 2 (up to high = 2), N = 2.5,
rho = high / (5 - high): 0.316 at 1.2, 0.408 at 1.45. There it stops, and low stays 0.6.

What (3) says before any run: N grows with low. For a target up to 1, if no high is enough then N > P, every step of low
makes rho smaller, and low runs to its end: the bounds end at (0.6, some high), or at (0.9, 3.0) with the target missed. The
latter is how Calibrated Clipping reports BAPO's end in FP8. Clipped tokens count with their bound although their
gradient is 0; what low does (drop gradients of A < 0) is not what rho sees. At r = 1 no high helps either. And the
denominator is a difference: rho >= target at P / N >= target / (1 + target), 0.29 for 0.4, not at a share of 0.4.

In the loop the bounds come before the loss, from r of that same mini-batch: one more forward of it, without gradient, at
the weights it will be trained from. That is about a third of the cost of an update on top. In the order of calls:

    sums = sum(bapo_sums(forward(m), m.old_logp, m.mu_logp, m.adv, m.mask) for m in mini)       # no_grad
    low, high, metrics = bapo_solve(sums)                                                       # every rank, once
    loss, _ = policy_loss(new_logp, old_logp, adv, mask, low, high, ...)                        # each micro-batch

Departures
    (2) the public code (recipe/bapo in WooooDyy/BAPO) is another rule: low first (0.6 to 0.8 by 0.05), then high (1.2 to
        2.0); sum_{A>=0} min(r, high) A / sum_{A<0} max(r, low) |A|, without pi_samp, target 1; dual clip 3. Its README says
        target 0.5, the paper 0.4. Here: the paper. Common to both: each mini-batch starts again, sums over all ranks.
    (2) in the paper r's denominator is pi_samp too (two policies); here r = new / old, and pi_samp weighs. `bapo_sums`
    (2) mu_logp NaN: pi_samp = pi_old, as its w = 1; mu_logp -inf: 0, not counted. `bapo_sums`
    (2) no positive token, or a sum that is not finite: the initial bounds, rho 0. P = N: rho is inf, so reached. `bapo_solve`
    (2) a range of low shorter than one step: high still moves; Algorithm 1 would stop at once. `bapo_solve`
    (1), (2) log ratios are clamped to +-20 before exp, as everywhere.
"""

import torch
import torch.distributed as dist

from clipping import MAX_LOG, _aggregate, _check, _clip_metrics, _log_w, _per_token, _up


def cispo_loss(new_logp, old_logp, adv, mask, low=0.0, high=1.24, weight=None, agg="token-mean", denom=None,
               norm_length=None):
    """Eq. (1). Arguments, errors and metrics of `clipping.policy_loss` -> (0-dim loss, metrics).

    clip/frac is the share of tokens whose ratio was outside [low, high], of either sign: none lost its gradient.
    """
    _check(mask, low, high, new_logp=new_logp, old_logp=old_logp)
    adv = _per_token(adv, mask, "adv")  # (B, T), 0 where masked
    logp = torch.where(mask, _up(new_logp), 0)
    d = torch.where(mask, logp.detach() - _up(old_logp.detach()), 0).clamp(-MAX_LOG, MAX_LOG)
    r = d.exp()
    loss = -r.clamp(low, high) * adv * logp
    if weight is not None:
        loss = loss * _per_token(weight, mask, "weight")
    loss = _aggregate(loss, mask, agg, denom, norm_length)
    return loss, _clip_metrics(d, adv, mask, (r < low) | (r > high), low, high)


def bapo_bounds(new_logp, old_logp, mu_logp, adv, mask, target=0.4, low=(0.6, 0.9), high=(1.2, 3.0), step_low=0.02,
                step_high=0.05):
    """Eq. (2) for a mini-batch in one piece -> (low, high, metrics): `bapo_solve` of `bapo_sums`."""
    grid = (low, high, step_low, step_high)
    return bapo_solve(bapo_sums(new_logp, old_logp, mu_logp, adv, mask, *grid), target, *grid)


@torch.no_grad()
def bapo_sums(new_logp, old_logp, mu_logp, adv, mask, low=(0.6, 0.9), high=(1.2, 3.0), step_low=0.02, step_high=0.05):
    """Log-probs and bool mask (B, T), adv (B,) or (B, T) -> float64 sums (3): P at each high, then N at each low.

    They add over micro-batches. ValueError: shapes, mask not bool, ranges not around 1.
    """
    lows, highs = _grid(low, step_low), _grid(high, step_high)
    _check(mask, lows[-1], highs[0], new_logp=new_logp, old_logp=old_logp)
    log_w, _ = _log_w(old_logp, mu_logp, mask)  # log(pi_old / pi_samp); 0 where masked or missing
    pi = (torch.where(mask, _up(old_logp), 0).double() - log_w).exp()  # pi_samp, (B, T)
    r = torch.where(mask, _up(new_logp) - _up(old_logp), 0).clamp(-MAX_LOG, MAX_LOG).double().exp()
    mass = pi * _per_token(adv, mask, "adv")  # 0 where masked
    positive, negative = mass.clamp(min=0), -mass.clamp(max=0)
    return torch.stack([(positive * r.clamp(max=x)).sum() for x in highs] + [(negative * r.clamp(min=x)).sum() for x in lows])


@torch.no_grad()
def bapo_solve(sums, target=0.4, low=(0.6, 0.9), high=(1.2, 3.0), step_low=0.02, step_high=0.05):
    """The sums of a mini-batch, added over its micro-batches -> (low, high, metrics); floats, the same on every rank.

    Metrics: bapo/rho at the bounds returned (inf: P = N), bapo/{low,high}, bapo/reached (1: rho >= target; 0: missed).
    ValueError: target not positive, sums of another grid.
    """
    lows, highs = _grid(low, step_low), _grid(high, step_high)
    if not target > 0:
        raise ValueError(f"target is a positive ratio, got {target}")
    if sums.shape != (len(highs) + len(lows),):
        raise ValueError(f"sums has shape {tuple(sums.shape)}, the grid {len(highs)} highs and {len(lows)} lows")
    if dist.is_available() and dist.is_initialized():
        sums = sums.clone()
        dist.all_reduce(sums)
    path = [(lows[0], x) for x in highs] + [(x, highs[-1]) for x in lows[1:]]
    p, n = sums[: len(highs)], sums[len(highs) :]
    p, n = torch.cat([p, p[-1:].expand(len(lows) - 1)]), torch.cat([n[:1].expand(len(highs)), n[1:]])  # along the path
    rho = p / (p - n).abs()
    if not (sums.isfinite().all() and p[0] > 0):
        path, rho = path[:1], torch.zeros_like(rho)
    reached = rho >= target
    at = int(reached.int().argmax()) if reached.any() else len(path) - 1  # argmax: the first
    low, high = path[at]
    values = {"rho": rho[at], "low": low, "high": high, "reached": reached[at]}
    return low, high, {f"bapo/{k}": sums.new_tensor(v) if isinstance(v, float) else v.double() for k, v in values.items()}


def _grid(bounds, step):
    """(start, end) -> start, start + step, ... up to end."""
    start, end = bounds
    if not (0 < step and 0 <= start <= end):
        raise ValueError(f"a range is (start, end) with 0 <= start <= end and a positive step, got {bounds} and {step}")
    return [round(start + i * step, 10) for i in range(int((end - start) / step + 1e-6) + 1)]
