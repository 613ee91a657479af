"""Checkpoints that carry the Hugging Face form of their model: part of the commit, and equal to an export."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import CheckpointManager, list_checkpoints, read_manifest, verify
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.errors.checkpoints import StorageFull
from nxdt_core.errors.models import HFExchangeUnsupported
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights import export
from nxdt_core.train.weights.export import HFForm, export_hf
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.hf.exchange import llama
from tests.sampling import slow

LAYOUT = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")


def save_thrice(uri: str, overrides: tuple[str, ...], asynchronous: bool) -> None:
    """Every second save carries the form; weights move in between."""
    config = llama(*overrides)
    engine = build.engine(config)
    engine.start()
    model, storage = initialize_parallel_model(config, engine), LocalStorage(uri)
    form = HFForm(config, storage, engine.ranks, every=2)
    manager = CheckpointManager(storage, ranks=engine.ranks, add_files=form)
    for step in (1, 2, 3):
        with torch.no_grad():
            for _, parameter in model.named_parameters():
                parameter.mul_(1.5)
        state = TrainState(step=step)
        TrainSession(config, engine=engine, model=model, state=state).save(manager, asynchronous=asynchronous)
    manager.wait()
    engine.shutdown()


def carried(uri: str, step: int) -> dict[str, bytes]:
    """Files of the form by name, without their digests."""
    manifest = read_manifest(LocalStorage(uri), step)
    names = [name for name in manifest.files if name.startswith("hf/")]
    return {name.removeprefix("hf/"): Path(uri, manifest.prefix, name).read_bytes() for name in names}


@pytest.mark.parametrize(
    ("ranks", "overrides", "asynchronous"), [(1, (), True), (2, LAYOUT, True), slow(2, LAYOUT, False)]
)
def test_every_second_save_carries_what_an_export_writes(tmp_path, ranks, overrides, asynchronous):
    uri = str(tmp_path / "store")
    RankPool(ranks, lasting=True).run(save_thrice, uri, overrides, asynchronous)
    export_hf(f"{uri}/step-00000002", str(tmp_path / "hf"))
    assert carried(uri, 2) == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert carried(uri, 1) == carried(uri, 3) == {}
    assert verify(LocalStorage(uri), 2, deep=True) == []


def test_a_flipped_bit_in_the_form_is_damage_of_the_checkpoint(tmp_path):
    uri = str(tmp_path / "store")
    RankPool(1, lasting=True).run(save_thrice, uri, (), False)
    file = next(Path(uri).rglob("hf/model.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (problem,) = verify(LocalStorage(uri), 2, deep=True)
    assert "hf/model.safetensors" in problem


def test_a_form_that_cannot_be_written_fails_the_save_and_leaves_nothing(tmp_path):
    config = llama()
    engine = build.engine(config)
    engine.start()
    model, storage = initialize_parallel_model(config, engine), LocalStorage(str(tmp_path))
    full = FaultyStorage(storage, 12)
    form = HFForm(config, full, engine.ranks, every=1)
    manager = CheckpointManager(storage, add_files=form)
    with pytest.raises(StorageFull):
        TrainSession(config, engine=engine, model=model, state=TrainState(step=1)).save(manager, asynchronous=False)
    assert full.calls > 12
    assert list_checkpoints(storage) == []


def test_a_model_without_a_counterpart_is_refused_at_the_start(tmp_path, monkeypatch):
    class Plain(ModelBuilder):
        def build(self):
            raise AssertionError("a model was built whose parameters have no names there")

    monkeypatch.setattr(export.build, "model_builder", lambda config: Plain(SimpleNamespace(vocab_size=8)))
    with raises(HFExchangeUnsupported):
        HFForm(llama(), LocalStorage(str(tmp_path)), Ranks(RankEnvironment(host="here")), every=1)
