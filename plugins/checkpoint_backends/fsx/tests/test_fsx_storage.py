"""What the store adds to a directory: striping, export, and words where one of them does not work."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_plugin_fsx.config import FsxStorageConfig
from nxdt_plugin_fsx.storage import FsxStorage
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import (
    CheckpointFacts,
    Manifest,
    check_writable,
    list_checkpoints,
    locate,
    open_storage,
    own,
    verify,
)
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import BadStorageUri
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.protocols.store import CheckpointStore
from tests.checkpoint.saving import save_checkpoint


def save(storage: FsxStorage, step: int) -> Manifest:
    weights = {"w": torch.full((1000,), float(step))}
    return save_checkpoint(
        storage,
        step=step,
        model=weights,
        optimizer={"w/exp_avg": weights["w"]},
        state={"rng": torch.arange(3)},
        facts=CheckpointFacts(),
    )


def test_the_scheme_is_served_and_addresses_lead_back(tmp_path: Path) -> None:
    storage = open_storage(f"fsx://{tmp_path}/a%20b/")
    assert isinstance(storage, FsxStorage)
    assert isinstance(storage, CheckpointStore)
    assert storage.uri == f"fsx://{tmp_path}/a%20b"
    save(storage, 3)
    again, step = locate(f"{storage.uri}/step-00000003")
    assert (again.uri, step) == (storage.uri, 3)
    assert verify(LocalStorage(str(tmp_path / "a b")), 3) == []


@pytest.mark.parametrize("uri", ["fsx://host/a", "fsx:a", "fsx://", " "])
def test_addresses_without_a_meaning_are_refused(uri: str) -> None:
    with raises(BadStorageUri):
        FsxStorage(uri)


def test_directories_of_shards_are_striped_and_no_others(store: FsxStorage, lfs: Any, lustre: Path) -> None:
    manifest = save(store, 1)
    attempt = lustre / "runs/a" / manifest.prefix
    layout = shlex.split("-E 64M -c 1 -S 4M -E 100G -c 8 -S 4M -E -1 -c -1 -S 4M")
    assert [call[:-1] for call in lfs.calls("setstripe")] == [layout, layout]
    assert lfs.striped() == {(attempt / name).stat().st_ino for name in ("model", "optim")}
    assert [path.name for path in lustre.rglob(".nxdt-tmp-*")] == []


def test_the_layout_is_configurable(lustre: Path, lfs: Any) -> None:
    config = FsxStorageConfig(stripe_size_bytes=65536, stripe_above_bytes=3 * 65536, stripe_count=-1)
    save(FsxStorage(f"fsx://{lustre}/a", config), 1)
    assert lfs.calls("setstripe")[0][:12] == shlex.split("-E 192K -c 1 -S 64K -E 100G -c -1 -S 64K")
    save(FsxStorage(f"fsx://{lustre}/b", FsxStorageConfig(stripe=False)), 1)
    assert len(lfs.calls("setstripe")) == 2


def test_ranks_that_make_a_directory_at_once_write_into_a_striped_one(store: FsxStorage, lfs: Any) -> None:
    """The rank that is late finds the directory, with files in it or not, and leaves nothing of its own."""

    def write(rank: int) -> None:
        with store.open_write(f"step-00000001/a/model/shard-{rank}") as stream:
            stream.write(b"x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    folder = Path(store._root) / "step-00000001/a/model"
    assert len(list(store.list())) == 8
    assert folder.stat().st_ino in lfs.striped()
    assert len(list(folder.parent.iterdir())) == 1


def test_what_a_killed_rank_left_of_a_directory_is_swept(store: FsxStorage, lfs: Any) -> None:
    manifest = save(store, 1)
    left = store._root / manifest.prefix / ".nxdt-tmp-0123456789abcdef"
    left.mkdir()
    save(store, 2)
    assert not left.exists()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("nxdt_plugin_fsx")]


def test_another_file_system_is_told_once_and_works(
    mounted: Callable[[str], Path], lfs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    point = mounted("xfs /dev/nvme1n1 rw")
    uri = f"fsx://{point}/runs"
    for step in (1, 2):
        storage = FsxStorage(uri, FsxStorageConfig(archive=True))
        own(storage, run="a", say=pytest.fail).release()
        save(storage, step)
    assert len(warnings(caplog)) == 1
    assert f"[NXDT-S120] {uri} is not on a Lustre file system: {point} is xfs." in warnings(caplog)[0]
    assert [status.state for status in list_checkpoints(FsxStorage(uri))] == ["committed", "committed"]
    assert lfs.calls("setstripe") == lfs.calls("hsm_archive") == []
    assert storage.archive_state("step-00000001/") == ""


def test_reading_warns_of_nothing(mounted: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    point = mounted("xfs /dev/nvme1n1 rw")
    list_checkpoints(FsxStorage(f"fsx://{point}/runs"))
    assert warnings(caplog) == []


def test_without_lfs_it_is_a_directory(
    store: FsxStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    save(store, 1)
    save(FsxStorage(store.uri), 2)
    assert [verify(store, step) for step in (1, 2)] == [[], []]
    assert len(warnings(caplog)) == 1
    assert "[NXDT-S121]" in warnings(caplog)[0]
    assert store.archive_state("step-00000001/") == ""


def test_a_layout_that_lustre_refuses_is_a_warning(
    store: FsxStorage, lfs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lfs.behave(fails=["setstripe"], says="unable to set stripe: Invalid argument", status=22)
    save(store, 1)
    assert verify(store, 1) == []
    assert len(warnings(caplog)) == 1
    for words in ("[NXDT-S123]", "exit status 22", "Invalid argument", "checkpoint.storage.stripe=false"):
        assert words in warnings(caplog)[0]


def test_an_lfs_that_hangs_is_ended(lustre: Path, lfs: Any, caplog: pytest.LogCaptureFixture) -> None:
    lfs.behave(sleep_s=600)
    storage = FsxStorage(f"fsx://{lustre}/a", FsxStorageConfig(lfs_timeout_s=0.2, archive=True))
    save(storage, 1)
    assert verify(storage, 1) == []
    assert ["it had not ended after 0.2 s" in line for line in warnings(caplog)] == [True, True]
    assert "it had not ended" in storage.archive_state("step-00000001/")


def test_a_committed_checkpoint_is_exported_whole(lustre: Path, lfs: Any) -> None:
    storage = FsxStorage(f"fsx://{lustre}/a", FsxStorageConfig(archive=True))
    save(storage, 1)
    asked = [path for call in lfs.calls("hsm_archive") for path in call]
    assert sorted(asked) == sorted(str(path) for path in (lustre / "a").rglob("*") if path.is_file())
    assert str(lustre / "a/step-00000001/manifest.json") in asked
    assert storage.archive_state("step-00000001/") == "archived"
    save(FsxStorage(storage.uri), 2)
    assert storage.archive_state("step-00000002/") == "not archived"
    assert storage.archive_state("step-00000003/") == ""


def test_the_list_tells_how_far_the_export_is(
    lustre: Path, lfs: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FsxStorage(f"fsx://{lustre}/a", FsxStorageConfig(archive=True))
    save(storage, 1)
    lfs.behave(fails=["hsm_archive"], says="Operation not permitted")
    save(storage, 2)
    assert main(["checkpoint", "list", storage.uri]) == 0
    header, first, second = capsys.readouterr().out.splitlines()[-3:]  # below the address, in one line or more
    assert "ARCHIVE" in header
    assert " archived " in first
    assert " not archived " in second
    main(["checkpoint", "list", storage.uri, "--json"])
    assert [row["archive"] for row in json.loads(capsys.readouterr().out)] == ["archived", "not archived"]


def test_more_files_than_a_command_line_takes(lustre: Path, lfs: Any) -> None:
    storage = FsxStorage(f"fsx://{lustre}/a", FsxStorageConfig(archive=True, fsync=False))
    for number in range(401):
        storage.put_if_absent(f"step-00000001/{number}", b"")
    storage.after_commit("step-00000001/")
    assert [len(call) for call in lfs.calls("hsm_archive")] == [200, 200, 1]
    assert storage.archive_state("step-00000001/") == "archived"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"0": "(0x0000000d) released exists archived, archive_id:1"}, "archived"),
        ({"0": "(0x00000000)"}, "archived 2 of 3 files"),
        ({"0": "(0x0000000b) exists dirty archived, archive_id:1"}, "archived 2 of 3 files"),
        ({"0": "(0x00000001) exists, archive_id:1", "1": "(0x00000000)"}, "archived 1 of 3 files"),
        ({"0": "(0x00000049) exists archived lost, archive_id:1"}, "archived 2 of 3 files, 1 lost"),
        ({str(number): "(0x00000000)" for number in range(3)}, "not archived"),
    ],
)
def test_the_states_of_files_are_summed_up(store: FsxStorage, lfs: Any, states: Any, expected: str) -> None:
    archived = dict.fromkeys("012", "(0x00000009) exists archived, archive_id:1")
    for name in archived:
        store.put_if_absent(f"step-00000001/{name}", b"")
    lfs.behave(states={**archived, **states})
    assert store.archive_state("step-00000001/") == expected


def test_names_that_look_like_states_are_names(lustre: Path, lfs: Any) -> None:
    storage = FsxStorage(f"fsx://{lustre}/a: (0x00000009) exists archived")
    storage.put_if_absent("step-00000001/b: (0x00000009)", b"")
    assert storage.archive_state("step-00000001/") == "not archived"


def test_an_answer_that_is_none_is_not_taken_for_one(store: FsxStorage, lfs: Any) -> None:
    store.put_if_absent("step-00000001/a", b"")
    lfs.behave(states={"a": "in another language"})
    assert store.archive_state("step-00000001/") == "unknown: it reported 0 of 1 files"


def test_an_export_that_fails_is_a_warning_with_the_command_that_repeats_it(
    lustre: Path, lfs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lfs.behave(fails=["hsm_archive"], says="Operation not permitted")
    storage = FsxStorage(f"fsx://{lustre}/a run", FsxStorageConfig(archive=True))
    save(storage, 1)
    assert verify(storage, 1) == []
    assert storage.archive_state("step-00000001/") == "not archived"
    (line,) = warnings(caplog)
    assert "[NXDT-S124]" in line
    assert "Operation not permitted" in line
    lfs.behave()
    subprocess.run(["sh", "-c", line[line.index("find ") :]], check=True)
    assert storage.archive_state("step-00000001/") == "archived"


def test_each_failed_export_is_told(lustre: Path, lfs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each concerns another checkpoint."""
    lfs.behave(fails=["hsm_archive"], says="Operation not permitted")
    for step in (1, 2):
        save(FsxStorage(f"fsx://{lustre}/a", FsxStorageConfig(archive=True)), step)
    assert ["step-0000000" + str(step) in line for step, line in enumerate(warnings(caplog), 1)] == [True, True]


@pytest.mark.parametrize(("options", "leased"), [("rw,flock", False), ("rw,localflock", True), ("rw", True)])
def test_locks_that_other_nodes_do_not_see_are_replaced_by_a_lease(
    mounted: Callable[[str], Path], lfs: Any, options: str, leased: bool
) -> None:
    storage = FsxStorage(f"fsx://{mounted(f'lustre 10.0.0.1@tcp:/fsx {options}')}/a")
    check_writable(storage)
    lines: list[str] = []
    ownership = own(storage, run="a", say=lines.append)
    assert bool(list(storage.list("owner-"))) is leased
    assert any("lease instead of a lock" in line for line in lines) is leased
    ownership.release()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stripe_size_bytes=100000", "not a multiple of 64 KiB"),
        ("stripe_above_bytes=65536", "not a multiple of stripe_size_bytes"),
        ("stripe_all_above_bytes=67108864", "must be greater than stripe_above_bytes"),
        ("stripe_count=0", "-1 takes all"),
        ("stripes=1", "stripe"),
    ],
)
def test_layouts_that_cannot_be_are_found_with_the_configuration(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("recipe:llama-tiny", [f"checkpoint.uri=fsx://{tmp_path}", f"checkpoint.storage.{override}"])
