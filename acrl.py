"""ACRL: a controller that holds the gap between learner and sampler at its starting value, through the correction weight.

Adaptive Control RL (arXiv:2607.24062). TIS takes w = pi/mu, the learner's probability of a sampled token at the step's
starting weights over the sampler's, as something to correct. ACRL takes the gap as something to regulate: too large, and
training collapses; forced to 0, and the weights are tied to what the sampler's low precision can express. It raises w to
an exponent that follows the measured gap:

    Y = mean over sequences of ( masked mean over tokens of |pi - mu| )     the gap, on this step's batch         (1)
    X = Y at the start of training, then frozen                             the set point                         (2)
    alpha = gamma sign(A) (1 - Y / X), clamped to +-alpha_max               one size for all tokens, A gives the sign (3)
    weight = clamp((pi / mu) ^ alpha, 0, weight_max)                        detached; takes TIS's place in the loss   (4)

A proportional law: no integral term, no dead band. Why it closes or opens the gap: A > 0 pushes pi up, A < 0 pushes it
down, so whether a token's update moves pi towards mu depends on A and on the side of mu it is on. With gamma = 0.65:

    A     pi/mu   the update moves pi    Y = 2 X: alpha, weight        Y = X / 2: alpha, weight
    > 0   0.5     up, towards mu         -0.65   1.569  amplified      +0.325   0.798  damped
    > 0   2       up, away from mu       -0.65   0.637  damped         +0.325   1.253  amplified
    < 0   0.5     down, away from mu     +0.65   0.637  damped         -0.325   1.253  amplified
    < 0   2       down, towards mu       +0.65   1.569  amplified      -0.325   0.798  damped

At Y = X, and where A = 0, the weight is exactly 1: plain GRPO. TIS would have given 0.5 and 2, whatever A and Y. So ACRL
is no importance correction: it is biased by design, and says so.

In the loop, once a step, after the old pass and on the whole batch (all micro-batches padded to one width, this rank's
sequences as rows; every rank calls it, with no rows if need be):

    weight, metrics = acrl.weight(old_logp, mu_logp, adv, mask)                         # (B, T)
    loss, _ = policy_loss(new_logp, old_logp, adv, mask, low, high, weight=weight, denom=denom)    # each mini-batch, its rows

and state_dict() goes into the checkpoint: a resume that measured X anew would take a drifted gap for the set point.

Metrics, of this rank's tokens: is/{mean,max,ess,frac_capped,missing} and n/is as in clipping.tis_weight (frac_capped: above
weight_max), acrl/w_{p01,p50,p99} by nearest rank; of all ranks: acrl/X, acrl/Y (NaN if no token had both
probabilities), acrl/alpha_pos, the alpha of A > 0. Healthy: Y/X around 1, alpha_pos small. Y at several X with w_p01 near
0 and w_p99 at weight_max: the controller is saturated and the gap is not its to close.

Departures and gaps: the notes settle (3) and (4); what follows is ours
    (1) |pi - mu| of the sampled token; the whole vocabulary would need the engine's logits. distance="logp" takes
        |log pi - log mu|, clamped to 20, instead: it weighs rare tokens, which |pi - mu| hardly sees. `weight`
    (1) token mean inside a sequence, then sequence mean ("sequence-level" in the notes), one Y per batch. `weight`
    (2) X is the mean of Y over the first `baseline_batches` batches, not of one; until then it includes the batch at
        hand, so that the first weight is 1 and the controller fades in. The notes: once, on "initial data". `weight`
    (3), (4) both clamps: Y / X has no upper bound. log weight is clamped to +-20 before exp. `weight`
    (4) mu_logp NaN (the engine lost it): weight 1, not in Y, counted in is/missing. `weight`
    (3) X = 0 (learner and sampler agree to the last bit, as exact kernels do): there is nothing to hold, weight 1. `weight`
    (2) a batch without a usable token leaves the state as it was, with alpha 0. `weight`
"""

import torch
import torch.distributed as dist

from clipping import MAX_LOG, _log_w, _per_token, _up, _weight_metrics


class ACRL:
    """The controller. State: X and the number of batches in it. ValueError: a parameter or a shape out of range.

    gamma: the paper finds 0.5 to 1.7 good, 2.1 and above too strong. alpha_max bounds |alpha|, weight_max >= 1 the weight.
    """

    def __init__(self, gamma=0.65, baseline_batches=8, *, distance="prob", alpha_max=2.0, weight_max=2.0):
        if not (gamma > 0 and alpha_max > 0 and weight_max >= 1 and baseline_batches >= 1):
            raise ValueError("gamma and alpha_max are positive, weight_max and baseline_batches at least 1; got "
                             f"{gamma}, {alpha_max}, {weight_max} and {baseline_batches}")
        if distance not in ("prob", "logp"):
            raise ValueError(f"distance is 'prob' or 'logp', got {distance!r}")
        self.gamma, self.baseline_batches, self.distance = gamma, baseline_batches, distance
        self.alpha_max, self.weight_max = alpha_max, weight_max
        self.X, self.batches = 0.0, 0

    @torch.no_grad()
    def weight(self, old_logp, mu_logp, adv, mask):
        """Log-probs and bool mask (B, T), adv (B,) or (B, T) -> (weight (B, T) in [0, weight_max], 0 where masked; metrics).

        Call it once a step: each of the first `baseline_batches` calls moves X. mu_logp None: all missing.
        """
        mu_logp = torch.full_like(old_logp, torch.nan) if mu_logp is None else mu_logp
        d, known = _log_w(old_logp, mu_logp, mask)  # log(pi / mu), (B, T)
        sign = _per_token(adv, mask, "adv").sign().to(d.dtype)

        if self.distance == "prob":
            gap = (_up(old_logp).double().exp() - _up(mu_logp).double().exp()).abs()
        else:
            gap = d.double().abs().clamp(max=MAX_LOG)
        usable = known & ~gap.isnan()
        lengths = usable.sum(1)  # (B,)
        means = torch.where(usable, gap, 0).sum(1) / lengths.clamp(min=1)
        totals = torch.stack([means.sum(), (lengths > 0).sum().double()])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(totals)
        total, sequences = totals.tolist()

        Y, gain = float("nan"), 0.0
        if sequences:
            Y = total / sequences
            if self.batches < self.baseline_batches:
                self.batches += 1
                self.X += (Y - self.X) / self.batches
            if self.X > 0:
                gain = max(-self.alpha_max, min(self.alpha_max, self.gamma * (1 - Y / self.X)))

        exponent = (gain * sign * d).nan_to_num(nan=0.0)  # 0 * inf, where alpha = 0 and mu = 0
        w = exponent.clamp(-MAX_LOG, MAX_LOG).exp()
        weight = torch.where(mask, w.clamp(max=self.weight_max), 0)
        metrics = _weight_metrics(weight, mask, w > self.weight_max, mask & ~known)
        metrics |= {f"acrl/{k}": totals.new_tensor(v) for k, v in [("X", self.X), ("Y", Y), ("alpha_pos", gain)]}
        return weight, metrics | _percentiles(weight[mask].double().sort().values)

    def state_dict(self):
        """The state, to be saved with the checkpoint (plain numbers)."""
        return {"X": self.X, "batches": self.batches, "distance": self.distance}

    def load_state_dict(self, state):
        """Take over a `state_dict`. ValueError if its set point was measured by another distance."""
        if state["distance"] != self.distance:
            raise ValueError(f"the saved set point is a distance of {state['distance']}, not of {self.distance}")
        self.X, self.batches = float(state["X"]), int(state["batches"])


def _percentiles(w):
    """Sorted (n,) -> nearest-rank percentiles, 0 if there are none."""
    return {f"acrl/w_p{p:02d}": w[(p * len(w) + 99) // 100 - 1] if len(w) else w.new_zeros(()) for p in (1, 50, 99)}
