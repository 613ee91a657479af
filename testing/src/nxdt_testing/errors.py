"""``raises``: pytest's, for rows of the catalogue of errors."""

from __future__ import annotations

from typing import Any

import pytest

from nxdt_core.errors.base import ErrorCode, NxdtError

__all__ = ["raises"]


def raises(*rows: ErrorCode[Any] | type[NxdtError], match: str | None = None) -> pytest.RaisesExc[Any]:
    """Return ``pytest.raises`` for errors with the code of one of ``rows``."""
    codes = {row.code for row in rows}
    return pytest.raises(NxdtError, match=match, check=lambda error: error.code in codes)
