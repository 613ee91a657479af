"""Every call and parameter of NxD Core's API page has a row that says what it is here, and the row is true."""

import csv
import inspect
from pathlib import Path

import pytest
import torch

from nxdt_core import primitives as nxd

ROOT = Path(__file__).parents[2]
ROWS = [*csv.DictReader((Path(__file__).with_name("api_rows.csv")).open())]
CALLS = list(dict.fromkeys(row["call"] for row in ROWS))
VALUES = {"True": True, "False": False, "None": None, "torch.float32": torch.float32, "()": (), "{}": {}}


def found(call):
    target = nxd
    for name in call.split("."):
        target = getattr(target, name)
    return target


def default_of(text):
    if text in VALUES:
        return VALUES[text]
    return text.strip("'") if text.startswith("'") else float(text)


def test_states_are_known_and_all_but_working_ones_say_why():
    assert {row["state"] for row in ROWS} == {"works", "noted", "rejected"}
    assert [row for row in ROWS if (row["state"] == "works") == bool(row["reason"])] == []
    assert len({(row["call"], row["parameter"]) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_the_parameters_and_defaults_of_its_rows(call):
    rows = [row for row in ROWS if row["call"] == call]
    target = found(call)
    for row in rows:
        if not row["parameter"]:
            continue
        parameter = inspect.signature(target).parameters[row["parameter"]]
        if row["default"] in ("*", "**"):
            assert str(parameter).startswith(row["default"])
        elif row["default"]:
            assert parameter.default == default_of(row["default"])
        else:
            assert parameter.default is inspect.Parameter.empty


def test_the_page_names_every_call():
    page = (ROOT / "docs/how-to/nxd-core.md").read_text()
    assert [call for call in CALLS if f"{call.rpartition('.')[2]}`" not in page] == []


def test_every_public_name_has_rows():
    with pytest.raises(AttributeError):
        found("absent")
    known = {call.partition(".")[0] for call in CALLS}
    assert {*nxd.__all__} - known == {"NxDConfig", "lightning"}
    rows = {call.removeprefix("parallel_state.") for call in CALLS if call.startswith("parallel_state.")}
    assert rows == {*nxd.parallel_state.__all__}
    assert {*nxd.lightning.__all__} <= known
