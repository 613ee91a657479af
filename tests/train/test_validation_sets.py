"""Each source of a blend or mixture is judged by itself, and all of them together by one number."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.run.training import train
from nxdt_core.train import build
from tests.sampling import slow
from tests.train.small import SMALL

TEXTS = {"digits": [f"{number} and {number + 1}" for number in range(60)], "words": ["In the beginning was"] * 160}


def indexed(where, sets):
    """``megatron-data``: a blend of files of ``nxdt data preprocess``."""
    for name, texts in TEXTS.items():
        if (where / f"{name}.jsonl").exists():
            continue
        (where / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        files = ["--input", f"{where / name}.jsonl", "--output-prefix", f"{where / name}", "--overwrite"]
        assert main(["data", "preprocess", *files, "--tokenizer", "byte", "--workers", "1"]) == 0
    blend = ", ".join(f"0.5, {where / name}" for name in sets)
    return ["recipe:gpt-indexed-tiny", f"data.data_prefix={{train: {where / 'words'}, validation: [{blend}]}}"]


def saved(where, sets):
    """``hf-data``: a mixture of directories of the library."""
    datasets = pytest.importorskip("datasets")
    for name, texts in TEXTS.items():
        if not (where / name).exists():
            datasets.Dataset.from_dict({"text": texts}).save_to_disk(where / name)
    sources = {name: {"val_dir": str(where / name)} for name in sets}
    sources["to-learn"] = {"train_dir": str(where / "words")}
    return ["recipe:hf-data-tiny", "data.train_dir=null", "data.val_dir=null", f"data.sources={json.dumps(sources)}"]


def streamed(where, sets):
    """``hf-data``: the same as streams."""
    return [*saved(where, sets), "data.streaming=true"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Where the files of sources are: each kind is made once."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture
def validated(tmp_path, sources):
    """Runs two steps and validates the sets; returns the row, the tags of TensorBoard and the checkpoint's metrics."""

    def run(source, *sets, limit="null"):
        where = sources / source.__name__
        where.mkdir(exist_ok=True)
        recipe, *data = source(where, sets)
        own = (f"exp_manager.exp_dir={tmp_path}", f"name={'-'.join(sets)}-{limit}", "checkpoint.monitor=val_loss")
        data.append("data.reset_attention_mask=false")  # so that every token of a sample counts
        steps = ("trainer.max_steps=2", "trainer.val_check_interval=2", f"trainer.limit_val_batches={limit}")
        config = load(recipe, [*SMALL, *data, *own, *steps])
        train(config)
        (line,) = (config.run_dir / "validation.jsonl").read_text().splitlines()
        events = EventAccumulator(str(config.run_dir))
        events.Reload()
        kept = checkpoint.latest(build.storage(config), warn=print).facts.metrics
        return json.loads(line), {tag for tag in events.Tags()["scalars"] if tag.startswith("val/")}, kept

    return run


@pytest.mark.parametrize("source", [indexed, slow(saved), streamed])
def test_each_source_has_the_figures_that_it_has_alone_and_all_have_one_loss(validated, source):
    row, tags, kept = validated(source, "digits", "words")
    sets = row["sets"]
    assert list(sets) == ["digits", "words"]
    assert tags == {f"val/{figure}{of}" for figure in ("loss", "perplexity") for of in ("", "/digits", "/words")}
    assert row["tokens"] == sum(part["tokens"] for part in sets.values())
    assert row["loss"] == pytest.approx(sum(p["loss"] * p["tokens"] for p in sets.values()) / row["tokens"], rel=1e-9)
    assert kept["val_loss"] == pytest.approx(row["loss"], rel=1e-6)
    alone, tags, kept = validated(source, "digits")
    assert "sets" not in alone
    assert tags == {"val/loss", "val/perplexity"}
    assert alone["loss"] == pytest.approx(sets["digits"]["loss"], rel=1e-6) != pytest.approx(row["loss"], rel=1e-3)
    assert (alone["tokens"], kept["val_loss"]) == (sets["digits"]["tokens"], pytest.approx(alone["loss"], rel=1e-6))


@pytest.mark.parametrize(("source", "dealt"), [(indexed, [8, 8]), (saved, [2, 14]), slow(streamed, [16, 16])])
def test_a_limit_is_of_all_sources_together_unless_they_are_streams(validated, source, dealt):
    row, _, _ = validated(source, "digits", "words", limit=2)
    assert [part["tokens"] / 32 for part in row["sets"].values()] == dealt
