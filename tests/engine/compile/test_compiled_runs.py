"""Compiled runs stay compiled: a graph for each kind of layer in training and one in validation, two of the loss, no
breaks, and no other graph when steps, documents and micro-batches change.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

import pytest

from tests.engine.compile.compiling import CASES, STEPS, counted, expected, widths
from tests.sampling import sampled, slow_except

SAMPLE = 2
TIMEOUT_S = 300


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, SAMPLE, default=("tp2",)))


def test_a_run_has_its_graphs_after_the_first_step_and_computes_the_same(ranks, steps, case):
    """Graphs are counted before a backend sees them. This one differentiates them as those of devices do: the backend
    ``eager`` of torch 2.11 loses gradients of collectives."""
    case, pool, backend = CASES[case], ranks(CASES[case].layout.world), "aot_eager"
    count = max(steps(STEPS), 1 + len(case.lengths))  # a new graph would be there after the second step
    plain = pool.run(expected, case, timeout_s=TIMEOUT_S)
    for found, losses in zip(pool.run(counted, case, count, backend, timeout_s=TIMEOUT_S), plain, strict=True):
        assert (found.graphs, found.breaks, found.late) == (case.graphs + case.loss_graphs, 0, 0)
        assert found.losses == pytest.approx(losses, rel=1e-5)


OF_SIZES = ("lengths", "window", "hf", "dropless-dropout-ep2", "capacity-dropout", "ring", "tp2-chunked")
"""Cases with what is computed from sizes: masks, numbers of tokens, places of rows, blocks of sequences, targets."""


@pytest.mark.parametrize("name", slow_except(OF_SIZES, ("lengths",)))
def test_layers_and_losses_have_integers_of_one_width(ranks, name):
    for found in ranks(CASES[name].layout.world).run(widths, CASES[name], timeout_s=TIMEOUT_S):
        assert (found.dynamic > 0, found.found) == (True, [])
