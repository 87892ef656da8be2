"""The scripts as files that people copy, start, read the help of, and take policies from."""

import ast
import dataclasses
import importlib.metadata
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import pytest
import torch
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import CONTINUOUS, PATIENCE, TASK, flags, load, rows, run, surroundings, timeless, tiny, together, train

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = sorted(ROOT.glob("mpo_*.py"))
DIFFER_BY_NATURE = {"Args", "make_env", "Policy", "Critic", "update", "main"}
OUR_LINES = [  # what a start prints where it is not a terminal
    r"\S+, \d+ observations, \d+ actions; writing to \S+",
    r"step [\d,]+/[\d,]+  return \S+  \d+ steps/s(  \d+ min \d\d s left)?",
    r"step [\d,]+: the mean action returns \S+",
    r"done: [\d,]+ steps in \d+ min \d\d s; everything is in \S+",
]


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


@pytest.fixture(scope="module")
def started(script, tmp_path_factory):
    """A run of the script, copied alone into an empty folder, that ends well; and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(script.__file__, folder)
    command = [sys.executable, "-I", Path(script.__file__).name, *tiny(seed=3)]  # -I: no PYTHONPATH, nothing beside it
    process = subprocess.run(command, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    (run_dir,) = (folder / "runs").iterdir()
    return process, run_dir


def test_a_script_copied_alone_into_an_empty_folder_runs(script, started):
    process, run_dir = started
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(rf"dm_control-cartpole-swingup-v0__{script.__name__}__3__\d+", run_dir.name)
    kinds = {name.split(".")[0] for name in os.listdir(run_dir)}
    assert kinds == {"args", "checkpoint", "events", "model", "progress"}
    assert len(rows(run_dir)) == 3


def needed(requirements):
    """The names of the distributions that these requirements bring, and what those require in turn."""
    found, waiting = set(), [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or name in found:
            continue
        found.add(name)
        extras = [{"extra": extra} for extra in requirement.extras]
        for further in map(Requirement, importlib.metadata.requires(name) or ()):
            if not further.marker or any(further.marker.evaluate(extra) for extra in [{"extra": ""}, *extras]):
                further.marker = None
                waiting.append(further)
    return found


def test_a_script_needs_no_package_that_a_plain_install_does_not_bring(script, tmp_path):
    """Packages of the extras, and whatever else is installed, are hidden; the README's first command has no more."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        brought = needed(tomllib.load(file)["project"]["dependencies"])
    modules = importlib.metadata.packages_distributions().items()
    hidden = [module for module, names in modules if not brought & set(map(canonicalize_name, names))]
    assert "pytest" in hidden and "torch" not in hidden
    start = "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split())); "
    start += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-I", "-c", start, " ".join(hidden), script.__file__, *tiny()]
    process = subprocess.run(
        command, cwd=tmp_path, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert process.returncode == 0, process.stderr


def test_a_normal_start_prints_our_lines_only(script, started):
    process, _ = started
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    for line in lines:
        assert any(re.fullmatch(pattern, line) for pattern in OUR_LINES), line
    for pattern in OUR_LINES:
        assert any(re.fullmatch(pattern, line) for line in lines), pattern


@pytest.mark.parametrize("script", CONTINUOUS[:1], indirect=True)  # it takes a minute, the others use its lines
def test_a_compiled_run_prints_our_lines_only_and_learns_what_an_eager_one_does(script, started, tmp_path):
    compiled = train(script, tiny(seed=3, compile=True, run_dir="run"), tmp_path, cold=True)
    assert compiled.err == ""
    for line in compiled.out.splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in OUR_LINES), line
    for ours, eager in zip(rows(tmp_path / "run"), rows(started[1]), strict=True):
        for name in ("losses/critic", "losses/policy", "losses/multipliers", "mpo/eta", "mpo/q_mean"):
            assert math.isclose(float(ours[name]), float(eager[name]), rel_tol=1e-3, abs_tol=1e-5), name


def test_a_process_that_these_tests_fork_does_what_one_of_its_own_does(script, started, tmp_path):
    """Most tests run the script in a process that has the imports behind it."""
    train(script, tiny(seed=3, run_dir="run"), tmp_path)
    assert timeless(tmp_path / "run") == timeless(started[1])
    assert (tmp_path / "run/model.pt").read_bytes() == (started[1] / "model.pt").read_bytes()


def test_the_smallest_value_of_every_setting_runs_with_finite_numbers(script, tmp_path):
    least = dict(num_samples=1, window=1, batch_size=1, time_limit=1, policy_layers=(1,), critic_layers=(1,))
    least |= dict(buffer_size=2, learning_starts=0, total_timesteps=5, updates_per_step=1.0, target_period=1, gamma=0.0)
    process = train(script, tiny(run_dir="run", **least), tmp_path)
    assert process.err == "" and len(rows(tmp_path / "run")) == 5
    assert all(math.isfinite(float(value)) for row in rows(tmp_path / "run") for value in row.values() if value)


def test_on_a_terminal_the_progress_line_rewrites_itself(script, tmp_path):
    ours, theirs = pty.openpty()
    words = [sys.executable, script.__file__, *tiny(run_dir="run")]
    process = subprocess.Popen(words, cwd=tmp_path, env=surroundings(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux tells that the other side is closed
            break
        text += piece
        if not piece:
            break
    os.close(ours)
    assert process.wait(60) == 0
    shown = [line.split("\x1b[K")[-1] for line in text.decode().replace("\r\n", "\n").splitlines()]
    lines = [line for line in shown if line]
    assert "\r\x1b[K" in text.decode() and lines[-1].startswith("done: 200 steps")
    assert all(any(re.fullmatch(pattern, line) for pattern in OUR_LINES) for line in lines)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_script_imports_published_packages_only(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.add(node.module.split(".")[0])
    local = {path.stem for path in [*ROOT.glob("*"), *ROOT.glob("tests/*"), *ROOT.glob("benchmark/*")]}
    assert not imported & local
    packages = set(re.findall(r"[\"']([A-Za-z_-]+)[><=]", (ROOT / "pyproject.toml").read_text()))
    assert imported - set(sys.stdlib_module_names) <= {name.replace("-", "_") for name in packages}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_requirements_in_a_script_are_those_of_the_project(file):
    block = re.search(r"(?m)^# /// script\n(.*?)^# ///$", file.read_text(), re.DOTALL).group(1)
    inline = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["atari"] if "atari" in file.stem else []
    assert sorted(inline["dependencies"]) == sorted(project["dependencies"] + extra)
    assert inline["requires-python"] == project["requires-python"]


def test_functions_and_classes_of_one_name_are_identical_to_the_letter_in_all_scripts():
    found = {}
    for file in FILES:
        source = file.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in DIFFER_BY_NATURE:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
                found.setdefault(node.name, {})[file.name] = text
    different = {name: sorted(texts) for name, texts in found.items() if len(set(texts.values())) > 1}
    assert not different, "copies that have drifted apart"


def settings_of(script):
    """The help of every setting: the comment behind its field."""
    source = Path(script.__file__).read_text()
    lines, helps = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    text = " ".join(lines[field.lineno - 1 : field.end_lineno])
                    helps[field.target.id] = text.split("  # ")[-1].rstrip(" )") if "  # " in text else ""
    return {field.name: helps[field.name] for field in dataclasses.fields(script.Args)}


def test_every_setting_has_a_line_of_help(script):
    helps = settings_of(script)
    assert len(helps) > 30
    assert [name for name, text in helps.items() if len(text) < 10] == []


def test_help_shows_the_groups_and_a_line_for_every_setting(script, tmp_path):
    process = run(script, ["--help"], tmp_path, cold=True, environment={"COLUMNS": "100"})
    assert (process.returncode, process.err) == (0, "")
    shown = re.sub(r"[│╭╮╰╯─\s]+", " ", process.out)
    for name, text in settings_of(script).items():
        assert f"--{name.replace('_', '-')} " in shown or f"--{name.replace('_', '-')}, " in shown
        assert " ".join(text.split()) in shown
    for group in ("experiment", "environment", "algorithm", "optimisation", "run control"):
        assert f"{group} options" in shown.replace("-", " ")


PRINTED = dict(gamma=0.99, epsilon=0.1, epsilon_mu=0.1, epsilon_sigma=1e-4, covariance="full", policy_layers=(100, 100))
PRINTED |= dict(
    critic_layers=(200, 200), learning_rate=5e-4, updates_per_step=1.0, target_period=1000, policy_period=1000
)


def test_paper_restores_every_printed_value(script):
    restored = script.resolve(script.Args(paper=True))
    for name, value in PRINTED.items():
        if hasattr(restored, name):
            assert getattr(restored, name) == value, name
    helps = settings_of(script)
    departures = {name for name, text in helps.items() if "paper:" in text} - PRINTED.keys()
    assert departures <= set(script.PAPER) | {"decoupling", "gradient", "constraint"}


def test_paper_leaves_what_the_user_gives_and_is_what_the_run_uses(script, tmp_path):
    train(script, [*tiny(run_dir="run", total_timesteps=100), "--paper"], tmp_path)
    used = json.loads((tmp_path / "run/args.json").read_text())
    assert used["target_period"] == 1000 and used["epsilon_mu"] == 0.1
    assert used["policy_layers"] == [16, 16] and used["updates_per_step"] == 0.2


def test_evaluate_prints_a_mean_return_and_changes_nothing(script, started):
    _, run_dir = started
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    out = train(script, flags(evaluate=run_dir, eval_episodes=3), run_dir).out
    found = re.fullmatch(rf"{TASK}: mean return (\S+) over 3 episodes, from (\S+) to (\S+)\n", out)
    mean, low, high = map(float, found.groups())
    assert 0 <= low <= mean <= high <= 50
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


def test_the_final_evaluation_is_what_evaluate_says(script, started):
    _, run_dir = started
    out = train(script, flags(evaluate=run_dir), run_dir).out  # as many episodes as the run itself used
    logged = float(rows(run_dir)[-1]["eval/episodic_return"])
    assert f"mean return {logged:.1f} over 1 episodes" in out


def test_a_video_plays_at_true_speed_without_a_display(script, started, tmp_path):
    _, run_dir = started
    filmed = tmp_path / "filmed"
    shutil.copytree(run_dir, filmed)
    environment = {"DISPLAY": ""}
    pendulum = tiny(env_id="InvertedPendulum-v5", time_limit=5, learning_starts=20, total_timesteps=20, run_dir="other")
    evaluated, trained = together(
        lambda: train(
            script, [*flags(evaluate=filmed), "--capture-video"], tmp_path, cold=True, environment=environment
        ),
        lambda: train(script, [*pendulum, "--capture-video"], tmp_path, cold=True, environment=environment),
    )
    assert (evaluated.err, trained.err) == ("", "")
    for name, fps, frames in (("filmed", 100, 50), ("other", 25, 5)):  # control steps of 0.01 s and of 0.04 s
        reader = imageio.get_reader(tmp_path / name / "evaluation.mp4")
        assert reader.get_meta_data()["fps"] == fps
        pictures = list(reader.iter_data())
        assert len(pictures) == frames
        assert pictures[0].shape[2] == 3 and pictures[0].std() > 5, "a blank picture"


def test_the_lines_in_the_readme_load_a_policy(script, started, monkeypatch):
    _, run_dir = started
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "model.pt" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 6
    monkeypatch.syspath_prepend(ROOT)
    names = {}
    exec(block.replace("RUN_DIR", str(run_dir)).replace("mpo_continuous", script.__name__), names)
    policy, saved = names["policy"], load(run_dir / "checkpoint.pt")["agent"]
    for name, value in policy.state_dict().items():
        assert torch.equal(value, saved[f"policy.{name}"])
    assert names["mean"].shape == (1,) and names["cholesky"].shape == (1, 1)
    assert (run_dir / "model.pt").stat().st_size < 100_000


@pytest.mark.parametrize("seconds, left", [(2, ""), (100, r"  18 min \d\d s left")], ids=["at once", "later"])
def test_the_progress_line_has_steps_return_speed_and_once_it_can_be_told_the_time_left(
    script, seconds, left, tmp_path, capsys
):
    args = script.Args(total_timesteps=10_000, updates_per_step=1.0)
    counters = {"global_step": 700, "due": 200.0, "began": 0, "returns": [3.0, 4.0], "seconds": 1000.0}
    log = script.Log(tmp_path, args, counters)
    log.progress(counters)
    log.progress(counters)  # so soon after the first, this prints nothing
    assert re.fullmatch(r"step 500/10,000  return 3\.5  \d+ steps/s\n", capsys.readouterr().out)
    log.shown_at, log.first = 0.0, (log.first[0] - seconds, log.first[1])  # as if the first line were so old
    log.progress(counters | {"global_step": 1500})
    assert re.fullmatch(rf"step 1,300/10,000  return 3\.5  \d+ steps/s{left}\n", capsys.readouterr().out)
