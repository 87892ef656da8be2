"""Which settings learn: one change at a time, the tables behind docs/defaults.md.

    git worktree add ../study ecc040f       the candidates are flags of its mpo_continuous.py
    python benchmark/studies/learning.py                  run what is missing, setting by setting
    python benchmark/studies/learning.py base samples-10  only these
    python benchmark/studies/learning.py --table          print benchmark/results/study as a table
    python benchmark/studies/learning.py --spread base std-1    draw the spread of two settings
    git worktree add ../games 3e5e87c             the same for mpo_atari.py
    python benchmark/studies/learning.py --study games    on MinAtar's games; --table as above

A run of the first study is 60,000 environment steps; its score is its mean-action return averaged
over the evaluations at 40,000, 50,000 and 60,000 steps. There are six tasks and two seeds, 11 and
12, which no reported result uses. The second has two games, 200,000 steps, and the most probable
action at 150,000, 175,000 and 200,000. A setting is compared with the one that it changes on the
runs, of a task and a seed, that both have; the table says how many these are. Score and difference
are means over their tasks, seeds taken together, and the standard error is that of the mean of the
tasks' differences.
"""

import argparse
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARK))
from run import read_result  # noqa: E402


@dataclass
class Study:
    script: str  # which has the candidates as flags
    label: str  # of the results, under benchmark/results
    tasks: list
    marks: tuple  # steps of the evaluations that count; a run ends with the last
    settings: dict  # name: (the setting that it changes, what it adds to that one's flags)
    seeds: tuple = (11, 12)
    digits: int = 0  # of a return in the table


CONTINUOUS = {
    "base": (None, []),
    "samples-10": ("base", ["--num-samples", "10"]),
    "sigma-1e-5": ("samples-10", ["--epsilon-sigma", "1e-5"]),
    "sigma-1e-6": ("samples-10", ["--epsilon-sigma", "1e-6"]),
    "rate-3e-4": ("samples-10", ["--policy-learning-rate", "3e-4"]),
    "rate-3e-4-samples-20": ("rate-3e-4", ["--num-samples", "20"]),
    "rate-3e-4-sigma-1e-5": ("rate-3e-4", ["--epsilon-sigma", "1e-5"]),
    "rate-5e-4": ("samples-10", ["--policy-learning-rate", "5e-4"]),
    "slow-critic": ("samples-10", ["--critic-target-period", "200"]),
    "norms-rate-3e-4": (
        "samples-10",
        ["--critic-norms", "every", "--policy-learning-rate", "3e-4"],
    ),
    "norms-rate-3e-4-samples-20": ("norms-rate-3e-4", ["--num-samples", "20"]),
    "norms-rate-3e-4-pink": ("norms-rate-3e-4", ["--noise-exponent", "1"]),
    "norms-rate-3e-4-half-pink": ("norms-rate-3e-4", ["--noise-exponent", "0.5"]),
    "norms-rate-3e-4-alternate": (
        "norms-rate-3e-4",
        ["--noise-exponent", "1", "--alternate-noise"],
    ),
    "twin-critics": ("norms-rate-3e-4", ["--twin-critics"]),  # a flag of 80931d6: see --script
    "norms-rate-3e-4-std-1": ("norms-rate-3e-4", ["--max-std", "1"]),
    "norms-rate-3e-4-sigma-1e-5": ("norms-rate-3e-4", ["--epsilon-sigma", "1e-5"]),
    "norms-rate-5e-4": ("norms-rate-3e-4", ["--policy-learning-rate", "5e-4"]),
    "range": ("samples-10", ["--range-penalty", "1"]),
    "wide": ("samples-10", ["--policy-layers", "256", "256", "--critic-layers", "256", "256"]),
    "std-1": ("samples-10", ["--max-std", "1"]),
    "pink": ("samples-10", ["--noise-exponent", "1"]),
    "alternate": ("samples-10", ["--noise-exponent", "1", "--alternate-noise"]),
    "half-pink": ("samples-10", ["--noise-exponent", "0.5"]),
    "rate-3e-4-start-1": ("rate-3e-4", ["--initial-std", "1"]),
    "rate-3e-4-start-1-pink": ("rate-3e-4-start-1", ["--noise-exponent", "1"]),
    "rate-3e-4-pink": ("rate-3e-4", ["--noise-exponent", "1"]),
    "rate-3e-4-alternate": ("rate-3e-4", ["--noise-exponent", "1", "--alternate-noise"]),
    "norms": ("samples-10", ["--critic-norms", "every"]),
    "pace": ("samples-10", ["--epsilon-mu", "1e-3", "--policy-learning-rate", "3e-4"]),
    "usual-betas": ("samples-10", ["--multiplier-beta", "0.999"]),
    "std-1-sigma-1e-5": ("std-1", ["--epsilon-sigma", "1e-5"]),
    "std-1-norms": ("std-1", ["--critic-norms", "every"]),
    "std-1-bound": ("std-1", ["--bound-targets"]),
    "std-1-slow-critic": ("std-1", ["--critic-target-period", "200"]),
    "std-1-pink": ("std-1", ["--noise-exponent", "1"]),
    "std-1-half-pink": ("std-1", ["--noise-exponent", "0.5"]),
    "std-1-alternate": ("std-1", ["--noise-exponent", "1", "--alternate-noise"]),
    "std-1-pace": ("std-1", ["--epsilon-mu", "1e-3", "--policy-learning-rate", "3e-4"]),
}
GAMES = {
    "base": (None, []),
    "epsilon-pi-1e-3": ("base", ["--epsilon-pi", "1e-3"]),
    "epsilon-pi-1e-2": ("base", ["--epsilon-pi", "1e-2"]),
    "critic-3e-4": ("base", ["--learning-rate", "3e-4"]),
    "policy-3e-4": ("base", ["--policy-learning-rate", "3e-4"]),
    "window-1": ("base", ["--window", "1", "--batch-size", "128"]),
    "window-4": ("base", ["--window", "4", "--batch-size", "32"]),
    "window-16": ("base", ["--window", "16", "--batch-size", "8"]),
    "quarter-updates": ("base", ["--updates-per-step", "0.25"]),
    "batch-32": ("base", ["--batch-size", "32"]),
    "period-1000": ("base", ["--target-period", "1000"]),
    "torch-start": ("base", ["--initialisation", "torch"]),
}
STUDIES = {
    "continuous": Study(
        script="../study/mpo_continuous.py",
        label="study",
        tasks="pendulum-swingup reacher-hard finger-spin walker-walk cheetah-run "
        "hopper-stand".split(),
        marks=(40_000, 50_000, 60_000),
        settings=CONTINUOUS,
    ),
    "games": Study(
        script="../games/mpo_atari.py",
        label="study-games",
        tasks=["MinAtar/Breakout-v1", "MinAtar/SpaceInvaders-v1"],
        marks=(150_000, 175_000, 200_000),
        settings=GAMES,
        digits=1,
    ),
}


def flags_of(study, name):
    """The flags of a setting: those of the one it changes, and its own."""
    parent, own = study.settings[name]
    return (flags_of(study, parent) if parent else []) + own


def run(study, names, options):
    for name in names:
        tasks = options.tasks or ",".join(study.tasks)
        command = [sys.executable, str(BENCHMARK / "run.py"), "--tasks", tasks]
        command += ["--script", options.script or study.script, "--seeds", f"{options.seeds},"]
        command += ["--label", f"{study.label}/{name}", "--workers", str(options.workers)]
        command += ["--total-timesteps", str(study.marks[-1]), "--", *flags_of(study, name)]
        code = subprocess.run(command).returncode
        if code:
            raise SystemExit(code)


def scores(study, name, results):
    """{(task, seed): mean of the evaluations at the three marks} of the runs that are there."""
    found = {}
    for task, seed in [(task, seed) for task in study.tasks for seed in study.seeds]:
        path = results / name / task.replace("/", "-") / f"seed{seed}.csv"
        rows = read_result(path)[1] if path.exists() else []
        if rows and rows[-1]["env_steps"] >= study.marks[-1]:
            returns = {r["env_steps"]: r["eval_return"] for r in rows}
            returns = {step: value for step, value in returns.items() if value is not None}
            reached = [max(step for step in returns if step <= mark) for mark in study.marks]
            found[task, seed] = statistics.mean(returns[step] for step in reached)
    return found


def over_tasks(values):
    """[mean over seeds] of each task among {(task, seed): value}."""
    tasks = dict.fromkeys(task for task, _ in values)
    return [statistics.mean(values[key] for key in values if key[0] == task) for task in tasks]


def row(study, name, found):
    """Cells: both seeds of each task, then what the runs that count say; found: all scores."""
    parent, own = study.settings[name]
    before = found[parent or name]
    shared = {key: value for key, value in found[name].items() if key in before}
    cells = [name, f"{parent}: {' '.join(own)}" if parent else "the defaults"]
    for task in study.tasks:
        seeds = [found[name].get((task, seed)) for seed in study.seeds]
        cells.append(" ".join("–" if x is None else f"{x:.{study.digits}f}" for x in seeds))
    cells += [
        f"{len(shared)}",
        f"{statistics.mean(over_tasks(shared)):.{study.digits}f}" if shared else "–",
    ]
    gain = over_tasks({key: value - before[key] for key, value in shared.items()})
    cells.append(f"{statistics.mean(gain):+.{study.digits}f}" if parent and gain else "–")
    several = parent and len(gain) > 1
    error = statistics.stdev(gain) / math.sqrt(len(gain)) if several else None
    cells.append(f"{error:.{study.digits}f}" if several else "–")
    return cells


def table(study, results=BENCHMARK / "results"):
    """Markdown: a row for each setting of which there is a run."""
    head = [
        "setting",
        "changes",
        *study.tasks,
        "shared runs",
        "score",
        "difference",
        "standard error",
    ]
    found = {name: scores(study, name, results / study.label) for name in study.settings}
    rows = [row(study, name, found) for name in study.settings if found[name]]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_spread(study, names, path, results=BENCHMARK / "results"):
    """The greatest standard deviation against steps: a panel a task, a line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, NullLocator

    shape = dict(figsize=(9, 4.6), layout="constrained", sharex=True, sharey=True)
    figure, axes = plt.subplots(2, 3, **shape)
    colours = ["#D55E00", "#0072B2", "#009E73", "#CC79A7"]
    for axis, task in zip(axes.flat, study.tasks):
        for name, colour in zip(names, colours):
            for seed in study.seeds:
                file = results / study.label / name / task / f"seed{seed}.csv"
                rows = read_result(file)[1] if file.exists() else []
                rows = [row for row in rows if row.get("std_max") is not None]
                x, y = [row["env_steps"] for row in rows], [row["std_max"] for row in rows]
                axis.plot(x, y, color=colour, linewidth=1.4)
        axis.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_title(task, fontsize=10)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16]))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    lines = [Line2D([], [], color=colour) for _, colour in zip(names, colours)]
    figure.legend(lines, names, loc="outside upper center", ncols=len(names), frameon=False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("greatest standard deviation", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings", nargs="*", help="which settings to run; none: all of the study")
    parser.add_argument("--study", choices=STUDIES, default="continuous", help="which study")
    parser.add_argument("--script", help="with the candidates as flags; default: as above")
    parser.add_argument("--tasks", help="fewer tasks, by commas, for a first look")
    parser.add_argument("--seeds", default="11,12", help="fewer seeds, for a first look")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--spread", action="store_true", help="run nothing, draw the spread")
    parser.add_argument("--output", default=str(BENCHMARK / "figures/spread.png"), help="where to")
    options = parser.parse_args()
    study = STUDIES[options.study]
    unknown = ", ".join(sorted(set(options.settings) - set(study.settings)))
    if unknown:
        parser.error(f"there is no setting {unknown}; there are {', '.join(study.settings)}")
    if options.table:
        return print(table(study))
    if options.spread:
        return draw_spread(study, options.settings or ["samples-10", "std-1"], options.output)
    run(study, options.settings or list(study.settings), options)


if __name__ == "__main__":
    main()
