"""What is deprecated works, says what replaces it and when it goes, and is in the file of the public surface."""

import re
import subprocess
import sys
from typing import Annotated

import pytest

from nxdt_core import __version__
from nxdt_core.config.annotations import Deprecated
from nxdt_core.deprecation import NxdtDeprecationWarning, deprecated
from scripts import public_api


@deprecated(use="nxdt_core.models.norm.RMSNorm", since="0.1", goes="0.3")
class Old:
    def __init__(self, size):
        self.size = size


@deprecated(use="nxdt_core.models.norm.norm", since="0.1", goes="0.3")
def old(size, *, scale=1):
    """Return a size."""
    return size * scale


def test_a_deprecated_class_or_function_works_and_warns_where_it_is_used():
    with pytest.warns(NxdtDeprecationWarning) as caught:
        found = (Old(3).size, old(3, scale=2))
    assert found == (3, 6)
    assert [warning.filename for warning in caught] == [__file__, __file__]
    first, second = (str(warning.message) for warning in caught)
    assert first == f"{__name__}.Old is deprecated and goes in nxdt-core 0.3. Use nxdt_core.models.norm.RMSNorm."
    assert second.startswith(f"{__name__}.old is deprecated")
    assert (old.__name__, old.__doc__, old.__deprecated__) == ("old", "Return a size.", second)


def test_a_moved_module_warns_whoever_imports_it(tmp_path):
    (tmp_path / "user.py").write_text("\nimport nxdt_core.config.marks as marks\nprint(marks.Range.__name__)\n")
    done = subprocess.run(
        [sys.executable, "-W", "default", "user.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Range\n"
    assert re.search(r"user\.py:2: NxdtDeprecationWarning: nxdt_core\.config\.marks is deprecated", done.stderr)


PLUGIN = """
from typing import Annotated

from nxdt_core.api import Component, hookimpl
from nxdt_core.config.annotations import Deprecated
from nxdt_core.config.section import Section


class Config(Section):
    share: float = 1.0
    part: Annotated[float, Deprecated(use="model.optim.sched.share", since="0.1", goes="0.3")] = 1.0


def flat(config, horizon):
    return lambda step: config.share


@hookimpl
def nxdt_schedules():
    return [Component(name="flat", target=f"{__name__}:flat", config=f"{__name__}:Config")]
"""


@pytest.mark.parametrize("value", ["0.5", "1.0"])
def test_a_deprecated_key_is_a_note_where_it_is_set(tmp_path, value):
    from nxdt_core.config import load

    (tmp_path / "flat.py").write_text(PLUGIN)
    keys = [f"plugins.local=[{tmp_path}/flat.py]", "model.optim.sched={name: flat}"]
    note = "model.optim.sched.part is deprecated and goes in nxdt-core 0.3. Use model.optim.sched.share."
    assert note not in load("recipe:llama-tiny", keys).notes
    assert note in load("recipe:llama-tiny", [*keys, f"model.optim.sched.part={value}"]).notes


def test_the_reference_of_keys_says_that_one_is_deprecated():
    from nxdt_core.config.reference import _remarks
    from nxdt_core.config.section import Section, keys_of

    class Other(Section):
        key: Annotated[int, Deprecated(use="other", since="0.1", goes="0.3")] = 1

    assert list(_remarks(keys_of(Other)["key"])) == ["Deprecated, goes in nxdt-core 0.3: use other."]


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


def test_what_is_deprecated_stays_for_two_minor_versions_and_no_longer():
    lines = [line for line in public_api.GOLDEN.read_text().splitlines() if line.startswith("deprecated ")]
    assert lines
    for line in lines:
        name, since, goes = re.fullmatch(r"deprecated (\S+) : since (\S+), goes in (\S+), use .+", line).groups()
        assert minor(goes) >= (minor(since)[0], minor(since)[1] + 2) or minor(goes)[0] > minor(since)[0], name
        assert minor(__version__) < minor(goes), f"{name} is to be removed in this version"


def test_the_page_lists_what_is_deprecated():
    lines = [line for line in public_api.GOLDEN.read_text().splitlines() if line.startswith("deprecated ")]
    found = [re.fullmatch(r"deprecated (\S+) : since (\S+), goes in (\S+), use (.+)", line).groups() for line in lines]
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \| `(\S+)` \|$", public_api.PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(found)


def test_a_removal_that_was_not_deprecated_is_named():
    before = [
        "function nxdt_core.models.norm.norm : -> int",
        "parameter nxdt_core.models.norm.norm(size) : int",
        "class nxdt_core.models.norm.Norm",
        "deprecated nxdt_core.models.norm.Norm : since 0.1, goes in 0.3, use nxdt_core.models.norm.RMSNorm",
        "key trainer.old : an integer = 1",
        "name nxdt_core.data.packing.THING",
    ]
    found = public_api.compare(before, [])
    assert sorted(public_api.undeprecated(found, before)) == [
        "function nxdt_core.models.norm.norm : -> int",
        "key trainer.old : an integer = 1",
    ]


def test_plugins_of_this_repository_use_nothing_deprecated():
    names = [line.split()[1] for line in public_api.GOLDEN.read_text().splitlines() if line.startswith("deprecated ")]
    sources = [*public_api.ROOT.glob("plugins/*/*/src/**/*.py"), *public_api.ROOT.glob("nxdt_core/scaffold/**/*.tmpl")]
    users = [path.name for path in sources for name in names if name in path.read_text()]
    assert users == []
