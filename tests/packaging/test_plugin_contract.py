"""Every plugin of this repository keeps what nxdt asks of all."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nxdt_core.testing.plugin_contract import PluginContract

FILES = sorted((Path(__file__).parents[2] / "plugins").glob("*/*/pyproject.toml"))


def under_contract(name):
    return type(f"Test_{name}", (PluginContract,), {"plugin": name})


for _file in FILES:
    for _name in tomllib.loads(_file.read_text())["project"]["entry-points"]["nxdt.plugins"]:
        globals()[f"Test_{_name}"] = under_contract(_name)
