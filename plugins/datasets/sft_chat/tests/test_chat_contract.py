"""Conversations, packed and padded, keep what the core expects of every dataset."""

from __future__ import annotations

import pytest
from nxdt_testing.dataset_contract import DatasetContract


class Chats(DatasetContract):
    packing = False
    records = 40
    """As many as give the contract's samples."""

    @pytest.fixture
    def make(self, load, write, shipped):
        path = write(*shipped[: self.records])
        keys = {"packing": self.packing, "truncation": "drop"}
        return lambda **context: load(path, **{"seq_length": 256, **context}, **keys)

    @pytest.fixture
    def changed(self, load, write, shipped):
        path = write(*shipped[: self.records - 9], name="fewer.jsonl")
        return load(path, seq_length=256, packing=self.packing, truncation="drop")

    @pytest.fixture
    def variants(self, make):
        return {"seq_length": make(seq_length=300), "seed": make(seed=7)}


class TestPadded(Chats):
    pass


class TestPacked(Chats):
    packing = True
    records = 111
