"""Fields of records that no sample contains: which ones, in how many records, and whether that is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nxdt_core.data.chat.keys import UnusedMode
from nxdt_core.data.files.records import Place
from nxdt_core.errors.chats import FieldsUnused

__all__ = ["UnusedFields", "describe_unused", "is_given", "unread"]


class UnusedFields:
    """Counts records by unused field.

    Args:
        mode: ``refuse`` raises an error at the first such record.
    """

    def __init__(self, mode: UnusedMode) -> None:
        self._mode = mode
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """Field → records that have it, the most frequent first."""
        return dict(sorted(self._counts.items(), key=lambda item: (-item[1], item[0])))

    def add(self, place: Place, names: Iterable[str]) -> None:
        """Count the unused fields of one record.

        Raises:
            FieldsUnused: there are some, and they are refused.
        """
        found = tuple(dict.fromkeys(names))
        if found and self._mode == "refuse":
            raise FieldsUnused(place=str(place), names=found)
        self._counts.update(found)


def describe_unused(counts: Mapping[str, int]) -> str:
    """Return the counts as a phrase: ``history in 1,204 records, id in 1 record``."""
    return ", ".join(f"{name} in {count:,} record{'s' if count > 1 else ''}" for name, count in counts.items())


def unread(record: Mapping[str, Any], read: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a record that hold something and are not among those that were ``read``."""
    known = frozenset(read)
    return (key for key, value in record.items() if key not in known and is_given(value))


def is_given(value: object) -> bool:
    """Return whether a value of a record holds something: null, blank texts, ``"[]"`` and empty lists do not."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    return value is not None and value not in ([], {})
