"""``nxdt evaluate``: judge a checkpoint by what it answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.checkpoint.store import named_config, trusted_keys
from nxdt_core.cli.generate import window_option
from nxdt_core.cli.verb import Verb, say
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.protocols.evaluation import TaskSuite

if TYPE_CHECKING:
    from nxdt_core.kernel import Kernel
    from nxdt_core.protocols.evaluation import Metric
    from nxdt_core.train.generate import LoadedModel


_RUN = "nxdt_experiments/llama-tiny-sft/checkpoints"


@click.command(
    cls=Verb,
    examples=(
        f"nxdt evaluate {_RUN} held-out.jsonl --limit 50 --show 3",
        f"nxdt evaluate {_RUN} held-out.jsonl --json",
        f"nxdt evaluate {_RUN} --task hellaswag --limit 100",
    ),
)
@click.argument("checkpoint")
@click.argument("files", nargs=-1)
@click.option("--task", "tasks", multiple=True, help="Task of an installed suite; may be given several times.")
@click.option("--suite", metavar="NAME", help="Suite that has the tasks, where several are installed.")
@click.option("--task-path", type=click.Path(exists=True, file_okay=False), help="Directory with your own tasks.")
@click.option("--limit", type=click.IntRange(min=1), help="Records to take of the files, and of each task.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Maximum number of tokens per answer.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Questions per batch.")
@click.option("--show", type=click.IntRange(min=0), default=0, show_default=True, help="Answers to print.")
@window_option
@click.option("--base", metavar="URI", help="Weights below an adapter, if they have moved since its run.")
@named_config
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    window: int | None,
    base: str | None,
    config: str | None,
    trusted: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate the model of CHECKPOINT on the records of FILES and on tasks.

    FILES hold conversations, as training takes them, whose last message is the wanted answer; or texts, `prompt` and
    `answer`. They are JSONL, JSON, Arrow or Parquet.
    Fields that nothing uses are counted, or refused where the run had `data.unused_fields: refuse`.
    The most likely answer is compared: share of exact matches, and what plugins measure, such as ROUGE. Tasks are those
    of an installed suite, such as lm-evaluation-harness (nxdt-plugin-evaluate).
    """
    from nxdt_core.errors.evaluation import NothingToJudge

    check_torch_folder()
    from nxdt_core.kernel import Kernel
    from nxdt_core.train.evaluate import metrics
    from nxdt_core.train.generate import load_model

    if not files and not tasks:
        raise NothingToJudge(found="neither files nor tasks are named")
    kernel = Kernel.start()
    chosen = _suite(kernel, suite, tasks, task_path) if tasks else None
    measures = metrics(kernel) if files else []
    loaded = load_model(checkpoint, base=base, config=config, trusted=trusted, window=window)
    found: dict[str, Any] = {"step": loaded.step}
    if files:
        found |= _records(
            loaded,
            files,
            measures,
            limit=limit,
            max_new_tokens=max_new_tokens,
            batch=batch_size,
            show=0 if as_json else show,
        )
    if chosen is not None:
        found["tasks"] = chosen.run(loaded, limit=limit)
    say(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _records(
    loaded: LoadedModel,
    files: tuple[str, ...],
    measures: list[Metric],
    *,
    limit: int | None,
    max_new_tokens: int,
    batch: int,
    show: int,
) -> dict[str, Any]:
    from nxdt_core.data.files.records import UnusedFields
    from nxdt_core.train.evaluate import evaluate as ask
    from nxdt_core.train.evaluate import questions, scores
    from nxdt_core.train.sampling import Sampling

    unused = UnusedFields(loaded.chat_keys.unused_fields)
    asked = list(questions(files, loaded.tokenizer, loaded.chat_keys, limit=limit, unused=unused))
    answers = []
    for answer in ask(loaded, asked, Sampling(max_new_tokens=max_new_tokens), batch=batch):
        answers.append(answer)
        if len(answers) <= show:
            say(f"{answer.question.place}\n  wanted: {answer.question.wanted}\n  given:  {answer.given}")
    return {"records": len(answers), "unused": unused.counts, **scores(answers, measures)}


def _suite(kernel: Kernel, name: str | None, tasks: tuple[str, ...], path: str | None) -> TaskSuite:
    """Return the suite with the tasks; unknown tasks are refused before a model is loaded."""
    offers = kernel.registry.all("task")
    if name is None and offers:
        component = kernel.registry.choose("task", " ".join(tasks), offers)
    else:
        component = kernel.registry.get("task", name or "lm-eval")
    return component.load_class(TaskSuite)(tasks, path)


def _lines(found: dict[str, Any]) -> list[str]:
    from nxdt_core.data.files.records import describe_unused

    lines = [f"{name + ':':<14}{_shown(value)}" for name, value in found.items() if not isinstance(value, dict)]
    if found.get("unused"):
        lines.append(f"{'unused:':<14}{describe_unused(found['unused'])}")
    for task, figures in found.get("tasks", {}).items():
        named = {name: value for name, value in figures.items() if isinstance(value, float)}
        lines += [f"{task}: {name.partition(',')[0]} {value:.4f}" for name, value in named.items()]
    return lines


def _shown(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
