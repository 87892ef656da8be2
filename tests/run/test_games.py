"""mpo_atari.py as its users run it: games of ALE and MinAtar, what is stored of them, runs."""

import csv
import dataclasses
import functools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import tasks  # noqa: F401
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import (
    OUR_LINES,
    PATIENCE,
    Run,
    finish,
    flags,
    last_step,
    load,
    one_sentence,
    resume_command,
    rows,
    run,
    same,
    stop,
    surroundings,
    timeless,
    train,
    wait_for_row,
    wait_until,
)

import mpo_atari


# ---- Games, and what of them goes to the replay.
class Recorded(gym.vector.VectorWrapper):
    """Keeps all that is said, and pays each step its number: 1000 times the game's, plus time."""

    def reset(self, **options):
        observation, info = self.env.reset(**options)
        self.observations, self.actions, self.ends, self.paid = [observation.copy()], [], [], []
        return observation, info

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self.observations.append(observation.copy())
        self.actions.append(actions.copy())
        self.ends.append((terminated.copy(), truncated.copy()))
        self.paid.append(reward.copy())
        number = 1000.0 * np.arange(self.num_envs) + len(self.actions) - 1
        return observation, number, terminated, truncated, info


def uniform(actions):
    return lambda state: torch.full((len(state), actions), -math.log(actions))


def play(steps, rows_each=1000, **changes):
    """Play at random; the environment's own record, the replay, the scores, how many steps."""
    args = mpo_atari.Args(**(dict(num_envs=3, clip_rewards=False, threads=1) | changes))
    env = Recorded(mpo_atari.make_env(args, args.num_envs))
    space, actions = env.single_observation_space, int(env.single_action_space.n)
    replay = mpo_atari.FrameReplay(rows_each * args.num_envs, args.num_envs, space, "")
    scores, counted = [], 0
    games = mpo_atari.play(env, replay, uniform(actions), args)
    for _, (count, ended) in zip(range(steps), games):
        counted += count
        scores += ended
    return env, replay, scores, counted


def compare_with_record(env, replay, window=5):
    """Every window drawn is what the environment said, and none begins with a reset."""
    over = np.array([terminated | truncated for terminated, truncated in env.ends])  # [steps, N]
    begun, drawn = 0, set()
    for batch in (replay.sample(400, window, "cpu") for _ in range(5)):
        for i in range(len(batch.state)):
            game, time = divmod(int(batch.reward[i, 0]), 1000)
            if (game, time) in drawn:
                continue
            assert time == 0 or not over[time - 1, game], "the step after the end of a game is none"
            ends = np.flatnonzero(over[time : time + window, game])
            count = int(ends[0]) + 1 if len(ends) else window
            expected = [0.0] * count + [float(len(ends) > 0)]
            assert batch.final[i, : count + 1].tolist() == expected
            drawn.add((game, time))
            begun += time == 0 or over[max(time - 2, 0), game]
            for t in range(count):
                assert int(batch.reward[i, t]) == 1000 * game + time + t
                assert int(batch.action[i, t]) == env.actions[time + t][game]
                assert batch.terminated[i, t] == env.ends[time + t][0][game]
            for t in range(count + 1):
                assert np.array_equal(batch.state[i, t].numpy(), env.observations[time + t][game])
    assert begun > 5, "no window begins with a game"
    return drawn, over


def test_stacks_are_the_environments_own_across_the_starts_of_games():
    steps = 70
    env, replay, _, counted = play(steps, time_limit=17)
    drawn, over = compare_with_record(env, replay)
    resets = {(game, t + 1) for t in range(steps - 1) for game in range(3) if over[t, game]}
    assert over[16].all() and not over[:16].any() and over[34].all()  # 17 steps, one for a reset
    assert len(resets) >= 9 and counted == 3 * steps - len(resets)
    assert drawn == {(game, t) for t in range(steps - 5) for game in range(3)} - resets
    assert not replay.rows.terminated.any(), "a game cut off by the limit on frames bootstraps"
    log_prob = replay.rows.behaviour_log_prob[: 3 * steps]
    assert log_prob.unique().tolist() == pytest.approx([-math.log(6)], abs=1e-6)


def test_stacks_are_the_environments_own_across_the_seam_of_the_ring():
    env, replay, _, _ = play(80, rows_each=40, time_limit=17)
    drawn, _ = compare_with_record(env, replay)
    assert min(t for _, t in drawn) == 80 - 40 + 3 and max(t for _, t in drawn) == 74


def test_frames_of_another_task_are_stacked_and_stored_the_same_way():
    for env_id in ("Catch-v0", "Screen-v0"):
        env, replay, _, _ = play(60, env_id=env_id)
        _, over = compare_with_record(env, replay)
        assert env.observations[0].shape == (3, 4, 84, 84)
        assert not env.observations[0][:, :3].any()
        assert replay.rows.terminated.sum() == over.sum() > 0


def test_vectors_are_stored_as_float32():
    env, replay, _, _ = play(60, env_id="Corridor-v0")
    compare_with_record(env, replay)
    assert replay.rows.state.dtype == torch.float32
    assert set(np.unique(np.stack(env.actions))) == {0, 1, 2}
    assert set(np.unique(env.paid)) == {0.0, 1.0, 11.0, 21.0}  # 0 in a reset


def test_a_limit_on_time_bootstraps_and_an_end_does_not():
    _, cut, _, _ = play(60, env_id="Cut-v0")
    assert not cut.rows.terminated.any()
    _, ended, _, _ = play(60, env_id="Corridor-v0")
    assert ended.rows.terminated.sum() == 30
    _, limited, _, _ = play(60, env_id="Corridor-v0", time_limit=3)
    assert not limited.rows.terminated.any()


@pytest.mark.parametrize("env_id, sign", [("Corridor-v0", 1.0), ("Debts-v0", -1.0)])
def test_rewards_are_clipped_for_learning_and_scores_are_not(env_id, sign):
    args, space = mpo_atari.Args(env_id=env_id, num_envs=2), gym.spaces.Box(0, 1, (2,))
    env, replay, scores = mpo_atari.make_env(args, 2), mpo_atari.FrameReplay(200, 2, space, ""), []
    last = lambda state: torch.tensor([[-1e9, -1e9, 0.0]]).repeat(len(state), 1)  # noqa: E731
    for _, (_, ended) in zip(range(24), mpo_atari.play(env, replay, last, args)):
        scores += ended
    assert scores == [5 * 21.0 * sign] * 8  # five steps a game and one for its reset
    assert set(replay.rows.reward.tolist()) == {0.0, sign}


@pytest.mark.parametrize("task", ["NaNScore", "NaNBoard"])
def test_what_is_not_finite_is_refused_before_it_is_stored_as_lived(task):
    env = mpo_atari.make_env(mpo_atari.Args(env_id=f"{task}-v0"), 2)
    replay = mpo_atari.FrameReplay(400, 2, env.single_observation_space, "")
    with pytest.raises(FloatingPointError, match="not finite"):
        for _ in mpo_atari.play(env, replay, uniform(2), mpo_atari.Args(num_envs=2)):
            assert replay.written < 300
    assert replay.written > 200 and all(rows.isfinite().all() for rows in replay.rows)


@functools.cache
def cover(old):
    """How much of each of 84 new pixels in a row each old one covers. [84, old]"""
    left, right = np.arange(84) * old / 84, (np.arange(84) + 1) * old / 84
    pixel = np.arange(old)
    shared = np.minimum(right[:, None], pixel + 1) - np.maximum(left[:, None], pixel)
    return torch.as_tensor(shared.clip(0) * 84 / old)


def resize(picture):
    """To 84 x 84 by areas: each new pixel is the mean of what it covers."""
    height, width = picture.shape
    return (cover(height) @ torch.as_tensor(picture) @ cover(width).T).numpy()


@pytest.mark.parametrize("game, name, most", [("Pong", "pong", 0), ("Qbert", "qbert", 25)])
def test_frames_are_those_of_dqns_protocol_made_from_ales_own_screens(game, name, most):
    """Each action for four frames, the greater of the last two, 84 x 84; rewards not clipped."""
    env = mpo_atari.make_env(mpo_atari.Args(env_id=f"ALE/{game}-v5", threads=1), 1)
    observation, info = env.reset(seed=3)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 3)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path(name))
    ale.reset_game()
    actions, chance = ale.getMinimalActionSet(), np.random.default_rng(0)
    assert env.single_action_space.n == len(actions)
    for _ in range(int(info["episode_frame_number"][0])):
        ale.act(ale_py.Action.NOOP)
    assert 1 <= info["episode_frame_number"][0] <= 31
    best = 0
    for _ in range(100):
        action = int(chance.integers(len(actions)))
        screens, paid = [], 0
        for _ in range(4):
            paid += ale.act(actions[action])
            screens.append(ale.getScreenGrayscale().astype(float))
        observation, reward, *_ = env.step(np.array([action]))
        assert reward[0] == paid
        best = max(best, paid)
        assert np.abs(observation[0, -1] - resize(np.maximum(*screens[-2:]))).max() <= 1
    assert best >= most, "rewards that clipping would change"


def limits(env):
    """The time limit of each game of a vector of games; None: it has none."""
    found = []
    for game in env.envs:
        found.append(None)
        while game is not game.unwrapped:
            if isinstance(game, gym.wrappers.TimeLimit):
                found[-1] = game._max_episode_steps
            game = game.env
    return found


def test_a_game_of_minatar_is_seen_as_it_is_and_has_no_limit_but_one_that_is_asked_for():
    args = mpo_atari.Args(env_id="MinAtar/Breakout-v1", num_envs=2, threads=1)
    env, replay, _, _ = play(300, env_id=args.env_id)
    compare_with_record(env, replay)
    assert env.single_observation_space.shape == (10, 10, 4) and env.single_action_space.n == 3
    assert replay.rows.state.dtype == torch.bool and replay.stack == 1
    assert replay.rows.state.any() and not replay.rows.state.all()
    assert limits(mpo_atari.make_env(args, 2)) == [None, None]
    args.time_limit = 7
    assert limits(mpo_atari.make_env(args, 1)) == [7]
    args.time_limit, args.env_id = 0, "Catch-v0"  # frames of a task without a limit of its own
    assert limits(mpo_atari.make_env(args, 1)) == [1000]


def test_a_picture_of_minatar_has_a_colour_for_each_channel_and_squares_of_32_pixels():
    args = mpo_atari.Args(env_id="MinAtar/Breakout-v1", capture_video=True)
    env = mpo_atari.make_env(args, 1)
    env.reset(seed=1)
    state = [env.step(np.array([0]))[0][0] for _ in range(3)][-1]
    picture = mpo_atari.picture(env, state)
    assert picture.shape == (320, 320, 3) and picture.dtype == np.uint8
    squares = picture.reshape(10, 32, 10, 32, 3)
    assert (squares == squares[:, :1, :, :1]).all()
    squares = squares[:, 0, :, 0]
    assert ((squares > 0).any(-1) == state.any(-1)).all() and state.any()
    highest = (state * np.arange(1, 5)).max(-1)  # of the channels at a place
    things = {(highest[place], *squares[place]) for place in np.ndindex(10, 10)}
    assert len(things) == len({thing[1:] for thing in things}) == 5  # and one for nothing


def test_an_evaluation_plays_one_whole_game_in_each_environment():
    """The second action pays 11. Games differ in length; one that is over waits for the others."""
    args = mpo_atari.Args(env_id="Uneven-v0")
    env = mpo_atari.make_env(args, 4)
    policy = lambda state: torch.tensor([0.3, 0.4, 0.3]).log().repeat(len(state), 1)  # noqa: E731
    lengths, single = [], gym.make("Uneven-v0")
    first = np.random.SeedSequence((args.seed, 1)).generate_state(1)[0] >> 2
    for number in range(4):
        single.reset(seed=int(first) + number)
        lengths.append(single.unwrapped.length)
    assert len(set(lengths)) > 1
    state = torch.get_rng_state()
    assert mpo_atari.play_games(env, policy, args, None) == [11.0 * n for n in lengths]
    assert torch.equal(torch.get_rng_state(), state), "the training goes on as without it"


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=6))
def test_the_actions_drawn_are_those_of_the_policy_with_their_log_probabilities(values):
    log_prob, args = torch.tensor(values).log_softmax(-1), mpo_atari.Args()
    states = np.zeros((2000, 2))
    action, found = mpo_atari.choose(lambda state: log_prob.repeat(len(state), 1), states, args)
    assert np.array_equal(found, log_prob.numpy()[action])
    shares = np.bincount(action, minlength=len(values)) / 2000
    assert np.abs(shares - log_prob.exp().numpy()).max() < 0.06
    same = lambda state: log_prob.repeat(len(state), 1)  # noqa: E731
    most, _ = mpo_atari.choose(same, states[:2], args, explore=False)
    assert log_prob[torch.as_tensor(most)].tolist() == [log_prob.max()] * 2


# ---- The script as its users run it.
TINY = dict(env_id="CartPole-v1", num_envs=2, layers=(16, 16), batch_size=4, window=4, threads=1)
TINY |= dict(total_timesteps=400, log_every=100, eval_episodes=2, buffer_size=5000)
TINY |= dict(learning_starts=100, updates_per_step=0.25)
QUIET = """
import gymnasium as gym
import numpy as np

class Quiet(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    def __init__(self, fails=0, render_mode=None):
        self.fails, self.steps, self.render_mode = fails, 0, render_mode
    def render(self):
        return np.full((48, 64, 3), self.steps % 256, np.uint8)
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == self.fails:
            raise KeyError("the board fell off the table")
        return np.zeros(2, np.float32), 0.0, False, False, {}

gym.register("Quiet-v0", Quiet)  # cut off after 1000 steps
gym.register("Fails-v0", Quiet, kwargs=dict(fails=250))
"""


def tiny(**changes):
    return flags(**(TINY | changes))


def values(row, but=()):
    return [
        float(value) for name, value in row.items() if name != "eval/returns" and name not in but
    ]


def columns_fit(run_dir):
    """Every row of progress.csv has as many entries as the first line has names."""
    with open(run_dir / "progress.csv", newline="") as file:
        assert len({len(row) for row in csv.reader(file)}) == 1


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of the script, copied alone into an empty folder; and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(mpo_atari.__file__, folder)
    command = [sys.executable, "-I", "mpo_atari.py", *tiny(seed=3)]  # -I: nothing beside it
    options = dict(env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    process = subprocess.run(command, cwd=folder, **options)
    assert process.returncode == 0, process.stderr
    (run_dir,) = (folder / "runs").iterdir()
    return process, run_dir


def test_a_script_copied_alone_into_an_empty_folder_runs_and_prints_our_lines_only(started):
    process, run_dir = started
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    for line, pattern in zip(lines, OUR_LINES, strict=True):
        assert re.fullmatch(pattern, line), lines
    assert re.fullmatch(r"CartPole-v1__mpo_atari__3__\d+", run_dir.name)
    kinds = {path.name.split(".")[0].split("-")[0] for path in run_dir.iterdir()}
    assert kinds == {"args", "checkpoint", "events", "lock", "model", "progress", "replay"}
    table = rows(run_dir)
    assert [int(row["global_step"]) // 100 for row in table] == [
        1,
        2,
        3,
        4,
    ]  # from 100 on it learns
    columns_fit(run_dir)
    for row in table[:-1]:  # only the last was evaluated
        assert all(map(math.isfinite, values(row, but=["eval/episodic_return"])))
        assert (row["eval/episodic_return"], row["eval/returns"]) == ("nan", "")
    assert all(map(math.isfinite, values(table[-1])))
    scores = [float(x) for x in table[-1]["eval/returns"].split()]
    assert len(scores) == 2 and np.mean(scores) == float(table[-1]["eval/episodic_return"])
    assert load(run_dir / "checkpoint.pt")["done"]["updates"] == 75  # a quarter of the 300 steps


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(started, tmp_path):
    train(mpo_atari, tiny(seed=3, run_dir="same"), tmp_path)
    train(mpo_atari, tiny(seed=4, run_dir="other"), tmp_path)
    assert timeless(tmp_path / "same") == timeless(started[1])
    mine, theirs = load(tmp_path / "same/model.pt"), load(started[1] / "model.pt")
    assert same(mine["policy"], theirs["policy"])
    assert timeless(tmp_path / "other")[0] != timeless(started[1])[0]


def test_the_model_alone_can_be_evaluated_with_another_seed_and_more_games(started, tmp_path):
    shutil.copy(started[1] / "model.pt", tmp_path / "mine.pt")
    logged = float(rows(started[1])[-1]["eval/episodic_return"])
    out = train(mpo_atari, flags(evaluate="mine.pt"), tmp_path).out
    scores = [float(x) for x in rows(started[1])[-1]["eval/returns"].split()]
    assert out == f"CartPole-v1: mean {logged:.1f} of {scores}\n" and len(scores) == 2
    words = flags(evaluate="mine.pt", seed=9, eval_episodes=5)
    other = train(mpo_atari, words, tmp_path).out
    assert other.count(", ") == 4 and str(scores)[1:-1] not in other
    assert [path.name for path in tmp_path.iterdir()] == ["mine.pt"]


def test_an_evaluation_asks_for_no_memory_of_the_replay(tmp_path, monkeypatch, capsys):
    """Its frames would take seven terabytes."""
    args = mpo_atari.Args(env_id="Catch-v0", buffer_size=999_999_999)
    policy = mpo_atari.Policy((4, 84, 84), 3, args)
    saved = {"origin": mpo_atari.ORIGIN, "args": dataclasses.asdict(args)}
    torch.save(saved | {"policy": policy.state_dict()}, tmp_path / "model.pt")
    mpo_atari.main(mpo_atari.parse_game_args(flags(evaluate=tmp_path / "model.pt")))
    assert capsys.readouterr().out.startswith("Catch-v0: mean ")
    with pytest.raises(MemoryError):
        mpo_atari.FrameReplay(
            args.buffer_size, 8, gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), ""
        )


def test_main_takes_settings_from_a_program_and_returns_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["another.py", "--of", "its own"])
    monkeypatch.chdir(tmp_path)
    settings = TINY | dict(total_timesteps=120, run_dir=str(tmp_path / "run"))
    policy = mpo_atari.main(mpo_atari.Args(**settings))
    assert same(policy.state_dict(), load(tmp_path / "run/model.pt")["policy"])


@pytest.mark.parametrize("game", ["ALE/Pong-v5", "MinAtar/SpaceInvaders-v1"])
def test_a_game_is_played_saved_evaluated_and_filmed(game, tmp_path):
    words = tiny(env_id=game, time_limit=12, total_timesteps=150, run_dir="run", seed=2)
    process = train(mpo_atari, [*words, "--capture-video"], tmp_path)
    assert process.err == "" and last_step(tmp_path / "run") == 150
    pictures = list(imageio.get_reader(tmp_path / "run/evaluation.mp4").iter_data())
    size = (336, 336, 3) if "ALE" in game else (320, 320, 3)
    assert len(pictures) == 12 and pictures[0].shape == size and pictures[0].std() > 5
    reader = imageio.get_reader(tmp_path / "run/evaluation.mp4")
    assert reader.get_meta_data()["fps"] == 15  # Atari: 60 frames a second, every fourth seen
    logged = float(rows(tmp_path / "run")[-1]["eval/episodic_return"])
    (tmp_path / "run/evaluation.mp4").unlink()
    words = [*flags(evaluate="run", eval_episodes=2), "--capture-video"]
    evaluated = train(mpo_atari, words, tmp_path)
    assert f"{game}: mean {logged:.1f} of [" in evaluated.out
    assert (tmp_path / "run/evaluation.mp4").exists()


def test_a_task_that_draws_itself_is_filmed_at_its_own_speed(tmp_path):
    (tmp_path / "quiet.py").write_text(QUIET)
    words = tiny(env_id="quiet:Quiet-v0", time_limit=30, total_timesteps=120, run_dir="run")
    train(mpo_atari, [*words, "--capture-video"], tmp_path)
    reader = imageio.get_reader(tmp_path / "run/evaluation.mp4")
    assert reader.get_meta_data()["fps"] == 50 and reader.count_frames() == 30
    assert next(reader.iter_data()).shape == (7 * 48, 7 * 64, 3)  # not below 320 high


def test_the_smallest_value_of_every_setting_runs_with_finite_numbers(tmp_path):
    least = dict(num_envs=1, window=1, batch_size=1, time_limit=1, layers=(1,), gamma=1e-9)
    least |= dict(buffer_size=8, learning_starts=8, total_timesteps=14, log_every=1)
    least |= dict(updates_per_step=1.0, target_period=1, eval_every=1, eval_episodes=1)
    process = train(mpo_atari, tiny(run_dir="run", **least), tmp_path)
    table = rows(tmp_path / "run")
    assert process.err == "" and [int(row["global_step"]) for row in table] == [*range(8, 15)]
    assert all(math.isfinite(x) for row in table for x in values(row))


def test_a_row_is_written_when_due_though_no_game_has_ended_and_nothing_waits_for_it(tmp_path):
    """The task is of a module in the current folder."""
    (tmp_path / "quiet.py").write_text(QUIET)
    words = dict(env_id="quiet:Quiet-v0", total_timesteps=300, eval_every=110, run_dir="run")
    process = train(mpo_atari, tiny(**words, log_every=10**6), tmp_path)
    table = rows(tmp_path / "run")
    assert [int(row["global_step"]) for row in table] == [110, 220, 300]  # all by evaluations
    assert [row["charts/episodic_return"] for row in table] == ["nan"] * 3
    assert [float(row["eval/episodic_return"]) for row in table] == [0.0] * 3
    assert "done; everything is in run" in process.out and process.err == ""
    train(mpo_atari, flags(resume="run", total_timesteps=400, log_every=30), tmp_path)
    later = rows(tmp_path / "run")
    assert later[:3] == table
    steps = [int(row["global_step"]) for row in later[3:]]
    assert steps == [330, 360, 390, 400]
    assert [row["eval/episodic_return"] for row in later[3:]] == ["0.0", "nan", "nan", "0.0"]
    columns_fit(tmp_path / "run")


def test_rows_between_two_updates_have_the_last_ones_metrics_also_after_a_resume(tmp_path):
    """One update at 100 steps, the next would come at 300."""
    words = dict(updates_per_step=0.01, total_timesteps=150, run_dir="run", log_every=10)
    train(mpo_atari, tiny(**words), tmp_path)
    for longer in (230, 260):
        assert load(tmp_path / "run/checkpoint.pt")["done"]["updates"] == 1
        train(mpo_atari, flags(resume="run", total_timesteps=longer), tmp_path)
    table = rows(tmp_path / "run")
    columns_fit(tmp_path / "run")
    assert [int(row["global_step"]) // 10 for row in table] == [*range(10, 27)]
    assert len({row["losses/critic"] for row in table}) == 1
    assert all(math.isfinite(float(row["losses/critic"])) for row in table)


def test_a_run_stopped_before_its_first_update_goes_on_from_its_start(tmp_path):
    """The first checkpoint is written before the first step, and rows are due at once."""
    words = tiny(total_timesteps=250, learning_starts=200, log_every=1, run_dir="run")
    process = Run(mpo_atari, words, tmp_path)
    wait_until((tmp_path / "run/checkpoint.pt").exists, process)
    stop(process, signal.SIGKILL)
    train(mpo_atari, flags(resume="run"), tmp_path)
    table = rows(tmp_path / "run")
    assert 200 <= int(table[0]["global_step"]) < 202 and last_step(tmp_path / "run") >= 250
    columns_fit(tmp_path / "run")


def test_a_run_killed_goes_on_from_its_checkpoint_with_replay_counters_and_weights(tmp_path):
    settings = dict(total_timesteps=3000, eval_every=500, run_dir="run", buffer_size=1600)
    settings |= dict(eval_episodes=1)
    process = Run(mpo_atari, tiny(**settings), tmp_path)
    for moment in (1000, 1700):
        wait_for_row(process, tmp_path / "run", moment)
        assert stop(process, signal.SIGKILL).returncode == -signal.SIGKILL
        before, table = load(tmp_path / "run/checkpoint.pt"), rows(tmp_path / "run")
        step = before["done"]["steps"]
        assert last_step(tmp_path / "run") - 620 <= step and step >= moment - 620
        assert before["done"]["updates"] == max(1, (step - 100) // 4)
        space, folder = gym.spaces.Box(0, 1, (4,)), tmp_path / "run"
        replay = mpo_atari.FrameReplay(1600, 2, space, folder)
        replay.load_state_dict(before["replay"])
        assert replay.written >= step and (replay.rows.final == 0).sum() > min(step, 1600) * 0.8
        process = Run(mpo_atari, flags(resume="run"), tmp_path)
    assert finish(process).returncode == 0, process.err
    steps = [int(row["global_step"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps)) and 3000 <= steps[-1] < 3010
    kept = [row for row in table if int(row["global_step"]) <= step]
    assert rows(tmp_path / "run")[: len(kept)] == kept
    after = load(tmp_path / "run/checkpoint.pt")
    assert after["done"]["episodes"] > before["done"]["episodes"]
    named = {f"replay-{end}.pt" for end in after["replay"]["ends"][1:]}
    assert named <= {path.name for path in (tmp_path / "run").glob("replay-*")}


def test_a_stopped_run_saves_prints_the_command_to_go_on_and_can_be_made_longer(tmp_path):
    process = Run(mpo_atari, tiny(total_timesteps=100_000, run_dir="run"), tmp_path)
    wait_for_row(process, tmp_path / "run", 300)
    assert stop(process, signal.SIGTERM).returncode == 128 + signal.SIGTERM and process.err == ""
    step = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    assert step >= 300
    assert f"stopped at step {step:,}; " in process.out
    words = [*resume_command(process), *flags(total_timesteps=step + 200)]
    longer = Run(mpo_atari, words, tmp_path)
    assert finish(longer).returncode == 0, longer.err
    assert step + 200 <= last_step(tmp_path / "run") < step + 210
    steps = [int(row["global_step"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps))
    again = train(mpo_atari, flags(resume="run"), tmp_path)
    assert "done" in again.out
    assert [int(row["global_step"]) for row in rows(tmp_path / "run")] == steps


MANY = 5_000_000_000
REFUSED = {  # flags, and what the sentence must name
    "continuous actions": (dict(env_id="Pendulum-v1"), ["Pendulum-v1", "actions", "Box"]),
    "a task of dm_control": (dict(env_id="dm_control/walker-walk-v0"), ["dm_control"]),
    "several discrete actions": (dict(env_id="Board-v0"), ["Board-v0", "a choice"]),
    "actions that begin elsewhere": (dict(env_id="Shifted-v0"), ["Shifted-v0", "0 .. A-1"]),
    "a screen": (dict(env_id="WideScreen-v0"), ["WideScreen-v0", "(210, 160, 3)", "(84, 84)"]),
    "a misspelt game": (dict(env_id="ALE/Pnog-v5"), ["ALE/Pnog-v5", "Pong"]),
    "a game without its family": (dict(env_id="Pong-v5"), ["Pong-v5"]),
    "a game that MinAtar has not": (dict(env_id="MinAtar/Pong-v1"), ["MinAtar/Pong-v1"]),
    "no task at all": (dict(env_id=""), ["cannot be made"]),
    "a module that is not there": (dict(env_id="nomodule:My-v0"), ["nomodule"]),
    "a task that needs a package": (dict(env_id="LunarLander-v3"), ["LunarLander"]),
    "no games": (dict(num_envs=0), ["--num-envs"]),
    "a bound of zero": (dict(epsilon_pi=0.0), ["--epsilon-pi"]),
    "a rate that is no number": (dict(learning_rate=math.nan), ["--learning-rate"]),
    "a discount of one": (dict(gamma=1.0), ["--gamma", "1"]),
    "more warm-up than steps": (
        dict(learning_starts=500, total_timesteps=500),
        ["--total-timesteps", "--learning-starts"],
    ),
    "fewer steps than the warm-up for frames": (
        dict(env_id="ALE/Pong-v5", total_timesteps=4000),
        ["--total-timesteps", "5000"],
    ),
    "a replay too small for its games": (dict(buffer_size=20, num_envs=8), ["--buffer-size"]),
    "no warm-up": (dict(learning_starts=3), ["--learning-starts"]),
    "billions of steps to keep": (dict(buffer_size=MANY), ["--buffer-size", "1e9"]),
    "billions of windows": (dict(batch_size=MANY), ["--batch-size", "1e9"]),
    "billions of units": (dict(layers=(16, MANY)), ["--layers", "1e9"]),
    "billions of games": (dict(num_envs=MANY), ["--num-envs", "1e9"]),
    "more games than steps to learn from": (dict(num_envs=10**8), ["--learning-starts"]),
    "billions of games to evaluate": (dict(eval_episodes=MANY), ["--eval-episodes", "1e9"]),
    "a device that does not exist": (dict(device="abacus"), ["--device abacus"]),
    "a device that holds no numbers": (dict(device="meta"), ["--device meta"]),
    "a folder that holds a run": (dict(run_dir="full"), ["full", "--resume full"]),
    "resuming the run of another task": (
        dict(resume="full", env_id="ALE/Pong-v5"),
        ["full", "CartPole-v1"],
    ),
    "resuming with another network": (dict(resume="full", layers=(8, 8)), ["full", "layers"]),
    "resuming with more games": (dict(resume="full", num_envs=5), ["full", "num_envs"]),
    "resuming without a checkpoint": (
        dict(resume="no_checkpoint"),
        ["no_checkpoint/checkpoint.pt is missing"],
    ),
    "a replay that is cut short": (dict(resume="cut"), ["cut/replay-", "damaged"]),
    "a replay that is gone": (dict(resume="gone"), ["gone/replay-", "missing"]),
    "evaluating and resuming": (dict(resume="full", evaluate="full"), ["--resume", "--evaluate"]),
}


@pytest.fixture(scope="module")
def furnished(started, tmp_path_factory):
    """A folder with a run, and with damaged copies of it."""
    folder = tmp_path_factory.mktemp("refused")
    for name in ("full", "no_checkpoint", "cut", "gone"):
        shutil.copytree(started[1], folder / name)
    (folder / "no_checkpoint/checkpoint.pt").unlink()
    (part, *_) = (folder / "cut").glob("replay-*")
    part.write_bytes(part.read_bytes()[:1000])
    (part, *_) = (folder / "gone").glob("replay-*")
    part.unlink()
    return folder


def words_of(case):
    wrong = REFUSED[case][0]
    return flags(**({} if "resume" in wrong else dict(env_id="CartPole-v1", run_dir="new")) | wrong)


def check_sentence(case, sentence):
    assert sentence.startswith("mpo_atari.py: ")
    for word in REFUSED[case][1]:
        assert word in sentence


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_one_sentence_before_training_starts(
    case, furnished, monkeypatch, capsys
):
    monkeypatch.chdir(furnished)
    monkeypatch.setattr(sys, "path", [*sys.path])  # main() adds the current folder
    with pytest.raises(SystemExit) as end:
        mpo_atari.main(mpo_atari.parse_game_args(words_of(case)))
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    (sentence,) = printed.err.splitlines()
    check_sentence(case, sentence)
    assert not (furnished / "new").exists()


@pytest.mark.parametrize("case", ["a misspelt game", "a task of dm_control", "no games"])
def test_as_a_process_it_ends_with_that_sentence_and_exit_code_2(case, furnished):
    process = run(mpo_atari, words_of(case), furnished)
    assert (process.returncode, process.out) == (2, "")
    check_sentence(case, one_sentence(process))


@pytest.mark.parametrize("game, module", [("ALE/Pong-v5", "ale_py"), ("MinAtar/X-v1", "minatar")])
def test_a_game_without_its_package_names_what_to_install(game, module, tmp_path):
    words = flags(env_id=game, run_dir="run")
    process = run(mpo_atari, words, tmp_path, hidden=[module])
    package = module.replace("_", "-")
    assert process.returncode == 2
    sentence = one_sentence(process)
    reason, _, remedy = sentence.rpartition("; ")
    assert reason.startswith(f"mpo_atari.py: {game} cannot be made here: ") and module in reason
    assert remedy == f"pip install {package}"


@pytest.mark.parametrize("task", ["NaNScore", "NaNBoard"])
def test_a_number_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays_good(
    task, tmp_path
):
    words = tiny(env_id=f"{task}-v0", run_dir="run", time_limit=20, eval_every=100, log_every=50)
    process = run(mpo_atari, words, tmp_path)
    sentence = one_sentence(process)
    assert process.returncode == 1 and "not finite" in sentence
    assert re.search(
        "stopped at step 2[0-9][0-9]; --resume run goes on from its checkpoint", sentence
    )
    assert 200 <= load(tmp_path / "run/checkpoint.pt")["done"]["steps"] < 210
    losses = [row["losses/critic"] for row in rows(tmp_path / "run")]
    assert losses and all(math.isfinite(float(value)) for value in losses)


def test_an_exception_in_a_game_is_shown_and_then_the_last_checkpoint_named(tmp_path):
    (tmp_path / "quiet.py").write_text(QUIET)
    words = dict(env_id="quiet:Fails-v0", eval_episodes=1, time_limit=10, eval_every=150)
    process = run(mpo_atari, tiny(**words, total_timesteps=1000, run_dir="run"), tmp_path)
    assert process.returncode == 1
    *shown, sentence = process.err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-1] == "KeyError: 'the board fell off the table'"
    step = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    assert 400 < step < 500 and sentence.startswith("mpo_atari.py: ")
    assert sentence.endswith("; --resume run goes on from its checkpoint.")


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_stays_good(tmp_path):
    """No file can grow beyond a little more than a first checkpoint; its table of rows does."""
    words = dict(eval_every=200, updates_per_step=0.02)
    train(mpo_atari, tiny(**words, run_dir="short", total_timesteps=200), tmp_path)
    room = (tmp_path / "short/checkpoint.pt").stat().st_size + 1000
    words = tiny(**words, run_dir="run", total_timesteps=5000)
    process = run(mpo_atari, words, tmp_path, file_size=room)
    assert process.returncode == 1 and "File too large" in one_sentence(process)
    step = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    assert step >= 200 and "--resume run goes on from its checkpoint" in process.err
    longer = run(mpo_atari, flags(resume="run", total_timesteps=step + 100), tmp_path)  # with room
    assert longer.returncode == 0, longer.err


def test_a_film_that_cannot_be_made_is_refused_with_the_package_it_lacks(tmp_path):
    words = [*tiny(run_dir="run"), "--capture-video"]
    process = run(mpo_atari, words, tmp_path, hidden=["pygame"])
    assert process.returncode == 2 and not (tmp_path / "run").exists()
    sentence = one_sentence(process)
    assert "CartPole-v1 cannot be filmed here" in sentence and "pygame" in sentence


# ---- Settings.
def settings(words):
    return dataclasses.asdict(mpo_atari.parse_game_args(words))


def test_vectors_and_small_images_have_defaults_that_words_and_paper_override():
    default, small, paper = dataclasses.asdict(mpo_atari.Args()), mpo_atari.SMALL, mpo_atari.PAPER
    assert all(small[name] != default[name] for name in small if name != "threads")
    assert small["threads"] == 1
    cases = {"ALE/Pong-v5": {}, "Catch-v0": {}, "CartPole-v1": small, "MinAtar/Freeway-v1": small}
    for task, own in cases.items():
        task = {"env_id": task}
        assert settings(flags(**task)) == default | own | task
        typed = {"batch_size": default["batch_size"], "learning_rate": 1e-4}  # typed as they are
        assert settings(flags(**task, **typed)) == default | own | task | typed
        printed = task | {"paper": True}
        assert settings(flags(**printed)) == default | own | paper | printed
        typed = printed | {"learning_rate": 1e-4}
        assert settings(flags(**typed)) == default | own | paper | typed
    words = flags(env_id="CartPole-v1", total_timesteps=4000)
    mpo_atari.check_games(mpo_atari.parse_game_args(words))  # not refused


def test_paper_restores_the_printed_learning_rates_and_period():
    printed = dict(gamma=0.99, epsilon=0.1, learning_rate=5e-4, policy_learning_rate=5e-4)
    restored = settings(["--paper"])
    assert {name: restored[name] for name in [*printed, "target_period"]} == printed | {
        "target_period": 1000
    }


def test_help_has_a_line_for_every_setting_and_the_other_defaults_of_small_observations(tmp_path):
    process = run(mpo_atari, ["--help"], tmp_path, cold=True, environment={"COLUMNS": "100"})
    assert (process.returncode, process.err) == (0, "")
    shown = re.sub(r"[│╭╮╰╯─\s]+", " ", process.out)
    for field in dataclasses.fields(mpo_atari.Args):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "vectors and for images of up to 32 x 32" in shown
    source = Path(mpo_atari.__file__).read_text()
    found = dict(re.findall(r"(?m)^    (\w+): .*\(small: ([^;)]+)[;)]", source))
    assert {name: float(value) for name, value in found.items()} == mpo_atari.SMALL
    for value in found.values():
        assert f"(small: {value}" in shown


def test_args_json_shows_what_was_used(started):
    used = json.loads((started[1] / "args.json").read_text())
    assert used["epsilon_pi"] == 3e-3 and used["batch_size"] == 4


# ---- It learns.
BALL = """
import gymnasium as gym
import numpy as np

class Ball(gym.Env):
    'A ball falls down a board of 3 x 3 squares of 28 x 28 pixels; a square at its foot catches it.'
    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(3)  # left, stay, right
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.row, (self.column, self.hand) = 0, self.np_random.integers(3, size=2)
        return self.picture(), {}
    def picture(self):
        board = np.zeros((3, 3), np.uint8)
        board[2, self.hand] = 128
        board[self.row, self.column] = 255
        return board.repeat(28, 0).repeat(28, 1)
    def step(self, action):
        self.row, self.hand = self.row + 1, int(np.clip(self.hand + action - 1, 0, 2))
        reward = 1.0 if self.hand == self.column else -1.0
        return self.picture(), reward * (self.row == 2), self.row == 2, False, {}

gym.register("Ball-v0", Ball)
"""
LEARNS = dict(env_id="ball:Ball-v0", total_timesteps=1000, learning_starts=200, window=2, seed=1)
LEARNS |= dict(batch_size=6, learning_rate=5e-4, policy_learning_rate=5e-4, epsilon_pi=0.1)
LEARNS |= dict(target_period=20, updates_per_step=0.25, eval_episodes=100, threads=1)


def test_it_learns_to_catch_nine_balls_of_ten_from_the_screen(tmp_path):
    """200 updates on 18 stacks of frames each; who knows nothing catches every third ball."""
    (tmp_path / "ball.py").write_text(BALL)
    train(mpo_atari, flags(**LEARNS, run_dir="run"), tmp_path)
    score = float(rows(tmp_path / "run")[-1]["eval/episodic_return"])
    assert (score + 1) / 2 >= 0.9  # 1 for a ball caught, -1 for a miss
