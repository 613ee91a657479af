"""The keys of ``data:`` that name files of records. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nxdt_core.config.annotations import Fraction, PositiveInt
from nxdt_core.protocols.dataset import SplitName

__all__ = ["RecordFiles"]

_SPELLINGS = (("train_files", "train_dir"), ("validation_files", "val_dir"), ("test_files", "test_dir"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFiles:
    """Base of the configurations of data whose files hold records."""

    train_files: tuple[Path, ...] = ()
    """Files to train on, in this order."""
    validation_files: tuple[Path, ...] = ()
    """Files to validate on."""
    test_files: tuple[Path, ...] = ()
    """Files to test on."""
    train_dir: Path | None = None
    """``train_files`` with one path, as NxD Training calls it."""
    val_dir: Path | None = None
    """``validation_files`` with one path, as NxD Training calls it."""
    test_dir: Path | None = None
    """``test_files`` with one path, as NxD Training calls it."""
    validation_fraction: Fraction = 0.0
    """Share of the training records to validate on instead of files, drawn by ``split_seed``; 0 takes none."""
    split_seed: int = 0
    """Decides which records validate. It is not the run's seed, so that another run trains on the same records."""
    dev_choose_samples: PositiveInt | None = None
    """Use only so many records of each split's files, the first ones; ``null`` uses all."""

    def files(self, split: SplitName) -> tuple[Path, ...]:
        """Return the paths of a split, by either spelling."""
        named, single = {
            "train": (self.train_files, self.train_dir),
            "validation": (self.validation_files, self.val_dir),
            "test": (self.test_files, self.test_dir),
        }[split]
        return named if single is None else (single,)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        for named, single in _SPELLINGS:
            if getattr(self, named) and getattr(self, single) is not None:
                yield single, f"{named} is given too; keep one of the two"
        if not (self.files("train") or self.files("validation") or self.files("test")):
            yield "train_files", "no files are named; give at least one path or pattern"
        if self.validation_fraction >= 1:
            yield "validation_fraction", f"{self.validation_fraction} leaves nothing to train on"
        if self.validation_fraction and self.files("validation"):
            yield "validation_fraction", "files to validate on are named too; set one of the two"
        if self.validation_fraction and not self.files("train"):
            yield "validation_fraction", "there are no train_files to take a share of"
