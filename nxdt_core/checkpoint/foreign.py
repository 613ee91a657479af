"""Checkpoints of other programs: which installed format recognises a path, its reader, and its weights in a run.

Torch is imported where weights are loaded. Formats are components of the kind ``format``
(:mod:`nxdt_core.protocols.format`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxdt_core.checkpoint.collective import on_all_ranks, on_this_rank
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import ForeignFormatUnknown
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.plugin import describe_failure
from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.tensor_shards import Listing, LocalShard, TensorSlice

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_KIND = "format"


def recognise(path: Path, kernel: Kernel) -> RegisteredComponent | None:
    """Return the format of the checkpoint at ``path``; None where no installed format recognises it.

    Raises:
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of their plugins.
    """
    if not path.exists():
        return None
    formats = []
    for component in kernel.registry.all(_KIND):
        try:
            if component.load_class(CheckpointFormat)().recognises(path):
                formats.append(component)
            continue
        except NxdtError as error:
            reason = error.what()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = describe_failure(error)
        # The path may be another format's.
        _log.warning("The checkpoint format %r of %s is skipped: %s", component.record.name, component.dist, reason)
    return kernel.registry.choose(_KIND, str(path), formats) if formats else None


def format_of(path: Path, kernel: Kernel) -> str | None:
    """Return the name of what :func:`recognise` returns."""
    component = recognise(path, kernel)
    return None if component is None else component.record.name


def open_checkpoint(
    path: Path, kernel: Kernel, format: str | None = None, *, fill_rows: bool = False
) -> tuple[str, CheckpointReader]:
    """Return the name of the format of the checkpoint at ``path``, and its reader.

    Args:
        path: a directory or file.
        kernel: knows the installed checkpoint formats.
        format: name of the format; None recognises it.
        fill_rows: rows that a table of the vocabulary lacks become the mean of the others, in formats that can do so.

    Raises:
        ForeignFormatUnknown: nothing is there, or nothing that is recognised.
        UnknownComponent: no plugin offers a format of that name.
        NxdtError: its files are missing or damaged.
    """
    if not path.exists():
        raise _unknown(path, kernel, "it does not exist")
    component = recognise(path, kernel) if format is None else kernel.registry.get(_KIND, format)
    if component is None:
        raise _unknown(path, kernel, "no installed format recognises its files")
    chosen = component.load_class(CheckpointFormat)()
    if format is not None and not chosen.recognises(path):
        raise _unknown(path, kernel, f"it is not of the format {format!r}")
    reader = chosen.open(path)
    reader.fill_rows = fill_rows
    return component.record.name, reader


def load_format_into(
    path: Path,
    builder: ModelBuilder,
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | LocalShard],
    *,
    ranks: RankAgreement | None = None,
    fill_rows: bool = False,
    strict: bool = True,
) -> None:
    """Fill parameters in place, in any layout. A rank reads those that it holds a part of, one at a time.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        path: checkpoint of another program, in an installed format.
        builder: knows names and shapes of the whole model.
        kernel: knows the installed checkpoint formats.
        tensors: of this rank by global name, DTensors or shards where they are sharded.
        ranks: of the run; None for a process that is alone.
        fill_rows: as in :func:`open_checkpoint`.
        strict: refuse a checkpoint that lacks parameters of the model or has others.

    Raises:
        ForeignFormatUnknown: nothing there is recognised.
        WeightsDoNotFit: its weights are not those of the model; nothing was read.
    """
    from nxdt_core.checkpoint.read.load import check_model  # imports torch

    def look() -> tuple[CheckpointReader, Listing]:
        reader = open_checkpoint(path, kernel, fill_rows=fill_rows)[1]
        return reader, reader.listing(builder, weights_only=True)

    reader, listing = on_this_rank(ranks, look, where=str(path))
    index = {
        name: TensorEntry(dtype=shard.dtype, shape=shard.shape)
        for (section, name), shard in listing.items()
        if section == "model"
    }
    missing, extra = check_model(index, tensors, ranks, strict=False)
    if missing or extra:
        if strict:
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[], saved=[])
        text = "%s: parameters that it lacks keep their fresh values: %s; those that the model lacks are left out: %s"
        _log.warning(text, path, ", ".join(missing) or "none", ", ".join(extra) or "none")

    def fill() -> None:
        import torch

        from nxdt_core.distributed.placement import local_shard_of

        names = [name for name in index if name in tensors]
        due = reader.read([("model", name) for name in names])
        for name in names:
            local = local_shard_of(tensors[name], name)
            with torch.no_grad():
                local.tensor.copy_(next(due)[local.region.within(TensorSlice.whole(local.shape))])

    on_all_ranks(ranks, fill, where=str(path))


def _unknown(path: Path, kernel: Kernel, reason: str) -> NxdtError:
    formats = [f"{component.record.name}: {component.record.summary}" for component in kernel.registry.all(_KIND)]
    install, unusable = kernel.registry.not_offered(_KIND)
    return ForeignFormatUnknown(path=str(path), reason=reason, formats=formats, install=install, unusable=unusable)
