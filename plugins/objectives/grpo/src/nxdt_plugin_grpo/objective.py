"""The objective ``grpo``: answers of the model itself, scored, and a clipped policy gradient on them.

Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300, equation 3), with the means of DAPO (Yu et al.
2025, arXiv:2503.14476) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The advantage of an answer is its reward less
the mean of its group, divided by a standard deviation.

Rows of a batch are answers, those to one prompt together. ``labels`` are the tokens of answers alone, with the one that
ends an answer; ``loss_weights`` are what each adds to the mean. ``values`` has ``advantages`` of each token,
``old_log_probs`` where answers are used again, and ``high_entropy`` where other tokens are left out. What is said of a
whole answer is the value of its first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.collectives import reduce_from_group
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.models.loss import log_partition, log_probs, row_chunks
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train import build
from nxdt_core.train.sampling import Sampling, Writer, completion
from nxdt_core.train.weights.loading import known_tokenizer, same_tokens
from nxdt_plugin_grpo.config import GrpoConfig
from nxdt_plugin_grpo.errors import NoPrompts, PromptTooLong, RewardModelUnfit
from nxdt_plugin_grpo.prompts import Prompt
from nxdt_plugin_grpo.rewards import Answer, Model, Weighted, build_reward, row_length, score

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


@dataclass(kw_only=True)
class Group:
    """The answers to a prompt; of a blank sample there are none. All fields are JSON-able."""

    prompt: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each, with the one that ends it."""
    ended: list[bool] = field(default_factory=list)
    """True for each answer that ends by itself, and was not cut off."""
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    """Scores by name, of each answer, before they are weighted; None: it has no score."""
    old_log_probs: list[list[float]] = field(default_factory=list)
    """Log-probabilities of the answers' tokens before the first step on them; empty where there is one step."""


class Grpo(Objective):
    """−min(r A, clip(r, 1 − ε, 1 + ε) A), and β times the divergence from the reference, over the tokens of answers.

    ``r`` is the ratio of a token's probability to that when it was drawn, ``A`` the advantage of its answer. The
    divergence is r (exp(d) − d − 1), where d is the log-probability under the reference less that under the model
    (Schulman 2020, "Approximating KL divergence"; with r as in DeepSeek-V3.2, arXiv:2512.02556).

    Metrics: ``reward``, ``reward_std`` (of all answers), ``frac_reward_zero_std`` (groups without a difference),
    ``rewards/<name>``, ``unscored`` (answers without a reward), ``completions/mean_length``,
    ``completions/clipped_ratio`` (answers that were cut off), ``clip_ratio`` (tokens without a gradient) and ``kl``.
    """

    step_results = ("samples",)

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._rewards: list[Weighted] | None = None
        self._reward_model: ParallelModel
        if config.reward_model is not None:
            self.teacher_key, self.teacher = config.reward_model
        self.samples: list[tuple[Group, list[float]]] = []
        """The groups of this rank in the newest step of training, and the advantages of their answers."""
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
            temperature=config.temperature,
        )

    def check_teacher(self, run: ResolvedConfig, config: ResolvedConfig) -> None:
        """Check that the model of ``run`` scores what that of ``config`` writes.

        Raises:
            RewardModelUnfit: it gives no scores, or knows other tokens.
        """
        data, rows = known_tokenizer(config), build.model_builder(run).vocab_size
        if not getattr(run.selected("model").config, "score_head", False):
            raise RewardModelUnfit(path=self.teacher, reason="gives logits, and no scores")
        if not same_tokens(data, known_tokenizer(run)):
            raise RewardModelUnfit(path=self.teacher, reason="has another tokenizer than the data")
        if data is not None and data.vocab_size > rows:
            reason = f"has {rows} rows, and the tokenizer of the data {data.vocab_size} ids"
            raise RewardModelUnfit(path=self.teacher, reason=reason)

    def take_teacher(self, teacher: ParallelModel, *, pipelined: bool) -> None:
        """Take the reward model; see :class:`~nxdt_core.protocols.objective.Objective`."""
        self._reward_model = teacher

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
        now = log_probs(logits, batch.labels, step, temperature=config.temperature)
        log_ratio = now - batch.values.get("old_log_probs", now.detach())
        if config.importance_sampling_level == "sequence":
            of_row = torch.stack([(log_ratio * trained).sum(1), trained.sum(1)])
            total, tokens = step.sequences.total(of_row)
            log_ratio = (total / tokens.clamp(min=1))[:, None].expand_as(log_ratio)
        ratio = torch.exp(log_ratio)
        advantages = batch.values["advantages"]
        if config.loss_type == "cispo":
            bounded = ratio.detach().clamp(max=config.epsilon_high)
            losses = -bounded * advantages * now
            figures = {"clip_ratio": ((bounded < ratio) & (advantages > 0)).float()}
        else:
            free, bounded = ratio * advantages, ratio.clamp(*self._bounds) * advantages
            losses = -torch.minimum(free, bounded)
            figures = {"clip_ratio": (bounded < free).float()}
        if "high_entropy" in batch.values:
            losses = losses * batch.values["high_entropy"]
        if config.beta and batch.reference_log_probs is not None:
            reference_log_ratio = batch.reference_log_probs - now
            divergence = ratio * (torch.exp(reference_log_ratio) - reference_log_ratio - 1)
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
                **{name: placed((figure * weights).sum(), "loss") for name, figure in figures.items()},
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
        config, steps, step = self._config, self._config.num_iterations, session.state.step
        if self._rewards is None:
            kernel = session.config.kernel
            self._rewards = [build_reward(number, entry, kernel) for number, entry in enumerate(config.rewards)]
            for reward in self._rewards:
                if isinstance(reward.function, Model):
                    reward.function.model, reward.function.session = self._reward_model, session
        generated = session.state.data.get("generated", {}) if train and step % steps else {}
        groups = {int(place): Group(**group) for place, group in generated.items()}
        count, window = config.num_generations, session.config.run.data.seq_length
        samples = session.engine.rank_info.dp_size * sum(batch.samples for batch in micro_batches)
        # The step before may be of a run with other keys.
        fit = len(groups) == samples and all(
            len(group.answers) == count
            and {*group.rewards} == {*config.reward_names}
            and len(group.prompt) + max(map(len, group.answers)) <= window
            for group in groups.values()
            if group.answers  # a blank sample has none
        )
        if not fit:
            groups = self._drawn(session, micro_batches, step if train else -1)
        batches, samples_of_rank = self._batches(session, micro_batches, groups)
        if train and steps > 1 and not fit:
            self._remember(session, micro_batches, groups, batches)
            batches, _ = self._batches(session, micro_batches, groups)
        if config.top_entropy_quantile < 1:
            batches = self._with_high_entropies(session, batches)
        if not train:
            return batches, None
        self.samples = samples_of_rank
        return batches, {str(place): asdict(group) for place, group in groups.items()} if steps > 1 else None

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
        groups, rank_places = dict[int, Group](), places(session, micro_batches)
        asked = dict[int, Prompt]()
        origins = (origin for batch in micro_batches for origin in batch.origins or ())
        if not session.engine.ranks.any_rank(any(isinstance(origin, Prompt) for origin in origins)):
            raise NoPrompts()  # one rank may have blank samples alone, and answers to them are drawn for nothing
        for batch in micro_batches:
            prompts = [
                origin if isinstance(origin, Prompt) else _BLANK for origin in batch.origins or [None] * batch.samples
            ]
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
                groups[place] = Group()
                if prompt is not _BLANK:
                    answers, ended = zip(*drawn[number * sampling.samples :][: sampling.samples], strict=True)
                    groups[place] = Group(prompt=list(prompt.ids), answers=[*answers], ended=[*ended])
                    asked[place] = prompt
        rewards = [reward for reward in self._rewards or () if asked or isinstance(reward.function, Model)]
        if rewards:
            texts = []
            for place in asked:
                for ids in groups[place].answers:
                    shown = ids[:-1] if ids and ids[-1] in session.stop_ids else ids
                    text = completion(tokenizer, groups[place].prompt, shown, config.stop)
                    texts.append(Answer.of(text, ids, groups[place].prompt))
            of_answers = [asked[place] for place in asked for _ in groups[place].answers]
            for name, scores in score(rewards, texts, of_answers).items():
                for number, place in enumerate(asked):
                    groups[place].rewards[name] = scores[number * sampling.samples :][: sampling.samples]
        of_ranks = session.engine.ranks.all_gather_object(groups)
        return {place: group for part in of_ranks for place, group in part.items()}

    def _batches(
        self, session: TrainSession, micro_batches: Sequence[Batch], groups: Mapping[int, Group]
    ) -> tuple[list[Batch], list[tuple[Group, list[float]]]]:
        """Return this rank's micro-batches of answers, and its groups with the advantages of their answers."""
        config, size = self._config, self._config.num_generations
        totals = {}
        """The reward of each answer, NaN of one that no function scores."""
        for place, group in groups.items():
            total = torch.full((len(group.answers),), math.nan, device=HOST, dtype=torch.float64)
            for reward in self._rewards or () if group.answers else ():
                numbers = [math.nan if score is None else score for score in group.rewards[reward.name]]
                scores = torch.tensor(numbers, device=HOST, dtype=total.dtype)
                total = torch.where(scores.isnan(), total, total.nan_to_num() + reward.weight * scores)
            totals[place] = total
        every = torch.cat([totals[place] for place in sorted(groups)])
        every = every[~every.isnan()]
        spread = float(every.std()) if len(every) > 1 else 0.0
        needed = max(len(group.prompt) + len(answer) for group in groups.values() for answer in group.answers)
        length = row_length(session, needed)
        again = any(group.old_log_probs for group in groups.values())
        rank_places, batches, samples = places(session, micro_batches), [], []
        for batch in micro_batches:
            ids = torch.zeros((batch.samples * size, length), dtype=torch.int64, device=HOST)
            labels, padding = torch.full_like(ids, IGNORE_INDEX), torch.ones_like(ids, dtype=torch.bool)
            names = ("weights", *self.traits.values, *(["old_log_probs"] if again else []))
            values = {name: torch.zeros(ids.shape, device=HOST) for name in names}
            for number, place in zip(range(batch.samples), rank_places, strict=False):
                group, total = groups[place], totals[place]
                scored = total[~total.isnan()]
                alike = bool((scored == scored[:1]).all())  # the mean of equal numbers is rounded, and they differ
                mean, deviation = (scored[:1], 0.0) if alike else (scored.mean(), float(scored.std()))
                scales = {"group": deviation + _STD_EPSILON, "batch": spread + _STD_EPSILON, "none": 1.0}
                advantages = (total - mean) / scales[config.scale_rewards] if len(scored) else total
                samples.append((group, advantages.nan_to_num(0.0).tolist()))
                for index, answer in enumerate(group.answers):
                    row, first = number * size + index, len(group.prompt) - 1
                    whole, at = torch.tensor([*group.prompt, *answer], device=HOST), slice(first, first + len(answer))
                    ids[row, : len(whole)], padding[row, : len(whole)] = whole, False
                    labels[row, at] = whole[first + 1 :]
                    cut, unscored = not group.ended[index], bool(total[index].isnan())
                    share = {"grpo": 1 / len(answer), "dr_grpo": 1 / config.max_completion_length}
                    if not (cut and config.mask_truncated_completions):
                        values["weights"][row, at] = share.get(config.loss_type, 1.0)
                    values["advantages"][row, at] = samples[-1][1][index]
                    if group.old_log_probs:
                        values["old_log_probs"][row, at] = torch.tensor(group.old_log_probs[index], device=HOST)
                    figures = {
                        "count": 1.0,
                        "scored": not unscored,
                        "unscored": unscored,
                        "reward": 0.0 if unscored else float(total[index]),
                        "reward_std": spread,
                        "frac_reward_zero_std": alike,
                        "completions/mean_length": len(answer),
                        "completions/clipped_ratio": cut,
                        **{f"scored/{name}": scores[index] is not None for name, scores in group.rewards.items()},
                        **{f"rewards/{name}": scores[index] or 0.0 for name, scores in group.rewards.items()},
                    }
                    for name, figure in figures.items():
                        values[_OF_ANSWER + name][row, first] = figure
            weights = values.pop("weights")
            if config.loss_type == "bnpo":  # the tokens of a micro-batch weigh as much as there are answers
                weights = weights * (values[_COUNT].sum() / weights.sum().clamp(min=1))
            batches.append(
                Batch(
                    input_ids=ids,
                    labels=labels,
                    loss_weights=weights,
                    padding=padding,
                    values=values,
                    rows_per_sample=size,
                )
            )
        return batches, samples

    def _with_high_entropies(self, session: TrainSession, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches with the value ``high_entropy``, 1 at tokens of answers whose distributions have the
        greatest entropies of all in the global batch. Collective."""

        def measure(logits: torch.Tensor, labels: torch.Tensor, step: StepContext) -> torch.Tensor:
            """Return the entropy of the distribution that each token was drawn from, [rows, seq], in every layout."""
            logits = logits / self._config.temperature
            sums = log_partition(logits, step).flatten()
            local = (logits.to_local() if is_dtensor(logits) else logits).flatten(0, -2)
            of_rows = torch.empty_like(sums)
            for part in row_chunks(local, 2):
                of_tokens = local[part].to(sums.dtype) - sums[part, None]
                of_rows[part] = -(of_tokens.exp() * of_tokens).sum(1)
            group = logits.device_mesh.get_group() if is_dtensor(logits) else None
            return reduce_from_group(of_rows, group).view(labels.shape)

        entropies = [values.float().to(HOST) for values in session.model.log_probs(batches, measure)]
        mine = torch.cat(
            [
                values[(batch.labels != IGNORE_INDEX) & (batch.loss_weights > 0)]  # type: ignore[operator]
                for values, batch in zip(entropies, batches, strict=True)
            ]
        )
        # Ranks that share samples have the same tokens.
        of_ranks = dict(session.engine.ranks.all_gather_object((session.engine.rank_info.dp_rank, mine.numpy())))
        every = np.concatenate([*of_ranks.values()])
        least = float(np.quantile(every, 1 - self._config.top_entropy_quantile)) if len(every) else 0.0
        return [
            replace(batch, values={**batch.values, "high_entropy": (values >= least).float()})
            for values, batch in zip(entropies, batches, strict=True)
        ]

    def _remember(
        self, session: TrainSession, micro_batches: Sequence[Batch], groups: Mapping[int, Group], batches: list[Batch]
    ) -> None:
        """Give each group the log-probabilities that its answers have before the first step on them. Collective."""
        log_probs_of, mine = {}, places(session, micro_batches)
        measure = partial(log_probs, temperature=self._config.temperature)
        for batch, measured in zip(batches, session.model.log_probs(batches, measure), strict=True):
            answered = [
                values[labels != IGNORE_INDEX].tolist()
                for values, labels in zip(measured.float().to(HOST), batch.labels, strict=True)
            ]
            for number in range(batch.samples):
                first = number * self._config.num_generations
                log_probs_of[next(mine)] = answered[first : first + self._config.num_generations]
        for part in session.engine.ranks.all_gather_object(log_probs_of):
            for place, values in part.items():
                groups[place].old_log_probs = values[: len(groups[place].answers)]


def places(session: TrainSession, micro_batches: Sequence[Batch]) -> Iterator[int]:
    """Return the place in the global batch of each sample of this rank's micro-batches; ranks have equally many."""
    samples = sum(batch.samples for batch in micro_batches)
    first = session.engine.rank_info.dp_rank * samples
    return iter(range(first, first + samples))
