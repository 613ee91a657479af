"""Every key, call, parameter and variable of NxD Training's and NxD Core's documentation has a row with its state here.

``documented.csv`` has a row for each of the 507. What is ``refused`` or ``noted`` (accepted, with a note that it has no
effect) says why. The column ``proof`` names what the state is compared with: a key of the schema, parameters in
``api_rows.csv``, a key of a NeMo file that is migrated, a variable, or a test.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from nxdt_plugin_migrate.config.migrate import migrate
from nxdt_plugin_migrate.programs import VARIABLES, NxDTraining

from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.kernel import Kernel
from scripts.docs_site.nxd_keys import schema_table, value_table

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
API = [*csv.DictReader((ROOT / "plugins/compat/nxd_core/tests/api_rows.csv").open())]
ROWS = [*csv.DictReader((HERE / "documented.csv").open())]
KEYS = {row.key: row for row in schema_table(Kernel.start())}

OF_KEYS = {"implemented": "works", "renamed": "works", "engine nxd": "works", "unneeded": "noted"}
OF_VERDICTS = {"mapped": "works", "renamed": "works", "changed": "works", "unsupported": "refused"}
ASKED: Mapping[str, Any] = {
    "restore_from_path": "/models/x.nemo",
    "trainer.benchmark": True,
    "trainer.enable_model_summary": True,
    "exp_manager.explicit_log_dir": "/logs",
    "exp_manager.create_tensorboard_logger": True,
    "exp_manager.log_local_rank_0_only": True,
    "model.activations_checkpoint_num_layers": 2,
    "model.activations_checkpoint_layers_per_pipeline": 1,
    "model.disable_layer_norm_checkpointing": True,
    "model.fp16_lm_cross_entropy": True,
    "model.fp32_residual_connection": True,
    "model.has_bias": True,
    "model.num_micro_batches_with_partial_activation_checkpoints": 2,
    "model.nsys_profile.enabled": True,
    "model.onnx_safe": True,
    "model.resume_from_checkpoint": "/checkpoints/x",
    "model.sync_batch_comm": True,
    "model.use_cpu_initialization": True,
    "model.use_emha": True,
    "model.virtual_pipeline_model_parallel_size": 2,
}
"""Values that ask for something, of keys to which ``nemo_gpt.yaml`` gives the default or that it leaves out."""


def of_kind(*kinds: str) -> Any:
    rows = [row for row in ROWS if row["kind"] in kinds]
    return pytest.mark.parametrize("row", rows, ids=[f"{row['section']}: {row['name']}"[:60] for row in rows])


def test_each_row_has_a_state_and_what_does_not_work_says_why():
    assert len(ROWS) == 507
    assert len({(row["section"], row["name"]) for row in ROWS}) == len(ROWS)
    assert {row["state"] for row in ROWS} == {"works", "noted", "refused"}
    assert [row for row in ROWS if (row["state"] == "works") == bool(row["reason"])] == []


@of_kind("key")
def test_keys_have_the_state_that_the_schema_gives_them(row):
    status = KEYS[row["proof"]]
    assert row["state"] == OF_KEYS.get(status.status, "refused")
    assert row["state"] == "works" or not status.reason or status.reason in row["reason"] or status.status == "renamed"


def test_no_key_of_the_schema_table_is_left_out():
    assert sorted(row["proof"] for row in ROWS if row["kind"] == "key") == sorted(KEYS)


@of_kind("component")
def test_names_of_components_are_all_offered(row, installed):
    states = {each.status for each in value_table(installed) if each.key.startswith(f"{row['proof']}: ")}
    assert states <= {"implemented", "renamed"}
    assert states


@of_kind("call", "parameter")
def test_calls_have_the_states_of_their_parameters(row):
    wanted = [proof.partition(":") for proof in row["proof"].split()]
    found = [
        [each for each in API if each["call"] == call and (not colon or each["parameter"] == parameter)]
        for call, colon, parameter in wanted
    ]
    assert all(found), row
    states = {each["state"].replace("rejected", "refused") for rows in found for each in rows}
    assert row["state"] == ("works" if "works" in states else states.pop())


@pytest.fixture(scope="module")
def migrated(installed, tmp_path_factory):
    """What ``nxdt config migrate`` reports of a NeMo file in which every documented key asks for something."""
    document = yaml.safe_load((HERE / "files/nemo_gpt.yaml").read_text())
    del document["model"]["data"]["seq_length"]  # which says the same as encoder_seq_length
    for key, value in ASKED.items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            place = place[section]
        place[name] = value
    folder = tmp_path_factory.mktemp("nemo")
    (folder / "all.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return migrate(folder / "all.yaml", folder / "migrated.yaml", "nemo", installed).keys


@of_kind("NeMo key")
def test_keys_of_nemo_have_the_state_that_migration_gives_them(row, migrated):
    key = row["proof"]
    verdict = next(each for each in migrated if each.key == key or each.key.startswith(f"{key}."))
    assert row["state"] == OF_VERDICTS.get(verdict.verdict, "noted")
    assert row["state"] == "works" or verdict.reason


@of_kind("variable")
def test_variables_are_read_or_noted(row):
    for name in row["proof"].split():
        note = NxDTraining().environment_note({name: "1"})
        if row["state"] == "noted":
            assert note is not None
            assert f"{name}: {VARIABLES[name]}" in note
        else:
            assert note is None


def test_the_variables_that_work_give_a_place():
    read = {
        name for row in ROWS if row["kind"] == "variable" and row["state"] == "works" for name in row["proof"].split()
    }
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1"))}
    assert {*torchrun, *slurm, "OMPI_COMM_WORLD_RANK"} <= read
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for environment in (
        torchrun,
        {**slurm, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
        {**mpi, **place, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ):
        found = read_rank_environment(environment)
        assert (found.rank, found.world_size, found.local_rank) == (1, 4, 1)


@of_kind("feature")
def test_features_name_a_test_or_a_page_that_exists(row):
    assert (ROOT / row["proof"]).is_file()
