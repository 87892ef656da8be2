"""Run a script on many tasks and seeds, and keep what each run learned in a small CSV.

    python benchmark/run.py --script mpo_continuous.py --tasks core6 --seeds 3 --total-timesteps 100000 --workers 2
    python benchmark/run.py --tasks walker-walk,cheetah-run --label mpo_continuous-tight -- --epsilon-mu 0.01
    python benchmark/run.py --script benchmark/baselines.py --tasks core6 --label sac -- --algorithm sac

The runs themselves live in runs/benchmark/LABEL/TASK/seedK. A finished run is skipped, an interrupted one is resumed, a
failed one is reported at the end with the last lines of its log, and the exit code is then 1. Flags after `--` go to
the script. Each finished run leaves benchmark/results/LABEL/TASK/seedK.csv, what all figures are made from.

Any script can be run that takes --env-id, --seed, --total-timesteps, --threads and --run-dir, and leaves args.json and
progress.csv in its run folder; if it leaves checkpoint.pt there too, it is resumed with --resume FOLDER.
"""

import csv
import fcntl
import heapq
import json
import os
import shlex
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
UNFINISHED = ("waiting", "elsewhere", "running")  # elsewhere: another queue, or one that was killed, left it running


@dataclass
class Args:
    script: str = "mpo_continuous.py"  # the script to run
    tasks: str = "smoke"  # named sets and tasks, separated by commas: core6, walker-walk, or a whole Gymnasium id
    seeds: str = "1"  # how many seeds, 3 meaning 1, 2 and 3; or which ones, separated by commas: 2,5
    total_timesteps: int = 100_000  # environment steps of each run
    workers: int = 2  # runs at a time
    threads: int = 1  # CPU threads of each run
    label: str = ""  # name of this variant in the results; empty: the script's name
    runs: str = "runs/benchmark"  # where the runs live
    results: str = "benchmark/results"  # where the CSVs go


# ---------------------------------------------------------------------------------------------------------------------
# The user's input. Each answer is one sentence and exit code 2.
def refuse(sentence):
    print(f"run.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def tasks_of(text):
    """The tasks of a comma-separated list of sets and tasks, each once."""
    tasks = []
    for part in text.split(","):
        if part not in TASKS and not ("-" in part or "/" in part):
            refuse(f"there is no task set {part!r}; the sets are {', '.join(TASKS)}, and a task is like walker-walk.")
        tasks += TASKS.get(part, part).split()
    return list(dict.fromkeys(tasks))


def seeds_of(text):
    """The seeds meant: 3 is 1, 2 and 3; 2,5 is 2 and 5; and 7, with a comma after it, is 7 alone."""
    words = [word for word in text.split(",") if word]
    if not words or not all(word.strip().isdecimal() for word in words) or ("," not in text and int(text) == 0):
        refuse(f"--seeds {text!r} is neither a number of seeds, such as 3, nor a list of them, such as 2,5.")
    listed = [int(word) for word in words]
    return list(dict.fromkeys(listed)) if "," in text else list(range(1, listed[0] + 1))


def validate(args):
    for name in ("total_timesteps", "workers", "threads"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}.")
    if not Path(args.script).is_file():
        refuse(f"there is no script {args.script} here.")


# ---------------------------------------------------------------------------------------------------------------------
# One run.
class Job:
    """A task, a seed, the folder of the run, and how far it is."""

    def __init__(self, args, extra, task, seed):
        self.task, self.seed, self.total, self.threads = task, seed, args.total_timesteps, args.threads
        label = args.label or Path(args.script).stem
        env_id = task if "/" in task or task[:1].isupper() else f"dm_control/{task}-v0"
        name = task.replace("/", "-")
        self.folder = Path(args.runs) / label / name / f"seed{seed}"
        self.log = self.folder.with_suffix(".log")
        self.commits = self.folder.with_suffix(".commit")
        self.result = Path(args.results) / label / name / f"seed{seed}.csv"
        self.flags = ["--env-id", env_id, "--seed", str(seed), "--total-timesteps", str(args.total_timesteps)]
        self.flags += ["--threads", str(args.threads), *extra]
        self.script, self.process, self.state, self.taken = args.script, None, "waiting", None
        self.skip_if_done()

    def skip_if_done(self):
        """A result that is long enough ends the job; one that was made with other flags must not pass for it."""
        if not self.result.exists():
            return
        head, rows = read_result(self.result)
        made, asked = essence(head["command"]), essence(command_line(self))
        if made != asked:
            refuse(f"{self.result} was made by {made!r}, not by {asked!r}; name this variant with --label.")
        if rows and rows[-1]["env_steps"] >= self.total:
            self.state = "done before"

    def start(self):
        """Whether the run has begun. Its process holds a lock on the log as long as it lives, so none runs twice."""
        self.skip_if_done()
        if self.state == "done before":
            return False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.state = "elsewhere"
                return False
            log.truncate(0)
            command = [sys.executable, self.script, *self.flags, "--run-dir", str(self.folder)]
            commit = current_commit(self.script)
            if (self.folder / "checkpoint.pt").exists():
                command += ["--resume", str(self.folder)]
                before = self.commits.read_text() if self.commits.exists() else "unknown"
                if before.split()[-1] != commit:
                    commit = f"{before}, from about step {self.step():,} on {commit}"
                else:
                    commit = before
            elif self.folder.exists():
                shutil.rmtree(self.folder)  # stopped before its first checkpoint
            self.commits.write_text(commit)
            surroundings = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
            options = dict(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=surroundings)
            # A session of its own: Ctrl-C reaches it once, through stop(), and it saves; twice would end it at once.
            self.process = subprocess.Popen(command, start_new_session=True, **options)
        self.state, self.started, self.first_step = "running", time.time(), self.step()
        return True

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
        self.taken = time.time() - self.started
        self.state = "done" if self.process.returncode == 0 else f"failed (exit code {self.process.returncode})"
        if self.state == "done":
            try:
                write_result(self)
            except (OSError, KeyError, ValueError) as error:
                self.state = f"failed (it ended well, but left no result: {error!r})"
        return True

    def pace(self):
        """Seconds per environment step in this session; None if nothing was logged yet."""
        if self.process is None or self.state.startswith("failed") or self.step() <= self.first_step:
            return None
        return (self.taken or time.time() - self.started) / (self.step() - self.first_step)

    def seconds_left(self, pace):
        return max(self.total - self.step(), 0) * pace


def current_commit(script):
    """The commit of the repository, and whether the script differs from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(Path(script).resolve())], capture_output=True)
    return (commit or "unknown") + ("+changed" if commit and changed.returncode == 1 else "")


def stop(jobs):
    """Ask the runs to save and end; the same command goes on from there."""
    running = [job.process for job in jobs if job.state == "running"]
    try:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()
    except KeyboardInterrupt:
        for process in running:
            process.kill()


# ---------------------------------------------------------------------------------------------------------------------
# The result: progress.csv reduced to what figures need, under a header with the commit and the arguments.
def command_line(job):
    return shlex.join(["python", job.script, *job.flags])


def essence(command):
    """What of a command decides what a run learns: not how long it is, nor how fast."""
    words = shlex.split(command)[1:]
    words[0] = Path(words[0]).name
    for flag, count in {"--total-timesteps": 2, "--threads": 2, "--compile": 1, "--no-compile": 1}.items():
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    return " ".join(words)


def write_result(job):
    with open(job.folder / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    settings = json.loads((job.folder / "args.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "run_dir"}
    lines = [f"# commit: {job.commits.read_text()}", f"# command: {command_line(job)}"]
    lines += [f"# args: {json.dumps(settings)}", "env_steps,train_return,eval_return,seconds,updates"]
    for row in rows:
        evaluated = row["eval/episodic_return"] and f"{float(row['eval/episodic_return']):.2f}"
        values = row["global_step"], f"{float(row['charts/episodic_return']):.2f}", evaluated
        lines.append(",".join([*values, f"{float(row['charts/seconds']):.1f}", row["charts/updates"]]))
    if not rows or int(rows[-1]["global_step"]) < job.total:
        raise ValueError(f"{job.folder / 'progress.csv'} ends before step {job.total:,}")
    job.result.parent.mkdir(parents=True, exist_ok=True)
    aside = job.result.with_suffix(".tmp")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(job.result)


def read_result(path):
    """A result's header as a dict, and its rows with numbers in them (None where no evaluation took place)."""
    lines = Path(path).read_text().splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return head, [{name: float(value) if value else None for name, value in row.items()} for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# The queue and its table.
def expected_end(jobs, workers):
    """Seconds until the last run ends, if each waiting one goes at the others' mean pace; None before the first row."""
    paces = [pace for job in jobs if (pace := job.pace())]
    if not paces:
        return None
    mean = sum(paces) / len(paces)
    free = [job.seconds_left(job.pace() or mean) for job in jobs if job.state == "running"]  # when each worker is
    free = (free + [0.0] * workers)[: max(workers, len(free))]
    heapq.heapify(free)
    for job in jobs:
        if job.state == "waiting":
            heapq.heappush(free, heapq.heappop(free) + job.seconds_left(mean))
    return max(free)


def line(job):
    note = ""
    if job.state == "running":
        pace = job.pace()
        note = f"{job.step():>11,} / {job.total:,}"
        note += f"   {clock(job.seconds_left(pace))} left" if pace else ""
    elif job.taken:
        note = f"after {clock(job.taken)}"
    return f"{job.task:26} seed {job.seed:<3} {job.state:12} {note}".rstrip()


def summary(jobs, workers):
    states = [job.state.split()[0] for job in jobs]
    counts = [f"{states.count('done')} of {len(jobs)} done"]
    counts += [f"{states.count(name)} {name}" for name in (*UNFINISHED[::-1], "failed") if name in states]
    left = expected_end(jobs, workers) if any(state in UNFINISHED for state in states) else None
    end = time.strftime("%a %H:%M", time.localtime(time.time() + left)) if left is not None else ""
    return f"{time.strftime('%H:%M')}  {', '.join(counts)}" + (f"; the end in {clock(left)}, {end}" if end else "")


def clock(seconds):
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def show(jobs, changed, workers):
    """On a terminal the whole table, again and again (what fits of it); elsewhere what has changed or still runs."""
    if sys.stdout.isatty():
        height = shutil.get_terminal_size().lines - 2
        shown = [job for job in jobs if len(jobs) <= height or job.state not in ("waiting", "done", "done before")]
        print("\033[2J\033[H" + "\n".join([summary(jobs, workers), *map(line, shown[:height])]), flush=True)
    else:
        shown = [job for job in jobs if job in changed or job.state == "running"]
        print("\n".join([summary(jobs, workers), *(f"       {line(job)}" for job in shown)]), flush=True)


def main(args, extra):
    validate(args)
    jobs = [Job(args, extra, task, seed) for seed in seeds_of(args.seeds) for task in tasks_of(args.tasks)]
    for number in (signal.SIGINT, signal.SIGTERM):  # in a shell's background SIGINT would be ignored
        signal.signal(number, signal.default_int_handler)
    shown_at = 0.0
    try:
        while any(job.state in UNFINISHED for job in jobs):
            changed = [job for job in jobs if job.poll()]
            for job in jobs:
                if job.state in ("waiting", "elsewhere") and sum(j.state == "running" for j in jobs) < args.workers:
                    before = job.state
                    job.start()
                    changed += [job] if job.state != before else []
            if changed or time.time() - shown_at > (2 if sys.stdout.isatty() else 300):
                show(jobs, changed, args.workers)
                shown_at = time.time()
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("stopping: each run saves what it has", flush=True)
        stop(jobs)
        print("stopped; the same command goes on from here", flush=True)
        raise SystemExit(130) from None
    failed = [job for job in jobs if job.state.startswith("failed")]
    for job in failed:
        print(f"\n{job.task} seed {job.seed} {job.state}; the end of {job.log}:")
        print("\n".join(job.log.read_text(errors="replace").splitlines()[-10:]))
    before = sum(job.state == "done before" for job in jobs)
    print(f"\n{len(jobs) - len(failed)} of {len(jobs)} runs done ({before} of them before), {len(failed)} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:cut]), sys.argv[cut + 1 :])
