"""The environment as the learner sees it: a vector observed, actions in [-1, 1], time limits that
do not terminate."""

import dataclasses
import inspect

import gymnasium as gym
import numpy as np
import pytest
import tasks  # noqa: F401, registers them
import torch
from running import FIRST, SINGLE, TASK, dm_control_tasks, make_policy, rows

DM_CONTROL = dm_control_tasks()
PARTS = [(name, getattr(gym.spec(name).entry_point, "keywords", {})) for name in DM_CONTROL]
SUITE = [name for name, keywords in PARTS if "domain_name" in keywords]
NEEDS_OPENGL = ["dm_control/quadruped-escape-v0"]  # draws its terrain on the graphics card
UNBOUNDED = [name for name in SUITE if "lqr" in name]
MANIPULATION = [name for name in DM_CONTROL if name.endswith("_features-v0")]
LEARNED = ("mpo/", "loss")
VISION = [name for name in DM_CONTROL if name.endswith("_vision-v0")]


@pytest.fixture(scope="module", params=FIRST)  # make_env is the same text in the others
def script(request):
    return request.param


def make(script, env_id, **settings):
    return script.make_env(script.Args(env_id=env_id, **settings))


def episode_seed(args, number, explore=True):
    """The seed of an episode's start: of the run's, of its kind and of its number."""
    return int(np.random.SeedSequence((args.seed, explore, number)).generate_state(1)[0])


def refusal(script, capsys, env_id, **settings):
    with pytest.raises(SystemExit) as stop:
        make(script, env_id, **settings)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("other", SINGLE[1:])
def test_the_environment_of_the_other_scripts_is_the_same_text(script, other):
    assert inspect.getsource(script.make_env) == inspect.getsource(other.make_env)


@pytest.mark.filterwarnings("error")  # what a user would see on a terminal
def test_an_action_of_one_is_the_tasks_own_bound(script):
    env = make(script, "Pendulum-v1")
    for action, torque in ((1.0, 2.0), (-1.0, -2.0), (0.25, 0.5), (3.0, 2.0), (-9.0, -2.0)):
        env.reset(seed=0)
        env.step(np.array([action], dtype=np.float32))
        assert env.unwrapped.last_u == torque


def test_the_centre_of_an_asymmetric_range_is_action_zero(script):
    env = make(script, "Asymmetric-v0")
    env.reset(seed=0)
    for action in ([0, 0], [1, -1], [-2, 0.5]):
        env.step(np.array(action, dtype=np.float32))
    assert np.allclose(env.unwrapped.received, [[2, 2], [5, -1], [-1, 3.5]])


def test_a_dictionary_of_float64_observations_becomes_one_vector_of_float32(script):
    args = script.Args(env_id="dm_control/walker-walk-v0", time_limit=3, policy_layers=(8, 8))
    env = script.make_env(args)
    assert isinstance(env.unwrapped.observation_space, gym.spaces.Dict)
    assert env.observation_space.shape == (24,)  # 14 orientations, a height, 9 velocities
    state, _ = env.reset(seed=0)
    assert state.shape == (24,)
    suite = env.unwrapped._env
    parts = suite.task.get_observation(suite.physics).values()
    assert np.array_equal(np.sort(state), np.sort(np.concatenate([np.ravel(x) for x in parts])))

    episode = script.run_episode(env, make_policy(script, env, args), args, 0)
    assert len(episode.state) == 4 and episode.final.tolist() == [0, 0, 0, 1]
    assert {x.dtype for x in episode} == {torch.float32}
    state, _ = env.reset(seed=episode_seed(args, 0))
    assert torch.equal(episode.state[0], torch.as_tensor(state).float())


def test_a_tuple_of_observations_becomes_one_vector_too(script):
    env = make(script, "Pair-v0")
    assert env.reset(seed=0)[0].shape == env.observation_space.shape == (2,)


def test_a_time_limit_truncates_and_does_not_terminate(script):
    for task, settings, limit in (
        (TASK, {}, 1000),
        (TASK, {"time_limit": 25}, 25),
        ("Still-v0", {}, 1000),  # it has none of its own
        ("Own-v0", {}, 30),
    ):
        env = make(script, task, **settings)
        env.reset(seed=0)
        ends = [env.step(np.zeros(1))[2:4] for _ in range(limit)]
        assert ends == [(False, False)] * (limit - 1) + [(False, True)], task


TASKS = [TASK, "dm_control/finger-turn_hard-v0", "InvertedPendulum-v5", "Pendulum-v1"]


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_reproduces_an_episode_to_the_bit(script, task):
    args = script.Args(env_id=task, time_limit=30, policy_layers=(8, 8))

    def live(number, warm_up=()):
        env = script.make_env(args)
        torch.manual_seed(1)
        policy = make_policy(script, env, args)
        for other in warm_up:  # what the environment lived through before must not matter
            script.run_episode(env, policy, args, other)
        torch.manual_seed(2)
        return script.run_episode(env, policy, args, number)

    first, again, other = live(7), live(7, warm_up=(8, 9)), live(10)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first.state[0], other.state[0])


def test_episodes_of_other_numbers_kinds_and_runs_start_elsewhere(script):
    """The start of a Pendulum is drawn from its seed: an angle and a velocity."""
    args = script.Args(env_id="Pendulum-v1", time_limit=1, policy_layers=(8, 8))
    env = script.make_env(args)
    policy, starts = make_policy(script, env, args), set()
    for seed in range(3):
        args = dataclasses.replace(args, seed=seed)
        for explore in (True, False):
            for number in range(20):
                episode = script.run_episode(env, policy, args, number, explore)
                starts.add(tuple(episode.state[0].tolist()))
    assert len(starts) == 3 * 2 * 20


@pytest.mark.parametrize("script", SINGLE, indirect=True)
def test_humanoids_of_21_and_56_actions_are_updated_with_finite_numbers(script, tmp_path):
    settings = dict(time_limit=20, learning_starts=40, total_timesteps=80, eval_episodes=1)
    settings |= dict(updates_per_step=0.1, batch_size=16, eval_every=80)
    for name, actions in (("humanoid-walk", 21), ("humanoid_CMU-walk", 56)):
        env_id, run_dir = f"dm_control/{name}-v0", str(tmp_path / name)
        script.main(script.Args(env_id=env_id, run_dir=run_dir, **settings))
        saved = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        assert saved["replay"]["rows"][1].shape == (84, actions) and saved["done"]["updates"] == 8
        table = rows(tmp_path / name)
        assert float(table[-1]["eval/episodic_return"]) >= 0
        for row in table:
            learned = {name: float(value) for name, value in row.items() if name[:4] in LEARNED}
            learned.pop("mpo/q_minus_return", None)  # of episodes of 500 steps or more
            assert len(learned) > 10 and np.isfinite([*learned.values()]).all()


@pytest.mark.parametrize("task", sorted(set(SUITE) - set(NEEDS_OPENGL) - set(UNBOUNDED)))
def test_every_task_of_the_control_suite_can_be_made_and_lived_in(script, task):
    env = make(script, task)
    state, _ = env.reset(seed=0)
    for value in (1, -1):
        state, reward, *_ = env.step(np.full(env.action_space.shape, value, np.float32))
        assert state.shape == env.observation_space.shape
        assert np.isfinite(state).all() and np.isfinite(reward)


def test_the_control_suite_is_not_empty():
    assert len(SUITE) >= 45 and len(UNBOUNDED) == 2
    assert len(VISION) >= 8 and len(MANIPULATION) >= 8


@pytest.mark.parametrize("task", ["Unbounded-v0", *UNBOUNDED])
def test_unbounded_actions_are_refused_with_one_sentence(script, capsys, task):
    (sentence,) = refusal(script, capsys, task)
    assert task in sentence and "bounded" in sentence


@pytest.mark.parametrize("task", MANIPULATION[:2])
def test_manipulation_from_features_is_not_taken_for_vision(script, task):
    env = make(script, task)
    state, _ = env.reset(seed=0)
    assert state.shape == env.observation_space.shape


@pytest.mark.parametrize("task", [*VISION[:2], "dm_control/RodentEscapeBowl-v0", *NEEDS_OPENGL])
def test_a_task_that_must_be_drawn_is_refused_with_one_sentence(script, capsys, task):
    (sentence,) = refusal(script, capsys, task)
    assert task in sentence and ("image" in sentence or "OpenGL" in sentence)


def test_an_evaluation_with_the_mean_action_draws_no_random_number(script, tmp_path):
    """So that evaluating more or less often leaves the training as it is."""
    args = script.Args(env_id="Pendulum-v1", time_limit=20, policy_layers=(8, 8), eval_episodes=2)
    env = script.make_env(args)
    policy, state = make_policy(script, env, args), torch.get_rng_state()
    assert len(script.evaluate(env, policy, args, tmp_path)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    script.run_episode(env, policy, args, 0)
    assert not torch.equal(torch.get_rng_state(), state), "exploring does"
