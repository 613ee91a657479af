"""Held-out questions: what a model answers, against what it should."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from nxdt_core.data.chat.conversation import Conversation, ignored_fields
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import ReservedTokens, prompt_ids, runner_of
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.files.records import Place, UnusedFields, read_records, unread
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.chats import UnknownRecord
from nxdt_core.errors.evaluation import NoAnswerToJudge, NothingToJudge, QuestionTooLong
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.evaluation import Metric
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train.generate import LoadedModel
from nxdt_core.train.sampling import Sampling

__all__ = ["Answer", "Question", "evaluate", "metrics", "questions", "scores"]

_EXAMPLE = '{"input": "...", "output": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt in tokens, and the answer that is expected."""

    place: str
    ids: Sequence[int]
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text that a model generated for one record."""

    question: Question
    given: str


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
        if unused is not None:
            unused.add(place, left)
        yield question


def evaluate(model: LoadedModel, asked: Sequence[Question], sampling: Sampling, *, batch: int = 1) -> Iterator[Answer]:
    """Ask the questions in their order, ``batch`` at a time.

    Raises:
        NothingToJudge: there are none.
        QuestionTooLong: the model would not see all of one and a token of its answer; nothing is asked then.
    """
    if not asked:
        raise NothingToJudge(found="the files have no records")
    for question in asked:
        if len(question.ids) >= model.window:
            raise QuestionTooLong(place=question.place, tokens=len(question.ids), window=model.window)
    answers = model.writer.texts([question.ids for question in asked], sampling, batch=batch)
    for question, (given,) in zip(asked, answers, strict=True):
        yield Answer(question=question, given=given.strip())


def metrics(kernel: Kernel) -> list[Metric]:
    """Return every installed metric.

    Raises:
        NxdtError: one cannot be used, for instance without its library.
    """
    return [component.load_class(Metric)() for component in kernel.registry.all("metric")]


def scores(answers: Sequence[Answer], metrics: Iterable[Metric] = ()) -> dict[str, float]:
    """Return the share of exact matches as ``exact_match``, and the figures of ``metrics``."""
    wanted, given = [each.question.wanted for each in answers], [each.given for each in answers]
    found = {"exact_match": sum(map(str.__eq__, wanted, given)) / len(answers)}
    for metric in metrics:
        found |= metric.compute(wanted, given)
    return found


def _question(
    place: Place, record: Mapping[str, Any], tokenizer: Tokenizer, keys: ChatKeys, reserved: ReservedTokens | None
) -> tuple[Question, Iterable[str]]:
    """Return the question of a record, and the fields that it does not use."""
    if isinstance(record.get("prompt"), str) and isinstance(record.get("answer"), str):
        ids = text_ids(record["prompt"], tokenizer, add_bos=keys.add_bos)
        return _checked(str(place), ids, record["answer"]), unread(record, ("prompt", "answer"))
    try:
        conversation = read_record(record, place)
    except UnknownRecord as error:
        reason = "it has none of the keys for a question and an answer"
        raise NoAnswerToJudge(place=str(place), reason=reason) from error
    *asked, last = conversation.messages
    if last.role != "assistant" or last.calls_tools or not asked:
        raise NoAnswerToJudge(place=str(place), reason="its last message is not a text of the assistant")
    if reserved is not None:
        reserved.check((message.content for message in asked), str(place))
    messages = [message.for_template("") for message in asked]
    ids = prompt_ids(messages, tokenizer, keys, place=str(place), tools=conversation.tools)
    ignored = _ignored(replace(conversation, messages=asked), tokenizer, keys)
    left = (f"messages.{name}" for name in unread(last.fields, ()))
    return _checked(str(place), ids, last.content), (*conversation.unused, *ignored, *left)


def _ignored(asked: Conversation, tokenizer: Tokenizer, keys: ChatKeys) -> tuple[str, ...]:
    """Return what the chat template leaves out of a question."""
    runner = runner_of(keys, tokenizer)
    if runner is None:
        return ()

    def render(other: Conversation) -> str:
        messages = [message.for_template("") for message in other.messages]
        return runner.run(messages, place=str(asked.place), prompts=True, tools=other.tools)[0]

    return ignored_fields(asked, render(asked), render)


def _checked(place: str, ids: list[int], wanted: str) -> Question:
    if not ids or not wanted.strip():
        raise NoAnswerToJudge(place=place, reason="the question or the answer is empty")
    return Question(place=place, ids=ids, wanted=wanted.strip())
