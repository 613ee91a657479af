"""The layouts of a run that fit a product, fastest first: what ``nxdt plan --search`` prints.

Candidates are all sizes of tensor, pipeline, context and expert parallelism that are powers of two, each with ZeRO-1
and ZeRO-3 and with less and more recomputation, or inputs of tensor blocks that are gathered again. Each passes the
checks and the estimate that ``nxdt plan`` makes of one layout, so the search contains no rules about models
and engines: it leaves out what they refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import Any

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.launch import NoLayoutFits, NoTimesOfDevice
from nxdt_core.train.plan import EFFICIENCY, RunPlan, plan

_STRATEGY = "distributed_strategy"
_REGATHER = f"{_STRATEGY}.sequence_parallel_regather"
_TOKENS_PER_CONTEXT_RANK = 8192
"""A sequence is divided only as long as each rank keeps that many tokens of it: less costs more than it saves."""
_MOST_TENSOR, _MOST = 8, 16
"""Ranks that share a layer's matrices; stages of a pipeline, and ranks that share the experts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One candidate."""

    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def ranks(self) -> int:
        """Return how many ranks hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def settings(self, zero_stage: int, recompute: Mapping[str, str]) -> dict[str, str]:
        """Return the keys that select it, with their values as they are written in an override."""
        return {
            f"{_STRATEGY}.tensor_model_parallel_size": str(self.tp),
            f"{_STRATEGY}.pipeline_model_parallel_size": str(self.pp),
            f"{_STRATEGY}.virtual_pipeline_model_parallel_size": "1",
            f"{_STRATEGY}.pipeline_schedule": "null",
            f"{_STRATEGY}.context_parallel_size": str(self.cp),
            f"{_STRATEGY}.expert_model_parallel_size": str(self.ep),
            f"{_STRATEGY}.sequence_parallel": "true" if self.tp > 1 else "false",
            f"{_STRATEGY}.zero_stage": str(zero_stage),
            **recompute,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout that fits."""

    settings: Mapping[str, str]
    plan: RunPlan

    @property
    def seconds(self) -> float:
        """Return the estimated time of a step."""
        assert self.plan.step_time is not None
        return self.plan.step_time.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search."""

    given: RunPlan
    """The configuration as it is."""
    found: Sequence[RankedLayout]
    """Layouts that fit, fastest first. ZeRO-3 is among them only where it is faster than ZeRO-1 or fits alone."""
    estimated: int
    refused: int
    """Combinations that the model, the engine or the sizes of the run do not allow."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree."""
        return {
            "given": self.given.to_dict(),
            "found": [{"settings": dict(each.settings), **each.plan.to_dict()} for each in self.found],
            "estimated": self.estimated,
            "refused": self.refused,
        }


def search(
    load: Callable[[Sequence[str]], ResolvedConfig],
    *,
    product: str,
    efficiency: float = EFFICIENCY,
    trying: Callable[[int, int], None] = lambda number, count: None,
) -> Search:
    """Estimate every candidate and rank those that leave some memory free.

    Args:
        load: returns the run's configuration with overrides of its keys.
        product: name of a product that a device profile knows with its links, such as ``H200``.
        efficiency: share of the product's peak that kernels reach.
        trying: called before each combination of sizes with its number, from 1, and how many there are.

    Raises:
        NoTimesOfDevice: the product's links, or its peak in the run's dtype, are not known.
        NoLayoutFits: all candidates need more memory than there is.
        UnknownDevice: no profile knows ``product``.
        NxdtError: the configuration as it is would not start.
    """
    given = plan(load(()), product=product, efficiency=efficiency)
    if given.step_time is None:
        raise NoTimesOfDevice(device=given.product or product, dtype=given.estimate.compute_dtype)

    def planned(settings: Mapping[str, str]) -> RunPlan:
        config = load([f"{key}={value}" for key, value in settings.items()])
        return plan(config, product=product, efficiency=efficiency)

    trials = _Trials(planned, _recomputations(given.config))
    layouts = list(candidates(given.config))
    for number, layout in enumerate(layouts, start=1):
        trying(number, len(layouts))
        trials.add(layout, shards=layout.ranks < given.sizes.world_size)
    if not trials.found:
        raise NoLayoutFits(device=given.product or product, tried=trials.estimated)
    return Search(
        given=given,
        found=sorted(trials.found, key=lambda each: each.seconds),
        estimated=trials.estimated,
        refused=trials.refused,
    )


class _Trials:
    """Layouts that have been tried so far."""

    def __init__(self, planned: Callable[[Mapping[str, str]], RunPlan], recomputations: list[dict[str, str]]) -> None:
        self._planned, self._recomputations = planned, recomputations
        self.found: list[RankedLayout] = []
        self.estimated = self.refused = 0

    def add(self, layout: Layout, *, shards: bool) -> None:
        """Try ZeRO-1. Where it has to recompute, try ZeRO-3 too: it sends more, and leaves more memory."""
        first = self._least_recomputing(layout, 1)
        if first is not None:
            self.found.append(first)
        if not shards or (first is not None and self._recomputations[0].items() <= first.settings.items()):
            return
        other = self._least_recomputing(layout, 3)
        if other is not None and (first is None or other.seconds < first.seconds):
            self.found.append(other)

    def _least_recomputing(self, layout: Layout, zero_stage: int) -> RankedLayout | None:
        for recompute in self._recomputations:
            if layout.tp == 1 and recompute[_REGATHER] == "true":
                continue
            settings = layout.settings(zero_stage, recompute)
            try:
                made = self._planned(settings)
            except NxdtError:
                if recompute[_REGATHER] == "true":
                    continue  # not every engine gathers inputs again
                self.refused += 1
                return None  # for its sizes, which recomputing does not change
            self.estimated += 1
            if made.fits and not made.tight:
                return RankedLayout(settings=settings, plan=made)
            memory, limit = made.estimate.fullest.memory, made.memory_bytes
            if limit is not None and memory.weights + memory.gradients + memory.optimizer > limit:
                return None  # recomputing saves activations only
        return None


def candidates(config: ResolvedConfig) -> Iterator[Layout]:
    """Yield sizes to try, those that divide a layer's matrices least first."""
    run = config.run
    world = run.trainer.devices * run.trainer.num_nodes
    context = max(run.data.seq_length // _TOKENS_PER_CONTEXT_RANK, run.distributed_strategy.context_parallel_size)
    has_experts = "ep" in config.selected("model").component.record.capabilities
    for tp, pp, cp, ep in combinations(
        _powers_of_two(min(world, run.trainer.devices, _MOST_TENSOR)),
        _powers_of_two(min(world, _MOST)),
        _powers_of_two(min(world, context)),
        _powers_of_two(min(world, _MOST) if has_experts else 1),
    ):
        layout = Layout(tp, pp, cp, ep)
        if world % layout.ranks == 0:
            yield layout


def _powers_of_two(most: int) -> list[int]:
    return [1 << bits for bits in range(most.bit_length())]


def _recomputations(config: ResolvedConfig) -> list[dict[str, str]]:
    """Return settings of recomputation, the fastest first: nothing, inputs that are gathered again, what the
    configuration selects, whole layers."""
    granularity = "model.activations_checkpoint_granularity"
    names = "model.activations_checkpoint_recompute"
    selected = config.run.model.activations_checkpoint_recompute
    nothing = {granularity: "null", names: "null", _REGATHER: "false"}
    some = [{**nothing, granularity: "selective", names: f"[{','.join(selected)}]"}] if selected else []
    return [nothing, {**nothing, _REGATHER: "true"}, *some, {**nothing, granularity: "full"}]
