"""The engine for one process: micro-batches, global normalisation, ties, dtypes, weights that fit."""

import pytest
import torch
from nxdt_testing.errors import raises
from torch import nn

from nxdt_core.config import load
from nxdt_core.engine.engine import TorchEngine
from nxdt_core.errors.models import ObjectiveWeightsDiffer, WeightsDoNotFit
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.moe.layer import add_aux_loss
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy

VOCAB, SEQ = 32, 12


class Bigram(nn.Module):
    """Embedding and a head, optionally one parameter; a buffer that must survive the meta device."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCAB, bias=False)  # registered before its owner, on purpose
        self.embed = nn.Embedding(VOCAB, 8)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(1), persistent=False)

    def reset_buffers(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, input_ids, position_ids=None, document_ids=None):
        return self.head(self.embed(input_ids) * self.scale)


class BigramBuilder(ModelBuilder):
    vocab_size, max_sequence_length = VOCAB, None

    def __init__(self, *, tied: bool = False) -> None:
        self.tied = tied

    def build(self):
        return Bigram(tied=self.tied)

    def plan(self):
        return ParallelPlan(tied=(("embed.weight", "head.weight"),) if self.tied else ())

    def init_rules(self):
        return [InitRule(pattern="*", distribution="normal", std=0.5)]

    def flops_per_token(self, sequence_length):
        return 1.0


def engine():
    made = TorchEngine(load("recipe:llama-tiny", ["trainer.accelerator=cpu"]))
    made.start()
    return made


def model(*, tied=False, precision=None, seed=3, **more):
    policy = precision or PrecisionPolicy(name="fp32")
    return engine().initialize_model(BigramBuilder(tied=tied), precision=policy, seed=seed, **more)


def batch(rows, *, masked=0.0, seed=0):
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, SEQ + 1), generator=draws)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=draws) < masked] = -100
    return Batch(input_ids=ids[:, :-1].contiguous(), labels=labels)


def split(whole, size):
    parts = range(0, len(whole.input_ids), size)
    return [Batch(input_ids=whole.input_ids[i : i + size], labels=whole.labels[i : i + size]) for i in parts]


class WithAuxiliary(Bigram):
    """Adds the sum of squares of its hidden states, a loss that does not pass through the logits."""

    def forward(self, input_ids, position_ids=None, document_ids=None):
        hidden = self.embed(input_ids) * self.scale
        return self.head(add_aux_loss(hidden, 0.1 * hidden.square().sum()))


@pytest.mark.parametrize("size", [1, 4])
def test_an_auxiliary_loss_is_divided_by_the_tokens_of_the_global_batch(size, monkeypatch):
    monkeypatch.setattr(BigramBuilder, "build", lambda self: WithAuxiliary(tied=False))
    made, whole = model(), batch(4, masked=0.5)
    made.run_train(split(whole, size), CausalLM())
    reference = model()
    weights = dict(reference.named_parameters())
    hidden = weights["embed.weight"][whole.input_ids] * 2.0
    loss = nn.functional.cross_entropy(
        (hidden @ weights["head.weight"].T).flatten(0, 1), whole.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (loss / (whole.labels != -100).sum() + 0.1 * hidden.square().sum() / whole.labels.numel()).backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_micro_batch_size_gives_the_loss_and_gradient_of_the_whole_batch(size):
    whole = batch(8, masked=0.6)
    whole.labels[:2, :] = -100  # micro-batches with very different numbers of loss tokens, some with none
    reference = model()
    logits = reference.module(whole.input_ids)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), whole.labels.flatten(), ignore_index=-100)
    expected.backward()
    parts = model()
    loss = parts.run_train(split(whole, size), CausalLM())
    torch.testing.assert_close(loss.loss, expected.detach())
    assert loss.weight == (whole.labels != -100).sum()
    for (name, a), (_, b) in zip(parts.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


class CountsRows(CausalLM):
    """Announces one weight and reports another, which a batch without ignored labels does not show by its loss."""

    def weight(self, batch):
        return torch.tensor(float(len(batch.labels)))


@pytest.mark.parametrize("run", ["run_train", "run_eval"])
def test_an_objective_that_reports_another_weight_than_it_announced_is_an_error_of_the_first_pass(run):
    made, whole = model(), batch(4)
    with raises(ObjectiveWeightsDiffer, match=r"CountsRows.*24.* and its weight.* gives 2"):
        getattr(made, run)(split(whole, 2), CountsRows())


def test_a_batch_without_loss_tokens_changes_nothing():
    made, empty = model(), batch(2)
    empty.labels.fill_(-100)
    loss = made.run_train([empty], CausalLM())
    assert loss.loss == 0
    assert all(not p.grad.any() for _, p in made.named_parameters())


def test_evaluation_gives_the_same_loss_and_no_gradient():
    made, whole = model(), batch(4)
    evaluated = made.run_eval(split(whole, 2), CausalLM())
    assert all(p.grad is None for _, p in made.named_parameters())
    torch.testing.assert_close(evaluated.loss, made.run_train(split(whole, 2), CausalLM()).loss)


def test_a_tied_parameter_is_one_and_goes_by_its_owners_name():
    made = model(tied=True)
    assert [name for name, _ in made.named_parameters()] == ["embed.weight"]
    assert list(made.state_dict()) == ["embed.weight"]
    assert made.module.head.weight is made.module.embed.weight


def test_buffers_that_are_not_saved_are_computed_on_the_device():
    assert model().module.scale.tolist() == [2.0]


def test_weights_depend_on_seed_and_name_only():
    first, second, other = model(), model(tied=True), model(seed=4)
    assert torch.equal(first.state_dict()["embed.weight"], second.state_dict()["embed.weight"])
    assert not torch.equal(first.state_dict()["embed.weight"], other.state_dict()["embed.weight"])


def test_autocast_computes_in_bfloat16_and_keeps_float32_parameters():
    made = model(precision=PrecisionPolicy(name="autocast", autocast="bfloat16"))
    assert made.forward(batch(1).input_ids).dtype == torch.bfloat16
    loss = made.run_train([batch(2)], CausalLM())
    assert loss.loss.dtype == torch.float32
    assert {p.dtype for _, p in made.named_parameters()} == {torch.float32}
    assert {p.grad.dtype for _, p in made.named_parameters()} == {torch.float32}
    torch.testing.assert_close(loss.loss, model().run_train([batch(2)], CausalLM()).loss, rtol=2e-2, atol=0)


def test_loaded_weights_are_those_that_were_saved():
    source, target = model(), model(seed=9, materialise=False)
    target.load_state_dict(source.state_dict())
    whole = batch(2)
    assert torch.equal(source.forward(whole.input_ids), target.forward(whole.input_ids))


def test_weights_that_do_not_fit_are_refused_with_names_and_nothing_is_changed():
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    bad = {"embed.weight": torch.zeros(VOCAB, 9), "stranger": torch.zeros(1)}
    with pytest.raises(WeightsDoNotFit, match=r"head.weight.*stranger.*embed.weight"):
        made.load_state_dict(bad)
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
