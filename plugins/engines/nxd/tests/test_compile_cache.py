"""``nxdt compile`` with this engine: the command line of neuron_parallel_compile, the cache, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests import processes

RUN = ("recipe:llama-tiny", "parallel_engine.name=nxd")
TOOL = f"""#!{sys.executable}
import json, os, pathlib, sys
cache = os.environ["NEURON_COMPILE_CACHE_URL"]
seen = {{"words": sys.argv[1:], "flags": os.environ["NEURON_CC_FLAGS"], "cache": cache}}
pathlib.Path("seen.json").write_text(json.dumps(seen))
if "://" not in cache:
    for name in sys.argv[-1].removeprefix("name=").split("-"):
        folder = pathlib.Path(cache, "neuronxcc-2.21.0", f"MODULE_{{name}}+flags")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.neff").write_bytes(b"")
sys.exit(int(os.environ.get("TOOL_FAILS", 0)))
"""
"""In the place of neuron_parallel_compile: writes down what it is called with, and puts graphs into the cache that the
run's name lists."""


@pytest.fixture
def nxdt(tmp_path: Path):
    """Run ``nxdt ARGS`` in an empty directory, with the tool on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "neuron_parallel_compile"
    tool.write_text(TOOL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def run(*words: str, tool: bool = True, **variables: str):
        left_out = ("NXD_CPU_MODE", "NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        return processes.run(
            [sys.executable, "-m", "nxdt_core", *words],
            cwd=tmp_path,
            env={**environment, "PATH": str(folder) if tool else "", **variables},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_the_tool_runs_this_command_with_the_variables_of_the_run(nxdt, tmp_path: Path) -> None:
    flags = "parallel_engine.compiler_flags='--model-type transformer'"
    done = nxdt("compile", *RUN, flags, "compiler_cache_url=graphs", "name=1-2")
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    words = [sys.executable, "-m", "nxdt_core", "compile", "--", *RUN, flags, "compiler_cache_url=graphs", "name=1-2"]
    assert seen == {"words": words, "flags": "--model-type transformer --auto-cast none", "cache": "graphs"}


def test_graphs_that_the_tool_adds_are_new(nxdt) -> None:
    first = nxdt("compile", *RUN, "compiler_cache_url=graphs", "name=1-2")
    assert first.stdout.splitlines()[-3:] == [
        "graphs: 2 new, 0 in the cache before",
        "MODULE_1+flags",
        "MODULE_2+flags",
    ]
    second = nxdt("compile", *RUN, "compiler_cache_url=graphs", "name=2-3")
    assert second.stdout.splitlines()[-2:] == ["graphs: 1 new, 2 in the cache before", "MODULE_3+flags"]


def test_a_bucket_is_left_to_the_tool_and_a_variable_wins(nxdt, tmp_path: Path) -> None:
    done = nxdt("compile", *RUN, "compiler_cache_url=graphs", NEURON_COMPILE_CACHE_URL="s3://bucket/graphs")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "seen.json").read_text())["cache"] == "s3://bucket/graphs"
    assert "neuron_parallel_compile has named above" in done.stdout


def test_the_status_is_that_of_the_tool(nxdt) -> None:
    done = nxdt("compile", *RUN, "compiler_cache_url=graphs", TOOL_FAILS="3")
    assert done.returncode == 3
    assert " new" not in done.stdout


REFUSED = {
    "no tool": ({"tool": False}, "graphs", "NXDT-N020"),
    "CPU mode": ({"NXD_CPU_MODE": "1"}, "graphs", "NXDT-N021"),
    "another scheme": ({}, "gopher://graphs", "NXDT-N022"),
    "a file": ({}, "bin/neuron_parallel_compile", "NXDT-P102"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(nxdt, case: str) -> None:
    variables, cache, code = REFUSED[case]
    done = nxdt("compile", *RUN, f"compiler_cache_url={cache}", **variables)
    assert done.returncode == 2
    assert f"[{code}]" in done.stderr
    assert "Traceback" not in done.stderr
