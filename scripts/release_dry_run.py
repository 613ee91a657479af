"""Do everything of a release but publish it: ``make release-dry-run``.

    python scripts/release_dry_run.py [FOLDER]      FOLDER (dist/release) gets the files of the release

Checked are the versions, the changelog, that each wheel builds from its sdist alone, that a second build is bitwise
identical, and the metadata (``twine check --strict``). Written are sdists, wheels, an SBOM in the CycloneDX format of
all that ``nxdt[all]`` brings, and SHA256SUMS. Exit status 1 where something is wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from distributions import META, ROOT, folders
from packaging.requirements import Requirement
from wheel_environment import Third, copy_sources

_BUILD = """
import os, sys, tarfile
from hatchling.build import build_sdist, build_wheel
out, scratch, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    sdist = build_sdist(out)
    with tarfile.open(os.path.join(out, sdist)) as archive:
        archive.extractall(scratch, filter="data")
    os.chdir(os.path.join(scratch, sdist.removesuffix(".tar.gz")))
    build_wheel(out)
"""
"""A wheel is built from the sdist, so that both hold the same."""


def main(folder: str = "dist/release") -> int:
    """Print a line for each check; return the number of those that fail."""
    out = (ROOT / folder).resolve()
    shutil.rmtree(out, ignore_errors=True)
    version = _version()
    problems = [*problems_of_versions(version), *problems_of_changelog(version)]
    built = build_twice(out)
    problems += built
    command = (sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        problems.append(f"twine check: {checked.stdout.strip()} {checked.stderr.strip()}")
    write_sbom(out, version)
    write_sums(out)
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print(f"ok: {len(list(out.iterdir()))} files of version {version} in {os.path.relpath(out)}")
    return len(problems)


def problems_of_versions(version: str) -> Iterator[str]:
    """Yield where a distribution has another version, or requires another one of this repository."""
    files = [ROOT / folder / "pyproject.toml" for folder in folders()] + [META]
    names = {tomllib.loads(path.read_text())["project"]["name"] for path in files}
    for path in files:
        content = tomllib.loads(path.read_text())
        project, where = content["project"], path.relative_to(ROOT)
        source = (path.parent / content["tool"]["hatch"]["version"]["path"]).resolve()
        if "version" in project or source != ROOT / "nxdt_core" / "_version.py":
            yield f"{where}: its version is not that of nxdt_core/_version.py"
        groups = (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
        for requirement in map(Requirement, [line for group in groups for line in group]):
            if requirement.name in names - {project["name"]} and not requirement.specifier.contains(version):
                yield f"{where}: {requirement} does not admit {version}"


def problems_of_changelog(version: str, text: str | None = None) -> Iterator[str]:
    """Yield what the changelog lacks: a section of the version with at least one entry."""
    text = (ROOT / "CHANGELOG.md").read_text() if text is None else text
    match = re.search(rf"^## \[{re.escape(version)}\].*?$(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if match is None:
        yield f"CHANGELOG.md: no section '## [{version}]'"
    elif "\n- " not in match[1]:
        yield f"CHANGELOG.md: the section of {version} has no entry"


def build_twice(out: Path, chosen: Sequence[str] = ()) -> list[str]:
    """Build sdists and wheels into ``out``, once more elsewhere, and return the files that differ.

    Args:
        out: a directory that is not there yet.
        chosen: folders of the distributions to build, relative to the repository; all where there are none.
    """
    names = {}
    chosen = chosen or [*folders(), META.parent.name]
    with tempfile.TemporaryDirectory(prefix="nxdt-release-") as scratch:
        for number, folder in enumerate((out, Path(scratch) / "again")):
            folder.mkdir(parents=True)
            source = copy_sources(ROOT, Path(scratch) / ("a" if number == 0 else "another place") / "nxdt")
            unpacked = Path(scratch) / f"unpacked-{number}"
            _build([source / each for each in chosen], source, folder, unpacked, umask=0o022 if number == 0 else 0o077)
            names[number] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    first, second = names.values()
    return [
        f"{name}: the second build differs" for name in sorted(first | second) if first.get(name) != second.get(name)
    ]


def _build(projects: Sequence[Path], source: Path, out: Path, unpacked: Path, *, umask: int) -> None:
    """Build distributions; the second time at another path, with other file modes and times."""
    if umask != 0o022:
        for path in source.rglob("*"):
            os.utime(path)
            path.chmod(0o700 if path.is_dir() else 0o600)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _commit_time()}
    command = (sys.executable, "-c", _BUILD, str(out), str(unpacked), *map(str, projects))
    done = subprocess.run(command, env=environment, umask=umask, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the build failed:\n{done.stdout}\n{done.stderr}")


def write_sbom(out: Path, version: str) -> None:
    """Write ``nxdt-VERSION.cdx.json``: our distributions, and those that ``nxdt[all]`` brings in this environment."""
    from cyclonedx.contrib.this.builders import this_component
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    def component(name: str, its: str, *, wheel: Path | None = None) -> Component:
        address = PackageURL(type="pypi", name=name, version=its)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else ""
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)] if wheel else []
        kind = ComponentType.LIBRARY
        return Component(name=name, version=its, purl=address, bom_ref=str(address), type=kind, hashes=hashes)

    made = datetime.fromtimestamp(int(_commit_time()), UTC)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"nxdt {version} {made}"))
    bom.metadata.timestamp = made
    bom.metadata.tools.components.add(this_component())
    root = component("nxdt", version)
    bom.metadata.component = root
    ours = {path.name.partition("-")[0].replace("_", "-"): path for path in out.glob("*.whl")}
    parts = [component(name, version, wheel=path) for name, path in ours.items() if name != "nxdt"]
    third = Third.of(["nxdt[all]"], wheels=out)
    parts += [component(name, each.version) for name, each in third.found.items()]
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(root, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    (out / f"nxdt-{version}.cdx.json").write_text(text + "\n", encoding="utf-8")


def write_sums(out: Path) -> None:
    """Write SHA256SUMS, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in out.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def _version() -> str:
    return re.findall(r'^__version__ = "(.*)"$', (ROOT / "nxdt_core" / "_version.py").read_text(), re.MULTILINE)[0]


def _commit_time() -> str:
    """Seconds since 1970 of the last commit: what ``SOURCE_DATE_EPOCH`` wants."""
    command = ("git", "log", "-1", "--format=%ct")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
