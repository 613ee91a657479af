"""Layouts that Trainium machines do not run, and the order in which the library numbers ranks on them. No torch.

Sources, by rule:

- ``trn1``, number of cores: the runtime itself, "Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"
  (``nrt_load_collectives``, in https://github.com/huggingface/optimum-neuron/issues/619);
- tensor parallel sizes: neuronx-distributed at fbac349, ``parallel_layers/parallel_state.py``, 341 to 385
  (``get_logic_chosen``: sizes whose ranks cannot reach one another, and those that are numbered in another order) and
  593 to 618 (TP 4 on Trn1, without experts).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nxdt_core.protocols.mesh import MeshSizes
from nxdt_plugin_nxd.errors import LayoutNotOnHardware

LNC = "NEURON_LOGICAL_NC_CONFIG"
"""Variable with the number of physical cores in a logical one."""
_OLDER_LNC = "NEURON_RT_VIRTUAL_CORE_SIZE"
_TRN1 = "trn1"
_LIKE_TRN1 = ("trn1", "trn1n", "inf2")
_WORLDS = (1, 2, 8, 16)
_WHOLE_MACHINE = 32
_APART: Mapping[tuple[str, int], int] = {("trn2", 2): 8, ("trn2", 1): 16}
"""Platform and LNC → a tensor parallel size whose groups cannot reach one another."""
_RINGS: Mapping[tuple[str, int], int] = {("trn2", 2): 32, ("trn2", 1): 64}
"""Platform and LNC → the tensor parallel size whose groups run up one row of chips and down another."""
_ROWS = 4
"""Rows of chips in a Trn2 machine; first and last are neighbours, and so are the two between."""
_GROUP_OF_ROW = ((0, 0), (1, 0), (1, 1), (0, 1))
"""Group of each row of chips: number of the group within the machine, and half of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts of a machine that the library's rules depend on."""

    platform: str
    """``trn1``, ``trn2`` or ``trn3``."""
    lnc: int
    processes: int
    """Processes of one machine."""

    @classmethod
    def of(cls, platform: str, processes: int, environment: Mapping[str, str] | None = None) -> Machine:
        """Return the machine at hand, whose logical cores the runtime's variables describe."""
        environment = os.environ if environment is None else environment
        name = _TRN1 if platform in _LIKE_TRN1 else platform
        cores = environment.get(LNC) or environment.get(_OLDER_LNC)
        return cls(platform=name, lnc=_lnc(cores, name), processes=processes)


def machine_of_product(product: str, processes: int) -> Machine:
    """Return the machine that ``nxdt plan --device`` names, such as ``trn2-lnc1``."""
    platform, _, lnc = product.partition("-lnc")
    return Machine(platform=platform, lnc=_lnc(lnc, platform), processes=processes)


def _lnc(text: str | None, platform: str) -> int:
    if text and text.isdecimal():
        return int(text)
    return 1 if platform == _TRN1 else 2


def check_layout(sizes: MeshSizes, machine: Machine) -> None:
    """Refuse what the machine does not run.

    Raises:
        LayoutNotOnHardware: with the reason.
    """
    world, local, tp = sizes.world_size, machine.processes, sizes.tp
    kind = machine.platform, machine.lnc
    if machine.platform == _TRN1 and world not in _WORLDS and world % _WHOLE_MACHINE:
        advice = "take 1, 2, 8 or 16 processes, or whole machines of 32"
        _refuse(machine, f"its runtime connects 1, 2, 8, 16 or a multiple of 32 cores, and the run has {world}", advice)
    if _APART.get(kind) == tp and world > tp:
        others = "4, 16, 32 or 64" if machine.lnc > 1 else "4, 8, 32, 64 or 128"
        reason = f"groups of {tp} tensor parallel ranks cannot reach one another with LNC {machine.lnc}"
        _refuse(machine, reason, f"take tensor_model_parallel_size {others}")
    if not _reordered(sizes, machine):
        return
    if sizes.ep > 1:
        reason = f"the library distributes no experts with tensor_model_parallel_size {tp} there"
        _refuse(machine, reason, "take another tensor_model_parallel_size, or expert_model_parallel_size=1")
    if machine.platform == _TRN1:
        if local % tp or sizes.dp % (local // tp):
            reason = f"with tensor_model_parallel_size 4 each pipeline stage fills whole machines of {local} processes"
            _refuse(machine, reason, "take another tensor_model_parallel_size or pipeline_model_parallel_size")
    elif local != 2 * tp or world % local:
        reason = f"tensor_model_parallel_size {tp} needs all {2 * tp} processes of each machine"
        _refuse(machine, reason, f"set trainer.devices={2 * tp}, or take another tensor_model_parallel_size")


def _refuse(machine: Machine, reason: str, advice: str) -> None:
    raise LayoutNotOnHardware(platform=machine.platform, reason=reason, advice=advice)


def position_of(rank: int, sizes: MeshSizes, machine: Machine) -> int:
    """Return where a rank would be if tensor parallel ranks were neighbours, as they mostly are.

    A permutation: the rank at position 0 is the first of the first group.
    """
    if not _reordered(sizes, machine):
        return rank
    tp, local = sizes.tp, machine.processes
    if machine.platform == _TRN1:
        groups = local // tp
        rest, group = divmod(rank, groups)
        block, within = divmod(rest, tp)
        return (block * groups + group) * tp + within
    node, place = divmod(rank, local)
    row, column = divmod(place, local // _ROWS)
    group, half = _GROUP_OF_ROW[row]
    return (node * 2 + group) * tp + half * (local // _ROWS) + column


def _reordered(sizes: MeshSizes, machine: Machine) -> bool:
    if machine.platform == _TRN1:
        return sizes.tp == 4
    too_small = machine.lnc == 2 and sizes.world_size < 64
    return _RINGS.get((machine.platform, machine.lnc)) == sizes.tp and not too_small
