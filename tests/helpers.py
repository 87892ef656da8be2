"""Small random inputs in float64, where formulas can be compared to ten digits."""

import math
import tempfile

import numpy as np
import torch

STATE_SIZE, ACTION_SIZE = 3, 2


def number(x):
    return torch.tensor(x, dtype=torch.float64)


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
    """z [M, A] and logarithms of weights [M], with which sums are integrals over N(0, I)."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    z = np.stack([axis.ravel() for axis in np.meshgrid(*[points] * size)], -1)
    log_weights = sum(np.meshgrid(*[np.log(weights / math.sqrt(2 * math.pi))] * size)).ravel()
    return torch.as_tensor(z), torch.as_tensor(log_weights)


def small_args(script, **changes):
    sizes = dict(policy_layers=(7, 6), critic_layers=(8, 5), num_samples=4, batch_size=5, window=4)
    return script.Args(**(sizes | changes))


def make_policy(script, args, action_size=ACTION_SIZE):
    return script.Policy(STATE_SIZE, action_size, args).double()


def make_critic(script, args, action_size=ACTION_SIZE):
    return script.Critic(STATE_SIZE, action_size, args).double()


def small_agent(script, args, seed=0, apart=0.3):
    """An agent in float64 whose targets and multipliers all differ from what they start as."""
    torch.manual_seed(seed)
    multipliers = dict(eta=1.0, eta_mu=1.0, eta_sigma=10.0)
    agent = script.Agent(make_policy(script, args), make_critic(script, args), **multipliers)
    agent, generator = agent.double(), numbers(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(apart * normal(generator, *parameter.shape))
    return agent


def copy_targets(agent):
    """theta_i = theta, phi' = phi, as main() does every target_period gradient steps."""
    agent.target_policy.load_state_dict(agent.policy.state_dict())
    agent.target_critic.load_state_dict(agent.critic.state_dict())


def categorical_kl(p, log_q):
    """KL(p || q) = sum_a p (log p - log q). p [..., M] -> [...]."""
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


def losses_of(script):
    """The script's function for the losses of a gradient step; where they differ, so do names."""
    return getattr(script, "parametric_losses", None) or script.compute_losses


def random_batch(script, args, agent, lengths, terminated, seed=0):
    """Windows [B, T+1] of which lengths[b] steps are valid, and noise [B, T+1, M, A].

    The last of those steps terminates where terminated[b]. Behind the final row stands another
    episode, as in the replay: any numbers. log b is that of pi_i give or take one, so that about
    half of the traces are clipped.
    """
    generator, rows = numbers(seed), (len(lengths), args.window + 1)
    step, length = torch.arange(args.window + 1), torch.as_tensor(lengths).unsqueeze(-1)
    terminates = torch.as_tensor(terminated).unsqueeze(-1)
    state, action = normal(generator, *rows, STATE_SIZE), normal(generator, *rows, ACTION_SIZE)
    log_pi = script.gaussian_log_prob(*agent.target_policy(state), action.unsqueeze(-2))
    goes_on = (step == args.window) & (length == args.window) & ~terminates
    behind = (step > length) & (normal(generator, *rows) > 0)
    batch = script.Rows(
        state=state,
        action=action,
        behaviour_log_prob=log_pi.squeeze(-1).detach() + normal(generator, *rows),
        reward=normal(generator, *rows),
        terminated=(((step == length - 1) & terminates) | behind).double(),
        final=(((step == length) & ~goes_on) | (behind & (step % 2 == 0))).double(),
    )
    return batch, normal(generator, *rows, args.num_samples, ACTION_SIZE)


def valid(batch):
    """[B, T], whether a step of the episode that the window starts in begins there."""
    rows = batch.final.shape[1] - 1
    return torch.stack([(batch.final[:, : t + 1] == 0).all(1) for t in range(rows)], dim=1)


def alive(batch):
    """[B, T+1], where one can act: the first state, and those a step led to without ending."""
    led_to = valid(batch) & (batch.terminated[:, :-1] == 0)
    return torch.cat([torch.ones_like(led_to[:, :1]), led_to], dim=1)


def episode(script, states, terminated, seed=0, **changes):
    """The n + 1 rows, in float32, of an episode that visits these states [n + 1, S]."""
    generator, count = numbers(seed), len(states)
    rows = script.Rows(
        state=states,
        action=normal(generator, count, ACTION_SIZE),
        behaviour_log_prob=normal(generator, count) - 2,
        reward=normal(generator, count),
        terminated=torch.zeros(count),
        final=torch.zeros(count),
    )
    rows.terminated[-2] = float(terminated)
    rows.final[-1] = 1
    return script.Rows(*(x.float() for x in rows._replace(**changes)))


def double(batch):
    return type(batch)(*(x.double() for x in batch))


def trained(script, **changes):
    """The settings and the checkpoint of ten gradient steps by the script's own main()."""
    settings = dict(env_id="Pendulum-v1", time_limit=10, batch_size=2, eval_episodes=1)
    if hasattr(script, "play"):
        settings |= dict(env_id="CartPole-v1", num_envs=2, layers=(8,))
    settings |= dict(learning_starts=50, total_timesteps=100, updates_per_step=0.1)
    with tempfile.TemporaryDirectory() as folder:
        settings |= dict(buffer_size=1000, run_dir=f"{folder}/run")
        args = script.Args(**settings | changes)
        script.main(args)
        return args, torch.load(f"{folder}/run/checkpoint.pt", weights_only=True)


def rows_of(batch, chosen):
    """The same rows of every entry of a batch or an episode."""
    return type(batch)(*(x[chosen] for x in batch))
