"""What a terminal shows of a run: what it is, what it does, a line per logged step, a bar."""

import io
import re
import time

import click

from nxdt_core.run.log import Console

RUN = (
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=2",
    "model.num_layers=1",
    "data.seq_length=16",
    "data.global_batch_size=4",
)


def test_a_run_shows_a_banner_then_what_it_does_then_a_bar_that_fits(nxdt_on_terminal, work):
    status, text = nxdt_on_terminal("train", "recipe:llama-tiny", *RUN, columns=80)
    assert status == 0
    lines = [line for line in click.unstyle(text).replace("\r", "\n").splitlines() if line.strip()]
    names = ["model", "devices", "precision", "optimizer", "data", "steps", "run", "checkpoints"]
    first = next(number for number, line in enumerate(lines) if line.startswith("model "))
    banner = lines[first : first + len(names)]
    assert [line.split()[0] for line in banner] == names
    assert banner[0].startswith("model       llama, ")
    assert banner[0].endswith("k parameters")
    assert banner[1:6] == [
        "devices     1 x cpu, one process",
        "precision   fp32",
        "optimizer   adamw, learning rate 0.003",
        "data        text, 4 sequences of 16 = 64 tokens per step",
        "steps       4, 256 tokens",
    ]
    assert banner[7].endswith("nxdt_experiments/llama-tiny/checkpoints")
    assert lines[first + len(names)] == "building the model"
    kept = [line for line in lines if line.startswith("step ") and "grad_norm" in line]
    assert [line.split()[1] for line in kept] == ["2/4", "4/4"]
    bars = [line for line in lines if line.startswith("step ") and "|" in line]
    assert bars[0].startswith("step 0/4 |")
    assert all(len(line) <= 80 and "ETA" in line for line in bars)
    assert bars[-1].startswith("step 4/4 |")
    assert "loss " in bars[-1]
    assert bars[-1].endswith(" tokens/s")

    again, text = nxdt_on_terminal("train", "recipe:llama-tiny", *RUN, "trainer.max_steps=6", columns=80)
    assert again == 0
    assert "loading step 4" in text
    assert "checkpoint saved to nxdt_experiments/llama-tiny/checkpoints/step-00000006" in " ".join(
        click.unstyle(text).split()
    )
    log = next((work / "nxdt_experiments/llama-tiny").glob("logs/*")).read_text()
    assert "sequences of 16 = 64 tokens per step" in log


def test_a_pipe_gets_the_lines_without_a_bar(nxdt):
    done = nxdt("train", "recipe:llama-tiny", *RUN)
    assert done.returncode == 0
    assert "|" not in done.stderr
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("step ") and "loss" in line] == [
        "2/4",
        "4/4",
    ]


class Terminal(io.StringIO):
    """Keeps what is written."""

    def isatty(self):
        return True


def test_lines_and_the_bar_have_colours_on_a_terminal_unless_they_are_turned_off(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    row = {"step": 2, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "mfu": None, "tokens_per_s": 10.0, "tokens": 8}
    lines = ("checkpoints ./here", "building the model", "step 2: checkpoint saved to s3://bucket/step-00000002")

    def printed(stream):
        console = Console(4, stream=stream)
        console.step(row)
        console.validation(row)
        for line in lines:
            console.say(line)
        console.close()
        return stream.getvalue()

    text = printed(Terminal())
    assert "\x1b[1mstep 2/4\x1b[0m  loss 1.0000" in text
    assert "\x1b[35mstep 2: validation\x1b[0m loss" in text
    assert "\x1b[1mcheckpoints\x1b[0m ./here" in text
    assert "\nbuilding the model\n" in text.replace("\r", "\n")
    assert "\x1b[32mstep 2: checkpoint saved\x1b[0m to" in text
    assert re.search(r"step 2/4 \|\x1b\[32m", text)
    assert "\x1b" not in printed(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1mstep 2/4\x1b[0m" in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed(Terminal()).replace("\x1b[A", "")


def test_the_bar_moves_with_each_step_and_its_clock_in_a_long_one():
    stream = Terminal()
    console = Console(5, stream=stream)
    console.begin(0)
    for step in range(1, 4):
        time.sleep(0.15)
        console.advance(step)
    end = time.monotonic() + 30
    while len(set(re.findall(r"step 3/5 .*?\| (\d\d:\d\d), ", stream.getvalue()))) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    console.close()
    shown = re.findall(r"step (\d)/5 .*?\| (\d\d:\d\d), ETA", stream.getvalue())
    assert {step for step, _ in shown} == {"0", "1", "2", "3"}
    assert len({clock for step, clock in shown if step == "3"}) >= 3
    written = stream.getvalue()
    time.sleep(1.2)
    assert stream.getvalue() == written, "nothing is drawn after the end"


def test_a_line_wider_than_the_terminal_is_wrapped_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream, path = Terminal(), "/a/directory/whose-name/is-wider/than-the-terminal"
    Console(5, stream=stream).say(f"step 4: checkpoint saved to {path} (1 MiB in 0.1 s)")
    assert click.unstyle(stream.getvalue()) == f"step 4: checkpoint saved to\n  {path}\n  (1 MiB in 0.1 s)\n"
