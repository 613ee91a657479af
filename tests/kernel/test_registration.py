"""What plugins offer reaches the registry: all kinds, added kinds, objects as plugins, local files."""

from __future__ import annotations

import pytest

from nxdt_core import api
from nxdt_core.errors.plugins import ComponentUnusable, LocalPluginMissing

SEVEN = {
    "model": "ModelComponent",
    "dataset": "Component",
    "tokenizer": "Component",
    "optimizer": "Component",
    "schedule": "Component",
    "precision": "Component",
    "store": "StoreComponent",
}

KIND = """
    from nxdt_core.api import Component, Kind, hookimpl

    @hookimpl
    def nxdt_kinds():
        return [Kind(name="judge", hook="nxdt_components", record=Component, protocol="m:Judge", section="judge.name")]
"""

OPTIMIZER = """
    from nxdt_core.api import Component, hookimpl

    @hookimpl
    def nxdt_optimizers():
        return [Component(name="wolf", target="m:f")]
"""

FILLER = """
    from nxdt_core.api import Component, hookimpl

    @hookimpl
    def nxdt_components():
        return {{{kind!r}: [Component(name="length", target="m:f")]}}
"""


@pytest.fixture
def everything(site):
    """A plugin that offers one component of each kind of the kernel."""
    source = ["from nxdt_core.api import *", "from nxdt_core.api import hookimpl"]
    for kind in api.KINDS:
        source += [
            "@hookimpl",
            f"def {kind.hook}():",
            f"    return [{kind.record.__name__}(name='one', target='everything.impl:Made',",
            "         config='everything.config:Section', summary='one of it')]",
        ]
    site.add(
        "nxdt-plugin-everything",
        module="everything",
        files={
            "everything/__init__.py": "\n".join(source),
            "everything/impl.py": "class Made: pass",
            "everything/config.py": "from pydantic import BaseModel\nclass Section(BaseModel): size: int = 3",
        },
    )
    return site.start(strict=True)


@pytest.mark.parametrize("kind", [kind.name for kind in api.KINDS])
def test_a_component_of_each_kind_registers_and_loads_when_asked(everything, kind):
    component = everything.registry.get(kind, "everything:one")
    assert component.plugin == "everything"
    assert component.load_target().__name__ == "Made"
    assert component.load_config()().model_dump() == {"size": 3}
    if kind in SEVEN:
        assert type(component.record).__name__ == SEVEN[kind]


def test_starting_imports_no_implementation(everything):
    import sys

    assert "everything" in sys.modules
    assert "everything.impl" not in sys.modules
    assert "everything.config" not in sys.modules


def test_a_plugin_adds_a_kind_and_another_fills_it(site):
    site.add("nxdt-plugin-zz-kind", KIND)
    site.add("nxdt-plugin-filler", FILLER.format(kind="judge"))
    registry = site.start(strict=True).registry
    assert registry.kinds()[-1].name == "judge"
    assert registry.get("judge", "length").plugin == "filler"


LAZY = FILLER.replace("[Component(", "(Component(").replace('m:f")]', 'm:f") for _ in range(1))')


def test_components_that_are_made_one_by_one_outlast_a_plugin_that_breaks(site, plugin_named):
    site.add("nxdt-plugin-kind", KIND)
    site.add("nxdt-plugin-lazy", LAZY.format(kind="judge"))
    site.add("nxdt-plugin-wrong", FILLER.format(kind="jugde"))
    kernel = site.start()
    assert plugin_named(kernel, "wrong").state == "broken"
    assert kernel.registry.get("judge", "length").plugin == "lazy"


def test_components_whose_making_fails_break_their_plugin(site, plugin_named):
    site.add("nxdt-plugin-kind", KIND)
    site.add("nxdt-plugin-lazy", LAZY.format(kind="judge").replace('"length"', "1 / 0"))
    assert plugin_named(site.start(), "lazy").reason.startswith("nxdt_components raised ZeroDivisionError")


def test_a_kind_that_nobody_adds_cannot_be_filled(site, plugin_named):
    site.add("nxdt-plugin-filler", FILLER.format(kind="jugde"))
    site.add("nxdt-plugin-kind", KIND)
    assert "'jugde', which no plugin adds; did you mean 'judge'?" in plugin_named(site.start(), "filler").reason


def test_a_kernel_kind_is_not_filled_from_the_side(site, plugin_named):
    site.add("nxdt-plugin-filler", FILLER.format(kind="optimizer"))
    assert "which nxdt_optimizers fills" in plugin_named(site.start(), "filler").reason


def test_a_broken_plugin_takes_its_kind_with_it(site):
    both = KIND + "\n" + FILLER.format(kind="missing")
    site.add("nxdt-plugin-kind", both)
    site.add("nxdt-plugin-afiller", FILLER.format(kind="judge"))
    kernel = site.start()
    assert [plugin.state for plugin in kernel.plugins] == ["ok", "broken", "broken"]
    assert "judge" not in [kind.name for kind in kernel.registry.kinds()]


def test_of_two_plugins_that_add_one_kind_the_later_is_broken(site, plugin_named):
    site.add("nxdt-plugin-a", KIND)
    site.add("nxdt-plugin-b", KIND)
    kernel = site.start()
    assert plugin_named(kernel, "a").state == "ok"
    assert "adds 'judge', which 'a' (nxdt-plugin-a 1.0) adds" in plugin_named(kernel, "b").reason


def test_a_kind_of_the_kernel_cannot_be_added_again(site, plugin_named):
    site.add("nxdt-plugin-a", KIND.replace("judge", "optimizer"))
    assert "which the kernel defines" in plugin_named(site.start(), "a").reason


def test_an_entry_point_may_name_an_object(site):
    site.add(
        "nxdt-plugin-object",
        """
        from nxdt_core.api import Component, hookimpl

        class Plugin:
            @hookimpl
            def nxdt_optimizers(self):
                return [Component(name="held", target="m:f")]

            @property
            def size(self):
                raise AssertionError("a property was read")

        plugin = Plugin()
        """,
        plugins={"object": "nxdt_plugin_object:plugin"},
    )
    assert "held" in site.start(strict=True).registry.names("optimizer")


def test_one_distribution_may_bring_several_plugins(site):
    files = {"nxdt_plugin_two_b.py": "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_cli(): return []\n"}
    site.add("nxdt-plugin-two", OPTIMIZER, plugins={"b": "nxdt_plugin_two_b", "a": "nxdt_plugin_two"}, files=files)
    kernel = site.start(strict=True)
    assert [plugin.name for plugin in kernel.plugins] == ["builtin", "a", "b"]


def test_one_module_is_one_plugin(site, plugin_named):
    site.add("nxdt-plugin-two", OPTIMIZER, plugins={"b": "nxdt_plugin_two", "a": "nxdt_plugin_two"})
    kernel = site.start()
    assert plugin_named(kernel, "a").state == "ok"
    assert plugin_named(kernel, "b").reason == "nxdt_plugin_two is the module of 'a' (nxdt-plugin-two 1.0), too"
    assert kernel.registry.get("optimizer", "wolf").plugin == "a"


def test_plugins_come_in_one_order_whatever_the_directory_lists(new_site):
    import itertools

    orders = set()
    for number, names in enumerate(itertools.permutations(["nxdt-plugin-b", "NXDT_Plugin_A", "nxdt-plugin-c"])):
        site = new_site(f"site{number}")
        for name in names:
            site.add(name, plugins={name[-1].lower(): name.replace("-", "_")})
        orders.add(tuple(plugin.name for plugin in site.start().plugins))
    assert orders == {("builtin", "a", "b", "c")}


def test_a_target_that_fails_names_plugin_and_reason(site):
    site.add(
        "nxdt-plugin-x",
        "from nxdt_core.api import *\nfrom nxdt_core.api import hookimpl\n@hookimpl\n"
        "def nxdt_optimizers(): return [Component(name='x', target='missing_x:f', config='json:JSONDecoder')]",
    )
    component = site.start().registry.get("optimizer", "x")
    with pytest.raises(ComponentUnusable, match="nxdt-plugin-x cannot be used: module 'missing_x' does not exist"):
        component.load_target()
    with pytest.raises(ComponentUnusable, match="it is not a pydantic model"):
        component.load_config()


def test_a_local_file_named_by_the_policy_is_a_plugin(site, tmp_path, plugin_named, contributed):
    file = tmp_path / "my-plugin.py"
    file.write_text(
        "from nxdt_core.api import Component, hookimpl\n"
        "@hookimpl\n"
        "def nxdt_optimizers():\n"
        "    return [Component(name='mine', target=f'{__name__}:build')]\n"
        "def build(): return 'built'\n"
    )
    kernel = site.start(strict=True, local=(file,))
    assert kernel.registry.get("optimizer", "my-plugin:mine").load_target()() == "built"
    assert (plugin_named(kernel, "my-plugin").dist, plugin_named(kernel, "my-plugin").location) == ("local", str(file))
    assert [name.rpartition(":")[2] for name in contributed(site.start(local=(file,), allow=()))] == ["mine"]
    assert plugin_named(site.start(local=(file,), block=("my-plugin",)), "my-plugin").state == "blocked"


def test_what_a_local_file_offers_to_commands_that_read_no_run_is_noted(site, tmp_path, plugin_named):
    file = tmp_path / "mine.py"
    file.write_text(
        "from nxdt_core.api import CliCommand, Component, hookimpl\n"
        "@hookimpl\ndef nxdt_cli(): return [CliCommand(name='mine', target='mine:run', summary='Run.')]\n"
        "@hookimpl\ndef nxdt_launchers(): return [Component(name='mine', target='mine:Launcher')]\n"
        "@hookimpl\ndef nxdt_optimizers(): return [Component(name='mine', target='mine:Optimizer')]\n"
    )
    plugin = plugin_named(site.start(strict=True, local=(file,)), "mine")
    assert "only an installed plugin can offer a command;" in plugin.note
    assert "only an installed plugin can offer a launcher;" in plugin.note


def test_local_files_of_one_name_in_two_kernels_are_two_modules(site, tmp_path):
    answers = []
    for folder in "ab":
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(
            "from nxdt_core.api import *\nfrom nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_optimizers():\n"
            f"    return [Component(name='mine', target=f'{{__name__}}:build')]\nbuild = {folder!r}\n"
        )
        answers.append(site.start(local=(file,)).registry.get("optimizer", "mine").load_target())
    assert answers == ["a", "b"]


def test_a_plugin_that_prints_leaves_standard_output_alone(site, capsys):
    site.add("nxdt-plugin-loud", "print('hello from the plugin')")
    site.start(strict=True)
    assert capsys.readouterr() == ("", "hello from the plugin\n")


def test_a_file_of_the_working_directory_is_never_loaded_by_itself(site, tmp_path, monkeypatch):
    (tmp_path / "nxdt_plugin.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    assert [plugin.name for plugin in site.start(strict=True).plugins] == ["builtin"]


def test_a_local_file_that_does_not_exist_is_an_error(site, tmp_path):
    with pytest.raises(LocalPluginMissing, match=r"gone\.py"):
        site.start(local=(tmp_path / "gone.py",))


def test_a_local_file_that_raises_is_broken_and_can_be_mended(site, tmp_path, plugin_named):
    file = tmp_path / "mine.py"
    file.write_text("import not_installed_anywhere")
    assert "needs 'not_installed_anywhere'" in plugin_named(site.start(local=(file,)), "mine").reason
    file.write_text("# nothing to offer, but it runs now\n")
    assert plugin_named(site.start(local=(file,)), "mine").state == "ok"


def test_two_local_files_of_one_name_cannot_be_told_apart(site, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("")
    kernel = site.start(local=(tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py", tmp_path / "a" / "mine.py"))
    assert [plugin.state for plugin in kernel.plugins] == ["ok", "ok", "shadowed"]
