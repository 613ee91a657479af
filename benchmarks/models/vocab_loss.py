"""Claim: at 32,768 words, the loss in chunks needs at most a quarter of the extra memory of that over whole logits.

Head and loss, forward and backward, in float32 (or ``--dtype``). Extra memory is the highest that the process itself
held, less what it holds before and after: hidden states, weight, and the gradients of both, to which those of this
micro-batch are added. It is measured in a separate process for each way. Time is CPU time on a host and wall time
elsewhere, by turns in one process: medians of the ratios to the plain way in the same round, and their quartiles.
Torch's ways are included for information.

    python benchmarks/models/vocab_loss.py [--tokens 2048] [--hidden 512] [--vocab 32768] [--chunk 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional

from nxdt_core.distributed.devices import current_device, profile_of
from nxdt_core.engine.loss import linear_cross_entropies
from nxdt_core.models.loss import cross_entropy_sum

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(chunk: int) -> Mapping[str, Way]:
    """Return the sum of the losses of hidden states, weight and labels, by each way; the first is the reference."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return {
        "plain": lambda hidden, weight, labels: cross_entropy_sum(hidden @ weight.t(), labels)[0],
        "chunked": lambda hidden, weight, labels: linear_cross_entropies(
            hidden, weight, None, labels, tokens=chunk
        ).sum(),
        "torch": lambda hidden, weight, labels: functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum"),
        "torch chunked": lambda hidden, weight, labels: functional.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=options
        ),
    }


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("tokens", 2048), ("hidden", 512), ("vocab", 32768), ("chunk", 256), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    inputs = given(options)
    if options.memory_of:
        print(extra_bytes(ways(options.chunk)[options.memory_of], *inputs))
        return 0
    memory = {name: in_a_process_of_its_own(name) for name in ways(options.chunk)}
    seconds = by_turns(ways(options.chunk), inputs, options.rounds)
    for name, taken in seconds.items():
        ratios = [mine / plain for mine, plain in zip(taken, seconds["plain"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:14} extra memory {memory[name] / 2**20:6.0f} MiB, {memory[name] / memory['plain']:.2f} of plain; "
            f"time {median:.2f} of plain (quartiles {low:.2f} to {high:.2f}), median {statistics.median(taken):.2f} s"
        )
    return int(memory["chunked"] > memory["plain"] / 4)


def given(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [tokens, hidden], weight [vocab, hidden], labels [tokens]."""
    torch.manual_seed(0)
    make = functools.partial(torch.randn, device=current_device(), dtype=getattr(torch, options.dtype))
    hidden, weight = make(options.tokens, options.hidden), make(options.vocab, options.hidden) / options.hidden**0.5
    labels = torch.randint(0, options.vocab, (options.tokens,), device=hidden.device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def extra_bytes(way: Way, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the peak memory during forward and backward above that after them."""
    way(hidden[:8], weight[:64], labels[:8] % 64).backward()  # what libraries set up when they are first used
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    if profile_of(hidden.device).host:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the highest so far
    else:
        profile_of(hidden.device).operations.reset_max_memory(hidden.device)
    way(hidden, weight, labels).backward()
    if profile_of(hidden.device).host:
        return of_process("VmHWM") - of_process("VmRSS")
    return profile_of(hidden.device).operations.max_memory_bytes(hidden.device) - torch.accelerator.memory_allocated(
        hidden.device
    )


def of_process(key: str) -> int:
    """Return a value of ``/proc/self/status`` in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(lines[key].split()[0]) * 1024


def in_a_process_of_its_own(name: str) -> int:
    """:func:`extra_bytes` of the way ``name``, with this process's arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def by_turns(
    all_ways: Mapping[str, Way], inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rounds: int
) -> dict[str, list[float]]:
    """Seconds of forward and backward by each way, in every round."""
    taken: dict[str, list[float]] = {name: [] for name in all_ways}
    for turn in range(rounds + 1):
        for name in list(all_ways)[:: -1 if turn % 2 else 1]:
            began = now(inputs[0].device)
            all_ways[name](*inputs).backward()
            spent = now(inputs[0].device) - began
            if turn:  # the first warms up
                taken[name].append(spent)
    return taken


def now(device: torch.device) -> float:
    """Return the clock to compare by."""
    if profile_of(device).host:
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
