"""The replay: what is stored is what was lived, and a window never shows anything else."""

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import rows_of, valid
from scipy.stats import chisquare

TASK = "dm_control/cartpole-swingup-v0"
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
    "as many rows as a window": (WINDOW + 1, [2, 7, 1, 1, 3]),
    "fewer rows than a window": (3, [2, 7, 1, 1, 3]),
}
histories = pytest.mark.parametrize("history", HISTORIES)


@pytest.fixture(scope="module", params=scripts_with("Replay", "gaussian_log_prob"))
def script(request):
    return request.param


def numbered_episode(script, number, length):
    """Rows that say what they are: step t of episode e is 100 e + t in every entry."""
    name = 100.0 * number + torch.arange(length + 1.0)
    rows = script.Rows(
        state=torch.stack([name, -name], -1),
        action=name.unsqueeze(-1) + 0.25,
        behaviour_log_prob=name + 0.5,
        reward=name + 0.75,
        terminated=torch.zeros(length + 1),
        final=torch.zeros(length + 1),
    )
    rows.terminated[-2] = number % 2
    rows.final[-1] = 1
    return rows


def fill(script, capacity, lengths):
    replay = script.Replay(capacity, 2, 1)
    for number, length in enumerate(lengths, start=1):
        replay.add_episode(numbered_episode(script, number, length))
    return replay


def steps_kept(capacity, lengths):
    """The steps whose rows are among the newest `capacity` ones, as names."""
    rows = [(100 * e + t, t < n) for e, n in enumerate(lengths, start=1) for t in range(n + 1)]
    return {name for name, is_step in rows[-capacity:] if is_step}


# ---- Windows.
@histories
def test_every_window_is_consecutive_steps_of_one_episode(script, history):
    capacity, lengths = HISTORIES[history]
    batch = fill(script, capacity, lengths).sample(200 * capacity, WINDOW, "cpu")
    starts = batch.state[:, 0, 0]
    names = {int(name) for name in starts.unique()}
    assert names == steps_kept(capacity, lengths)  # every step kept starts a window, no other row
    for start in names:
        window = rows_of(batch, starts == start)
        number, step = divmod(start, 100)
        steps = min(WINDOW, lengths[number - 1] - step)
        expected = [True] * steps + [False] * (WINDOW - steps)
        assert (valid(window) == torch.tensor(expected)).all()
        name = start + torch.arange(steps + 1.0)
        assert (window.state[:, : steps + 1, 0] == name).all()  # and the state after the last step
        assert (window.state[:, : steps + 1, 1] == -name).all()
        assert (window.action[:, :steps, 0] == name[:-1] + 0.25).all()
        assert (window.behaviour_log_prob[:, :steps] == name[:-1] + 0.5).all()
        assert (window.reward[:, :steps] == name[:-1] + 0.75).all()
        ends_here = step + steps == lengths[number - 1]
        terminated = [0.0] * (steps - 1) + [float(ends_here and number % 2)]
        assert (window.terminated[:, :steps] == torch.tensor(terminated)).all()
        assert (window.final[:, steps] == float(ends_here)).all()


@histories
@pytest.mark.parametrize("batch_size", [1, 500])
def test_starts_are_drawn_uniformly_over_the_steps_stored(script, history, batch_size):
    """A final row is drawn again, not moved to a neighbour: else the steps near it come up more."""
    capacity, lengths = HISTORIES[history]
    replay, draws = fill(script, capacity, lengths), 10_000 if batch_size > 1 else 2_000
    batches = [replay.sample(batch_size, WINDOW, "cpu") for _ in range(draws // batch_size)]
    starts = torch.cat([batch.state[:, 0, 0] for batch in batches])
    counts = [(starts == name).sum().item() for name in steps_kept(capacity, lengths)]
    assert sum(counts) == draws
    assert len(counts) == 1 or chisquare(counts).pvalue > 1e-4


def test_the_draws_of_a_batch_are_independent_of_each_other(script):
    """Pairs of starts in one batch: each pair of steps as often as any other."""
    capacity, lengths = 8, [1, 1, 1, 1]
    replay = fill(script, capacity, lengths)
    starts = torch.stack([replay.sample(4, WINDOW, "cpu").state[:, 0, 0] for _ in range(1500)])
    for one in range(3):
        pairs = torch.stack([starts[:, one], starts[:, one + 1]], -1)
        _, counts = pairs.unique(dim=0, return_counts=True)
        assert len(counts) == 16 and chisquare(counts).pvalue > 1e-4


# ---- Saving.
@histories
def test_a_restored_replay_holds_the_same_rows_and_goes_on_the_same(script, history):
    capacity, lengths = HISTORIES[history]
    original, restored = fill(script, capacity, lengths), script.Replay(capacity, 2, 1)
    restored.load_state_dict(original.state_dict())
    for number, length in enumerate([3, 1, 12], start=len(lengths) + 1):
        drawn = []
        for replay in (original, restored):
            torch.manual_seed(number)
            drawn.append(replay.sample(50, WINDOW, "cpu"))
            replay.add_episode(numbered_episode(script, number, length))
        assert all(map(torch.equal, *drawn))


def test_state_dict_is_a_copy_that_later_episodes_do_not_change(script):
    replay = fill(script, 20, [6, 6])
    saved = replay.state_dict()
    before, head = [x.clone() for x in saved["rows"]], saved["head"]
    replay.add_episode(numbered_episode(script, 3, 12))
    assert all(map(torch.equal, before, saved["rows"])) and saved["head"] == head
    assert len(before[0]) == 14, "no more rows are saved than were lived"


# ---- Memory.
def memory(replay):
    return sum(x.untyped_storage().nbytes() for x in replay.rows)


def test_a_million_steps_of_a_24_dimensional_task_take_less_than_500_megabytes(script):
    replay = script.Replay(100_000, 24, 6)
    assert set(vars(replay)) == {"rows", "capacity", "size", "head"}  # nothing else is stored
    assert memory(replay) * 10 < 500e6


def test_memory_does_not_grow_once_the_ring_is_full(script):
    replay = fill(script, 100, [30, 30, 30, 30])
    full = memory(replay)
    for number in range(5, 200):
        replay.add_episode(numbered_episode(script, number, 1 + number % 37))
        assert memory(replay) == full
    assert all(len(x) == 100 for x in replay.state_dict()["rows"])


# ---- Episodes as they are lived.
def lived(script, task, time_limit=0, **options):
    """A real episode, and the policy that lived it, whose outputs vary with the state."""
    args = script.Args(env_id=task, time_limit=time_limit, policy_layers=(16, 16))
    env = script.make_env(args)
    torch.manual_seed(0)
    policy = script.Policy(env.observation_space.shape[0], env.action_space.shape[0], args)
    with torch.no_grad():
        for head in (policy.mean, policy.factor):
            head.weight.mul_(50.0)
    return env, policy, script.run_episode(env, policy, args, 5, **options)


def test_stored_log_probs_are_those_of_the_policy_on_the_stored_states_and_actions(script):
    env, policy, episode = lived(script, "dm_control/walker-walk-v0", time_limit=60)
    replay = script.Replay(1000, env.observation_space.shape[0], env.action_space.shape[0])
    replay.add_episode(episode)
    batch = replay.sample(200, WINDOW, "cpu")
    with torch.no_grad():
        log_prob = script.gaussian_log_prob(*policy(batch.state), batch.action.unsqueeze(-2))
    again, stored = (
        x[:, :-1][valid(batch)] for x in (log_prob.squeeze(-1), batch.behaviour_log_prob)
    )
    assert (batch.action.abs() > 1).any(), "the claim matters for actions that are clipped"
    torch.testing.assert_close(again, stored, rtol=0, atol=1e-4)
    assert stored.std() > 0.1, "log-probabilities that are all alike would show nothing"


def test_the_actions_lived_spread_as_the_policy_says_and_without_exploring_are_its_mean(script):
    _, policy, explored = lived(script, TASK, time_limit=300)
    _, _, plain = lived(script, TASK, time_limit=50, explore=False)
    with torch.no_grad():
        mean, cholesky = policy(explored.state[:-1])
        z = ((explored.action[:-1] - mean) / cholesky[:, 0]).squeeze(-1)
        torch.testing.assert_close(
            plain.action[:-1], policy(plain.state[:-1])[0], rtol=0, atol=1e-5
        )
    assert abs(z.mean()) < 4 / len(z) ** 0.5 and abs(z.std() - 1) < 4 / (2 * len(z)) ** 0.5


def test_what_is_stored_is_what_the_task_answers_to_the_stored_actions(script):
    env, _, episode = lived(script, TASK, time_limit=40)
    seed = np.random.SeedSequence((1, True, 5)).generate_state(1)[0]  # of run 1, to explore, of 5
    state, _ = env.reset(seed=int(seed))
    for t in range(40):
        assert np.array_equal(episode.state[t], np.float32(state))
        state, reward, terminated, truncated, _ = env.step(episode.action[t].numpy())
        assert episode.reward[t] == np.float32(reward)
    assert np.array_equal(episode.state[40], np.float32(state))  # the final observation
    assert episode.reward[40] == 0, "the sum of the rewards is the return"
    assert truncated and not terminated
    assert all(x.dtype == torch.float32 for x in episode)


def test_the_final_observation_is_stored_and_reaches_the_learner(script):
    env, _, episode = lived(script, TASK, time_limit=6)
    replay = script.Replay(100, env.observation_space.shape[0], env.action_space.shape[0])
    replay.add_episode(episode)
    batch = replay.sample(100, WINDOW, "cpu")
    length = valid(batch).sum(1)
    ending = length < WINDOW
    assert ending.any()
    after_the_last_step = batch.state[torch.arange(100), length]
    assert (after_the_last_step[ending] == episode.state[6]).all()


def test_a_time_limit_of_dm_control_is_stored_as_no_termination(script):
    _, _, episode = lived(script, TASK)  # the task's own limit
    assert len(episode.reward) == 1001
    assert episode.final.tolist() == [0.0] * 1000 + [1.0]
    assert not episode.terminated.any()


def test_a_fall_in_a_gymnasium_task_is_stored_as_termination(script):
    _, _, episode = lived(script, "InvertedPendulum-v5")
    steps = len(episode.reward) - 1
    assert steps < 1000
    assert episode.terminated.tolist() == [0.0] * (steps - 1) + [1.0, 0.0]
    assert episode.final.tolist() == [0.0] * steps + [1.0]
    fallen = episode.state[:, 1].abs() > 0.2  # the angle at which it counts as fallen
    assert fallen.tolist() == [False] * steps + [True]
