"""Every call and parameter of NxD Core's API page has a row that says what it is here, and the row is true."""

import csv
import inspect
import logging
from pathlib import Path

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import lightning as lightning
from nxdt_testing.ranks import RankPool

from plugins.compat.nxd_core.tests.loops import Decoder

ROOT = Path(__file__).parents[4]
ROWS = [*csv.DictReader((Path(__file__).with_name("api_rows.csv")).open())]
CALLS = list(dict.fromkeys(row["call"] for row in ROWS))
VALUES = {"True": True, "False": False, "None": None, "torch.float32": torch.float32, "()": (), "{}": {}}


def found(call):
    target = lightning if call in lightning.__all__ else nxd
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


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings_of_a_program(path):
    """What is logged by a program that gives each argument without effect another value than its default."""
    heard = Heard()
    logging.getLogger("nxdt_plugin_nxd_core").addHandler(heard)
    changed = {}
    for row in ROWS:
        if row["state"] == "noted":
            default = default_of(row["default"])
            value = not default if isinstance(default, bool) else 4 if default else [[0]]
            changed.setdefault(row["call"].removeprefix("parallel_layers."), {})[row["parameter"]] = value
    layers = nxd.parallel_layers
    nxd_config = nxd.neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": True}, **changed["neuronx_distributed_config"]
    )
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=1, **changed["initialize_parallel_model"])
    optimizer = nxd.NeuronZero1Optimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, **changed["NeuronZero1Optimizer"]
    )
    for _ in range(2):
        nxd.save_checkpoint(path, "tag", model, **changed["save_checkpoint"])
    nxd.load_checkpoint(path, "tag", model, **changed["load_checkpoint"])
    for name in ("save_sharded_state_dict", "load_sharded_state_dict"):
        getattr(optimizer, name)(path, **changed[f"NeuronZero1Optimizer.{name}"])
    layers.save({"model": model.state_dict()}, f"{path}/ranks", **changed["save"])
    layers.load(f"{path}/ranks", model, **changed["load"])
    nxd.LoraConfig(**changed["LoraConfig"])
    for name in ("ColumnParallelLinear", "RowParallelLinear"):
        getattr(layers, name)(4, 4, **changed[name])
    layers.GQAQKVColumnParallelLinear(4, (4, 4), **changed["GQAQKVColumnParallelLinear"])
    lightning.NeuronLTModule(Decoder, nxd_config, torch.optim.AdamW, dict, **changed["NeuronLTModule"])
    lightning.NeuronXLAStrategy(nxd_config, **changed["NeuronXLAStrategy"])
    lightning.NeuronXLAPrecisionPlugin(**changed["NeuronXLAPrecisionPlugin"])
    lightning.NeuronTensorBoardLogger(path, **changed["NeuronTensorBoardLogger"])
    nxd_config.engine.shutdown()
    return heard.texts


def test_arguments_without_effect_are_logged_once_with_their_reason(tmp_path):
    (texts,) = RankPool(1).run(warnings_of_a_program, str(tmp_path))
    assert sorted(texts) == sorted(
        f"{row['call'].removeprefix('parallel_layers.')}: {row['parameter']} has no effect: {row['reason']}"
        for row in ROWS
        if row["state"] == "noted"
    )


def test_the_page_lists_every_argument_that_has_no_effect_or_is_refused():
    page = (ROOT / "docs/how-to/nxd-core.md").read_text()
    words = {"noted": "no effect", "rejected": "refused"}
    for row in ROWS:
        if row["state"] in words:
            call = row["call"].removeprefix("parallel_layers.")
            line = f"| `{call}` | `{row['parameter']}` | {words[row['state']]} | {row['reason']} |"
            assert line in page, line


def test_the_page_names_every_call():
    page = (ROOT / "docs/how-to/nxd-core.md").read_text()
    assert [call for call in CALLS if f"{call.rpartition('.')[2]}`" not in page] == []


def test_every_public_name_has_rows():
    with pytest.raises(AttributeError):
        found("absent")
    known = {call.partition(".")[0] for call in CALLS}
    assert {*nxd.__all__} - known == {"NxDConfig"}
    rows = {call.removeprefix("parallel_state.") for call in CALLS if call.startswith("parallel_state.")}
    assert rows == {*nxd.parallel_state.__all__}
    assert {*lightning.__all__} <= known
