"""Tables and pictures of the ratio study (ratio.py): what low precision does to r, what calibration does about it.

For each arithmetic and against a reference (BF16, as in the paper; FP32; BF16 weights in FP32), over the tokens with A not 0:

    std log r; policy std: of the FP32 arithmetic's log r; noise std, mean: of log r - log r_ref
    clip fractions: A < 0 tokens with r <= 0.8, A > 0 tokens with r >= 1.24, and over the reference's (`ratio`)
    over-clip: A < 0, reference above 0.8, this one at or below it; precision, recall and F1 of the clip decision, both signs:
    equal clip fractions are not equal clipped tokens
    NMAE = mean |x - x_ref| / mean |x_ref| of the ratio and of the probability at the new weights, and their quotient
    L*, H*: the paper's grid; exact quantile (lower) and equal upper tail, without a grid

Intervals are bootstraps over prompts: answers of one prompt are alike. All answers of a seed share its updates as well, so the
range over seeds is printed beside; three seeds give a range, not a confidence.

Held out. The bound is the exact quantile (middle of the k-th and the next r) on one half of the prompts of all seeds; its clip
fraction over the reference's is measured on the other half. Both directions are reported, not their mean: a bound too low for
one half is too high for the other, and a mean hides both. `test`: the bound is given, the tested half is resampled; `refit`: so
is the half it was fitted on. `seeds`: the bound from all other seeds, smallest and largest result. Cures on trial, in the same
halves and with bounds refitted to the reference's count: `shrunk`, log r times the slope of a regression of the reference's
log r on it, per bin of the old probability (signal over total variance); `per-bin`, a bound per bin. F1 of A < 0 tokens, all on
one definition.
"""

import csv
import math
import os

import matplotlib
import torch

import clipping
import precision
import stats
from runlog import read_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LOW, HIGH = 0.8, 1.24
FEWEST = 20  # clipped tokens of the reference below which no ratio is printed
PROB_EDGES = torch.tensor([0.1, 0.3, 0.6, 0.9, 0.99])  # bins of the old probability
SHOWN = ("bf16", "fp8-tensor", "fp8-row", "fp8-block")
# of Qwen3-8B-Base, arXiv:2609.22870: clip-fraction ratio, NMAE quotient
PUBLISHED = {"fp8-tensor": (6.68, 2.90), "fp8-row": (5.48, 2.08), "fp8-block": (3.94, 1.65)}


TARGETS = {"L* grid": "low_star", "L* exact": "low_quantile", "H* rho": "high_star", "H* tail": "high_tail"}


def flat(seeds, what, name):
    """Tokens with A not 0 of all seeds in one arithmetic: dict of (tokens,) tensors logr, old, new, entropy, adv, mu, prompt
    (the unit of the bootstrap), answer, half and seed."""
    parts, answers, prompts = [], 0, 0
    for k, run in enumerate(seeds):
        samples, pair = run["samples"] if what == "main" else run["some"], what_of(run, what)[name]
        lengths = torch.tensor([len(s["completion"].token_ids) for s in samples])
        mask = torch.arange(pair["old"].shape[1]) < lengths[:, None]
        rows = torch.arange(len(samples))[:, None].expand_as(mask)[mask]
        group = len(samples) // len({s["row"]["id"] for s in samples})
        entropy = (pair["entropy"] * mask).sum(1) / lengths
        t = {"old": pair["old"][mask], "new": pair["new"][mask], "entropy": entropy[rows],
             "mu": torch.tensor([x for s in samples for x in s["completion"].logps]),
             "adv": torch.tensor([s["adv"] for s in samples])[rows], "answer": rows + answers,
             "prompt": rows // group + prompts, "half": (rows // group) % 2, "seed": torch.full_like(rows, k)}
        parts.append({key: x[t["adv"] != 0] for key, x in t.items()})
        answers, prompts = answers + len(samples), prompts + len(samples) // group
    t = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return t | {"logr": t["new"] - t["old"]}


def what_of(run, what):
    return run["sweep"][what] if isinstance(what, float) else run[what]


def per_prompt(x, t):
    """Sums of token values per prompt, float64."""
    return torch.zeros(int(t["prompt"].max()) + 1, dtype=torch.float64).index_add_(0, t["prompt"], x.double())


def calibrate(t, ref, **rules):
    """Metrics of clipping.CalibratedClipping on all tokens of t against those of ref (same tokens); nothing moves."""
    calib = clipping.CalibratedClipping(LOW, HIGH, **rules)
    weight = (t["old"] - t["mu"]).clamp(-20, 20).exp().clamp(max=2.0)
    rows = [x[None] for x in (ref["new"], ref["old"], t["new"], t["old"], t["mu"], weight, t["adv"])]
    calib.observe(*rows, torch.ones(1, len(t["old"]), dtype=torch.bool), ref["entropy"][None])
    return calib.update(move=False)


def bound_of(logr, low_ref, count=None):
    """The exact quantile: between the k-th smallest log r and the next, k = how many the reference clips; count (draws, tokens)
    repeats tokens. Returns a float, or (draws,) of them; -inf where k is 0."""
    order = logr.argsort()
    x = torch.cat([torch.tensor([-math.inf]), logr[order], torch.tensor([math.inf])])
    weight = (torch.ones(1, len(logr)) if count is None else count)[:, order]
    k = (weight * low_ref[order]).sum(1, keepdim=True)
    ranks = weight.cumsum(1)
    lower, upper = (x[torch.searchsorted(ranks, k + shift) + 1] for shift in (-0.5, 0.5))  # the k-th and the next
    middle = torch.where(upper.isfinite(), (lower + upper) / 2, lower)
    bounds = torch.where(k > 0, middle, -math.inf).squeeze(1)
    return bounds.item() if count is None else bounds


def direction(t, ref, fit, test, draws=500, seed=0):
    """One direction of the held-out test: (bound, ratio, test interval, refit interval). fit, test: masks of A < 0 tokens."""
    low_ref = ref["logr"] <= math.log(LOW)
    bound = bound_of(t["logr"][fit], low_ref[fit])
    k8, k16 = per_prompt(test & (t["logr"] <= bound), t), per_prompt(test & low_ref, t)
    generator, prompts = torch.Generator().manual_seed(seed), t["prompt"]
    drawn = []
    for mask in (fit, test):  # how often each prompt of that half is drawn: (draws, prompts)
        own = prompts[mask].unique()
        index = own[torch.randint(len(own), (draws, len(own)), generator=generator)]
        drawn.append(torch.zeros(draws, len(k8)).scatter_add_(1, index, torch.ones(index.shape)))
    refit = bound_of(t["logr"][fit], low_ref[fit], drawn[0][:, prompts[fit]])  # (draws,)
    weight = drawn[1][:, prompts[test]]
    again = (weight * (t["logr"][test][None] <= refit[:, None])).sum(1) / (weight * low_ref[test]).sum(1)
    given = (drawn[1].double() @ k8) / (drawn[1].double() @ k16)
    return math.exp(bound), (k8.sum() / k16.sum()).item(), stats.interval(given), stats.interval(again)


def held_out(t, ref):
    """Both directions, across seeds, and the cures: see the module docstring."""
    neg, row = t["adv"] < 0, {}
    low_ref = neg & (ref["logr"] <= math.log(LOW))
    bins = torch.bucketize(t["old"].exp(), PROB_EDGES)
    decided = {name: torch.zeros_like(neg) for name in ("quantile", "shrunk", "per-bin")}
    for half in (0, 1):
        fit, test = neg & (t["half"] == half), neg & (t["half"] != half)
        bound, ratio, given, refit = direction(t, ref, fit, test)
        row |= {f"half {half}: L": bound, f"half {half}: ratio": ratio, f"half {half}: test low": given[0],
                f"half {half}: test high": given[1], f"half {half}: refit low": refit[0], f"half {half}: refit high": refit[1]}
        decided["quantile"] |= test & (t["logr"] <= math.log(bound))
        shrunk = t["logr"].clone()
        for b in range(len(PROB_EDGES) + 1):
            here = bins == b
            x, y = t["logr"][(t["half"] == half) & here].double(), ref["logr"][(t["half"] == half) & here].double()
            shrunk[here] *= ((x * y).sum() / x.square().sum().clamp(min=1e-30)).clamp(0, 1).item()
            if (fit & here).any():
                decided["per-bin"] |= test & here & (t["logr"] <= bound_of(t["logr"][fit & here], low_ref[fit & here]))
        decided["shrunk"] |= test & (shrunk <= bound_of(shrunk[fit], low_ref[fit]))
    each = t["seed"].unique()
    if len(each) > 1:
        across = [direction(t, ref, neg & (t["seed"] != s), neg & (t["seed"] == s))[1] for s in each]
        row |= {"seeds: smallest": min(across), "seeds: largest": max(across)}
    for name, clipped in ({"plain": neg & (t["logr"] <= math.log(LOW))} | decided).items():
        both = (clipped & low_ref).sum().item()
        row |= {f"{name} over %": 100 * (clipped & ~low_ref).sum().item() / neg.sum().item(),
                f"{name} F1 neg": 2 * both / max(1, clipped.sum().item() + low_ref.sum().item())}
    return row


def spread(t, ref, policy):
    """Moments of log r and of its noise, NMAEs and clip fractions by sign and side against ref's, with intervals."""
    n, x, xx = (per_prompt(v, t) for v in (torch.ones_like(t["logr"]), t["logr"], t["logr"].double().square()))
    index = stats.resamples(len(n))
    N, X, XX = (v[index].sum(1) for v in (n, x, xx))
    noise = (t["logr"] - ref["logr"]).double()
    row = {"tokens": len(t["logr"]), "std log r": t["logr"].double().std().item()}
    row |= dict(zip(("std low", "std high"), stats.interval((XX / N - (X / N) ** 2).clamp(min=0).sqrt()), strict=True))
    row |= {"policy std": policy["logr"].double().std().item()}
    row |= {"noise std": noise.std().item(), "noise mean": noise.mean().item()}
    r, r_ref, p, p_ref = (v.double().exp() for v in (t["logr"], ref["logr"], t["new"], ref["new"]))
    four = [per_prompt(v, t) for v in ((r - r_ref).abs(), r_ref, (p - p_ref).abs(), p_ref)]
    quotient = lambda a, b, c, d: (a / b) / (c / d)  # noqa: E731
    totals = [v.sum() for v in four]
    row |= {"NMAE ratio": (totals[0] / totals[1]).item(), "NMAE prob": (totals[2] / totals[3]).item()}
    row["NMAE quotient"] = quotient(*totals).item()
    limits = stats.interval(quotient(*(v[index].sum(1) for v in four)))
    row |= dict(zip(("quotient low", "quotient high"), limits, strict=True))
    for name, of, bound in (("neg_lo", t["adv"] < 0, LOW), ("pos_hi", t["adv"] > 0, HIGH),
                            ("neg_hi", t["adv"] < 0, HIGH), ("pos_lo", t["adv"] > 0, LOW)):
        side = torch.le if bound < 1 else torch.ge
        clipped, clipped_ref = of & side(t["logr"], math.log(bound)), of & side(ref["logr"], math.log(bound))
        counts = {"n": of, "clipped": clipped, "clipped ref": clipped_ref}
        row |= {f"{name} {key}": int(mask.sum()) for key, mask in counts.items()}
        row[f"{name} %"] = 100 * row[f"{name} clipped"] / max(1, row[f"{name} n"])
        values = (math.nan,) * 3
        if row[f"{name} clipped ref"] >= FEWEST:
            values = stats.ratio_of_sums(per_prompt(clipped, t), per_prompt(clipped_ref, t))
        row |= dict(zip((f"{name} ratio", f"{name} ratio low", f"{name} ratio high"), values, strict=True))
    each = [(t["logr"][t["seed"] == s].double().std().item()) for s in t["seed"].unique()]
    return row | {"std of seeds, smallest": min(each), "std of seeds, largest": max(each)}


def table(seeds, what, reference):
    """One row per arithmetic: spread, calibration targets, held-out test."""
    seeds, rows = seeds if what == "main" else seeds[:1], []
    for name in what_of(seeds[0], what):
        have = [run for run in seeds if {name, reference} <= what_of(run, what).keys()]
        t, ref, policy = (flat(have, what, x) for x in (name, reference, "fp32"))
        m = calibrate(t, ref)
        row = {"set": what if isinstance(what, str) else f"{what:g}", "reference": reference, "arithmetic": name}
        row["seeds"] = len(have)
        for key in ("moved", "changed"):
            row[key] = sum(what_of(run, what)[name][key].item() for run in have) / len(have)
        row |= spread(t, ref, policy) | {"over %": 100 * m["clip/over"], "under %": 100 * m["clip/under"]}
        row |= {k: m[f"calib/{k}"] for k in ("f1", "precision", "recall", "alpha_low", "rho_hp", "rho_ref", "rho")}
        row |= {f"over % of answers at {k} nats": 100 * m[f"calib/over_rate/{k}"] for k in ("0-0.2", "0.2-0.5", "0.5-1", "1+")}
        row |= {target: m[f"calib/{key}"] for target, key in TARGETS.items()}
        enough = row["neg_lo clipped ref"] >= FEWEST
        rows.append(row | (held_out(t, ref) if what == "main" and enough else {}))
    return rows


def stability(seeds, name, reference, draws=200):
    """Standard deviation of each bound's target against the number of tokens: answers drawn with replacement."""
    t, ref = flat(seeds, "main", name), flat(seeds, "main", reference)
    groups = [torch.nonzero(t["answer"] == a).squeeze(1) for a in t["answer"].unique()]
    rows, generator, size = [], torch.Generator().manual_seed(0), 8
    while size <= len(groups):
        targets, tokens = {target: [] for target in TARGETS}, 0
        for _ in range(draws):
            keep = torch.cat([groups[i] for i in torch.randint(len(groups), (size,), generator=generator).tolist()])
            tokens += len(keep) / draws
            m = calibrate({k: v[keep] for k, v in t.items()}, {k: v[keep] for k, v in ref.items()})
            for target, key in TARGETS.items():
                targets[target].append(m[f"calib/{key}"])
        row = {"arithmetic": name, "answers": size, "tokens": round(tokens)}
        for target, values in targets.items():
            found = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
            row |= {f"{target} mean": found.mean().item() if len(found) else math.nan,
                    f"{target} sd": found.std().item() if len(found) > 1 else math.nan}
        row["L kept old %"] = 100 * sum(math.isnan(v) for v in targets["L* grid"]) / draws
        row["H* rho at an end %"] = 100 * sum(v in (1.2, 2.0) for v in targets["H* rho"]) / draws
        rows.append(row)
        size *= 2
    return rows


def write_csv(path, rows):
    keys = list(dict.fromkeys(k for row in rows for k in row))
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, keys)
        writer.writeheader()
        writer.writerows(rows)


def short_form(row):
    """The line of the short table: what README prints."""
    published = PUBLISHED.get(row["arithmetic"], ("", ""))
    text = {k: row[k] for k in ("arithmetic", "tokens", "std log r", "noise std", "neg_lo %")}
    text |= {"ratio to BF16": estimate(row, "neg_lo ratio", "neg_lo ratio low", "neg_lo ratio high"), "(paper)": published[0]}
    text |= {"NMAE quotient": estimate(row, "NMAE quotient", "quotient low", "quotient high"), "(paper) ": published[1]}
    text |= {"over %": row["over %"], "F1": row["f1"]} | {target: row[target] for target in TARGETS}
    for half in (0, 1):
        keys = [f"half {half}: {key}" for key in ("ratio", "test low", "test high")]
        text[f"held out, half {half}"] = estimate(row, *keys)
    return text


def estimate(row, value, low, high):
    """'1.23 [1.10, 1.40]', empty where it was not measured."""
    return f"{row[value]:.2f} [{row[low]:.2f}, {row[high]:.2f}]" if value in row else ""


def report(seeds, args):
    """ratio.csv (all sets and references), stability.csv, ratio.md (the short form) and ratio.png in --out."""
    sets = [("main", reference) for reference in ("bf16", "fp32", "bf16w") if reference in seeds[0]["main"]]
    sets += [(what, reference) for what in ("phantom", *args.sizes) for reference in ("bf16", "fp32")]
    rows = [row for what, reference in sets for row in table(seeds, what, reference)]
    write_csv(os.path.join(args.out, "ratio.csv"), rows)
    sub = [row for name in ("fp8-tensor", "fp8-row", "fp8-block") for row in stability(seeds, name, "bf16")]
    write_csv(os.path.join(args.out, "stability.csv"), sub)
    short = [short_form(row) for row in rows if row["set"] == "main" and row["reference"] == "bf16"]
    sweep = [{k: row[k] for k in ("set", "arithmetic", "moved", "changed", "std log r", "noise std", "neg_lo %")}
             for row in rows if row["set"] != "main" and row["reference"] == "fp32"]
    head = (f"{args.model}, {args.seeds} seeds x {args.prompts} prompts x {args.n} answers of {args.data}, sampled in "
            f"{args.rollout_precision}, A by {args.adv}; main set: lr {args.lr:g}, {args.updates} mini-batches; {args.device}, "
            f"FP8 backend {precision.default_backend(args.device)}, masters {args.masters}, --micro-tokens {args.micro_tokens}")
    with open(os.path.join(args.out, "ratio.md"), "w", encoding="utf-8") as f:
        f.write("\n\n".join([head, *(stats.markdown(part) for part in (short, sweep, sub))]) + "\n")
    draw(seeds, rows, args)
    print(f"{head}\n{stats.markdown(short)}\n{args.out}/ratio.csv, stability.csv, ratio.md, ratio.png")


def draw(seeds, rows, args):
    """Panels: log r by sign, clip fraction against bound, noise against probability, spread against step, bounds in runs."""
    figure, axes = plt.subplots(1, 5 if args.run else 4, figsize=(26 if args.run else 21, 4.5))
    tokens = {name: flat(seeds, "main", name) for name in SHOWN}
    bins, lows, levels = torch.linspace(-1, 1, 81), torch.linspace(0.4, 1.0, 61), torch.linspace(0, 1, 11)
    middles = {id(x): (x[1:] + x[:-1]) / 2 for x in (bins, levels)}
    for k, (name, t) in enumerate(tokens.items()):
        for sign, style in ((-1, "-"), (1, ":")):
            counts = torch.histogram(t["logr"][t["adv"].sign() == sign].float(), bins, density=True).hist
            label = f"{name} A {'<' if sign < 0 else '>'} 0"
            axes[0].plot(middles[id(bins)], counts, style, color=f"C{k}", label=label)
        r = t["logr"][t["adv"] < 0].exp()
        axes[1].plot(lows, [(r <= low).float().mean() for low in lows], color=f"C{k}", label=name)
        if name != "bf16":
            d, p = (t["logr"] - tokens["bf16"]["logr"]).abs(), tokens["bf16"]["old"].exp()
            where = torch.bucketize(p, levels[1:-1])
            axes[2].plot(middles[id(levels)], [d[where == b].mean() for b in range(10)], color=f"C{k}", label=name)
    for bound in (LOW, HIGH):
        axes[0].axvline(math.log(bound), color="grey", lw=0.8)
    axes[0].set_yscale("log")
    axes[1].axvline(LOW, color="grey", lw=0.8)
    sweep = [row for row in rows if row["reference"] == "bf16" and row["set"] not in ("main", "phantom")]
    for name in ("fp32", *SHOWN):
        points = sorted((float(row["set"]), max(row["std log r"], 1e-9)) for row in sweep if row["arithmetic"] == name)
        axes[3].loglog(*zip(*points, strict=True), "o-", label=name) if points else None
    titles = [("log r", "density", "log r by sign, reference bounds in grey"), ("lower bound", "share clipped", "A < 0 tokens"),
              ("token's old probability", "mean |log r - log r of BF16|", "noise"),
              ("size of an update, per weight", "standard deviation of log r", "spread against update size")]
    for run in args.run:
        columns = read_csv(os.path.join(run, "metrics.csv"))
        for k, bound in enumerate(("clip/low", "clip/high")):
            axes[4].plot(columns["step"], columns[bound], color=f"C{k}", alpha=0.6)
    titles += [("step", "low, high", "calibrated bounds in training")] * bool(args.run)
    for axis, (x, y, title) in zip(axes, titles, strict=True):
        axis.set(xlabel=x, ylabel=y, title=title)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(os.path.join(args.out, "ratio.png"), dpi=90)
    plt.close(figure)
