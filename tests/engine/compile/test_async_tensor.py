"""Asynchronous tensor parallelism: what torch's own pass takes into products, of the graphs of a layer.

The pass runs on graphs that are traced on the CPU, in torch's test mode; its kernels need GPUs.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.distributed.devices import PROFILES
from nxdt_core.engine.estimate.rank import fake_mesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.layouts import NoSymmetricMemory
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from nxdt_core.train.step import initialize_parallel_model
from tests.engine.compile.compiling import CASES, losses
from tests.engine.tensor.cases import Case, built, materialised
from tests.engine.tensor.models import HIDDEN, SEQ

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
ASYNC = "distributed_strategy.async_tensor_parallel=true"
TP2 = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
SP = "distributed_strategy.sequence_parallel=true"


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def graphs_of_a_layer() -> list[tuple[Counter[str], Counter[str]]]:
    """Operators before and after the pass, of the graphs of forward and backward; collectives do nothing here.

    The pass asks whether torch has NCCL, which builds for the CPU have not.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    found: list[tuple[Counter[str], Counter[str]]] = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        changed = copy.deepcopy(graph)
        view_to_reshape(changed)
        remove_noop_ops(changed.graph)
        before = operators(changed)
        with patch.object(dist, "is_nccl_available", lambda: True), _test_mode():
            micro_pipeline_tp_pass(changed.graph)
        found.append((before, operators(changed)))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with fake_mesh(MeshSizes(tp=2)) as mesh:
        module, parallel = built(Case())
        apply_tensor_parallel(module, parallel, mesh, sequence_parallel=True)
        layer = materialised(module, parallel, {}).layers["0"]
        backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, decompositions=select_decomp_table)
        layer.compile(backend=backend, fullgraph=True)
        hidden = torch.randn(2, SEQ // 2, HIDDEN, dtype=torch.float64, requires_grad=True)
        layer(hidden, module.rotary(torch.arange(SEQ))).square().mean().backward()
    return found


def operators(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(getattr(node.target, "_opname", "") for node in graph.graph.nodes)


def test_products_take_in_the_collectives_of_a_layer(ranks: Any) -> None:
    """All of forward, and in backward all but the scattered sums of gradients of several products."""
    ((forward, backward),) = ranks(1).run(graphs_of_a_layer)
    for before, _ in (forward, backward):
        assert [before[name] for name in (*FUSED, *COLLECTIVES)] == [0, 0, 2, 2, 0]
    assert [forward[1][name] for name in (*FUSED, *COLLECTIVES)] == [2, 2, 0, 0, 0]
    assert [backward[1][name] for name in (*FUSED, *COLLECTIVES)] == [2, 0, 0, 2, 0]


def switched_on() -> tuple[bool, bool]:
    """Whether the pass is switched on in a run, and the tensor parallel group is one with symmetric memory."""
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    with patch.dict(PROFILES, {"cpu": replace(PROFILES["cpu"], symmetric_memory=True)}):
        run = load("recipe:llama-tiny", [*TP2, ASYNC, SP, "model.compile=true", "trainer.accelerator=cpu"])
        engine = build.engine(run)
        engine.start()
        initialize_parallel_model(run, engine)
        name = engine.mesh.group("tp").group_name
        engine.shutdown()
    return config._micro_pipeline_tp, name in _symmetric_memory._group_name_to_store


def test_a_run_switches_the_pass_on(ranks: Any) -> None:
    """No layer is compiled here."""
    assert ranks(2).run(switched_on) == [(True, True)] * 2


@pytest.mark.slow
def test_a_compiled_run_takes_the_steps_of_one_that_is_not(ranks: Any) -> None:
    """20 steps in float64."""
    case = CASES["tp2"]
    pairs = zip(*(ranks(2).run(losses, case, "float64", value, timeout_s=240) for value in (False, True)), strict=True)
    for plain, compiled in pairs:
        assert len(plain) == 20
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-9, atol=0)


def test_it_needs_what_the_pass_needs() -> None:
    with pytest.raises(ConfigError) as raised:
        load("recipe:llama-tiny", [*TP2, ASYNC, "distributed_strategy.sequence_parallel=false", "model.compile=false"])
    said = "\n".join(map(str, raised.value.problems))
    assert "needs distributed_strategy.sequence_parallel=true" in said
    assert "needs model.compile=true" in said
    again = "distributed_strategy.sequence_parallel_regather=true"
    with pytest.raises(ConfigError, match=r"async_tensor_parallel=false or .*sequence_parallel_regather=false"):
        load("recipe:llama-tiny", [*TP2, ASYNC, SP, again, "model.compile=true"])
    with pytest.raises(ConfigError, match="groups of 2 are not on one machine of 1 devices"):
        load("recipe:llama-tiny", [*TP2, "trainer.devices=1", "trainer.num_nodes=2", ASYNC, SP, "model.compile=true"])


def test_devices_without_symmetric_memory_are_refused_and_others_planned() -> None:
    wanted = [*TP2, ASYNC, SP, "model.compile=true"]
    with raises(NoSymmetricMemory, match="NXDT-P039"):
        plan(load("recipe:llama-tiny", [*wanted, "trainer.accelerator=cpu"]))
    planned = plan(load("recipe:llama-tiny", [*wanted, "trainer.accelerator=cuda"]))
    assert "asynchronous TP" in planned.estimate.layout
    # A quarter of the collectives is waited for, and half of the others: one of two parts.
    assert planned.estimate.never_hidden == {"tp": 1 / 4 + 3 / 4 / 2}
