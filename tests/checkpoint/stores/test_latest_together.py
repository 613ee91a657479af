"""Ranks look for the newest sound checkpoint together: each reads a share, and all get one answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import CheckpointFacts, latest, read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.process_group import Ranks
from tests.checkpoint.saving import save_checkpoint


class Opened(LocalStorage):
    """Remembers the data files that were opened."""

    def __init__(self, uri):
        super().__init__(uri)
        self.names = set()

    def open_read(self, key, start=0, length=None):
        if not key.endswith((".digests", "manifest.json")):
            self.names.add(key)
        return super().open_read(key, start, length)


@pytest.fixture
def uri(tmp_path):
    """Of two checkpoints with a model, an optimizer and a state file."""
    for step in (1, 2):
        tensor = torch.full((64,), float(step))
        save_checkpoint(
            LocalStorage(str(tmp_path)),
            step=step,
            model={"w": tensor},
            optimizer={"w/m": tensor},
            state={"step": step, "rng": tensor},
            facts=CheckpointFacts(),
        )
    return str(tmp_path)


def look(uri):
    """Step, lines, and the data files that this rank opened."""
    ranks, lines, store = Ranks.from_environment(), [], Opened(uri)
    ranks.start(HOST)
    found = latest(store, warn=lines.append, ranks=ranks)
    ranks.stop()
    return None if found is None else found.step, lines, store.names


def files(uri, step):
    manifest = read_manifest(LocalStorage(uri), step)
    return {manifest.prefix + name for name in manifest.files}


def test_every_file_is_read_by_one_rank(uri):
    first, second = RankPool(2, lasting=True).run(look, uri)
    assert (first[0], second[0]) == (2, 2)
    assert first[2] | second[2] == files(uri, 2)
    assert not first[2] & second[2]
    assert first[2]
    assert second[2]


@pytest.mark.parametrize("number", range(4))
def test_what_any_of_them_finds_damaged_all_pass_over(uri, number):
    damaged = Path(uri) / sorted(files(uri, 2))[number]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    first, second = RankPool(2, lasting=True).run(look, uri)
    assert (first[0], second[0]) == (1, 1)
    assert [str(damaged) in line for line in first[1]] == [True]
    assert second[1] == []
