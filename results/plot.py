"""Draw: python results/plot.py                                             the pictures of results/README.md
      python results/plot.py runs/NAME                                      the metrics of a run, finished or not
      python results/plot.py runs/NAME runs/OTHER ... --out FILE.png        several in one picture
"""
import dataclasses
import hashlib
import io
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.cli import Stop, parse, run_main, write_atomic  # noqa: E402
from results import published, record  # noqa: E402

HERE = Path(__file__).resolve().parent
# page, text, weaker text, lines; then colours that differ for every kind of colour vision (Okabe and Ito), lighter on dark
LIGHT = ("#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#0072b2", "#d55e00", "#007a5a", "#a64d86", "#7a6a00")
DARK = ("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#56b4e9", "#f0803c", "#2fc299", "#dd8fc0", "#e0c63a")


@dataclasses.dataclass
class Config:
    out: str = ""              # PNG file to write; of one run plot.png in its folder


def canvas(theme, rows, columns, width, height, **kw):
    """(figure, axes as a list) in one of the two themes: no frame, a faint grid, text that is legible at 900 pixels."""
    try:
        import matplotlib
    except ImportError:
        raise Stop("drawing needs matplotlib: pip install matplotlib==3.11.2") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    back, text, weak, line, *colours = theme
    pyplot.rcdefaults()
    pyplot.rcParams.update({
        "figure.facecolor": back, "axes.facecolor": back, "savefig.facecolor": back, "text.color": text, "axes.labelcolor": weak,
        "xtick.color": weak, "ytick.color": weak, "axes.edgecolor": line, "grid.color": line, "axes.titlecolor": text,
        "axes.prop_cycle": matplotlib.cycler(color=colours), "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9.5,
        "axes.titlelocation": "left", "axes.grid": True, "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.8,
        "lines.markersize": 5, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
        "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "errorbar.capsize": 2, "figure.dpi": 160})
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **kw)
    return figure, list(axes.flat), colours


def png(figure, source=""):
    """The figure as PNG bytes of 128 colours, the same for the same figure; `source` is kept in the file."""
    from matplotlib import pyplot
    from PIL import Image, PngImagePlugin
    drawn, packed, text = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, format="png")
    pyplot.close(figure)
    text.add_text("Source", source)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(packed, "png", optimize=True, pnginfo=text)
    return packed.getvalue()


# -- the pictures of README.md ---------------------------------------------------------------------------------------

def fingerprint():
    """Hash of all that the pictures of README.md show: a picture of other data can be told by it."""
    files = [published.FILE, *sorted(record.RECORDS.glob("*/*/*"))]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


# run: colour, what is written beside its points, and where: step, value
LORA = {"trajectory-glm": (0, "GLM-5.3, rank 32\nTrajectory, k not stated", 21.2, 82.2),
        "trajectory-flash": (1, "Flash, rank 64\nTrajectory, k = 12", 21.2, 87.2),
        "flash-lora": (2, "Flash\nSkyRL, k = 12", 26.2, 77)}
FULL = {"bz2t3wg9": (0, "GLM-5.3, MXFP8, R3, k = 12", 3.5, 87.5),
        "flash-fullft": (1, "Flash, R3, k = 12", 16.5, 74.5),
        "1o4x7v31": (2, "GLM-5.3, bf16, no R3, k = 12", 13, 61.5),
        "z9wad610": (3, "GLM-5.3, bf16, R3 + deep_gemm, k = 12", 15.9, 48.2),
        "x7lm538i": (4, "GLM-5.3, bf16, R3 + TRT-LLM kernel, k = 12", 10.9, 43.2)}


def draw_published(theme):
    data = published.load()["by_name"]
    figure, axes, colours = canvas(theme, 3, 2, 9, 7.6, height_ratios=(2.4, 1, 1), sharex=True, sharey="row")
    rows = (("AIME-2024 accuracy", "accuracy, %"), ("AIME-2024 cut at the cap", "answers cut at the cap, %"),
            ("AIME-2024 length", "mean length, tokens"))
    for column, (title, runs) in enumerate((("LoRA", LORA), ("full fine-tuning", FULL))):
        for (quantity, name), ax in zip(rows, axes[column::2]):
            ax.set_title(f"{title}: {name}")
            for run, (colour, label, x, y) in runs.items():
                found, c, short = data.get((run, quantity)), colours[colour], label.replace("\n", ", ").partition(", k")[0]
                if run == "bz2t3wg9" and not found:                    # of this run only the training batches' length is known
                    found, short = data[run, "training length"], f"{short}, in training"
                if not found:
                    continue
                short += " (derived)" * (found["kind"] == "derived")
                points = [(1 if step == "first" else int(step), value) for step, value in found["values"].items()]
                ax.plot(*zip(*points), "o-", color=c, linewidth=1)
                if ax in axes[:2]:
                    ax.text(x, y, label, color=c, va="center", fontsize=8.5, linespacing=1.15)
                    continue
                for point in points:
                    ax.annotate(f"{point[1]:,}", point, (0, 6), textcoords="offset points", color=c, fontsize=8.5,
                                ha="left" if point == points[0] else "center")
                ax.annotate(short, points[-1], (16, -3), textcoords="offset points", color=c, fontsize=8.5)
    axes[1].annotate("", (5.2, 56.9), (12.7, 61.3), arrowprops={"arrowstyle": "-", "color": theme[2], "linewidth": 0.8})
    for ax, bounds in zip(axes[::2], ((40, 92), (0, 58), (0, 6600))):
        ax.set_ylim(*bounds)
    for ax in axes[-2:]:
        ax.set_xlabel("step")
    axes[0].set_xlim(-1.5, 41)
    axes[0].set_xticks(range(0, 31, 5))
    axes[4].yaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw_rehearsal(theme):
    """Bands and bars are 95 % t-intervals over seeds, where there are several."""
    figure, axes, colours = canvas(theme, 1, 4, 9, 2.9, sharex=True)
    panels = (("accuracy, %", 100, "reward/accuracy", "eval/accuracy"),
              ("cut at the cap, %", 100, "rollout/capped", "eval/capped"),
              ("mean length, tokens", 1, "rollout/tokens", "eval/tokens"),
              ("accuracy of finished, %", 100, None, "eval/accuracy_finished"))
    small = {group: runs for group, runs in record.groups().items() if runs[0]["config"]["rehearse"]}
    for row, ((group, runs), colour) in enumerate(zip(small.items(), colours)):
        for (title, scale, *keys), ax in zip(panels, axes):
            ax.set_title(title)
            for key in keys:
                at = [step for step, found in runs[0]["steps"].items() if key in found]
                if not at:
                    continue
                middle, half = zip(*(record.interval([scale * r["steps"][s][key] for r in runs]) for s in at))
                half = half if len(runs) > 1 else [0] * len(at)
                if key.startswith("eval/"):
                    beside = [step + 0.5 * row for step in at]              # equal points would hide one another
                    ax.errorbar(beside, middle, half if len(runs) > 1 else None, fmt="o", color=colour, markersize=4)
                    continue
                ax.plot(at, middle, color=colour, linewidth=1.4)
                low, high = ([m + sign * h for m, h in zip(middle, half)] for sign in (-1, 1))
                ax.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
        name = f"{group.removeprefix('rehearsal-').upper()}, {len(runs)} seed" + "s" * (len(runs) > 1)
        axes[0].text(20, 8 + 11 * row, name, color=colour, ha="right", fontsize=8.5)
    axes[2].text(20, 3, "lines: training batches\npoints: held-out problems", color=theme[2], ha="right", fontsize=8.5)
    for ax, bounds in zip(axes, ((0, 104), (-3, 60), (0, 38), (0, 104))):
        ax.set_ylim(*bounds)
        ax.set_xlabel("step")
    axes[0].set_xticks(range(0, 21, 5))
    return figure


# -- a run of one's own ----------------------------------------------------------------------------------------------

# title, what it shows, then metric and style of each curve
PANELS = (
    ("reward and accuracy", "solid accuracy, dashed reward, points held-out ± s.e.",
     ("reward/accuracy", "-"), ("reward/mean", "--"), ("eval/accuracy", "o")),
    ("share of answers cut at the cap", "solid training, points held-out", ("rollout/capped", "-"), ("eval/capped", "o")),
    ("mean length, tokens", "solid training, points held-out", ("rollout/tokens", "-"), ("eval/tokens", "o")),
    ("entropy, nats", "of the tokens learned from", ("policy/entropy", "-")),
    ("share of tokens clipped", "of the tokens learned from", ("policy/clip", "-")),
    ("mismatch of sampler and trainer, nats", "solid mean, dashed largest, over a step's tokens",
     ("mismatch/mean", "-"), ("mismatch/max", "--")))


def draw_runs(folders, theme=LIGHT):
    """Six panels of the metrics of run folders; s.e. is the standard error of the held-out accuracy on its fixed problems."""
    runs = {folder.rstrip("/").removeprefix("runs/"): record.metrics(folder) for folder in folders}
    drawn = {key for _, _, *curves in PANELS for key, _ in curves}
    if bare := [name for name, steps in runs.items() if not any(drawn & set(found) for found in steps.values())]:
        raise Stop(f"{', '.join(bare)} logged none of {', '.join(sorted(drawn))}: nothing to draw")
    figure, axes, colours = canvas(theme, 2, 3, 11, 6, sharex=True)
    for ax, (title, shown, *curves) in zip(axes, PANELS):
        ax.set_title(title, pad=18)
        ax.text(0, 1.03, shown, transform=ax.transAxes, color=theme[2], fontsize=8).set_in_layout(False)
        for steps, colour in zip(runs.values(), itertools.cycle(colours)):
            for key, style in curves:
                points = [(step, found[key], found.get("eval/stderr", 0)) for step, found in steps.items()
                          if found.get(key) is not None]
                if not points:
                    continue
                x, y, error = zip(*points)
                if style == "o":
                    ax.errorbar(x, y, error if key == "eval/accuracy" else None, fmt="o", color=colour, markersize=3.5)
                else:
                    ax.plot(x, y, style, color=colour, marker="." if len(x) == 1 else None)
    axes[5].set_yscale("log")
    for ax in axes[3:]:
        ax.set_xlabel("step")
    names = [axes[0].plot([], label=name, color=colour)[0] for name, colour in zip(runs, itertools.cycle(colours))]
    figure.legend(handles=names, loc="outside upper left", ncols=4, frameon=False, labelcolor="linecolor", handlelength=0)
    return figure


def main():
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    cfg = parse(Config, doc=__doc__, argv=sys.argv[1 + len(words):])
    if len(words) == 1 and not cfg.out and Path(words[0]).is_dir():
        cfg.out = str(Path(words[0]) / "plot.png")
    if bool(words) != bool(cfg.out):
        raise Stop("run folders and --out FILE.png go together: python results/plot.py runs/NAME --out FILE.png")
    if words:
        if not cfg.out.endswith(".png") or not Path(cfg.out).absolute().parent.is_dir():
            raise Stop(f"--out {cfg.out} is no .png file in a folder that exists")
        write_atomic(cfg.out, png(draw_runs(words)))
        print(cfg.out)
        return
    for name, draw in (("published", draw_published), ("rehearsal", draw_rehearsal)):
        for theme, colours in (("light", LIGHT), ("dark", DARK)):
            write_atomic(HERE / f"{name}-{theme}.png", png(draw(colours), fingerprint()))
            print(f"results/{name}-{theme}.png")


if __name__ == "__main__":
    run_main(main)
