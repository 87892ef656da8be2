"""docs/paper-to-code.md: the tests it names exist, and its numbers are the ones computed."""

import re

import pytest
from conftest import ROOT, scripts_with
from test_propositions import COUNTEREXAMPLES, iteration, j, slope

PAGE = " ".join((ROOT / "docs" / "paper-to-code.md").read_text().split())


def test_every_test_that_a_page_names_exists():
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {page.name: re.findall(r"`(test_\w+)`", page.read_text()) for page in pages}
    assert len(set(named["paper-to-code.md"])) > 15
    missing = [
        f"{page}: {name}"
        for page, names in named.items()
        for name in names
        if f"def {name}(" not in source
    ]
    assert missing == []


@pytest.mark.parametrize("script", scripts_with("improved_policy")[:1])
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_the_page_shows_the_loss_of_each_counterexample_as_computed(script, name):
    mdp, theta = COUNTEREXAMPLES[name]()
    for beta in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        assert f"| {beta:g} | {beta * slope(script, mdp, theta, beta):.3g} |" in PAGE
    pi_i, q_i, pi_next, q_next, gradient = iteration(script, mdp, theta, beta)
    before = j(mdp, pi_i, q_i)
    assert f"J(theta_i, q_i) = {before:.3f}" in PAGE
    assert f"norm is {gradient.norm():.2f}" in PAGE
    by_theta = (j(mdp, pi_next, q_i) - before) / beta
    by_q = (j(mdp, pi_i, q_next) - before) / beta
    assert f"{by_theta:.2f} beta, and q_i to q_{{i+1}} alone {by_q:.2f} beta" in PAGE


@pytest.mark.parametrize("script", scripts_with("make_env", "gaussian_log_prob"))
def test_the_walker_has_six_actions_and_24_observations(script):
    env = script.make_env(script.Args(env_id="dm_control/walker-walk-v0"))
    assert env.action_space.shape == (6,) and env.observation_space.shape == (24,)
    env.close()
