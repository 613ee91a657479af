"""Install each plugin alone from wheels into an empty environment, then all together, and run the kits there.

    python scripts/check_wheels.py              every distribution; ``make check-wheels`` calls it
    python scripts/check_wheels.py llama s3     these plugins only, and not all together

An environment has the wheel and what its metadata requires. There every target of a
component is imported, so that an import that a plugin does not declare fails. Then the kits are added, and what
else the plugin's README installs, which its recipes may need, and the kits run. Exit status 1 where something fails.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from distributions import META, ROOT, folders, plugins
from wheel_environment import Environment, Third, build_wheels, copy_sources

_KITS = "nxdt-testing"
_CHECK_TIMEOUT_S = 900
_TARGETS = """
from nxdt_core.kernel import Kernel
registry = Kernel.start(strict=True).registry
for kind in registry.kinds():
    for component in registry.all(kind.name):
        component.load_config()
        component.load_target()
"""


def main(*chosen: str) -> int:
    """Check the named plugins, or all of them, then ``nxdt[all]``; return the number of environments that fail."""
    names = {folder: _name(folder) for folder in plugins()}
    unknown = set(chosen) - {name.removeprefix("nxdt-plugin-") for name in names.values()}
    if unknown:
        sys.exit(f"no plugin of this repository is called {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="nxdt-wheels-") as scratch:
        place = Path(scratch)
        source, wheels = copy_sources(ROOT, place / "source"), place / "wheels"
        build_wheels([*(source / folder for folder in folders()), source / META.parent.name], wheels)
        alone = [each for each in names.items() if not chosen or each[1].removeprefix("nxdt-plugin-") in chosen]
        failed = sum(not _check(place / name, wheels, name, _companions(folder, name)) for folder, name in alone)
        if not chosen:
            failed += not _check(place / "all", wheels, "nxdt[all]", None)
    print(f"{failed} failed" if failed else "all of them install and pass")
    return failed


def _check(place: Path, wheels: Path, requirement: str, companions: list[str] | None) -> bool:
    """Install one requirement and look at every plugin, then run its kits; print a line, and one for each failure.

    Args:
        place: directory of the environment.
        wheels: directory of our wheels.
        requirement: what is installed alone.
        companions: what is installed as well before the kits run; None runs none.
    """
    begun = time.monotonic()
    third, failures = Third.of([requirement], wheels=wheels), []
    environment = Environment(place / "env", third.link(place / "third_party"))
    environment.install(wheels, requirement)
    work = place / "work"
    work.mkdir()
    for command in (("nxdt", "plugins", "doctor"), ("python", "-c", _TARGETS)):
        done = environment.run(*command, cwd=work)
        if done.returncode != 0:
            failures.append(f"alone: {done.stdout.strip()}\n{done.stderr.strip()}")
    results = [] if companions is None else _kits(environment, wheels, requirement, companions, place)
    failures += [
        f"{result['of']}: {result['requirement']}: {result['text']}" for result in results if result["state"] == "fail"
    ]
    passed = sum(result["state"] == "pass" for result in results)
    print(
        f"{'FAIL' if failures else 'ok  '} {requirement}: {len(third.found)} third-party distributions, "
        f"{passed} requirements pass, {sum(result['state'] == 'skip' for result in results)} are skipped, "
        f"{time.monotonic() - begun:.0f} s",
        *failures,
        sep="\n     ",
        flush=True,
    )
    return not failures


def _kits(
    environment: Environment, wheels: Path, name: str, companions: list[str], place: Path
) -> list[dict[str, str]]:
    """Install what the README installs as well, and return the results of ``nxdt plugins check``."""
    Third.of([name, *companions, _KITS], wheels=wheels).link(place / "third_party")
    environment.install(wheels, *companions, _KITS)
    command = ("nxdt", "plugins", "check", name, "--json")
    done = environment.run(*command, cwd=place / "work", timeout_s=_CHECK_TIMEOUT_S)
    if not done.stdout.startswith("["):
        return [{"of": name, "requirement": "the kits run", "state": "fail", "text": done.stdout + done.stderr}]
    results: list[dict[str, str]] = json.loads(done.stdout)
    return results


def _companions(folder: str, name: str) -> list[str]:
    """Return the other plugins of the first line ``pip install`` in the README that names the plugin."""
    for line in (ROOT / folder / "README.md").read_text().splitlines():
        found = re.findall(r"nxdt-plugin-[a-z0-9-]+", line) if line.strip().startswith("pip install") else []
        if name in found:
            return [each for each in found if each != name]
    return []


def _name(folder: str) -> str:
    return str(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"])


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
