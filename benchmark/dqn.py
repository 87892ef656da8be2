"""Discrete actions under our conditions: stable-baselines3's DQN on the tasks of mpo_atari.py.

    python benchmark/dqn.py --env-id MinAtar/Breakout-v1 --total-timesteps 200000
    python benchmark/run.py --script benchmark/dqn.py --tasks ALE/Pong-v5,ALE/Boxing-v5 \\
        --label dqn --total-timesteps 250000

The game, its frames and the layers of the network are those of mpo_atari.py, rewards are clipped
as there, and so are the evaluation (greedy, 10 games) and the columns of progress.csv. What departs
from stable-baselines3's defaults is SETTINGS: on frames the values that are usual for Atari, with a
shorter warm-up, for these runs are short; elsewhere those of MinAtar's authors. A run that was
stopped cannot be resumed: it begins again.
"""

import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the scripts are
import mpo_atari as mpo  # noqa: E402


def refuse(sentence):
    print(f"dqn.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


try:
    import stable_baselines3 as sb3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
except ImportError:
    refuse("this needs stable-baselines3: pip install stable-baselines3")

FRAMES = {"learning_rate": 1e-4, "train_freq": 4, "exploration_final_eps": 0.01}
SMALL = {"learning_rate": 2.5e-4, "train_freq": 1, "exploration_final_eps": 0.1}
SETTINGS = {"buffer_size": 100_000, "learning_starts": 5000, "target_update_interval": 1000}
DECAY = 100_000  # steps in which epsilon falls from 1


@dataclass
class Args:
    env_id: str = "MinAtar/Breakout-v1"  # the task, as in mpo_atari.py
    seed: int = 1  # of the network, exploration and the games
    total_timesteps: int = 200_000  # steps to train for
    run_dir: str = ""  # folder of this run; empty: runs/TASK__dqn__SEED__TIME
    eval_every: int = 25_000  # steps between two evaluations
    eval_episodes: int = 10  # games in an evaluation
    log_every: int = 1000  # steps between two rows of progress.csv
    threads: int = 1  # CPU threads


class OneGame(gym.Env):
    """The environment of mpo_atari.py with one game, as stable-baselines3 wants it."""

    def __init__(self, args):
        self.games, self.scores = mpo.make_env(args, 1), [0.0]
        self.observation_space = self.games.single_observation_space
        self.action_space = self.games.single_action_space

    def reset(self, seed=None, options=None):
        return self.games.reset(seed=seed)[0][0], {}

    def step(self, action):
        state, reward, terminated, truncated, _ = self.games.step(np.array([action]))
        self.scores[-1] += float(reward[0])
        if terminated[0] or truncated[0]:
            self.scores.append(0.0)  # of the next game; scores are never clipped
        learned = float(np.clip(reward[0], -1, 1))
        return state[0], learned, bool(terminated[0]), bool(truncated[0]), {}


class Layers(BaseFeaturesExtractor):
    """All layers of mpo_atari.py's network but the last."""

    def __init__(self, space):
        network = mpo.Network(space.shape, 1, mpo.Args())
        super().__init__(space, network.head.in_features)
        network.head = nn.Identity()
        self.network = network

    def forward(self, state):
        return self.network(state)


class Log(BaseCallback):
    """Rows of progress.csv, with an evaluation where one is due."""

    def __init__(self, args, folder, game, eval_env):
        super().__init__()
        self.args, self.folder, self.game, self.eval_env = args, folder, game, eval_env
        self.started = time.time()
        names = "global_step charts/episodic_return charts/SPS charts/seconds"
        self.table = [",".join([*names.split(), "eval/episodic_return", "eval/returns"])]

    def _on_step(self):
        steps, finished = self.num_timesteps, self.num_timesteps >= self.args.total_timesteps
        if steps % self.args.log_every and not finished:
            return True
        due = finished or steps % self.args.eval_every == 0
        evaluated = []
        if due:  # the action of the greatest value, where ours takes the most probable one
            settings = mpo.Args(seed=self.args.seed)
            evaluated = mpo.play_games(self.eval_env, self.model.q_net, settings, self.folder)
        ended = self.game.scores[-21:-1]
        mean = float(np.mean(evaluated)) if evaluated else math.nan
        seconds = time.time() - self.started
        row = [steps, np.mean(ended) if ended else math.nan, steps / seconds, seconds, mean]
        self.table.append(",".join(map(str, [*row, " ".join(f"{x:.6g}" for x in evaluated)])))
        mpo.write_whole(self.folder / "progress.csv", "\n".join([*self.table, ""]).encode())
        if evaluated:
            print(f"step {steps:,}: return {row[1]:.1f}, evaluated {mean:.1f}", flush=True)
        return not finished


def main(args):
    for name in ("total_timesteps", "eval_every", "eval_episodes", "log_every", "threads"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}.")
    torch.set_num_threads(args.threads)
    torch.empty(8_000_000)  # freed at once, for speed, as in mpo_atari.py
    task = mpo.Args(env_id=args.env_id, seed=args.seed, threads=args.threads)
    game, eval_env = OneGame(task), mpo.make_env(task, args.eval_episodes)
    frames = game.observation_space.shape[1:] == mpo.FRAME
    chosen = SETTINGS | (FRAMES if frames else SMALL)
    name = f"{args.env_id.replace('/', '-')}__dqn__{args.seed}__{int(time.time())}"
    folder = Path(args.run_dir or Path("runs") / name)
    if (folder / "args.json").exists():
        refuse(f"{folder} holds a run already; choose another folder with --run-dir.")
    folder.mkdir(parents=True, exist_ok=True)
    written = {"stable_baselines3": sb3.__version__, "settings": chosen}
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args) | written, indent=2))
    print(f"{args.env_id}, DQN; writing to {folder}", flush=True)
    model = sb3.DQN(
        "MlpPolicy",
        game,
        policy_kwargs={"features_extractor_class": Layers, "net_arch": []},
        exploration_fraction=min(1.0, DECAY / args.total_timesteps),
        seed=args.seed,
        device="cpu",
        **chosen,
    )
    model.learn(args.total_timesteps, callback=Log(args, folder, game, eval_env))
    model.save(folder / "model.zip")
    print(f"done: {model.num_timesteps:,} steps; everything is in {folder}")


if __name__ == "__main__":
    main(tyro.cli(Args))
