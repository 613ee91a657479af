"""The kind ``reward``: functions that score answers; some of them, and those of a run.

A third party registers one as a component::

    class Short(Reward):
        def __call__(self, answers, records):
            return [-len(answer) / 100 for answer in answers]

    @hookimpl
    def nxdt_components():
        return {"reward": [Component(name="short", target="my_plugin.rewards:Short")]}
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from nxdt_core.api import ConfigFinding
from nxdt_core.config.read import read_part
from nxdt_core.config.section import Section
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigProblem
from nxdt_core.protocols.batch import IGNORE_INDEX, LARGEST, Batch
from nxdt_plugin_grpo.config import (
    NUMBER,
    CharactersConfig,
    FormatConfig,
    LengthConfig,
    MatchConfig,
    OverlongConfig,
    RepetitionConfig,
)
from nxdt_plugin_grpo.errors import RewardFailed, RewardMisnamed

if TYPE_CHECKING:
    from nxdt_core.kernel import Kernel
    from nxdt_core.protocols.parallel_model import ParallelModel
    from nxdt_core.train.session import TrainSession
    from nxdt_plugin_grpo.prompts import Prompt

_log = logging.getLogger(__name__)


class Answer(str):
    """The text of an answer, without what ends it."""

    __slots__ = ("ids", "prompt")

    ids: Sequence[int]
    """Tokens of the answer, with those that end it."""
    prompt: Sequence[int]
    """Tokens of its prompt."""

    @classmethod
    def of(cls, text: str, ids: Sequence[int], prompt: Sequence[int] = ()) -> Answer:
        """Return a text with its tokens, and those of its prompt."""
        answer = cls(text)
        answer.ids, answer.prompt = ids, prompt
        return answer


class Reward(ABC):
    """The target of the kind, called as ``Target(config)`` with the component's keys."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def __call__(
        self, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Return a number for each of ``answers``, higher for better ones; weighted, it is from −1e30 to 1e30.

        None means not scored: the answer is left out of the mean of its group. If no other reward scores it, it has no
        effect. The method may be ``async``; such rewards wait at the same time.

        Args:
            answers: all that this process has in a step, those to one prompt adjacent.
            records: of each answer, the record of its prompt.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A reward of a run."""

    name: str
    weight: float
    timeout: float | None
    """Seconds that a call may take."""
    lenient: bool
    """If True, answers have no score where the function fails."""
    function: Reward

    def checked(self, call: Callable[[], Iterable[Any]], prompts: Sequence[Prompt]) -> list[float | None]:
        """Return what ``call`` gives, a score for the answer to each of ``prompts``.

        Raises:
            RewardFailed: it raises, or does not give as many such scores.
        """
        try:
            scores = [None if score is None else float(score) for score in call()]
        except (Exception, SystemExit) as error:  # anybody's code
            said = f"raised {type(error).__name__}: {error}"
            raise RewardFailed(reward=self.name, found=said, place=prompts[0].place) from error
        if len(scores) != len(prompts):
            said = f"returned {len(scores)} numbers for {len(prompts)} answers"
            raise RewardFailed(reward=self.name, found=said, place=prompts[0].place)
        most = LARGEST / max(1.0, abs(self.weight))
        for score, prompt in zip(scores, prompts, strict=True):
            if score is not None and not abs(score) <= most:
                said = f"returned {score}, which is not a number from {-most:g} to {most:g}"
                raise RewardFailed(reward=self.name, found=said, place=prompt.place)
        return scores


def score(
    rewards: Sequence[Weighted], answers: Sequence[Answer], prompts: Sequence[Prompt]
) -> dict[str, list[float | None]]:
    """Return the scores of all answers by the name of each of ``rewards``, before they are weighted.

    Functions that are ``async`` or have a time limit run in threads, at the same time. Then the others are called one
    after another in this thread, because some use signals.

    Args:
        rewards: of the run.
        answers: to all prompts.
        prompts: of each answer.

    Raises:
        RewardFailed: a function raises, takes too long, or does not return as many such numbers.
    """
    records, started = [prompt.record for prompt in prompts], monotonic()
    calls: dict[str, Future[Any] | Callable[[], Any]] = {}
    for reward in rewards:
        ready = partial(_call, reward.function, answers, records)
        waits = reward.timeout is not None or inspect.iscoroutinefunction(type(reward.function).__call__)
        calls[reward.name] = _in_thread(ready) if waits else ready
    scores: dict[str, list[float | None]] = {}
    for reward in rewards:
        call = calls[reward.name]
        try:
            if isinstance(call, Future):
                left = None if reward.timeout is None else max(0.0, started + reward.timeout - monotonic())
                if wait([call], left).not_done:
                    said = f"took longer than {reward.timeout:g} s"
                    raise RewardFailed(reward=reward.name, found=said, place=prompts[0].place)
                call = call.result
            scores[reward.name] = reward.checked(call, prompts)
        except NxdtError as failure:
            if not reward.lenient:
                raise
            _log.warning("%s", failure)
            scores[reward.name] = [None] * len(answers)
    return scores


def _call(function: Reward, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> Any:
    result = function(answers, records)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` in a thread that no end of the program waits for."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def reward_problems(entries: Sequence[str | Mapping[str, Any]], kernel: Kernel) -> Iterator[ConfigFinding]:
    """Yield what keeps :func:`build_reward` from building an entry."""
    for number, entry in enumerate(entries):
        try:
            build_reward(number, entry, kernel)
        except NxdtError as error:
            key = error.key if isinstance(error, ConfigProblem) else f"objective.rewards[{number}]"
            yield ConfigFinding(key=key, message=error.what(), remedy=error.do())


def build_reward(number: int, entry: str | Mapping[str, Any], kernel: Kernel) -> Weighted:
    """Build a reward that ``objective.rewards`` lists.

    Raises:
        RewardMisnamed: the entry is not a name with options.
        NxdtError: the component does not exist, or its options are wrong.
    """
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, weight, timeout = options.pop("name", None), options.pop("weight", 1.0), options.pop("timeout", None)
    on_error = options.pop("on_error", "stop")
    if not isinstance(name, str):
        raise RewardMisnamed(number=number, reason="has no name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardMisnamed(number=number, reason=f"has the weight {weight!r}, which is not a number")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise RewardMisnamed(number=number, reason=f"has the timeout {timeout!r}, which is not a number above 0")
    if on_error not in ("stop", "none"):
        raise RewardMisnamed(number=number, reason=f"has the on_error {on_error!r}, which is neither stop nor none")
    component = kernel.registry.get("reward", name)
    cls, config = component.load_config(), None
    if cls is not None:
        config, problems = read_part(cls, options, f"objective.rewards[{number}]")
        for problem in problems:
            raise problem
        for key, message in config.check() if isinstance(config, Section) else ():
            raise RewardMisnamed(number=number, reason=f"{key}: {message}")
    elif options:
        raise RewardMisnamed(number=number, reason=f"has keys that {name!r} does not take: {', '.join(options)}")
    function = component.load_class(Reward)(config)
    if isinstance(function, Model) and (timeout is not None or on_error != "stop"):
        raise RewardMisnamed(number=number, reason="has a timeout or on_error: all ranks score together")
    return Weighted(name=name, weight=float(weight), timeout=timeout, lenient=on_error == "none", function=function)


class Model(Reward):
    """Scores of a reward model, as drawn tokens give them: at the last token of an answer."""

    model: ParallelModel
    """The reward model in the layout of the run, which the objective sets."""
    session: TrainSession
    """The run, which the objective sets."""

    def __call__(self, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer. Collective: all ranks take equally many passes, of rows of one length."""
        import torch  # not where a configuration is checked

        from nxdt_core.distributed.devices import HOST

        rows, ranks = [[*answer.prompt, *answer.ids] for answer in answers], self.session.engine.ranks
        of_ranks = ranks.all_gather_object((len(rows), max(map(len, rows), default=1)))
        count, longest = (max(numbers) for numbers in zip(*of_ranks, strict=True))
        size = self.session.config.run.data.micro_batch_size * self.session.objective.traits.rows_per_sample
        shape = -(-count // size) * size, row_length(self.session, longest)
        ids = torch.zeros(shape, dtype=torch.int64, device=HOST)
        padding = torch.ones_like(ids, dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], padding[row, : len(tokens)] = torch.tensor(tokens, device=HOST), False
        batches = [
            Batch(input_ids=part, labels=torch.full_like(part, IGNORE_INDEX), padding=none)
            for part, none in zip(torch.split(ids, size), torch.split(padding, size), strict=True)
        ]
        of_batches = self.model.log_probs(batches, lambda scores, labels, step: scores[..., 0].float())
        scores = torch.cat(of_batches).to(HOST) if of_batches else ids
        return [float(scores[row, len(tokens) - 1]) for row, tokens in enumerate(rows)]


def row_length(session: TrainSession, longest: int) -> int:
    """Return the tokens of rows whose longest has ``longest``: steps of at least 64, so that compiled layers see few
    lengths, or the whole window."""
    mesh = session.engine.rank_info.mesh
    multiple = math.lcm(64, 2 * mesh.get("cp", 1) * mesh.get("tp", 1))
    return min(-(-longest // multiple) * multiple, session.config.run.data.seq_length)


class Match(Reward):
    """1 where what the pattern finds is the record's solution, else 0; numbers are compared as numbers."""

    config: MatchConfig

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        pattern, scores = re.compile(self.config.pattern), []
        for answer, record in zip(answers, records, strict=True):
            match, solution = pattern.search(answer), str(record[self.config.key]).rpartition("####")[2].strip()
            text = "" if match is None else next((group for group in match.groups() if group is not None), match[0])
            texts = text.strip(), solution
            same = texts[0] == texts[1]
            if not same and all(re.fullmatch(rf"\+?{NUMBER}\.?", text) for text in texts):
                one, other = (float(re.sub("[$,]", "", text)) for text in texts)
                same = one == other
            scores.append(float(same))
        return scores


class Characters(Reward):
    """The share of an answer's characters that the record allows; 0 of an empty one."""

    config: CharactersConfig

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        allowed = [set(record[self.config.key]) for record in records]
        return [
            sum(character in good for character in answer) / len(answer) if answer else 0.0
            for answer, good in zip(answers, allowed, strict=True)
        ]


class Format(Reward):
    """Reward of 1 where the whole answer matches the pattern, else 0."""

    config: FormatConfig

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        pattern = re.compile(self.config.pattern, re.DOTALL)
        return [float(pattern.fullmatch(answer) is not None) for answer in answers]


class Length(Reward):
    """Reward of 0 up to ``target`` tokens, and one less for each ``scale`` tokens beyond them."""

    config: LengthConfig

    def __call__(self, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        return [-max(0, len(answer.ids) - self.config.target) / self.config.scale for answer in answers]


class Overlong(Reward):
    """A penalty of length (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13)."""

    config: OverlongConfig

    def __call__(self, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        last = self.config.soft_punish_cache
        free = self.config.max_completion_len - last
        return [-min(1.0, max(0, len(answer.ids) - free) / last) for answer in answers]


class Repetition(Reward):
    """``max_penalty`` times the share of token sequences that occurred before (Yeo et al. 2025, arXiv:2502.03373)."""

    config: RepetitionConfig

    def __call__(self, answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        size, scores = self.config.ngram_size, []
        for answer in answers:
            sequences = [tuple(answer.ids[at : at + size]) for at in range(len(answer.ids) - size + 1)]
            share = 1 - len({*sequences}) / len(sequences) if sequences else None
            scores.append(0.0 if share is None else self.config.max_penalty * share)
        return scores
