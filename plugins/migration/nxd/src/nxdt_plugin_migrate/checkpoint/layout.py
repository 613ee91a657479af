"""Which files a checkpoint of NxD consists of: names and markers, nothing is opened.

::

    <tag>/checkpoint  <tag>/done                              markers: begun, finished
    <tag>/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt           one tensor-parallel rank of one pipeline stage
    <tag>/model/….pt.tensors/tensor_<n>.pt  ….pt.info.pt      next to it under ``save_xser``
    <tag>/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt           DD counts under ZeRO-1
    <tag>/user_content.pt                                     what the trainer added

NxD's converter writes ``model/`` alone, without markers. (NxD Core, ``trainer/checkpoint.py``; checked with files
of 0.18.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nxdt_plugin_migrate.errors import NeuronxRanksMissing, NeuronxUnfinished, NeuronxUnreadable

_RANK = re.compile(r"dp_rank_(\d{2,})(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")

_OF_RUNS = ("checkpoint", "done", "optim", "user_content.pt")
"""What NxD's converter does not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronxLayout:
    """The ranks of one checkpoint."""

    directory: Path
    tp: int
    pp: int
    optimizer_dp: int
    """Data-parallel ranks that wrote a share of the optimizer's state; 0 where there is none."""
    of_run: bool
    """Whether a run saved it. NxD's converter leaves neither markers nor anything but ``model/``."""

    def model_file(self, tp: int, pp: int) -> Path:
        """Return the weights of a rank."""
        return self.directory / "model" / _name(0, tp, pp)

    def optimizer_file(self, dp: int, tp: int, pp: int) -> Path:
        """Optimizer state of a rank."""
        return self.directory / "optim" / _name(dp, tp, pp)


def is_neuronx(path: Path) -> bool:
    """Return whether ``path`` is such a checkpoint, or a directory of some."""
    return _is_one(path) or bool(_tags(path))


def find_layout(path: Path) -> NeuronxLayout:
    """Return the layout of the checkpoint at ``path``.

    Raises:
        NeuronxUnreadable: it is none, or has expert-parallel ranks.
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
    ranks = _ranks(path / "model")
    if any(expert for _, expert, _, _ in ranks):
        raise NeuronxUnreadable(path=str(path), reason="its experts are spread over expert-parallel ranks")
    optimizer = _ranks(path / "optim")
    tp, pp = (1 + max(rank[at] for rank in (*ranks, *optimizer)) for at in (2, 3))
    wanted = [f"model/{_name(0, t, p)}" for p in range(pp) for t in range(tp)]
    missing = [name for name in wanted if not (path / name).is_file()]
    if missing:
        raise NeuronxRanksMissing(path=str(path), tp=tp, pp=pp, files=missing)
    optimizer_dp = max((1 + dp for dp, _, _, _ in optimizer), default=0)
    of_run = any((path / name).exists() for name in _OF_RUNS)
    return NeuronxLayout(directory=path, tp=tp, pp=pp, optimizer_dp=optimizer_dp, of_run=of_run)


def _is_one(path: Path) -> bool:
    return bool(_ranks(path / "model"))


def _tags(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.is_dir() and _is_one(each)) if path.is_dir() else []


def _ranks(folder: Path) -> list[tuple[int, int, int, int]]:
    """Data-, expert- and tensor-parallel rank and pipeline stage of each file."""
    names = (each.name for each in folder.iterdir()) if folder.is_dir() else ()
    matches = (_RANK.fullmatch(name) for name in names)
    return [(int(m[1]), int(m[2] or 0), int(m[3]), int(m[4])) for m in matches if m is not None]


def _name(dp: int, tp: int, pp: int) -> str:
    return f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
