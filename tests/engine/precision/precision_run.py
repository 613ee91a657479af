"""A tiny language model, trained in a configured precision and layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.tensor_shards import LocalShard
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

ROWS, SEQ = 8, 16
SMALL = (
    "trainer.accelerator=cpu",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    f"data.seq_length={SEQ}",
    f"data.global_batch_size={ROWS}",
    "model.optim.sched.name=constant",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank has at its end."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Whole ones where this rank has them, else its shards; float32, whatever they are trained in."""
    dtypes: frozenset[torch.dtype]
    """Of weights."""
    state_dtypes: frozenset[torch.dtype]
    """Of the optimizer's state."""
    product_dtypes: frozenset[torch.dtype]
    """Of the results of matrix products, forward and backward."""


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its product of local tensors comes here next
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes.add(result.dtype)
        return result


def train(overrides, *, steps, save_at=None, resume=False, micro_batch=2):
    """Train until ``steps`` steps are done, from the newest checkpoint with ``resume``, or from its model alone with
    ``resume="weights"`` (and then not a step); save one after step ``save_at``."""
    config = load("recipe:llama-tiny", [*SMALL, f"data.micro_batch_size={micro_batch}", *overrides])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    session = TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state)
    if resume:
        storage = build.storage(config)
        newest = checkpoint.latest(storage, warn=print)
        full = None if resume == "weights" else optimizer
        TrainSession(config, engine=engine, model=model, optimizer=full, state=state).load_checkpoint(storage, newest)
    batches = _batches(engine.rank_info, micro_batch)
    losses = []
    with Products() as products:
        while state.step < steps:
            done = train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0)
            losses.append(float(done.loss.loss))
            if state.step == save_at:
                session.save()
    held = dict(model.named_parameters())
    outcome = Outcome(
        losses=losses,
        weights={name: _whole(p).float() for name, p in held.items()},
        dtypes=frozenset(p.dtype for p in held.values()),
        state_dtypes=frozenset(v.dtype for v in map(_elements, optimizer.state_dict().values()) if v.dim()),
        product_dtypes=frozenset(products.dtypes),
    )
    engine.shutdown()
    return outcome


def place(directory: Path) -> str:
    """The override that saves there."""
    return f"checkpoint.uri={directory.as_uri()}"


def _batches(info, rows):
    ids = torch.randint(272, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    own = ROWS // info.dp_size
    starts = range(info.dp_rank * own, (info.dp_rank + 1) * own, rows)
    return [
        Batch(input_ids=ids[i : i + rows, :-1].contiguous(), labels=ids[i : i + rows, 1:].contiguous()) for i in starts
    ]


def _elements(held):
    return held.tensor if isinstance(held, LocalShard) else held


def _whole(parameter):
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return local_of(full).detach().clone()
