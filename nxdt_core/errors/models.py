"""Errors of models, weights and the losses that a head computes: codes ``NXDT-M…``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, listing

NoInitRule = NxdtError.define(
    "NXDT-M001",
    "No rule of the model says how a parameter starts.",
    "No initialisation rule matches the parameter '{parameter}'; there are rules for {listed}.",
    "Add a rule to the builder's or the adapter's init_rules(); the pattern '*' matches all others.",
    also=lambda error: {"listed": listing(error.patterns) or "nothing"},
)

InitRulesWrong = NxdtError.define(
    "NXDT-M003",
    "Rules of a model or adapter that match nothing, or draw what must start constant.",
    "The initialisation rules of {builder} do not fit its parameters: {problems:; }.",
    "Correct init_rules(): a leading * stands for any depth, any other * for a part of one component.",
)

BuffersNotReset = NxdtError.define(
    "NXDT-M004",
    "Buffers of a model that was built on the meta device, which nothing computes on the device.",
    "The model's buffers {buffers:list} hold uninitialised memory, since no reset_buffers() computes them.",
    "Assign each buffer, or write to it in place, in a method reset_buffers() of the module that has it.",
)

BadModelConfig = NxdtError.define(
    "NXDT-M002",
    "Values of a model's section cannot work together.",
    "The model '{model}' cannot be built: {problems:; }.",
    "Correct these keys of the section model.",
)

HFFileMissing = NxdtError.define(
    "NXDT-M010",
    "A Hugging Face directory lacks a file.",
    "'{directory}' holds no {wanted}.",
    "Name a directory with config.json and safetensors weights; pickled weights (.bin, .pt) are never read.",
)


class HFFileDamaged(NxdtError):
    """A file of a Hugging Face directory cannot be read."""

    code = "NXDT-M011"
    happened = "'{path}' cannot be read: {reason}."
    remedy = "Download or export the file again."
    path: str
    reason: str


class HFUnsupported(NxdtError):
    """A Hugging Face model has a feature that the builder does not implement."""

    code = "NXDT-M012"
    happened = (
        "The Hugging Face configuration{place} has {key} = {found!r}, which the model '{model}' does not implement."
    )
    remedy = "Supported is {supported}; {advice}."
    usual_remedy = "Use another model, or a plugin that implements this one. Dequantize weights that are quantized."
    model: str
    key: str
    found: object
    supported: str
    path: str = ""
    """The file, where it is known."""

    def _view(self) -> dict[str, Any]:
        advice = "take another model or a plugin that implements this one"
        if self.key == "quantization_config":
            advice = (
                "dequantize the model first with transformers (model.dequantize(), or dequantize=True in its "
                "quantization_config), and name the directory that save_pretrained() writes"
            )
        return {**super()._view(), "place": f" '{self.path}'" if self.path else "", "advice": advice}


HFNotWritable = NxdtError.define(
    "NXDT-M013",
    "An export would overwrite files.",
    "'{directory}' is not an empty directory.",
    "Export into a new one. (The same command resumes an interrupted export.)",
)

NoHFForm = NxdtError.define(
    "NXDT-M070",
    "A model that the corresponding architecture of transformers would compute otherwise.",
    "The model has {key} = {found!r}, and {architecture} of transformers only knows {wanted!r}.",
    "It has no Hugging Face form; keep its checkpoints, or train with {key}={wanted}.",
)


class HFExchangeUnsupported(NxdtError):
    """A builder has no correspondence to Hugging Face's parameters."""

    code = "NXDT-M014"
    happened = "The model builder '{builder}' does not read or write Hugging Face directories."
    remedy = "Let it override config_to_hf and hf_key_map of nxdt_core.protocols.model.ModelBuilder."
    builder: str


KeyMapIncomplete = NxdtError.define(
    "NXDT-M015",
    "A builder's key map does not cover a parameter, or covers it wrongly.",
    "The key map of '{builder}' does not fit the parameter '{parameter}': {reason}.",
    "Correct the builder's hf_key_map(): one entry per parameter, '*' for each number in its name.",
)


class WeightsUnusable(NxdtError):
    """A tensor of another program's weights that would make a wrong model."""

    code = "NXDT-M016"
    happened = "The tensor '{tensor}'{place} cannot be used: {reason}."
    remedy = "{advice}"
    usual_remedy = "Export the model again, in bfloat16, float16 or float32."
    tensor: str
    reason: str
    advice: str
    path: str = ""
    """Directory of the weights, where it is known."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "place": f" in '{self.path}'" if self.path else ""}


class WeightsDoNotFit(NxdtError):
    """Weights of another model, or a checkpoint that lacks some."""

    code = "NXDT-M050"
    happened = "The weights{place} do not fit the model: {summary}."
    remedy = "{advice}"
    usual_remedy = "Name the configuration that the weights were trained with."
    example: ClassVar[Mapping[str, Any]] = {
        "missing": (),
        "extra": (),
        "shapes": (
            "model.embed_tokens.weight: (320, 64) instead of (272, 64)",
            "lm_head.weight: (320, 64) instead of (272, 64)",
        ),
        "directory": "weights",
        "says_sizes": True,
    }
    missing: list[str]
    extra: list[str]
    shapes: list[str]
    saved: list[str] | None = None
    """For an nxdt checkpoint: keys of the model that differed in its run, with the values of that run."""
    resumes: bool = False
    """True if that checkpoint is in the store of this run, whose name is then taken."""
    directory: str | None = None
    """Directory of another program's weights."""
    says_sizes: bool = False
    """True if that directory has a ``config.json``."""

    def _view(self) -> dict[str, Any]:
        parts = [
            f"{len(names)} {word} ({listing(names, 4)})"
            for names, word in ((self.missing, "missing"), (self.extra, "unknown"), (self.shapes, "of another shape"))
            if names
        ]
        place = f" in '{self.directory}'" if self.directory else ""
        if self.directory and self.says_sizes:
            advice = (
                "Leave the model's sizes to the config.json there. If they are its own, the directory is incomplete, or"
                " its weights are of another model: download or export it again."
            )
        elif self.directory:
            advice = "Name the configuration that they were trained with."
        else:
            advice = f"Their run had {', '.join(self.saved[:8])}. " if self.saved else ""
            advice += "Use the configuration that the weights were trained with"
            advice += ", or give the new run another name=…." if self.resumes else "."
            if self.saved is not None and not self.shapes:
                advice += " With checkpoint.strict=false what both have is loaded."
        return {**super()._view(), "summary": "; ".join(parts), "place": place, "advice": advice}


def _rows_to_set(error: Any) -> dict[str, Any]:
    rows = -(-error.tokenizer // 128) * 128
    added = (
        f"Set model.vocab_size to {rows} or another number from {error.tokenizer} on. Rows that the weights lack start "
    )
    return {"advice": f"{added}as the mean of theirs." if error.added else _RESIZE.format(tokenizer=error.tokenizer)}


_RESIZE = (
    "For a new model, set model.vocab_size to {tokenizer} or more (a multiple of 128 is quicker on accelerators). "
    'To add rows to the model in a Hugging Face directory DIR: python -c "from transformers import '
    "AutoModelForCausalLM as M; m = M.from_pretrained('DIR'); m.resize_token_embeddings({tokenizer}); "
    "m.save_pretrained('NEW')\", and name NEW in model.model_config and checkpoint.resume_from. "
    "'nxdt checkpoint export' makes such a directory of a checkpoint."
)
VocabularyTooSmall = NxdtError.define(
    "NXDT-M051",
    "The tokenizer has more ids than the model has rows.",
    "The tokenizer has {tokenizer} ids, the model's vocabulary has {model} rows.",
    "{advice}",
    also=_rows_to_set,
    usual_remedy="Set model.vocab_size to the number of ids or more.",
    example={"tokenizer": 259, "model": 128, "added": False},
)

SequenceTooLongForModel = NxdtError.define(
    "NXDT-M052",
    "Positions end before the sequence does.",
    "Sequences have {sequence} tokens, the model has positions for {longest}.",
    "Shorten data.seq_length, or --window of a command, or raise model.max_position_embeddings.",
)

UnknownRecomputeName = NxdtError.define(
    "NXDT-M053",
    "``model.activations_checkpoint_recompute`` names something that the model's plan does not.",
    "model.activations_checkpoint_recompute names {names:list}, which this model's plan does not have.",
    "{advice}",
    usual_remedy="Choose from the names that the message lists.",
    also=lambda error: {
        "advice": f"Choose from {listing(error.known)}."
        if error.known
        else "Leave it out: this model's plan names none."
    },
)


class ModelReadsValues(NxdtError):
    """A plan sends shapes through a model, and the model asks for values."""

    code = "NXDT-M054"
    happened = "The model cannot be planned: its forward or its loss reads values of tensors ({reason})."
    remedy = "Let it assume the most where a tensor's is_meta is true; training is not concerned."
    reason: str


QuantisationLibraryMissing = NxdtError.define(
    "NXDT-M089",
    "A run with a quantised base without the package that quantises.",
    "adapter.base_dtype needs the package 'bitsandbytes', which cannot be imported: {reason}.",
    "Run: pip install 'nxdt-core[quantised]'",
)

HeadNotLinear = NxdtError.define(
    "NXDT-M090",
    "A head whose logits cannot be computed some tokens at a time.",
    "model.loss_chunk_tokens is set, and the model's head '{path}' is a {kind}, which is not a plain linear layer.",
    "Set model.loss_chunk_tokens to null, or leave the head as it is.",
)

ModelWithoutHead = NxdtError.define(
    "NXDT-M091",
    "A model whose plan names no head.",
    "model.loss_chunk_tokens is set, and the model's plan names no head (style vocab_head).",
    "Set model.loss_chunk_tokens to null, or name the output projection in the plan.",
)

LossesAreNotLogits = NxdtError.define(
    "NXDT-M092",
    "Code that needs logits got the losses of a head that holds none.",
    "The model's head returns losses (model.loss_chunk_tokens), and the objective or the model itself, which may scale "
    "or cap its logits, computes with them as with logits: {use}.",
    "Set model.loss_chunk_tokens to null. It works where nothing but cross_entropies of the objective reads the output "
    "of the head.",
)

LogitsAreSharded = NxdtError.define(
    "NXDT-M093",
    "An objective computes with logits of which each tensor parallel rank holds a part.",
    "The objective {objective} computes with logits that are sharded over the vocabulary: {reason}.",
    "Let it pass them to cross_entropies, log_probs and log_partition of nxdt_core.models.loss alone, which return "
    "plain tensors, or set distributed_strategy.tensor_model_parallel_size=1.",
)

HeadDoesNotFit = NxdtError.define(
    "NXDT-M095",
    "An objective on scores and a model with a vocabulary, or the other way round.",
    "The objective {objective!r} takes {takes}, which the head of the model {model!r} does not give.",
    "Set model.{key} to {value}, or choose another objective.",
)

ObjectiveWeightsDiffer = NxdtError.define(
    "NXDT-M094",
    "An objective whose call reports another weight than the one that the step divides by.",
    "The objective {objective} reports the weight {reported} for a micro-batch, and its weight() gives {given}.",
    "Let both return what the loss is a mean over: the step divides by the sum of weight().",
)
