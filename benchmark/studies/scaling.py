"""What do workers cost and bring? Measures one and two of them here (docs/scaling.md).

    python benchmark/studies/scaling.py             about four minutes; leave the machine alone
    python benchmark/studies/scaling.py --quick     about one, with more noise
    python benchmark/studies/scaling.py --write     as well: the table in docs/scaling.md

The set-up is the paper's for the humanoid: 21 actions, policy 200-200, critic 300-300; batch,
window and samples are the defaults of mpo_distributed.py; each worker has one thread. Groups of one
and of two workers are started by torchrun in turn. A group does, again and again: an episode alone,
updates alone, updates with the all-reduce, the all-reduce alone, an all-reduce of one number, and
an episode with an update for each step, which is what training is. Figures are medians over turns;
a group is as slow as its slowest worker.
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

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/scaling.md"
MARKS = "<!-- tables of benchmark/studies/scaling.py -->\n", "<!-- end of the tables -->\n"
TASK, STEPS, UPDATES = "dm_control/humanoid-run-v0", 100, 20


# ---- One worker, put together as the script's main() does.
def work(turns):
    """Take the turns; rank 0 prints for each figure the slowest worker's time, turn by turn."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    import mpo_continuous  # whose gradient step is the same without the all-reduce
    import mpo_distributed as script

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    layers = {"policy_layers": (200, 200), "critic_layers": (300, 300)}
    args = script.Args(env_id=TASK, time_limit=STEPS, buffer_size=100_000, **layers)
    env = script.make_env(args)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    policy, critic = script.Policy(*sizes, args), script.Critic(*sizes, args)
    agent = script.Agent(policy, critic, eta=1.0, eta_mu=1.0, eta_sigma=100.0)
    learned = [x for x in agent.parameters() if x.requires_grad]
    optimiser = torch.optim.Adam(learned, args.learning_rate, fused=True)
    replay, numbers = script.Replay(args.buffer_size, *sizes), itertools.count(rank, workers)
    gradient = torch.zeros(sum(x.numel() for x in learned))

    def collect():
        replay.add_episode(script.run_episode(env, policy, args, next(numbers)))

    def update(step, count):
        for _ in range(count):
            batch = replay.sample(args.batch_size, args.window, "cpu")
            noise = torch.randn(*batch.state.shape[:2], args.num_samples, sizes[1])
            losses, _ = script.compute_losses(agent, batch, noise, args)
            step(agent, optimiser, losses)

    def live():
        collect()
        dist.all_reduce(torch.zeros(2))  # the return and the steps
        update(script.averaged_step, STEPS)

    def reduce(tensor):
        for _ in range(UPDATES):
            dist.all_reduce(tensor)

    figures = {  # what is done, and how often, for the time of one
        "step": (collect, STEPS),
        "update alone": (lambda: update(mpo_continuous.gradient_step, UPDATES), UPDATES),
        "update": (lambda: update(script.averaged_step, UPDATES), UPDATES),
        "all-reduce": (lambda: reduce(gradient), UPDATES),
        "one number": (lambda: reduce(torch.zeros(1)), UPDATES),
        "live": (live, STEPS),
    }
    collect()
    update(script.averaged_step, 5)
    took = {name: [] for name in figures}
    for _ in range(turns):
        for name, (run, count) in figures.items():
            dist.barrier()  # all begin together
            began = time.perf_counter()
            run()
            slowest = torch.tensor((time.perf_counter() - began) / count)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            took[name].append(slowest.item())
    if rank == 0:
        print(json.dumps({"took": took, "gradient": len(gradient)}))
    dist.destroy_process_group()


def measure(groups, turns):
    """Medians over the turns of groups of one and of two workers, started in turn."""
    took = {1: {}, 2: {}}
    for workers in (1, 2) * groups:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), __file__, "--work", str(turns)]
        options = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, check=True, **options)
        seen = json.loads(done.stdout.splitlines()[-1])
        for name, seconds in seen["took"].items():
            took[workers].setdefault(name, []).extend(seconds)
    medians = {
        workers: {name: statistics.median(seconds) for name, seconds in each.items()}
        for workers, each in took.items()
    }
    return medians, seen["gradient"]


def report(medians, gradient):
    """The table of docs/scaling.md, and what its formula for more workers needs."""
    rows = {
        "environment steps/s, all workers": [n / took["live"] for n, took in medians.items()],
        "updates/s": [1 / took["live"] for took in medians.values()],
        "a step of the environment, ms": [1e3 * took["step"] for took in medians.values()],
        "an update without the all-reduce, ms": [
            1e3 * took["update alone"] for took in medians.values()
        ],
        "the all-reduce, ms": [1e3 * took["all-reduce"] for took in medians.values()],
        "its share of training, %": [
            100 * took["all-reduce"] / took["live"] for took in medians.values()
        ],
    }
    lines = ["| | 1 worker | 2 workers |", "|---|---:|---:|"]
    for name, values in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    # two workers exchange two messages of half of the gradient each, one after the other
    small, large = medians[2]["one number"], medians[2]["all-reduce"]
    bandwidth = 4 * gradient / max(large - small, 1e-9)
    facts = f"The gradient has {gradient:,} numbers; a message takes {1e6 * small / 2:.0f} µs, and "
    return "\n".join(lines), facts + f"the loopback carries {bandwidth / 1e9:.2f} GB/s."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one group of each size, two turns")
    parser.add_argument("--write", action="store_true", help="write the table of docs/scaling.md")
    parser.add_argument("--work", type=int, default=0, help=argparse.SUPPRESS)  # by torchrun
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    table, facts = report(*measure(*((1, 2) if args.quick else (3, 4))))
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in ("torch", "dm_control"))
    print(f"{table}\n\n{facts} {os.cpu_count()} cores, {versions}.")
    if args.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{table}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
