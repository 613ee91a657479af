"""The checkpoint format ``neuronx``. Torch-free until a checkpoint is opened."""

from __future__ import annotations

from pathlib import Path

from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader
from nxdt_plugin_migrate.checkpoint.layout import is_neuronx


class NeuronxFormat(CheckpointFormat):
    """A :class:`~nxdt_core.protocols.format.CheckpointFormat`: what neuronx-distributed saves."""

    def recognises(self, path: Path) -> bool:
        """Return whether ``path`` is a checkpoint of NxD Training, or a directory of some."""
        return is_neuronx(path)

    def open(self, path: Path) -> CheckpointReader:
        """Return the reader of the checkpoint at ``path``.

        Raises:
            NxdtError: see :class:`~nxdt_plugin_migrate.checkpoint.reader.NeuronxCheckpoint`.
        """
        from nxdt_plugin_migrate.checkpoint.reader import NeuronxCheckpoint  # imports torch

        return NeuronxCheckpoint(path)
