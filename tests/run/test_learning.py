"""It learns. Long trainings and their curves are in benchmark/; this is the smallest such run."""

import numpy as np
import pytest
import torch
from running import SINGLE, TASK, flags, make_policy, rows, together, train

SEEDS = (1, 2, 3)
SETTINGS = dict(env_id=TASK, time_limit=250, num_samples=10, window=5)
SETTINGS |= dict(policy_layers=(64, 64), critic_layers=(64, 64), eval_episodes=3)
TRAINING = dict(learning_rate=1e-3, policy_learning_rate=1e-3, target_period=50, batch_size=32)
TRAINING |= dict(learning_starts=500, total_timesteps=2000)


@pytest.fixture(scope="module", params=SINGLE)
def script(request):
    return request.param


def untrained(script, seed):
    """Returns of the policy a run starts with: of its mean action, and of those it samples."""
    args = script.Args(**SETTINGS, seed=seed)
    env = script.make_env(args)
    torch.manual_seed(seed)
    policy = make_policy(script, env, args)
    seeds = [script.episode_seed(seed, 0, n) for n in range(3)]
    sampled = [script.run_episode(env, policy, n, args).reward.sum().item() for n in seeds]
    return np.mean(script.evaluate(env, policy, args)), np.mean(sampled)


def test_two_thousand_steps_of_cartpole_swingup_make_the_return_many_times_that_of_the_untrained(
    script, tmp_path
):
    def learn(seed):
        words = flags(**SETTINGS, **TRAINING, seed=seed, run_dir=f"seed{seed}")
        train(script, words, tmp_path)
        return float(rows(tmp_path / f"seed{seed}")[-1]["eval/episodic_return"])

    trained = together(*(lambda seed=seed: learn(seed) for seed in SEEDS))
    before = np.mean([max(untrained(script, seed)) for seed in SEEDS])
    assert np.mean(trained) >= 3 * before and np.mean(trained) >= 12, (trained, before)
