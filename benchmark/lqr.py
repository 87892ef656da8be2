"""How close a trained policy comes to the exact optimum of dm_control's linear-quadratic task.

    python mpo_continuous.py --env-id dm_control/lqr-lqr_2_1-v0 --action-bound 4 --run-dir runs/lqr
    python benchmark/lqr.py runs/lqr

The plant is identified from the task itself (it is linear, so least squares is exact), the optimal gain comes from the
discounted Riccati equation, and both controllers are then run from the same initial states. What is compared is the
discounted cost, the sum of gamma^t (1 - reward): the undiscounted optimum is another controller.
"""

import sys
from pathlib import Path

import numpy as np
import scipy.linalg
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import mpo_continuous as mpo


def identify(env, steps=200):
    """A and B of x' = A x + B u, from random actions. x is the observation, u the action in [-1, 1]."""
    generator = np.random.default_rng(0)
    state, _ = env.reset(seed=0)
    inputs, outputs = [], []
    for _ in range(steps):
        action = generator.uniform(-1, 1, env.action_space.shape)
        after = env.step(action)[0]
        inputs.append(np.concatenate([state, action]))
        outputs.append(after)
        state = after
    solution, *_ = np.linalg.lstsq(np.array(inputs), np.array(outputs), rcond=None)
    error = np.abs(np.array(inputs) @ solution - outputs).max()
    assert error < 1e-6, f"the plant is not linear: {error}"
    return solution[: len(state)].T, solution[len(state) :].T


def optimal_gain(env, gamma, bound):
    """K of u = -K x that minimises sum gamma^t (|position_{t+1}|^2 + c |bound u_t|^2) / 2."""
    a, b = identify(env)
    positions = a.shape[0] // 2
    # The cost is of the state after the step, so its discount is one power short: position weight 1 / gamma.
    q = np.diag([1.0 / gamma] * positions + [0.0] * positions)
    r = env.unwrapped._env.task.control_cost_coef * bound**2 * np.eye(b.shape[1])
    a, b = np.sqrt(gamma) * a, np.sqrt(gamma) * b
    p = scipy.linalg.solve_discrete_are(a, b, q, r)
    return np.linalg.solve(r + b.T @ p @ b, b.T @ p @ a)


def discounted_cost(env, controller, gamma, seeds):
    costs = []
    for seed in seeds:
        state, _ = env.reset(seed=seed)
        total, discount, over = 0.0, 1.0, False
        while not over:
            state, reward, terminated, truncated, _ = env.step(controller(state))
            total, discount, over = total + discount * (1 - reward), discount * gamma, terminated or truncated
        costs.append(total)
    return np.array(costs)


def compare(run_dir, episodes=20):
    """Mean discounted cost of the run's policy (its mean action) and of the optimal linear controller."""
    args = mpo.read_args(run_dir)
    env = mpo.make_env(args)
    saved = torch.load(Path(run_dir) / "model.pt", weights_only=True)
    policy = mpo.Policy(**saved["options"])
    policy.load_state_dict(saved["policy"])
    gain = optimal_gain(env, args.gamma, args.action_bound)

    @torch.no_grad()
    def learned(state):
        return policy(torch.as_tensor(state, dtype=torch.float32))[0].numpy()

    seeds = [mpo.episode_seed(args.seed, 2, episode) for episode in range(episodes)]
    return tuple(discounted_cost(env, c, args.gamma, seeds).mean() for c in (learned, lambda state: -gain @ state))


if __name__ == "__main__":
    learned, optimal = compare(sys.argv[1])
    print(f"discounted cost: learned {learned:.4f}, optimal {optimal:.4f}, ratio {learned / optimal:.3f}")
