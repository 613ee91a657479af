"""From what a person writes to a store and a step."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import locate, open_storage
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config.schema import LocalStorageConfig
from nxdt_core.errors.plugins import UnknownScheme
from nxdt_core.kernel import Kernel, PluginPolicy

MEMORY_PLUGIN = """
from nxdt_core.api import StoreComponent, hookimpl
from nxdt_core.config.section import Section
from tests.checkpoint.memory import MemoryStorage

@hookimpl
def nxdt_stores():
    target, config = __name__ + ":Ram", __name__ + ":RamConfig"
    return [StoreComponent(name="ram", target=target, config=config, uri_schemes=("ram",))]

class RamConfig(Section):
    size: int = 7

class Ram(MemoryStorage):
    def __init__(self, uri, config):
        self.uri, self.config = uri, config
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """One that knows a store for ``ram://`` from a plugin file, and may not use the one for ``s3://``."""
    file = tmp_path / "ram_plugin.py"
    file.write_text(MEMORY_PLUGIN)
    return Kernel.start(PluginPolicy(local=(file,), block=("s3",)))


@pytest.mark.parametrize(
    ("address", "root", "step"),
    [
        ("/a/checkpoints", "/a/checkpoints", None),
        ("/a/checkpoints/", "/a/checkpoints", None),
        ("/a/checkpoints/step-00000100", "/a/checkpoints", 100),
        ("/a/checkpoints/step-00000100/", "/a/checkpoints", 100),
        ("/a/checkpoints/step-123456789", "/a/checkpoints", 123456789),
        ("/a/step-1", "/a/step-1", None),
        ("/a/my-step-00000100", "/a/my-step-00000100", None),
        ("/step-00000100", "/", 100),
        ("file:///a/step-00000100", "/a", 100),
        ("file:///step-00000100", "/", 100),
    ],
)
def test_an_address_names_a_root_or_a_step(address: str, root: str, step: int | None) -> None:
    store, found = locate(address)
    assert (store.uri, found) == (root, step)


def test_a_step_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("step-00000007")[0].uri == str(tmp_path)


def test_a_scheme_finds_its_plugin_and_its_configuration(kernel: Kernel) -> None:
    store: Any = open_storage("RAM://bucket/x", kernel)
    assert (store.uri, store.config.size) == ("RAM://bucket/x", 7)
    assert open_storage("ram://bucket", kernel, "given").config == "given"  # type: ignore[attr-defined]
    store, step = locate("ram://bucket/x/step-00000100", kernel)
    assert (store.uri, step) == ("ram://bucket/x/", 100)


def test_paths_need_no_kernel(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path), None, LocalStorageConfig(fsync=False))
    assert isinstance(store, LocalStorage)


@pytest.mark.parametrize(("uri", "hint"), [("s3://bucket/x", "nxdt-plugin-s3.* is blocked"), ("ftp://host/x", "ftp")])
def test_an_unknown_scheme_says_what_to_do(kernel: Kernel, uri: str, hint: str) -> None:
    with raises(UnknownScheme, match=hint) as caught:
        open_storage(uri, kernel)
    assert "ram" in str(caught.value)


def test_looking_and_verifying_need_no_torch(store: LocalStorage, save: Any) -> None:
    save(store, 1)
    program = """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        from nxdt_core.checkpoint import find_checkpoint, list_checkpoints, locate, prune, read_manifest, verify
        store, step = locate(sys.argv[1])
        print([status.state for status in list_checkpoints(store)], verify(store, step), prune(store, 1))
        print(read_manifest(store, step).facts.config, find_checkpoint(store, None, warn=print).step)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), f"{store.uri}/step-00000001"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['committed'] [] []", "{'run': {'name': 'a'}} 1"]


def test_every_public_name_can_be_imported() -> None:
    import nxdt_core.checkpoint as checkpoint

    assert all(hasattr(checkpoint, name) for name in checkpoint.__all__)
    assert not hasattr(checkpoint, "load_pickle")
