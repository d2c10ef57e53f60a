"""Tables and pictures of the ratio study (ratio.py): what low precision does to r, what calibration does about it.

For each arithmetic and against a reference (BF16, as in the paper, or FP32), over sampled tokens of answers with A = +-1:

    std of log r; clip fraction: share of A < 0 tokens with r <= low, of A > 0 tokens with r >= high, and over the reference's
    over-clip: A < 0, reference above `low`, this one at or below it; precision, recall and F1 of the clip decision: equal clip
    fractions are not equal clipped tokens
    NMAE = mean |x - x_ref| / mean |x_ref| of the ratio and of the probability at the new weights, and their quotient
    L*, H*: the paper's grid; exact quantile (lower) and equal upper tail, without a grid

Held out: the bound is the exact quantile on one half of the answers (even prompts), its clip fraction is measured on the other
half, against the reference's there; then the halves change places, and all answers have been tested on bounds that never saw
them. Intervals are bootstraps over answers, pooled over the seeds.

Cures on trial, all fitted on one half and tested on the other: `shrunk`, log r times the slope of a regression of the
reference's log r on it, per bin of the token's old probability (signal over total variance); `per-bin`, a lower bound per bin.
"""

import csv
import math
import os

import matplotlib
import torch

import clipping
import stats
from runlog import read_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LOW, HIGH = 0.8, 1.24
PROB_EDGES = torch.tensor([0.1, 0.3, 0.6, 0.9, 0.99])  # bins of the old probability
SHOWN = ("bf16", "fp8-tensor", "fp8-row", "fp8-block")
# of Qwen3-8B-Base, arXiv:2609.22870: clip-fraction ratio, NMAE quotient
PUBLISHED = {"fp8-tensor": (6.68, 2.90), "fp8-row": (5.48, 2.08), "fp8-block": (3.94, 1.65)}


TARGETS = {"L* grid": "low_star", "L* exact": "low_quantile", "H* rho": "high_star", "H* tail": "high_tail"}


def flat(seeds, what, name):
    """Tokens of all seeds for one arithmetic: dict of (tokens,) tensors logr, old, new, and adv, answer, half, mu."""
    parts, offset = [], 0
    for run in seeds:
        samples, pair = (run["samples"] if what == "main" else run["some"]), what_of(run, what)[name]
        lengths = torch.tensor([len(s["completion"].token_ids) for s in samples])
        T = max(pair["old"].shape[1], pair["new"].shape[1])
        mask = torch.arange(T) < lengths[:, None]
        old, new = (x[mask] for x in (pair["old"], pair["new"]))
        rows = torch.arange(len(samples))[:, None].expand_as(mask)[mask]
        mu = torch.tensor([x for s in samples for x in s["completion"].logps])
        sign = torch.tensor([s["adv"] for s in samples]).sign()[rows]
        group = len(samples) // len({s["row"]["id"] for s in samples})
        parts.append({"old": old, "new": new, "logr": new - old, "mu": mu, "adv": sign, "answer": rows + offset,
                      "half": (rows // group) % 2})
        offset += len(samples)
    return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}


def what_of(run, what):
    return run["sweep"][what] if isinstance(what, float) else run[what]


def per_answer(x, t):
    """Sums of token values per answer, float64."""
    return torch.zeros(int(t["answer"].max()) + 1, dtype=torch.float64).index_add_(0, t["answer"], x.double())


def calibrate(t, ref, **rules):
    """Metrics of clipping.CalibratedClipping on all tokens of t against those of ref (same tokens); nothing moves."""
    calib = clipping.CalibratedClipping(LOW, HIGH, LOW, HIGH, **rules)
    weight = (t["old"] - t["mu"]).clamp(-20, 20).exp().clamp(max=2.0)
    rows = [x[None] for x in (ref["new"], ref["old"], t["new"], t["old"], t["mu"], weight, t["adv"])]
    calib.observe(*rows, torch.ones(1, len(t["old"]), dtype=torch.bool))
    return calib.update(move=False)


def quantile(x, count):
    """The count-th smallest of x (1-based), -inf for 0: as many tokens at or below it, exactly."""
    return x.sort().values[count - 1].item() if count else -math.inf


def fractions(clipped, clipped_ref, of, t):
    """(ratio, low, high) of two clip counts among the tokens `of`, bootstrap over answers; NaN if the reference clips none."""
    if not (clipped_ref & of).any():
        return math.nan, math.nan, math.nan
    return stats.ratio_of_sums(per_answer(clipped & of, t), per_answer(clipped_ref & of, t))


def held_out(t, ref):
    """Exact quantile on one half, clip fraction on the other, both ways: ratios with intervals, F1s, the two bounds."""
    neg = t["adv"] < 0
    clipped, shrunk, per_bin, low16 = (torch.zeros_like(neg) for _ in range(4))
    low16 = neg & (ref["logr"] <= math.log(LOW))
    bins = torch.bucketize(t["old"].exp(), PROB_EDGES)
    row = {}
    for half in (0, 1):
        fit, test = t["half"] == half, neg & (t["half"] != half)
        bound = quantile(t["logr"][fit & neg], int((low16 & fit).sum()))
        clipped |= test & (t["logr"] <= bound)
        row[f"L half {half}"] = math.exp(bound)
        for b in range(len(PROB_EDGES) + 1):
            here = bins == b
            x, y = t["logr"][fit & here].double(), ref["logr"][fit & here].double()
            slope = ((x * y).sum() / x.square().sum().clamp(min=1e-30)).clamp(0, 1).item() if len(x) else 1.0
            shrunk |= test & here & (t["logr"] * slope <= math.log(LOW))
            bound = quantile(t["logr"][fit & here & neg], int((low16 & fit & here).sum()))
            per_bin |= test & here & (t["logr"] <= bound)
    plain = neg & (t["logr"] <= math.log(LOW))
    for name, c in (("plain", plain), ("quantile", clipped), ("shrunk", shrunk), ("per-bin", per_bin)):
        ratio, low, high = fractions(c, low16, neg, t)
        both = (c & low16).sum().item()
        row |= {f"{name} ratio": ratio, f"{name} ratio low": low, f"{name} ratio high": high,
                f"{name} over": (c & ~low16).sum().item() / neg.sum().item(),
                f"{name} F1": 2 * both / max(1, c.sum().item() + low16.sum().item())}
    return row


def spread(t, ref):
    """std of log r with its interval, NMAEs, clip fractions by sign and side against ref's."""
    n, x, xx = (per_answer(v, t) for v in (torch.ones_like(t["logr"]), t["logr"], t["logr"].double().square()))
    index = stats.resamples(len(n))
    N, X, XX = (v[index].sum(1) for v in (n, x, xx))
    row = {"tokens": int(n.sum()), "std log r": t["logr"].double().std().item()}
    row |= dict(zip(("std low", "std high"), stats.interval((XX / N - (X / N) ** 2).clamp(min=0).sqrt()), strict=True))
    r, r_ref, p, p_ref = (v.double().exp() for v in (t["logr"], ref["logr"], t["new"], ref["new"]))
    d_r, d_p = (per_answer(v, t) for v in ((r - r_ref).abs(), (p - p_ref).abs()))
    nmae, nmae_p = d_r / per_answer(r_ref, t).sum(), d_p / per_answer(p_ref, t).sum()
    row |= {"NMAE ratio": nmae.sum().item(), "NMAE prob": nmae_p.sum().item()}
    row["NMAE quotient"] = (nmae.sum() / nmae_p.sum()).item()
    row |= dict(zip(("quotient low", "quotient high"), stats.interval(nmae[index].sum(1) / nmae_p[index].sum(1)), strict=True))
    for name, of, bound in (("neg_lo", t["adv"] < 0, LOW), ("pos_hi", t["adv"] > 0, HIGH),
                            ("neg_hi", t["adv"] < 0, HIGH), ("pos_lo", t["adv"] > 0, LOW)):
        side = torch.le if bound < 1 else torch.ge
        clipped, clipped_ref = side(t["logr"], math.log(bound)), side(ref["logr"], math.log(bound))
        row |= {f"{name} %": 100 * (clipped & of).sum().item() / max(1, of.sum().item())}
        if name in ("neg_lo", "pos_hi"):
            values = fractions(clipped, clipped_ref, of, t)
            row |= dict(zip((f"{name} ratio", f"{name} ratio low", f"{name} ratio high"), values, strict=True))
    return row


def table(seeds, what, reference):
    """One row per arithmetic: spread, calibration targets, held-out test."""
    names = list(what_of(seeds[0], what))
    ref = flat(seeds, what, reference)
    rows = []
    for name in names:
        t = flat(seeds, what, name)
        m = calibrate(t, ref)
        row = {"set": what if isinstance(what, str) else f"{what:g}", "reference": reference, "arithmetic": name}
        row |= {"moved": sum(what_of(run, what)[name]["moved"].item() for run in seeds) / len(seeds)}
        row |= spread(t, ref) | {"over %": 100 * m["clip/over"], "under %": 100 * m["clip/under"]}
        row |= {"F1": m["calib/f1"], "precision": m["calib/precision"], "recall": m["calib/recall"]}
        row |= {target: m[f"calib/{key}"] for target, key in TARGETS.items()}
        rows.append(row | (held_out(t, ref) if what == "main" else {}))
    return rows


def stability(seeds, name, reference, draws=200):
    """Standard deviation of each bound's target against the number of tokens: answers drawn without replacement."""
    t, ref = flat(seeds, "main", name), flat(seeds, "main", reference)
    answers, rows, generator = int(t["answer"].max()) + 1, [], torch.Generator().manual_seed(0)
    size = 8
    while size <= answers // 2:
        targets = {target: [] for target in TARGETS}
        tokens = 0
        for _ in range(draws):
            chosen = torch.zeros(answers, dtype=torch.bool)
            chosen[torch.randperm(answers, generator=generator)[:size]] = True
            keep = chosen[t["answer"]]
            tokens += int(keep.sum()) / draws
            m = calibrate({k: v[keep] for k, v in t.items()}, {k: v[keep] for k, v in ref.items()})
            for target, key in TARGETS.items():
                targets[target].append(m[f"calib/{key}"])
        row = {"arithmetic": name, "answers": size, "tokens": round(tokens)}
        for key, values in targets.items():
            found = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
            row |= {f"{key} mean": found.mean().item() if len(found) else math.nan,
                    f"{key} sd": found.std().item() if len(found) > 1 else math.nan, f"{key} kept old": 1 - len(found) / draws}
        rows.append(row)
        size *= 2
    return rows


def write_csv(path, rows):
    keys = list(dict.fromkeys(k for row in rows for k in row))
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, keys)
        writer.writeheader()
        writer.writerows(rows)


def report(seeds, args):
    """ratio.csv (all sets, both references), stability.csv, ratio.md (the short form) and ratio.png in --out."""
    sets = ["main", "phantom", *args.sizes]
    rows = [row for what in sets for reference in ("bf16", "fp32") for row in table(seeds, what, reference)]
    write_csv(os.path.join(args.out, "ratio.csv"), rows)
    sub = [row for name in ("fp8-tensor", "fp8-row", "fp8-block") for row in stability(seeds, name, "bf16")]
    write_csv(os.path.join(args.out, "stability.csv"), sub)
    main = [row for row in rows if row["set"] == "main" and row["reference"] == "bf16"]
    short = [{k: row[k] for k in ("arithmetic", "tokens", "std log r", "NMAE quotient", "neg_lo %", "neg_lo ratio", "pos_hi %",
                                  "pos_hi ratio", "over %", "F1", "L* grid", "L* exact", "H* rho", "H* tail", "quantile ratio",
                                  "quantile ratio low", "quantile ratio high", "quantile over", "quantile F1")} for row in main]
    sweep = [{k: row[k] for k in ("set", "arithmetic", "moved", "std log r", "neg_lo %", "NMAE quotient")}
             for row in rows if row["set"] != "main" and row["reference"] == "bf16"]
    with open(os.path.join(args.out, "ratio.md"), "w", encoding="utf-8") as f:
        f.write("\n\n".join(stats.markdown(part) for part in (short, sweep, sub)) + "\n")
    draw(seeds, rows, args)
    print(stats.markdown(short))
    print(f"{args.out}/ratio.csv, stability.csv, ratio.md, ratio.png")


def draw(seeds, rows, args):
    """Panels: log r by sign, clip fraction against bound, noise against probability, spread against step, bounds in runs."""
    figure, axes = plt.subplots(1, 5 if args.run else 4, figsize=(26 if args.run else 21, 4.5))
    tokens = {name: flat(seeds, "main", name) for name in SHOWN}
    bins, lows, levels = torch.linspace(-1, 1, 81), torch.linspace(0.4, 1.0, 61), torch.linspace(0, 1, 11)
    middles = {id(x): (x[1:] + x[:-1]) / 2 for x in (bins, levels)}
    for k, (name, t) in enumerate(tokens.items()):
        for sign, style in ((-1, "-"), (1, ":")):
            counts = torch.histogram(t["logr"][t["adv"] == sign].float(), bins, density=True).hist
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
    axes[1].axvline(LOW, color="grey", lw=0.8)
    sweep = [row for row in rows if row["reference"] == "bf16" and row["set"] not in ("main", "phantom")]
    for name in ("fp32", *SHOWN):
        points = [(float(row["set"]), max(row["std log r"], 1e-9)) for row in sweep if row["arithmetic"] == name]
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
