"""The dry run of a release: what it checks, on small distributions and on this repository's own."""

import json
import sys

import pytest

from nxdt_core import __version__
from tests.packaging.conftest import ROOT
from tests.sampling import takes_all

sys.path.insert(0, str(ROOT / "scripts"))
import release_dry_run
from wheel_environment import Third


def test_every_distribution_has_the_version_and_admits_the_others():
    assert list(release_dry_run.problems_of_versions(__version__)) == []


def test_a_range_that_leaves_out_the_next_version_is_found():
    problems = list(release_dry_run.problems_of_versions("0.2.0"))
    assert any("plugins/models/llama/pyproject.toml: nxdt-core" in problem for problem in problems)
    assert any("meta/pyproject.toml: nxdt-plugin-llama" in problem for problem in problems)


def test_the_changelog_has_a_section_of_this_version():
    assert list(release_dry_run.problems_of_changelog(__version__)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Changelog\n\n## [Unreleased]\n\n- x\n", "no section '## [1.2.3]'"),
        ("## [1.2.3] - 2027-01-01\n\n## [1.2.2]\n\n- x\n", "the section of 1.2.3 has no entry"),
        ("## [1x2y3]\n\n- x\n", "no section"),
    ],
)
def test_a_changelog_without_the_version_is_found(text, problem):
    (found,) = release_dry_run.problems_of_changelog("1.2.3", text)
    assert problem in found


def test_what_a_wheel_requires_is_followed_through_extras(wheels):
    bare, with_s3 = (Third.of([each], wheels=wheels).found for each in ("nxdt", "nxdt[s3]"))
    assert {"torch", "pluggy"} <= set(bare)
    assert "boto3" not in bare
    assert {"boto3", "botocore"} <= set(with_s3)
    assert not [name for name in with_s3 if name.startswith("nxdt")]


def test_the_sbom_names_ours_with_digests_and_what_they_require(wheels, tmp_path):
    pytest.importorskip("cyclonedx", reason="make install brings cyclonedx-python-lib")
    for wheel in wheels.glob("nxdt*.whl"):
        (tmp_path / wheel.name).symlink_to(wheel)
    release_dry_run.write_sbom(tmp_path, __version__)
    found = json.loads((tmp_path / f"nxdt-{__version__}.cdx.json").read_text())
    components = {each["name"]: each for each in found["components"]}
    assert {"nxdt-core", "nxdt-plugin-hf", "torch", "boto3", "transformers"} <= set(components)
    assert components["nxdt-core"]["hashes"][0]["alg"] == "SHA-256"
    assert components["torch"]["purl"].startswith("pkg:pypi/torch@")


CORE_A_PLUGIN_AND_META = (".", "./plugins/models/hf", "meta")


@pytest.mark.slow  # the release script itself compares its two builds
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the time of a build is that of the last commit")
def test_two_builds_are_bitwise_identical(tmp_path, pytestconfig):
    chosen = () if takes_all(pytestconfig) else CORE_A_PLUGIN_AND_META
    assert release_dry_run.build_twice(tmp_path / "release", chosen) == []
    built = sorted(each.name.split(".tar")[0].split("-")[0] for each in (tmp_path / "release").iterdir())
    assert len(built) > 30 if not chosen else built == sorted(("nxdt", "nxdt_core", "nxdt_plugin_hf") * 2)
