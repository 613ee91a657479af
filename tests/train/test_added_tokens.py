"""``data.tokenizer.added_tokens``: rows for them in embedding and head, in training, exports and generation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from nxdt_core.checkpoint.format.hf_source import CONFIG, read_json
from nxdt_core.cli import main
from nxdt_core.system.paths import resolve_path
from tests import processes
from tests.sampling import slow
from tests.train.small import write_text

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

CHAT = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")
OLD, ROWS = 1024, 1152
TOKENS = ("<tool>", "</tool>", "<stop>")
ADDED = f"data.tokenizer.added_tokens=[{','.join(TOKENS)}]"
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
STILL = ("model.optim.lr=0.0", "model.optim.sched.min_lr=0.0")


@pytest.fixture
def base(tmp_path, monkeypatch):
    """``base(family)``: the directory ``DIR`` of a model with a row for each id of its tokenizer; where one is now."""
    monkeypatch.chdir(tmp_path)

    def make(family="llama"):
        torch.manual_seed(0)
        sizes = {"vocab_size": OLD, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = transformers.AutoConfig.for_model(family, **sizes, **heads, **FAMILIES[family], initializer_range=0.2)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        model.save_pretrained(tmp_path / "DIR")
        transformers.AutoTokenizer.from_pretrained(CHAT).save_pretrained(tmp_path / "DIR")
        write_text(tmp_path / "text.txt")
        return model

    return make


def words(*more, name="run", start="DIR"):
    return (
        *("recipe:hf-tiny", f"name={name}", "model.name=null", "model.model_config=DIR", "trainer.max_steps=2"),
        *(
            "data.tokenizer.library=huggingface",
            "data.tokenizer.model=DIR",
            "exp_manager.create_tensorboard_logger=false",
        ),
        *(f"checkpoint.resume_from={start}", "checkpoint.weight_init_only=true", "trainer.val_check_interval=null"),
        *("data.train_files=[text.txt]", "data.seq_length=32", "data.global_batch_size=8", "data.micro_batch_size=4"),
        *more,
    )


def exported(name="run"):
    """The tensors of the export of a run, whose directory is ``out-<name>``."""
    assert main(["checkpoint", "export", f"nxdt_experiments/{name}/checkpoints", f"out-{name}"]) == 0
    return safetensors.load_file(f"out-{name}/model.safetensors")


def tables(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor.shape[:1] in ((OLD,), (ROWS,))}


def see_filled(old, new):
    """See that ``new`` has the tables of ``old``, with further rows that are the mean of the others."""
    old, new = tables(old), tables(new)
    assert old.keys() == new.keys()
    for name, had in old.items():
        assert torch.equal(new[name], torch.cat([had, had.mean(0).expand(ROWS - OLD, -1)])), name


@pytest.mark.parametrize("family", ["llama", "qwen2", slow("gpt2")])
def test_rows_start_as_the_mean_and_an_export_has_the_same_ids_and_logits(base, capsys, family):
    before = base(family)
    assert main(["train", *words(ADDED, f"model.vocab_size={ROWS}", "data.tokenizer.eos_token=<stop>", *STILL)]) == 0
    see_filled(safetensors.load_file("DIR/model.safetensors"), exported())
    tokenizer = transformers.AutoTokenizer.from_pretrained("out-run")
    assert [tokenizer.convert_tokens_to_ids(token) for token in TOKENS] == [OLD, OLD + 1, OLD + 2]
    ids = tokenizer("a <tool>b</tool> <stop>", add_special_tokens=False)["input_ids"]
    assert [id_ for id_ in ids if id_ >= OLD] == [OLD, OLD + 1, OLD + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<tool>b</tool> "), "only eos_token is special"
    assert tokenizer.eos_token == "<stop>"
    assert read_json(Path("out-run"), CONFIG)["eos_token_id"] == OLD + 2
    after = transformers.AutoModelForCausalLM.from_pretrained("out-run", dtype=torch.float32).eval()
    known = torch.randint(0, OLD, (1, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(after(known).logits[..., :OLD], before(known).logits)
        prompt = torch.tensor([tokenizer("In the <tool>", add_special_tokens=False)["input_ids"]])
        written = after.generate(prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    capsys.readouterr()
    assert main(["generate", "nxdt_experiments/run", "In the <tool>", "--max-new-tokens", "6", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True) == said["completion"]


def test_fewer_rows_stay_an_error_without_the_key(base, capsys):
    base()
    assert main(["train", *words(f"model.vocab_size={ROWS}")]) == 2
    said = capsys.readouterr().err
    assert "[NXDT-M050]" in said
    assert f"({OLD}, 32) instead of ({ROWS}, 32)" in said
    for command in (["train"], ["config", "check"]):
        assert main([*command, *words(ADDED)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"[NXDT-M051] The tokenizer has {OLD + 3} ids" in said
        assert f"Set model.vocab_size to {ROWS} or another number from {OLD + 3} on" in said
    assert main(["train", *words(ADDED, f"model.vocab_size={ROWS}", "model.hidden_size=64")]) == 2
    assert "[NXDT-M050]" in capsys.readouterr().err, "only rows are filled up"


def test_a_checkpoint_of_ours_grows_and_a_resumed_run_keeps_its_rows(base):
    base()
    assert main(["checkpoint", "import", "DIR", "imported"]) == 0
    grown = words(ADDED, f"model.vocab_size={ROWS}", start="imported")
    assert main(["train", *grown, *STILL]) == 0
    see_filled(safetensors.load_file("DIR/model.safetensors"), exported())
    assert main(["train", *grown, "trainer.max_steps=3", "checkpoint.resume_if_exists=true"]) == 0
    assert main(["train", *words(f"model.vocab_size={ROWS}", start="imported", name="other")]) == 2


def test_two_tensor_parallel_ranks_fill_and_train_the_same_rows(base):
    """One process starts from the directory, two ranks from a checkpoint of ours."""
    base()
    assert main(["checkpoint", "import", "DIR", "imported"]) == 0
    text = "data.train_files=[package://nxdt_plugin_text/data/kjv.txt]"  # no gradient of its first steps is near zero
    grown = (text, ADDED, f"model.vocab_size={ROWS}", "model.optim.lr=0.01")
    assert main(["train", *words(*grown, name="one")]) == 0
    split = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    command = [sys.executable, "-m", "nxdt_core", "train", *words(*grown, *split, name="two", start="imported")]
    done = processes.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = exported("one"), exported("two")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-4)


def test_an_adapter_says_that_rows_are_frozen_and_how_they_train(base, caplog):
    before = base()
    lora = ("adapter.name=lora", "adapter.lora_rank=2", "adapter.save_lora_base=false", "model.optim.lr=0.01")
    grown = words(ADDED, f"model.vocab_size={ROWS}", *lora)
    assert main(["train", *grown]) == 0
    said = caplog.text
    caplog.clear()
    assert "data.tokenizer.added_tokens are frozen" in said
    assert "set adapter.modules_to_save=[embed_tokens, lm_head]" in said
    assert (
        main(["checkpoint", "merge-lora", "nxdt_experiments/run/checkpoints", "nxdt_experiments/merged/checkpoints"])
        == 0
    )
    frozen = tables(exported("merged"))
    assert all(torch.equal(table[OLD:], table[-1:].expand(ROWS - OLD, -1)) for table in frozen.values())
    assert main(["generate", "nxdt_experiments/run", "<tool>", "--max-new-tokens", "2"]) == 0
    assert main(["train", *grown, "name=trains", "adapter.modules_to_save=[embed_tokens, lm_head]"]) == 0
    assert "are frozen" not in caplog.text
    run = "nxdt_experiments/trains/checkpoints"
    assert main(["checkpoint", "merge-lora", run, "nxdt_experiments/whole/checkpoints"]) == 0
    rows = exported("whole")["lm_head.weight"][OLD:]
    assert not torch.equal(rows, before.lm_head.weight.detach().mean(0).expand(ROWS - OLD, -1))
    peft = pytest.importorskip("peft", reason="peft is not installed")
    assert main(["checkpoint", "export-lora", run, "adapter"]) == 0
    below = transformers.AutoModelForCausalLM.from_pretrained("DIR", dtype=torch.float32)
    below.resize_token_embeddings(ROWS)
    theirs = peft.PeftModel.from_pretrained(below, "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("out-whole", dtype=torch.float32).eval()
    ids = torch.arange(OLD - 8, OLD + 3)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
