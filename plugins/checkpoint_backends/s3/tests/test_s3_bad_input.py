"""What a user can mend is told in words, with a code; as the core's kind of error that it is closest to."""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.errors import S3BadAddress
from nxdt_plugin_s3.storage import S3Storage
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import open_storage
from nxdt_core.checkpoint.storage import check_writable
from nxdt_core.errors.checkpoints import BadStorageKey, StorageDenied, StorageError, StorageFull
from tests.http_faults import refuse
from tests.s3_server import BUCKET, ENVIRONMENT, READER, refuse_s3


def refused(storage, use=check_writable) -> StorageError:
    with pytest.raises(StorageError) as caught:
        use(storage)
    return caught.value


def listed(storage):
    return list(storage.list())


def read(storage):
    with storage.open_read("a") as stream:
        return stream.read()


USES = [check_writable, listed, read, lambda storage: storage.stat("a"), lambda storage: storage.delete_many(["a"])]
CONDITIONAL = [lambda storage: storage.put_if_absent("a", b""), lambda storage: storage.put_if_match("a", b"x", b"y")]


@pytest.mark.parametrize("use", [*USES[:3], USES[4], *CONDITIONAL])
def test_a_bucket_that_does_not_exist_is_named(config, s3_uri, use):
    error = refused(S3Storage("s3://no-such-bucket/runs", config), use)
    assert error.code == "NXDT-S100"
    assert "'no-such-bucket'" in error.what()
    assert config.endpoint_url in error.what()


def test_no_credentials(config, s3_uri, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = refused(S3Storage(s3_uri, config))
    assert (error.code, isinstance(error, StorageDenied)) == ("NXDT-S101", True)


@pytest.mark.parametrize(
    ("variable", "words"), [("AWS_SECRET_ACCESS_KEY", "missing: AWS_SECRET"), ("AWS_PROFILE", "nobody")]
)
def test_half_of_the_credentials_and_a_profile_that_is_not_there(config, s3_uri, monkeypatch, variable, words):
    monkeypatch.delenv(variable, raising=False)
    if variable == "AWS_PROFILE":
        monkeypatch.setenv(variable, "nobody")
    error = refused(S3Storage(s3_uri, config))
    assert error.code == "NXDT-S101"
    assert words in error.what()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_credentials_that_the_server_does_not_know(config, s3_uri, monkeypatch, variable, use):
    monkeypatch.setenv(variable, "something-else")
    error = refused(S3Storage(s3_uri, config), use)
    assert (error.code, isinstance(error, StorageDenied)) == ("NXDT-S102", True)


def test_rights_to_read_only(config, storage, s3_uri, monkeypatch):
    with storage.open_write("a") as stream:
        stream.write(b"x")
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    reader = S3Storage(s3_uri, config)
    assert read(reader) == b"x"
    assert [info.key for info in reader.list()] == ["a"]
    for use in (check_writable, USES[4], lambda store: store.put_if_absent("b", b"")):
        error = refused(reader, use)
        assert (error.code, isinstance(error, StorageDenied)) == ("NXDT-S103", True)
        assert "s3:PutObject" in error.do()
    assert read(reader) == b"x"
    reader.after_commit("")  # it may not list uploads: no reason to fail a save that is committed


@pytest.mark.parametrize("hours", [2, -2])
def test_a_skewed_clock_is_told_with_its_skew(behind, proxy, hours):
    """S3 refuses signatures that are 15 minutes off; the server's clock is moved here."""
    theirs = format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True)
    proxy.inject(refuse_s3(403, "RequestTimeTooSkewed", headers={"date": theirs}), times=None)
    error = refused(behind(), listed)
    assert error.code == "NXDT-S105"
    direction = "behind" if hours > 0 else "ahead of"
    assert any(f"{seconds} s {direction} the server's" in error.what() for seconds in range(7190, 7211))


MOVED = [
    refuse_s3(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-3"}),
    refuse_s3(400, "AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong", Region="eu-west-3"),
]


@pytest.mark.parametrize("answer", MOVED)
def test_another_region_is_followed_and_else_named(behind, proxy, answer):
    """The SDK goes where the server points; where that does not help, the user learns the region."""
    proxy.inject(answer)
    assert listed(behind()) == []
    assert "/eu-west-3/s3/" in proxy.requests[-1].headers["authorization"]
    proxy.inject(answer, times=None)
    error = refused(behind(), listed)
    assert error.code == "NXDT-S104"
    assert "'us-east-1'" in error.what()
    assert "region to 'eu-west-3'" in error.do()


def test_an_endpoint_where_nobody_listens(config, s3_uri, caplog):
    nowhere = S3StorageConfig(endpoint_url="http://127.0.0.1:9", deadline_s=0.5)
    error = refused(S3Storage(s3_uri, nowhere))
    assert error.code == "NXDT-S106"
    assert "http://127.0.0.1:9" in error.what()
    assert len([line for line in caplog.messages if "trying again" in line]) == 1


def test_the_time_that_is_announced_is_that_of_a_first_contact(monkeypatch, config, s3_uri, caplog):
    monkeypatch.setattr("nxdt_plugin_s3.connection._FIRST_CONTACT_S", 1.0)
    refused(S3Storage(s3_uri, S3StorageConfig(endpoint_url="http://127.0.0.1:9")))
    assert "trying again for up to 1 s" in caplog.text


def test_an_endpoint_with_a_password_does_not_show_it(s3_uri, caplog):
    config = S3StorageConfig(endpoint_url="http://me:hush@127.0.0.1:9", max_attempts=2)
    text = str(refused(S3Storage(s3_uri, config))) + caplog.text
    assert "http://127.0.0.1:9" in text
    assert "hush" not in text
    assert [key for key, _ in config.check()] == ["endpoint_url"]


@pytest.mark.parametrize(
    ("status", "code", "expected", "kind"),
    [
        (503, "SlowDown", "NXDT-S108", StorageError),
        (429, "TooManyRequests", "NXDT-S108", StorageError),
        (500, "InternalError", "NXDT-S109", StorageError),
        (507, "InsufficientStorage", "NXDT-S111", StorageFull),
        (409, "QuotaExceeded", "NXDT-S111", StorageFull),
        (400, "InvalidStorageClass", "NXDT-S109", StorageError),
    ],
)
def test_answers_that_stay_bad(behind, proxy, status, code, expected, kind):
    proxy.inject(refuse_s3(status, code, "as the server says"), times=None)
    error = refused(behind(max_attempts=2))
    assert (error.code, isinstance(error, kind)) == (expected, True)
    assert f"{code}: as the server says" in error.what()


@pytest.mark.parametrize("tokens", [("a", "a"), ("a", "b", "a"), ("",)])
def test_a_listing_whose_continuation_tokens_repeat_ends(behind, proxy, tokens):
    for number, token in enumerate(tokens):
        given = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{given}</ListBucketResult>"
        proxy.inject(refuse(200, page.encode(), {"content-type": "application/xml"}), at=number)
    error = refused(behind(), listed)
    assert error.code == "NXDT-S109"
    assert f"continuation token {tokens[-1] or None!r}" in error.what()
    assert len(proxy.requests) == len(tokens)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///prefix",
        "s3://Bucket/a",
        "s3://ab",
        "s3://a_b_c/a",
        "s3://a..b/c",
        "s3://127.0.0.1/a",
        "s3://" + "a" * 64,
        "s3://bucket/a//b",
        "s3://bucket/../a",
        "s3://bucket/a\nb",
        "s3:bucket/a",
        "https://bucket/a",
    ],
)
def test_addresses_that_name_no_bucket(uri):
    with raises(S3BadAddress) as caught:
        S3Storage(uri)
    assert caught.value.code == "NXDT-S107"


def test_credentials_in_an_address_are_refused_and_not_repeated():
    with raises(S3BadAddress) as caught:
        S3Storage("s3://id:hush@bucket/a")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1/ü %20/", "s3://my.bucket-1/ü %20"),
    ],
)
def test_addresses_are_shown_without_a_slash_at_their_end_and_never_decoded(uri, shown):
    assert S3Storage(uri).uri == shown


@pytest.mark.parametrize("key", ["a\x01b", "a\x7f", pytest.param("x" * 1020, id="1,020 letters")])
def test_keys_that_s3_cannot_hold(s3_uri, key):
    with raises(BadStorageKey):
        S3Storage(s3_uri).stat(key)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"part_bytes": 2**20}, "part_bytes"),
        ({"part_bytes": 6 * 2**30}, "part_bytes"),
        ({"kms_key_id": "x"}, "kms_key_id"),
        ({"kms_key_id": "x", "server_side_encryption": "AES256"}, "kms_key_id"),
        ({"endpoint_url": "minio:9000"}, "endpoint_url"),
        ({"endpoint_url": "ftp://minio"}, "endpoint_url"),
    ],
)
def test_settings_that_cannot_work_are_named_by_key(keys, key):
    assert [found for found, _ in S3StorageConfig(**keys).check()] == [key]


def test_settings_that_can_work_have_no_findings():
    config = S3StorageConfig(
        kms_key_id="x", server_side_encryption="aws:kms:dsse", endpoint_url="https://minio.example:9000"
    )
    assert list(config.check()) == []


def test_no_credential_shows_in_a_log_or_an_error(behind, proxy, caplog):
    """Not even with everything logged at the level of debugging."""
    caplog.set_level(logging.DEBUG, logger="nxdt_plugin_s3")
    texts = []
    for status, code in ((403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (500, "InternalError")):
        proxy.clear()
        proxy.inject(refuse_s3(status, code), times=None)
        error = refused(behind(max_attempts=2))
        texts.append("".join(traceback.format_exception(error)))
    for text in (*texts, caplog.text):
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in text
        assert "Signature=" not in text


def test_the_core_finds_the_store_by_its_scheme(storage, config):
    with storage.open_write("step-00000001/x") as stream:
        stream.write(b"x")
    found = open_storage(storage.uri, config=config)
    assert isinstance(found, S3Storage)
    assert [info.key for info in found.list()] == ["step-00000001/x"]
    assert isinstance(open_storage(f"s3://{BUCKET}"), S3Storage)
