"""Forked processes do what new interpreters do: each case runs in both, by default in a fork."""

import json
import locale
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from nxdt_testing.ranks import RankPool

from tests import processes
from tests.distributions import write_distribution

PLUGIN = """
from nxdt_core.api import CliCommand, hookimpl

@hookimpl
def nxdt_cli():
    return [CliCommand(name="act", target="acme_act:act", summary="Do what a test asks for.")]
"""
ACT = """
import json, locale, os, signal, subprocess, sys, tempfile, threading, time
import click

@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("what")
@click.argument("more", nargs=-1)
def act(what, more):
    if what == "describe":
        both = sys.stdout, sys.stderr
        streams = [(each.encoding, each.errors, each.line_buffering, each.isatty()) for each in both]
        print(json.dumps({
            "argv": sys.argv[1:],
            "orig_argv": sys.orig_argv,
            "executable": sys.executable,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "path": sys.path,
            "temporary": tempfile.gettempdir(),
            "parent": os.getppid(),
            "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
            "umask": os.umask(0),
            "threads": threading.active_count(),
            "locale": locale.getpreferredencoding(False),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "streams": streams,
            "read": sys.stdin.read(),
            "marked": getattr(sys, "marked", None),
        }))
    elif what == "exit":
        sys.exit(json.loads(more[0]))
    elif what == "leave":
        import atexit
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    elif what == "wait":
        print("waiting", flush=True)
        time.sleep(600)
    elif what == "fail":
        raise ValueError("a made-up bug")
"""


@pytest.fixture(params=[pytest.param("new", marks=pytest.mark.slow), "forked"])
def popen(request):
    """Both classes; a new interpreter shows that what is expected of a fork is what Python does."""
    if request.param == "new":
        return subprocess.Popen
    if not processes.enabled():
        pytest.skip("this run starts new interpreters only")
    return processes.Popen


@pytest.fixture
def act(popen, tmp_path):
    """``act(words, …)`` starts ``nxdt act`` with these words."""
    site = tmp_path / "site"
    site.mkdir()
    write_distribution(site, "acme", plugins={"acme": "acme"}, files={"acme.py": PLUGIN, "acme_act.py": ACT})
    (site / "sitecustomize.py").write_text("import sys\nsys.marked = 'before the program'\n")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = {**inherited, "PYTHONPATH": str(site), "PLACE": "ä b"}

    def start(*words, **more):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "nxdt_core", "act", *words]
        return popen(command, text=True, env=environment, cwd=tmp_path, **pipes, **more)

    return start


def test_a_process_is_what_a_new_interpreter_is(act, popen, tmp_path):
    process = act("describe", "--word", "a b", start_new_session=True)
    out, err = process.communicate("typed")
    assert (process.returncode, err) == (0, "")
    said = json.loads(out)
    assert said.pop("environment")["PLACE"] == "ä b"
    assert said.pop("path")[:2] == [str(tmp_path), str(tmp_path / "site")]
    command = [sys.executable, "-m", "nxdt_core", "act", "describe", "--word", "a b"]
    umask = os.umask(0)
    os.umask(umask)
    assert said == {
        "argv": command[3:],
        "orig_argv": command,
        "executable": sys.executable,
        "directory": str(tmp_path),
        "temporary": tempfile.gettempdir(),
        "parent": os.getpid(),
        "leads": [True, True],
        "umask": umask,
        "threads": 1,
        "locale": locale.getpreferredencoding(False),
        "interrupt": popen is processes.Popen or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "streams": [["utf-8", "backslashreplace", False, False], ["utf-8", "backslashreplace", True, False]],
        "read": "typed",
        "marked": "before the program",
    }


SCRIPT = """
import json, os, pickle, sys
class Kept: pass
kept = type(pickle.loads(pickle.dumps(Kept()))).__name__
preloaded = "torch" in sys.modules
print(json.dumps([sys.argv, sys.orig_argv, sys.path[0], __name__, kept, os.getppid(), preloaded]))
sys.exit(4)
"""


@pytest.mark.parametrize("text", [False, True])
def test_a_script_is_what_a_new_interpreter_runs(popen, tmp_path, text):
    script = tmp_path / "own" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    first = "-c" if text else str(script)
    command = [sys.executable, "-u", *(["-c", SCRIPT] if text else [first]), "one", "-m"]
    process = popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    out, _ = process.communicate()
    *said, preloaded = json.loads(out)
    folder = "" if text else str(script.parent)
    assert said == [[first, "one", "-m"], command, folder, "__main__", "Kept", os.getpid()]
    assert preloaded == (popen is processes.Popen)
    assert process.returncode == 4


@pytest.mark.parametrize(("code", "status"), [("null", 0), ("7", 7), ("256", 0), ('"said"', 1)])
def test_its_status_is_the_programs(act, code, status):
    process = act("exit", code)
    _, err = process.communicate()
    assert (process.returncode, err) == (status, "said\n" if code == '"said"' else "")


def test_it_ends_after_its_threads_and_what_was_registered_for_the_end(act):
    assert act("leave").communicate() == ("thread\nat exit\n", "")


def test_a_bug_has_one_traceback(act):
    process = act("fail")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert err.endswith("\nValueError: a made-up bug\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_signals_reach_it(act, number, status):
    process = act("wait", preexec_fn=processes.take_interrupts)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    process.communicate()
    assert process.returncode == status


def test_a_variable_that_the_interpreter_reads_at_its_start_counts(popen, tmp_path):
    command = [sys.executable, "-m", "nxdt_core", "--version"]
    environment = {**os.environ, "PYTHONVERBOSE": "1"}
    process = popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate()
    assert out.startswith("nxdt ")
    assert "import 'site'" in err


def imports_of_rank():
    """Whether a server of tests has forked this process, and whether it has what the test runner imports."""
    return "nxdt_tests_processes" in sys.modules, "tests.processes" in sys.modules


@pytest.mark.skipif(not processes.enabled(), reason="nothing is forked under --samples=all")
def test_ranks_of_pools_come_from_the_server_of_the_commands():
    assert RankPool(2).run(imports_of_rank) == [(True, True)] * 2, "a rank imports the file of its function"
