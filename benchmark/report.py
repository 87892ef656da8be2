"""Draw the figures and write the tables of benchmark/README.md, from the CSVs in results/.

    python benchmark/report.py                      figures, README.md, RUNS.md
    python benchmark/report.py --tables             README.md and RUNS.md only
    python benchmark/report.py --untracked --output /tmp/preview    CSVs not added to git yet, too

Each figure and table says how many tasks and seeds it rests on; a section whose runs do not exist
is left out. Of the runs nothing is left out: a CSV that git knows is in RUNS.md, and in every
figure and table that it belongs to. Needs matplotlib and scipy.
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
sys.path[:0] = [str(HERE), str(HERE / "studies")]
from run import TASKS, read_result  # noqa: E402
from sensitivity import BASE_LABEL, FACTORS, SETTINGS  # noqa: E402

MARK = 100_000  # environment steps of the main table
LONG = (250_000, 500_000)  # of the longer runs
WINDOW = 25_000  # a training return is the mean over so many steps, as in the published figures
SUITE = TASKS["dmc18"].split()
DOMAINS = [task for task in TASKS["paper15"].split() if task not in SUITE]  # the paper's others
GOALS = {"walker-walk": 900, "cheetah-run": 400, "cartpole-swingup": 800, "reacher-hard": 800}
HIGH = ("humanoid", "benchmark.parkour")  # how the names of these tasks begin
REPETITIONS = 2000  # of the bootstrap
MISSING = "–"
HOWS = {"training": "train_return", "evaluation": "eval_return"}  # and their columns


class Algorithm(NamedTuple):
    """How it is drawn, everywhere alike; colours are Okabe and Ito's, told apart by most eyes."""

    name: str
    colour: str
    marker: str
    what: str = ""


# The folder of results/ in which an algorithm is.
OURS = {
    "mpo_continuous": Algorithm("MPO", "#0072B2", "o", "`mpo_continuous.py`, defaults"),
    "mpo_parametric": Algorithm("MPO, parametric", "#D55E00", "s", "`mpo_parametric.py`, defaults"),
    "mpo_parametric-epg": Algorithm(
        "EPG + Retrace", "#009E73", "^", "`mpo_parametric.py --constraint entropy`"
    ),
    "mpo_parametric-actor-critic": Algorithm(
        "actor-critic + Retrace",
        "#CC79A7",
        "v",
        "`mpo_parametric.py --constraint entropy --policy-samples 1`",
    ),
    "mpo_distributed": Algorithm("MPO, workers", "#56B4E9", "h", "`mpo_distributed.py`, torchrun"),
    "sac": Algorithm("SAC", "#E69F00", "D", "stable-baselines3, its defaults"),
    "td3": Algorithm("TD3", "#F0E442", "P", "stable-baselines3, its defaults; noise 0.1"),
    "ddpg": Algorithm(
        "DDPG",
        "#777777",
        "p",
        "stable-baselines3, the paper's networks and Adam at 5e-4; noise 0.1",
    ),
    "ppo": Algorithm(
        "PPO", "#000000", "X", "stable-baselines3, the paper's networks and Adam at 5e-4"
    ),
    "mpo_atari": Algorithm("MPO, discrete", "#0072B2", "o", "`mpo_atari.py`, defaults"),
    "dqn": Algorithm("DQN", "#E69F00", "D", "stable-baselines3, as `benchmark/dqn.py` sets it up"),
}
ABLATION = [label for label in OURS if label.startswith(("mpo_continuous", "mpo_parametric"))]
BASELINES = ["mpo_continuous", "sac", "td3", "ddpg", "ppo"]
DISCRETE = ["mpo_atari", "dqn"]
TIMED = [*BASELINES, "mpo_parametric"]
# Which of the published figures are drawn, beside returns of their kind; the tables have all.
PUBLISHED = {
    "training": {
        "MPO": Algorithm("MPO, published", "#0072B2", "d"),
        "DreamerV3": Algorithm("DreamerV3, published", "#882255", "*"),
    },
    "evaluation": {
        "SAC": Algorithm("SAC, published", "#E69F00", "d"),
        "DreamerV3": Algorithm("DreamerV3, published", "#882255", "*"),
        "TD-MPC2": Algorithm("TD-MPC2, published", "#117733", "H"),
    },
}
FRONT = ("<!-- results -->", "<!-- end of results -->")  # in the project's README
FRONT_TASKS = {*TASKS["core6"].split(), "pendulum-swingup", "finger-spin", "ball_in_cup-catch"}


# ---- The data: runs[label][task][seed], and published[how][algorithm][task][mark].
class Run(NamedTuple):
    path: Path
    head: dict
    rows: list

    @property
    def steps(self):
        return self.rows[-1]["env_steps"]

    @property
    def minutes(self):
        return self.rows[-1]["seconds"] / 60

    def training(self, mark):
        """Mean training return over the WINDOW before a mark; None if it did not come so far."""
        rows = [row for row in self.rows if mark - WINDOW < row["env_steps"] <= mark]
        return mean(row["train_return"] for row in rows) if self.steps >= mark else None

    def evaluation(self, mark):
        """Return of the last evaluation in the 10,000 steps before a mark; None if none."""
        rows = [row for row in self.evaluations() if mark - 10_000 < row["env_steps"] <= mark]
        return rows[-1]["eval_return"] if rows and self.steps >= mark else None

    def evaluations(self):
        return [row for row in self.rows if row["eval_return"] is not None]

    def curve(self, column, width):
        """{step: mean of a column over the rows of the `width` steps up to it}."""
        bins = defaultdict(list)
        for row in self.rows if column == "train_return" else self.evaluations():
            if row[column] is not None:
                bins[math.ceil(row["env_steps"] / width) * width].append(row[column])
        return {step: float(np.mean(values)) for step, values in bins.items()}

    def first_at(self, goal):
        """(environment steps, minutes) of the first evaluation at a return or above, or None."""
        for row in self.evaluations():
            if row["eval_return"] >= goal:
                return row["env_steps"], row["seconds"] / 60
        return None


def result_files(results, untracked=False):
    """The CSVs that git knows (all where there is no git), and how many others there are."""
    every = sorted(Path(results).glob("**/seed*.csv"))
    command = ["git", "-C", str(results), "ls-files", "-z", "."]
    listed = subprocess.run(command, capture_output=True, text=True)
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
        seed = int(path.stem.removeprefix("seed"))
        runs[label][path.parent.name][seed] = Run(path, head, rows)
    return {label: dict(tasks) for label, tasks in runs.items()}


def read_published():
    """Training returns and evaluations, which must never be mixed."""
    names = {"training": "published.csv", "evaluation": "published_evaluation.csv"}
    published = {how: defaultdict(lambda: defaultdict(dict)) for how in names}
    for how, name in names.items():
        with open(HERE / name) as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                figures = published[how][row["algorithm"]][row["task"]]
                figures[int(row["env_steps"])] = float(row["mean_return"])
    return published


def seeds_with(runs, label, task, how, mark):
    """What the seeds of a task reached at a mark, of those that came so far."""
    seeds = sorted(runs.get(label, {}).get(task, {}).items())
    reached = [getattr(run, how)(mark) for _, run in seeds]
    return [value for value in reached if value is not None]


def tasks_with(runs, label, how, mark, tasks=SUITE):
    """Those of the tasks for which there is something at a mark."""
    return [task for task in tasks if seeds_with(runs, label, task, how, mark)]


def in_order(tasks):
    """Those of the suite first, in its order, then others by name."""
    place = {task: number for number, task in enumerate(SUITE)}
    return sorted(tasks, key=lambda task: (place.get(task, len(SUITE)), task))


def mean(values):
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else None


# ---- Aggregates, as Agarwal et al. (2021) recommend them. The bootstrap resamples the seeds of a
# task for itself, so tasks may have different numbers of them; each task weighs the same.
def iqm(scores):
    """Interquartile mean: of the middle half of the runs. [..., runs, steps] -> [..., steps]."""
    return trim_mean(scores, 0.25, axis=-2)


def plain_mean(scores):
    return scores.mean(-2)


def with_interval(tasks, statistic):
    """A statistic of all runs and its 95% interval. tasks: [seeds, steps] each."""
    generator = np.random.default_rng(0)
    count = math.lcm(*(len(task) for task in tasks))  # each task's runs are repeated to this
    picks = [generator.integers(len(task), size=(REPETITIONS, len(task))) for task in tasks]
    drawn = [task[pick] for task, pick in zip(tasks, picks)]

    def joined(group):
        repeated = [np.repeat(task, count // task.shape[-2], axis=-2) for task in group]
        return statistic(np.concatenate(repeated, axis=-2))

    return joined(tasks), np.quantile(joined(drawn), (0.025, 0.975), axis=0)


def interval_cell(scores, statistic):
    """Text of a statistic over tasks with its interval; none where each task has one seed."""
    point, (low, high) = with_interval([np.array(task)[:, None] for task in scores], statistic)
    several = any(len(task) > 1 for task in scores)
    return f"{point[0]:.0f}" + (f" [{low[0]:.0f}, {high[0]:.0f}]" if several else "")


def comparisons(runs, mark, least=3):
    """[(labels, tasks)]: MPO on all it has at a mark; baselines, ablations on what all share.

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


def seed_counts(runs, labels, tasks):
    return [len(runs[label][task]) for label in labels for task in tasks]


def seed_range(counts):
    least, most = min(counts), max(counts)
    return counted(least, "seed") if least == most else f"{least} to {most} seeds"


def counted(count, noun):
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---- Figures: as wide as a printed page, letters that stay readable when a phone shrinks it.
plt.rcParams.update({"font.size": 10, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "mpo"})
WIDTH = 7.5  # inches


def panels(count, columns=3, height=1.9, top=0.9):
    """A figure with so many axes, and room above them for a legend."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = (WIDTH, rows * height + top)
    options = dict(figsize=size, layout="constrained", squeeze=False)
    figure, axes = plt.subplots(rows, columns, **options)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:count])


def few_ticks(axes):
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))


def draw_curve(axes, algorithm, x, values):
    """Median and 5/95% quantiles over seeds. values {x: [one per seed]}; a band needs two."""
    low, middle, high = np.array([np.quantile(values[key], (0.05, 0.5, 0.95)) for key in values]).T
    options = dict(color=algorithm.colour, marker=algorithm.marker, markersize=4, linewidth=1.6)
    axes.plot(x, middle, markevery=max(1, len(x) // 5), **options)
    if max(len(seeds) for seeds in values.values()) > 1:
        axes.fill_between(x, low, high, color=algorithm.colour, alpha=0.2, linewidth=0)


def pooled(seeds, column, width):
    """{step: [value of each seed that has one]}, in the order of steps."""
    curves = [run.curve(column, width) for run in seeds.values()]
    steps = sorted({step for curve in curves for step in curve})
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}


def draw_task(axes, runs, labels, task, how, against="steps", published=None):
    """One panel, with a note on how many seeds the algorithms have. Returns what was drawn."""
    drawn, counts, last = [], [], 0
    for label in [label for label in labels if runs.get(label, {}).get(task)]:
        seeds, algorithm = runs[label][task], OURS[label.removeprefix("time/")]
        values = pooled(seeds, HOWS[how], 5000 if how == "training" else 10_000)
        if not values:
            continue
        x = list(values)
        if against == "minutes":
            times = pooled(seeds, "seconds", 10_000)
            x = [float(np.median(seconds)) / 60 for seconds in times.values()]
        draw_curve(axes, algorithm, x, values)
        drawn.append(algorithm)
        counts.append(len(seeds))
        last = max(last, x[-1])
    for name, algorithm in PUBLISHED[how].items() if published else ():
        figures = published[how][name].get(task, {})
        points = {mark: value for mark, value in figures.items() if mark <= 1.02 * last}
        if points:
            options = dict(color=algorithm.colour, marker=algorithm.marker, markersize=7)
            options |= dict(markerfacecolor="white", linestyle=":", linewidth=1)
            axes.plot(list(points), list(points.values()), **options)
            drawn.append(algorithm)
    note = seed_range(counts) if counts else "not evaluated yet"
    axes.set_title(task.rpartition(".")[2])
    options = dict(transform=axes.transAxes, va="top", fontsize=8, color="#444444")
    axes.text(0.03, 0.98, note, **options)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low if axes.dataLim.ymin < 0 else 0, max(1, 1.12 * high))  # room for the note
    few_ticks(axes)
    return drawn


def legend(figure, drawn, title):
    """One for the figure, in the fixed order of the algorithms."""
    quoted = [algorithm for each in PUBLISHED.values() for algorithm in each.values()]
    handles = []
    for algorithm in dict.fromkeys([*OURS.values(), *quoted]):
        if algorithm in drawn:
            hollow = {"markerfacecolor": "white", "linestyle": ":"} if algorithm in quoted else {}
            options = dict(color=algorithm.colour, marker=algorithm.marker, label=algorithm.name)
            handles.append(Line2D([], [], **options | hollow))
    columns = min(3, len(handles)) if len(handles) != 4 else 2
    options = dict(loc="outside upper center", ncols=columns, frameon=False)
    figure.legend(handles=handles, title=title, **options)


def draw_tasks(runs, published, how, tasks, labels=BASELINES):
    """A panel for each task, beside the published figures."""
    if not tasks:
        return None
    figure, axes = panels(len(tasks))
    drawn = []
    for panel, task in zip(axes, tasks):
        drawn += draw_task(panel, runs, labels, task, how, published=published)
    action = "most probable" if labels == DISCRETE else "mean"
    what = "training return" if how == "training" else f"return of the {action} action"
    legend(figure, drawn, f"{what}: median and 5/95% quantiles over seeds")
    figure.supxlabel("environment steps", fontsize=10)
    return figure


def suite_tasks(runs):
    """The tasks of the first figures: all of MPO's and the baselines' but the largest bodies."""
    tasks = {task for label in BASELINES for task in runs.get(label, {})}
    return in_order(task for task in tasks if task in SUITE + DOMAINS)


def high_tasks(runs):
    return in_order({task for label in OURS for task in runs.get(label, {}) if is_high(task)})


def is_high(task):
    return task.startswith(HIGH)


def ablation_tasks(runs):
    """Every task on which a variant was run."""
    return in_order({task for label in ABLATION[1:] for task in runs.get(label, {})})


def draw_ablation(runs):
    """The paper's ablation: training above, mean action below."""
    tasks = ablation_tasks(runs)
    if not tasks:
        return None
    figure, axes = panels(2 * len(tasks), columns=len(tasks), height=2.3, top=1.0)
    drawn = []
    for panel, (how, task) in zip(axes, [(how, task) for how in HOWS for task in tasks]):
        drawn += draw_task(panel, runs, ABLATION, task, how)
        panel.set_title(f"{task}, {'training' if how == 'training' else 'mean action'}")
    legend(figure, drawn, "return: median and 5/95% quantiles over seeds")
    figure.supxlabel("environment steps", fontsize=10)
    return figure


def timed_label(runs, label, task):
    """Whose times count for a task: those of runs side by side, if there are any."""
    aside = f"time/{label}"
    return aside if runs.get(aside, {}).get(task) else label


def draw_times(runs):
    """The mean action against steps, and against minutes, with the return to be reached."""
    labels = [[timed_label(runs, label, task) for label in TIMED] for task in GOALS]
    if not any(runs.get(label, {}).get(task) for task in GOALS for label in TIMED):
        return None
    figure, axes = panels(2 * len(GOALS), columns=len(GOALS), height=2.3, top=0.9)
    drawn = []
    for number, panel in enumerate(axes):
        which, against = number % len(GOALS), "minutes" if number >= len(GOALS) else "steps"
        task = list(GOALS)[which]
        drawn += draw_task(panel, runs, labels[which], task, "evaluation", against)
        panel.axhline(GOALS[task], color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set_ylim(top=max(panel.get_ylim()[1], 1.15 * GOALS[task]))
        panel.set_xlabel("steps" if against == "steps" else "minutes, one thread", fontsize=9)
    legend(figure, drawn, "return of the mean action, and the return to be reached")
    return figure


def games_of(runs):
    """Every task of mpo_atari.py."""
    return sorted({task for label in DISCRETE for task in runs.get(label, {})})


def draw_aggregate(runs):
    """Interquartile mean of the mean-action return against steps."""
    groups = comparisons(runs, MARK)
    if not groups:
        return None
    figure, axes = panels(len(groups), height=2.6, top=1.0)
    steps = range(10_000, MARK + 1, 10_000)
    for (labels, tasks), panel in zip(groups, axes):
        for label in labels:
            algorithm = OURS[label]
            scores = []
            for task in tasks:
                reached = [run for run in runs[label][task].values() if run.steps >= MARK]
                curves = [run.curve("eval_return", 10_000) for run in reached]
                scores.append(np.array([[curve[step] for step in steps] for curve in curves]))
            point, band = with_interval(scores, iqm)
            options = dict(color=algorithm.colour, marker=algorithm.marker, markersize=4)
            panel.plot(steps, point, **options)
            panel.fill_between(steps, *band, color=algorithm.colour, alpha=0.2, linewidth=0)
        seeds = seed_range(seed_counts(runs, labels, tasks))
        panel.set_title(f"{counted(len(tasks), 'task')}, {seeds}")
        panel.set(xlim=(0, None), ylim=(0, 1.05 * panel.get_ylim()[1]))
        few_ticks(panel)
    axes[0].set_ylabel("IQM of return")
    figure.supxlabel("environment steps", fontsize=10)
    drawn = [OURS[label] for labels, _ in groups for label in labels]
    legend(figure, drawn, "mean-action return, 95% intervals over seeds")
    return figure


def figures(runs, published):
    """All figures by file name; None where there is nothing to draw."""
    tasks = suite_tasks(runs)
    return {
        "training": draw_tasks(runs, published, "training", tasks),
        "evaluation": draw_tasks(runs, published, "evaluation", tasks),
        "aggregate": draw_aggregate(runs),
        "time": draw_times(runs),
        "ablation": draw_ablation(runs),
        "high": draw_tasks(runs, published, "evaluation", high_tasks(runs), list(OURS)),
        "discrete": draw_tasks(runs, None, "evaluation", games_of(runs), DISCRETE),
    }


# ---- Tables.
def cell(value):
    return MISSING if value is None else f"{value:.0f}"


def seeds_cell(values):
    """Mean over seeds, with the lowest and the highest where there are several."""
    if not values:
        return MISSING
    spread = f" [{min(values):.0f}, {max(values):.0f}]" if len(values) > 1 else ""
    return cell(mean(values)) + spread


def markdown(head, rows, text=1):
    """A table whose first columns are text and whose others are numbers."""
    rule = ["---"] * text + ["---:"] * (len(head) - text)
    lines = [" | ".join(row) for row in (head, rule, *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def main_table(runs, published, how, mark, tasks):
    """Ours beside the published figures of the same kind, and the means over these tasks."""
    names = list(published[how])
    ours = {task: seeds_with(runs, "mpo_continuous", task, how, mark) for task in tasks}
    quoted = {task: [published[how][name][task].get(mark) for name in names] for task in tasks}
    rows = []
    for task in tasks:
        seeds = f"{len(ours[task]) or MISSING}"
        rows.append([task, seeds_cell(ours[task]), seeds, *map(cell, quoted[task])])
    means = [mean(column) if None not in column else None for column in zip(*quoted.values())]
    total = interval_cell(ours.values(), plain_mean) if all(ours.values()) else MISSING
    rows.append([f"**mean of {counted(len(tasks), 'task')}**", total, "", *map(cell, means)])
    return markdown(["task", "ours", "seeds", *names], rows)


def front_block(runs, published):
    """What stands in the project's README between two marks: some tasks, and the mean of all."""
    label, hows = (
        "mpo_continuous",
        {"training": ["MPO", "DreamerV3"], "evaluation": ["SAC", "TD-MPC2"]},
    )
    tasks = tasks_with(runs, label, "training", MARK)
    columns = {}
    for how, names in hows.items():
        kind = "training" if how == "training" else "mean action"
        columns[f"**{kind}**"] = [mean(seeds_with(runs, label, t, how, MARK)) for t in tasks]
        for name in names:
            column = [published[how][name][task].get(MARK) for task in tasks]
            columns[f"{name}, published {how}"] = column
    rows = [[task, *map(cell, row)] for task, row in zip(tasks, zip(*columns.values()))]
    rows = [row for row in rows if row[0] in FRONT_TASKS]
    rows += [
        [f"**mean of {counted(len(tasks), 'task')}**", *(cell(mean(c)) for c in columns.values())]
    ]
    seeds = seed_range(seed_counts(runs, [label], tasks))
    note = f"{seeds} of each task. Published training returns were released with the code of "
    note += "DreamerV3, published evaluations, of action repeat 2, with that of TD-MPC2."
    return "\n".join([note, "", *earlier_line(runs, [label]), markdown(["task", *columns], rows)])


def front_page(text, block):
    """The project's README with this block between its two marks, if it has them."""
    if not all(mark in text for mark in FRONT):
        return text
    before, rest = text.split(FRONT[0])
    return before + FRONT[0] + f"\n\n{block}\n\n" + FRONT[1] + rest.split(FRONT[1])[1]


def both_cell(runs, label, task, mark):
    """Training / mean-action return (seeds)."""
    training, evaluation = (seeds_with(runs, label, task, how, mark) for how in HOWS)
    text = f"{cell(mean(training))} / {cell(mean(evaluation))} ({len(training)})"
    return text if training else MISSING


def baselines_table(runs):
    """MPO and the baselines on the tasks that a baseline was run on; PPO also where it ended."""
    labels = [label for label in BASELINES if runs.get(label)]
    tasks = {task for label in labels[1:] for task in runs[label]}
    tasks = [task for task in suite_tasks(runs) if task in tasks]
    later = 300_000 if tasks_with(runs, "ppo", "training", 300_000, tasks) else None
    rows = []
    for task in tasks:
        cells = [both_cell(runs, label, task, MARK) for label in labels]
        rows.append([task, *cells, *([both_cell(runs, "ppo", task, later)] if later else [])])
    names = [OURS[label].name for label in labels]
    return markdown(["task", *names, *([f"PPO at {later:,}"] if later else [])], rows)


def aggregate_table(runs):
    """IQM of both returns. Rows that follow each other with equal tasks are of the same ones."""
    rows = []
    for labels, tasks in comparisons(runs, MARK):
        for label in labels:
            seeds = seed_range(seed_counts(runs, [label], tasks)).split(" seed")[0]
            cells = [OURS[label].name, f"{len(tasks)}", seeds]
            for how in HOWS:
                scores = [seeds_with(runs, label, task, how, MARK) for task in tasks]
                cells.append(interval_cell(scores, iqm))
            rows.append(cells)
    head = ["algorithm", "tasks", "seeds per task", "IQM, training", "IQM, mean action"]
    return markdown(head, rows)


def time_cell(runs, label, task):
    """Median steps and minutes to the goal over seeds, if most came there."""
    label = timed_label(runs, label, task)
    seeds = runs.get(label, {}).get(task, {})
    if not seeds:
        return MISSING
    reached = [run.first_at(GOALS[task]) for run in seeds.values()]
    there = [found for found in reached if found]
    share = f" ({len(there)} of {len(seeds)})" if len(seeds) > 1 else ""
    star = " *" if label.startswith("time/") else ""
    if 2 * len(there) <= len(seeds):
        longest = max(run.steps for run in seeds.values())
        return f"not in {longest:,.0f}{share}{star}"
    # a seed that never came there counts as later than all others
    steps, minutes = (sorted(found[k] for found in there)[(len(seeds) - 1) // 2] for k in (0, 1))
    return f"{steps:,.0f}, {minutes:.0f} min{share}{star}"


def time_table(runs):
    labels = [label for label in TIMED if any(runs.get(x) for x in (label, f"time/{label}"))]
    rows = []
    for task, goal in GOALS.items():
        rows.append([task, f"{goal}", *(time_cell(runs, label, task) for label in labels)])
    return markdown(["task", "return", *(OURS[label].name for label in labels)], rows)


def ablation_table(runs):
    """Training / mean action, and whether the mean actions stand in the paper's order."""
    rows = []
    for task in ablation_tasks(runs):
        cells = [both_cell(runs, label, task, MARK) for label in ABLATION]
        means = [mean(seeds_with(runs, label, task, "evaluation", MARK)) for label in ABLATION]
        order = MISSING
        if None not in means:
            order = "yes" if means == sorted(means, reverse=True) else "no"
        rows.append([task, *cells, order])
    return markdown(["task", *(OURS[label].name for label in ABLATION), "the paper's order"], rows)


def scales_table(runs):
    """EPG + Retrace with several entropy scales: labels epg/SCALE."""
    labels = sorted(label for label in runs if label.startswith("epg/"))
    tasks = in_order({task for label in labels for task in runs[label]})
    rows = [[task, *(both_cell(runs, label, task, MARK) for label in labels)] for task in tasks]
    return markdown(["task", *(label.removeprefix("epg/") for label in labels)], rows)


def last_table(runs, tasks, labels):
    """What each run reached at its own end."""
    rows = []
    for task, label in [(t, x) for t in tasks for x in labels if runs.get(x, {}).get(t)]:
        for seed, run in sorted(runs[label][task].items()):
            evaluations = [row["eval_return"] for row in run.evaluations()]
            best = max(evaluations, default=None)
            last = evaluations[-1] if evaluations else None
            cells = [f"{run.steps:,.0f}", f"{run.minutes:.0f}"]
            cells += [
                one_digit(run.rows[0]["train_return"]),
                one_digit(run.rows[-1]["train_return"]),
            ]
            cells += [one_digit(last), one_digit(best)]
            rows.append([task.rpartition(".")[2], OURS[label].name, f"{seed}", *cells])
    head = ["task", "algorithm", "seed", "steps", "minutes", "first in training"]
    return markdown([*head, "last in training", "last evaluation", "best"], rows, text=2)


def one_digit(value):
    return MISSING if value is None else f"{value:.1f}"


def sensitivity_table(runs):
    """A row per task and setting, and the step that all of these runs came to."""
    variants = [label for label in runs if label.startswith("sensitivity/")]
    every = [run for label in variants for seeds in runs[label].values() for run in seeds.values()]
    if not every:
        return "", 0
    step = int(min(run.steps for run in every) // 1000 * 1000)
    names = dict(sorted(FACTORS.items(), key=lambda item: item[1]))
    rows = []
    for task in in_order({task for label in variants for task in runs[label]}):
        for setting in SETTINGS:
            labels = [f"sensitivity/{setting}-{name}" for name in names]
            labels.insert(1, BASE_LABEL)
            cells = [both_cell(runs, label, task, step) for label in labels]
            rows.append([f"{task}, {setting}", *cells])
    return markdown(["task, setting", "over 3", "as it is", "times 3"], rows), step


def runs_page(runs, results):
    """All of RUNS.md: every CSV."""
    order = {label: number for number, label in enumerate(OURS)}
    rows = []
    for label in sorted(runs, key=lambda label: (order.get(label, len(order)), label)):
        for task in in_order(runs[label]):
            for seed, run in sorted(runs[label][task].items()):
                link = f"results/{run.path.relative_to(results).as_posix()}"
                row = [label, f"[{task} seed {seed}]({link})", f"{run.steps:,.0f}"]
                row += [cell(getattr(run, how)(MARK)) for how in HOWS]
                last = [each["eval_return"] for each in run.evaluations()]
                row += [cell(last[-1] if last else None), f"{run.minutes:.0f}"]
                notes = [run.head["commit"].split(",")[0]]
                if "continued" in run.head:
                    notes.append(f"continued {run.head['continued']}")
                rows.append([*row, ", ".join(notes)])
    head = ["label", "run", "steps", "100k, training", "100k, evaluation"]
    head += ["last evaluation", "minutes", "commit"]
    table = markdown(head, rows, text=2)
    return f"# All runs\n\nWritten by `python benchmark/report.py`.\n\n{table}\n"


# ---- The page.
PROTOCOL = """# Evidence

Written by `python benchmark/report.py` from {count}, which [RUNS.md](RUNS.md) lists; a test
regenerates it. {missing}: not run.

## Protocol

- A *training return* is the mean over the 25,000 steps before a mark, as explored.
- *Mean action*: the mean of 10 episodes at the mark with the policy's mean (baselines: their
  deterministic action), from the same initial states for every algorithm.
- Published training returns stand beside training returns, evaluations beside mean actions.
- Action repeat 1; no task has settings of its own; every seed that was run is reported.
- In brackets behind a task's mean: lowest and highest seed. Behind a mean over tasks: the 95%
  interval of the bootstrap over seeds (Agarwal et al., 2021).
- Curves: median and 5/95% quantiles over seeds. Minutes: one thread of a machine with other work.
- Each CSV holds the command, commit, versions and settings that made it. All commands, the most
  wanted first: [everything.sh](everything.sh).
"""
BOTH = "training / mean action (seeds)"


def earlier_line(runs, labels):
    """One line on the runs of before result files named versions, which had other defaults."""
    every = [
        run for label in labels for seeds in runs.get(label, {}).values() for run in seeds.values()
    ]
    old = [run for run in every if "versions" not in run.head]
    if not old:
        return []
    commits = sorted({run.head["commit"].split(",")[0].split()[0] for run in old})
    which = "These runs" if len(old) == len(every) else f"{len(old)} of these {len(every)} runs"
    return [f"{which} are of earlier defaults (commits {', '.join(commits)}).", ""]


def picture(name, text, drawn):
    return [f"![{text}](figures/{name}.png)", ""] if name in drawn else []


def main_section(runs, published):
    tasks = tasks_with(runs, "mpo_continuous", "training", MARK)
    parts = []
    if tasks:
        parts += [f"## The tasks of the suite at {MARK:,} steps", ""]
        parts += earlier_line(runs, ["mpo_continuous"])
        parts += ["Training returns; the published ones are of 10 seeds, 5 for PPO and DreamerV3 ("]
        parts[-1] += "scores released with the code of DreamerV3, [published.csv](published.csv)):"
        parts += ["", main_table(runs, published, "training", MARK, tasks), ""]
        parts += [
            "Mean action; the published evaluations are of 3 seeds, mostly, with action repeat "
        ]
        parts[-1] += "2 (released with the code of TD-MPC2, "
        parts[-1] += "[published_evaluation.csv](published_evaluation.csv)):"
        parts += ["", main_table(runs, published, "evaluation", MARK, tasks), ""]
        parts += ["Interquartile means, over the tasks that the algorithms share:", ""]
        parts += [aggregate_table(runs), ""]
    others = tasks_with(runs, "mpo_continuous", "training", MARK, DOMAINS)
    if others:
        rows = [[task, both_cell(runs, "mpo_continuous", task, MARK)] for task in others]
        parts += [f"The paper's other domains, {BOTH}:", "", markdown(["task", "MPO"], rows), ""]
    return parts


def figures_section(runs, drawn):
    parts = picture("training", "training return of every task against steps", drawn)
    parts += picture("evaluation", "mean-action return of every task against steps", drawn)
    parts += picture("aggregate", "interquartile mean of the mean-action return", drawn)
    if any(runs.get(label) for label in BASELINES[1:]):
        parts += [f"Baselines at {MARK:,} steps, {BOTH}:", "", baselines_table(runs), ""]
        labels = [label for label in OURS if runs.get(label) and label not in DISCRETE]
        rows = [[OURS[label].name, f"`results/{label}`", OURS[label].what] for label in labels]
        parts += [markdown(["algorithm", "results", "what"], rows, text=3), ""]
    return ["## Figures", "", *parts] if parts else []


def time_section(runs, drawn):
    if not any(runs.get(label, {}).get(task) for label in TIMED for task in GOALS):
        return []
    text = (
        "Environment steps and minutes to the first evaluation at or above a return; with several "
    )
    text += "seeds the median over all of them, and how many came there."
    if any(label.startswith("time/") for label in runs):
        text += " Those with a star were run side by side, one thread each, at the same time."
    parts = ["## Time to a return", "", text, "", time_table(runs), ""]
    return parts + picture("time", "mean-action return against steps and minutes", drawn)


def ablation_section(runs, drawn):
    if not ablation_tasks(runs):
        return []
    parts = ["## The ablation", "", *earlier_line(runs, ABLATION[1:])]
    parts += [
        f"At {MARK:,} steps, {BOTH}. The paper's order, by the mean action: MPO, parametric MPO,"
    ]
    parts[-1] += " EPG, single-sample actor-critic."
    parts += ["", ablation_table(runs), "", *picture("ablation", "the paper's ablation", drawn)]
    if any(label.startswith("epg/") for label in runs):
        parts += [f"EPG + Retrace by its entropy scale, {BOTH}:", "", scales_table(runs), ""]
    return parts


def long_section(runs, published):
    parts = []
    for mark in LONG:
        tasks = tasks_with(runs, "mpo_continuous", "training", mark)
        for how in HOWS if tasks else ():
            if any(mark in marks for marks in published[how]["DreamerV3"].values()):
                name = "Training returns" if how == "training" else "Mean action"
                table = main_table(runs, published, how, mark, tasks)
                parts += [f"{name} at {mark:,} steps:", "", table, ""]
    return ["## Longer runs", "", *parts] if parts else []


def high_section(runs, drawn):
    if not high_tasks(runs):
        return []
    table = last_table(runs, high_tasks(runs), [label for label in OURS if label not in DISCRETE])
    parts = ["## High-dimensional bodies and parkour", "", table, ""]
    return parts + picture("high", "mean-action return against steps", drawn)


def sensitivity_section(runs):
    table, step = sensitivity_table(runs)
    if not step:
        return []
    text = f"`python benchmark/studies/sensitivity.py`, at {step:,} steps, {BOTH}:"
    return ["## Sensitivity", "", text, "", table, ""]


def discrete_section(runs, drawn):
    if not games_of(runs):
        return []
    text = (
        "`mpo_atari.py`: scores of whole games, never clipped; evaluations have the most probable"
    )
    text += " action. A step of Atari is four frames. The paper's MPO: Pong 20.9, Breakout 360.5, "
    text += "Qbert 10,317, Tennis 22.2, Boxing 82.0."
    parts = ["## Discrete actions", "", *earlier_line(runs, DISCRETE), text, ""]
    parts += [last_table(runs, games_of(runs), DISCRETE), ""]
    return parts + picture("discrete", "scores of mpo_atari.py against agent steps", drawn)


def readme(runs, published, drawn):
    """All of benchmark/README.md. drawn: the names of the figures that exist."""
    count = sum(len(seeds) for tasks in runs.values() for seeds in tasks.values())
    parts = [PROTOCOL.format(count=counted(count, "run"), missing=MISSING)]
    parts += main_section(runs, published) + figures_section(runs, drawn)
    parts += time_section(runs, drawn) + ablation_section(runs, drawn)
    parts += long_section(runs, published) + high_section(runs, drawn)
    parts += sensitivity_section(runs) + discrete_section(runs, drawn)
    return "\n".join(parts)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the CSVs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for what is written")
    parser.add_argument("--tables", action="store_true", help="write no figures")
    parser.add_argument("--untracked", action="store_true", help="with CSVs that git does not know")
    options = parser.parse_args(words)
    files, others = result_files(options.results, options.untracked)
    if others:
        print(f"left out {counted(others, 'CSV')} that git does not know; git add, or --untracked")
    if not files:
        sentence = f"there is no CSV in {options.results}; benchmark/run.py makes them."
        print(f"report.py: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    runs, published = read_runs(options.results, files), read_published()
    folder = options.output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in {} if options.tables else figures(runs, published).items():
        for path in folder.glob(f"{name}.*"):
            path.unlink()
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
    drawn = [path.stem for path in folder.glob("*.png")]
    (options.output / "README.md").write_text(readme(runs, published, drawn))
    (options.output / "RUNS.md").write_text(runs_page(runs, options.results))
    if options.output == HERE:
        front = HERE.parent / "README.md"
        front.write_text(front_page(front.read_text(), front_block(runs, published)))
    print(f"wrote {options.output / 'README.md'}, RUNS.md and {counted(len(drawn), 'figure')}")


if __name__ == "__main__":
    main()
