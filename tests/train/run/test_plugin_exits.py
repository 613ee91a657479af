"""Code of a plugin that exits or panics ends the run with an error that names the plugin, never with status 0."""

import pytest
from nxdt_testing.errors import raises

from nxdt_core.cli import main
from nxdt_core.errors.plugins import ComponentUnusable, PluginCodeExited
from nxdt_core.run import train

PLUGIN = """
import sys
from nxdt_core.api import Callback, Component, hookimpl
from nxdt_core.protocols.dataset import DatasetSplits, MapDataset
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.tokenizer import Tokenizer

class Panic(BaseException):
    "As the panics of pyo3, which are no Exception."

def leaving(*arguments):
    exit()

class Data(DatasetSplits):
    __init__ = split = leaving

class Text(Tokenizer):
    __init__ = encode = decode = fingerprint = leaving

class Loss(Objective):
    __init__ = __call__ = leaving

class Samples(DatasetSplits, MapDataset):
    def __init__(self, config, context): ...

    def split(self, name):
        return self if name == "train" else None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        sys.exit(0)

    def fingerprint(self):
        return "samples"

def panicking(*arguments):
    raise Panic("index out of bounds")

def failing(*arguments):
    1 / 0

class Leaves(Callback):
    def on_step_end(self, run):
        if run.step == 1:
            sys.exit(0)

    def close(self, run):
        sys.exit(0)

class Panics(Callback):
    def on_step_end(self, run):
        raise Panic("index out of bounds")

def named(name, target):
    return Component(name=name, target=f"{__name__}:{target}")

@hookimpl
def nxdt_datasets():
    return [named("leaving", "Data"), named("samples", "Samples")]

@hookimpl
def nxdt_tokenizers():
    return [named("leaving", "Text")]

@hookimpl
def nxdt_schedules():
    return [named("leaving", "leaving")]

@hookimpl
def nxdt_optimizers():
    return [named("leaving", "leaving"), named("panicking", "panicking"), named("failing", "failing"),
            Component(name="unimportable", target="panicking_module:Optimizer")]

@hookimpl
def nxdt_objectives():
    return [named("leaving", "Loss")]

@hookimpl
def nxdt_callbacks():
    return [named("leaves", "Leaves"), named("panics", "Panics"), named("leaving", "leaving")]
"""


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "exits.py").write_text(PLUGIN)
    return f"plugins.local=[{tmp_path}/exits.py]"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.name=leaving", "called sys.exit(None)"),
        ("data.name=samples data.num_workers=1", "called sys.exit(0)"),
        ("data.tokenizer.library=leaving", "called sys.exit(None)"),
        ("model.optim.sched.name=leaving", "called sys.exit(None)"),
        ("model.optim.name=leaving", "called sys.exit(None)"),
        ("model.optim.name=panicking", "raised Panic: index out of bounds"),
        ("objective.name=leaving", "called sys.exit(None)"),
        ("trainer.callbacks=[leaving]", "called sys.exit(None)"),
    ],
)
def test_an_exit_is_an_error_with_the_plugins_name(small_run, plugin, override, reason):
    config = small_run(plugin, *override.split())
    with raises(PluginCodeExited) as caught:
        train(config)
    assert "'exits'" in str(caught.value)
    assert reason in str(caught.value)


def test_a_callback_that_exits_or_panics_is_left_out(small_run, plugin, caplog):
    train(small_run(plugin, "trainer.callbacks=[leaves,panics]", "trainer.max_steps=2", "checkpoint.enabled=false"))
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(", and")[0] for message in messages] == [
        "step 1: exits:leaves failed in on_step_end",
        "step 1: exits:panics failed in on_step_end",
    ]


def test_the_command_reports_an_exit_with_status_2(plugin, tmp_path, capsys):
    words = ["train", "recipe:llama-tiny", plugin, "model.optim.name=leaving", f"exp_manager.exp_dir={tmp_path}"]
    assert main(words) == 2
    assert "[NXDT-K012] Code of the plugin 'exits'" in capsys.readouterr().err


def test_a_bug_in_a_plugin_keeps_its_traceback_and_is_named(plugin, tmp_path):
    words = ["train", "recipe:llama-tiny", plugin, "model.optim.name=failing", f"exp_manager.exp_dir={tmp_path}"]
    with pytest.raises(ZeroDivisionError) as caught:
        main(words)
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in code of the plugin 'exits'")


def test_a_module_that_panics_when_it_is_imported_is_named(small_run, plugin, tmp_path, monkeypatch):
    (tmp_path / "panicking_module.py").write_text("raise type('Panic', (BaseException,), {})('out of bounds')")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ComponentUnusable) as caught:
        small_run(plugin, "model.optim.name=unimportable").selected("optimizer").component.load_target()
    assert "raised Panic: out of bounds" in str(caught.value)
