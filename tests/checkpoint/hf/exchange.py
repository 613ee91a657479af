"""What the tests of exports and imports share: small Llamas in any layout, and a tokenizer of Hugging Face's kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.importing import import_checkpoint
from tests.checkpoint.layouts.sharded import in_group

TEXT = Path(__file__).parents[3] / "plugins/datasets/text/src/nxdt_plugin_text/data/kjv.txt"
VOCABULARY = 300


def write_tokenizer(directory: Path) -> Path:
    """A byte-level BPE tokenizer trained here, as ``save_pretrained`` writes one."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT.read_text().splitlines()[:500], trainer)
    directory.mkdir(parents=True)
    bpe.save(str(directory / "tokenizer.json"))
    record = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(record))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def llama(*overrides: str, tokenizer: Path | None = None) -> ResolvedConfig:
    """A run of a Llama with grouped heads whose fresh weights are large enough to prefer some tokens clearly."""
    run = {
        "name": "exchange",
        "trainer": {"max_steps": 1, "accelerator": "cpu"},
        "exp_manager": {},
        "data": {
            "name": "none",
            "seq_length": 64,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "tokenizer": {"library": "byte"}
            if tokenizer is None
            else {"library": "huggingface", "model": str(tokenizer)},
        },
        "model": {
            "name": "llama",
            "num_layers": 3,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "vocab_size": 304,
            "max_position_embeddings": 64,
            "init_method_std": 0.2,
            "optim": {"lr": 0.1},
        },
    }
    return load(run, overrides)


def save_run(uri: str, overrides: Sequence[str], tokenizer: Path | None) -> None:
    """Save fresh weights, on each rank of the run."""
    config = llama(*overrides, tokenizer=tokenizer)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    with torch.no_grad():  # fresh biases are zeros and fresh norms ones, which would hide mistakes
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    state = TrainState(step=7, consumed_samples=28)
    TrainSession(config, engine=engine, model=model, state=state).save(LocalStorage(uri))
    engine.shutdown()


def export_together(uri: str, target: str) -> list[str]:
    """Export in small files, on each rank."""
    exported = in_group(lambda ranks: export_hf(uri, target, max_shard_bytes=20_000, ranks=ranks))
    return list(exported.files)


def import_together(source: str, uri: str) -> str:
    """Import, on each rank."""

    def work(ranks: Ranks) -> str:
        return import_checkpoint(source, uri, ranks=ranks).target

    return str(in_group(work))


def newest(uri: str) -> Manifest:
    """The manifest of the newest checkpoint, every byte of which is right."""
    return checkpoint.find_checkpoint(LocalStorage(uri), None, warn=print)


def llama_cpp_of(file: Path) -> Any:
    """A server of llama.cpp in this process."""
    llama_cpp = pytest.importorskip("xllamacpp", reason="xllamacpp, a build of llama.cpp, is not installed")
    asked = llama_cpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup = str(file), 128, 1, False
    asked.cache_type_k = asked.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    asked.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked.cpuparams.n_threads = 1
    return llama_cpp.Server(asked)
