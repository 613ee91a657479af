"""Held-out questions: what a model answers, against what it should. Exact match, and ROUGE by Google's library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nxdt_core.data.chat import prompt_ids
from nxdt_core.data.chat_keys import ChatKeys
from nxdt_core.data.files import decode, expand, json_objects, read_bytes
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors import EvaluationLibraryMissing, NoAnswerToJudge, NothingToJudge
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.training.continuation import Sampling
from nxdt_core.training.loaded import LoadedModel

__all__ = ["Answer", "Question", "evaluate", "questions", "scores"]

ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a model is asked, in tokens, and the answer that is wanted."""

    place: str
    ids: Sequence[int]
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it wrote."""

    question: Question
    given: str


def questions(
    files: Sequence[Path | str], tokenizer: Tokenizer, keys: ChatKeys, *, limit: int | None = None
) -> Iterator[Question]:
    """The records of JSONL files as questions, rendered as in training.

    A record has ``messages``, of which the last is the wanted answer; ``input`` and ``output``, the same in two keys;
    or ``prompt`` and ``answer``, texts that no template touches.

    Args:
        files: paths and patterns.
        tokenizer: of the model.
        keys: how messages become text.
        limit: records to take, the first ones; None takes all.

    Raises:
        DataFileNotFound, DataFileUnreadable, TextNotUtf8, BadJsonLine: of the files.
        NoAnswerToJudge, ChatTemplateMissing, TemplateUnreadable, TemplateRefuses: of a record.
    """
    records = (
        (f"{path}:{line}", record)
        for path in expand(files, "FILES")
        for line, record in json_objects(path, decode(path, read_bytes(path)))
    )
    for place, record in islice(records, limit):
        yield _question(place, record, tokenizer, keys)


def evaluate(model: LoadedModel, asked: Sequence[Question], sampling: Sampling) -> Iterator[Answer]:
    """Ask one question after the other.

    Raises:
        NothingToJudge: there are none.
    """
    if not asked:
        raise NothingToJudge(found="the files have no records")
    for question in asked:
        written = list(model.continuation(question.ids, sampling))
        yield Answer(question=question, given=model.tokenizer.decode(written).strip())


def scores(answers: Sequence[Answer]) -> dict[str, float]:
    """Means over the answers: ``exact_match``, and F1 of ``rouge1``, ``rouge2`` and ``rougeL`` (Lin 2004).

    Raises:
        EvaluationLibraryMissing: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise EvaluationLibraryMissing(
            needed_by="ROUGE figures", library="rouge-score", extra="evaluate", reason=str(error)
        ) from error
    scorer = RougeScorer(ROUGE)
    rows = [
        {
            "exact_match": float(answer.given == answer.question.wanted),
            **{name: found.fmeasure for name, found in scorer.score(answer.question.wanted, answer.given).items()},
        }
        for answer in answers
    ]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _question(place: str, record: Mapping[str, Any], tokenizer: Tokenizer, keys: ChatKeys) -> Question:
    if isinstance(record.get("prompt"), str) and isinstance(record.get("answer"), str):
        ids = text_ids(record["prompt"], tokenizer)
        return _checked(place, ids, record["answer"])
    messages = record.get("messages")
    if messages is None and record.get("input") is not None and record.get("output") is not None:
        messages = [{"role": "user", "content": record["input"]}, {"role": "assistant", "content": record["output"]}]
    if not isinstance(messages, list) or len(messages) < 2 or not all(isinstance(one, dict) for one in messages):
        raise NoAnswerToJudge(place=place, reason="it has none of the keys for a question and an answer")
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise NoAnswerToJudge(place=place, reason="its last message is no text of the assistant")
    ids = prompt_ids(messages[:-1], tokenizer, keys, place=place, tools=record.get("tools"))
    return _checked(place, ids, last["content"])


def _checked(place: str, ids: list[int], wanted: str) -> Question:
    if not ids or not wanted.strip():
        raise NoAnswerToJudge(place=place, reason="the question or the answer is empty")
    return Question(place=place, ids=ids, wanted=wanted.strip())
