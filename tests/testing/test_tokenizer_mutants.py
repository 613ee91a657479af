"""The contract of tokenizers fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.tokenizer import MUTANTS
from tests.testing.outcomes import Outcomes, assert_fails_where_wrong, every_third, run_mutants

pytest.importorskip("transformers", reason="transformers is not installed")

FILE = Path(__file__).parent / "mutants/tokenizer.py"
MEMBERS = "test_it_has_the_members_of_the_protocol"
BACK, IDS = "test_a_text_comes_back", "test_ids_are_plain_and_below_the_vocabulary_size"
BATCH, NO_SPECIALS = "test_a_batch_equals_its_texts", "test_texts_get_no_special_tokens"
LEFT_OUT = "test_decoding_leaves_out_special_and_unknown_ids"
SAME = "test_the_same_configuration_gives_the_same_fingerprint"
OTHER = "test_another_vocabulary_has_another_fingerprint"
LOCATED = "test_located_ids_are_those_of_the_batch"
SPELLED_OUT = "test_special_tokens_are_located_where_they_are_spelled"
SPELLED, TEMPLATE = "test_spelled_text_has_its_special_tokens", "test_its_chat_template_renders_a_conversation"
EXPORT = "test_exported_files_give_the_same_ids_in_transformers"
CAUGHT_BY = {
    "Right": set(),
    "InheritsNothing": {MEMBERS},
    "JoinsSpaces": {BACK},
    "ReturnsNumbersOfNumpy": {IDS},
    "PadsBehindItsVocabulary": {IDS, EXPORT},
    "ReadsOneLetterAsAnother": {"test_two_symbols_never_have_one_id"},
    "PadsItsBatch": {BATCH, LOCATED},
    "CutsLongTexts": {BACK},
    "EndsEachText": {NO_SPECIALS, LOCATED, EXPORT},
    "WritesSpecialTokens": {LEFT_OUT},
    "FailsOnSurrogates": {"test_a_text_that_utf8_cannot_express_is_taken"},
    "FingerprintsItself": {SAME},
    "FingerprintsItsFile": {OTHER},
    "PlacesBytes": {LOCATED},
    "LocatesFromTheEnd": {LOCATED},
    "ReadsSpecialTokensAsText": {SPELLED_OUT, SPELLED},
    "SpellsTextAlone": {SPELLED_OUT, SPELLED},
    "NamesAnotherEnd": {SPELLED_OUT},
    "HasATemplateThatFails": {TEMPLATE},
    "RendersTheFirstMessage": {TEMPLATE},
    "ExportsAnotherRule": {EXPORT},
    "ExportsNoEnd": {EXPORT},
    "LeadsWithTheEnd": {"test_leading_ids_are_those_of_transformers"},
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, CAUGHT_BY, request)


@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, CAUGHT_BY, pytestconfig)


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
