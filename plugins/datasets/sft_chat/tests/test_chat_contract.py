"""Conversations, packed and padded, keep what the core expects of every dataset."""

from __future__ import annotations

import pytest

from nxdt_core.testing.dataset_contract import DatasetContract


class Chats(DatasetContract):
    packing = False

    @pytest.fixture
    def make(self, load, write, shipped):
        path = write(*shipped * 4)
        return lambda: load(path, seq_length=512, packing=self.packing)

    @pytest.fixture
    def changed(self, load, write, shipped):
        return load(write(*shipped * 3, name="fewer.jsonl"), seq_length=512, packing=self.packing)


class TestPadded(Chats):
    pass


class TestPacked(Chats):
    packing = True
