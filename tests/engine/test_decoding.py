"""Passes with a cache of keys and values give the logits of passes over all tokens, in every layout that has one."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.config import load
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.distributed.device_operations import HostOperations
from nxdt_core.distributed.devices import PROFILES
from nxdt_core.distributed.placement import is_dtensor, is_fsdp_module, local_of
from nxdt_core.engine.decoding import attention_slots
from nxdt_core.protocols.parallel_model import CacheUnsupported
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.train import build
from nxdt_core.train.sampling import Sampling, Writer
from nxdt_core.train.step import initialize_parallel_model
from tests.sampling import slow_except

STRATEGY = "distributed_strategy."
TWO = "trainer.devices=2"
RECOMPUTED = (
    "model.activations_checkpoint_granularity=selective",
    "model.activations_checkpoint_recompute=[CoreAttention]",
)
LAYOUTS = {
    "one": ("trainer.devices=1",),
    "one-dropout": ("recipe:gpt-tiny", "trainer.devices=1", "model.attention_dropout=0.1"),
    "one-experts": ("recipe:mixtral-tiny", "trainer.devices=1", "model.moe.capacity_factor=1.0"),
    "one-recomputed": ("trainer.devices=1", *RECOMPUTED),
    "one-compiled": ("trainer.devices=1", "model.compile=true"),
    "dp2-zero1": (TWO, f"{STRATEGY}zero_stage=1"),
    "dp2-zero3": (TWO, f"{STRATEGY}zero_stage=3"),
    "tp2": (TWO, f"{STRATEGY}tensor_model_parallel_size=2"),
    "tp2-sp": (TWO, f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true"),
    "tp2-gpt": ("recipe:gpt-tiny", TWO, f"{STRATEGY}tensor_model_parallel_size=2"),
    "tp2-hf": ("recipe:hf-tiny", TWO, f"{STRATEGY}tensor_model_parallel_size=2"),
    "pp2": (TWO, f"{STRATEGY}pipeline_model_parallel_size=2"),
    "pp2-hf": ("recipe:hf-tiny", TWO, f"{STRATEGY}pipeline_model_parallel_size=2"),
}
QUICK = ("one", "one-dropout", "one-experts", "one-recomputed", "tp2-sp", "pp2")
MISTRAL = ("recipe:mistral-tiny", "model.sliding_window=8")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [90, 4], [33, 34, 35, 36, 37]]
STEPS = 12


def started(overrides):
    recipe, *words = overrides if overrides[0].startswith("recipe:") else (*MISTRAL, *overrides)
    batches = ("data.seq_length=32", "data.global_batch_size=2", "data.micro_batch_size=1")
    config = load(recipe, ["trainer.accelerator=cpu", *batches, *words])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    with torch.no_grad():  # fresh weights are too small to attend to anything
        for _, parameter in model.named_parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.sync_tied_copies()
    return engine, model


def differences(overrides):
    """The largest differences of logits, and of those with a mistake that the test must see, and their size."""
    engine, model = started(overrides)
    columns = max(map(len, PROMPTS))
    decoding = model.decoding([len(prompt) for prompt in PROMPTS], columns + STEPS)
    model.module.train()
    rows = [[*prompt] for prompt in PROMPTS]
    logits = decoding(torch.tensor([[0] * (columns - len(row)) + row for row in rows]))
    found, places = [], [*range(len(rows))]
    for step in range(STEPS):
        with torch.compiler.set_stance("force_eager"):  # the passes with a cache see to that themselves
            whole = torch.stack([model.forward(torch.tensor([row]))[0, -1] for row in rows])
        found.append(float((logits - whole).abs().max() / whole.abs().max()))
        for row, number in zip(rows, places, strict=True):
            row.append((7 * number + 3 * step) % 90)
        if step == 3:
            rows, places = [rows[2], rows[1], rows[1]], [2, 1, 1]
            rows[2] = [*rows[1]]
            decoding.keep([2, 1, 1])
        logits = decoding(torch.tensor([row[-1:] for row in rows]))
    cores = [type(part).__name__ for module in model.local_modules() for part in module.modules()]
    engine.shutdown()
    return max(found), "_CachedAttention" in cores


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, QUICK))
def test_logits_of_one_token_more_are_those_of_all_tokens(ranks, layout):
    for largest, left_behind in ranks(2 if TWO in LAYOUTS[layout] else 1).run(differences, LAYOUTS[layout]):
        assert largest < 2e-5
        assert not left_behind


class Recording(HostOperations):
    """Records a pass by compiling it as one graph, or by remembering it."""

    def __init__(self, compiles):
        self.compiles, self.launches = compiles, 0

    def recorded(self, run, device):
        compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="eager") if self.compiles else run

        def launch():
            self.launches += 1
            compiled()

        return launch


class Gathers(TorchDispatchMode):
    """Counts collectives that gather."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "c10d" in function.namespace and "gather" in str(function)
        return function(*args, **(kwargs or {}))


def written(overrides, compiles):
    """Texts token by token and recorded, for two states of the weights; gathers of both ways, for the last state;
    launches for both, and their graphs; names of weights that are left gathered."""
    engine, model = started(("recipe:llama-tiny", "model.num_layers=2", *overrides))
    writer = Writer(model=model, tokenizer=ByteTokenizer(), window=32, stop_ids=())
    plain, device, pairs = PROFILES["cpu"], Recording(compiles), []

    def texts():
        return [*writer.tokens(PROMPTS, Sampling(max_new_tokens=STEPS, temperature=1.0, seed=3))]

    counters.clear()
    try:
        for _ in range(2):
            with Gathers() as gathers:
                expected = texts()
            PROFILES["cpu"] = replace(plain, records=True, operations=device)
            with nullcontext() if compiles else Gathers() as of_recorded:
                pairs.append((expected, texts()))
            PROFILES["cpu"] = plain
            with torch.no_grad():
                for _, parameter in model.named_parameters():
                    local_of(parameter).mul_(1.5)
            model.sync_tied_copies()
    finally:
        PROFILES["cpu"] = plain
    parameters = model.module.named_parameters() if is_fsdp_module(model.module) else ()
    gathered = {name for name, parameter in parameters if not is_dtensor(parameter)}
    engine.shutdown()
    assert not model._recorded, "they refer to groups"
    counts = gathers.count, None if of_recorded is None else of_recorded.count
    return pairs, counts, device.launches, counters["stats"]["unique_graphs"], gathered


PER_PASS = 3
"""What ZeRO-3 gathers in each pass: the embedding and two layers. The norm with the head stays gathered."""


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "gathers", "launches"),
    [
        ("tp2", STEPS, 2 * STEPS - 3),  # logits; two passes of the first text are none of its recording
        ("dp2-zero1", PER_PASS + 1, 2 * STEPS - 4),  # and one of the second if weights are gathered elsewhere
        ("dp2-zero3", PER_PASS * STEPS + 1, 0),
    ],
)
def test_recorded_passes_of_two_ranks_write_the_same(ranks, layout, gathers, launches, compiles):
    for pairs, counts, launched, graphs, gathered in ranks(2).run(written, LAYOUTS[layout], compiles):
        assert all(one == other for one, other in pairs)
        assert pairs[0] != pairs[1], "other weights write other texts"
        assert counts == (gathers, None if compiles else gathers)
        assert launches <= launched <= 2 * STEPS - 3
        assert graphs == int(compiles and launches > 0)
        assert not gathered


BY_LENGTH = {
    "dynamic": "{rope_type: dynamic, factor: 4, original_max_position_embeddings: 8}",
    "longrope": "{rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1, 1, 1], long_factor: [9, 8, 7, 6, 5, 4, 3, 2], "
    "original_max_position_embeddings: 9}",
}


def why_no_cache(model, lengths, columns):
    try:
        model.decoding(lengths, columns)
    except CacheUnsupported as error:
        return str(error)
    return None


def logits_by_length(kind, overrides):
    """Logits of a text of 13 tokens, and of one of 9 with a cache, in a model whose frequencies follow the length."""
    engine, model = started(("recipe:llama-tiny", f"model.rope_scaling={BY_LENGTH[kind]}", *overrides))
    whole = model.forward(torch.tensor([PROMPTS[0] + PROMPTS[1]]))
    cached, reason = model.forward(torch.tensor([PROMPTS[0][:9]]))[:, -1], why_no_cache(model, [9], 10)
    if why_no_cache(model, [9], 9) is None:
        cached = model.decoding([9], 9)(torch.tensor([PROMPTS[0][:9]]))
    engine.shutdown()
    return whole, cached, reason


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_what_fills_a_text_up_does_not_lengthen_it(ranks, kind):
    whole, cached, reason = ranks(1).run(logits_by_length, kind, ("trainer.devices=1",))[0]
    limit = {"dynamic": 8, "longrope": 9}[kind]
    assert reason == f"the rotary frequencies change where a text outgrows {limit} tokens"
    for mine, other, _ in ranks(2).run(logits_by_length, kind, LAYOUTS["tp2-sp"]):
        assert (mine - whole).abs().max() < 2e-5 * whole.abs().max()
        assert (other - cached).abs().max() < 2e-5 * cached.abs().max()


def reasons():
    found = {}
    overrides = {"cp2": (TWO, f"{STRATEGY}context_parallel_size=2")}
    for name, words in overrides.items():
        engine, model = started(("recipe:llama-tiny", *words))
        found[name] = why_no_cache(model, [3], 8)
        engine.shutdown()
    return found


def test_a_layout_without_a_cache_says_why(ranks):
    assert ranks(2).run(reasons)[0] == {"cp2": "context parallel ranks share each sequence"}


def test_a_model_without_cores_that_say_what_they_compute_says_so():
    model = torch.nn.ModuleDict({"core": torch.nn.Identity()})
    with pytest.raises(CacheUnsupported, match="the model's plan names no attention cores"):
        attention_slots([model], ParallelPlan())
    with pytest.raises(CacheUnsupported, match=r"'core' \(Identity\).*does not say what it computes"):
        attention_slots([model], ParallelPlan(attention_cores=("core",)))
