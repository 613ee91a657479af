"""The objective ``distill``: cross-entropy, and the divergence from a teacher's distribution of each token.

The teacher runs forward on the micro-batches of the step, in the layout of the model that it teaches. Its logits are
on the ranks that have the model's, in the same parts. Without a pipeline it runs when the logits of a micro-batch are
there, so that one micro-batch of its logits is held. The stages of a pipeline run it before the step, for all.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.models.loss import TokenLosses, cross_entropies
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train import build
from nxdt_core.train.sampling import Sampling, Writer
from nxdt_core.train.weights.loading import known_tokenizer, same_tokens
from nxdt_plugin_distill.config import DistillConfig
from nxdt_plugin_distill.divergence import Measure, Teacher, TopTokens, divergences, shared_like
from nxdt_plugin_distill.errors import (
    NoPrompts,
    PromptTooLong,
    TeacherGivesScores,
    TeacherMissing,
    TeacherTokenizerDiffers,
    TeacherVocabularyDiffers,
    TopKTooLarge,
)

if TYPE_CHECKING:
    from nxdt_core.engine.loss import ChunkedHead
    from nxdt_core.train import TrainSession


class Distill(Objective):
    """(1 − ``kd_ratio``) · cross-entropy + ``kd_ratio`` · divergence from the teacher, a mean over the labels.

    Metrics: ``ce_loss`` and ``kd_loss``, the two terms before they are weighed, and ``top1_agreement``, the share of
    labels for which both models find the same token likeliest.
    """

    def __init__(self, config: DistillConfig) -> None:
        self._config = config
        self.teacher, self.teacher_config = config.teacher, config.teacher_config
        self.traits = ObjectiveTraits(unit="labels", answers=int(config.on_policy > 0))
        self._measure = Measure(beta=config.beta, temperature=config.temperature)
        self._share = config.kd_ratio
        self._model: ParallelModel | None = None
        self._pipelined = False
        self._rows: int | None = None
        """Vocabulary rows of the student's logits; None: the teacher has as many."""
        self._hidden_bytes = 0
        """Bytes of the last hidden states that a head was applied to, for an estimate."""
        self._coming: Iterator[Teacher | ChunkedHead] | None = None
        """Outputs of the teacher for the micro-batches of a pass, in their order."""

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """``logits`` [micro_batch, seq, vocab].

        Raises:
            TeacherMissing: there is none.
        """
        share = self._share
        if isinstance(logits, TokenLosses):  # of :meth:`head_loss`
            cross, soft, same = logits.of(batch.labels).unbind(-1)
        else:
            cross, soft, same = self._terms(logits, batch.labels, step, self._taught(logits))
        trained = (batch.labels != IGNORE_INDEX).to(soft)
        weights = trained if batch.loss_weights is None else batch.loss_weights * trained
        losses = {"ce_loss": (cross * weights).sum(), "kd_loss": (soft * weights).sum()}
        metrics = {name: loss.detach() for name, loss in losses.items()}
        return ObjectiveOutput(
            loss_sum=(1 - share) * losses["ce_loss"] + share * losses["kd_loss"],
            weight=self.weight(batch),
            metrics={**metrics, "top1_agreement": (same * weights).sum()},
        )

    def _terms(
        self, logits: torch.Tensor, labels: torch.Tensor, step: StepContext | None, teacher: Teacher
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the cross-entropy and the divergence of each token, and whether both models' likeliest is the same."""
        share = self._share
        hard, compared = (logits if weighs else logits.detach() for weighs in (1 - share, share))
        # First, so that its backward, which holds another gradient, comes when the teacher's logits are freed.
        cross = cross_entropies(hard, labels, step)
        return cross, *divergences(compared, teacher, self._measure)

    def head_loss(self, head: ChunkedHead, step: StepContext) -> torch.Tensor:
        """Return the terms of each token, [rows, 3], from the logits of some tokens of both models at a time."""
        assert step.labels is not None  # as of every pass for a loss
        labels, self._hidden_bytes = step.labels.flatten(), head.hidden.nbytes
        teacher = head if head.hidden.device.type == "meta" else self._next()  # as in :meth:`_taught`

        def terms(logits: torch.Tensor, part: slice) -> torch.Tensor:
            return torch.stack(self._terms(logits, labels[part], step, self._kept(teacher.logits(part))), dim=-1)

        return head.measured(terms)

    def generate(
        self, session: TrainSession, micro_batches: Sequence[Batch], *, train: bool
    ) -> tuple[Sequence[Batch], None]:
        """Return micro-batches of answers that the model draws, in the steps of training that take these. Collective.

        Raises:
            NoPrompts, PromptTooLong: of the prompts of the data.
        """
        config, seed = self._config, session.config.run.seed
        self._share = config.kd_ratio
        if not train or not is_drawn(session.state.step, seed=seed, share=config.on_policy):
            return micro_batches, None
        self._share = 1.0
        tokenizer, window = session.data.tokenizer, session.config.run.data.seq_length
        if tokenizer is None:
            raise NoPrompts(share=config.on_policy, reason="the data has no tokenizer")
        writer = Writer(model=session.model, tokenizer=tokenizer, window=window, stop_ids=frozenset())
        sampling = Sampling(max_new_tokens=config.max_completion_length, temperature=1.0)
        any_left = session.engine.ranks.any_rank if session.engine.rank_info.dp_size > 1 else None
        place = session.engine.rank_info.dp_rank * sum(len(batch.input_ids) for batch in micro_batches)
        answered = []
        for batch in micro_batches:
            trained = batch.labels != IGNORE_INDEX
            prompts: list[list[int]] = []
            """Tokens of each row before the first one with a loss; one of a row without a loss, which is blank."""
            for row, ids in enumerate(batch.input_ids):
                if batch.document_ids is not None and int(batch.document_ids[row].max()) > 0:
                    raise NoPrompts(share=config.on_policy, reason="a sequence of the data has several conversations")
                labelled = trained[row].nonzero()
                last = int(labelled[0]) if len(labelled) else 0
                if len(labelled) and not last:
                    raise NoPrompts(
                        share=config.on_policy, reason="a sequence of the data has a loss from its beginning"
                    )
                prompts.append(ids[: last + 1].tolist())
            for prompt in prompts:
                if len(prompt) + sampling.max_new_tokens > window:
                    raise PromptTooLong(tokens=len(prompt), most=sampling.max_new_tokens, window=window)
            drawn = [(seed, session.state.step, place + row) for row in range(len(prompts))]
            answers = writer.answers(prompts, session.stop_ids, sampling, drawn=drawn, any_left=any_left)
            place += len(prompts)
            ids, labels = torch.zeros_like(batch.input_ids), torch.full_like(batch.labels, IGNORE_INDEX)
            padding = torch.ones_like(ids, dtype=torch.bool)
            for row, (prompt, (answer, _)) in enumerate(zip(prompts, answers, strict=True)):
                whole, last = torch.tensor([*prompt, *answer]), len(prompt) - 1
                ids[row, : len(whole)] = whole
                if bool(trained[row].any()):
                    labels[row, last : last + len(answer)] = whole[last + 1 :]
                    padding[row, : len(whole)] = False
            answered.append(Batch(input_ids=ids, labels=labels, padding=padding))
        return answered, None

    # The teacher.

    def check_teacher(self, run: ResolvedConfig, config: ResolvedConfig) -> None:
        """Check that the model of ``run`` knows the tokens of that of ``config``, and choose those to compare: where
        vocabularies have different sizes, the tokens of both tokenizers.

        Raises:
            TeacherGivesScores, TeacherVocabularyDiffers, TeacherTokenizerDiffers, TopKTooLarge: it cannot teach it.
        """
        settings, name = self._config, self._config.teacher
        if getattr(run.selected("model").config, "score_head", False):
            raise TeacherGivesScores(teacher=name)
        data, teacher = known_tokenizer(config), known_tokenizer(run) if settings.check_tokenizer else None
        if settings.check_tokenizer and not same_tokens(data, teacher):
            raise TeacherTokenizerDiffers(teacher=name)
        (tokens, self._rows), (theirs, rows) = _vocabulary(config), _vocabulary(run)
        if tokens != theirs:
            sizes = [tokenizer.vocab_size for tokenizer in (data, teacher) if tokenizer is not None]
            reason = "the tokenizers of both must be known" if settings.check_tokenizer and len(sizes) < 2 else None
            if data is not None and data.vocab_size > rows:
                reason = f"the tokenizer of the data has {data.vocab_size} ids, and the teacher {rows} rows"
            if reason is not None:
                raise TeacherVocabularyDiffers(teacher=name, theirs=theirs, own=tokens, reason=reason)
            tokens = min(tokens, theirs, *sizes)
        if settings.top_k is not None and settings.top_k > tokens:
            raise TopKTooLarge(top_k=settings.top_k, teacher=name, tokens=tokens)
        self._measure = replace(self._measure, tokens=tokens)

    def take_teacher(self, teacher: ParallelModel, *, pipelined: bool) -> None:
        """Take the teacher; see :class:`~nxdt_core.protocols.objective.Objective`."""
        self._model, self._pipelined = teacher, pipelined

    def teacher_bytes(self, logits: torch.Tensor) -> int:
        """Return the bytes that are kept of the teacher's logits of a micro-batch."""
        if isinstance(logits, TokenLosses):
            return self._hidden_bytes
        kept = self._kept(logits)
        return kept.logits.nbytes + kept.ids.nbytes if isinstance(kept, TopTokens) else kept.nbytes

    def prepare(self, micro_batches: Sequence[Batch], model: ParallelModel) -> tuple[Objective, Sequence[Batch]]:
        """Return the objective of one pass, which knows what the teacher says of its micro-batches. Collective."""
        del model
        of_pass, teacher = copy.copy(self), self._model
        if teacher is None:
            raise TeacherMissing()

        def asked(batches: Sequence[Batch]) -> list[Teacher | ChunkedHead]:
            """Run the teacher; of a pipeline the last stage has its logits, or its hidden states with their head."""
            listening = _Listening(self._kept)
            teacher.run_eval(batches, listening)
            return listening.heard

        # A loop over what it says would hold that of one micro-batch while the teacher runs on the next one.
        one_by_one = (asked([batch])[0] for batch in micro_batches)
        of_pass._coming = iter(asked(micro_batches)) if self._pipelined else one_by_one
        return of_pass, micro_batches

    def _kept(self, logits: torch.Tensor) -> Teacher:
        top_k = self._config.top_k
        if top_k is not None:
            return TopTokens.of(logits, top_k, self._measure)
        return logits if self._rows is None else shared_like(logits, self._rows)

    def _taught(self, logits: torch.Tensor) -> Teacher:
        """Return what the teacher says of the next micro-batch, whose ``logits`` are those of the model."""
        if logits.device.type == "meta":  # an estimate: something of the same size
            return self._kept(torch.empty_like(logits))
        said: Teacher = self._next()
        return said

    def _next(self) -> Any:
        """Return what the teacher says of the next micro-batch."""
        said = None if self._coming is None else next(self._coming, None)
        if said is None:
            raise TeacherMissing()
        return said


class _Listening(Objective):
    """An objective without a loss, which keeps something of the logits as micro-batches pass by."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self.heard: list[Teacher | ChunkedHead] = []

    def head_loss(self, head: ChunkedHead, step: StepContext) -> torch.Tensor:
        """Keep a head that computes some logits at a time."""
        self.heard.append(head)
        return head.hidden.new_zeros(len(head.hidden))

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """``logits`` [micro_batch, seq, vocab]."""
        if not isinstance(logits, TokenLosses):
            self.heard.append(self._kept(logits))
        weight = self.weight(batch)
        return ObjectiveOutput(loss_sum=torch.zeros_like(weight), weight=weight)


def _vocabulary(config: ResolvedConfig) -> tuple[int, int]:
    """Return the tokens that the run's model knows, and the rows of its logits, which may be filled up."""
    rows = build.model_builder(config).vocab_size
    return getattr(config.selected("model").config, "vocab_size", None) or rows, rows


def is_drawn(step: int, *, seed: int, share: float) -> bool:
    """Return whether a step is one of the ``share`` that take drawn answers: the same on all ranks and in every run."""
    drawn = hashlib.blake2b(repr(("on-policy", seed, step)).encode(), digest_size=7).digest()
    return int.from_bytes(drawn, "little") < share * (1 << 56)
