"""The reference and the editor schema are made of the dataclasses, and hold what loading holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from nxdt_core import config
from nxdt_core.config.schema import RunConfig
from nxdt_core.config.section import keys_of
from nxdt_core.config.show import class_doc, field_docs


def classes(cls=RunConfig):
    yield cls
    for key in keys_of(cls).values():
        if key.section is not None:
            yield from classes(key.section)


@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__name__)
def test_every_key_of_the_core_is_documented(cls):
    docs = field_docs(cls)
    assert class_doc(cls)
    assert [name for name in keys_of(cls) if len(docs.get(name, "")) < 5] == []


def test_documentation_is_read_from_strings_and_from_metadata(load, good):
    docs = field_docs(type(load(good).selected("model").config))
    assert docs["hidden_size"] == "Width."
    assert docs["num_attention_heads"] == "Heads of attention."


class Refusal(Exception):
    pass


def validate(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """As much of JSON Schema as the schema uses."""
    if "$ref" in schema:
        return validate(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema and not any(type(value) is type(item) and value == item for item in schema["enum"]):
        raise Refusal(value)
    if "type" in schema and not is_type(value, schema["type"]):
        raise Refusal(value)
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        raise Refusal(value)
    if is_type(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise Refusal(value)
    if "anyOf" in schema and not any(holds(value, member, root) for member in schema["anyOf"]):
        raise Refusal(value)
    if isinstance(value, list):
        for item, shape in zip(value, schema.get("prefixItems", [schema.get("items", {})] * len(value)), strict=True):
            validate(item, shape, root)
    if isinstance(value, dict):
        validate_object(value, schema, root)
    if "not" in schema and holds(value, schema["not"], root):
        raise Refusal(value)
    for branch in schema.get("allOf", ()):
        if holds(value, branch["if"], root):
            validate(value, branch["then"], root)
    return None


def validate_object(value, schema, root):
    if set(schema.get("required", ())) - set(value):
        raise Refusal(value)
    for name, child in value.items():
        if name in schema.get("properties", {}):
            validate(child, schema["properties"][name], root)
        elif schema.get("additionalProperties", True) is False:
            raise Refusal(name)
        elif isinstance(schema.get("additionalProperties"), dict):
            validate(child, schema["additionalProperties"], root)


def holds(value, schema, root):
    try:
        validate(value, schema, root)
    except Refusal:
        return False
    return True


def is_type(value, name):
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    return isinstance(value, {**kinds, "array": list, "object": dict}[name])


@pytest.fixture(scope="module")
def schema(kernel):
    return config.json_schema(kernel)


def test_the_editor_schema_takes_what_loading_takes(schema, load, good):
    assert holds(yaml.safe_load(good.replace("1e-3", "0.001")), schema, schema)
    overrides = ["exp_manager.loggers=[{name: csv, flush_every: 2}]", "data.tokenizer=byte", "compiler_cache_url=x"]
    assert holds(load(good, *overrides).to_dict(), schema, schema)
    assert holds({"trainer": {"max_steps": "${multiply:2,3}"}, "objective": "causal_lm"}, schema, schema)


@pytest.mark.parametrize(
    "tree",
    [
        {"trainer": {"max_step": 3}},
        {"trainer": {"max_steps": 0}},
        {"trainer": {"max_steps": True}},
        {"model": {"name": "tiny", "files": []}},
        {"model": {"name": "parts:tiny", "num_layers": "two"}},
        {"model": {"name": "nobody"}},
        {"model": {"optim": {"name": "adamw", "mode": "fine"}}},
        {"checkpoint": {"save_top_k": 1.5}},
        {"surprise": 1},
    ],
)
def test_the_editor_schema_refuses_what_loading_refuses(schema, tree):
    assert not holds(tree, schema, schema)


def test_the_schema_completes_per_component(schema):
    assert holds({"model": {"optim": {"name": "fussy", "mode": "x"}}}, schema, schema)
    assert not holds({"model": {"optim": {"name": "adamw", "mode": "x"}}}, schema, schema)
