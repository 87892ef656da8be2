"""One gradient step: each loss against a slow second implementation, and what it moves."""

import math

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import losses_of, random_batch, small_agent, small_args, valid
from scipy.stats import multivariate_normal

with_losses = pytest.mark.parametrize("script", scripts_with("compute_losses", "kl_mean"))
with_step = pytest.mark.parametrize("script", scripts_with("gaussian_log_prob", "Agent"))
bounds = pytest.mark.parametrize("joint_bound", [False, True], ids=["two bounds", "joint bound"])

LENGTHS = [4, 4, 3, 2, 1, 1, 4, 2, 3, 4]
TERMINATED = [False, True, True, False, True, False, False, True, False, True]


def learner(script, **changes):
    options = dict(batch_size=len(LENGTHS), epsilon_mu=0.05, epsilon_sigma=0.02) | changes
    args = small_args(script, **options)
    agent = small_agent(script, args)
    return args, agent, *random_batch(script, args, agent, LENGTHS, TERMINATED)


# ---- A slow second implementation.
def slow_losses(agent, batch, noise, args):
    """State by state: densities by scipy, inverses, determinants, the double sum of Retrace."""
    steps_of_windows = valid(batch).sum(1).tolist()
    batch = type(batch)(*(x.numpy() for x in batch))

    def gaussian(network, s):
        mean, cholesky = (x.detach().numpy() for x in network(torch.as_tensor(s)))
        return mean, cholesky, cholesky @ cholesky.T

    def score(network, s, a):
        return network(torch.as_tensor(s), torch.as_tensor(a)).item()

    def log_density(a, mean, sigma):
        return multivariate_normal(mean, sigma).logpdf(a)

    def sampled(s, z):
        mean, cholesky, _ = gaussian(agent.target_policy, s)
        return [mean + cholesky @ z_m for z_m in z.numpy()]

    errors, likelihoods, c_mus, c_sigmas, log_means = [], [], [], [], []
    eta = agent.log_eta.exp().item()
    for b, steps in enumerate(steps_of_windows):
        s, a = batch.state[b], batch.action[b]
        values = [
            np.mean([score(agent.target_critic, s_t, x) for x in sampled(s_t, z)])
            for s_t, z in zip(s, noise[b])
        ]
        for t in range(steps):
            target = score(agent.target_critic, s[t], a[t])
            for j in range(t, steps):
                c = 1.0
                for k in range(t + 1, j + 1):
                    mean, _, sigma = gaussian(agent.target_policy, s[k])
                    log_ratio = log_density(a[k], mean, sigma) - batch.behaviour_log_prob[b, k]
                    c *= min(1, math.exp(log_ratio))
                value = 0.0 if batch.terminated[b, j] else values[j + 1]
                delta = batch.reward[b, j] + args.gamma * value
                delta -= score(agent.target_critic, s[j], a[j])
                target += args.gamma ** (j - t) * c * delta
            errors.append((score(agent.critic, s[t], a[t]) - target) ** 2)

        for t in range(steps + 1):
            if t > 0 and batch.terminated[b, t - 1]:
                continue  # nobody acts in a terminal state
            mean_i, _, sigma_i = gaussian(agent.target_policy, s[t])
            mean, _, sigma = gaussian(agent.policy, s[t])
            actions = sampled(s[t], noise[b, t])
            scores = np.array([score(agent.target_critic, s[t], x) for x in actions])
            log_means.append(math.log(np.mean(np.exp(scores / eta))))
            weights = np.exp(scores / eta) / np.exp(scores / eta).sum()
            log_densities = [log_density(x, mean, sigma) for x in actions]
            likelihoods.append(sum(w * x for w, x in zip(weights, log_densities)))
            change = mean - mean_i
            c_mus.append(0.5 * change @ np.linalg.inv(sigma) @ change)
            log_ratio = math.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
            trace = np.trace(np.linalg.inv(sigma) @ sigma_i)
            c_sigmas.append(0.5 * (trace - len(mean) + log_ratio))

    c_mu, c_sigma = np.mean(c_mus), np.mean(c_sigmas)
    eta_mu, eta_sigma = agent.log_eta_mu.exp().item(), agent.log_eta_sigma.exp().item()
    lagrangian = eta_mu * (args.epsilon_mu - c_mu) + eta_sigma * (args.epsilon_sigma - c_sigma)
    if args.joint_bound:
        lagrangian = eta_mu * (args.epsilon_mu - c_mu - c_sigma)
    dual = eta * args.epsilon + eta * np.mean(log_means)
    policy_loss = -(np.mean(likelihoods) + lagrangian)
    return {"critic": np.mean(errors), "policy": policy_loss, "multipliers": dual + lagrangian}


@with_losses
@bounds
def test_the_three_losses_are_those_of_a_slow_second_implementation(script, joint_bound):
    args, agent, batch, noise = learner(script, joint_bound=joint_bound, gamma=0.9, epsilon=0.3)
    losses, _ = script.compute_losses(agent, batch, noise, args)
    with torch.no_grad():
        slow = slow_losses(agent, batch, noise, args)
        log_pi = script.gaussian_log_prob(
            *agent.target_policy(batch.state), batch.action.unsqueeze(-2)
        )
    assert {name: x.item() for name, x in losses.items()} == pytest.approx(slow, rel=1e-9)
    # traces that are clipped, and such that are not, were both there
    trace = (log_pi.squeeze(-1) - batch.behaviour_log_prob).exp()[:, 1:-1][valid(batch)[:, 1:]]
    assert (trace > 1).any() and ((trace > 0.1) & (trace < 0.9)).any()


# ---- Which loss reaches which parameters.
@with_losses
@bounds
@pytest.mark.parametrize(
    "loss, reached", [("critic", "critic."), ("policy", "policy."), ("multipliers", "log_")]
)
def test_each_loss_reaches_its_own_parameters_and_no_others(script, joint_bound, loss, reached):
    args, agent, batch, noise = learner(script, joint_bound=joint_bound)
    script.compute_losses(agent, batch, noise, args)[0][loss].backward()
    for name, parameter in agent.named_parameters():
        gradient = 0.0 if parameter.grad is None else parameter.grad.abs().max().item()
        idle = joint_bound and name == "log_eta_sigma"  # one bound needs one multiplier
        assert (gradient > 0) == (name.startswith(reached) and not idle), name


@with_losses
@bounds
def test_each_multiplier_moves_by_what_its_own_bound_leaves_over(script, joint_bound):
    args, agent, batch, noise = learner(script, joint_bound=joint_bound)
    losses, metrics = script.compute_losses(agent, batch, noise, args)
    losses["multipliers"].backward()
    kl_q = metrics["mpo/kl_q_relative"].item() * args.epsilon
    c_mu = metrics["mpo/kl_mu_relative"].item() * args.epsilon_mu
    c_sigma = metrics["mpo/kl_sigma_relative"].item() * args.epsilon_sigma
    expected = {"eta": args.epsilon - kl_q}
    if joint_bound:
        expected |= {"eta_mu": args.epsilon_mu - c_mu - c_sigma}
    else:
        expected |= {"eta_mu": args.epsilon_mu - c_mu, "eta_sigma": args.epsilon_sigma - c_sigma}
    for name, left_over in expected.items():
        log_multiplier = getattr(agent, f"log_{name}")
        slope = log_multiplier.exp().item() * left_over
        assert log_multiplier.grad.item() == pytest.approx(slope, rel=1e-9)


# ---- The step itself.
@with_step
@pytest.mark.parametrize("scale", [1e-3, 1e5], ids=["shorter than 40", "longer than 40"])
def test_a_gradient_step_clips_each_network_to_its_own_norm(script, step, scale):
    args, agent, batch, noise = learner(script)
    losses, _ = losses_of(script)(agent, batch, noise, args)
    losses = {name: scale * x for name, x in losses.items()}
    before = {name: parameter.detach().clone() for name, parameter in agent.named_parameters()}
    sum(losses.values()).backward(retain_graph=True)
    named = agent.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    optimiser = torch.optim.SGD([p for p in agent.parameters() if p.requires_grad], lr=1e-6)
    assert step(agent, optimiser, losses) is None

    for network in ("critic", "policy"):
        own = [name for name in gradients if name.startswith(network)]
        norm = math.sqrt(sum(gradients[name].square().sum().item() for name in own))
        assert (norm > 80) == (scale > 1) and (norm < 40) == (scale < 1)
        for name in own:
            gradients[name] *= min(1.0, 40 / norm)
    for name, parameter in agent.named_parameters():
        change = 1e-6 * gradients[name] if name in gradients else 0.0
        torch.testing.assert_close(parameter - before[name], -change + 0 * before[name])


def assert_refused(agent, step, losses):
    """In a sentence, and before anything has changed."""
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    optimiser = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad])
    with pytest.raises(FloatingPointError, match="a gradient became infinite, or not a number"):
        step(agent, optimiser, losses)
    assert all(torch.equal(x, y) for x, y in zip(before, agent.parameters()))


@with_step
@pytest.mark.parametrize("entry", ["state", "action", "reward"])
def test_a_step_that_is_not_finite_is_refused_before_it_changes_anything(script, step, entry):
    args, agent, batch, noise = learner(script)
    getattr(batch, entry)[0, 1] = math.inf if entry == "reward" else math.nan
    losses, _ = losses_of(script)(agent, batch, noise, args)
    assert_refused(agent, step, losses)


@with_step
@pytest.mark.parametrize("network", ["critic", "policy"])
def test_a_gradient_that_is_not_finite_is_refused_too_though_the_losses_are(script, step, network):
    args, agent, batch, noise = learner(script)
    losses, _ = losses_of(script)(agent, batch, noise, args)
    parameter = next(getattr(agent, network).parameters())
    zero_of_infinite_slope = (parameter - parameter.detach()).abs().sqrt().sum()
    losses[network] = losses[network] + zero_of_infinite_slope
    assert all(x.isfinite() for x in losses.values())
    assert_refused(agent, step, losses)
