"""The driver of ``benchmarks/accelerator_day.py``: records, failures, limits, and calls that continue earlier ones."""

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from accelerator.bundle import COMMIT, install, missing
from accelerator.driver import Day
from accelerator.measurements.correctness import marked_tests
from accelerator.measurements.machine import changed_files
from accelerator.results import Results, read_rows, table
from accelerator.stages import STAGES, Stage, chosen
from accelerator_bundle import closure

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def stage(work, *, minutes=1.0, imports=(), **options):
    return Stage(
        name=work, group="test", work=f"failing_stages:{work}", minutes=minutes, options=options, imports=imports
    )


def day(out, *, deadline=math.inf, **keys):
    return Day(out=out, deadline=deadline, path=[str(HERE)], **keys)


def outcomes(out):
    return {name: record["outcome"] for name, record in json.loads((out / "results.json").read_text()).items()}


def test_the_default_stages_fit_into_twelve_minutes_and_all_into_three_calls():
    assert sum(stage.minutes for stage in STAGES if stage.default) <= 12
    assert sum(stage.minutes for stage in STAGES) <= 24
    assert 2 * max(stage.minutes for stage in STAGES) < 9, "stopped after twice its limit, within a call"
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_stages_are_chosen_by_name_and_by_group_in_the_order_of_their_value():
    assert [stage.name for stage in chosen(["train-8b", "correctness"])] == ["train-8b", "checks", "runs"]
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


@pytest.mark.parametrize(("left_s", "stopped_after_s"), [(8, 8), pytest.param(math.inf, 10, marks=pytest.mark.slow)])
def test_a_stage_that_takes_twice_its_limit_or_all_the_time_is_stopped_and_keeps_its_rows(
    tmp_path, left_s, stopped_after_s
):
    results = day(tmp_path, deadline=time.monotonic() + left_s).run([stage("endless", minutes=5 / 60, seconds=14)])
    record = results.records["endless"]
    assert (record["outcome"], record["rows"]) == ("timeout", [{"what": "before", "value": 1}])
    assert record["error"] == "still at it" or record["error"].startswith("before")
    assert record["seconds"] > stopped_after_s - 1


@pytest.fixture
def early(tmp_path, monkeypatch):
    """File of the processes that have made the imports of the stage that waits."""
    monkeypatch.setenv("EARLY_IMPORTS", str(tmp_path / "early"))
    return tmp_path / "early"


FIRST = stage("watches_imports", minutes=2)
SECOND = stage("after_imports", minutes=0.5, imports=("no_such_module", "early_imports"))


def test_the_next_stage_makes_its_imports_while_one_measures_and_waits_for_its_turn(tmp_path, early):
    records = day(tmp_path).run([FIRST, SECOND]).records
    assert outcomes(tmp_path) == {"watches_imports": "ok", "after_imports": "ok"}
    (first,), (second,) = (records[name]["rows"] for name in ("watches_imports", "after_imports"))
    assert first["ended"] < second["begun"]
    assert 0 < second["imports_s"] < 60
    assert len(early.read_text().splitlines()) == 1, "it was started twice"


def test_a_stage_whose_process_ended_while_it_waited_is_started_again(tmp_path, early, monkeypatch):
    monkeypatch.setenv("EARLY_DIES", "1")
    day(tmp_path).run([FIRST, SECOND])
    assert outcomes(tmp_path) == {"watches_imports": "ok", "after_imports": "ok"}
    assert len(early.read_text().splitlines()) == 2


def test_the_time_limit_of_a_stage_counts_from_its_turn(tmp_path, early):
    short = stage("after_imports", minutes=1.9 / 60, imports=("early_imports",))  # it is stopped after twice that
    day(tmp_path).run([stage("watches_imports", rest_s=4), short])
    assert outcomes(tmp_path)["after_imports"] == "ok"


def test_a_stage_that_waits_does_not_begin_where_the_call_has_no_time_left(tmp_path, early, capsys):
    late = stage("after_imports", minutes=4, imports=("early_imports",))
    # It fits when the first one begins, and no longer when that ends.
    results = day(tmp_path, deadline=time.monotonic() + 243.5).run([stage("watches_imports", rest_s=4), late])
    assert list(results.records) == ["watches_imports"]
    assert early.exists()
    assert "after_imports: not started" in capsys.readouterr().out


def test_a_process_whose_imports_used_the_device_says_so(tmp_path, early, monkeypatch):
    monkeypatch.setenv("EARLY_DEVICE", "1")
    records = day(tmp_path).run([SECOND]).records
    assert records["after_imports"]["rows"][0]["outcome"] == "used the device while the stage before was measured"


def test_a_process_that_waits_ends_with_the_driver(tmp_path):
    arguments = ["failing_stages:good", "{}", "--rows", str(tmp_path / "rows"), "--work", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(HERE)])}
    command = [sys.executable, "-m", "accelerator.child", *arguments]
    assert subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode == 1
    assert not (tmp_path / "rows").exists()


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
stages = [Stage(name=name, group="test", work="failing_stages:" + name, minutes=5) for name in ("endless", "good")]
Day(out=Path({str(tmp_path)!r}), deadline=math.inf, path=[{str(HERE)!r}]).run(stages)
"""
    driver = subprocess.Popen([sys.executable, "-c", script])
    log = tmp_path / "logs" / "endless.log"
    wait_for(lambda: log.exists() and "still at it" in log.read_text())
    wait_for(lambda: len(children(driver.pid)) == 2)  # the other one waits for its turn
    running = children(driver.pid)
    driver.terminate()
    assert driver.wait(60) == 143
    records = json.loads((tmp_path / "results.json").read_text())
    assert records.keys() == {"endless"}
    record = records["endless"]
    assert (record["outcome"], record["rows"]) == ("interrupted", [{"what": "before", "value": 1}])
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)


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


def test_rows_that_share_no_column_are_tables_of_their_own():
    rows = [{"what": "a", "step_ms": 1.5}, {"what": "b", "step_ms": 2.5}, {"what": "c", "total_gib": 3.5}]
    text = table({"train": {"outcome": "ok", "seconds": 1, "rows": rows}})
    assert "| what | step_ms |\n| --- | --- |\n| a | 1.5 |\n| b | 2.5 |\n\n| what | total_gib |" in text


def test_a_call_is_recorded_with_its_note_even_if_nothing_could_be_run(tmp_path):
    note = tmp_path / "patch.diff"
    note.write_text("arange of int64\nfaster weights\n")
    command = [
        sys.executable,
        "benchmarks/accelerator_day.py",
        "--small",
        "--minutes",
        "0",
        "--out",
        str(tmp_path / "day"),
    ]
    for text in (str(note), "by hand"):
        subprocess.run([*command, "--note", text], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    text = (tmp_path / "day" / "results.md").read_text()
    assert all(f"| note | {line} |" in text for line in ("arange of int64", "faster weights", "by hand"))
    assert text.count("--small --minutes 0") == 2


def test_the_tests_of_an_accelerator_are_found_by_their_mark():
    found = [path.as_posix() for path in marked_tests(HERE.parents[1])]
    assert {"tests/engine/context/test_context_kernels.py", "tests/engine/estimate/test_estimate_memory.py"} <= {*found}


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


def write_wheel(folder, name):
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    text = f"value = {name!r}\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,sha256={digest},{len(text)}\n{info}/RECORD,,\n")


def test_a_wheel_that_cannot_be_installed_is_named_and_the_others_are_there(tmp_path, monkeypatch):
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    bundle.mkdir()
    for name in ("nxdt_first", "nxdt_third"):
        write_wheel(bundle, name)
    (bundle / "nxdt_second-1.0-py3-none-any.whl").write_text("no archive")
    (bundle / COMMIT).write_text("0123abc-dirty\n")
    failed = install(bundle, site)
    assert [*failed] == ["nxdt_second-1.0-py3-none-any.whl"]
    assert "nxdt_second" in failed["nxdt_second-1.0-py3-none-any.whl"]
    assert {"nxdt_first.py", "nxdt_third.py", COMMIT} <= {path.name for path in site.iterdir()}

    monkeypatch.syspath_prepend(str(site))
    assert [*changed_files()] == []
    (site / "nxdt_first.py").write_text("value = 'patched'\n")
    (site / "nxdt_third.py").unlink()
    assert {*changed_files()} == {"nxdt_first.py", "nxdt_third.py"}


def test_wheels_that_are_installed_already_stay_as_they_were_changed(tmp_path):
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    bundle.mkdir()
    write_wheel(bundle, "nxdt_first")
    assert install(bundle, site) == {}
    (site / "nxdt_first.py").write_text("value = 'patched'\n")
    assert install(bundle, site) == {}
    assert "patched" in (site / "nxdt_first.py").read_text()
    os.utime(next(bundle.iterdir()), (1e9, 1e9))  # built again
    install(bundle, site)
    assert "patched" not in (site / "nxdt_first.py").read_text()
