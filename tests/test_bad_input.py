"""What the user or the task gets wrong: one sentence, an exit code, and nothing lost."""

import json
import pickle

import pytest
import torch
from running import (
    CONTINUOUS,
    TASK,
    flags,
    last_step,
    load,
    one_sentence,
    rows,
    run,
    tiny,
    together,
    train,
)


@pytest.fixture(scope="module", params=CONTINUOUS)
def script(request):
    return request.param


# ---------------------------------------------------------------------------------------------------------------------
# Refused before training starts: exit code 2, one sentence on stderr, nothing on stdout, no folder made.
# ---------------------------------------------------------------------------------------------------------------------
REFUSED = {  # flags, and what the sentence must name
    "an unknown task": (dict(env_id="dm_control/walker-wakl-v0"), ["walker-wakl", "dm_control/walker-walk-v0"]),
    "a misspelt Gymnasium task": (dict(env_id="Pendulm-v1"), ["Pendulum-v1"]),
    "a task like no other": (dict(env_id="###"), ["###"]),
    "no task at all": (dict(env_id=""), ["there is no task"]),
    "discrete actions": (dict(env_id="CartPole-v1"), ["CartPole-v1", "discrete", "mpo_atari.py"]),
    "several discrete actions": (dict(env_id="Board-v0"), ["Board-v0", "continuous"]),
    "a matrix of actions": (dict(env_id="Matrix-v0"), ["Matrix-v0", "vector"]),
    "unbounded actions": (dict(env_id="Unbounded-v0"), ["Unbounded-v0", "--action-bound"]),
    "images": (dict(env_id="Picture-v0"), ["Picture-v0", "images"]),
    "camera images": (dict(env_id="dm_control/reach_site_vision-v0"), ["reach_site_vision", "images"]),
    "a task that needs a package": (dict(env_id="LunarLanderContinuous-v3"), ["LunarLander"]),
    "a count of zero": (dict(num_samples=0), ["--num-samples", "0"]),
    "a negative count": (dict(batch_size=-1), ["--batch-size", "-1"]),
    "no steps": (dict(total_timesteps=0), ["--total-timesteps"]),
    "no window": (dict(window=0), ["--window"]),
    "no updates": (dict(updates_per_step=0.0), ["--updates-per-step"]),
    "no trajectories": (dict(trajectories=0), ["--trajectories"]),
    "no target period": (dict(target_period=0), ["--target-period"]),
    "no evaluation episodes": (dict(eval_episodes=0), ["--eval-episodes"]),
    "a bound of zero": (dict(epsilon_mu=0.0), ["--epsilon-mu"]),
    "a negative bound": (dict(epsilon_mu=-0.1), ["--epsilon-mu", "-0.1"]),
    "a bound that is not a number": (dict(epsilon_sigma="nan"), ["--epsilon-sigma", "nan"]),
    "an infinite rate": (dict(learning_rate="inf"), ["--learning-rate", "inf"]),
    "a negative rate": (dict(multiplier_rate=-1e-3), ["--multiplier-rate"]),
    "a discount of one": (dict(gamma=1.0), ["--gamma", "1"]),
    "a negative discount": (dict(gamma=-0.5), ["--gamma"]),
    "a discount that is not a number": (dict(gamma="nan"), ["--gamma"]),
    "a layer of no units": (dict(policy_layers=(16, 0)), ["--policy-layers"]),
    "no layers": (dict(critic_layers=()), ["--critic-layers"]),
    "a negative seed": (dict(seed=-1), ["--seed", "-1"]),
    "a seed beyond 32 bits": (dict(seed=2**70), ["--seed"]),
    "a negative time limit": (dict(time_limit=-5), ["--time-limit"]),
    "a negative action bound": (dict(action_bound=-1.0), ["--action-bound"]),
    "a negative interval": (dict(checkpoint_every=-1), ["--checkpoint-every"]),
    "a negative number of threads": (dict(threads=-2), ["--threads"]),
    "a standard deviation of zero": (dict(initial_std=0.0), ["--initial-std"]),
    "an initial below the least standard deviation": (
        dict(initial_std=0.01, min_std=0.1),
        ["--initial-std", "--min-std"],
    ),
    "an initial standard deviation at its upper bound": (
        dict(initial_std=0.5, max_std=0.5),
        ["--max-std", "--initial-std"],
    ),
    "a replay smaller than a window": (dict(buffer_size=8, window=8), ["--buffer-size", "--window"]),
    "a replay larger than memory": (dict(buffer_size=10**15), ["--buffer-size"]),
    "a graphics card that is not there": (dict(device="cuda"), ["cuda", "--device cpu"]),
    "a device that does not exist": (dict(device="abacus"), ["abacus", "--device cpu"]),
    "a video without a renderer": (dict(capture_video=True), ["--capture-video", "MUJOCO_GL"]),
    "a folder that holds a run": (dict(run_dir="full"), ["full", TASK, "--resume full"]),
    "a folder that is a file": (dict(run_dir="file"), ["file", "--run-dir"]),
    "a folder in a file": (dict(run_dir="file/run"), ["file/run", "--run-dir"]),
    "a folder where nothing can be made": (dict(run_dir="/proc/run"), ["/proc/run", "--run-dir"]),
    "resuming what is no folder": (dict(resume="nowhere"), ["nowhere"]),
    "resuming an empty folder": (dict(resume="empty"), ["empty"]),
    "resuming the run of another task": (dict(resume="full", env_id="Pendulum-v1"), ["full", TASK, "Pendulum-v1"]),
    "resuming the run of another task, our default": (
        dict(resume="full", env_id="dm_control/walker-walk-v0"),
        ["full", TASK, "walker"],
    ),
    "resuming with another network": (dict(resume="full", policy_layers=(8, 8)), ["full", "--policy-layers"]),
    "resuming with another discount": (dict(resume="full", gamma=0.5), ["full", "--gamma 0.99", "0.5"]),
    "resuming with another seed": (dict(resume="full", seed=9), ["full", "--seed"]),
    "resuming without a checkpoint": (dict(resume="no_checkpoint"), ["no_checkpoint", "checkpoint"]),
    "evaluating without a checkpoint": (dict(evaluate="no_checkpoint"), ["no_checkpoint", "checkpoint"]),
    "evaluating what is no folder": (dict(evaluate="nowhere"), ["nowhere"]),
    "a checkpoint cut short": (dict(resume="cut"), ["cut/checkpoint.pt", "damaged"]),
    "an empty checkpoint": (dict(resume="blank"), ["blank/checkpoint.pt", "damaged"]),
    "a checkpoint of garbage": (dict(evaluate="garbage"), ["garbage/checkpoint.pt", "damaged"]),
    "a checkpoint with code in it": (dict(resume="code"), ["code/checkpoint.pt", "damaged"]),
    "a checkpoint with code in it, zipped": (dict(resume="zipped_code"), ["zipped_code/checkpoint.pt", "damaged"]),
    "a checkpoint without the multipliers": (dict(resume="part"), ["part/checkpoint.pt", "damaged"]),
    "a checkpoint of other networks": (dict(resume="other"), ["other/checkpoint.pt", "damaged"]),
    "settings cut short": (dict(resume="cut_args"), ["cut_args/args.json"]),
    "settings that are no dictionary": (dict(resume="list_args"), ["list_args/args.json"]),
    "settings with an unknown name": (dict(resume="odd_args"), ["odd_args/args.json", "colour"]),
    "settings of the wrong type": (dict(resume="typed_args"), ["typed_args/args.json"]),
    "settings out of range": (dict(resume="range_args"), ["--gamma"]),
}


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
    saved, parts = (folder / "full/args.json").read_text(), load(folder / "full/checkpoint.pt")

    def copy(name, checkpoint=whole, settings=saved):
        (folder / name).mkdir()
        (folder / name / "args.json").write_text(settings)
        if checkpoint is not None:
            (folder / name / "checkpoint.pt").write_bytes(checkpoint)

    copy("no_checkpoint", checkpoint=None)
    copy("cut", checkpoint=whole[: len(whole) // 2])
    copy("blank", checkpoint=b"")
    copy("garbage", checkpoint=bytes(range(256)) * 50)
    copy("code", checkpoint=pickle.dumps({"agent": Trap()}, protocol=2))
    copy("zipped_code")
    torch.save(parts | {"agent": Trap()}, folder / "zipped_code/checkpoint.pt")
    copy("part")
    agent = {name: value for name, value in parts["agent"].items() if not name.startswith("log_")}
    torch.save(parts | {"agent": agent}, folder / "part/checkpoint.pt")
    copy("other", settings=saved.replace("16", "24"))
    copy("cut_args", settings=saved[: len(saved) // 2])
    copy("list_args", settings="[1, 2]")
    settings = json.loads(saved)
    copy("odd_args", settings=json.dumps(settings | {"colour": "red"}))
    copy("typed_args", settings=json.dumps(settings | {"gamma": "high"}))
    copy("range_args", settings=json.dumps(settings | {"gamma": 7.0}))


@pytest.fixture(scope="module")
def refusals(script, tmp_path_factory):
    """All of REFUSED, run once: the folder they ran in, and the processes by name."""
    folder, lists = tmp_path_factory.mktemp("refused"), []
    furnish(script, folder)
    for number, (given, _) in enumerate(REFUSED.values()):
        new = {} if {"resume", "evaluate"} & given.keys() else {"env_id": TASK, "run_dir": f"new{number}"}
        lists.append(flags(**(new | given)))
    return folder, dict(zip(REFUSED, together(*(lambda words=words: run(script, words, folder) for words in lists))))


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_one_sentence_before_training_starts(script, case, refusals):
    _, processes = refusals
    process = processes[case]
    assert (process.returncode, process.out) == (2, ""), process.err
    sentence = one_sentence(process)
    assert sentence.startswith(f"{script.__name__}.py: ")
    for word in REFUSED[case][1]:
        assert word in sentence


def test_refusing_leaves_no_folder_no_temporary_file_and_the_old_run_as_it_was(script, refusals):
    folder, _ = refusals
    assert not list(folder.glob("new*")) and not list(folder.glob("runs"))
    assert not list(folder.rglob("*.tmp"))
    assert load(folder / "full/checkpoint.pt")["counters"]["global_step"] == 200
    assert last_step(folder / "full") == 200
    assert json.loads((folder / "full/args.json").read_text())["gamma"] == 0.99


def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_does_not_run(script, refusals, monkeypatch):
    folder, _ = refusals
    assert not (folder / "sprung").exists()
    monkeypatch.chdir(folder)
    with open("code/checkpoint.pt", "rb") as file:  # pickle's own loader would run it
        pickle.load(file)["agent"].close()
    assert (folder / "sprung").exists()


@pytest.mark.parametrize("words", [["--nonsense", "1"], ["--num-samples", "many"], ["--covariance", "wild"]])
def test_what_the_parser_refuses_is_named_without_a_traceback(script, words, tmp_path):
    process = run(script, words, tmp_path)
    assert process.returncode == 2 and words[0] in process.err and "Traceback" not in process.err


@pytest.mark.parametrize("package, flag", [("imageio_ffmpeg", "--capture-video"), ("wandb", "--track")])
def test_a_flag_that_needs_a_package_names_it_when_it_is_missing(script, package, flag, tmp_path):
    process = run(script, [*tiny(run_dir="run"), flag], tmp_path, hidden=[package])
    assert process.returncode == 2
    assert package in one_sentence(process) and "pip install" in process.err
    assert not (tmp_path / "run").exists()


def test_mujoco_gl_that_means_nothing_is_one_sentence(script, tmp_path):
    process = run(script, tiny(run_dir="run"), tmp_path, cold=True, environment={"MUJOCO_GL": "nonsense"})
    assert process.returncode == 2
    assert "MUJOCO_GL" in one_sentence(process)


# ---------------------------------------------------------------------------------------------------------------------
# Faults while training: exit code 1, one sentence that names the fault and the last good checkpoint.
# ---------------------------------------------------------------------------------------------------------------------
FAULTS = {  # task, what the sentence names, the last good checkpoint with one every 100 steps
    "NaNReward": ("reward", 200),
    "InfiniteReward": ("reward", 200),
    "NaNObservation": ("observation", 200),
    "InfiniteObservation": ("observation", 200),
    "NaNStart": ("observation", None),
    "HugeReward": ("losses/", 100),
}


@pytest.fixture(scope="module")
def faults(script, tmp_path_factory):
    folder, calls = tmp_path_factory.mktemp("faults"), []
    for name in FAULTS:
        words = tiny(env_id=f"{name}-v0", run_dir=name, total_timesteps=400, checkpoint_every=100)
        calls.append(lambda words=words: run(script, words, folder))
    return folder, dict(zip(FAULTS, together(*calls)))


@pytest.mark.parametrize("task", FAULTS)
def test_a_number_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays_good(script, task, faults):
    folder, results = faults
    named, step = FAULTS[task]
    sentence = one_sentence(results[task])
    assert results[task].returncode == 1
    assert named in sentence and ("finite" in sentence or "inf" in sentence or "nan" in sentence)
    if step is None:
        assert "no checkpoint" in sentence and not (folder / task / "checkpoint.pt").exists()
        return
    assert f"step {step}" in sentence and task in sentence
    checkpoint = load(folder / task / "checkpoint.pt")
    assert checkpoint["counters"]["global_step"] == step
    assert all(x.isfinite().all() for x in [*checkpoint["agent"].values(), checkpoint["replay"]["state"]])
    assert last_step(folder / task) >= step
    assert all(value not in ("nan", "inf") for row in rows(folder / task) for value in row.values())


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_stays_good(script, tmp_path):
    """Files beyond a size cannot be written, as on a full disk: write() fails."""
    words = tiny(run_dir="run", total_timesteps=5000, checkpoint_every=100, updates_per_step=0.02)
    process = run(script, words, tmp_path, file_size=120_000)
    sentence = one_sentence(process)
    assert process.returncode == 1, process.err
    checkpoint = load(tmp_path / "run/checkpoint.pt")
    step = checkpoint["counters"]["global_step"]
    assert 100 <= step < 5000 and f"step {step:,}" in sentence and "File too large" in sentence
    assert not (tmp_path / "run/checkpoint.pt.tmp").exists()

    resumed = run(script, flags(resume="run", total_timesteps=step + 100), tmp_path)  # with room again
    assert resumed.returncode == 0, resumed.err
    assert load(tmp_path / "run/checkpoint.pt")["counters"]["global_step"] == step + 100


def test_a_disk_that_is_full_from_the_start_is_one_sentence(script, tmp_path):
    process = run(script, tiny(run_dir="run"), tmp_path, file_size=500)
    assert process.returncode == 2
    assert "run" in one_sentence(process) and "File too large" in process.err
