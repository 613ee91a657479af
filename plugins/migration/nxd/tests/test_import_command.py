"""``nxdt checkpoint import`` of a checkpoint of NxD Training that lost a file: exit status, message, what is there."""

from __future__ import annotations

import pytest
import torch

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.hf.directory import save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.train import build
from plugins.migration.nxd.tests.nxd_writer import Written

pytest.importorskip("nxdt_plugin_llama", reason="nxdt-plugin-llama is not installed")

MODEL = ("recipe:llama-tiny", "model.num_layers=2", "model.num_attention_heads=4", "model.num_kv_heads=2")


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint of bfloat16 weights with float32 masters, without the state of one rank."""
    found = sources(build.model_builder(load(MODEL[0], MODEL[1:])))
    state = {source.hf_names[0]: torch.randn(source.shape) for source in found}
    cut = Written(heads=4, kv_heads=2, tp=2, weights=torch.bfloat16)
    directory = cut.write(tmp_path / "run--step=7-consumed_samples=56.ckpt", state, 2)
    (directory / "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt").unlink()
    return str(directory)


def test_lost_state_of_a_rank_stops_the_import_and_weights_alone_are_on_request(nxdt, work, damaged):
    words = ("checkpoint", "import", damaged, "runs/a", "--config", *MODEL)
    done = nxdt(*words)
    assert done.returncode == 2
    assert "[NXDT-S087]" in done.stderr
    assert "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt is missing" in done.stderr
    assert "--weights-only" in done.stderr
    assert not list((work / "runs/a").glob("step-*"))
    done = nxdt(*words, "--weights-only")
    assert done.returncode == 0, done.stderr
    assert "master weights included, is not read" in done.stderr
    assert "Imported" in done.stdout
    (step,) = (work / "runs/a").glob("step-*")
    assert step.name == "step-00000000", "no run resumes at step 7 without the optimizer's state"
    assert not list((step / "optim").glob("*.safetensors"))


def test_an_adapter_alone_is_imported_over_the_model_that_the_run_began_with(nxdt, work, tmp_path):
    builder = build.model_builder(load(MODEL[0], MODEL[1:]))
    state = {source.name: torch.randn(source.shape) for source in sources(builder)}
    save_hf(tmp_path / "base", builder, state)
    down = "model.layers.1.mlp.down_proj"
    a, b = torch.randn(2, state["layers.1.mlp.down_proj.weight"].shape[1]), torch.randn(64, 2)
    own = {f"{down}.lora_A.weight": a, f"{down}.lora_B.weight": b}
    (tmp_path / "tuned/model").mkdir(parents=True)
    content = {**own, "lora_config": {"lora_alpha": 4, "lora_rank": 2}}
    torch.save(content, tmp_path / "tuned/model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    words = ("checkpoint", "import", str(tmp_path / "tuned"), "runs/a", "--config", *MODEL)
    done = nxdt(*words, "--weights-only")
    assert done.returncode == 2
    assert "[NXDT-S080]" in done.stderr
    assert "checkpoint.resume_from" in done.stderr
    done = nxdt(*words, "--weights-only", f"checkpoint.resume_from={tmp_path / 'base'}")
    assert done.returncode == 0, done.stderr
    storage = checkpoint.open_storage(str(work / "runs/a"))
    found = checkpoint.load_model(storage, checkpoint.latest(storage, warn=print))
    state["layers.1.mlp.down_proj.weight"] += 2 * b @ a
    for name, expected in state.items():
        torch.testing.assert_close(found[name], expected)


def test_a_model_of_megatron_is_imported_and_generates(nxdt, work, tmp_path):
    found = sources(build.model_builder(load(MODEL[0], MODEL[1:])))
    state = {source.hf_names[0]: torch.randn(source.shape) for source in found}
    cut = Written(heads=4, kv_heads=2, tp=2, megatron=True, xser=True)
    directory = cut.write(tmp_path / "run--step=7-consumed_samples=56.ckpt", state, 2)
    done = nxdt("checkpoint", "import", str(directory), "runs/a", "--config", *MODEL)
    assert done.returncode == 0, done.stderr
    assert (work / "runs/a/step-00000007").is_dir()
    done = nxdt("generate", "runs/a", "In the", "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    (directory / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt").unlink()
    done = nxdt("checkpoint", "import", str(directory), "runs/b", "--config", *MODEL)
    assert done.returncode == 2
    assert "[NXDT-S082]" in done.stderr
    assert "lacks 'model/dp_rank_00_tp_rank_00_pp_rank_00.pt'" in done.stderr
