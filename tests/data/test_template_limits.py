"""Chat templates come with models and data: whatever one does is an error that names it and the record, within seconds
and without taking the machine's memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nxdt_core.data.chat import rendering
from nxdt_core.data.chat.rendering import TemplateRunner
from nxdt_core.data.chat.templates import ChatTemplate, shipped_template, template_names
from nxdt_core.errors import NxdtError
from nxdt_core.errors.chats import TemplateRefuses
from tests.checkpoint.poison import little_memory

__all__ = ["little_memory"]

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


GROWING = {
    "times": "{{ 'a' * 10**10 }}",
    "times of a list": "{% set a = [1] * 10**10 %}",
    "times of a variable": "{% set a = messages[0].content * 10**9 %}",
    "plus": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "block": "{% set n = namespace(s='a') %}{% for i in range(60) %}"
    "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='a') %}"
    "{% for i in range(60) %}{% set n.s = m(n.s) %}{% endfor %}",
    "output": "{% set s = 'a' * 9**8 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
    "output of a list": "{% set n = namespace(s=['a' * 9999]) %}"
    "{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "generation block": "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}",
    "width": "{{ '%10000000000d' % 1 }}",
    "width of an argument": "{{ '%*d' % (10**10, 1) }}",
    "precision": "{{ '%.9999999999f' % 1.5 }}",
    "repeated key": "{{ ('%(a)s' * 9999) % {'a': 'b' * 9999999} }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format of an argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "format by a map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 10**10}) }}",
    "filter format": "{{ '%10000000000d' | format(1) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "filter center": "{{ 'a' | center(10**10) }}",
    "filter by its name": "{{ ['a'] | map('center', 10**10) | list }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "rjust": "{{ 'a'.rjust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "bytes": "{{ 'a'.encode().center(10**10) | length }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "filter replace": "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "join": "{{ ('a' * 999999).join(range(99999) | map('string')) }}",
    "filter join": "{{ range(99999) | join('a' * 999999) }}",
    "translate": "{{ ('a' * 999999).translate({97: 'b' * 999999}) }}",
    "split": "{{ ('a ' * 40000000).split() | length }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "tojson": "{{ [1] | tojson(indent=10**10) }}",
    "sum": "{% set a = [[1] * 99999] * 99999 %}{{ a | sum(start=[]) | length }}",
    "power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "power of powers": "{% set n = namespace(i=9**9) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "views": "{% set s = 'a' * 9**8 %}{{ {'a': [s] * 99999}.values() }}",
    "namespace": "{% set n = namespace(l=['a' * 9**8] * 99999) %}{{ n }}",
    "slices": "{% set s = 'a' * 9**8 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(99) %}{% set n.l = n.l + [s[i:]] %}{% endfor %}",
    "copies by a method": "{% set s = 'a' * 9**8 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(99) %}{% set n.l = n.l + [s.upper()] %}{% endfor %}",
    "copies by a filter": "{% set s = 'a' * 9**8 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(99) %}{% set n.l = n.l + [s | upper] %}{% endfor %}",
    "many": "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + ['a' * (9**8 + i)] %}{% endfor %}",
}


COLLECTING = [GROWING[name] for name in ("copies by a method", "copies by a filter", "many")]
"""Those that take ten times the limit of one text, as ``slices`` does at the whole limit."""


@pytest.mark.parametrize("text", GROWING.values(), ids=GROWING)
@pytest.mark.usefixtures("little_memory")
def test_no_operation_makes_much_of_little(text, monkeypatch):
    """Python interrupts none of them, so a limit of time does not help."""
    if text in COLLECTING:  # a tenth of both; at the whole limit, one alone writes a gigabyte before it is refused
        text = text.replace("9**8", "9**7")
        monkeypatch.setattr(rendering, "_MOST_CHARACTERS", 10_000_000)
    began = time.monotonic()
    with pytest.raises(TemplateRefuses, match=r"more than [0-9,]+ (characters|digits)"):
        TemplateRunner(ChatTemplate(text, "of the test"), {}).run(HELLO, place="chats.jsonl:7", marks=True)
    assert time.monotonic() - began < 60


ORDINARY = (
    "{{ '-' * 20 }} {{ [1, 2] * 2 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ '%5.2f|%-4s' % (1.5, 'a') }} {{ 'a' ~ 1 ~ [2] }}",
    "{{ '%(a)s %(a)s' % {'a': 1} }} {{ '{:>8}|{:{}}|{a.b!r}'.format('x', 1, 5, a={'b': 'c'}) }}",
    "{{ '{0[a]}'.format({'a': 3}) }} {{ '{a}'.format_map({'a': 1}) }} {{ '<' | escape }} {{ ('{}' | safe).format(2) }}",
    "{{ 'a'.center(9) }}|{{ 'a'.zfill(4) }}|{{ 'a b'.split() }}|{{ 'a,b'.split(',') }}|{{ ','.join(['a', 'b']) }}",
    "{{ 'a.b'.replace('.', '!') }} {{ 'abc'.translate({97: 'x'}) }} {{ '\t|'.expandtabs(4) }}",
    "{{ (5).to_bytes(2, 'big') }}",
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ [3, 1] | sort | join(', ') }} {{ [1, 2] | sum }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | list }}",
    "{{ 'abc'[1:] }} {{ messages[::-1][0].role }} {{ 'abc'[:-1][0] }} {{ 'a\nb' | indent(2) }} {{ 'x' | center(5) }}",
    "{{ [[1], [2]] | sum(start=[]) }} {{ 'abc' | list }} {{ {'a': [1, None]} }}",
    "{{ ['a', 'b'] | map('upper') | join }} {{ messages | map(attribute='role') | join('/') }} {{ range(3) | list }}",
    "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(1) }}{% set b %}{{ m(2) }}{% endset %}{{ b ~ b }}",
    "{% raw %}{{ }}{% endraw %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ m.thinking }}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }} {{ dict(a=1) }}",
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }} {% endgeneration %}\n{% endfor %}",
    "{% if add_generation_prompt %}go{% endif %} {{ tools | length }} {{ eos_token }} {{ documents }}",
)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("text", [*ORDINARY, *(shipped_template(name).text for name in template_names())])
def test_templates_write_what_they_write_in_transformers(text, marks):
    talk = [*HELLO, {"role": "assistant", "content": "hi\n", "reasoning": "hm"}, *HELLO]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    tokens = {"eos_token": "</s>", "bos_token": "<s>"}
    wanted, spans = render_jinja_template(
        [talk],
        tools=tools,
        chat_template=text,
        return_assistant_tokens_mask=marks,
        add_generation_prompt=True,
        **tokens,
    )
    runner = TemplateRunner(ChatTemplate(text, "of the test"), tokens)
    found = runner.run(talk, place="here", tools=tools, prompts=True, marks=marks)
    assert found == (wanted[0], spans[0] if marks else [])


@pytest.mark.parametrize(
    "text",
    ["{{ " * 5000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 400],
    ids=["expressions", "parentheses", "conditions"],
)
def test_a_template_that_cannot_be_read_is_an_error(text):
    with pytest.raises(NxdtError):
        run(text)


WITHOUT_END = {
    "endless": ENDLESS,
    "loops in loops": "{% for a in range(9999) %}" * 6 + "x" + "{% endfor %}" * 6,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loops": "{% for i in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1]) }}{{ loop([1]) }}{% endif %}"
    "{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | sort | length }}{% endfor %}",
    "conditions": "{% for i in range(99999) if range(99999) | sum < 0 %}{% endfor %}",
}


@pytest.mark.parametrize("text", WITHOUT_END.values(), ids=WITHOUT_END)
@pytest.mark.parametrize("marks", [False, True])
def test_a_template_without_end_is_ended(text, marks, monkeypatch):
    monkeypatch.setattr(rendering, "_MOST_SECONDS", 0.1)  # which each of these computes for
    began = time.monotonic()
    with pytest.raises(TemplateRefuses, match=r"has not ended after 0\.1 seconds"):
        TemplateRunner(ChatTemplate(text, "of the test"), {}).run(HELLO, place="chats.jsonl:7", marks=marks)
    assert time.monotonic() - began < 60


def test_the_limit_counts_in_every_thread_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(rendering, "_MOST_SECONDS", 0.5)
    template = "{% for i in range(99999) %}" + ENDLESS + "{% endfor %}"
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(run, template) for _ in range(2)]
        assert [type(each.exception(60)) for each in ended] == [TemplateRefuses, TemplateRefuses]
        assert pool.submit(run, "a").result(60)[0] == "a"
