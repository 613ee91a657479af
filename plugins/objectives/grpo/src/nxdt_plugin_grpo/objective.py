"""The objective ``grpo``: answers of the model itself, scored, and a clipped policy gradient on them.

Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300, equation 3), with the means of DAPO (Yu et al.
2025, arXiv:2503.14476) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The advantage of an answer is its reward less
the mean of its group, divided by a standard deviation.

Rows of a batch are answers, those to one prompt together. ``labels`` are the tokens of answers alone, with the one that
ends an answer; ``loss_weights`` are what each adds to the mean. ``values`` has ``advantages`` of each token, and
``old_log_probs`` where answers are used again. What is said of a whole answer is the value of its first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train.sampling import Sampling, Writer
from nxdt_plugin_grpo.config import GrpoConfig
from nxdt_plugin_grpo.errors import NoPrompts, PromptTooLong
from nxdt_plugin_grpo.prompts import Prompt
from nxdt_plugin_grpo.rewards import Weighted, rewards_of, score
from nxdt_plugin_grpo.rollout import Group, places

if TYPE_CHECKING:
    from nxdt_core.train import TrainSession

_STD_EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""
_OF_ANSWER = "answer/"
"""Prefix of values of whole answers."""
_OF_ANSWERS = ("reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "unscored")
"""Metrics that are means over all answers."""
_COUNT = f"{_OF_ANSWER}count"

_BLANK = Prompt(place="", ids=(0,), record={})
"""Prompt of a blank sample, at the end of a validation: other ranks wait for its passes."""


class Grpo(Objective):
    """−min(r A, clip(r, 1 − ε, 1 + ε) A), and β times the divergence from the reference, over the tokens of answers.

    ``r`` is the ratio of a token's probability to that when it was drawn, ``A`` the advantage of its answer. The
    divergence is r (exp(d) − d − 1), where d is the log-probability under the reference less that under the model
    (Schulman 2020, "Approximating KL divergence"; with r as in DeepSeek-V3.2, arXiv:2512.02556).

    Metrics: ``reward``, ``reward_std`` (of all answers), ``frac_reward_zero_std`` (groups without a difference),
    ``rewards/<name>``, ``unscored`` (answers without a reward), ``completions/mean_length``,
    ``completions/clipped_ratio`` (answers that were cut off), ``clip_ratio`` (tokens without a gradient) and ``kl``.
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._rewards: list[Weighted] | None = None
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        self._bounds = 1 - config.epsilon, 1 + high
        of_rewards = [f"rewards/{name}" for name in config.reward_names]
        self._counts = ("count", "scored", *(f"scored/{name}" for name in config.reward_names))
        """Counts that means are taken over: answers, those with a reward, and those that each function scores."""
        self._means = {
            **dict.fromkeys(_OF_ANSWERS, "count"),
            "reward": "scored",
            **dict(zip(of_rewards, self._counts[2:], strict=True)),
        }
        """Metrics of answers, and what each is a mean over."""
        self._figures = (*self._counts, *self._means)
        """Names of the values of answers; of blank samples they are zero."""
        self._of_tokens = config.loss_type in ("dapo", "cispo")
        self.traits = ObjectiveTraits(
            rows_per_sample=config.num_generations,
            answers=config.num_generations,
            samples=f"prompts x {config.num_generations} answers",
            values=("advantages", *(_OF_ANSWER + name for name in self._figures)),
            unit="tokens of answers" if self._of_tokens else "answers",
            reference="step" if config.beta else None,
        )

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return what the loss is a mean over, and what the metrics are: the numbers of answers, of those with a
        reward, and of those that each function scores.

        Raises:
            NoPrompts: the batch was not generated.
        """
        if _COUNT not in batch.values:
            raise NoPrompts()
        counts = [batch.values[_OF_ANSWER + name].sum() for name in self._counts]
        return torch.stack([batch.weight() if self._of_tokens else counts[0], *counts])

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [answers, seq, vocab]."""
        config, trained = self._config, (batch.labels != IGNORE_INDEX).float()
        if config.temperature != 1:
            logits = logits / config.temperature
        log_probs = -cross_entropies(logits, batch.labels, step)
        log_ratio = log_probs - batch.values.get("old_log_probs", log_probs.detach())
        if config.importance_sampling_level == "sequence":
            of_row = torch.stack([(log_ratio * trained).sum(1), trained.sum(1)])
            total, tokens = step.sequences.total(of_row)
            log_ratio = (total / tokens.clamp(min=1))[:, None].expand_as(log_ratio)
        ratio = torch.exp(log_ratio)
        advantages = batch.values["advantages"]
        if config.loss_type == "cispo":
            held = ratio.detach().clamp(max=config.epsilon_high)
            losses = -held * advantages * log_probs
            figures = {"clip_ratio": ((held < ratio) & (advantages > 0)).float()}
        else:
            free, held = ratio * advantages, ratio.clamp(*self._bounds) * advantages
            losses = -torch.minimum(free, held)
            figures = {"clip_ratio": (held < free).float()}
        if config.beta and batch.reference_log_probs is not None:
            apart = batch.reference_log_probs - log_probs
            divergence = ratio * (torch.exp(apart) - apart - 1)
            losses = losses + config.beta * divergence
            figures["kl"] = divergence.detach()
        weights = trained if batch.loss_weights is None else batch.loss_weights * trained
        names = ("loss", *self._counts)

        def placed(value: torch.Tensor, over: str) -> torch.Tensor:
            """Return a vector like that of :meth:`weight`, zero but for a sum that is divided by ``over``."""
            return functional.pad(value[None], (names.index(over), len(names) - 1 - names.index(over)))

        return ObjectiveOutput(
            loss_sum=placed((losses * weights).sum(), "loss"),
            weight=self.weight(batch),
            metrics={
                **{n: placed(batch.values[_OF_ANSWER + n].sum().to(losses), over) for n, over in self._means.items()},
                **{name: placed((each * weights).sum(), "loss") for name, each in figures.items()},
            },
        )

    def generate(
        self, session: TrainSession, micro_batches: Sequence[Batch], *, train: bool
    ) -> tuple[Sequence[Batch], Any]:
        """Return micro-batches of answers, ``num_generations`` rows for each prompt. Collective.

        Raises:
            NoPrompts: the data is not that of ``prompts``.
            PromptTooLong: a prompt leaves no room for an answer.
            RewardFailed: of a reward.
        """
        if self._rewards is None:
            self._rewards = rewards_of(self._config.rewards, session.config.kernel)
        steps, step = self._config.num_iterations, session.state.step
        held = session.state.data.get("generated", {}) if train and step % steps else {}
        groups = {int(place): Group(**group) for place, group in held.items()}
        if draws := not self._fit(session, micro_batches, groups):
            groups = self._drawn(session, micro_batches, step if train else -1)
        batches = self._batches(session, micro_batches, groups)
        if not train or steps == 1:
            return batches, None
        if draws:
            self._remember(session, micro_batches, groups, batches)
            batches = self._batches(session, micro_batches, groups)
        return batches, {str(place): asdict(group) for place, group in groups.items()}

    def _fit(self, session: TrainSession, micro_batches: Sequence[Batch], groups: Mapping[int, Group]) -> bool:
        """Return whether ``groups`` are such as this run draws; the step before may be of a run with other keys."""
        count, window = self._config.num_generations, session.config.run.data.seq_length
        samples = session.engine.rank_info.dp_size * sum(batch.samples for batch in micro_batches)
        return len(groups) == samples and all(
            len(group.answers) == count
            and {*group.rewards} == {*self._config.reward_names}
            and len(group.prompt) + max(map(len, group.answers)) <= window
            for group in groups.values()
            if group.answers  # a blank sample has none
        )

    def _drawn(self, session: TrainSession, micro_batches: Sequence[Batch], step: int) -> dict[int, Group]:
        """Return the groups of the global batch by their place in it; each data-parallel rank draws its own."""
        config, longest = self._config, self._config.max_completion_length
        window, tokenizer = session.config.run.data.seq_length, session.data.tokenizer
        if tokenizer is None:
            raise NoPrompts()
        writer = Writer(model=session.model, tokenizer=tokenizer, window=window, stop_ids=frozenset())
        sampling = Sampling(
            max_new_tokens=longest,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            stop=config.stop,
            samples=config.num_generations,
        )
        own, rank_places = dict[int, Group](), places(session, micro_batches)
        asked = dict[int, Prompt]()
        given = (origin for batch in micro_batches for origin in batch.origins or ())
        if not session.engine.ranks.any_rank(any(isinstance(each, Prompt) for each in given)):
            raise NoPrompts()  # one rank may have blank samples alone, and answers to them are drawn for nothing
        for batch in micro_batches:
            prompts = [each if isinstance(each, Prompt) else _BLANK for each in batch.origins or [None] * batch.samples]
            for prompt in prompts:
                if len(prompt.ids) + longest > window:
                    raise PromptTooLong(place=prompt.place, tokens=len(prompt.ids), most=longest, window=window)
            here = [next(rank_places) for _ in prompts]
            drawn = writer.answers(
                [prompt.ids for prompt in prompts],
                session.stop_ids,
                sampling,
                drawn=[(session.config.run.seed, step, place) for place in here],
                any_left=session.engine.ranks.any_rank if session.engine.rank_info.dp_size > 1 else None,
            )
            for number, (place, prompt) in enumerate(zip(here, prompts, strict=True)):
                own[place] = Group()
                if prompt is not _BLANK:
                    answers, ended = zip(*drawn[number * sampling.samples :][: sampling.samples], strict=True)
                    own[place] = Group(prompt=list(prompt.ids), answers=[*answers], ended=[*ended])
                    asked[place] = prompt
        if asked:
            texts = [text for place in asked for text in own[place].texts(tokenizer, session.stop_ids, config.stop)]
            of_answers = [asked[place] for place in asked for _ in own[place].answers]
            for name, scores in score(self._rewards or (), texts, of_answers).items():
                for number, place in enumerate(asked):
                    own[place].rewards[name] = scores[number * sampling.samples :][: sampling.samples]
        return {place: each for part in session.engine.ranks.all_gather_object(own) for place, each in part.items()}

    def _batches(
        self, session: TrainSession, micro_batches: Sequence[Batch], groups: Mapping[int, Group]
    ) -> list[Batch]:
        """Return this rank's micro-batches of answers."""
        totals = {place: self._totals(group) for place, group in groups.items()}
        every = torch.cat([totals[place] for place in sorted(groups)])
        every = every[~every.isnan()]
        spread = float(every.std()) if len(every) > 1 else 0.0
        own, length = places(session, micro_batches), self._length(session, groups)
        found = []
        for batch in micro_batches:
            here = [next(own) for _ in range(batch.samples)]
            rows = Rows(len(here), self._config.num_generations, length, self._figures)
            for number, place in enumerate(here):
                self._fill(rows, number, groups[place], totals[place], spread)
            found.append(rows.batch(mean=self._config.loss_type == "bnpo"))
        return found

    def _length(self, session: TrainSession, groups: Mapping[int, Group]) -> int:
        """Return the tokens of a row: as many as the longest answer of the global batch needs, in steps of at least
        64, so that compiled layers see few lengths, or the whole window."""
        mesh, window = session.engine.rank_info.mesh, session.config.run.data.seq_length
        needed = max(len(group.prompt) + len(answer) for group in groups.values() for answer in group.answers)
        step = math.lcm(64, 2 * mesh.get("cp", 1) * mesh.get("tp", 1))
        return min(-(-needed // step) * step, window)

    def _totals(self, group: Group) -> torch.Tensor:
        """Return the reward of each answer, NaN of one that no function scores."""
        total = torch.full((len(group.answers),), math.nan, device=HOST, dtype=torch.float64)
        for each in self._rewards or () if group.answers else ():
            given = [math.nan if score is None else score for score in group.rewards[each.name]]
            scores = torch.tensor(given, device=HOST, dtype=total.dtype)
            scored = ~scores.isnan()
            total[scored] = total[scored].nan_to_num() + each.weight * scores[scored]
        return total

    def _fill(self, rows: Rows, number: int, group: Group, totals: torch.Tensor, spread: float) -> None:
        """Write the answers of a group, the ``number``-th of a micro-batch."""
        config, scored = self._config, totals[~totals.isnan()]
        alike = bool((scored == scored[:1]).all())  # the mean of equal numbers is rounded, and they differ from it
        mean, deviation = (scored[:1], 0.0) if alike else (scored.mean(), float(scored.std()))
        scales = {"group": deviation + _STD_EPSILON, "batch": spread + _STD_EPSILON, "none": 1.0}
        advantages = ((totals - mean) / scales[config.scale_rewards] if len(scored) else totals).nan_to_num(0.0)
        for place, answer in enumerate(group.answers):
            share = {"grpo": 1 / len(answer), "dr_grpo": 1 / config.max_completion_length}.get(config.loss_type, 1.0)
            unscored, cut = bool(totals[place].isnan()), not group.ended[place]
            scores = {name: values[place] for name, values in group.rewards.items()}
            of_answer = {
                "count": 1.0,
                "scored": not unscored,
                "unscored": unscored,
                "reward": 0.0 if unscored else float(totals[place]),
                "reward_std": spread,
                "frac_reward_zero_std": alike,
                "completions/mean_length": len(answer),
                "completions/clipped_ratio": cut,
                **{f"scored/{name}": score is not None for name, score in scores.items()},
                **{f"rewards/{name}": score or 0.0 for name, score in scores.items()},
            }
            of_tokens: dict[str, float | list[float]] = {"advantages": float(advantages[place])}
            if group.old_log_probs:
                of_tokens["old_log_probs"] = group.old_log_probs[place]
            rows.write(
                number * config.num_generations + place,
                group.prompt,
                answer,
                0.0 if cut and config.mask_truncated_completions else share,
                of_tokens,
                of_answer,
            )

    def _remember(
        self, session: TrainSession, micro_batches: Sequence[Batch], groups: Mapping[int, Group], batches: list[Batch]
    ) -> None:
        """Give each group the log-probabilities that its answers have before the first step on them. Collective."""
        own, mine = {}, places(session, micro_batches)
        for batch, found in zip(batches, session.model.log_probs(batches), strict=True):
            answered = [
                values[labels != IGNORE_INDEX].tolist()
                for values, labels in zip(found.float().to(HOST), batch.labels, strict=True)
            ]
            for number in range(batch.samples):
                first = number * self._config.num_generations
                own[next(mine)] = answered[first : first + self._config.num_generations]
        for part in session.engine.ranks.all_gather_object(own):
            for place, values in part.items():
                groups[place].old_log_probs = values[: len(groups[place].answers)]


class Rows:
    """A micro-batch of answers that is being written, on the host."""

    def __init__(self, groups: int, size: int, length: int, figures: Sequence[str]) -> None:
        self._size, self._shape = size, (groups * size, length)
        self._ids = torch.zeros(self._shape, dtype=torch.int64, device=HOST)
        self._labels = torch.full(self._shape, IGNORE_INDEX, dtype=torch.int64, device=HOST)
        self._padding = torch.ones(self._shape, dtype=torch.bool, device=HOST)
        names = ("weights", "advantages", *(_OF_ANSWER + name for name in figures))
        self._values = {name: torch.zeros(self._shape, device=HOST) for name in names}

    def write(
        self,
        row: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        weight: float,
        of_tokens: Mapping[str, float | Sequence[float]],
        of_answer: Mapping[str, float],
    ) -> None:
        """Write an answer behind its prompt, the weight and values of its tokens, and those of the whole."""
        first, whole = len(prompt) - 1, torch.tensor([*prompt, *answer], device=HOST)
        at = slice(first, first + len(answer))
        self._ids[row, : len(whole)] = whole
        self._padding[row, : len(whole)] = False
        self._labels[row, at] = whole[first + 1 :]
        for name, value in {"weights": weight, **of_tokens}.items():
            held = self._values.setdefault(name, torch.zeros(self._shape, device=HOST))
            held[row, at] = torch.as_tensor(value, device=HOST)
        for name, value in of_answer.items():
            self._values[_OF_ANSWER + name][row, first] = value

    def batch(self, *, mean: bool = False) -> Batch:
        """Return what was written; with ``mean``, tokens together weigh as much as there are answers."""
        values = dict(self._values)
        weights = values.pop("weights")
        if mean:
            weights = weights * (values[_COUNT].sum() / weights.sum().clamp(min=1))
        return Batch(
            input_ids=self._ids,
            labels=self._labels,
            loss_weights=weights,
            padding=self._padding,
            values=values,
            rows_per_sample=self._size,
        )
