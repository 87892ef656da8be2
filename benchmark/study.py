"""One setting at a time: the measurements behind docs/defaults.md.

    python benchmark/study.py                    run what is missing: three tasks, one change at a time
    python benchmark/study.py "window 4" joint   only these; a part of a name is enough
    python benchmark/study.py --seeds 2,3 paper  other seeds
    python benchmark/study.py --table            print the tables from benchmark/results/study

The runs are short, 20,000 environment steps, so that there can be many of them; --total-timesteps 10000 makes them
shorter still, and the table of that mark then has a row more than the other. A few settings were also run to 100,000
steps; the last two tables compare them.

Where a setting has no flag, the row is a change to the text: the script stands alone, so a copy of it in runs/study is
edited and run.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from run import read_result

HERE = Path(__file__).resolve().parent
SCRIPT = "mpo_continuous.py"
TASKS = ["cartpole-swingup", "walker-walk", "cheetah-run"]
MARKS = {10_000: 5000, 20_000: 10_000}  # where the tables look, and over how many steps before it they average
VARIANTS = {  # flags, or what replaces what in the script's text
    "window 8, batch-size 32": [],  # the base, not run here: longer runs, of which the tables take the beginning
    "paper: all printed values": ["--paper"],
    "policy-learning-rate 5e-4 (paper)": ["--policy-learning-rate", "5e-4"],
    "epsilon-mu 0.1 (paper)": ["--epsilon-mu", "0.1"],
    "epsilon-mu 0.1, policy-learning-rate 5e-4 (paper)": ["--epsilon-mu", "0.1", "--policy-learning-rate", "5e-4"],
    "target-period 1000 (paper)": ["--target-period", "1000"],
    "target-period 250": ["--target-period", "250"],
    "target-period 25": ["--target-period", "25"],
    "learning-rate 1e-3": ["--learning-rate", "1e-3"],
    "learning-rate 2e-4": ["--learning-rate", "2e-4"],
    "policy-learning-rate 3e-4": ["--policy-learning-rate", "3e-4"],
    "epsilon-mu 0.02": ["--epsilon-mu", "0.02"],
    "epsilon-mu 0.001": ["--epsilon-mu", "0.001"],
    "decoupling followup": ["--decoupling", "followup"],
    "decoupling joint": ["--decoupling", "joint"],
    "no-bound-mean": ["--no-bound-mean"],
    "covariance diagonal": ["--covariance", "diagonal"],
    "window 4, batch-size 64": ["--window", "4", "--batch-size", "64"],
    "window 16, batch-size 16": ["--window", "16", "--batch-size", "16"],
    "batch-size 16": ["--batch-size", "16"],
    "window 4, updates-per-step 2": ["--window", "4", "--updates-per-step", "2"],
    "num-samples 5": ["--num-samples", "5"],
    "num-samples 50": ["--num-samples", "50"],
    "trajectories 5": ["--trajectories", "5"],
    "initial-std 0.3": ["--initial-std", "0.3"],
    "initial-std 1.0": ["--initial-std", "1.0"],
    "max-std 1": ["--max-std", "1"],
    "max-std 2": ["--max-std", "2"],
    "multiplier-rate 1e-2": ["--multiplier-rate", "1e-2"],
    "updates-per-step 0.5": ["--updates-per-step", "0.5"],
    "learning-starts 5000": ["--learning-starts", "5000"],
    "buffer-size 5000": ["--buffer-size", "5000"],
    "tanh": {"F.relu(": "torch.tanh(", ".relu_()": ".tanh_()"},
    "ELU": {
        "F.relu(": "F.elu(",
        "self.norm(h).relu_()": "F.elu(self.norm(h))",
        "layer_of_many(layer, h).relu_()": "F.elu(layer_of_many(layer, h))",
    },
    "no layer norm": {"nn.LayerNorm(layers[0])": "nn.Identity()"},
    "eta-sigma from 1": {"eta_sigma=100.0": "eta_sigma=1.0"},
    "multipliers from 10": {"eta=1.0, eta_mu=1.0": "eta=10.0, eta_mu=10.0"},
}


BASE = ["--window", "8", "--batch-size", "32"]  # the defaults when the rows were made, from which each is one change
# Run to 100,000 steps, by python benchmark/run.py --tasks TASKS --seeds SEEDS --label LABEL -- --compile FLAGS.
# `again`: seed 1 once more, with a later state of the script, and of the second more tasks.
OLD, NEW = "window 8, batch-size 32", "window 4, batch-size 64 (defaults)"
LONG = {
    OLD: ["study/window-8-batch-size-32", "study/window-8-batch-size-32-again"],
    NEW: ["mpo_continuous"],
    "the same, epsilon-mu 0.1": ["study/epsilon-mu-0.1", "study/epsilon-mu-0.1-again"],
    "and policy-learning-rate 5e-4": ["study/epsilon-mu-0.1-policy-learning-rate-5e-4"],
}
COMPARED = [[OLD, NEW], [name for name in LONG if name != NEW]]  # the columns of the tables at 100,000 steps


def label(variant):
    return "study/" + variant.split(" (")[0].replace(",", "").replace(":", "").replace(" ", "-")


def edited(variant):
    """The script's text with the change of a variant that has no flag."""
    text = (HERE.parent / SCRIPT).read_text()
    for old, new in VARIANTS[variant].items():
        assert old in text, f"{SCRIPT} has no {old!r} any more"
        text = text.replace(old, new)
    return text


def run(variants, options):
    for variant in variants:
        script, words = SCRIPT, VARIANTS[variant]
        if isinstance(words, dict):
            script, words = f"runs/{label(variant)}/{SCRIPT}", []
            Path(script).parent.mkdir(parents=True, exist_ok=True)
            Path(script).write_text(edited(variant))
        command = [sys.executable, str(HERE / "run.py"), "--script", script, "--tasks", ",".join(TASKS)]
        command += ["--label", label(variant), "--total-timesteps", str(options.total_timesteps)]
        command += ["--seeds", options.seeds, "--workers", str(options.workers)]
        command += ["--", "--compile", *BASE, *words]
        subprocess.run(command, check=True)


def reached(label, task, mark, before):
    """For each seed that came so far: the mean-action return at the mark, and the mean training return before it."""
    found = []
    for path in sorted((HERE / "results" / label / task).glob("seed*.csv")):
        _, rows = read_result(path)
        if rows[-1]["env_steps"] >= mark:
            rows = [row for row in rows if row["env_steps"] <= mark]
            late = [row["train_return"] for row in rows if row["env_steps"] > mark - before]
            found.append((rows[-1]["eval_return"], statistics.mean(late)))
    return found


def table(mark):
    """Markdown: for each variant and task, `evaluation (training)`, means over seeds where there are several."""
    lines = [f"| at {mark:,} steps | " + " | ".join(TASKS) + " | mean | seeds |", "|---|" + "---:|" * (len(TASKS) + 2)]
    for variant in VARIANTS:
        labels = LONG[OLD] if variant == OLD else [label(variant)]
        cells = [sum((reached(label, task, mark, MARKS[mark]) for label in labels), []) for task in TASKS]
        if not all(cells):
            continue
        means = [tuple(map(statistics.mean, zip(*cell))) for cell in cells]
        means.append(tuple(map(statistics.mean, zip(*means))))
        seeds = ", ".join(dict.fromkeys(str(len(cell)) for cell in cells))
        lines.append(f"| {variant} | " + " | ".join(f"{e:.0f} ({t:.0f})" for e, t in means) + f" | {seeds} |")
    return "\n".join(lines)


def long_table(names, mark=100_000, before=25_000):
    """Markdown: `evaluation (training)` of every run, of the tasks that the first two settings have, and their mean."""
    lines = [f"| at {mark:,} steps | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    compared = []
    for task in sorted(path.name for path in (HERE / "results" / LONG[OLD][0]).iterdir()):
        runs = [sum((reached(label, task, mark, before) for label in LONG[name]), []) for name in names]
        if all(runs[:2]):
            cells = [", ".join(f"{e:.0f} ({t:.0f})" for e, t in found) or "–" for found in runs]
            lines.append(f"| {task} | " + " | ".join(cells) + " |")
            compared.append([tuple(map(statistics.mean, zip(*found))) for found in runs[:2]])
    means = [tuple(map(statistics.mean, zip(*setting))) for setting in zip(*compared)]
    cells = [f"{e:.0f} ({t:.0f})" for e, t in means] + ["–"] * (len(names) - 2)
    return "\n".join([*lines, f"| **mean of {len(compared)} tasks** | " + " | ".join(cells) + " |"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="*", help="parts of the names of what to run; none: all")
    parser.add_argument("--seeds", default="1", help="as in run.py: how many, or which ones, separated by commas")
    parser.add_argument("--total-timesteps", type=int, default=20_000, help="environment steps of each run")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing, print the tables")
    options = parser.parse_args()
    chosen = [name for name in VARIANTS if not options.variants or any(part in name for part in options.variants)]
    chosen = [name for name in chosen if VARIANTS[name]]
    if not chosen:
        parser.error(f"no setting is called {' or '.join(options.variants)}; there are {', '.join(VARIANTS)}")
    print(*map(table, MARKS), *map(long_table, COMPARED), sep="\n\n") if options.table else run(chosen, options)
