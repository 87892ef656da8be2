"""One harness for every script: a test asks for a function by name and runs against each script that defines it."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import mpo_atari  # noqa: E402
import mpo_continuous  # noqa: E402
import mpo_parametric  # noqa: E402

SCRIPTS = [mpo_continuous, mpo_parametric, mpo_atari]

torch.set_num_threads(1)
settings.register_profile("repository", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("repository")


LONGEST = ["test_workers", "test_atari", "test_resume", "test_learning", "test_bad_input"]  # files, the longest first


def pytest_collection_modifyitems(items):
    """The longest files first, so that at the end neither of two cores is left with one of them."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def scripts_with(*names):
    """The scripts that define all these names, for pytest.mark.parametrize("script", ...)."""
    found = [script for script in SCRIPTS if all(hasattr(script, name) for name in names)]
    assert found, f"no script defines {names}"
    return [pytest.param(script, id=script.__name__) for script in found]


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Every script in turn; parametrize("script", scripts_with(...)) narrows the choice."""
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    """Networks that a test does not seed itself start the same whatever ran before it."""
    torch.manual_seed(0)
