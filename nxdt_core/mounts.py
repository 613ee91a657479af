"""Which mounted file system holds a path, and whether its locks bind all machines that mount it.

From ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); where there is none, nothing is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mount", "mount_of"]

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the table of mounts."""

    point: Path
    filesystem: str
    """Its type: ``ext4``, ``nfs4``, ``lustre``."""
    options: frozenset[str]
    """Those of the mount and those of the file system."""

    @property
    def locks_are_shared(self) -> bool:
        """Whether a ``flock`` here is seen by every machine that can see the file.

        Lustre has them with the option ``flock`` alone (``localflock`` binds one client), NFS unless ``local_lock``
        keeps them on the client, CIFS unless ``nobrl`` does; a FUSE server need not even hear of them.
        """
        if self.filesystem == "lustre":
            return "flock" in self.options
        if self.filesystem in ("nfs", "nfs4"):
            return self.options.isdisjoint({"nolock", "local_lock=flock", "local_lock=all"})
        if self.filesystem in ("cifs", "smb3"):
            return "nobrl" not in self.options
        return self.filesystem.partition(".")[0] not in ("fuse", "fuseblk")


def mount_of(path: Path) -> Mount | None:
    """Return the mount that holds ``path``, which need not exist; None where the system does not report it."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    target = path.resolve()
    # Of several at one point, the last one covers the others.
    covering = [mount for mount in map(_parse, lines) if target.is_relative_to(mount.point)]
    return max(reversed(covering), key=lambda mount: len(mount.point.parts), default=None)


def _parse(line: str) -> Mount:
    """``36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/root rw,errors=continue``."""
    left, _, right = line.partition(" - ")
    point, options = left.split(" ")[4:6]
    filesystem, _, more = right.split(" ")[:3]
    return Mount(
        point=Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)),
        filesystem=filesystem,
        options=frozenset([*options.split(","), *more.split(",")]),
    )
