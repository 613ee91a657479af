"""Checkpoints of other programs: which are known, how each is recognised, and what it offers to be imported.

A further format is an entry of :data:`FORMATS` and a class in a module of its own, imported when it is needed::

    "acme": ForeignFormat(
        summary="a directory of Acme's with model.acme",
        recognises=lambda path: (path / "model.acme").is_file(),
        target="nxdt_core.checkpoint.foreign_acme:AcmeCheckpoint",
    )

Torch-free. Nothing of a foreign checkpoint is ever executed; what pickles is read under a list of allowed names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxdt_core.checkpoint.assignment import Listing, Place
from nxdt_core.checkpoint.neuronx.layout import is_neuronx
from nxdt_core.errors import ForeignFormatUnknown
from nxdt_core.protocols.model import ModelBuilder

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "ForeignCheckpoint", "ForeignFormat", "open_foreign", "recognise"]


class ForeignCheckpoint(Protocol):
    """One checkpoint of another program. The target of a format, called as ``Target(path)``; that reads no tensor."""

    step: int
    """Optimizer steps done; 0 where only weights are there."""
    consumed_samples: int
    """Training samples seen; 0 where that is not known."""

    def model_config(self) -> Mapping[str, Any] | None:
        """Keys of a configuration by their dotted paths (``model.name``, ``model.num_layers``, …) that describe the
        model and its tokenizer; None where the checkpoint does not say, and the user has to name a configuration."""
        ...

    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """What can be imported into the model of ``builder``: of each tensor its section and our global name
        (``("model", "layers.0.mlp.up_proj.weight")``, ``("optim", "<parameter>/exp_avg")``), dtype and whole shape;
        its box is the whole. Tied parameters are listed once, under their owner. Reads no more than headers.

        With ``weights_only``, the section ``"optim"`` is left out. Without it, optimizer state that was saved and is
        not whole is an error, never left out.

        Raises:
            WeightsDoNotFit: names or shapes are not those of the model.
            NxdtError: files are missing or damaged.
        """
        ...

    def read(self, places: Sequence[Place]) -> Iterator[torch.Tensor]:
        """The tensors at ``places`` of the last :meth:`listing`, in that order: whole, on the host, contiguous, in the
        dtype and shape that were listed. Holds one of them at a time; a rank asks for its share only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFormat:
    """One kind of foreign checkpoint."""

    summary: str
    """What it is, for messages: ``a Hugging Face directory with config.json``."""
    recognises: Callable[[Path], bool]
    """Whether a path that exists is one, by names alone; imports nothing heavy."""
    target: str
    """``package.module:Class`` of a :class:`ForeignCheckpoint`."""

    def open(self, path: Path) -> ForeignCheckpoint:
        """The checkpoint at ``path``."""
        module, _, name = self.target.partition(":")
        opened: ForeignCheckpoint = getattr(import_module(module), name)(path)
        return opened


FORMATS: Mapping[str, ForeignFormat] = {
    "hf": ForeignFormat(
        summary="a Hugging Face directory with config.json and safetensors weights",
        recognises=lambda path: (path / "config.json").is_file(),
        target="nxdt_core.checkpoint.foreign_hf:HFCheckpoint",
    ),
    "neuronx": ForeignFormat(
        summary="a checkpoint of NxD Training with model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        recognises=is_neuronx,
        target="nxdt_core.checkpoint.neuronx.checkpoint:NeuronxCheckpoint",
    ),
}
"""By name; the first that recognises a path is taken."""


def recognise(path: Path, format: str | None = None) -> str | None:
    """The name of the format of ``path``, among all or ``format`` alone; None where it has none of them."""
    names = (name for name, known in FORMATS.items() if format in (None, name) and known.recognises(path))
    return next(names, None)


def open_foreign(path: Path, format: str | None = None) -> tuple[str, ForeignCheckpoint]:
    """The checkpoint at ``path``, and the name of its format.

    Args:
        path: a directory or file.
        format: a key of :data:`FORMATS` where it shall not be guessed.

    Raises:
        ForeignFormatUnknown: there is nothing, or nothing that is known.
        NxdtError: its files are missing or damaged.
    """
    reason = "it does not exist"
    if path.exists():
        found = recognise(path, format)
        if found is not None:
            return found, FORMATS[found].open(path)
        reason = "its files are those of no known format" if format is None else f"it is not of the format {format!r}"
    summaries = [f"{name}: {known.summary}" for name, known in FORMATS.items()]
    raise ForeignFormatUnknown(path=str(path), reason=reason, formats=summaries)
