"""``nxdt checkpoint inspect``."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, open_one
from nxdt_core.cli.terminal import human_size, print_facts, print_table
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nxdt_core.checkpoint import Manifest
    from nxdt_core.checkpoint.format.tensor_index import TensorEntry


@click.command(
    cls=Verb,
    examples=(
        f"nxdt checkpoint inspect {EXAMPLE_URI}",
        f"nxdt checkpoint inspect {EXAMPLE_URI}/step-00000040 --tensors",
        f"nxdt checkpoint inspect {EXAMPLE_URI} --config > again.yaml",
        f"nxdt checkpoint inspect {EXAMPLE_URI} --json",
    ),
)
@click.argument("uri")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--config", "only_config", is_flag=True, help="Print the saved configuration, as YAML or JSON.")
@as_json
def inspect(uri: str, tensors: bool, only_config: bool, json_output: bool) -> None:
    """Show what is in a checkpoint, from its manifest alone: the newest one at URI, or the step that URI names. URI may
    end in `best`, the step that checkpoint.monitor ranks first.
    """
    from nxdt_core.checkpoint.signing import claimed_signer

    storage, manifest = open_one(uri)
    config = dict(manifest.facts.config)
    if only_config:
        _print_config(config, json_output)
    elif json_output:
        print_json({**_facts(manifest, storage.uri), "signed_by": claimed_signer(storage, manifest) or None})
    else:
        _print_summary(manifest, storage.uri, claimed_signer(storage, manifest))
        if tensors:
            click.echo()
            _print_tensors(manifest)


def _print_config(config: Mapping[str, Any], json_output: bool) -> None:
    import yaml

    if json_output:
        print_json(config)
    else:
        say(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def _facts(manifest: Manifest, uri: str) -> dict[str, object]:
    from nxdt_core.checkpoint.format.file_names import step_name

    facts = manifest.facts
    return {
        "step": manifest.step,
        "uri": f"{uri}/{step_name(manifest.step)}",
        "attempt": manifest.attempt,
        "created": manifest.created,
        "size_bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "consumed_samples": facts.consumed_samples,
        "consumed_tokens": facts.consumed_tokens,
        "mesh": dict(facts.mesh),
        "metrics": dict(facts.metrics),
        "versions": dict(facts.versions),
        "plugin_fingerprint": facts.plugin_fingerprint,
        "sections": {section: _summary(index) for section, index in manifest.tensors.items()},
        "tensors": [
            {"section": section, **_tensor(name, entry)}
            for section, index in manifest.tensors.items()
            for name, entry in index.items()
        ],
    }


def _summary(index: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the counts of one section; tensors that share the memory of another one count as tensors and have no
    bytes."""
    return {
        "tensors": len(index),
        "elements": sum(prod(entry.shape) for entry in index.values() if entry.same_as is None),
        "size_bytes": sum(_size_bytes(entry) for entry in index.values()),
        "dtypes": dict(Counter(entry.dtype for entry in index.values())),
    }


def _tensor(name: str, entry: TensorEntry) -> dict[str, object]:
    return {
        "name": name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "size_bytes": _size_bytes(entry),
        "parts": len(entry.parts),
        "same_as": entry.same_as,
    }


def _size_bytes(entry: TensorEntry) -> int:
    return sum(entry.part_bytes(part) for part in entry.parts)


def _print_summary(manifest: Manifest, uri: str, signer: str) -> None:
    from nxdt_core.checkpoint.format.file_names import step_name

    facts = manifest.facts
    print_facts(
        [
            ("checkpoint", f"{uri}/{step_name(manifest.step)}"),
            ("step", f"{manifest.step:,}"),
            ("saved", f"{manifest.created}, as {manifest.attempt}"),
            ("consumed", f"{facts.consumed_samples:,} samples, {facts.consumed_tokens:,} tokens"),
            ("size", f"{human_size(manifest.size_bytes)} in {len(manifest.files)} files"),
            ("mesh", _pairs(facts.mesh)),
            ("metrics", _pairs(facts.metrics)),
            ("versions", _pairs(facts.versions)),
            ("plugins", facts.plugin_fingerprint or "-"),
            ("signed by", f"{signer} (checked by 'verify')" if signer else "-"),
        ]
    )
    click.echo()
    rows = []
    for section, index in manifest.tensors.items():
        of = _summary(index)
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in of["dtypes"].items())
        rows.append((section, f"{of['tensors']:,}", f"{of['elements']:,}", human_size(of["size_bytes"]), dtypes))
    print_table(("SECTION", "TENSORS", "ELEMENTS", "SIZE", "DTYPES"), rows, right=("TENSORS", "ELEMENTS", "SIZE"))


def _print_tensors(manifest: Manifest) -> None:
    rows = [
        (
            section,
            entry.dtype,
            " x ".join(map(str, entry.shape)) or "scalar",
            human_size(_size_bytes(entry)),
            str(len(entry.parts)),
            f"{name}, the memory of {entry.same_as}" if entry.same_as else name,
        )
        for section, index in manifest.tensors.items()
        for name, entry in index.items()
    ]
    header = ("SECTION", "DTYPE", "SHAPE", "SIZE", "PARTS", "NAME")
    print_table(header, rows, right=("SIZE", "PARTS"), optional=("PARTS", "SECTION", "SIZE"))


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "-"
