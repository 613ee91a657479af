"""Writes distributions to disk as an installer leaves them, so that tests meet real metadata and not patches.

Example, a plugin that offers one optimizer::

    def test_my_plugin(tmp_path, monkeypatch):
        write_distribution(
            tmp_path,
            "nxdt-plugin-lion",
            plugins={"lion": "lion_plugin"},
            files={"lion_plugin.py": SOURCE},
        )
        monkeypatch.syspath_prepend(tmp_path)
        kernel = Kernel.start(strict=True)
        assert kernel.registry.names("optimizer") == ("adamw", "lion")
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxdt_core._version import __version__
from nxdt_core.api import ENTRY_POINT_GROUP

__all__ = ["write_distribution"]

_MAJOR, _MINOR = map(int, __version__.split(".")[:2])
_RANGE = (f"nxdt-core>={_MAJOR}.{_MINOR},<{_MAJOR}.{_MINOR + 1}",)


def write_distribution(
    root: Path,
    name: str,
    *,
    version: str = "1.0",
    plugins: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = _RANGE,
    entry_points: str | bytes | None = None,
    metadata: str | bytes | None = None,
) -> Path:
    """Install a distribution into ``root``: modules, ``METADATA``, ``entry_points.txt``, ``RECORD`` with hashes.

    Args:
        root: Directory that is on ``sys.path``, or will be.
        name: Of the distribution.
        version: Of the distribution.
        plugins: Entry points of the group ``nxdt.plugins``: module by name.
        files: Source text by path relative to ``root``.
        requires: ``Requires-Dist`` lines; by default the range of this minor version of nxdt-core.
        entry_points: Content of ``entry_points.txt`` in place of the one made from ``plugins``.
        metadata: Content of ``METADATA`` in place of the usual one; empty means that the file is missing.

    Returns:
        The ``.dist-info`` directory.
    """
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    contents: dict[str, str | bytes] = dict(files or {})
    contents[f"{info.name}/INSTALLER"] = "test\n"
    if metadata != "":
        contents[f"{info.name}/METADATA"] = metadata or _metadata(name, version, requires)
    if entry_points or plugins:
        contents[f"{info.name}/entry_points.txt"] = entry_points or _entry_points(plugins or {})
    written = [_write(root, path, content) for path, content in sorted(contents.items())]
    record = "".join(f"{line}\n" for line in written) + f"{info.name}/RECORD,,\n"
    (info / "RECORD").write_text(record, encoding="utf-8")
    return info


def _metadata(name: str, version: str, requires: Sequence[str]) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires), "", "A description.", ""])


def _entry_points(plugins: Mapping[str, str]) -> str:
    return "\n".join([f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {module}" for name, module in plugins.items()), ""])


def _write(root: Path, path: str, content: str | bytes) -> str:
    """Write one file; returns its line of ``RECORD``."""
    data = content.encode() if isinstance(content, str) else content
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"
