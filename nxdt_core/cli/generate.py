"""``nxdt generate`` and ``nxdt chat``: see what a model has learned."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxdt_core.cli.checkpoint.store import named_config, trusted_keys
from nxdt_core.cli.verb import Verb, as_json, print_json, say
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.train.generate import LoadedModel
    from nxdt_core.train.sampling import Sampling

_RUN = "nxdt_experiments/llama-tiny"
_F = TypeVar("_F", bound=Callable[..., Any])


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse nan and infinity, which no bound of a range catches."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("it must be a finite number.")
    return value


_SHARE = click.FloatRange(min=0.0, max=1.0, min_open=True)

window_option = click.option(
    "--window", type=click.IntRange(min=1), metavar="N",
    help="Tokens that the model sees at once; as many as it has positions unless given.",
)  # fmt: skip


def _model_and_sampling(max_new_tokens: int) -> Callable[[_F], _F]:
    """Add the options that both commands have; the argument is the default of the first."""
    options = (
        click.option(
            "--max-new-tokens", type=click.IntRange(min=1), default=max_new_tokens, show_default=True,
            help="Maximum number of tokens to generate.",
        ),
        click.option(
            "--temperature", type=click.FloatRange(min=0.0), callback=_finite, default=0.0, show_default=True,
            help="0 takes the most likely token each time; 1 samples from the model's distribution.",
        ),
        click.option("--top-k", type=click.IntRange(min=1), help="Sample from the K most likely tokens."),
        click.option(
            "--top-p", type=_SHARE, callback=_finite,
            help="Sample from the most likely tokens whose probabilities add up to this.",
        ),
        click.option(
            "--min-p", type=_SHARE, callback=_finite,
            help="Sample from tokens with at least this share of the largest probability.",
        ),
        click.option(
            "--repetition-penalty", type=click.FloatRange(min=0.0, min_open=True), callback=_finite, default=1.0,
            show_default=True, help="Above 1, tokens that occurred become less likely.",
        ),
        click.option(
            "--frequency-penalty", type=float, callback=_finite, default=0.0, show_default=True,
            help="Subtract this from a token's logit for each time that it was generated.",
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
        click.option(
            "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the sampling."
        ),
        window_option,
        click.option("--base", metavar="URI", help="Weights below an adapter, if they are not where it says."),
        named_config,
        trusted_keys,
    )  # fmt: skip

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _loaded(checkpoint: str, given: Mapping[str, Any], samples: int = 1) -> tuple[LoadedModel, Sampling]:
    check_torch_folder()
    from nxdt_core.train.generate import load_model
    from nxdt_core.train.sampling import Sampling

    settings = {each.name: given[each.name] for each in fields(Sampling) if each.name in given}
    where = {name: given[name] for name in ("base", "config", "trusted", "window")}
    loaded = load_model(checkpoint, **where)
    return loaded, Sampling(**settings, samples=samples)


@click.command(
    cls=Verb,
    examples=(
        f'nxdt generate {_RUN} "In the beginning"',
        f'nxdt generate {_RUN} "In the beginning" --temperature 0.8 --top-k 50 --seed 7',
        'nxdt generate nxdt_experiments/llama-tiny-sft/checkpoints "When are you open?" --chat',
        f"nxdt generate {_RUN} --prompts prompts.jsonl --batch-size 16 > completions.jsonl",
    ),
)
@click.argument("checkpoint")
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE", help="Prompts to continue; prints JSON lines.")
@click.option("--chat", is_flag=True, help="Apply the chat template to prompts, and print the answers.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Continuations per prompt.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Prompts per batch.")
@_model_and_sampling(64)
@as_json
def generate(
    checkpoint: str,
    prompt: str | None,
    prompts: str | None,
    chat: bool,
    samples: int,
    batch_size: int,
    json_output: bool,
    **given: Any,
) -> None:
    """Continue PROMPT, or the prompts of a file, with the model of CHECKPOINT.

    CHECKPOINT is the directory of a run or a checkpoint.uri, whose newest complete step is used; one step of it, or
    `best` in its place; a Hugging Face directory; or an adapter that peft wrote. The model and its tokenizer are built
    from the configuration that is found there, or from --config.

    FILE is text with a prompt per line, or JSONL, JSON, Arrow or Parquet with records that have a text `prompt`, or
    `messages`. The records are printed as JSON lines, each with its `completion`; with several samples, `completions`.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("Give a PROMPT, or a file with --prompts.")
    from nxdt_core.train.generate import prompts_in

    records = [] if prompts is None else list(prompts_in(Path(prompts)))
    loaded, sampling = _loaded(checkpoint, given, samples)
    if prompt is None:
        _print_records(loaded, records, sampling, chat=chat, batch=batch_size)
        return
    ids = loaded.prompt(_turn(prompt) if chat else prompt)
    if not json_output and samples == 1:
        _print_pieces(loaded.writer.pieces(ids, sampling), "" if chat else prompt)
        return
    (found,) = loaded.writer.texts([ids], sampling)
    if json_output:
        several = {"completions": found} if samples > 1 else {}
        print_json({"checkpoint": checkpoint, "prompt": prompt, "completion": found[0], **several})
        return
    for text in found:
        _print_pieces(iter([text]), "" if chat else prompt)


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _print_records(
    loaded: LoadedModel, records: Sequence[tuple[str, dict[str, Any]]], sampling: Sampling, *, chat: bool, batch: int
) -> None:
    def asked(place: str, record: dict[str, Any]) -> list[int]:
        given = record["prompt"] if isinstance(record.get("prompt"), str) else record["messages"]
        return loaded.prompt(_turn(given) if chat and isinstance(given, str) else given, place)

    ids = [asked(place, record) for place, record in records]
    for (_, record), found in zip(records, loaded.writer.texts(ids, sampling, batch=batch), strict=True):
        written = {"completion": found[0]} if sampling.samples == 1 else {"completions": found}
        say(json.dumps({**record, **written}, ensure_ascii=False))


def _print_pieces(pieces: Iterator[str], before: str) -> str:
    """Print ``before`` and the pieces as they come, and return these as one text. Ctrl-C is the caller's."""
    shown = visible if sys.stdout.isatty() else str  # a file gets what the model says
    first = next(pieces, "")  # only then what is before, so that an error comes before any text
    click.echo(before + shown(first), nl=False)
    written = [first]
    for piece in pieces:
        click.echo(shown(piece), nl=False)
        written.append(piece)
    click.echo()
    return "".join(written)


@click.command(
    cls=Verb,
    examples=(
        "nxdt chat nxdt_experiments/llama-tiny-sft",
        'nxdt chat nxdt_experiments/llama-tiny-sft --system "Answer in one sentence." --temperature 0.7 --top-p 0.9',
    ),
)
@click.argument("checkpoint")
@click.option("--system", metavar="TEXT", help="System prompt.")
@_model_and_sampling(512)
def chat(checkpoint: str, system: str | None, **given: Any) -> None:
    """Answer each line of standard input with the model of CHECKPOINT, by its chat template.

    CHECKPOINT is what nxdt generate takes. The model sees all earlier turns. Ctrl-C ends an answer; /reset forgets the
    turns; /exit or Ctrl-D ends the session.
    """
    loaded, sampling = _loaded(checkpoint, given)
    begun = [] if system is None else [{"role": "system", "content": system}]
    loaded.prompt([*begun, *_turn("Hello")])  # a template that is missing, or refuses a system's turn
    turns = [*begun]
    for line in _lines():
        if line == "/exit":
            return
        if line == "/reset":
            turns = [*begun]
        elif line.startswith("/"):
            say(f"{line.split()[0]} is not a command; there are /reset and /exit.", err=True)
        elif line:
            pieces = loaded.writer.pieces(loaded.prompt([*turns, *_turn(line)]), sampling)
            if answer := _answer(pieces):
                turns += [*_turn(line), {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Yield what is typed, line by line, until the end of the input."""
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() gets a history of lines
    while True:
        try:
            yield input("> " if typed else "").strip()
        except KeyboardInterrupt:
            click.echo()
        except EOFError:
            if typed:
                click.echo()
            return


def _answer(pieces: Iterator[str]) -> str:
    """Print an answer as it comes, and return it; Ctrl-C ends it."""
    written: list[str] = []

    def noted() -> Iterator[str]:
        for piece in pieces:
            written.append(piece)
            yield piece

    try:
        _print_pieces(noted(), "")
    except KeyboardInterrupt:
        click.echo()
    return "".join(written).strip()
