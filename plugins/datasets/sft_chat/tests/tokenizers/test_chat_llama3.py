"""Llama 3's own tokenizer and the way in which its authors turn a dialog into ids, beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core.data.tokenizers.config import TiktokenTokenizerConfig
from nxdt_core.data.tokenizers.tiktoken import TiktokenTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX

pytest.importorskip("tiktoken", reason="tiktoken is not installed")
llama = pytest.importorskip("llama_models.llama3.tokenizer", reason="llama-models is not installed")
datatypes = pytest.importorskip("llama_models.datatypes")
PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
TEXTS = ["", "Hé, 東京 🙂!\n\n  x", "a <|eot_id|>b", "🙂🙂", "fi ﬁ\u0301", "lone \ud800 surrogate"]


@pytest.fixture(scope="module")
def ours():
    path = Path(llama.__file__).parent / "tokenizer.model"
    return TiktokenTokenizer(TiktokenTokenizerConfig(model=path, eos_token="<|eot_id|>"))


@pytest.fixture(scope="module")
def authors():
    chat_format = pytest.importorskip("llama_models.llama3.chat_format").ChatFormat(llama.Tokenizer.get_instance())

    def encode(messages):
        raw = [datatypes.RawMessage(role=m["role"], content=m["content"]) for m in messages]
        return chat_format.encode_dialog_prompt(raw).tokens

    return encode


def test_conversations_have_the_ids_that_the_authors_give_them(ours, authors, shipped, load, write):
    records = [record for record in shipped if "tools" not in record]
    dataset = load(write(*records), tokenizer=ours, chat_template="llama3", seq_length=2048)
    prompt = ours.encode(PROMPT)
    for index, record in enumerate(records):
        sample = dataset[index]
        used = int((sample.document_ids == 0).sum())
        wanted = authors(record["messages"])[: -len(prompt)]
        assert sample.input_ids[:used].tolist() == wanted[:-1]
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        learnt = [id_ for id_ in sample.labels[:used].tolist() if id_ != IGNORE_INDEX]
        assert ours.spell(learnt) == "".join(f"{answer.strip()}<|eot_id|>" for answer in answers)
        assert sample.labels[used - 1] == wanted[-1] == ours.eos_id


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_lie_where_their_bytes_do(text, ours):
    (found,) = ours.locate([text])
    valid = text.replace("\ud800", "\ufffd")
    assert found.ids.tolist() == ours.encode(text)
    assert [*found.starts[:1], *found.ends[-1:]] == ([0, len(text)] if text else [])
    for id_, start, end in zip(found.ids.tolist(), found.starts, found.ends, strict=True):
        spelled = ours.spell([id_])
        assert valid[start:end] == spelled or "\ufffd" in spelled


def test_special_tokens_are_told_and_spelled(ours):
    assert ours.special_tokens()["eos_token"] == "<|eot_id|>"
    assert "<|start_header_id|>" in ours.reserved_tokens()
    assert ours.spell(ours.encode("a<|eot_id|>b")) == "a<|eot_id|>b"
    assert ours.chat_template() is None
