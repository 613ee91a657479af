"""The quick comparison of plain ranges agrees with ``packaging``, which takes the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from nxdt_core.kernel.metadata import MalformedMetadata, admits

release = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
clause = st.tuples(st.sampled_from([">=", "<=", ">", "<", "==", "!=", "~="]), release).filter(
    lambda pair: pair[0] != "~=" or "." in pair[1]
)


@settings(deadline=None)  # a machine with other work may take any time
@given(version=release, clauses=st.lists(clause, max_size=3), parentheses=st.booleans())
def test_ranges_are_read_as_packaging_reads_them(version, clauses, parentheses):
    text = ", ".join(f"{operator}{bound}" for operator, bound in clauses)
    line = f"nxdt-core ({text})" if parentheses and text else f"nxdt-core{text}"
    assert admits(line, version) == Requirement(line).specifier.contains(version, prereleases=True)


@pytest.mark.parametrize(
    ("line", "version", "expected"),
    [
        ("nxdt-core", "0.1.0", True),
        ("Nxdt_Core >= 0.1", "0.1.0", True),
        ("nxdt-core==0.1", "0.1.0", True),
        ("nxdt-core>0.1", "0.1.0", False),
        ("nxdt-core<=0.1.0.0", "0.1", True),
        ("nxdt-core<0.10", "0.9", True),
        ("nxdt-core==0.1.*", "0.1.7", True),
        ("nxdt-core==0.2.*", "0.1.7", False),
        ("nxdt-core~=0.1.3", "0.1.2", False),
        ("nxdt-core>=0.1,<0.2", "0.1.0rc1", False),
        ("nxdt-core>=0.1.0rc1,<0.2", "0.1.0rc2", True),
        ("nxdt-core[huggingface]>=0.1", "0.1.0", True),
        ("nxdt-core[huggingface]>=0.2", "0.1.0", False),
        ("nxdt-core>=9; python_version < '3'", "0.1.0", True),
        ("nxdt-core>=9; python_version >= '3'", "0.1.0", False),
        ("nxdt-core>=9; extra == 'dev'", "0.1.0", True),
        ("nxdt-core[arrow, zstd]; extra == 'dev'", "0.1.0", True),
        ("nxdt-core>=9; extra == ''", "0.1.0", False),
    ],
)
def test_requirements_beyond_plain_ranges(line, version, expected):
    assert admits(line, version) is expected


@pytest.mark.parametrize("line", ["nxdt-core >=> 1", "nxdt-core>=", "nxdt-core>=0.1,,", "nxdt-core (>=0.1"])
def test_a_requirement_that_cannot_be_read_is_malformed(line):
    with pytest.raises(MalformedMetadata, match="Requires-Dist has"):
        admits(line, "0.1.0")


def test_requirements_of_extras_and_with_extras_import_no_packaging():
    """Plugins of this repository have both, and the import takes a fifth of a short command's time."""
    code = (
        "import sys; sys.modules['packaging.requirements'] = None; from nxdt_core.kernel.metadata import admits;"
        "print(admits(\"nxdt-core[arrow]; extra == 'arrow'\", '0.1.0'), admits('nxdt-core[huggingface]<0.2', '0.3'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True False\n", "")
