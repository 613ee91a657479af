"""What a layer costs by counting, against transformers' layer."""

import pytest


@pytest.mark.slow  # its subject is speed
def test_a_layer_needs_no_more_kernels_and_memory_than_that_of_transformers(capsys):
    pytest.importorskip("transformers")
    from benchmarks.models import layer_operations

    assert layer_operations.main() == 0
    ours, theirs = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert (ours[0], theirs[0]) == ("nxdt-core", "transformers")
    assert ours[-2:] == ["1", "0"], "one graph for all layers, no break"
