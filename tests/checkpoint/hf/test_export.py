"""transformers loads what is exported, with the same logits and tokens, whatever layout the weights were saved in."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, RanksFailed
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core import checkpoint
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotFound, StorageFull
from nxdt_core.errors.models import HFNotWritable, WeightsDoNotFit
from nxdt_core.hf import directory as hf_write
from nxdt_core.hf.directory import load_hf
from nxdt_core.train import build
from nxdt_core.train.generate import Sampling, load_model
from nxdt_core.train.weights.export import export_hf, plan_export
from nxdt_core.train.weights.saved_config import own_run, saved_run
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.hf.exchange import VOCABULARY, export_together, llama, newest, save_run, write_tokenizer
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to load exports with")

PROMPT = "In the beginning God created"
TIED = "model.share_embeddings_and_output_weights=true"
LAYOUTS = {
    "one process": (1, ()),
    "tied, on one process": (1, (TIED,)),
    "tensor parallel in a pipeline, tied": (
        4,
        (
            "trainer.devices=4",
            "distributed_strategy.tensor_model_parallel_size=2",
            "distributed_strategy.pipeline_model_parallel_size=2",
            "model.num_layers=4",
            TIED,
        ),
    ),
    "sharded by FSDP": (2, ("trainer.devices=2", "distributed_strategy.zero_stage=3")),
}


def written(uri, prompt, tokens):
    """Return what the model at an address writes behind a prompt."""
    model = load_model(uri)
    return "".join(model.writer.pieces(model.prompt(prompt), Sampling(max_new_tokens=tokens)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe")


@pytest.fixture(scope="module")
def saved(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("saved") / "store")
    save_run(uri, (), tokenizer)
    return uri


def our_model(uri: str) -> torch.nn.Module:
    """The plain module with the checkpoint's weights."""
    manifest = newest(uri)
    module = build.model_builder(saved_run(manifest, where="").config).build()
    module.load_state_dict(checkpoint.load_model(LocalStorage(uri), manifest), strict=False)
    return module.eval()


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("one process", "tensor parallel in a pipeline, tied")))
def test_transformers_computes_and_generates_the_same(tmp_path, tokenizer, layout):
    """An export reads whole tensors; ``test_sharded.py`` shows that those of FSDP are whole in a checkpoint too."""
    ranks, overrides = LAYOUTS[layout]
    uri, target = str(tmp_path / "store"), tmp_path / "hf"
    RankPool(ranks, lasting=True).run(save_run, uri, overrides, tokenizer, timeout_s=120)
    exported = export_hf(uri, str(target), max_shard_bytes=20_000)
    assert sum(name.endswith(".safetensors") for name in exported.files) > 2
    assert sorted(exported.files) == sorted(path.name for path in target.iterdir())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    reads = transformers.AutoTokenizer.from_pretrained(target)
    ids = reads(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    ours = our_model(uri)
    tokens = theirs.generate(ids, do_sample=False, max_new_tokens=24)
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() <= 1e-5
        likeliest = ours(tokens)[0, :, :VOCABULARY].argmax(-1)
    begun = ids.shape[1]
    assert torch.equal(tokens[0, begun:], likeliest[begun - 1 : -1])
    text = written(uri, PROMPT, 24)
    unfinished = "\ufffd"  # `generate` holds back the bytes of a character that has not ended
    assert reads.decode(tokens[0, begun:], skip_special_tokens=True).rstrip(unfinished) == text.rstrip(unfinished)
    assert len(set(tokens[0, begun:].tolist())) > 5, "a model that repeats one token proves little"


def test_a_tokenizer_comes_with_its_files_and_ids(tmp_path, saved, tokenizer):
    exported = export_hf(saved, str(tmp_path / "hf"))
    assert exported.notes == ()
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert (tmp_path / "hf/chat_template.jinja").read_text() == "{{ messages }}"
    config = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert config["suppress_tokens"] == [300, 301, 302, 303], "rows of the embedding that are no tokens"


def test_a_tokenizer_that_transformers_does_not_have_is_told(tmp_path):
    save_run(str(tmp_path / "store"), (), None)
    exported = export_hf(str(tmp_path / "store"), str(tmp_path / "hf"))
    assert "'byte'" in exported.notes[0]
    assert not list((tmp_path / "hf").glob("tokenizer*"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").eos_token_id == 257


def test_weights_are_written_in_the_dtype_that_is_asked_for(tmp_path, saved):
    export_hf(saved, str(tmp_path / "hf"), dtype="bfloat16")
    weights = load_hf(tmp_path / "hf", build.model_builder(llama()))
    whole = checkpoint.load_model(LocalStorage(saved), newest(saved))
    assert all(torch.equal(weight, whole[name].bfloat16()) for name, weight in weights.items())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and func._schema.name == "aten::empty":
            size = made.untyped_storage().nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(made, self._forget, size)
        return made

    def _forget(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize(("dtype", "limit"), [(None, 45_000), ("bfloat16", 22_500)])
def test_no_more_than_one_file_of_weights_is_in_memory(tmp_path, saved, dtype, limit):
    manifest = newest(saved)
    plan, _ = plan_export(saved_run(manifest, where=""), manifest, dtype=dtype, max_shard_bytes=limit)
    largest = max(shard.layout.size_bytes for shard in plan.shards)
    assert plan.size_bytes > 3 * largest
    allocations = Allocations()
    storage = LocalStorage(saved)
    inner = hf_write.read_from(storage, manifest)

    def read(shard: hf_write.HFShard) -> dict[str, torch.Tensor]:
        with allocations:  # of the thread that reads
            return inner(shard)

    hf_write.write_hf(LocalStorage(str(tmp_path / "hf")), plan, read, origin="test")
    assert allocations.peak >= 0.5 * largest, "the count sees the tensors"
    # A read that converts passes the batch's bytes once through buffers in the checkpoint's dtype.
    assert allocations.peak <= (largest if dtype is None else 3 * largest)
    assert allocations.live == 0


def test_an_interrupted_export_is_no_model_and_goes_on(tmp_path, saved):
    manifest, target = newest(saved), LocalStorage(str(tmp_path / "hf"))
    plan, _ = plan_export(saved_run(manifest, where=""), manifest, max_shard_bytes=20_000)
    counted: list[str] = []
    inner = hf_write.read_from(LocalStorage(saved), manifest)

    def read(shard: hf_write.HFShard) -> dict[str, torch.Tensor]:
        counted.append(shard.file)
        return inner(shard)

    whole = FaultyStorage(LocalStorage(str(tmp_path / "whole")))
    hf_write.write_hf(whole, plan, read, origin="test")
    for fail_at in range(0, whole.calls, 7):
        counted.clear()
        with pytest.raises(StorageFull):
            hf_write.write_hf(FaultyStorage(target, fail_at), plan, read, origin="test")
        assert not (tmp_path / "hf/config.json").exists()
        there = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
        counted.clear()
        hf_write.write_hf(target, plan, read, origin="test")
        assert not there & set(counted), "what was written stays"
        written = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        assert written == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
        target.delete_many(list(written))


def test_an_interrupted_export_of_something_else_is_not_mixed_with(tmp_path, saved):
    manifest, target = newest(saved), LocalStorage(str(tmp_path / "hf"))
    plan, _ = plan_export(saved_run(manifest, where=""), manifest, max_shard_bytes=20_000)
    read = hf_write.read_from(LocalStorage(saved), manifest)
    with pytest.raises(StorageFull):
        hf_write.write_hf(FaultyStorage(target, 20), plan, read, origin="one")
    before = {path.name for path in (tmp_path / "hf").iterdir()}
    with raises(HFNotWritable):
        hf_write.write_hf(target, plan, read, origin="another")
    other, _ = plan_export(saved_run(manifest, where=""), manifest, max_shard_bytes=30_000)
    with raises(HFNotWritable):
        hf_write.write_hf(target, other, read, origin="one")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == before


def test_a_place_that_is_taken_is_refused(tmp_path, saved):
    (tmp_path / "notes.txt").write_text("mine")
    with raises(HFNotWritable):
        export_hf(saved, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_weights_of_another_model_are_refused(saved):
    manifest = newest(saved)
    with pytest.raises(WeightsDoNotFit, match=r"layers\.3\.") as caught:
        plan_export(own_run(llama("model.num_layers=4", "model.vocab_size=320")), manifest)
    assert len(caught.value.missing) == 9
    assert caught.value.shapes[0].startswith("embed_tokens.weight: (304, 32) instead of (320, 32)")


def test_nothing_to_export_is_told(tmp_path):
    with pytest.raises(CheckpointNotFound, match="it does not exist"):
        export_hf(str(tmp_path / "none"), str(tmp_path / "hf"))


def test_the_directory_of_a_run_stands_for_its_checkpoints(saved, tmp_path):
    (tmp_path / "checkpoints").symlink_to(saved)
    export_hf(str(tmp_path), str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "config.json").is_file()


def flip(uri: str) -> None:
    """Change the last byte of the tensors."""
    shard = sorted(Path(uri).rglob("model/*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_a_flipped_bit_is_never_exported(tmp_path, tokenizer):
    save_run(str(tmp_path / "store"), (), tokenizer)
    flip(str(tmp_path / "store"))
    with pytest.raises(CheckpointDamaged, match="safetensors"):
        export_hf(str(tmp_path / "store"), str(tmp_path / "hf"))
    assert not (tmp_path / "hf/config.json").exists()


def test_ranks_divide_the_files(tmp_path, saved):
    first, second = RankPool(2, lasting=True).run(export_together, saved, str(tmp_path / "hf"))
    assert first == second
    export_hf(saved, str(tmp_path / "alone"), max_shard_bytes=20_000, workers=3)
    alone = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == alone


def test_what_fails_on_one_rank_fails_on_all(tmp_path, saved):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/mine").write_text("")
    with pytest.raises(RanksFailed) as caught:
        RankPool(2, lasting=True).run(export_together, saved, str(tmp_path / "hf"))
    assert "NXDT-M013" in caught.value.accounts[0]
    assert "NXDT-M013" in caught.value.accounts[1]
