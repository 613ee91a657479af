"""What is trained of a rendering, on published templates, with generation blocks and without."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from nxdt_plugin_sft_chat.errors import TurnsInseparable
from nxdt_testing.errors import raises

from nxdt_core.data.chat.templates import shipped_template, template_names
from nxdt_core.errors.chats import EndOfTurnUntrained, TemplateRefuses, TemplateUnreadable

OWN = {name: shipped_template(name).text for name in template_names()}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls %}<call>{{ call.function.name }}: {{ call.function.arguments | tojson }}</call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
BARE = {"messages": [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "\nHello. \n"}]}
THOUGHT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    ]
}


def published() -> dict[str, tuple[str, str]]:
    """By model: its template, and the same with generation blocks, as TRL ships them."""
    trl = find_spec("trl")  # its import takes a CPU-second
    if trl is None or trl.origin is None:
        return {}
    folder = Path(trl.origin).with_name("chat_templates")
    pairs = ((path.with_name(path.name.replace("_training", "")), path) for path in folder.glob("*_training.jinja"))
    return {plain.stem: (plain.read_text(), marked.read_text()) for plain, marked in pairs if plain.is_file()}


PUBLISHED = published()

ALIKE = ("cohere", "cohere2", "gemma3", "lfm2_v2", "llama3", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2")
"""Models whose two templates write the same text with the same turns, but for space around what is trained."""
PROMPTED = ("deepseekv3", "deepseek_r1_distill", "muse_glimmer", "nemotron_3_nano", "nemotron_3_ultra", "qwen3_8")
"""Models whose generation blocks begin with what the prompt to generate has already written."""


def pair(name):
    if name not in PUBLISHED:
        pytest.skip(f"trl is not installed, or has no templates of {name}")
    return PUBLISHED[name]


@pytest.mark.parametrize("record", ["talk", "bare", "thought"])
@pytest.mark.parametrize("name", [*ALIKE, *PROMPTED])
def test_prefixes_find_what_generation_blocks_mark(name, record, render, talk):
    plain, marked = (render(text, {"talk": talk, "bare": BARE, "thought": THOUGHT}[record]) for text in pair(name))
    assert plain[0] == marked[0]
    for found, block in zip(plain[1], marked[1], strict=True):
        assert block.strip().endswith(found.strip())
        assert name in PROMPTED or block.strip() == found.strip()


@pytest.mark.parametrize("name", ["qwen3_vl", "lfm2_v2", "qwen3_8", "nemotron_3_nano", "qwen3_instruct_2507"])
def test_prefixes_find_calls_of_functions_too(name, render, call):
    plain, marked = (render(text, call) for text in pair(name))
    assert plain[0] == marked[0]
    assert "clock" in plain[1][0]
    assert all(block.strip().endswith(found.strip()) for found, block in zip(plain[1], marked[1], strict=True))


def test_turns_are_found_whose_reasoning_is_dropped_once_others_follow(render):
    text, (first, last) = render(pair("qwen3")[0], THOUGHT)
    assert "hm" not in text
    assert first == "Hello<|im_end|>"
    assert last == "<think>\ntwo and two\n</think>\n\n4<|im_end|>"


def agent(*, inline, reasons=True):
    """Two questions; each is answered after a call, with reasoning before each turn of the assistant."""

    def turn(content, reasoning, **fields):
        if inline and reasons:
            return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}", **fields}
        reasoned = {"reasoning_content": reasoning} if reasons else {}
        return {"role": "assistant", "content": content, **reasoned, **fields}

    def question(number):
        calls = [{"function": {"name": f"find{number}", "arguments": {"x": number}}}]
        return [
            {"role": "user", "content": f"Question {number}"},
            turn("", f"plan {number}", tool_calls=calls),
            {"role": "tool", "content": f"result {number}"},
            turn(f"Answer {number}.", f"conclusion {number}"),
        ]

    return {"messages": [*question(1), *question(2)]}


@pytest.mark.parametrize("record", [agent(inline=False), agent(inline=True)], ids=["field", "inline"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_agents_with_reasoning_train_on_what_the_template_keeps(name, record, render):
    text, turns = render(pair(name)[0], record)
    assert "plan 1" not in text
    assert "conclusion 1" not in text
    called, answered, called_last, answered_last = turns
    assert called.startswith("<tool_call>")
    assert "find1" in called
    assert answered == "Answer 1.<|im_end|>"
    assert all(turn.endswith("<|im_end|>") for turn in turns)
    assert "plan 2\n</think>\n\n<tool_call>" in called_last
    assert answered_last.endswith("conclusion 2\n</think>\n\nAnswer 2.<|im_end|>")


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6"])
def test_agents_without_reasoning_train_where_prompts_would_have_an_empty_thought(name, render):
    _, turns = render(pair(name)[0], agent(inline=False, reasons=False))
    assert turns[1] == "Answer 1.<|im_end|>"
    assert turns[3].endswith("</think>\n\nAnswer 2.<|im_end|>")


def test_turns_are_found_where_a_token_ends_the_whole_conversation(render, talk):
    text, spans = render(pair("phi3")[0], talk)
    assert text.endswith("</s>")
    assert [span.replace("\n", "") for span in spans] == ["Hello there.<|end|>", "4<|end|></s>"]


def test_what_no_prefix_shows_is_refused_by_place(render, talk):
    with pytest.raises(TurnsInseparable, match=r"a\.jsonl:7, message 3: the chat template \(given\)"):
        render(pair("gptoss")[0], talk)
    assert render(pair("gptoss")[0], talk, trained=[4])[1] == ["<|channel|>final<|message|>4<|return|>"]


@pytest.mark.parametrize("name", ["llama3", "lfm2"])
def test_a_template_that_drops_calls_of_functions_is_refused(name, render, call):
    for text in pair(name):
        with pytest.raises(TemplateRefuses, match="leaves out what message 2 says or calls"):
            render(text, call)


def test_a_template_that_ends_no_turn_is_refused(render, talk):
    with raises(EndOfTurnUntrained, match="no text follows an answer"):
        render(pair("glm4moe")[0], talk)


def test_a_template_that_closes_calls_and_not_their_turn_is_refused(render, call):
    """A model that is trained without the end of such a turn calls functions again and again."""
    for text in (pair("glm4moe")[0], ENDLESS):
        with raises(EndOfTurnUntrained, match="no text follows an answer"):
            render(text, call, trained=[1])
    assert render(pair("glm4moe")[1], call, trained=[1])[1][0].endswith("</tool_call><|observation|>")


def test_generation_blocks_that_leave_out_the_end_of_a_turn_are_refused(render, talk):
    marked = OWN["chatml"].replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration %}", "{%- endgeneration %}{{- '<|im_end|>' }}"
    )
    assert marked != OWN["chatml"]
    with raises(EndOfTurnUntrained, match=r"generation blocks leave out '<\|im_end\|>'"):
        render(marked, talk)


def test_generation_blocks_of_messages_of_others_are_refused(render, talk):
    everything = "{% for m in messages %}{% generation %}{{ m.content }}|{% endgeneration %}\n{% endfor %}"
    with pytest.raises(TurnsInseparable, match="5 generation blocks for 2 turns"):
        render(everything, talk)


def test_a_turn_may_have_several_generation_blocks(render, talk):
    blocks = "{% generation %}<a>{% endgeneration %}:{% generation %}{{ m.content }}</a>{% endgeneration %}"
    apart = "{% for m in messages %}{{ m.role }} " + (
        f"{{% if m.role == 'assistant' %}}{blocks}{{% else %}}{{{{ m.content }}}}{{% endif %}}\n{{% endfor %}}"
    )
    assert render(apart, talk)[1] == ["<a>:Hello there.</a>", "<a>:4</a>"]
    assert render(apart, talk, learnt=True) == ["<a>", "Hello there.</a>", "<a>", "4</a>"]
    assert render(apart, talk, trained=[4], learnt=True) == ["<a>", "4</a>"]


def test_a_template_whose_generation_blocks_are_not_reached_is_one_without(render, talk):
    unreached = "{% if tools %}{% generation %}{% endgeneration %}{% endif %}" + CHATML
    assert render(unreached, talk) == render(CHATML, talk)


@pytest.mark.parametrize(
    "said",
    [
        "Use </think> to end.",
        "One </think>",
        "</think><think>",
        "<think>\nx\n</think>\n\na<think>b<think>\nx\n</think>\n\n",
        "\n</think>",
    ],
)
@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": "hm"}])
def test_turns_of_qwen3_are_found_that_contain_its_tags(said, reasoning, render):
    """As blocks around what the assistant writes would mark them."""
    plain = pair("qwen3")[0]
    begin, end = plain.index("{%- if loop.index0 > ns.last"), plain.index('{%- elif message.role == "tool"')
    written = plain[begin:end].replace("'<|im_start|>' + message.role + '\\n' + content", "content")
    written = written.replace("'<|im_start|>' + message.role + '\\n<think>", "'<think>").replace(
        "<|im_end|>\\n", "<|im_end|>"
    )
    header = "{{- '<|im_start|>' + message.role + '\\n' }}"
    marked = f"{plain[:begin]}{header}{{%- generation %}}{written}{{%- endgeneration %}}{{{{- '\\n' }}}}{plain[end:]}"
    turns = [{"role": "user", "content": "a </think>"}, {"role": "assistant", "content": said, **reasoning}]
    record = {"messages": [*turns, *turns]}
    assert render(plain, record) == render(marked, record)


@pytest.mark.parametrize("name", OWN)
def test_own_templates_train_answers_and_their_ends_alone(name, render, talk):
    text, spans = render(OWN[name], talk)
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "llama2": " </s>"}
    end = ends.get(name, "</s>")
    begin = (
        " " if name in ("llama2", "mistral") else ""
    )  # no prompt stands before the answer: the model writes the space
    assert spans == [f"{begin}Hello there.{end}", f"{begin}4{end}"]
    for content in ("Be brief.", "Hi", "2+2?"):
        assert content in text


@pytest.mark.parametrize("name", OWN)
def test_own_blocks_are_where_prefixes_would_find_them(name, render, talk):
    unmarked = re.sub(r"{%- (end)?generation %}", "", OWN[name])
    marked, found = render(OWN[name], talk), render(unmarked, talk)
    assert found[0] == marked[0]
    assert found[1] == marked[1]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_own_templates_write_calls_and_results(name, render, call):
    text, (asked, answered) = render(OWN[name], call)
    assert '"zone": "UTC"' in asked
    assert answered.startswith("Half past twelve.")
    assert "12:30" in text
    assert "The time." in text


@pytest.mark.parametrize("written", ["'' + {}", "{}", "{} | string"])
def test_arguments_are_json_where_a_template_writes_no_objects(written, render, call):
    """One raises an exception for an object; the others write it as Python does."""
    text = "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls or () %}" + (
        f"{{{{ {written.format('c.function.arguments')} }}}}{{{{ c.function.name }}}}{{% endfor %}}|\n{{% endfor %}}"
    )
    quoting = {"role": "user", "content": "{'zone': 'UTC'}"}
    nothing = {"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {}}]}
    record = {**call, "messages": [*call["messages"], {"role": "user", "content": "Again"}, nothing]}
    asked, answered, again = render(text, record)[1]
    assert (asked, again) == ('assistant {"zone": "UTC"}clock|', "assistant {}clock|")
    assert answered == "assistant Half past twelve.|"
    objects = text.replace("c.function.arguments", "c.function.arguments | tojson")
    quoted = {**call, "messages": [quoting, *call["messages"][1:]]}
    assert '\\"' not in render(objects, quoted)[0]


def test_deepseek_s_template_writes_calls(render, call):
    _, (asked, _) = render(pair("deepseekv3")[0], call)
    assert '\n```json\n{"zone": "UTC"}\n```' in asked


@pytest.mark.parametrize("name", sorted({"gemma", "llama2", "mistral", "plain", "zephyr"}))
def test_own_templates_without_a_form_for_tools_say_so(name, render, call):
    with pytest.raises(TemplateRefuses, match="no place for tools"):
        render(OWN[name], call)


def test_llama3_is_written_as_its_authors_write_it(render, talk):
    chat_format = pytest.importorskip("llama_models.llama3.chat_format", reason="llama-models is not installed")
    tokens = pytest.importorskip("llama_models.llama3.tokenizer").Tokenizer.get_instance()
    datatypes = pytest.importorskip("llama_models.datatypes")
    messages = [datatypes.RawMessage(**message) for message in talk["messages"]]
    ids = chat_format.ChatFormat(tokens).encode_dialog_prompt(messages).tokens
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert render(OWN["llama3"], talk, bos="<|begin_of_text|>")[0] + header == tokens.decode(ids)


def test_mistral_is_written_as_its_authors_write_it(render, talk):
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral", reason="mistral-common is not installed")
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    spoken = pytest.importorskip("mistral_common.protocol.instruct.messages")
    system, *rest = talk["messages"]
    kinds = {"user": spoken.UserMessage, "assistant": spoken.AssistantMessage}
    messages = [kinds[message["role"]](content=message["content"]) for message in rest]
    request = requests.InstructRequest(messages=messages, system_prompt=system["content"])
    theirs = mistral.MistralTokenizer.v1().instruct_tokenizer.encode_instruct(request).text
    theirs = theirs.replace("<0x0A>", "\n").replace("▁", " ")
    assert render(OWN["mistral"], talk)[0] == re.sub(r"(</?s>) ", r"\1", theirs)


@pytest.mark.parametrize(("own", "theirs"), [("gemma", "gemma"), ("chatml", "qwen2_5"), ("llama3", "llama3")])
def test_other_formats_are_written_as_published(own, theirs, render, talk):
    record = talk if own == "chatml" else {"messages": talk["messages"][1:]}
    assert render(OWN[own], record)[0] == render(pair(theirs)[0], record)[0]


def test_a_prompt_that_is_rendered_otherwise_later_is_refused(render, talk):
    late = "{% for m in messages %}{% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}|{% endfor %}"
    with pytest.raises(TurnsInseparable, match="message 3"):
        render(late, talk)


def test_other_speakers_are_trained_without_what_opens_their_turn(render, talk):
    assert render(CHATML, talk, trained=[0, 1])[1] == ["Be brief.<|im_end|>", "Hi<|im_end|>"]


@pytest.mark.parametrize("content", ["user", "er", "A", "im_end"])
def test_words_that_stand_in_what_opens_a_turn_too_are_found_behind_it(render, content):
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
    assert render(CHATML, record, trained=[0])[1] == [f"{content}<|im_end|>"]


def test_a_line_end_that_closes_a_turn_is_trained(render):
    assert render("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", BARE)[1] == [
        "assistant: \nHello. \n\n"
    ]


@pytest.mark.parametrize("text", [CHATML, OWN["chatml"]], ids=["ChatML", "own"])
@pytest.mark.parametrize("answer", [">", "|>", "im_end|>"])
def test_an_answer_may_be_what_the_end_of_turn_ends_with(answer, text, render):
    record = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": answer}]}
    assert render(text, record)[1] == [f"{answer}<|im_end|>"]


def test_the_date_is_the_configured_one(render):
    asks = "{{ strftime_now('%d %b %Y') }} {{ strftime_now(\"%Y\") }}\n" + CHATML
    assert render(asks, BARE)[0].startswith("26 Jul 2024 2024\n")


def test_options_reach_the_template(render):
    assert render("{{ mood }}" + CHATML, BARE, mood="gay")[0].startswith("gay")


@pytest.mark.parametrize(
    ("template", "error", "found"),
    [
        ("{% for m in messages %}", TemplateUnreadable, "line 1"),
        ("{{ raise_exception('not today.') }}", TemplateRefuses, "a.jsonl:7: .* not today"),
        ("{{ messages[9].content.x }}", TemplateRefuses, "a.jsonl:7"),
        ("{{ ''.__class__.__mro__ }}", TemplateRefuses, "unsafe"),
        ("{{ messages.append(1) }}", TemplateRefuses, "unsafe|safe"),
    ],
)
def test_templates_that_cannot_render_are_named(template, error, found, render):
    with raises(error, match=found):
        render(template, BARE)
