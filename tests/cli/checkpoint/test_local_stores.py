"""``nxdt checkpoint`` at the addresses of a store that only a plugin file has."""

import pytest

PLUGIN = """
from nxdt_core.api import StoreComponent, hookimpl
from nxdt_core.checkpoint.stores.local import LocalStorage

class Shelf(LocalStorage):
    scheme = "shelf"

@hookimpl
def nxdt_stores():
    return [StoreComponent(name="shelf", target=f"{__name__}:Shelf", uri_schemes=("shelf",))]
"""


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("list", ()),
        ("inspect", ("--saved-config",)),
        ("verify", ()),
        ("diff", ("{uri}",)),
        ("copy", ("shelf://{to}",)),
        ("prune", ("--keep-last", "2")),
    ],
)
def test_the_plugin_file_comes_from_the_named_configuration(nxdt, store, tmp_path, work, verb, more):
    (work / "shelf.py").write_text(PLUGIN)
    (work / "run.yaml").write_text("base: recipe:llama-tiny\nplugins: {local: [shelf.py]}\n")
    uri = f"shelf://{store}{'/step-00000010' if verb in ('diff', 'copy') else ''}"
    words = ("checkpoint", verb, uri, *(word.format(uri=uri, to=tmp_path / "to") for word in more))
    unnamed = nxdt(*words)
    assert unnamed.returncode == 2
    assert "[NXDT-K005] No plugin stores checkpoints at shelf:// addresses." in unnamed.stderr
    assert "take the configuration as --config FILE" in " ".join(unnamed.stderr.split())
    named = nxdt(*words, "--config", "run.yaml")
    assert "K005" not in named.stderr
    assert named.returncode == 0, named.stderr
