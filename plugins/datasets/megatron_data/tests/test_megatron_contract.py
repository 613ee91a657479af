"""Indexed files and blends of them keep what the core expects of every dataset."""

from __future__ import annotations

import pytest
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.loader import MegatronData
from nxdt_testing.dataset_contract import DatasetContract

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext


def opened(prefixes):
    context = DataContext(seq_length=16, seed=11, tokenizer=ByteTokenizer())
    config = MegatronDataConfig(data_prefix=prefixes, reset_attention_mask=True, reset_position_ids=True)
    return MegatronData(config, context).split("train")


class TestOneFile(DatasetContract):
    @pytest.fixture
    def make(self, by_hand, sequences):
        prefix = by_hand("corpus", sequences)
        return lambda: opened(prefix)

    @pytest.fixture
    def changed(self, by_hand, sequences):
        return opened(by_hand("other", [sequences[1], sequences[0], *sequences[2:]]))


class TestBlend(DatasetContract):
    @pytest.fixture
    def make(self, by_hand, sequences):
        low, high = by_hand("low", sequences), by_hand("high", sequences[::-1])
        return lambda share=0.3: opened((share, low, 1 - share, high))

    @pytest.fixture
    def changed(self, make):
        return make(0.6)
