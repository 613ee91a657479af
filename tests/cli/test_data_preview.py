"""``nxdt data preview`` in a child process, on data of several plugins."""

from __future__ import annotations

import json
import re

import click

RECIPE = "recipe:llama-tiny-sft"


def test_the_report_marks_what_is_trained(nxdt):
    done = nxdt("data", "preview", RECIPE, "-n", "1")
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>assistant\n⟦" in done.stdout
    assert "<|im_end|>⟧" in done.stdout
    assert "records  180\n" in done.stdout
    assert "assistant's turn 2" in done.stdout
    assert click.unstyle(done.stdout) == done.stdout


def test_on_a_terminal_what_is_trained_is_green_and_underlined_and_the_rest_has_no_colour(nxdt, nxdt_on_terminal):
    words = ("data", "preview", RECIPE, "-n", "1")
    status, text = nxdt_on_terminal(*words)
    assert status == 0, text
    parts = json.loads(nxdt(*words, "--json").stdout)["shown"][0]["documents"][0]["parts"]
    green = re.findall(r"\x1b\[32m\x1b\[4m(.*?)\x1b\[0m", text, re.DOTALL)
    assert green
    assert green == [part["text"].replace("\n", "↵\n") for part in parts if part["trained"]]
    plain = "".join(re.split(r"\x1b\[32m\x1b\[4m.*?\x1b\[0m", text, flags=re.DOTALL))
    assert all(part["text"] in plain for part in parts if not part["trained"])
    assert "⟦" not in text


def test_a_packed_sample_shows_as_many_documents_as_are_asked_for(nxdt):
    whole = nxdt("data", "preview", RECIPE, "-n", "13").stdout
    first, second = map(int, re.findall(r"^sample .* by (\d+) documents$", whole, re.MULTILINE))
    assert whole.count("── document ") == 13
    assert f"\n── {first + second - 13} more in this sample: -n {first + second} ──\n" in whole
    one = nxdt("data", "preview", RECIPE, "-n", "1").stdout
    assert one.count("── document ") == 1
    assert f"── {first - 1} more in this sample: -n {first} ──\n\ndata " in one
    assert nxdt("data", "preview", RECIPE, "-n", "0").stdout.startswith("data ")


def test_the_answers_of_a_pair_are_one_document(nxdt):
    text = nxdt("data", "preview", "recipe:llama-tiny-dpo", "data.packing=true", "-n", "1").stdout
    assert re.findall(r"^(sample|── document)", text, re.MULTILINE) == ["sample", "── document"] * 2


def test_json_has_samples_and_counts(nxdt):
    done = nxdt("data", "preview", RECIPE, "data.packing=false", "--split", "validation", "-n", "2", "--json")
    found = json.loads(done.stdout)
    assert (found["split"], found["seq_length"], found["samples"]) == ("validation", 512, 20)
    assert len(found["shown"]) == 2
    (document,) = found["shown"][0]["documents"]
    ids = [id_ for part in document["parts"] for id_ in part["ids"]]
    assert len(ids) == document["tokens"]
    assert document["trained"] == sum(len(part["ids"]) for part in document["parts"] if part["trained"])
    report = found["report"]
    assert report["records"] == 20
    assert report["samples"] is None
    assert report["by_role"]["assistant"]["share_trained"] == 1.0
    assert 0 < report["efficiency"] < 0.5
    assert set(report["lengths"]) == {"min", "median", "mean", "p95", "max"}


def test_each_set_of_several_is_shown(nxdt, tmp_path):
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 200)
    sets = f"data.validation_sets={{one: ['{tmp_path}/one.txt'], other: ['{tmp_path}/other.txt']}}"
    words = (
        "data",
        "preview",
        "recipe:llama-tiny",
        sets,
        "data.validation_fraction=0",
        "--split",
        "validation",
        "-n",
        "1",
    )
    found = json.loads(nxdt(*words, "--json").stdout)
    assert [*found["sets"]] == ["one", "other"]
    texts = {name: each["shown"][0]["documents"][0]["parts"][-1]["text"] for name, each in found["sets"].items()}
    assert all(f"{name} {name} " in text for name, text in texts.items())
    said = nxdt(*words).stdout
    assert "validation samples of recipe:llama-tiny: one" in said
    assert "validation samples of recipe:llama-tiny: other" in said


def test_ids_stand_behind_their_tokens(nxdt):
    done = nxdt("data", "preview", "recipe:llama-tiny", "-n", "1", "--ids", "data.shuffle=false")
    assert "\nG·71·⟦e·101·n·110·e·101·" in done.stdout
    assert "counted" in done.stdout


def test_a_split_that_is_not_named_is_told(nxdt):
    done = nxdt("data", "preview", RECIPE, "--split", "test")
    assert done.returncode == 2
    assert "[NXDT-D014] The configuration names no test data." in done.stderr


def test_what_training_would_refuse_is_refused(nxdt):
    done = nxdt("data", "preview", RECIPE, "data.seq_length=64")
    assert done.returncode == 2
    assert "[NXDT-D310]" in done.stderr
    assert "library.jsonl:" in done.stderr


def test_fields_that_nothing_uses_are_counted(nxdt, tmp_path):
    record = {"input": "Where?", "output": "Here.", "id": 7}
    (tmp_path / "chats.jsonl").write_text((json.dumps(record) + "\n") * 2)
    words = ("data", "preview", RECIPE, f"data.train_files=[{tmp_path}/chats.jsonl]", "data.validation_fraction=0")
    done = nxdt(*words)
    assert "unused   id in 2 records\n" in done.stdout
    assert "train data: unused: id in 2 records" in done.stderr
    assert json.loads(nxdt(*words, "--json").stdout)["report"]["unused"] == {"id": 2}
    done = nxdt(*words, "data.unused_fields=refuse")
    assert done.returncode == 2
    assert "[NXDT-D322]" in done.stderr
    assert "chats.jsonl:1" in done.stderr
