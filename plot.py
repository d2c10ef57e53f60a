"""One picture of one or more runs, drawn from their metrics.csv.

    python plot.py out/run                                  # out/run/curves.png
    python plot.py out/bf16 out/fp8 --out fp8.png --smooth 5

Six panels: reward, response length, entropy, clip fractions by sign and side, mismatch between sampler and learner, speed;
three more for DAPO: dynamic sampling, its rounds, overlong answers. One run has a colour per curve; several have a colour per
run and a line style per curve. A metric that a run did not log is named in its panel. `draw` uses matplotlib's figure objects
without pyplot: no display, no global state, safe within a training run.
"""

import json
import math
import os
from collections import namedtuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from errors import Flags, UserError, number, run_main
from runlog import read_csv

# Okabe and Ito's palette, told apart with any colour vision; its yellow is too pale for a line
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]

Curve = namedtuple("Curve", "column label style width", defaults=["-", 1.6])
PANELS = [  # (title, y label, curves)
    ("Reward", "mean per completion", [Curve("reward", "reward")]),
    ("Response length", "tokens", [Curve("len/mean", "mean length")]),
    ("Entropy", "nats per token", [Curve("entropy", "entropy")]),
    ("Tokens at or beyond a clip bound", "% of that sign's tokens", [
        Curve("clip/neg_lo", "neg_lo: r ≤ low"), Curve("clip/pos_hi", "pos_hi: r ≥ high", "-."),
        Curve("clip/neg_hi", "neg_hi: r ≥ high", (0, (5, 2)), 0.9), Curve("clip/pos_lo", "pos_lo: r ≤ low", (0, (2, 2)), 0.9)]),
    ("Sampler-learner mismatch", "nats per token (log)", [
        Curve("mismatch/abs_dlogp_mean", "mean |Δ log p|"), Curve("mismatch/kl_k3", "KL (k3)", "--")]),
    ("Speed", "tokens per second", [
        Curve("tok_per_s/rollout", "rollout"), Curve("tok_per_s/train", "training", "--"),
        Curve("sec/step", "sec/step", ":", 1.2)]),
]

DAPO_PANELS = [  # a third row where a run has them
    ("Dynamic sampling", "share of the groups sampled", [
        Curve("dapo/efficiency", "used"), Curve("dapo/all0", "all wrong", "--"), Curve("dapo/all1", "all right", ":"),
        Curve("dapo/acc", "accuracy of all answers", (0, (5, 2)), 0.9)]),
    ("Sampling rounds", "rounds per step", [Curve("dapo/rounds", "rounds")]),
    ("Overlong answers", "share of answers", [
        Curve("dapo/overlong_frac", "punished"), Curve("len/trunc_frac", "cut off", "--")]),
]

Run = namedtuple("Run", "name metrics summary flags")


def read_run(folder):
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a run folder: there is no such directory")
    path = os.path.join(folder, "metrics.csv")
    metrics = read_csv(path)
    if not metrics.get("step"):
        raise UserError(f"{path} has no {'rows yet' if 'step' in metrics else 'column step'}: nothing to draw")
    name = os.path.basename(os.path.abspath(folder))
    return Run(name, metrics, read_json(folder, "summary.json"), read_json(folder, "flags.json"))


def read_json(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}  # the summary is written at the end of a run
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def smoothed(values, window):
    """Mean of the last `window` values; NaN counts as absent."""
    out = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i + 1 - window):i + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if near and math.isfinite(values[i]) else math.nan)
    return out


def draw_curve(axes, run, curve, colour, smooth, faint):
    """Plot one column where it is finite; False if there is nothing to plot. `faint`: the raw values under the smoothed."""
    scale = 100.0 if curve.column.startswith("clip/") else 1.0
    values = [scale * v for v in run.metrics.get(curve.column, [])]
    points = [p for p in zip(run.metrics["step"], values, smoothed(values, smooth), strict=False) if math.isfinite(p[1])]
    if not points:
        return False
    steps, raw, line = zip(*points, strict=True)
    if smooth > 1 and faint:
        axes.plot(steps, raw, color=colour, linewidth=0.6, alpha=0.3)
    marker = "o" if len(steps) <= 12 else None  # a short run, or a metric measured only now and then
    axes.plot(steps, line, color=colour, linestyle=curve.style, linewidth=curve.width, marker=marker, markersize=3.5)
    return True


def draw_panel(axes, title, unit, curves, runs, smooth):
    """One panel and its legend, which says as well what was not logged; True if some runs lack what others have."""
    several, right, handles, anything, gaps = len(runs) > 1, None, [], False, False
    for i, curve in enumerate(curves):
        target = axes
        if curve.column == "sec/step":
            target = right = axes.twinx()
        if curve.style == "-." and not several:  # solid too: the colour tells it apart
            curve = curve._replace(style="-")
        drawn = sum(draw_curve(target, run, curve, PALETTE[j if several else i], smooth, faint=not several)
                    for j, run in enumerate(runs))
        anything |= drawn > 0
        note = "" if drawn == len(runs) else "*" if several else ": not logged"
        gaps |= 0 < drawn < len(runs)
        colour = "#444444" if several else PALETTE[i] if drawn else "#aaaaaa"
        handles.append(Line2D([], [], color=colour, linestyle=curve.style, linewidth=curve.width, label=curve.label + note))
    if title == "Reward":
        handles += draw_accuracy(axes, runs)
        anything |= len(axes.containers) > 0
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=28)
    axes.set_ylabel(unit)
    axes.set_xlabel("finished steps")
    axes.spines[["top"] if right else ["top", "right"]].set_visible(False)
    if not anything:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "\n".join(["not logged:", *(curve.column for curve in curves)]), transform=axes.transAxes,
                  color="#666666", ha="center", va="center")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        set_range(axes, title)
    if right:
        right.spines["top"].set_visible(False)
        right.set(ylabel="seconds per step", **({} if right.lines else {"yticks": []}))
        set_range(right, title)
    if anything and (len(handles) > 1 or gaps):  # above the axes, where it hides no data
        legend = axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=min(2, len(handles)), frameon=False,
            fontsize=8, handlelength=2.4, columnspacing=1.2, borderpad=0, labelspacing=0.2)
        legend.set_in_layout(False)  # the title's pad is its room; a wide one must not narrow the panel
    return gaps


def set_range(axes, title):
    """Amounts start at zero; the mismatch spans decades."""
    top = max((v for line in axes.lines for v in line.get_ydata() if math.isfinite(v)), default=0)
    if title.startswith("Sampler"):
        axes.set_yscale("log" if top > 0 else "linear")
    elif title.startswith(("Response", "Tokens", "Speed", "Dynamic", "Sampling", "Overlong")):
        axes.set_ylim(0, 1.08 * top or 1)


def draw_accuracy(axes, runs):
    """Held-out accuracy with one standard error, before training and wherever it was evaluated; the legend's handle if any."""
    found = False
    for j, run in enumerate(runs):
        steps, columns = run.metrics["step"], run.metrics
        shift = 0.012 * steps[-1] * (j - (len(runs) - 1) / 2)  # error bars of several runs side by side
        points = [(0, run.summary.get("acc_before"), run.summary.get("se_before"))]
        if "eval/acc" in columns:
            points += zip(steps, columns["eval/acc"], columns["eval/se"], strict=True)
        else:
            points += [(steps[-1], run.summary.get("acc_after"), run.summary.get("se_after"))]
        for step, acc, se in points:
            if acc is not None and math.isfinite(acc):
                axes.errorbar(step + shift, acc, yerr=se, fmt="D", color=PALETTE[j if len(runs) > 1 else 2], markersize=5,
                              capsize=3, elinewidth=1.2, zorder=3)
                found = True
    colour = "#444444" if len(runs) > 1 else PALETTE[2]
    handle = Line2D([], [], color=colour, marker="D", linestyle="", markersize=5, label="held-out accuracy ± 1 se")
    return [handle] if found else []


def draw(run_dirs, out_path, smooth=1):
    """Draw the runs in `run_dirs` (one path or a list) into `out_path`."""
    run_dirs = [run_dirs] if isinstance(run_dirs, (str, os.PathLike)) else list(run_dirs)
    if len(run_dirs) > len(PALETTE):
        raise UserError(f"{len(run_dirs)} runs in one picture: {len(PALETTE)} can be told apart, draw them in groups")
    runs = [read_run(folder) for folder in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=os.path.normpath(folder)) for run, folder in zip(runs, run_dirs, strict=True)]
    panels = PANELS + (DAPO_PANELS if any("dapo/rounds" in run.metrics for run in runs) else [])
    figure = Figure(figsize=(12, 3.5 * len(panels) / 3), dpi=150, layout="constrained")
    kind = os.path.splitext(out_path)[1][1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"--out {out_path}: the name must end in a picture type such as .png, .svg or .pdf")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    gaps = False
    for axes, panel in zip(figure.subplots(len(panels) // 3, 3).flat, panels, strict=True):
        gaps = draw_panel(axes, *panel, runs, smooth) or gaps
    flags = runs[0].flags if len(runs) == 1 else {}
    shown = [f"{name} {flags[name]}" for name in ("precision", "clip", "correction") if flags.get(name) is not None]
    title = [runs[0].name if len(runs) == 1 else "", *shown, f"mean of the last {smooth} steps" if smooth > 1 else "",
             "* not logged by every run" if gaps else ""]
    if any(title):
        figure.suptitle("   ·   ".join(filter(None, title)), fontsize=11)
    if len(runs) > 1:
        handles = [Line2D([], [], color=PALETTE[j], linewidth=3, label=run.name) for j, run in enumerate(runs)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(runs)), frameon=False)
    try:
        figure.savefig(out_path)
    except OSError as error:
        raise UserError(f"--out {out_path}: {error.strerror}") from error
    return out_path


def main():
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="folder with a metrics.csv")
    parser.add_argument("--out", help="picture to write (.png, .svg, .pdf); default for one run: RUN_DIR/curves.png")
    parser.add_argument("--smooth", type=number(int, 1), default=1, help="draw the mean of the last N steps; 1 = off")
    args = parser.parse_args()
    if args.out is None and len(args.run_dirs) > 1:
        raise UserError("--out is needed with several runs: name the picture to write")
    print(draw(args.run_dirs, args.out or os.path.join(args.run_dirs[0], "curves.png"), args.smooth))


if __name__ == "__main__":
    run_main(main)
