"""``nxdt plugins list --kind``, ``trace`` and ``outdated``; schemes of stores."""

import json
import os
import shutil
import zipfile

import pytest

from tests.distributions import write_distribution

OFFER = """
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_optimizers():
    return [Component(name="wolf", target="nowhere:Wolf", summary="signs", aliases=("evo",))]

@hookimpl
def nxdt_config_defaults(context):
    return {"exp_manager": {"log_parameter_norm": True}}

@hookimpl
def nxdt_validate_config(context):
    return None
"""


def test_list_of_a_kind_shows_its_components_and_whose_they_are(nxdt, dist):
    dist("acme", OFFER)
    rows = json.loads(nxdt("plugins", "list", "--kind", "optimizer", "--json").stdout)
    (wolf,) = [row for row in rows if row["name"] == "wolf"]
    assert wolf == {
        "name": "wolf",
        "aliases": ["evo"],
        "plugin": "acme",
        "dist": "acme",
        "version": "1.0",
        "capabilities": [],
        "summary": "signs",
    }
    assert {"adamw", "lion"} <= {row["name"] for row in rows}
    assert "wolf = evo" in nxdt("plugins", "list", "--kind", "optimizer").stdout


def test_list_of_an_unknown_kind_names_the_kinds(nxdt):
    done = nxdt("plugins", "list", "--kind", "optimiser")
    assert done.returncode == 2
    assert "NXDT-K004" in done.stderr
    assert "'optimizer'" in done.stderr


def test_trace_shows_calls_with_times_and_defaults_with_their_plugin(nxdt, dist):
    dist("acme", OFFER)
    found = json.loads(nxdt("plugins", "trace", "recipe:llama-tiny", "--json").stdout)
    mine = {call["hook"]: call for call in found["calls"] if call["plugin"] == "acme"}
    assert set(mine) == {"nxdt_optimizers", "nxdt_config_defaults", "nxdt_validate_config"}
    assert all(call["s"] > 0 for call in found["calls"])
    assert {hook: call["outcome"] for hook, call in mine.items()} == {
        "nxdt_optimizers": "value",
        "nxdt_config_defaults": "value",
        "nxdt_validate_config": "none",
    }
    assert {"key": "exp_manager.log_parameter_norm", "plugin": "acme", "value": True} in found["defaults"]
    header, *rows = nxdt("plugins", "trace", "recipe:llama-tiny").stdout.splitlines()
    assert header.split() == ["HOOK", "PLUGIN", "MS", "GAVE", "DIST"]
    times = [float(row.split()[2]) for row in rows if row.startswith("nxdt_")]
    assert times == sorted(times, reverse=True)
    assert rows[-1].split() == ["exp_manager.log_parameter_norm", "acme", "True"]


def _index(directory, *versions):
    """A directory that ``pip --find-links`` reads, with wheels of the distribution ``acme``."""
    directory.mkdir()
    for version in versions:
        with zipfile.ZipFile(directory / f"acme-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"acme-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n"
            )
    return directory


@pytest.mark.parametrize(
    ("versions", "state", "newest"),
    [(("0.9", "1.10"), "outdated", "1.10"), (("1.0",), "ok", "1.0"), ((), "not found", "")],
)
def test_outdated_compares_with_the_index_of_pip(nxdt, dist, tmp_path, versions, state, newest):
    dist("acme", OFFER)
    index = _index(tmp_path / "index", *versions)
    done = nxdt(
        "plugins", "outdated", "acme", "--json", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index), PIP_CONFIG_FILE=os.devnull
    )
    (row,) = json.loads(done.stdout)
    assert row == {"dist": "acme", "installed": "1.0", "newest": newest, "state": state}
    assert done.returncode == (1 if state == "outdated" else 0)


def test_outdated_of_an_unknown_name_lists_what_is_installed(nxdt):
    done = nxdt("plugins", "outdated", "nothing")
    assert done.returncode == 2
    assert "NXDT-K020" in done.stderr


SMALL = ("model.num_layers=1", "data.seq_length=16", "data.global_batch_size=4", "trainer.val_check_interval=null")
KEYS = ("trainer.max_steps=1", "trainer.accelerator=cpu", "checkpoint.enabled=false", *SMALL)


@pytest.mark.parametrize("further", [(), ("checkpoint.storage.name=local",)])
def test_a_store_whose_scheme_is_not_allowed_is_refused(nxdt, further):
    done = nxdt("config", "check", "recipe:llama-tiny", "plugins.schemes=[s3]", *further)
    assert done.returncode == 2
    assert "NXDT-K033" in done.stderr
    assert nxdt("config", "check", "recipe:llama-tiny", "plugins.schemes=[s3,FILE]", *further).returncode == 0


def test_a_checkpoint_to_resume_from_at_a_scheme_that_is_not_allowed_is_refused(nxdt):
    done = nxdt("train", "recipe:llama-tiny", *KEYS, "plugins.schemes=[file]", "checkpoint.resume_from=s3://b/run")
    assert done.returncode == 2
    assert "NXDT-K033" in done.stderr


ENTRY = """
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_optimizers():
    return [
        Component(
            name="acme-sgd", target="acme_sgd_impl:Sgd", config="acme_sgd_config:SgdConfig", summary="gradient descent"
        )
    ]
"""
CONFIG = """
from nxdt_core.config.section import Section

class SgdConfig(Section):
    \"\"\"Gradient descent.\"\"\"

    lr: float = 0.01
    \"\"\"Peak of the learning rate.\"\"\"
    weight_decay: float = 0.0
    \"\"\"Unused.\"\"\"
    betas: tuple[float, float] = (0.9, 0.9)
    \"\"\"Unused.\"\"\"
"""
IMPLEMENTATION = """
import torch

class Sgd(torch.optim.SGD):
    def __init__(self, groups, config):
        super().__init__(groups, lr=config.lr)
"""


def test_a_resume_under_another_version_of_the_optimizer_warns_or_refuses(nxdt, site, work):
    files = {"acme_sgd.py": ENTRY, "acme_sgd_config.py": CONFIG, "acme_sgd_impl.py": IMPLEMENTATION}
    info = write_distribution(site, "acme-sgd", version="1.0", plugins={"acme-sgd": "acme_sgd"}, files=files)
    keys = [key for key in KEYS if "max_steps" not in key and "enabled" not in key]
    command = ("train", "recipe:llama-tiny", "name=sgd", "model.optim.name=acme-sgd", *keys)
    first = nxdt(*command, "trainer.max_steps=2")
    assert first.returncode == 0, first.stderr
    shutil.rmtree(info)
    write_distribution(site, "acme-sgd", version="1.1", plugins={"acme-sgd": "acme_sgd"}, files=files)

    refused = nxdt(*command, "trainer.max_steps=4", "plugins.on_resume=refuse")
    assert refused.returncode == 2
    assert "NXDT-T083" in refused.stderr
    assert "pip install acme-sgd==1.0" in refused.stderr

    warned = nxdt(*command, "trainer.max_steps=4")
    assert warned.returncode == 0, warned.stderr
    assert "acme-sgd has version 1.1, and 1.0 wrote the checkpoint" in warned.stdout + warned.stderr


def test_a_lock_file_makes_its_directory_and_one_that_cannot_be_written_is_an_error(nxdt, work):
    assert nxdt("plugins", "lock", "deploy/plugins.lock").returncode == 0
    assert nxdt("plugins", "verify", "deploy/plugins.lock").returncode == 0
    (work / "file").write_text("")
    done = nxdt("plugins", "lock", "file/plugins.lock")
    assert done.returncode == 2
    assert "NXDT-K034" in done.stderr
