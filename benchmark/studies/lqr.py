"""How close a trained policy comes to the exact optimum of dm_control's linear-quadratic task.

    python mpo_continuous.py --env-id benchmark.studies.lqr:LQR-v0 --total-timesteps 30000 \\
        --run-dir runs/lqr
    python benchmark/studies/lqr.py runs/lqr [EPISODES]

Both from the repository's root. dm_control draws the plant's springs anew for each environment and
gives its actions no bounds; here the plant is one and the same, and actions are within +-4. The
plant is identified from the task itself (it is linear, so least squares is exact), the optimal gain
comes from the discounted Riccati equation, and both controllers are then run from the same initial
states. What is compared is the discounted cost, the sum of gamma^t (1 - reward): the undiscounted
optimum is another controller.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import scipy.linalg
import torch

PLANT = 0  # the seed that its springs are drawn from
BOUND = 4.0  # of the action


def make_task(render_mode=None):
    """Two masses on springs, a force on the first; episodes draw only their initial state."""
    from dm_control import suite  # not before the script has chosen MUJOCO_GL
    from shimmy.dm_control_compatibility import DmControlCompatibilityV0

    plant = suite.load("lqr", "lqr_2_1", task_kwargs={"random": PLANT})
    env = DmControlCompatibilityV0(plant, render_mode=render_mode)
    box = gym.spaces.Box(-BOUND, BOUND, env.action_space.shape, np.float64)
    return gym.wrappers.TransformAction(env, lambda action: action, box)


if "LQR-v0" not in gym.registry:  # this file as a program imports itself by its name, too
    gym.register("LQR-v0", make_task, max_episode_steps=1000)


def identify(env, steps=200):
    """A and B of x' = A x + B u, from random actions. x: observation, u: action in [-1, 1]."""
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


def optimal_gain(env, gamma):
    """K of u = -K x that minimises sum gamma^t (|position_{t+1}|^2 + c |BOUND u_t|^2) / 2."""
    a, b = identify(env)
    positions = a.shape[0] // 2
    # The cost is of the state after the step, so its discount is one power short: 1 / gamma.
    q = np.diag([1.0 / gamma] * positions + [0.0] * positions)
    r = env.unwrapped._env.task.control_cost_coef * BOUND**2 * np.eye(b.shape[1])
    a, b = np.sqrt(gamma) * a, np.sqrt(gamma) * b
    p = scipy.linalg.solve_discrete_are(a, b, q, r)
    return np.linalg.solve(r + b.T @ p @ b, b.T @ p @ a)


def discounted_cost(env, controller, gamma, seeds):
    """Of each episode."""
    costs = []
    for seed in seeds:
        state, _ = env.reset(seed=seed)
        total, discount, over = 0.0, 1.0, False
        while not over:
            state, reward, terminated, truncated, _ = env.step(controller(state))
            total, discount = total + discount * (1 - reward), discount * gamma
            over = terminated or truncated
        costs.append(total)
    return np.array(costs)


def compare(run_dir, episodes=20):
    """Mean discounted cost of the run's mean action, and of the optimal linear controller."""
    import mpo_continuous as mpo

    args = mpo.parse_args(["--evaluate", str(run_dir)])
    env = mpo.make_env(args)
    policy = mpo.Policy(env.observation_space.shape[0], env.action_space.shape[0], args)
    policy.load_state_dict(mpo.read_saved(Path(args.evaluate))["policy"])
    gain = optimal_gain(env, args.gamma)

    @torch.no_grad()
    def learned(state):
        return policy(torch.as_tensor(state, dtype=torch.float32))[0].numpy()

    def optimal(state):
        return -gain @ state

    costs = [discounted_cost(env, act, args.gamma, range(episodes)) for act in (learned, optimal)]
    return [cost.mean() for cost in costs]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are
    learned, optimal = compare(sys.argv[1], *map(int, sys.argv[2:]))
    ratio = learned / optimal
    print(f"discounted cost: learned {learned:.4f}, optimal {optimal:.4f}, ratio {ratio:.3f}")
