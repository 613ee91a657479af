"""What is read as a checkpoint of NxD Training cannot run code, leave its directory or take memory beyond its size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_plugin_migrate.errors import NeuronxFileDamaged, NeuronxMisfit, PickleRefused
from nxdt_testing.errors import raises

from nxdt_core.protocols.model import ModelBuilder
from plugins.migration.nxd.tests.nxd_writer import TensorReference, Written, references_can_be_pickled
from tests.checkpoint.poison import DRESSES, dressed, import_all, packed, weights
from tests.sampling import slow_except


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "xser"])
def sound(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Of one tensor-parallel rank by two pipeline ranks, without master weights: then all files are read."""
    cut = Written(heads=4, kv_heads=2, pp=2, dp=1, xser=request.param, masters=False)
    return cut.write(tmp_path_factory.mktemp("nxd") / "tag.ckpt", weights(), 2)


@pytest.fixture(scope="module")
def kinds(sound: Path) -> list[Path]:
    """One file of each kind, relative to the directory; there are many of a kind. (Counts of steps are read from one
    rank alone.)"""
    tensors = [path for path in sound.rglob("tensor_*.pt") if torch.load(path).dim()]
    others = [path for path in sound.rglob("*.pt") if not path.name.startswith("tensor_")]
    found = {(path.relative_to(sound).parts[0], *path.suffixes): path for path in others}
    found |= {(path.relative_to(sound).parts[0], "tensor"): path for path in tensors}
    assert len(found) == (7 if tensors else 3)
    return [path.relative_to(sound) for path in found.values()]


@pytest.fixture
def nxd(tmp_path: Path, sound: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def test_the_directory_is_good_before_it_is_poisoned(nxd: Path, builder: ModelBuilder) -> None:
    assert len(import_all(nxd, builder)) == 21 * 4


@pytest.mark.parametrize("dress", DRESSES)
def test_a_payload_in_any_file_of_nxd_is_refused_and_named(
    nxd: Path, kinds: list[Path], builder: ModelBuilder, marker: Path, dress: str
) -> None:
    for path in (nxd / kind for kind in kinds):
        own = path.read_bytes()
        path.write_bytes(dressed(dress, marker))
        with raises(PickleRefused, NeuronxFileDamaged) as caught:
            import_all(nxd, builder)
        assert str(path) in str(caught.value)
        path.write_bytes(own)
    import_all(nxd, builder)


@pytest.mark.parametrize("dress", slow_except([*DRESSES], ("torch",)))  # no file is opened
def test_markers_of_nxd_are_names_and_not_read(nxd: Path, builder: ModelBuilder, marker: Path, dress: str) -> None:
    for name in ("checkpoint", "done", "scheduler.pt", "newest"):
        (nxd / name).write_bytes(dressed(dress, marker))
    import_all(nxd, builder)


def test_what_is_refused_is_named(nxd: Path, builder: ModelBuilder, marker: Path) -> None:
    (nxd / "user_content.pt").write_bytes(dressed("torch", marker))
    with raises(PickleRefused, match=r"names 'posix\.system', which could run code"):
        import_all(nxd, builder)


class Refers:
    """Pickled as a call of something that is allowed, with arguments that it was not made for."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def endless(size: tuple[int, ...], stride: tuple[int, ...]) -> Refers:
    one = torch.ones(1).untyped_storage()
    storage = torch.storage.TypedStorage(wrap_storage=one, dtype=torch.float32, _internal=True)
    return Refers(torch._utils._rebuild_tensor_v2, (storage, 0, size, stride, False, {}))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "content",
    [
        {"model.norm.weight": endless((2**40,), (0,))},
        {"model.norm.weight": endless((2**40,), (1,))},
        {"model.norm.weight": endless((-1,), (1,))},
        {"model.norm.weight": torch.ones(8).to_sparse()},
        {"model.norm.weight": torch.empty(2**50, device="meta")},
        {"model.norm.weight": Refers(bytearray, (2**50,))},
        {"model.norm.weight": "text"},
        [torch.ones(8)],
        torch.ones(8),
        None,
    ],
    ids=range(10),
)
def test_tensors_that_claim_more_than_there_is_are_damage(nxd: Path, builder: ModelBuilder, content: Any) -> None:
    path = nxd / "model/dp_rank_00_tp_rank_00_pp_rank_01.pt"
    torch.save(content, path)
    with raises(NeuronxFileDamaged, PickleRefused, match=path.name):
        import_all(nxd, builder)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("shape", [(2**40, 0, 2), (2, 2)])
def test_experts_that_are_none_cost_no_time(nxd: Path, builder: ModelBuilder, shape: tuple[int, ...]) -> None:
    path = nxd / "model/dp_rank_00_tp_rank_00_pp_rank_01.pt"
    torch.save({"model.layers.1.mlp.expert_mlps.mlp_op.down_proj.weight": torch.empty(shape)}, path)
    with raises(NeuronxMisfit, match="at most 4096 experts"):
        import_all(nxd, builder)


def test_an_archive_that_unfolds_is_not_unfolded(nxd: Path, builder: ModelBuilder) -> None:
    path = nxd / "user_content.pt"
    torch.save({"global_step": 1, "zeros": bytes(2**22)}, path)
    path.write_bytes(packed(path.read_bytes()))
    with raises(NeuronxFileDamaged, match="its entries are packed"):
        import_all(nxd, builder)


@pytest.mark.parametrize("number", ["../../secret", "0", -1, 1.5, None, True, [0], 10**30])
def test_references_of_nxd_name_no_files_elsewhere(nxd: Path, builder: ModelBuilder, number: Any) -> None:
    path = nxd / "model/dp_rank_00_tp_rank_00_pp_rank_01.pt"
    with references_can_be_pickled():
        torch.save({"model.norm.weight": TensorReference(number)}, path)
    with raises(NeuronxFileDamaged, PickleRefused, match="dp_rank_00_tp_rank_00_pp_rank_01"):
        import_all(nxd, builder)


def test_shapes_that_xser_claims_cost_no_memory(tmp_path: Path, builder: ModelBuilder) -> None:
    directory = Written(heads=4, kv_heads=2, xser=True).write(tmp_path / "tag", weights(), 2)
    path = directory / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.info.pt"
    info = torch.load(path)
    changes: list[Callable[[dict[str, Any]], None]] = [
        lambda told: told.update(shape=torch.Size([2**40, 2])),
        lambda told: told.update(shape="many"),
        lambda told: told.update(dtype="os.system"),
        lambda told: told.clear(),
    ]
    for change in changes:
        forged = {number: dict(told) for number, told in info.items()}
        change(forged[0])
        torch.save(forged, path)
        with raises(NeuronxFileDamaged):
            import_all(directory, builder)
