"""Imported by processes that wait in tests of the driver: notes who imported it, and does what the environment says."""

import os
import sys
from types import SimpleNamespace

_NOTES = os.environ["EARLY_IMPORTS"]
with open(_NOTES, "a", encoding="utf-8") as file:
    print(os.getpid(), file=file)
with open(_NOTES, encoding="utf-8") as file:
    first = len(file.readlines()) == 1
if os.environ.get("EARLY_DIES") and first:
    os._exit(3)
if os.environ.get("EARLY_DEVICE"):  # as torch looks once it has a context
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
