"""Draw the learning curve and the diagnostics of one or several runs, a colour each, as a PNG.

    python benchmark/plot.py runs/FOLDER [runs/OTHER ...] --output plot.png

Reads each folder's progress.csv and args.json, also while the run is still going. docs/metrics.md
says what each quantity means and when to worry. A metric that a script does not log is left out;
one unknown here gets its own panel.
"""

import argparse
import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator

# Okabe and Ito's
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# what does not change how a run learns, or is shown anyway
NOT_SETTINGS = "env_id seed run_dir resume evaluate total_timesteps eval_every eval_episodes "
NOT_SETTINGS += "capture_video threads paper"


class Panel(NamedTuple):
    title: str
    lines: tuple[str, ...]  # columns of progress.csv, each with the next of STYLES
    scale: str = "linear"
    level: float | None = None  # a horizontal line: the bound, the ideal
    names: tuple[str, ...] = ()  # of the lines, where there are several


STYLES = ["-", "--", ":"]
RETURN = ("charts/episodic_return", "eval/episodic_return")
PANELS = [
    Panel("η, temperature of the E-step", ("mpo/eta",), scale="log"),
    Panel("η_μ, multiplier of the mean", ("mpo/eta_mu",), scale="log"),
    Panel("η_Σ, multiplier of the covariance", ("mpo/eta_sigma",), scale="log"),
    Panel("KL(q‖π_i) / ε, realised", ("mpo/kl_q_relative",), scale="log", level=1),
    Panel("C_μ / ε_μ, change of the mean", ("mpo/kl_mu_relative",), scale="log", level=1),
    Panel("C_Σ / ε_Σ, change of the covariance", ("mpo/kl_sigma_relative",), scale="log", level=1),
    Panel("trace coefficient c", ("mpo/trace",)),
    Panel("standard deviation", ("mpo/std_mean", "mpo/std_max"), names=("mean", "largest")),
    Panel("entropy of π", ("mpo/entropy",)),
    Panel("Q", ("mpo/q_mean",)),
    Panel("Q minus the return", ("mpo/q_minus_return",), level=0),
    Panel("critic loss", ("losses/critic",), scale="log"),
    Panel("policy loss", ("losses/policy",), scale="symlog"),
    Panel("multiplier loss", ("losses/multipliers",), scale="symlog"),
    Panel("environment steps per second", ("charts/SPS",), scale="log"),
]


class Run(NamedTuple):
    folder: Path
    args: dict
    columns: dict[str, list[float]]

    def points(self, name):
        """Steps and values where this metric was logged."""
        pairs = zip(self.columns["global_step"], self.columns.get(name, []))
        logged = [(step, value) for step, value in pairs if math.isfinite(value)]
        return tuple(zip(*logged)) or ((), ())


def refuse(sentence):
    print(f"plot.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):  # an empty cell, or a last line that is just being written
        return math.nan


def read_run(folder):
    for name in ("args.json", "progress.csv"):
        if not (folder / name).is_file():
            refuse(f"{folder} is no run folder: there is no {folder / name}.")
    try:
        args = json.loads((folder / "args.json").read_text())
        with open(folder / "progress.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        refuse(f"{folder} does not read as a run ({error}).")
    rows = [row for row in rows if math.isfinite(number(row.get("global_step")))]
    if not rows:
        refuse(f"{folder} has logged nothing yet; try again after its first episode.")
    columns = {name: [number(row[name]) for row in rows] for name in rows[0] if name}
    return Run(folder, args, columns)


def labels(runs):
    """Task, seed and the settings in which the runs differ; the folder's name if that is alike."""
    settings = {name for run in runs for name in run.args} - set(NOT_SETTINGS.split())
    values = {
        name: {json.dumps(run.args[name]) for run in runs if name in run.args} for name in settings
    }
    differing = sorted(name for name in settings if len(values[name]) > 1)
    texts = []
    for run in runs:
        parts = [run.args.get("env_id", "?").removeprefix("dm_control/").removesuffix("-v0")]
        parts += [f"seed {run.args.get('seed', '?')}"]
        parts += [f"{name} {shown(run.args[name])}" for name in differing if name in run.args]
        texts.append(", ".join(parts))
    return [
        f"{text} ({run.folder.name})" if texts.count(text) > 1 else text
        for run, text in zip(runs, texts)
    ]


def shown(value):
    return "×".join(map(str, value)) if isinstance(value, list) else str(value)


def draw_returns(axes, runs, colours):
    """Training return thin, evaluation thick: they may differ much, as exploration costs return."""
    for run, colour in zip(runs, colours):
        axes.plot(*run.points(RETURN[0]), color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(*run.points(RETURN[1]), color=colour, linewidth=2, marker="o", markersize=4)
    axes.set_title("return per episode", fontsize=11)
    thin = Line2D([], [], color="grey", linewidth=0.8, label="in training")
    label = f"evaluation, {' or '.join(dict.fromkeys(map(evaluated_action, runs)))}"
    thick = Line2D([], [], color="grey", linewidth=2, marker="o", markersize=4, label=label)
    axes.legend(handles=[thin, thick], loc="best", fontsize=8, frameon=False)


def evaluated_action(run):
    """What a script acts with when evaluated, told by a setting that only such a script has."""
    if "algorithm" in run.args:
        return "deterministic action"  # benchmark/baselines.py
    return "mean action" if "epsilon_mu" in run.args else "most probable action"


def draw_panel(axes, panel, runs, colours):
    for run, colour in zip(runs, colours):
        for name, style in zip(panel.lines, STYLES if panel.names else ["-"] * len(panel.lines)):
            steps, values = run.points(name)
            marker = "." if len(steps) == 1 else None
            axes.plot(steps, values, style, color=colour, linewidth=1.2, marker=marker)
    if panel.level is not None:
        axes.axhline(panel.level, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    drawn = [value for line in axes.lines for value in line.get_ydata()]
    typical = statistics.median(map(abs, drawn))
    spike = max(map(abs, drawn)) > 10 * typical > 0  # it would flatten the rest
    if panel.scale == "symlog" and spike:
        axes.set_yscale("symlog", linthresh=3 * typical)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if panel.scale == "log" and max(drawn) > 10 * min(drawn) > 0:
        axes.set_yscale("log")
        few = max(drawn) < 100 * min(drawn)  # then label steps between the powers of ten too
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
    if panel.names:
        keys = [
            Line2D([], [], color="grey", linestyle=style, label=name)
            for name, style in zip(panel.names, STYLES)
        ]
        axes.legend(handles=keys, loc="best", fontsize=8, frameon=False)
    axes.set_title(panel.title, fontsize=9)


def draw(runs):
    """The learning curve, two panels wide and high, then every panel that has data, four a row."""
    known = {name for panel in PANELS for name in panel.lines}
    logged = list(
        dict.fromkeys(name for run in runs for name in run.columns if run.points(name)[0])
    )
    extra = [
        Panel(name, (name,))
        for name in logged
        if name.startswith(("mpo/", "losses/")) and name not in known
    ]
    panels = [panel for panel in PANELS + extra if set(panel.lines) & set(logged)]
    many = [matplotlib.colormaps["cividis"](i / max(len(runs) - 1, 1)) for i in range(len(runs))]
    colours = COLOURS[: len(runs)] if len(runs) <= len(COLOURS) else many

    free = [(row, column) for row in range(99) for column in range(4) if max(row, column) > 1]
    cells = free[: len(panels)]
    rows = max([2, *(row + 1 for row, _ in cells)])
    legend_height = 0.22 * len(runs) + 0.2
    figure = plt.figure(figsize=(14, 2.2 * rows + legend_height), layout="constrained")
    grid = figure.add_gridspec(rows, 4)
    draw_returns(figure.add_subplot(grid[:2, :2]), runs, colours)
    for (row, column), panel in zip(cells, panels):
        draw_panel(figure.add_subplot(grid[row, column]), panel, runs, colours)
    last_step = max(max(run.columns["global_step"]) for run in runs)
    for axes in figure.axes:
        axes.set_xlim(0, last_step * 1.02 or 1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.axes[0].set_xlabel("environment steps")
    handles = [
        Line2D([], [], color=c, linewidth=2.5, label=text) for c, text in zip(colours, labels(runs))
    ]
    figure.legend(handles=handles, loc="outside upper left", fontsize=10, frameon=False)
    return figure


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plot.png"),
        help="the file to write (default: plot.png)",
    )
    options = parser.parse_args(words)
    figure = draw([read_run(folder) for folder in options.run_dirs])
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.output, dpi=110)
    except (OSError, ValueError) as error:
        refuse(f"{options.output} cannot be written ({error}).")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
