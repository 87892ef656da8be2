"""Workers that torchrun starts: real processes that talk over the loopback, and real kills."""

import itertools
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS
from running import (
    Run,
    flags,
    last_step,
    load,
    make_policy,
    one_sentence,
    rows,
    run,
    same,
    timeless,
    tiny,
    together,
    train,
    wait_for_row,
    wait_until,
)

import mpo_continuous
import mpo_distributed

# ---- torchrun, as users start it, or with workers that are forked: then their imports, which take
# ten times longer than a tiny run, are done already. Agent, meeting, signals and restarts are real.
AGENT = """
import os, runpy, select, signal, sys
from dataclasses import replace
from pathlib import Path
from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch


def work(python_flag, script, *words):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # not the agent's
    note = Path(notes, os.environ["RANK"])
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)
    asked, wake = os.pipe()  # what signals came
    for end in (asked, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    if select.select([asked], [], [], 0)[0]:
        sys.exit()  # a forked worker would wait here for an agent that waits for it, half a minute


notes = sys.argv.pop(1)
# the method's name in torchrun's own log, for which it searches all modules: a second or two a run
dynamic_rendezvous.get_method_name = lambda *_, **__: ""
run.elastic_launch = lambda config, entrypoint: elastic_launch(
    replace(config, start_method="fork"), work
)
run.main(sys.argv[1:])
"""
NUMBERS = itertools.count()


class Torchrun(Run):
    """An agent of torchrun and its workers. Leaving the `with` block leaves no process behind."""

    def __init__(self, words, cwd, workers=2, how=("--standalone",), cold=False, script=None):
        script = script or mpo_distributed.__file__
        words = [*how, "--nproc-per-node", str(workers), str(script), *words]
        self.notes = Path(cwd) / f"notes{next(NUMBERS)}"
        self.notes.mkdir()
        (self.notes / "agent.py").write_text(AGENT)
        if cold:
            super().__init__("-m", ["torch.distributed.run", *words], cwd, cold=True)
        else:
            super().__init__(self.notes / "agent.py", [str(self.notes), *words], cwd)

    def pid_of(self, rank):
        """The process of a worker; not of one that torchrun started of its own."""
        wait_until((self.notes / str(rank)).exists, self)
        return int((self.notes / str(rank)).read_text())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            for note in self.notes.glob("[0-9]"):
                try:
                    os.kill(int(note.read_text()), signal.SIGKILL)
                except ProcessLookupError:
                    pass


def ended(process):
    wait_until(lambda: process.poll() is not None)
    return process


def torchrun(words, cwd, good=True, **options):
    """Run a group to its end."""
    with Torchrun(words, cwd, **options) as process:
        assert (ended(process).returncode == 0) == good, process.err
    return process


def sentences(process):
    """What the workers themselves had to say; torchrun says much more."""
    return [line for line in process.err.splitlines() if line.startswith("mpo_distributed.py: ")]


# ---- The text.
def test_workers_are_in_one_script_and_what_they_do_for_mpo_stands_before_the_plumbing():
    texts = {script: Path(script.__file__).read_text() for script in SCRIPTS}
    text = texts.pop(mpo_distributed)
    for other in texts.values():
        assert not re.search(r"torch\.distributed|torchrun|\bRANK\b|\bWORKERS\b", other)
    mpo, plumbing = text.split("# ==== Plumbing")
    for word in ("dist.all_reduce(", "dist.broadcast_object_list("):
        assert word in mpo and word not in plumbing
    assert "DistributedDataParallel" not in text


# ---- The group's steps, on small networks in float64. Each worker writes down what it saw.
PROBE = """
import copy, json, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import torch
import torch.distributed as dist
import mpo_continuous, mpo_distributed
from helpers import random_batch, small_agent, small_args

torch.set_num_threads(1)
RANK, WORKERS, EACH = mpo_distributed.RANK, mpo_distributed.WORKERS, 5
seen = {}


def part(batch):
    mine = slice(EACH * RANK, EACH * (RANK + 1))
    return type(batch)(*(x[mine] for x in batch)) if isinstance(batch, tuple) else batch[mine]


def flat(module):
    return torch.cat([x.flatten() for x in module.state_dict().values()])


def length(module):
    return float(torch.cat([x.grad.flatten() for x in module.parameters()]).norm())


# as main() does, an optimiser first: it imports PyTorch's compiler, which keeps a group it finds
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
store = dist.PrefixStore("probe", next(dist.rendezvous("env://"))[0])
dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORKERS)

# one step: the group's, each worker with its part of a batch, and mpo_continuous.py's on the whole
args = small_args(mpo_distributed)
ends = [number == 1 for number in range(EACH)] * WORKERS  # equal masks for all workers
for name, scale in (("not clipped", 1), ("clipped", 1e4)):
    agent = small_agent(mpo_distributed, args)
    batch, noise = random_batch(mpo_distributed, args, agent, [args.window] * len(ends), ends)
    alone, start = copy.deepcopy(agent), flat(agent)
    scales = {"critic": scale, "policy": scale, "multipliers": 1}
    losses, _ = mpo_continuous.compute_losses(alone, batch, noise, args)
    losses = {part: scales[part] * loss for part, loss in losses.items()}
    mpo_continuous.gradient_step(alone, torch.optim.SGD(alone.parameters(), 1.0), losses)
    losses, _ = mpo_distributed.compute_losses(agent, part(batch), part(noise), args)
    losses = {part: scales[part] * loss for part, loss in losses.items()}
    optimiser = torch.optim.SGD(agent.parameters(), 1.0)
    with torch.autograd.profiler.profile() as profile:
        mpo_distributed.averaged_step(agent, optimiser, losses)
    seen[name] = {
        "error": float((flat(agent) - flat(alone)).abs().max()),
        "moved": float((flat(agent) - start).abs().max()),
        "multipliers": [float(x.grad.abs()) for x in agent.parameters(recurse=False)],
        "all-reduces": sum(e.name == "c10d::allreduce_" for e in profile.function_events),
        "lengths": [length(agent.policy), length(agent.critic)],
    }

# many steps in float32, each worker with batches of its own
agent = small_agent(mpo_distributed, args).float()
optimiser = torch.optim.Adam(agent.parameters(), 1e-2, fused=True)
for number in range(10):
    double, own = copy.deepcopy(agent).double(), 100 * number + RANK
    batch, noise = random_batch(mpo_distributed, args, double, [4] * EACH, [False] * EACH, own)
    batch = mpo_distributed.Rows(*(x.float() for x in batch))
    losses, _ = mpo_distributed.compute_losses(agent, batch, noise.float(), args)
    mpo_distributed.averaged_step(agent, optimiser, losses)
seen["parameters"], seen["batch"] = flat(agent).tolist(), batch.reward.tolist()
dist.destroy_process_group()


# a whole run of workers whose policies are not equal when they are made
class OwnPolicy(mpo_distributed.Policy):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.mean.bias.data += 0.1 * RANK
        seen["before"] = flat(self).tolist()


mpo_distributed.Policy = OwnPolicy
settings = json.loads(sys.argv[3])
layers = {name: tuple(settings[name]) for name in ("policy_layers", "critic_layers")}
policy = mpo_distributed.main(mpo_distributed.Args(**settings | layers))
seen["after"] = flat(policy).tolist()
Path(f"seen{RANK}.json").write_text(json.dumps(seen))
"""
SETTINGS = dict(env_id="Pendulum-v1", time_limit=20, learning_starts=40, target_period=7, seed=4)
SETTINGS |= dict(policy_layers=(8,), critic_layers=(8,), eval_every=240)


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What each of three workers saw."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.py").write_text(PROBE)
    sizes = dict(num_samples=2, batch_size=2, window=2, eval_episodes=1, total_timesteps=100)
    settings = json.dumps(SETTINGS | sizes | dict(run_dir="run"))
    words = [str(ROOT), str(ROOT / "tests"), settings]
    torchrun(words, folder, workers=3, script=folder / "probe.py")
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(3)]


def test_all_workers_begin_with_the_parameters_of_rank_0(probed):
    """They learn from gradients that they share, so only the beginning could set them apart."""
    for other in probed[1:]:
        assert other["before"] != probed[0]["before"]
        assert other["after"] == probed[0]["after"] != probed[0]["before"]


@pytest.mark.parametrize("name", ["not clipped", "clipped"])
def test_the_step_of_a_group_is_that_of_one_process_on_the_joined_batch(name, probed):
    """Critic, policy and multipliers; and where gradients are clipped, it is their mean that is."""
    for seen in probed:
        step = seen[name]
        assert step["error"] < 1e-12 and step["moved"] > 0.01
        assert len([size for size in step["multipliers"] if size > 1e-4]) == 3
        for length in step["lengths"]:
            assert length == pytest.approx(40) if name == "clipped" else 0.1 < length < 40


def test_a_step_takes_one_all_reduce(probed):
    for seen in probed:
        assert [seen[name]["all-reduces"] for name in ("not clipped", "clipped")] == [1, 1]


def test_after_many_steps_on_batches_of_their_own_the_parameters_are_equal_to_the_bit(probed):
    for other in probed[1:]:
        assert other["batch"] != probed[0]["batch"]
        assert other["parameters"] == probed[0]["parameters"]


# ---- Whole runs. Each worker lives an episode of 20 steps, then come 4 gradient steps: with two
# workers 40 steps a row. Those that are stopped and killed must end as the uninterrupted one.
TOTAL = 480


def words_of(name, total=TOTAL, **changes):
    folder = dict(run_dir=name) if name else {}
    return tiny(**(SETTINGS | dict(total_timesteps=total) | folder | changes))


def content(run_dir):
    return {path.name: path.read_bytes() for path in run_dir.iterdir()}


def killed_and_restarted(folder):
    """A group that loses first one worker, then the other, and that torchrun starts each time."""
    how = ("--standalone", "--max-restarts", "2")
    (folder / "restarts").mkdir()
    with Torchrun(words_of(""), folder / "restarts", how=how) as process:
        wait_until(lambda: list((folder / "restarts").glob("runs/*/progress.csv")), process)
        (run_dir,) = (folder / "restarts/runs").iterdir()
        kills = []
        for rank, step in ((1, 40), (0, 280)):
            wait_for_row(process, run_dir, step)
            os.kill(process.pid_of(rank), signal.SIGKILL)
            checkpoint = load(run_dir / "checkpoint.pt")["done"]["steps"]
            kills.append((last_step(run_dir), checkpoint))
        return ended(process), kills


KILLER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import mpo_distributed as script


def save(run, write=script.Run.save):
    if script.dist.is_initialized():
        os.kill(os.getpid(), signal.SIGKILL)  # but for the one with which a run begins
    write(run)


script.Run.save = save
script.main(None if script.RANK else script.parse_args())
"""


def stopped_killed_and_resumed(folder):
    """Stopped by a signal to a worker, then to torchrun; killed in saving; resumed each time."""
    runs, stopped, resume = {}, folder / "stopped", flags(resume="stopped")
    with Torchrun(words_of("stopped"), folder) as process:
        wait_for_row(process, stopped, 40)
        os.kill(process.pid_of(1), signal.SIGTERM)
        runs["one asked"] = ended(process), last_step(stopped), load(stopped / "checkpoint.pt")
    with Torchrun(resume, folder) as process:
        wait_for_row(process, stopped, last_step(stopped) + 40)
        process.send_signal(signal.SIGTERM)
        runs["all asked"] = ended(process), last_step(stopped), load(stopped / "checkpoint.pt")
    (folder / "killer.py").write_text(KILLER)
    with Torchrun(resume, folder, script=folder / "killer.py") as process:
        other, killed = process.pid_of(1), process.pid_of(0)
        wait_until(lambda: not Path(f"/proc/{killed}").exists())
        began = time.time()
        wait_until(lambda: not Path(f"/proc/{other}").exists())
        runs["killed"] = ended(process), time.time() - began, load(stopped / "checkpoint.pt")
    before = content(stopped)
    runs["alone"] = run(mpo_distributed, resume, folder)
    runs["evaluated"] = torchrun(flags(evaluate="stopped"), folder, good=False)
    runs["evaluated alone"] = train(mpo_distributed, flags(evaluate="stopped"), folder)
    assert content(stopped) == before
    runs["resumed"] = torchrun(resume, folder)
    return runs


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def two_agents(folder):
    """Two agents of torchrun, as on two machines, that meet at a port of this one."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    options = dict(workers=1, how=["--nnodes", "2", *meeting, "--rdzv-id", "meeting"])
    with Torchrun(words_of("nodes"), folder, **options) as first:
        with Torchrun(words_of("nodes"), folder, **options) as second:
            return ended(first), ended(second)


def one_port_three_times(folder):
    """torchrun calls its runs "none" here. The same settings twice; others, into a run's folder."""
    folder, port = folder / "port", ("--master-port", free_port(), "--max-restarts", "1")
    folder.mkdir()
    for _ in range(2):
        torchrun(words_of("", 80), folder, how=port, workers=1)
        time.sleep(1)  # folders are named by the second
    (first, second) = sorted((folder / "runs").iterdir())
    before = content(second)
    words = words_of(second.relative_to(folder), 160, gamma=0.9)
    refused = torchrun(words, folder, how=port, workers=1, good=False)
    assert content(second) == before
    return first, second, refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of these runs, two at a time."""
    folder = tmp_path_factory.mktemp("groups")
    calls = {
        "chain": lambda: stopped_killed_and_resumed(folder),
        "whole": lambda: torchrun(words_of("whole"), folder, cold=True),
        "killed": lambda: killed_and_restarted(folder),
        "port": lambda: one_port_three_times(folder),
        "nodes": lambda: two_agents(folder),
        "refused": lambda: torchrun(words_of("refused", gamma=1.5), folder, good=False),
        "alone": lambda: train(mpo_distributed, words_of("alone", 280), folder),
        "continuous": lambda: train(mpo_continuous, words_of("continuous", 280), folder),
    }
    return folder, dict(zip(calls, together(*calls.values())))


def assert_same_run(a, b):
    """To the bit, but for the names of the folders, and the time."""
    assert timeless(a) == timeless(b)
    for name in ("checkpoint.pt", "model.pt"):
        one, other = load(a / name), load(b / name)
        for saved in (one, other):
            saved["args"] |= dict(run_dir="", resume="")
            saved.pop("table", None)
            saved.get("done", {}).pop("seconds", None)
        assert same(one, other)
    files = [{path.name.split(".out.")[0] for path in folder.iterdir()} for folder in (a, b)]
    assert files[0] == files[1]


def test_a_group_of_one_started_by_python_is_the_run_of_mpo_continuous(runs):
    """To the bit: log, networks, multipliers, optimiser, replay and random numbers."""
    folder, _ = runs
    assert timeless(folder / "alone") == timeless(folder / "continuous")
    assert len(rows(folder / "alone")) >= 10
    ours, theirs = (load(folder / name / "checkpoint.pt") for name in ("alone", "continuous"))
    (share,) = ours["done"]["shares"]
    assert same(share, {name: theirs[name] for name in ("replay", "random")})
    for name in ("policy", "agent", "optimiser", "random"):
        assert same(ours[name], theirs[name])


def test_rank_0_alone_logs_and_prints(runs):
    folder, done = runs
    lines = done["whole"].out.splitlines()
    assert lines.count("Pendulum-v1: writing to whole") == 1
    assert lines.count("done; everything is in whole") == 1
    evaluations = [line for line in lines if re.match(r"step \d+: return .*, evaluated ", line)]
    assert len(evaluations) == TOTAL // 240 and len(lines) == len(evaluations) + 2
    assert sentences(done["whole"]) == []
    assert len(list((folder / "whole").glob("events.*"))) == 1


def shares(run_dir):
    """What each worker has of its own, in the checkpoint."""
    return load(run_dir / "checkpoint.pt")["done"]["shares"]


def test_the_steps_and_the_returns_are_those_of_all_workers(runs):
    folder, _ = runs
    table = rows(folder / "whole")
    assert [int(row["global_step"]) for row in table] == list(range(40, TOTAL + 1, 40))
    assert load(folder / "whole/checkpoint.pt")["done"]["updates"] == TOTAL // 10  # 0.2 of a half
    assert json.loads((folder / "whole/args.json").read_text())["workers"] == 2
    replays = [share["replay"]["rows"] for share in shares(folder / "whole")]
    paid = [replay[3].view(-1, 21).sum(1) for replay in replays]  # 20 steps and a final row
    assert [len(returns) for returns in paid] == [TOTAL // 40] * 2
    found = [float(row["charts/episodic_return"]) for row in table]
    assert found == pytest.approx(((paid[0] + paid[1]) / 2).tolist(), rel=1e-5)


def test_each_worker_has_episodes_and_random_numbers_of_its_own(runs):
    folder, _ = runs
    first, second = shares(folder / "whole")
    starts = [share["replay"]["rows"][0].view(-1, 21, 3)[:, 0] for share in (first, second)]
    assert len({tuple(state) for share in starts for state in share.tolist()}) == 2 * TOTAL // 40
    assert not same(first["random"], second["random"])
    drawn = [share["replay"]["rows"][1][:20] for share in (first, second)]
    assert len({float(action) for actions in drawn for action in actions}) == 40


def test_every_number_in_the_log_of_a_group_is_finite(runs):
    """But for what is not known: evaluations in between, and what came after so early a cut."""
    unknown = ("eval/episodic_return", "eval/returns", "mpo/q_minus_return")
    for row in rows(runs[0] / "whole"):
        assert not {"nan", "inf"} & {row[name] for name in row if name not in unknown}


def test_a_killed_worker_restarts_the_group_and_the_run_ends_as_if_it_had_not_been(runs):
    """Rank 1 before the first evaluation, rank 0 after it: rows were lost, and are there again."""
    folder, done = runs
    process, kills = done["killed"]
    assert process.returncode == 0, process.err
    (run_dir,) = (folder / "restarts/runs").iterdir()  # the same one, every time
    assert_same_run(folder / "whole", run_dir)
    assert [checkpoint for _, checkpoint in kills] == [0, 240]
    assert all(row > checkpoint for row, checkpoint in kills)


@pytest.mark.parametrize("asked", ["one asked", "all asked"])
def test_a_signal_stops_all_workers_after_the_same_iteration_and_saves(asked, runs):
    process, step, saved = runs[1]["chain"][asked]
    words = f"stopped at step {step:,}; --resume stopped goes on from its checkpoint"
    assert process.out.count(words) == 1
    assert saved["done"]["steps"] == step < TOTAL
    assert len(saved["table"]) == 1 + step // 40
    assert process.returncode != 0 and sentences(process) == []


def test_without_restarts_the_others_stop_within_a_minute_with_a_sentence(runs):
    process, seconds, saved = runs[1]["chain"]["killed"]
    assert process.returncode != 0 and seconds < 60
    (sentence,) = sentences(process)
    assert "another worker is gone; stopped at step" in sentence
    assert "; --resume stopped goes on from its checkpoint" in sentence
    assert 'mpo_distributed.py", line' not in process.err  # a traceback of its own, not torchrun's
    assert saved["done"]["steps"] == runs[1]["chain"]["all asked"][1]


def test_resuming_with_another_number_of_workers_is_refused_with_a_sentence(runs):
    alone = runs[1]["chain"]["alone"]
    assert alone.returncode == 2
    assert "--nproc-per-node must be 2 here, not 1" in one_sentence(alone)


def test_evaluate_is_for_one_process_and_the_workers_say_so_once(runs):
    folder, done = runs
    (sentence,) = sentences(done["chain"]["evaluated"])
    assert "--nproc-per-node must be 1 here, not 2; python starts one worker" in sentence
    assert "Pendulum-v1: mean" in done["chain"]["evaluated alone"].out


def test_a_group_that_was_stopped_killed_and_resumed_ends_as_the_uninterrupted_one(runs):
    folder, done = runs
    assert_same_run(folder / "whole", folder / "stopped")


def test_two_agents_that_meet_at_a_port_make_the_run_of_one(runs):
    folder, done = runs
    assert [process.returncode for process in done["nodes"]] == [0, 0], done["nodes"][0].err
    assert_same_run(folder / "whole", folder / "nodes")
    assert [process.out == "" for process in done["nodes"]].count(True) == 1


def test_a_run_of_another_torchrun_is_never_taken_for_its_own(runs):
    """Not even at the port, with the name and the settings of that one, or by a second attempt."""
    first, second, refused = runs[1]["port"]
    for run_dir in (first, second):
        assert [int(row["global_step"]) for row in rows(run_dir)] == [40, 60, 80]
    assert timeless(first) == timeless(second)
    assert len(sentences(refused)) == 2  # one of each attempt
    for sentence in sentences(refused):
        assert f"{second.name} holds a run already; --resume" in sentence


def test_a_mistake_of_the_user_is_named_once_and_not_once_for_each_worker(runs):
    folder, done = runs
    (sentence,) = sentences(done["refused"])
    assert "--gamma must be above 0 and below 1" in sentence
    assert not (folder / "refused").exists()


# ---- It learns.
LEARNER = dict(env_id="InvertedPendulum-v5", time_limit=200, seed=2)
LEARNER |= dict(policy_layers=(64, 64), critic_layers=(64, 64), eval_episodes=3)
TRAINING = dict(learning_rate=2e-3, policy_learning_rate=2e-3, target_period=20, batch_size=16)
TRAINING |= dict(epsilon_mu=0.05, epsilon_sigma=1e-3, gamma=0.97, num_samples=10, window=5)
TRAINING |= dict(learning_starts=100, total_timesteps=900, buffer_size=10_000)


def test_two_workers_learn_to_balance_a_pole_three_times_as_long_as_the_untrained(tmp_path):
    args = mpo_distributed.Args(**LEARNER)
    env = mpo_distributed.make_env(args)
    torch.manual_seed(args.seed)  # the policy that the run begins with
    policy = make_policy(mpo_distributed, env, args)
    before = np.mean(mpo_distributed.evaluate(env, policy, args, tmp_path))
    torchrun(flags(**LEARNER, **TRAINING, run_dir="run"), tmp_path)
    table = rows(tmp_path / "run")
    first = float(table[0]["charts/episodic_return"])  # of sampled actions, before any step
    trained, untrained = float(table[-1]["eval/episodic_return"]), max(before, first)
    assert trained >= 3 * untrained and trained >= 60, (trained, untrained)
