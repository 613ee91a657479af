"""Values that a recipe cannot know, such as the user's files: paths below ``/path/to/``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.config.resolved import ResolvedConfig

__all__ = ["is_placeholder", "require_set", "values_to_set"]

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
