"""Resolution: which component is meant where the configuration does not name one. The first answer counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxdt_core.kernel.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import ResolveModelContext, ResolveStorageContext

__all__ = ["nxdt_resolve_checkpoint_storage", "nxdt_resolve_model"]


@hookspec(firstresult=True)
def nxdt_resolve_model(context: ResolveModelContext) -> str | None:
    """Name the model builder (``name`` or ``plugin:name``) for a section ``model`` without a name, or None.

    Example::

        @hookimpl
        def nxdt_resolve_model(context):
            return "tiny" if "TinyForCausalLM" in context.hf_architectures else None
    """


@hookspec(firstresult=True)
def nxdt_resolve_checkpoint_storage(context: ResolveStorageContext) -> str | None:
    """Name the store (``name`` or ``plugin:name``) for a location, before its scheme is looked up, or None.

    Example::

        @hookimpl
        def nxdt_resolve_checkpoint_storage(context):
            return "fsx" if context.uri.startswith("/fsx/") else None
    """
