"""Tests that every optimizer must pass; its author subclasses it once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.optimizer_contract import OptimizerContract

    class TestMyOptimizer(OptimizerContract):
        sharded = True  # as its record declares

        @pytest.fixture
        def factory(self):
            return MyOptimizer

        @pytest.fixture
        def section(self):
            return MyOptimizerConfig(lr=0.01, weight_decay=0.1)

Separate tests must show that its update is the one of its paper.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import nn

from nxdt_core.protocols.optimizer import OptimizerFactory, ParameterGroup
from nxdt_core.train.hidden_state import find_hidden_state
from nxdt_testing.contract import ComponentContract, copied, no_error
from nxdt_testing.runs.layouts import TriesLayouts
from nxdt_testing.runs.moe import MoEBuilder
from nxdt_testing.runs.moe_config import MoEModelConfig
from nxdt_testing.runs.run import Parts, differing, global_batch

__all__ = ["OptimizerContract"]

_SHAPES = {"matrix": (6, 4), "tall": (8, 3), "vector": (5,)}
_UNDECAYED = ("vector",)
_STEPS = 4
_FEW_TOKENS = 12
"""Token ids that are trained on: fewer than the rows of a shard of the embedding, so that other shards have none."""
_ADVICE = (
    "Update element by element, or by nxdt_core.protocols.optimizer.shards_of(groups): collectives go over all groups "
    "of a shard, and all its ranks call them, also those whose gradient is zero."
)


class OptimizerContract(ComponentContract, TriesLayouts):
    """The tests of an optimizer: subclass it, set :attr:`sharded`, and override ``factory`` and ``section``."""

    sharded: ClassVar[bool]
    """True if its record declares the capability ``sharded``."""
    reads_rate: ClassVar[bool] = True
    """False for one whose step does not follow the learning rate, such as Rprop."""
    rtol: ClassVar[float] = 1e-3
    """Allowed difference of an update in float32 to the one in float64, and of one on shards to that of the whole,
    relative to its largest element. An optimizer that computes in bfloat16 on purpose has 0.05."""

    def test_it_has_the_groups_that_it_was_given(self, factory: OptimizerFactory, section: Any) -> None:
        """In their order, each with its parameters and learning rate."""
        groups = _groups(_parameters(), section)
        optimizer = factory(_copies(groups), section)
        assert isinstance(optimizer, torch.optim.Optimizer), (
            f"the factory returns a {type(optimizer).__name__}; return a torch.optim.Optimizer"
        )
        actual = [(list(map(id, group["params"])), group["lr"]) for group in optimizer.param_groups]
        wanted = [(list(map(id, group["params"])), group["lr"]) for group in groups]
        assert actual == wanted, (
            f"the optimizer has {len(actual)} groups that are not the {len(wanted)} given ones; pass them to "
            "torch.optim.Optimizer.__init__, since rates and decays are those of the groups"
        )

    def test_a_step_moves_every_parameter_that_has_a_gradient(self, factory: OptimizerFactory, section: Any) -> None:
        """And leaves one without a gradient as it is."""
        run = _Run(factory, section)
        for left_out in (*run.parameters, None):
            before = copied(run.parameters)
            _set_gradients(run.parameters, 0)
            if left_out is not None:
                run.parameters[left_out].grad = None
            run.optimizer.step()
            moved = set(differing(run.parameters, before))
            assert left_out not in moved, f"a step moves {left_out!r}, which has no gradient"
            still = run.parameters.keys() - moved - {left_out}
            assert not still, f"a step leaves {', '.join(sorted(still))} as it was, which has a gradient"

    def test_the_rate_is_that_of_the_group_at_each_step(self, factory: OptimizerFactory, section: Any) -> None:
        """The schedule sets ``group["lr"]`` before each step; a rate of 0 moves nothing."""
        if not self.reads_rate:
            pytest.skip("its step does not follow the learning rate")
        run = _Run(factory, section)
        run.steps(0, 1)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        before = copied(run.parameters)
        run.steps(1, 2)
        moved = differing(run.parameters, before)
        assert not moved, f"a step at a rate of 0 moves {', '.join(moved)}; read group['lr'] in each step"

    def test_a_group_without_decay_does_not_decay(self, factory: OptimizerFactory, section: Any) -> None:
        """A gradient of zeros moves nothing there; norms and biases are in such a group."""
        run = _Run(factory, section)
        for parameter in run.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        before = copied(run.parameters)
        run.optimizer.step()
        for name in _UNDECAYED:
            assert torch.equal(run.parameters[name].detach(), before[name]), (
                f"a step with a gradient of zeros moves {name!r}, whose group has weight_decay 0; "
                "read group['weight_decay'] and not the section"
            )

    def test_updates_in_float32_are_near_those_in_float64(self, factory: OptimizerFactory, section: Any) -> None:
        """Over a few steps, from the same weights and gradients."""
        dtypes = (torch.float32, torch.float64)
        narrow, wide = (copied(_Run(factory, section, dtype).steps(0, 2).parameters) for dtype in dtypes)
        for name, expected in wide.items():
            difference = (narrow[name].double() - expected).abs().max()
            size = (expected - _parameters(torch.float64)[name].detach()).abs().max()
            assert difference <= self.rtol * size, (
                f"the update of {name!r} in float32 differs by {float(difference / size):.1e} of its size from the one "
                f"in float64, and rtol allows {self.rtol:.1e}; avoid differences of large numbers, or set rtol if it "
                "computes in a lower precision on purpose"
            )

    def test_state_is_kept_by_parameter_alone(self, factory: OptimizerFactory, section: Any) -> None:
        """Checkpoints save tensors and numbers in ``optimizer.state[parameter]``, and nothing else."""
        run = _Run(factory, section)
        hidden: list[str] = []
        find_hidden_state(run.optimizer, hidden.extend)
        run.steps(0, _STEPS)
        assert not hidden, (
            f"{', '.join(hidden)} changes from step to step, and no checkpoint keeps it; keep it in "
            "optimizer.state[parameter]"
        )
        for name, parameter in run.parameters.items():
            for key, value in run.optimizer.state.get(parameter, {}).items():
                assert value is None or type(value) in (torch.Tensor, bool, int, float), (
                    f"state[{name}][{key!r}] is a {type(value).__name__}; checkpoints keep tensors and numbers"
                )

    def test_a_resumed_run_steps_as_one_that_was_not_stopped(self, factory: OptimizerFactory, section: Any) -> None:
        """Bitwise, with the weights and the state that a checkpoint keeps."""
        whole = _Run(factory, section).steps(0, 2 * _STEPS)
        resumed = _Run(factory, section)
        resumed.load(_Run(factory, section).steps(0, _STEPS))
        resumed.steps(_STEPS, 2 * _STEPS)
        differ = differing(resumed.parameters, whole.parameters)
        assert not differ, (
            f"after a resume {', '.join(differ)} differs from a run that was not stopped; keep all that a step needs "
            "in optimizer.state[parameter]"
        )

    def test_a_rank_may_have_no_element_of_a_parameter(self, factory: OptimizerFactory, section: Any) -> None:
        """A step works on a rank without elements, as it occurs where there are more ranks than rows."""
        self._skip_unless_sharded()
        run = _Run(factory, section, empty=nn.Parameter(torch.empty(0)))
        with no_error("a step fails where a parameter has no element on this rank:"):
            run.steps(0, 2)

    def test_shards_are_updated_as_the_whole_is(
        self, factory: OptimizerFactory, section: Any, pytestconfig: pytest.Config
    ) -> None:
        """On four real ranks that shard parameters along two dimensions, compared with one process; the gradients of
        some shards are zero."""
        self._skip_unless_sharded()
        parts, builder = Parts(factory=factory, section=section), MoEBuilder(MoEModelConfig())
        batches = global_batch(_FEW_TOKENS)
        self.assert_agrees("tp-zero3", builder, pytestconfig, _ADVICE, optimizer=parts, batches=batches, rtol=self.rtol)

    def _skip_unless_sharded(self) -> None:
        if not self.sharded:
            pytest.skip("the optimizer does not declare 'sharded'")


class _Run:
    """Parameters and their optimizer, and what checkpoints keep of it."""

    def __init__(
        self, factory: OptimizerFactory, section: Any, dtype: torch.dtype = torch.float32, **more: nn.Parameter
    ) -> None:
        self.parameters = {**more, **_parameters(dtype)}
        self.optimizer = factory(_groups(self.parameters, section), section)

    def load(self, other: _Run) -> None:
        """Take the weights of another run, and of its state tensors and numbers."""
        for name, parameter in self.parameters.items():
            theirs = other.parameters[name]
            parameter.data.copy_(theirs.data)
            leaves = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in other.optimizer.state.get(theirs, {}).items()
                if isinstance(value, (torch.Tensor, bool, int, float))
            }
            if leaves:
                self.optimizer.state[parameter] = leaves

    def steps(self, first: int, end: int) -> Self:
        """Take some steps; returns itself."""
        for step in range(first, end):
            _set_gradients(self.parameters, step)
            self.optimizer.step()
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)  # an engine may write the next gradient into the same memory
        return self


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in _SHAPES.items()}


def _set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Set gradients by step and name, far from 0."""
    for number, parameter in enumerate(parameters.values()):
        draw = torch.Generator().manual_seed(100 * step + number)
        values = torch.randn(parameter.shape, generator=draw)
        parameter.grad = (values + values.sign()).to(parameter.dtype)


def _groups(parameters: dict[str, nn.Parameter], section: Any) -> list[ParameterGroup]:
    decay = getattr(section, "weight_decay", 0.0)
    decayed = [name for name in parameters if name not in _UNDECAYED]
    return [
        ParameterGroup(params=[parameters[n] for n in decayed], names=decayed, lr=section.lr, weight_decay=decay),
        ParameterGroup(
            params=[parameters[n] for n in _UNDECAYED], names=list(_UNDECAYED), lr=section.lr / 2, weight_decay=0.0
        ),
    ]


def _copies(groups: list[ParameterGroup]) -> list[ParameterGroup]:
    """Groups that the factory may change."""
    return [{**group, "params": [*group["params"]]} for group in groups]
