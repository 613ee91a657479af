"""``nxdt env``: devices, versions, drivers and backends of this machine, and whether it can run a configuration."""

from __future__ import annotations

import click

from nxdt_core.cli.terminal import human_size, print_facts, print_table
from nxdt_core.cli.verb import as_json, attributes, print_json, say, verb
from nxdt_core.config import load
from nxdt_core.config.show import hide_secrets
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.lock import digest_plugin
from nxdt_core.run.environment import environment, problems_of_run


@verb("nxdt env", "nxdt env my_run.yaml trainer.devices=8", "nxdt env recipe:llama3-8b-trn2 --json")
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
    config = None if source is None else load(source, overrides)
    kernel = Kernel.start() if config is None else config.kernel
    problems = [] if config is None else [*map(hide_secrets, problems_of_run(config))]
    here = environment()
    plugins = [  # one that is not used has no digest
        {
            **attributes(plugin, "name", "dist", "version", "state"),
            "digest": digest_plugin(plugin) if plugin.state == "ok" else None,
        }
        for plugin in kernel.plugins
    ]
    if json_output:
        run = None if source is None else {"config": source, "can_start": not problems, "problems": problems}
        print_json({**here.to_dict(), "run": run, "plugins": plugins, "fingerprint": kernel.fingerprint()})
    else:
        facts = [("host", here.host), ("system", here.system), ("python", here.python), ("auto", here.auto)]
        installed = [package for package in here.packages if package.version is not None]
        facts += [(package.name, f"{package.version}  {package.problem}".rstrip()) for package in installed]
        print_facts([*facts, *here.drivers.items(), *here.compilers.items(), ("plugins", kernel.fingerprint())])
        say("")
        rows: list[tuple[str, ...]] = []
        for device in here.devices:
            missing = "" if device.backend_available else " (missing)"
            rows.append(
                (
                    device.type,
                    "no" if not device.available else "yes" if device.count is None else str(device.count),
                    device.name or "",
                    "" if device.memory_bytes is None else human_size(device.memory_bytes),
                    f"{device.process_group_backend}{missing}",
                    device.compile_backend,
                    "fixed" if device.static_shapes else "any",
                )
            )
        header = ("DEVICE", "HERE", "NAME", "MEMORY", "PROCESS GROUPS", "COMPILER", "SHAPES")
        print_table(header, rows, optional=("SHAPES", "COMPILER"))
        say("")
        rows = [tuple(value or "-" for value in plugin.values()) for plugin in plugins]
        print_table(("PLUGIN", "DIST", "VERSION", "STATE", "DIGEST"), rows, optional=("DIST",))
        if source is not None:
            say("")
            say(f"{source}: {'cannot start here' if problems else 'can start here'}")
            for problem in problems:
                say(f"  {problem}")
    ctx.exit(1 if problems or any(package.problem for package in here.packages) else 0)
