"""benchmark/studies: that they measure what they say."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT
from running import surroundings, tiny
from torch.utils.flop_counter import FlopCounterMode

import mpo_continuous

STUDIES = ROOT / "benchmark" / "studies"
sys.path.insert(0, str(STUDIES))

import sensitivity  # noqa: E402
import speed  # noqa: E402

lqr = pytest.importorskip("benchmark.studies.lqr")
LQR = "benchmark.studies.lqr:LQR-v0"


# ---- lqr.py.
def lqr_env():
    return mpo_continuous.make_env(mpo_continuous.Args(env_id=LQR))


def test_the_linear_quadratic_task_has_one_plant_bounded_actions_and_1000_steps(monkeypatch):
    monkeypatch.chdir(ROOT)
    plants = [lqr_env().unwrapped._env.physics.model.jnt_stiffness.copy() for _ in range(2)]
    assert (plants[0] == plants[1]).all()
    env = lqr_env()
    box = gym.make("LQR-v0").action_space
    assert box.low.tolist() == [-4] and box.high.tolist() == [4]
    first, second, other = (env.reset(seed=seed)[0] for seed in (1, 1, 2))
    assert (first == second).all() and (first != other).any()  # the episode's seed: where it starts
    steps, over = 0, False
    while not over:
        *_, terminated, truncated, _ = env.step(np.array([3.0]))  # clipped to 1, scaled to 4
        steps, over = steps + 1, terminated or truncated
    assert steps == 1000 and truncated
    assert env.unwrapped._env.physics.data.ctrl.tolist() == [4]


def test_the_riccati_controller_is_the_optimum_of_the_discounted_cost(monkeypatch):
    monkeypatch.chdir(ROOT)
    env, gamma = lqr_env(), 0.99
    gain, seeds = lqr.optimal_gain(env, gamma), range(2)

    def cost(gain):
        return lqr.discounted_cost(env, lambda state: -gain @ state, gamma, seeds).mean()

    best = cost(gain)
    for entry in range(gain.size):
        for change in (-0.1, 0.1):
            other = gain.copy()
            other.flat[entry] += change * np.abs(gain).max()
            assert cost(other) > best


def test_a_run_of_the_script_is_compared_with_the_optimum(tmp_path):
    # the optimal gain is that of a long episode
    whole = dict(time_limit=0, learning_starts=1000, total_timesteps=1001, updates_per_step=0.05)
    settings = tiny(env_id=LQR, run_dir=str(tmp_path / "run"), **whole)
    pipes = dict(cwd=ROOT, env=surroundings(), capture_output=True, text=True)
    trained = subprocess.run([sys.executable, "mpo_continuous.py", *settings], **pipes)
    assert trained.returncode == 0, trained.stderr
    command = [sys.executable, str(STUDIES / "lqr.py"), str(tmp_path / "run"), "2"]
    done = subprocess.run(command, **pipes)
    assert done.returncode == 0, done.stderr
    learned, optimal, ratio = (float(word.rstrip(",")) for word in done.stdout.split()[3::2])
    assert 0 < optimal < learned and ratio == pytest.approx(learned / optimal, abs=0.01)


# ---- speed.py.
@pytest.mark.parametrize("name", speed.SCRIPTS)
def test_the_products_that_speed_py_times_are_those_of_an_update(name):
    """Nearly: the small ones of sampling, E-step and M-step are left out."""
    learner = speed.Continuous(speed.load_script(ROOT / name), compiled=False, episode_length=20)
    with FlopCounterMode(display=False) as counter:
        learner.update()
    _, needed = speed.bare_products(*learner.products())
    assert counter.get_total_flops() / 2 == pytest.approx(needed, rel=0.005)
    learner.live()
    assert learner.replay.size == 42  # two episodes of 20 steps and a last row


def test_speed_py_updates_as_the_script_does():
    learner = speed.Continuous(mpo_continuous, compiled=False, episode_length=20)
    before = {name: x.clone() for name, x in learner.agent.state_dict().items()}
    learner.update()
    changed = {name for name, x in learner.agent.state_dict().items() if (x != before[name]).any()}
    assert {"log_eta", "log_eta_mu", "log_eta_sigma"} <= changed
    assert {name.split(".")[0] for name in changed} >= {"policy", "critic"}
    assert not any(name.startswith("target") for name in changed)


def test_two_forms_of_the_script_are_timed_in_turns(tmp_path):
    other = tmp_path / "other.py"
    other.write_text((ROOT / "mpo_continuous.py").read_text())
    words = ["--compare", other, "--quick", "--rounds", "1", "--no-compile"]
    command = [sys.executable, STUDIES / "speed.py", *words, "--output", tmp_path / "out.json"]
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = (tmp_path / "out.md").read_text().splitlines()[2].strip("|").split("|")
    there, here, ratio = map(float, row[2:])
    assert row[:2] == ["eager", "1"] and ratio == pytest.approx(here / there, rel=0.1)


# ---- sensitivity.py.
def test_sensitivity_scales_the_defaults_of_the_script(tmp_path):
    default = mpo_continuous.Args()
    names = ("epsilon", "epsilon-mu", "epsilon-sigma")
    scaled = {name: [name.replace("-", "_")] for name in names}
    scaled["learning-rates"] = ["learning_rate", "policy_learning_rate"]
    assert list(scaled) == list(sensitivity.SETTINGS)
    for setting, fields in scaled.items():
        for factor in sensitivity.FACTORS.values():
            words = sensitivity.flags(setting, factor)
            assert words[::2] == [f"--{field.replace('_', '-')}" for field in fields]
            expected = [getattr(default, field) * factor for field in fields]
            assert [float(word) for word in words[1::2]] == pytest.approx(expected, rel=1e-3)
    assert sorted(sensitivity.FACTORS.values()) == pytest.approx([1 / 3, 3])
    words = [sys.executable, STUDIES / "sensitivity.py", "--settings", "gamma"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "epsilon" in done.stderr and done.stderr.count("\n") == 1
