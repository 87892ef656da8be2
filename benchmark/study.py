"""One setting at a time: the measurements behind docs/defaults.md.

    python benchmark/study.py            run what is missing (three tasks, one change from the defaults at a time)
    python benchmark/study.py --table    print the table from benchmark/results/study

The runs are short (10,000 environment steps, one seed), so a difference means something only if the tasks agree on it.
The row of the defaults is the first 10,000 steps of the runs in benchmark/results/mpo_continuous.
"""

import subprocess
import sys
from pathlib import Path

from run import read_result

HERE = Path(__file__).resolve().parent
TASKS = ["cartpole-swingup", "walker-walk", "cheetah-run"]
STEPS = 10_000
VARIANTS = {
    "defaults": [],
    "policy-learning-rate 5e-4 (paper)": ["--policy-learning-rate", "5e-4"],
    "epsilon-mu 0.1 (paper)": ["--epsilon-mu", "0.1"],
    "no-bound-mean": ["--no-bound-mean"],
    "decoupling followup": ["--decoupling", "followup"],
    "decoupling joint": ["--decoupling", "joint"],
    "paper (all printed values)": ["--paper"],
    "target-period 25": ["--target-period", "25"],
    "target-period 400": ["--target-period", "400"],
    "window 4": ["--window", "4", "--batch-size", "64"],
    "window 16": ["--window", "16", "--batch-size", "16"],
    "num-samples 10": ["--num-samples", "10"],
    "initial-std 1.0": ["--initial-std", "1.0"],
    "covariance diagonal": ["--covariance", "diagonal"],
    "multiplier-rate 1e-2": ["--multiplier-rate", "1e-2"],
    "updates-per-step 0.5": ["--updates-per-step", "0.5"],
    "learning-starts 5000": ["--learning-starts", "5000"],
}


def label(variant):
    return "study/" + variant.split(" (")[0].replace(" ", "-") if VARIANTS[variant] else "mpo_continuous"


def run(variants):
    for variant in [variant for variant in variants if VARIANTS[variant]]:
        command = [sys.executable, str(HERE / "run.py"), "--tasks", ",".join(TASKS), "--label", label(variant)]
        command += ["--total-timesteps", str(STEPS), "--", *VARIANTS[variant]]
        subprocess.run(command, check=True)


def reached(variant, task):
    """Mean-action return at STEPS, and the mean training return of the 5,000 steps before; None if it was not run."""
    path = HERE / "results" / label(variant) / task / "seed1.csv"
    if not path.exists():
        return None
    rows = [row for row in read_result(path)[1] if row["env_steps"] <= STEPS]
    late = [row["train_return"] for row in rows if row["env_steps"] > STEPS - 5000]
    return rows[-1]["eval_return"], sum(late) / len(late)


def table():
    """Markdown: for each variant and task, `evaluation (training)`."""
    lines = ["| setting | " + " | ".join(TASKS) + " | mean |", "|---|" + "---:|" * (len(TASKS) + 1)]
    for variant in VARIANTS:
        cells = [reached(variant, task) for task in TASKS]
        if None in cells:
            continue
        mean = tuple(sum(values) / len(cells) for values in zip(*cells))
        lines.append(f"| {variant} | " + " | ".join(f"{e:.0f} ({t:.0f})" for e, t in [*cells, mean]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(table())
    else:
        run(sys.argv[1:] or VARIANTS)
