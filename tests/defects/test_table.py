"""Every test that ``docs/defects.md`` names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/defects.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and "---" not in line][1:]
NAMED = re.compile(r"`((?:tests|plugins|nxdt_core|testing)/[\w/.-]+\.py)(?:::(test_\w+))`")


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_defect_has_tests_that_exist(row):
    named = NAMED.findall(row)
    assert named, "no test is named"
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"
