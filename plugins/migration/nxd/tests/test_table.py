"""The table of NxD Training's keys has them all, and reading a file does what each row says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nxdt_plugin_migrate.config.document import Document, read_document
from nxdt_plugin_migrate.config.nxdt import drop_dead_keys, rename_keys
from nxdt_plugin_migrate.config.renamed_keys import GONE, NEUTRAL, OF_ENGINE, RENAMED, SAID_BY

from nxdt_core import config
from nxdt_core.config.schema import SLOTS, usable_class
from nxdt_core.config.section import keys_of
from nxdt_core.config.tree import dotted, parse_yaml, walk
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.kernel import Kernel, PluginPolicy
from scripts.docs_site.nxd_keys import core_keys, declared_keys, schema_page, schema_table, value_table
from tests.sampling import slow_except

KEYS = Path(__file__).parent / "published/keys.txt"
ROWS = {row.key: row for row in schema_table(Kernel.start())}
DECLARED = declared_keys(Kernel.start())
NOT_KEPT = ("NXDT-C010", "NXDT-C012", "NXDT-C015", "NXDT-C017")
"""Codes of a key that is not known, not done, or not read as that type."""

SAMPLES: dict[str, Any] = {
    "name": "x",
    "model_source": "megatron",
    "trainer.max_time": "00:01:00:00",
    "trainer.precision": 16,
    "trainer.callbacks": [],
    "exp_manager.max_time": "00:01:00:00",
    "exp_manager.create_wandb_logger": True,
    "exp_manager.wandb_logger_kwargs": {},
    "exp_manager.create_mlflow_logger": True,
    "exp_manager.mlflow_logger_kwargs": {},
    "exp_manager.summary_writer_kwargs": {},
    "exp_manager.checkpoint_callback_params.train_time_interval": 36000,
    "exp_manager.checkpoint_callback_params.dirpath": "/checkpoints/x",
    "model.model_config": None,
    "model.activation": "geglu",
    "model.normalization": "rmsnorm",
    "model.position_embedding_type": "rope",
    "model.transformer_block_type": "gpt_j",
    "model.optim.name": "sgd",
    "model.optim.sched.name": "constant",
    "precision.type": "autocast",
    "model.optim.betas": [0.8, 0.9],
    "model.moe.glu_mlp": True,
    "model.moe.dropout": 0.0,
    "model.moe.top_k": 1,
    "model.moe.routing_algorithm": "top_k",
    "model.moe.router_activation": "softmax",
    "model.moe.dropless": True,
    "model.moe.output_router_logits": False,
    "model.moe.normalize_top_k_affinities": False,
    "model.moe.sinkhorn_tol": 0.5,
    "precision.parallel_layers_reduce_dtype": "bf16",
    "data.data_prefix": ["/corpora/x"],
    "exp_manager.resume_from_checkpoint": "/checkpoints/x",
    "data.data_impl": "mmap",
    "data.dataloader_type": "cyclic",
    "data.tokenizer.library": "byte",
    "data.tokenizer.model": "/tokenizers/x.model",
    "data.tokenizer.use_fast": True,
    "model_alignment_strategy.dpo.loss_type": "sigmoid",
}
"""Values for keys whose type alone does not tell a good one."""

RECIPES = {"mixtral": "mixtral-tiny", "llama": "llama-tiny", "mistral": "mistral-tiny"}


def transcribed() -> list[str]:
    keys, section = [], ""
    for line in KEYS.read_text().splitlines():
        if line.startswith("#"):
            continue
        head, colon, rest = line.partition(":")
        if colon:
            section, line = head.strip(), rest
        keys += [name if section == "." else f"{section}.{name}" for name in line.split()]
    return keys


def sample(schema: Mapping[str, Any], default: Any) -> Any:
    """A value of the JSON Schema that is not the default."""
    if "anyOf" in schema:
        order = {"boolean": 0, "integer": 1, "number": 2, "null": 9}
        return sample(min(schema["anyOf"], key=lambda each: order.get(each.get("type"), 3)), default)
    if "enum" in schema or "const" in schema:
        return next(value for value in schema.get("enum", [schema.get("const")]) if value != default)
    return {
        "boolean": default is not True,
        "number": 0.5,
        "integer": 2 if default != 2 else 3,
        "array": [sample(schema.get("items", {}), None)] if schema.get("type") == "array" else None,
        "object": {"x": 1},
    }.get(schema.get("type"), "x")


def value_of(key: str) -> Any:
    if key in SAMPLES:
        return SAMPLES[key]
    declared = core_keys().get(key) or next((each for _, each in DECLARED.get(key, ())), None)
    return 2 if declared is None else sample(declared.json_schema(), declared.default)


def base_of(key: str) -> tuple[Any, list[str]]:
    """A recipe, and what must be said beside it, so that a component which reads the key is selected."""
    readers = [name for name in ROWS[key].reason.removeprefix("by ").split(", ") if ROWS[key].reason.startswith("by ")]
    if key.startswith("model.moe."):
        return "recipe:mixtral-tiny", []
    if key.startswith("model.optim.sched.") and readers:
        return "recipe:llama-tiny", [f"model.optim.sched.name={readers[0]}"]
    if key.startswith("model.optim.") and readers:
        return "recipe:llama-tiny", [f"model.optim.name={'adamw' if 'adamw' in readers else readers[0]}"]
    if key.startswith("precision.") and readers:
        return "recipe:llama-tiny", ["precision.type=manual"]
    if key.startswith("data.tokenizer.") and readers:
        return "recipe:llama-tiny", [f"data.tokenizer.library={readers[0]}"]
    if key.startswith("data.") and readers and "text" not in readers:
        return "recipe:llama-tiny", [f"data.name={readers[0]}"]
    if key.startswith("model.") and readers and "gpt" not in readers:
        return f"recipe:{RECIPES[next(name for name in readers if name in RECIPES)]}", []
    return ("recipe:gpt-tiny" if key.startswith("model.") else "recipe:llama-tiny"), []


def checked(key: str, kernel: Kernel) -> tuple[list[str], list[str]]:
    """The codes of what is said of the key itself, and of what it selects; and the notes that it has no effect
    with any other settings, which only a configuration without problems has."""
    source, beside = base_of(key)
    try:
        notes = config.load(source, [*beside, f"{key}={json.dumps(value_of(key))}"], kernel=kernel).notes
    except ConfigError as error:
        part = ".".join(key.split(".")[:2])
        return [problem.code for problem in error.problems if problem.key in {key, part}], []
    dead = [note for note in notes if key in note.partition(":")[0].split(", ") and "no effect" in note]
    return [], [note for note in dead if not re.search(r"since (\w+\.[\w.]+ is |the engine 'torch' )", note)]


def test_every_key_of_the_documentation_has_a_row():
    assert sorted(ROWS) == sorted(transcribed())


TAKEN = [key for key, row in ROWS.items() if row.status == "implemented"]


@pytest.mark.parametrize("key", slow_except(TAKEN, TAKEN[::3]))
def test_what_is_said_to_be_taken_is_taken(key, installed):
    codes, notes = checked(key, installed)
    assert [code for code in codes if code in NOT_KEPT] == []
    assert notes == []


def document_with(key: str, value: Any, more: str = "") -> Document:
    """A document of one key, after the table was applied to it."""
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    text = f"{json.dumps(tree)[1:-1]}\n{more}"
    tree, _ = parse_yaml(text, "")
    lines = {dotted(at): tree.origins[at].line for at, _ in walk(tree.data) if at}
    return read_document(config.PlainFile(text=text, written=tree.data, resolved=tree.data, lines=lines))


@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if row.status == "refused"])
def test_what_is_said_to_be_refused_is_left_out_with_a_reason_or_is_an_error(key, installed):
    document = document_with(key, "asks" if NEUTRAL.get(key, ((), ""))[0] == (2,) else 2)
    drop_dead_keys(document, installed)
    assert ROWS[key].reason
    if key in document.settings:
        codes, _ = checked(key, installed)
        assert codes
    else:
        (row,) = document.left_out
        assert row.verdict == "unsupported"
        assert row.reason


@pytest.mark.parametrize("key", [key for key in NEUTRAL if NEUTRAL[key][0] and "optim" not in key])
def test_a_neutral_value_asks_for_nothing(key, installed):
    for value in (None, NEUTRAL[key][0][0]):
        document = document_with(key, value)
        drop_dead_keys(document, installed)
        assert [row.verdict for row in document.left_out] == ["off"]


_OFFER = re.compile(r"no plugin here offers (?:the )?(logger|[a-z]+\.name):? ([\w-]+(?: or [\w-]+)*)")
_KINDS = {"logger": "callback", "data.name": "dataset", "objective.name": "objective", "adapter.name": "adapter"}


@pytest.mark.parametrize("plugins", ["all", "none"])
def test_what_is_said_to_be_offered_by_nobody_is_not_there(plugins, installed):
    kernel = installed if plugins == "all" else Kernel.start(PluginPolicy(allow=()))
    rows = [row for row in schema_table(kernel) if "no plugin here offers" in row.reason]
    for row in rows:
        what, names = _OFFER.search(row.reason).groups()
        offered = {text for c in kernel.registry.all(_KINDS[what]) for text in (c.record.name, *c.record.aliases)}
        assert not offered & set(names.split(" or ")), row
    about = {row.key for row in rows}
    assert ("data.dev_choose_samples" in about) == (plugins == "none")
    assert "data.prompt_name" not in about


@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if "no component here reads it" in row.reason])
def test_what_is_said_to_be_read_by_nobody_is_declared_by_nobody(key, installed):
    section, _, name = key.rpartition(".")
    slots = [slot for slot in SLOTS if slot.section == section]
    classes = [usable_class(c) for slot in slots for c in installed.registry.all(slot.kind)]
    assert not [cls for cls in classes if cls is not None and name in keys_of(cls)]


@pytest.mark.parametrize("key", [key for key in GONE if key not in DECLARED or "optim" not in key])
def test_what_says_nothing_here_is_left_out_with_the_reason(key, installed):
    document = document_with(key, 2)
    drop_dead_keys(document, installed)
    (row,) = document.left_out
    assert (row.verdict, row.reason) == ("unneeded", GONE[key])


@pytest.mark.parametrize("key", OF_ENGINE)
def test_settings_of_the_neuron_runtime_are_keys_of_the_engine_nxd(key, installed):
    pytest.importorskip("nxdt_plugin_nxd", reason="nxdt-plugin-nxd is not installed")
    document = document_with(key, 2, "parallel_engine:\n  name: nxd\n")
    drop_dead_keys(document, installed)
    assert document.value(OF_ENGINE[key]) == 2
    name = OF_ENGINE[key].removeprefix("parallel_engine.")
    assert name in keys_of(installed.registry.get("engine", "nxd").load_config())


@pytest.mark.parametrize("key", RENAMED)
def test_what_has_another_name_here_is_moved_to_a_key_that_exists(key):
    assert RENAMED[key] in core_keys()
    document = document_with(key, 2)
    rename_keys(document)
    assert (document.value(RENAMED[key]), key in document.settings) == (2, False)
    unset = document_with(key, None)
    rename_keys(unset)
    assert [row.verdict for row in unset.left_out] == ["off"]


def test_the_table_names_no_key_that_the_core_has():
    assert not {*RENAMED, *SAID_BY, *OF_ENGINE, *GONE} & set(core_keys())


@pytest.mark.parametrize("row", value_table(Kernel.start()), ids=lambda row: row.key)
def test_names_of_components_are_taken_or_refused_as_the_table_says(row, installed):
    key, _, value = row.key.partition(": ")
    problems = config.check("recipe:llama-tiny", [f"{key}={value}"], kernel=installed)
    unknown = [problem for problem in problems if problem.row().endswith("[NXDT-K002]")]
    assert bool(unknown) == (row.status == "refused")


def test_the_page_has_every_row(installed):
    page = schema_page(installed)
    assert re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE) == list(ROWS)
