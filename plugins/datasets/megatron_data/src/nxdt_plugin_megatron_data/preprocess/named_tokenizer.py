"""A tokenizer that processes pass to one another: each makes its own of it.

Apart from :mod:`.tokenizers`, which reads options: its imports take longer than all others of a worker process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from nxdt_core.kernel import Kernel
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["NamedTokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTokenizer:
    """A component of kind ``tokenizer`` and its configuration."""

    label: str
    """As it was named."""
    component: str
    config: Any

    def build(self) -> Tokenizer:
        """Make it."""
        component = Kernel.start().registry.get("tokenizer", self.component)
        return cast(Tokenizer, component.load_target()(self.config))
