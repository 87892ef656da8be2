"""benchmark/report.py, on results made up so that every figure is known, and on the real ones."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("matplotlib")
BENCHMARK = ROOT / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import report  # noqa: E402


def make_result(results, label, task, seed=1, steps=100_000, height=1.0, head=()):
    """A row for each 1,000 steps: the training return is height * steps / 1000, the evaluation
    twice that; a minute for each 6,000 steps."""
    path = results / label / task / f"seed{seed}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# commit: abc1234", "# command: python learner.py", *head, "# args: {}"]
    lines.append("env_steps,train_return,eval_return,seconds,eval_returns")
    for step in range(1000, steps + 1, 1000):
        value = height * step / 1000
        evaluated = f"{2 * value:.2f},{step / 100},{2 * value}" if step % 10_000 == 0 else ",0,"
        lines.append(f"{step},{value:.2f},{evaluated}")
    path.write_text("\n".join(lines) + "\n")


def read(results):
    return report.read_runs(results, report.result_files(results)[0])


def page(results, drawn=()):
    return report.readme(read(results), report.read_published(), drawn)


def test_a_mark_is_the_mean_of_the_25_000_steps_before_it_and_the_evaluation_there(tmp_path):
    make_result(tmp_path, "mpo_continuous", "walker-walk", steps=120_000)
    run = read(tmp_path)["mpo_continuous"]["walker-walk"][1]
    assert run.training(100_000) == pytest.approx(np.mean(range(76, 101)))
    assert run.evaluation(100_000) == 200
    assert run.training(250_000) is None and run.evaluation(250_000) is None
    steps = (85_000, 92_000, 98_000)
    rows = [{"env_steps": x, "train_return": 5.0, "eval_return": x / 1000} for x in steps]
    short = report.Run(tmp_path, {}, rows)
    assert short.training(100_000) is None and short.evaluation(100_000) is None
    # an episode across the mark, and one of which nothing was known yet
    rows.append({"env_steps": 99_000, "train_return": None, "eval_return": None})
    rows.append({"env_steps": 101_000, "train_return": 9.0, "eval_return": None})
    assert short.training(100_000) == 5 and short.evaluation(100_000) == 98


def test_the_interquartile_mean_weighs_tasks_alike_and_resamples_the_seeds_of_each_task():
    column = [np.array([[1.0], [2.0], [3.0], [100.0]])]
    assert report.with_interval(column, report.iqm)[0] == pytest.approx([2.5])
    one, three = np.array([[10.0]]), np.array([[1.0], [2.0], [3.0]])
    point, (low, high) = report.with_interval([one, three], report.plain_mean)
    assert point == pytest.approx([6.0])  # the mean of 10 and 2, not of all four runs
    assert low == pytest.approx([5.5], abs=0.2) and high == pytest.approx([6.5], abs=0.2)
    ends = report.with_interval([one, one], report.plain_mean)[1]
    assert np.ravel(ends).tolist() == [10, 10]
    two = report.with_interval([np.array([[0.0], [4.0]])], report.plain_mean)
    assert two[0] == [2.0] and np.ravel(two[1]).tolist() == [0, 4]


def test_aggregates_are_those_of_rliable():
    pytest.importorskip("rliable")
    from rliable import library
    from rliable.metrics import aggregate_iqm

    scores = np.random.default_rng(1).gamma(2.0, 200.0, size=(7, 5))  # [seeds, tasks]
    ours = [column[:, None] for column in scores.T]
    point, interval = report.with_interval(ours, report.iqm)
    statistic = lambda x: np.array([aggregate_iqm(x)])  # noqa: E731
    theirs = library.get_interval_estimates({"": scores}, statistic, reps=10_000)
    assert point == pytest.approx(theirs[0][""])
    # two bootstraps: the ends of their intervals differ by far less than a tenth of the length
    assert interval == pytest.approx(theirs[1][""], abs=0.1 * np.ptp(interval))


def test_published_training_returns_stand_beside_ours_and_evaluations_beside_the_mean_action(
    tmp_path,
):
    for seed, height in ((1, 1.0), (2, 3.0)):
        make_result(tmp_path, "mpo_continuous", "walker-walk", seed, height=height)
    make_result(tmp_path, "mpo_continuous", "cheetah-run", steps=40_000)
    make_result(tmp_path, "mpo_continuous", "reacher-hard")
    text = page(tmp_path)
    training, evaluation = text.split("Mean action; the published")
    assert "| task | ours | seeds | MPO | DMPO | D4PG | DDPG | PPO | DreamerV3 |" in training
    assert "| walker-walk | 176 [88, 264] | 2 | 281 | 250 | 301 | 396 | 38 | 461 |" in training
    assert "| reacher-hard | 88 | 1 | 121 |" in training and "cheetah-run" not in training
    assert re.search(r"\*\*mean of 2 tasks\*\* \| 132 \[88, 176\] \|  \| 201 \|", training)
    assert "| task | ours | seeds | TD-MPC2 | TD-MPC | DreamerV3 | SAC |" in evaluation
    assert "| walker-walk | 400 [200, 600] | 2 | 962 | 964 | 630 | 708 |" in evaluation


def test_runs_without_versions_are_said_to_be_of_earlier_defaults(tmp_path):
    make_result(tmp_path, "mpo_continuous", "walker-walk", 1)
    assert "These runs are of earlier defaults (commits abc1234)." in page(tmp_path)
    make_result(tmp_path, "mpo_continuous", "walker-walk", 2, head=["# versions: torch 9"])
    assert "1 of these 2 runs are of earlier defaults (commits abc1234)." in page(tmp_path)
    make_result(tmp_path, "mpo_continuous", "walker-walk", 1, head=["# versions: torch 9"])
    assert "earlier defaults" not in page(tmp_path)


def test_the_time_to_a_return_is_that_of_the_first_evaluation_at_or_above_it(tmp_path):
    for seed, height in ((1, 5.0), (2, 10.0), (3, 20.0)):  # 900: never, at 50k, at 30k
        make_result(tmp_path, "mpo_continuous", "walker-walk", seed, steps=80_000, height=height)
    make_result(tmp_path, "sac", "walker-walk", steps=80_000, height=9.0)  # 900 at 50k exactly
    make_result(tmp_path, "ppo", "walker-walk", steps=80_000, height=1.0)
    make_result(tmp_path, "sac", "cheetah-run", steps=80_000, height=9.0)
    text = page(tmp_path)
    # the median of three is the later one that came there; 50,000 steps are 500 seconds
    mpo, sac = "50,000, 8 min (2 of 3)", "50,000, 8 min"
    assert f"| walker-walk | 900 | {mpo} | {sac} | not in 80,000 |" in text
    assert "| cheetah-run | 400 | – | 30,000, 5 min | – |" in text and "star" not in text
    make_result(tmp_path, "time/sac", "walker-walk", steps=80_000, height=20.0)
    text = page(tmp_path)
    assert f"| {mpo} | 30,000, 5 min * | not in 80,000 |" in text and "star" in text


def test_the_ablation_says_whether_the_papers_order_comes_out(tmp_path):
    for number, label in enumerate(report.ABLATION):
        make_result(tmp_path, label, "walker-walk", height=4 - number)
        make_result(tmp_path, label, "hopper-stand", height=1 + number)
    make_result(tmp_path, "mpo_parametric", "acrobot-swingup")
    make_result(tmp_path, "epg/0.01", "walker-walk", height=2.0)
    text = page(tmp_path)
    walker = "352 / 800 (1) | 264 / 600 (1) | 176 / 400 (1) | 88 / 200 (1)"
    assert f"| walker-walk | {walker} | yes |" in text
    assert re.search(r"\| hopper-stand \| 88 / 200 \(1\) \|.*\| no \|\n", text)
    assert "| acrobot-swingup | – | 88 / 200 (1) | – | – | – |" in text
    assert "| task | 0.01 |" in text and "| walker-walk | 176 / 400 (1) |\n" in text


def test_longer_runs_are_compared_on_the_tasks_that_were_run(tmp_path):
    make_result(tmp_path, "mpo_continuous", "walker-walk", steps=500_000)
    make_result(tmp_path, "mpo_continuous", "cheetah-run")
    text = page(tmp_path).split("## Longer runs")[1]
    assert "Training returns at 500,000 steps" in text and "Mean action at 500,000 steps" in text
    assert "Training returns at 250,000" in text and "Mean action at 250,000" not in text
    assert "| walker-walk | 488 | 1 | 940 |" in text and "| **mean of 1 task** | 488 |" in text
    assert "cheetah-run" not in text


def test_sensitivity_takes_the_step_that_all_its_runs_came_to(tmp_path):
    make_result(tmp_path, "mpo_continuous", "walker-walk", height=3)
    make_result(tmp_path, "sensitivity/epsilon-times-3", "walker-walk", steps=50_000)
    make_result(tmp_path, "sensitivity/epsilon-over-3", "walker-walk", steps=60_000, height=2)
    text = page(tmp_path)
    assert "at 50,000 steps" in text
    assert "| walker-walk, epsilon | 76 / 200 (1) | 114 / 300 (1) | 38 / 100 (1) |" in text


ALL = "The tasks of the suite,Figures,Time to a return,The ablation,Longer runs,"
ALL += "High-dimensional bodies and parkour,Sensitivity,Discrete actions"


@pytest.mark.parametrize("amount", ["little", "some", "much"])
def test_the_report_draws_what_there_is_and_leaves_out_what_there_is_not(tmp_path, capsys, amount):
    results = tmp_path / "results"
    steps = 20_000 if amount == "little" else 100_000
    make_result(results, "mpo_continuous", "walker-walk", steps=steps)
    if amount == "much":
        for task in ("walker-walk", "acrobot-swingup", "hopper-stand"):
            for label in ("mpo_continuous", "mpo_parametric", "mpo_parametric-epg", "sac"):
                for seed in (1, 2):
                    make_result(results, label, task, seed, steps=500_000, height=seed)
        make_result(results, "sensitivity/epsilon-times-3", "walker-walk", steps=50_000)
        make_result(results, "mpo_distributed", "humanoid-stand")
        make_result(results, "mpo_continuous", "benchmark.parkour-ParkourWalker2D-v0")
        make_result(results, "mpo_atari", "CartPole-v1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.main(["--results", str(results), "--output", str(tmp_path)])
    assert capsys.readouterr().err == ""
    names = {"training", "evaluation", "time"} | ({"aggregate"} if amount != "little" else set())
    names |= {"ablation", "high", "discrete"} if amount == "much" else set()
    files = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.glob("figures/*")} == files
    text, runs = ((tmp_path / name).read_text() for name in ("README.md", "RUNS.md"))
    linked = set(re.findall(r"\]\((figures/.+?)\)", text))
    assert linked == {f"figures/{name}.png" for name in names}
    results_linked = re.findall(r"\]\((results/.+?)\)", runs)
    assert len(results_linked) == len(list(results.glob("**/seed*.csv")))
    assert all((tmp_path / link).exists() for link in results_linked)
    sections = [line[3:].split(" at ")[0] for line in text.splitlines() if line[:3] == "## "]
    if amount == "much":
        assert sections == ["Protocol", *ALL.split(",")]
        assert "| MPO | 3 | 2 | " in text and "| SAC | 3 | 2 | " in text
    else:
        main = ["The tasks of the suite"] if amount == "some" else []
        assert sections == ["Protocol", *main, "Figures", "Time to a return"]


def test_no_results_are_refused_in_one_sentence(tmp_path):
    words = [sys.executable, BENCHMARK / "report.py", "--results", tmp_path, "--output", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr


def test_only_csvs_that_git_knows_are_reported(tmp_path):
    for seed in (1, 2):
        make_result(tmp_path, "sac", "walker-walk", seed)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "sac/walker-walk/seed1.csv"], check=True)
    files, others = report.result_files(tmp_path)
    assert [path.name for path in files] == ["seed1.csv"] and others == 1
    assert len(report.result_files(tmp_path, untracked=True)[0]) == 2


@pytest.mark.parametrize("name", ["README.md", "RUNS.md"])
def test_the_tables_of_the_repository_are_those_its_csvs_give(name):
    results = BENCHMARK / "results"
    drawn = [path.stem for path in (BENCHMARK / "figures").glob("*.png")]
    text = page(results, drawn) if name == "README.md" else report.runs_page(read(results), results)
    same = text == (BENCHMARK / name).read_text()
    assert same, f"python benchmark/report.py writes another benchmark/{name} than is here"


def test_the_table_on_the_front_page_is_the_one_the_csvs_give():
    text = (ROOT / "README.md").read_text()
    block = report.front_block(read(BENCHMARK / "results"), report.read_published())
    same = report.front_page(text, block) == text
    assert same, "python benchmark/report.py writes another table into README.md"
    assert f"\n{block}\n" in text


def test_the_published_figures_are_whole_and_name_their_source():
    published = report.read_published()
    names = ["MPO", "DMPO", "D4PG", "DDPG", "PPO", "DreamerV3"]
    assert list(published["training"]) == names
    assert list(published["evaluation"]) == ["TD-MPC2", "TD-MPC", "DreamerV3", "SAC"]
    marks = {"training": {50_000, 100_000, 250_000, 500_000}, "evaluation": {100_000, 500_000}}
    for how, algorithms in published.items():
        for tasks in algorithms.values():
            assert set(tasks) >= set(report.SUITE)
            assert all(set(tasks[task]) == marks[how] for task in report.SUITE)
    for name, source in (("published.csv", "dreamerv3"), ("published_evaluation.csv", "tdmpc2")):
        assert source in (BENCHMARK / name).read_text().split("\ntask,")[0]


def test_every_algorithm_has_a_colour_and_a_marker_of_its_own():
    ours = [algorithm for label, algorithm in report.OURS.items() if label not in report.DISCRETE]
    assert len({a.colour for a in ours}) == len({a.marker for a in ours}) == len(ours)
    for quoted in report.PUBLISHED.values():
        assert len({a.colour for a in quoted.values()}) == len(quoted)
        assert len({a.marker for a in quoted.values()}) == len(quoted)
        by_name = {a.name.split(",")[0]: a.colour for a in quoted.values()}
        both = {a.name: a.colour for a in ours if a.name in by_name}
        assert both and all(by_name[name] == colour for name, colour in both.items())
