"""``nxdt generate``, ``nxdt chat`` and ``nxdt evaluate``: what a model has learned."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxdt_core.cli.checkpoint.store import named_config, trusted_keys
from nxdt_core.cli.verb import as_json, print_json, say, verb
from nxdt_core.data.files.records import UnusedFields, describe_unused
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.errors.data import NothingToJudge
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.evaluation import TaskSuite
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.train.generate import LoadedModel
    from nxdt_core.train.sampling import Sampling

_RUN = "nxdt_experiments/llama-tiny"
_F = TypeVar("_F", bound=Callable[..., Any])
_SHARE = click.FloatRange(min=0.0, max=1.0, min_open=True)
_SFT_RUN = "nxdt_experiments/llama-tiny-sft/checkpoints"


window_option = click.option(
    "--window", type=click.IntRange(min=1), metavar="N",
    help="Tokens that the model sees at once; as many as it has positions unless given.",
)  # fmt: skip


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse nan and infinity, which no bound of a range catches."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("it must be a finite number.")
    return value


def _count(name: str, default: int, text: str) -> Callable[[_F], _F]:
    return click.option(name, type=click.IntRange(min=1), default=default, show_default=True, help=text)


def _model_and_sampling(max_new_tokens: int) -> Callable[[_F], _F]:
    """Add the options that both commands have; the argument is the default of the first."""
    options = (
        _count("--max-new-tokens", max_new_tokens, "Maximum number of tokens to generate."),
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


def _loaded(checkpoint: str, options: Mapping[str, Any], samples: int = 1) -> tuple[LoadedModel, Sampling]:
    check_torch_folder()
    from nxdt_core.train.generate import load_model
    from nxdt_core.train.sampling import Sampling

    settings = {field.name: options[field.name] for field in fields(Sampling) if field.name in options}
    loaded = load_model(checkpoint, **{name: options[name] for name in ("base", "config", "trusted", "window")})
    return loaded, Sampling(**settings, samples=samples)


@verb(
    f'nxdt generate {_RUN} "In the beginning"',
    f'nxdt generate {_RUN} "In the beginning" --temperature 0.8 --top-k 50 --seed 7',
    'nxdt generate nxdt_experiments/llama-tiny-sft/checkpoints "When are you open?" --chat',
    f"nxdt generate {_RUN} --prompts prompts.jsonl --batch-size 16 > completions.jsonl",
)
@click.argument("checkpoint")
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE", help="Prompts to continue; prints JSON lines.")
@click.option("--chat", is_flag=True, help="Apply the chat template to prompts, and print the answers.")
@_count("--samples", 1, "Continuations per prompt.")
@_count("--batch-size", 8, "Prompts per batch.")
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
    **options: Any,
) -> None:
    """Continue PROMPT, or the prompts of a file, with the model of CHECKPOINT.

    CHECKPOINT is the directory of a run or a checkpoint.uri, whose newest complete step is used; one step of it, or
    `best` in its place; a Hugging Face directory, or hf:owner/name of its hub; or an adapter that peft wrote. The model
    and its tokenizer are built from the configuration that is found there, or from --config.

    FILE is text with a prompt per line, or JSONL, JSON, Arrow or Parquet with records that have a `prompt`, which is a
    text or a list of messages, or `messages`. The records are printed as JSON lines, each with its `completion`; with
    several samples, `completions`.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("Give a PROMPT, or a file with --prompts.")
    from nxdt_core.train.generate import prompts_in

    records = [] if prompts is None else list(prompts_in(Path(prompts)))
    loaded, sampling = _loaded(checkpoint, options, samples)
    if prompt is None:
        ids = [
            loaded.prompt(_turn(content) if chat and isinstance(content, str) else content, place)
            for place, _, content in records
        ]
        for (_, record, _), texts in zip(records, loaded.writer.texts(ids, sampling, batch=batch_size), strict=True):
            written = {"completion": texts[0]} if samples == 1 else {"completions": texts}
            say(json.dumps({**record, **written}, ensure_ascii=False))
        return
    prompt_ids = loaded.prompt(_turn(prompt) if chat else prompt)
    if not json_output and samples == 1:
        _print_pieces(loaded.writer.pieces(prompt_ids, sampling), "" if chat else prompt)
        return
    (texts,) = loaded.writer.texts([prompt_ids], sampling)
    if json_output:
        several = {"completions": texts} if samples > 1 else {}
        print_json({"checkpoint": checkpoint, "prompt": prompt, "completion": texts[0], **several})
        return
    for text in texts:
        _print_pieces(iter([text]), "" if chat else prompt)


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _print_pieces(pieces: Iterator[str], before: str, written: list[str] | None = None) -> None:
    """Print ``before`` and the pieces as they come, and add these to ``written``. Ctrl-C is the caller's."""
    shown = visible if sys.stdout.isatty() else str  # a file gets what the model says
    first = next(pieces, "")  # only then what is before, so that an error comes before any text
    click.echo(before, nl=False)
    for piece in chain([first], pieces):
        if written is not None:
            written.append(piece)
        click.echo(shown(piece), nl=False)
    click.echo()


@verb(
    "nxdt chat nxdt_experiments/llama-tiny-sft",
    'nxdt chat nxdt_experiments/llama-tiny-sft --system "Answer in one sentence." --temperature 0.7 --top-p 0.9',
)
@click.argument("checkpoint")
@click.option("--system", metavar="TEXT", help="System prompt.")
@_model_and_sampling(512)
def chat(checkpoint: str, system: str | None, **options: Any) -> None:
    """Answer each line of standard input with the model of CHECKPOINT, by its chat template.

    CHECKPOINT is what nxdt generate takes. The model sees all earlier turns. Ctrl-C ends an answer; /reset forgets the
    turns; /exit or Ctrl-D ends the session.
    """
    loaded, sampling = _loaded(checkpoint, options)
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
            written: list[str] = []
            pieces = loaded.writer.pieces(loaded.prompt([*turns, *_turn(line)]), sampling)
            try:
                _print_pieces(pieces, "", written)
            except KeyboardInterrupt:  # ends the answer
                click.echo()
            if answer := "".join(written).strip():
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


@verb(
    f"nxdt evaluate {_SFT_RUN} held-out.jsonl --limit 50 --show 3",
    f"nxdt evaluate {_SFT_RUN} held-out.jsonl --json",
    f"nxdt evaluate {_SFT_RUN} --task hellaswag --limit 100",
)
@click.argument("checkpoint")
@click.argument("files", nargs=-1)
@click.option("--task", "tasks", multiple=True, help="Task of an installed suite; may be given several times.")
@click.option("--suite", metavar="NAME", help="Suite that has the tasks, where several are installed.")
@click.option("--task-path", type=click.Path(exists=True, file_okay=False), help="Directory with your own tasks.")
@click.option("--limit", type=click.IntRange(min=1), help="Records to take of the files, and of each task.")
@_count("--max-new-tokens", 128, "Maximum number of tokens per answer.")
@_count("--batch-size", 8, "Questions per batch.")
@click.option("--show", type=click.IntRange(min=0), default=0, show_default=True, help="Answers to print.")
@window_option
@click.option("--base", metavar="URI", help="Weights below an adapter, if they have moved since its run.")
@named_config
@trusted_keys
@as_json
def evaluate(
    checkpoint: str,
    files: tuple[str, ...],
    tasks: tuple[str, ...],
    suite: str | None,
    task_path: str | None,
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    show: int,
    json_output: bool,
    **options: Any,
) -> None:
    """Evaluate the model of CHECKPOINT on the records of FILES and on tasks.

    FILES hold conversations, as training takes them, whose last message is the wanted answer; or texts, `prompt` and
    `answer`. They are JSONL, JSON, Arrow or Parquet.
    Fields that nothing uses are counted, or refused where the run had `data.unused_fields: refuse`.
    The most likely answer is compared: share of exact matches, and what plugins measure, such as ROUGE. Tasks are those
    of an installed suite, such as lm-evaluation-harness (nxdt-plugin-evaluate).
    """
    check_torch_folder()
    from nxdt_core.train.generate import evaluate as ask
    from nxdt_core.train.generate import load_model, metrics, questions, scores
    from nxdt_core.train.sampling import Sampling

    if not files and not tasks:
        raise NothingToJudge(found="neither files nor tasks are named")
    kernel = Kernel.start()
    chosen = None
    if tasks:  # unknown ones are refused before a model is loaded
        offers = kernel.registry.all("task")
        if suite is None and offers:
            component = kernel.registry.choose("task", " ".join(tasks), offers)
        else:
            component = kernel.registry.get("task", suite or "lm-eval")
        chosen = component.load_class(TaskSuite)(tasks, task_path)
    measures = metrics(kernel) if files else []
    loaded = load_model(checkpoint, **options)
    results: dict[str, Any] = {"step": loaded.step}
    if files:
        unused = UnusedFields(loaded.chat_keys.unused_fields)
        asked = list(questions(files, loaded.tokenizer, loaded.chat_keys, limit=limit, unused=unused))
        answers: list[str] = []
        for answer in ask(loaded, asked, Sampling(max_new_tokens=max_new_tokens), batch=batch_size):
            question = asked[len(answers)]
            answers.append(answer)
            if len(answers) <= show and not json_output:
                say(f"{question.place}\n  wanted: {question.wanted}\n  given:  {answer}")
        wanted = [question.wanted for question in asked]
        results |= {"records": len(answers), "unused": unused.counts, **scores(wanted, answers, measures)}
    if chosen is not None:
        results["tasks"] = chosen.run(loaded, limit=limit)
    if json_output:
        say(json.dumps(results))
        return
    values = {name: value for name, value in results.items() if not isinstance(value, dict)}
    for name, value in values.items():
        say(f"{name + ':':<14}{f'{value:.4f}' if isinstance(value, float) else value}")
    if results.get("unused"):
        say(f"{'unused:':<14}{describe_unused(results['unused'])}")
    for task, figures in results.get("tasks", {}).items():
        for name, value in figures.items():
            if isinstance(value, float):
                say(f"{task}: {name.partition(',')[0]} {value:.4f}")
