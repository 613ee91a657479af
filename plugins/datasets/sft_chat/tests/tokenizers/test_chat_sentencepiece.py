"""Chats over SentencePiece models, beside Mistral's own library and transformers."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from nxdt_core.data.chat.templates import shipped_template
from nxdt_core.data.tokenizers.config import SentencePieceTokenizerConfig
from nxdt_core.data.tokenizers.sentencepiece import SentencePieceTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX
from tests.sampling import slow

pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral", reason="mistral-common is not installed")
MODEL = Path(str(files("mistral_common") / "data" / "tokenizer.model.v1"))


@pytest.fixture(scope="module")
def ours():
    return SentencePieceTokenizer(SentencePieceTokenizerConfig(model=MODEL))


@pytest.fixture(scope="module")
def appended():
    """With the tokens of ChatML behind those of the model."""
    keys = {"sentencepiece_legacy": True, "eos_token": "<|im_end|>", "special_tokens": ("<|im_start|>",)}
    return SentencePieceTokenizer(SentencePieceTokenizerConfig(model=MODEL, **keys))


def made(dataset):
    """Ids, and the learnt among them, of each sample."""
    samples = [dataset[index] for index in range(len(dataset))]
    sizes = [int((sample.document_ids == 0).sum()) for sample in samples]
    return [(s.input_ids[:n].tolist(), s.labels[:n].tolist()) for s, n in zip(samples, sizes, strict=True)]


def by_the_authors(encoder, record):
    """What Mistral's library makes of a conversation, and the answers with what ends each."""
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import InstructRequest

    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    spoken = [message for message in record["messages"] if message["role"] in kinds]
    system = next((m["content"] for m in record["messages"] if m["role"] == "system"), None)
    messages = [kinds[message["role"]](content=message["content"]) for message in spoken]
    ids = encoder.encode_instruct(InstructRequest(messages=messages, system_prompt=system)).tokens
    answers = [encoder.encode_assistant_message(m, False, False) for m in messages if isinstance(m, AssistantMessage)]
    return ids, [id_ for answer in answers for id_ in answer]


def test_conversations_have_the_ids_that_mistral_gives_them(ours, shipped, load, write):
    records = [record for record in shipped if "tools" not in record]
    dataset = load(write(*records), tokenizer=ours, chat_template="mistral", seq_length=2048)
    encoder = mistral.MistralTokenizer.v1().instruct_tokenizer
    for (ids, labels), record in zip(made(dataset), records, strict=True):
        wanted, answers = by_the_authors(encoder, record)
        assert ids == wanted[:-1]
        assert labels[-1] == wanted[-1] == ours.eos_id
        assert [id_ for id_ in labels if id_ != IGNORE_INDEX] == answers


@pytest.mark.parametrize("name", ["mistral", slow("llama2"), "chatml"])
def test_the_exported_tokenizer_makes_the_same_of_them_in_transformers(name, request, shipped, load, write, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = request.getfixturevalue("appended" if name == "chatml" else "ours")
    for file, content in tokenizer.hf_files().items():
        (tmp_path / file).write_bytes(content)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    records = [record for record in shipped if name == "chatml" or "tools" not in record]
    dataset = load(write(*records), tokenizer=tokenizer, chat_template=name, seq_length=2048)
    for (ids, labels), record in zip(made(dataset), records, strict=True):
        found = theirs.apply_chat_template(
            [{"content": "", **message} for message in record["messages"]],
            tools=record.get("tools"),
            chat_template=shipped_template(name).text,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        wanted, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)
        assert ids == wanted[:-1].tolist()
        assert labels == np.where(mask[1:], wanted[1:], IGNORE_INDEX).tolist()


def test_special_tokens_are_told_and_spelled(ours, appended):
    assert ours.special_tokens() == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert appended.special_tokens()["eos_token"] == "<|im_end|>"
    assert set(appended.reserved_tokens()) == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    text = "<s>Hé 🙂<|im_end|> two  spaces</s>龘"
    (found,) = appended.locate([text])
    assert appended.spell(found.ids) == text
    assert ours.chat_template() is None


@pytest.mark.parametrize("text", ["", "Hé, 東京 🙂!\n\n  x", "a </s>b", "🙂🙂龘龘", " fi ﬁ\u0301 ", "</s></s>"])
def test_tokens_lie_where_their_characters_do(text, ours):
    (found,) = ours.locate([text])
    assert [*found.starts[:1], *found.ends[-1:]] == ([0, len(text)] if text else [])
    assert (np.diff(found.starts) >= 0).all()
    assert (np.diff(found.ends) >= 0).all()
    for id_, start, end in zip(found.ids.tolist(), found.starts, found.ends, strict=True):
        spelled = ours.spell([id_])
        assert text[start:end].strip(" ") == spelled.strip(" ") or "\ufffd" in spelled
    if "</s>" not in text:
        assert found.ids.tolist() == ours.encode(text)
