"""Which products can run a layout; ``nxdt plan --device`` asks the engine. No torch here."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["ChecksProducts"]


@runtime_checkable
class ChecksProducts(Protocol):
    """Optional member of an engine's class: whether machines of a product can run a layout."""

    @staticmethod
    def check_product(config: Any, product: str) -> None:
        """Refuse what the machines of ``product`` cannot run, such as ranks that their links do not connect.

        Args:
            config: the whole resolved configuration, checked.
            product: name in a device profile, such as ``trn1``.

        Raises:
            NxdtError: with the reason.
        """
        ...
