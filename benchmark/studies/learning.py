"""Which settings learn: one change at a time on six tasks, the table behind docs/defaults.md.

    python benchmark/studies/learning.py                  run what is missing, setting by setting
    python benchmark/studies/learning.py base samples-10  only these
    python benchmark/studies/learning.py --table          print benchmark/results/study as a table

A run is 60,000 environment steps; its score is its mean-action return averaged over the
evaluations at 40,000, 50,000 and 60,000 steps. A setting's score is the mean over six tasks and two
seeds (11 and 12, which no reported result uses). Its standard error is that of the mean over tasks
of the differences to the setting it changes, seeds taken together. The runs are those of commit
92759ba, in which the candidates are flags of mpo_continuous.py; run it from a checkout of that.
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
}


def flags_of(name):
    """The flags of a setting: those of the one it changes, and its own."""
    parent, own = SETTINGS[name]
    return (flags_of(parent) if parent else []) + own


def run(names, tasks, seeds, workers):
    for name in names:
        command = [
            sys.executable,
            str(BENCHMARK / "run.py"),
            "--tasks",
            ",".join(tasks),
            "--label",
            f"study/{name}",
        ]
        command += ["--seeds", ",".join(map(str, seeds)) + ",", "--total-timesteps", str(MARKS[-1])]
        command += ["--workers", str(workers), "--", "--compile", *flags_of(name)]
        subprocess.run(command, check=True)


def score(name, task, seed):
    """Mean of the evaluations at the three marks; None where the run is missing."""
    path = BENCHMARK / "results" / "study" / name / task / f"seed{seed}.csv"
    if not path.exists():
        return None
    _, rows = read_result(path)
    reached = [[row["eval_return"] for row in rows if row["env_steps"] <= mark] for mark in MARKS]
    return (
        statistics.mean(values[-1] for values in reached)
        if rows[-1]["env_steps"] >= MARKS[-1]
        else None
    )


def mean_score(name, task):
    scores = [score(name, task, seed) for seed in SEEDS]
    return None if None in scores else statistics.mean(scores)


def table():
    """Markdown: both seeds of each task, the score, the difference to what was changed."""
    head = ["setting", "changes", *TASKS, "score", "difference", "standard error"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(TASKS) + 3)]
    for name, (parent, own) in SETTINGS.items():
        pairs = [[score(name, task, seed) for seed in SEEDS] for task in TASKS]
        if all(value is None for pair in pairs for value in pair):
            continue
        cells = [
            " ".join("–" if value is None else f"{value:.0f}" for value in pair) for pair in pairs
        ]
        means = [mean_score(name, task) for task in TASKS]
        before = [mean_score(parent, task) if parent else None for task in TASKS]
        total = f"{statistics.mean(means):.0f}" if None not in means else "–"
        gain, error = "–", "–"
        if None not in means + before:
            gains = [new - old for new, old in zip(means, before)]
            gain = f"{statistics.mean(gains):+.0f}"
            error = f"{statistics.stdev(gains) / math.sqrt(len(gains)):.0f}"
        changes = f"{parent}: {' '.join(own)}" if parent else "the defaults"
        lines.append("| " + " | ".join([name, changes, *cells, total, gain, error]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "settings", nargs="*", help=f"which settings to run; none: all of {', '.join(SETTINGS)}"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="fewer tasks, for a first look")
    parser.add_argument("--seeds", default="11,12", help="fewer seeds, for a first look")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    unknown = set(options.settings) - set(SETTINGS)
    if unknown:
        parser.error(
            f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(SETTINGS)}"
        )
    if options.table:
        print(table())
    else:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        run(options.settings or list(SETTINGS), options.tasks.split(","), seeds, options.workers)
