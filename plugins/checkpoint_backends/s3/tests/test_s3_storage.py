"""Memory, processes, what stays behind killed writers, and what objects are given."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import tracemalloc

import pytest
from nxdt_plugin_s3.storage import S3Storage

from tests import processes
from tests.s3_server import BUCKET, refuse_s3

PART = 5 * 2**20


def write(storage, data, key="a"):
    with storage.open_write(key) as stream:
        stream.write(data)


def read(storage, key="a"):
    with storage.open_read(key) as stream:
        return stream.read()


def uploads(s3_server, storage):
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    return s3_server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])


def peak_of(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_writing_and_reading_hold_few_parts(storage, config):
    """Eight of them pass; no copy of the whole is made on the way."""
    piece, count = os.urandom(2**20), 40
    read(storage, _written(storage, b"x"))  # the SDK's own memory is taken at the first use

    def write_all():
        with storage.open_write("a") as stream:
            for _ in range(count):
                stream.write(piece)

    def read_all():
        with storage.open_read("a") as stream:
            buffer = bytearray(2**20)
            for _ in range(count):
                stream.readinto(buffer)
                assert buffer == piece

    slack = 4 * 2**20
    assert peak_of(write_all) < (config.concurrency + 1) * PART + slack
    assert peak_of(read_all) < (config.concurrency + 2) * PART + slack


def _written(storage, data):
    write(storage, data, "small")
    return "small"


def test_a_small_object_takes_no_part(storage):
    _written(storage, b"x")
    assert peak_of(lambda: _written(storage, b"x" * 1000)) < PART


def test_buffers_come_back_and_never_carry_bytes_over(storage):
    """Objects of different lengths through the same buffers."""
    sizes = [3 * PART, PART + 1, 2 * PART - 1, 2 * PART, 1]
    for turn, size in enumerate(sizes):
        data = bytes([turn + 1]) * size
        write(storage, data)
        assert read(storage) == data


def test_many_writers_at_once_do_not_wait_for_each_other_for_ever(storage):
    """One thread holds more open writers than parts may be in transfer."""
    data = os.urandom(PART + 2**20)
    blocks = [storage.open_write(f"{number}") for number in range(5)]
    streams = [block.__enter__() for block in blocks]
    for start in range(0, len(data), 2**20):
        for stream in streams:
            stream.write(data[start : start + 2**20])
    for block in blocks:
        block.__exit__(None, None, None)
    assert all(read(storage, f"{number}") == data for number in range(5))


def test_many_open_readers_do_not_wait_for_each_other_for_ever(storage):
    data = os.urandom(2 * PART + 2**20)
    write(storage, data)
    blocks = [storage.open_read("a") for _ in range(5)]
    streams = [block.__enter__() for block in blocks]
    assert [stream.read() == data for stream in reversed(streams)] == [True] * 5
    for block in blocks:
        block.__exit__(None, None, None)


FORKING = """
    import os, sys
    from nxdt_plugin_s3.config import S3StorageConfig
    from nxdt_plugin_s3.storage import S3Storage

    storage = S3Storage(sys.argv[1], S3StorageConfig(endpoint_url=sys.argv[2], part_bytes=5 * 2**20, concurrency=2))

    def write(key):
        with storage.open_write(key) as stream:
            for _ in range(6):
                stream.write(key.encode() * 2**20)

    write("p")
    child = os.fork()
    write("c" if child == 0 else "q")
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_store_can_be_used_on_both_sides_of_a_fork(storage, config):
    """Connections and threads of the parent are not the child's."""
    command = [sys.executable, "-c", textwrap.dedent(FORKING), storage.uri, config.endpoint_url]
    processes.run(command, check=True, timeout=60)
    assert {info.key: read(storage, info.key) for info in storage.list()} == {
        key: key.encode() * 6 * 2**20 for key in ("p", "q", "c")
    }


KILLED = """
    import os, signal, sys, time
    from nxdt_plugin_s3.config import S3StorageConfig
    from nxdt_plugin_s3.storage import S3Storage

    storage = S3Storage(sys.argv[1], S3StorageConfig(endpoint_url=sys.argv[2], part_bytes=5 * 2**20, concurrency=1))
    with storage.open_write("step-1/ü b") as stream:
        for _ in range(4):
            stream.write(bytes(5 * 2**20))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_invisible_and_swept_once_it_is_old(storage, config, s3_server):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), storage.uri, config.endpoint_url]
    assert processes.run(command, timeout=60).returncode == -signal.SIGKILL
    neighbour = S3Storage(f"{storage.uri}-neighbour", config.changed(abandoned_after_s=-10))
    neighbour.after_commit("step-1/")
    storage.after_commit("step-1/")  # a day has not passed
    assert list(storage.list()) == []
    assert len(uploads(s3_server, storage)) == 1
    S3Storage(storage.uri, config.changed(abandoned_after_s=-10)).after_commit("step-2/")  # times are whole seconds
    assert uploads(s3_server, storage) == []


def test_a_sweep_that_fails_does_not_fail_the_commit(behind, proxy, caplog):
    proxy.inject(refuse_s3(403, "AccessDenied"), times=None)
    behind().after_commit("step-1/")
    assert "are left for now" in caplog.text


@pytest.mark.parametrize("size", [10, 2 * PART], ids=["one request", "parts"])
def test_objects_get_their_encryption_and_class(behind, proxy, size):
    settings = {
        "server_side_encryption": "aws:kms",
        "kms_key_id": "arn:aws:kms:us-east-1:1:key/a",
        "storage_class": "STANDARD_IA",
    }
    wanted = {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:us-east-1:1:key/a",
        "x-amz-storage-class": "STANDARD_IA",
    }
    proxy.inject(refuse_s3(400, "Stop"), times=None)
    for use in (lambda store: write(store, bytes(size)), lambda store: store.put_if_absent("b", b"")):
        proxy.clear()
        proxy.inject(refuse_s3(400, "Stop"), times=None)
        with pytest.raises(Exception, match="NXDT-S109"):
            use(behind(**settings))
        assert wanted.items() <= proxy.requests[0].headers.items()


def test_folders_that_consoles_make_are_no_objects(storage, s3_server):
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    for name in (f"{prefix}/", f"{prefix}/step-1/"):
        s3_server.client().put_object(Bucket=BUCKET, Key=name, Body=b"")
    write(storage, b"x", "step-1/a")
    assert [info.key for info in storage.list()] == ["step-1/a"]


def test_a_store_at_the_root_of_a_bucket(s3_server, s3_credentials, config):
    s3_server.client().create_bucket(Bucket="whole-bucket")
    storage = S3Storage("s3://whole-bucket", config)
    write(storage, b"x", "step-1/a")
    assert [info.key for info in storage.list()] == ["step-1/a"]
    assert read(storage, "step-1/a") == b"x"


def test_training_s_random_numbers_stay_as_they_are(behind, proxy):
    """Waits are drawn too; a run that resumes bit for bit must not see it."""
    random.seed(7)
    state = random.getstate()
    proxy.inject(refuse_s3(500, "InternalError"), times=3)
    write(behind(), b"x")
    assert random.getstate() == state


def test_the_sdk_without_awscrt_has_checksums_too(behind, proxy, monkeypatch):
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    write(behind(), b"x")
    assert "x-amz-checksum-crc32" in proxy.requests[0].headers
    with pytest.raises(Exception, match=r"NXDT-S113.*crc32c") as caught:
        write(behind(checksum="crc32c"), b"x")
    assert "nxdt-plugin-s3[crt]" in str(caught.value)


def test_entry_module_and_config_need_neither_the_sdk_nor_torch():
    program = """
import sys
sys.modules.update(torch=None, numpy=None, boto3=None, botocore=None)
import nxdt_plugin_s3, nxdt_plugin_s3.config
print(nxdt_plugin_s3.nxdt_stores()[0].uri_schemes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "('s3',)\n"


def test_the_store_needs_no_torch():
    program = "import sys; sys.modules.update(torch=None, numpy=None); import nxdt_plugin_s3.storage"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_object_is_encrypted_and_classed_as_configured(behind, proxy, storage, s3_server):
    """By the server's own word; parts are read back as they were written."""
    other = behind(server_side_encryption="AES256", storage_class="STANDARD_IA")
    large = random.Random(0).randbytes(12 * 2**20)
    for key, data in (("small", b"x"), ("large", large)):
        with other.open_write(key) as stream:
            stream.write(data)
    assert other.put_if_absent("new", b"x")
    assert other.put_if_match("new", b"y", b"x")
    begun = [request for request in proxy.requests if "x-amz-storage-class" in request.headers]
    assert [request.method for request in begun] == ["PUT", "POST", "PUT", "PUT"]
    for key, data in (("small", b"x"), ("large", large), ("new", b"y")):
        name = f"{storage.uri.removeprefix(f's3://{BUCKET}/')}/{key}"
        found = s3_server.client().head_object(Bucket=BUCKET, Key=name)
        assert (found["ServerSideEncryption"], found["StorageClass"]) == ("AES256", "STANDARD_IA")
        with storage.open_read(key) as stream:
            assert stream.read() == data
