"""Device types and their process groups are named in one table: everything else asks it what a device is like."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "nxdt_core"
TABLE = CORE / "distributed" / "devices.py"
RECORDS = CORE / "builtins.py"
ERRORS = CORE / "errors"
"""Their texts have examples, such as an accelerator that is missing."""

NAMES = {"cpu", "cuda", "neuron", "mps", "xpu", "hpu", "gloo", "nccl"}
ATTRIBUTES = NAMES | {f"is_{name}" for name in NAMES}
WORDS = re.compile(rf"\b(?:is_)?(?:{'|'.join(NAMES)})\b", re.IGNORECASE)
"""What the text of a file has that is to be parsed."""


def device_names(source: str) -> list[tuple[int, str]]:
    """Line and name of every device type that code names: as text of its own, or as an attribute (``.cpu()``).

    Sentences may speak of devices; a component's name or a configuration key that contains one is no device.
    """
    found = []
    for node in ast.walk(ast.parse(source if WORDS.search(source) else "")):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.lower().replace(",", ":").split(":")  # "cuda:0", "cpu:gloo,cuda:nccl"
            found += [(node.lineno, part) for part in parts if part in NAMES]
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.append((node.lineno, node.attr))
    return found


def test_no_file_but_the_table_and_its_records_names_a_device_type():
    files = sorted(path for path in CORE.rglob("*.py") if path not in (TABLE, RECORDS) and path.parent != ERRORS)
    assert len(files) > 100
    named = [
        f"{path.relative_to(CORE)}:{line} names {name}"
        for path in files
        for line, name in device_names(path.read_text())
    ]
    assert named == []


def test_the_table_itself_is_seen_to_name_them():
    assert {"cpu", "cuda", "neuron", "gloo", "nccl"} <= {name for _, name in device_names(TABLE.read_text())}


@pytest.mark.parametrize(
    "code", ["tensor.cpu()", "tensor.is_cuda", 'torch.device("cuda:0")', 'start("cpu:gloo,cuda:nccl")', "torch.xpu"]
)
def test_every_way_to_name_one_is_seen(code):
    assert device_names(code)


def test_a_sentence_may_speak_of_devices():
    assert device_names('"""Draws on the cpu."""\nXLA_KEYS = ("neuron_rt_exec_timeout",)') == []
