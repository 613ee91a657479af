"""A checkpoint of NxD Training or NxD Core as one that can be imported, read without NxD, torch-xla or a Neuron device.

Names, layouts and pickles were checked against files that NxD Core 0.18 itself wrote (its ``save_checkpoint``, its
converter, torch-xla 2.9's ZeRO-1 and xser, on a CPU, one process in the part of every rank). From its sources alone,
and not from files, are: padded vocabularies, the contents of ``user_content.pt``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.hf.key_map import Source, sources
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.format import CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tensor_shards import Listing, ShardInfo, TensorKey, TensorSlice
from nxdt_core.system.regular_files import read_text
from nxdt_plugin_migrate.checkpoint.layout import find_layout
from nxdt_plugin_migrate.checkpoint.merge import Merger
from nxdt_plugin_migrate.checkpoint.optimizer import MASTER, OptimizerState, Unmergeable, read_optimizer
from nxdt_plugin_migrate.checkpoint.rank_tensors import (
    GPT_KEYS,
    MEGATRON,
    Stages,
    adapted,
    expert_ranks_joined,
    is_adapted,
    renamed,
    scaling_of,
)
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor, RankFile, read_pt
from nxdt_plugin_migrate.errors import (
    NeuronxFileDamaged,
    NeuronxStateUnread,
    NeuronxStepUnknown,
    NeuronxUnreadable,
)

_log = logging.getLogger(__name__)

_STEP = re.compile(r"step=(\d+)")
_SAMPLES = re.compile(r"consumed_samples=(\d+)")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_FUSED = ("query_key_value.weight", "key_value.weight")
_DOWN, _OUTPUT = ("down_proj.weight", ".w2.weight"), "o_proj.weight"
_LAYER, _EXPERT = re.compile(r"\.layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")
_PADDING = 128
"""Rows of the vocabulary are padded to multiples of as many a rank (``model.make_vocab_size_divisible_by``)."""


class NeuronxCheckpoint(CheckpointReader):
    """A :class:`~nxdt_core.protocols.format.CheckpointReader`, of ``model_source: hf`` and ``megatron``.

    Weights are the fp32 master weights where these were saved. Without the optimizer's state, which includes them, it
    can be listed with ``weights_only`` alone. An adapter without the weights below is added to those at :attr:`base`
    (:class:`~nxdt_core.protocols.format.CheckpointReader`).

    Raises:
        NeuronxUnreadable: the directory is none, or has files of ranks that cannot be of one save.
        NeuronxUnfinished: its save did not end.
        NeuronxRanksMissing: files of some ranks are not there.
        PickleRefused: ``user_content.pt`` names something that could run code.
        NeuronxFileDamaged: ``user_content.pt`` cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._layout = find_layout(path)
        # The number of steps done is in user_content.pt or in the directory's name.
        content, named = path / "user_content.pt", _STEP.search(path.name)
        recorded = read_pt(content) if content.is_file() else {}
        step = recorded.get("global_step") if isinstance(recorded, dict) else None
        self._step = step if type(step) is int and step >= 0 else int(named[1]) if named else None
        self.step = self._step or 0
        samples = _SAMPLES.search(path.name)
        self.consumed_samples = int(samples[1]) if samples else 0
        self._reads: dict[TensorKey, Callable[[], torch.Tensor]] = {}
        self._adapted = self._alone = False

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
        megatron = any(MEGATRON in name for stage in weights for rank in stage for name in rank)
        gpt = megatron and "embedding.tokens" in builder.plan().tensor
        parameters = sources(builder, GPT_KEYS) if gpt else sources(builder)
        shapes = {tensor.name: tensor.shape for source in parameters for tensor in source.tensors()}
        # A model of Megatron's that trains has the rows of a head adjacent. NxD's converter writes those of all queries
        # of a rank first, which is the same only where a rank has one head.
        fused = any(name.endswith(_FUSED) for stage in weights for rank in stage for name in rank)
        if fused and not self._layout.of_run and heads.kv_heads > self._layout.tp:
            reason = "nothing shows whether a run of 'model_source: megatron' or NxD's converter wrote it, and these "
            reason += "differ in the order of heads; copy the run's markers 'checkpoint' and 'done' next to model/, or "
            reason += "import the Hugging Face model that was converted"
            raise NeuronxUnreadable(path=path, reason=reason)
        self._check_ranks(weights, shapes)
        optimizer = self._optimizer(weights, weights_only)
        merger = Merger(heads, shapes, path)
        model, optimizer_families = merger.merge(weights), {} if optimizer is None else optimizer.families
        families = {name: merger.merge(stages) for name, stages in optimizer_families.items()}
        model = families.pop(MASTER, model)
        if weights_only:
            families.clear()
        if self._alone:
            return self._over_base(builder, parameters, model)
        names = {name for source in parameters for name in source.hf_names}
        missing = sorted(names - model.keys())
        extra = sorted(name for name in model.keys() - names if not matches_any(builder.hf_ignored, name))
        if missing or extra:
            where = model[extra[0]].where if extra else path
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[], directory=where)
        absent = next((name for name in sorted(names) if not model[name].stored), None)
        if absent is not None:
            raise model[absent].misfit("its tensor is in no file")
        listing: dict[TensorKey, ShardInfo] = {}
        for source in parameters:
            listing["model", source.name] = self._offer(("model", source.name), source, model)
            for name, leaves in families.items():
                place = ("optim", f"{source.name}/{name}")
                listing[place] = self._offer(place, source, leaves)
            if families and optimizer is not None and optimizer.step is not None:
                place = ("optim", f"{source.name}/step")
                steps = torch.tensor(optimizer.step)
                self._reads[place] = steps.clone
                listing[place] = _whole(steps.dtype, ())
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
        beside = layout.directory / "adapter_config.json"
        try:
            lora: object = json.loads(read_text(beside)) if beside.exists() else None
        except (OSError, ValueError) as error:
            raise NeuronxFileDamaged(path=str(beside), reason=str(error)) from error
        stages: list[list[Mapping[str, LazyTensor]]] = []
        for pp in range(layout.pp):
            stages.append([])
            for tp in range(layout.tp):
                rank, config = self._rank(tp, pp)
                lora = config or lora
                stages[-1].append(rank)
        names = [name for stage in stages for rank in stage for name in rank]
        self._adapted, self._alone = any(map(is_adapted, names)), all(".lora_" in name for name in names)
        if not self._adapted:
            return stages
        return [adapted(stage, scaling_of(lora), alone=self._alone) for stage in stages]

    def _rank(self, tp: int, pp: int) -> tuple[Mapping[str, LazyTensor], object]:
        """Return what one tensor-parallel rank of a stage saved, in a file of each expert-parallel rank, and its
        ``lora_config``."""
        ranks: list[dict[str, LazyTensor]] = []
        lora: object = None
        for ep in range(self._layout.ep):
            file = RankFile(self._layout.directory / self._layout.model_name(tp, pp, ep))
            content = file.content["model"] if isinstance(file.content.get("model"), dict) else file.content
            lora = content.get("lora_config") or lora
            tensors = {name: value for name, value in content.items() if name != "lora_config"}
            ranks.append({str(name): file.leaf(str(name), value) for name, value in tensors.items()})
        return ranks[0] if len(ranks) == 1 else expert_ranks_joined(ranks), lora

    def _over_base(
        self, builder: ModelBuilder, parameters: Sequence[Source], model: Mapping[str, LazyTensor]
    ) -> Listing:
        """List the weights below the adapter, with its updates, which ``model`` has."""
        path = str(self._layout.directory)
        if self.base is None:
            reason = (
                "it holds an adapter without the weights below; checkpoint.resume_from of --config has to name them"
            )
            raise NeuronxUnreadable(path=path, reason=reason)
        below = self.base()
        listing = dict(below.listing(builder, weights_only=True))
        names = {name for source in parameters for name in source.hf_names}
        if extra := sorted(model.keys() - names):
            raise WeightsDoNotFit(missing=[], extra=extra, shapes=[], directory=model[extra[0]].where)
        for source in parameters:
            place = ("model", source.name)
            updates = {tensor.name: tensor for tensor in source.tensors() if tensor.name in model}
            leaves = {name: self._fitted(model[name], update.shape, source) for name, update in updates.items()}
            self._reads[place] = partial(_updated, below, place, source, leaves)
            for leaf in leaves.values():
                dtype = torch.promote_types(getattr(torch, listing[place].dtype), leaf.dtype)
                listing[place] = _whole(dtype, source.shape)
        return listing

    def _check_ranks(self, weights: Stages, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See that the files are those of all ranks, as the model's sizes show where they agree."""
        layout, first, last = self._layout, renamed(weights[0][0], shapes), renamed(weights[-1][0], shapes)
        counts = set()  # ranks that share the columns of a matrix, where the sizes show it
        for names in (_DOWN, (_OUTPUT,)):
            whole = next((shape[1] for name, shape in shapes.items() if name.endswith(names)), 0)
            part = next((leaf.shape[1] for name, leaf in first.items() if name.endswith(names) and leaf.shape[1:]), 0)
            counts |= {whole // part} if part and whole % part == 0 else set()
        counts -= {0}
        tp = counts.pop() if len(counts) == 1 else layout.tp
        ends = "model.norm.weight" in shapes and "model.norm.weight" not in last and not self._alone
        pp = layout.pp + (ends or (self._alone and _highest(_LAYER, last) < _highest(_LAYER, shapes)))
        local_experts, experts = _highest(_EXPERT, first) // layout.ep, _highest(_EXPERT, shapes)
        ep = experts // local_experts if local_experts and not experts % local_experts else layout.ep
        if (tp, pp, ep) != (layout.tp, layout.pp, layout.ep):
            raise layout.of_other_ranks(tp=tp, pp=pp, ep=ep)

    def _optimizer(self, weights: Stages, weights_only: bool) -> OptimizerState | None:
        path = str(self._layout.directory)
        try:
            if self._adapted:
                raise Unmergeable("it is that of an adapter, whose updates are added to the weights")
            state = read_optimizer(self._layout, weights)
        except Unmergeable as reason:
            if not weights_only:
                raise NeuronxStateUnread(path=path, reason=str(reason)) from reason
            _log.warning("The optimizer's state of '%s', master weights included, is not read: %s.", path, reason)
            return None
        if state is not None and self._step is None and not weights_only:
            raise NeuronxStepUnknown(path=path)
        return state

    def _offer(self, place: TensorKey, source: Source, leaves: Mapping[str, LazyTensor]) -> ShardInfo:
        """Remember how to read the parameter at ``place``."""
        fitted = {tensor.name: self._fitted(leaves[tensor.name], tensor.shape, source) for tensor in source.tensors()}
        self._reads[place] = lambda: source.read(lambda name: fitted[name].read())
        return _whole(fitted[source.hf_names[0]].dtype, source.shape)

    def _fitted(self, leaf: LazyTensor, shape: tuple[int, ...], source: Source) -> LazyTensor:
        """Return the leaf in the shape that the model has, without rows that pad the vocabulary."""
        surplus = leaf.shape[0] - shape[0] if leaf.shape and shape else 0
        if leaf.name.endswith(_VOCABULARY) and 0 < surplus < _PADDING * self._layout.tp:
            leaf = leaf.rows(0, shape[0], leaf.name)
        if leaf.shape != shape:
            wrong = [f"{source.name}: {leaf.shape} instead of {shape}"]
            raise WeightsDoNotFit(missing=[], extra=[], shapes=wrong, directory=str(self._layout.directory))
        return leaf


def _updated(
    below: CheckpointReader, place: TensorKey, source: Source, leaves: Mapping[str, LazyTensor]
) -> torch.Tensor:
    """Return a parameter of the base with the updates of ``leaves``, where it has some."""
    (weight,) = below.read([place])
    if not leaves:
        return weight
    shapes = {tensor.name: tensor.shape for tensor in source.tensors()}
    return weight + source.read(lambda name: leaves[name].read() if name in leaves else torch.zeros(shapes[name]))


def _highest(number: re.Pattern[str], names: Iterable[str]) -> int:
    """Return one more than the highest number of a layer or an expert in ``names``; 0 without one."""
    return max((1 + int(match[1]) for match in map(number.search, names) if match), default=0)


def _whole(dtype: torch.dtype, shape: tuple[int, ...]) -> ShardInfo:
    return ShardInfo(dtype=str(dtype).removeprefix("torch."), shape=shape, region=TensorSlice.whole(shape))
