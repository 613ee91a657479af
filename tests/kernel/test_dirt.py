"""Whatever is installed beside it, a sound plugin works, and the unsound one is shown with its reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from nxdt_testing.errors import raises

from nxdt_core.errors.plugins import PluginsUnusable
from nxdt_core.kernel import Kernel, PluginPolicy, discovery

BROKEN_SOURCES = {
    "raises": ("1 / 0", "raised ZeroDivisionError: division by zero"),
    "exits": ("import sys; sys.exit(3)", "called sys.exit(3)"),
    "syntax": ("def (", "raised SyntaxError"),
    "dependency": ("import not_installed_anywhere", "needs 'not_installed_anywhere', which is not installed"),
    "misspelt": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimisers(): return []",
        "nxdt_optimisers() implements no hook; did you mean 'nxdt_optimizers'?",
    ),
    "no-prefix": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef optimizers(): return []",
        "optimizers() implements no hook; did you mean 'nxdt_optimizers'?",
    ),
    "wrong-argument": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_validate_config(contxt): pass",
        "nxdt_validate_config(contxt) has contxt; nxdt_validate_config takes the plain argument context",
    ),
    "extra-argument": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers(config): return []",
        "nxdt_optimizers takes no argument",
    ),
    "default": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_validate_config(context=None): pass",
        "nxdt_validate_config(context=None) gives 'context' a default",
    ),
    "star-arguments": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_validate_config(*args): pass",
        "nxdt_validate_config(*args) has *args",
    ),
    "keyword-only": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_validate_config(*, context): pass",
        "nxdt_validate_config takes the plain argument context",
    ),
    "wrapper": (
        "from nxdt_core.api import hookimpl\n@hookimpl(wrapper=True)\ndef nxdt_optimizers(): return (yield)",
        "is a wrapper",
    ),
    "old-wrapper": (
        "from nxdt_core.api import hookimpl\n@hookimpl(hookwrapper=True)\ndef nxdt_optimizers(): yield",
        "is a wrapper",
    ),
    "coroutine": (
        "from nxdt_core.api import hookimpl\n@hookimpl\nasync def nxdt_validate_config(context): pass",
        "is a coroutine",
    ),
    "unmarked": ("def nxdt_optimizers(): return []", "nxdt_optimizers() is not marked with @hookimpl"),
    "hook-raises": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers(): raise RuntimeError('no luck')",
        "nxdt_optimizers raised RuntimeError: no luck",
    ),
    "generator-raises": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers():\n    yield from ()\n    [][0]",
        "nxdt_optimizers raised IndexError",
    ),
    "hook-exits": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers(): raise SystemExit",
        "nxdt_optimizers called sys.exit(None)",
    ),
    "bad-name": (
        "from nxdt_core.api import hookimpl, Component\n@hookimpl\n"
        "def nxdt_optimizers(): return [Component(name='a b', target='m:f')]",
        "Component.name cannot be 'a b'",
    ),
    "other-record": (
        "from nxdt_core.api import hookimpl, ModelComponent\n@hookimpl\n"
        "def nxdt_optimizers(): return [ModelComponent(name='a', target='m:f')]",
        "nxdt_optimizers yields a ModelComponent, not a Component",
    ),
    "unknown-capability": (
        "from nxdt_core.api import hookimpl, ModelComponent\n@hookimpl\n"
        "def nxdt_models(): return [ModelComponent(name='a', target='m:f', capabilities=frozenset({'lorra'}))]",
        "the model 'a' declares the capability 'lorra', which does not exist; did you mean 'lora'?",
    ),
    "capability-of-another-kind": (
        "from nxdt_core.api import hookimpl, Component\n@hookimpl\n"
        "def nxdt_optimizers(): return [Component(name='a', target='m:f', capabilities=frozenset({'tp'}))]",
        "the optimizer 'a' declares the capability 'tp', which does not exist; known are 'sharded'",
    ),
    "kind-without-capabilities": (
        "from nxdt_core.api import hookimpl, Component\n@hookimpl\n"
        "def nxdt_callbacks(): return [Component(name='a', target='m:f', capabilities=frozenset({'tp'}))]",
        "the callback 'a' declares the capability 'tp'; components of its kind have none",
    ),
    "unknown-requirement": (
        "from nxdt_core.api import hookimpl, Component\n@hookimpl\n"
        "def nxdt_precisions():\n"
        "    return [Component(name='a', target='m:f', requires=frozenset({'precisoin'}))]",
        "the precision 'a' requires the capability 'precisoin', which does not exist; did you mean 'precision'?",
    ),
    "unknown-requirement-of-the-model": (
        "from nxdt_core.api import hookimpl, AdapterComponent\n@hookimpl\n"
        "def nxdt_adapters(): return [AdapterComponent(name='a', target='m:f', requires_of_model=frozenset({'loro'}))]",
        "requires of the model the capability 'loro', which does not exist; did you mean 'lora'?",
    ),
    "capabilities-as-text": (
        "from nxdt_core.api import hookimpl, ModelComponent\n@hookimpl\n"
        "def nxdt_models(): return [ModelComponent(name='a', target='m:f', capabilities='tp')]",
        "ModelComponent.capabilities cannot be 'tp'",
    ),
    "no-list": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers(): return 3",
        "yields int where a list of records belongs",
    ),
    "twice": (
        "from nxdt_core.api import hookimpl, Component\n@hookimpl\n"
        "def nxdt_optimizers(): return [Component(name=n, target='m:f', aliases=('b',)) for n in 'ab']",
        "it offers the optimizer 'b' twice",
    ),
    "command": (
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_cli(): return ['tokens']",
        "nxdt_cli yields a str, not a CliCommand",
    ),
}


@pytest.mark.parametrize("case", BROKEN_SOURCES)
def test_a_plugin_whose_code_is_wrong_is_broken_with_its_reason(site, plugin_named, case, contributed):
    source, reason = BROKEN_SOURCES[case]
    site.add("nxdt-plugin-bad", source)
    site.add_optimizer("nxdt-plugin-good", "wolf")
    kernel = site.start()
    bad = plugin_named(kernel, "bad")
    assert (bad.state, plugin_named(kernel, "good").state) == ("broken", "ok")
    assert reason in bad.reason
    assert "\n" not in bad.reason
    assert contributed(kernel) == ["good:wolf"]


def test_a_broken_plugin_registers_nothing_at_all(site, contributed):
    site.add(
        "nxdt-plugin-half",
        """
        from nxdt_core.api import Component, hookimpl

        @hookimpl
        def nxdt_optimizers():
            return [Component(name="fine", target="m:f")]

        @hookimpl
        def nxdt_objectives():
            raise ValueError("not so fine")

        @hookimpl
        def nxdt_validate_config(context):
            raise AssertionError("a broken plugin was called")
        """,
    )
    kernel = site.start()
    assert contributed(kernel) == []
    assert kernel.manager.hook.nxdt_validate_config.get_hookimpls() == []


def test_a_module_that_does_not_exist_is_broken(site, plugin_named):
    site.add("nxdt-plugin-gone", plugins={"gone": "nxdt_plugin_gone_away"})
    assert plugin_named(site.start(), "gone").reason == "module 'nxdt_plugin_gone_away' does not exist"


def test_an_attribute_that_does_not_exist_is_broken(site, plugin_named):
    site.add("nxdt-plugin-object", plugins={"object": "nxdt_plugin_object:plugin"})
    assert plugin_named(site.start(), "object").reason == "module 'nxdt_plugin_object' has no attribute 'plugin'"


def test_the_reason_of_a_failing_module_names_file_and_line(site, plugin_named):
    site.add("nxdt-plugin-bad", "x = 1\n\nraise LookupError('here')\n")
    assert plugin_named(site.start(), "bad").reason.endswith("nxdt_plugin_bad.py:3)")


@pytest.mark.parametrize(
    "content",
    ["this is no ini file", "[console_scripts]\nx", "[x\ny = z", "[a]\nb = c = d\n[a]\nb", b"\xff\xfe[nonsense\x00"],
)
def test_malformed_entry_points_of_an_unrelated_distribution_disturb_nobody(site, content):
    site.add("unrelated", entry_points=content)
    site.add_optimizer("nxdt-plugin-good", "wolf")
    kernel = site.start(strict=True)
    assert [plugin.name for plugin in kernel.plugins] == ["builtin", "good"]


def test_another_malformed_group_of_a_plugin_is_not_our_business(site, plugin_named):
    text = "[other]\nnonsense here\n[nxdt.plugins]\n# a comment\ngood = nxdt_plugin_good [extra]\n[x]\n==="
    site.add_optimizer("nxdt-plugin-good", "wolf", entry_points=text)
    assert plugin_named(site.start(), "good").state == "ok"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[nxdt.plugins]\nbad\n", "the line 'bad'"),
        ("[nxdt.plugins]\nbad = not a module\n", "the line 'bad = not a module'"),
        ("[nxdt.plugins]\nbad = m\nbad = n\n", "names 'bad' twice"),
        (b"\xff\xfe[nxdt.plugins]", "cannot be read"),
    ],
)
def test_malformed_entry_points_of_a_plugin_are_corrupt(site, content, reason, contributed):
    site.add("nxdt-plugin-bad", entry_points=content)
    site.add_optimizer("nxdt-plugin-good", "wolf")
    kernel = site.start()
    (bad,) = [plugin for plugin in kernel.plugins if plugin.state == "corrupt"]
    assert bad.dist == "nxdt-plugin-bad"
    assert reason in bad.reason
    assert contributed(kernel) == ["good:wolf"]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ("", "METADATA is missing or empty"),
        ("Name: nxdt-plugin-bad\n", "METADATA has no Version"),
        ("Version: 1\n\nName: in the description", "METADATA has no Name"),
        (b"\xff\xfe\x00", "METADATA cannot be read"),
    ],
)
def test_a_plugin_without_sound_metadata_is_corrupt(site, plugin_named, metadata, reason):
    site.add("nxdt-plugin-bad", metadata=metadata)
    bad = plugin_named(site.start(), "bad")
    assert bad.state == "corrupt"
    assert reason in bad.reason


def test_an_unrelated_distribution_without_metadata_disturbs_nobody(site):
    site.add("unrelated", plugins={}, metadata="")
    assert [plugin.name for plugin in site.start(strict=True).plugins] == ["builtin"]


def test_the_same_distribution_later_on_the_path_is_shadowed(new_site):
    late, early = new_site("late"), new_site("early")
    late.add_optimizer("nxdt-plugin-twice", "wolf", version="1.0")
    early.add_optimizer("NXDT_plugin.twice", "wolf", version="2.0", plugins={"twice": "NXDT_plugin.twice"})
    kernel = Kernel.start(path=[str(early.path), str(late.path)])
    twice = [plugin for plugin in kernel.plugins if plugin.name == "twice"]
    assert [plugin.version for plugin in twice] == ["2.0", "1.0"]
    assert twice[1].state == "shadowed"
    assert str(early.path) in twice[1].reason


def test_of_releases_left_in_one_directory_the_last_by_name_is_meant_however_they_are_listed(site):
    for version in ("3.0", "1.0", "6.0", "2.0", "5.0", "4.0"):
        site.add_optimizer("nxdt-plugin-twice", "wolf", version=version)
    plugins = site.start().plugins[1:]
    assert [plugin.version for plugin in plugins] == ["6.0", "5.0", "4.0", "3.0", "2.0", "1.0"]
    assert [plugin.state for plugin in plugins] == ["ok", *["shadowed"] * 5]


def test_a_newer_release_that_dropped_its_plugin_shadows_the_older_one(new_site):
    late, early = new_site("late"), new_site("early")
    late.add_optimizer("nxdt-plugin-old", "wolf", version="1.0")
    early.add("nxdt-plugin-old", version="2.0", plugins={}, module="nothing")
    kernel = Kernel.start(path=[str(early.path), str(late.path)])
    assert [plugin.state for plugin in kernel.plugins] == ["ok", "shadowed"]


def test_one_directory_named_twice_on_the_path_shadows_nothing(site, tmp_path):
    site.add_optimizer("nxdt-plugin-good", "wolf")
    (tmp_path / "link").symlink_to(site.path)
    kernel = Kernel.start(path=[str(site.path), str(site.path), str(tmp_path / "link")], strict=True)
    assert [plugin.name for plugin in kernel.plugins] == ["builtin", "good"]


@pytest.mark.parametrize("policy", [{"block": ("spy",)}, {"block": ("Nxdt_Plugin_Spy",)}, {"allow": ("good",)}])
def test_a_blocked_plugin_does_not_run(site, plugin_named, policy, contributed):
    witness = site.path / "witness"
    site.add("nxdt-plugin-spy", f"open({str(witness)!r}, 'w').close()")
    site.add_optimizer("nxdt-plugin-good", "wolf")
    kernel = site.start(**policy)
    assert plugin_named(kernel, "spy").state == "blocked"
    assert not [name for name in sys.modules if "nxdt_plugin_spy" in name]
    assert not witness.exists()
    assert contributed(kernel) == ["good:wolf"]
    site.start(strict=True, allow=("good", "spy"))
    assert witness.exists()


def test_an_incompatible_plugin_does_not_run(site, plugin_named):
    witness = site.path / "witness"
    site.add("nxdt-plugin-future", f"open({str(witness)!r}, 'w').close()", requires=["torch", "nxdt_core>=999"])
    future = plugin_named(site.start(), "future")
    assert (future.state, future.requires) == ("incompatible", ("nxdt_core>=999",))
    assert "requires nxdt_core>=999" in future.reason
    assert not witness.exists()


def test_strict_mode_names_every_unusable_plugin_and_what_to_do(site):
    site.add("nxdt-plugin-bad", "1 / 0")
    site.add("nxdt-plugin-future", requires=["nxdt-core>=999"])
    with raises(PluginsUnusable) as caught:
        site.start(strict=True)
    assert "ZeroDivisionError" in str(caught.value)
    assert "pip install --upgrade nxdt-plugin-future" in str(caught.value)


def test_strict_mode_accepts_what_the_policy_blocks(site):
    site.add("nxdt-plugin-bad", "1 / 0")
    site.start(strict=True, block=("bad",))


def test_strict_mode_refuses_an_entry_module_that_imports_torch(site, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    site.add("nxdt-plugin-heavy", "import torch", files={"torch.py": "# stands for the real one\n"})
    assert site.start().registry is not None
    del sys.modules["torch"], sys.modules["nxdt_plugin_heavy"]
    with raises(PluginsUnusable, match="imports torch"):
        site.start(strict=True)


def test_ctrl_c_is_not_a_plugin_defect(site):
    site.add("nxdt-plugin-interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.start()


def test_a_lazy_module_attribute_is_not_touched(site, plugin_named):
    site.add(
        "nxdt-plugin-lazy",
        """
        def __dir__():
            return ["nxdt_optimizers", "nxdt_models"]

        def __getattr__(name):
            raise AssertionError(f"{name} was asked for")
        """,
    )
    assert plugin_named(site.start(), "lazy").state == "ok"


@pytest.mark.parametrize("settled", [False, True])
def test_a_kernel_that_is_started_again_sees_what_has_changed(site, plugin_named, monkeypatch, settled):
    """Metadata is read again where it has changed or is too new to tell."""
    if settled:
        monkeypatch.setattr("nxdt_core.kernel.metadata._SETTLED_NS", -(10**12))
    site.add_optimizer("nxdt-plugin-good", "wolf", version="1.0")
    (folder,) = site.path.glob("nxdt_plugin_good-*.dist-info")
    entries, metadata = folder / "entry_points.txt", folder / "METADATA"
    assert plugin_named(site.start(), "good").version == "1.0"
    replace(metadata, "\nVersion: 1.0", "\nVersion: 2.0")
    assert plugin_named(site.start(), "good").version == "2.0"
    replace(entries, "good =", "fine =")
    assert plugin_named(site.start(), "fine").state == "ok"
    entries.unlink()
    assert [plugin.name for plugin in site.start().plugins] == ["builtin"]


def test_metadata_is_read_once_also_by_the_finder_of_the_backport(monkeypatch):
    pytest.importorskip("importlib_metadata", reason="its import replaces the finder of the standard library")
    found = discovery.find_plugins(PluginPolicy())
    monkeypatch.delattr(discovery, "read_core_metadata")
    assert discovery.find_plugins(PluginPolicy()) == found
    assert {plugin.state for plugin in found} == {"ok"}


def replace(path: Path, old: str, new: str) -> None:
    """Replace text of a file by as much other text, a second later."""
    text, modified = path.read_text(), path.stat().st_mtime + 1
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, (modified, modified))


def test_a_hook_is_a_function(site, plugin_named):
    site.add(
        "nxdt-plugin-object",
        """
        from nxdt_core.api import Component, hookimpl

        class Hook:
            __hash__ = None

            def __call__(self):
                return [Component(name="held", target="m:f")]

        nxdt_optimizers = hookimpl(Hook())
        """,
    )
    plugin = plugin_named(site.start(), "object")
    assert (plugin.state, plugin.reason) == ("broken", "nxdt_optimizers is a Hook; a hook is a function")
