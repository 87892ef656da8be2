"""Run a script as its users do: a process with what it prints, its exit code and its run folder."""

import atexit
import csv
import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from conftest import ROOT, scripts_with

CONTINUOUS = scripts_with("gaussian_log_prob")  # the scripts that act with a Gaussian policy
FIRST = CONTINUOUS[:1]  # for what is the same text in all of them, which test_script.py holds
SINGLE = [script for script in CONTINUOUS if "distributed" not in script.id]  # without workers
TASK = "dm_control/cartpole-swingup-v0"
TINY = {
    "env_id": TASK,
    "policy_layers": (16, 16),
    "critic_layers": (16, 16),
    "num_samples": 4,
    "batch_size": 4,
    "window": 4,
    "time_limit": 50,
    "buffer_size": 10_000,
    "learning_starts": 100,
    "updates_per_step": 0.2,
    "total_timesteps": 200,
    "eval_episodes": 1,
    "threads": 1,
}
PATIENCE = 900  # seconds for a process that takes ten: machines can be busy
STARTING = threading.Lock()
LEADING = ("PYTHONPATH", "MUJOCO_GL", "COLUMNS")
CLOCK = ("charts/SPS", "charts/seconds")  # the columns of progress.csv that tell the time
OUR_LINES = [  # what a run prints where it is not a terminal
    r"\S+: writing to \S+",
    r"step [\d,]+: return \S+, evaluated \S+, \d+ steps/s",
    r"done; everything is in \S+",
]

# The imports of a script take ten times longer than a tiny run. So one process makes them once, and
# forks for each run; between the two, a process that waits for the end and notes the exit code.
# Each line of its input asks for a run.
SERVER = """
import atexit, gc, json, os, resource, runpy, signal, sys, traceback
os.environ["MUJOCO_GL"] = "disabled"
sys.path.remove("")  # a run finds the modules of its folder by itself, or not
import gymnasium, imageio.v2, shimmy, torch._dynamo, torch._inductor.config
import torch.utils.tensorboard, tqdm, tyro
import tasks
gymnasium.make("dm_control/cartpole-swingup-v0").close()  # imports what it is made of
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    ask = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        for name, find in (("pid", lambda: child), ("code", lambda: os.waitpid(child, 0)[1])):
            value = find()
            with open(f"{ask['files']}.tmp", "w") as file:
                print(value, file=file)
            os.rename(f"{ask['files']}.tmp", f"{ask['files']}.{name}")
        os._exit(0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{ask['files']}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(ask["cwd"])
    sys.modules.update(dict.fromkeys(ask["hidden"]))
    if ask["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ask["file_size"], resource.RLIM_INFINITY))
    sys.argv, code = ask["words"], 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)  # tearing down the interpreter takes longer than all of this
"""


def server():
    """The process that forks, a folder for what the runs print, and numbers for their files."""
    with STARTING:
        return start_server()


@functools.cache
def start_server():
    environment = surroundings(PYTHONPATH=str(ROOT / "tests"))
    options = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, start_new_session=True, **options)
    atexit.register(process.stdin.close)
    return process, tempfile.mkdtemp(prefix="runs"), itertools.count()


class Run:
    """A process that runs a script; what it prints can be read at any time."""

    def __init__(self, script, words, cwd, cold=False, environment=None, hidden=(), file_size=0):
        """cold: a Python of its own; else one with its imports done, without those `hidden`."""
        process, folder, numbers = server()
        self.files = Path(folder) / str(next(numbers))
        words = [str(getattr(script, "__file__", script)), *words]
        self.popen, self.returncode = None, None
        if cold:
            out, err = (open(f"{self.files}.{name}", "w") for name in ("out", "err"))
            options = dict(cwd=cwd, env=surroundings(**(environment or {})), stdout=out, stderr=err)
            command = [sys.executable, *words]
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
            self.pid = self.popen.pid
        else:
            ask = dict(words=words, cwd=str(cwd), files=str(self.files))
            ask |= dict(hidden=list(hidden), file_size=file_size)
            print(json.dumps(ask), file=process.stdin, flush=True)
            self.pid = int(self.note("pid"))

    def note(self, name):
        wait_until(Path(f"{self.files}.{name}").exists)
        return Path(f"{self.files}.{name}").read_text()

    def poll(self):
        if self.popen:
            self.returncode = self.popen.poll()
        elif Path(f"{self.files}.code").exists():
            self.returncode = os.waitstatus_to_exitcode(int(self.note("code")))
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def out(self):
        return self.printed("out")

    @property
    def err(self):
        return self.printed("err")

    def printed(self, name):
        path = Path(f"{self.files}.{name}")
        return path.read_text() if path.exists() else ""


def flags(**values):
    """flags(num_samples=4, paper=False) is --num-samples 4 --no-paper, as a list of words."""
    words = []
    for name, value in values.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def tiny(**changes):
    return flags(**(TINY | changes))


def surroundings(**changes):
    """This process's environment, without what leads to the repository or to a renderer."""
    kept = {name: value for name, value in os.environ.items() if name not in LEADING}
    return kept | changes


def finish(process):
    """Wait for the end; a process that does not come to one is killed."""
    try:
        wait_until(lambda: process.poll() is not None)
    finally:
        process.send_signal(signal.SIGKILL)
    return process


def run(script, words, cwd, **options):
    return finish(Run(script, words, cwd, **options))


def train(script, words, cwd, **options):
    """Run to a good end."""
    process = run(script, words, cwd, **options)
    assert process.returncode == 0, process.err
    return process


def together(*calls):
    """The results of functions without arguments, two running at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def make_policy(script, env, args):
    """The policy that main() makes."""
    return script.Policy(env.observation_space.shape[0], env.action_space.shape[0], args)


def dm_control_tasks():
    """Names of the tasks that Shimmy registers."""
    os.environ.setdefault("MUJOCO_GL", "disabled")  # as the scripts do, before dm_control comes
    importlib.import_module("shimmy")
    names = [name for name in gym.registry if name.startswith("dm_control/")]
    return [name for name in names if "compatibility" not in name]


def refusal(script, words, capsys):
    """The sentence with which these words are refused, by main() in this process, as by a shell."""
    with pytest.raises(SystemExit) as stop:
        script.main(script.parse_args(words))
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "", printed
    (sentence,) = printed.err.splitlines()
    return sentence


def one_sentence(process):
    """The sentence a run ended with; it must be all that stands on stderr."""
    lines = process.err.splitlines()
    assert len(lines) == 1, process.err
    return lines[0]


def wait_until(condition, process=None):
    """Wait for something to be true, while a process runs."""
    end = time.time() + PATIENCE
    while not condition():
        running = process is None or process.poll() is None
        assert running, f"the run ended too early: {process.out} {process.err}"
        assert time.time() < end, "it never came to that"
        time.sleep(0.01)  # seldom enough to leave the processor to the run


def wait_for_row(process, run_dir, step):
    """Wait until a row of that step, or a later one, stands in progress.csv."""
    wait_until(lambda: last_step(run_dir) >= step, process)


def stop(process, number):
    """Send a signal and wait for the end."""
    process.send_signal(number)
    return finish(process)


AGAIN = r"--resume (\S+) goes on from its checkpoint"  # how every unfinished run ends


def resume_command(process):
    """The words that make a stopped run go on, as it prints them."""
    stopped = re.fullmatch(rf"stopped at step [\d,]+; {AGAIN}", process.out.splitlines()[-1])
    return ["--resume", stopped.group(1)]


def rows(run_dir):
    """progress.csv as a list of dictionaries, complete rows only; empty if there is none yet."""
    path = Path(run_dir) / "progress.csv"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def timeless(run_dir):
    """progress.csv without the columns that tell the time."""
    return [
        {name: value for name, value in row.items() if name not in CLOCK} for row in rows(run_dir)
    ]


def last_step(run_dir):
    table = rows(run_dir)
    return int(table[-1]["global_step"]) if table else 0


def load(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """Whether two nests of dictionaries, lists, tensors and numbers are equal to the bit."""
    if isinstance(a, dict):
        alike = isinstance(b, dict) and a.keys() == b.keys()
        return alike and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b
