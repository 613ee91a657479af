"""``nxdt report`` and ``nxdt watch`` on runs that were trained, looked at in a browser where one is installed."""

import http.client
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from html.parser import HTMLParser

import pytest

from nxdt_core.cli.report import page, read_run
from nxdt_core.cli.report_plot import plot
from tests import processes
from tests.processes import take_interrupts
from tests.sampling import slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = (
    "model.num_layers=1",
    "data.seq_length=32",
    "data.global_batch_size=4",
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.accelerator=cpu",
    "checkpoint.every_n_train_steps=2",
    'trainer.callbacks=[{name: generations, prompts: ["<script>alert(1)</script>"], max_new_tokens: 4}]',
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with the runs ``one`` and ``two``, whose learning rates differ."""
    place = tmp_path_factory.mktemp("runs")
    for name, rate in (("one", "0.003"), ("two", "0.001")):
        command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", f"name={name}", *KEYS]
        done = processes.run(
            [*command, f"model.optim.lr={rate}"], cwd=place, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    return place / "nxdt_experiments"


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The page of both runs, as the command writes it."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    command = [sys.executable, "-m", "nxdt_core", "report", "one", "two", "-o", str(file)]
    done = processes.run(command, cwd=runs, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"wrote {file}\n"
    return file


class Found(HTMLParser):
    """What a page has: figures by title, text, and every address that it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for key, value in attrs if key in ("src", "href", "data", "action")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_has_a_curve_of_each_metric_and_of_both_runs(written):
    text = written.read_text()
    titles = re.findall(r"<figure><h3>(.*?)</h3>", text)
    expected = ["Loss", "Learning rate", "Gradient norm, log scale", "Tokens per second", "Peak memory, GiB"]
    assert titles[:5] == expected
    assert re.search(r"<h3>Peak memory, GiB</h3>.*?</svg><p class=\"dim\">Measured: [^<]*nxdt plan", text)
    assert {"Training blocked by a checkpoint, seconds", "Validation perplexity"} <= set(titles)
    loss = re.search(r"<h3>Loss</h3>(<svg.*?</svg>)", text)[1]
    assert re.findall(r"<title>(.*?)</title>", loss) == [
        "one: training",
        "one: validation",
        "two: training",
        "two: validation",
    ]


def test_the_page_loads_nothing_and_runs_nothing(written):
    found = Found(written.read_text())
    assert found.loaded == []
    assert "script" not in found.tags
    assert "<script>alert(1)</script>" in "".join(found.text)
    assert "url(" not in written.read_text()


def test_the_page_shows_differences_origins_plugins_and_events(written):
    text = written.read_text()
    differing = re.findall(r'<tr class="differs"><td class="key"><code>(.*?)</code>', text)
    assert {"name", "model.optim.lr"} <= set(differing)
    assert "trainer.max_steps" not in differing
    row = re.search(r"<code>model.optim.lr</code></td>(.*?)</tr>", text)[1]
    assert re.findall(r"<td>(.*?)</td>", row) == ["<code>0.003</code>", "<code>0.001</code>", "command line"]
    assert "recipe:llama-tiny:" in text
    assert "nxdt-plugin-llama" in text


def test_what_a_crash_left_is_shown_as_far_as_it_goes(runs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "one", broken, ignore=shutil.ignore_patterns("checkpoints", "logs", "validation.jsonl"))
    rows = (broken / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(rows[1]), "loss": None, "skipped_steps": 1}
    (broken / "metrics.jsonl").write_text("\n".join([rows[0], json.dumps(last), "[1]", '{"step": 3, "lo']))
    (broken / "config.yaml").write_bytes(b"\xff\xfe\x00 : [")
    run = read_run(broken)
    assert list(run.curves["metrics:loss"]) == [1]
    assert run.last_step == 2
    assert ("step 2", "warning", "1 steps skipped, their gradients not finite") in run.events
    assert "No checkpoint to read them from" in page([run])


@pytest.mark.parametrize("points", [{5: 2.0}, {1: 3.0, 2: 3.0}, {1: 0.0}, {1: float("inf"), 2: 1.0}, {}])
@pytest.mark.parametrize("log", [False, True])
def test_a_plot_of_few_or_equal_points_has_finite_places(points, log):
    picture = plot([(0, "a", points)], label="x", log=log)
    assert picture is None or not re.search("nan|inf", picture.html)


def test_nearly_equal_values_have_short_labels_that_differ():
    picture = plot([(0, "a", {10: 0.927536, 20: 0.927541})], label="x").html
    labels = re.findall(r'text-anchor="end">([^<]+)<', picture)
    assert len(set(labels)) == len(labels) > 1
    assert max(map(len, labels)) <= 5


def test_a_plot_of_many_points_keeps_its_peaks():
    points = dict.fromkeys(range(100000), 1.0) | {77_777: 9.0}
    picture = plot([(0, "a", points)], label="x").html
    highest = min(float(y) for y in re.findall(r",([\d.]+)", re.search(r'points="(.*?)"', picture)[1]))
    assert highest < 40
    assert len(picture) < 20_000


def test_a_directory_without_records_is_an_error(tmp_path):
    command = [sys.executable, "-m", "nxdt_core", "report", str(tmp_path)]
    done = processes.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "NXDT-T080" in done.stderr


def test_a_page_that_cannot_be_written_is_an_error(runs):
    command = [sys.executable, "-m", "nxdt_core", "report", "one", "-o", "missing/report.html"]
    done = processes.run(command, cwd=runs, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "NXDT-T081" in done.stderr


def test_watch_serves_the_page_as_it_is_now_to_this_machine_alone(runs, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "one")
    command = [sys.executable, "-m", "nxdt_core", "watch", "one", "--port", "0"]
    pipe = subprocess.PIPE
    with processes.Popen(command, cwd=tmp_path, stdout=pipe, text=True, preexec_fn=take_interrupts) as server:
        port = int(re.search(r"127\.0\.0\.1:(\d+)/", server.stdout.readline())[1])

        def ask(path="/", host="localhost"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        try:
            status, text = ask()
            assert (status, 'http-equiv="refresh"' in text, ">4 of 4<" in text) == (200, True, True)
            with open(tmp_path / "one/metrics.jsonl", "a") as file:
                file.write('{"step": 9, "loss": 1.5}\n')
            assert ">9 of 4<" in ask()[1]
            assert ask("/config.yaml")[0] == 404
            assert ask(host="evil.example")[0] == 403
            busy = [*command[:-1], str(port)]
            done = processes.run(busy, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, "NXDT-T082" in done.stderr) == (2, True)
        finally:
            server.send_signal(signal.SIGINT)
            timer = threading.Timer(60, server.kill)
            timer.start()
        assert server.wait() == 130
        timer.cancel()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to look at the page")
@pytest.mark.parametrize("width", [1280, slow(500)])  # the narrowest window that headless Chromium makes
def test_the_page_fits_the_window_in_a_browser(written, tmp_path, width):
    browser = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},1200",
    ]
    measured = tmp_path / "measured.html"
    measure = "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join()</script></body>"
    measured.write_text(written.read_text().replace("Content-Security-Policy", "x").replace("</body>", measure))
    picture = tmp_path / "picture.png"
    words = ["--dump-dom", measured.as_uri()], [f"--screenshot={picture}", written.as_uri()]
    dom, _ = (
        subprocess.run([*browser, *each], capture_output=True, text=True, timeout=120, check=True) for each in words
    )
    content, window = map(int, re.search(r"<title>(\d+),(\d+)</title>", dom.stdout).groups())
    assert content <= window
    assert struct.unpack(">II", picture.read_bytes()[16:24])[0] == width
