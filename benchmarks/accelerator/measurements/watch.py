"""A callback that observes a run: memory and kernels of its last steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from accelerator.measurements.watch_plugin import WatchConfig
from nxdt_core.api import Callback, Run
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.models.quantised import QuantisedWeight

__all__ = ["StepMemory", "Watch"]


class Watch(Callback):
    """Writes what it finds to ``watched.json`` in the run's directory."""

    def __init__(self, config: WatchConfig, run_dir: Path) -> None:
        self._config = config
        self._path = run_dir / "watched.json"

    def on_step_end(self, run: Run) -> None:
        """Begin and end what is to be observed."""
        step, device = run.step, run.session.engine.device
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and step in (self._config.after, run.max_steps):
            torch.accelerator.synchronize()
        if step == self._config.after:
            kind = "CPU" if accelerator is None else accelerator.type.upper()  # of a device: its kernels and runtime
            profile_of(device).operations.reset_max_memory(device)
            self._memory = StepMemory(
                run.session.model,
                run.session.optimizer,
                (lambda: 0) if accelerator is None else torch.accelerator.memory_allocated,
                lambda: 0 if accelerator is None else profile_of(device).operations.max_memory_bytes(device) or 0,
            )
            self._profile = profile(activities=[getattr(ProfilerActivity, kind)]).__enter__()
        if step == run.max_steps:
            self._profile.__exit__(None, None, None)
            self._profile.export_chrome_trace(self._config.trace)
            found = {"trace": self._config.trace, "memory": self._memory.parts()}
            self._path.write_text(json.dumps(found), encoding="utf-8")


class StepMemory:
    """Bytes of the coming steps by category, from what exists at the ends of forward and backward.

    Args:
        model: in its layout; its ``run_train`` is wrapped.
        optimizer: over ``model``.
        allocated: returns the bytes of all tensors on the device.
        peak: returns the most of them so far.
    """

    def __init__(self, model: Any, optimizer: Any, allocated: Callable[[], int], peak: Callable[[], int]) -> None:
        self._model, self._inner, self._allocated, self._peak = model, optimizer.inner, allocated, peak
        self._activations = self._computing = 0
        self._seen: set[int] = set()
        self._found: dict[str, int] = {}
        self._run_train = model.run_train
        model.run_train = self._observed
        for module in model.local_modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def parts(self) -> dict[str, int]:
        """Return the bytes by category. ``workspace`` is what else there was at the peak of all steps, ``total``, such
        as logits; it is negative where activations are released before gradients need as much. ``computing`` is the
        peak of forward and backward."""
        parts, total = {**self._found, "activations": self._activations}, self._peak()
        if not total:  # a host counts no tensors
            return self._found
        return {**parts, "workspace": total - sum(parts.values()), "total": total, "computing": self._computing}

    def _before(self, *_: object) -> None:
        self._begun = self._allocated()

    def _after(self, module: torch.nn.Module, *_: object) -> None:
        self._activations = max(self._activations, self._allocated() - self._begun)
        self._seen = set()  # here, since modules may have copies of masters for this step alone
        self._found = {"weights": _new_bytes((*module.parameters(), *module.buffers()), self._seen)}

    def _observed(self, *arguments: Any) -> Any:
        result = self._run_train(*arguments)
        self._computing = self._computing or self._peak()  # of the first step, before its update
        trained = [parameter for _, parameter in self._model.named_parameters()]
        state = [leaf for leaf in tree_leaves(list(self._inner.state.values())) if isinstance(leaf, torch.Tensor)]
        groups = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
        self._found["gradients"] = _new_bytes(gradients, self._seen)
        self._found["optimizer"] = _new_bytes((*trained, *groups, *state), self._seen)
        return result


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages that are not among ``seen``, and add these."""
    held = (
        part
        for each in map(local_of, tensors)
        for part in (each.parts if isinstance(each, QuantisedWeight) else (each,))
    )
    storages = {storage._cdata: storage for storage in (part.untyped_storage() for part in held)}
    new = {key: storage.nbytes() for key, storage in storages.items() if key not in seen}
    seen.update(new)
    return sum(new.values())
