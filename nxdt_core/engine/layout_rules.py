"""Rules of layouts, checked before a run: what each dimension divides into equal parts, what schedules, asynchronous
tensor parallelism and token shuffling need, and what the installed version of torch cannot do.

The version of torch is read from its metadata, without importing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from nxdt_core.config.checks import BATCH, CP, EP, MICRO_BATCH, PP, REPLICAS, TP, VPP, WORLD
from nxdt_core.errors.configuration import ConfigProblem, ImpossibleCombination, Misfit
from nxdt_core.kernel.metadata import admits

if TYPE_CHECKING:  # its module imports the protocols of all that an engine runs
    from nxdt_core.protocols.engine import Settings

_VOCAB_MULTIPLE = "model.make_vocab_size_divisible_by"
_HEADS, _KV_HEADS = "model.num_attention_heads", "model.num_kv_heads"
_KV_REPLICATOR, _PAD_HEADS = "distributed_strategy.kv_replicator", "distributed_strategy.pad_heads"
_EXPERTS = "model.moe.num_experts"
_FOREIGN = "model.hf_config"
"""Key of a model that another library's configuration describes; the built model shows whether it has experts."""
_ASYNC = "distributed_strategy.async_tensor_parallel"
_SP, _COMPILE = "distributed_strategy.sequence_parallel", "model.compile"
_REGATHER = "distributed_strategy.sequence_parallel_regather"
_SHUFFLE = "distributed_strategy.token_shuffle_group_size"
_LENGTH = "data.seq_length"
_SCHEDULE = "distributed_strategy.pipeline_schedule"
_CHUNKS = "model.moe.exchange_chunks"
_NEEDED = "torch>=2.10"


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine on stock torch cannot run: the ``rules`` of its record."""
    if settings.policy is not None and settings.policy.parameters == "float16":
        yield ImpossibleCombination(
            **settings.place("precision.type"),
            reason="the engine torch does not compute with float16 parameters, since it scales no losses",
            advice="Choose a precision with bfloat16.",
        )
    dimensions = settings.numbers(TP, PP, CP, EP, _SHUFFLE)
    if dimensions is not None and max(dimensions) == 1:  # nothing is divided
        return
    for rule in RULES:
        yield from rule(settings)


def heads_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield query heads that do not divide by the tensor parallel devices; ``pad_heads`` adds what is missing."""
    numbers = settings.numbers(_HEADS, TP)
    if numbers is None or settings.values.get(_PAD_HEADS):
        return
    heads, tp = numbers
    if heads % tp:
        yield ImpossibleCombination(
            **settings.place(_HEADS, TP),
            reason=f"{heads} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads}, or set {_PAD_HEADS} to true.",
            cause=_misfit(settings, _HEADS, heads, tp),
        )


def kv_heads_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Key and value heads are shared out, or each is copied to equally many devices; ``pad_heads`` adds heads."""
    numbers = settings.numbers(_KV_HEADS, TP, _KV_REPLICATOR)
    if numbers is None or settings.values.get(_PAD_HEADS):
        return
    heads, tp, copies = numbers
    if heads % tp and tp % heads:
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads can neither be shared out nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
            cause=_misfit(settings, _KV_HEADS, heads, tp),
        )
    elif copies > 1 and heads * copies % tp:
        yield ImpossibleCombination(
            **settings.place(_KV_REPLICATOR, TP),
            reason=f"{heads} heads x kv_replicator {copies} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Leave it out, or write {max(1, tp // heads)}.",
        )


def columns_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel device takes equal parts of the feed-forward block and of the vocabulary."""
    # Where the vocabulary is filled up, what it is filled up to is divided.
    filled = settings.numbers(_VOCAB_MULTIPLE) is not None
    for key in ("model.ffn_hidden_size", _VOCAB_MULTIPLE if filled else "model.vocab_size"):
        numbers = settings.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(key, TP),
                reason=f"{numbers[0]} does not divide by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}, or write a multiple of {numbers[1]}.",
                cause=_misfit(settings, key, *numbers),
            )


def _misfit(settings: Settings, key: str, number: int, tp: int) -> Misfit:
    return Misfit(of=TP, divisor=tp, place=settings.place(TP), name=key, number=number)


def experts_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield expert parallelism over a number of experts that does not divide, or without experts."""
    sizes, experts = settings.numbers(EP), settings.numbers(_EXPERTS)
    if sizes is None or sizes[0] == 1 or settings.values.get(_FOREIGN):
        return
    if experts is None:
        yield ImpossibleCombination(
            **settings.place(EP),
            reason=f"EP {sizes[0]} shares out experts, and the model has none ({_EXPERTS} is not set)",
            advice="Set it to 1, or choose a model with experts.",
        )
    elif experts[0] % sizes[0]:
        yield ImpossibleCombination(
            **settings.place(_EXPERTS, EP),
            reason=f"{experts[0]} experts do not divide by expert_model_parallel_size {sizes[0]}",
            advice="Choose an expert parallel size that divides the experts.",
        )


def sequence_divides(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Context parallelism gives each device two parts of a sequence, sequence parallelism cuts what a device has."""
    numbers = settings.numbers("data.seq_length", CP, TP)
    if numbers is None:
        return
    length, cp, tp = numbers
    sharded = tp if settings.values.get("distributed_strategy.sequence_parallel") else 1
    parts = cp * math.lcm(2, sharded) if cp > 1 else sharded
    if length % parts:
        yield ImpossibleCombination(
            **settings.place("data.seq_length", CP, TP),
            reason=f"{length} tokens do not divide into {parts} equal parts (CP {cp}, TP {tp}"
            f"{' with sequence_parallel' if sharded > 1 else ''})",
            advice=f"Write a multiple of {parts}.",
        )


def async_tensor_parallel_fits(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Layers are compiled, gather and scatter sequences, and their ranks are on one machine."""
    numbers = settings.numbers(TP, *WORLD)
    if not settings.values.get(_ASYNC) or numbers is None or numbers[0] == 1:
        return
    tp, devices, _ = numbers
    for key, reason in (
        (_SP, "without sequence_parallel, ranks sum whole tensors, and no product can begin with a part of one"),
        (_COMPILE, "torch.compile puts products and collectives together"),
    ):
        if not settings.values.get(key):
            yield ImpossibleCombination(
                **settings.place(_ASYNC, key),
                reason=f"async_tensor_parallel needs {key}=true: {reason}",
                advice=f"Set {key}=true, or {_ASYNC}=false.",
            )
    if settings.values.get(_REGATHER):
        yield ImpossibleCombination(
            **settings.place(_ASYNC, _REGATHER),
            reason="the pass of async_tensor_parallel knows no gather of backward that another operation has begun, as"
            " sequence_parallel_regather does",
            advice=f"Set {_ASYNC}=false or {_REGATHER}=false.",
        )
    if devices % tp:
        yield ImpossibleCombination(
            **settings.place(_ASYNC, TP, *WORLD),
            reason=f"async_tensor_parallel needs tensor parallel ranks that share memory, and groups of {tp} are not"
            f" on one machine of {devices} devices",
            advice=f"Choose a tensor parallel size that divides {devices}, or set {_ASYNC}=false.",
        )


def shuffle_fits(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Groups are equal parts of the ranks that shard parameters, and deal out equal parts of their tokens."""
    numbers, sizes = settings.numbers(_SHUFFLE), settings.mesh_sizes()
    if numbers is None or numbers[0] == 1 or sizes is None:
        return
    (ranks,) = numbers
    if settings.numbers(_EXPERTS) is None:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE),
            reason=f"tokens are exchanged before experts, and the model has none ({_EXPERTS} is not set)",
            advice="Set it to 1, or choose a model with experts.",
        )
    elif sizes.dp_shard % ranks:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE, REPLICAS, *WORLD),
            reason=f"{sizes.dp_shard} data parallel ranks do not divide into groups of {ranks} that exchange tokens",
            advice=f"Choose a divisor of {sizes.dp_shard}.",
        )
    else:
        yield from _tokens_divide(settings, ranks)


def _tokens_divide(settings: Settings, ranks: int) -> Iterator[ImpossibleCombination]:
    numbers = settings.numbers(MICRO_BATCH, _LENGTH, CP, TP)
    if numbers is None:
        return
    rows, length, cp, tp = numbers
    parts = cp * (tp if settings.values.get("distributed_strategy.sequence_parallel") else 1)
    tokens, rest = divmod(rows * length, parts)
    if not rest and tokens % ranks:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE, MICRO_BATCH, _LENGTH),
            reason=f"a rank's {tokens} tokens of a micro-batch do not divide over {ranks} ranks that exchange them",
            advice=f"Choose a divisor of {tokens}.",
        )


def torch_runs_zbv(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield ZBV on torch 2.9, whose schedule has a rank send to itself between two consecutive stages."""
    sizes = settings.mesh_sizes()
    if sizes is not None and sizes.schedule == "zbv" and sizes.pp > 1 and (installed := _older()):
        yield ImpossibleCombination(
            **settings.place(_SCHEDULE),
            reason=f"the schedule zbv needs {_NEEDED}, and torch {installed} is installed",
            advice="Choose 1f1b or interleaved, or install a newer torch.",
        )


def torch_shards_copied_heads(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield layouts that torch 2.9 cannot run: a mesh cannot be split, and FSDP2 takes only parameters whose mesh has
    the same root as FSDP2's mesh."""
    numbers = settings.numbers(_KV_HEADS, TP)
    if numbers is not None and numbers[0] < numbers[1] and (installed := _older()):
        heads, tp = numbers
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads over tensor_model_parallel_size {tp} are copied, which needs"
            f" {_NEEDED}, and torch {installed} is installed",
            advice=f"Choose a tensor parallel size of at most {heads}, or install a newer torch.",
        )


def torch_shards_experts_of_tensor_ranks(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield expert with tensor parallelism on torch 2.9, where the meshes of both have different roots for FSDP2."""
    numbers = settings.numbers(EP, TP)
    if numbers is not None and min(numbers) > 1 and (installed := _older()):
        ep, tp = numbers
        yield ImpossibleCombination(
            **settings.place(EP, TP),
            reason=f"expert_model_parallel_size {ep} with tensor_model_parallel_size {tp} needs {_NEEDED}, and torch"
            f" {installed} is installed",
            advice="Set one of the two to 1, or install a newer torch.",
        )


def torch_compiles_exchanges_in_chunks(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield compiled exchanges in chunks on torch 2.9 and 2.10, whose backward fails on the sizes of dropless rows."""
    numbers = settings.numbers(EP, _CHUNKS) if settings.values.get(_COMPILE) else None
    if numbers is not None and min(numbers) > 1 and (installed := _older(needed := "torch>=2.11")):
        yield ImpossibleCombination(
            **settings.place(_CHUNKS, _COMPILE),
            reason=f"{numbers[1]} exchange_chunks in compiled layers need {needed}, and torch {installed} is installed",
            advice=f"Set {_CHUNKS}=1 or {_COMPILE}=false, or install a newer torch.",
        )


def _older(needed: str = _NEEDED) -> str | None:
    """The version of torch that is installed, if it is older than ``needed``."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    return None if admits(needed, installed) else installed


_LAYERS, _CUTS = "model.num_layers", "model.pipeline_cuts"
_RECOMPUTE = "model.activations_checkpoint_granularity"


def layers_fill_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each stage of the pipeline takes a layer, unless ``model.pipeline_cuts`` says where to cut."""
    numbers, sizes = settings.numbers(_LAYERS), settings.mesh_sizes()
    if numbers is None or sizes is None or sizes.pp == 1 or settings.values.get(_CUTS):
        return
    layers = numbers[0]
    if layers < sizes.stages:
        yield ImpossibleCombination(
            **settings.place(_LAYERS, PP, VPP),
            reason=f"{layers} layers cannot fill {_stages(sizes.pp, sizes.vpp)}",
            advice=f"Choose sizes of at most {layers} stages.",
        )


def cuts_match_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """``model.pipeline_cuts`` has one name fewer than there are stages."""
    cuts, sizes = settings.values.get(_CUTS), settings.mesh_sizes()
    if not cuts or sizes is None or sizes.pp == 1:
        return
    if len(cuts) != sizes.stages - 1:
        yield ImpossibleCombination(
            **settings.place(_CUTS),
            reason=f"{len(cuts)} cuts make {len(cuts) + 1} stages, but there are {_stages(sizes.pp, sizes.vpp)}",
            advice=f"Name {sizes.stages - 1} cuts.",
        )


def schedule_knows_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield a number of stages per device that the schedule does not have."""
    schedule, vpp, pp = settings.values.get(_SCHEDULE), settings.values.get(VPP) or 1, settings.values.get(PP)
    if schedule is None or pp == 1:
        return
    fits = {"1f1b": vpp == 1, "interleaved": vpp > 1, "zbv": vpp <= 2}
    wants = {"1f1b": "one stage", "interleaved": "several stages", "zbv": "two stages"}
    if not fits[schedule]:
        yield ImpossibleCombination(
            **settings.place(_SCHEDULE, VPP),
            reason=f"the schedule {schedule} has {wants[schedule]} a device, and"
            f" virtual_pipeline_model_parallel_size is {vpp}",
            advice="Set the virtual size to 2 or more." if vpp == 1 else "Leave the schedule out, or change that size.",
        )


def schedule_has_micro_batches(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield what ``torch.distributed.pipelining`` (2.13) asks of the number of micro-batches.

    1F1B takes at least as many as stages. The interleaved one works in rounds of at least PP micro-batches, all of
    one size. ZBV takes any number; with fewer than 2 PP - 1 its devices only wait longer.
    """
    sizes, count = settings.mesh_sizes(), settings.micro_batches()
    if sizes is None or count is None or sizes.pp == 1:
        return
    rounds = max(1, count // sizes.pp)
    if sizes.schedule == "1f1b" and count < sizes.pp:
        problem = f"needs at least {sizes.pp}, one per stage"
    elif sizes.schedule == "interleaved" and count % rounds:
        problem = f"needs rounds of one size, and {count} do not divide into {rounds}"
    else:
        return
    whole = -(-count // sizes.pp) * sizes.pp
    micro = settings.values[MICRO_BATCH]
    yield ImpossibleCombination(
        **settings.place(BATCH, MICRO_BATCH, PP),
        reason=f"each data parallel rank has {count} micro-batches per step, and the schedule {sizes.schedule} over"
        f" {sizes.pp} pipeline ranks {problem}",
        advice=f"Write {whole * sizes.dp * micro} for {whole} micro-batches of {micro}, or change"
        f" {MICRO_BATCH} or the layout.",
    )


def schedule_compiles(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV takes each backward apart into inputs and weights; a compiled layer's is one piece."""
    sizes = settings.mesh_sizes()
    if sizes is not None and sizes.schedule == "zbv" and settings.values.get(_COMPILE):
        yield ImpossibleCombination(
            **settings.place(_COMPILE, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and that of a compiled layer is one piece",
            advice=f"Set {_COMPILE} to false, or choose 1f1b or interleaved.",
        )


def schedule_recomputes(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV looks at a layer's graph twice, and each time would compute the layer again."""
    sizes = settings.mesh_sizes()
    if sizes is not None and sizes.schedule == "zbv" and settings.values.get(_RECOMPUTE):
        yield ImpossibleCombination(
            **settings.place(_RECOMPUTE, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and would recompute each of them many times",
            advice=f"Set {_RECOMPUTE} to null, or choose 1f1b or interleaved.",
        )


def schedule_regathers(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV reads what a layer keeps twice, and each time would gather it."""
    sizes = settings.mesh_sizes()
    reads = sizes is not None and sizes.schedule == "zbv" and sizes.tp > 1
    if reads and settings.values.get(_SP) and settings.values.get(_REGATHER):
        yield ImpossibleCombination(
            **settings.place(_REGATHER, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and would gather inputs in both parts",
            advice=f"Set {_REGATHER} to false, or choose 1f1b or interleaved.",
        )


def _stages(pp: int, vpp: int) -> str:
    return f"PP {pp} x {vpp} a device = {pp * vpp} stages"


RULES = (
    heads_divide,
    kv_heads_divide,
    columns_divide,
    experts_divide,
    sequence_divides,
    shuffle_fits,
    async_tensor_parallel_fits,
    layers_fill_stages,
    cuts_match_stages,
    schedule_knows_stages,
    schedule_has_micro_batches,
    schedule_compiles,
    schedule_recomputes,
    schedule_regathers,
    torch_runs_zbv,
    torch_shards_copied_heads,
    torch_shards_experts_of_tensor_ranks,
    torch_compiles_exchanges_in_chunks,
)
"""Rules in the order in which they are tried."""
