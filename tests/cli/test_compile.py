"""``nxdt compile`` fills the cache that ``nxdt train`` reads, leaves nothing else, and refuses what it cannot do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sampling import slow

pytest.importorskip("nxdt_plugin_llama", reason="nxdt-plugin-llama is not installed")

SOLO = Path(__file__).parents[1] / "testing/mutants/solo_parts.py"
RUN = ("recipe:llama-tiny", "trainer.accelerator=cpu", "model.num_layers=1", "exp_manager.exp_dir=runs")
COMPILED = (*RUN, "model.compile=true")
TWO = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
ONE_STEP = ("trainer.max_steps=1", "trainer.val_check_interval=1", "trainer.limit_val_batches=1")
EAGER = """
from dataclasses import replace
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_devices():
    return [Component(name="cpu", target=f"{__name__}:profile")]

def __getattr__(name):
    if name != "profile":
        raise AttributeError(name)
    from nxdt_core.distributed.devices import CPU
    return replace(CPU, compile_backend="eager")
"""
"""A plugin: the host, with a backend of torch.compile that needs no C++ compiler and keeps nothing."""


@pytest.fixture
def eager(work):
    (work / "eager_host.py").write_text(EAGER)
    return ("plugins.local=[eager_host.py]", "plugins.prefer=[eager_host]")


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def refused(done, code):
    assert done.returncode == 2, done.stderr
    assert f"[{code}]" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_cannot_is_refused(nxdt):
    solo = (f"plugins.local=[{SOLO}]", "parallel_engine.name=solo")
    done = nxdt("compile", *RUN, *solo)
    refused(done, "NXDT-P100")
    assert "'solo'" in done.stderr


def test_a_run_that_compiles_nothing_is_refused_and_its_cache_is_idle(nxdt):
    done = nxdt("compile", *RUN, "compiler_cache_url=graphs")
    refused(done, "NXDT-P101")
    assert "note: compiler_cache_url: no effect, since model.compile is false" in done.stderr


@pytest.mark.parametrize("verb", ["compile", "train"])
@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("s3://bucket/graphs", "NXDT-P103"),
        ("gopher://graphs", "NXDT-P103"),
        ("file", "NXDT-P102"),
        ("file/below", "NXDT-P102"),
    ],
)
def test_a_cache_that_cannot_be_used_is_refused(nxdt, work, verb, address, code):
    (work / "file").write_text("")
    done = nxdt(verb, *COMPILED, f"compiler_cache_url={address}")
    refused(done, code)
    assert "compiler_cache_url" in done.stderr
    assert not (work / "runs").exists()


@pytest.mark.parametrize("verb", ["compile", "train", slow("plan")])
def test_a_folder_that_torch_cannot_make_is_refused_whether_or_not_a_run_compiles(nxdt, work, verb):
    (work / "file").write_text("")
    done = nxdt(verb, *(COMPILED if verb == "compile" else RUN), TORCHINDUCTOR_CACHE_DIR=str(work / "file"), fork=False)
    refused(done, "NXDT-P102")
    assert "Let TORCHINDUCTOR_CACHE_DIR name a folder" in done.stderr


@pytest.mark.parametrize("layout", [(), slow(TWO)], ids=["one process", "two ranks"])
def test_a_trial_leaves_the_run_alone(nxdt, work, tmp_path, eager, layout):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert nxdt("train", *RUN, *layout, *ONE_STEP).returncode == 0
    before = files_below(work / "runs")
    assert before
    done = nxdt("compile", *COMPILED, *eager, *layout, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert "cache of torch.compile's backend 'eager'" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.endswith("traced")] == [
        "training: traced",
        "validation: traced",
    ]
    assert files_below(work / "runs") == before
    assert not list(temporary.glob("nxdt-compile-*"))


@pytest.mark.slow
def test_a_trial_takes_references_of_a_few_samples_only(nxdt, work, eager):
    """The trial itself is that of ``test_a_trial_leaves_the_run_alone``."""
    pytest.importorskip("nxdt_plugin_preference", reason="nxdt-plugin-preference is not installed")
    dpo = ("recipe:llama-tiny-dpo", *COMPILED[1:], "trainer.limit_val_batches=1")
    done = nxdt("compile", *dpo, *eager)
    assert done.returncode == 0, done.stderr
    assert not (work / "runs").exists()


@pytest.mark.slow  # minutes of C++ compilers
@pytest.mark.parametrize("layout", [(), TWO], ids=["one process", "tensor parallel"])
def test_train_finds_the_graphs_that_compile_made(nxdt, work, layout):
    """Those of tensor parallel layers, too, whose keys contain device meshes."""
    run = (*COMPILED, *layout, "compiler_cache_url=graphs", "model.hidden_size=32", "data.seq_length=16")

    def compiled():
        done = nxdt("compile", *run, fork=False, PATH="/usr/bin:/bin")  # a process keeps graphs in its memory, too
        assert done.returncode == 0, done.stderr
        assert str(work / "graphs") in done.stdout
        return tuple(map(int, re.search(r"graphs: (\d+) new, (\d+) from the cache, in", done.stdout).groups()))

    new, found = compiled()
    assert new >= 3
    assert compiled() == (0, new + found)
    done = nxdt("train", *run, *ONE_STEP, fork=False, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 1: compiling took .* s \(graphs: 0 new, [1-9]\d* from the cache\)", done.stderr)
