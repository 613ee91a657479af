"""Imports are committed checkpoints of ours: verified, loadable in any layout, and again what transformers had."""

from __future__ import annotations

import json
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import (
    ArchitectureUnread,
    ForeignFormatUnknown,
    ForeignHasWeightsOnly,
    ImportPlaceTaken,
    StorageFull,
    WeightsPickled,
)
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.models import HFFileDamaged, WeightsDoNotFit
from nxdt_core.errors.plugins import UnknownComponent
from nxdt_core.hf import reader as hf_reader
from nxdt_core.hf.directory import load_hf
from nxdt_core.hf.key_map import Source
from nxdt_core.hf.reader import HFWeights
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.models.decoder_builder import RotaryDecoderBuilder
from nxdt_core.run.start import ForeignStart, decide_start
from nxdt_core.train import TrainSession, build
from nxdt_core.train.generate import Sampling, load_model
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights import importing
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.importing import import_checkpoint
from nxdt_core.train.weights.saved_config import saved_run
from tests.calls import Call, in_turn
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.hf.exchange import VOCABULARY, import_together, llama, newest, write_tokenizer
from tests.engine.matrix.training import whole

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to import")


def written(uri, prompt, tokens):
    """Return what the model at an address writes behind a prompt."""
    model = load_model(uri)
    return "".join(model.writer.pieces(model.prompt(prompt), Sampling(max_new_tokens=tokens)))


def write_model(directory: Path, **changes: object) -> torch.nn.Module:
    """A model as transformers saves it, in several files of bfloat16, and its tokenizer."""
    write_tokenizer(directory)
    torch.manual_seed(3)
    keys = {
        "vocab_size": 304,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys)).to(torch.bfloat16).eval()
    model.save_pretrained(directory, max_shard_size="20KB")
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("theirs") / "model"
    write_model(directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_is_imported_and_exported_again_is_equal_and_speaks_alike(tmp_path, tied):
    model = write_model(tmp_path / "theirs", tie_word_embeddings=tied)
    uri = str(tmp_path / "store")
    imported = import_checkpoint(str(tmp_path / "theirs"), uri)
    assert (imported.format, imported.model, imported.step) == ("hf", "llama", 0)
    assert {entry.dtype for entry in newest(uri).tensors["model"].values()} == {"bfloat16"}
    export_hf(uri, str(tmp_path / "again"))
    before, after = model.state_dict(), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reads = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    ids = reads("And God said", return_tensors="pt", add_special_tokens=False).input_ids
    tokens = model.float().generate(ids, do_sample=False, max_new_tokens=12, suppress_tokens=[*range(VOCABULARY, 304)])
    text = written(uri, "And God said", 12)
    assert reads.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).rstrip("\ufffd") == text.rstrip("\ufffd")


def test_positions_of_the_section_bound_a_model_whose_builder_names_no_bound(tmp_path, monkeypatch):
    write_model(tmp_path / "theirs", max_position_embeddings=64)
    monkeypatch.setattr(
        RotaryDecoderBuilder, "max_sequence_length", property(lambda _: None, lambda *_: None), raising=False
    )
    import_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "store"))
    assert saved_run(newest(str(tmp_path / "store")), where="").config.run.data.seq_length == 64


def started(source: str, overrides: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What a rank holds once a run has begun with the weights of a directory: whole parameters by name."""
    config = llama("model.num_layers=2", *overrides)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine, materialise=False)
    TrainSession(config, engine=engine, model=model).load_foreign(Path(source))
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    engine.shutdown()
    return weights


LAYOUTS = {
    "one process": (1, ()),
    "tensor parallel": (2, ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")),
    "pipeline": (2, ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2")),
    "sharded by FSDP": (2, ("trainer.devices=2", "distributed_strategy.zero_stage=3")),
}


def started_in_each_layout(source: str) -> list[dict[str, torch.Tensor] | None]:
    return in_turn([Call(world, started, (source, overrides)) for world, overrides in LAYOUTS.values()])


@pytest.fixture(scope="module")
def held(theirs):
    """By layout, what its ranks hold."""
    by_rank = RankPool(2, lasting=True).run(started_in_each_layout, str(theirs))
    return dict(zip(LAYOUTS, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_with_the_weights_of_a_directory_in_any_layout(theirs, held, layout):
    found = {name: weight for each in held[layout] if each is not None for name, weight in each.items()}
    expected = load_hf(theirs, build.model_builder(llama("model.num_layers=2")))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight.float()) for name, weight in expected.items())


def test_a_run_names_a_directory_to_begin_with(tmp_path, theirs):
    wanted = (f"checkpoint.resume_from={theirs}", "model.num_layers=2")
    own = LocalStorage(str(tmp_path / "own"))
    start = decide_start(llama(*wanted), own, print)
    assert isinstance(start, ForeignStart)
    assert start.path == theirs
    with raises(ForeignHasWeightsOnly, match="weight_init_only=true"):
        decide_start(llama(*wanted, "checkpoint.weight_init_only=false"), own, print)


def test_the_directory_may_go_afterwards(tmp_path):
    write_model(tmp_path / "theirs")
    uri = str(tmp_path / "store")
    import_checkpoint(str(tmp_path / "theirs"), uri)
    (tmp_path / "theirs/config.json").unlink()
    builder = build.model_builder(saved_run(newest(uri), where="").config)
    assert (builder.vocab_size, builder.config.num_layers, builder.config.kv_heads) == (304, 2, 2)


def test_ranks_divide_the_tensors(tmp_path, theirs):
    RankPool(2, lasting=True).run(import_together, str(theirs), str(tmp_path / "store"))
    import_checkpoint(str(theirs), str(tmp_path / "alone"))
    both, alone = newest(str(tmp_path / "store")), newest(str(tmp_path / "alone"))
    writers = {part.file for entry in both.tensors["model"].values() for part in entry.parts}
    assert len(writers) == 2
    mine = checkpoint.load_model(LocalStorage(str(tmp_path / "store")), both)
    whole = checkpoint.load_model(LocalStorage(str(tmp_path / "alone")), alone)
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


def test_one_tensor_at_a_time_is_in_memory(tmp_path, theirs, monkeypatch):
    alive: list[int] = []
    held = 0

    read = HFWeights.read

    def counted(self: HFWeights, source: Source) -> torch.Tensor:
        nonlocal held
        tensor = read(self, source)
        held += 1
        alive.append(held)
        weakref.finalize(tensor, release)
        return tensor

    def release() -> None:
        nonlocal held
        held -= 1

    monkeypatch.setattr(hf_reader.HFWeights, "read", counted)
    import_checkpoint(str(theirs), str(tmp_path / "store"))
    assert len(alive) == 2 * 9 + 3
    assert max(alive) == 1


def test_an_import_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, theirs, monkeypatch):
    storage = LocalStorage(str(tmp_path / "store"))
    for fail_at in (0, 3, 8, 15):
        monkeypatch.setattr(importing.checkpoint, "open_storage", lambda uri, n=fail_at: FaultyStorage(storage, n))
        with pytest.raises(StorageFull):
            import_checkpoint(str(theirs), "store")
        assert checkpoint.list_checkpoints(storage) == []
    monkeypatch.undo()
    import_checkpoint(str(theirs), str(tmp_path / "store"))
    assert checkpoint.verify(storage, 0) == []


def test_a_place_with_a_checkpoint_is_refused(tmp_path, theirs):
    import_checkpoint(str(theirs), str(tmp_path / "store"))
    with raises(ImportPlaceTaken, match="step 0"):
        import_checkpoint(str(theirs), str(tmp_path / "store"))


def test_a_configuration_of_another_model_is_refused(tmp_path, theirs):
    with pytest.raises(WeightsDoNotFit) as caught:
        import_checkpoint(
            str(theirs), str(tmp_path / "store"), overrides=["model.num_layers=3", "model.vocab_size=320"]
        )
    assert len(caught.value.missing) == 9
    assert caught.value.shapes == [
        "model.embed_tokens.weight: (304, 32) instead of (320, 32)",
        "lm_head.weight: (304, 32) instead of (320, 32)",
    ]
    assert f"The weights in '{theirs}' do not fit" in caught.value.what()
    assert caught.value.do().startswith("Leave the model's sizes to the config.json there.")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("architectures", [["WhisperForConditionalGeneration"], None])
def test_an_architecture_that_nobody_reads_is_refused(tmp_path, theirs, architectures):
    config = {**json.loads((theirs / "config.json").read_text()), "architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises(ArchitectureUnread, match="LlamaForCausalLM"):
        import_checkpoint(str(tmp_path), str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_dropout": 0.5}, "configuration '{file}' has attention_dropout = 0.5"),
        ({"vocab_size": None}, "{file} (vocab_size): model.vocab_size: found null"),
        ({"hidden_size": "64"}, "{file} (hidden_size): model.hidden_size: found '64'"),
        ({"num_key_value_heads": 3}, "{file} (num_key_value_heads): model.num_kv_heads: must divide"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "{file}: model.rope_theta: must be above 0"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 99, "num_local_experts": 4},
            "{file} (num_experts_per_tok): model.moe.top_k: ",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 30, "n_head": 4, "n_layer": 0},
            "{file} (n_layer): model.num_layers: found 0",
        ),
    ],
)
def test_what_is_wrong_in_a_config_json_is_told_with_the_file_and_its_own_key(tmp_path, theirs, changes, said):
    config = {**json.loads((theirs / "config.json").read_text()), **changes}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        import_checkpoint(str(tmp_path), str(tmp_path / "store"))
    assert said.format(file=file) in str(caught.value)
    assert str(caught.value).startswith(f"[NXDT-C001] {tmp_path}: ")
    assert "mapping" not in str(caught.value)


def test_a_size_that_a_config_json_lacks_is_told_with_the_file(tmp_path, theirs):
    config = json.loads((theirs / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"'{tmp_path}/config.json' cannot be read: it has no hidden_size"):
        import_checkpoint(str(tmp_path), str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": 5}, "architectures must be a list of names, and is 5"),
        ({"rope_parameters": [1, 2]}, "rope_parameters must be a mapping or null, and is [1, 2]"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a finite number, and is 'x'"),
        (
            {
                "architectures": ["GPTNeoXForCausalLM"],
                "model_type": "gpt_neox",
                "hidden_act": "gelu",
                "attention_bias": True,
                "rope_parameters": "x",
            },
            "rope_parameters must be a mapping or null, and is 'x'",
        ),
    ],
)
def test_a_key_of_the_wrong_type_is_told_with_the_file(tmp_path, theirs, changes, said):
    config = {**json.loads((theirs / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NxdtError) as caught:
        import_checkpoint(str(tmp_path), str(tmp_path / "store"))
    assert f"{tmp_path}/config.json" in str(caught.value)
    assert said in str(caught.value)


def test_pickled_weights_are_refused_and_not_run(tmp_path, theirs):
    class Bomb:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'went off')!r}, 'w')",)

    (tmp_path / "config.json").write_text((theirs / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with raises(WeightsPickled, match=r"(?s)pytorch_model\.bin.*save_pretrained"):
        import_checkpoint(str(tmp_path), str(tmp_path / "store"))
    assert not (tmp_path / "went off").exists()
    assert not (tmp_path / "store").exists()


def test_a_truncated_file_is_named_and_nothing_committed(tmp_path):
    write_model(tmp_path / "theirs")
    file = sorted((tmp_path / "theirs").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HFFileDamaged, match=file.name):
        import_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "store"))
    assert checkpoint.list_checkpoints(LocalStorage(str(tmp_path / "store"))) == []


@pytest.mark.parametrize("format", [None, "hf"])
def test_what_is_no_checkpoint_is_told_with_what_would_be(tmp_path, format):
    kernel = Kernel.start()
    (tmp_path / "model.onnx").write_text("")
    with raises(ForeignFormatUnknown, match=r"config\.json"):
        open_checkpoint(tmp_path, kernel, format)
    with raises(ForeignFormatUnknown, match="does not exist"):
        open_checkpoint(tmp_path / "none", kernel, format)


def test_a_format_that_nobody_offers_is_told_with_those_that_are_there(tmp_path):
    with pytest.raises(UnknownComponent, match=r"No format is called 'acme'(?s:.*)Available: 'hf'"):
        open_checkpoint(tmp_path, Kernel.start(PluginPolicy(allow=())), "acme")
