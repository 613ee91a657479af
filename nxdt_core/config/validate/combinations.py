"""Settings that exclude each other, and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.layout import LAYOUT_RULES
from nxdt_core.config.validate.run_length import ENDING_RULES
from nxdt_core.errors.configuration import ImpossibleCombination

__all__ = ["RULES", "find_impossible"]

Rule = Callable[[Checked], Iterable[ImpossibleCombination]]

_ZERO, _ZERO_STAGE = "distributed_strategy.zero1", "distributed_strategy.zero_stage"
_MASTERS = "checkpoint.use_master_weights_in_ckpt"
_GRANULARITY = "model.activations_checkpoint_granularity"
_RECOMPUTE = "model.activations_checkpoint_recompute"


def find_impossible(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield the problems that all rules about combinations of keys find."""
    for rule in RULES:
        yield from rule(checked)


def zero_stage_agrees(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``zero1: false`` switches sharding off, ``zero_stage`` switches it on."""
    stage = checked.values.get(_ZERO_STAGE)
    if stage is not None and checked.values.get(_ZERO) is False:
        yield ImpossibleCombination(
            **checked.place(_ZERO_STAGE, _ZERO),
            reason=f"zero_stage {stage} shards, and zero1: false says not to",
            advice="Leave zero1 out, or set zero_stage to null.",
        )


def resume_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``weight_init_only`` takes weights from somewhere."""
    if checked.values.get("checkpoint.weight_init_only") and checked.values.get("checkpoint.resume_from", "") is None:
        yield ImpossibleCombination(
            **checked.place("checkpoint.weight_init_only"),
            reason="weight_init_only takes the weights of a checkpoint, and checkpoint.resume_from names none",
            advice="Set checkpoint.resume_from.",
        )


def one_form_of_weights(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``use_master_weights_in_ckpt: true`` wants float32 as the model's weights."""
    rounded = "checkpoint.save_bf16"
    if checked.values.get(_MASTERS) and checked.values.get(rounded):
        yield ImpossibleCombination(
            **checked.place(_MASTERS, rounded),
            reason=f"it wants float32 as the model's weights, and {rounded}: true wants bfloat16",
            advice="Keep one of them; a resume is exact with either.",
        )


def one_dtype_of_state(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``adamw_fp32OptState`` is AdamW with float32 state."""
    narrow, optimizer = "precision.optimizer_state", "model.optim.name"
    if checked.values.get(narrow) == "bfloat16" and checked.values.get(optimizer) == "adamw_fp32OptState":
        yield ImpossibleCombination(
            **checked.place(narrow, optimizer),
            reason=f"it says bfloat16, and {optimizer}: adamw_fp32OptState says float32",
            advice=f"Set {optimizer} to adamw, or {narrow} to float32.",
        )


def recompute_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield modules to recompute that are named under another granularity than ``selective``."""
    granularity, names = checked.values.get(_GRANULARITY), checked.values.get(_RECOMPUTE)
    if names and granularity == "full":
        yield ImpossibleCombination(
            **checked.place(_RECOMPUTE),
            reason="whole layers are recomputed under granularity 'full', so naming modules means nothing",
            advice=f"Set {_GRANULARITY} to selective, or leave the names out.",
        )
    if not names and granularity == "selective":
        yield ImpossibleCombination(
            **checked.place(_GRANULARITY, _RECOMPUTE),
            reason=f"selective recomputes what {_RECOMPUTE} names, and that names nothing",
            advice=f"Name modules there, such as CoreAttention, or set {_GRANULARITY} to full.",
        )


def rate_falls(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a ``min_lr`` that is not below the peak learning rate."""
    floor, rate = "model.optim.sched.min_lr", "model.optim.lr"
    rates = checked.numbers(floor, rate)
    if rates is not None and rates[0] > rates[1]:
        yield ImpossibleCombination(
            **checked.place(floor, rate),
            reason=f"min_lr {rates[0]} is above the learning rate {rates[1]} ({rate}) that falls to it",
            advice=f"Lower {floor} or raise {rate}.",
        )


def sequence_has_positions(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a model with a declared number of positions takes no longer sequence."""
    length, longest = "data.seq_length", "model.max_position_embeddings"
    sizes = checked.numbers(length, longest)
    if sizes is not None and sizes[0] > sizes[1]:
        yield ImpossibleCombination(
            **checked.place(length, longest),
            reason=f"sequences have {sizes[0]} tokens, the model has positions for {sizes[1]} ({longest})",
            advice=f"Shorten {length} or raise {longest}.",
        )


def metrics_file_collected(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a file of metrics that node_exporter would pass over."""
    key = "exp_manager.monitoring.metrics_file"
    name = checked.values.get(key)
    if isinstance(name, str) and not name.endswith(".prom"):
        yield ImpossibleCombination(
            **checked.place(key),
            reason="node_exporter reads files whose name ends with .prom",
            advice="Name it so, such as nxdt.prom.",
        )


RULES: tuple[Rule, ...] = (
    *ENDING_RULES,
    *LAYOUT_RULES,
    zero_stage_agrees,
    resume_named,
    one_form_of_weights,
    one_dtype_of_state,
    recompute_named,
    rate_falls,
    sequence_has_positions,
    metrics_file_collected,
)
"""In the order in which they are tried."""
