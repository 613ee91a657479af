"""Recomputation: the same gradients to the bit from fewer saved activations, whatever is nested in what."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.errors import raises
from nxdt_testing.ranks import process_group
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard

from nxdt_core.distributed.devices import HOST
from nxdt_core.engine import recompute
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.engine.tensor.apply import apply_tensor_parallel
from nxdt_core.errors.models import UnknownRecomputeName
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from tests.sampling import slow

PLAN = ParallelPlan(
    recompute={"Block": ("layers.*",), "MLP": ("layers.*.mlp",), "Activation": ("layers.*.mlp.activation",)}
)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size)
        self.mlp = SwiGLU(size, 3 * size)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden + self.dropout(self.mlp(self.norm(hidden))) * scale


class Stack(nn.Module):
    def __init__(self, size: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Block(size) for n in range(layers)})
        self.last = nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden, scale=0.5)
        return self.last(hidden)


def trained(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients and bytes that autograd held after forward (weights left out, memory counted once)."""
    torch.manual_seed(7)
    hidden = torch.randn(4, 32, 16, requires_grad=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(hidden).square().sum()
    size = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {**gradients, "input": hidden.grad}, size


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Stack()


CASES = {
    "full": ("full", (), 0.2),
    "one name": ("selective", ("MLP",), 0.6),
    "nested names": ("selective", ("Activation", "MLP"), 0.6),
    "a layer by its name": ("selective", ("Block",), 0.2),
    "everything in everything": ("selective", ("Block", "MLP", "Activation"), 0.2),
    "the smallest part": ("selective", ("Activation",), 0.95),
}


@pytest.mark.parametrize(("granularity", "names", "share"), CASES.values(), ids=CASES)
def test_gradients_are_equal_to_the_bit_and_less_is_held(plain, granularity, names, share):
    recomputed = copy.deepcopy(plain)
    apply_recompute(recomputed, PLAN, granularity=granularity, names=names)
    loss, gradients, held = trained(plain)
    other_loss, other_gradients, other_held = trained(recomputed)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    assert [name for name, value in gradients.items() if not torch.equal(value, other_gradients[name])] == []
    assert other_held < share * held


def test_names_of_modules_and_parameters_stay(plain):
    modules, state = [name for name, _ in plain.named_modules()], list(plain.state_dict())
    apply_recompute(plain, PLAN, granularity="full")
    assert [name for name, _ in plain.named_modules()] == modules
    assert list(plain.state_dict()) == state


def test_none_changes_nothing(plain):
    kinds = [type(part) for part in plain.modules()]
    apply_recompute(plain, PLAN, granularity=None, names=("MLP",))
    assert [type(part) for part in plain.modules()] == kinds


def test_a_module_that_two_names_mean_is_recomputed_once(plain):
    calls = []
    plan = ParallelPlan(recompute={"A": ("layers.*.mlp",), "B": ("layers.0.mlp",)})
    plain.layers["0"].mlp.activation.register_forward_hook(lambda *_: calls.append(1))
    apply_recompute(plain, plan, granularity="selective", names=("A", "B"))
    trained(plain)
    assert len(calls) == 2


def test_hooks_of_a_recomputed_module_run_once_and_those_inside_twice(plain):
    layer, calls = plain.layers["1"], []
    layer.register_forward_pre_hook(lambda *_: calls.append("outside"))
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append("inside"))
    apply_recompute(plain, PLAN, granularity="full")
    trained(plain)
    assert calls == ["outside", "inside", "inside"]


def test_a_hook_that_changes_the_input_changes_it_once(plain):
    recomputed = copy.deepcopy(plain)
    for model in (plain, recomputed):
        model.layers["1"].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    apply_recompute(recomputed, PLAN, granularity="selective", names=("MLP",))
    _, gradients, _ = trained(plain)
    _, others, _ = trained(recomputed)
    assert all(torch.equal(value, others[name]) for name, value in gradients.items())


def test_backward_in_two_goes_as_zero_bubble_schedules_take_it(plain):
    recomputed = copy.deepcopy(plain)
    apply_recompute(recomputed, PLAN, granularity="full")
    found = []
    for model in (plain, recomputed):
        torch.manual_seed(7)
        hidden = torch.randn(4, 32, 16, requires_grad=True)
        loss = model(hidden).square().sum()
        inputs = torch.autograd.grad(loss, hidden, retain_graph=True)
        found.append((*inputs, *torch.autograd.grad(loss, list(model.parameters()))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_name_that_the_plan_lacks_is_refused_with_those_that_it_has(plain):
    with raises(UnknownRecomputeName) as caught:
        apply_recompute(plain, PLAN, granularity="selective", names=("MLP", "CoreAttention"))
    assert "CoreAttention" in caught.value.what()
    assert "MLP," not in caught.value.what()
    assert all(name in caught.value.do() for name in PLAN.recompute)
    assert not any("forward" in vars(part) for part in plain.modules())


def test_a_stage_without_the_named_modules_is_no_error(plain):
    plan = ParallelPlan(recompute={"Last": ("last",), "Elsewhere": ("layers.9.*",)})
    apply_recompute(plain, plan, granularity="selective", names=("Last", "Elsewhere"))
    assert not any("forward" in vars(part) for part in plain.modules())


def full_batch() -> torch.Tensor:
    return torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(3))


def gradients_under_fully_shard(reshard: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gradients by parameter without and with recomputation, over two ranks that read half a batch each."""
    found: list[dict[str, torch.Tensor]] = []
    with process_group():
        half = full_batch().chunk(2)[dist.get_rank()]
        for granularity in (None, "full"):
            torch.manual_seed(0)
            model = Stack().eval()
            apply_recompute(model, PLAN, granularity=granularity)
            for layer in model.layers.values():
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            model(half).square().sum().backward()
            found.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})
    return {name: (value, found[1][name]) for name, value in found[0].items()}


@pytest.mark.parametrize("reshard", [True, slow(False)], ids=["zero 3", "zero 2"])
def test_it_composes_with_fully_shard(ranks, reshard):
    for found in ranks(2).run(gradients_under_fully_shard, reshard):
        assert len(found) == 12
        assert all(torch.equal(one, other) for one, other in found.values())


def gradients_under_sequence_parallelism(names: tuple[str, ...]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Local gradients by parameter without and with recomputation of tensor blocks."""
    mlp = "layers.*.mlp"
    columns = {f"{mlp}.gate_proj": "column", f"{mlp}.up_proj": "column"}
    plan = replace(
        PLAN,
        tensor={**columns, f"{mlp}.down_proj": "row", "last": "vocab_head"},
        tensor_blocks=(mlp, "last"),
    )
    found: list[dict[str, torch.Tensor]] = []
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(tp=2), HOST.type)
        part = full_batch().chunk(2, dim=1)[mesh.rank("tp")]
        for granularity in (None, "selective"):
            torch.manual_seed(0)
            model = Stack().eval()
            model.last = nn.Linear(16, 8, bias=False)
            apply_tensor_parallel(model, plan, mesh, sequence_parallel=True)
            apply_recompute(model, plan, granularity=granularity, names=names)
            model(part).to_local().square().sum().backward()
            local = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append({name: getattr(grad, "_local_tensor", grad) for name, grad in local.items()})
    return {name: (value, found[1][name]) for name, value in found[0].items()}


@pytest.mark.parametrize("names", [slow(("MLP",)), ("Block",), slow(("Activation", "MLP"))], ids=" in ".join)
def test_it_composes_with_tensor_and_sequence_parallelism(ranks, names):
    for found in ranks(2).run(gradients_under_sequence_parallelism, names):
        assert len(found) == 13
        assert all(torch.equal(one, other) for one, other in found.values())


def test_the_work_grows_with_the_layers_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counted(patterns: Iterable[str], path: str) -> bool:
        compared.append(path)
        return matches_any(patterns, path)

    monkeypatch.setattr(recompute, "matches_any", counted)
    counts = []
    for layers in (8, 16):
        compared.clear()
        plan = replace(PLAN, cheap=("layers.*.norm", "layers.*.mlp.activation"))
        apply_recompute(Stack(layers=layers), plan, granularity="selective", names=("Activation",))
        counts.append(len(compared))
    assert counts[1] < 2.1 * counts[0]
