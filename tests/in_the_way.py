"""Links and pipes that another user may put in the place of a file."""

import os
from pathlib import Path

__all__ = ["KINDS", "PRECIOUS", "put"]

KINDS = {"link": "it is a symbolic link", "hard link": "another name", "pipe": "it is a named pipe"}
"""What errors say of each."""
PRECIOUS = "of somebody else"


def put(kind: str, path: Path, directory: Path) -> Path:
    """Put a link to a file in ``directory``, a pipe or a directory in the place of ``path``; return that file, which
    holds :data:`PRECIOUS`."""
    path.unlink(missing_ok=True)
    precious = directory / "precious.txt"
    precious.write_text(PRECIOUS)
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    return precious
