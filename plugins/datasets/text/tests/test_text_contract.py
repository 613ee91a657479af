"""The dataset keeps what the core expects of every dataset."""

from __future__ import annotations

import pytest
from nxdt_plugin_text.config import TextConfig
from nxdt_plugin_text.loader import TextData
from nxdt_testing.dataset_contract import DatasetContract, MirroredBytes

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext


class TestText(DatasetContract):
    @pytest.fixture
    def make(self, tmp_path):
        def open_(word="many", seq_length=16, seed=1, tokenizer=None):
            path = tmp_path / f"{word}.txt"
            path.write_text("\n\n".join(f"verse {number} of {word}" for number in range(30)))
            config = TextConfig(train_files=(path,), document_separator="\n\n")
            context = DataContext(seq_length=seq_length, seed=seed, tokenizer=tokenizer or ByteTokenizer())
            return TextData(config, context).split("train")

        return open_

    @pytest.fixture
    def changed(self, make):
        return make("some")

    @pytest.fixture
    def variants(self, make):
        return {"seq_length": make(seq_length=24), "seed": make(seed=7), "tokenizer": make(tokenizer=MirroredBytes())}
