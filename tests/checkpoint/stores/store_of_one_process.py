"""A wrong store on a directory, in a file of its own because other processes open it. Torch-free."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

from nxdt_core.checkpoint.stores.local import LocalStorage


class LocksInOneProcess(LocalStorage):
    """A lock of this process keeps its threads apart, and not those of others."""

    lock: ClassVar = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self.lock:
            if self.stat(key) is not None:
                return False
            time.sleep(0.05)
            with self.open_write(key) as stream:
                stream.write(data)
            return True
