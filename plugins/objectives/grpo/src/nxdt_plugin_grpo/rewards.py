"""The kind ``reward``: functions that score answers; two of them, and those of a run.

A third party registers one as a component::

    class Short(Reward):
        def __call__(self, answers, records):
            return [-len(answer) / 100 for answer in answers]

    @hookimpl
    def nxdt_components():
        return {"reward": [Component(name="short", target="my_plugin.rewards:Short")]}
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxdt_core.api import ConfigFinding
from nxdt_core.components import class_of
from nxdt_core.config.read import read_part
from nxdt_core.config.section import ChecksItself
from nxdt_core.config.tree import Origin, from_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigProblem
from nxdt_core.protocols.batch import LARGEST
from nxdt_plugin_grpo.config import NUMBER, CharactersConfig, MatchConfig
from nxdt_plugin_grpo.errors import RewardFailed, RewardMisnamed
from nxdt_plugin_grpo.prompts import Prompt

if TYPE_CHECKING:
    from nxdt_core.kernel import Kernel


class Reward(ABC):
    """The target of the kind, called as ``Target(config)`` with the component's keys."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """Return a number for each of ``answers``, higher for better ones; weighted, it is from −1e30 to 1e30.

        Args:
            answers: texts that the model wrote, without the token that ends them.
            records: of each answer, the record of its prompt.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A reward of a run."""

    name: str
    weight: float
    function: Reward

    def scores(self, answers: Sequence[str], prompt: Prompt) -> list[float]:
        """Return the rewards of answers to one prompt, before they are weighted.

        Raises:
            RewardFailed: the function raises, or does not return as many such numbers.
        """
        try:
            found = [float(score) for score in self.function(answers, [prompt.record] * len(answers))]
        except (Exception, SystemExit) as error:  # anybody's code
            said = f"raised {type(error).__name__}: {error}"
            raise RewardFailed(reward=self.name, found=said, place=prompt.place) from error
        if len(found) != len(answers):
            said = f"returned {len(found)} numbers for {len(answers)} answers"
            raise RewardFailed(reward=self.name, found=said, place=prompt.place)
        most = LARGEST / max(1.0, abs(self.weight))
        wrong = next((score for score in found if not abs(score) <= most), None)
        if wrong is not None:
            said = f"returned {wrong}, which is not a number from {-most:g} to {most:g}"
            raise RewardFailed(reward=self.name, found=said, place=prompt.place)
        return found


def rewards_of(entries: Sequence[str | Mapping[str, Any]], kernel: Kernel) -> list[Weighted]:
    """Build the rewards that ``objective.rewards`` lists.

    Raises:
        RewardMisnamed: an entry is not a name with options.
        NxdtError: the component does not exist, or its options are wrong.
    """
    return [_built(number, entry, kernel) for number, entry in enumerate(entries)]


def reward_problems(entries: Sequence[str | Mapping[str, Any]], kernel: Kernel) -> Iterator[ConfigFinding]:
    """Yield what keeps :func:`rewards_of` from building an entry."""
    for number, entry in enumerate(entries):
        try:
            _built(number, entry, kernel)
        except NxdtError as error:
            key = error.key if isinstance(error, ConfigProblem) else f"objective.rewards[{number}]"
            yield ConfigFinding(key=key, message=error.what(), remedy=error.do())


def _built(number: int, entry: str | Mapping[str, Any], kernel: Kernel) -> Weighted:
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, weight = options.pop("name", None), options.pop("weight", 1.0)
    if not isinstance(name, str):
        raise RewardMisnamed(number=number, reason="has no name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardMisnamed(number=number, reason=f"has the weight {weight!r}, which is not a number")
    component = kernel.registry.get("reward", name)
    cls, config = component.load_config(), None
    if cls is not None:
        node = from_plain(options, Origin(kind="default", where=""))
        config, problems = read_part(cls, node, f"objective.rewards[{number}]")
        for problem in (*problems, *_own_problems(number, config)):
            raise problem
    elif options:
        raise RewardMisnamed(number=number, reason=f"has keys that {name!r} does not take: {', '.join(options)}")
    return Weighted(name=name, weight=float(weight), function=class_of(component, Reward)(config))


def _own_problems(number: int, config: Any) -> list[NxdtError]:
    found = config.check() if isinstance(config, ChecksItself) else ()
    return [RewardMisnamed(number=number, reason=f"{key}: {message}") for key, message in found]


class Match(Reward):
    """1 where what the pattern finds is the record's solution, else 0; numbers are compared as numbers."""

    def __init__(self, config: MatchConfig) -> None:
        self._pattern, self._key = re.compile(config.pattern), config.key

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        return [
            float(self._matches(answer, str(record[self._key])))
            for answer, record in zip(answers, records, strict=True)
        ]

    def _matches(self, answer: str, solution: str) -> bool:
        match = self._pattern.search(answer)
        found = "" if match is None else next((group for group in match.groups() if group is not None), match[0])
        found, solution = found.strip(), solution.rpartition("####")[2].strip()
        if found == solution or not all(re.fullmatch(rf"\+?{NUMBER}\.?", text) for text in (found, solution)):
            return found == solution
        one, other = (float(re.sub("[$,]", "", text)) for text in (found, solution))
        return one == other


class Characters(Reward):
    """The share of an answer's characters that the record allows; 0 of an empty one."""

    def __init__(self, config: CharactersConfig) -> None:
        self._key = config.key

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score each answer."""
        allowed = [set(record[self._key]) for record in records]
        return [
            sum(each in good for each in answer) / len(answer) if answer else 0.0
            for answer, good in zip(answers, allowed, strict=True)
        ]
