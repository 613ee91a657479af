"""Make a virtual environment with one version of torch, the core, all plugins of this repository and pytest.

    python scripts/torch_environment.py 2.11.0 FOLDER [REQUIREMENT ...]

``make test-torch`` calls it. Requirements named at the end replace pins of ``constraints.txt``, such as
``transformers==5.17.0``. A second call with the same arguments does nothing.

Registries differ in which build of torch they offer. An index of CPU builds, or a platform that has no other, gives
a CPU build, which is installed as usual. PyPI's build for Linux is for CUDA and requires gigabytes of CUDA
libraries. The tests run on the CPU, where of these only the CUDA runtime is called, to count the devices. So the
script drops the other libraries from torch's requirements and puts shared objects whose functions all fail where the
dynamic linker looks for them. Such an environment is for tests on the CPU only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from distributions import ROOT, editable

TOOLS = ("hypothesis", "pytest", "pytest-timeout")
STAMP = ".installed"
FAILING = "libcuda_calls_fail.so"
CUDA_LIBRARY = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton\b)")
CUDA_RUNTIME = re.compile(r"Requires-Dist: (nvidia-cuda-runtime|cuda-toolkit\[.*\bcudart\b)")


def main(version: str, folder: Path, *replaced: str) -> None:
    """Install everything into ``folder``, unless an equal call has done so."""
    wanted = "\n".join([sys.version, version, *replaced, *requirements(), *constraints(version, replaced)])
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"torch {version} for Python {sys.version.split()[0]}: installing into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip(folder, "--no-deps", f"torch=={version}")
    trim_cuda(folder)
    with tempfile.TemporaryDirectory() as scratch:
        limits, names = Path(scratch, "constraints.txt"), Path(scratch, "requirements.txt")
        limits.write_text("\n".join(constraints(version, replaced)))
        names.write_text("\n".join(requirements()))
        pip(folder, "-c", str(limits), f"torch=={version}", "hatchling", "editables", "setuptools>=70.1", *replaced)
        pip(folder, "--no-build-isolation", "-c", str(limits), "-r", str(names), *replaced)
    stamp.write_text(wanted)


def requirements() -> list[str]:
    """Return all distributions, editable and without their extras, and the tools of the tests."""
    return [*editable(), *TOOLS]


def constraints(version: str, replaced: Sequence[str]) -> list[str]:
    """Return the pins of constraints.txt, without those that the caller replaces."""
    names = {"torch", *(re.split(r"[^\w.-]", requirement)[0].lower() for requirement in replaced)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#") and line.split("==")[0].lower() not in names]


def trim_cuda(folder: Path) -> None:
    """Leave of a CUDA build's requirements what a process on the CPU calls; change nothing in other builds."""
    (metadata,) = folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    kept = [line for line in (runtime_only(line) for line in lines) if line]
    if kept == lines:
        return
    metadata.write_text("".join(kept))
    write_stubs(metadata.parent.parent / "torch" / "lib")


def write_stubs(libraries: Path) -> None:
    """Write a shared object for each CUDA library, other than the runtime, that the dynamic linker does not find."""
    linked = ldd(*libraries.glob("*.so*"))
    names = {name for name in re.findall(r"(\S+) => not found", linked) if not name.startswith("libcudart")}
    symbols = set(re.findall(r"undefined symbol: ((?!cuda)[a-z]\w*)", ldd("-r", *libraries.glob("*.so"))))
    link(libraries, FAILING, "".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in sorted(symbols)))
    for name in names:  # empty: the dynamic linker accepts symbols without versions only from a library of another name
        link(libraries, name, "", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(libraries / FAILING))


def link(folder: Path, name: str, code: str, *arguments: str) -> None:
    """Compile C code into a shared object."""
    output = ("-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", "-o", str(folder / name))
    subprocess.run(("cc", *output, "-x", "c", "-", "-x", "none", *arguments), input=code, text=True, check=True)


def runtime_only(line: str) -> str:
    """Return a line of METADATA, cut to the CUDA runtime if it requires CUDA; empty if it requires nothing else."""
    if not CUDA_LIBRARY.match(line):
        return line
    return re.sub(r"\[.*\]", "[cudart]", line) if CUDA_RUNTIME.match(line) else ""


def ldd(*arguments: str | Path) -> str:
    """Return what ``ldd`` prints. It exits with 1 where a symbol is undefined."""
    return subprocess.run(("ldd", *map(str, arguments)), capture_output=True, text=True, check=False).stdout


def pip(folder: Path, *arguments: str) -> None:
    """Install with the environment's own pip, from the repository root."""
    command = (
        str(folder.resolve() / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    )
    subprocess.run((*command, *arguments), check=True, cwd=ROOT)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
