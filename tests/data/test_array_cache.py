"""Locks of a cache on a file system whose locks other machines do not see: each node has its own."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nxdt_core.data.cache import cached_arrays


@dataclass
class Arrays:
    numbers: np.ndarray


@pytest.fixture
def locks(tmp_path, monkeypatch) -> Path:
    """Where they are, once they are taken; ``tmp_path/cache`` is on such a file system."""
    mounts = tmp_path / "mountinfo"
    line = "rw,noatime shared:7 - nfs fs-1:/ rw,vers=3,nolock,local_lock=all"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:40 / {tmp_path}/cache {line}\n")
    monkeypatch.setattr("nxdt_core.file_lock.MOUNTS", mounts)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"nxdt-locks-{os.geteuid()}"


def made(tmp_path, unkept):
    found = cached_arrays(tmp_path / "cache", "five", Arrays, lambda: Arrays(np.arange(5)), unkept)
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


def test_what_was_not_asked_for_longest_is_removed_above_the_limit(tmp_path):
    def asked(name, most_bytes=None):
        calls = []
        found = cached_arrays(
            tmp_path,
            name,
            Arrays,
            lambda: calls.append(name) or Arrays(np.zeros(1000)),
            pytest.fail,
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
