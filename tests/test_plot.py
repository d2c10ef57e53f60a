"""The picture of a run: the right numbers on the right panel, legible, and one clear line for what cannot be drawn.

    python -m pytest tests/test_plot.py
"""

import math
import os
import subprocess
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

import plot
from errors import UserError, run_main
from plot import PALETTE, draw, smoothed
from runlog import RunLog, write_json

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COLUMNS = ["reward", "len/mean", "entropy", "clip/neg_lo", "clip/pos_hi", "clip/neg_hi", "clip/pos_lo",
           "mismatch/abs_dlogp_mean", "mismatch/kl_k3", "tok_per_s/rollout", "tok_per_s/train", "sec/step"]


def make_run(folder, steps=6, without=(), summary=True):
    """A run whose column number i (from 0) is (i + 1) / 100 * step; accuracy at even steps."""
    log = RunLog(folder)
    for step in range(1, steps + 1):
        row = {name: (i + 1) / 100 * step for i, name in enumerate(COLUMNS) if name not in without}
        log.log(step, row | ({"eval/acc": 0.1 * step, "eval/se": 0.04} if step % 2 == 0 else {}))
    log.close()
    write_json(os.path.join(folder, "flags.json"), {"precision": "fp8-block", "clip": "calibrated", "correction": None})
    if summary:
        accuracy = {"acc_before": 0.25, "se_before": 0.03, "acc_after": 0.5, "se_after": 0.04}
        write_json(os.path.join(folder, "summary.json"), accuracy)
    return str(folder)


@pytest.fixture
def figures(monkeypatch):
    """The figures that `draw` makes, to look into."""
    made = []

    class Kept(Figure):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            made.append(self)

    monkeypatch.setattr(plot, "Figure", Kept)
    return made


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title(loc="left").startswith(title))


@pytest.fixture
def texts(monkeypatch):
    """The place of each text that was drawn."""
    drawn, original = {}, Text.draw

    def draw_text(self, renderer):
        original(self, renderer)
        if self.get_visible() and self.get_text().strip():
            drawn[self] = (self.get_text(), self.get_window_extent(renderer))

    monkeypatch.setattr(Text, "draw", draw_text)
    return drawn


def test_smoothed():
    assert smoothed([1.0, 3.0, 5.0, 7.0], 1) == [1, 3, 5, 7]
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1, 2, 4, 6]
    out = smoothed([1.0, math.nan, 5.0], 3)
    assert (out[0], out[2]) == (1, 3) and math.isnan(out[1])


def test_one_run(tmp_path, figures):
    out = draw(make_run(tmp_path / "run"), tmp_path / "a.png")
    height, width = imread(out).shape[:2]
    assert (width, height) == (1800, 1050)
    reward = panel(figures[0], "Reward").lines[0]
    assert list(reward.get_xdata()) == [1, 2, 3, 4, 5, 6] and reward.get_ydata()[2] == pytest.approx(0.03)
    clip = panel(figures[0], "Tokens").lines
    assert [line.get_ydata()[0] for line in clip] == pytest.approx([4, 5, 6, 7])  # percent
    assert [line.get_linestyle() for line in clip] == ["-", "-", "--", "--"]
    assert clip[2].get_linewidth() < clip[1].get_linewidth()
    assert [line.get_color() for line in clip] == PALETTE[:4]
    assert panel(figures[0], "Sampler").get_yscale() == "log"
    speed, right = [axes for axes in figures[0].axes if axes.bbox.bounds == panel(figures[0], "Speed").bbox.bounds]
    assert [len(speed.lines), len(right.lines)] == [2, 1] and right.get_ylabel() == "seconds per step"
    assert figures[0].get_suptitle().split("   ·   ") == ["run", "precision fp8-block", "clip calibrated"]


def test_held_out_accuracy_before_training_and_at_each_evaluation(tmp_path, figures):
    draw(make_run(tmp_path / "run"), tmp_path / "a.png")
    points = panel(figures[0], "Reward").containers
    drawn = [(p[0].get_xdata()[0], round(p[0].get_ydata()[0], 6)) for p in points]
    assert drawn == [(0, 0.25), (2, 0.2), (4, 0.4), (6, 0.6)]
    low, high = points[-1][2][0].get_segments()[0]
    assert (low[1], high[1]) == pytest.approx((0.56, 0.64))


def test_several_runs(tmp_path, figures):
    folders = [make_run(tmp_path / name, steps) for name, steps in (("bf16", 6), ("fp8", 20), ("fp8-calibrated", 9))]
    draw(folders, tmp_path / "a.png", smooth=3)
    lines = panel(figures[0], "Response").lines
    assert [line.get_color() for line in lines] == PALETTE[:3] and lines[1].get_ydata()[-1] == pytest.approx(0.02 * 19)
    assert len({line.get_linestyle() + str(line.get_linewidth()) for line in panel(figures[0], "Tokens").lines[::3]}) >= 3
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["bf16", "fp8", "fp8-calibrated"]
    assert "last 3 steps" in figures[0].get_suptitle()


def test_runs_of_one_name_show_their_paths(tmp_path, figures):
    folders = [make_run(tmp_path / name / "run") for name in "ab"]
    draw(folders, tmp_path / "a.png")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == folders


def test_missing_columns_are_named(tmp_path, figures):
    gone = ["entropy", "tok_per_s/train", "mismatch/kl_k3"]
    draw([make_run(tmp_path / "run", without=gone, summary=False)], tmp_path / "a.png")
    assert panel(figures[0], "Entropy").texts[0].get_text() == "not logged:\nentropy"
    for title, label in (("Speed", "training: not logged"), ("Sampler", "KL (k3): not logged")):
        assert label in [text.get_text() for text in panel(figures[0], title).get_legend().get_texts()]
    draw([make_run(tmp_path / "run"), make_run(tmp_path / "less", without=gone)], tmp_path / "a.png")
    assert [t.get_text() for t in panel(figures[1], "Entropy").get_legend().get_texts()] == ["entropy*"]
    assert "* not logged by every run" in figures[1].get_suptitle() and "*" not in figures[0].get_suptitle()


@pytest.mark.parametrize("case", ["one", "short", "missing", "some missing", "several"])
def test_no_text_overlaps_or_leaves_the_picture(tmp_path, texts, case):
    missing = COLUMNS[:1] + COLUMNS[3:7] + COLUMNS[10:]
    folders = {"one": [make_run(tmp_path / "run", 200)], "short": [make_run(tmp_path / "s", 1)],
               "missing": [make_run(tmp_path / "m", without=missing)],
               "some missing": [make_run(tmp_path / "a"), make_run(tmp_path / "b", without=COLUMNS)],
               "several": [make_run(tmp_path / f"fp8-block-calibrated-{i}", 50) for i in range(7)]}[case]
    draw(folders, tmp_path / "a.png", smooth=5)
    boxes = list(texts.values())
    assert len(boxes) > 40 or case == "missing" and len(boxes) > 20
    assert [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > 1800 or box.y1 > 1050] == []
    assert [(a[0], b[0]) for i, a in enumerate(boxes) for b in boxes[:i] if a[1].overlaps(b[1])] == []


def test_zeros_and_nans_draw(tmp_path, figures):
    """The same sampler and learner: the mismatch is exactly 0, which a log axis has no place for."""
    log = RunLog(tmp_path / "run")
    for step in (1, 2):
        log.log(step, dict.fromkeys(COLUMNS, 0.0) | {"entropy": math.nan})
    draw(tmp_path / "run", tmp_path / "a.png")
    assert panel(figures[0], "Sampler").get_yscale() == "linear"
    assert panel(figures[0], "Entropy").texts[0].get_text() == "not logged:\nentropy"


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run_main(plot.main)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and len(err.splitlines()) == 1
    return err


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    good = make_run(tmp_path / "good")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "nowhere is not a run folder" in run_cli(monkeypatch, capsys, tmp_path / "nowhere")
    assert "empty/metrics.csv: No such file" in run_cli(monkeypatch, capsys, empty)
    (empty / "metrics.csv").write_text("step,reward\n")
    assert "no rows yet" in run_cli(monkeypatch, capsys, empty)
    (empty / "metrics.csv").write_text("time,reward\n1,2\n")
    assert "no column step" in run_cli(monkeypatch, capsys, empty)
    assert "--out is needed" in run_cli(monkeypatch, capsys, good, good)
    assert "argument --smooth: '0'" in run_cli(monkeypatch, capsys, good, "--smooth", "0")
    assert "must end in a picture type" in run_cli(monkeypatch, capsys, good, "--out", tmp_path / "a.xyz")
    assert "No such file" in run_cli(monkeypatch, capsys, good, "--out", tmp_path / "no/folder/a.png")
    assert "8 runs in one picture" in run_cli(monkeypatch, capsys, *[good] * 8, "--out", tmp_path / "a.png")
    (tmp_path / "good/summary.json").write_text("{")
    with pytest.raises(UserError, match="summary.json is not JSON"):
        draw(good, tmp_path / "a.png")


def test_default_out_needs_no_display_and_no_pyplot(tmp_path):
    folder = make_run(tmp_path / "run")
    code = "import sys, plot; plot.main(); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [folder + "/curves.png", "False"]
    assert imread(folder + "/curves.png").shape[1] == 1800
