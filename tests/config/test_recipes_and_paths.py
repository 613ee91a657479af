"""Recipes that plugins ship, and paths into packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.config.sources import find_recipe, list_recipes
from nxdt_core.errors.configuration import UnknownRecipe
from nxdt_core.kernel import Kernel, PluginInfo
from nxdt_core.system.paths import PackageNotFound, resolve_path
from tests.sampling import slow


class Plugins:
    """As much of a kernel as recipes need."""

    def __init__(self, *plugins: PluginInfo) -> None:
        self.plugins = plugins


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two importable packages with recipes, and one plugin that is broken."""
    infos = []
    for name, recipes in {
        "alpha_plug": {"one": "# The first.\nname: a\n", "both": "name: b\n"},
        "beta_plug": {"both": ""},
    }.items():
        folder = tmp_path / name / "recipes"
        folder.mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        for recipe, text in recipes.items():
            (folder / f"{recipe}.yaml").write_text(text)
        infos.append(PluginInfo(name=name[:-5], dist=name, version="1", module=f"{name}:plugin", location=""))
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = PluginInfo(name="c", dist="c", version="1", module="alpha_plug", location="", state="broken")
    return Plugins(*infos, broken)


def test_recipes_of_usable_plugins_are_listed(packages):
    found = [(recipe.name, recipe.plugin, recipe.summary) for recipe in list_recipes(packages)]
    assert found == [("both", "alpha", ""), ("both", "beta", ""), ("one", "alpha", "The first.")]


def test_a_recipe_is_found_by_name_or_with_its_plugin(packages):
    assert find_recipe(packages, "one").text == "# The first.\nname: a\n"
    assert find_recipe(packages, "beta:both").plugin == "beta"


def test_recipes_are_found_in_folders_and_two_of_one_name_are_an_error(packages, tmp_path):
    folder = tmp_path / "alpha_plug" / "recipes" / "trn1"
    folder.mkdir()
    (folder / "two.yaml").write_text("# The second.\n")
    assert find_recipe(packages, "two").summary == "The second."
    (folder / "one.yaml").touch()
    with pytest.raises(UnknownRecipe) as raised:
        find_recipe(packages, "one")
    assert "one.yaml' are recipes of the same name" in str(raised.value)
    assert "Rename all but one of these files." in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("on", "Did you mean 'recipe:one'?"),
        ("both", "Did you mean 'recipe:alpha:both' or 'recipe:beta:both'?"),
        ("gamma:one", "'recipe:one'"),
        ("zzz", "'nxdt recipes list' shows all."),
        ("*", "no plugin has a recipe of that name."),
        ("/one", "Did you mean 'recipe:one'?"),
        ("llama-tiny", "Install it: pip install nxdt-plugin-llama."),
        ("llama-tiny-sft", "Install it: pip install nxdt-plugin-sft-chat."),
    ],
)
def test_a_recipe_that_cannot_be_had_is_told(packages, name, words):
    with pytest.raises(UnknownRecipe) as caught:
        find_recipe(packages, name)
    assert words in caught.value.row()


def test_an_unknown_recipe_is_one_problem_of_loading(kernel):
    (problem,) = config.check("recipe:nothing-like-it", kernel=kernel)
    assert problem.row() == (
        "recipe:nothing-like-it: no plugin has a recipe of that name. 'nxdt recipes list' shows all. [NXDT-C007]"
    )


INSTALLED = Kernel.start()


RECIPES = list_recipes(INSTALLED)
TAKEN = ("tiny", "llama3-8b-dpo", "llama3.1-405b-trn2", "mixtral-8x22b")


@pytest.mark.parametrize(
    "recipe",
    [recipe if any(name in recipe.name for name in TAKEN) else slow(recipe) for recipe in RECIPES],
    ids=[recipe.name for recipe in RECIPES],
)
def test_every_installed_recipe_loads(recipe):
    """By default ``tests/recipes`` loads all, and here some come back from what they are written as."""
    resolved = config.load(f"recipe:{recipe.name}", kernel=INSTALLED)
    assert recipe.summary
    assert resolved.source == f"recipe:{recipe.name}"
    assert config.load(resolved.to_dict(), kernel=INSTALLED) == resolved


def test_overrides_decide_which_plugins_find_a_recipe():
    (problem,) = config.check("recipe:llama-tiny", ["plugins.allow=[]"])
    assert problem.code == "NXDT-C007"


def test_the_policy_of_a_recipe_holds_for_the_run_that_it_starts(tmp_path, monkeypatch, good):
    for name in ("recipes_here", "kept_out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nxdt.plugins]\n{name} = {name}\n")
    (tmp_path / "recipes_here" / "recipes").mkdir()
    parts = Path(__file__).parent / "parts.py"
    section = f"plugins:\n  block: [kept_out]\n  local: ['{parts}']\n"
    (tmp_path / "recipes_here" / "recipes" / "mine.yaml").write_text(good + section)
    monkeypatch.syspath_prepend(str(tmp_path))
    resolved = config.load("recipe:mine")
    states = {plugin.name: plugin.state for plugin in resolved.kernel.plugins}
    assert (states["recipes_here"], states["kept_out"], states["parts"]) == ("ok", "blocked", "ok")
    assert str(resolved.origins["trainer.max_steps"]) == "recipe:mine:3"


def test_paths_into_packages():
    assert resolve_path("package://nxdt_core/py.typed").is_file()
    with pytest.raises(PackageNotFound):
        resolve_path("package://no_such_package/x")
    for inside in ("../../etc/passwd", "recipes/..", "/etc/passwd"):
        with pytest.raises(PackageNotFound, match="leaves the package"):
            resolve_path(f"package://nxdt_core/{inside}")
    for name in ("this", "this.inner"):  # to find what is inside a package, Python imports it
        with pytest.raises(PackageNotFound):
            resolve_path(f"package://{name}/x")
    assert "this" not in sys.modules, "looking for a package imports nothing"


def test_plain_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolve_path("a/b") == tmp_path / "a/b"
    assert resolve_path("a", Path("sub")) == tmp_path / "sub" / "a"
    assert resolve_path("/a") == Path("/a")
    assert resolve_path("~/a", tmp_path) == Path("/home/someone/a")
