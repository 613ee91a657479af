"""Seconds to draw initial weights: a Llama of 374M parameters on the CPU, and on an accelerator one of 8B in bfloat16.

Next to torch's own ``normal_``, in turn and each in new memory, as in a run; medians and the median ratio. Targets: a
ratio of 2 on a CPU with all its threads; 5 s for 8B and at most 1 GiB beyond the weights on a device with float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from nxdt_core.distributed.devices import HOST, available_type, profile_of
from nxdt_core.models.random.init import initialize
from nxdt_core.protocols.plan import InitRule

RULES = [InitRule(pattern="*", distribution="normal")]
SMALL = {"hidden": 1024, "ffn": 2816, "kv": 1024, "layers": 24, "vocabulary": 32000}
LARGE = {"hidden": 4096, "ffn": 14336, "kv": 1024, "layers": 32, "vocabulary": 128256}


def shapes(hidden: int, ffn: int, kv: int, layers: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Matrices of a Llama, by name."""
    yield from (("embed", (vocabulary, hidden)), ("head", (vocabulary, hidden)))
    matrices = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    matrices |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    yield from ((f"{layer}.{name}", shape) for layer in range(layers) for name, shape in matrices.items())


def seconds(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Wall and CPU seconds until the device is done."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if device != HOST:
        torch.accelerator.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(available_type())
    sizes, dtype = (SMALL, torch.float32) if device == HOST else (LARGE, torch.bfloat16)

    def weights(draw: Callable[[str, torch.Tensor], object]) -> int:
        named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape in shapes(**sizes)]
        for name, tensor in named:
            draw(name, tensor)
        return sum(tensor.numel() for _, tensor in named)

    elements = weights(
        lambda name, tensor: tensor.normal_()
    )  # compiles an accelerator's kernels, as the next line does
    initialize([("warm", torch.empty(8, device=device))], RULES, seed=0)
    profile_of(device).operations.reset_max_memory(device)
    pairs = []
    for _ in range(options.rounds):
        drawn = seconds(lambda: weights(lambda *each: initialize([each], RULES, seed=0)), device)
        pairs.append((drawn, seconds(lambda: weights(lambda name, tensor: tensor.normal_()), device)))
    for number, kind in enumerate(("wall", "CPU")):
        ours, torchs = (statistics.median(pair[side][number] for pair in pairs) for side in range(2))
        ratio = statistics.median(drawn[number] / normal[number] for drawn, normal in pairs)
        print(
            f"{elements / 1e6:,.0f}M elements on {device.type}, {options.threads} threads, {kind}: {ours:.2f} s, "
            f"{elements / ours / 1e6:,.0f}M/s; normal_ {torchs:.2f} s; ratio {ratio:.2f}"
        )
    if not profile_of(device).host:
        beyond = (profile_of(device).operations.max_memory_bytes(device) or 0) - elements * dtype.itemsize
        print(f"memory beyond the weights: {beyond / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
