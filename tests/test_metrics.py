"""What is logged as mpo/*: each metric of docs/metrics.md, computed a second time, one state after the other."""

import math

import pytest
import test_atari
import torch
from conftest import ROOT, scripts_with
from helpers import alive, random_batch, small_agent, small_args
from torch.distributions import Categorical, MultivariateNormal, kl_divergence

LENGTHS, TERMINATED = [4, 4, 3, 2, 1, 1], [False, True, True, False, True, False]


def mean(values):
    return sum(values) / len(values)


def of_values(q, target):
    """Q and the targets at the valid steps; that the targets are right is what the losses are tested for."""
    return dict(q_mean=mean(q), q_min=min(q), q_max=max(q), target_min=min(target), target_max=max(target))


@torch.no_grad()
def slow_gaussian_metrics(agent, batch, noise, args, target, parametric):
    """Loops over windows and steps, with the distributions of PyTorch for the formulas."""
    sampled_from, other = (agent.policy, agent.target_policy)[:: 1 if parametric else -1]
    found = {name: [] for name in "trace effective kl_q kl_mu kl_sigma entropy std outside spread advantage q".split()}
    every_std, eta = [], agent.log_eta.exp() if not parametric else None
    for window in range(len(batch.state)):
        for step, acts in enumerate(alive(batch)[window]):
            state = batch.state[window, step]
            new, old = (
                MultivariateNormal(m, scale_tril=f) for m, f in (agent.policy(state), agent.target_policy(state))
            )
            every_std += new.variance.sqrt().tolist()
            if not acts:
                continue
            found["std"] += [new.variance.sqrt().mean()]
            found["entropy"] += [new.entropy()]
            found["outside"] += [float(x) for x in new.loc.abs() > 1]
            # KL(old || new) moves the mean, then the covariance; the parametric E-step bounds KL(new || old)
            first, second = (new, old) if parametric else (old, new)
            moved = MultivariateNormal(first.loc, second.covariance_matrix)
            turned = MultivariateNormal(second.loc, first.covariance_matrix)
            found["kl_mu"] += [kl_divergence(moved, second)]
            found["kl_sigma"] += [kl_divergence(turned, second)]
            centre, factor = sampled_from(state)
            scores = torch.cat([agent.target_critic(state, centre + factor @ z) for z in noise[window, step]])
            found["spread"] += [scores.var(correction=0).sqrt()]
            found["advantage"] += [scores.var()]
            if not parametric:
                q, prior = Categorical(logits=scores / eta), Categorical(logits=torch.zeros_like(scores))
                found["kl_q"] += [kl_divergence(q, prior)]
                found["effective"] += [1 / sum(p**2 for p in q.probs)]
        for step in range(int(batch.valid[window].sum())):
            state, action = batch.state[window, step], batch.action[window, step]
            found["q"] += [agent.critic(state, action)]
            if step:
                centre, factor = sampled_from(state)
                log_prob = MultivariateNormal(centre, scale_tril=factor).log_prob(action)
                found["trace"] += [math.exp(min(0.0, log_prob - batch.behaviour_log_prob[window, step]))]
    metrics = dict(
        eta_mu=math.exp(agent.log_eta_mu),
        eta_sigma=math.exp(agent.log_eta_sigma),
        kl_mu_relative=mean(found["kl_mu"]) / args.epsilon_mu,
        kl_sigma_relative=mean(found["kl_sigma"]) / args.epsilon_sigma,
        trace=mean(found["trace"]),
        entropy=mean(found["entropy"]),
        std_mean=mean(found["std"]),
        std_min=min(every_std),
        std_max=max(every_std),
        mean_outside=mean(found["outside"]),
        q_std_over_actions=mean(found["spread"]),
        **of_values(found["q"], target),
    )
    if parametric:
        return metrics | dict(advantage_std=mean(found["advantage"]) ** 0.5)
    metrics |= dict(eta=eta, kl_q_relative=mean(found["kl_q"]) / args.epsilon)
    return metrics | dict(effective_samples=mean(found["effective"]))


def wrong(logged, slow):
    """The names of the metrics that are missing, too many or not what they should be, or not in the docs."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("metrics.md", "parametric.md"))
    slow = {f"mpo/{name}": float(value) for name, value in slow.items()}
    right = {name for name, value in logged.items() if value == pytest.approx(slow.get(name), rel=1e-6)}
    return {*logged, *slow} - {name for name in right if f"`{name}`" in text}


@pytest.mark.parametrize("script", scripts_with("gaussian_log_prob"))
def test_gaussian_metrics_are_those_of_a_slow_second_implementation(script):
    parametric = hasattr(script, "parametric_diagnostics")
    args = small_args(script, batch_size=len(LENGTHS), epsilon_mu=0.05, epsilon_sigma=0.02, bound_mean=False)
    agent = small_agent(script, args, seed=1, apart=0.6)
    batch, noise = random_batch(script, args, agent, LENGTHS, TERMINATED)
    losses, metrics = (
        (script.parametric_losses, script.parametric_diagnostics)
        if parametric
        else (script.compute_losses, script.diagnostics)
    )
    seen = losses(agent, batch, noise, args)[-1]
    target = seen["target"][batch.valid > 0].tolist()
    logged = metrics(agent, seen, args)
    assert wrong(logged, slow_gaussian_metrics(agent, batch, noise, args, target, parametric)) == set()
    assert seen["mean"].min() < -1 < 1 < seen["mean"].max() and 0 < logged["mpo/mean_outside"] < 1


@torch.no_grad()
def slow_discrete_metrics(agent, batch, args, target):
    found = {name: [] for name in "kl_q kl_pi entropy greatest spread trace q".split()}
    for window in range(len(batch.state)):
        for step, acts in enumerate(alive(batch)[window]):
            state = batch.state[window, step].unsqueeze(0)
            new, old = (Categorical(logits=policy(state)[0]) for policy in (agent.policy, agent.target_policy))
            scores = agent.target_critic(state)[0]
            if acts:
                q = Categorical(logits=old.logits + scores / agent.log_eta.exp())
                found["kl_q"] += [kl_divergence(q, old)]
                found["kl_pi"] += [kl_divergence(old, new)]
                found["entropy"] += [new.entropy()]
                found["greatest"] += [max(new.probs)]
                found["spread"] += [scores.var(correction=0).sqrt()]
            if step < batch.valid[window].sum():
                action = batch.action[window, step]
                found["q"] += [agent.critic(state)[0][action]]
                if step:
                    ratio = math.exp(old.log_prob(action) - batch.behaviour_log_prob[window, step])
                    found["trace"] += [min(1.0, ratio)]
    return dict(
        eta=math.exp(agent.log_eta),
        eta_pi=math.exp(agent.log_eta_pi),
        kl_q_relative=mean(found["kl_q"]) / args.epsilon,
        kl_pi_relative=mean(found["kl_pi"]) / args.epsilon_pi,
        trace=mean(found["trace"]),
        entropy=mean(found["entropy"]),
        greatest_prob=mean(found["greatest"]),
        q_std_over_actions=mean(found["spread"]),
        **of_values(found["q"], target),
    )


@pytest.mark.parametrize("script", scripts_with("discrete_diagnostics"))
def test_discrete_metrics_are_those_of_a_slow_second_implementation(script):
    args, agent = test_atari.small_args(), test_atari.small_agent()
    batch = test_atari.random_batch(agent)
    seen = script.discrete_losses(agent, batch, args)[-1]
    target = seen["target"][batch.valid > 0].tolist()
    logged = script.discrete_diagnostics(agent, seen, args)
    assert wrong(logged, slow_discrete_metrics(agent, batch, args, target)) == set()
