"""The same answers and rewards give the advantages, losses, gradients and metrics of TRL's trainer."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch
from nxdt_plugin_grpo import rewards
from nxdt_testing.ranks import RankPool, process_group

from nxdt_core.config import load
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.system.paths import resolve_path
from nxdt_core.train import TrainSession
from tests.sampling import slow_except

trl = pytest.importorskip("trl", reason="trl is not installed; it is pinned in constraints.txt")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

TOKENIZER = "package://nxdt_plugin_sft_chat/data/tokenizer"
SEQ, LONGEST, ANSWERS = 40, 12, 4
ENDS = tuple(range(100, 200))
PROMPTS = [
    {"prompt": "Only vowels:", "characters": "aeiou "},
    {"prompt": "Where is my order?", "characters": "etan "},
    {"prompt": "Capitals", "characters": "ABCDEFGHIKLMNOPQRSTW"},
    {"prompt": "Digits, and nothing else", "characters": "0123456789"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a policy as it was when answers were drawn, as it is now, and of a reference."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_path(TOKENIZER))
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model, found = transformers.LlamaForCausalLM(config), {}
    for name in ("old", "now", "reference"):
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
    return found


def session_of(weights, directory, objective, overrides=()):
    """A session with these weights, and the prompts as its data."""
    file = directory / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    config = load(
        {
            "name": "against-trl",
            "trainer": {"max_steps": 5, "accelerator": "cpu", "gradient_clip_val": 0},
            "exp_manager": {"exp_dir": str(directory)},
            "data": {
                "name": "prompts",
                "train_files": [str(file)],
                "shuffle": False,
                "seq_length": SEQ,
                "micro_batch_size": len(PROMPTS),
                "global_batch_size": len(PROMPTS),
                "tokenizer": {"library": "huggingface", "model": TOKENIZER},
            },
            "model": {
                "name": "llama",
                "model_config": str(weights / "config.json"),
                "optim": {"lr": 1e-3, "weight_decay": 0, "betas": [0.9, 0.95], "sched": {"name": "constant"}},
            },
            "objective": {
                "name": "grpo",
                "rewards": ["characters"],
                "num_generations": ANSWERS,
                "max_completion_length": LONGEST,
                "num_iterations": 2,
                **objective,
            },
        },
        overrides,
    )
    made = TrainSession(config, weights=weights)
    made.stop_ids = frozenset(ENDS)  # so that fresh models write answers of several lengths
    made.engine.start()
    made.data.prepare()
    made.build_model()
    made.build_optimizer()
    return made


@pytest.fixture
def session(models, tmp_path):
    """``session(**objective)``: with the weights of ``old``."""
    opened = []

    def make(**objective):
        opened.append(session_of(models["old"], tmp_path, objective))
        return opened[-1]

    yield make
    for made in opened:
        made.engine.shutdown()


def drawn(session):
    """The first step's micro-batch of answers, with the log-probabilities of ``old``."""
    step = next(iter(session.train_loader()))
    (batch,), held = session.objective.generate(session, step.micro_batches, train=True)
    return batch, held


def their_trainer(weights, held, tmp_path, **more):
    """TRL's trainer with these weights, which is given our answers."""

    def score(completions, **_):  # the text of the token that ends an answer is in theirs
        return [each for place in range(len(PROMPTS)) for each in held[str(place)]["rewards"]["characters"]]

    def answers(prompts, trainer):
        groups = [held[str(place)] for place in range(len(PROMPTS)) for _ in range(ANSWERS)]
        ids = [answer for place in range(len(PROMPTS)) for answer in held[str(place)]["answers"]]
        return {"prompt_ids": [group["prompt"] for group in groups], "completion_ids": ids, "logprobs": None}

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(PROMPTS) * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=LONGEST,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **{"num_iterations": 2, **more},
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(weights),
        reward_funcs=score,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(PROMPTS),
        processing_class=transformers.AutoTokenizer.from_pretrained(weights),
        rollout_func=answers,
    )
    trainer.eos_token_ids = list(ENDS)
    return trainer


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_and_metrics_of_answers_are_those_of_trl(session, models, tmp_path, scale):
    batch, held = drawn(session(scale_rewards=scale))
    trainer = their_trainer(models["now"], held, tmp_path, scale_rewards=scale)
    trainer.model.train()
    found = trainer._generate_and_score_completions([each for each in PROMPTS for _ in range(ANSWERS)])
    ours = torch.stack(
        [row[labels != IGNORE_INDEX][0] for row, labels in zip(batch.values["advantages"], batch.labels, strict=True)]
    )
    torch.testing.assert_close(ours, found["advantages"], rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 0.1
    assert len({len(answer) for group in held.values() for answer in group["answers"]}) > 3
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    means = {name.removeprefix("answer/"): float(v.sum()) / len(ours) for name, v in batch.values.items()}
    for name in ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio"):
        assert means[name] == pytest.approx(metrics[name], abs=1e-6), name
    if scale != "batch":  # there, TRL looks at that of the batch
        assert means["frac_reward_zero_std"] == metrics["frac_reward_zero_std"]


UNSCORED = {
    "one of a group": {0, 5},
    "all but one": {1, 2, 3},
    "a whole group": {4, 5, 6, 7},
    "all": set(range(16)),
}
"""Answers, of four groups of four, for which the reward returns None."""


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("missing", UNSCORED)
def test_answers_without_a_score_are_left_out_as_by_trl(session, models, tmp_path, monkeypatch, scale, missing):
    def scores(self, answers, records, known=rewards.Characters.__call__):
        found = known(self, answers, records)
        return [None if place in UNSCORED[missing] else score for place, score in enumerate(found)]

    monkeypatch.setattr(rewards.Characters, "__call__", scores)
    batch, held = drawn(ours := session(scale_rewards=scale))
    assert sum(each is None for group in held.values() for each in group["rewards"]["characters"]) == len(
        UNSCORED[missing]
    )
    trainer = their_trainer(models["now"], held, tmp_path, scale_rewards=scale)
    trainer.model.train()
    found = trainer._generate_and_score_completions([each for each in PROMPTS for _ in range(ANSWERS)])
    advantages = torch.stack(
        [row[labels != IGNORE_INDEX][0] for row, labels in zip(batch.values["advantages"], batch.labels, strict=True)]
    )
    torch.testing.assert_close(advantages, found["advantages"], rtol=1e-5, atol=1e-5)
    assert not any(advantages[place] for place in UNSCORED[missing])
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    mine = ours.model.run_train([batch], ours.objective).metrics
    assert float(mine["unscored"]) == pytest.approx(len(UNSCORED[missing]) / len(advantages))
    if missing != "all":  # there, TRL's mean is of nothing
        assert float(mine["reward"]) == pytest.approx(metrics["reward"], abs=1e-6)
        assert float(mine["rewards/characters"]) == pytest.approx(metrics["reward"], abs=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "beta", "more"),
    [
        *((loss_type, beta, {}) for loss_type in ("dapo", "grpo", "dr_grpo") for beta in (0.0, 0.3)),
        ("bnpo", 0.0, {}),
        ("cispo", 0.0, {"epsilon_high": 1.02}),
        ("grpo", 0.3, {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.01}),
        ("dapo", 0.0, {"mask_truncated_completions": True}),
        ("grpo", 0.0, {"mask_truncated_completions": True}),
        ("dapo", 0.0, {"temperature": 1.3}),
    ],
    ids=str,
)
def test_losses_gradients_and_metrics_are_those_of_trl(session, models, tmp_path, loss_type, beta, more):
    more = {"epsilon": 0.05, "epsilon_high": 0.1, "loss_type": loss_type, **more}
    ours = session(**more)
    ours.objective._config = ours.objective._config.changed(beta=beta)  # the reference is given here
    batch, held = drawn(ours)
    trainer = their_trainer(models["now"], held, tmp_path, beta=beta, **more)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([each for each in PROMPTS for _ in range(ANSWERS)])
    labelled = batch.labels != IGNORE_INDEX
    old = torch.zeros(inputs["completion_ids"].shape)
    for row, (values, mask) in enumerate(zip(batch.values["old_log_probs"], labelled, strict=True)):
        old[row, : mask.sum()] = values[mask]
    inputs["old_per_token_logps"] = old
    if beta:
        reference = torch.randn(batch.labels.shape) - 5
        batch = replace(batch, reference_log_probs=reference)
        inputs["ref_per_token_logps"] = torch.zeros_like(old)
        for row, (values, mask) in enumerate(zip(reference, labelled, strict=True)):
            inputs["ref_per_token_logps"][row, : mask.sum()] = values[mask]
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    ours.load_foreign(models["now"])
    ours.optimizer.begin_step(0)
    found = ours.model.run_train([batch], ours.objective)
    assert float(found.loss) == pytest.approx(float(expected), abs=1e-5)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    share = float(found.metrics["clip_ratio"])
    if loss_type == "dapo" and not ours.objective._config.mask_truncated_completions:  # the others weight tokens
        assert share == pytest.approx(metrics["clip_ratio/region_mean"], abs=1e-6)
        if beta:
            assert float(found.metrics["kl"]) == pytest.approx(metrics["kl"], rel=1e-5)
    assert 0.1 < share < 0.9
    gradients = {name: parameter.grad for name, parameter in ours.model.named_parameters()}
    for name, parameter in (("lm_head.weight", "lm_head.weight"), ("embed_tokens.weight", "model.embed_tokens.weight")):
        theirs = dict(trainer.model.named_parameters())[parameter].grad
        (mine,) = (value for key, value in gradients.items() if key.endswith(name))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=3e-6)


FORMS = {
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "top_entropy_quantile": 0.2, "temperature": 1.3},
    "dapo": {"top_entropy_quantile": 0.3, "mask_truncated_completions": True},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.05},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.01},
}
HALVES, STRATEGY = ("trainer.devices=2", "data.micro_batch_size=2"), "distributed_strategy."
LAYOUTS = {
    "tp2": (*HALVES, f"{STRATEGY}tensor_model_parallel_size=2"),
    "pp2": (*HALVES, f"{STRATEGY}pipeline_model_parallel_size=2"),
    "zero3": (*HALVES, f"{STRATEGY}zero_stage=3"),
}


def five_steps(weights, directory, objective, overrides=()):
    """The losses of five steps, and for each step the answers of this process, in order."""
    session = session_of(weights, directory, objective, overrides)
    losses, answers = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch).loss.loss))
        answers.append([asdict(group) for group, _ in session.objective.samples])
    session.close()
    return losses, answers


def five_steps_of_rank(*arguments):
    with process_group(timeout_s=60):
        return five_steps(*arguments)


def five_steps_of_trl(weights, directory, objective, answers, parts=1):
    """The losses of TRL's trainer on what :func:`five_steps` drew, in ``parts`` micro-batches."""
    held, losses = {}, []
    trainer = their_trainer(weights, held, directory, beta=0.0, **objective)
    trainer.current_gradient_accumulation_steps = parts
    trainer.model.train()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    for step, groups in enumerate(answers):
        if step % objective.get("num_iterations", 2) == 0:
            held.update({str(place): group for place, group in enumerate(groups)})
            inputs = trainer._generate_and_score_completions([each for each in PROMPTS for _ in range(ANSWERS)])
        optimizer.zero_grad()
        losses.append(0.0)
        for part in range(parts):
            rows = {name: values.chunk(parts)[part] if values.dim() else values for name, values in inputs.items()}
            loss = trainer._compute_loss(trainer.model, rows)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    assert max(map(abs, losses)) > 1e-3
    return losses


@pytest.mark.parametrize(("form", "layout"), slow_except(itertools.product(FORMS, LAYOUTS), {("cispo", "pp2")}))
def test_five_steps_alone_and_in_a_layout_are_those_of_trl(models, tmp_path, form, layout):
    """TRL takes the quantile of entropies over the tokens of all processes, and the mean of ``bnpo`` over those of a
    micro-batch."""
    objective, parts = FORMS[form], 2 if form == "bnpo" else 1
    alone = f"data.micro_batch_size={len(PROMPTS) // parts}"
    losses, answers = five_steps(models["old"], tmp_path, objective, (alone,))
    of_ranks = RankPool(2).run(five_steps_of_rank, models["old"], tmp_path, objective, LAYOUTS[layout], timeout_s=120)
    expected = five_steps_of_trl(models["old"], tmp_path, objective, answers, parts)
    for found in (losses, *(losses for losses, _ in of_ranks)):
        assert found == pytest.approx(expected, abs=1e-5)


def test_five_steps_without_a_score_at_each_place_in_turn_are_those_of_trl(models, tmp_path, monkeypatch):
    calls = itertools.count()

    def scores(self, answers, records, known=rewards.Characters.__call__):
        step = next(calls)
        missing = {*range(step, len(answers), ANSWERS)} if step < ANSWERS else UNSCORED["a whole group"]
        return [None if place in missing else score for place, score in enumerate(known(self, answers, records))]

    monkeypatch.setattr(rewards.Characters, "__call__", scores)
    objective = {"num_iterations": 1}
    losses, answers = five_steps(models["old"], tmp_path, objective)
    scored = ([score for group in groups for score in group["rewards"]["characters"]] for groups in answers)
    missing = [[place for place, score in enumerate(step) if score is None] for step in scored]
    assert missing == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [4, 5, 6, 7]]
    assert losses == pytest.approx(five_steps_of_trl(models["old"], tmp_path, objective, answers), abs=1e-5)


def test_log_probabilities_that_are_compared_have_the_temperature_of_the_answers(session):
    """The first step on answers has ratios of 1, and a fresh adapter no divergence from its base."""
    ours = session(temperature=1.3, epsilon=0.0)
    result = ours.step(next(iter(ours.train_loader())))
    assert float(result.loss.metrics["clip_ratio"]) == 0
