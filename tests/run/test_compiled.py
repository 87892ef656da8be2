"""--compile: PyTorch's compiler says nothing, and computes what the script does without it."""

import math
import re

import pytest
from running import FIRST, OUR_LINES, rows, tiny, train

# small networks and windows: most of the time goes into the compiler's output, not into running it
SMALL = dict(policy_layers=(16,), critic_layers=(16,), num_samples=2, window=2)


@pytest.mark.parametrize("script", FIRST)  # half a minute; the others use its lines
def test_a_compiled_run_prints_our_lines_only_and_learns_what_an_eager_one_does(script, tmp_path):
    train(script, tiny(run_dir="eager", **SMALL), tmp_path)
    compiled = train(script, tiny(run_dir="run", compile=True, **SMALL), tmp_path, cold=True)
    assert compiled.err == ""
    lines = compiled.out.splitlines()
    assert len(lines) == len(OUR_LINES)
    for line, pattern in zip(lines, OUR_LINES):
        assert re.fullmatch(pattern, line), line
    names = ("losses/critic", "losses/policy", "losses/multipliers", "mpo/eta", "mpo/q_mean")
    for ours, eager in zip(rows(tmp_path / "run"), rows(tmp_path / "eager"), strict=True):
        for name in names:
            a, b = float(ours[name]), float(eager[name])
            assert math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5), name
