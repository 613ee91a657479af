"""Kind ``format``: recognises, describes and reads checkpoints of other programs. Torch-free.

A format is two classes, of which the first is the target of the kind::

    class AcmeFormat(CheckpointFormat):
        def recognises(self, path: Path) -> bool:
            return (path / "model.acme").is_file()

        def open(self, path: Path) -> CheckpointReader:
            from acme_nxdt.reader import AcmeReader  # imports torch

            return AcmeReader(path)

Nothing of another program's checkpoint is ever executed: a reader of pickles needs a list of allowed names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tensor_shards import Listing, TensorKey

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointFormat", "CheckpointReader"]


class CheckpointReader(ABC):
    """One checkpoint of another program. Opening it reads no tensor."""

    step: int = 0
    """Optimizer steps done; 0 where only weights are there."""
    consumed_samples: int = 0
    """Training samples seen; 0 where that is not known."""
    fill_rows: bool = False
    """Set before :meth:`listing`. With it, a tensor whose rows in the model are its ``vocab_size`` may have fewer; the
    others are listed and read as the mean of those. A format whose tables are never filled up ignores it."""
    base: Callable[[], CheckpointReader] | None = None
    """Opens the weights below an adapter; set before :meth:`listing`. A checkpoint that holds an adapter alone adds its
    updates to them. None where the configuration names no weights."""

    def model_config(self) -> Mapping[str, Any] | None:
        """Return keys of a configuration by their dotted paths (``model.name``, ``model.num_layers``, …) that describe
        the model and its tokenizer. Return None where the checkpoint does not say, and the user has to name a
        configuration. Default: None."""
        return None

    @abstractmethod
    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """Return what can be imported into the model of ``builder``: of each tensor its section and our global name
        (``("model", "layers.0.mlp.up_proj.weight")``, ``("optim", "<parameter>/exp_avg")``), dtype and whole shape;
        its region is the whole. Tied parameters are listed once, under their owner. Reads no more than headers.

        With ``weights_only``, the section ``"optim"`` is left out. Without it, optimizer state that was saved and is
        not whole is an error, never left out.

        Raises:
            WeightsDoNotFit: names or shapes are not those of the model.
            NxdtError: files are missing or damaged.
        """

    @abstractmethod
    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        """Yield the tensors at ``places`` of the last :meth:`listing`, in that order: whole, on the host, contiguous,
        in the dtype and shape that were listed. Holds one of them at a time; a rank asks for its share only."""


class CheckpointFormat(ABC):
    """The target of the kind, called as ``Target()``. The record's ``summary`` says in messages what is recognised, as
    in ``a Hugging Face directory with config.json``."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether a path that exists is a checkpoint of this format. Looks at names of files alone, and imports
        nothing heavy: every run that begins with a path asks each installed format."""

    @abstractmethod
    def open(self, path: Path) -> CheckpointReader:
        """Return the reader of the checkpoint at ``path``.

        Raises:
            NxdtError: files are missing or damaged.
        """
