"""benchmark/: the queue with real processes and real kills, the CSVs, the baselines, and the report made from them."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, mpo_continuous, scripts_with
from running import flags, surroundings, tiny, train, wait_until
from running import timeless as logged
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("matplotlib")
BENCHMARK = ROOT / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import report  # noqa: E402
import run as queue  # noqa: E402
import sensitivity  # noqa: E402
import speed  # noqa: E402
import study  # noqa: E402

# A script as the queue expects it, without the learning: a row for each 100 steps, a checkpoint after each row.
# It notes each start, saves when asked to stop, and dies if asked twice, as the real ones do.
LEARNER = """
import json, os, pathlib, signal, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, total, pause = pathlib.Path(given["--run-dir"]), int(given["--total-timesteps"]), float(given["--pause"])
with open("starts", "a") as file:
    print(os.getpid(), folder, "resumed" if "--resume" in given else "new", file=file)
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
(folder / "args.json").write_text(json.dumps({"pause": pause, "run_dir": str(folder)}))
progress, checkpoint = folder / "progress.csv", folder / "checkpoint.pt"
head = "global_step,charts/episodic_return,charts/seconds,charts/updates,eval/episodic_return\\n"
rows = progress.read_text().splitlines(True)[1:] if "--resume" in given else []
step = int(checkpoint.read_text()) if "--resume" in given else 0
progress.write_text(head + "".join(row for row in rows if int(row.split(",")[0]) <= step))
while step < total:
    time.sleep(pause)
    step += 100
    with open(progress, "a") as file:
        evaluated = step if step % 200 == 0 else ""
        file.write(f"{step},{step / 7 + int(given['--seed'])},{step / 10},{step - 100},{evaluated}\\n")
    if asked:
        time.sleep(0.5)  # a checkpoint takes time
    aside = folder / "aside"
    aside.write_text(str(step)), aside.replace(checkpoint)
    if asked:
        print("saved, as asked")
        sys.exit(130)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "learner.py").write_text(LEARNER)
    return tmp_path


def command(*words, script="learner.py", pause=0.0, total=1000, workers=2, **options):
    words = [*flags(script=script, total_timesteps=total, workers=workers, results="results", **options), *words]
    extra = [] if "--" in words else ["--", "--pause", str(pause)]
    return [sys.executable, str(BENCHMARK / "run.py"), *words, *extra]


def run_queue(folder, *words, **options):
    return subprocess.run(command(*words, **options), cwd=folder, env=surroundings(), capture_output=True, text=True)


def start_queue(folder, *words, **options):
    out = open(folder / "out", "a")
    pipes = dict(stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    return subprocess.Popen(command(*words, **options), cwd=folder, env=surroundings(), **pipes)


def starts(folder):
    """(process id, folder, new or resumed) of each start of the script."""
    path = folder / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def steps(folder, task="a-b"):
    path = folder / f"runs/benchmark/learner/{task}/seed1/progress.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def alive(pid):
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def timeless(path):
    return [{name: row[name] for name in row if name != "seconds"} for row in queue.read_result(path)[1]]


# ---------------------------------------------------------------------------------------------------------------------
# The queue.
def test_each_run_leaves_a_csv_and_the_same_command_runs_nothing_again(folder):
    done = run_queue(folder, tasks="a-b,c-d", seeds=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 runs done (0 of them before), 0 failed" in done.stdout and len(starts(folder)) == 4
    head, rows = queue.read_result(folder / "results/learner/c-d/seed2.csv")
    assert re.fullmatch(r"[0-9a-f]{7,}(\+changed)?", head["commit"])
    asked = "--env-id dm_control/c-d-v0 --seed 2 --total-timesteps 1000 --threads 1 --pause 0.0"
    assert head["command"] == f"python learner.py {asked}" and json.loads(head["args"]) == {"pause": 0.0}
    assert [row["env_steps"] for row in rows] == [100.0 * n for n in range(1, 11)]
    for row in rows:
        step = row["env_steps"]
        assert row["train_return"] == pytest.approx(step / 7 + 2, abs=0.006) and row["seconds"] == step / 10
        assert row["updates"] == step - 100 and row["eval_return"] == (step if step % 200 == 0 else None)
    again = run_queue(folder, tasks="a-b,c-d", seeds=2)
    assert again.returncode == 0 and len(starts(folder)) == 4
    assert "4 of 4 runs done (4 of them before), 0 failed" in again.stdout
    longer = run_queue(folder, tasks="a-b", total=1200)
    assert longer.returncode == 0 and starts(folder)[4][2] == "resumed" and steps(folder) == 12
    assert queue.read_result(folder / "results/learner/a-b/seed1.csv")[1][-1]["env_steps"] == 1200


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
    resumed, whole = (folder / f"results/{label}/a-b/seed1.csv" for label in ("learner", "whole"))
    assert timeless(resumed) == timeless(whole)


def test_a_run_that_outlived_its_queue_is_waited_for_and_not_started_twice(folder):
    process = start_queue(folder, tasks="a-b", pause=0.3)
    wait_until(lambda: steps(folder) >= 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pid = int(starts(folder)[0][0])
    assert alive(pid)
    second = start_queue(folder, tasks="a-b", pause=0.3)
    wait_until(lambda: "1 elsewhere" in (folder / "out").read_text(), second)
    assert len(starts(folder)) == 1 and alive(pid)
    assert second.wait(60) == 0 and not alive(pid)
    assert len(starts(folder)) == 2  # to take the finished run's rows
    assert [row["env_steps"] for row in timeless(folder / "results/learner/a-b/seed1.csv")][-1] == 1000


def test_ctrl_c_lets_each_run_save_once_and_the_same_command_goes_on(folder):
    process = start_queue(folder, tasks="a-b", pause=0.1)
    wait_until(lambda: steps(folder) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: all of its foreground group
    assert process.wait(60) == 130
    assert "the same command goes on" in (folder / "out").read_text()
    saved = int((folder / "runs/benchmark/learner/a-b/seed1/checkpoint.pt").read_text())
    assert saved == 100 * steps(folder) < 1000
    assert (folder / "runs/benchmark/learner/a-b/seed1.log").read_text() == "saved, as asked\n"
    assert run_queue(folder, tasks="a-b", pause=0.1).returncode == 0 and starts(folder)[1][2] == "resumed"


def test_failures_are_reported_with_the_end_of_their_log_and_exit_code_1_and_the_rest_is_done(folder):
    done = run_queue(folder, tasks="bad-task,a-b,empty-task,short-task", workers=1)
    assert done.returncode == 1 and "1 of 4 runs done (0 of them before), 3 failed" in done.stdout
    end = done.stdout.split("bad-task seed 1 failed (exit code 1)")[-1]
    assert "first line\nthis task cannot be learned" in end and "bad-task/seed1.log" in end
    for task in ("empty-task", "short-task"):
        assert f"{task} seed 1 failed (it ended well, but left no result" in done.stdout
    assert sorted(path.parent.name for path in folder.glob("results/learner/*/*")) == ["a-b"]
    killed = start_queue(folder, tasks="c-d", pause=0.1)
    wait_until(lambda: steps(folder, "c-d") >= 1, killed)
    os.kill(int(starts(folder)[-1][0]), signal.SIGKILL)
    assert killed.wait(60) == 1 and "c-d seed 1 failed (exit code -9)" in (folder / "out").read_text()


def test_the_table_says_what_runs_what_is_done_and_when_it_will_end(folder):
    done = run_queue(folder, tasks="a-b,c-d,e-f", pause=0.05, workers=1)
    assert re.search(r"\d\d:\d\d  1 of 3 done, 1 running, 1 waiting; the end in 0 min, \w+ \d\d:\d\d\n", done.stdout)
    assert re.search(r"c-d +seed 1 +running +0 / 1,000\n", done.stdout) and "done         after 0 min" in done.stdout


def test_the_expected_end_counts_on_all_workers_at_the_pace_seen(folder):
    args = queue.Args(script="learner.py", total_timesteps=1000, runs=str(folder / "runs"), results=str(folder))
    jobs = [queue.Job(args, [], task, 1) for task in ("a-b", "c-d", "e-f", "g-h")]
    assert queue.expected_end(jobs, 2) is None
    for job, step in zip(jobs, (500, 750)):  # both began 100 seconds ago: 0.2 and 0.133 seconds a step
        job.folder.mkdir(parents=True)
        (job.folder / "progress.csv").write_text(f"global_step\n{step}\n")
        job.state, job.process, job.first_step, job.started = "running", object(), 0, time.time() - 100
    paces = 0.2, 100 / 750
    mean = sum(paces) / 2
    worker_one, worker_two = 500 * paces[0] + 1000 * mean, 250 * paces[1] + 1000 * mean
    assert queue.expected_end(jobs, 2) == pytest.approx(max(worker_one, worker_two), rel=0.01)
    assert queue.expected_end(jobs, 4) == pytest.approx(1000 * mean, rel=0.01)


@pytest.mark.parametrize("words, named", [
    (["--tasks", "dmc19"], "'dmc19'"), (["--tasks", "smoke,nonsense"], "'nonsense'"), (["--seeds", "x"], "'x'"),
    (["--seeds", "0"], "'0'"), (["--seeds=-1"], "'-1'"), (["--seeds", "1,x"], "'1,x'"), (["--seeds", ""], "''"),
    (["--script", "nowhere.py"], "nowhere.py"), (["--workers", "0"], "--workers"),
    (["--total-timesteps", "0"], "--total-timesteps"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_in_one_sentence(folder, words, named):
    done = subprocess.run([sys.executable, BENCHMARK / "run.py", "--script", "learner.py", *words], cwd=folder,
                          env=surroundings(), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("run.py: ") and named in done.stderr and not starts(folder)


def test_a_result_of_other_flags_does_not_pass_for_this_one(folder):
    assert run_queue(folder, tasks="a-b").returncode == 0
    other = run_queue(folder, "--", "--pause", "0", "--epsilon", "0.2", tasks="a-b")
    assert other.returncode == 2 and "--label" in other.stderr and other.stderr.count("\n") == 1
    assert run_queue(folder, "--", "--pause", "0.0", tasks="a-b", threads=2).returncode == 0
    assert len(starts(folder)) == 1


def test_task_sets_and_seeds_are_those_meant():
    assert {name: len(queue.tasks_of(name)) for name in queue.TASKS} == {
        "dmc18": 18, "paper15": 15, "ablation3": 3, "core6": 6, "humanoid": 3, "atari5": 5, "smoke": 1}  # fmt: skip
    assert queue.tasks_of("smoke,walker-walk,ablation3") == [
        "cartpole-swingup", "walker-walk", "acrobot-swingup", "hopper-stand"]  # fmt: skip
    assert [queue.seeds_of(text) for text in ("3", "2,5", "7,")] == [[1, 2, 3], [2, 5], [7]]


def test_mpo_continuous_goes_on_from_its_checkpoint_after_kill_9(tmp_path):
    settings = tiny(total_timesteps=1500, checkpoint_every=100)
    for name in ("--total-timesteps", "--threads", "--env-id"):  # these are the queue's own
        del settings[settings.index(name) : settings.index(name) + 2]
    options = dict(script=str(ROOT / "mpo_continuous.py"), tasks="cartpole-swingup", total=1500)
    process = start_queue(tmp_path, "--", *settings, **options)
    run_dir = tmp_path / "runs/benchmark/mpo_continuous/cartpole-swingup/seed1"
    wait_until((run_dir / "checkpoint.pt").exists, process)
    run = next(int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and parent(pid) == process.pid)
    process.kill(), os.kill(run, signal.SIGKILL)
    process.wait()
    before = list(csv.DictReader((run_dir / "progress.csv").read_text().splitlines()))
    assert int(before[-1]["global_step"]) < 1500
    done = run_queue(tmp_path, "--", *settings, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    head, rows = queue.read_result(tmp_path / "results/mpo_continuous/cartpole-swingup/seed1.csv")
    assert [row["env_steps"] for row in rows] == [100.0 + 50 * n for n in range(29)]
    assert rows[0]["seconds"] == pytest.approx(float(before[0]["charts/seconds"]), abs=0.06)  # resumed, not run again
    assert rows[-1]["eval_return"] is not None and json.loads(head["args"])["epsilon"] == 0.1


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:  # it has just ended
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Baselines.
def test_a_baseline_goes_through_the_queue_and_is_evaluated_as_mpo_is(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    own = flags(algorithm="sac", time_limit=50, eval_every=100, eval_episodes=2)
    script = str(BENCHMARK / "baselines.py")
    done = run_queue(tmp_path, "--", *own, script=script, tasks="walker-walk", label="sac", total=230)
    assert done.returncode == 0, done.stdout
    head, rows = queue.read_result(tmp_path / "results/sac/walker-walk/seed1.csv")
    assert [row["env_steps"] for row in rows] == [50, 100, 150, 200, 250]
    assert [row["eval_return"] is not None for row in rows] == [False, True, False, True, True]
    assert json.loads(head["args"])["algorithm"] == "sac"
    model = sb3.SAC.load(tmp_path / "runs/benchmark/sac/walker-walk/seed1/model.zip")
    env = mpo_continuous.make_env(mpo_continuous.Args(env_id="dm_control/walker-walk-v0", time_limit=50))
    returns = []
    for episode in range(2):
        state, _ = env.reset(seed=mpo_continuous.episode_seed(1, 1, episode))
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(torch.as_tensor(state, dtype=torch.float32).numpy(), deterministic=True)
            state, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    assert rows[-1]["eval_return"] == pytest.approx(np.mean(returns), abs=0.006)


@pytest.mark.parametrize("algorithm, policy, critic, rate", [
    ("ppo", [100, 100], [200, 200], 5e-4), ("ddpg", [100, 100], [200, 200], 5e-4),
    ("sac", [256, 256], [256, 256], 3e-4), ("td3", [400, 300], [400, 300], 1e-3),
])  # fmt: skip
def test_baselines_have_the_sizes_and_the_optimiser_that_the_report_says(algorithm, policy, critic, rate):
    sb3 = pytest.importorskip("stable_baselines3")
    import baselines

    chosen = baselines.settings(algorithm, 1)
    model = getattr(sb3, algorithm.upper())("MlpPolicy", "Pendulum-v1", device="cpu", **chosen)
    parts = model.policy
    if algorithm == "ppo":
        networks, optimisers = [parts.mlp_extractor.policy_net, parts.mlp_extractor.value_net], [parts.optimizer]
    else:
        actor = parts.actor.latent_pi if algorithm == "sac" else parts.actor.mu
        networks, optimisers = [actor, parts.critic.q_networks[0]], [parts.actor.optimizer, parts.critic.optimizer]
    for network, sizes in zip(networks, (policy, critic)):
        widths = [layer.out_features for layer in network if isinstance(layer, torch.nn.Linear)]
        assert widths[: len(sizes)] == sizes
    for optimiser in optimisers:
        assert type(optimiser) is torch.optim.Adam and optimiser.param_groups[0]["lr"] == rate
    assert (algorithm in ("ddpg", "td3")) == (getattr(model, "action_noise", None) is not None)


# ---------------------------------------------------------------------------------------------------------------------
# The report, on results made up so that every figure is known.
def make_result(results, label, task, seed, steps=100_000, height=1.0):
    """A row for each 1,000 steps: the training return is height * steps / 1000, the evaluation twice that."""
    path = results / label / task / f"seed{seed}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# commit: abc1234", "# command: python learner.py", "# args: {}"]
    lines.append("env_steps,train_return,eval_return,seconds,updates")
    for step in range(1000, steps + 1, 1000):
        value = height * step / 1000
        lines.append(f"{step},{value:.2f},{2 * value if step % 10_000 == 0 else ''},{step / 20},{step}")
    path.write_text("\n".join(lines) + "\n")


def read(results):
    return report.read_runs(results, report.result_files(results)[0])


def test_a_mark_is_the_mean_of_the_25_000_steps_before_it_and_the_evaluation_there(tmp_path):
    make_result(tmp_path, "mpo_continuous", "walker-walk", 1, steps=120_000)
    run = read(tmp_path)["mpo_continuous"]["walker-walk"][1]
    assert run.training(100_000) == pytest.approx(np.mean(range(76, 101))) and run.evaluation(100_000) == 200
    assert run.training(250_000) is None and run.evaluation(250_000) is None
    rows = [{"env_steps": step, "train_return": 5.0, "eval_return": step / 1000} for step in (85_000, 92_000, 98_000)]
    short = report.Run(tmp_path, {}, rows)
    assert short.training(100_000) is None and short.evaluation(100_000) is None
    rows.append({"env_steps": 101_000, "train_return": 9.0, "eval_return": None})  # an episode across the mark
    assert short.training(100_000) == 5 and short.evaluation(100_000) == 98


def test_the_interquartile_mean_weighs_tasks_alike_and_its_interval_resamples_the_seeds_of_each_task():
    column = [np.array([[1.0], [2.0], [3.0], [100.0]])]
    assert report.with_interval(column, report.iqm)[0] == pytest.approx([2.5])
    mean = lambda scores: scores.mean(-2)  # noqa: E731
    one, three = np.array([[10.0]]), np.array([[1.0], [2.0], [3.0]])
    point, (low, high) = report.with_interval([one, three], mean)
    assert point == pytest.approx([6.0])  # the mean of 10 and 2, not of all four runs
    assert low == pytest.approx([5.5], abs=0.2) and high == pytest.approx([6.5], abs=0.2)
    assert np.ravel(report.with_interval([one, one], mean)[1]).tolist() == [10, 10]
    two = report.with_interval([np.array([[0.0], [4.0]])], mean)
    assert two[0] == [2.0] and np.ravel(two[1]).tolist() == [0, 4]


def test_aggregates_are_those_of_rliable():
    pytest.importorskip("rliable")
    from rliable import library
    from rliable.metrics import aggregate_iqm

    scores = np.random.default_rng(1).gamma(2.0, 200.0, size=(7, 5))  # [seeds, tasks]
    ours = [column[:, None] for column in scores.T]
    taus = np.array([100.0, 300.0, 600.0])
    point, interval = report.with_interval(ours, report.iqm)
    share, shares = report.with_interval(ours, lambda x: (x > taus).mean(-2))
    statistic = lambda x: np.array([aggregate_iqm(x)])  # noqa: E731
    theirs = library.get_interval_estimates({"": scores}, statistic, reps=10_000)
    profile = library.create_performance_profile({"": scores}, taus)
    assert point == pytest.approx(theirs[0][""]) and share == pytest.approx(profile[0][""])
    # two bootstraps: the ends of their intervals differ by far less than a tenth of the length
    assert interval == pytest.approx(theirs[1][""], abs=0.1 * np.ptp(interval))
    assert shares == pytest.approx(profile[1][""], abs=1.1 / scores.size)


def test_tables_hold_our_figures_beside_the_published_and_say_what_is_missing(tmp_path):
    for seed, height in ((1, 1.0), (2, 3.0)):
        make_result(tmp_path, "mpo_continuous", "walker-walk", seed, height=height)
    make_result(tmp_path, "mpo_continuous", "cheetah-run", 1, steps=40_000)
    make_result(tmp_path, "sac", "walker-walk", 1)
    runs, published = read(tmp_path), report.read_published()
    table = report.published_table(runs, published, 100_000)
    assert "| walker-walk | 176 | 2 | 400 | 281 | 250 | 301 | 396 | 38 | 461 |" in table
    assert "| cheetah-run | – | – | – | 187 |" in table and "**mean of our 1 task** | 176 |  | 400 | 281 |" in table
    assert "| **mean of all 18** | – |  | – | 287 | 318 | 331 | 342 | 66 | 442 |" in table
    text = report.readme(runs, published, tmp_path, drawn=[])
    assert "| walker-walk | 176 / 400 (2) | 88 / 200 (1) | – | – | – |" in text and "It rests on 4 runs" in text
    assert "| sac | [walker-walk seed 1](results/sac/walker-walk/seed1.csv) | 100,000 | 38 | 100 | 88 | 200 |" in text
    for task in report.SUITE:
        make_result(tmp_path, "mpo_continuous", task, 1)
    full = report.published_table(read(tmp_path), published, 100_000)
    assert "mean of our" not in full and "| **mean of all 18** | 93 |  | 211 | 287 |" in full


@pytest.mark.parametrize("amount", ["little", "some", "much"])
def test_the_report_draws_what_there_is(tmp_path, amount):
    results = tmp_path / "results"
    make_result(results, "mpo_continuous", "walker-walk", 1, steps=20_000 if amount == "little" else 100_000)
    if amount == "much":
        for task in ("walker-walk", "acrobot-swingup", "hopper-stand"):
            for label in ("mpo_continuous", "mpo_parametric", "mpo_parametric-epg", "sac"):
                for seed in (1, 2):
                    make_result(results, label, task, seed, height=seed)
        for seed in (1, 2):
            make_result(results, sensitivity.BASE_LABEL, "walker-walk", seed, height=seed)
        make_result(results, "sensitivity/epsilon-times-3", "walker-walk", 1, steps=50_000)
        make_result(results, "sensitivity/epsilon-over-3", "walker-walk", 1, steps=50_000, height=2)
    words = [sys.executable, BENCHMARK / "report.py", "--results", results, "--output", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, env=surroundings())
    assert done.returncode == 0 and done.stderr == "", done.stderr
    names = {"training", "evaluation", "wall-clock"}
    names |= {"little": set(), "some": {"aggregate"}, "much": {"aggregate", "ablation", "sensitivity"}}[amount]
    files = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.glob("figures/*")} == files
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(((?:figures|results)/.+?)\)", text)
    assert len(links) > 3 and all((tmp_path / link).exists() for link in links)
    if amount == "much":
        assert "| walker-walk, epsilon | 76 / 200 (1) | 57 / 150 (2) | 38 / 100 (1) |" in text
        assert "| MPO | 3 | 2 | " in text and "| SAC | 3 | 2 | " in text


def test_no_results_are_refused_in_one_sentence(tmp_path):
    words = [sys.executable, BENCHMARK / "report.py", "--results", tmp_path, "--output", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr


def test_only_csvs_that_git_knows_are_reported(tmp_path):
    for seed in (1, 2):
        make_result(tmp_path, "sac", "walker-walk", seed)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "sac/walker-walk/seed1.csv"], check=True)
    files, others = report.result_files(tmp_path)
    assert [path.name for path in files] == ["seed1.csv"] and others == 1
    assert len(report.result_files(tmp_path, untracked=True)[0]) == 2


def test_the_tables_of_the_repository_are_those_its_csvs_give():
    results = BENCHMARK / "results"
    drawn = [path.stem for path in (BENCHMARK / "figures").glob("*.png")]
    text = report.readme(read(results), report.read_published(), results, drawn)
    same = text == (BENCHMARK / "README.md").read_text()
    assert same, "python benchmark/report.py writes another benchmark/README.md than the one that is here"


def test_the_table_on_the_front_page_is_the_one_the_csvs_give():
    text = (BENCHMARK.parent / "README.md").read_text()
    table = report.front_table(read(BENCHMARK / "results"), report.read_published())
    assert report.front_page(text, table) == text, "python benchmark/report.py writes another table into README.md"
    assert f"\n{table}\n" in text and report.front_page(text, "| other |").count("\n") < text.count("\n")


@pytest.mark.parametrize("mark", study.MARKS)
def test_the_tables_of_the_defaults_are_those_their_csvs_give(mark):
    text = (ROOT / "docs" / "defaults.md").read_text()
    assert f"\n{study.table(mark)}\n\n" in text, "python benchmark/study.py --table prints another table"


@pytest.mark.parametrize("names", study.COMPARED, ids=len)
def test_the_tables_of_long_runs_are_those_of_the_csvs(names):
    text = (ROOT / "docs" / "defaults.md").read_text()
    assert f"\n{study.long_table(names)}\n\n" in text, "python benchmark/study.py --table prints another last table"


def test_every_row_of_the_study_is_a_change_that_the_script_takes():
    names = [study.label(variant) for variant in study.VARIANTS]
    assert len(set(names)) == len(names) and not any(set(name) & set(" ,:()") for name in names)
    for words in study.VARIANTS.values():
        given = [word[2:].removeprefix("no-").replace("-", "_") for word in words if word.startswith("--")]
        assert all(hasattr(mpo_continuous.Args, name) for name in given)


EDITED = [variant for variant, change in study.VARIANTS.items() if isinstance(change, dict)]


@pytest.fixture(scope="module")
def plain_rows(tmp_path_factory):
    """What a short run of the script itself logs."""
    folder = tmp_path_factory.mktemp("plain")
    train(ROOT / study.SCRIPT, tiny(run_dir="run"), folder)
    return logged(folder / "run")


@pytest.mark.parametrize("variant", EDITED)
def test_a_row_of_the_study_without_a_flag_is_the_script_with_its_text_changed(variant, plain_rows, tmp_path):
    (tmp_path / study.SCRIPT).write_text(study.edited(variant))
    train(tmp_path / study.SCRIPT, tiny(run_dir="run"), tmp_path)
    assert logged(tmp_path / "run")[-1] != plain_rows[-1]


def test_the_published_figures_are_whole_and_name_their_source():
    published = report.read_published()
    assert list(published) == ["MPO", "DMPO", "D4PG", "DDPG", "PPO", "DreamerV3"]
    for tasks in published.values():
        assert set(tasks) == set(report.SUITE) and all(tuple(marks) == report.MARKS for marks in tasks.values())
    assert "DreamerV3" in (BENCHMARK / "published.csv").read_text().split("\n")[1]


def test_every_algorithm_has_a_colour_and_a_marker_of_its_own():
    drawn = [algorithm for label, algorithm in report.OURS.items() if label not in report.DISCRETE]
    drawn.append(report.PUBLISHED["DreamerV3"])
    assert len({algorithm.colour for algorithm in drawn}) == len({a.marker for a in drawn}) == len(drawn)
    mpo = {report.OURS[label].colour for label in ("mpo_continuous", "mpo_atari")}
    assert mpo == {report.PUBLISHED["MPO"].colour}


@pytest.mark.parametrize("script", scripts_with("gaussian_log_prob"))
def test_the_products_that_speed_py_times_are_those_of_an_update(script):
    """Nearly: the small ones of E-step and M-step are left out, and the counter leaves out the critic's last layer."""
    learner = speed.Continuous(script, compiled=False, episode_length=20)
    with FlopCounterMode(display=False) as counter:
        learner.update()
    _, needed = speed.bare_products(*learner.products())
    assert counter.get_total_flops() / 2 == pytest.approx(needed, rel=0.005)
    learner.live()
    assert learner.replay.size == 42  # two episodes of 20 steps and a last row


def test_sensitivity_scales_the_defaults_of_the_script(tmp_path):
    default = mpo_continuous.Args()
    scaled = {name: [name.replace("-", "_")] for name in ("epsilon", "epsilon-mu", "epsilon-sigma")}
    scaled["learning-rates"] = ["learning_rate", "policy_learning_rate"]
    assert list(scaled) == list(sensitivity.SETTINGS)
    for setting, names in scaled.items():
        for factor in sensitivity.FACTORS.values():
            words = sensitivity.flags(setting, factor)
            assert words[::2] == [f"--{name.replace('_', '-')}" for name in names]
            assert [float(word) for word in words[1::2]] == pytest.approx(
                [getattr(default, name) * factor for name in names], rel=1e-3
            )
    assert sorted(sensitivity.FACTORS.values()) == pytest.approx([1 / 3, 3])
    words = [sys.executable, BENCHMARK / "sensitivity.py", "--settings", "gamma"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "epsilon" in done.stderr and done.stderr.count("\n") == 1
