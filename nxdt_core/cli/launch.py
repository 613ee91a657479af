"""``nxdt launch``: a verb for each launcher that submits jobs, with the options that the launcher declares."""

from __future__ import annotations

import shlex
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from nxdt_core.cli.config import require_set, values_to_set
from nxdt_core.cli.verb import (
    SuggestingGroup,
    Verb,
    attributes,
    complete_override,
    complete_source,
    print_json,
    print_note,
    say,
)
from nxdt_core.config.section import LISTS, TABLES, keys_of, members
from nxdt_core.config.show import drop_replaced, field_docs
from nxdt_core.errors.launch import CannotSubmit
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.launch.jobs import prepare, submit, write
from nxdt_core.protocols.launcher import Launcher

_EXAMPLES = {
    "slurm": (
        "recipe:llama3-70b-trn1 --nodes 16 --instance-type trn1.32xlarge",
        "my_run.yaml --submit",
    ),
    "kubernetes": ("my_run.yaml --nodes 4 --image my/image:1 --claims fsx=/fsx",),
    "hyperpod": ("recipe:llama3-70b-trn1 --nodes 16 --instance-type ml.trn1.32xlarge",),
    "local": ("recipe:llama-tiny --nodes 2 --submit",),
}
_HELP = """{summary}

CONFIG and KEY=VALUE are those of `nxdt train`. The files are written to launch/NAME, with a directory for logs, and the
command that submits them is printed. That directory, the configuration and exp_manager.exp_dir must be on a file system
that all nodes share.

A cluster file is YAML with the names of the options below as keys, with _ instead of -. Options of the command go
before it.
"""


class LaunchGroup(SuggestingGroup):
    """The launchers of all plugins that submit jobs."""

    def summaries(self) -> dict[str, str]:
        """Return the names of the launchers with their lines, importing none of them."""
        return {name: _summary(component) for name, component in _launchers().items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of one launcher; None where there is none of that name."""
        component = _launchers().get(cmd_name)
        return super().get_command(ctx, cmd_name) if component is None else _command(cmd_name, component)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the launcher of the first word; of one that is unknown, the error says which plugin has it.

        Raises:
            UnknownComponent: no plugin offers it.
            CannotSubmit: it only joins.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            component = Kernel.start().registry.get("launcher", args[0])
            raise CannotSubmit(launcher=component.record.name) from None


launch = LaunchGroup(
    name="launch",
    short_help="Write the job of a run for a cluster, and submit it.",
    help="""Write the files of a job that trains on a cluster, and submit them.

    The job compiles first where the engine compiles ahead, resumes from the newest checkpoint, and starts again after
    a lost node. Plugins may add launchers.""",
    examples=("nxdt launch slurm recipe:llama3-70b-trn1 --nodes 16", "nxdt launch kubernetes --help"),
)


@cache
def _launchers() -> dict[str, RegisteredComponent]:
    """The launchers that submit, by name; of a name that several plugins offer, as ``plugin:name``."""
    submitting = []
    for component in Kernel.start().registry.all("launcher"):
        submits = True
        with suppress(ComponentUnusable):  # its command says why
            submits = component.load_class(Launcher).submits()
        if submits:
            submitting.append(component)
    names = [component.record.name for component in submitting]
    return {
        component.record.name if names.count(component.record.name) == 1 else component.qualified_name: component
        for component in submitting
    }


def _summary(component: RegisteredComponent) -> str:
    """Return the summary of a launcher as a sentence, as other commands have one."""
    text = component.record.summary
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _command(name: str, component: RegisteredComponent) -> click.Command:
    summary = _summary(component)
    examples = [f"nxdt launch {name} {words}" for words in _EXAMPLES.get(name, ("my_run.yaml --nodes 2",))]
    path = click.Path(path_type=Path)
    parameters: list[click.Parameter] = [
        click.Argument(["source"], metavar="CONFIG", shell_complete=complete_source),
        click.Argument(["overrides"], nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override),
        click.Option(["--nodes"], type=click.IntRange(min=1), help="Nodes of the run; by default trainer.num_nodes."),
        click.Option(["--cluster"], type=path, metavar="FILE", help="YAML file with the options below."),
        click.Option(["-o", "--output"], type=path, metavar="DIR", help="Where to write; by default launch/NAME."),
        click.Option(["--submit"], is_flag=True, help="Submit the job as well."),
        click.Option(["--force"], is_flag=True, help="Replace files that differ."),
        click.Option(["--json", "json_output"], is_flag=True, help="Print JSON to standard output."),
    ]
    cls = component.load_config()
    if cls is not None:  # an option for each key of the launcher's section; its documentation is the help text
        docs = field_docs(cls)
        keys = {name: key for name, key in keys_of(cls).items() if name != "nodes"}
        parameters += [_option(name, key.annotation, docs.get(name) or name) for name, key in keys.items()]
    help_text = _HELP.format(summary=summary)
    callback = partial(_run, name, component)
    return Verb(name=name, callback=callback, params=parameters, short_help=summary, help=help_text, examples=examples)


def _option(name: str, annotation: Any, text: str) -> click.Option:
    """Values that are not given are None or empty, so that the cluster file and the defaults count."""
    word, destination = name.replace("_", "-"), f"option_{name}"
    main = next(member for member in members(annotation) if member is not type(None))
    origin, arguments = get_origin(main) or main, get_args(main)
    names, kind = [f"--{word}", destination], {int: click.INT, float: click.FLOAT}.get(main, click.STRING)
    if origin in LISTS:
        return click.Option(names, multiple=True, metavar="TEXT", help=f"{text} May be repeated.")
    if origin in TABLES:
        pair = _Pair(numbers=bool(arguments) and arguments[-1] in (int, float))
        text = f"{text.replace('{', '').replace('}', '')} May be repeated."
        return click.Option(names, multiple=True, metavar="NAME=VALUE", type=pair, help=text)
    if origin is Literal:
        return click.Option(
            names, type=click.Choice([str(argument) for argument in arguments if argument is not None]), help=text
        )
    if main is bool:
        return click.Option([f"--{word}/--no-{word}", destination], default=None, help=text)
    return click.Option(names, type=kind, help=text)


class _Pair(click.ParamType[tuple[str, str | float]]):
    """``NAME=VALUE``."""

    name = "pair"

    def __init__(self, *, numbers: bool) -> None:
        self._numbers = numbers

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, equals, text = str(value).partition("=")
        if not equals or not name:
            self.fail(f"{value!r} has no '=' between a name and a value.", param, ctx)
        if not self._numbers:
            return name, text
        try:
            return name, float(text)
        except ValueError:
            self.fail(f"{text!r} is not a number.", param, ctx)


def _run(name: str, component: RegisteredComponent, **values: Any) -> None:
    words = ["nxdt", "launch", name, values["source"], *drop_replaced(values["overrides"])]
    words += [f"--nodes={values['nodes']}"] if values["nodes"] is not None else []
    words += [f"--cluster={values['cluster']}"] if values["cluster"] is not None else []
    settings: dict[str, Any] = {}  # the options of the launcher that the command line has
    for key, value in values.items():
        if not key.startswith("option_") or value in (None, ()):
            continue
        key = key.removeprefix("option_")
        option, several = f"--{key.replace('_', '-')}", value if isinstance(value, tuple) else (value,)
        settings[key] = dict(value) if isinstance(several[0], tuple) else value
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [f"{option}={'='.join(map(str, one)) if isinstance(one, tuple) else one}" for one in several]
    job, config, submission = prepare(
        component,
        values["source"],
        values["overrides"],
        nodes=values["nodes"],
        cluster=values["cluster"],
        given=settings,
        directory=values["output"],
        command_line=shlex.join(words),
    )
    if values["submit"]:
        require_set(config)
    files = write(job, submission, force=values["force"])
    output = submit(job, submission) if values["submit"] else ""
    to_set = values_to_set(config)
    command = f"cd {shlex.quote(str(job.directory))} && {shlex.join(submission.command)}"
    if values["json_output"]:
        print_json(
            {
                "files": [str(path) for path in files],
                "submit": command,
                "submitted": values["submit"],
                "output": output,
                **attributes(job, "nodes", "devices"),
                "to_set": to_set,
            }
        )
        return
    for path in files:
        say(str(path))
    for note in submission.notes:
        print_note(note)
    if to_set:
        print_note(f"Before the job is submitted, set {', '.join(to_set)} with KEY=VALUE.")
    say(output if values["submit"] else f"Submit it: {command}")
