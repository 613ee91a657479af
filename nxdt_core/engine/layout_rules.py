"""Rules of layouts, checked before a run: what each dimension divides into equal parts, what schedules, asynchronous
tensor parallelism and token shuffling need, and what the installed version of torch cannot do.

The version of torch is read from its metadata, without importing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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
_LAYERS, _CUTS = "model.num_layers", "model.pipeline_cuts"
_RECOMPUTE = "model.activations_checkpoint_granularity"
_CHUNKS = "model.moe.exchange_chunks"
_NEEDED = "torch>=2.10"


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine on stock torch cannot run: the ``rules`` of its record."""
    if settings.policy is not None and settings.policy.parameters == "float16":
        reason = "the engine torch does not compute with float16 parameters, since it scales no losses"
        yield _problem(settings, ("precision.type",), reason, "Choose a precision with bfloat16.")
    dimensions = settings.numbers(TP, PP, CP, EP, _SHUFFLE)
    if dimensions is not None and max(dimensions) == 1:  # nothing is divided
        return
    yield from _find_uneven_tensors(settings)
    yield from _find_uneven_tokens(settings)
    yield from _find_async_problems(settings)
    yield from _find_pipeline_problems(settings)
    yield from _find_old_torch(settings)


def _problem(settings: Settings, keys: tuple[str, ...], reason: str, advice: str, **more: Any) -> ImpossibleCombination:
    return ImpossibleCombination(**settings.place(*keys), reason=reason, advice=advice, **more)


def _misfit(settings: Settings, key: str, number: int, tp: int) -> Misfit:
    return Misfit(of=TP, divisor=tp, place=settings.place(TP), name=key, number=number)


def _find_uneven_tensors(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield heads, columns and experts that devices cannot share in equal parts."""
    # Query heads divide, or pad_heads adds what is missing.
    padded = settings.values.get(_PAD_HEADS)
    if (numbers := settings.numbers(_HEADS, TP)) is not None and not padded and numbers[0] % numbers[1]:
        heads, tp = numbers
        yield _problem(
            settings,
            (_HEADS, TP),
            f"{heads} does not divide by tensor_model_parallel_size {tp}",
            f"Choose a tensor parallel size that divides {heads}, or set {_PAD_HEADS} to true.",
            cause=_misfit(settings, _HEADS, heads, tp),
        )
    # Key and value heads are shared out, or each is copied to equally many devices.
    if (numbers := settings.numbers(_KV_HEADS, TP, _KV_REPLICATOR)) is not None and not padded:
        heads, tp, copies = numbers
        if heads % tp and tp % heads:
            yield _problem(
                settings,
                (_KV_HEADS, TP),
                f"{heads} key and value heads can neither be shared out nor copied evenly over"
                f" tensor_model_parallel_size {tp}",
                f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
                cause=_misfit(settings, _KV_HEADS, heads, tp),
            )
        elif copies > 1 and heads * copies % tp:
            yield _problem(
                settings,
                (_KV_REPLICATOR, TP),
                f"{heads} heads x kv_replicator {copies} does not divide by tensor_model_parallel_size {tp}",
                f"Leave it out, or write {max(1, tp // heads)}.",
            )
    # Each device takes equal parts of the feed-forward block and of the vocabulary, or of what that is filled up to.
    vocabulary = "model.vocab_size" if settings.numbers(_VOCAB_MULTIPLE) is None else _VOCAB_MULTIPLE
    for key in ("model.ffn_hidden_size", vocabulary):
        numbers = settings.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield _problem(
                settings,
                (key, TP),
                f"{numbers[0]} does not divide by tensor_model_parallel_size {numbers[1]}",
                f"Choose a tensor parallel size that divides {numbers[0]}, or write a multiple of {numbers[1]}.",
                cause=_misfit(settings, key, *numbers),
            )
    sizes, experts = settings.numbers(EP), settings.numbers(_EXPERTS)
    if sizes is None or sizes[0] == 1 or settings.values.get(_FOREIGN):
        return
    if experts is None:
        yield _problem(
            settings,
            (EP,),
            f"EP {sizes[0]} shares out experts, and the model has none ({_EXPERTS} is not set)",
            "Set it to 1, or choose a model with experts.",
        )
    elif experts[0] % sizes[0]:
        yield _problem(
            settings,
            (_EXPERTS, EP),
            f"{experts[0]} experts do not divide by expert_model_parallel_size {sizes[0]}",
            "Choose an expert parallel size that divides the experts.",
        )


def _find_uneven_tokens(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield sequences and micro-batches that devices cannot share in equal parts."""
    # Context parallelism gives each device two parts of a sequence, sequence parallelism cuts what a device has.
    sequence_parallel = settings.values.get(_SP)
    if (numbers := settings.numbers(_LENGTH, CP, TP)) is not None:
        length, cp, tp = numbers
        sharded = tp if sequence_parallel else 1
        parts = cp * math.lcm(2, sharded) if cp > 1 else sharded
        if length % parts:
            yield _problem(
                settings,
                (_LENGTH, CP, TP),
                f"{length} tokens do not divide into {parts} equal parts (CP {cp}, TP {tp}"
                f"{' with sequence_parallel' if sharded > 1 else ''})",
                f"Write a multiple of {parts}.",
            )
    # Groups that shuffle tokens are equal parts of the ranks that shard parameters, and deal out equal parts.
    shuffled, sizes = settings.numbers(_SHUFFLE), settings.mesh_sizes()
    if shuffled is None or shuffled[0] == 1 or sizes is None:
        return
    (ranks,) = shuffled
    if settings.numbers(_EXPERTS) is None:
        yield _problem(
            settings,
            (_SHUFFLE,),
            f"tokens are exchanged before experts, and the model has none ({_EXPERTS} is not set)",
            "Set it to 1, or choose a model with experts.",
        )
    elif sizes.dp_shard % ranks:
        yield _problem(
            settings,
            (_SHUFFLE, REPLICAS, *WORLD),
            f"{sizes.dp_shard} data parallel ranks do not divide into groups of {ranks} that exchange tokens",
            f"Choose a divisor of {sizes.dp_shard}.",
        )
    elif (numbers := settings.numbers(MICRO_BATCH, _LENGTH, CP, TP)) is not None:
        rows, length, cp, tp = numbers
        tokens, rest = divmod(rows * length, cp * (tp if sequence_parallel else 1))
        if not rest and tokens % ranks:
            yield _problem(
                settings,
                (_SHUFFLE, MICRO_BATCH, _LENGTH),
                f"a rank's {tokens} tokens of a micro-batch do not divide over {ranks} ranks that exchange them",
                f"Choose a divisor of {tokens}.",
            )


def _find_async_problems(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield what asynchronous tensor parallelism lacks: layers are compiled, gather and scatter sequences, and their
    ranks are on one machine."""
    numbers = settings.numbers(TP, *WORLD)
    if not settings.values.get(_ASYNC) or numbers is None or numbers[0] == 1:
        return
    tp, devices, _ = numbers
    for key, reason in (
        (_SP, "without sequence_parallel, ranks sum whole tensors, and no product can begin with a part of one"),
        (_COMPILE, "torch.compile puts products and collectives together"),
    ):
        if not settings.values.get(key):
            reason = f"async_tensor_parallel needs {key}=true: {reason}"
            yield _problem(settings, (_ASYNC, key), reason, f"Set {key}=true, or {_ASYNC}=false.")
    if settings.values.get(_REGATHER):
        yield _problem(
            settings,
            (_ASYNC, _REGATHER),
            "the pass of async_tensor_parallel knows no gather of backward that another operation has begun, as"
            " sequence_parallel_regather does",
            f"Set {_ASYNC}=false or {_REGATHER}=false.",
        )
    if devices % tp:
        yield _problem(
            settings,
            (_ASYNC, TP, *WORLD),
            f"async_tensor_parallel needs tensor parallel ranks that share memory, and groups of {tp} are not"
            f" on one machine of {devices} devices",
            f"Choose a tensor parallel size that divides {devices}, or set {_ASYNC}=false.",
        )


def _find_pipeline_problems(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield stages that layers and cuts cannot fill, and what the schedule does not run.

    ``torch.distributed.pipelining`` (2.13) asks for numbers of micro-batches: 1F1B takes at least as many as stages.
    The interleaved one works in rounds of at least PP micro-batches, all of one size. ZBV takes any number; with fewer
    than 2 PP - 1 its devices only wait longer.
    """
    values, sizes = settings.values, settings.mesh_sizes()
    pipeline = sizes if sizes is not None and sizes.pp > 1 else None
    layers, cuts = settings.numbers(_LAYERS), values.get(_CUTS)
    if pipeline is not None:
        stages = f"PP {pipeline.pp} x {pipeline.vpp} a device = {pipeline.pp * pipeline.vpp} stages"
        if layers is not None and not cuts and layers[0] < pipeline.stages:
            reason = f"{layers[0]} layers cannot fill {stages}"
            yield _problem(settings, (_LAYERS, PP, VPP), reason, f"Choose sizes of at most {layers[0]} stages.")
        if cuts and len(cuts) != pipeline.stages - 1:
            reason = f"{len(cuts)} cuts make {len(cuts) + 1} stages, but there are {stages}"
            yield _problem(settings, (_CUTS,), reason, f"Name {pipeline.stages - 1} cuts.")
    schedule, vpp = values.get(_SCHEDULE), values.get(VPP) or 1
    if schedule is not None and values.get(PP) != 1:
        fits, stages = {
            "1f1b": (vpp == 1, "one stage"),
            "interleaved": (vpp > 1, "several stages"),
            "zbv": (vpp <= 2, "two stages"),
        }[schedule]
        if not fits:
            yield _problem(
                settings,
                (_SCHEDULE, VPP),
                f"the schedule {schedule} has {stages} a device, and virtual_pipeline_model_parallel_size is {vpp}",
                "Set the virtual size to 2 or more." if vpp == 1 else "Leave the schedule out, or change that size.",
            )
    if pipeline is not None and (count := settings.micro_batches()) is not None:
        rounds, problem = max(1, count // pipeline.pp), ""
        if pipeline.schedule == "1f1b" and count < pipeline.pp:
            problem = f"needs at least {pipeline.pp}, one per stage"
        elif pipeline.schedule == "interleaved" and count % rounds:
            problem = f"needs rounds of one size, and {count} do not divide into {rounds}"
        if problem:
            whole, micro = -(-count // pipeline.pp) * pipeline.pp, values[MICRO_BATCH]
            yield _problem(
                settings,
                (BATCH, MICRO_BATCH, PP),
                f"each data parallel rank has {count} micro-batches per step, and the schedule {pipeline.schedule} over"
                f" {pipeline.pp} pipeline ranks {problem}",
                f"Write {whole * pipeline.dp * micro} for {whole} micro-batches of {micro}, or change"
                f" {MICRO_BATCH} or the layout.",
            )
    if sizes is None or sizes.schedule != "zbv":
        return
    zbv, other = "the schedule zbv takes the backward of layers apart, and", "or choose 1f1b or interleaved."
    if values.get(_COMPILE):
        reason = f"{zbv} that of a compiled layer is one piece"
        yield _problem(settings, (_COMPILE, _SCHEDULE), reason, f"Set {_COMPILE} to false, {other}")
    if values.get(_RECOMPUTE):
        reason = f"{zbv} would recompute each of them many times"
        yield _problem(settings, (_RECOMPUTE, _SCHEDULE), reason, f"Set {_RECOMPUTE} to null, {other}")
    if sizes.tp > 1 and values.get(_SP) and values.get(_REGATHER):
        reason = f"{zbv} would gather inputs in both parts"
        yield _problem(settings, (_REGATHER, _SCHEDULE), reason, f"Set {_REGATHER} to false, {other}")


def _find_old_torch(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield layouts that the installed version of torch cannot run.

    In ZBV of torch 2.9 a rank sends to itself between two consecutive stages. A mesh of 2.9 cannot be split, and its
    FSDP2 takes only parameters whose mesh has the same root as FSDP2's mesh, which copied heads, and experts with
    tensor parallelism, do not have. In 2.9 and 2.10, backward of compiled exchanges in chunks fails on the sizes of
    dropless rows.
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return
    if admits("torch>=2.11", installed):
        return
    has, newer = f"and torch {installed} is installed", "or install a newer torch."
    if not admits(_NEEDED, installed):
        sizes = settings.mesh_sizes()
        if sizes is not None and sizes.schedule == "zbv" and sizes.pp > 1:
            reason = f"the schedule zbv needs {_NEEDED}, {has}"
            yield _problem(settings, (_SCHEDULE,), reason, f"Choose 1f1b or interleaved, {newer}")
        numbers = settings.numbers(_KV_HEADS, TP)
        if numbers is not None and numbers[0] < numbers[1]:
            heads, tp = numbers
            reason = (
                f"{heads} key and value heads over tensor_model_parallel_size {tp} are copied, which needs {_NEEDED}"
            )
            advice = f"Choose a tensor parallel size of at most {heads}, {newer}"
            yield _problem(settings, (_KV_HEADS, TP), f"{reason}, {has}", advice)
        numbers = settings.numbers(EP, TP)
        if numbers is not None and min(numbers) > 1:
            reason = (
                f"expert_model_parallel_size {numbers[0]} with tensor_model_parallel_size {numbers[1]} needs {_NEEDED}"
            )
            yield _problem(settings, (EP, TP), f"{reason}, {has}", f"Set one of the two to 1, {newer}")
    numbers = settings.numbers(EP, _CHUNKS) if settings.values.get(_COMPILE) else None
    if numbers is not None and min(numbers) > 1:
        yield _problem(
            settings,
            (_CHUNKS, _COMPILE),
            f"{numbers[1]} exchange_chunks in compiled layers need torch>=2.11, {has}",
            f"Set {_CHUNKS}=1 or {_COMPILE}=false, {newer}",
        )
