"""The run that a configuration describes: what ``nxdt train`` calls on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING

import torch

from nxdt_core import checkpoint
from nxdt_core.callback import MOMENTS, Callback, Run, uncalled_methods
from nxdt_core.config import ResolvedConfig, Selected
from nxdt_core.config.hub import name_of
from nxdt_core.config.section import seconds_of
from nxdt_core.distributed.devices import profile_of
from nxdt_core.errors.training import CallbackMethodUnknown, NotOurCallback
from nxdt_core.kernel.discovery import exits_explained
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.run.callbacks.metrics import MetricFiles, MetricsWriter, token_flops
from nxdt_core.run.callbacks.stopping import EarlyStop, NonFiniteGuard, StopSignals, TimeLimit
from nxdt_core.run.log import Console, printed, run_log
from nxdt_core.run.report import (
    RunSummary,
    banner,
    ignored_settings,
    memory_errors_explained,
    resume_command,
    resume_notes,
)
from nxdt_core.run.start import (
    ForeignStart,
    Start,
    check_adapter,
    check_versions,
    decide_base,
    decide_start,
    epochs_to_steps,
    fast_dev_run,
    keep_inputs,
    owned_on_rank_zero,
    previous_source,
    with_dated_run_dir,
    with_start_step,
)
from nxdt_core.system.garbage_collection import collect_as_usual
from nxdt_core.system.paths import expand_home
from nxdt_core.system.progress import PROGRESS
from nxdt_core.system.regular_files import make_directory, require_plain_files
from nxdt_core.train import build
from nxdt_core.train.build import run_dir_explained
from nxdt_core.train.data import RunData
from nxdt_core.train.loop import fit
from nxdt_core.train.session import TrainSession
from nxdt_core.train.step import start_engine
from nxdt_core.train.weights.saved_config import continues_optimizer

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, Ownership
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.run.callbacks.monitor import Monitor

# What a run can leave out (checkpoints, the monitor, the profiler) is imported where the run asks for it.


def train(config: ResolvedConfig, supervisor: Client | None = None) -> RunSummary:
    """Train, save, and report; on each rank of a run.

    Args:
        config: equal on all ranks.
        supervisor: this rank's client of the launcher, which watches it and asks it to stop; None in a run of one
            process.

    Raises:
        NxdtError: something that the user can fix; what was committed before stays.
    """
    PROGRESS.spent("import")
    if supervisor is not None:
        supervisor.watch(config.run.distributed_strategy.timeout_s)
    build.check_world_size(config)
    engine = build.engine(config)
    start_engine(config, engine)
    try:
        summary = _run(config, engine, supervisor)
    except BaseException:
        # The groups of several ranks stay: leaving them waits for ranks that are stuck in them, or fails those, too.
        if engine.ranks.world_size == 1:
            engine.shutdown()
        raise
    engine.shutdown()
    return summary


def _run(config: ResolvedConfig, engine: ParallelEngine, supervisor: Client | None) -> RunSummary:
    """Train on a started engine: own the run's directory and its store, and report there."""
    PROGRESS.spent("devices")
    ranks = engine.ranks
    if config.run.exp_manager.use_datetime_version:
        config = with_dated_run_dir(config, ranks)
    if config.run.trainer.fast_dev_run:
        config = fast_dev_run(config)
    wanted, monitoring = config.run.checkpoint, config.run.exp_manager.monitoring
    loads = wanted.resume_if_exists or wanted.resume_from is not None
    if loads and wanted.resume_from is None and wanted.resume_ignore_no_checkpoint and not wanted.enabled:
        # There is nothing to load where a directory does not exist.
        loads = "://" in config.checkpoint_uri or ranks.broadcast_object(expand_home(config.checkpoint_uri).exists())
    store = None
    if wanted.enabled or loads:
        store = build.storage(config)
        ranks.on_rank_zero(lambda: build.check_signing(config))
    monitors: AbstractContextManager[Monitor | None] = nullcontext()
    if any(output is not None for output in (monitoring.port, monitoring.health_file, monitoring.metrics_file)):
        from nxdt_core.run.callbacks.monitor import monitored

        monitors = monitored(config, ranks)
    console = Console(
        config.run.trainer.max_steps,
        speaks=ranks.rank == 0,
        bar=config.run.trainer.enable_progress_bar,
        prints=config.run.exp_manager.log_format == "text",
    )
    # Nothing below the run's directory changes before it is owned: another run may use it.
    with printed(config, engine.rank_info), owned_on_rank_zero(config, store, console.say, ranks) as ownership:
        if supervisor is not None:
            supervisor.run_dir = config.run_dir
        with run_log(config, engine.rank_info), monitors as monitor, exits_explained():
            if monitor is not None and monitor.url is not None:
                console.say(f"serving {monitor.url}/metrics and {monitor.url}/health")
            if store is not None and wanted.enabled:
                ranks.on_rank_zero(lambda: checkpoint.check_writable(store))
            signals = StopSignals(console, ranks, supervisor)
            return _train(config, engine, console, store, ownership, signals, monitor)


def _train(
    config: ResolvedConfig,
    engine: ParallelEngine,
    console: Console,
    store: CheckpointStore | None,
    ownership: Ownership | None,
    signals: StopSignals,
    monitor: Monitor | None,
) -> RunSummary:
    """Train in a directory that this run owns: from the decision where it begins to its summary."""
    ranks, say = engine.ranks, console.say

    # Where the run begins.
    other = None if store is None else previous_source(config)
    ranks.on_rank_zero(lambda: keep_inputs(config))
    start = None if store is None else decide_start(config, store, say, ranks)
    resumed, saved = None, None
    if isinstance(start, Start):
        resumed = None if start.weights_only else start
        if other is not None and resumed is not None and store is not None and start.storage.uri == store.uri:
            say(f"this resumes the run of {other}; set name to give {config.source} a run with its own directory")
        check_adapter(config, start)
    if resumed is not None:
        saved = build.step_uri(resumed.storage, resumed.manifest.step)
        check_versions(config, resumed, say)
        continues_optimizer(config, resumed.manifest, saved)

    # How long it is.
    data, trainer = RunData(config), config.run.trainer
    in_epochs = (trainer.max_epochs, trainer.min_epochs, trainer.check_val_every_n_epoch)
    if any(count is not None and count > 0 for count in (*in_epochs, config.run.checkpoint.every_n_epochs)):
        data.prepare()
        config = epochs_to_steps(config, data.train_samples)
        steps, passes, batch = config.run.trainer.max_steps, trainer.max_epochs, config.run.data.global_batch_size
        if passes and 0 < (left := passes * (data.train_samples or 0) - steps * batch) < batch:
            say(
                f"note: trainer.max_epochs {passes} takes {steps} steps of {batch} samples;"
                f" the last {left} samples do not fill a step and are not trained on"
            )
        console.max_steps = steps
    max_steps = config.run.trainer.max_steps
    if monitor is not None:
        monitor.max_steps = max_steps
    if resumed is not None and resumed.manifest.step >= max_steps:
        step, tokens = resumed.manifest.step, resumed.manifest.facts.consumed_tokens
        of_this_run = store is not None and resumed.storage.uri == store.uri
        place = "" if of_this_run else f" of {resumed.storage.uri}"
        instead = "set another name" if of_this_run else "set checkpoint.weight_init_only to start from its weights"
        say(f"step {step}{place}: nothing to do, trainer.max_steps is {max_steps}; raise it, or {instead}")
        if of_this_run:
            for adapter in build.adapters(config):
                adapter.finish(saved, config, ranks)
        if monitor is not None:
            monitor.row({"step": step, "consumed_tokens": tokens})
            monitor.checkpoint(step, resumed.manifest.created)
            monitor.enter("finished")
        return RunSummary(
            step=step,
            max_steps=max_steps,
            loss=None,
            consumed_tokens=tokens,
            tokens_per_s=None,
            run_dir=config.run_dir,
            checkpoint=saved,
            resume_command=resume_command(config, step),
        )
    base = None if resumed is None else decide_base(config, resumed, say, ranks)
    source = base or start
    if source is not None:
        config = with_start_step(config, source)
    if ranks.rank == 0:
        for line in banner(config, engine):
            say(line)
    for note in ignored_settings(config.run, profile_of(engine.device)):
        say(f"note: {note}")
    PROGRESS.spent("setup")

    # Data, session and callbacks.
    data.prepare()
    PROGRESS.spent("data")
    weights: tuple[CheckpointStore, Manifest] | Path | None = None
    if isinstance(source, ForeignStart):
        weights = source.path
    elif source is not None and source.weights_only:
        weights = (source.storage, source.manifest)
    session = TrainSession(config, engine=engine, data=data, weights=weights)
    policy, saver, profiler, compile_time, reports = build.precision(config), None, None, None, None
    flops = token_flops(build.model_builder(config), config.run.data.seq_length, build.adapters(config))
    files = MetricFiles(config.run_dir if ranks.rank == 0 else None, signals.fail)
    if store is not None and config.run.checkpoint.enabled:
        from nxdt_core.run.callbacks.checkpoints import CheckpointSaver

        saver = CheckpointSaver(store, config, files, ownership)
    metrics = MetricsWriter(
        files,
        console,
        flops=flops,
        compute_dtype=policy.autocast or policy.parameters,
        more=dict if saver is None else saver.save_metrics.columns,
    )
    observers = _built(config.callbacks, config.run_dir)
    ranks.on_rank_zero(lambda: observers.update(_built(config.loggers, config.run_dir)))
    if config.run.trainer.profiler is not None:
        from nxdt_core.run.callbacks.profiler import Profiler

        directory = config.run_dir / "profile" / f"rank-{ranks.rank:05d}"
        with run_dir_explained(config):
            require_plain_files(make_directory(directory.parent) / directory.name)
        profiler = Profiler(config.run.trainer.profiler, directory)
    if config.run.model.compile or policy.stochastic_rounding:
        from nxdt_core.run.callbacks.profiler import CompileTime

        compile_time = CompileTime()
    if monitor is not None and monitor.enabled:
        from nxdt_core.run.callbacks.monitor import MonitorReports

        reports = MonitorReports(monitor, metrics)
    stopping, max_time = config.run.exp_manager.early_stopping_callback_params, config.run.trainer.max_time
    # The metrics first, then what acts on them, then saving; what stops the run on request comes after all of them.
    callbacks: dict[str, Callback | None] = {
        "profiler": profiler,
        "compile time": compile_time,
        "metrics": metrics,
        "nonfinite": NonFiniteGuard() if config.run.trainer.nonfinite == "stop" else None,
        **observers,
        "early stopping": EarlyStop(stopping, min_steps=config.run.trainer.min_steps or 0)
        if config.run.exp_manager.create_early_stopping_callback
        else None,
        "checkpoints": saver,
        "time limit": TimeLimit(seconds_of(max_time), signals) if max_time is not None else None,
        "monitor": reports,
        "signals": signals,
    }
    used = {name: callback for name, callback in callbacks.items() if callback is not None}
    run = Run(session, say, used, frozenset(observers))
    try:
        collect_as_usual()
        with memory_errors_explained(session):
            # Weights, model and optimizer.
            if isinstance(weights, Path):
                say(f"starting from the weights of {name_of(weights) or weights}")
            elif weights is not None:
                say(f"starting from the weights of {build.step_uri(weights[0], weights[1].step)}")
            if saved is not None:
                say(f"resuming from {saved}")
            say("building the model")
            PROGRESS.spent("setup")
            session.build_model(resumes=None if resumed is None else resumed.manifest)
            PROGRESS.spent("weights")
            session.build_optimizer()
            PROGRESS.spent("build")
            if resumed is not None:
                say(f"loading step {resumed.manifest.step}")
                extra = session.load_checkpoint(resumed.storage, resumed.manifest)
                run.load_state_dict(extra.get("callbacks", {}))
                for line in resume_notes(session, extra.get("horizon", config.run.model.optim.sched.max_steps)):
                    say(line)
                PROGRESS.spent("weights")
            with torch.autograd.set_detect_anomaly(config.run.trainer.detect_anomaly):
                fit(run)
        if store is not None and run.saved is not None:
            saved = build.step_uri(store, run.saved.step)
        for adapter in build.adapters(config):  # writes its files next to a checkpoint of the run's own store
            within = saved is not None and store is not None and saved.startswith(f"{store.uri}/")
            adapter.finish(saved if within else None, config, ranks)
    except BaseException as error:
        run.status, run.error = "failed", error
        raise
    finally:
        run.call("close")
        files.close()
        session.collections.close()
        console.close()

    # The summary.
    if signals.failure is not None:
        raise signals.failure
    if monitor is not None:
        monitor.enter(run.status)
    resumable = saved is not None or bool(config.run.trainer.fast_dev_run)
    rates = metrics.rates[1:] or metrics.rates  # the first interval has the warm-up
    return RunSummary(
        step=run.step,
        max_steps=run.max_steps,
        loss=None if run.last is None else float(run.last.loss.loss),
        consumed_tokens=session.state.consumed_tokens,
        tokens_per_s=median_high(rates) if rates else None,
        run_dir=config.run_dir,
        checkpoint=saved,
        resume_command=resume_command(config, run.step) if resumable else None,
        exit_status=0 if signals.received is None else 128 + signals.received,
    )


def _built(selection: Sequence[Selected], run_dir: Path) -> dict[str, Callback]:
    """Build callbacks and loggers, by the names under which checkpoints keep their state.

    Raises:
        ComponentUnusable: the target of one takes other arguments.
        NotOurCallback: one is a callback of PyTorch Lightning, or something else.
        CallbackMethodUnknown: one has a method that nothing would call.
    """
    callbacks: dict[str, Callback] = {}
    for selected in selection:
        name, target = selected.component.qualified_name, selected.component.load_target()
        try:
            signature(target).bind(selected.config, run_dir)
        except TypeError as error:
            reason = f"it cannot be called as Target(config, run_dir): {error}"
            raise selected.component.unusable("target", reason) from error
        built = target(selected.config, run_dir)
        if not isinstance(built, Callback):
            raise NotOurCallback(name=name, found=built)
        for method in uncalled_methods(built):
            raise CallbackMethodUnknown(name=name, method=method, known=MOMENTS)
        number = 1 + sum(other.partition(" #")[0] == name for other in callbacks)
        callbacks[name if number == 1 else f"{name} #{number}"] = built
    return callbacks
