"""``nxdt data preview`` shows records in the shapes of TRL, LLaMA-Factory, Axolotl and OpenAI as those tools read them.

The messages that each record means are written here by hand, after the examples of the tools' documentation: TRL's
"Dataset formats and types", the ``data/README.md`` of LLaMA-Factory, Axolotl's "Dataset formats" and OpenAI's guide to
supervised fine-tuning. transformers' ``apply_chat_template`` renders them for the comparison.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from nxdt_core.cli.app import main
from nxdt_core.data.chat.templates import shipped_template
from nxdt_core.system.paths import resolve_path

transformers = pytest.importorskip("transformers", reason="transformers renders what is compared")
pytest.importorskip("nxdt_plugin_sft_chat", reason="the plugin of chats is not installed")

TOKENIZER = "package://nxdt_plugin_sft_chat/data/tokenizer"
SKY, BLUE, GREEN = "What color is the sky?", "It is blue.", "It is green."


def says(role, content, **fields):
    return {"role": role, "content": content, **fields}


ASKED, ANSWERED, REJECTED = says("user", SKY), says("assistant", BLUE), says("assistant", GREEN)
TURN = [ASKED, ANSWERED]
CALL = {"name": "look", "arguments": {"at": "sky"}}
TOOLS = [{"name": "look", "description": "Look at something.", "parameters": {"type": "object", "properties": {}}}]
CALLING = [
    ASKED,
    says("assistant", "", tool_calls=[{"type": "function", "function": CALL}]),
    says("tool", "blue"),
    ANSWERED,
]

CHATS = {
    "trl-messages": ({"messages": TURN}, TURN),
    "trl-prompt-completion": ({"prompt": SKY, "completion": BLUE}, TURN),
    "trl-prompt-completion-of-messages": ({"prompt": [ASKED], "completion": [ANSWERED]}, TURN),
    "axolotl-instruction-input": (
        {"instruction": "Answer.", "input": SKY, "output": BLUE},
        [says("user", f"Answer.\n\n{SKY}"), ANSWERED],
    ),
    "axolotl-question-answer": ({"question": SKY, "answer": BLUE}, TURN),
    "query-response": ({"query": SKY, "response": BLUE}, TURN),
    "dolly": ({"instruction": SKY, "context": "", "response": BLUE}, TURN),
    "factory-alpaca": (
        {
            "instruction": SKY,
            "input": "",
            "output": BLUE,
            "system": "Be brief.",
            "history": [["Hi", "Hello."], ["How are you?", "Well."]],
        },
        [
            says("system", "Be brief."),
            says("user", "Hi"),
            says("assistant", "Hello."),
            says("user", "How are you?"),
            says("assistant", "Well."),
            *TURN,
        ],
    ),
    "factory-sharegpt-tools": (
        {
            "conversations": [
                {"from": "human", "value": SKY},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": BLUE},
            ],
            "system": "Be brief.",
            "tools": json.dumps(TOOLS),
        },
        [says("system", "Be brief."), *CALLING],
    ),
    "sharegpt-roles-in-messages": (
        {"messages": [{"from": "system", "value": "Be brief."}, says("human", SKY), says("model", BLUE)]},
        [says("system", "Be brief."), *TURN],
    ),
    "openai-weight-and-name": (
        {"messages": [says("user", SKY, name="Ann"), says("assistant", GREEN, weight=0), ASKED, ANSWERED]},
        [ASKED, REJECTED, *TURN],
    ),
    "messages-as-json": ({"messages": json.dumps(TURN)}, TURN),
}

CHOICE = {"chosen": [ANSWERED], "rejected": [REJECTED]}
PAIRS = {
    "trl-explicit-messages": {"prompt": [ASKED], **CHOICE},
    "trl-implicit-messages": {"chosen": TURN, "rejected": [ASKED, REJECTED]},
    "trl-prompt-next-to-conversations": {"prompt": SKY, "chosen": TURN, "rejected": [ASKED, REJECTED]},
    "factory-sharegpt": {
        "conversations": [{"from": "human", "value": SKY}],
        "chosen": {"from": "gpt", "value": BLUE},
        "rejected": {"from": "gpt", "value": GREEN},
    },
    "factory-alpaca": {"instruction": SKY, "input": "", "chosen": BLUE, "rejected": GREEN},
}
TEXTS = {
    "trl-explicit-texts": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "The sky is"),
    "trl-implicit-texts": ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is"),
}


def previewed(recipe, files, *keys):
    """Return the documents of a preview in the order of the records, each as (text, trained parts)."""
    words = ["data", "preview", recipe, f"data.train_files={json.dumps(list(map(str, files)))}", *keys]
    words += ["data.validation_fraction=0", "data.shuffle=false", "-n", "99", "--json"]
    words += [f"data.tokenizer={{library: huggingface, model: '{TOKENIZER}'}}", "model.vocab_size=1024"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(words) == 0
    documents = (document for sample in json.loads(printed.getvalue())["shown"] for document in sample["documents"])
    return [
        ("".join(part["text"] for part in each["parts"]), [p["text"] for p in each["parts"] if p["trained"]])
        for each in documents
    ]


@pytest.fixture(scope="module")
def rendered():
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_path(TOKENIZER))
    template = shipped_template("chatml").text

    def rendered(messages, tools=None):
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)

    return rendered


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Every record in one file, previewed once."""

    def shown(recipe, records, *keys):
        file = tmp_path_factory.mktemp("shapes") / "records.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return previewed(recipe, [file], *keys)

    return shown


@pytest.fixture(scope="module")
def chats(shown):
    records = [record for record, _ in CHATS.values()]
    found = shown("recipe:llama-tiny-sft", records, "data.packing=false", "data.chat_template=chatml")
    return dict(zip(CHATS, found, strict=True))


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_is_what_its_format_means(name, chats, rendered):
    record, messages = CHATS[name]
    text, trained = chats[name]
    assert text == rendered(messages, TOOLS if "tools" in record else None).removesuffix("\n")
    assert trained[-1] == f"{BLUE}<|im_end|>"
    assert len(trained) == sum(each["role"] == "assistant" for each in messages) - (name == "openai-weight-and-name")


@pytest.fixture(scope="module")
def pairs(shown):
    keys = ("data.packing=false", "data.chat_template=chatml", "data.validation_files=[]")
    found = shown("recipe:llama-tiny-dpo", PAIRS.values(), *keys)
    return dict(zip(PAIRS, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_what_its_format_means(name, pairs, rendered):
    for answer, (text, trained) in zip((BLUE, GREEN), pairs[name], strict=True):
        assert text == rendered([ASKED, says("assistant", answer)]).removesuffix("\n")
        assert trained == [f"{answer}<|im_end|>"]


def test_a_pair_of_texts_is_what_its_format_means(shown):
    records = [record for record, _ in TEXTS.values()]
    found = shown("recipe:llama-tiny-dpo", records, "data.packing=false", "data.validation_files=[]")
    for (_, prompt), chosen, rejected in zip(TEXTS.values(), found[::2], found[1::2], strict=True):
        for answer, (text, trained) in ((" blue.", chosen), (" green.", rejected)):
            assert f"{prompt}{answer}" in text
            assert len(trained) == 1
            assert trained[0].startswith(answer)


def _jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _table(path, records):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(records)


def _zst(path, records):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))


def _saved(path, records):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    saved = datasets.Dataset.from_list(records)
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(path)


def _parquet(path, records):
    pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_list(records).to_parquet(path)


def _directory(path, records):
    path.mkdir()
    for number, record in enumerate(records):
        _jsonl(path / f"part-{number}.jsonl", [record])


FILES = {
    "a.jsonl": _jsonl,
    "list.jsonl": lambda path, records: path.write_text(json.dumps(records, indent=1)),
    "a.json": lambda path, records: path.write_text(json.dumps(records)),
    "a.jsonl.gz": lambda path, records: path.write_bytes(
        gzip.compress("\n".join(map(json.dumps, records)).encode(), mtime=0)
    ),
    "a.jsonl.zst": _zst,
    "a.csv": _table,
    "a.tsv": _table,
    "a.parquet": _parquet,
    "saved-splits": _saved,
    "directory": _directory,
}
ROWS = [{"question": f'{SKY}\nThink, "twice".\t{n}', "answer": BLUE} for n in range(2)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same records in every kind of file, previewed together."""
    folder: Path = tmp_path_factory.mktemp("kinds")
    for name, write in FILES.items():
        write(folder / name, ROWS)
    paths = [folder / name for name in FILES]
    keys = ("data.packing=false", "data.chat_template=chatml")
    found = previewed("recipe:llama-tiny-sft", paths, *keys)
    return dict(zip(FILES, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_are_read(name, files, rendered):
    for row, (text, trained) in zip(ROWS, files[name], strict=True):
        messages = [says("user", row["question"]), says("assistant", row["answer"])]
        assert text == rendered(messages).removesuffix("\n")
        assert trained == [f"{BLUE}<|im_end|>"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_tables_of_texts_are_read_as_the_datasets_library_reads_them(suffix, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from nxdt_core.data.files.records import read_records

    _table(tmp_path / f"a{suffix}", ROWS)
    separator = "\t" if suffix == ".tsv" else ","
    theirs = datasets.Dataset.from_csv(str(tmp_path / f"a{suffix}"), sep=separator, cache_dir=str(tmp_path / "cache"))
    assert [record for _, record in read_records([tmp_path / f"a{suffix}"], "FILES")[0]] == theirs.to_list()


def test_records_that_cannot_be_used_are_listed_where_they_are_dropped(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    _jsonl(file, [{"messages": TURN}, {"messages": [ASKED, ASKED, ANSWERED]}, {"text": "no chat"}])
    file.write_text(file.read_text() + "{broken\n")
    words = ["data", "preview", "recipe:llama-tiny-sft", f"data.train_files=['{file}']", "data.validation_fraction=0"]
    assert main(words) == 2
    assert f"{file}:2, message 2: 'user' follows 'user'" in capsys.readouterr().err
    assert main([*words, "data.bad_records=drop"]) == 2
    assert "[NXDT-D323] 3 of 4 records cannot be used, more than data.max_bad_share 0.01" in capsys.readouterr().err
    assert main([*words, "data.bad_records=drop", "data.max_bad_share=0.8"]) == 0
    said = capsys.readouterr().out
    assert "left out  3 records: they cannot be used" in said
    for number, code in ((2, "NXDT-D303"), (3, "NXDT-D300"), (4, "NXDT-D005")):
        assert any(f"{file}:{number}" in line and line.endswith(f"({code})") for line in said.splitlines())
    assert main([*words, "data.bad_records=drop", "data.max_bad_share=0.5", "data.turn_order=merge"]) == 0
    assert f"{SKY}\n\n{SKY}" in capsys.readouterr().out


def test_a_large_file_is_previewed_by_its_first_records(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    _jsonl(file, [{"messages": TURN}] * 1200)
    words = ["data", "preview", "recipe:llama-tiny-sft", f"data.train_files=['{file}']", "data.validation_fraction=0"]
    for more, read, of in (([], 1000, 1200), (["--all"], 1200, None)):
        assert main([*words, "-n", "1", "--json", *more]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        assert (report["records"], report["of_records"]) == (read, of)
    assert main([*words, "-n", "1"]) == 0
    assert "1,000, made of the first records of 1,200; --all reads all" in capsys.readouterr().out


def test_sources_are_named_in_a_file(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURN}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"problem": SKY, "solution": GREEN}))
    config = tmp_path / "mixed.yaml"
    config.write_text(
        "base: recipe:llama-tiny-sft\ndata:\n  train_files: []\n  validation_fraction: 0\n  sources:\n"
        "    chats: {train_files: [a.jsonl], weight: 2}\n"
        "    pairs: {train_files: [b.jsonl], columns: {prompt: problem, completion: solution}}\n"
    )
    assert main(["data", "preview", str(config)]) == 0
    said = capsys.readouterr().out
    assert said.count(f"{BLUE}<|im_end|>") == 2
    assert said.count(f"{GREEN}<|im_end|>") == 1


def test_columns_may_have_other_names(tmp_path):
    _jsonl(tmp_path / "a.jsonl", [{"problem": SKY, "solution": BLUE, "prompt": "another column"}])
    keys = ("data.packing=false", "data.columns={prompt: problem, completion: solution}", "data.chat_template=chatml")
    ((text, trained),) = previewed("recipe:llama-tiny-sft", [tmp_path / "a.jsonl"], *keys)
    assert f"user\n{SKY}<|im_end|>" in text
    assert "another" not in text
    assert trained == [f"{BLUE}<|im_end|>"]
