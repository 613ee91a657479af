"""The page of each kind shows every file that ``nxdt plugins new`` writes for it; other tests run those files."""

import pytest
import yaml

from nxdt_core.api import KINDS
from scripts.docs_site import kinds
from tests.packaging.conftest import ROOT

PAGES = {kind.name: ROOT / "docs" / kinds.FOLDER / f"{kind.name}.md" for kind in KINDS}
OF_EVERY_PLUGIN = ("README.md", "pyproject.toml", "tests/test_plugin.py", "py.typed", ".gitignore", "test.yml")


def test_every_kind_has_a_page_and_every_page_a_kind():
    assert sorted(path.name for path in PAGES.values()) == sorted(
        path.name for path in (ROOT / "docs" / kinds.FOLDER).iterdir()
    )
    navigation = yaml.dump(
        yaml.unsafe_load((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nval")[0])
    )
    assert [path.name for path in PAGES.values() if f"{kinds.FOLDER}/{path.name}" not in navigation] == []


@pytest.mark.parametrize("path", kinds.PAGES, ids=lambda path: path.stem)
def test_a_page_shows_the_code_as_it_is(path):
    assert path.read_text() == kinds.expanded(path.stem, path.read_text()), "run `make offers`"


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_shows_the_files_of_a_new_plugin(kind):
    page, text = kind, PAGES[kind].read_text()
    assert f"nxdt plugins new {page} my-{page}\n" in text
    files = kinds.repository(page)
    own = {path: source for path, source in files.items() if not path.endswith(OF_EVERY_PLUGIN)}
    assert len(own) >= 3
    assert [path for path, source in own.items() if source.strip() not in text] == []
    assert kinds.protocol_source(kind) in text


def test_the_requirements_of_a_page_are_those_of_the_kit():
    found = {kind: kinds.requirements(kind) for kind in PAGES}
    assert "a resumed run has the factors of one that was not stopped" in found["schedule"]
    for kind, page in PAGES.items():
        assert found[kind], kind
        assert "\n<!-- the requirements -->\n" in page.read_text(), kind


def test_pages_show_files_of_the_repository():
    text = (ROOT / "docs/plugins.md").read_text()
    assert (ROOT / "examples/third_party/pyproject.toml").read_text().strip() in text
