"""``nxdt checkpoint inspect`` and ``diff``."""

import json

import pytest
import torch
import yaml

from nxdt_core.checkpoint import CheckpointFacts, open_storage
from tests.checkpoint.saving import save_checkpoint


def test_inspect_takes_the_newest_committed_step_or_the_named_one(nxdt, store):
    assert json.loads(nxdt("checkpoint", "inspect", store, "--json").stdout)["step"] == 20
    assert json.loads(nxdt("checkpoint", "inspect", f"{store}/step-00000010", "--json").stdout)["step"] == 10


def test_inspect_json_has_the_promised_shape(nxdt, store):
    facts = json.loads(nxdt("checkpoint", "inspect", f"{store}/step-00000010", "--json").stdout)
    assert list(facts) == [
        *("step", "uri", "attempt", "created", "size_bytes", "files", "consumed_samples", "consumed_tokens"),
        *("mesh", "metrics", "versions", "plugin_fingerprint", "sections", "tensors", "signed_by"),
    ]
    assert facts["plugin_fingerprint"] == "f00d"
    assert facts["files"] == 3
    assert facts["sections"]["model"] == {
        "tensors": 2,
        "elements": 1006,
        "size_bytes": 4012,
        "dtypes": {"float32": 1, "bfloat16": 1},
    }
    assert facts["tensors"][1] == {
        "section": "model",
        "name": "bias",
        "dtype": "bfloat16",
        "shape": [2, 3],
        "size_bytes": 12,
        "parts": 1,
        "same_as": None,
    }


def test_inspect_tells_a_person_what_is_there(nxdt, store):
    text = nxdt("checkpoint", "inspect", f"{store}/step-00000010").stdout
    assert "10 samples, 100 tokens" in text
    assert "pp 1, dp 2" in text
    assert "1 float32, 1 bfloat16" in text
    assert "2 x 3" not in text
    assert "2 x 3" in nxdt("checkpoint", "inspect", f"{store}/step-00000010", "--tensors").stdout


def test_inspect_prints_the_saved_configuration(nxdt, store):
    arguments = ("checkpoint", "inspect", f"{store}/step-00000010", "--saved-config")
    assert yaml.safe_load(nxdt(*arguments).stdout) == {"trainer": {"max_steps": 10}}
    assert json.loads(nxdt(*arguments, "--json").stdout) == {"trainer": {"max_steps": 10}}


def test_equal_checkpoints_differ_in_nothing(nxdt, store, tmp_path):
    copied = str(tmp_path / "copied")
    assert nxdt("checkpoint", "copy", f"{store}/step-00000010", copied).returncode == 0
    done = nxdt("checkpoint", "diff", f"{store}/step-00000010", copied)
    assert done.returncode == 0
    assert "equal, bit by bit: 3 tensors" in done.stdout


@pytest.fixture
def other(tmp_path):
    """Address of a checkpoint beside step 10 of the store: one tensor changed, one gone, one new, one reshaped."""
    uri = str(tmp_path / "other")
    weight = torch.arange(1000.0)
    weight[7] += 2.0
    save_checkpoint(
        open_storage(uri),
        step=10,
        model={"weight": weight, "extra": torch.zeros(1)},
        optimizer={"weight/exp_avg": torch.zeros(10, 100)},
        state={"step": 10},
        facts=CheckpointFacts(config={"trainer": {"max_steps": 11, "devices": 2}}),
    )
    return uri


def test_diff_json_has_the_promised_shape(nxdt, store, other):
    done = nxdt("checkpoint", "diff", f"{store}/step-00000010", other, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found.pop("a").endswith("store/step-00000010")
    assert found.pop("b").endswith("other/step-00000010")
    assert found["tensors"][0].pop("relative_norm") == pytest.approx(2.0 / float(torch.arange(1000.0).norm()))
    assert found == {
        "equal": False,
        "tensors_compared": 2,
        "only_in_a": ["model/bias"],
        "only_in_b": ["model/extra"],
        "tensors": [
            {
                "section": "model",
                "name": "weight",
                "dtypes": ["float32", "float32"],
                "shapes": [[1000], [1000]],
                "elements_differing": 1,
                "max_abs_difference": 2.0,
            },
            {
                "section": "optim",
                "name": "weight/exp_avg",
                "dtypes": ["float32", "float32"],
                "shapes": [[1000], [10, 100]],
                "elements_differing": None,
                "max_abs_difference": None,
                "relative_norm": None,
            },
        ],
        "values": [
            {"where": "config", "path": "trainer.max_steps", "a": 10, "b": 11, "only_in": None},
            {"where": "config", "path": "trainer.devices", "a": None, "b": 2, "only_in": "b"},
        ],
    }


def test_diff_tells_a_person_what_differs(nxdt, store, other):
    done = nxdt("checkpoint", "diff", f"{store}/step-00000010", other)
    assert done.returncode == 1
    for words in ("Only in A: 1", "model/bias", "Only in B: 1", "model/extra", "trainer.max_steps", "1000 float32"):
        assert words in done.stdout, words


def test_diff_of_chosen_parts(nxdt, store, other):
    first = f"{store}/step-00000010"
    assert nxdt("checkpoint", "diff", first, other, "--only", "state").returncode == 0
    found = json.loads(nxdt("checkpoint", "diff", first, other, "--only", "config", "--json").stdout)
    assert found["tensors_compared"] == 0
    assert len(found["values"]) == 2


def test_a_damaged_side_is_named(nxdt, store):
    done = nxdt("checkpoint", "diff", f"{store}/step-00000010", f"{store}/step-00000020")
    assert done.returncode == 2
    assert "[NXDT-S010]" in done.stderr
    assert "step-00000020" in done.stderr
