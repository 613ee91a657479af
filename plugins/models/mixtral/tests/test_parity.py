"""The same numbers as transformers' MixtralForCausalLM from the same weights."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train import build
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")


def cases() -> list[dict]:
    """All combinations of features, each with sizes drawn at random."""
    drawn = random.Random(20261121)
    configs = []
    for attention, tied, top_k, own_head_dim in itertools.product(
        ("gqa", "mha", "mqa"), (False, True), (1, 2, 3), (False, True)
    ):
        heads, width = drawn.choice((2, 4, 6)), drawn.choice((8, 16))
        configs.append(
            {
                "vocab_size": drawn.randint(50, 200),
                "hidden_size": heads * width,
                "intermediate_size": drawn.randint(20, 120),
                "num_hidden_layers": drawn.randint(1, 3),
                "num_attention_heads": heads,
                "num_key_value_heads": {"gqa": heads // 2, "mha": heads, "mqa": 1}[attention],
                "head_dim": drawn.choice((4, 24, 32)) if own_head_dim else None,
                "num_local_experts": drawn.randint(top_k + 1, 7),
                "num_experts_per_tok": top_k,
                "max_position_embeddings": 256,
                "rms_norm_eps": drawn.choice((1e-5, 1e-6)),
                "rope_parameters": {"rope_type": "default", "rope_theta": drawn.choice((1e4, 1e6))},
                "router_aux_loss_coef": drawn.choice((0.01, 0.5)),
                "tie_word_embeddings": tied,
                "initializer_range": 0.1,
                "sliding_window": drawn.choice((None, None, 1, 9, 69, 4096)),
            }
        )
    return configs


PAIRS = [cases()[number] for number in (1, 4, 9, 12, 15, 20, 23, 26, 31, 34)]
"""These have each pair of features."""


def label(config: dict) -> str:
    heads = f"{config['num_attention_heads']}q{config['num_key_value_heads']}kv{config['head_dim'] or ''}"
    experts = f"top{config['num_experts_per_tok']}of{config['num_local_experts']}"
    tied = "tied" if config["tie_word_embeddings"] else "untied"
    return f"{heads}-{experts}-{config['num_hidden_layers']}layers-window{config['sliding_window']}-{tied}"


def theirs_with(config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.MixtralConfig(**config)
    made._experts_implementation = "eager"  # the others refuse widths that are no multiple of 16 bytes
    model = transformers.MixtralForCausalLM(made).eval()
    with torch.no_grad():  # fresh norms are all ones, which would hide a swapped pair
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def pair(from_hf, tmp_path):
    """``pair(config)``: (their model, our builder, our model) with the same weights, by way of a directory."""

    def make(config: dict):
        theirs = theirs_with(config)
        theirs.save_pretrained(tmp_path)
        builder = from_hf(read_hf_config(tmp_path))
        ours = builder.build()
        ours.load_state_dict(load_hf(tmp_path, builder), strict=not config["tie_word_embeddings"])
        return theirs, builder, ours

    return make


def compare_gradients(ours, theirs, builder):
    """Each gradient of ours against theirs; transformers stacks its experts, gates on top of ups."""
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        place, _, leaf = name.partition(".experts.")
        if leaf:
            block = f"model.{place.removesuffix('.moe')}.mlp.experts"
            both = expected[f"{block}.gate_up_proj"].grad.chunk(2, 1)
            other = {"gate_proj": both[0], "up_proj": both[1], "down_proj": expected[f"{block}.down_proj"].grad}[leaf]
        else:
            entry = next(e for e in builder.hf_key_map() if _layered(e.name, name) == name)
            other = expected[_layered(entry.hf_names[0], name).replace("block_sparse_moe", "mlp")].grad
        torch.testing.assert_close(
            parameter.grad, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def _layered(pattern: str, name: str) -> str:
    return pattern.replace("*", name.split(".")[1], 1) if "*" in pattern else pattern


@pytest.mark.parametrize("config", slow_except(cases(), PAIRS), ids=label)
def test_logits_and_gradients_equal_those_of_transformers(config, pair):
    theirs, builder, ours = pair(config)
    ids = torch.randint(0, config["vocab_size"], (2, 70))
    mine, other = ours(ids), theirs(ids, use_cache=False).logits
    assert (mine - other).abs().max() <= 1e-5
    assert other.abs().max() > 0.1
    grad = torch.randn_like(other) / other.numel() ** 0.5
    with at_step_boundary(StepContext(aux_loss_scale=0.0)):
        ours(ids).backward(grad)
    other.backward(grad)
    compare_gradients(ours, theirs, builder)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balance_loss_is_that_of_transformers_in_the_mean_over_layers(pair, layers, top_k):
    config = {**cases()[0], "num_hidden_layers": layers, "num_experts_per_tok": top_k, "num_local_experts": 5}
    theirs, builder, ours = pair({**config, "router_aux_loss_coef": 0.7})
    ids = torch.randint(0, 50, (2, 30))
    output = theirs(ids, use_cache=False, output_router_logits=True)
    each = [mixtral.load_balancing_loss_func((logits,), 5, top_k) for logits in output.router_logits]
    if layers == 1:
        torch.testing.assert_close(output.aux_loss, each[0])
    grad = torch.randn_like(output.logits) / ids.numel()
    (0.7 * torch.stack(each).mean()).backward(retain_graph=True)
    output.logits.backward(grad)
    with at_step_boundary(StepContext(aux_loss_scale=1 / ids.numel())):  # as a step does, whose every token bears loss
        ours(ids).backward(grad)
    compare_gradients(ours, theirs, builder)
    without = builder.build()
    without.load_state_dict(ours.state_dict())
    with at_step_boundary(StepContext(aux_loss_scale=0.0)):
        without(ids).backward(grad)
    router = "layers.0.moe.router.weight"
    assert (without.get_parameter(router).grad - ours.get_parameter(router).grad).abs().max() > 1e-3


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_pooled_balance_loss_is_that_of_transformers(pair, top_k):
    config = {**cases()[0], "num_hidden_layers": 3, "num_experts_per_tok": top_k, "num_local_experts": 5}
    theirs, builder, plain = pair({**config, "router_aux_loss_coef": 0.7})
    moe = builder.config.moe.model_copy(update={"pool_router_aux_loss": True})
    pooled = type(builder)(builder.config.model_copy(update={"moe": moe}))
    ours = pooled.build()
    ours.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 50, (2, 30))
    output = theirs(ids, use_cache=False, output_router_logits=True)
    grad = torch.randn_like(output.logits) / ids.numel()
    (0.7 * output.aux_loss).backward(retain_graph=True)
    output.logits.backward(grad)
    with at_step_boundary(StepContext(aux_loss_scale=1 / ids.numel())):
        ours(ids).backward(grad)
    compare_gradients(ours, theirs, builder)
    with at_step_boundary(StepContext(aux_loss_scale=1 / ids.numel())):
        plain(ids).backward(grad)
    router = "layers.0.moe.router.weight"
    assert (plain.get_parameter(router).grad - ours.get_parameter(router).grad).abs().max() > 1e-4


ANSWERS, FILLED = 2, (5, 9, 12, 16)
"""Labels at the end of each row, and its tokens."""


def padded_rows(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels (shifted) and attention mask of rows that end in padding."""
    ids = torch.randint(0, 50, (len(FILLED), max(FILLED)), generator=torch.Generator().manual_seed(6))
    ids = torch.nn.functional.pad(ids, (0, length - ids.shape[1]))
    filled, place = torch.tensor(FILLED)[:, None], torch.arange(length)
    answered = (place < filled - 1) & (place >= filled - 1 - ANSWERS)
    return ids, ids.roll(-1, 1).masked_fill(~answered, IGNORE_INDEX), (place < filled).long()


@pytest.mark.parametrize("rows", [4, 2, 1])
def test_a_step_over_padded_rows_has_the_gradient_of_transformers_with_a_mask(pair, rows):
    """In one micro-batch, that of its loss; in several, theirs weighted by their tokens."""
    config = {**cases()[0], "num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2}
    theirs, builder, plain = pair({**config, "router_aux_loss_coef": 0.7})
    moe = builder.config.moe.model_copy(update={"pool_router_aux_loss": True})
    builder = type(builder)(builder.config.model_copy(update={"moe": moe}))
    run = load("recipe:mixtral-tiny", ["trainer.accelerator=cpu", "trainer.devices=1"])
    engine = build.engine(run)
    engine.start()
    model = engine.initialize_model(builder, precision=build.precision(run), seed=1)
    model.load_state_dict(plain.state_dict())
    found = []
    for length in (64, 16):
        model.module.zero_grad()
        ids, labels, mask = padded_rows(length)
        fields = [part.split(rows) for part in (ids, labels, mask == 0)]
        parts = [Batch(input_ids=i, labels=t, padding=p) for i, t, p in zip(*fields, strict=True)]
        step = model.run_train(parts, CausalLM())
        figures = {name: float(value) for name, value in step.metrics.items()}
        found.append({**figures, "loss": float(step.loss), "norm": float(model.finish_gradients())})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    total = 0.0
    for row in range(0, len(ids), rows):
        at = slice(row, row + rows)
        output = theirs(ids[at], attention_mask=mask[at], use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels[at].flatten(), reduction="sum")
        total += loss / (ANSWERS * len(ids)) + 0.7 * output.aux_loss * mask[at].sum() / mask.sum()
    total.backward()
    compare_gradients(model.module, theirs, builder)


def test_given_positions_and_documents_count(pair):
    theirs, _, ours = pair(cases()[0])
    parts = [torch.randint(0, 50, (1, length)) for length in (5, 17, 10)]
    logits = ours(
        torch.cat(parts, 1),
        torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        torch.cat([torch.full((part.shape[1],), n) for n, part in enumerate(parts)])[None],
    )
    separate = torch.cat([theirs(part).logits for part in parts], 1)
    assert (logits - separate).abs().max() <= 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_directory_comes_back_bit_equal_through_our_model(tied, from_hf, tmp_path):
    theirs = theirs_with({**cases()[0], "tie_word_embeddings": tied, "sliding_window": 7 if tied else None})
    theirs.save_pretrained(tmp_path / "theirs")
    builder = from_hf(read_hf_config(tmp_path / "theirs"))
    save_hf(tmp_path / "ours", builder, load_hf(tmp_path / "theirs", builder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    same = "num_local_experts num_experts_per_tok num_key_value_heads rms_norm_eps router_aux_loss_coef"
    for key in (*same.split(), "rope_parameters", "tie_word_embeddings", "sliding_window", "max_position_embeddings"):
        assert getattr(again.config, key) == getattr(theirs.config, key), key
    assert again.config.head_dim == theirs.model.layers[0].self_attn.head_dim
    for (name, mine), (other_name, other) in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(mine, other)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(again.eval()(ids).logits, theirs(ids).logits)


def test_a_sharded_directory_of_transformers_loads(from_hf, tmp_path):
    theirs = theirs_with(cases()[0])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = load_hf(tmp_path, from_hf(read_hf_config(tmp_path)))
    gates = theirs.model.layers[0].mlp.experts.gate_up_proj.chunk(2, 1)[0]
    assert torch.equal(loaded["layers.0.moe.experts.gate_proj"], gates)
