"""``nxdt launch``: files of jobs, options of the command and of a cluster file, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests.train.small import SMALL

RUN = "base: recipe:llama-tiny\nname: My Run\ntrainer: {devices: 2}\n"


TRACKER = """
from pydantic import Field
from nxdt_core.api import Component, hookimpl
from nxdt_core.config.section import SecretText
from nxdt_core.config.section import Section

class Config(Section):
    token: SecretText

@hookimpl
def nxdt_callbacks():
    return [Component(name="tracker", target=f"{__name__}:Config", config=f"{__name__}:Config")]
"""


@pytest.fixture
def launch(nxdt, tmp_path, monkeypatch):
    """``launch(*words)`` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: nxdt("launch", *words)


def directives(script):
    lines = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)


def test_a_batch_script_of_a_recipe(launch, tmp_path):
    done = launch("slurm", "recipe:llama3-70b", "--nodes", "16")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "launch/llama3-70b/job.sbatch"
    assert done.stdout.splitlines() == [str(script), f"Submit it: cd {script.parent} && sbatch job.sbatch"]
    assert "data.train_files" in done.stderr
    found = directives(script)
    assert (found["nodes"], found["ntasks-per-node"], found["signal"]) == ("16", "8", "TERM@300")
    assert (script.parent / "logs").is_dir()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "trainer.num_nodes=16 checkpoint.resume_if_exists=true" in script.read_text()


def test_an_engine_of_xla_compiles_first_and_has_a_launcher_per_node(launch, tmp_path):
    words = (
        "recipe:llama3-70b-trn1",
        "parallel_engine.name=nxd",
        "--nodes",
        "16",
        "--instance-type",
        "ml.trn1.32xlarge",
    )
    assert launch("slurm", *words).returncode == 0
    text = (tmp_path / "launch/llama3-70b-trn1/job.sbatch").read_text()
    assert directives(tmp_path / "launch/llama3-70b-trn1/job.sbatch")["ntasks-per-node"] == "1"
    assert text.index("nxdt_core compile") < text.index("nxdt_core train")
    assert "NODE_RANK=$SLURM_NODEID exec" in text
    assert "export FI_PROVIDER=efa" in text


def test_options_of_a_cluster_file_and_those_of_the_command_which_go_before_it(launch, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    cluster = {
        "nodes": 4,
        "devices_per_node": 2,
        "partition": "slow",
        "account": "me",
        "time": "1-00:00:00",
        "image": "reg/nxdt:1",
        "mounts": ["/fsx", "/data:/in"],
        "environment": {"A": "b c"},
        "setup": ["module load x"],
        "max_requeues": 7,
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    words = ("run.yaml", "--cluster", "cluster.yaml", "--partition", "fast", "--sbatch", "--qos=high", "-o", "out")
    done = launch("slurm", *words)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/job.sbatch").read_text()
    found = directives(tmp_path / "out/job.sbatch")
    assert (found["nodes"], found["partition"], found["qos"], found["account"]) == ("4", "fast", "high", "me")
    assert (found["job-name"], found["time"]) == ("my-run", "1-00:00:00")
    assert "export A='b c'\nmodule load x\n" in text
    assert f"--container-mounts=/fsx:/fsx,/data:/in nxdt train {tmp_path / 'run.yaml'} trainer.num_nodes=4" in text
    assert "-gt 7 ]" in text


STAND_INS = {
    "srun": 'echo "$@" >> "$OUT"; exit "$STATUS"',
    "scontrol": 'echo "scontrol $*" >> "$OUT"; if [ "$1" = show ]; then echo node0; fi',
}


@pytest.mark.parametrize(
    ("statuses", "requeues"), [((0,), [0]), ((2,), [0]), ((143, 143, 143), [1, 1, 1]), ((1, 143, 137, 1), [1, 1, 1, 0])]
)
def test_the_script_requeues_itself_after_a_stop_and_a_few_failures(launch, tmp_path, statuses, requeues):
    """Programs with the names of Slurm's stand in for them here; the test of a real Slurm is in test_slurm.py."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert launch("slurm", "recipe:llama-tiny", "--max-requeues", "2").returncode == 0
    for status, count in zip(statuses, requeues, strict=True):
        out = tmp_path / "out"
        out.unlink(missing_ok=True)
        job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node0", "OUT": str(out), "STATUS": str(status)}
        environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = tmp_path / "launch/llama-tiny/job.sbatch"
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        lines = out.read_text().splitlines()
        assert "nxdt_core train" in lines[0]
        assert lines[1:] == ["scontrol requeue 5"] * count


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("slurm", "run.yaml", "--devices-per-node", "8"), "NXDT-P113", "8 devices for each node"),
        (("slurm", "run.yaml", "--cluster", "c.yaml"), "NXDT-P113", "instance_type of c.yaml says 32"),
        (("slurm", "run.yaml", "--cluster", "n.yaml", "--nodes", "5"), "NXDT-P114", "says 4 nodes, and --nodes is 5"),
        (("slurm", "run.yaml", "--cluster", "u.yaml"), "NXDT-C010", "Did you mean 'partition'?"),
        (("slurm", "run.yaml", "--cluster", "w.yaml"), "NXDT-C012", "w.yaml:1: max_requeues"),
        (("slurm", "run.yaml", "--cluster", "none.yaml"), "NXDT-C002", "none.yaml"),
        (("slurm", "run.yaml", "--instance-type", "trn7"), "NXDT-C019", "trn1.32xlarge"),
        (("slurm", "run.yaml", "--mounts", "fsx"), "NXDT-C019", "absolute path"),
        (("slurm", "run.yaml", "trainer.devices=3", "nope=1"), "NXDT-C010", "nope"),
        (("slurm", "run.yaml", "-o", "run.yaml"), "NXDT-P117", "run.yaml"),
        (("slurm", "run.yaml", "-o", "taken"), "NXDT-P116", "--force"),
        (("slurm", "recipe:llama3-8b", "--submit"), "NXDT-C040", "data.train_files"),
        (("kubernetes", "run.yaml"), "NXDT-P115", "--image"),
        (("mpi", "run.yaml"), "NXDT-P112", "submits no jobs"),
        (("sulrm", "run.yaml"), "NXDT-K002", "'slurm'"),
        (("kubernetes", "secret.yaml", "--image", "i"), "NXDT-P120", "trainer.callbacks[0].token"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_written(launch, tmp_path, words, code, said):
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "c.yaml").write_text("instance_type: trn1.32xlarge\n")
    (tmp_path / "n.yaml").write_text("nodes: 4\n")
    (tmp_path / "u.yaml").write_text("parition: x\n")
    (tmp_path / "w.yaml").write_text("max_requeues: many\n")
    (tmp_path / "tracker.py").write_text(TRACKER)
    secret = "plugins: {local: [tracker.py]}\n"
    callbacks = "{devices: 2, callbacks: [{name: tracker, token: hunter2}]}"
    (tmp_path / "secret.yaml").write_text(RUN.replace("{devices: 2}", callbacks) + secret)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/job.sbatch").write_text("mine")
    done = launch(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"[{code}]" in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "launch").exists()
    assert (tmp_path / "taken/job.sbatch").read_text() == "mine"


def test_references_in_lists_and_addresses_are_written_as_they_were_typed(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PASSWORD", "canary-4711-value")
    reference = 'exp_manager.loggers=[{name: mlflow, tracking_uri: "https://me:${oc.env:PASSWORD}@host:1"}]'
    literal = "exp_manager.loggers=[{name: wandb, notes: canary-4711-value}]"
    assert (done := launch("slurm", "recipe:llama-tiny", literal, reference)).returncode == 0, done.stderr
    script = (tmp_path / "launch/llama-tiny/job.sbatch").read_text()
    assert script.count("${oc.env:PASSWORD}") == 2
    assert "canary" not in script


def test_the_same_command_again_writes_the_same_and_force_replaces(launch, tmp_path):
    words = ("slurm", "recipe:llama-tiny")
    assert [launch(*words).returncode for _ in range(2)] == [0, 0]
    assert launch(*words, "--nodes", "2").returncode == 2
    assert launch(*words, "--nodes", "2", "--force").returncode == 0


def test_json_names_the_files_and_the_command(launch, tmp_path):
    found = json.loads(launch("slurm", "recipe:llama3-8b", "--nodes", "2", "--json").stdout)
    directory = tmp_path / "launch/llama3-8b"
    assert found["files"] == [str(directory / "job.sbatch")]
    assert (found["submit"], found["submitted"]) == (f"cd {directory} && sbatch job.sbatch", False)
    assert (found["nodes"], found["devices"], "data.train_files" in found["to_set"]) == (2, 8, True)


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="Slurm is installed")
def test_without_the_schedulers_programs_the_files_are_written_and_the_command_is_named(launch, tmp_path):
    done = launch("slurm", "recipe:llama-tiny", "--submit")
    assert (done.returncode, "[NXDT-P118]" in done.stderr) == (2, True)
    assert (tmp_path / "launch/llama-tiny/job.sbatch").is_file()


def test_what_the_scheduler_refuses_is_told(launch, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: fast >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = launch("slurm", "recipe:llama-tiny", "--partition", "fast", "--submit")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[NXDT-P119]" in done.stderr
    assert "invalid partition specified: fast" in done.stderr


def test_restarts_without_a_resume_are_refused(nxdt, tmp_path):
    where = f"exp_manager.exp_dir={tmp_path}"
    done = nxdt("train", "recipe:llama-tiny", *SMALL, "--max-restarts", "1", where, "checkpoint.resume_if_exists=false")
    assert (done.returncode, "[NXDT-P121]" in done.stderr) == (2, True), done.stderr
