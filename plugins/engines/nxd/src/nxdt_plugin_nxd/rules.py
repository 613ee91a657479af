"""What the engine cannot run of the capabilities that it declares. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.errors.configuration import ConfigProblem
from nxdt_core.protocols.engine import Settings

_STRATEGY = "distributed_strategy"
_TP, _EP = f"{_STRATEGY}.tensor_model_parallel_size", f"{_STRATEGY}.expert_model_parallel_size"
_PP, _VPP = f"{_STRATEGY}.pipeline_model_parallel_size", f"{_STRATEGY}.virtual_pipeline_model_parallel_size"
_SCHEDULE, _SP = f"{_STRATEGY}.pipeline_schedule", f"{_STRATEGY}.sequence_parallel"
_HEADS, _KV_HEADS, _EXPERTS = "model.num_attention_heads", "model.num_kv_heads", "model.moe.num_experts"
_VOCABULARY, _VOCAB_MULTIPLE = "model.vocab_size", "model.make_vocab_size_divisible_by"
_LAYERS, _CUTS = "model.num_layers", "model.pipeline_cuts"
_BATCH, _MICRO_BATCH = "data.global_batch_size", "data.micro_batch_size"
_TORCH = "parallel_engine.name=torch"

_UNSUPPORTED = (
    ("ep", "model.moe.exchange_chunks", (None, 1), "sends all tokens of a layer at once", "Set it to 1"),
    ("", f"{_STRATEGY}.async_tensor_parallel", (False,), "has no asynchronous tensor parallelism", "Set it to false"),
    ("", "model.loss_chunk_tokens", (None,), "computes the losses of a micro-batch at once", "Set it to null"),
    ("", "adapter.base_dtype", (None,), "does not quantise frozen weights", "Leave it out"),
    ("", f"{_STRATEGY}.token_shuffle_group_size", (1,), "mixes no tokens before experts", "Set it to 1"),
    ("tp", f"{_STRATEGY}.pad_heads", (False,), "adds no attention heads", "Set it to false"),
    ("sp", f"{_STRATEGY}.sequence_parallel_regather", (False,), "keeps gathered inputs", "Set it to false"),
    ("pp", _SCHEDULE, (None, "1f1b", "interleaved"), "does not run this schedule", "Leave it out"),
    ("zero", f"{_STRATEGY}.zero_stage", (None, 1), "shards optimizer state alone", "Set it to 1"),
    ("zero", f"{_STRATEGY}.dp_replicate", (1,), "shards over all data parallel ranks", "Set it to 1"),
)
"""Dimension that reads a setting, the setting, its values that the engine runs, what it does instead, what to write."""


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine cannot run: the ``rules`` of its record."""
    values, sizes = settings.values, settings.mesh_sizes()
    # Each tensor parallel rank takes as many heads, feed-forward columns, vocabulary rows and tokens as the others.
    filled = settings.numbers(_VOCAB_MULTIPLE) is not None
    divided = [_HEADS, "model.ffn_hidden_size", _VOCAB_MULTIPLE if filled else _VOCABULARY]
    for key in [*divided, "data.seq_length"] if values.get(_SP) else divided:
        if (numbers := settings.numbers(key, _TP)) is not None and numbers[0] % numbers[1]:
            reason = f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}"
            advice = f"Choose a tensor parallel size that divides {numbers[0]}, or a multiple of {numbers[1]}."
            yield settings.impossible(key, _TP, reason=reason, advice=advice)
    numbers = settings.numbers(_KV_HEADS, _TP)
    if numbers is not None and numbers[0] % numbers[1] and numbers[1] % numbers[0]:
        heads, tp = numbers
        yield settings.impossible(
            *(_KV_HEADS, _TP),
            reason=f"{heads} key and value heads can be neither divided nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
        )
    numbers = settings.numbers(_EXPERTS, _EP)
    if numbers is not None and numbers[0] % numbers[1]:
        reason = f"{numbers[0]} experts are not divisible by expert_model_parallel_size {numbers[1]}"
        advice = "Choose an expert parallel size that divides the experts."
        yield settings.impossible(_EXPERTS, _EP, reason=reason, advice=advice)

    # Pipeline stages take equally many layers, unless the cuts are named. 1F1B has one stage on each rank and at least
    # one micro-batch per rank, the interleaved schedule several stages and a multiple of the ranks.
    if sizes is not None and sizes.pp > 1:
        cuts, layers, interleaved = values.get(_CUTS), settings.numbers(_LAYERS), sizes.vpp > 1
        stages = f"pipeline_model_parallel_size {sizes.pp}"
        if interleaved:
            stages = f"{sizes.stages} stages, {sizes.vpp} on each of {sizes.pp} pipeline ranks"
        if layers is not None and cuts and len(cuts) != sizes.stages - 1:
            reason = f"{len(cuts)} cuts make {len(cuts) + 1} stages, and the layout asks for {stages}"
            yield settings.impossible(_CUTS, _PP, _VPP, reason=reason, advice=f"Name {sizes.stages - 1} cuts.")
        elif layers is not None and not cuts and layers[0] % sizes.stages:
            reason = f"{layers[0]} layers are not divisible by {stages}"
            advice = f"Choose sizes that divide the layers, or name the cuts in {_CUTS}."
            yield settings.impossible(_LAYERS, _PP, _VPP, reason=reason, advice=advice)
        schedule = values.get(_SCHEDULE)
        if schedule is not None and (schedule == "interleaved") != interleaved:
            reason = f"the schedule {schedule} does not run {sizes.vpp} stages on each rank"
            advice = "Leave the schedule out, or change that size."
            yield settings.impossible(_SCHEDULE, _VPP, reason=reason, advice=advice)
        count = settings.micro_batches()
        if count is not None and (count % sizes.pp if interleaved else count < sizes.pp):
            name, wants = ("the interleaved schedule", "a multiple of") if interleaved else ("1F1B", "at least")
            whole = -(-count // sizes.pp) * sizes.pp * sizes.dp * values[_MICRO_BATCH]
            yield settings.impossible(
                *(_BATCH, _MICRO_BATCH, _PP),
                reason=f"each data parallel rank has {count} micro-batches per step, and {name} over {sizes.pp}"
                f" pipeline ranks needs {wants} {sizes.pp}",
                advice=f"Write {whole}{'' if interleaved else ' or more'}, or change {_MICRO_BATCH}.",
            )

    # Settings of the torch engine that this one lacks.
    if sizes is not None:
        reads = {"": True, "tp": sizes.tp > 1, "pp": sizes.pp > 1, "ep": sizes.ep > 1}
        reads |= {"sp": sizes.tp > 1 and bool(values.get(_SP)), "zero": sizes.fsdp > 1 and sizes.zero_stage > 0}
        for dimension, key, supported, does, instead in _UNSUPPORTED:
            if reads[dimension] and values.get(key, supported[0]) not in supported:
                yield settings.impossible(key, reason=f"the engine nxd {does}", advice=f"{instead}, or use {_TORCH}.")
    policy = settings.policy
    if policy is None:
        return
    updated = "float32" if policy.master_weights else policy.parameters
    masterless = policy.stochastic_rounding and not policy.master_weights
    rounds = f"rounds copies of float32 masters stochastically, and {policy.name} keeps none"
    for wrong, does, instead in (
        (policy.parameters not in ("float32", "bfloat16"), "computes in float32 or bfloat16", "Choose another"),
        (policy.optimizer_state != updated, "keeps optimizer state in the dtype of what it updates", "Choose another"),
        (policy.linear_product is not None, "leaves products of linear layers to the library", "Choose another"),
        (masterless, rounds, "Write mixed_precisionSR"),
    ):
        if wrong:
            advice = f"{instead}, or use {_TORCH}."
            yield settings.impossible("precision.type", reason=f"the engine nxd {does}", advice=advice)
