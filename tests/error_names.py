"""Names of errors in the source, by which tests across processes tell them apart."""

from __future__ import annotations

from nxdt_core.cli.explain import error_codes


def name_of(error: BaseException | None) -> str:
    """The name of an error's row in the catalogue, or of its class."""
    found = error_codes().get(getattr(error, "code", ""))
    return found[0] if found else type(error).__name__
