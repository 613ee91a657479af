"""Megatron's models, experts over ranks, adapters, padded heads and the older files give the logits of the original."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
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
    NeuronxUnreadable,
)
from nxdt_testing.errors import raises

from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.config.section import Section
from nxdt_core.hf.key_map import sources
from nxdt_core.protocols.model import ModelBuilder
from plugins.migration.nxd.tests.nxd_writer import Written, by_head
from tests.checkpoint.poison import installed
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

LAYERS, HEADS, VOCABULARY = 2, 4, 48
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
Original = tuple[Any, dict[str, torch.Tensor], ModelBuilder]


@cache
def original(kind: str, heads: int = HEADS, kv_heads: int = 2, **changed: Any) -> Original:
    """A model of transformers, the tensors of its files, and ours of the same sizes."""
    torch.manual_seed(3)
    configs = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}
    sizes = {
        **SIZES,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "initializer_range": 0.2,
        **changed,
    }
    experts = {"num_local_experts": 4, "sliding_window": None} if kind == "mixtral" else {}
    model = transformers.AutoModelForCausalLM.from_config(configs[kind](**sizes, **experts)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model, files_of(model), builder_of(kind, model.config.to_dict())


def files_of(model: Any) -> dict[str, torch.Tensor]:
    """The tensors as ``save_pretrained`` writes them: transformers stacks experts in memory only."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors: dict[str, torch.Tensor] = safetensors.load_file(Path(folder) / "model.safetensors")
    return tensors


def builder_of(name: str, hf: Mapping[str, Any] | None = None, **keys: Any) -> ModelBuilder:
    component = installed().registry.get("model", name)
    section: type[Section] = component.load_config()
    found = section.from_hf(hf) if hf is not None else {}  # type: ignore[attr-defined]
    values: dict[str, Any] = {}
    for key, value in {**found, **keys}.items():
        outer, _, inner = key.rpartition(".")
        (values.setdefault(outer, {}) if outer else values)[inner] = value
    built: ModelBuilder = component.load_target()(section(**values))
    return built


def imported(directory: Path, builder: ModelBuilder, *, weights_only: bool = False) -> dict[str, torch.Tensor]:
    _, found = open_checkpoint(directory, installed())
    listing = found.listing(builder, weights_only=weights_only)
    tensors = zip(listing, found.read(list(listing)), strict=True)
    return {name if section == "model" else f"optim/{name}": tensor for (section, name), tensor in tensors}


def logits_of(builder: ModelBuilder, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    ours = builder.build()
    for module in ours.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim/")}
    ours.load_state_dict(weights, strict=False)
    users = {user for _, user in builder.plan().tied}
    assert {name for name, _ in ours.named_parameters(remove_duplicate=False)} - users == weights.keys()
    with torch.no_grad():
        logits: torch.Tensor = ours.eval()(tokens)
    return logits


def see_the_same(directory: Path, model: Any, builder: ModelBuilder, **asked: bool) -> dict[str, torch.Tensor]:
    found = imported(directory, builder, **asked)
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(builder, found, tokens)[..., :VOCABULARY], expected, rtol=1e-4, atol=1e-4)
    return found


CASES = {
    "megatron": ("llama", 4, Written(heads=4, kv_heads=4, tp=2, pp=2, megatron=True)),
    "megatron, shared keys": ("llama", 2, Written(heads=4, kv_heads=2, tp=2, pp=2, megatron=True, xser=True)),
    "megatron, two key heads on a rank": ("llama", 2, Written(heads=4, kv_heads=2, pp=2, megatron=True)),
    "megatron, experts": ("mixtral", 2, Written(heads=4, kv_heads=2, tp=2, megatron=True)),
    "experts": ("mixtral", 2, Written(heads=4, kv_heads=2, tp=2, pp=2)),
    "expert ranks": ("mixtral", 2, Written(heads=4, kv_heads=2, tp=2, pp=2, ep=2, dp=0)),
    "expert ranks, xser": ("mixtral", 2, Written(heads=4, kv_heads=2, tp=2, ep=4, dp=0, xser=True)),
    "megatron, expert ranks": ("mixtral", 2, Written(heads=4, kv_heads=2, tp=2, ep=2, dp=0, megatron=True)),
    "adapter": ("llama", 2, Written(heads=4, kv_heads=2, tp=2, pp=2, dp=0, lora_scaling=1.5)),
    "adapter, copied keys": (
        "llama",
        1,
        Written(heads=4, kv_heads=1, copies=2, tp=2, dp=0, lora_scaling=0.5, xser=True),
    ),
    "older": ("llama", 2, Written(heads=4, kv_heads=2, tp=2, pp=2, older="pt")),
    "older, xser": ("llama", 2, Written(heads=4, kv_heads=2, tp=2, pp=2, older="xser")),
    "older, megatron": ("llama", 4, Written(heads=4, kv_heads=4, tp=2, older="pt", megatron=True)),
}


@pytest.mark.parametrize("case", slow_except([*CASES], [*CASES][::2]))
def test_the_logits_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    kind, kv_heads, cut = CASES[case]
    model, state, builder = original(kind, kv_heads=kv_heads)
    directory = cut.write(tmp_path / "run--step=5.ckpt", state, LAYERS)
    found = see_the_same(directory, model, builder, weights_only=not cut.dp)
    if cut.dp and not cut.older:  # the state of AdamW is merged as the weights are
        for name in [name for name in found if not name.startswith("optim/")]:
            assert torch.equal(found[f"optim/{name}/exp_avg"], found[name] / 2), name


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("qkv", ["fused", "linear"])
def test_query_heads_that_fill_up_ranks_are_left_out(tmp_path: Path, qkv: str, adjacent: bool) -> None:
    """Six query heads on four ranks are eight there, the fourth of each key head is of zeros."""
    model, state, builder = original("llama", heads=6, hidden_size=48)
    cut = Written(heads=6, kv_heads=2, tp=4, copies=2, padded=8, qkv=qkv, adjacent=adjacent)
    see_the_same(cut.write(tmp_path / "tag--step=5.ckpt", state, LAYERS), model, builder)


def megatron_gpt(model: Any, tp: int) -> list[dict[str, torch.Tensor]]:
    """GPT-2's tensors on the tensor-parallel ranks of Megatron's GPT, which has biases and learned positions."""
    size, ranks = 8, []
    state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}

    def share(tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        return tensor.chunk(tp, dimension)[len(ranks)].clone()

    for _ in range(tp):
        words = torch.nn.functional.pad(state["wte.weight"], (0, 0, 0, 16))
        own = {
            "embedding.word_embeddings.weight": share(words),
            "embedding.position_embeddings.weight": state["wpe.weight"],
            "output_layer.weight": share(words),
            **{f"encoder.final_layernorm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")},
        }
        for layer in range(LAYERS):
            theirs, ours = f"h.{layer}", f"encoder.layers.{layer}"
            for kind in ("weight", "bias"):
                q, k, v = (share(part) for part in state[f"{theirs}.attn.c_attn.{kind}"].t().chunk(3))
                up, down, out = (
                    state[f"{theirs}.{name}.{kind}"].t() for name in ("mlp.c_fc", "mlp.c_proj", "attn.c_proj")
                )
                own |= {
                    f"{ours}.input_layernorm.{kind}": state[f"{theirs}.ln_1.{kind}"],
                    f"{ours}.post_attention_layernorm.{kind}": state[f"{theirs}.ln_2.{kind}"],
                    f"{ours}.self_attention.query_key_value.{kind}": by_head(size, q, k, v),
                    f"{ours}.self_attention.dense.{kind}": share(out, 1) if out.dim() == 2 else out,
                    f"{ours}.mlp.dense_h_to_4h.{kind}": share(up),
                    f"{ours}.mlp.dense_4h_to_h.{kind}": share(down, 1) if down.dim() == 2 else down,
                }
        ranks.append({f"language_model.{name}": tensor.contiguous() for name, tensor in own.items()})
    return ranks


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_megatrons_gpt_gives_the_logits_of_gpt_2(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 16, "vocab_size": VOCABULARY}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, activation_function="gelu", initializer_range=0.2, use_cache=False)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
    shape = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": HEADS, "max_position_embeddings": 16}
    builder = builder_of("gpt", **shape, vocab_size=VOCABULARY, make_vocab_size_divisible_by=16)
    (tmp_path / "model").mkdir()
    for marker in ("checkpoint", "done"):
        (tmp_path / marker).touch()
    for tp, own in enumerate(megatron_gpt(model, 2)):
        torch.save(own, tmp_path / f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    see_the_same(tmp_path, model, builder, weights_only=True)


def test_a_gpt_with_gates_biases_and_shared_keys_has_the_same_parameters(tmp_path: Path) -> None:
    """Such a model has no form in Hugging Face's library."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "activation": "swiglu"}
    builder = builder_of("gpt", **shape, vocab_size=48, make_vocab_size_divisible_by=16, position_embedding_type="rope")
    state = {name: torch.randn_like(each) for name, each in builder.build().named_parameters() if "lm_head" not in name}
    (tmp_path / "model").mkdir()
    for marker in ("checkpoint", "done"):
        (tmp_path / marker).touch()
    for tp in range(2):
        own = {"embedding.word_embeddings.weight": state["embedding.tokens.weight"].chunk(2)[tp]}
        for kind in ("weight", "bias"):
            q, k, v, out, gate, up, down = (
                state[f"layers.0.{name}_proj.{kind}"]
                for name in (*(f"attention.{letter}" for letter in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
            )
            layer = {
                "input_layernorm": state[f"layers.0.attention_norm.{kind}"],
                "post_attention_layernorm": state[f"layers.0.mlp_norm.{kind}"],
                "self_attention.query": q.chunk(2)[tp],
                "self_attention.key_value": by_head(8, k.chunk(2)[tp], v.chunk(2)[tp]),
                "self_attention.dense": out.chunk(2, 1)[tp] if kind == "weight" else out,
                "mlp.dense_h_to_4h": torch.cat([gate.chunk(2)[tp], up.chunk(2)[tp]]),
                "mlp.dense_4h_to_h": down.chunk(2, 1)[tp] if kind == "weight" else down,
            }
            own |= {f"encoder.layers.0.{name}.{kind}": each for name, each in layer.items()}
            own[f"encoder.final_layernorm.{kind}"] = state[f"norm.{kind}"]
        own["output_layer.weight"] = own["embedding.word_embeddings.weight"]
        content = {f"language_model.{name}": each.clone() for name, each in own.items()}
        torch.save(content, tmp_path / f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    found = imported(tmp_path, builder, weights_only=True)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], each) for name, each in state.items())


def test_files_of_megatron_that_nothing_shows_to_be_of_a_run_are_refused(tmp_path: Path) -> None:
    """NxD's converter (``modify_qkv_for_megatron``) puts all queries of a rank first; a model that trains does not."""
    model, state, builder = original("llama", kv_heads=4)
    cut = Written(heads=4, kv_heads=4, tp=2, megatron=True, dp=0, markers=())
    directory = cut.write(tmp_path / "tag", state, LAYERS)
    (directory / "user_content.pt").unlink()
    (directory / "optim").rmdir()
    with raises(NeuronxUnreadable, match="copy the run's markers"):
        imported(directory, builder)
    for marker in ("checkpoint", "done"):
        (directory / marker).touch()
    see_the_same(directory, model, builder, weights_only=True)
    one_head = Written(heads=4, kv_heads=4, tp=4, megatron=True, dp=0, markers=()).write(tmp_path / "a", state, LAYERS)
    (one_head / "user_content.pt").unlink()
    (one_head / "optim").rmdir()
    see_the_same(one_head, model, builder)


@pytest.fixture(scope="module")
def expert_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cut = Written(heads=4, kv_heads=2, tp=2, ep=2, dp=0)
    return cut.write(tmp_path_factory.mktemp("expert") / "tag.ckpt", original("mixtral")[1], LAYERS)


RANK = "model/dp_rank_00_ep_rank_{ep:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


@pytest.mark.parametrize("lost", [{"ep": 1, "tp": 0, "pp": 0}, {"ep": 0, "tp": 1, "pp": 0}, {"ep": 1}, {"tp": 1}])
def test_a_lost_file_of_an_expert_rank_is_named(expert_ranks: Path, tmp_path: Path, lost: dict[str, int]) -> None:
    """Also where it is the last rank, all of whose files are lost."""
    directory = Path(shutil.copytree(expert_ranks, tmp_path / "tag"))
    for path in (directory / "model").iterdir():
        if all(f"_{of}_rank_{rank:02d}" in path.name for of, rank in lost.items()):
            path.unlink()
    with raises(NeuronxRanksMissing, match=RANK.format(**{"ep": 0, "tp": 0, "pp": 0, **lost})):
        imported(directory, original("mixtral")[2], weights_only=True)


@pytest.mark.parametrize(
    "surplus",
    [
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        RANK.format(ep=2, tp=0, pp=0),
        "model/dp_rank_01_tp_rank_00_pp_rank_00.pt",
    ],
)
def test_a_file_of_another_save_is_named(expert_ranks: Path, tmp_path: Path, surplus: str) -> None:
    directory = Path(shutil.copytree(expert_ranks, tmp_path / "tag"))
    shutil.copy(directory / RANK.format(ep=0, tp=0, pp=0), directory / surplus)
    with raises(NeuronxUnreadable, NeuronxRanksMissing, match=r"ep_rank_02_tp_rank_01|" + surplus.replace(".", r"\.")):
        imported(directory, original("mixtral")[2], weights_only=True)


def test_a_rank_too_many_is_named(tmp_path: Path) -> None:
    _, state, builder = original("llama")
    directory = Written(heads=4, kv_heads=2, tp=2, dp=0).write(tmp_path / "tag.ckpt", state, LAYERS)
    name = "model/dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"
    shutil.copy(directory / name.format(1), directory / name.format(2))
    with raises(NeuronxUnreadable, match=f"ranks too many .'{name.format(2)}'"):
        imported(directory, builder, weights_only=True)


def test_a_stage_too_many_or_twice_is_named(tmp_path: Path) -> None:
    _, state, builder = original("llama")
    directory = Written(heads=4, kv_heads=2, pp=2, dp=0).write(tmp_path / "tag.ckpt", state, LAYERS)
    name = "model/dp_rank_00_tp_rank_00_pp_rank_{:02d}.pt"
    shutil.copy(directory / name.format(1), directory / name.format(2))
    with raises(NeuronxMisfit, match=f"{name.format(2)}.* cannot be merged: '.*{name.format(1)}' .* holds it, too"):
        imported(directory, builder, weights_only=True)


def test_copies_that_differ_between_expert_ranks_are_named(expert_ranks: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(expert_ranks, tmp_path / "tag"))
    path = directory / RANK.format(ep=1, tp=0, pp=0)
    content = torch.load(path)
    content["model.norm.weight"].add_(1)
    torch.save(content, path)
    with raises(NeuronxReplicasDiffer, match=path.name):
        imported(directory, original("mixtral")[2], weights_only=True)


def test_state_of_expert_ranks_adapters_and_older_files_needs_weights_only(tmp_path: Path) -> None:
    _, state, builder = original("llama")
    tuned = Written(heads=4, kv_heads=2, lora_scaling=1.0).write(tmp_path / "tuned--step=5", state, LAYERS)
    older = Written(heads=4, kv_heads=2, older="pt").write(tmp_path / "older", state, LAYERS)
    assert not [name for name in imported(older, builder) if name.startswith("optim/")]
    (older / "optim.dp_rank_00.tp_rank_00").touch()
    experts = Written(heads=4, kv_heads=2, ep=2).write(tmp_path / "experts", original("mixtral")[1], LAYERS)
    for directory, ours, reason in (
        (tuned, builder, "that of an adapter"),
        (older, builder, "before NxD's save_checkpoint"),
        (experts, original("mixtral")[2], "expert-parallel ranks saved it"),
    ):
        with raises(NeuronxStateUnread, match=reason):
            imported(directory, ours)
        assert imported(directory, ours, weights_only=True)


def test_an_adapter_needs_its_layers_and_its_scaling(tmp_path: Path) -> None:
    model, state, builder = original("llama")
    cut = Written(heads=4, kv_heads=2, lora_scaling=1.5, dp=0)
    directory = cut.write(tmp_path / "tag", state, LAYERS)
    path = directory / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    content = torch.load(path)
    config = content.pop("lora_config")
    torch.save(content, path)
    with raises(NeuronxMisfit, match=r"adapter_config\.json"):
        imported(directory, builder, weights_only=True)
    (directory / "adapter_config.json").write_text('{"lora_alpha": 3.0, "lora_rank": 2, "use_rslora": false}')
    see_the_same(directory, model, builder, weights_only=True)
    stray = {name: each for name, each in content.items() if ".base_layer." not in name}
    torch.save(stray | {"lora_config": config}, path)
    with raises(NeuronxMisfit, match="weights of its layer are not there"):
        imported(directory, builder, weights_only=True)


def adapter_alone(model: Any, *, fused: bool, gathered: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """An adapter of rank 2 on two tensor-parallel ranks, and the updates that it makes, by the model's names.

    ``gathered``: as ``merge_sharded_lora_weights`` of ``modules/lora/model.py`` leaves them, whole on every rank.
    """
    ranks: list[dict[str, Any]] = [{}, {}]
    updates: dict[str, torch.Tensor] = {}
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    generator = torch.Generator().manual_seed(11)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / 5

    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        groups = [(f"{stem}.mlp.gate_up_proj", "weight", [f"{stem}.mlp.{half}_proj" for half in ("gate", "up")])]
        qkv = [f"{stem}.self_attn.{letter}_proj" for letter in "qkv"]
        groups += (
            [(f"{stem}.self_attn.qkv_proj", "weight_qkv", qkv)] if fused else [(each, "weight", [each]) for each in qkv]
        )
        for module, kind, projections in groups:
            a = random(2, 32)
            whole = [random(shapes[f"{each}.weight"][0], 2) for each in projections]
            updates |= {f"{each}.weight": 1.5 * b @ a for each, b in zip(projections, whole, strict=True)}
            shares = [torch.cat([b.chunk(2)[tp] for b in whole]) for tp in range(2)]
            for tp, rank in enumerate(ranks):
                rank[f"{module}.lora_A.weight"] = a
                rank[f"{module}.lora_B.{kind}"] = torch.cat(shares) if gathered else shares[tp]
        for module in (f"{stem}.self_attn.o_proj", f"{stem}.mlp.down_proj"):
            a, b = random(2, shapes[f"{module}.weight"][1]), random(32, 2)
            updates[f"{module}.weight"] = 1.5 * b @ a
            for tp, rank in enumerate(ranks):
                rank[f"{module}.lora_A.weight"] = a if gathered else a.chunk(2, 1)[tp].clone()
                rank[f"{module}.lora_B.weight"] = b
    return [{**rank, "lora_config": {"lora_alpha": 3, "lora_rank": 2, "use_rslora": False}} for rank in ranks], updates


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_an_adapter_alone_is_added_to_the_weights_that_the_configuration_names(
    tmp_path: Path, fused: bool, gathered: bool
) -> None:
    model, state, builder = original("llama")
    ranks, updates = adapter_alone(model, fused=fused, gathered=gathered)
    (tmp_path / "tag/model").mkdir(parents=True)
    for tp, own in enumerate(ranks):
        torch.save(own, tmp_path / f"tag/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    model.save_pretrained(tmp_path / "base")
    _, found = open_checkpoint(tmp_path / "tag", installed())
    with raises(NeuronxUnreadable, match=r"checkpoint\.resume_from"):
        found.listing(builder, weights_only=True)
    found.base = lambda: open_checkpoint(tmp_path / "base", installed())[1]
    listing = found.listing(builder, weights_only=True)
    tensors = {name: each for (_, name), each in zip(listing, found.read(list(listing)), strict=True)}
    for source in sources(builder):
        name = source.hf_names[0]
        expected = state[name] + updates.get(name, torch.zeros_like(state[name]))
        torch.testing.assert_close(tensors[source.name], expected, rtol=1e-5, atol=1e-5)
    assert len(updates) == 7 * LAYERS
    last = {name: each for name, each in ranks[0].items() if ".layers.1." not in name}
    torch.save(last, tmp_path / "tag/model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    torch.save(last, tmp_path / "tag/model/dp_rank_00_tp_rank_01_pp_rank_00.pt")
    with raises(NeuronxRanksMissing, match="model/dp_rank_00_tp_rank_00_pp_rank_01.pt"):
        found.listing(builder, weights_only=True)
