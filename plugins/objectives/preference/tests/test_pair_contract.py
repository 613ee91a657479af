"""Pairs, packed and padded, keep what the core expects of every dataset."""

from __future__ import annotations

from importlib.resources import files

import pytest
from nxdt_plugin_preference.config import PreferenceConfig, UnpairedConfig
from nxdt_plugin_preference.loader import PreferenceData, UnpairedData
from nxdt_testing.dataset_contract import DatasetContract, MirroredBytes

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext

SHIPPED = files("nxdt_plugin_preference").joinpath("data", "pairs-train.jsonl")


class Pairs(DatasetContract):
    packing = False
    data, section = PreferenceData, PreferenceConfig

    def pairs(self, seq_length=128, seed=0, tokenizer=None, **settings):
        config = self.section(train_files=(SHIPPED,) * 4, packing=self.packing, **settings)
        context = DataContext(seq_length=seq_length, seed=seed, tokenizer=tokenizer or ByteTokenizer())
        return self.data(config, context).split("train")

    @pytest.fixture
    def make(self):
        return self.pairs

    @pytest.fixture
    def changed(self):
        return self.pairs(dev_choose_samples=180)

    @pytest.fixture
    def variants(self):
        other = MirroredBytes()
        return {"seq_length": self.pairs(256), "seed": self.pairs(seed=7), "tokenizer": self.pairs(tokenizer=other)}


class TestPadded(Pairs):
    pass


class TestPacked(Pairs):
    packing = True


class TestUnpaired(Pairs):
    data, section = UnpairedData, UnpairedConfig

    @pytest.fixture
    def changed(self):
        return self.pairs(dev_choose_samples=90)


class TestUnpairedPacked(TestUnpaired):
    packing = True
