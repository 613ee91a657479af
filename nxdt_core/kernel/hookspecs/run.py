"""The run: observers of moments of training. A failure is logged once with the plugin's name; the run continues.

These are called once per optimizer step at the most, never per micro-batch or layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxdt_core.kernel.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import FitContext, StepContext

__all__ = ["nxdt_fit_end", "nxdt_fit_start", "nxdt_step_end"]


@hookspec
def nxdt_fit_start(context: FitContext) -> None:
    """Training is about to take its first step, on every process.

    Example::

        @hookimpl
        def nxdt_fit_start(context):
            logging.info("training %s from step %d", context.run_dir, context.step)
    """


@hookspec
def nxdt_step_end(context: StepContext) -> None:
    """An optimizer step is done, on every process.

    Example::

        @hookimpl
        def nxdt_step_end(context):
            if context.metrics.get("loss", 0.0) > 20:
                logging.warning("the loss is high at step %d", context.step)
    """


@hookspec
def nxdt_fit_end(context: FitContext) -> None:
    """Training ended, with or without success; ``context.status`` says which.

    Example::

        @hookimpl
        def nxdt_fit_end(context):
            notify(f"{context.run_dir}: {context.status} at step {context.step}")
    """
