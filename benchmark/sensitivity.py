"""How much do the bounds and the learning rates matter? Each times and divided by 3, one at a time.

    python benchmark/sensitivity.py                                     cartpole-swingup and walker-walk, 50,000 steps
    python benchmark/sensitivity.py --total-timesteps 20000 --seeds 2 --workers 1 -- --compile
    python benchmark/report.py                                          draws what is there

The values come from the defaults of mpo_continuous.py; both its learning rates are scaled together. The results go to
benchmark/results/sensitivity/SETTING-times-3 and SETTING-over-3. All have --window 8 --batch-size 32, the defaults when
the first of them were run; with these as they are, the results are in results/study/window-8-batch-size-32.
What is finished is skipped, so the same command goes on after a stop. Flags after `--` go to the script.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # where the scripts are
SETTINGS = {
    "epsilon": ["epsilon"],
    "epsilon-mu": ["epsilon_mu"],
    "epsilon-sigma": ["epsilon_sigma"],
    "learning-rates": ["learning_rate", "policy_learning_rate"],
}
FACTORS = {"over-3": 1 / 3, "times-3": 3}
BASE = ["--window", "8", "--batch-size", "32"]
BASE_LABEL = "study/window-8-batch-size-32"


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
        print(f"sensitivity.py: the settings are {', '.join(SETTINGS)}, not {args.settings}.", file=sys.stderr)
        raise SystemExit(2)
    codes = []
    for setting in wanted:
        for name, factor in FACTORS.items():
            command = [sys.executable, str(HERE / "run.py"), "--script", "mpo_continuous.py", "--tasks", args.tasks]
            command += ["--seeds", args.seeds, "--workers", str(args.workers)]
            command += ["--total-timesteps", str(args.total_timesteps), "--label", f"sensitivity/{setting}-{name}"]
            print(f"{setting} {name}", flush=True)
            codes.append(subprocess.run([*command, "--", *BASE, *flags(setting, factor), *extra]).returncode)
            if codes[-1] in (2, 130):  # bad input, or stopped by the user
                raise SystemExit(codes[-1])
    raise SystemExit(max(codes))


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:cut]), sys.argv[cut + 1 :])
