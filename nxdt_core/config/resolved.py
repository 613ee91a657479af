"""What :func:`nxdt_core.config.load` returns: a checked configuration and the components it selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxdt_core.config.schema import RunConfig
from nxdt_core.config.tree import Origin, to_plain, to_shown

if TYPE_CHECKING:
    from nxdt_core.config.tree import Node
    from nxdt_core.kernel import Kernel
    from nxdt_core.kernel.registry import RegisteredComponent

__all__ = ["ResolvedConfig", "Selected", "is_placeholder", "require_set", "values_to_set"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A component and its own section, as an instance of the class that it declares."""

    component: RegisteredComponent
    config: Any
    """None where the component declares none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration in which every value is known, typed and checked."""

    run: RunConfig
    """The core's own keys."""
    kernel: Kernel = field(compare=False)
    components: Mapping[str, Selected | None]
    """By kind: ``model``, ``dataset``, ``tokenizer``, ``optimizer``, ``schedule``, ``precision``,
    ``store``, ``objective``, ``adapter``, ``engine``. None: the run uses none."""
    loggers: tuple[Selected, ...]
    callbacks: tuple[Selected, ...]
    origins: Mapping[str, Origin] = field(compare=False)
    """By key path of each value."""
    source: str = field(compare=False)
    """What the user named: a path or ``recipe:NAME``."""
    run_dir: Path
    checkpoint_uri: str
    overrides: tuple[str, ...] = field(compare=False)
    """What the user gave in addition to the source, as written."""
    notes: tuple[str, ...] = field(compare=False)
    """Lines to print: settings that are accepted and have no effect."""
    tree: Node = field(compare=False, repr=False)
    """All values with their origins."""

    def selected(self, slot: str) -> Selected:
        """Return the component of a slot that is never empty."""
        found = self.components[slot]
        if found is None:
            raise KeyError(slot)
        return found

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the key path and plain value of every leaf, in the order of the schema."""
        return self.tree.leaves()

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree that :func:`nxdt_core.config.load` reads back to an equal configuration.

        It can be written: what comes from the environment is the reference to it (``${oc.env:NAME}``), and secrets
        are masked. A configuration with a masked secret does not load.
        """
        shown: dict[str, Any] = to_shown(self.tree)
        return shown

    def to_values(self) -> dict[str, Any]:
        """Return the same tree with every value resolved, secrets included; it is never written or printed."""
        plain: dict[str, Any] = to_plain(self.tree)
        return plain


_ROOT = "/path/to/"


def is_placeholder(value: Any) -> bool:
    """Return whether ``value``, or a part of it, stands for one that the user sets."""
    if isinstance(value, dict):
        return any(map(is_placeholder, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_placeholder, value))
    return str(value).startswith(_ROOT)


def values_to_set(config: ResolvedConfig) -> tuple[str, ...]:
    """Return the keys whose values are placeholders, in the order of the schema."""
    return tuple(path for path, value in config.values() if is_placeholder(value) and _given(config, path))


def _given(config: ResolvedConfig, path: str) -> bool:
    """Whether the key was written itself, and does not follow another one."""
    origin = config.origins.get(path)
    return origin is None or origin.kind != "default"


def require_set(config: ResolvedConfig) -> None:
    """See that no value is a placeholder.

    Raises:
        ValuesNotSet: some are.
    """
    from nxdt_core.errors.configuration import ValuesNotSet

    keys = values_to_set(config)
    if keys:
        raise ValuesNotSet(source=config.source, keys=keys)
