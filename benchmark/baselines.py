"""Other algorithms under our conditions: stable-baselines3's PPO, DDPG, SAC and TD3 on our tasks.

    python benchmark/baselines.py --algorithm sac --env-id dm_control/walker-walk-v0 --total-timesteps 100000
    python benchmark/run.py --script benchmark/baselines.py --tasks core6 --label sac -- --algorithm sac

PPO and DDPG, the paper's own baselines, have the paper's network sizes and optimiser (policy 100-100, critic 200-200,
Adam at 5e-4); all else is stable-baselines3's default. SAC and TD3, what a user would pick instead, have all of
stable-baselines3's defaults. DDPG and TD3 explore with Gaussian noise of 0.1, as in that library's own examples: its
default is none at all.

The task, the seed of every episode, the evaluation (deterministic action, 10 episodes) and the files in the run folder
are those of mpo_continuous.py. A run that was stopped cannot be resumed: it begins again. Needs stable-baselines3:
pip install -c constraints.txt -e '.[benchmark]'.
"""

import csv
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the scripts are
import mpo_continuous as mpo  # noqa: E402

try:
    import stable_baselines3 as sb3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise
except ImportError:
    mpo.refuse("this needs stable-baselines3: pip install -c constraints.txt -e '.[benchmark]'.")


@dataclass
class Args:
    algorithm: Literal["ppo", "ddpg", "sac", "td3"] = "sac"  # which of stable-baselines3's
    env_id: str = "dm_control/walker-walk-v0"  # the task, as in mpo_continuous.py
    seed: int = 1  # seed of networks, exploration and of every episode
    total_timesteps: int = 100_000  # environment steps to train for
    time_limit: int = 0  # cut episodes after this many steps; 0: the task's own limit
    action_bound: float = 0.0  # bound of each action, for tasks that give none; 0: the task's own bounds
    run_dir: str = ""  # folder of this run; empty: runs/TASK__ALGORITHM__SEED__TIME
    eval_every: int = 10_000  # environment steps between two evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes in an evaluation
    threads: int = 0  # CPU threads; 0: PyTorch's choice


def settings(algorithm, action_size):
    """What departs from stable-baselines3's defaults."""
    noise = {"action_noise": NormalActionNoise(np.zeros(action_size), np.full(action_size, 0.1))}
    return {
        "ppo": {"learning_rate": 5e-4, "policy_kwargs": {"net_arch": {"pi": [100, 100], "vf": [200, 200]}}},
        "ddpg": {"learning_rate": 5e-4, "policy_kwargs": {"net_arch": {"pi": [100, 100], "qf": [200, 200]}}} | noise,
        "sac": {},
        "td3": noise,
    }[algorithm]


class SeededEpisodes(gym.Wrapper):
    """Each training episode starts from the seed that it has in mpo_continuous.py."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.seed, self.episode = seed, -1

    def reset(self, seed=None, options=None):
        self.episode += 1
        return self.env.reset(seed=mpo.episode_seed(self.seed, 0, self.episode))


class Log(BaseCallback):
    """A row of progress.csv after each episode, and an evaluation with it where one is due."""

    def __init__(self, args, run_dir, eval_env):
        super().__init__()
        self.args, self.path, self.eval_env = args, run_dir / "progress.csv", eval_env
        self.started, self.row_before = time.time(), 0

    def _on_step(self):
        episode = self.locals["infos"][0].get("episode")
        if episode is None:
            return True
        finished = self.num_timesteps >= self.args.total_timesteps
        due = mpo.crossed(self.args.eval_every, {"global_step": self.num_timesteps, "began": self.row_before})
        evaluated = self.evaluate() if finished or due else ""
        seconds = time.time() - self.started
        row = {"global_step": self.num_timesteps, "charts/episodic_return": episode["r"]}
        row |= {"charts/SPS": self.num_timesteps / seconds, "charts/seconds": seconds}
        row |= {"charts/updates": self.gradient_steps(), "eval/episodic_return": evaluated}
        with open(self.path, "a", newline="") as file:
            table = csv.DictWriter(file, row, lineterminator="\n")
            if file.tell() == 0:
                table.writeheader()
            table.writerow(row)
        if evaluated != "":
            print(f"step {self.num_timesteps:,}: the deterministic action returns {evaluated:.1f}", flush=True)
        self.row_before = self.num_timesteps
        return not finished

    def evaluate(self):
        def policy(state):
            return torch.as_tensor(self.model.predict(state.numpy(), deterministic=True)[0]), None

        args = self.args
        return float(np.mean(mpo.evaluate(self.eval_env, policy, args.eval_episodes, args.seed, "cpu")))

    def gradient_steps(self):
        """stable-baselines3 counts PPO's passes over a rollout, and the others' gradient steps."""
        model = self.model
        return model._n_updates * (model.n_steps // model.batch_size if isinstance(model, sb3.PPO) else 1)


def main(args):
    if args.total_timesteps < 1 or args.eval_episodes < 1 or min(args.seed, args.threads, args.eval_every) < 0:
        mpo.refuse("--total-timesteps and --eval-episodes must be positive, --seed, --threads, --eval-every 0 or more.")
    torch.set_num_threads(args.threads or torch.get_num_threads())
    task = mpo.Args(env_id=args.env_id, seed=args.seed, time_limit=args.time_limit, action_bound=args.action_bound)
    env, eval_env = SeededEpisodes(mpo.make_env(task), args.seed), mpo.make_env(task)
    name = f"{args.env_id.replace('/', '-')}__{args.algorithm}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.run_dir or Path("runs") / name)
    if (run_dir / "args.json").exists():
        mpo.refuse(f"{run_dir} already holds a run; choose another folder with --run-dir.")
    run_dir.mkdir(parents=True, exist_ok=True)
    chosen = settings(args.algorithm, env.action_space.shape[0])
    written = {"run_dir": str(run_dir), "stable_baselines3": sb3.__version__}
    written["settings"] = {name: value if name != "action_noise" else 0.1 for name, value in chosen.items()}
    (run_dir / "args.json").write_text(json.dumps(dataclasses.asdict(args) | written, indent=2))
    print(f"{args.env_id}, {args.algorithm}; writing to {run_dir}", flush=True)
    model = getattr(sb3, args.algorithm.upper())("MlpPolicy", env, seed=args.seed, device="cpu", **chosen)
    # No limit here: Log ends the training with the first episode that is over at or after total_timesteps.
    model.learn(10**12, callback=Log(args, run_dir, eval_env))
    model.save(run_dir / "model.zip")
    print(f"done: {model.num_timesteps:,} steps; everything is in {run_dir}")


if __name__ == "__main__":
    main(tyro.cli(Args))
