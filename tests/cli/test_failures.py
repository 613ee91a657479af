"""What becomes of mistakes, bugs, closed pipes and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

from tests import processes

COMMAND = """
from nxdt_core.api import CliCommand, hookimpl

@hookimpl
def nxdt_cli():
    return [CliCommand(name="misbehave", target="acme_commands:misbehave", summary="Do what a test asks for.")]
"""

BODY = """
import atexit, time, click
from nxdt_core.errors.plugins import UnknownPlugin

@click.command()
@click.argument("what")
def misbehave(what):
    if what == "mistake":
        raise UnknownPlugin(name="x", available=("y",))
    if what == "bug":
        raise RuntimeError("a bug")
    if what == "flood":
        for _ in range(100_000):
            click.echo("a line of output")
    if what == "sleep":
        click.echo("sleeping", err=True)
        time.sleep(60)
    if what == "linger":
        atexit.register(time.sleep, 60)
        click.echo("sleeping", err=True)
        time.sleep(60)
    if what == "leave":
        raise SystemExit(5)
    if what == "exit":
        click.get_current_context().exit(7)
"""


def test_a_mistake_is_two_sentences_and_status_2(nxdt, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    done = nxdt("misbehave", "mistake")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "[NXDT-K020] No plugin or distribution is called 'x'.",
        "  Installed are 'y'; 'nxdt plugins list' says more of them.",
        "  More: nxdt explain NXDT-K020",
    ]


def test_a_bug_keeps_its_traceback_and_status_1(nxdt, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    done = nxdt("misbehave", "bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: a bug" in done.stderr


def test_a_command_may_choose_its_status(nxdt, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    assert nxdt("misbehave", "exit").returncode == 7
    assert nxdt("misbehave", "leave").returncode == 5


def test_usage_errors_have_status_2_and_no_traceback(nxdt):
    for args in (["trian"], ["train"], ["plugins", "list", "--jsno"], ["generate", "x", "y", "--temperature", "hot"]):
        done = nxdt(*args)
        assert done.returncode == 2, args
        assert "Usage: nxdt" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_misspelt_command_gets_a_suggestion(nxdt):
    assert "Did you mean 'train'?" in nxdt("trian").stderr
    assert "Did you mean 'verify'?" in nxdt("plugins", "verfy").stderr
    assert "Did you mean 'diff'?" in nxdt("checkpoint", "compare").stderr


def test_a_command_of_a_plugin_that_is_not_installed_says_which_to_install(nxdt):
    done = nxdt("checkpoint", "export-lora", "a", "b", uninstalled=("nxdt-plugin-lora",))
    assert done.returncode == 2
    assert "No such command 'export-lora'. Install it: pip install nxdt-plugin-lora" in " ".join(done.stderr.split())
    assert "Did you mean 'train'?" in nxdt("trian", uninstalled=("nxdt-plugin-lora",)).stderr


def test_a_reader_that_goes_away_is_no_error(site, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    child = _child(site, "flood", stdout=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 1


def test_a_pipe_that_closed_before_a_short_answer_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "nxdt_core", "--version"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")


def test_ctrl_c_ends_a_command_without_a_traceback(site, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    child = _child(site, "sleep")
    assert child.stderr.readline() == b"sleeping\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.stderr.read().split() == [b"Interrupted."]
    assert child.wait(timeout=60) == 130


def test_another_ctrl_c_ends_what_still_runs_at_once(site, dist):
    dist("acme", COMMAND, acme_commands=BODY)
    child = _child(site, "linger")
    assert child.stderr.readline() == b"sleeping\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    while not (line := child.stderr.readline()).strip():
        pass
    assert line == b"Interrupted.\n"
    child.send_signal(signal.SIGINT)
    assert child.stderr.read() == b"", "no traceback"
    assert child.wait(timeout=30) == -signal.SIGINT


def _child(site, what, **options):
    return processes.Popen(
        [sys.executable, "-m", "nxdt_core", "misbehave", what],
        env={**os.environ, "PYTHONPATH": str(site)},
        stderr=subprocess.PIPE,
        preexec_fn=processes.take_interrupts,
        **options,
    )
