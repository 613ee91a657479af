"""``nxdt launch``: a verb for each launcher that submits jobs, with the options that the launcher declares."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from nxdt_core.cli.groups import SuggestingGroup
from nxdt_core.cli.verb import Verb, complete_override, complete_source, print_json, print_note, say

if TYPE_CHECKING:
    from nxdt_core.kernel import RegisteredComponent


_EXAMPLES = {
    "slurm": (
        "recipe:llama3-70b-trn1 --nodes 16 --instance-type trn1.32xlarge",
        "my_run.yaml --submit",
    ),
    "kubernetes": ("my_run.yaml --nodes 4 --image my/image:1 --claims fsx=/fsx",),
    "hyperpod": ("recipe:llama3-70b-trn1 --nodes 16 --instance-type ml.trn1.32xlarge",),
    "local": ("recipe:llama-tiny --nodes 2 --submit",),
}
_OWN = frozenset({"nodes"})
"""Options of all launchers, which the command has itself."""


class LaunchGroup(SuggestingGroup):
    """The launchers of all plugins that submit jobs."""

    def summaries(self) -> dict[str, str]:
        """Return the names of the launchers with their lines, importing none of them."""
        return {name: _summary(component) for name, component in _launchers().items()}

    def own_command(self, name: str) -> click.Command | None:
        """Return the command of one launcher; None where there is none of that name."""
        component = _launchers().get(name)
        return None if component is None else _command(name, component)

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
            from nxdt_core.errors.launch import CannotSubmit
            from nxdt_core.kernel import Kernel

            if args[0].startswith("-"):
                raise
            found = Kernel.start().registry.get("launcher", args[0])
            raise CannotSubmit(launcher=found.record.name) from None


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
    from nxdt_core.kernel import Kernel

    found = [each for each in Kernel.start().registry.all("launcher") if _submits(each)]
    names = [each.record.name for each in found]
    return {each.record.name if names.count(each.record.name) == 1 else each.qualified_name: each for each in found}


def _submits(component: RegisteredComponent) -> bool:
    from nxdt_core.errors.plugins import ComponentUnusable
    from nxdt_core.protocols.launcher import Launcher

    try:
        return component.load_class(Launcher).submits()
    except ComponentUnusable:  # its command says why
        return True


def _summary(component: RegisteredComponent) -> str:
    """Return the summary of a launcher as a sentence, as other commands have one."""
    text = component.record.summary
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _command(name: str, component: RegisteredComponent) -> click.Command:
    summary = _summary(component)
    examples = [f"nxdt launch {name} {words}" for words in _EXAMPLES.get(name, ("my_run.yaml --nodes 2",))]

    def callback(**values: Any) -> None:
        _run(name, component, values)

    return Verb(
        name=name,
        callback=callback,
        params=[*_parameters(), *_options(component)],
        short_help=summary,
        help=_HELP.format(summary=summary),
        examples=examples,
    )


_HELP = """{summary}

CONFIG and KEY=VALUE are those of `nxdt train`. The files are written to launch/NAME, with a directory for logs, and the
command that submits them is printed. That directory, the configuration and exp_manager.exp_dir must be on a file system
that all nodes share.

A cluster file is YAML with the names of the options below as keys, with _ instead of -. Options of the command go
before it.
"""


def _parameters() -> list[click.Parameter]:
    path = click.Path(path_type=Path)
    return [
        click.Argument(["source"], metavar="CONFIG", shell_complete=complete_source),
        click.Argument(["overrides"], nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override),
        click.Option(["--nodes"], type=click.IntRange(min=1), help="Nodes of the run; by default trainer.num_nodes."),
        click.Option(["--cluster"], type=path, metavar="FILE", help="YAML file with the options below."),
        click.Option(["-o", "--output"], type=path, metavar="DIR", help="Where to write; by default launch/NAME."),
        click.Option(["--submit"], is_flag=True, help="Submit the job as well."),
        click.Option(["--force"], is_flag=True, help="Replace files that differ."),
        click.Option(["--json", "json_output"], is_flag=True, help="Print JSON to standard output."),
    ]


def _options(component: RegisteredComponent) -> list[click.Parameter]:
    """An option for each key of the launcher's section; its documentation is the help text."""
    from nxdt_core.config.reference import field_docs
    from nxdt_core.config.section import keys_of

    cls = component.load_config()
    if cls is None:
        return []
    docs = field_docs(cls)
    return [_option(name, key.annotation, docs.get(name, "")) for name, key in keys_of(cls).items() if name not in _OWN]


def _option(name: str, annotation: Any, text: str) -> click.Option:
    """Values that are not given are None or empty, so that the cluster file and the defaults count."""
    from nxdt_core.config.section import LISTS, TABLES, members

    word, destination = name.replace("_", "-"), f"option_{name}"
    (main,) = [each for each in members(annotation) if each is not type(None)][:1]
    origin, arguments = get_origin(main) or main, get_args(main)
    text = text or name
    if origin in LISTS:
        return click.Option([f"--{word}", destination], multiple=True, metavar="TEXT", help=f"{text} May be repeated.")
    if origin in TABLES:
        return click.Option(
            [f"--{word}", destination],
            multiple=True,
            metavar="NAME=VALUE",
            type=_Pair(numbers=bool(arguments) and arguments[-1] in (int, float)),
            help=f"{text.replace('{', '').replace('}', '')} May be repeated.",
        )
    if origin is Literal:
        choices = [str(each) for each in arguments if each is not None]
        return click.Option([f"--{word}", destination], type=click.Choice(choices), help=text)
    if main is bool:
        return click.Option([f"--{word}/--no-{word}", destination], default=None, help=text)
    return click.Option(
        [f"--{word}", destination], type={int: click.INT, float: click.FLOAT}.get(main, click.STRING), help=text
    )


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


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """The options of the launcher that the command line has."""
    found = {}
    for name, value in values.items():
        if name.startswith("option_") and value not in (None, ()):
            pairs = isinstance(value, tuple) and isinstance(value[0], tuple)
            found[name.removeprefix("option_")] = dict(value) if pairs else value
    return found


def _run(name: str, component: RegisteredComponent, values: dict[str, Any]) -> None:
    from nxdt_core.cli.checks import require_set, values_to_set
    from nxdt_core.launch.jobs import prepare, submit, write

    job, config, submission = prepare(
        component,
        values["source"],
        values["overrides"],
        nodes=values["nodes"],
        cluster=values["cluster"],
        given=_given(values),
        directory=values["output"],
        command_line=_command_line(name, values),
    )
    if values["submit"]:
        require_set(config)
    files = write(job, submission, force=values["force"])
    said = submit(job, submission) if values["submit"] else ""
    to_set = values_to_set(config)
    command = f"cd {shlex.quote(str(job.directory))} && {shlex.join(submission.command)}"
    if values["json_output"]:
        print_json(
            {
                "files": [str(path) for path in files],
                "submit": command,
                "submitted": values["submit"],
                "output": said,
                "nodes": job.nodes,
                "devices": job.devices,
                "to_set": list(to_set),
            }
        )
        return
    for path in files:
        say(str(path))
    for note in submission.notes:
        print_note(note)
    if to_set:
        print_note(f"Before the job is submitted, set {', '.join(to_set)} with KEY=VALUE.")
    say(said if values["submit"] else f"Submit it: {command}")


def _command_line(name: str, values: dict[str, Any]) -> str:
    from nxdt_core.config.secrets import drop_replaced

    words = ["nxdt", "launch", name, values["source"], *drop_replaced(values["overrides"])]
    words += [f"--nodes={values['nodes']}"] if values["nodes"] is not None else []
    words += [f"--cluster={values['cluster']}"] if values["cluster"] is not None else []
    for key, value in values.items():
        if key.startswith("option_") and value not in (None, ()):
            option = f"--{key.removeprefix('option_').replace('_', '-')}"
            if isinstance(value, bool):
                words.append(option if value else option.replace("--", "--no-", 1))
            else:
                many = value if isinstance(value, tuple) else (value,)
                words += [f"{option}={'='.join(map(str, each)) if isinstance(each, tuple) else each}" for each in many]
    return shlex.join(words)
