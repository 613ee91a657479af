"""Data that needs a library of an extra ends in an error with the command that installs it."""

from __future__ import annotations

import sys

import pytest
from nxdt_testing.errors import raises

from nxdt_core.data.chat.rendering import TemplateRunner
from nxdt_core.data.chat.templates import ChatTemplate
from nxdt_core.data.files.paths import read_bytes
from nxdt_core.data.files.records import read_records
from nxdt_core.errors.data import DataLibraryMissing


@pytest.fixture
def without(monkeypatch):
    """``without(package, *modules)``: what Python does where a package is not installed, and the modules that import
    it have not been."""

    def hide(package, *modules):
        monkeypatch.setitem(sys.modules, package, None)
        for module in modules:
            monkeypatch.delitem(sys.modules, module, raising=False)

    return hide


def ends(call, package, extra):
    with raises(DataLibraryMissing, match=f"needs the package '{package}', which cannot be imported") as caught:
        call()
    assert caught.value.do() == f"Run: pip install 'nxdt-core[{extra}]'"
    return caught.value.what()


def test_a_zstandard_file_without_its_library(tmp_path, without):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    without("zstandard", "nxdt_core.data.files.compressed")
    assert str(path) in ends(lambda: read_bytes(path), "zstandard", "zstd")


def test_an_arrow_file_without_its_library(tmp_path, without):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    without("pyarrow")
    assert str(path) in ends(lambda: read_records([path], "data.train"), "pyarrow", "arrow")


def test_a_chat_template_without_its_library(without):
    without("transformers.utils.chat_template_utils", "nxdt_core.data.chat.template_environment")
    runner = TemplateRunner(ChatTemplate("{{ 1 }}", "of the test"), {})
    said = ends(lambda: runner.run([{"role": "user", "content": "a"}], place="here"), "transformers", "huggingface")
    assert said.startswith("The chat template (of the test) needs")
