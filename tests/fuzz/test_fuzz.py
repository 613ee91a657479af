"""Files and configurations that others wrote, changed in ways that hurt: each case ends well or with a coded error.

``--samples=all`` runs ten thousand cases; the default runs two hundred, the same ones for the same commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.bounds import Watch, bounded
from tests.fuzz.subjects import SUBJECTS
from tests.sampling import DEFAULT, takes_all

CASES = 10_000
FEW = {"configurations": 15, "manifests": 12, "shards": 15, "hugging-face": 15, "adapters": 20, "tables": 60}
"""Cases of a default run, where they take long."""
OTHERS = 30
"""Of a default run, elsewhere."""


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.timeout(3600)
def test_reading_ends_well_or_with_a_coded_error(name: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    option = pytestconfig.getoption("samples")
    count = CASES // len(SUBJECTS) if takes_all(pytestconfig) else FEW.get(name, OTHERS)
    first = int(option) if option.isdecimal() else int(DEFAULT)

    def read_cases(watch: Watch) -> None:
        subject = SUBJECTS[name](tmp_path)

        @seed(first)
        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck])
        @given(subject.cases)
        def read(case: object) -> None:
            with watch.over(case):
                subject.read(case)

        read()

    bounded(read_cases)
