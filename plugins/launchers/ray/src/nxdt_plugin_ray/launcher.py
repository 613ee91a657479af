"""Writes a driver for Ray, and the command that starts it."""

from __future__ import annotations

import json
import sys

from nxdt_core.protocols.launcher import Job, Launcher, Submission
from nxdt_plugin_ray.config import RayOptions

_DRIVER = '''\
"""Written by nxdt: {command_line}"""

import json
import sys

from nxdt_plugin_ray.driver import Work, main

WORK = json.loads({work!r})

if __name__ == "__main__":
    sys.exit(main(Work(**WORK)))
'''


class RayLauncher(Launcher):
    """Nodes as actors of Ray. Each calls ``nxdt train``, which starts the processes of its devices."""

    def submission(self, job: Job, options: RayOptions) -> Submission:
        """Return a driver."""
        commands = [list(words) for words in (job.compile, job.train) if words]
        bundle = {"CPU": options.cpus_per_node, "GPU": options.gpus_per_node, **options.resources}
        work = {
            "name": job.name,
            "commands": commands,
            "nodes": job.nodes,
            "address": options.address,
            "bundle": {name: amount for name, amount in bundle.items() if amount},
            "strategy": options.strategy,
            "environment": dict(options.environment),
            "directory": str(job.working_directory),
            "logs": str(job.directory / "logs"),
            "max_restarts": options.max_restarts,
        }
        text = _DRIVER.format(command_line=job.command_line, work=json.dumps(work))
        return Submission(files={"job.py": text}, command=(sys.executable, "job.py"))
