"""What is logged as mpo/* and losses/*: each metric computed a second time, state by state."""

import math

import pytest
import test_atari
import torch
from conftest import ROOT, scripts_with
from helpers import (
    STATE_SIZE,
    alive,
    double,
    episode,
    losses_of,
    make_critic,
    normal,
    numbers,
    random_batch,
    small_agent,
    small_args,
    valid,
)
from torch.distributions import Categorical, MultivariateNormal, kl_divergence

LENGTHS, TERMINATED = [4, 4, 3, 2, 1, 1], [False, True, True, False, True, False]
with_gaussian = pytest.mark.parametrize("script", scripts_with("gaussian_log_prob", "Rows"))
with_discrete = pytest.mark.parametrize("script", scripts_with("discrete_losses"))
with_episodes = pytest.mark.parametrize(
    "script", scripts_with("gaussian_log_prob", "q_minus_return")
)


def mean(values):
    return float(sum(values) / len(values))


@torch.no_grad()
def slow_metrics(agent, batch, noise, args, parametric):
    """Loops over windows and steps, with the distributions of PyTorch for the formulas."""
    names = "trace kl_q kl_mu kl_sigma std every_std variance q".split()
    found = {name: [] for name in names}

    def gaussian(network, state):
        policy_mean, cholesky = network(state)
        return MultivariateNormal(policy_mean, scale_tril=cholesky)

    for window, states in enumerate(batch.state):
        for step, state in enumerate(states):
            new, old = gaussian(agent.policy, state), gaussian(agent.target_policy, state)
            sampled_from = new if parametric else old
            found["every_std"] += new.stddev.tolist()
            if step < len(states) - 1 and valid(batch)[window, step]:
                action = batch.action[window, step]
                found["q"].append(agent.critic(state, action))
                if step:
                    log_ratio = sampled_from.log_prob(action)
                    log_ratio -= batch.behaviour_log_prob[window, step]
                    found["trace"].append(math.exp(min(0.0, log_ratio)))
            if not alive(batch)[window, step]:
                continue
            found["std"].append(new.stddev.mean())
            # KL(old || new) moves the mean, then the covariance; the parametric E-step's is
            # KL(new || old)
            first, second = (new, old) if parametric else (old, new)
            moved = MultivariateNormal(first.loc, second.covariance_matrix)
            turned = MultivariateNormal(second.loc, first.covariance_matrix)
            found["kl_mu"].append(kl_divergence(moved, second))
            found["kl_sigma"].append(kl_divergence(turned, second))
            actions = [sampled_from.loc + sampled_from.scale_tril @ z for z in noise[window, step]]
            scores = torch.stack([agent.target_critic(state, action) for action in actions])
            found["variance"].append(scores.var())
            if not parametric:
                q = Categorical(logits=scores / agent.log_eta.exp())
                uniform = Categorical(logits=torch.zeros_like(scores))
                found["kl_q"].append(kl_divergence(q, uniform))
    metrics = dict(
        eta_mu=math.exp(agent.log_eta_mu),
        eta_sigma=math.exp(agent.log_eta_sigma),
        kl_mu_relative=mean(found["kl_mu"]) / args.epsilon_mu,
        kl_sigma_relative=mean(found["kl_sigma"]) / args.epsilon_sigma,
        trace=mean(found["trace"]),
        std_mean=mean(found["std"]),
        std_max=max(found["every_std"]),
        q_mean=mean(found["q"]),
    )
    if parametric:
        metrics |= dict(advantage_std=math.sqrt(mean(found["variance"])))
    else:
        metrics |= dict(eta=math.exp(agent.log_eta))
        metrics |= dict(kl_q_relative=mean(found["kl_q"]) / args.epsilon)
    return {f"mpo/{name}": value for name, value in metrics.items()}


@with_gaussian
def test_gaussian_metrics_are_those_of_a_slow_second_implementation(script):
    options = dict(batch_size=len(LENGTHS), epsilon_mu=0.05, epsilon_sigma=0.02)
    args = small_args(script, **options)
    agent = small_agent(script, args, seed=1, apart=0.6)
    batch, noise = random_batch(script, args, agent, LENGTHS, TERMINATED)
    losses, metrics = losses_of(script)(agent, batch, noise, args)
    assert not any(x.requires_grad for x in metrics.values())
    slow = slow_metrics(agent, batch, noise, args, hasattr(script, "parametric_losses"))
    slow |= {f"losses/{name}": x.item() for name, x in losses.items()}
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(slow, rel=1e-6)


@with_gaussian
def test_windows_of_one_step_have_no_trace_and_say_zero(script):
    """With a window of one step there is nothing to average; the row stays a row of numbers."""
    args = small_args(script, batch_size=2, window=1)
    agent = small_agent(script, args)
    batch, noise = random_batch(script, args, agent, [1, 1], [False, True])
    _, metrics = losses_of(script)(agent, batch, noise, args)
    assert metrics["mpo/trace"] == 0 and all(x.isfinite() for x in metrics.values())
    assert batch.state.shape == (2, 2, STATE_SIZE)


# ---- What the critic promises, beside what was lived.
def finished_episode(script, steps, terminated):
    """Rows in float64, the last of which, as in every episode lived, has a reward of 0."""
    rows = episode(script, normal(numbers(0), steps + 1, STATE_SIZE), terminated)
    rows.reward[-1] = 0
    return double(rows)


def slow_q_minus_return(critic, rows, gamma, known):
    """The double sum over the first `known` steps."""
    rewards, differences = rows.reward.tolist()[:-1], []
    for t in range(known):
        rest = sum(gamma ** (j - t) * rewards[j] for j in range(t, len(rewards)))
        differences.append(critic(rows.state[t], rows.action[t]).item() - rest)
    return mean(differences)


@with_episodes
@pytest.mark.parametrize("gamma", [0.5, 0.99])
@pytest.mark.parametrize(
    "steps, terminated, known", [(1, True, 1), (30, True, 30), (600, True, 600), (620, False, 120)]
)
def test_q_minus_return_is_the_slow_double_sum_over_the_steps_whose_rest_is_known(
    script, steps, terminated, known, gamma
):
    """After a termination nothing comes; what comes after a time limit is worth gamma^500 of it."""
    args = small_args(script, gamma=gamma)
    critic, rows = make_critic(script, args), finished_episode(script, steps, terminated)
    promised = script.q_minus_return(critic, rows, args)
    slow = slow_q_minus_return(critic, rows, gamma, known)
    assert promised.item() == pytest.approx(slow, rel=1e-9) and not promised.requires_grad


@with_episodes
def test_q_minus_return_counts_only_steps_with_500_behind_them_before_a_time_limit(script):
    args = small_args(script)
    critic = make_critic(script, args)
    for steps in (1, 499, 500):
        rows = finished_episode(script, steps, terminated=False)
        assert script.q_minus_return(critic, rows, args).isnan(), "no step is known: no number"
    rows = finished_episode(script, 501, terminated=False)
    first = script.q_minus_return(critic, rows, args).item()
    assert first == pytest.approx(slow_q_minus_return(critic, rows, args.gamma, 1), rel=1e-9)


@torch.no_grad()
def slow_discrete_metrics(agent, batch, args):
    found = {name: [] for name in "kl_q kl_pi entropy spread trace q".split()}
    for window, states in enumerate(batch.state):
        for step, state in enumerate(states):
            new, old = (
                Categorical(logits=policy(state.unsqueeze(0))[0])
                for policy in (agent.policy, agent.target_policy)
            )
            if step < len(states) - 1 and valid(batch)[window, step]:
                action = batch.action[window, step]
                found["q"].append(agent.critic(state.unsqueeze(0))[0][action])
                if step:
                    log_ratio = old.log_prob(action) - batch.behaviour_log_prob[window, step]
                    found["trace"].append(min(1.0, math.exp(log_ratio)))
            if not alive(batch)[window, step]:
                continue
            scores = agent.target_critic(state.unsqueeze(0))[0]
            q = Categorical(logits=old.logits + scores / agent.log_eta.exp())
            found["kl_q"].append(kl_divergence(q, old))
            found["kl_pi"].append(kl_divergence(old, new))
            found["entropy"].append(new.entropy())
            found["spread"].append(scores.var(correction=0).sqrt())
    metrics = dict(
        eta=math.exp(agent.log_eta),
        eta_pi=math.exp(agent.log_eta_pi),
        kl_q_relative=mean(found["kl_q"]) / args.epsilon,
        kl_pi_relative=mean(found["kl_pi"]) / args.epsilon_pi,
        trace=mean(found["trace"]),
        entropy=mean(found["entropy"]),
        q_std_over_actions=mean(found["spread"]),
        q_mean=mean(found["q"]),
    )
    return {f"mpo/{name}": value for name, value in metrics.items()}


@with_discrete
def test_discrete_metrics_are_those_of_a_slow_second_implementation(script):
    args, agent = test_atari.small_args(), test_atari.small_agent()
    batch = test_atari.random_batch(agent)
    losses, metrics = script.discrete_losses(agent, batch, args)
    slow = slow_discrete_metrics(agent, batch, args)
    slow |= {f"losses/{name}": x.item() for name, x in losses.items()}
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(slow, rel=1e-6)


# ---- The docs.
def some_metrics(script):
    if hasattr(script, "discrete_losses"):
        agent = test_atari.small_agent()
        batch = test_atari.random_batch(agent)
        return script.discrete_losses(agent, batch, test_atari.small_args())[1]
    args = small_args(script, batch_size=1)
    agent = small_agent(script, args)
    return losses_of(script)(agent, *random_batch(script, args, agent, [4], [False]), args)[1]


def test_every_metric_has_its_line_in_the_docs(script):
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    metrics = some_metrics(script)
    assert metrics and [name for name in metrics if f"`{name}`" not in text] == []
