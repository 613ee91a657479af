"""Content of a checkpoint of a run besides its tensors: counters, data position, random-number generators, facts.

With ``checkpoint.save_bf16``, weights are in bfloat16. Where a run updates wider weights (masters, or float32 weights
themselves), the section ``model`` gets them rounded to the nearest, for those who only want a model. The section
``optim`` gets them as they are, under ``<parameter name>/master_weight``, so that a resume is exact.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nxdt_core._version import __version__
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.tensor_shards import LocalShard

if TYPE_CHECKING:
    from nxdt_core.checkpoint.format.manifest import Keep

Tensors = dict[str, torch.Tensor | LocalShard]


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Counters of a run; JSON-able."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    updates: int = 0
    """Optimizer steps at a learning rate above zero."""
    data: dict[str, Any] = field(default_factory=dict)
    """Position of the training data after the last step, as the loader's ``state_dict`` gave it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values for a checkpoint."""
        return asdict(self)

    def update(self, saved: dict[str, Any]) -> None:
        """Take over the values of :meth:`to_dict`; older checkpoints lack some.

        Raises:
            TypeError: a value has another type.
        """
        for name in self.__slots__:
            value = saved.get(name, getattr(self, name))
            if type(value) is not type(getattr(self, name)):
                raise TypeError(f"'{name}' is {value!r}")
            setattr(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """Facts of a checkpoint that a loop adds to its state."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by which retention may rank it."""
    keep: Keep = "regular"
    """Treatment of the checkpoint by retention."""
    fencing: int = 0
    """Number of the ownership under which it is saved; 0 where the store has no owner."""


def seed_all(seed: int, device: torch.device = HOST) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device that torch knows and on ``device``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy global generator: third-party datasets draw from it
    torch.manual_seed(seed)
    profile_of(device).operations.seed(seed)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator that ``seed_all`` seeds, as JSON-able values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    on_device = profile_of(device).operations.rng_state(device)
    return state if on_device is None else {**state, "device": on_device}


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Undo what happened to the generators since ``capture_rng``."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    if "device" in state:
        profile_of(device).operations.set_rng_state(state["device"], device)


def versions_of(kernel: Kernel) -> dict[str, str]:
    """Version by distribution: nxdt-core, torch, and those of the usable plugins."""
    plugins = {plugin.dist: plugin.version for plugin in kernel.plugins if plugin.state == "ok" and plugin.version}
    return {"nxdt-core": __version__, "torch": str(torch.__version__), **plugins}


def free_earlier_runs(device: torch.device) -> None:
    """Free what earlier runs of this process left on an accelerator.

    Their models are in reference cycles, so that they would stay next to this run's until its first step is over.
    """
    profile = profile_of(device)
    if not profile.host and profile.operations.max_memory_bytes(device):
        gc.collect()


def round_to_bfloat16(weights: Tensors, parameters: Collection[str]) -> tuple[Tensors, Tensors]:
    """Round those of ``weights`` that are ``parameters`` and wider than bfloat16.

    The rounded ones are 2 bytes per element of new memory on the device, until they are saved.

    Returns:
        The weights, and those that were rounded, as they were, under the names of optimizer state.
    """
    rounded, masters = dict(weights), Tensors()
    for name, weight in weights.items():
        dtype = (weight.tensor if isinstance(weight, LocalShard) else weight).dtype
        if name in parameters and dtype.is_floating_point and dtype.itemsize > torch.bfloat16.itemsize:
            masters[f"{name}/{MASTER_WEIGHT}"] = weight
            rounded[name] = (
                replace(weight, tensor=weight.tensor.bfloat16())
                if isinstance(weight, LocalShard)
                else weight.bfloat16()
            )
    return rounded, masters
