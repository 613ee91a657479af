"""``nxdt report`` and ``nxdt plot`` over files that another person wrote: markup in texts, values of any kind."""

import ast
import hashlib
import json
import math
import re
import sys
import threading
import time
import xml.etree.ElementTree as ET
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nxdt_core.cli.plot import draw
from nxdt_core.cli.plot import read_run as read_plotted
from nxdt_core.cli.report import page, read_run
from nxdt_core.cli.report_plot import POLICY, document, element, plot
from nxdt_core.errors.training import NotARunDirectory
from nxdt_core.run import metric_rows
from tests import processes

ROOT = Path(__file__).parents[2]
HOSTILE = """<img src=x onerror=alert(1)>'"</script></style></title></svg></pre>--><script>alert(1)</script>&lt;&"""
FIELDS = (
    "metric", "validation", "set", "save", "key", "value", "origin", "goal", "version", "dist", "axis", "size",
    "step", "created", "fingerprint", "event", "prompt", "sample", "directory",
)  # fmt: skip
"""Texts of a run's files that reach the page."""


class Parsed(HTMLParser):
    """Elements with the names of their attributes, and all texts and values of attributes."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.style, self.values = [], "", "", {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.text += "".join(f"\n{value}" for _, value in attrs)
        self.values.update({dict(attrs).get("http-equiv"): dict(attrs).get("content")} if tag == "meta" else {})

    def handle_data(self, data):
        self.text += f"\n{data}"
        self.style += data if self.elements[-1:] == [("style",)] else ""

    def unknown_decl(self, data):
        self.elements.append(("declaration", data))

    handle_comment = handle_pi = unknown_decl


def write_run(directory, text, rate):
    """Write all files of a run that the page reads, with ``FIELD`` and ``text`` in each field that is a text."""
    f = {name: f"{name}{text}" for name in FIELDS}
    for folder in ("checkpoints/step-1", "logs"):
        (directory / folder).mkdir(parents=True)
    row = {"step": 1, "loss": 2.0, "lr": text, "note": text, f["metric"]: 1.0, text: text}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    sets = {f["set"]: {"loss": 1.5, f["validation"]: 2.0, "x": text}}
    (directory / "validation.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "sets": sets}) + "\n")
    (directory / "saves.jsonl").write_text(json.dumps({"step": 1, f["save"]: 1.0, "seconds": text}) + "\n")
    (directory / "config.yaml").write_text(
        f"trainer:\n  max_steps: {f['goal']}\n{f['key']}: {f['value']}  # {f['origin']}\nrate: {rate}\n{text}\n"
    )
    mesh, versions = {f["axis"]: f["size"]}, {f["dist"]: f["version"]}
    facts = {"step": f["step"], "created": f["created"], "plugin_fingerprint": f["fingerprint"]}
    (directory / "checkpoints/step-1/manifest.json").write_text(
        json.dumps({"mesh": mesh, "versions": versions, **facts})
    )
    event = f"2026-11-01 00:00:00,000 WARNING rank 0 nxdt: {f['event']}\n"
    (directory / "logs/globalrank-0_1.txt").write_text(event)
    sample = {"step": 1, "prompt": f["prompt"], "text": f["sample"]}
    (directory / "generations.jsonl").write_text(json.dumps(sample) + "\n")
    (directory / "health.json").write_text(json.dumps({"state": text, "error": text}))
    (directory / "metrics.replaced.jsonl").write_text(json.dumps({"step": 1, text: text}) + "\n")
    return read_run(directory)


def test_no_text_of_a_run_becomes_an_element_or_attribute(tmp_path):
    in_name = HOSTILE.replace("/", "")
    found = []
    for text, name in ((HOSTILE, in_name), ("", "")):
        place = tmp_path / f"directory{name}"
        runs = [write_run(place / f"{number}{name}", text, number) for number in range(2)]
        found.append(Parsed(page(runs, refresh_s=10)))
        shown = {field: f"{field}{name if field == 'directory' else text}" for field in FIELDS}
        assert not [field for field, whole in shown.items() if whole not in found[-1].text]
    hostile, harmless = found
    assert hostile.elements == harmless.elements
    assert hostile.style == harmless.style


def test_no_path_in_an_error_becomes_an_element(tmp_path):
    errors = (element("pre", str(NotARunDirectory(path=path))) for path in (HOSTILE, "x"))
    found, harmless = (Parsed(document("No report", error, refresh_s=10)) for error in errors)
    assert found.elements == harmless.elements
    assert HOSTILE in found.text


def test_a_page_allows_its_own_style_and_nothing_else(tmp_path):
    found = Parsed(page([write_run(tmp_path / "run", "", 1)]))
    digest = b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert (found.values["Content-Security-Policy"], POLICY) == (policy, policy)
    assert found.elements[2:4] == [("meta", "charset"), ("meta", "http-equiv", "content")]
    assert not {"script", "a", "img"} & {tag for tag, *_ in found.elements}
    assert not [element for element in found.elements if "style" in element[1:]]


def test_one_module_of_the_report_writes_tags():
    for path in sorted((ROOT / "nxdt_core/cli").glob("report*.py")):
        tree = ast.parse(path.read_text())
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
        made = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Markup"
        ]
        tags = [text for text in texts if re.search(r"(?<!\?P)<(/?[a-z!]|/?$)|&\w+;|/>", text)]
        assert bool(tags or made) == (path.name == "report_plot.py"), (path, tags)


def test_the_name_of_a_run_is_text_in_a_picture_of_nxdt_plot(tmp_path):
    run = tmp_path / (HOSTILE.replace("/", "") + "$\\bad$")
    write_run(run, "", 1)
    draw([read_plotted(run)] * 2, tmp_path / "plot.svg")
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring((tmp_path / "plot.svg").read_text()).iter()}
    assert not {"script", "img", "pre"} & tags


DEEP = [b"[" * levels + b"]" * levels for levels in (900, 980, 100_000)]
LINES = {
    "smallest": b'{"step":1,"loss":5e-324,"x":-5e-324}',
    "opposite": b'{"step":1,"loss":1.7e308,"x":1.7e308}\n{"step":2,"loss":-1.7e308,"x":-1.7e308}',
    "400 digits": b'{"step":1,"loss":1%s,"bytes":-1%s}' % (b"0" * 400, b"0" * 400),
    "5000 digits": b'{"step":1,"skipped_steps":1%s,"loss":1%s}' % (b"0" * 5000, b"0" * 5000),
    "not finite": b'{"step":1,"loss":NaN,"x":Infinity}\n{"step":2,"loss":-Infinity,"x":1e999}',
    "other types": b'{"step":1,"loss":"1","x":null,"y":true,"z":{"loss":1},"sets":[1]}\n[1]\n1\nnull\n"a"\n{}',
    "sets": b'{"step":1,"sets":{"a":1,"b":{"loss":"x","c":{}},"":{"":1.0}}}',
    "steps": b"\n".join(b'{"step":%s,"x":1}' % s for s in (b"1.5", b'"2"', b"null", b"true", b"9" * 400, b"[1]")),
    "far steps": b'{"step":-9,"x":1,"loss":1}\n{"step":999999999999999999,"x":3,"loss":3,"consumed_tokens":64}',
    "near steps": b'{"step":999999999999999998,"x":1}\n{"step":999999999999999999,"x":3,"loss":3}',
    "order": b'{"step":3,"x":1}\n{"step":2,"x":2}\n{"step":3,"x":3}',
    "tokens": b'{"step":0,"loss":1,"consumed_tokens":1}\n{"step":9,"loss":1,"consumed_tokens":"many"}',
    "not UTF-8": b'\xff\xfe{"step":1}\n{"step":1,"\xff":1.0}\n\x00\x00\n\xef\xbb\xbf{"step":2}',
    "surrogates": rb'{"step":1,"\ud800":1.0,"\u2028":2.0}',
    "separators": '{"step":1,"a\u2028b\x85c":1.0}'.encode(),
    "empty": b"\n\n   \n\r\n",
    "truncated": b'{"step":1,"lo',
    "deep": b"\n".join(b'{"step":1,"loss":%s,"consumed_tokens":%s}' % (text, text) for text in DEEP),
}
GOOD = b'{"step":7,"loss":2.5,"grad_norm":1.25,"lr":0.1}'


@pytest.mark.parametrize("kind", LINES)
def test_values_that_cannot_be_drawn_are_left_out_of_page_and_picture(kind, tmp_path):
    for name in ("metrics", "validation", "saves", "resumes", "metrics.replaced", "generations"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES[kind] + b"\n" + GOOD)
    run = read_run(tmp_path)
    assert run.curves["metrics:grad_norm"][7] == 1.25
    html = page([run, run])
    assert "<h3>Gradient norm, log scale</h3><svg" in html
    places = re.findall(r' (?:points|c?[xy]|[xy][12])="([^"]*)"', html)
    assert all(-1 <= float(place) <= 420 for text in places for place in re.split("[ ,]", text) if place)
    html.encode()
    draw([read_plotted(tmp_path)] * 2, tmp_path / "plot.svg")


@pytest.mark.parametrize("levels", [980, 985, 989, 100_000])  # around the depth that Python can parse
def test_values_of_any_depth_in_a_manifest_or_sample_are_text(levels, tmp_path):
    text = b"[" * levels + b"]" * levels
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    deep = b'{"step":%s,"created":%s,"plugin_fingerprint":%s,"mesh":{"a":%s},"versions":{"a":%s}}'
    (tmp_path / "checkpoints/step-1/manifest.json").write_bytes(deep.replace(b"%s", text))
    (tmp_path / "generations.jsonl").write_bytes(b'{"step":1,"prompt":%s,"text":%s}' % (text, text))
    assert "<h1>" in page([read_run(tmp_path)])


def test_no_link_of_a_run_is_followed(tmp_path):
    other = tmp_path / "other"
    write_run(other, "", 1)
    run = tmp_path / "run"
    for folder in ("checkpoints/step-2", "logs"):
        (run / folder).mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step":1}\n')
    manifest = "checkpoints/step-1/manifest.json"
    for name in ("config.yaml", "validation.jsonl", "generations.jsonl", "logs/globalrank-0_1.txt"):
        (run / name).symlink_to(other / name)
    (run / "checkpoints/step-1").symlink_to(other / "checkpoints/step-1")
    (run / "checkpoints/step-2/manifest.json").symlink_to(other / manifest)
    found = read_run(run)
    assert not any((found.values, found.curves, found.generations, found.events, found.environment))


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_without_its_infinities_has_a_readable_axis(log):
    values = dict(enumerate((1e-300, 1e-90, 1.0, 1e90, 1e300, float("inf"))))
    labels = re.findall(r'text-anchor="end">([^<]+)<', plot([(0, "a", values)], label="x", log=log).html)
    assert 3 <= len(set(labels)) <= 15
    assert max(map(len, labels)) <= 6


def test_commands_end_well_where_no_value_can_be_drawn(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(b"\n".join(line for kind, line in LINES.items() if kind != "deep"))
    for command in ("report", "plot"):
        words = [sys.executable, "-m", "nxdt_core", command, "run"]
        done = processes.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_line_that_is_too_long_is_left_out(tmp_path):
    long = b'{"step":2,"x":"' + b"a" * (64 * 2**20) + b'"}'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1,"x":1}\n' + long + b'\n{"step":3,"x":3}\n')
    assert read_run(tmp_path).curves == {"metrics:x": {1: 1.0, 3: 3.0}}


@pytest.mark.parametrize(
    "line",
    ["a:" + " " * 200_000 + "x", "a: " + " # " * 50_000, "a" + ":" * 200_000, " " * 10**6],
    ids=("spaces", "comments", "colons", "indent"),
)
def test_a_line_of_the_configuration_takes_linear_time(line, tmp_path):
    (tmp_path / "config.yaml").write_text(f"{line}\nb: 1  # here\n")
    begun = time.perf_counter()
    run = read_run(tmp_path)
    assert time.perf_counter() - begun < 5
    assert (run.values["b"], run.origins["b"]) == ("1", "here")


def test_a_file_that_is_truncated_and_written_while_it_is_read_gives_a_page(tmp_path):
    path, ended = tmp_path / "metrics.jsonl", threading.Event()
    rows = b"".join(b'{"step":%d,"loss":%d.5}\n' % (step, step) for step in range(5000))
    path.write_bytes(rows)

    def rewrite():
        while not ended.is_set():
            path.write_bytes(rows[: len(rows) // 3])
            path.write_bytes(rows)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(20):
            points = read_run(tmp_path).curves.get("metrics:loss", {})
            assert all(value == step + 0.5 for step, value in points.items())
    finally:
        ended.set()
        thread.join()


def test_many_rows_are_thinned_to_their_extremes_while_they_are_read(tmp_path, monkeypatch):
    """The ends, spikes and gaps of curves stay, and a step that a resume repeats has its new value."""

    def row(step, repeated=False):
        loss = -9.0 if step == 3_333 and repeated else 50.0 + step if step % 1000 == 7 else math.sin(step)
        sets = {"a": {"loss": 70.0 if step == 4_321 else 1.0}}
        return {"step": step, "loss": math.nan if step >= 5_900 else loss, "lr": 1 / step, "sets": sets}

    steps = [*range(1, 4_000), *range(3_000, 6_001)]
    text = "".join(json.dumps(row(step, number >= 3_999)) + "\n" for number, step in enumerate(steps))
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "metrics.replaced.jsonl").write_text(text)
    whole = read_run(tmp_path)
    monkeypatch.setattr(metric_rows, "_MOST_ROWS", 512)
    thinned = read_run(tmp_path)
    for name, curve in whole.curves.items():
        kept = thinned.curves[name]
        assert 20 < len(kept) <= 512
        assert kept.items() <= curve.items()
        assert [(f(kept), f(kept.values()), kept[f(kept)]) for f in (min, max)] == [
            (f(curve), f(curve.values()), curve[f(curve)]) for f in (min, max)
        ]
    assert {step for step in whole.curves["metrics:loss"] if step % 1000 == 7} <= thinned.curves["metrics:loss"].keys()
    assert thinned.last_step == 6_000
    assert thinned.events == whole.events
    plotted = read_plotted(tmp_path).training
    assert [plotted[place]["step"] for place in (0, -1)] == [1, 6_000]
    assert len(plotted) <= 512
