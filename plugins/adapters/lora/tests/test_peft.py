"""The same numbers as peft's LoRA on the same weights: logits, gradients, and files that either side wrote."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import fields

import pytest
import torch
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import AdapterDiffers, MergeUnties, NoPeftForm
from nxdt_plugin_lora.peft_files import CONFIG, WEIGHTS, describe, section_for, shortened, write_peft
from nxdt_plugin_lora.saved_run import merge_lora
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import AdapterBaseUnknown
from nxdt_core.hf.directory import save_hf
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer
from nxdt_core.train.weights.loading import base_digest, find_weights
from tests.sampling import slow, slow_except

peft = pytest.importorskip("peft", reason="peft is not installed: nothing to compare with")
create_loraplus_optimizer = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

KINDS = {
    "linear": ("llama", {}),
    "some": ("llama", {"target_modules": ["q_proj", "layers.1.mlp"], "use_rslora": True, "lora_alpha": 5}),
    "dora": ("llama", {"use_dora": True}),
    "patterns": (
        "llama",
        {
            "rank_pattern": {"layers.1.attention.q_proj": 3, "q_proj": 8, "down_proj": 2},
            "alpha_pattern": {"0.mlp.up_proj": 5, "v_proj": 64},
            "use_rslora": True,
        },
    ),
    "vocabulary": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "vocabulary-dora": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True}),
    "whole": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "mlp_norm"]}),
    "whole-within": ("llama", {"modules_to_save": ["mlp", "lm_head"]}),
    "whole-mixed": ("llama", {"target_modules": ["all-linear", "lm_head"], "modules_to_save": ["0.mlp", "norm"]}),
    "tied": ("tied", {"target_modules": ["embed_tokens", "down_proj"]}),
    "tied-dora": ("tied", {"target_modules": ["lm_head", "down_proj"], "use_dora": True}),
    "fused": ("gpt2", {"target_modules": ["qkv_proj", "o_proj", "embedding.tokens"]}),
    "fused-dora": ("gpt2", {"target_modules": ["qkv_proj", "up_proj"], "use_dora": True}),
    "all-biases": ("gpt2", {"target_modules": ["qkv_proj"], "lora_bias": "all"}),
    "some-biases": ("gpt2", {"target_modules": ["qkv_proj", "down_proj"], "bias": "lora_only"}),
    "experts": ("mixtral", {"target_modules": ["experts", "q_proj"], "lora_dropout": LoraConfig().lora_dropout}),
    "hf": ("hf", {}),
    "tied-whole": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "hf-all": ("hf-mixture", {}),
    "hf-dense": (
        "hf-mixture",
        {
            "target_modules": ["layers.1.mlp.gate_proj", "o_proj"],
            "rank_pattern": {"gate_proj": 2, "o_proj": 3},
            "alpha_pattern": {"gate_proj": 7},
            "lora_dropout": 0.05,
        },
    ),
    "hf-dense-alone": ("hf-mixture", {"target_modules": ["layers.1.mlp"]}),
    "hf-shared": ("hf-shared", {}),
    "hf-sinks": ("hf-sinks", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "hf-shared-alone": ("hf-shared", {"target_modules": ["shared_experts", "q_proj"]}),
    "hf-experts": ("hf-mixture", {"target_modules": ["experts", "q_proj"], "lora_dropout": LoraConfig().lora_dropout}),
}
UNTIED = ("tied", "tied-dora", "fused")
"""Those with an update of one use of a tied matrix."""


KEPT = {
    *("dora", "patterns", "vocabulary-dora", "whole-mixed", "tied", "fused"),
    *("some-biases", "experts", "hf-shared"),
}
"""Each model and each option once; the others repeat them in other combinations."""


@pytest.fixture(scope="module", params=slow_except(KINDS, KEPT), ids=[*KINDS])
def run(request, start_once):
    made = start_once(*KINDS[request.param])
    made.shake()
    return made


@pytest.fixture(scope="module")
def base(run, tmp_path_factory):
    """The weights under the adapter of ``run``."""
    return run.save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def opened(run, base, tmp_path_factory):
    """The adapter of ``run``, over its base in peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter = written(run, tmp_path_factory.mktemp("ours") / "ours")
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def written(run, directory):
    """The adapter of ``run`` as peft keeps it."""
    saved, digest = run.saved, base_digest(run.model, run.engine.ranks)
    shapes = {name: tuple(p.shape) for name, p in saved.items()}
    config, tensors = describe(run.builder, run.lora, shapes, base=None)
    write_peft(directory, config, tensors, lambda names: [saved[name].detach() for name in names], base=digest)
    return directory


def logits_of(run, ids, rows):
    """Without the rows that fill the vocabulary up."""
    run.module.eval()
    return run.module(ids)[..., :rows]


@pytest.fixture
def ids():
    return torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def test_peft_opens_an_adapter_of_ours_and_gives_the_same_logits_and_gradients(run, opened, ids):
    expected = opened(ids).logits
    found = logits_of(run, ids, expected.shape[-1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert all(p.grad is None for p in run.module.parameters() if not p.requires_grad)
    if any("experts" in name for name in run.trained):
        return  # peft holds two matrices of an expert in one update: its gradients have no counterpart
    own = {name: g for each, tensor in run.peft_tensors.items() for name, g in tensor.write(run.trained[each].grad)}
    gradients = {
        _file_name(name): p.grad for name, p in opened.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    assert own.keys() == gradients.keys()
    for name, gradient in own.items():
        scale = gradients[name].abs().max().clamp(min=1e-3)
        assert (gradient - gradients[name]).abs().max() / scale < 5e-4, name


def test_lora_plus_has_the_rates_of_peft(run, opened, start_once, request):
    if any("experts" in name for name in run.trained):
        return  # peft holds two matrices of an expert in one update
    model, adapter = KINDS[request.node.callspec.params["run"]]
    ours = start_once(model, {**adapter, "loraplus_lr_ratio": 16})
    optimizer = initialize_parallel_optimizer(ours.config, ours.engine, ours.model)
    rates = {name: group["lr"] for group in optimizer.inner.param_groups for name in group["names"]}
    own = {
        part: rates[each] for each, tensor in run.peft_tensors.items() for part, _ in tensor.write(run.trained[each])
    }
    theirs = create_loraplus_optimizer(opened, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16)
    by_weight = {id(weight): group["lr"] for group in theirs.param_groups for weight in group["params"]}
    named = opened.named_parameters(remove_duplicate=False)
    expected = {_file_name(name): by_weight[id(weight)] for name, weight in named if weight.requires_grad}
    tables = {name for name, rate in expected.items() if rate == 1e-6}  # peft's own rate for updates of embeddings
    assert {name: own[name] for name in own.keys() - tables} == {
        each: expected[each] for each in expected.keys() - tables
    }
    assert all(own[name] == 1e-2 for name in tables & own.keys())


def _file_name(parameter):
    """What peft's file calls one of its parameters."""
    name = parameter.replace(".default", "").replace(".modules_to_save", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


def test_an_adapter_that_peft_wrote_loads_here(run, opened, start, tmp_path, request):
    if any("experts" in name for name in run.trained):
        pytest.skip("peft writes the two matrices of an expert as one update, which the key map does not know")
    opened.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    model, adapter = KINDS[request.node.callspec.params["run"]]
    more = {"load_lora_from_ckpt": True, "lora_save_dir": str(tmp_path), "lora_load_tag": "theirs"}
    loaded = start(model, {**adapter, **more})
    for name, tensor in run.peft_tensors.items():  # without rows that fill a vocabulary up
        kept, found = (dict(tensor.write(each.trained[name].detach())) for each in (run, loaded))
        assert all(torch.equal(kept[part], found[part]) for part in kept), name


def test_a_directory_of_peft_is_opened_over_its_base_without_a_section(run, base, opened, tmp_path, ids, request):
    if request.node.callspec.params["run"] == "hf":
        pytest.skip("the directory names Qwen2, whose own model has no sliding windows: a configuration must name hf")
    directory = tmp_path / "adapter"
    if any("experts" in name for name in run.trained):  # peft writes the two matrices of an expert as one update
        written(run, directory)
    else:
        opened.save_pretrained(directory, safe_serialization=True)
    found = find_weights(str(directory), base=str(base))
    engine = build.engine(found.run)
    engine.start()
    model = initialize_parallel_model(found.run, engine, materialise=False)
    found.load(engine, model)
    expected = opened(ids).logits
    torch.testing.assert_close(model.forward(ids)[..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_without_its_base_says_how_to_name_it(start, tmp_path):
    with raises(AdapterBaseUnknown, match="names 'someone/somewhere'"):
        directory = written(start("llama", {}), tmp_path / "ours")
        changed(directory, base_model_name_or_path="someone/somewhere")
        find_weights(str(directory))
    changed(directory, base_model_name_or_path=None)
    with raises(AdapterBaseUnknown, match="it names no base"):
        find_weights(str(directory))


def test_a_merged_adapter_is_what_peft_merges(run, base, opened, tmp_path, ids, request):
    kept, place = (checkpoint.open_storage(str(tmp_path / name)) for name in ("kept", "merged"))
    TrainSession(run.config, engine=run.engine, model=run.model, state=TrainState(step=1)).save(kept)
    if request.node.callspec.params["run"] in UNTIED:
        with raises(MergeUnties):
            merge_lora(kept, None, place)
        return
    merge_lora(kept, None, place)
    merged = checkpoint.load_model(place, checkpoint.find_checkpoint(place, None, warn=print))
    save_hf(tmp_path / "hf", run.builder, merged)
    theirs = copy.deepcopy(opened).merge_and_unload()
    ours, unchanged = (
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for directory in (tmp_path / "hf", base)
    )
    with torch.no_grad():
        expected = theirs(ids).logits
        assert not torch.allclose(unchanged(ids).logits, expected, atol=1e-2)
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_dropout_drops_what_an_update_is_given_and_nothing_else(start, ids):
    plain, dropped = start("llama", {}), start("llama", {"lora_dropout": 0.5})
    for run in (plain, dropped):
        run.shake()
    assert torch.equal(logits_of(plain, ids, 60), logits_of(dropped, ids, 60))
    dropped.module.train()
    assert not torch.allclose(dropped.module(ids), plain.module(ids))
    with torch.no_grad():
        for name, parameter in dropped.trained.items():
            if name.endswith("lora_B"):
                parameter.zero_()
    base = start("llama", {})
    torch.testing.assert_close(dropped.module(ids), base.module(ids))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "lora_rank is 8 there and 4 here"),
        ({"lora_alpha": 1}, "lora_alpha is 1 there and 32.0 here"),
        ({"use_dora": True}, "use_dora is True there"),
        (
            {"rank_pattern": {"0.self_attn.q_proj": 2}},
            "of 'layers.0.attention.q_proj' are 2 and 32.0 there and 4 and 32",
        ),
        (
            {"alpha_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 2}},
            "of 'layers.1.attention.q_proj' are 4 and 2 there",
        ),
    ],
)
def test_an_adapter_of_other_options_is_refused(start, queries, change, said):
    directory, load = queries
    changed(directory, **change)
    with raises(AdapterDiffers, match=said):
        start("llama", load)


UNREAD = {
    "rank_pattern": {r"layers\.\d+\.q_proj": 2},
    "alpha_pattern": {"[qk]_proj": 2},
    "lora_bias": True,
    "layer_replication": [[0, 2], [1, 2]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1, 2],
    "megatron_config": {"tensor_model_parallel_size": 1},
    "alora_invocation_tokens": [5, 6],
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 2},
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 8},
}
STARTS = ["pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "mica"]


QUERIES = {"target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def queries_once(start_once, tmp_path_factory):
    return written(start_once("llama", QUERIES), tmp_path_factory.mktemp("queries") / "adapter")


@pytest.fixture
def queries(queries_once, tmp_path):
    """A directory of an adapter of ``QUERIES``, to be changed, and the keys that load it."""
    directory = shutil.copytree(queries_once, tmp_path / "adapter")
    return directory, {**QUERIES, "load_lora_from_ckpt": True, "lora_save_dir": str(directory)}


def changed(directory, **options):
    """The options of an adapter are set to others."""
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**config, **options}))


@pytest.mark.parametrize(
    ("key", "value"), [*UNREAD.items(), *(("init_lora_weights", start) for start in STARTS)], ids=str
)
def test_an_adapter_that_computes_what_is_not_implemented_is_refused(start, queries, key, value):
    directory, load = queries
    changed(directory, **{key: value})
    with raises(AdapterDiffers, match="NXDT-L005") as raised:
        start("llama", load)
    assert key in raised.value.what()
    assert ("merge_and_unload" in raised.value.do()) is not key.endswith("_pattern")
    converts = value in ("pissa_niter_4", "olora", "corda", "lora_ga")
    assert ("path_initial_model_for_weight_conversion" in raised.value.do()) is converts


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", ["layers.0", "layers.1"]),
        (r".*\.q_proj", ["layers.0", "layers.1"]),
        (r"(.*\.)?1\.self_attn\.q_proj$", ["layers.1"]),
        ("^model.layers.0.self_attn.q_proj", ["layers.0"]),
        ("^q_proj", []),
        ("proj", []),
    ],
)
def test_patterns_of_peft_mean_the_modules_that_they_mean_there(queries, start, pattern, matches):
    directory, _ = queries
    modules = {f"layers.{layer}": f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)}
    assert [
        layer for layer, module in modules.items() if peft.utils.other.get_pattern_key([pattern], module) == pattern
    ] == matches
    changed(directory, alpha_pattern={pattern: 3})
    section = section_for(directory, start("llama", {}).builder)
    expected = {"q_proj": 3} if len(matches) == 2 else {f"{layer}.attention.q_proj": 3 for layer in matches}
    assert section["alpha_pattern"] == expected


def test_patterns_of_a_target_parameter_are_those_of_the_name_of_its_weight(start, tmp_path):
    run = start(*KINDS["hf-dense"])
    directory = written(run, tmp_path / "adapter")
    config = json.loads((directory / CONFIG).read_text())
    assert config["target_parameters"] == ["model.layers.1.mlp.gate_proj.weight"]
    assert config["rank_pattern"] == {"gate_proj.weight": 2, "o_proj": 3}
    assert section_for(directory, run.builder)["rank_pattern"] == {"gate_proj": 2, "o_proj": 3}
    for pattern, expected in {"gate_proj": {}, r".*\.1\.mlp\.gate_proj\.weight": {"gate_proj": 5}}.items():
        matched = peft.utils.other.get_pattern_key([pattern], *config["target_parameters"]) == pattern
        assert matched is bool(expected)
        changed(directory, alpha_pattern={pattern: 5})
        assert section_for(directory, run.builder)["alpha_pattern"] == expected


def test_every_variant_that_peft_has_is_known():
    variants = {field.name for field in fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")}
    assert variants - {"use_dora"} <= UNREAD.keys()


def test_norms_that_count_rows_which_fill_the_vocabulary_up_have_no_form_in_peft(start, tmp_path):
    run = start("gpt2", {"target_modules": ["embedding.tokens"], "use_dora": True})
    with raises(NoPeftForm, match="NXDT-L003"):
        written(run, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("model", "adapter", "said"),
    [
        ("mixtral", {"modules_to_save": ["experts"]}, "no experts whole"),
        ("mixtral", {"modules_to_save": ["0.moe.experts"]}, "no experts whole"),
        ("mixtral", {"modules_to_save": ["router"]}, "under another name"),
        ("mixtral", {"modules_to_save": ["layers.1.moe"]}, "NXDT-L003"),
        ("hf-mixture", {"target_modules": ["gate_proj", "q_proj"]}, "gate_proj and up_proj of an expert as one"),
        ("hf-sinks", {"target_modules": ["experts", "q_proj"]}, "keeps all experts in one tensor"),
        ("hf-sinks", {"modules_to_save": ["mlp.experts"]}, "no experts whole"),
        ("hf-sinks", {"modules_to_save": ["sinks"]}, "there it is part of one"),
        (
            "mixtral",
            {"target_modules": ["experts"], "rank_pattern": {"experts.up_proj": 2}},
            "lora_rank and lora_alpha",
        ),
        ("mixtral", {"target_modules": ["experts.up_proj"]}, "gate_proj and up_proj of an expert as one"),
        ("hf-mixture", {"target_modules": ["layers.1.mlp.up_proj"], "use_dora": True}, "takes a layer of that name"),
        ("tied", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}, "has an update"),
    ],
)
def test_what_peft_would_open_as_something_else_is_refused(start, tmp_path, model, adapter, said):
    run = start(model, {"target_modules": ["q_proj"], **adapter})
    with raises(NoPeftForm, match=said) as raised:
        written(run, tmp_path / "adapter")
    assert "merge-lora" in raised.value.do()
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("whole", [["norm"], ["0.mlp"], ["proj"], ["lm_head", "head"]], ids=str)
def test_modules_to_save_are_those_of_peft(start, tmp_path, whole):
    run = start("llama", {"target_modules": ["embed_tokens"], "modules_to_save": whole})
    base = transformers.AutoModelForCausalLM.from_pretrained(run.save_base(tmp_path / "base"))
    theirs = peft.get_peft_model(base, peft.LoraConfig(target_modules=["embed_tokens"], modules_to_save=whole))
    trained = {_file_name(name) for name, p in theirs.named_parameters() if p.requires_grad and "lora" not in name}
    assert trained
    whole_here = (each for each in run.peft_tensors.values() if each.leaf is None)
    assert trained == {name for each in whole_here for name in each.source.hf_names}


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=str)
def test_an_embedding_that_is_the_head_too_trains_whole_in_peft_for_both(start, tmp_path, ids, whole):
    run = start("tied", {"target_modules": ["q_proj"], "modules_to_save": whole})
    base = transformers.AutoModelForCausalLM.from_pretrained(run.save_base(tmp_path / "base"), dtype=torch.float32)
    run.shake()
    theirs = peft.PeftModel.from_pretrained(base, written(run, tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits_of(run, ids, 60), theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"]], ids=str)
def test_an_adapter_that_trained_the_head_apart_from_the_embedding_is_refused(start, tmp_path, whole):
    run = start("tied", {"target_modules": ["q_proj"], "modules_to_save": whole})
    base = transformers.AutoModelForCausalLM.from_pretrained(run.save_base(tmp_path / "base"), dtype=torch.float32)
    options = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], modules_to_save=whole)
    peft.get_peft_model(base, options).save_pretrained(tmp_path / "theirs")
    load = {"load_lora_from_ckpt": True, "lora_save_dir": str(tmp_path / "theirs")}
    with raises(AdapterDiffers, match="trained them apart") as raised:
        start("tied", {"target_modules": ["q_proj"], "modules_to_save": whole, **load})
    assert "merge_and_unload" in raised.value.do()


PISSA = {
    "plain": {"target_modules": ["all-linear"]},
    "patterns": {
        "target_modules": ["attention", "down_proj"],
        "rank_pattern": {"q_proj": 8, "0.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "rslora": {"target_modules": ["qkv_proj", "up_proj"], "use_rslora": True, "lora_alpha": 6},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}


@pytest.mark.parametrize(
    ("kind", "model"), [("plain", "llama"), ("patterns", "llama"), ("rslora", "gpt2"), slow("dora", "hf")]
)
def test_pissa_trains_as_peft_and_is_exchanged_with_it(start, tmp_path, ids, kind, model):
    options = {"init_lora_weights": "pissa", **PISSA[kind]}
    run = start(model, options)
    base = run.save_base(tmp_path / "base")

    def unchanged():
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    own, _ = describe(run.builder, run.lora, {name: tuple(p.shape) for name, p in run.saved.items()}, base=None)
    section = {key: own[key] for key in ("target_modules", "fan_in_fan_out", "use_rslora", "use_dora")}
    halves = {key: {name: value / 2 for name, value in own[key].items()} for key in ("rank_pattern", "alpha_pattern")}
    ranks = {name: int(rank) for name, rank in halves["rank_pattern"].items()}
    section |= {"rank_pattern": ranks, "alpha_pattern": halves["alpha_pattern"], "r": run.lora.lora_rank}
    theirs = peft.get_peft_model(
        unchanged(), peft.LoraConfig(**section, lora_alpha=run.lora.lora_alpha, init_lora_weights="pissa")
    ).train()
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = "pissa"

    def losses(logits, parameters):
        optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    rows = unchanged().config.vocab_size
    found = [*losses(lambda ids: run.module(ids)[..., :rows], run.trained.values())]
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert found == pytest.approx([*losses(lambda ids: theirs(ids).logits, trained)], abs=1e-5)
    assert found[-1] < found[0] - 0.05
    expected = logits_of(run, ids, rows)
    assert not torch.allclose(unchanged()(ids).logits, expected, atol=1e-2)
    exported = peft.PeftModel.from_pretrained(unchanged(), written(run, tmp_path / "ours")).eval()
    within = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(exported(ids).logits, expected, rtol=0, atol=within)
    theirs.save_pretrained(tmp_path / "theirs")
    loading = {"load_lora_from_ckpt": True, "lora_save_dir": str(tmp_path / "theirs")}
    loaded = start(model, {**options, **loading})
    torch.testing.assert_close(logits_of(loaded, ids, rows), theirs.eval()(ids).logits, rtol=0, atol=within)
    with raises(AdapterDiffers, match="init_lora_weights is pissa there and default here"):
        start(model, {**options, "init_lora_weights": "default", **loading})
    assert section_for(tmp_path / "theirs", run.builder)["init_lora_weights"] == "pissa"
    if model != "hf":  # its directory names Qwen2, whose own model has no sliding windows
        opened = find_weights(str(tmp_path / "theirs"), base=str(base)).run.selected("adapter").config
        assert opened.init_lora_weights == "pissa"


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_peft_converts_loads_as_the_refusal_says(start, tmp_path, ids, init):
    run = start("llama", {"target_modules": ["q_proj"]})
    base = transformers.AutoModelForCausalLM.from_pretrained(run.save_base(tmp_path / "base"), dtype=torch.float32)
    options = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(base, options).eval()
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = init
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    expected = theirs(ids).logits
    initial = str(tmp_path / "initial")
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=initial)
    load = {"load_lora_from_ckpt": True, "lora_save_dir": str(tmp_path / "converted")}
    loaded = start("llama", {"target_modules": ["q_proj"], "lora_rank": 8, "lora_alpha": 64, **load})
    plain = logits_of(start("llama", {"enable_lora": False}), ids, 60)
    assert not torch.allclose(plain, expected, atol=1e-2)
    torch.testing.assert_close(logits_of(loaded, ids, 60), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_other_layers_is_refused(start, queries):
    _, load = queries
    with pytest.raises(WeightsDoNotFit, match="v_proj"):
        start("llama", {**load, "target_modules": ["v_proj"]})


def test_an_adapter_of_another_base_is_refused(start, queries):
    _, load = queries
    start("llama", load)
    with raises(AdapterOfAnotherBase):
        start("llama", load, seed=99)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (CONFIG, b'{"peft_type": "IA3"}', "peft_type is 'IA3'"),
        (CONFIG, b"{", "adapter_config.json"),
        (CONFIG, b'{"peft_type": "LORA", "rank_pattern": {"q_proj": [2]}}', "not numbers by name"),
        (WEIGHTS, b"not safetensors", "adapter_model.safetensors"),
        (WEIGHTS, b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (WEIGHTS, None, "adapter_model.safetensors"),
    ],
)
def test_a_broken_directory_is_named(start, queries, file, content, said):
    directory, load = queries
    (directory / file).unlink() if content is None else (directory / file).write_bytes(content)
    with pytest.raises(NxdtError, match=said):
        start("llama", load)


def test_targets_are_written_short_where_the_last_word_says_all():
    modules = ["a.0.q", "a.1.q", "a.0.v", "a.1.v"]
    assert shortened(["a.0.q", "a.1.q", "a.1.v"], modules) == ["a.1.v", "q"]
