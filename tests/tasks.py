"""Small tasks that misbehave in one way each, registered with Gymnasium on import."""

import gymnasium as gym
import numpy as np


class Odd(gym.Env):
    """A still point. From its `when`-th step on, over all episodes, it gives `reward` and `observation`, not 0."""

    def __init__(self, shape=(2,), dtype=np.float32, high=1.0, actions=None, when=0, lasting=1, reward=0.0,
                 observation=0.0, reset_observation=0.0, tuple_space=False):  # fmt: skip
        limit = 255 if dtype == np.uint8 else np.inf
        self.observation_space = gym.spaces.Box(0 if dtype == np.uint8 else -limit, limit, shape, dtype)
        if tuple_space:
            self.observation_space = gym.spaces.Tuple([self.observation_space])
        self.action_space = actions or gym.spaces.Box(-high, high, (1,))
        self.when, self.reward, self.observation = when, reward, observation
        self.reset_observation, self.steps, self.lasting, self.tuple_space = reset_observation, 0, lasting, tuple_space
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
        return self.observe(self.observation if now else 0.0), self.reward if now else 0.0, False, False, {}


def register(name, **kwargs):
    gym.register(f"{name}-v0", entry_point=Odd, kwargs=kwargs)


register("Still")
register("Unbounded", high=np.inf)
register("Picture", shape=(8, 8, 3), dtype=np.uint8)
register("Board", actions=gym.spaces.MultiDiscrete([2, 2]))
register("Matrix", actions=gym.spaces.Box(-1, 1, (2, 2)))
register("Pair", tuple_space=True)
register("Asymmetric", actions=gym.spaces.Box(-1, 5, (2,)))
register("NaNReward", when=260, reward=np.nan)
register("InfiniteReward", when=260, reward=np.inf)
register("NaNObservation", when=260, observation=np.nan)
register("InfiniteObservation", when=260, observation=-np.inf)
register("NaNStart", reset_observation=np.nan)
register("HugeReward", when=151, lasting=1000, reward=1e38)
