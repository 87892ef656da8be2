"""It learns. Long trainings and their curves are in benchmark/; this is the smallest one that shows it."""

import numpy as np
import pytest
import torch
from running import CONTINUOUS, TASK, flags, make_policy, rows, together, train

SEEDS = (1, 2, 3)
SETTINGS = dict(env_id=TASK, time_limit=250, policy_layers=(64, 64), critic_layers=(64, 64), num_samples=10, window=5)
TRAINING = dict(batch_size=32, learning_rate=1e-3, policy_learning_rate=1e-3, target_period=50, updates_per_step=1.0)
TRAINING |= dict(learning_starts=500, total_timesteps=2000, eval_every=0, eval_episodes=3, threads=1)


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


def untrained(script, seed):
    """Returns of the policy that the run starts with: of its mean action, and of the actions it samples."""
    args = script.Args(**SETTINGS, seed=seed)
    env = script.make_env(args)
    torch.manual_seed(seed)
    policy = make_policy(script, env, args)
    sampled = [script.collect_episode(env, policy, script.episode_seed(seed, 0, n), "cpu")["reward"] for n in range(3)]
    return np.mean(script.evaluate(env, policy, 3, seed, "cpu")), np.mean([np.sum(reward) for reward in sampled])


def test_two_thousand_steps_of_cartpole_swingup_make_the_return_many_times_that_of_the_untrained_policy(
    script, tmp_path
):
    def learn(seed):
        train(script, flags(**SETTINGS, **TRAINING, seed=seed, run_dir=f"seed{seed}"), tmp_path)
        return float(rows(tmp_path / f"seed{seed}")[-1]["eval/episodic_return"])

    trained = together(*(lambda seed=seed: learn(seed) for seed in SEEDS))
    before = np.mean([max(untrained(script, seed)) for seed in SEEDS])
    assert np.mean(trained) >= 3 * before and np.mean(trained) >= 12, (trained, before)
