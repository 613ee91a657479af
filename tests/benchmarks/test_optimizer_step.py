"""What the end of a step costs by counting, against torch's."""

from benchmarks.steps import optimizer_step


def test_a_clipped_step_moves_fewer_bytes_than_torchs(capsys):
    """Launches of torch's are those that the trace of an H200 showed with torch 2.11."""
    assert optimizer_step.count(optimizer_step.SHAPES["1.5B"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nxdt", "linalg_vector_norm", "50", "50", "3.6"] in rows
    assert ["nxdt", "AdamW", "147", "147", "28.0"] in rows
    assert ["nxdt", "all"] in [row[:2] for row in rows if row[-1] == "32.0"]
    assert ["torch", "_foreach_norm", "72", "11", "4.0"] in rows
    assert ["torch", "_foreach_mul_", "72", "11", "8.0"] in rows
    assert ["torch", "_fused_adamw_", "73", "12", "28.0"] in rows
