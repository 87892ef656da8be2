"""The Lagrange multipliers as gradient steps move them: their ends, and the way back from there."""

import functools
import itertools
import math

import helpers
import pytest
import torch
from conftest import scripts_with

all_scripts = pytest.mark.parametrize("script", scripts_with("lagrangian", "Agent", "main"))
trained = functools.cache(helpers.trained)  # once for each script
CEILING, FLOOR, RATE = 2e4, 1e-6, 2e-3


def own_optimiser(script, agent):
    """Adam for the multipliers of this agent, with the settings that main() gives it."""
    settings = trained(script)[1]["optimiser"]["param_groups"][2]
    settings = {name: value for name, value in settings.items() if name != "params"}
    return torch.optim.Adam([{**settings, "params": agent.parameters(recurse=False)}])


def one_multiplier(script, start):
    return script.Agent(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), eta=start)


@all_scripts
def test_policy_critic_and_multipliers_are_all_moved_each_at_its_own_rate(script):
    args, saved = trained(script)
    groups, agent = saved["optimiser"]["param_groups"], saved["agent"]
    rates = [args.policy_learning_rate, args.learning_rate, RATE]
    assert [group["lr"] for group in groups] == rates
    moved = [saved["optimiser"]["state"][i]["exp_avg"] for group in groups for i in group["params"]]
    names = [name for name in agent if name.startswith("policy.")]
    names += [name for name in agent if name.startswith("critic.")]
    names += [name for name in agent if name.startswith("log_")]
    others = {name.split(".")[0] for name in set(agent) - set(names)}
    assert others == {"target_policy", "target_critic"}
    assert [x.shape for x in moved] == [agent[name].shape for name in names]


@all_scripts
@pytest.mark.parametrize("kl, end", [(2.0, CEILING), (0.0, FLOOR)], ids=["violated", "slack"])
def test_a_multiplier_whose_bound_cannot_be_kept_or_never_binds_rests_at_an_end(
    script, step, kl, end
):
    agent = one_multiplier(script, start=1.0)
    agent.critic.weight.data.fill_(100.0)  # beyond the ends, which are the multipliers' own
    optimiser = torch.optim.Adam(agent.parameters(recurse=False), lr=1.0, betas=(0.0, 0.0))
    path = []
    for _ in range(25):
        losses = {"multipliers": script.lagrangian(agent.log_eta.exp(), 1.0, torch.tensor(kl))[0]}
        step(agent, optimiser, losses)
        path.append(agent.log_eta.item())
    assert path[0] == pytest.approx(math.copysign(1, math.log(end)), rel=1e-6)
    assert path[-2] == path[-1] == pytest.approx(math.log(end), rel=1e-6)
    assert agent.critic.weight.item() == 100.0


@all_scripts
def test_a_multiplier_that_needs_ten_thousand_is_not_cut_off(script, step):
    """Maximise 14.1 x under x^2/2 <= 1e-6: x = 14.1 / eta, and eta = 14.1 / sqrt(2e-6) = 1e4."""
    epsilon, agent = 1e-6, one_multiplier(script, start=4000.0)
    gain = 1e4 * math.sqrt(2 * epsilon)
    optimiser = own_optimiser(script, agent)
    for _ in range(1500):
        eta = agent.log_eta.exp()
        x = gain / eta.detach()  # the exact M-step
        losses = {"multipliers": script.lagrangian(eta, epsilon, x.square() / 2)[0]}
        step(agent, optimiser, losses)
    assert agent.log_eta.exp().item() == pytest.approx(1e4, rel=0.01)


@all_scripts
def test_a_multiplier_thrown_to_the_ceiling_by_a_burst_comes_back_within_2000_updates(script, step):
    """KL about its bound, then ten times it until the ceiling, then none: down to a fiftieth."""
    epsilon, agent = 1e-4, one_multiplier(script, start=5000.0)
    optimiser = own_optimiser(script, agent)

    def move(kl):
        losses = {"multipliers": script.lagrangian(agent.log_eta.exp(), epsilon, kl * epsilon)[0]}
        step(agent, optimiser, losses)
        return agent.log_eta.exp().item()

    for kl in 2 * torch.rand(200):
        move(kl)
    while move(torch.tensor(10.0)) < 0.999 * CEILING:
        pass
    path = [move(torch.tensor(0.0)) for _ in range(2000)]
    assert path[-1] < CEILING / 50


@all_scripts
def test_no_step_of_a_multiplier_is_longer_than_its_rate_and_a_burst_is_soon_forgotten(script):
    """Gradients of 1, then a burst of 10 for twenty updates, then its opposite."""
    agent = one_multiplier(script, start=1.0)
    optimiser, path = own_optimiser(script, agent), [0.0]
    for gradient in [1.0] * 30 + [-10.0] * 20 + [1.0] * 100:
        agent.log_eta.grad = torch.full_like(agent.log_eta, gradient)
        optimiser.step()
        path.append(agent.log_eta.item())
    steps = [after - before for before, after in itertools.pairwise(path)]
    assert max(map(abs, steps)) <= RATE * (1 + 1e-3)
    assert min(steps[100:]) < -0.99 * RATE  # full speed back
