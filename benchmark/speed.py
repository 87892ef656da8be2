"""How fast is a gradient step, against the bare matrix products it needs and against another library's learner?

    python benchmark/speed.py             the whole table; leave the machine alone meanwhile
    python benchmark/speed.py --quick     the same table sooner, with more noise
    python benchmark/speed.py --atari     mpo_atari.py on Pong against stable-baselines3's DQN, a table of its own

Columns: gradient steps per second of the script's own update (replay sample, losses, backward, clipping, Adam); how
many times per second the matrix products of that update alone can be done, and the ratio of the two; environment
steps per second with one update per step, collection included, against stable-baselines3's SAC with its defaults on
the same task; and the peak memory of such a run. Eager and compiled, with one thread and with two.

Whatever is compared takes turns in one process, so that a busy or a slow machine slows all of it: the figures are
medians over the turns, a ratio is the median of the ratios within a turn. Each thread count is a process of its own.

On Atari both learners have DQN's network, 32 frames in a gradient step and a gradient step every four agent steps; DQN
trains one network and ours two. The time per frame trained on is that of a gradient step, replay included, over 32.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the scripts are
TASK = "dm_control/walker-walk-v0"  # 24 observations, 6 actions
SIZES = {"batch_size": 32, "window": 8, "num_samples": 20, "policy_layers": (100, 100), "critic_layers": (200, 200)}


# ---------------------------------------------------------------------------------------------------------------------
# What is measured. A learner has update(), one gradient step; live(), an episode and an update for each of its steps;
# products(), the matrices that one update must multiply; and replay_bytes(), of a million steps.
# ---------------------------------------------------------------------------------------------------------------------
class Continuous:
    """A script that learns a Gaussian policy from windows of vectors, put together as its main() does."""

    def __init__(self, script, compiled, episode_length):
        self.script, self.numbers = script, itertools.count()
        self.args = args = script.Args(env_id=TASK, time_limit=episode_length, buffer_size=1_000_000, **SIZES)
        self.env = script.make_env(args)
        self.state_size, self.action_size = self.env.observation_space.shape[0], self.env.action_space.shape[0]
        sizes = {"state_size": self.state_size, "action_size": self.action_size}
        options = {
            name: getattr(args, name) for name in ("initial_std", "min_std", "max_std", "covariance", "bound_mean")
        }
        policy = script.Policy(**sizes, layers=args.policy_layers, **options)
        critic = script.Critic(**sizes, layers=args.critic_layers)
        temperature = {"eta": 1.0} if hasattr(script, "temperature_dual") else {}
        self.agent = script.Agent(policy, critic, **temperature, eta_mu=1.0, eta_sigma=100.0)
        groups = [{"params": list(policy.parameters()), "lr": args.policy_learning_rate}]
        groups += [{"params": list(critic.parameters()), "lr": args.learning_rate}]
        groups += [{"params": self.agent.multipliers(), "lr": args.multiplier_rate}]
        self.optimiser = torch.optim.Adam(groups, fused=True)
        self.replay = script.Replay(args.buffer_size, **sizes)
        losses = getattr(script, "compute_losses", None) or script.parametric_losses
        self.loss_function = script.compiled(losses) if compiled else losses
        self.collect()

    def collect(self):
        seed = self.script.episode_seed(1, 0, next(self.numbers))
        episode = self.script.collect_episode(self.env, self.agent.policy, seed, "cpu")
        self.replay.add_episode(**episode)

    def update(self):
        batch = self.replay.sample(self.args.batch_size, self.args.window)
        noise = torch.randn(*batch.state.shape[:2], self.args.num_samples, self.action_size)
        self.script.update(self.agent, self.optimiser, self.loss_function, batch, noise, self.args)

    def live(self):
        self.collect()
        for _ in range(self.args.time_limit):
            self.update()
        self.agent.copy_targets()

    def products(self):
        """Layers (rows, inputs, outputs): of the forward passes, those with a gradient of W, those with one of x; and
        the layers (shape of the rows, inputs, outputs) that the script computes as convolutions."""
        steps, states = SIZES["batch_size"] * SIZES["window"], SIZES["batch_size"] * (SIZES["window"] + 1)
        scored = (SIZES["batch_size"], SIZES["window"] + 1, SIZES["num_samples"] + 1)  # M actions and the one taken

        def layers(rows, *sizes):
            return [(rows, inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]

        def critic(states, actions):  # its first layer over [s, a] is split: the state's part is done once per state
            first = layers(states, self.state_size, SIZES["critic_layers"][0])
            return first + layers(actions, self.action_size, *SIZES["critic_layers"], 1)

        policy = layers(states, self.state_size, *SIZES["policy_layers"], self.action_size)
        policy += layers(states, SIZES["policy_layers"][-1], self.action_size**2)
        first, action_part, *_, value = critic(states, math.prod(scored))
        forward = 2 * policy + critic(steps, steps) + [first, action_part, value]  # pi and pi_i; Q of the steps taken
        convolutions = layers(scored, *SIZES["critic_layers"])
        return forward, policy + critic(steps, steps), policy[1:] + critic(steps, steps)[2:], convolutions

    def replay_bytes(self):
        return sum(rows.numel() * rows.element_size() for rows in self.replay.rows.values())

    def save(self):
        """A checkpoint with a full replay, the largest there can be."""
        self.replay.size = self.replay.capacity
        counters = dict.fromkeys(("global_step", "episode", "updates", "due", "began", "seconds"), 0) | {"returns": []}
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # the same disk that runs are on
            self.script.save_checkpoint(folder, self.agent, self.optimiser, self.replay, counters | {"workers": 1})


class SAC:
    """stable-baselines3's learner with its own defaults: one gradient step on 256 transitions per environment step."""

    def __init__(self, script, episode_length):
        import stable_baselines3

        self.steps = episode_length
        env = script.make_env(script.Args(env_id=TASK, time_limit=episode_length))
        self.model = stable_baselines3.SAC("MlpPolicy", env, device="cpu", seed=1)
        self.model.learn(200, log_interval=None)  # beyond the 100 steps that it collects before it learns

    def live(self):
        self.model.learn(self.steps, reset_num_timesteps=False, log_interval=None)

    def replay_bytes(self):
        return sum(array.nbytes for array in vars(self.model.replay_buffer).values() if hasattr(array, "nbytes"))


class Atari:
    """mpo_atari.py, put together as its main() does, with eight games of Pong."""

    def __init__(self):
        import mpo_atari as script

        self.script, self.args = script, script.Args(buffer_size=100_000)
        self.env, shape = script.make_env(self.args), (4, 84, 84)
        options = {"shape": shape, "actions": int(self.env.single_action_space.n), "layers": ()}
        policy, critic = script.Policy(**options), script.Critic(**options)
        self.agent = script.Agent(policy, critic, eta=1.0, eta_pi=1.0)
        self.optimiser = script.make_optimiser(self.agent, self.args)
        self.replay = script.make_replay(self.args, shape)
        self.games = script.Games(self.env, self.replay, seed=1)
        for _ in range(100):
            self.games.step(policy, self.args)

    def update(self):
        batch = self.replay.sample(self.args.batch_size, self.args.window)
        self.script.update(self.agent, self.optimiser, self.script.discrete_losses, batch, self.args)

    def live(self):
        """Eight agent steps and two updates."""
        self.games.step(self.agent.policy, self.args)
        for _ in range(2):
            self.update()

    def play(self):
        """Eight agent steps of the environment alone."""
        self.env.step(self.env.action_space.sample())

    def save(self):
        """Seconds of a checkpoint after 20,000 new rows, the default interval, with 20,000 old ones saved before."""
        rings = self.replay.length * torch.arange(self.args.num_envs).unsqueeze(-1)
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # the same disk that runs are on
            self.replay.folder = Path(folder) / "replay"
            for first in (0, 2500):
                self.replay.changed[(rings + torch.arange(first, first + 2500)) // self.replay.CHUNK] = True
                began = time.perf_counter()
                self.script.save_run(folder, self.agent, self.optimiser, self.replay, {})
            return time.perf_counter() - began


class OneGame(gym.Env):
    """The same environment with one game, as stable-baselines3 wants it."""

    def __init__(self):
        import mpo_atari

        self.games = mpo_atari.make_env(mpo_atari.Args(), num_envs=1)
        self.observation_space, self.action_space = self.games.single_observation_space, self.games.single_action_space

    def reset(self, seed=None, options=None):
        return self.games.reset(seed=seed)[0][0], {}

    def step(self, action):
        observation, reward, terminated, truncated, _ = self.games.step(np.array([action]))
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}


class DQN:
    """stable-baselines3's, with DQN's own network, 32 frames in a gradient step and one every four agent steps."""

    def __init__(self):
        import stable_baselines3

        settings = {"batch_size": 32, "train_freq": 4, "learning_starts": 100, "buffer_size": 5000, "device": "cpu"}
        self.model = stable_baselines3.DQN("CnnPolicy", OneGame(), seed=1, **settings)
        self.model.learn(400, log_interval=None)

    def update(self):
        self.model.train(gradient_steps=1, batch_size=32)

    def live(self):
        """Eight agent steps and two updates."""
        self.model.learn(8, reset_num_timesteps=False, log_interval=None)


SCRIPTS = {"mpo_continuous.py": Continuous, "mpo_parametric.py": Continuous}  # another kind of script: another class


def bare_products(forward, weight_gradients, input_gradients, convolutions):
    """A function that does these products and nothing else, each as the script does it; and its multiply-adds."""
    pairs = [(torch.randn(n, i), torch.randn(o, i).T) for n, i, o in forward]  # y = x W^T
    pairs += [(torch.randn(n, o).T, torch.randn(n, i)) for n, i, o in weight_gradients]  # W' = y'^T x
    pairs += [(torch.randn(n, o), torch.randn(o, i)) for n, i, o in input_gradients]  # x' = y' W
    done = [(x, y, torch.empty(len(x), y.shape[1])) for x, y in pairs]  # into memory it already has
    many = [(torch.randn(*n, i).permute(0, 3, 1, 2), torch.randn(o, i, 1, 1)) for n, i, o in convolutions]

    def run():
        for x, y, out in done:
            torch.mm(x, y, out=out)
        for x, kernel in many:
            torch.nn.functional.conv2d(x, kernel)

    return run, sum(x.numel() * y.shape[1] for x, y in pairs) + sum(x.numel() * len(kernel) for x, kernel in many)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, each in a process of its own.
# ---------------------------------------------------------------------------------------------------------------------
def take_turns(things, rounds, calls, units):
    """Units per second of each thing in each round; a turn is some calls, a call does some units."""
    rates, names = {name: [] for name in things}, list(things)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            for _ in range(calls):
                things[name]()
            rates[name].append(calls * units / (time.perf_counter() - began))
    return rates


def measure_speed(options):
    update, live, facts = {}, {}, {}
    for name in options.scripts:
        script = importlib.import_module(Path(name).stem)
        for mode in ("eager",) if options.no_compile else ("eager", "compiled"):
            learner = SCRIPTS[name](script, mode == "compiled", options.steps)
            began = time.perf_counter()
            learner.update()
            facts[f"{name} {mode}: seconds of the first update"] = time.perf_counter() - began
            update[f"{name} {mode}"], live[f"{name} {mode}"] = learner.update, learner.live
            if mode == "eager":
                products = learner.products()
                update[f"{name} products"], facts[f"{name}: multiply-adds needed"] = bare_products(*products)
                # the list of products is right if this is nearly the same: it counts the small products of E-step and
                # M-step too, and not the critic's last layer, which is a product with a vector
                with FlopCounterMode(display=False) as counter:
                    learner.update()
                facts[f"{name}: multiply-adds done"] = counter.get_total_flops() // 2
    live["SAC"] = SAC(script, options.steps).live
    take_turns(update, 1, 10, 1)  # to warm up
    updates = take_turns(update, options.rounds, options.updates, 1)
    return {"updates": updates, "steps": take_turns(live, options.rounds // 3 + 1, 1, options.steps), "facts": facts}


def measure_memory(options):
    """Peak memory of a process that does nothing but learn, for one episode; size of a full replay, time to save it."""
    name, _, mode = options.memory.partition(" ")
    script = importlib.import_module(Path(name if mode else options.scripts[0]).stem)
    learner = SCRIPTS[name](script, mode == "compiled", options.steps) if mode else SAC(script, options.steps)
    learner.live()
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]  # Linux's, as is much here
    began = time.perf_counter()
    if mode:
        learner.save()
    return {"peak": int(peak) * 1024, "replay": learner.replay_bytes(), "saved": time.perf_counter() - began}


def measure_atari(options):
    ours, theirs = Atari(), DQN()
    update, live = {"mpo_atari.py": ours.update, "DQN": theirs.update}, {"mpo_atari.py": ours.live, "DQN": theirs.live}
    take_turns(update, 1, 5, 1)  # to warm up
    updates = take_turns(update, options.rounds, options.updates, 1)
    steps = take_turns(live, options.rounds, options.updates // 2, 8)
    environment = take_turns({"environment": ours.play}, options.rounds, options.updates, 8)["environment"]
    facts = {"replay": sum(x.nbytes for x in ours.replay.rows.values()) * 10, "saved": ours.save()}
    return {"updates": updates, "steps": steps, "environment": environment, "facts": facts}


def run_child(threads, *more):
    words = [sys.executable, __file__, *sys.argv[1:], "--child", str(threads), *more]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}  # torch's, about itself
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit("speed.py: a measurement failed; its message stands above.")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.
# ---------------------------------------------------------------------------------------------------------------------
def compare(above, below):
    return f"{statistics.median(a / b for a, b in zip(above, below)):.2f}"


def table(results):
    """Markdown, a row per learner, mode and thread count."""
    columns = "learner|threads|gradient steps/s|bare products/s|ratio|environment steps/s|of SAC's|peak memory"
    lines = [f"|{columns}|", "|---" + "|---:" * columns.count("|") + "|"]
    for threads, found in results["threads"].items():
        for name, rates in found["steps"].items():
            cells = [name, threads, "", "", ""]
            if name in found["updates"]:
                updates, products = found["updates"][name], found["updates"][f"{name.split()[0]} products"]
                cells[2:4] = (f"{statistics.median(x):.0f}" for x in (updates, products))
                cells[4] = compare(updates, products)
            cells += [f"{statistics.median(rates):.0f}", compare(rates, found["steps"]["SAC"])]
            lines.append("|" + "|".join([*cells, f"{found['memory'][name]['peak'] / 1e6:.0f} MB"]) + "|")
    replay = {name.split()[0]: f"{memory['replay'] / 1e6:.0f} MB" for name, memory in found["memory"].items()}
    lines += ["", f"A replay of a million steps: {', '.join(' '.join(pair) for pair in replay.items())}."]
    for name, rates in found["steps"].items():
        if name.endswith("eager"):  # a checkpoint is written every 10,000 steps
            seconds, interval = found["memory"][name]["saved"], 10_000 / statistics.median(rates)
            lines += [
                f"{name.split()[0]}: a checkpoint with that replay takes {seconds:.2f} s, {seconds / interval:.1%}."
            ]
    return "\n".join([*lines, results["where"]])


def atari_table(results):
    """Markdown, a row per learner and thread count."""
    columns = (
        "learner|threads|gradient steps/s|ms per frame trained on|of DQN's|agent steps/s|environment alone, steps/s"
    )
    lines = [f"|{columns}|", "|---" + "|---:" * columns.count("|") + "|"]
    for threads, found in results["threads"].items():
        for name, rates in found["updates"].items():
            median, steps = statistics.median(rates), statistics.median(found["steps"][name])
            cells = [
                name,
                threads,
                f"{median:.1f}",
                f"{1000 / 32 / median:.2f}",
                compare(found["updates"]["DQN"], rates),
            ]
            alone = f"{statistics.median(found['environment']):.0f}" if name != "DQN" else ""
            lines.append("|" + "|".join([*cells, f"{steps:.0f}", alone]) + "|")
        seconds = 20_000 / statistics.median(found["steps"]["mpo_atari.py"])
    facts = found["facts"]
    share = f"{facts['saved']:.1f} s, {facts['saved'] / seconds:.1%} of the time between two"
    lines += [
        "",
        f"A replay of a million steps: {facts['replay'] / 1e9:.2f} GB. A checkpoint every 20,000 steps: {share}.",
    ]
    return "\n".join([*lines, results["where"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), help="absent ones are skipped")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled updates out")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="turns that each update takes; a third as many episodes")
    parser.add_argument("--quick", action="store_true", help="shorter turns, of 10 updates and of 50 steps")
    parser.add_argument("--atari", action="store_true", help="measure mpo_atari.py and nothing else")
    parser.add_argument("--output", type=Path, help="a .json, and .md beside it; default: benchmark/results/speed.json")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)  # this and the next: for run_child
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scripts = [name for name in options.scripts if (ROOT / name).exists()]
    options.updates, options.steps = (10, 50) if options.quick else (20, 250)  # in a turn
    if options.child:
        torch.set_num_threads(options.child)
        torch.zeros(2**23)  # as the scripts' main() does
        measure = measure_atari if options.atari else measure_memory if options.memory else measure_speed
        return print(json.dumps(measure(options)))

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "stable-baselines3"))
    command = " ".join(["python benchmark/speed.py", *sys.argv[1:]])
    task = "ALE/Pong-v5" if options.atari else TASK
    results = {"where": f"{task}; {os.cpu_count()} cores of {cpu}, {packages}; `{command}`.", "threads": {}}
    for threads in options.threads:
        found = results["threads"][str(threads)] = run_child(threads)
        if not options.atari:
            found["memory"] = {name: run_child(threads, "--memory", name) for name in found["steps"]}
    output = options.output or ROOT / f"benchmark/results/speed{'_atari' if options.atari else ''}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    report = (atari_table if options.atari else table)(results)
    output.with_suffix(".md").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
