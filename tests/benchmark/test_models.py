"""benchmark/models: what is saved there acts as the table beside it says."""

import re

import pytest
from conftest import ROOT

import mpo_continuous

MODELS = ROOT / "benchmark/models"
TABLE = (MODELS / "README.md").read_text()
WRITTEN = dict(re.findall(r"(?m)^\| \[(\S+)\]\(\S+\) \| ([\d.]+) \|", TABLE))


def test_every_policy_is_in_the_table_and_small():
    assert set(WRITTEN) == {path.name for path in MODELS.iterdir() if path.is_dir()} != set()
    for name in WRITTEN:
        assert (MODELS / name / "model.pt").stat().st_size < 300_000


@pytest.mark.parametrize("name", WRITTEN)
def test_a_saved_policy_returns_what_is_written_beside_it(name, capsys):
    mpo_continuous.main(mpo_continuous.parse_args(["--evaluate", str(MODELS / name)]))
    mean = re.search(r": mean (\S+) of", capsys.readouterr().out).group(1)
    assert float(mean) == pytest.approx(float(WRITTEN[name]), rel=0.1)
