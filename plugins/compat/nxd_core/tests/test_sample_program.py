"""The sample program of NxD Core's API page with other imports: losses equal those of the same run in YAML."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core.parallel_layers import parallel_cross_entropy
from nxdt_testing.ranks import RankPool
from torch import nn
from torch.optim import AdamW

from nxdt_core.train import TrainSession, build
from plugins.compat.nxd_core.tests.loops import whole
from tests.sampling import slow
from tests.train.small import SMALL

STEPS, LR = 3, 1e-3
YAML = (
    *SMALL,
    f"trainer.max_steps={STEPS}",
    f"model.optim.lr={LR}",
    "model.optim.weight_decay=0.01",
    "model.do_layer_norm_weight_decay=true",
    "model.optim.sched.name=constant",
    "model.optim.sched.warmup_steps=0",
    "precision.type=fp32",
)


def in_yaml(overrides):
    """Losses of the run, its batches on this rank, its first weights, and a plain module of its model."""
    with TrainSession.load("recipe:llama-tiny", [*YAML, *overrides]) as session:
        weights = {name: whole(value) for name, value in session.model.state_dict().items()}
        plain = build.model_builder(session.config).build()
        losses, batches = [], []
        for batch in session.batches():
            ids, labels = (
                torch.cat([getattr(part, name) for part in batch.micro_batches]) for name in ("input_ids", "labels")
            )
            batches.append((ids, labels))
            losses.append(float(session.step(batch).loss.loss))
    return losses, batches, weights, plain


class WithLoss(nn.Module):
    def __init__(self, plain, weights):
        super().__init__()
        self.model = plain
        self.model.load_state_dict(weights, strict=False)

    def forward(self, inputs, labels):
        return parallel_cross_entropy(self.model(inputs), labels).mean()


def sample(path, zero):
    """The sample program, in a run that is saved after the second step and loaded again."""
    overrides = [f"distributed_strategy.zero1={str(zero).lower()}", f"exp_manager.explicit_log_dir={path}/yaml"]
    expected, batches, weights, plain = in_yaml(overrides)

    def get_model():
        return WithLoss(plain, weights)

    # create config
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=1,
        optimizer_config={"zero_one_enabled": zero, "grad_clipping": True, "max_grad_norm": 1.0},
    )

    # wrap model
    model = nxd.initialize_parallel_model(nxd_config, get_model)

    # wrap optimizer
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=LR, betas=BETAS)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    losses = []
    for total_steps, (inputs, labels) in enumerate(batches, start=1):
        loss = model.run_train(inputs, labels)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
        if total_steps == 2:
            nxd.save_checkpoint(
                f"{path}/ckpts",
                nxd_config=nxd_config,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                user_content={"total_steps": total_steps},
            )

    # loading checkpoint (auto-resume)
    user_content = nxd.load_checkpoint(
        f"{path}/ckpts",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    again = float(model.run_train(*batches[user_content["total_steps"]]))
    nxd_config.engine.shutdown()
    return expected, losses, again


BETAS = (0.9, 0.95)


@pytest.mark.parametrize(("ranks", "zero"), [slow(1, False), (2, True)])
def test_the_sample_program_equals_the_run_in_yaml(tmp_path, ranks, zero):
    for expected, losses, again in RankPool(ranks).run(sample, str(tmp_path), zero):
        assert losses == pytest.approx(expected, abs=2e-6)
        assert again == losses[-1]
