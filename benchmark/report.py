"""Draw every figure and write every table of benchmark/README.md from the CSVs in benchmark/results.

    python benchmark/report.py                      figures and README.md
    python benchmark/report.py --tables             README.md only
    python benchmark/report.py --untracked --output /tmp/preview        with the CSVs that are not added to git yet

What was not run is shown as missing; each figure and table says how many tasks and seeds it rests on. Nothing is left
out: a CSV that git knows is in the list of runs at the end of README.md, and in every figure it belongs to.
Needs matplotlib and scipy: pip install -c constraints.txt -e '.[benchmark]'.
"""

import argparse
import csv
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from scipy.stats import trim_mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from run import TASKS, read_result  # noqa: E402
from sensitivity import BASE_LABEL, FACTORS, SETTINGS  # noqa: E402

MARKS = (50_000, 100_000, 250_000, 500_000)
WINDOW = 25_000  # a training return is the mean over so many steps before a mark, as in the published figures
SUITE = TASKS["dmc18"].split()
REPETITIONS = 2000  # of the bootstrap
MISSING = "–"


class Algorithm(NamedTuple):
    name: str
    colour: str  # Okabe and Ito's, which tell apart in every common colour blindness; the marker tells apart without
    marker: str
    what: str = ""


# The folder of results/ and how it is drawn, everywhere alike.
OURS = {
    "mpo_continuous": Algorithm("MPO", "#0072B2", "o", "`mpo_continuous.py`, defaults"),
    "mpo_parametric": Algorithm("MPO, parametric", "#D55E00", "s", "`mpo_parametric.py`, defaults"),
    "mpo_parametric-epg": Algorithm("EPG + Retrace", "#009E73", "^", "`mpo_parametric.py --constraint entropy`"),
    "mpo_parametric-actor-critic": Algorithm(
        "actor-critic + Retrace", "#CC79A7", "v", "`mpo_parametric.py --constraint entropy --policy-samples 1`"
    ),
    "sac": Algorithm("SAC", "#E69F00", "D", "stable-baselines3, its defaults"),
    "td3": Algorithm("TD3", "#56B4E9", "P", "stable-baselines3, its defaults; Gaussian exploration noise 0.1"),
    "ddpg": Algorithm(
        "DDPG",
        "#777777",
        "p",
        "stable-baselines3 with the paper's networks (100-100, 200-200) and Adam at 5e-4; exploration noise 0.1",
    ),
    "ppo": Algorithm("PPO", "#000000", "X", "stable-baselines3 with the paper's networks and Adam at 5e-4"),
    "mpo_atari": Algorithm("MPO, discrete", "#0072B2", "o", "`mpo_atari.py`, defaults"),
}
ABLATION = [label for label in OURS if label.startswith(("mpo_continuous", "mpo_parametric"))]
BASELINES = ["mpo_continuous", "sac", "td3", "ddpg", "ppo"]
DISCRETE = ["mpo_atari"]
PUBLISHED = {
    "MPO": Algorithm("MPO, published", "#0072B2", "d"),
    "DreamerV3": Algorithm("DreamerV3, published", "#882255", "*"),
}  # those that are drawn; the tables have all of published.csv
FRONT = ("<!-- benchmark/report.py writes this table -->", "<!-- up to here -->")  # in the project's README


# ---------------------------------------------------------------------------------------------------------------------
# The data: runs[label][task][seed], and published[algorithm][task][mark].
class Run(NamedTuple):
    path: Path
    head: dict
    rows: list

    @property
    def steps(self):
        return self.rows[-1]["env_steps"]

    def training(self, mark):
        """Mean training return over the WINDOW before a mark; None if the run did not come so far."""
        values = [row["train_return"] for row in self.rows if mark - WINDOW < row["env_steps"] <= mark]
        return float(np.mean(values)) if values and self.steps >= mark else None

    def evaluation(self, mark):
        """Mean-action return of the last evaluation in the 10,000 steps before a mark; None if there was none."""
        near = [row["eval_return"] for row in self.rows if mark - 10_000 < row["env_steps"] <= mark]
        near = [value for value in near if value is not None]
        return near[-1] if near and self.steps >= mark else None

    def curve(self, column, width):
        """{step: mean of a column over the rows in the `width` steps up to it}, of rows with an evaluation if asked."""
        bins = defaultdict(list)
        for row in self.rows:
            if row[column] is not None and (column == "train_return" or row["eval_return"] is not None):
                bins[math.ceil(row["env_steps"] / width) * width].append(row[column])
        return {step: float(np.mean(values)) for step, values in bins.items()}


def result_files(results, untracked=False):
    """The CSVs that git knows (all of them where there is no git), and how many others there are."""
    every = sorted(Path(results).glob("**/seed*.csv"))
    listed = subprocess.run(["git", "-C", str(results), "ls-files", "-z", "."], capture_output=True, text=True)
    if untracked or listed.returncode:
        return every, 0
    known = {Path(results) / name for name in listed.stdout.split("\0")}
    return [path for path in every if path in known], len(set(every) - known)


def read_runs(results, files):
    """runs[label][task][seed]; the label is the folder (or folders) above the task's."""
    runs = defaultdict(lambda: defaultdict(dict))
    for path in files:
        label = path.parent.parent.relative_to(results).as_posix()
        head, rows = read_result(path)
        runs[label][path.parent.name][int(path.stem.removeprefix("seed"))] = Run(path, head, rows)
    return {label: dict(tasks) for label, tasks in runs.items()}


def read_published(path=HERE / "published.csv"):
    published = defaultdict(lambda: defaultdict(dict))
    with open(path) as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            published[row["algorithm"]][row["task"]][int(row["env_steps"])] = float(row["mean_return"])
    return published


def seeds_with(runs, label, task, how, mark):
    """What the seeds of a task reached at a mark, of those that came so far; how is training or evaluation."""
    reached = [getattr(run, how)(mark) for _, run in sorted(runs.get(label, {}).get(task, {}).items())]
    return [value for value in reached if value is not None]


def tasks_with(runs, label, how, mark):
    """The tasks of the suite for which there is something at a mark."""
    return [task for task in SUITE if seeds_with(runs, label, task, how, mark)]


def in_order(tasks):
    """Those of the suite first, in its order, then others by name."""
    return sorted(tasks, key=lambda task: (SUITE.index(task) if task in SUITE else len(SUITE), task))


def mean(values):
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else None


# ---------------------------------------------------------------------------------------------------------------------
# Aggregates, as Agarwal et al. (2021) recommend them. The bootstrap resamples the seeds of each task for itself, so
# tasks may have different numbers of them; each task weighs the same.
def iqm(scores):
    """Interquartile mean: mean of the middle half of the runs. [..., runs, steps] -> [..., steps]."""
    return trim_mean(scores, 0.25, axis=-2)


def with_interval(tasks, statistic):
    """A statistic of all runs and its 95% interval. tasks: [seeds, steps] each; statistic: [..., runs, steps] -> ..."""
    generator = np.random.default_rng(0)
    count = math.lcm(*(len(task) for task in tasks))  # each task's runs are repeated to this number
    drawn = [task[generator.integers(len(task), size=(REPETITIONS, len(task)))] for task in tasks]
    found, resampled = (
        np.concatenate([np.repeat(task, count // task.shape[-2], axis=-2) for task in group], axis=-2)
        for group in (tasks, drawn)
    )
    return statistic(found), np.quantile(statistic(resampled), (0.025, 0.975), axis=0)


def comparisons(runs, mark, least=3):
    """[(labels, tasks)]: MPO on all it has at a mark; then baselines, and ablations, on the tasks that all share.

    An algorithm with fewer than `least` tasks is left to the tables of single tasks.
    """
    tasks = {label: tasks_with(runs, label, "evaluation", mark) for label in OURS}
    groups = [(["mpo_continuous"], tasks["mpo_continuous"])]
    for wanted in (BASELINES, ABLATION):
        labels = [label for label in wanted if len(tasks[label]) >= least]
        shared = [task for task in SUITE if all(task in tasks[label] for label in labels)]
        if len(labels) > 1 and shared:
            groups.append((labels, shared))
    return groups if tasks["mpo_continuous"] else groups[1:]


def widest_mark(runs):
    """The mark at which MPO has most tasks; of several, the latest. None if it has reached none."""
    counts = {mark: len(tasks_with(runs, "mpo_continuous", "training", mark)) for mark in MARKS}
    return max(MARKS, key=lambda mark: (counts[mark], mark)) if any(counts.values()) else None


def seed_counts(runs, labels, tasks):
    return [len(runs[label][task]) for label in labels for task in tasks]


def seed_range(counts):
    least, most = min(counts), max(counts)
    return counted(least, "seed") if least == most else f"{least} to {most} seeds"


def counted(count, noun):
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---------------------------------------------------------------------------------------------------------------------
# Figures: as wide as a printed page, letters that stay readable when a phone shrinks it.
plt.rcParams.update({"font.size": 10, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "mpo"})
WIDTH = 7.5  # inches


def panels(count, columns=3, height=1.9, top=0.9):
    """A figure with so many axes, and room above them for a legend."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = (WIDTH, rows * height + top)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:count])


def thousands(axes):
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))


def draw_curve(axes, algorithm, x, values):
    """Median and 5/95% quantiles over seeds. values {x: [one per seed]}; a band needs two."""
    low, middle, high = np.array([np.quantile(values[key], (0.05, 0.5, 0.95)) for key in values]).T
    every = max(1, len(x) // 5)
    options = dict(color=algorithm.colour, marker=algorithm.marker, markevery=every, markersize=4, linewidth=1.6)
    axes.plot(x, middle, **options)
    if max(len(seeds) for seeds in values.values()) > 1:
        axes.fill_between(x, low, high, color=algorithm.colour, alpha=0.2, linewidth=0)


def pooled(seeds, column, width):
    """{step: [value of each seed that has one]}, in the order of steps."""
    curves = [run.curve(column, width) for run in seeds.values()]
    return {step: [c[step] for c in curves if step in c] for step in sorted({step for c in curves for step in c})}


def draw_task(axes, runs, labels, task, column, against="steps", published=None):
    """One panel, with a note on how many seeds the algorithms have. Returns what was drawn."""
    drawn, last = [], 0
    for label in [label for label in labels if runs.get(label, {}).get(task)]:
        seeds = runs[label][task]
        values = pooled(seeds, column, 5000 if column == "train_return" else 10_000)
        if not values:
            continue
        x = list(values)
        if against == "minutes":
            x = [float(np.median(times)) / 60 for times in pooled(seeds, "seconds", 10_000).values()]
        draw_curve(axes, OURS[label], x, values)
        drawn.append((OURS[label], len(seeds)))
        last = max(last, x[-1])
    for name, algorithm in PUBLISHED.items() if published else ():
        points = {mark: value for mark, value in published[name].get(task, {}).items() if mark <= 1.02 * last}
        if points:
            options = dict(color=algorithm.colour, marker=algorithm.marker, markerfacecolor="white", markersize=7)
            axes.plot(list(points), list(points.values()), linestyle=":", linewidth=1, **options)
            drawn.append((algorithm, None))
    counts = [count for _, count in drawn if count]
    note = seed_range(counts) if counts else "not evaluated yet"
    axes.set_title(task)
    axes.text(0.03, 0.98, note, transform=axes.transAxes, va="top", fontsize=8, color="#444444")
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low if axes.dataLim.ymin < 0 else 0, max(1, 1.12 * high))  # room for the note
    thousands(axes)
    return [algorithm for algorithm, _ in drawn]


def legend(figure, drawn, title):
    """One for the figure, in the fixed order of the algorithms."""
    order = [algorithm for algorithm in [*OURS.values(), *PUBLISHED.values()] if algorithm in drawn]
    handles = []
    for algorithm in order:
        hollow = {"markerfacecolor": "white", "linestyle": ":"} if algorithm in PUBLISHED.values() else {}
        options = dict(color=algorithm.colour, marker=algorithm.marker, label=algorithm.name) | hollow
        handles.append(Line2D([], [], **options))
    columns = min(3, len(handles)) if len(handles) != 4 else 2
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title)


def draw_tasks(runs, published, column, against="steps"):
    """Every task of MPO and the baselines, beside the published figures."""
    tasks = in_order({task for label in BASELINES for task in runs.get(label, {})})
    if not tasks:
        return None
    figure, axes = panels(len(tasks))
    drawn = []
    for panel, task in zip(axes, tasks):
        drawn += draw_task(panel, runs, BASELINES, task, column, against, published)
    what = "training return" if column == "train_return" else "return of the mean action, 10 episodes"
    legend(figure, drawn, f"{what}: median and 5/95% quantiles over seeds")
    figure.supxlabel("environment steps" if against == "steps" else "minutes of training on one thread", fontsize=10)
    return figure


def ablation_tasks(runs):
    """Every task on which a variant was run."""
    return in_order({task for label in ABLATION[1:] for task in runs.get(label, {})})


def draw_ablation(runs):
    """The paper's ablation."""
    tasks = ablation_tasks(runs)
    if not tasks:
        return None
    figure, axes = panels(2 * len(tasks), columns=min(len(tasks), 3), height=2.3, top=1.0)
    drawn = []
    for panel, (column, task) in zip(axes, [(c, task) for c in ("train_return", "eval_return") for task in tasks]):
        drawn += draw_task(panel, runs, ABLATION, task, column)
        panel.set_title(f"{task}, {'training' if column == 'train_return' else 'mean action'}")
    legend(figure, drawn, "return: median and 5/95% quantiles over seeds")
    figure.supxlabel("environment steps", fontsize=10)
    return figure


def games_of(runs):
    """Every task of mpo_atari.py."""
    return sorted({task for label in DISCRETE for task in runs.get(label, {})})


def draw_games(runs):
    """Scores of mpo_atari.py: a line for the last twenty games of the training, hollow marks for evaluations."""
    tasks = games_of(runs)
    if not tasks:
        return None
    figure, axes = panels(len(tasks), columns=2, height=2.9, top=1.0)
    drawn = []
    for panel, task in zip(axes, tasks):
        counts = []
        for label in [label for label in DISCRETE if task in runs.get(label, {})]:
            algorithm, seeds = OURS[label], runs[label][task]
            draw_curve(panel, algorithm, *xy(pooled(seeds, "train_return", 5000)))
            for run in seeds.values():
                rows = [row for row in run.rows if row["eval_return"] is not None]
                x, y = [row["env_steps"] for row in rows], [row["eval_return"] for row in rows]
                panel.plot(x, y, algorithm.marker, color=algorithm.colour, markerfacecolor="white", markersize=6)
            drawn.append(algorithm)
            counts.append(len(seeds))
        panel.set_title(f"{task}, {seed_range(counts)}")
        panel.set_xlim(left=0)
        thousands(panel)
    legend(figure, drawn, "score of the last 20 games; hollow: evaluations with the most probable action")
    figure.supxlabel("agent steps (four frames each in Atari)", fontsize=10)
    return figure


def xy(values):
    return list(values), values


def draw_aggregate(runs):
    """Interquartile mean of the mean-action return against steps, and at the last step the share of runs above tau."""
    mark = widest_mark(runs)
    groups = comparisons(runs, mark) if mark else []
    if not groups:
        return None
    figure, axes = panels(2 * len(groups), columns=2, height=2.6, top=1.0)
    taus = np.linspace(0, 1000, 101)
    for (labels, tasks), left, right in zip(groups, axes[::2], axes[1::2]):
        for label in labels:
            algorithm, curves = OURS[label], []
            for task in tasks:
                reached = [run for run in runs[label][task].values() if run.evaluation(mark) is not None]
                curves.append([run.curve("eval_return", 10_000) for run in reached])
            steps = [s for s in range(10_000, mark + 1, 10_000) if all(s in curve for task in curves for curve in task)]
            scores = [np.array([[curve[step] for step in steps] for curve in task]) for task in curves]
            point, interval = with_interval(scores, iqm)
            share, shares = with_interval([task[:, -1:] for task in scores], lambda x: (x > taus).mean(-2))
            options = dict(color=algorithm.colour, marker=algorithm.marker, markersize=4)
            for panel, x, y, band, every in ((left, steps, point, interval, 1), (right, taus, share, shares, 20)):
                panel.plot(x, y, markevery=every, **options)
                panel.fill_between(x, *band, color=algorithm.colour, alpha=0.2, linewidth=0)
        left.set(ylabel="IQM of return", xlim=(0, None), ylim=(0, 1.05 * left.get_ylim()[1]))
        right.set(ylabel="share of runs above τ", xlim=(0, 1000), ylim=(0, 1.02))
        right.set_yticks([0, 0.25, 0.5, 0.75, 1])
        left.set_title(f"{counted(len(tasks), 'task')}, {seed_range(seed_counts(runs, labels, tasks))} each")
        right.set_title(f"at {mark:,} steps")
        thousands(left)
    left.set_xlabel("environment steps")
    right.set_xlabel("return τ")
    drawn = [OURS[label] for labels, _ in groups for label in labels]
    legend(figure, drawn, "mean-action return, 95% intervals over seeds")
    return figure


def sensitivity(runs):
    """{task: {setting: {factor: (training, evaluation, seeds)}}} and the step; factor 1: nothing is scaled."""
    variants = {label: tasks for label, tasks in runs.items() if label.startswith("sensitivity/")}
    if not variants:
        return {}, 0
    step = min(run.steps for tasks in variants.values() for seeds in tasks.values() for run in seeds.values())
    step = int(step // 1000 * 1000)
    found = defaultdict(lambda: defaultdict(dict))
    for task in in_order({task for tasks in variants.values() for task in tasks}):
        for setting in SETTINGS:
            labels = {1.0: BASE_LABEL}
            labels |= {factor: f"sensitivity/{setting}-{name}" for name, factor in FACTORS.items()}
            for factor in sorted(labels):
                training = seeds_with(runs, labels[factor], task, "training", step)
                evaluation = seeds_with(runs, labels[factor], task, "evaluation", step)
                if training:
                    found[task][setting][factor] = mean(training), mean(evaluation), len(training)
    return found, step


def draw_sensitivity(runs):
    """For each setting a line over its three values; flat lines are the paper's claim."""
    found, step = sensitivity(runs)
    if not found:
        return None
    figure, axes = panels(len(found), columns=2, height=2.9, top=0.9)
    mpo = OURS["mpo_continuous"]
    for panel, (task, settings) in zip(axes, found.items()):
        for position, setting in enumerate(SETTINGS):
            points = settings.get(setting, {})
            for which, style in ((0, dict(markerfacecolor="white", linestyle=":")), (1, {})):
                x = [position + 0.25 * math.log(factor, 3) for factor in points if points[factor][which] is not None]
                y = [value[which] for value in points.values() if value[which] is not None]
                panel.plot(x, y, color=mpo.colour, marker=mpo.marker, markersize=5, **style)
        seeds = {value[2] for points in settings.values() for value in points.values()}
        panel.set_title(f"{task}, {seed_range(seeds)}")
        symbols = [r"$\epsilon$", r"$\epsilon_\mu$", r"$\epsilon_\Sigma$", "rates"]  # in the order of SETTINGS
        panel.set_xticks(range(len(SETTINGS)), symbols)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    solid = Line2D([], [], color=mpo.colour, marker=mpo.marker, label="mean action")
    hollow = dict(markerfacecolor="white", linestyle=":", label="in training")
    handles = [solid, Line2D([], [], color=mpo.colour, marker=mpo.marker, **hollow)]
    title = f"return at {step:,} steps with a setting divided by 3, as it is, and times 3"
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, title=title)
    return figure


def figures(runs, published):
    """All figures by file name; None where there is nothing to draw yet."""
    return {
        "training": draw_tasks(runs, published, "train_return"),
        "evaluation": draw_tasks(runs, None, "eval_return"),
        "wall-clock": draw_tasks(runs, None, "eval_return", against="minutes"),
        "ablation": draw_ablation(runs),
        "discrete": draw_games(runs),
        "aggregate": draw_aggregate(runs),
        "sensitivity": draw_sensitivity(runs),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables.
def cell(value):
    return MISSING if value is None else f"{value:.0f}"


def markdown(head, rows, text=1):
    """A table whose first columns are text and whose others are numbers."""
    rule = ["---"] * text + ["---:"] * (len(head) - text)
    lines = [" | ".join(row) for row in (head, rule, *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def published_table(runs, published, mark):
    """Ours beside the published figures; a mean is over the tasks that we have, then over all of the suite."""
    head = ["task", "ours", "seeds", "ours, mean action", *(f"{name}" for name in published)]
    table = {}
    for task in SUITE:
        training = seeds_with(runs, "mpo_continuous", task, "training", mark)
        evaluation = seeds_with(runs, "mpo_continuous", task, "evaluation", mark)
        others = [published[name][task].get(mark) for name in published]
        table[task] = [mean(training), len(training) or None, mean(evaluation), *others]
    rows = [[task, *map(cell, values)] for task, values in table.items()]
    ours = [values for values in table.values() if values[0] is not None]
    if 0 < len(ours) < len(SUITE):
        means = [mean(column) for column in zip(*ours)]
        rows.append([f"**mean of our {counted(len(ours), 'task')}**", cell(means[0]), "", *map(cell, means[2:])])
    means = [mean(column) for column in zip(*table.values())]
    if len(ours) < len(SUITE):
        means[0] = means[2] = None
    rows.append([f"**mean of all {len(SUITE)}**", cell(means[0]), "", *map(cell, means[2:])])
    return markdown(head, rows)


def front_table(runs, published, mark=100_000):
    """The table in the project's README: the tasks that we have, and the published columns closest to ours."""
    head = ["task", "mean action", "training return", "seeds", *(PUBLISHED[name].name for name in PUBLISHED)]
    table = {}
    for task in tasks_with(runs, "mpo_continuous", "training", mark):
        training = seeds_with(runs, "mpo_continuous", task, "training", mark)
        evaluation = seeds_with(runs, "mpo_continuous", task, "evaluation", mark)
        others = [published[name][task].get(mark) for name in PUBLISHED]
        table[task] = [mean(evaluation), mean(training), len(training), *others]
    rows = [[task, *map(cell, values)] for task, values in table.items()]
    means = [cell(mean(column)) for column in zip(*table.values())]
    rows.append([f"**mean of {counted(len(table), 'task')}**", *means[:2], "", *means[3:]])
    return markdown(head, rows)


def front_page(text, table):
    """The project's README with this table in its place."""
    before, rest = text.split(FRONT[0])
    return before + FRONT[0] + f"\n\n{table}\n\n" + FRONT[1] + rest.split(FRONT[1])[1]


def compared_table(runs, labels, mark, tasks):
    """Training / mean-action return and the number of seeds, for several of our own algorithms."""
    rows = []
    for task in tasks:
        cells = []
        for label in labels:
            training, evaluation = (seeds_with(runs, label, task, how, mark) for how in ("training", "evaluation"))
            text = f"{cell(mean(training))} / {cell(mean(evaluation))} ({len(training)})"
            cells.append(text if training else MISSING)
        rows.append([task, *cells])
    return markdown(["task", *(OURS[label].name for label in labels)], rows)


def aggregate_table(runs, mark):
    """IQM of both returns. Rows with equal numbers of tasks that follow each other are of the same tasks."""
    rows = []
    for label, tasks in [(label, tasks) for labels, tasks in comparisons(runs, mark) for label in labels]:
        cells = [OURS[label].name, f"{len(tasks)}", seed_range(seed_counts(runs, [label], tasks)).split(" seed")[0]]
        for how in ("training", "evaluation"):
            scores = [np.array(seeds_with(runs, label, task, how, mark))[:, None] for task in tasks]
            point, (low, high) = with_interval(scores, iqm)
            several = any(len(task) > 1 for task in scores)
            cells.append(f"{point[0]:.0f}" + (f" [{low[0]:.0f}, {high[0]:.0f}]" if several else ""))
        rows.append(cells)
    return markdown(["algorithm", "tasks", "seeds per task", "IQM, training", "IQM, mean action"], rows)


def sensitivity_table(runs):
    found, step = sensitivity(runs)
    factors = [*sorted([1.0, *FACTORS.values()])]
    rows = []
    for task, settings in found.items():
        for setting in SETTINGS:
            points = [settings[setting].get(factor) for factor in factors]
            cells = [f"{cell(p[0])} / {cell(p[1])} ({p[2]})" if p else MISSING for p in points]
            rows.append([f"{task}, {setting}", *cells])
    return markdown(["task, setting", "over 3", "as it is", "times 3"], rows), step


PAPER_SCORES = {"Pong": 20.9, "Breakout": 360.5, "Qbert": 10317.0, "Tennis": 22.2, "Boxing": 82.0}


def games_table(runs):
    """What mpo_atari.py reached, beside the scores that the paper prints."""
    rows = []
    for task, label in [(task, label) for task in games_of(runs) for label in DISCRETE if task in runs.get(label, {})]:
        for seed, run in sorted(runs[label][task].items()):
            evaluations = [row["eval_return"] for row in run.rows if row["eval_return"] is not None]
            scores = [run.rows[0]["train_return"], run.rows[-1]["train_return"], evaluations[-1], max(evaluations)]
            printed = next((f"{score:,}" for game, score in PAPER_SCORES.items() if game in task), MISSING)
            size = [f"{run.steps:,.0f}", f"{run.rows[-1]['seconds'] / 60:.0f}"]
            rows.append([task, OURS[label].what, f"{seed}", *size, *(f"{score:.1f}" for score in scores), printed])
    head = ["task", "what", "seed", "agent steps", "minutes", "first games", "last 20 games"]
    return markdown([*head, "last evaluation", "best evaluation", "paper, MPO"], rows, text=2)


def runs_table(runs, results):
    """Every CSV."""
    rows = []
    for label in sorted(runs, key=lambda label: (list(OURS).index(label) if label in OURS else len(OURS), label)):
        for task in in_order(runs[label]):
            for seed, run in sorted(runs[label][task].items()):
                at = [cell(getattr(run, how)(mark)) for mark in (50_000, 100_000) for how in ("training", "evaluation")]
                last = [row["eval_return"] for row in run.rows if row["eval_return"] is not None]
                link = f"[{task} seed {seed}](results/{run.path.relative_to(results).as_posix()})"
                minutes = f"{run.rows[-1]['seconds'] / 60:.0f}"
                commit = run.head["commit"].split(",")[0]
                rows.append([label, link, f"{run.steps:,.0f}", *at, cell(last[-1] if last else None), minutes, commit])
    head = ["label", "run", "steps", "50k, training", "50k, mean action", "100k, training", "100k, mean action"]
    return markdown([*head, "last mean action", "minutes", "commit"], rows, text=2)


def picture(name, text, drawn):
    return [f"![{text}](figures/{name}.png)", "", f"([SVG](figures/{name}.svg))", ""] if name in drawn else []


PROTOCOL = """# Evidence

Written by `python benchmark/report.py` from the CSVs in [results](results) and from [published.csv](published.csv); a
test regenerates it. It rests on {count}, all listed at the end. {missing} means: not run, or not so far.

## Protocol

- A *training return* is the mean over the 25,000 environment steps before a mark, of the actions as they were explored,
  then the mean over seeds. So are the published figures.
- *Mean action*: the mean return of 10 episodes with the policy's mean (for PPO, SAC, TD3 and DDPG their deterministic
  action), at the mark, then the mean over seeds. The episodes start from the same seeds for every algorithm.
- Action repeat 1: a step is one call of the environment.
- Every seed that was run is reported: all are in the means, and each has its row at the end.
- No task has settings of its own (the linear-quadratic one alone is given an `--action-bound`, for it has none).
- Curves: median and 5/95% quantiles over seeds, as in the paper; with one seed there is no band, and with few the band
  is nearly their range. Training returns are means over 5,000 steps.
- Aggregates: interquartile mean over runs, with the 95% interval of the stratified bootstrap over seeds (Agarwal et
  al., 2021); each task weighs the same. The interval says what other seeds would change, not what other tasks would;
  with one seed there is none, and where some tasks have one it is too narrow.
- Wall-clock: each run on one thread, of a machine that often had other work, so it is a rough guide.

Each CSV holds the command that made it, with the commit and all settings. The first table's is

    python benchmark/run.py --script mpo_continuous.py --tasks dmc18 --seeds 1 --total-timesteps 100000

## Ours beside published figures

`ours` is `mpo_continuous.py` with its defaults (runs of earlier ones are under `study/window-8-batch-size-32` at the
end). The other columns are quoted from the scores that were published with the code of DreamerV3 (MIT licence): 10
seeds, 5 for PPO and DreamerV3, 8 or 9 in three cells of DMPO and D4PG. They are training returns: compare them with
`ours`, not with `ours, mean action`. Seeds differ much at 100,000 steps, so a figure that rests on one seed settles
nothing.
"""


DISCRETE_TEXT = """\
Each row is `python benchmark/run.py --script mpo_atari.py --tasks TASK --total-timesteps STEPS`. In training, actions
are drawn from the policy; *first games* are those before the first row was logged, so nearly the untrained policy's. An
evaluation is of whole games with the most probable action, from the same seeds each time. Scores are the game's own,
never clipped. An agent step of Atari is four frames, of which DQN's custom is 200 million. Minutes are by the clock, of
a machine with other work; Pong had two threads for its last quarter.
"""


def readme(runs, published, results, drawn):
    """All of benchmark/README.md. drawn: the names of the figures that exist."""
    count = sum(len(seeds) for tasks in runs.values() for seeds in tasks.values())
    mark = widest_mark(runs)
    cells = "training / mean action (seeds)"
    parts = [PROTOCOL.format(count=counted(count, "run"), missing=MISSING)]
    for each in MARKS:
        table = published_table(runs, published, each)
        if tasks_with(runs, "mpo_continuous", "training", each):
            parts += [f"At {each:,} steps:", "", table, ""]
        else:
            fold = f"<details><summary>At {each:,} steps: none of ours yet, the published figures</summary>"
            parts += [fold, "", table, "", "</details>", ""]
    parts += picture("training", "training return of every task against environment steps", drawn)
    parts += picture("evaluation", "mean-action return of every task against environment steps", drawn)
    parts += picture("wall-clock", "mean-action return of every task against minutes", drawn)
    if mark:
        parts += ["## Baselines", "", f"At {mark:,} steps: {cells}.", ""]
        tasks = [task for task in SUITE if any(runs.get(label, {}).get(task) for label in BASELINES)]
        parts += [compared_table(runs, BASELINES, mark, tasks), "", "What each algorithm is:", ""]
        rows = [[OURS[label].name, f"`results/{label}`", OURS[label].what] for label in OURS if label not in DISCRETE]
        parts += [markdown(["algorithm", "results", "what"], rows, text=3), ""]
        parts += ["## The ablation", "", f"At {mark:,} steps: {cells}.", ""]
        tasks = in_order({*TASKS["ablation3"].split(), *ablation_tasks(runs)})
        parts += [compared_table(runs, ABLATION, mark, tasks), ""]
        parts += picture("ablation", "ablation: training and mean-action return", drawn)
        parts += ["## Aggregates", "", f"Return at {mark:,} steps; in brackets the 95% interval.", ""]
        parts += [aggregate_table(runs, mark), ""]
        parts += picture("aggregate", "interquartile mean and performance profile", drawn)
    if games_of(runs):
        parts += ["## Discrete actions", "", DISCRETE_TEXT, games_table(runs), ""]
        parts += picture("discrete", "scores of mpo_atari.py against agent steps", drawn)
    table, step = sensitivity_table(runs)
    if step:
        parts += [
            "## Sensitivity",
            "",
            f"`python benchmark/sensitivity.py`, windows of 8, at {step:,} steps: {cells}.",
            "",
        ]
        parts += [table, "", *picture("sensitivity", "return with each setting divided by and times 3", drawn)]
    parts += ["## All runs", "", runs_table(runs, results), ""]
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the CSVs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for README.md and figures/")
    parser.add_argument("--tables", action="store_true", help="write README.md only")
    parser.add_argument("--untracked", action="store_true", help="with the CSVs that git does not know")
    options = parser.parse_args()
    files, others = result_files(options.results, options.untracked)
    if others:
        print(f"left out {counted(others, 'CSV')} that git does not know; git add them, or use --untracked")
    if not files:
        print(f"report.py: there is no CSV in {options.results}; benchmark/run.py makes them.", file=sys.stderr)
        raise SystemExit(2)
    runs, published = read_runs(options.results, files), read_published()
    folder = options.output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in {} if options.tables else figures(runs, published).items():
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
    drawn = [path.stem for path in folder.glob("*.png")]
    (options.output / "README.md").write_text(readme(runs, published, options.results, drawn))
    if options.output == HERE:
        front = HERE.parent / "README.md"
        front.write_text(front_page(front.read_text(), front_table(runs, published)))
    print(f"wrote {options.output / 'README.md'} and {counted(len(drawn), 'figure')}")


if __name__ == "__main__":
    main()
