"""Policy, critic and agent: what the networks compute, and how they start."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import scripts_with
from helpers import (
    ACTION_SIZE,
    STATE_SIZE,
    make_critic,
    make_policy,
    normal,
    numbers,
    small_args,
    trained,
)

with_networks = pytest.mark.parametrize(
    "script", scripts_with("Policy", "Critic", "gaussian_log_prob")
)


def shaken(network, seed, by=1.0):
    """The network with every parameter moved, so that none is at a value that hides another."""
    generator = numbers(seed)
    for parameter in network.parameters():
        parameter.data.add_(by * normal(generator, *parameter.shape))
    return network


# ---- The critic.
@with_networks
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_critic_scores_many_actions_as_it_scores_each_alone(script, dtype, error):
    critic = make_critic(script, small_args(script, critic_layers=(8, 5, 4))).to(dtype)
    generator = numbers(0)
    state = normal(generator, 3, 4, STATE_SIZE).to(dtype)
    actions = normal(generator, 3, 4, 6, ACTION_SIZE).to(dtype)
    together = critic(state, actions)
    alone = torch.stack([critic(state, a) for a in actions.unbind(2)], dim=2)
    assert together.shape == (3, 4, 6)
    torch.testing.assert_close(together, alone, rtol=error, atol=error)
    parameters = list(critic.parameters())
    gradients = (torch.autograd.grad(q.square().sum(), parameters) for q in (together, alone))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=10 * error, atol=10 * error)


@with_networks
@pytest.mark.parametrize("layers", [(8,), (8, 5), (8, 5, 4)])
def test_the_critic_is_one_network_over_state_and_clipped_action_with_a_norm_in_each_layer(
    script, layers
):
    critic = shaken(make_critic(script, small_args(script, critic_layers=layers)), seed=1, by=0.3)
    generator = numbers(1)
    state, action = normal(generator, 50, STATE_SIZE), 1.5 * normal(generator, 50, ACTION_SIZE)
    assert (action.abs() > 1).any() and (action.abs() < 1).any()
    linear = [module for module in critic.hidden if isinstance(module, torch.nn.Linear)]
    norms = [module for module in critic.hidden if isinstance(module, torch.nn.LayerNorm)]
    assert [layer.out_features for layer in linear] == list(layers)
    h = torch.cat([state, action.clip(-1, 1)], -1)
    for layer, norm in zip(linear, norms, strict=True):
        h = F.relu(norm(layer(h)))
    exact = critic.value(h).squeeze(-1)
    torch.testing.assert_close(critic(state, action), exact, rtol=1e-12, atol=1e-12)


@with_networks
def test_an_action_outside_the_bounds_is_scored_as_the_clipped_one(script):
    critic = make_critic(script, small_args(script))
    state = normal(numbers(2), STATE_SIZE)
    actions = torch.tensor([[7.0, -3.0], [1.0, -1.0], [0.9, -1.0]]).double()
    far, near, inside = (critic(state, action) for action in actions)
    assert far == near != inside


# ---- The policy.
@with_networks
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_policys_factor_is_lower_triangular_with_a_positive_diagonal(script, covariance):
    policy = shaken(make_policy(script, small_args(script, covariance=covariance), 3), seed=3)
    mean, cholesky = policy(10 * normal(numbers(3), 40, STATE_SIZE))
    assert mean.shape == (40, 3) and cholesky.shape == (40, 3, 3)
    assert (cholesky.triu(1) == 0).all()
    below = (cholesky.tril(-1) != 0).sum()
    assert below == (0 if covariance == "diagonal" else 3 * 40)
    assert (cholesky.diagonal(dim1=-2, dim2=-1) > 0.01).all()
    assert torch.linalg.eigvalsh(cholesky @ cholesky.mT).min() > 0


@with_networks
def test_the_untrained_policy_has_a_standard_deviation_of_one_half_about_a_mean_near_zero(script):
    policy = make_policy(script, script.Args(), 3)
    mean, cholesky = policy(normal(numbers(4), 40, STATE_SIZE))
    target = 0.5 * torch.eye(3).double().expand_as(cholesky)
    torch.testing.assert_close(cholesky, target, rtol=0.03, atol=0.02)
    assert mean.abs().max() < 0.02
    torch.nn.init.zeros_(policy.factor.weight)
    exact = policy(torch.ones(STATE_SIZE).double())[1]
    torch.testing.assert_close(exact, target[0], rtol=1e-12, atol=1e-12)


@with_networks
def test_the_diagonal_of_the_factor_is_softplus_above_its_least_value(script):
    policy = make_policy(script, small_args(script))
    torch.nn.init.zeros_(policy.factor.weight)
    for raw in (-1e3, -1.0, 2.0):
        torch.nn.init.constant_(policy.factor.bias, raw)
        cholesky = policy(torch.ones(STATE_SIZE).double())[1]
        exact = 0.01 + math.log1p(math.exp(raw + math.log(math.expm1(0.49))))
        assert cholesky.diagonal().tolist() == pytest.approx([exact, exact], rel=1e-6)
        assert cholesky[1, 0].item() == pytest.approx(raw, rel=1e-6)


@with_networks
def test_nothing_bounds_the_factor_from_above(script):
    policy = make_policy(script, small_args(script))
    below = normal(numbers(8), *policy.factor.weight.shape)
    policy.factor.weight.data.copy_(3 * below)
    state = normal(numbers(9), 20, STATE_SIZE)
    factor = policy(state)[1]
    raw = policy.factor(policy.hidden(state)).unflatten(-1, (ACTION_SIZE, ACTION_SIZE))
    expected = F.softplus(raw + math.log(math.expm1(0.49))) + 0.01
    assert factor.abs().max() > 2
    torch.testing.assert_close(
        factor.diagonal(dim1=-2, dim2=-1), expected.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(factor.tril(-1), raw.tril(-1), rtol=1e-9, atol=0)


@with_networks
@pytest.mark.parametrize("layers", [(7,), (7, 6, 5)])
def test_the_policys_mean_is_a_network_with_a_norm_after_its_first_layer_and_a_tanh(script, layers):
    policy = shaken(make_policy(script, small_args(script, policy_layers=layers)), seed=5)
    state = normal(numbers(5), 30, STATE_SIZE)
    linear = [module for module in policy.hidden if isinstance(module, torch.nn.Linear)]
    (norm,) = [module for module in policy.hidden if isinstance(module, torch.nn.LayerNorm)]
    assert [layer.out_features for layer in linear] == list(layers)
    h = F.relu(norm(linear[0](state)))
    for layer in linear[1:]:
        h = F.relu(layer(h))
    unbounded = policy.mean(h)
    assert unbounded.abs().max() > 1
    torch.testing.assert_close(policy(state)[0], unbounded.tanh(), rtol=1e-12, atol=1e-12)


# ---- The agent.
with_agent = pytest.mark.parametrize("script", scripts_with("Agent", "gaussian_log_prob"))


@with_agent
def test_the_targets_start_equal_and_only_what_is_learned_has_a_gradient(script):
    args = small_args(script)
    policy, critic = make_policy(script, args), make_critic(script, args)
    agent = script.Agent(policy, critic, eta=2.0, eta_mu=30.0)
    for network, target in ((policy, agent.target_policy), (critic, agent.target_critic)):
        pairs = list(zip(network.parameters(), target.parameters(), strict=True))
        assert all(torch.equal(x, y) and x is not y for x, y in pairs)
        assert all(x.requires_grad and not y.requires_grad for x, y in pairs)
    multipliers = dict(agent.named_parameters(recurse=False))
    assert {name: x.exp().item() for name, x in multipliers.items()} == pytest.approx(
        {"log_eta": 2.0, "log_eta_mu": 30.0}, rel=1e-6
    )
    assert all(x.requires_grad for x in multipliers.values())


@pytest.mark.parametrize("script", scripts_with("Agent", "main"))
@pytest.mark.parametrize("period, copied", [(3, False), (5, True), (11, False)])
def test_copying_the_targets_makes_them_equal_and_keeps_them_apart(script, period, copied):
    """Ten gradient steps by main(), which copies both targets after every `period` of them."""
    periods = {"target_period": period}
    if hasattr(script.Args, "policy_period"):
        periods |= {"policy_period": period}
    agent = trained(script, **periods)[1]["agent"]
    for name in ("policy", "critic"):
        pairs = [(x, agent[f"target_{key}"]) for key, x in agent.items() if key.startswith(name)]
        assert pairs and all(torch.equal(*pair) for pair in pairs) == copied
