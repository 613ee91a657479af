"""Tiny models train as the torch engine trains them in one process: losses, norms and every element of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.config import load
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.models.random.init import draw
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.plan import InitRule
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all cases
STEPS, ROWS, MICRO, LENGTH, VOCABULARY = 6, 8, 1, 16, 64
LIMITS = {"loss": 1e-6, "grad norm": 2e-5, "weight norm": 1e-6, "weight": 1e-5, "log prob": 5e-5}
"""Largest differences, relative to values above 1. After one step they are below 1e-6; how far they grow until the last
depends on the CPU: 2e-6 to 1.6e-5 for log probabilities."""
BFLOAT16_LIMITS = {"loss": 0.016, "grad norm": 0.08, "weight norm": 0.016, "weight": 0.16, "log prob": 0.16}

_SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_LLAMA = {**_SIZES, "name": "llama", "num_kv_heads": 2, "ffn_hidden_size": 48, "max_position_embeddings": 32}
_GPT = {
    **_SIZES,
    "name": "gpt",
    "ffn_hidden_size": 64,
    "max_position_embeddings": 32,
    "has_bias": True,
    "make_vocab_size_divisible_by": VOCABULARY,
    "share_embeddings_and_output_weights": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": {**_LLAMA, "share_embeddings_and_output_weights": True},
    "llama-1kv": {**_LLAMA, "num_kv_heads": 1},
    "gpt": _GPT,
    "gpt-dropout": {**_GPT, "hidden_dropout": 0.1},
    "mixtral": {**_LLAMA, "name": "mixtral", "moe": {"num_experts": 4, "top_k": 2}},
    "mixtral-capacity": {
        **_LLAMA,
        "name": "mixtral",
        "moe": {"num_experts": 4, "top_k": 2, "capacity_factor": 1.0, "router_aux_loss_coef": 0.02},
    },
}
_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_VPP, _EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp2": (2, {"zero1": False}),
    "tp2": (2, {_TP: 2}),
    "tp2-sp": (2, {_TP: 2, "sequence_parallel": True}),
    "pp2": (2, {_PP: 2}),
    "tp2-dp2": (4, {_TP: 2, "zero1": False}),
    "tp2-sp-pp2": (4, {_TP: 2, _PP: 2, "sequence_parallel": True}),
    "pp2-dp2": (4, {_PP: 2, "zero1": False}),
    "dp2-zero1": (2, {"zero1": True}),
    "tp2-dp2-zero1": (4, {_TP: 2, "zero1": True}),
}
INTERLEAVED: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "pp2-vpp2": (2, {_PP: 2, _VPP: 2}),
    "tp2-sp-pp2-vpp2": (4, {_TP: 2, _PP: 2, _VPP: 2, "sequence_parallel": True}),
    "pp2-vpp2-dp2": (4, {_PP: 2, _VPP: 2, "zero1": False}),
}
EXPERTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "ep2": (2, {_EP: 2, "zero1": False}),
    "ep2-zero1": (2, {_EP: 2, "zero1": True}),
    "ep2-dp4-zero1": (4, {_EP: 2, "zero1": True}),
    "tp2-ep2": (4, {_TP: 2, _EP: 2, "zero1": False}),
    "tp2-sp-ep2-zero1": (4, {_TP: 2, _EP: 2, "sequence_parallel": True, "zero1": True}),
    "pp2-ep2": (4, {_PP: 2, _EP: 2, "zero1": False}),
}
ALL_LAYOUTS = {**LAYOUTS, **INTERLEAVED, **EXPERTS}
_LORA = {"adapter": {"name": "lora", "lora_rank": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}}
_AUTOCAST, _MIXED = {"precision": {"type": "autocast"}}, {"precision": {"type": "mixed_precision"}}
_ROUNDED = {"precision": {"type": "mixed_precisionSR"}}
_FULL = {"model": {"activations_checkpoint_granularity": "full"}}
CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    **{f"{model}-{layout}": (model, layout, {}) for model in ("llama", "gpt", "mixtral") for layout in LAYOUTS},
    **{f"llama-tied-{layout}": ("llama-tied", layout, {}) for layout in ("tp2", "pp2", "tp2-sp-pp2")},
    **{f"llama-1kv-{layout}": ("llama-1kv", layout, {}) for layout in ("tp2", "tp2-sp", "tp2-dp2")},
    "llama-autocast-tp2-sp-pp2": ("llama", "tp2-sp-pp2", _AUTOCAST),
    "llama-mixed-tp2-dp2-zero1": ("llama", "tp2-dp2-zero1", _MIXED),
    "llama-mixed-tp2-sp-pp2": ("llama", "tp2-sp-pp2", _MIXED),
    "llama-rounded-tp2-dp2-zero1": ("llama", "tp2-dp2-zero1", _ROUNDED),
    "llama-rounded-pp2": ("llama", "pp2", _ROUNDED),
    "llama-full-recompute": ("llama", "tp2-sp-pp2", _FULL),
    "gpt-dropout-tp2-sp-pp2": ("gpt-dropout", "tp2-sp-pp2", {}),
    "gpt-dropout-dp2": ("gpt-dropout", "dp2", {}),
    "llama-lora-tp2": ("llama", "tp2", _LORA),
    "llama-lora-tp2-sp-pp2": ("llama", "tp2-sp-pp2", _LORA),
    **{f"llama-{layout}": ("llama", layout, {}) for layout in INTERLEAVED},
    "llama-tied-pp2-vpp2": ("llama-tied", "pp2-vpp2", {}),
    "llama-pp2-vpp2-one-round": ("llama", "pp2-vpp2", {"rows of a micro-batch": 4}),
    "gpt-dropout-tp2-sp-pp2-vpp2": ("gpt-dropout", "tp2-sp-pp2-vpp2", {}),
    "llama-full-recompute-pp2-vpp2": ("llama", "pp2-vpp2", _FULL),
    "mixtral-capacity-tp2-sp": ("mixtral-capacity", "tp2-sp", {}),
    "mixtral-capacity-pp2": ("mixtral-capacity", "pp2", {}),
    **{f"mixtral-capacity-{layout}": ("mixtral-capacity", layout, {}) for layout in EXPERTS},
    "mixtral-ep2": ("mixtral", "ep2", {}),
    "mixtral-mixed-ep2-dp4-zero1": ("mixtral-capacity", "ep2-dp4-zero1", _MIXED),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank saw, and the elements of the weights that it holds."""

    losses: list[float]
    norms: list[float]
    weight_norms: list[float]
    evaluated: float
    log_probs: np.ndarray
    first: bool
    """Whether it is the first of the ranks that read the same samples, in their order."""
    weights: Mapping[str, tuple[tuple[slice, ...], np.ndarray]]


def micro_of(more: Mapping[str, Any]) -> int:
    return int(more.get("rows of a micro-batch", MICRO))


def run_of(engine: str, model: str, ranks: int, strategy: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    return load(
        {
            "name": "parity",
            "parallel_engine": {"name": engine},
            "trainer": {"max_steps": STEPS, "accelerator": "cpu", "devices": ranks},
            "distributed_strategy": dict(strategy),
            "data": {"name": "text", "train_files": ["package://nxdt_plugin_text/data/kjv.txt"], "seq_length": LENGTH}
            | {"global_batch_size": ROWS, "micro_batch_size": micro_of(more), "tokenizer": {"library": "byte"}},
            "model": {**MODELS[model], "optim": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}
            | more.get("model", {}),
            **{key: value for key, value in more.items() if key not in ("model", "rows of a micro-batch")},
        }
    )


def batches(micro: int = MICRO) -> list[Batch]:
    """One global batch, whose loss falls when it is repeated; its rows have different numbers of labels."""
    even = InitRule(pattern="*", distribution="uniform", mean=0.5, std=0.5)  # from 0 to 1
    numbers = draw((ROWS * (LENGTH + 1),), even, name="batch", seed=7, dtype=torch.float64)
    ids = (numbers * VOCABULARY).long().view(ROWS, LENGTH + 1)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : row + 1] = IGNORE_INDEX
    return [Batch(input_ids=ids[i : i + micro, :-1], labels=labels[i : i + micro]) for i in range(0, ROWS, micro)]


def train(engine: str, model: str, ranks: int, strategy: Mapping[str, Any], more: Mapping[str, Any]) -> Outcome:
    config = run_of(engine, model, ranks, strategy, more)
    made = build.engine(config)
    made.start()
    parallel = made.initialize_model(
        build.model_builder(config), precision=build.precision(config), seed=5, adapters=build.adapters(config)
    )
    optimizer, state = initialize_parallel_optimizer(config, made, parallel), TrainState()
    objective = build.objective(config)
    all_batches = batches(micro_of(more))
    own = len(all_batches) // made.rank_info.dp_size
    share = all_batches[made.rank_info.dp_rank * own :][:own]
    losses, norms, weight_norms = [], [], []
    for _ in range(STEPS):
        done = train_step(parallel, optimizer, share, objective, lambda step: 1.0, state, max_norm=1.0)
        losses.append(float(done.loss.loss))
        norms.append(float(done.grad_norm))
        weight_norms.append(float(parallel.parameter_norm()))
    evaluated = float(parallel.run_eval(share, objective).loss)
    log_probs = torch.cat(parallel.log_probs(share)).numpy()
    forwarded = parallel.forward(share[0].input_ids)
    assert forwarded.shape == (micro_of(more), LENGTH, VOCABULARY)
    shards = {name: local_shard_of(value) for name, value in parallel.state_dict().items()}
    outcome = Outcome(
        losses=losses,
        norms=norms,
        weight_norms=weight_norms,
        evaluated=evaluated,
        log_probs=log_probs,
        first=_is_first(made),
        weights={
            name: (
                tuple(
                    slice(o, o + n) for o, n in zip(local_shard.region.offsets, local_shard.region.shape, strict=True)
                ),
                local_shard.tensor.detach().numpy().copy(),
            )
            for name, local_shard in shards.items()
        },
    )
    made.shutdown()
    return outcome


def _is_first(engine: Any) -> bool:
    """The first pipeline stage's tensor parallel rank 0 of each data parallel rank."""
    mesh, rank = engine.rank_info.mesh, engine.rank_info.rank
    return rank % mesh["tp"] == 0 and rank < engine.rank_info.dp_size * mesh["tp"]


@cache
def alone(model: str, more: str) -> Outcome:
    """The torch engine in one process."""
    return train("torch", model, 1, {}, json.loads(more))


def train_each(cases: Sequence[str]) -> list[Outcome]:
    """One case after the other in the same processes, which take seconds to start."""
    outcomes = []
    for case in cases:
        model, layout, more = CASES[case]
        outcomes.append(train("nxd", model, *ALL_LAYOUTS[layout], more))
    return outcomes


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> Mapping[str, list[Outcome]]:
    """By case, what each rank saw; of the cases that this run of pytest has."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    found: dict[str, list[Outcome]] = {}
    for ranks in (2, 4):
        cases = [case for case in chosen if ALL_LAYOUTS[CASES[case][1]][0] == ranks]
        if cases:
            by_rank = RankPool(ranks).run(train_each, cases, timeout_s=850)
            found |= {case: [each[number] for each in by_rank] for number, case in enumerate(cases)}
    return found


def reference_of(case: str) -> Outcome:
    """What the torch engine gives for a case in one process; recomputation changes nothing."""
    model, _, more = CASES[case]
    return alone(model, json.dumps({} if more == _FULL else more))


def differences_of(case: str, found: Sequence[Outcome]) -> dict[str, float]:
    """The largest differences from the torch engine over all ranks, relative to values above 1."""
    expected = reference_of(case)
    differences = dict.fromkeys(LIMITS, 0.0)
    for rank in found:
        for key, ours, theirs in (
            ("loss", [*rank.losses, rank.evaluated], [*expected.losses, expected.evaluated]),
            ("grad norm", rank.norms, expected.norms),
            ("weight norm", rank.weight_norms, expected.weight_norms),
        ):
            scaled = [abs(a - b) / max(1, abs(b)) for a, b in zip(ours, theirs, strict=True)]
            differences[key] = max(differences[key], *scaled)
        for name, (place, values) in rank.weights.items():
            theirs = expected.weights[name][1]
            differences["weight"] = max(differences["weight"], float(np.abs(values - theirs[place]).max()))
    rows = np.concatenate([rank.log_probs for rank in found if rank.first])
    assert rows.shape == expected.log_probs.shape
    differences["log prob"] = float(np.abs(rows - expected.log_probs).max())
    return differences


@pytest.mark.parametrize("case", CASES)
def test_a_layout_trains_as_the_torch_engine_does(case: str, of_ranks: Mapping[str, list[Outcome]]) -> None:
    expected, found = reference_of(case), of_ranks[case]
    assert {name for rank in found for name in rank.weights} == expected.weights.keys()
    assert expected.losses[-1] < expected.losses[0] - 0.05
    limits = BFLOAT16_LIMITS if "precision" in CASES[case][2] else LIMITS
    assert not {key: value for key, value in differences_of(case, found).items() if value > limits[key]}
