"""It learns. Long trainings and their curves are in benchmark/; this is the smallest such run."""

import numpy as np
import pytest
import tasks  # noqa: F401, registers them
import torch
from running import SINGLE, make_policy, rows

SETTINGS = dict(env_id="Reach-v0", num_samples=10, window=5, batch_size=32, eval_episodes=5)
SETTINGS |= dict(policy_layers=(32, 32), critic_layers=(32, 32), gamma=0.95, target_period=25)
TRAINING = dict(learning_rate=2e-3, policy_learning_rate=2e-3)
TRAINING |= dict(learning_starts=100, total_timesteps=500)


@pytest.mark.parametrize("script", SINGLE)
@pytest.mark.parametrize("seed", [1, 2])
def test_five_hundred_steps_make_the_return_many_times_that_of_the_untrained(
    script, seed, tmp_path
):
    own = {"policy_period": 100} if hasattr(script.Args, "policy_period") else {}
    args = script.Args(**SETTINGS, **TRAINING, **own, seed=seed, run_dir=str(tmp_path / "run"))
    env = script.make_env(args)
    torch.manual_seed(seed)
    policy = make_policy(script, env, args)  # untrained: its mean action, and those it samples
    explored = [script.run_episode(env, policy, args, n).reward.sum().item() for n in range(5)]
    before = max(np.mean(script.evaluate(env, policy, args, tmp_path)), np.mean(explored))

    script.main(args)
    after = float(rows(tmp_path / "run")[-1]["eval/episodic_return"])
    assert after >= 6 * before and after >= 18, (before, after)
