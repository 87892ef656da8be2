# SPDX-License-Identifier: MIT
"""Maximum a Posteriori Policy Optimisation (MPO) for continuous actions: Algorithm 2 of the paper
(Abdolmaleki et al., ICLR 2018). From the project "MPO, one readable file per variant".

    python mpo_continuous.py --env-id dm_control/walker-walk-v0   learn to walk
    python mpo_continuous.py --resume RUN_DIR                     continue a run that was stopped
    python mpo_continuous.py --evaluate RUN_DIR --capture-video   watch what it learned

walker-walk returned 240 of 1000 after 20,000 steps, 630 after 50,000, 930 after 100,000 (one seed).

    theta, phi          the policy pi being fitted, and the critic Q
    theta_i, phi'       their targets: the policy pi_i that pi started from, and Q'
    q(a|s)              the E-step's improved policy, proportional to pi_i(a|s) exp(Q'(s,a)/eta)
    eta                 temperature of the E-step: the multiplier of KL(q || pi_i) <= epsilon
    eta_mu, eta_sigma   multipliers of the M-step's bounds on the change of mean and covariance
    b(a|s)              the policy that acted when the data was collected
    B, T, M, S, A       in shapes: windows, their steps, sampled actions, observation, action size
"""
# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["torch>=2.4,<3", "numpy>=1.26,<3", "gymnasium>=1.0,<2", "shimmy>=2.0,<3",
#     "dm_control>=1.0.20,<2", "mujoco>=3.1.6,<4", "tyro>=0.9,<2", "tensorboard>=2.16,<3",
#     "tqdm>=4.66,<5", "imageio>=2.34,<3", "imageio-ffmpeg>=0.5,<1"]
# ///

import signal

if __name__ == "__main__":  # the imports take seconds: Ctrl-C ends them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import copy
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
from typing import Literal

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ORIGIN = ("mpo_continuous.py", 1)  # what saved files say of the script, and of their format
PAPER = {"epsilon_mu": 0.1, "policy_learning_rate": 5e-4, "target_period": 1000}  # see --paper


# ---- Settings. Each comment is the flag's line in --help; "paper:" marks a printed value.
@dataclass
class Args:
    env_id: str = "dm_control/walker-walk-v0"  # a task of dm_control or Gymnasium, or MODULE:TASK
    seed: int = 1  # of networks, exploration, replay sampling and every episode
    paper: bool = False  # take the values that the paper prints where our defaults are others
    time_limit: int = 0  # cut episodes after this many steps; 0: the task's own limit, or 1000

    gamma: float = 0.99  # discount (paper: 0.99)
    epsilon: float = 0.1  # the E-step's bound on KL(q || pi_i) (paper: 0.1)
    epsilon_mu: float = 5e-3  # the M-step's bound on the change of the mean (paper: 0.1)
    epsilon_sigma: float = 1e-4  # the M-step's bound on the change of the covariance (paper: 1e-4)
    joint_bound: bool = False  # bound the whole KL(pi_i || pi) by epsilon_mu instead
    num_samples: int = 10  # M, the actions sampled per state to estimate integrals
    window: int = 4  # T, the steps in a replayed window, after which Retrace bootstraps
    batch_size: int = 64  # B, the windows in a gradient step
    policy_layers: tuple[int, ...] = (100, 100)  # hidden layers (paper: 100 100; humanoid 200 200)
    critic_layers: tuple[int, ...] = (200, 200)  # hidden layers (paper: 200 200; humanoid 300 300)
    covariance: Literal["full", "diagonal"] = "full"  # of the Gaussian policy (paper: full)

    learning_rate: float = 5e-4  # Adam's rate for the critic (paper: 5e-4)
    policy_learning_rate: float = 3e-4  # Adam's rate for the policy (paper: 5e-4)
    trajectories: int = 1  # L, the episodes collected before each round of gradient steps
    updates_per_step: float = 1.0  # gradient steps per step (paper: 1000 per episode of 1000 steps)
    target_period: int = 100  # gradient steps between copies of the targets (paper: 1000)
    learning_starts: int = 2000  # environment steps before the first gradient step
    buffer_size: int = 1_000_000  # steps kept in the replay

    total_timesteps: int = 100_000  # environment steps to train for; above learning_starts
    run_dir: str = ""  # folder of this run; empty: runs/TASK__SCRIPT__SEED__TIME
    resume: str = ""  # continue the run in this folder; settings above total_timesteps stay
    evaluate: str = ""  # train nothing; evaluate the policy saved in this folder or file
    eval_every: int = 10_000  # environment steps between two evaluations, each with a checkpoint
    eval_episodes: int = 10  # episodes in an evaluation
    capture_video: bool = False  # film an episode of each evaluation: RUN_DIR/evaluation.mp4
    threads: int = 1  # CPU threads; more help where the networks are large and the cores idle
    device: str = "cpu"  # PyTorch device of the networks, such as cpu or cuda


# ---- Environment. Whatever the task's spaces are, the learner sees a vector and acts in [-1, 1]^A.
def make_env(args):
    """The task with observations [S], and actions [A] scaled from [-1, 1] to its own bounds."""
    if sys.platform == "linux":  # read once, when MuJoCo is imported; egl needs no display
        os.environ.setdefault("MUJOCO_GL", "egl" if args.capture_video else "disabled")
    sys.path.append(os.getcwd())  # where MODULE of MODULE:TASK may be
    options = {"render_mode": "rgb_array"} if args.capture_video else {}
    try:
        name = args.env_id if ":" in args.env_id else f"shimmy:{args.env_id}"  # has dm_control
        env = gym.make(name, disable_env_checker=True, **options)
        if args.time_limit or env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, args.time_limit or 1000)
        env.reset(seed=0)
        if args.capture_video:
            env.render()
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        refuse(f"{args.env_id} cannot be {'filmed' if options else 'made'} here: {reason}")
    if type(env.unwrapped).__module__.startswith("shimmy."):
        suite = env.unwrapped._env  # dm_control's own
        env.unwrapped.metadata["render_fps"] = round(1 / suite.control_timestep())
        camera = 0 if suite.physics.model.ncam else -1  # the first one follows the body
        env.unwrapped.render_kwargs = {"width": 480, "height": 360, "camera_id": camera}

    seen, box = env.observation_space, env.action_space
    real = isinstance(box, gym.spaces.Box) and box.dtype.kind == "f" and len(box.shape) == 1
    if not real or np.abs([box.low, box.high]).max() > 1e6 or seen.dtype == np.uint8:
        refuse(f"{args.env_id} needs vectors and bounded actions, but has {seen} and {box}.")
    one = box.dtype.type(1)
    env = gym.wrappers.RescaleAction(gym.wrappers.FlattenObservation(env), -one, one)
    return gym.wrappers.ClipAction(env)


# ---- Networks. The paper gives their sizes; layer norms, in the critic after each layer, are ours.
def hidden_layers(input_size, sizes, linear=nn.Linear, norms=1):
    """Linear layers and ReLUs, with a layer norm in the first few."""
    modules = []
    for number, (size, next_size) in enumerate(zip((input_size, *sizes), sizes)):
        norm = [nn.LayerNorm(next_size)] if number < norms else []
        modules += [linear(size, next_size), *norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*modules)


class Policy(nn.Module):
    """pi(a|s, theta) = N(mu(s), L(s) L(s)^T), L lower triangular with a diagonal above 0.01."""

    def __init__(self, state_size, action_size, args):
        super().__init__()
        self.full = args.covariance == "full"
        self.hidden = hidden_layers(state_size, args.policy_layers)
        self.mean = nn.Linear(args.policy_layers[-1], action_size)
        self.factor = nn.Linear(args.policy_layers[-1], action_size**2)
        for head in (self.mean, self.factor):  # start at N(0, 0.5^2 I), nearly
            head.weight.data.mul_(0.01)
            head.bias.data.zero_()
        self.offset = math.log(math.expm1(0.49))  # softplus gives 0.49, and forward() adds 0.01

    def forward(self, state):
        """state [..., S] -> mean [..., A], Cholesky factor [..., A, A]."""
        h = self.hidden(state)
        mean = torch.tanh(self.mean(h))
        raw = self.factor(h).unflatten(-1, (mean.shape[-1], mean.shape[-1]))
        diagonal = F.softplus(raw.diagonal(dim1=-2, dim2=-1) + self.offset) + 0.01
        cholesky = torch.diag_embed(diagonal)  # A_ii <- log(1 + exp(A_ii))
        if self.full:
            cholesky = cholesky + raw.tril(-1)
        return mean, cholesky


class ManyRows(nn.Linear):
    def forward(self, x):  # [B, T, M, H], as a convolution of size 1: CPUs take half as long
        if x.dim() < 4 or x.is_cuda:
            return super().forward(x)
        return F.conv2d(x.movedim(-1, 1), self.weight[..., None, None], self.bias).movedim(1, -1)


class Critic(nn.Module):
    """Q(s, a, phi). Actions outside [-1, 1] act as clipped ones, so they are scored as such."""

    def __init__(self, state_size, action_size, args):
        super().__init__()
        sizes = args.critic_layers
        self.hidden = hidden_layers(state_size + action_size, sizes, ManyRows, norms=len(sizes))
        self.value = nn.Linear(sizes[-1], 1)

    def forward(self, state, action):
        """state [..., S], action [..., A] -> [...]; or M actions each, [..., M, A] -> [..., M]."""
        if action.dim() > state.dim():
            state = state.unsqueeze(-2).expand(*action.shape[:-1], -1)
        h = self.hidden(torch.cat([state, action.clamp(-1, 1)], dim=-1))
        return self.value(h).squeeze(-1)


class Agent(nn.Module):
    """All that is learned: theta, phi, their targets, and log_NAME of each multiplier."""

    def __init__(self, policy, critic, **multipliers):
        super().__init__()
        self.policy, self.critic = policy, critic
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        for name, start in multipliers.items():
            self.register_parameter(f"log_{name}", nn.Parameter(torch.tensor(math.log(start))))


def gaussian_log_prob(mean, cholesky, action):
    """log N(a; mu, L L^T) of M actions. [..., A], [..., A, A], action [..., M, A] -> [..., M]."""
    difference = (action - mean.unsqueeze(-2)).mT  # [..., A, M]
    z = torch.linalg.solve_triangular(cholesky, difference, upper=False)  # L^-1 (a - mu)
    constant = 0.5 * mean.shape[-1] * math.log(2 * math.pi)
    return -0.5 * z.square().sum(-2) - log_det(cholesky).unsqueeze(-1) - constant


def log_det(cholesky):
    """log det of a triangular matrix. [..., A, A] -> [...]."""
    return cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)


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
def temperature_dual(eta, scores, log_prior, epsilon, mask):
    """g(eta) = eta epsilon + eta E_s log sum_a exp(log_prior + Q'(s,a)/eta). scores [..., M]."""
    best = scores.amax(-1, keepdim=True)  # outside the exponent, so that float32 keeps the rest
    log_z = torch.logsumexp(log_prior + (scores - best) / eta, dim=-1)
    return eta * epsilon + masked_mean(eta * log_z + best.squeeze(-1), mask)


def improved_policy(eta, scores, log_prior):
    """q(a|s) on the actions scored, summing to 1 over them. scores [..., M] -> [..., M]."""
    return torch.softmax(log_prior + (scores - scores.amax(-1, keepdim=True)) / eta, dim=-1)


# ---- M-step: maximise E_q log pi(a|s, theta) where C_mu <= epsilon_mu, C_Sigma <= epsilon_sigma.
def kl_mean(mean_i, mean, cholesky):
    """C_mu = 1/2 (mu - mu_i)^T Sigma^-1 (mu - mu_i). [..., A], [..., A, A] -> [...]."""
    change = (mean - mean_i).unsqueeze(-1)
    return 0.5 * torch.linalg.solve_triangular(cholesky, change, upper=False).square().sum((-2, -1))


def kl_covariance(cholesky_i, cholesky):
    """C_Sigma = 1/2 (tr(Sigma^-1 Sigma_i) - A + ln(det Sigma / det Sigma_i)). -> [...]."""
    ratio = torch.linalg.solve_triangular(cholesky, cholesky_i, upper=False)  # L^-1 L_i
    trace = ratio.square().sum((-2, -1))  # tr(Sigma^-1 Sigma_i)
    return 0.5 * (trace - cholesky.shape[-1]) + log_det(cholesky) - log_det(cholesky_i)


def lagrangian(eta, epsilon, kl):
    """eta (epsilon - C), twice: for the multiplier, which descends, and theta, which ascends."""
    return eta * (epsilon - kl.detach()), eta.detach() * (epsilon - kl)


# ---- Replay: a ring of rows in the order they were lived. A row is a state [S], an action [A],
# log b(a|s), a reward, whether the step terminated, and whether the row is final: an episode of n
# steps is n + 1 rows, the last with only the observation that a time limit bootstraps from. Whole
# episodes are added, so a window that starts at a step meets a final row before the ring's seam.
Rows = namedtuple("Rows", "state action behaviour_log_prob reward terminated final")


class Replay:
    def __init__(self, capacity, state_size, action_size):
        shapes = (state_size,), (action_size,), (), (), (), ()
        self.rows = Rows(*(torch.zeros(capacity, *shape) for shape in shapes))
        self.capacity, self.size, self.head = capacity, 0, 0

    def add_episode(self, episode):
        """Append the rows of an episode, over the oldest ones where the ring is full."""
        index = (self.head + torch.arange(len(episode.state))) % self.capacity
        for ring, new in zip(self.rows, episode):
            ring[index[-self.capacity :]] = new[-self.capacity :]
        self.head = (self.head + len(index)) % self.capacity
        self.size = min(self.size + len(index), self.capacity)

    def sample(self, batch_size, window, device):
        """Windows that start at steps drawn uniformly."""
        start = torch.randint(self.size, (batch_size,))
        while (final := self.rows.final[start] > 0).any():  # no step begins there: draw again
            start[final] = torch.randint(self.size, (int(final.sum()),))
        index = (start.unsqueeze(-1) + torch.arange(window + 1)) % self.capacity
        return Rows(*(ring[index].to(device) for ring in self.rows))

    def state_dict(self):
        return {"rows": [ring[: self.size].clone() for ring in self.rows], "head": self.head}

    def load_state_dict(self, saved):
        self.add_episode(Rows(*saved["rows"]))
        self.head = saved["head"]


# ---- One gradient step, in the order of the paper's Algorithm 2.
def compute_losses(agent, batch, noise, args):
    """The losses of one step, and metrics. batch [B, T+1, ...], noise [B, T+1, M, A] of N(0, I)."""
    # of the T steps from s_0 .. s_{T-1}: those behind the end of an episode are not valid
    state, action, behaviour_log_prob, reward, terminated, final = (x[:, :-1] for x in batch)
    valid = final.cumsum(1) == 0
    # of s_0 .. s_T: one can act in the first, and where a valid step led without terminating
    alive = F.pad(valid * (1 - terminated), (1, 0), value=1.0)

    # M actions of pi_i in each state, scored once: for V in Retrace and for q in the E-step
    with torch.no_grad():
        mean_i, cholesky_i = agent.target_policy(batch.state)
        sampled = mean_i.unsqueeze(-2) + noise @ cholesky_i.mT  # a_m = mu_i + L_i z_m
        scores = agent.target_critic(batch.state, sampled)  # [B, T+1, M]

        q_i = agent.target_critic(state, action)
        v_next = scores[:, 1:].mean(-1)  # E_pi Q'(s_{t+1},.)
        log_pi_i = gaussian_log_prob(mean_i[:, :-1], cholesky_i[:, :-1], action.unsqueeze(-2))
        trace = trace_coefficient(log_pi_i.squeeze(-1), behaviour_log_prob) * valid
        discount = args.gamma * (1 - terminated)  # a termination bootstraps nothing, a limit does
        target = retrace(q_i, v_next, reward, discount, trace[:, 1:])

    # Q-function gradient: (Q(s_t, a_t, phi) - Q_t^ret)^2
    q = agent.critic(state, action)
    critic_loss = masked_mean((q - target).square(), valid)

    # E-step gradient: g(eta), then q(a|s)
    log_prior = -math.log(args.num_samples)  # each sample stands for 1/M of pi_i
    eta = agent.log_eta.exp()
    dual_loss = temperature_dual(eta, scores, log_prior, args.epsilon, alive)
    weights = improved_policy(eta.detach(), scores, log_prior)

    # M-step gradient: L(theta, eta_mu, eta_sigma)
    mean, cholesky = agent.policy(batch.state)
    log_pi = gaussian_log_prob(mean, cholesky, sampled)
    likelihood = masked_mean((weights * log_pi).sum(-1), alive)  # E_q log pi(a|s, theta)
    c_mu = masked_mean(kl_mean(mean_i, mean, cholesky), alive)
    c_sigma = masked_mean(kl_covariance(cholesky_i, cholesky), alive)
    eta_mu, eta_sigma = agent.log_eta_mu.exp(), agent.log_eta_sigma.exp()
    bounds = [(eta_mu, args.epsilon_mu, c_mu), (eta_sigma, args.epsilon_sigma, c_sigma)]
    if args.joint_bound:
        bounds = [(eta_mu, args.epsilon_mu, c_mu + c_sigma)]  # which is KL(pi_i || pi)
    terms = [lagrangian(*bound) for bound in bounds]
    multiplier_loss = dual_loss + sum(descending for descending, _ in terms)
    policy_loss = -likelihood - sum(ascending for _, ascending in terms)

    losses = {"critic": critic_loss, "policy": policy_loss, "multipliers": multiplier_loss}
    kl_q = masked_mean(torch.xlogy(weights, weights * args.num_samples).sum(-1), alive)
    std = cholesky.square().sum(-1).sqrt()
    metrics = {f"losses/{name}": loss for name, loss in losses.items()}
    metrics |= {"mpo/eta": eta, "mpo/eta_mu": eta_mu, "mpo/eta_sigma": eta_sigma}
    metrics["mpo/kl_q_relative"] = kl_q / args.epsilon  # of each KL to its bound
    metrics["mpo/kl_mu_relative"] = c_mu / args.epsilon_mu
    metrics["mpo/kl_sigma_relative"] = c_sigma / args.epsilon_sigma
    metrics["mpo/trace"] = masked_mean(trace[:, 1:], valid[:, 1:])
    metrics |= {"mpo/std_mean": masked_mean(std.mean(-1), alive), "mpo/std_max": std.max()}
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


# ---- Episodes, and the training loop.
@torch.no_grad()
def run_episode(env, policy, args, number, explore=True):
    """The rows of one episode, lived with the mean action unless to explore."""
    seed = np.random.SeedSequence((args.seed, explore, number)).generate_state(1)[0]
    state, _ = env.reset(seed=int(seed))
    rows, over = [], False
    while not over:
        mean, cholesky = policy(torch.as_tensor(state, dtype=torch.float32, device=args.device))
        z = torch.randn(len(mean)) if explore else torch.zeros(len(mean))
        action = mean + cholesky @ z.to(args.device)
        log_prob = gaussian_log_prob(mean, cholesky, action.unsqueeze(0)).item()
        action = action.cpu().numpy()  # kept as drawn; environment and critic clip it
        next_state, reward, terminated, truncated, _ = env.step(action)
        if not np.isfinite([*state, *next_state, reward]).all():
            raise FloatingPointError("the environment gave a number that is not finite")
        rows.append((state, action, log_prob, reward, terminated, False))
        state, over = next_state, terminated or truncated
    rows.append((state, np.zeros_like(action), 0.0, 0.0, False, True))
    return Rows(*(torch.as_tensor(np.array(x), dtype=torch.float32) for x in zip(*rows)))


@torch.no_grad()
def q_minus_return(critic, episode, args):
    """Mean of Q(s,a) less the discounted rest of the episode: what is promised, but not lived."""
    state, action, _, reward, terminated, _ = (x.to(args.device).unsqueeze(0) for x in episode)
    zero, one = torch.zeros_like(reward), torch.ones_like(reward)
    rest = retrace(zero, zero, reward, args.gamma * one, one)  # sum_j gamma^{j-t} r_j
    known = slice(-1 if terminated.any() else -501)  # a limit cuts off the rest of the last 500
    return (critic(state, action) - rest)[:, known].mean()


def main(args):
    """Train as args say, or evaluate; returns the policy."""
    check(args)
    env = make_env(args)
    torch.set_num_threads(min(args.threads, os.cpu_count()))
    torch.empty(8_000_000)  # freed at once: from now on malloc keeps what is smaller, for speed
    torch.manual_seed(args.seed)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    policy, critic = Policy(*sizes, args), Critic(*sizes, args)
    if args.evaluate:
        policy.load_state_dict(read_saved(Path(args.evaluate))["policy"])
        returns = evaluate(env, policy.to(args.device), args, Path(args.evaluate).parent)
        print(f"{args.env_id}: mean {np.mean(returns):.1f} of {[round(x, 1) for x in returns]}")
        return policy
    agent = Agent(policy, critic, eta=1.0, eta_mu=1.0, eta_sigma=100.0).to(args.device)
    groups = [
        {"params": policy.parameters(), "lr": args.policy_learning_rate},
        {"params": critic.parameters(), "lr": args.learning_rate},
        # equal betas: after a burst the multipliers come back as fast as they went
        {"params": agent.parameters(recurse=False), "lr": 2e-3, "betas": (0.9, 0.9)},
    ]
    optimiser = torch.optim.Adam(groups, fused=True)
    replay = Replay(args.buffer_size + 1, *sizes)  # the newest row is a final one
    run = Run(args, agent=agent, optimiser=optimiser, replay=replay)
    done = run.done  # how many steps, episodes and updates so far

    with run:
        while done["steps"] < args.total_timesteps and not run.stopping:
            # update the replay with L trajectories (more before the first gradient step)
            before, returns = done["steps"], []
            while len(returns) < args.trajectories or done["steps"] < args.learning_starts:
                episode = run_episode(env, policy, args, done["episodes"])
                replay.add_episode(episode)
                returns.append(episode.reward.sum().item())
                done["episodes"] += 1
                done["steps"] += len(episode.reward) - 1
                run.show_progress(returns)

            # find a better policy by gradient descent: K steps
            for _ in range(max(1, int(args.updates_per_step * done["steps"]) - done["updates"])):
                batch = replay.sample(args.batch_size, args.window, args.device)
                noise = torch.randn(*batch.state.shape[:2], args.num_samples, sizes[1])
                losses, metrics = compute_losses(agent, batch, noise.to(args.device), args)
                gradient_step(agent, optimiser, losses)
                done["updates"] += 1
                if done["updates"] % args.target_period == 0:  # theta_i = theta, phi' = phi
                    agent.target_policy.load_state_dict(policy.state_dict())
                    agent.target_critic.load_state_dict(critic.state_dict())
                run.show_progress(returns)

            # log, evaluate, save
            metrics["mpo/q_minus_return"] = q_minus_return(critic, episode, args)
            finished = done["steps"] >= args.total_timesteps
            due = finished or done["steps"] // args.eval_every > before // args.eval_every
            run.log(returns, evaluate(env, policy, args, run.folder) if due else [], metrics)
            if due or run.stopping:
                run.save()
    return policy


# ==== Plumbing: evaluation and video, the run's folder, checks of the user's input. MPO ends here.
def evaluate(env, policy, args, folder):
    """Returns of some episodes with the mean action, the first of them filmed if asked for."""
    returns = []
    for number in range(args.eval_episodes):
        stage = gym.wrappers.RenderCollection(env) if args.capture_video and number == 0 else env
        episode = run_episode(stage, policy, args, number, explore=False)
        returns.append(episode.reward.sum().item())
        if stage is not env:
            film, fps = folder / "evaluation.mp4", env.metadata.get("render_fps", 30)
            imageio.mimwrite(film, stage.render(), fps=fps, macro_block_size=2)
    return returns


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


def parse_args(words=None):
    """What was typed, on top of a saved run's settings, the paper's values, or the defaults."""
    typed = tyro.cli(Args, args=words)
    if typed.resume and typed.evaluate:
        refuse("--resume trains and --evaluate does not: give one of them.")
    if not typed.resume and not typed.evaluate:
        return tyro.cli(Args, args=words, default=Args(**PAPER)) if typed.paper else typed
    path = Path(typed.resume, "checkpoint.pt") if typed.resume else Path(typed.evaluate)
    path = path / "model.pt" if path.is_dir() else path
    saved = read_saved(path)["args"] | {"resume": "", "capture_video": False}
    if saved.keys() != vars(typed).keys():
        refuse(f"{path} is of another version of {ORIGIN[0]}, with other settings.")
    args = tyro.cli(Args, args=words, default=Args(**saved))
    args.evaluate = str(path) if args.evaluate else ""
    for name in list(saved)[: list(saved).index("total_timesteps")]:
        was, now = saved[name], getattr(args, name)
        if was != now and not (name == "seed" and args.evaluate):
            refuse(f"{path} has {name} {was}, which cannot change to {now}.")
    return args


def check(args):
    """Refuse settings that cannot work: a number is 0 only where its default may be."""
    for name, default in vars(Args()).items():
        value, zero = getattr(args, name), not default or name == "seed"
        low = args.learning_starts if name == "total_timesteps" else 0
        high = 1 if name == "gamma" else 10**9
        numbers = np.atleast_1d(value) if type(default) in (int, float, tuple) else [1]
        if not len(numbers) or not all(low <= x < high and (x > low or zero) for x in numbers):
            least = "0 or more" if zero else f"above {low}"
            refuse(f"--{name.replace('_', '-')} must be {least} and below {high:,}, not {value}.")
    try:
        torch.zeros(1, device=args.device).item()
    except Exception as error:
        refuse(f"--device {args.device} cannot be had here: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    threading.excepthook = lambda _: None  # TensorBoard's thread: its flush() raises the same
    main(parse_args())
