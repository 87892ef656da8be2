# SPDX-License-Identifier: MIT
"""Maximum a Posteriori Policy Optimisation (MPO) for discrete actions: Algorithm 2 of the paper
(Abdolmaleki et al., ICLR 2018). From the project "MPO, one readable file per variant".

    python mpo_atari.py --env-id ALE/Pong-v5                           learn to play from the screen
    python mpo_atari.py --env-id CartPole-v1 --total-timesteps 30000   a small task, in minutes
    python mpo_atari.py --resume RUN_DIR                               continue a stopped run
    python mpo_atari.py --evaluate RUN_DIR --capture-video             watch what it learned

Returns to expect: of CartPole-v1 (most probable action, three seeds) about 320 of 500 after 10,000
steps, 450 after 20,000, 500 after 30,000. Of Pong (games played in training, one seed) -19 after
100,000 steps, -13 after 300,000, -8 after 400,000. A step of an Atari game is four frames.

    theta, theta_i   the policy pi being fitted, and the target policy pi_i it started from
    phi, phi'        the critic Q, and its target Q'
    q(a|s)           the E-step's improved policy, proportional to pi_i(a|s) exp(Q'(s,a)/eta)
    eta              temperature of the E-step: the multiplier of KL(q || pi_i) <= epsilon
    eta_pi           multiplier of the M-step's bound KL(pi_i || pi) <= epsilon_pi
    b(a|s)           the policy that acted when the data was collected
    B, T, A, N, S    in shapes: windows, their steps, actions, games side by side, observation size
"""
# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["torch>=2.4,<3", "numpy>=1.26,<3", "gymnasium>=1.0,<2", "ale-py>=0.11,<1",
#     "minatar>=1.0.15,<2", "pygame>=2.1.3,<3", "tyro>=0.9,<2", "tensorboard>=2.16,<3",
#     "tqdm>=4.66,<5", "imageio>=2.34,<3", "imageio-ffmpeg>=0.5,<1"]
# ///

import signal

if __name__ == "__main__":  # the imports take seconds: Ctrl-C ends them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import copy
import importlib
import io
import json
import math
import os
import sys
import threading
import time
import zipfile
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ORIGIN = ("mpo_atari.py", 1)  # what saved files say of the script, and of their format
PAPER = {"learning_rate": 5e-4, "policy_learning_rate": 5e-4, "target_period": 1000}  # see --paper
STACK, FRAME = 4, (84, 84)  # what the policy sees of a screen is its last four frames
SMALL = dict(epsilon_pi=3e-3, window=8, batch_size=16, learning_rate=1e-3, multiplier_rate=1e-2)
SMALL |= dict(policy_learning_rate=1e-4, updates_per_step=1.0, learning_starts=1000, threads=1)


# ---- Settings. Each comment is the flag's line in --help; "paper:" marks a printed value.
@dataclass
class Args:
    """Maximum a Posteriori Policy Optimisation for discrete actions. The defaults are for frames of
    84 x 84; a value after "small:" is the default for vectors and for images of up to 32 x 32."""

    env_id: str = "ALE/Pong-v5"  # ALE/GAME-v5, MinAtar/GAME-v1, another Gymnasium task, MODULE:TASK
    seed: int = 1  # of networks, exploration, replay sampling and the games
    paper: bool = False  # take the values that the paper prints where our defaults are others
    num_envs: int = 8  # N, games played side by side
    time_limit: int = 0  # cut games after this many steps; 0: the task's own limit (Atari: 27,000)
    clip_rewards: bool = True  # learn from rewards clipped to [-1, 1]; scores are never clipped

    gamma: float = 0.99  # discount (paper: 0.99)
    epsilon: float = 0.1  # the E-step's bound on KL(q || pi_i) (paper: 0.1)
    epsilon_pi: float = 1e-3  # the M-step's bound on KL(pi_i || pi) (small: 3e-3; paper: none)
    window: int = 4  # T, steps in a replayed window, after which Retrace bootstraps (small: 8)
    batch_size: int = 8  # B, the windows in a gradient step (small: 16)
    layers: tuple[int, ...] = (128, 128)  # hidden layers for vectors; images have convolutions

    learning_rate: float = 1e-4  # Adam's rate for the critic (small: 1e-3; paper: 5e-4)
    policy_learning_rate: float = 2e-5  # Adam's rate for the policy (small: 1e-4; paper: 5e-4)
    multiplier_rate: float = 2e-3  # Adam's rate for the logarithms of the multipliers (small: 1e-2)
    updates_per_step: float = 0.25  # gradient steps per step; 0.25: as DQN (small: 1.0)
    target_period: int = 200  # gradient steps between copies of the targets (paper: 1000)
    learning_starts: int = 5000  # steps before the first gradient step (small: 1000)
    buffer_size: int = 1_000_000  # steps kept in the replay; a million frames take 7.1 GB

    total_timesteps: int = 400_000  # steps to train for, over all games
    run_dir: str = ""  # folder of this run; empty: runs/TASK__SCRIPT__SEED__TIME
    resume: str = ""  # continue the run in this folder; settings above total_timesteps stay
    evaluate: str = ""  # train nothing; evaluate the policy saved in this folder or file
    eval_every: int = 25_000  # steps between two evaluations, each with a checkpoint
    eval_episodes: int = 10  # games in an evaluation, played side by side
    log_every: int = 1000  # steps between two rows of progress.csv
    capture_video: bool = False  # film a game of each evaluation: RUN_DIR/evaluation.mp4
    threads: int = min(4, os.cpu_count())  # CPU threads: convolutions use up to 4 well (small: 1)
    device: str = "cpu"  # PyTorch device of the networks, such as cpu or cuda


# ---- Environment. N games side by side. One that is over spends its next step on a reset: whatever
# action it is given then, it answers with the first observation of its next game.
def make_env(args, num_envs):
    """N games, observed as [N, 4, 84, 84], small [N, h, w, C] or [N, S]; actions are 0 .. A-1."""
    family, verb = args.env_id.split("/")[0], "filmed" if args.capture_video else "made"
    sys.path.append(os.getcwd())  # where MODULE of MODULE:TASK may be
    try:
        if family == "MinAtar" and "MinAtar/Breakout-v1" not in gym.registry:
            importlib.import_module("minatar.gym").register_envs()
        if family != "ALE":
            return gym.vector.SyncVectorEnv([lambda: make_game(args)] * num_envs)
        # ale-py makes DQN's frames: 84 x 84, the last four, each the greater of two screens
        ale_py = importlib.import_module("ale_py")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        options = {"reward_clipping": False, "repeat_action_probability": 0.0}
        options["num_threads"] = min(args.threads, num_envs)
        options["max_num_frames_per_episode"] = 4 * (args.time_limit or 27_000)
        return gym.make_vec(args.env_id, num_envs, **options)
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        if isinstance(error, ImportError) and error.name:
            reason += f"; pip install {error.name.split('.')[0].replace('_', '-')}"
        refuse(f"{args.env_id} cannot be {verb} here: {reason}")


def make_game(args):
    """A game that is not ALE's. Frames are stacked as ale-py does, with zeros at the start."""
    options = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = gym.make(args.env_id, disable_env_checker=True, **options)
    env.reset(seed=0)
    if args.capture_video:
        env.render()
    actions, seen = env.action_space, env.observation_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start:
        refuse(f"{args.env_id} has actions {actions}; this script needs a choice of 0 .. A-1.")
    image = seen.dtype in (np.uint8, np.bool_) and len(seen.shape) > 1
    small = image and len(seen.shape) == 3 and all(3 <= side <= 32 for side in seen.shape[:2])
    if args.time_limit or not (env.spec.max_episode_steps or small):
        env = gym.wrappers.TimeLimit(env, args.time_limit or 1000)
    if not image:
        return gym.wrappers.DtypeObservation(gym.wrappers.FlattenObservation(env), np.float32)
    if small:
        return env
    if seen.shape != FRAME:
        refuse(f"{args.env_id} shows images of {seen.shape}, not {FRAME} or (3 to 32, 3 to 32, C).")
    return gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")


# ---- Networks. Policy and critic each have their own: DQN's for frames, as in the paper; MinAtar's
# for small images; hidden layers for vectors, with a layer norm after the first, as usual for MPO.
def hidden_layers(input_size, sizes, linear=nn.Linear, norms=1):
    """Linear layers and ReLUs, with a layer norm in the first few."""
    modules = []
    for number, (size, next_size) in enumerate(zip((input_size, *sizes), sizes)):
        norm = [nn.LayerNorm(next_size)] if number < norms else []
        modules += [linear(size, next_size), *norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*modules)


def image_layers(layers):
    modules = []
    for layer in layers:  # He's initialisation: with PyTorch's own, what moves in a frame is lost
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.ReLU(inplace=True)]
    modules.insert(-2, nn.Flatten())
    return nn.Sequential(*modules).to(memory_format=torch.channels_last)


class Network(nn.Module):
    """From observations to a number for each action: [..., *shape] -> [..., A]."""

    def __init__(self, shape, actions, args):
        super().__init__()
        self.axes, self.small = len(shape), len(shape) == 3 and shape[1:] != FRAME
        if self.small:
            flat = nn.Linear(16 * (shape[0] - 2) * (shape[1] - 2), 128)
            self.layers, size = image_layers([nn.Conv2d(shape[2], 16, 3), flat]), 128
        elif self.axes == 3:
            layers = [nn.Conv2d(STACK, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)]
            self.layers, size = image_layers([*layers, nn.Linear(64 * 7 * 7, 512)]), 512
        else:
            self.layers, size = hidden_layers(*shape, args.layers), args.layers[-1]
        self.head = nn.Linear(size, actions)

    def forward(self, state):
        leading = state.shape[: -self.axes]
        state = as_floats(state).flatten(0, -self.axes - 1)  # convolutions take one leading axis
        state = state.movedim(-1, 1) if self.small else state  # and then the channels
        return self.head(self.layers(state)).unflatten(0, leading)


def as_floats(state):
    """Bytes as floats in [-1, 1], true and false as 1 and 0; floats stay as they are."""
    if state.dtype == torch.uint8:
        return state.float().div_(127.5).sub_(1)
    return state if state.is_floating_point() else state.float()


class Policy(Network):
    """pi(a|s, theta), a probability for each action. state [..., *shape] -> log pi [..., A]."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.head.weight.data.mul_(0.01)  # start nearly uniform
        self.head.bias.data.zero_()

    def forward(self, state):
        return super().forward(state).log_softmax(-1)


class Critic(Network):
    """Q(s, a, phi) of every action. state [..., *shape] -> [..., A]."""


class Agent(nn.Module):
    """All that is learned: theta, phi, their targets, and log_NAME of each multiplier."""

    def __init__(self, policy, critic, **multipliers):
        super().__init__()
        self.policy, self.critic = policy, critic
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        for name, start in multipliers.items():
            self.register_parameter(f"log_{name}", nn.Parameter(torch.tensor(math.log(start))))


def of_action(values, action):
    """The value of the action taken. values [..., A], action [...] -> [...]."""
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


# ---- Policy evaluation: Retrace. Off-policy data is corrected by clipped importance weights.
def trace_coefficient(log_prob, behaviour_log_prob):
    """c = min(1, pi(a|s) / b(a|s)). Any shape."""
    return (log_prob - behaviour_log_prob).clamp(max=0.0).exp()


def retrace(q, v_next, reward, discount, trace):
    """Retrace targets [B, T]. v_next[:, t] is E_pi Q'(s_{t+1},.), trace[:, t < T-1] is c_{t+1}."""
    delta = reward + discount * v_next - q  # r_t + gamma E_pi Q'(s_{t+1},.) - Q'(s_t,a_t)
    corrections = [delta[:, -1]]
    for t in reversed(range(q.shape[1] - 1)):
        corrections.append(delta[:, t] + discount[:, t] * trace[:, t] * corrections[-1])
    return q + torch.stack(corrections[::-1], dim=1)  # + sum_j gamma^{j-t} (prod c_k) delta_j


def masked_mean(x, mask):
    """Mean of x where mask is 1. Both of one shape."""
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


# ---- E-step: q(a|s) = pi_i(a|s) exp(Q'(s,a)/eta) / Z(s), eta at the minimum of the convex dual g.
# All actions are scored, so M is A, the sums are exact, and log_prior is log pi_i(a|s).
def temperature_dual(eta, scores, log_prior, epsilon, mask):
    """g(eta) = eta epsilon + eta E_s log sum_a exp(log_prior + Q'(s,a)/eta). scores [..., M]."""
    best = scores.amax(-1, keepdim=True)  # outside the exponent, so that float32 keeps the rest
    log_z = torch.logsumexp(log_prior + (scores - best) / eta, dim=-1)
    return eta * epsilon + masked_mean(eta * log_z + best.squeeze(-1), mask)


def improved_policy(eta, scores, log_prior):
    """q(a|s) on the actions scored, summing to 1 over them. scores [..., M] -> [..., M]."""
    return torch.softmax(log_prior + (scores - scores.amax(-1, keepdim=True)) / eta, dim=-1)


def categorical_kl(p, log_q):
    """KL(p || q) = sum_a p (log p - log q). p [..., M] -> [...]."""
    return (p * (p.clamp(min=1e-30).log() - log_q)).sum(-1)


# ---- M-step: maximise E_q log pi(a|s, theta) while KL(pi_i || pi) stays within epsilon_pi.
def lagrangian(eta, epsilon, kl):
    """eta (epsilon - C), twice: for the multiplier, which descends, and theta, which ascends."""
    return eta * (epsilon - kl.detach()), eta.detach() * (epsilon - kl)


# ---- Replay: a ring of rows in the order they were lived, one for each of the N games in turn. A
# row is what was seen (of a stack its newest frame), the action's number, log b(a|s), a reward,
# whether the step terminated, and whether the row is final: the game was over, no step was taken.
Rows = namedtuple("Rows", "state action behaviour_log_prob reward terminated final")


class FrameReplay:
    def __init__(self, capacity, num_envs, space, folder):
        self.num_envs, self.capacity, self.written = num_envs, capacity // num_envs * num_envs, 0
        self.stack, frame = (STACK, FRAME) if space.shape[1:] == FRAME else (1, space.shape)
        kinds = [(frame, space.dtype), ((), np.int64), *[((), np.float32)] * 4]
        # numpy's zeros take no memory until they are written to; PyTorch's do
        self.rows = Rows(*(torch.as_tensor(np.zeros((self.capacity, *s), k)) for s, k in kinds))
        self.folder, self.ends = Path(folder), [0]  # rows written by the end of each file

    def add_steps(self, state, *step):
        """A row for each game: state [N, *shape], and the other entries, [N] each."""
        start = self.written % self.capacity
        frame = state[:, -1] if self.stack > 1 else state
        for ring, values in zip(self.rows, [frame, *step]):
            ring[start : start + self.num_envs] = torch.as_tensor(values)
        self.written += self.num_envs

    def sample(self, batch_size, window, device):
        """Windows that start at steps drawn uniformly, and end at the newest rows at the latest."""
        oldest = max(0, self.written - self.capacity + (self.stack - 1) * self.num_envs)
        end = self.written - window * self.num_envs
        start = torch.randint(oldest, end, (batch_size,))
        while (final := self.rows.final[start % self.capacity] > 0).any():  # no step begins there
            start[final] = torch.randint(oldest, end, (int(final.sum()),))
        times = torch.arange(1 - self.stack, window + 1)
        index = (start.unsqueeze(-1) + times * self.num_envs) % self.capacity  # [B, T + stack]

        # a stack is a row's frame and those before it, with zeros for those of an earlier game
        state, final = self.rows.state[index], self.rows.final[index]
        if self.stack > 1:
            game = (final.cumsum(1) - final).unfold(1, self.stack, 1)  # its number in the window
            same = (game == game[..., -1:])[:, :, None, None]
            state = (state.unfold(1, self.stack, 1) * same).contiguous()  # a pixel's together
            state = state.movedim(-1, 2)  # [B, T+1, stack, ...]
        others = (ring[index[:, self.stack - 1 :]] for ring in self.rows[1:])
        return Rows(*(x.to(device) for x in (state, *others)))

    # A million frames are too much to be written with each checkpoint. Only new rows are, to files
    # of their own in the run's folder, and the checkpoint says which files belong to it.
    def files(self):
        return [self.folder / f"replay-{end}.pt" for end in self.ends[1:]]

    def state_dict(self):
        oldest = self.written - self.capacity
        if self.written > self.ends[-1]:
            for path in set(self.folder.glob("replay-*")) - set(self.files()):
                path.unlink()  # the last checkpoint does without it
            first = max(0, oldest, self.ends[-1] - self.num_envs)  # also what a resume made final
            for numbers in torch.arange(first, self.written).split(8192):
                self.ends.append(int(numbers[-1]) + 1)
                index, buffer = numbers % self.capacity, io.BytesIO()
                rows = [ring[index] for ring in self.rows]
                torch.save({"origin": ORIGIN, "index": index, "rows": rows}, buffer)
                write_whole(self.files()[-1], buffer.getvalue())
        self.ends = [0, *(end for end in self.ends if end > max(0, oldest))]
        return {"ends": self.ends}

    def load_state_dict(self, saved):
        self.ends, self.written = saved["ends"], saved["ends"][-1]
        for path in self.files():
            part = read_saved(path)
            for ring, values in zip(self.rows, part["rows"]):
                ring[part["index"]] = values
        # the games of then are not played on: they end with their newest rows
        newest = (self.written - self.num_envs) % self.capacity
        self.rows.final[newest : newest + self.num_envs] = 1.0


# ---- One gradient step, in the order of the paper's Algorithm 2, with sums for its samples.
def discrete_losses(agent, batch, args):
    """The losses of one step, and metrics. batch [B, T+1, ...]."""
    # of the T steps from s_0 .. s_{T-1}: those behind the end of a game are not valid
    action, behaviour_log_prob, reward, terminated = (x[:, :-1] for x in batch[1:5])
    valid = (batch.final.cumsum(1) == 0)[:, :-1]
    # of s_0 .. s_T: one can act in the first, and where a valid step led without terminating
    alive = F.pad(valid * (1 - terminated), (1, 0), value=1.0)
    state = as_floats(batch.state)  # once for all four networks

    # pi_i and Q' of every action in each state: for V in Retrace and for q in the E-step
    with torch.no_grad():
        log_pi_i = agent.target_policy(state)  # [B, T+1, A]
        scores = agent.target_critic(state)  # [B, T+1, A]

        q_i = of_action(scores[:, :-1], action)
        v_next = (log_pi_i.exp() * scores).sum(-1)[:, 1:]  # E_pi Q'(s_{t+1},.)
        log_prob = of_action(log_pi_i[:, :-1], action)
        trace = trace_coefficient(log_prob, behaviour_log_prob) * valid
        discount = args.gamma * (1 - terminated)  # a termination bootstraps nothing, a limit does
        target = retrace(q_i, v_next, reward, discount, trace[:, 1:])

    # Q-function gradient: (Q(s_t, a_t, phi) - Q_t^ret)^2
    q = of_action(agent.critic(state[:, :-1]), action)
    critic_loss = masked_mean((q - target).square(), valid)

    # E-step gradient: g(eta), then q(a|s)
    eta = agent.log_eta.exp()
    dual_loss = temperature_dual(eta, scores, log_pi_i, args.epsilon, alive)
    weights = improved_policy(eta.detach(), scores, log_pi_i)

    # M-step gradient: L(theta, eta_pi)
    log_pi = agent.policy(state)
    likelihood = masked_mean((weights * log_pi).sum(-1), alive)  # E_q log pi(a|s, theta)
    kl = masked_mean(categorical_kl(log_pi_i.exp(), log_pi), alive)
    eta_pi = agent.log_eta_pi.exp()
    multiplier_term, policy_term = lagrangian(eta_pi, args.epsilon_pi, kl)
    multiplier_loss = dual_loss + multiplier_term
    policy_loss = -(likelihood + policy_term)

    losses = {"critic": critic_loss, "policy": policy_loss, "multipliers": multiplier_loss}
    kl_q = masked_mean(categorical_kl(weights, log_pi_i), alive)
    metrics = {f"losses/{name}": loss for name, loss in losses.items()}
    metrics |= {"mpo/eta": eta, "mpo/eta_pi": eta_pi}
    metrics["mpo/kl_q_relative"] = kl_q / args.epsilon  # of each KL to its bound
    metrics["mpo/kl_pi_relative"] = kl / args.epsilon_pi
    metrics["mpo/trace"] = masked_mean(trace[:, 1:], valid[:, 1:])
    metrics["mpo/entropy"] = -masked_mean((log_pi.exp() * log_pi).sum(-1), alive)
    metrics["mpo/q_std_over_actions"] = masked_mean(scores.std(-1, correction=0), alive)
    metrics["mpo/q_mean"] = masked_mean(q, valid)
    return losses, {name: x.detach() for name, x in metrics.items()}


def gradient_step(agent, optimiser, losses):
    """One step of Adam on theta, phi and the multipliers."""
    optimiser.zero_grad()
    sum(losses.values()).backward()
    for network in (agent.policy, agent.critic):
        length = nn.utils.clip_grad_norm_(network.parameters(), max_norm=40.0)
        if not math.isfinite(length):
            raise FloatingPointError("a gradient became infinite, or not a number")
    optimiser.step()
    for log_eta in agent.parameters(recurse=False):
        log_eta.data.clamp_(math.log(1e-6), math.log(2e4))  # from where it can still come back


# ---- Games, and the training loop.
@torch.no_grad()
def choose(policy, state, args, explore=True):
    """Actions drawn from the policy, or the most probable ones, and log pi. -> [N], [N]."""
    log_prob = policy(torch.as_tensor(state, device=args.device)).cpu()
    action = torch.multinomial(log_prob.exp(), 1).squeeze(-1) if explore else log_prob.argmax(-1)
    return action.numpy(), of_action(log_prob, action).numpy()


def play(env, replay, policy, args):
    """Play for ever. Yields how many steps were taken, and the scores of the games they ended."""
    state, _ = env.reset(seed=int(torch.randint(2**30, ())))  # other games' seeds count up from it
    score, over = np.zeros(len(state)), np.zeros(len(state), bool)
    while True:
        action, log_prob = choose(policy, state, args)
        next_state, reward, terminated, truncated, _ = env.step(action)
        if not (np.isfinite(next_state).all() and np.isfinite(reward).all()):
            raise FloatingPointError("the environment gave a number that is not finite")
        learned = reward.clip(-1, 1) if args.clip_rewards else reward
        replay.add_steps(state, action, log_prob, learned, terminated, over)
        score = np.where(over, 0.0, score + reward)
        steps, state, over = int((~over).sum()), next_state, terminated | truncated
        yield steps, score[over].tolist()


def main(args):
    """Train as args say, or evaluate; returns the policy."""
    check_games(args)
    eval_env = make_env(args, args.eval_episodes)
    torch.set_num_threads(min(args.threads, os.cpu_count()))
    torch.empty(8_000_000)  # freed at once: from now on malloc keeps what is smaller, for speed
    torch.manual_seed(args.seed)
    space, actions = eval_env.single_observation_space, int(eval_env.single_action_space.n)
    policy, critic = Policy(space.shape, actions, args), Critic(space.shape, actions, args)
    if args.evaluate:
        policy.load_state_dict(read_saved(Path(args.evaluate))["policy"])
        returns = play_games(eval_env, policy.to(args.device), args, Path(args.evaluate).parent)
        print(f"{args.env_id}: mean {np.mean(returns):.1f} of {[round(x, 1) for x in returns]}")
        return policy
    agent = Agent(policy, critic, eta=1.0, eta_pi=10.0).to(args.device)
    betas = (0.9, 0.9)  # equal: after a burst the multipliers come back as fast as they went
    groups = [
        {"params": policy.parameters(), "lr": args.policy_learning_rate},
        {"params": critic.parameters(), "lr": args.learning_rate},
        {"params": agent.parameters(recurse=False), "lr": args.multiplier_rate, "betas": betas},
    ]
    optimiser = torch.optim.Adam(groups, fused=True)
    replay = FrameReplay(args.buffer_size, args.num_envs, space, args.resume)
    run = Run(args, agent=agent, optimiser=optimiser, replay=replay)
    done, replay.folder = run.done, run.folder  # how many steps, games and updates so far
    scores = done.setdefault("scores", [])  # of the last 20 games
    metrics = done.setdefault("metrics", {})  # of the last gradient step

    with run:
        # those it was stopped in are not saved: a resumed run begins new games
        games = play(make_env(args, args.num_envs), replay, policy, args)
        while done["steps"] < args.total_timesteps and not run.stopping:
            # update the replay with a step of each game (more before the first gradient step)
            before = done["steps"]
            while done["steps"] == before or done["steps"] < args.learning_starts:
                steps, ended = next(games)
                done["steps"] += steps
                done["episodes"] += len(ended)
                scores[:] = [*scores, *ended][-20:]
                run.show_progress(scores or [math.nan])

            # find a better policy by gradient descent
            earned = int(args.updates_per_step * (done["steps"] - args.learning_starts))
            for _ in range(max(1, earned) - done["updates"]):
                batch = replay.sample(args.batch_size, args.window, args.device)
                losses, found = discrete_losses(agent, batch, args)
                gradient_step(agent, optimiser, losses)
                metrics |= found
                done["updates"] += 1
                if done["updates"] % args.target_period == 0:  # theta_i = theta, phi' = phi
                    agent.target_policy.load_state_dict(policy.state_dict())
                    agent.target_critic.load_state_dict(critic.state_dict())

            # log, evaluate, save
            finished = done["steps"] >= args.total_timesteps
            due = finished or done["steps"] // args.eval_every > before // args.eval_every
            if due or done["steps"] // args.log_every > before // args.log_every:
                evaluated = play_games(eval_env, policy, args, run.folder) if due else []
                run.log(scores or [math.nan], evaluated, metrics)
            if due or run.stopping:
                run.save()
    return policy


# ==== Plumbing: evaluation and video, the run's folder, checks of the user's input. MPO ends here.
def play_games(env, policy, args, folder):
    """Scores of a whole game in each environment, the first of them filmed if asked for."""
    seed = np.random.SeedSequence((args.seed, 1)).generate_state(1)[0] >> 2
    state, _ = env.reset(seed=int(seed))  # the other games' seeds count up from it
    score, playing, film = np.zeros(env.num_envs), np.ones(env.num_envs, bool), None
    if args.capture_video:
        fps = env.metadata.get("render_fps", 15)  # of Atari's 60 frames the agent sees every fourth
        film = imageio.get_writer(folder / "evaluation.mp4", fps=fps, macro_block_size=2)
    while playing.any():
        if film and playing[0]:
            film.append_data(picture(env, state[0]))
        action, _ = choose(policy, state, args, explore=False)
        state, reward, terminated, truncated, _ = env.step(action)
        score += reward * playing
        playing &= ~(terminated | truncated)
    if film:
        film.close()
    return score.tolist()


def picture(env, state):
    """The first game as it is rendered, or the newest frame that the policy sees; enlarged."""
    image = state[-1] if state.shape[1:] == FRAME else env.envs[0].render()
    if image.dtype != np.uint8:  # from 0 to 1, as MinAtar's
        image = (255 * image).astype(np.uint8)
    times = -(-320 // len(image))
    return image.repeat(times, 0).repeat(times, 1)


class Run:
    """A run's folder: settings, log and checkpoint. As a context it minds signals and faults."""

    def __init__(self, args, **parts):
        self.args, self.parts, self.table, self.stopping = args, parts, [], 0
        self.done = {"steps": 0, "episodes": 0, "updates": 0, "seconds": 0.0}
        name = f"{args.env_id}__{Path(ORIGIN[0]).stem}__{args.seed}__{int(time.time())}"
        name = name.replace("/", "-").replace(":", "-")
        self.folder = Path(args.resume or args.run_dir or Path("runs", name))
        if (self.folder / "checkpoint.pt").exists() and not args.resume:
            refuse(f"{self.folder} holds a run already; --resume {self.folder} continues it.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / "lock", "w")
            if os.name == "posix":  # a lock that goes with the process, however it ends
                import fcntl

                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if args.resume:
                saved = read_saved(self.folder / "checkpoint.pt")
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
                self.done, self.table = saved["done"], saved["table"]
                torch.set_rng_state(saved["random"])
            self.save()
            write_whole(self.folder / "args.json", json.dumps(asdict(args), indent=2).encode())
            self.writer = SummaryWriter(self.folder, purge_step=self.done["steps"] + 1)
        except BlockingIOError:
            refuse(f"another process is training in {self.folder}.")
        except OSError as error:
            refuse(f"{self.folder} cannot be written: {error}.")
        self.bar = tqdm(total=args.total_timesteps, unit=" steps", miniters=0, disable=None)
        self.started = time.time() - self.done["seconds"]
        tqdm.write(f"{args.env_id}: writing to {self.folder}")

    def show_progress(self, returns):
        words = f"return {np.mean(returns):.1f}, update {self.done['updates']:,}"
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(self.done["steps"] - self.bar.n)

    def log(self, returns, evaluated, metrics):
        """A row for this iteration: its episodes' mean return, its last gradient step."""
        steps, seconds = self.done["steps"], time.time() - self.started
        self.done["seconds"] = seconds
        row = {"global_step": steps, "charts/episodic_return": np.mean(returns)}
        row |= {"charts/SPS": steps / seconds, "charts/seconds": seconds}
        row |= {name: float(value) for name, value in metrics.items()}
        row |= {"eval/episodic_return": np.mean(evaluated) if evaluated else math.nan}
        for name, value in row.items():
            if not math.isnan(value):
                self.writer.add_scalar(name, value, steps)
        self.writer.flush()
        row["eval/returns"] = " ".join(f"{x:.6g}" for x in evaluated)
        self.table = self.table or [",".join(row)]
        self.table.append(",".join(map(str, row.values())))
        write_whole(self.folder / "progress.csv", "\n".join([*self.table, ""]).encode())
        if evaluated:
            words = f"return {np.mean(returns):.1f}, evaluated {np.mean(evaluated):.1f}"
            tqdm.write(f"step {steps:,}: {words}, {steps / seconds:.0f} steps/s")

    def save(self):
        """checkpoint.pt, to go on from; and model.pt, to evaluate: the policy and its settings."""
        policy = self.parts["agent"].policy.state_dict()
        model = {"origin": ORIGIN, "args": asdict(self.args), "policy": policy}
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"done": self.done, "table": self.table, "random": torch.get_rng_state()}
        for name, content in (("checkpoint.pt", model | state), ("model.pt", model)):
            buffer = io.BytesIO()
            torch.save(content, buffer)
            write_whole(self.folder / name, buffer.getvalue())

    def __enter__(self):
        self.handlers = {n: signal.signal(n, self.stop) for n in (signal.SIGINT, signal.SIGTERM)}

    def stop(self, number, frame):
        """Asked once, stop after this iteration; asked again, at once."""
        self.stopping = number
        signal.signal(number, signal.SIG_DFL)
        os.write(1, b"stopping after this iteration\n")  # print() is not safe in here

    def __exit__(self, kind, error, trace):
        self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        steps, again = self.done["steps"], f"--resume {self.folder} goes on from its checkpoint"
        if isinstance(error, Exception):
            if kind not in (OSError, FloatingPointError):
                sys.excepthook(kind, error, trace)
            refuse(f"{error}; stopped at step {steps:,}; {again}.", code=1)
        if steps < self.args.total_timesteps:
            print(f"stopped at step {steps:,}; {again}")
            raise SystemExit(128 + self.stopping)
        print(f"done; everything is in {self.folder}")


def write_whole(path, content):
    """Write a file whole or not at all: to one side, down to the disk, then over the old one."""
    aside = path.with_suffix(".tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_saved(path):
    """What Run.save wrote, checked against the checksums in the file."""
    try:
        assert not zipfile.ZipFile(path).testzip(), "a wrong checksum"
        saved = torch.load(path, map_location="cpu", weights_only=True)
        origin = saved["origin"]
    except Exception:
        refuse(f"{path} is missing, damaged, or not from this project.")
    if origin != ORIGIN:
        refuse(f"{path} is of {origin[0]}, format {origin[1]}; here is {ORIGIN[0]}, {ORIGIN[1]}.")
    return saved


def refuse(sentence, code=2):
    print(f"{ORIGIN[0]}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def parse_game_args(words=None):
    """What was typed, on top of a saved run's settings, the paper's, the task's or the defaults."""
    typed = tyro.cli(Args, args=words)
    if typed.resume and typed.evaluate:
        refuse("--resume trains and --evaluate does not: give one of them.")
    if not typed.resume and not typed.evaluate:
        shape = make_env(Args(typed.env_id), 1).single_observation_space.shape
        start = Args(**({} if shape[1:] == FRAME else SMALL) | (PAPER if typed.paper else {}))
        return tyro.cli(Args, args=words, default=start)
    path = Path(typed.resume or typed.evaluate)
    if not path.is_file():
        path = path / ("checkpoint.pt" if typed.resume else "model.pt")
    saved = Args(**read_saved(path)["args"] | {"resume": "", "capture_video": False})
    args = tyro.cli(Args, args=words, default=saved)
    args.evaluate = str(path) if args.evaluate else ""
    names = list(vars(args))
    for name in names[: names.index("total_timesteps")]:
        was, now = getattr(saved, name), getattr(args, name)
        if was != now and not (name == "seed" and args.evaluate):
            refuse(f"{path} has {name} {was}, which cannot change to {now}.")
    return args


def check_games(args):
    """Refuse settings that cannot work: a number is positive where its default is."""
    for name, default in vars(Args()).items():
        value, zero = getattr(args, name), not default or name == "seed"
        numbers = np.atleast_1d(value) if type(default) in (int, float, tuple) else [1]
        if not len(numbers) or not all(0 <= x < 1e9 and (x > 0 or zero) for x in numbers):
            least = "0 or more" if zero else "positive"
            refuse(f"--{name.replace('_', '-')} must be {least} and below 1e9, not {value}.")
    if args.gamma >= 1:
        refuse(f"--gamma must be below 1, not {args.gamma}.")
    least = args.num_envs * (args.window + STACK + 3)  # from fewer rows one cannot draw
    if min(args.learning_starts, args.buffer_size) < least:
        refuse(f"--learning-starts and --buffer-size must be {least} or more with so many games.")
    if args.learning_starts >= args.total_timesteps:
        refuse(f"--total-timesteps must exceed --learning-starts, {args.learning_starts}.")
    try:
        torch.zeros(1, device=args.device).item()
    except Exception as error:
        refuse(f"--device {args.device} cannot be had here: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    threading.excepthook = lambda _: None  # TensorBoard's thread: its flush() raises the same
    main(parse_game_args())
