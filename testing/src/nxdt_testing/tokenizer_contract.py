"""Tests that every tokenizer must pass; its author subclasses this once for each kind of file that it reads.

Example, the whole test file of a plugin::

    from nxdt_testing.tokenizer_contract import TokenizerContract

    class TestMyTokenizer(TokenizerContract):
        @pytest.fixture
        def make(self):
            return lambda: MyTokenizer(MyTokenizerConfig(model=FILE))

        @pytest.fixture
        def changed(self):
            return MyTokenizer(MyTokenizerConfig(model=OTHER_FILE))

A tokenizer for chats, or one that is exported to Hugging Face, is tested as such too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nxdt_core.data.chat.rendering import TemplateRunner
from nxdt_core.data.chat.templates import ChatTemplate
from nxdt_core.errors.chats import NotAChatTokenizer
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_testing.contract import no_error

__all__ = ["TokenizerContract"]

_TEXTS = (
    "In the beginning God created the heaven and the earth.",
    "naïve – 東京 🙂 42",
    "two  spaces\tand\na line",
    "a",
)
_MESSAGES = ({"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."})
_REPEATED = 400
"""Repetitions that make a long text: longer than the context of most models of Hugging Face."""
_SURROGATE = "a\ud800b"
_ROLES = ("bos", "eos", "pad")


class TokenizerContract:
    """The tests of a tokenizer: subclass it and override the fixture ``make``."""

    texts: ClassVar[Sequence[str]] = _TEXTS
    """Texts that come back unchanged."""
    every_text: ClassVar[bool] = True
    """False for a vocabulary that has no ids for some characters, such as one of digits."""

    @pytest.fixture
    def make(self) -> Callable[[], Tokenizer]:
        """Return a function that builds the tokenizer, with the same configuration at each call."""
        raise NotImplementedError("override the fixture 'make'")

    @pytest.fixture
    def changed(self) -> Tokenizer:
        """Return a tokenizer of another vocabulary or configuration; override it where there can be one."""
        pytest.skip("nothing of it can be configured: override the fixture 'changed' where that is wrong")

    @pytest.fixture
    def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
        """Return the tokenizer under test."""
        return make()

    @pytest.fixture
    def chat(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer as one for chats; tests of others are skipped."""
        try:
            tokenizer.locate([])
        except NotAChatTokenizer:
            pytest.skip("it lacks the method locate, and chat data refuse it")
        return tokenizer

    @pytest.fixture
    def in_transformers(self, tokenizer: Tokenizer, tmp_path: Path) -> Any:
        """Return what transformers makes of the exported files; tests of others are skipped."""
        files = tokenizer.hf_files()
        if not files:
            pytest.skip("it is not exported to Hugging Face")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        if "config.json" not in files:  # an exported model has one next to its tokenizer
            (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        return transformers.AutoTokenizer.from_pretrained(str(tmp_path))

    # Ids

    def test_it_has_the_members_of_the_protocol(self, tokenizer: Tokenizer) -> None:
        """Every method, and a size above 0."""
        assert isinstance(tokenizer, Tokenizer), "inherit from nxdt_core.protocols.tokenizer.Tokenizer"
        assert tokenizer.vocab_size > 0, f"its vocab_size is {tokenizer.vocab_size}"

    def test_a_text_comes_back(self, tokenizer: Tokenizer) -> None:
        """Round trip of each text."""
        for text in self.texts:
            decoded = tokenizer.decode(tokenizer.encode(text))
            assert decoded == text, f"the text {text!r} comes back as {decoded!r}"
        long = self.texts[0] * _REPEATED
        decoded = tokenizer.decode(tokenizer.encode(long))
        assert decoded == long, (
            f"a text of {len(long)} characters comes back with {len(decoded)}; do not truncate: the run cuts texts"
        )

    def test_ids_are_plain_and_below_the_vocabulary_size(self, tokenizer: Tokenizer) -> None:
        """The model has a row of its embedding for each; ids are Python numbers, of texts and of specials."""
        ids_seen = {id_ for text in self.texts for id_ in tokenizer.encode(text)}
        ids_seen |= {id_ for id_ in _specials(tokenizer).values() if id_ is not None}
        for id_ in ids_seen:
            assert type(id_) is int, f"the id {id_!r} is a {type(id_).__name__}; return Python integers"
            assert 0 <= id_ < tokenizer.vocab_size, f"the id {id_} is not below vocab_size, {tokenizer.vocab_size}"

    def test_two_symbols_never_have_one_id(self, tokenizer: Tokenizer) -> None:
        """Characters of the texts, of ASCII where the vocabulary is of every text, and special tokens."""
        symbols = {*"".join(self.texts), *(map(chr, range(33, 127)) if self.every_text else ())}
        symbol_of: dict[tuple[int, ...], str] = {
            (id_,): f"the token of {role}" for role, id_ in _specials(tokenizer).items() if id_ is not None
        }
        for symbol in sorted(symbols):
            ids = tuple(tokenizer.encode(symbol))
            other = symbol_of.setdefault(ids, repr(symbol))
            assert other == repr(symbol), f"{symbol!r} and {other} have the ids {list(ids)}"

    def test_a_batch_equals_its_texts(self, tokenizer: Tokenizer) -> None:
        """In their order, without padding; a batch of nothing is nothing."""
        batch = [list(ids) for ids in tokenizer.encode_batch(list(self.texts))]
        assert batch == [tokenizer.encode(text) for text in self.texts], (
            "encode_batch gives other ids than encode for the same texts; neither may pad, cut or reorder them"
        )
        assert not list(tokenizer.encode_batch([])), "encode_batch of no texts gives something"

    def test_texts_get_no_special_tokens(self, tokenizer: Tokenizer) -> None:
        """The data decide where documents begin and end."""
        assert not list(tokenizer.encode("")), f"an empty text has the ids {tokenizer.encode('')}; return none"
        specials = {id_: role for role, id_ in _specials(tokenizer).items() if id_ is not None}
        for text in self.texts:
            added = {specials[id_] for id_ in tokenizer.encode(text) if id_ in specials}
            assert not added, f"encode adds the token of {', '.join(sorted(added))} to {text!r}; return its ids alone"

    def test_decoding_leaves_out_special_and_unknown_ids(self, tokenizer: Tokenizer) -> None:
        """At the ends and in between."""
        specials = [id_ for id_ in _specials(tokenizer).values() if id_ is not None]
        ids = tokenizer.encode(self.texts[0])
        for left_out in (*specials, tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1):
            decoded = tokenizer.decode([left_out, *ids, left_out])
            assert decoded == self.texts[0], f"decode gives {decoded!r} where {left_out} is around {self.texts[0]!r}"

    def test_a_text_that_utf8_cannot_express_is_taken(self, tokenizer: Tokenizer) -> None:
        """Data hold lone surrogates; a run must not end there."""
        if not self.every_text:
            pytest.skip("its vocabulary is not of every text")
        with no_error(f"replace what UTF-8 cannot express: {_SURROGATE!a} raises"):
            one, (other,) = tokenizer.encode(_SURROGATE), tokenizer.encode_batch([_SURROGATE])
        assert list(one) == list(other), f"encode and encode_batch give other ids for {_SURROGATE!a}"

    # Identity

    def test_the_same_configuration_gives_the_same_fingerprint(
        self, make: Callable[[], Tokenizer], tokenizer: Tokenizer
    ) -> None:
        """Check that tokenising changes nothing; a resumed run compares fingerprints."""
        before = tokenizer.fingerprint()
        tokenizer.encode_batch(list(self.texts))
        assert tokenizer.fingerprint() == before, "its fingerprint changes when texts are tokenised"
        assert make().fingerprint() == before, "two of the same configuration have different fingerprints"

    def test_another_vocabulary_has_another_fingerprint(self, tokenizer: Tokenizer, changed: Tokenizer) -> None:
        """Only the fingerprint shows a resumed run that its tokens have another meaning."""
        assert tokenizer.fingerprint() != changed.fingerprint(), (
            "a tokenizer that differs has the same fingerprint; digest the vocabulary, its rules and the special tokens"
        )

    # Chats

    def test_located_ids_are_those_of_the_batch(self, tokenizer: Tokenizer, chat: Tokenizer) -> None:
        """And each token has a place in its text, in order."""
        plain = tokenizer.encode_batch(list(self.texts))
        for text, ids, located in zip(self.texts, plain, chat.locate(list(self.texts)), strict=True):
            assert located.ids.tolist() == list(ids), f"locate gives other ids than encode_batch for {text!r}"
            assert located.starts.shape == located.ends.shape == located.ids.shape, "a token lacks a place"
            places = zip(located.starts.tolist(), located.ends.tolist(), strict=True)
            for number, (start, end) in enumerate(places):
                assert 0 <= start <= end <= len(text), (
                    f"token {number} of {text!r} has the place {start} to {end} of {len(text)} characters"
                )
            for name, positions in (("starts", located.starts), ("ends", located.ends)):
                assert (positions[1:] >= positions[:-1]).all(), (
                    f"the {name} of the tokens of {text!r} descend: {positions.tolist()}"
                )
            assert not len(ids) or located.ends[-1] == len(text), (
                f"the last token of {text!r} ends before the text does"
            )

    def test_special_tokens_are_located_where_they_are_spelled(self, tokenizer: Tokenizer, chat: Tokenizer) -> None:
        """Special tokens that a template writes become the tokens that the model knows."""
        reserved = list(chat.reserved_tokens())
        for token in reserved:
            (located,) = chat.locate([f"a{token}b"])
            inside = located.ids[located.ends == 1 + len(token)].tolist()
            assert inside, f"no token ends where the special token {token!r} ends"
            assert chat.spell(inside[-1:]) == token, (
                f"the text {token!r} becomes {chat.spell(inside[-1:])!r} and not the special token"
            )
        named = chat.special_tokens()
        for role, id_ in _specials(tokenizer).items():
            spelled = named.get(f"{role}_token")
            if spelled is not None and spelled in reserved:
                (located,) = chat.locate([spelled])
                assert located.ids.tolist() == [id_], (
                    f"{role}_token is {spelled!r} with the ids {located.ids.tolist()}, and {role}_id is {id_}"
                )

    def test_spelled_text_has_its_special_tokens(self, chat: Tokenizer) -> None:
        """Text with a special token is spelled as it was written, for people who read it."""
        text = self.texts[0]
        for token in ("", *chat.reserved_tokens()):
            (located,) = chat.locate([f"{text}{token}"])
            spelled = chat.spell(located.ids.tolist())
            assert spelled == f"{text}{token}", f"{text + token!r} is spelled {spelled!r}"

    def test_its_chat_template_renders_a_conversation(self, chat: Tokenizer) -> None:
        """With the special tokens that it names, and the contents are in the text."""
        template = chat.chat_template()
        if template is None:
            return
        runner = TemplateRunner(ChatTemplate(template, "of the tokenizer"), chat.special_tokens())
        text, _ = runner.run(_MESSAGES, place="the contract's conversation")
        missing = [message["content"] for message in _MESSAGES if message["content"] not in text]
        assert not missing, f"the text of the template lacks the message {missing[0]!r}"
        (located,) = chat.locate([text])
        assert len(located.ids), "the text of the template has no tokens"

    # Export

    def test_exported_files_give_the_same_ids_in_transformers(self, tokenizer: Tokenizer, in_transformers: Any) -> None:
        """And the same special tokens, so that an exported model is served as it was trained."""
        for text in self.texts:
            theirs = in_transformers(text, add_special_tokens=False).input_ids
            assert theirs == list(tokenizer.encode(text)), f"transformers gives other ids for {text!r}"
        for role, id_ in _specials(tokenizer).items():
            theirs = getattr(in_transformers, f"{role}_token_id")
            assert theirs == id_, f"{role}_id is {id_}, and {theirs} in transformers"

    def test_leading_ids_are_those_of_transformers(self, tokenizer: Tokenizer, in_transformers: Any) -> None:
        """A served model sees the same beginning as here."""
        leading = list(tokenizer.leading_ids())
        ids = list(tokenizer.encode(self.texts[0]))
        theirs = in_transformers(self.texts[0]).input_ids
        begun = theirs[: len(theirs) - len(ids)] if theirs[-len(ids) :] == ids else theirs[: len(leading)]
        assert begun == leading, f"leading_ids are {leading}, and transformers begins a text with {begun}"


def _specials(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {role: getattr(tokenizer, f"{role}_id") for role in _ROLES}
