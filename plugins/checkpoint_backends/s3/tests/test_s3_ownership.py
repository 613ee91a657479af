"""One run at a time saves to a prefix: by a lease, for S3 has no locks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import Ownership, list_checkpoints
from nxdt_core.checkpoint.ownership import own, this_process
from nxdt_core.errors.checkpoints import OwnershipLost, StoreInUse

EXPIRY_S = 3.0


def take(storage: S3Storage, name: str, *, lines: list[str] | None = None, expiry_s: float = EXPIRY_S) -> Ownership:
    """As a process of a machine of its own."""
    me = replace(this_process(name, {}), machine=f"boot of {name}/pid:[1]", host=name)
    return own(storage, run=name, say=pytest.fail if lines is None else lines.append, me=me, expiry_s=expiry_s)


def test_a_living_owner_elsewhere_is_found_and_a_released_place_is_free(storage: S3Storage) -> None:
    first, lines = take(storage, "first"), list[str]()
    with pytest.raises(StoreInUse, match=r"'first'.*sign of life"):
        take(storage, "second", lines=lines)
    first.check()
    first.release()
    second = take(storage, "second", expiry_s=600)
    assert second.fencing > first.fencing
    assert list_checkpoints(storage) == []
    assert len(list(storage.list("owner-"))) == 2, "the first one's objects are cleaned up"
    second.release()


def test_a_silent_owner_is_followed_and_finds_out(storage: S3Storage) -> None:
    first, lines = take(storage, "first", expiry_s=600), list[str]()
    second = take(storage, "second", lines=lines)
    assert len(lines) == 1
    second.check()
    with raises(OwnershipLost, match="'second'"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_of_several_takers_one_owns(s3_uri: str, config: S3StorageConfig) -> None:
    def taker(number: int) -> Ownership | None:
        try:
            return take(S3Storage(s3_uri, config), f"node{number}", lines=[])
        except StoreInUse:
            return None

    with ThreadPoolExecutor(4) as pool:
        owners = [owner for owner in pool.map(taker, range(4)) if owner is not None]
    assert len(owners) == 1
    owners[0].check()
    owners[0].release()
