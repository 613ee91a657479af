"""The store keeps the contract of stores, on a real server."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage
from nxdt_testing.store_contract import StoreContract

from tests.sampling import slow_except, takes_all

PAGE = 20
"""Keys that a listing asks for at once by default, so that 21 objects fill two pages."""
SIZES = [(parts, more) for parts in (1, 2, 3) for more in (-1, 0, 1)]
INTERRUPTIONS = [(kind, replacing) for kind in (ZeroDivisionError, KeyboardInterrupt) for replacing in (False, True)]


class TestS3Storage(StoreContract):
    page_size = 1000
    part_bytes = 5 * 2**20

    @pytest.fixture
    def storage(self, s3_uri: str, config: S3StorageConfig) -> S3Storage:
        self.config = config
        return S3Storage(s3_uri, config)

    def reopen(self, storage: Any) -> S3Storage:
        return S3Storage(storage.uri, self.config)

    def opener(self, storage: Any) -> Any:
        return partial(S3Storage, storage.uri, self.config)

    def test_long_listings_are_complete(self, storage: S3Storage, pytestconfig: pytest.Config) -> None:  # type: ignore[override]
        """Ask the server for small pages, unless all cases are taken: then it decides, and 1,001 objects are made."""
        if not takes_all(pytestconfig):
            self.page_size = PAGE  # type: ignore[misc]
            storage._connection().client.meta.events.register("provide-client-params.s3.ListObjectsV2", paged)
        super().test_long_listings_are_complete(storage)

    @pytest.mark.parametrize(("parts", "more"), slow_except(SIZES, [(1, 0), (1, 1), (2, 0)]))
    def test_objects_of_several_parts_come_back(self, storage: S3Storage, parts: int, more: int) -> None:
        """Of three parts, and of a part less a byte: see ``test_buffers_come_back_and_never_carry_bytes_over``."""
        super().test_objects_of_several_parts_come_back(storage, parts, more)

    @pytest.mark.parametrize(
        ("interruption", "replacing"),
        slow_except(INTERRUPTIONS, [(KeyboardInterrupt, True)]),
    )
    def test_an_interruption_between_any_two_writes_leaves_nothing(
        self, storage: S3Storage, interruption: type[BaseException], replacing: bool
    ) -> None:
        """Of other exceptions: see ``test_an_exception_leaves_no_parts``."""
        super().test_an_interruption_between_any_two_writes_leaves_nothing(storage, interruption, replacing)

    @pytest.mark.slow
    def test_ranks_write_and_compete_at_once(self, storage: S3Storage) -> None:
        """By default ``test_put_if_absent_has_one_winner`` shows it: the server decides, and no memory is shared."""
        super().test_ranks_write_and_compete_at_once(storage)


def paged(params: dict[str, Any], **_: Any) -> dict[str, Any]:
    return {**params, "MaxKeys": params.get("MaxKeys", PAGE)}
