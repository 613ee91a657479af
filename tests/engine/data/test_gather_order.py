"""Where FSDP2's gathers are in a step: what each is made of, and before the forward of which module it begins."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.data.fsdp import outer_modules
from nxdt_core.engine.pipeline.split import cut_stage
from nxdt_core.train import build
from tests.engine.test_traffic import HIDDEN, STRATEGY, configured, running

VOCABULARY = 272
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * 64 * HIDDEN + 2 * HIDDEN
"""Elements of a layer of :func:`tests.engine.test_traffic.configured`."""
TABLE = VOCABULARY * HIDDEN
NAMES = {LAYER: "layer", TABLE: "embedding", TABLE + HIDDEN: "ends"}
"""``ends``: norm and head, and the embedding where that is the head's matrix."""


class Events(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gathers and reductions by what they are made of, and forwards of modules by their path, in order."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        for name, part in module.named_modules():
            if name and isinstance(part, FSDPModule):
                part.register_forward_pre_hook(lambda *_, name=name: self.seen.append(f"run {name}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # On the host a reduction is an exchange and a sum.
        if func.namespace == "c10d" and func._opname in ("_allgather_base_", "alltoall_base_"):
            gathers = func._opname == "_allgather_base_"
            whole = args[0 if gathers else 1].numel()
            self.seen.append(f"{'gather' if gathers else 'reduce'} {NAMES.get(whole, whole)}")
        return func(*args, **(kwargs or {}))


def events(*overrides: str) -> list[str]:
    """Of the first rank in its second step, of two micro-batches."""
    with running(configured("llama-tiny", "fp32", 2, *overrides)) as (_, model, step):
        (module,) = model.local_modules()
        step()
        with Events(module) as found:
            step()
    return found.seen


def counted(*overrides: str) -> dict[str, int]:
    """How often this rank gathers what in its second step, of two micro-batches."""
    with running(configured("llama-tiny", "fp32", 4, *overrides)) as (_, model, step):
        step()
        with Events(torch.nn.ModuleList(model.local_modules())) as found:
            step()
    return dict(Counter(event for event in found.seen if event.startswith("gather")))


FORWARD = [
    *("gather embedding", "gather layer", "run embed_tokens"),
    *("gather layer", "run layers.0"),
    *("gather ends", "run layers.1"),
    *("run norm", "run lm_head"),
]
BACKWARD = ["gather layer", "reduce ends", "gather layer", "reduce layer", "reduce layer", "reduce embedding"]


def test_gathers_begin_a_part_ahead_and_ends_are_gathered_once(ranks):
    found = ranks(2).run(events, f"{STRATEGY}zero_stage=3", timeout_s=240)
    assert found == [[*FORWARD, *BACKWARD] * 2] * 2


def test_a_step_gathers_each_part_once_while_gradients_add_up(ranks):
    found = ranks(2).run(events, f"{STRATEGY}zero_stage=1", timeout_s=240)
    runs = [event for event in FORWARD if event.startswith("run")]
    reductions = [event for event in BACKWARD if event.startswith("reduce")]
    assert found == [[*FORWARD, *runs, *reductions]] * 2


ZERO_BUBBLE = ("model.num_layers=4", f"{STRATEGY}pipeline_model_parallel_size=2", f"{STRATEGY}pipeline_schedule=zbv")


@pytest.mark.slow  # tests/engine/pipeline/test_pipeline_streaming.py counts the gathers of the same stages
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_with_both_ends_of_a_pipeline_gathers_each_once(ranks, stage):
    """Layers of two micro-batches are gathered for forward and for backward under ZeRO-3, ends for forward alone."""
    found = ranks(4).run(counted, *ZERO_BUBBLE, f"{STRATEGY}zero_stage={stage}", timeout_s=240)
    each, layers = (2, 8) if stage == 3 else (1, 2)
    assert found[:2] == [{"gather embedding": each, "gather ends": each, "gather layer": layers}] * 2
    assert found[2:] == [{"gather layer": layers}] * 2


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ((), [("embed_tokens", ("norm", "lm_head"))]),
        (("model.share_embeddings_and_output_weights=true",), [("", ())]),
        ((), [("embed_tokens", ()), ("", ("norm", "lm_head"))]),
    ],
    ids=["whole", "tied", "pipeline"],
)
def test_a_tied_embedding_stays_in_the_root_and_each_end_is_on_its_stage(overrides, stages):
    builder = build.model_builder(configured("llama-tiny", "fp32", 1, *overrides))
    with torch.device("meta"):
        whole = builder.build()
    plan, count = builder.plan(), len(stages)
    parts = [whole] if count == 1 else [cut_stage(whole, plan, stage=stage, stages=count) for stage in range(count)]
    assert [outer_modules(part, plan) for part in parts] == stages
