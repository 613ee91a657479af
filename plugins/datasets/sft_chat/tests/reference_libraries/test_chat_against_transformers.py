"""Ids and masks beside those of transformers, whose renderer and tokenizer know nothing of this package."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxdt_core.data.chat.rendering import runner_of
from nxdt_core.data.chat.templates import ChatKeys, shipped_template, template_names
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DATA = Path(str(files("nxdt_plugin_sft_chat") / "data"))
WITHOUT_TOOLS = ("gemma", "llama2", "mistral", "plain", "zephyr")
ENDS = ("<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>")
"""What ends turns in templates of other models."""
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The shipped tokenizer with a begin and an end token, as most templates want them, and ends of turns."""
    path = Path(shutil.copytree(DATA / "tokenizer", tmp_path_factory.mktemp("tokenizer") / "chat"))
    record = json.loads((path / "tokenizer.json").read_text())
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    record["added_tokens"] += [
        {"id": number, "content": token, "special": True, **added} for number, token in enumerate(ENDS, start=1024)
    ]
    (path / "tokenizer.json").write_text(json.dumps(record))
    record = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**record, "bos_token": "<|endoftext|>"}))
    return path


@pytest.fixture(scope="module")
def ours(directory):
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=directory))


@pytest.fixture(scope="module")
def theirs(directory):
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))


def expected(theirs, record, template):
    """Ids and labels: each token that transformers calls an assistant's is learnt where it comes next."""
    found = theirs.apply_chat_template(
        for_transformers(record),
        tools=record.get("tools"),
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)
    return ids[:-1].tolist(), np.where(mask[1:], ids[1:], IGNORE_INDEX).tolist()


def for_transformers(record):
    return [{"content": "", **message} for message in record["messages"]]


def made(dataset):
    """Inputs and labels of each sample without its padding."""
    samples = [dataset[index] for index in range(len(dataset))]
    sizes = [int((sample.document_ids == 0).sum()) for sample in samples]
    return [(s.input_ids[:n].tolist(), s.labels[:n].tolist()) for s, n in zip(samples, sizes, strict=True)]


@pytest.mark.parametrize("name", [None, *template_names()])
def test_the_shipped_conversations_are_those_of_transformers(name, ours, theirs, shipped, load, write):
    some = shipped if name is None else [record for record in shipped if "tools" in record] + shipped[::4]
    records = [record for record in some if name not in WITHOUT_TOOLS or "tools" not in record]
    text = theirs.chat_template if name is None else shipped_template(name).text
    dataset = load(write(*records), tokenizer=ours, chat_template=name, seq_length=2048)
    assert made(dataset) == [expected(theirs, record, text) for record in records]


PUBLISHED = (
    *("llama3", "qwen2_5", "qwen3", "qwen3_instruct_2507", "cohere", "gemma3", "lfm2_v2"),
    *("phi3", "phi3_5", "deepseekv3"),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_give_what_they_give_transformers(name, ours, theirs, shipped, load, write, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}_training.jinja"
    records = [record for record in shipped if "tools" not in record][:40]
    dataset = load(write(*records), tokenizer=ours, chat_template_file=path, seq_length=2048)
    assert made(dataset) == [expected(theirs, record, path.read_text()) for record in records]


def test_text_between_the_generation_blocks_of_a_turn_is_not_trained(ours, theirs, talk, load, write):
    marked = "{% generation %}one{% endgeneration %} two {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    template = "{% for m in messages %}{{ m.role }}: " + (
        f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ m.content }}}}{{% endif %}}\n{{% endfor %}}"
    )
    dataset = load(write(talk), tokenizer=ours, chat_template=template)
    assert made(dataset) == [expected(theirs, talk, template)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_any_text_is_tokenised_and_masked_as_transformers_does(turns, ours, theirs, load, write):
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    dataset = load(write({"messages": messages}), tokenizer=ours, seq_length=1024)
    assert made(dataset) == [expected(theirs, {"messages": messages}, theirs.chat_template)]


@pytest.mark.parametrize("extra", [{"pad_token": None}, {}])
def test_templates_are_found_where_transformers_finds_them(extra, directory, tmp_path):
    for number, (name, content) in enumerate(
        [
            ("chat_template.jinja", "A"),
            ("chat_template.json", json.dumps({"chat_template": "A"})),
            ("tokenizer_config.json", {"chat_template": "A"}),
            (
                "tokenizer_config.json",
                {"chat_template": [{"name": "tool", "template": "B"}, {"name": "default", "template": "A"}]},
            ),
            ("tokenizer_config.json", {}),
            ("additional_chat_templates/rag.jinja", "A"),
        ]
    ):
        path = Path(shutil.copytree(directory, tmp_path / str(number), ignore=shutil.ignore_patterns("*.jinja")))
        record = {**json.loads((path / "tokenizer_config.json").read_text()), **extra}
        text = json.dumps({**record, **content}) if isinstance(content, dict) else content
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
        if "rag" in name:
            (path / "chat_template.jinja").write_text("A")
        known = transformers.PreTrainedTokenizerFast.from_pretrained(str(path)).chat_template
        wanted = known.get("default") if isinstance(known, dict) else known
        found = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=path)).chat_template()
        assert name == "chat_template.json" or found == wanted  # which transformers reads for processors only
        assert found == (None if content == {} else "A")


@pytest.mark.parametrize("kept", ["list", "files"])
def test_a_template_named_tool_use_renders_conversations_with_tools(kept, directory, tmp_path, talk, call):
    """Blanks and line breaks at the ends of the templates are those of each alone."""
    end = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_calls }}<|im_end|>\n{% endfor %}  \n  \n"
    named = {
        "default": f"\n  {end}\n",
        "tool_use": f"  \n {{% if tools %}}\n{{{{ tools | tojson }}}}{{% endif %}}{end}",
    }
    path = Path(shutil.copytree(directory, tmp_path / "a", ignore=shutil.ignore_patterns("*.jinja")))
    if kept == "list":
        record = json.loads((path / "tokenizer_config.json").read_text())
        record["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (path / "tokenizer_config.json").write_text(json.dumps(record))
    else:
        (path / "additional_chat_templates").mkdir()
        (path / "chat_template.jinja").write_text(named["default"])
        (path / "additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
    ours = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=path))
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in ours.hf_files().items():
        (exported / name).write_bytes(content)
    originals, carried = (transformers.PreTrainedTokenizerFast.from_pretrained(str(each)) for each in (path, exported))
    runner = runner_of(ChatKeys(), ours)
    for record in (talk, call):
        messages = [{"content": "", **message} for message in record["messages"]]
        wanted = originals.apply_chat_template(messages, tools=record.get("tools"), tokenize=False)
        assert runner.run(messages, place="here", tools=record.get("tools"))[0] == wanted
        assert carried.apply_chat_template(messages, tools=record.get("tools"), tokenize=False) == wanted
    assert "The time." in wanted


def test_special_tokens_are_those_of_transformers(ours, theirs):
    assert ours.special_tokens() == theirs.special_tokens_map
    assert set(ours.reserved_tokens()) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *ENDS}
    text = "<|im_start|>user\nHé 🙂<|im_end|>"
    (located,) = ours.locate([text])
    assert ours.spell(located.ids) == text
    assert theirs(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"] == [
        *zip(located.starts.tolist(), located.ends.tolist(), strict=True)
    ]
