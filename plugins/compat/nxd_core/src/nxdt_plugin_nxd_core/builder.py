"""The builder of a user's own module, and its forward on one pipeline stage.

The whole forward of the module runs on every stage, with three changes. What the stage before sent replaces what comes
before the stage's first layer. Layers of other stages pass their input on. Behind the stage's last layer the forward
ends. So the code around the layers, such as that of positions and masks, needs no change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan, PipelinePlan
from nxdt_plugin_nxd_core.calls import Call, loss_in
from nxdt_plugin_nxd_core.errors import ModelFnReturnsNoModule, StageModuleMisplaced

__all__ = ["ModuleBuilder", "StageLayers", "forward_of_stage", "numbered_layers"]


class _StageDone(BaseException):
    """Ends a forward behind the last layer of a stage; no caller's ``except Exception`` sees it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@final
class _Layer:
    """A layer of this stage, in the place of the module in the caller's loop."""

    def __init__(self, layers: StageLayers, number: int, module: nn.Module) -> None:
        self._layers, self._number, self._module = layers, number, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._layers.fed(self._number, args, kwargs)
        return self._layers.passed_on(self._number, self._module(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@final
class _LayerElsewhere:
    """A layer of another stage: gives its first argument."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)


@final
class _Elsewhere(nn.Module):
    """A module before or behind the layers that is on another stage."""

    def __init__(self, path: str, layers: StageLayers, *, before: bool, width: int | None) -> None:
        super().__init__()
        self._path, self._before, self._width = path, before, width
        self._layers = (layers,)  # in a tuple, so that they are not this module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return something of the shape that the layers expect, which is not used."""
        (layers,) = self._layers
        if not self._before:
            raise StageModuleMisplaced(path=self._path, reason="runs before the layers and was registered behind them")
        if layers.has_run:
            raise StageModuleMisplaced(path=self._path, reason="runs behind the layers and was registered before them")
        given = args[0] if args else next(iter(kwargs.values()), None)
        if self._width is None or not isinstance(given, torch.Tensor):
            return given
        return torch.zeros((), device=given.device, dtype=layers.dtype).expand(*given.shape, self._width)


class StageLayers(nn.ModuleDict):
    """The list of layers of a module: that of the whole model in its length and numbers, with one stage's modules."""

    def __init__(self, layers: Mapping[str, nn.Module], widths: Mapping[str, int]) -> None:
        """``widths``: of the embeddings before the layers, by path."""
        super().__init__(layers)
        self.total = len(layers)
        self.widths = dict(widths)
        self.received: torch.Tensor | None = None
        self.has_run = False
        self.staged = False
        self.dtype = torch.float32

    @property
    def numbers(self) -> list[int]:
        """Numbers of this stage's layers."""
        return sorted(map(int, self._modules))

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first layer."""
        return self.numbers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last layer."""
        return self.numbers[-1] == self.total - 1

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Any]:
        return iter(self[0 : self.total])

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return [self._at(number) for number in range(*key.indices(self.total))]
        if isinstance(key, int):
            return self._at(range(self.total)[key])
        return self._at(int(key))

    def keys(self) -> Any:
        """Return the numbers of all layers, as text."""
        return [str(number) for number in range(self.total)]

    def values(self) -> Any:
        """Return all layers."""
        return self[0 : self.total]

    def items(self) -> Any:
        """Return all layers with their numbers, as text."""
        return list(zip(self.keys(), self.values(), strict=True))

    def _at(self, number: int) -> Any:
        module = self._modules.get(str(number))
        if module is None:
            return _LayerElsewhere()
        return _Layer(self, number, module) if self.staged else module

    def fed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's arguments; those of the stage's first layer with what the stage before sent."""
        self.has_run = True
        if self.received is None or number != self.numbers[0]:
            return args, kwargs
        if args:
            return (self.received, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.received}

    def passed_on(self, number: int, output: Any) -> Any:
        """Return a layer's output; that of the stage's last layer ends the forward, unless the model's head follows."""
        if number != self.numbers[-1] or self.is_last:
            return output
        raise _StageDone(output if isinstance(output, torch.Tensor) else output[0])


def numbered_layers(module: nn.Module, pipeline: PipelinePlan) -> None:
    """Replace the module's list of layers by one that pipeline stages can share out, in place."""
    layers = module.get_submodule(pipeline.layers)
    widths = {
        path: part.embedding_dim
        for name in pipeline.first
        for path, part in [(name, module.get_submodule(name))]
        if isinstance(part, nn.Embedding)
    }
    numbered = {str(number): child for number, child in enumerate(layers.children())}
    module.set_submodule(pipeline.layers, StageLayers(numbered, widths))


def forward_of_stage(
    module: nn.Module, pipeline: PipelinePlan, forward: Any, received: torch.Tensor, call: Call
) -> tuple[Any, bool]:
    """Return what ``forward`` of the whole module gives on this stage, and whether it is the last stage: hidden states,
    or on the last stage what the caller's forward returns."""
    layers: Any = module.get_submodule(pipeline.layers)
    _place_stubs(module, pipeline, layers)
    layers.staged, layers.has_run = True, False
    layers.received = None if layers.is_first else received
    if layers.received is not None:
        layers.dtype = received.dtype
    try:
        return forward(*call.args, **call.kwargs), True
    except _StageDone as done:
        return done.hidden, False
    finally:
        layers.received, layers.staged = None, False


def _place_stubs(module: nn.Module, pipeline: PipelinePlan, layers: StageLayers) -> None:
    absent = [*(() if layers.is_first else pipeline.first), *(() if layers.is_last else pipeline.last)]
    for path in absent:
        if isinstance(module.get_submodule(path), nn.Identity):
            before = path in pipeline.first
            stub = _Elsewhere(path, layers, before=before, width=layers.widths.get(path))
            module.set_submodule(path, stub)


class ModuleBuilder(ModelBuilder):
    """A :class:`nxdt_core.protocols.model.ModelBuilder` of a module that exists.

    The component's section gives nothing to build: the module and its plan come from
    :func:`nxdt_plugin_nxd_core.initialize_parallel_model`.
    """

    vocab_size = 0
    max_sequence_length: int | None = None

    def __init__(
        self, config: Any, module: nn.Module | None = None, plan: ParallelPlan | None = None, where: Any = None
    ) -> None:
        if module is None or plan is None:
            raise ModelFnReturnsNoModule(found="nothing, since only a program that calls it has one")
        self.module = module
        self._plan = plan
        self._where = where

    def build(self) -> nn.Module:
        """Return a copy of the module without memory, whose forward takes a :class:`Call`."""
        made = _copy_on_meta(self.module)
        if self._plan.pipeline is not None:
            numbered_layers(made, self._plan.pipeline)
        made.__class__ = _called(type(made), self._plan, self._where, dict(self.module.named_buffers()))
        return made

    def plan(self) -> ParallelPlan:
        """Return the plan that the module's layers make."""
        return self._plan

    def init_rules(self) -> Sequence[InitRule]:
        """Return nothing: first values are those that the caller's module has."""
        return ()

    def flops_per_token(self, sequence_length: int) -> float:
        """Return an estimate from the number of parameters."""
        return 6.0 * sum(parameter.numel() for parameter in self.module.parameters())


def _copy_on_meta(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


@functools.cache
def _cached(kind: Any) -> Any:
    class Called(kind):  # type: ignore[misc]
        nxd_plan: ParallelPlan
        nxd_loss: Any
        nxd_buffers: Mapping[str, torch.Tensor]

        @torch.no_grad()
        def reset_buffers(self) -> None:
            """Copy the buffers that no checkpoint holds, such as rotary tables, from the caller's module."""
            for name, buffer in self.named_buffers():
                if name in self.nxd_buffers and self.nxd_buffers[name].shape == buffer.shape:
                    buffer.copy_(self.nxd_buffers[name])

        def forward(self, received: torch.Tensor, *, call: Call) -> Any:
            """Run the caller's forward; ``received`` are the hidden states of the stage before."""
            pipeline = self.nxd_plan.pipeline
            if pipeline is None:
                return super().forward(*call.args, **call.kwargs)
            output, is_last = forward_of_stage(self, pipeline, super().forward, received, call)
            return loss_in(output, self.nxd_loss) if is_last else output

    Called.__name__, Called.__qualname__ = kind.__name__, kind.__qualname__
    return Called


def _called(kind: Any, plan: ParallelPlan, where: Any, buffers: Mapping[str, torch.Tensor]) -> type[nn.Module]:
    """``kind`` with a forward that takes a call; in a pipeline the last stage gives the loss."""
    return type(kind.__name__, (_cached(kind),), {"nxd_plan": plan, "nxd_loss": where, "nxd_buffers": buffers})
