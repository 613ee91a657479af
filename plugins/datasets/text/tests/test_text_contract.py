"""The dataset keeps what the core expects of every dataset."""

from __future__ import annotations

import pytest
from nxdt_plugin_text.config import TextConfig
from nxdt_plugin_text.loader import TextData
from nxdt_testing.dataset_contract import DatasetContract

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext


class TestText(DatasetContract):
    @pytest.fixture
    def make(self, tmp_path):
        def open_(word="many"):
            path = tmp_path / f"{word}.txt"
            path.write_text("\n\n".join(f"verse {number} of {word}" for number in range(30)))
            config = TextConfig(train_files=(path,), document_separator="\n\n")
            context = DataContext(seq_length=16, seed=1, tokenizer=ByteTokenizer())
            return TextData(config, context).split("train")

        return open_

    @pytest.fixture
    def changed(self, make):
        return make("some")
