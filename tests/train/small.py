"""A model and batches so small that a step takes milliseconds: overrides of the tiny recipe; and a short text."""

from importlib.resources import files
from pathlib import Path

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "data.seq_length=32",
    "data.global_batch_size=8",
    "data.micro_batch_size=4",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=null",
    "model.optim.sched.max_steps=40",
)


def write_text(path: Path) -> None:
    """Write the first 64 kB of the shipped text, of which a tokenizer of Hugging Face takes 0.25 CPU-seconds."""
    text = (files("nxdt_plugin_text") / "data" / "kjv.txt").read_text(encoding="utf-8")
    path.write_text(text[:64_000], encoding="utf-8")
