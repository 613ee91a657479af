"""The smallest plugins, in one file each: how much of nxdt their author must know, and that a run trains with them."""

import json
import re

import pytest

MODEL = """
import torch
from nxdt_core.api import ModelComponent, hookimpl
from nxdt_core.config.section import Section
from nxdt_core.protocols.model import ModelBuilder


class BigramConfig(Section):
    vocab_size: int = 272
    hidden_size: int = 32


class Bigram(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = torch.nn.RMSNorm(config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, position_ids=None, document_ids=None):
        return self.head(self.norm(self.embed(input_ids)))


class BigramBuilder(ModelBuilder):
    def build(self):
        return Bigram(self.config)


@hookimpl
def nxdt_models():
    return [ModelComponent(name="bigram", target=f"{__name__}:BigramBuilder", config=f"{__name__}:BigramConfig")]
"""
OPTIMIZER = """
import torch
from nxdt_core.api import Component, hookimpl


class SignSGD(torch.optim.Optimizer):
    def __init__(self, groups, config):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.sign(), alpha=group["lr"])


@hookimpl
def nxdt_optimizers():
    return [Component(name="sign", target=f"{__name__}:SignSGD")]
"""
DATASET = """
import numpy as np
from nxdt_core.api import Component, hookimpl
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DatasetSplits, MapDataset


class Counting(DatasetSplits, MapDataset):
    def __init__(self, config, context):
        self.length = context.seq_length

    def split(self, name):
        return self if name == "train" else None

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        tokens = (index + np.arange(self.length + 1)) % 256
        return Sample(input_ids=tokens[:-1], labels=tokens[1:])

    def fingerprint(self):
        return "1"


@hookimpl
def nxdt_datasets():
    return [Component(name="counting", target=f"{__name__}:Counting")]
"""
MODEL_KEYS = ("model={name: bigram, optim: {name: adamw, lr: 1.0e-2}}",)
OPTIMIZER_KEYS = ("model.optim={name: sign, lr: 1.0e-3}",)
DATASET_KEYS = ("data={name: counting, seq_length: 32, global_batch_size: 4, micro_batch_size: 2}",)


@pytest.mark.parametrize(
    ("source", "lines", "names", "keys"),
    [(MODEL, 40, 6, MODEL_KEYS), (OPTIMIZER, 20, 3, OPTIMIZER_KEYS), (DATASET, 25, 5, DATASET_KEYS)],
    ids=["model", "optimizer", "dataset"],
)
def test_a_smallest_plugin_trains(nxdt, work, source, lines, names, keys):
    assert sum(bool(line) for line in source.splitlines()) <= lines
    imported = [name for line in re.findall(r"from nxdt_core\S* import (.*)", source) for name in line.split(", ")]
    assert len(imported) <= names
    (work / "mine.py").write_text(source)
    short = ("trainer.max_steps=3", "trainer.log_every_n_steps=1", "trainer.val_check_interval=null")
    done = nxdt("train", "recipe:llama-tiny", "plugins.local=[mine.py]", *short, *keys, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (work / "nxdt_experiments/llama-tiny/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
