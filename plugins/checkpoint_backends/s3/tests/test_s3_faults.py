"""On the way to a real server everything goes wrong once, or for ever: what comes of it is right, or told in time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nxdt_core.errors.checkpoints import StorageError
from tests.http_faults import (
    flip_answer_bit,
    flip_request_bit,
    lose_answer,
    refuse,
    reset,
    stall,
    truncate,
)
from tests.s3_server import BUCKET, refuse_s3
from tests.sampling import slow, slow_except

PART = 5 * 2**20
LARGE = bytes(range(256)) * (8 * 2**20 // 256)
"""Two parts, or two ranges."""
PASSING = {
    "500": refuse_s3(500, "InternalError"),
    "503": refuse_s3(503, "SlowDown"),
    "503 without a body": refuse_s3(503, ""),
    "reset": reset,
    "lost answer": lose_answer,
    "timeout": stall(5),
}


def write(storage, data, key="a"):
    with storage.open_write(key) as stream:
        stream.write(data)


def read(storage, key="a", start=0, length=None):
    with storage.open_read(key, start, length) as stream:
        return stream.read()


def write_slowly(storage, pieces):
    with storage.open_write("a") as stream:
        for _ in pieces:
            stream.write(bytes(PART))
            time.sleep(0.01)


def write_and_raise(storage, error):
    with storage.open_write("a") as stream:
        stream.write(LARGE)
        raise error


def read_while(storage, action):
    with storage.open_read("a") as stream:
        stream.read(10)
        action()
        stream.read()


def is_part(request):
    return "partNumber=" in request.target


def is_completion(request):
    return request.method == "POST" and "uploadId=" in request.target


def unfinished(s3_server, storage):
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    return s3_server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])


@pytest.mark.parametrize("name", [slow("503"), "lost answer", slow("timeout")])
@pytest.mark.parametrize("request_number", range(4))
def test_each_request_of_a_large_write_may_fail_once(behind, proxy, storage, s3_server, name, request_number):
    """Begin, two parts, completion: the object is whole, and no upload is left but one whose id was never heard."""
    proxy.inject(PASSING[name], at=request_number)
    write(behind(read_timeout_s=1), LARGE)
    assert len(proxy.requests) > 4
    assert read(storage) == LARGE
    assert len(unfinished(s3_server, storage)) == (name == "lost answer" and request_number == 0)


FAULTS = {**PASSING, "truncated": truncate(10)}


@pytest.mark.parametrize("name", slow_except([*FAULTS], ("503", "lost answer", "truncated")))
def test_each_other_request_may_fail_once(behind, proxy, storage, name):
    other = behind(read_timeout_s=0.5)
    uses = {
        "small write": lambda: write(other, b"x", "a"),
        "stat": lambda: other.stat("a").size_bytes,
        "list": lambda: [info.key for info in other.list()],
        "read": lambda: read(other),
        "put": lambda: other.put_if_absent("b", b"y"),
        "put again": lambda: other.put_if_absent("b", b"z"),
        "replace": lambda: other.put_if_match("b", b"z", b"y"),
        "replace again": lambda: other.put_if_match("b", b"x", b"y"),
        "delete": lambda: other.delete_many(["a", "none"]),
    }
    results = {}
    for use, call in uses.items():
        proxy.inject(FAULTS[name])
        results[use] = call()
        proxy.clear()
    assert results == {
        "small write": None,
        "stat": 1,
        "list": ["a"],
        "read": b"x",
        "put": True,
        "put again": False,
        "replace": True,
        "replace again": False,
        "delete": None,
    }
    assert [(info.key, read(storage, info.key)) for info in storage.list()] == [("b", b"z")]


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("after", [slow(0), 1, slow(2 * 2**20)])
def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(behind, proxy, storage, number, after):
    """In the middle of a stream, in any of its ranges; what has arrived is not asked for again."""
    write(storage, LARGE)
    proxy.inject(truncate(after), at=number)
    assert read(behind()) == LARGE
    starts = [int(request.headers["range"].removeprefix("bytes=").split("-")[0]) for request in proxy.requests]
    assert len(starts) == 3
    assert {0, PART, after + starts[number]} == set(starts)


def test_a_flipped_bit_on_the_way_there_is_sent_again(behind, proxy, storage):
    """The server compares each part's checksum, and that of a small object."""
    proxy.inject(flip_request_bit, at=1, matching=is_part)
    write(behind(), LARGE)
    assert len([request for request in proxy.requests if is_part(request)]) == 3
    proxy.clear()
    proxy.inject(flip_request_bit)
    write(behind(), b"small", "small")
    assert len(proxy.requests) == 2
    assert (read(storage), read(storage, "small")) == (LARGE, b"small")


@pytest.mark.parametrize("checksum", [slow("crc32"), slow("crc32c"), "crc64nvme"])
def test_every_checksum_is_compared_by_the_server(behind, proxy, storage, checksum):
    proxy.inject(flip_request_bit, times=None, matching=is_part)
    with pytest.raises(StorageError, match="BadDigest"):
        write(behind(checksum=checksum, max_attempts=2), LARGE)
    proxy.clear()
    write(behind(checksum=checksum), LARGE)
    assert f"x-amz-checksum-{checksum}" in next(filter(is_part, proxy.requests)).headers
    assert read(storage) == LARGE


def test_a_flipped_bit_on_the_way_back_is_for_the_digests_above(behind, proxy, storage):
    """Said here so that nobody relies on this layer: ranges of S3 have no checksum."""
    write(storage, b"hello")
    proxy.inject(flip_answer_bit)
    assert read(behind()) == b"hemlo"


def test_a_lost_answer_to_a_conditional_write_is_known_as_ours_or_not(behind, proxy, storage):
    """The repeated request meets the object that the first one made; or one that another made before."""
    proxy.inject(lose_answer, times=2)
    assert behind().put_if_absent("a", b"mine") is True
    storage.put_if_absent("b", b"theirs")
    proxy.inject(lose_answer, times=2)
    assert behind().put_if_absent("b", b"mine") is False
    assert (read(storage, "a"), read(storage, "b")) == (b"mine", b"theirs")


def test_a_lost_answer_to_a_conditional_replacement_is_known_as_ours_or_not(behind, proxy, storage):
    write(storage, b"first", "a")
    proxy.inject(lose_answer, at=1, times=2)
    assert behind().put_if_match("a", b"mine", b"first") is True
    write(storage, b"theirs", "b")
    proxy.inject(lose_answer, times=2)
    assert behind().put_if_match("b", b"mine", b"first") is False
    assert (read(storage, "a"), read(storage, "b")) == (b"mine", b"theirs")


@pytest.mark.parametrize("moment", [0, 1])
def test_an_object_that_changes_before_its_replacement_stays(behind, proxy, storage, moment):
    """Also between the comparison and the replacement, which the server tells."""

    def overtake(exchange):
        write(storage, b"theirs", "a")
        exchange.answer(exchange.forward())

    write(storage, b"first", "a")
    proxy.inject(overtake, at=moment)
    assert behind().put_if_match("a", b"mine", b"first") is False
    assert read(storage, "a") == b"theirs"


def test_a_conflict_of_two_conditional_writes_is_tried_again(behind, proxy):
    proxy.inject(refuse_s3(409, "ConditionalRequestConflict"), times=2)
    assert behind().put_if_absent("a", b"mine") is True
    assert len(proxy.requests) == 3


def test_a_lost_completion_of_a_lost_upload_is_no_success(behind, proxy, storage, s3_server):
    """Gone means completed only where the object that is there is this writer's."""
    write(storage, b"old")
    proxy.inject(refuse_s3(404, "NoSuchUpload"), times=None, matching=is_completion)
    with pytest.raises(StorageError, match="NoSuchUpload"):
        write(behind(), LARGE)
    assert read(storage) == b"old"
    assert unfinished(s3_server, storage) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_parts(behind, proxy, storage, s3_server, error):
    """Parts that are on their way when it comes are waited for: one that arrived later would be paid for for ever."""
    proxy.inject(stall(0.5), matching=is_part)
    with pytest.raises(error):
        write_and_raise(behind(), error)
    assert unfinished(s3_server, storage) == []
    assert proxy.requests[-1].method == "DELETE"


def test_a_part_that_cannot_be_sent_stops_the_writer_early(behind, proxy, s3_server, storage):
    """Not at the end of a shard of gigabytes."""
    proxy.inject(refuse_s3(403, "AccessDenied"), times=None, matching=is_part)
    pieces = iter(range(1000))
    with pytest.raises(StorageError, match="NXDT-S103"):
        write_slowly(behind(), pieces)
    assert next(pieces) < 100
    assert unfinished(s3_server, storage) == []


def test_an_abort_that_fails_does_not_hide_the_reason(behind, proxy, storage, s3_server):
    proxy.inject(refuse_s3(500, "InternalError"), times=None, matching=lambda request: request.method == "DELETE")
    with pytest.raises(ZeroDivisionError):
        write_and_raise(behind(), ZeroDivisionError)
    assert len(unfinished(s3_server, storage)) == 1


@pytest.mark.parametrize("fault", [slow(PASSING["503"]), slow(reset), stall(60)], ids=["503", "reset", "silence"])
def test_all_objects_of_a_save_share_one_deadline(behind, proxy, fault):
    """Once the first object has used it up, the others are tried once, whichever thread they are in."""
    storage = behind(deadline_s=2, read_timeout_s=0.5)
    write(storage, b"", "step-1/before")  # so that the endpoint is known to be one
    proxy.inject(fault, times=None)

    def fails(number):
        with pytest.raises(StorageError):
            write(storage, b"x", f"step-1/{number}")

    fails(0)
    tried = len(proxy.requests)
    assert tried > 2
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(fails, range(1, 6)))
    assert len(proxy.requests) == tried + 5
    proxy.clear()
    proxy.inject(fault)
    write(storage, b"x", "step-2/another save")
    write(storage, b"x", "step-1/all is well again")


def test_a_replaced_object_is_never_read_as_a_mixture(behind, proxy, storage):
    """The ranges that are fetched later are of the version that the first one was of."""
    write(storage, LARGE * 2)
    with pytest.raises(StorageError, match="NXDT-S110"):
        read_while(behind(concurrency=1), lambda: write(storage, LARGE[::-1] * 2))


def test_an_object_that_is_deleted_while_it_is_read_is_missing(behind, storage):
    write(storage, LARGE * 2)
    with pytest.raises(FileNotFoundError):
        read_while(behind(concurrency=1), lambda: storage.delete_many(["a"]))


def test_objects_that_could_not_be_deleted_are_tried_again_or_named(behind, proxy, storage):
    for key in ("a", "b"):
        write(storage, b"x", key)
    answer = "<DeleteResult><Error><Key>{}</Key><Code>{}</Code><Message>no</Message></Error></DeleteResult>"
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    proxy.inject(refuse(200, answer.format(f"{prefix}/b", "InternalError").encode()))
    behind().delete_many(["a", "b"])
    assert b"/b<" in proxy.requests[1].body
    assert b"/a<" not in proxy.requests[1].body
    proxy.clear()
    proxy.inject(refuse(200, answer.format(f"{prefix}/a", "AccessDenied").encode()))
    with pytest.raises(StorageError, match="NXDT-S103") as caught:
        behind().delete_many(["a"])
    assert f"{prefix}/a" in caught.value.what()
