"""Algorithm 3: the gradient of E_q A and its baseline, KL(q || pi_i) in two parts, the M-step's
copy, the ablations."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from helpers import (
    ACTION_SIZE,
    STATE_SIZE,
    normal,
    numbers,
    random_batch,
    random_gaussian,
    small_agent,
    small_args,
    valid,
)
from hypothesis import given
from hypothesis import strategies as st
from running import rows, tiny, train
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch.distributions import MultivariateNormal, kl_divergence

import mpo_parametric as script

LENGTHS, TERMINATED = [4, 4, 3, 2, 1, 1], [False, True, True, False, True, False]
constraints = pytest.mark.parametrize("constraint", ["kl", "entropy"])


def assert_close(x, y, tolerance=1e-9):
    y = torch.as_tensor(y, dtype=x.dtype)
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def bounded(metrics, args):
    """C_mu and C_Sigma, of which the metrics are multiples of the bounds."""
    c_mu = metrics["mpo/kl_mu_relative"] * args.epsilon_mu
    return c_mu.item(), (metrics["mpo/kl_sigma_relative"] * args.epsilon_sigma).item()


# ---- What the losses are made of.
def linear(w):
    return lambda a: a @ w


def quadratic(centre, hessian):
    return lambda a: -0.5 * ((a - centre) @ hessian * (a - centre)).sum(-1)


def random_hessian(generator):
    root = normal(generator, ACTION_SIZE, ACTION_SIZE)
    return root @ root.mT + 0.1 * torch.eye(ACTION_SIZE).double()


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_the_log_density_of_many_actions_is_that_of_each(seed, size):
    generator = numbers(seed)
    mean, cholesky = random_gaussian(generator, 3, size=size)
    action = normal(generator, 3, 5, size)
    each = MultivariateNormal(mean.unsqueeze(1), scale_tril=cholesky.unsqueeze(1)).log_prob(action)
    assert_close(script.gaussian_log_prob(mean, cholesky, action), each)


def test_the_bonus_is_the_entropy_of_a_narrow_policy_and_pulls_no_dimension_above_the_uniforms():
    mean, cholesky = random_gaussian(numbers(0), 4, size=3)
    narrow = cholesky * 0.1
    entropy = MultivariateNormal(mean, scale_tril=narrow).entropy()
    assert_close(script.entropy_bonus(narrow), entropy)
    (wide,) = leaves(torch.diag(torch.tensor([0.125, 0.25, 0.5]).double()))
    script.entropy_bonus(wide).backward()
    assert_close(wide.grad, torch.diag(torch.tensor([8, 4, 0])))
    uniform_std = 2 / math.sqrt(2 * math.pi * math.e)
    assert_close(script.entropy_bonus(uniform_std * torch.eye(3).double()), 3 * math.log(2))
    assert script.entropy_bonus(1000 * wide) == script.entropy_bonus(10 * wide)


# ---- The learner on a bandit: one state, Q' a function of a alone.
class Gaussian(torch.nn.Module):
    """A policy that starts out the same in every state; parameters for each of them, if named."""

    def __init__(self, mean, cholesky, states=1):
        super().__init__()
        raw = cholesky.tril(-1) + cholesky.diagonal().log().diag()
        each = (x.repeat(states, *[1] * x.dim()) for x in (mean, raw))
        self.mu, self.raw = map(torch.nn.Parameter, each)

    def forward(self, state):
        factor = self.raw.tril(-1) + torch.diag_embed(self.raw.diagonal(dim1=-2, dim2=-1).exp())
        states, both = state.shape[:-1], (self.mu, factor)
        return [x.expand(states.numel(), *x.shape[1:]).unflatten(0, states) for x in both]


class Bandit(torch.nn.Module):
    """A critic that knows Q."""

    def __init__(self, score, constant=0.0):
        super().__init__()
        self.score, self.constant = score, torch.nn.Parameter(torch.tensor(constant).double())

    def forward(self, state, action):
        return self.score(action) + self.constant


def bandit(score, mean, cholesky, noise, constant=0.0, apart=False, **changes):
    """Settings, an agent at theta = theta_i, windows of a step, and noise for their two states.

    The noise is given as [states, M, A]. Apart: each state has parameters of its own.
    """
    args = small_args(script, num_samples=noise.shape[1], **changes)
    noise = noise.reshape(-1, 2, *noise.shape[1:])
    windows = len(noise)
    policy = Gaussian(mean, cholesky, 2 * windows if apart else 1)
    agent = script.Agent(policy, Bandit(score, constant), eta_mu=1.0, eta_sigma=1.0).double()
    none = torch.zeros(windows, 2).double()
    action = torch.zeros(windows, 2, len(mean)).double()
    batch = script.Rows(none.unsqueeze(-1), action, none, none, terminated=none, final=none)
    return agent, batch, noise, args


def policy_gradient(agent, batch, noise, args):
    """Ascent direction of mu, of log diag L and of what is below it, [states, A + A(A+1)/2].

    At theta_i the gradient of a KL is 0, so it is that of E_q A.
    """
    losses, _ = script.parametric_losses(agent, batch, noise, args)
    parameters = agent.policy.mu, agent.policy.raw
    of_mean, of_raw = torch.autograd.grad(-losses["policy"], parameters)
    return torch.cat([of_mean, entries(of_raw)], -1)


def entries(factor):
    """The diagonal of triangular matrices, and what is below it. [..., A, A] -> [..., A(A+1)/2]."""
    row, column = torch.tril_indices(*factor.shape[-2:], offset=-1)
    return torch.cat([factor.diagonal(dim1=-2, dim2=-1), factor[..., row, column]], -1)


def gradients_of_states(score, mean, cholesky, states, samples, **changes):
    """An estimate from each state: their mean is what it tends to, the rest is noise."""
    noise = normal(numbers(0), states, samples, len(mean))
    changes |= dict(apart=True, normalise_advantage=False)
    return states * policy_gradient(*bandit(score, mean, cholesky, noise, **changes))


def grid(samples):
    """Noise [states, M, 1] whose mean is an expectation, for degrees to 5 in each number.

    The three nodes of Gauss and Hermite have the weights 1/6, 2/3, 1/6, so the middle one stands
    here four times.
    """
    nodes = torch.tensor([-1.0, 0, 0, 0, 0, 1]).double() * math.sqrt(3)
    return torch.cartesian_prod(*[nodes] * samples).unsqueeze(-1)


def pairs():
    """Noise [36, 2, 2], two actions of two dimensions: the mean is exact for degrees to 5."""
    points = torch.cartesian_prod(*[torch.tensor([-1.0, 0, 1]).double()] * 4) * math.sqrt(3)
    corners = points[(points != 0).sum(-1) == 2]  # 24 of them, in the weight 2/3
    return torch.cat([corners, torch.zeros(12, 4).double()]).reshape(-1, 2, 2)


# E_q Q in closed form; `pairs` are exact for it, since A grad log q has degree 4 in the noise.
@given(seed=st.integers(0, 10**6))
def test_for_linear_q_the_gradient_of_the_mean_is_w_and_that_of_the_factor_is_zero(seed):
    generator = numbers(seed)
    (mean, cholesky), w = random_gaussian(generator), normal(generator, ACTION_SIZE)
    inputs = bandit(linear(w), mean, cholesky, pairs(), normalise_advantage=False)
    assert_close(policy_gradient(*inputs), torch.cat([w, torch.zeros(3).double()]).unsqueeze(0))


@given(seed=st.integers(0, 10**6))
def test_for_quadratic_q_it_is_h_times_the_way_to_the_top_and_minus_h_times_the_factor(seed):
    """E_q Q = -1/2 (mu - c)^T H (mu - c) - 1/2 tr(H L L^T)."""
    score, mean, cholesky, exact = quadratic_case(seed)
    inputs = bandit(score, mean, cholesky, pairs(), normalise_advantage=False)
    assert_close(policy_gradient(*inputs), exact.unsqueeze(0), 1e-8)


def quadratic_case(seed):
    """Q, mean, factor, and the exact gradient as `policy_gradient` has it."""
    generator = numbers(seed)
    mean, cholesky = random_gaussian(generator)
    centre, hessian = normal(generator, 2), random_hessian(generator)
    of_factor = -(hessian @ cholesky)
    of_factor.diagonal().mul_(cholesky.diagonal())  # of its logarithm
    exact = torch.cat([hessian @ (centre - mean), entries(of_factor)])
    return quadratic(centre, hessian), mean, cholesky, exact


def one_dimension():
    """Q = 0.7 a under N(0.3, 0.5^2)."""
    w, mean, std = torch.tensor([0.7, 0.3, 0.5], dtype=torch.float64).split(1)
    return linear(w), mean, std.unsqueeze(0)


@pytest.mark.parametrize("samples, used", [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)])
def test_the_baseline_leaves_the_expected_gradient_as_it_is_exactly(samples, used):
    """One action dimension, so that the expectation over two or three actions can be exact."""
    score, mean, cholesky = one_dimension()
    noise = grid(max(samples, 2))
    changes = dict(policy_samples=used, normalise_advantage=False, constant=50.0)
    *learner, args = bandit(score, mean, cholesky, noise, **changes)
    args = dataclasses.replace(args, num_samples=samples)
    assert_close(policy_gradient(*learner, args), [[0.7, 0.0]], 1e-8)


@pytest.mark.parametrize("samples", [2, 3])
def test_the_plain_mean_over_the_same_samples_would_shrink_the_gradient_by_one_over_m(samples):
    score, mean, cholesky = one_dimension()
    mean, cholesky = leaves(mean, cholesky)
    action = (mean + grid(samples) @ cholesky.mT).detach()
    states = len(action)
    densities = mean.expand(states, 1), cholesky.expand(states, 1, 1), action
    scores, log_q = score(action), script.gaussian_log_prob(*densities)
    for advantage, factor in (
        (scores - scores.mean(-1, keepdim=True), 1 - 1 / samples),
        (script.leave_one_out_advantage(scores), 1.0),
    ):
        expected = (advantage * log_q).mean()  # its gradient is that of E_q A
        (of_mean,) = torch.autograd.grad(expected, mean, retain_graph=True)
        assert of_mean.item() == pytest.approx(0.7 * factor, rel=1e-9)


@pytest.mark.parametrize("samples, used", [(2, 1), (2, 0), (20, 0), (20, 1)])
def test_the_measured_gradient_is_the_exact_one_for_few_and_many_samples(samples, used):
    score, mean, cholesky, exact = quadratic_case(seed=1)
    changes = dict(policy_samples=used, constant=3.0)
    found = gradients_of_states(score, mean, cholesky, 100_000, samples, **changes)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - exact).abs() < 4 * error).all()
    shrunk = exact * (1 - 1 / samples)  # what a baseline of the same samples would give
    assert used or ((shrunk - exact).abs() > 6 * error).any()


def test_the_baseline_of_a_sample_is_the_mean_over_the_others():
    scores = normal(numbers(2), 3, 5)
    advantage = script.leave_one_out_advantage(scores)
    for m in range(5):
        others = [scores[:, n] for n in range(5) if n != m]
        assert_close(advantage[:, m], scores[:, m] - sum(others) / 4)


@pytest.mark.parametrize("samples", [2, 20])
def test_the_baseline_lowers_the_variance_on_q_plus_a_large_constant(samples):
    """On Q = w a + 100: with the baseline the constant is gone, without it all noise is its own."""
    score, mean, cholesky = one_dimension()
    z = normal(numbers(3), 20_000, samples, 1)
    baselines = {"none": lambda scores: scores, "leave one out": script.leave_one_out_advantage}
    variance = {}
    for name, baseline in baselines.items():
        for constant in (0.0, 100.0):
            mu, factor = leaves(mean.expand(len(z), 1), cholesky.expand(len(z), 1, 1))
            action = (mu.unsqueeze(-2) + z @ factor.mT).detach()
            log_q = script.gaussian_log_prob(mu, factor, action)
            advantage = baseline(score(action) + constant)
            (advantage * log_q).mean(-1).sum().backward()
            variance[name, constant] = mu.grad.var().item()
    without = variance["leave one out", 0.0]
    assert variance["leave one out", 100.0] == pytest.approx(without, rel=1e-9)
    assert variance["none", 100.0] > 10_000 * variance["leave one out", 100.0]


def test_with_more_samples_the_gradient_comes_to_the_exact_one_as_one_over_the_root_of_m():
    score, mean, cholesky, exact = quadratic_case(seed=4)
    errors = {}
    for samples in (100, 10_000):
        found = gradients_of_states(score, mean, cholesky, 60, samples)
        errors[samples] = (found - exact).square().mean().sqrt().item()
    assert errors[10_000] < 0.05 * exact.abs().max()
    assert errors[100] / errors[10_000] == pytest.approx(10, rel=0.3)


# ---- KL(q || pi_i) in two parts.
def e_step_parts(mean_i, cholesky_i, mean, cholesky):
    """C_mu and C_Sigma as the losses have them, from pi_i to q in all states."""
    noise = torch.zeros(2, 2, len(mean)).double()
    agent, *inputs = bandit(linear(torch.zeros_like(mean)), mean, cholesky, noise)
    agent.target_policy.load_state_dict(Gaussian(mean_i, cholesky_i).state_dict())
    return bounded(script.parametric_losses(agent, *inputs)[1], inputs[-1])


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_the_parts_are_the_printed_ones_with_sigma_i_and_sum_to_the_kl_from_q_to_pi_i(seed, size):
    generator = numbers(seed)
    mean_i, cholesky_i = random_gaussian(generator, size=size)
    mean, cholesky = random_gaussian(generator, size=size)
    c_mu, c_sigma = e_step_parts(mean_i, cholesky_i, mean, cholesky)
    pi_i = MultivariateNormal(mean_i, scale_tril=cholesky_i)
    q = MultivariateNormal(mean, scale_tril=cholesky)
    assert c_mu + c_sigma == pytest.approx(kl_divergence(q, pi_i).item(), rel=1e-7, abs=1e-7)
    change = (mean - mean_i).numpy()
    sigma_i, sigma = (cholesky_i @ cholesky_i.mT).numpy(), (cholesky @ cholesky.mT).numpy()
    inverse = np.linalg.inv(sigma_i)
    log_ratio = math.log(np.linalg.det(sigma_i) / np.linalg.det(sigma))
    printed = 0.5 * (np.trace(inverse @ sigma) - size + log_ratio)
    assert c_mu == pytest.approx(0.5 * change @ inverse @ change, rel=1e-7, abs=1e-7)
    assert c_sigma == pytest.approx(printed, rel=1e-7, abs=1e-7)


def test_the_e_steps_kl_is_not_the_m_steps():
    """Algorithm 2 bounds KL(pi_i || pi). To widen and to narrow by two exchange their prices."""
    mean, narrow = torch.zeros(1).double(), torch.tensor([[1.0]]).double()
    wide = 2 * narrow
    widen, shrink = 2.0 - 0.5 - math.log(2), 0.125 - 0.5 + math.log(2)
    assert sum(e_step_parts(mean, narrow, mean, wide)) == pytest.approx(widen, rel=1e-9)
    assert sum(e_step_parts(mean, wide, mean, narrow)) == pytest.approx(shrink, rel=1e-9)
    # the same functions in the M-step's order, from pi_i = narrow to pi = wide
    m_step = script.kl_mean(mean, mean, wide) + script.kl_covariance(narrow, wide)
    assert m_step.item() == pytest.approx(shrink, rel=1e-9)
    generator = numbers(5)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    pi_i = MultivariateNormal(mean_i, scale_tril=cholesky_i)
    q = MultivariateNormal(mean, scale_tril=cholesky)
    here, there = kl_divergence(q, pi_i).item(), kl_divergence(pi_i, q).item()
    found = sum(e_step_parts(mean_i, cholesky_i, mean, cholesky))
    assert found == pytest.approx(here, rel=1e-9) and abs(found - there) > 0.1 * there


def test_each_part_is_zero_where_only_the_other_moves():
    generator = numbers(6)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    c_mu, c_sigma = e_step_parts(mean_i, cholesky_i, mean_i, cholesky)
    assert c_mu == 0 and c_sigma > 0.01
    c_mu, c_sigma = e_step_parts(mean_i, cholesky_i, mean, cholesky_i)
    assert c_mu > 0.01 and abs(c_sigma) < 1e-12


# ---- Where the E-step ends, on a bandit.
def ascend(agent, batch, noise, args, steps=700, rate=0.05):
    """Descent-ascent on the losses; the rate decays so that it comes to rest."""
    parameters = [*agent.policy.parameters(), *agent.parameters(recurse=False)]
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.5, 0.9))
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * 0.99 ** max(0, step - steps // 3)
        losses, metrics = script.parametric_losses(agent, batch, noise, args)
        optimiser.zero_grad()
        (losses["policy"] + losses["multipliers"]).backward()
        optimiser.step()
    mean, cholesky = (x[0, 0].detach() for x in agent.policy(batch.state))
    return metrics, mean, cholesky @ cholesky.mT


@pytest.mark.parametrize("binding", ["both", "mean", "covariance"])
def test_a_binding_bound_has_a_positive_multiplier_and_a_slack_one_none(binding):
    """Quadratic Q has a top for the mean, and no covariance narrow enough: its bound holds that.
    For linear Q the mean has no end, and the covariance no reason to move."""
    generator = numbers(8)
    mean_i, cholesky_i = random_gaussian(generator)
    centre, hessian = mean_i + 1, random_hessian(generator)
    score = linear(normal(generator, 2)) if binding == "mean" else quadratic(centre, hessian)
    bounds = dict(epsilon_mu=10.0 if binding == "covariance" else 0.02, epsilon_sigma=0.01)
    changes = bounds | dict(normalise_advantage=False)
    agent, *inputs = bandit(score, mean_i, cholesky_i, pairs(), **changes)
    metrics, mean, sigma = ascend(agent, *inputs)

    eta_mu, eta_sigma = agent.log_eta_mu.exp().item(), agent.log_eta_sigma.exp().item()
    mu_relative = metrics["mpo/kl_mu_relative"].item()
    sigma_relative = metrics["mpo/kl_sigma_relative"].item()
    if binding == "covariance":
        assert mu_relative < 0.5 and eta_mu < 1e-3
        assert_close(mean, centre, 1e-2)
    else:
        assert mu_relative == pytest.approx(1, rel=1e-2) and eta_mu > 0.1
    if binding == "mean":
        assert sigma_relative < 0.5 and eta_sigma < 1e-3
        assert_close(sigma, cholesky_i @ cholesky_i.mT, 1e-6)
    else:
        assert sigma_relative == pytest.approx(1, rel=1e-2) and eta_sigma > 0.1
    if binding == "both":
        best = constrained_optimum(centre, hessian, mean_i, cholesky_i, **bounds)
        assert_close(mean, best[0], 3e-3)
        assert_close(sigma, best[1], 3e-3)


def constrained_optimum(centre, hessian, mean_i, cholesky_i, epsilon_mu, epsilon_sigma):
    """The E-step's program for quadratic Q in numpy, over mu and the three entries of L."""
    centre, hessian, mean_i, l_i = (x.numpy() for x in (centre, hessian, mean_i, cholesky_i))
    inverse_i = np.linalg.inv(l_i @ l_i.T)

    def unpack(x):
        factor = np.array([[x[2], 0], [x[3], x[4]]])
        return x[:2], factor @ factor.T

    def objective(x):
        mean, sigma = unpack(x)
        return 0.5 * (mean - centre) @ hessian @ (mean - centre) + 0.5 * np.trace(hessian @ sigma)

    def room(x):
        mean, sigma = unpack(x)
        change, ratio = mean - mean_i, inverse_i @ sigma
        c_sigma = 0.5 * (np.trace(ratio) - 2 - np.log(np.linalg.det(ratio)))
        return [epsilon_mu - 0.5 * change @ inverse_i @ change, epsilon_sigma - c_sigma]

    start = [*mean_i, l_i[0, 0], l_i[1, 0], l_i[1, 1]]
    bounds = {"type": "ineq", "fun": room}
    options = {"ftol": 1e-12, "maxiter": 500}
    found = minimize(objective, start, method="SLSQP", constraints=bounds, options=options)
    assert found.success
    return unpack(found.x)


@pytest.mark.parametrize("scale", [1e-2, 1e3])
def test_in_standard_deviations_linear_q_of_any_scale_has_the_multiplier_of_the_bound(scale):
    """mu - mu_i = Sigma_i w / (eta_mu |L^T w|), so C_mu = 1 / (2 eta_mu^2), that is epsilon_mu."""
    generator = numbers(9)
    (mean_i, cholesky_i), w = random_gaussian(generator), scale * normal(generator, 2)
    bounds = dict(epsilon_mu=0.1, epsilon_sigma=0.01)
    agent, *inputs = bandit(linear(w), mean_i, cholesky_i, pairs(), **bounds)
    metrics, _, sigma = ascend(agent, *inputs)
    std = (cholesky_i.mT @ w).norm().item()
    assert metrics["mpo/advantage_std"].item() == pytest.approx(std, rel=1e-6)
    assert metrics["mpo/kl_mu_relative"].item() == pytest.approx(1, rel=1e-3)
    assert agent.log_eta_mu.exp().item() == pytest.approx(1 / math.sqrt(2 * 0.1), rel=1e-3)
    assert_close(sigma, cholesky_i @ cholesky_i.mT, 1e-6)


def test_without_bounds_the_bonus_ends_at_the_top_of_q_with_its_scale_over_h_for_covariance():
    """E_q Q + alpha H(q) = const - 1/2 tr(H Sigma) + alpha/2 ln det Sigma: top at alpha H^-1."""
    generator = numbers(10)
    mean_i, cholesky_i = random_gaussian(generator)
    centre, hessian = normal(generator, 2), random_hessian(generator)
    score = quadratic(centre, hessian)
    agent, *inputs = bandit(score, mean_i, cholesky_i, pairs(), constraint="entropy")
    _, mean, sigma = ascend(agent, *inputs)
    assert_close(mean, centre, 1e-3)
    assert_close(sigma, 0.01 * hessian.inverse(), 1e-4)


# ---- The learner.
def learner(**changes):
    defaults = dict(batch_size=len(LENGTHS), epsilon_mu=0.05, epsilon_sigma=0.02)
    args = small_args(script, **(defaults | changes))
    agent = small_agent(script, args)
    batch, _ = random_batch(script, args, agent, LENGTHS, TERMINATED)
    shape = (*batch.state.shape[:2], max(args.num_samples, 2), ACTION_SIZE)
    return agent, batch, normal(numbers(1), *shape), args


def losses_of(*inputs):
    return script.parametric_losses(*inputs)[0]


REACHED = {"critic": "critic.", "policy": "policy.", "multipliers": "log_eta_"}


@constraints
@pytest.mark.parametrize("loss", REACHED)
def test_each_loss_reaches_its_own_parameters_and_no_others(constraint, loss):
    agent, *inputs = learner(constraint=constraint)
    value = losses_of(agent, *inputs)[loss]
    if loss == "multipliers" and constraint == "entropy":
        assert value.item() == 0 and not value.requires_grad  # there is nothing to multiply
        return
    value.backward()
    for name, parameter in agent.named_parameters():
        gradient = 0.0 if parameter.grad is None else parameter.grad.abs().max().item()
        assert (gradient > 0) == name.startswith(REACHED[loss]), name


def test_each_multiplier_moves_by_what_its_own_bound_leaves_over():
    agent, batch, noise, args = learner()
    losses, metrics = script.parametric_losses(agent, batch, noise, args)
    losses["multipliers"].backward()
    c_mu, c_sigma = bounded(metrics, args)
    for log_eta, left_over in (
        (agent.log_eta_mu, args.epsilon_mu - c_mu),
        (agent.log_eta_sigma, args.epsilon_sigma - c_sigma),
    ):
        assert log_eta.grad.item() == pytest.approx(log_eta.exp().item() * left_over, rel=1e-9)


@constraints
def test_retrace_evaluates_the_current_policy_and_the_target_policy_has_no_part_in_it(constraint):
    agent, *inputs = learner(constraint=constraint)
    before = losses_of(agent, *inputs)
    agent.target_policy.mean.bias.data += 0.1
    after = losses_of(agent, *inputs)
    assert torch.equal(before["critic"], after["critic"])
    unmoved = torch.equal(before["policy"], after["policy"])
    assert unmoved == (constraint == "entropy")  # which has no use for it anywhere else either
    agent.policy.mean.bias.data += 0.1
    assert not torch.equal(after["critic"], losses_of(agent, *inputs)["critic"])


def test_v_keeps_all_its_samples_where_the_gradient_has_a_single_one():
    agent, batch, noise, args = learner()
    single = dataclasses.replace(args, policy_samples=1)
    of_all, of_one = (losses_of(agent, batch, noise, x) for x in (args, single))
    assert torch.equal(of_all["critic"], of_one["critic"])
    assert not torch.equal(of_all["policy"], of_one["policy"])
    noise[..., -1, :] += 1  # V and the baseline see the last action, the gradient's log q does not
    moved = losses_of(agent, batch, noise, single)
    assert not torch.equal(of_all["critic"], moved["critic"])


@pytest.mark.parametrize("normalise", [True, False])
def test_the_normalised_gradient_does_not_feel_the_scale_of_the_reward(normalise):
    agent, *inputs = learner(normalise_advantage=normalise)
    agent.target_policy.load_state_dict(agent.policy.state_dict())  # no gradient of the bounds
    found = []
    for factor in (1, 1000):
        agent.target_critic.value.weight.data *= factor
        loss = losses_of(agent, *inputs)["policy"]
        gradients = torch.autograd.grad(loss, list(agent.policy.parameters()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert_close(found[1], found[0] * (1 if normalise else 1000), 1e-8)


def test_a_critic_that_tells_nothing_apart_moves_nothing_and_stays_finite():
    agent, *inputs = learner()
    agent.target_policy.load_state_dict(agent.policy.state_dict())
    agent.target_critic.value.weight.data.zero_()
    loss = losses_of(agent, *inputs)["policy"]
    for gradient in torch.autograd.grad(loss, list(agent.policy.parameters())):
        assert gradient.abs().max() < 1e-9


def test_the_m_step_is_an_exact_copy():
    """theta_{i+1} = theta^q. That main does it is test_each_target_is_copied_at_its_own_period."""
    agent, batch, noise, args = learner()
    learned = [p for p in agent.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(learned, lr=0.01)
    for _ in range(3):
        losses, metrics = script.parametric_losses(agent, batch, noise, args)
        script.gradient_step(agent, optimiser, losses)
    assert all(c > 0 for c in bounded(metrics, args))
    agent.target_policy.load_state_dict(agent.policy.state_dict())
    for theta, theta_i in zip(agent.policy.parameters(), agent.target_policy.parameters()):
        assert torch.equal(theta, theta_i)
    state = normal(numbers(11), 50, STATE_SIZE)
    (mean, cholesky), (mean_i, cholesky_i) = agent.policy(state), agent.target_policy(state)
    assert torch.equal(mean, mean_i) and torch.equal(cholesky, cholesky_i)
    c_mu, c_sigma = bounded(script.parametric_losses(agent, batch, noise, args)[1], args)
    assert c_mu < 1e-20 and abs(c_sigma) < 1e-12


# ---- A slow second implementation.
def slow_losses(agent, batch, noise, args):
    """Algorithm 3 state by state: densities by scipy, inverses, determinants, double sums.

    The three losses, and the traces.
    """
    lengths = valid(batch).sum(1).tolist()
    batch = type(batch)(*(x.numpy() for x in batch))

    def gaussian(network, s):
        mean, cholesky = (x.detach().numpy() for x in network(torch.as_tensor(s)))
        return mean, cholesky, cholesky @ cholesky.T

    def score(network, s, a):
        return network(torch.as_tensor(s), torch.as_tensor(a)).item()

    def log_density(a, mean, sigma):
        return multivariate_normal(mean, sigma).logpdf(a)

    def scored(s, z):
        mean, cholesky, _ = gaussian(agent.policy, s)
        actions = [mean + cholesky @ z_m for z_m in z.numpy()]
        return actions, [score(agent.target_critic, s, a) for a in actions]

    def trace(b, k):
        mean, _, sigma = gaussian(agent.policy, batch.state[b, k])
        log_q = log_density(batch.action[b, k], mean, sigma)
        return min(1, math.exp(log_q - batch.behaviour_log_prob[b, k]))

    used = args.policy_samples or args.num_samples
    errors, traces, improvements, variances, c_mus, c_sigmas, bonuses = [], [], [], [], [], [], []
    for b, steps in enumerate(lengths):
        s, a = batch.state[b], batch.action[b]
        traces += [trace(b, k) for k in range(1, steps)]
        for t in range(steps):
            target = score(agent.target_critic, s[t], a[t])
            for j in range(t, steps):
                c = math.prod(trace(b, k) for k in range(t + 1, j + 1))
                value = np.mean(scored(s[j + 1], noise[b, j + 1])[1][: args.num_samples])
                value = 0.0 if batch.terminated[b, j] else value
                delta = batch.reward[b, j] + args.gamma * value
                delta -= score(agent.target_critic, s[j], a[j])
                target += args.gamma ** (j - t) * c * delta
            errors.append((score(agent.critic, s[t], a[t]) - target) ** 2)

        for t in range(steps + 1):
            if t > 0 and batch.terminated[b, t - 1]:
                continue  # nobody acts in a terminal state
            mean_i, _, sigma_i = gaussian(agent.target_policy, s[t])
            mean, _, sigma = gaussian(agent.policy, s[t])
            actions, scores = scored(s[t], noise[b, t])
            advantage = [x - np.mean(scores[:m] + scores[m + 1 :]) for m, x in enumerate(scores)]
            variances.append(np.var(scores, ddof=1))
            log_q = [log_density(action, mean, sigma) for action in actions]
            improvements.append(np.mean([advantage[m] * log_q[m] for m in range(used)]))
            inverse, change = np.linalg.inv(sigma_i), mean - mean_i
            c_mus.append(0.5 * change @ inverse @ change)
            log_ratio = math.log(np.linalg.det(sigma_i) / np.linalg.det(sigma))
            c_sigmas.append(0.5 * (np.trace(inverse @ sigma) - len(mean) + log_ratio))
            minors = [1.0, *(np.linalg.det(sigma[:i, :i]) for i in range(1, len(mean) + 1))]
            ratios = [x / y for x, y in zip(minors[1:], minors)]
            conditional = [0.5 * math.log(2 * math.pi * math.e * x) for x in ratios]
            bonuses.append(sum(min(x, math.log(2)) for x in conditional))

    critic_loss, improvement = np.mean(errors), np.mean(improvements)
    if args.constraint == "entropy":
        bonus = args.entropy_scale * np.mean(bonuses)
        return [critic_loss, -(improvement + bonus), 0.0], traces
    if args.normalise_advantage:
        improvement = improvement / math.sqrt(np.mean(variances))
    eta_mu, eta_sigma = agent.log_eta_mu.exp().item(), agent.log_eta_sigma.exp().item()
    bounds = eta_mu * (args.epsilon_mu - np.mean(c_mus))
    bounds += eta_sigma * (args.epsilon_sigma - np.mean(c_sigmas))
    return [critic_loss, -(improvement + bounds), bounds], traces


MODES = {
    "default": {},
    "paper": dict(normalise_advantage=False),
    "EPG": dict(constraint="entropy"),
    "actor-critic": dict(constraint="entropy", policy_samples=1),
    "one sample": dict(num_samples=1),
    "one of four samples": dict(policy_samples=1),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_three_losses_are_those_of_a_slow_second_implementation(mode):
    inputs = learner(gamma=0.9, entropy_scale=0.2, **MODES[mode])
    losses, metrics = script.parametric_losses(*inputs)
    slow, traces = slow_losses(*inputs)
    assert [x.item() for x in losses.values()] == pytest.approx(slow, rel=1e-9)
    assert metrics["mpo/trace"].item() == pytest.approx(np.mean(traces), rel=1e-9)
    # clipped and unclipped traces were both there
    assert 1 in traces and any(0.1 < c < 0.9 for c in traces)


# ---- Its settings.
def test_paper_restores_what_the_paper_prints_for_the_parametric_variant():
    args = script.parse_args(["--paper"])
    printed = dict(policy_layers=(100, 100), critic_layers=(200, 200), gamma=0.99)
    printed |= dict(epsilon_mu=0.1, epsilon_sigma=1e-4, constraint="kl", covariance="full")
    printed |= dict(learning_rate=5e-4, policy_learning_rate=5e-4, normalise_advantage=False)
    printed |= dict(target_period=1000, policy_period=1000)
    assert {name: getattr(args, name) for name in printed} == printed


def test_help_says_which_target_each_period_copies(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    words = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    for flag, network in (("--target-period", "critic"), ("--policy-period", "policy")):
        sentence = re.search(f"{flag} INT (.*?) --", words)[1]
        assert f"copies of the target {network}" in sentence


def test_the_policys_gradient_has_one_action_or_all_that_are_sampled(capsys):
    for number in (0, 1):
        assert script.parse_args(["--policy-samples", str(number)]).policy_samples == number
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["--policy-samples", "2"])
    assert stop.value.code == 2 and "--policy-samples" in capsys.readouterr().err


ABLATIONS = {
    "EPG + Retrace": dict(constraint="entropy"),
    "actor-critic + Retrace": dict(constraint="entropy", policy_samples=1),
    "one sample under the constraint": dict(num_samples=1),
    "as printed": dict(paper=True),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_ablation_trains_from_the_command_line(name, tmp_path):
    train(script, tiny(run_dir="run", **ABLATIONS[name]), tmp_path)
    table = rows(tmp_path / "run")
    moved = {row["mpo/eta_mu"] for row in table} != {"1.0"}
    assert len(table) == 3
    assert moved == ("Retrace" not in name)  # without a constraint there is nothing to multiply
    assert all(math.isfinite(float(row["losses/policy"])) for row in table)


def test_each_target_is_copied_at_its_own_period(tmp_path):
    never = 10**6
    for kept, copied, periods in (
        ("policy", "critic", dict(policy_period=never, target_period=1)),
        ("critic", "policy", dict(policy_period=1, target_period=never)),
    ):
        train(script, tiny(run_dir=kept, total_timesteps=150, **periods), tmp_path)
        agent = torch.load(tmp_path / kept / "checkpoint.pt", weights_only=True)["agent"]
        equal = {
            name: all(
                torch.equal(agent[key], agent[f"target_{key}"])
                for key in agent
                if key.startswith(f"{name}.")
            )
            for name in (kept, copied)
        }
        assert equal == {kept: False, copied: True}
