"""How soon does DQN's network see what moves? What is behind two silent choices of mpo_atari.py.

    python benchmark/studies/frames.py            some five minutes on one thread; prints a table

Random play of Pong gives states and, discounted, the returns that followed them. The critic of
mpo_atari.py is fitted to these returns by plain regression, from PyTorch's initialisation or He's,
on frames in [0, 1] or centred, in [-1, 1], with 32 states a batch: 8 windows of 4 steps or 4 of 8.
The figure is the share of the variance explained on games that were not trained on: 0 is as good as
knowing the mean return, and noise keeps it below 1.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # where the script is
import mpo_atari  # noqa: E402

HELD_OUT = 2  # of the eight games played side by side


def play(steps):
    """A replay of random play, and the discounted return that followed each of its rows. [rows]"""
    args = mpo_atari.Args(threads=1)
    env = mpo_atari.make_env(args, args.num_envs)
    space, actions = env.single_observation_space, int(env.single_action_space.n)
    rows = 2 * steps // args.num_envs * args.num_envs
    replay = mpo_atari.FrameReplay(rows, args.num_envs, space, "unused")  # it is never saved
    policy = mpo_atari.Policy(space.shape, actions, args)
    torch.nn.init.zeros_(policy.head.weight)  # uniform
    torch.manual_seed(args.seed)
    games, played = mpo_atari.play(env, replay, policy, args), 0
    while played < steps:
        played += next(games)[0]
    reward, final = (x.view(-1, args.num_envs) for x in (replay.rows.reward, replay.rows.final))
    returns = torch.zeros(len(reward) + 1, args.num_envs)
    for row in reversed(range(replay.written // args.num_envs)):
        after = reward[row] + args.gamma * returns[row + 1]
        returns[row] = torch.where(final[row] > 0, 0.0, after)
    return replay, returns[:-1], (space.shape, actions)


def batches(replay, returns, games, windows, steps):
    """States [n, 4, 84, 84] in [-1, 1], actions [n] and returns [n], of some games, for ever."""
    usable = replay.written // replay.num_envs - 500  # the newest rows' returns were cut off
    back = torch.arange(1 - replay.stack, steps)
    while True:
        game = torch.from_numpy(np.random.choice(games, windows)).unsqueeze(-1)
        row = torch.randint(replay.stack, usable, (windows, 1)) + back  # [windows, stack + steps]
        index = row * replay.num_envs + game
        stacks = replay.rows.state[index].unfold(1, replay.stack, 1).contiguous().movedim(-1, 2)
        index, row = index[:, replay.stack - 1 :], row[:, replay.stack - 1 :]
        taken = replay.rows.final[index].cumsum(1) == 0  # the steps before a game's end
        state = mpo_atari.as_floats(stacks[taken])
        yield state, replay.rows.action[index][taken], returns[row, game.expand_as(row)][taken]


def fit(replay, returns, sizes, he, centred, windows, updates):
    """Explained variance on the games held out."""
    torch.manual_seed(1)
    np.random.seed(1)
    args = mpo_atari.Args()
    critic = mpo_atari.Critic(*sizes, args)
    for layer in critic.layers if not he else ():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimiser = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)

    def predict(state, action):
        return mpo_atari.of_action(critic(state if centred else (state + 1) / 2), action)

    games = np.arange(replay.num_envs)
    training = batches(replay, returns, games[:-HELD_OUT], windows, 32 // windows)
    for state, action, target in itertools.islice(training, updates):
        loss = (predict(state, action) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    held_out = itertools.islice(batches(replay, returns, games[-HELD_OUT:], 64, 1), 16)
    with torch.no_grad():
        pairs = [(predict(state, action), target) for state, action, target in held_out]
    predicted, target = map(torch.cat, zip(*pairs))
    return 1 - ((predicted - target).square().mean() / target.var(correction=0)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30_000, help="agent steps of random play")
    parser.add_argument("--updates", type=int, default=1000, help="gradient steps of each fit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    replay, returns, sizes = play(options.steps)
    print("| initialisation | frames in | 8 windows of 4 | 4 windows of 8 |\n|---|---|---:|---:|")
    for he, centred in itertools.product((False, True), (False, True)):
        how = (replay, returns, sizes, he, centred)
        found = [fit(*how, windows, options.updates) for windows in (8, 4)]
        name = f"{'He' if he else 'PyTorch'} | {'[-1, 1]' if centred else '[0, 1]'}"
        print(f"| {name} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
