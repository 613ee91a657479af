"""Builds the objects of a run from a resolved configuration, and names its plan and directory in errors."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.checks import check_capabilities
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.distributed.devices import profile_of, register_profile_of
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.errors import NxdtError
from nxdt_core.errors.launch import TensorPlanUnusable
from nxdt_core.errors.layouts import ShardNotComputed
from nxdt_core.errors.models import HeadDoesNotFit, SequenceTooLongForModel, VocabularyTooSmall
from nxdt_core.errors.ranks import WorldSizeMismatch
from nxdt_core.errors.training import CannotWriteRunDirectory, TrainableEmpty
from nxdt_core.kernel.plugin import BUILTIN, LOCAL
from nxdt_core.models.patterns import matches_within
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, IterableDataset, MapDataset
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.schedule import LRSchedule, ScheduleFactory, ScheduleHorizon
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.system.paths import scheme_of
from nxdt_core.train.hidden_state import check_schedule

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Signer, TrustedKeys


T = TypeVar("T")


class Trainable(Adapter):
    """An :class:`~nxdt_core.protocols.adapter.Adapter` that adds nothing; ``config`` is ``model.trainable``."""

    def __init__(self, config: Sequence[str]) -> None:
        self._patterns = config

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze the parameters that no pattern matches, in place.

        Raises:
            TrainableEmpty: a pattern matches no parameter, or there is none.
        """
        names = [name for name, _ in module.named_parameters()]
        empty = [pattern for pattern in self._patterns if not any(matches_within(pattern, name) for name in names)]
        if empty or not self._patterns:
            paths = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))  # equal layers are one
            close = [path for pattern in empty for path in difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)]
            raise TrainableEmpty(patterns=empty, nearest=list(dict.fromkeys(close)) or paths)
        for name, parameter in module.named_parameters():
            chosen = any(matches_within(pattern, name) for pattern in self._patterns)
            parameter.requires_grad_(parameter.requires_grad and chosen)
        return plan


@contextmanager
def run_dir_explained(config: ResolvedConfig) -> Iterator[None]:
    """Turn an ``OSError`` of the block into :class:`CannotWriteRunDirectory`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(config.run_dir, error) from error


def cannot_write(run_dir: Path, error: OSError) -> NxdtError:
    """Return the error of a run whose directory cannot be written; its reason names the file, if the system does."""
    reason = error.strerror or str(error)
    name = os.path.relpath(os.fsdecode(error.filename), run_dir) if error.filename is not None else "."
    if name.partition(os.sep)[0] not in (".", ".."):
        reason = f"{name}: {reason}"
    return CannotWriteRunDirectory(path=str(run_dir), reason=reason)


def check_world_size(config: ResolvedConfig) -> None:
    """Refuse a number of processes that differs from the configuration.

    Raises:
        WorldSizeMismatch: the number differs.
    """
    place, trainer = read_rank_environment(), config.run.trainer
    if place.world_size != trainer.devices * trainer.num_nodes:
        raise WorldSizeMismatch(
            launcher=place.launcher or "The command",
            found=place.world_size,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
        )


def engine(config: ResolvedConfig) -> ParallelEngine:
    """Return the parallel engine, not started; checked against the number of processes that were started.

    Raises:
        ConfigError: the engine, the model or the optimizer does not declare what the run asks of them.
        BadDeviceProfile: see :func:`register_profile_of`.
    """
    check_capabilities(config, world_size=Ranks.from_environment().world_size)
    register_profile_of(config)
    return config.selected("engine").component.load_class(ParallelEngine)(config)


def model_builder(config: ResolvedConfig) -> ModelBuilder:
    """Return the model's builder, checked against the run's sequence length.

    Raises:
        SequenceTooLongForModel: positions end before the sequence does.
    """
    builder = _construct(config, "model", ModelBuilder)
    longest = builder.max_sequence_length
    if longest is not None and config.run.data.seq_length > longest:
        raise SequenceTooLongForModel(sequence=config.run.data.seq_length, longest=longest)
    return builder


def window(config: ResolvedConfig) -> int:
    """Return how many tokens the model sees at once: its positions; ``data.seq_length`` where these have no bound."""
    longest = model_builder(config).max_sequence_length
    return config.run.data.seq_length if longest is None else longest


@contextmanager
def plan_errors_named(config: ResolvedConfig) -> Iterator[None]:
    """Say in errors of the model's plan which plugin brought the model."""
    try:
        yield
    except (TensorPlanUnusable, ShardNotComputed) as error:
        component = config.selected("model").component
        origin = component.dist if component.dist == LOCAL else f"{component.dist} {component.version}"
        error.plugin = f"{component.qualified_name!r} ({origin})"
        raise


def tokenizer(config: ResolvedConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Return the tokenizer, or None where the configuration names none.

    Raises:
        VocabularyTooSmall: the tokenizer has ids that a model of ``vocab_size`` has no row for.
    """
    if config.components["tokenizer"] is None:
        return None
    added = added_tokens(config)
    if vocab_size is not None and len(added) > vocab_size:  # before a library takes a minute for a million of them
        raise VocabularyTooSmall(tokenizer=len(added), model=vocab_size, added=True)
    made = _construct(config, "tokenizer", Tokenizer)
    if vocab_size is not None and made.vocab_size > vocab_size:
        raise VocabularyTooSmall(tokenizer=made.vocab_size, model=vocab_size, added=bool(added))
    return made


def added_tokens(config: ResolvedConfig) -> Sequence[str]:
    """Return the tokens that the configuration adds to its tokenizer; with some, weights may lack rows for them."""
    tokens: Sequence[str] = config.tree.get("data.tokenizer.added_tokens", ())
    return tokens


def dataset(
    config: ResolvedConfig,
    tokenizer: Tokenizer | None,
    vocab_size: int | None = None,
    *,
    cache_dir: Path | None = None,
    first_records: int | None = None,
) -> DatasetSplits:
    """Return the source of samples, for a model of ``vocab_size`` rows; what it derives from its files may be in
    ``cache_dir``, for the other processes of the machine. ``first_records`` reads only so many of a split."""
    data = config.run.data
    context = DataContext(
        seq_length=data.seq_length,
        seed=config.run.seed,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        vocab_size=vocab_size,
        first_records=first_records,
        shuffle=data.shuffle,
    )
    return _construct(config, "dataset", DatasetSplits, context)


def batches(
    config: ResolvedConfig, engine: ParallelEngine, dataset: MapDataset | IterableDataset, *, repeat: bool = True
) -> GlobalBatchLoader:
    """Return the loader of this rank's micro-batches: its data-parallel share of each of the run's global batches.

    Args:
        config: the run; its ``data`` section has the sizes.
        engine: says which share is this rank's; need not be started.
        dataset: one split of the data.
        repeat: True for training: shuffled where the configuration says so, without an end. False is one pass in the
            data's own order, for validation.
    """
    data, place = config.run.data, engine.rank_info
    return GlobalBatchLoader(
        dataset,
        global_batch_size=data.global_batch_size,
        micro_batch_size=data.micro_batch_size,
        seed=config.run.seed,
        shuffle=data.shuffle and repeat and not config.run.trainer.overfit_batches,
        dp_rank=place.dp_rank,
        dp_size=place.dp_size,
        drop_last=repeat,
        repeat=repeat,
        num_workers=data.num_workers,
        constant_micro_batches=profile_of(engine.device).static_shapes,
    )


def chat_keys(config: ResolvedConfig) -> ChatKeys:
    """Return how the run's data make text of messages and begin texts; the defaults where they hold no messages."""
    section = config.selected("dataset").config
    return section if isinstance(section, ChatKeys) else ChatKeys(add_bos=config.tree.get("data.add_bos") is True)


def objective(config: ResolvedConfig) -> Objective:
    """Return the configured loss.

    Raises:
        HeadDoesNotFit: the model's head gives something else than it takes.
    """
    made = _construct(config, "objective", Objective)
    wanted, model = made.traits.head == "score", config.selected("model")
    if config.tree.get("model.score_head", False) != wanted:
        takes, key, value = ("scores" if wanted else "logits of a vocabulary"), "score_head", str(wanted).lower()
        if f"model.{key}" not in config.tree:
            key, value = "name", "a model with the key score_head, such as llama"
        name = config.run.objective.name
        raise HeadDoesNotFit(objective=name, takes=takes, model=model.component.record.name, key=key, value=value)
    return made


def precision(config: ResolvedConfig) -> PrecisionPolicy:
    """Return the configured dtypes.

    Raises:
        ConfigError: the engine does not declare what it asks for.
    """
    selected = config.selected("precision")
    policy: PrecisionPolicy = selected.component.load_target()(selected.config)
    return policy


def adapters(config: ResolvedConfig) -> Sequence[Adapter]:
    """Return the adapter, or what freezes for ``model.trainable``, as a sequence of none or one."""
    if config.run.model.trainable is not None:
        return (Trainable(config.run.model.trainable),)
    return () if config.components["adapter"] is None else (_construct(config, "adapter", Adapter),)


def schedule(config: ResolvedConfig) -> LRSchedule:
    """Return the learning-rate schedule; warn if it depends on more than the step."""
    optim, selected = config.run.model.optim, config.selected("schedule")
    horizon = ScheduleHorizon(max_steps=optim.sched.max_steps, lr=optim.lr)
    make: ScheduleFactory = selected.component.load_target()
    if selected.component.plugin != BUILTIN:
        check_schedule(make(selected.config, horizon), selected.component, max_steps=horizon.max_steps)
    return make(selected.config, horizon)


def storage(config: ResolvedConfig) -> CheckpointStore:
    """Return the store that holds the run's checkpoints."""
    return locate(config, config.checkpoint_uri)[0]


def locate(config: ResolvedConfig, uri: str) -> tuple[CheckpointStore, int | None]:
    """Return the store behind ``uri`` and the step that it names, None where it names the root of a run's checkpoints.

    The options of ``checkpoint.storage`` apply to URIs with the same scheme as the run's URI.
    """
    same_scheme = scheme_of(uri) == scheme_of(config.checkpoint_uri)
    return checkpoint.locate(uri, config.kernel, config.selected("store").config if same_scheme else None)


def signer(config: ResolvedConfig) -> Signer | None:
    """Return what signs the run's checkpoints; None where ``checkpoint.sign.key`` is not set."""
    key = config.run.checkpoint.sign.key
    return None if key is None else checkpoint.Signer(key)


def trusted_keys(config: ResolvedConfig) -> TrustedKeys | None:
    """Return the keys, one of which must have signed what the run loads; None where ``checkpoint.sign.trusted`` is
    empty."""
    paths = config.run.checkpoint.sign.trusted
    return checkpoint.TrustedKeys(paths) if paths else None


def check_signing(config: ResolvedConfig) -> None:
    """Check that the keys of the run can be read, before it computes anything.

    Raises:
        SigningLibraryMissing: the library is not installed.
        SigningKeyUnusable: a file does not hold such a key.
        SigningKeyNotTrusted: the run would refuse its own checkpoints.
    """
    signs, trusted = signer(config), trusted_keys(config)
    if trusted is not None:
        _ = trusted.fingerprints
    if signs is not None and config.run.checkpoint.enabled:
        signs.check(trusted)


def step_uri(storage: CheckpointStore, step: int) -> str:
    """Address of one checkpoint of a store."""
    return f"{storage.uri}/{step_name(step)}"


def _construct(config: ResolvedConfig, slot: str, base: type[T], *more: Any) -> T:
    selected = config.selected(slot)
    target: Callable[..., T] = selected.component.load_class(base)
    return target(selected.config, *more)
