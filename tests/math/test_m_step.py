"""M-step: the weighted likelihood, the two bounds and their Lagrange multipliers."""

import math

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import normal, numbers, quadrature, random_gaussian
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch.distributions import MultivariateNormal, kl_divergence

with_gaussian = pytest.mark.parametrize(
    "script", scripts_with("gaussian_log_prob", "kl_mean", "kl_covariance")
)
with_m_step = pytest.mark.parametrize(
    "script", scripts_with("gaussian_log_prob", "kl_mean", "improved_policy", "lagrangian")
)
with_lagrangian = pytest.mark.parametrize("script", scripts_with("lagrangian"))
seeds = given(seed=st.integers(0, 10**6), size=st.integers(1, 5))


def assert_close(x, y, tolerance=1e-9):
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# ---- Densities.
@with_gaussian
@seeds
def test_the_log_density_is_that_of_the_multivariate_normal(script, seed, size):
    generator = numbers(seed)
    mean, cholesky = random_gaussian(generator, 3, 4, size=size)
    actions = normal(generator, 3, 4, 6, size)
    pi = MultivariateNormal(mean.unsqueeze(-2), scale_tril=cholesky.unsqueeze(-3))
    log_prob = script.gaussian_log_prob(mean, cholesky, actions)
    assert log_prob.shape == (3, 4, 6)
    assert_close(log_prob, pi.log_prob(actions))
    assert_close(script.log_det(cholesky), torch.linalg.det(cholesky).log())


@with_gaussian
def test_of_one_state_without_a_batch_it_is_the_same(script):
    mean, cholesky = random_gaussian(numbers(1))
    actions = normal(numbers(2), 5, 2)
    exact = MultivariateNormal(mean, scale_tril=cholesky).log_prob(actions)
    assert_close(script.gaussian_log_prob(mean, cholesky, actions), exact)


# ---- The two bounds.
@with_gaussian
@seeds
def test_c_mu_plus_c_sigma_is_the_kl_from_pi_i_to_pi(script, seed, size):
    generator = numbers(seed)
    old, new = (random_gaussian(generator, 3, size=size) for _ in range(2))
    c = script.kl_mean(old[0], *new) + script.kl_covariance(old[1], new[1])
    pi_i, pi = (MultivariateNormal(mean, scale_tril=cholesky) for mean, cholesky in (old, new))
    assert_close(c, kl_divergence(pi_i, pi), 1e-7)


@with_gaussian
def test_that_kl_is_the_forward_one_and_far_from_the_reverse(script):
    narrow, wide = 0.5 * torch.eye(2).double(), 2 * torch.eye(2).double()
    forward, reverse = 1 / 16 - 1 + math.log(16), 16 - 1 - math.log(16)
    assert script.kl_covariance(narrow, wide).item() == pytest.approx(forward, rel=1e-12)
    assert reverse > 5 * forward


@with_gaussian
def test_c_mu_measures_with_the_new_covariance_and_c_sigma_has_the_determinants(script):
    generator = numbers(5)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    matrices = cholesky_i @ cholesky_i.mT, cholesky @ cholesky.mT, mean - mean_i
    sigma_i, sigma, change = (x.numpy() for x in matrices)
    c_mu = 0.5 * change @ np.linalg.inv(sigma) @ change
    assert_close(script.kl_mean(mean_i, mean, cholesky), c_mu)
    log_ratio = math.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
    c_sigma = 0.5 * (np.trace(np.linalg.inv(sigma) @ sigma_i) - 2 + log_ratio)
    assert_close(script.kl_covariance(cholesky_i, cholesky), c_sigma)


@with_gaussian
def test_c_mu_is_zero_where_the_mean_stays_and_c_sigma_where_the_covariance_does(script):
    """The paper prints the two under each other's names."""
    generator = numbers(6)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    assert script.kl_mean(mean_i, mean_i, cholesky) == 0
    assert script.kl_mean(mean_i, mean, cholesky_i) > 0.01
    assert abs(script.kl_covariance(cholesky_i, cholesky_i)) < 1e-12
    assert script.kl_covariance(cholesky_i, cholesky) > 0.01


@with_gaussian
@seeds
def test_the_kl_of_the_parametric_e_step_is_the_same_pair_with_the_roles_exchanged(
    script, seed, size
):
    """KL(q || pi_i): the mean's part has Sigma_i^-1, the covariance's tr(Sigma_i^-1 Sigma_q)."""
    generator = numbers(seed)
    old, new = (random_gaussian(generator, size=size) for _ in range(2))
    c = script.kl_mean(new[0], *old) + script.kl_covariance(new[1], old[1])
    pi_i, q = (MultivariateNormal(mean, scale_tril=cholesky) for mean, cholesky in (old, new))
    assert_close(c, kl_divergence(q, pi_i), 1e-7)


@with_gaussian
def test_the_kl_of_a_small_step_is_half_the_step_squared_in_the_fisher_metric(script):
    """KL(pi_theta || pi_theta+d) = 1/2 d^T F d + O(|d|^3), F = E[score score^T] by quadrature."""
    generator = numbers(7)
    mean, cholesky = random_gaussian(generator)
    row, column = torch.tril_indices(2, 2)
    theta = torch.cat([mean, cholesky[row, column]])
    z, log_weights = quadrature(nodes=10)

    def gaussian(theta):
        return theta[:2], torch.zeros(2, 2).double().index_put((row, column), theta[2:])

    def log_probs(theta):
        return script.gaussian_log_prob(*gaussian(theta), mean + z @ cholesky.mT)

    scores = torch.autograd.functional.jacobian(log_probs, theta)
    fisher = scores.mT @ (log_weights.exp().unsqueeze(-1) * scores)
    direction = normal(generator, 5)
    exact, errors = 0.5 * (direction @ fisher @ direction).item(), []
    for h in (1e-2, 1e-3, 1e-4):
        moved, turned = gaussian(theta + h * direction)
        kl = script.kl_mean(mean, moved, turned) + script.kl_covariance(cholesky, turned)
        errors.append(kl.item() / h**2 - exact)
    assert abs(errors[-1]) < 1e-3 * exact
    assert errors[1] / errors[0] == pytest.approx(0.1, rel=0.1)
    assert errors[2] / errors[1] == pytest.approx(0.1, rel=0.1)


# ---- The maximisers.
class Gaussian(torch.nn.Module):
    """A mean and a Cholesky factor to move by gradient."""

    def __init__(self, mean, cholesky):
        super().__init__()
        self.mean = torch.nn.Parameter(mean.clone())
        self.raw = torch.nn.Parameter(cholesky.tril(-1) + cholesky.diagonal().log().diag())

    def forward(self):
        return self.mean, self.raw.tril(-1) + self.raw.diagonal().exp().diag()


@with_gaussian
@pytest.mark.parametrize("seed", range(2))
def test_with_loose_bounds_the_maximiser_is_the_weighted_mean_and_covariance(script, seed):
    generator = numbers(seed)
    pi = Gaussian(*random_gaussian(generator))
    actions, weights = normal(generator, 30, 2), normal(generator, 30).softmax(-1)
    options = dict(max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    optimiser = torch.optim.LBFGS(pi.parameters(), **options)

    def loss():
        optimiser.zero_grad()
        value = -(weights * script.gaussian_log_prob(*pi(), actions)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    mean, cholesky = (x.detach() for x in pi())
    weighted_mean = weights @ actions
    away = actions - weighted_mean
    assert_close(mean, weighted_mean, 1e-5)
    assert_close(cholesky @ cholesky.mT, torch.einsum("m,ma,mb->ab", weights, away, away), 1e-5)


@with_lagrangian
@pytest.mark.parametrize("kl, direction", [(0.3, 1), (0.1, -1)], ids=["violated", "kept"])
def test_a_multiplier_rises_while_its_bound_is_violated_and_the_policy_is_always_pulled_back(
    script, kl, direction
):
    eta = torch.tensor(2.0, requires_grad=True)
    kl = torch.tensor(kl, requires_grad=True)
    for_multiplier, for_policy = script.lagrangian(eta, 0.2, kl)
    assert for_multiplier.item() == for_policy.item() == pytest.approx(2 * (0.2 - kl.item()))
    slope, none = torch.autograd.grad(for_multiplier, (eta, kl), allow_unused=True)
    assert none is None and slope.item() == pytest.approx(0.2 - kl.item())
    assert -slope.sign().item() == direction
    none, pull = torch.autograd.grad(for_policy, (eta, kl), allow_unused=True)
    assert none is None and pull.item() == -2.0


BOUNDS = {
    "both bind": (0.02, 0.01),
    "mean binds": (0.02, 10.0),
    "covariance binds": (10.0, 0.01),
    "none": (10.0, 10.0),
    "jointly": (0.02,),
}


@with_m_step
@pytest.mark.parametrize("case", BOUNDS)
def test_on_a_bandit_a_binding_bound_has_a_positive_multiplier_and_a_slack_one_none(script, case):
    """Descent-ascent on the Lagrangian ends at the optimum that SLSQP finds by other formulas."""
    epsilons = BOUNDS[case]
    generator = numbers(8)
    mean_i, cholesky_i = random_gaussian(generator)
    z, log_prior = quadrature(nodes=12)
    actions = mean_i + z @ cholesky_i.mT
    q_top = mean_i + 1.0  # where the quadratic Q is greatest
    weights = script.improved_policy(1.5, -(actions - q_top).square().sum(-1), log_prior)

    pi = Gaussian(mean_i, cholesky_i)
    log_etas = torch.zeros(len(epsilons), dtype=torch.float64, requires_grad=True)
    rates = {"policy": 0.03, "multipliers": 0.09}
    groups = [{"params": pi.parameters()}, {"params": [log_etas]}]
    optimiser = torch.optim.Adam(groups, betas=(0.5, 0.9))
    for step in range(600):
        for group, rate in zip(optimiser.param_groups, rates.values()):
            group["lr"] = rate * 0.985 ** max(0, step - 200)
        mean, cholesky = pi()
        likelihood = (weights * script.gaussian_log_prob(mean, cholesky, actions)).sum()
        c = [script.kl_mean(mean_i, mean, cholesky), script.kl_covariance(cholesky_i, cholesky)]
        c = [sum(c)] if case == "jointly" else c
        terms = zip(*(script.lagrangian(*term) for term in zip(log_etas.exp(), epsilons, c)))
        for_multipliers, for_policy = map(sum, terms)
        optimiser.zero_grad()
        (for_multipliers - (likelihood + for_policy)).backward()
        optimiser.step()

    for name, eta, kl, epsilon in zip(("mean", "covariance"), log_etas.exp(), c, epsilons):
        if case in ("both bind", f"{name} binds", "jointly"):
            assert kl.item() == pytest.approx(epsilon, rel=3e-3) and eta > 0.1
        else:
            assert kl.item() < epsilon / 2 and eta < 1e-3

    mean, sigma = constrained_optimum(mean_i, cholesky_i, actions, weights, epsilons)
    assert_close(pi()[0].detach(), mean, 3e-3)
    assert_close((pi()[1] @ pi()[1].mT).detach(), sigma, 3e-3)


def constrained_optimum(mean_i, cholesky_i, actions, weights, epsilons):
    """The M-step's program in numpy, over mu and the three entries of L."""
    mean_i, l_i, actions, w = (x.numpy() for x in (mean_i, cholesky_i, actions, weights))
    sigma_i = l_i @ l_i.T

    def unpack(x):
        factor = np.array([[x[2], 0], [x[3], x[4]]])
        return x[:2], factor @ factor.T

    def objective(x):
        mean, sigma = unpack(x)
        away = actions - mean
        distance = np.einsum("ma,ab,mb->m", away, np.linalg.inv(sigma), away)
        return w @ (0.5 * distance) + 0.5 * np.log(np.linalg.det(sigma))

    def room(x):
        mean, sigma = unpack(x)
        inverse, change = np.linalg.inv(sigma), mean - mean_i
        log_ratio = np.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
        c_mu = 0.5 * change @ inverse @ change
        c_sigma = 0.5 * (np.trace(inverse @ sigma_i) - 2 + log_ratio)
        c = [c_mu, c_sigma] if len(epsilons) == 2 else [c_mu + c_sigma]
        return np.subtract(epsilons, c)

    start = [*mean_i, l_i[0, 0], l_i[1, 0], l_i[1, 1]]
    constraints, options = {"type": "ineq", "fun": room}, {"ftol": 1e-12, "maxiter": 500}
    found = minimize(objective, start, method="SLSQP", constraints=constraints, options=options)
    assert found.success
    return unpack(found.x)
