"""A run that is stopped, by whatever means, goes on as if it had not been."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from running import (
    CONTINUOUS,
    FIRST,
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


# An iteration is two episodes, 50 steps and 25 updates; the first takes 100. There is a checkpoint
# at the start and after each 200 steps, and the ring of the replay goes round before the end.
SHORT, LONG = 400, 600
STEPS = [*range(100, LONG + 1, 50)]  # at which rows are logged
SETTINGS = dict(time_limit=25, trajectories=2, updates_per_step=0.5, learning_starts=100)
SETTINGS |= dict(target_period=15, buffer_size=500, eval_every=200, seed=4)


def begin(script, folder, name, total=LONG, **changes):
    words = tiny(**(SETTINGS | dict(total_timesteps=total, run_dir=name) | changes))
    return Run(script, words, folder)


def complete(process):
    assert finish(process).returncode == 0, process.err
    return process


def again(script, folder, name, **changes):
    return Run(script, flags(resume=name, **changes), folder)


def killed(script, folder):
    """A run killed before its first evaluation, and again: steps of its rows and checkpoints."""
    moments, chance = [], random.Random(7)
    process = begin(script, folder, "killed")
    for earliest in (100, 250):  # a checkpoint is at 0 and 200: later rows are lost
        wait_for_row(process, folder / "killed", earliest)
        time.sleep(chance.random() * 0.05)
        assert stop(process, signal.SIGKILL).returncode == -signal.SIGKILL
        moments.append((last_step(folder / "killed"), saved_step(folder / "killed")))
        (folder / "killed/checkpoint.tmp").write_bytes(b"a checkpoint cut short by the kill")
        process = again(script, folder, "killed")
    complete(process)
    return moments


def stopped(script, folder):
    """A run stopped by a signal, ended, extended, and stopped again: how it stopped, and where."""
    stops, process = [], begin(script, folder, "stopped", SHORT)

    def interrupt(number, step):
        wait_for_row(process, folder / "stopped", step)
        stops.append((stop(process, number), number, saved_step(folder / "stopped")))
        return Run(script, resume_command(process), folder)

    process = interrupt(signal.SIGINT, 100)
    complete(process)
    shutil.copytree(folder / "stopped", folder / "short")
    process = again(script, folder, "stopped", total_timesteps=LONG)
    process = interrupt(signal.SIGTERM, SHORT + 50)
    complete(process)
    return stops


def saved_step(run_dir):
    return load(run_dir / "checkpoint.pt")["done"]["steps"]


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    """The runs that these tests compare, made two at a time."""
    folder = tmp_path_factory.mktemp("runs")
    moments, stops, _ = together(
        lambda: killed(script, folder),
        lambda: stopped(script, folder),
        lambda: complete(begin(script, folder, "whole")),
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
    assert [row for row, checkpoint in moments if row > checkpoint], "no row was lost"
    assert [int(row["global_step"]) for row in rows(folder / "killed")] == STEPS
    assert_same_run(folder / "whole", folder / "killed")


def test_one_killed_before_its_first_evaluation_goes_on_from_the_checkpoint_of_step_0(script, runs):
    (row, checkpoint), *_ = runs[1]
    assert 0 == checkpoint < row < 200  # and it ended as the uninterrupted one: see above


def test_a_run_stopped_by_sigint_and_sigterm_ends_as_the_uninterrupted_one(script, runs):
    folder, _, stops = runs
    assert [int(row["global_step"]) for row in rows(folder / "stopped")] == STEPS
    assert_same_run(folder / "whole", folder / "stopped")
    assert any(step % 200 for *_, step in stops), "all were saved anyway"


def test_a_stopped_run_saves_prints_the_command_to_go_on_and_exits_with_the_signals_code(
    script, runs
):
    for process, number, step in runs[2]:
        assert (process.returncode, process.err) == (128 + number, "")
        assert resume_command(process) == ["--resume", "stopped"]
        assert f"stopped at step {step:,}; " in process.out and step >= 100


def test_a_run_extended_by_resume_ends_as_one_that_was_longer_from_the_start(script, runs):
    folder, *_ = runs
    assert last_step(folder / "short") == SHORT
    assert timeless(folder / "short") == timeless(folder / "whole")[: STEPS.index(SHORT) + 1]
    assert_same_run(folder / "whole", folder / "stopped")


def test_the_settings_of_a_resumed_run_are_those_it_began_with_and_the_new_length(script, runs):
    folder, *_ = runs
    read = lambda name: json.loads((folder / name / "args.json").read_text())  # noqa: E731
    whole = read("whole")
    for name in ("stopped", "killed"):
        assert read(name) == whole | {"run_dir": name, "resume": name}


def test_tensorboard_shows_each_step_once_after_kills_and_stops(script, runs):
    folder, *_ = runs
    for name in ("whole", "killed", "stopped"):
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
    shutil.copytree(folder / "short", folder / "over")
    assert "done" in train(script, flags(resume="over"), folder).out
    assert_same_run(folder / "short", folder / "over")


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_another_seed_gives_other_numbers(script, runs):
    folder, *_ = runs
    complete(begin(script, folder, "other seed", 150, seed=5))
    for a, b in zip(timeless(folder / "short"), timeless(folder / "other seed")):
        assert a["charts/episodic_return"] != b["charts/episodic_return"]
        assert a["losses/critic"] != b["losses/critic"]


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_setting_that_is_typed_counts_even_where_its_value_is_the_default(script, runs):
    folder, *_ = runs
    shutil.copytree(folder / "short", folder / "long")
    total = script.Args().total_timesteps
    process = again(script, folder, "long", total_timesteps=total, eval_episodes=2)
    wait_for_row(process, folder / "long", SHORT + 1)
    assert stop(process, signal.SIGTERM).returncode == 128 + signal.SIGTERM
    settings = load(folder / "long/checkpoint.pt")["args"]
    assert (settings["total_timesteps"], settings["eval_episodes"]) == (total, 2)


LARGE = dict(batch_size=32, num_samples=32, critic_layers=(300, 300), trajectories=1)
LARGE |= dict(learning_starts=50, updates_per_step=2.0, eval_every=25)


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_second_signal_stops_at_once_and_the_checkpoint_stays_good(script, tmp_path):
    """An iteration takes about a second: 50 large gradient steps."""
    process, run_dir = begin(script, tmp_path, "run", total=10_000, **LARGE), tmp_path / "run"
    wait_for_row(process, run_dir, 50)
    wait_until(lambda: saved_step(run_dir) == last_step(run_dir), process)
    saved = saved_step(run_dir)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping after this iteration" in process.out)
    assert stop(process, signal.SIGINT).returncode == -signal.SIGINT
    assert saved_step(run_dir) == saved


SAVE_FOR_EVER = """
import importlib, io, os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:2]
import torch
script = importlib.import_module(sys.argv[2])
torch.set_num_threads(1)  # threads do not survive a fork
path, chance, last, cut = Path("checkpoint.pt"), random.Random(0), 0, 0

def save(count):
    buffer, large = io.BytesIO(), torch.full((20_000, 30), float(count))
    torch.save({"origin": script.ORIGIN, "count": count, "large": large}, buffer)
    script.write_whole(path, buffer.getvalue())

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
    assert count >= last
    assert (saved["large"] == count).all() and len(saved["large"]) == 20_000
    last = count
print(last, cut)
"""


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(script, tmp_path):
    (tmp_path / "program.py").write_text(SAVE_FOR_EVER)
    words = [str(Path(script.__file__).parent), script.__name__]
    saved, cut = map(int, train(tmp_path / "program.py", words, tmp_path).out.split())
    assert saved >= 3 and cut >= 3, "kills should fall into the writing, and some writings end"


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_resumed_run_has_back_everything_it_had(script, runs):
    folder, *_ = runs
    saved = load(folder / "short/checkpoint.pt")
    args = script.Args(
        **saved["args"] | {"resume": str(shutil.copytree(folder / "short", folder / "back"))}
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
    assert saved["done"]["steps"] == SHORT and len(saved["replay"]["rows"][0]) == SHORT * 26 // 25
