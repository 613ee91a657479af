"""The driver of ``benchmarks/accelerator_day.py``: records, failures, limits, and calls that continue earlier ones."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerator.bundle import missing
from accelerator.driver import Day
from accelerator.forks import Forks
from accelerator.measurements.correctness import marked_tests
from accelerator.results import Results, read_rows, table
from accelerator.stages import STAGES, Stage, chosen
from accelerator_bundle import closure

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def stage(work, *, minutes=1.0, **options):
    return Stage(name=work, group="test", work=f"failing_stages:{work}", minutes=minutes, options=options)


def day(out, *, deadline=math.inf, **keys):
    return Day(out=out, deadline=deadline, path=[str(HERE)], **keys)


def outcomes(out):
    return {name: record["outcome"] for name, record in json.loads((out / "results.json").read_text()).items()}


def test_the_default_stages_take_24_minutes_and_all_of_them_40_each_five_at_most():
    assert sum(stage.minutes for stage in STAGES if stage.default) <= 24
    assert sum(stage.minutes for stage in STAGES) <= 40
    assert max(stage.minutes for stage in STAGES) <= 5
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_stages_are_chosen_by_name_and_by_group_in_the_order_of_their_value():
    assert [stage.name for stage in chosen(["train-8b", "correctness"])] == ["tests", "runs", "train-8b"]
    assert chosen([], everything=True) == list(STAGES)
    with pytest.raises(KeyError, match="unknown stage 'train-9b'"):
        chosen(["train-9b"])


def test_a_stage_that_fails_is_recorded_with_its_last_lines_and_the_next_one_starts(tmp_path):
    day(tmp_path).run([stage("broken"), stage("partly"), stage("full"), stage("good", value=7)])
    records = json.loads((tmp_path / "results.json").read_text())
    assert outcomes(tmp_path) == {"broken": "failed", "partly": "failed", "full": "ok", "good": "ok"}
    assert records["broken"]["rows"] == [{"what": "before", "value": 1}]
    assert records["broken"]["error"].splitlines()[-1] == "the last words"
    assert len((tmp_path / records["broken"]["log"]).read_text().splitlines()) == 42
    assert records["partly"]["rows"] == [
        {"what": "first", "outcome": "ValueError: first part broke"},
        {"what": "second", "value": 2},
    ]
    assert records["full"]["rows"] == [{"what": "large", "outcome": "out of memory"}]
    assert records["good"]["rows"] == [{"what": "good", "value": 7, "small": False}]
    assert "| good | 7 | False |" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "work" / "good").exists()


@pytest.mark.slow
def test_a_stage_that_exceeds_its_limit_is_stopped_and_keeps_its_rows(tmp_path):
    results = day(tmp_path).run([stage("endless", minutes=0.2)])
    record = results.records["endless"]
    assert (record["outcome"], record["rows"]) == ("timeout", [{"what": "before", "value": 1}])
    assert record["error"] == "still at it" or record["error"].startswith("before")


def test_stages_of_small_runs_are_forks_of_one_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(HERE)])}
    forks = Forks(environment, imports="tomllib")
    rows = tmp_path / "rows.jsonl"

    def start(name):
        arguments = [f"failing_stages:{name}", "{}", "--rows", str(rows), "--work", str(tmp_path), "--small"]
        return forks.start(arguments, tmp_path / f"{name}.log")

    try:
        assert [start(name).wait(60) for name in ("parent", "broken", "partly", "parent")] == [0, 1, 1, 0]
        endless = start("endless")
        with pytest.raises(subprocess.TimeoutExpired):
            endless.wait(1)
        os.killpg(endless.pid, signal.SIGTERM)
        assert endless.wait(60) == -signal.SIGTERM
    finally:
        forks.close()
    parents = [row["parent"] for row in read_rows(rows) if row["what"] == "parent"]
    assert len(set(parents)) == 1
    assert parents[0] != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(parents[0], 0)
    assert (tmp_path / "broken.log").read_text().splitlines()[-1] == "the last words"


@pytest.mark.slow
def test_a_small_day_records_what_its_stages_do(tmp_path):
    day(tmp_path, small=True).run([*map(stage, ("broken", "partly", "good"))])
    assert outcomes(tmp_path) == {"broken": "failed", "partly": "failed", "good": "ok"}
    records = json.loads((tmp_path / "results.json").read_text())
    assert records["broken"]["error"].splitlines()[-1] == "the last words"
    assert records["good"]["rows"] == [{"what": "good", "value": 1, "small": True}]


def test_a_call_starts_nothing_that_would_not_fit_and_the_next_one_continues(tmp_path, capsys):
    results = day(tmp_path, deadline=time.monotonic() + 60).run([stage("broken", minutes=5), stage("good")])
    assert list(results.records) == []
    first = day(tmp_path, deadline=time.monotonic() + 90)
    assert list(first.run([stage("broken", minutes=5), stage("good")]).records) == ["good"]
    assert "broken: not started, its limit of 5 min exceeds what is left" in capsys.readouterr().out
    begun = json.loads((tmp_path / "results.json").read_text())["good"]["seconds"]
    results = day(tmp_path).run([stage("broken"), stage("good", value=9)])
    assert outcomes(tmp_path) == {"good": "ok", "broken": "failed"}
    assert results.records["good"]["seconds"] == begun, "it was run again"


def test_a_stage_that_a_kill_interrupted_is_run_again(tmp_path):
    Results(tmp_path).put("good", {"outcome": "running", "rows": [], "log": "logs/good.log"})
    day(tmp_path).run([stage("good")])
    assert outcomes(tmp_path) == {"good": "ok"}


def test_sigterm_ends_the_running_stage_and_keeps_its_rows(tmp_path):
    script = f"""
import math, sys
sys.path[:0] = [{str(HERE.parents[1] / "benchmarks")!r}]
from pathlib import Path
from accelerator.driver import Day, end_on_sigterm
from accelerator.stages import Stage
end_on_sigterm()
stage = Stage(name="endless", group="test", work="failing_stages:endless", minutes=5)
Day(out=Path({str(tmp_path)!r}), deadline=math.inf, path=[{str(HERE)!r}]).run([stage])
"""
    driver = subprocess.Popen([sys.executable, "-c", script])
    log = tmp_path / "logs" / "endless.log"
    wait_for(lambda: log.exists() and "still at it" in log.read_text())
    (child,) = (int(pid) for pid in children(driver.pid))
    driver.terminate()
    assert driver.wait(60) == 143
    record = json.loads((tmp_path / "results.json").read_text())["endless"]
    assert (record["outcome"], record["rows"]) == ("interrupted", [{"what": "before", "value": 1}])
    assert not Path(f"/proc/{child}").exists()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_retry_runs_again_what_did_not_end_well(tmp_path):
    Results(tmp_path).put("good", {"outcome": "timeout", "rows": [], "log": "logs/good.log"})
    assert day(tmp_path).run([stage("good")]).records["good"]["outcome"] == "timeout"
    assert day(tmp_path, retry=True).run([stage("good")]).records["good"]["outcome"] == "ok"


def test_compile_caches_are_in_the_folder_of_the_results(tmp_path):
    environment = day(tmp_path)._environment()
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_a_row_that_was_being_written_is_left_out(tmp_path):
    (tmp_path / "rows").write_text('{"what": "whole"}\n{"what": "ha')
    assert read_rows(tmp_path / "rows") == [{"what": "whole"}]
    assert read_rows(tmp_path / "none") == []


def test_the_table_has_a_column_for_each_figure_and_blanks_where_a_device_has_none():
    rows = [{"what": "a", "mfu": 0.4567, "tokens_per_s": 12345.6}, {"what": "b", "mfu": None, "outcome": "x | y"}]
    text = table(
        {"train": {"outcome": "failed", "seconds": 3.2, "rows": rows, "error": "why", "log": "logs/train.log"}}
    )
    assert "## train: failed, 3 s" in text
    assert "| what | mfu | tokens_per_s | outcome |" in text
    assert "| a | 45.7% | 12,346 |  |" in text
    assert "| b |  |  | x \\| y |" in text
    assert "why" in text
    assert "Full log: `logs/train.log`" in text


def test_the_tests_of_an_accelerator_are_found_by_their_mark():
    found = [path.as_posix() for path in marked_tests(HERE.parents[1])]
    assert {"tests/parallel/context/test_context_kernels.py", "tests/parallel/estimate/test_estimate_memory.py"} <= {
        *found
    }


def test_a_bundle_follows_requirements_and_leaves_out_what_comes_with_torch():
    needs = {"omegaconf": ["PyYAML>=5", "antlr4>=4"], "antlr4": ["typing_extensions"], "boto3": ["s3transfer"]}
    fetched = []

    def fetch(line):
        fetched.append(line)
        return Path(line.split(">")[0])

    wheels = closure(
        ["nxdt-core>=0.1", "torch>=2.13", "omegaconf>=2.4", "boto3", "Omegaconf"],
        fetch,
        lambda p: needs.get(p.name, ()),
    )
    assert fetched == ["omegaconf>=2.4", "boto3", "antlr4>=4", "s3transfer"]
    assert len(wheels) == 4


def test_a_bundle_installs_nxdt_and_what_is_missing():
    wheels = [Path("nxdt_core-0.1.0-py3-none-any.whl"), Path("pluggy-1.7.0-py3-none-any.whl"), Path("no_such-1-x.whl")]
    assert missing(wheels) == [wheels[0], wheels[2]]
