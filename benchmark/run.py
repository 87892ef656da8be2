"""Run a script on many tasks and seeds, and keep what each run learned in a small CSV.

    python benchmark/run.py --tasks dmc18 --seeds 3 --total-timesteps 100000 --workers 2
    python benchmark/run.py --tasks walker-walk,cheetah-run --label tight -- --epsilon-mu 0.01
    python benchmark/run.py --script benchmark/baselines.py --tasks core6 --label ppo \\
        -- --algorithm ppo
    python benchmark/run.py --tasks dmc18 --dry-run     one command a line, for any scheduler

The runs themselves live in runs/benchmark/LABEL/TASK/seedK. A finished run is skipped, an
interrupted one is resumed, a failed one is reported at the end with the last lines of its log, and
the exit code is then 1. Flags after `--` go to the script. Each finished run leaves
benchmark/results/LABEL/TASK/seedK.csv, what all figures are made from; for runs that a scheduler
made, the same command without --dry-run collects them.

Any script can be run that takes --env-id, --seed, --total-timesteps, --threads and --run-dir, and
leaves args.json, progress.csv and, at its end, a file model.* in its run folder; if it leaves
checkpoint.pt there too, it is resumed with --resume FOLDER.
"""

import csv
import fcntl
import heapq
import importlib.metadata
import json
import math
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

TASKS = {
    "dmc18": "acrobot-swingup ball_in_cup-catch cartpole-balance cartpole-balance_sparse "
    "cartpole-swingup cartpole-swingup_sparse cheetah-run finger-spin finger-turn_easy "
    "finger-turn_hard hopper-hop hopper-stand pendulum-swingup reacher-easy reacher-hard "
    "walker-run walker-stand walker-walk",
    "paper15": "acrobot-swingup ball_in_cup-catch cartpole-swingup cheetah-run finger-spin "
    "fish-swim hopper-stand humanoid-walk manipulator-bring_ball pendulum-swingup "
    "point_mass-easy reacher-hard swimmer-swimmer6 swimmer-swimmer15 walker-walk",
    "ablation3": "walker-walk acrobot-swingup hopper-stand",
    "core6": "walker-walk cheetah-run cartpole-swingup reacher-hard finger-turn_hard hopper-stand",
    "humanoid": "humanoid-stand humanoid-walk humanoid-run",
    "atari5": "ALE/Pong-v5 ALE/Breakout-v5 ALE/Qbert-v5 ALE/Tennis-v5 ALE/Boxing-v5",
    "smoke": "cartpole-swingup",
}
UNFINISHED = ("waiting", "elsewhere", "running")  # elsewhere: another process is at it
VERSIONS = ("torch", "gymnasium", "mujoco")  # named in each result
METRICS = ("std_max", "q_minus_return")  # kept in a result where a script logs them


@dataclass
class Args:
    script: str = "mpo_continuous.py"  # the script to run
    tasks: str = "smoke"  # sets and tasks, by commas: core6, walker-walk, or a whole Gymnasium id
    seeds: str = "1"  # how many, 3 meaning 1, 2 and 3; or which, separated by commas: 2,5
    total_timesteps: int = 100_000  # environment steps of each run
    workers: int = 2  # runs at a time
    threads: int = 1  # CPU threads of each run
    processes: int = 1  # more than one: torchrun starts so many workers of mpo_distributed.py
    label: str = ""  # name of this variant in the results; empty: the script's name
    runs: str = "runs/benchmark"  # where the runs live
    results: str = "benchmark/results"  # where the CSVs go
    dry_run: bool = False  # run nothing; print the command of each run that is not done, one a line


# ---- The user's input. Each answer is one sentence and exit code 2.
def refuse(sentence):
    print(f"run.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def tasks_of(text):
    """The tasks of a comma-separated list of sets and tasks, each once."""
    tasks = []
    for part in text.split(","):
        if part not in TASKS and not ("-" in part or "/" in part):
            sets = ", ".join(TASKS)
            refuse(f"there is no task set {part!r}; there are {sets}; a task is like walker-walk.")
        tasks += TASKS.get(part, part).split()
    return list(dict.fromkeys(tasks))


def seeds_of(text):
    """The seeds meant: 3 is 1, 2 and 3; 2,5 is 2 and 5; and 7, with a comma after it, is 7."""
    words = [word for word in text.split(",") if word]
    numbers = words and all(word.strip().isdecimal() for word in words)
    if not numbers or ("," not in text and int(text) == 0):
        refuse(f"--seeds {text!r} is neither how many, such as 3, nor which ones, such as 2,5.")
    listed = [int(word) for word in words]
    return list(dict.fromkeys(listed)) if "," in text else list(range(1, listed[0] + 1))


def validate(args):
    for name in ("total_timesteps", "workers", "threads", "processes"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}.")
    if not Path(args.script).is_file():
        refuse(f"there is no script {args.script} here.")


# ---- One run.
class Job:
    """A task, a seed, the folder of the run, and how far it is."""

    def __init__(self, args, extra, task, seed):
        self.task, self.seed = task, seed
        self.total, self.threads = args.total_timesteps, args.threads
        label = args.label or Path(args.script).stem
        whole = "/" in task or ":" in task or task[:1].isupper()  # a whole id
        env_id = task if whole else f"dm_control/{task}-v0"
        name = task.replace("/", "-").replace(":", "-")
        self.folder = Path(args.runs) / label / name / f"seed{seed}"
        self.log = self.folder.with_suffix(".log")
        self.record = self.folder.with_suffix(".json")  # what the result will say of its making
        self.result = Path(args.results) / label / name / f"seed{seed}.csv"
        self.flags = ["--env-id", env_id, "--seed", str(seed)]
        self.flags += ["--total-timesteps", str(self.total), "--threads", str(self.threads), *extra]
        self.launcher = []
        if args.processes > 1:
            count = ["--nproc-per-node", str(args.processes)]
            self.launcher = ["-m", "torch.distributed.run", "--standalone", *count]
        self.script, self.process, self.state, self.taken = args.script, None, "waiting", None
        self.skip_if_done()

    def skip_if_done(self):
        """A result that is long enough ends the job; one of other flags must not pass for it."""
        if not self.result.exists():
            return
        head, rows = read_result(self.result)
        made, asked = essence(head["command"]), essence(command_line(self))
        if made != asked:
            refuse(f"{self.result} was made by {made!r}, not by {asked!r}; use another --label.")
        if rows and rows[-1]["env_steps"] >= self.total:
            self.state = "done before"

    def command(self):
        """What starts the run, or continues it."""
        words = [*self.launcher, self.script, *self.flags, "--run-dir", str(self.folder)]
        resumable = (self.folder / "checkpoint.pt").exists()
        return words + (["--resume", str(self.folder)] if resumable else [])

    def start(self):
        """Begin the run if it is nowhere under way and not finished.

        Its process holds a lock on the log as long as it lives, so none runs twice.
        """
        self.skip_if_done()
        if self.state == "done before":
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a") as log:
            if not lock(log, fcntl.flock) or self.is_trained_elsewhere():
                self.state = "elsewhere"
                return
            if self.step() >= self.total and any(self.folder.glob("model.*")):
                return self.collect()  # it ended while no queue looked on
            log.truncate(0)
            command = [sys.executable, *self.command()]
            self.write_record()
            if self.folder.exists() and "--resume" not in command:
                shutil.rmtree(self.folder)  # stopped before its first checkpoint
            surroundings = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
            options = dict(stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            # A session of its own: Ctrl-C reaches it once, through stop(), and it saves.
            options |= dict(env=surroundings, start_new_session=True)
            self.process = subprocess.Popen(command, **options)
        self.state, self.started, self.first_step = "running", time.time(), self.step()

    def is_trained_elsewhere(self):
        """Whether a process that no queue started holds the script's own lock on the folder."""
        path = self.folder / "lock"
        if not path.exists():
            return False
        with open(path, "a") as file:
            return not lock(file, fcntl.lockf)

    def write_record(self):
        """Note the commits, and the length of the run that this one continues."""
        commit, continued = current_commit(self.script), ""
        if (self.folder / "checkpoint.pt").exists():
            before = self.read_record()
            continued = before.get("continued", "")
            commits = before.get("commit", "unknown")
            same = commits.split()[-1] == commit
            commit = commits if same else f"{commits}, from about step {self.step():,} on {commit}"
            path = self.folder / "args.json"  # missing if it was killed as it began
            settings = json.loads(path.read_text()) if path.exists() else {}
            shorter = settings.get("total_timesteps", self.total)
            if shorter < self.total:
                continued += f"{', then' if continued else 'from'} a run of {shorter:,} steps"
        self.record.write_text(json.dumps({"commit": commit, "continued": continued}))

    def read_record(self):
        return json.loads(self.record.read_text()) if self.record.exists() else {}

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
        self.state = f"failed (exit code {self.process.returncode})"
        if self.process.returncode == 0:
            self.collect()
        return True

    def collect(self):
        """Write the result of a run that has ended."""
        try:
            write_result(self)
            self.state = "done"
        except (OSError, KeyError, ValueError) as error:
            self.state = f"failed (it ended well, but left no result: {error!r})"

    def pace(self):
        """Seconds per environment step in this session; None if nothing was logged yet."""
        failed = self.state.startswith("failed")
        if self.process is None or failed or self.step() <= self.first_step:
            return None
        return (self.taken or time.time() - self.started) / (self.step() - self.first_step)

    def seconds_left(self, pace):
        return max(self.total - self.step(), 0) * pace


def lock(file, how):
    """Whether the file could be locked: nobody else has it."""
    try:
        how(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def git(script, *words):
    """Git on the repository that the script is in, which need not be this one."""
    command = ["git", "-C", str(Path(script).resolve().parent), *words]
    return subprocess.run(command, capture_output=True, text=True)


def current_commit(script):
    """The commit of the script's repository, and whether the script differs from it."""
    commit = git(script, "rev-parse", "--short", "HEAD").stdout.strip()
    name = Path(script).name
    changed = commit and git(script, "diff", "--quiet", "HEAD", "--", name).returncode == 1
    return (commit or "unknown") + ("+changed" if changed else "")


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


# ---- The result: progress.csv reduced to what figures need, under a header that says how it was
# made: commit, command, versions, all settings.
def command_line(job):
    return shlex.join(["python", *job.launcher, job.script, *job.flags])


def essence(command):
    """What of a command decides what a run learns: not how long it is, nor how fast."""
    words = shlex.split(command)[1:]
    words[0] = Path(words[0]).name
    speed = {"--total-timesteps": 2, "--threads": 2, "--compile": 1, "--no-compile": 1}
    for flag, count in speed.items():
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    return " ".join(words)


def versions():
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)


def write_result(job):
    with open(job.folder / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    if not rows or int(rows[-1]["global_step"]) < job.total:
        raise ValueError(f"{job.folder / 'progress.csv'} ends before step {job.total:,}")
    settings = json.loads((job.folder / "args.json").read_text())
    settings = {
        name: value for name, value in settings.items() if name not in ("run_dir", "resume")
    }
    record = job.read_record()  # none where a scheduler ran it
    commit = record.get("commit") or f"unknown, collected at {current_commit(job.script)}"
    lines = [f"# commit: {commit}", f"# command: {command_line(job)}", f"# versions: {versions()}"]
    if record.get("continued"):
        lines.append(f"# continued: {record['continued']}")
    lines += [f"# args: {json.dumps(settings)}"]
    metrics = [name for name in METRICS if f"mpo/{name}" in rows[0]]
    lines += [",".join(["env_steps,train_return,eval_return,seconds,eval_returns", *metrics])]
    for row in rows:
        trained, evaluated = row["charts/episodic_return"], row["eval/episodic_return"]
        values = [row["global_step"], cell(trained, 2), cell(evaluated, 2)]
        values += [cell(row["charts/seconds"], 1), row["eval/returns"]]
        values += [cell(row[f"mpo/{name}"], 3) for name in metrics]
        lines.append(",".join(values))
    job.result.parent.mkdir(parents=True, exist_ok=True)
    aside = job.result.with_suffix(".tmp")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(job.result)


def cell(text, digits):
    """A number with so many digits; nothing where there is none."""
    value = float(text or "nan")
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def read_result(path):
    """A result's header as a dict, and its rows: numbers, None where there is none.

    `eval_returns` is a list, of the episodes of an evaluation; the oldest results have none.
    """
    lines = Path(path).read_text().splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return head, [{name: read_cell(name, text) for name, text in row.items()} for row in rows]


def read_cell(name, text):
    if name == "eval_returns":
        return [float(word) for word in text.split()]
    return float(text) if text else None


# ---- The queue and its table.
def expected_end(jobs, workers):
    """Seconds until the last run ends, at the pace seen; None before the first row."""
    paces = [pace for job in jobs if (pace := job.pace())]
    if not paces:
        return None
    mean = sum(paces) / len(paces)
    running = [job for job in jobs if job.state == "running"]
    free = [job.seconds_left(job.pace() or mean) for job in running]  # when each worker is
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
    named = [name for name in (*UNFINISHED[::-1], "failed") if name in states]
    counts += [f"{states.count(name)} {name}" for name in named]
    text = f"{time.strftime('%H:%M')}  {', '.join(counts)}"
    left = expected_end(jobs, workers)
    if left is None or not any(state in UNFINISHED for state in states):
        return text
    end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
    return f"{text}; the end in {clock(left)}, {end}"


def clock(seconds):
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def show(jobs, changed, workers):
    """On a terminal what fits of the whole table; elsewhere what has changed or still runs."""
    if sys.stdout.isatty():
        height = shutil.get_terminal_size().lines - 2
        quiet = ("waiting", "done", "done before") if len(jobs) > height else ()
        shown = [job for job in jobs if job.state not in quiet]
        lines = [summary(jobs, workers), *map(line, shown[:height])]
        print("\033[2J\033[H" + "\n".join(lines), flush=True)
    else:
        shown = [job for job in jobs if job in changed or job.state == "running"]
        lines = [summary(jobs, workers), *(f"       {line(job)}" for job in shown)]
        print("\n".join(lines), flush=True)


def work(jobs, workers):
    """Run the jobs, so many at a time, until none is unfinished."""
    shown_at = 0.0
    while any(job.state in UNFINISHED for job in jobs):
        changed = [job for job in jobs if job.poll()]
        for job in jobs:
            free = sum(j.state == "running" for j in jobs) < workers
            if job.state in ("waiting", "elsewhere") and free:
                before = job.state
                job.start()
                changed += [job] if job.state != before else []
        if changed or time.time() - shown_at > (2 if sys.stdout.isatty() else 300):
            show(jobs, changed, workers)
            shown_at = time.time()
        time.sleep(0.2)


def of_other_text(job):
    """Whether a result that was there is of a commit since which the script has changed."""
    commit = read_result(job.result)[0]["commit"].split()[-1].removesuffix("+changed")
    return git(job.script, "diff", "--quiet", commit, "--", Path(job.script).name).returncode == 1


def main(args, extra):
    validate(args)
    seeds, tasks = seeds_of(args.seeds), tasks_of(args.tasks)
    jobs = [Job(args, extra, task, seed) for seed in seeds for task in tasks]
    if args.dry_run:
        missing = [job for job in jobs if job.state != "done before"]
        lines = [shlex.join(["python", *job.command()]) + "\n" for job in missing]
        return print("".join(lines), end="")
    for number in (signal.SIGINT, signal.SIGTERM):  # in a shell's background SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    try:
        work(jobs, args.workers)
    except KeyboardInterrupt:
        print("stopping: each run ends its iteration, up to a minute, and saves", flush=True)
        stop(jobs)
        print("stopped; the same command goes on from here", flush=True)
        raise SystemExit(130) from None
    failed = [job for job in jobs if job.state.startswith("failed")]
    for job in failed:
        print(f"\n{job.task} seed {job.seed} {job.state}; the end of {job.log}:")
        print("\n".join(job.log.read_text(errors="replace").splitlines()[-10:]))
    before = [job for job in jobs if job.state == "done before"]
    counts = f"{len(jobs) - len(failed)} of {len(jobs)} runs done ({len(before)} of them before)"
    print(f"\n{counts}, {len(failed)} failed")
    if old := [job for job in before if of_other_text(job)]:
        print(f"{len(old)} of those before are of an earlier {args.script}; to run one again,")
        print(f"remove its result, such as {old[0].result}, and its folder {old[0].folder}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:cut]), sys.argv[cut + 1 :])
