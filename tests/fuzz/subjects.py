"""What is fuzzed: for each subject a strategy of cases, and what is done with a case, through the ways of a user.

A case may end well or with an :class:`NxdtError`; anything else is a finding.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import strategies as st
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.loader import HfData
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.indexed_files import write_documents
from nxdt_plugin_megatron_data.loader import MegatronData
from nxdt_plugin_preference.config import PreferenceConfig
from nxdt_plugin_preference.loader import PreferenceData
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.loader import ChatData
from safetensors.torch import save_file

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.digested_files import BlockDigests, DigestingWriter
from nxdt_core.checkpoint.format.file_names import digests_name, manifest_key
from nxdt_core.checkpoint.format.manifest import digest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli import main
from nxdt_core.cli.plot import read_run as read_plotted
from nxdt_core.cli.report import page, read_run
from nxdt_core.data.files.records import read_records
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.dataset import DataContext
from nxdt_core.system.paths import resolve_path
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.loading import find_weights
from tests.checkpoint.poison import import_all, weights
from tests.checkpoint.saving import save_checkpoint
from tests.fuzz.mutation import changed, changed_bytes, odd_values

__all__ = ["SUBJECTS", "Subject"]

ROOT = Path(__file__).parents[2]


class Subject(ABC):
    """Something that reads what others wrote.

    Args:
        directory: for the files of its cases.
    """

    cases: st.SearchStrategy[Any]

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, case: Any) -> None:
        """Read one case. Errors with a code are as good as success."""
        with contextlib.suppress(NxdtError):
            self.attempt(case)

    @abstractmethod
    def attempt(self, case: Any) -> None:
        """Read one case."""


def command(*words: str, allowed: tuple[int, ...] = (0, 1, 2)) -> tuple[int, str]:
    """Run the command line in this process, and return its status and output. (It raises what it does not know.)"""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        status = main([*words])
    assert status in allowed, (status, said.getvalue())
    return status, out.getvalue()


# --- configurations ---------------------------------------------------------------------------------------------------


def _recipes() -> list[Any]:
    found = sorted(ROOT.glob("plugins/*/*/src/*/recipes/**/*.yaml"))
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # each worker imports this file: 0.1 instead of 0.8 s
    return [yaml.load(path.read_text(encoding="utf-8"), loader) for path in found]


def _keys(tree: Any, path: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{path}{key}"
        yield from _keys(value, f"{path}{key}.")


def _document(tree: Any) -> str:
    try:
        return str(yaml.safe_dump(tree, sort_keys=False, width=10_000))
    except (yaml.YAMLError, RecursionError):
        return json.dumps(tree) if not isinstance(tree, str) else tree


def _override(key: str, value: Any, end: str) -> str:
    try:
        said = value if isinstance(value, str) else json.dumps(value)
    except ValueError:  # more digits than Python writes
        said = "9" * 5000
    return f"{key}={said}{end}".replace("\0", "")


class Configurations(Subject):
    """``nxdt config check`` of a file and overrides."""

    _examples = _recipes()
    _every = sorted({key for tree in _examples for key in _keys(tree)})
    cases = st.tuples(
        st.one_of(
            changed(_examples).map(lambda tree: _document(tree).encode(errors="surrogatepass")),
            st.sampled_from(_examples).flatmap(lambda tree: changed_bytes(_document(tree).encode())),
        ),
        st.lists(
            st.builds(_override, st.sampled_from(_every), odd_values, st.sampled_from(("", "", "}", ":", ".a"))),
            max_size=2,
        ),
    )

    def attempt(self, case: tuple[bytes, list[str]]) -> None:
        """Check it."""
        content, overrides = case
        path = self.directory / "run.yaml"
        path.write_bytes(content)
        status, out = command("config", "check", str(path), *overrides)
        assert status != 1 or "to set" in out  # placeholders of a recipe


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _dump(table: Any) -> bytes:
    return json.dumps(table, separators=(",", ":"), allow_nan=True).encode()


def _saved(directory: Path) -> tuple[LocalStorage, checkpoint.Manifest]:
    store = LocalStorage(str(directory / "checkpoints"))
    model = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(3).bfloat16(), "e": torch.empty(0, 2)}
    manifest = save_checkpoint(
        store,
        step=1,
        model=model,
        optimizer={"w/exp_avg": torch.ones(4, 3)},
        state={"position": 1, "rng": (1, {"torch": torch.get_rng_state()}), "more": {1: float("nan")}},
        facts=checkpoint.CheckpointFacts(
            consumed_samples=8,
            config={"run": {"name": "a"}},
            metrics={"loss": 1.5},
            mesh={"dp": 2},
            versions={"nxdt-core": "1"},
            hf={"config.json": {"eos_token_id": [1, 2]}},
        ),
    )
    return store, manifest


_COMMANDS = (
    ("list",),
    ("list", "--json"),
    ("verify",),
    ("verify", "--deep"),
    ("inspect", "--tensors"),
    ("inspect", "--json"),
    ("inspect", "--saved-config"),
)


class Manifests(Subject):
    """``list``, ``inspect``, ``verify`` and what a run resumes from, of manifests whose digest is right or wrong."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._store, _ = _saved(directory)
        self._path = Path(self._store.uri) / manifest_key(1)
        table = json.loads(self._path.read_bytes())
        sharded = copy.deepcopy(table)
        sharded["tensors"]["model"]["w"]["parts"] = [
            [*sharded["tensors"]["model"]["w"]["parts"][0], [0, 0], [2, 3]],
            [*sharded["tensors"]["model"]["w"]["parts"][0], [2, 0], [2, 3]],
        ]
        sharded["tensors"]["model"]["w"]["parts"][1][1] += 24
        tied = copy.deepcopy(table)
        tied["tensors"]["model"]["e"] = {"dtype": "float32", "shape": [4, 3], "same_as": "w"}
        forged = changed([table, sharded, tied]).map(self._digested)
        manifests = st.one_of(forged, forged, forged, changed_bytes(self._path.read_bytes()))
        self.cases = st.tuples(manifests, st.sampled_from(_COMMANDS))

    @staticmethod
    def _digested(table: Any) -> bytes:
        try:
            if not isinstance(table, dict):
                return _dump(table)
            table.pop("digest", None)
            return _dump({**table, "digest": digest(_dump(table))})
        except ValueError:
            return b"{}"

    def attempt(self, case: Any) -> None:
        """Ask a command that reads it, and what a run asks at its start."""
        content, (verb, *options) = case
        self._path.write_bytes(content)
        command("checkpoint", verb, self._store.uri, *options)
        with contextlib.suppress(NxdtError):
            checkpoint.latest(self._store, warn=lambda line: None)
        self._load(checkpoint.read_manifest(self._store, 1))

    def _load(self, manifest: checkpoint.Manifest) -> None:
        for load in (checkpoint.load_model, checkpoint.load_optimizer, checkpoint.load_state):
            with contextlib.suppress(NxdtError):
                load(self._store, manifest)


class Shards(Manifests):
    """Headers of shards, files of state and of digests, whose digests in the manifest are right."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._table = json.loads(self._path.read_bytes())
        self._prefix = self._path.parent / self._table["attempt"]
        names = [*self._table["files"]]
        self._good = {name: (self._prefix / name).read_bytes() for name in names}
        self._good_digests = {name: (self._prefix / digests_name(name)).read_bytes() for name in names}
        shards = [name for name in names if name.endswith(".safetensors")]
        states = [name for name in names if name.endswith(".json")]
        self.cases = st.one_of(
            st.sampled_from(shards).flatmap(self._shard),
            st.sampled_from(states).flatmap(self._state),
            st.sampled_from(names).flatmap(self._digests),
        )

    def _shard(self, name: str) -> st.SearchStrategy[tuple[str, bytes, bytes | None]]:
        good = self._good[name]
        size = int.from_bytes(good[:8], "little")
        header = json.loads(good[8 : 8 + size])

        def encoded(table: Any) -> bytes:
            text = _encoded(table)
            text += b" " * (size - len(text))  # so that the elements stay where they are, if it fits
            return len(text).to_bytes(8, "little") + text + good[8 + size :]

        content = st.one_of(changed([header]).map(encoded), changed_bytes(good))
        return content.map(lambda data: (name, data, None))

    def _state(self, name: str) -> st.SearchStrategy[tuple[str, bytes, bytes | None]]:
        content = st.one_of(changed([json.loads(self._good[name])]).map(_encoded), changed_bytes(self._good[name]))
        return content.map(lambda data: (name, data, None))

    def _digests(self, name: str) -> st.SearchStrategy[tuple[str, bytes, bytes | None]]:
        content = st.one_of(
            changed([json.loads(self._good_digests[name])]).map(_encoded), changed_bytes(self._good_digests[name])
        )
        return content.map(lambda data: (name, self._good[name], data))

    def attempt(self, case: Any) -> None:
        """Verify and load it."""
        name, content, digests = case
        if digests is None:
            digests = _digests_of(content).encode()
        (self._prefix / name).write_bytes(content)
        (self._prefix / digests_name(name)).write_bytes(digests)
        table = copy.deepcopy(self._table)
        table.pop("digest")
        table["files"][name] = {
            "size_bytes": len(content),
            "digests_bytes": len(digests),
            "digests_digest": digest(digests),
        }
        self._path.write_bytes(self._digested(table))
        try:
            command("checkpoint", "verify", self._store.uri, "--deep")
            self._load(checkpoint.read_manifest(self._store, 1))
        finally:
            (self._prefix / name).write_bytes(self._good[name])
            (self._prefix / digests_name(name)).write_bytes(self._good_digests[name])


def _encoded(table: Any) -> bytes:
    """Return a table as JSON; the beginning of one where it holds what JSON has no word for."""
    try:
        return json.dumps(table).encode()
    except ValueError:
        return b"{"


def _digests_of(content: bytes) -> BlockDigests:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as helper:
        writer = DigestingWriter(io.BytesIO(), helper)
        writer.write(memoryview(content))
        return writer.finish()


HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
                     "original_max_position_embeddings": 16},
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
    "torch_dtype": "float32",
}  # fmt: skip


class HuggingFace(Subject):
    """A Hugging Face directory: its configuration, its index, the header of its weights."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._hf = directory / "hf"
        self._hf.mkdir()
        save_file(weights(), self._hf / "model.safetensors")
        generation = {"eos_token_id": [1, 2], "temperature": 0.7, "do_sample": True}
        index = {"metadata": {"total_size": 10}, "weight_map": dict.fromkeys(weights(), "model.safetensors")}
        self._good = {
            "config.json": json.dumps(HF_CONFIG).encode(),
            "generation_config.json": json.dumps(generation).encode(),
            "model.safetensors.index.json": json.dumps(index).encode(),
            "model.safetensors": (self._hf / "model.safetensors").read_bytes(),
        }
        for name, content in self._good.items():
            (self._hf / name).write_bytes(content)
        self.cases = st.sampled_from(("config.json", *self._good)).flatmap(self._file)

        def build() -> Any:
            from nxdt_plugin_llama.builder import LlamaBuilder
            from nxdt_plugin_llama.config import LlamaConfig

            sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4}
            return LlamaBuilder(LlamaConfig(**sizes, num_kv_heads=2, vocab_size=8, max_position_embeddings=16))

        self._builder = build()
        (directory / "run.yaml").write_text(f"base: recipe:llama-tiny\nmodel:\n  model_config: {self._hf}\n")

    def _file(self, name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        good = self._good[name]

        def encoded(table: Any) -> bytes:
            try:
                return json.dumps(table).encode()
            except ValueError:
                return b'{"a": ' + b"9" * 5000 + b"}"

        def headed(table: Any) -> bytes:
            text = encoded(table)
            return len(text).to_bytes(8, "little") + text + good[8 + int.from_bytes(good[:8], "little") :]

        if name.endswith(".json"):
            trees = changed([json.loads(good)]).map(encoded)
        else:
            trees = changed([json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])]).map(headed)
        return st.tuples(st.just(name), st.one_of(trees, changed_bytes(good)))

    def attempt(self, case: tuple[str, bytes]) -> None:
        """Import it, and check a run that begins with it."""
        name, content = case
        (self._hf / name).write_bytes(content)
        try:
            if name == "config.json":
                run = self.directory / "run.yaml"
                command("config", "check", str(run), f"model.model_config={self._hf}", allowed=(0, 2))
            import_all(self._hf, self._builder)
        finally:
            (self._hf / name).write_bytes(self._good[name])


class Adapters(Subject):
    """A directory of peft: its configuration, and the header of its weights."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._hf, self._peft = HuggingFace(directory), directory / "peft"
        self._peft.mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": str(directory / "hf"), "r": 2, "lora_alpha": 4,
                  "lora_dropout": 0.0, "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None,
                  "target_modules": ["q_proj"], "target_parameters": [], "init_lora_weights": True}  # fmt: skip
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        save_file(
            {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)},
            self._peft / "adapter_model.safetensors",
        )
        self._good = (self._peft / "adapter_model.safetensors").read_bytes()
        text = json.dumps(config).encode()
        self.cases = st.one_of(
            st.tuples(changed([config]).map(_encoded), st.just(self._good)),
            st.tuples(changed_bytes(text), st.just(self._good)),
            st.tuples(st.just(text), changed_bytes(self._good)),
        )

    def attempt(self, case: tuple[bytes, bytes]) -> None:
        """Load it over its base."""
        for name, content in zip(("adapter_config.json", "adapter_model.safetensors"), case, strict=True):
            (self._peft / name).write_bytes(content)
        found = find_weights(str(self._peft))
        engine = build.engine(found.run)
        engine.start()
        found.load(engine, initialize_parallel_model(found.run, engine, materialise=False))


# --- data -------------------------------------------------------------------------------------------------------------


def _read_all(split: Any) -> None:
    """Every sample of a small data set, the first ones of a large one or of a stream."""
    if split is None:
        return
    if isinstance(split, Mapping):
        for each in split.values():
            _read_all(each)
    elif hasattr(split, "__getitem__"):
        for number in range(min(len(split), 200)):
            split[number]
        split.fingerprint()
    else:
        split.fingerprint()
        list(islice(split, 200))


CHATS = [
    {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}], "weight": 1},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "train": True, "reasoning_content": "hm"},
    ], "source": "s"},
    {"tools": [{"type": "function", "function": {"name": "clock", "description": "t", "parameters": {}}}],
     "messages": [
        {"role": "user", "content": "How late is it?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]},
        {"role": "tool", "content": "12:30", "tool_call_id": "1"},
        {"role": "assistant", "content": "Half past twelve."},
    ]},
    {"functions": '[{"name": "clock"}]', "messages": [
        {"role": "user", "content": "t?"},
        {"role": "assistant", "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": "1"},
        {"role": "assistant", "content": "One."},
    ]},
    {"conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "clock", "arguments": {}}'},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "Noon."},
    ], "system": "Be brief.", "tools": "[]"},
    {"instruction": "Add.", "input": "1, 2", "output": "3", "history": [["Hi", "Hello"]], "system": "s"},
    {"input": "1, 2", "output": "3"},
]  # fmt: skip

PAIRS = [
    {"prompt": "a b", "chosen": "c", "rejected": "d", "score": 0.5},
    {"prompt": [{"role": "user", "content": "hi"}], "chosen": [{"role": "assistant", "content": "yes"}],
     "rejected": [{"role": "assistant", "content": "no"}], "system": "s", "tools": []},
    {"chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
     "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]},
    {"prompt": "hi", "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
     "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]},
]  # fmt: skip


def _line(record: Any) -> bytes:
    try:
        return json.dumps(record).encode()
    except ValueError:
        return b'{"messages": ' + b"9" * 5000 + b"}"


def _lines(examples: list[Any]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Records as files of JSON, with a name that says the form."""
    records = st.lists(changed(examples), min_size=1, max_size=2)
    return st.one_of(
        records.map(lambda found: ("a.jsonl", b"\n".join(map(_line, found)))),
        records.map(lambda found: ("a.json", b"[" + b",".join(map(_line, found)) + b"]")),
        changed_bytes(b"\n".join(map(_line, examples))).map(lambda data: ("a.jsonl", data)),
    )


def _chat_tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(
        HuggingFaceTokenizerConfig(model=Path(resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")))
    )


class Chats(Subject):
    """Conversations through chat templates."""

    cases = st.tuples(_lines(CHATS), st.sampled_from((None, "chatml", "llama3")), st.sampled_from(("report", "refuse")))

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tokenizer = _chat_tokenizer()

    def attempt(self, case: tuple[tuple[str, bytes], str | None, Any]) -> None:
        """Make samples of it."""
        (name, content), template, unused = case
        path = self.directory / name
        path.write_bytes(content)
        config = ChatConfig(train_files=(path,), chat_template=template, unused_fields=unused)
        context = DataContext(seq_length=64, seed=1, tokenizer=self._tokenizer)
        _read_all(ChatData(config, context).split("train"))


class Preferences(Subject):
    """Pairs of answers."""

    cases = st.tuples(_lines(PAIRS), st.booleans())

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tokenizer = _chat_tokenizer()

    def attempt(self, case: tuple[tuple[str, bytes], bool]) -> None:
        """Make samples of it."""
        (name, content), packing = case
        path = self.directory / name
        path.write_bytes(content)
        context = DataContext(seq_length=64, seed=1, tokenizer=self._tokenizer)
        config = PreferenceConfig(train_files=(path,), packing=packing, truncation_mode="keep_start")
        _read_all(PreferenceData(config, context).split("train"))


class Indexed(Subject):
    """Megatron's ``.bin`` and ``.idx``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._prefix = directory / "corpus"
        documents = ([np.arange(7 + number), np.arange(3)] for number in range(6))
        write_documents(self._prefix, np.dtype("<u2"), documents)
        self._index, self._data = ((directory / f"corpus{end}").read_bytes() for end in (".idx", ".bin"))
        magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", self._index)
        rest = self._index[34:]
        sizes = st.one_of(
            st.sampled_from((sequences, borders, 0, 1, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1)),
            st.integers(0, 2**64 - 1),
        )
        header = st.builds(
            lambda a, b, c, d: struct.pack("<9sQBQQ", magic, a, b, c, d) + rest,
            st.sampled_from((version, version, 0, 2**64 - 1)),
            st.sampled_from((code, code, 0, 1, 2, 3, 4, 5, 6, 7, 255)),
            sizes,
            sizes,
        )
        self.cases = st.tuples(
            st.one_of(changed_bytes(self._index), changed_bytes(self._index), header),
            st.one_of(st.just(self._data), changed_bytes(self._data)),
            st.sampled_from((None, "8,1,1")),
            st.booleans(),
        )

    def attempt(self, case: tuple[bytes, bytes, str | None, bool]) -> None:
        """Inspect it, and make samples of each split."""
        index, data, splits, reset = case
        (self.directory / "corpus.idx").write_bytes(index)
        (self.directory / "corpus.bin").write_bytes(data)
        command("data", "inspect", str(self._prefix), allowed=(0, 2))
        config = MegatronDataConfig(
            data_prefix=self._prefix,
            splits_string=splits,
            reset_attention_mask=reset,
            index_mapping_dir=self.directory / "indices",
        )
        for vocab_size in (272, None):
            context = DataContext(seq_length=8, seed=1, tokenizer=None, vocab_size=vocab_size)
            loader = MegatronData(config, context)
            for split in ("train", "validation"):
                with contextlib.suppress(NxdtError):
                    _read_all(loader.split(split))


def _table(form: str) -> bytes:
    ids = [[*range(8)], [3] * 12, [], [5, 6]] * 5
    table = pa.table({"input_ids": ids, "labels": ids, "messages": [CHATS[2]["messages"]] * len(ids)})
    return _written(table, form)


def _texts(form: str) -> bytes:
    texts = pa.array(["In the beginning", "é" * 20, "", "b"] * 5)
    return _written(pa.table({"text": texts, "kind": texts.dictionary_encode()}), form)


def _written(table: pa.Table, form: str) -> bytes:
    sink = io.BytesIO()
    if form.startswith("parquet"):
        pq.write_table(table, sink, compression=form.partition("-")[2] or "none", row_group_size=7)
    else:
        make: Callable[..., Any] = pa.ipc.new_file if form.startswith("file") else pa.ipc.new_stream
        options = pa.ipc.IpcWriteOptions(compression=form.partition("-")[2] or None)
        with make(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=6)
    return sink.getvalue()


_FORMS = {
    **dict.fromkeys(("parquet", "parquet-snappy", "parquet-zstd", "parquet-gzip"), "a.parquet"),
    **dict.fromkeys(("file", "stream", "file-zstd", "stream-lz4"), "a.arrow"),
}


class Tables(Subject):
    """Parquet and Arrow files, as records and as streams of rows."""

    cases = st.one_of(
        *(
            st.tuples(st.just(name), changed_bytes(make(form)))
            for form, name in _FORMS.items()
            for make in (_table, _texts)
        )
    )

    def attempt(self, case: tuple[str, bytes]) -> None:
        """Read it in every way."""
        name, content = case
        path = self.directory / name
        path.write_bytes(content)
        with contextlib.suppress(NxdtError):
            list(read_records([path], "data.train_files")[0])
        context = DataContext(seq_length=8, seed=1, tokenizer=ByteTokenizer(), vocab_size=272)
        for packing in (None, True):
            with contextlib.suppress(NxdtError):
                config = HfDataConfig(train_dir=path, val_dir=path, streaming=True, packing=packing)
                _read_all(HfData(config, context).split("validation"))


# --- run directories --------------------------------------------------------------------------------------------------


def _lines(rows: Any) -> bytes:
    try:
        return b"\n".join(_dump(row) for row in (rows if isinstance(rows, list) else [rows]))
    except ValueError:  # more digits than Python writes
        return b'{"step":1,"loss":' + b"9" * 5000 + b"}"


class Runs(Subject):
    """``nxdt report`` and what ``nxdt plot`` reads, of the files in the directory of a run."""

    _rows = (
        {"step": 1, "loss": 5.5, "grad_norm": 1e-3, "skipped_steps": 0, "consumed_tokens": 64},
        {"step": 2, "loss": None, "grad_norm": 2.0, "skipped_steps": 1, "bytes": 2**34, "seconds": 0.1},
        {"step": 3, "loss": 1.5, "perplexity": 4.5, "sets": {"a": {"loss": 1.0}}, "prompt": "a", "text": "b"},
    )
    _manifests = ({"step": 2, "created": "now", "mesh": {"dp": 2}, "versions": {"a": "1"}, "plugin_fingerprint": "f"},)
    _config = b"name: a  # command line\ntrainer:\n  max_steps: 3  # a.yaml:2\n"
    _log = b"2026-11-01 00:00:00,000 WARNING rank 0 nxdt: text\n"
    _row_files = st.sampled_from(("metrics", "validation", "saves", "generations", "resumes", "metrics.replaced"))
    cases = st.one_of(
        st.tuples(_row_files.map("{}.jsonl".format), changed([list(_rows)]).map(_lines)),
        st.tuples(_row_files.map("{}.jsonl".format), changed_bytes(_lines(list(_rows)))),
        st.tuples(st.just("checkpoints/step-2/manifest.json"), changed(_manifests).map(_lines)),
        st.tuples(st.just("config.yaml"), changed_bytes(_config)),
        st.tuples(st.just("logs/globalrank-0_1.txt"), changed_bytes(_log)),
    )

    def attempt(self, case: tuple[str, bytes]) -> None:
        """Make the page, which must be one that a browser can show."""
        name, content = case
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        (self.directory / "config.yaml").touch()
        run = read_run(self.directory)
        page([run, run]).encode()
        with contextlib.suppress(NxdtError):
            read_plotted(self.directory)


SUBJECTS: Mapping[str, type[Subject]] = {
    "configurations": Configurations,
    "manifests": Manifests,
    "shards": Shards,
    "hugging-face": HuggingFace,
    "adapters": Adapters,
    "chats": Chats,
    "preferences": Preferences,
    "indexed": Indexed,
    "tables": Tables,
    "runs": Runs,
}
