"""``nxdt sharding``: what tensor parallelism cuts of a model of transformers."""

from __future__ import annotations

import click

from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json


@click.command(
    cls=Verb,
    short_help="Show how tensor parallelism shards a model of transformers.",
    examples=(
        "nxdt sharding recipe:hf-tiny distributed_strategy.tensor_model_parallel_size=2",
        "nxdt sharding recipe:hf-tiny distributed_strategy.tensor_model_parallel_size=2 --json",
    ),
)
@config_arguments
@as_json
def sharding(source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Show which parameters of a model of transformers tensor parallelism shards, and which it replicates.

    CONFIG and KEY=VALUE are those of `nxdt train`, of a run with model.name=hf. The plan of the model is
    applied without memory: no device is needed.
    """
    from nxdt_core.config import load

    config = load(source, (*overrides, "model.name=hf"))
    tp = config.run.distributed_strategy.tensor_model_parallel_size
    from nxdt_core.protocols.engine import ParallelEngine
    from nxdt_core.train import build  # imports torch: only a configuration that is right pays for it
    from nxdt_plugin_hf.builder import HFBuilder, measure_sharding, unmatched_patterns
    from nxdt_plugin_hf.modeling import pattern_of

    builder = build.model_builder(config)
    assert isinstance(builder, HFBuilder)
    elements = measure_sharding(builder, tp, config.selected("engine").component.load_class(ParallelEngine))
    share = sum(local for _, local in elements.values()) / sum(size for size, _ in elements.values())
    names = {
        "cut": [name for name, (size, local) in elements.items() if local < size],
        "whole": [name for name, (size, local) in elements.items() if local >= size],
        "unmatched": unmatched_patterns(builder.architecture),
    }
    patterns = {title: list(dict.fromkeys(map(pattern_of, of_title))) for title, of_title in names.items()}
    model = builder.architecture.name
    if json_output:
        print_json({"model": model, "tensor_model_parallel_size": tp, "share": share, **patterns})
        return
    listed = {
        title: "".join(f"\n  {pattern}" for pattern in of_title) or " none" for title, of_title in patterns.items()
    }
    click.echo(f"{model} over {tp} tensor parallel ranks: each holds {100 * share:.1f} % of all weights.")
    click.echo(f"cut:{listed['cut']}")
    click.echo(f"whole on each rank:{listed['whole']}")
    if patterns["unmatched"]:
        click.echo(f"named by the plan and not in this model:{listed['unmatched']}")
