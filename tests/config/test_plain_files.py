"""``config.read_file``: a YAML file with any keys as plain data, for migrations."""

import pytest

from nxdt_core import config
from nxdt_core.errors.configuration import ConfigError

TEXT = """\
size: 1e-4  # a number
there: ${size}
lost: ${nowhere}
part:
  names: [a, "${size}", "${nowhere}"]
empty:
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_a_file_is_plain_data_with_lines(file):
    found = config.read_file(file)
    assert found.text == TEXT
    assert found.written["part"] == {"names": ["a", "${size}", "${nowhere}"]}
    assert found.resolved == {
        "size": 1e-4,
        "there": 1e-4,
        "lost": "${nowhere}",
        "part": {"names": ["a", 1e-4, "${nowhere}"]},
        "empty": None,
    }
    assert {key: found.lines[key] for key in ("there", "part", "part.names")} == {
        "there": 2,
        "part": 4,
        "part.names": 5,
    }


def test_overrides_replace_values_before_references_are_resolved(file):
    found = config.read_file(file, {"size": 3, "part.more": "${there}"})
    assert (found.resolved["there"], found.resolved["part"]["more"]) == (3, 3)
    assert (found.lines["size"], found.lines["part.more"]) == (1, 0)


def test_what_cannot_be_read_or_is_no_section_is_an_error_with_its_place(file):
    with pytest.raises(ConfigError, match=r"run\.yaml:1.*a mapping"):
        config.read_file(file, sections=("size", "part", "empty", "absent"))
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        config.read_file(file)
    with pytest.raises(ConfigError, match="absent"):
        config.read_file(file.with_name("absent.yaml"))
