"""The scripts as files that people copy, start, read the help of, and take policies from."""

import ast
import dataclasses
import fcntl
import importlib.metadata
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import tokenize
from pathlib import Path

import imageio.v2 as imageio
import pytest
import torch
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import (
    CONTINUOUS,
    FIRST,
    OUR_LINES,
    PATIENCE,
    SINGLE,
    TASK,
    flags,
    load,
    rows,
    surroundings,
    timeless,
    tiny,
    together,
    train,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = sorted(ROOT.glob("mpo_*.py"))
DIFFER_BY_NATURE = {"Args", "make_env", "Policy", "Critic", "main"}


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def header(file):
    """The requirements in the first lines of a script, as PEP 723 has them."""
    block = re.search(r"(?m)^# /// script\n(.*?)^# ///$", file.read_text(), re.DOTALL).group(1)
    return tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))


def needed(requirements):
    """The distributions that these requirements bring, and what those require in turn."""
    found, waiting = set(), [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        unmet = requirement.marker and not requirement.marker.evaluate({"extra": ""})
        if unmet or name in found:
            continue
        found.add(name)
        extras = [{"extra": extra} for extra in ["", *requirement.extras]]
        for further in map(Requirement, importlib.metadata.requires(name) or ()):
            if not further.marker or any(further.marker.evaluate(extra) for extra in extras):
                further.marker = None
                waiting.append(further)
    return found


# Packages that the script's own header does not bring are hidden, whatever else is installed.
HIDING = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def started(script, tmp_path_factory):
    """A run of the script, copied alone into an empty folder; and its run folder."""
    folder = tmp_path_factory.mktemp("alone")
    file = Path(shutil.copy(script.__file__, folder))
    brought = needed(header(file)["dependencies"])
    modules = importlib.metadata.packages_distributions().items()
    hidden = [m for m, names in modules if not brought & set(map(canonicalize_name, names))]
    assert "pytest" in hidden and "torch" not in hidden
    command = [sys.executable, "-I", "-c", HIDING, " ".join(hidden), file.name, *tiny(seed=3)]
    options = dict(env=surroundings(), capture_output=True, text=True, timeout=PATIENCE)
    process = subprocess.run(command, cwd=folder, **options)  # -I: nothing from beside the script
    assert process.returncode == 0, process.stderr
    (run_dir,) = (folder / "runs").iterdir()
    return process, run_dir


def test_a_script_copied_alone_runs_with_no_package_but_those_its_header_names(script, started):
    _, run_dir = started
    name = rf"dm_control-cartpole-swingup-v0__{script.__name__}__3__\d+"
    assert re.fullmatch(name, run_dir.name)
    kinds = {name.split(".")[0] for name in os.listdir(run_dir)}
    assert kinds == {"args", "checkpoint", "events", "lock", "model", "progress"}
    assert len(rows(run_dir)) == 3


def test_a_normal_start_prints_our_lines_only(script, started):
    process, _ = started
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert len(lines) == len(OUR_LINES)
    for line, pattern in zip(lines, OUR_LINES):
        assert re.fullmatch(pattern, line), line


def test_a_process_that_these_tests_fork_does_what_one_of_its_own_does(script, started, tmp_path):
    """Most tests run the script in a process that has the imports behind it."""
    train(script, tiny(seed=3, run_dir="run"), tmp_path)
    assert timeless(tmp_path / "run") == timeless(started[1])
    ours, theirs = (load(folder / "model.pt") for folder in (tmp_path / "run", started[1]))
    assert all(torch.equal(ours["policy"][name], x) for name, x in theirs["policy"].items())


def test_the_smallest_value_of_every_setting_runs_with_finite_numbers(script, tmp_path):
    least = dict(num_samples=1, window=1, batch_size=1, time_limit=1, gamma=1e-9, buffer_size=1)
    least |= dict(policy_layers=(1,), critic_layers=(1,), learning_starts=1, total_timesteps=5)
    least |= dict(updates_per_step=1.0, target_period=1, eval_every=1)
    process = train(script, tiny(run_dir="run", **least), tmp_path)
    table = rows(tmp_path / "run")
    assert process.err == "" and len(table) == 5
    for row in table:
        assert math.isnan(float(row.pop("mpo/q_minus_return", "nan")))  # of episodes of 500 steps
        assert all(math.isfinite(float(value)) for value in row.values())


def terminal(script, words, cwd):
    """What a run writes to a terminal, as text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # rows, columns
    command = [sys.executable, script.__file__, *words]
    options = dict(cwd=cwd, env=surroundings(), stdout=theirs, stderr=theirs)
    process = subprocess.Popen(command, **options)
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
    assert process.wait(60) == 0, text
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_on_a_terminal_a_bar_shows_the_steps_from_the_first_episode_on(script, tmp_path):
    """It moves while the replay is filled, before the first gradient step, and while it learns."""
    # the bar is drawn ten times a second at most, and the replay must take longer than that to fill
    short = dict(learning_starts=5000, total_timesteps=5050, updates_per_step=0.01)
    text = terminal(script, tiny(run_dir="run", **short), tmp_path)
    bars = re.findall(r"\r[^\r\n]*\| *(\d+)/5050 [^\r\n]*return \S+, update ([\d,]+)", text)
    filling = {int(step) for step, update in bars if update == "0"}
    assert len(filling) >= 2 and max(filling) < 5050, bars
    assert any(update != "0" for _, update in bars)
    kept = [line.split("\r")[-1] for line in text.splitlines()]
    for pattern in OUR_LINES:
        assert any(re.fullmatch(pattern, line) for line in kept), (pattern, kept)


# ---- The file's first lines, its size, and what it shares with the other scripts.
@every_file
def test_the_first_lines_name_licence_paper_project_and_commands_that_exist(file):
    lines, card = file.read_text().splitlines(), ast.get_docstring(ast.parse(file.read_text()))
    assert lines[0] == "# SPDX-License-Identifier: MIT"
    named = " ".join(card.split())
    for words in ("Maximum a Posteriori Policy Optimisation", "Abdolmaleki et al., ICLR 2018"):
        assert words in named
    assert '"MPO, one readable file per variant"' in named
    assert f"{file.name} --resume RUN_DIR" in card and f"{file.name} --evaluate RUN_DIR" in card
    fields = set(re.findall(r"(?m)^    (\w+): ", file.read_text()))
    for command in re.findall(rf"{file.name}(.*)", card):
        for flag in re.findall(r"--([a-z-]+)", command):
            assert flag.replace("-", "_") in fields, flag
    if "gaussian_log_prob" in file.read_text():
        assert "walker-walk" in named
        for steps in ("20,000", "50,000", "100,000"):
            assert steps in named


@every_file
def test_a_copy_names_no_file_that_it_lacks(file):
    others = {path.name for path in ROOT.iterdir() if path.suffix} - {file.name}
    folders = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir()} - {"runs/"}
    assert {"constraints.txt", "README.md", "docs/", "tests/", "benchmark/"} <= others | folders
    source = file.read_text()
    assert [name for name in others | folders if name in source] == []
    stems = {path.stem for path in FILES} - {file.stem}
    assert [stem for stem in stems if stem in source] == []


@every_file
def test_the_requirements_in_a_script_are_its_imports_and_as_the_project_has_them(file):
    tree, imported = ast.parse(file.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.add(node.module.split(".")[0])
    behind = {"tensorboard", "imageio-ffmpeg"}  # what PyTorch's writer and imageio import
    if "shimmy" in file.read_text():
        behind |= {"shimmy", "dm-control", "mujoco"}
    if file.stem == "mpo_atari":
        behind |= {"ale-py", "minatar", "pygame"}
    published = imported - set(sys.stdlib_module_names)
    inline = header(file)
    names = {canonicalize_name(Requirement(line).name) for line in inline["dependencies"]}
    assert names == {canonicalize_name(name) for name in published} | behind
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["atari"] if "atari" in file.stem else []
    assert set(inline["dependencies"]) <= set(project["dependencies"] + extra)
    assert inline["requires-python"] == project["requires-python"]


# Lines and tokens.
GOAL = {
    "mpo_continuous": (650, 6000),
    "mpo_parametric": (650, 6000),
    "mpo_atari": (720, 6600),
    "mpo_distributed": (720, 6600),
}


@every_file
def test_a_script_is_one_chapter_and_most_of_it_is_mpo(file):
    """Lines and tokens, so that one is not met by squeezing; MPO stands before the banner."""
    most = GOAL[file.stem]
    layout = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
    thin = {getattr(tokenize, name) for name in layout}
    with open(file, "rb") as stream:
        tokens = [token for token in tokenize.tokenize(stream.readline) if token.type not in thin]
    lines = file.read_text().splitlines()
    (banner,) = [n for n, line in enumerate(lines) if line.startswith("# ==== Plumbing")]
    assert len(lines) <= most[0] and len(tokens) <= most[1], (len(lines), len(tokens))
    assert max(map(len, lines)) <= 100
    assert banner >= 0.6 * len(lines)
    order = [r"class Args", r"def make_env", r"class Policy", r"def compute_losses", r"def main"]
    found = [n for name in order for n, line in enumerate(lines) if re.match(rf"{name}\b", line)]
    assert found == sorted(found) and found[-1] < banner


def test_functions_and_classes_of_one_name_are_identical_to_the_letter_in_all_scripts():
    found = {}
    for file in FILES:
        source = file.read_text()
        for node in ast.parse(source).body:
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if named and node.name not in DIFFER_BY_NATURE:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
                found.setdefault(node.name, {})[file.name] = text
    assert len([texts for texts in found.values() if len(texts) == len(FILES)]) >= 10
    different = [
        (name, sorted(texts)) for name, texts in found.items() if len(set(texts.values())) > 1
    ]
    assert not different, "copies that have drifted apart"


# ---- Settings: the help, and the paper's values.
def settings_of(script):
    """The help of every setting: the comment behind its field."""
    source, helps = Path(script.__file__).read_text(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    line = source.splitlines()[field.lineno - 1]
                    helps[field.target.id] = line.partition("  # ")[2]
    return {field.name: helps[field.name] for field in dataclasses.fields(script.Args)}


def test_help_shows_a_line_for_every_setting(script, monkeypatch, capsys):
    helps = settings_of(script)
    assert len(helps) > 30 and min(map(len, helps.values())) >= 10
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["--help"])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.err) == (0, "")
    shown = re.sub(r"[│╭╮╰╯─\s]+", " ", printed.out)
    for name, text in helps.items():
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", shown), name
        assert " ".join(text.split()) in shown


PRINTED = dict(gamma=0.99, epsilon=0.1, epsilon_mu=0.1, epsilon_sigma=1e-4, covariance="full")
PRINTED |= dict(policy_layers=(100, 100), critic_layers=(200, 200), updates_per_step=1.0)
PRINTED |= dict(learning_rate=5e-4, policy_learning_rate=5e-4, target_period=1000)
PRINTED |= dict(policy_period=1000, normalise_advantage=False)  # of mpo_parametric.py


def test_paper_restores_every_printed_value_but_those_that_are_typed(script):
    restored = script.parse_args(["--paper"])
    for name, value in PRINTED.items():
        if hasattr(restored, name):
            assert getattr(restored, name) == value, name
    marked = {name for name, text in settings_of(script).items() if "paper:" in text}
    assert marked <= PRINTED.keys() | {"gradient", "constraint"}, "a printed value not listed here"
    typed = script.parse_args(["--paper", *flags(epsilon_mu=0.02, seed=5)])
    assert typed == dataclasses.replace(restored, epsilon_mu=0.02, seed=5)
    assert script.parse_args([]) == script.Args() != dataclasses.replace(restored, paper=False)


# ---- What was learned: returns, films, and the policy in a program.
@pytest.mark.parametrize("script", SINGLE, indirect=True)
def test_evaluate_changes_nothing_and_agrees_with_the_run(script, started, capsys):
    _, run_dir = started
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    logged = float(rows(run_dir)[-1]["eval/episodic_return"])
    script.main(script.parse_args(flags(evaluate=run_dir)))  # as many episodes as the run had
    assert capsys.readouterr().out == f"{TASK}: mean {logged:.1f} of [{logged:.1f}]\n"
    script.main(script.parse_args(flags(evaluate=run_dir, eval_episodes=3)))
    out = capsys.readouterr().out
    found = re.fullmatch(rf"{TASK}: mean (\S+) of \[(\S+), (\S+), (\S+)\]\n", out)
    mean, *returns = map(float, found.groups())
    assert mean == pytest.approx(sum(returns) / 3, abs=0.11) and 0 <= min(returns) <= max(returns)
    assert max(returns) <= 50 and returns[0] == pytest.approx(logged, abs=0.06)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_video_plays_at_true_speed_without_a_display(script, started, tmp_path):
    """Of a saved policy, and of the first episode of an evaluation while training."""
    _, run_dir = started
    filmed = shutil.copytree(run_dir, tmp_path / "filmed")
    options = dict(cold=True, environment={"DISPLAY": ""})
    pendulum = tiny(env_id="InvertedPendulum-v5", time_limit=5, learning_starts=15, run_dir="other")
    pendulum += flags(total_timesteps=20, capture_video=True, eval_episodes=2)
    evaluation = flags(evaluate=filmed, capture_video=True)
    evaluated, trained = together(
        lambda: train(script, evaluation, tmp_path, **options),
        lambda: train(script, pendulum, tmp_path, **options),
    )
    assert (evaluated.err, trained.err) == ("", "")
    # control steps of 0.01 s and of 0.04 s; the start, and a picture after each step
    for name, fps, frames, size in (("filmed", 100, 51, (360, 480)), ("other", 25, 6, None)):
        reader = imageio.get_reader(tmp_path / name / "evaluation.mp4")
        assert reader.get_meta_data()["fps"] == fps
        pictures = list(reader.iter_data())
        assert len(pictures) == frames
        assert pictures[0].std() > 5, "a blank picture"
        assert size is None or pictures[0].shape[:2] == size


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_the_lines_in_the_readme_train_and_load_a_policy(script, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "main(" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 6
    short = "learning_starts=200, updates_per_step=0.1, total_timesteps=400, eval_episodes=1"
    assert "total_timesteps=5000" in block
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block.replace("total_timesteps=5000", short), names)
    saved = load(tmp_path / "runs/pendulum/checkpoint.pt")
    for name, value in names["policy"].state_dict().items():
        assert torch.equal(value, saved["agent"][f"policy.{name}"])
    assert names["mean"].shape == (1,) and names["cholesky"].shape == (1, 1)
    assert (tmp_path / "runs/pendulum/model.pt").stat().st_size < 200_000
