"""One object for a run: what a training loop of any kind needs, and what it does at each step.

A whole training loop, right on any number of ranks::

    from nxdt_core.train import TrainSession

    with TrainSession.load("recipe:llama-tiny", ["trainer.max_steps=4"]) as session:
        session.resume()
        for batch in session.batches():
            result = session.step(batch)
            print(session.state.step, float(result.loss.loss))
        session.save()
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.checkpoint.format.hf_source import HFSource, read_hf_source
from nxdt_core.config import ResolvedConfig
from nxdt_core.config import load as load_config
from nxdt_core.config.section import keys_of
from nxdt_core.data.chat.rendering import stop_ids
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import CheckpointDamaged
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import ReferenceNeedsLength
from nxdt_core.kernel.plugin import BUILTIN
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataset import MapDataset
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.garbage_collection import GarbageCollection
from nxdt_core.train import build
from nxdt_core.train.data import Dataset, RunData, StepInput, TrainLoader
from nxdt_core.train.hidden_state import watch_objective
from nxdt_core.train.state import (
    SaveFacts,
    TrainState,
    capture_rng,
    free_earlier_runs,
    restore_rng,
    round_to_bfloat16,
    seed_all,
    versions_of,
)
from nxdt_core.train.step import (
    StepResult,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    mean_loss,
    start_engine,
    train_step,
)
from nxdt_core.train.weights.average import WeightAverage, pop_average
from nxdt_core.train.weights.loading import (
    base_digest,
    load_foreign,
    load_weights,
    teacher_of,
    trained_parameters,
    without_base,
)
from nxdt_core.train.weights.reference import check_base_frozen, first_weights_digest, with_base, with_reference
from nxdt_core.train.weights.saved_config import check_shared_state, config_to_save, continues_optimizer

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointManager, Manifest


_log = logging.getLogger(__name__)
_NO_FACTS = SaveFacts()


class TrainSession:
    """The components of a run, its state, and the operations of a training loop over them.

    Parts that are not given are built from ``config``: objective, schedule, state and average at once; the engine when
    it is first used; model and optimizer by :meth:`start`, or by :meth:`build_model` and :meth:`build_optimizer`.

    Args:
        config: the resolved configuration of the run.
        engine: one that other code has built.
        model: in its layout, built by ``engine``.
        optimizer: over ``model``.
        state: counters to continue from.
        data: of the run, which other code may have read before.
        weights: the first ones of a new run, which :meth:`build_model` loads: a committed checkpoint
            (``weight_init_only``), or the path of another program's; None are fresh ones.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        engine: ParallelEngine | None = None,
        model: ParallelModel | None = None,
        optimizer: ParallelOptimizer | None = None,
        state: TrainState | None = None,
        data: RunData | None = None,
        weights: tuple[CheckpointStore, Manifest] | Path | None = None,
    ) -> None:
        self.config = config
        self._saved_config = config_to_save(config)
        self.state = TrainState() if state is None else state
        self.data = RunData(config) if data is None else data
        self.objective = build.objective(config)
        self._traits = self.objective.traits
        self.schedule = build.schedule(config)
        ema = config.run.exp_manager.ema
        self.average = WeightAverage(ema) if ema.enable else None
        """Exponential moving average of the weights; None where the configuration asks for none."""
        self.collections = GarbageCollection(config.run.trainer.gc_interval)
        """Garbage collection between steps."""
        self.resumed: Manifest | None = None
        """The checkpoint whose run this one resumes."""
        if engine is not None:
            self.engine = engine
        self.built_model = model
        """Model in its layout; None before it is built."""
        self.built_optimizer = optimizer
        """Optimizer over the model; None before it is built."""
        self._weights = weights
        self._referenced = False
        self._elements: int | None = None

    @classmethod
    def load(cls, source: str, overrides: Sequence[str] = ()) -> Self:
        """Make a session of a configuration file, ``recipe:NAME`` and overrides as ``nxdt train`` takes them.

        Under ``torchrun`` and other launchers, the processes that were started take the place of ``trainer.devices``
        and ``trainer.num_nodes``, unless an override sets one of them.

        Raises:
            ConfigError: the configuration is wrong; all its problems in one report.
        """
        keys = ("trainer.devices", "trainer.num_nodes")
        started = read_rank_environment().world_size
        overridden = any(override.partition("=")[0] in keys for override in overrides)
        world = () if started == 1 or overridden else (f"{keys[0]}={started}", f"{keys[1]}=1")
        return cls(load_config(source, (*overrides, *world)))

    @cached_property
    def engine(self) -> ParallelEngine:
        """The engine of the configuration, not started.

        Raises:
            WorldSizeMismatch: the number of processes is not the configured one.
        """
        build.check_world_size(self.config)
        return build.engine(self.config)

    @property
    def model(self) -> ParallelModel:
        """Model in its layout, which has been built."""
        if self.built_model is None:
            raise RuntimeError("The session has no model yet. Call start() or build_model() first.")
        return self.built_model

    @property
    def optimizer(self) -> ParallelOptimizer:
        """Optimizer over the model, which has been built."""
        if self.built_optimizer is None:
            raise RuntimeError("The session has no optimizer yet. Call start() or build_optimizer() first.")
        return self.built_optimizer

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.collections.close()
        if kind is None or self.engine.ranks.world_size == 1:  # else other ranks may be stuck in a collective
            self.close()

    def start(self) -> Self:
        """Start the engine, draw fresh weights, and build the optimizer. Collective.

        Raises:
            RanksDisagree: versions, plugins or configurations differ between ranks.
        """
        start_engine(self.config, self.engine)
        self.build_model()
        self.build_optimizer()
        return self

    def close(self) -> None:
        """Leave the process group, and let garbage be collected as before; may be called twice."""
        self.collections.close()
        self.engine.shutdown()

    # The model and where its weights come from.

    def build_model(self, *, resumes: Manifest | None = None) -> None:
        """Build the model in its layout, with its first weights. Collective.

        Args:
            resumes: the checkpoint that :meth:`load_checkpoint` will load, so that what it holds is not drawn.
        """
        free_earlier_runs(self.engine.device)
        seed_all(self.config.run.seed, self.engine.device)
        loads = resumes is not None or self._weights is not None
        fresh = not (loads and self.config.run.checkpoint.strict)  # what a checkpoint lacks keeps its first values
        if resumes is not None and resumes.facts.without_base:
            fresh = self._weights is None
        self.built_model = initialize_parallel_model(self.config, self.engine, materialise=fresh)
        if isinstance(self._weights, Path):
            self.load_foreign(self._weights)
        elif self._weights is not None:
            self.load_checkpoint(*self._weights, weights_only=True)
        adapters = build.adapters(self.config)
        if resumes is None:
            for adapter in adapters:
                adapter.begin(self.model, self.config, self.engine.ranks)
        if adapters and build.added_tokens(self.config):
            self._note_frozen_rows()
        if self._traits.reference == "step":
            check_base_frozen(self.model, self.config.run.objective.name)
        if self.objective.teacher is not None:
            teacher = teacher_of(self.objective, self.config, self.engine)
            self.objective.take_teacher(teacher, pipelined=self.engine.rank_info.mesh.get("pp", 1) > 1)

    def _note_frozen_rows(self) -> None:
        """Warn where the rows of tokens that the configuration adds are frozen. Collective."""
        rows, trained = build.model_builder(self.config).vocab_size, trained_parameters(self.model)
        tables = [name for name, weight in self.model.state_dict().items() if tuple(weight.shape)[:1] == (rows,)]
        paths = [name.removesuffix(".weight") for name in tables]
        here = [path for path in paths if not any(name.startswith(f"{path}.") for name in trained)]
        ranks = self.engine.ranks
        frozen = [*dict.fromkeys(chain.from_iterable(ranks.all_gather_object(here)))]
        if frozen and ranks.rank == 0:
            key = "adapter.modules_to_save" if self.config.run.model.trainable is None else "model.trainable"
            _log.warning(
                "The rows of the tokens in data.tokenizer.added_tokens are frozen in %s. To train them, set %s=[%s].",
                listing(frozen),
                key,
                ", ".join(path.rpartition(".")[2] for path in frozen),
            )

    def build_optimizer(self) -> None:
        """Build the optimizer over the model. Collective."""
        self.built_optimizer = initialize_parallel_optimizer(self.config, self.engine, self.model)
        component = self.config.selected("objective").component
        if component.plugin != BUILTIN:
            watch_objective(self.objective, self.optimizer.inner, component)

    def load_foreign(self, path: Path) -> None:
        """Load the weights of another program's checkpoint, such as a Hugging Face directory, into the model.

        Collective: every rank reads the parameters of which it holds a part.

        Args:
            path: checkpoint of another program, in an installed format.

        Raises:
            CheckpointNotSigned: ``checkpoint.sign.trusted`` requires a signature.
        """
        from nxdt_core.checkpoint.signing import refuse_foreign

        refuse_foreign(build.trusted_keys(self.config), path)
        strict = self.config.run.checkpoint.strict
        load_foreign(path, config=self.config, engine=self.engine, model=self.model, strict=strict)

    # Data.

    def train_loader(self) -> TrainLoader:
        """Return this rank's share of endless global batches, from the position of ``state`` on."""
        self._add_references()
        return self.data.train_loader(self.engine, self.state.data)

    def validation_loaders(self) -> list[TrainLoader]:
        """Return one loader per validation set, each a single pass over this rank's share."""
        self._add_references()
        return self.data.single_passes(self.engine)

    def test_loaders(self) -> list[TrainLoader]:
        """Return one loader per test set, each a single pass over this rank's share.

        Raises:
            SplitMissing: the configuration names no test data.
        """
        self.data.prepare(test=True)
        self._add_references()
        return self.data.single_passes(self.engine, test=True)

    def batches(self) -> Iterator[StepInput]:
        """Yield this rank's share of each global batch until ``trainer.max_steps`` steps are done.

        The position is that of ``state``, which :meth:`step` advances: a session that loaded a checkpoint continues
        with the batch after its last one.
        """
        batches = iter(self.train_loader())
        while self.state.step < self.config.run.trainer.max_steps:
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _add_references(self) -> None:
        """Add log-probabilities under the run's first weights to each sample, for an objective that compares them.

        Raises:
            ReferenceNeedsLength: of a stream.
            ReferenceLost: the run was resumed, and their file is missing.
        """
        if self._referenced or self._traits.reference != "before":
            return
        self._referenced = True

        def with_log_probs(dataset: Dataset, split: str) -> Dataset:
            if not isinstance(dataset, MapDataset):
                raise ReferenceNeedsLength(objective=self.config.run.objective.name, split=split)
            source = self._weights[1] if isinstance(self._weights, tuple) else self._weights
            first = first_weights_digest(self.config, source) if self.resumed is None else None  # others have changed
            return with_reference(dataset, config=self.config, engine=self.engine, model=self.model, weights=first)

        self.data.replace_datasets(with_log_probs)

    # Steps.

    def step(
        self,
        batch: StepInput | Sequence[Batch],
        *,
        apply: Callable[[], object] | None = None,
        collect: bool = True,
    ) -> StepResult:
        """Take one optimizer step on one global batch: :func:`train_step`, then the average of the weights.

        Args:
            batch: of :meth:`batches`, or this rank's micro-batches from elsewhere, which leave no position in
                ``state``.
            apply: called in place of ``optimizer.step``, by a loop that counts updates itself and ends in it.
            collect: whether garbage is collected after the step, where ``trainer.gc_interval`` says so; a loop that
                still has work to do passes False, and calls ``collections.after_step`` itself.
        """
        self.collections.begin(profile_of(self.engine.device).gc_interval)
        with build.plan_errors_named(self.config):
            objective, micro_batches, generated = self._prepared(batch, train=True)
            result = train_step(
                self.model,
                self.optimizer,
                micro_batches,
                objective,
                self.schedule,
                self.state,
                max_norm=self.config.run.trainer.gradient_clip_val,
                apply=apply,
            )
        if isinstance(batch, StepInput):
            self.state.data = batch.position
        if generated is not None:
            self.state.data = {**self.state.data, "generated": generated}
        if self.average is not None:
            self.average.after_step(self.model, self.state.step)
        if collect:
            self.collections.after_step(self.state.step)
        return result

    def evaluate_batch(self, batch: StepInput | Sequence[Batch]) -> StepLoss:
        """Return the loss of one global batch, forward only. Collective."""
        objective, micro_batches, _ = self._prepared(batch, train=False)
        return self.model.run_eval(micro_batches, objective)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of each validation set by its name, which is empty where there is one. Collective."""
        loaders = self.validation_loaders()
        with self.validated_weights():
            return {
                name: mean_loss(self.evaluate_batch(batch) for batch in loader)
                for name, loader in zip(self.data.validation_sets, loaders, strict=True)
            }

    @contextmanager
    def validated_weights(self) -> Iterator[None]:
        """Let the model hold the averaged weights where ``exp_manager.ema.evaluate_ema_weights_instead`` is set."""
        if not self.average or not self.config.run.exp_manager.ema.evaluate_ema_weights_instead:
            yield
            return
        weights = self.average.swap_in(self.model)
        try:
            yield
        finally:
            self.model.load_state_dict(weights, strict=False)

    def _prepared(self, batch: StepInput | Sequence[Batch], *, train: bool) -> tuple[Objective, Sequence[Batch], Any]:
        """Return the objective of a pass, the micro-batches of ``batch``, or those that the objective generates for
        them, and what of the latter the next step needs. Where the objective needs log-probabilities of the base at
        each step, the micro-batches have them."""
        micro_batches = batch.micro_batches if isinstance(batch, StepInput) else batch
        micro_batches, generated = self.objective.generate(self, micro_batches, train=train)
        if self._traits.reference == "step":
            micro_batches = with_base(micro_batches, self.model, temperature=self._traits.temperature)
        return *self.objective.prepare(micro_batches, self.model), generated

    # Checkpoints.

    def resume(self) -> Manifest | None:
        """Load the newest sound checkpoint of ``checkpoint.uri``, saved in any layout. Collective.

        Returns:
            Its manifest; None where there is none, and the session is left as it was.
        """
        storage, trusted = build.storage(self.config), build.trusted_keys(self.config)
        manifest = checkpoint.latest(storage, warn=_log.warning, ranks=self.engine.ranks, trusted=trusted)
        if manifest is not None:
            self.load_checkpoint(storage, manifest)
        return manifest

    @overload
    def save(
        self,
        to: CheckpointStore | None = None,
        *,
        extra: dict[str, Any] | None = None,
        about: SaveFacts = _NO_FACTS,
        before_commit: Callable[[], None] | None = None,
    ) -> Manifest: ...
    @overload
    def save(
        self,
        to: CheckpointManager,
        *,
        asynchronous: bool,
        extra: dict[str, Any] | None = None,
        about: SaveFacts = _NO_FACTS,
    ) -> bool: ...
    def save(
        self,
        to: CheckpointStore | CheckpointManager | None = None,
        *,
        asynchronous: bool = False,
        extra: dict[str, Any] | None = None,
        about: SaveFacts = _NO_FACTS,
        before_commit: Callable[[], None] | None = None,
    ) -> Manifest | bool:
        """Save weights, optimizer state, counters and random-number generators under ``step-<state.step>``.

        Collective: every rank calls it and writes a share; it succeeds on all or fails on all. A session without an
        optimizer saves weights and counters. ``checkpoint.sign.key`` signs the manifest.

        Args:
            to: a store, or a manager that was made with ``engine.ranks``; None is ``checkpoint.uri``.
            asynchronous: return as soon as the next step may change what is saved, and not only once it is committed.
                Needs a manager. Call ``manager.poll()`` after every step: it raises the errors of a save.
                ``manager.wait()`` ends the last save.
            extra: further JSON-able state of the caller's loop; tensors are allowed as leaves.
            about: metrics of the checkpoint, and how retention treats it.
            before_commit: called on rank 0 directly before the commit; what it raises prevents that on all ranks. That
                of a manager is given to the manager.

        Returns:
            The committed manifest; of a manager, False where it skips saves while one is in flight, and one is.
        """
        config, model, optimizer, ranks = self.config, self.model, self.built_optimizer, self.engine.ranks
        weights, of_optimizer = model.state_dict(), {} if optimizer is None else optimizer.state_dict()
        if optimizer is not None and self._elements is None:
            check_shared_state(of_optimizer, weights, ranks)
        coded = config.run.adapter.base_dtype is not None
        alone = coded or not all(adapter.saves_base for adapter in build.adapters(config))
        if alone:
            weights = without_base(model, weights)
        if config.run.checkpoint.save_bf16:
            weights, masters = round_to_bfloat16(weights, dict(model.named_parameters()))
            of_optimizer |= {} if optimizer is None else masters
        if optimizer is not None and self.average is not None:
            of_optimizer |= self.average.state_dict()
        if self._elements is None:  # of all ranks together
            sizes = {name: math.prod(weight.shape) for name, weight in weights.items()}
            by_name = {name: size for part in ranks.all_gather_object(sizes) for name, size in part.items()}
            self._elements = sum(by_name.values())
        # The optimizer counts what it skipped since this process began, so what is saved has these taken off.
        updates = max(0, self.state.updates - (0 if optimizer is None else int(optimizer.skipped_steps)))
        facts = checkpoint.CheckpointFacts(
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self.state.consumed_tokens,
            updates=updates,
            config=self._saved_config,
            plugin_fingerprint=config.kernel.fingerprint(),
            plugins=config.kernel.identities(),
            mesh=dict(self.engine.rank_info.mesh),
            metrics=dict(about.metrics),
            versions=versions_of(config.kernel),
            keep=about.keep,
            fencing=about.fencing,
            elements=self._elements,
            base=base_digest(model, ranks) if model.added else "",
            without_base=alone,
            hf=self.hf_facts,
        )
        counters, rng = {**self.state.to_dict(), "updates": updates}, capture_rng(self.engine.device)
        parts: dict[str, Any] = {
            "step": self.state.step,
            "model": weights,
            "optimizer": of_optimizer,
            "state": {"train": counters, "rng": rng, "extra": extra or {}},
            "facts": facts,
            "ties": {},
        }
        if isinstance(to, checkpoint.CheckpointManager):
            return to.save(**parts, asynchronous=asynchronous)
        storage = build.storage(config) if to is None else to
        return checkpoint.save(
            storage,
            checkpoint.plan_save(storage, **parts, ranks=ranks),
            ranks=ranks,
            before_commit=None if before_commit is None else lambda manifest: before_commit(),
            signer=build.signer(config),
        )

    def load_checkpoint(
        self,
        storage: CheckpointStore,
        manifest: Manifest,
        *,
        weights_only: bool = False,
        strict: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint and return the ``extra`` of its save.

        Collective: it succeeds on all ranks or fails on all. Every rank reads what it holds in this run's layout, which
        may differ from that of the save. If it is the same, random-number generators continue where they stopped. A
        checkpoint of another layout has none for these ranks, and they are left as they are.

        Args:
            storage: the store that holds the checkpoint.
            manifest: of the step to load; see :func:`nxdt_core.checkpoint.latest`.
            weights_only: leave optimizer state, average, counters and generators as they are. A session that has no
                optimizer loads weights and counters.
            strict: refuse a checkpoint that lacks parameters of the model or has others; otherwise what it lacks stays
                as it is, what else it has is left out, and a warning names both. None is ``checkpoint.strict``.

        Raises:
            AdapterOfAnotherBase: it leaves out what is frozen, and that is something else here.
            WeightsDoNotFit: names or shapes differ.
            OptimizerChanged: the optimizer is another one, and ``checkpoint.optimizer_on_change`` is ``error``.
            CheckpointDamaged: a file is not what was written, or the state is not that of a run.
        """
        config, model, ranks, where = self.config, self.model, self.engine.ranks, build.step_uri(storage, manifest.step)
        if strict is None:
            strict = config.run.checkpoint.strict
        optimizer = None if weights_only else self.built_optimizer
        continues = optimizer is None or continues_optimizer(config, manifest, where)
        more_rows = optimizer is None and build.added_tokens(config)  # than the table of a checkpoint without them has
        try:
            weights = load_weights(
                storage,
                manifest,
                engine=self.engine,
                model=model,
                strict=strict,
                with_optimizer=optimizer is not None,
                table_rows=build.model_builder(config).vocab_size if more_rows else None,
            )
            # The state without tensors is that of this rank, or of rank 0 where the layout is another.
            same_layout = dict(manifest.facts.mesh) == dict(self.engine.rank_info.mesh)
            same_layout &= checkpoint.saved_ranks(manifest) == ranks.world_size
            saved = checkpoint.load_state(storage, manifest, rank=ranks.rank if same_layout else 0, ranks=ranks)
            if optimizer is not None:
                of_optimizer = checkpoint.load_optimizer_like(
                    storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict
                )
                suffix = f"/{MASTER_WEIGHT}"  # the wider weights of :func:`round_to_bfloat16`
                wider = [key for key in of_optimizer if key.endswith(suffix)]
                model.load_state_dict({key.removesuffix(suffix): of_optimizer.pop(key) for key in wider}, strict=False)
                averaged = pop_average(of_optimizer)
                if self.average is not None:
                    self.average.load_state_dict(averaged)
                if continues:
                    optimizer.load_state_dict(of_optimizer)
        except WeightsDoNotFit as error:  # say which keys of the model differ between the two
            before = manifest.facts.config.get("model", {})
            before = before if isinstance(before, Mapping) else {}
            shown, values = config.to_dict()["model"], config.to_values()["model"]
            cls: Any = type(config.selected("model").config)
            keys = [key for key in ("name", *keys_of(cls)) if key in before]
            differing = [key for key in keys if before[key] not in (shown.get(key), values.get(key))]
            error.saved = [f"model.{key}={before[key]}" for key in differing]
            error.resumes = storage.uri == build.storage(config).uri
            raise
        try:
            if optimizer is not None and same_layout:
                restore_rng(saved["rng"], self.engine.device)
            if not weights_only:
                self.state.update(saved["train"])
                self.resumed = manifest
            extra: dict[str, Any] = saved["extra"]
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # no run has written it
            reason = f"its state is not that of a run ({type(error).__name__}: {error})"
            raise CheckpointDamaged(where=where, reason=reason) from error
        return extra

    @cached_property
    def hf_facts(self) -> Mapping[str, Any]:
        """Facts on the model's use from the Hugging Face directory that the weights came from; empty without one."""
        for manifest in (self.resumed, self._weights[1] if isinstance(self._weights, tuple) else None):
            if manifest is not None and manifest.facts.hf:
                return manifest.facts.hf
        if not isinstance(self._weights, Path):
            return {}
        from nxdt_core.checkpoint.foreign import format_of

        is_hf = format_of(self._weights, self.config.kernel) == "hf"
        return read_hf_source(self._weights).facts() if is_hf else {}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end what the model writes: those of the tokenizer and of the chat template, and those that the
        Hugging Face directory of the weights names. Empty without a tokenizer."""
        tokenizer, source = self.data.tokenizer, HFSource.of_facts(self.hf_facts)
        if tokenizer is None:
            return frozenset()
        theirs = () if source is None else source.stops_of(tokenizer)
        return frozenset((*stop_ids(build.chat_keys(self.config), tokenizer), *theirs))
