"""The run that a configuration describes: what ``nxdt train`` calls, in terms of the Lightning classes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from pytorch_lightning.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Ownership
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.fields.duration import seconds_of
from nxdt_core.devices import profile_of
from nxdt_core.distributed.device_settings import ignored_settings
from nxdt_core.garbage_collection import collect_as_usual
from nxdt_core.kernel.contexts import ConfigureContext
from nxdt_core.kernel.discovery.lightning_callbacks import (
    check_lightning_callbacks,
    lightning_callbacks,
    lightning_notes,
)
from nxdt_core.nn.flops import token_flops
from nxdt_core.progress import PROGRESS
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.regular_files import make_directory, require_plain_files
from nxdt_core.training import build
from nxdt_core.training.callbacks.adapter_finish import AdapterFinish
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.metrics import MetricsWriter
from nxdt_core.training.callbacks.save_figures import SaveFigures
from nxdt_core.training.callbacks.signals import StopSignals, Supervisor
from nxdt_core.training.callbacks.time_limit import TimeLimit
from nxdt_core.training.lightning.datamodule import NxdtDataModule
from nxdt_core.training.lightning.module import NxdtModule
from nxdt_core.training.lightning.strategy import NxdtStrategy
from nxdt_core.training.monitoring.callback import MonitorReports
from nxdt_core.training.monitoring.monitor import Monitor, monitored
from nxdt_core.training.run.banner import banner
from nxdt_core.training.run.callback_order import run_callbacks
from nxdt_core.training.run.epochs import counts_passes, in_steps
from nxdt_core.training.run.fast_dev_run import as_trial
from nxdt_core.training.run.files import dated, keep_inputs, other_source, run_dir_explained
from nxdt_core.training.run.log import printed, run_log
from nxdt_core.training.run.metric_files import FigureFiles
from nxdt_core.training.run.out_of_memory import memory_errors_explained
from nxdt_core.training.run.ownership import owned_on_rank_zero
from nxdt_core.training.run.resume_command import resume_command
from nxdt_core.training.run.start import (
    ForeignStart,
    Start,
    check_adapter,
    check_versions,
    decide_base,
    decide_start,
    with_start_step,
)
from nxdt_core.training.run.summary import RunSummary
from nxdt_core.training.weights.saved_optimizer import continues_optimizer

__all__ = ["train"]

_log = logging.getLogger(__name__)


def train(config: ResolvedConfig, supervisor: Supervisor | None = None) -> RunSummary:
    """Train, save, and report; on each rank of a run.

    Args:
        config: equal on all ranks.
        supervisor: watches this rank and asks it to stop; None in a run of one process.

    Raises:
        NxdtError: something that the user can fix; what was committed before stays.
    """
    PROGRESS.spent("import")
    _quieten_lightning()
    if supervisor is not None:
        supervisor.watch(config.run.distributed_strategy.timeout_s)
    strategy = NxdtStrategy(config)
    strategy.start()
    PROGRESS.spent("devices")
    ranks = strategy.engine.ranks
    config = strategy.config = as_trial(dated(config, ranks))
    console = Console(
        config.run.trainer.max_steps,
        speaks=strategy.is_global_zero,
        bar=config.run.trainer.enable_progress_bar,
        prints=config.run.exp_manager.log_format == "text",
    )
    own = build.storage(config)
    ranks.on_rank_zero(lambda: build.check_signing(config))
    # Nothing below the run's directory changes before it is owned: another run may use it.
    with printed(config, strategy.engine.rank_info), owned_on_rank_zero(config, own, console.say, ranks) as ownership:
        if supervisor is not None:
            supervisor.keep_stacks_in(config.run_dir)
        config.kernel.hooks.nxdt_configure(
            ConfigureContext(config=config.to_dict(), components=_names(config), run_dir=config.run_dir)
        )
        with run_log(config, strategy.engine.rank_info), monitored(config, ranks) as monitor:
            if monitor.url is not None:
                console.say(f"serving {monitor.url}/metrics and {monitor.url}/health")
            if config.run.checkpoint.enabled:
                ranks.on_rank_zero(lambda: checkpoint.check_writable(own))
            summary = _train(config, strategy, console, own, ownership, supervisor, monitor)
            # A run that is stopped before its end has saved a checkpoint, unless it saves none.
            monitor.enter("finished" if summary.exit_status == 0 or summary.step >= summary.max_steps else "stopped")
            return summary


def _train(
    config: ResolvedConfig,
    strategy: NxdtStrategy,
    console: Console,
    own: CheckpointStorage,
    ownership: Ownership | None,
    supervisor: Supervisor | None,
    monitor: Monitor,
) -> RunSummary:
    ranks, profile = strategy.engine.ranks, profile_of(strategy.engine.device)
    signals = StopSignals(console, ranks, supervisor)
    limit = config.run.trainer.max_time
    time_limit = [] if limit is None else [TimeLimit(seconds_of(limit), signals)]
    other = other_source(config)
    ranks.on_rank_zero(lambda: keep_inputs(config))
    data = NxdtDataModule(config)
    start = decide_start(config, own, console.say, ranks)
    if other is not None and _resumes(start) and start.storage.uri == own.uri:
        console.say(f"this resumes the run of {other}; set name to give {config.source} a run with its own directory")
    if isinstance(start, Start):
        check_adapter(config, start)
        if _resumes(start):
            check_versions(config, start, console.say)
            continues_optimizer(config, start.manifest, build.step_uri(start.storage, start.manifest.step))
    if counts_passes(config):
        data.prepare()
        config = in_steps(config, data.train_samples)
        console.expect(config.run.trainer.max_steps)
    if _resumes(start) and start.manifest.step >= config.run.trainer.max_steps:
        console.say(f"step {start.manifest.step}: nothing to do, trainer.max_steps is {config.run.trainer.max_steps}")
        if start.storage.uri == own.uri:
            for adapter in build.adapters(config):
                adapter.finish(build.step_uri(own, start.manifest.step), config, ranks)
        strategy.engine.shutdown()
        monitor.row({"step": start.manifest.step, "consumed_tokens": start.manifest.facts.consumed_tokens})
        monitor.checkpoint(start.manifest.step, start.manifest.created)
        monitor.expect(config.run.trainer.max_steps)
        return _finished(config, start)
    base = decide_base(config, start, console.say, ranks) if _resumes(start) else None
    config = with_start_step(config, base or start)
    monitor.expect(config.run.trainer.max_steps)
    if strategy.is_global_zero:
        for line in banner(config, strategy.engine):
            console.say(line)
    for note in ignored_settings(config.run, profile):
        console.say(f"note: {note}")
    module = NxdtModule(config, logs_metrics=False)
    module.announce = console.say
    data.prepare()
    loggers: list[Logger] = []
    ranks.on_rank_zero(lambda: loggers.extend(_built(selected, config.run_dir) for selected in config.loggers))
    files = FigureFiles(config.run_dir if strategy.is_global_zero else None, signals.fail)
    figures = SaveFigures(files)
    metrics = _metrics(config, console, files, figures)
    factories = lightning_callbacks()
    check_lightning_callbacks(config.kernel.policy, factories)
    for note in lightning_notes(factories):
        console.say(note)
    _log.info("plugins %s", config.kernel.fingerprint())
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=strategy.lightning_accelerator,
        devices=1,
        plugins=[LightningEnvironment()],  # else Lightning looks for launchers itself, and refuses `srun --ntasks`
        max_steps=config.run.trainer.max_steps,
        # Without this Lightning counts passes, and reading its estimate of steps resets the data (its issue 20550).
        max_epochs=-1,
        val_check_interval=config.run.trainer.val_check_interval,
        check_val_every_n_epoch=None,
        limit_val_batches=_val_batches(config),
        num_sanity_val_steps=config.run.trainer.num_sanity_val_steps,
        inference_mode=config.run.trainer.inference_mode,
        logger=loggers or False,
        profiler=_profiler(config, strategy.global_rank),
        detect_anomaly=config.run.trainer.detect_anomaly,
        callbacks=[
            *run_callbacks(config, own, ownership, console, metrics, figures, signals),
            AdapterFinish(config, lambda module: _within_store(own, _last_checkpoint(own, module, start))),
            *time_limit,
            *([MonitorReports(monitor, metrics)] if monitor.wanted else []),
            signals,
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        collect_as_usual()
        with memory_errors_explained(config, module):
            trainer.fit(module, data, ckpt_path=_prepare_start(module, start, base, console))
    except SystemExit as left:  # what Lightning makes of a second Ctrl-C
        if isinstance(left.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        module.session.collections.close()
        console.close()
        strategy.close()
    if signals.failure is not None:
        raise signals.failure
    return _summary(config, own, start, module, metrics, signals)


def _names(config: ResolvedConfig) -> dict[str, str]:
    """``plugin:name`` of the component in each slot that has one."""
    used = {slot: selected.component for slot, selected in config.components.items() if selected is not None}
    return {slot: component.qualified_name for slot, component in used.items()}


def _resumes(start: Start | ForeignStart | None) -> TypeGuard[Start]:
    """Return whether the run resumes with everything, and not with weights alone."""
    return isinstance(start, Start) and not start.weights_only


def _prepare_start(
    module: NxdtModule, start: Start | ForeignStart | None, base: Start | ForeignStart | None, console: Console
) -> str | None:
    """Set what the module starts from; return the path to pass to Lightning."""
    if base is not None:
        _prepare_start(module, base, None, console)
    if start is None:
        return None
    if isinstance(start, ForeignStart):
        console.say(f"starting from the weights of {start.path}")
        module.session.take_foreign_weights(start.path)
        return None
    uri = build.step_uri(start.storage, start.manifest.step)
    if start.weights_only:
        console.say(f"starting from the weights of {uri}")
        module.session.take_weights(start.storage, start.manifest)
        return None
    console.say(f"resuming from {uri}")
    return uri


def _metrics(config: ResolvedConfig, console: Console, files: FigureFiles, figures: SaveFigures) -> MetricsWriter:
    policy = build.precision(config)
    flops = token_flops(build.model_builder(config), config.run.data.seq_length, build.adapters(config))
    return MetricsWriter(
        files,
        console,
        every=config.run.trainer.log_every_n_steps,
        flops=flops,
        compute_dtype=policy.autocast or policy.parameters,
        parameter_norm=config.run.exp_manager.log_parameter_norm,
        more=lambda: figures.row,
    )


def _built(selected: Any, run_dir: Path) -> Any:
    return selected.component.load_target()(selected.config, run_dir)


def _profiler(config: ResolvedConfig, rank: int) -> Profiler | None:
    kinds: dict[str, Callable[..., Profiler]] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }
    wanted = config.run.trainer.profiler
    if wanted is None:
        return None
    directory = config.run_dir / "profile" / f"rank-{rank:05d}"
    with run_dir_explained(config):
        require_plain_files(make_directory(directory.parent) / directory.name)
    return kinds[wanted](dirpath=directory, filename="profile")


def _val_batches(config: ResolvedConfig) -> int | float:
    """Lightning's bound: a count, or 1.0 for all; of a share, the data are cut already."""
    limit = config.run.trainer.limit_val_batches
    if config.run.trainer.val_check_interval is None:
        return 0
    return limit if isinstance(limit, int) else 1.0


def _summary(
    config: ResolvedConfig,
    own: CheckpointStorage,
    start: Start | ForeignStart | None,
    module: NxdtModule,
    metrics: MetricsWriter,
    signals: StopSignals,
) -> RunSummary:
    last_checkpoint = _last_checkpoint(own, module, start)
    resumable = last_checkpoint is not None or bool(config.run.trainer.fast_dev_run)
    return RunSummary(
        step=module.train_state.step,
        max_steps=config.run.trainer.max_steps,
        loss=float(module.last.loss.loss) if hasattr(module, "last") else None,
        consumed_tokens=module.train_state.consumed_tokens,
        tokens_per_s=metrics.typical_tokens_per_s,
        run_dir=config.run_dir,
        checkpoint=last_checkpoint,
        resume_command=resume_command(config, module.train_state.step) if resumable else None,
        exit_status=0 if signals.received is None else 128 + signals.received,
    )


def _finished(config: ResolvedConfig, start: Start) -> RunSummary:
    return RunSummary(
        step=start.manifest.step,
        max_steps=config.run.trainer.max_steps,
        loss=None,
        consumed_tokens=start.manifest.facts.consumed_tokens,
        tokens_per_s=None,
        run_dir=config.run_dir,
        checkpoint=build.step_uri(start.storage, start.manifest.step),
        resume_command=resume_command(config, start.manifest.step),
    )


def _last_checkpoint(own: CheckpointStorage, module: NxdtModule, start: Start | ForeignStart | None) -> str | None:
    """The checkpoint that holds what was trained: the newest of this process, else the one that it resumed from."""
    if module.saved is not None:
        return build.step_uri(own, module.saved.step)
    return build.step_uri(start.storage, start.manifest.step) if _resumes(start) else None


def _within_store(own: CheckpointStorage, uri: str | None) -> str | None:
    """``uri``, where it is in the run's own store and not where the run began."""
    return uri if uri is not None and uri.startswith(f"{own.uri}/") else None


def _quieten_lightning() -> None:
    """Lightning's banners and hints speak of things that a user of ``nxdt`` did not choose."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric)\..*")
