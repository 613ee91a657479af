"""Notes and hints of plugins that are used all the same."""

import sys

import pytest

from nxdt_core.kernel import Kernel, PluginPolicy

HEAVY = "import pandas"
NOTE = "its entry module imports pandas, which makes every command slow"


def test_an_entry_module_that_imports_a_heavy_library_is_noted(site, plugin_named, monkeypatch):
    (site.path / "pandas.py").write_text("")
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    site.add("nxdt-plugin-acme", HEAVY)
    site.add("nxdt-plugin-bolt", HEAVY)
    first, second = site.start(), site.start()
    for kernel in (first, second):
        assert [(plugin_named(kernel, name).state, plugin_named(kernel, name).note) for name in ("acme", "bolt")] == [
            ("ok", NOTE),
            ("ok", ""),
        ], "only the first makes commands slower"


def test_a_local_file_may_import_a_heavy_library(site, plugin_named, tmp_path, monkeypatch):
    (site.path / "pandas.py").write_text("")
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    (tmp_path / "heavy_file.py").write_text(HEAVY)
    kernel = Kernel.start(PluginPolicy(allow=(), local=(tmp_path / "heavy_file.py",)), strict=True)
    plugin = plugin_named(kernel, "heavy_file")
    assert "pandas" in sys.modules
    assert (plugin.state, plugin.note) == ("ok", "")


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
