"""Keys that moved are read under their old names, with a note."""

import pytest

from nxdt_core.config.complete import MOVED
from nxdt_core.errors.configuration import ConfigError

VALUES = {"checkpoint.resume_from": "somewhere"}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_read_with_a_note(load, good, old):
    value = VALUES.get(MOVED[old], "true")
    further = ["checkpoint.resume_from=somewhere"] if old == "model.weight_init_only" else []
    config = load(good, f"{old}={value}", *further)
    section, _, name = MOVED[old].partition(".")
    assert str(getattr(getattr(config.run, section), name)).lower().endswith(value)
    assert f"{old}: this key is {MOVED[old]} now; the old name goes in nxdt-core 0.3" in config.notes


def test_an_override_of_the_old_name_replaces_the_new_one_of_a_file(load, good):
    given = good + "checkpoint: {resume_if_exists: true}\n"
    assert load(given, "exp_manager.resume_if_exists=false").run.checkpoint.resume_if_exists is False


def test_both_names_in_one_place_are_an_error(load, good):
    both = ("exp_manager.resume_if_exists=false", "checkpoint.resume_if_exists=true")
    with pytest.raises(ConfigError, match=r"exp_manager\.resume_if_exists: unknown key"):
        load(good, *both)
