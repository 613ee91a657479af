"""An exponential moving average of the weights (``exp_manager.ema``), laid out as the weights are.

It is kept in float32 for weights of any dtype: at a decay of 0.999 an update is a thousandth of a difference, which
bfloat16 would round away. In a checkpoint it is optimizer state, ``<parameter name>/ema``, so that it moves between
layouts as that does.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nxdt_core.config.schema import EmaConfig
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.placement import local_of, local_shard_of
from nxdt_core.errors.checkpoints import CheckpointHasNoAverage
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.tensor_shards import LocalShard

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest
    from nxdt_core.checkpoint.format.tensor_index import TensorEntry


AVERAGE = "ema"
"""Optimizer state ``<parameter name>/ema``: the exponential moving average of that weight, in float32."""
AVERAGE_BYTES = 4
"""An element of the average."""
_SUFFIX = f"/{AVERAGE}"
_BUCKET_ELEMENTS = 2**25
"""Weights that are not in float32 are converted so many at a time: 128 MiB."""


class WeightAverage:
    """The average of what a run trains; each rank holds that of its shards, 4 bytes per element.

    As in ``torch.optim.swa_utils`` it begins as the weights after its first update, and then moves by
    ``1 - decay`` of the difference. An element is computed identically in every layout.

    Example::

        average = WeightAverage(EmaConfig(enable=True, decay=0.99))
        for step, batch in enumerate(batches, start=1):
            train_step(…)
            average.after_step(model, step)
    """

    def __init__(self, config: EmaConfig) -> None:
        self._config = config
        self._update = get_ema_multi_avg_fn(config.decay)  # type: ignore[no-untyped-call]
        self._shards: dict[str, LocalShard] = {}
        self._trained: frozenset[str] | None = None

    def __bool__(self) -> bool:
        """Return whether there is an average yet."""
        return bool(self._shards)

    def after_step(self, model: ParallelModel, step: int) -> None:
        """Update it, where one is due after ``step`` optimizer steps."""
        if step >= self._config.start_step and step % self._config.apply_ema_every_n_steps == 0:
            weights = self._weights_of(model)
            fresh = {name: weight for name, weight in weights.items() if name not in self._shards}
            for names in buckets(self._shards, lambda name: weights[name].numel(), _BUCKET_ELEMENTS):
                averages = [self._shards[name].tensor for name in names]
                self._update(averages, [weights[name].float() for name in names], 0)
            places = model.state_dict() if fresh else {}
            for name, weight in fresh.items():
                self._shards[name] = replace(
                    local_shard_of(places[name], name), tensor=weight.to(torch.float32, copy=True)
                )

    def swap_in(self, model: ParallelModel) -> dict[str, LocalShard]:
        """Put the average in the weights' place, and return these; the model's ``load_state_dict`` puts them back, bit
        for bit."""
        weights = self._weights_of(model)
        before = {name: replace(shard, tensor=weights[name].clone()) for name, shard in self._shards.items()}
        model.load_state_dict(self._shards, strict=False)
        return before

    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Return the average under the names of optimizer state."""
        return {f"{name}{_SUFFIX}": shard for name, shard in self._shards.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard]) -> None:
        """Continue with what :func:`pop_average` returned; parameters that it lacks begin with the next update."""
        self._shards = {name: local_shard_of(tensor, name) for name, tensor in state.items()}

    def _weights_of(self, model: ParallelModel) -> dict[str, torch.Tensor]:
        """This rank's elements of the trained weights, in their own memory."""
        if self._trained is None:
            self._trained = frozenset(name for name, weight in model.named_parameters() if weight.requires_grad)
        trained = {name: weight for name, weight in model.state_dict().items() if name in self._trained}
        return {
            name: weight.tensor if isinstance(weight, LocalShard) else local_of(weight)
            for name, weight in trained.items()
        }


def pop_average(state: MutableMapping[str, torch.Tensor | LocalShard]) -> dict[str, torch.Tensor | LocalShard]:
    """Take an average out of optimizer state as it was loaded; by name of the parameter."""
    return {key.removesuffix(_SUFFIX): state.pop(key) for key in list(state) if key.endswith(_SUFFIX)}


def has_average(manifest: Manifest) -> bool:
    """Return whether the run kept one."""
    return any(key.endswith(f"/{AVERAGE}") for key in manifest.tensors.get("optim", {}))


def average_index(manifest: Manifest, *, where: str) -> Mapping[str, TensorEntry]:
    """Return the model's tensors by name, those with an average replaced by it; the others were not trained.

    Raises:
        CheckpointHasNoAverage: there is none; ``where`` names the checkpoint.
    """
    if not has_average(manifest):
        raise CheckpointHasNoAverage(where=where)
    state = manifest.tensors["optim"]
    return {name: state.get(f"{name}/{AVERAGE}", entry) for name, entry in manifest.tensors.get("model", {}).items()}
