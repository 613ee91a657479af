"""What a single process that compiles nothing does not import."""

from __future__ import annotations

UNUSED = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    *("botocore", "datasets", "matplotlib", "pandas", "pyarrow", "scipy", "sympy", "torchmetrics"),
    *("lightning", "peft", "pytorch_lightning", "torchao", "transformers", "triton"),
)


def test_training_and_generation_in_one_process_run_without_compiler_and_sharded_tensors(work, nxdt_without):
    (work / "questions.jsonl").write_text('{"prompt": "Where is it?", "answer": "Here."}\n')
    run = "nxdt_experiments/llama-tiny"
    short = ("trainer.max_steps=1", "trainer.val_check_interval=1", "data.global_batch_size=2")
    commands = (
        ("train", "recipe:llama-tiny", *short),
        ("train", "recipe:llama-tiny", *short, "trainer.max_steps=2"),  # resumed
        ("generate", run, "In", "--max-new-tokens=2"),
        ("evaluate", run, "questions.jsonl", "--max-new-tokens=1"),
    )
    done = nxdt_without(UNUSED, commands)
    assert done.returncode == 0, done.stderr
