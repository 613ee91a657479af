"""Claims: a step of ``adamw`` takes at most 5 % longer than that of torch's AdamW with the same kernels, and one whose
weights are rounded stochastically at most 1.5 times as long as torch's fused one in float32.

All step in turn on parameters of one Llama's shapes, in one process; each row gives the median of the ratios to torch's
in the same round and their quartiles, in CPU time on a host and in wall time elsewhere. The other optimizers are there
to be known. On a machine that others use too, set OMP_NUM_THREADS=1: threads that wait for each other count as well.

    python benchmarks/steps/optimizer_step.py [--shape 15M] [--rounds 15] [--others] [--rounded]
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable

import torch

from nxdt_core.config import load
from nxdt_core.devices import profile_of
from nxdt_core.training import build, primitives

SHAPES = {
    "1M": ("model.num_layers=2", "model.hidden_size=160", "model.ffn_hidden_size=448"),
    "15M": ("model.num_layers=8", "model.hidden_size=384", "model.ffn_hidden_size=1024"),
    "1B": ("model.num_layers=16", "model.hidden_size=2048", "model.ffn_hidden_size=8192"),
}
KERNELS = {"fused": True, "unfused": False}
"""Torch's second is foreach, on a host one parameter at a time."""
OTHERS: dict[str, tuple[str, ...]] = {"lion": (), "adafactor": ("betas=null",), "muon": ()}
ROUNDED: dict[str, tuple[str, ...]] = {
    "bf16SR": ("precision.type=bf16SR",),
    "bf16SR, bf16 state": ("precision.type=bf16SR", "precision.optimizer_state=bfloat16"),
}
"""Over the same parameters in bfloat16, against torch's fused AdamW in float32."""
CLAIMS = {"adamw": 1.05, "bf16SR": 1.5}
"""Highest ratio by the first word of a row."""
STEPS = 3
"""Steps of one timing."""


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
    model = primitives.initialize_parallel_model(config, engine)
    optimizer = primitives.initialize_parallel_optimizer(config, engine, model)
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
    parameters = [p for _, p in primitives.initialize_parallel_model(config, engine).named_parameters()]
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
    parser.add_argument("--shape", choices=SHAPES, default="15M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--others", action="store_true", help="time the other optimizers too, against torch's fused")
    parser.add_argument("--rounded", action="store_true", help="time AdamW with stochastic rounding, against fused")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    pairs = [
        (f"adamw {name}", of_nxdt(shape, "name=adamw", f"fused={str(fused).lower()}"), name)
        for name, fused in KERNELS.items()
    ]
    if options.others:
        pairs += [(name, of_nxdt(shape, f"name={name}", *keys), "fused") for name, keys in OTHERS.items()]
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
    print(f"{options.shape}, {options.rounds} rounds")
    slower = False
    for label, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{label:>18}  {statistics.median(spent[label]):8.2f} ms  x {middle:.3f}  ({low:.3f} to {high:.3f})")
        slower |= middle > CLAIMS.get(re.split("[ ,]", label)[0], math.inf)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
