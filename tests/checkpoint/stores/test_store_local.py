"""What the local store adds to the contract: addresses, errors of the file system, leftovers of killed writers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import (
    check_writable,
    find_checkpoint,
    latest,
    list_checkpoints,
    load_model,
    load_state,
    prune,
    verify,
)
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config.schema import LocalStorageConfig
from nxdt_core.errors.checkpoints import (
    BadStorageUri,
    CheckpointDamaged,
    CheckpointIsNoFile,
    LockIsNoFile,
    StorageDenied,
    StoragePathIsFile,
)
from tests import private_mounts, processes
from tests.sampling import slow

NOBODY = 65534


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file:///a/b%20c/", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("/a/b%20c", "/a/b%20c"),
    ],
)
def test_absolute_addresses(uri: str, path: str) -> None:
    assert LocalStorage(uri).uri == path


def test_relative_addresses_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    store = LocalStorage("runs/a")
    assert store.uri == f"{tmp_path}/runs/a"
    assert LocalStorage("~/runs").uri == "/home/someone/runs"
    monkeypatch.chdir("/")
    store.put_if_absent("k", b"")
    assert (tmp_path / "runs/a/k").exists(), "a store stays where it was when the process changes its directory"


@pytest.mark.parametrize("uri", ["", "  ", "file://host/a", "file:a", "file://~/a", "a\0b"])
def test_addresses_without_a_meaning_are_refused(uri: str) -> None:
    with raises(BadStorageUri):
        LocalStorage(uri)


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    store = LocalStorage(str(tmp_path / "a"))
    assert list(store.list()) == []
    assert store.stat("x") is None
    store.delete_many(["x"])
    store.after_commit("x/")
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path, save: Any) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    for uri in (file, file / "below"):
        with raises(StoragePathIsFile, match=f"NXDT-S003.*{file} cannot hold checkpoints"):
            save(LocalStorage(str(uri)), 1)
    with raises(StoragePathIsFile, match=str(file)):
        list_checkpoints(LocalStorage(str(file)))
    assert file.read_text() == "mine"


def test_a_directory_where_an_object_shall_be_is_named(tmp_path: Path) -> None:
    store = LocalStorage(str(tmp_path))
    (tmp_path / "k").mkdir()
    with raises(StoragePathIsFile, match="k"), store.open_write("k") as stream:
        stream.write(b"x")
    assert [path.name for path in tmp_path.rglob("*")] == ["k"]


@pytest.fixture
def locked(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory that this process may read but not write; root gives up its rights for the time."""
    root = Path(tempfile.mkdtemp(prefix="nxdt-locked-"))
    root.chmod(0o755)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    else:
        root.chmod(0o555)
    try:
        yield root
    finally:
        if was_root:
            os.seteuid(0)
        root.chmod(0o755)
        shutil.rmtree(root)


def test_a_directory_that_may_not_be_written(locked: Path, save: Any) -> None:
    for store in (LocalStorage(str(locked)), LocalStorage(str(locked / "new"))):
        with pytest.raises(StorageDenied, match=f"NXDT-S002.*{locked}"):
            save(store, 1)
        with pytest.raises(StorageDenied):
            check_writable(store)
    assert list(locked.iterdir()) == []


def test_check_writable_leaves_nothing(tmp_path: Path) -> None:
    check_writable(LocalStorage(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("absent", [True, False])
def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, absent: bool
) -> None:
    """A power failure cannot be had in a test; the order of the calls that guard against one can."""
    seen: list[str] = []

    def spy(module: Any, name: str, what: Callable[..., str]) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (seen.append(what(*args)), original(*args))[1])

    def synced(descriptor: int) -> str:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return "directory " + Path(path).name if os.path.isdir(path) else "file"

    spy(os, "fsync", synced)
    spy(os, "link", lambda *_: "name")
    spy(Path, "replace", lambda *_: "name")
    store = LocalStorage(str(tmp_path / "root"), LocalStorageConfig(fsync=fsync))
    if absent:
        store.put_if_absent("a/k", b"x")
    else:
        with store.open_write("a/k") as stream:
            stream.write(b"x")
    parents = [f"directory {tmp_path.name}", "directory root"]
    assert seen == ([*parents, "file", "name", "directory a"] if fsync else ["name"])


FILL = """
    import sys, torch
    from nxdt_core.checkpoint import CheckpointFacts, open_storage
    from tests.checkpoint.saving import save_checkpoint
    from nxdt_core.errors.checkpoints import StorageFull
    store = open_storage(sys.argv[1])
    for step, elements in ((1, 1000), (2, 4_000_000)):
        try:
            save_checkpoint(store, step=step, model={"w": torch.ones(elements)}, optimizer={}, state={},
                            facts=CheckpointFacts())
        except StorageFull as error:
            print(f"full at {step}: {error}")
"""


def check_filled(store: LocalStorage, output: str) -> None:
    assert "full at 2: [NXDT-S001] No space is left for" in output
    assert [(status.step, status.state) for status in list_checkpoints(store)] == [(1, "committed")]
    assert verify(store, 1) == []
    assert [path.name for path in Path(store.uri).iterdir()] == ["step-00000001"]


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: a file system of 4 MiB that only the child sees."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    program = "mount('-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', sys.argv[1])\n" + textwrap.dedent(FILL)
    done = private_mounts.run(
        f"{program}\nsubprocess.run(['cp', '-r', *sys.argv[1:]], check=True)", str(disk), str(copy)
    )
    assert done.returncode == 0, done.stderr
    check_filled(LocalStorage(str(copy)), done.stdout)


@pytest.mark.slow
def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    command = [sys.executable, "-c", limit + textwrap.dedent(FILL), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_filled(LocalStorage(str(tmp_path / "c")), done.stdout)


KILLED = """
    import sys, time, torch
    from nxdt_core.checkpoint.stores.local import LocalStorage
    from nxdt_core.checkpoint import CheckpointFacts
    from tests.checkpoint.saving import save_checkpoint
    class Stopping(LocalStorage):
        stop_at = None
        def open_write(self, key):
            if self.stop_at in key:
                return Stuck(super().open_write(key))
            return super().open_write(key)
        stop_at = "never"
    class Stuck:
        def __init__(self, inner): self.inner = inner
        def __enter__(self):
            self.stream = self.inner.__enter__()
            return self
        def __exit__(self, *error): return self.inner.__exit__(*error)
        def write(self, data):
            self.stream.write(data)
            self.stream.flush()
            print("writing", flush=True)
            time.sleep(600)
    store = Stopping(sys.argv[1])
    for step in (1, 2):
        store.stop_at = "never" if step == 1 else sys.argv[2]
        save_checkpoint(store, step=step, model={"w": torch.ones(1000)}, optimizer={"w/m": torch.ones(1000)},
                        state={"position": step}, facts=CheckpointFacts())
"""


@pytest.mark.parametrize("where", ["model/", slow("state/rank")])
def test_a_killed_save_leaves_the_one_before_and_is_swept_later(store: LocalStorage, save: Any, where: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), store.uri, where]
    with processes.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        save(store, 3)
        assert temporary(store), "the sweep after a commit must leave the files of a living writer"
        child.kill()
    found = latest(store, warn=pytest.fail)
    assert found is not None
    assert found.step == 3
    assert verify(store, 1) == []
    assert "committed" not in {status.state for status in list_checkpoints(store) if status.step == 2}
    save(store, 2)
    assert not temporary(store)
    assert [verify(store, step) for step in (1, 2, 3)] == [[], [], []]


def temporary(store: LocalStorage) -> list[Path]:
    return [path for path in Path(store.uri).rglob("*") if path.name.startswith(".")]


# --- links, pipes and devices in a directory that somebody else can write to ------------------------------------------


@pytest.fixture
def three(tmp_path: Path, save: Any) -> LocalStorage:
    """Steps 1 to 3, all sound, in ``tmp_path/store``."""
    store = LocalStorage(str(tmp_path / "store"))
    for step in (1, 2, 3):
        save(store, step)
    return store


def load_all(store: LocalStorage, step: int) -> None:
    manifest = find_checkpoint(store, step, warn=lambda line: None)
    load_model(store, manifest)
    load_state(store, manifest)


def moved_and_linked(path: Path, elsewhere: Path) -> None:
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "dangling link", "directory"])
def test_a_lock_is_never_written_into_another_file(three: LocalStorage, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    lock = Path(three.uri) / ".nxdt-lock-owner"
    if kind != "dangling link":
        victim.write_text("precious")
    if kind == "hard link":
        os.link(victim, lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(victim)
    with raises(LockIsNoFile, match=r"(?s)NXDT-S020.*\.nxdt-lock-owner: .*delete what has the name"):
        three.try_lock("owner", b"me")
    assert not victim.exists() if kind == "dangling link" else victim.read_text() == "precious"


@pytest.mark.parametrize("part", ["step", "attempt", "section"])
def test_a_linked_directory_is_damage_to_every_command(three: LocalStorage, tmp_path: Path, part: str) -> None:
    step = Path(three.uri) / "step-00000003"
    attempt = next(path for path in step.iterdir() if path.is_dir())
    link = {"step": step, "attempt": attempt, "section": attempt / "model"}[part]
    moved_and_linked(link, tmp_path / "other disk")

    listed = {status.step: status for status in list_checkpoints(three)}
    assert [listed[number].state for number in (1, 2, 3)] == ["committed", "committed", "damaged"]
    assert listed[3].is_link == (part == "step")
    for problem in (listed[3].problem, verify(three, 3)[0], verify(three, 3, deep=False)[0]):
        assert str(link) in problem
        assert "symbolic link" in problem
    assert list_checkpoints(three, 3) == [listed[3]]
    lines: list[str] = []
    newest = latest(three, warn=lines.append)
    assert newest is not None
    assert newest.step == 2
    assert "symbolic link" in lines[0]
    with pytest.raises(CheckpointDamaged, match="symbolic link"):
        load_model(three, find_checkpoint(three, 3, warn=lines.append))


def test_nothing_is_written_or_deleted_behind_a_link(three: LocalStorage, tmp_path: Path) -> None:
    other = tmp_path / "other disk"
    moved_and_linked(Path(three.uri) / "step-00000001", other)
    before = sorted(other.rglob("*"))
    assert prune(three, 1) == [2]
    with raises(CheckpointIsNoFile):
        three.delete_many(["step-00000001/manifest.json"])
    with raises(CheckpointIsNoFile), three.open_write("step-00000001/new/file") as stream:
        stream.write(b"x")
    with raises(CheckpointIsNoFile):
        three.put_if_absent("step-00000001/file", b"x")
    assert sorted(other.rglob("*")) == before
    assert (Path(three.uri) / "step-00000001").is_symlink()


def test_the_directory_itself_may_be_a_link(three: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(three.uri)
    alias = LocalStorage(str(tmp_path / "alias"))
    assert [status.state for status in list_checkpoints(alias)] == ["committed"] * 3
    assert verify(alias, 3) == []


@pytest.mark.parametrize("name", ["manifest.json", "model/shard-00000-00000.safetensors", "state/rank-00000.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_is_damage_and_does_not_block(
    three: LocalStorage, name: str, make: Callable[[Path], None]
) -> None:
    step = Path(three.uri) / "step-00000003"
    attempt = next(path for path in step.iterdir() if path.is_dir())
    path = (step if name == "manifest.json" else attempt) / name
    path.unlink()
    make(path)
    assert list_checkpoints(three)[2].state == "damaged"
    assert str(path) in verify(three, 3)[0]
    newest = latest(three, warn=lambda line: None)
    assert newest is not None
    assert newest.step == 2
    with pytest.raises(CheckpointDamaged):
        load_all(three, 3)
