"""The keys of ``data:`` that belong to ``name: megatron-data``. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from nxdt_core.config.annotations import Written
from nxdt_core.config.section import Section
from nxdt_plugin_megatron_data.prefixes import find_faults, read_shares


class MegatronDataConfig(Section):
    """Tokens in Megatron's ``.bin/.idx`` files; ``nxdt data preprocess`` makes them."""

    data_prefix: Path | tuple[float | Path, ...] | Mapping[str, Path | tuple[float | Path, ...]]
    """Paths without ``.bin`` and ``.idx``: one; a list of several, each sample of which is taken once a pass; weights
    and paths in turns, ``[0.3, /data/books, 0.7, /data/web]``; or any of these for each split, under the keys
    ``train``, ``validation`` and ``test``."""
    splits_string: str | None = None
    """Shares of training, validation and test documents in every file, such as ``"980,10,10"``; null uses all documents
    for training. It has no effect if ``data_prefix`` lists files for each split."""
    index_mapping_dir: Annotated[Path | None, Written()] = None
    """Directory that keeps indices for later starts and for other processes; null keeps them next to each file."""
    reset_attention_mask: bool = False
    """Keep documents apart that share a sample: attention does not reach from one into another, and the first token
    of a document is not a label."""
    reset_position_ids: bool = False
    """Let positions restart at 0 with each document of a sample."""
    eod_mask_loss: bool = False
    """Leave the positions out of the loss whose input is the end-of-document token."""
    no_seqlen_plus_one_input_tokens: bool = False
    """Make samples of ``seq_length`` tokens, the last of which has no label, instead of one more that is the last
    label and the first token of the next sample."""
    validation_drop_last: bool = True
    """Leave out what is left behind the last whole sample of the validation split; false fills it up."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        for fault in find_faults(self.data_prefix):
            yield "data_prefix", fault
        if self.splits_string is not None and not isinstance(self.data_prefix, Mapping):
            try:
                read_shares(self.splits_string)
            except ValueError as error:
                yield "splits_string", str(error)
