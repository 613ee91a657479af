"""Arrays of a cache: compared with their digests, made again where they are damaged; locks and unfinished arrays."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128

from nxdt_core.data.cache import cached_arrays, content_digests, digest, is_array
from nxdt_core.system.file_lock import take_file_lock


@dataclass
class Arrays:
    numbers: np.ndarray


def fits(arrays: Arrays) -> bool:
    return is_array(arrays.numbers, "if", len(arrays.numbers))


@pytest.fixture
def locks(tmp_path, monkeypatch) -> Path:
    """Where they are, once they are taken; ``tmp_path/cache`` is on such a file system."""
    mounts = tmp_path / "mountinfo"
    line = "rw,noatime shared:7 - nfs fs-1:/ rw,vers=3,nolock,local_lock=all"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:40 / {tmp_path}/cache {line}\n")
    monkeypatch.setattr("nxdt_core.system.file_lock.MOUNTS", mounts)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"nxdt-locks-{os.geteuid()}"


def made(tmp_path, on_error):
    found = cached_arrays(tmp_path / "cache", "five", Arrays, lambda: Arrays(np.arange(5)), on_error, fits)
    assert found.numbers.tolist() == [0, 1, 2, 3, 4]


def test_no_other_user_can_enter_the_directory_of_locks(tmp_path, locks):
    umask = os.umask(0)
    try:
        made(tmp_path, pytest.fail)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(locks.stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["five"]


@pytest.mark.parametrize("reason", ["it is a symbolic link", "its mode must be 0700"])
def test_a_directory_of_locks_that_others_can_change_is_not_used(tmp_path, locks, reason):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if "link" in reason:
        locks.symlink_to(elsewhere)
    else:
        locks.mkdir()
        locks.chmod(0o777)
    reasons: list[OSError] = []
    made(tmp_path, reasons.append)
    assert reason in str(reasons[0])
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "cache" / "five").exists()


@pytest.mark.parametrize("damage", ["byte", "cut", "exchanged", "renamed", "digests gone", "digests text", "pipe"])
def test_arrays_that_differ_from_their_digests_are_made_again(tmp_path, caplog, damage):
    """A changed id, an array or all arrays of other data, and a table of digests that says nothing."""

    def asked(name, content):
        calls = []
        make = lambda: calls.append(name) or Arrays(np.array(content))  # noqa: E731
        return cached_arrays(tmp_path, name, Arrays, make, pytest.fail, fits).numbers.tolist(), bool(calls)

    assert [asked("five", [1, 2, 3]), asked("five", [1, 2, 3])] == [([1, 2, 3], True), ([1, 2, 3], False)]
    asked("other", [4, 5, 6])
    numbers, digests = (tmp_path / "five" / name for name in ("numbers.npy", "digests.json"))
    if damage in ("byte", "cut"):
        content = numbers.read_bytes()
        numbers.write_bytes(content[:-8] if damage == "cut" else content[:-8] + b"\t" + content[-7:])
    elif damage == "exchanged":
        (tmp_path / "other" / "numbers.npy").replace(numbers)
    elif damage == "renamed":
        (tmp_path / "five").rename(tmp_path / "gone")
        (tmp_path / "other").rename(tmp_path / "five")
    elif damage == "pipe":
        digests.unlink()
        os.mkfifo(digests)
    else:
        digests.write_text('["five"]') if damage == "digests text" else digests.unlink()
    assert asked("five", [1, 2, 3]) == ([1, 2, 3], True)
    assert f"{tmp_path / 'five'} is damaged and is made again" in caplog.text
    assert asked("five", [1, 2, 3]) == ([1, 2, 3], False)


def test_a_pickle_in_place_of_an_array_is_not_loaded(tmp_path):
    """Also where its digest was forged."""

    class Payload:
        def __reduce__(self):
            return pytest.fail, ("the payload ran",)

    cached_arrays(tmp_path, "five", Arrays, lambda: Arrays(np.arange(5)), pytest.fail, fits)
    numbers, digests = (tmp_path / "five" / name for name in ("numbers.npy", "digests.json"))
    np.save(pickled := io.BytesIO(), np.array([Payload()]))
    np.savez(archive := io.BytesIO(), numbers=np.arange(5))
    header = b"\x93NUMPY\x01\x00\x07\x00((((((\n"
    for content in (pickled.getvalue(), archive.getvalue(), pickle.dumps(Payload()), header):
        numbers.write_bytes(content)
        digests.write_text(json.dumps({"": "five", "numbers": content_digests([numbers], None)[0]}))
        found = cached_arrays(tmp_path, "five", Arrays, lambda: Arrays(np.arange(5)), pytest.fail, fits)
        assert found.numbers.tolist() == [0, 1, 2, 3, 4]


def test_a_large_file_is_read_again_after_it_has_changed(tmp_path, monkeypatch):
    """Also where its length and its time of modification are the old ones, and where what is kept is damaged."""
    monkeypatch.setattr("nxdt_core.data.cache.SAMPLED_FROM_BYTES", 8)
    path, kept = tmp_path / "texts", tmp_path / "cache"
    path.write_bytes(b"before " * 9)
    before, reads = path.stat(), []
    monkeypatch.setattr("nxdt_core.data.cache.xxh3_128", lambda: reads.append(1) or xxh3_128())

    def read():
        reads.clear()
        return content_digests([path], kept)[0], len(reads)

    first, _ = read()
    assert read() == (first, 1), "another change may have the same time"
    assert not kept.exists()
    monkeypatch.setattr("nxdt_core.data.cache._SETTLED_S", -1e9)
    assert [read(), read()] == [(first, 1), (first, 0)]
    path.write_bytes(b"change " * 9)
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second, count = read()
    assert (second != first, count) == (True, 1)
    for text in ("7", "[1, 2]", '{"a": 7}', json.dumps({str(path): [second]})):
        (kept / "digests.json").write_text(text)
        assert [read(), read()] == [(second, 1), (second, 0)]


def test_what_killed_processes_have_not_finished_is_removed(tmp_path):
    """What others are making stays, also above the limit of the directory."""
    dead, living, own = (f"chats-{digest(name)}" for name in ("dead", "living", "own"))
    strange = (".config-12345678", f".{dead}", f"{dead}-12345678")
    for name in (*strange, *(f".{name}-abc_1234" for name in (dead, living, own))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "numbers.npy", np.arange(5))
    lock = take_file_lock(tmp_path / f"{living}.lock", b"")
    cached_arrays(tmp_path, own, Arrays, lambda: Arrays(np.arange(5)), pytest.fail, fits)
    rest = {*strange, own, f".{living}-abc_1234", f"{living}.lock"}
    assert {path.name for path in tmp_path.iterdir()} == rest
    cached_arrays(tmp_path, "new", Arrays, lambda: Arrays(np.arange(5)), pytest.fail, fits, most_bytes=0)
    assert (tmp_path / f".{living}-abc_1234").exists()
    lock.release()


def test_where_no_lock_is_shared_nothing_unfinished_is_removed(tmp_path, locks):
    part = tmp_path / "cache" / f".chats-{digest('of another node')}-abc_1234"
    part.mkdir(parents=True)
    made(tmp_path, pytest.fail)
    assert part.exists()


def test_what_was_not_asked_for_longest_is_removed_above_the_limit(tmp_path):
    def asked(name, most_bytes=None):
        calls = []
        found = cached_arrays(
            tmp_path,
            name,
            Arrays,
            lambda: calls.append(name) or Arrays(np.zeros(1000)),
            pytest.fail,
            fits,
            most_bytes=most_bytes,
        )
        assert len(found.numbers) == 1000
        return bool(calls)

    (tmp_path / "notes").mkdir()
    for age, name in enumerate(("c", "b", "a")):
        assert asked(name)
        os.utime(tmp_path / name, (age, age))
    assert not asked("c")  # which is the newest from now on
    assert asked("d", most_bytes=20_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "notes"]
