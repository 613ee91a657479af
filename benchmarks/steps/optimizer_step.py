"""Claim: a step of ``adamw`` takes at most 5 % longer than that of torch's AdamW with the same kernels.

All step in turn on parameters of one Llama's shapes, in one process; each row gives the median of the ratios to torch's
in the same round and their quartiles, in CPU time on a host and in wall time elsewhere. The other optimizers are there
to be known. On a machine that others use too, set OMP_NUM_THREADS=1: threads that wait for each other count as well.

    python benchmarks/steps/optimizer_step.py [--shape 15M] [--rounds 15] [--others] [--rounded]
    python benchmarks/steps/optimizer_step.py --count [--shape 1.5B]

``--count`` needs no device and times nothing. It counts what norm, clipping and update launch on a CUDA device, and the
bytes that they move, with status 1 unless it is fewer bytes than torch's ``clip_grad_norm_`` and fused AdamW need.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.config import load
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.data.gradients import global_norm
from nxdt_core.engine.optim.optimizer import TorchOptimizer
from nxdt_core.engine.optim.updates import BlockKernel
from nxdt_core.engine.parameters import parameter_groups
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer

SHAPES = {
    "1M": ("model.num_layers=2", "model.hidden_size=160", "model.ffn_hidden_size=448"),
    "15M": ("model.num_layers=8", "model.hidden_size=384", "model.ffn_hidden_size=1024"),
    "1B": ("model.num_layers=16", "model.hidden_size=2048", "model.ffn_hidden_size=8192"),
}
SHAPES["1.5B"] = (
    *SHAPES["1B"],
    *("model.num_attention_heads=32", "model.num_kv_heads=8", "model.vocab_size=128256"),
)
"""As stage ``train-1b`` of ``benchmarks/accelerator`` trains it."""
SHAPES["8B"] = (
    *("model.num_layers=32", "model.hidden_size=4096", "model.ffn_hidden_size=14336"),
    *SHAPES["1.5B"][len(SHAPES["1B"]) :],
)
"""As stage ``train-8b``, to count."""
KERNELS = {"fused": True, "unfused": False}
"""Torch's second is foreach, on a host one parameter at a time."""
OTHERS = ("lion", "adafactor", "muon")
ROUNDED: dict[str, tuple[str, ...]] = {
    "bf16SR": ("precision.type=bf16SR",),
    "bf16SR, bf16 state": ("precision.type=bf16SR", "precision.optimizer_state=bfloat16"),
}
"""Over the same parameters in bfloat16, against torch's fused AdamW in float32."""
CLAIMS = {"adamw": 1.05}
"""Highest ratio by the first word of a row."""
STEPS = 3
"""Steps of one timing."""


CHUNK = 65536
"""Elements of a thread block of torch's multi-tensor kernels."""
LIMITS = {"4 KiB": ((110, 64, 48, 36), 320), "32 KiB": ((770, 448, 336, 252), 2240)}
"""By size of a kernel's arguments: tensors by number of lists, and blocks, of a launch. Torch built for CUDA 13 has
32 KiB since 2.12; see ``torch/include/ATen/native/cuda/MultiTensorApply.cuh``."""


class Kernels(TorchDispatchMode):
    """Counts launches by operation and limit, and the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name, results = function.__name__.partition(".")[0], function._schema.returns
        is_view = any(part.alias_info and not part.alias_info.is_write for part in results)
        if function.namespace != "aten" or is_view or name.startswith("empty"):
            return found
        lists = [value for value in args if isinstance(value, list) and value]
        several, fused = name.startswith(("_foreach", "_fused")), name.startswith("_fused")
        for limit in LIMITS:
            sizes = [tensor.numel() for tensor in lists[0]] if several else [1]
            # A fused kernel gets the steps of its tensors in addition to the lists.
            self.launches[name, limit] += launches(sizes, limit, depth=len(lists) - fused if several else 1)
        for part, value in zip(function._schema.arguments, args, strict=False):
            unscaled = part.name == "grads" and (kwargs or {}).get("grad_scale") is None
            written = part.alias_info and part.alias_info.is_write and not unscaled
            self.bytes[name] += size_bytes(value) * (2 if written else 1)
        self.bytes[name] += 0 if any(part.alias_info for part in results) else size_bytes(found)
        return found

    def updated(self, place: object, tensors: Sequence[torch.Tensor], *_: object) -> None:
        """Count a compiled kernel of ours that writes all of ``tensors`` but the gradient."""
        for limit in LIMITS:
            self.launches["AdamW", limit] += 1
        self.bytes["AdamW"] += 2 * size_bytes(tensors) - size_bytes(tensors[1])

    def report(self, label: str, elements: int) -> list[float]:
        """Print a row for each operation that touches all ``elements``, and return that of all together."""
        large = [name for name, size in self.bytes.items() if size > elements]
        rows = {name: [name] for name in large} | {"others": [*self.bytes.keys() - {*large}], "all": [*self.bytes]}
        for row, names in rows.items():
            found: list[float] = [sum(self.launches[name, limit] for name in names) for limit in LIMITS]
            found.append(sum(self.bytes[name] for name in names) / elements)
            print(f"{f'{label} {row}':22}{found[0]:20}{found[1]:20}{found[2]:21.1f}")
        return found


def launches(sizes: Iterable[int], limit: str, *, depth: int) -> int:
    """Return the kernels that torch starts for ``depth`` lists of tensors of so many elements."""
    most_tensors, most_blocks = LIMITS[limit][0][depth - 1], LIMITS[limit][1]
    count = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        for left in reversed(range(math.ceil(size / CHUNK))):
            blocks += 1
            if blocks == most_blocks or (tensors == most_tensors and not left):
                count, tensors, blocks = count + 1, int(left > 0), 0
    return count + (blocks > 0)


def size_bytes(value: Any) -> int:
    """Return the size of a tensor, or of those in a sequence."""
    if isinstance(value, list | tuple):
        return sum(map(size_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def clipped_steps(shape: tuple[str, ...]) -> tuple[list[torch.nn.Parameter], dict[str, Callable[[], object]]]:
    """Return parameters without memory, and the ends of steps over them: ours and torch's."""
    config = load("recipe:llama-tiny", [*shape, "model.optim.name=adamw"])
    builder, optimizer = build.model_builder(config), config.selected("optimizer")
    make = functools.partial(optimizer.component.load_target(), config=optimizer.config)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in builder.build().named_parameters()}
    named = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
    parameters = [*named.values()]
    groups = parameter_groups(named.items(), builder.plan(), lr=1e-3, weight_decay=0.1, decay_norms=False)
    ours = TorchOptimizer(
        make,
        groups,
        lambda: global_norm([p.grad for p in parameters], None, device=HOST, dtype=torch.float32),
        backend="compile",
    )
    theirs = torch.optim.AdamW([{**group, "names": None} for group in groups], fused=True)
    return parameters, {
        "nxdt": lambda: (ours.clip_grad_norm(1.0), ours.step()),
        "torch": lambda: (torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), theirs.step()),
    }


def count(shape: tuple[str, ...]) -> int:
    """Print launches and bytes of clipped steps, which have no memory; return 1 where the claim does not hold."""
    print(f"{'':22}" + "".join(f"{f'launches, {limit}':>20}" for limit in LIMITS) + f"{'bytes per parameter':>21}")
    totals = []
    with FakeTensorMode():
        parameters, steps = clipped_steps(shape)
        for label, step in steps.items():
            for kernels in (Kernels(), Kernels()):  # the first step makes the optimizer's state
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                with kernels, mock.patch.object(BlockKernel, "__call__", kernels.updated):
                    step()
            totals.append(kernels.report(label, sum(parameter.numel() for parameter in parameters)))
    ours, theirs = totals
    return int(ours[-1] >= theirs[-1])


class Contender:
    """Parameters, their gradients, and a way to step."""

    def __init__(self, parameters: list[torch.nn.Parameter], step: Callable[[], None]) -> None:
        self._parameters, self._step = parameters, step
        draw = torch.Generator(device=parameters[0].device).manual_seed(0)
        self._gradients = [torch.randn(p.shape, generator=draw, device=p.device).to(p.dtype) for p in parameters]
        self._device = parameters[0].device
        self.step_ms()

    @property
    def elements(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    def step_ms(self) -> float:
        """Milliseconds a step; gradients are dropped by each step and given back in between."""
        spent = 0.0
        for _ in range(STEPS):
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
            self._wait()
            began = self._now()
            self._step()
            self._wait()
            spent += self._now() - began
        return 1000 * spent / STEPS

    def _now(self) -> float:
        return time.process_time() if profile_of(self._device).host else time.perf_counter()

    def _wait(self) -> None:
        if not profile_of(self._device).host:
            torch.accelerator.synchronize()


def of_nxdt(shape: tuple[str, ...], *optim: str, precision: tuple[str, ...] = ()) -> Contender:
    """Return the optimizer of a run, including the decision on values that are not finite."""
    config = load("recipe:llama-tiny", [*shape, *precision, *(f"model.optim.{key}" for key in optim)])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    loss, norm = torch.ones(2, device=engine.device)

    def step() -> None:
        optimizer.reject_unless_finite(loss, norm)
        optimizer.step()

    return Contender([p for _, p in model.named_parameters()], step)


def of_torch(shape: tuple[str, ...], *, fused: bool) -> Contender:
    """Return torch's AdamW over the same parameters, also without decay of norms."""
    config = load("recipe:llama-tiny", list(shape))
    engine = build.engine(config)
    engine.start()
    parameters = [p for _, p in initialize_parallel_model(config, engine).named_parameters()]
    decayed, exempt = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    groups = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, fused=fused)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(parameters, step)


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count kernels and bytes of a clipped step instead")
    parser.add_argument("--shape", choices=SHAPES, help="15M, or to count 1.5B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--others", action="store_true", help="time the other optimizers too, against torch's fused")
    parser.add_argument("--rounded", action="store_true", help="time AdamW with stochastic rounding, against fused")
    options = parser.parse_args()
    if options.count:
        return count(SHAPES[options.shape or "1.5B"])
    shape = SHAPES[options.shape or "15M"]
    pairs = [
        (f"adamw {name}", of_nxdt(shape, "name=adamw", f"fused={str(fused).lower()}"), name)
        for name, fused in KERNELS.items()
    ]
    if options.others:
        pairs += [(name, of_nxdt(shape, f"name={name}"), "fused") for name in OTHERS]
    if options.rounded:
        pairs += [(name, of_nxdt(shape, "name=adamw", precision=keys), "fused") for name, keys in ROUNDED.items()]
    torchs = {name: of_torch(shape, fused=fused) for name, fused in KERNELS.items()}
    ratios: dict[str, list[float]] = {label: [] for label, *_ in pairs}
    spent: dict[str, list[float]] = {label: [] for label, *_ in pairs}
    for turn in range(options.rounds):
        for label, ours, base in pairs if turn % 2 else reversed(pairs):
            first, second = (ours, torchs[base]) if turn % 2 else (torchs[base], ours)
            times = {id(each): each.step_ms() for each in (first, second)}
            ratios[label].append(times[id(ours)] / times[id(torchs[base])])
            spent[label].append(times[id(ours)])
    print(f"{options.shape or '15M'}, {options.rounds} rounds")
    slower = False
    for label, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{label:>18}  {statistics.median(spent[label]):8.2f} ms  x {middle:.3f}  ({low:.3f} to {high:.3f})")
        slower |= middle > CLAIMS.get(re.split("[ ,]", label)[0], math.inf)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
