"""``nxdt checkpoint export`` and ``import`` as they are typed: alone, under a launcher, and with mistakes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nxdt_core.checkpoint import list_checkpoints
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.hf.directory import read_hf_config
from tests.checkpoint.hf.exchange import save_run, write_tokenizer
from tests.processes import Popen


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Address of a store with a small Llama at step 7."""
    directory = tmp_path_factory.mktemp("cli")
    save_run(str(directory / "store"), (), write_tokenizer(directory / "bpe"))
    return str(directory / "store")


def test_export_and_import_again(nxdt, store, tmp_path):
    target, again = tmp_path / "hf", str(tmp_path / "again")
    done = nxdt("checkpoint", "export", store, str(target), "--dtype", "bfloat16", "--max-shard-size", "20KB", "--json")
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)
    assert set(exported) == {"source", "target", "step", "files", "size_bytes", "notes", "pushed"}
    assert exported["pushed"] is None
    assert (exported["step"], exported["source"]) == (7, f"{store}/step-00000007")
    assert sorted(exported["files"]) == sorted(path.name for path in target.iterdir())
    assert read_hf_config(target)["torch_dtype"] == "bfloat16"
    done = nxdt("checkpoint", "import", str(target), again, "--json")
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert (imported["format"], imported["model"], imported["tensors"]) == ("hf", "llama", 30)
    assert [(status.step, status.state) for status in list_checkpoints(LocalStorage(again))] == [(0, "committed")]
    assert nxdt("generate", again, "In the", "--max-new-tokens", "3").returncode == 0


def test_people_read_one_line_and_notes_apart(nxdt, tmp_path):
    save_run(str(tmp_path / "store"), (), None)
    done = nxdt("checkpoint", "export", str(tmp_path / "store"), str(tmp_path / "hf"))
    (line,) = done.stdout.splitlines()
    assert line.endswith("of weights.")
    assert done.stderr == "note: no tokenizer is included: transformers has none like 'byte'\n"


def launched(arguments: list[str], directory: Path, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Start a command as a launcher does, once a rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        Popen(
            [sys.executable, "-m", "nxdt_core", *arguments],
            cwd=directory,
            env={
                "PATH": "",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def test_processes_of_a_launcher_export_together_and_speak_once(nxdt, store, tmp_path):
    arguments = ["checkpoint", "export", store, str(tmp_path / "hf"), "--max-shard-size", "20KB"]
    done = launched(arguments, tmp_path, 2)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert [bool(each.stdout) for each in done] == [True, False]
    files = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    nxdt("checkpoint", "export", store, str(tmp_path / "alone"), "--max-shard-size", "20KB")
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    again = launched(arguments, tmp_path, 2)
    assert [each.returncode for each in again] == [2, 2]
    assert "".join(each.stderr for each in again).count("[NXDT-M013]") == 1


@pytest.mark.parametrize("size", ["5XB", "0", "-1GB", "much"])
def test_a_size_that_is_none_is_told(nxdt, store, tmp_path, size):
    done = nxdt("checkpoint", "export", store, str(tmp_path / "hf"), "--max-shard-size", size)
    assert done.returncode == 2
    assert "5GB" in done.stderr
    assert not (tmp_path / "hf").exists()


def test_a_dtype_that_is_none_is_told(nxdt, store, tmp_path):
    done = nxdt("checkpoint", "export", store, str(tmp_path / "hf"), "--dtype", "int4")
    assert done.returncode == 2
    assert "bfloat16" in done.stderr


def test_a_missing_plugin_is_named(nxdt, store, tmp_path):
    done = nxdt("checkpoint", "export", store, str(tmp_path / "hf"), without=("nxdt_plugin_llama",), fork=True)
    assert done.returncode == 2
    assert "[NXDT-S075]" in done.stderr
    assert "nxdt-plugin-llama" in done.stderr
    assert not (tmp_path / "hf").exists()


def test_what_training_alone_needs_may_be_missing(nxdt, tmp_path):
    """A run whose dataset plugin and data are not here is exported all the same."""
    overrides = ("data.name=text", f"data.train_files=[{tmp_path}/gone.txt]")
    save_run(str(tmp_path / "store"), overrides, None)
    words = ("checkpoint", "export", str(tmp_path / "store"), str(tmp_path / "hf"))
    done = nxdt(*words, without=("nxdt_plugin_text",), fork=True)
    assert done.returncode == 0, done.stderr
