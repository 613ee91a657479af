"""Wrong plugins, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_plugin_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import sys

import pytest
from nxdt_testing.plugin_contract import PluginContract

from tests.distributions import write_distribution

ENTRY = """
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_optimizers():
    return [Component(name="NAME", target="NAME.build:build", config="NAME.build:Section", summary="a test's")]
"""
BUILD = '''
from nxdt_core.config.section import Section as BaseSection


class Section(BaseSection):
    """Keys of the optimizer."""

    lr: float = 0.1
    """Peak learning rate."""
    decay_of_means: float = 0.9
    """Decay of the running means."""


def build(groups, config):
    return config.decay_of_means
'''
RECIPE = "# Trains nothing.\nbase: recipe:llama-tiny\ntrainer: {max_steps: 3}\n"
README = "Install it: pip install NAME\n"
RANGE = ("nxdt-core>=0.1,<0.2",)
FROM_A_SET = 'target="NAME.build:" + next(iter({"build", "make", "create", "construct", "prepare"}))'
RIGHT = {"entry": ENTRY, "build": BUILD, "recipe": RECIPE, "readme": README, "requires": RANGE, "typed": True}
MUTANTS = {
    "Right": {},
    "Raises": {"entry": "1 / 0"},
    "ImportsNumpy": {"entry": f"import numpy\n{ENTRY}"},
    "ComputesAtImport": {"entry": f"{ENTRY}\nTABLE = sum(range(5_000_000))\n"},
    "HasADefaultOfAnotherType": {"build": BUILD.replace("= 0.1", "= '0.1'")},
    "HasATypeThatYAMLHasNot": {"build": BUILD.replace("lr: float = 0.1", "lr: memoryview | None = None")},
    "HasNoHook": {"entry": "LIMIT = 3\n"},
    "RequiresNoRange": {"requires": ("nxdt-core",)},
    "TakesTheFirstOfASet": {
        "entry": ENTRY.replace('target="NAME.build:build"', FROM_A_SET),
        "build": BUILD + "\n\nmake = create = construct = prepare = build\n",
    },
    "NamesAMissingTarget": {"entry": ENTRY.replace("build:build", "build:make")},
    "LeavesAKeyWithoutText": {"build": BUILD.replace('    """Peak learning rate."""\n', "")},
    "ReadsEveryKeyAtOnce": {"build": BUILD.replace("config.decay_of_means", "vars(config)")},
    "ReadsNoKey": {"build": BUILD.replace("config.decay_of_means", "None")},
    "SaysNothingOfItsComponent": {"entry": ENTRY.replace("a test's", "")},
    "HasAWrongRecipe": {"recipe": RECIPE.replace("max_steps", "max_stepz")},
    "IsNotTyped": {"typed": False},
    "DoesNotSayHowToInstall": {"readme": "A plugin.\n"},
}


def install(site, mutant, name):
    """Write the distribution of a mutant."""
    parts = RIGHT | MUTANTS[mutant]
    files = {"__init__": parts["entry"], "build": parts["build"]}
    texts = {f"{name}/{file}.py": text.replace("NAME", name) for file, text in files.items()}
    texts[f"{name}/recipes/{name}.yaml"] = parts["recipe"]
    if parts["typed"]:
        texts[f"{name}/py.typed"] = ""
    lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {line}" for line in parts["requires"]]
    metadata = "\n".join([*lines, "", parts["readme"].replace("NAME", name)])
    write_distribution(site, name, plugins={name: name}, files=texts, metadata=metadata)


def under_contract(mutant):
    name = f"mutant_{mutant.lower()}"

    class Contract(PluginContract):
        plugin = name

        @pytest.fixture(scope="class")
        def site(self, tmp_path_factory):
            """One for all tests of a mutant, so that its processes are started once."""
            site = tmp_path_factory.mktemp("site")
            install(site, mutant, name)
            return site

        @pytest.fixture(autouse=True)
        def installed(self, site, monkeypatch):
            monkeypatch.syspath_prepend(site)
            yield
            for module in [each for each in sys.modules if each.partition(".")[0] == name]:
                del sys.modules[module]

    return type(f"Test{mutant}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant}"] = under_contract(_mutant)
