"""One harness for all scripts: a test asks for functions by name, and runs against each script
that defines them. tests/math is what to read first: each claim there is one of the paper's."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import mpo_atari  # noqa: E402
import mpo_continuous  # noqa: E402
import mpo_distributed  # noqa: E402
import mpo_parametric  # noqa: E402

SCRIPTS = [mpo_continuous, mpo_parametric, mpo_atari, mpo_distributed]

torch.set_num_threads(1)
settings.register_profile(
    "repository", deadline=None, derandomize=True, database=None, max_examples=40
)
settings.load_profile("repository")

# files that take long, the longest first, so that at the end no core is left with one of them
LONGEST = ["test_script", "test_games", "test_queue", "test_workers"]


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def scripts_with(*names):
    """The scripts that define all these names, for pytest.mark.parametrize("script", ...)."""
    found = [script for script in SCRIPTS if all(hasattr(script, name) for name in names)]
    assert found, f"no script defines {names}"
    return [pytest.param(script, id=script.__name__) for script in found]


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Every script in turn; parametrize("script", scripts_with(...)) narrows the choice."""
    return request.param


@pytest.fixture
def step(script):
    """The script's gradient step; where workers average their gradients, in a group of one."""
    if not hasattr(script, "averaged_step"):
        yield script.gradient_step
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield script.averaged_step
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seeded():
    """Networks that a test does not seed itself start the same whatever ran before it."""
    torch.manual_seed(0)
