"""Advantages, clipped policy losses and sampler corrections: pure functions on (B, T) tensors of log-probs.

Three log-probs of the same sampled token meet here (B sequences of T tokens), and two ratios are made of them:

    mu_logp     the sampler's (rollout engine), when the token was drawn
    old_logp    the learner's, at the step's starting weights
    new_logp    the learner's, now; the only one with a gradient

    r = exp(new_logp - old_logp)   learner / learner: staleness inside the step. Differentiated and *clipped*.      (1)
    w = exp(old_logp - mu_logp)    learner / sampler: the engines disagree (kernels, FP8). Detached, it *corrects*. (2)

With one update per step r = 1 everywhere; with several it drifts, and in FP8 it is noisy too. w is fixed for the step.

    A = (R - mean R) / (std R + 1e-6) over the group of one prompt, unbiased std    (3) GRPO; Dr.GRPO: not divided
    J = min(r A, clamp(r, low, high) A)                                             (4) PPO; DAPO: a higher high
    J = max(J, c A) where A < 0                                                     (5) dual clip, c > 1
    loss = sum of -w J, aggregated, / denom                                         (6)

The bounds are explicit, clamp(r, 0.8, 1.24), not "eps". What (4) and (5) do to one token:

    metric        A     r            J         gradient
    clip/pos_hi   > 0   r >= high    high A    exactly 0: it has become likely enough
    clip/pos_lo   > 0   r <= low     r A       flows: bring the good token back
    clip/neg_lo   < 0   r <= low     low A     exactly 0: it has become unlikely enough
    clip/neg_hi   < 0   r >= high    r A       flows, unbounded in r; with (5) exactly 0 from r >= c on

clip/SIGN_SIDE is the share of that sign's tokens with r at or beyond that bound, whether or not the gradient is cut;
A = 0 has no sign. clip/frac is the share of all tokens whose gradient (4) or (5) cut. Equality counts as clipped:
torch.clamp lets the gradient through at the bound and torch.min halves it, so both are spelled out with torch.where.

Aggregation, with l = -w J. Micro-batches pass the denom of the whole mini-batch (all ranks), and their losses add up:

    agg                        summed loss, mask m                  denom (default: this call's own count)
    token-mean                 sum_b sum_t m l                      tokens                                DAPO
    seq-mean-token-mean        sum_b (sum_t m l / sum_t m)          sequences                             GRPO
    seq-mean-token-sum-norm    sum_b sum_t m l                      sequences x L, norm_length or T       Dr.GRPO

Fully masked rows are in no count. Masked positions are replaced, never multiplied by 0: NaN there reaches nothing.

w comes in three strengths: TIS min(w, cap) keeps every token, IcePop drops tokens outside a band, MIS drops sequences
whose geometric mean of w leaves a band. Weights are 0 at masked positions, so that they can be summed.

Worked number. Rewards [1, 0, 0, 0]: mean 0.25, std 0.5, A = [1.5, -0.5, -0.5, -0.5]. A token of the first answer with
r = 1.3 costs -1.24 * 1.5 = -1.86 and moves nothing (pos_hi). One of the second with r = 0.75 costs 0.8 * 0.5 = 0.4 and
moves nothing (neg_lo); at r = 0.9 it costs 0.45 and is pushed down. With r = 1, A = [1, -1]: loss 0, gradient not 0.

Metrics are detached 0-dim float64 tensors on the inputs' device. Next to the shares stand the counts they were taken
over (n/tok, n/pos, n/neg, n/is, n/mu, n/groups), from which `merge_metrics` puts micro-batches or ranks together.

Departures
    (1), (2) log ratios are clamped to +-20 before exp, as in verl; no gradient flows beyond. `policy_loss`, `_weight`
    (3) a group of equal rewards gets 0 by exact comparison (eight 0.95 have a float std of 6e-8). `group_advantages`
    (3) a NaN reward leaves its sample out, with advantage 0; it would poison its group. `group_advantages`
    (3) a group of one is refused; verl keeps the raw reward as its advantage. `group_advantages`
    (2) mu_logp NaN (the engine lost it): w = 1, counted in is/missing; not in the mean of MIS. `_log_w`, `mis_mask`
    (2) mu_logp -inf (it cannot have been sampled): w is infinite, so capped, dropped or masked. `_log_w`
"""

import torch

from calibrated import CalibratedClipping  # noqa: F401

MAX_LOG = 20.0  # exp(20) = 5e8: large, finite
AGGS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# the count a metric is weighted by in a merge, by the start of its name; any other: n/tok
COUNTS = {"clip/pos": "n/pos", "clip/neg": "n/neg", "is/": "n/is", "acrl/": "n/is", "mismatch/": "n/mu",
          "frac_groups": "n/groups"}


def group_advantages(rewards, group_size, scale="std"):
    """Rewards (N,), a group's members adjacent -> advantages (N,), eq. (3). float64 stays, all else becomes FP32.

    scale "std": GRPO (arXiv:2402.03300); "none": Dr.GRPO (arXiv:2503.20783). Exactly 0: a NaN reward, a group of equal
    rewards, a lone valid member. ValueError: group_size < 2, N not a multiple of it, an infinite reward, scale.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale is 'std' or 'none', got {scale!r}")
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}: a lone sample has no group to compare it with; use 2 or more")
    r, valid = _groups(rewards, group_size)
    n = valid.sum(1, keepdim=True)  # (G, 1)
    mean = torch.where(valid, r, 0).sum(1, keepdim=True) / n.clamp(min=1)
    adv = torch.where(valid, r - mean, 0)  # (G, group_size)
    if scale == "std":
        adv = adv / ((adv.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt() + 1e-6)
    top = torch.where(valid, r, -torch.inf).amax(1, keepdim=True)
    bottom = torch.where(valid, r, torch.inf).amin(1, keepdim=True)
    return torch.where(top > bottom, adv, 0).flatten()


def group_metrics(rewards, group_size):
    """Rewards (N,) -> frac_groups_all0, frac_groups_all1, n/groups: of the groups with a valid reward, those all 0 or all 1.

    Both kinds have advantage 0 and teach nothing. Pass the raw 0/1 accuracy, not a reward shaped by length. ValueError
    as in `group_advantages`.
    """
    r, valid = _groups(rewards, group_size)
    some = valid.any(1)
    shares = {f"frac_groups_all{x}": _mean((~valid | (r == x)).all(1), some) for x in (0, 1)}
    return shares | {"n/groups": some.sum().double()}


def policy_loss(new_logp, old_logp, adv, mask, low=0.8, high=1.24, dual_clip=None, weight=None, agg="token-mean",
                denom=None, norm_length=None):
    """Eqs. (4) - (6). Log-probs and bool mask (B, T), adv (B,) or (B, T) -> (0-dim loss, metrics).

    PPO (arXiv:1707.06347), dual clip (arXiv:1912.09729), clip-higher and token-mean (DAPO, arXiv:2503.14476), division
    by a constant (Dr.GRPO, arXiv:2503.20783). FP32, or float64 where the inputs are; only new_logp gets a gradient.
    weight (B, T), (B, 1) or (B,) multiplies each token's loss. denom: number or 0-dim tensor, see the table above;
    norm_length: the L of its default. Nothing counted: loss 0, gradients 0.
    Metrics: clip/{pos,neg}_{lo,hi}, clip/frac, ratio/{mean,max}, kl_new_old (k3, KL(old || new)), n/{tok,pos,neg}.
    ValueError: shapes, mask not bool, bounds not around 1, dual_clip <= 1, agg, denom or norm_length not positive.
    """
    _check(mask, low, high, new_logp=new_logp, old_logp=old_logp)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip bounds the ratio and must be above 1, got {dual_clip}")

    adv = _per_token(adv, mask, "adv")  # (B, T), 0 where masked
    d = torch.where(mask, _up(new_logp) - _up(old_logp.detach()), 0).clamp(-MAX_LOG, MAX_LOG)
    r = d.exp()
    clipped = ((adv > 0) & (r >= high)) | ((adv < 0) & (r <= low))
    objective = torch.where(clipped, r.detach().clamp(low, high) * adv, r * adv)
    if dual_clip is not None:
        over = (adv < 0) & (r >= dual_clip)
        objective, clipped = torch.where(over, dual_clip * adv, objective), clipped | over
    loss = -objective if weight is None else -objective * _per_token(weight, mask, "weight")
    return _aggregate(loss, mask, agg, denom, norm_length), _clip_metrics(d.detach(), adv, mask, clipped, low, high)


def kl_loss(new_logp, ref_logp, mask, estimator="k3", agg="token-mean", denom=None, norm_length=None):
    """Divergence from a reference policy, to be added to (6) with a coefficient: log-probs and bool mask (B, T) -> (0-dim loss,
    metrics kl_ref/k1, kl_ref/k3: means over masked tokens). With d = new - ref of tokens drawn from the policy, the three
    estimators of KL(new || ref) (Schulman) are not three gradients of it:

        estimator    value              gradient through new_logp       its mean over tokens of the policy
        k1           d                  grad new                        0: a loss of k1 pulls nowhere, it only adds noise
        k2           d^2 / 2            d grad new                      the gradient of KL(new || ref)
        k3           exp(-d) - 1 + d    (1 - exp(-d)) grad new          that of KL(ref || new); GRPO's (arXiv:2402.03300)

    d is clamped to +-20. Tokens were drawn from the sampler, not from new: no ratio corrects for that here, as in GRPO.
    ValueError: shapes, mask not bool, estimator.
    """
    _check(mask, new_logp=new_logp, ref_logp=ref_logp)
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"estimator is k1, k2 or k3, got {estimator!r}")
    d = torch.where(mask, _up(new_logp) - _up(ref_logp.detach()), 0).clamp(-MAX_LOG, MAX_LOG)
    value = {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[estimator]
    wide = d.detach().double()
    metrics = {"kl_ref/k1": _mean(wide, mask), "kl_ref/k3": _mean((-wide).expm1() + wide, mask)}
    return _aggregate(value, mask, agg, denom, norm_length), metrics


@torch.no_grad()
def tis_weight(old_logp, mu_logp, mask, cap=2.0, level="token"):
    """Truncated importance sampling, min(w, cap): log-probs (B, T) -> (weight (B, T) in [0, cap], detached; metrics).

    Yao et al. 2025 (the FlashRL post on off-policy rollouts). level "sequence" (verl): w is the product over the masked
    tokens, the same for all of them. mu_logp None: all missing. Metrics, over tokens or sequences: is/{mean,max}, is/ess =
    (sum w)^2 / (n sum w^2), is/frac_capped (w > cap), is/missing (tokens without mu_logp), n/is.
    ValueError: shapes, mask not bool, cap <= 0, level.
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    if level not in ("token", "sequence"):
        raise ValueError(f"level is 'token' or 'sequence', got {level!r}")
    log_w, known = _log_w(old_logp, mu_logp, mask)
    unit = mask
    if level == "sequence":
        log_w, unit = log_w.sum(1, keepdim=True), mask.any(1, keepdim=True)  # (B, 1)
    w = _weight(log_w)
    weight = w.clamp(max=cap)
    return torch.where(mask, weight, 0), _weight_metrics(weight, unit, w > cap, mask & ~known)


@torch.no_grad()
def icepop_weight(old_logp, mu_logp, mask, low=0.5, high=5.0):
    """IcePop: w where low <= w <= high, else 0. Log-probs (B, T) -> (weight (B, T), detached; metrics of `tis_weight`).

    Ling team 2025; the same rule in INTELLECT-3 and verl. is/frac_capped is the share of tokens dropped.
    ValueError: shapes, mask not bool, a band not around 1.
    """
    _check(mask, low, high)
    log_w, known = _log_w(old_logp, mu_logp, mask)
    w = _weight(log_w)
    out = (w < low) | (w > high)
    weight = torch.where(mask & ~out, w, 0)
    return weight, _weight_metrics(weight, mask, out, mask & ~known)


@torch.no_grad()
def mis_mask(old_logp, mu_logp, mask, low=0.999, high=1.001):
    """Masked importance sampling: rows whose geometric mean of w is in [low, high] stay. -> (bool mask (B, T), metrics).

    verl's rollout correction (rejection by the mean log ratio). Metrics of `tis_weight` over sequences, with weight 1
    for kept and 0 for masked: is/frac_capped is the share masked. A row without any mu_logp stays.
    ValueError: shapes, mask not bool, a band not around 1.
    """
    _check(mask, low, high)
    log_w, known = _log_w(old_logp, mu_logp, mask)
    w = _weight(log_w.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1))  # (B, 1)
    keep = (w >= low) & (w <= high)
    return mask & keep, _weight_metrics(keep.to(w.dtype), mask.any(1, keepdim=True), ~keep, mask & ~known)


@torch.no_grad()
def mismatch_metrics(old_logp, mu_logp, mask):
    """How far the learner at the starting weights is from the sampler: log-probs (B, T) -> metrics over masked tokens.

    mismatch/kl_k1 = mean(-d) and kl_k3 = mean(exp(d) - 1 - d), d = old - mu clamped to +-20, both estimate KL(mu || old)
    on tokens drawn from mu; abs_dlogp_{mean,p99,max} of |d|, p99 by nearest rank; n/mu, the tokens that have a mu_logp:
    the others are left out, while -inf counts as d = 20. ValueError: shapes, mask not bool.
    """
    d, known = _log_w(old_logp, mu_logp, mask)
    d = d.clamp(-MAX_LOG, MAX_LOG).double()
    tail = d.abs()[known].sort().values
    return {
        "mismatch/kl_k1": _mean(-d, known),
        "mismatch/kl_k3": _mean(d.expm1() - d, known),
        "mismatch/abs_dlogp_mean": _mean(d.abs(), known),
        "mismatch/abs_dlogp_p99": tail[(99 * len(tail) + 99) // 100 - 1] if len(tail) else d.new_zeros(()),
        "mismatch/abs_dlogp_max": _max(d.abs(), known),
        "n/mu": known.sum().double(),
    }


def merge_metrics(parts):
    """Metrics of several micro-batches or ranks, with the same keys -> those of their union, as float64 tensors.

    n/* and is/missing add, *max takes the largest, is/ess is rebuilt from its sums, any other key is the mean weighted by
    its own count (COUNTS). Exact, and merges of merges are too; only *p99 is not: the largest bounds the union's from
    above. ValueError: no parts, or unequal keys.
    """
    if not parts or any(p.keys() != parts[0].keys() for p in parts):
        raise ValueError(f"merge_metrics needs parts with the same keys, got {[sorted(p) for p in parts]}")
    columns = {k: torch.stack([torch.as_tensor(p[k], dtype=torch.float64) for p in parts]) for k in parts[0]}
    merged = {}
    for k, v in columns.items():  # v: (parts,)
        if k.startswith("n/") or k == "is/missing":
            merged[k] = v.sum()
        elif k.endswith(("max", "p99")):
            merged[k] = v.max()
        elif k == "is/ess":
            n, s = columns["n/is"], columns["n/is"] * columns["is/mean"]  # s = sum w
            square = torch.where(v > 0, s.square() / (n * v), 0).sum()  # ess = s^2 / (n sum w^2), solved for sum w^2
            merged[k] = torch.where(square > 0, s.sum().square() / (n.sum() * square), 0)
        else:
            n = columns[next((count for start, count in COUNTS.items() if k.startswith(start)), "n/tok")]
            merged[k] = (v * n).sum() / n.sum().clamp(min=1)
    return merged


# -----------------------------------------------------------------------------
# small parts


def _groups(rewards, group_size):
    """(N,) -> rewards and their validity, (G, group_size) each."""
    r = _up(torch.as_tensor(rewards))
    if r.dim() != 1 or group_size < 1 or len(r) % group_size:
        raise ValueError(f"{r.numel()} rewards of shape {tuple(r.shape)} do not split into groups of {group_size}")
    if r.isinf().any():
        raise ValueError("rewards hold an infinity; mark a sample to leave out with NaN")
    r = r.reshape(-1, group_size)
    return r, ~r.isnan()


def _log_w(old_logp, mu_logp, mask):
    """-> log w (B, T), unclamped: inf where mu_logp is -inf, 0 where masked or missing; and the mask of known mu_logp."""
    mu_logp = torch.full_like(old_logp, torch.nan) if mu_logp is None else mu_logp
    _check(mask, old_logp=old_logp, mu_logp=mu_logp)
    known = mask & ~mu_logp.isnan()
    return torch.where(known, _up(old_logp) - _up(mu_logp), 0), known


def _weight(log_w):
    return log_w.clamp(-MAX_LOG, MAX_LOG).exp()


def _aggregate(loss, mask, agg, denom, norm_length):
    """Token losses (B, T), 0 where masked -> their aggregate, 0-dim: the table of the module docstring."""
    if agg not in AGGS:
        raise ValueError(f"agg is one of {', '.join(AGGS)}, got {agg!r}")
    if norm_length is not None and (agg != AGGS[2] or denom is not None or not norm_length > 0):
        raise ValueError(f"norm_length is the positive L in the default denom of {AGGS[2]}, and has no use elsewhere; "
                         f"got norm_length={norm_length}, agg={agg!r}, denom={denom}")
    lengths = mask.sum(1)  # (B,)
    sequences = (lengths > 0).sum()
    own = {AGGS[0]: lengths.sum(), AGGS[1]: sequences, AGGS[2]: sequences * (norm_length or mask.shape[1])}[agg]
    if denom is None:
        denom = own.clamp(min=1)
    elif not denom > 0:
        if denom != 0 or mask.any():
            raise ValueError(f"denom is {denom} with {int(lengths.sum())} tokens here: pass the mini-batch's count")
        denom = 1
    if agg == "seq-mean-token-mean":
        loss = loss / lengths.clamp(min=1)[:, None]
    return loss.sum() / denom


def _clip_metrics(d, adv, mask, clipped, low, high):
    r, d, pos, neg = d.exp(), d.double(), mask & (adv > 0), mask & (adv < 0)
    shares = {"clip/pos_hi": _mean(r >= high, pos), "clip/pos_lo": _mean(r <= low, pos),
              "clip/neg_lo": _mean(r <= low, neg), "clip/neg_hi": _mean(r >= high, neg),
              "clip/frac": _mean(clipped, mask), "ratio/mean": _mean(r, mask), "ratio/max": _max(r, mask),
              "kl_new_old": _mean(d.expm1() - d, mask)}
    return shares | {"n/tok": mask.sum().double(), "n/pos": pos.sum().double(), "n/neg": neg.sum().double()}


def _weight_metrics(weight, unit, capped, missing):
    w = torch.where(unit, weight, 0).double()  # (B, T) tokens or (B, 1) sequences
    ess = w.sum().square() / (unit.sum() * w.square().sum()).clamp(min=torch.finfo(w.dtype).tiny)
    return {"is/mean": _mean(w, unit), "is/max": _max(w, unit), "is/ess": ess, "is/frac_capped": _mean(capped, unit),
            "is/missing": missing.sum().double(), "n/is": unit.sum().double()}


def _mean(x, where):
    return torch.where(where, x, 0).sum(dtype=torch.float64) / where.sum().clamp(min=1)


def _max(x, where):  # of values >= 0; 0 if there are none
    x = torch.where(where, x, 0).double()
    return x.max() if x.numel() else x.sum()


def _up(x):
    return x if x.dtype == torch.float64 else x.float()


def _per_token(x, mask, name):
    """(B,), (B, 1) or (B, T) -> detached (B, T), 0 where masked."""
    b, t = mask.shape
    if tuple(x.shape) not in ((b,), (b, 1), (b, t)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; with a mask {(b, t)} it is {(b,)}, {(b, 1)} or {(b, t)}")
    x = _up(x.detach())
    return torch.where(mask, x[:, None] if x.dim() == 1 else x, 0)


def _check(mask, low=0.0, high=torch.inf, **tensors):
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask is a bool tensor (B, T), got {mask.dtype} of shape {tuple(mask.shape)}")
    if not 0 <= low < 1 < high:
        raise ValueError(f"low and high bound a ratio, 0 <= low < 1 < high (0.8, 1.24, not eps); got {low} and {high}")
    for name, x in tensors.items():
        if x.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, the mask {tuple(mask.shape)}: both are (B, T)")
