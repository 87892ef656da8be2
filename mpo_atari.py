"""Maximum a Posteriori Policy Optimisation for discrete actions (Abdolmaleki et al., ICLR 2018), "Discrete control".

Try:
    python mpo_atari.py --env-id ALE/Pong-v5                            learn to play from the screen
    python mpo_atari.py --env-id CartPole-v1 --total-timesteps 30000    a small task, solved in a few minutes
    python mpo_atari.py --resume RUN_DIR                                continue a run that was stopped
    python mpo_atari.py --evaluate RUN_DIR --capture-video              watch what it learned

Symbols, as in the paper:
    theta, theta_i      the policy pi being fitted, and the target policy pi_i it started this iteration from
    phi, phi'           the critic Q, and its target Q'
    q(a|s)              the improved policy of the E-step, pi_i(a|s) exp(Q'(s,a)/eta) normalised over all actions
    eta                 temperature of the E-step: the multiplier of KL(q||pi_i) <= epsilon
    eta_pi              multiplier of the M-step's bound KL(pi_i||pi) <= epsilon_pi
    b(a|s)              the policy that acted when the data was collected

Axis letters in shape comments: B windows, T steps in a window, A actions, N games played side by side, S observation
size. A step is the agent's: four frames of the game, in which the action is repeated.

All of MPO stands before the banner "Acting and evaluating". What follows is what any such script needs: episodes, the
run folder, checks of the user's input, workers, and the loop that calls it all.
"""
# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = [
#     "torch>=2.4,<3",
#     "numpy>=1.26,<3",
#     "gymnasium>=1.0,<2",
#     "shimmy>=2.0,<3",
#     "dm_control>=1.0.20,<2",
#     "mujoco>=3.1.6,<4",
#     "imageio>=2.34,<3",
#     "tyro>=0.9,<2",
#     "tensorboard>=2.16,<3",
#     "ale-py>=0.11,<1",
# ]
# ///

import atexit
import copy
import csv
import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn


# ---------------------------------------------------------------------------------------------------------------------
# Arguments. Each comment is the flag's line in --help; each class is a group there. "paper:" marks a printed value.
@dataclass
class AtariExperiment:
    env_id: str = "ALE/Pong-v5"  # the task: ALE/GAME-v5, or a Gymnasium task with discrete actions
    seed: int = 1  # seed of networks, exploration, replay sampling and of the games
    total_timesteps: int = 400_000  # agent steps to train for, over all games; each is four frames of Atari
    paper: bool = False  # use every value the paper prints, where our defaults depart from it (docs/defaults.md)


@dataclass
class AtariEnvironment:
    num_envs: int = 8  # N, games played side by side
    time_limit: int = 0  # cut games after this many steps; 0: the task's own limit (27,000 for Atari: half an hour)
    sticky_actions: float = 0.0  # chance that an Atari game repeats the action before; Gymnasium's default is 0.25
    episodic_life: bool = False  # learn as if the loss of a life ended the game; scores stay those of whole games
    clip_rewards: bool = True  # learn from rewards clipped to [-1, 1]; scores are never clipped


@dataclass
class DiscreteAlgorithm:
    gamma: float = 0.99  # gamma, the discount (paper: 0.99)
    epsilon: float = 0.1  # epsilon, the E-step's bound on KL(q || pi_i) (paper: 0.1)
    epsilon_pi: float = 1e-3  # epsilon_pi, the M-step's bound on KL(pi_i || pi); the paper has none for this policy
    window: int = 4  # T, the steps in a replayed window, after which Retrace bootstraps
    layers: tuple[int, ...] = (128, 128)  # hidden layers where observations are vectors; frames get DQN's network


@dataclass
class DiscreteOptimisation:
    learning_rate: float = 1e-4  # Adam's rate for the critic (paper: 5e-4)
    policy_learning_rate: float = 2e-5  # Adam's rate for the policy (paper: 5e-4)
    multiplier_rate: float = 2e-3  # Adam's rate for the logarithms of the multipliers eta
    batch_size: int = 8  # B, the windows in a gradient step
    updates_per_step: float = 0.25  # gradient steps per agent step; 0.25: one every four steps, as DQN
    target_period: int = 200  # gradient steps between two copies of the targets (paper: each iteration, that is 1000)
    learning_starts: int = 5000  # agent steps before the first gradient step
    buffer_size: int = 1_000_000  # steps kept in the replay: a million frames take 7.1 GB, so a 16 GB laptop holds them
    max_grad_norm: float = 1000.0  # longer gradients, of each network, are scaled down to this norm


@dataclass
class RunControl:
    run_dir: str = ""  # folder of this run; empty: runs/TASK__SCRIPT__SEED__TIME
    resume: str = ""  # continue the run in this folder from its last checkpoint, with its own settings
    evaluate: str = ""  # train nothing; evaluate the policy saved in this run folder
    eval_every: int = 10_000  # environment steps between two evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes in an evaluation
    checkpoint_every: int = 10_000  # environment steps between two checkpoints; 0: only at the end and when stopped
    save_model: bool = True  # write the final policy to RUN_DIR/model.pt
    capture_video: bool = False  # film an episode of the final (or --evaluate) policy: RUN_DIR/evaluation.mp4
    track: bool = False  # send the metrics to Weights & Biases as well
    threads: int = 0  # CPU threads; 0: PyTorch's choice
    device: str = "cpu"  # PyTorch device of the networks, such as cpu or cuda
    compile: bool = False  # compile the gradient step: a minute at the start, then faster
    torch_deterministic: bool = True  # ask PyTorch for deterministic kernels


@dataclass
class GameControl(RunControl):
    eval_every: int = 50_000  # agent steps between two evaluations; 0: only at the end
    eval_sampled: bool = False  # evaluate actions drawn from the policy, not the most probable ones
    checkpoint_every: int = 20_000  # agent steps between two checkpoints; 0: only at the end and when stopped
    log_every: int = 1000  # agent steps between two rows of progress.csv


RunControl = GameControl  # the group of settings that may change when a run is resumed


@dataclass
class Args(AtariExperiment, AtariEnvironment, DiscreteAlgorithm, DiscreteOptimisation, GameControl):
    """All settings of a run, flat: args.seed, args.epsilon."""

    @classmethod
    @tyro.conf.configure(tyro.conf.OmitArgPrefixes)
    def command_line(cls, experiment: AtariExperiment, environment: AtariEnvironment, algorithm: DiscreteAlgorithm,
                     optimisation: DiscreteOptimisation, run_control: GameControl) -> "Args":  # fmt: skip
        """Maximum a Posteriori Policy Optimisation for discrete actions."""
        groups = (experiment, environment, algorithm, optimisation, run_control)
        return cls(**{name: value for group in groups for name, value in vars(group).items()})


# What --paper restores: the printed values that are not our defaults.
PAPER = {"learning_rate": 5e-4, "policy_learning_rate": 5e-4, "target_period": 1000}
# The defaults are for frames. Where observations are vectors a gradient step costs little, and these take their place.
VECTORS = {"learning_rate": 1e-3, "policy_learning_rate": 1e-4, "multiplier_rate": 1e-2, "epsilon_pi": 3e-3}
VECTORS |= {"window": 8, "batch_size": 16, "updates_per_step": 1.0, "learning_starts": 1000}
POSITIVE = "total_timesteps num_envs epsilon epsilon_pi window layers learning_rate policy_learning_rate"
POSITIVE += " multiplier_rate batch_size updates_per_step target_period buffer_size max_grad_norm"
POSITIVE += " eval_episodes log_every"
ORDERED = [("learning_starts", "total_timesteps")]  # the first must be less than the second


# ---------------------------------------------------------------------------------------------------------------------
# Environment. N games side by side. A game that is over spends the next step on its reset: whatever action it is given
# then, it answers with the first observation of its next game ("next-step autoreset").
STACK, FRAME = 4, (84, 84)  # an observation of a screen is its last four frames


def make_env(args, render=False, num_envs=0):
    """N games with observations [N, 4, 84, 84] of uint8 or [N, S] of float32, and actions 0 .. A-1."""
    if args.sticky_actions > 1:
        refuse(f"--sticky-actions is a chance, at most 1, not {args.sticky_actions}.")
    if args.env_id.startswith("dm_control/"):
        refuse(f"{args.env_id} has continuous actions; use mpo_continuous.py for it.")
    if importlib.util.find_spec("ale_py"):  # the ALE/ tasks are registered by this import
        ale_py = importlib.import_module("ale_py")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if args.env_id not in gym.registry:
        if args.env_id.startswith("ALE/") and importlib.util.find_spec("ale_py") is None:
            refuse("this needs ale-py: pip install -c constraints.txt -e '.[atari]'.")
        close = difflib.get_close_matches(args.env_id, gym.registry, n=3, cutoff=0.4)
        refuse(f"there is no task {args.env_id!r}" + (f"; did you mean {', '.join(close)}?" if close else "."))
    if args.env_id.startswith("ALE/"):
        return make_atari(args, num_envs or args.num_envs)
    return gym.vector.SyncVectorEnv([lambda: make_single(args, render)] * (num_envs or args.num_envs))


def make_atari(args, num_envs):
    """ale-py's own vector of games: frames of DQN's protocol made in C++, from reset to stack."""
    protocol = {"frameskip": 4, "maxpool": True, "grayscale": True, "img_height": 84, "img_width": 84, "stack_num": 4}
    protocol |= {"noop_max": 30, "reward_clipping": False, "repeat_action_probability": args.sticky_actions}
    protocol |= {"max_num_frames_per_episode": 4 * args.time_limit} if args.time_limit else {}
    return FilmScreens(gym.make_vec(args.env_id, num_envs=num_envs, num_threads=args.threads, **protocol))


def make_single(args, render):
    """One task that Gymnasium makes, with a time limit. Frames are stacked as ale-py does, with zeros at the start."""
    try:
        kwargs = {"render_mode": "rgb_array"} if render else {}
        env = gym.make(args.env_id, disable_env_checker=True, **kwargs)
        env.reset(seed=0)
    except Exception as error:
        refuse(f"{args.env_id} cannot be made: {(str(error) or repr(error)).splitlines()[0]}")
    actions, observed = env.action_space, env.observation_space
    if isinstance(actions, gym.spaces.Box):
        refuse(f"{args.env_id} has continuous actions; use mpo_continuous.py for it.")
    if not isinstance(actions, gym.spaces.Discrete):
        refuse(f"{args.env_id} has actions {actions}; this script needs one choice among several.")
    if args.episodic_life or args.sticky_actions:
        refuse("--episodic-life and --sticky-actions are for the games of ALE/.")
    if args.time_limit or env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, args.time_limit or 1000)
    start, zero_based = int(actions.start), gym.spaces.Discrete(int(actions.n))
    env = gym.wrappers.TransformAction(env, lambda action: action + start, zero_based)
    if getattr(observed, "dtype", None) == np.uint8 and len(observed.shape) > 1:
        if observed.shape not in (FRAME, (STACK, *FRAME)):
            refuse(f"{args.env_id} observes images of shape {observed.shape}; this script needs {(STACK, *FRAME)}.")
        return gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero") if observed.shape == FRAME else env
    env = gym.wrappers.FlattenObservation(env)
    space = gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)
    return gym.wrappers.TransformObservation(env, np.float32, space)


class FilmScreens(gym.vector.VectorWrapper):
    """Games whose picture is what the policy sees of them: ale-py's vector has no other."""

    def __init__(self, env):
        super().__init__(env)
        self.metadata = env.metadata | {"render_fps": 15}  # 60 frames a second, of which the agent sees every fourth

    def reset(self, **options):
        self.screens, info = self.env.reset(**options)
        return self.screens, info

    def step(self, actions):
        self.screens, *rest = self.env.step(actions)
        return self.screens, *rest

    def render(self):
        """The newest frame of each game, four times as large, [336, 336, 3]."""
        return [np.kron(screen[-1], np.ones((4, 4, 1), np.uint8)).repeat(3, -1) for screen in self.screens[..., None]]


def episode_seed(seed, *numbers):
    """One seed per episode, a function of its number alone: what makes a resumed run repeat the uninterrupted one."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Networks. Q and the policy are two networks of DQN's architecture, as in the paper; for vectors, two small ones
# with layer normalisation after the first layer, as in the other scripts.
def body(shape, layers):
    """From observations [..., *shape] to features, and how many. Frames come as floats in [-1, 1]."""
    if len(shape) == 1:
        sizes = [*shape, *layers]
        hidden = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
        hidden[0].insert(1, nn.LayerNorm(layers[0]))
        return nn.Sequential(*itertools.chain(*hidden)), sizes[-1]
    convolutions = [nn.Conv2d(shape[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    convolutions += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()]
    for layer in convolutions:  # He's initialisation: with PyTorch's own, what moves in a frame is lost on its way
        if hasattr(layer, "weight"):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*convolutions).to(memory_format=torch.channels_last), 512


def as_floats(state):
    """Frames of bytes as floats in [-1, 1]; what is floats already as it is."""
    return state.float().div_(127.5).sub_(1) if state.dtype == torch.uint8 else state


class Policy(nn.Module):
    """pi(a|s, theta), a probability for each action. state [..., *shape] -> log pi [..., A]."""

    def __init__(self, shape, actions, layers):
        super().__init__()
        self.body, features = body(shape, layers)
        self.logits = nn.Linear(features, actions)
        with torch.no_grad():  # start nearly uniform
            self.logits.weight.mul_(0.01), self.logits.bias.zero_()

    def forward(self, state):
        return self.logits(self.body(as_floats(state))).log_softmax(-1)


class Critic(nn.Module):
    """Q(s, a, phi) of every action. state [..., *shape] -> [..., A]."""

    def __init__(self, shape, actions, layers):
        super().__init__()
        self.body, features = body(shape, layers)
        self.values = nn.Linear(features, actions)

    def forward(self, state):
        return self.values(self.body(as_floats(state)))


class Agent(nn.Module):
    """Everything that is learned: theta, phi, their targets theta_i, phi', and log_NAME for each multiplier."""

    def __init__(self, policy, critic, **multipliers):
        super().__init__()
        self.policy, self.critic = policy, critic
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        for name, start in multipliers.items():
            self.register_parameter(f"log_{name}", nn.Parameter(torch.tensor(math.log(start))))

    def multipliers(self):
        return list(self.parameters(recurse=False))

    def copy_targets(self, *names):
        """theta_i = theta, phi' = phi; or only the one named."""
        for name in names or ("policy", "critic"):
            getattr(self, f"target_{name}").load_state_dict(getattr(self, name).state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Policy evaluation: Retrace (section 4 of the paper). Off-policy data is corrected by clipped importance weights.
def trace_coefficient(log_prob, behaviour_log_prob):
    """c = min(1, pi(a|s) / b(a|s)). Any shape."""
    return (log_prob - behaviour_log_prob).clamp(max=0.0).exp()


def retrace(q, v_next, reward, discount, trace):
    """Retrace targets. All [B, T]; v_next[t] is E_pi Q'(s_{t+1}, .); trace[t] is c_{t+1}, 0 at the end of a window."""
    delta = reward + discount * v_next - q  # r_t + gamma E_pi Q'(s_{t+1},.) - Q'(s_t,a_t)
    decay = discount * trace  # gamma c_{t+1}
    corrections = [delta[:, -1]]
    for t in reversed(range(q.shape[1] - 1)):
        corrections.append(delta[:, t] + decay[:, t] * corrections[-1])  # sum_j gamma^{j-t} (prod c_k) delta_j
    return q + torch.stack(corrections[::-1], dim=1)


def masked_mean(x, mask):
    """Mean of x where mask is 1. Both of one shape."""
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


def expectation(prob, values):
    """sum_a p(a|s) x(s, a), exactly: V = E_pi Q'(s, .) in Retrace, E_q log pi in the M-step. Both [..., A] -> [...]."""
    return (prob * values).sum(-1)


def of_action(values, action):
    """The value of the action taken. values [..., A], action [...] -> [...]."""
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# E-step: q(a|s) = pi_i(a|s) exp(Q'(s,a)/eta) / Z(s), with eta at the minimum of the convex dual g. All actions are
# scored, so the sums are exact and an action's prior weight is its probability: log_prior is log pi_i(a|s), [..., A],
# and the letter M of the sample-based scripts is A here.
def temperature_dual(eta, scores, log_prior, epsilon, mask):
    """g(eta) = eta epsilon + eta E_s log sum_a exp(log_prior + Q'(s,a)/eta). scores [..., M], mask [...]."""
    return eta * epsilon + eta * masked_mean(torch.logsumexp(log_prior + scores / eta, dim=-1), mask)


def improved_policy(eta, scores, log_prior):
    """q(a|s) on the actions scored, summing to 1 over them. scores [..., M] -> [..., M]."""
    return torch.softmax(log_prior + scores / eta, dim=-1)


def categorical_kl(weights, log_prior):
    """KL(q || pi_i) on the actions scored. weights [..., M] -> [...]."""
    return (weights * (weights.clamp(min=1e-30).log() - log_prior)).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# M-step: maximise sum_a q(a|s) log pi(a|s, theta) while KL(pi_i || pi), again by exact sums, stays within epsilon_pi.
def lagrangian(eta, epsilon, kl):
    """eta (epsilon - C), twice: the multiplier descends on the first, the policy ascends on the second."""
    return eta * (epsilon - kl.detach()), eta.detach() * (epsilon - kl)


# ---------------------------------------------------------------------------------------------------------------------
# Replay. A ring of rows for each game, in the order they were lived, with one frame each: the newest of the stack. A
# game begins with rows for the older frames of its first stack, so a stack is always a row's frame and the three before
# it. The newest row of a ring is an observation from which no step was taken yet. Until one is, it is marked `last`, as
# the final observation of a game is. So a window meets a row marked `last` before it meets the ring's seam, and a game
# in progress looks like one cut off at its newest observation, from which it bootstraps.
class FrameBatch(NamedTuple):
    """Windows of consecutive steps. Where valid is 0 the game is over and the entries mean nothing."""

    state: torch.Tensor  # [B, T+1, 4, 84, 84] of bytes, or [B, T+1, S]
    action: torch.Tensor  # [B, T]
    behaviour_log_prob: torch.Tensor  # [B, T], log b(a|s) at the time of acting
    reward: torch.Tensor  # [B, T]
    terminated: torch.Tensor  # [B, T], 1 where the step ended its game, or a life, for good (a time limit does not)
    valid: torch.Tensor  # [B, T]


class FrameReplay:
    CHUNK = 1024  # rows in a file of a checkpoint, 7 MB of frames

    def __init__(self, capacity, num_envs, shape, folder=None):
        self.shape, self.folder, self.length = shape, folder, capacity // num_envs
        self.stack, frame = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
        kinds = {"frame": (frame, np.uint8 if len(shape) == 3 else np.float32), "action": ((), np.int64)}
        kinds |= {name: ((), np.float32) for name in ("behaviour_log_prob", "reward", "terminated")}
        kinds |= {"last": ((), np.bool_)}
        count = self.length * num_envs  # numpy's zeros take no memory until they are written to; PyTorch's do
        self.rows = {name: torch.from_numpy(np.zeros((count, *size), kind)) for name, (size, kind) in kinds.items()}
        self.written = torch.zeros(num_envs, dtype=torch.long)  # rows ever written to each ring
        self.files, self.version = {}, 0  # by chunk of rows: the file that holds it as of the last checkpoint
        self.changed = torch.zeros(-(-count // self.CHUNK), dtype=torch.bool)

    def append(self, games, frame):
        """A row for each of these games, an observation from which no step was taken yet. games [n], frame [n, ...]."""
        row = torch.as_tensor(games) * self.length + self.written[games] % self.length
        self.rows["frame"][row], self.rows["last"][row] = torch.as_tensor(frame), True
        self.changed[row // self.CHUNK] = True
        self.written[games] += 1

    def begin(self, games, observation):
        """These games begin with this observation. games [n], observation [n, *shape]."""
        frames = observation.reshape(len(games), self.stack, *self.rows["frame"].shape[1:])
        for number in range(self.stack):
            self.append(games, frames[:, number])

    def add_step(self, games, observation, **step):
        """A step from the newest row of each of these games, and the observation it led to. Each entry is [n, ...]."""
        row = torch.as_tensor(games) * self.length + (self.written[games] - 1) % self.length
        for name, values in (step | {"last": torch.zeros(len(games))}).items():
            self.rows[name][row] = torch.as_tensor(values).to(self.rows[name].dtype)
        self.changed[row // self.CHUNK] = True
        self.append(games, observation[:, -1] if self.stack > 1 else observation)

    def can_start(self, game, position):
        """Whether a step was taken from this row, and the older frames of its stack are not overwritten yet."""
        taken = (position < self.written[game]) & ~self.rows["last"][game * self.length + position]
        age = (position - self.written[game]) % self.length  # 0 is the oldest row of a full ring
        return taken & ((self.written[game] <= self.length) | (age >= self.stack - 1))

    def sample(self, batch_size, window):
        """Windows [B, T] starting at uniformly drawn steps."""
        game, start = torch.zeros(2, batch_size, dtype=torch.long)
        undrawn, filled = torch.arange(batch_size), int(self.written.clamp(max=self.length).max())
        while len(undrawn):  # draw any row, and again where it cannot start a window
            game[undrawn] = torch.randint(len(self.written), (len(undrawn),))
            start[undrawn] = torch.randint(filled, (len(undrawn),))
            undrawn = undrawn[~self.can_start(game[undrawn], start[undrawn])]
        position = start.unsqueeze(-1) + torch.arange(1 - self.stack, window + 1)
        index = game.unsqueeze(-1) * self.length + position % self.length  # [B, T + stack]
        stacks = self.rows["frame"][index].unfold(1, self.stack, 1).contiguous().movedim(-1, 2)  # channels come last
        index = index[:, self.stack - 1 :]
        over = self.rows["last"][index].cumsum(1) > 0  # from the final observation on
        step = {name: self.rows[name][index[:, :-1]] for name in FrameBatch._fields[1:-1]}
        return FrameBatch(state=stacks.view(*index.shape, *self.shape), valid=(~over[:, :-1]).float(), **step)

    def write_chunks(self):
        """Write the rows that changed since the last checkpoint to new files; its own files stay as they are."""
        self.folder.mkdir(exist_ok=True)
        self.version += 1
        for chunk in self.changed.nonzero().flatten().tolist():
            rows = slice(chunk * self.CHUNK, (chunk + 1) * self.CHUNK)
            part = {name: values[rows].clone() for name, values in self.rows.items()}
            self.files[chunk] = f"{chunk:05d}-{self.version}.pt"
            write_aside(self.folder / self.files[chunk], lambda file, part=part: torch.save(part, file))
        self.changed[:] = False

    def remove_obsolete(self):
        """Remove the files that the checkpoint, now in place, does not name."""
        for path in set(self.folder.iterdir()) - {self.folder / name for name in self.files.values()}:
            path.unlink()

    def state_dict(self):
        return {"written": self.written.clone(), "files": dict(self.files), "version": self.version}

    def load_state_dict(self, saved):
        self.written, self.files, self.version = saved["written"], dict(saved["files"]), saved["version"]
        for chunk, name in self.files.items() if self.folder else ():
            part = torch.load(self.folder / name, weights_only=True)
            for name, values in self.rows.items():
                values[chunk * self.CHUNK : (chunk + 1) * self.CHUNK] = part[name]


# ---------------------------------------------------------------------------------------------------------------------
# Learner: one gradient step, in the order of the paper's Algorithm 2, with sums over actions for its samples.
def discrete_losses(agent, batch, args):
    """The losses of one gradient step and what the diagnostics need. batch [B, T, ...]."""
    discount = args.gamma * (1 - batch.terminated)  # a termination bootstraps nothing, a time limit does
    alive = F.pad(batch.valid * (1 - batch.terminated), (1, 0), value=1.0)  # [B, T+1], states from which one can act
    state = as_floats(batch.state.flatten(0, 1))  # once for all four networks

    # pi_i and Q' of every action in each of s_0 .. s_T: they serve V in Retrace and q in the E-step.
    with torch.no_grad():
        log_pi_i = agent.target_policy(state).unflatten(0, alive.shape)  # [B, T+1, A]
        scores = agent.target_critic(state).unflatten(0, alive.shape)  # [B, T+1, A]
        log_prob = of_action(log_pi_i[:, 1:-1], batch.action[:, 1:])
        trace = trace_coefficient(log_prob, batch.behaviour_log_prob[:, 1:]) * batch.valid[:, 1:]
        q_i, v_next = of_action(scores[:, :-1], batch.action), expectation(log_pi_i.exp(), scores)[:, 1:]
        target = retrace(q_i, v_next, batch.reward, discount, F.pad(trace, (0, 1)))

    # Q-function gradient: (Q(s_t, a_t, phi) - Q_t^ret)^2
    q = agent.critic(state.unflatten(0, alive.shape)[:, :-1].flatten(0, 1)).unflatten(0, target.shape)
    q = of_action(q, batch.action)
    critic_loss = masked_mean((q - target).square(), batch.valid)

    # E-step gradient: g(eta), then q(a|s)
    eta = agent.log_eta.exp()
    dual_loss = temperature_dual(eta, scores, log_pi_i, args.epsilon, alive)
    weights = improved_policy(eta.detach(), scores, log_pi_i)

    # M-step gradient: L(theta, eta_pi)
    log_pi = agent.policy(state).unflatten(0, alive.shape)
    likelihood = masked_mean(expectation(weights, log_pi), alive)
    kl = masked_mean(categorical_kl(log_pi_i.exp(), log_pi), alive)
    multiplier, constraint = lagrangian(agent.log_eta_pi.exp(), args.epsilon_pi, kl)
    policy_loss = -(likelihood + constraint)

    seen = {"trace": trace, "alive": alive, "valid": batch.valid, "q": q, "target": target, "scores": scores}
    seen |= {"weights": weights, "log_pi_i": log_pi_i, "log_pi": log_pi, "kl": kl}
    return critic_loss, policy_loss, dual_loss + multiplier, {name: x.detach() for name, x in seen.items()}


def make_optimiser(agent, args):
    """Adam, at a rate each for policy, critic and multipliers."""
    groups = [{"params": list(agent.policy.parameters()), "lr": args.policy_learning_rate}]
    groups += [{"params": list(agent.critic.parameters()), "lr": args.learning_rate}]
    # With equal betas no step is longer than the rate, up or down. With Adam's own, a burst of KL threw a multiplier to
    # hundreds of times its value, and it took thousands of updates to come back (docs/defaults.md).
    groups += [{"params": agent.multipliers(), "lr": args.multiplier_rate, "betas": (0.9, 0.9)}]
    return torch.optim.Adam(groups, fused=True)


def update(agent, optimiser, loss_function, batch, args, workers=None):
    """One step of Adam on theta, phi and the multipliers. Returns the losses and what the diagnostics need."""
    critic_loss, policy_loss, multiplier_loss, seen = loss_function(agent, batch, args)
    optimiser.zero_grad()
    (critic_loss + policy_loss + multiplier_loss).backward()
    if workers:
        workers.average(agent)
    losses = {"losses/critic": critic_loss, "losses/policy": policy_loss, "losses/multipliers": multiplier_loss}
    for name in ("critic", "policy"):
        norm = nn.utils.clip_grad_norm_(getattr(agent, name).parameters(), args.max_grad_norm)
        losses[f"losses/{name}_gradient"] = norm
    values = {name: loss.item() for name, loss in losses.items()}
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFinite(f"{name} became {value}")
    optimiser.step()
    with torch.no_grad():  # a multiplier that rests at its floor or ceiling can still come back
        for log_multiplier in agent.multipliers():
            log_multiplier.clamp_(math.log(1e-6), math.log(1e3))
    return values, seen


@torch.no_grad()
def discrete_diagnostics(agent, seen, args):
    """The mpo/* metrics of one update; docs/metrics.md says what each means and when to worry."""
    weights, alive, log_pi = seen["weights"], seen["alive"], seen["log_pi"]
    valid, q, target = seen["valid"] > 0, seen["q"], seen["target"]
    metrics = {
        "eta": agent.log_eta.exp(),
        "eta_pi": agent.log_eta_pi.exp(),
        "kl_q_relative": masked_mean(categorical_kl(weights, seen["log_pi_i"]), alive) / args.epsilon,
        "kl_pi_relative": seen["kl"] / args.epsilon_pi,
        "trace": masked_mean(seen["trace"], seen["valid"][:, 1:]),
        "entropy": -masked_mean(expectation(log_pi.exp(), log_pi), alive),
        "greatest_prob": masked_mean(log_pi.exp().amax(-1), alive),
        "q_std_over_actions": masked_mean(seen["scores"].std(-1, correction=0), alive),
        "q_mean": q[valid].mean(),
        "q_min": q[valid].min(),
        "q_max": q[valid].max(),
        "target_min": target[valid].min(),
        "target_max": target[valid].max(),
    }
    return {f"mpo/{name}": float(value) for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Acting and evaluating.
class NotFinite(Exception):
    """Something became NaN or infinite; the run stops before it spreads."""


@torch.no_grad()
def choose(policy, observation, device, sampled=True):
    """Actions drawn from the policy, or the most probable ones, and their log pi. [N, *shape] -> [N], [N]."""
    log_prob = policy(torch.as_tensor(observation, device=device)).cpu()
    action = torch.multinomial(log_prob.exp(), 1).squeeze(-1) if sampled else log_prob.argmax(-1)
    return action.numpy(), of_action(log_prob, action)


class Games:
    """The N games being played. A step in all of them goes to the replay, but for those that are just being reset."""

    def __init__(self, env, replay, seed):
        self.env, self.replay = env, replay
        self.observation, info = env.reset(seed=seed >> 2)  # seeds of the N games count up from here, within 31 bits
        self.score, self.over = np.zeros(env.num_envs), np.zeros(env.num_envs, bool)
        self.lives = info.get("lives", np.zeros(env.num_envs))
        self.check(np.zeros(1))
        replay.begin(np.arange(env.num_envs), self.observation)

    def check(self, reward):
        if not np.isfinite(reward).all() or not np.isfinite(self.observation).all():
            raise NotFinite(f"{'the reward' if not np.isfinite(reward).all() else 'an observation'} is not finite")

    def step(self, policy, args):
        """One step in every game. Returns how many it were, and the scores of the games that it ended."""
        action, log_prob = choose(policy, self.observation, args.device)
        self.observation, reward, terminated, truncated, info = self.env.step(action)
        self.check(reward)
        lives = info.get("lives", self.lives)
        lost = terminated | (args.episodic_life & (lives < self.lives))
        learned = np.clip(reward, -1, 1) if args.clip_rewards else reward
        played, begun = np.flatnonzero(~self.over), np.flatnonzero(self.over)
        step = {"action": action, "behaviour_log_prob": log_prob, "reward": learned, "terminated": lost}
        self.replay.add_step(played, self.observation[played], **{name: x[played] for name, x in step.items()})
        self.replay.begin(begun, self.observation[begun])

        self.score = np.where(self.over, 0.0, self.score + reward)
        self.over, self.lives = terminated | truncated, lives
        return len(played), self.score[self.over].tolist()


@torch.no_grad()
def play_games(env, policy, seed, device, sampled=False, video=None):
    """Scores of one whole game in each of the environments, the first of them filmed to the file `video`."""
    observation, _ = env.reset(seed=episode_seed(seed, 1) >> 2)
    total, playing, frames = np.zeros(env.num_envs), np.ones(env.num_envs, bool), []
    while playing.any():
        if video and playing[0]:
            frames.append(env.render()[0])
        action, _ = choose(policy, observation, device, sampled)
        observation, reward, terminated, truncated, _ = env.step(action)
        total += reward * playing
        playing &= ~(terminated | truncated)
    if video:
        import imageio.v2 as imageio

        imageio.mimwrite(video, frames, fps=frame_rate(env), macro_block_size=1)
    return total.tolist()


def frame_rate(env):
    """Frames per second at true speed. Shimmy's own figure is wrong, so dm_control is asked itself."""
    physics = getattr(env.unwrapped, "_env", None)
    return 1 / physics.control_timestep() if physics is not None else env.metadata.get("render_fps", 30)


# ---------------------------------------------------------------------------------------------------------------------
# The run folder: args.json, progress.csv, TensorBoard events, checkpoint.pt, replay/, model.pt.
def write_aside(path, write):
    """Write a file whole or not at all: to one side, down to the disk, then renamed over the old one."""
    aside = Path(f"{path}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def save_checkpoint(run_dir, agent, optimiser, replay, counters, workers=None):
    parts = {"agent": agent, "optimiser": optimiser, "replay": replay}
    checkpoint = {name: part.state_dict() for name, part in parts.items()}
    checkpoint |= {"counters": counters, "random_state": torch.get_rng_state()}
    if workers:
        return workers.save(Path(run_dir), counters, checkpoint)
    write_aside(Path(run_dir) / "checkpoint.pt", lambda file: torch.save(checkpoint, file))


def load_checkpoint(run_dir, agent, optimiser, replay, workers=None):
    """Restore all that save_checkpoint saved, if so many workers saved it (None: however many); return the counters."""
    path = Path(run_dir) / "checkpoint.pt"
    if not path.exists():
        refuse(f"{run_dir} holds no checkpoint; it was stopped before its first, so start it anew in another folder.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=RANK > 0)
        files = checkpoint.get("files", [path.name])
        if workers not in (None, len(files)):
            refuse(f"{run_dir} is a run with --nproc-per-node {len(files)}, and cannot go on with {workers}.")
        if RANK:
            path = Path(run_dir) / files[RANK]
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in {"agent": agent, "optimiser": optimiser, "replay": replay}.items():
            part.load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["random_state"])
        return checkpoint["counters"]
    except Exception as error:
        refuse(f"{path} is damaged, or of another version of this script ({type(error).__name__}).")


def save_run(run_dir, agent, optimiser, replay, counters, workers=None):
    """A checkpoint that writes only what is new of the replay. Until checkpoint.pt is renamed, the old one is whole."""
    replay.write_chunks()
    save_checkpoint(run_dir, agent, optimiser, replay, counters, workers)
    replay.remove_obsolete()


def read_args(run_dir):
    """The settings a run was started with."""
    path = Path(run_dir) / "args.json"
    try:
        saved, default = json.loads(path.read_text()), Args()
        for name, value in saved.items():
            if isinstance(value, str) != isinstance(getattr(default, name), str):
                raise ValueError(f"{name} is {value!r}")
        return Args(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})
    except FileNotFoundError:
        refuse(f"{run_dir} holds no run: there is no {path}.")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        refuse(f"{path} does not read as the settings of a run ({error}).")


class Log:
    """Metrics to progress.csv and TensorBoard, a line of progress to the terminal."""

    def __init__(self, run_dir, args, counters):
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.args, self.live = Path(run_dir) / "progress.csv", args, sys.stdout.isatty()
        logged = counters["began"] if counters["returns"] else counters["global_step"]
        if self.path.exists():  # drop what was logged after the checkpoint that is being resumed
            whole = [row for row in self.path.read_text().splitlines(keepends=True) if row.endswith("\n")]
            kept = whole[:1] + [row for row in whole[1:] if int(row.split(",")[0]) <= logged]
            write_aside(self.path, lambda file: file.write("".join(kept).encode()))
        if args.track:
            import wandb

            wandb.init(project="mpo", name=Path(run_dir).name, config=vars(args), sync_tensorboard=True)
        self.writer = SummaryWriter(run_dir, purge_step=logged + 1)
        self.started, self.shown_at, self.first = time.time() - counters["seconds"], 0.0, None

    def write(self, counters, metrics):
        """A row per iteration: the mean return of its episodes, losses and diagnostics of its last update."""
        step, counters["seconds"] = counters["global_step"], time.time() - self.started
        row = {"global_step": step, "charts/episodic_return": float(np.mean(counters["returns"]))}
        row |= {"charts/SPS": step / counters["seconds"], "charts/seconds": counters["seconds"]}
        row |= {"charts/updates": counters["updates"], "eval/episodic_return": ""} | metrics
        with open(self.path, "a", newline="") as file:
            table = csv.DictWriter(file, row, lineterminator="\n")
            if file.tell() == 0:
                table.writeheader()
            table.writerow(row)
        for name, value in row.items():
            if value != "":
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def progress(self, counters):
        """A line that rewrites itself twice a second on a terminal; elsewhere a plain line, twice a minute."""
        now, total = time.time(), self.args.total_timesteps
        if now - self.shown_at < (0.5 if self.live else 30):
            return
        done = max(counters["global_step"] - WORKERS * counters["due"] / self.args.updates_per_step, 1)
        self.shown_at, self.first = now, self.first or (now, done)  # what came before, as compiling, is no guide
        seconds, steps = now - self.first[0], done - self.first[1]
        speed, mean = done / (now - self.started), np.mean(counters["returns"] or [math.nan])
        line = f"step {done:,.0f}/{total:,}  return {mean:.1f}  {speed:.0f} steps/s"
        left = f"  {clock((total - done) * seconds / steps)} left" if seconds > 10 and steps > 0 else ""
        self.say(line + left, end="" if self.live else "\n")

    def say(self, sentence, end="\n"):
        print(f"\r\033[K{sentence}" if self.live else sentence, end=end, flush=True)


def clock(seconds):
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {seconds:02d} s"


# ---------------------------------------------------------------------------------------------------------------------
# The user's input, checked before any work is done. Each answer is one sentence and exit code 2.
def refuse(sentence, code=2):
    if RANK and code == 2:
        time.sleep(5)  # rank 0 finds the same mistake, and torchrun ends the others before they repeat it
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def given_by_user(args):
    """The settings that were typed, or differ from their defaults."""
    typed = {word.split("=")[0][2:].removeprefix("no-").replace("-", "_") for word in sys.argv if word[:2] == "--"}
    return {name: value for name, value in vars(args).items() if value != getattr(Args(), name) or name in typed}


def resolve(args):
    """The settings in force: the saved run's with --resume or --evaluate, the paper's with --paper, else the user's."""
    folder, given = args.resume or args.evaluate, given_by_user(args)
    if not folder:
        return dataclasses.replace(args, **{n: v for n, v in PAPER.items() if n not in given}) if args.paper else args
    saved = read_args(folder)
    if given.get("env_id", saved.env_id) != saved.env_id:
        refuse(f"{folder} belongs to {saved.env_id}, not to {args.env_id}.")
    may_change = {"total_timesteps", *(field.name for field in dataclasses.fields(RunControl))}
    for name, value in given.items():
        if name not in may_change and value != getattr(saved, name):
            flag, used = name.replace("_", "-"), getattr(saved, name)
            refuse(f"{folder} was started with --{flag} {used}, which cannot change to {value} now.")
    kept = {name: getattr(saved, name) for name in vars(saved) if name not in given or name not in may_change}
    return dataclasses.replace(args, **(kept | {"run_dir": folder, "resume": args.resume, "evaluate": args.evaluate}))


def validate(args):
    """Refuse what cannot work: a value out of its range, a device, package or renderer that is not there."""
    for field in dataclasses.fields(args):
        name, value = field.name.replace("_", "-"), getattr(args, field.name)
        numbers = [x for x in (value if isinstance(value, tuple) else [value]) if type(x) in (int, float)]
        if field.name in POSITIVE.split() and not (numbers and all(0 < x < math.inf for x in numbers)):
            refuse(f"--{name} must be positive, not {value}.")
        if not all(0 <= x < math.inf for x in numbers):
            refuse(f"--{name} must be 0 or more, not {value}.")
    if args.evaluate and LAUNCH:
        refuse("--evaluate needs one process; start it with python, not with torchrun.")
    if args.gamma >= 1:
        refuse(f"--gamma must be below 1, not {args.gamma}.")
    if args.seed >= 2**32:
        refuse(f"--seed must be below 2**32, not {args.seed}.")
    for less, more in ORDERED:
        if 0 < getattr(args, more) <= getattr(args, less):
            less, more = less.replace("_", "-"), more.replace("_", "-")
            refuse(f"--{more} must be greater than --{less}.")
    try:
        torch.zeros(1, device=args.device)
    except Exception:
        refuse(f"there is no device {args.device!r} here; --device cpu works everywhere.")
    for wanted, package, extra in ((args.track, "wandb", "track"), (args.capture_video, "imageio_ffmpeg", "video")):
        if wanted and importlib.util.find_spec(package) is None:
            refuse(f"this needs {package}: pip install -c constraints.txt -e '.[{extra}]'.")
    if args.capture_video:
        env = make_env(args, render=True)
        try:
            env.reset(seed=0)
            env.render()
        except Exception as error:
            refuse(f"--capture-video cannot render here ({error}); try MUJOCO_GL=egl or MUJOCO_GL=osmesa.")


def make_replay(args, shape):
    """The replay, if this machine can hold it full and it can hold two short games and a window of each player."""
    size = 4 * shape[0] if len(shape) == 1 else math.prod(shape[1:])
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if LAUNCH else 1  # workers on this machine
    needed, memory = here * args.buffer_size * (size + 21), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        full, room = f"{needed / 1e9:,.1f} GB", f"{memory / 1e9:,.1f} GB"
        refuse(f"--buffer-size {args.buffer_size:,} takes {full} when full, and this machine has {room}; choose less.")
    least = args.num_envs * (args.window + 2 * STACK + 1)
    if args.buffer_size < least:
        refuse(f"--buffer-size must be at least {least}, for --num-envs {args.num_envs} and --window {args.window}.")
    return FrameReplay(args.buffer_size, args.num_envs, shape)


def open_run_dir(args):
    """The run's folder, made and writable, with args.json in it. A new run never lands on an old one."""
    name = f"{args.env_id.replace('/', '-')}__{Path(__file__).stem}__{args.seed}__{LAUNCH or int(time.time())}"
    run_dir = Path(args.run_dir or Path("runs") / name)
    mark = run_dir / "torchrun.id"  # a group that torchrun starts again finds its own run here
    own = mark.exists() and mark.read_text() == LAUNCH
    if RANK:
        return run_dir
    if not (args.resume or own) and (run_dir / "args.json").exists():
        refuse(f"{run_dir} already holds a run of {read_args(run_dir).env_id}; --resume {run_dir} continues it.")
    settings = json.dumps(dataclasses.asdict(args) | {"run_dir": str(run_dir), "resume": ""}, indent=2)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if LAUNCH:
            mark.write_text(LAUNCH)
        write_aside(run_dir / "args.json", lambda file: file.write(settings.encode()))
    except OSError as error:
        refuse(f"{run_dir} cannot be written ({error.strerror}); choose another folder with --run-dir.")
    return run_dir


# ---------------------------------------------------------------------------------------------------------------------
# Workers, the paper's Algorithm 1. torchrun starts K processes; each lives its own episodes, fills its own replay and
# computes its own gradients, and all take the same step along the mean, so their parameters stay equal to the bit.
# There is no chief: an all-reduce brings the mean to everyone. Started by python, nothing of this runs.
LAUNCH = os.environ.get("TORCHELASTIC_RUN_ID")  # the name that torchrun gave to the group
RANK, WORKERS = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if LAUNCH else (0, 1)


class Workers:
    """The group, as one of its workers sees it. A signal to any of them stops all, after the same update."""

    say = write = progress = lambda *args, **kwargs: None  # rank 0 has a log; the others log to this

    def __init__(self, args, agent):
        if args.device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this worker's own GPU from here on
        # torchrun keeps its store when it starts a group again, so each attempt has keys of its own (docs/scaling.md)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ["GROUP_WORLD_SIZE"] == "1" else ""
        store = dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
        dist.init_process_group(store=store, rank=RANK, world_size=WORKERS)  # gloo on the CPU, nccl on GPUs
        atexit.register(dist.destroy_process_group)
        for tensor in agent.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.request, self.asked = StopRequest(), 0  # what this worker was asked, and what all have agreed on

    def communicate(self, collective, *args):
        try:
            collective(*args)
        except RuntimeError as error:
            raise ConnectionError("another worker is gone") from error

    def gather(self, mine):
        """What every worker brings, in the order of their ranks."""
        parts = [None] * WORKERS
        self.communicate(dist.all_gather_object, parts, (mine, self.request.asked))
        self.asked = max(asked for _, asked in parts)
        return [part for part, _ in parts]

    def average(self, agent):
        """Make every gradient the mean of the workers', in one all-reduce that also carries the requests to stop."""
        gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
        flat = nn.utils.parameters_to_vector([*gradients, gradients[0].new_tensor([self.request.asked])])
        self.communicate(dist.all_reduce, flat)
        nn.utils.vector_to_parameters(flat / WORKERS, gradients)
        self.asked = (self.request.asked or signal.SIGTERM) if flat[-1] > 0 else 0

    def save(self, run_dir, counters, checkpoint):
        """The others' files, then checkpoint.pt, which names them: until it is renamed, the old checkpoint is whole."""
        sha = hashlib.sha256(b"".join(x.cpu().numpy() for x in checkpoint["agent"].values())).hexdigest()[:16]
        files = ["checkpoint.pt", *(f"worker{rank}-{counters['global_step']}-{sha}.pt" for rank in range(1, WORKERS))]
        for my_turn in (RANK > 0, RANK == 0):
            if my_turn:
                write_aside(run_dir / files[RANK], lambda file: torch.save(checkpoint | {"files": files}, file))
            if self.gather(files).count(files) < WORKERS:
                raise ConnectionError("the parameters of the workers are no longer equal")
        for path in set(run_dir.glob(f"worker{RANK}-*")) - {run_dir / files[RANK]}:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# The training loop: a step in every game, the gradient steps they earn, copies of the targets; log, evaluate and save.
class StopRequest:
    """Ctrl-C and SIGTERM ask for a stop at the next safe moment; asked a second time, they stop at once."""

    def __init__(self):
        self.asked = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number, frame):
        self.asked = number
        signal.signal(number, signal.SIG_DFL)


def crossed(interval, counters):
    """Whether this iteration's steps passed a multiple of the interval (never, if that is 0)."""
    return interval > 0 and counters["global_step"] // interval > counters["began"] // interval


def compiled(losses):
    """The same function, compiled. Loops over less than 2^16 numbers stay on one thread: two would wait to meet."""
    warnings.simplefilter("ignore")  # PyTorch's compiler warns about itself
    os.environ["PYTHONWARNINGS"] = "ignore"
    return torch.compile(losses, options={"cpp.min_chunk_size": 2**16})


def main(args):
    args = resolve(args)
    validate(args)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.zeros(2**23)  # 32 MB, given back at once: glibc then keeps the memory of an update for the next (10% faster)

    env, eval_env = make_env(args), make_env(args, render=args.capture_video, num_envs=args.eval_episodes)
    shape, actions = env.single_observation_space.shape, int(env.single_action_space.n)
    if len(shape) == 1 and not args.resume and not args.evaluate:
        args = dataclasses.replace(args, **{n: v for n, v in VECTORS.items() if n not in given_by_user(args)})
    policy_options = {"shape": shape, "actions": actions, "layers": args.layers}
    agent = Agent(Policy(**policy_options), Critic(**policy_options), eta=1.0, eta_pi=10.0).to(args.device)
    optimiser = make_optimiser(agent, args)
    replay = make_replay(args, shape)
    # "due" gradient steps are earned and not yet taken; the last row logged is of step "began"; "returns" are the
    # scores of the last twenty games
    counters = {"global_step": 0, "episode": 0, "updates": 0, "due": 0.0, "began": 0, "returns": [], "seconds": 0.0}

    if args.evaluate:
        load_checkpoint(args.evaluate, agent, optimiser, replay)
        video = Path(args.evaluate) / "evaluation.mp4" if args.capture_video else None
        returns = play_games(eval_env, agent.policy, args.seed, args.device, args.eval_sampled, video)
        spread = f"from {min(returns):.1f} to {max(returns):.1f}"
        return print(f"{args.env_id}: mean return {np.mean(returns):.1f} over {len(returns)} episodes, {spread}")

    run_dir = open_run_dir(args)
    replay.folder = run_dir / (f"replay{RANK}" if RANK else "replay")
    if LAUNCH:
        torch.manual_seed(episode_seed(args.seed, 2, RANK))
    resumed = args.resume or (LAUNCH and (run_dir / "checkpoint.pt").exists())
    if resumed:
        counters = load_checkpoint(run_dir, agent, optimiser, replay, WORKERS)
    workers = Workers(args, agent) if LAUNCH else None
    log = workers if RANK else Log(run_dir, args, counters)
    log.say(f"{args.env_id}, observations {tuple(shape)}, {actions} actions; writing to {run_dir}")
    loss_function = compiled(discrete_losses) if args.compile else discrete_losses
    stop, saved_at = workers or StopRequest(), counters["global_step"] if resumed else None

    try:
        games = Games(env, replay, episode_seed(args.seed, 0, counters["global_step"], RANK))  # new on resuming
        while not stop.asked and counters["global_step"] < args.total_timesteps:
            # update the replay with a step of each game
            steps, scores = games.step(agent.policy, args)
            if workers:
                steps, scores = zip(*workers.gather((steps, scores)))
                steps, scores = sum(steps), sum(scores, [])
            counters["global_step"] += steps
            counters["episode"] += len(scores)
            counters["returns"] = [*counters["returns"], *scores][-20:]
            if counters["global_step"] > args.learning_starts:
                counters["due"] += args.updates_per_step * steps / WORKERS

            # find a better policy by gradient descent
            while counters["due"] >= 1 and not stop.asked:
                batch = FrameBatch(*(x.to(args.device) for x in replay.sample(args.batch_size, args.window)))
                metrics, seen = update(agent, optimiser, loss_function, batch, args, workers)
                counters["due"] -= 1
                counters["updates"] += 1
                if counters["updates"] % args.target_period == 0:
                    agent.copy_targets()
            log.progress(counters)

            finished = counters["global_step"] >= args.total_timesteps
            if not counters["updates"] or not (finished or crossed(args.log_every, counters)) or stop.asked:
                continue
            metrics |= discrete_diagnostics(agent, seen, args)
            if RANK == 0 and (finished or crossed(args.eval_every, counters)):
                returns = play_games(eval_env, agent.policy, args.seed, args.device, args.eval_sampled)
                metrics["eval/episodic_return"] = float(np.mean(returns))
                way = "a sampled action" if args.eval_sampled else "the most probable action"
                log.say(f"step {counters['global_step']:,}: {way} returns {np.mean(returns):.1f}")
            if counters["returns"]:
                log.write(counters, metrics)
            save = finished or crossed(args.checkpoint_every, counters)
            counters["began"] = counters["global_step"]
            if save:
                save_run(run_dir, agent, optimiser, replay, counters, workers)
                saved_at = counters["global_step"]
        if stop.asked:
            save_run(run_dir, agent, optimiser, replay, counters, workers)
            command = f"torchrun --standalone --nproc-per-node {WORKERS}" if workers else "python"
            log.say(f"stopped and saved; to go on: {command} {sys.argv[0]} --resume {run_dir}")
            raise SystemExit(128 + stop.asked)
        if args.save_model and RANK == 0:
            model = {"options": policy_options, "policy": agent.policy.cpu().state_dict()}
            write_aside(run_dir / "model.pt", lambda file: torch.save(model, file))
        if args.capture_video and RANK == 0:
            policy, video = agent.policy.to(args.device), run_dir / "evaluation.mp4"
            play_games(eval_env, policy, args.seed, args.device, args.eval_sampled, video)
    except (NotFinite, OSError) as error:
        kept = f"the last good checkpoint is of step {saved_at:,}" if saved_at else "no checkpoint was saved yet"
        refuse(f"{error}; stopped at step {counters['global_step']:,}, and {kept} in {run_dir}.", code=1)
    log.say(f"done: {counters['global_step']:,} steps in {clock(counters['seconds'])}; everything is in {run_dir}")


if __name__ == "__main__":
    main(tyro.cli(Args.command_line))
