"""What a model learns from a teacher does not depend on the layout: dense and with experts, padded and packed."""

from __future__ import annotations

from functools import cache, partial
from itertools import islice, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_distill.divergence import Measure, divergences, shared_like
from nxdt_testing.ranks import RankPool, process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nxdt_core.config import load
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession
from tests.sampling import slow

transformers = pytest.importorskip("transformers")

COMPONENTS = Path(__file__).parents[4] / "tests" / "engine" / "matrix" / "components.py"
STUDENT = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.max_position_embeddings=128",
)
SMALL = (
    *("trainer.accelerator=cpu", "data.seq_length=32", "data.global_batch_size=4", "data.micro_batch_size=1"),
    *(f"plugins.local=[{COMPONENTS}]", "precision.type=float64"),
)
STEPS, VALIDATED = 3, 1
CHATS = (
    *("data.name=sft-chat", "data.train_files=[package://nxdt_plugin_sft_chat/data/library.jsonl]"),
    *("data.tokenizer.library=huggingface", "data.tokenizer.model=package://nxdt_plugin_sft_chat/data/tokenizer"),
    *("data.packing=true", "data.seq_length=128", "model.vocab_size=1024", "data.validation_fraction=0.1"),
)
MIXTRAL = ("model.name=mixtral", "model.moe={num_experts: 4, dropless: true, router_aux_loss_coef: 0.1}")
GPT = ("model.vocab_size=260", "model.make_vocab_size_divisible_by=520", "data.seq_length=32")
"""Half of the rows fill the vocabulary up: with two tensor parallel ranks, the second has no token."""
WIDER = ("objective.check_tokenizer=false",)
"""The teacher has 320 rows, tied to its embedding, and the student 272. The tokenizer of the data has 259 ids."""
NARROWER = (*WIDER, "model.vocab_size=400", "objective.beta=0.5")
"""The student has more rows than the teacher."""
STRATEGY = "distributed_strategy."
TP2, PP2 = f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}pipeline_model_parallel_size=2"
LAYOUTS = {
    "dp2": (f"{STRATEGY}zero1=false",),
    "dp2-zero1": (f"{STRATEGY}zero1=true",),
    "dp2-zero3": (f"{STRATEGY}zero_stage=3",),
    "tp2-sp": (TP2, f"{STRATEGY}sequence_parallel=true"),
    "pp2": (PP2,),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
    "ep2": (f"{STRATEGY}expert_model_parallel_size=2",),
}
OPTIONS = {
    "forward": (),
    "reverse": ("objective.beta=1", "objective.temperature=2"),
    "jsd": ("objective.beta=0.3", "objective.kd_ratio=0.9"),
    "top": ("objective.top_k=5",),
    "lora": ("adapter.name=lora", "adapter.lora_dropout=0", "objective.beta=0.5"),
    "chats": CHATS,
    "on-policy": (*CHATS, "data.packing=false", "objective.on_policy=1", "objective.max_completion_length=6"),
    "experts": MIXTRAL,
    "padded": GPT,
    "padded-top": (*GPT, "objective.top_k=5"),
    "wider": WIDER,
    "wider-top": (*WIDER, "objective.top_k=5"),
    "narrower": NARROWER,
    "chunks": ("model.loss_chunk_tokens=10", "objective.beta=0.5"),
    "chunks-top": ("model.loss_chunk_tokens=10", "objective.top_k=5"),
    "chunks-wider": (*WIDER, "model.loss_chunk_tokens=10"),
    "chunks-lora": ("model.loss_chunk_tokens=10", "adapter.name=lora", "adapter.lora_dropout=0"),
}
DEFAULT = (
    *(("dp2-zero1", "forward"), ("dp2-zero3", "reverse"), ("tp2-sp", "jsd"), ("tp2-sp", "top")),
    *(("pp2", "top"), ("pp2", "forward"), ("cp2", "chats"), ("ep2", "experts"), ("tp2-sp", "padded-top")),
    *(("tp2-sp", "narrower"), ("tp2-sp", "chunks-wider"), ("dp2-zero3", "chunks"), ("pp2", "chunks")),
    *(("tp2-sp", "on-policy"), ("dp2-zero1", "on-policy")),
)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Directories of a teacher of another size and architecture, by its vocabulary."""
    found = {}
    for rows in (272, 320, 1024):
        config = transformers.MistralConfig(
            vocab_size=rows,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            sliding_window=None,
            tie_word_embeddings=rows == 320,
        )
        found[rows] = str(tmp_path_factory.mktemp(f"teacher-{rows}"))
        transformers.MistralForCausalLM(config).save_pretrained(found[rows])
    found[260] = str(tmp_path_factory.mktemp("teacher") / "gpt-tiny")
    train(load("recipe:gpt-tiny", [f"exp_manager.exp_dir={Path(found[260]).parent}", "trainer.max_steps=1", *GPT]))
    return found


def learn(directory: str, teachers: dict[int, str], devices: int, overrides: tuple[str, ...]) -> list[dict[str, float]]:
    """Figures of some steps on this rank, and of a validation."""
    rows = 1024 if CHATS[0] in overrides else 260 if GPT[0] in overrides else 320 if WIDER[0] in overrides else 272
    config = load(
        {"base": "recipe:gpt-tiny" if rows == 260 else "recipe:llama-tiny", "name": "student"},
        [
            *("objective.name=distill", f"objective.teacher={teachers[rows]}"),
            *(f"exp_manager.exp_dir={directory}", f"trainer.devices={devices}"),
            *(*STUDENT, *SMALL, *overrides),
        ],
    )
    with TrainSession(config) as session:
        steps = [session.step(batch) for batch in islice(session.batches(), STEPS)]
        found = [{"norm": step.grad_norm, "loss": step.loss.loss, **step.loss.metrics} for step in steps]
        for batch in islice(session.validation_loaders()[0], VALIDATED):
            judged = session.evaluate_batch(batch)
            found.append({"loss": judged.loss, "weight": judged.weight, **judged.metrics})
        return [{name: float(value) for name, value in row.items()} for row in found]


@pytest.fixture(scope="module")
def ranks():
    return partial(RankPool, lasting=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, teachers, ranks):
    """``alone(options)``: what one process sees, with all of a batch at once."""

    @cache
    def of(options):
        logits = (each for each in OPTIONS[options] if not each.startswith("model.loss_chunk_tokens"))
        whole = (*logits, *(() if options == "experts" else ("data.micro_batch_size=4",)))
        return ranks(1).run(learn, str(tmp_path_factory.mktemp("alone")), teachers, 1, whole)[0]

    return of


@pytest.mark.parametrize("options", ["chunks", "chunks-top"])
def test_some_tokens_at_a_time_give_the_numbers_of_whole_logits(tmp_path, teachers, ranks, alone, options):
    one = (*OPTIONS[options], "data.micro_batch_size=4")
    (found,) = ranks(1).run(learn, str(tmp_path), teachers, 1, one)
    assert found == [pytest.approx(row, rel=1e-12, abs=1e-12) for row in alone(options)]


def compared(parts: tuple[bool, bool]) -> tuple[list[float], list[float]]:
    """Divergences and their gradient, where ``parts`` says whose vocabulary two ranks share."""
    with process_group():
        mesh, draws = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
        whole = torch.randn(2, 5, 12, generator=draws, dtype=torch.float64).unbind()
        student, teacher = (
            DTensor.from_local(each.chunk(2, -1)[dist.get_rank()].contiguous(), mesh, [Shard(-1)]) if cut else each
            for each, cut in zip(whole, parts, strict=True)
        )
        local = (student.to_local() if parts[0] else student).requires_grad_()
        given = DTensor.from_local(local, mesh, [Shard(-1)]) if parts[0] else local
        found, same = divergences(given, teacher, Measure(beta=0.5, tokens=11))
        (gradient,) = torch.autograd.grad(found.sum(), local)
        if parts[0]:
            gradient = DTensor.from_local(gradient, mesh, [Shard(-1)]).full_tensor()
        return [*found.tolist(), *same.tolist()], gradient.flatten().tolist()


def test_the_vocabulary_of_one_model_alone_may_be_shared():
    wanted, *others = (RankPool(2, lasting=True).run(compared, parts) for parts in product((False, True), repeat=2))
    assert any(wanted[0][1])
    for ranks in others:
        for found in ranks:
            for own, other in zip(found, wanted[0], strict=True):
                assert own == pytest.approx(other, abs=1e-12)


def shared_by_three(theirs: int, rows: int) -> list[bool]:
    """Whether this rank's shard of a teacher's logits is that of ``rows`` tokens, as it is sent and with zeros."""
    with process_group():
        mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
        logits = torch.randn(2, 7, theirs, generator=torch.Generator().manual_seed(0))
        teacher = DTensor.from_local(logits.chunk(3, -1)[rank].contiguous(), mesh, [Shard(-1)])
        found, wanted = shared_like(teacher, rows), logits.new_zeros(2, 7, rows)
        both = min(theirs, rows)
        wanted[..., :both] = logits[..., :both]
        return [found.shape == wanted.shape, torch.equal(found.to_local(), wanted.chunk(3, -1)[rank])]


@pytest.mark.parametrize(("theirs", "rows"), [(12, 12), (30, 12), (12, 30), (18, 15), (15, 18)])
def test_ranks_exchange_the_columns_of_a_teacher_that_has_another_number_of_them(theirs, rows):
    assert RankPool(3, lasting=True).run(shared_by_three, theirs, rows) == [[True, True]] * 3


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (layout, options) if (layout, options) in DEFAULT else slow(layout, options)
        for layout in LAYOUTS
        for options in OPTIONS
        if (layout == "ep2") <= (options == "experts")
    ],
)
def test_every_layout_learns_what_one_process_learns(tmp_path, teachers, ranks, alone, layout, options):
    wanted = alone(options)
    assert len(wanted) == STEPS + VALIDATED
    assert wanted[0]["kd_loss"] > 0.01
    assert ("router_entropy" in wanted[0]) == (options == "experts")
    overrides = (*OPTIONS[options], *LAYOUTS[layout])
    for found in ranks(2).run(learn, str(tmp_path), teachers, 2, overrides):
        assert found == [pytest.approx(row, rel=1e-9, abs=1e-9) for row in wanted]
