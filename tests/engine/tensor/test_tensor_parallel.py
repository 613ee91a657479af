"""Tensor and sequence parallel models follow one process: losses of some steps and every gradient, in float64."""

from functools import cache

import pytest
from nxdt_testing.ranks import RankPool

from tests.engine.tensor.cases import Case, Outcome, built, differences, on_ranks
from tests.engine.tensor.models import HEAD, HIDDEN
from tests.sampling import slow_except

LAYOUTS = {
    "tp2": Case(),
    "tp2 tied": Case(tied=True),
    "tp2 sp": Case(sequence_parallel=True),
    "tp2 sp tied masked": Case(sequence_parallel=True, tied=True, masked=True),
    "tp2 masked weighted": Case(masked=True, weighted=True),
    "tp2 copies of one kv head": Case(kv_heads=1),
    "tp2 biased": Case(model="biased", masked=True),
    "tp2 sp biased": Case(model="biased", sequence_parallel=True, weighted=True),
    "tp4 copies of kv heads": Case(tp=4),
    "tp4 sp copies of kv heads": Case(tp=4, sequence_parallel=True, masked=True),
    "tp4 biased copies": Case(tp=4, model="biased"),
    "tp4 sp biased copies": Case(tp=4, model="biased", sequence_parallel=True, weighted=True),
    "tp2 fsdp2": Case(dp=2, model="biased"),
    "tp2 sp fsdp2": Case(dp=2, model="biased", sequence_parallel=True, masked=True),
    "tp2 fsdp2 copies of one kv head": Case(dp=2, model="biased", kv_heads=1),
    "tp2 one group of zeros": Case(heads=3, kv_heads=3, pad_heads=True),
    "tp2 sp zeros in each group": Case(heads=6, kv_heads=2, tp=4, pad_heads=True, sequence_parallel=True),
    "tp4 groups and copies": Case(heads=3, kv_heads=1, tp=4, pad_heads=True),
    "tp4 biased zeros in each group": Case(heads=6, kv_heads=2, tp=4, model="biased", pad_heads=True),
    "tp4 a rank of zeros": Case(heads=6, kv_heads=3, tp=4, model="biased", pad_heads=True),
    "tp2 fsdp2 zeros in the group": Case(heads=3, kv_heads=1, dp=2, model="biased", pad_heads=True),
}
MUTANTS = {
    "loss tp2": Case(mutant="-100 in the loss", masked=True),
    "entry tp2": Case(mutant="no f at the entry of a block"),
    "norms tp2 sp": Case(mutant="norms not summed", sequence_parallel=True),
    "norms tp2 in blocks": Case(mutant="norms not summed", model="biased"),
    "copies tp4": Case(mutant="copies of heads not summed", tp=4),
    "embedding tp2": Case(mutant="embedding's gradient summed"),
    "ids tp2": Case(mutant="embedding's ids not masked"),
    "bias tp2": Case(mutant="bias before the sum", model="biased"),
    "zeros tp4": Case(mutant="zeros take part", heads=6, kv_heads=2, tp=4, pad_heads=True),
}
WRONG = {
    "-100 in the loss": {"loss", "lm_head.weight"},
    "no f at the entry of a block": {"layers.0.attention_norm.weight", "embed_tokens.weight"},
    "norms not summed": set(),
    "copies of heads not summed": {"layers.0.attention.k_proj.weight", "layers.1.attention.v_proj.weight"},
    "embedding's gradient summed": {"embed_tokens.weight"},
    "embedding's ids not masked": {"loss", "embed_tokens.weight"},
    "bias before the sum": {"loss"},
    "zeros take part": set(),
}
"""What must differ at the least."""
ON_TWO = [case for case in (*LAYOUTS.values(), *MUTANTS.values()) if case.world_size == 2]
"""Copies of heads and padded ones among them."""


@cache
def outcomes(world_size: int) -> dict[Case, list[Outcome]]:
    """Of all cases on so many ranks: one start of the processes for all."""
    cases = list(dict.fromkeys(c for c in (*LAYOUTS.values(), *MUTANTS.values()) if c.world_size == world_size))
    by_rank = RankPool(world_size).run(on_ranks, cases, timeout_s=120)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("case", slow_except(LAYOUTS.values(), ON_TWO), ids=LAYOUTS.keys())
def test_layout_follows_one_process(case: Case) -> None:
    ranks = outcomes(case.world_size)[case]
    assert differences(case, ranks) == {}
    assert [outcome.odd for outcome in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize("case", slow_except(MUTANTS.values(), ON_TWO), ids=MUTANTS.keys())
def test_wrong_implementation_is_seen(case: Case) -> None:
    ranks = outcomes(case.world_size)[case]
    wrong = differences(case, ranks)
    assert wrong or any(outcome.odd for outcome in ranks)
    assert WRONG[case.mutant] <= wrong.keys()


HALF = {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("name", ["tp2", "tp2 sp"])
def test_each_rank_holds_its_share(name: str) -> None:
    module, _ = built(LAYOUTS[name])
    for outcome in outcomes(2)[LAYOUTS[name]]:
        for parameter, whole in module.named_parameters():
            shared = parameter.split(".")[-2] in HALF
            assert outcome.elements[parameter] == whole.numel() // (2 if shared else 1), parameter


@pytest.mark.slow
def test_copies_of_heads_are_whole_heads() -> None:
    for outcome in outcomes(4)[LAYOUTS["tp4 copies of kv heads"]]:
        assert outcome.elements["layers.0.attention.k_proj.weight"] == HEAD * HIDDEN
        assert outcome.elements["layers.0.attention.q_proj.weight"] == HEAD * HIDDEN
