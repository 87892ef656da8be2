"""What do workers cost and bring? Measures one and two of them here, and predicts a thousand (docs/scaling.md).

    python benchmark/scaling.py             about four minutes; leave the machine alone meanwhile
    python benchmark/scaling.py --quick     about one, with more noise
    python benchmark/scaling.py --write     as well: results/scaling.json, and the tables in docs/scaling.md

The set-up is the paper's for the humanoid: 21 actions, policy 200-200, critic 300-300; batch, window and samples are
the scripts' defaults; each worker has one thread. Groups of one and of two workers are started by torchrun in turn. A
group does, again and again: an episode alone, updates alone, updates with the all-reduce, the all-reduce alone, an
all-reduce of one number, and an episode with an update for each step, which is what training is. Figures are medians
over turns; a group is as slow as its slowest worker.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmark/results/scaling.json", ROOT / "docs/scaling.md"
TASK, STEPS, UPDATES = "dm_control/humanoid-run-v0", 100, 20
SIZES = (1, 2, 4, 10, 30, 100, 300, 1000)
NETWORKS = {  # seconds a message takes to arrive, bytes per second; the first is filled in with what was measured
    "this machine's loopback, measured": None,
    "25 Gbit/s and 20 µs, assumed": (20e-6, 25e9 / 8),
    "1 Gbit/s and 100 µs, assumed": (100e-6, 1e9 / 8),
}


# ---------------------------------------------------------------------------------------------------------------------
# One worker, put together as the script's main() does.
# ---------------------------------------------------------------------------------------------------------------------
def work(turns):
    """Take the turns, and let rank 0 print what they took: for each figure the slowest worker's, turn by turn."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    import mpo_continuous as script

    torch.set_num_threads(1)
    torch.zeros(2**23)  # as the script's main() does
    args = script.Args(env_id=TASK, time_limit=STEPS, policy_layers=(200, 200), critic_layers=(300, 300), threads=1)
    env = script.make_env(args)
    sizes = {"state_size": env.observation_space.shape[0], "action_size": env.action_space.shape[0]}
    options = {name: getattr(args, name) for name in ("initial_std", "min_std", "max_std", "covariance", "bound_mean")}
    policy = script.Policy(**sizes, layers=args.policy_layers, **options)
    critic = script.Critic(**sizes, layers=args.critic_layers)
    agent = script.Agent(policy, critic, eta=1.0, eta_mu=1.0, eta_sigma=100.0)
    optimiser = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad], args.learning_rate, fused=True)
    replay, workers, numbers = script.Replay(100_000, **sizes), script.Workers(args, agent), itertools.count()

    def collect():
        seed = script.episode_seed(args.seed, 0, next(numbers) * script.WORKERS + script.RANK)
        replay.add_episode(**script.collect_episode(env, agent.policy, seed, "cpu"))

    def update(workers, count):
        for _ in range(count):
            batch = replay.sample(args.batch_size, args.window)
            noise = torch.randn(*batch.state.shape[:2], args.num_samples, sizes["action_size"])
            script.update(agent, optimiser, script.compute_losses, batch, noise, args, workers)

    def live():
        collect()
        workers.gather(STEPS)
        update(workers, STEPS)

    figures = {  # what is done, and how often, for the time of one
        "step": (collect, STEPS),
        "update alone": (lambda: update(None, UPDATES), UPDATES),
        "update": (lambda: update(workers, UPDATES), UPDATES),
        "all-reduce": (lambda: [workers.average(agent) for _ in range(UPDATES)], UPDATES),
        "one number": (lambda: [dist.all_reduce(torch.zeros(1)) for _ in range(UPDATES)], UPDATES),
        "live": (live, STEPS),
    }
    collect()
    update(workers, 5)
    took = {name: [] for name in figures}
    for _ in range(turns):
        for name, (run, count) in figures.items():
            workers.gather(None)  # all begin together
            began = time.perf_counter()
            run()
            took[name].append(max(workers.gather((time.perf_counter() - began) / count)))
    if script.RANK == 0:
        learned = sum(parameter.grad.numel() for parameter in agent.parameters() if parameter.grad is not None)
        print(json.dumps({"took": took, "gradient": learned} | sizes))


def measure(groups, turns):
    """Medians over the turns of groups of one and of two workers, started in turn."""
    took = {1: {}, 2: {}}
    for workers in (1, 2) * groups:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command += [__file__, "--work", str(turns)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        seen = json.loads(done.stdout.splitlines()[-1])
        for name, seconds in seen.pop("took").items():
            took[workers].setdefault(name, []).extend(seconds)
        print(f"{workers} worker{'s' * (workers > 1)}: {1 / statistics.median(took[workers]['live']):.1f} updates/s")
    medians = {str(n): {name: statistics.median(all) for name, all in each.items()} for n, each in took.items()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "dm_control")}
    return {"seconds": medians, "turns": groups * turns, "cores": os.cpu_count(), "versions": versions} | seen


# ---------------------------------------------------------------------------------------------------------------------
# The prediction. An update with K workers takes c + u + a(K): a step of the environment, the gradient, the all-reduce.
# A ring all-reduce of n bytes is 2 (K - 1) messages one after the other, of n / K bytes each.
# ---------------------------------------------------------------------------------------------------------------------
def network_here(measured):
    """Seconds of a message and bytes per second over the loopback: two workers exchange two messages of n / 2 bytes."""
    small, large = measured["seconds"]["2"]["one number"], measured["seconds"]["2"]["all-reduce"]
    return small / 2, 4 * (measured["gradient"] + 1) / max(large - small, 1e-9)


def all_reduce_seconds(workers, count, latency, bandwidth):
    """a(K) = 2 (K - 1) (latency + 4 n / (K bandwidth)), for n numbers of four bytes."""
    return 2 * (workers - 1) * (latency + 4 * count / (workers * bandwidth))


def predict(measured, workers, network):
    """Seconds of one step of the environment, one update's gradient and one all-reduce, in a group of this size."""
    seconds = measured["seconds"]["1" if workers == 1 else "2"]  # a core of its own, with its neighbour as busy
    return seconds["step"], seconds["update alone"], all_reduce_seconds(workers, measured["gradient"] + 1, *network)


def crossing(condition):
    """The smallest number of workers of which this is true, or None."""
    return next((workers for workers in range(1, 1_000_001) if condition(workers)), None)


def tables(measured):
    """What stands in docs/scaling.md between the two marks."""
    lines = [f"Measured with `{measured['command']}`, medians of "]
    lines[0] += f"{measured['turns']} turns, {measured['cores']} cores, torch {measured['versions']['torch']}:\n"
    lines += ["| | 1 worker | 2 workers |", "|---|---:|---:|"]
    one, two = measured["seconds"]["1"], measured["seconds"]["2"]
    rows = {
        "environment steps/s, all workers": [count / took["live"] for count, took in ((1, one), (2, two))],
        "updates/s": [1 / took["live"] for took in (one, two)],
        "a step of the environment, ms": [1e3 * took["step"] for took in (one, two)],
        "an update without the all-reduce, ms": [1e3 * took["update alone"] for took in (one, two)],
        "the all-reduce, ms": [1e3 * took["all-reduce"] for took in (one, two)],
        "its share of training, %": [100 * took["all-reduce"] / took["live"] for took in (one, two)],
        "updates/s by the formula": [1 / sum(predict(measured, n, network_here(measured))) for n in (1, 2)],
    }
    lines += [f"| {name} | " + " | ".join(f"{value:.3g}" for value in values) + " |" for name, values in rows.items()]
    numbers, size = measured["gradient"], 4 * (measured["gradient"] + 1)
    lines += [f"\nThe gradient has {numbers:,} numbers; with the request to stop, {size:,} bytes. Two workers send"]
    lines += [f"{size / 1e6:.2f} MB each per update, a thousand {2 * 999 / 1000 * size / 1e6:.2f} MB each.\n"]
    latency, bandwidth = network_here(measured)
    lines += [f"The loopback measured: {1e6 * latency:.0f} µs a message, {bandwidth / 1e9:.2f} GB/s.\n"]
    for name, network in NETWORKS.items():
        network = network or (latency, bandwidth)
        lines += [f"**{name}**\n", "| workers | updates/s | environment steps/s | collecting | gradient | all-reduce |"]
        lines += ["|---:|---:|---:|---:|---:|---:|"]
        for workers in SIZES:
            parts = predict(measured, workers, network)
            shares = " | ".join(f"{100 * part / sum(parts):.0f}%" for part in parts)
            lines += [f"| {workers:,} | {1 / sum(parts):.3g} | {workers / sum(parts):,.0f} | {shares} |"]
        dominates = crossing(lambda k, n=network: (p := predict(measured, k, n))[2] > p[0] + p[1])
        says = f"from {dominates:,} workers on" if dominates else "at no number of workers up to a million"
        few = [predict(measured, workers, network) for workers in (2, 1000)]
        steps = " and ".join(f"{(update + reduce) / step:.0f}" for step, update, reduce in few)
        lines += [f"\nThe all-reduce takes more than half of the time {says}. Collecting takes more than half where a"]
        lines += [f"worker lives more than {steps} steps per update, with 2 and with 1,000 workers: that is,"]
        bounds = " and ".join(f"{step / (update + reduce):.2g}" for step, update, reduce in few)
        lines += [f"with `--updates-per-step` below {bounds}.\n"]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one group of each size, two turns")
    parser.add_argument("--write", action="store_true", help="write results/scaling.json and docs/scaling.md")
    parser.add_argument(
        "--work", type=int, default=0, help=argparse.SUPPRESS
    )  # turns of a worker that torchrun started
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    measured = measure(*((1, 2) if args.quick else (3, 4)))
    measured["command"] = f"python benchmark/scaling.py{' --quick' * args.quick} --write"
    text = tables(measured)
    print(text)
    if args.write:
        RESULTS.write_text(json.dumps(measured, indent=2) + "\n")
        before, rest = PAGE.read_text().split("<!-- tables of benchmark/scaling.py -->\n")
        after = rest.split("<!-- end of the tables -->\n")[1]
        marks = "<!-- tables of benchmark/scaling.py -->\n", "<!-- end of the tables -->\n"
        PAGE.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}")


if __name__ == "__main__":
    main()
