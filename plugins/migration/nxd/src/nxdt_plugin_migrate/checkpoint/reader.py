"""A checkpoint of NxD Training or NxD Core as one that can be imported, read without NxD, torch-xla or a Neuron device.

Names, layouts and pickles were checked against files that NxD Core 0.18 itself wrote (its ``save_checkpoint``, its
converter for trn1, torch-xla 2.9's ZeRO-1 and xser, on a CPU, one process in the part of every rank). From its sources
alone, and not from files, are: the order of heads on trn2, padded vocabularies, the contents of ``user_content.pt``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.hf.key_map import Source, exchange_of, sources
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box, Listing, ShardInfo, TensorKey
from nxdt_plugin_migrate.checkpoint.layout import find_layout
from nxdt_plugin_migrate.checkpoint.merge import Merger, Stages
from nxdt_plugin_migrate.checkpoint.optimizer import MASTER, OptimizerState, Unmergeable, read_optimizer
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor, RankFile, read_pt
from nxdt_plugin_migrate.errors import NeuronxStateUnread, NeuronxStepUnknown, NeuronxUnreadable

_log = logging.getLogger(__name__)

_STEP = re.compile(r"step=(\d+)")
_SAMPLES = re.compile(r"consumed_samples=(\d+)")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_PADDING = 128
"""Rows of the vocabulary are padded to multiples of as many a rank (``model.make_vocab_size_divisible_by``)."""


class NeuronxCheckpoint:
    """A :class:`~nxdt_core.protocols.format.CheckpointReader`, of ``model_source: hf``.

    Weights are the fp32 master weights where these were saved. Without the optimizer's state, which includes them, it
    can be listed with ``weights_only`` alone.

    Raises:
        NeuronxUnreadable: the directory is none, or has expert-parallel ranks.
        NeuronxUnfinished: its save did not end.
        NeuronxRanksMissing: files of some ranks are not there.
        PickleRefused: ``user_content.pt`` names something that could run code.
        NeuronxFileDamaged: ``user_content.pt`` cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._layout = find_layout(path)
        self._step = _recorded_step(path)
        self.step = self._step or 0
        samples = _SAMPLES.search(path.name)
        self.consumed_samples = int(samples[1]) if samples else 0
        self._reads: dict[TensorKey, Callable[[], torch.Tensor]] = {}

    def model_config(self) -> Mapping[str, Any] | None:
        """Return None: the model's configuration is a file elsewhere, which the run's configuration names."""
        return None

    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """See :class:`~nxdt_core.protocols.format.CheckpointReader`.

        Raises:
            NeuronxStateUnread: the optimizer's state is missing or cannot be merged; not with ``weights_only``.
            NeuronxStepUnknown: nothing says how many steps were done; not with ``weights_only``.
            WeightsDoNotFit: names or shapes are not those of the model.
            NeuronxMisfit: shards do not make up a tensor.
            PickleRefused: a pickle names something that could run code.
            NeuronxFileDamaged: a file cannot be read.
        """
        path, heads = str(self._layout.directory), builder.plan().heads
        if heads is None:
            raise NeuronxUnreadable(path=path, reason="the model's plan has no attention heads to merge")
        weights = self._weights()
        optimizer = self._optimizer(weights, weights_only)
        merger = Merger(heads, path)
        found = {"weights": merger.merge(weights)}
        if optimizer is not None:
            found |= {name: merger.merge(stages) for name, stages in optimizer.families.items()}
        model = found.pop("weights")
        model = found.pop(MASTER, model)
        if weights_only:
            found.clear()
        wanted = sources(builder)
        self._check_names(wanted, model, exchange_of(builder).hf_ignored)
        listing: dict[TensorKey, ShardInfo] = {}
        for source in wanted:
            listing["model", source.name] = self._offer(("model", source.name), source, model)
            for name, leaves in found.items():
                place = ("optim", f"{source.name}/{name}")
                listing[place] = self._offer(place, source, leaves)
            if found and optimizer is not None and optimizer.step is not None:
                place = ("optim", f"{source.name}/step")
                steps = torch.tensor(optimizer.step)
                self._reads[place] = steps.clone
                listing[place] = _held(steps.dtype, ())
        return listing

    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        """See :class:`~nxdt_core.protocols.format.CheckpointReader`.

        Raises:
            NeuronxReplicasDiffer: ranks that should hold the same do not.
            NeuronxFileDamaged, PickleRefused: a file cannot be read.
        """
        for place in places:
            yield self._reads[place]().contiguous()

    def _weights(self) -> Stages:
        layout = self._layout
        stages = []
        for pp in range(layout.pp):
            files = [RankFile(layout.model_file(tp, pp)) for tp in range(layout.tp)]
            stages.append(
                [{str(name): file.leaf(str(name), each) for name, each in file.content.items()} for file in files]
            )
        return stages

    def _optimizer(self, weights: Stages, weights_only: bool) -> OptimizerState | None:
        path = str(self._layout.directory)
        try:
            state = read_optimizer(self._layout, weights)
        except Unmergeable as reason:
            if not weights_only:
                raise NeuronxStateUnread(path=path, reason=str(reason)) from reason
            _log.warning("The optimizer's state of '%s', master weights included, is not read: %s.", path, reason)
            return None
        if state is not None and self._step is None and not weights_only:
            raise NeuronxStepUnknown(path=path)
        return state

    def _check_names(self, wanted: Sequence[Source], model: Mapping[str, LazyTensor], ignored: tuple[str, ...]) -> None:
        names = {name for source in wanted for name in source.hf_names}
        missing = sorted(names - model.keys())
        extra = sorted(name for name in model.keys() - names if not matches_any(ignored, name))
        if missing or extra:
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[], directory=str(self._layout.directory))
        absent = next((name for name in sorted(names) if not model[name].stored), None)
        if absent is not None:
            raise model[absent].misfit("its tensor is in no file")

    def _offer(self, place: TensorKey, source: Source, leaves: Mapping[str, LazyTensor]) -> ShardInfo:
        """Remember how to read the parameter at ``place``."""
        own = {each.name: self._fitted(leaves[each.name], each.shape, source) for each in source.tensors()}
        self._reads[place] = lambda: source.read(lambda name: own[name].read())
        return _held(own[source.hf_names[0]].dtype, source.shape)

    def _fitted(self, leaf: LazyTensor, shape: tuple[int, ...], source: Source) -> LazyTensor:
        """The leaf in the shape that the model wants, without rows that pad the vocabulary."""
        surplus = leaf.shape[0] - shape[0] if leaf.shape and shape else 0
        if leaf.name.endswith(_VOCABULARY) and 0 < surplus < _PADDING * self._layout.tp:
            leaf = leaf.rows(0, shape[0], leaf.name)
        if leaf.shape != shape:
            wrong = [f"{source.name}: {leaf.shape} instead of {shape}"]
            raise WeightsDoNotFit(missing=[], extra=[], shapes=wrong, directory=str(self._layout.directory))
        return leaf


def _held(dtype: torch.dtype, shape: tuple[int, ...]) -> ShardInfo:
    return ShardInfo(dtype=str(dtype).removeprefix("torch."), shape=shape, box=Box.whole(shape))


def _recorded_step(path: Path) -> int | None:
    """Return the number of steps done, as user_content.pt or the directory's name has it; None if neither does."""
    content = path / "user_content.pt"
    recorded = read_pt(content) if content.is_file() else {}
    step = recorded.get("global_step") if isinstance(recorded, dict) else None
    named = _STEP.search(path.name)
    if type(step) is int and step >= 0:
        return step
    return int(named[1]) if named else None
