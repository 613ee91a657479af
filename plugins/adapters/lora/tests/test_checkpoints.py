"""Checkpoints of LoRA runs: what they hold, how runs go on from them, and what they are merged and exported to."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import AdapterDiffers
from nxdt_plugin_lora.peft_files import write_peft
from nxdt_plugin_lora.saved_run import write_options
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.checkpoint import TrustedKeys
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase, BaseDtypeChanged
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.hf import reader
from nxdt_core.models.quantised import QuantisedWeight, requantised
from nxdt_core.run.training import train
from nxdt_core.train.generate import Sampling, load_model
from nxdt_core.train.weights.export import export_hf
from tests.checkpoint.hf.exchange import write_tokenizer
from tests.checkpoint.hf.transformers_4 import read_here, transformers_4
from tests.checkpoint.signed import load_trusted, write_key
from tests.in_the_way import KINDS, PRECIOUS, put
from tests.sampling import slow

__all__ = ["transformers_4"]

RUN = {
    "name": "tuned",
    "trainer": {"max_steps": 4, "accelerator": "cpu", "log_every_n_steps": 1, "enable_progress_bar": False},
    "exp_manager": {},
    "data": {
        "name": "text",
        "train_files": ["package://nxdt_plugin_text/data/kjv.txt"],
        "tokenizer": {"library": "byte"},
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 2,
    },
    "model": {
        "name": "llama",
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 40,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 272,
        "max_position_embeddings": 16,
        "optim": {"name": "adamw", "lr": 0.05, "sched": {"name": "constant"}},
    },
    "precision": {"type": "fp32"},
    "checkpoint": {"every_n_train_steps": 2, "resume_if_exists": True, "resume_ignore_no_checkpoint": True},
    "adapter": {"name": "lora", "lora_rank": 2, "save_lora_base": False},
}


PISSA = ("adapter.init_lora_weights=pissa", "adapter.rank_pattern={q_proj: 3}", "adapter.lora_dropout=0.2")


def written(uri, prompt, tokens):
    """Return what the model at an address writes behind a prompt."""
    model = load_model(uri)
    return "".join(model.writer.pieces(model.prompt(prompt), Sampling(max_new_tokens=tokens)))


@pytest.fixture(scope="module")
def fresh_run(tmp_path_factory):
    """``fresh_run(*overrides)``: the directory of a run from fresh weights, trained once for all tests."""

    @cache
    def trained(*overrides: str) -> Path:
        config = load(RUN, [f"exp_manager.exp_dir={tmp_path_factory.mktemp('fresh')}", *overrides])
        train(config)
        return config.run_dir

    return trained


@pytest.fixture
def run(tmp_path, fresh_run):
    """``run(name, *overrides)``: train to the end, or take a copy of a fresh run; returns the directory of the run."""

    def trained(name: str, *overrides: str) -> Path:
        directory = tmp_path / name
        if directory.exists() or any("/" in each for each in overrides):  # it resumes, or names other files
            train(load(RUN, [f"name={name}", f"exp_manager.exp_dir={tmp_path}", *overrides]))
        else:
            shutil.copytree(fresh_run(*overrides), directory, symlinks=True)
        return directory

    return trained


def manifest_of(directory, step=None):
    storage = checkpoint.open_storage(str(directory))
    return storage, checkpoint.find_checkpoint(storage, step, warn=print)


def weights_of(directory, step=None):
    return checkpoint.load_model(*manifest_of(directory, step))


@pytest.fixture
def command(capsys):
    """``command(*words)``: exit status, standard output and standard error of ``nxdt WORDS``, in this process."""

    def called(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return called


def test_an_adapter_s_checkpoint_holds_what_trains_and_nothing_else(run):
    storage, manifest = manifest_of(run("tuned") / "checkpoints")
    held = {name for section in ("model", "optim") for name in manifest.tensors[section]}
    assert held
    assert all(".update.lora_" in name for name in held)
    names, weights = manifest.tensors["model"], checkpoint.load_model(storage, manifest)
    rank, hidden, ffn, kv = 2, 32, 40, 16
    layer = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + ffn)
    assert sum(weights[name].numel() for name in names) == rank * layer


@pytest.mark.parametrize(
    "more",
    [
        (),
        slow(("adapter.save_lora_base=true",)),
        slow(("adapter.use_dora=true", "adapter.modules_to_save=[lm_head]")),
        ("adapter.use_dora=true", *PISSA),
    ],
    ids=["alone", "with-base", "dora", "pissa-dora"],
)
def test_a_run_that_goes_on_ends_where_one_without_a_break_ends(run, more):
    whole = weights_of(run("whole", *more) / "checkpoints")
    run("broken", "trainer.max_steps=2", *more)
    broken = weights_of(run("broken", *more) / "checkpoints")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert any(bool(whole[name].any()) for name in whole if name.endswith("lora_B"))


def test_a_run_over_named_weights_goes_on_over_them(run):
    base = run("base", "adapter.enable_lora=false") / "checkpoints"
    over = (f"checkpoint.resume_from={base}", "checkpoint.weight_init_only=true")
    whole = weights_of(run("whole", *over) / "checkpoints")
    run("broken", "trainer.max_steps=2", *over)
    broken = weights_of(run("broken", *over) / "checkpoints")
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


@pytest.fixture
def over_a_growing_base(run):
    """``(run, base, over)``: a run of two steps over a base that has gone on since, and what named it."""
    base = run("base", "adapter.enable_lora=false", "trainer.max_steps=2") / "checkpoints"
    over = (f"checkpoint.resume_from={base}", "checkpoint.weight_init_only=true")
    tuned = run("tuned", *over, "trainer.max_steps=2") / "checkpoints"
    run("base", "adapter.enable_lora=false")
    return tuned, base, over


def test_an_adapter_stays_over_the_step_that_its_run_began_with(run, command, tmp_path, over_a_growing_base):
    tuned, base, over = over_a_growing_base
    first = written(f"{tuned}/step-00000002", "In the", 8)
    whole = weights_of(run("whole", over[1], f"{over[0]}/step-00000002") / "checkpoints")
    run("tuned", *over)
    gone_on = weights_of(tuned)
    assert all(torch.equal(whole[name], gone_on[name]) for name in whole)
    assert written(f"{tuned}/step-00000002", "In the", 8) == first
    _, manifest = manifest_of(tuned)
    assert manifest.facts.config["checkpoint"]["resume_from"] == f"{base}/step-00000002"
    assert command("checkpoint", "merge-lora", tuned, tmp_path / "merged")[0] == 0


@pytest.mark.slow  # an error that is loud
def test_a_base_that_is_elsewhere_now_is_named(run, command, tmp_path, over_a_growing_base):
    tuned, base, _ = over_a_growing_base
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "In", "answer": "the"}))
    asking = ("generate", tuned, "In the", "--max-new-tokens", "3"), ("evaluate", tuned, held, "--max-new-tokens", "3")
    said = [command(*words)[1] for words in asking]
    moved = base.rename(tmp_path / "moved")
    for words, before in zip(asking, said, strict=True):
        assert command(*words)[0] == 2
        status, _, complaint = command(*words, "--base", moved)
        assert status == 2
        assert "NXDT-S091" in complaint
        assert str(moved) in complaint
        assert command(*words, "--base", moved / "step-00000002")[:2] == (0, before)
    over = (f"checkpoint.resume_from={moved}", "checkpoint.weight_init_only=true")
    run("tuned", *over)
    assert manifest_of(tuned)[1].step == 4


def test_weights_with_trained_norms_are_a_start_as_they_are(run):
    dora = ("adapter.use_dora=true", "adapter.save_lora_base=true")
    first = run("first", *dora, "trainer.max_steps=2") / "checkpoints"
    over = (f"checkpoint.resume_from={first}", "checkpoint.weight_init_only=true")
    second = run("second", *dora, *over, "model.optim.lr=0.0", "trainer.max_steps=1") / "checkpoints"
    kept, found = weights_of(first), weights_of(second)
    assert all(torch.equal(kept[name], found[name]) for name in kept)


def test_an_adapter_of_another_base_is_refused(run):
    directory = run("tuned", "trainer.max_steps=2")
    with raises(AdapterOfAnotherBase, match="NXDT-S091"):
        run("tuned", "seed=77")
    load_it = ("adapter.load_lora_from_ckpt=true", f"adapter.lora_save_dir={directory / 'checkpoints'}")
    run("started", *load_it, "adapter.lora_load_tag=2")
    with raises(AdapterOfAnotherBase):
        run("other", *load_it, "seed=77")


@pytest.mark.parametrize(
    "key",
    [
        slow("lora_alpha=64"),
        "lora_rank=4",
        "use_rslora=true",
        slow("use_dora=true"),
        "rank_pattern={q_proj: 3}",
        "init_lora_weights=pissa",
    ],
)
def test_a_run_does_not_go_on_under_options_that_give_its_adapter_another_meaning(run, key):
    run("tuned", "trainer.max_steps=2")
    with raises(AdapterDiffers, match="NXDT-L005") as raised:
        run("tuned", f"adapter.{key}")
    assert key.partition("=")[0] in raised.value.what()
    run("tuned", "adapter.lora_dropout=0.2")


def test_a_run_does_not_start_from_an_adapter_s_weights_under_another_scale(run):
    first = run("first", "adapter.save_lora_base=true", "trainer.max_steps=2") / "checkpoints"
    over = (f"checkpoint.resume_from={first}", "checkpoint.weight_init_only=true", "trainer.max_steps=1")
    with raises(AdapterDiffers, match="NXDT-L005"):
        run("other", *over, "adapter.lora_alpha=64")
    run("same", *over)


@pytest.mark.parametrize("adapter", [(), PISSA], ids=["plain", "pissa"])
def test_a_run_starts_from_a_saved_adapter(run, adapter):
    first = run("first", "trainer.max_steps=2", *adapter) / "checkpoints"
    more = (
        *adapter,
        "adapter.load_lora_from_ckpt=true",
        f"adapter.lora_save_dir={first}",
        "adapter.lora_load_tag=step-00000002",
    )
    second = run("second", *more, "model.optim.lr=0.0", "trainer.max_steps=1", "checkpoint.every_n_train_steps=1")
    kept, found = weights_of(first), weights_of(second / "checkpoints")
    assert all(torch.equal(kept[name], found[name]) for name in kept)


@pytest.mark.parametrize(
    "more",
    [
        slow(("adapter.target_modules=[all-linear,embed_tokens,lm_head]",)),
        ("adapter.use_dora=true", "adapter.lora_bias=all"),
        PISSA,
    ],
    ids=["everywhere", "dora", "pissa"],
)
def test_a_merged_model_says_what_the_run_says(run, command, tmp_path, more):
    kept = run("tuned", *more) / "checkpoints"
    status, said, complaint = command("checkpoint", "merge-lora", kept, tmp_path / "merged", "--json")
    assert status == 0, complaint
    merged = weights_of(tmp_path / "merged")
    assert not [name for name in merged if "lora" in name]
    assert json.loads(said)["merged"] == sum(name.endswith("lora_B") for name in weights_of(kept))
    texts = [written(str(at), "In the", 8) for at in (kept, tmp_path / "merged")]
    assert texts[0] == texts[1] != ""
    status, _, complaint = command("checkpoint", "merge-lora", kept, tmp_path / "merged")
    assert status == 2
    assert "NXDT-S07" in complaint
    if more == PISSA:  # what it starts from is a part of the adapter for peft
        assert command("checkpoint", "export-lora", kept, tmp_path / "adapter")[0] == 0
        options = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert [options[key] for key in ("r", "lora_alpha", "rank_pattern")] == [4, 64.0, {"q_proj": 6}]


def test_a_run_merges_its_last_step_and_writes_its_options_where_asked_to(run):
    asked = ("save_lora_base=true", "merge_lora=true", "save_lora_config_adapter=false")
    directory = run("tuned", *(f"adapter.{key}" for key in asked))
    _, manifest = manifest_of(f"{directory / 'checkpoints'}-merged")
    assert manifest.step == 4
    assert not [name for name in manifest.tensors["model"] if "lora" in name]
    options = json.loads((directory / "lora_adapter" / "adapter_config.json").read_text())
    assert (options["r"], options["target_modules"]) == (2, ["all-linear"])


def counted(monkeypatch, owner, name, place):
    """The argument at ``place`` of each call of a function or method, which still happens."""
    calls, real = [], getattr(owner, name)

    def called(*arguments, **options):
        calls.append(str(arguments[place]))
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, called)
    return calls


@pytest.mark.parametrize("base", ["checkpoint", "directory"])
def test_files_are_opened_as_often_for_a_model_of_many_matrices(tmp_path, fresh_run, monkeypatch, base):
    opened = set()
    for size in ("model.num_layers=1", "model.num_layers=3"):
        begin = ["adapter.save_lora_base=true"]
        if base == "directory":
            export_hf(str(fresh_run("adapter.enable_lora=false", size) / "checkpoints"), str(tmp_path / size))
            begin = [f"checkpoint.resume_from={tmp_path / size}", "checkpoint.weight_init_only=true"]
        run = str(fresh_run(size, *begin) / "checkpoints")
        with monkeypatch.context() as patch:
            keys, files = counted(patch, LocalStorage, "open_read", 1), counted(patch, reader, "safe_open", 0)
            assert main(["checkpoint", "merge-lora", run, str(tmp_path / f"merged-{size}")]) == 0
            assert main(["checkpoint", "export-lora", run, str(tmp_path / f"adapter-{size}")]) == 0
        opened.add((sum(key.endswith(".safetensors") for key in keys), len(files)))
    assert len(opened) == 1


def test_an_exported_adapter_names_the_directory_that_its_base_came_from(tmp_path, fresh_run, run, command):
    def named(*begin):
        kept = run(f"run-{len(list(tmp_path.iterdir()))}", *begin, "trainer.max_steps=1") / "checkpoints"
        assert command("checkpoint", "export-lora", kept, tmp_path / f"out-{kept.parent.name}")[0] == 0
        return json.loads((tmp_path / f"out-{kept.parent.name}" / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]

    over = "checkpoint.weight_init_only=true"
    directory = tmp_path / "hf"
    export_hf(str(fresh_run("adapter.enable_lora=false") / "checkpoints"), str(directory))
    assert command("checkpoint", "import", directory, tmp_path / "imported")[0] == 0
    assert named(f"checkpoint.resume_from={directory}", over) == str(directory)
    assert named(f"checkpoint.resume_from={tmp_path / 'imported'}", over) == str(directory)
    tuned = run(
        "tuned", f"checkpoint.resume_from={directory}", over, "adapter.enable_lora=false", "trainer.max_steps=1"
    )
    assert named(f"checkpoint.resume_from={tuned / 'checkpoints'}", over) is None


def with_tokenizer(path):
    """What makes a run have a tokenizer that transformers can load, with a chat template."""
    return f"data.tokenizer={{library: huggingface, model: {write_tokenizer(path)}}}", "model.vocab_size=304"


def test_an_exported_adapter_has_the_tokenizer_and_the_chat_template(tmp_path, fresh_run, command, caplog):
    kept = fresh_run(*with_tokenizer(tmp_path / "bpe"), "trainer.max_steps=1") / "checkpoints"
    assert command("checkpoint", "export-lora", kept, tmp_path / "adapter")[0] == 0
    adapter, tokenizer = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("adapter", "bpe"))
    assert {*adapter} == {"adapter_config.json", "adapter_model.safetensors", *tokenizer}
    assert all(adapter[name] == tokenizer[name] for name in ("tokenizer.json", "chat_template.jinja"))
    assert command("checkpoint", "export-lora", fresh_run() / "checkpoints", tmp_path / "plain")[0] == 0
    assert "no tokenizer is included: transformers has none like 'byte'" in caplog.text


PEFT = """
import json, sys
sys.modules["torchao"] = None  # the installed one is too new for that peft
import peft, torch, transformers
base, adapter = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter).eval()
inputs = tokenizer("In the beginning", return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0, -1].tolist()
print(json.dumps([transformers.__version__[0], inputs.input_ids.tolist(), tokenizer.chat_template, logits]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_peft_of_transformers_4_opens_an_exported_adapter(tmp_path, fresh_run, command, transformers_4):
    pytest.importorskip("peft", reason="peft is not installed: nothing to compare with")
    sizes = with_tokenizer(tmp_path / "bpe")
    export_hf(str(fresh_run("adapter.enable_lora=false", *sizes) / "checkpoints"), str(tmp_path / "base"))
    assert command("checkpoint", "export-lora", fresh_run(*sizes) / "checkpoints", tmp_path / "adapter")[0] == 0
    earlier, now = (run(PEFT, tmp_path / "base", tmp_path / "adapter") for run in (transformers_4, read_here))
    assert (earlier[0], now[0]) == ("4", "5")
    assert earlier[1:3] == now[1:3]
    torch.testing.assert_close(torch.tensor(earlier[3]), torch.tensor(now[3]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_options_and_exports_replace_a_link_and_a_pipe(tmp_path, kind):
    (tmp_path / "lora_adapter").mkdir()
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        precious = put(kind, tmp_path / "lora_adapter" / name, tmp_path)
    write_options(LoraConfig(lora_rank=2), tmp_path)
    write_peft(tmp_path / "lora_adapter", {"r": 2}, {}, lambda names: [], base="x")
    assert precious.read_text() == PRECIOUS
    assert not any((tmp_path / "lora_adapter" / name).is_symlink() for name in names)
    assert all((tmp_path / "lora_adapter" / name).is_file() for name in names)


def test_options_are_not_written_to_another_directory(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "lora_adapter").symlink_to(tmp_path / "theirs")
    with raises(CannotWriteRunDirectory, match="it is a symbolic link"):
        write_options(LoraConfig(lora_rank=2), tmp_path)
    assert not list((tmp_path / "theirs").iterdir())


MERGING = ("adapter.save_lora_base=true", "adapter.merge_lora=true")


def merged_steps(directory):
    return [
        each.step for each in checkpoint.list_checkpoints(checkpoint.open_storage(f"{directory}/checkpoints-merged"))
    ]


def test_a_run_that_signs_signs_what_it_merges(run, tmp_path):
    private, public = write_key(tmp_path / "own.pem", Ed25519PrivateKey.generate())
    directory = run("tuned", *MERGING, f"checkpoint.sign.key={private}", f"checkpoint.sign.trusted=['{public}']")
    load_trusted(checkpoint.open_storage(f"{directory}/checkpoints-merged"), TrustedKeys([public]), step=4)


def test_a_run_that_goes_on_leaves_the_merged_model_of_its_last_step(run, command, tmp_path):
    run("tuned", *MERGING, "trainer.max_steps=2")
    directory = run("tuned", *MERGING, "trainer.max_steps=3")
    assert merged_steps(directory) == [3]
    status, _, complaint = command("checkpoint", "merge-lora", directory / "checkpoints", tmp_path / "by-hand")
    assert status == 0, complaint
    by_hand, found = weights_of(tmp_path / "by-hand"), weights_of(f"{directory / 'checkpoints'}-merged")
    assert by_hand.keys() == found.keys()
    assert all(torch.equal(by_hand[name], found[name]) for name in found)


@pytest.mark.parametrize(
    "more",
    [
        slow(("trainer.max_steps=100000", "trainer.max_time={seconds: 2}", "checkpoint.every_n_train_steps=100000")),
        (
            "trainer.max_steps=50",
            "trainer.val_check_interval=1",
            "data.validation_files=[package://nxdt_plugin_text/data/kjv.txt]",
            "trainer.limit_val_batches=1",
            "exp_manager.create_early_stopping_callback=true",
            "exp_manager.early_stopping_callback_params={monitor: val_loss, patience: 1, min_delta: 100}",
        ),
    ],
    ids=["time", "early-stop"],
)
def test_a_run_that_ends_before_its_last_step_is_merged_too(run, more):
    directory = run("tuned", *MERGING, *more)
    _, manifest = manifest_of(directory / "checkpoints")
    assert merged_steps(directory) == [manifest.step]


def test_a_run_that_cannot_merge_fails_and_merges_when_it_is_started_again(command, tmp_path):
    written = tmp_path / "run.yaml"
    written.write_text(json.dumps(RUN))
    words = ("train", written, f"exp_manager.exp_dir={tmp_path}", *MERGING, "trainer.max_steps=2")
    (tmp_path / "tuned").mkdir()
    in_the_way = tmp_path / "tuned" / "checkpoints-merged"
    in_the_way.write_text("")
    status, _, complaint = command(*words)
    assert status == 2
    assert "NXDT-S" in complaint
    assert "checkpoints-merged" in complaint
    in_the_way.unlink()
    status, _, complaint = command(*words)
    assert status == 0, complaint
    assert "nothing to do" in complaint
    assert merged_steps(tmp_path / "tuned") == [2]


def trained_on_rank(overrides):
    train(load(RUN, overrides))


@pytest.mark.slow  # tests/engine/layouts merges what ranks hold
def test_two_ranks_merge_in_the_store_of_the_run_by_its_options(tmp_path, s3_server, s3_uri):
    same = (*MERGING, "adapter.lora_dropout=0")
    there = (f"checkpoint.uri={s3_uri}", f"checkpoint.storage.endpoint_url={s3_server.url}", "trainer.devices=2")
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    words = [f"exp_manager.exp_dir={tmp_path}", *same, *there]
    RankPool(2).run(trained_on_rank, words, timeout_s=240, environment=credentials)
    merged = checkpoint.open_storage(f"{s3_uri}-merged", config=S3StorageConfig(endpoint_url=s3_server.url))
    found = checkpoint.load_model(merged, checkpoint.find_checkpoint(merged, 4, warn=print))
    train(load(RUN, [f"exp_manager.exp_dir={tmp_path / 'alone'}", *same]))
    expected = weights_of(tmp_path / "alone" / "tuned" / "checkpoints-merged")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam divides small gradients by their own size, rounding included: 3e-5 seen with two threads per process.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)


def test_an_adapter_with_experts_is_exported_without_dropout_and_that_is_said(run, command, tmp_path, caplog):
    experts = ("model.name=mixtral", "model.moe.num_experts=4", "adapter.target_modules=[experts]")
    kept = run("tuned", *experts, "trainer.max_steps=2") / "checkpoints"
    status, _, complaint = command("checkpoint", "export-lora", kept, tmp_path / "adapter")
    assert status == 0, complaint
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0
    assert "lora_dropout 0" in caplog.text


def test_a_run_without_updates_is_not_to_be_merged(command, tmp_path):
    written = tmp_path / "run.yaml"
    written.write_text(json.dumps(RUN))
    status, _, complaint = command("config", "check", written, *MERGING, "adapter.enable_lora=false")
    assert status == 2
    assert "adapter.merge_lora" in complaint


def test_what_cannot_be_merged_or_exported_is_told(run, command, tmp_path):
    plain = run("plain", "adapter.enable_lora=false", "trainer.max_steps=2") / "checkpoints"
    tied = ("model.share_embeddings_and_output_weights=true", "adapter.target_modules=[embed_tokens]")
    one = run("tied", *tied, "trainer.max_steps=2") / "checkpoints"
    other = run("other", "seed=5", "trainer.max_steps=2") / "checkpoints"
    for words, code in [
        (("merge-lora", plain, tmp_path / "a"), "NXDT-L006"),
        (("export-lora", plain, tmp_path / "b"), "NXDT-L006"),
        (("merge-lora", one, tmp_path / "c"), "NXDT-L007"),
        (("merge-lora", other, tmp_path / "d", "--base", plain), "NXDT-S091"),
    ]:
        status, _, complaint = command("checkpoint", *words)
        assert status == 2, words
        assert code in complaint


@pytest.fixture
def over_codes(run):
    """``over_codes(dtype)``: what makes a run of wide layers quantise weights that another one trained."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing can be quantised")
    wide = ("model.hidden_size=64", "model.ffn_hidden_size=64")
    base = run("base", *wide, "adapter.enable_lora=false") / "checkpoints"
    begun = (*wide, f"checkpoint.resume_from={base}", "checkpoint.weight_init_only=true")
    return lambda dtype: (*begun, f"adapter.base_dtype={dtype}")


@pytest.mark.parametrize("dtype", ["nf4", slow("int8")])
def test_a_run_over_codes_resumes_bitwise_and_merges_into_their_values(run, command, tmp_path, over_codes, dtype):
    over = over_codes(dtype)
    whole = weights_of(run("whole", *over, "adapter.save_lora_base=true") / "checkpoints")
    run("broken", "trainer.max_steps=2", *over)
    broken = weights_of(run("broken", *over) / "checkpoints")
    assert all(".update.lora_" in name for name in whole)
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    plain = weights_of(run("plain", *over, "adapter.base_dtype=null") / "checkpoints")
    assert not torch.equal(plain[next(iter(plain))], whole[next(iter(plain))])
    assert command("checkpoint", "merge-lora", tmp_path / "whole" / "checkpoints", tmp_path / "merged")[0] == 0
    prompt = ("In the", "--max-new-tokens", "12", "--json")
    said = [command("generate", tmp_path / where, *prompt)[1] for where in ("whole/checkpoints", "merged")]
    assert len({json.loads(text)["completion"] for text in said}) == 1
    base, merged = weights_of(tmp_path / "base" / "checkpoints"), weights_of(tmp_path / "merged")
    name = "layers.0.mlp.up_proj"
    form = QuantisedWeight.empty(base[f"{name}.weight"], dtype)
    update = 16.0 * whole[f"{name}.update.lora_B"] @ whole[f"{name}.update.lora_A"]
    torch.testing.assert_close(merged[f"{name}.weight"], requantised(base[f"{name}.weight"], form) + update)
    assert torch.equal(merged["norm.weight"], base["norm.weight"])


def test_a_run_does_not_resume_over_other_codes(run, over_codes):
    run("tuned", "trainer.max_steps=2", *over_codes("nf4"))
    for dtype in ("int8", "null"):
        with raises(BaseDtypeChanged, match=f"base_dtype=nf4, and it is {dtype} here"):
            run("tuned", *over_codes(dtype))
