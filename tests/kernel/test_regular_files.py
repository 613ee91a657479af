"""Files are opened, replaced and copied where others may have put links and pipes."""

import os
import resource
import stat

import pytest

from nxdt_core.system.regular_files import (
    NotRegularFile,
    copy_file,
    make_directory,
    private_directory,
    read_text,
    replace_text,
    replacing,
    require_plain_files,
)
from tests.in_the_way import KINDS, PRECIOUS, put


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text(PRECIOUS)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_written_whole_replaces_a_link_and_a_pipe(tmp_path, precious, kind):
    put(kind, tmp_path / "state.json", tmp_path)
    replace_text(tmp_path / "state.json", "mine")
    assert precious.read_text() == PRECIOUS
    assert (tmp_path / "state.json").read_text() == "mine"
    assert (tmp_path / "state.json").lstat().st_nlink == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious.txt", "state.json"]


def half_written(path):
    with replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_text(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(KeyboardInterrupt):
        half_written(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("before")
    path.chmod(0o600)
    replace_text(path, "after")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["missing/state.json", "directory"])
def test_an_error_names_the_file_and_not_the_one_that_takes_its_place(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the name is checked
        replace_text(tmp_path / name, "text")
    assert caught.value.filename == str(tmp_path / name)
    assert ".part" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_replaces_a_link_and_keeps_times_and_permissions(tmp_path, precious, kind):
    (tmp_path / "script.sh").write_text("mine")
    (tmp_path / "script.sh").chmod(0o750)
    os.utime(tmp_path / "script.sh", (1_000_000_000, 1_000_000_000))
    (tmp_path / "link.sh").symlink_to("script.sh")
    put(kind, tmp_path / "copy.sh", tmp_path)
    copy_file(tmp_path / "link.sh", tmp_path / "copy.sh")
    assert precious.read_text() == PRECIOUS
    copied = (tmp_path / "copy.sh").lstat()
    assert (tmp_path / "copy.sh").read_text() == "mine"
    assert (stat.S_IMODE(copied.st_mode), copied.st_mtime) == (0o750, 1_000_000_000)


def test_a_pipe_is_neither_read_nor_copied(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for act in (read_text, lambda path: read_text(path, follow=True), lambda path: copy_file(path, tmp_path / "copy")):
        with pytest.raises(NotRegularFile, match="it is a named pipe"):
            act(tmp_path / "pipe")
    assert not (tmp_path / "copy").exists()


def test_text_is_read_through_a_link_where_the_caller_says_so_and_has_a_limit(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    assert read_text(tmp_path / "link", follow=True) == PRECIOUS
    with pytest.raises(NotRegularFile, match="it is a symbolic link"):
        read_text(tmp_path / "link")
    os.truncate(precious, (64 << 20) + 1)
    with pytest.raises(OSError, match="it has more than 64 MiB"):
        read_text(precious)


def test_a_directory_is_made_and_is_not_a_link_to_one(tmp_path):
    assert make_directory(tmp_path / "a" / "b").is_dir()
    assert make_directory(tmp_path / "a" / "b").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(NotRegularFile, match="it is a symbolic link, not a directory"):
            make_directory(tmp_path / name)


def test_a_private_directory_is_of_this_user_alone(tmp_path):
    assert stat.S_IMODE(private_directory(tmp_path / "locks").stat().st_mode) == 0o700
    assert private_directory(tmp_path / "locks") == tmp_path / "locks"
    (tmp_path / "locks").chmod(0o755)
    with pytest.raises(NotRegularFile, match="its mode must be 0700"):
        private_directory(tmp_path / "locks")
    (tmp_path / "link").symlink_to(tmp_path / "locks")
    with pytest.raises(NotRegularFile, match="it is a symbolic link"):
        private_directory(tmp_path / "link")


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_a_library_will_write_are_plain(tmp_path, precious, kind):
    require_plain_files(tmp_path / "profile")
    (tmp_path / "profile" / "fit.txt").write_text("before")
    require_plain_files(tmp_path / "profile")
    put(kind, tmp_path / "profile" / "next.txt", tmp_path)
    with pytest.raises(NotRegularFile):
        require_plain_files(tmp_path / "profile")
