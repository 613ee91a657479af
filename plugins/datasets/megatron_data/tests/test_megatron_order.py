"""Ids of samples that a file of NxD Training takes, read directly and migrated: those of Megatron's sampler."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from nxdt_core import config
from nxdt_core.config.sources import migrate
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.kernel import Kernel
from nxdt_core.train import build

COUNT, BATCH, MICRO, RANKS = 200, 8, 2, 2

FILE = """\
name: run
model_source: megatron
seed: 11
trainer: {{devices: 2, max_steps: 50, gradient_clip_val: 1.0}}
distributed_strategy: {{tensor_model_parallel_size: 1, zero1: True}}
data:
  micro_batch_size: 2
  global_batch_size: 8
  data_prefix: {prefix}
  data_impl: mmap
  splits_string: 1,0,0
  seq_length: 16
  dataloader_type: {order}
  tokenizer: {{library: byte}}
model:
  vocab_size: 259
  encoder_seq_length: 16
  max_position_embeddings: 16
  num_layers: 2
  hidden_size: 8
  ffn_hidden_size: 16
  num_attention_heads: 2
  position_embedding_type: learned_absolute
  normalization: layernorm
  activation: gelu
  optim:
    name: adamw
    lr: 1e-3
    sched: {{name: CosineAnnealing, warmup_steps: 1, constant_steps: 0, min_lr: 1e-4}}
precision: {{type: fp32}}
"""


def sampled_by_megatron(total):
    """The ids of each step over all ranks, by the rule of ``MegatronPretrainingSampler``: consecutive micro-batches."""
    ids = iter(range(total))
    while len(step := list(islice(ids, BATCH))) == BATCH:
        yield step


@pytest.fixture(params=["read directly", "migrated"])
def loaded(request, by_hand, tmp_path):
    """Loads the file with a kind of sampler."""
    draw = random.Random(3)
    prefix = by_hand("corpus", [[*(draw.randrange(8, 250) for _ in range(16)), 7] for _ in range(260)])

    def load(order):
        source, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
        source.write_text(FILE.format(prefix=prefix, order=order))
        if request.param == "read directly":
            return prefix, config.load(source)
        done = migrate(source, target, "nxdt", Kernel.start())
        assert done.remaining == ()
        target.write_text(done.text)
        return prefix, config.load(target, [f"{key}=259" for key, _ in done.to_set])

    return load


def steps_of(loaded):
    """The tokens of each step over all ranks, in the order of the run."""
    dataset = build.dataset(loaded, build.tokenizer(loaded)).split("train")
    data = loaded.run.data
    loaders = [
        GlobalBatchLoader(
            dataset,
            global_batch_size=data.global_batch_size,
            micro_batch_size=data.micro_batch_size,
            seed=loaded.run.seed,
            shuffle=data.shuffle,
            dp_rank=rank,
            dp_size=RANKS,
        )
        for rank in range(RANKS)
    ]
    for parts in islice(zip(*loaders, strict=True), COUNT // BATCH):
        yield sorted(row.tolist() for batches in parts for batch in batches for row in batch.input_ids)


def test_single_takes_the_samples_that_the_sampler_of_megatron_takes(built_by_megatron, loaded):
    prefix, run = loaded("single")
    wanted, *_ = built_by_megatron(prefix, "1,0,0")
    ids = list(islice(sampled_by_megatron(len(wanted)), COUNT // BATCH))
    assert [number for step in ids for number in step] == list(range(COUNT))
    assert list(steps_of(run)) == [sorted(wanted[number]["tokens"].tolist() for number in step) for step in ids]


def test_cyclic_takes_them_in_another_order(built_by_megatron, loaded):
    prefix, run = loaded("cyclic")
    wanted, *_ = built_by_megatron(prefix, "1,0,0")
    first = sorted(wanted[number]["tokens"].tolist() for number in range(BATCH))
    assert next(iter(steps_of(run))) != first
