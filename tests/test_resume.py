"""A run that is stopped, by whatever means, goes on as if it had not been."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import (
    CONTINUOUS,
    INTERRUPTS,
    PATIENCE,
    Run,
    finish,
    flags,
    last_step,
    load,
    make_policy,
    resume_command,
    rows,
    same,
    stop,
    surroundings,
    timeless,
    tiny,
    together,
    train,
    wait_for_line,
    wait_for_row,
    wait_until,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


# An iteration is two episodes, 100 steps and 50 updates; the first takes 150. A checkpoint comes after every second or
# third, and the ring of the replay goes round before the end.
HALF, WHOLE = 600, 1200
STEPS = [300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200]  # at which rows are logged
SETTINGS = dict(trajectories=2, updates_per_step=0.5, learning_starts=300, target_period=30, buffer_size=700)
SETTINGS |= dict(checkpoint_every=250, eval_every=300, seed=4)


def begin(script, folder, name, total=WHOLE, **changes):
    return Run(script, tiny(**(SETTINGS | dict(total_timesteps=total, run_dir=name) | changes)), folder)


def complete(script, folder, name, total=WHOLE, **changes):
    process = finish(begin(script, folder, name, total, **changes))
    assert process.returncode == 0, process.err
    return process


def again(script, folder, name, *words):
    return Run(script, [*flags(resume=name), *words], folder)


def step_of_checkpoint(run_dir):
    path = Path(run_dir) / "checkpoint.pt"
    return load(path)["counters"]["global_step"] if path.exists() else 0


def killed_several_times(script, folder):
    """A run killed at random moments. Returns, for each, the steps of its last row and of its checkpoint by then."""
    moments, chance = [], random.Random(7)
    process = begin(script, folder, "killed")
    for earliest in (300, 500, 800):
        # after the second row past this step, at any time in the iterations that follow
        wait_for_row(process, folder / "killed", earliest)
        wait_for_row(process, folder / "killed", last_step(folder / "killed") + 1)
        time.sleep(chance.random() * 0.15)
        assert stop(process, signal.SIGKILL).returncode == -signal.SIGKILL
        moments.append((last_step(folder / "killed"), step_of_checkpoint(folder / "killed")))
        (folder / "killed/checkpoint.pt.tmp").write_bytes(b"a checkpoint cut short by the kill")
        process = again(script, folder, "killed")
    assert finish(process).returncode == 0, process.err
    return moments


def stopped_by_each_signal(script, folder):
    """A run stopped twice, first in the middle of its gradient steps. Returns what stood in its checkpoints then."""
    stops, process = [], begin(script, folder, "stopped")
    wait_for_line(process, "step ")  # printed after the first update
    for number in INTERRUPTS:
        stop(process, number)
        stops.append((process, number, load(folder / "stopped/checkpoint.pt")["counters"]))
        process = Run(script, resume_command(process), folder)
        if number == INTERRUPTS[0]:
            wait_for_row(process, folder / "stopped", 500)
    assert finish(process).returncode == 0, process.err
    return stops


def stopped_then_killed_twice(script, folder):
    """A run whose only checkpoint was made in the middle of an iteration, killed after that iteration was logged."""
    process = begin(script, folder, "both", total=HALF, checkpoint_every=0)
    wait_for_line(process, "step ")
    stop(process, signal.SIGTERM)
    assert load(folder / "both/checkpoint.pt")["counters"]["returns"]
    for _ in range(2):
        process = again(script, folder, "both")
        wait_for_line(process, "step ")  # old rows are dropped by then
        wait_for_row(process, folder / "both", 300)
        stop(process, signal.SIGKILL)
    assert finish(again(script, folder, "both")).returncode == 0


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    """The runs that these tests compare, made two at a time."""
    folder = tmp_path_factory.mktemp("runs")

    def half_extended():
        complete(script, folder, "extended", HALF)
        shutil.copytree(folder / "extended", folder / "half")
        assert finish(again(script, folder, "extended", *flags(total_timesteps=WHOLE))).returncode == 0

    moments, stops, *_ = together(
        lambda: killed_several_times(script, folder),
        lambda: stopped_by_each_signal(script, folder),
        lambda: stopped_then_killed_twice(script, folder),
        lambda: complete(script, folder, "whole"),
        half_extended,
        lambda: complete(script, folder, "other seed", HALF, seed=5),
    )
    return folder, moments, stops


def assert_same_run(a, b):
    """Equal to the bit: the metrics but for the time, the policy, and everything in the last checkpoint."""
    assert timeless(a) == timeless(b)
    assert (a / "model.pt").read_bytes() == (b / "model.pt").read_bytes()
    checkpoints = [load(run_dir / "checkpoint.pt") for run_dir in (a, b)]
    for checkpoint in checkpoints:
        del checkpoint["counters"]["seconds"]
    assert same(*checkpoints)


def test_the_same_seed_gives_the_same_numbers_to_the_last_digit(script, runs):
    folder, *_ = runs
    assert timeless(folder / "half") == timeless(folder / "whole")[:4]


def test_another_seed_gives_other_numbers(script, runs):
    folder, *_ = runs
    for a, b in zip(timeless(folder / "half"), timeless(folder / "other seed")):
        assert a["charts/episodic_return"] != b["charts/episodic_return"]
        assert a["losses/critic"] != b["losses/critic"]


def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(script, runs):
    folder, moments, _ = runs
    assert_same_run(folder / "whole", folder / "killed")
    assert any(row > checkpoint for row, checkpoint in moments), "no kill came after rows newer than the checkpoint"


def test_rows_logged_after_the_last_checkpoint_are_not_duplicated(script, runs):
    folder, *_ = runs
    for name in ("killed", "stopped", "extended"):
        assert [int(row["global_step"]) for row in rows(folder / name)] == STEPS


def test_a_run_stopped_in_the_middle_of_an_iteration_ends_as_the_uninterrupted_one(script, runs):
    folder, _, stops = runs
    assert_same_run(folder / "whole", folder / "stopped")
    in_the_middle = stops[0][-1]
    assert in_the_middle["returns"] and 1 <= in_the_middle["due"] < 150 and in_the_middle["updates"] > 0


def test_a_stopped_run_saves_prints_the_command_to_go_on_and_exits_with_the_signals_code(script, runs):
    folder, _, stops = runs
    for process, number, counters in stops:
        assert process.returncode == 128 + number
        assert process.err == ""
        assert resume_command(process) == ["--resume", "stopped"]
        assert counters["global_step"] >= 300


def test_a_run_extended_by_resume_ends_as_one_that_was_longer_from_the_start(script, runs):
    folder, *_ = runs
    assert last_step(folder / "half") == HALF
    assert_same_run(folder / "whole", folder / "extended")


def test_the_settings_of_a_resumed_run_are_those_it_began_with_and_the_new_length(script, runs):
    folder, *_ = runs
    whole, extended, killed = (
        json.loads((folder / n / "args.json").read_text()) for n in ("whole", "extended", "killed")
    )
    assert extended == whole | {"run_dir": "extended"}
    assert killed == whole | {"run_dir": "killed"}


def test_extending_to_the_default_number_of_steps_is_not_ignored(script, runs):
    """A flag that is given counts as given, even where its value is the default."""
    folder, *_ = runs
    shutil.copytree(folder / "half", folder / "long")
    total = script.Args().total_timesteps
    process = again(script, folder, "long", *flags(total_timesteps=total))
    wait_for_row(process, folder / "long", HALF + 1)
    assert stop(process, signal.SIGTERM).returncode == 128 + signal.SIGTERM
    assert json.loads((folder / "long/args.json").read_text())["total_timesteps"] == total


def test_tensorboard_shows_each_step_once_after_kills_and_stops(script, runs):
    folder, *_ = runs
    for name in ("whole", "killed", "stopped", "extended"):
        events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0})
        events.Reload()
        table = rows(folder / name)
        for column in ("charts/episodic_return", "losses/critic"):
            shown = [(event.step, event.value) for event in events.Scalars(column)]
            assert [step for step, _ in shown] == [int(row["global_step"]) for row in table]
            assert [value for _, value in shown] == pytest.approx([float(row[column]) for row in table])


def test_a_run_killed_after_resuming_in_the_middle_of_an_iteration_leaves_no_duplicates_either(script, runs):
    """The checkpoint is older than its own iteration's row, which is logged anew each time."""
    folder, *_ = runs
    steps = [int(row["global_step"]) for row in rows(folder / "both")]
    assert steps == [300, 400, 500, 600]
    events = EventAccumulator(str(folder / "both"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("losses/critic")] == steps


SIGNALLED = """
import importlib, os, signal, sys
import tyro
sys.path.insert(0, {folder!r})
script = importlib.import_module({name!r})
update, calls = script.update, []
def signalled(*args):
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return update(*args)
script.update = signalled
script.main(tyro.cli(script.Args.command_line))
"""


def test_a_stop_during_the_last_update_of_an_iteration_can_be_resumed(script, tmp_path):
    """There is one update for each episode of 50 steps; a real signal comes during the fifth."""
    path, words = Path(script.__file__), dict(trajectories=1, learning_starts=50, updates_per_step=0.02)
    (tmp_path / "signalled.py").write_text(SIGNALLED.format(folder=str(path.parent), name=path.stem))
    process = finish(begin(tmp_path / "signalled.py", tmp_path, "stopped", total=500, **words))
    assert process.returncode == 128 + signal.SIGTERM, process.err
    counters = load(tmp_path / "stopped/checkpoint.pt")["counters"]
    assert counters["updates"] == 5 and counters["due"] < 1 and counters["global_step"] == 250
    assert last_step(tmp_path / "stopped") == 250
    complete(script, tmp_path, "whole", total=500, **words)
    process = finish(again(script, tmp_path, "stopped"))
    assert process.returncode == 0, process.err
    assert len(rows(tmp_path / "whole")) == 10 and timeless(tmp_path / "whole") == timeless(tmp_path / "stopped")


LARGE = dict(batch_size=32, num_samples=32, window=8, critic_layers=(500, 500), trajectories=1, learning_starts=50)


def test_a_second_signal_stops_at_once_and_the_checkpoint_stays_good(script, tmp_path):
    process = begin(script, tmp_path, "run", checkpoint_every=50, updates_per_step=0.1, **LARGE)
    wait_until(lambda: (tmp_path / "run/checkpoint.pt").exists(), process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert stop(process, signal.SIGINT).returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert load(tmp_path / "run/checkpoint.pt")["counters"]["updates"] > 0


SAVE_FOR_EVER = """
import os, random, signal, sys, time
sys.path[:0] = sys.argv[1:2]
import importlib, torch
script = importlib.import_module(sys.argv[2])
torch.set_num_threads(1)  # threads do not survive a fork
agent = torch.nn.Linear(300, 300)
optimiser = torch.optim.Adam(agent.parameters())
replay = script.Replay(20_000, 24, 6)
replay.size = 20_000
chance, path, last, cut = random.Random(0), "checkpoint.pt", 0, 0
began = time.time()
script.save_checkpoint(".", agent, optimiser, replay, {"count": 0, "copy": [0]})
took = time.time() - began
for kill in range(20):
    child = os.fork()
    if child == 0:
        for count in range(last + 1, 10**9):
            replay.rows["state"].fill_(count)
            script.save_checkpoint(".", agent, optimiser, replay, {"count": count, "copy": [count]})
    began = os.stat(path).st_ino
    while os.stat(path).st_ino == began:
        time.sleep(0.001)
    time.sleep(2 * took * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut += os.path.exists(path + ".tmp")
    saved = torch.load(path, weights_only=True)
    count = saved["counters"]["count"]
    assert count >= last and saved["counters"]["copy"] == [count]
    assert (saved["replay"]["state"] == count).all() and len(saved["replay"]["state"]) == 20_000
    last = count
print(last, cut)
"""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(script, tmp_path):
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(Path(script.__file__).parent), script.__name__]
    done = subprocess.run(command, cwd=tmp_path, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    saved, cut = map(int, done.stdout.split())
    assert saved >= 3 and cut >= 3, "the kills should fall into the writing, and the writing should come to an end too"


def test_a_resumed_run_has_back_everything_it_had(script, runs):
    folder, *_ = runs
    saved = load(folder / "half/checkpoint.pt")
    args = script.read_args(folder / "half")
    env = script.make_env(args)
    sizes = {"state_size": env.observation_space.shape[0], "action_size": env.action_space.shape[0]}
    torch.manual_seed(99)
    names = [name.removeprefix("log_") for name in saved["agent"] if name.startswith("log_")]
    critic = script.Critic(**sizes, layers=args.critic_layers)
    agent = script.Agent(make_policy(script, env, args), critic, **dict.fromkeys(names, 2.0))
    learned = iter([*agent.policy.parameters(), *agent.critic.parameters(), *agent.multipliers()])
    groups = [[next(learned) for _ in group["params"]] for group in saved["optimiser"]["param_groups"]]
    optimiser = torch.optim.Adam([{"params": group} for group in groups], fused=True)
    replay = script.Replay(args.buffer_size, **sizes)
    assert not same(agent.state_dict(), saved["agent"])
    assert not torch.equal(torch.get_rng_state(), saved["random_state"])

    counters = script.load_checkpoint(folder / "half", agent, optimiser, replay)
    assert same(agent.state_dict(), saved["agent"])  # policy, critic, both targets, multipliers
    assert same(optimiser.state_dict(), saved["optimiser"])  # Adam's moments and counts
    assert same(replay.state_dict(), saved["replay"])
    assert torch.equal(torch.get_rng_state(), saved["random_state"])
    assert counters == saved["counters"]

    assert {"policy", "critic", "target_policy", "target_critic"} <= {name.split(".")[0] for name in saved["agent"]}
    assert len(names) >= 2
    assert len(saved["optimiser"]["state"]) == sum(map(len, groups)) and not list(learned)
    assert all(state["step"] == counters["updates"] > 0 for state in saved["optimiser"]["state"].values())
    assert counters["global_step"] == HALF and len(saved["replay"]["state"]) == HALF * 51 // 50
    assert (counters["returns"], counters["due"]) == ([], 0)


def test_a_finished_run_that_is_resumed_is_left_as_it_is(script, runs):
    folder, *_ = runs
    shutil.copytree(folder / "half", folder / "over")
    out = train(script, flags(resume="over"), folder).out
    assert "done" in out
    assert_same_run(folder / "half", folder / "over")
