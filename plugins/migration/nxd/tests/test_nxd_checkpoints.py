"""What NxD Training saved is the same model here: names, ranks, heads, and the optimizer's state beside them."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_plugin_migrate.errors import (
    NeuronxMisfit,
    NeuronxRanksMissing,
    NeuronxReplicasDiffer,
    NeuronxStateUnread,
    NeuronxStepUnknown,
    NeuronxUnfinished,
    NeuronxUnreadable,
)
from nxdt_testing.errors import raises

from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.hf.key_map import sources
from nxdt_core.protocols.model import ModelBuilder
from plugins.migration.nxd.tests.nxd_writer import Written
from tests.checkpoint.poison import installed
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
llama = pytest.importorskip("nxdt_plugin_llama.builder", reason="nxdt-plugin-llama is not installed")
config = pytest.importorskip("nxdt_plugin_llama.config", reason="nxdt-plugin-llama is not installed")

LAYERS, HEADS = 4, 4


@cache
def theirs(kv_heads: int, vocabulary: int = 48) -> torch.nn.Module:
    """A model of transformers, the same object for the same sizes."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    hf = transformers.LlamaConfig(**sizes, vocab_size=vocabulary, num_key_value_heads=kv_heads, initializer_range=0.2)
    model: torch.nn.Module = transformers.LlamaForCausalLM(hf).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def builder_of(model: Any, **changed: Any) -> ModelBuilder:
    keys = {**config.LlamaConfig.from_hf(model.config.to_dict()), **changed}
    built: ModelBuilder = llama.LlamaBuilder(config.LlamaConfig(**keys))
    return built


def imported(
    directory: Path, builder: ModelBuilder, *, weights_only: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """By section and name."""
    name, found = open_checkpoint(directory, installed())
    assert name == "neuronx"
    listing = found.listing(builder, weights_only=weights_only)
    sections: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optim": {}}
    for (section, tensor_name), tensor in zip(listing, found.read(list(listing)), strict=True):
        held = listing[section, tensor_name]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (held.shape, f"torch.{held.dtype}")
        sections[section][tensor_name] = tensor
    return sections


CUTS = [
    Written(heads=HEADS, kv_heads=2, tp=2, pp=2),
    Written(heads=HEADS, kv_heads=2, tp=2, pp=2, xser=True),
    Written(heads=HEADS, kv_heads=1, tp=2, pp=2, copies=2, xser=True),
    Written(heads=HEADS, kv_heads=2, tp=4, copies=2),
    Written(heads=HEADS, kv_heads=2, tp=4, copies=2, adjacent=True, xser=True),
    Written(heads=HEADS, kv_heads=2, tp=2, copies=2, adjacent=True),
    Written(heads=HEADS, kv_heads=2, tp=2, copies=2, qkv="linear"),
    Written(heads=HEADS, kv_heads=2, tp=2, qkv="plain", decay_norms=True),
    Written(heads=HEADS, kv_heads=4, tp=2, pp=4, qkv="coalesced", dp=3),
    Written(heads=HEADS, kv_heads=2, markers=(), dp=1),
]


@pytest.mark.parametrize(
    "cut", slow_except(CUTS, CUTS[1::2]), ids=lambda cut: f"{cut.tp}x{cut.pp}-{cut.qkv}-{cut.copies}-{cut.xser}"
)
def test_every_way_of_cutting_gives_the_same_model_and_state(cut: Written, tmp_path: Path) -> None:
    model = theirs(cut.kv_heads)
    state, builder = model.state_dict(), builder_of(model)
    found = imported(cut.write(tmp_path / "tag.ckpt", state, LAYERS), builder)
    for source in sources(builder):
        weight = state[source.hf_names[0]]
        assert torch.equal(found["model"][source.name], weight), source.name
        assert torch.equal(found["optim"][f"{source.name}/exp_avg"], weight / 2), source.name
        assert torch.equal(found["optim"][f"{source.name}/exp_avg_sq"], weight**2), source.name
        assert found["optim"][f"{source.name}/step"] == 7
    ours = builder.build()
    ours.load_state_dict(found["model"], strict=True)
    tokens = torch.randint(0, 48, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Written], Path]:
    """``once(cut)``: a checkpoint that is cut so, written at its first use."""

    @cache
    def write(cut: Written) -> Path:
        name = "run--step=5-consumed_samples=640.0.ckpt"
        return cut.write(tmp_path_factory.mktemp("once") / name, theirs(cut.kv_heads).state_dict(), LAYERS)

    return write


@pytest.fixture
def written(
    tmp_path: Path, once: Callable[[Written], Path]
) -> Callable[..., tuple[Path, ModelBuilder, dict[str, torch.Tensor]]]:
    """``written(**cut)``: a checkpoint of two by two ranks, its model, and its weights under Hugging Face's names."""

    def write(**changed: Any) -> tuple[Path, ModelBuilder, dict[str, torch.Tensor]]:
        cut = Written(**{"heads": HEADS, "kv_heads": 2, "tp": 2, "pp": 2, **changed})
        model, source = theirs(cut.kv_heads), once(cut)
        directory = Path(shutil.copytree(source, tmp_path / source.name, dirs_exist_ok=True))
        return directory, builder_of(model), model.state_dict()

    return write


def test_step_and_samples_are_told(written: Any) -> None:
    directory, _, _ = written()
    _, found = open_checkpoint(directory, installed())
    assert (found.step, found.consumed_samples) == (7, 640)
    (directory / "user_content.pt").unlink()
    assert open_checkpoint(directory, installed())[1].step == 5


def test_master_weights_are_preferred_to_what_was_rounded_from_them(written: Any) -> None:
    directory, builder, state = written(weights=torch.bfloat16)
    norm = imported(directory, builder)["model"]["norm.weight"]
    assert torch.equal(norm, state["model.norm.weight"])
    directory, builder, state = written(weights=torch.bfloat16, masters=False)
    assert torch.equal(imported(directory, builder)["model"]["norm.weight"], state["model.norm.weight"].bfloat16())


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = torch.load(path)
    change(content)
    torch.save(content, path)


def shift_masters(content: Any) -> None:
    masters = content["sharded_master_weights"]
    masters[2], masters[6] = masters[6], masters[2]  # of two layers, with the same shape


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shift_masters, "are not those of the model"),
        (lambda content: content["param_groups"].append({"params": [99]}), "which these are of"),
        (lambda content: content["param_groups"][0]["params"].pop(), "which these are of"),
        (lambda content: content["base_state"][3].pop("exp_avg"), "do not make up|no exp_avg"),
        (lambda content: content.clear(), "no param_groups"),
    ],
)
def test_state_that_cannot_be_told_apart_is_an_error_unless_weights_alone_are_wanted(
    written: Any, caplog: pytest.LogCaptureFixture, damage: Callable[[Any], object], told: str
) -> None:
    directory, builder, state = written()
    for dp in range(2):
        edit(directory / f"optim/dp_rank_{dp:02d}_tp_rank_00_pp_rank_00.pt", damage)
    refused(directory, builder, told)
    with caplog.at_level(logging.WARNING):
        found = imported(directory, builder, weights_only=True)
    assert found["optim"] == {}
    assert torch.equal(found["model"]["norm.weight"], state["model.norm.weight"])
    assert [record for record in caplog.messages if "master weights included, is not read" in record]
    assert re.search(told, caplog.text)


def refused(directory: Path, builder: ModelBuilder, told: str) -> None:
    """See that an import of all says what is wrong with the state, and what imports the weights."""
    with raises(NeuronxStateUnread, match=told) as caught:
        imported(directory, builder)
    assert "--weights-only" in caught.value.do()


def test_shares_of_one_data_parallel_rank_alone_are_no_state(written: Any) -> None:
    """As NxD Training 1.6 leaves them (wrap_with_zero is in none of its configurations)."""
    directory, builder, _ = written(shares=1, masters=False)
    refused(directory, builder, "do not make up .* of one data-parallel rank only")
    assert imported(directory, builder, weights_only=True)["optim"] == {}


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("dp_rank_01_tp_rank_00_pp_rank_01.pt", "optim/dp_rank_01_tp_rank_00_pp_rank_01.pt is missing"),
        ("dp_rank_00_tp_rank_01_pp_rank_00.pt", "optim/dp_rank_00_tp_rank_01_pp_rank_00.pt is missing"),
        ("dp_rank_01_*.pt", "do not make up"),
        ("*_tp_rank_01_*.pt", "optim/dp_rank_00_tp_rank_01_pp_rank_00.pt is missing"),
        ("*_pp_rank_01.pt", "optim/dp_rank_00_tp_rank_00_pp_rank_01.pt is missing"),
        ("*", "optim/ has no dp_rank_"),
    ],
)
def test_lost_files_of_the_optimizer_are_an_error_unless_weights_alone_are_wanted(
    written: Any, lost: str, told: str
) -> None:
    directory, builder, state = written(weights=torch.bfloat16)
    for path in (directory / "optim").glob(lost):
        path.unlink()
    refused(directory, builder, told)
    found = imported(directory, builder, weights_only=True)
    assert found["optim"] == {}
    assert torch.equal(found["model"]["norm.weight"], state["model.norm.weight"].bfloat16())


def test_state_in_another_form_is_not_taken_for_none(written: Any) -> None:
    """As NxD Core saves it with ``use_zero1_dcp``."""
    directory, builder, _ = written(dp=0, markers=())
    (directory / "user_content.pt").unlink()
    (directory / "optim/.metadata").touch()
    refused(directory, builder, "optim/ has no dp_rank_")


def test_what_the_converter_of_nxd_wrote_has_no_state(written: Any) -> None:
    directory, builder, state = written(dp=0, markers=())
    (directory / "user_content.pt").unlink()
    (directory / "optim").rmdir()
    found = imported(directory, builder)
    assert found["optim"] == {}
    assert torch.equal(found["model"]["norm.weight"], state["model.norm.weight"])


def test_weights_alone_are_the_master_weights_where_the_state_is_whole(written: Any) -> None:
    directory, builder, state = written(weights=torch.bfloat16)
    found = imported(directory, builder, weights_only=True)
    assert found["optim"] == {}
    assert torch.equal(found["model"]["norm.weight"], state["model.norm.weight"])


def test_state_without_the_number_of_steps_is_an_error(written: Any) -> None:
    directory, builder, _ = written()
    nameless = directory.rename(directory.with_name("last.ckpt"))
    assert imported(nameless, builder)["optim"]
    (nameless / "user_content.pt").unlink()
    with raises(NeuronxStepUnknown, match="how many steps") as caught:
        imported(nameless, builder)
    assert "--weights-only" in caught.value.do()
    assert imported(nameless, builder, weights_only=True)["optim"] == {}


def test_the_file_of_the_scheduler_is_not_needed(written: Any) -> None:
    """Schedules are computed from the step."""
    directory, builder, _ = written()
    assert not (directory / "scheduler.pt").exists()
    assert imported(directory, builder)["optim"]


def test_rows_that_pad_the_vocabulary_are_taken_away(tmp_path: Path) -> None:
    model = theirs(2)
    state = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.zeros(16, 32)])
    directory = Written(heads=HEADS, kv_heads=2, tp=2).write(tmp_path / "tag", state, LAYERS)
    found = imported(directory, builder_of(model))
    assert torch.equal(found["model"]["embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])
    assert found["optim"]["lm_head.weight/exp_avg"].shape == (48, 32)


def test_another_vocabulary_does_not_pass_for_a_padded_one(written: Any) -> None:
    directory, _, _ = written()
    with pytest.raises(WeightsDoNotFit, match="embed_tokens") as caught:
        imported(directory, builder_of(theirs(2, vocabulary=96)))
    assert str(directory) in caught.value.what()
    assert caught.value.do() == "Name the configuration that they were trained with."


def test_a_directory_of_several_names_them(written: Any) -> None:
    directory, _, _ = written()
    with raises(NeuronxUnreadable, match="consumed_samples=640"):
        open_checkpoint(directory.parent, installed())


def test_an_unfinished_save_is_refused(written: Any) -> None:
    directory, _, _ = written()
    (directory / "done").unlink()
    with raises(NeuronxUnfinished, match="unfinished"):
        open_checkpoint(directory, installed())


def test_missing_ranks_are_named(written: Any) -> None:
    directory, _, _ = written()
    (directory / "model/dp_rank_00_tp_rank_00_pp_rank_01.pt").unlink()
    with raises(NeuronxRanksMissing, match=r"lacks 'model/dp_rank_00_tp_rank_00_pp_rank_01\.pt'"):
        open_checkpoint(directory, installed())


@pytest.mark.parametrize("lost", ["*_tp_rank_01_*.pt", "*_pp_rank_01.pt"])
def test_a_missing_last_rank_is_named_by_the_optimizer_or_the_shapes(written: Any, lost: str) -> None:
    directory, builder, _ = written()
    for path in (directory / "model").glob(lost):
        path.unlink()
    with raises(NeuronxRanksMissing, match="2 tensor-parallel by 2 pipeline ranks"):
        open_checkpoint(directory, installed())
    for path in (directory / "optim").iterdir():
        path.unlink()
    with raises(NeuronxRanksMissing, match="lacks 'model/dp_rank_00_tp_rank_0._pp_rank_0.[.]pt'"):
        imported(directory, builder, weights_only=True)


def test_files_of_ranks_of_another_layout_are_named(written: Any) -> None:
    directory, builder, _ = written()
    for folder in ("model", "optim"):
        for path in (directory / folder).glob("*_tp_rank_01_*.pt"):
            path.with_name(path.name.replace("tp_rank_01", "tp_rank_02")).write_bytes(path.read_bytes())
    with raises(NeuronxUnreadable, match="model/dp_rank_00_tp_rank_02_pp_rank_00"):
        imported(directory, builder, weights_only=True)


def test_a_file_that_is_named_as_of_an_expert_rank_is_refused(written: Any) -> None:
    directory, _, _ = written()
    name = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    (directory / name).rename(directory / "model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    with raises(NeuronxUnreadable, match="ep_rank_01"):
        open_checkpoint(directory, installed())


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.layers.0.input_layernorm.weight", {}),
        ("model.layers.1.self_attn.qkv_proj.weight_qkv", {"kv_heads": 1, "copies": 2}),
        ("model.layers.1.self_attn.qkv_proj.weight_k", {"copies": 2, "qkv": "linear"}),
        ("model.layers.0.self_attn.qkv_proj.weight_v", {"copies": 2, "qkv": "linear"}),
    ],
)
def test_copies_that_differ_are_refused(written: Any, name: str, cut: dict[str, Any]) -> None:
    directory, builder, _ = written(dp=0, **cut)
    edit(directory / "model/dp_rank_00_tp_rank_01_pp_rank_00.pt", lambda own: own[name][-1:].add_(1))
    with raises(NeuronxReplicasDiffer, match="differ"):
        imported(directory, builder, weights_only=True)


@pytest.mark.parametrize(
    ("ranks", "change", "told"),
    [
        (2, lambda own: own.update({"model.layers.0.mlp.lora_A.weight": torch.ones(2)}), "it is of an adapter"),
        (2, lambda own: own.update({"model.layers.0.mlp.scale": torch.ones(2)}), "is not known"),
        (1, lambda own: own.update({"model.layers.0.mlp.down_proj.weight": torch.ones(5, 32)}), "its parts are"),
        (1, lambda own: own.update({"model.layers.0.self_attn.o_proj.weight": torch.ones(32, 17)}), "are not 4 heads"),
        (1, lambda own: own.update({"model.layers.0.extra": torch.ones(2)}), "some tensor-parallel ranks lack it"),
        (1, lambda own: own.pop("model.layers.0.mlp.down_proj.weight"), "ranks lack it"),
        (2, lambda own: own.pop("model.layers.0.mlp.down_proj.weight"), "1 missing"),
    ],
)
def test_what_cannot_be_merged_is_told_with_the_tensor(
    written: Any, ranks: int, change: Callable[[Any], object], told: str
) -> None:
    directory, builder, _ = written(dp=0)
    for path in sorted((directory / "model").glob("*_pp_rank_00.pt"))[:ranks]:
        edit(path, change)
    with raises(NeuronxMisfit, WeightsDoNotFit, match=told):
        imported(directory, builder, weights_only=True)


def test_a_tied_head_on_the_last_stage_is_taken_once(tmp_path: Path) -> None:
    model = theirs(2)
    state = {**model.state_dict(), "lm_head.weight": model.state_dict()["model.embed_tokens.weight"]}
    cut = Written(heads=HEADS, kv_heads=2, tp=2, pp=2)
    builder = llama.LlamaBuilder(
        config.LlamaConfig(
            **{**config.LlamaConfig.from_hf(model.config.to_dict()), "share_embeddings_and_output_weights": True}
        )
    )
    found = imported(cut.write(tmp_path / "tag", state, LAYERS), builder)
    assert "lm_head.weight" not in found["model"]
    assert torch.equal(found["model"]["embed_tokens.weight"], state["lm_head.weight"])


def test_tensors_are_read_when_they_are_asked_for_and_alone(written: Any) -> None:
    directory, builder, state = written(xser=True, masters=False, dp=0)
    _, found = open_checkpoint(directory, installed())
    listing = found.listing(builder, weights_only=True)
    for path in (directory / "model").glob("*_pp_rank_00.pt.tensors/*"):
        path.unlink()
    (norm,) = found.read([("model", "norm.weight")])
    assert torch.equal(norm, state["model.norm.weight"])
    assert ("model", "layers.0.mlp.up_proj.weight") in listing
