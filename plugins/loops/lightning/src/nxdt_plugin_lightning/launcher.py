"""The processes of a ``Trainer``: those that a launcher has started, or those that Lightning starts from the script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from pytorch_lightning.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher

from nxdt_core.distributed.environment import read_rank_environment
from nxdt_plugin_lightning.errors import TrainerArgumentsIgnored
from nxdt_plugin_lightning.trainer_checks import asked_processes

if TYPE_CHECKING:
    import pytorch_lightning as pl

__all__ = ["ScriptLauncher", "StartedProcesses", "complete_variables"]


@final
class StartedProcesses(LightningEnvironment):
    """The processes that nxdt finds; Lightning, which looks for other launchers itself, refuses some of them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return whether another program has started this process as one of several."""
        return read_rank_environment().world_size > 1 or super().creates_processes_externally


@final
class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further rank, unless the ``Trainer`` asks for one process."""

    def __init__(self, environment: StartedProcesses, devices: int, nodes: int) -> None:
        super().__init__(environment, devices, nodes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes, then call ``function``.

        Raises:
            TrainerArgumentsIgnored: the ``Trainer`` asks for other numbers than the configuration.
        """
        asked = (1, 1) if trainer is None else asked_processes(trainer)
        if asked == (1, 1):
            return function(*args, **kwargs)
        if asked != (self.num_processes, self.num_nodes):
            argument = f"devices={asked[0]}, num_nodes={asked[1]}"
            instead = f"trainer.devices={asked[0]} and trainer.num_nodes={asked[1]} in the configuration"
            raise TrainerArgumentsIgnored(arguments=((argument, instead),))
        os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)

        def as_rank_zero(*args: Any, **kwargs: Any) -> Any:
            complete_variables()
            return function(*args, **kwargs)

        try:
            return super().launch(as_rank_zero, *args, trainer=trainer, **kwargs)
        except BaseException:
            self.kill(signal.SIGTERM)  # else they wait for this rank
            raise


def complete_variables() -> None:
    """Set ``RANK`` in a process of :class:`ScriptLauncher`: Lightning's launcher leaves it out."""
    given = os.environ
    if "RANK" in given or not {"NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= given.keys():
        return
    given["RANK"] = str(int(given["NODE_RANK"]) * int(given["LOCAL_WORLD_SIZE"]) + int(given["LOCAL_RANK"]))
