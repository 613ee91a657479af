"""Reads launchers' environment variables, with errors that name the variable and its value."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.errors.ranks import BadLaunchVariable, LaunchEnvironmentIncomplete

__all__ = ["port_of", "read_port", "read_variable", "require"]

_PORTS = range(12000, 32000)
"""Where derived ports are: above the well-known ones, below those that Linux hands out by itself."""


def read_variable(variables: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """Return an integer of at least ``least``.

    Raises:
        BadLaunchVariable: it is none.
    """
    text = variables[name]
    if not text.isdecimal() or int(text) < least:
        raise BadLaunchVariable(name=name, value=text, wanted=f"a whole number of {least} or more")
    return int(text)


def read_port(variables: Mapping[str, str], name: str) -> int:
    """Return the TCP port that the environment variable ``name`` holds.

    Raises:
        BadLaunchVariable: it is none.
    """
    port = read_variable(variables, name, least=1)
    if port > 65535:
        raise BadLaunchVariable(name=name, value=str(port), wanted="a port: a number from 1 to 65535")
    return port


def require(variables: Mapping[str, str], names: tuple[str, ...], *, reason: str) -> None:
    """Check that all of ``names`` are set and not empty.

    Args:
        variables: the environment.
        names: of variables.
        reason: which variables of the launcher are set, for the message: ``RANK and WORLD_SIZE are``.

    Raises:
        LaunchEnvironmentIncomplete: some are missing.
    """
    missing = tuple(name for name in names if not variables.get(name))
    if missing:
        raise LaunchEnvironmentIncomplete(missing=missing, reason=reason)


def port_of(number: int) -> int:
    """Return a port that all processes derive identically from the number of their job."""
    return _PORTS[number % len(_PORTS)]
