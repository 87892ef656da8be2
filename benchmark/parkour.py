"""Parkour: dm_control's planar walker on rough ground, over hurdles and across gaps.

    python mpo_continuous.py --env-id benchmark.parkour:ParkourWalker2D-v0   all three, mixed
    python mpo_continuous.py --env-id benchmark.parkour:ParkourHurdles-v0    0.1 to 0.3 m high
    python mpo_continuous.py --env-id benchmark.parkour:ParkourGaps-v0       0.2 to 0.6 m wide
    python mpo_continuous.py --env-id benchmark.parkour:ParkourRough-v0      bumps of up to 0.2 m

Run this from the repository's root. In a program: import benchmark.parkour, then gymnasium.make.

    observation    50 numbers: the body's 24 as in walker-walk (orientations, height, velocity), and
                   26 heights of the ground above the lower foot, from 0.5 m behind to 2 m ahead
    action         6 torques in [-1, 1], held for 0.025 s
    reward         clip(forward speed / 2, 0, 1): at 2 m/s or more, 1000 in an episode
    termination    torso below 0.7 m above the ground, or its upright component below 0.2
    truncation     after 1,000 steps
    info           distance: how far the body has come, in metres

Each episode has a new course, drawn from the seed. The paper's courses, those of Heess et al.
(2017), are others: its returns and ours cannot be compared.
"""

import xml.etree.ElementTree as ET

import gymnasium as gym
import numpy as np
from dm_control.mujoco.wrapper.mjbindings import mjlib
from dm_control.suite import walker

# in metres
CELL = 0.05  # from one height to the next; a finer field gives the feet more contacts, and worse
BEHIND, FLAT, LENGTH = 5, 2, 150  # ground behind the start; level after it; the end: 25 s at 6 m/s
DEPTH, TOP = 1.0, 0.3  # how far the ground may go below and above its level
AHEAD = np.linspace(-0.5, 2, 26)  # where the ground is seen; a trailing foot is behind the torso
SUBSTEPS = 10  # physics steps of 0.0025 s in an agent's step
KINDS = ("hurdles", "gaps", "rough")
FEET = ["right_foot", "left_foot"]
PLACES = np.arange(round((BEHIND + LENGTH) / CELL) + 1) * CELL - BEHIND  # of the heights [N]


def draw_course(random, kinds):
    """Heights [N] of the ground: a level of 0, and every 2 to 4 m an obstacle of a random kind."""
    heights = np.zeros(len(PLACES))
    start = round((BEHIND + FLAT) / CELL)
    while start + 80 < len(PLACES):
        stretch = heights[start : start + random.integers(40, 81)]
        start, middle = start + len(stretch), len(stretch) // 2
        kind = kinds[random.integers(len(kinds))]
        if kind == "hurdles":
            stretch[middle : middle + 2] = random.uniform(0.1, 0.3)
        elif kind == "gaps":  # 3 to 11 points at the bottom: 4 to 12 cells from edge to edge
            stretch[middle : middle + random.integers(3, 12)] = -DEPTH
        else:  # a bend each half metre; level at both ends, to fit what comes before and after
            bends = np.arange(0, len(stretch), 10)
            bumps = random.uniform(0, 0.2, len(bends))
            bumps[[0, -1]] = 0
            stretch[:] = np.interp(np.arange(len(stretch)), bends, bumps)
    return heights


def make_physics():
    """The walker of dm_control, on a height field in place of its floor."""
    text, assets = walker.get_model_and_assets()
    model = ET.fromstring(text)
    # two rows of the same heights: the walker is planar, and the ground is the same all across
    half = (PLACES[-1] - PLACES[0]) / 2
    size = f"{half} 0.8 {DEPTH + TOP} 0.2"
    field = {"name": "course", "nrow": "2", "ncol": str(len(PLACES)), "size": size}
    ET.SubElement(ET.SubElement(model, "asset"), "hfield", field)
    floor = model.find(".//geom[@name='floor']")
    del floor.attrib["size"], floor.attrib["zaxis"]
    # a field has no heights below 0, so its 0 is the bottom of the gaps
    floor.attrib |= {"type": "hfield", "hfield": "course"}
    floor.attrib["pos"] = f"{PLACES[0] + half} 0 {-DEPTH}"
    return walker.Physics.from_xml_string(ET.tostring(model, "unicode"), assets)


class Parkour(gym.Env):
    """The walker on courses of one kind, or of all kinds mixed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}

    def __init__(self, course="mixed", render_mode=None):
        self.kinds = KINDS if course == "mixed" else (course,)
        if not set(self.kinds) <= set(KINDS):
            raise ValueError(f"course must be mixed, hurdles, gaps or rough, not {course}")
        self.render_mode, self.physics = render_mode, make_physics()
        self.action_space = gym.spaces.Box(-1, 1, (6,), np.float32)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (24 + len(AHEAD),), np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        physics = self.physics
        self.heights = draw_course(self.np_random, self.kinds)
        physics.model.hfield_data[:] = np.tile((self.heights + DEPTH) / (DEPTH + TOP), 2)
        if self.render_mode:  # the graphics card keeps a copy of the field
            with physics.contexts.gl.make_current() as context:
                pointers = physics.model.ptr, physics.contexts.mujoco.ptr
                context.call(mjlib.mjr_uploadHField, *pointers, 0)

        # upright, give or take 0.1 in each joint, and the lower foot on the ground
        physics.reset()
        angles = physics.data.qpos[2:]  # before them: up and forward
        angles[:] = self.np_random.uniform(-0.1, 0.1, len(angles))
        angles[1:] = angles[1:].clip(*physics.model.jnt_range[3:].T)  # the torso has no limits
        physics.forward()
        tilt = abs(physics.named.data.geom_xmat[FEET, "zz"])  # of a capsule of 0.1 either way
        soles = physics.named.data.geom_xpos[FEET, "z"] - 0.1 * tilt - 0.05
        physics.named.data.qpos["rootz"] -= soles.min()
        physics.forward()
        return self.observe(), {"distance": 0.0}

    def ground(self, x):
        """Height of the ground at x, of any shape."""
        return np.interp(x, PLACES, self.heights)

    def observe(self):
        physics = self.physics
        x = physics.named.data.xpos["torso", "x"]
        foot = physics.named.data.xpos[FEET, "z"].min()
        body = physics.orientations(), [physics.torso_height()], physics.velocity()
        return np.concatenate([*body, self.ground(x + AHEAD) - foot])

    def step(self, action):
        physics = self.physics
        physics.set_control(action)
        physics.step(SUBSTEPS)
        x = physics.named.data.xpos["torso", "x"]
        # a gap's bottom is no ground to stand on: there the height is that above its edges
        height = physics.torso_height() - max(self.ground(x), 0)
        fallen = height < 0.7 or physics.torso_upright() < 0.2
        reward = np.clip(physics.horizontal_velocity() / 2, 0, 1)
        return self.observe(), float(reward), bool(fallen), False, {"distance": float(x)}

    def render(self):
        return self.physics.render(height=360, width=480, camera_id="side")  # follows the body


for name, course in [("Walker2D", "mixed"), *((kind.capitalize(), kind) for kind in KINDS)]:
    gym.register(f"Parkour{name}-v0", Parkour, max_episode_steps=1000, kwargs={"course": course})
