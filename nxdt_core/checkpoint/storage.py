"""From an address to a store. Torch-free."""

from __future__ import annotations

import re
import secrets
from typing import Any

from nxdt_core.checkpoint.format.file_names import step_of
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["check_writable", "locate", "open_storage", "scheme_of"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_storage(uri: str, kernel: Kernel | None = None, config: Any = None) -> CheckpointStore:
    """Return the store that ``uri`` names.

    Args:
        uri: a plain path, ``file:///absolute/path``, or ``scheme://…`` of an installed plugin.
        kernel: knows the plugins; None starts one with the default policy.
        config: the dataclass of ``checkpoint.storage``; None means the component's defaults.

    Raises:
        BadStorageUri: ``uri`` is malformed.
        UnknownScheme: no usable plugin serves its scheme; the error names the one to install where it is known.
    """
    component = (kernel or Kernel.start()).registry.storage_for_scheme(scheme_of(uri))
    config_class = component.load_config()
    if config is None and config_class is not None:
        config = config_class()
    storage: CheckpointStore = component.load_target()(uri, config)
    return storage


def scheme_of(uri: str) -> str:
    """Return the scheme of an address in lower case; a plain path has ``file``."""
    match = _SCHEME.match(uri)
    return match[1].lower() if match else "file"


def locate(uri: str, kernel: Kernel | None = None, config: Any = None) -> tuple[CheckpointStore, int | None]:
    """Return the store and step that an address of a person means: its root, or one of its step directories.

    ``runs/a/checkpoints`` gives None as the step, ``runs/a/checkpoints/step-00000100`` gives 100.
    """
    name = uri.rstrip("/").rpartition("/")[2]
    step = step_of(name)
    if step is None:
        return open_storage(uri, kernel, config), None
    root = uri.rstrip("/").removesuffix(name)
    return open_storage(root or ".", kernel, config), step


def check_writable(storage: CheckpointStore) -> None:
    """Write and delete a small object, so that a run learns at its start what would stop its first save.

    Raises:
        StorageError: it cannot be written.
    """
    key = f"probe-{secrets.token_hex(8)}"
    with explained_os_errors(storage.uri):
        with storage.open_write(key) as stream:
            stream.write(b"nxdt")
        storage.delete_many([key])
