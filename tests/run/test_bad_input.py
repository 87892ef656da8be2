"""What the user or the task gets wrong: one sentence, an exit code, and nothing lost."""

import json
import pickle

import pytest
import torch
from running import (
    FIRST,
    SINGLE,
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


@pytest.fixture(scope="module", params=SINGLE)
def script(request):
    return request.param


# ---- Refused before training starts: exit code 2, one sentence on stderr, nothing on stdout, no
# folder made. What the scripts share is tried in the first only.
BILLIONS = 3_000_000_000
REFUSED = {  # flags, and what the sentence must name
    "an unknown task": (dict(env_id="dm_control/walker-wakl-v0"), ["walker-wakl"]),
    "a misspelt Gymnasium task": (dict(env_id="Pendulm-v1"), ["Pendulm-v1", "Pendulum"]),
    "a task like no other": (dict(env_id="###"), ["###"]),
    "no task at all": (dict(env_id=""), ["cannot be made"]),
    "a module that is not there": (dict(env_id="no_module:Task-v0"), ["no_module"]),
    "discrete actions": (dict(env_id="CartPole-v1"), ["CartPole-v1", "Discrete(2)"]),
    "several discrete actions": (dict(env_id="Board-v0"), ["Board-v0", "MultiDiscrete"]),
    "a matrix of actions": (dict(env_id="Matrix-v0"), ["Matrix-v0", "vector"]),
    "integer actions": (dict(env_id="Integers-v0"), ["Integers-v0", "int64"]),
    "unbounded actions": (dict(env_id="Unbounded-v0"), ["Unbounded-v0", "bound"]),
    "unbounded actions of dm_control": (dict(env_id="dm_control/lqr-lqr_2_1-v0"), ["lqr_2_1"]),
    "images": (dict(env_id="Picture-v0"), ["Picture-v0", "images"]),
    "camera images": (dict(env_id="dm_control/reach_site_vision-v0"), ["reach_site_vision"]),
    "a task that needs a package": (dict(env_id="LunarLanderContinuous-v3"), ["LunarLander"]),
    "a count of zero": (dict(num_samples=0), ["--num-samples", "0"]),
    "a negative count": (dict(batch_size=-1), ["--batch-size", "-1"]),
    "no steps": (dict(total_timesteps=0), ["--total-timesteps"]),
    "no window": (dict(window=0), ["--window"]),
    "no updates": (dict(updates_per_step=0.0), ["--updates-per-step"]),
    "no trajectories": (dict(trajectories=0), ["--trajectories"]),
    "no target period": (dict(target_period=0), ["--target-period"]),
    "no evaluation episodes": (dict(eval_episodes=0), ["--eval-episodes"]),
    "no evaluation interval": (dict(eval_every=0), ["--eval-every"]),
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
    "a seed beyond 64 bits": (dict(seed=2**70), ["--seed"]),
    "a negative time limit": (dict(time_limit=-5), ["--time-limit"]),
    "a negative number of threads": (dict(threads=-2), ["--threads"]),
    "no threads": (dict(threads=0), ["--threads"]),
    "more threads than cores": (dict(threads=BILLIONS), ["--threads", "cores"]),
    "a standard deviation of zero": (dict(initial_std=0.0), ["--initial-std"]),
    "a standard deviation of a thousand": (dict(initial_std=1000.0), ["--initial-std"]),
    "an initial below the least": (dict(initial_std=0.01, min_std=0.1), ["--min-std"]),
    "an initial at the greatest": (dict(initial_std=0.5, max_std=0.5), ["--max-std"]),
    "fewer steps than it takes to start": (dict(total_timesteps=100), ["--learning-starts"]),
    "a replay smaller than a window": (dict(buffer_size=8, window=8), ["--buffer-size"]),
    "a replay of one row": (dict(buffer_size=1), ["--buffer-size"]),
    "a replay larger than memory": (dict(buffer_size=10**15), ["replay"]),
    "billions of samples": (dict(num_samples=BILLIONS), ["batch"]),
    "billions of windows": (dict(batch_size=BILLIONS), ["batch"]),
    "billions of rows": (dict(buffer_size=BILLIONS), ["replay"]),
    "billions of units": (dict(policy_layers=(BILLIONS,)), ["layers"]),
    "billions of units twice": (dict(critic_layers=(BILLIONS, BILLIONS)), ["layers"]),
    "a graphics card that is not there": (dict(device="cuda"), ["device"]),
    "a device that does not exist": (dict(device="abacus"), ["device", "abacus"]),
    "a device without numbers": (dict(device="meta"), ["device", "meta"]),
    "a video without a renderer": (dict(capture_video=True), ["filmed", TASK]),
    "a folder that holds a run": (dict(run_dir="full"), ["full", "--resume full"]),
    "a folder that is a file": (dict(run_dir="file"), ["file", "cannot be written"]),
    "a folder in a file": (dict(run_dir="file/run"), ["file/run", "cannot be written"]),
    "a folder where nothing can be made": (dict(run_dir="/proc/run"), ["/proc/run"]),
    "resuming what is no folder": (dict(resume="nowhere"), ["nowhere"]),
    "resuming an empty folder": (dict(resume="empty"), ["empty"]),
    "resuming a file": (dict(resume="full/model.pt"), ["full/model.pt"]),
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
    "resuming without a checkpoint": (dict(resume="no_checkpoint"), ["no_checkpoint"]),
    "evaluating without a checkpoint": (dict(evaluate="no_checkpoint"), ["no_checkpoint"]),
    "evaluating what is no folder": (dict(evaluate="nowhere"), ["nowhere"]),
    "evaluating and resuming": (dict(evaluate="full", resume="full"), ["--evaluate", "--resume"]),
    "evaluating another task": (dict(evaluate="full", env_id="Pendulum-v1"), ["Pendulum-v1"]),
    "a checkpoint cut short": (dict(resume="cut"), ["cut/checkpoint.pt", "damaged"]),
    "an empty checkpoint": (dict(resume="blank"), ["blank/checkpoint.pt", "damaged"]),
    "a checkpoint of garbage": (dict(evaluate="garbage/checkpoint.pt"), ["damaged"]),
    "a checkpoint with code in it": (dict(resume="code"), ["code/checkpoint.pt", "damaged"]),
    "a checkpoint with code, zipped": (dict(resume="zipped"), ["zipped/checkpoint.pt", "damaged"]),
    "weights of another kind": (dict(evaluate="weights.pt"), ["weights.pt"]),
}
SHARED = [case for case in REFUSED if case not in ("no layers", "billions of units")]


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
def refusals(script, tmp_path_factory):
    """All of REFUSED, run once: the folder they ran in, and the processes by name."""
    folder, calls = tmp_path_factory.mktemp("refused"), {}
    furnish(script, folder)
    shared = script is not FIRST[0].values[0]
    for number, (case, (given, _)) in enumerate(REFUSED.items()):
        if shared and case in SHARED:
            continue
        old = {"resume", "evaluate"} & given.keys()
        words = flags(**given) if old else tiny(**{"run_dir": f"new{number}"} | given)
        calls[case] = lambda words=words: run(script, words, folder)
    return folder, dict(zip(calls, together(*calls.values())))


def test_bad_input_is_refused_with_one_sentence_before_training_starts(script, refusals):
    wrong = []
    for case, process in refusals[1].items():
        named = all(word in process.err for word in [f"{script.__name__}.py: ", *REFUSED[case][1]])
        lines = len(process.err.splitlines())
        if (process.returncode, process.out, lines, named) != (2, "", 1, True):
            wrong.append((case, process.returncode, process.out, process.err))
    assert not wrong, "\n".join(map(str, wrong))


def test_refusing_leaves_no_folder_no_temporary_file_and_the_old_run_as_it_was(script, refusals):
    folder, _ = refusals
    assert not list(folder.glob("new*")) and not list(folder.glob("runs"))
    assert not list(folder.rglob("*.tmp"))
    assert load(folder / "full/checkpoint.pt")["done"]["steps"] == 200
    assert last_step(folder / "full") == 200
    assert json.loads((folder / "full/args.json").read_text())["gamma"] == 0.99


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_does_not_run(
    script, refusals, monkeypatch
):
    folder, _ = refusals
    assert not (folder / "sprung").exists()
    monkeypatch.chdir(folder)
    with open("code/checkpoint.pt", "rb") as file:  # pickle's own loader would run it
        pickle.load(file)["agent"].close()
    assert (folder / "sprung").exists()


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_what_the_parser_refuses_is_named_without_a_traceback(script, tmp_path):
    for words in (["--nonsense", "1"], ["--num-samples", "many"], ["--covariance", "wild"]):
        process = run(script, words, tmp_path)
        assert process.returncode == 2 and words[0] in process.err
        assert "Traceback" not in process.err


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_mujoco_gl_that_means_nothing_is_one_sentence(script, tmp_path):
    environment = {"MUJOCO_GL": "nonsense"}
    process = run(script, tiny(run_dir="run"), tmp_path, cold=True, environment=environment)
    assert process.returncode == 2
    assert "MUJOCO_GL" in one_sentence(process)


# ---- Faults while training: exit code 1, one sentence that names the fault and the last good
# checkpoint. There is one every 100 steps.
FAULTS = {  # task, what the sentence names, the last good checkpoint
    "NaNReward": ("environment", 200),
    "InfiniteReward": ("environment", 200),
    "NaNObservation": ("environment", 200),
    "InfiniteObservation": ("environment", 200),
    "NaNStart": ("environment", 0),
    "HugeReward": ("losses/", 100),
}


@pytest.mark.parametrize("script", SINGLE, indirect=True)
def test_a_number_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays_good(
    script, tmp_path
):
    def learn(task):
        words = tiny(env_id=f"{task}-v0", run_dir=task, total_timesteps=400, eval_every=100)
        return run(script, words, tmp_path)

    processes = together(*(lambda task=task: learn(task) for task in FAULTS))
    for (task, (named, step)), process in zip(FAULTS.items(), processes):
        sentence = one_sentence(process)
        assert process.returncode == 1, task
        assert named in sentence and any(word in sentence for word in ("finite", "inf", "nan")), (
            task
        )
        assert f"the last checkpoint in {task} is of step {step}" in sentence
        if step == 0:
            assert not (tmp_path / task / "checkpoint.pt").exists()
            continue
        checkpoint = load(tmp_path / task / "checkpoint.pt")
        assert checkpoint["done"]["steps"] == step
        kept = [*checkpoint["agent"].values(), *checkpoint["replay"]["rows"]]
        assert all(x.isfinite().all() for x in kept)
        assert last_step(tmp_path / task) >= step
        for row in rows(tmp_path / task):
            numbers = {name: x for name, x in row.items() if not name.startswith("eval/")}
            assert not {"nan", "inf"} & set(numbers.values())


@pytest.mark.parametrize("script", FIRST, indirect=True)
def test_a_file_that_cannot_grow_stops_the_run_and_the_last_checkpoint_stays_good(script, tmp_path):
    """Files beyond a size cannot be written, as on a full disk: write() fails."""
    words = tiny(run_dir="run", total_timesteps=5000, eval_every=100, updates_per_step=0.02)
    process = run(script, words, tmp_path, file_size=120_000)
    sentence = one_sentence(process)
    assert process.returncode == 1, process.err
    step = load(tmp_path / "run/checkpoint.pt")["done"]["steps"]
    assert 100 <= step < 5000 and f"step {step:,}" in sentence and "File too large" in sentence
    assert not list((tmp_path / "run").glob("*.tmp"))

    train(script, flags(resume="run", total_timesteps=step + 100), tmp_path)  # with room again
    assert load(tmp_path / "run/checkpoint.pt")["done"]["steps"] == step + 100

    process = run(script, tiny(run_dir="new"), tmp_path, file_size=500)  # no room from the start
    assert process.returncode == 2
    assert "new" in one_sentence(process) and "File too large" in process.err
