"""Calls with wrong arguments, from programs of 1 and of 2 ranks: each ends in a code on every rank, and none hangs."""

import os

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import lightning as lightning
from nxdt_plugin_nxd_core import parallel_layers as layers
from nxdt_plugin_nxd_core import parallel_state
from torch import nn

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import Decoder, batch
from tests.calls import Call, run_in_turn
from tests.sampling import asked, slow

config, begin, adamw = nxd.neuronx_distributed_config, nxd.initialize_parallel_model, torch.optim.AdamW


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = layers.ColumnParallelLinear(4, 7)


def ranks():
    return int(os.environ["WORLD_SIZE"])


def optimize(run, parameters, optimizer_class=adamw, **options):
    return nxd.initialize_parallel_optimizer(run.nxd_config, optimizer_class, parameters, **options)


CONFIGURATIONS = {
    "NXDT-T063": [
        lambda _: config(1, 1, None, None, None, False, False, None, None, 1, 1, None, 11, 1, 5),
        lambda _: config(tp=2),
    ],
    "NXDT-T061": [lambda _: config(tensor_parallel_size=3), lambda _: config(tensor_parallel_size=0)],
    "NXDT-T050": [
        lambda _: config(tensor_parallel_size="2"),
        lambda _: config(pipeline_parallel_size=None),
        lambda _: config(pipeline_parallel_size=max(2, ranks())),
        lambda _: config(context_parallel_size=2),
        lambda _: config(expert_parallel_size=2),
        lambda _: config(mixed_precision_config={"use_master_weights": True}),
        lambda _: config(optimizer_config=["zero_one_enabled"]),
        lambda _: config(optimizer_config={"max_grad_norm": "1"}),
        lambda _: config(pipeline_config=[2]),
        lambda _: config(pipeline_config={"num_microbatches": "2"}),
        lambda _: config(pipeline_config={"pipeline_cuts": 3}),
        lambda _: config(pipeline_config={"transformer_layer_cls": "Layer"}),
        lambda _: config(pipeline_config={"hidden_size": "8"}),
        lambda _: config(model_init_config="meta"),
        lambda _: config(model_init_config={"param_init_fn": 3}),
        lambda _: config(activation_checkpoint_config=nn.Linear(1, 1)),
        lambda _: config(lora_config={"lora_rank": 2}),
        lambda _: config(lora_config=nxd.LoraConfig(enable_lora=True, target_modules=3)),
    ],
    "NXDT-C001": [lambda _: config(lora_config=nxd.LoraConfig(enable_lora=True, lora_rank="x"))],
}
MODELS = {
    "NXDT-T063": [
        lambda run: begin(run.nxd_config),
        lambda run: begin(run.nxd_config, lambda: Decoder(), 3),
        lambda run: begin(run.nxd_config, Decoder, layers=2),
        lambda run: run.model.run_train(inputs=batch(0)),
        lambda run: run.model.run_eval(),
        lambda run: run.model(),
        lambda run: nxd.initialize_parallel_optimizer(run.nxd_config),
    ],
    "NXDT-T051": [lambda run: begin(run.nxd_config, lambda: "llama")],
    "NXDT-T056": [lambda run: run.model.run_train(batch(0))],
    "NXDT-T050": [
        lambda run: begin(run.nxd_config, None),
        lambda run: optimize(run, None),
        lambda run: optimize(run, [{"lr": 1}]),
        lambda run: optimize(run, run.model.parameters(), None),
        lambda run: optimize(run, run.model.parameters(), dict),
        lambda run: optimize(run, run.model.parameters(), lr="x"),
        lambda run: optimize(run, run.model.parameters(), lr=-1),
    ],
    "NXDT-T058": [lambda run: optimize(run, [1, 2]), lambda run: optimize(run, [])],
}
CHECKPOINTS = {
    "NXDT-T063": [lambda run: nxd.save_checkpoint(run.path, tags="x"), lambda run: nxd.load_checkpoint()],
    "NXDT-T058": [
        lambda run: nxd.save_checkpoint(run.path),
        lambda run: nxd.save_checkpoint(run.path, "t", run.model, {"lr": 1}),
    ],
    "NXDT-T050": [
        lambda run: nxd.save_checkpoint(None, model=run.model),
        lambda run: nxd.save_checkpoint(run.path, 5, model=run.model),
        lambda run: nxd.save_checkpoint(run.path, "t", run.model, scheduler=3),
        lambda run: nxd.save_checkpoint(run.path, "t", run.model, num_kept_ckpts="2"),
        lambda run: nxd.has_checkpoint(None),
        lambda run: layers.load(3),
    ],
    "NXDT-S013": [lambda run: nxd.save_checkpoint(run.path, "t", run.model, user_content=object())],
    "NXDT-T059": [
        lambda run: nxd.load_checkpoint(f"{run.path}/no", "absent", model=run.model),
        lambda run: nxd.load_checkpoint(f"{run.path}/no", 5, model=run.model),
        lambda run: nxd.load_checkpoint(f"{run.path}/no", model=run.model),
    ],
}
LAYERS = {
    "NXDT-T063": [
        lambda _: layers.ColumnParallelLinear(4, 4, gather=True),
        lambda _: layers.RowParallelLinear(4),
        lambda _: nxd.LoraConfig(rank=2),
        lambda _: nxd.LoraConfig(True),
        lambda _: nxd.NeuronZero1Optimizer(),
        lambda _: lightning.NeuronXLAStrategy(tensor_parallel=2),
        lambda _: lightning.NeuronXLAPrecisionPlugin(precision="bf16"),
        lambda _: lightning.NeuronTensorBoardLogger(),
        lambda _: parallel_state.get_data_parallel_group(as_lists=True),
    ],
    "NXDT-T050": [
        lambda _: layers.ColumnParallelLinear("4", 4),
        lambda _: layers.ColumnParallelLinear(0, 4),
        lambda _: layers.ColumnParallelLinear(4, 4, dtype="bf16"),
        lambda _: layers.RowParallelLinear(4, 4, init_method="normal"),
        lambda _: layers.ParallelEmbedding(4.0, 4),
        lambda _: layers.ParallelEmbedding(4, 4, padding_idx=9),
        lambda _: layers.GQAQKVColumnParallelLinear(4, 4),
        lambda _: layers.GQAQKVColumnParallelLinear(4, ["a", 2]),
        lambda _: layers.GQAQKVColumnParallelLinear(4, [4, 2], kv_size_multiplier=0),
        lambda _: layers.parallel_cross_entropy(None, None),
        lambda _: layers.parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(3).long()),
        lambda _: layers.clip_grad_norm(None, 1.0),
        lambda _: layers.clip_grad_norm([], None),
        lambda _: layers.clip_grad_norm([], 1.0, "two"),
        lambda _: layers.clip_grad_norm([], 1.0, "inf"),
        lambda _: nxd.LoRAModel(Decoder(numbers=1), {}),
        lambda _: lightning.NeuronLTModule(),
        lambda _: lightning.NeuronXLAStrategy(nxd_config={}),
        lambda _: nxd.NeuronZero1Optimizer([], adamw),
    ],
}
TABLES = {"configurations": CONFIGURATIONS, "models": MODELS, "checkpoints": CHECKPOINTS, "layers": LAYERS}


class Run:
    def __init__(self, path):
        self.path = path
        self.nxd_config = config()
        self.model = begin(self.nxd_config, Decoder, numbers=1)


def codes(path, table):
    """What each call ends in, by the code that it should end in."""
    run = Run(path)
    found = {}
    for code, calls in TABLES[table].items():
        found[code] = []
        for call in calls:
            try:
                call(run)
                found[code].append("accepted")
            except NxdtError as error:
                found[code].append(error.code)
            except Exception as error:
                found[code].append(repr(error))
    run.nxd_config.engine.shutdown()
    if ranks() > 1 and table == "models":
        split = config(tensor_parallel_size=2)
        with pytest.raises(NxdtError, match=r"NXDT-P021.*7 output features"):
            begin(split, Odd)
        split.engine.shutdown()
    return found


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """What each rank found, by number of ranks: they go through all tables."""
    places = {table: str(tmp_path_factory.mktemp(table)) for table in TABLES}
    calls = {table: (codes, (place, table)) for table, place in places.items()}
    return {
        size: run_in_turn({table: Call(size, *call) for table, call in calls.items()})
        for size in asked(request, "size")
    }


@pytest.mark.parametrize("size", [slow(1), 2])
@pytest.mark.parametrize("table", TABLES)
def test_each_wrong_call_ends_in_its_code(ended, table, size):
    expected = {code: [code] * len(calls) for code, calls in TABLES[table].items()}
    for found in ended[size][table]:
        assert found == expected
