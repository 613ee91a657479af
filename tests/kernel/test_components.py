"""A component's class inherits from the base class of its kind; an error names what it lacks."""

from __future__ import annotations

import pytest

from nxdt_core.config import load
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.protocols.evaluation import Metric
from nxdt_core.train.data import RunData

PARTS = """
from nxdt_core.api import Component, hookimpl
from nxdt_core.protocols.dataset import DatasetSplits
from nxdt_core.protocols.evaluation import Metric

class Right(Metric):
    def compute(self, wanted, given):
        return {"right": 1.0}

class Alike:
    compute = Right.compute

class Unfinished(Metric):
    pass

def made():
    return Right()

class Lists(DatasetSplits):
    def split(self, name):
        return [1, 2, 3]

@hookimpl
def nxdt_metrics():
    return [Component(name=name, target=f"{__name__}:{name}") for name in ("Right", "Alike", "Unfinished", "made")]

@hookimpl
def nxdt_datasets():
    return [Component(name="lists", target=f"{__name__}:Lists")]
"""


@pytest.fixture
def parts(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path / "parts.py"


def test_a_class_that_inherits_is_returned(parts):
    found = Kernel.start(PluginPolicy(allow=(), local=(parts,))).registry.get("metric", "Right")
    assert found.load_class(Metric)().compute([], []) == {"right": 1.0}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Alike", "it does not inherit from nxdt_core.protocols.evaluation.Metric"),
        ("made", "it does not inherit from nxdt_core.protocols.evaluation.Metric"),
        ("Unfinished", "it lacks compute of nxdt_core.protocols.evaluation.Metric"),
    ],
)
def test_another_is_refused_with_the_name_of_the_base_class(parts, name, reason):
    found = Kernel.start(PluginPolicy(allow=(), local=(parts,))).registry.get("metric", name)
    with pytest.raises(ComponentUnusable) as raised:
        found.load_class(Metric)
    assert raised.value.reason == reason
    assert raised.value.code == "NXDT-K006"


def test_a_split_that_is_no_dataset_is_refused(parts):
    config = load("recipe:llama-tiny", [f"plugins.local=['{parts}']", "data={name: lists, seq_length: 8}"])
    with pytest.raises(ComponentUnusable, match=r"its split 'train' is a list, which does not inherit from MapDataset"):
        RunData(config).prepare()
