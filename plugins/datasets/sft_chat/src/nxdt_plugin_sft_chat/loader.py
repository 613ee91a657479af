"""Conversations as samples of one length: packed, or each with padding behind it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import cached_arrays, digest
from nxdt_core.data.chat.rendering import runner_of
from nxdt_core.data.chat.templates import template_names
from nxdt_core.data.files.records import BadRecords, Records, UnusedFields, count_records, describe_unused
from nxdt_core.data.files.splits import SplitRecords
from nxdt_core.data.mixture import mixed
from nxdt_core.data.packing import shuffled_bins
from nxdt_core.data.tokens import padding_id
from nxdt_core.errors.chats import TemplateMissing
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DataReport, DatasetSplits, MapDataset, SplitName
from nxdt_plugin_sft_chat.chats import Chats, Encoder, gather
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.errors import EmptySplit, EverythingTrained, NothingTrained
from nxdt_plugin_sft_chat.rendering import Renderer

_PADDING = -1
"""Document number of padding."""


class ChatDataset(MapDataset):
    """A map-style dataset of samples [seq_length].

    Args:
        chats: the conversations.
        samples: numbers of the conversations in each sample; None puts each conversation into its own sample.
        seq_length: tokens of a sample.
        pad_id: token for padding positions; they form a separate document and never have a loss.
        source: digest of everything that determines ``chats``.
        of_records: records of the files where ``chats`` are of the first ones.
    """

    def __init__(
        self,
        chats: Chats,
        samples: Sequence[NDArray[np.int64]] | None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._chats = chats
        self._samples = list(np.arange(len(chats), dtype=np.int64)[:, None]) if samples is None else samples
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_length
        ids = np.full(length, self._pad_id, np.int64)
        labels = np.full(length, IGNORE_INDEX, np.int64)
        positions = np.zeros(length, np.int64)
        documents = np.full(length, _PADDING, np.int64)
        weights = np.zeros(length, np.float32) if len(self._chats.weights) else None
        at = 0
        for number, chat in enumerate(self._samples[index]):
            begin, end = self._chats.starts[chat], self._chats.starts[chat + 1]
            tokens = self._chats.tokens[begin:end].astype(np.int64)
            until = at + len(tokens) - 1
            ids[at:until] = tokens[:-1]
            labels[at:until] = np.where(self._chats.trained[begin + 1 : end], tokens[1:], IGNORE_INDEX)
            if weights is not None:
                weights[at:until] = np.where(
                    self._chats.trained[begin + 1 : end], self._chats.weights[begin + 1 : end], 0
                )
            positions[at:until] = np.arange(until - at)
            documents[at:until] = number
            at = until
        return Sample(
            input_ids=ids, labels=labels, loss_weights=weights, position_ids=positions, document_ids=documents
        )

    def fingerprint(self) -> str:
        """Return a report of the conversations, and of how they are put into samples."""
        sizes = np.array([len(sample) for sample in self._samples], np.int64)
        return digest(self._source, self._seq_length, sizes, np.concatenate(self._samples))

    def report(self) -> DataReport:
        """Return a report of the conversations, and of the places that they fill."""
        filled = int(self._chats.lengths.sum()) - len(self._chats)
        efficiency = filled / (len(self) * self._seq_length)
        return replace(self._chats.report, efficiency=efficiency, of_records=self._of_records)


_log = logging.getLogger(__name__)
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class ChatData(DatasetSplits):
    """Samples of conversations.

    Args:
        config: the keys.
        context: of the run.
        section: that has the keys of the files, for errors.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        NotAChatTokenizer: the tokenizer does not report the positions of tokens in a text.
        TemplateMissing, TemplateUnknown, TemplateNeedsToken: the chat template cannot be used.
    """

    def __init__(self, config: ChatConfig, context: DataContext, *, section: str = "data") -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="sft-chat")
        chat_tokenizer = context.tokenizer
        chat_tokenizer.locate([])  # raises where it cannot
        self._config = config
        self._context = context
        self._sources = {
            name: ChatData(config.of_source(name), context, section=f"data.sources.{name}") for name in config.sources
        }
        self._tokenizer = context.tokenizer
        if self._sources:  # each has its own template
            return
        runner = runner_of(config, chat_tokenizer)
        if runner is None:
            raise TemplateMissing(known=template_names())
        self._encoder = Encoder(Renderer(runner), chat_tokenizer, config)
        self._settings = runner.settings
        self._records = SplitRecords(config, example=_EXAMPLE, section=section, empty=EmptySplit, limit_in_digests=True)

    def split(self, name: SplitName) -> MapDataset | Mapping[str, MapDataset] | None:
        """Return the samples of a split; None where no files and no fraction are named for it. Several sources are
        mixed for training, and each is a set by its name for validation.

        Raises:
            NxdtError: of the files, their records and what the template makes of them; each names the place.
            NothingTrained, EverythingTrained: the loss would be on no token, or on all.
            MixtureInSequence: several sources are to be taken in their order.
        """
        if not self._sources:
            return self._of_files(name)
        found = {label: each for label, data in self._sources.items() if (each := data._of_files(name)) is not None}
        weights = {label: source.weight for label, source in self._config.sources.items()}
        if name == "train" and found:
            return mixed(found, weights, shuffle=self._context.shuffle)
        return found if len(found) > 1 else next(iter(found.values()), None)

    def _of_files(self, name: SplitName) -> ChatDataset | None:
        config, context = self._config, self._context
        chosen = self._records.of(name)
        if chosen is None:
            return None
        records, source = chosen
        decided: tuple[object, ...]
        decided = (config.train_roles, config.train_turns, config.truncation, config.special_tokens_in_text)
        if (config.bad_records, config.turn_order) != ("refuse", "refuse"):
            decided = (*decided, config.bad_records, config.turn_order)
        found, first = len(records), context.first_records
        records, source = (records, source) if first is None else (records[:first], digest(source, first))
        source = digest(source, self._tokenizer.fingerprint(), self._settings, decided)
        chats = self._chats(records, source)
        _check_trained(chats, name)
        _log_counts(chats, name)
        return ChatDataset(
            chats,
            shuffled_bins(chats.lengths - 1, context.seq_length, seed=context.seed) if config.packing else None,
            seq_length=context.seq_length,
            pad_id=padding_id(self._tokenizer),
            source=source,
            of_records=found if len(records) < found else None,
        )

    def _chats(self, records: Records, source: str) -> Chats:
        """The records that fit, from the run's directory where they are there for the same ``source``."""
        length, directory = self._context.seq_length, self._config.cache_dir or self._context.cache_dir
        mode = self._config.unused_fields

        def chats() -> Chats:
            bad = BadRecords(self._config)
            return gather(
                self._encoder.encode(records, bad),
                bad,
                seq_length=length,
                truncation=self._config.truncation,
                vocab_size=self._tokenizer.vocab_size,
                unused=UnusedFields(mode),
            )

        if directory is None:
            return chats()
        name = f"chats-{digest(source, length, mode, self._config.max_bad_share)}"
        fits = partial(Chats.fits, most=length + 1, vocab_size=self._tokenizer.vocab_size)
        return cached_arrays(directory, name, Chats, chats, _unkept, fits, most_bytes=self._config.cache_bytes)


def _unkept(error: OSError) -> None:
    _log.warning("%s: cannot keep tokens there; each process makes its own", error)


def _check_trained(chats: Chats, split: SplitName) -> None:
    trained, labels = int(chats.trained.sum()), len(chats.tokens) - len(chats)
    if not len(chats):
        reasons = [f"of {count} records, {reason}" for reason, count in chats.report.left_out.items()]
        raise NothingTrained(place=f"the {split} data", reason="; ".join(reasons))
    if trained >= labels:
        raise EverythingTrained(split=split, tokens=labels)


def _log_counts(chats: Chats, split: SplitName) -> None:
    report = chats.report
    for reason, count in report.left_out.items():
        _log.warning("%s data: left out %s: %s", split, count_records(count), reason)
    for reason in report.bad:
        _log.warning("%s data: left out: %s", split, reason)
    if report.truncated:
        _log.warning("%s data: cut %s to the sequence length", split, count_records(report.truncated))
    if report.unused:
        _log.warning("%s data: unused: %s", split, describe_unused(report.unused))
