"""The state of a run for other programs: the health file, metrics for Prometheus, the port, log lines as JSON."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.training import MonitoringFileUnwritable, MonitoringPortUnusable, StepNotFinite
from nxdt_core.run import train
from nxdt_core.run.callbacks.monitor import exposition, mark_failed
from tests import processes
from tests.train.small import SMALL

HEALTH = "exp_manager.monitoring.health_file=health.json"
METRICS = "exp_manager.monitoring.metrics_file=nxdt.prom"
KEYS = [
    "run", "state", "error", "step", "max_steps", "consumed_tokens", "loss", "tokens_per_s", "checkpoint_step",
    "started", "updated", "host", "pid", "world_size", "run_dir",
]  # fmt: skip
_VALUE = r"NaN|[+-]Inf|[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
_PLAIN_LABEL = _LABEL.replace("((?:", "(?:(?:").replace("([a-z", "(?:[a-z")
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{({_PLAIN_LABEL}(?:,{_PLAIN_LABEL})*)\}} ({_VALUE})")


def parsed(text):
    """Read Prometheus' text by its grammar, and by its own parser where that is installed."""
    assert text.endswith("\n")
    kinds, found, helped = {}, {}, set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped, "a TYPE comes after the HELP"
            assert name not in kinds
            assert kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels, number = match[1], dict(re.findall(_LABEL, match[2])), match[3]
            assert name == list(kinds)[-1], "samples of a metric stand together"
            key = (name, frozenset(labels.items()))
            assert key not in found
            found[key] = float(number)
    if find_spec("prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families

        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        assert len(samples) == len(found)
    return found


def value(found, wanted, **labels):
    (only,) = [
        number for (name, have), number in found.items() if name == wanted and labels.items() <= dict(have).items()
    ]
    return only


def test_a_run_that_ends_leaves_its_state_and_metrics(small_run):
    config = small_run("trainer.max_steps=4", "trainer.val_check_interval=2", "name=a-run", HEALTH, METRICS)
    train(config)
    health = json.loads((config.run_dir / "health.json").read_text())
    assert list(health) == KEYS
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    expected = {"state": "finished", "error": None, "step": 4, "max_steps": 4, "checkpoint_step": 4, "run": "a-run"}
    assert expected.items() <= health.items()
    assert (health["loss"], health["consumed_tokens"]) == (rows[-1]["loss"], rows[-1]["consumed_tokens"])
    found = parsed((config.run_dir / "nxdt.prom").read_text())
    assert {dict(labels)["run"] for _, labels in found} == {"a-run"}
    states = {dict(labels)["state"]: number for (name, labels), number in found.items() if name == "nxdt_state"}
    assert [state for state, number in states.items() if number] == ["finished"]
    assert value(found, "nxdt_step") == value(found, "nxdt_checkpoint_step") == 4
    assert value(found, "nxdt_loss") == rows[-1]["loss"]
    assert value(found, "nxdt_learning_rate") == rows[-1]["lr"]
    (validation,) = [json.loads(line) for line in (config.run_dir / "validation.jsonl").read_text().splitlines()][-1:]
    assert value(found, "nxdt_validation_metric", metric="loss") == pytest.approx(validation["loss"])
    assert value(found, "nxdt_run_info", plugins=config.kernel.fingerprint(), model="llama:llama") == 1
    assert [path.name for path in config.run_dir.iterdir() if path.name.startswith(".")] == [".nxdt-lock-run"]


def test_nothing_is_written_by_default(small_run):
    config = small_run("trainer.max_steps=1")
    train(config)
    assert not [path for path in config.run_dir.rglob("*") if path.suffix in (".prom",) or path.name == "health.json"]
    assert (config.run_dir / "logs" / "globalrank-0_localrank-0.txt").exists()


def test_a_run_that_fails_says_with_which_error(small_run):
    config = small_run("trainer.max_steps=2", "model.optim.lr=1e30", "trainer.gradient_clip_val=null", HEALTH, METRICS)
    with pytest.raises(StepNotFinite):
        train(config)
    health = json.loads((config.run_dir / "health.json").read_text())
    assert (health["state"], health["error"]) == ("failed", "NXDT-T010")
    assert value(parsed((config.run_dir / "nxdt.prom").read_text()), "nxdt_state", state="failed") == 1


@pytest.mark.parametrize("key", ["health_file", "metrics_file"])
def test_a_file_that_cannot_be_written_ends_the_run_before_it_trains(small_run, tmp_path, key):
    name = tmp_path / "missing" / "nxdt.prom"
    with raises(MonitoringFileUnwritable, match=rf"exp_manager\.monitoring\.{key}: .*nxdt\.prom"):
        train(small_run("trainer.max_steps=1", f"exp_manager.monitoring.{key}={name}"))


def test_a_file_that_later_cannot_be_written_is_a_warning(small_run, tmp_path, caplog):
    """A callback puts a directory in its place after the second step."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    config = small_run(
        "trainer.max_steps=4",
        METRICS,
        HEALTH,
        "exp_manager.monitoring.interval_s=0",
        f"plugins.local=[{tmp_path}/blocks.py]",
        "trainer.callbacks=[{name: blocks}]",
    )
    assert train(config).step == 4
    assert caplog.text.count("exp_manager.monitoring.metrics_file") == 1
    assert json.loads((config.run_dir / "health.json").read_text())["state"] == "finished"


BLOCKS = """
from nxdt_core.api import Callback, Component, hookimpl


class Blocks(Callback):
    def __init__(self, config, run_dir):
        self.path = run_dir / "nxdt.prom"

    def on_step_end(self, run):
        if run.step == 2:
            self.path.unlink()
            (self.path / "in the way").mkdir(parents=True)


@hookimpl
def nxdt_callbacks():
    return [Component(name="blocks", target=f"{__name__}:Blocks")]
"""


def test_the_metrics_file_is_one_that_node_exporter_reads():
    with pytest.raises(ConfigError, match=r"ends with \.prom"):
        load("recipe:llama-tiny", ["exp_manager.monitoring.metrics_file=metrics.txt"])


def read(url, host=None):
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_a_port_serves_metrics_and_health_while_the_run_trains(tmp_path):
    keys = (*SMALL, "trainer.max_steps=100000", "trainer.log_every_n_steps=1", "trainer.val_check_interval=null")
    monitoring = ("exp_manager.monitoring.port=0", "exp_manager.monitoring.interval_s=0", HEALTH)
    process = processes.Popen(
        [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", "name=run", *keys, *monitoring],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"(http://127\.0\.0\.1:\d+)/metrics", line)))
        assert next(line for line in lines if re.match(r"step 4/", line))  # the monitor has seen the step before
        status, kind, text = read(f"{url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        found = parsed(text)
        assert value(found, "nxdt_state", state="running") == 1
        assert value(found, "nxdt_step") >= 3
        status, kind, text = read(f"{url}/health?max_age=600")
        assert (status, kind, json.loads(text)["state"]) == (200, "application/json", "running")
        assert json.loads((tmp_path / "nxdt_experiments/run/health.json").read_text())["pid"] == process.pid
        assert read(f"{url}/health?max_age=-1")[0] == 503
        assert read(f"{url}/health?max_age=soon")[0] == 400
        assert read(f"{url}/other")[0] == 404
        assert read(f"{url}/metrics", host="elsewhere.example:80")[0] == 403
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.stderr.close()
        status = process.wait()
    assert status == 143
    assert json.loads((tmp_path / "nxdt_experiments/run/health.json").read_text())["state"] == "stopped"


def test_a_port_that_is_taken_is_an_error_before_training(small_run):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with raises(MonitoringPortUnusable, match=rf"Port {port} of 127\.0\.0\.1"):
            train(small_run("trainer.max_steps=1", f"exp_manager.monitoring.port={port}"))


def test_labels_and_numbers_are_written_as_prometheus_reads_them():
    samples = [("nxdt_train_metric", math.nan, {"metric": 'a "b"\\\n'})]
    samples += [("nxdt_loss", math.inf, {}), ("nxdt_grad_norm", -math.inf, {}), ("nxdt_step", 3, {})]
    text = exposition(samples, {"run": "r"})
    assert 'nxdt_train_metric{run="r",metric="a \\"b\\"\\\\\\n"} NaN\n' in text
    assert 'nxdt_loss{run="r"} +Inf\n' in text
    assert math.isnan(value(parsed(text), "nxdt_train_metric"))


def test_a_rank_that_dies_leaves_the_state_failed(tmp_path):
    keys = (*SMALL, "trainer.max_steps=100000", "trainer.devices=2", "name=run", HEALTH, METRICS)
    (tmp_path / "dies.py").write_text(DIES)
    process = processes.Popen(
        [
            sys.executable,
            "-m",
            "nxdt_core",
            "train",
            "recipe:llama-tiny",
            *keys,
            *("trainer.callbacks=[dies]", f"plugins.local=[{tmp_path}/dies.py]"),
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1, said
    run_dir = tmp_path / "nxdt_experiments" / "run"
    health = json.loads((run_dir / "health.json").read_text())
    assert (list(health), health["state"], health["error"]) == (KEYS, "failed", "NXDT-P048")
    found = parsed((run_dir / "nxdt.prom").read_text())
    states = {dict(labels)["state"]: number for (name, labels), number in found.items() if name == "nxdt_state"}
    assert [state for state, number in states.items() if number] == ["failed"]


@pytest.mark.parametrize(
    ("written", "said", "error"),
    [
        ("RuntimeError", "[NXDT-P048] Rank 1 died", "NXDT-P048"),
        ("NXDT-T010", "[NXDT-P048] Rank 1 died", "NXDT-T010"),
        ("ValueError", "Traceback (most recent call last):", "ValueError"),
    ],
)
def test_the_code_of_the_launcher_replaces_the_exception_that_a_death_caused(small_run, written, said, error):
    config = small_run(HEALTH)
    config.run_dir.mkdir(parents=True)
    path = config.run_dir / "health.json"
    path.write_text(json.dumps({"state": "failed", "error": written}))
    mark_failed(config, said)
    assert json.loads(path.read_text()) == {"state": "failed", "error": error}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", '{"state": ["running"]}', "[" * 100_000, '{"state":"running","x":%s}'],
    ids=("empty", "list", "object", "other type", "too deep", "deep"),
)
def test_a_health_file_of_other_content_stays_as_it_is_when_a_rank_dies(small_run, text):
    config = small_run(HEALTH)
    config.run_dir.mkdir(parents=True)
    path = config.run_dir / "health.json"
    path.write_text(text.replace("%s", "[" * 900 + "]" * 900))
    before = path.read_text()
    mark_failed(config, "[NXDT-P048] Rank 1 died")
    after = path.read_text()
    # How deep Python reads and writes JSON depends on its version and on the calls of the moment.
    assert after == before or (text.startswith('{"state":"running"') and after.startswith('{"state": "failed"'))


def test_a_pipe_for_a_health_file_does_not_block_the_report_of_a_death(small_run):
    config = small_run(HEALTH)
    config.run_dir.mkdir(parents=True)
    os.mkfifo(config.run_dir / "health.json")
    mark_failed(config, "[NXDT-P048] Rank 1 died")


DIES = """
import os
import signal
from nxdt_core.api import Callback, Component, hookimpl


class Dies(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.rank == 1 and run.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def nxdt_callbacks():
    return [Component(name="dies", target=f"{__name__}:Dies")]
"""
LINE = ["time", "level", "rank", "logger", "message", "code", "data", "trace"]


def test_log_lines_as_json(tmp_path):
    keys = (*SMALL, "trainer.max_steps=2", "trainer.log_every_n_steps=1", "name=run")
    keys += ("checkpoint.monitor=nonsense", "checkpoint.mode=min")
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *keys, "exp_manager.log_format=json"]
    began = time.monotonic()
    done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    others = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert all(line.startswith("note: ") for line in others), "notes on the configuration come before the run"
    (file,) = (tmp_path / "nxdt_experiments/run/logs").iterdir()
    assert file.name == "globalrank-0_localrank-0.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(list(line) == LINE for line in kept + printed)
    assert [line["message"] for line in printed] == [line["message"] for line in kept]
    steps = {
        line["data"]["step"]: line["data"]
        for line in kept
        if line["message"].startswith("step 1/") or line["message"].startswith("step 2/")
    }
    rows = [json.loads(line) for line in (tmp_path / "nxdt_experiments/run/metrics.jsonl").read_text().splitlines()]
    assert list(steps.values()) == rows
    messages = [line["message"] for line in kept]
    (said,) = [number for number, message in enumerate(messages) if message.startswith("First step after ")]
    assert said < messages.index(next(message for message in messages if message.startswith("step 1/")))
    parts = kept[said]["data"]
    named = ("import", "configuration", "devices", "setup", "data", "build", "weights", "first_step")
    assert list(parts) == [f"start_{name}_s" for name in named]
    assert 0 < sum(parts.values()) < time.monotonic() - began
    assert messages[said].startswith(f"First step after {sum(parts.values()):.1f} s: ")
    assert {name: value for name, value in rows[0].items() if name in parts} == parts
    assert not parts.keys() & rows[1].keys()
    warning = next(line for line in kept if line["level"] == "WARNING")
    assert "nonsense" in warning["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", warning["time"])


WARNS = """
import warnings
from nxdt_core.api import Callback, Component, hookimpl


class Warns(Callback):
    def __init__(self, config, run_dir):
        pass

    def on_fit_start(self, run):
        warnings.warn("two\\nlines", stacklevel=1)


@hookimpl
def nxdt_callbacks():
    return [Component(name="warns", target=f"{__name__}:Warns")]
"""


def test_a_warning_of_python_is_a_json_line(small_run, tmp_path):
    (tmp_path / "warns.py").write_text(WARNS)
    keys = (f"plugins.local=[{tmp_path}/warns.py]", "trainer.callbacks=[warns]", "exp_manager.log_format=json")
    config = small_run("trainer.max_steps=1", *keys)
    train(config)
    lines = (config.run_dir / "logs" / "globalrank-0_localrank-0.jsonl").read_text().splitlines()
    (line,) = [found for found in map(json.loads, lines) if found["logger"] == "py.warnings"]
    assert line["message"].endswith("UserWarning: two\nlines")


def test_what_ends_a_run_is_a_json_line_with_its_code(small_run):
    config = small_run(
        "trainer.max_steps=2", "model.optim.lr=1e30", "trainer.gradient_clip_val=null", "exp_manager.log_format=json"
    )
    with pytest.raises(StepNotFinite):
        train(config)
    (line,) = map(json.loads, (config.run_dir / "logs" / "errors.jsonl").read_text().splitlines())
    assert (line["level"], line["code"], line["trace"]) == ("ERROR", "NXDT-T010", None)
