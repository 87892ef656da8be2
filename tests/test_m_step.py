"""M-step: the weighted likelihood, the two decouplings of its constraint, and the Lagrange multipliers."""

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
    "script", scripts_with("gaussian_log_prob", "whiten", "kl_mean", "kl_covariance")
)
with_m_step = pytest.mark.parametrize("script", scripts_with("m_step_terms", "weighted_moments"))
with_lagrangian = pytest.mark.parametrize("script", scripts_with("lagrangian"))
seeds = given(seed=st.integers(0, 10**6), size=st.integers(1, 5))


def assert_close(x, y, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=tolerance, atol=tolerance)


def weighted_samples(seed, size=2, samples=30):
    """pi_i, noise z [M, A], actions mu_i + L_i z and weights of them that sum to 1."""
    generator = numbers(seed)
    mean_i, cholesky_i = random_gaussian(generator, size=size)
    z, weights = normal(generator, samples, size), normal(generator, samples).softmax(-1)
    return mean_i, cholesky_i, z, mean_i + z @ cholesky_i.mT, weights


# ------------------------------------------------------------------------------------------------ densities and moments
@with_gaussian
@seeds
def test_the_log_density_is_that_of_the_multivariate_normal(script, seed, size):
    generator = numbers(seed)
    mean, cholesky = random_gaussian(generator, 3, size=size)
    action = normal(generator, 3, size)
    exact = MultivariateNormal(mean, scale_tril=cholesky).log_prob(action)
    assert_close(script.gaussian_log_prob(mean, cholesky, action), exact)
    z = normal(generator, 3, size)
    drawn = mean + (cholesky @ z.unsqueeze(-1)).squeeze(-1)
    by_noise = script.standard_normal_log_prob(z) - script.log_det(cholesky)
    assert_close(by_noise, MultivariateNormal(mean, scale_tril=cholesky).log_prob(drawn))
    assert_close(script.log_det(cholesky), torch.linalg.det(cholesky).log())


@with_m_step
@seeds
def test_the_expected_log_density_from_moments_is_the_weighted_sum_over_samples(script, seed, size):
    mean_i, cholesky_i, z, actions, weights = weighted_samples(seed, size)
    mean, cholesky = random_gaussian(numbers(seed + 1), size=size)
    d, p = script.whiten(mean_i, cholesky_i, mean, cholesky)
    from_moments = script.expected_log_prob(d, p, script.log_det(cholesky), *script.weighted_moments(weights, z))
    assert_close(from_moments, (weights * script.gaussian_log_prob(mean, cholesky, actions)).sum())


@with_m_step
def test_the_moments_are_weighted_sums_over_the_samples_of_each_state(script):
    generator = numbers(0)
    weights, z = normal(generator, 3, 4, 7), normal(generator, 3, 4, 7, 2)
    z_bar, s = script.weighted_moments(weights, z)
    assert_close(z_bar, torch.einsum("btm,btma->bta", weights, z))
    assert_close(s, torch.einsum("btm,btma,btmc->btac", weights, z, z))


# ------------------------------------------------------------------------------------------------------ the constraints
def no_moments(size=2):
    """Moments for tests that look at the constraints alone."""
    return torch.zeros(size).double(), torch.zeros(size, size).double()


@with_m_step
@seeds
def test_the_papers_c_mu_plus_c_sigma_is_the_kl_from_pi_i_to_pi(script, seed, size):
    generator = numbers(seed)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator, 3, size=size) for _ in range(2))
    _, c_mu, c_sigma = script.m_step_terms("paper", mean_i, cholesky_i, mean, cholesky, *no_moments(size))
    pi_i, pi = MultivariateNormal(mean_i, scale_tril=cholesky_i), MultivariateNormal(mean, scale_tril=cholesky)
    assert_close(c_mu + c_sigma, kl_divergence(pi_i, pi), 1e-7)


@with_m_step
def test_that_kl_is_the_forward_one_and_far_from_the_reverse(script):
    mean, narrow, wide = torch.zeros(2).double(), 0.5 * torch.eye(2).double(), 2 * torch.eye(2).double()
    _, c_mu, c_sigma = script.m_step_terms("paper", mean, narrow, mean, wide, *no_moments())
    forward, reverse = 1 / 16 - 1 + math.log(16), 16 - 1 - math.log(16)
    assert (c_mu + c_sigma).item() == pytest.approx(forward, rel=1e-12) and reverse > 5 * forward


@with_m_step
@pytest.mark.parametrize("decoupling", ["paper", "followup", "joint"])
def test_c_mu_measures_with_the_new_covariance_in_the_paper_and_with_the_old_in_the_followup(script, decoupling):
    generator = numbers(5)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    _, c_mu, c_sigma = script.m_step_terms(decoupling, mean_i, cholesky_i, mean, cholesky, *no_moments())
    sigma_i, sigma, change = (x.numpy() for x in (cholesky_i @ cholesky_i.mT, cholesky @ cholesky.mT, mean - mean_i))
    metric = sigma_i if decoupling == "followup" else sigma
    assert_close(c_mu, 0.5 * change @ np.linalg.inv(metric) @ change)
    log_ratio = math.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
    assert_close(c_sigma, 0.5 * (np.trace(np.linalg.inv(sigma) @ sigma_i) - 2 + log_ratio))


@with_m_step
@pytest.mark.parametrize("decoupling", ["paper", "followup"])
def test_c_mu_is_zero_where_only_the_covariance_moves_and_c_sigma_where_only_the_mean_does(script, decoupling):
    """The paper prints the two under each other's names."""
    generator = numbers(6)
    (mean_i, cholesky_i), (mean, cholesky) = (random_gaussian(generator) for _ in range(2))
    _, c_mu, c_sigma = script.m_step_terms(decoupling, mean_i, cholesky_i, mean_i, cholesky, *no_moments())
    assert c_mu == 0 and c_sigma > 0.01
    _, c_mu, c_sigma = script.m_step_terms(decoupling, mean_i, cholesky_i, mean, cholesky_i, *no_moments())
    assert c_mu > 0.01 and abs(c_sigma) < 1e-12


@with_gaussian
@seeds
def test_the_kl_of_the_parametric_e_step_is_the_same_pair_with_the_roles_exchanged(script, seed, size):
    """KL(q || pi_i): the mean's part has Sigma_i^-1, the covariance's tr(Sigma_i^-1 Sigma_q)."""
    generator = numbers(seed)
    (mean_i, cholesky_i), (mean_q, cholesky_q) = (random_gaussian(generator, size=size) for _ in range(2))
    d, p = script.whiten(mean_q, cholesky_q, mean_i, cholesky_i)
    pi_i, q = MultivariateNormal(mean_i, scale_tril=cholesky_i), MultivariateNormal(mean_q, scale_tril=cholesky_q)
    assert_close(script.kl_mean(d) + script.kl_covariance(p), kl_divergence(q, pi_i), 1e-7)


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
        d, p = script.whiten(mean, cholesky, *gaussian(theta + h * direction))
        errors.append((script.kl_mean(d) + script.kl_covariance(p)).item() / h**2 - exact)
    assert abs(errors[-1]) < 1e-3 * exact
    assert errors[1] / errors[0] == pytest.approx(0.1, rel=0.1) and errors[2] / errors[1] == pytest.approx(0.1, rel=0.1)


# ------------------------------------------------------------------------------------------------------- the maximisers
class Gaussian(torch.nn.Module):
    """A mean and a Cholesky factor to move by gradient."""

    def __init__(self, mean, cholesky):
        super().__init__()
        self.mean = torch.nn.Parameter(mean.clone())
        self.raw = torch.nn.Parameter(cholesky.tril(-1) + cholesky.diagonal().log().diag())

    def forward(self):
        return self.mean, self.raw.tril(-1) + self.raw.diagonal().exp().diag()


@with_m_step
@pytest.mark.parametrize("decoupling", ["paper", "followup", "joint"])
@pytest.mark.parametrize("seed", range(2))
def test_with_loose_bounds_the_maximiser_is_the_weighted_mean_and_the_decouplings_own_covariance(
    script, decoupling, seed
):
    mean_i, cholesky_i, z, actions, weights = weighted_samples(seed)
    moments = script.weighted_moments(weights, z)
    pi = Gaussian(mean_i, cholesky_i)
    optimiser = torch.optim.LBFGS(pi.parameters(), max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = -script.m_step_terms(decoupling, mean_i, cholesky_i, *pi(), *moments)[0]
        value.backward()
        return value

    optimiser.step(loss)
    mean, cholesky = (x.detach() for x in pi())
    weighted_mean = weights @ actions
    about = mean_i if decoupling == "followup" else weighted_mean
    assert_close(mean, weighted_mean, 1e-5)
    assert_close(cholesky @ cholesky.mT, torch.einsum("m,ma,mb->ab", weights, actions - about, actions - about), 1e-5)


@with_lagrangian
@pytest.mark.parametrize("kl, direction", [(0.3, 1), (0.1, -1)], ids=["violated", "kept"])
def test_a_multiplier_rises_while_its_bound_is_violated_and_the_policy_is_always_pulled_back(script, kl, direction):
    eta = torch.tensor(2.0, requires_grad=True)
    kl = torch.tensor(kl, requires_grad=True)
    for_multiplier, for_policy = script.lagrangian(eta, 0.2, kl)
    assert for_multiplier.item() == for_policy.item() == pytest.approx(2 * (0.2 - kl.item()))
    slope, none = torch.autograd.grad(for_multiplier, (eta, kl), allow_unused=True)
    assert none is None and slope.item() == pytest.approx(0.2 - kl.item()) and -slope.sign().item() == direction
    none, pull = torch.autograd.grad(for_policy, (eta, kl), allow_unused=True)
    assert none is None and pull.item() == -2.0


BOUNDS = {"both bind": (0.02, 0.01), "mean binds": (0.02, 10.0), "covariance binds": (10.0, 0.01), "none": (10.0, 10.0)}


@with_m_step
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("decoupling", ["paper", "followup"])
def test_on_a_bandit_a_binding_bound_has_a_positive_multiplier_and_a_slack_one_none(script, decoupling, bounds):
    """Descent-ascent on the Lagrangian ends at the constrained optimum that SLSQP finds with numpy's formulas."""
    epsilon_mu, epsilon_sigma = BOUNDS[bounds]
    generator = numbers(8)
    mean_i, cholesky_i = random_gaussian(generator)
    z, log_prior = quadrature()
    actions = mean_i + z @ cholesky_i.mT
    away = actions - mean_i - 1.0
    weights = script.improved_policy(1.5, -away.square().sum(-1), log_prior)  # quadratic Q with its top at mu_i + 1
    moments = script.weighted_moments(weights, z)

    pi = Gaussian(mean_i, cholesky_i)
    log_etas = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rates = {"policy": 0.03, "multipliers": 0.09}
    optimiser = torch.optim.Adam([{"params": pi.parameters()}, {"params": [log_etas]}], betas=(0.5, 0.9))
    for step in range(600):
        for group, rate in zip(optimiser.param_groups, rates.values()):
            group["lr"] = rate * 0.985 ** max(0, step - 200)
        likelihood, c_mu, c_sigma = script.m_step_terms(decoupling, mean_i, cholesky_i, *pi(), *moments)
        of_mu = script.lagrangian(log_etas[0].exp(), epsilon_mu, c_mu)
        of_sigma = script.lagrangian(log_etas[1].exp(), epsilon_sigma, c_sigma)
        optimiser.zero_grad()
        (of_mu[0] + of_sigma[0] - (likelihood + of_mu[1] + of_sigma[1])).backward()
        optimiser.step()

    eta_mu, eta_sigma = log_etas.exp().tolist()
    for name, eta, c, epsilon in (
        ("mean", eta_mu, c_mu, epsilon_mu),
        ("covariance", eta_sigma, c_sigma, epsilon_sigma),
    ):
        if bounds in ("both bind", f"{name} binds"):
            assert c.item() == pytest.approx(epsilon, rel=3e-3) and eta > 0.1
        else:
            assert c.item() < epsilon / 2 and eta < 1e-3

    mean, sigma = constrained_optimum(decoupling, mean_i, cholesky_i, actions, weights, epsilon_mu, epsilon_sigma)
    assert_close(pi()[0].detach(), mean, 3e-3)
    assert_close((pi()[1] @ pi()[1].mT).detach(), sigma, 3e-3)


def constrained_optimum(decoupling, mean_i, cholesky_i, actions, weights, epsilon_mu, epsilon_sigma):
    """The M-step's program in numpy, over mu and the three entries of L."""
    mean_i, l_i, actions, w = (x.numpy() for x in (mean_i, cholesky_i, actions, weights))
    sigma_i = l_i @ l_i.T

    def unpack(x):
        factor = np.array([[x[2], 0], [x[3], x[4]]])
        return x[:2], factor @ factor.T

    def likelihood(mean, sigma):
        away = actions - mean
        return w @ (-0.5 * np.einsum("ma,ab,mb->m", away, np.linalg.inv(sigma), away)) - 0.5 * np.log(
            np.linalg.det(sigma)
        )

    def objective(x):
        mean, sigma = unpack(x)
        if decoupling == "followup":
            return -likelihood(mean, sigma_i) - likelihood(mean_i, sigma)
        return -likelihood(mean, sigma)

    def room(x):
        mean, sigma = unpack(x)
        inverse = np.linalg.inv(sigma)
        metric = np.linalg.inv(sigma_i) if decoupling == "followup" else inverse
        c_mu = 0.5 * (mean - mean_i) @ metric @ (mean - mean_i)
        log_ratio = np.log(np.linalg.det(sigma) / np.linalg.det(sigma_i))
        return [epsilon_mu - c_mu, epsilon_sigma - 0.5 * (np.trace(inverse @ sigma_i) - 2 + log_ratio)]

    start = [*mean_i, l_i[0, 0], l_i[1, 0], l_i[1, 1]]
    constraints = {"type": "ineq", "fun": room}
    found = minimize(objective, start, method="SLSQP", constraints=constraints, options={"ftol": 1e-12, "maxiter": 500})
    assert found.success
    return unpack(found.x)
