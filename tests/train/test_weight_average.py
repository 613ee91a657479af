"""The average of the weights: by its formula out of the run's own checkpoints, in every layout and precision."""

import math

import pytest
import torch
from nxdt_testing.ranks import RankPool
from safetensors.torch import load_file

from nxdt_core.checkpoint import load_model, load_optimizer, open_storage, read_manifest
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.run import train
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from tests.sampling import slow, slow_except
from tests.train.ema_run import averaged_run
from tests.train.small import SMALL

EMA = "exp_manager.ema"
ON = (f"{EMA}.enable=true", f"{EMA}.decay=0.8")
ALL = ("checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=-1", "checkpoint.async_save=false")
STRATEGY = "distributed_strategy"
LAYOUTS = {
    "zero3": (2, f"{STRATEGY}.zero_stage=3"),
    "tp of padded heads": (
        2,
        f"{STRATEGY}.tensor_model_parallel_size=2",
        f"{STRATEGY}.pad_heads=true",
        "model.num_attention_heads=3",
        "model.num_kv_heads=3",
        "model.head_dim=8",
    ),
    "pp of tied weights": (
        2,
        f"{STRATEGY}.pipeline_model_parallel_size=2",
        "model.share_embeddings_and_output_weights=true",
    ),
}
PRECISIONS = ("fp32", "mixed_precision", "bf16SR", "mixed_precisionSR")


def states(where, step):
    """Weights, and their averages by the same names, as the checkpoint of a step holds them."""
    store = open_storage(str(where / "run" / "checkpoints"))
    manifest = read_manifest(store, step)
    state = load_optimizer(store, manifest)
    averages = {key.removesuffix("/ema"): value for key, value in state.items() if key.endswith("/ema")}
    return load_model(store, manifest), averages


def by_formula(where, steps, decay=0.8):
    """The average of the weights that checkpoints of ``steps`` hold: the first, then a share of each further one."""
    average = {}
    for step in steps:
        for name, weight in states(where, step)[0].items():
            weight = weight.float()
            average[name] = torch.lerp(average[name], weight, 1 - decay) if name in average else weight
    return average


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("precision", slow_except(PRECISIONS, ("mixed_precision", "bf16SR")))
def test_it_is_the_formula_in_float32_whatever_the_weights_are_in(small_run, tmp_path, precision):
    train(small_run("trainer.max_steps=4", *ON, *ALL, f"precision.type={precision}"))
    weights, averages = states(tmp_path, 4)
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert averages.keys() == weights.keys()
    assert_equal(averages, by_formula(tmp_path, range(1, 5)))
    assert not torch.equal(averages["layers.0.mlp.up_proj.weight"], weights["layers.0.mlp.up_proj.weight"].float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_formula_in_every_layout(tmp_path, layout):
    devices, *strategy = LAYOUTS[layout]
    more = (f"trainer.devices={devices}", "trainer.max_steps=3", *ON, *ALL, *strategy)
    RankPool(devices, lasting=True).run(averaged_run, str(tmp_path), *more, timeout_s=120)
    assert_equal(states(tmp_path, 3)[1], by_formula(tmp_path, range(1, 4)))


def test_it_begins_and_moves_at_the_steps_that_the_configuration_says(small_run, tmp_path):
    train(small_run("trainer.max_steps=6", *ON, *ALL, f"{EMA}.start_step=3", f"{EMA}.apply_ema_every_n_steps=2"))
    assert states(tmp_path, 3)[1] == {}
    assert_equal(states(tmp_path, 5)[1], by_formula(tmp_path, (4,)))
    assert_equal(states(tmp_path, 6)[1], by_formula(tmp_path, (4, 6)))


def test_it_changes_nothing_of_the_training(small_run, weights):
    plain, averaged = small_run("trainer.max_steps=3", name="plain"), small_run("trainer.max_steps=3", *ON, name="ema")
    train(plain)
    train(averaged)
    with_average = weights(averaged)
    assert_equal({key: value for key, value in with_average.items() if not key.endswith("/ema")}, weights(plain))


def test_a_resumed_run_has_the_same_average_to_the_bit_also_in_another_layout(small_run, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small_run("trainer.max_steps=4", *ON, exp_dir=whole))
    train(small_run("trainer.max_steps=2", *ON, exp_dir=parts))
    train(small_run("trainer.max_steps=4", *ON, exp_dir=parts))
    assert_equal(states(parts, 4)[1], states(whole, 4)[1])
    elsewhere = ("trainer.devices=2", f"{STRATEGY}.tensor_model_parallel_size=2")
    RankPool(2, lasting=True).run(averaged_run, str(parts), "trainer.max_steps=6", *ON, *ALL, *elsewhere, timeout_s=120)
    expected = states(parts, 4)[1]
    for step in (5, 6):
        now = states(parts, step)[0]
        expected = {name: torch.lerp(value, now[name], 1 - 0.8) for name, value in expected.items()}
    assert_equal(states(parts, 6)[1], expected)


def test_a_resume_says_where_an_average_begins_or_ends(small_run, tmp_path, capsys):
    train(small_run("trainer.max_steps=2"))
    train(small_run("trainer.max_steps=4", *ON, *ALL))
    assert "the average of the weights begins in this run" in capsys.readouterr().err
    assert_equal(states(tmp_path, 4)[1], by_formula(tmp_path, (3, 4)))
    train(small_run("trainer.max_steps=5"))
    assert "the average of the weights ends here, since exp_manager.ema.enable is false" in capsys.readouterr().err
    assert states(tmp_path, 5)[1] == {}


@pytest.mark.parametrize("layout", [(1,), slow((2, f"{STRATEGY}.zero_stage=3"))])
def test_validation_sees_the_average_and_training_does_not(tmp_path, metric_rows, layout):
    """The loss under the average of step 4 is that of a run which starts from it."""
    devices, *strategy = layout
    runs = {}
    for name in ("weights", "average"):
        instead = f"{EMA}.evaluate_ema_weights_instead={str(name == 'average').lower()}"
        more = (f"trainer.devices={devices}", "trainer.max_steps=4", "trainer.val_check_interval=2", *ALL, *ON)
        if devices == 1:
            averaged_run(tmp_path / name, *more, *strategy, instead)
        else:
            RankPool(devices, lasting=True).run(
                averaged_run, str(tmp_path / name), *more, *strategy, instead, timeout_s=120
            )
        runs[name] = tmp_path / name
    losses = {name: [row["loss"] for row in metric_rows(run / "run").values()] for name, run in runs.items()}
    assert losses["average"] == losses["weights"]
    validated = {name: metric_rows(run / "run", "validation.jsonl") for name, run in runs.items()}
    assert_equal(states(runs["average"], 4)[0], states(runs["weights"], 4)[0])
    for step in (2, 4):
        expected = evaluated(states(runs["weights"], step)[1])
        assert validated["average"][step]["loss"] == pytest.approx(expected, rel=1e-5)
        assert not math.isclose(validated["weights"][step]["loss"], expected, rel_tol=1e-5)


def evaluated(weights):
    """Validation loss of a model with these weights, without a trainer."""
    from nxdt_core.data.loader import GlobalBatchLoader
    from nxdt_core.train.step import initialize_parallel_model, mean_loss

    config = load("recipe:llama-tiny", [*SMALL, "trainer.max_steps=1"])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    model.load_state_dict(weights)
    data = build.dataset(config, build.tokenizer(config)).split("validation")
    limit = config.run.trainer.limit_val_batches
    loader = GlobalBatchLoader(data, global_batch_size=8, micro_batch_size=2, seed=1, shuffle=False, repeat=False)
    batches = [batch for number, batch in enumerate(loader) if limit is None or number < limit]
    return mean_loss(model.run_eval(each, build.objective(config)) for each in batches)


def test_it_is_exported_instead_of_the_weights(small_run, tmp_path, capsys):
    config = small_run("trainer.max_steps=3", *ON)
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "ema"), "--ema"]) == 0
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "plain")]) == 0
    weights, averages = states(tmp_path, 3)
    names = {"model.norm.weight": "norm.weight", "model.embed_tokens.weight": "embed_tokens.weight"}
    for directory, held in (("ema", averages), ("plain", weights)):
        found = load_file(tmp_path / directory / "model.safetensors")
        assert all(torch.equal(found[theirs], held[ours]) for theirs, ours in names.items())
    assert not torch.equal(weights["norm.weight"], averages["norm.weight"])


def test_an_export_of_no_average_is_refused_in_words(small_run, tmp_path, capsys):
    config = small_run("trainer.max_steps=1")
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "hf"), "--ema"]) == 2
    assert "holds no average of the weights" in capsys.readouterr().err


def test_the_plan_counts_its_memory(small_run):
    plain, averaged = (plan(small_run("trainer.max_steps=1", *more)) for more in ((), ON))
    difference = averaged.estimate.fullest.memory.optimizer - plain.estimate.fullest.memory.optimizer
    assert difference == 4 * averaged.estimate.parameters
