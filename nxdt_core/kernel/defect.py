"""What is wrong with one plugin: raised and caught inside the kernel, shown as the plugin's ``reason``."""

from __future__ import annotations

__all__ = ["GUARDED", "PluginDefect", "describe_failure"]

GUARDED = (Exception, SystemExit, GeneratorExit)
"""What running a plugin's code may raise without stopping the others: all but Ctrl-C."""


class PluginDefect(Exception):
    """A plugin cannot be used; the text is the reason, in one line."""


def describe_failure(error: BaseException) -> str:
    """Return one line: type, first line of the message, and where it was raised."""
    import traceback  # only where something failed

    lines = str(error).strip().splitlines()
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r})"
    else:
        text = f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    if len(outside) < 2:
        return text
    return f"{text} ({outside[-1].filename}:{outside[-1].lineno})"
