"""How much do the bounds and the learning rates matter? Each times and divided by 3, one at a time.

    python benchmark/studies/sensitivity.py             two tasks, 50,000 steps
    python benchmark/studies/sensitivity.py --seeds 2 --workers 1
    python benchmark/report.py                          writes the table of what is there

The values come from the defaults of mpo_continuous.py; both its learning rates are scaled together.
The results go to benchmark/results/sensitivity/SETTING-times-3 and SETTING-over-3; those of the
defaults are the main results. What is finished is skipped, so the same command goes on after a
stop. Flags after `--` go to the script.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

BENCHMARK = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARK.parent))  # where the scripts are
SETTINGS = {
    "epsilon": ["epsilon"],
    "epsilon-mu": ["epsilon_mu"],
    "epsilon-sigma": ["epsilon_sigma"],
    "learning-rates": ["learning_rate", "policy_learning_rate"],
}
FACTORS = {"over-3": 1 / 3, "times-3": 3}
BASE_LABEL = "mpo_continuous"  # with nothing scaled


@dataclass
class Args:
    tasks: str = "cartpole-swingup,walker-walk"  # as in benchmark/run.py
    seeds: str = "1"  # as in benchmark/run.py
    total_timesteps: int = 50_000  # environment steps of each run
    workers: int = 2  # runs at a time
    settings: str = ",".join(SETTINGS)  # which of them


def flags(setting, factor):
    """The command line that scales a setting's default."""
    import mpo_continuous

    default = mpo_continuous.Args()
    words = []
    for name in SETTINGS[setting]:
        words += [f"--{name.replace('_', '-')}", f"{getattr(default, name) * factor:.4g}"]
    return words


def main(args, extra):
    wanted = args.settings.split(",")
    if not set(wanted) <= set(SETTINGS):
        known = ", ".join(SETTINGS)
        sentence = f"sensitivity.py: the settings are {known}, not {args.settings}."
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    codes = []
    for setting in wanted:
        for name, factor in FACTORS.items():
            command = [sys.executable, str(BENCHMARK / "run.py"), "--tasks", args.tasks]
            command += ["--seeds", args.seeds, "--workers", str(args.workers)]
            command += ["--total-timesteps", str(args.total_timesteps)]
            command += ["--label", f"sensitivity/{setting}-{name}"]
            print(f"{setting} {name}", flush=True)
            done = subprocess.run([*command, "--", *flags(setting, factor), *extra])
            codes.append(done.returncode)
            if done.returncode in (2, 130):  # bad input, or stopped by the user
                raise SystemExit(done.returncode)
    raise SystemExit(max(codes))


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:cut]), sys.argv[cut + 1 :])
