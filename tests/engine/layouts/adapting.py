"""Models with LoRA, and what each rank does in the tests of their checkpoints: some steps, a save and a merge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from nxdt_plugin_lora.saved_run import merge_lora

from nxdt_core import checkpoint
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.engine.matrix.batches import global_batch, share
from tests.engine.matrix.layouts import Layout, Numbers
from tests.engine.matrix.training import configuration, whole

__all__ = ["KINDS", "MERGED", "Went", "go_on", "numbers_of", "over_values", "sized"]

_SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 26,
    "init_method_std": 0.1,
}
_LLAMA = {**_SIZES, "name": "llama", "ffn_hidden_size": 40}
_WIDE = {**_LLAMA, "hidden_size": 128, "ffn_hidden_size": 256}
_GPT = {**_SIZES, "name": "gpt", "num_kv_heads": 4, "ffn_hidden_size": 64, "make_vocab_size_divisible_by": 8}
_MIXTRAL = {**_SIZES, "name": "mixtral", "ffn_hidden_size": 16, "moe": {"num_experts": 4, "router_aux_loss_coef": 0.1}}
_HF = {
    "name": "hf",
    "model_config": "package://nxdt_plugin_hf/configs/qwen2-tiny",
    "hf_config": {"initializer_range": 0.1},
}
_HF_EXPERTS = {**_HF, "model_config": "package://nxdt_plugin_hf/configs/qwen3-moe-tiny"}


def _lora(*targets, **more):
    return {
        "name": "lora",
        "lora_rank": 4,
        "lora_alpha": 16,
        "lora_dropout": 0,
        "target_modules": [*targets] or ["all-linear"],
        **more,
    }


KINDS = {
    "linear": (_LLAMA, _lora()),
    "nf4": (_WIDE, _lora(base_dtype="nf4")),
    "nf4-odd": ({**_LLAMA, "hidden_size": 48, "ffn_hidden_size": 72}, _lora(base_dtype="nf4")),
    "nf4-dora": (_WIDE, _lora(base_dtype="nf4", use_dora=True)),
    "int8": (_WIDE, _lora(base_dtype="int8")),
    "pissa": (_LLAMA, _lora(init_lora_weights="pissa", rank_pattern={"down_proj": 8, "layers.0.mlp.up_proj": 2})),
    "pissa-dora": (_LLAMA, _lora("q_proj", "o_proj", init_lora_weights="pissa", use_dora=True)),
    "vocabulary": (_LLAMA, _lora("embed_tokens", "lm_head", "q_proj")),
    "tied": ({**_LLAMA, "share_embeddings_and_output_weights": True}, _lora("embed_tokens", "lm_head", "down_proj")),
    "last-layer": (_LLAMA, _lora("layers.3.*")),
    "dora": (_LLAMA, _lora(use_dora=True)),
    "vocabulary-dora": (_LLAMA, _lora("embed_tokens", "lm_head", "q_proj", use_dora=True)),
    "whole": (_LLAMA, _lora("q_proj", modules_to_save=["lm_head", "mlp_norm"], use_rslora=True)),
    "fused": (_GPT, _lora("qkv_proj", "o_proj", "up_proj", "embedding", lora_bias="all")),
    "fused-biases": (_GPT, _lora("qkv_proj", "down_proj", lora_bias="lora_only", init_lora_weights="gaussian")),
    "experts": (_MIXTRAL, _lora("experts", "q_proj")),
    "hf": (_HF, _lora("q_proj", "o_proj", "mlp")),
    "hf-experts": (_HF_EXPERTS, _lora()),
    "linear-dropout": (_LLAMA, _lora(lora_dropout=0.3)),
    "dora-dropout": (_LLAMA, _lora(use_dora=True, lora_dropout=0.3)),
    "fused-dropout": (_GPT, _lora("qkv_proj", "o_proj", "up_proj", "down_proj", lora_dropout=0.3)),
    "experts-dropout": (_MIXTRAL, _lora("experts", "q_proj", lora_dropout=0.3)),
    "hf-experts-dropout": (_HF_EXPERTS, _lora(lora_dropout=0.3)),
    "hf-dropout": (_HF, _lora("q_proj", "o_proj", "mlp", lora_dropout=0.3)),
}
_MICRO_BATCHES = 4
MERGED = "merged"
"""Beside the directory of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Went:
    """One rank's account."""

    losses: list[float]
    trained: dict[str, torch.Tensor]
    """What trains, of this rank's stages; each whole."""


def sized(model: dict, layout: Layout) -> dict:
    """The model with no more layers than ``layout`` needs, where it says how many it has."""
    return {**model, "num_layers": layout.least_layers} if "num_layers" in model else model


def numbers_of(kind: str) -> Numbers:
    """transformers' models know no float64 throughout, and bitsandbytes knows none."""
    return "fp32" if kind.startswith(("hf", "nf4", "int8")) else "float64"


def go_on(kind: str, layout: Layout, steps: int, directory: Path, resumes: bool, merges: bool) -> Went:
    """Train for some steps, from the newest checkpoint in ``directory`` or from the start; save the adapter alone
    there, and perhaps merge it. A function of a pool of ``layout.world`` ranks."""
    keys, adapter = KINDS[kind]
    config = configuration(layout, numbers_of(kind), keys, {**adapter, "save_lora_base": False})
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    if not resumes:
        for each in build.adapters(config):
            each.begin(model, config, engine.ranks)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    storage, state = checkpoint.open_storage(str(directory)), TrainState()
    if resumes:
        manifest = checkpoint.find_checkpoint(storage, None, warn=print, ranks=engine.ranks)
        TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).load_checkpoint(
            storage, manifest
        )
    place = engine.rank_info
    batches = share(global_batch(packed=False, count=_MICRO_BATCHES), place.dp_rank, place.dp_size)
    objective, schedule = build.objective(config), build.schedule(config)
    losses = [
        float(train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0).loss.loss)
        for _ in range(steps)
    ]
    TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).save(storage)
    if merges:
        target = checkpoint.open_storage(str(directory.with_name(MERGED)))
        merge_lora(storage, None, target, ranks=engine.ranks, keep_others=True, config=config)
    trained = {name: whole(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    engine.shutdown()
    return Went(losses=losses, trained=trained)


def over_values(
    kind: str, layout: Layout, steps: int, values: dict[str, torch.Tensor] | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the frozen weights whole: those drawn, or ``values``, which are not quantised."""
    keys, adapter = KINDS[kind]
    adapter = adapter if values is None else {**adapter, "base_dtype": None}
    config = configuration(layout, numbers_of(kind), sized(keys, layout), adapter)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    model.load_state_dict(values or {}, strict=False)
    for each in build.adapters(config):
        each.begin(model, config, engine.ranks)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    place, state = engine.rank_info, TrainState()
    batches = share(global_batch(packed=False, count=layout.micro_batches), place.dp_rank, place.dp_size)
    objective, schedule = build.objective(config), build.schedule(config)
    losses = [
        float(train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0).loss.loss)
        for _ in range(steps)
    ]
    frozen = {name: whole(parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad}
    engine.shutdown()
    return losses, frozen
