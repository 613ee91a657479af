"""``nxdt config check`` reports what ``nxdt train`` would refuse before it reads data, and notes what depends on the
machine."""

import pytest

REFUSED = [
    ("llama-tiny", ("trainer.accelerator=gpu",), "P001"),
    ("llama-tiny", ("checkpoint.uri=file://host/x",), "S005"),
    ("llama-tiny", ("checkpoint.uri=s3://x/y",), "S107"),
    (
        "llama-tiny",
        ("checkpoint.storage.name=s3",),
        "the store 's3' is for s3:// addresses, and checkpoint.uri is a path",
    ),
    ("llama-tiny", ("checkpoint.use_master_weights_in_ckpt=true", "precision.type=bf16SR"), "T030"),
    ("llama-tiny", ("model.loss_chunk_tokens=32", "objective.label_smoothing=0.1"), "C016"),
    ("llama-tiny", ("model.score_head=true",), "M095"),
    ("llama-tiny-reward", ("model.score_head=false",), "M095"),
    ("llama-tiny", ("model.vocab_size=100",), "M051"),
    ("llama-tiny", ("data.tokenizer=null",), "data.tokenizer: the data are texts, and no tokenizer"),
    ("llama-tiny-sft", ("data.tokenizer=null",), "D012"),
    ("llama-tiny-sft", ("data.chat_template=chatmll",), "D314"),
    ("llama-tiny-sft", ("data.chat_template='{% for m in messages %}{{ m.content }'",), "D315"),
    ("llama-tiny-sft", ("data.chat_template=null", "data.chat_template_file=bad.jinja"), "D315"),
    ("llama-tiny", ("model.trainable=[nope]",), "T026"),
    ("llama-tiny", ("model.optim.param_groups=[{params: nope, lr: 1e-3}]",), "T020"),
    (
        "llama-tiny",
        (
            "model.pipeline_cuts=[nope]",
            "trainer.devices=2",
            "distributed_strategy.pipeline_model_parallel_size=2",
        ),
        "P032",
    ),
    ("llama-tiny", ("adapter.name=lora", "adapter.target_modules=[nope]"), "L001"),
    (
        "llama-tiny",
        ("adapter.name=lora", "adapter.init_lora_weights=pissa", "adapter.base_dtype=nf4"),
        "pissa decomposes the weights themselves",
    ),
    ("llama-tiny-sft", ("objective.name=dpo",), "the objective 'dpo' takes pairs of answers"),
    ("llama-tiny-kto", ("objective.name=orpo",), "the objective 'orpo' takes pairs of answers"),
    ("llama-tiny-dpo", ("objective.name=kto",), "the objective 'kto' takes labelled answers"),
    (
        "llama-tiny-dpo",
        ("data.max_prompt_length=64", "data.truncation_mode=keep_end"),
        "a prompt of 64 tokens leaves no room",
    ),
    ("llama-tiny-dpo", ("objective.precompute_ref_log_probs=false",), "and the run has none"),
    ("llama-tiny-grpo", ("objective.max_completion_length=32",), "an answer of 32 tokens leaves no room"),
    ("hf-data-tiny", ("data.streaming=true", "trainer.max_epochs=1"), "trainer.max_epochs: it needs to know"),
    ("hf-data-tiny", ("data.streaming=true", "trainer.limit_train_batches=2"), "trainer.limit_train_batches: it needs"),
]


@pytest.mark.parametrize(("recipe", "overrides", "said"), REFUSED)
def test_what_training_refuses_before_it_reads_data_is_refused(nxdt, work, recipe, overrides, said):
    (work / "bad.jinja").write_text("{% for m in messages %}{{ m.content }")
    done = nxdt("config", "check", f"recipe:{recipe}", *overrides)
    assert done.returncode == 2, done.stdout
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama-tiny-lora", ("model.optim.param_groups=[{params: '*.lora_B', lr: 1e-3}]",)),
        ("llama-tiny-dpo", ("objective.precompute_ref_log_probs=false", "adapter.name=lora")),
        ("llama-tiny-sft", ("data.chat_template='{{ raise_exception(messages) }}'",)),
        ("hf-data-tiny", ("data.streaming=true", "trainer.val_check_interval=null")),
        ("llama-tiny", ("trainer.accelerator=cuda",)),
    ],
)
def test_what_may_train_is_not_refused(nxdt, recipe, overrides):
    done = nxdt("config", "check", f"recipe:{recipe}", *overrides)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("exp_manager.files_to_copy[0]", ("exp_manager.files_to_copy=[nothing.md]",)),
        ("checkpoint.sign.key", ("checkpoint.sign.key=nothing.pem",)),
        ("checkpoint.sign.trusted[0]", ("checkpoint.sign.trusted=[nothing.pem]",)),
        ("checkpoint.resume_from", ("checkpoint.resume_from=nothing", "checkpoint.weight_init_only=true")),
        ("data.chat_template_file", ("data.chat_template=null", "data.chat_template_file=nothing.jinja")),
        ("adapter.lora_save_dir", ("adapter.name=lora", "adapter.lora_save_dir=nothing")),
    ],
)
def test_files_that_are_not_on_this_machine_are_notes(nxdt, work, key, more):
    done = nxdt("config", "check", "recipe:llama-tiny-sft", *more)
    assert done.returncode == 0, done.stderr
    assert f"note: {key}: {work}/nothing" in done.stderr
    assert "is not on this machine" in " ".join(done.stderr.split())
