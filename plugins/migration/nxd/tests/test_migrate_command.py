"""``nxdt config migrate`` through the command; what becomes of keys is tested with the configuration itself."""

import json
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "pytorch_lightning", "transformers")
FILES = Path(__file__).parent / "files"
NEMO = str(FILES / "nemo_gpt.yaml")


def test_it_writes_the_file_and_the_report_and_says_what_is_left_to_do(nxdt, tmp_path):
    out, report, given = tmp_path / "run.yaml", tmp_path / "run.md", tmp_path / "nemo_gpt.yaml"
    given.write_text(Path(NEMO).read_text().replace("name: distributed_fused_adam", "name: my_own_adam"))
    where = ("-o", str(out), "--report", str(report))
    done = nxdt("config", "migrate", str(given), "--from", "nemo", *where, without=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.read_text().startswith("# From nemo_gpt.yaml of NeMo 1.x")
    for title in ("Not carried over:", "Still to be set:", "nxdt config check also reports:"):
        assert title in done.stdout
    assert "model.optim.name: No optimizer is called 'my_own_adam'" in done.stdout
    assert "  model.fp8 (line 131): set precision.type: float8 of nxdt-plugin-torchao instead\n" in done.stdout
    page = report.read_text()
    assert "| 76 | `model.bias` | `False` | renamed | `model.has_bias` |  |\n" in page
    assert "- `data.tokenizer.model`: it has no value yet\n" in page


def test_the_report_for_programs(nxdt, tmp_path):
    done = nxdt("config", "migrate", NEMO, "--from", "nemo", "-o", str(tmp_path / "run.yaml"), "--json")
    found = json.loads(done.stdout)
    assert found["framework"] == "NeMo 1.x"
    by_key = {row["key"]: row for row in found["keys"]}
    assert by_key["model.bias"] == {
        "key": "model.bias",
        "line": 76,
        "verdict": "renamed",
        "target": "model.has_bias",
        "value": "False",
        "reason": None,
    }
    assert {"key": "data.tokenizer.model", "reason": "it has no value yet"} in found["to_set"]


def test_what_is_written_is_checked_by_its_own_lines(nxdt, tmp_path):
    out = tmp_path / "run.yaml"
    assert nxdt("config", "migrate", NEMO, "--from", "nemo", "-o", str(out)).returncode == 0
    done = nxdt("config", "check", str(out))
    line = out.read_text().splitlines().index("  vocab_size: ???") + 1
    assert done.returncode == 2
    assert f"run.yaml:{line}: model.vocab_size" in done.stderr


@pytest.mark.parametrize(
    ("text", "framework", "code"),
    [
        ("base_model: x\ndatasets: []\n", "nxdt", "NXDT-C030"),
        ("trainer: {max_steps: 3}\nmodel: {micro_batch_size: 1}\n", "nxdt", "NXDT-C030"),
        ("trainer: [\n", "nxdt", "NXDT-C004"),
        (None, "nxdt", "NXDT-C002"),
    ],
)
def test_what_cannot_be_migrated_is_refused_and_nothing_is_written(nxdt, tmp_path, text, framework, code):
    source, out = tmp_path / "source.yaml", tmp_path / "run.yaml"
    if text is not None:
        source.write_text(text)
    done = nxdt("config", "migrate", str(source), "--from", framework, "-o", str(out))
    assert (done.returncode, done.stdout) == (2, "")
    assert code in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_a_file_is_replaced_only_when_told_to(nxdt, tmp_path):
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    done = nxdt("config", "migrate", NEMO, "--from", "nemo", "-o", str(out))
    assert (done.returncode, out.read_text()) == (2, "mine")
    assert "NXDT-C031" in done.stderr
    assert nxdt("config", "migrate", NEMO, "--from", "nemo", "-o", str(out), "--force").returncode == 0
    assert out.read_text() != "mine"


def test_a_place_that_cannot_be_written_to_is_told(nxdt, tmp_path):
    done = nxdt("config", "migrate", NEMO, "--from", "nemo", "-o", str(tmp_path / "no/run.yaml"))
    assert done.returncode == 2
    assert "NXDT-C032" in done.stderr


def test_without_a_name_the_file_is_recognised(nxdt, tmp_path):
    done = nxdt("config", "migrate", NEMO, "-o", str(tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Wrote {tmp_path}/run.yaml from {NEMO} (NeMo 1.x).")


def test_a_file_that_nothing_recognises_names_what_there_is(nxdt, tmp_path):
    source = tmp_path / "source.yaml"
    source.write_text("base_model: x\n")
    done = nxdt("config", "migrate", str(source), "-o", str(tmp_path / "run.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "[NXDT-C034]" in done.stderr
    assert "--from: nemo (NeMo 1.x), nnm (neuronx-nemo-megatron), nxdt (NxD Training)." in done.stderr


@pytest.mark.parametrize("words", [(), ("--from", "nemo")])
def test_without_the_plugin_the_command_says_what_to_install(nxdt, tmp_path, words):
    bare = {"uninstalled": ("nxdt-plugin-migrate",)}
    done = nxdt("config", "migrate", NEMO, *words, "-o", str(tmp_path / "run.yaml"), **bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install nxdt-plugin-migrate" in done.stderr
    assert not (tmp_path / "run.yaml").exists()
