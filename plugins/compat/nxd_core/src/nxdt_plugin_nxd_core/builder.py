"""A caller's own module: a call of it as data, its builder, its forward on one pipeline stage, and its loss.

The whole forward of the module runs on every stage, with three changes. What the stage before sent replaces the input
of the stage's first layer. Layers of other stages pass their input on. Behind the stage's last layer the forward ends.
So the code around the layers, such as that of positions and masks, needs no change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, cast, final

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from nxdt_core.models.step_boundary import called_with_step, step_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.plan import ParallelPlan, PipelinePlan
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd_core import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBatch(Batch):
    """One micro-batch: the arguments of a forward of the caller's module."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallBatch:
        """Return the batch of a call; its first tensor counts the rows."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        first = next(tensors, torch.zeros(1, 1, dtype=torch.int64))
        return cls(input_ids=first, labels=first, args=args, kwargs=kwargs)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CallBatch:
        """Return the batch with its tensors changed, those within lists and dictionaries, too."""
        changed = CallBatch.of(*tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs))))
        return replace(changed, first_row=self.first_row)

    def arguments(self) -> dict[str, Any]:
        """Return the batch itself, whose arguments the module's forward takes."""
        return {"call": self}


def split(call: CallBatch, micro_batches: int) -> list[CallBatch]:
    """Split the rows of a call; what does not have as many rows goes to each micro-batch."""
    if micro_batches == 1:
        return [call]
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor)]
    rows = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
    if rows == 0 or rows % micro_batches:
        raise errors.BatchDoesNotDivide(rows=rows, micro_batches=micro_batches)

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.chunk(micro_batches)[number] if tensor.ndim and len(tensor) == rows else tensor

    return [call.map(partial(part, number=number)) for number in range(micro_batches)]


class ModelLoss(Objective):
    """The objective of a model that computes its loss itself: the mean over micro-batches of all data parallel ranks.

    Its ``config`` is the place of the loss in what the model returns; see :func:`loss_in`.
    """

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return 1: micro-batches count equally."""
        return torch.ones(())

    def __call__(self, logits: Any, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """Return the loss in what the model returned."""
        loss = loss_in(logits, self.config)
        return ObjectiveOutput(loss_sum=loss, weight=torch.ones_like(loss.detach()))


def loss_in(output: Any, where: Any = None) -> torch.Tensor:
    """Return the loss in what a model returned.

    Args:
        output: a scalar, a tuple or list that begins with one, or an object with ``loss``.
        where: ``output_loss_value_spec``: True in the place of the loss.
    """
    if where is None and not isinstance(output, torch.Tensor):
        named = isinstance(output, Mapping) or getattr(output, "loss", None) is not None
        where = {"loss": True} if named else (True,)
    value, place = output, where
    while isinstance(place, Mapping | tuple | list):
        places = place.items() if isinstance(place, Mapping) else enumerate(place)
        key, place = next(((key, here) for key, here in places if here), cast(Any, (None, None)))
        try:
            value = value[key] if isinstance(value, Mapping | tuple | list) else getattr(value, str(key))
        except (LookupError, TypeError, AttributeError):
            value = None
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise errors.LossNotFound(found=shape)
    return value.reshape(())


def scaled_gradients(output: Any, ranks: int) -> Any:
    """Return ``output`` with gradients divided by ``ranks``, so that their sum over the ranks is their mean.

    Raises:
        OutputNotTensors: tensors that need gradients may be in what cannot be looked into.
    """

    def scaled(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value = value.view_as(value)  # the gradients of other uses within the module stay as they are
                value.register_hook(lambda grad: grad * (1 / ranks))
            return value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: tree_map(scaled, getattr(value, f.name)) for f in fields(value)})
        if value is None or isinstance(value, int | float | str | bytes | torch.Size | torch.dtype):
            return value
        raise errors.OutputNotTensors(found=type(value).__name__, ranks=ranks)

    return output if ranks == 1 else tree_map(scaled, output)


class ModuleBuilder(ModelBuilder):
    """The builder of a module that exists: the module and its plan come from ``initialize_parallel_model``."""

    vocab_size = 0

    def __init__(
        self, config: Any, module: nn.Module | None = None, plan: ParallelPlan | None = None, where: Any = None
    ) -> None:
        if module is None or plan is None:
            raise errors.ModelFnReturnsNoModule(found="nothing, since only a program that calls it has one")
        self.module, self._plan, self._where = module, plan, where

    def build(self) -> nn.Module:
        """Return a copy of the module without memory, whose forward takes a :class:`CallBatch`.

        On the last stage of a pipeline it gives the loss.
        """
        memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in self.module.buffers()}
        for parameter in self.module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        model = copy.deepcopy(self.module, memo)
        original: Any = type(model).forward
        pipeline, where, buffers = self._plan.pipeline, self._where, dict(self.module.named_buffers())
        if pipeline is not None:  # the engine takes layers out of a dictionary, which keeps the numbers of the others
            layers = model.get_submodule(pipeline.layers)
            numbered = {str(number): child for number, child in enumerate(layers.children())}
            model.set_submodule(pipeline.layers, nn.ModuleDict(numbered))
            before = ((name, model.get_submodule(name)) for name in pipeline.first)
            widths = {name: part.embedding_dim for name, part in before if isinstance(part, nn.Embedding)}
            kind, total = type(layers), len(numbered)

        def forward(module: Any, received: torch.Tensor, *, call: CallBatch, step: StepContext | None = None) -> Any:
            """Run the caller's forward; ``received`` are the hidden states of the stage before."""
            run = partial(original, module, *call.args, **call.kwargs)
            if pipeline is not None:
                if module.nxd_stage is None:  # the engine has taken out what other stages have
                    module.nxd_stage = _Stage(module, pipeline, kind, total, widths)
                run = partial(module.nxd_stage.run, run, received, where)
            return called_with_step(run, step_of(step))

        @torch.no_grad()
        def reset_buffers(module: nn.Module) -> None:
            """Copy the buffers that no checkpoint holds, such as rotary tables, from the caller's module."""
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])

        methods = {"forward": MethodType(forward, model), "reset_buffers": MethodType(reset_buffers, model)}
        vars(model).update(methods, nxd_stage=None)
        return model

    def plan(self) -> ParallelPlan:
        """Return the plan that the module's layers make."""
        return self._plan


class _StageDone(BaseException):
    """Ends a forward behind the last layer of a stage, with its output; no caller's ``except Exception`` sees it."""


@final
class _Stage:
    """The forward of the whole module on one stage; stand-ins for modules of other stages are added to the module."""

    def __init__(
        self, module: nn.Module, pipeline: PipelinePlan, kind: Any, total: int, widths: Mapping[str, int]
    ) -> None:
        """``kind`` is the class of the caller's list of layers, ``total`` their number in the whole model, and
        ``widths`` has those of the embeddings before the layers, by path."""
        submodule: Any = module.get_submodule(pipeline.layers)
        numbers = [str(number) for number in range(total)]
        present = [number for number in numbers if number in submodule]
        self.is_first, self.is_last = present[0] == numbers[0], present[-1] == numbers[-1]
        self.running = self.has_run = False
        self.received: torch.Tensor | None = None
        submodule[present[0]].register_forward_pre_hook(self._enter, with_kwargs=True)
        submodule[present[-1]].register_forward_hook(self._leave)
        placed = {at: submodule[at] if at in submodule else _Elsewhere(self, at, "layer") for at in numbers}
        layers = nn.ModuleList(placed.values()) if issubclass(kind, nn.ModuleList) else nn.ModuleDict(placed)
        module.set_submodule(pipeline.layers, layers)
        for path in () if self.is_first else pipeline.first:
            module.set_submodule(path, _Elsewhere(self, path, "before", widths.get(path)))
        for path in () if self.is_last else pipeline.last:
            module.set_submodule(path, _Elsewhere(self, path, "behind"))

    def run(self, forward: Callable[[], Any], received: torch.Tensor, where: Any) -> Any:
        """Return the hidden states behind this stage's last layer; on the last stage the loss."""
        self.running, self.has_run = True, False
        self.received = None if self.is_first else received
        try:
            return loss_in(forward(), where)
        except _StageDone as done:
            return done.args[0]
        finally:
            self.running, self.received = False, None

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.has_run = True
        if self.received is None:
            return args, kwargs
        if args:
            return (self.received, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.received}

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running and not self.is_last:  # recomputation runs the layer again
            raise _StageDone(output if isinstance(output, torch.Tensor) else output[0])


@final
class _Elsewhere(nn.Module):
    """A module of another stage."""

    def __init__(self, stage: _Stage, path: str, place: str, width: int | None = None) -> None:
        super().__init__()
        self._stage, self._path, self._place, self._width = stage, path, place, width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument; for an embedding, something of the shape that the layers expect."""
        if self._place == "behind" or (self._place == "before" and self._stage.has_run):
            runs, registered = ("before", "behind") if self._place == "behind" else ("behind", "before")
            reason = f"runs {runs} the layers and was registered {registered} them"
            raise errors.StageModuleMisplaced(path=self._path, reason=reason)
        first, received = args[0] if args else next(iter(kwargs.values()), None), self._stage.received
        if self._width is None or not isinstance(first, torch.Tensor) or received is None:
            return first
        return torch.zeros((), device=first.device, dtype=received.dtype).expand(*first.shape, self._width)
