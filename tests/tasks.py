"""Small tasks that misbehave in one way each, registered with Gymnasium on import."""

import gymnasium as gym
import numpy as np


class Odd(gym.Env):
    """A still point: zeros, but for `lasting` steps from the `when`-th on, over all episodes."""

    def __init__(
        self,
        shape=(2,),
        dtype=np.float32,
        high=1.0,
        actions=None,
        when=0,
        lasting=1,
        reward=0.0,
        observation=0.0,
        reset_observation=0.0,
        tuple_space=False,
        fault=None,
    ):
        low, limit = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        self.observation_space = gym.spaces.Box(low, limit, shape, dtype)
        if tuple_space:
            self.observation_space = gym.spaces.Tuple([self.observation_space])
        self.action_space = actions or gym.spaces.Box(-high, high, (1,))
        self.when, self.reward, self.observation = when, reward, observation
        self.reset_observation, self.steps, self.lasting = reset_observation, 0, lasting
        self.tuple_space, self.fault = tuple_space, fault
        self.received = []

    def observe(self, value):
        space = self.observation_space[0] if self.tuple_space else self.observation_space
        point = np.full(space.shape, value, space.dtype)
        return (point,) if self.tuple_space else point

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(self.reset_observation), {}

    def step(self, action):
        self.received.append(np.array(action))
        self.steps += 1
        now = self.when <= self.steps < self.when + self.lasting
        if now and self.fault == "raises":
            raise KeyError("the gripper is not connected")
        state = self.observe(self.observation if now else 0.0)
        if now and self.fault == "shape":
            state = np.zeros(5, np.float32)
        return state, self.reward if now else 0.0, False, False, {}


def register(name, **kwargs):
    gym.register(f"{name}-v0", entry_point=Odd, kwargs=kwargs)


register("Still")
register("Unbounded", high=np.inf)
register("Picture", shape=(8, 8, 3), dtype=np.uint8)
register("Board", actions=gym.spaces.MultiDiscrete([2, 2]))
register("Wide", shape=(1000,))  # a replay that grows fast
register("Matrix", actions=gym.spaces.Box(-1, 1, (2, 2)))
register("Pair", tuple_space=True)
register("Asymmetric", actions=gym.spaces.Box(-1, 5, (2,)))
# two evaluations of 50 steps come before step 310, which is in the fifth training episode of 50
register("NaNReward", when=310, reward=np.nan)
register("InfiniteReward", when=310, reward=np.inf)
register("NaNObservation", when=310, observation=np.nan)
register("InfiniteObservation", when=310, observation=-np.inf)
register("NaNStart", reset_observation=np.nan)
register("HugeReward", when=151, lasting=1000, reward=1e38)
register("Raises", when=310, fault="raises")
register("WrongShape", when=310, fault="shape")
register("Integers", actions=gym.spaces.Box(-3, 3, (2,), np.int64))


class Own(Odd):
    """A task that keeps something of its own under the name that Shimmy gives dm_control's."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode, self._env = render_mode, "a robot"

    def render(self):
        picture = np.zeros((32, 48, 3), np.uint8)
        picture[: 8 + self.steps % 16] = 200
        return picture


gym.register("Own-v0", entry_point=Own, max_episode_steps=30)


class Reach(gym.Env):
    """A point in the plane, to be moved to a place at a distance of 1: close to it the reward is 1.
    A perfect run of 25 steps returns 23; one that stays, or strays, next to nothing."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        angle = self.np_random.uniform(0, 2 * np.pi)
        self.way = np.array([np.cos(angle), np.sin(angle)])
        return self.way.astype(np.float32), {}

    def step(self, action):
        self.way = self.way - 0.25 * action
        reward = np.exp(-8 * self.way @ self.way)
        return self.way.astype(np.float32), float(reward), False, False, {}


gym.register("Reach-v0", entry_point=Reach, max_episode_steps=25)


class Catch(gym.Env):
    """A ball falls down a board of 12 x 12 squares of 7 x 7 pixels onto a bar of three squares."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(3)  # left, stay, right

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.row, (self.column, self.bar) = 0, self.np_random.integers((12, 10))
        return self.picture(), {}

    def picture(self):
        board = np.zeros((12, 12), np.uint8)
        board[11, self.bar : self.bar + 3] = 128
        board[self.row, self.column] = 255
        return board.repeat(7, 0).repeat(7, 1)

    def step(self, action):
        self.bar = int(np.clip(self.bar + action - 1, 0, 9))
        self.row += 1
        caught = self.row == 11 and self.bar <= self.column < self.bar + 3
        over = self.row == 11
        return self.picture(), (1.0 if caught else -1.0) if over else 0.0, over, False, {}


class Corridor(gym.Env):
    """Numbers its steps: the observation is (game, step), the reward 10 times the action plus 1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, length=5, ends=True, start=0, shape=None, uneven=False, sign=1.0):
        self.uneven, self.sign = uneven, sign
        self.length, self.ends, self.game = length, ends, 0
        self.action_space = gym.spaces.Discrete(3, start=start)
        self.shape = shape
        if shape:
            self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def observe(self):
        name = np.array([self.game, self.number], np.float64)
        return np.full(self.shape, 10 * self.game + self.number, np.uint8) if self.shape else name

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.number = self.game + 1, 0
        self.length = int(self.np_random.integers(2, 15)) if self.uneven else self.length
        return self.observe(), {}

    def step(self, action):
        self.number += 1
        over = self.ends and self.number == self.length
        return self.observe(), self.sign * (10.0 * action + 1), over, False, {}


register("NaNScore", actions=gym.spaces.Discrete(2), when=110, reward=np.nan)
register("NaNBoard", actions=gym.spaces.Discrete(2), when=110, observation=np.nan)
gym.register("Catch-v0", Catch)
gym.register("Corridor-v0", Corridor, max_episode_steps=20)
gym.register("Debts-v0", Corridor, max_episode_steps=20, kwargs=dict(sign=-1.0))
gym.register("Shifted-v0", Corridor, max_episode_steps=20, kwargs=dict(start=5))
gym.register("Screen-v0", Corridor, max_episode_steps=20, kwargs=dict(shape=(84, 84)))
gym.register("Screens-v0", Corridor, max_episode_steps=20, kwargs=dict(shape=(4, 84, 84)))
gym.register("WideScreen-v0", Corridor, max_episode_steps=20, kwargs=dict(shape=(210, 160, 3)))
gym.register("Uneven-v0", Corridor, max_episode_steps=20, kwargs=dict(uneven=True))
gym.register("Cut-v0", Corridor, max_episode_steps=4, kwargs=dict(ends=False))
