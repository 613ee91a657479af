"""Kind ``model``: a model's architecture, its plan, and its correspondence to Hugging Face's.

Example::

    class TinyBuilder(ModelBuilder):
        def build(self) -> torch.nn.Module:
            return Tiny(self.config)

It trains with data parallelism under every engine. A plan adds the other layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from nxdt_core.errors.models import HFExchangeUnsupported

if TYPE_CHECKING:
    import torch

    from nxdt_core.protocols.plan import InitRule, ParallelPlan

__all__ = ["KeyMap", "ModelBuilder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """One parameter's name here and in a Hugging Face checkpoint; ``*`` stands for a layer number.

    Where shapes differ, ``transform`` names how the Hugging Face tensor is made into ours: ``none``, ``transpose``
    (of the last two dimensions), ``stack`` (one Hugging Face tensor an expert, a second ``*``, stacked on a new leading
    dimension), ``concat`` (several names, concatenated on dimension 0; ``sections`` gives their rows), ``interleave``
    (rows of ``sections[0]`` kinds, such as query, key and value, of ``sections[1]`` heads each: all of a kind together
    there, all of a head together here), ``interleave_transpose`` (the same in the columns of a transposed matrix),
    ``pad`` (ours has rows beyond their ``sections[0]``, such as a vocabulary's that is filled up: they are not written,
    and the mean of the others where they are read), ``part`` (several parameters [experts, rows, …] share the tensor,
    of whose ``sections[1]`` equal parts along the rows ours is number ``sections[0]``; every ``sections[1]``-th row
    where ``sections[2]`` is 1, as in interleaved gates), ``part_transpose`` (the same, of transposed matrices).
    """

    name: str
    hf_names: tuple[str, ...]
    transform: str = "none"
    sections: tuple[int, ...] = ()


class ModelBuilder(ABC):
    """Builds one architecture. The target is called as ``Builder(config)`` with the section.

    A subclass needs nothing but :meth:`build`, and a section with ``vocab_size``. By default nothing of the module is
    cut; norms and tied parameters are found in it, biases start at zero, and all others are normal with a standard
    deviation of 0.02.

    The module's forward is ``forward(input_ids, position_ids=None, document_ids=None, step=None) -> logits`` with
    ``input_ids``, ``position_ids``, ``document_ids`` [micro_batch, seq] int64 and ``logits``
    [micro_batch, seq, vocab]. ``document_ids`` given means: tokens attend within their own document only.
    ``step``, a :class:`~nxdt_core.protocols.step_context.StepContext`, is for the building blocks of
    ``nxdt_core.models``
    that take it. A forward without this parameter is not given it, and the blocks find it at the border
    (:mod:`nxdt_core.models.step_boundary`).
    Auxiliary losses are added to the graph with :func:`nxdt_core.models.moe.layer.add_aux_loss`.
    """

    vocab_size: int
    """Rows of the embedding; ids of the tokenizer must be smaller."""
    max_sequence_length: int | None = None
    """Longest sequence that positions allow; None where there is no bound."""

    hf_architectures: ClassVar[tuple[str, ...]] = ()
    hf_ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of tensors that a Hugging Face directory may hold although no parameter takes them, such as tables of
    old exports."""
    hf_may_lack: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that a directory may lack where ``checkpoint.strict`` is false."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.vocab_size = config.vocab_size

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Build the whole model. Called under ``torch.device("meta")``: allocate parameters, fill none.

        Buffers that are not saved (rotary tables) are computed in a method ``reset_buffers()`` of the module that
        owns them, which is called once the device is known. One that it neither assigns nor writes to is an error.
        """

    def plan(self) -> ParallelPlan:
        """Say how the model may be sharded, cut, recomputed and regularised. Default: the norms and the tied parameters
        of the module."""
        from nxdt_core.protocols.plan import ParallelPlan

        modules, named = self._parts
        norms = {f"{path}.weight" for path, module in modules if type(module).__name__.endswith("Norm")}
        first: dict[int, str] = {}
        owners = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        return ParallelPlan(
            norms=tuple(name for name in owners if name in norms),
            tied=tuple((owner, user) for user, owner in owners.items() if owner != user),
        )

    def init_rules(self) -> Sequence[InitRule]:
        """Return the distributions of fresh weights; the first rule whose pattern matches a parameter wins.

        Scales in the plan's ``norms`` are one where only the rule for all others, ``*``, matches them. Another rule for
        them must be constant. Default: zero for biases, and a normal distribution for all others.
        """
        from nxdt_core.protocols.plan import InitRule

        return (
            InitRule(pattern="*.bias", distribution="constant"),
            InitRule(pattern="*", distribution="normal"),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the floating-point operations of one training token, forward and backward, without recomputation.

        Convention of PaLM (arXiv:2204.02311, appendix B) with causal attention counted in full. Default: six for each
        element of a matrix that is not an embedding table; attention is not counted.
        """
        modules, named = self._parts
        tables = {f"{path}.weight" for path, module in modules if type(module).__name__ == "Embedding"}
        return 6.0 * sum(each.numel() for name, each in named if each.ndim > 1 and name not in tables)

    def config_to_hf(self) -> dict[str, Any]:
        """Translate the section into a ``config.json``. The section's class method ``from_hf``
        (:class:`nxdt_core.config.section.Section`) reads what this writes; it is called before torch is imported.

        Raises:
            HFExchangeUnsupported: the builder has no counterpart at Hugging Face; the default.
        """
        raise HFExchangeUnsupported(builder=type(self).__name__)

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry per parameter with its names in a Hugging Face directory.

        Raises:
            HFExchangeUnsupported: the builder has no counterpart at Hugging Face; the default.
        """
        raise HFExchangeUnsupported(builder=type(self).__name__)

    @cached_property
    def _parts(self) -> tuple[list[tuple[str, torch.nn.Module]], list[tuple[str, torch.nn.Parameter]]]:
        """The modules and the parameters by name, of the model without memory."""
        import torch

        with torch.device("meta"):
            module = self.build()
        return [*module.named_modules()], [*module.named_parameters(remove_duplicate=False)]
