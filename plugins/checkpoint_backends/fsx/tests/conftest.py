"""A directory that counts as Lustre, and a stand-in for ``lfs``.

It is a program on the PATH that writes down how it is called and answers as the manual pages lfs-setstripe(1),
lfs-hsm_archive(1) and lfs-hsm_state(1) say.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nxdt_plugin_fsx import storage
from nxdt_plugin_fsx.storage import FsxStorage

STAND_IN = """\
#!{python} -IS
import json, os, sys, time
here = {here!r}
with open(here + "/calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
with open(here + "/behaviour.json") as behaviour:
    behaviour = json.load(behaviour)
verb, words = sys.argv[1], sys.argv[2:]
time.sleep(behaviour.get("sleep_s", 0))
if verb in behaviour.get("fails", ()):
    print("error: " + verb + ": " + behaviour["says"], file=sys.stderr)
    sys.exit(behaviour.get("status", 1))
if verb == "setstripe":
    if not os.path.isdir(words[-1]) or os.listdir(words[-1]):
        sys.exit("error: setstripe: not a new directory: " + words[-1])
    open(words[-1] + "/.striped", "w").close()
    os.unlink(words[-1] + "/.striped")
    with open(here + "/striped", "a") as striped:
        striped.write(str(os.stat(words[-1]).st_ino) + "\\n")
elif verb in ("hsm_archive", "hsm_state"):
    for path in words:
        if not os.path.isfile(path):
            sys.exit("Cannot open " + path + ": No such file or directory")
        with open(here + "/archived", "a+") as archived:
            archived.seek(0)
            known = archived.read().splitlines()
            if verb == "hsm_archive":
                archived.write(path + "\\n")
            else:
                as_is = "(0x00000009) exists archived, archive_id:1" if path in known else "(0x00000000)"
                print(path + ": " + behaviour.get("states", {{}}).get(os.path.basename(path), as_is))
else:
    sys.exit("lfs: unknown command " + verb)
"""


class LfsStandIn:
    """What the stand-in was asked, and how it is to behave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behave()
        program = folder / "bin" / "lfs"
        program.parent.mkdir()
        program.write_text(STAND_IN.format(python=sys.executable, here=str(folder)))
        program.chmod(0o755)

    def behave(self, **behaviour: Any) -> None:
        """From now on: ``fails`` (verbs), ``says``, ``status``, ``sleep_s``, ``states`` (by name of the file)."""
        (self.folder / "behaviour.json").write_text(json.dumps(behaviour))

    def calls(self, verb: str) -> list[list[str]]:
        """The arguments of each call of ``verb``."""
        file = self.folder / "calls"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row[1:] for row in rows if row[0] == verb]

    def striped(self) -> set[int]:
        """Inodes of the directories that were laid out."""
        file = self.folder / "striped"
        return {int(line) for line in file.read_text().splitlines()} if file.exists() else set()


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that come once a process come in each test."""
    monkeypatch.setattr(storage, "_reported", set())


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``mounted("lustre … rw,flock")``: a directory that the table of mounts gives that file system."""

    def mount(line: str) -> Path:
        point, table = tmp_path / "fsx", tmp_path / "mountinfo"
        point.mkdir(exist_ok=True)
        table.write_text(f"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:40 / {point} rw,noatime shared:7 - {line}\n")
        monkeypatch.setattr("nxdt_core.system.file_lock.MOUNTS", table)
        return point

    return mount


@pytest.fixture
def lustre(mounted: Callable[[str], Path]) -> Path:
    """The mount point of a Lustre file system."""
    return mounted("lustre 10.0.0.1@tcp:/fsx rw,flock,lazystatfs")


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LfsStandIn:
    """The stand-in, on the PATH."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    made = LfsStandIn(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def store(lustre: Path) -> FsxStorage:
    """On Lustre; ``lfs`` is there where the test asks for that fixture too."""
    return FsxStorage(f"fsx://{lustre}/runs/a")
