"""``nxdt config migrate``: what is written passes ``nxdt config check``; the report tells what became of each key."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from nxdt_plugin_migrate.config.migrate import migrate
from nxdt_plugin_migrate.config.nxdt import stage_ends
from nxdt_plugin_migrate.errors import MigrationRefused, NoDecoder
from nxdt_plugin_migrate.programs import NeMo, NeuronxNemoMegatron, NxDTraining
from nxdt_testing.errors import raises
from nxdt_testing.migration_contract import MigrationContract

from nxdt_core import config
from nxdt_core.config.tree import dotted, parse_yaml
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.protocols.schedule import ScheduleHorizon
from nxdt_core.train.schedules import CosineAnnealingConfig, cosine_annealing
from tests.sampling import slow_except

HERE = Path(__file__).parent
NXDT = HERE.parents[3] / "plugins/migration/nxd/tests/published"
"""Example files of NxD Training, which the core's tests read directly."""
FILES = {
    "llama": (NXDT / "llama3_8b_pretrain.yaml", "nxdt"),
    "lora": (NXDT / "llama3_8b_lora.yaml", "nxdt"),
    "sft": (NXDT / "llama3_8b_sft.yaml", "nxdt"),
    "mixtral": (NXDT / "mixtral_8x7b_pretrain.yaml", "nxdt"),
    "context parallel": (NXDT / "llama3_70b_context_parallel.yaml", "nxdt"),
    "405b": (NXDT / "llama3.1_405b_pretrain.yaml", "nxdt"),
    "trn2": (NXDT / "llama3_8b_trn2.yaml", "nxdt"),
    "orpo": (NXDT / "llama3_8b_orpo.yaml", "nxdt"),
    "megatron llama": (NXDT / "megatron_llama_7b.yaml", "nxdt"),
    "megatron sft": (NXDT / "megatron_llama2_7b_sft.yaml", "nxdt"),
    "megatron mixtral": (HERE / "files/nxdt_megatron_mixtral.yaml", "nxdt"),
    "dpo": (HERE / "files/nxdt_dpo.yaml", "nxdt"),
    "dropless": (HERE / "files/nxdt_mixtral_dropless.yaml", "nxdt"),
    "gpt": (HERE / "files/nxdt_megatron_gpt.yaml", "nxdt"),
    "mistral": (HERE / "files/nxdt_megatron_mistral.yaml", "nxdt"),
    "nemo": (HERE / "files/nemo_gpt.yaml", "nemo"),
    "nnm": (HERE / "files/nnm_llama.yaml", "nnm"),
    "nnm lora": (HERE / "files/nnm_llama_lora.yaml", "nnm"),
}
HF_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "num_hidden_layers": 32, "hidden_size": 4096, "model_type": "llama",
            "max_position_embeddings": 8192}  # fmt: skip
HF = {
    "llama": {**HF_LLAMA, "architectures": ["LlamaForCausalLM"]},
    "mixtral": {
        **HF_LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


class TestMigrations(MigrationContract):
    """The migration of each program under a file of it; all tests are inherited."""

    @pytest.fixture(params=slow_except(FILES, ("mistral", "nemo", "nnm lora")))
    def named(self, request):
        return request.param

    @pytest.fixture
    def factory(self, named):
        return {"nxdt": NxDTraining, "nemo": NeMo, "nnm": NeuronxNemoMegatron}[FILES[named][1]]

    @pytest.fixture
    def source(self, named):
        return FILES[named][0]


@pytest.fixture(scope="module")
def migrated(installed, tmp_path_factory):
    """By name: the migration, and the file that was written."""
    folder = tmp_path_factory.mktemp("migrated")
    found = {}
    for name, (source, framework) in FILES.items():
        found[name] = migrate(source, folder / f"{name}.yaml", framework, installed)
        found[name].target.write_text(found[name].text)
    return found


@pytest.fixture
def paths_set(tmp_path):
    """Overrides for everything that a report calls still to be set."""

    def overrides(done):
        given = []
        model = "mixtral" if "\n  name: mixtral" in done.text else "llama"
        (tmp_path / "config.json").write_text(json.dumps(HF[model]))
        for key, _ in done.to_set:
            values = {"model.model_config": tmp_path / "config.json", "model.vocab_size": 32000}
            given.append(f"{key}={values.get(key, tmp_path)}")
        return given

    return overrides


def row(done, key):
    (found,) = [row for row in done.keys if row.key == key]
    return found


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_passes_the_check_once_its_paths_are_set(migrated, installed, paths_set, name):
    loaded = config.load(migrated[name].target, paths_set(migrated[name]), kernel=installed)
    assert loaded.selected("model").component.record.name in migrated[name].text


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_without_plugins_to_come_only_they_are_missed(migrated, installed, paths_set, name):
    """By default the test above loads the same files with the same overrides, which any problem would prevent."""
    problems = config.check(migrated[name].target, paths_set(migrated[name]), kernel=installed)
    assert {problem.row()[-11:] for problem in problems} <= {"[NXDT-K002]"}


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_the_file_is_in_the_report_with_its_line(migrated, name):
    source, _ = FILES[name]
    lines = source.read_text().splitlines()
    rows = [row for row in migrated[name].keys if row.line]
    for entry in rows:
        assert f"{entry.key.rpartition('.')[2]}:" in lines[entry.line - 1], entry
    for path in map(dotted, (path for path, _ in parse_yaml(source.read_text(), "")[0].leaves())):
        assert any(path == entry.key or path.startswith(f"{entry.key}.") for entry in rows), path
    explained = ("unneeded", "off", "ignored", "unsupported", "changed")
    assert all(entry.reason for entry in rows if entry.verdict in explained)


@pytest.mark.parametrize("name", FILES)
def test_what_was_not_moved_or_dropped_says_the_same(migrated, name):
    now = parse_yaml(migrated[name].text, "")[0]
    was = parse_yaml(FILES[name][0].read_text(), "")[0]
    for entry in migrated[name].keys:
        if entry.verdict in ("mapped", "renamed") and "${" not in entry.value:
            place = entry.target or entry.key
            if place in now:
                assert now.get(place) == was.get(entry.key), entry


def test_order_and_comments_stay(migrated):
    text = migrated["nemo"].text
    assert text.startswith("# From nemo_gpt.yaml of NeMo 1.x, by nxdt config migrate.\n")
    assert "micro_batch_size: 2 # of one device\n" in text
    assert list(yaml.safe_load(text))[:2] == ["name", "trainer"]
    assert "  # weights and prefixes\n  data_prefix: [0.3," in migrated["gpt"].text


def test_interpolations_follow_their_keys_or_become_values(migrated):
    text = migrated["gpt"].text
    assert "max_position_embeddings: ${data.seq_length}\n" in text
    assert "seq_length: 256\n" in text
    assert "ffn_hidden_size: ${multiply:4,${.hidden_size}}\n" in text
    assert "max_steps: ${trainer.max_steps}" in migrated["llama"].text


def test_an_interpolation_of_a_key_that_is_gone_becomes_its_value(installed, tmp_path):
    source = tmp_path / "run.yaml"
    text = FILES["mistral"][0].read_text()
    text = text.replace("max_steps: 100", "max_steps: ${multiply:2,${model.optim.steps}}")
    source.write_text(text.replace("    lr: 3e-4", "    lr: 3e-4\n    steps: 50"))
    text = migrate(source, tmp_path / "out.yaml", "nxdt", installed).text
    assert "max_steps: 100\n" in text


@pytest.mark.parametrize(
    ("name", "key", "verdict", "target", "said"),
    [
        ("llama", "exp_manager.async_checkpointing", "renamed", "checkpoint.async_save", "section checkpoint"),
        ("llama", "exp_manager.save_xser", "unneeded", "", "nxdt's own format"),
        ("llama", "model.encoder_seq_length", "renamed", "data.seq_length", ""),
        ("llama", "compiler_flags", "unneeded", "", "only the engine nxd reads it"),
        ("llama", "model.do_layer_norm_weight_decay", "mapped", "", "the wrong way round"),
        ("llama", "model.optim.weight_decay", "mapped", "", "0.01 and ignores this key"),
        ("llama", "data.name", "added", "", "model_source: hf"),
        ("llama", "data.shuffle", "added", "", "in their order"),
        ("lora", "model_alignment_strategy.peft.lora_rank", "renamed", "adapter.lora_rank", ""),
        ("lora", "adapter.name", "added", "", "peft asks for it"),
        ("lora", "model.encoder_seq_length", "ignored", "", "batches have data.seq_length (4096) tokens"),
        ("sft", "data.name", "added", "", "model_alignment_strategy is given"),
        ("sft", "data.chat_template", "added", "", "right behind the input"),
        ("sft", "data.truncation", "added", "", "longer than a sequence"),
        ("dpo", "alignment.dpo.kl_beta", "renamed", "objective.kl_beta", "searching the whole file"),
        ("dpo", "alignment.dpo.loss_type", "renamed", "objective.loss_type", "its loss is always sigmoid"),
        ("dpo", "exp_manager.save_bf16", "ignored", "", "never reads it"),
        ("dpo", "model.optim.sched.max_steps", "ignored", "", "at trainer.max_steps"),
        ("dpo", "model.rope_theta", "unneeded", "", "-1 leaves it to model.model_config"),
        ("dropless", "data.num_workers", "ignored", "", "does not read it"),
        ("dropless", "model.num_attention_heads", "ignored", "", "do not read it"),
        ("dropless", "model.moe.capacity_factor", "changed", "", "sets it to 0"),
        ("dropless", "model.moe.sinkhorn_tol", "changed", "", "null is meant"),
        ("dropless", "precision.type", "changed", "", "spelling of its documentation"),
        ("dropless", "precision.fp32_grads_cc", "unneeded", "", "never reads it"),
        ("dropless", "model.name", "added", "", "the run's name contains it"),
        ("gpt", "distributed_strategy.kv_shared_group_size", "renamed", "distributed_strategy.kv_replicator", ""),
        ("gpt", "model.pipeline_cuts", "added", "", "11 layers do not divide by 3 stages"),
        ("gpt", "model.hidden_dropout", "added", "", "default"),
        ("gpt", "model.activations_checkpoint_recompute", "added", "", "where no module is named"),
        ("gpt", "trainer.gradient_clip_val", "added", "", "not clipped"),
        ("gpt", "data.dataloader_type", "renamed", "", "data.shuffle: false"),
        ("gpt", "data.shuffle", "added", "", "takes the samples in their order"),
        ("gpt", "data.train_dir", "ignored", "", "does not read it"),
        ("gpt", "model.rope_theta", "ignored", "", "do not read it"),
        ("gpt", "exp_manager.create_early_stopping_callback", "ignored", "", "never reads it"),
        ("gpt", "data.tokenizer.library", "mapped", "", "the same tokenizer of GPT-2"),
        ("gpt", "data.tokenizer.type", "mapped", "", ""),
        ("nnm", "model.name", "added", "", "a Llama's"),
        ("mistral", "model.position_freq_base", "renamed", "model.rope_theta", ""),
        ("mistral", "model.kv_channels", "renamed", "model.head_dim", ""),
        ("mistral", "model.normalization", "unneeded", "", "every mistral is so"),
        ("mistral", "data.tokenizer.library", "changed", "", "for a directory"),
        ("mistral", "model.vocab_size", "added", "", "taken from the tokenizer there"),
        ("405b", "model.pipeline_cuts", "added", "", "126 layers do not divide by 32 stages"),
        ("trn2", "trainer.lnc", "mapped", "", ""),
        ("trn2", "trainer.sequential_move_factor", "unneeded", "", "its own part of the weights"),
        ("context parallel", "model.fusions.ring_attention", "renamed", "", "context_parallel_method: ring"),
        ("llama", "model_source", "unneeded", "", "model.name and data.name say it"),
        ("orpo", "model_alignment_strategy.orpo.beta", "renamed", "objective.beta", ""),
        ("orpo", "model_alignment_strategy.orpo.max_prompt_length", "renamed", "data.max_prompt_length", ""),
        ("megatron llama", "model.name", "added", "", "a Llama's"),
        ("megatron llama", "model.activation", "unneeded", "", "every llama is so"),
        ("megatron sft", "data.use_sft_style_data_module", "renamed", "", "data.name says it"),
        ("megatron sft", "data.dataloader_type", "ignored", "", "does not read it"),
        ("megatron mixtral", "model.name", "added", "", "model.moe is given"),
        ("megatron mixtral", "model.rope_theta", "added", "", "default there"),
        ("nemo", "model.tensor_model_parallel_size", "renamed", "distributed_strategy.tensor_model_parallel_size", ""),
        ("nemo", "model.data.splits_string", "renamed", "data.splits_string", ""),
        ("nemo", "model.num_query_groups", "renamed", "model.num_kv_heads", ""),
        ("nemo", "model.activation", "changed", "", "fused kernel"),
        ("nemo", "model.optim.name", "changed", "", "distributed_strategy.zero1"),
        ("nemo", "trainer.precision", "renamed", "", "precision.type: mixed_precision"),
        ("nemo", "model.fp8", "unsupported", "", "precision.type: float8"),
        ("nemo", "checkpoint.every_n_train_steps", "added", "", "after each validation"),
        ("nemo", "model.nsys_profile", "unneeded", "", "profiler"),
        ("nnm", "model.wrap_with_zero", "renamed", "distributed_strategy.zero1", ""),
        ("nnm", "model.zero_use_master_weight", "renamed", "", "precision.type"),
        ("nnm", "async_checkpointing", "renamed", "checkpoint.async_save", ""),
        ("nnm", "model.seed", "renamed", "seed", ""),
        ("nnm", "exp_manager.checkpoint_callback_params.train_time_interval", "renamed",
         "checkpoint.train_time_interval", ""),
        ("nnm", "exp_manager.checkpoint_callback_params.every_n_train_steps", "unneeded", "", "0 counts no steps"),
        ("nnm", "model.data.train_ds", "off", "", "fine_tuning"),
        ("nnm lora", "model.data.fine_tuning", "off", "", "fine-tuning"),
        ("nnm lora", "model.peft.peft_scheme", "renamed", "", "adapter.name: lora"),
        ("nnm lora", "model.peft.restore_from_path", "off", "", "nothing is loaded"),
        ("nnm lora", "model.peft.lora_tuning.adapter_dim", "renamed", "adapter.lora_rank", ""),
        ("nnm lora", "model.peft.lora_tuning.norm_type", "unneeded", "", "no norm"),
        ("nnm lora", "adapter.lora_alpha", "added", "", "alpha is adapter_dim there"),
        ("nnm lora", "adapter.target_modules", "added", "", "default there"),
        ("nnm", "model.data.dataloader_type", "renamed", "", "data.shuffle: false"),
        ("nemo", "model.data.dataloader_type", "renamed", "", "data.shuffle: false"),
    ],
)  # fmt: skip
def test_the_report_tells_what_became_of_a_key(migrated, name, key, verdict, target, said):
    found = row(migrated[name], key)
    assert (found.verdict, found.target) == (verdict, target)
    assert said in found.reason


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dropless", {"model.moe.capacity_factor": 0.0, "precision.type": "mixed_precisionSR", "data.shuffle": False}),
        ("gpt", {"model.pipeline_cuts": ["layers.3", "layers.7"], "trainer.gradient_clip_val": None,
                 "model.hidden_dropout": 0.1, "model.name": "gpt", "model.vocab_size": 50257,
                 "data.tokenizer.library": "megatron", "data.tokenizer.type": "GPT2BPETokenizer",
                 "data.tokenizer.vocab_file": "/data/vocab.json"}),
        ("mistral", {"model.name": "mistral", "model.rope_theta": 20000.0, "data.tokenizer.library": "huggingface"}),
        ("dpo", {"objective.name": "dpo", "data.name": "preference", "data.seq_length": 1024,
                 "data.add_bos": True, "data.max_prompt_length": 512,
                 "data.truncation_mode": "keep_end", "objective.kl_beta": 0.02}),
        ("context parallel", {"distributed_strategy.context_parallel_size": 2,
                              "distributed_strategy.context_parallel_method": "ring",
                              "distributed_strategy.pipeline_model_parallel_size": 8, "data.name": "hf-data"}),
        ("405b", {"model.num_layers": 126, "model.hidden_size": 16384, "data.seq_length": 8192,
                  "distributed_strategy.pipeline_model_parallel_size": 32}),
        ("trn2", {"trainer.lnc": 2, "trainer.devices": 64, "distributed_strategy.kv_replicator": 2}),
        ("orpo", {"objective.name": "orpo", "objective.beta": 0.1, "data.name": "preference",
                  "data.truncation_mode": "keep_start", "checkpoint.weight_init_only": True}),
        ("megatron llama", {"model.name": "llama", "data.name": "megatron-data", "model.ffn_hidden_size": 11008}),
        ("megatron sft", {"model.name": "llama", "data.name": "sft-chat", "data.packing": True, "data.seq_length": 4096,
                          "data.chat_template": "plain", "data.add_bos": True}),
        ("megatron mixtral", {"model.name": "mixtral", "model.moe.sinkhorn_tol": None, "model.num_kv_heads": 32,
                              "data.tokenizer.library": "huggingface", "model.moe.capacity_factor": 2.0}),
        ("nemo", {"precision.type": "mixed_precision", "model.activation": "swiglu", "data.seq_length": 1024}),
        ("nnm", {"precision.type": "mixed_precision", "model.name": "llama", "seed": 4321,
                 "checkpoint.train_time_interval": 36000}),
        ("nnm lora", {"data.name": "megatron-data", "data.shuffle": False, "model.name": "llama",
                      "adapter": {"name": "lora", "lora_rank": 8, "lora_alpha": 8, "lora_dropout": 0.0,
                                  "target_modules": ["qkv_proj"]}}),
    ],
)  # fmt: skip
def test_the_file_has_the_values_that_the_report_tells(migrated, name, values):
    tree = parse_yaml(migrated[name].text, "")[0]
    assert {key: tree.get(key) for key in values} == values


def test_the_report_shows_values_as_yaml_has_them(migrated):
    assert row(migrated["megatron mixtral"], "model.moe.sinkhorn_tol").value == "None → null"
    assert row(migrated["gpt"], "trainer.gradient_clip_val").value == "null"


def test_what_is_lost_stands_below_the_file(migrated):
    assert "# Not carried over:\n" in migrated["nemo"].text
    fp8 = "#   model.fp8: True  (line 131: set precision.type: float8 of nxdt-plugin-torchao instead)\n"
    assert fp8 in migrated["nemo"].text


def test_what_is_still_to_be_set_is_listed(migrated):
    assert dict(migrated["nemo"].to_set)["data.tokenizer.model"] == "it has no value yet"
    assert "data.data_prefix" in dict(migrated["nnm"].to_set)
    assert "there is no /data/tokenised here" in dict(migrated["dropless"].to_set)["data.train_dir"]


def test_a_prefix_with_brackets_is_found_where_files_begin_with_it(installed, tmp_path):
    source, prefix = tmp_path / "run.yaml", tmp_path / "corpus[1]"
    source.write_text(FILES["dropless"][0].read_text().replace("/data/tokenised", str(prefix)))
    assert (
        f"there is no {prefix} here" in dict(migrate(source, tmp_path / "out.yaml", "nxdt", installed).to_set).values()
    )
    Path(f"{prefix}.idx").touch()
    assert "data.train_dir" not in dict(migrate(source, tmp_path / "out.yaml", "nxdt", installed).to_set)


@pytest.mark.parametrize("layers", range(4, 40))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_cuts_share_layers_out_evenly_with_the_ends_lighter(layers, stages):
    ends = [-1, *stage_ends(layers, stages), layers - 1]
    sizes = [after - before for before, after in pairwise(ends)]
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes) or len(set(sizes)) == 1 or sizes.count(min(sizes)) == 1


@pytest.mark.parametrize(
    ("precision", "masters", "chosen"),
    [
        ("32", "False", "fp32"),
        ("bf16", "False", "autocast"),
        ("bf16-mixed", "True", "mixed_precision"),
        ("bf16-true", "False", "bf16SR"),
        ("16-mixed", "False", "autocast"),
        ("16", "True", "mixed_precision"),
    ],
)
def test_the_precision_of_nemo(installed, tmp_path, precision, masters, chosen):
    source = tmp_path / "run.yaml"
    text = FILES["nemo"][0].read_text().replace("name: distributed_fused_adam", "name: fused_adam")
    text = text.replace("precision: bf16-mixed", f"precision: {precision}")
    source.write_text(text.replace("megatron_amp_O2: True", f"megatron_amp_O2: {masters}"))
    done = migrate(source, tmp_path / "out.yaml", "nemo", installed)
    assert parse_yaml(done.text, "")[0].get("precision.type") == chosen


@pytest.mark.parametrize(
    ("above", "below", "kept"),
    [
        ("", "context_parallel_size: 4\n", 4),  # the top level counts first
        ("", "zz:\n  context_parallel_size: 4\n", 2),  # then the first of the file
        ("zz:\n  context_parallel_size: 4\n", "", 4),
    ],
)
def test_of_two_places_the_one_that_the_search_finds_counts(installed, tmp_path, above, below, kept):
    source = tmp_path / "run.yaml"
    own = FILES["mistral"][0].read_text().replace("  zero1: True\n", "  zero1: True\n  context_parallel_size: 2\n")
    source.write_text(above + own + below)
    done = migrate(source, tmp_path / "out.yaml", "nxdt", installed)
    assert parse_yaml(done.text, "")[0].get("distributed_strategy.context_parallel_size") == kept
    assert "ignored" in {row.verdict for row in done.keys if "context_parallel_size" in row.key}


def test_a_key_that_no_reader_has_is_told_with_its_neighbour(installed, tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(FILES["llama"][0].read_text().replace("  max_steps:", "  max_stepps: 9\n  max_steps:"))
    done = migrate(source, tmp_path / "out.yaml", "nxdt", installed)
    assert row(done, "trainer.max_stepps").verdict == "ignored"
    assert "trainer.max_steps" in row(done, "trainer.max_stepps").reason
    assert "max_stepps" not in done.text


@pytest.mark.parametrize(
    ("text", "framework", "said"),
    [
        ("base_model: x\ndatasets: []\nsequence_len: 3", "nxdt", "axolotl"),
        ("model:\n  _component_: torchtune.models.x", "nxdt", "torchtune"),
        ("output_dir: x\nper_device_train_batch_size: 4", "nemo", "TrainingArguments"),
        ("model_name_or_path: x\nfinetuning_type: lora", "nxdt", "LLaMA-Factory"),
        ("zero_optimization: {stage: 2}", "nxdt", "DeepSpeed"),
        ("model: {_target_: nemo.collections.llm.GPTModel}", "nemo", "NeMo 2"),
        ("hello: world", "nxdt", "none of the sections of NxD Training"),
        ("", "nemo", "none of the sections"),
    ],
)
def test_a_file_of_another_framework_is_refused_in_words(installed, tmp_path, text, framework, said):
    source = tmp_path / "run.yaml"
    source.write_text(text)
    with raises(MigrationRefused, match=said) as caught:
        migrate(source, tmp_path / "out.yaml", framework, installed)
    assert caught.value.code == "NXDT-C030"
    assert "nxdt recipes list" in str(caught.value)


@pytest.mark.parametrize(("name", "said"), [("nemo", "nxdt"), ("nnm", "nxdt"), ("gpt", "nemo"), ("nnm", "nemo")])
def test_a_file_that_is_called_by_the_wrong_name_is_refused_with_the_right_one(installed, tmp_path, name, said):
    source, right = FILES[name]
    with raises(MigrationRefused, match=f"Say --from {right}"):
        migrate(source, tmp_path / "out.yaml", said, installed)


def test_a_file_that_is_no_yaml_is_told_with_its_line(installed, tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text("trainer:\n  max_steps: [1\n")
    with pytest.raises(ConfigError, match="NXDT-C004"):
        migrate(source, tmp_path / "out.yaml", "nxdt", installed)


def with_section(tmp_path, name, section, text):
    """A file of the framework whose section says ``text``."""
    tree = yaml.safe_load(FILES[name][0].read_text())
    *around, last = section.split(".")
    place = tree
    for part in around:
        place = place[part]
    place[last] = yaml.safe_load(text)
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(tree))
    return source


def test_more_constant_steps_than_the_run_has_fall_as_they_did_there(installed, tmp_path):
    source = with_section(tmp_path, "gpt", "model.optim.sched.constant_steps", "80000")
    done = migrate(source, tmp_path / "out.yaml", "nxdt", installed)
    assert "model.optim.sched.constant_steps" not in {key for key, _ in done.remaining}
    found = row(done, "model.optim.sched.constant_steps")
    assert (found.verdict, found.value) == ("changed", "80000 → 3899")
    assert "right behind the warm-up" in found.reason
    tree = parse_yaml(done.text, "")[0]
    section = {key: tree.get(f"model.optim.sched.{key}") for key in ("warmup_steps", "constant_steps", "min_lr")}
    curve = cosine_annealing(CosineAnnealingConfig(**section), ScheduleHorizon(max_steps=4000, lr=2.5e-4))
    assert [curve(step) for step in (100, 101, 4000)] == [1.0, *[pytest.approx(1e-5 / 2.5e-4)] * 2]  # NeMo's own values


def test_megatrons_tokenizer_without_files_is_fetched(installed, tmp_path):
    source = with_section(tmp_path, "gpt", "data.tokenizer", "{library: megatron, type: GPT2BPETokenizer}")
    tree = parse_yaml(migrate(source, tmp_path / "out.yaml", "nxdt", installed).text, "")[0]
    assert tree.get("data.tokenizer") == {"library": "huggingface", "type": "gpt2"}
    assert tree.get("model.vocab_size") == 50257


@pytest.mark.parametrize(
    ("name", "given", "kept", "granularity"),
    [
        ("megatron mixtral", "[CoreAttention, NeuronSwitchMLP]", ["CoreAttention", "LlamaMLP"], "selective"),
        ("megatron llama", "[CoreAttention, NeuronSwitchMLP]", ["CoreAttention"], "selective"),
        ("llama", "[CoreAttention, LlamaMLP]", ["CoreAttention", "LlamaMLP"], "selective"),
        ("llama", "[NoSuch]", None, None),
        ("mixtral", "[CoreAttention]", None, "full"),
        ("llama", "[]", ["CoreAttention"], "selective"),
    ],
)
def test_modules_to_recompute_are_those_that_the_model_has(installed, tmp_path, name, given, kept, granularity):
    tree = yaml.safe_load(FILES[name][0].read_text())
    tree["model"] |= {"activations_checkpoint_granularity": granularity or "selective"}
    tree["model"] |= {"activations_checkpoint_recompute": yaml.safe_load(given)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = migrate(tmp_path / "run.yaml", tmp_path / "out.yaml", "nxdt", installed)
    found = parse_yaml(done.text, "")[0]
    assert found.get("model.activations_checkpoint_recompute") == kept
    assert found.get("model.activations_checkpoint_granularity") == granularity
    assert not [key for key, _ in done.remaining if "recompute" in key]


@pytest.mark.parametrize(
    ("saving", "kept"),
    [
        ({}, ("val_loss", "min")),
        ({"monitor": "step", "mode": "max"}, ("step", "max")),
        ({"monitor": "val_loss"}, ("val_loss", "min")),
        ({"monitor": "accuracy"}, ("accuracy", "min")),
    ],
)
def test_the_metric_that_checkpoints_are_kept_by_is_the_default_there(installed, tmp_path, saving, kept):
    tree = yaml.safe_load(FILES["nemo"][0].read_text())
    tree["exp_manager"]["checkpoint_callback_params"] = {"save_top_k": 3, **saving}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = migrate(tmp_path / "run.yaml", tmp_path / "out.yaml", "nemo", installed)
    found = parse_yaml(done.text, "")[0]
    assert (found.get("checkpoint.monitor"), found.get("checkpoint.mode")) == kept
    assert not done.remaining


MOE = ("output_router_logits", "router_aux_loss_coef", "capacity_factor", "normalize_top_k_affinities")


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"num_experts": 8, "top_k": 2}, (False, 0.0, 4.0, True)),
        ({"num_experts": 8}, (False, 0.0, 8.0, False)),
        ({"num_experts": 8, "top_k": 2, "capacity_factor": 2.0, "output_router_logits": True,
          "router_aux_loss_coef": 0.5, "normalize_top_k_affinities": False}, (True, 0.5, 2.0, False)),
    ],
)  # fmt: skip
def test_missing_keys_of_experts_mean_what_they_mean_there(installed, tmp_path, given, values):
    source = with_section(tmp_path, "megatron mixtral", "model.moe", yaml.safe_dump(given))
    tree = parse_yaml(migrate(source, tmp_path / "out.yaml", "nxdt", installed).text, "")[0]
    assert tuple(tree.get(f"model.moe.{key}") for key in MOE) == values


@pytest.mark.parametrize(("coefficient", "capacity"), [(0.01, None), (None, 1.25)])
def test_experts_of_nemo_keep_their_loss_and_capacity(installed, tmp_path, coefficient, capacity):
    tree = yaml.safe_load(FILES["nemo"][0].read_text())
    given = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": coefficient}
    given |= {"moe_expert_capacity_factor": capacity, "rotary_percentage": 1.0, "hidden_dropout": 0.0}
    tree["model"] |= {key: value for key, value in given.items() if value is not None}
    tree["model"] |= {"normalization": "rmsnorm", "attention_dropout": 0.0}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    found = parse_yaml(migrate(tmp_path / "run.yaml", tmp_path / "out.yaml", "nemo", installed).text, "")[0]
    assert found.get("model.name") == "mixtral"
    assert tuple(found.get(f"model.moe.{key}") for key in MOE[:3]) == (True, coefficient or 0.0, capacity)


def adapter_of(installed, tmp_path, peft):
    """The section of the adapter that a file of NeMo with ``peft`` becomes, and what the report says of its keys."""
    done = migrate(with_section(tmp_path, "nemo", "model.peft", peft), tmp_path / "out.yaml", "nemo", installed)
    verdicts = {row.key.removeprefix("model.peft."): row.verdict for row in done.keys if "peft" in row.key}
    return parse_yaml(done.text, "")[0].get("adapter"), verdicts


def test_modules_and_scale_of_a_lora_of_nemo_are_kept(installed, tmp_path):
    lora = "{target_modules: [attention, mlp_fc2], adapter_dim: 32, alpha: 64, dropout: 0.1, weight_tying: true}"
    peft = f"{{peft_scheme: lora, lora_tuning: {lora}, ia3_tuning: {{x: 1}}}}"
    found, verdicts = adapter_of(installed, tmp_path, peft)
    wanted = {"name": "lora", "lora_rank": 32, "lora_alpha": 64, "lora_dropout": 0.1}
    assert found == {**wanted, "target_modules": ["qkv_proj", "o_proj", "down_proj"]}
    assert verdicts["lora_tuning.weight_tying"] == "unsupported"
    assert verdicts["ia3_tuning"] == "off"


@pytest.mark.parametrize(
    ("peft", "verdict"),
    [
        ("{peft_scheme: null, lora_tuning: {adapter_dim: 8}}", "off"),
        ("{peft_scheme: ptuning, p_tuning: {virtual_tokens: 10}}", "unsupported"),
    ],
)
def test_what_is_not_lora_is_no_adapter(installed, tmp_path, peft, verdict):
    found, verdicts = adapter_of(installed, tmp_path, peft)
    assert found is None
    assert set(verdicts.values()) == {verdict}


def test_names_that_nxd_training_searches_for_stay_where_nemo_has_them(installed, tmp_path):
    source = with_section(tmp_path, "nemo", "model.other", "{lora_rank: 4, context_parallel_size: 2}")
    done = migrate(source, tmp_path / "out.yaml", "nemo", installed)
    assert row(done, "model.other").verdict == "unsupported"
    assert "adapter" not in done.text


def test_fine_tuning_is_reported_where_the_file_asks_for_it(installed, tmp_path):
    source = with_section(tmp_path, "nnm", "model.data.fine_tuning", "true")
    done = migrate(source, tmp_path / "out.yaml", "nnm", installed)
    for key in ("model.data.fine_tuning", "model.data.train_ds"):
        assert row(done, key).verdict == "unsupported"
        assert "data.name: sft-chat" in row(done, key).reason


@pytest.mark.parametrize("name", ["nemo", "nnm", "nnm lora"])
def test_nothing_that_is_unset_or_off_is_called_unsupported(migrated, name):
    lost = [each for each in migrated[name].keys if each.verdict == "unsupported"]
    assert [each.key for each in lost if yaml.safe_load(each.value) in (None, False, 0, "", [])] == []


SWITCHES = {
    "null": "off", "false": "off", "0": "off", "[]": "off", "''": "off", "{enabled: false}": "off",
    "true": "unsupported", "3": "unsupported", "x": "unsupported", "{enabled: true}": "unsupported",
}  # fmt: skip


@pytest.fixture(scope="module")
def switched(installed, tmp_path_factory):
    """The migration of a file of NeMo whose model has a key of its own for each value of ``SWITCHES``."""
    folder = tmp_path_factory.mktemp("switched")
    tree = yaml.safe_load(FILES["nemo"][0].read_text())
    tree["model"] |= {f"some_{number}_switch": yaml.safe_load(text) for number, text in enumerate(SWITCHES)}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return migrate(folder / "run.yaml", folder / "out.yaml", "nemo", installed)


@pytest.mark.parametrize(("text", "verdict"), SWITCHES.items())
def test_an_unknown_key_is_unsupported_where_it_asks_for_something(switched, text, verdict):
    name = f"some_{[*SWITCHES].index(text)}_switch"
    (found,) = [each for each in switched.keys if each.key.startswith(f"model.{name}")]
    assert found.verdict == verdict
    assert (name in switched.text) == (verdict == "unsupported")


@pytest.mark.parametrize("name", ["nemo", "nnm"])
@pytest.mark.parametrize(
    ("section", "text", "said"),
    [
        ("model.bert_binary_head", "true", "is of BERT (model.bert_binary_head)"),
        ("model.data.masked_lm_prob", "0.15", "is of BERT (model.data.masked_lm_prob)"),
        ("model.data.dataset_type", "t5", "is of T5, BART or UL2"),
        ("model.tokenizer.num_sentinel_tokens", "0", "is of T5, BART or UL2 (model.tokenizer.num_sentinel_tokens)"),
        ("model.data.train_ds", "{src_file_name: x}", "is of T5 (model.data.train_ds.src_file_name)"),
        ("model.decoder", "{num_layers: 2}", "is of an encoder with a decoder"),
        ("model.encoder", "{library: nemo}", "TransformerLM"),
        ("model.language_model", "{hidden_size: 4}", "TransformerLM"),
        ("model", "{enc_num_layers: 4, chunk_size: 64, bert_binary_head: true}", "is of RETRO"),
        ("model", "{ngroups_mamba: 8, data: {masked_lm_prob: 0.15}}", "is of Mamba"),
    ],
)  # fmt: skip
def test_a_model_that_is_no_decoder_is_refused_with_what_shows_it(installed, tmp_path, name, section, text, said):
    source = with_section(tmp_path, name, section, text)
    with raises(NoDecoder) as caught:
        migrate(source, tmp_path / "out.yaml", name, installed)
    assert caught.value.code == "NXDT-C033"
    assert said in str(caught.value)
    for model in ("gpt", "llama", "mistral", "mixtral"):
        assert model in caught.value.do()


@pytest.mark.parametrize("text", ["null", "{}"])
@pytest.mark.parametrize(("name", "section"), [("gpt", "trainer"), ("gpt", "model.optim"), ("nemo", "model.tokenizer")])
def test_an_empty_section_is_left_out(installed, tmp_path, name, section, text):
    source = with_section(tmp_path, name, section, text)
    done = migrate(source, tmp_path / "out.yaml", FILES[name][1], installed)
    assert row(done, section).reason == "it is empty"
    assert yaml.safe_load(done.text)


@pytest.mark.parametrize("text", ["3", "[1]"])
@pytest.mark.parametrize(("name", "section"), [("gpt", "trainer"), ("gpt", "model.optim"), ("nemo", "model.data")])
def test_a_section_that_is_none_is_told_with_its_line(installed, tmp_path, name, section, text):
    source = with_section(tmp_path, name, section, text)
    with pytest.raises(ConfigError, match=rf"run.yaml:\d+: {section}: found .*; allowed: a mapping"):
        migrate(source, tmp_path / "out.yaml", FILES[name][1], installed)


def test_looks_of_yaml_that_are_kept_or_made_plain(installed, tmp_path):
    text = FILES["mistral"][0].read_text()
    text = text.replace("  max_steps: 100\n", "  max_steps: &steps 100 # a hundred\n")
    text = text.replace("    name: adamw\n    lr: 3e-4\n", "    {name: adamw, lr: 3e-4, eps: 1.0e-9, # small\n")
    sched = "    sched:\n      name: CosineAnnealing\n      warmup_steps: 10\n      min_lr: 3.0e-5\n"
    assert sched in text
    text = text.replace(sched, "      sched: {name: CosineAnnealing, warmup_steps: 10, max_steps: *steps}}\n")
    text = text.replace("seed: 5", "seed: 0x5").replace("name: mistral_run\nm", "name: >-\n  mistral\n  run\nm")
    source = tmp_path / "run.yaml"
    source.write_text(text)
    done = migrate(source, tmp_path / "out.yaml", "nxdt", installed)
    assert done.text.count("# small") == 1
    for line in ("max_steps: 100 # a hundred", "    lr: 0.0003", "seed: 0x5", "name: mistral run"):
        assert f"{line}\n" in done.text, line


def test_a_list_of_files_that_hydra_merges_is_told(installed, tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(FILES["nemo"][0].read_text().replace("  - _self_", "  - _self_\n  - base_config"))
    done = migrate(source, tmp_path / "out.yaml", "nemo", installed)
    assert row(done, "defaults").verdict == "unsupported"
    assert "--cfg job --resolve" in row(done, "defaults").reason


def test_a_relative_path_is_looked_for_beside_the_new_file(installed, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(HF["llama"]))
    monkeypatch.chdir("/")
    done = migrate(FILES["llama"][0], tmp_path / "out.yaml", "nxdt", installed)
    assert "model.model_config" not in {key for key, _ in (*done.to_set, *done.remaining)}
    assert "not at the working directory" in row(done, "model.model_config").reason
