"""What ``nxdt train`` and ``nxdt config check`` say of a refused file of another program: how to migrate it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.errors.configuration import ConfigError

FILES = Path(__file__).parent / "files"
EXAMPLES = FILES.parents[4] / "tests/config/nxdt"

REFUSED = {
    "llama3_8b_sft": "NXDT-C014",
    "megatron_llama_7b": "NXDT-C015",
}
"""Files that cannot be read as they are → a code of what is wrong with them."""

HINT = "A file of NxD Training is taken over by: nxdt config migrate FILE --from nxdt -o NEW.yaml"


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_as_it_is_names_the_way_to_take_it_over(name):
    with pytest.raises(ConfigError) as caught:
        config.load(EXAMPLES / f"{name}.yaml")
    assert f"[{REFUSED[name]}]" in str(caught.value)
    assert str(caught.value).rstrip().endswith(HINT)


@pytest.mark.parametrize(
    ("name", "option"), [("nemo_gpt", "nemo"), ("nnm_llama", "nnm"), ("nxdt_megatron_gpt", "nxdt")]
)
def test_the_way_to_take_a_file_over_names_its_own_framework(name, option):
    with pytest.raises(ConfigError, match=f"nxdt config migrate FILE --from {option} -o NEW.yaml"):
        config.load(FILES / f"{name}.yaml")


def test_a_missing_path_and_a_file_of_nxdt_itself_have_no_such_hint(tmp_path):
    with pytest.raises(ConfigError) as caught:
        config.load(EXAMPLES / "llama3_8b_pretrain.yaml")
    assert "[NXDT-C002]" in str(caught.value)
    assert HINT not in str(caught.value)
    own = (EXAMPLES / "llama3_8b_sft.yaml").read_text()
    (tmp_path / "run.yaml").write_text(own.replace("\nmodel:\n", "\nmodel:\n  name: llama\n"))
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "run.yaml")
    assert "[NXDT-C014]" in str(caught.value)
    assert HINT not in str(caught.value)


def test_a_recipe_of_ours_is_not_called_a_file_to_migrate():
    with pytest.raises(ConfigError, match="it is a key of NxD Training") as refused:
        config.load("recipe:llama-tiny", ["model.optim.sched.name=constant", "model.optim.sched.min_lr=9"])
    assert HINT not in str(refused.value)


def test_without_the_plugin_the_hint_says_what_to_install(nxdt, tmp_path):
    bare = {"uninstalled": ("nxdt-plugin-migrate",)}
    done = nxdt("config", "check", str(EXAMPLES / "megatron_llama_7b.yaml"), **bare)
    assert done.returncode == 2
    hint, last = done.stderr.splitlines()[-2:]
    assert hint.endswith(HINT.replace("by: ", "by: pip install nxdt-plugin-migrate, then "))
    assert last.startswith("  More: nxdt explain ")
