"""Every recipe of every installed plugin: it loads, is what it says, and fits the devices that it names."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import torch

from nxdt_core.cli import main
from nxdt_core.config import ResolvedConfig, check, load
from nxdt_core.config.sources import list_recipes
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.kernel import Kernel
from nxdt_core.train import build
from nxdt_core.train.plan import plan, product_of, search
from tests.recipes.published import PUBLISHED, WEIGHTS
from tests.sampling import sampled, slow_except

KERNEL = Kernel.start()
SUMMARIES = {recipe.name: recipe.summary for recipe in list_recipes(KERNEL)}

_NVIDIA = re.compile(r": ([\d,]+) accelerators of (\d+) GiB, sequences of ([\d,]+)\.$")
_ONE = re.compile(r": 1 accelerator of (\d+) GiB, sequences of ([\d,]+)\.$")
_TRAINIUM = re.compile(r": (\d+) (trn1|trn2) nodes? of (\d+) cores, sequences of ([\d,]+)\.$")
_CORES = {"trn1": (32, 16, None), "trn2": (64, 24, 2)}
"""Of a node, as processes see them; memory of each in GiB; ``trainer.lnc``."""
_LAYOUTS = ("", "-trn1", "-trn2")

SAMPLE = 2
NEEDS_TORCH_2_10 = ("mixtral-8x7b",)
"""Recipes with a layout that an older torch, among those of ``torch_versions.txt``, does not run."""

_PRODUCT = "H100"
"""What the recipes for NVIDIA name: one with the memory that they name, and with links that are known."""
_AS_FAST = 1.03
"""Times of layouts that differ by less are equal: they are estimates."""

LARGE = [name for name, summary in SUMMARIES.items() if _NVIDIA.search(summary) or _TRAINIUM.search(summary)]
SEARCHED = [name for name, summary in SUMMARIES.items() if _NVIDIA.search(summary)]
ONE_DEVICE = {name: int(found[1]) for name, summary in SUMMARIES.items() if (found := _ONE.search(summary))}
MODELS = sorted({re.sub(r"-trn[12]$", "", name) for name in LARGE})


@cache
def loaded(name: str) -> ResolvedConfig:
    return load(f"recipe:{name}", kernel=KERNEL)


_WEIGHTS: dict[str, int] = {}


def weights(name: str) -> int:
    """How many weights the model of a recipe has. It is built once for the recipes that have the same model."""
    selected = loaded(name).selected("model")
    model = repr((selected.component.qualified_name, selected.config))
    if model not in _WEIGHTS:
        with torch.device("meta"):
            built = build.model_builder(loaded(name)).build()
        assert all(parameter.is_meta for parameter in built.parameters())
        _WEIGHTS[model] = sum(parameter.numel() for parameter in built.parameters())
    return _WEIGHTS[model]


def family(name: str) -> str:
    """The released model that a recipe trains: what :mod:`tests.recipes.published` knows it by."""
    return re.sub(r"(-dropless|-sft|-q?lora|-dpo|-kto|-orpo|-grpo|-reward|-distill)*(-trn[12]|-\d+gb)?$", "", name)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def named_devices(name: str) -> tuple[int, int]:
    """How many devices the summary names, and the memory of each in GiB; one where it names none."""
    if found := _NVIDIA.search(SUMMARIES[name]):
        return number(found[1]), int(found[2])
    found = _TRAINIUM.search(SUMMARIES[name])
    if found is None:
        return 1, 0
    return int(found[1]) * int(found[3]), _CORES[found[2]][1]


def reads_indexed(name: str) -> bool:
    """Whether the recipe reads ``.bin/.idx`` files, and not records of text."""
    return loaded(name).selected("dataset").component.record.name == "megatron-data"


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_recipe_loads_and_its_model_is_built(name):
    if name in NEEDS_TORCH_2_10 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        with pytest.raises(ConfigError, match=r"needs torch>=2\.10"):
            loaded(name)
        return
    config = loaded(name)
    builder = build.model_builder(config)
    assert weights(name) > 0
    limit = builder.max_sequence_length
    assert limit is None or config.run.data.seq_length <= limit
    assert config.run.name == name


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_schedule_ends_with_the_run(name):
    sched, steps = loaded(name).run.model.optim.sched, loaded(name).run.trainer.max_steps
    assert sched.max_steps == steps
    assert loaded(name).selected("schedule").config.warmup_steps < steps


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_one_short_line(name):
    assert SUMMARIES[name].endswith(".")
    assert len(name) + len(SUMMARIES[name]) <= 110


@pytest.mark.parametrize("name", slow_except(ONE_DEVICE, ("llama3-8b-sft-lora-24gb", "qwen2.5-0.5b-sft-16gb")))
def test_a_recipe_for_one_device_leaves_a_tenth_of_its_memory(name):
    config, memory_gib = loaded(name), ONE_DEVICE[name]
    made = plan(config, memory_bytes=memory_gib * 2**30)
    assert made.fits
    assert not made.tight
    assert config.run.model.compile
    assert f"sequences of {config.run.data.seq_length:,}." in SUMMARIES[name]
    assert name.endswith(f"-{memory_gib}gb") or name == family(name)


@pytest.mark.parametrize("name", sorted({family(name) for name in ONE_DEVICE}))
def test_a_model_for_one_device_has_the_published_shapes(name):
    written = build.model_builder(loaded(name)).config_to_hf()
    assert {key: written.get(key) for key in PUBLISHED.get(name, {})} == PUBLISHED.get(name, {})
    assert weights(name) == WEIGHTS[name]


def test_recipes_are_listed_by_the_memory_of_one_device(capfd):
    assert main(["recipes", "list", "--device-memory", "24", "--json"]) == 0
    named = {each["name"] for each in json.loads(capfd.readouterr().out)}
    assert named == {name for name, memory in ONE_DEVICE.items() if memory <= 24}
    assert "llama3-8b-sft-lora-24gb" in named
    assert main(["recipes", "list", "--device-memory", "1"]) == 0
    assert "No installed recipe" in capfd.readouterr().err


@pytest.mark.parametrize("name", slow_except(LARGE, SEARCHED))  # the same data on other devices, all of which load
def test_a_large_recipe_passes_once_its_files_are_named(name, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "In the beginning"}\n')
    read, named = ("data_prefix", text.with_suffix("")) if reads_indexed(name) else ("train_files", f"[{text}]")
    assert check(f"recipe:{name}", [f"data.{read}={named}", "data.tokenizer.library=byte"], kernel=KERNEL) == ()


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_recipe_is_for_the_devices_that_it_names_or_for_one(name):
    trainer = loaded(name).run.trainer
    assert trainer.devices * trainer.num_nodes == named_devices(name)[0]


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_is_for_the_sequences_and_machines_that_it_names(name):
    config = loaded(name)
    assert f"sequences of {config.run.data.seq_length:,}." in SUMMARIES[name]
    trainium = _TRAINIUM.search(SUMMARIES[name])
    if trainium:
        assert name.endswith(f"-{trainium[2]}")
        assert (int(trainium[3]), config.run.trainer.lnc) == _CORES[trainium[2]][::2]
        assert config.run.trainer.devices == int(trainium[3])


@pytest.mark.parametrize("model", MODELS)
def test_a_large_model_has_a_layout_for_each_machine(model):
    configs = [loaded(f"{model}{layout}") for layout in _LAYOUTS]
    first, *others = [(config.selected("model").config, config.selected("optimizer").config) for config in configs]
    assert all(other == first for other in others), "one model and optimizer on all machines"


@pytest.mark.parametrize("model", MODELS)
def test_a_large_model_has_the_published_shapes(model):
    builder = build.model_builder(loaded(model))
    known = PUBLISHED.get(family(model), {})
    if known:
        written = builder.config_to_hf()
        assert {key: written.get(key) for key in known} == known
    assert weights(model) == WEIGHTS[family(model)]


def pytest_generate_tests(metafunc):
    if "planned" in metafunc.fixturenames:
        few = ["gpt-6.7b", "llama3-8b"]
        metafunc.parametrize("planned", sampled(metafunc.config, LARGE, SAMPLE, default=few))


def test_a_large_recipe_fits_the_devices_that_it_names(planned):
    memory_gib = named_devices(planned)[1]
    made = plan(loaded(planned), memory_bytes=memory_gib * 2**30)
    assert made.fits
    assert not made.tight, "a tenth is left for fragments, kernels and libraries"
    assert made.estimate.bubble <= 0.25, "stages, which are not all equal, wait at most a quarter of a step"
    if planned in SEARCHED:
        profile, name = product_of(loaded(planned), _PRODUCT)
        assert profile.memory_gib[name] == memory_gib


@pytest.mark.parametrize("searched", SEARCHED)
@pytest.mark.slow  # of hundreds of devices minutes; tests/train/test_layout_search.py shows that a search finds them
@pytest.mark.timeout(1800)
def test_a_recipe_has_one_of_the_fastest_layouts_that_leave_a_tenth_of_the_memory(searched):
    """Fastest as ``nxdt plan --search`` estimates it, which changes neither batch nor sequences."""
    found = search(lambda keys: load(f"recipe:{searched}", [*keys], kernel=KERNEL), product=_PRODUCT)
    assert found.as_configured.fits
    assert not found.as_configured.tight
    assert found.as_configured.step_time is not None
    assert found.as_configured.step_time.total <= _AS_FAST * found.ranked[0].seconds


@pytest.mark.parametrize("name", LARGE)
def test_layers_are_compiled_on_the_devices_that_torch_compiles_for(name):
    assert loaded(name).run.model.compile is (name in SEARCHED)
