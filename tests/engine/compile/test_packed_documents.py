"""Packed documents in runs: what layers keep of them for backward, and runs by blocks against runs under a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import flex_attention

from nxdt_core.config import load
from nxdt_core.distributed.devices import PROFILES
from nxdt_core.engine.compile import compile_layers
from nxdt_core.engine.layout import block_attention
from nxdt_core.models.attention.documents import BlockAttention
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.engine.matrix.batches import global_batch
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import configuration
from tests.sampling import slow

SEQ, ROWS, MICRO_BATCHES = 256, 2, 3
MASK_BYTES = ROWS * SEQ * SEQ * 4
MODEL = {
    "name": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "init_method_std": 0.1,
}


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


@contextmanager
def hosts_with_blocks() -> Iterator[None]:
    """Let the host attend by blocks. torch refuses gradients there, for its compiled kernel has none; without that
    kernel they are computed."""
    profile = replace(PROFILES["cpu"], block_attention=("float32", "float64"), compile_backend="aot_eager")
    with ExitStack() as stack:
        stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *_: None))
        stack.enter_context(patch.dict(PROFILES, {"cpu": profile}))
        stack.callback(torch._dynamo.reset)
        yield


def saved_bytes(layers: int, *, packed: bool, blocks: BlockAttention | None, backend: str | None) -> int:
    """Of a forward pass: distinct storages that are kept for backward, without parameters and buffers."""
    torch._dynamo.reset()
    sizes = ["model.hidden_size=64", "model.ffn_hidden_size=64", "model.num_attention_heads=4", "model.num_kv_heads=2"]
    config = load("recipe:llama-tiny", [f"model.num_layers={layers}", *sizes, "trainer.accelerator=cpu"])
    builder = build.model_builder(config)
    model = builder.build()
    for part in model.modules():
        if isinstance(part, CausalAttention):
            part.blocks = blocks
    if backend is not None:
        compile_layers(model, builder.plan(), backend=backend)
    documents = (torch.arange(SEQ) // 64).repeat(ROWS, 1) if packed else None
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros(ROWS, SEQ, dtype=torch.int64), document_ids=documents)
    assert logits.shape[:2] == (ROWS, SEQ)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in known)


@pytest.mark.parametrize(
    ("by_blocks", "backend"),
    [(False, None), slow(False, "aot_eager"), (True, None), slow(True, "aot_eager")],
    ids=["mask-as written", "mask-compiled", "blocks-as written", "blocks-compiled"],
)
def test_documents_are_kept_once_for_all_layers(backend, by_blocks):
    blocks = BlockAttention(frozenset({torch.float32}), backend="aot_eager") if by_blocks else None
    with hosts_with_blocks():
        plain, packed = (
            [saved_bytes(layers, packed=packed, blocks=blocks, backend=backend) for layers in (1, 2)]
            for packed in (False, True)
        )
    assert packed[1] - packed[0] <= plain[1] - plain[0]
    more = packed[1] - plain[1]
    assert more == MASK_BYTES if not by_blocks else more < MASK_BYTES / 50


def test_a_devices_profile_chooses_blocks():
    by_blocks, under_masks = (block_attention(PROFILES[name]) for name in ("cuda", "cpu"))
    assert by_blocks is not None
    assert torch.bfloat16 in by_blocks.dtypes
    assert torch.float64 not in by_blocks.dtypes
    assert under_masks is None


def trained(steps: int, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, norms of gradients and weights of a run on one rank."""
    config = configuration(Layout(), "float64", {**MODEL, "compile": compiled})
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    batches = global_batch(packed=True, count=MICRO_BATCHES)
    parts = (model, optimizer, batches, build.objective(config), build.schedule(config), TrainState())
    results = [train_step(*parts, max_norm=1.0) for _ in range(steps)]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.shutdown()
    return [float(value) for result in results for value in (result.loss.loss, result.grad_norm)], weights


def trained_by_blocks(steps: int, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """The same by blocks, and how often lists of blocks were made."""
    made: list[int] = []
    make = flex_attention.BlockMask.from_kv_blocks

    def counted(*args, **options):
        made.append(1)
        return make(*args, **options)

    with hosts_with_blocks(), patch.object(flex_attention.BlockMask, "from_kv_blocks", counted):
        return *trained(steps, compiled), len(made)


@pytest.mark.parametrize("compiled", [False, slow(True)], ids=["as written", "compiled"])
def test_a_run_by_blocks_computes_what_a_run_under_masks_does(ranks, steps, compiled):
    count = steps(20)
    ((expected, masked_weights),) = ranks(1).run(trained, count, False, timeout_s=240)
    ((found, weights, lists),) = ranks(1).run(trained_by_blocks, count, compiled, timeout_s=240)
    assert found == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(weights, masked_weights, rtol=1e-9, atol=1e-9)
    assert lists == MICRO_BATCHES  # for all layers, and for all steps, which repeat the batch
