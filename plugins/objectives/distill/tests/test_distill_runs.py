"""Whole runs: the student follows its teacher, a stopped run continues bit by bit, and a teacher that does not fit is
refused before a step."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from nxdt_plugin_distill.config import DistillConfig
from nxdt_plugin_distill.errors import (
    NoPrompts,
    PromptTooLong,
    TeacherGivesScores,
    TeacherMissing,
    TeacherTokenizerDiffers,
    TeacherVocabularyDiffers,
    TopKTooLarge,
)
from nxdt_plugin_distill.objective import Distill, is_drawn
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import CheckpointNotFound
from nxdt_core.errors.models import SequenceTooLongForModel
from nxdt_core.protocols.batch import Batch
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession, build
from nxdt_core.train.plan import plan

transformers = pytest.importorskip("transformers")

NARROW = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "trainer.accelerator=cpu")
FEW = ("data.global_batch_size=4", "data.micro_batch_size=2", "data.seq_length=32", "trainer.log_every_n_steps=1")
CHATS = (
    *("data.name=sft-chat", "data.train_files=[package://nxdt_plugin_sft_chat/data/library.jsonl]"),
    *("data.tokenizer.library=huggingface", "data.tokenizer.model=package://nxdt_plugin_sft_chat/data/tokenizer"),
)
BARE = Path(__file__).parents[4] / "tests" / "config" / "bare_parts.py"
NO_VALIDATION = ("trainer.val_check_interval=null", "data.validation_fraction=0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The run of a teacher: twenty steps of a model with three layers."""
    directory = tmp_path_factory.mktemp("teacher")
    overrides = [*NARROW, *FEW, f"exp_manager.exp_dir={directory}", "trainer.max_steps=20", "model.num_layers=3"]
    config = load("recipe:llama-small", [*overrides, "model.optim.sched.warmup_steps=2"])
    train(config)
    return config


@pytest.fixture
def small(tmp_path, teacher):
    """``small(*overrides, name=…)``: a run of two narrow layers."""

    def made(*overrides, name="run", recipe="recipe:llama-tiny-distill"):
        own = (f"objective.teacher={teacher.run_dir}", "objective.teacher_config=null")
        return load(
            recipe,
            [
                *(f"exp_manager.exp_dir={tmp_path}", f"name={name}", *NARROW, *FEW, *own),
                *("trainer.max_steps=4", "trainer.val_check_interval=4", *overrides),
            ],
        )

    return made


def rows(config, file="metrics.jsonl"):
    found = [json.loads(line) for line in (config.run_dir / file).read_text().splitlines()]
    return {row["step"]: {key: row[key] for key in ("loss", "ce_loss", "kd_loss", "top1_agreement")} for row in found}


def weights(config):
    store, _ = checkpoint.locate(str(config.run_dir / "checkpoints"))
    return checkpoint.load_model(store, checkpoint.find_checkpoint(store, None, warn=print))


def test_a_student_follows_its_teacher(small):
    config = small("trainer.max_steps=40", "trainer.val_check_interval=40", "objective.kd_ratio=1")
    train(config)
    found = rows(config)
    assert found[40]["kd_loss"] < 0.4 * found[1]["kd_loss"]
    assert found[40]["top1_agreement"] > 0.3 > found[1]["top1_agreement"]
    assert found[40]["loss"] == pytest.approx(found[40]["kd_loss"], abs=1e-6)
    validated = rows(config, "validation.jsonl")[40]
    assert validated["kd_loss"] < 0.4 * found[1]["kd_loss"]
    assert "perplexity" not in (config.run_dir / "validation.jsonl").read_text()


def test_a_stopped_run_continues_bit_by_bit(small):
    whole, stopped = small(name="whole"), small("trainer.max_steps=2", name="stopped")
    train(whole)
    train(stopped)
    again = small(name="stopped")
    train(again)
    assert rows(again) == rows(whole)
    mine, other = weights(again), weights(whole)
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_share_of_the_steps_takes_drawn_answers():
    shares = {share: sum(is_drawn(step, seed=1, share=share) for step in range(1000)) for share in (0, 0.25, 1)}
    assert (shares[0], shares[1]) == (0, 1000)
    assert 200 < shares[0.25] < 300


def test_a_stopped_run_draws_what_the_whole_one_draws(small, tmp_path):
    one = (*CHATS, "model.vocab_size=1024", "data.seq_length=128", "objective.max_completion_length=6", *NO_VALIDATION)
    own = [*NARROW, *FEW, *one[:-3], *NO_VALIDATION, f"exp_manager.exp_dir={tmp_path}", "trainer.max_steps=1"]
    train(load("recipe:llama-tiny", [*own, "name=teacher"]))
    one = (*one, "objective.on_policy=0.5", f"objective.teacher={tmp_path / 'teacher'}")
    whole, stopped = small(*one, name="whole"), small(*one, "trainer.max_steps=2", name="stopped")
    train(whole)
    train(stopped)
    train(small(*one, name="stopped"))
    drawn = [is_drawn(step, seed=whole.run.seed, share=0.5) for step in range(4)]
    assert set(drawn[2:]) == {True, False}
    found = rows(whole)
    assert rows(stopped) == found
    assert [found[step + 1]["loss"] == pytest.approx(found[step + 1]["kd_loss"]) for step in range(4)] == drawn
    mine, other = weights(stopped), weights(whole)
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_data_without_prompts_and_prompts_without_room_are_refused(small, tmp_path):
    drawn = ("objective.on_policy=1", "objective.max_completion_length=6", *NO_VALIDATION)
    with raises(NoPrompts, match="has a loss from its beginning"):
        train(small(*drawn))
    chats = (*drawn, *CHATS, "model.vocab_size=1024", "data.seq_length=128")
    own = (*NARROW, *FEW, *CHATS, "model.vocab_size=1024", "data.seq_length=128", "trainer.max_steps=1", *NO_VALIDATION)
    train(load("recipe:llama-tiny", [*own, f"exp_manager.exp_dir={tmp_path}", "name=chats"]))
    chats = (*chats, f"objective.teacher={tmp_path / 'chats'}")
    with raises(NoPrompts, match="has several conversations"):
        train(small(*chats, "data.packing=true"))
    with raises(PromptTooLong, match="With answers of 120 tokens, it is longer than data.seq_length, 128"):
        train(small(*chats, "objective.max_completion_length=120"))


def test_the_logits_of_one_micro_batch_of_the_teacher_are_held(small):
    held, alive = [], []
    with TrainSession(small()) as session:
        kept = session.objective._kept

        def watched(logits):
            alive.append(sum(each() is not None for each in held))
            held.append(weakref.ref(logits))
            return kept(logits)

        session.objective._kept = watched
        session.step(next(session.batches()))
    assert alive == [0, 0]


def test_some_tokens_at_a_time_need_no_tensor_of_all_logits(small):
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            return result

    logits, found = 2 * 32 * 272, {}
    for tokens in ("null", "16"):
        sizes.clear()
        with TrainSession(small(f"model.loss_chunk_tokens={tokens}")) as session:
            batch = next(session.batches())
            with Watch():
                step = session.step(batch)
        found[tokens] = max(sizes), float(step.loss.loss), float(step.grad_norm)
    assert found["null"][0] >= logits > found["16"][0]
    assert found["16"][1:] == pytest.approx(found["null"][1:], rel=1e-5)


def test_a_model_that_is_its_own_teacher_differs_from_it_in_nothing(small, teacher):
    same = ("model.num_layers=3", "model.num_attention_heads=4", "model.share_embeddings_and_output_weights=true")
    begins = (f"checkpoint.resume_from={teacher.checkpoint_uri}", "checkpoint.weight_init_only=true")
    config = small(*same, *begins, "trainer.max_steps=1")
    train(config)
    assert rows(config)[1]["kd_loss"] == pytest.approx(0, abs=1e-6)
    assert rows(config)[1]["top1_agreement"] == pytest.approx(1)


def test_a_teacher_is_kept_as_the_frozen_base_of_an_adapter_is(small):
    """Without gradients, and in the dtype of matrix products where nothing else reads the weight."""
    with TrainSession(small("precision.type=mixed_precision")) as session:
        found = session.step(next(session.batches()))
        assert float(found.loss.metrics["kd_loss"]) > 0
        held = dict(session.objective._model.named_parameters())
        assert not any(each.requires_grad or each.grad is not None for each in held.values())
        narrow = {name for name, each in held.items() if each.dtype == torch.bfloat16}
        assert "layers.2.mlp.down_proj.weight" in narrow
        assert not any(".2." in name for name in session.optimizer.state_dict())


def test_a_step_of_the_teacher_may_be_named(small, teacher):
    steps = {}
    for name in ("step-20", "checkpoints/step-00000020", "checkpoints"):
        config = small(
            f"objective.teacher={teacher.run_dir}/{name}", "trainer.max_steps=1", name=name.replace("/", "-")
        )
        train(config)
        steps[name] = rows(config)[1]
    assert len({*map(str, steps.values())}) == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("objective.temperature=0", "above 0"),
        ("objective.temperature=-1", "above 0"),
        ("objective.beta=1.5", "objective.beta"),
        ("objective.kd_ratio=-0.1", "objective.kd_ratio"),
        ("objective={top_k: 3, beta: 0.5}", "beta is 0.5"),
        ("objective.teacher=null", "objective.teacher"),
        ("parallel_engine.name=bare", "frozen_model"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_built(override, said):
    with pytest.raises(NxdtError, match=said):
        load("recipe:llama-tiny-distill", [f"plugins.local=[{BARE}]", override])


def test_a_teacher_that_is_not_there_is_an_error(small, tmp_path):
    with pytest.raises(NxdtError, match=f"{tmp_path}/nowhere"):
        train(small(f"objective.teacher={tmp_path}/nowhere"))
    command = rf"'nxdt train recipe:llama-small exp_manager.explicit_log_dir={tmp_path}/nowhere'"
    with pytest.raises(CheckpointNotFound, match=command):
        train(small(f"objective.teacher={tmp_path}/nowhere", "objective.teacher_config=recipe:llama-small"))


def test_rows_that_are_no_tokens_of_both_are_not_compared(small, teacher):
    """The teacher has 272 rows, and the tokenizer of both 259 ids."""
    with TrainSession(small("model.vocab_size=400")) as session:
        found = session.step(next(session.batches()))
        assert session.objective._measure.tokens == 259
        assert 0 < float(found.loss.metrics["kd_loss"]) < 10
    with TrainSession(small()) as session:  # of one size, all rows
        assert session.objective._measure.tokens == 272


def test_a_teacher_of_another_vocabulary_needs_the_tokenizers_of_both(small, tmp_path):
    directory = tmp_path / "teacher"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=320, num_hidden_layers=1, max_position_embeddings=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    unnamed = (f"objective.teacher={directory}", "trainer.max_steps=1", *NO_VALIDATION)
    with raises(TeacherVocabularyDiffers, match="knows 320 tokens, and the model 272: the tokenizers of both"):
        train(small(*unnamed))
    train(small(*unnamed, "objective.check_tokenizer=false"))


def test_a_teacher_without_rows_for_the_tokens_of_the_data_is_refused(small):
    own = ("model.vocab_size=1152", *CHATS, "data.seq_length=128", "objective.check_tokenizer=false")
    with raises(TeacherVocabularyDiffers, match="has 1024 ids, and the teacher 272 rows"):
        train(small(*own))


def test_a_teacher_of_another_tokenizer_is_refused_unless_its_ids_are_said_to_be_the_same(small, tmp_path):
    own = ("model.vocab_size=1024", "trainer.max_steps=1", *NO_VALIDATION)
    train(load("recipe:llama-tiny", [f"exp_manager.exp_dir={tmp_path}", "name=bytes", *NARROW, *FEW, *own]))
    named = (*own, *CHATS, "data.seq_length=128", f"objective.teacher={tmp_path / 'bytes'}")
    with raises(TeacherTokenizerDiffers, match="bytes"):
        train(small(*named))
    train(small(*named, "objective.check_tokenizer=false"))


def test_a_model_whose_section_leaves_the_vocabulary_to_its_config_json_is_taught():
    config = load("recipe:hf-tiny", ["objective.name=distill", "objective.teacher=any", "objective.top_k=273"])
    objective = build.objective(config)
    with raises(TopKTooLarge, match="272"):
        objective.check_teacher(load("recipe:llama-tiny"), config)
    with raises(TopKTooLarge, match="272"):
        objective.check_teacher(load("recipe:hf-tiny"), config)


def test_more_tokens_than_the_vocabulary_has_are_refused(small):
    with raises(TopKTooLarge, match="272"):
        train(small("objective.top_k=273"))


def test_a_teacher_whose_positions_end_before_the_sequences_is_refused(small):
    with raises(SequenceTooLongForModel, match="objective.teacher: "):
        train(small("data.seq_length=256", "model.max_position_embeddings=256"))


def test_a_reward_model_is_no_teacher():
    config = load("recipe:llama-tiny")
    scores = load("recipe:llama-tiny-reward")
    with raises(TeacherGivesScores):
        Distill(DistillConfig(teacher="rewards")).check_teacher(scores, config)


def test_a_custom_loop_without_a_teacher_is_told_so():
    alone = Distill(DistillConfig(teacher="somewhere"))
    batch = Batch(input_ids=torch.zeros(1, 2, dtype=torch.int64), labels=torch.zeros(1, 2, dtype=torch.int64))
    with raises(TeacherMissing):
        alone(torch.zeros(1, 2, 5), batch)
    with raises(TeacherMissing):
        alone.prepare([batch], None)


def test_a_plan_counts_the_teacher(small, teacher):
    """Its weights, logits and operations; of a teacher that a configuration describes, no checkpoint is read."""

    def memory(*overrides):
        return plan(small(*overrides)).estimate.fullest.memory

    alone = plan(load("recipe:llama-tiny", [*NARROW, *FEW]))
    taught, logits = plan(small()), 2 * 32 * 272 * 4
    found, before = taught.estimate.fullest.memory, alone.estimate.fullest.memory
    with torch.device("meta"):
        elements = sum(each.numel() for each in build.model_builder(teacher).build().parameters())
    assert found.weights - before.weights == 4 * elements
    assert found.logits - before.logits >= 2 * logits  # the teacher's, and a second gradient
    assert (found.optimizer, found.gradients) == (before.optimizer, before.gradients)
    assert taught.estimate.recomputed > alone.estimate.recomputed == 0
    assert taught.estimate.flops_per_token == alone.estimate.flops_per_token
    described = memory("objective.teacher=nowhere", "objective.teacher_config=recipe:llama-small")
    assert described.weights > found.weights
    assert memory("objective.top_k=4").logits < found.logits
    chunked = plan(small("model.loss_chunk_tokens=8")).estimate.fullest.memory
    assert chunked.total < found.total - 2 * logits
    pipeline = ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2", "data.micro_batch_size=1")
    assert memory(*pipeline).logits - memory(*pipeline, "objective.top_k=4").logits > 3 * logits / 2
    sharded = ("trainer.devices=4", "distributed_strategy.zero_stage=3", "data.micro_batch_size=1")
    whole = ("trainer.devices=4", "distributed_strategy.zero1=false", "data.micro_batch_size=1")
    assert memory(*sharded).weights < memory(*whole).weights


def first_loss(directory, overrides):
    """The divergence from the teacher in the first step."""
    with TrainSession(load("recipe:llama-tiny-distill", [f"exp_manager.exp_dir={directory}", *overrides])) as session:
        return float(session.step(next(session.batches())).loss.metrics["kd_loss"])


def test_a_teacher_may_be_an_adapter_over_the_weights_that_its_run_began_with(teacher, tmp_path):
    begins = (f"checkpoint.resume_from={teacher.checkpoint_uri}", "checkpoint.weight_init_only=true")
    lora = ("adapter.name=lora", "adapter.save_lora_base=false", "model.num_layers=3", "model.optim.lr=0.1")
    overrides = [*NARROW, *FEW, *lora, *begins, f"exp_manager.exp_dir={tmp_path}", "trainer.max_steps=2"]
    train(load("recipe:llama-small", [*overrides, "model.optim.sched.warmup_steps=1"]))
    own = [*NARROW, *FEW, "data.micro_batch_size=1", "objective.teacher_config=null"]
    adapted = [*own, f"objective.teacher={tmp_path / 'llama-small'}"]
    (wanted,) = RankPool(1, lasting=True).run(first_loss, str(tmp_path), adapted)
    (base,) = RankPool(1, lasting=True).run(first_loss, str(tmp_path), [*own, f"objective.teacher={teacher.run_dir}"])
    assert abs(wanted - base) > 1e-3
    for layout in ("distributed_strategy.tensor_model_parallel_size=2", "distributed_strategy.zero_stage=3"):
        found = RankPool(2, lasting=True).run(
            first_loss, str(tmp_path), [*adapted, "trainer.devices=2", layout], timeout_s=120
        )
        assert found == [pytest.approx(wanted, abs=1e-5)] * 2


def gathered_behind_the_layers(directory, overrides):
    """Whether the weights of the teacher's first layer are whole while its head runs."""
    with process_group(timeout_s=60), TrainSession(load("recipe:llama-tiny-distill", overrides)) as session:
        (teacher,) = session.objective._model.local_modules()
        first, seen = teacher.get_submodule("layers.0.mlp.down_proj"), []
        hook = teacher.lm_head.register_forward_pre_hook(lambda *_: seen.append(isinstance(first.weight, DTensor)))
        session.step(next(session.batches()))
        hook.remove()
        return not all(seen) or not seen


def test_a_teacher_frees_each_layer_after_its_forward_pass_under_zero1(small, tmp_path):
    overrides = [*NARROW, *FEW, "data.micro_batch_size=1", "trainer.devices=2", "distributed_strategy.zero1=true"]
    untied = ("model.share_embeddings_and_output_weights=false", "trainer.max_steps=1", *NO_VALIDATION)
    train(load("recipe:llama-small", [*NARROW, *FEW, *untied, f"exp_manager.exp_dir={tmp_path}"]))
    named = (f"objective.teacher={tmp_path / 'llama-small'}", "objective.teacher_config=null")
    found = RankPool(2, lasting=True).run(
        gathered_behind_the_layers, str(tmp_path), [*overrides, *named], timeout_s=120
    )
    assert found == [False, False]
