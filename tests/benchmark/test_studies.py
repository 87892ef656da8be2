"""benchmark/studies: that they measure what they say."""

import dataclasses
import runpy
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode

import mpo_continuous

STUDIES = ROOT / "benchmark" / "studies"
sys.path.insert(0, str(STUDIES))

import learning  # noqa: E402
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


def test_a_run_of_the_script_is_compared_with_the_optimum(tmp_path, monkeypatch, capsys):
    # the optimal gain is that of a long episode
    whole = dict(time_limit=300, learning_starts=300, total_timesteps=301, updates_per_step=0.05)
    settings = dict(env_id=LQR, run_dir=str(tmp_path / "run"), policy_layers=(16, 16), **whole)
    monkeypatch.chdir(ROOT)
    mpo_continuous.main(mpo_continuous.Args(eval_episodes=1, **settings))
    monkeypatch.setattr(sys, "argv", ["lqr.py", str(tmp_path / "run"), "2"])
    capsys.readouterr()
    runpy.run_path(str(STUDIES / "lqr.py"), run_name="__main__")
    learned, optimal, ratio = (
        float(word.rstrip(",")) for word in capsys.readouterr().out.split()[3::2]
    )
    assert 0 < optimal < learned and ratio == pytest.approx(learned / optimal, abs=0.01)


# ---- speed.py.
@pytest.mark.parametrize("name", speed.SCRIPTS)
def test_the_products_that_speed_py_times_are_those_of_an_update(name):
    """Nearly: the small ones of sampling, E-step and M-step are left out."""
    learner = speed.Continuous(speed.load_script(ROOT / name), episode_length=20)
    with FlopCounterMode(display=False) as counter:
        learner.update()
    _, needed = speed.bare_products(*learner.products())
    assert counter.get_total_flops() / 2 == pytest.approx(needed, rel=0.005)
    learner.live()
    assert learner.replay.size == 42  # two episodes of 20 steps and a last row


def test_speed_py_updates_as_the_script_does():
    learner = speed.Continuous(mpo_continuous, episode_length=20)
    before = {name: x.clone() for name, x in learner.agent.state_dict().items()}
    learner.update()
    changed = {name for name, x in learner.agent.state_dict().items() if (x != before[name]).any()}
    assert {"log_eta", "log_eta_mu", "log_eta_sigma"} <= changed
    assert {name.split(".")[0] for name in changed} >= {"policy", "critic"}
    assert not any(name.startswith("target") for name in changed)


def test_two_forms_of_the_script_are_timed_in_turns(tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text((ROOT / "mpo_continuous.py").read_text())
    words = ["--compare", other, "--quick", "--rounds", "1", "--output"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *map(str, words), str(tmp_path / "out.json")])
    speed.main()
    row = (tmp_path / "out.md").read_text().splitlines()[2].strip("|").split("|")
    assert row[0] == "1" and len(row) == 7
    for cells in (row[1:4], row[4:]):
        there, here, ratio = map(float, cells)
        assert ratio == pytest.approx(here / there, rel=0.1)


def test_a_form_to_compare_with_may_be_a_commits(tmp_path, capsys):
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%H", "--", "mpo_continuous.py"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not commit:
        pytest.skip("no git, or no history, here")
    assert speed.Continuous(speed.load_script(speed.script_of(commit, tmp_path)), 20)
    with pytest.raises(SystemExit, match="2"):
        speed.script_of("nothing", tmp_path)
    assert "nothing is neither a file nor a commit" in capsys.readouterr().err


# ---- learning.py.
def make_runs(results, name, returns):
    """Runs of 60,000 steps whose evaluations from 40,000 on are these, give or take 30."""
    for (task, seed), value in returns.items():
        path = results / name / task / f"seed{seed}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        evaluated = [0, 0, 0, value - 30, value, value + 30]
        rows = [f"{10_000 * n},0,{x},0,{x}" for n, x in enumerate(evaluated, start=1)]
        rows.insert(1, "15000,0,,0,")
        lines = ["# commit: abc1234", "env_steps,train_return,eval_return,seconds,eval_returns"]
        path.write_text("\n".join([*lines, *rows]) + "\n")


def cells(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return {line[0]: dict(zip(lines[0], line)) for line in lines[2:]}


SETTINGS = {"base": (None, []), "small": ("base", ["--window", "1"]), "none": ("base", ["-x"])}
STUDY = dataclasses.replace(learning.STUDIES["continuous"], settings=SETTINGS, label="")


def test_a_setting_is_compared_on_the_runs_that_it_shares_with_the_one_it_changes(tmp_path):
    base = {("walker-walk", 11): 100, ("walker-walk", 12): 300, ("cheetah-run", 11): 50}
    small = {("walker-walk", 11): 200, ("cheetah-run", 11): 90, ("finger-spin", 11): 999}
    make_runs(tmp_path, "base", base)
    make_runs(tmp_path, "small", small)
    cut = tmp_path / "small/walker-walk/seed12.csv"  # a run that ended early says nothing
    cut.write_text((tmp_path / "base/walker-walk/seed12.csv").read_text().rpartition("60000")[0])
    table = cells(learning.table(STUDY, tmp_path))
    assert list(table) == ["base", "small"]
    assert table["base"]["walker-walk"] == "100 300" and table["small"]["walker-walk"] == "200 –"
    assert table["small"]["finger-spin"] == "999 –" and table["small"]["hopper-stand"] == "– –"
    counts = {name: row["shared runs"] for name, row in table.items()}
    assert counts == {"base": "3", "small": "2"}
    assert table["base"]["score"] == "125" and table["base"]["difference"] == "–"
    assert table["small"]["score"] == "145"  # of walker-walk 200, of cheetah-run 90
    # they gain 100 and 40: the mean of the two has the standard error 42.4 / sqrt 2
    assert table["small"]["difference"] == "+70" and table["small"]["standard error"] == "30"
    assert table["small"]["changes"] == "base: --window 1"


def test_a_setting_without_a_run_in_common_is_shown_and_not_compared(tmp_path):
    make_runs(tmp_path, "base", {("walker-walk", 11): 100})
    make_runs(tmp_path, "small", {("walker-walk", 12): 200})
    row = cells(learning.table(STUDY, tmp_path))["small"]
    assert row["walker-walk"] == "– 200" and row["shared runs"] == "0"
    assert {row[name] for name in ("score", "difference", "standard error")} == {"–"}
    make_runs(tmp_path, "small", {("walker-walk", 11): 130})
    row = cells(learning.table(STUDY, tmp_path))["small"]
    assert row["difference"] == "+30" and row["standard error"] == "–"  # one task, no spread
    with_all = {(task, seed): 1 for task in STUDY.tasks for seed in STUDY.seeds}
    make_runs(tmp_path, "base", with_all)
    assert cells(learning.table(STUDY, tmp_path))["base"]["shared runs"] == "12"


def test_the_table_of_the_study_in_the_docs_is_the_one_its_csvs_give():
    text = (ROOT / "docs/defaults.md").read_text()
    block = text.partition("<!-- study -->")[2].partition("<!-- end of study -->")[0]
    same = block.strip() == learning.table(learning.STUDIES["continuous"])
    assert same, "python benchmark/studies/learning.py --table prints another table"


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
