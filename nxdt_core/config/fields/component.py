"""What a component's own section may offer in addition to fields; all methods are optional.

It is a pydantic model, best a :class:`nxdt_core.config.section.Section`. The component's record declares it
(``config="my_plugin.config:TinyConfig"``). It is in a module that imports no torch, and its fields are keys of the
section that selects the component, flat, next to ``name``. The strings below the fields are their documentation, or
``Field(description=…)``. Types are those of YAML: ``bool``, ``int``,
``float``, ``str``, ``Path`` (a relative one starts at the file that names it), ``Literal``, unions, lists, tuples,
mappings and sections of these; bounds are written ``Annotated[float, Range(0, 1)]``.

Example::

    class TinyConfig(Section):
        hidden_size: PositiveInt
        \"\"\"Width of the model.\"\"\"
        heads: PositiveInt = 4
        \"\"\"Attention heads.\"\"\"

        def check(self):
            if self.hidden_size % self.heads:
                yield "heads", f"{self.hidden_size} does not divide by {self.heads}"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["ChecksItself", "NamesHFKeys", "ReadsHFConfig", "RequiresCapabilities"]


@runtime_checkable
class ChecksItself(Protocol):
    """The section knows combinations that cannot work."""

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for each; the key is relative to the section. Called once the types are right."""
        ...


@runtime_checkable
class RequiresCapabilities(Protocol):
    """What the component needs of the engine depends on the values of its section.

    ``requires`` of its record is for what it needs always.
    """

    def requires_capabilities(self) -> Iterable[str]:
        """Return engine capabilities of :data:`nxdt_core.api.CAPABILITIES`. Called once the types are right."""
        ...


@runtime_checkable
class ReadsHFConfig(Protocol):
    """The section of a model can be filled from a Hugging Face ``config.json`` (``model.model_config``).

    ``nxdt checkpoint import`` calls it, too. ``config_to_hf`` of the model's builder is its inverse
    (:class:`nxdt_core.protocols.model.HFExchange`).

    Example::

        @classmethod
        def from_hf(cls, hf):
            return {"hidden_size": hf["hidden_size"], "rope.theta": hf.get("rope_theta", 10_000.0)}
    """

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values by key, dotted for a section within the section; keys that the user gives win.

        Raises:
            NxdtError: the file asks for something that the model does not do.
            ValueError: the same, in one sentence.
        """
        ...


@runtime_checkable
class NamesHFKeys(Protocol):
    """The section maps its keys to the keys of that file that they come from; messages then name both."""

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the key of the section → key of the file. Called with what :meth:`ReadsHFConfig.from_hf` has read."""
        ...
