"""Meaning of a file of NxD Training, key by key: its model and data, renamed keys, and those that say nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_core.api import ModelComponent
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.config.document import TO_SET, Document
from nxdt_plugin_migrate.config.nxdt_keys import (
    DATA_READERS,
    DEFAULTS,
    IGNORED,
    SEARCHED,
    UNREAD,
    UNREAD_VALUE,
    nxdt_keys,
)
from nxdt_plugin_migrate.config.renamed_keys import (
    ALIGNMENT,
    GONE,
    LLAMA_NAMES,
    NEUTRAL,
    OF_ENGINE,
    RENAMED,
    SECTIONS,
)

_STRATEGY = "model_alignment_strategy"
_PARTS = ("sft", "dpo", "orpo", "peft")
_LENGTH, _ENCODER_LENGTH = "data.seq_length", "model.encoder_seq_length"
_GRANULARITY, _RECOMPUTE = "model.activations_checkpoint_granularity", "model.activations_checkpoint_recompute"
_SAVE_INTERVAL = "exp_manager.checkpoint_callback_params.every_n_train_steps"
_SAMPLER = "data.dataloader_type"
_PRECISION = "precision.type"
_SCHEDULE = "model.optim.sched"
_SCHEDULE_END = f"{_SCHEDULE}.max_steps"
_CHECKPOINT = "the section checkpoint has all of saving and resuming"
_RING, _METHOD = "model.fusions.ring_attention", "distributed_strategy.context_parallel_method"
_CHOSEN: Mapping[str, tuple[str, str, str]] = {
    "model": ("model", "model.name", ""),
    "data": ("dataset", "data.name", ""),
    "data.tokenizer": ("tokenizer", "data.tokenizer.library", "huggingface"),
    "model.optim": ("optimizer", "model.optim.name", "adamw"),
    "model.optim.sched": ("schedule", "model.optim.sched.name", "constant"),
    "precision": ("precision", "precision.type", "fp32"),
    "adapter": ("adapter", "adapter.name", ""),
}
"""Section → kind of the component that may read its keys, the key that names it, and the default of that key."""


_SWITCHES = ("xla_use_bf16", "xla_downcast_bf16", "neuron_rt_stochastic_rounding_en")
_LLAMA_SHAPED: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm",),
    "activation": ("swiglu", "silu"),
    "position_embedding_type": ("rope",),
    "rotary_percentage": (1, None),
    "position_abf_factor": (1, None),
    "positition_interpolation_factor": (1, None),
    "transformer_block_type": ("pre_ln", None),
    "has_bias": (False,),
    "hidden_dropout": (0,),
    "attention_dropout": (0, None),
    "ffn_dropout": (0, None),
}
"""Megatron key → values that are what every Llama, Mistral and Mixtral has; None stands for a key that is missing.

A missing one of the others means something else: ``layernorm``, ``gelu``, learned positions, biases, dropout."""
_VOCABULARY = "model.vocab_size"
_GPT2 = ("GPT2BPETokenizer", "gpt2")


def from_nxdt(document: Document, kernel: Kernel) -> None:
    """Turn a document of a file of NxD Training into one of this schema."""
    # Keys that only NxD Training's search through the whole file finds.
    for path in list(document.settings):
        parts = path.split(".")
        at = next((place for place, part in enumerate(parts[:-1]) if part in _PARTS), None)
        if at is not None and path in document.settings and ".".join(parts[:at]) != _STRATEGY:
            _search_finds(document, path, ".".join([_STRATEGY, *parts[at:]]))
        elif parts[-1] in SEARCHED and path in document.settings and path != SEARCHED[parts[-1]]:
            _search_finds(document, path, SEARCHED[parts[-1]])
    take_nxdt_keys(document, kernel)


def take_nxdt_keys(document: Document, kernel: Kernel) -> None:
    """Turn a document whose keys are NxD Training's, each in its own place, into one of this schema."""
    for path, setting in list(document.settings.items()):
        if setting.value == "None":
            document.change(path, None, "YAML reads None as text; null is meant")
    _leave_out_unread(document)
    name_model(document)
    _take_values(document)
    _schedule(document)
    _recompute(document, kernel)
    _pipeline(document)
    rename_keys(document)
    drop_dead_keys(document, kernel)
    _defaults(document)
    document.drop("model_source", "unneeded", "model.name and data.name say it")


def _search_finds(document: Document, path: str, target: str) -> None:
    """Prefer the top level of two places, then the one that is first in the file."""
    proper, odd = document.settings.get(target), document.settings[path]
    if proper is not None and proper.value != odd.value and ("." not in path or odd.line < proper.line):
        document.moved[proper.source] = target
        document.drop(target, "ignored", f"NxD Training's search through the file finds line {odd.line} first")
    document.move(path, target, "NxD Training finds it by searching the whole file for its name")


def _leave_out_unread(document: Document) -> None:
    """Name the data, and leave out keys that NxD Training does not read with this data module and model."""
    for path, reason in IGNORED.items():
        asks = any(document.value(key) not in (None, False) for key in document.below(path))
        document.drop(path, "ignored" if asks else "unneeded", reason)
    if document.value(_SCHEDULE_END) not in (None, document.value("trainer.max_steps")):
        document.drop(_SCHEDULE_END, "ignored", "NxD Training always ends the curve at trainer.max_steps")

    # Keys that stay, although their value has another effect there.
    for path, reason in UNREAD_VALUE.items():
        if path in document.settings:
            document.remark(path, reason)
    model_config = document.value("model.model_config")
    if isinstance(model_config, str) and not model_config.startswith(("/", "~", "$")):
        document.remark("model.model_config", "relative paths start at the file here, not at the working directory")
    if document.value("model_source", "hf") == "hf":
        if "model.optim.weight_decay" in document.settings:
            document.remark(
                "model.optim.weight_decay", "NxD Training decays Hugging Face models by 0.01 and ignores this key"
            )
        if document.value("model.do_layer_norm_weight_decay"):
            document.remark(
                "model.do_layer_norm_weight_decay",
                "NxD Training reads it the wrong way round for Hugging Face models; false is what it did",
            )

    # The data module that NxD Training's script takes.
    intended = document.value("data.use_sft_style_data_module") and document.has("data.train_dir")
    if document.has(_STRATEGY):
        parts = {path.split(".")[1] for path in document.below(_STRATEGY) if "." in path}
        name, reason = "preference" if {"dpo", "orpo"} & parts else "sft-chat", f"{_STRATEGY} is given"
    elif intended:
        name, reason = "sft-chat", "data.use_sft_style_data_module asks for it; NxD Training no longer reads that key"
    elif document.value("model_source") == "megatron":
        name, reason = "megatron-data", "model_source: megatron"
    else:
        name, reason = "hf-data", "model_source: hf"
    document.drop("data.use_sft_style_data_module", "renamed" if intended else "unneeded", "data.name says it")
    document.put("data.name", name, reason)

    # Keys of another data module or another kind of model than the one that runs.
    documented = set(nxdt_keys())
    data, source = str(document.value("data.name")), str(document.value("model_source", "hf"))
    everywhere = {"name", "global_batch_size", "micro_batch_size", "tokenizer"}
    for key in _sections_of(document, "data"):
        if key not in DATA_READERS.get(data, ()) and key not in everywhere and f"data.{key}" in documented:
            document.drop(
                f"data.{key}", "ignored", f"the data module that NxD Training takes here ({data}) does not read it"
            )
    for key in _sections_of(document, "model"):
        if key in UNREAD.get(source, ()):
            document.drop(f"model.{key}", "ignored", f"NxD Training's models of model_source {source} do not read it")
    if document.value(_PRECISION) != "manual":
        for key in ("master_weights", "fp32_grad_acc", *_SWITCHES):
            document.drop(f"precision.{key}", "ignored", "only the precision 'manual' reads it")


def _take_values(document: Document) -> None:
    """Give values that mean something else there what they mean here."""
    # The kind of NxD Training's sampler.
    sampler = document.value(_SAMPLER)
    if sampler in ("single", "cyclic"):
        document.drop(_SAMPLER, "renamed", f"data.shuffle: {str(sampler == 'cyclic').lower()}")
        order = "in their order" if sampler == "single" else "in another random order each pass"
        document.put("data.shuffle", sampler == "cyclic", f"dataloader_type: {sampler} takes the samples {order}")

    section = "data.tokenizer"
    for path in document.below(section):
        if document.value(path) is None:
            document.drop(path, "off", "null says that it is not set")
    library, kind = f"{section}.library", f"{section}.type"
    if document.value(library) == "megatron":
        if "/" in str(document.value(kind)):
            document.change(library, "huggingface", "what its library loads for a directory")
        elif f"{section}.vocab_file" in document.settings:
            document.remark(library, "the same tokenizer of GPT-2, from the same files; <|endoftext|> ends a document")
        elif document.value(kind) == "GPT2BPETokenizer":
            document.change(library, "huggingface", "no files are named")
            document.change(kind, "gpt2", "no files are named, so that GPT-2's own are fetched")
    if document.value(f"{section}.use_fast") is False:
        document.drop(f"{section}.use_fast", "unneeded", "tokenizers here are the fast ones, with the same ids")

    if document.value(_PRECISION) == "mixed_precision_SR":
        document.change(_PRECISION, "mixed_precisionSR", "the spelling of its documentation")
    document.put(_PRECISION, "mixed_precision", "NxD Training's default; here it is fp32")
    if "32" in str(document.value("trainer.precision", "")):
        document.drop("trainer.precision", "unneeded", "precision.type decides")

    # One length of sequences; as shipped, fine-tuning examples have two that differ.
    batch, model = document.value(_LENGTH), document.value(_ENCODER_LENGTH)
    if batch is not None and model is not None and batch != model:
        document.moved[document.settings[_ENCODER_LENGTH].source] = _LENGTH
        why = f"batches have {_LENGTH} ({batch}) tokens; NxD Training stops where the two differ"
        document.drop(_ENCODER_LENGTH, "ignored", why)

    # Counts that mean something else there than the same number here.
    if isinstance(document.value("trainer.val_check_interval"), float):
        document.drop("trainer.val_check_interval", "unsupported", "validation is counted in optimizer steps here")
    if document.value(_SAVE_INTERVAL) == 0:
        document.drop(_SAVE_INTERVAL, "unneeded", "0 counts no steps")

    factor: Any = document.value("model.moe.capacity_factor")
    if document.value("model.moe.dropless") and isinstance(factor, (int, float)) and factor > 0:
        document.change("model.moe.capacity_factor", 0.0, "NxD Training sets it to 0 where dropless is true")


def _sections_of(document: Document, section: str) -> list[str]:
    return list(dict.fromkeys(path.split(".")[1] for path in document.below(section) if "." in path))


def _schedule(document: Document) -> None:
    """Shorten constant steps beyond the run's end: NeMo's cosine then falls to its end right behind the warm-up."""
    constant, warmup = f"{_SCHEDULE}.constant_steps", document.value(f"{_SCHEDULE}.warmup_steps") or 0
    count, end = document.value(constant), document.value(_SCHEDULE_END) or document.value("trainer.max_steps")
    if not all(isinstance(number, int) for number in (count, warmup, end)) or not count or warmup + count <= end:
        return
    falls = "the rate falls to min_lr right behind the warm-up, as it did there"
    reason = (
        f"with warm-up it is more than the {end} steps of the run, so that {falls}; 0 spreads the fall over the run"
    )
    document.change(constant, max(0, end - warmup - 1), reason)


def _recompute(document: Document, kernel: Kernel) -> None:
    """Name the modules that are recomputed there; a name that the model lacks recomputes nothing there."""
    if document.value(_GRANULARITY) == "full":
        document.drop(_RECOMPUTE, "ignored", "whole layers are recomputed, and NxD Training then reads no names")
    if document.value(_GRANULARITY) != "selective":
        return
    modules: Any = document.value(_RECOMPUTE)
    if not modules:
        document.drop(_RECOMPUTE, "unneeded", "it names nothing")
        document.put(_RECOMPUTE, ["CoreAttention"], "what NxD Training recomputes where no module is named")
        return
    model = str(document.value("model.name"))
    record = next((entry.record for entry in kernel.registry.all("model") if entry.record.name == model), None)
    supported = record.recompute_names if isinstance(record, ModelComponent) else None
    if supported is None or not isinstance(modules, list):
        return
    names = ["LlamaMLP" if name == "NeuronSwitchMLP" and model == "mixtral" else name for name in modules]
    read = [name for name in names if name in supported]
    if read == modules:
        return
    if read:
        document.change(_RECOMPUTE, read, "the names that this model has; NxD Training ignores others")
    else:
        document.drop(_RECOMPUTE, "ignored", f"NxD Training ignores names that a {model} does not have")
        document.change(_GRANULARITY, None, f"none of the names in {_RECOMPUTE} is of this model")


def _pipeline(document: Document) -> None:
    """Name layers as the models here have them, and write cuts where layers do not divide."""
    cuts: Any = document.value("model.pipeline_cuts")
    if isinstance(cuts, list) and any(str(cut).startswith("model.") for cut in cuts):
        named = [str(cut).removeprefix("model.") for cut in cuts]
        document.change("model.pipeline_cuts", named, "layers are named without 'model.' here")
    strategy = "distributed_strategy"
    layers: Any = document.value("model.num_layers")
    stages = [
        document.value(f"{strategy}.{name}_model_parallel_size") or 1 for name in ("pipeline", "virtual_pipeline")
    ]
    if cuts or not all(isinstance(number, int) for number in (layers, *stages)):
        return
    count = stages[0] * stages[1]
    if stages[0] > 1 and layers > count and layers % count:
        ends = stage_ends(layers, count)
        reason = f"{layers} layers do not divide by {count} stages; the outer stages take fewer"
        document.put("model.pipeline_cuts", [f"layers.{end}" for end in ends], reason)


def stage_ends(layers: int, stages: int) -> list[int]:
    """Return the last layers of all stages but the final one; middle ones take more, since the ends do other work."""
    least, more = divmod(layers, stages)
    first = (stages - more) // 2
    sizes = [least + (first <= stage < first + more) for stage in range(stages)]
    return [sum(sizes[: stage + 1]) - 1 for stage in range(stages - 1)]


def _defaults(document: Document) -> None:
    """Write the defaults of NxD Training that differ from those here, for keys that are missing."""
    if document.value("model_source") == "megatron":
        for path, value in DEFAULTS.get(str(document.value("model.name")), {}).items():
            document.put(path, value, "the default there; here it is another")
    if document.value("model.name") == "mixtral" and document.value("model_source") == "megatron":
        moe = "model.moe"
        experts: Any = document.value(f"{moe}.num_experts") or 1
        chosen: Any = document.value(f"{moe}.top_k") or 1
        document.put(f"{moe}.top_k", 1, "the default there; here it is 2")
        if isinstance(experts, int) and isinstance(chosen, int):
            document.put(f"{moe}.capacity_factor", experts / chosen, "the default there: num_experts / top_k")
            document.put(f"{moe}.normalize_top_k_affinities", chosen > 1, "the default there: true with top_k above 1")
        document.put(f"{moe}.router_aux_loss_coef", 0.0, "the default there; here it is 0.02")
        document.put(f"{moe}.output_router_logits", False, "the default there; here the loss of the router is added")
    if document.value("trainer.val_check_interval") and document.value("trainer.limit_val_batches") != 0:
        document.put("checkpoint.monitor", "val_loss", "the default there; here the newest checkpoints are kept")
    if document.value("checkpoint.monitor") not in (None, "step"):
        document.put("checkpoint.mode", "min", "the default there; here it follows from the metric's name")
    document.put("trainer.gradient_clip_val", None, "gradients are not clipped there unless the file says so")
    if document.value("data.name") in ("sft-chat", "preference"):
        document.put("data.add_bos", True, "NxD Training puts the begin token before each sample")
    if document.value("data.name") == "preference":
        document.put("data.truncation_mode", "keep_start", "NxD Training cuts what is longer than a sequence")
    if document.value("data.name") == "sft-chat":
        document.put("data.chat_template", "plain", "NxD Training puts the output right behind the input")
        document.put("data.truncation", "drop", "NxD Training leaves out what is longer than a sequence")
    if document.value("data.name") == "hf-data":
        document.put("data.shuffle", False, "NxD Training takes the samples of this data in their order")


def name_model(document: Document) -> None:
    """Name the model plugin, as NxD Training's script chooses between its models."""
    if "model.name" in document.settings:
        return
    if document.value("model_source", "hf") == "hf":
        mixtral = "mixtral" in str(document.value("name", "")).lower()
        reason = "the run's name contains it" if mixtral else "model_source: hf"
        document.put("model.name", "mixtral" if mixtral else "llama", reason)
        for key in ("num_layers", "hidden_size", "rope_theta"):
            if document.value(f"model.{key}") == -1:
                document.drop(f"model.{key}", "unneeded", "-1 leaves it to model.model_config")
        return
    model, reason = _megatron(document)
    document.put("model.name", model, reason)
    if model != "gpt":
        for key in _LLAMA_SHAPED:
            document.drop(f"model.{key}", "unneeded", f"every {model} is so")
        if model == "llama":
            document.drop("model.sliding_window_size", "off", "null says that it is not set")
        for old, new in LLAMA_NAMES.items():
            document.move(old, new)
        if document.value("model.head_dim", 0) is None:
            document.drop("model.head_dim", "off", "null says that it is not set")
    if document.value("data.tokenizer.type") in _GPT2:
        document.put(_VOCABULARY, 50257, "GPT-2's number of ids")
    else:
        multiple = document.value("model.make_vocab_size_divisible_by")
        filled = f", filled up to a multiple of {multiple}" if multiple and model != "gpt" else ""
        document.put(_VOCABULARY, TO_SET, f"it is taken from the tokenizer there; set its number of ids{filled}")
    if model != "gpt":
        document.drop("model.make_vocab_size_divisible_by", "unneeded", f"{_VOCABULARY} says it")


def _megatron(document: Document) -> tuple[str, str]:
    """Return the plugin of the architecture, else that of all Megatron's: the same weights, but other formats."""
    if any(document.value(f"model.{key}") not in usual for key, usual in _LLAMA_SHAPED.items()):
        return "gpt", "model_source: megatron"
    for section, name in (("model.moe", "mixtral"), ("model.sliding_window_size", "mistral")):
        if any(document.value(path) is not None for path in document.below(section)):
            return name, f"{section} is given, and all else is what a {name} has"
    return "llama", "the architecture is a Llama's"


def rename_keys(document: Document) -> None:
    """Give older spellings, and the parts of ``model_alignment_strategy``, the names that the schema has for them."""
    for path, key in RENAMED.items():
        if path in document.settings and document.value(path) is None:
            document.moved[document.settings[path].source] = key
            document.drop(path, "off", "null says that it is not set")
        else:
            document.move(path, key, _CHECKPOINT if key.startswith("checkpoint.") else "")
    if document.has("model_alignment_strategy.dpo"):
        reason = "model_alignment_strategy.dpo is given too, and a run has one loss"
        document.drop("model_alignment_strategy.orpo", "unsupported", reason)
    for part, (section, name) in SECTIONS.items():
        if not document.has(f"model_alignment_strategy.{part}"):
            continue
        for path in document.below(f"model_alignment_strategy.{part}"):
            document.move(path, ALIGNMENT.get(path, section + path.removeprefix(f"model_alignment_strategy.{part}")))
        if name is not None:
            document.put(f"{section}.name", name, f"model_alignment_strategy.{part} asks for it")
    document.drop("model_alignment_strategy", "unneeded", "it is empty")
    if document.value(_RING):
        document.drop(_RING, "renamed", f"{_METHOD}: ring")
        document.put(_METHOD, "ring", f"{_RING}: true")


def drop_dead_keys(document: Document, kernel: Kernel) -> None:
    """Leave out what says nothing here, and what asks for something that is not done; both with the reason."""
    nxd = document.value("parallel_engine.name") == "nxd"
    for path in list(document.settings):
        if _declared(path, document, kernel):
            continue
        if path in OF_ENGINE and nxd:
            document.move(path, OF_ENGINE[path])
        elif path in OF_ENGINE:
            document.drop(path, "unneeded", f"only the engine nxd reads it, as {OF_ENGINE[path]}")
        elif path in GONE:
            document.drop(path, "unneeded", GONE[path])
        elif path in NEUTRAL:
            (neutral, reason), value = NEUTRAL[path], document.value(path)
            if value is None or any(type(value) is type(off) and value == off for off in neutral):
                document.drop(path, "off", reason or "it asks for nothing, and no selected component reads it")
            elif reason:
                document.drop(path, "unsupported" if document.asks(path) else "off", reason)


def _declared(path: str, document: Document, kernel: Kernel) -> bool:
    """Return whether the component that is selected reads the key; one that cannot be had reads none."""
    section, _, name = path.rpartition(".")
    kind, key, default = _CHOSEN.get(section, ("", "", ""))
    component = document.value(key, default)
    if not kind or not isinstance(component, str) or not component:
        return False
    try:
        cls: Any = kernel.registry.get(kind, component).load_config()
    except NxdtError:
        return False
    return name in {info.alias or attribute for attribute, info in getattr(cls, "model_fields", {}).items()}
