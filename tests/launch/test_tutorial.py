"""The commands of the tutorial on Llama 3 70B, in its order, with a model of 0.1M parameters on this machine.

``/fsx`` is a directory of the test. What is downloaded is made here, and the test starts the task that ``srun`` would
start. The page's YAML is taken over but for the recipe, the engine and the type of the instances.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.checkpoint.hf.exchange import TEXT, write_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/tutorials/llama3-70b-trainium.md").read_text()
SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2}
STAND_IN = {
    "base": "tiny.yaml",
    "parallel_engine": {"name": "torch"},
    "trainer": {"max_steps": 2, "accelerator": "cpu"},
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def commands():
    """The command lines of the page, in their order."""
    for language, text in re.findall(r"^```(sh|console)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        for line in text.splitlines():
            if language == "sh" or line.startswith("$ "):
                yield line.removeprefix("$ ")


def download(directory):
    """A model and a tokenizer as a directory of Hugging Face's hub has them."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(directory)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.LlamaConfig(vocab_size=304, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def task_of(script, verb):
    """The words of the task that the script starts, without those of ``srun``."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun ") and f" {verb} " in line]
    words = shlex.split(line)
    return words[words.index(sys.executable) :]


@pytest.mark.slow
def test_the_commands_of_the_tutorial_work_with_a_tiny_model(nxdt, tmp_path):
    """By default each command has its own tests, and the next test makes the page's job out of its YAML."""
    fsx = str(tmp_path / "fsx")
    configuration, cluster = (yaml.safe_load(text.replace("/fsx", fsx)) for text in blocks("yaml"))
    model = {"name": "llama", "vocab_size": 304, "max_position_embeddings": 128, **SIZES, "optim": {"lr": 1e-3}}
    data = {"seq_length": 128, "micro_batch_size": 2, "global_batch_size": 4}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    (tmp_path / "llama3-70b.yaml").write_text(yaml.safe_dump({**configuration, **STAND_IN}))
    assert cluster.pop("instance_type") == "ml.trn1.32xlarge"
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    called, script = [], tmp_path / "launch/llama3-70b/job.sbatch"
    for line in commands():
        words = shlex.split(line.replace("/fsx", fsx).replace("--nodes 16", "--nodes 1"))
        called.append(" ".join(words[:3]))
        if words[:2] == ["hf", "download"]:
            download(Path(words[words.index("--local-dir") + 1]))
        elif words[0] == "python":
            documents = TEXT.read_text().splitlines()[:2000]
            rows = [json.dumps({"text": each}) for each in documents]
            (tmp_path / "fsx/data").mkdir()
            (tmp_path / "fsx/data/wikipedia.jsonl").write_text("\n".join(rows) + "\n")
        elif "--submit" in words:
            words = task_of(script.read_text(), "train")
            done = processes.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        elif words[0] == "nxdt":
            words = [word.replace("trn1", "h100") if word == "trn1" else word for word in words[1:]]
            done = nxdt(*words)
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    assert "export CCOM_SOCKET_IFNAME=eth0" in script.read_text()
    assert "--auto-resume=1" in script.read_text()
    assert (tmp_path / "fsx/models/my-llama3-70b/config.json").is_file()
    assert "nxdt checkpoint import" in called
    assert "nxdt data preprocess" in called


def test_the_page_as_it_is_loads_and_makes_a_job_that_compiles_first(nxdt, tmp_path):
    configuration = yaml.safe_load(blocks("yaml")[0])
    (tmp_path / "llama3-70b.yaml").write_text(yaml.safe_dump(configuration))
    (tmp_path / "cluster.yaml").write_text(blocks("yaml")[1])
    done = nxdt("launch", "hyperpod", "llama3-70b.yaml", "--nodes", "16", "--cluster", "cluster.yaml")
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "launch/llama3-70b/job.sbatch").read_text()
    assert script.index(" compile ") < script.index(" train ")
    assert {"#SBATCH --nodes=16", "#SBATCH --ntasks-per-node=1", "export FI_PROVIDER=efa"} <= set(script.splitlines())


def test_options_of_hf_are_those_of_the_installed_program():
    (line,) = [line for line in commands() if line.startswith("hf ")]
    program = Path(sys.executable).parent / "hf"
    done = subprocess.run([program, "download", "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert all(word in done.stdout for word in shlex.split(line) if word.startswith("--"))
