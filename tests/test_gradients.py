"""The learner: networks, which loss reaches which parameter, and the losses against a slow second implementation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import scripts_with
from helpers import (
    ACTION_SIZE,
    STATE_SIZE,
    alive,
    losses_of,
    make_policy,
    normal,
    numbers,
    random_batch,
    small_agent,
    small_args,
)
from scipy.stats import multivariate_normal

with_networks = pytest.mark.parametrize("script", scripts_with("Policy", "Critic", "gaussian_log_prob"))
with_learner = pytest.mark.parametrize("script", scripts_with("m_step_terms", "compute_losses", "update"))
with_update = pytest.mark.parametrize("script", scripts_with("update", "gaussian_log_prob"))
decouplings = pytest.mark.parametrize("decoupling", ["paper", "followup", "joint"])

# ten windows: more than the critic scores at a time
LENGTHS = [4, 4, 3, 2, 1, 1, 4, 2, 3, 4]
TERMINATED = [False, True, True, False, True, False, False, True, False, True]


def learner(script, **changes):
    args = small_args(script, batch_size=len(LENGTHS), epsilon_mu=0.05, epsilon_sigma=0.02, **changes)
    agent = small_agent(script, args)
    return args, agent, *random_batch(script, args, agent, LENGTHS, TERMINATED)


# ------------------------------------------------------------------------------------------------------------- networks
@with_networks
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_critic_scores_many_actions_as_it_scores_each_alone(script, dtype, error):
    """The same values and gradients, though many are scored by convolutions, in float32 by another library's."""
    critic, generator = script.Critic(STATE_SIZE, ACTION_SIZE, (8, 5, 4)).to(dtype), numbers(0)
    state, actions = normal(generator, 3, 4, STATE_SIZE).to(dtype), normal(generator, 3, 4, 6, ACTION_SIZE).to(dtype)
    together, alone = critic(state, actions), torch.stack([critic(state, a) for a in actions.unbind(2)], dim=2)
    assert together.shape == (3, 4, 6)
    torch.testing.assert_close(together, alone, rtol=error, atol=error)
    for one, other in zip(
        *(torch.autograd.grad(q.square().sum(), list(critic.parameters())) for q in (together, alone))
    ):
        torch.testing.assert_close(one, other, rtol=10 * error, atol=10 * error)


@with_networks
@pytest.mark.parametrize("layers", [(8,), (8, 5), (8, 5, 4)])
def test_the_critic_is_one_network_over_state_and_clipped_action(script, layers):
    critic, generator = script.Critic(STATE_SIZE, ACTION_SIZE, layers).double(), numbers(1)
    for parameter in critic.parameters():
        parameter.data.add_(0.3 * normal(generator, *parameter.shape))
    state, action = normal(generator, 50, STATE_SIZE), 1.5 * normal(generator, 50, ACTION_SIZE)
    assert (action.abs() > 1).any() and (action.abs() < 1).any()
    first, *rest = critic.hidden
    h = torch.relu(critic.norm(first(torch.cat([state, action.clip(-1, 1)], -1))))
    for layer in rest:
        h = torch.relu(layer(h))
    torch.testing.assert_close(critic(state, action), critic.value(h).squeeze(-1), rtol=1e-12, atol=1e-12)


@with_networks
def test_an_action_outside_the_bounds_is_scored_as_the_clipped_one(script):
    critic = script.Critic(STATE_SIZE, 2, (8, 5)).double()
    state = normal(numbers(2), STATE_SIZE).expand(3, STATE_SIZE)
    far, near, inside = critic(state, torch.tensor([[7.0, -3.0], [1.0, -1.0], [0.9, -1.0]]).double())
    assert far == near != inside


@with_networks
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_policys_factor_is_lower_triangular_with_a_positive_diagonal(script, covariance):
    policy, generator = make_policy(script, small_args(script, covariance=covariance), 3), numbers(3)
    for parameter in policy.parameters():
        parameter.data.add_(normal(generator, *parameter.shape))
    mean, cholesky = policy(10 * normal(generator, 40, STATE_SIZE))
    assert mean.shape == (40, 3) and cholesky.shape == (40, 3, 3)
    assert (cholesky.triu(1) == 0).all()
    assert ((cholesky.tril(-1) != 0).sum() == (0 if covariance == "diagonal" else 3 * 40)).all()
    assert (cholesky.diagonal(dim1=-2, dim2=-1) > 0.01).all()
    assert torch.linalg.eigvalsh(cholesky @ cholesky.mT).min() > 0


@with_networks
@pytest.mark.parametrize("initial_std, max_std", [(0.2, 0), (0.5, 0), (1.5, 0), (0.5, 0.7)])
def test_the_untrained_policy_has_the_standard_deviation_asked_for_about_a_mean_near_zero(script, initial_std, max_std):
    torch.manual_seed(0)
    policy = make_policy(script, script.Args(initial_std=initial_std, max_std=max_std), 3)
    mean, cholesky = policy(normal(numbers(4), 40, STATE_SIZE))
    target = initial_std * torch.eye(3).double().expand_as(cholesky)
    torch.testing.assert_close(cholesky, target, rtol=0.03, atol=0.02)
    assert mean.abs().max() < 0.02
    torch.nn.init.zeros_(policy.factor.weight)
    torch.testing.assert_close(policy(torch.ones(STATE_SIZE).double())[1], target[0], rtol=1e-12, atol=1e-12)


@with_networks
def test_the_diagonal_of_the_factor_is_softplus_above_its_least_value(script):
    policy = make_policy(script, small_args(script, initial_std=0.5, min_std=0.1, max_std=0))
    torch.nn.init.zeros_(policy.factor.weight)
    for raw in (-1e3, -1.0, 2.0):
        torch.nn.init.constant_(policy.factor.bias, raw)
        cholesky = policy(torch.ones(STATE_SIZE).double())[1]
        exact = 0.1 + math.log1p(math.exp(raw + math.log(math.expm1(0.4))))
        assert cholesky.diagonal().tolist() == pytest.approx([exact, exact], rel=1e-9)
        assert cholesky[1, 0].item() == pytest.approx(raw, rel=1e-9)


@with_networks
@pytest.mark.parametrize("max_std", [0.7, 2.0])
def test_no_standard_deviation_reaches_max_std_and_correlations_stay(script, max_std):
    bounded, free = (make_policy(script, small_args(script, initial_std=0.5, max_std=x)) for x in (max_std, 0))
    bounded.load_state_dict(free.state_dict())
    bounded.std_offset, states = free.std_offset, normal(numbers(7), 20, STATE_SIZE)
    for scale in (0.1, 3.0, 100.0):
        for policy in (bounded, free):
            policy.factor.weight.data.copy_(scale * normal(numbers(6), *policy.factor.weight.shape))
        sigma, free_sigma = (cholesky @ cholesky.mT for _, cholesky in (bounded(states), free(states)))
        std, free_std = (x.diagonal(dim1=-2, dim2=-1).sqrt() for x in (sigma, free_sigma))
        assert std.max() < max_std
        torch.testing.assert_close(1 / std.square(), 1 / free_std.square() + 1 / max_std**2)
        correlation, free_correlation = (
            x / (s.unsqueeze(-1) * s.unsqueeze(-2)) for x, s in ((sigma, std), (free_sigma, free_std))
        )
        torch.testing.assert_close(correlation, free_correlation)


@with_networks
@pytest.mark.parametrize("bound_mean", [True, False])
def test_the_policys_mean_is_a_network_with_a_norm_after_its_first_layer_and_a_tanh_if_bounded(script, bound_mean):
    policy, generator = (
        make_policy(script, small_args(script, bound_mean=bound_mean, policy_layers=(7, 6, 5))),
        numbers(5),
    )
    for parameter in policy.parameters():
        parameter.data.add_(normal(generator, *parameter.shape))
    state = normal(generator, 30, STATE_SIZE)
    first, second, third = policy.hidden
    mean = policy.mean(F.relu(third(F.relu(second(F.relu(policy.norm(first(state))))))))
    assert mean.abs().max() > 1
    torch.testing.assert_close(policy(state)[0], mean.tanh() if bound_mean else mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("script", scripts_with("Agent", "gaussian_log_prob"))
def test_copying_the_targets_makes_them_equal_and_keeps_them_apart(script):
    args = small_args(script)
    agent = small_agent(script, args)
    pairs = [(agent.policy, agent.target_policy), (agent.critic, agent.target_critic)]

    def equal():
        return [all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters())) for a, b in pairs]

    assert equal() == [False, False]
    agent.copy_targets()
    assert equal() == [True, True]
    for parameter in (*agent.policy.parameters(), *agent.critic.parameters()):
        parameter.data.add_(1)
    assert equal() == [False, False]


# -------------------------------------------------------------------------------------------------------- gradient flow
@with_learner
@decouplings
@pytest.mark.parametrize(
    "loss, reached", [(0, "critic."), (1, "policy."), (2, "log_")], ids=["critic", "policy", "dual"]
)
def test_each_loss_reaches_its_own_parameters_and_no_others(script, decoupling, loss, reached):
    args, agent, batch, noise = learner(script, decoupling=decoupling)
    script.compute_losses(agent, batch, noise, args)[loss].backward()
    for name, parameter in agent.named_parameters():
        gradient = 0.0 if parameter.grad is None else parameter.grad.abs().max().item()
        idle = decoupling == "joint" and name == "log_eta_sigma"  # one bound needs one multiplier
        assert (gradient > 0) == (name.startswith(reached) and not idle), name


@with_learner
@decouplings
def test_each_multiplier_moves_by_what_its_own_bound_leaves_over(script, decoupling):
    args, agent, batch, noise = learner(script, decoupling=decoupling)
    _, _, loss, seen = script.compute_losses(agent, batch, noise, args)
    loss.backward()
    kl = script.categorical_kl(seen["weights"], -math.log(args.num_samples))
    c_mu, c_sigma = seen["c_mu"].item(), seen["c_sigma"].item()
    expected = {"eta": args.epsilon - kl[alive(batch)].mean().item()}
    if decoupling == "joint":
        expected |= {"eta_mu": args.epsilon_mu - c_mu - c_sigma}
    else:
        expected |= {"eta_mu": args.epsilon_mu - c_mu, "eta_sigma": args.epsilon_sigma - c_sigma}
    for name, left_over in expected.items():
        log_multiplier = getattr(agent, f"log_{name}")
        assert log_multiplier.grad.item() == pytest.approx(log_multiplier.exp().item() * left_over, rel=1e-9)


@with_update
def test_an_update_is_one_step_along_the_gradient_with_each_network_clipped_to_its_own_norm(script):
    args, agent, batch, noise = learner(script, max_grad_norm=1e-3)
    losses = losses_of(script)(agent, batch, noise, args)[:3]
    before = {name: parameter.detach().clone() for name, parameter in agent.named_parameters()}
    sum(losses).backward()
    gradients = {name: p.grad.clone() for name, p in agent.named_parameters() if p.grad is not None}
    optimiser = torch.optim.SGD([p for p in agent.parameters() if p.requires_grad], lr=0.1)
    values, _ = script.update(agent, optimiser, losses_of(script), batch, noise, args)

    assert [values[f"losses/{name}"] for name in ("critic", "policy", "multipliers")] == [x.item() for x in losses]
    for network in ("critic", "policy"):
        norm = math.sqrt(sum(g.square().sum().item() for name, g in gradients.items() if name.startswith(network)))
        assert norm > args.max_grad_norm and values[f"losses/{network}_gradient"] == pytest.approx(norm, rel=1e-9)
        for name in gradients:
            if name.startswith(network):
                gradients[name] *= args.max_grad_norm / norm
    for name, parameter in agent.named_parameters():
        step = 0.1 * gradients[name] if name in gradients else 0.0
        torch.testing.assert_close(parameter.detach(), before[name] - step, rtol=1e-6, atol=1e-9)


@with_update
@pytest.mark.parametrize("entry", ["state", "action", "reward"])
def test_an_update_that_is_not_finite_is_refused_before_it_changes_anything(script, entry):
    args, agent, batch, noise = learner(script)
    getattr(batch, entry)[0, 1] = math.nan
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    optimiser = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad])
    with pytest.raises(script.NotFinite):
        script.update(agent, optimiser, losses_of(script), batch, noise, args)
    assert all(torch.equal(x, y) for x, y in zip(before, agent.parameters()))


# ----------------------------------------------------------------------------------------- a slow second implementation
def slow_losses(agent, batch, noise, args):
    """The formulas of docs/misprints.md state by state: densities by scipy, inverses, determinants, double sums."""
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
    for b, steps in enumerate(batch.valid.sum(1).astype(int)):
        s, a = batch.state[b], batch.action[b]
        for t in range(steps):
            target = score(agent.target_critic, s[t], a[t])
            for j in range(t, steps):
                c = 1.0
                for k in range(t + 1, j + 1):
                    mean, _, sigma = gaussian(agent.target_policy, s[k])
                    c *= min(1, math.exp(log_density(a[k], mean, sigma) - batch.behaviour_log_prob[b, k]))
                value = np.mean([score(agent.target_critic, s[j + 1], x) for x in sampled(s[j + 1], noise[b, j + 1])])
                value = 0.0 if batch.terminated[b, j] else value
                delta = batch.reward[b, j] + args.gamma * value - score(agent.target_critic, s[j], a[j])
                target += args.gamma ** (j - t) * c * delta
            errors.append((score(agent.critic, s[t], a[t]) - target) ** 2)

        for t in range(steps + 1):
            if t > 0 and batch.terminated[b, t - 1]:
                continue  # nobody acts in a terminal state
            (mean_i, _, sigma_i), (mean, _, sigma) = (gaussian(x, s[t]) for x in (agent.target_policy, agent.policy))
            actions = sampled(s[t], noise[b, t])
            scores = np.array([score(agent.target_critic, s[t], x) for x in actions])
            log_means.append(math.log(np.mean(np.exp(scores / eta))))
            weights = np.exp(scores / eta) / np.exp(scores / eta).sum()
            followup = args.decoupling == "followup"
            fits = [(mean, sigma_i), (mean_i, sigma)] if followup else [(mean, sigma)]
            likelihoods.append(sum(w * log_density(x, *fit) for w, x in zip(weights, actions) for fit in fits))
            change = mean - mean_i
            c_mus.append(0.5 * change @ np.linalg.inv(sigma_i if followup else sigma) @ change)
            log_ratio = math.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
            c_sigmas.append(0.5 * (np.trace(np.linalg.inv(sigma) @ sigma_i) - len(mean) + log_ratio))

    c_mu, c_sigma = np.mean(c_mus), np.mean(c_sigmas)
    eta_mu, eta_sigma = agent.log_eta_mu.exp().item(), agent.log_eta_sigma.exp().item()
    lagrangian = eta_mu * (args.epsilon_mu - c_mu) + eta_sigma * (args.epsilon_sigma - c_sigma)
    if args.decoupling == "joint":
        lagrangian = eta_mu * (args.epsilon_mu - c_mu - c_sigma)
    dual = eta * args.epsilon + eta * np.mean(log_means)
    return np.mean(errors), -(np.mean(likelihoods) + lagrangian), dual + lagrangian


@with_learner
@decouplings
def test_the_three_losses_are_those_of_a_slow_second_implementation(script, decoupling):
    args, agent, batch, noise = learner(script, decoupling=decoupling, gamma=0.9, epsilon=0.3)
    fast = script.compute_losses(agent, batch, noise, args)
    with torch.no_grad():
        slow = slow_losses(agent, batch, noise, args)
    assert [x.item() for x in fast[:3]] == pytest.approx(slow, rel=1e-9)
    trace = fast[3]["trace"][batch.valid[:, 1:] > 0]
    assert (trace == 1).any() and ((trace > 0.1) & (trace < 0.9)).any()  # clipped and unclipped traces were both there


@pytest.mark.parametrize("script", scripts_with("make_optimiser"))
def test_no_step_of_a_multiplier_is_longer_than_its_rate_and_it_comes_back_as_fast_as_it_went(script):
    """Gradients of 1, then a burst of 10 for twenty updates, then its opposite: log eta moves by the rate at most."""
    networks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    agent, args = script.Agent(*networks, eta=1.0), script.Args(multiplier_rate=0.01)
    optimiser, log_eta = script.make_optimiser(agent, args), agent.log_eta
    path = [0.0]
    for gradient in [1.0] * 30 + [-10.0] * 20 + [1.0] * 100:
        log_eta.grad = torch.full_like(log_eta, gradient)
        optimiser.step()
        path.append(log_eta.item())
    steps = [after - before for before, after in zip(path, path[1:])]
    assert max(map(abs, steps)) <= 0.01 * (1 + 1e-4)
    assert min(steps[100:]) < -0.0099  # the burst is forgotten: full speed back
    rates = [group["lr"] for group in optimiser.param_groups]
    assert rates == [args.policy_learning_rate, args.learning_rate, 0.01]
    covered = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in covered} == {id(p) for p in agent.parameters() if p.requires_grad}
