"""What mpo_atari.py has of its own: sums over actions, frames stored once, many games, checkpoints in chunks."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import tasks  # noqa: F401
import torch
from helpers import normal, numbers
from hypothesis import given
from hypothesis import strategies as st
from running import (
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
    together,
    train,
    wait_for_row,
)
from scipy.optimize import minimize_scalar

import mpo_atari

STATES, ACTIONS = 3, 4


# ---------------------------------------------------------------------------------------------------------------------
# One gradient step: against sums written out state by state and action by action.
# ---------------------------------------------------------------------------------------------------------------------
def small_args(**changes):
    return mpo_atari.Args(**(dict(layers=(7, 6), batch_size=5, window=4, gamma=0.9, max_grad_norm=1e9) | changes))


def small_agent(seed=0, apart=0.5):
    """An agent in float64 whose networks and multipliers all differ from their targets and initial values."""
    torch.manual_seed(seed)
    networks = [kind((STATES,), ACTIONS, (7, 6)) for kind in (mpo_atari.Policy, mpo_atari.Critic)]
    agent, generator = mpo_atari.Agent(*networks, eta=1.0, eta_pi=1.0).double(), numbers(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(apart * normal(generator, *parameter.shape))
    return agent


def random_batch(agent, lengths=(4, 2, 4, 3, 1), terminated=(True, True, False, False, True), steps=4, seed=0):
    """Windows whose first lengths[b] steps are valid, the last of them terminal where terminated[b].

    What stands behind the end is random too. log b is that of pi_i give or take one: about half the traces are clipped.
    """
    generator, step, length = numbers(seed), torch.arange(steps), torch.as_tensor(lengths).unsqueeze(-1)
    ends = (step == length - 1) & torch.as_tensor(terminated).unsqueeze(-1)
    shape = len(lengths), steps
    behind = (step >= length) & (normal(generator, *shape) > 0)
    state = normal(generator, shape[0], steps + 1, STATES)
    action = torch.randint(ACTIONS, shape, generator=generator)
    log_pi = agent.target_policy(state[:, :-1]).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return mpo_atari.FrameBatch(
        state=state,
        action=action,
        behaviour_log_prob=log_pi.detach() + normal(generator, *shape),
        reward=normal(generator, *shape),
        terminated=(ends | behind).double(),
        valid=(step < length).double(),
    )


def slow_losses(agent, batch, args):
    """The three losses by loops over windows, steps and actions, in numpy."""

    def table(network):
        with torch.no_grad():
            return network(batch.state).numpy()

    pi_i, pi = np.exp(table(agent.target_policy)), np.exp(table(agent.policy))
    q_target, q = table(agent.target_critic), table(agent.critic)
    eta, eta_pi = math.exp(agent.log_eta.item()), math.exp(agent.log_eta_pi.item())
    a, b_log, reward, ended, valid = (x.numpy() for x in batch[1:])
    squares, g, likelihood, kl = [], [], [], []
    for w in range(len(a)):
        steps = int(valid[w].sum())
        for t in range(steps):
            target, product = q_target[w, t, a[w, t]], 1.0
            for j in range(t, steps):
                if j > t:
                    product *= args.gamma * min(1, pi_i[w, j, a[w, j]] / math.exp(b_log[w, j]))
                v = sum(pi_i[w, j + 1, x] * q_target[w, j + 1, x] for x in range(ACTIONS))
                target += product * (reward[w, j] + args.gamma * (0 if ended[w, j] else v) - q_target[w, j, a[w, j]])
                if ended[w, j]:
                    break
            squares.append((q[w, t, a[w, t]] - target) ** 2)
        for t in range(steps + 1):
            if t and ended[w, t - 1]:
                continue  # the observation after a termination: nobody acts there
            raised = [pi_i[w, t, x] * math.exp(q_target[w, t, x] / eta) for x in range(ACTIONS)]
            g.append(math.log(sum(raised)))
            likelihood.append(sum(y / sum(raised) * math.log(pi[w, t, x]) for x, y in enumerate(raised)))
            kl.append(sum(pi_i[w, t, x] * math.log(pi_i[w, t, x] / pi[w, t, x]) for x in range(ACTIONS)))
    room = args.epsilon_pi - np.mean(kl)
    return np.mean(squares), -np.mean(likelihood) - eta_pi * room, eta * (args.epsilon + np.mean(g)) + eta_pi * room


def test_vectors_pass_a_norm_after_the_first_layer_and_a_relu_after_each():
    network, features = mpo_atari.body((STATES,), (7, 6, 5))
    (first, norm), second, third = network[:2], network[3], network[5]
    state = normal(numbers(3), 20, STATES).float()
    h = third(torch.relu(second(torch.relu(torch.layer_norm(first(state), (7,), norm.weight, norm.bias)))))
    torch.testing.assert_close(network(state), torch.relu(h))
    assert features == 5


@pytest.mark.parametrize("seed", range(3))
def test_the_three_losses_are_those_of_a_slow_second_implementation(seed):
    args, agent = small_args(), small_agent(seed)
    batch = random_batch(agent, seed=seed)
    losses = [loss.item() for loss in mpo_atari.discrete_losses(agent, batch, args)[:3]]
    assert losses == pytest.approx(slow_losses(agent, batch, args), rel=1e-9)


def test_the_loss_of_a_life_hides_what_follows_it_in_a_game_that_goes_on():
    """terminated in the middle of a window whose later steps are valid."""
    args, agent = small_args(), small_agent(1)
    batch = random_batch(agent, lengths=(4, 4), terminated=(False, False))
    batch.terminated[:, 1] = 1
    losses = [loss.item() for loss in mpo_atari.discrete_losses(agent, batch, args)[:3]]
    assert losses == pytest.approx(slow_losses(agent, batch, args), rel=1e-9)


def test_each_loss_reaches_its_own_parameters_and_no_others():
    agent, owners = small_agent(), ("critic.", "policy.", "log_eta")
    for loss, owner in zip(mpo_atari.discrete_losses(agent, random_batch(agent), small_args())[:3], owners):
        agent.zero_grad()
        loss.backward(retain_graph=True)
        reached = {name for name, parameter in agent.named_parameters() if parameter.grad is not None}
        assert reached == {name for name, _ in agent.named_parameters() if name.startswith(owner)}


def test_an_update_is_one_step_along_the_gradient_with_each_network_clipped_to_its_own_norm():
    args, agent, other = small_args(max_grad_norm=0.01), small_agent(), small_agent()
    batch = random_batch(agent)
    sum(mpo_atari.discrete_losses(other, batch, args)[:3]).backward()
    optimiser = torch.optim.SGD([p for p in agent.parameters() if p.requires_grad], lr=0.1)
    values, _ = mpo_atari.update(agent, optimiser, mpo_atari.discrete_losses, batch, args)
    for name in ("policy", "critic"):
        gradient = torch.cat([p.grad.flatten() for p in getattr(other, name).parameters()])
        assert values[f"losses/{name}_gradient"] == pytest.approx(gradient.norm().item(), rel=1e-6)
        before = torch.cat([p.flatten() for p in getattr(other, name).parameters()])
        after = torch.cat([p.flatten() for p in getattr(agent, name).parameters()])
        step = 0.1 * gradient * min(1, 0.01 / (gradient.norm() + 1e-6))
        torch.testing.assert_close(before - after, step, rtol=1e-5, atol=1e-12)
    for mine, theirs in zip(agent.multipliers(), other.multipliers()):
        torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad)


class Table(torch.nn.Module):
    """A network that is a table over one-hot states: [..., S] -> [..., A]."""

    def __init__(self, values, log_softmax=False):
        super().__init__()
        self.values, self.log_softmax = torch.nn.Parameter(values.clone()), log_softmax

    def forward(self, state):
        values = state @ self.values
        return values.log_softmax(-1) if self.log_softmax else values


def tabular_agent(seed, eta=1.0, eta_pi=1.0):
    """pi_i and Q' random tables [3, 4]; pi starts at pi_i, Q at Q'."""
    generator = numbers(seed)
    policy, critic = (Table(normal(generator, STATES, ACTIONS), flag) for flag in (True, False))
    return mpo_atari.Agent(policy, critic, eta=eta, eta_pi=eta_pi).double()


def every_state(agent):
    """A batch of one step from each state, that ends there: the E-step and M-step see each state once."""
    count = torch.zeros(STATES, 1, dtype=torch.float64)
    state = torch.eye(STATES, dtype=torch.float64).unsqueeze(1).repeat(1, 2, 1)
    return mpo_atari.FrameBatch(state, count.long(), count, count, count + 1, count + 1)


def descend(agent, args, steps, rate=0.05):
    optimiser = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad], lr=rate)
    for number in range(steps):
        optimiser.param_groups[0]["lr"] = rate * (1 - number / steps)
        values, _ = mpo_atari.update(agent, optimiser, mpo_atari.discrete_losses, every_state(agent), args)
    return values


def tables(agent):
    with torch.no_grad():
        state = torch.eye(STATES, dtype=torch.float64)
        return agent.target_policy(state), agent.target_critic(state), agent.policy(state)


def mean_kl(p, log_q):
    return (p * (p.log() - log_q)).sum(-1).mean().item()


def test_eta_ends_where_the_scalar_minimiser_does_and_there_the_mean_kl_is_epsilon():
    args, agent = small_args(epsilon=0.2), tabular_agent(0)
    descend(agent, args, 800)
    log_pi_i, scores, _ = tables(agent)
    pi_i, q = log_pi_i.exp().numpy(), scores.numpy()

    def g(log_eta):
        eta = math.exp(log_eta)
        return eta * args.epsilon + eta * np.log((pi_i * np.exp(q / eta)).sum(-1)).mean()

    exact = minimize_scalar(g, bounds=(-5, 5), method="bounded", options={"xatol": 1e-10}).x
    assert agent.log_eta.item() == pytest.approx(exact, abs=1e-3)
    improved = torch.as_tensor(pi_i * np.exp(q / math.exp(agent.log_eta.item())))
    improved /= improved.sum(-1, keepdim=True)
    assert mean_kl(improved, log_pi_i) == pytest.approx(0.2, rel=1e-2)


def test_with_a_loose_bound_the_policy_becomes_q_and_its_multiplier_nothing():
    args, agent = small_args(epsilon=0.2, epsilon_pi=10.0), tabular_agent(1)
    descend(agent, args, 800)
    log_pi_i, scores, log_pi = tables(agent)
    improved = (log_pi_i + scores / agent.log_eta.exp().detach()).softmax(-1)
    torch.testing.assert_close(log_pi.exp(), improved, rtol=0, atol=1e-2)
    assert agent.log_eta_pi.exp() < 0.05


def test_with_a_tight_bound_the_policy_stops_at_it_on_its_way_to_q():
    args, agent = small_args(epsilon=0.5, epsilon_pi=0.01), tabular_agent(2)
    descend(agent, args, 800)
    log_pi_i, scores, log_pi = tables(agent)
    assert mean_kl(log_pi_i.exp(), log_pi) == pytest.approx(0.01, rel=0.05)
    # the maximiser of E_q log pi - eta_pi KL(pi_i || pi) is the mixture of the two targets
    eta_pi = agent.log_eta_pi.exp().item()
    improved = (log_pi_i + scores / agent.log_eta.exp().detach()).softmax(-1)
    mixture = (improved + eta_pi * log_pi_i.exp()) / (1 + eta_pi)
    assert eta_pi > 1
    torch.testing.assert_close(log_pi.exp(), mixture, rtol=0, atol=5e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_learner_reaches_the_action_values_of_pi_i_from_off_policy_data(seed):
    """A deterministic MDP and a uniform b: all windows from all states, each as likely as the other. Q' follows Q."""
    generator, steps, gamma = np.random.default_rng(seed), 3, 0.9
    goes, pays = generator.integers(STATES, size=(STATES, ACTIONS)), generator.normal(size=(STATES, ACTIONS))
    paths = np.array(list(itertools.product(range(STATES), *[range(ACTIONS)] * steps)))
    states, action = [paths[:, 0]], paths[:, 1:]
    for t in range(steps):
        states.append(goes[states[-1], action[:, t]])
    states = np.stack(states, 1)
    reward = torch.as_tensor(pays[states[:, :-1], action])
    one_hot = torch.eye(STATES, dtype=torch.float64)[torch.as_tensor(states)]
    uniform = torch.full_like(reward, -math.log(ACTIONS))
    batch = mpo_atari.FrameBatch(
        one_hot, torch.as_tensor(action), uniform, reward, torch.zeros_like(reward), torch.ones_like(reward)
    )
    args, agent = small_args(gamma=gamma, window=steps), tabular_agent(seed)
    visits = torch.zeros(STATES, ACTIONS, dtype=torch.float64)
    visits.index_put_((torch.as_tensor(states[:, :-1]), batch.action), torch.ones_like(reward), accumulate=True)
    for _ in range(150):
        critic_loss = mpo_atari.discrete_losses(agent, batch, args)[0]
        (gradient,) = torch.autograd.grad(critic_loss, agent.critic.values)
        with torch.no_grad():  # to the mean of the targets, the minimum of the squared loss
            agent.critic.values -= gradient * visits.sum() / (2 * visits)
            agent.target_critic.values.copy_(agent.critic.values)
    pi = tables(agent)[0].exp().numpy()
    follow = np.zeros((STATES * ACTIONS, STATES * ACTIONS))
    for s, a, b in itertools.product(range(STATES), range(ACTIONS), range(ACTIONS)):
        follow[s * ACTIONS + a, goes[s, a] * ACTIONS + b] = pi[goes[s, a], b]
    exact = np.linalg.solve(np.eye(STATES * ACTIONS) - gamma * follow, pays.ravel())
    np.testing.assert_allclose(agent.critic.values.detach().numpy().ravel(), exact, rtol=1e-5, atol=1e-5)


def test_a_nearly_deterministic_policy_stays_finite_and_recovers():
    """First the best action is all but certain and eta falls; then another one becomes the best."""
    args, agent = small_args(epsilon=0.1, epsilon_pi=0.1), tabular_agent(0)
    with torch.no_grad():
        for table in (agent.policy, agent.critic):
            table.values.zero_()[:, 0] = 40.0 if table is agent.policy else 1.0
    agent.copy_targets()
    agent.float()

    def improve(rounds):
        learned = [p for p in agent.parameters() if p.requires_grad]
        optimiser = torch.optim.Adam(learned, lr=0.1, betas=(0.0, 0.0))  # every number moves by 0.1
        batch = mpo_atari.FrameBatch(*(x.float() if x.is_floating_point() else x for x in every_state(agent)))
        for _ in range(rounds):
            for _ in range(10):
                with torch.no_grad():
                    agent.critic.values.copy_(agent.target_critic.values)
                values, _ = mpo_atari.update(agent, optimiser, mpo_atari.discrete_losses, batch, args)
                assert all(math.isfinite(value) for value in values.values())
            agent.copy_targets()

    improve(25)
    assert agent.log_eta.exp() < 1e-4  # on its way to the floor of 1e-6, as far as float32 tells the slope of g
    assert tables_float(agent)[:, 0].min() > 0.999
    with torch.no_grad():
        agent.target_critic.values[:, 1] = 2.0
    improve(150)
    assert tables_float(agent)[:, 1].min() > 0.9
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


def tables_float(agent):
    with torch.no_grad():
        return agent.policy(torch.eye(STATES)).exp()


def test_the_networks_on_frames_are_dqns():
    """Nature DQN with 4 frames and 6 actions has 1,687,206 weights; bytes and floats in [-1, 1] mean the same."""
    for kind in (mpo_atari.Policy, mpo_atari.Critic):
        network = kind((4, 84, 84), 6, ())
        layers = [8 * 8 * 4 * 32 + 32, 4 * 4 * 32 * 64 + 64, 3 * 3 * 64 * 64 + 64, 3136 * 512 + 512, 512 * 6 + 6]
        assert sum(p.numel() for p in network.parameters()) == sum(layers) == 1_687_206
        screens = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
        torch.testing.assert_close(network(screens), network(screens.float() / 127.5 - 1))
        for layer in [layer for layer in network.body if hasattr(layer, "weight")]:  # He: var = 2 / inputs, no bias
            assert layer.weight.var().item() * layer.weight[0].numel() == pytest.approx(2, rel=0.05)
            assert layer.bias.abs().max() == 0
    assert mpo_atari.Policy((4, 84, 84), 6, ())(screens).exp().sum(-1).tolist() == pytest.approx([1, 1], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The replay.
# ---------------------------------------------------------------------------------------------------------------------
WINDOW = 4
SHAPES = {"frames": (4, 1, 2), "vectors": (2,)}


def lived(replay, lengths):
    """Two games at a time. Step t of episode e of game g is named 60 g + 10 e + t, in its frames and in all entries.

    lengths[g] are those of game g's episodes, one after the other; odd ones end by termination. Returns all the names.
    """
    names = {}
    for game, episodes in enumerate(lengths):
        here = np.array([game])
        for number, length in enumerate(episodes):
            first = 60 * game + 10 * number + 1
            frames = [np.zeros(2)] * 3 + [np.array([first + t, 255 - first - t]) for t in range(length + 1)]
            stacks = [np.stack(frames[t : t + 4]).reshape(1, 4, 1, 2).astype(np.uint8) for t in range(length + 1)]
            if len(replay.shape) == 1:
                stacks = [stack[:, -1, 0].astype(np.float32) for stack in stacks]
            replay.begin(here, stacks[0])
            for t in range(length):
                ends = number % 2 == 1 and t == length - 1
                step = {"action": first + t, "behaviour_log_prob": -first - t, "reward": first + t, "terminated": ends}
                replay.add_step(here, stacks[t + 1], **{name: np.array([x]) for name, x in step.items()})
            names |= {first + t: (game, number, t, length, stacks) for t in range(length)}
    return names


def rows_kept(replay, lengths):
    """The names of the steps among the newest rows of each ring whose whole stack is among them too."""
    kept, lead = set(), replay.stack - 1
    for game, episodes in enumerate(lengths):
        ring = []
        for number, length in enumerate(episodes):
            ring += [None] * lead + [60 * game + 10 * number + 1 + t for t in range(length)] + [None]
        newest = ring[-replay.length :] if len(ring) <= replay.length else ring[-replay.length :][lead:]
        kept |= {name for name in newest if name is not None}
    return kept


HISTORIES = {  # rows of a ring, lengths of the episodes of each of the two games
    "not full": (40, [[6, 3], [5]]),
    "one game much shorter": (60, [[9, 9, 9], [1]]),
    "full, the seam in an episode": (12, [[6, 6, 6], [5, 4, 3, 2]]),
    "full, with episodes of one step": (11, [[1, 1, 1, 1, 1], [2, 1, 2, 1]]),
    "an episode longer than the ring": (13, [[9], [4, 9, 9]]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("history", HISTORIES)
def test_every_window_is_consecutive_steps_of_one_episode_with_its_own_stacks(history, shape):
    length, lengths = HISTORIES[history]
    replay = mpo_atari.FrameReplay(2 * length, 2, SHAPES[shape])
    names = lived(replay, lengths)
    batch = replay.sample(4000, WINDOW)
    starts = batch.reward[:, 0].long().tolist()
    assert set(starts) == rows_kept(replay, lengths)
    for start, window in {start: [x[i] for x in batch] for i, start in enumerate(starts)}.items():
        state, action, log_prob, reward, terminated, valid = window
        game, number, step, total, stacks = names[start]
        count = min(WINDOW, total - step)
        assert valid.tolist() == [1.0] * count + [0.0] * (WINDOW - count)
        for t in range(count + 1):  # with the state after the last step
            assert np.array_equal(state[t].numpy(), stacks[step + t][0])
        expected = list(range(start, start + count))
        assert action[:count].tolist() == reward[:count].tolist() == expected
        assert (-log_prob[:count]).tolist() == expected
        ends = step + count == total and number % 2 == 1
        assert terminated[:count].tolist() == [0.0] * (count - 1) + [float(ends)]


def test_starts_are_drawn_uniformly_over_the_steps_of_all_games():
    replay = mpo_atari.FrameReplay(120, 2, (4, 1, 2))
    lived(replay, [[9, 9, 9], [1]])
    torch.manual_seed(0)
    _, counts = replay.sample(28_000, WINDOW).reward[:, 0].unique(return_counts=True)
    assert len(counts) == 28 and ((counts - 1000).abs() < 5 * 1000**0.5).all()


def test_a_million_steps_take_less_than_8_gigabytes_and_no_frame_is_stored_twice():
    replay = mpo_atari.FrameReplay(8000, 8, (4, 84, 84))
    assert sum(rows.untyped_storage().nbytes() for rows in replay.rows.values()) * 125 < 7.2e9


def contents(replay):
    return {name: values.clone() for name, values in replay.rows.items()} | replay.state_dict()


class SmallChunks(mpo_atari.FrameReplay):
    CHUNK = 500


def small_replay(folder):
    return SmallChunks(5000, 2, (4, 1, 2), folder)


def checkpoint(replay, run_dir):
    nothing = SimpleNamespace(state_dict=dict)
    mpo_atari.save_run(run_dir, nothing, nothing, replay, {})


def restored(run_dir):
    replay, ignored = small_replay(run_dir / "replay"), SimpleNamespace(load_state_dict=lambda saved: None)
    mpo_atari.load_checkpoint(run_dir, ignored, ignored, replay)
    return replay


def test_a_checkpoint_writes_only_the_chunks_that_changed_and_a_restored_replay_is_the_same(tmp_path):
    replay = small_replay(tmp_path / "replay")
    lived(replay, [[9] * 5, [9] * 5])
    checkpoint(replay, tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in replay.folder.iterdir()}
    assert sorted(first) == ["00000-1.pt", "00005-1.pt"]  # the two rings begin in rows 0 and 2500
    for _ in range(20):
        lived(replay, [[9] * 5])
    checkpoint(replay, tmp_path)
    second = {path.name: path.stat().st_mtime_ns for path in replay.folder.iterdir()}
    assert sorted(second) == ["00000-2.pt", "00001-2.pt", "00002-2.pt", "00005-1.pt"]
    assert second["00005-1.pt"] == first["00005-1.pt"]
    again = restored(tmp_path)
    assert same(contents(again), contents(replay))
    for one in (replay, again):
        lived(one, [[5, 3], [4]])
    torch.manual_seed(1)
    drawn = replay.sample(50, WINDOW)
    torch.manual_seed(1)
    assert all(map(torch.equal, drawn, again.sample(50, WINDOW)))


def test_chunks_written_for_a_checkpoint_that_never_came_do_not_touch_the_one_before(tmp_path):
    replay = small_replay(tmp_path / "replay")
    lived(replay, [[9] * 5, [9] * 5])
    checkpoint(replay, tmp_path)
    before = contents(replay)
    lived(replay, [[8] * 5, [7] * 5])
    replay.write_chunks()  # killed here
    (tmp_path / "replay/00001-2.pt.tmp").write_bytes(b"cut short")
    again = restored(tmp_path)
    assert same(contents(again), before)
    checkpoint(again, tmp_path)
    assert sorted(path.name for path in again.folder.iterdir()) == ["00000-1.pt", "00005-1.pt"]


SAVE_FOR_EVER = """
import os, random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = sys.argv[1:2]
import mpo_atari, torch
torch.set_num_threads(1)
nothing = SimpleNamespace(state_dict=dict, load_state_dict=lambda saved: None)

def make():
    return mpo_atari.FrameReplay(4096, 2, (4, 84, 84), Path("replay"))

def save(replay, count):
    for name, rows in replay.rows.items():
        if name != "frame":
            rows.fill_(count % 2 if name in ("last", "terminated") else count)
    replay.rows["frame"].fill_(count % 256)
    replay.changed[:] = True
    mpo_atari.save_run(".", nothing, nothing, replay, {"count": count})

began, chance, last, cut = time.time(), random.Random(0), 0, 0
save(make(), 0)
took = time.time() - began
for kill in range(10):
    child = os.fork()
    if child == 0:
        replay = make()
        mpo_atari.load_checkpoint(".", nothing, nothing, replay)
        for count in range(last + 1, 10**9):
            save(replay, count)
    began = os.stat("checkpoint.pt").st_ino
    while os.stat("checkpoint.pt").st_ino == began:
        time.sleep(0.001)
    time.sleep(2 * took * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    replay = make()
    last = mpo_atari.load_checkpoint(".", nothing, nothing, replay)["count"]
    assert (replay.rows["frame"] == last % 256).all() and (replay.rows["reward"] == last).all()
    cut += len(list(Path("replay").iterdir())) > len(replay.files)
print(last, cut)
"""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(tmp_path):
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(Path(mpo_atari.__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    saved, cut = map(int, done.stdout.split())
    assert saved >= 3 and cut >= 3, "the kills should fall into the writing, and the writing should come to an end too"


# ---------------------------------------------------------------------------------------------------------------------
# Games, and what of them goes to the replay.
# ---------------------------------------------------------------------------------------------------------------------
class Recorded(gym.vector.VectorWrapper):
    """Keeps all that the environment says, and pays for each step its number: 1000 times the game's, plus the time."""

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


def play(steps, rows_each=1000, env=None, **changes):
    """Play with random actions; the environment's own record, the replay, and the scores of the games that ended."""
    args = mpo_atari.Args(**(dict(num_envs=3, clip_rewards=False, threads=1) | changes))
    env = Recorded(mpo_atari.make_env(args))
    replay = mpo_atari.FrameReplay(rows_each * args.num_envs, args.num_envs, env.single_observation_space.shape)
    games, scores, counted = mpo_atari.Games(env, replay, seed=7), [], 0
    for _ in range(steps):
        count, ended = games.step(uniform(int(env.single_action_space.n)), args)
        counted += count
        scores += ended
    return env, replay, scores, counted


def compare_with_record(env, replay, steps, window=5):
    """Every window drawn is what the environment said: stacks, actions, ends; and none holds a step of a reset."""
    over = np.array([terminated | truncated for terminated, truncated in env.ends])  # [steps, N]
    batch = replay.sample(3000, window)
    begun, drawn = 0, set()
    for i in range(len(batch.state)):
        game, time = divmod(int(batch.reward[i, 0]), 1000)
        count = 0
        while count < window and time + count < steps and not (count and over[time + count - 1, game]):
            count += 1
        assert batch.valid[i].tolist() == [1.0] * count + [0.0] * (window - count)
        assert not over[time - 1, game] or time == 0, "the step after the end of a game is no step"
        drawn.add((game, time))
        begun += time == 0 or over[max(time - 2, 0), game]
        for t in range(count):
            assert int(batch.reward[i, t]) == 1000 * game + time + t
            assert int(batch.action[i, t]) == env.actions[time + t][game]
            assert batch.terminated[i, t] == env.ends[time + t][0][game]
        for t in range(count + 1):
            assert np.array_equal(batch.state[i, t].numpy(), env.observations[time + t][game])
    assert begun > 20, "no window begins with a game"
    return drawn, over


def test_stacks_are_the_environments_own_across_the_starts_of_games():
    steps = 120
    env, replay, _, counted = play(steps, time_limit=17)
    drawn, over = compare_with_record(env, replay, steps)
    resets = {(game, t + 1) for t in range(steps - 1) for game in range(3) if over[t, game]}
    assert over[16].all() and not over[:16].any() and over[34].all()  # 17 steps a game, and one for its reset
    assert len(resets) >= 15 and counted == 3 * steps - len(resets)
    assert drawn == {(game, t) for t in range(steps) for game in range(3)} - resets
    assert not replay.rows["terminated"].any(), "a game cut off by the limit on frames bootstraps"
    assert replay.rows["behaviour_log_prob"].unique().tolist() == pytest.approx([-math.log(6), 0], abs=1e-6)


def test_stacks_are_the_environments_own_across_the_seam_of_the_ring():
    env, replay, _, _ = play(120, rows_each=50, time_limit=17)
    drawn, _ = compare_with_record(env, replay, 120)
    assert min(t for _, t in drawn) > 70 and max(t for _, t in drawn) == 119


def test_frames_of_another_task_are_stacked_and_stored_the_same_way():
    for env_id in ("Catch-v0", "Screen-v0"):
        env, replay, _, _ = play(60, env_id=env_id)
        drawn, over = compare_with_record(env, replay, 60)
        assert env.observations[0].shape == (3, 4, 84, 84) and not env.observations[0][:, :3].any()
        assert replay.rows["terminated"].sum() == over.sum() > 0


def test_vectors_are_stored_as_float32_and_actions_begin_at_zero():
    env, replay, _, _ = play(60, env_id="Shifted-v0")
    compare_with_record(env, replay, 60)
    assert env.observations[0].dtype == np.float32
    actions = np.stack(env.actions)
    assert set(np.unique(actions)) == {0, 1, 2}
    assert set(np.unique(env.paid)) == {0.0, 51.0, 61.0, 71.0}  # the task itself counts them from 5; 0 in a reset


def test_a_limit_on_time_bootstraps_and_an_end_does_not():
    _, cut, _, _ = play(60, env_id="Cut-v0")
    assert not cut.rows["terminated"].any()
    _, ended, _, _ = play(60, env_id="Corridor-v0")
    assert ended.rows["terminated"].sum() == 30
    _, limited, _, _ = play(60, env_id="Corridor-v0", time_limit=3)
    assert not limited.rows["terminated"].any()


def test_rewards_are_clipped_for_learning_and_scores_are_not():
    args = mpo_atari.Args(env_id="Corridor-v0", num_envs=2)
    env = mpo_atari.make_env(args)
    replay = mpo_atari.FrameReplay(200, 2, (2,))
    games, scores = mpo_atari.Games(env, replay, seed=1), []
    for _ in range(24):
        scores += games.step(lambda state: torch.tensor([[-1e9, -1e9, 0.0]]).repeat(len(state), 1), args)[1]
    assert scores == [5 * 21.0] * 8  # five steps a game and one for its reset
    assert set(replay.rows["reward"].tolist()) == {0.0, 1.0}


def test_the_loss_of_a_life_is_an_end_for_learning_while_the_score_is_that_of_the_whole_game():
    env, replay, scores, _ = play(400, env_id="ALE/Breakout-v5", episodic_life=True, num_envs=2)
    plain, untouched, *_ = play(400, env_id="ALE/Breakout-v5", num_envs=2)
    for recorded, lost in ((env, 5), (plain, 1)):
        ended = sum(int(terminated.sum()) for terminated, _ in recorded.ends)
        assert ended >= 2
        filled = replay if recorded is env else untouched
        assert lost * ended <= filled.rows["terminated"].sum() < lost * (ended + 2)
    for game in range(2):  # the scores, here sums of the numbers of steps, are of whole games
        ends = [t for t, (terminated, _) in enumerate(env.ends) if terminated[game]]
        assert sum(range(ends[0] + 1)) + 1000 * game * (ends[0] + 1) in scores
        assert sum(range(ends[0] + 2, ends[1] + 1)) + 1000 * game * (ends[1] - ends[0] - 1) in scores


def resize(picture):
    """To 84 x 84 by areas: each new pixel is the mean of what it covers."""

    def cover(old):
        left, right = np.arange(84) * old / 84, (np.arange(84) + 1) * old / 84
        pixel = np.arange(old)
        shared = np.minimum(right[:, None], pixel + 1) - np.maximum(left[:, None], pixel)
        return shared.clip(0) * 84 / old

    return cover(picture.shape[0]) @ picture @ cover(picture.shape[1]).T


@pytest.mark.parametrize("game, name, most", [("Pong", "pong", 0), ("Boxing", "boxing", 1), ("Qbert", "qbert", 25)])
def test_frames_are_those_of_dqns_protocol_made_from_ales_own_screens(game, name, most):
    """Each action for four frames, the greater of the last two, 84 x 84; rewards summed, not clipped."""
    args = mpo_atari.Args(env_id=f"ALE/{game}-v5", num_envs=1, threads=1)
    env = mpo_atari.make_env(args)
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


def test_sticky_actions_reach_the_game():
    """With sticky actions that never let go, what one does makes no difference."""

    def screens(sticky, action):
        env = mpo_atari.make_env(mpo_atari.Args(num_envs=1, threads=1, sticky_actions=sticky))
        env.reset(seed=3)
        return [env.step(np.array([action]))[0] for _ in range(30)][-1]

    assert np.array_equal(screens(1.0, 2), screens(1.0, 3))
    assert not np.array_equal(screens(0.0, 2), screens(0.0, 3))


def test_an_evaluation_plays_one_whole_game_in_each_environment():
    """The second action pays 11 in each step. Games have different lengths; one that is over waits for the others."""
    env = mpo_atari.make_env(mpo_atari.Args(env_id="Uneven-v0"), num_envs=4)
    policy = lambda state: torch.tensor([0.3, 0.4, 0.3]).log().repeat(len(state), 1)  # noqa: E731
    lengths, single = [], gym.make("Uneven-v0")
    for number in range(4):
        single.reset(seed=(mpo_atari.episode_seed(1, 1) >> 2) + number)
        lengths.append(single.unwrapped.length)
    assert len(set(lengths)) > 1 and mpo_atari.play_games(env, policy, 1, "cpu") == [11.0 * n for n in lengths]
    drawn = mpo_atari.play_games(env, policy, 1, "cpu", sampled=True)
    assert drawn != [11.0 * n for n in lengths] and all(n <= score <= 21 * n for n, score in zip(lengths, drawn))


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=6))
def test_the_actions_drawn_are_those_of_the_policy_with_their_log_probabilities(values):
    log_prob = torch.tensor(values).log_softmax(-1)
    action, found = mpo_atari.choose(lambda state: log_prob.repeat(2000, 1), np.zeros((2000, 2)), "cpu")
    assert torch.equal(found, log_prob[torch.as_tensor(action)])
    shares = np.bincount(action, minlength=len(values)) / 2000
    assert np.abs(shares - log_prob.exp().numpy()).max() < 0.06
    most, _ = mpo_atari.choose(lambda state: log_prob.repeat(2, 1), np.zeros((2, 2)), "cpu", sampled=False)
    assert log_prob[torch.as_tensor(most)].tolist() == [log_prob.max()] * 2


# ---------------------------------------------------------------------------------------------------------------------
# The script as its users run it.
# ---------------------------------------------------------------------------------------------------------------------
TINY = dict(env_id="CartPole-v1", num_envs=2, layers=(16, 16), batch_size=4, window=4, learning_starts=100, threads=1)
TINY |= dict(total_timesteps=400, log_every=100, eval_episodes=2, buffer_size=5000, updates_per_step=0.25)
OUR_LINES = [
    r"\S+, observations \(.*\), \d+ actions; writing to \S+",
    r"step [\d,]+/[\d,]+  return \S+  \d+ steps/s(  \d+ min \d\d s left)?",
    r"step [\d,]+: the most probable action returns \S+",
    r"done: [\d,]+ steps in \d+ min \d\d s; everything is in \S+",
]


def tiny(**changes):
    return flags(**(TINY | changes))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of the script, copied alone into an empty folder; and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(mpo_atari.__file__, folder)
    command = [sys.executable, "-I", "mpo_atari.py", *tiny(seed=3)]  # -I: no PYTHONPATH, nothing beside it
    process = subprocess.run(command, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr
    (run_dir,) = (folder / "runs").iterdir()
    return process, run_dir


def test_a_script_copied_alone_into_an_empty_folder_runs_and_prints_our_lines_only(started):
    process, run_dir = started
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert all(any(re.fullmatch(pattern, line) for pattern in OUR_LINES) for line in lines), lines
    assert all(any(re.fullmatch(pattern, line) for line in lines) for pattern in OUR_LINES), lines
    assert re.fullmatch(r"CartPole-v1__mpo_atari__3__\d+", run_dir.name)
    kinds = {path.name.split(".")[0] for path in run_dir.iterdir()}
    assert kinds == {"args", "checkpoint", "events", "model", "progress", "replay"}
    table = rows(run_dir)
    assert [int(row["global_step"]) // 100 for row in table] == [1, 2, 3, 4]
    assert all(math.isfinite(float(value)) for row in table for value in row.values() if value)
    assert int(table[-1]["charts/updates"]) == 75  # a quarter of the 300 steps after the first hundred


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(started, tmp_path):
    train(mpo_atari, tiny(seed=3, run_dir="same"), tmp_path)
    train(mpo_atari, tiny(seed=4, run_dir="other"), tmp_path)
    assert timeless(tmp_path / "same") == timeless(started[1])
    assert (tmp_path / "same/model.pt").read_bytes() == (started[1] / "model.pt").read_bytes()
    assert timeless(tmp_path / "other")[0] != timeless(started[1])[0]


def test_an_atari_game_is_played_saved_and_evaluated(tmp_path):
    words = tiny(env_id="ALE/Pong-v5", time_limit=20, total_timesteps=150, run_dir="run", seed=2)
    process = train(mpo_atari, words, tmp_path)
    assert process.err == "" and "observations (4, 84, 84), 6 actions" in process.out
    assert last_step(tmp_path / "run") == 150
    logged = float(rows(tmp_path / "run")[-1]["eval/episodic_return"])
    evaluated = train(mpo_atari, flags(evaluate="run", eval_episodes=2), tmp_path)
    assert f"ALE/Pong-v5: mean return {logged:.1f} over 2 episodes" in evaluated.out
    sampled = train(mpo_atari, [*flags(evaluate="run", eval_episodes=3), "--eval-sampled"], tmp_path)
    assert "over 3 episodes" in sampled.out
    saved = load(tmp_path / "run/checkpoint.pt")
    assert saved["replay"]["written"].sum() == 150 + 2 * 4 * math.ceil(75 / 20)  # a step each; a game's first stack


def test_the_smallest_value_of_every_setting_runs_with_finite_numbers(tmp_path):
    least = dict(num_envs=1, window=1, batch_size=1, time_limit=1, layers=(1,), buffer_size=10, learning_starts=0)
    least |= dict(total_timesteps=6, log_every=1, updates_per_step=1.0, target_period=1, gamma=0.0, eval_episodes=1)
    process = train(mpo_atari, tiny(run_dir="run", **least), tmp_path)
    assert process.err == "" and len(rows(tmp_path / "run")) == 6
    assert all(math.isfinite(float(value)) for row in rows(tmp_path / "run") for value in row.values() if value)


def test_a_run_killed_goes_on_from_its_checkpoint_with_replay_counters_and_weights(tmp_path):
    settings = dict(total_timesteps=4000, checkpoint_every=500, run_dir="run", eval_every=0, buffer_size=1600)
    process = Run(mpo_atari, tiny(**settings), tmp_path)
    for moment in (1000, 2200):
        wait_for_row(process, tmp_path / "run", moment)
        assert stop(process, signal.SIGKILL).returncode == -signal.SIGKILL
        before, table = load(tmp_path / "run/checkpoint.pt"), rows(tmp_path / "run")
        step = before["counters"]["global_step"]
        assert last_step(tmp_path / "run") - 600 <= step and step >= moment - 600

        args = mpo_atari.read_args(tmp_path / "run")
        options = dict(shape=(4,), actions=2, layers=args.layers)
        agent = mpo_atari.Agent(mpo_atari.Policy(**options), mpo_atari.Critic(**options), eta=2.0, eta_pi=3.0)
        groups = [[*agent.policy.parameters()], [*agent.critic.parameters()], agent.multipliers()]
        optimiser = torch.optim.Adam([{"params": group} for group in groups], fused=True)
        replay = mpo_atari.make_replay(args, (4,))
        replay.folder = tmp_path / "run/replay"
        counters = mpo_atari.load_checkpoint(tmp_path / "run", agent, optimiser, replay)
        assert same(agent.state_dict(), before["agent"]) and same(optimiser.state_dict(), before["optimiser"])
        assert torch.equal(torch.get_rng_state(), before["random_state"])
        assert counters["updates"] == (step - 100) // 4 or counters["updates"] == (step - 99) // 4
        assert replay.written.sum() >= step and (~replay.rows["last"]).sum() > min(step, 1500) * 0.8
        process = Run(mpo_atari, flags(resume="run"), tmp_path)
    assert finish(process).returncode == 0, process.err
    steps = [int(row["global_step"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps)) and 4000 <= steps[-1] < 4010
    kept = [row for row in table if int(row["global_step"]) <= step]
    assert rows(tmp_path / "run")[: len(kept)] == kept
    named = set(load(tmp_path / "run/checkpoint.pt")["replay"]["files"].values())
    assert {path.name for path in (tmp_path / "run/replay").iterdir()} == named


def test_a_stopped_run_saves_prints_the_command_to_go_on_and_can_be_made_longer(tmp_path):
    process = Run(mpo_atari, tiny(total_timesteps=100_000, checkpoint_every=0, run_dir="run"), tmp_path)
    wait_for_row(process, tmp_path / "run", 300)
    assert stop(process, signal.SIGTERM).returncode == 128 + signal.SIGTERM and process.err == ""
    step = load(tmp_path / "run/checkpoint.pt")["counters"]["global_step"]
    assert step >= 300
    longer = Run(mpo_atari, [*resume_command(process), *flags(total_timesteps=step + 200)], tmp_path)
    assert finish(longer).returncode == 0, longer.err
    assert step + 200 <= last_step(tmp_path / "run") < step + 210
    steps = [int(row["global_step"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps))
    again = train(mpo_atari, flags(resume="run"), tmp_path)
    assert "done" in again.out and [int(row["global_step"]) for row in rows(tmp_path / "run")] == steps


REFUSED = {  # flags, and what the sentence must name
    "continuous actions": (dict(env_id="Pendulum-v1"), ["Pendulum-v1", "continuous", "mpo_continuous.py"]),
    "a task of dm_control": (dict(env_id="dm_control/walker-walk-v0"), ["walker-walk", "mpo_continuous.py"]),
    "several discrete actions": (dict(env_id="Board-v0"), ["Board-v0", "one choice"]),
    "images of another size": (dict(env_id="WideScreen-v0"), ["WideScreen-v0", "(210, 160, 3)", "(4, 84, 84)"]),
    "a game without our preprocessing": (dict(env_id="PongNoFrameskip-v4"), ["(210, 160, 3)", "(4, 84, 84)"]),
    "a misspelt game": (dict(env_id="ALE/Pnog-v5"), ["ALE/Pnog-v5", "ALE/Pong-v5"]),
    "a game without its family": (dict(env_id="Pong-v5"), ["Pong-v5", "did you mean"]),
    "no task at all": (dict(env_id=""), ["there is no task"]),
    "a task that needs a package": (dict(env_id="LunarLander-v3"), ["LunarLander"]),
    "lives in a task without": (dict(env_id="CartPole-v1", episodic_life=True), ["--episodic-life", "ALE/"]),
    "no games": (dict(num_envs=0), ["--num-envs"]),
    "a bound of zero": (dict(epsilon_pi=0.0), ["--epsilon-pi"]),
    "a discount of one": (dict(gamma=1.0), ["--gamma", "1"]),
    "more warm-up than steps": (dict(learning_starts=500, total_timesteps=500), ["--total-timesteps", "--learning-st"]),
    "a chance above one": (dict(sticky_actions=1.5), ["--sticky-actions", "1.5"]),
    "a replay too small for its games": (dict(buffer_size=20, num_envs=8), ["--buffer-size", "--num-envs 8"]),
    "a replay larger than memory": (dict(buffer_size=10**12), ["--buffer-size", "GB"]),
    "a device that does not exist": (dict(device="abacus"), ["abacus", "--device cpu"]),
    "a folder that holds a run": (dict(run_dir="full"), ["full", "CartPole-v1", "--resume full"]),
    "resuming the run of another task": (dict(resume="full", env_id="ALE/Pong-v5"), ["full", "CartPole-v1"]),
    "resuming with another network": (dict(resume="full", layers=(8, 8)), ["full", "--layers"]),
    "resuming with another number of games": (dict(resume="full", num_envs=5), ["full", "--num-envs"]),
    "resuming without a checkpoint": (dict(resume="no_checkpoint"), ["no_checkpoint", "checkpoint"]),
    "a checkpoint whose replay is cut short": (dict(resume="cut"), ["cut/checkpoint.pt", "damaged"]),
    "a checkpoint whose replay is gone": (dict(resume="gone"), ["gone/checkpoint.pt", "damaged"]),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """All of REFUSED, run once: the folder they ran in, and the processes by name."""
    folder, lists = tmp_path_factory.mktemp("refused"), []
    train(mpo_atari, tiny(run_dir="full"), folder)
    for name in ("no_checkpoint", "cut", "gone"):
        shutil.copytree(folder / "full", folder / name)
    (folder / "no_checkpoint/checkpoint.pt").unlink()
    (chunk, *_) = sorted((folder / "cut/replay").iterdir())
    chunk.write_bytes(chunk.read_bytes()[:1000])
    shutil.rmtree(folder / "gone/replay")
    for number, (wrong, _) in enumerate(REFUSED.values()):
        new = {} if "resume" in wrong else {"env_id": "CartPole-v1", "run_dir": f"new{number}"}
        lists.append(flags(**(new | wrong)))
    runs = together(*(lambda words=words: run(mpo_atari, words, folder) for words in lists))
    return folder, dict(zip(REFUSED, runs))


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_one_sentence_before_training_starts(case, refusals):
    folder, processes = refusals
    process = processes[case]
    assert (process.returncode, process.out) == (2, ""), process.err
    sentence = one_sentence(process)
    assert sentence.startswith("mpo_atari.py: ")
    for word in REFUSED[case][1]:
        assert word in sentence
    assert not list(folder.glob("new*"))


def test_a_game_without_ale_py_names_the_package(tmp_path):
    process = run(mpo_atari, flags(env_id="ALE/Pong-v5", run_dir="run"), tmp_path, hidden=["ale_py"])
    assert process.returncode == 2 and "ale-py" in one_sentence(process) and ".[atari]" in process.err


@pytest.mark.parametrize("task, named", [("NaNScore", "reward"), ("NaNBoard", "observation")])
def test_a_number_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays_good(task, named, tmp_path):
    words = tiny(env_id=f"{task}-v0", run_dir="run", time_limit=20, checkpoint_every=100, log_every=50)
    process = run(mpo_atari, words, tmp_path)
    sentence = one_sentence(process)
    assert process.returncode == 1 and named in sentence and "finite" in sentence
    step = load(tmp_path / "run/checkpoint.pt")["counters"]["global_step"]
    assert f"step {step}" in sentence and 200 <= step < 260
    assert all(value not in ("nan", "inf") for row in rows(tmp_path / "run") for value in row.values())


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_stays_good(tmp_path):
    words = tiny(run_dir="run", total_timesteps=5000, checkpoint_every=200, updates_per_step=0.02)
    process = run(mpo_atari, words, tmp_path, file_size=25_000)
    assert process.returncode == 1 and "File too large" in one_sentence(process)
    if (tmp_path / "run/checkpoint.pt").exists():
        step = load(tmp_path / "run/checkpoint.pt")["counters"]["global_step"]
        assert f"step {step:,}" in process.err
        longer = run(mpo_atari, flags(resume="run", total_timesteps=step + 100), tmp_path)  # with room again
        assert longer.returncode == 0, longer.err


def test_paper_restores_the_printed_learning_rate_and_period():
    restored = mpo_atari.resolve(mpo_atari.Args(paper=True))
    printed = dict(gamma=0.99, epsilon=0.1, learning_rate=5e-4, policy_learning_rate=5e-4, target_period=1000)
    assert {name: getattr(restored, name) for name in printed} == printed


def test_vectors_have_defaults_of_their_own_which_the_user_and_paper_override(tmp_path):
    few = dict(total_timesteps=1100, eval_episodes=1, layers=(16, 16), learning_starts=1090, threads=1)
    asked = {"left": [], "typed": ["--batch-size", "4"], "paper": ["--paper"]}
    for name, extra in asked.items():
        train(mpo_atari, [*flags(**few, env_id="CartPole-v1", run_dir=name), *extra], tmp_path)
    used = {name: json.loads((tmp_path / name / "args.json").read_text()) for name in asked}
    vectors, default = mpo_atari.VECTORS, dataclasses.asdict(mpo_atari.Args())
    assert all(vectors[name] != default[name] for name in vectors)
    expected = {"left": vectors, "typed": vectors | {"batch_size": 4}, "paper": vectors | mpo_atari.PAPER}
    for name, values in expected.items():
        settings = default | values | few | {"env_id": "CartPole-v1"}
        assert {key: used[name][key] for key in vectors} == {key: settings[key] for key in vectors}
    games = dict(env_id="ALE/Pong-v5", time_limit=20, run_dir="frames", learning_starts=100, total_timesteps=110)
    train(mpo_atari, flags(**(few | games)), tmp_path)
    frames = json.loads((tmp_path / "frames/args.json").read_text())
    assert all(frames[name] == default[name] for name in vectors if name not in games)


def test_help_has_a_line_for_every_setting(tmp_path):
    process = run(mpo_atari, ["--help"], tmp_path, cold=True, environment={"COLUMNS": "100"})
    assert (process.returncode, process.err) == (0, "")
    for field in dataclasses.fields(mpo_atari.Args):
        assert f"--{field.name.replace('_', '-')}" in process.out
    assert "a 16 GB laptop" in re.sub(r"[│\s]+", " ", process.out)


def test_a_video_shows_the_game_at_true_speed(tmp_path):
    words = tiny(env_id="ALE/Pong-v5", time_limit=12, total_timesteps=120, run_dir="run")
    train(mpo_atari, [*words, "--capture-video"], tmp_path)
    reader = imageio.get_reader(tmp_path / "run/evaluation.mp4")
    assert reader.get_meta_data()["fps"] == 15  # 60 frames a second, every fourth seen
    pictures = list(reader.iter_data())
    assert len(pictures) == 12 and pictures[0].shape == (336, 336, 3) and pictures[0].std() > 5


# ---------------------------------------------------------------------------------------------------------------------
# It learns.
# ---------------------------------------------------------------------------------------------------------------------
CATCH = dict(env_id="Catch-v0", total_timesteps=4500, learning_starts=400, window=8, batch_size=4, epsilon_pi=0.1)
CATCH |= dict(
    learning_rate=5e-4, policy_learning_rate=5e-4, multiplier_rate=0.03, target_period=40, updates_per_step=0.25
)
CATCH |= dict(eval_every=0, eval_episodes=1, threads=1, seed=1)


def test_it_learns_to_catch_nine_balls_of_ten_from_the_screen(tmp_path):
    """1,025 updates on 32 stacks of frames each; the untrained policy misses most balls."""
    train(mpo_atari, flags(**CATCH, run_dir="run"), tmp_path)
    out = train(mpo_atari, flags(evaluate="run", eval_episodes=100), tmp_path).out
    caught = (float(re.search(r"mean return (\S+)", out)[1]) + 1) / 2  # 1 for a ball caught, -1 for one missed
    assert caught >= 0.9, out
