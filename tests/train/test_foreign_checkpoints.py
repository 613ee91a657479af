"""What a checkpoint of someone else may decide: every command that reads one, with a manifest that names what runs
code, reads files, variables of the environment or other stores."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.manifest import encode_manifest
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.data.chat.templates import shipped_template
from nxdt_core.run.training import train
from tests.checkpoint.signed import write_key
from tests.train.small import SMALL

VARIABLE = "a-value-of-the-environment"
FILE = "a-line-of-a-private-file"
STEP = "step-00000002"
CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"

LORA = ("adapter.name=lora", "adapter.lora_rank=2", "adapter.save_lora_base=false")

Config = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A signed LoRA run over a base: their directories ``tuned`` and ``base``, and the keys."""
    where = tmp_path_factory.mktemp("runs")
    for name in ("own", "other"):
        write_key(where / f"{name}.pem", Ed25519PrivateKey.generate())
    given = (*SMALL, f"exp_manager.exp_dir={where}", "exp_manager.create_tensorboard_logger=false")
    given = (*given, "trainer.max_steps=2", f"checkpoint.sign.key={where}/own.pem")
    train(load("recipe:llama-tiny", [*given, "name=base"]))
    over = (f"checkpoint.resume_from={where}/base/checkpoints", "checkpoint.weight_init_only=true")
    train(load("recipe:llama-tiny", [*given, *over, "name=tuned", *LORA]))
    return where


@pytest.fixture
def place(tmp_path, trained, monkeypatch) -> Iterator[Path]:
    """A directory with copies of the checkpoints as ``stranger`` (LoRA) and ``plain``, code that marks ``RAN``, a
    private file, a variable of the environment, and a server of S3 that nobody may ask."""
    shutil.copytree(trained / "tuned" / "checkpoints", tmp_path / "stranger")
    shutil.copytree(trained / "base" / "checkpoints", tmp_path / "plain")
    code = CODE.format(marker=str(tmp_path / "RAN"))
    (tmp_path / "stranger" / "evil.py").write_text(code)
    (tmp_path / "evil_package").mkdir()
    (tmp_path / "evil_package" / "__init__.py").write_text(code)
    (tmp_path / "private").write_text(FILE)
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": "In the", "answer": "beginning"}))
    monkeypatch.setenv("NXDT_STRANGER", VARIABLE)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m nxdt_core` has the working directory
    monkeypatch.syspath_prepend(tmp_path / "stranger")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "none")
        yield tmp_path
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "RAN").exists(), "code of the checkpoint has run"
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and "stranger" not in path.parts):
        said = path.read_bytes()
        assert VARIABLE.encode() not in said, path
        assert FILE.encode() not in said or path == tmp_path / "private", path


def forge(place: Path, change: Callable[[Config], object]) -> None:
    """Change the configurations in the manifests, whose digests are right, and take the signatures away."""
    for store in ("stranger", "plain"):
        manifest = checkpoint.read_manifest(checkpoint.open_storage(str(place / store)), 2)
        config = json.loads(json.dumps(manifest.facts.config))
        change(config)
        changed = replace(manifest, facts=replace(manifest.facts, config=config))
        (place / store / STEP / "manifest.json").write_bytes(encode_manifest(changed))
        for signature in (place / store).rglob("manifest.sig"):
            signature.unlink()


@pytest.fixture
def nxdt(capfd):
    """Run ``nxdt`` here: the status and all that it says. Neither a traceback nor the variable is in it."""

    def run(*words: object) -> tuple[int, str]:
        capfd.readouterr()
        status = main([str(word) for word in words])
        said = "".join(capfd.readouterr())
        assert VARIABLE not in said
        assert FILE not in said
        assert status == 0 or "NXDT-" in said, said
        return status, said

    return run


READS = {
    "generate": ("generate", "stranger", "In the", "--max-new-tokens", 2),
    "evaluate": ("evaluate", "stranger", "held-out.jsonl", "--max-new-tokens", 2),
    "export": ("checkpoint", "export", "plain", "out"),
    "merge-lora": ("checkpoint", "merge-lora", "stranger", "merged"),
    "export-lora": ("checkpoint", "export-lora", "stranger", "adapter"),
    "list": ("checkpoint", "list", "stranger"),
    "verify": ("checkpoint", "verify", "stranger", "--deep"),
    "inspect": ("checkpoint", "inspect", "stranger"),
    "inspect --saved-config": ("checkpoint", "inspect", "stranger", "--saved-config"),
    "diff": ("checkpoint", "diff", "stranger", f"stranger/{STEP}"),
    "copy": ("checkpoint", "copy", "stranger", "copied"),
    "prune": ("checkpoint", "prune", "stranger", "--keep-last", 1),
    "train": ("train", "recipe:llama-tiny", *SMALL, "trainer.max_steps=2", *LORA),
    "resume": ("train", "recipe:llama-tiny", *SMALL, "trainer.max_steps=3", *LORA),
}
"""Every command that reads checkpoints; :func:`command` completes some."""
USES = ("generate", "evaluate", "export", "merge-lora", "export-lora")
"""Those that build the model of the manifest."""


def command(name: str, place: Path, base: Path) -> tuple[object, ...]:
    if name == "train":
        started = (f"adapter.lora_save_dir={place}/stranger", "adapter.load_lora_from_ckpt=true", "name=mine")
    elif name == "resume":
        started = (f"checkpoint.uri={place}/stranger", "checkpoint.resume_if_exists=true")
    if name in ("train", "resume"):
        over = (f"checkpoint.resume_from={base}", "checkpoint.weight_init_only=true")
        return (*READS[name], *started, *over, f"exp_manager.exp_dir={place}")
    return (*READS[name], "--base", base) if name in ("generate", "evaluate", "merge-lora") else READS[name]


def ignored(config: Config) -> None:
    """Name what is none of the model's business; a stranger's names for it are not even looked up."""
    config["name"] = "${oc.env:NXDT_STRANGER}"
    config["plugins"] = {"local": ["stranger/evil.py"], "lock": "private", "schemes": ["evil"], "block": ["text"]}
    config["checkpoint"] |= {"uri": "s3://evil/a", "storage": {"region": "${oc.env:NXDT_STRANGER}"}}
    config["checkpoint"]["sign"] = {"key": "private", "trusted": ["private"]}
    config["trainer"] |= {"callbacks": [{"name": "evil"}, {"target": "evil:run"}], "accelerator": "evil"}
    config["exp_manager"] |= {"loggers": [{"name": "evil"}], "exp_dir": "${oc.env:NXDT_STRANGER}"}
    config["exp_manager"] |= {"files_to_copy": ["private"], "log_local_rank_0_only": "${evil:1}"}
    config["data"] |= {"name": "evil", "train_files": ["private"], "no_such_key": "${oc.env:NXDT_STRANGER}"}
    config["model"] |= {"model_config": "private", "optim": {"name": "evil"}, "pipeline_cuts": ["${evil:1}"]}
    config["objective"] = config["parallel_engine"] = config["distributed_strategy"] = {"name": "evil:run"}


def written_before(config: Config) -> None:
    """Hold what checkpoints held while the schema had second names and keys without an effect."""
    config["model_source"], config["model_alignment_strategy"] = "hf", None
    config["model"] |= {"encoder_seq_length": 16, "weight_init_only": False, "fusions": {"softmax": False}}
    config["model"] |= {"use_cpu_initialization": False, "qkv_linear": False, "fuse_qkv": True, "save_logits": False}
    config["model"] |= {"transpose_nki_inputs": True}
    config["adapter"] |= {"merge_sharded_lora": False}


@pytest.mark.parametrize("name", USES)
def test_a_checkpoint_with_keys_that_the_schema_had_before_is_used(place, trained, nxdt, name):
    forge(place, written_before)
    status, said = nxdt(*command(name, place, trained / "base" / "checkpoints"))
    assert status == 0, said


@pytest.mark.parametrize("name", READS)
def test_what_a_checkpoint_may_not_decide_is_left_out(place, trained, nxdt, name):
    forge(place, ignored)
    status, said = nxdt(*command(name, place, trained / "base" / "checkpoints"))
    assert status == 0, said


def set_to(path: str, value: object) -> Callable[[Config], None]:
    *parents, key = path.split(".")

    def change(config: Config) -> None:
        for parent in parents:
            config = config.setdefault(parent, {})
        config[key] = value

    return change


REFUSED = {
    "variable of the model": ("model.hidden_size", "${oc.env:NXDT_STRANGER}", "model.hidden_size"),
    "variable of the tokenizer": ("data.tokenizer.model", "/x/${oc.env:NXDT_STRANGER}", "data.tokenizer.model"),
    "variable in a list": ("adapter.target_modules", ["${oc.env:NXDT_STRANGER}"], "adapter.target_modules"),
    "reference to another key": ("model.hidden_size", "${name}", "model.hidden_size"),
    "code decoded": ("precision.type", "${oc.decode:evil}", "precision.type"),
    "variable of messages": ("data.template_options", {"a": "${oc.env:NXDT_STRANGER}"}, "data.template_options.a"),
    "template by variable": ("data.chat_template", "${oc.env:NXDT_STRANGER}", "data.chat_template"),
    "template in a file": ("data.chat_template_file", "private", "data.chat_template_file"),
    "value of a wrong type": ("data.template_date", 5, "data.template_date"),
    "no date": ("data.template_date", "evil", "data.template_date"),
    "target as a model": ("model.name", "evil:run", "evil"),
    "target of a model": ("model.target", "evil:run", "model.target"),
    "target of a tokenizer": ("data.tokenizer.library", "evil:run", "evil"),
    "target of an adapter": ("adapter.name", "evil:run", "evil"),
    "target of a precision": ("precision.type", "evil:run", "evil"),
    "package": (
        "data.tokenizer",
        {"library": "huggingface", "model": "package://evil_package.inner/tokenizer"},
        "no package 'evil_package.inner' is installed",
    ),
    "model of a plugin file": ("model.name", "mine", "plugins.local: its run loaded ['stranger/evil.py']"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", USES)
def test_a_model_that_needs_it_is_refused_by_name(place, trained, nxdt, name, kind):
    path, value, said_of = REFUSED[kind]
    forge(place, set_to(path, value))
    if kind == "model of a plugin file":
        forge(place, set_to("plugins.local", ["stranger/evil.py"]))
    status, said = nxdt(*command(name, place, trained / "base" / "checkpoints"))
    assert status == 2, said
    assert "NXDT-S075" in said or name == "evaluate"
    assert said_of in " ".join(said.split())


@pytest.mark.parametrize("name", ["generate", "merge-lora"])
@pytest.mark.parametrize("base", ["s3://evil/base", "evil://evil/base", "${oc.env:NXDT_STRANGER}/base"])
def test_base_weights_in_another_store_are_named_by_the_user(place, nxdt, name, base):
    forge(place, set_to("checkpoint.resume_from", base))
    status, said = nxdt(*READS[name])
    assert status == 2
    assert "NXDT-S075" in said
    assert "checkpoint.resume_from" in said
    assert ("--base s3://evil/base" in said) == (base == "s3://evil/base")


def test_base_weights_are_found_where_the_run_took_them(place, nxdt):
    assert nxdt(*READS["generate"])[0] == 0
    assert nxdt(*READS["merge-lora"])[0] == 0


def test_only_a_configuration_that_the_user_names_loads_plugin_files(tmp_path, trained, nxdt, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from nxdt_core.api import ModelComponent, hookimpl\n\n\n@hookimpl\ndef nxdt_models():\n"
    record = (
        "name='mine', target='nxdt_plugin_llama.builder:LlamaBuilder', config='nxdt_plugin_llama.config:LlamaConfig'"
    )
    (tmp_path / "mine.py").write_text(f"{code}    return [ModelComponent({record})]\n")
    own = (*SMALL, "model.name=mine", "plugins.local=[mine.py]", "trainer.max_steps=1", "name=mine")
    own = (*own, f"exp_manager.exp_dir={tmp_path}", "exp_manager.create_tensorboard_logger=false")
    status, said = nxdt("train", "recipe:llama-tiny", *own)
    assert status == 0, said
    asked = ("generate", "mine/checkpoints", "In", "--max-new-tokens", 1)
    status, said = nxdt(*asked)
    assert status == 2
    assert f"its run loaded ['{tmp_path}/mine.py']" in " ".join(said.split())
    assert "--config FILE" in said
    assert nxdt(*asked, "--config", "mine/config.yaml")[0] == 0


@pytest.mark.parametrize("name", USES)
def test_signatures_are_required_where_keys_are_trusted(place, trained, nxdt, name):
    words = command(name, place, trained / "base" / "checkpoints")
    written = place / "mine.yaml"
    written.write_text(f"base: {trained}/tuned/config.yaml\ncheckpoint: {{sign: {{trusted: [{trained}/other.pub]}}}}\n")
    for required in (("--trusted", trained / "other.pub"), ("--config", written)):
        status, said = nxdt(*words, *required)
        assert status == 2
        assert "NXDT-S135" in said
    assert sorted(path.name for path in place.iterdir() if path.name in ("out", "adapter")) == []
    assert nxdt(*words, "--trusted", trained / "own.pub")[0] == 0


def test_the_base_must_be_signed_too(place, trained, nxdt):
    shutil.copytree(trained / "base" / "checkpoints", place / "base")
    (signature,) = (place / "base" / STEP).rglob("manifest.sig")
    signature.unlink()
    status, said = nxdt("generate", "stranger", "In", "--base", "base", "--trusted", trained / "own.pub")
    assert status == 2
    assert "NXDT-S134" in said


def test_the_text_of_a_template_travels_with_the_checkpoint(tmp_path, nxdt, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"{{# $ {{}} ${{x}} #}}{shipped_template('chatml').text}"
    Path("mine.jinja").write_text(text)
    sizes = (*SMALL, "data.seq_length=256", "model.max_position_embeddings=256", "data.truncation=keep_start")
    own = (*sizes, "trainer.max_steps=1", "name=mine", f"exp_manager.exp_dir={tmp_path}", "data.chat_template=null")
    own = (*own, "data.chat_template_file=mine.jinja", "exp_manager.create_tensorboard_logger=false")
    status, said = nxdt("train", "recipe:llama-tiny-sft", *own, "checkpoint.hf_every_n_saves=1")
    assert status == 0, said
    Path("mine.jinja").unlink()
    assert nxdt("checkpoint", "export", "mine/checkpoints", "out")[0] == 0
    assert Path("out/chat_template.jinja").read_text() == text
    (within,) = Path("mine/checkpoints").rglob("hf/chat_template.jinja")
    assert within.read_text() == text
    assert nxdt("generate", "mine/checkpoints", "Hello", "--chat", "--max-new-tokens", 1)[0] == 0
    status, kept = nxdt("checkpoint", "inspect", "mine/checkpoints", "--saved-config")
    assert status == 0
    assert "chatml" not in kept.partition("chat_template:")[2].splitlines()[0]
    assert sys.modules.get("evil") is None
