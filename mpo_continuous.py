"""Maximum a Posteriori Policy Optimisation for continuous actions (Abdolmaleki et al., ICLR 2018), Algorithm 2.

Try:
    python mpo_continuous.py --env-id dm_control/walker-walk-v0         learn to walk
    python mpo_continuous.py --resume RUN_DIR                           continue a run that was stopped
    python mpo_continuous.py --evaluate RUN_DIR --capture-video         watch what it learned

Symbols, as in the paper:
    theta, theta_i      the policy pi being fitted, and the target policy pi_i it started this iteration from
    phi, phi'           the critic Q, and its target Q'
    q(a|s)              the improved, sample-based policy of the E-step, proportional to pi_i(a|s) exp(Q'(s,a)/eta)
    eta                 temperature of the E-step: the multiplier of KL(q||pi_i) <= epsilon
    eta_mu, eta_sigma   multipliers of the M-step's bounds on the change of mean and covariance
    b(a|s)              the policy that acted when the data was collected

Axis letters in shape comments: B windows, T steps in a window, M sampled actions, S observation size, A action size.

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
import logging
import math
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

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
class Experiment:
    env_id: str = "dm_control/walker-walk-v0"  # the task: dm_control/DOMAIN-TASK-v0, or a continuous Gymnasium task
    seed: int = 1  # seed of networks, exploration, replay sampling and of every episode
    total_timesteps: int = 100_000  # environment steps to train for
    paper: bool = False  # use every value the paper prints, where our defaults depart from it (docs/defaults.md)


@dataclass
class Environment:
    time_limit: int = 0  # cut episodes after this many steps; 0: the task's own limit (1000 where it has none)
    action_bound: float = 0.0  # bound of each action, for tasks that give none; 0: the task's own bounds


@dataclass
class Algorithm:
    gamma: float = 0.99  # gamma, the discount (paper: 0.99)
    epsilon: float = 0.1  # epsilon, the E-step's bound on KL(q || pi_i) (paper: 0.1)
    epsilon_mu: float = 5e-3  # epsilon_mu, the M-step's bound on the change of the mean (paper: 0.1)
    epsilon_sigma: float = 1e-4  # epsilon_Sigma, the M-step's bound on the change of the covariance (paper: 1e-4)
    decoupling: Literal["paper", "followup", "joint"] = "paper"  # how the M-step's KL is split; joint: <= epsilon_mu
    covariance: Literal["full", "diagonal"] = "full"  # covariance of the Gaussian policy (paper: full)
    num_samples: int = 20  # M, the actions sampled per state to estimate integrals
    window: int = 4  # T, the steps in a replayed window, after which Retrace bootstraps
    batch_size: int = 64  # B, the windows in a gradient step
    policy_layers: tuple[int, ...] = (100, 100)  # hidden layers of the policy (paper: 100 100; humanoid 200 200)
    critic_layers: tuple[int, ...] = (200, 200)  # hidden layers of the critic (paper: 200 200; humanoid 300 300)
    bound_mean: bool = True  # keep the policy's mean inside the action range with a tanh
    initial_std: float = 0.5  # standard deviation of the untrained policy; the action range is [-1, 1]
    min_std: float = 0.01  # least diagonal entry of the Cholesky factor
    critic_norms: Literal["first", "every"] = "first"  # study: layer norm after the critic's first or every hidden layer
    bound_targets: bool = False  # study: keep Retrace's targets below max(0, largest reward seen) / (1 - gamma)
    noise_exponent: float = 0.0  # study: exploration noise with power 1/f^this over an episode; 0: white
    alternate_noise: bool = False  # study: white noise in every other episode
    max_std: float = 0.0  # what a standard deviation never reaches, such as 1, the action range; 0: no such bound


@dataclass
class Optimisation:
    learning_rate: float = 5e-4  # Adam's rate for the critic (paper: 5e-4)
    policy_learning_rate: float = 1e-4  # Adam's rate for the policy (paper: 5e-4)
    multiplier_rate: float = 2e-3  # Adam's rate for the logarithms of the multipliers eta
    trajectories: int = 1  # L, the episodes collected before each round of gradient steps
    updates_per_step: float = 1.0  # gradient steps per environment step; 1: the paper's K = 1000 per 1000-step episode
    target_period: int = 100  # gradient steps between two copies of the targets (paper: each iteration, that is 1000)
    critic_target_period: int = 0  # study: the same for the critic alone; 0: as target_period
    multiplier_beta: float = 0.999  # study: Adam's second beta for the multipliers
    learning_starts: int = 2000  # environment steps before the first gradient step
    buffer_size: int = 1_000_000  # steps kept in the replay
    max_grad_norm: float = 40.0  # longer gradients, of each network, are scaled down to this norm


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
class Args(Experiment, Environment, Algorithm, Optimisation, RunControl):
    """All settings of a run, flat: args.seed, args.epsilon."""

    @classmethod
    @tyro.conf.configure(tyro.conf.OmitArgPrefixes)
    def command_line(cls, experiment: Experiment, environment: Environment, algorithm: Algorithm,
                     optimisation: Optimisation, run_control: RunControl) -> "Args":  # fmt: skip
        """Maximum a Posteriori Policy Optimisation for continuous actions."""
        groups = (experiment, environment, algorithm, optimisation, run_control)
        return cls(**{name: value for group in groups for name, value in vars(group).items()})


# What --paper restores: the printed values that are not our defaults.
PAPER = {"epsilon_mu": 0.1, "policy_learning_rate": 5e-4, "updates_per_step": 1.0, "target_period": 1000}
POSITIVE = "total_timesteps epsilon epsilon_mu epsilon_sigma num_samples window policy_layers critic_layers initial_std"
POSITIVE += " min_std learning_rate policy_learning_rate multiplier_rate batch_size trajectories updates_per_step"
POSITIVE += " target_period buffer_size max_grad_norm eval_episodes"
ORDERED = [("window", "buffer_size"), ("min_std", "initial_std"), ("initial_std", "max_std")]  # first below second


# ---------------------------------------------------------------------------------------------------------------------
# Environment. Whatever the task's own spaces are, the learner sees a vector and acts in [-1, 1]^A.
def make_env(args, render=False):
    """The task, observation flattened to [S], action [A] clipped to [-1, 1] and scaled to the task's bounds."""
    env = make_task(args, render)
    actions = env.action_space
    if isinstance(actions, gym.spaces.Discrete):
        refuse(f"{args.env_id} has discrete actions; use mpo_atari.py for it.")
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        refuse(f"{args.env_id} has actions {actions}; this script needs a vector of continuous ones.")
    if args.action_bound:
        actions = gym.spaces.Box(-args.action_bound, args.action_bound, actions.shape)
    if max(abs(actions.low).max(), abs(actions.high).max()) > 1e6:
        refuse(f"{args.env_id} has unbounded actions; give a bound, such as --action-bound 1.")
    centre, scale = (actions.high + actions.low) / 2, (actions.high - actions.low) / 2
    unit_box = gym.spaces.Box(-1, 1, actions.shape)
    env = gym.wrappers.TransformAction(env, lambda action: centre + scale * np.clip(action, -1, 1), unit_box)
    observed = env.observation_space
    parts = observed.values() if isinstance(observed, gym.spaces.Dict) else [observed]
    if any(part.dtype == np.uint8 and len(part.shape) > 1 for part in parts):
        refuse(f"{args.env_id} observes images; this script needs vectors (mpo_atari.py learns from images).")
    return gym.wrappers.FlattenObservation(env)


def make_task(args, render):
    """The task as Gymnasium makes it, with a time limit. MUJOCO_GL is read once, on import: egl needs no display."""
    kwargs = {"render_mode": "rgb_array"} if render else {}
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl" if render else "disabled")
    try:
        if args.env_id not in gym.registry:  # the dm_control/ tasks are registered by this import
            logging.getLogger("absl").setLevel(logging.ERROR)
            gym.register_envs(importlib.import_module("shimmy"))
        if args.env_id not in gym.registry:
            close = difflib.get_close_matches(args.env_id, gym.registry, n=3, cutoff=0.4)
            refuse(f"there is no task {args.env_id!r}" + (f"; did you mean {', '.join(close)}?" if close else "."))
        if "domain_name" in getattr(gym.spec(args.env_id).entry_point, "keywords", ()):  # dm_control's suite
            kwargs["task_kwargs"] = {"random": args.seed}  # where the plant is random, as in lqr, it is the seed's
        env = gym.make(args.env_id, disable_env_checker=True, **kwargs)
        env.reset(seed=0)
    except Exception as error:
        if "OpenGL" in str(error):
            refuse(f"{args.env_id} needs OpenGL; MUJOCO_GL=egl gives it, but camera images cannot be learned from.")
        refuse(f"{args.env_id} cannot be made: {(str(error) or repr(error)).splitlines()[0]}")
    suite = getattr(env.unwrapped, "_env", None)  # dm_control keeps its limit to itself
    endless = env.spec.max_episode_steps is None if suite is None else getattr(suite, "_step_limit", 0) == math.inf
    return gym.wrappers.TimeLimit(env, args.time_limit or 1000) if args.time_limit or endless else env


def episode_seed(seed, *numbers):
    """One seed per episode, a function of its number alone: what makes a resumed run repeat the uninterrupted one."""
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Networks. Two hidden layers with layer normalisation after the first, as is usual for MPO; the paper gives the sizes.
class Policy(nn.Module):
    """pi(a|s, theta) = N(mu(s), L(s) L(s)^T) with L lower triangular and positive on the diagonal."""

    def __init__(self, state_size, action_size, layers, initial_std, min_std, max_std, covariance, bound_mean):
        super().__init__()
        sizes = [state_size, *layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norm = nn.LayerNorm(layers[0])
        self.mean = nn.Linear(layers[-1], action_size)
        self.factor = nn.Linear(layers[-1], action_size**2)
        self.action_size, self.min_std, self.max_std = action_size, min_std, max_std
        self.covariance, self.bound_mean = covariance, bound_mean
        if max_std:
            initial_std /= math.sqrt(1 - (initial_std / max_std) ** 2)  # before it is held below max_std
        self.std_offset = math.log(math.expm1(initial_std - min_std))  # softplus(offset) + min_std = initial_std
        with torch.no_grad():  # start at N(0, initial_std^2 I), nearly
            for head in (self.mean, self.factor):
                head.weight.mul_(0.01), head.bias.zero_()

    def forward(self, state):
        """state [..., S] -> mean [..., A], Cholesky factor [..., A, A]."""
        h = F.relu(self.norm(self.hidden[0](state)))
        for layer in self.hidden[1:]:
            h = F.relu(layer(h))
        raw = self.factor(h).unflatten(-1, (self.action_size, self.action_size))
        std = F.softplus(raw.diagonal(dim1=-2, dim2=-1) + self.std_offset) + self.min_std
        cholesky = torch.diag_embed(std)  # A_ii <- log(1 + exp(A_ii))
        if self.covariance == "full":
            cholesky = cholesky + raw.tril(-1)
        if self.max_std:
            variance = cholesky.square().sum(-1, keepdim=True)
            cholesky = cholesky * (1 + variance / self.max_std**2).rsqrt()  # the rows shrink, the correlations stay
        mean = self.mean(h)
        return torch.tanh(mean) if self.bound_mean else mean, cholesky


class Critic(nn.Module):
    """Q(s, a, phi). Actions outside [-1, 1] act as clipped ones, so they are scored as clipped ones."""

    def __init__(self, state_size, action_size, layers, norms="first"):
        super().__init__()
        sizes = [state_size + action_size, *layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norm = nn.LayerNorm(layers[0])
        self.norms = nn.ModuleList(nn.LayerNorm(size) if norms == "every" else nn.Identity() for size in layers[1:])
        self.value = nn.Linear(layers[-1], 1)
        self.state_size = state_size

    def forward(self, state, action):
        """state [..., S] and action [..., A] -> [...]; or M actions for each state, [..., M, A] -> [..., M]."""
        # The first layer over [s, a] is W_s s + W_a a + b; the state's part is computed once for all M actions. The
        # in-place sum avoids a pass over memory: there are M x B x T rows.
        first = self.hidden[0]
        state_part = F.linear(state, first.weight[:, : self.state_size], first.bias)
        if action.dim() > state.dim():
            state_part = state_part.unsqueeze(-2)
        h = F.linear(action.clamp(-1, 1), first.weight[:, self.state_size :]).add_(state_part)
        h = self.norm(h).relu_()
        for layer, norm in zip(self.hidden[1:], self.norms):
            h = norm(layer_of_many(layer, h)).relu_()
        return h @ self.value.weight[0] + self.value.bias


def layer_of_many(layer, h):
    """W h + b. Of [B, T, M, H] it is a 1x1 convolution: PyTorch has a faster product for that on many CPUs."""
    if h.dim() == 4 and h.is_cpu:
        return F.conv2d(h.permute(0, 3, 1, 2), layer.weight[:, :, None, None], layer.bias).permute(0, 2, 3, 1)
    return layer(h)


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


def gaussian_log_prob(mean, cholesky, action):
    """log N(a; mu, L L^T). mean, action [..., A], cholesky [..., A, A] -> [...]."""
    z = torch.linalg.solve_triangular(cholesky, (action - mean).unsqueeze(-1), upper=False).squeeze(-1)
    return standard_normal_log_prob(z) - log_det(cholesky)


def standard_normal_log_prob(z):
    """log N(z; 0, I). [..., A] -> [...]. With a = mu + L z, log N(a; mu, L L^T) is this minus log det L."""
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi))


def log_det(cholesky):
    """log det of a triangular matrix. [..., A, A] -> [...]."""
    return cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)


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


# ---------------------------------------------------------------------------------------------------------------------
# E-step: q(a|s) = pi_i(a|s) exp(Q'(s,a)/eta) / Z(s), with eta at the minimum of the convex dual g. The integrals over
# actions are sums over samples from pi_i, whose prior weight is 1/M each.
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
# M-step: maximise E_q log pi(a|s, theta) while the change of mean and covariance stays within epsilon_mu and
# epsilon_sigma. A sample is a = mu_i + L_i z with z known, so all that the objective needs of the M samples is their
# weighted moments z_bar and S, and all that it needs of pi is P = L^-1 L_i and d = L^-1 (mu_i - mu): one triangular
# solve per state. E.g. L^-1 (a - mu) = d + P z.
def weighted_moments(weights, z):
    """z_bar = sum_m w_m z_m and S = sum_m w_m z_m z_m^T. weights [..., M], z [..., M, A] -> [..., A], [..., A, A]."""
    return (weights.unsqueeze(-2) @ z).squeeze(-2), (weights.unsqueeze(-1) * z).mT @ z


def whiten(mean_i, cholesky_i, mean, cholesky):
    """d = L^-1 (mu_i - mu) [..., A] and P = L^-1 L_i [..., A, A], from one solve."""
    right = torch.cat([(mean_i - mean).unsqueeze(-1), cholesky_i], dim=-1)
    solved = torch.linalg.solve_triangular(cholesky, right, upper=False)
    return solved[..., 0], solved[..., 1:]


def kl_mean(d):
    """C_mu = 1/2 (mu - mu_i)^T Sigma^-1 (mu - mu_i) = 1/2 |d|^2. [..., A] -> [...]."""
    return 0.5 * d.square().sum(-1)


def kl_covariance(p):
    """C_Sigma = 1/2 (tr(Sigma^-1 Sigma_i) - A + ln(det Sigma / det Sigma_i)) = 1/2 (|P|^2 - A) - ln det P. -> [...]."""
    return 0.5 * (p.square().sum((-2, -1)) - p.shape[-1]) - log_det(p)


def expected_log_prob(d, p, log_det_l, z_bar, s):
    """E_q log N(a; mu, L L^T) = -1/2 E_q |d + P z|^2 - ln det L - A/2 ln 2 pi, from z's moments under q. -> [...]."""
    pz_bar = (p @ z_bar.unsqueeze(-1)).squeeze(-1)
    square = d.square().sum(-1) + 2 * (d * pz_bar).sum(-1) + ((p @ s) * p).sum((-2, -1))
    return -0.5 * (square + p.shape[-1] * math.log(2 * math.pi)) - log_det_l


def m_step_terms(decoupling, mean_i, cholesky_i, mean, cholesky, z_bar, s):
    """The likelihood to maximise, C_mu and C_Sigma, each [...], in one of two decouplings (docs/paper-to-code.md)."""
    if decoupling == "followup":  # (mu, Sigma_i) fits the mean, (mu_i, Sigma) the covariance, C_mu with Sigma_i
        d, same = whiten(mean_i, cholesky_i, mean, cholesky_i)
        _, p = whiten(mean_i, cholesky_i, mean_i, cholesky)
        likelihood = expected_log_prob(d, same, log_det(cholesky_i), z_bar, s)
        likelihood = likelihood + expected_log_prob(torch.zeros_like(d), p, log_det(cholesky), z_bar, s)
    else:  # the paper's: one likelihood under (mu, Sigma), C_mu with Sigma; C_mu + C_Sigma is KL(pi_i || pi)
        d, p = whiten(mean_i, cholesky_i, mean, cholesky)
        likelihood = expected_log_prob(d, p, log_det(cholesky), z_bar, s)
    return likelihood, kl_mean(d), kl_covariance(p)


def lagrangian(eta, epsilon, kl):
    """eta (epsilon - C), twice: the multiplier descends on the first, the policy ascends on the second."""
    return eta * (epsilon - kl.detach()), eta.detach() * (epsilon - kl)


# ---------------------------------------------------------------------------------------------------------------------
# Replay. A ring of rows in the order they were lived. An episode of n steps is n + 1 rows: the last one holds only the
# final observation, which a time limit bootstraps from. Whole episodes are added, so the newest row is always a last
# one, and a window that starts at any other row meets the end of its episode before it meets the ring's seam.
class Batch(NamedTuple):
    """Windows of consecutive steps. Where valid is 0 the episode is over and the entries mean nothing."""

    state: torch.Tensor  # [B, T+1, S]
    action: torch.Tensor  # [B, T, A]
    behaviour_log_prob: torch.Tensor  # [B, T], log b(a|s) at the time of acting
    reward: torch.Tensor  # [B, T]
    terminated: torch.Tensor  # [B, T], 1 where the step ended its episode for good (a time limit does not)
    valid: torch.Tensor  # [B, T]
    bound: torch.Tensor | None = None  # [], the largest value that any policy could have, by the rewards seen


class Replay:
    def __init__(self, capacity, state_size, action_size):
        self.rows = {
            "state": torch.zeros(capacity, state_size),
            "action": torch.zeros(capacity, action_size),
            "behaviour_log_prob": torch.zeros(capacity),
            "reward": torch.zeros(capacity),
            "terminated": torch.zeros(capacity),
            "last": torch.zeros(capacity, dtype=torch.bool),
        }
        self.capacity, self.size, self.head = capacity, 0, 0
        self.starts = torch.zeros(0, dtype=torch.long)

    def add_episode(self, **episode):
        """Append n + 1 rows; each entry is [n + 1, ...] and overwrites the oldest rows where the ring is full."""
        count = len(episode["state"])
        index = (self.head + torch.arange(count)) % self.capacity
        for name, rows in self.rows.items():
            rows[index[-self.capacity :]] = torch.as_tensor(episode[name])[-self.capacity :].to(rows.dtype)
        self.head = int(index[-1] + 1) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self.starts = (~self.rows["last"][: self.size]).nonzero().squeeze(-1)

    def sample(self, batch_size, window):
        """Windows [B, T] starting at uniformly drawn steps."""
        start = self.starts[torch.randint(len(self.starts), (batch_size,))]
        index = (start.unsqueeze(-1) + torch.arange(window + 1)) % self.capacity
        over = self.rows["last"][index].cumsum(1) > 0  # from the final observation on: another episode's, or nothing
        step = {name: self.rows[name][index[:, :-1]] for name in Batch._fields[1:-2]}
        return Batch(state=self.rows["state"][index], valid=(~over[:, :-1]).float(), **step)

    def state_dict(self):
        return {name: rows[: self.size].clone() for name, rows in self.rows.items()} | {"head": self.head}

    def load_state_dict(self, saved):
        self.size, self.head = len(saved["last"]), saved["head"]
        for name, rows in self.rows.items():
            rows[: self.size] = saved[name]
        self.starts = (~self.rows["last"][: self.size]).nonzero().squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Learner: one gradient step, in the order of the paper's Algorithm 2.
def compute_losses(agent, batch, noise, args):
    """The losses of one gradient step and what the diagnostics need. batch [B, T, ...], noise [B, T+1, M, A]."""
    discount = args.gamma * (1 - batch.terminated)  # a termination bootstraps nothing, a time limit does
    alive = F.pad(batch.valid * (1 - batch.terminated), (1, 0), value=1.0)  # [B, T+1], states from which one can act

    # M actions of pi_i for each of s_0 .. s_T, scored once by Q': the scores serve V in Retrace and q in the E-step.
    with torch.no_grad():
        mean_i, cholesky_i = agent.target_policy(batch.state)
        sampled = mean_i.unsqueeze(-2) + noise @ cholesky_i.mT  # a = mu_i + L_i z
        taken = F.pad(batch.action, (0, 0, 0, 1)).unsqueeze(-2)  # a_t, scored in the same pass; none at s_T
        scores = agent.target_critic(batch.state, torch.cat([sampled, taken], dim=-2))  # [B, T+1, M+1]
        scores, q_i = scores[..., :-1], scores[:, :-1, -1]

        log_prob = gaussian_log_prob(mean_i[:, 1:-1], cholesky_i[:, 1:-1], batch.action[:, 1:])
        trace = trace_coefficient(log_prob, batch.behaviour_log_prob[:, 1:]) * batch.valid[:, 1:]
        target = retrace(q_i, scores[:, 1:].mean(-1), batch.reward, discount, F.pad(trace, (0, 1)))
        if args.bound_targets:
            target = target.clamp(max=batch.bound)

    # Q-function gradient: (Q(s_t, a_t, phi) - Q_t^ret)^2
    q = agent.critic(batch.state[:, :-1].flatten(0, 1), batch.action.flatten(0, 1)).view_as(target)
    critic_loss = masked_mean((q - target).square(), batch.valid)

    # E-step gradient: g(eta), then q(a|s)
    log_prior = -math.log(args.num_samples)  # each sample stands for 1/M of pi_i
    eta = agent.log_eta.exp()
    dual_loss = temperature_dual(eta, scores, log_prior, args.epsilon, alive)
    weights = improved_policy(eta.detach(), scores, log_prior)

    # M-step gradient: L(theta, eta_mu, eta_sigma)
    mean, cholesky = (x.unflatten(0, alive.shape) for x in agent.policy(batch.state.flatten(0, 1)))
    z_bar, s = weighted_moments(weights, noise)
    likelihood, c_mu, c_sigma = m_step_terms(args.decoupling, mean_i, cholesky_i, mean, cholesky, z_bar, s)
    likelihood, c_mu, c_sigma = (masked_mean(x, alive) for x in (likelihood, c_mu, c_sigma))
    if args.decoupling == "joint":
        multipliers, constraints = lagrangian(agent.log_eta_mu.exp(), args.epsilon_mu, c_mu + c_sigma)
    else:
        of_mu = lagrangian(agent.log_eta_mu.exp(), args.epsilon_mu, c_mu)
        of_sigma = lagrangian(agent.log_eta_sigma.exp(), args.epsilon_sigma, c_sigma)
        multipliers, constraints = of_mu[0] + of_sigma[0], of_mu[1] + of_sigma[1]
    policy_loss = -(likelihood + constraints)

    seen = {"trace": trace, "alive": alive, "valid": batch.valid, "q": q, "target": target, "scores": scores}
    seen |= {"weights": weights, "mean": mean, "cholesky": cholesky, "c_mu": c_mu, "c_sigma": c_sigma}
    return critic_loss, policy_loss, dual_loss + multipliers, {name: x.detach() for name, x in seen.items()}


def update(agent, optimiser, loss_function, batch, noise, args, workers=None):
    """One step of Adam on theta, phi and the multipliers. Returns the losses and what the diagnostics need."""
    critic_loss, policy_loss, multiplier_loss, seen = loss_function(agent, batch, noise, args)
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
def diagnostics(agent, seen, args):
    """The mpo/* metrics of one update; docs/metrics.md says what each means and when to worry."""
    weights, alive, std = seen["weights"], seen["alive"], seen["cholesky"].square().sum(-1).sqrt()
    valid, q, target = seen["valid"] > 0, seen["q"], seen["target"]
    metrics = {
        "eta": agent.log_eta.exp(),
        "eta_mu": agent.log_eta_mu.exp(),
        "eta_sigma": agent.log_eta_sigma.exp(),
        "kl_q_relative": masked_mean(categorical_kl(weights, -math.log(args.num_samples)), alive) / args.epsilon,
        "kl_mu_relative": seen["c_mu"] / args.epsilon_mu,
        "kl_sigma_relative": seen["c_sigma"] / args.epsilon_sigma,
        "trace": masked_mean(seen["trace"], seen["valid"][:, 1:]),
        "effective_samples": masked_mean(1 / weights.square().sum(-1), alive),
        "entropy": masked_mean(log_det(seen["cholesky"]), alive) + 0.5 * std.shape[-1] * math.log(2 * math.pi * math.e),
        "std_mean": masked_mean(std.mean(-1), alive),
        "std_min": std.min(),
        "std_max": std.max(),
        "mean_outside": masked_mean((seen["mean"].abs() > 1).float().mean(-1), alive),
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
def q_minus_return(agent, replay, args, rows=2000):
    """Mean of Q(s,a) less the discounted rest of the episode, over the newest steps but the last 500 before a limit."""
    index = (replay.head - 1 - torch.arange(min(rows, replay.size))) % replay.capacity  # the newest first
    state, action, _, reward, terminated, last = (replay.rows[name][index] for name in replay.rows)
    returns, counted, rest, ahead = [], [], 0.0, 0.0
    for r, end, no_step in zip(reward.tolist(), terminated.tolist(), last.tolist()):
        rest = 0.0 if no_step else r + args.gamma * (1 - end) * rest
        ahead = 0.0 if no_step else math.inf if end else ahead + 1
        returns.append(rest)
        counted.append(ahead >= 500)
    counted = torch.tensor(counted)
    q = agent.critic(state[counted].to(args.device), action[counted].to(args.device)).cpu()
    return float((q - torch.tensor(returns)[counted]).mean())


def coloured_noise(exponent, steps, action_size):
    """z [steps, A], each N(0, 1), whose power over time falls as 1/f^exponent; 0 is white noise."""
    frequency = torch.fft.fftfreq(steps).abs()
    frequency[0] = 1 / steps  # a constant is as strong as the slowest wave
    amplitude = frequency ** (-exponent / 2)
    amplitude /= amplitude.square().mean().sqrt()
    spectrum = torch.fft.fft(torch.randn(steps, action_size), dim=0) * amplitude.unsqueeze(-1)
    return torch.fft.ifft(spectrum, dim=0).real


@torch.no_grad()
def collect_episode(env, policy, seed, device, exponent=0.0):
    """Live one episode with actions sampled from the policy. Returns its n + 1 rows for the replay."""
    state, _ = env.reset(seed=seed)
    if not np.isfinite(state).all():
        raise NotFinite("the first observation of an episode is not finite")
    rows = {"state": [state], "action": [], "behaviour_log_prob": [], "reward": [], "terminated": []}
    over, step = False, 0
    while not over:
        mean, cholesky = policy(torch.as_tensor(state, dtype=torch.float32, device=device))
        if step % 1000 == 0 and exponent:
            noise = coloured_noise(exponent, 1000, len(mean))
        z = (noise[step % 1000] if exponent else torch.randn(len(mean))).to(device)
        step += 1
        action = mean + cholesky @ z
        # The action is stored as it was drawn, with its density; the environment clips it, and so does the critic.
        log_prob = standard_normal_log_prob(z) - log_det(cholesky)
        state, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
        over = terminated or truncated
        if not np.isfinite(reward) or not np.isfinite(state).all():
            raise NotFinite(f"{'the reward' if not np.isfinite(reward) else 'an observation'} is not finite")
        row = (state, action.cpu().numpy(), log_prob.item(), float(reward), float(terminated))
        for name, value in zip(rows, row):
            rows[name].append(value)
    rows["last"] = [False] * len(rows["reward"]) + [True]
    for name in ("action", "behaviour_log_prob", "reward", "terminated"):
        rows[name].append(np.zeros_like(rows[name][0]))  # the final observation has no step
    return {name: np.stack(values) for name, values in rows.items()}


def collect_trajectories(env, policy, replay, counters, args, workers=None):
    """L episodes into the replay (at the start, as many as learning_starts asks) and the gradient steps they earn."""
    counters["began"], wanted = counters["global_step"], args.trajectories * WORKERS
    while len(counters["returns"]) < wanted or counters["global_step"] < args.learning_starts or counters["due"] < 1:
        seed = episode_seed(args.seed, 0, counters["episode"] * WORKERS + RANK)
        exponent = 0.0 if args.alternate_noise and counters["episode"] % 2 else args.noise_exponent
        episode = collect_episode(env, policy, seed, args.device, exponent)
        replay.add_episode(**episode)
        steps, returns = len(episode["reward"]) - 1, [float(episode["reward"].sum())]
        if workers:
            steps, returns = zip(*workers.gather((steps, returns)))
            steps, returns = sum(steps), sum(returns, [])
        counters["returns"] += returns
        counters["episode"] += 1
        counters["global_step"] += steps
        counters["due"] += args.updates_per_step * steps / WORKERS


@torch.no_grad()
def evaluate(env, policy, episodes, seed, device, video=None):
    """Returns of some episodes with the mean action, the first of them filmed to the file `video`."""
    returns, frames = [], []
    for episode in range(episodes):
        state, _ = env.reset(seed=episode_seed(seed, 1, episode))
        total, over = 0.0, False
        while not over:
            if video and episode == 0:
                frames.append(env.render())
            mean, _ = policy(torch.as_tensor(state, dtype=torch.float32, device=device))
            state, reward, terminated, truncated, _ = env.step(mean.cpu().numpy())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    if video:
        import imageio.v2 as imageio

        imageio.mimwrite(video, frames, fps=frame_rate(env), macro_block_size=1)
    return returns


def frame_rate(env):
    """Frames per second at true speed. Shimmy's own figure is wrong, so dm_control is asked itself."""
    physics = getattr(env.unwrapped, "_env", None)
    return 1 / physics.control_timestep() if physics is not None else env.metadata.get("render_fps", 30)


# ---------------------------------------------------------------------------------------------------------------------
# The run folder: args.json, progress.csv, TensorBoard events, checkpoint.pt, model.pt.
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
# The training loop: collect L trajectories, K gradient steps, copy the targets; log, evaluate and save on the way.
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

    env, eval_env = make_env(args), make_env(args, render=args.capture_video)
    sizes = {"state_size": env.observation_space.shape[0], "action_size": env.action_space.shape[0]}
    policy_options = {"layers": args.policy_layers, "initial_std": args.initial_std, "min_std": args.min_std}
    policy_options |= sizes | {"max_std": args.max_std, "covariance": args.covariance, "bound_mean": args.bound_mean}
    critic = Critic(**sizes, layers=args.critic_layers, norms=args.critic_norms)
    agent = Agent(Policy(**policy_options), critic, eta=1.0, eta_mu=1.0, eta_sigma=100.0).to(args.device)
    policy_group = {"params": list(agent.policy.parameters()), "lr": args.policy_learning_rate}
    critic_group = {"params": list(agent.critic.parameters()), "lr": args.learning_rate}
    multiplier_group = {"params": agent.multipliers(), "lr": args.multiplier_rate, "betas": (0.9, args.multiplier_beta)}
    optimiser = torch.optim.Adam([policy_group, critic_group, multiplier_group], fused=True)
    try:
        replay = Replay(args.buffer_size, **sizes)
    except RuntimeError:
        refuse(f"a replay of --buffer-size {args.buffer_size:,} does not fit into memory.")
    # "due" gradient steps are left of this iteration, which "began" at that step; "returns" are those of its episodes
    counters = {"global_step": 0, "episode": 0, "updates": 0, "due": 0.0, "began": 0, "returns": [], "seconds": 0.0}

    if args.evaluate:
        load_checkpoint(args.evaluate, agent, optimiser, replay)
        video = Path(args.evaluate) / "evaluation.mp4" if args.capture_video else None
        returns = evaluate(eval_env, agent.policy, args.eval_episodes, args.seed, args.device, video)
        spread = f"from {min(returns):.1f} to {max(returns):.1f}"
        return print(f"{args.env_id}: mean return {np.mean(returns):.1f} over {len(returns)} episodes, {spread}")

    run_dir = open_run_dir(args)
    if LAUNCH:
        torch.manual_seed(episode_seed(args.seed, 2, RANK))
    resumed = args.resume or (LAUNCH and (run_dir / "checkpoint.pt").exists())
    if resumed:
        counters = load_checkpoint(run_dir, agent, optimiser, replay, WORKERS)
    workers = Workers(args, agent) if LAUNCH else None
    log = workers if RANK else Log(run_dir, args, counters)
    log.say(f"{args.env_id}, {sizes['state_size']} observations, {sizes['action_size']} actions; writing to {run_dir}")
    loss_function = compiled(compute_losses) if args.compile else compute_losses
    stop, saved_at = workers or StopRequest(), counters["global_step"] if resumed else None

    try:
        while not stop.asked and (counters["global_step"] < args.total_timesteps or counters["returns"]):
            # update the replay with L trajectories from the environment
            if not counters["returns"]:
                collect_trajectories(env, agent.policy, replay, counters, args, workers)

            # find a better policy by gradient descent: K steps
            while counters["due"] >= 1 and not stop.asked:
                batch = replay.sample(args.batch_size, args.window)
                if args.bound_targets:
                    batch = batch._replace(bound=replay.rows["reward"][: replay.size].max().clamp(min=0) / (1 - args.gamma))
                batch = Batch(*(None if x is None else x.to(args.device) for x in batch))
                noise = torch.randn(*batch.state.shape[:2], args.num_samples, sizes["action_size"]).to(args.device)
                metrics, seen = update(agent, optimiser, loss_function, batch, noise, args, workers)
                counters["due"] -= 1
                counters["updates"] += 1
                if counters["updates"] % args.target_period == 0:
                    agent.copy_targets("policy")
                if counters["updates"] % (args.critic_target_period or args.target_period) == 0:
                    agent.copy_targets("critic")
                log.progress(counters)
            if counters["due"] >= 1:
                break  # asked to stop between two updates

            finished = counters["global_step"] >= args.total_timesteps
            metrics |= diagnostics(agent, seen, args)
            metrics["mpo/q_minus_return"] = q_minus_return(agent, replay, args)
            if RANK == 0 and (finished or crossed(args.eval_every, counters)):
                returns = evaluate(eval_env, agent.policy, args.eval_episodes, args.seed, args.device)
                metrics["eval/episodic_return"] = float(np.mean(returns))
                log.say(f"step {counters['global_step']:,}: the mean action returns {np.mean(returns):.1f}")
            log.write(counters, metrics)
            counters["returns"] = []
            if finished or crossed(args.checkpoint_every, counters):
                save_checkpoint(run_dir, agent, optimiser, replay, counters, workers)
                saved_at = counters["global_step"]
        if stop.asked:
            save_checkpoint(run_dir, agent, optimiser, replay, counters, workers)
            command = f"torchrun --standalone --nproc-per-node {WORKERS}" if workers else "python"
            log.say(f"stopped and saved; to go on: {command} {sys.argv[0]} --resume {run_dir}")
            raise SystemExit(128 + stop.asked)
        if args.save_model and RANK == 0:
            model = {"options": policy_options, "policy": agent.policy.cpu().state_dict()}
            write_aside(run_dir / "model.pt", lambda file: torch.save(model, file))
        if args.capture_video and RANK == 0:
            evaluate(eval_env, agent.policy.to(args.device), 1, args.seed, args.device, run_dir / "evaluation.mp4")
    except (NotFinite, OSError) as error:
        kept = f"the last good checkpoint is of step {saved_at:,}" if saved_at else "no checkpoint was saved yet"
        refuse(f"{error}; stopped at step {counters['global_step']:,}, and {kept} in {run_dir}.", code=1)
    log.say(f"done: {counters['global_step']:,} steps in {clock(counters['seconds'])}; everything is in {run_dir}")


if __name__ == "__main__":
    main(tyro.cli(Args.command_line))
