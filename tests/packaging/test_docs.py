"""The site builds without a warning, and its generated pages know every hook, command and component."""

import ast
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxdt_core.cli.app import COMMANDS
from nxdt_core.config.fields.component_slots import SLOTS
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.hookspecs import PHASES

ROOT = Path(__file__).parents[2]
HOOKS = [hook for phase in PHASES for hook in phase.__all__]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_hook_has_a_section_with_an_example(site):
    page = (site / "reference/hooks/index.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    for hook in HOOKS:
        assert f'id="{hook}"' in page
        assert f"def {hook}(" in text


def test_the_guide_for_authors_names_every_hook():
    guide = (ROOT / "docs/plugins.md").read_text()
    assert [hook for hook in HOOKS if f"`{hook}`" not in guide] == []


def test_the_guide_for_authors_shows_every_file_of_the_example(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "plugins/index.html").read_text()))
    for path in (ROOT / "examples/third_party").rglob("*.py"):
        assert path.read_text().strip() in text, path.name


def test_every_command_is_on_the_page_of_commands(site):
    page = (site / "reference/cli/index.html").read_text()
    assert all(f'id="nxdt-{name}"' in page for name in COMMANDS)


def test_the_reference_has_the_keys_of_the_core(site):
    page = (site / "reference/yaml/index.html").read_text()
    for key in ("max_steps", "global_batch_size", "resume_if_exists", "tensor_model_parallel_size", "weight_decay"):
        assert key in page


def test_the_reference_has_a_section_for_every_component_of_this_repository(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference/yaml/index.html").read_text()))
    registry = Kernel.start().registry
    ours = [(slot.key, each) for slot in SLOTS for each in registry.all(slot.kind) if each.dist.startswith("nxdt-")]
    assert len(ours) > 40
    assert [f"{key}: {each.record.name}" for key, each in ours if f"{key}: {each.record.name}" not in text] == []


def test_every_error_has_a_code_of_its_own_and_a_line(site):
    """The codes are read from the source: ``code`` of each class that has a sentence of its own."""
    page = (site / "reference/errors/index.html").read_text()
    files = [*ROOT.glob("nxdt_core/errors/*.py"), *ROOT.glob("plugins/*/*/src/*/errors.py")]
    bodies = [
        node.body for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    values = [{part.targets[0].id: part.value for part in body if isinstance(part, ast.Assign)} for body in bodies]
    codes = [each["code"].value for each in values if "code" in each and "happened" in each]
    assert len(codes) > 250
    assert [code for code in codes if codes.count(code) > 1] == []
    assert [code for code in codes if code not in page] == []
