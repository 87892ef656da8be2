"""benchmark/parkour.py: courses from a seed, what is seen of them, rewards, falls, films."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from gymnasium.utils.env_checker import check_env
from helpers import losses_of, normal, numbers

import mpo_continuous

os.environ.setdefault("MUJOCO_GL", "disabled")  # as the scripts do, before MuJoCo comes

import mujoco  # noqa: E402

import benchmark.parkour  # noqa: E402, F401, registers them

MIXED = "ParkourWalker2D-v0"
COURSES = [MIXED, "ParkourHurdles-v0", "ParkourGaps-v0", "ParkourRough-v0"]
BODY = 24  # numbers in an observation before the ground's
STILL = np.zeros(6, np.float32)


@pytest.fixture(scope="module")
def envs():
    """One of each, since to make one takes longer than an episode."""
    return {name: gym.make(name) for name in COURSES}


def field(env):
    """What MuJoCo has of the course: places [N] and heights [N], in metres."""
    model = env.unwrapped.physics.model
    (rows,), (columns,) = model.hfield_nrow, model.hfield_ncol
    half, _, top, _ = model.hfield_size[0]
    x, _, z = model.geom_pos[model.name2id("floor", "geom")]
    heights = model.hfield_data.reshape(rows, columns)
    assert np.array_equal(heights[0], heights[1])
    return x + np.linspace(-half, half, columns), z + top * heights[0].astype(float)


def ground_by_ray(env, places):
    """Heights of the ground that a ray from above meets."""
    physics = env.unwrapped.physics
    floor = physics.model.name2id("floor", "geom")
    down, pointers = np.array([0.0, 0, -1]), (physics.model.ptr, physics.data.ptr)
    far = [mujoco.mj_rayHfield(*pointers, floor, np.array([x, 0.01, 3]), down) for x in places]
    return 3 - np.array(far)


def put(env, x, torso, **angles):
    """The walker at rest at x, its torso so high above the level; angles in radians."""
    physics = env.unwrapped.physics
    physics.reset()
    for name, value in {"rootx": x, "rootz": torso - 1.3, **angles}.items():
        physics.named.data.qpos[name] = value
    physics.forward()


def sitting(env, x, torso, **angles):
    """As put, with the legs stretched out ahead, so that they touch nothing."""
    put(env, x, torso, right_hip=1.57, left_hip=1.57, **angles)


def runs(mask):
    """First index and length of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2] - edges[::2]))


def middle_of(env, mask_of):
    """The middle of the longest run of places whose heights mask_of picks."""
    places, heights = field(env)
    first, length = max(runs(mask_of(heights)), key=lambda run: run[1])
    return (places[first] + places[first + length - 1]) / 2, heights[first]


# ---- The courses.
def play(env, seed, steps=12):
    """The course of an episode, and all that was seen and got in its first steps."""
    state, _ = env.reset(seed=seed)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 6)).astype(np.float32)
    seen = [state]
    for action in actions:
        state, reward, _, _, info = env.step(action)
        seen.append([*state, reward, info["distance"]])
    return [field(env)[1], *map(np.asarray, seen)]


@pytest.mark.parametrize("name", COURSES)
def test_a_seed_gives_its_course_and_episode_and_another_seed_gives_another(envs, name):
    np.random.seed(0)
    first = play(envs[name], seed=1)
    other = play(envs[name], seed=2)
    np.random.seed(1)  # a generator that is nobody's business here
    again = play(envs[name], seed=1)
    assert all(map(np.array_equal, first, again))
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[1][:BODY], other[1][:BODY]), "the same pose at the start"
    envs[name].reset()
    assert not np.array_equal(field(envs[name])[1], first[0]), "no new course without a seed"


def obstacles(env, seeds=20):
    """Heights of hurdles, widths of gaps and highest points of bumps in some courses."""
    hurdles, gaps, bumps = [], [], []
    for seed in range(seeds):
        env.reset(seed=seed)
        places, heights = field(env)
        cell = places[1] - places[0]
        for first, length in runs(heights > 1e-6):
            highest, flat = heights[first], np.ptp(heights[first : first + length]) == 0
            if length == 2 and flat:
                hurdles.append(highest)
            else:
                bumps.append(heights[first : first + length].max())
        for first, length in runs(heights < -1e-6):
            assert np.ptp(heights[first : first + length]) == 0 and heights[first] <= -0.9
            gaps.append((length + 1) * cell)
    return np.array(hurdles), np.array(gaps), np.array(bumps)


@pytest.mark.parametrize("name", COURSES)
def test_each_course_has_its_obstacles_of_the_sizes_told_and_no_others(envs, name):
    hurdles, gaps, bumps = obstacles(envs[name])
    present = len(hurdles) > 0, len(gaps) > 0, len(bumps) > 0
    assert list(present) == [name in (course, MIXED) for course in COURSES[1:]]
    if len(hurdles):
        assert 0.1 - 1e-6 <= hurdles.min() < 0.11 and 0.29 < hurdles.max() <= 0.3 + 1e-6
    if len(gaps):
        assert set(gaps.round(4)) == {0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6}
    if len(bumps):
        assert bumps.max() <= 0.2 + 1e-6 and bumps.mean() > 0.1


@pytest.mark.parametrize("name", COURSES)
def test_a_walker_stands_on_level_ground_and_obstacles_come_for_all_of_an_episode(envs, name):
    for seed in range(5):
        envs[name].reset(seed=seed)
        contacts = envs[name].unwrapped.physics.data.ptr.contact
        assert len(contacts) and all(abs(contact.dist) < 1e-6 for contact in contacts)
        places, heights = field(envs[name])
        assert places[0] < -4 and abs(heights[places < 2]).max() < 1e-6
        met = places[abs(heights) > 0.01]
        assert met[0] < 5 and np.diff(met).max() < 5 and met[-1] > 60  # 25 s at 2 m/s: 50 m


def test_a_gap_is_a_hole_and_a_hurdle_is_solid(envs):
    gaps, hurdles = envs["ParkourGaps-v0"], envs["ParkourHurdles-v0"]
    gaps.reset(seed=0)
    x, bottom = middle_of(gaps, lambda heights: heights < -0.5)
    put(gaps, x - 0.06, torso=1.3)  # the middle of the feet is 0.06 ahead
    for _ in range(14):
        gaps.step(STILL)
    lowest = gaps.unwrapped.physics.named.data.xpos["right_foot", "z"]
    assert bottom < lowest < -0.3
    hurdles.reset(seed=0)
    x, top = middle_of(hurdles, lambda heights: heights > 0.05)
    put(hurdles, x - 0.06, torso=1.32 + top)
    for _ in range(8):
        hurdles.step(STILL)
        assert abs(hurdles.unwrapped.physics.named.data.xpos["right_foot", "z"] - top - 0.05) < 0.03


# ---- What is seen and got.
@pytest.mark.parametrize("name", COURSES)
def test_the_ground_seen_is_the_ground_that_rays_meet_above_the_lower_foot(envs, name):
    env, seen = envs[name], []
    env.reset(seed=3)
    for start in np.arange(3, 60, 2.7):
        put(env, start, torso=1.7)
        for action in np.random.default_rng(0).uniform(-1, 1, (3, 6)):
            state, *_ = env.step(action)
        positions = env.unwrapped.physics.named.data.xpos
        x, foot = positions["torso", "x"], positions[["right_foot", "left_foot"], "z"].min()
        expected = ground_by_ray(env, x + np.linspace(-0.5, 2, 26)) - foot
        np.testing.assert_allclose(state[BODY:], expected, atol=1e-4)
        seen.append(state[BODY:] + foot)
    assert np.ptp(seen) > 0.1  # there was something to see


def test_the_rest_of_the_observation_is_that_of_walker_walk(envs):
    state, _ = envs[MIXED].reset(seed=0)
    physics = envs[MIXED].unwrapped.physics
    angles = [physics.named.data.xmat[1:, ["xx", "xz"]].ravel(), [physics.data.xpos[1, 2]]]
    assert np.array_equal(state[:BODY], np.concatenate([*angles, physics.data.qvel]))


@pytest.mark.parametrize("speed, reward", [(-1, 0), (0.5, 0.25), (1, 0.5), (1.9, 0.95), (3, 1)])
def test_the_reward_is_half_the_forward_speed_clipped(envs, speed, reward):
    """In the air, where nothing changes the speed of the body as a whole."""
    envs[MIXED].reset(seed=0)
    put(envs[MIXED], 0, torso=3)
    envs[MIXED].unwrapped.physics.named.data.qvel["rootx"] = speed
    envs[MIXED].unwrapped.physics.forward()
    _, got, _, _, info = envs[MIXED].step(STILL)
    assert got == pytest.approx(reward, abs=1e-3)
    assert info["distance"] == pytest.approx(0.025 * speed, abs=2e-3)


# ---- Ends of episodes.
def fallen(env):
    _, _, terminated, truncated, _ = env.step(STILL)
    assert not truncated
    return terminated


@pytest.mark.parametrize("where", ["on level ground", "on a hurdle", "in a gap"])
def test_a_torso_less_than_0_7_m_above_the_ground_is_a_fall(envs, where):
    """In a gap it is the height above the edges that counts."""
    env = envs["ParkourGaps-v0" if where == "in a gap" else "ParkourHurdles-v0"]
    env.reset(seed=0)
    x, ground = 1.0, 0.0
    if where == "on a hurdle":
        x, ground = middle_of(env, lambda heights: heights > 0.25)
    elif where == "in a gap":
        x, _ = middle_of(env, lambda heights: heights < -0.5)
    for height, expected in ((0.72, False), (0.69, True)):  # it drops by 3 mm in a step
        sitting(env, x, height + ground)
        assert fallen(env) == expected


@pytest.mark.parametrize(
    "angle, expected", [(1.3, False), (-1.3, False), (1.42, True), (3.1, True)]
)
def test_a_torso_less_upright_than_0_2_is_a_fall(envs, angle, expected):
    envs[MIXED].reset(seed=0)
    put(envs[MIXED], 0, torso=3, rooty=angle)  # cos 1.3 = 0.27, cos 1.42 = 0.15
    assert fallen(envs[MIXED]) == expected


def test_to_stand_at_the_bottom_of_a_gap_is_a_fall(envs):
    env = envs["ParkourGaps-v0"]
    env.reset(seed=0)
    x, bottom = middle_of(env, lambda heights: heights < -0.5)
    put(env, x - 0.06, torso=1.3 + bottom)
    assert fallen(env)


def test_an_episode_is_truncated_after_1000_steps_and_that_is_no_termination(envs):
    env, steps, truncated = envs[MIXED], 0, False
    env.reset(seed=0)
    while not truncated:
        env.unwrapped.physics.data.qpos[:] = env.unwrapped.physics.data.qvel[:] = 0  # it stands
        _, _, terminated, truncated, _ = env.step(STILL)
        steps += 1
        assert not terminated
    assert steps == 1000


def episode_of(**settings):
    args = mpo_continuous.Args(env_id=f"benchmark.parkour:{MIXED}", **settings)
    env = mpo_continuous.make_env(args)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    assert sizes == (BODY + 26, 6) and env.spec.id == MIXED
    policy, critic = mpo_continuous.Policy(*sizes, args), mpo_continuous.Critic(*sizes, args)
    agent = mpo_continuous.Agent(policy, critic, eta=1.0, eta_mu=1.0, eta_sigma=100.0)
    return args, agent, mpo_continuous.run_episode(env, policy, args, 0)


def test_a_fall_bootstraps_nothing_in_the_learner():
    """What is seen after the fall changes no loss; after a time limit it does."""

    def critic_loss(state):
        batch = episode._replace(state=state)
        batch = type(batch)(*(x[-args.window - 1 :].unsqueeze(0) for x in batch))
        noise = normal(numbers(0), *batch.state.shape[:2], args.num_samples, 6).float()
        return losses_of(mpo_continuous)(agent, batch, noise, args)[0]["critic"]

    for settings, falls in (dict(), True), (dict(time_limit=5), False):
        args, agent, episode = episode_of(**settings)
        assert episode.terminated.sum() == episode.terminated[-2] == falls
        changed = episode.state.clone()
        changed[-1] += 1
        assert torch.equal(critic_loss(episode.state), critic_loss(changed)) == falls


@pytest.mark.filterwarnings("ignore:.*A Box observation space")  # its bounds are infinite
def test_gymnasium_finds_nothing_wrong_with_it(envs):
    check_env(envs[MIXED].unwrapped, skip_render_check=True)
    space = envs[MIXED].action_space
    assert space == gym.spaces.Box(-1, 1, (6,), np.float32)
    with pytest.raises(ValueError, match="hurdles"):
        gym.make(MIXED, course="stairs")


# ---- Pictures. In a process of its own: MuJoCo is told once whether it may draw.
FILM = """
import sys
import gymnasium as gym, numpy as np, benchmark.parkour
def picture(env, seed, x=30.0):
    env.reset(seed=seed)
    physics = env.unwrapped.physics
    physics.reset()
    physics.named.data.qpos[["rootx", "right_hip"]] = x, 0.6  # a leg hides the other if straight
    physics.forward()
    return env.render()
first, fresh = (gym.make("ParkourRough-v0", render_mode="rgb_array") for _ in range(2))
start = picture(first, 1, x=0.0)
one, two = picture(first, 1), picture(first, 2)
physics = first.unwrapped.physics
labels = physics.render(360, 480, camera_id="side", segmentation=True)
seen = [physics.model.id2name(i, "geom") for i in np.unique(labels[labels[..., 1] == 5][:, 0])]
fresh_two = picture(fresh, 2)
fps = first.metadata["render_fps"]
np.savez(sys.argv[1], start=start, one=one, two=two, fresh_two=fresh_two, seen=seen, fps=fps)
"""


def test_a_picture_shows_the_course_of_its_own_episode_and_the_whole_body(tmp_path):
    command = [sys.executable, "-c", FILM, tmp_path / "pictures.npz"]
    surroundings = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    film = {name: value for name, value in np.load(tmp_path / "pictures.npz").items()}
    assert film["one"].shape == (360, 480, 3) and film["fps"] == 40

    def difference(x, y):
        return abs(film[x].astype(float) - film[y]).mean()

    assert difference("two", "fresh_two") < 0.1 < 1 < difference("one", "two")
    limbs = {f"{side}_{limb}" for side in ("left", "right") for limb in ("thigh", "leg", "foot")}
    assert set(film["seen"]) == {"floor", "torso", *limbs}  # 30 m from the start
    for name in ("start", "two"):
        red, _, blue = film[name].astype(int).transpose(2, 0, 1)
        rows, columns = (red > blue + 40).nonzero()  # brown, as nothing but the body is
        assert 120 < columns.mean() < 360 and 0 < rows.min() and rows.max() < 359
