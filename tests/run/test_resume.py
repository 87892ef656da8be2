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
    FIRST,
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
    wait_for_row,
    wait_until,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


# An iteration is two episodes, 100 steps and 50 updates; the first takes 150. Each third one ends
# with a checkpoint, and the ring of the replay goes round before the end.
HALF, WHOLE = 600, 1200
STEPS = [300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200]  # at which rows are logged
SETTINGS = dict(trajectories=2, updates_per_step=0.5, learning_starts=300, target_period=30)
SETTINGS |= dict(buffer_size=700, eval_every=300, seed=4)


def begin(script, folder, name, total=WHOLE, **changes):
    words = tiny(**(SETTINGS | dict(total_timesteps=total, run_dir=name) | changes))
    return Run(script, words, folder)


def complete(process):
    assert finish(process).returncode == 0, process.err
    return process


def again(script, folder, name, **changes):
    return Run(script, flags(resume=name, **changes), folder)


def killed(script, folder):
    """A run killed twice, at random moments. Returns the last rows' steps and the checkpoints'."""
    moments, chance = [], random.Random(7)
    process = begin(script, folder, "killed")
    for earliest in (400, 700):  # a checkpoint is at 300 and 600: later rows are lost
        wait_for_row(process, folder / "killed", earliest)
        time.sleep(chance.random() * 0.05)
        assert stop(process, signal.SIGKILL).returncode == -signal.SIGKILL
        step = load(folder / "killed/checkpoint.pt")["done"]["steps"]
        moments.append((last_step(folder / "killed"), step))
        (folder / "killed/checkpoint.tmp").write_bytes(b"a checkpoint cut short by the kill")
        process = again(script, folder, "killed")
    complete(process)
    return moments


def stopped(script, folder):
    """A run stopped by each signal. Returns how each part ended, and its checkpoint's step."""
    stops, process = [], begin(script, folder, "stopped")
    for number, step in zip(INTERRUPTS, (300, 700)):
        wait_for_row(process, folder / "stopped", step)
        stop(process, number)
        stops.append((process, number, load(folder / "stopped/checkpoint.pt")["done"]["steps"]))
        process = Run(script, resume_command(process), folder)
    complete(process)
    return stops


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    """The runs that these tests compare, made two at a time."""
    folder = tmp_path_factory.mktemp("runs")

    def extended():
        complete(begin(script, folder, "extended", HALF))
        shutil.copytree(folder / "extended", folder / "half")
        complete(again(script, folder, "extended", total_timesteps=WHOLE))

    moments, stops, *_ = together(
        lambda: killed(script, folder),
        lambda: stopped(script, folder),
        lambda: complete(begin(script, folder, "whole")),
        extended,
    )
    return folder, moments, stops


def assert_same_run(a, b):
    """Equal to the bit: the metrics but for the time, and everything in the files saved."""
    assert timeless(a) == timeless(b)
    for name in ("checkpoint.pt", "model.pt"):
        parts = [load(run_dir / name) for run_dir in (a, b)]
        for part in parts:
            for setting in ("run_dir", "resume", "total_timesteps"):
                del part["args"][setting]
            part.get("done", {}).pop("seconds", None)
            part.pop("table", None)  # the text of progress.csv
        assert same(*parts), name


def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(script, runs):
    folder, moments, _ = runs
    assert any(row > checkpoint for row, checkpoint in moments), "no row was lost"
    assert [int(row["global_step"]) for row in rows(folder / "killed")] == STEPS
    assert_same_run(folder / "whole", folder / "killed")


def test_a_run_stopped_by_sigint_and_sigterm_ends_as_the_uninterrupted_one(script, runs):
    folder, _, stops = runs
    assert [int(row["global_step"]) for row in rows(folder / "stopped")] == STEPS
    assert_same_run(folder / "whole", folder / "stopped")
    assert any(step not in (300, 600, 900, 1200) for *_, step in stops), "all were saved anyway"


def test_a_stopped_run_saves_prints_the_command_to_go_on_and_exits_with_the_signals_code(
    script, runs
):
    for process, number, step in runs[2]:
        assert (process.returncode, process.err) == (128 + number, "")
        assert resume_command(process) == ["--resume", "stopped"]
        assert f"is of step {step:,};" in process.out and step >= 300


def test_a_run_extended_by_resume_ends_as_one_that_was_longer_from_the_start(script, runs):
    folder, *_ = runs
    assert last_step(folder / "half") == HALF
    assert timeless(folder / "half") == timeless(folder / "whole")[:4]
    assert_same_run(folder / "whole", folder / "extended")


def test_the_settings_of_a_resumed_run_are_those_it_began_with_and_the_new_length(script, runs):
    folder, *_ = runs
    read = lambda name: json.loads((folder / name / "args.json").read_text())  # noqa: E731
    whole = read("whole")
    for name in ("extended", "killed"):
        assert read(name) == whole | {"run_dir": name, "resume": name}


def test_tensorboard_shows_each_step_once_after_kills_and_stops(script, runs):
    folder, *_ = runs
    for name in ("whole", "killed", "stopped", "extended"):
        events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0})
        events.Reload()
        table = rows(folder / name)
        for column in ("charts/episodic_return", "losses/critic"):
            shown = [(event.step, event.value) for event in events.Scalars(column)]
            assert [step for step, _ in shown] == STEPS
            logged = [float(row[column]) for row in table]
            assert [value for _, value in shown] == pytest.approx(logged)


def test_a_finished_run_that_is_resumed_is_left_as_it_is(script, runs):
    folder, *_ = runs
    shutil.copytree(folder / "half", folder / "over")
    assert "done" in train(script, flags(resume="over"), folder).out
    assert_same_run(folder / "half", folder / "over")


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_another_seed_gives_other_numbers(script, runs):
    folder, *_ = runs
    complete(begin(script, folder, "other seed", 400, seed=5))
    for a, b in zip(timeless(folder / "half"), timeless(folder / "other seed")):
        assert a["charts/episodic_return"] != b["charts/episodic_return"]
        assert a["losses/critic"] != b["losses/critic"]


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_setting_that_is_typed_counts_even_where_its_value_is_the_default(script, runs):
    folder, *_ = runs
    shutil.copytree(folder / "half", folder / "long")
    total = script.Args().total_timesteps
    process = again(script, folder, "long", total_timesteps=total, eval_episodes=2)
    wait_for_row(process, folder / "long", HALF + 1)
    assert stop(process, signal.SIGTERM).returncode == 128 + signal.SIGTERM
    settings = load(folder / "long/checkpoint.pt")["args"]
    assert (settings["total_timesteps"], settings["eval_episodes"]) == (total, 2)


LARGE = dict(batch_size=32, num_samples=32, critic_layers=(300, 300), trajectories=1)
LARGE |= dict(learning_starts=50, updates_per_step=1.0, eval_every=50)


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_second_signal_stops_at_once_and_the_checkpoint_stays_good(script, tmp_path):
    """An iteration takes about a second: 50 large gradient steps."""
    process = begin(script, tmp_path, "run", total=10_000, **LARGE)
    wait_until(lambda: (tmp_path / "run/checkpoint.pt").exists(), process)
    saved = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping after this iteration" in process.out)
    assert stop(process, signal.SIGINT).returncode == -signal.SIGINT
    assert load(tmp_path / "run/checkpoint.pt")["done"]["steps"] == saved


SAVE_FOR_EVER = """
import importlib, os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:2]
import torch
script = importlib.import_module(sys.argv[2])
torch.set_num_threads(1)  # threads do not survive a fork
policy, large = torch.nn.Linear(300, 300), torch.zeros(20_000, 30)
path, chance, last, cut = Path("checkpoint.pt"), random.Random(0), 0, 0

def save(count):
    content = {"count": count, "large": large.fill_(count)}
    script.write_saved(path, script.Args(seed=count), policy, content)

began = time.time()
save(0)
took = time.time() - began
for kill in range(20):
    child = os.fork()
    if child == 0:
        for count in range(last + 1, 10**9):
            save(count)
    began = os.stat(path).st_ino
    while os.stat(path).st_ino == began:
        time.sleep(0.001)
    time.sleep(2 * took * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut += path.with_suffix(".tmp").exists()
    saved = script.read_saved(path)
    count = saved["count"]
    assert count >= last and saved["args"]["seed"] == count
    assert (saved["large"] == count).all() and len(saved["large"]) == 20_000
    last = count
print(last, cut)
"""


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(script, tmp_path):
    words = [str(Path(script.__file__).parent), script.__name__]
    options = dict(env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    command = [sys.executable, "-c", SAVE_FOR_EVER, *words]
    done = subprocess.run(command, cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    saved, cut = map(int, done.stdout.split())
    assert saved >= 3 and cut >= 3, "kills should fall into the writing, and some writings end"


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_resumed_run_has_back_everything_it_had(script, runs):
    folder, *_ = runs
    saved = load(folder / "half/checkpoint.pt")
    args = script.Args(
        **saved["args"] | {"resume": str(shutil.copytree(folder / "half", folder / "back"))}
    )
    env = script.make_env(args)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    torch.manual_seed(99)
    names = [name.removeprefix("log_") for name in saved["agent"] if name.startswith("log_")]
    critic = script.Critic(*sizes, args)
    agent = script.Agent(make_policy(script, env, args), critic, **dict.fromkeys(names, 2.0))
    own = agent.parameters(recurse=False)
    groups = [agent.policy.parameters(), agent.critic.parameters(), own]
    optimiser = torch.optim.Adam([{"params": list(group)} for group in groups], fused=True)
    replay = script.Replay(args.buffer_size, *sizes)
    assert not same(agent.state_dict(), saved["agent"])
    assert not torch.equal(torch.get_rng_state(), saved["random"])

    run = script.Run(args, agent=agent, optimiser=optimiser, replay=replay)
    run.writer.close()
    assert same(agent.state_dict(), saved["agent"])  # networks, both targets, multipliers
    assert same(optimiser.state_dict(), saved["optimiser"])  # Adam's moments and counts
    assert same(replay.state_dict(), saved["replay"])
    assert torch.equal(torch.get_rng_state(), saved["random"])
    assert run.done == saved["done"] and run.table == saved["table"]

    parts = {name.split(".")[0] for name in saved["agent"]}
    assert {"policy", "critic", "target_policy", "target_critic"} <= parts and len(names) == 3
    learned = [x for x in agent.parameters() if x.requires_grad]
    assert len(saved["optimiser"]["state"]) == len(learned)
    updates = saved["done"]["updates"]
    assert all(state["step"] == updates > 0 for state in saved["optimiser"]["state"].values())
    assert saved["done"]["steps"] == HALF and len(saved["replay"]["rows"][0]) == HALF * 51 // 50
