"""Run a script on many tasks and seeds, and keep what each run learned in a small CSV.

    python benchmark/run.py --script mpo_continuous.py --tasks core6 --seeds 3 --total-timesteps 100000 --workers 2
    python benchmark/run.py --tasks walker-walk,cheetah-run --label mpo_continuous-tight -- --epsilon-mu 0.01

The runs themselves live in runs/benchmark/LABEL/TASK/seedK. A finished run is skipped, an interrupted one is resumed, a
failed one is reported at the end with the last lines of its log, and the exit code is then 1. Flags after `--` go to
the script. Each finished run leaves benchmark/results/LABEL/TASK/seedK.csv, what all figures are made from.
"""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
TASKS = {
    "dmc18": "acrobot-swingup ball_in_cup-catch cartpole-balance cartpole-balance_sparse cartpole-swingup "
    "cartpole-swingup_sparse cheetah-run finger-spin finger-turn_easy finger-turn_hard hopper-hop hopper-stand "
    "pendulum-swingup reacher-easy reacher-hard walker-run walker-stand walker-walk",
    "paper15": "acrobot-swingup ball_in_cup-catch cartpole-swingup cheetah-run finger-spin fish-swim hopper-stand "
    "humanoid-walk manipulator-bring_ball pendulum-swingup point_mass-easy reacher-hard swimmer-swimmer6 "
    "swimmer-swimmer15 walker-walk",
    "ablation3": "walker-walk acrobot-swingup hopper-stand",
    "core6": "walker-walk cheetah-run cartpole-swingup reacher-hard finger-turn_hard hopper-stand",
    "humanoid": "humanoid-stand humanoid-walk humanoid-run",
    "atari5": "ALE/Pong-v5 ALE/Breakout-v5 ALE/Qbert-v5 ALE/Tennis-v5 ALE/Boxing-v5",
    "smoke": "cartpole-swingup",
}


@dataclass
class Args:
    script: str = "mpo_continuous.py"  # the script to run
    tasks: str = "smoke"  # a named set, or tasks separated by commas: walker-walk, or a whole Gymnasium id
    seeds: str = "1"  # how many seeds, 3 meaning 1, 2 and 3; or which ones, separated by commas: 2,5
    total_timesteps: int = 100_000  # environment steps of each run
    workers: int = 2  # runs at a time
    threads: int = 1  # CPU threads of each run
    label: str = ""  # name of this variant in the results; empty: the script's name
    runs: str = "runs/benchmark"  # where the runs live
    results: str = "benchmark/results"  # where the CSVs go


class Job:
    """One run: a task, a seed, its folder, and how far it is."""

    def __init__(self, args, extra, task, seed):
        self.task, self.seed, self.total = task, seed, args.total_timesteps
        label = args.label or Path(args.script).stem
        self.env_id = task if "/" in task or task[:1].isupper() else f"dm_control/{task}-v0"
        name = task.replace("/", "-")
        self.folder = Path(args.runs) / label / name / f"seed{seed}"
        self.log = self.folder.with_suffix(".log")
        self.result = Path(args.results) / label / name / f"seed{seed}.csv"
        self.flags = ["--env-id", self.env_id, "--seed", str(seed), "--total-timesteps", str(args.total_timesteps)]
        self.flags += ["--threads", str(args.threads), *extra]
        self.script, self.process, self.state = args.script, None, "waiting"
        if self.result.exists() and read_result(self.result)[1][-1]["env_steps"] >= self.total:
            self.state = "done before"

    def start(self):
        command = [sys.executable, self.script, *self.flags, "--run-dir", str(self.folder)]
        if (self.folder / "checkpoint.pt").exists():
            command += ["--resume", str(self.folder)]
        elif self.folder.exists():
            shutil.rmtree(self.folder)  # stopped before its first checkpoint
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.state, self.started, self.first_step, self.commit = "running", time.time(), self.step(), current_commit()

    def step(self):
        """Environment steps logged so far."""
        try:
            return int((self.folder / "progress.csv").read_text().splitlines()[-1].split(",")[0])
        except (OSError, IndexError, ValueError):
            return 0

    def poll(self):
        """Whether the run has just ended; a good end writes its result."""
        if self.state != "running" or self.process.poll() is None:
            return False
        self.state = "done" if self.process.returncode == 0 else f"failed ({self.process.returncode})"
        if self.state == "done":
            write_result(self)
        return True

    def seconds_left(self):
        done = self.step() - self.first_step
        return (self.total - self.step()) * (time.time() - self.started) / done if done > 0 else None


def current_commit():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return commit.stdout.strip() or "unknown"


def write_result(job):
    """progress.csv reduced to what figures need, under a header with the commit and the arguments."""
    with open(job.folder / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    settings = json.loads((job.folder / "args.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "run_dir"}
    job.result.parent.mkdir(parents=True, exist_ok=True)
    with open(job.result, "w") as file:
        file.write(f"# commit: {job.commit}\n")
        file.write(f"# command: python {job.script} {' '.join(job.flags)}\n# args: {json.dumps(settings)}\n")
        file.write("env_steps,train_return,eval_return,seconds,updates\n")
        for row in rows:
            evaluated = row["eval/episodic_return"] and f"{float(row['eval/episodic_return']):.2f}"
            values = row["global_step"], f"{float(row['charts/episodic_return']):.2f}", evaluated
            file.write(",".join([*values, f"{float(row['charts/seconds']):.1f}", row["charts/updates"]]) + "\n")


def read_result(path):
    """A result's header as a dict, and its rows with numbers in them (None where no evaluation took place)."""
    lines = Path(path).read_text().splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return head, [{name: float(value) if value else None for name, value in row.items()} for row in rows]


def table(jobs):
    """What runs, what is done and when it will end, a line a job."""
    lines = []
    for job in jobs:
        note = ""
        if job.state == "running":
            left = job.seconds_left()
            note = f"{job.step():>9,} / {job.total:,}" + (f"   {left / 60:.0f} min left" if left is not None else "")
        lines.append(f"{job.task:28} seed {job.seed}   {job.state:12} {note}")
    return lines


def main(args, extra):
    tasks = TASKS.get(args.tasks, args.tasks.replace(",", " ")).split()
    listed = [int(seed) for seed in args.seeds.split(",") if seed]
    seeds = listed if "," in args.seeds else range(1, listed[0] + 1)
    jobs = [Job(args, extra, task, seed) for seed in seeds for task in tasks]
    live, shown = sys.stdout.isatty(), 0.0
    try:
        while any(job.state in ("waiting", "running") for job in jobs):
            ended = [job for job in jobs if job.poll()]
            free = args.workers - sum(job.state == "running" for job in jobs)
            for job in [job for job in jobs if job.state == "waiting"][:free]:
                job.start()
                ended.append(job)
            if live or ended or time.time() - shown > 300:
                lines, shown = table(jobs), time.time()
                print(
                    "\033[2J\033[H" + "\n".join(lines) if live else "\n".join([time.strftime("%H:%M"), *lines]),
                    flush=True,
                )
            time.sleep(2 if live else 0.5)
    except KeyboardInterrupt:
        for job in jobs:
            if job.state == "running":
                job.process.send_signal(signal.SIGINT)  # it saves, and the same command goes on from there
        for job in jobs:
            if job.state == "running":
                job.process.wait()
        raise SystemExit("stopped; the same command goes on from here") from None
    failed = [job for job in jobs if job.state.startswith("failed")]
    for job in failed:
        print(f"\n{job.task} seed {job.seed} {job.state}; the end of {job.log}:")
        print("\n".join(job.log.read_text().splitlines()[-10:]))
    print(f"\n{len(jobs) - len(failed)} of {len(jobs)} runs done")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:cut]), sys.argv[cut + 1 :])
