"""E-step: q(a|s) proportional to pi_i(a|s) exp(Q'(s,a)/eta), and its temperature's dual g."""

import math

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import (
    alive,
    categorical_kl,
    normal,
    number,
    numbers,
    quadrature,
    random_batch,
    random_gaussian,
    small_agent,
    small_args,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

with_e_step = pytest.mark.parametrize("script", scripts_with("temperature_dual", "improved_policy"))
with_learner = pytest.mark.parametrize("script", scripts_with("compute_losses", "kl_mean"))


def discrete(seed, states=4, actions=5):
    """Q' and log pi_i [S, A], exact sums; a mask that takes every state."""
    generator = numbers(seed)
    scores, log_prior = (normal(generator, states, actions) for _ in range(2))
    return scores, log_prior.log_softmax(-1), torch.ones(states).double()


def best_eta(script, scores, log_prior, epsilon, mask):
    """The minimum of g by a scalar minimiser over log eta."""

    def g(log_eta):
        eta = number(log_eta).exp()
        return script.temperature_dual(eta, scores, log_prior, epsilon, mask).item()

    options = {"xatol": 1e-10}
    return math.exp(minimize_scalar(g, bounds=(-14, 14), method="bounded", options=options).x)


def mean_kl(script, eta, scores, log_prior):
    return categorical_kl(script.improved_policy(eta, scores, log_prior), log_prior).mean().item()


# ---- A Gaussian pi_i has closed forms, held to by quadrature.
def gaussian_case(seed):
    z, log_prior = quadrature()
    generator = numbers(seed)
    mean, cholesky = random_gaussian(generator)
    actions, sigma = mean + z @ cholesky.mT, cholesky @ cholesky.mT
    return log_prior, mean, actions, sigma, generator


def moments(weights, actions):
    """Mean and covariance of q."""
    mean = weights @ actions
    return mean, (weights.unsqueeze(-1) * (actions - mean)).mT @ (actions - mean)


@with_e_step
@pytest.mark.parametrize("seed", range(3))
def test_linear_q_moves_the_mean_by_sigma_w_over_eta_and_keeps_the_covariance(script, seed):
    log_prior, mean, actions, sigma, generator = gaussian_case(seed)
    w, eta = normal(generator, 2), number(1.3)
    q_mean, q_sigma = moments(script.improved_policy(eta, actions @ w, log_prior), actions)
    torch.testing.assert_close(q_mean, mean + sigma @ w / eta, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q_sigma, sigma, rtol=1e-8, atol=1e-8)


@with_e_step
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5])
def test_linear_q_has_the_temperature_sqrt_of_w_sigma_w_over_two_epsilon(script, epsilon):
    log_prior, mean, actions, sigma, generator = gaussian_case(seed=3)
    w, mask = normal(generator, 2), torch.ones(1).double()
    variance, scores = (w @ sigma @ w).item(), (actions @ w).unsqueeze(0)
    for eta in (0.7, 1.0, 3.0):
        kl = categorical_kl(script.improved_policy(eta, scores, log_prior), log_prior)
        assert kl.item() == pytest.approx(variance / (2 * eta**2), rel=1e-7)
        g = script.temperature_dual(number(eta), scores, log_prior, epsilon, mask)
        exact = eta * epsilon + (w @ mean).item() + variance / (2 * eta)
        assert g.item() == pytest.approx(exact, rel=1e-9)
    eta = best_eta(script, scores, log_prior, epsilon, mask)
    assert eta == pytest.approx(math.sqrt(variance / (2 * epsilon)), rel=1e-5)


@with_e_step
@pytest.mark.parametrize("epsilon", [0.01, 0.1])
def test_about_the_old_mean_linear_q_spreads_by_one_plus_two_epsilon_along_its_slope(
    script, epsilon
):
    """So a mean that cannot follow makes the M-step widen the policy."""
    log_prior, mean, actions, sigma, generator = gaussian_case(seed=5)
    scores, mask = actions @ normal(generator, 2), torch.ones(1).double()
    eta = best_eta(script, scores.unsqueeze(0), log_prior, epsilon, mask)
    weights = script.improved_policy(eta, scores, log_prior)
    about_mean = (weights.unsqueeze(-1) * (actions - mean)).mT @ (actions - mean)
    spread = torch.linalg.eigvals(torch.linalg.solve(sigma, about_mean)).real.sort().values
    assert spread.tolist() == pytest.approx([1, 1 + 2 * epsilon], rel=1e-5)


@with_e_step
@pytest.mark.parametrize("seed", range(3))
def test_quadratic_q_adds_its_hessian_over_eta_to_the_precision(script, seed):
    log_prior, mean, actions, sigma, generator = gaussian_case(seed)
    centre, root, eta = normal(generator, 2), normal(generator, 2, 2), 4.0
    hessian = root @ root.mT
    scores = -0.5 * ((actions - centre) @ hessian * (actions - centre)).sum(-1)
    precision = sigma.inverse() + hessian / eta
    q_mean, q_sigma = moments(script.improved_policy(eta, scores, log_prior), actions)
    torch.testing.assert_close(q_sigma, precision.inverse(), rtol=1e-6, atol=1e-6)
    pulled = torch.linalg.solve(sigma, mean) + hessian @ centre / eta
    torch.testing.assert_close(q_mean, precision.inverse() @ pulled, rtol=1e-6, atol=1e-6)


# ---- Discrete actions: the sums are exact.
@with_e_step
@given(seed=st.integers(0, 10**6), eta=st.floats(0.05, 20))
def test_q_is_the_prior_times_exp_of_q_over_eta_normalised_in_each_state(script, seed, eta):
    scores, log_prior, _ = discrete(seed)
    unnormalised = log_prior.exp().numpy() * np.exp(scores.numpy() / eta)
    expected = unnormalised / unnormalised.sum(-1, keepdims=True)
    q = script.improved_policy(eta, scores, log_prior)
    np.testing.assert_allclose(q.numpy(), expected, rtol=1e-10)
    kl = (expected * (np.log(expected) - log_prior.numpy())).sum(-1)
    np.testing.assert_allclose(categorical_kl(q, log_prior).numpy(), kl, rtol=1e-8, atol=1e-12)


@with_e_step
@given(seed=st.integers(0, 10**6), fraction=st.floats(0.01, 0.9))
def test_at_the_minimum_of_g_the_mean_kl_is_epsilon(script, seed, fraction):
    scores, log_prior, mask = discrete(seed)
    greedy_kl = -log_prior.gather(-1, scores.argmax(-1, keepdim=True)).mean().item()
    epsilon = fraction * greedy_kl
    eta = best_eta(script, scores, log_prior, epsilon, mask)
    assert mean_kl(script, eta, scores, log_prior) == pytest.approx(epsilon, rel=1e-4)


@with_e_step
@pytest.mark.parametrize("seed", range(5))
def test_the_minimum_of_g_is_the_best_expected_q_within_the_bound(script, seed):
    scores, log_prior, mask = discrete(seed)
    epsilon, generator = 0.2, numbers(seed)
    eta = best_eta(script, scores, log_prior, epsilon, mask)
    best = (script.improved_policy(eta, scores, log_prior) * scores).sum(-1).mean()
    g = script.temperature_dual(number(eta), scores, log_prior, epsilon, mask)
    assert g.item() == pytest.approx(best.item(), rel=1e-6)
    for _ in range(200):  # any other q, mixed with pi_i until it keeps the bound, is no better
        other = normal(generator, *scores.shape).mul(2).softmax(-1)
        while categorical_kl(other, log_prior).mean() > epsilon:
            other = 0.9 * other + 0.1 * log_prior.exp()
        assert (other * scores).sum(-1).mean() <= best + 1e-9


@with_e_step
@given(seed=st.integers(0, 10**6), eta=st.floats(0.05, 20))
def test_g_has_the_slope_epsilon_minus_kl_and_is_convex(script, seed, eta):
    """g'' is the variance of Q' under q, averaged over states, divided by eta^3."""
    scores, log_prior, mask = discrete(seed)
    eta = number(eta).requires_grad_()
    g = script.temperature_dual(eta, scores, log_prior, 0.3, mask)
    (slope,) = torch.autograd.grad(g, eta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, eta)
    q = script.improved_policy(eta.detach(), scores, log_prior)
    left_over = 0.3 - categorical_kl(q, log_prior).mean().item()
    assert slope.item() == pytest.approx(left_over, rel=1e-7, abs=1e-9)
    variance = (q * scores.square()).sum(-1) - (q * scores).sum(-1).square()
    exact = (variance.mean() / eta.detach() ** 3).item()
    assert curvature.item() == pytest.approx(exact, rel=1e-5, abs=1e-9)
    assert curvature.item() >= -1e-9


@with_e_step
@pytest.mark.parametrize("scores_of", ["beyond the greedy policy", "constant", "one action"])
def test_where_no_q_uses_up_the_bound_g_falls_all_the_way_to_the_floor(script, scores_of):
    scores, log_prior, mask = discrete(seed=1)
    epsilon = 1.1 * -log_prior.gather(-1, scores.argmax(-1, keepdim=True)).mean().item()
    if scores_of == "constant":
        scores, epsilon = torch.full_like(scores, 3.0), 0.1
    elif scores_of == "one action":
        scores, log_prior, epsilon = scores[:, :1], torch.zeros_like(scores[:, :1]), 0.1
    for eta in np.logspace(-6, 6, 25):
        eta = number(eta).requires_grad_()
        g = script.temperature_dual(eta, scores, log_prior, epsilon, mask)
        (slope,) = torch.autograd.grad(g, eta)
        assert g.isfinite() and slope > 0
        q = script.improved_policy(eta.detach(), scores, log_prior)
        torch.testing.assert_close(q.sum(-1), mask)


@with_e_step
@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("eta", [1e-6, 1.0, 1e6])
def test_huge_and_tiny_scales_of_q_stay_finite_in_float32(script, scale, eta):
    scores, log_prior, mask = (x.float() for x in discrete(seed=2))
    log_eta = torch.tensor(math.log(eta)).requires_grad_()
    g = script.temperature_dual(log_eta.exp(), scale * scores, log_prior, 0.1, mask)
    (slope,) = torch.autograd.grad(g, log_eta)
    q = script.improved_policy(eta, scale * scores, log_prior)
    assert all(x.isfinite().all() for x in (g, slope, q))
    torch.testing.assert_close(q.sum(-1), mask)


@with_e_step
@given(seed=st.integers(0, 10**6), log_scale=st.floats(-9, 9))
def test_q_and_eta_on_a_scale_k_times_as_large_give_the_same_policy_and_k_times_g(
    script, seed, log_scale
):
    scores, log_prior, mask = discrete(seed)
    eta, scale = number(0.8), 10**log_scale
    q = script.improved_policy(eta, scores, log_prior)
    torch.testing.assert_close(script.improved_policy(scale * eta, scale * scores, log_prior), q)
    g = script.temperature_dual(eta, scores, log_prior, 0.1, mask)
    scaled = script.temperature_dual(scale * eta, scale * scores, log_prior, 0.1, mask)
    torch.testing.assert_close(scaled, scale * g)


@with_e_step
def test_masked_states_do_not_count(script):
    scores, log_prior, _ = discrete(seed=4)
    mask = number([1.0, 0.0, 1.0, 0.0])
    taken = mask.bool()
    few = scores[taken], log_prior[taken], 0.1, torch.ones(2).double()
    only = script.temperature_dual(number(0.5), *few)
    masked = script.temperature_dual(number(0.5), scores, log_prior, 0.1, mask)
    scores[~taken] += 100
    again = script.temperature_dual(number(0.5), scores, log_prior, 0.1, mask)
    assert torch.equal(masked, again)
    torch.testing.assert_close(masked, only)


@pytest.mark.parametrize("script", scripts_with("masked_mean"))
def test_the_mean_over_no_states_is_zero_not_nan(script):
    x = normal(numbers(0), 6)
    assert script.masked_mean(x, torch.zeros(6)) == 0
    assert script.masked_mean(x, torch.ones(6)).item() == pytest.approx(x.mean().item(), rel=1e-12)
    mask = number([1, 0, 0, 1, 1, 0])
    assert script.masked_mean(x, mask).item() == pytest.approx(
        x[mask.bool()].mean().item(), rel=1e-12
    )


# ---- In float32, whatever Q is measured in: the error must not grow with Q/eta.
def kl_at_the_float32_minimum(script, dual, scores, epsilon):
    """Mean KL, in float64, at the eta where the slope of this dual in float32 changes its sign."""
    log_prior, mask = -math.log(scores.shape[-1]), torch.ones(len(scores))
    low, high = math.log(scores.std()) - 3, math.log(scores.std()) + 5
    for _ in range(40):
        log_eta = torch.tensor((low + high) / 2, requires_grad=True)
        (slope,) = torch.autograd.grad(
            dual(log_eta.exp(), scores, log_prior, epsilon, mask), log_eta
        )
        assert slope.dtype == torch.float32
        low, high = (low, log_eta.item()) if slope > 0 else (log_eta.item(), high)
    return mean_kl(script, math.exp(low), scores.double(), log_prior)


@with_e_step
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centre, spread", [(100, 1e-3), (1000, 1e-2), (1e6, 1e5)])
def test_the_temperature_reaches_its_bound_in_float32_as_in_float64(script, centre, spread, seed):
    scores = (centre + spread * normal(numbers(seed), 320, 20)).float()
    exact = best_eta(script, scores.double(), -math.log(20), 0.1, torch.ones(320).double())
    reached = kl_at_the_float32_minimum(script, script.temperature_dual, scores, 0.1)
    assert mean_kl(script, exact, scores.double(), -math.log(20)) == pytest.approx(0.1, rel=1e-3)
    assert reached == pytest.approx(0.1, rel=1e-3)
    q, exact_q = (
        script.improved_policy(exact, x, -math.log(20)) for x in (scores, scores.double())
    )
    torch.testing.assert_close(q.double(), exact_q, rtol=1e-5, atol=1e-7)


@with_e_step
@pytest.mark.parametrize("centre, spread", [(100, 1e-3), (1000, 1e-2)])
def test_without_the_greatest_score_subtracted_float32_would_miss_it(script, centre, spread):
    def as_printed(eta, scores, log_prior, epsilon, mask):
        log_z = torch.logsumexp(log_prior + scores / eta, dim=-1)
        return eta * epsilon + eta * script.masked_mean(log_z, mask)

    batches = [(centre + spread * normal(numbers(seed), 320, 20)).float() for seed in range(3)]
    reached = [kl_at_the_float32_minimum(script, as_printed, scores, 0.1) for scores in batches]
    assert max(abs(kl / 0.1 - 1) for kl in reached) > 0.3


# ---- The multipliers as the learner moves them, through the losses and the gradient step.
def move_multipliers(script, step, args, agent, steps, **options):
    """Gradient steps on one batch with the networks held still: their metrics, and the batch."""
    lengths, terminated = [4, 2, 4, 3, 1], [True, True, False, False, True]
    batch, noise = random_batch(script, args, agent, lengths, terminated)
    networks = [*agent.policy.parameters(), *agent.critic.parameters()]
    multipliers = {"params": agent.parameters(recurse=False), **options}
    optimiser, values = torch.optim.Adam([{"params": networks, "lr": 0.0}, multipliers]), []
    for _ in range(steps):
        losses, metrics = script.compute_losses(agent, batch, noise, args)
        step(agent, optimiser, losses)
        values.append(metrics)
    return values, batch, noise


SIGN_DESCENT = {"lr": 1.0, "betas": (0.0, 0.0)}  # without memory each logarithm moves by 1


@with_learner
def test_eta_moved_by_gradient_ends_where_the_scalar_minimiser_does(script, step):
    args = small_args(script, num_samples=6, epsilon=0.2)
    agent = small_agent(script, args)
    _, batch, noise = move_multipliers(script, step, args, agent, steps=400, lr=0.1)

    state, z = batch.state[alive(batch)], noise[alive(batch)]
    mean_i, cholesky_i = agent.target_policy(state)
    actions = mean_i.unsqueeze(1) + (cholesky_i.unsqueeze(1) @ z.unsqueeze(-1)).squeeze(-1)
    scores = [agent.target_critic(state, actions[:, m]) for m in range(6)]
    scores = torch.stack(scores, -1).numpy()

    def g(log_eta):
        eta = math.exp(log_eta)
        return eta * args.epsilon + eta * np.log(np.exp(scores / eta).mean(-1)).mean()

    exact = minimize_scalar(g, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).x
    assert agent.log_eta.item() == pytest.approx(exact, abs=1e-5)


NO_MINIMUM = {"one sample": {"num_samples": 1}, "epsilon above log M": {"epsilon": 5.0}}
NO_MINIMUM["constant Q"] = {}


@with_learner
@pytest.mark.parametrize("reason", NO_MINIMUM)
def test_an_eta_without_a_minimum_rests_at_its_floor_and_everything_stays_finite(
    script, step, reason
):
    args = small_args(script, **NO_MINIMUM[reason])
    agent = small_agent(script, args)
    if reason == "constant Q":
        torch.nn.init.zeros_(agent.target_critic.value.weight)
    values, _, _ = move_multipliers(script, step, args, agent, steps=20, **SIGN_DESCENT)
    assert agent.log_eta.item() == pytest.approx(math.log(1e-6), rel=1e-12)
    assert all(math.isfinite(x) for row in values for x in row.values())
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


@with_learner
@pytest.mark.parametrize("tight, loose", [("mu", "sigma"), ("sigma", "mu")])
def test_the_multiplier_of_a_violated_bound_rises_to_a_ceiling_and_of_a_slack_one_falls_to_a_floor(
    script, step, tight, loose
):
    args = small_args(script, **{f"epsilon_{tight}": 1e-9, f"epsilon_{loose}": 1e9})
    agent = small_agent(script, args)
    multipliers = [getattr(agent, f"log_eta_{name}") for name in (tight, loose)]
    starts, ends = [multiplier.item() for multiplier in multipliers], []
    for steps in (25, 1):  # where they rest, and still rest
        move_multipliers(script, step, args, agent, steps, **SIGN_DESCENT)
        ends.append([multiplier.item() for multiplier in multipliers])
    assert ends[0] == ends[1]
    assert ends[0][0] > starts[0] + 2 and ends[0][1] < starts[1] - 2
    assert ends[0] == pytest.approx([math.log(2e4), math.log(1e-6)], rel=1e-12)
