"""Reading of files as documents, with an error for every way in which that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nxdt_core.data.cache import digest
from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import JSON_TEXTS, decode, expand, json_objects, read_bytes
from nxdt_core.data.files.records import count_records
from nxdt_core.data.packing import PackedDataset, Packing
from nxdt_core.data.tokens import TokenStream, tokenize
from nxdt_core.errors.data import (
    DataNeedsTokenizer,
    DocumentWeightWrong,
    EmptyTextFile,
    JsonTextMissing,
    SpecialTokenMissing,
    TooFewTokens,
)
from nxdt_core.protocols.batch import LARGEST
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_text.config import TextConfig

_log = logging.getLogger(__name__)


def documents(
    path: Path, content: bytes, *, text_key: str, separator: str | None, weight_key: str | None = None
) -> Iterator[tuple[str, float]]:
    """Documents of one file and their weights in the loss, none of them blank or of weight 0.

    Args:
        path: names the file in errors; its suffix determines the format.
        content: result of :func:`nxdt_core.data.files.paths.read_bytes`.
        text_key: key of the text in JSONL.
        separator: separates documents of plain text; None: the file is one document.
        weight_key: key of the weight in JSONL; None: all have 1.

    Raises:
        EmptyTextFile, TextNotUtf8, BadJsonLine, JsonTextMissing, DocumentWeightWrong: the content is not usable.
    """
    empty, blank, text = True, 0, decode(path, content)
    is_json = bare_name(path).endswith(JSON_TEXTS)
    records: Iterable[tuple[int, Any]]
    if is_json:
        records = json_objects(path, text, example=f'{{"{text_key}": "..."}}')
    else:
        records = enumerate([text] if separator is None else text.split(separator))
    for line, record in records:
        document: Any = record
        weight: Any = 1.0
        if is_json:
            document = record.get(text_key)
            if not isinstance(document, str):
                keys = ", ".join(repr(key) for key in record) or "none"
                reason = (
                    f"its keys are {keys}" if text_key not in record else f"its value is a {type(document).__name__}"
                )
                raise JsonTextMissing(path=str(path), line=line, key=text_key, found=reason)
            weight = None if weight_key is None else record.get(weight_key)
            weight = 1.0 if weight is None else weight
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= LARGEST:
                raise DocumentWeightWrong(path=str(path), line=line, key=weight_key, found=repr(weight))
        if document.strip() and weight:
            empty = False
            yield document, float(weight)
        elif weight and is_json:  # blank text between separators is none
            blank += 1
    if empty:
        raise EmptyTextFile(path=str(path))
    if blank:
        _log.warning("%s: left out %s: the text is blank", path, count_records(blank))


class TextData(DatasetSplits):
    """Samples of text files.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        SpecialTokenMissing: ``add_bos`` or ``add_eos`` asks for a token that the tokenizer lacks.
    """

    def __init__(self, config: TextConfig, context: DataContext) -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="text")
        self._config = config
        self._tokenizer: Tokenizer = context.tokenizer
        self._seq_length = context.seq_length
        self._bos_id = self._tokenizer.bos_id if config.add_bos else None
        self._eos_id = self._tokenizer.eos_id if config.add_eos else None
        if config.add_bos and self._bos_id is None:
            raise SpecialTokenMissing(key="data.add_bos", token="begin of text")
        if config.add_eos and self._eos_id is None:
            raise SpecialTokenMissing(key="data.add_eos", token="end of text")
        self._train_and_validation: tuple[PackedDataset, PackedDataset] | None = None

    def split(self, name: SplitName) -> PackedDataset | dict[str, PackedDataset] | None:
        """Return the samples of a split, by name where ``validation_sets`` has some; None where nothing is named for
        it.

        Raises:
            DataFileNotFound, DataFileUnreadable, EmptyTextFile, TextNotUtf8, BadJsonLine, JsonTextMissing: of the
                files; each names the file and the place.
            TooFewTokens: the split is shorter than one sample.
        """
        if self._config.validation_fraction and name != "test":
            if self._train_and_validation is None:  # cut in two at a token, so that no token belongs to both
                stream, source = self._read(self._config.train_files, "data.train_files")
                fraction = self._config.validation_fraction
                first, second = stream.split(len(stream) - round(len(stream) * fraction))
                self._train_and_validation = (
                    self._packed(first, digest(source, "train", fraction), "train"),
                    self._packed(second, digest(source, "validation", fraction), "validation"),
                )
            return self._train_and_validation[name == "validation"]
        if name == "validation" and self._config.validation_sets:
            sets = self._config.validation_sets.items()
            return {one: self._packed(*self._read(files, f"data.validation_sets.{one}"), one) for one, files in sets}
        patterns: tuple[Path, ...] = getattr(self._config, f"{name}_files")
        return self._packed(*self._read(patterns, f"data.{name}_files"), name) if patterns else None

    def _read(self, patterns: tuple[Path, ...], key: str) -> tuple[TokenStream, str]:
        """Tokens of the files that ``key`` names, and a digest of all that decides them."""
        config = self._config
        digests: list[str] = []
        weights: list[float] = []

        def texts() -> Iterator[str]:
            for path in expand(patterns, key):
                content = read_bytes(path)
                digests.append(digest(content))
                separator, weight_key = config.document_separator, config.weight_key
                of_file = documents(path, content, text_key=config.text_key, separator=separator, weight_key=weight_key)
                for document, weight in of_file:
                    weights.append(weight)
                    yield document

        stream = tokenize(texts(), self._tokenizer, bos_id=self._bos_id, eos_id=self._eos_id, weights=weights)
        settings: tuple[object, ...] = (config.text_key, config.document_separator, self._bos_id, self._eos_id)
        if config.weight_key is not None:
            settings = (*settings, config.weight_key)
        return stream, digest(*digests, self._tokenizer.fingerprint(), settings)

    def _packed(self, stream: TokenStream, source: str, split: str) -> PackedDataset:
        needed = self._seq_length + 1
        if len(stream) < needed:
            hint = ", or change data.validation_fraction" if self._config.validation_fraction else ""
            raise TooFewTokens(split=split, found=len(stream), needed=needed, seq_length=self._seq_length, hint=hint)
        packing = Packing(
            reset_attention_mask=self._config.reset_attention_mask,
            reset_position_ids=self._config.reset_position_ids,
            eod_id=self._eos_id if self._config.eod_mask_loss else None,
        )
        return PackedDataset(stream, seq_length=self._seq_length, packing=packing, source=source)
