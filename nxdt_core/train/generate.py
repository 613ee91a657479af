"""Trained models: loaded from a checkpoint or a directory with a tokenizer, to generate text and answer held-out
questions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.chat.conversation import Conversation, ignored_fields
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import Messages, ReservedTokens, prompt_ids, runner_of, stop_ids
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.files.paths import decode, expand, read_bytes
from nxdt_core.data.files.records import Place, UnusedFields, read_records, unread
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.chats import UnknownRecord
from nxdt_core.errors.data import EmptyTextFile, NoAnswerToJudge, NothingToJudge, PromptMissing, QuestionTooLong
from nxdt_core.errors.models import SequenceTooLongForModel
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.evaluation import Metric
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.sampling import Sampling, Writer
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.loading import find_weights

__all__ = ["LoadedModel", "Sampling", "load_model"]

_log = logging.getLogger(__name__)
_EXAMPLE = '{"input": "...", "output": "..."}'


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with a checkpoint's weights."""

    config: ResolvedConfig
    """Configuration of the run that wrote the weights."""
    model: ParallelModel
    tokenizer: Tokenizer
    chat_keys: ChatKeys
    """Settings by which the run's data made text of messages."""
    step: int
    """Optimizer steps that the weights have seen."""
    window: int
    """Tokens that it sees at once."""
    source: HFSource | None = None
    """The Hugging Face directory that the weights came from; None: they came from elsewhere."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens of :func:`~nxdt_core.data.chat.rendering.stop_ids`, and those that the weights' source names."""
        theirs = () if self.source is None else self.source.stops_of(self.tokenizer)
        return tuple(dict.fromkeys((*stop_ids(self.chat_keys, self.tokenizer), *theirs)))

    @cached_property
    def writer(self) -> Writer:
        """Generator that continues prompts."""
        return Writer(model=self.model, tokenizer=self.tokenizer, window=self.window, stop_ids=frozenset(self.stop_ids))

    def continuation(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yield the tokens that it writes behind ``ids``, until it ends the text or its turn."""
        return (token for _, token in self.writer.tokens([ids], sampling))

    def prompt(self, text: str | Messages, place: str = "The prompt") -> list[int]:
        """Return the tokens of a prompt: a text to continue, or messages, whose answer is asked for.

        Raises:
            CannotGenerate: there is nothing to begin with.
            ChatTemplateMissing, TemplateRefuses: of messages.
        """
        if isinstance(text, str):
            ids = text_ids(text, self.tokenizer, add_bos=self.chat_keys.add_bos)
        else:
            ids = prompt_ids(text, self.tokenizer, self.chat_keys, place=place)
        if self.tokenizer.bos_id is not None and not ids:
            ids = [self.tokenizer.bos_id]
        if not ids:
            raise CannotGenerate(reason="the prompt is empty and the tokenizer has no begin-of-sequence token")
        if len(ids) > self.window:
            _log.warning("the prompt has %d tokens; the model sees the last %d alone", len(ids), self.window)
        return ids


def load_model(
    uri: str,
    *,
    base: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
    window: int | None = None,
) -> LoadedModel:
    """Return the model that an address names.

    Args:
        uri: the directory of a run or the address of its checkpoints, of which the newest good one is taken; one of
            these; a directory of another program, such as Hugging Face's; or an adapter in a directory of peft.
        base: address of the weights below an adapter, where they are not where the adapter or its run took them.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that is found.
        trusted: files of public keys, one of which must have signed what is loaded; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.
        window: tokens that it sees at once; None: as many as it has positions.

    Raises:
        SequenceTooLongForModel: it has fewer positions than ``window``.
        SavedConfigUnusable: the model cannot be built here, or needs what a checkpoint may not decide.
        CheckpointNotTrusted: what is loaded lacks a valid signature of one of the keys.
        CannotGenerate: the run has no tokenizer.
        VocabularyTooSmall: the tokenizer has ids that the model has no row for.
        AdapterOfAnotherBase: the weights below are others than the run's.
        NxdtError: what is wrong with the checkpoint or the directory.
    """
    weights = find_weights(uri, base=base, config=config, trusted=trusted)
    tokenizer = build.tokenizer(weights.run, build.model_builder(weights.run).vocab_size)
    if tokenizer is None:
        raise CannotGenerate(reason="its run names no tokenizer")
    if weights.run.tree.get("model.score_head"):
        raise CannotGenerate(reason="its model gives scores (model.score_head)")
    longest = build.window(weights.run)
    if window is not None and window > longest:
        raise SequenceTooLongForModel(sequence=window, longest=longest)
    engine = build.engine(weights.run)
    engine.start()
    model = initialize_parallel_model(weights.run, engine, materialise=False)
    weights.load(engine, model)
    return LoadedModel(
        config=weights.run,
        model=model,
        tokenizer=tokenizer,
        chat_keys=weights.chat_keys,
        step=weights.step,
        window=window or longest,
        source=weights.source,
    )


def prompts_in(path: Path) -> Iterator[tuple[str, dict[str, Any], str | Messages]]:
    """Yield the place, the record and the prompt of each line of text, or of each record that has a ``prompt``, a text
    or a list of messages, or a list ``messages``.

    Raises:
        EmptyTextFile: a text has no line.
        PromptMissing: a record has neither.
        NxdtError: as of :func:`~nxdt_core.data.files.records.read_records`.
    """
    if path.suffix == ".txt":
        for file in expand([path], "--prompts"):
            lines = decode(file, read_bytes(file)).replace("\r\n", "\n").split("\n")  # splitlines cuts at U+2028, too
            if not any(lines):
                raise EmptyTextFile(path=str(file))
            yield from ((f"{file}:{number}", {"prompt": line}, line) for number, line in enumerate(lines, 1) if line)
        return
    records, _ = read_records([path], "--prompts", example='{"prompt": "..."}')
    for place, record in records:
        prompt = record["prompt"] if isinstance(record.get("prompt"), str | list) else record.get("messages")
        if not isinstance(prompt, str | list):
            raise PromptMissing(place=str(place))
        yield str(place), record, prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt in tokens, and the answer that is expected."""

    place: str
    ids: Sequence[int]
    wanted: str


def questions(
    files: Sequence[Path | str],
    tokenizer: Tokenizer,
    keys: ChatKeys,
    *,
    limit: int | None = None,
    unused: UnusedFields | None = None,
) -> Iterator[Question]:
    """Yield the records of files as questions, rendered as in training.

    A record is a conversation in any form that :func:`~nxdt_core.data.chat.records.read_record` knows, whose last
    message is the wanted answer; or ``prompt`` and ``answer``, texts that no template touches.

    Args:
        files: as :func:`~nxdt_core.data.files.records.read_records` takes them.
        tokenizer: of the model.
        keys: how messages become text.
        limit: records to take, the first ones; None takes all.
        unused: counts the fields that neither question nor answer contains; None does not count.

    Raises:
        NxdtError: of the files and records, as of those two.
        NoAnswerToJudge, ChatTemplateMissing, TemplateUnreadable, TemplateRefuses: of a record.
        SpecialTokenInText: a message of a conversation would become a special token, and ``keys`` do not let it.
        FieldsUnused: a record has fields that nothing uses, and ``unused`` refuses them.
    """
    reserved = ReservedTokens(tokenizer, allowed=keys.special_tokens_in_text)
    records, _ = read_records(map(Path, files), "FILES", example=_EXAMPLE)
    for place, record in islice(records, limit):
        question, left = _question(place, record, tokenizer, keys, reserved)
        if not question.ids or not question.wanted:
            raise NoAnswerToJudge(place=question.place, reason="the question or the answer is empty")
        if unused is not None:
            unused.add(place, left)
        yield question


def evaluate(model: LoadedModel, asked: Sequence[Question], sampling: Sampling, *, batch: int = 1) -> Iterator[str]:
    """Ask the questions in their order, ``batch`` at a time, and yield the answers.

    Raises:
        NothingToJudge: there are none.
        QuestionTooLong: the model would not see all of one and a token of its answer; nothing is asked then.
    """
    if not asked:
        raise NothingToJudge(found="the files have no records")
    for question in asked:
        if len(question.ids) >= model.window:
            raise QuestionTooLong(place=question.place, tokens=len(question.ids), window=model.window)
    for (text,) in model.writer.texts([question.ids for question in asked], sampling, batch=batch):
        yield text.strip()


def metrics(kernel: Kernel) -> list[Metric]:
    """Return every installed metric.

    Raises:
        NxdtError: one cannot be used, for instance without its library.
    """
    return [component.load_class(Metric)() for component in kernel.registry.all("metric")]


def scores(wanted: Sequence[str], answers: Sequence[str], metrics: Iterable[Metric] = ()) -> dict[str, float]:
    """Return the share of exact matches as ``exact_match``, and the figures of ``metrics``."""
    results = {"exact_match": sum(map(str.__eq__, wanted, answers)) / len(answers)}
    for metric in metrics:
        results |= metric.compute(wanted, answers)
    return results


def _question(
    place: Place, record: Mapping[str, Any], tokenizer: Tokenizer, keys: ChatKeys, reserved: ReservedTokens | None
) -> tuple[Question, Iterable[str]]:
    """Return the question of a record, and the fields that it does not use."""
    if isinstance(record.get("prompt"), str) and isinstance(record.get("answer"), str):
        ids = text_ids(record["prompt"], tokenizer, add_bos=keys.add_bos)
        question = Question(place=str(place), ids=ids, wanted=record["answer"].strip())
        return question, unread(record, ("prompt", "answer"))
    try:
        conversation = read_record(record, place)
    except UnknownRecord as error:
        reason = "it has none of the keys for a question and an answer"
        raise NoAnswerToJudge(place=str(place), reason=reason) from error
    *asked, last = conversation.messages
    if last.role != "assistant" or last.calls or not asked:
        raise NoAnswerToJudge(place=str(place), reason="its last message is not a text of the assistant")
    if reserved is not None:
        reserved.check((message.content for message in asked), str(place))
    messages = [message.for_template("") for message in asked]
    ids = prompt_ids(messages, tokenizer, keys, place=str(place), tools=conversation.tools)
    ignored: tuple[str, ...] = ()  # what the chat template leaves out
    runner = runner_of(keys, tokenizer)
    if runner is not None:

        def render(other: Conversation) -> str:
            messages = [message.for_template("") for message in other.messages]
            return runner.run(messages, place=str(place), prompts=True, tools=other.tools)[0]

        shown = replace(conversation, messages=asked)
        ignored = ignored_fields(shown, render(shown), render)
    left = (f"messages.{name}" for name in unread(last.fields, ()))
    question = Question(place=str(place), ids=ids, wanted=last.content.strip())
    return question, (*conversation.unused, *ignored, *left)
