"""docs/misprints.md: the tests it names exist, and its numbers are the ones computed."""

import re

import pytest
from conftest import ROOT, scripts_with
from test_propositions import COUNTEREXAMPLES, gradient_m_step

PAGE = (ROOT / "docs" / "misprints.md").read_text()
BETAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def test_every_test_that_the_page_names_exists():
    source = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(set(named)) > 15
    assert [name for name in named if f"def {name}(" not in source] == []


@pytest.mark.parametrize("script", scripts_with("improved_policy"))
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_the_page_shows_the_loss_of_each_counterexample_as_computed(script, name):
    mdp, theta = COUNTEREXAMPLES[name]()
    for beta in BETAS:
        before, after, gradient = gradient_m_step(script, mdp, theta, beta)
        assert f"| {beta:g} | {after - before:.3g} |" in PAGE
    assert f"J(theta_i, q_i) = {before:.3f}" in PAGE and f"norm is {gradient.norm():.2f}" in PAGE


@pytest.mark.parametrize("script", scripts_with("make_env", "gaussian_log_prob"))
def test_the_walker_has_six_actions_and_24_observations(script):
    env = script.make_env(script.Args(env_id="dm_control/walker-walk-v0"))
    assert env.action_space.shape == (6,) and env.observation_space.shape == (24,)
    env.close()
