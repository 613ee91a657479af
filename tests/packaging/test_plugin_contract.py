"""Every plugin of this repository passes the kits that ``nxdt plugins check`` runs on it.

The kits of models take minutes; each model plugin subclasses them in its own tests.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from nxdt_testing.plugin_check import contracts
from nxdt_testing.plugin_contract import PluginContract

from nxdt_core.kernel import Kernel

FILES = sorted((Path(__file__).parents[2] / "plugins").glob("*/*/pyproject.toml"))
KERNEL = Kernel.start()
MODELS = {each.plugin for each in KERNEL.registry.all("model")}


def kits(name):
    if name in MODELS:
        return {"Test plugin": type("Contract", (PluginContract,), {"plugin": name})}
    return contracts(name, KERNEL)


for _file in FILES:
    for _name in tomllib.loads(_file.read_text())["project"]["entry-points"]["nxdt.plugins"]:
        globals().update({f"{_kit} of {_name}": _contract for _kit, _contract in kits(_name).items()})
