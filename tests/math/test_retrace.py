"""Policy evaluation: the Retrace targets, and the ends of episodes and windows."""

import itertools

import numpy as np
import pytest
import torch
from conftest import scripts_with
from helpers import (
    ACTION_SIZE,
    STATE_SIZE,
    copy_targets,
    double,
    episode,
    losses_of,
    normal,
    numbers,
    random_batch,
    rows_of,
    small_agent,
    small_args,
    valid,
)
from hypothesis import given
from hypothesis import strategies as st

with_retrace = pytest.mark.parametrize("script", scripts_with("retrace", "trace_coefficient"))
with_learner = pytest.mark.parametrize("script", scripts_with("gaussian_log_prob", "Replay"))


def window(seed, b=2, t=5):
    """q, v_next, reward, discount, trace [B, T]; the trace ends with the window."""
    generator = numbers(seed)
    q, v_next, reward = (normal(generator, b, t) for _ in range(3))
    discount = torch.rand(b, t, generator=generator, dtype=torch.float64)
    trace = torch.rand(b, t, generator=generator, dtype=torch.float64)
    trace[:, -1] = 0
    return q, v_next, reward, discount, trace


# ---- The formula itself.
@with_retrace
def test_without_traces_the_target_is_the_one_step_td_target(script):
    q, v_next, reward, discount, _ = window(seed=0)
    target = script.retrace(q, v_next, reward, discount, torch.zeros_like(q))
    torch.testing.assert_close(target, reward + discount * v_next)


@with_retrace
def test_with_full_traces_and_values_of_states_only_the_target_is_the_n_step_return(script):
    generator, gamma, t = numbers(1), 0.9, 6
    value, reward = normal(generator, 3, t + 1), normal(generator, 3, t)
    gammas = torch.full_like(reward, gamma)
    target = script.retrace(value[:, :-1], value[:, 1:], reward, gammas, torch.ones_like(reward))
    for start in range(t):
        powers = gamma ** torch.arange(t - start).double()
        n_step = (powers * reward[:, start:]).sum(1) + gamma ** (t - start) * value[:, -1]
        torch.testing.assert_close(target[:, start], n_step)


@with_retrace
@given(
    seed=st.integers(0, 10**6),
    b=st.integers(1, 4),
    t=st.integers(1, 8),
    gamma=st.floats(0.1, 0.999),
)
def test_the_recursion_is_the_printed_double_sum_with_gamma_before_the_expectation(
    script, seed, b, t, gamma
):
    q, v_next, reward, _, trace = window(seed, b, t)
    target = script.retrace(q, v_next, reward, torch.full_like(q, gamma), trace)
    never_used = torch.full_like(q[:, :1], float("nan"))  # c_0
    c = torch.cat([never_used, trace[:, :-1]], dim=1)  # so c_k stands at k
    for start in range(t):
        expected = q[:, start].clone()
        for j in range(start, t):
            product = c[:, start + 1 : j + 1].prod(dim=1)
            delta = reward[:, j] + gamma * v_next[:, j] - q[:, j]
            expected += gamma ** (j - start) * product * delta
        torch.testing.assert_close(target[:, start], expected, rtol=1e-10, atol=1e-10)


@with_retrace
def test_a_step_of_discount_zero_hides_all_that_follows_it(script):
    q, v_next, reward, discount, trace = window(seed=2)
    discount[:, 2] = 0
    before = script.retrace(q, v_next, reward, discount, trace)
    after = [torch.cat([x[:, :3], 100 + x[:, 3:]], dim=1) for x in (q, v_next, reward)]
    after[1][:, 2] = 100
    assert torch.equal(script.retrace(*after, discount, trace)[:, :3], before[:, :3])
    torch.testing.assert_close(before[:, 2], reward[:, 2])


@with_retrace
@given(log_pi=st.floats(-50, 10), log_b=st.floats(-50, 10))
def test_the_trace_is_the_importance_ratio_clipped_at_one(script, log_pi, log_b):
    c = script.trace_coefficient(*torch.tensor([log_pi, log_b], dtype=torch.float64))
    assert c.item() == pytest.approx(min(1.0, np.exp(log_pi) / np.exp(log_b)), rel=1e-9)


@with_retrace
def test_the_trace_stays_finite_where_the_ratio_overflows(script):
    log_pi, log_b = torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4])
    assert script.trace_coefficient(log_pi, log_b).tolist() == [1.0, 0.0]


@with_retrace
@pytest.mark.parametrize("seed", range(3))
def test_repeated_on_off_policy_data_of_a_tabular_mdp_it_reaches_the_action_values_of_pi(
    script, seed
):
    """All trajectories of T steps under b, each with its probability: no error of sampling."""
    rng, states, actions, steps, gamma = np.random.default_rng(seed), 3, 2, 3, 0.9
    p = rng.dirichlet(np.ones(states), size=(states, actions))
    r = rng.normal(size=(states, actions))
    pi, b = rng.dirichlet(np.ones(actions), size=(2, states))

    pairs = list(itertools.product(range(states), range(actions)))
    paths = np.array([sum(path, ()) for path in itertools.product(*[pairs] * steps)])
    paths = np.array([(*path, last) for path in paths for last in range(states)])
    s, a = paths[:, 0::2], paths[:, 1::2]  # [B, T+1], [B, T]
    chance = np.prod([p[s[:, t], a[:, t], s[:, t + 1]] for t in range(steps)], axis=0)
    chance *= np.prod(
        [b[s[:, t], a[:, t]] for t in range(1, steps)], axis=0
    )  # given the first pair

    s, a, chance = (torch.as_tensor(x) for x in (s, a, chance))
    p, r, pi, b = (torch.as_tensor(x) for x in (p, r, pi, b))
    c = script.trace_coefficient(pi[s[:, 1:-1], a[:, 1:]].log(), b[s[:, 1:-1], a[:, 1:]].log())
    trace = torch.nn.functional.pad(c, (0, 1))
    q = torch.zeros_like(r)
    for _ in range(200):
        v = (pi * q).sum(1)
        q_taken, v_next, reward = q[s[:, :-1], a], v[s[:, 1:]], r[s[:, :-1], a]
        target = script.retrace(q_taken, v_next, reward, torch.full_like(trace, gamma), trace)
        first = s[:, 0], a[:, 0]
        q = torch.zeros_like(q).index_put(first, chance * target[:, 0], accumulate=True)

    p_pi = torch.einsum("sat,tu->satu", p, pi).reshape(states * actions, states * actions)
    exact = torch.linalg.solve(torch.eye(states * actions).double() - gamma * p_pi, r.flatten())
    torch.testing.assert_close(q.flatten(), exact, rtol=1e-8, atol=1e-8)


# ---- The ends of episodes and windows.
def learned_constant(script, terminated, length, gamma=0.8):
    """What a critic that knows only one number learns, by the script's gradient, of reward 1."""
    args = small_args(script, gamma=gamma)
    agent = small_agent(script, args)
    replay = script.Replay(50, STATE_SIZE, ACTION_SIZE)
    for number in range(3):
        states, rewards = normal(numbers(number), length + 1, STATE_SIZE), torch.ones(length + 1)
        replay.add_episode(episode(script, states, terminated, seed=number, reward=rewards))
    torch.nn.init.zeros_(agent.critic.value.weight)
    torch.manual_seed(0)
    for _ in range(120):
        copy_targets(agent)
        batch = double(replay.sample(args.batch_size, args.window, args.device))
        noise = normal(None, *batch.state.shape[:2], args.num_samples, ACTION_SIZE)
        critic_loss = losses_of(script)(agent, batch, noise, args)[0]["critic"]
        (gradient,) = torch.autograd.grad(critic_loss, agent.critic.value.bias)
        with torch.no_grad():  # to the mean of the targets, the minimum of the squared loss
            agent.critic.value.bias -= gradient / 2
    return agent.critic.value.bias.item()


@with_learner
@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_time_limit_bootstraps_so_reward_one_for_ever_is_worth_one_over_one_minus_gamma(
    script, length
):
    worth = learned_constant(script, terminated=False, length=length)
    assert worth == pytest.approx(1 / (1 - 0.8), rel=1e-9)


@with_learner
def test_a_termination_bootstraps_nothing_so_one_reward_is_worth_one(script):
    assert learned_constant(script, terminated=True, length=1) == pytest.approx(1, rel=1e-12)


def everything(script, agent, batch, noise, args):
    """The losses and the gradient of each parameter, for comparisons bit by bit."""
    agent.zero_grad()
    losses = losses_of(script)(agent, batch, noise, args)[0]
    sum(losses.values()).backward()
    return [*losses.values(), *(p.grad for p in agent.parameters() if p.grad is not None)]


@with_learner
@pytest.mark.parametrize("terminated", [True, False])
def test_the_final_observation_matters_to_a_truncated_episode_and_not_to_a_terminated_one(
    script, terminated
):
    args = small_args(script)
    agent = small_agent(script, args)
    batch, noise = random_batch(script, args, agent, [args.window], [terminated])
    before = everything(script, agent, batch, noise, args)
    batch.state[:, -1] += 1
    after = everything(script, agent, batch, noise, args)
    assert all(torch.equal(x, y) for x, y in zip(before, after)) == terminated


@with_learner
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("capacity", [30, 12], ids=["not full", "the seam in its middle"])
def test_a_window_never_leaks_across_a_reset(script, capacity, terminated):
    args = small_args(script, batch_size=200)
    agent = small_agent(script, args)

    def losses_of_middle_episode(neighbours):
        replay = script.Replay(capacity, STATE_SIZE, ACTION_SIZE)
        for number in range(3):
            seed = number if number == 1 else neighbours + number
            states = normal(numbers(seed), 7, STATE_SIZE)
            states[:, 0] = number
            replay.add_episode(episode(script, states, terminated, seed=seed))
        torch.manual_seed(3)
        batch = double(replay.sample(args.batch_size, args.window, args.device))
        middle = rows_of(batch, batch.state[:, 0, 0] == 1)
        assert set(valid(middle).sum(1).tolist()) == {1, 2, 3, 4}  # ends in each possible place
        noise = normal(numbers(4), *middle.state.shape[:2], args.num_samples, ACTION_SIZE)
        return everything(script, agent, middle, noise, args)

    for x, y in zip(losses_of_middle_episode(10), losses_of_middle_episode(20)):
        assert torch.equal(x, y)


@with_learner
def test_the_trace_of_the_first_action_is_not_used_and_that_of_every_later_one_is(script):
    args = small_args(script)
    agent = small_agent(script, args)
    copy_targets(agent)  # theta = theta_i, so that it is clear which policy the traces are of
    batch, noise = random_batch(script, args, agent, [args.window], [False])
    batch.behaviour_log_prob.add_(3)  # far more likely than under pi, so every c < 1

    def critic_loss(batch):
        return losses_of(script)(agent, batch, noise, args)[0]["critic"]

    for step in range(args.window + 1):  # the action after the last step is of no use either
        changed = batch.behaviour_log_prob.clone()
        changed[:, step] += 0.5
        after = critic_loss(batch._replace(behaviour_log_prob=changed))
        assert torch.equal(critic_loss(batch), after) == (step in (0, args.window))


@with_learner
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("length", [1, 3])
def test_a_padded_window_gives_the_losses_of_the_short_episode_alone(script, length, terminated):
    args = small_args(script)
    agent = small_agent(script, args)
    batch, noise = random_batch(script, args, agent, [length] * 3, [terminated] * 3)
    short = script.Rows(*(x[:, : length + 1] for x in batch))
    padded = everything(script, agent, batch, noise, args)
    alone = everything(script, agent, short, noise[:, : length + 1], args)
    for x, y in zip(padded, alone, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@with_learner
@pytest.mark.parametrize("terminated", [True, False])
def test_what_a_final_row_carries_besides_its_observation_is_of_no_use(script, terminated):
    args = small_args(script)
    agent = small_agent(script, args)
    batch, noise = random_batch(script, args, agent, [1, 2, 3, 4], [terminated] * 4)
    before = everything(script, agent, batch, noise, args)
    final = batch.final > 0
    for entry in (batch.action, batch.behaviour_log_prob, batch.reward):
        entry[final] += 1
    batch.terminated[final] = 1 - batch.terminated[final]
    after = everything(script, agent, batch, noise, args)
    assert all(torch.equal(x, y) for x, y in zip(before, after))
