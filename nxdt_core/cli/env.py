"""``nxdt env``: devices, versions, drivers and backends of this machine, and whether it can run a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.terminal import human_size, print_facts, print_table
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from nxdt_core.kernel import Kernel
    from nxdt_core.run.environment import Device, Environment


@click.command(
    cls=Verb,
    examples=("nxdt env", "nxdt env my_run.yaml trainer.devices=8", "nxdt env recipe:llama3-8b-trn2 --json"),
)
@click.argument("source", metavar="[CONFIG]", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@as_json
@click.pass_context
def env(ctx: click.Context, source: str | None, overrides: tuple[str, ...], json_output: bool) -> None:
    """Show what this machine has: devices, versions of packages, drivers, compilers, plugins with their digests.

    The output is made for bug reports: it has no configuration, no environment variables and no secrets.

    With CONFIG it also says whether one node of that run could start here, and what is missing. Nothing is
    started or changed. Exit status 1 where the run could not start, or a package cannot be used.
    """
    config = None
    if source is not None:
        from nxdt_core.config import load

        config = load(source, overrides)
    from nxdt_core.config.secrets import hide_secrets
    from nxdt_core.kernel import Kernel
    from nxdt_core.run.environment import environment, problems_of_run

    kernel = Kernel.start() if config is None else config.kernel
    problems = [] if config is None else [*map(hide_secrets, problems_of_run(config))]
    found = environment()
    if json_output:
        run = None if source is None else {"config": source, "can_start": not problems, "problems": problems}
        own = {"plugins": _plugins(kernel), "fingerprint": kernel.fingerprint()}
        print_json({**found.to_dict(), "run": run, **own})
    else:
        _print(found, kernel)
        if source is not None:
            say("")
            say(f"{source}: {'cannot start here' if problems else 'can start here'}")
            for problem in problems:
                say(f"  {problem}")
    ctx.exit(1 if problems or any(package.problem for package in found.packages) else 0)


def _plugins(kernel: Kernel) -> list[dict[str, str | None]]:
    """Return each plugin that was found; one that is not used has no digest."""
    from nxdt_core.kernel.lock import digest_plugin

    return [
        {
            "name": plugin.name,
            "dist": plugin.dist,
            "version": plugin.version,
            "state": plugin.state,
            "digest": digest_plugin(plugin) if plugin.state == "ok" else None,
        }
        for plugin in kernel.plugins
    ]


def _print(found: Environment, kernel: Kernel) -> None:
    facts = [("host", found.host), ("system", found.system), ("python", found.python), ("auto", found.auto)]
    installed = [package for package in found.packages if package.version is not None]
    facts += [(package.name, f"{package.version}  {package.problem}".rstrip()) for package in installed]
    facts += [(name, value) for name, value in (*found.drivers.items(), *found.compilers.items())]
    facts.append(("plugins", kernel.fingerprint()))
    print_facts(facts)
    say("")
    header = ("DEVICE", "HERE", "NAME", "MEMORY", "PROCESS GROUPS", "COMPILER", "SHAPES")
    print_table(header, [_row(device) for device in found.devices], optional=("SHAPES", "COMPILER"))
    say("")
    rows = [tuple(value or "-" for value in plugin.values()) for plugin in _plugins(kernel)]
    print_table(("PLUGIN", "DIST", "VERSION", "STATE", "DIGEST"), rows, optional=("DIST",))


def _row(device: Device) -> tuple[str, ...]:
    here = "no" if not device.available else "yes" if device.count is None else str(device.count)
    return (
        device.type,
        here,
        device.name or "",
        "" if device.memory_bytes is None else human_size(device.memory_bytes),
        device.process_group_backend if device.backend_available else f"{device.process_group_backend} (missing)",
        device.compile_backend,
        "fixed" if device.static_shapes else "any",
    )
