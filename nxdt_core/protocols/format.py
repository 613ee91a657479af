"""Kind ``format``: recognises, describes and reads checkpoints of other programs. Torch-free.

A format is two classes, of which the first is the target of the kind::

    class AcmeFormat:
        def recognises(self, path: Path) -> bool:
            return (path / "model.acme").is_file()

        def open(self, path: Path) -> CheckpointReader:
            from acme_nxdt.reader import AcmeReader  # imports torch

            return AcmeReader(path)

Nothing of another program's checkpoint is ever executed: a reader of pickles needs a list of allowed names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Listing, TensorKey

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointFormat", "CheckpointReader", "FillsRows", "TakesBase"]


@runtime_checkable
class CheckpointReader(Protocol):
    """One checkpoint of another program. Opening it reads no tensor."""

    step: int
    """Optimizer steps done; 0 where only weights are there."""
    consumed_samples: int
    """Training samples seen; 0 where that is not known."""

    def model_config(self) -> Mapping[str, Any] | None:
        """Return keys of a configuration by their dotted paths (``model.name``, ``model.num_layers``, …) that describe
        the model and its tokenizer. Return None where the checkpoint does not say, and the user has to name a
        configuration."""
        ...

    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """Return what can be imported into the model of ``builder``: of each tensor its section and our global name
        (``("model", "layers.0.mlp.up_proj.weight")``, ``("optim", "<parameter>/exp_avg")``), dtype and whole shape;
        its box is the whole. Tied parameters are listed once, under their owner. Reads no more than headers.

        With ``weights_only``, the section ``"optim"`` is left out. Without it, optimizer state that was saved and is
        not whole is an error, never left out.

        Raises:
            WeightsDoNotFit: names or shapes are not those of the model.
            NxdtError: files are missing or damaged.
        """
        ...

    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        """Yield the tensors at ``places`` of the last :meth:`listing`, in that order: whole, on the host, contiguous,
        in the dtype and shape that were listed. Holds one of them at a time; a rank asks for its share only."""
        ...


@runtime_checkable
class FillsRows(Protocol):
    """Optional for a :class:`CheckpointReader`: one that can fill up tables with fewer rows than the model's."""

    fill_rows: bool
    """Set before :meth:`CheckpointReader.listing`. With it, a tensor whose rows in the model are its ``vocab_size`` may
    have fewer; the others are listed and read as the mean of those."""


@runtime_checkable
class TakesBase(Protocol):
    """Optional for a :class:`CheckpointReader`: one that may hold an adapter without the weights below."""

    base: str | None
    """Path of those weights, set before :meth:`CheckpointReader.listing`; the adapter's updates are added to them."""


@runtime_checkable
class CheckpointFormat(Protocol):
    """The target of the kind, called as ``Target()``. The record's ``summary`` says in messages what is recognised, as
    in ``a Hugging Face directory with config.json``."""

    def recognises(self, path: Path) -> bool:
        """Return whether a path that exists is a checkpoint of this format. Looks at names of files alone, and imports
        nothing heavy: every run that begins with a path asks each installed format."""
        ...

    def open(self, path: Path) -> CheckpointReader:
        """Return the reader of the checkpoint at ``path``.

        Raises:
            NxdtError: files are missing or damaged.
        """
        ...
