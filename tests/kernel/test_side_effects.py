"""An entry module that changes more than itself is used, and its plugin says what it changed."""

import logging
import os
import signal
import sys
import threading
import warnings

import pytest

CHANGES = {
    "environment": ("import os; os.environ['ACME_HOME'] = 'secret'", "it changes the environment: ACME_HOME"),
    "path": ("import sys; sys.path.append('/nowhere')", "it changes sys.path"),
    "signal": ("import signal; signal.signal(signal.SIGUSR2, lambda *_: None)", "it handles SIGUSR2"),
    "warnings": ("import warnings; warnings.simplefilter('ignore')", "it changes the filters of warnings"),
    "logging": ("import logging; logging.getLogger().addHandler(logging.NullHandler())", "it changes the root logger"),
    "thread": (
        "import threading; go = threading.Event(); threading.Thread(target=go.wait, name='poll').start()",
        "it starts 'poll', a non-daemon thread, which keeps commands from ending",
    ),
    "daemon": ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", ""),
    "nothing": ("import json, decimal; LIMIT = 3", ""),
}


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """What the modules here change is as before afterwards."""
    environment, path, handler = dict(os.environ), list(sys.path), signal.getsignal(signal.SIGUSR2)
    handlers = list(logging.getLogger().handlers)
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    signal.signal(signal.SIGUSR2, handler)
    logging.getLogger().handlers[:] = handlers


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_the_process_is_noted(site, plugin_named, change):
    source, note = CHANGES[change]
    module = site.add("nxdt-plugin-acme", source)
    plugin = plugin_named(site.start(), "acme")
    if change == "thread":
        sys.modules[module].go.set()
        next(thread for thread in threading.enumerate() if thread.name == "poll").join()
    assert (plugin.state, plugin.note) == ("ok", note)


def test_the_note_stays_with_the_module_and_away_from_others(site, plugin_named):
    site.add("nxdt-plugin-acme", CHANGES["path"][0])
    site.add("nxdt-plugin-bolt", "")
    first, second = site.start(), site.start()
    for kernel in (first, second):
        assert plugin_named(kernel, "acme").note == "it changes sys.path"
        assert plugin_named(kernel, "bolt").note == ""


def test_a_function_of_torch_that_was_loaded_before_is_missed(site, plugin_named, monkeypatch):
    import torch

    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)
    monkeypatch.setattr(torch.Tensor, "cosh", torch.Tensor.cosh)
    site.add(
        "nxdt-plugin-acme",
        """
        import functools
        import torch

        torch.nn.functional.silu = functools.partial(torch.nn.functional.silu)
        torch.Tensor.cosh = lambda self: self
        """,
    )
    note = plugin_named(site.start(), "acme").note
    assert note == "it replaces torch.Tensor.cosh, torch.nn.functional.silu, also for the other plugins and the core"
