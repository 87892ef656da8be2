"""The replay: what is stored is what was lived, and a window never shows anything else."""

import numpy as np
import pytest
import torch
from running import CONTINUOUS, TASK, make_policy


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


WINDOW = 4
HISTORIES = {  # capacity, lengths of the episodes in steps; an episode of n steps takes n + 1 rows
    "not full": (40, [6, 3, 9]),
    "exactly full": (20, [4, 9, 4]),
    "exactly full, with one episode": (8, [7]),
    "the seam in the middle of an episode": (20, [6, 6, 6, 6, 6]),
    "the seam just after a final observation": (14, [6, 6, 6]),
    "the seam just before a final observation": (13, [6, 6, 6]),
    "one row of the oldest episode left": (15, [6, 6, 6]),
    "all episodes shorter than a window": (16, [1, 2, 3, 1, 1, 2, 3, 2, 1]),
    "an episode longer than the ring": (10, [3, 25]),
    "an episode longer than the ring, then a short one": (10, [25, 2]),
    "an episode as long as the ring": (10, [9, 9]),
    "the smallest ring": (WINDOW + 1, [2, 7, 1, 1, 3]),
}


def numbered_episode(number, length):
    """Rows that say which episode and step they are: step t of episode e is 100 e + t in every entry."""
    name = 100.0 * number + np.arange(length + 1.0)
    return {
        "state": np.stack([name, -name], -1),
        "action": name[:, None] + 0.25,
        "behaviour_log_prob": name + 0.5,
        "reward": name + 0.75,
        "terminated": np.append(np.zeros(length - 1), [number % 2, 0]),
        "last": np.arange(length + 1) == length,
    }


def fill(script, capacity, lengths):
    replay = script.Replay(capacity, state_size=2, action_size=1)
    for number, length in enumerate(lengths, start=1):
        replay.add_episode(**numbered_episode(number, length))
    return replay


def windows_from_every_start(replay, window):
    """sample(), many times over, until every step stored has been drawn as a start; keyed by the first state's name."""
    torch.manual_seed(0)
    batch = replay.sample(200 * replay.capacity, window)
    names = batch.state[:, 0, 0]
    return {int(name): type(batch)(*(x[(names == name).nonzero()[0, 0]] for x in batch)) for name in names.unique()}


def steps_kept(capacity, lengths):
    """The steps whose rows are among the newest `capacity` ones, as names."""
    all_rows = [(100 * e + t, t < n) for e, n in enumerate(lengths, start=1) for t in range(n + 1)]
    return {name for name, is_step in all_rows[-capacity:] if is_step}


@pytest.mark.parametrize("history", HISTORIES)
def test_every_window_is_consecutive_steps_of_one_episode(script, history):
    capacity, lengths = HISTORIES[history]
    windows = windows_from_every_start(fill(script, capacity, lengths), WINDOW)
    assert windows.keys() == steps_kept(capacity, lengths)  # every step kept can start a window, and nothing else can
    for start, window in windows.items():
        number, step = divmod(start, 100)
        steps = min(WINDOW, lengths[number - 1] - step)
        assert window.valid.tolist() == [1.0] * steps + [0.0] * (WINDOW - steps)
        name = start + torch.arange(steps + 1.0)
        assert torch.equal(window.state[: steps + 1, 0], name)  # with the state after the last step
        assert torch.equal(window.state[: steps + 1, 1], -name)
        assert torch.equal(window.action[:steps, 0], name[:-1] + 0.25)
        assert torch.equal(window.behaviour_log_prob[:steps], name[:-1] + 0.5)
        assert torch.equal(window.reward[:steps], name[:-1] + 0.75)
        ends_here = step + steps == lengths[number - 1]
        assert window.terminated[:steps].tolist() == [0.0] * (steps - 1) + [float(ends_here and number % 2)]


def test_starts_are_drawn_uniformly_over_the_steps_stored(script):
    capacity, lengths = HISTORIES["the seam in the middle of an episode"]
    replay = fill(script, capacity, lengths)
    torch.manual_seed(0)
    _, counts = replay.sample(40_000, WINDOW).state[:, 0, 0].unique(return_counts=True)
    expected = 40_000 / len(steps_kept(capacity, lengths))
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


@pytest.mark.parametrize("history", HISTORIES)
def test_a_restored_replay_holds_the_same_rows_and_goes_on_the_same(script, history):
    capacity, lengths = HISTORIES[history]
    original, restored = fill(script, capacity, lengths), script.Replay(capacity, state_size=2, action_size=1)
    restored.load_state_dict(original.state_dict())
    for number, length in enumerate([3, 1, 12], start=len(lengths) + 1):
        drawn = []
        for replay in (original, restored):
            torch.manual_seed(number)
            drawn.append(replay.sample(50, WINDOW))
            replay.add_episode(**numbered_episode(number, length))
        assert all(map(torch.equal, *drawn))


def test_state_dict_is_a_copy_that_later_episodes_do_not_change(script):
    replay = fill(script, 20, [6, 6])
    saved = replay.state_dict()
    before = {name: torch.as_tensor(value).clone() for name, value in saved.items()}
    replay.add_episode(**numbered_episode(3, 12))
    assert all(torch.equal(torch.as_tensor(saved[name]), before[name]) for name in before)


def tensors_of(replay):
    return [*replay.rows.values(), *(x for x in vars(replay).values() if isinstance(x, torch.Tensor))]


def memory(replay):
    return sum(x.untyped_storage().nbytes() for x in tensors_of(replay))


def test_a_million_steps_of_a_24_dimensional_task_take_less_than_500_megabytes(script):
    replay, length = script.Replay(100_000, state_size=24, action_size=6), 999
    zero = {"state": np.zeros((length + 1, 24)), "action": np.zeros((length + 1, 6))}
    zero |= {name: np.zeros(length + 1) for name in ("behaviour_log_prob", "reward", "terminated")}
    for _ in range(101):
        replay.add_episode(**zero, last=np.arange(length + 1) == length)
    assert memory(replay) * 10 < 500e6


def test_memory_does_not_grow_once_the_ring_is_full(script):
    replay = fill(script, 100, [30, 30, 30, 30])
    full = memory(replay)
    for number in range(5, 200):
        replay.add_episode(**numbered_episode(number, 1 + number % 37))
        assert memory(replay) <= full * 1.05  # the list of possible starts varies with the number of episodes
    assert len(replay.state_dict()["state"]) == 100


def lived(script, task, time_limit=0, std=0.5):
    """A real episode with the policy that lived it, whose outputs vary with the state."""
    torch.manual_seed(0)
    args = script.Args(env_id=task, time_limit=time_limit, initial_std=std, policy_layers=(16, 16))
    env = script.make_env(args)
    policy = make_policy(script, env, args)
    with torch.no_grad():
        for head in (policy.mean, policy.factor):
            head.weight.mul_(50.0)
    return env, policy, script.collect_episode(env, policy, seed=5, device="cpu")


def test_stored_log_probs_are_those_of_the_policy_on_the_stored_states_and_actions(script):
    env, policy, episode = lived(script, "dm_control/walker-walk-v0", time_limit=60, std=1.0)
    replay = script.Replay(1000, env.observation_space.shape[0], env.action_space.shape[0])
    replay.add_episode(**episode)
    batch = replay.sample(200, WINDOW)
    with torch.no_grad():
        mean, cholesky = policy(batch.state[:, :-1])
        again = script.gaussian_log_prob(mean, cholesky, batch.action)
    valid = batch.valid > 0
    assert (batch.action.abs() > 1).any(), "the claim matters for actions that the environment clips"
    assert torch.allclose(again[valid], batch.behaviour_log_prob[valid], atol=1e-4)
    spread = batch.behaviour_log_prob[valid].std()
    assert spread > 0.1, "log-probabilities that are all alike would show nothing"


def test_what_is_stored_is_what_the_task_answers_to_the_stored_actions(script):
    env, _, episode = lived(script, TASK, time_limit=40)
    state, _ = env.reset(seed=5)
    for t in range(40):
        assert np.array_equal(episode["state"][t], state)
        state, reward, terminated, truncated, _ = env.step(episode["action"][t])
        assert episode["reward"][t] == reward
    assert np.array_equal(episode["state"][40], state)  # the final observation
    assert truncated and not terminated


def test_the_final_observation_is_stored_and_reaches_the_learner(script):
    env, _, episode = lived(script, TASK, time_limit=6)
    replay = script.Replay(100, env.observation_space.shape[0], env.action_space.shape[0])
    replay.add_episode(**episode)
    batch = replay.sample(100, WINDOW)
    final = torch.as_tensor(episode["state"][6], dtype=torch.float32)
    length = batch.valid.sum(1).long()
    ending = length < WINDOW
    assert ending.any()
    after_the_last_step = batch.state[torch.arange(100), length]
    assert (after_the_last_step[ending] == final).all()


def test_a_time_limit_of_dm_control_is_stored_as_no_termination(script):
    _, _, episode = lived(script, TASK)  # the task's own limit
    assert len(episode["reward"]) == 1001
    assert episode["last"].tolist() == [False] * 1000 + [True]
    assert not episode["terminated"].any()


def test_a_fall_in_a_gymnasium_task_is_stored_as_termination(script):
    _, _, episode = lived(script, "InvertedPendulum-v5")
    steps = len(episode["reward"]) - 1
    assert steps < 1000
    assert episode["terminated"].tolist() == [0.0] * (steps - 1) + [1.0, 0.0]
    assert abs(episode["state"][-1][1]) > 0.2 >= abs(episode["state"][-2][1])  # the angle at which it counts as fallen
