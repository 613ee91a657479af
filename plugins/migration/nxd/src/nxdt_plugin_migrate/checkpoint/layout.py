"""The format ``neuronx``: names and markers of the files of a checkpoint of NxD. No torch, nothing is opened.

::

    <tag>/checkpoint  <tag>/done                              markers: begun, finished
    <tag>/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt           one tensor-parallel rank of one pipeline stage
    <tag>/model/dp_rank_00_ep_rank_EE_tp_rank_TT_pp_rank_PP.pt   instead, of one expert-parallel rank
    <tag>/model/….pt.tensors/tensor_<n>.pt  ….pt.info.pt      next to it under ``save_xser``
    <tag>/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt           DD counts under ZeRO-1
    <tag>/user_content.pt                                     what the trainer added

NxD's converter writes ``model/`` alone, without markers. (NxD Core, ``trainer/checkpoint.py``; checked with files
of 0.18.) The older functions of ``parallel_layers/checkpointing.py`` write into one directory, without markers::

    tp_rank_TT_pp_rank_PP/checkpoint.pt                       the model under the key ``model``, and the caller's values
    tp_rank_TT_pp_rank_PP  ….tensors/tensor_<n>.pt            the same under ``save_xser``
    optim.dp_rank_DD.tp_rank_TT…                              state of the optimizer, which is not read
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing
from nxdt_plugin_migrate.errors import NeuronxRanksMissing, NeuronxUnfinished, NeuronxUnreadable

_MODEL = (
    "model/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt",
    "model/dp_rank_{dp:02d}_ep_rank_{ep:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt",
)
_OPTIMIZER = tuple(style.replace("model/", "optim/") for style in _MODEL)
_OLDER = (
    "tp_rank_{tp:02d}_pp_rank_{pp:02d}/checkpoint.pt",
    "tp_rank_{tp:02d}_pp_rank_{pp:02d}",
    "tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt",
)
_OF_RUNS = ("checkpoint", "done", "optim", "user_content.pt")
"""Entries that runs write and NxD's converter does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronxLayout:
    """The ranks of one checkpoint."""

    directory: Path
    tp: int
    pp: int
    ep: int
    template: str
    """Name of a rank's weights in the directory, of ``dp``, ``tp``, ``pp`` and ``ep``."""
    optimizer_dp: int
    """Data-parallel ranks that wrote a share of the optimizer's state; 0 where there is none."""
    of_run: bool
    """True if a run saved it. NxD's converter leaves neither markers nor anything but ``model/``."""
    older: bool = False
    """True if ``parallel_layers/checkpointing.py`` wrote it."""

    def model_name(self, tp: int, pp: int, ep: int = 0) -> str:
        """Return the name of the file with the weights of a rank, relative to the directory."""
        return self.template.format(dp=0, tp=tp, pp=pp, ep=ep)

    def optimizer_file(self, dp: int, tp: int, pp: int) -> Path:
        """Return the file with the optimizer state of a rank."""
        return self.directory / _OPTIMIZER[0].format(dp=dp, tp=tp, pp=pp)

    def of_other_ranks(self, *, tp: int, pp: int, ep: int) -> NxdtError:
        """Return the error that the files are not those of ``tp`` by ``pp`` by ``ep`` ranks, as the weights show."""
        theirs, ours = _grid(tp, pp, ep), _grid(self.tp, self.pp, self.ep)
        if surplus := [self.model_name(*rank) for rank in ours if rank not in theirs]:
            return _extra(self.directory, surplus, f"its weights are those of {tp} by {pp} by {ep} ranks")
        missing = [self.model_name(*rank) for rank in theirs if rank not in ours]
        return NeuronxRanksMissing(path=str(self.directory), tp=tp, pp=pp, files=missing)


def is_neuronx(path: Path) -> bool:
    """Return whether ``path`` is such a checkpoint, or a directory of some."""
    return _is_one(path) or bool(_tags(path))


def find_layout(path: Path) -> NeuronxLayout:
    """Return the layout of the checkpoint at ``path``.

    Raises:
        NeuronxUnreadable: it is none, or has files of ranks that cannot be of one save.
        NeuronxUnfinished: its save did not end.
        NeuronxRanksMissing: files of some ranks are not there.
    """
    if not _is_one(path):
        tags = _tags(path)
        reason = (
            f"it holds several: {', '.join(tags[:8])}" if tags else "it has no model/dp_rank_…_tp_rank_…_pp_rank_….pt"
        )
        raise NeuronxUnreadable(path=str(path), reason=reason)
    if (path / "checkpoint").exists() and not (path / "done").exists():
        raise NeuronxUnfinished(path=str(path))
    model, optimizer = _ranks(path, _MODEL) or _ranks(path, _OLDER), _ranks(path, _OPTIMIZER)
    ((template, _),) = Counter(style for style, _ in model.values()).most_common(1)
    if surplus := sorted(name for name, (style, rank) in model.items() if rank["dp"] or style != template):
        raise _extra(path, surplus, "they are not named as the files of the other ranks")
    ranks, older = [rank for _, rank in (*model.values(), *optimizer.values())], template in _OLDER
    tp, pp, ep = (1 + max(rank[dimension] for rank in ranks) for dimension in ("tp", "pp", "ep"))
    layout = NeuronxLayout(
        directory=path,
        tp=tp,
        pp=pp,
        ep=ep,
        template=template,
        optimizer_dp=max((1 + rank["dp"] for _, rank in optimizer.values()), default=0),
        of_run=older or any((path / name).exists() for name in _OF_RUNS),
        older=older,
    )
    missing = [name for rank in _grid(tp, pp, ep) if not (path / (name := layout.model_name(*rank))).is_file()]
    if missing:
        raise NeuronxRanksMissing(path=str(path), tp=tp, pp=pp, files=missing)
    return layout


def _extra(path: Path, files: list[str], reason: str) -> NxdtError:
    return NeuronxUnreadable(path=str(path), reason=f"it has files of ranks too many ({listing(files)}): {reason}")


def _grid(tp: int, pp: int, ep: int) -> list[tuple[int, int, int]]:
    """Return (tp, pp, ep) of all ranks."""
    return [(t, p, e) for p in range(pp) for t in range(tp) for e in range(ep)]


def _is_one(path: Path) -> bool:
    return bool(_ranks(path, (*_MODEL, *_OLDER)))


def _tags(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if _is_one(entry)) if path.is_dir() else []


def _ranks(path: Path, styles: Sequence[str]) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the style and the ranks of each file whose name is of one of the styles, by its name in the directory."""
    files: dict[str, tuple[str, dict[str, int]]] = {}
    for style in styles:
        pattern = re.compile(re.sub(r"\{(\w+):02d\}", r"(?P<\1>\\d{2,})", style.replace(".", r"\.")))
        for file in path.glob(re.sub(r"\{.*?\}", "*", style)):
            match = pattern.fullmatch(file.relative_to(path).as_posix())
            if match is not None and file.is_file():
                ranks = {dimension: int(rank) for dimension, rank in match.groupdict().items()}
                files[match[0]] = (style, {"dp": 0, "ep": 0, **ranks})
    return files
