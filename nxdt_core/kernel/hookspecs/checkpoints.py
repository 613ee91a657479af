"""Checkpoints: observers of saving and loading. A failure is logged with the plugin's name; the run continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxdt_core.kernel.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import CheckpointContext

__all__ = ["nxdt_checkpoint_loaded", "nxdt_checkpoint_saved"]


@hookspec
def nxdt_checkpoint_saved(context: CheckpointContext) -> None:
    """A checkpoint is committed: its manifest is durable and a run can resume from it.

    Example::

        @hookimpl
        def nxdt_checkpoint_saved(context):
            subprocess.Popen(["copy-to-archive", context.uri])
    """


@hookspec
def nxdt_checkpoint_loaded(context: CheckpointContext) -> None:
    """A checkpoint was verified and loaded; training continues from its step.

    Example::

        @hookimpl
        def nxdt_checkpoint_loaded(context):
            logging.info("resumed from %s", context.uri)
    """
