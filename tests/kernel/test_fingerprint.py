"""Equal installations have equal fingerprints, others do not, and a lock file holds a set of plugins fast."""

from __future__ import annotations

import json
import os
from shutil import rmtree

import pytest
from nxdt_testing.errors import raises

from nxdt_core.errors.plugins import PluginLockMismatch, PluginLockUnreadable
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.kernel.lock import compare_with_lock, digest_plugin, write_lock

EDITABLE = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})


def digest(site, name: str) -> str:
    (plugin,) = [plugin for plugin in site.start().plugins if plugin.name == name]
    return digest_plugin(plugin)


def test_the_same_wheel_in_two_places_has_one_fingerprint(new_site):
    sites = [new_site("one"), new_site("two")]
    for site in sites:
        site.add_optimizer("nxdt-plugin-wolf", "wolf")
    (sites[1].path / "nxdt_plugin_wolf-1.0.dist-info" / "RECORD").open("a").write(
        "../../../bin/wolf,sha256=of-a-script-that-names-the-interpreter,9\n"
        "nxdt_plugin_wolf-1.0.dist-info/INSTALLER,sha256=another,3\n"
        "__pycache__/nxdt_plugin_wolf.cpython-311.pyc,,\n"
    )
    first, second = (site.start(strict=True).fingerprint() for site in sites)
    assert first == second
    assert len(first) == 32


def test_another_file_version_or_plugin_changes_the_fingerprint(new_site):
    sites = [new_site(name) for name in "abcd"]
    sites[0].add_optimizer("nxdt-plugin-wolf", "wolf")
    sites[1].add_optimizer("nxdt-plugin-wolf", "tiger")
    sites[2].add_optimizer("nxdt-plugin-wolf", "wolf", version="1.1")
    sites[3].add_optimizer("nxdt-plugin-wolf", "wolf")
    sites[3].add_optimizer("nxdt-plugin-more", "more")
    assert len({site.start().fingerprint() for site in sites}) == 4


def test_a_blocked_plugin_is_no_part_of_the_fingerprint(site):
    before = site.start().fingerprint()
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    assert site.start(block=("wolf",)).fingerprint() == before
    assert site.start().fingerprint() != before


def test_an_editable_plugin_is_read_from_its_files(site):
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    as_wheel = digest(site, "wolf")
    (site.path / "nxdt_plugin_wolf-1.0.dist-info" / "direct_url.json").write_text(EDITABLE)
    before = digest(site, "wolf")
    module = site.path / "nxdt_plugin_wolf.py"
    module.write_text(module.read_text() + "# edited\n")
    assert len({as_wheel, before, digest(site, "wolf")}) == 3


def test_an_editable_package_is_read_whole_without_byte_code(site):
    site.add(
        "nxdt-plugin-pack",
        module="pack",
        files={"pack/__init__.py": "", "pack/data/text.txt": "one", "pack/__pycache__/x.pyc": "x"},
    )
    (site.path / "nxdt_plugin_pack-1.0.dist-info" / "RECORD").unlink()
    before = digest(site, "pack")
    (site.path / "pack" / "__pycache__" / "x.pyc").write_text("y")
    (site.path / "pack" / ".hidden").write_text("y")
    assert digest(site, "pack") == before
    (site.path / "pack" / "data" / "text.txt").write_text("two")
    assert digest(site, "pack") != before


def test_a_local_file_is_read(site, tmp_path):
    file = tmp_path / "mine.py"
    prints = set()
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        prints.add(site.start(local=(file,)).fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize("removed", ["wolf", "pack", "mine"])
def test_a_plugin_that_is_removed_while_a_run_starts_does_not_end_it(site, tmp_path, removed):
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    site.add("nxdt-plugin-pack", module="pack", files={"pack/__init__.py": ""})
    (tmp_path / "mine.py").write_text("")
    kernel = site.start(local=(tmp_path / "mine.py",))
    for path in [*site.path.iterdir(), tmp_path / "mine.py"]:
        if removed in path.name:
            path.unlink() if path.is_file() else rmtree(path)
    assert len(kernel.fingerprint()) == 32
    assert {"wolf", "pack", "mine"} <= kernel.identities().keys()


@pytest.fixture
def locked(site, tmp_path):
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    site.add("nxdt-plugin-bad", "1 / 0")
    lock = tmp_path / "plugins.lock"
    write_lock(site.start().plugins, lock)
    return lock


def test_what_was_locked_verifies(site, locked):
    compare_with_lock(site.start(lock=locked).plugins, locked)
    assert [path.name for path in locked.parent.iterdir() if path.is_file()] == ["plugins.lock"]


def test_a_plugin_that_slipped_in_does_not_run(site, locked):
    witness = site.path / "witness"
    site.add("nxdt-plugin-spy", f"open({str(witness)!r}, 'w').close()")
    with raises(PluginLockMismatch, match="'spy' of nxdt-plugin-spy is not in the file"):
        site.start(lock=locked)
    assert not witness.exists()
    site.start(lock=locked, block=("spy",))


@pytest.mark.parametrize(
    ("version", "name", "words"),
    [("1.0", "tiger", "has other files than were locked"), ("2.0", "wolf", "has version 2.0, locked is 1.0")],
)
def test_another_release_or_content_than_locked_is_refused(new_site, locked, version, name, words):
    other = new_site("other")
    other.add_optimizer("nxdt-plugin-wolf", name, version=version)
    with raises(PluginLockMismatch) as caught:
        compare_with_lock(Kernel.start(path=[str(other.path)]).plugins, locked)
    assert f"'wolf' of nxdt-plugin-wolf {words}" in str(caught.value)
    assert "'bad' of nxdt-plugin-bad is missing" in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"format": 2, "plugins": []}', '{"format": 1, "plugins": [3]}']
)
def test_a_lock_file_that_cannot_be_read_is_an_error(site, tmp_path, content):
    lock = tmp_path / "plugins.lock"
    if content is not None:
        lock.write_text(content)
    with raises(PluginLockUnreadable, match="cannot be read"):
        Kernel.start(PluginPolicy(lock=lock), path=[str(site.path)])


def test_a_lock_file_that_is_a_pipe_is_an_error(site, tmp_path):
    os.mkfifo(tmp_path / "plugins.lock")
    with raises(PluginLockUnreadable, match="a named pipe"):
        site.start(lock=tmp_path / "plugins.lock")


def test_policy_entries_that_name_nothing_are_told(site):
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    kernel = site.start(block=("lino",), prefer=("nxdt_plugin_wolf", "gone"))
    assert kernel.unmatched_policy() == ("lino", "gone")


def test_a_file_is_read_again_once_it_has_changed(site, monkeypatch):
    """Also where its size is the same, and where files were left alone for long."""
    monkeypatch.setattr("nxdt_core.kernel.metadata._SETTLED_NS", -(10**12))
    site.add_optimizer("nxdt-plugin-wolf", "wolf")
    (site.path / "nxdt_plugin_wolf-1.0.dist-info" / "direct_url.json").write_text(EDITABLE)
    before = digest(site, "wolf")
    assert digest(site, "wolf") == before
    module = site.path / "nxdt_plugin_wolf.py"
    module.write_text(module.read_text().replace("wolf", "bear"))
    assert digest(site, "wolf") != before
