"""The same pairs, model and reference give the losses, gradients, rewards and log-probabilities of TRL's trainers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.data.chat.templates import ChatKeys, named_template
from nxdt_core.data.loader import collate
from nxdt_core.protocols.dataset import MapDataset
from nxdt_core.train import TrainSession, build
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.reference import DatasetWithReference, compute_log_probs

trl = pytest.importorskip("trl", reason="trl is not installed; it is pinned in constraints.txt")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

TOKENIZER = "package://nxdt_plugin_sft_chat/data/tokenizer"
SEQ, BETA = 48, 0.3
CLOSE = {"abs": 1e-5, "rel": 1e-6}
PAIRS = [
    {"prompt": "Where is my order?", "chosen": " It is on its way to you.", "rejected": " No idea."},
    {"prompt": "What time is it", "chosen": " now? It is noon.", "rejected": "? Who knows, ask somebody else."},
    {"prompt": "Thank you", "chosen": " very much; you are welcome!", "rejected": " for nothing"},
    {"prompt": "Tell me a long story about a small town.", "chosen": " Once there was one.", "rejected": " No."},
]
CHATS = [
    {key: [{"role": "user" if key == "prompt" else "assistant", "content": text}] for key, text in pair.items()}
    for pair in PAIRS
]
"""The same under a template of ChatML, which writes a newline after each turn."""
LABELS = (True, False, True, True)
UNPAIRED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}
    for pair, label in zip(PAIRS, LABELS, strict=True)
]
PACKING = pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reference in the layout of Hugging Face, with the same tokenizer."""
    from nxdt_core.system.paths import resolve_path

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_path(TOKENIZER))
    found = {}
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
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
        found[name] = tmp_path_factory.mktemp(name)
        transformers.LlamaForCausalLM(config).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What some steps on one batch of all pairs gave."""

    metrics: dict[str, float]
    """Loss and metrics of the first step."""
    losses: list[float]
    """Of each step."""
    gradients: list[torch.Tensor]
    """Of embedding, norm and head in the first step."""


STEPS, RATE = 5, 1e-2


def ours(models: dict[str, Path], file: Path, packing: bool, objective: dict[str, Any], **data: Any) -> Seen:
    """Steps of gradient descent by our objective on all pairs, of our own model with the policy's weights."""
    config = load(
        {
            "name": "against-trl",
            "trainer": {"max_steps": STEPS, "accelerator": "cpu", "gradient_clip_val": None},
            "data": {
                "name": "unpaired-preference" if objective["name"] == "kto" else "preference",
                "train_files": [str(file)],
                "packing": packing,
                "seq_length": SEQ,
                "micro_batch_size": len(PAIRS),
                "global_batch_size": len(PAIRS),
                "tokenizer": {"library": "huggingface", "model": TOKENIZER},
                **data,
            },
            "model": {
                "name": "llama",
                "model_config": str(models["policy"] / "config.json"),
                "score_head": objective["name"] == "reward",
                "optim": {"name": "sgd", "lr": RATE, "sched": {"name": "constant"}},
            },
            "objective": objective,
        }
    )
    engine = build.engine(config)
    engine.start()
    session = TrainSession(config, engine=engine, model=initialize_parallel_model(config, engine))
    dataset = pairs_of(config)
    assert len(dataset) == (2 if packing else len(PAIRS))
    if session.objective.traits.reference:
        session.load_foreign(models["reference"])
        log_probs = compute_log_probs(dataset, config=config, engine=engine, model=session.model)
        dataset = DatasetWithReference(dataset, log_probs, model="reference")
    session.load_foreign(models["policy"])
    session.build_optimizer()
    batch = collate([dataset[index] for index in range(len(dataset))])
    gradients: list[torch.Tensor] = []

    def look_and_apply() -> None:
        if not gradients:
            held = dict(session.model.named_parameters())
            head = "score" if "score.weight" in held else "lm_head"
            gradients.extend(held[f"{name}.weight"].grad.detach().clone() for name in ("embed_tokens", "norm", head))
        session.optimizer.step()

    found = [session.step([batch], apply=look_and_apply).loss for _ in range(STEPS)]
    engine.shutdown()
    first = {"loss": float(found[0].loss), **{name: float(value) for name, value in found[0].metrics.items()}}
    return Seen(metrics=first, losses=[float(each.loss) for each in found], gradients=gradients)


def pairs_of(config: ResolvedConfig) -> MapDataset:
    found = build.dataset(config, build.tokenizer(config)).split("train")
    assert isinstance(found, MapDataset)
    return found


def arguments(kind: Any, directory: Path, **more: Any) -> Any:
    more = more if kind is trl.RewardConfig else {"beta": BETA, **more}
    return kind(
        output_dir=str(directory),
        per_device_train_batch_size=len(PAIRS),
        max_length=SEQ,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **more,
    )


def trainer_of(
    kind: Any, models: dict[str, Path], settings: Any, pairs: Sequence[Mapping[str, Any]] = PAIRS, **more: Any
) -> Any:
    classifies = kind is trl.RewardTrainer
    cls = transformers.LlamaForSequenceClassification if classifies else transformers.LlamaForCausalLM
    return kind(
        model=cls.from_pretrained(models["policy"]).eval(),
        args=settings,
        train_dataset=datasets.Dataset.from_list(list(pairs)),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
        **more,
    )


def theirs(trainer: Any) -> Seen:
    """The same steps by TRL's trainer."""
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()  # which has no dropout
    losses: list[float] = []
    for step in range(STEPS):
        loss = trainer.compute_loss(model, dict(batch))
        losses.append(float(loss))
        model.zero_grad()
        loss.backward()
        if not step:
            kept = trainer._metrics["train"] if hasattr(trainer, "_metrics") else trainer._stored_metrics["train"]
            metrics = {"loss": losses[0], **{name: float(values[-1]) for name, values in kept.items()}}
            head = model.score if hasattr(model, "score") else model.lm_head
            modules = (model.model.embed_tokens, model.model.norm, head)
            gradients = [module.weight.grad.clone() for module in modules]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return Seen(metrics=metrics, losses=losses, gradients=gradients)


def assert_same(found: Seen, wanted: Seen) -> None:
    """Metrics that both have, the losses of all steps, and the gradients of the first."""
    of_both = found.metrics.keys() & wanted.metrics.keys()
    assert {name: found.metrics[name] for name in of_both} == pytest.approx(
        {name: wanted.metrics[name] for name in of_both}, **CLOSE
    )
    assert found.losses == pytest.approx(wanted.losses, **CLOSE)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in found.gradients) > 1e-3
    assert found.losses[0] - found.losses[-1] > 1e-3


REWARDS = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}


@PACKING
@pytest.mark.parametrize(
    ("loss_type", "smoothing"),
    [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1)],
)
def test_dpo_equals_trl(models, write, tmp_path, packing, loss_type, smoothing):
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    # TRL's own sigmoid does not smooth. Its aot does, of sorted log-ratios: as one pair does not need to be.
    aot = loss_type == "sigmoid" and smoothing
    settings = arguments(
        trl.DPOConfig,
        tmp_path,
        precompute_ref_log_probs=True,
        loss_type="aot" if aot else loss_type,
        label_smoothing=smoothing,
    )
    pairs = PAIRS[:1] * len(PAIRS) if aot else PAIRS
    wanted = theirs(trainer_of(trl.DPOTrainer, models, settings, pairs, ref_model=reference))
    objective = {"name": "dpo", "kl_beta": BETA, "loss_type": loss_type, "label_smoothing": smoothing}
    found = ours(models, write(pairs), packing, objective)
    assert found.metrics.keys() == {"loss", "logps/chosen", "logps/rejected", *REWARDS}
    assert_same(found, wanted)
    assert abs(found.metrics["rewards/margins"]) > 0.1  # the two models differ, or all this would be 0 = 0


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("exo_pair", {"label_smoothing": 0.05}),
        ("nca_pair", {}),
        ("bco_pair", {}),
        ("sppo_hard", {"loss_weights": [0.01]}),  # which is of the order of β⁻²: 120 in the first step
        ("apo_zero", {}),
        ("apo_down", {}),
        ("discopop", {"discopop_tau": 0.3}),
        (["sigmoid", "sft"], {"loss_weights": [1.0, 0.4]}),
        (["ipo", "apo_zero", "sft"], {}),
    ],
    ids=str,
)
def test_further_forms_of_dpo_equal_trl(models, write, tmp_path, loss_type, options):
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    settings = arguments(trl.DPOConfig, tmp_path, precompute_ref_log_probs=True, loss_type=loss_type, **options)
    wanted = theirs(trainer_of(trl.DPOTrainer, models, settings, ref_model=reference))
    objective = {"name": "dpo", "kl_beta": BETA, "loss_type": loss_type, **options}
    found = ours(models, write(PAIRS), True, objective)
    assert found.metrics.keys() - {"nll_loss"} == {"loss", "logps/chosen", "logps/rejected", *REWARDS}
    assert ("nll_loss" in found.metrics) == ("sft" in loss_type)
    assert_same(found, wanted)


@PACKING
@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("sigmoid", {}),
        ("sigmoid", {"label_smoothing": 0.1, "cpo_alpha": 0.5}),
        ("hinge", {}),
        ("ipo", {}),
        ("simpo", {"cpo_alpha": 0.0, "simpo_gamma": 0.4}),
    ],
)
def test_cpo_equals_trl(models, write, tmp_path, packing, loss_type, options):
    cpo = pytest.importorskip("trl.experimental.cpo")
    settings = arguments(cpo.CPOConfig, tmp_path, loss_type=loss_type, **options)
    wanted = theirs(trainer_of(cpo.CPOTrainer, models, settings))
    found = ours(models, write(PAIRS), packing, {"name": "cpo", "beta": BETA, "loss_type": loss_type, **options})
    assert found.metrics.keys() == {"loss", "logps/chosen", "logps/rejected", "nll_loss", *REWARDS}
    if not options.get("cpo_alpha", 1):
        del wanted.metrics["nll_loss"]  # TRL does not compute it
    assert_same(found, wanted)


@PACKING
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.5)], ids=["no-kl", "weighted"])
def test_kto_equals_trl(models, write, tmp_path, packing, weights):
    weighted = weights != (1.0, 1.0)
    if weighted:  # the other way round, the estimate of the KL is below 0, and 0 is taken
        models = {"policy": models["reference"], "reference": models["policy"]}
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    options = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
    settings = arguments(trl.KTOConfig, tmp_path, precompute_ref_log_probs=True, **options)
    wanted = theirs(trainer_of(trl.KTOTrainer, models, settings, UNPAIRED, ref_model=reference))
    found = ours(models, write(UNPAIRED), packing, {"name": "kto", "beta": BETA, **options})
    assert found.metrics.keys() - wanted.metrics.keys() == {"rewards/accuracies"}  # KTO has no pairs
    assert_same(found, wanted)
    assert (found.metrics["kl"] > 0.1) == weighted


@PACKING
def test_orpo_equals_trl(models, write, tmp_path, packing):
    orpo = pytest.importorskip("trl.experimental.orpo")
    settings = arguments(orpo.ORPOConfig, tmp_path)
    wanted = theirs(trainer_of(orpo.ORPOTrainer, models, settings))
    found = ours(models, write(PAIRS), packing, {"name": "orpo", "beta": BETA})
    assert found.metrics.keys() <= wanted.metrics.keys()
    assert len(found.metrics) == 10
    assert_same(found, wanted)


@pytest.fixture(scope="module")
def scorer(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sequence classifier with one label, saved by transformers."""
    torch.manual_seed(2)
    config = transformers.AutoConfig.from_pretrained(models["policy"], num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["policy"])
    config.pad_token_id = tokenizer.pad_token_id
    directory = tmp_path_factory.mktemp("scorer")
    transformers.LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return {"policy": directory}


MARGINS = (0.3, 0.0, 1.5, 0.2)


@PACKING
@pytest.mark.parametrize("margins", [False, True], ids=["plain", "margins"])
def test_a_reward_model_equals_trl(scorer, write, tmp_path, packing, margins):
    pairs = [{**pair, **({"margin": margin} if margins else {})} for pair, margin in zip(PAIRS, MARGINS, strict=True)]
    center = 0.05 if margins else 0.0
    settings = arguments(trl.RewardConfig, tmp_path, center_rewards_coefficient=center or None)
    wanted = theirs(trainer_of(trl.RewardTrainer, scorer, settings, pairs))
    objective = {"name": "reward", "center_rewards_coefficient": center}
    found = ours(scorer, write(pairs), packing, objective, margins=margins)
    assert found.metrics.keys() == {"loss", *REWARDS}
    mean = (found.metrics["rewards/chosen"] + found.metrics["rewards/rejected"]) / 2
    renamed = {"margin": found.metrics["rewards/margins"], "accuracy": found.metrics["rewards/accuracies"]}
    assert_same(replace(found, metrics={"loss": found.metrics["loss"], "mean_reward": mean, **renamed}), wanted)
    assert abs(found.metrics["rewards/margins"]) > 0.01


def test_dpo_of_chats_equals_trl_where_answers_end_with_the_space_after_turns(models, write, tmp_path):
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    settings = arguments(trl.DPOConfig, tmp_path, precompute_ref_log_probs=True)
    wanted = theirs(trainer_of(trl.DPOTrainer, models, settings, CHATS, ref_model=reference))
    file, objective = write(CHATS), {"name": "dpo", "kl_beta": BETA}
    assert_same(ours(models, file, False, objective, space_after_turns=True), wanted)
    found = ours(models, file, False, objective)
    assert abs(found.metrics["logps/chosen"] - wanted.metrics["logps/chosen"]) > 0.1


def beginning(models: Mapping[str, Path], directory: Path, *, added: bool) -> dict[str, Path]:
    """The same models with a tokenizer that has a begin token, and that puts it before texts where it is ``added``."""
    from tokenizers.processors import TemplateProcessing

    found = {}
    for name, source in models.items():
        found[name] = directory / name
        shutil.copytree(source, found[name])
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.bos_token = "<|endoftext|>"
        if added:
            special = ("<|endoftext|>", tokenizer.bos_token_id)
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                "<|endoftext|> $A", special_tokens=[special]
            )
        tokenizer.save_pretrained(found[name])
    return found


@pytest.mark.parametrize("added", [False, True], ids=["named", "added"])
def test_texts_begin_as_with_trl(models, scorer, write, tmp_path, added):
    scorers = beginning(scorer, tmp_path / "scorer", added=added)
    models = beginning(models, tmp_path / "models", added=added)
    tokenizer = {"library": "huggingface", "model": str(models["policy"])}
    assert (transformers.AutoTokenizer.from_pretrained(models["policy"])("a")["input_ids"][0] == 0) == added
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    before = {"precompute_ref_log_probs": True}
    cpo, orpo = pytest.importorskip("trl.experimental.cpo"), pytest.importorskip("trl.experimental.orpo")
    beta = {"beta": BETA}
    for kind, settings, objective, where, data in (
        (trl.DPOTrainer, arguments(trl.DPOConfig, tmp_path, **before), {"name": "dpo", "kl_beta": BETA}, models, {}),
        (trl.KTOTrainer, arguments(trl.KTOConfig, tmp_path, **before), {"name": "kto", **beta}, models, {}),
        (trl.RewardTrainer, arguments(trl.RewardConfig, tmp_path), {"name": "reward"}, scorers, {}),
        # Of texts, these two begin with the begin token, also where the tokenizer's files do not say so.
        (cpo.CPOTrainer, arguments(cpo.CPOConfig, tmp_path), {"name": "cpo", **beta}, models, {"add_bos": True}),
        (orpo.ORPOTrainer, arguments(orpo.ORPOConfig, tmp_path), {"name": "orpo", **beta}, models, {"add_bos": True}),
    ):
        records = UNPAIRED if kind is trl.KTOTrainer else PAIRS
        more = {"ref_model": reference} if kind in (trl.DPOTrainer, trl.KTOTrainer) else {}
        wanted = theirs(trainer_of(kind, where, settings, records, **more))
        found = ours(where, write(records), False, objective, tokenizer=tokenizer, **data)
        assert found.losses == pytest.approx(wanted.losses, **CLOSE), kind
        if kind is trl.DPOTrainer or data:
            other = ours(where, write(records), False, objective, tokenizer=tokenizer, add_bos=not data)
            assert (other.losses == found.losses) == added


@pytest.mark.parametrize("added", [False, True], ids=["named", "added"])
def test_plain_chats_have_the_tokens_of_trls_fine_tuning(models, write, tmp_path, added):
    models = beginning({"policy": models["policy"]}, tmp_path / "models", added=added)
    records = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
    settings = trl.SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True)
    wanted = trainer_of(trl.SFTTrainer, models, settings, records).train_dataset["input_ids"]
    tokenizer = {"library": "huggingface", "model": str(models["policy"])}
    data = {"name": "sft-chat", "chat_template": "plain", "train_files": [str(write(records))], "seq_length": SEQ}
    sizes = {"micro_batch_size": 1, "global_batch_size": 1, "tokenizer": tokenizer}
    model = {"name": "llama", "model_config": str(models["policy"] / "config.json"), "optim": {"lr": 0.0}}
    config = load({"name": "sft", "trainer": {"max_steps": 1}, "data": {**data, **sizes}, "model": model})
    found = pairs_of(config)
    theirs = transformers.AutoTokenizer.from_pretrained(models["policy"])
    template = named_template(ChatKeys(chat_template="plain"), build.tokenizer(config))  # as exports have it
    for index, (ids, pair) in enumerate(zip(wanted, PAIRS, strict=True)):
        asked = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["chosen"]}]
        assert theirs.apply_chat_template(asked, chat_template=template.text, return_dict=False) == ids
        assert found[index].input_ids[: len(ids) - 1].tolist() == list(ids)[:-1]
        assert int(found[index].labels[len(ids) - 2]) == ids[-1]
