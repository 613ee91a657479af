"""Indexed files and blends of them keep what the core expects of every dataset."""

from __future__ import annotations

import pytest
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.loader import MegatronData
from nxdt_testing.dataset_contract import DatasetContract

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext


def opened(prefixes, seq_length=16, seed=11):
    context = DataContext(seq_length=seq_length, seed=seed, tokenizer=ByteTokenizer())
    config = MegatronDataConfig(data_prefix=prefixes, reset_attention_mask=True, reset_position_ids=True)
    return MegatronData(config, context).split("train")


class Files(DatasetContract):
    @pytest.fixture
    def variants(self, make):
        return {"seq_length": make(seq_length=24), "seed": make(seed=7)}


class TestOneFile(Files):
    @pytest.fixture
    def make(self, by_hand, sequences):
        prefix = by_hand("corpus", sequences)
        return lambda **run: opened(prefix, **run)

    @pytest.fixture
    def changed(self, by_hand, sequences):
        return opened(by_hand("other", [sequences[1], sequences[0], *sequences[2:]]))


class TestBlend(Files):
    @pytest.fixture
    def make(self, by_hand, sequences):
        low, high = by_hand("low", sequences), by_hand("high", sequences[::-1])
        return lambda share=0.3, **run: opened((share, low, 1 - share, high), **run)

    @pytest.fixture
    def changed(self, make):
        return make(0.6)
