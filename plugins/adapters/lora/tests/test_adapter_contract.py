"""LoRA keeps what nxdt asks of all adapters."""

from __future__ import annotations

from collections import defaultdict

import pytest
from nxdt_plugin_lora.adaptation import tables_of
from nxdt_plugin_lora.adapter import LoraAdapter
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.peft_files import base_of
from nxdt_plugin_lora.saved_run import merged_weight
from nxdt_testing.adapter_contract import AdapterContract


class TestLora(AdapterContract):
    """Updates of all linear layers and experts."""

    name = "lora"

    @pytest.fixture
    def factory(self):
        return LoraAdapter

    @pytest.fixture
    def section(self):
        return LoraConfig(lora_rank=2, lora_dropout=0.0)

    @pytest.fixture
    def merged(self, section, builder):
        def merge(adapter, weights):
            updates = defaultdict(dict)
            for name in weights:
                leaf = base_of(name)
                if leaf is not None:
                    updates[leaf.base][leaf.kind] = weights[name]
            tables = tables_of(builder)
            return {
                name: merged_weight(weight, updates[name], section.scaling_of(""), table=name in tables)
                if name in updates
                else weight
                for name, weight in weights.items()
                if base_of(name) is None
            }

        return merge


@pytest.mark.slow  # the others show the same
class TestEmbeddings(TestLora):
    """Tables too, with the scale of the root of the rank."""

    @pytest.fixture
    def section(self):
        return LoraConfig(lora_rank=2, lora_dropout=0.0, target_modules=("q_proj", "embed_tokens"), use_rslora=True)

    def tries(self, layout, config):
        return layout == "tp" or config.getoption("samples", default=None) == "all"


class TestDora(TestLora):
    """Norms of rows."""

    @pytest.fixture
    def section(self):
        return LoraConfig(lora_rank=2, lora_dropout=0.0, target_modules=("q_proj", "o_proj"), use_dora=True)

    def tries(self, layout, config):
        return layout == "tp" or config.getoption("samples", default=None) == "all"


@pytest.mark.slow  # the others show the same
class TestWholeModules(TestLora):
    """All norms train whole: their names end in ``norm``, as peft compares them."""

    trains_of_base = ("norm.weight", "layers.*.attention_norm.weight", "layers.*.mlp_norm.weight")

    @pytest.fixture
    def section(self):
        return LoraConfig(lora_rank=2, lora_dropout=0.0, target_modules=("v_proj",), modules_to_save=("norm",))

    def tries(self, layout, config):
        return config.getoption("samples", default=None) == "all"
