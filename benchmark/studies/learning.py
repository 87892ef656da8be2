"""Which settings learn: one change at a time on six tasks, the table behind docs/defaults.md.

    git worktree add ../study 57c9a3c       the candidates are flags of its mpo_continuous.py
    python benchmark/studies/learning.py                  run what is missing, setting by setting
    python benchmark/studies/learning.py base samples-10  only these
    python benchmark/studies/learning.py --table          print benchmark/results/study as a table
    python benchmark/studies/learning.py --spread base std-1    draw the spread of two settings

A run is 60,000 environment steps; its score is its mean-action return averaged over the
evaluations at 40,000, 50,000 and 60,000 steps. There are six tasks and two seeds, 11 and 12, which
no reported result uses. A setting is compared with the one that it changes on the runs, of a task
and a seed, that both have; the table says how many these are. Score and difference are means over
their tasks, seeds taken together, and the standard error is that of the mean of the tasks'
differences.
"""

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARK))
from run import read_result  # noqa: E402

TASKS = "pendulum-swingup reacher-hard finger-spin walker-walk cheetah-run hopper-stand".split()
SEEDS = (11, 12)
MARKS = (40_000, 50_000, 60_000)
SETTINGS = {  # name: (the setting that it changes, what it adds to that one's flags)
    "base": (None, []),
    "samples-10": ("base", ["--num-samples", "10"]),
    "std-1": ("samples-10", ["--max-std", "1"]),
    "pink": ("samples-10", ["--noise-exponent", "1"]),
    "norms": ("samples-10", ["--critic-norms", "every"]),
    "pace": ("samples-10", ["--epsilon-mu", "1e-3", "--policy-learning-rate", "3e-4"]),
    "usual-betas": ("samples-10", ["--multiplier-beta", "0.999"]),
    "sigma-1e-5": ("samples-10", ["--epsilon-sigma", "1e-5"]),
    "std-1-sigma-1e-5": ("std-1", ["--epsilon-sigma", "1e-5"]),
    "std-1-norms": ("std-1", ["--critic-norms", "every"]),
    "std-1-bound": ("std-1", ["--bound-targets"]),
    "std-1-slow-critic": ("std-1", ["--critic-target-period", "200"]),
    "std-1-pink": ("std-1", ["--noise-exponent", "1"]),
    "std-1-half-pink": ("std-1", ["--noise-exponent", "0.5"]),
    "std-1-alternate": ("std-1", ["--noise-exponent", "1", "--alternate-noise"]),
    "std-1-pace": ("std-1", ["--epsilon-mu", "1e-3", "--policy-learning-rate", "3e-4"]),
}


def flags_of(name):
    """The flags of a setting: those of the one it changes, and its own."""
    parent, own = SETTINGS[name]
    return (flags_of(parent) if parent else []) + own


def run(names, options):
    for name in names:
        command = [sys.executable, str(BENCHMARK / "run.py"), "--script", options.script]
        command += ["--tasks", options.tasks, "--seeds", f"{options.seeds},"]
        command += ["--label", f"study/{name}", "--total-timesteps", str(MARKS[-1])]
        command += ["--workers", str(options.workers), "--", *flags_of(name)]
        code = subprocess.run(command).returncode
        if code:
            raise SystemExit(code)


def scores(name, results):
    """{(task, seed): mean of the evaluations at the three marks} of the runs that are there."""
    found = {}
    for task, seed in [(task, seed) for task in TASKS for seed in SEEDS]:
        path = results / name / task / f"seed{seed}.csv"
        rows = read_result(path)[1] if path.exists() else []
        if rows and rows[-1]["env_steps"] >= MARKS[-1]:
            returns = {r["env_steps"]: r["eval_return"] for r in rows}
            returns = {step: value for step, value in returns.items() if value is not None}
            reached = [max(step for step in returns if step <= mark) for mark in MARKS]
            found[task, seed] = statistics.mean(returns[step] for step in reached)
    return found


def over_tasks(values):
    """[mean over seeds] of each task among {(task, seed): value}."""
    tasks = dict.fromkeys(task for task, _ in values)
    return [statistics.mean(values[key] for key in values if key[0] == task) for task in tasks]


def row(name, found):
    """Cells: both seeds of each task, then what the runs that count say; found: all scores."""
    parent, own = SETTINGS[name]
    before = found[parent or name]
    shared = {key: value for key, value in found[name].items() if key in before}
    cells = [name, f"{parent}: {' '.join(own)}" if parent else "the defaults"]
    for task in TASKS:
        seeds = [found[name].get((task, seed)) for seed in SEEDS]
        cells.append(" ".join("–" if x is None else f"{x:.0f}" for x in seeds))
    cells += [f"{len(shared)}", f"{statistics.mean(over_tasks(shared)):.0f}" if shared else "–"]
    gain = over_tasks({key: value - before[key] for key, value in shared.items()})
    cells.append(f"{statistics.mean(gain):+.0f}" if parent and gain else "–")
    several = parent and len(gain) > 1
    cells.append(f"{statistics.stdev(gain) / math.sqrt(len(gain)):.0f}" if several else "–")
    return cells


def table(results=BENCHMARK / "results" / "study"):
    """Markdown: a row for each setting of which there is a run."""
    head = ["setting", "changes", *TASKS, "shared runs", "score", "difference", "standard error"]
    found = {name: scores(name, results) for name in SETTINGS}
    rows = [row(name, found) for name in SETTINGS if found[name]]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_spread(names, path, results=BENCHMARK / "results" / "study"):
    """The greatest standard deviation against steps: a panel a task, a line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(9, 4.6), layout="constrained", sharex=True)
    colours = ["#D55E00", "#0072B2", "#009E73", "#CC79A7"]
    for axis, task in zip(axes.flat, TASKS):
        for name, colour in zip(names, colours):
            for number, seed in enumerate(SEEDS):
                file = results / name / task / f"seed{seed}.csv"
                rows = read_result(file)[1] if file.exists() else []
                rows = [row for row in rows if row.get("std_max") is not None]
                x, y = [row["env_steps"] for row in rows], [row["std_max"] for row in rows]
                axis.plot(x, y, color=colour, linewidth=1.4, label=None if number else name)
        axis.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_title(task, fontsize=10)
        axis.set_yscale("log")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("greatest standard deviation", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ", ".join(SETTINGS)
    parser.add_argument("settings", nargs="*", help=f"which settings to run; none: all of {names}")
    script = "../study/mpo_continuous.py"
    parser.add_argument("--script", default=script, help=f"of commit 57c9a3c; default: {script}")
    parser.add_argument("--tasks", default=",".join(TASKS), help="fewer tasks, for a first look")
    parser.add_argument("--seeds", default="11,12", help="fewer seeds, for a first look")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--spread", action="store_true", help="run nothing, draw the spread")
    parser.add_argument("--output", default=str(BENCHMARK / "figures/spread.png"), help="where to")
    options = parser.parse_args()
    unknown = set(options.settings) - set(SETTINGS)
    if unknown:
        parser.error(f"there is no setting {', '.join(sorted(unknown))}; there are {names}")
    if options.table:
        return print(table())
    if options.spread:
        return draw_spread(options.settings or ["samples-10", "std-1"], options.output)
    run(options.settings or list(SETTINGS), options)


if __name__ == "__main__":
    main()
