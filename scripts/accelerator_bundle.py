"""Gather the wheels that nxdt needs on a machine with torch and transformers where nothing can be downloaded.

    python scripts/accelerator_bundle.py dist/accelerator [--extra litgpt]

The folder has to hold the wheels of nxdt's own distributions already. What they require is followed through the
metadata of each wheel, for Python 3.12 on Linux with x86-64, except for packages that come with torch, transformers
and Lightning, or that are large and part of every scientific installation.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["ON_THE_MACHINE", "closure"]

PYTHON = "3.12"
LIMIT_BYTES = 64 * 2**20
_PRESENT = """
    accelerate aiohttp click filelock fsspec httpx huggingface-hub jinja2 lightning lightning-utilities numpy packaging
    pandas peft pillow psutil pyarrow pytest python-dateutil pytorch-lightning pyyaml regex requests safetensors
    setuptools six tensorboard tokenizers torch torchmetrics tqdm transformers triton typing-extensions urllib3
"""
ON_THE_MACHINE = frozenset(_PRESENT.split())
"""Not carried, nor followed."""
_LEFT_OUT = ("libbitsandbytes_rocm", "libbitsandbytes_xpu", "libbitsandbytes_cuda11", "libbitsandbytes_cuda121")
"""Beginnings of libraries for other devices and older drivers, which are most of a wheel."""
_MARKERS = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "sys_platform": "linux"}
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64", "linux_x86_64"]


def main() -> int:
    """Fill the folder; status 1 where it is larger than what can be carried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="a further requirement; may be repeated")
    asked = parser.parse_args()
    own = sorted(asked.folder.glob("nxdt_*.whl"))
    wanted = [*(line for wheel in own for line in requirements(wheel)), *asked.extra]
    with tempfile.TemporaryDirectory() as downloads:
        wheels = closure(wanted, lambda line: fetch(line, Path(downloads)), requirements)
        for wheel in wheels:
            copy_without(wheel, asked.folder / wheel.name, _LEFT_OUT)
    size = sum(path.stat().st_size for path in asked.folder.iterdir())
    print(f"{len(own)} wheels of nxdt, {len(wheels)} others, {size / 2**20:.1f} MiB in {asked.folder}")
    return int(size > LIMIT_BYTES)


def closure(
    wanted: Iterable[str], fetched: Callable[[str], Path], needs: Callable[[Path], Iterable[str]]
) -> list[Path]:
    """Return the wheels of ``wanted`` and of all that these need, each once.

    Args:
        wanted: requirements as metadata has them.
        fetched: returns the wheel of a requirement.
        needs: returns the requirements of a wheel.
    """
    known, found, queue = set(ON_THE_MACHINE), [], [*wanted]
    while queue:
        line = queue.pop(0)
        name = canonicalize_name(Requirement(line).name)
        if name in known or name.startswith("nxdt-"):
            continue
        known.add(name)
        found.append(fetched(line))
        queue += needs(found[-1])
    return found


def copy_without(wheel: Path, target: Path, left_out: tuple[str, ...]) -> None:
    """Copy a wheel without the files whose names begin with one of ``left_out``; pip installs what is left."""
    with zipfile.ZipFile(wheel) as archive:
        kept = [member for member in archive.infolist() if not Path(member.filename).name.startswith(left_out)]
        if len(kept) == len(archive.infolist()):
            shutil.copy(wheel, target)
            return
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copied:
            for member in kept:
                copied.writestr(member, archive.read(member))


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires on the target, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    parsed = (Requirement(line) for line in metadata.get_all("Requires-Dist", []))
    return [
        str(each).partition(";")[0].strip()
        for each in parsed
        if each.marker is None or each.marker.evaluate({**_MARKERS, "extra": ""})
    ]


def fetch(line: str, folder: Path) -> Path:
    """Download the wheel of a requirement for the target; one without wheels is built here, if it is pure Python."""
    before = set(folder.iterdir())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [*pip, "download", "--no-deps", "--dest", str(folder), *target, *platforms, line]
    if subprocess.run(command, check=False).returncode:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), line], check=True)
    (wheel,) = set(folder.iterdir()) - before
    return wheel


if __name__ == "__main__":
    sys.exit(main())
