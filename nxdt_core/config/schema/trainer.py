"""Section ``trainer``: how long, how often, on how many devices. The docstrings are the YAML reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from nxdt_core.config.annotations import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
)
from nxdt_core.config.fields.duration import Duration
from nxdt_core.config.section import Section

__all__ = ["TrainerConfig"]


class TrainerConfig(Section):
    """The training loop. Names are those of PyTorch Lightning's ``Trainer``."""

    max_steps: PositiveInt
    """Optimizer steps of the whole run, counted over resumes. It may be left out where ``max_epochs`` is set."""
    accelerator: str = "auto"
    """Device type as torch names it (``cpu``, ``cuda``, ``neuron``); ``auto`` takes what the machine has."""
    devices: PositiveInt = 1
    """Processes on each node, one per device."""
    num_nodes: PositiveInt = 1
    """Nodes of the run."""
    gradient_clip_val: NonNegativeFloat | None = 1.0
    """Largest global 2-norm of the gradient; larger ones are scaled down. ``null`` or 0 never clips."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does. Neither applies the update: ``stop`` ends the run with an error,
    ``skip`` drops the step, counts it and continues."""
    log_every_n_steps: PositiveInt = 10
    """Optimizer steps between two rows of metrics."""
    val_check_interval: PositiveInt | None = None
    """Optimizer steps between two validations; ``null`` never validates."""
    limit_val_batches: NonNegativeInt | Fraction | None = None
    """Global batches of one validation: an integer counts them, a number from 0.0 to 1.0 is a share of the split,
    0 switches validation off, ``null`` takes all. Of several sets, a count is dealt to them by their sizes (each
    stream takes as many by itself); a share is one of each set."""
    limit_train_batches: PositiveInt | Fraction | None = None
    """Train on the first global batches of the training split only: a count, or a share as for validation."""
    enable_progress_bar: bool | None = None
    """Progress bar; ``null`` shows one on a terminal and prints lines elsewhere."""
    callbacks: tuple[str | Mapping[str, Any], ...] = ()
    """Components of kind ``callback``: a name, or a mapping of ``name`` and the component's own keys."""
    max_epochs: Annotated[int, Range(-1)] | None = -1
    """Passes over the training data, after which the run ends even before ``max_steps``; -1 or ``null`` sets no such
    end. A learning-rate schedule that ends at ``max_steps`` then ends with the passes."""
    min_steps: NonNegativeInt | None = None
    """Steps before which early stopping does not stop the run."""
    min_epochs: NonNegativeInt | None = None
    """Passes over the training data before which early stopping does not stop the run."""
    max_time: Duration | None = None
    """Time after which this start of the run saves and stops, as for SIGTERM: seconds, ``days:hours:minutes:seconds``,
    or a mapping such as ``{hours: 3, minutes: 50}``. It counts from each start; leave time for a save before the job's
    limit."""
    check_val_every_n_epoch: PositiveInt | None = None
    """Passes over the training data between two validations; ``null`` counts steps by ``val_check_interval``."""
    num_sanity_val_steps: int = 0
    """Validation batches before training starts."""
    fast_dev_run: bool | NonNegativeInt = False
    """Try a configuration out: so many steps (``true``: 1), a validation of as many batches, no checkpoint and no
    loggers, in ``fast_dev_run`` below the run's directory."""
    overfit_batches: NonNegativeInt | Fraction = 0
    """Train on the first global batches alone (a count, or a share of the split), unshuffled, and validate on them:
    a model that cannot learn them by heart has a bug."""
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    """Profile of the run in ``profile`` below its directory: ``simple`` has the seconds of the functions of nxdt that
    take longest, ``advanced`` those of all functions, ``pytorch`` a trace of some steps for ``chrome://tracing``."""
    detect_anomaly: bool = False
    """Let autograd name the operation whose gradient is not finite; several times slower."""
    inference_mode: bool = True
    """Validate under ``torch.inference_mode``."""
    float32_matmul_precision: Literal["highest", "high"] = "highest"
    """Precision of matrix products of float32 tensors: ``high`` lets GPUs round their factors to 10 bits of mantissa
    (TF32). A run replaces what its process has set before. CPUs and Trainium ignore the key, and a note says so."""
    gc_interval: NonNegativeInt | None = None
    """Optimizer steps between two collections of Python's garbage collector, on all ranks after the same step; none
    runs within a step. 0 lets Python collect when it likes. ``null`` takes what suits the device: 50, and 0 on CPUs."""
    lnc: PositiveInt | None = None
    """Cores of a Trainium chip in one device (LNC): the engine ``nxd`` starts its runtime with it. With ``torch`` the
    environment says it, and a note says that the key has no effect."""
    expandable_segments: bool | None = None
    """Let the device's allocator grow its segments, so that less memory is lost between tensors of changing sizes.
    ``null`` does so on GPUs. ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF`` take precedence over this key."""
