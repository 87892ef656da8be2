"""benchmark/plot.py on a few made-up rows."""

import csv
import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "benchmark"))

import plot  # noqa: E402

GAUSSIAN = {"epsilon_mu": 0.005}  # a setting that the scripts for continuous actions have


def run_plot(*words):
    plot.main(list(map(str, words)))


def make_run(folder, columns, unfinished="", **settings):
    """A run folder with rows at 1,000, 2,000 and 3,000 steps; a column is its three values."""
    folder.mkdir()
    settings = {"env_id": "dm_control/walker-walk-v0", "seed": 1} | settings
    (folder / "args.json").write_text(json.dumps(settings))
    with open(folder / "progress.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["global_step", *columns])
        table.writerows(zip((1000, 2000, 3000), *columns.values()))
        file.write(unfinished)
    return folder


def test_runs_of_scripts_with_different_columns_are_drawn_in_one_png(tmp_path):
    returns = {"charts/episodic_return": (10, 20, 30), "eval/episodic_return": ("nan", "nan", 40)}
    returns["eval/returns"] = ("", "", "39 41")
    mpo = {"mpo/eta": ("", 0.1, 0.001), "mpo/kl_q_relative": ("", 0.5, 1.2)}
    mpo |= {"mpo/std_mean": ("", 0.5, 0.4), "mpo/std_max": ("", 0.6, 0.5)}
    mpo |= {"losses/critic": ("", 1, 0.01)}
    first = make_run(tmp_path / "first", returns | mpo, unfinished="4000,5", **GAUSSIAN)
    second = make_run(tmp_path / "second", returns | {"mpo/of_another_script": (1, -2, 3)})
    output = tmp_path / "new" / "curves.png"
    words = [sys.executable, ROOT / "benchmark/plot.py", first, second, "--output", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG") and str(output) in done.stdout
    figure = plot.draw([plot.read_run(first), plot.read_run(second)])
    titles = [axes.get_title() for axes in figure.axes]
    assert {"standard deviation", "mpo/of_another_script"} <= set(titles)
    assert not any("eval/returns" in title for title in titles)


@pytest.mark.parametrize(
    "settings, action",
    [
        (GAUSSIAN, "mean action"),
        ({"epsilon_pi": 0.001}, "most probable action"),
        ({"algorithm": "sac"}, "deterministic action"),
    ],
)
def test_an_evaluation_is_labelled_with_the_action_that_its_script_takes(
    tmp_path, settings, action
):
    run = make_run(tmp_path / "run", {"charts/episodic_return": (1, 2, 3)}, **settings)
    figure = plot.draw([plot.read_run(run)])
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["in training", f"evaluation, {action}"]


def test_a_run_with_one_row_and_no_update_yet_is_drawn(tmp_path):
    columns = {"charts/episodic_return": (10, "", ""), "mpo/eta": ("", "", "")}
    run, output = make_run(tmp_path / "run", columns), tmp_path / "plot.png"
    run_plot(run, "--output", output)
    assert output.exists()


@pytest.mark.parametrize("what", ["missing", "empty", "no rows", "no settings", "no such format"])
def test_what_cannot_be_drawn_is_refused_in_one_sentence(tmp_path, capsys, what):
    run, output = tmp_path / "run", tmp_path / "plot.png"
    if what == "empty":
        run.mkdir()
    elif what != "missing":
        make_run(run, {"charts/episodic_return": (1, 2, 3)})
    if what == "no rows":
        (run / "progress.csv").write_text("global_step,charts/episodic_return\n")
    if what == "no settings":
        (run / "args.json").write_text("{")
    if what == "no such format":
        output = tmp_path / "plot.nonsense"
    with pytest.raises(SystemExit, match="2"):
        run_plot(run, "--output", output)
    sentence, named = capsys.readouterr().err, output if what == "no such format" else run
    assert str(named) in sentence and not output.exists()
    assert sentence.startswith("plot.py: ") and sentence.endswith(".\n")
    assert sentence.count("\n") == 1
