"""Calibrated Clipping (arXiv:2609.22870): clip bounds for FP8 ratios, read off a BF16 shadow of the same tokens.

The clip of `clipping.policy_loss` compares r = exp(new_logp - old_logp) with two bounds. In FP8 both log-probs carry rounding
noise, and r spreads wider than it would in BF16 at the same weights. A bad token (A < 0) that BF16 would go on pushing down has
r8 <= 0.8 by noise alone; its gradient is exactly 0, and it is never unlearned. Such tokens are *over-clipped*. They are few and
sit in high-entropy answers, and from about step 100 on the entropy surges. A wider lower bound alone cures that, but upsets the
balance of good against bad tokens. So every `interval` steps two forwards without FP8 (`precision.high_precision`) give r16
beside the r8 of the loss, and the bounds move to where FP8 clips as BF16 does at the reference bounds:

    Stage 1    alpha_low = F16(ref_low),  L* = F8^-1(alpha_low)       F: empirical CDF of r over the tokens with A < 0       (1)

    Stage 2    rho(low, high) = sum over A > 0, r < high of w pi r |A|  /  sum over A < 0, r > low of w pi r |A|             (2)
               H* solves rho8(L*, H*) = rho16(ref_low, ref_high)      w: the TIS weight; pi = exp(mu_logp), the sampler's

    Damping    b <- b + clip((b* - b) / 2, -delta, delta), then into the grid's range                                        (3)

(1) is a count: with k16 tokens at or below ref_low in BF16, L* is the l of 0.50, 0.52 .. 0.90 for which #(A < 0, r8 <= l) is
nearest to k16. H* is the h of 1.20, 1.22 .. 2.00 for which rho8(L*, h) is nearest to rho16. Clipped means r <= low (A < 0) or
r >= high (A > 0), as in the loss, and a clipped token adds 0 to (2). Without noise the bounds go to the reference.

Worked number. Of 10,000 tokens with A < 0, 5 have r16 <= 0.8 but 28 have r8 <= 0.8, so that at least 23 are over-clipped. If 5
have r8 <= 0.70 and more r8 <= 0.72, L* = 0.70, and low moves from 0.60 to 0.60 + min(0.10 / 2, 0.05) = 0.65 for the next step.

    calib = CalibratedClipping()                    a training step, of several updates (with one, r16 = 1: nothing to align)
        old_logp, old_logp_hp                       before the first update
        for each micro-batch, before its update:    new_logp_hp, new_logp, and the loss with calib.low, calib.high
            calib.observe(...)                      if calib.due(step)
        metrics = calib.update()                    after the last update, on every rank

State. All statistics are float64 sums, so they stream over micro-batches, ranks and calibrations (`pool`; below about 0.5M
tokens H is noisy). Those over r8 are histograms with edges 0, 0.0005 .. 2, the grids among them: what is solved on a grid is
exact; `calib/low_quantile` is the edge at or above the exact value, `calib/high_tail` the one at or below, and rho at a bound
off the edges is read at the nearest.

Ablations. stages: "lower" (only Stage 1, high stays ref_high), "upper" (only Stage 2, low stays ref_low). lower: "quantile" (L*
is the k16-th smallest r8; no grid, no range). upper: "tail" (as many A > 0 tokens with r8 >= H* as with r16 >= ref_high),
"inverse" (1 / L*), "proportion" (1 + (1 - L*) (ref_high - 1) / (1 - ref_low)); all within the grid range. pi_samp=False:
pi = 1. freeze_after: the number of calibrations after which the bounds stay.

Metrics, over tokens with A not 0; NaN where nothing is there to divide by. Targets and rho are pooled, all else is this step's.
    clip/low, clip/high                   in use; next step's: calib/{low,high}_new; targets: calib/{low,high}_star, NaN if kept
    calib/{low_quantile,high_tail}        the two targets without a grid; calib/kept_{low,high}: 1 if a guard kept the old bound
    calib/alpha_low                       F16(ref_low)
    calib/rho_hp, _ref, _used, rho, _new  (2): rho16; rho8 at the reference, in use, at (L*, H*), at the new bounds
    calib/{neg_lo,pos_hi}{,_hp,_used}     clipped share of that sign: r8 and r16 at the reference, r8 at the bounds in use
    clip/{over,under}, calib/*_used       share of A < 0 that only FP8, that only BF16 clips; _used: FP8 at the bounds in use
    calib/{precision,recall,f1}{,_used}   FP8's clip decisions against BF16's at the reference, both signs together
    calib/nmae_{ratio,prob,quotient}      mean |r8 - r16| / mean r16; the same of p = exp(new_logp); the first over the second
    calib/std_logr{,_hp}                  standard deviations of log r8 and log r16
    calib/over_{bins,rate}/0-0.2 .. 1+    per bin of the answer's mean entropy (nats; only if given): share of all over-clipped
                                          tokens; share of the bin's A < 0 tokens that is over-clipped
    calib/n_{neg,pos,missing,nan}         tokens; missing: without mu_logp; nan: a ratio is NaN

What the paper leaves open, and what we chose (its text is known to us through notes only)
    Shadow passes: at the weights of the FP8 pass beside them, r8 is the ratio of the loss. The caller
    Ties: the largest l, the tighter bound; the h nearest to the bound in use, then the smaller. `_solve`
    Empty tails: k16 = 0 keeps low, which would run to the grid's end, and Stage 2 holds the low in use. `_solve`
    No mass in N16, N8 or P16, or a sum that is not finite, keeps high; a single NaN ratio keeps both. `_solve`
    Stage 2 holds L*, a grid value, not the damped bound; calib/rho_new shows the latter. `_solve`
    Masked, A = 0 and NaN-ratio tokens are in no sum; without mu_logp (NaN) a token is in (1), not in (2). `observe`
    A token of weight 0 (IcePop) is in (1), not in (2). `_stats`
    Log ratios are clamped to +-20, as in the loss; the dual clip is in no sum. `_ratio`, `_stats`
    "quantile" keeps low below 1; "inverse" and "proportion" keep high whenever low is kept. `_solve`
    The sums of all ranks are added before solving. `_reduce`
"""

import math
from bisect import bisect_left

import torch
import torch.distributed as dist

MAX_LOG = 20.0  # as in clipping.py, which imports this file
PER_ONE = 2000  # histogram edges in [0, 1): a width of 0.0005
BELOW_ONE = 1 - 1 / PER_ONE
CHOICES = {"stages": ("both", "lower", "upper"), "lower": ("grid", "quantile"),
           "upper": ("rho", "tail", "inverse", "proportion")}
ENTROPY_EDGES = (0.2, 0.5, 1.0)
ENTROPY_BINS = ("0-0.2", "0.2-0.5", "0.5-1", "1+")


class CalibratedClipping:
    """The bounds and their calibration, (1) - (3). ValueError: bounds not around 1, unknown rules, grids off the edges."""

    def __init__(self, ref_low=0.8, ref_high=1.24, low=0.6, high=1.8, interval=20, delta_low=0.05, delta_high=0.10, *,
                 grid_low=(0.5, 0.9), grid_high=(1.2, 2.0), grid_step=0.02, stages="both", upper="rho", lower="grid", pool=1,
                 freeze_after=0, pi_samp=True):
        config = {k: v for k, v in locals().items() if k not in ("self", "low", "high")}
        self.config = {k: list(v) if k in ("grid_low", "grid_high") else v for k, v in config.items()}  # as JSON returns it
        for name, choices in CHOICES.items():
            if config[name] not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, got {config[name]!r}")
        for a, b in ((low, high), (ref_low, ref_high), *zip(grid_low, grid_high, strict=True)):
            if not 0 <= a < 1 < b < math.inf:
                raise ValueError(f"low, ref_low and grid_low are in [0, 1), their partners above 1; got {a} and {b}")
        for name, least in (("interval", 1), ("pool", 1), ("freeze_after", 0), ("delta_low", 0), ("delta_high", 0)):
            if not config[name] >= least:
                raise ValueError(f"{name} is {least} or more, got {config[name]}")
        self.ref_low, self.ref_high, self.interval, self.stages = ref_low, ref_high, interval, stages
        self.delta_low, self.delta_high, self.upper, self.lower = delta_low, delta_high, upper, lower
        self.pool, self.freeze_after, self.pi_samp = pool, freeze_after, pi_samp
        self.low = ref_low if stages == "upper" else low
        self.high = ref_high if stages == "lower" else high
        self.grid_low, self.grid_high = _grid(*grid_low, grid_step), _grid(*grid_high, grid_step)
        self.edges = [i / PER_ONE for i in range(round(max(2.0, grid_high[1]) * PER_ONE) + 1)]
        self.calibrations = 0  # how often the bounds were moved, or kept by a guard
        self.past = []  # the sums of the last pool - 1 updates
        self.sums = self._zeros()

    @property
    def frozen(self):
        return 0 < self.freeze_after <= self.calibrations

    def due(self, step):
        """Whether `step`, counted from 1, is a calibration step: 1, 1 + interval, ... until frozen."""
        return (step - 1) % self.interval == 0 and not self.frozen

    @torch.no_grad()
    def observe(self, new_logp_hp, old_logp_hp, new_logp, old_logp, mu_logp, weight, adv, mask, entropy=None):
        """Add a micro-batch: log-probs and bool mask (B, T), adv and weight (B,) or (B, T), weight None = 1; entropy (B,), the
        answers' mean entropy, or None. ValueError: shapes, mask not bool."""
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ValueError(f"mask is a bool tensor (B, T), got {mask.dtype} of shape {tuple(mask.shape)}")
        logps = {"new_logp_hp": new_logp_hp, "old_logp_hp": old_logp_hp, "new_logp": new_logp, "old_logp": old_logp}
        for name, x in {**logps, "mu_logp": mu_logp}.items():
            if x.shape != mask.shape:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, the mask {tuple(mask.shape)}: both are (B, T)")
        adv = _per_token(adv, mask, "adv")
        weight = 1.0 if weight is None else _per_token(weight, mask, "weight")
        entropy = torch.full_like(adv, math.nan) if entropy is None else _per_token(entropy, mask, "entropy")
        r16, r8 = _ratio(new_logp_hp, old_logp_hp, mask), _ratio(new_logp, old_logp, mask)
        pi = mu_logp.double().exp() if self.pi_samp else 1.0
        value = torch.where(mu_logp.isnan(), 0, weight * pi * adv.abs())  # w pi |A|, what (2) multiplies by r

        counted, nan = (adv > 0) | (adv < 0), r16.isnan() | r8.isnan()  # adv is 0 where masked
        keep = counted & ~nan
        columns = (adv, r16, r8, value, new_logp_hp.double().exp(), new_logp.double().exp(), entropy)
        new = self._stats(*(x[keep].cpu() for x in columns))  # on the CPU: few numbers, and the sums have a fixed order there
        new |= {"n_nan": (counted & nan).sum().cpu(), "n_missing": (keep & mu_logp.isnan()).sum().cpu()}
        self.sums = {k: s + new[k] for k, s in self.sums.items()}

    def update(self, move=True):
        """Solve (1) and (2) on what all ranks observed, move the bounds by (3) and start anew. -> metrics, floats.

        Every rank calls it, also one that observed nothing. move=False only measures: bounds and count stay."""
        now = self._reduce()
        total = {k: sum(past[k] for past in self.past) + s for k, s in now.items()}
        self.past = (self.past + [now])[1 - self.pool :] if self.pool > 1 else []
        self.sums = self._zeros()
        low_star, high_star, metrics, rho = self._solve(total, broken=bool(now["n_nan"]))
        low, high = self.low, self.high
        if move and not self.frozen:
            range_low = (0.0, BELOW_ONE) if self.lower == "quantile" else (self.grid_low[0], self.grid_low[-1])
            self.low = _damped(low, low_star, self.delta_low, *range_low)
            self.high = _damped(high, high_star, self.delta_high, self.grid_high[0], self.grid_high[-1])
            self.calibrations += 1
        metrics |= {"clip/low": low, "calib/low_star": low_star, "calib/low_new": self.low, "calib/rho_used": rho(low, high),
                    "clip/high": high, "calib/high_star": high_star, "calib/high_new": self.high,
                    "calib/rho_new": rho(self.low, self.high),
                    "calib/kept_low": float(math.isnan(low_star)), "calib/kept_high": float(math.isnan(high_star))}
        return metrics | _report(now)

    def state_dict(self):
        """Plain numbers, lists and strings: bounds, count, configuration, the sums so far and those of the pool."""
        sums, *past = [{k: s.tolist() for k, s in sums.items()} for sums in (self.sums, *self.past)]
        return {"low": self.low, "high": self.high, "calibrations": self.calibrations, "config": self.config, "sums": sums,
                "past": past}

    def load_state_dict(self, state):
        """Take over a `state_dict`. ValueError if it was written under another configuration."""
        saved = state["config"]
        other = [k for k in self.config if saved.get(k) != self.config[k]]
        if other:
            raise ValueError("the saved calibration has another configuration: "
                             + ", ".join(f"{k} was {saved.get(k)}, is {self.config[k]}" for k in other))
        self.low, self.high, self.calibrations = state["low"], state["high"], state["calibrations"]
        self.sums, *self.past = [{k: torch.tensor(s, dtype=torch.float64) for k, s in sums.items()}
                                 for sums in (state["sums"], *state["past"])]

    # -----------------------------------------------------------------------------
    # the sums, and the solution

    def _stats(self, adv, r16, r8, value, p16, p8, entropy):
        """Tokens (n,) with A != 0 -> the sums of everything `_solve` and `_report` need."""
        neg, pos = adv < 0, adv > 0
        v16, v8 = value * r16, value * r8  # float64
        lo16, hi16 = neg & (r16 <= self.ref_low), pos & (r16 >= self.ref_high)
        s = {
            "n_neg": neg.sum(), "k16": lo16.sum(), "N16": v16[neg & ~lo16].sum(),
            "n_pos": pos.sum(), "t16": hi16.sum(), "P16": v16[pos & ~hi16].sum(),
            "c8": self._histogram(r8[neg]), "N8": self._histogram(r8[neg], v8[neg]),
            "t8": self._histogram(r8[pos], right=True), "P8": self._histogram(r8[pos], v8[pos], right=True),
            "d_ratio": (r8.double() - r16).abs().sum(), "ratio": r16.double().sum(),
            "d_prob": (p8 - p16).abs().sum(), "prob": p16.sum(),
        }  # fmt: skip
        for name, log in (("log16", r16.double().log()), ("log8", r8.double().log())):
            s |= {name: log.sum(), f"{name}_sq": log.square().sum()}
        for x, low, high in (("", self.ref_low, self.ref_high), ("_used", self.low, self.high)):
            lo8, hi8 = neg & (r8 <= low), pos & (r8 >= high)
            s |= {f"neg_lo{x}": lo8.sum(), f"over{x}": (lo8 & ~lo16).sum(), f"under{x}": (lo16 & ~lo8).sum(),
                  f"pos_hi{x}": hi8.sum(), f"both{x}": ((lo8 & lo16) | (hi8 & hi16)).sum()}
        bin_of, known = torch.bucketize(entropy, torch.tensor(ENTROPY_EDGES, dtype=entropy.dtype), right=True), ~entropy.isnan()
        for name, which in (("over_bins", neg & (r8 <= self.ref_low) & ~lo16), ("neg_bins", neg)):
            s[name] = torch.bincount(bin_of[which & known], minlength=len(ENTROPY_BINS))
        return {k: x.double() for k, x in (s | {"n_entropy": known.sum()}).items()}

    def _histogram(self, r, value=None, right=False):
        """Sums of value (1) over bins between the edges, one more at each end: (e', e] or, with right=True, [e', e)."""
        bins = torch.bucketize(r, torch.tensor(self.edges, dtype=r.dtype), right=right)
        return torch.bincount(bins, value, minlength=len(self.edges) + 1)

    def _zeros(self):
        zero = torch.zeros((), dtype=torch.float64)
        return self._stats(*[zero.new_zeros(0)] * 7) | {"n_nan": zero, "n_missing": zero}

    def _reduce(self):
        """The sums over all ranks, by one all-reduce of one vector."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.sums
        flat = torch.cat([s.flatten() for s in self.sums.values()]).to("cuda" if "nccl" in dist.get_backend() else "cpu")
        dist.all_reduce(flat)
        parts = flat.cpu().split([s.numel() for s in self.sums.values()])
        return {k: part.view(s.shape) for part, (k, s) in zip(parts, self.sums.items(), strict=True)}

    def _solve(self, s, broken):
        """Sums -> low_star and high_star, NaN where a guard keeps the old bound; metrics; the function rho8(low, high)."""
        from_above = lambda x: x.flip(0).cumsum(0).flip(0)[1:].tolist()  # noqa: E731
        c8 = s["c8"].cumsum(0).tolist()  # [i]: number of A < 0 tokens with r8 <= edges[i]
        t8 = from_above(s["t8"])  #        [i]: number of A > 0 tokens with r8 >= edges[i]
        P8 = s["P8"].cumsum(0).tolist()  # [i]: mass of the A > 0 tokens with r8 < edges[i]
        N8 = from_above(s["N8"])  #        [i]: mass of the A < 0 tokens with r8 > edges[i]
        k16, t16 = s["k16"].item(), s["t16"].item()
        at = lambda bound: min(round(bound * PER_ONE), len(self.edges) - 1)  # noqa: E731
        rho = lambda low, high: _div(P8[at(high)], N8[at(low)])  # noqa: E731
        rho16 = _div(s["P16"], s["N16"])

        quantile = self.edges[min(bisect_left(c8, k16), len(self.edges) - 1)] if k16 else math.nan
        tail = self.edges[max(i for i, n in enumerate(t8) if n >= t16)] if t16 else math.nan

        # Stage 1, (1)
        if self.stages == "upper":
            low_star = self.ref_low
        elif not k16 or broken:
            low_star = math.nan
        elif self.lower == "quantile":
            low_star = min(quantile, BELOW_ONE)
        else:
            low_star = min(self.grid_low, key=lambda l: (abs(c8[at(l)] - k16), -l))

        # Stage 2, (2), with L* held
        L = self.low if math.isnan(low_star) else low_star
        if self.stages == "lower":
            high_star = self.ref_high
        elif broken:
            high_star = math.nan
        elif self.upper == "rho":
            solvable = 0 < rho16 < math.inf and N8[at(L)] > 0 and math.isfinite(P8[-1])
            distance = lambda h: (abs(rho(L, h) - rho16), round(abs(h - self.high), 9), h)  # noqa: E731
            high_star = min(self.grid_high, key=distance) if solvable else math.nan
        else:
            proportion = 1 + (1 - low_star) * (self.ref_high - 1) / (1 - self.ref_low)
            high_star = {"tail": tail, "inverse": _div(1, low_star), "proportion": proportion}[self.upper]
            high_star = high_star if math.isnan(high_star) else min(max(high_star, self.grid_high[0]), self.grid_high[-1])

        H = self.high if math.isnan(high_star) else high_star
        return low_star, high_star, {
            "calib/low_quantile": quantile, "calib/high_tail": tail, "calib/alpha_low": _div(k16, s["n_neg"]),
            "calib/rho_hp": rho16, "calib/rho_ref": rho(self.ref_low, self.ref_high), "calib/rho": rho(L, H),
        }, rho  # fmt: skip


# -----------------------------------------------------------------------------
# small parts


def _report(now):
    """The sums of one calibration -> what was clipped, and how noisy the ratio is."""
    s = {k: x.tolist() for k, x in now.items()}
    m = {f"calib/{k}": s[k] for k in ("n_neg", "n_pos", "n_missing", "n_nan")}
    m |= {"calib/neg_lo_hp": _div(s["k16"], s["n_neg"]), "calib/pos_hi_hp": _div(s["t16"], s["n_pos"])}
    for x in ("", "_used"):
        clipped8, clipped16, both = s[f"neg_lo{x}"] + s[f"pos_hi{x}"], s["k16"] + s["t16"], s[f"both{x}"]
        m |= {f"calib/neg_lo{x}": _div(s[f"neg_lo{x}"], s["n_neg"]), f"calib/pos_hi{x}": _div(s[f"pos_hi{x}"], s["n_pos"]),
              f"calib/over{x}" if x else "clip/over": _div(s[f"over{x}"], s["n_neg"]),
              f"calib/under{x}" if x else "clip/under": _div(s[f"under{x}"], s["n_neg"]),
              f"calib/precision{x}": _div(both, clipped8), f"calib/recall{x}": _div(both, clipped16),
              f"calib/f1{x}": _div(2 * both, clipped8 + clipped16)}
    m |= {"calib/nmae_ratio": _div(s["d_ratio"], s["ratio"]), "calib/nmae_prob": _div(s["d_prob"], s["prob"])}
    m["calib/nmae_quotient"] = _div(m["calib/nmae_ratio"], m["calib/nmae_prob"])
    n = s["n_neg"] + s["n_pos"]
    for name, log in (("calib/std_logr", "log8"), ("calib/std_logr_hp", "log16")):
        m[name] = math.sqrt(max(_div(s[f"{log}_sq"], n) - _div(s[log], n) ** 2, 0.0)) if n else math.nan
    if s["n_entropy"]:
        for name, over, neg in zip(ENTROPY_BINS, s["over_bins"], s["neg_bins"], strict=True):
            m |= {f"calib/over_bins/{name}": _div(over, sum(s["over_bins"])), f"calib/over_rate/{name}": _div(over, neg)}
    return m


def _damped(b, target, delta, bottom, top):
    """(3). 0.60 towards 0.70 with delta 0.05 -> 0.65; towards 0.64 -> 0.62; NaN: stays."""
    if math.isnan(target) or target == b:
        return b
    return min(max(b + min(max((target - b) / 2, -delta), delta), bottom), top)


def _ratio(new_logp, old_logp, mask):
    """exp(new - old) in the arithmetic of `clipping.policy_loss`, 1 where masked: the same tokens are clipped."""
    return torch.where(mask, _up(new_logp) - _up(old_logp), 0).clamp(-MAX_LOG, MAX_LOG).exp()


def _grid(bottom, top, step):
    """0.5, 0.9, 0.02 -> [0.5, 0.52 .. 0.9], both ends included; every value the float nearest to its decimals."""
    n = round((top - bottom) / step) if step > 0 else 0
    grid = [round(bottom + i * step, 9) for i in range(n + 1)]
    if n < 1 or abs(grid[-1] - top) > 1e-9 or any(abs(g * PER_ONE - round(g * PER_ONE)) > 1e-6 for g in grid):
        raise ValueError(f"a grid goes from bottom to top in whole steps, all multiples of {1 / PER_ONE}; "
                         f"got {bottom} to {top} in steps of {step}")
    return grid


def _div(a, b):
    return float(a) / float(b) if b else math.nan


def _per_token(x, mask, name):
    """(B,), (B, 1) or (B, T) -> float64 (B, T), 0 where masked."""
    b, t = mask.shape
    if tuple(x.shape) not in ((b,), (b, 1), (b, t)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; with a mask {(b, t)} it is {(b,)}, {(b, 1)} or {(b, t)}")
    return torch.where(mask, (x[:, None] if x.dim() == 1 else x).double(), 0)


def _up(x):
    return x if x.dtype == torch.float64 else x.float()
