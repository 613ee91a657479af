"""Sizes that a directory or a checkpoint from elsewhere names take no more memory than its weights make possible."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.errors import raises
from safetensors.torch import save_file

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.format.manifest import encode_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config.huggingface import unusable, weights_in
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import SavedConfigUnusable
from nxdt_core.errors.models import HFFileDamaged
from nxdt_core.train.weights.importing import import_checkpoint
from nxdt_core.train.weights.saved_config import saved_run
from tests import processes
from tests.checkpoint.poison import HF_CONFIG, weights

CONFIG = {**HF_CONFIG, "head_dim": 2, "rms_norm_eps": 1e-5}
FORGED = [
    *((key, 10**9) for key in CONFIG if type(CONFIG[key]) is int and key != "max_position_embeddings"),
    *((key, 4 * 10**18) for key in CONFIG if type(CONFIG[key]) is int),
    ("vocab_size", 10**30),
    ("rope_scaling", {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 10**18}),
]


def write(directory: Path, **changed: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    save_file(weights(), directory / "model.safetensors")
    return directory


@pytest.mark.usefixtures("builder", "little_memory")
@pytest.mark.parametrize(("key", "value"), FORGED)
def test_an_import_refuses_a_size_that_the_weights_cannot_have(tmp_path: Path, key: str, value: Any) -> None:
    source = write(tmp_path / "hf", **{key: value})
    with pytest.raises(NxdtError) as caught:
        import_checkpoint(str(source), str(tmp_path / "imported"))
    assert key in str(caught.value) or "hidden_size" in str(caught.value)
    assert not (tmp_path / "imported").exists()


@pytest.mark.usefixtures("builder", "little_memory")
@pytest.mark.parametrize("content", [None, b"", (10**15).to_bytes(8, "little") + b"{"])
def test_an_import_looks_at_the_weights_before_it_builds_a_model(tmp_path: Path, content: bytes | None) -> None:
    source = write(tmp_path / "hf", num_hidden_layers=10**9)
    (source / "model.safetensors").unlink()
    if content is not None:
        (source / "model.safetensors").write_bytes(content)
    with pytest.raises(HFFileDamaged, match="num_hidden_layers is 1000000000"):
        import_checkpoint(str(source), str(tmp_path / "imported"))


@pytest.mark.usefixtures("builder")
def test_an_import_takes_the_sizes_that_the_weights_have(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", bos_token_id=151_643, sliding_window=10_485_760, max_window_layers=28)
    assert import_checkpoint(str(source), str(tmp_path / "imported")).tensors == 21


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 2**22) for key in ("hidden_size", "moe_intermediate_size", "num_attention_heads", "vocab_size")),
        *((key, 10**9) for key in ("num_experts", "num_hidden_layers")),
    ],
)
def test_a_model_of_transformers_takes_no_memory_for_forged_sizes(tmp_path: Path, key: str, value: int) -> None:
    plugin = pytest.importorskip("nxdt_plugin_hf", reason="nxdt-plugin-hf is not installed")
    path = Path(str(plugin.__file__)).with_name("configs") / "qwen3-moe-tiny" / "config.json"
    source = write(tmp_path / "hf")
    (source / "config.json").write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(NxdtError, match=rf"NXDT-(M050|C001).*|{key}"):
        import_checkpoint(str(source), str(tmp_path / "imported"))


def test_a_models_own_configuration_is_not_limited(tmp_path: Path) -> None:
    """Without weights next to it, a ``config.json`` describes a model to train."""
    directory = write(tmp_path / "hf")
    assert weights_in(directory) == (21, (directory / "model.safetensors").stat().st_size)
    (directory / "model.safetensors").unlink()
    assert weights_in(directory) is None


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"num_hidden_layers": 1001}, "num_hidden_layers"),
        ({"text_config": {"num_hidden_layers": 1001}}, "text_config.num_hidden_layers"),
        ({"n_layer": 1001}, "n_layer"),
        ({"decoder_layers": 1001}, "decoder_layers"),
        ({"moe_num_experts": 1001}, "moe_num_experts"),
        ({"n_routed_experts": [8, 1001]}, "n_routed_experts"),
        ({"shared_expert_intermediate_size": 20480, "max_position_embeddings": 2**32}, None),
    ],
)
def test_what_counts_modules_is_limited_by_the_number_of_tensors(values: dict[str, Any], found: str | None) -> None:
    reason = unusable(values, weights=(21, 5000))
    assert reason is None if found is None else f"{found} is 1001" in str(reason)
    assert unusable(values, weights=(1001, 5000)) is None


IN_16_GIB = """
import resource, sys
from nxdt_core.cli import main
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("builder")
def test_a_run_from_a_directory_compares_shapes_before_it_builds_the_model(tmp_path: Path) -> None:
    """A quarter of the elements of one matrix would fill the memory that the process may take."""
    write(tmp_path / "hf", hidden_size=2**20, head_dim=2, vocab_size=300)
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    overrides = (
        *("model.model_config=hf", "model.optim.lr=0.1", "trainer.max_steps=1", "trainer.accelerator=cpu"),
        *("data.name=text", "data.train_files=[a.txt]", "data.tokenizer.library=byte", "data.seq_length=8"),
        *("data.global_batch_size=1", "checkpoint.resume_from=hf", "checkpoint.weight_init_only=true"),
    )
    (tmp_path / "run.yaml").write_text("name: run\nexp_manager: {exp_dir: runs}\n")
    command = [sys.executable, "-c", IN_16_GIB, "train", "run.yaml", *overrides]
    done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "NXDT-M050" in done.stderr


@pytest.mark.usefixtures("builder", "little_memory")
@pytest.mark.parametrize(("key", "value"), [("num_layers", 10**9), ("head_dim", 10**12)])
def test_a_checkpoints_own_configuration_is_limited_by_its_tensors(tmp_path: Path, key: str, value: int) -> None:
    import_checkpoint(str(write(tmp_path / "hf")), str(tmp_path / "imported"))
    storage = LocalStorage(str(tmp_path / "imported"))
    manifest = checkpoint.read_manifest(storage, 0)
    saved_run(manifest, where="here")
    config = {**manifest.facts.config, "model": {**manifest.facts.config["model"], key: value}}
    forged = dataclasses.replace(manifest, facts=dataclasses.replace(manifest.facts, config=config))
    (Path(storage.uri) / manifest_key(0)).write_bytes(encode_manifest(forged))
    with raises(SavedConfigUnusable, match=f"model.{key} is {value}"):
        saved_run(checkpoint.read_manifest(storage, 0), where="here")


def test_weights_that_cannot_be_read_are_explained_by_their_reader(tmp_path: Path) -> None:
    directory = write(tmp_path / "hf")
    (directory / "model.safetensors").write_bytes((10**15).to_bytes(8, "little") + b"{")
    assert weights_in(directory) is None
    save_file({"w": torch.zeros(2)}, directory / "model.safetensors")
    assert weights_in(directory) == (1, (directory / "model.safetensors").stat().st_size)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    assert weights_in(directory) is None
