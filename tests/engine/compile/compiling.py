"""Runs with ``model.compile``, and what each rank of them counts: graphs, breaks, recompilations and losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from nxdt_core.distributed.devices import PROFILES
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState, seed_all
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.engine.layouts.adapting import KINDS
from tests.engine.matrix.batches import ROWS, SEQ, VOCAB
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import Numbers, configuration
from tests.graph_counts import GraphCounts
from tests.integer_widths import IntegerWidths

__all__ = ["CASES", "STEPS", "Case", "Counted", "counted", "expected", "losses", "widths"]

STEPS = 20
COMPARED = 3
"""Steps whose losses are compared with those of a run that is not compiled."""
_MICRO_BATCHES = 2
_LLAMA, _GPT, _MIXTRAL, _HF, _HF_EXPERTS = (
    {**KINDS[kind][0], "num_layers": 2} if "num_layers" in KINDS[kind][0] else KINDS[kind][0]
    for kind in ("linear", "fused", "experts", "hf", "hf-experts")
)
_CAPACITY = {**_MIXTRAL, "moe": {"num_experts": 4, "capacity_factor": 0.75, "router_aux_loss_coef": 0.1}}
_DROPLESS = {**_MIXTRAL, "moe": {"num_experts": 4, "dropless": True, "router_aux_loss_coef": 0.1}}
_ALONE = Layout()
_FULL = {"activations_checkpoint_granularity": "full"}
_DROPOUT = {**_GPT, "hidden_dropout": 0.3, "ffn_dropout": 0.3}


def _selective(*names: str) -> dict[str, Any]:
    return {"activations_checkpoint_granularity": "selective", "activations_checkpoint_recompute": [*names]}


def _chunks(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "moe": {**model["moe"], "exchange_chunks": 2}}


def _moe_dropout(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "moe": {**model["moe"], "dropout": 0.3}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and how many graphs it may have."""

    model: Mapping[str, Any]
    adapter: Mapping[str, Any] | None = None
    layout: Layout = _ALONE
    packed: bool = False
    """Whether each step brings documents with other borders."""
    lengths: tuple[int, ...] = (SEQ,)
    """Of the sequences, step by step and over again; the second one brings graphs for any."""
    graphs: int = 2
    """Of each kind of layer one for training and one for validation. The first layer of a model with LoRA is of a kind
    of its own in training: no gradient leaves it."""
    loss_graphs: int = 2
    """One for forward and one for backward."""


CASES = {
    "llama": Case(model=_LLAMA),
    "packed": Case(model=_LLAMA, packed=True),
    "window": Case(model={**_DROPLESS, "sliding_window": 5}, packed=True),
    "gpt": Case(model=_GPT),
    "dropout": Case(model=_DROPOUT),
    "lengths": Case(model=_DROPOUT, packed=True, lengths=(24, 16, 20, 22), graphs=4, loss_graphs=4),
    "lora": Case(model=_LLAMA, adapter=KINDS["linear"][1], graphs=3),
    "lora-dropout": Case(model=_LLAMA, adapter=KINDS["dora-dropout"][1], graphs=3),
    "capacity": Case(model=_CAPACITY),
    "dropless": Case(model=_DROPLESS),
    "dropless-dropout": Case(model=_moe_dropout(_DROPLESS)),
    "capacity-dropout": Case(model=_moe_dropout(_CAPACITY)),
    "dropless-dropout-ep2": Case(model=_chunks(_moe_dropout(_DROPLESS)), layout=Layout(dp=2, ep=2)),
    "lora-experts-dropout": Case(model=_DROPLESS, adapter=KINDS["experts-dropout"][1], graphs=3),
    "every-second": Case(model={**_CAPACITY, "moe": {**_CAPACITY["moe"], "frequency": 2}}, graphs=4),
    "hf": Case(model=_HF, packed=True, graphs=4),  # every second layer has a window
    "selective": Case(model={**_LLAMA, **_selective("CoreAttention"), "num_layers": 12}),
    "full": Case(model={**_LLAMA, **_FULL, "num_layers": 12}),
    "full-dropout": Case(model={**_DROPOUT, **_FULL}),
    "full-capacity": Case(model={**_CAPACITY, **_FULL}),
    "selective-dropless": Case(model={**_DROPLESS, **_selective("LlamaMLP")}),
    "chunked": Case(model={**_LLAMA, "loss_chunk_tokens": 20}, loss_graphs=4),  # the last chunk is shorter
    "tp2-chunked": Case(model={**_LLAMA, "loss_chunk_tokens": 20}, layout=Layout(tp=2), loss_graphs=4),
    "tp2": Case(model=_LLAMA, layout=Layout(tp=2, sp=True)),
    "tp2-dropout": Case(model=_DROPOUT, layout=Layout(tp=2)),
    "zero3": Case(model=_LLAMA, layout=Layout(dp=2, zero=3)),
    "ring": Case(model=_LLAMA, layout=Layout(cp=2, cp_method="ring"), packed=True),
    "gather": Case(model={**_LLAMA, **_selective("CoreAttention")}, layout=Layout(cp=2, cp_method="gather")),
    "capacity-ep2": Case(model=_CAPACITY, layout=Layout(dp=2, ep=2)),
    "dropless-ep2": Case(model=_DROPLESS, layout=Layout(dp=2, ep=2)),
    "dropless-ep2-chunks": Case(model=_chunks(_DROPLESS), layout=Layout(dp=2, ep=2)),
    "capacity-ep2-chunks": Case(model=_chunks(_CAPACITY), layout=Layout(dp=2, ep=2)),
    "dropless-ep2-full": Case(model={**_DROPLESS, **_FULL}, layout=Layout(dp=2, ep=2, tp=2, sp=True)),
}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One rank's account."""

    graphs: int
    breaks: int
    late: int
    """Graphs and recompilations after the first step and validation, of sequences of several lengths after the second.
    """
    losses: list[float]
    """Of the first steps, with those of their validations."""


def counted(case: Case, steps: int, backend: str) -> Counted:
    """Train and validate by turns, on each rank of ``case.layout``."""
    torch._dynamo.reset()
    with _backend(backend), GraphCounts() as all_of_them:
        later = GraphCounts()
        losses = []
        for step, loss in enumerate(_losses(case, steps, compiled=True)):
            losses.append(loss)
            if step + 1 == min(len(case.lengths), 2):
                later.__enter__()
        later.__exit__(None, None, None)
    return Counted(
        graphs=all_of_them.graphs,
        breaks=all_of_them.breaks,
        late=later.graphs + later.recompilations,
        losses=losses[:COMPARED],
    )


def widths(case: Case) -> IntegerWidths:
    """What is found in the graphs of two steps and validations; the length of the second is a dynamic int."""
    torch._dynamo.reset()
    found = IntegerWidths()
    with _backend(found):
        list(_losses(replace(case, lengths=(SEQ, SEQ - 8)), 2, compiled=True))
    return found


def expected(case: Case) -> list[float]:
    """The losses of a run that is not compiled. (A process joins its ranks once, and so runs once.)"""
    return list(_losses(case, COMPARED, compiled=False))


@contextmanager
def _backend(backend: Any) -> Iterator[None]:
    """Inductor would take minutes, and counts the same."""
    with patch.dict(PROFILES, {"cpu": replace(PROFILES["cpu"], compile_backend=backend)}):
        yield


def losses(case: Case, numbers: Numbers, compiled: bool) -> list[float]:
    """Those of a run in ``numbers``."""
    with _backend("aot_eager"):
        return list(_losses(case, STEPS, compiled=compiled, numbers=numbers))


def _losses(case: Case, steps: int, *, compiled: bool, numbers: Numbers = "fp32") -> Iterator[float]:
    """Of each step, with that of a validation after it."""
    model_keys = {**case.model, "compile": compiled}
    config = configuration(case.layout, numbers, model_keys, case.adapter)
    engine = build.engine(config)
    engine.start()
    seed_all(config.run.seed)
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    for step in range(steps):
        own = _MICRO_BATCHES * engine.rank_info.dp_rank
        length = case.lengths[step % len(case.lengths)]
        seeds = range(1000 * step + own, 1000 * step + own + _MICRO_BATCHES)
        batches = [_batch(seed, length, packed=case.packed) for seed in seeds]
        result = train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0)
        yield float(result.loss.loss) + float(model.run_eval(batches, objective).loss)
    engine.shutdown()


def _batch(seed: int, length: int, *, packed: bool) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (ROWS, length + 1), generator=random)
    position_ids = document_ids = None
    if packed:
        starts = torch.rand(ROWS, length, generator=random) < 0.2
        starts[:, 0] = True
        document_ids = starts.long().cumsum(1) - 1
        places = torch.arange(length).expand(ROWS, length)
        position_ids = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(input_ids=tokens[:, :-1], labels=tokens[:, 1:], position_ids=position_ids, document_ids=document_ids)
