"""Claim: generation with the cache of keys and values writes as many tokens per CPU-second as transformers with its.

A Llama in the proportions of SmolLM2-135M with fewer layers, float32, equal weights, greedy, in one process, by turns:
A B, B A, … Ours is the model of a run on sequences of 128 tokens, and sees as many as it has positions. Each row gives
the median of the paired ratios ours to theirs of tokens per CPU-second, and of both the medians; above 1 is faster.
Every continuation is checked to be equal, up to ties of two tokens within 0.001 of a logit. On an accelerator seconds
are those of the clock, and the model is in bfloat16, whose ties are not checked.

Launches per token are those of ours: kernels and recordings on a device, operations other than views on the CPU. With
``--recorded``, ours with recorded passes is compared with ours without. On the CPU, ``torch.compile`` makes one graph
of a pass, so that a launch is a call of that.

    python benchmarks/models/generation.py [--tokens 64 512 2048] [--batch 1 8] [--rounds 3] [--threads 1] [--prompt 16]
        [--recorded]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.device_operations import HostOperations
from nxdt_core.distributed.devices import PROFILES, current_device, profile_of
from nxdt_core.train.generate import LoadedModel, load_model
from nxdt_core.train.sampling import Sampling

_SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
}
_RUN = """
trainer: {{max_steps: 1}}
exp_manager: {{}}
data: {{name: none, tokenizer: {{library: huggingface, model: {directory}}}, seq_length: 128, global_batch_size: 1}}
precision: {{type: {precision}}}
model: {{model_config: {directory}, optim: {{lr: 0.0}}}}
"""


def _models(layers: int) -> tuple[LoadedModel, torch.nn.Module]:
    """Ours and theirs, with equal weights."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**_SHAPE, num_hidden_layers=layers)).eval()
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(8192)}, unk_token="w0"))
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
        assert Path(directory, "tokenizer.json").is_file()
        config = Path(directory, "run.yaml")
        precision = "fp32" if profile_of(_DEVICE).host else "bf16SR"
        config.write_text(_RUN.format(directory=directory, precision=precision), encoding="utf-8")
        dtype = torch.float32 if profile_of(_DEVICE).host else torch.bfloat16
        return load_model(directory, config=str(config)), theirs.to(_DEVICE, dtype)


_DEVICE = current_device()


def _timed(write: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    clock = time.process_time if profile_of(_DEVICE).host else time.perf_counter
    begun = clock()
    written = write()  # which is on the host
    return clock() - begun, written


class _Recording(HostOperations):
    """Operations of a host that makes one graph of a pass, and counts its calls."""

    calls = 0

    def recorded(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        compiled = torch.compile(run, fullgraph=True, dynamic=False)

        def launch() -> None:
            self.calls += 1
            compiled()

        return launch


@contextmanager
def _passes(*, recorded: bool) -> Iterator[None]:
    """Let passes be recorded or not within the block."""
    profile = PROFILES[_DEVICE.type]
    PROFILES[_DEVICE.type] = replace(
        profile, records=recorded, operations=_RECORDING if profile.host else profile.operations
    )
    try:
        yield
    finally:
        PROFILES[_DEVICE.type] = profile


_RECORDING = _Recording()


class _Operations(TorchDispatchMode):
    """Counts the operations that are not views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in function._schema.returns]
        self.count += not any(alias is not None and not alias.is_write for alias in returned)
        return function(*args, **(kwargs or {}))


def _launches(write: Callable[[], object], tokens: int, *, recorded: bool) -> float:
    """Return the launches per token of what ``write`` runs, which it has run before."""
    if not profile_of(_DEVICE).host:
        with torch.profiler.profile() as profiler:
            write()
        return sum(event.count for event in profiler.key_averages() if "Launch" in event.key) / tokens
    if recorded:
        before = _RECORDING.calls
        write()
        return (_RECORDING.calls - before) / tokens
    with _Operations() as operations:
        write()
    return operations.count / tokens


def _assert_same(theirs: torch.nn.Module, prompt: list[int], own: list[int], other: list[int]) -> None:
    """Where two continuations part, both tokens must be the most likely one up to rounding."""
    assert len(own) == len(other), "the two stop at different lengths"
    part = next((place for place, (one, two) in enumerate(zip(own, other, strict=True)) if one != two), None)
    if part is not None:
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + own[:part]])).logits[0, -1]
        gap = float((logits[own[part]] - logits[other[part]]).abs())
        assert gap < 1e-3, f"the two continue differently at token {part}, where their logits differ by {gap}"


def _compare(
    ours: LoadedModel, theirs: torch.nn.Module, prompts: torch.Tensor, tokens: int, rounds: int, *, recorded: bool
) -> tuple[float, float, float, float]:
    """Ratio, tokens per second of both, and launches per token of ours."""
    rows, length = prompts.shape

    def own_way(*, recorded: bool) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in range(rows)]
        with _passes(recorded=recorded):
            for row, token in ours.writer.tokens(prompts.tolist(), Sampling(max_new_tokens=tokens)):
                written[row].append(token)
        return written

    device_records = recorded or profile_of(_DEVICE).records

    def our_way() -> list[list[int]]:
        return own_way(recorded=device_records)

    def their_way() -> list[list[int]]:
        if recorded:
            return own_way(recorded=False)
        found = theirs.generate(  # type: ignore[operator]
            prompts.to(_DEVICE),
            attention_mask=torch.ones_like(prompts, device=_DEVICE),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        written: list[list[int]] = found[:, length:].tolist()
        return written

    if device_records:
        our_way()  # which records
    ratios: list[float] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        turn = [(0, our_way), (1, their_way)]
        found = {which: _timed(write) for which, write in (turn if number % 2 == 0 else turn[::-1])}
        for prompt, own, other in zip(prompts.tolist(), found[0][1], found[1][1], strict=True):
            if profile_of(_DEVICE).host:
                _assert_same(theirs, prompt, own, other)
        ratios.append(found[1][0] / found[0][0])
        for which in (0, 1):
            seconds[which].append(found[which][0])
    speeds = [rows * tokens / statistics.median(each) for each in seconds]
    return statistics.median(ratios), speeds[0], speeds[1], _launches(our_way, tokens, recorded=device_records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row per batch size and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--recorded", action="store_true", help="compare with passes that are not recorded")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    ours, theirs = _models(args.layers)
    _compare(ours, theirs, torch.randint(0, 8192, (1, args.prompt)), 8, 1, recorded=args.recorded)
    second, other = "CPU-s" if profile_of(_DEVICE).host else "s", "unrecorded" if args.recorded else "transformers"
    columns = ("batch", "new tokens", "ratio", f"ours/{second}", f"{other}/{second}", "launches/token")
    print(*columns, sep="  ")
    for rows in args.batch:
        for tokens in args.tokens:
            prompts = torch.randint(0, 8192, (rows, args.prompt), generator=torch.Generator().manual_seed(1))
            ratio, *figures = _compare(ours, theirs, prompts, tokens, args.rounds, recorded=args.recorded)
            shown = (str(rows), str(tokens), f"{ratio:.2f}", *(f"{figure:.1f}" for figure in figures))
            print(*(text.rjust(len(name)) for text, name in zip(shown, columns, strict=True)), sep="  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
