"""Overhead of ``nxdt train`` over a bare PyTorch loop of the same model, data and optimizer.

Runs the two in turn in one process and prints CPU milliseconds a step, their difference and their ratio, as median
and range over the rounds. Targets: at most 3 ms a step on a tiny model, at most 2 % at 15M parameters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.run import train
from nxdt_core.train import build

CLOCK = Path(__file__).with_name("step_clock.py")
WARM_UP = 3

SHAPES = {
    # Small on purpose: what is left over is the loop itself.
    "tiny": (
        40,
        [
            "model.num_layers=1",
            "model.hidden_size=32",
            "model.ffn_hidden_size=64",
            "data.seq_length=32",
            "data.global_batch_size=1",
            "data.micro_batch_size=1",
        ],
    ),
    "15M": (
        6,
        [
            "model.num_layers=8",
            "model.hidden_size=384",
            "model.ffn_hidden_size=1024",
            "model.num_attention_heads=6",
            "model.num_kv_heads=6",
            "data.seq_length=256",
            "model.max_position_embeddings=256",
            "data.global_batch_size=4",
            "data.micro_batch_size=4",
        ],
    ),
}


def configuration(shape: list[str], steps: int, where: str, name: str) -> ResolvedConfig:
    return load(
        "recipe:llama-tiny",
        [
            *shape,
            f"plugins.local=[{CLOCK}]",
            "trainer.callbacks=[clock]",
            f"trainer.max_steps={steps}",
            "trainer.log_every_n_steps=10",
            "trainer.val_check_interval=null",
            "checkpoint.enabled=false",
            f"exp_manager.exp_dir={where}",
            f"name={name}",
        ],
    )


def nxdt_step_ms(config: ResolvedConfig) -> float:
    train(config)
    (plugin,) = (p for p in config.kernel.plugins if p.name == CLOCK.stem or CLOCK.stem in (p.module or ""))
    ticks = sys.modules[plugin.module].ticks
    return 1000 * (ticks[-1] - ticks[WARM_UP - 1]) / (len(ticks) - WARM_UP)


def bare_step_ms(config: ResolvedConfig, steps: int) -> float:
    """Return the loop that a person would write: forward, loss, backward, clip, step."""
    engine = build.engine(config)
    engine.start()
    model = engine.initialize_model(
        build.model_builder(config), precision=build.precision(config), seed=config.run.seed
    ).local_modules()[0]
    optim = config.selected("optimizer").config
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay, fused=True
    )
    dataset = build.dataset(config, build.tokenizer(config)).split("train")
    loader = build.batches(config, engine, dataset)
    model.train()
    ticks = []
    for _, (batch,) in zip(range(steps), loader, strict=False):
        logits = model(batch.input_ids, batch.position_ids, batch.document_ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ticks.append(time.process_time())
    return 1000 * (ticks[-1] - ticks[WARM_UP - 1]) / (len(ticks) - WARM_UP)


def summary(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # CPU seconds of spinning threads say nothing about the loop
    with tempfile.TemporaryDirectory() as where:
        for name, (steps, shape) in SHAPES.items():
            steps += WARM_UP
            ours, bare = [], []
            for index in range(rounds):
                config = configuration(shape, steps, where, f"{name}-{index}")
                ours.append(nxdt_step_ms(config))
                bare.append(bare_step_ms(config, steps))
            print(f"{name}: CPU ms a step, median (range) of {rounds} rounds of {steps - WARM_UP} steps, in turn")
            print(f"  nxdt train   {summary(ours)}")
            print(f"  bare loop    {summary(bare)}")
            print(f"  difference   {summary([a - b for a, b in zip(ours, bare, strict=True)])}")
            print(f"  ratio        {summary([a / b for a, b in zip(ours, bare, strict=True)], 3)}")


if __name__ == "__main__":
    main()
