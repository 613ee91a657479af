"""What the command prints in environments whose encoding cannot show every character."""

import json

import pytest
import yaml

from tests.sampling import slow


@pytest.mark.parametrize("encoding", [slow("latin-1"), "ascii", slow("cp1252")])
def test_files_and_pipes_get_utf_8(nxdt, encoding):
    """The schema's texts have characters that none of these encodings has."""
    done = nxdt("config", "schema", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "…" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_a_value_survives_show_and_reading_it_again(nxdt, work):
    shown = nxdt("config", "show", "recipe:llama-tiny", "name=größer–kleiner", PYTHONIOENCODING="latin-1")
    assert yaml.safe_load(shown.stdout)["name"] == "größer–kleiner"


def test_an_error_with_such_a_value_is_still_an_error(nxdt):
    done = nxdt("config", "check", "größe–ß.yaml", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "größe–ß.yaml" in done.stderr
