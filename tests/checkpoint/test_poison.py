"""Nothing that is read as a checkpoint, ours or another program's, can run code, leave its directory or take memory
that its bytes do not justify; it is refused in words."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.errors import raises
from safetensors.torch import save_file

from nxdt_core.checkpoint import (
    CheckpointFacts,
    latest,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_state,
    read_manifest,
    verify,
)
from nxdt_core.checkpoint.format.digested_files import BlockDigests
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.checkpoint.format.manifest import FileEntry, Manifest, digest, encode_manifest
from nxdt_core.checkpoint.format.tensor_index import TensorEntry, TensorPart
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint.diff import Side, compare_checkpoints
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotFound, WeightsPickled
from nxdt_core.errors.models import HFFileDamaged
from nxdt_core.hf.reader import INDEX
from nxdt_core.protocols.model import ModelBuilder
from tests.checkpoint.poison import DRESSES, HF_CONFIG, Payload, dressed, import_all, weights
from tests.sampling import slow_except

SHARDS = tuple(f"{section}/shard-00000-00000.safetensors" for section in ("model", "optim", "state"))
STATE = "state/rank-00000.json"
FILES = ("manifest.json", *(name + end for name in (*SHARDS, STATE) for end in ("", ".digests")))


def test_the_payload_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    for dress in DRESSES:
        marker = tmp_path / dress
        path = tmp_path / f"{dress}.pt"
        path.write_bytes(dressed(dress, marker))
        if dress.startswith("pickle"):
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert marker.exists(), dress


# --- our own format ---------------------------------------------------------------------------------------------------


def load_all(store: LocalStorage, step: int = 1) -> Any:
    manifest = read_manifest(store, step)
    return load_model(store, manifest), load_optimizer(store, manifest), load_state(store, manifest)


def path_of(store: LocalStorage, manifest: Manifest, name: str) -> Path:
    return Path(store.uri) / (manifest_key(manifest.step) if name == "manifest.json" else manifest.prefix + name)


def forge(store: LocalStorage, manifest: Manifest, name: str, data: bytes) -> None:
    """Put ``data`` in the place of a file and correct everything that would give it away."""
    digests_of = name.removesuffix(".digests")
    digests = data
    if digests_of == name:
        digests = BlockDigests(size_bytes=len(data), blocks=(digest(data).partition(":")[2],)).encode()
        path_of(store, manifest, name).write_bytes(data)
    path_of(store, manifest, f"{digests_of}.digests").write_bytes(digests)
    size = len(data) if digests_of == name else manifest.files[digests_of].size_bytes
    entry = FileEntry(size_bytes=size, digests_bytes=len(digests), digests_digest=digest(digests))
    sign(store, dataclasses.replace(manifest, files={**manifest.files, digests_of: entry}))


def sign(store: LocalStorage, manifest: Manifest) -> None:
    path_of(store, manifest, "manifest.json").write_bytes(encode_manifest(manifest))


def thirds(names: Sequence[str]) -> list[Any]:
    """Each file with a payload in each place and in each form, and by default a third of all combinations of these."""
    cases = [*product(names, ("instead", "behind", "before"), DRESSES)]
    return slow_except(cases, cases[::3])


@pytest.mark.parametrize(("name", "where", "dress"), thirds(FILES))
def test_a_payload_in_any_file_is_found_and_not_run(
    store: LocalStorage, save: Any, marker: Path, name: str, where: str, dress: str
) -> None:
    path = path_of(store, save(store, 1), name)
    own, poison = path.read_bytes(), dressed(dress, marker)
    path.write_bytes({"instead": poison, "behind": own + poison, "before": poison + own}[where])
    list_checkpoints(store)
    problems = verify(store, 1)
    assert problems
    assert str(path) in problems[0]
    with pytest.raises(CheckpointDamaged, match="NXDT-S010"):
        load_all(store)


@pytest.mark.parametrize(("name", "where", "dress"), thirds(FILES[1:]))
def test_a_payload_whose_digests_were_forged_too_is_not_run(
    store: LocalStorage, save: Any, marker: Path, name: str, where: str, dress: str
) -> None:
    """The shard's own header and the manifest must agree on every byte of the file."""
    manifest = save(store, 1)
    own, poison = path_of(store, manifest, name).read_bytes(), dressed(dress, marker)
    forge(store, manifest, name, {"instead": poison, "behind": own + poison, "before": poison + own}[where])
    list_checkpoints(store)
    if name.endswith("safetensors"):
        assert any(name in problem for problem in verify(store, 1))
    with pytest.raises(CheckpointDamaged, match=name.removesuffix(".digests")):
        load_all(store)


def test_a_payload_in_names_and_values_of_the_manifest_is_text(store: LocalStorage, save: Any, marker: Path) -> None:
    text = pickle.dumps(Payload(marker), 0).decode()
    save(store, 1, facts=CheckpointFacts(config={text: text}, plugin_fingerprint=text), model={text: torch.ones(2)})
    assert read_manifest(store, 1).facts.config == {text: text}
    assert list(load_all(store)[0]) == [text]


@pytest.mark.parametrize("dress", DRESSES)
def test_files_of_torchs_own_distributed_checkpoints_are_no_part_of_ours(
    store: LocalStorage, save: Any, marker: Path, dress: str
) -> None:
    manifest = save(store, 1)
    for folder in (Path(store.uri), Path(store.uri) / "step-00000001", path_of(store, manifest, "x").parent):
        for name in (".metadata", "__0_0.distcp", "data.pkl"):
            (folder / name).write_bytes(dressed(dress, marker))
    assert verify(store, 1) == []
    load_all(store)
    path_of(store, manifest, "manifest.json").unlink()
    with pytest.raises(CheckpointNotFound):
        load_all(store)


@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b'{"a":' * 200_000, b"1" * 10_000, b"\xff", b"1e999999"],
    ids=["deep lists", "deep tables", "long number", "no text", "large exponent"],
)
@pytest.mark.parametrize("name", [STATE, f"{STATE}.digests", f"{SHARDS[0]}.digests"])
def test_json_that_is_deep_or_endless_is_damage(store: LocalStorage, save: Any, name: str, data: bytes) -> None:
    forge(store, save(store, 1), name, data)
    with pytest.raises(CheckpointDamaged, match=name.removesuffix(".digests")):
        load_all(store)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("claimed", [2**40, 2**60])
@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[1], STATE])
def test_a_size_that_the_file_does_not_have_costs_no_memory(
    store: LocalStorage, save: Any, name: str, claimed: int
) -> None:
    """Sizes, digests and shapes agree with one another, and with nothing else."""
    manifest = save(store, 1)
    digests = BlockDigests(size_bytes=claimed, blocks=("0",), block_bytes=claimed).encode()
    path_of(store, manifest, f"{name}.digests").write_bytes(digests)
    entry = FileEntry(size_bytes=claimed, digests_bytes=len(digests), digests_digest=digest(digests))
    part = TensorPart(file=name, start=0, offsets=(0,), shape=(claimed,))
    huge = TensorEntry(dtype="uint8", shape=(claimed,), parts=(part,))
    tensors = {**manifest.tensors, name.partition("/")[0]: {"w/huge": huge}} if name != STATE else manifest.tensors
    sign(store, dataclasses.replace(manifest, files={**manifest.files, name: entry}, tensors=tensors))
    with pytest.raises(CheckpointDamaged, match=f"instead of {claimed}"):
        load_all(store)
    assert any(name in problem for problem in verify(store, 1))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("claimed", [-5, -2, -1, 2**40, 2**62])
def test_digests_of_any_claimed_size_cost_no_memory(store: LocalStorage, save: Any, claimed: int) -> None:
    manifest = save(store, 1)
    entry = dataclasses.replace(manifest.files[STATE], digests_bytes=claimed)
    sign(store, dataclasses.replace(manifest, files={**manifest.files, STATE: entry}))
    with pytest.raises(CheckpointDamaged, match="digests"):
        load_all(store)


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/hostname", "..", "a/../../secret", "./secret", "a\\..\\b", "\0"]
)
def test_names_that_lead_out_of_the_store_are_refused(
    store: LocalStorage, save: Any, name: str, tmp_path: Path
) -> None:
    manifest = save(store, 1)
    (tmp_path / "secret").write_text("secret")
    entry = manifest.files[SHARDS[0]]
    whole = TensorPart(file=name, start=0, offsets=(0,), shape=(3,))
    tensors = {"model": {"w": TensorEntry(dtype="uint8", shape=(3,), parts=(whole,))}}
    forged_file = dataclasses.replace(manifest, files={**manifest.files, name: entry}, tensors=tensors)
    for forged in (forged_file, dataclasses.replace(manifest, attempt=name)):
        sign(store, forged)
        with pytest.raises(CheckpointDamaged):
            load_all(store)
        assert verify(store, 1)
        assert list_checkpoints(store)[0].state == "damaged"
        assert latest(store, warn=lambda line: None) is None


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/hostname", "nowhere", "."])
def test_links_in_place_of_files_are_damage(store: LocalStorage, save: Any, target: str) -> None:
    path = path_of(store, save(store, 1), SHARDS[0])
    path.unlink()
    os.symlink(target, path)
    with pytest.raises(CheckpointDamaged, match=SHARDS[0]):
        load_all(store)
    assert verify(store, 1)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    save_file(weights(), directory / "model.safetensors")
    return directory


def test_the_directory_is_good_before_it_is_poisoned(hf: Path, builder: ModelBuilder) -> None:
    assert len(import_all(hf, builder)) == 21


PICKLED = ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth")


@pytest.mark.parametrize(
    ("file", "dress"),
    slow_except(
        [(file, dress) for file in PICKLED for dress in DRESSES],
        [*((PICKLED[0], dress) for dress in DRESSES), *((file, "torch") for file in PICKLED)],
    ),
)
def test_pickled_weights_of_hugging_face_are_never_opened(
    hf: Path, builder: ModelBuilder, marker: Path, file: str, dress: str
) -> None:
    (hf / file).write_bytes(dressed(dress, marker))
    import_all(hf, builder)  # beside safetensors they do not matter
    (hf / "model.safetensors").unlink()
    with raises(WeightsPickled, match=file):
        import_all(hf, builder)


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", INDEX])
def test_a_payload_in_place_of_a_file_of_hugging_face_is_refused(
    hf: Path, builder: ModelBuilder, marker: Path, file: str, dress: str
) -> None:
    put(hf, file, dressed(dress, marker))
    with pytest.raises(HFFileDamaged, match=file):
        import_all(hf, builder)


def put(directory: Path, file: str, data: bytes) -> None:
    """Write a file of a Hugging Face directory; an index is read only where there is no single file."""
    if file == INDEX:
        (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    (directory / file).write_bytes(data)


def header(table: object, length: int | None = None) -> bytes:
    encoded = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded


HUGE = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
OVERFLOWING = {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "data",
    [
        header({}, 2**63),
        header({}, 2**40),
        header(b"[" * 1_000_000),
        header({"lm_head.weight": HUGE}),
        header({"lm_head.weight": OVERFLOWING}),
        header({"lm_head.weight": {**HUGE, "shape": [1], "data_offsets": [8, 4]}}),
        header({"lm_head.weight": {**HUGE, "shape": [-1]}}),
        b"",
        b"\0" * 7,
    ],
    ids=range(9),
)
def test_absurd_safetensors_headers_are_damage(hf: Path, builder: ModelBuilder, data: bytes) -> None:
    (hf / "model.safetensors").write_bytes(data)
    with pytest.raises(HFFileDamaged, match=r"model\.safetensors"):
        import_all(hf, builder)


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b'{"a":' * 200_000, b'{"a": ' + b"1" * 10_000 + b"}", b"null"],
    ids=["deep lists", "deep tables", "long number", "null"],
)
def test_json_of_hugging_face_that_is_deep_or_endless_is_damage(
    hf: Path, builder: ModelBuilder, file: str, data: bytes
) -> None:
    put(hf, file, data)
    with pytest.raises(HFFileDamaged, match=file):
        import_all(hf, builder)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "{root}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_an_index_of_hugging_face_names_no_files_elsewhere(hf: Path, builder: ModelBuilder, file: str) -> None:
    (hf / "model.safetensors").rename(hf.parent / "outside.safetensors")
    names = dict.fromkeys(weights(), file.format(root=hf.parent))
    (hf / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(NxdtError, match=r"outside\.safetensors"):
        import_all(hf, builder)


def test_an_index_of_hugging_face_whose_names_are_too_long_is_damage(hf: Path, builder: ModelBuilder) -> None:
    names = dict.fromkeys(weights(), "a" * 300)
    put(hf, INDEX, json.dumps({"weight_map": names}).encode())
    with pytest.raises(HFFileDamaged, match="File name too long"):
        import_all(hf, builder)


# --- manifests that carry a right digest and say what is not so -------------------------------------------------------


def forged_table(store: LocalStorage, save: Any, change: Callable[[dict[str, Any]], None], step: int = 1) -> None:
    """Save ``step`` and change its manifest, whose digest is right afterwards."""
    save(store, step)
    path = Path(store.uri) / f"step-{step:08d}" / "manifest.json"
    table = json.loads(path.read_bytes())
    del table["digest"]
    change(table)
    data = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(json.dumps({**table, "digest": digest(data)}, separators=(",", ":")).encode())


def set_to(key: str, value: Any) -> Any:
    return pytest.param(lambda table: table.update({key: value}), id=f"{key}={value}")


def part_of(table: dict[str, Any], name: str = "w", section: str = "model") -> dict[str, Any]:
    row: dict[str, Any] = table["tensors"][section][name]
    return row


HF_FACTS = {"path": "a", "config": {}, "generation": {}, "tokens": {}, "left_out": []}

FORGERIES = [
    *(set_to("created", value) for value in (5, None, "yesterday", "\x1b]52;c;aGk=\x07", "2026-11-22")),
    *(set_to("metrics", value) for value in ("text", {"loss": "low"}, {"loss": None}, [1.0], None)),
    *(set_to("config", value) for value in ([], "text", 5, None)),
    *(set_to(key, value) for key in ("consumed_samples", "updates", "fencing") for value in (-1, "5", 1.5, True, None)),
    *(set_to("mesh", value) for value in ({"tp": "2"}, [], {"tp": None})),
    *(set_to("versions", value) for value in ({"torch": 2}, "2")),
    *(set_to("keep", value) for value in ("forever", 1, [])),
    *(set_to(key, value) for key in ("plugin_fingerprint", "base") for value in (1, None, [])),
    *(set_to("without_base", value) for value in (1, "no")),
    *(set_to(key, value) for key in ("files", "tensors", "hf") for value in ([], "text", None)),
    *(set_to("hf", value) for value in ({"path": 1}, {**HF_FACTS, "left_out": 5}, {**HF_FACTS, "path": None})),
    *(set_to("hf", {**HF_FACTS, "config": {"eos_token_id": value}}) for value in ("</s>", [1, "2"], {})),
    *(set_to("step", value) for value in (True, 1.0, "1")),
    pytest.param(lambda table: table["tensors"].update(other=table["tensors"]["model"]), id="another section's file"),
    pytest.param(lambda table: part_of(table).update(dtype="int32"), id="another dtype of that size"),
    pytest.param(lambda table: part_of(table).update(dtype="bfloat16"), id="a smaller dtype"),
    pytest.param(lambda table: part_of(table).update(shape=[3, 4]), id="another shape of that size"),
    pytest.param(lambda table: part_of(table)["parts"][0].__setitem__(1, 8), id="bytes of the header"),
    pytest.param(
        lambda table: part_of(table)["parts"][0].__setitem__(0, part_of(table, "w/exp_avg", "optim")["parts"][0][0]),
        id="the optimizer's file",
    ),
    pytest.param(
        lambda table: part_of(table).update(
            parts=[[*part_of(table)["parts"][0], [0, 0], [2, 3]], [*part_of(table)["parts"][0], [1, 0], [2, 3]]]
        ),
        id="parts that overlap",
    ),
]


@pytest.mark.parametrize("change", FORGERIES)
def test_a_forged_manifest_is_damage_to_every_command(
    store: LocalStorage, save: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    save(store, 1)
    forged_table(store, save, change, step=2)
    listed = list_checkpoints(store)
    assert listed[0].state == "committed"
    problems = verify(store, 2)
    assert problems
    newest = latest(store, warn=lambda line: None)
    assert newest is not None
    assert newest.step == 1
    with pytest.raises(CheckpointDamaged):
        load_all(store, 2)


def test_an_index_that_exchanges_two_tensors_is_damage(store: LocalStorage, save: Any) -> None:
    def exchange(table: dict[str, Any]) -> None:
        index = table["tensors"]["model"]
        index["a"]["parts"], index["b"]["parts"] = index["b"]["parts"], index["a"]["parts"]

    def save_two(store: LocalStorage, step: int) -> Manifest:
        manifest: Manifest = save(store, step, model={"a": torch.zeros(4), "b": torch.ones(4)})
        return manifest

    forged_table(store, save_two, exchange)
    assert any("its header says 'b'" in problem or "its header says 'a'" in problem for problem in verify(store, 1))
    with pytest.raises(CheckpointDamaged, match="header"):
        load_model(store, read_manifest(store, 1))


def test_a_state_that_is_none_is_damage_to_verify(store: LocalStorage, save: Any) -> None:
    forge(store, save(store, 1), STATE, b'{"$":"tensor","name":"nowhere"}')
    assert any("it is not a state" in problem for problem in verify(store, 1))


@pytest.mark.parametrize(
    "progress",
    [
        {"step": 1, "consumed_samples": 16},
        {"step": 2, "consumed_samples": 8},
        {"step": "2", "consumed_samples": 16},
        {"step": True},
        5,
    ],
)
def test_a_state_of_another_step_than_its_manifest_is_damage(store: LocalStorage, save: Any, progress: Any) -> None:
    """The weights of step 2 must not resume as step 3000, nor read the data from another sample."""
    save(store, 1)
    manifest = save(store, 2)
    forge(store, manifest, STATE, json.dumps({"train": progress}).encode())
    assert any(STATE in problem for problem in verify(store, 2))
    lines: list[str] = []
    newest = latest(store, warn=lines.append)
    assert newest is not None
    assert newest.step == 1
    assert STATE in lines[0]
    with pytest.raises(CheckpointDamaged, match=r"and that of the manifest|mapping"):
        load_state(store, read_manifest(store, 2))


def test_a_missing_state_between_two_ranks_is_damage(store: LocalStorage, save: Any) -> None:
    def drop(table: dict[str, Any]) -> None:
        table["files"]["state/rank-00002.json"] = table["files"][STATE]

    forged_table(store, save, drop)
    with pytest.raises(CheckpointDamaged, match="files"):
        read_manifest(store, 1)


def test_what_a_directory_says_is_read_from_a_manifest_of_a_later_version(store: LocalStorage, save: Any) -> None:
    forged_table(store, save, lambda table: table.update(hf={**HF_FACTS, "more": 1}))
    assert HFSource.of_facts(read_manifest(store, 1).facts.hf) == HFSource(path="a")


@pytest.mark.parametrize("size", ["Infinity", "1e400", '"x"'])
def test_digests_of_no_size_are_damage(size: str) -> None:
    table = f'{{"algorithm": "xxh3", "block_bytes": 8, "size_bytes": {size}, "blocks": []}}'
    known = json.loads(BlockDigests(size_bytes=0, blocks=()).encode())["algorithm"]
    with pytest.raises(ValueError, match=r"digests|invalid literal|number of"):
        BlockDigests.decode(table.replace("xxh3", known).encode())


def test_a_state_that_is_none_is_damage_to_a_comparison(store: LocalStorage, save: Any) -> None:
    forge(store, save(store, 1), STATE, b"[" * 100_000)
    with pytest.raises(CheckpointDamaged, match="it is not a state"):
        load_state(store, read_manifest(store, 1))
    side = Side(store, read_manifest(store, 1))
    with pytest.raises(CheckpointDamaged, match="it is not a state"):
        compare_checkpoints(side, side)
