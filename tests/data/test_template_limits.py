"""Chat templates come with models and data: whatever one does is an error that names it and the record, within seconds
and without taking the machine's memory."""

from __future__ import annotations

import threading
import time

import pytest

from nxdt_core.data.chat import rendering
from nxdt_core.data.chat.rendering import TemplateRunner
from nxdt_core.data.chat.templates import ChatTemplate
from nxdt_core.data.chat.time_limit import TookTooLong, time_limit
from nxdt_core.errors import NxdtError
from nxdt_core.errors.chats import TemplateRefuses

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def run(text):
    return TemplateRunner(ChatTemplate(text, "of the test"), {}).run(HELLO, place="chats.jsonl:7")


def test_the_limits_are_those_of_the_documentation():
    assert (rendering._MOST_SECONDS, rendering._MOST_CHARACTERS) == (10, 100_000_000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ messages[0].content.encode('nope') }}", "unknown encoding"),
        ("{{ [] | first + 1 }}", "sequence was empty"),
        ("{{ messages[0]['content'] % 5 }}", "not all arguments converted"),
        ("{{ 10 ** 400 * 1.5 }}", "int too large"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ 'a' * 2000000 }}", "characters"),
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
    ],
)
def test_what_a_template_does_wrong_is_its_error(text, reason, monkeypatch):
    monkeypatch.setattr(rendering, "_MOST_CHARACTERS", 1_000_000)  # writing 100 million takes seconds
    with pytest.raises(TemplateRefuses) as caught:
        run(text)
    assert caught.value.code == "NXDT-D316"
    for said in (reason, "chats.jsonl:7", "of the test"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{{ " * 5000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 400],
    ids=["expressions", "parentheses", "conditions"],
)
def test_a_template_that_cannot_be_read_is_an_error(text):
    with pytest.raises(NxdtError):
        run(text)


@pytest.mark.parametrize(
    "text", [ENDLESS, "{% for a in range(9999) %}" * 6 + "x" + "{% endfor %}" * 6], ids=["endless", "loops in loops"]
)
def test_a_template_without_end_is_ended(text, monkeypatch):
    monkeypatch.setattr(rendering, "_MOST_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(TemplateRefuses, match="has not ended"):
        run(text)
    assert time.monotonic() - began < 60


def test_the_limit_counts_in_every_thread_and_leaves_nothing_behind():
    ended: list[BaseException | None] = []

    def spin(seconds: float) -> None:
        try:
            with time_limit(0.3):
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    pass
            ended.append(None)
        except TookTooLong as error:
            ended.append(error)

    threads = [threading.Thread(target=spin, args=(60.0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    spin(0.0)
    assert [type(each) for each in ended] == [TookTooLong, TookTooLong, type(None)]
    time.sleep(0.5)  # nothing comes late
