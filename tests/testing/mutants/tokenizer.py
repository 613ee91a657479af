"""Wrong tokenizers, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_tokenizer_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nxdt_testing.tokenizer_contract import TokenizerContract

from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer

FILES = Path(__file__).parents[3] / "plugins/datasets/sft_chat/src/nxdt_plugin_sft_chat/data/tokenizer"
MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(HuggingFaceTokenizer):
    """Reads files of Hugging Face."""


@mutant
class InheritsNothing:
    def __init__(self, *arguments):
        self.right = Right(*arguments)

    def __getattr__(self, name):
        return getattr(self.right, name)


@mutant
class JoinsSpaces(Right):
    def decode(self, ids):
        return super().decode(ids).replace("  ", " ")


@mutant
class ReturnsNumbersOfNumpy(Right):
    def encode(self, text):
        return list(np.array(super().encode(text), dtype=np.int64))


@mutant
class PadsBehindItsVocabulary(Right):
    def __init__(self, config):
        super().__init__(config)
        self.pad_id = self.vocab_size


@mutant
class ReadsOneLetterAsAnother(Right):
    def encode(self, text):
        return super().encode(text.replace("~", "^"))

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def locate(self, texts):
        return super().locate([text.replace("~", "^") for text in texts])


@mutant
class PadsItsBatch(Right):
    def encode_batch(self, texts):
        found = super().encode_batch(texts)
        longest = max(map(len, found), default=0)
        return [ids + [self.pad_id] * (longest - len(ids)) for ids in found]


@mutant
class CutsLongTexts(Right):
    """As Hugging Face's do with ``truncation=True``."""

    def encode(self, text):
        return super().encode(text)[:128]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


@mutant
class EndsEachText(Right):
    def encode(self, text):
        return [*super().encode(text), self.eos_id]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


@mutant
class WritesSpecialTokens(Right):
    def decode(self, ids):
        return self.spell(ids)


@mutant
class FailsOnSurrogates(Right):
    def encode(self, text):
        return super().encode(text.encode().decode())


@mutant
class FingerprintsItself(Right):
    def fingerprint(self):
        return str(id(self))


@mutant
class FingerprintsItsFile(Right):
    def fingerprint(self):
        return str(FILES)


@mutant
class PlacesBytes(Right):
    def locate(self, texts):
        return [
            replace(each, starts=each.starts, ends=np.array([len(text[:end].encode()) for end in each.ends], dtype=int))
            for text, each in zip(texts, super().locate(texts), strict=True)
        ]


@mutant
class LocatesFromTheEnd(Right):
    def locate(self, texts):
        return [replace(each, starts=each.starts[::-1]) for each in super().locate(texts)]


@mutant
class ReadsSpecialTokensAsText(Right):
    def locate(self, texts):
        parted = [text.replace("<|", "< |") for text in texts]
        found = super().locate(parted)
        return [replace(each, ends=np.minimum(each.ends, len(text))) for text, each in zip(texts, found, strict=True)]


@mutant
class SpellsTextAlone(Right):
    def spell(self, ids):
        return self.decode(ids)


@mutant
class NamesAnotherEnd(Right):
    def special_tokens(self):
        named = dict(super().special_tokens())
        return {**named, "eos_token": next(each for each in self.reserved_tokens() if each != named["eos_token"])}


@mutant
class HasATemplateThatFails(Right):
    def chat_template(self):
        return "{{ raise_exception('no') }}"


@mutant
class RendersTheFirstMessage(Right):
    def chat_template(self):
        return "{{ messages[0].content }}"


def changed_file(files, name, change):
    content = json.loads(files[name])
    change(content)
    return {**files, name: json.dumps(content).encode()}


@mutant
class ExportsAnotherRule(Right):
    def hf_files(self):
        return changed_file(
            super().hf_files(), "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"})
        )


@mutant
class ExportsNoEnd(Right):
    def hf_files(self):
        return changed_file(super().hf_files(), "tokenizer_config.json", lambda content: content.update(eos_token=None))


@mutant
class LeadsWithTheEnd(Right):
    def leading_ids(self):
        return [self.eos_id, *super().leading_ids()]


def under_contract(cls):
    class Contract(TokenizerContract):
        @pytest.fixture
        def make(self):
            return lambda: cls(HuggingFaceTokenizerConfig(model=FILES))

        @pytest.fixture
        def changed(self, make):
            return cls(HuggingFaceTokenizerConfig(model=FILES, bos_token=make().reserved_tokens()[-1]))

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
