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
        "it starts threads ('poll'), which nxdt makes daemons so that commands end",
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
        thread = next(thread for thread in threading.enumerate() if thread.name == "poll")
        assert thread.daemon
        sys.modules[module].go.set()
        thread.join()
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


def test_a_thread_that_a_registration_hook_starts_becomes_a_daemon_too(site, plugin_named):
    module = site.add(
        "nxdt-plugin-acme",
        """
        import threading
        from nxdt_core.api import hookimpl

        go = threading.Event()

        @hookimpl
        def nxdt_optimizers():
            threading.Thread(target=go.wait, name="late").start()
            return []
        """,
    )
    plugin = plugin_named(site.start(), "acme")
    late = next(thread for thread in threading.enumerate() if thread.name == "late")
    assert late.daemon
    assert plugin.note == "it starts threads ('late'), which nxdt makes daemons so that commands end"
    sys.modules[module].go.set()
    late.join()


def test_threads_that_others_start_stay_as_they_are(site):
    site.add("nxdt-plugin-acme", CHANGES["nothing"][0])
    site.start()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert not thread.daemon
    thread.join()


@pytest.mark.parametrize(
    ("requires", "hinted"),
    [
        ((), True),
        (("nxdt-core",), True),
        (("nxdt-core>=0.1",), True),
        (("nxdt-core!=0.0.9; python_version < '4'",), True),
        (("nxdt-core>=0.1,<0.2",), False),
        (("nxdt-core~=0.1.0",), False),
        (("nxdt-core==0.1.*",), False),
        (("nxdt_core (>=0.1,<1)",), False),
    ],
)
def test_a_distribution_without_a_range_of_nxdt_core_is_hinted_at(site, plugin_named, requires, hinted):
    site.add_optimizer("nxdt-plugin-acme", "wolf", requires=requires)
    plugin = plugin_named(site.start(), "acme")
    assert (plugin.state, plugin.note) == ("ok", "")
    assert [hint.partition(",")[0] for hint in plugin.hints] == ["it requires no range of nxdt-core"] * hinted


def test_an_entry_module_without_a_hook_is_hinted_at(site, plugin_named):
    site.add("nxdt-plugin-acme", "LIMIT = 3")
    site.add_optimizer("nxdt-plugin-bolt", "wolf")
    kernel = site.start()
    hints = plugin_named(kernel, "acme").hints
    assert hints == ("its entry module implements no hook, so that it offers nothing",)
    assert plugin_named(kernel, "bolt").hints == ()
