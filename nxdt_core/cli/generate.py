"""``nxdt generate``: see what a model has learned."""

from __future__ import annotations

import math
import sys

import click

from nxdt_core.cli.checkpoint.store import named_config, trusted_keys
from nxdt_core.cli.verb import Verb, as_json, print_json
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.visible_text import visible

_RUN = "nxdt_experiments/llama-tiny/checkpoints"


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse nan and infinity, which no bound of a range catches."""
    if not math.isfinite(value):
        raise click.BadParameter("it must be a finite number.")
    return value


@click.command(
    cls=Verb,
    short_help="Continue a prompt with a checkpoint.",
    examples=(
        f'nxdt generate {_RUN} "In the beginning"',
        f'nxdt generate {_RUN} "In the beginning" --temperature 0.8 --top-k 50 --seed 7',
        'nxdt generate nxdt_experiments/llama-tiny-sft/checkpoints "How do I boil an egg?" --chat',
    ),
)
@click.argument("checkpoint")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="PROMPT is a question: print the answer, by the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens to add.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    callback=_finite,
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token each time; 1 samples as the model says.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among the K likeliest tokens only.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the sampling.")
@click.option("--base", metavar="URI", help="Weights below an adapter, if they have moved since its run.")
@named_config
@trusted_keys
@as_json
def generate(
    checkpoint: str,
    prompt: str,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    base: str | None,
    config: str | None,
    trusted: tuple[str, ...],
    json_output: bool,
) -> None:
    """Continue PROMPT with the model of CHECKPOINT.

    CHECKPOINT is a checkpoint.uri, of which the newest step that is whole is taken, or one step of it. The
    model and its tokenizer are built from the configuration that the checkpoint keeps, or from --config.
    """
    check_torch_folder()
    from nxdt_core.train.generate import generate as continue_prompt

    pieces = continue_prompt(
        checkpoint,
        prompt,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        base=base,
        config=config,
        trusted=trusted,
    )
    if json_output:
        print_json({"checkpoint": checkpoint, "prompt": prompt, "completion": "".join(pieces)})
        return
    shown = visible if sys.stdout.isatty() else str  # a file gets what the model says
    first = next(pieces, "")  # only then the prompt, so that an error comes before any text
    click.echo(("" if chat else prompt) + shown(first), nl=False)
    for piece in pieces:
        click.echo(shown(piece), nl=False)
    click.echo()
