"""How fast is a gradient step, against its bare matrix products and another library's learner?

    python benchmark/studies/speed.py            the whole table; leave the machine alone meanwhile
    python benchmark/studies/speed.py --quick    the same table sooner, with more noise
    python benchmark/studies/speed.py --atari    mpo_atari.py on Pong against DQN, its own table
    python benchmark/studies/speed.py --compare 8b9d80d     mpo_continuous.py against that commit's

--compare also takes a file. A commit may be 8b9d80d, of before the rebuilding, or one since
7ef5e73.

Columns: gradient steps per second of the script's own update (replay sample, losses, backward,
clipping, Adam); how many times per second the matrix products of that update alone can be done, and
the ratio of the two; environment steps per second with one update per step, collection included,
against stable-baselines3's SAC with its defaults on the same task; and the peak memory of such a
run. With one thread and with two. Sizes are the script's defaults.

Whatever is compared takes turns in one process, so that a busy or a slow machine slows all of it:
figures are medians over the turns, a ratio is the median of the ratios within a turn. Each thread
count is a process of its own.

On Atari both learners have DQN's network, 32 frames in a gradient step and a gradient step every
four agent steps; DQN trains one network and ours two.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]  # where the scripts are, and dqn.py
TASK = "dm_control/walker-walk-v0"  # 24 observations, 6 actions
SCRIPTS = ("mpo_continuous.py", "mpo_parametric.py")
SIZES = ("batch_size", "window", "num_samples", "policy_layers", "critic_layers")


def load_script(path):
    """A script as a module, whatever its path; one name for each, so that two can be loaded."""
    name = re.sub(r"\W", "_", str(Path(path).resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- What is measured. A learner has update(), one gradient step; and live(), some steps of the
# environment with the updates that they earn.
class Continuous:
    """A script that learns a Gaussian policy from vectors, put together as its main() does."""

    def __init__(self, script, episode_length, sizes=None):
        self.script, self.numbers = script, itertools.count()
        options = {"env_id": TASK, "time_limit": episode_length} | (sizes or {})
        self.args = args = script.Args(**options)
        self.env = script.make_env(args)
        self.sizes = self.env.observation_space.shape[0], self.env.action_space.shape[0]
        policy, critic = self.networks()
        multipliers = {"eta": 1.0} if hasattr(script, "temperature_dual") else {}
        multipliers |= {"eta_mu": 1.0, "eta_sigma": 100.0}
        self.agent = script.Agent(policy, critic, **multipliers)
        groups = [
            {"params": list(policy.parameters()), "lr": args.policy_learning_rate},
            {"params": list(critic.parameters()), "lr": args.learning_rate},
            {"params": list(self.agent.parameters(recurse=False)), "lr": 2e-3},
        ]
        self.optimiser = torch.optim.Adam(groups, fused=True)
        self.replay = script.Replay(args.buffer_size, *self.sizes)
        self.losses = getattr(script, "compute_losses", None) or script.parametric_losses
        self.collect()

    def networks(self):
        return (make(*self.sizes, self.args) for make in (self.script.Policy, self.script.Critic))

    def collect(self):
        number, policy = next(self.numbers), self.agent.policy
        self.replay.add_episode(self.script.run_episode(self.env, policy, self.args, number))

    def sample(self):
        return self.replay.sample(self.args.batch_size, self.args.window, "cpu")

    def update(self):
        batch, samples = self.sample(), self.args.num_samples
        self.step(batch, torch.randn(*batch.state.shape[:2], samples, self.sizes[1]))

    def step(self, batch, noise):
        losses, _ = self.losses(self.agent, batch, noise, self.args)
        self.script.gradient_step(self.agent, self.optimiser, losses)

    def live(self):
        self.collect()
        for _ in range(self.args.time_limit):
            self.update()

    def products(self):
        """Layers (rows, inputs, outputs) of the forward passes, of those with a gradient of W, and
        of those with one of x."""
        args, (state, action) = self.args, self.sizes
        steps, states = args.batch_size * args.window, args.batch_size * (args.window + 1)

        def layers(rows, *sizes):
            pairs = zip(sizes, sizes[1:])
            return [(rows, inputs, outputs) for inputs, outputs in pairs]

        def critic(rows):
            return layers(rows, state + action, *args.critic_layers, 1)

        policy = layers(states, state, *args.policy_layers, action)
        policy += layers(states, args.policy_layers[-1], action**2)
        taken, sampled = critic(steps), critic(states * args.num_samples)
        # pi and pi_i; Q and Q' of the steps taken; Q' of the actions sampled
        forward = 2 * policy + 2 * taken + sampled
        return forward, policy + taken, policy[1:] + taken[1:]


class BeforeRows(Continuous):
    """The form that the script had before it was rebuilt, for --compare."""

    def networks(self):
        torch.zeros(2**23)  # as main() did: glibc then keeps freed memory; it helps ours as much
        script, args = self.script, self.args
        names = ("initial_std", "min_std", "max_std", "covariance", "bound_mean")
        options = {name: getattr(args, name) for name in names}
        yield script.Policy(*self.sizes, layers=args.policy_layers, **options)
        yield script.Critic(*self.sizes, layers=args.critic_layers)

    def collect(self):
        seed = self.script.episode_seed(1, 0, next(self.numbers))
        episode = self.script.collect_episode(self.env, self.agent.policy, seed, "cpu")
        self.replay.add_episode(**episode)

    def sample(self):
        return self.replay.sample(self.args.batch_size, self.args.window)

    def step(self, batch, noise):
        agent, optimiser = self.agent, self.optimiser
        self.script.update(agent, optimiser, self.losses, batch, noise, self.args)


class SAC:
    """stable-baselines3's with its own defaults: one gradient step on 256 transitions a step."""

    def __init__(self, script, episode_length):
        import stable_baselines3

        self.steps = episode_length
        env = script.make_env(script.Args(env_id=TASK, time_limit=episode_length))
        box = gym.spaces.Box(-1, 1, env.action_space.shape)  # which ClipAction hides
        env = gym.wrappers.TransformAction(env, lambda action: action, box)
        self.model = stable_baselines3.SAC("MlpPolicy", env, device="cpu", seed=1)
        self.model.learn(200, log_interval=None)  # beyond the 100 steps before it learns

    def live(self):
        self.model.learn(self.steps, reset_num_timesteps=False, log_interval=None)


class Atari:
    """mpo_atari.py, put together as its main() does, with eight games of Pong."""

    def __init__(self):
        import mpo_atari as script

        self.script, self.args = script, script.Args(buffer_size=100_000, threads=1)
        self.env = script.make_env(self.args, self.args.num_envs)
        space, actions = self.env.single_observation_space, int(self.env.single_action_space.n)
        sizes = space.shape, actions, self.args
        policy, critic = script.Policy(*sizes), script.Critic(*sizes)
        self.agent = script.Agent(policy, critic, eta=1.0, eta_pi=10.0)
        self.optimiser = torch.optim.Adam(self.agent.parameters(), 1e-4, fused=True)
        replay = script.FrameReplay(self.args.buffer_size, self.args.num_envs, space, "unused")
        self.replay, self.games = replay, script.play(self.env, replay, policy, self.args)
        for _ in range(100):
            next(self.games)

    def update(self):
        batch = self.replay.sample(self.args.batch_size, self.args.window, "cpu")
        losses, _ = self.script.discrete_losses(self.agent, batch, self.args)
        self.script.gradient_step(self.agent, self.optimiser, losses)

    def live(self):
        """Eight agent steps and two updates."""
        next(self.games)
        for _ in range(2):
            self.update()

    def play(self):
        """Eight agent steps of the environment alone."""
        self.env.step(self.env.action_space.sample())


class DQN:
    """stable-baselines3's, with 32 frames in a gradient step and one every four agent steps."""

    def __init__(self):
        import stable_baselines3
        from dqn import OneGame, mpo

        settings = {"batch_size": 32, "train_freq": 4, "learning_starts": 100, "device": "cpu"}
        env = OneGame(mpo.Args(threads=1))
        self.model = stable_baselines3.DQN("CnnPolicy", env, buffer_size=5000, seed=1, **settings)
        self.model.learn(400, log_interval=None)

    def update(self):
        self.model.train(gradient_steps=1, batch_size=32)

    def live(self):
        """Eight agent steps and two updates."""
        self.model.learn(8, reset_num_timesteps=False, log_interval=None)


def bare_products(forward, weight_gradients, input_gradients):
    """A function that does these products and nothing else; and its multiply-adds."""
    pairs = [(torch.randn(n, i), torch.randn(o, i).T) for n, i, o in forward]  # y = x W^T
    pairs += [(torch.randn(n, o).T, torch.randn(n, i)) for n, i, o in weight_gradients]  # y'^T x
    pairs += [(torch.randn(n, o), torch.randn(o, i)) for n, i, o in input_gradients]  # y' W
    done = [(x, y, torch.empty(len(x), y.shape[1])) for x, y in pairs]  # into memory it has

    def run():
        for x, y, out in done:
            torch.mm(x, y, out=out)

    return run, sum(x.numel() * y.shape[1] for x, y in pairs)


# ---- Measuring, each in a process of its own.
def take_turns(things, rounds, calls, units):
    """Units per second of each thing in each round; a turn is some calls of some units each."""
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
    update, live = {}, {}
    for name in options.scripts:
        script = load_script(ROOT / name)
        learner = Continuous(script, options.steps)
        update[name], live[name] = learner.update, learner.live
        update[f"{name} products"], _ = bare_products(*learner.products())
    live["SAC"] = SAC(script, options.steps).live
    take_turns(update, 1, 10, 1)  # to warm up
    updates = take_turns(update, options.rounds, options.updates, 1)
    steps = take_turns(live, options.rounds // 3 + 1, 1, options.steps)
    return {"updates": updates, "steps": steps}


def measure_memory(options):
    """Peak memory of a process that does nothing but learn, for one episode."""
    of_sac = options.memory == "SAC"
    script = load_script(ROOT / (options.scripts[0] if of_sac else options.memory))
    learner = (SAC if of_sac else Continuous)(script, options.steps)
    learner.live()
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]
    return int(peak) * 1024


def measure_compared(options):
    """Rates of mpo_continuous.py and of another form of it, at equal sizes."""
    ours, other = load_script(ROOT / SCRIPTS[0]), load_script(options.compare)
    sizes = {name: getattr(ours.Args(), name) for name in SIZES}
    update, live = {}, {}
    for name, script in (("here", ours), ("there", other)):
        form = Continuous if hasattr(script, "Rows") else BeforeRows
        learner = form(script, options.steps, sizes)
        update[name], live[name] = learner.update, learner.live
    take_turns(update, 1, 10, 1)
    updates = take_turns(update, options.rounds, options.updates, 1)
    steps = take_turns(live, options.rounds // 3 + 1, 1, options.steps)
    return {"updates": updates, "steps": steps}


def measure_atari(options):
    ours, theirs = Atari(), DQN()
    update = {"mpo_atari.py": ours.update, "DQN": theirs.update}
    live = {"mpo_atari.py": ours.live, "DQN": theirs.live}
    take_turns(update, 1, 5, 1)  # to warm up
    return {
        "updates": take_turns(update, options.rounds, options.updates, 1),
        "steps": take_turns(live, options.rounds, options.updates // 2, 8),
        "alone": take_turns({"games": ours.play}, options.rounds, options.updates, 8)["games"],
    }


def script_of(name, folder):
    """A file, or the file in this folder that mpo_continuous.py was at a commit."""
    if Path(name).is_file():
        return name
    command = ["git", "-C", str(ROOT), "show", f"{name}:{SCRIPTS[0]}"]
    shown = subprocess.run(command, capture_output=True)
    if shown.returncode:
        sentence = f"{name} is neither a file nor a commit that has {SCRIPTS[0]}."
        print(f"speed.py: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    path = Path(folder) / SCRIPTS[0]
    path.write_bytes(shown.stdout)
    return str(path)


def run_child(threads, *more):
    words = [sys.executable, __file__, *sys.argv[1:], "--child", str(threads), *more]
    surroundings = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=surroundings)
    if done.returncode:
        raise SystemExit("speed.py: a measurement failed; its message stands above.")
    return json.loads(done.stdout.splitlines()[-1])


# ---- Reporting.
def ratio(above, below):
    return f"{statistics.median(a / b for a, b in zip(above, below)):.2f}"


def markdown(head, rows):
    lines = [head, "---|" + "|".join(["---:"] * head.count("|")), *("|".join(row) for row in rows)]
    return "\n".join(f"|{line}|" for line in lines)


def table(results):
    """A row per learner and thread count."""
    rows = []
    for threads, found in results.items():
        for name, rates in found["steps"].items():
            cells = [name, threads, "", "", ""]
            if name in found["updates"]:
                updates = found["updates"][name]
                products = found["updates"][f"{name} products"]
                cells[2:4] = (f"{statistics.median(x):.0f}" for x in (updates, products))
                cells[4] = ratio(updates, products)
            cells += [f"{statistics.median(rates):.0f}", ratio(rates, found["steps"]["SAC"])]
            rows.append([*cells, f"{found['memory'][name] / 1e6:.0f} MB"])
    head = "learner|threads|gradient steps/s|bare products/s|ratio|environment steps/s|of SAC's"
    return markdown(f"{head}|peak memory", rows)


def compared_table(results):
    """A row per thread count."""
    rows = []
    for threads, found in results.items():
        cells = [threads]
        for what in ("updates", "steps"):
            there, here = (found[what][name] for name in ("there", "here"))
            cells += [f"{statistics.median(rates):.1f}" for rates in (there, here)]
            cells.append(ratio(here, there))
        rows.append(cells)
    head = "threads|there, gradient steps/s|here|here / there"
    return markdown(f"{head}|there, environment steps/s|here|here / there", rows)


def atari_table(results):
    """A row per learner and thread count."""
    rows = []
    for threads, found in results.items():
        for name, rates in found["updates"].items():
            median, steps = statistics.median(rates), statistics.median(found["steps"][name])
            cells = [name, threads, f"{median:.1f}", f"{1000 / 32 / median:.2f}"]
            cells += [ratio(found["updates"]["DQN"], rates), f"{steps:.0f}"]
            alone = f"{statistics.median(found['alone']):.0f}" if name != "DQN" else ""
            rows.append([*cells, alone])
    head = "learner|threads|gradient steps/s|ms per frame trained on|of DQN's|agent steps/s"
    return markdown(f"{head}|environment alone, steps/s", rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), help="which ones")
    parser.add_argument("--compare", default="", help="a commit, or a file: another form of it")
    parser.add_argument("--atari", action="store_true", help="measure mpo_atari.py, nothing else")
    parser.add_argument("--threads", nargs="+", type=int, help="default: 1 2; to compare: 1")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each update takes")
    parser.add_argument("--quick", action="store_true", help="turns of 10 updates and of 50 steps")
    parser.add_argument("--output", type=Path, help="a .json, with .md beside it")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.updates, options.steps = (10, 50) if options.quick else (20, 250)  # in a turn
    kind, measure, report = "", measure_speed, table
    if options.atari:
        kind, measure, report = "_atari", measure_atari, atari_table
    if options.compare:
        kind, measure, report = "_compared", measure_compared, compared_table
    if options.child:
        torch.set_num_threads(options.child)
        return print(json.dumps((measure_memory if options.memory else measure)(options)))

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        other = ["--compare", script_of(options.compare, folder)] if options.compare else []
        for threads in options.threads or ([1] if options.compare else [1, 2]):
            found = results[str(threads)] = run_child(threads, *other)
            if measure is measure_speed:
                found["memory"] = {x: run_child(threads, "--memory", x) for x in found["steps"]}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    named = ("torch", "stable-baselines3")
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in named)
    command = " ".join(["python benchmark/studies/speed.py", *sys.argv[1:]])
    where = f"{os.cpu_count()} cores of {cpu}, {packages}; `{command}`."
    text = f"{report(results)}\n\n{where}\n"
    output = options.output or ROOT / f"benchmark/results/speed{kind}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"where": where, "threads": results}, indent=1) + "\n")
    output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
