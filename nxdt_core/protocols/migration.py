"""Kind ``migration``: recognises, explains and rewrites configurations of another program. Torch-free.

Example::

    class AcmeMigration(Migration):
        def recognise(self, config):
            return "acme_version" if "acme_version" in config else ""

        def explain(self, key, known):
            return KeyMeaning(name="trainer.max_steps") if key == "max_steps" else None

        def migrate(self, source, target, kernel, overrides):
            keys = yaml.safe_load(source.read_text()) | overrides
            ...
            return MigratedConfig(source=source, target=target, program="Acme", text=text, keys=rows)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["KeyMeaning", "MigratedConfig", "MigratedKey", "Migration", "Verdict"]

Verdict = Literal["mapped", "renamed", "changed", "added", "unneeded", "off", "ignored", "unsupported"]
"""Result of the migration of a key. ``unneeded``: nothing is lost without it. ``off``: it is unset, switched off, or
equal to the behaviour here. ``ignored``: the program of the file never read it. ``unsupported``: nxdt has no such
function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratedKey:
    """One key in the report of a migration."""

    key: str
    """Key path in the file that was migrated; of an added key: in the new file."""
    line: int
    """Line of the file that was migrated, counted from 1; 0 for a key that is not in it."""
    verdict: Verdict
    target: str = ""
    """Key path in the new file, where it differs."""
    value: str = ""
    """Value in the old file. An added key has its new value, a changed key has both."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratedConfig:
    """Result of a migration; nothing is written yet."""

    source: Path
    target: Path
    program: str
    """Name of the program that the file is of, as in ``NeMo 1.x``."""
    text: str
    """The new file, YAML."""
    keys: tuple[MigratedKey, ...]
    """Every key of the file, and those that were added."""
    to_set: tuple[tuple[str, str], ...] = ()
    """(key, why) of values and paths that the user still has to set."""
    remaining: tuple[tuple[str, str], ...] = ()
    """(key, sentence) of what else ``nxdt config check`` reports in the new file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMeaning:
    """Meaning of a key of another program here: another key, or nothing."""

    name: str = ""
    """The key that says it here."""
    unneeded: str = ""
    """Reason why no key here stands for it, where ``name`` is empty."""
    program: str = ""
    """Name of the program that has the key."""


class Migration(ABC):
    """The target of the kind, called as ``Target()``. The record's ``name`` is the value of ``--from``, and its
    ``program`` the name in messages. ``nxdt train`` asks each installed migration, so its module imports nothing heavy.
    """

    @abstractmethod
    def recognise(self, config: Mapping[str, Any]) -> str:
        """Return the key that shows that a configuration is of this program; empty where none does.

        Commands that read a configuration take what :meth:`migrate` writes in place of a file that is recognised;
        ``nxdt config migrate`` without ``--from`` takes the migration that recognises a file.

        Args:
            config: What the file says, as a nested plain tree.
        """

    def explain(self, key: str, known: Collection[str]) -> KeyMeaning | None:
        """Return what a key means that nxdt, or the selected component, does not know, for the message about it; None
        where this program does not have the key.

        Args:
            key: Key path, as written.
            known: Key paths of the schema, with those of the selected components.
        """
        return None

    def environment_note(self, environment: Mapping[str, str]) -> str | None:
        """Return a line that names variables which job scripts of this program set and nxdt does not read, and what to
        set instead; None where none is set. ``nxdt train`` prints it when it starts."""
        return None

    @abstractmethod
    def migrate(self, source: Path, target: Path, kernel: Any, overrides: Mapping[str, Any]) -> MigratedConfig:
        """Rewrite a file for nxdt.

        Args:
            source: The file; :func:`nxdt_core.config.read_file` returns its values, the lines of keys and its text.
            target: Where the caller will write the text; its relative paths start there.
            kernel: A started :class:`nxdt_core.kernel.Kernel`; its plugins say what can be kept.
            overrides: Key path → value of the command line. Those that this program has replace the file's and are
                in the report; others are nxdt's, and the caller puts them over the result.

        Raises:
            NxdtError: the file cannot be read, or is not one of this program.
        """
