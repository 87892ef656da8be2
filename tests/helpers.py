"""Small random inputs in float64, where formulas can be compared to ten digits."""

import math
from inspect import signature

import numpy as np
import torch

STATE_SIZE, ACTION_SIZE = 3, 2


def numbers(seed):
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_gaussian(generator, *shape, size=ACTION_SIZE):
    """mean [..., A] and a Cholesky factor [..., A, A] with off-diagonal entries that matter."""
    below = normal(generator, *shape, size, size).tril(-1)
    diagonal = (0.4 * normal(generator, *shape, size)).exp()
    return normal(generator, *shape, size), torch.diag_embed(diagonal) + 0.7 * below


def quadrature(size=ACTION_SIZE, nodes=40):
    """Points z [M, A] and logarithms of their weights [M], with which sums are integrals over N(0, I)."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    z = np.stack([axis.ravel() for axis in np.meshgrid(*[points] * size)], -1)
    log_weights = sum(np.meshgrid(*[np.log(weights / math.sqrt(2 * math.pi))] * size)).ravel()
    return torch.as_tensor(z), torch.as_tensor(log_weights)


def small_args(script, **changes):
    sizes = dict(policy_layers=(7, 6), critic_layers=(8, 5), num_samples=4, batch_size=5, window=4)
    return script.Args(**(sizes | changes))


def make_policy(script, args, action_size=ACTION_SIZE):
    """A policy in float64 with the settings of args."""
    options = {name: getattr(args, name) for name in signature(script.Policy).parameters if hasattr(args, name)}
    return script.Policy(STATE_SIZE, action_size, args.policy_layers, **options).double()


def small_agent(script, args, seed=0, apart=0.3):
    """An agent in float64 whose networks and multipliers all differ from their targets and initial values."""
    torch.manual_seed(seed)
    critic = script.Critic(STATE_SIZE, ACTION_SIZE, args.critic_layers)
    agent = script.Agent(make_policy(script, args), critic, eta=1.0, eta_mu=1.0, eta_sigma=10.0).double()
    generator = numbers(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(apart * normal(generator, *parameter.shape))
    return agent


def losses_of(script):
    """The script's function for the losses of one gradient step; where they differ, so do their names."""
    return getattr(script, "parametric_losses", None) or script.compute_losses


def random_batch(script, args, agent, lengths, terminated, seed=0):
    """Windows whose first lengths[b] steps are valid, the last of them terminal where terminated[b], and noise.

    What stands behind the end of an episode is random too, as it is in the replay. log b is that of pi_i give or take
    one, so that about half of the traces are clipped.
    """
    generator, b, t = numbers(seed), len(lengths), args.window
    step, length = torch.arange(t), torch.as_tensor(lengths).unsqueeze(-1)
    ends = (step == length - 1) & torch.as_tensor(terminated).unsqueeze(-1)
    behind = (step >= length) & (normal(generator, b, t) > 0)
    state, action = normal(generator, b, t + 1, STATE_SIZE), normal(generator, b, t, ACTION_SIZE)
    log_pi = script.gaussian_log_prob(*agent.target_policy(state[:, :-1]), action)
    batch = script.Batch(
        state=state,
        action=action,
        behaviour_log_prob=log_pi + normal(generator, b, t),
        reward=normal(generator, b, t),
        terminated=(ends | behind).double(),
        valid=(step < length).double(),
    )
    return batch, normal(generator, b, t + 1, args.num_samples, ACTION_SIZE)


def alive(batch):
    """[B, T+1]: the states from which one can act: the first, and those that a step led to without ending there."""
    led_to = batch.valid.bool() & ~batch.terminated.bool()
    return torch.cat([torch.ones_like(led_to[:, :1]), led_to], dim=1)


def episode(states, terminated, seed=0, **changes):
    """The n + 1 rows of an episode that visits these states [n + 1, S]; the last row has no step."""
    generator, count = numbers(seed), len(states)
    rows = dict(
        state=states,
        action=normal(generator, count, ACTION_SIZE),
        behaviour_log_prob=normal(generator, count) - 2,
        reward=normal(generator, count),
        terminated=torch.zeros(count),
        last=torch.arange(count) == count - 1,
    )
    rows["terminated"][-2] = float(terminated)
    return {name: changes.get(name, value) for name, value in rows.items()}


def double(batch):
    return type(batch)(*(x.double() for x in batch))
