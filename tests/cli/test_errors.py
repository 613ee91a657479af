"""How errors look, and what ``nxdt explain`` says of them."""

import json
import re

import click
import pytest

from nxdt_core.cli.explain import explanations
from tests.distributions import write_distribution

MISTAKES = ("model.num_layerz=3", "trainer.max_steps=many", "data.micro_batch_size=0")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_each_problem_has_code_place_and_blank_line_before_it(columns, nxdt_on_terminal):
    status, text = nxdt_on_terminal("config", "check", "recipe:llama-tiny", *MISTAKES, columns=columns)
    lines = [click.unstyle(line) for line in text.splitlines()]
    assert status == 2
    assert max(map(len, lines)) <= columns
    starts = [number for number, line in enumerate(lines) if line.startswith("  NXDT-C")]
    assert len(starts) == 3
    assert all(lines[number - 1] == "" for number in starts)
    assert all(line.startswith("    ") for line in lines[starts[0] : starts[-1]] if line and "NXDT" not in line)
    assert text.count("\x1b[1mcommand line:\x1b[0m") == 3
    assert lines[-1].startswith("More: nxdt explain NXDT-C0")
    assert set(lines[-1].removeprefix("More: nxdt explain ").split()) <= explanations().keys()


def test_a_pipe_gets_one_line_per_problem(nxdt):
    first, *rows, last = nxdt("config", "check", "recipe:llama-tiny", *MISTAKES).stderr.splitlines()
    assert first == "[NXDT-C001] recipe:llama-tiny: 3 problems."
    assert all(re.fullmatch(r"  command line: .* \[NXDT-C0\d\d\]", row) for row in rows)
    assert last.startswith("  More: nxdt explain NXDT-C0")


def test_a_tensor_parallel_size_that_fits_nothing_is_one_problem(nxdt):
    size = "distributed_strategy.tensor_model_parallel_size"
    done = nxdt("config", "check", "recipe:llama-tiny", f"{size}=3", "trainer.devices=4")
    first, row, _ = done.stderr.splitlines()
    assert first.endswith(": 1 problem.")
    assert f"command line: {size}: 3 fits none of trainer.devices x trainer.num_nodes 4, " in row
    assert all(value in row for value in ("num_attention_heads 4", "num_kv_heads 2", "vocab_size 272"))
    assert "Set it to 2 or a divisor of it" in row
    assert nxdt("config", "check", "recipe:llama-tiny", f"{size}=2", "trainer.devices=4").returncode == 0


def test_two_causes_stay_two_problems(nxdt):
    size = "distributed_strategy.tensor_model_parallel_size"
    done = nxdt("config", "check", "recipe:llama-tiny", f"{size}=3", "data.global_batch_size=5", "trainer.devices=3")
    assert ": 2 problems." in done.stderr
    assert "data.global_batch_size: 5 does not divide by" in done.stderr


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": ""}, False),
    ],
)
def test_colours_are_forced_and_forbidden_by_variables(environment, coloured, nxdt):
    listed = nxdt("plugins", "list", **environment)
    assert ("\x1b[" in listed.stdout) == coloured
    assert ("\x1b[" in nxdt("plugins", "show", "nobody", **environment).stderr) == coloured


def test_no_color_holds_on_a_terminal(nxdt_on_terminal):
    assert "\x1b[" in nxdt_on_terminal("plugins", "show", "nobody")[1]
    assert "\x1b[" not in nxdt_on_terminal("plugins", "show", "nobody", NO_COLOR="1")[1]


def test_every_code_has_a_cause_and_a_fix_and_no_placeholder_in_braces():
    known = explanations()
    assert len(known) > 150
    for code, each in known.items():
        assert each.cause.strip(), code
        assert each.fix.strip(), code
        assert not each.fix.startswith("‹"), code
        texts = [each.message, each.fix, *(text for example in each.examples for text in example)]
        assert not any(re.search(r"(?<!\$)\{\w+\}", text) for text in texts), code


def test_explain_prints_cause_example_and_fix(nxdt):
    done = nxdt("explain", "C016", "nxdt-k020")
    assert done.returncode == 0
    assert done.stdout.startswith("code     NXDT-C016\ncause    Each value is valid, but the combination is not.")
    assert "\nexample  " in done.stdout
    assert "\nfix      " in done.stdout
    assert "\n\ncode     NXDT-K020\n" in done.stdout


def test_explain_takes_the_code_of_a_plugin(nxdt, site):
    row = 'NxdtError.define("ACME-1", "A file without rows.", "{path} has no rows.", "Correct the path.")'
    errors = f"from nxdt_core.errors import NxdtError\nNoRows = {row}\n"
    write_distribution(site, "acme", plugins={"acme": "acme"}, files={"acme/__init__.py": "", "acme/errors.py": errors})
    done = nxdt("explain", "acme-1")
    assert done.stdout.startswith("code     ACME-1\ncause    A file without rows.\n"), done.stderr


def test_explain_json_has_the_documented_shape(nxdt):
    (found,) = json.loads(nxdt("explain", "NXDT-C016", "--json").stdout)
    assert list(found) == ["code", "cause", "message", "fix", "examples"]
    assert all(set(example) == {"found", "fix"} for example in found["examples"])


def test_explain_of_an_unknown_code_suggests_a_close_one(nxdt):
    done = nxdt("explain", "C061")
    assert done.returncode == 2
    assert "[NXDT-K040] No error has the code 'NXDT-C061'." in done.stderr
    assert "Did you mean 'NXDT-" in done.stderr
