"""LoRA by ``lora_config`` and by ``LoRAModel``, and NxD Core's optimizer for ZeRO-1."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core.parallel_layers import parallel_state
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import Decoder, batch

LORA = {"enable_lora": True, "lora_rank": 2, "target_modules": ["q", "v", "down", "embed"]}


def with_lora(path, tp):
    torch.manual_seed(7)
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=nxd.LoraConfig(**LORA))
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=2)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        losses.append(float(model.run_train(input_ids=batch(step), labels=batch(step))))
        optimizer.step()
    nxd.save_checkpoint(path, "adapter", model=model, optimizer=optimizer)
    after = float(model.run_eval(input_ids=batch(3), labels=batch(3)))
    nxd_config.engine.shutdown()
    return losses, after


def with_the_saved_adapter(path):
    torch.manual_seed(7)
    saved = {"load_lora_from_ckpt": True, "lora_save_dir": path, "lora_load_tag": "adapter"}
    nxd_config = nxd.neuronx_distributed_config(lora_config=nxd.LoraConfig(**LORA, **saved))
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=2)
    loss = float(model.run_eval(input_ids=batch(3), labels=batch(3)))
    nxd_config.engine.shutdown()
    return loss


def test_lora_trains_saves_and_loads_in_each_layout(tmp_path):
    alone = with_lora(str(tmp_path / "one"), 1)
    for losses, after in RankPool(2, lasting=True).run(with_lora, str(tmp_path / "two"), 2):
        assert losses == pytest.approx(alone[0], abs=1e-9)
        assert after == pytest.approx(alone[1], abs=1e-9)
    assert with_the_saved_adapter(str(tmp_path / "two")) == pytest.approx(alone[1], abs=1e-9)
    manifest = checkpoint.latest(checkpoint.open_storage(str(tmp_path / "two" / "adapter")), warn=print)
    assert {name.split(".update.")[1] for name in manifest.tensors["model"]} == {"lora_A", "lora_B"}


def test_a_lora_model_of_one_process_starts_as_its_module_and_trains_updates():
    torch.manual_seed(7)
    module = Decoder(numbers=2)
    before = module(batch(0))
    model = nxd.LoRAModel(module, nxd.LoraConfig(**LORA))
    torch.testing.assert_close(model(batch(0)), before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".update.lora_" in name for name in trained)
    model(batch(0), labels=batch(0))["loss"].backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"enable_lora": False}, "NXDT-T050"),
        ({"merge_lora": True}, "NXDT-T050"),
        ({"target_modules": ["absent"]}, "NXDT-"),
    ],
)
def test_lora_that_cannot_be(options, code):
    with pytest.raises(NxdtError, match=code):
        nxd.LoRAModel(Decoder(numbers=1), nxd.LoraConfig(**{**LORA, **options}))


def with_zero1(path):
    torch.manual_seed(7)
    nxd_config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": True})
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=2)
    param_optimizer, no_decay = list(model.named_parameters()), ["bias", "norm"]
    optimizer_grouped_parameters = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = nxd.NeuronZero1Optimizer(
        optimizer_grouped_parameters,
        torch.optim.AdamW,
        lr=0.01,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
    )
    place, losses = nxd_config.engine.rank_info, []
    for step in (0, 1, 0):
        ids = batch(step).chunk(place.dp_size)[place.dp_rank]
        model(ids, labels=ids)["loss"].backward()
        optimizer.step()
        if step == 1:
            optimizer.save_sharded_state_dict(path)
            at = model.state_dict(), optimizer.core.state_dict()
            at = [{name: whole(value) for name, value in each.items()} for each in at]
        losses.append(float(optimizer.grad_norm))
    optimizer.load_sharded_state_dict(path)
    found = model.state_dict(), optimizer.core.state_dict()
    same = all(torch.equal(whole(v), at[number][n]) for number, each in enumerate(found) for n, v in each.items())
    held = max(value.numel() for group in optimizer.param_groups for value in group["params"])
    nxd_config.engine.shutdown()
    return losses, same, held


def whole(value):
    value = getattr(value, "tensor", value)
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def test_the_optimizer_for_zero1_shards_saves_and_loads(tmp_path):
    alone = with_zero1(str(tmp_path / "one"))
    for norms, same, held in RankPool(2, lasting=True).run(with_zero1, str(tmp_path / "two")):
        assert norms == pytest.approx(alone[0], abs=1e-9)
        assert same
        assert held * 2 == alone[2]


def test_the_optimizer_for_zero1_needs_the_layout():
    nxd_config = nxd.neuronx_distributed_config()
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=1)
    with pytest.raises(NxdtError, match=r"NXDT-T050.*zero_one_enabled"):
        nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    nxd_config.engine.shutdown()
