"""Faults that were found by trying, each held by a test: cameras, flipped bits, full disks, two
processes in one folder, calls from other programs, interrupts, tasks that break."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from running import (
    AGAIN,
    CONTINUOUS,
    FIRST,
    PATIENCE,
    SINGLE,
    TASK,
    TINY,
    Run,
    finish,
    flags,
    load,
    make_policy,
    one_sentence,
    refusal,
    rows,
    run,
    same,
    stop,
    surroundings,
    timeless,
    tiny,
    train,
    wait_for_row,
    wait_until,
)


def stopped_at(sentence):
    """The step that the sentence of a broken run names."""
    return int(re.search(r"; stopped at step ([\d,]+); ", sentence).group(1).replace(",", ""))


@pytest.fixture(scope="module", params=FIRST)  # most of this is the same text in all scripts
def script(request):
    return request.param


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory):
    """The folder of a short run that ended well."""
    folder = tmp_path_factory.mktemp("trained")
    train(script, tiny(run_dir="run"), folder)
    return folder / "run"


# ---- 1: the camera.
FILM = """
import os, sys
os.environ["MUJOCO_GL"] = "egl"
sys.path.insert(0, {folder!r})
import {name} as script
import numpy as np
env = script.make_env(script.Args(env_id="dm_control/walker-walk-v0", capture_video=True))
env.reset(seed=0)
suite = env.unwrapped._env
pictures = []
for x in (0.0, 20.0, -200.0):
    with suite.physics.reset_context():
        suite.physics.named.data.qpos["rootx"] = x
    pictures.append(env.render())
pictures.append(suite.physics.render(360, 480, camera_id=-1))  # one that stayed behind
np.savez("pictures.npz", *pictures, fps=env.metadata["render_fps"])
"""


def test_the_camera_follows_the_walker(script, tmp_path):
    """Its torso, of a colour that the floor and the sky do not have, is in every picture."""
    path = Path(script.__file__)
    code = FILM.format(folder=str(path.parent), name=path.stem)
    options = dict(capture_output=True, text=True, timeout=PATIENCE)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=surroundings(), **options)
    assert done.returncode == 0, done.stderr
    pictures = np.load(tmp_path / "pictures.npz")
    assert pictures["fps"] == 40  # control steps of 0.025 s
    at_start = body(pictures["arr_0"])
    assert pictures["arr_0"].shape == (360, 480, 3) and at_start.sum() > 1000
    assert body(pictures["arr_3"]).sum() == 0, "the floor is taken for the walker"
    for name in ("arr_1", "arr_2"):  # 20 m on, and 200 m back
        assert 0.8 < body(pictures[name]).sum() / at_start.sum() < 1.25
        rows_of, columns = body(pictures[name]).nonzero()
        assert 120 < columns.mean() < 360 and 30 < rows_of.mean() < 330, "not near the centre"


def body(picture):
    """Where the picture has the walker's yellowish brown: [height, width]."""
    red, _, blue = picture.astype(int).transpose(2, 0, 1)
    return red > blue + 40


# ---- 2: flipped bits.
def test_a_flipped_bit_in_a_checkpoint_is_refused_or_does_not_matter(
    script, trained, tmp_path, capsys
):
    whole, good = (trained / "checkpoint.pt").read_bytes(), load(trained / "checkpoint.pt")
    chance, path, refused = random.Random(1), tmp_path / "checkpoint.pt", 0
    for _ in range(60):
        position = chance.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            assert same(script.read_saved(path), good), f"bit {position} was changed and loaded"
        except SystemExit as stop:
            (sentence,) = capsys.readouterr().err.splitlines()
            assert stop.code == 2 and str(path) in sentence and "damaged" in sentence
            refused += 1
    assert refused >= 20, "most bits matter"


# ---- 3: full disks.
@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of this size at a folder; needs root and Linux."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root on Linux can mount a small file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_of_4_kilobytes_is_one_sentence(script, tmp_path):
    with small_disk(tmp_path / "disk", "4k"):
        process = run(script, tiny(run_dir="disk"), tmp_path)
        assert process.returncode == 2
        assert "disk cannot be written" in one_sentence(process)
        assert "No space left" in process.err and not list((tmp_path / "disk").glob("*.tmp"))


def test_a_disk_that_fills_is_one_sentence_and_the_old_checkpoint_stays(script, tmp_path):
    """The replay grows until two checkpoints, the old and the new, have no room in 4 MB."""
    long = dict(env_id="tasks:Wide-v0", total_timesteps=10_000, eval_every=100)
    with small_disk(tmp_path / "disk", "4m"):
        words = tiny(run_dir="disk", updates_per_step=0.02, **long)
        process = run(script, words, tmp_path)
        assert process.returncode == 1
        sentence, step = (
            one_sentence(process),
            load(tmp_path / "disk/checkpoint.pt")["done"]["steps"],
        )
        assert "No space left" in sentence and re.search(AGAIN, sentence).group(1) == "disk"
        assert 100 <= step <= stopped_at(sentence)
        assert not list((tmp_path / "disk").glob("*.tmp"))
        shutil.copytree(tmp_path / "disk", tmp_path / "moved")
    train(script, flags(resume="moved", total_timesteps=step + 100), tmp_path)  # with room again
    assert load(tmp_path / "moved/checkpoint.pt")["done"]["steps"] == step + 100


def test_a_disk_filled_by_others_is_one_sentence(script, tmp_path):
    """TensorBoard's writer, a thread of its own, is the first to meet it."""
    with small_disk(tmp_path / "disk", "4m"):
        words = tiny(run_dir="disk", total_timesteps=10**6, eval_every=10**6)
        process = Run(script, words, tmp_path)
        wait_for_row(process, tmp_path / "disk", 200)
        filler = open(tmp_path / "disk/filler", "wb", buffering=0)
        with contextlib.suppress(OSError), filler:
            while filler.write(b"0" * 4096):
                pass
        finish(process)
        assert process.returncode == 1
        sentence = one_sentence(process)
        assert "No space left" in sentence and stopped_at(sentence) >= 200
        assert re.search(AGAIN, sentence).group(1) == "disk"
        (tmp_path / "disk/filler").unlink()
        train(script, flags(resume="disk", total_timesteps=200), tmp_path)  # from step 0
        assert load(tmp_path / "disk/checkpoint.pt")["done"]["steps"] == 200


# ---- 4: one's own task.
def test_a_task_in_a_module_of_the_current_folder_is_trained_as_the_readme_says(script, tmp_path):
    text = (ROOT / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "register(" in b]
    assert "--env-id my_module:MyEnv-v0" in text
    (tmp_path / "my_module.py").write_text(block)
    words = tiny(env_id="my_module:MyEnv-v0", run_dir="run")
    process = train(script, words, tmp_path)
    assert process.err == "" and len(rows(tmp_path / "run")) == 3
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    process = run(script, words, elsewhere)
    assert process.returncode == 2 and "my_module" in one_sentence(process)
    out = train(script, flags(evaluate="run"), tmp_path).out
    assert out.startswith("my_module:MyEnv-v0: mean ")


# ---- 5: two processes in one folder.
@pytest.mark.parametrize("script", CONTINUOUS, indirect=True)
def test_a_second_resume_of_a_folder_is_refused_until_the_first_is_gone(script, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    first = Run(script, flags(resume="run", total_timesteps=10**6), tmp_path)
    wait_for_row(first, folder, 250)
    second = run(script, flags(resume="run", total_timesteps=300), tmp_path)
    assert second.returncode == 2
    sentence = one_sentence(second)
    assert "another process" in sentence and "run" in sentence
    assert stop(first, signal.SIGKILL).returncode == -signal.SIGKILL
    train(script, flags(resume="run", total_timesteps=300), tmp_path)
    assert load(folder / "checkpoint.pt")["done"]["steps"] == 300


# ---- 7: called from another program.
PROGRAM = """
import signal, sys
sys.path.insert(0, {folder!r})
import {name} as script, torch
sys.argv[1:] = ["--colour", "red", "--resume", "nowhere"]  # this program's own words
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
policy = script.main(script.Args(**{settings!r}))
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
mean, cholesky = policy(torch.zeros(5))
assert mean.shape == (1,) and cholesky.shape == (1, 1)
longer = script.main(script.parse_args(["--resume", "run", "--total-timesteps", "250"]))
again = script.main(script.parse_args(["--evaluate", "run"]))
for name, value in again.state_dict().items():
    assert torch.equal(value, longer.state_dict()[name])
"""


@pytest.mark.parametrize("script", CONTINUOUS, indirect=True)
def test_main_can_be_called_from_a_program_and_returns_the_policy(script, tmp_path):
    path = Path(script.__file__)
    settings = TINY | {"run_dir": "run"}
    text = PROGRAM.format(folder=str(path.parent), name=path.stem, settings=settings)
    (tmp_path / "program.py").write_text(text)
    process = train(tmp_path / "program.py", [], tmp_path)
    assert process.err == ""
    assert load(tmp_path / "run/checkpoint.pt")["done"]["steps"] == 250


# ---- 8: folders of another script, of another format, and edited settings.
def test_a_run_of_another_script_or_format_is_refused_by_name(
    script, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    saved = load(trained / "checkpoint.pt")
    for name, origin in (("other", ("mpo_other.py", 1)), ("newer", (f"{script.__name__}.py", 99))):
        (tmp_path / name).mkdir()
        torch.save(saved | {"origin": origin}, tmp_path / name / "checkpoint.pt")
        torch.save(saved | {"origin": origin}, tmp_path / name / "model.pt")
        for words in (flags(resume=name), flags(evaluate=name)):
            sentence = refusal(script, words, capsys)
            assert f"{name}/" in sentence and f"{origin[0]}, format {origin[1]}" in sentence


def test_a_run_of_a_version_with_other_settings_is_refused(script, trained, tmp_path, capsys):
    """As a study's, with a flag that is gone or not there yet; its format has the same number."""
    saved = load(trained / "checkpoint.pt")
    fewer = {name: value for name, value in saved["args"].items() if name != "window"}
    for name, args in (("fewer", fewer), ("more", saved["args"] | {"colour": "red"})):
        folder = tmp_path / name
        folder.mkdir()
        torch.save(saved | {"args": args}, folder / "checkpoint.pt")
        for words in (flags(resume=folder), flags(evaluate=folder / "checkpoint.pt")):
            sentence = refusal(script, words, capsys)
            assert f"{name}/checkpoint.pt" in sentence and "another version" in sentence


@pytest.mark.parametrize("pair", [(a, b) for a in CONTINUOUS for b in CONTINUOUS[:1] if a != b])
def test_a_run_of_a_script_is_refused_by_the_first_which_names_it(pair, tmp_path, capsys):
    other, first = (param.values[0] for param in pair)
    train(other, tiny(run_dir="run"), tmp_path)
    assert f"{other.__name__}.py" in refusal(first, flags(resume=tmp_path / "run"), capsys)


EDITS = [
    lambda text: text[: len(text) // 2],
    lambda text: text.replace("0.99", "7.0").replace("16,", "24,").replace(TASK, "Pendulum-v1"),
    None,  # no such file
]


def test_args_json_is_a_copy_for_people_and_editing_it_changes_nothing(script, trained, tmp_path):
    resume = lambda name: flags(resume=name, total_timesteps=250)  # noqa: E731
    plain = shutil.copytree(trained, tmp_path / "plain")
    train(script, resume("plain"), tmp_path)
    text = (trained / "args.json").read_text()
    for number, edit in enumerate(EDITS):
        folder = shutil.copytree(trained, tmp_path / f"edit{number}")
        (folder / "args.json").unlink()
        if edit:
            assert edit(text) != text
            (folder / "args.json").write_text(edit(text))
        process = train(script, resume(folder.name), tmp_path)
        assert process.err == "" and timeless(folder) == timeless(plain)
        changed = {"resume": folder.name}
        assert json.loads((folder / "args.json").read_text()) == (
            json.loads((plain / "args.json").read_text()) | changed
        )


# ---- 9: interrupts before and beside training. What is refused is in test_bad_input.py.
@pytest.mark.parametrize("script", CONTINUOUS, indirect=True)
def test_ctrl_c_while_the_imports_are_made_leaves_no_traceback(script, tmp_path):
    for seconds in (0.4, 1.0):
        process = Run(script, tiny(run_dir="run"), tmp_path, cold=True)
        time.sleep(seconds)
        assert stop(process, signal.SIGINT).returncode in (-signal.SIGINT, 128 + signal.SIGINT)
        assert (process.out, process.err) == ("", "")


def test_ctrl_c_during_an_evaluation_leaves_no_traceback(script, trained, tmp_path):
    process = Run(script, flags(evaluate=trained, eval_episodes=10**6), tmp_path)
    wait_until(lambda: busy(process) > 1.0, process)  # a fork, so this is all its own work
    assert stop(process, signal.SIGINT).returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (process.out, process.err) == ("", "")


def busy(process):
    """Seconds that the process has computed."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- 12: the model alone.
@pytest.mark.parametrize("script", SINGLE, indirect=True)
def test_a_model_alone_under_any_name_is_enough_to_evaluate(
    script, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    saved = load(trained / "model.pt")
    assert saved["args"]["env_id"] == TASK
    (tmp_path / "empty").mkdir()
    shutil.copy(trained / "model.pt", tmp_path / "empty/model.pt")
    shutil.copy(trained / "model.pt", tmp_path / "best walker.bin")

    def printed(**given):
        script.main(script.parse_args(flags(**given)))
        return capsys.readouterr().out

    names = ("empty", "best walker.bin", trained, trained / "checkpoint.pt")
    outs = {printed(evaluate=name) for name in names}
    assert len(outs) == 1 and outs.pop().startswith(f"{TASK}: mean ")
    other = printed(evaluate="empty", seed=7, eval_episodes=3)
    mean, *returns = map(float, re.findall(r"-?\d+\.\d+", other))
    assert len(returns) == 3 and abs(mean - np.mean(returns)) < 0.1
    assert os.listdir(tmp_path / "empty") == ["model.pt"]
    assert "--resume" in refusal(script, flags(evaluate="empty", resume="empty"), capsys)


def test_another_seed_evaluates_in_other_episodes(script, trained):
    """Printed returns are rounded to 0.1, too little to tell: the starting states differ."""
    starts = []
    for seed in (1, 7):
        args = script.parse_args(flags(evaluate=trained, seed=seed))
        assert args.seed == seed
        env = script.make_env(args)
        policy = make_policy(script, env, args)
        starts.append(script.run_episode(env, policy, args, 0, explore=False).state[0])
    assert not torch.equal(*starts)


def test_an_evaluation_does_not_ask_for_the_replays_memory(script, trained, tmp_path, capsys):
    """A policy from a large machine is evaluated on a small one: here with a gigabyte to spare."""
    saved = load(trained / "model.pt")
    saved["args"]["buffer_size"] = 999_999_999
    torch.save(saved, tmp_path / "model.pt")
    args = script.parse_args(flags(evaluate=tmp_path / "model.pt"))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    try:
        with pytest.raises(RuntimeError, match="memory"):
            script.Replay(args.buffer_size, 5, 1)
        script.main(args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert capsys.readouterr().out.startswith(f"{TASK}: mean ")


# ---- 13 and 14: tasks that are odd or break.
def test_a_task_with_an_attribute_named_env_is_not_taken_for_dm_control(script, tmp_path):
    """It keeps its own time limit, and is filmed at its own speed and size."""
    words = tiny(env_id="tasks:Own-v0", run_dir="run", time_limit=0, total_timesteps=150)
    words += flags(learning_starts=60, capture_video=True)
    process = train(script, words, tmp_path)
    assert process.err == ""
    assert [int(row["global_step"]) for row in rows(tmp_path / "run")] == [60, 90, 120, 150]
    import imageio.v2 as imageio

    reader = imageio.get_reader(tmp_path / "run/evaluation.mp4")
    assert reader.get_meta_data()["fps"] == 20
    assert [picture.shape for picture in reader.iter_data()] == [(32, 48, 3)] * 31  # with its start


BROKEN = {"Raises": ["KeyError", "the gripper is not connected"], "WrongShape": ["Error", "shape"]}


@pytest.mark.parametrize("task", BROKEN)
def test_a_task_that_breaks_shows_its_exception_and_then_the_last_checkpoint(
    script, task, tmp_path
):
    words = tiny(env_id=f"{task}-v0", run_dir="run", total_timesteps=400, eval_every=100)
    process = run(script, words, tmp_path)
    assert process.returncode == 1
    trace, _, sentence = process.err.rstrip("\n").rpartition("\n")
    assert trace.startswith("Traceback (most recent call last):")
    assert all(word in trace for word in BROKEN[task])
    assert sentence.startswith(f"{script.__name__}.py: ")
    assert stopped_at(sentence) == 200
    assert re.search(AGAIN, sentence).group(1) == "run"
    assert load(tmp_path / "run/checkpoint.pt")["done"]["steps"] == 200


# ---- 17: threads.
def test_one_thread_is_the_default_and_no_run_uses_more_than_there_are_cores(script, tmp_path):
    assert script.Args().threads == 1
    path, settings = Path(script.__file__), TINY | {"total_timesteps": 150}
    del settings["threads"]
    code = f"import sys; sys.path.insert(0, {str(path.parent)!r}); import {path.stem} as script\n"
    code += "import torch; torch.set_num_threads(2)\n"
    for name, threads in (("one", ""), ("many", "threads=10**6, ")):
        code += f"script.main(script.Args({threads}run_dir={name!r}, **{settings}))\n"
        code += "print('threads', torch.get_num_threads())\n"
    (tmp_path / "program.py").write_text(code)
    lines = train(tmp_path / "program.py", [], tmp_path).out.splitlines()
    said = [line for line in lines if line.startswith("threads")]
    assert said == ["threads 1", f"threads {os.cpu_count()}"]
