"""What mpo_atari.py has of its own: sums over actions, networks for images, frames stored once."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import normal, numbers
from running import PATIENCE, same, surroundings
from scipy.optimize import minimize_scalar

import mpo_atari

STATES, ACTIONS = 3, 4


# ---- One gradient step: against sums written out state by state and action by action.
def small_args(**changes):
    sizes = dict(layers=(7, 6), batch_size=5, window=4, gamma=0.9)
    return mpo_atari.Args(**(sizes | changes))


def small_agent(seed=0, apart=0.5):
    """An agent in float64 whose targets and multipliers all differ from what they start as."""
    torch.manual_seed(seed)
    kinds = (mpo_atari.Policy, mpo_atari.Critic)
    networks = [kind((STATES,), ACTIONS, small_args()) for kind in kinds]
    agent, generator = mpo_atari.Agent(*networks, eta=1.0, eta_pi=1.0).double(), numbers(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(apart * normal(generator, *parameter.shape))
    return agent


def random_batch(agent, lengths=(4, 2, 4, 3, 1), terminated=(1, 1, 0, 0, 1), steps=4, seed=0):
    """Windows with lengths[b] valid steps, the last of them terminal where terminated[b].

    What stands behind the end is random too. log b is that of pi_i give or take one: about half of
    the traces are clipped.
    """
    generator, step = numbers(seed), torch.arange(steps + 1)
    length = torch.as_tensor(lengths).unsqueeze(-1)
    ends = (step == length - 1) & torch.as_tensor(terminated).bool().unsqueeze(-1)
    shape = len(lengths), steps + 1
    behind = (step >= length) & (normal(generator, *shape) > 0)
    state = normal(generator, *shape, STATES)
    action = torch.randint(ACTIONS, shape, generator=generator)
    log_pi = agent.target_policy(state).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return mpo_atari.Rows(
        state=state,
        action=action,
        behaviour_log_prob=log_pi.detach() + normal(generator, *shape),
        reward=normal(generator, *shape),
        terminated=(ends | behind).double(),
        final=((step == length) | (behind & (step > length))).double(),
    )


def slow_losses(agent, batch, args):
    """The three losses by loops over windows, steps and actions, in numpy."""

    def table(network):
        with torch.no_grad():
            return network(batch.state).numpy()

    pi_i, pi = np.exp(table(agent.target_policy)), np.exp(table(agent.policy))
    q_target, q = table(agent.target_critic), table(agent.critic)
    eta, eta_pi = math.exp(agent.log_eta.item()), math.exp(agent.log_eta_pi.item())
    a, b_log, reward, ended, final = (x.numpy() for x in batch[1:])
    squares, g, likelihood, kl = [], [], [], []
    for w in range(len(a)):
        steps = list(final[w]).index(1) if final[w].any() else len(a[w]) - 1
        for t in range(steps):
            target, product = q_target[w, t, a[w, t]], 1.0
            for j in range(t, steps):
                if j > t:
                    product *= args.gamma * min(1, pi_i[w, j, a[w, j]] / math.exp(b_log[w, j]))
                v = sum(pi_i[w, j + 1, x] * q_target[w, j + 1, x] for x in range(ACTIONS))
                v = 0 if ended[w, j] else args.gamma * v
                target += product * (reward[w, j] + v - q_target[w, j, a[w, j]])
                if ended[w, j]:
                    break
            squares.append((q[w, t, a[w, t]] - target) ** 2)
        for t in range(steps + 1):
            if t and ended[w, t - 1]:
                continue  # the observation after a termination: nobody acts there
            raised = [pi_i[w, t, x] * math.exp(q_target[w, t, x] / eta) for x in range(ACTIONS)]
            g.append(math.log(sum(raised)))
            fitted = [y / sum(raised) * math.log(pi[w, t, x]) for x, y in enumerate(raised)]
            likelihood.append(sum(fitted))
            apart = [p * math.log(p / pi[w, t, x]) for x, p in enumerate(pi_i[w, t])]
            kl.append(sum(apart))
    room = args.epsilon_pi - np.mean(kl)
    return {
        "critic": np.mean(squares),
        "policy": -np.mean(likelihood) - eta_pi * room,
        "multipliers": eta * (args.epsilon + np.mean(g)) + eta_pi * room,
    }


def losses_of(agent, batch, args):
    return {k: x.item() for k, x in mpo_atari.discrete_losses(agent, batch, args)[0].items()}


@pytest.mark.parametrize("seed", range(3))
def test_the_three_losses_are_those_of_a_slow_second_implementation(seed):
    args, agent = small_args(), small_agent(seed)
    batch = random_batch(agent, seed=seed)
    slow = slow_losses(agent, batch, args)
    assert losses_of(agent, batch, args) == pytest.approx(slow, rel=1e-9)


def test_a_termination_hides_what_follows_it_in_a_window_that_goes_on():
    args, agent = small_args(), small_agent(1)
    batch = random_batch(agent, lengths=(4, 4), terminated=(False, False))
    batch.terminated[:, 1] = 1
    slow = slow_losses(agent, batch, args)
    assert losses_of(agent, batch, args) == pytest.approx(slow, rel=1e-9)


def test_each_loss_reaches_its_own_parameters_and_no_others():
    agent, owners = small_agent(), dict(critic="critic.", policy="policy.", multipliers="log_eta")
    losses, _ = mpo_atari.discrete_losses(agent, random_batch(agent), small_args())
    assert losses.keys() == owners.keys()
    for name, owner in owners.items():
        agent.zero_grad()
        losses[name].backward(retain_graph=True)
        reached = {n for n, parameter in agent.named_parameters() if parameter.grad is not None}
        assert reached == {n for n, _ in agent.named_parameters() if n.startswith(owner)}


@pytest.mark.parametrize("pay, clipped", [(1.0, False), (1000.0, True)])
def test_an_update_is_one_step_along_the_gradient_with_each_network_clipped_to_a_norm_of_40(
    pay, clipped
):
    args, agent, other = small_args(), small_agent(), small_agent()
    batch = random_batch(agent)
    batch = batch._replace(reward=pay * batch.reward)  # the policy does not see the reward
    sum(mpo_atari.discrete_losses(other, batch, args)[0].values()).backward()
    learned = [p for p in agent.parameters() if p.requires_grad]
    update(agent, torch.optim.SGD(learned, lr=0.1), batch, args)
    for name in ("policy", "critic"):
        gradient = torch.cat([p.grad.flatten() for p in getattr(other, name).parameters()])
        assert (gradient.norm() > 40) == (clipped and name == "critic")
        before = torch.cat([p.flatten() for p in getattr(other, name).parameters()])
        after = torch.cat([p.flatten() for p in getattr(agent, name).parameters()])
        step = 0.1 * gradient * min(1, 40 / (gradient.norm() + 1e-6))
        torch.testing.assert_close(before - after, step, rtol=1e-5, atol=1e-12)
    for mine, theirs in zip(agent.parameters(recurse=False), other.parameters(recurse=False)):
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


def every_state():
    """A step from each state that ends there: the E-step and M-step see each state once."""
    nothing = torch.zeros(STATES, 2, dtype=torch.float64)
    state = torch.eye(STATES, dtype=torch.float64).unsqueeze(1).repeat(1, 2, 1)
    first, last = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    return mpo_atari.Rows(state, nothing.long(), nothing, nothing, nothing + first, nothing + last)


def update(agent, optimiser, batch, args):
    losses, metrics = mpo_atari.discrete_losses(agent, batch, args)
    mpo_atari.gradient_step(agent, optimiser, losses)
    return metrics


def copy_targets(agent):
    agent.target_policy.load_state_dict(agent.policy.state_dict())
    agent.target_critic.load_state_dict(agent.critic.state_dict())


def descend(agent, args, steps, rate=0.05):
    optimiser = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad], lr=rate)
    for number in range(steps):
        optimiser.param_groups[0]["lr"] = rate * (1 - number / steps)
        update(agent, optimiser, every_state(), args)


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
    """A deterministic MDP, a uniform b: all windows from all states, as likely. Q' follows Q."""
    generator, steps, gamma = np.random.default_rng(seed), 3, 0.9
    goes = generator.integers(STATES, size=(STATES, ACTIONS))
    pays = generator.normal(size=(STATES, ACTIONS))
    paths = np.array(list(itertools.product(range(STATES), *[range(ACTIONS)] * steps)))
    action = np.pad(paths[:, 1:], ((0, 0), (0, 1)))  # none is taken from the last state
    states = [paths[:, 0]]
    for t in range(steps):
        states.append(goes[states[-1], action[:, t]])
    states = np.stack(states, 1)
    reward = torch.as_tensor(pays[states, action])
    batch = mpo_atari.Rows(
        state=torch.eye(STATES, dtype=torch.float64)[torch.as_tensor(states)],
        action=torch.as_tensor(action),
        behaviour_log_prob=torch.full_like(reward, -math.log(ACTIONS)),
        reward=reward,
        terminated=torch.zeros_like(reward),
        final=torch.zeros_like(reward),
    )
    args, agent = small_args(gamma=gamma, window=steps), tabular_agent(seed)
    visits = torch.zeros(STATES, ACTIONS, dtype=torch.float64)
    taken = torch.as_tensor(states[:, :-1]), batch.action[:, :-1]
    visits.index_put_(taken, torch.ones_like(reward[:, :-1]), accumulate=True)
    for _ in range(150):
        critic_loss = mpo_atari.discrete_losses(agent, batch, args)[0]["critic"]
        (gradient,) = torch.autograd.grad(critic_loss, agent.critic.values)
        with torch.no_grad():  # to the mean of the targets, the minimum of the squared loss
            agent.critic.values -= gradient * visits.sum() / (2 * visits)
            agent.target_critic.values.copy_(agent.critic.values)
    pi = tables(agent)[0].exp().numpy()
    follow = np.zeros((STATES * ACTIONS, STATES * ACTIONS))
    for s, a, b in itertools.product(range(STATES), range(ACTIONS), range(ACTIONS)):
        follow[s * ACTIONS + a, goes[s, a] * ACTIONS + b] = pi[goes[s, a], b]
    exact = np.linalg.solve(np.eye(STATES * ACTIONS) - gamma * follow, pays.ravel())
    found = agent.critic.values.detach().numpy().ravel()
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_a_nearly_deterministic_policy_stays_finite_and_recovers():
    """First the best action is all but certain and eta falls; then another becomes the best."""
    args, agent = small_args(epsilon=0.1, epsilon_pi=0.1), tabular_agent(0)
    with torch.no_grad():
        for table in (agent.policy, agent.critic):
            table.values.zero_()[:, 0] = 40.0 if table is agent.policy else 1.0
    copy_targets(agent)
    agent.float()

    def improve(rounds):
        learned = [p for p in agent.parameters() if p.requires_grad]
        optimiser = torch.optim.Adam(learned, lr=0.1, betas=(0.0, 0.0))  # all move by 0.1
        floats = (x.float() if x.is_floating_point() else x for x in every_state())
        batch = mpo_atari.Rows(*floats)
        for _ in range(rounds):
            for _ in range(10):
                with torch.no_grad():
                    agent.critic.values.copy_(agent.target_critic.values)
                metrics = update(agent, optimiser, batch, args)
                assert all(math.isfinite(value) for value in metrics.values())
            copy_targets(agent)

    def probabilities():
        with torch.no_grad():
            return agent.policy(torch.eye(STATES)).exp()

    improve(25)
    assert agent.log_eta.exp() < 1e-4  # on its way to the floor of 1e-6
    assert probabilities()[:, 0].min() > 0.999
    with torch.no_grad():
        agent.target_critic.values[:, 1] = 2.0
    improve(150)
    assert probabilities()[:, 1].min() > 0.9
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


def test_the_metrics_are_those_of_their_names():
    args, agent = small_args(), small_agent(2)
    batch = random_batch(agent)
    losses, found = mpo_atari.discrete_losses(agent, batch, args)
    valid = (batch.final.cumsum(1) == 0)[:, :-1]
    led_to = valid & (batch.terminated[:, :-1] == 0)
    alive = torch.cat([torch.ones(len(valid), 1).bool(), led_to], 1)
    with torch.no_grad():
        log_pi_i, log_pi = agent.target_policy(batch.state), agent.policy(batch.state)
        scores, q = agent.target_critic(batch.state), agent.critic(batch.state)
    weights = (log_pi_i + scores / agent.log_eta.exp().detach()).softmax(-1)
    q = q.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)[:, :-1]
    ratio = log_pi_i.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1) - batch.behaviour_log_prob
    trace = ratio.exp().clamp(max=1)[:, 1:-1]
    expected = {
        "eta": agent.log_eta.exp(),
        "eta_pi": agent.log_eta_pi.exp(),
        "kl_q_relative": (weights * (weights.log() - log_pi_i)).sum(-1)[alive].mean() / 0.1,
        "kl_pi_relative": (log_pi_i.exp() * (log_pi_i - log_pi)).sum(-1)[alive].mean() / 1e-3,
        "trace": trace[valid[:, 1:]].mean(),
        "entropy": -(log_pi.exp() * log_pi).sum(-1)[alive].mean(),
        "q_std_over_actions": scores.std(-1, correction=0)[alive].mean(),
        "q_mean": q[valid].mean(),
    }
    expected = {f"mpo/{name}": x.item() for name, x in expected.items()}
    expected |= {f"losses/{name}": x.item() for name, x in losses.items()}
    assert {name: x.item() for name, x in found.items()} == pytest.approx(expected, rel=1e-6)
    assert not any(x.requires_grad for x in found.values())


# ---- Networks.
def test_vectors_pass_a_norm_after_the_first_layer_and_a_relu_after_each():
    network = mpo_atari.Critic((STATES,), ACTIONS, mpo_atari.Args(layers=(7, 6, 5)))
    (first, norm), second, third = network.layers[:2], network.layers[3], network.layers[5]
    state = normal(numbers(3), 20, STATES).float()
    h = torch.layer_norm(first(state), (7,), norm.weight, norm.bias)
    h = third(torch.relu(second(torch.relu(h))))
    torch.testing.assert_close(network(state), network.head(torch.relu(h)))


def he_initialised(layers, tolerance):
    """He: the variance is 2 / inputs, and there is no bias."""
    for layer in layers:
        spread = layer.weight.var().item() * layer.weight[0].numel()
        assert spread == pytest.approx(2, rel=tolerance) and layer.bias.abs().max() == 0


def test_the_networks_on_frames_are_dqns():
    """Nature DQN with 4 frames and 6 actions has 1,687,206 weights; bytes and floats in [-1, 1]
    mean the same; any axes may come first."""
    for kind in (mpo_atari.Policy, mpo_atari.Critic):
        network = kind((4, 84, 84), 6, mpo_atari.Args())
        layers = [8 * 8 * 4 * 32 + 32, 4 * 4 * 32 * 64 + 64, 3 * 3 * 64 * 64 + 64]
        layers += [3136 * 512 + 512, 512 * 6 + 6]
        assert sum(p.numel() for p in network.parameters()) == sum(layers) == 1_687_206
        screens = torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8)
        with torch.no_grad():
            found = network(screens)
            torch.testing.assert_close(found, network(screens.float() / 127.5 - 1))
            torch.testing.assert_close(found[1, 2], network(screens[1, 2:])[0])
        assert found.shape == (2, 3, 6)
        he_initialised([layer for layer in network.layers if hasattr(layer, "weight")], 0.05)
        if kind is mpo_atari.Policy:
            assert (found.exp().sum(-1) - 1).abs().max() < 1e-5
            assert (found.exp() - 1 / 6).abs().max() < 0.01  # it starts nearly uniform


@pytest.mark.parametrize("shape", [(10, 10, 4), (10, 10, 10), (3, 32, 1)])
def test_the_network_on_small_images_is_minatars(shape):
    """16 filters of 3 x 3 that see each place with all its channels, then 128 units."""
    height, width, channels = shape
    network = mpo_atari.Critic(shape, 3, mpo_atari.Args())
    inside = 16 * (height - 2) * (width - 2)
    layers = [9 * channels * 16 + 16, inside * 128 + 128, 128 * 3 + 3]
    assert sum(p.numel() for p in network.parameters()) == sum(layers)
    state = torch.rand(2, 5, *shape) < 0.3
    filters, flat = network.layers[0], network.layers[3]
    he_initialised([filters, flat], 0.3)
    with torch.no_grad():
        patches = state.float().unfold(2, 3, 1).unfold(3, 3, 1)  # [2, 5, h-2, w-2, C, 3, 3]
        h = torch.einsum("...cij,fcij->f...", patches, filters.weight)  # one number per filter
        h = torch.relu(h).movedim(0, 2).flatten(2)  # the places of each filter together
        expected = network.head(torch.relu(h @ flat.weight.T))
        torch.testing.assert_close(network(state), expected, rtol=1e-4, atol=1e-5)


# ---- The replay.
WINDOW = 4
SPACES = {
    "frames": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "small images": gym.spaces.Box(0, 255, (5, 3, 2), np.uint8),
    "vectors": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
}
FRAMES, VECTORS = SPACES["frames"], SPACES["vectors"]


def make_replay(capacity, space=VECTORS, num_envs=2, folder=""):
    return mpo_atari.FrameReplay(capacity, num_envs, space, folder)


def lived(replay, space, lengths, times, first=0):
    """Two games at a time, whose episodes are as long as lengths[g] says, over and over again.

    A step of game g at time t is named 100 g + t + 1, in its state and in all entries. Odd episodes
    end by termination. Returns by (game, time): the state, whether it is final, and terminated.
    """
    record, stacks = {}, np.zeros((2, *space.shape), space.dtype)
    episode, step = [0, 0], [0, 0]
    for time in range(first, first + times):
        final, ended = np.zeros(2, bool), np.zeros(2, bool)
        names = np.array([time + 1, 100 + time + 1])
        for game in range(2):
            length = lengths[game][episode[game] % len(lengths[game])]
            if step[game] == 0:
                stacks[game] = 0
            pixels = np.full(space.shape[1:], names[game]) if space is FRAMES else names[game]
            if space is FRAMES:
                stacks[game] = [*stacks[game][1:], pixels]
            else:
                stacks[game] = pixels
            final[game] = step[game] == length
            ended[game] = step[game] == length - 1 and episode[game] % 2 == 1
            record[game, time] = stacks[game].copy(), final[game], ended[game]
            step[game] += 1
            if final[game]:
                episode[game], step[game] = episode[game] + 1, 0
        replay.add_steps(stacks, names, -names, names, ended, final)
    return record


HISTORIES = {  # rows of a game, lengths of the episodes of each of the two games, times
    "not full": (40, [[6, 3], [5]], 30),
    "full, the seam in an episode": (13, [[6, 6, 6], [5, 4, 3, 2]], 50),
    "full, with episodes of one step": (12, [[1], [2, 1, 2, 1]], 40),
    "an episode longer than the ring": (14, [[30], [4, 9, 9]], 45),
}


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("history", HISTORIES)
def test_every_window_is_consecutive_steps_of_one_game_with_its_own_stacks(history, kind):
    (length, lengths, times), space = HISTORIES[history], SPACES[kind]
    replay = make_replay(2 * length, space)
    record = lived(replay, space, lengths, times)
    batch = replay.sample(600, WINDOW, "cpu")
    assert {len(x[0]) for x in batch} == {WINDOW + 1}
    starts = [divmod(int(name) - 1, 100) for name in batch.reward[:, 0]]
    oldest = max(0, times - length + replay.stack - 1)
    possible = itertools.product(range(2), range(oldest, times - WINDOW))
    assert set(starts) == {start for start in possible if not record[start][1]}
    for (game, time), window in {s: [x[i] for x in batch] for i, s in enumerate(starts)}.items():
        state, action, log_prob, reward, terminated, final = window
        for t in range(WINDOW + 1):
            seen, over, ended = record[game, time + t]
            assert np.array_equal(state[t].numpy(), seen)
            assert bool(final[t]) == over
            name = 100 * game + time + t + 1
            assert action[t] == reward[t] == -log_prob[t] == name and bool(terminated[t]) == ended
            if over:
                break  # what stands behind it belongs to another game


def test_starts_are_drawn_uniformly_over_the_steps_of_all_games():
    replay = make_replay(200)
    lived(replay, VECTORS, [[9], [1]], 40)
    torch.manual_seed(0)
    _, counts = replay.sample(28_000, WINDOW, "cpu").reward[:, 0].unique(return_counts=True)
    share = 28_000 / len(counts)
    assert len(counts) == 33 + 18 and ((counts - share).abs() < 5 * share**0.5).all()


def test_a_million_steps_take_less_than_8_gigabytes_and_no_frame_is_stored_twice():
    replay = make_replay(8000, FRAMES, num_envs=8)
    assert sum(rows.untyped_storage().nbytes() for rows in replay.rows) * 125 < 7.2e9


# ---- The replay's files.
def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("replay-*")}


def restored(folder, saved, capacity=400):
    replay = make_replay(capacity, folder=folder)
    replay.load_state_dict(saved)
    return replay


def test_a_checkpoint_writes_only_new_rows_and_a_restored_replay_is_the_same(tmp_path):
    replay = make_replay(400, folder=tmp_path)
    lived(replay, VECTORS, [[9], [7]], 50)
    replay.state_dict()
    first = files(tmp_path)
    assert list(first) == ["replay-100.pt"]
    lived(replay, VECTORS, [[9], [7]], 37, first=50)
    saved = replay.state_dict()
    assert {name: files(tmp_path)[name] for name in first} == first
    assert sorted(files(tmp_path)) == ["replay-100.pt", "replay-174.pt"]
    sizes = [len(torch.load(tmp_path / name)["index"]) for name in sorted(files(tmp_path))]
    assert sizes == [100, 76]  # and the newest row of each game once more
    again = restored(tmp_path, saved)
    assert again.written == replay.written == 174
    assert same(again.rows[:-1], replay.rows[:-1])
    changed = (again.rows.final != replay.rows.final).nonzero().flatten().tolist()
    assert changed == [172, 173] and (again.rows.final[172:174] == 1).all()  # cut off


def test_windows_across_a_resume_end_where_the_games_were_cut_off(tmp_path):
    replay = make_replay(400, folder=tmp_path)
    lived(replay, VECTORS, [[30], [30]], 20)
    again = restored(tmp_path, replay.state_dict())
    lived(again, VECTORS, [[30], [30]], 20, first=20)
    batch = again.sample(2000, WINDOW, "cpu")
    names = batch.reward.long()
    crossing = ((names - 1) % 100 == 19).any(1) & ((names - 1) % 100 == 20).any(1)
    assert crossing.sum() > 50
    last = (names - 1) % 100 == 19  # the newest row of then
    assert (batch.final[last] == 1).all() and batch.final[~last].max() == 0


def test_where_games_were_cut_off_by_one_resume_is_known_after_the_next(tmp_path):
    replay = make_replay(400, folder=tmp_path)
    for number in range(3):
        lived(replay, VECTORS, [[100], [100]], 20, first=20 * number)
        replay = restored(tmp_path, replay.state_dict())
    assert replay.rows.final.nonzero().flatten().tolist() == [38, 39, 78, 79, 118, 119]


def test_a_checkpoint_of_nothing_new_writes_and_removes_no_file(tmp_path):
    (tmp_path / "replay-1.pt").write_text("of somebody else")
    replay = make_replay(400, folder=tmp_path)
    again = restored(tmp_path, replay.state_dict())
    assert again.state_dict() == {"ends": [0]} and list(files(tmp_path)) == ["replay-1.pt"]
    lived(again, VECTORS, [[9], [7]], 20)
    saved = again.state_dict()
    before = files(tmp_path)
    assert list(before) == ["replay-40.pt"]
    assert restored(tmp_path, saved).state_dict() == saved and files(tmp_path) == before


def test_rows_that_were_overwritten_go_with_their_files_once_a_checkpoint_does_without(tmp_path):
    replay, saved = make_replay(200, folder=tmp_path), []
    for number in range(9):
        lived(replay, VECTORS, [[9], [7]], 25, first=25 * number % 75)
        saved.append(replay.state_dict())
        again = restored(tmp_path, saved[-1], capacity=200)
        assert same(again.rows[:-1], replay.rows[:-1])
        if number:  # the checkpoint before it is whole until the new one is in place
            before = {f"replay-{end}.pt" for end in saved[-2]["ends"][1:]}
            assert before <= set(files(tmp_path))
    assert saved[-1]["ends"] == [0, 300, 350, 400, 450] and len(files(tmp_path)) <= 6


def test_a_file_holds_a_limited_number_of_rows_and_a_long_gap_only_what_is_left(tmp_path):
    replay = make_replay(20_000, folder=tmp_path)
    step = [np.arange(2), -np.ones(2), np.ones(2), np.zeros(2), np.zeros(2)]
    for number in range(13_000):
        replay.add_steps(np.full((2, 2), number), *step)
    saved = replay.state_dict()
    assert saved["ends"] == [0, 14_192, 22_384, 26_000]
    again = restored(tmp_path, saved, capacity=20_000)
    assert same(again.rows[:-1], replay.rows[:-1])
    assert again.rows.state.min() == 3000


SAVE_FOR_EVER = """
import io, os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:2]
import gymnasium as gym, mpo_atari, numpy as np, torch
torch.set_num_threads(1)
space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

def make():
    return mpo_atari.FrameReplay(1024, 2, space, ".")

def save(replay, count):
    states = np.full((2, 4, 84, 84), count % 256, np.uint8)
    for _ in range(256):
        replay.add_steps(states, *(np.full(2, count) for _ in range(4)), np.zeros(2))
    content, buffer = {"count": count, "replay": replay.state_dict()}, io.BytesIO()
    torch.save({"origin": mpo_atari.ORIGIN} | content, buffer)
    mpo_atari.write_whole(Path("checkpoint.pt"), buffer.getvalue())

def load():
    replay, saved = make(), mpo_atari.read_saved(Path("checkpoint.pt"))
    replay.load_state_dict(saved["replay"])
    return replay, saved["count"]

began, chance, last, cut = time.time(), random.Random(0), 1, 0
replay = make()
save(replay, 1)
took = time.time() - began
for kill in range(10):
    child = os.fork()
    if child == 0:
        replay, last = load()
        for count in range(last + 1, 10**9):
            save(replay, count)
    began = os.stat("checkpoint.pt").st_ino
    while os.stat("checkpoint.pt").st_ino == began:
        time.sleep(0.001)
    time.sleep(2 * took * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    replay, last = load()
    batch = replay.sample(500, 4, "cpu")
    names = batch.reward[:, 0]
    assert set(names.tolist()) == {float(n) for n in (last - 1, last) if n > 0}
    assert (batch.state.flatten(1).amax(1) == batch.reward.amax(1) % 256).all()
    cut += len(list(Path(".").glob("replay-*"))) > len(replay.files())
print(last, cut)
"""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(tmp_path):
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(Path(mpo_atari.__file__).parent)]
    options = dict(env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    done = subprocess.run(command, cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    saved, cut = map(int, done.stdout.split())
    assert saved >= 3 and cut >= 3, "kills should fall into the writing, and some come to an end"
