"""Workers that torchrun starts: real processes that talk over the loopback, and real kills."""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from running import (
    PATIENCE,
    TASK,
    TINY,
    Run,
    flags,
    last_step,
    load,
    make_policy,
    one_sentence,
    rows,
    run,
    same,
    surroundings,
    timeless,
    tiny,
    together,
    wait_for_line,
    wait_for_row,
    wait_until,
)

import mpo_atari
import mpo_continuous
import mpo_parametric


# ---------------------------------------------------------------------------------------------------------------------
# torchrun, as users start it.
# ---------------------------------------------------------------------------------------------------------------------
class Torchrun(Run):
    """An agent of torchrun and its workers. Leaving the `with` block leaves no process behind."""

    def __init__(self, script, words, cwd, workers=2, how=("--standalone",), path=""):
        words = [
            "torch.distributed.run",
            *how,
            "--nproc-per-node",
            str(workers),
            getattr(script, "__file__", script),
        ] + words
        super().__init__("-m", words, cwd, cold=True, environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})

    def pids(self):
        """The process of each worker, by its rank."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            variables = {int(pid): Path(f"/proc/{pid}/environ").read_bytes() for pid in children}
        except (FileNotFoundError, ProcessLookupError):
            return {}
        ranks = {pid: re.search(rb"\0RANK=(\d+)", text) for pid, text in variables.items()}
        return {int(rank[1]): pid for pid, rank in ranks.items() if rank}

    def kill_worker(self, rank):
        wait_until(lambda: rank in self.pids(), self)
        os.kill(self.pids()[rank], signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        left = self.pids().values()
        self.send_signal(signal.SIGKILL)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.popen.wait()


def torchrun(script, words, cwd, code=0, **options):
    """Run a group to its end."""
    with Torchrun(script, words, cwd, **options) as process:
        wait_until(lambda: process.poll() is not None)
        assert process.returncode == code, process.err
    return process


def sentences(process, script):
    """What the workers themselves had to say; torchrun says much more."""
    return [line for line in process.err.splitlines() if line.startswith(f"{script.__name__}.py: ")]


# ---------------------------------------------------------------------------------------------------------------------
# The text.
# ---------------------------------------------------------------------------------------------------------------------
def section(script):
    """The part of a script that only workers run: from its banner to the next."""
    found = re.search(r"(?ms)^# -{117}\n# Workers,.*?(?=^# -{117}\n)", Path(script.__file__).read_text())
    return found.group(0)


def test_the_distributed_part_is_one_section_of_at_most_forty_lines_the_same_in_all_scripts(script):
    text = section(script)
    assert text == section(mpo_continuous)
    tree = ast.parse(text)
    documented = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    strings = {node.body[0].lineno for node in documented if ast.get_docstring(node)}
    lines = enumerate(text.splitlines(), start=1)
    code = [line for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in strings]
    assert len(code) <= 40
    outside = Path(script.__file__).read_text().replace(text, "")
    assert re.findall(r"\bdist\.\w+", outside) == []


WATCHED = """
import sys
import mpo_continuous, torch.distributed, torch.utils.tensorboard
entered = set()
def watch(frame, event, value):
    if event == "call" and frame.f_code.co_filename == mpo_continuous.__file__:
        entered.add((frame.f_code.co_name, frame.f_code.co_firstlineno))
args = mpo_continuous.Args(**eval(sys.argv[1]))
sys.setprofile(watch)
mpo_continuous.main(args)
sys.setprofile(None)
assert not torch.distributed.is_initialized()
print(sorted(entered))
"""


def test_started_by_python_no_line_of_the_distributed_part_runs(tmp_path):
    settings = TINY | dict(env_id="Pendulum-v1", run_dir="run", total_timesteps=100)
    command = [sys.executable, "-c", WATCHED, repr(settings)]
    options = dict(env=surroundings(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=PATIENCE)
    done = subprocess.run(command, cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    entered = dict(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {"main", "update", "save_checkpoint"} <= entered.keys()
    source, text = Path(mpo_continuous.__file__).read_text(), section(mpo_continuous)
    first = source[: source.index(text)].count("\n")
    assert not [name for name, line in entered.items() if first < line <= first + text.count("\n")]
    assert not (tmp_path / "run/torchrun.id").exists()


# ---------------------------------------------------------------------------------------------------------------------
# The group's functions, on small networks in float64. Each worker writes down what it saw.
# ---------------------------------------------------------------------------------------------------------------------
PROBE = """
import copy, json, os, signal, sys
from pathlib import Path
import torch
import mpo_atari, mpo_continuous, mpo_parametric
from helpers import losses_of, normal, numbers, random_batch, small_agent, small_args

torch.set_num_threads(1)
RANK, WORKERS, EACH = mpo_continuous.RANK, mpo_continuous.WORKERS, 5
seen = {}


def continuous(script, norm):
    changes = {"normalise_advantage": False} if script is mpo_parametric else {}  # else not linear in the batch
    args = small_args(script, max_grad_norm=norm, **changes)
    agent = small_agent(script, args)
    ends = [number == 1 for number in range(EACH)] * WORKERS  # equal masks for all workers
    batch, noise = random_batch(script, args, agent, [args.window] * EACH * WORKERS, ends)
    return agent, losses_of(script), (batch, noise), args


def atari(script, norm):
    args = script.Args(layers=(7, 6), window=4, max_grad_norm=norm)
    options = dict(shape=(3,), actions=3, layers=args.layers)
    torch.manual_seed(0)
    agent = script.Agent(script.Policy(**options), script.Critic(**options), eta=1.0, eta_pi=1.0).double()
    generator, shape = numbers(1), (EACH * WORKERS, 4)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.3 * normal(generator, *parameter.shape))
    action = torch.randint(3, shape, generator=generator)
    step = (action, normal(generator, *shape) - 1, normal(generator, *shape), torch.zeros(shape), torch.ones(shape))
    return agent, script.discrete_losses, (script.FrameBatch(normal(generator, shape[0], 5, 3), *step),), args


def part(value):
    mine = slice(EACH * RANK, EACH * (RANK + 1))
    return type(value)(*(x[mine] for x in value)) if isinstance(value, tuple) else value[mine]


def flat(agent):
    return torch.cat([x.flatten() for x in agent.state_dict().values()])


# parameters differ before the start, and are rank 0's afterwards
args = small_args(mpo_continuous)
agent = small_agent(mpo_continuous, args, seed=RANK)
# as main() does, an optimiser first: it imports PyTorch's compiler, which keeps a group that it finds, and with it the
# group's threads; they must not outlive Python
torch.optim.Adam(agent.parameters())
before = flat(agent)
workers = mpo_continuous.Workers(args, agent)
seen["before"], seen["after"] = before.tolist(), flat(agent).tolist()

# one update: the group's, each worker with its part of a batch, and one process's with the whole
for name, script in (("continuous", mpo_continuous), ("parametric", mpo_parametric), ("atari", mpo_atari)):
    for norm in (1e9, 0.05):
        agent, losses, batch, args = (atari if name == "atari" else continuous)(script, norm)
        alone, start = copy.deepcopy(agent), flat(agent)
        script.update(alone, torch.optim.SGD(alone.parameters(), 1.0), losses, *batch, args)
        with torch.autograd.profiler.profile() as profile:
            optimiser = torch.optim.SGD(agent.parameters(), 1.0)
            values, _ = script.update(agent, optimiser, losses, *map(part, batch), args, workers)
        counted = sum(event.name == "c10d::allreduce_" for event in profile.function_events)
        seen[f"{name} {norm:g}"] = {
            "error": float((flat(agent) - flat(alone)).abs().max()), "moved": float((flat(agent) - start).abs().max()),
            "multipliers": [float(x.grad.abs()) for x in agent.multipliers() if x.grad is not None],
            "all-reduces": counted, "norm": values["losses/critic_gradient"],
        }

# many updates in float32, each worker with batches of its own
agent, losses, _, args = continuous(mpo_continuous, 40.0)
agent = agent.float()
optimiser = torch.optim.Adam(agent.parameters(), 1e-2, fused=True)
for number in range(30):
    double, own = copy.deepcopy(agent).double(), 100 * number + RANK
    state, noise = random_batch(mpo_continuous, args, double, [4] * EACH, [False] * EACH, own)
    state, noise = mpo_continuous.Batch(*(x.float() for x in state)), noise.float()
    mpo_continuous.update(agent, optimiser, losses, state, noise, args, workers)
seen["parameters"], seen["batch"] = flat(agent).tolist(), state.reward.tolist()

# a request to one worker is no request yet; after the next update it is everyone's
if RANK == 1:
    os.kill(os.getpid(), signal.SIGTERM)
asked = [workers.request.asked, workers.asked]
mpo_continuous.update(agent, optimiser, losses, state, noise, args, workers)
seen["asked"] = [*asked, workers.asked]

# a checkpoint of workers that are equal, whatever came before, and of workers that have drifted apart
for tensor in agent.state_dict().values():
    torch.distributed.broadcast(tensor, 0)
counters = {"global_step": 7}
workers.save(Path("good"), counters, {"agent": agent.state_dict()})
if RANK == 1:
    agent.log_eta.data += 1e-6
try:
    workers.save(Path("bad"), counters, {"agent": agent.state_dict()})
except ConnectionError as error:
    seen["drift"] = str(error)
Path(f"seen{RANK}.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module", params=[2, 3])
def probed(request, tmp_path_factory):
    """What each of 2 or 3 workers saw, and the folder they saved to."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.py").write_text(PROBE)
    for name in ("good", "bad"):
        (folder / name).mkdir()
    torchrun(folder / "probe.py", [], folder, workers=request.param, path=f"{ROOT}:{ROOT / 'tests'}")
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(request.param)], folder


def test_the_parameters_of_rank_0_are_everyones_at_the_start(probed):
    seen, _ = probed
    for other in seen[1:]:
        assert other["before"] != seen[0]["before"] and other["after"] == seen[0]["before"]


@pytest.mark.parametrize("name, multipliers", [("continuous", 3), ("parametric", 2), ("atari", 2)])
@pytest.mark.parametrize("norm", ["1e+09", "0.05"], ids=["not clipped", "clipped"])
def test_the_step_of_a_group_is_that_of_one_process_on_the_joined_batch(name, multipliers, norm, probed):
    """Critic, policy and multipliers; and where gradients are clipped, it is their mean that is."""
    for seen in probed[0]:
        step = seen[f"{name} {norm}"]
        assert step["error"] < 1e-12 and step["moved"] > 0.01
        assert len([size for size in step["multipliers"] if size > 1e-4]) == multipliers
        assert step["norm"] > 0.1  # so 0.05 does clip


def test_an_update_takes_one_all_reduce(probed):
    for seen in probed[0]:
        assert [step["all-reduces"] for step in seen.values() if "all-reduces" in step] == [1] * 6


def test_after_many_updates_on_batches_of_their_own_the_parameters_are_equal_to_the_bit(probed):
    seen, _ = probed
    for other in seen[1:]:
        assert other["batch"] != seen[0]["batch"] and other["parameters"] == seen[0]["parameters"]


def test_a_signal_to_one_worker_is_agreed_on_by_all_with_the_next_update(probed):
    for rank, seen in enumerate(probed[0]):
        assert seen["asked"] == [signal.SIGTERM if rank == 1 else 0, 0, signal.SIGTERM]


def test_workers_that_have_drifted_apart_stop_with_a_sentence_and_save_nothing_that_counts(probed):
    seen, folder = probed
    assert all("no longer equal" in worker["drift"] for worker in seen)
    assert not (folder / "bad/checkpoint.pt").exists()
    files = load(folder / "good/checkpoint.pt")["files"]
    assert len(files) == len(seen) and set(files) == set(os.listdir(folder / "good"))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs. Each worker lives an episode of 50 steps, then come 10 updates: 100 steps a row with two workers. The
# runs that are stopped and killed must end as the uninterrupted one, to the bit.
# ---------------------------------------------------------------------------------------------------------------------
SETTINGS = dict(env_id="Pendulum-v1", checkpoint_every=300, eval_every=0, target_period=7, seed=4)
TOTAL = 1500
GAMES = dict(env_id="CartPole-v1", num_envs=2, layers=(16, 16), batch_size=4, window=4, learning_starts=100, threads=1)
GAMES |= dict(
    log_every=100, eval_episodes=2, buffer_size=5000, total_timesteps=4000, checkpoint_every=400, eval_every=0
)


def words_of(name, total=TOTAL, **changes):
    return tiny(**(SETTINGS | dict(total_timesteps=total, run_dir=name) | changes))


def ended(process):
    wait_until(lambda: process.poll() is not None)
    return process


def killed_and_restarted(folder):
    """A group that loses first one worker and then the other, and that torchrun starts again each time."""
    with Torchrun(mpo_continuous, words_of("killed"), folder, how=("--standalone", "--max-restarts", "2")) as process:
        kills = []
        for rank, step in ((1, 400), (0, 900)):
            wait_for_row(process, folder / "killed", step)
            process.kill_worker(rank)
            kills.append(
                (last_step(folder / "killed"), load(folder / "killed/checkpoint.pt")["counters"]["global_step"])
            )
        return ended(process), kills


def killed_before_its_first_checkpoint(folder):
    with Torchrun(
        mpo_parametric, words_of("early", 600), folder, how=("--standalone", "--max-restarts", "1")
    ) as process:
        wait_until((folder / "early/progress.csv").exists, process)
        process.kill_worker(0)
        assert not (folder / "early/checkpoint.pt").exists()
        return ended(process)


def games_killed(folder):
    words = flags(**GAMES, run_dir="games")
    with Torchrun(mpo_atari, words, folder, how=("--standalone", "--max-restarts", "1")) as process:
        wait_for_row(process, folder / "games", 1000)
        process.kill_worker(1)
        return ended(process)


def stopped_killed_and_resumed(folder):
    """Stopped by a signal, resumed; killed for good, resumed again, and left to end."""
    runs = {}
    with Torchrun(mpo_continuous, words_of("stopped"), folder) as process:
        wait_for_line(process, "step ")  # printed after the first update
        process.send_signal(signal.SIGTERM)
        runs["stopped"] = ended(process), [load(path) for path in shards(folder / "stopped")]
    with Torchrun(mpo_continuous, flags(resume="stopped"), folder) as process:
        wait_for_row(process, folder / "stopped", 500)
        others = [pid for rank, pid in process.pids().items() if rank != 1]
        process.kill_worker(1)
        began = time.time()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))
        runs["killed"] = ended(process), time.time() - began
    (folder / "stopped/worker1-9999-cut.pt.tmp").write_bytes(b"a shard cut short by the kill")
    shutil.copytree(folder / "stopped", folder / "incomplete")
    (folder / "incomplete" / load(folder / "incomplete/checkpoint.pt")["files"][1]).unlink()
    runs["alone"] = run(mpo_continuous, flags(resume="stopped"), folder)
    runs["fewer"] = torchrun(mpo_continuous, flags(resume="stopped"), folder, code=1, workers=1)
    runs["incomplete"] = torchrun(mpo_continuous, flags(resume="incomplete"), folder, code=1)
    runs["resumed"] = torchrun(mpo_continuous, flags(resume="stopped"), folder)
    return runs


def two_agents(folder):
    """Two agents of torchrun, as on two machines, that meet at a port of this one."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    how = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "meeting"]
    with Torchrun(mpo_continuous, words_of("nodes"), folder, workers=1, how=how) as first:
        with Torchrun(mpo_continuous, words_of("nodes"), folder, workers=1, how=how) as second:
            return ended(first), ended(second)


def shards(run_dir):
    """The files of the workers that the checkpoint names."""
    return [run_dir / name for name in load(run_dir / "checkpoint.pt")["files"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of these runs, two at a time."""
    folder = tmp_path_factory.mktemp("groups")
    calls = {
        "chain": lambda: stopped_killed_and_resumed(folder),
        "killed": lambda: killed_and_restarted(folder),
        "games": lambda: games_killed(folder),
        "early": lambda: killed_before_its_first_checkpoint(folder),
        "whole": lambda: torchrun(mpo_continuous, words_of("whole"), folder),
        "nodes": lambda: two_agents(folder),
        "refused": lambda: torchrun(mpo_continuous, words_of("refused", gamma=1.5), folder, code=1),
    }
    return folder, dict(zip(calls, together(*calls.values())))


def assert_same_run(a, b):
    assert timeless(a) == timeless(b)
    assert (a / "model.pt").read_bytes() == (b / "model.pt").read_bytes()
    assert [path.name for path in shards(a)] == [path.name for path in shards(b)]
    for saved, other in zip(map(load, shards(a)), map(load, shards(b))):
        del saved["counters"]["seconds"], other["counters"]["seconds"]
        assert same(saved, other)


def test_rank_0_alone_logs_and_prints(runs):
    folder, done = runs
    lines = done["whole"].out.splitlines()
    assert len([line for line in lines if line.startswith("Pendulum-v1, 3 observations")]) == 1
    assert len([line for line in lines if line.startswith("done: 1,500 steps")]) == 1
    assert sentences(done["whole"], mpo_continuous) == []
    assert len(list((folder / "whole").glob("events.*"))) == 1


def test_the_steps_and_the_returns_are_those_of_all_workers(runs):
    folder, _ = runs
    table = rows(folder / "whole")
    assert [int(row["global_step"]) for row in table] == list(range(100, TOTAL + 1, 100))
    assert [int(row["charts/updates"]) for row in table] == list(range(10, TOTAL // 10 + 1, 10))  # 0.2 for each of 50
    replays = [load(path)["replay"] for path in shards(folder / "whole")]
    paid = [replay["reward"].view(-1, 51).sum(1) for replay in replays]  # an episode is 50 steps and a last row
    assert [len(returns) for returns in paid] == [TOTAL // 100] * 2
    expected = (paid[0] + paid[1]) / 2
    assert [float(row["charts/episodic_return"]) for row in table] == pytest.approx(expected.tolist(), rel=1e-5)


def test_each_worker_has_episodes_and_random_numbers_of_its_own(runs):
    folder, _ = runs
    first, second = map(load, shards(folder / "whole"))
    starts = [saved["replay"]["state"].view(-1, 51, 3)[:, 0] for saved in (first, second)]
    assert len({tuple(state) for saved in starts for state in saved.tolist()}) == 2 * TOTAL // 100
    assert not same(first["random_state"], second["random_state"])
    assert not same(first["replay"]["action"], second["replay"]["action"])


@pytest.mark.parametrize("name", ["whole", "early", "games"])
def test_after_a_run_networks_multipliers_and_optimisers_are_equal_to_the_bit(name, runs):
    folder, _ = runs
    first, second = map(load, shards(folder / name))
    assert same(first["agent"], second["agent"]) and same(first["optimiser"], second["optimiser"])
    assert first["counters"]["updates"] == second["counters"]["updates"] >= 60
    assert all(value not in ("nan", "inf") for row in rows(folder / name) for value in row.values())


def test_a_killed_worker_restarts_the_group_from_its_checkpoint_and_the_run_ends_as_if_it_had_not_been(runs):
    folder, done = runs
    process, kills = done["killed"]
    assert process.returncode == 0, process.err
    assert_same_run(folder / "whole", folder / "killed")
    assert any(row > checkpoint for row, checkpoint in kills), "no kill came after rows newer than the checkpoint"
    assert {path.name for path in (folder / "killed").glob("worker*")} == {shards(folder / "killed")[1].name}


def test_a_group_killed_before_its_first_checkpoint_starts_anew_in_its_folder(runs):
    folder, done = runs
    assert done["early"].returncode == 0, done["early"].err
    assert [int(row["global_step"]) for row in rows(folder / "early")] == list(range(100, 601, 100))


def test_games_go_on_with_the_replay_of_each_worker_after_a_kill(runs):
    folder, done = runs
    assert done["games"].returncode == 0, done["games"].err
    steps = [int(row["global_step"]) for row in rows(folder / "games")]
    assert steps == sorted(set(steps)) and 4000 <= steps[-1] < 4010
    for path, name in zip(shards(folder / "games"), ("replay", "replay1")):
        replay = load(path)["replay"]
        assert 1990 <= replay["written"].sum() <= 2500  # half the steps each, and the first frames of games
        assert set(os.listdir(folder / "games" / name)) == set(replay["files"].values())


def test_a_signal_stops_all_workers_after_the_same_update_and_saves(runs):
    folder, done = runs
    process, saved = done["chain"]["stopped"]
    command = "torchrun --standalone --nproc-per-node 2 "
    assert f"stopped and saved; to go on: {command}" in process.out
    assert saved[0]["counters"]["updates"] == saved[1]["counters"]["updates"] > 0
    assert same(saved[0]["agent"], saved[1]["agent"])


def test_without_restarts_the_others_stop_within_a_minute_with_a_sentence(runs):
    process, seconds = runs[1]["chain"]["killed"]
    assert process.returncode != 0 and seconds < 60
    (sentence,) = sentences(process, mpo_continuous)
    assert "another worker is gone" in sentence and "checkpoint is of step" in sentence


def test_resuming_with_another_number_of_workers_is_refused_with_a_sentence(runs):
    alone, fewer = runs[1]["chain"]["alone"], runs[1]["chain"]["fewer"]
    assert alone.returncode == 2
    for sentence in (one_sentence(alone), *sentences(fewer, mpo_continuous)):
        assert "--nproc-per-node 2" in sentence and "with 1" in sentence
    assert len(sentences(fewer, mpo_continuous)) == 1


def test_a_checkpoint_that_lacks_a_workers_file_is_refused_with_a_sentence(runs):
    folder, done = runs
    (sentence,) = sentences(done["chain"]["incomplete"], mpo_continuous)
    assert re.search(r"incomplete/worker1-\S+pt is damaged", sentence)


def test_a_group_that_was_stopped_killed_and_resumed_ends_as_the_uninterrupted_one(runs):
    folder, done = runs
    assert_same_run(folder / "whole", folder / "stopped")
    assert [path.name for path in (folder / "stopped").glob("worker*")] == [shards(folder / "stopped")[1].name]


def test_two_agents_that_meet_at_a_port_make_the_run_of_one(runs):
    folder, done = runs
    assert [process.returncode for process in done["nodes"]] == [0, 0], done["nodes"][0].err + done["nodes"][1].err
    assert_same_run(folder / "whole", folder / "nodes")
    assert [process.out == "" for process in done["nodes"]].count(True) == 1


def test_a_mistake_of_the_user_is_named_once_and_not_once_for_each_worker(runs):
    folder, done = runs
    (sentence,) = sentences(done["refused"], mpo_continuous)
    assert "--gamma must be below 1" in sentence
    assert not (folder / "refused").exists()


# ---------------------------------------------------------------------------------------------------------------------
# It learns.
# ---------------------------------------------------------------------------------------------------------------------
LEARNER = dict(env_id=TASK, time_limit=250, policy_layers=(64, 64), critic_layers=(64, 64), num_samples=10, window=5)
TRAINING = dict(batch_size=16, learning_rate=1e-3, policy_learning_rate=1e-3, target_period=50, updates_per_step=1.0)
TRAINING |= dict(learning_starts=500, total_timesteps=3000, eval_every=0, eval_episodes=5, threads=1, seed=1)


def test_two_workers_learn_cartpole_swingup_to_threefold_the_return_of_the_untrained_policy(tmp_path):
    args = mpo_continuous.Args(**LEARNER)
    env = mpo_continuous.make_env(args)
    before = mpo_continuous.evaluate(env, make_policy(mpo_continuous, env, args), 5, 1, "cpu")
    torchrun(mpo_continuous, flags(**LEARNER, **TRAINING, run_dir="run"), tmp_path)
    table = rows(tmp_path / "run")
    untrained = max(np.mean(before), float(table[0]["charts/episodic_return"]))  # of mean and of sampled actions
    trained = float(table[-1]["eval/episodic_return"])
    assert trained >= 3 * untrained and trained >= 12, (trained, untrained)
