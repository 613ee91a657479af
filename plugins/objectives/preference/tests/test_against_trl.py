"""The same pairs, model and reference give the losses, rewards and log-probabilities of TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.data.sources import collate
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
PACKING = pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reference in the layout of Hugging Face, with the same tokenizer."""
    from nxdt_core.config.sources import resolve_path

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


def ours(
    models: dict[str, Path], file: Path, packing: bool, objective: dict[str, Any], **data: Any
) -> dict[str, float]:
    """Loss and metrics of our objective over all pairs, of our own model with the policy's weights."""
    config = load(
        {
            "name": "against-trl",
            "trainer": {"max_steps": 1, "accelerator": "cpu"},
            "data": {
                "name": "preference",
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
                "optim": {"lr": 1e-3, "sched": {"name": "constant"}},
            },
            "objective": objective,
        }
    )
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    dataset = pairs_of(config)
    assert len(dataset) == (2 if packing else len(PAIRS))
    if objective["name"] == "dpo":
        TrainSession(config, engine=engine, model=model).load_foreign(models["reference"])
        log_probs = compute_log_probs(dataset, config=config, engine=engine, model=model)
        dataset = DatasetWithReference(dataset, log_probs, model="reference")
    TrainSession(config, engine=engine, model=model).load_foreign(models["policy"])
    batch = collate([dataset[index] for index in range(len(dataset))])
    found = model.run_eval([batch], build.objective(config))
    engine.shutdown()
    return {"loss": float(found.loss), **{name: float(value) for name, value in found.metrics.items()}}


def pairs_of(config: ResolvedConfig) -> MapDataset:
    found = build.dataset(config, build.tokenizer(config)).split("train")
    assert isinstance(found, MapDataset)
    return found


def arguments(kind: Any, directory: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(directory),
        per_device_train_batch_size=len(PAIRS),
        max_length=SEQ,
        beta=BETA,
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
    return kind(
        model=transformers.LlamaForCausalLM.from_pretrained(models["policy"]).eval(),
        args=settings,
        train_dataset=datasets.Dataset.from_list(list(pairs)),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
        **more,
    )


def logged(trainer: Any) -> dict[str, float]:
    """What TRL's trainer finds in one batch of all pairs."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch)
    kept = trainer._metrics["eval"] if hasattr(trainer, "_metrics") else trainer._stored_metrics["train"]
    return {"loss": float(loss), **{name: float(values[-1]) for name, values in kept.items()}}


@PACKING
def test_dpo_equals_trl(models, write, tmp_path, packing):
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    settings = arguments(trl.DPOConfig, tmp_path, precompute_ref_log_probs=True)
    wanted = logged(trainer_of(trl.DPOTrainer, models, settings, ref_model=reference))
    found = ours(models, write(PAIRS), packing, {"name": "dpo", "kl_beta": BETA})
    names = [name for name in found if name in wanted]
    assert set(names) == {
        *("loss", "logps/chosen", "logps/rejected"),
        *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")),
    }
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, **CLOSE)
    assert abs(found["rewards/margins"]) > 0.1  # the two models differ, or all this would be 0 = 0


@PACKING
def test_orpo_equals_trl(models, write, tmp_path, packing):
    orpo = pytest.importorskip("trl.experimental.orpo")
    settings = arguments(orpo.ORPOConfig, tmp_path)
    wanted = logged(trainer_of(orpo.ORPOTrainer, models, settings))
    found = ours(models, write(PAIRS), packing, {"name": "orpo", "beta": BETA})
    assert found == pytest.approx({name: wanted[name] for name in found}, **CLOSE)
    assert len(found) == 10


def test_dpo_of_chats_equals_trl_where_answers_end_with_the_space_after_turns(models, write, tmp_path):
    reference = transformers.LlamaForCausalLM.from_pretrained(models["reference"]).eval()
    settings = arguments(trl.DPOConfig, tmp_path, precompute_ref_log_probs=True)
    wanted = logged(trainer_of(trl.DPOTrainer, models, settings, CHATS, ref_model=reference))
    file, objective = write(CHATS), {"name": "dpo", "kl_beta": BETA}
    found = ours(models, file, False, objective, space_after_turns=True)
    names = [name for name in found if name in wanted]
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, **CLOSE)
    assert abs(ours(models, file, False, objective)["logps/chosen"] - wanted["logps/chosen"]) > 0.1
