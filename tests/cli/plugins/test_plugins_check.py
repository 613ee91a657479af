"""``nxdt plugins check`` runs the kits on a plugin and says which requirement it breaks."""

import json

import pytest

COUNTING = """
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_schedules():
    return [Component(name="counting", target="acme:counting", summary="a test's")]


def counting(config, horizon):
    asked = set()

    def factor(step):
        asked.add(step)
        return 1.0 if len(asked) < 60 else 0.5

    return factor
"""


def test_a_plugin_that_breaks_requirements_is_told_which(nxdt, dist):
    dist("acme", COUNTING)
    done = nxdt("plugins", "check", "acme", "--json")
    assert done.returncode == 1, done.stderr
    results = {(each["of"], each["requirement"]): each for each in json.loads(done.stdout)}
    assert results["plugin", "it is usable"]["state"] == "pass"
    broken = {key: each["text"] for key, each in results.items() if each["state"] == "fail"}
    assert broken.pop(("plugin", "its readme says how to install it")) == "the README has no line 'pip install acme'"
    (key,) = broken
    assert key == ("schedule counting", "a resumed run has the factors of one that was not stopped")
    assert broken[key].startswith("after a resume the factor of step 59 is 1, and 0.5 in a run that was not stopped")


STREAM = """
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_datasets():
    return [Component(name="stream", target="acme:stream", summary="stream, to be described in a line")]


def stream(config, context):
    raise NotImplementedError
"""
CONSTANT = """

@hookimpl
def nxdt_schedules():
    return [Component(name="even", target="acme:even", summary="a test's")]


def even(config, horizon):
    return lambda step: 1.0
"""


def test_a_plugin_of_which_nothing_was_tested_does_not_pass(nxdt):
    done = nxdt("plugins", "check", "text")
    assert done.stdout.splitlines()[-1].endswith(" requirements, 0 broken, 0 of 1 components tested")
    assert done.returncode == 1


@pytest.mark.parametrize("tested", [0, 1])
def test_a_component_that_is_not_tested_and_an_unwritten_summary_are_told(nxdt, dist, tested):
    dist("acme", STREAM + CONSTANT * tested)
    done = nxdt("plugins", "check", "acme")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"broken, {tested} of {1 + tested} components tested")
    done = nxdt("plugins", "check", "acme", "--json")
    results = {(each["of"], each["requirement"]): each for each in json.loads(done.stdout)}
    assert "DIRECTORY" in results["dataset stream", "it keeps its contract"]["text"]
    assert results["plugin", "its summaries are written"]["text"] == "the summary of stream is that of the template"


def test_the_tests_of_a_repository_are_run(nxdt, work):
    (work / "mine" / "tests").mkdir(parents=True)
    (work / "mine" / "pytest.ini").write_text("[pytest]\naddopts = -ra --verbose\n")  # options of a terminal
    (work / "mine" / "local_file.py").write_text("ONE = 1\n")
    (work / "mine" / "tests" / "test_mine.py").write_text(
        "from local_file import ONE\n\n\n"
        "def test_one_is_one():\n    assert ONE == 1\n\n\ndef test_one_is_two():\n    assert ONE == 2, 'it is not'\n"
    )
    done = nxdt("plugins", "check", "mine")
    assert done.returncode == 1
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("test_mine.py")]
    assert [row[1:5] for row in rows] == [["one", "is", "one", "pass"], ["one", "is", "two", "fail"]]
    assert done.stdout.splitlines()[-1] == "2 requirements, 1 broken"


def test_an_assertion_without_a_message_is_told_by_its_statement(nxdt, work):
    (work / "kit.py").write_text("def check(value):\n    assert value == 2\n")
    (work / "mine" / "tests").mkdir(parents=True)
    (work / "mine" / "tests" / "test_mine.py").write_text("from kit import check\n\n\ndef test_two():\n    check(1)\n")
    done = nxdt("plugins", "check", "mine", "--json", fork=True)  # whose path has the directory
    (result,) = json.loads(done.stdout)
    assert (result["state"], result["text"]) == ("fail", "assert value == 2")


def test_what_cannot_be_checked_is_told(nxdt):
    done = nxdt("plugins", "check", "nobody")
    assert (done.returncode, done.stderr[:12]) == (2, "[NXDT-K020] ")
    done = nxdt("plugins", "check", "llama", without=("nxdt_testing",))
    assert (done.returncode, done.stderr[:12]) == (2, "[NXDT-K030] ")
