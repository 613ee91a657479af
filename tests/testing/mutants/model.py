"""Wrong models, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_model_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nxdt_testing.model_contract import ModelContract
from torch import nn
from torch.nn import functional

from nxdt_core.config.section import Section as BaseSection
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.protocols.plan import InitRule
from tests.testing.mutants.small_model import HEADS, ROWS, WIDTH, Attention, Layer, Small, SmallBuilder, SmallConfig

PLAN = SmallBuilder().plan()
MUTANTS: list[type[SmallBuilder]] = [SmallBuilder]


def mutant(name: str, **members: Any) -> None:
    """Add a builder. Ranks import it by name, so that it must be an attribute of this module."""
    builders = type(f"{name}Builder", (SmallBuilder,), {**members, "mutant": name, "__module__": __name__})
    globals()[builders.__name__] = builders
    MUTANTS.append(builders)


def builder(cls: type[SmallBuilder]) -> type[SmallBuilder]:
    cls.mutant = cls.__name__
    MUTANTS.append(cls)
    return cls


def model(cls: type[Small]) -> type[Small]:
    mutant(cls.__name__, model=cls)
    return cls


def layer(cls: type[Layer]) -> type[Layer]:
    mutant(cls.__name__, model=type("Model", (Small,), {"layer_type": cls}))
    return cls


def attention(cls: type[Attention]) -> type[Attention]:
    own = type("Own", (Layer,), {"attention_type": cls})
    mutant(cls.__name__, model=type("Model", (Small,), {"layer_type": own}))
    return cls


def core(cls: type[CausalAttention]) -> type[CausalAttention]:
    mutant(cls.__name__, model=type("Model", (Small,), {"layer_type": type("Own", (Layer,), {"core_type": cls})}))
    return cls


def plan(name: str, **changes: Any) -> None:
    mutant(name, plan=lambda self: replace(PLAN, **changes))


# Building


InheritsNothing = builder(type("InheritsNothing", (), {**vars(SmallBuilder), "__module__": __name__}))


@model
class LeavesMeta(Small):
    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(ROWS, WIDTH, device="cpu"))


@model
class ForgetsItsTable(Small):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, input_ids, position_ids=None, document_ids=None):
        return super().forward(input_ids, position_ids, document_ids) * self.scale


@builder
class HasNoRuleForBiases(SmallBuilder):
    def init_rules(self):
        return [InitRule(pattern="*.weight", distribution="normal")]


@builder
class DrawsItsLastNorm(SmallBuilder):
    def init_rules(self):
        drawn = InitRule(pattern="norm.weight", distribution="normal", std=0.02)
        return [InitRule(pattern="*.norm.weight", distribution="constant", mean=1.0), drawn, *super().init_rules()[1:]]


@builder
class HasARuleForNothing(SmallBuilder):
    def init_rules(self):
        return [InitRule(pattern="*.nrom.weight", distribution="constant", mean=1.0), *super().init_rules()]


@builder
class DrawsAllAlike(SmallBuilder):
    def init_rules(self):
        return [InitRule(pattern="*", distribution="constant", mean=0.1)]


# Computing


@builder
class SaysFewerRows(SmallBuilder):
    vocab_size = ROWS - 4


@layer
class HasAnIdlePart(Layer):
    def __init__(self, masks):
        super().__init__(masks)
        self.scale = nn.Parameter(torch.zeros(1))


@core
class LooksAhead(CausalAttention):
    def forward(self, query, key, value, document_ids=None):
        return functional.scaled_dot_product_attention(query, key, value)


@core
class IgnoresDocuments(CausalAttention):
    def forward(self, query, key, value, document_ids=None):
        return super().forward(query, key, value)


@core
class KeepsItsFirstMask(CausalAttention):
    kept = None

    def forward(self, query, key, value, document_ids=None):
        if document_ids is not None:
            self.kept = document_ids if self.kept is None else self.kept
        return super().forward(query, key, value, None if document_ids is None else self.kept)


@model
class RoundsItsLogits(Small):
    def forward(self, input_ids, position_ids=None, document_ids=None):
        logits = super().forward(input_ids, position_ids, document_ids)
        return logits.bfloat16().to(logits.dtype)


@model
class WidensItsLogits(Small):
    def forward(self, input_ids, position_ids=None, document_ids=None):
        return super().forward(input_ids, position_ids, document_ids).float()


@model
class CountsPlacesFromOne(Small):
    def forward(self, input_ids, position_ids=None, document_ids=None):
        places = 1 + torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        return super().forward(input_ids, places, document_ids)


@layer
class AddsItsInputWhenTraining(Layer):
    def forward(self, hidden, document_ids=None):
        return super().forward(hidden, document_ids) + (0.1 * hidden if self.training else 0)


@layer
class CountsItsCalls(Layer):
    calls = 0

    def forward(self, hidden, document_ids=None):
        self.calls += 1
        return super().forward(hidden * (1 + 0.1 * self.calls), document_ids)


class SeedsBeforeItIsBuilt(SmallBuilder):
    def build(self):
        torch.manual_seed(1234)
        return super().build()


builder(SeedsBeforeItIsBuilt)


@layer
class CentresItsRows(Layer):
    """Subtracts a mean over the batch, which differs with the size of a micro-batch."""

    def forward(self, hidden, document_ids=None):
        hidden = super().forward(hidden, document_ids)
        return hidden - 0.1 * hidden.mean(0, keepdim=True)


# Planning

plan("NamesNothing", attention_cores=("layers.*.attend",))
plan("NamesNoParameter", norms=(*PLAN.norms, "final_norm.weight"))
plan("PlansTwice", tensor={**PLAN.tensor, "layers.0.attention.out": "row"})
plan("ForgetsAMatrix", tensor={name: style for name, style in PLAN.tensor.items() if name != "layers.*.attention.out"})
plan("LetsNormsDecay", norms=("norm.weight",))
plan("LetsBiasesDecay", no_weight_decay=())
plan("TiesWhatIsNotOne", tied=(("tokens.weight", "head.weight"),))
plan("HasNoSuchHeads", heads=replace(PLAN.heads, query_heads=HEADS + 1, kv_heads=HEADS + 1))
plan("TravelsWider", pipeline=replace(PLAN.pipeline, hidden_size=2 * WIDTH))
plan("ForgetsAFirstPart", pipeline=replace(PLAN.pipeline, first=("tokens",)))


@model
class TiesInSilence(Small):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


@model
class KnowsOnlyTheWhole(Small):
    def forward(self, input_ids, position_ids=None, document_ids=None):
        return super().forward(input_ids, position_ids, document_ids) / len(self.layers)


# Layouts

plan("SwapsColumnAndRow", tensor={**PLAN.tensor, "layers.*.attention.qkv": "row", "layers.*.attention.out": "column"})
plan("ForgetsTheStyleOfAnEmbedding", tensor={name: each for name, each in PLAN.tensor.items() if name != "places"})
plan("KeepsItsCoreToItself", attention_cores=("layers.*.norm",))
plan("HasItsResidualInABlock", tensor_blocks=("layers.*", "head"))
plan("ShardsWithoutABlock", tensor_blocks=("head",))


@attention
class CountsAllHeadsOnAShard(Attention):
    def heads(self, projected):
        return projected.unflatten(-1, (HEADS, -1))


@attention
class TakesSlopesOfTheFirstHeads(Attention):
    """ALiBi with slopes from the number of heads on the rank."""

    def forward(self, hidden, document_ids=None):
        query, key, value = self.heads(self.qkv(hidden)).transpose(1, 2).chunk(3, -1)
        heads, places = query.shape[1], torch.arange(query.shape[2])
        slopes, distance = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads), places[:, None] - places
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf")).to(query.dtype)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(attended.transpose(1, 2).flatten(-2))


@builder
class DeclaresWhatItsPlanLacks(SmallBuilder):
    capabilities = frozenset({"tp", "sp", "pp", "cp", "ep"})


# Counting


@builder
class CountsWhatIsLookedUp(SmallBuilder):
    def flops_per_token(self, sequence_length):
        return super().flops_per_token(sequence_length) + 60.0 * WIDTH * ROWS


@builder
class ForgetsTheHead(SmallBuilder):
    def flops_per_token(self, sequence_length):
        return super().flops_per_token(sequence_length) - 6.0 * WIDTH * ROWS


# Hugging Face


@builder
class GivesTwoOneName(SmallBuilder):
    def hf_key_map(self):
        names = [(entry, entry.hf_names[0].replace("places", "tokens")) for entry in super().hf_key_map()]
        return [replace(entry, hf_names=(name,)) for entry, name in names]


@builder
class HasNoNameForTheHead(SmallBuilder):
    def hf_key_map(self):
        return [entry for entry in super().hf_key_map() if not entry.name.startswith("head")]


@builder
class NamesAnotherArchitecture(SmallBuilder):
    hf_architectures = ("OtherForCausalLM",)


class ReadsNothing(BaseSection):
    eps: float = 1e-5


@builder
class CannotBeRead(SmallBuilder):
    config_type = ReadsNothing


class ReadsTheSizesAlone(SmallConfig):
    @classmethod
    def from_hf(cls, hf):
        return {}


@builder
class ForgetsAValueOnReading(SmallBuilder):
    config_type = ReadsTheSizesAlone


@builder
class ForgetsAValueOnWriting(SmallBuilder):
    def config_to_hf(self):
        return super().config_to_hf() | {"eps": 1e-5}


class ReadsAnotherKey(SmallConfig):
    @classmethod
    def from_hf(cls, hf):
        return {"epsilon": hf["eps"]}


@builder
class ReadsKeysThatItDoesNotHave(SmallBuilder):
    config_type = ReadsAnotherKey


def under_contract(made: type[SmallBuilder]) -> type[ModelContract]:
    class Contract(ModelContract):
        capabilities = made.capabilities

        @pytest.fixture
        def builder(self):
            return made()

    return type(f"Test{made.mutant}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.mutant}"] = under_contract(_mutant)
