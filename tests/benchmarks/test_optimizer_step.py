"""What the end of a step costs by counting, against torch's."""

from benchmarks.steps import optimizer_step


def test_a_clipped_step_launches_and_moves_less_than_torchs(capsys):
    """Launches of norm and update are those that the trace of an H200 showed with torch 2.11."""
    assert optimizer_step.count(optimizer_step.SHAPES["1.5B"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nxdt", "_foreach_norm", "72", "11", "4.0"] in rows
    assert ["nxdt", "_fused_adamw_", "73", "12", "32.0"] in rows
    assert ["torch", "_foreach_mul_", "72", "11", "8.0"] in rows
