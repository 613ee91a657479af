"""A Lightning program over NxD Core's names, with and without its own steps, and the same training in plain torch."""

import nxdt_plugin_nxd_core as nxd
import torch
from nxdt_plugin_nxd_core import parallel_state
from nxdt_plugin_nxd_core.lightning import (
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from plugins.compat.nxd_core.tests.loops import ROWS, STEPS, Decoder, Layer, batch

LR, NORM = 0.01, 0.5
PIPELINE = {"num_microbatches": 2, "transformer_layer_cls": Layer}


def slower(step):
    return 1 / (1 + step)


class Rows(Dataset):
    def __init__(self, steps):
        self.rows = torch.cat([batch(step) for step in steps])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


class OwnSteps(NeuronLTModule):
    """Hooks that programs for NxD Core write themselves."""

    def setup(self, stage=None):
        super().setup(stage, include_buffers=True)
        self.throughput = self.train_batch_size * parallel_state.get_data_parallel_size()

    def configure_optimizers(self):
        groups = self.get_param_groups_by_weight_decay()
        optimizer = nxd.initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **self.opt_kwargs)
        optimizer.zero_grad()
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler}]

    def training_step(self, batch, batch_idx):
        for logger in self.trainer.loggers:
            logger.print_step = -1
        self.should_print = False
        if self.trainer.strategy.pipeline_parallel_size > 1:
            loss = self.model.run_train(input_ids=batch["input_ids"], labels=batch["labels"])
            detached = loss.detach()
        else:
            outputs = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
            loss = outputs["loss"] / self.grad_accum_steps
            loss.backward()
            self.averaged_loss += loss.detach()
        if not self.automatic_optimization and (batch_idx + 1) % self.grad_accum_steps == 0:
            self.should_print = True
            if self.trainer.strategy.pipeline_parallel_size == 1:
                detached = self.averaged_loss / self.trainer.strategy.data_parallel_size
                if self.trainer.strategy.data_parallel_size > 1:
                    group = parallel_state.get_data_parallel_group()
                    torch.distributed.all_reduce(detached, group=group)
                self.averaged_loss.zero_()
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            self.global_norm = optimizer.grad_norm
            optimizer.zero_grad()
            scheduler.step()
            self.loss, self.input_ids = detached, batch["input_ids"]
        return loss

    def on_train_batch_end(self, *args, **kwargs):
        if self.should_print:
            self.log("loss", self.loss.detach().cpu().item(), prog_bar=True)
            self.log("global_step", float(self.global_step), on_step=True, on_epoch=True)
            for logger in self.trainer.loggers:
                logger.print_step = self.global_step


class Kept(Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.should_print:
            self.rows.append((float(pl_module.loss), float(pl_module.global_norm), pl_module.lr))


def fit(directory, nxd_config, module_class, accumulated, steps, ckpt_path=None):
    """Train to the last step, and return loss, norm and learning rate of each, and the module."""
    model = module_class(
        model_fn=Decoder,
        nxd_config=nxd_config,
        opt_cls=AdamW,
        scheduler_cls=LambdaLR,
        model_kwargs={"numbers": 2},
        opt_kwargs={"lr": LR},
        scheduler_args=(slower,),
        grad_accum_steps=accumulated,
    )
    strategy = NeuronXLAStrategy(nxd_config=nxd_config)
    kept = Kept()
    trainer = Trainer(
        strategy=strategy,
        max_steps=STEPS,
        plugins=[NeuronXLAPrecisionPlugin()],
        logger=NeuronTensorBoardLogger(save_dir=directory),
        log_every_n_steps=1,
        callbacks=[
            NeuronTQDMProgressBar(),
            kept,
            ModelCheckpoint(f"{directory}/checkpoints", filename="{step}", save_top_k=-1, every_n_train_steps=2),
        ],
    )
    data, order = Rows(steps), None
    if module_class is OwnSteps:  # with a sampler of its own
        data.rows, order = data.rows.flip(0), range(len(data))[::-1]
    rows = DataLoader(data, batch_size=ROWS // strategy.data_parallel_size // accumulated, sampler=order)
    trainer.fit(model=model, train_dataloaders=rows, ckpt_path=ckpt_path)
    return kept.rows, model


def with_lightning(directory, config, own, accumulated):
    """What three steps gave, and what the last of them gave again, from the checkpoint of the second."""
    torch.manual_seed(7)
    zero = {"zero_one_enabled": config.pop("zero", False), "max_grad_norm": NORM}
    nxd_config = nxd.neuronx_distributed_config(optimizer_config=zero, **config)
    module_class = OwnSteps if own else NeuronLTModule
    rows, _ = fit(directory, nxd_config, module_class, accumulated, range(STEPS))
    saved = f"{directory}/checkpoints/step=2.ckpt"
    again, module = fit(directory, nxd_config, module_class, accumulated, [2], saved)
    nxd.load_checkpoint(saved, model=module.model)
    loss = float(module.model.run_eval(input_ids=batch(2), labels=batch(2)))
    nxd_config.engine.shutdown()
    return rows, again, loss


def in_plain_torch():
    """Loss, norm of the gradients and learning rate of each step, in one process without nxdt."""
    torch.manual_seed(7)
    model = Decoder(parallel=False, numbers=2)
    named = [*model.named_parameters()]
    vectors = [p for name, p in named if "bias" in name or "norm" in name]
    matrices = [p for name, p in named if not ("bias" in name or "norm" in name)]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=LR)
    rows = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * slower(step)
        loss = model(batch(step), labels=batch(step))["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item(), LR * slower(step)))
    return rows
