"""Individual kernels: achieved TFLOP/s or GB/s, and the share of the device's peak or of its measured copy rate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from steps import optimizer_step

from accelerator.bench import Bench
from nxdt_core.distributed.devices import HOST, peak_flops, profile_of
from nxdt_core.engine.data.gradients import global_norm
from nxdt_core.engine.layout import block_attention
from nxdt_core.engine.optim.updates import BlockKernel, backend_on, round_into, separate_rows
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.models.random.rounding import rounding_key
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.tensor_shards import TensorSlice

__all__ = ["kernels"]

_PRODUCTS = ((8192, 8192, 8192), (16384, 2048, 8192), (8192, 4096, 14336), (8192, 4096, 128256))
"""Rows, inner and outer width: square, and those of the 1B and 8B models with their vocabulary."""
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_DOCUMENT = 512
"""Tokens of a document in a packed sequence."""
_OPTIMIZERS: dict[str, tuple[tuple[str, ...], int]] = {
    "AdamW, float32": ((), 28),
    "AdamW, bf16SR with bfloat16 state": (("precision.type=bf16SR", "precision.optimizer_state=bfloat16"), 14),
}
"""Overrides, and the bytes that a step has to read and write for an element."""


def kernels(bench: Bench) -> None:
    """Measure all of them, each in a separate part."""
    repeats = 2 if bench.small else 20
    for rows, inner, outer in ((64, 64, 64),) if bench.small else _PRODUCTS:
        what = f"bfloat16 product {rows} x {inner} x {outer}"
        with bench.part(what):
            a = torch.randn(rows, inner, device=bench.device, dtype=torch.bfloat16)
            b = torch.randn(inner, outer, device=bench.device, dtype=torch.bfloat16)
            _arithmetic(bench, what, lambda a=a, b=b: a @ b, 2.0 * rows * inner * outer, repeats)
    for sequence in (64,) if bench.small else (4096, 8192):
        for packed in (False, True):
            what = f"attention, {'packed' if packed else 'causal'}, {sequence:,} tokens"
            with bench.part(what):
                _attention(bench, what, sequence, repeats, packed=packed)
    copy = 0.0
    with bench.part("copies"):
        copy = _copies(bench, repeats)
    with bench.part("stochastic rounding"):
        _rounding(bench, repeats, copy)
    with bench.part("norm of gradients"):
        _norm(bench, repeats, copy)
    for name, (keys, size) in _OPTIMIZERS.items():
        with bench.part(name):
            _optimizer(bench, name, (*keys, f"model.compile={str(bench.compiles).lower()}"), size, copy)


def _arithmetic(bench: Bench, what: str, work: Callable[[], object], operations: float, repeats: int) -> None:
    seconds, peak = bench.seconds(work, repeats), peak_flops(bench.device, "bfloat16")
    rate = operations / seconds
    bench.row(what, ms=1e3 * seconds, tflop_per_s=rate / 1e12, share_of_peak=None if peak is None else rate / peak)


def _attention(bench: Bench, what: str, sequence: int, repeats: int, *, packed: bool) -> None:
    """Forward and backward. Backward has 2.5 times the operations, as flash attention recomputes the scores."""
    batch, document = max(1, 16384 // sequence) if not bench.small else 1, _DOCUMENT if not bench.small else 16
    query, key, value = (
        torch.randn(batch, sequence, heads, _HEAD_DIM, device=bench.device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    ids = (torch.arange(sequence, device=bench.device) // document).expand(batch, -1).contiguous() if packed else None
    core, gradient = CausalAttention(), torch.randn_like(query)
    core.blocks = block_attention(profile_of(bench.device))

    def work() -> None:
        torch.autograd.grad(core(query, key, value, ids), (query, key, value), gradient)

    visible = batch * sequence * (document if packed else sequence) / 2
    _arithmetic(bench, what, work, 3.5 * 4 * _HEADS * _HEAD_DIM * visible, repeats)


def _copies(bench: Bench, repeats: int) -> float:
    """Return the bytes per second that a copy within the device reads and writes."""
    size = 2**20 if bench.small else 2**32
    source, target = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    source.random_(0, 255)
    rate = 2 * size / bench.seconds(lambda: target.copy_(source), repeats)
    bench.row("copy within the device", gb_per_s=rate / 1e9)
    pinned = torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=profile_of(bench.device).pinned_host_memory)
    for what, to, of in (("copy to the host, pinned", pinned, source), ("copy from the host, pinned", target, pinned)):
        seconds = bench.seconds(lambda to=to, of=of: to.copy_(of, non_blocking=True), 2, warm_up=1)
        bench.row(what, gb_per_s=size / seconds / 1e9)
    return rate


def _rounding(bench: Bench, repeats: int, copy: float) -> None:
    """Measure one bucket of the bf16SR optimizer: 4 bytes are read and 2 written per element."""
    elements = 2**12 if bench.small else 2**25
    values = torch.randn(elements, device=bench.device)
    target = torch.empty(elements, device=bench.device, dtype=torch.bfloat16)
    backend = backend_on(bench.device) if bench.compiles else "eager"
    (key,) = separate_rows(torch.tensor([rounding_key(0, "rounding")], dtype=torch.int32, device=bench.device), backend)
    kernel = BlockKernel(round_into, backend=backend)
    place = ParameterShard(shape=(elements,), region=TensorSlice.whole((elements,)))
    seconds = bench.seconds(lambda: kernel(place, (target, values), key), repeats)
    _moved(bench, "stochastic rounding", 6 * elements, seconds, copy)


def _norm(bench: Bench, repeats: int, copy: float) -> None:
    """Measure the norm of bfloat16 gradients of large matrices, and torch's kernel for many tensors."""
    elements = 2**12 if bench.small else 2**26
    gradients = [torch.randn(elements, device=bench.device, dtype=torch.bfloat16) for _ in range(4)]
    for what, work in {
        "norm, nxdt": lambda: global_norm(gradients, None, device=bench.device, dtype=torch.float32),
        "norm, torch foreach": lambda: torch._foreach_norm(gradients, 2, torch.float32),
    }.items():
        _moved(bench, what, 8 * elements, bench.seconds(work, repeats), copy)


def _optimizer(bench: Bench, name: str, keys: tuple[str, ...], size: int, copy: float) -> None:
    """A step of a run's optimizer, and of torch's fused AdamW over the same parameters."""
    shape = (*optimizer_step.SHAPES["1M" if bench.small else "1B"], *keys)
    ours = optimizer_step.of_nxdt(shape, "name=adamw")
    theirs = optimizer_step.of_torch(shape, fused=True)
    for what, contender in ((f"{name}, nxdt", ours), (f"{name}, torch fused", theirs)):
        milliseconds = min(contender.step_ms() for _ in range(3))
        _moved(bench, what, size * contender.elements, milliseconds / 1e3, copy)


def _moved(bench: Bench, what: str, size: int, seconds: float, copy: float) -> None:
    rate = size / seconds
    bench.row(what, ms=1e3 * seconds, gb_per_s=rate / 1e9, share_of_copy=rate / copy if copy else None)
