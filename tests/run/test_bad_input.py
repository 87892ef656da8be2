"""What the user or the task gets wrong: one sentence, an exit code, and nothing lost."""

import dataclasses
import json
import math
import pickle
import re
import sys

import numpy as np
import pytest
import tasks  # noqa: F401, registers them
import torch
from conftest import SCRIPTS
from running import (
    AGAIN,
    FIRST,
    SINGLE,
    TASK,
    flags,
    last_step,
    load,
    one_sentence,
    refusal,
    rows,
    run,
    tiny,
    together,
    train,
)


@pytest.fixture(scope="module", params=FIRST)  # what is tried here is the same text in all scripts
def script(request):
    return request.param


# ---- Refused before training starts: exit code 2, one sentence on stderr, nothing on stdout, no
# folder made. Most are tried by calling main() here, a handful as processes too.
BILLIONS = 3_000_000_000
REFUSED = {  # flags, and what the sentence must name
    "an unknown task": (dict(env_id="dm_control/walker-wakl-v0"), ["walker-wakl"]),
    "a misspelt Gymnasium task": (dict(env_id="Pendulm-v1"), ["Pendulm-v1", "Pendulum"]),
    "a task like no other": (dict(env_id="###"), ["###"]),
    "no task at all": (dict(env_id=""), ["cannot be made"]),
    "a module that is not there": (dict(env_id="no_module:Task-v0"), ["no_module"]),
    "discrete actions": (dict(env_id="CartPole-v1"), ["CartPole-v1", "Discrete(2)"]),
    "several discrete actions": (dict(env_id="Board-v0"), ["Board-v0", "MultiDiscrete"]),
    "a matrix of actions": (dict(env_id="Matrix-v0"), ["Matrix-v0", "vectors", "(2, 2)"]),
    "integer actions": (dict(env_id="Integers-v0"), ["Integers-v0", "int64"]),
    "unbounded actions": (dict(env_id="Unbounded-v0"), ["Unbounded-v0", "bounded", "inf"]),
    "unbounded actions of dm_control": (dict(env_id="dm_control/lqr-lqr_2_1-v0"), ["lqr_2_1"]),
    "images": (dict(env_id="Picture-v0"), ["Picture-v0", "vectors", "(8, 8, 3), uint8"]),
    "camera images": (dict(env_id="dm_control/reach_site_vision-v0"), ["reach_site_vision"]),
    "a task that needs a package": (dict(env_id="LunarLanderContinuous-v3"), ["LunarLander"]),
    "a count of zero": (dict(num_samples=0), ["--num-samples", "above 0", "not 0"]),
    "a negative count": (dict(batch_size=-1), ["--batch-size", "-1"]),
    "a bound that is not a number": (dict(epsilon_sigma="nan"), ["--epsilon-sigma", "nan"]),
    "an infinite rate": (dict(learning_rate="inf"), ["--learning-rate", "inf"]),
    "a discount of one": (dict(gamma=1.0), ["--gamma", "1"]),
    "a layer of no units": (dict(policy_layers=(16, 0)), ["--policy-layers"]),
    "no layers": (dict(critic_layers=()), ["--critic-layers"]),
    "a negative seed": (dict(seed=-1), ["--seed", "0 or more", "-1"]),
    "a seed beyond 64 bits": (dict(seed=2**70), ["--seed"]),
    "a negative time limit": (dict(time_limit=-5), ["--time-limit", "0 or more"]),
    "fewer steps than it takes to start": (
        dict(total_timesteps=100),
        ["--total-timesteps", "above 100", "100"],
    ),
    "a replay of no steps": (dict(buffer_size=0), ["--buffer-size", "0"]),
    "billions of samples": (dict(num_samples=BILLIONS), ["--num-samples", "below 1,000,000,000"]),
    "billions of rows": (dict(buffer_size=BILLIONS), ["--buffer-size", "below 1,000,000,000"]),
    "billions of units": (
        dict(policy_layers=(16, BILLIONS)),
        ["--policy-layers", "below 1,000,000,000"],
    ),
    "a graphics card that is not there": (dict(device="cuda"), ["--device cuda"]),
    "a device that does not exist": (dict(device="abacus"), ["--device abacus"]),
    "a device without numbers": (dict(device="meta"), ["--device meta"]),
    "a video without a renderer": (dict(capture_video=True), ["filmed", TASK]),
    "a folder that holds a run": (dict(run_dir="full"), ["full", "--resume full"]),
    "a folder that is a file": (dict(run_dir="file"), ["file", "cannot be written"]),
    "a folder in a file": (dict(run_dir="file/run"), ["file/run", "cannot be written"]),
    "a folder where nothing can be made": (dict(run_dir="/proc/run"), ["/proc/run"]),
    "resuming what is no folder": (dict(resume="nowhere"), ["nowhere", "missing"]),
    "resuming an empty folder": (dict(resume="empty"), ["empty", "missing"]),
    "resuming a file": (dict(resume="full/checkpoint.pt"), ["full/checkpoint.pt", "missing"]),
    "resuming another task": (dict(resume="full", env_id="Pendulum-v1"), [TASK, "Pendulum-v1"]),
    "resuming our default task": (
        dict(resume="full", env_id="dm_control/walker-walk-v0"),
        [TASK, "walker"],
    ),
    "resuming with another network": (
        dict(resume="full", policy_layers=(8, 8)),
        ["full", "policy_layers"],
    ),
    "resuming with another discount": (dict(resume="full", gamma=0.5), ["gamma 0.99", "0.5"]),
    "resuming with another seed": (dict(resume="full", seed=9), ["full", "seed"]),
    "resuming without a checkpoint": (dict(resume="no_checkpoint"), ["no_checkpoint", "missing"]),
    "evaluating without a checkpoint": (dict(evaluate="no_checkpoint"), ["no_checkpoint"]),
    "evaluating what is no folder": (dict(evaluate="nowhere"), ["nowhere", "missing"]),
    "evaluating and resuming": (dict(evaluate="full", resume="full"), ["--evaluate", "--resume"]),
    "evaluating another task": (dict(evaluate="full", env_id="Pendulum-v1"), ["Pendulum-v1"]),
    "a checkpoint cut short": (dict(resume="cut"), ["cut/checkpoint.pt", "damaged"]),
    "an empty checkpoint": (dict(resume="blank"), ["blank/checkpoint.pt", "damaged"]),
    "a checkpoint of garbage": (dict(evaluate="garbage/checkpoint.pt"), ["damaged"]),
    "a checkpoint with code in it": (dict(resume="code"), ["code/checkpoint.pt", "damaged"]),
    "a checkpoint with code, zipped": (dict(resume="zipped"), ["zipped/checkpoint.pt", "damaged"]),
    "weights of another kind": (dict(evaluate="weights.pt"), ["weights.pt", "not from this"]),
}
PROCESSES = ["an unknown task", "images", "a count of zero", "a video without a renderer"]
PROCESSES += ["a folder that holds a run", "a checkpoint with code in it", "no layers"]


class Trap:
    """Unpickling this makes a file named `sprung`."""

    def __reduce__(self):
        return open, ("sprung", "w")


def furnish(script, folder):
    """Folders with a run in them, whole and damaged in every way."""
    train(script, tiny(run_dir="full"), folder)
    (folder / "file").write_text("no folder")
    (folder / "empty").mkdir()
    whole = (folder / "full/checkpoint.pt").read_bytes()
    settings = (folder / "full/args.json").read_text()
    parts = load(folder / "full/checkpoint.pt")

    def copy(name, content):
        (folder / name).mkdir()
        (folder / name / "args.json").write_text(settings)
        if isinstance(content, bytes):
            (folder / name / "checkpoint.pt").write_bytes(content)
        elif content:
            torch.save(content, folder / name / "checkpoint.pt")

    copy("no_checkpoint", None)
    copy("cut", whole[: len(whole) // 2])
    copy("blank", b"")
    copy("garbage", bytes(range(256)) * 50)
    copy("code", pickle.dumps({"agent": Trap()}, protocol=2))
    copy("zipped", parts | {"agent": Trap()})
    torch.save(torch.nn.Linear(3, 3).state_dict(), folder / "weights.pt")


@pytest.fixture(scope="module")
def furnished(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    furnish(script, folder)
    return folder


def words_of(case):
    given = REFUSED[case][0]
    old = {"resume", "evaluate"} & given.keys()
    return flags(**given) if old else tiny(**{"run_dir": "new"} | given)


def unnamed(script, case, sentence):
    """What the sentence should name, but does not."""
    return [w for w in [f"{script.__name__}.py: ", *REFUSED[case][1]] if w not in sentence]


@pytest.mark.parametrize("case", sorted(REFUSED.keys() - {"a video without a renderer"}))
def test_bad_input_is_refused_with_one_sentence_before_training_starts(
    script, case, furnished, monkeypatch, capsys
):
    monkeypatch.chdir(furnished)
    monkeypatch.setattr(sys, "path", [*sys.path])  # main() adds the current folder
    assert unnamed(script, case, refusal(script, words_of(case), capsys)) == []
    assert_nothing_changed(furnished)


def test_as_a_process_it_ends_with_that_sentence_and_exit_code_2(script, furnished):
    calls = [lambda case=case: run(script, words_of(case), furnished) for case in PROCESSES]
    for case, process in zip(PROCESSES, together(*calls)):
        assert (process.returncode, process.out) == (2, ""), case
        assert unnamed(script, case, one_sentence(process)) == []
    assert_nothing_changed(furnished)


def assert_nothing_changed(folder):
    """No new folder, no temporary file, and the old run as it was."""
    assert not list(folder.glob("new*")) and not list(folder.glob("runs"))
    assert not list(folder.rglob("*.tmp"))
    assert load(folder / "full/checkpoint.pt")["done"]["steps"] == 200
    assert last_step(folder / "full") == 200
    assert json.loads((folder / "full/args.json").read_text())["gamma"] == 0.99


def numeric_settings(script):
    """Names and defaults of the settings that are numbers, or several."""
    fields = {field.name: field.default for field in dataclasses.fields(script.Args)}
    return {name: x for name, x in fields.items() if type(x) in (int, float, tuple)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_number_is_positive_where_its_default_is_and_below_a_billion(script, capsys):
    settings = numeric_settings(script)
    assert len(settings) > 15
    for name, default in settings.items():
        bad = [-1, math.nan, math.inf, 1e9] + [0] * bool(default and name != "seed")
        for value in bad:
            value = (16, value) if isinstance(default, tuple) else value
            with pytest.raises(SystemExit) as stop:
                script.main(script.Args(**{name: value}))
            (sentence,) = capsys.readouterr().err.splitlines()
            assert stop.value.code == 2 and f"--{name.replace('_', '-')} must be " in sentence


def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_does_not_run(
    script, furnished, monkeypatch, capsys
):
    monkeypatch.chdir(furnished)
    for folder in ("code", "zipped"):
        assert folder in refusal(script, flags(resume=folder), capsys)
    assert not (furnished / "sprung").exists()
    with open("code/checkpoint.pt", "rb") as file:  # pickle's own loader would run it
        pickle.load(file)["agent"].close()
    assert (furnished / "sprung").exists()


def test_what_the_parser_refuses_is_named_without_a_traceback(script, capsys):
    for words in (["--nonsense", "1"], ["--num-samples", "many"], ["--covariance", "wild"]):
        with pytest.raises(SystemExit) as stop:
            script.parse_args(words)
        assert stop.value.code == 2 and words[0] in capsys.readouterr().err


def test_mujoco_gl_that_means_nothing_is_one_sentence(script, tmp_path):
    environment = {"MUJOCO_GL": "nonsense"}
    process = run(script, tiny(run_dir="run"), tmp_path, cold=True, environment=environment)
    assert process.returncode == 2
    assert "MUJOCO_GL" in one_sentence(process)


# ---- Faults while training: exit code 1, one sentence that names the fault and how to go on. There
# is a checkpoint every 100 steps.
FAULTS = {  # task, what the sentence names, the step it stops at, and of its last good checkpoint
    "NaNReward": ("environment", 200, 200),
    "InfiniteReward": ("environment", 200, 200),
    "NaNObservation": ("environment", 200, 200),
    "InfiniteObservation": ("environment", 200, 200),
    "NaNStart": ("environment", 0, 0),
    "HugeReward": ("gradient", 150, 100),
}


@pytest.mark.parametrize("script", SINGLE, indirect=True)
def test_a_number_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays_good(
    script, tmp_path
):
    def learn(task):
        words = tiny(env_id=f"{task}-v0", run_dir=task, total_timesteps=400, eval_every=100)
        return run(script, words, tmp_path)

    names = list(FAULTS) if script is FIRST[0].values[0] else ["NaNReward", "HugeReward"]
    for task, process in zip(names, together(*(lambda task=task: learn(task) for task in names))):
        named, stopped, step = FAULTS[task]
        sentence = one_sentence(process)
        assert process.returncode == 1, task
        assert named in sentence and re.search("not finite|not a number", sentence)
        assert f"; stopped at step {stopped}; " in sentence
        assert re.search(AGAIN, sentence).group(1) == task
        checkpoint = load(tmp_path / task / "checkpoint.pt")
        assert checkpoint["done"]["steps"] == step
        kept = [*checkpoint["agent"].values(), *checkpoint["replay"]["rows"]]
        assert all(x.isfinite().all() for x in kept)
        assert last_step(tmp_path / task) >= step
        for row in rows(tmp_path / task):
            assert np.isfinite(learned(row)).all()


def learned(row):
    """The numbers of a row that every iteration has."""
    absent = ("eval/", "mpo/q_minus_return")  # of evaluations; of episodes of 500 steps or more
    return [float(x) for name, x in row.items() if not name.startswith(absent)]


def test_a_file_that_cannot_grow_stops_the_run_and_the_last_checkpoint_stays_good(script, tmp_path):
    """Files beyond a size cannot be written, as on a full disk: write() fails."""
    words = tiny(run_dir="run", total_timesteps=5000, eval_every=100, updates_per_step=0.02)
    process = run(script, words, tmp_path, file_size=120_000)
    sentence = one_sentence(process)
    assert process.returncode == 1, process.err
    step = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    stopped = int(re.search(r"stopped at step ([\d,]+);", sentence).group(1).replace(",", ""))
    assert 100 <= step <= stopped < 5000 and "File too large" in sentence
    assert re.search(AGAIN, sentence).group(1) == "run"
    assert not list((tmp_path / "run").glob("*.tmp"))

    train(script, flags(resume="run", total_timesteps=step + 100), tmp_path)  # with room again
    assert load(tmp_path / "run/checkpoint.pt")["done"]["steps"] == step + 100

    process = run(script, tiny(run_dir="new"), tmp_path, file_size=500)  # no room from the start
    assert process.returncode == 2
    assert "new" in one_sentence(process) and "File too large" in process.err
    train(script, tiny(run_dir="new"), tmp_path)  # what it left is no run
