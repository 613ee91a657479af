"""The engine on stock torch and the one of ``examples/one_process_engine`` keep the contract of engines.

The contract catches wrong engines, each by the test that is about its mistake. They are in this file so that one worker
starts the server of ranks once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.engine_contract import LAYOUTS, POLICIES, EngineContract, Settings

from nxdt_core.protocols.batch import Batch
from tests.sampling import slow_except, takes_all
from tests.testing.outcomes import Outcomes, asked, every_third, run_contract

SOLO = Path(__file__).parent / "mutants/solo_parts.py"


class TestTorch(EngineContract):
    """By default one layout: the matrix of ``tests/engine`` runs all of them."""

    engine = "torch"

    def runs(self, layout: str, config: pytest.Config) -> bool:
        """All layouts where all samples are taken."""
        return layout == "zero2" or takes_all(config)

    @pytest.mark.parametrize("policy", slow_except(POLICIES, ("bf16SR",)))
    def test_a_precision_trains_or_is_refused(self, settings: Settings, batches: list[Batch], policy: str) -> None:
        """``tests/engine/precision`` compares the others with float32."""
        super().test_a_precision_trains_or_is_refused(settings, batches, policy)


class TestSolo(EngineContract):
    """From its source: ``tests/packaging`` runs it from a wheel."""

    engine = "solo"
    plugins = (str(SOLO),)

    @pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("tp",)))
    def test_a_layout_trains_as_one_process_does_or_is_refused(
        self, settings: Settings, batches: list[Batch], layout: str, pytestconfig: pytest.Config
    ) -> None:
        """It declares none; ``tests/config/test_capabilities.py`` shows what is refused then."""
        super().test_a_layout_trains_as_one_process_does_or_is_refused(settings, batches, layout, pytestconfig)


FILE = Path(__file__).parent / "mutants/engine.py"
LOOP = "test_it_trains_as_a_loop_of_plain_torch_does"
SETTING = "test_a_setting_is_carried_out_or_refused"
CAUGHT_BY = {
    "AveragesMicroBatches": f"{LOOP}[None]",
    "ForgetsAuxiliaryLosses": f"{LOOP}[None]",
    "KeepsItsRate": f"{LOOP}[None]",
    "LetsNormsDecay": f"{LOOP}[None]",
    "ForgetsToClip": f"{LOOP}[0.05]",
    "MeasuresAfterClipping": f"{LOOP}[0.05]",
    "DividesAllTermsByOneWeight": "test_each_term_of_a_loss_is_divided_by_its_own_weight",
    "LosesItsGradients": "test_evaluation_gives_the_loss_and_changes_nothing",
    "StepsOnNan": "test_a_step_that_is_not_finite_is_counted_and_leaves_the_weights",
    "CountsNothing": "test_a_step_that_is_not_finite_is_counted_and_leaves_the_weights",
    "KeepsGradients": "test_gradients_are_cleared_by_a_step",
    "GivesLogitsOfTheLastToken": "test_forward_gives_logits_of_every_token",
    "TellsAllLogProbs": "test_log_probs_are_those_of_the_labels",
    "NamesItsWrapper": "test_weights_have_the_names_of_the_model",
    "DrawsAlways": "test_weights_that_are_loaded_are_those_that_were_saved",
    "LoadsWhatFits": "test_weights_of_another_model_are_refused",
    "ForgetsItsState": "test_a_resumed_run_continues_as_the_one_that_was_not_stopped",
    "ShutsDownOnce": "test_alone_it_agrees_with_itself_and_is_shut_down_twice",
    "IgnoresTheRanks": "test_a_layout_trains_as_one_process_does_or_is_refused[tp]",
    "IgnoresAdapters": f"{SETTING}[adapters]",
    "IgnoresGroups": f"{SETTING}[param_groups]",
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Of each mutant under the test that should catch it."""
    return run_contract(FILE, (), asked(request, CAUGHT_BY))


@pytest.mark.parametrize(("mutant", "test"), every_third(CAUGHT_BY.items()))
def test_the_contract_catches(outcomes: Outcomes, mutant: str, test: str) -> None:
    assert (mutant, test) in outcomes.failed


def test_every_mutant_is_caught_by_a_test() -> None:
    from tests.testing.mutants.engine import MUTANTS

    assert MUTANTS.keys() == CAUGHT_BY.keys()
