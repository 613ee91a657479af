"""Files of NxD Training: every key is known; what this version lacks is said in words, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.errors import ConfigError
from nxdt_core.kernel import Kernel, PluginPolicy

EXAMPLES = Path(__file__).parent / "nxdt"

EXPECTED = {
    "llama3_8b_pretrain": {"data.name", "model.name", "model.optim.name", "precision.type"},
    "mixtral_8x7b_pretrain": {"data.name", "model.name", "precision.type"},
    # As shipped, data.seq_length and model.encoder_seq_length differ.
    "llama3_8b_sft": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "precision.type"},
    "llama3_8b_lora": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "adapter.name"},
}


REFUSED = {
    "llama3_8b_sft": "NXDT-C014",
    "llama3.1_405b_pretrain": "NXDT-C016",
    "megatron_llama_7b": "NXDT-C015",
}
"""Files that cannot be read as they are → a code of what is wrong with them."""

HINT = "A file of NxD Training is taken over by: nxdt config migrate FILE --from nxdt -o NEW.yaml"


@pytest.fixture(scope="module")
def builtins() -> Kernel:
    return Kernel.start(PluginPolicy(allow=()))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_names_what_is_not_supported_and_nothing_else(builtins, name):
    problems = config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)
    assert {problem.key for problem in problems} - EXPECTED[name] == set()
    codes = {problem.row()[-10:-1] for problem in problems}
    assert codes <= {"NXDT-C014", "NXDT-C015", "NXDT-K002"}
    assert not [problem for problem in problems if problem.code in ("NXDT-C010", "NXDT-C011", "NXDT-C012")]


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_that_was_expected_to_be_refused_is_taken(builtins, name):
    keys = {problem.key for problem in config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)}
    aliases = {"adamw_fp32OptState", "mixed_precision"}
    known = {alias for kind in ("optimizer", "precision_policy") for alias in _spellings(builtins, kind)} & aliases
    taken = {"model.optim.name" if alias.startswith("adamw") else "precision.type" for alias in known}
    assert EXPECTED[name] - keys <= taken


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
        config.load(EXAMPLES.parent / f"migration/files/{name}.yaml")


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


def _spellings(kernel, kind):
    return {text for found in kernel.registry.all(kind) for text in (found.record.name, *found.record.aliases)}


def test_a_recipe_of_ours_is_not_called_a_file_to_migrate():
    with pytest.raises(ConfigError, match="it is a key of NxD Training") as refused:
        config.load("recipe:llama-tiny", ["model.optim.sched.name=constant"])
    assert HINT not in str(refused.value)
