"""The environment as the learner sees it: a vector observed, actions in [-1, 1], time limits that do not terminate."""

import gymnasium as gym
import numpy as np
import pytest
import tasks  # noqa: F401, registers them
import torch
from running import CONTINUOUS, TASK, dm_control_tasks, flags, load, make_policy, rows, together, train


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


DM_CONTROL = dm_control_tasks()
SUITE = [name for name in DM_CONTROL if "domain_name" in getattr(gym.spec(name).entry_point, "keywords", {})]
NEEDS_OPENGL = ["dm_control/quadruped-escape-v0"]  # draws its terrain on the graphics card
MANIPULATION = [name for name in DM_CONTROL if name.endswith("_features-v0")]
VISION = [name for name in DM_CONTROL if name.endswith("_vision-v0")]


def make(script, env_id, **settings):
    return script.make_env(script.Args(env_id=env_id, **settings))


def refusal(script, capsys, env_id, **settings):
    with pytest.raises(SystemExit) as stop:
        make(script, env_id, **settings)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_an_action_of_one_is_the_tasks_own_bound(script):
    env = make(script, "Pendulum-v1")
    assert env.action_space == gym.spaces.Box(-1, 1, (1,))
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


def test_unbounded_actions_need_a_bound_from_the_user(script, capsys):
    for task in ("Unbounded-v0", "dm_control/lqr-lqr_2_1-v0"):
        assert "--action-bound" in " ".join(refusal(script, capsys, task))
    env = make(script, "Unbounded-v0", action_bound=3.0)
    env.reset(seed=0)
    env.step(np.array([1.0], dtype=np.float32))
    assert env.unwrapped.received == [[3.0]]


def plant(env):
    model = env.unwrapped._env.physics.model
    return np.concatenate([model.jnt_stiffness, model.body_mass, model.dof_damping, [model.opt.timestep]])


def test_lqr_is_one_plant_a_thousand_steps_and_actions_of_four(script):
    lqr = {"env_id": "dm_control/lqr-lqr_6_2-v0", "action_bound": 4.0}
    env, evaluation, other = make(script, **lqr), make(script, **lqr), make(script, **lqr, seed=2)
    for again in (env, evaluation):  # also after episodes of other seeds
        again.reset(seed=int(plant(again).sum() * 1e6) % 1000)
    assert np.array_equal(plant(env), plant(evaluation))
    assert not np.array_equal(plant(env), plant(other))

    steps, over = 0, False
    while not over:
        _, _, terminated, truncated, _ = env.step(np.array([1.0, -7.0]))
        assert env.unwrapped._env.physics.control().tolist() == [4.0, -4.0]
        steps, over = steps + 1, terminated or truncated
    assert (steps, terminated, truncated) == (1000, False, True)


def test_a_resumed_lqr_run_continues_with_the_plant_it_began_with(script, tmp_path):
    small = flags(env_id="dm_control/lqr-lqr_2_1-v0", action_bound=4, time_limit=20, policy_layers=(8, 8), threads=1)
    small += flags(critic_layers=(8, 8), batch_size=4, num_samples=4, learning_starts=40, eval_episodes=1, seed=3)
    whole = lambda: train(script, [*small, *flags(total_timesteps=80, run_dir="whole")], tmp_path)  # noqa: E731

    def halves():
        train(script, [*small, *flags(total_timesteps=40, run_dir="halves")], tmp_path)
        train(script, flags(resume="halves", total_timesteps=80), tmp_path)

    together(whole, halves)
    episodes = [load(tmp_path / name / "checkpoint.pt")["replay"] for name in ("whole", "halves")]
    assert len(episodes[0]["state"]) == 84  # four episodes of 21 rows
    assert torch.equal(episodes[0]["state"], episodes[1]["state"])


def test_a_dictionary_of_float64_observations_becomes_one_vector_of_float32(script):
    env = make(script, "dm_control/walker-walk-v0", time_limit=3, policy_layers=(8, 8))
    assert isinstance(env.unwrapped.observation_space, gym.spaces.Dict)
    assert env.observation_space.shape == (24,)  # 14 orientations, a height (a scalar), 9 velocities
    state, _ = env.reset(seed=0)
    assert state.shape == (24,)
    parts = env.unwrapped._env.task.get_observation(env.unwrapped._env.physics)
    assert np.array_equal(np.sort(state), np.sort(np.concatenate([np.ravel(part) for part in parts.values()])))

    policy = make_policy(script, env, script.Args(policy_layers=(8, 8)))
    replay = script.Replay(10, 24, 6)
    replay.add_episode(**script.collect_episode(env, policy, seed=0, device="cpu"))
    assert replay.sample(1, 2).state.dtype == torch.float32
    assert torch.equal(replay.rows["state"][0], torch.as_tensor(state).float())


def test_a_tuple_of_observations_becomes_one_vector_too(script):
    env = make(script, "Pair-v0")
    assert env.reset(seed=0)[0].shape == env.observation_space.shape == (2,)


def test_a_time_limit_truncates_and_does_not_terminate(script):
    for settings, limit in (({}, 1000), ({"time_limit": 25}, 25)):
        env = make(script, TASK, **settings)
        env.reset(seed=0)
        ends = [env.step(np.zeros(1))[2:4] for _ in range(limit)]
        assert ends == [(False, False)] * (limit - 1) + [(False, True)]


def test_a_task_without_a_limit_of_its_own_gets_one_of_a_thousand_steps(script):
    env = make(script, "Still-v0")
    env.reset(seed=0)
    assert [env.step(np.zeros(1))[3] for _ in range(1000)] == [False] * 999 + [True]


@pytest.mark.parametrize("task", [TASK, "dm_control/finger-turn_hard-v0", "InvertedPendulum-v5", "Pendulum-v1"])
def test_a_seed_reproduces_an_episode_to_the_bit(script, task):
    args = script.Args(env_id=task, time_limit=30, policy_layers=(8, 8), initial_std=0.2)

    def live(seed, warm_up=()):
        env = script.make_env(args)
        torch.manual_seed(1)
        policy = make_policy(script, env, args)
        for other in warm_up:  # what the environment lived through before must not matter
            script.collect_episode(env, policy, other, "cpu")
        torch.manual_seed(2)
        return script.collect_episode(env, policy, seed, "cpu")

    first, again, other = live(7), live(7, warm_up=(8, 9)), live(10)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["state"][0], other["state"][0])


def test_seeds_of_episodes_are_all_different(script):
    seeds = {script.episode_seed(seed, kind, n) for seed in range(5) for kind in (0, 1) for n in range(200)}
    assert len(seeds) == 2000


def test_humanoids_of_21_and_56_actions_are_updated_with_finite_numbers(script, tmp_path):
    settings = dict(time_limit=20, learning_starts=40, updates_per_step=0.2, total_timesteps=80, eval_episodes=1)

    def learn(name):
        env_id = f"dm_control/{name}-v0"
        return train(script, flags(env_id=env_id, run_dir=name, threads=1, **settings), tmp_path)

    for name, actions, out in zip(
        ("humanoid-walk", "humanoid_CMU-walk"),
        (21, 56),
        together(lambda: learn("humanoid-walk"), lambda: learn("humanoid_CMU-walk")),
    ):
        assert f"{actions} actions" in out.out
        table = rows(tmp_path / name)
        assert int(table[-1]["charts/updates"]) == 16
        assert all(np.isfinite(float(value)) for row in table for value in row.values() if value)


@pytest.mark.parametrize("task", sorted(set(SUITE) - set(NEEDS_OPENGL)))
def test_every_task_of_the_control_suite_can_be_made_and_lived_in(script, task):
    env = make(script, task, action_bound=4.0 if "lqr" in task else 0.0)
    state, _ = env.reset(seed=0)
    for action in (np.ones(env.action_space.shape), np.full(env.action_space.shape, -1.0)):
        state, reward, *_ = env.step(action.astype(np.float32))
        assert state.shape == env.observation_space.shape
        assert np.isfinite(state).all() and np.isfinite(reward)


def test_the_control_suite_is_not_empty(script):
    assert len(SUITE) >= 45 and len(VISION) >= 8 and len(MANIPULATION) >= 8


@pytest.mark.parametrize("task", MANIPULATION[:2])
def test_manipulation_from_features_is_not_taken_for_vision(script, task):
    env = make(script, task)
    state, _ = env.reset(seed=0)
    assert state.shape == env.observation_space.shape


@pytest.mark.parametrize("task", [*VISION[:2], "dm_control/RodentEscapeBowl-v0", *NEEDS_OPENGL, "Picture-v0"])
def test_vision_is_refused_with_one_sentence(script, capsys, task):
    (sentence,) = refusal(script, capsys, task)
    assert task in sentence and "image" in sentence
