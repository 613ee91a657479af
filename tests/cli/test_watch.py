"""``nxdt watch`` and its server, with clients that are silent or go away, and directories that go away and return."""

import http.client
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from nxdt_core.system.http_server import Handler, Server
from tests import processes
from tests.processes import take_interrupts


@contextmanager
def served(hurry=1):
    """A server in this process, which waits ``hurry`` times shorter for slow clients; yields its port, and the set of
    the threads that answer clients."""
    answering = set()

    class Large(Handler):
        def handle(self):
            answering.add(threading.current_thread())
            super().handle()

        def respond(self):
            if self.path == "/bug":
                raise ZeroDivisionError
            # More than the buffers of a connection hold.
            self.answer(200, "text/plain", "a" * 20_000_000 if self.path == "/large" else "answer")

    Large.timeout = Handler.timeout / hurry
    server = Server("127.0.0.1", 0, Large)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, answering
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port, path="/", method="GET", host="localhost"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def opened(port, request=b""):
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(request)
    return client


def go_away(client):
    """Close a connection as a process that was killed does: what is still on its way meets a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


LARGE = b"GET /large HTTP/1.0\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("request_", [b"", b"GET / HT", LARGE], ids=("silent", "half a request", "reads no answer"))
def test_a_connection_that_stands_still_is_ended(request_, capsys):
    with served(hurry=20) as (port, answering), opened(port, request_) as client:
        until = time.monotonic() + 20
        while not answering or any(thread.is_alive() for thread in answering):
            assert time.monotonic() < until
            time.sleep(0.01)
        client.settimeout(20)
        while client.recv(1 << 20):  # what was sent, and then the end
            pass
    assert capsys.readouterr().err == ""


def test_clients_that_go_away_print_nothing(capsys):
    with served() as (port, _):
        for request in (b"", LARGE, LARGE, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"):
            go_away(opened(port, request))
        assert ask(port)[2] == "answer"
    assert capsys.readouterr().err == ""


def test_many_silent_connections_take_few_threads_and_stop_no_one(capsys):
    with served() as (port, answering), ExitStack() as clients:
        for _ in range(200):
            clients.enter_context(opened(port))
        assert ask(port)[2] == "answer"
        assert 1 < sum(thread.is_alive() for thread in answering) <= 40
    assert capsys.readouterr().err == ""


def test_a_client_that_an_interrupt_closes_prints_nothing(capsys):
    """Ctrl-C between the start of a client's thread and its first line closes the connection of the client."""
    server = Server("127.0.0.1", 0, Handler)
    ours, _ = socket.socketpair()
    ours.close()
    server.process_request_thread(ours, ("127.0.0.1", 1))
    server.server_close()
    assert capsys.readouterr().err == ""


def test_a_fault_of_the_program_keeps_its_traceback(capsys):
    with served() as (port, _), opened(port, LARGE.replace(b"large", b"bug")) as client:
        assert client.recv(1) == b""
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_no_answer_is_guessed_to_be_a_page(capsys):
    with served() as (port, _):
        for method, path, host in (("GET", "/", "x.example"), ("POST", "/<b>", "localhost"), ("<b>", "/", "localhost")):
            status, headers, _ = ask(port, path, method, host)
            assert (status, headers["X-Content-Type-Options"]) == (403 if host == "x.example" else 501, "nosniff")
            assert headers["Content-Type"].startswith("text/plain")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("[::1]", 200),
        ("", 403), ("localhost.example:80", 403), ("127.0.0.1.example", 403), ("localhost:x", 403),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host, status):
    with served() as (port, _):
        assert ask(port, host=host)[0] == status


def test_watch_says_which_directory_is_gone_and_recovers(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("trainer:\n  max_steps: 5<img src=x>\n")
    (run / "metrics.jsonl").write_text('{"step":1,"loss":-1.7e308}\n{"step":2,"loss":1.7e308}\n')
    command = [sys.executable, "-m", "nxdt_core", "watch", "run", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.Popen(command, cwd=tmp_path, text=True, preexec_fn=take_interrupts, **pipes) as server:
        timer = threading.Timer(60, server.kill)
        timer.start()
        try:
            port = int(re.search(r"127\.0\.0\.1:(\d+)/", server.stdout.readline())[1])
            status, headers, text = ask(port)
            assert (status, ">2 of 5&lt;img" in text) == (200, True)
            policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1].replace("&#x27;", "'")
            assert headers["Content-Security-Policy"] == f"{policy}; frame-ancestors 'none'"
            shutil.move(run, tmp_path / "away")
            status, _, text = ask(port)
            assert (status, "NXDT-T080" in text, 'http-equiv="refresh"' in text) == (503, True, True)
            shutil.move(tmp_path / "away", run)
            assert ask(port)[0] == 200
            go_away(opened(port, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"))
        finally:
            server.send_signal(signal.SIGINT)
            said = server.communicate()[1]
            timer.cancel()
    assert (server.returncode, "Traceback" in said) == (130, False), said
