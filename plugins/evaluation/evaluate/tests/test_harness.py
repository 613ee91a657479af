"""lm-evaluation-harness of our model, beside its own ``hf`` model of the exported checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from nxdt_plugin_evaluate.suite import Harness
from nxdt_testing.task_contract import TaskContract

from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.run.training import train
from nxdt_core.system.paths import resolve_path
from nxdt_core.train.generate import load_model
from nxdt_core.train.weights.export import export_hf
from tests.sampling import takes_all
from tests.train.small import SMALL

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm-eval)")
CHAT = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")
LONG = "And God said, Let there be light: and there was light. " * 6
"""Of more tokens than the model sees."""
CHOICES = [
    {"context": "In the", "answers": [" beginning", " 0123"], "right": 0},
    {"context": "And the ", "answers": ["zzz", "earth", "waters above"], "right": 1},
    {"context": "", "answers": ["And God said", "qqq"], "right": 0},
    {"context": LONG, "answers": [" And God", " 77"], "right": 0},
]
TEXTS = [
    {"context": "And God", "rest": " said"},
    {"context": LONG, "rest": LONG[:40]},
    {"context": "the", "rest": " earth"},
]
COMMON = """
dataset_path: json
test_split: train
dataset_kwargs: {{data_files: {rows}, cache_dir: {cache}}}
"""
TASKS = {
    "choices": (
        CHOICES,
        "output_type: multiple_choice\ndoc_to_text: context\ndoc_to_choice: answers\ndoc_to_target: right\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]",
    ),
    "rests": (
        TEXTS,
        "output_type: loglikelihood\ndoc_to_text: context\ndoc_to_target: rest\ntarget_delimiter: ''\n"
        "metric_list: [{metric: perplexity}, {metric: acc}]",
    ),
    "rolling": (
        [{"text": LONG}, {"text": "In the beginning."}, {"text": LONG * 3}],
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]",
    ),
    "writing": (
        [{"context": text, "rest": "x"} for text in ("And God", LONG, "0 1 2", "the waters")],
        "output_type: generate_until\ndoc_to_text: context\ndoc_to_target: rest\n"
        "generation_kwargs: {until: ['. ', 'zz'], max_gen_toks: 12, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ),
}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A tokenizer that puts a token before each text, as Llama's does."""
    library = pytest.importorskip("tokenizers")
    path = Path(shutil.copytree(CHAT, tmp_path_factory.mktemp("tokenizer") / "leading"))
    tokenizer = library.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    record = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**record, "bos_token": "<|endoftext|>"}))
    return path


@pytest.fixture(scope="module")
def uri(tmp_path_factory, tokenizer_dir):
    """Checkpoints of a few steps; the model has more rows than the tokenizer has tokens."""
    where = tmp_path_factory.mktemp("run")
    config = load(
        "recipe:llama-tiny",
        [
            *SMALL,
            f"exp_manager.exp_dir={where}",
            f"data.tokenizer={{library: huggingface, model: {tokenizer_dir}}}",
            *("model.vocab_size=1040", "model.max_position_embeddings=32", "trainer.max_steps=12"),
            *("model.optim.lr=0.02", "trainer.limit_val_batches=0"),
        ],
    )
    train(config)
    return str(config.run_dir / "checkpoints")


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    for name, (rows, text) in TASKS.items():
        file = path / f"{name}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / f"{name}.yaml").write_text(f"task: {name}\n{text}" + COMMON.format(rows=file, cache=path / "cache"))
    return path


@pytest.fixture(scope="module")
def theirs(uri, task_dir, tmp_path_factory):
    """What the library finds of the exported checkpoint with its own model."""
    from lm_eval.models.huggingface import HFLM

    target = str(tmp_path_factory.mktemp("hf") / "exported")
    export_hf(uri, target)
    # Its cache takes the logits of the wrong tokens where two requests divide one text differently (lm-eval 0.4.13).
    model = HFLM(pretrained=target, device="cpu", dtype="float32", batch_size=3, logits_cache=False)
    return judged(model, task_dir)


@pytest.fixture(scope="module")
def loaded(uri):
    return load_model(uri)


@pytest.mark.slow  # each test runs the library several times; the others compare its figures
class TestHarness(TaskContract):
    """With two of the tasks, whose records come from a file; all tests are inherited."""

    tasks = ("choices", "writing")

    @pytest.fixture
    def factory(self):
        return Harness

    @pytest.fixture
    def path(self, task_dir):
        return str(task_dir)

    @pytest.fixture
    def model(self, loaded):
        return loaded


def judged(model, task_dir):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_dir), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def answers(found, task):
    """What the model gave for each request, in the order of the records."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for (response,) in sample["resps"]]


@pytest.fixture(scope="module")
def ours(uri, task_dir):
    from nxdt_plugin_evaluate.harness import HarnessModel

    return judged(HarnessModel(load_model(uri)), task_dir)


@pytest.mark.parametrize("task", TASKS)
def test_each_request_is_answered_as_by_the_exported_model(task, ours, theirs):
    found, wanted = answers(ours, task), answers(theirs, task)
    assert len(found) == len(wanted) >= 3
    for one, other in zip(found, wanted, strict=True):
        if task == "writing":
            assert one == other
        elif task == "rolling":
            assert one == pytest.approx(other, abs=1e-3, rel=1e-5)  # of hundreds of tokens
        else:
            assert one[0] == pytest.approx(other[0], abs=1e-4)
            assert one[1] == other[1]


@pytest.mark.slow  # tests/cli/test_json.py runs the command
def test_the_command_prints_the_same_figures(uri, task_dir, theirs, capsys, pytestconfig):
    """By default those of two tasks; what the others' come from is compared above."""
    tasks = TASKS if takes_all(pytestconfig) else ("choices", "rests")
    words = [word for task in tasks for word in ("--task", task)]
    assert main(["evaluate", uri, *words, "--task-path", str(task_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 12
    for task in tasks:
        wanted = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
        assert wanted
        assert {name: found["tasks"][task][name] for name in wanted} == pytest.approx(wanted, abs=1e-4, rel=1e-5)
    assert main(["evaluate", uri, *words[:2], "--task-path", str(task_dir), "--limit", "1"]) == 0
    assert "choices: acc " in capsys.readouterr().out


def task(path, name, row, text):
    """The command's words for a task of one record."""
    (path / "rows.json").write_text(json.dumps(row) + "\n")
    common = COMMON.format(rows=path / "rows.json", cache=path / "cache")
    (path / "task.yaml").write_text(f"task: {name}\ndoc_to_text: context\ndoc_to_target: rest\n{text}{common}")
    return "--task", name, "--task-path", str(path)


@pytest.mark.parametrize(
    ("row", "text", "code", "words"),
    [
        ({"context": "x", "rest": LONG}, "output_type: loglikelihood", "NXDT-E007", "the model sees 32"),
        ({"context": "a", "rest": "n"}, "output_type: loglikelihood", "NXDT-E007", "adds no token to its question"),
        (
            {"context": "a", "rest": "b"},
            "output_type: generate_until\ngeneration_kwargs: {until: [], do_sample: true, typical_p: 0.9}",
            "NXDT-E008",
            "typical_p: 0.9",
        ),
    ],
)
def test_what_cannot_be_answered_is_said(row, text, code, words, uri, tmp_path, capsys):
    assert main(["evaluate", uri, *task(tmp_path, "odd", row, f"{text}\ntarget_delimiter: ''\n")]) == 2
    said = capsys.readouterr().err
    assert code in said
    assert words in said


def test_a_task_without_its_records_or_with_a_broken_template_is_told(uri, tmp_path, capsys):
    words = task(tmp_path, "gone", {}, "output_type: loglikelihood\n")
    (tmp_path / "rows.json").unlink()
    assert main(["evaluate", uri, *words]) == 2
    assert "NXDT-E010] The harness cannot run 'gone': Unable to find" in capsys.readouterr().err
    words = task(tmp_path, "broken", {"context": "a"}, "output_type: loglikelihood\n")
    written = (tmp_path / "task.yaml").read_text()
    (tmp_path / "task.yaml").write_text(written.replace("doc_to_text: context", "doc_to_text: '{{ context'"))
    assert main(["evaluate", uri, *words]) == 2
    assert "NXDT-E010] The harness cannot run 'broken': " in capsys.readouterr().err


def test_requests_for_several_draws_of_a_text_differ(uri, tmp_path, capsys):
    from lm_eval.api.instance import Instance
    from nxdt_plugin_evaluate.harness import HarnessModel

    settings = {"until": [], "do_sample": True, "temperature": 2.0, "max_gen_toks": 6}
    requests = [Instance("generate_until", {}, ("And", settings), number) for number in range(4)]
    model = HarnessModel(load_model(uri))
    found = model.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) == 4
    assert model.generate_until(requests, disable_tqdm=True) == found


@pytest.mark.parametrize("library", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "with library"])
def test_a_task_that_is_not_there_is_said_with_its_neighbours_before_a_model_is_loaded(
    task_dir, capsys, library, monkeypatch
):
    """By default without the library's own tasks, whose thousands of files take 10 seconds to read."""
    if not library:
        from lm_eval.tasks import TaskManager

        of_path = partial(TaskManager, include_defaults=False)
        monkeypatch.setattr(
            "nxdt_plugin_evaluate.harness.TaskManager", lambda include_path, **_: of_path(include_path=include_path)
        )
    assert main(["evaluate", "/nowhere", "--task", "choises", "--task-path", str(task_dir)]) == 2
    said = capsys.readouterr().err
    assert "NXDT-E006" in said
    assert "'choices'" in said


def test_the_extra_is_named_where_the_library_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nxdt_plugin_evaluate.harness", raising=False)
    assert main(["evaluate", "/nowhere", "--task", "choices"]) == 2
    said = capsys.readouterr().err
    assert "NXDT-E005" in said
    assert "pip install 'nxdt-plugin-evaluate[lm-eval]'" in said
