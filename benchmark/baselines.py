"""Other algorithms under our conditions: stable-baselines3's PPO, DDPG, SAC and TD3 on our tasks.

    python benchmark/baselines.py --algorithm sac --env-id dm_control/walker-walk-v0
    python benchmark/run.py --script benchmark/baselines.py --tasks core6 --label sac \\
        -- --algorithm sac

PPO and DDPG, the paper's own baselines, have the paper's network sizes and optimiser (policy
100-100, critic 200-200, Adam at 5e-4); all else is stable-baselines3's default. SAC and TD3, what a
user would pick instead, have all of stable-baselines3's defaults. DDPG and TD3 explore with
Gaussian noise of 0.1, as in that library's own examples: its default is none at all.

The task, the seed of every episode, the evaluation (deterministic action, 10 episodes) and the
columns of progress.csv are those of mpo_continuous.py. A run that was stopped cannot be resumed: it
begins again.
"""

import dataclasses
import fcntl
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the scripts are
import mpo_continuous as mpo  # noqa: E402


def refuse(sentence):
    print(f"baselines.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


try:
    import stable_baselines3 as sb3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise
except ImportError:
    refuse("this needs stable-baselines3: pip install stable-baselines3")


@dataclass
class Args:
    algorithm: Literal["ppo", "ddpg", "sac", "td3"] = "sac"  # which of stable-baselines3's
    env_id: str = "dm_control/walker-walk-v0"  # the task, as in mpo_continuous.py
    seed: int = 1  # of networks, exploration and every episode
    time_limit: int = 0  # cut episodes after this many steps; 0: the task's own limit, or 1000
    total_timesteps: int = 100_000  # environment steps to train for
    run_dir: str = ""  # folder of this run; empty: runs/TASK__ALGORITHM__SEED__TIME
    eval_every: int = 10_000  # environment steps between two evaluations
    eval_episodes: int = 10  # episodes in an evaluation
    threads: int = 1  # CPU threads


def settings(algorithm, action_size):
    """What departs from stable-baselines3's defaults."""
    noise = NormalActionNoise(np.zeros(action_size), np.full(action_size, 0.1))
    actor_critic = {"pi": [100, 100], "vf": [200, 200]}
    actor_q = {"pi": [100, 100], "qf": [200, 200]}
    return {
        "ppo": {"learning_rate": 5e-4, "policy_kwargs": {"net_arch": actor_critic}},
        "ddpg": {
            "learning_rate": 5e-4,
            "policy_kwargs": {"net_arch": actor_q},
            "action_noise": noise,
        },
        "sac": {},
        "td3": {"action_noise": noise},
    }[algorithm]


def make_env(args):
    """The task of mpo_continuous.py; stable-baselines3 wants the bounds that ClipAction drops."""
    task = mpo.Args(env_id=args.env_id, seed=args.seed, time_limit=args.time_limit)
    env = mpo.make_env(task)
    box = gym.spaces.Box(-1, 1, env.action_space.shape)
    return gym.wrappers.TransformAction(env, lambda action: action, box)


def episode_seed(seed, explore, number):
    """Of an episode, as run_episode() of mpo_continuous.py has it."""
    return int(np.random.SeedSequence((seed, explore, number)).generate_state(1)[0])


class SeededEpisodes(gym.Wrapper):
    """Each training episode starts from the seed that it has in mpo_continuous.py."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.seed, self.episode = seed, -1

    def reset(self, seed=None, options=None):
        self.episode += 1
        return self.env.reset(seed=episode_seed(self.seed, True, self.episode))


def evaluate(model, env, args):
    """Returns of some episodes with the deterministic action, from the seeds that MPO's have."""
    returns = []
    for episode in range(args.eval_episodes):
        state, _ = env.reset(seed=episode_seed(args.seed, False, episode))
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(np.float32(state), deterministic=True)
            state, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


class Log(BaseCallback):
    """A row of progress.csv after each episode, and an evaluation with it where one is due."""

    def __init__(self, args, folder, eval_env):
        super().__init__()
        self.args, self.path, self.eval_env = args, folder / "progress.csv", eval_env
        self.started, self.row_before = time.time(), 0
        names = "global_step charts/episodic_return charts/SPS charts/seconds"
        self.table = [",".join([*names.split(), "eval/episodic_return", "eval/returns"])]

    def _on_step(self):
        episode = self.locals["infos"][0].get("episode")
        if episode is None:
            return True
        steps, every = self.num_timesteps, self.args.eval_every
        finished = steps >= self.args.total_timesteps
        due = finished or steps // every > self.row_before // every
        evaluated = evaluate(self.model, self.eval_env, self.args) if due else []
        mean = float(np.mean(evaluated)) if evaluated else math.nan
        seconds = time.time() - self.started
        row = [steps, episode["r"], steps / seconds, seconds, mean]
        self.table.append(",".join(map(str, [*row, " ".join(f"{x:.6g}" for x in evaluated)])))
        mpo.write_whole(self.path, "\n".join([*self.table, ""]).encode())
        if evaluated:
            print(f"step {steps:,}: the deterministic action returns {mean:.1f}", flush=True)
        self.row_before = steps
        return not finished


def main(args):
    for name in ("total_timesteps", "eval_every", "eval_episodes", "threads"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}.")
    if min(args.seed, args.time_limit) < 0:
        refuse("--seed and --time-limit must be 0 or more.")
    torch.set_num_threads(args.threads)
    env, eval_env = SeededEpisodes(make_env(args), args.seed), make_env(args)
    task = args.env_id.replace("/", "-").replace(":", "-")
    name = f"{task}__{args.algorithm}__{args.seed}__{int(time.time())}"
    folder = Path(args.run_dir or Path("runs") / name)
    if (folder / "args.json").exists():
        refuse(f"{folder} holds a run already; choose another folder with --run-dir.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # held until the end, as the scripts do
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    chosen = settings(args.algorithm, env.action_space.shape[0])
    written = {name: 0.1 if name == "action_noise" else value for name, value in chosen.items()}
    written = {"stable_baselines3": sb3.__version__, "settings": written}
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args) | written, indent=2))
    print(f"{args.env_id}, {args.algorithm}; writing to {folder}", flush=True)
    algorithm = getattr(sb3, args.algorithm.upper())
    model = algorithm("MlpPolicy", env, seed=args.seed, device="cpu", **chosen)
    # Log ends the training, with the first episode that is over at or after total_timesteps.
    model.learn(10**12, callback=Log(args, folder, eval_env))
    model.save(folder / "model.zip")
    print(f"done: {model.num_timesteps:,} steps; everything is in {folder}")


if __name__ == "__main__":
    main(tyro.cli(Args))
