"""The instruments of estimates: live bytes, collectives, and an accelerator's kernels on the meta device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nxdt_core.distributed.torch_versions import all_gather_single, reduce_scatter_single
from nxdt_core.engine.data.fsdp import WeightStorage
from nxdt_core.engine.estimate.memory import (
    ROOT,
    HeldParameter,
    needs_stand_ins,
    optimizer_state,
    peak_memory,
)
from nxdt_core.engine.estimate.rank import fake_mesh
from nxdt_core.engine.estimate.trace import (
    AcceleratorKernels,
    LiveBytes,
    MicroBatchTrace,
    WireBytes,
    trace_micro_batch,
)
from nxdt_core.engine.pipeline.schedules import schedule_operations
from nxdt_core.models.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.models.moe.experts import RowGroups, grouped_linear
from nxdt_core.models.norm import RMSNorm
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.optimizer import as_torch
from nxdt_core.protocols.precision import PrecisionPolicy


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def test_live_bytes_follow_storages_and_not_tensors():
    known = meta(100)
    with LiveBytes([known]) as live:
        first = meta(10)
        view, alias = first.view(2, 5), known.view(10, 10)
        assert live.total == 40
        second = first + 1
        assert live.total == sum(live.peak.values()) == 80
        del first, view
        assert (live.total, sum(live.peak.values())) == (40, 80)
        live.phase = "workspace"
        third = second * alias[0]
        live.retag(third, "gradients")
    assert live.live["activations"] == 40
    assert (live.live["workspace"], live.live["gradients"]) == (0, 40)


N = 4
COLLECTIVES = {
    "all_reduce": (lambda group: dist.all_reduce(meta(8), group=group), 2 * 32 * (N - 1) / N),
    "all_gather": (lambda group: all_gather_single(meta(8 * N), meta(8), group=group), 32 * (N - 1)),
    "reduce_scatter": (lambda group: reduce_scatter_single(meta(8), meta(8 * N), group=group), 32 * (N - 1)),
    "all_to_all": (lambda group: dist.all_to_all_single(meta(8), meta(8), group=group), 32 * (N - 1) / N),
    "send": (
        lambda group: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, meta(8), 1, group=group), dist.P2POp(dist.irecv, meta(8), 3, group=group)]
        ),
        32,
    ),
    "functional": (
        lambda group: dist._functional_collectives.all_reduce(meta(8), "sum", group),
        2 * 32 * (N - 1) / N,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_count_what_a_ring_sends(name):
    call, expected = COLLECTIVES[name]
    with fake_mesh(MeshSizes(tp=N, dp_shard=2)) as mesh:
        group = mesh.group("tp")
        with WireBytes({group.group_name: "tp"}) as wire:
            call(group)
    assert wire.sent == {"tp": expected}


def saved_bytes(function, own=()):
    """Distinct storages that ``function`` leaves for backward, beside those of ``own``."""
    known, sizes = {tensor.untyped_storage()._cdata for tensor in own}, {}

    def pack(tensor):
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    assert output is not None
    return sum(storage.nbytes() for key, storage in sizes.items() if key not in known)


class Block(nn.Module):
    """What a decoder layer is made of."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(32)
        self.attention = GroupedQueryAttention(32, heads=4, kv_heads=2, head_dim=8, core=CausalAttention())
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, hidden):
        angle = hidden.new_ones(hidden.shape[1], 1, 4)
        hidden = hidden + self.attention(self.norm(hidden), (angle, angle))
        return hidden + self.down(functional.silu(self.up(hidden)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_block_keeps_on_the_meta_device_is_what_it_keeps_on_a_real_one(dtype):
    def on(device, mode):
        block, hidden = Block().to(device), torch.randn(2, 16, 32).to(device).requires_grad_()
        with mode:
            return saved_bytes(lambda: block(hidden), own=[*block.parameters(), hidden])

    real = on("cpu", torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None))
    assert on("meta", AcceleratorKernels(dtype)) == pytest.approx(real, rel=0.02)
    assert on("meta", torch.enable_grad()) > 1.2 * real or dtype is not None


def test_autocast_keeps_one_copy_of_a_weight_until_forward_ends_and_none_of_a_view():
    weight, hidden = meta(32, 32, requires_grad=True), meta(4, 32)
    for views, copies in ((), 1), ((weight,), 2):
        with AcceleratorKernels(torch.bfloat16, views) as kernels, LiveBytes([weight, hidden]) as live:
            outputs = [functional.linear(hidden, weight) for _ in range(2)]
            # Linear keeps its input in bfloat16 for the weight's gradient, not the weight: nobody asks for the input's.
            held = live.total - sum(output.nbytes for output in outputs) - 2 * hidden.nbytes // 2
            kernels.end_forward()
        assert held == (weight.nbytes // 2 if copies == 1 else 0)


def test_experts_keep_all_their_matrices_in_autocasts_dtype():
    def on(device, mode):
        weights, rows = torch.randn(4, 16, 8), torch.randn(6, 8)
        weights, rows = (tensor.to(device).requires_grad_() for tensor in (weights, rows))
        with mode:
            groups = RowGroups(torch.tensor([1, 2, 1, 2]))
            return saved_bytes(lambda: grouped_linear(rows, weights, groups), own=[weights, rows])

    real = on("cpu", torch.autocast("cpu", torch.bfloat16))
    assert on("meta", AcceleratorKernels(torch.bfloat16)) == pytest.approx(real, rel=0.1)


def test_what_is_recomputed_runs_on_the_accelerators_kernels_too():
    block = Block().to("meta")

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, hidden, *_):
            return checkpoint(self.block, hidden, use_reentrant=False)

    traced = trace_micro_batch(Recomputed(), meta(2, 16, 32), loss=None, autocast=torch.bfloat16)
    assert traced.kept == 2 * 16 * 32 * 4  # its output; its input is known
    whole = trace_micro_batch(Plain(block), meta(2, 16, 32), loss=None, autocast=torch.bfloat16)
    assert traced.peak["workspace"] > 0.8 * (whole.kept - traced.kept)


class Plain(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden, *_):
        return self.block(hidden)


@pytest.mark.parametrize(("use", "gradients"), [("accumulated", 0), ("fresh", 1), ("sharded", 0)])
def test_gradients_are_counted_where_they_are_new_and_stay(use, gradients):
    block = Block().to("meta")
    traced = trace_micro_batch(Plain(block), meta(1, 1, 32), loss=None, gradients=use)
    own = sum(parameter.nbytes for parameter in block.parameters())
    assert traced.peak["gradients"] == pytest.approx(gradients * own, abs=own / 3)  # the last one is not there yet
    assert traced.peak["workspace"] < own / 2  # one at a time
    assert all(parameter.grad is None for parameter in block.parameters())


def test_the_fullest_moment_comes_of_the_schedules_own_order():
    trace = MicroBatchTrace(kept=10, peak={"activations": 8, "logits": 0, "workspace": 7, "gradients": 0})
    policy = PrecisionPolicy(name="fp32")
    storage = WeightStorage.of(MeshSizes(zero_stage=0), policy, micro_batches=8)

    def at(rank, received=0):
        order = schedule_operations("1f1b", 4, 1, 8)[rank]
        return peak_memory([], storage, order, {rank: trace}, received)

    assert [at(rank).activations for rank in range(4)] == [38, 28, 18, 8]
    assert [at(rank).workspace for rank in range(4)] == [7] * 4
    assert [at(rank, received=100).activations for rank in range(4)] == [38, 328, 218, 108]


def test_masters_are_counted_with_the_optimizer():
    policy = PrecisionPolicy(name="mixed", parameters="bfloat16", master_weights=True)
    storage = WeightStorage.of(MeshSizes(dp_shard=4), policy, micro_batches=2)
    layer = HeldParameter(group="layers.0", local=60, stored=15, state=15 * 8)
    held = [layer, HeldParameter(group=ROOT, local=40, stored=10, state=10 * 8)]
    peak = MicroBatchTrace(kept=0, peak=dict.fromkeys(("activations", "logits", "workspace", "gradients"), 1000))
    memory = peak_memory(held, storage, schedule_operations("1f1b", 1, 1, 2)[0], {0: peak}, 0)
    assert (memory.weights, memory.gradients, memory.optimizer) == (200, 400, 25 * (4 + 8))


def test_an_optimizers_state_is_found_by_stepping_it():
    def adam(groups, config):
        return torch.optim.AdamW(as_torch(groups))

    class Squares(torch.optim.Optimizer):
        reads = False

        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                state = self.state[weight]
                state["momentum"] = weight.grad.clone()
                if self.reads:
                    weight.grad.numpy()
                else:
                    state["left"] = torch.zeros(weight.shape[0] ** 2) + 1

    class Reading(Squares):
        reads = True

    def squares(groups, config):
        return Squares(as_torch(groups), {})

    def reading(groups, config):
        return Reading(as_torch(groups), {})

    def momentum(groups, config):
        return torch.optim.SGD(as_torch(groups), momentum=config)

    def held(factory, config, dtype, shape=(300, 10)):
        return optimizer_state(factory, config, dtype)(shape, True).held

    assert held(adam, None, torch.float32) == 8 * 3000
    assert held(adam, None, torch.bfloat16) == 4 * 3000
    assert held(momentum, 0.9, torch.float32) == 4 * 3000
    assert held(momentum, 0.0, torch.float32) == 0
    assert held(squares, None, torch.float32) == 4 * (3000 + 300**2)
    assert held(squares, None, torch.float32, (10_000_000, 10)) == 4 * (10**8 + 10**14), "nothing is allocated"
    assert held(reading, None, torch.float32) == 4 * 3000
    assert not needs_stand_ins(adam, None)
    assert needs_stand_ins(momentum, 0.9)
