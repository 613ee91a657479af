"""The records of each split of a run: those of its files, or a share of the training records to validate on."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from nxdt_core.data.cache import digest
from nxdt_core.data.files.paths import RecordFiles
from nxdt_core.data.files.records import Records, read_records
from nxdt_core.data.sampler import draw
from nxdt_core.errors.base import ErrorCode
from nxdt_core.protocols.dataset import SplitName


class SplitRecords:
    """Records by split.

    Args:
        config: names the files, and the share.
        example: a record as it is wanted, as JSON, for errors.
        section: that has the keys of the files, for errors.
        empty: error where a side of the share gets no record, with the values ``fraction``, ``records`` and ``split``;
            None raises none.
        limit_in_digests: whether digests hold ``dev_choose_samples``, and not the number of records that are divided.
    """

    def __init__(
        self,
        config: RecordFiles,
        *,
        example: str,
        section: str = "data",
        empty: ErrorCode[Any] | None = None,
        limit_in_digests: bool = False,
    ) -> None:
        self._config, self._example, self._section, self._empty = config, example, section, empty
        self._limit_in_digests = limit_in_digests

    def of(self, name: SplitName) -> tuple[Records, str] | None:
        """Return the records of a split and a digest of what decides them; None where no files and no share are named.

        Raises:
            NxdtError: of the files, as of :func:`~nxdt_core.data.files.records.read_records`; or ``empty``.
        """
        if self._config.validation_fraction and name != "test":
            divided, source = self._division
            return divided[name], digest(source, name)
        return self._read(name) if self._config.files(name) else None

    def _read(self, name: SplitName) -> tuple[Records, str]:
        config = self._config
        paths, key, limit = config.files(name), f"{self._section}.{name}_files", config.dev_choose_samples
        records, source = read_records(paths, key, example=self._example, split=name, columns=config.columns)
        return records[:limit], digest(source, limit) if self._limit_in_digests else source

    @cached_property
    def _division(self) -> tuple[dict[SplitName, Records], str]:
        """Training records in two, drawn by the seed of the split; each part keeps the order of the files."""
        fraction, seed = self._config.validation_fraction, self._config.split_seed
        records, source = self._read("train")
        validating, training = draw(range(len(records)), round(len(records) * fraction), seed=seed)
        parts: dict[SplitName, Records] = {"validation": records.take(validating), "train": records.take(training)}
        for split, part in parts.items():
            if self._empty is not None and not part:
                raise self._empty(fraction=fraction, records=len(records), split=split)
        number = () if self._limit_in_digests else (len(records),)
        return parts, digest(source, *number, fraction, seed)
