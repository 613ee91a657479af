"""Completion in real shells on a terminal, zsh and fish where they are installed; the manual page."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxdt_core.cli.app import COMMANDS

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(nxdt completion bash)"),
    "zsh": (["zsh", "-f", "-i"], "nxdt completion zsh > _nxdt; fpath=($PWD $fpath); autoload -U compinit; compinit -u"),
    "fish": (["fish", "--no-config", "-i"], "nxdt completion fish | source"),
}
"""Shell → its command, and the line that loads the script."""


@pytest.fixture
def shell(work, request):
    """An interactive shell that has loaded the script: ``shell(typed, wanted)`` types, and waits for ``wanted``."""
    command, load = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed, in which its script would complete")
    (work / "nxdt").write_text(f'#!/bin/sh\nexec {sys.executable} -m nxdt_core "$@"\n')
    (work / "nxdt").chmod(0o755)
    environment = {"PATH": f"{work}:{os.environ['PATH']}", "PS1": "> ", "TERM": "dumb", "HOME": str(work)}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(work)
        os.execvpe(command[0], command, environment)
    seen = [""]

    def wait_for(wanted, seconds=120.0):
        end = time.monotonic() + seconds
        while wanted not in seen[0] and time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                seen[0] += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\a", "", os.read(terminal, 4096).decode())
        assert wanted in seen[0], seen[0]

    def typed(text, wanted):
        seen[0] = ""
        os.write(terminal, text.encode())
        wait_for(wanted)
        seen[0] = ""
        os.write(terminal, b"\x15\recho done-$(echo 2)\r")  # Ctrl-U empties the line
        wait_for("done-2")

    typed(f"{load}; echo sourced-$(echo 2)\r", "sourced-2")
    yield typed
    os.write(terminal, b"\x15exit\r")
    os.waitpid(child, 0)
    os.close(terminal)


@pytest.mark.slow  # the other tests ask for the same completions without a shell
@pytest.mark.parametrize("shell", SHELLS, indirect=True)
def test_shells_complete_commands_recipes_keys_and_components(shell):
    shell("nxdt tra\t", "train ")
    shell("nxdt train recipe:mixtral-ti\t", "recipe:mixtral-tiny ")
    shell("nxdt train recipe:llama-tiny trainer.max_st\t", "trainer.max_steps=")
    shell("nxdt train recipe:llama-tiny model.optim.name=adamw_fp\t", "model.optim.name=adamw_fp32OptState ")
    shell("nxdt recipes show mixtral-ti\t", "mixtral-tiny ")


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("nxdt config che", {"plain\tcheck"}),
        ("nxdt config check recipe:llama-tiny precision.type=mixed", {"plain\tprecision.type=mixed_precision"}),
        ("nxdt config check recipe:llama-tiny checkpoint.sign.", {"open\tcheckpoint.sign.key="}),
        ("nxdt config check recipe:llama-tiny model.ro", {"open\tmodel.rotary_percentage="}),
        (
            "nxdt config check recipe:llama-tiny trainer.enable_progress_bar=t",
            {"plain\ttrainer.enable_progress_bar=true"},
        ),
        ("nxdt plugins show llam", {"plain\tllama"}),
        ("nxdt config check x", {"files\tx"}),
        ("nxdt train --j", {"plain\t--json"}),
    ],
)
def test_what_may_follow(line, answers, nxdt):
    done = nxdt(COMP_LINE=line, _NXDT_COMPLETE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert answers <= set(done.stdout.splitlines())


def test_a_completion_imports_nothing_heavy(nxdt):
    line = "nxdt train recipe:llama-tiny model.optim.name="
    done = nxdt(COMP_LINE=line, _NXDT_COMPLETE="1", without=("torch", "numpy", "pytorch_lightning"))
    assert "plain\tmodel.optim.name=adamw" in done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(shell, nxdt, work):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed, which would check the syntax of its script")
    script = work / f"nxdt.{shell}"
    script.write_text(nxdt("completion", shell).stdout)
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_manual_page_has_every_command(nxdt, work):
    page = nxdt("man").stdout
    assert page.startswith('.TH NXDT 1 "" "nxdt ')
    for name in COMMANDS:
        assert re.search(rf"^\.SS nxdt {name}\b", page, flags=re.MULTILINE), name
    assert ".B FORCE_COLOR" in page
    if shutil.which("man") is None or shutil.which("groff") is None:
        return
    Path(work / "nxdt.1").write_text(page)
    command = ["man", "--warnings", "-l", str(work / "nxdt.1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "MANWIDTH": "80"})
    assert done.returncode == 0
    assert "warning" not in done.stderr
    assert "nxdt train [OPTIONS] CONFIG [KEY=VALUE]..." in done.stdout
