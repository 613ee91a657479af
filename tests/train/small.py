"""A model and batches so small that a step takes milliseconds: overrides of the tiny recipe."""

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "data.seq_length=32",
    "data.global_batch_size=8",
    "data.micro_batch_size=4",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=null",
    "model.optim.sched.max_steps=40",
)
