"""Arrays of a cache that another user wrote together with their digests: types, lengths and offsets are compared."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import datasets
import numpy as np
import pytest
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.loader import HfData
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.indexed_files import write_documents
from nxdt_plugin_megatron_data.loader import MegatronData
from nxdt_plugin_preference.config import PreferenceConfig, UnpairedConfig
from nxdt_plugin_preference.loader import PreferenceData, UnpairedData
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.loader import ChatData

from nxdt_core.data.cache import content_digests
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.protocols.dataset import DataContext

CONTEXT = DataContext(seq_length=8, seed=0, tokenizer=ByteTokenizer())


def chats(tmp_path):
    path, shipped = tmp_path / "chats.jsonl", files("nxdt_plugin_sft_chat") / "data"
    talk = [{"role": role, "content": "Hi"} for role in ("user", "assistant")]
    unused = [{"messages": talk, "note": "unused"}, {"messages": [*talk, *talk]}, {"messages": 5}]
    path.write_text("\n".join(map(json.dumps, unused)))
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=Path(str(shipped / "tokenizer"))))
    keys = {"cache_dir": tmp_path / "cache", "packing": True, "bad_records": "drop", "max_bad_share": 0.5}
    config = ChatConfig(train_files=(path,), **keys)
    return lambda: ChatData(config, DataContext(seq_length=64, seed=0, tokenizer=tokenizer)).split("train")


def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    records = [{"prompt": prompt, "chosen": "ab", "rejected": "c", "note": "unused"} for prompt in ("H", "Hi")]
    path.write_text("\n".join(map(json.dumps, records)))
    config = PreferenceConfig(train_files=(path,), cache_dir=tmp_path / "cache", packing=True)
    return lambda: PreferenceData(config, CONTEXT).split("train")


def unpaired(tmp_path):
    path = tmp_path / "answers.jsonl"
    records = [{"prompt": "Hi", "completion": "ab", "label": label, "note": "unused"} for label in (True, False)]
    path.write_text("\n".join(map(json.dumps, records)))
    config = UnpairedConfig(train_files=(path,), cache_dir=tmp_path / "cache", packing=True)
    return lambda: UnpairedData(config, CONTEXT).split("train")


def texts(tmp_path):
    datasets.Dataset.from_dict({"text": ["some text", "of three", "documents"]}).save_to_disk(tmp_path / "saved")
    config = HfDataConfig(train_dir=tmp_path / "saved", cache_dir=tmp_path / "cache")
    return lambda: HfData(config, CONTEXT).split("train")


def megatron(tmp_path):
    write_documents(tmp_path / "corpus", np.dtype("<u2"), ([np.arange(length)] for length in (9, 30, 12)))
    config = MegatronDataConfig(data_prefix=tmp_path / "corpus", index_mapping_dir=tmp_path / "cache")
    return lambda: MegatronData(config, DataContext(seq_length=8, seed=0, tokenizer=None, vocab_size=64)).split("train")


OTHERS = {
    (unpaired, "others"): ("falls", "end"),
    (texts, "tokens"): ("shorter", "longer", "beyond"),
    (texts, "starts"): ("shorter", "longer", "end"),
    (megatron, "shuffle"): ("falls",),
}
"""What may be the arrays of other data."""
OFFSETS = ("starts", "others", "documents", "samples", "shuffle")
FORGED = {
    "shorter": lambda array: array[:-1],
    "longer": lambda array: np.concatenate([array, array[-1:] if len(array) else np.zeros(1, array.dtype)]),
    "text": lambda array: array.astype("U7") if array.dtype.kind != "U" else np.zeros(array.shape),
    "fractions": lambda array: array.astype("f8") if array.dtype.kind in "biu" else np.zeros(array.shape, bool),
    "nested": lambda array: array[None],
    "scalar": lambda array: np.zeros((), array.dtype),
}
"""Arrays of another type or shape."""
LED_ASTRAY = {
    "begin": lambda array: np.concatenate([array[:1] + 1, array[1:]]),
    "end": lambda array: np.concatenate([array[:-1], array[-1:] + 1]),
    "falls": lambda array: array[::-1].copy(),
    "far": lambda array: np.concatenate([array[:1], array[1:2] + np.iinfo(array.dtype).max // 2, array[2:]]),
    "negative": lambda array: -array.astype(np.int64) - 1,
}
"""Places that are none of what they lead to."""


BEYOND = {"beyond": lambda array: np.full_like(array, np.iinfo(array.dtype).max)}
"""Ids that the tokenizer has not."""


def contents(dataset):
    samples = [dataset[number] for number in range(len(dataset))]
    fields = ("input_ids", "labels", "loss_weights", "position_ids", "document_ids")
    found = [[np.asarray(getattr(sample, field)).tolist() for field in fields] for sample in samples]
    return found, repr(dataset.report()) if hasattr(dataset, "report") else ""


@pytest.mark.parametrize("kind", [chats, pairs, unpaired, texts, megatron])
def test_arrays_that_contradict_each_other_are_made_again(tmp_path, caplog, monkeypatch, kind):
    monkeypatch.setattr("os.fsync", lambda _: None)  # a hundred of them take minutes on a busy disk
    load = kind(tmp_path)
    whole = contents(load())
    (place,) = (path.parent for path in (tmp_path / "cache").glob("*/digests.json"))
    arrays = {path.stem: np.load(path) for path in place.glob("*.npy")}
    assert contents(load()) == whole
    assert "damaged" not in caplog.text
    tried = 0
    for name, array in arrays.items():
        more = BEYOND if name == "tokens" else LED_ASTRAY if name in OFFSETS and len(array) else {}
        for how, forged in (FORGED | more).items():
            content = forged(array)
            same = content.shape == array.shape and content.dtype == array.dtype and np.array_equal(content, array)
            if same or how in OTHERS.get((kind, name), ()):
                continue
            np.save(place / f"{name}.npy", content)
            digests = content_digests([place / f"{each}.npy" for each in arrays], None)
            (place / "digests.json").write_text(json.dumps({"": place.name, **dict(zip(arrays, digests, strict=True))}))
            caplog.clear()
            assert contents(load()) == whole, (name, how)
            assert f"{place} is damaged and is made again" in caplog.text, (name, how)
            tried += 1
    assert tried > 15
