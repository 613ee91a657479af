"""Claim: a step of LoRA takes no longer than peft's on the same model, and no more memory.

Both tune the same Llama, with the same weights, targets, rank, dropout, batch and optimizer; peft's is transformers'
model in a bare loop. They step in turn in one process, A B, B A, …, and each row gives the median of the ratios of
one round and their quartiles. Time is the CPU's on a host and wall time elsewhere. Memory is what the step itself adds
at its fullest moment: on an accelerator as the allocator counts it, on a host as the bytes that backward keeps. The
exit status is 1 where the claim fails; of time, by more than 5 % of noise, as much as `optimizer_step.py` allows.

    python benchmarks/models/lora.py [--shape 15M] [--rounds 7] [--seq 256] [--dropout 0.05]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxdt_core.config import load
from nxdt_core.distributed.devices import profile_of
from nxdt_core.hf.directory import save_hf
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

SHAPES = {
    "1M": ("model.num_layers=2", "model.hidden_size=160", "model.ffn_hidden_size=448"),
    "15M": ("model.num_layers=8", "model.hidden_size=384", "model.ffn_hidden_size=1024"),
    "1B": ("model.num_layers=16", "model.hidden_size=2048", "model.ffn_hidden_size=8192"),
}
RANK, ALPHA = 16, 32
VARIANTS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": "true"}, "qlora": {"base_dtype": "nf4"}}
LR = 1e-4
TIME_CLAIM, MEMORY_CLAIM = 1.05, 1.0
"""Largest ratios to peft's."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One training step, with its own batch."""

    step: Callable[[], None]
    device: torch.device

    def step_ms(self) -> float:
        """Milliseconds of a step."""
        self._wait()
        began = self._now()
        self.step()
        self._wait()
        return 1000 * (self._now() - began)

    def memory_mib(self) -> float:
        """Return what a step adds."""
        if not profile_of(self.device).host:
            self._wait()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            self.step()
            return (torch.accelerator.max_memory_allocated() - before) / 2**20
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.step()
        return sum(kept.values()) / 2**20

    def _now(self) -> float:
        return time.process_time() if profile_of(self.device).host else time.perf_counter()

    def _wait(self) -> None:
        if not profile_of(self.device).host:
            torch.accelerator.synchronize()


def contenders(shape: str, seq: int, dropout: float, variant: str) -> tuple[Contender, Contender]:
    """Ours and peft's."""
    given = [*SHAPES[shape], f"data.seq_length={seq}", f"model.max_position_embeddings={seq}"]
    given += ["data.micro_batch_size=2", "data.global_batch_size=2", "model.optim.name=adamw", f"model.optim.lr={LR}"]
    given += ["model.optim.sched=null", "model.optim.weight_decay=0", "model.vocab_size=4096"]
    given += ["adapter.name=lora", f"adapter.lora_rank={RANK}", f"adapter.lora_alpha={ALPHA}"]
    given += [
        f"adapter.lora_dropout={dropout}",
        *(f"adapter.{key}={value}" for key, value in VARIANTS[variant].items()),
    ]
    config = load("recipe:llama-tiny", given)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    for adapter in build.adapters(config):
        adapter.begin(model, config, engine.ranks)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    ids = torch.randint(0, 4096, (2, seq), generator=torch.Generator().manual_seed(0))
    batch = Batch(input_ids=ids, labels=ids.roll(-1, 1))
    ours = Contender(
        step=lambda: _discard(train_step(model, optimizer, [batch], objective, schedule, state, max_norm=1.0)),
        device=engine.device,
    )
    with tempfile.TemporaryDirectory() as directory:
        base = {name: weight for name, weight in model.state_dict().items() if name not in model.added}
        save_hf(Path(directory, "base"), build.model_builder(config), base)  # type: ignore[arg-type]
        theirs = _of_peft(Path(directory, "base"), ids, dropout, engine.device, variant)
    return ours, theirs


def _of_peft(base: Path, ids: torch.Tensor, dropout: float, device: torch.device, variant: str) -> Contender:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules="all-linear", use_dora=variant == "dora"
    )
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    plain = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        attn_implementation="sdpa",
        quantization_config=four_bits if variant == "qlora" else None,
    )
    model = get_peft_model(plain, config).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0, fused=True)
    ids = ids.to(device)
    labels = ids.roll(-1, 1)

    def step() -> None:
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step=step, device=device)


def _discard(_: object) -> None:
    """Ignore the step; only that it was taken counts."""


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="15M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.05)
    asked = parser.parse_args()
    print(f"{'':8}{'nxdt ms':>10}{'peft ms':>10}{'ratio':>8}{'quartiles':>16}{'nxdt MiB':>10}{'peft MiB':>10}")
    failed = False
    for variant in VARIANTS:
        ours, theirs = contenders(asked.shape, asked.seq, asked.dropout, variant)
        memory = ours.memory_mib(), theirs.memory_mib()
        times = by_turns(ours, theirs, asked.rounds)
        low, ratio, high = statistics.quantiles([own / other for own, other in times], n=4)
        own, other = (statistics.median(column) for column in zip(*times, strict=True))
        spread = f"{low:.2f} to {high:.2f}"
        row = f"{variant:8}{own:10.1f}{other:10.1f}{ratio:8.2f}{spread:>16}"
        print(f"{row}{memory[0]:10.1f}{memory[1]:10.1f}", flush=True)
        failed |= ratio > TIME_CLAIM or memory[0] > MEMORY_CLAIM * memory[1]
    return int(failed)


def by_turns(ours: Contender, theirs: Contender, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of a step of each, by round."""
    times = []
    for turn in range(rounds):
        spent = {id(each): each.step_ms() for each in ((ours, theirs) if turn % 2 else (theirs, ours))}
        times.append((spent[id(ours)], spent[id(theirs)]))
    return times


if __name__ == "__main__":
    sys.exit(main())
