"""How soon does DQN's network see what moves? The measurement behind two silent choices of mpo_atari.py.

    python benchmark/frames.py            some five minutes on one thread; prints a table

Random play of Pong gives states and, discounted, the returns that followed them. The critic of mpo_atari.py is fitted
to these returns by plain regression, from PyTorch's initialisation or He's, on frames in [0, 1] or centred, in [-1, 1],
with 32 states a batch: 8 windows of 4 steps or 4 of 8. The figure is the share of the variance explained on games that
were not trained on: 0 is as good as knowing the mean return, and noise keeps it below 1.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the script is
import mpo_atari  # noqa: E402

HELD_OUT = 2  # of the eight games played side by side


def play(steps):
    """A replay of random play, and the discounted return that followed each of its rows. [rows]"""
    args = mpo_atari.Args(threads=1)
    env = mpo_atari.make_env(args)
    shape, actions = env.single_observation_space.shape, int(env.single_action_space.n)
    replay = mpo_atari.FrameReplay(2 * steps, args.num_envs, shape)
    policy = mpo_atari.Policy(shape, actions, args.layers)
    torch.nn.init.zeros_(policy.logits.weight)  # uniform
    games, played = mpo_atari.Games(env, replay, mpo_atari.episode_seed(args.seed, 0)), 0
    while played < steps:
        played += games.step(policy, args)[0]
    returns = torch.zeros(args.num_envs, replay.length)
    reward, last = (replay.rows[name].view(args.num_envs, -1) for name in ("reward", "last"))
    for row in reversed(range(int(replay.written.max()))):
        after = returns[:, row + 1] if row + 1 < replay.length else 0.0
        returns[:, row] = torch.where(last[:, row], 0.0, reward[:, row] + args.gamma * after)
    return replay, returns.flatten(), actions


def batches(replay, returns, games, windows, steps):
    """States [n, 4, 84, 84] in [0, 1], actions [n] and returns [n], of windows of consecutive steps, for ever."""
    usable = int(replay.written.min()) - 500  # the newest rows have returns that were cut off
    while True:
        game = torch.from_numpy(np.random.choice(games, windows))
        start = torch.randint(replay.stack, usable, (windows,))
        index = (game * replay.length + start).unsqueeze(-1) + torch.arange(1 - replay.stack, steps)
        stacks = replay.rows["frame"][index].unfold(1, replay.stack, 1).contiguous().movedim(-1, 2)
        index = index[:, replay.stack - 1 :]
        taken = (~replay.rows["last"][index]).cumprod(1).bool()
        state = stacks[taken].float().div_(255).to(memory_format=torch.channels_last)
        yield state, replay.rows["action"][index][taken], returns[index][taken]


def fit(replay, returns, actions, he, centred, windows, updates):
    """Explained variance on the games held out."""
    torch.manual_seed(1)
    np.random.seed(1)
    critic = mpo_atari.Critic((replay.stack, *mpo_atari.FRAME), actions, ())
    for layer in critic.body if not he else ():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimiser = torch.optim.Adam(critic.parameters(), lr=mpo_atari.Args().learning_rate)

    def predict(state, action):
        return mpo_atari.of_action(critic(state * 2 - 1 if centred else state), action)

    games = np.arange(len(replay.written))
    training = batches(replay, returns, games[:-HELD_OUT], windows, 32 // windows)
    for state, action, target in itertools.islice(training, updates):
        loss = (predict(state, action) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    held_out = itertools.islice(batches(replay, returns, games[-HELD_OUT:], 64, 1), 16)
    with torch.no_grad():
        predicted, target = map(
            torch.cat, zip(*((predict(state, action), target) for state, action, target in held_out))
        )
    return 1 - ((predicted - target).square().mean() / target.var(correction=0)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30_000, help="agent steps of random play")
    parser.add_argument("--updates", type=int, default=1000, help="gradient steps of each fit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    replay, returns, actions = play(options.steps)
    print("| initialisation | frames in | 8 windows of 4 | 4 windows of 8 |\n|---|---|---:|---:|")
    for he, centred in itertools.product((False, True), (False, True)):
        found = [fit(replay, returns, actions, he, centred, windows, options.updates) for windows in (8, 4)]
        name = f"{'He' if he else 'PyTorch'} | {'[-1, 1]' if centred else '[0, 1]'}"
        print(f"| {name} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
