"""The built-in checkpoint format ``hf``: directories of Hugging Face. Torch-free until one is opened."""

from __future__ import annotations

from pathlib import Path

from nxdt_core.checkpoint.format.hf_source import CONFIG
from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader


class HFFormat(CheckpointFormat):
    """Recognises a directory with a ``config.json``."""

    def recognises(self, path: Path) -> bool:
        """Return whether ``path`` has a ``config.json``."""
        return (path / CONFIG).is_file()

    def open(self, path: Path) -> CheckpointReader:
        """Return the reader of the weights.

        Raises:
            HFFileMissing, HFFileDamaged: of its ``config.json``.
        """
        from nxdt_core.hf.reader import HFReader  # imports torch

        return HFReader(path)
