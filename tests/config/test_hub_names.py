"""Models and data of the Hugging Face hub by name, as a configuration is loaded: commits, files and errors."""

from __future__ import annotations

import glob
import json
from importlib.resources import files
from pathlib import Path

import pytest

from nxdt_core.config import hub
from nxdt_core.errors.hub import HubError
from tests.hub_server import READER, WRITER, HubServer, run_commands

pytest.importorskip("huggingface_hub", "1.31", reason="huggingface_hub is not installed, or too old: no names")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
RUN = """\
name: run
checkpoint: {resume_from: "hf:owner/small"}
data:
  name: sft-chat
  train_files: ["hf:owner/chats/*.jsonl"]
trainer: {max_steps: 2}
"""
CHATS = (files("nxdt_plugin_sft_chat") / "data" / "library.jsonl").read_bytes()


def model_files(**changes):
    tokenizer = files("nxdt_plugin_sft_chat") / "data" / "tokenizer"
    described = {path.name: path.read_bytes() for path in tokenizer.iterdir() if path.is_file()}
    config = json.dumps({**CONFIG, **changes}).encode()
    return {
        **described,
        "config.json": config,
        "model.safetensors": b"weights",
        "README.md": b"",
        "modeling_x.py": b"1",
    }


@pytest.fixture
def server(tmp_path):
    with HubServer() as server:
        server.commit("model", "owner/small", model_files())
        server.commit("dataset", "owner/chats", {"a.jsonl": CHATS, "data/b.jsonl": CHATS, "README.md": b""})
        (tmp_path / "run.yaml").write_text(RUN)
        (tmp_path / "chats.jsonl").write_bytes(CHATS)
        yield server


@pytest.fixture
def nxdt(server, tmp_path):
    """Runs commands; returns what each says, and asserts its status where it is not 0."""

    def run(*commands, token="", **variables):
        environment = {**server.environment(tmp_path / "cache"), **variables}
        *answers, _ = run_commands([words.split(" ") for words in commands], environment, tmp_path, token)
        return [(status, " ".join(text.split())) for status, text in answers]

    return run


def head(server, name="owner/small", kind="model"):
    return server.repositories[kind, name].refs["main"]


def test_a_check_reads_configuration_and_tokenizer_and_neither_weights_nor_code_nor_data(server, nxdt):
    ((status, text), (_, again), (_, shown)) = nxdt(
        "config check run.yaml", "config check run.yaml", "config show run.yaml"
    )
    assert (status, "ok: run.yaml" in text) == (0, True), text
    assert "architecture (LlamaForCausalLM), tokenizer, chat template" in again
    named = f"hf:owner/small@main@{head(server)}"
    for line in (f"resume_from: '{named}'", f"model_config: '{named}'", f"model: '{named}'"):
        assert line in shown
    assert f"['hf:owner/chats@main@{head(server, 'owner/chats', 'dataset')}/*.jsonl']" in shown
    assert sorted(server.read) == sorted({*model_files()} - {"model.safetensors", "README.md", "modeling_x.py"})


def test_what_goes_wrong_is_told_with_the_key_and_what_to_do(server, nxdt, tmp_path):
    server.commit("model", "owner/gated", model_files(), gated=True)
    server.commit("model", "owner/private", model_files(), private=True)
    server.commit("model", "owner/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    server.commit("model", "owner/huge", model_files(num_hidden_layers=10**9))
    server.commit("model", "owner/quantized", {"weights.gguf": b"x"})
    model, data = "config check run.yaml checkpoint.resume_from=hf:", 'config check run.yaml data.train_files=["hf:'
    cases = {
        f"{model}owner/smal": "[NXDT-H003] The hub has no model hf:owner/smal, or does not show it to users without",
        f"token={READER} {model}owner/private": "[NXDT-H003] does not show it to this token",
        f"token={WRITER} {model}owner/private": "ok",
        f"{model}owner/gated": "[NXDT-H004] hf:owner/gated is gated, and the hub does not show its files to users",
        f"token={READER} {model}owner/gated": f"[NXDT-H004] Ask for access at {server.url}/owner/gated",
        f"token={WRITER} {model}owner/gated": "ok",
        f"token=hf_wrong {model}owner/private": "[NXDT-H005] refuses this token: Invalid credentials in Authorization",
        f"{model}owner/small@v2": "[NXDT-H006] hf:owner/small has no revision 'v2'",
        f"{model}owner/small@{'0' * 40}": f"[NXDT-H006] hf:owner/small has no revision '{'0' * 40}'",
        f"{model}owner/pickled": "[NXDT-H008] hf:owner/pickled has no *.safetensors. It has 'config.json'",
        f"{model}owner/quantized": "[NXDT-H007] no file of the repository describes a model or a tokenizer",
        f"{model}small": "[NXDT-H001] 'hf:small' is not the name of a model or of files on the hub. Write hf:",
        f"{model}owner/huge": "[NXDT-M011] num_hidden_layers is 1000000000, too large",
        f'{data}owner/chats/*.parquet"]': "[NXDT-H007] hf:owner/chats/*.parquet: no file of the repository matches",
        f'{data}owner/chats"]': "[NXDT-H001] 'hf:owner/chats' is not the name of files on the hub.",
        f'{data}owner/chat/*.jsonl"]': "[NXDT-H003] The hub has no dataset hf:owner/chat/*.jsonl",
    }  # fmt: skip
    for (command, expected), (status, text) in zip(cases.items(), nxdt(*cases), strict=True):
        code, _, words = expected.partition(" ")
        assert (status, code in text, words in text) == (0 if code == "ok" else 2, True, True), (command, text)
        assert code == "ok" or ("1 problem" in text and "command line: " in text), (command, text)
    server.status = 503
    (status, text), *_ = nxdt("config check run.yaml", HF_HOME=str(tmp_path / "another"))
    assert (status, "[NXDT-H010]" in text, "503 Service Unavailable" in text) == (2, True, True), text


def test_without_a_connection_names_are_those_of_the_cache(server, nxdt, tmp_path):
    check = "config check run.yaml data.train_files=[chats.jsonl]"
    assert nxdt(check)[0][0] == 0
    asked = len(server.requests)
    (status, text), (other, said) = nxdt(check, f"{check} checkpoint.resume_from=hf:owner/other", HF_HUB_OFFLINE="1")
    assert status == 0, text
    assert (other, "[NXDT-H009] " in said, "hf:owner/other is not completely in the cache" in said) == (2, True, True)
    assert len(server.requests) == asked
    ((status, text),) = nxdt(check, HF_ENDPOINT="http://127.0.0.1:1")
    assert status == 0, text
    ((status, text),) = nxdt(check, HF_ENDPOINT="http://127.0.0.1:1", HF_HOME=str(tmp_path / "another"))
    assert (status, "[NXDT-H010]" in text, "exchange with http://127.0.0.1:1 failed" in text) == (2, True, True), text


def test_a_commit_that_the_cache_has_needs_no_request(server, nxdt):
    check = f"config check run.yaml data.train_files=[chats.jsonl] checkpoint.resume_from=hf:owner/small@{head(server)}"
    assert nxdt(check)[0][0] == 0
    asked = len(server.requests)
    assert nxdt(check)[0][0] == 0
    assert len(server.requests) == asked


def test_a_chat_template_may_be_a_file_of_the_hub(server, nxdt):
    template = b"{% for m in messages %}<|im_start|>{{ m.role }} says {{ m.content }}<|im_end|>{% endfor %}"
    server.commit("dataset", "owner/templates", {"says.jinja": template, "other.jinja": b""})
    named = "data.train_files=[chats.jsonl] data.chat_template_file=hf:owner/templates"
    (checked, _), (status, text), (wrong, said) = nxdt(
        f"config check run.yaml {named}/says.jinja",
        f"data preview run.yaml {named}/says.jinja -n 1",
        f"config check run.yaml {named}",
    )
    assert (checked, status, "assistant says" in text) == (0, 0, True), text
    assert (wrong, "'hf:owner/templates' is not the name of files on the hub" in said) == (2, True), said
    assert "other.jinja" not in server.read


def test_a_branch_that_moves_during_a_load_means_one_commit(server, nxdt):
    first = head(server)

    def move(path):
        if path.endswith("/revision/main") and "models" in path:
            server.commit("model", "owner/small", model_files())

    server.after = move
    ((_, shown),) = nxdt("config show run.yaml")
    assert shown.count(f"hf:owner/small@main@{first}") == 3


def test_a_run_that_resumes_has_the_commits_that_it_began_with(server, nxdt, tmp_path):
    old = head(server)
    ((_, shown),) = nxdt("config show run.yaml")
    first = f"hf:owner/small@main@{old}"
    directory = tmp_path / "nxdt_experiments" / "run"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"checkpoint: {{resume_from: '{first}'}}\n")
    new = server.commit("model", "owner/small", model_files())
    server.commit("model", "owner/small", model_files(), branch="v2")
    server.repositories["model", "owner/small"].refs["main"] = new
    resumes = "config show run.yaml checkpoint.resume_if_exists=true"
    answers = nxdt(
        "config show run.yaml",
        resumes,
        f"{resumes} checkpoint.resume_from=hf:owner/small@v2",
        f"{resumes} checkpoint.resume_from=hf:owner/small@{new}",
        f"config show run.yaml exp_manager.explicit_log_dir={directory} checkpoint.resume_if_exists=true name=other",
    )
    assert [old in text for _, text in answers] == [False, True, False, False, True]
    assert all(shown != text for _, text in answers)


def test_a_name_in_a_variable_is_written_with_its_commit(server, nxdt):
    ((_, shown),) = nxdt("config show run.yaml checkpoint.resume_from=${oc.env:MODEL}", MODEL="hf:owner/small")
    assert shown.count(f"hf:owner/small@main@{head(server)}") == 3
    assert "oc.env" not in shown


def test_a_library_that_is_missing_is_named_with_its_command_and_is_unused_without_names(server, tmp_path):
    (tmp_path / "broken" / "huggingface_hub").mkdir(parents=True)
    (tmp_path / "broken" / "huggingface_hub" / "__init__.py").write_text("raise ImportError('it is not installed')\n")
    plain = ["config", "check", "recipe:llama-tiny-sft"]
    variables = {**server.environment(tmp_path / "cache"), "PYTHONPATH": str(tmp_path / "broken")}
    (status, text), _ = run_commands([["config", "check", "run.yaml"]], variables, tmp_path)
    assert (status, "[NXDT-H002]" in text, "pip install 'huggingface_hub>=1.31'" in text) == (2, True, True)
    (status, text), (imported, _) = run_commands([plain], variables, tmp_path)
    assert (status, imported) == (0, 0), text


@pytest.mark.parametrize(
    "text",
    ["hf:a/b", "hf:a/b@v", f"hf:a/b@{'0' * 40}", f"hf:a/b@refs%2Fpr%2F3@{'1' * 40}", "hf:a/b@v/x/*.txt", "hf:a/b/c"],
)  # fmt: skip
def test_a_name_is_written_as_it_is_read(text):
    assert str(hub.HubName.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b@", "hf:/a/b", "hf:a/b@v1@v2", "hf:a/b/../c", "hf:a b/c", "a/b"]
)
def test_other_texts_are_no_names(text):
    with pytest.raises(HubError, match="NXDT-H001"):
        hub.HubName.parse(text)


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "**/*.txt", "a/**", "a/*", "**", "a/b/c.txt", "[ab]/*.txt", "*/b/*", "a/**/c.txt", "x", "?.txt"],
)
def test_patterns_match_as_paths_do(pattern, tmp_path):
    names = ["a.txt", "b.csv", "a/a.txt", "a/b/c.txt", "a/b/c/d.txt", "b/x.txt", "[ab]/y.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {name for name in glob.glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / name).is_file()}
    name = hub.HubName.parse(f"hf:owner/name/{pattern}")
    assert set(hub._matching(name, names)) == {Path(each).as_posix() for each in found}


def test_teachers_and_reward_models_are_written_with_their_commits(server, tmp_path):
    show = ("config", "show", "run.yaml", "--set")
    rewards = "rewards: [{name: model, path: hf:owner/small}, {name: format, pattern: 'x'}]"
    (_, taught), (_, rewarded), _ = run_commands(
        [
            (*show, "objective={name: distill, teacher: hf:owner/small}"),
            (*show, f"objective={{name: grpo, max_completion_length: 8, {rewards}}}", "data.name=prompts"),
        ],
        server.environment(tmp_path / "cache"),
        tmp_path,
    )
    named = f"'hf:owner/small@main@{head(server)}'"
    assert f"teacher: {named}" in taught
    assert f"path: {named}" in rewarded, rewarded
