"""The distributions of this repository: the core, its kits in ``testing``, and the plugins, ``plugins/*/*``.

    python scripts/distributions.py editable    print a requirements file with all of them and what their extras need
    python scripts/distributions.py offers      write what the plugins offer into the core, for its install advice,
                                                and the extras of the distribution ``nxdt``

``make install`` calls the first, ``make offers`` the second. A new plugin is a new folder: no list names it.
``nxdt`` itself, in ``meta``, has no code and is built, but not installed for development.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["META", "OFFERS", "ROOT", "editable", "extras", "folders", "offers", "plugins", "with_extras"]

ROOT = Path(__file__).resolve().parent.parent
OFFERS = ROOT / "nxdt_core" / "kernel" / "first_party.json"
"""Read by :mod:`nxdt_core.kernel.registry`."""
META = ROOT / "meta" / "pyproject.toml"
"""The distribution ``nxdt``, whose extras are the plugins and the extras of the core."""
_PLUGIN = "nxdt-plugin-"


def folders() -> list[str]:
    """Return the folders of all distributions, relative to the repository; the core's, ``.``, first."""
    return [".", "./testing", *plugins()]


def plugins() -> list[str]:
    """Return the folders of the plugins: each folder of ``plugins/*/*`` with a ``pyproject.toml``."""
    return sorted(f"./{path.parent.relative_to(ROOT)}" for path in ROOT.glob("plugins/*/*/pyproject.toml"))


def editable() -> list[str]:
    """Return a line ``-e FOLDER`` for each distribution."""
    return [f"-e {folder}" for folder in folders()]


def extras() -> list[str]:
    """Return what the extras of all distributions require.

    ``-e FOLDER[EXTRA]`` would say the same, but pip then looks for FOLDER's distribution on the index where another
    one requires it without the extra.
    """
    groups = [group for folder in folders() for group in _project(folder).get("optional-dependencies", {}).values()]
    return sorted({line for group in groups for line in group if not line.startswith("nxdt-")})


def offers() -> str:
    """Return the text of :data:`OFFERS`: the components and commands that the plugins declare, and their recipes."""
    from nxdt_core.api import ENTRY_POINT_GROUP, KINDS

    rows = []
    for folder in plugins():
        project = _project(folder)
        sys.path.insert(0, str(ROOT / folder / "src"))
        modules = [importlib.import_module(entry) for entry in project["entry-points"][ENTRY_POINT_GROUP].values()]
        del sys.path[0]
        hooks = {**{kind.name: kind.hook for kind in KINDS}, "command": "nxdt_cli"}
        rows += [
            _row(kind, project["name"], record)
            for module in modules
            for kind, hook in hooks.items()
            for record in getattr(module, hook, list)()
        ]
        recipes = sorted(path.stem for path in (ROOT / folder / "src").glob("*/recipes/**/*.yaml"))
        if recipes:
            row = {"kind": "recipe", "dist": project["name"], "name": recipes[0], "aliases": recipes[1:]}
            rows.append({key: value for key, value in row.items() if value})
    lines = (json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: tuple(row.values())[:3]))
    return "[\n  " + ",\n  ".join(lines) + "\n]\n"


def with_extras(text: str) -> str:
    """Return the text of :data:`META` with the extras that the distributions ask for."""
    core = _project(".")
    (bounds,) = (line.removeprefix(core["name"]) for line in tomllib.loads(text)["project"]["dependencies"])
    extras = {name: f"{core['name']}[{name}]{bounds}" for name in core["optional-dependencies"]}
    names = [_project(folder)["name"] for folder in folders()[1:]]
    extras |= {name.removeprefix(_PLUGIN).removeprefix("nxdt-"): f"{name}{bounds}" for name in names}
    rows = [*sorted(extras.items()), ("all", f"nxdt[{','.join(sorted(extras))}]")]
    table = "".join(f'{name} = ["{requirement}"]\n' for name, requirement in rows)
    before, after = r"(\[project\.optional-dependencies\]\n)", r"(# end\n)"
    return re.sub(rf"{before}.*?{after}", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)


def _row(kind: str, dist: str, record: Any) -> dict[str, Any]:
    further = {
        key: list(getattr(record, key, ())) for key in ("aliases", "hf_architectures", "uri_schemes", "shown_by")
    }
    return {"kind": kind, "dist": dist, "name": record.name} | {key: value for key, value in further.items() if value}


def _project(folder: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return project


def main(command: str) -> None:
    """Print or write what the first argument names."""
    if command == "editable":
        print("\n".join([*editable(), *extras()]))
    elif command == "offers":
        OFFERS.write_text(offers())
        META.write_text(with_extras(META.read_text()))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
