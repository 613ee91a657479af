"""A module that imports a heavy library, which takes less time than torch; wrong classes say that they are from it."""

from __future__ import annotations

import numpy as np

__all__ = ["np"]
