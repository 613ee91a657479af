"""``nxdt plan``: what it prints, refuses and promises to scripts."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from nxdt_core.cli.app import root
from tests.sampling import slow

HEAVY = ("torch", "numpy", "pytorch_lightning", "transformers")
NETWORK = ("pytorch_lightning", "transformers", "tokenizers", "huggingface_hub", "requests", "httpx")


@pytest.fixture
def planned(nxdt):
    """Plan and read the JSON; ``options`` are those of ``nxdt``."""

    def run(*args, **options):
        done = nxdt("plan", *args, "--json", **options)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    return run


DEEP = (
    "distributed_strategy.tensor_model_parallel_size=8",
    "distributed_strategy.pipeline_model_parallel_size=16",
    "distributed_strategy.zero_stage=1",
    "model.activations_checkpoint_granularity=null",
)


@pytest.mark.slow  # tests/recipes plans one of 8B
def test_a_70b_model_on_512_ranks(planned):
    status, found = planned("recipe:llama3-70b", "--world-size", "512", *DEEP)
    assert status == 0
    assert found["parameters"] == 70_553_706_496
    assert found["mesh"] == {"pp": 16, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8, "ep": 1}
    assert found["micro_batches"] * 4 == 1024
    assert found["tokens_per_step"] == 1024 * 8192
    assert found["flops_per_step"] == found["flops_per_token"] * found["tokens_per_step"]
    longest = found["pipeline_longest_rank"]
    assert found["pipeline_bubble"] == pytest.approx(1 - 16 * 256 / (16 * (16 + 255 * longest)), rel=0.01)
    assert found["checkpoint_bytes"] == 12 * found["parameters"]
    assert [rank["layers"] for rank in found["ranks"]] == [*[5] * 14, 6, 4]  # the head takes as long as a layer
    assert sum(rank["parameters"] for rank in found["ranks"]) == pytest.approx(found["parameters"] / 8, rel=0.001)
    assert found["fullest_pp_rank"] == 0
    assert found["memory_bytes"] is None or found["fits"] is not None


@pytest.mark.parametrize("fork", [True, slow(False)])
def test_json_has_the_promised_shape(planned, fork):
    """Without anything that could download. ``tests/kernel/test_import_directions.py`` shows by default that no module
    imports it when it is imported, which a fork has made before."""
    _, found = planned("recipe:llama3-8b", without=NETWORK, fork=fork)
    assert found["world_size"] == 128
    assert found["parameters"] == found["trained_parameters"] == 8_030_261_248
    (rank,) = found["ranks"]
    assert list(rank) == [
        "pp_rank",
        "stages",
        "layers",
        "parameters",
        "stored_parameters",
        "memory_bytes",
        "sent_bytes_per_step",
    ]
    parts = dict(rank["memory_bytes"])
    total = parts.pop("total")
    assert list(parts) == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "workspace",
        "communication",
        "cache",
    ]
    assert total == sum(parts.values())
    assert total < 80 * 2**30
    assert set(rank["sent_bytes_per_step"]) == {"dp"}


def test_the_report_names_parts_ranks_and_the_fullest(nxdt):
    done = nxdt("plan", "recipe:llama-tiny", "distributed_strategy.pipeline_model_parallel_size=2", "--world-size", "4")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines() if line}
    assert "4 ranks · PP 2 · DP 2 · ZeRO-1 · fp32" in done.stdout
    assert rows["MIB"][1:5] == ["PP", "0", "PP", "1"]
    assert rows["layers"][1:3] == ["2", "2"]
    numbers = [float(rows[part][1]) for part in ("weights", "gradients", "optimizer", "activations", "workspace")]
    assert float(rows["total"][1]) == pytest.approx(sum(numbers), abs=0.05)
    assert {"pp", "dp"} <= rows.keys()
    assert "pipeline rank 0 is the fullest" in done.stdout


@pytest.mark.parametrize(
    ("gib", "status", "word"), [("1", 0, "fits"), ("0.0095", 0, "tight"), ("0.004", 1, "does not fit")]
)
def test_the_verdict_compares_with_a_devices_memory(nxdt, gib, status, word):
    done = nxdt("plan", "recipe:llama-tiny", "--memory-gib", gib)
    assert done.returncode == status
    measured, verdict = done.stdout.splitlines()[-2:]
    assert measured.startswith("The plan counts tensors. nxdt report shows what a run measured: ")
    assert verdict.startswith(f"{word}: each rank needs ")


@pytest.mark.parametrize(
    ("arguments", "sentence", "without"),
    [
        (("--world-size", "500"), "do not divide into groups of TP 8 x PP 16", HEAVY),
        (("data.global_batch_size=1002",), "does not divide by data.micro_batch_size", ()),
        (
            (
                "distributed_strategy.pipeline_model_parallel_size=16",
                "--world-size",
                "2048",
                "data.global_batch_size=128",
            ),
            "micro-batches",
            (),
        ),
        (("model.num_layers=15",), "15 layers cannot fill", ()),
        (("model.num_leyers=80",), "num_layers", ()),
    ],
    ids=["world", "batch", "schedule", "layers", "key"],
)
def test_what_would_not_start_is_refused_before_torch_is_imported(nxdt, arguments, sentence, without):
    """One case shows that the checks import nothing heavy: all are made in the same place."""
    done = nxdt("plan", "recipe:llama3-70b", *DEEP, *arguments, without=without)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recompute_name_that_the_model_does_not_have_is_refused(nxdt):
    recompute = ("activations_checkpoint_granularity=selective", "activations_checkpoint_recompute=[NoSuchThing]")
    done = nxdt("plan", "recipe:llama-tiny", *(f"model.{key}" for key in recompute))
    assert done.returncode == 2
    assert "NoSuchThing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [("--world-size", "0"), ("--memory-gib", "0"), ("--memory-gib", "much")])
def test_an_option_that_means_nothing_is_refused(nxdt, option):
    done = nxdt("plan", "recipe:llama-tiny", *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


@pytest.mark.parametrize("recipe", ["llama3-8b", slow("llama3-70b")])
def test_a_recipe_that_waits_for_data_is_checked_without_it(nxdt, recipe):
    done = nxdt("config", "check", f"recipe:{recipe}", without=HEAVY)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("2 values to set: ")


@pytest.mark.slow
def test_the_documentation_shows_what_is_printed(nxdt):
    """By default ``test_the_report_names_parts_ranks_and_the_fullest`` reads a report, and the tests of the estimate
    compare its numbers with what runs need."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    example = re.search(r"^\$ nxdt (plan recipe:\S+ .*h100)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    command, shown = example.groups()
    assert nxdt(*command.split()).stdout == shown


def test_the_memory_of_a_product_is_known(planned):
    """That of one process: a trn2 chip has 96 GiB for four."""
    status, found = planned("recipe:llama-tiny", "--device", "TRN2")
    assert (status, found["memory_bytes"], found["fits"]) == (0, 24 * 2**30, True)


def test_the_time_of_a_step_is_estimated_where_the_links_of_the_product_are_known(planned, nxdt):
    args = ("recipe:llama-tiny", "distributed_strategy.tensor_model_parallel_size=2", "--world-size", "4")
    _, found = planned(*args, "precision.type=autocast", "--device", "h100", "--efficiency", "0.5")
    seconds = found["step_seconds"]
    flops = found["flops_per_step"] / 4
    assert found["product"] == "H100"
    assert seconds["compute"] == pytest.approx(flops / (0.5 * 989.4e12))
    assert seconds["exposed"]["tp"] == pytest.approx(found["ranks"][0]["sent_bytes_per_step"]["tp"] / 450e9)
    assert seconds["mfu"] == pytest.approx(flops / 989.4e12 / seconds["total"])
    done = nxdt("plan", *args, "--device", "TRN2")
    assert "no time per step: the links of trn2" in done.stdout
    assert planned(*args, "--memory-gib", "80")[1]["step_seconds"] is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--efficiency", "0.5"), "give --device too"),
        (("--device", "trn9"), "NXDT-P007"),
        (("--device", "trn2", "--memory-gib", "24"), "NXDT-P008"),
    ],
)
def test_a_product_that_nobody_knows_and_two_sizes_are_refused(nxdt, args, said):
    done = nxdt("plan", "recipe:llama-tiny", *args)
    assert done.returncode == 2
    assert said in done.stderr


def test_experts_whose_sizes_follow_from_data_are_refused_for_fixed_shapes(nxdt):
    """Before any device is there."""
    done = nxdt("plan", "recipe:mixtral-tiny", "trainer.accelerator=neuron", "model.moe.capacity_factor=null")
    assert done.returncode == 2
    assert re.search(r"NXDT-P037.*4 experts.*\n.*2 has room", done.stderr)
    assert nxdt(
        "plan", "recipe:mixtral-tiny", "trainer.accelerator=neuron", "model.moe.capacity_factor=2"
    ).returncode in (0, 1)


class Terminal(io.StringIO):
    """Keeps what is written."""

    def isatty(self):
        return True


def test_a_terminal_is_told_what_is_estimated_until_the_plan_is_printed(monkeypatch, capsys):
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert root.main(["plan", "recipe:llama-tiny", "--world-size", "2"], standalone_mode=False) == 0
        shown = "\r\x1b[Kestimating 2 ranks\r\x1b[K" if stream.isatty() else ""
        assert stream.getvalue() == shown
        assert capsys.readouterr().out.startswith("run ")
