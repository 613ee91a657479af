"""``nxdt config``: check, show, describe and migrate configurations, and the checks that other commands share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import print_facts
from nxdt_core.cli.verb import SuggestingGroup, as_json, attributes, config_arguments, print_json, print_note, say, verb
from nxdt_core.config.hub import HUB_SCHEME
from nxdt_core.config.schema import SLOTS, RunConfig
from nxdt_core.config.section import StartsAtFile, Written, is_model, keys_of, marked
from nxdt_core.config.tree import dotted
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.errors import NxdtError
from nxdt_core.errors.chats import TemplateRefuses
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, ValuesNotSet
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.errors.models import VocabularyTooSmall
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.system.paths import PACKAGE_SCHEME, resolve_path
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

_ENDS = {"eos": "end-of-text", "pad": "padding"}
_BAR, _END = "\\|", "\n"
_PATHS = (Written, StartsAtFile)
"""Marks of keys that are paths."""
_MEANINGS: dict[str, str] = {
    "mapped": "kept under its name",
    "renamed": "kept under another name",
    "changed": "kept with another value",
    "added": "not in the file; written since leaving it out would mean something else here",
    "unneeded": "left out; nothing is lost without it",
    "off": "left out; it is unset, switched off, or says what holds here anyway",
    "ignored": "left out; the framework that the file is of did not read it",
    "unsupported": "left out; it asks for something that is not done here",
}


def check_layout(config: ResolvedConfig) -> None:
    """Build the model on the meta device, and send shapes through every shard and the objective.

    It does nothing, and imports no torch, for a model whose record sets ``tried_before_launch`` to False, or leaves it
    out where the run does not shard the model. An objective of a plugin is tried where logits are not whole: it may
    compute with them in another way than the functions of :mod:`nxdt_core.models.loss`.

    Raises:
        NxdtError: the model cannot be built, or not in this layout, or the objective does not take its logits.
    """
    from nxdt_core.api import ModelComponent
    from nxdt_core.kernel.plugin import BUILTIN

    record, run = config.selected("model").component.record, config.run
    sizes = run.mesh_sizes()
    wanted = record.tried_before_launch if isinstance(record, ModelComponent) else False
    if wanted is None:
        wanted = max(sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1
    whole = sizes.tp == 1 and run.model.loss_chunk_tokens is None
    tries_objective = not whole and config.selected("objective").component.plugin != BUILTIN
    if not (wanted or tries_objective):
        return
    from nxdt_core.errors.launch import EngineWithoutEstimate
    from nxdt_core.errors.models import ModelReadsValues
    from nxdt_core.train import build
    from nxdt_core.train.plan import plan

    build.model_builder(config).plan()
    if sizes.world_size == 1 and not tries_objective:
        return
    try:
        plan(config)
    except (EngineWithoutEstimate, ModelReadsValues):  # it cannot be tried like this, and may train well
        return


def check_parts(config: ResolvedConfig) -> None:
    """Build what a run builds before it reads data: the store, the chat template, an objective of a plugin, and the
    model without memory where the configuration names parts of it.

    torch is imported for the last two alone.

    Raises:
        NxdtError: one of them cannot be built, or a name matches no part of the model.
    """
    from nxdt_core.checkpoint import locate
    from nxdt_core.data.chat.templates import ChatKeys, is_template, named_template
    from nxdt_core.kernel.plugin import BUILTIN

    run, data = config.run, config.selected("dataset").config
    if run.checkpoint.enabled:
        locate(config.checkpoint_uri, config.kernel, config.selected("store").config)
    if isinstance(data, ChatKeys):
        if config.components["tokenizer"] is None:
            raise DataNeedsTokenizer(dataloader=config.selected("dataset").component.record.name)
        file = data.chat_template_file
        if is_template(data.chat_template or "") or (file is not None and resolve_path(file).is_file()):
            from nxdt_core.data.chat.rendering import TemplateRunner

            template = named_template(data)
            assert template is not None
            with suppress(TemplateRefuses):  # it may take the conversations of the data
                TemplateRunner(template, {}).run([{"role": "user", "content": "Hello?"}], place="a greeting")
    scores = config.tree.get("model.score_head", False)
    overrides, cuts = run.model.optim.param_groups or (), run.model.pipeline_cuts
    names_parts = config.components["adapter"] or run.model.trainable or overrides or cuts
    if not (scores or names_parts or config.selected("objective").component.plugin != BUILTIN):
        return
    from nxdt_core.train import build

    build.objective(config)
    if not names_parts:
        return
    from nxdt_core.engine.parameters import check_overrides
    from nxdt_core.engine.pipeline.split import stage_layers
    from nxdt_core.engine.weights import build_whole

    whole = build_whole(build.model_builder(config), build.adapters(config))
    named = whole.module.named_parameters(remove_duplicate=False)
    check_overrides(overrides, [name for name, parameter in named if parameter.requires_grad], RankAgreement())
    sizes, pipeline = run.mesh_sizes(), whole.plan.pipeline
    if cuts and pipeline is not None and sizes.stages > 1:
        layers = whole.module.get_submodule(pipeline.layers).named_children()
        stage_layers([f"{pipeline.layers}.{name}" for name, _ in layers], sizes.stages, cuts)


def file_notes(config: ResolvedConfig) -> list[str]:
    """Return a note for each path to read that leads to no file, be it a pattern or without an ending."""
    places = list(marked(_PATHS, RunConfig, config.to_values(), ()))
    for slot in SLOTS:
        selected = config.components[slot.kind]
        if selected is not None and selected.config is not None and slot.kind != "tokenizer":  # which has its own note
            section = tuple(slot.section.split("."))
            places += marked(_PATHS, type(selected.config), config.tree.get(section), section)
    texts = {dotted(path): str(config.tree.get(path)) for path, mark in places if mark is StartsAtFile}
    return [
        f"{key}: {text} is not on this machine"
        for key, text in texts.items()
        if not (is_placeholder(text) or text.startswith(HUB_SCHEME) or "://" in text.removeprefix(PACKAGE_SCHEME))
        if not ((path := resolve_path(text)).exists() or glob(str(path)) or glob(f"{path}.*"))
    ]


def _paths(value: Any) -> Iterator[Path]:
    """Yield the paths in the value of a key, or in those of a section."""
    if isinstance(value, Path):
        yield value
        return
    cls: Any = type(value)
    if is_model(cls):
        value = {key.name: getattr(value, key.attribute) for key in keys_of(cls).values()}
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if not isinstance(parts, str) and isinstance(parts, Iterable) else ():
        yield from _paths(part)


def vocabulary_notes(config: ResolvedConfig) -> list[str]:
    """Return notes for the user about a tokenizer that is built from files; none for one that needs no files.

    Raises:
        VocabularyTooSmall: it has ids that the model has no row for.
        NxdtError: its files are invalid.
    """
    selected = config.components["tokenizer"]
    if selected is None or selected.config is None:
        return []
    paths = [*_paths(selected.config)]
    if any(map(is_placeholder, paths)):  # which are reported as values to set
        return []
    if not paths and isinstance(selected.config, HuggingFaceTokenizerConfig):  # it may have to be downloaded
        return []
    if absent := [path for path in paths if not path.exists()]:
        return [f"data.tokenizer: {absent[0]} is not on this machine; its vocabulary is not compared with the model's"]
    tokenizer = selected.component.load_class(Tokenizer)(selected.config)
    rows = config.tree.get("model.vocab_size")
    if rows is not None and tokenizer.vocab_size > rows:
        from nxdt_core.train import build

        rows = build.model_builder(config).vocab_size  # with padding
        if tokenizer.vocab_size > rows:
            added = bool(build.added_tokens(config))
            raise VocabularyTooSmall(tokenizer=tokenizer.vocab_size, model=rows, added=added)
    missing = [key for key in _ENDS if getattr(tokenizer, f"{key}_id") is None]
    return [f"data.tokenizer: it has no {_ENDS[key]} token; {key}_token names one" for key in missing]


def is_placeholder(value: Any) -> bool:
    """Return whether ``value``, or a part of it, stands for one that the user sets, which a recipe cannot know."""
    if isinstance(value, (dict, list, tuple)):
        return any(map(is_placeholder, value.values() if isinstance(value, dict) else value))
    return str(value).startswith("/path/to/")


def values_to_set(config: ResolvedConfig) -> tuple[str, ...]:
    """Return the keys that were written with placeholders, in the order of the schema."""
    tree = config.tree
    return tuple(
        dotted(path) for path, value in tree.leaves() if tree.origins[path].kind != "default" and is_placeholder(value)
    )


def require_set(config: ResolvedConfig) -> None:
    """See that no value is a placeholder.

    Raises:
        ValuesNotSet: some are.
    """
    if keys := values_to_set(config):
        raise ValuesNotSet(source=config.source, keys=keys)


@verb(
    "nxdt config migrate hf_llama3_8B_config.yaml --from nxdt -o my_run.yaml",
    "nxdt config migrate megatron_gpt_config.yaml --from nemo -o my_run.yaml --report my_run.md",
    short_help="Convert a configuration of another program.",
)
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "framework",
    metavar="NAME",
    help="Migration of the program that FILE is of, such as nxdt, nemo or nnm; by default the one that recognises it.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report of every key, as Markdown.")
@click.option("--force", is_flag=True, help="Replace the files where they exist.")
@as_json
def migrate(
    source: Path, framework: str | None, output: Path, report: Path | None, force: bool, json_output: bool
) -> None:
    """Rewrite a configuration of another program for nxdt, and report every key.

    Plugins bring the migrations: nxdt-plugin-migrate those of NxD Training (nxdt), NeMo 1.x (nemo) and
    neuronx-nemo-megatron (nnm), which keep order and comments.

    Each key is mapped, renamed, changed, unneeded, off (unset or switched off), ignored (the other program never read
    it) or unsupported. Keys are added where leaving them out would change something. The values and paths that are
    still to be set are listed at the end. A file of another program is refused.
    """
    from nxdt_core.config.sources import migrate as migrated
    from nxdt_core.config.sources import summary
    from nxdt_core.errors.configuration import MigrationTargetExists
    from nxdt_core.kernel import Kernel

    for path in (output, report):
        if path is not None and path.exists() and not force:
            raise MigrationTargetExists(path=str(path))
    done = migrated(source, output, framework, Kernel.start())
    _write(output, done.text)
    counts = summary(done)
    if report is not None:
        lines = [f"# {done.source} → {done.target}", "", f"A file of {done.program}.", ""]
        lines += ["| verdict | keys | meaning |", "|---|---|---|"]
        lines += [f"| {verdict} | {count} | {_MEANINGS[verdict]} |" for verdict, count in counts]
        for title, entries in (
            ("Still to be set", done.to_set),
            ("What `nxdt config check` says of it now", done.remaining),
        ):
            lines += ["", f"## {title}", "", *([f"- `{key}`: {text}" for key, text in entries] or ["Nothing."])]
        lines += ["", "## Every key", "", "| line | key | value | verdict | now | why |", "|---|---|---|---|---|---|"]
        for row in done.keys:
            value, target = (f"`{text}`" if text else "" for text in (row.value, row.target))
            cells = (str(row.line or ""), f"`{row.key}`", value, row.verdict, target, row.reason)
            lines.append(f"| {' | '.join(cell.replace('|', _BAR).replace(_END, ' ') for cell in cells)} |")
        _write(report, "\n".join(lines) + "\n")
    if json_output:
        print_json(
            {
                "source": str(done.source),
                "target": str(done.target),
                "framework": done.program,
                "keys": [
                    {
                        "key": row.key,
                        "line": row.line or None,
                        "verdict": row.verdict,
                        "target": row.target or None,
                        "value": row.value,
                        "reason": row.reason or None,
                    }
                    for row in done.keys
                ],
                "to_set": [{"key": key, "reason": reason} for key, reason in done.to_set],
                "remaining": [{"key": key, "problem": problem} for key, problem in done.remaining],
            }
        )
        return
    say(f"Wrote {done.target} from {done.source} ({done.program}).")
    print_facts(counts)
    if report is not None:
        say(f"Wrote {report}: every key, with its line and reason.")
    lost = tuple((f"{row.key} (line {row.line})", row.reason) for row in done.keys if row.verdict == "unsupported")
    for title, entries in (
        ("Not carried over:", lost),
        ("Still to be set:", done.to_set),
        ("nxdt config check also reports:", done.remaining),
    ):
        if entries:
            click.echo(title)
            for key, text in entries:
                say(f"  {key}: {text}")


def _write(path: Path, text: str) -> None:
    from nxdt_core.errors.configuration import MigrationTargetUnwritable
    from nxdt_core.system.regular_files import replace_text

    try:
        replace_text(path, text)
    except OSError as error:
        raise MigrationTargetUnwritable(path=str(path), reason=(error.strerror or str(error)).lower()) from error


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt config check my_run.yaml", "nxdt config show recipe:llama-tiny"),
)
def config() -> None:
    """Look at configurations without building anything. CONFIG is a YAML file or recipe:NAME."""


@config.command(
    "check",
    examples=(
        "nxdt config check my_run.yaml",
        "nxdt config check my_run.yaml trainer.max_steps=1000",
        "nxdt config check my_run.yaml --json",
    ),
)
@config_arguments
@as_json
@click.pass_context
def check(ctx: click.Context, source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Check a configuration: report every mistake at once, with file and line, or show what would run.

    A model of transformers (model.name=hf) is also built without memory, in the layout of the run. Devices are checked
    by nxdt train, and files that are not on this machine are notes: another machine may train. The exit status is
    1 where a recipe has values that only you know, such as the paths of your data, and 2 where something is wrong.
    """
    from nxdt_core.config import load

    try:
        resolved = load(source, overrides)
        notes = [*resolved.notes, *file_notes(resolved), *vocabulary_notes(resolved)]
        check_layout(resolved)
        check_parts(resolved)
    except NxdtError as error:
        if not json_output:
            raise
        problems = []
        for problem in error.problems if isinstance(error, ConfigError) else (error,):
            placed = problem if isinstance(problem, ConfigProblem) else None
            problems.append(
                {
                    "code": placed.shown_code if placed else problem.code,
                    "place": placed.place if placed else None,
                    "line": placed.line or None if placed else None,
                    "key": placed.key or None if placed else None,
                    "message": problem.what(),
                    "fix": problem.do() or None,
                }
            )
        nothing: dict[str, object] = {"notes": [], "to_set": [], "components": {}}
        outcome = {"source": source, "ok": False, "problems": problems, **nothing}
        print_json({**outcome, "run_dir": None, "checkpoint_uri": None})
        ctx.exit(error.exit_status)
    to_set = values_to_set(resolved)
    used = {slot: selected.component for slot, selected in resolved.components.items() if selected is not None}
    if json_output:
        print_json(
            {
                "source": resolved.source,
                "ok": not to_set,
                "problems": [],
                "notes": notes,
                "to_set": to_set,
                "components": {
                    slot: {"name": component.record.name, **attributes(component, "dist", "version")}
                    for slot, component in used.items()
                },
                "run_dir": str(resolved.run_dir),
                "checkpoint_uri": resolved.checkpoint_uri,
            }
        )
        ctx.exit(1 if to_set else 0)
    for note in notes:
        print_note(note)
    if to_set:
        count = "1 value" if len(to_set) == 1 else f"{len(to_set)} values"
        click.echo(f"{click.style(f'{count} to set', fg='yellow')}: {visible(', '.join(to_set))}")
    else:
        click.echo(f"{click.style('ok', fg='green')}: {visible(source)}")
    facts = [
        (slot, f"{component.record.name}  ({f'{component.dist} {component.version}'.strip()})")
        for slot, component in used.items()
    ]
    print_facts([*facts, ("run directory", str(resolved.run_dir)), ("checkpoints", resolved.checkpoint_uri)])
    ctx.exit(1 if to_set else 0)


@config.command(
    "show",
    examples=(
        "nxdt config show recipe:llama-tiny",
        "nxdt config show my_run.yaml --set",
        "nxdt config show my_run.yaml --json",
    ),
)
@config_arguments
@click.option("--set", "only_set", is_flag=True, help="Leave out values that are defaults.")
@as_json
def show(source: str, overrides: tuple[str, ...], only_set: bool, json_output: bool) -> None:
    """Print every value of a configuration and where it comes from, as YAML that can be trained again."""
    from nxdt_core.config import load, render_show

    resolved = load(source, overrides)
    if json_output:
        from nxdt_core.config.show import hide_secrets

        print_json(
            {
                "config": resolved.to_dict(),
                "origins": {
                    path: {"kind": origin.kind, "where": hide_secrets(origin.where), "line": origin.line or None}
                    for path, origin in resolved.origins.items()
                },
            }
        )
    else:
        say(render_show(resolved, only_set=only_set), end="")


@config.command("schema", examples=("nxdt config schema > nxdt.schema.json",))
def schema() -> None:
    """Print a JSON Schema of configurations, with the keys of all installed plugins.

    Editors with a YAML language server complete and explain keys with it, where the file's first line is
    `# yaml-language-server: $schema=nxdt.schema.json`, as `nxdt recipes show` prints it.
    """
    from nxdt_core.config import json_schema
    from nxdt_core.kernel import Kernel

    print_json(json_schema(Kernel.start()))


config.add_command(migrate)
