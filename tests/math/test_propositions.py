"""The appendix's three propositions on tabular MDPs, and counterexamples to a part of the third."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import categorical_kl, normal, number, numbers

GAMMA, ALPHA = 0.9, 0.1
with_e_step = pytest.mark.parametrize("script", scripts_with("improved_policy"))
seeds = pytest.mark.parametrize("seed", range(5))


@dataclass
class MDP:
    p: torch.Tensor  # [S, A, S], p(y|x, a)
    r: torch.Tensor  # [S, A]

    def transitions(self, policy):
        return torch.einsum("xa,xay->xy", policy, self.p)

    def bellman(self, q, v, pi=None, alpha=ALPHA):
        """T^q V, or with pi the regularised T_alpha^{pi,q} V."""
        reward = self.r if pi is None else self.r - alpha * (q / pi).log()
        return (q * (reward + GAMMA * self.p @ v)).sum(1)

    def value(self, q, pi=None, alpha=ALPHA):
        """V^q, or with pi the regularised V_alpha^{pi,q}: a series in the transitions of q."""
        visits = torch.linalg.inv(torch.eye(len(self.r)).double() - GAMMA * self.transitions(q))
        return visits @ self.bellman(q, torch.zeros(len(self.r)).double(), pi, alpha)

    def action_value(self, pi):
        """Q^pi = r + gamma E V^pi(y): of the next state, where the main text prints V(s)."""
        return self.r + GAMMA * self.p @ self.value(pi)


def random_mdp(seed, states=4, actions=3, concentration=1.0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(concentration * np.ones(states), size=(states, actions))
    r, logits = rng.normal(size=(2, states, actions))
    return MDP(torch.as_tensor(p), torch.as_tensor(r)), torch.as_tensor(logits)


def random_policy(seed, states=4, actions=3):
    return torch.as_tensor(np.random.default_rng(seed).dirichlet(np.ones(actions), size=states))


def e_step(script, mdp, pi, alpha=ALPHA):
    """q_i of the proposition, through the script's own E-step at the temperature alpha."""
    return script.improved_policy(alpha, mdp.action_value(pi), pi.log())


# ---- Proposition 1.
@pytest.mark.parametrize("script", scripts_with("improved_policy", "temperature_dual"))
@seeds
def test_regularisation_costs_alpha_kl_a_step_so_it_never_raises_a_value(script, seed):
    mdp, logits = random_mdp(seed)
    pi, v = random_policy(seed + 100), logits[:, 0]
    scores, mask = mdp.r + GAMMA * mdp.p @ v, torch.ones(4).double()
    best = script.improved_policy(ALPHA, scores, pi.log())  # the E-step's q, and any other
    for q in (best, random_policy(seed)):
        kl = categorical_kl(q, pi.log())
        torch.testing.assert_close(mdp.bellman(q, v) - mdp.bellman(q, v, pi), ALPHA * kl)
        visits = torch.linalg.inv(torch.eye(4).double() - GAMMA * mdp.transitions(q))
        torch.testing.assert_close(mdp.value(q) - mdp.value(q, pi), ALPHA * visits @ kl)
        assert (kl > 0).all()
    g = script.temperature_dual(number(ALPHA), scores, pi.log(), 0.0, mask)
    torch.testing.assert_close(mdp.bellman(best, v, pi).mean(), g)  # what the dual is made of


# ---- Proposition 2.
@pytest.mark.parametrize("script", scripts_with("retrace"))
@seeds
@pytest.mark.parametrize("regularised", [True, False])
def test_backups_from_anywhere_reach_the_value_whose_series_runs_in_the_transitions_of_q(
    script, seed, regularised
):
    """The backup is the script's own: Retrace with no trace, each state and action a window."""
    mdp, _ = random_mdp(seed)
    q, other = random_policy(seed), random_policy(seed + 100)
    pi = other if regularised else None
    reward = mdp.r - ALPHA * (q / other).log() if regularised else mdp.r
    v = torch.full((4,), 1e3).double()
    for _ in range(400):
        r, v_next, zero = (x.reshape(-1, 1) for x in (reward, mdp.p @ v, torch.zeros_like(reward)))
        backup = script.retrace(zero, v_next, r, torch.full_like(r, GAMMA), zero)
        v = (q * backup.reshape(4, 3)).sum(1)
    torch.testing.assert_close(v, mdp.value(q, pi), rtol=1e-10, atol=1e-10)
    # the proof of the third proposition writes P^pi instead: that is another function
    of_pi = torch.linalg.inv(torch.eye(4).double() - GAMMA * mdp.transitions(other))
    assert (of_pi @ (q * reward).sum(1) - v).abs().max() > 1e-2


@with_e_step
@seeds
def test_the_best_regularised_policy_makes_every_action_equally_good(script, seed):
    mdp, _ = random_mdp(seed)
    pi = random_policy(seed)
    v = torch.zeros(4).double()
    for _ in range(400):  # V = max_q T_alpha^{pi,q} V, whose maximiser is the E-step's q
        q = script.improved_policy(ALPHA, mdp.r + GAMMA * mdp.p @ v, pi.log())
        v = mdp.bellman(q, v, pi)
    for_all_actions = mdp.r - ALPHA * (q / pi).log() + GAMMA * mdp.p @ v
    torch.testing.assert_close(for_all_actions, v.unsqueeze(1).expand(4, 3), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mdp.value(q, pi), v, rtol=1e-9, atol=1e-9)
    assert all((mdp.value(random_policy(i), pi) <= v + 1e-9).all() for i in range(50))


def best_value(mdp):
    """V* by trying all deterministic policies."""
    choices = itertools.product(range(3), repeat=4)
    policies = (torch.eye(3).double()[list(choice)] for choice in choices)
    return torch.stack([mdp.value(policy) for policy in policies]).amax(0)


@with_e_step
@seeds
def test_as_alpha_vanishes_the_regularised_optimum_becomes_the_best_value_of_all(script, seed):
    mdp, _ = random_mdp(seed)
    pi, v = random_policy(seed), torch.zeros(4).double()
    for _ in range(400):
        v = mdp.bellman(script.improved_policy(1e-9, mdp.r + GAMMA * mdp.p @ v, pi.log()), v)
    best = best_value(mdp)
    torch.testing.assert_close(v, best, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((mdp.r + GAMMA * mdp.p @ best).amax(1), best, rtol=1e-9, atol=1e-9)


# ---- Proposition 3: the parts that hold.
@with_e_step
@seeds
def test_q_i_is_the_maximiser_of_the_regularised_bellman_operator_at_the_value_of_pi_i(
    script, seed
):
    mdp, _ = random_mdp(seed)
    pi = random_policy(seed)
    v, q = mdp.value(pi), e_step(script, mdp, pi)
    printed = pi * (mdp.action_value(pi) / ALPHA).exp()
    torch.testing.assert_close(q, printed / printed.sum(1, keepdim=True), rtol=1e-9, atol=1e-12)
    best = mdp.bellman(q, v, pi)
    assert all((mdp.bellman(random_policy(i), v, pi) < best).all() for i in range(200))
    nearby = (q.log() + 1e-3 * normal(numbers(seed), 200, 4, 3)).softmax(-1)
    assert all((mdp.bellman(other, v, pi) <= best + 1e-12).all() for other in nearby)


@with_e_step
@seeds
@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_the_e_step_improves_v_of_q_above_the_regularised_value_above_v_of_pi(script, seed, alpha):
    mdp, _ = random_mdp(seed)
    pi = random_policy(seed)
    q = e_step(script, mdp, pi, alpha)
    assert (mdp.value(q) >= mdp.value(q, pi, alpha) - 1e-10).all()
    assert (mdp.value(q, pi, alpha) >= mdp.value(pi) - 1e-10).all()


@with_e_step
@seeds
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_with_the_exact_m_step_j_never_falls_in_any_state_and_reaches_the_optimum(
    script, seed, alpha
):
    mdp, _ = random_mdp(seed)
    pi, before = random_policy(seed), torch.full((4,), -torch.inf).double()
    for _ in range(60):
        q = e_step(script, mdp, pi, alpha)
        after = mdp.value(q, pi, alpha)
        assert (after >= before - 1e-10).all()
        pi, before = q.clamp(min=1e-300), after  # pi_{i+1} = q_i
    assert (after <= best_value(mdp) + 1e-9).all()
    if alpha == 0.1:
        torch.testing.assert_close(after, best_value(mdp), rtol=1e-6, atol=1e-6)


# ---- Proposition 3: the part that does not.
def ladder():
    """Two states, two actions, a uniform policy. Below: wait for 0, or climb for -0.3, which
    succeeds one time in five. Above: leave for 0, or stay for 1."""
    p = [[[1.0, 0.0], [0.8, 0.2]], [[1.0, 0.0], [0.0, 1.0]]]
    r = [[0.0, -0.3], [0.0, 1.0]]
    return MDP(number(p), number(r)), torch.zeros(2, 2).double()


COUNTEREXAMPLES = {"ladder": ladder, "seed 7": lambda: random_mdp(7, concentration=0.1)}


def iteration(script, mdp, theta, beta, start=0):
    """As printed, for softmax policies: pi_i, q_i, pi_{i+1}, q_{i+1}, the M-step's gradient."""
    theta = theta.clone().requires_grad_()
    pi_i = theta.softmax(1).detach()
    q_i = e_step(script, mdp, pi_i)
    kl = (q_i * (q_i.log() - theta.log_softmax(1))).sum(1)
    visits = torch.linalg.inv(torch.eye(len(kl)).double() - GAMMA * mdp.transitions(pi_i))[start]
    (gradient,) = torch.autograd.grad(visits @ kl, theta)
    pi_next = (theta.detach() - beta * gradient).softmax(1)
    return pi_i, q_i, pi_next, e_step(script, mdp, pi_next), gradient


def j(mdp, pi, q, start=0):
    """J(theta, q) = V_alpha^{pi,q}(x_0)."""
    return mdp.value(q, pi)[start].item()


def slope(script, mdp, theta, beta):
    """(J(theta_{i+1}, q_{i+1}) - J(theta_i, q_i)) / beta."""
    pi_i, q_i, pi_next, q_next, _ = iteration(script, mdp, theta, beta)
    return (j(mdp, pi_next, q_next) - j(mdp, pi_i, q_i)) / beta


@with_e_step
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_with_the_printed_gradient_m_step_j_can_fall_however_small_the_step(script, name):
    mdp, theta = COUNTEREXAMPLES[name]()
    slopes = [slope(script, mdp, theta, beta) for beta in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]
    *_, gradient = iteration(script, mdp, theta, beta=0.1)
    assert gradient.norm() > 1  # so a gain of c g_i was promised
    assert all(s < -1 for s in slopes)
    errors = np.abs(np.array(slopes[:-1]) - slopes[-1])
    assert (errors[1:] < 0.2 * errors[:-1]).all()  # so the loss is linear in the step


@with_e_step
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_there_the_new_theta_alone_gains_and_the_new_q_loses_more(script, name):
    """q_{i+1} maximises T V^pi, not V^{pi,q}: J is not stationary in q, whose change counts."""
    mdp, theta = COUNTEREXAMPLES[name]()
    pi_i, q_i, pi_next, q_next, _ = iteration(script, mdp, theta, beta=1e-5)
    gain = j(mdp, pi_next, q_i) - j(mdp, pi_i, q_i)
    loss = j(mdp, pi_i, q_next) - j(mdp, pi_i, q_i)
    assert gain > 1e-5 and loss < -4 * gain


@pytest.mark.parametrize("script", scripts_with("improved_policy")[:1])  # a thousand MDPs: once
def test_it_falls_on_about_one_sparse_random_mdp_in_fifty_and_on_no_dense_one(script):
    def fallen(concentration):
        mdps = [random_mdp(seed, concentration=concentration) for seed in range(500)]
        return [seed for seed, mdp in enumerate(mdps) if slope(script, *mdp, 1e-4) < 0]

    assert fallen(0.1) == [7, 58, 153, 352, 376, 379, 408, 440, 498]
    assert fallen(1.0) == []


@with_e_step
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_the_exact_m_step_improves_even_there(script, name):
    mdp, theta = COUNTEREXAMPLES[name]()
    pi = theta.softmax(1)
    q = e_step(script, mdp, pi)
    assert (mdp.value(e_step(script, mdp, q), q) >= mdp.value(q, pi)).all()
