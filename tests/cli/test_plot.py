"""``nxdt plot`` over the files of runs."""

import json
import os

import pytest


@pytest.fixture
def run(work):
    directory = work / "runs" / "small"
    directory.mkdir(parents=True)
    rows = [{"step": step, "loss": 5 - step / 10, "lr": 1e-3, "consumed_tokens": 64 * step} for step in range(1, 11)]
    rows[4]["loss"] = None  # what was not finite
    _write(directory / "metrics.jsonl", rows)
    _write(directory / "validation.jsonl", [{"step": 5, "loss": 4.6}, {"step": 10, "loss": 4.2}])
    _write(directory / "resumes.jsonl", [{"step": 6, "at": "2026-11-23T00:00:00+00:00"}])
    return directory


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_plot_has_loss_validation_resumes_tokens_and_learning_rate(nxdt, run):
    done = nxdt("plot", "runs/small", "-o", "plot.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["small: loss 4.900 at step 1 -> 4.000 at step 10", "plot: plot.svg"]
    drawn = (run.parents[1] / "plot.svg").read_text()
    for text in ("training", "validation", "resumed", "tokens", "learning rate", "optimizer step"):
        assert f"<!-- {text} -->" in drawn


def test_another_column_is_drawn_on_request(nxdt, run):
    done = nxdt("plot", "runs/small", "--metric", "lr")
    assert done.stdout.splitlines() == ["small: lr 0.001 at step 1 -> 0.001 at step 10", "plot: runs/small/lr.png"]
    refused = nxdt("plot", "runs/small", "--metric", "reward")
    assert refused.returncode == 2
    assert "no column 'reward'" in refused.stderr
    assert "consumed_tokens" in refused.stderr


def test_several_runs_go_into_one_plot_in_the_first(nxdt, run):
    other = run.with_name("other")
    other.mkdir()
    (other / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"step": 11, "lo')
    done = nxdt("plot", str(run), str(other))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["small", "other", "plot"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_plotted_is_refused_with_a_remedy(nxdt, run, work):
    (work / "empty").mkdir()
    (work / "pipe").mkdir()
    os.mkfifo(work / "pipe" / "metrics.jsonl")
    for args in (["nowhere"], ["empty"], ["pipe"], [str(run), "-o", "x.gif"], [str(run), "-o", "nowhere/x.png"]):
        done = nxdt("plot", *args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert done.stderr.startswith("[NXDT-T085] "), args


def test_matplotlib_is_named_where_it_is_missing(nxdt, run):
    done = nxdt("plot", str(run), without=("matplotlib",))
    assert done.returncode == 2
    assert "pip install 'nxdt-core[plot]'" in done.stderr
