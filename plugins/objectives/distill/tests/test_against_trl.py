"""The same logits give the losses and gradients of TRL's GKD; steps are those of a loop over transformers' models."""

from __future__ import annotations

import pytest
import torch
from nxdt_plugin_distill.divergence import Measure, TopTokens, divergences
from torch.nn import functional

from nxdt_core.config import load
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.system.paths import resolve_path
from nxdt_core.train import TrainSession

transformers = pytest.importorskip("transformers")

TOKENIZER = "package://nxdt_plugin_sft_chat/data/tokenizer"
STEPS, RATE = 5, 0.1
CLOSE = {"abs": 1e-5, "rel": 1e-5}


def trl_loss(student, teacher, labels, beta, temperature, reduction="sum"):
    gkd = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed; it is pinned in constraints.txt")
    given = {"beta": beta, "temperature": temperature, "reduction": reduction}
    return gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, **given)


def logits(rows=300, vocabulary=50, dtype=torch.float64):
    draws = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(2, 3, rows, vocabulary, generator=draws, dtype=dtype)).unbind()
    labels = torch.randint(vocabulary, (3, rows), generator=draws)
    labels[0, :7] = IGNORE_INDEX
    return student.requires_grad_(), teacher, labels


@pytest.mark.parametrize("temperature", [0.7, 1, 2.5])
@pytest.mark.parametrize("beta", [0, 0.3, 0.5, 1])
def test_losses_and_gradients_are_those_of_trl(beta, temperature):
    student, teacher, labels = logits()
    wanted = trl_loss(student, teacher, labels, beta, temperature)
    found, same = divergences(student, teacher, Measure(beta=beta, temperature=temperature))
    kept = labels != IGNORE_INDEX
    assert found[kept].sum().item() == pytest.approx(wanted.item(), rel=1e-12)
    assert torch.equal(same.bool(), student.argmax(-1) == teacher.argmax(-1))
    (gradient,) = torch.autograd.grad(found[kept].sum(), student)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, student)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_narrow_logits_are_compared_in_float32(beta):
    student, teacher, labels = logits(dtype=torch.float32)
    narrow, taught = student.detach().bfloat16().requires_grad_(), teacher.bfloat16()
    wanted = trl_loss(narrow.float(), taught.float(), labels, beta, 1.0)
    found, _ = divergences(narrow, taught, Measure(beta=beta))
    assert found[labels != IGNORE_INDEX].sum().item() == pytest.approx(wanted.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), narrow)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [0.1, 1, 2])
def test_the_likeliest_tokens_are_normalised_and_compared_with_the_whole_distribution(temperature):
    student, teacher, labels = logits()
    values, ids = teacher.topk(5)
    target = functional.softmax(values / temperature, dim=-1)
    log_probs = functional.log_softmax(student / temperature, dim=-1).gather(-1, ids)
    wanted = (target * (target.log() - log_probs)).nan_to_num().sum(-1)
    measure = Measure(temperature=temperature)
    found, same = divergences(student, TopTokens.of(teacher, 5, measure), measure)
    assert torch.allclose(found, wanted)
    assert torch.equal(same.bool(), student.argmax(-1) == teacher.argmax(-1))
    kept = labels != IGNORE_INDEX
    (gradient,) = torch.autograd.grad(found[kept].sum(), student)
    assert torch.allclose(gradient, torch.autograd.grad(wanted[kept].sum(), student)[0], atol=1e-9)
    everything, _ = divergences(student, TopTokens.of(teacher, 50, measure), measure)
    assert torch.allclose(everything, divergences(student, teacher, measure)[0])


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_rows_that_fill_a_vocabulary_up_are_left_out(beta):
    student, teacher, labels = logits()
    wanted = trl_loss(student[..., :41], teacher[..., :41], labels, beta, 1.0)
    found, _ = divergences(student, teacher, Measure(beta=beta, tokens=41))
    kept = labels != IGNORE_INDEX
    assert found[kept].sum().item() == pytest.approx(wanted.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found[kept].sum(), student)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, student)[0], rtol=1e-10, atol=1e-12)
    assert int(TopTokens.of(teacher, 41, Measure(tokens=41)).ids.max()) < 41


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a student and of larger teachers of another architecture, with one tokenizer."""
    sizes = {"vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    more = {"initializer_range": 0.2, "tie_word_embeddings": False, "pad_token_id": None}
    student = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **sizes, **more)
    teacher = transformers.MistralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=3, **sizes, **more)
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(resolve_path(TOKENIZER)), {}
    wider = transformers.MistralConfig(**{**teacher.to_dict(), "vocab_size": 1152})
    for name, config in (("student", student), ("teacher", teacher), ("wider", wider)):
        torch.manual_seed(len(found))
        found[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture
def session(models, tmp_path):
    """``session(**objective)``: with the student's weights, and packed chats as its data."""

    def make(optim=None, **objective):
        return TrainSession(
            load(
                {
                    "name": "against-trl",
                    "trainer": {"max_steps": STEPS, "accelerator": "cpu", "gradient_clip_val": None},
                    "exp_manager": {"exp_dir": str(tmp_path)},
                    "data": {
                        "name": "sft-chat",
                        "train_files": ["package://nxdt_plugin_sft_chat/data/library.jsonl"],
                        "tokenizer": {"library": "huggingface", "model": TOKENIZER},
                        "seq_length": 128,
                        "micro_batch_size": 2,
                        "global_batch_size": 4,
                    },
                    "model": {
                        "name": "llama",
                        "model_config": str(models["student"] / "config.json"),
                        "optim": {"sched": {"name": "constant"}, **(optim or {"name": "sgd", "lr": RATE})},
                    },
                    "objective": {"name": "distill", **objective, "teacher": str(models[objective["teacher"]])},
                }
            ),
            weights=models["student"],
        )

    return make


def test_a_step_on_drawn_answers_is_that_of_trl_with_lmbda_1_on_the_same_answers(models, session):
    """The loss is the divergence over the tokens of the answers, for every ``kd_ratio``."""
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
        for name in ("student", "teacher")
    )
    given = {"beta": 1.0, "kd_ratio": 0.5, "on_policy": 1.0, "max_completion_length": 24}
    with session(teacher="teacher", **given) as running:
        batches = next(running.batches()).micro_batches
        drawn, _ = running.objective.generate(running, batches, train=True)
        rows = {name: torch.cat([getattr(each, name) for each in drawn]) for name in ("input_ids", "labels")}
        of_data = torch.cat([each.labels for each in batches])
        counts = (rows["labels"] != IGNORE_INDEX).sum(1)
        assert 1 <= int(counts.min()) <= int(counts.max()) <= 24
        for ids, labels, told in zip(rows["input_ids"], rows["labels"], of_data, strict=True):
            (places,), (first, *_) = (labels != IGNORE_INDEX).nonzero(as_tuple=True), (told != IGNORE_INDEX).nonzero()
            assert places[0] == first  # the prompt of the data, and behind it the answer
            assert torch.equal(labels[places], ids[places + 1])
        last = [int((labels != IGNORE_INDEX).nonzero()[-1]) for labels in rows["labels"]]
        assert sum(int(each.tokens()) for each in drawn) == sum(place + 2 for place in last)
        step = running.step(batches)
        own = student(rows["input_ids"]).logits
        with torch.no_grad():
            theirs = teacher(rows["input_ids"]).logits
        loss = trl_loss(own, theirs, rows["labels"], 1.0, 1.0, "batchmean")
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in student.parameters()])
        assert float(step.loss.weight) == int(counts.sum())
        assert float(step.loss.loss) == pytest.approx(loss.item(), **CLOSE)
        assert float(step.grad_norm) == pytest.approx(norm.item(), **CLOSE)
        assert float(running.evaluate_batch(batches).weight) == int((of_data != IGNORE_INDEX).sum())


def test_the_reverse_divergence_falls_on_answers_of_the_student(session):
    given = {"beta": 1.0, "on_policy": 1.0, "max_completion_length": 12}
    with session(teacher="teacher", optim={"name": "adamw", "lr": 0.01}, **given) as running:
        batches = next(running.batches()).micro_batches
        found = [float(running.step(batches).loss.loss) for _ in range(30)]
    assert sum(found[-5:]) < 0.75 * sum(found[:5])


@pytest.mark.parametrize(
    ("name", "beta", "temperature", "kd_ratio"),
    [
        *(("teacher", 0.0, 1.0, 0.5), ("teacher", 0.5, 2.0, 1.0), ("teacher", 1.0, 1.0, 0.25)),
        *(("teacher", 0.0, 1.0, 0.0), ("wider", 0.5, 1.0, 0.5)),
    ],
)
def test_steps_are_those_of_a_loop_over_models_of_transformers(models, session, name, beta, temperature, kd_ratio):
    """A teacher with more rows is compared over the tokenizer's tokens; TRL gets the logits of these."""
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(models[each], dtype=torch.float32)
        for each in ("student", name)
    )
    tokens = slice(len(transformers.AutoTokenizer.from_pretrained(models[name])) if name == "wider" else None)
    optimizer, losses = torch.optim.SGD(student.parameters(), RATE), []
    with session(teacher=name, beta=beta, temperature=temperature, kd_ratio=kd_ratio) as running:
        batches = next(running.batches()).micro_batches  # one batch, whose loss falls
        rows = {name: torch.cat([getattr(each, name) for each in batches]) for name in ("input_ids", "labels")}
        for _ in range(STEPS):
            step = running.step(batches)
            own = student(rows["input_ids"]).logits
            with torch.no_grad():
                theirs = teacher(rows["input_ids"]).logits
            count = (rows["labels"] != IGNORE_INDEX).sum()
            soft = trl_loss(own[..., tokens], theirs[..., tokens], rows["labels"], beta, temperature, "batchmean")
            hard = functional.cross_entropy(own.flatten(0, 1), rows["labels"].flatten())
            loss = (1 - kd_ratio) * hard + kd_ratio * soft
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([each.grad for each in student.parameters()])
            optimizer.step()
            assert float(step.loss.weight) == int(count)
            assert float(step.loss.loss) == pytest.approx(loss.item(), **CLOSE)
            assert float(step.loss.metrics["kd_loss"]) == pytest.approx(soft.item(), **CLOSE)
            assert float(step.loss.metrics["ce_loss"]) == pytest.approx(hard.item(), **CLOSE)
            assert float(step.grad_norm) == pytest.approx(norm.item(), **CLOSE)
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        wanted = student.lm_head.weight
        assert torch.allclose(running.model.state_dict()["lm_head.weight"], wanted, rtol=1e-4, atol=1e-6)
