"""Layouts that the engine declares and cannot run with these values. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.checks import BATCH, EP, MICRO_BATCH, PP, TP, VPP, mesh_sizes, micro_batches
from nxdt_core.errors.configuration import ConfigProblem, ImpossibleCombination
from nxdt_core.protocols.engine import Settings

_HEADS, _KV_HEADS = "model.num_attention_heads", "model.num_kv_heads"
_VOCABULARY, _VOCAB_MULTIPLE = "model.vocab_size", "model.make_vocab_size_divisible_by"
_FEED_FORWARD, _LENGTH = "model.ffn_hidden_size", "data.seq_length"
_LAYERS, _CUTS = "model.num_layers", "model.pipeline_cuts"
_CHUNKS, _PRECISION = "model.loss_chunk_tokens", "precision.type"
_EXPERTS = "model.moe.num_experts"
_ASYNC = "distributed_strategy.async_tensor_parallel"
_EXCHANGE = "model.moe.exchange_chunks"
_SCHEDULE = "distributed_strategy.pipeline_schedule"
_SP = "distributed_strategy.sequence_parallel"


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine cannot lay out: the ``rules`` of its record."""
    for rule in RULES:
        yield from rule(settings)


def tensor_sizes_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel rank takes as many heads, feed-forward columns, vocabulary rows and tokens as the others."""
    filled = settings.numbers(_VOCAB_MULTIPLE) is not None
    keys = [_HEADS, _FEED_FORWARD, _VOCAB_MULTIPLE if filled else _VOCABULARY]
    if settings.values.get(_SP):
        keys.append(_LENGTH)
    for key in keys:
        numbers = settings.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(key, TP),
                reason=f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}, or a multiple of {numbers[1]}.",
            )


def kv_heads_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Key and value heads are divided among the ranks, or each is copied to equally many."""
    numbers = settings.numbers(_KV_HEADS, TP)
    if numbers is not None and numbers[0] % numbers[1] and numbers[1] % numbers[0]:
        heads, tp = numbers
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads can be neither divided nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
        )


def layers_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Pipeline stages take equally many layers, unless ``model.pipeline_cuts`` names the cuts."""
    sizes, numbers, cuts = mesh_sizes(settings), settings.numbers(_LAYERS, PP), settings.values.get(_CUTS)
    if sizes is None or numbers is None or sizes.pp == 1:
        return
    named = f"pipeline_model_parallel_size {sizes.pp}"
    if sizes.vpp > 1:
        named = f"{sizes.stages} stages, {sizes.vpp} on each of {sizes.pp} pipeline ranks"
    if cuts and len(cuts) != sizes.stages - 1:
        yield ImpossibleCombination(
            **settings.place(_CUTS, PP, VPP),
            reason=f"{len(cuts)} cuts make {len(cuts) + 1} stages, and the layout asks for {named}",
            advice=f"Name {sizes.stages - 1} cuts.",
        )
    elif not cuts and numbers[0] % sizes.stages:
        yield ImpossibleCombination(
            **settings.place(_LAYERS, PP, VPP),
            reason=f"{numbers[0]} layers are not divisible by {named}",
            advice=f"Choose sizes that divide the layers, or name the cuts in {_CUTS}.",
        )


def schedule_has_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """1F1B has one stage on each rank, the interleaved schedule several."""
    schedule, stages, pp = settings.values.get(_SCHEDULE), settings.values.get(VPP) or 1, settings.values.get(PP)
    if pp == 1 or schedule is None or (schedule == "interleaved") == (stages > 1):
        return
    yield ImpossibleCombination(
        **settings.place(_SCHEDULE, VPP),
        reason=f"the schedule {schedule} does not run {stages} stages on each rank",
        advice="Leave the schedule out, or change that size.",
    )


def micro_batches_fill_pipeline(settings: Settings) -> Iterator[ImpossibleCombination]:
    """1F1B takes at least one micro-batch per rank, the interleaved schedule a multiple of them."""
    sizes, count = mesh_sizes(settings), micro_batches(settings)
    if sizes is None or count is None or sizes.pp == 1:
        return
    interleaved = sizes.vpp > 1
    if count % sizes.pp == 0 if interleaved else count >= sizes.pp:
        return
    schedule, wants = ("the interleaved schedule", "a multiple of") if interleaved else ("1F1B", "at least")
    whole = -(-count // sizes.pp) * sizes.pp * sizes.dp * settings.values[MICRO_BATCH]
    yield ImpossibleCombination(
        **settings.place(BATCH, MICRO_BATCH, PP),
        reason=f"each data parallel rank has {count} micro-batches per step, and {schedule} over {sizes.pp} pipeline"
        f" ranks needs {wants} {sizes.pp}",
        advice=f"Write {whole}{'' if interleaved else ' or more'}, or change {MICRO_BATCH}.",
    )


def experts_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Expert parallel ranks take equally many experts."""
    sizes, experts = settings.numbers(EP), settings.numbers(_EXPERTS)
    if sizes is None or experts is None or experts[0] % sizes[0] == 0:
        return
    yield ImpossibleCombination(
        **settings.place(_EXPERTS, EP),
        reason=f"{experts[0]} experts are not divisible by expert_model_parallel_size {sizes[0]}",
        advice="Choose an expert parallel size that divides the experts.",
    )


def exchange_is_one_chunk(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Check the exchange of tokens: the library waits for each."""
    chunks = settings.numbers(_EXCHANGE, EP)
    if chunks is not None and min(chunks) > 1:
        yield ImpossibleCombination(
            **settings.place(_EXCHANGE),
            reason="the engine nxd sends all tokens of a layer at once",
            advice="Set it to 1, or use parallel_engine.name=torch.",
        )


def no_async_tensor_parallel(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Check tensor parallelism: the pass that pipelines its collectives is inductor's."""
    if settings.values.get(_ASYNC):
        yield ImpossibleCombination(
            **settings.place(_ASYNC),
            reason="the engine nxd has no asynchronous tensor parallelism",
            advice="Set it to false, or use parallel_engine.name=torch.",
        )


def loss_is_one_chunk(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Check the loss: the library's cross-entropy takes all tokens of a micro-batch at once."""
    if settings.values.get(_CHUNKS):
        yield ImpossibleCombination(
            **settings.place(_CHUNKS),
            reason="the engine nxd computes the losses of a micro-batch at once",
            advice="Set it to null, or use parallel_engine.name=torch.",
        )


def stochastic_rounding_has_masters(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Check stochastic rounding: the engine rounds copies of float32 masters, and nothing else."""
    if settings.values.get(_PRECISION) == "bf16SR":
        yield ImpossibleCombination(
            **settings.place(_PRECISION),
            reason="the engine nxd rounds copies of float32 masters stochastically, and bf16SR keeps none",
            advice="Write mixed_precisionSR, or use parallel_engine.name=torch.",
        )


RULES = (
    tensor_sizes_divide,
    kv_heads_divide,
    layers_divide,
    schedule_has_stages,
    micro_batches_fill_pipeline,
    experts_divide,
    exchange_is_one_chunk,
    no_async_tensor_parallel,
    loss_is_one_chunk,
    stochastic_rounding_has_masters,
)
"""Rules in the order in which they are tried."""
