"""Every built-in callback keeps what nxdt asks of all."""

from __future__ import annotations

from typing import ClassVar

from nxdt_testing.callback_contract import CallbackContract


class TestGenerations(CallbackContract):
    """Texts drawn at random."""

    entry: ClassVar = {"name": "generations", "prompts": ["In the"], "max_new_tokens": 2, "temperature": 1.0}
