"""The root command, and what becomes of an error: a sentence and status 2, or a bug's traceback and status 1."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

import click

from nxdt_core._version import __version__
from nxdt_core.cli.verb import LazyCommand, SuggestingGroup, discard_output, without_secrets
from nxdt_core.errors import NxdtError
from nxdt_core.system.garbage_collection import RARELY, collect_once_at_exit
from nxdt_core.system.visible_text import VisibleFormatter, colours_wanted

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a standard output that has no space left. Errors with a file name are explained by the command."""
_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 + SIGINT, as shells report it."""


_SECTIONS = {
    "Train": {
        "train": ("train:train", "Train a model from a YAML file or a recipe."),
        "plan": ("plan:plan", "Estimate memory, traffic and time of a run, without its devices."),
        "compile": ("train:compile_ahead", "Compile the graphs of a run before it starts."),
        "launch": ("launch:launch", "Write the job of a run for a cluster, and submit it."),
    },
    "Recipes, configuration and data": {
        "recipes": ("recipes:recipes", "List and print ready-made runs."),
        "config": ("config:config", "Check, show and describe configurations."),
        "data": ("data:data", "Preview and prepare training data."),
    },
    "Follow and compare runs": {
        "plot": ("plot:plot", "Plot loss, validation and learning rate of runs."),
        "report": ("report:report", "Write an HTML report with the metrics and configuration of runs."),
        "watch": ("report:watch", "Serve the report of runs while they train."),
    },
    "Use a model": {
        "generate": ("generate:generate", "Continue prompts with a model."),
        "chat": ("generate:chat", "Talk to a model."),
        "evaluate": ("generate:evaluate", "Evaluate a checkpoint on held-out records and tasks."),
        "checkpoint": ("checkpoint:checkpoint", "List, check, compare, copy, export and import checkpoints."),
    },
    "Installation and help": {
        "env": ("env:env", "Show devices, versions and drivers, and what they can run."),
        "plugins": ("plugins:plugins", "List, inspect and pin plugins."),
        "explain": ("explain:explain", "Explain an error code: cause, example and fix."),
        "completion": ("shell:completion", "Print a script that completes nxdt in a shell."),
        "man": ("shell:man", "Print the manual page."),
    },
}
"""Sections of the help text → command → its target in this package and its summary."""
COMMANDS = {
    name: LazyCommand(f"nxdt_core.cli.{target}", summary, section)
    for section, commands in _SECTIONS.items()
    for name, (target, summary) in commands.items()
}
"""The commands of the core, in the order of the help text."""

_EXAMPLES = (
    "nxdt recipes list",
    "nxdt train recipe:llama-tiny",
    "nxdt train my_run.yaml trainer.max_steps=1000",
)


root = SuggestingGroup(
    name="nxdt",
    place="",
    lazy=COMMANDS,
    examples=_EXAMPLES,
    help="Train large language models with exchangeable plugins.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(__version__, prog_name="nxdt", message="%(prog)s %(version)s")(root)


def main(args: Sequence[str] | None = None) -> int:
    """Run ``nxdt`` and return its exit status; the entry point of the installed script.

    Args:
        args: the command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        0 · 2 for a mistake of the user, reported in two sentences on standard error · 130 after Ctrl-C. A bug is
        raised, so that Python prints its traceback and exits with status 1.
    """
    atexit.register(collect_once_at_exit)
    # Before torch is imported: waiting threads that spin take the cores that other processes need to end the wait.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Plugins of pydantic would see configurations with their secrets, and looking for them reads the metadata of every
    # installed distribution a second time (20 ms of 250 distributions).
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Every character under every locale: a terminal keeps its encoding and gets escapes for what it cannot show, files
    # and pipes get UTF-8. Where a shell closed a stream (`>&-`), Python has none: what is written there goes nowhere.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")
    if logging.lastResort is not None:  # prints warnings where no handler is set, as on the command line
        logging.lastResort.setFormatter(VisibleFormatter(redact=without_secrets))
    color = colours_wanted()
    if os.environ.get("_NXDT_COMPLETE"):
        from nxdt_core.cli.shell import answer

        answer(root)
        return 0
    # Imports of torch make many objects and no garbage; collections are a fifth of their time.
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        status = root.main(args, prog_name="nxdt", standalone_mode=False, color=color)
        sys.stdout.flush()
    except NxdtError as error:
        from nxdt_core.cli.terminal import error_text  # not for `nxdt --help`

        click.echo(error_text(error), err=True, color=color)
        return error.exit_status
    except click.ClickException as error:
        _hide_secrets_in(error)
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the process at once, without a traceback
        click.echo("Interrupted.", err=True)
        return _INTERRUPTED
    except BrokenPipeError:  # ``nxdt … | head``; the status is click's where a command still writes
        discard_output(sys.stdout)
        return 1
    except OSError as error:
        if error.errno not in _NO_SPACE or error.filename is not None:
            _hide_secrets_in(error)
            raise
        click.echo(f"The output is incomplete: {error.strerror}", err=True)
        discard_output(sys.stdout)
        return 1
    except Exception as error:  # a bug, whose traceback Python prints
        from nxdt_core.kernel.discovery import note_plugin

        note_plugin(error)
        _hide_secrets_in(error)
        raise
    finally:
        gc.set_threshold(*before)
    return status if isinstance(status, int) else 0


def _hide_secrets_in(error: Exception) -> None:
    from nxdt_core.config.show import hide_secrets_in

    hide_secrets_in(error)
