"""Tags of NxD Core's ``save_checkpoint`` and ``load_checkpoint``: continued training is bit-equal, in any layout."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import Decoder, batch, groups_of
from tests.calls import Call, run_in_turn
from tests.sampling import slow


def begin(**config):
    torch.manual_seed(7)
    nxd_config = nxd.neuronx_distributed_config(**config)
    model = nxd.initialize_parallel_model(nxd_config, Decoder, numbers=2)
    groups = groups_of(model.named_parameters())
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return nxd_config, model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    losses, place = [], model.nxd_config.engine.rank_info
    for step in steps:
        ids = batch(step).chunk(place.dp_size)[place.dp_rank]
        losses.append(float(model.run_train(input_ids=ids, labels=ids)))
        optimizer.step()
        scheduler.step()
    return losses


def save_and_continue(path, config, asynchronous):
    nxd_config, model, optimizer, scheduler = begin(**config)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "async_save": asynchronous}
    train(model, optimizer, scheduler, range(2))
    nxd.save_checkpoint(path, "step_2", user_content={"steps": 2, "note": ["a", None]}, **parts)
    nxd.save_checkpoint(path, "same_weights", **parts)
    after = train(model, optimizer, scheduler, range(2, 4))
    nxd.save_checkpoint(path, "same_weights", user_content=4, num_kept_ckpts=2, **parts)
    nxd.finalize_checkpoint()
    nxd_config.engine.shutdown()
    return after


def load_and_continue(path, config, tag):
    nxd_config, model, optimizer, scheduler = begin(**config)
    found = nxd.load_checkpoint(path, tag, model=model, optimizer=optimizer, scheduler=scheduler)
    after = train(model, optimizer, scheduler, range(2, 4))
    nxd_config.engine.shutdown()
    return found, after


ZERO = {"optimizer_config": {"zero_one_enabled": True}}
TP = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("asynchronous", [slow(False), True])
def test_training_continues_from_a_tag_in_its_own_layout_and_in_another(tmp_path, asynchronous):
    path = str(tmp_path / "ckpts")
    continued = RankPool(2).run(save_and_continue, path, TP, asynchronous)
    assert continued[0] == continued[1]
    content = {"steps": 2, "note": ["a", None]}
    configs = {"its own": TP, "another": ZERO}
    loaded = run_in_turn({name: Call(2, load_and_continue, (path, each, "step_2")) for name, each in configs.items()})
    assert loaded["its own"] == [(content, continued[0])] * 2
    for found, losses in loaded["another"]:
        assert found == content
        assert losses == pytest.approx(continued[0], abs=1e-9)


@pytest.fixture
def trained(one_process):
    return one_process()


@pytest.fixture
def one_process():
    begun = []

    def run(**config):
        begun.append(begin(**config))
        return begun[-1]

    yield run
    for nxd_config, *_ in begun:
        nxd_config.engine.shutdown()


def tags(path):
    return sorted(child.name for child in path.iterdir() if any(child.glob("step-*/manifest.json")))


def test_no_tag_is_the_newest_and_only_so_many_are_kept(trained, tmp_path):
    _, model, optimizer, scheduler = trained
    for step in range(4):
        train(model, optimizer, scheduler, [step])
        nxd.save_checkpoint(str(tmp_path), f"tag_{step}", model, optimizer, user_content=step, num_kept_ckpts=2)
    assert tags(tmp_path) == ["tag_2", "tag_3"]
    assert nxd.load_checkpoint(str(tmp_path), model=model, optimizer=optimizer) == 3
    nxd.save_checkpoint(str(tmp_path), "tag_2", model, optimizer, user_content="newer")
    assert nxd.load_checkpoint(str(tmp_path), model=model) == "newer"
    assert tags(tmp_path) == ["tag_2", "tag_3"]
    assert len([*(tmp_path / "tag_2").glob("step-*")]) == 1


def test_an_empty_tag_is_the_path_itself(trained, tmp_path):
    _, model, optimizer, _ = trained
    assert not nxd.has_checkpoint(str(tmp_path / "ckpts"))
    nxd.save_checkpoint(str(tmp_path / "ckpts"), model=model, optimizer=optimizer)
    assert nxd.has_checkpoint(str(tmp_path / "ckpts"))
    assert nxd.load_checkpoint(str(tmp_path / "ckpts"), model=model, optimizer=optimizer) is None


def test_weights_alone_leave_the_optimizer_as_it_is(trained, tmp_path):
    _, model, optimizer, scheduler = trained
    train(model, optimizer, scheduler, range(1))
    nxd.save_checkpoint(str(tmp_path), "weights", model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, scheduler, range(1, 3))
    state = {name: value.clone() for name, value in optimizer.core.state_dict().items()}
    nxd.load_checkpoint(str(tmp_path), "weights", model)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, state[name]) for name, value in optimizer.core.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"tag": "nowhere"}, "NXDT-T059", "'nowhere'"),
        ({"tag": "../up"}, "NXDT-T059", "its tags are 'there'"),
        ({"num_workers": 0}, "NXDT-T050", "num_workers=0"),
        ({"model": None}, "NXDT-T058", "model is NoneType"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "NXDT-T058", "optimizer is SGD"),
    ],
)
def test_loads_that_cannot_be(trained, tmp_path, arguments, code, words):
    _, model, optimizer, _ = trained
    nxd.save_checkpoint(str(tmp_path), "there", model)
    with pytest.raises(NxdtError) as caught:
        nxd.load_checkpoint(str(tmp_path), **{"model": model, "optimizer": optimizer, **arguments})
    assert caught.value.code == code
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"tag": "../up"}, "NXDT-T050"),
        ({"tag": "step-00000100"}, "NXDT-T050"),
        ({"num_kept_ckpts": 0}, "NXDT-T050"),
        ({"model": torch.nn.Linear(1, 1)}, "NXDT-T058"),
        ({"user_content": object()}, "NXDT-S"),
    ],
)
def test_saves_that_cannot_be_leave_nothing(trained, tmp_path, arguments, code):
    _, model, optimizer, _ = trained
    with pytest.raises(NxdtError) as caught:
        nxd.save_checkpoint(str(tmp_path), **{"tag": "tag", "model": model, "optimizer": optimizer, **arguments})
    assert caught.value.code.startswith(code)
    assert not nxd.has_checkpoint(str(tmp_path))
