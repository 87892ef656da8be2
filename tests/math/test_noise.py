"""The noise that an episode is explored with: standard normal at each step, coloured over time."""

import math

import pytest
import torch
from conftest import scripts_with
from running import make_policy
from scipy.stats import kstest

STEPS, SEQUENCES = 64, 40_000  # the columns of one call are sequences of their own
with_noise = pytest.mark.parametrize("script", scripts_with("coloured_noise"))
exponents = pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])


@with_noise
@exponents
@pytest.mark.parametrize("steps", [STEPS, 9])
def test_every_step_of_the_noise_is_standard_normal_whatever_its_colour(script, exponent, steps):
    noise = script.coloured_noise(exponent, steps, SEQUENCES)
    assert noise.shape == (steps, SEQUENCES) and noise.dtype == torch.float32
    assert noise.mean(1).abs().max() < 5 / math.sqrt(SEQUENCES)
    assert (noise.square().mean(1) - 1).abs().max() < 5 * math.sqrt(2 / SEQUENCES)
    for t in (0, 1, steps // 2, steps - 1):
        assert kstest(noise[t].numpy(), "norm").pvalue > 1e-4


@with_noise
@exponents
def test_the_power_of_the_noise_falls_as_one_over_the_frequency_to_the_exponent(script, exponent):
    noise = script.coloured_noise(exponent, STEPS, SEQUENCES)
    power = torch.fft.rfft(noise, dim=0).abs().square().mean(1)
    frequency = torch.arange(1, STEPS // 2 + 1)
    flattened = power[1:] * frequency**exponent
    torch.testing.assert_close(flattened, flattened.mean().expand(STEPS // 2), rtol=0.04, atol=0)
    torch.testing.assert_close(power[0], power[1], rtol=0.04, atol=0)  # a constant: the slowest


@with_noise
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_with_exponent_zero_it_is_the_white_noise_that_was_drawn(script, steps):
    torch.manual_seed(3)
    noise = script.coloured_noise(0.0, steps, 6)
    torch.manual_seed(3)
    torch.testing.assert_close(noise, torch.randn(steps, 6), rtol=0, atol=1e-5)


@with_noise
@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_noises_of_two_actions_are_independent_at_every_lag(script, exponent):
    one, other = script.coloured_noise(exponent, STEPS, SEQUENCES).chunk(2, dim=1)
    for lag in range(STEPS):
        correlation = (one[0] * other[lag]).mean()
        assert abs(correlation) < 5 / math.sqrt(SEQUENCES // 2)


@with_noise
@pytest.mark.parametrize("exponent", [0.0, 2.0])
def test_an_episode_is_explored_with_one_sequence_of_this_noise(script, exponent):
    """(a - mu) in units of the policy's factor, over the whole time limit."""
    args = script.Args(env_id="Pendulum-v1", noise_exponent=exponent, policy_layers=(8, 8))
    env = script.make_env(args)
    policy = make_policy(script, env, args)
    torch.manual_seed(5)
    episode = script.run_episode(env, policy, args, 0)
    torch.manual_seed(5)
    noise = script.coloured_noise(exponent, 200, 1)
    with torch.no_grad():
        mean, cholesky = policy(episode.state[:-1])
    torch.testing.assert_close(episode.action[:-1], mean + cholesky[:, 0] * noise)


@with_noise
def test_an_evaluation_with_the_mean_action_draws_no_random_number(script, tmp_path):
    """So that evaluating more or less often leaves the training as it is."""
    args = script.Args(env_id="Pendulum-v1", time_limit=20, policy_layers=(8, 8), eval_episodes=2)
    env = script.make_env(args)
    policy, state = make_policy(script, env, args), torch.get_rng_state()
    assert len(script.evaluate(env, policy, args, tmp_path)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    script.run_episode(env, policy, args, 0)
    assert not torch.equal(torch.get_rng_state(), state), "exploring does"
