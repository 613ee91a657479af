"""Sums of gradients over data parallel ranks: which have started when backward has computed how many gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data import gradients
from nxdt_core.engine.data.gradients import OverlappedAllReduce
from tests.engine.data.test_gather_order import LAYER, TABLE
from tests.engine.test_traffic import HIDDEN, STRATEGY, configured, running
from tests.sampling import slow

ENDS = TABLE + HIDDEN


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


class Order(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of each sum, and ``|`` where backward has all gradients of a layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[int | str] = []
        for layer in module.layers.values():
            layer.register_full_backward_hook(lambda *_: self.seen.append("|"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "allreduce_":
            self.seen.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def order(bucket_bytes: int, *overrides: str) -> list[int | str]:
    """Of the first rank in its second step, of two micro-batches."""
    gradients._BUCKET_BYTES = bucket_bytes
    with running(configured("llama-tiny", "fp32", 2, f"{STRATEGY}zero1=false", *overrides)) as (_, model, step):
        step()
        with Order(model.local_modules()[0]) as found:
            step()
    return [event for event in found.seen if event == "|" or event > 8]  # others are losses and norms


@pytest.mark.parametrize("overrides", [(), slow(("model.activations_checkpoint_granularity=full",))], ids=str)
def test_sums_start_while_backward_computes_the_next_gradients(ranks, overrides):
    found = ranks(2).run(order, 4 * ENDS, *overrides, timeout_s=240)
    assert found[0] == found[1]
    first, second, *last = found[0]
    assert first == second == "|"  # nothing is summed before the last micro-batch
    assert last[0] == ENDS  # while the last layer's gradients are computed
    assert last[-2:] == ["|", TABLE]  # all others have started when the layers are done
    assert sum(event for event in last if event != "|") == 2 * LAYER + TABLE + ENDS


def sums_by_hand(requires: Sequence[bool]) -> list[list[float]]:
    """Gradients of a rank after sums that start in a backward, of parameters of which some need no gradients."""
    with process_group():
        gradients._BUCKET_BYTES = 8
        parameters = [nn.Parameter(torch.ones(2), requires_grad=needs) for needs in requires]
        sums = OverlappedAllReduce(dist.group.WORLD, parameters, hooked=True)
        for parameter in parameters:
            parameter.requires_grad_()
        found = []
        for begins in (True, False):
            for parameter in parameters:
                parameter.grad = None
            if begins:
                sums.begin()
            sum(parameter.sum() * (dist.get_rank() + 1) for parameter in parameters).backward()
            sums.finish()
            found.append([float(parameter.grad[0]) for parameter in parameters])
        return found


def test_parameters_that_need_gradients_later_are_summed_too(ranks):
    assert ranks(2).run(sums_by_hand, [True, False, True]) == [[[3.0] * 3] * 2] * 2


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``begun`` and ``read`` for each exchange of gradients, and ``|`` where backward has all gradients of a layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        for layer in module.layers.values():
            layer.register_full_backward_hook(lambda *_: self.seen.append("|"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "alltoall_base_":
            self.seen.append("begun")
        elif func.namespace == "aten" and func._opname == "sum" and func._overloadname == "IntList_out":
            self.seen.append("read")
        return func(*args, **(kwargs or {}))


def exchanges() -> list[str]:
    """Events of a rank in its second step."""
    with running(configured("llama-tiny", "fp32", 2)) as (_, model, step):
        step()
        with Sums(model.local_modules()[0]) as found:
            step()
        return found.seen


def test_the_sums_of_zero_1_run_while_backward_computes_the_next_gradients(ranks):
    for seen in ranks(2).run(exchanges, timeout_s=240):
        assert seen.count("begun") == seen.count("read") == 4  # embedding, two layers, norm and head
        last = seen[seen.index("begun") :]
        assert last == ["begun", "|", "begun", "|", "read", "begun", "read", "begun", "read", "read"]


def backward(model: Any) -> dict[str, torch.Tensor]:
    """Add to the gradients of a rank, and return its shards of them."""
    ids = torch.arange(32).view(2, 16) + dist.get_rank()
    model.local_modules()[0](ids).square().sum().backward()
    return {name: local_of(parameter.grad).clone() for name, parameter in model.named_parameters()}


def seen_by_hooks() -> tuple[list[str], list[bool]]:
    """Events of a rank in a backward, and whether the gradients that hooks have seen are the finished ones."""
    with running(configured("llama-tiny", "fp32", 2)) as (_, model, step):
        step()
        seen: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(_keep, seen, name))
        with Sums(model.local_modules()[0]) as found:
            finished = backward(model)
        return found.seen, [torch.equal(finished[name], value) for name, value in seen.items()]


def _keep(seen: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    seen[name] = local_of(parameter.grad).clone()


def test_hooks_of_parameters_see_finished_sums(ranks):
    for seen, equal in ranks(2).run(seen_by_hooks, timeout_s=240):
        assert [event for event in seen if event != "|"] == ["begun", "read"] * 4
        assert len(equal) > 10
        assert all(equal)


def gradients_of_two_backwards() -> list[dict[str, torch.Tensor]]:
    """Of a rank, after one backward, and after another one that adds to them."""
    with running(configured("llama-tiny", "fp32", 2)) as (_, model, step):
        step()
        return [backward(model), backward(model)]


def test_gradients_that_are_there_are_added_to(ranks):
    for first, second in ranks(2).run(gradients_of_two_backwards, timeout_s=240):
        torch.testing.assert_close(second, {name: 2 * gradient for name, gradient in first.items()})
