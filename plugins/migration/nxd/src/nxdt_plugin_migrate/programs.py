"""The targets of the kind ``migration``: one class for each program. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nxdt_core.config.tree import Origin, from_plain
from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig
from nxdt_plugin_migrate.config.detect import framework_of
from nxdt_plugin_migrate.config.renamed_keys import GONE, NEUTRAL, OF_ENGINE, current_name, why_unneeded
from nxdt_plugin_migrate.environment import environment_note

__all__ = ["NeMo", "NeuronxNemoMegatron", "NxDTraining"]


class _Program:
    """A :class:`~nxdt_core.protocols.migration.Migration`. The three programs share their keys' names."""

    name: ClassVar[str]

    def recognise(self, config: Mapping[str, Any]) -> str:
        """Return the key that shows that a configuration is of this program; empty where none does."""
        found, key = framework_of(from_plain(config, Origin(kind="file", where="")))
        return key if found == self.name else ""

    def explain(self, key: str, known: Collection[str]) -> KeyMeaning | None:
        """Return the key that says the same here, or why none is needed; None for a key of none of the programs."""
        name = current_name(key, known)
        if name:
            return KeyMeaning(name=name)
        key = key if why_unneeded(key) else current_name(key, {*OF_ENGINE, *GONE, *NEUTRAL}) or key
        found = why_unneeded(key)
        return None if found is None else KeyMeaning(unneeded=found[0], program=found[1])

    def environment_note(self, environment: Mapping[str, str]) -> str | None:
        """Return None: the note of NxD Training's variables is that of all."""
        return None

    def migrate(self, source: Path, target: Path, kernel: Any) -> MigratedConfig:
        """Rewrite a file for nxdt; see :func:`nxdt_plugin_migrate.config.migrate.migrate`."""
        from nxdt_plugin_migrate.config.migrate import migrate  # only where a file is migrated

        return migrate(source, target, self.name, kernel)


class NxDTraining(_Program):
    """Files of NxD Training."""

    name = "nxdt"

    _OWN: ClassVar = ("model_source", "model_alignment_strategy", "aync_exec_max_inflight_requests")
    """Keys that its files have and that files for nxdt, which share the other sections, rarely do."""

    def recognise(self, config: Mapping[str, Any]) -> str:
        """Return the first key that files for nxdt do not share."""
        return next((key for key in self._OWN if key in config), "")

    def environment_note(self, environment: Mapping[str, str]) -> str | None:
        """Return a line on the variables that job scripts of NxD Training and neuronx-nemo-megatron set."""
        return environment_note(environment)


class NeMo(_Program):
    """Files of NeMo 1.x."""

    name = "nemo"


class NeuronxNemoMegatron(_Program):
    """Files of neuronx-nemo-megatron."""

    name = "nnm"
