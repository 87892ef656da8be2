"""docs/misprints.md: the tests it names exist, and its numbers are the ones computed."""

import re

import pytest
from conftest import ROOT, scripts_with
from test_propositions import COUNTEREXAMPLES, iteration, j, slope

PAGE = " ".join((ROOT / "docs" / "misprints.md").read_text().split())


def test_every_test_that_the_page_names_exists():
    source = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(set(named)) > 15
    assert [name for name in named if f"def {name}(" not in source] == []


@pytest.mark.parametrize("script", scripts_with("improved_policy"))
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_the_page_shows_the_loss_of_each_counterexample_as_computed(script, name):
    mdp, theta = COUNTEREXAMPLES[name]()
    for beta in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        assert f"| {beta:g} | {beta * slope(script, mdp, theta, beta):.3g} |" in PAGE
    pi_i, q_i, pi_next, q_next, gradient = iteration(script, mdp, theta, beta)
    before = j(mdp, pi_i, q_i)
    assert f"J(theta_i, q_i) = {before:.3f}" in PAGE and f"norm is {gradient.norm():.2f}" in PAGE
    by_theta, by_q = (j(mdp, pi_next, q_i) - before) / beta, (j(mdp, pi_i, q_next) - before) / beta
    assert f"{by_theta:.2f} beta, and q_i to q_{{i+1}} alone {by_q:.2f} beta" in PAGE


@pytest.mark.parametrize("script", scripts_with("make_env", "gaussian_log_prob"))
def test_the_walker_has_six_actions_and_24_observations(script):
    env = script.make_env(script.Args(env_id="dm_control/walker-walk-v0"))
    assert env.action_space.shape == (6,) and env.observation_space.shape == (24,)
    env.close()
