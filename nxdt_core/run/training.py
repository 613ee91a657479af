"""The run that a configuration describes: what ``nxdt train`` calls on each rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from nxdt_core import checkpoint
from nxdt_core.callback import MOMENTS, Callback, Run, uncalled_methods
from nxdt_core.checkpoint import Ownership
from nxdt_core.config import ResolvedConfig, Selected
from nxdt_core.config.annotations import seconds_of
from nxdt_core.distributed.device_settings import ignored_settings
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.errors.training import CallbackMethodUnknown, NotOurCallback
from nxdt_core.kernel.discovery import exits_explained
from nxdt_core.launch.agreement import check_world_size
from nxdt_core.models.token_flops import token_flops
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.run.callbacks.checkpoints import CheckpointSaver, SaveMetrics
from nxdt_core.run.callbacks.console import Console
from nxdt_core.run.callbacks.metrics import MetricsWriter
from nxdt_core.run.callbacks.monitor import Monitor, MonitorReports, monitored
from nxdt_core.run.callbacks.profiler import CompileTime, Profiler
from nxdt_core.run.callbacks.stopping import EarlyStop, NonFiniteGuard, StopSignals, Supervisor, TimeLimit
from nxdt_core.run.files import (
    keep_inputs,
    owned_on_rank_zero,
    previous_source,
    with_dated_run_dir,
)
from nxdt_core.run.log import printed, run_log
from nxdt_core.run.metric_files import MetricFiles
from nxdt_core.run.out_of_memory import memory_errors_explained
from nxdt_core.run.report import RunSummary, banner, resume_command, resume_notes
from nxdt_core.run.start import (
    ForeignStart,
    Start,
    apply_fast_dev_run,
    check_adapter,
    check_versions,
    counts_epochs,
    decide_base,
    decide_start,
    epochs_to_steps,
    with_start_step,
)
from nxdt_core.system.garbage_collection import collect_as_usual
from nxdt_core.system.progress import PROGRESS
from nxdt_core.system.regular_files import make_directory, require_plain_files
from nxdt_core.train import build
from nxdt_core.train.data import RunData
from nxdt_core.train.loop import fit
from nxdt_core.train.run_dir import run_dir_explained
from nxdt_core.train.session import TrainSession, start_engine
from nxdt_core.train.weights.saved_optimizer import continues_optimizer

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
    if supervisor is not None:
        supervisor.watch(config.run.distributed_strategy.timeout_s)
    with _started(config) as engine:
        PROGRESS.spent("devices")
        ranks = engine.ranks
        config = apply_fast_dev_run(with_dated_run_dir(config, ranks))
        console = Console(
            config.run.trainer.max_steps,
            speaks=ranks.rank == 0,
            bar=config.run.trainer.enable_progress_bar,
            prints=config.run.exp_manager.log_format == "text",
        )
        own = build.storage(config)
        ranks.on_rank_zero(lambda: build.check_signing(config))
        # Nothing below the run's directory changes before it is owned: another run may use it.
        with printed(config, engine.rank_info), owned_on_rank_zero(config, own, console.say, ranks) as ownership:
            if supervisor is not None:
                supervisor.keep_stacks_in(config.run_dir)
            with run_log(config, engine.rank_info), monitored(config, ranks) as monitor, exits_explained():
                if monitor.url is not None:
                    console.say(f"serving {monitor.url}/metrics and {monitor.url}/health")
                if config.run.checkpoint.enabled:
                    ranks.on_rank_zero(lambda: checkpoint.check_writable(own))
                signals = StopSignals(console, ranks, supervisor)
                return _Training(engine, console, own, ownership, signals, monitor).train(config)


@contextmanager
def _started(config: ResolvedConfig) -> Iterator[ParallelEngine]:
    """Start the engine for a block, and stop it. After an error the groups of several ranks stay: leaving them waits
    for ranks that are stuck in them, or fails those, too."""
    check_world_size(config, read_rank_environment())
    engine = build.engine(config)
    start_engine(config, engine)
    try:
        yield engine
    except BaseException:
        if engine.ranks.world_size == 1:
            engine.shutdown()
        raise
    engine.shutdown()


@dataclass(frozen=True, slots=True)
class _Training:
    """A run whose directory and store are owned: from the decision where it begins to its summary."""

    engine: ParallelEngine
    console: Console
    own: CheckpointStore
    ownership: Ownership | None
    signals: StopSignals
    monitor: Monitor

    def train(self, config: ResolvedConfig) -> RunSummary:
        """Train from where the run begins, unless it has nothing left to do."""
        data, start = RunData(config), self._start(config)
        if counts_epochs(config):
            data.prepare()
            trainer, config = config.run.trainer, epochs_to_steps(config, data.train_samples)
            steps, passes, batch = config.run.trainer.max_steps, trainer.max_epochs, config.run.data.global_batch_size
            if passes and 0 < (left := passes * (data.train_samples or 0) - steps * batch) < batch:
                self.console.say(
                    f"note: trainer.max_epochs {passes} takes {steps} steps of {batch} samples;"
                    f" the last {left} samples do not fill a step and are not trained on"
                )
            self.console.set_max_steps(steps)
        self.monitor.max_steps = config.run.trainer.max_steps
        if _resumes(start) and start.manifest.step >= config.run.trainer.max_steps:
            return self._nothing_to_do(config, start)
        base = decide_base(config, start, self.console.say, self.engine.ranks) if _resumes(start) else None
        config = with_start_step(config, base or start)
        if self.engine.ranks.rank == 0:
            for line in banner(config, self.engine):
                self.console.say(line)
        for note in ignored_settings(config.run, profile_of(self.engine.device)):
            self.console.say(f"note: {note}")
        PROGRESS.spent("setup")
        data.prepare()
        PROGRESS.spent("data")
        session = TrainSession(config, engine=self.engine, data=data)
        files = MetricFiles(config.run_dir if self.engine.ranks.rank == 0 else None, self.signals.fail)
        metrics, run = self._composed(session, files)
        try:
            collect_as_usual()
            with memory_errors_explained(session):
                self._prepare(session, run, start, base)
                with torch.autograd.set_detect_anomaly(config.run.trainer.detect_anomaly):
                    fit(run)
            last = self._finish(run, start)
        except BaseException as error:
            run.status, run.error = "failed", error
            raise
        finally:
            run.call("close")
            session.collections.close()
            self.console.close()
        if self.signals.failure is not None:
            raise self.signals.failure
        self.monitor.enter(run.status)
        return self._summary(run, last, metrics)

    def _start(self, config: ResolvedConfig) -> Start | ForeignStart | None:
        """Decide where the run begins, and check that it can begin there."""
        other, ranks, say = previous_source(config), self.engine.ranks, self.console.say
        ranks.on_rank_zero(lambda: keep_inputs(config))
        start = decide_start(config, self.own, say, ranks)
        if other is not None and _resumes(start) and start.storage.uri == self.own.uri:
            say(f"this resumes the run of {other}; set name to give {config.source} a run with its own directory")
        if isinstance(start, Start):
            check_adapter(config, start)
            if _resumes(start):
                check_versions(config, start, say)
                continues_optimizer(config, start.manifest, build.step_uri(start.storage, start.manifest.step))
        return start

    def _composed(self, session: TrainSession, files: MetricFiles) -> tuple[MetricsWriter, Run]:
        """Return the run with its callbacks: the metrics first, then what acts on them (loggers on one rank), then
        saving; what stops the run on request comes after all of them."""
        config, trainer, manager = session.config, session.config.run.trainer, session.config.run.exp_manager
        save_metrics = SaveMetrics(files)
        policy = build.precision(config)
        metrics = MetricsWriter(
            files,
            self.console,
            every=trainer.log_every_n_steps,
            flops=token_flops(build.model_builder(config), config.run.data.seq_length, build.adapters(config)),
            compute_dtype=policy.autocast or policy.parameters,
            parameter_norm=manager.log_parameter_norm,
            more=lambda: save_metrics.row,
        )
        observers = _built(config.callbacks, config.run_dir)
        self.engine.ranks.on_rank_zero(lambda: observers.update(_built(config.loggers, config.run_dir)))
        stopping, ends = manager.early_stopping_callback_params, trainer.max_time
        callbacks: dict[str, Callback | None] = {
            "profiler": _profiler(config, self.engine.ranks.rank),
            "compile time": CompileTime() if config.run.model.compile or policy.stochastic_rounding else None,
            "metrics": metrics,
            "nonfinite": NonFiniteGuard(trainer.log_every_n_steps) if trainer.nonfinite == "stop" else None,
            **observers,
            "early stopping": EarlyStop(stopping, min_steps=trainer.min_steps or 0)
            if manager.create_early_stopping_callback
            else None,
            "checkpoints": CheckpointSaver(self.own, config, save_metrics, self.ownership)
            if config.run.checkpoint.enabled
            else None,
            "time limit": TimeLimit(seconds_of(ends), self.signals) if ends is not None else None,
            "monitor": MonitorReports(self.monitor, metrics) if self.monitor.enabled else None,
            "signals": self.signals,
        }
        used = {name: callback for name, callback in callbacks.items() if callback is not None}
        return metrics, Run(session, self.console.say, used, frozenset(observers))

    def _prepare(
        self, session: TrainSession, run: Run, start: Start | ForeignStart | None, base: Start | ForeignStart | None
    ) -> None:
        """Build model and optimizer, and load what the run begins with."""
        self._take_weights(session, base or start)
        if _resumes(start):
            self.console.say(f"resuming from {build.step_uri(start.storage, start.manifest.step)}")
        self.console.say("building the model")
        PROGRESS.spent("setup")
        session.build_model(resumes=start.manifest if _resumes(start) else None)
        PROGRESS.spent("weights")
        session.build_optimizer()
        PROGRESS.spent("build")
        if not _resumes(start):
            return
        self.console.say(f"loading step {start.manifest.step}")
        extra = session.load_checkpoint(start.storage, start.manifest)
        run.load_state_dict(extra.get("callbacks", {}))
        for line in resume_notes(session, extra.get("horizon", session.horizon.max_steps)):
            self.console.say(line)
        PROGRESS.spent("weights")

    def _take_weights(self, session: TrainSession, source: Start | ForeignStart | None) -> None:
        """Let the session take the weights of another run, or of another program."""
        if isinstance(source, ForeignStart):
            self.console.say(f"starting from the weights of {source.path}")
            session.take_foreign_weights(source.path)
        elif source is not None and source.weights_only:
            self.console.say(f"starting from the weights of {build.step_uri(source.storage, source.manifest.step)}")
            session.take_weights(source.storage, source.manifest)

    def _finish(self, run: Run, start: Start | ForeignStart | None) -> str | None:
        """Return the checkpoint that holds what was trained: the newest of this process, else the one that it resumed
        from. Adapters write their files next to it, where it is in the run's own store."""
        last = build.step_uri(start.storage, start.manifest.step) if _resumes(start) else None
        if run.saved is not None:
            last = build.step_uri(self.own, run.saved.step)
        for adapter in build.adapters(run.config):
            within = last if last is not None and last.startswith(f"{self.own.uri}/") else None
            adapter.finish(within, run.config, self.engine.ranks)
        return last

    def _nothing_to_do(self, config: ResolvedConfig, start: Start) -> RunSummary:
        """The checkpoint that the run would resume from is its last one."""
        step, end = start.manifest.step, config.run.trainer.max_steps
        uri = build.step_uri(start.storage, step)
        self.console.say(f"step {step}: nothing to do, trainer.max_steps is {end}; raise it, or set another name")
        if start.storage.uri == self.own.uri:
            for adapter in build.adapters(config):
                adapter.finish(uri, config, self.engine.ranks)
        self.monitor.row({"step": step, "consumed_tokens": start.manifest.facts.consumed_tokens})
        self.monitor.checkpoint(step, start.manifest.created)
        self.monitor.enter("finished")
        return RunSummary(
            step=step,
            max_steps=end,
            loss=None,
            consumed_tokens=start.manifest.facts.consumed_tokens,
            tokens_per_s=None,
            run_dir=config.run_dir,
            checkpoint=uri,
            resume_command=resume_command(config, step),
        )

    def _summary(self, run: Run, last: str | None, metrics: MetricsWriter) -> RunSummary:
        received = self.signals.received
        resumable = last is not None or bool(run.config.run.trainer.fast_dev_run)
        return RunSummary(
            step=run.step,
            max_steps=run.max_steps,
            loss=None if run.last is None else float(run.last.loss.loss),
            consumed_tokens=run.session.state.consumed_tokens,
            tokens_per_s=metrics.typical_tokens_per_s,
            run_dir=run.config.run_dir,
            checkpoint=last,
            resume_command=resume_command(run.config, run.step) if resumable else None,
            exit_status=0 if received is None else 128 + received,
        )


def _resumes(start: Start | ForeignStart | None) -> TypeGuard[Start]:
    """Return whether the run resumes with everything, and not with weights alone."""
    return isinstance(start, Start) and not start.weights_only


def _built(selection: Sequence[Selected], run_dir: Path) -> dict[str, Callback]:
    """Build callbacks and loggers, by the names under which checkpoints keep their state.

    Raises:
        NotOurCallback: one is a callback of PyTorch Lightning, or something else.
        CallbackMethodUnknown: one has a method that nothing would call.
    """
    found: dict[str, Callback] = {}
    for selected in selection:
        name, built = selected.component.qualified_name, selected.component.load_target()(selected.config, run_dir)
        if not isinstance(built, Callback):
            raise NotOurCallback(name=name, found=built)
        for method in uncalled_methods(built):
            raise CallbackMethodUnknown(name=name, method=method, known=MOMENTS)
        number = 1 + sum(other.partition(" #")[0] == name for other in found)
        found[name if number == 1 else f"{name} #{number}"] = built
    return found


def _profiler(config: ResolvedConfig, rank: int) -> Profiler | None:
    kind = config.run.trainer.profiler
    if kind is None:
        return None
    directory = config.run_dir / "profile" / f"rank-{rank:05d}"
    with run_dir_explained(config):
        require_plain_files(make_directory(directory.parent) / directory.name)
    return Profiler(kind, directory)
