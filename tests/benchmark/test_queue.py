"""benchmark/run.py and baselines.py: the queue with real processes and real kills, and its CSVs."""

import csv
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from running import flags, last_step, surroundings, tiny, wait_until

import mpo_continuous

BENCHMARK = ROOT / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import run as queue  # noqa: E402

# A script as the queue expects it, without the learning: a row for each 100 steps, a checkpoint
# after each row. It notes each start, saves when asked to stop, and dies if asked twice, as the
# real ones do.
LEARNER = """
import fcntl, json, os, pathlib, signal, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, total = pathlib.Path(given["--run-dir"]), int(given["--total-timesteps"])
resumed, pause = "--resume" in given, float(given["--pause"])
with open("starts", "a") as file:
    print(os.getpid(), folder, "resumed" if resumed else "new", file=file)
if given["--env-id"] == "dm_control/bad-task-v0":
    print("first line"), sys.exit("this task cannot be learned")
if given["--env-id"] == "dm_control/empty-task-v0":
    sys.exit(0)
if given["--env-id"] == "dm_control/short-task-v0":
    total //= 2
asked = []
def ask(*_):
    asked.append(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGINT, ask)
folder.mkdir(parents=True, exist_ok=True)
lock = open(folder / "lock", "w")
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
settings = {"pause": pause, "total_timesteps": total, "run_dir": str(folder), "resume": ""}
(folder / "args.json").write_text(json.dumps(settings))
progress, checkpoint = folder / "progress.csv", folder / "checkpoint.pt"
head = "global_step,charts/episodic_return,charts/SPS,charts/seconds,mpo/std_max,"
head += "eval/episodic_return,eval/returns\\n"
rows = progress.read_text().splitlines(True)[1:] if resumed else []
step = int(checkpoint.read_text()) if resumed else 0
progress.write_text(head + "".join(row for row in rows if int(row.split(",")[0]) <= step))
while step < total:
    time.sleep(pause)
    step += 100
    with open(progress, "a") as file:
        evaluated = f"{step},{step - 1} {step + 1}" if step % 200 == 0 else "nan,"
        spread, trained = 0.5 + step / 1e5, step / 7 + int(given['--seed'])
        file.write(f"{step},{trained},10,{step / 10},{spread},{evaluated}\\n")
    if asked:
        time.sleep(0.5)  # a checkpoint takes time
    aside = folder / "aside"
    aside.write_text(str(step)), aside.replace(checkpoint)
    if asked:
        print("saved, as asked")
        sys.exit(130)
(folder / "model.pt").write_text("")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "learner.py").write_text(LEARNER)
    return tmp_path


def command(*words, script="learner.py", pause=0.0, total=1000, workers=2, **options):
    own = flags(script=script, total_timesteps=total, workers=workers, results="results", **options)
    extra = [] if "--" in words else ["--", "--pause", str(pause)]
    return [sys.executable, str(BENCHMARK / "run.py"), *own, *words, *extra]


def run_queue(folder, *words, **options):
    pipes = dict(cwd=folder, env=surroundings(), capture_output=True, text=True)
    return subprocess.run(command(*words, **options), **pipes)


def start_queue(folder, *words, **options):
    out = open(folder / "out", "a")
    pipes = dict(cwd=folder, env=surroundings(), stdout=out, stderr=subprocess.STDOUT)
    return subprocess.Popen(command(*words, **options), start_new_session=True, **pipes)


def starts(folder):
    """(process id, folder, new or resumed) of each start of the script."""
    path = folder / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def steps(folder, task="a-b"):
    path = folder / f"runs/benchmark/learner/{task}/seed1/progress.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def timeless(path):
    rows = queue.read_result(path)[1]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


# ---- The queue.
def test_each_run_leaves_a_csv_and_the_same_command_runs_nothing_again(folder):
    done = run_queue(folder, tasks="a-b,c-d", seeds=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 runs done (0 of them before), 0 failed" in done.stdout
    assert len(starts(folder)) == 4
    head, rows = queue.read_result(folder / "results/learner/c-d/seed2.csv")
    assert head["commit"] == "unknown" and "continued" not in head  # no git here
    asked = "--env-id dm_control/c-d-v0 --seed 2 --total-timesteps 1000 --threads 1 --pause 0.0"
    assert head["command"] == f"python learner.py {asked}"
    assert json.loads(head["args"]) == {"pause": 0.0, "total_timesteps": 1000}
    assert [row["env_steps"] for row in rows] == [100.0 * n for n in range(1, 11)]
    for row in rows:
        step, evaluated = row["env_steps"], row["env_steps"] % 200 == 0
        assert row["train_return"] == pytest.approx(step / 7 + 2, abs=0.006)
        assert row["seconds"] == step / 10
        assert row["eval_return"] == (step if evaluated else None)
        assert row["eval_returns"] == ([step - 1, step + 1] if evaluated else [])
        assert row["std_max"] == pytest.approx(0.5 + step / 1e5, abs=6e-4)
    again = run_queue(folder, tasks="a-b,c-d", seeds=2)
    assert again.returncode == 0 and len(starts(folder)) == 4
    assert "4 of 4 runs done (4 of them before), 0 failed" in again.stdout


def test_a_result_names_the_versions_that_made_it(folder):
    assert run_queue(folder, tasks="a-b").returncode == 0
    head, _ = queue.read_result(folder / "results/learner/a-b/seed1.csv")
    packages = ("torch", "gymnasium", "mujoco")
    assert head["versions"] == ", ".join(f"{name} {version(name)}" for name in packages)


def test_a_longer_run_goes_on_from_the_shorter_one_and_says_so(folder):
    assert run_queue(folder, tasks="a-b").returncode == 0
    assert run_queue(folder, tasks="a-b", total=1200).returncode == 0
    assert [how for *_, how in starts(folder)] == ["new", "resumed"] and steps(folder) == 12
    head, rows = queue.read_result(folder / "results/learner/a-b/seed1.csv")
    assert rows[-1]["env_steps"] == 1200 and head["continued"] == "from a run of 1,000 steps"
    assert run_queue(folder, tasks="a-b", total=1400).returncode == 0
    head, _ = queue.read_result(folder / "results/learner/a-b/seed1.csv")
    assert head["continued"] == "from a run of 1,000 steps, then a run of 1,200 steps"


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *who, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_result_names_the_commit_of_the_scripts_own_checkout(folder):
    other = folder / "checkout"
    other.mkdir()
    (other / "learner.py").write_text(LEARNER)
    git(other, "init", "-q"), git(other, "add", "."), git(other, "commit", "-qm", "one")
    one = git(other, "rev-parse", "--short", "HEAD")
    assert run_queue(folder, tasks="a-b", script="checkout/learner.py").returncode == 0
    results = folder / "results/learner"
    assert queue.read_result(results / "a-b/seed1.csv")[0]["commit"] == one
    (other / "learner.py").write_text(LEARNER + "\n# changed\n")
    done = run_queue(folder, tasks="a-b,c-d", script="checkout/learner.py")
    assert queue.read_result(results / "c-d/seed1.csv")[0]["commit"] == f"{one}+changed"
    assert "1 of those before are of an earlier checkout/learner.py" in done.stdout
    assert run_queue(folder, tasks="a-b", total=1100, script="checkout/learner.py").returncode == 0
    commit = queue.read_result(results / "a-b/seed1.csv")[0]["commit"]
    assert commit == f"{one}, from about step 1,000 on {one}+changed"


def test_a_dry_run_prints_commands_that_a_scheduler_can_run_and_the_queue_collects(folder):
    assert run_queue(folder, tasks="a-b").returncode == 0
    done = run_queue(folder, "--dry-run", tasks="a-b,c-d", seeds=2)
    assert done.returncode == 0 and len(starts(folder)) == 1
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.startswith("python learner.py --env-id") for line in lines)
    assert [line.split("--run-dir ")[1] for line in lines] == [
        f"runs/benchmark/learner/{name}" for name in ("c-d/seed1", "a-b/seed2", "c-d/seed2")
    ]
    assert list(folder.glob("results/learner/*/*")) == [folder / "results/learner/a-b/seed1.csv"]
    for line in lines:
        words = [sys.executable, *shlex.split(line)[1:]]
        subprocess.run(words, cwd=folder, check=True)
    assert len(starts(folder)) == 4
    assert run_queue(folder, tasks="a-b,c-d", seeds=2).returncode == 0
    assert len(starts(folder)) == 4  # what was there is taken, nothing is run again
    head, rows = queue.read_result(folder / "results/learner/c-d/seed2.csv")
    assert head["commit"] == "unknown, collected at unknown" and rows[-1]["env_steps"] == 1000


def test_a_dry_run_of_an_interrupted_run_resumes_it(folder):
    process = start_queue(folder, tasks="a-b", pause=0.1)
    wait_until(lambda: steps(folder) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    line = run_queue(folder, "--dry-run", tasks="a-b", pause=0.1).stdout
    assert line.endswith("--resume runs/benchmark/learner/a-b/seed1\n")


def test_workers_are_started_by_torchrun(folder):
    done = run_queue(folder, "--dry-run", tasks="a-b", processes=2)
    launcher = "python -m torch.distributed.run --standalone --nproc-per-node 2 learner.py --env-id"
    assert done.stdout.startswith(launcher)


def test_a_run_that_a_scheduler_has_under_way_is_left_alone(folder):
    line = run_queue(folder, "--dry-run", tasks="a-b", pause=0.1).stdout
    words = [sys.executable, *shlex.split(line)[1:]]
    outside = subprocess.Popen(words, cwd=folder)
    wait_until(lambda: steps(folder) >= 1)
    outside.send_signal(signal.SIGSTOP)  # so that it is not over before the queue looks
    inside = start_queue(folder, tasks="a-b", pause=0.1)
    wait_until(lambda: "1 elsewhere" in (folder / "out").read_text(), inside)
    outside.send_signal(signal.SIGCONT)
    assert outside.wait(60) == 0 and inside.wait(60) == 0
    assert len(starts(folder)) == 1 and (folder / "results/learner/a-b/seed1.csv").exists()


def test_after_kill_9_of_queue_and_run_the_same_command_goes_on_to_the_same_result(folder):
    process = start_queue(folder, tasks="a-b", pause=0.1)
    wait_until(lambda: steps(folder) >= 3, process)
    pid = int(starts(folder)[0][0])
    os.kill(process.pid, signal.SIGKILL), os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(pid))
    assert not (folder / "results").exists() and steps(folder) < 10
    done = run_queue(folder, tasks="a-b", pause=0.1)
    assert done.returncode == 0 and [how for *_, how in starts(folder)] == ["new", "resumed"]
    assert run_queue(folder, tasks="a-b", label="whole").returncode == 0
    resumed, whole = (folder / f"results/{x}/a-b/seed1.csv" for x in ("learner", "whole"))
    assert timeless(resumed) == timeless(whole)
    assert "continued" not in queue.read_result(resumed)[0]


def test_a_run_that_outlived_its_queue_is_waited_for_and_not_started_twice(folder):
    process = start_queue(folder, tasks="a-b", pause=0.3)
    wait_until(lambda: steps(folder) >= 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pid = int(starts(folder)[0][0])
    os.kill(pid, signal.SIGSTOP)  # so that it is not over before the second queue looks
    second = start_queue(folder, tasks="a-b", pause=0.3)
    wait_until(lambda: "1 elsewhere" in (folder / "out").read_text(), second)
    assert len(starts(folder)) == 1 and alive(pid)
    os.kill(pid, signal.SIGCONT)
    assert second.wait(60) == 0 and not alive(pid) and len(starts(folder)) == 1
    rows = timeless(folder / "results/learner/a-b/seed1.csv")
    assert rows[-1]["env_steps"] == 1000


def test_ctrl_c_lets_each_run_save_once_and_the_same_command_goes_on(folder):
    process = start_queue(folder, tasks="a-b", pause=0.1)
    wait_until(lambda: steps(folder) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: all of its foreground group
    assert process.wait(60) == 130
    assert "the same command goes on" in (folder / "out").read_text()
    run_dir = folder / "runs/benchmark/learner/a-b/seed1"
    assert int((run_dir / "checkpoint.pt").read_text()) == 100 * steps(folder) < 1000
    assert run_dir.with_suffix(".log").read_text() == "saved, as asked\n"
    assert run_queue(folder, tasks="a-b", pause=0.1).returncode == 0
    assert starts(folder)[1][2] == "resumed"


def test_failures_are_reported_with_the_end_of_their_log_and_the_rest_is_done(folder):
    done = run_queue(folder, tasks="bad-task,a-b,empty-task,short-task", workers=1)
    assert done.returncode == 1
    assert "1 of 4 runs done (0 of them before), 3 failed" in done.stdout
    end = done.stdout.split("bad-task seed 1 failed (exit code 1)")[-1]
    assert "first line\nthis task cannot be learned" in end and "bad-task/seed1.log" in end
    for task in ("empty-task", "short-task"):
        assert f"{task} seed 1 failed (it ended well, but left no result" in done.stdout
    assert sorted(path.parent.name for path in folder.glob("results/learner/*/*")) == ["a-b"]
    killed = start_queue(folder, tasks="c-d", pause=0.1)
    wait_until(lambda: steps(folder, "c-d") >= 1, killed)
    os.kill(int(starts(folder)[-1][0]), signal.SIGKILL)
    assert killed.wait(60) == 1
    assert "c-d seed 1 failed (exit code -9)" in (folder / "out").read_text()


def test_the_table_says_what_runs_what_is_done_and_when_it_will_end(folder):
    done = run_queue(folder, tasks="a-b,c-d,e-f", pause=0.05, workers=1)
    counts = r"\d\d:\d\d  1 of 3 done, 1 running, 1 waiting; the end in 0 min, \w+ \d\d:\d\d\n"
    assert re.search(counts, done.stdout)
    assert re.search(r"c-d +seed 1 +running +0 / 1,000\n", done.stdout)
    assert "done         after 0 min" in done.stdout


def test_the_expected_end_counts_on_all_workers_at_the_pace_seen(folder):
    options = dict(script="learner.py", runs=str(folder / "runs"), results=str(folder))
    args = queue.Args(total_timesteps=1000, **options)
    jobs = [queue.Job(args, [], task, 1) for task in ("a-b", "c-d", "e-f", "g-h")]
    assert queue.expected_end(jobs, 2) is None
    for job, step in zip(jobs, (500, 750)):  # both began 100 seconds ago
        job.folder.mkdir(parents=True)
        (job.folder / "progress.csv").write_text(f"global_step\n{step}\n")
        job.state, job.process, job.first_step = "running", object(), 0
        job.started = time.time() - 100
    paces = 0.2, 100 / 750  # seconds a step
    mean = sum(paces) / 2
    one, two = 500 * paces[0] + 1000 * mean, 250 * paces[1] + 1000 * mean
    assert queue.expected_end(jobs, 2) == pytest.approx(max(one, two), rel=0.01)
    assert queue.expected_end(jobs, 4) == pytest.approx(1000 * mean, rel=0.01)


REFUSED = [
    (["--tasks", "dmc19"], "'dmc19'"),
    (["--tasks", "smoke,nonsense"], "'nonsense'"),
    (["--seeds", "x"], "'x'"),
    (["--seeds", "0"], "'0'"),
    (["--seeds=-1"], "'-1'"),
    (["--seeds", "1,x"], "'1,x'"),
    (["--seeds", ""], "''"),
    (["--script", "nowhere.py"], "nowhere.py"),
    (["--workers", "0"], "--workers"),
    (["--processes", "0"], "--processes"),
    (["--total-timesteps", "0"], "--total-timesteps"),
]


@pytest.mark.parametrize("words, named", REFUSED)
def test_what_cannot_be_run_is_refused_in_one_sentence(folder, words, named):
    command = [sys.executable, BENCHMARK / "run.py", "--script", "learner.py", *words]
    pipes = dict(cwd=folder, env=surroundings(), capture_output=True, text=True)
    done = subprocess.run(command, **pipes)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("run.py: ") and named in done.stderr and not starts(folder)


def test_a_result_of_other_flags_does_not_pass_for_this_one(folder):
    assert run_queue(folder, tasks="a-b").returncode == 0
    other = run_queue(folder, "--", "--pause", "0", "--epsilon", "0.2", tasks="a-b")
    assert other.returncode == 2 and "--label" in other.stderr and other.stderr.count("\n") == 1
    assert run_queue(folder, "--", "--pause", "0.0", tasks="a-b", threads=2).returncode == 0
    assert len(starts(folder)) == 1


def test_task_sets_ids_and_seeds_are_those_meant(folder):
    sizes = dict(dmc18=18, paper15=15, ablation3=3, core6=6, humanoid=3, atari5=5, smoke=1)
    assert {name: len(queue.tasks_of(name)) for name in queue.TASKS} == sizes
    named = queue.tasks_of("smoke,walker-walk,ablation3")
    assert named == ["cartpole-swingup", "walker-walk", "acrobot-swingup", "hopper-stand"]
    assert [queue.seeds_of(text) for text in ("3", "2,5", "7,")] == [[1, 2, 3], [2, 5], [7]]
    ids = {"a-b": "dm_control/a-b-v0", "ALE/Pong-v5": "ALE/Pong-v5", "Ant-v5": "Ant-v5"}
    ids["my.module:Task-v0"] = "my.module:Task-v0"
    args = queue.Args(script="learner.py", results=str(folder))
    for task, env_id in ids.items():
        job = queue.Job(args, [], task, 1)
        assert job.flags[1] == env_id and len(job.result.relative_to(folder).parts) == 3


def test_mpo_continuous_goes_on_from_its_checkpoint_after_kill_9(tmp_path):
    settings = tiny(total_timesteps=800, eval_every=100)
    for name in ("--total-timesteps", "--threads", "--env-id"):  # these are the queue's own
        del settings[settings.index(name) : settings.index(name) + 2]
    options = dict(script=str(ROOT / "mpo_continuous.py"), tasks="cartpole-swingup", total=800)
    process = start_queue(tmp_path, "--", *settings, **options)
    run_dir = tmp_path / "runs/benchmark/mpo_continuous/cartpole-swingup/seed1"
    # the checkpoint of step 0 is there at once; this is of step 100 or later
    wait_until(lambda: last_step(run_dir) >= 150, process)
    pids = [pid for pid in os.listdir("/proc") if pid.isdecimal()]
    run = next(int(pid) for pid in pids if parent(pid) == process.pid)
    process.kill(), os.kill(run, signal.SIGKILL)
    process.wait()
    before = list(csv.DictReader((run_dir / "progress.csv").read_text().splitlines()))
    assert int(before[-1]["global_step"]) < 800
    done = run_queue(tmp_path, "--", *settings, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    head, rows = queue.read_result(tmp_path / "results/mpo_continuous/cartpole-swingup/seed1.csv")
    assert [row["env_steps"] for row in rows] == [100.0 + 50 * n for n in range(15)]
    seconds = float(before[0]["charts/seconds"])
    assert rows[0]["seconds"] == pytest.approx(seconds, abs=0.06)  # resumed, not run again
    evaluated = [row for row in rows if row["eval_return"] is not None]
    assert [row["env_steps"] for row in evaluated] == [100.0 * n for n in range(1, 9)]
    assert all(
        row["eval_returns"] == [pytest.approx(row["eval_return"], abs=0.01)] for row in evaluated
    )
    assert json.loads(head["args"])["epsilon"] == 0.1


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:  # it has just ended
        return None


# ---- Baselines.
def test_a_baseline_goes_through_the_queue_and_is_evaluated_as_mpo_is(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    own = flags(algorithm="sac", time_limit=50, eval_every=100, eval_episodes=2)
    options = dict(script=str(BENCHMARK / "baselines.py"), tasks="walker-walk", label="sac")
    done = run_queue(tmp_path, "--", *own, total=130, **options)
    assert done.returncode == 0, done.stdout
    head, rows = queue.read_result(tmp_path / "results/sac/walker-walk/seed1.csv")
    assert [row["env_steps"] for row in rows] == [50, 100, 150]
    evaluated = [row["eval_return"] is not None for row in rows]
    assert evaluated == [False, True, True]
    assert json.loads(head["args"])["algorithm"] == "sac"
    model = sb3.SAC.load(tmp_path / "runs/benchmark/sac/walker-walk/seed1/model.zip")
    args = mpo_continuous.Args(env_id="dm_control/walker-walk-v0", time_limit=50, eval_episodes=2)

    def policy(state):
        return torch.from_numpy(model.predict(state.numpy(), deterministic=True)[0]), torch.eye(6)

    returns = mpo_continuous.evaluate(mpo_continuous.make_env(args), policy, args, tmp_path)
    assert rows[-1]["eval_return"] == pytest.approx(np.mean(returns), abs=0.006)
    assert rows[-1]["eval_returns"] == pytest.approx(returns, rel=1e-5)


SETTINGS = [
    ("ppo", [100, 100], [200, 200], 5e-4),
    ("ddpg", [100, 100], [200, 200], 5e-4),
    ("sac", [256, 256], [256, 256], 3e-4),
    ("td3", [400, 300], [400, 300], 1e-3),
]


@pytest.mark.parametrize("algorithm, policy, critic, rate", SETTINGS)
def test_baselines_have_the_sizes_and_the_optimiser_that_the_report_says(
    algorithm, policy, critic, rate
):
    sb3 = pytest.importorskip("stable_baselines3")
    import baselines

    chosen = baselines.settings(algorithm, 1)
    model = getattr(sb3, algorithm.upper())("MlpPolicy", "Pendulum-v1", device="cpu", **chosen)
    parts = model.policy
    if algorithm == "ppo":
        extractor = parts.mlp_extractor
        networks, optimisers = [extractor.policy_net, extractor.value_net], [parts.optimizer]
    else:
        actor = parts.actor.latent_pi if algorithm == "sac" else parts.actor.mu
        networks = [actor, parts.critic.q_networks[0]]
        optimisers = [parts.actor.optimizer, parts.critic.optimizer]
    for network, sizes in zip(networks, (policy, critic)):
        widths = [layer.out_features for layer in network if isinstance(layer, torch.nn.Linear)]
        assert widths[: len(sizes)] == sizes
    for optimiser in optimisers:
        assert type(optimiser) is torch.optim.Adam and optimiser.param_groups[0]["lr"] == rate
    assert (algorithm in ("ddpg", "td3")) == (getattr(model, "action_noise", None) is not None)


def test_dqn_plays_the_games_of_mpo_atari_with_its_layers_and_is_evaluated_as_it_is(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    import dqn

    import mpo_atari

    own = flags(eval_every=200, eval_episodes=2, log_every=100)
    options = dict(script=str(BENCHMARK / "dqn.py"), tasks="MinAtar/Breakout-v1", label="dqn")
    done = run_queue(tmp_path, "--", *own, total=400, **options)
    assert done.returncode == 0, done.stdout
    _, rows = queue.read_result(tmp_path / "results/dqn/MinAtar-Breakout-v1/seed1.csv")
    assert [row["env_steps"] for row in rows] == [100, 200, 300, 400]
    assert [row["eval_return"] is not None for row in rows] == [False, True, False, True]

    folder = tmp_path / "runs/benchmark/dqn/MinAtar-Breakout-v1/seed1"
    model = sb3.DQN.load(folder / "model.zip", device="cpu")
    args = mpo_atari.Args(env_id="MinAtar/Breakout-v1")
    games = mpo_atari.make_env(args, 2)
    assert rows[-1]["eval_returns"] == mpo_atari.play_games(games, model.q_net, args, tmp_path)
    network = mpo_atari.Network((10, 10, 4), 3, args)
    assert [tuple(x.shape) for x in model.q_net.parameters()] == [
        tuple(x.shape) for x in network.parameters()
    ]

    game = dqn.OneGame(mpo_atari.Args(env_id="Paying-v0", time_limit=3))
    game.reset()
    learned = [game.step(0)[1] for _ in range(3)]
    assert learned == [1.0, 1.0, 1.0] and game.scores == [21.0, 0.0]


class Paying(gym.Env):
    """Each step is worth 7."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 7.0, False, False, {}


gym.register("Paying-v0", Paying)


@pytest.mark.parametrize("script", ["baselines.py", "dqn.py"])
def test_without_stable_baselines3_it_says_what_to_install(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(BENCHMARK / script), run_name="__main__")
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"{script}: ") and sentence.count("\n") == 1
    assert "pip install stable-baselines3" in sentence


def test_the_list_of_all_runs_is_one_of_commands_whose_results_the_report_knows():
    import report

    everything = ["bash", str(BENCHMARK / "everything.sh"), "--dry-run", "--results", "nowhere"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pipes = dict(env=surroundings() | {"PATH": path}, capture_output=True, text=True)
    done = subprocess.run(everything, **pipes)
    assert done.returncode == 0, done.stderr
    printed = [shlex.split(line) for line in done.stdout.splitlines() if line]
    commands = [words for words in printed if words[0] == "python"]
    assert len(commands) > 100 and commands == printed
    labels = set()
    for words in commands:
        folder = Path(words[words.index("--run-dir") + 1])
        labels.add(folder.parent.parent.relative_to("runs/benchmark").as_posix())
    scales = {label for label in labels if label.startswith("epg/")}
    assert len(scales) == 3
    assert {label.removeprefix("time/") for label in labels - scales} == report.OURS.keys() - {
        "td3"
    }
