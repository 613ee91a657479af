"""``nxdt plugins`` over real and fake distributions."""

import json

import pytest

OFFER = """
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_optimizers():
    return [Component(name="wolf", target="nowhere:Wolf", summary="signs", aliases=("evo",))]
"""
HEAVY = ("torch", "numpy", "omegaconf", "pytorch_lightning", "transformers")


def test_list_json_has_the_promised_shape_and_nothing_else_on_stdout(nxdt, dist):
    dist("acme", OFFER)
    dist("broken", "raise RuntimeError('at import')")
    dist("ancient", OFFER, requires="nxdt-core<0.0.1")
    rows = {row["name"]: row for row in json.loads(nxdt("plugins", "list", "--json").stdout)}
    assert set(rows["acme"]) == {"name", "dist", "version", "state", "reason", "note", "hints", "components"}
    assert rows["acme"] == {
        "name": "acme",
        "dist": "acme",
        "version": "1.0",
        "state": "ok",
        "reason": "",
        "note": "",
        "hints": [],
        "components": [{"kind": "optimizer", "name": "wolf"}],
    }
    assert (rows["broken"]["state"], rows["broken"]["components"]) == ("broken", [])
    assert "at import" in rows["broken"]["reason"]
    assert rows["ancient"]["state"] == "incompatible"
    assert {"kind": "optimizer", "name": "adamw"} in rows["builtin"]["components"]


def test_list_shows_one_line_a_plugin_aligned(nxdt, dist):
    dist("acme", OFFER)
    header, *lines = nxdt("plugins", "list").stdout.splitlines()
    assert len(lines) == len(json.loads(nxdt("plugins", "list", "--json").stdout))
    column = header.index("STATE")
    assert all(line[column:].startswith("ok ") for line in lines)
    assert any(line.startswith("acme ") and line.endswith(" wolf") for line in lines)


def test_light_commands_import_nothing_heavy(nxdt_without):
    listings = (["plugins", "list"], ["plugins", "hooks"], ["plugins", "show", "builtin"])
    done = nxdt_without(HEAVY, (["--help"], ["--version"], *listings))
    assert (done.returncode, done.stderr) == (0, "")


def test_show_tells_names_aliases_and_reason(nxdt, dist):
    dist("acme", OFFER)
    dist("broken", "raise RuntimeError('at import')")
    assert "wolf = evo" in nxdt("plugins", "show", "acme").stdout
    assert "at import" in nxdt("plugins", "show", "broken").stdout


def test_show_of_an_unknown_name_lists_what_is_installed(nxdt):
    done = nxdt("plugins", "show", "nobody")
    assert done.returncode == 2
    assert "[NXDT-K020]" in done.stderr
    assert "'builtin'" in done.stderr


def test_hooks_names_every_hook_and_its_listeners(nxdt, dist):
    from nxdt_core.kernel.hookspecs import HOOKS

    dist("acme", OFFER)
    lines = nxdt("plugins", "hooks").stdout.splitlines()
    names = {line.split()[0] for line in lines[1:]}
    assert names == {*HOOKS}
    (optimizers,) = [line for line in lines if line.startswith("nxdt_optimizers ")]
    assert "acme" in optimizers


def test_lock_then_verify_then_another_plugin(nxdt, dist):
    dist("acme", OFFER)
    assert nxdt("plugins", "lock", "plugins.lock").returncode == 0
    assert nxdt("plugins", "verify", "plugins.lock").returncode == 0
    dist("bolt", OFFER)
    done = nxdt("plugins", "verify", "plugins.lock")
    assert done.returncode == 2
    assert "bolt" in done.stderr


def test_verify_without_a_lock_file_says_how_to_write_one(nxdt):
    done = nxdt("plugins", "verify")
    assert done.returncode == 2
    assert "nxdt plugins lock" in done.stderr


def test_a_plugin_that_imports_torch_is_named_by_list_show_and_check(nxdt, dist):
    dist("acme", "import torch\n" + OFFER, torch="import numpy")  # four commands would import the real one for seconds
    dist("bolt", OFFER.replace("wolf", "bolt"))
    note = "its entry module imports torch, numpy, which makes every command slow"
    rows = {row["name"]: row for row in json.loads(nxdt("plugins", "list", "--json", fork=False).stdout)}
    assert (rows["acme"]["state"], rows["acme"]["note"], rows["bolt"]["note"]) == ("ok", note, "")
    listed = nxdt("plugins", "list", fork=False)
    assert [line for line in listed.stderr.splitlines() if "plugin" in line] == [
        f"note: plugin 'acme' (acme 1.0): {note}"
    ]
    assert note in nxdt("plugins", "show", "acme", fork=False).stdout
    assert nxdt("config", "check", "recipe:llama-tiny", fork=False).stderr.count(note) == 1


def test_doctor_names_what_is_wrong_and_exits_with_1(nxdt, dist):
    dist("ibis", "import numpy\n" + OFFER.replace("wolf", "ibis"))
    dist("bolt", "")
    dist("crow", "1 / 0")
    dist("dove", OFFER.replace("wolf", "dove"))
    found = json.loads(nxdt("plugins", "doctor", "--json", fork=False).stdout)
    assert found["import_s"]["ibis"] > found["import_s"]["dove"]
    problems = (
        "plugin 'bolt' (bolt 1.0): its entry module implements no hook, so that it offers nothing",
        "plugin 'crow' (crow 1.0) is broken: importing 'crow' raised ZeroDivisionError",
    )
    slow = "plugin 'ibis' (ibis 1.0): its entry module imports numpy, which makes every command slow"
    assert len(found["problems"]) == 3
    for line in (slow, *problems):
        assert any(problem.startswith(line) for problem in found["problems"]), line
    done = nxdt("plugins", "doctor")
    assert done.returncode == 1
    for line in problems:
        assert f"problem: {line}" in done.stdout
    assert "problem: plugin 'dove'" not in done.stdout


PROJECT = """
[project]
name = "acme"
version = "1.0"
dependencies = ["nxdt_core >=0.1, <0.2"]
[project.entry-points."nxdt.plugins"]
acme = "acme"
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("acme = ", "acme = ", ""),
        ('acme = "acme"', 'acme = "acme.entry"', "other entry points"),
        ('version = "1.0"', 'version = "1.1"', "other version"),
        ('["nxdt_core >=0.1, <0.2"]', '["nxdt-core>=0.1,<0.2", "numpy"]', "other requirements"),
        ('[project]\nname = "acme"\nversion = "1.0"', "[tool.nothing]", ""),
    ],
)
def test_doctor_finds_an_editable_installation_of_older_metadata(nxdt, dist, site, tmp_path, old, new, said):
    dist("acme", OFFER)
    source = tmp_path / "acme project"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT.replace(old, new))
    origin = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (site / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    done = nxdt("plugins", "doctor")
    problem = f"plugin 'acme' (acme 1.0): its installed metadata are older than {source / 'pyproject.toml'}: {said}"
    assert (problem in done.stdout) is bool(said)
    assert done.returncode == (1 if said else 0), done.stdout


def test_doctor_finds_an_editable_installation_without_its_sources(nxdt, dist, site, tmp_path):
    dist("acme", OFFER)
    origin = {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}}
    (site / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    done = nxdt("plugins", "doctor")
    assert done.returncode == 1
    assert f"it is installed from {tmp_path / 'gone'}, which does not exist" in done.stdout


def test_doctor_of_a_configuration_finds_entries_that_name_no_plugin(nxdt, dist):
    dist("acme", OFFER)
    words = ("plugins.block=[acme, lamma]", "model.nonsense=1")
    done = nxdt("plugins", "doctor", "recipe:llama-tiny", *words)
    assert done.returncode == 1
    assert "problem: plugins: no installed plugin is called 'lamma'" in done.stdout
    assert "'acme'" not in done.stdout
    assert nxdt("plugins", "doctor", "recipe:llama-tiny", "plugins.block=[acme]").returncode == 0
    assert nxdt("plugins", "doctor", "nowhere.yaml").returncode == 2


def test_doctor_is_content_with_the_plugins_of_this_repository(nxdt):
    done = nxdt("plugins", "doctor")
    assert (done.returncode, done.stdout.splitlines()[-1].partition(":")[0]) == (0, "ok")
