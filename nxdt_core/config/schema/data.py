"""Section ``data``: batches and the source of samples. The docstrings are the YAML reference."""

from __future__ import annotations

from nxdt_core.config.annotations import NonNegativeInt, PositiveInt
from nxdt_core.config.section import Section

__all__ = ["DataConfig", "TokenizerSection"]


class TokenizerSection(Section):
    """Selects a tokenizer; the keys of the tokenizer are next to ``library``."""

    library: str | None = None
    """Component of kind ``tokenizer``; ``huggingface`` where ``type`` or ``model`` is given."""


class DataConfig(Section):
    """Selects a dataloader; the keys of the dataloader are next to ``name``."""

    name: str
    """Component of kind ``dataset``; ``hf-data`` where it is not set."""
    global_batch_size: PositiveInt
    """Sequences of one optimizer step, over all devices."""
    micro_batch_size: PositiveInt = 1
    """Sequences that one device takes at a time."""
    seq_length: PositiveInt
    """Tokens of a sequence."""
    shuffle: bool = True
    """Draw training samples in random order, each once a pass."""
    num_workers: NonNegativeInt = 0
    """Threads that prepare batches ahead; 0 prepares them between steps."""
    pin_memory: bool | None = None
    """Copy batches to the device out of pinned memory of the host, while kernels of the device run. ``null`` does so
    on GPUs."""
    tokenizer: TokenizerSection | None = None
    """Tokenizer of the data; ``null`` for data that is tokenised already."""
