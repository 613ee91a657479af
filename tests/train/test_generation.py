"""Text of a model: with the cache as transformers writes it, in batches as alone, and by every setting of sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.distributed.device_operations import HostOperations
from nxdt_core.distributed.devices import CPU, PROFILES, current_device, profile_of
from nxdt_core.protocols.parallel_model import CacheUnsupported, Decoding
from nxdt_core.train import sampling as continuation
from nxdt_core.train.generate import load_model
from nxdt_core.train.sampling import Sampler, Sampling, Writer, completion, warped
from tests.sampling import sampled

SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": {"attention_bias": True, "rope_parameters": YARN},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt2": {"n_inner": 48, "attn_pdrop": 0.1, **NO_DROPOUT},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "phi3": WINDOW,
    "olmo2": {},
    "cohere": {},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 24, **EXPERTS},
    "olmoe": EXPERTS,
    "granite": {"attention_multiplier": 0.2},
    "deepseek_v3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 24, "num_key_value_heads": 4},
    },
    "starcoder2": WINDOW,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **WINDOW},
}
QUICK = ("mistral", "gpt2", "gemma2")
SETTINGS_OF_BOTH = {"max_new_tokens": 40, "repetition_penalty": 2.0}
"""More tokens than the windows of 16; without the penalty, fresh models soon repeat themselves."""
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [2, 7], [1, 6, 1, 8, 0, 3, 3, 9, 8])


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sampled(metafunc.config, FAMILIES, len(QUICK), default=QUICK))


def saved(where, family):
    """A fresh model of transformers and a tokenizer of its size, in a directory."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # fresh norms and biases would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape) - 0.5)
    model.save_pretrained(where)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(160)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)
    return model


class Recording(HostOperations):
    """Records on the host: torch.compile makes one graph of the operations of a pass and of the choice of tokens, or
    raises an error. A backend of None runs them as they are."""

    def __init__(self, backend: str | None = "eager") -> None:
        self.backend, self.recordings, self.launches = backend, 0, 0

    def recorded(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        self.recordings += 1
        options = {"fullgraph": True, "dynamic": False, "backend": self.backend}
        compiled = run if self.backend is None else torch.compile(run, **options)

        def launch() -> None:
            self.launches += 1
            compiled()

        return launch


@pytest.fixture
def recording(monkeypatch):
    """Let the host record from here on."""
    torch.compiler.reset()

    def begin(operations=None, **fields):
        operations = operations or Recording()
        monkeypatch.setitem(PROFILES, "cpu", replace(CPU, records=True, operations=operations, **fields))
        counters.clear()
        return operations

    return begin


def continued(loaded, prompts, writer=None, **settings):
    found = {}
    for row, token in (writer or loaded.writer).tokens(prompts, Sampling(**settings)):
        found.setdefault(row, []).append(token)
    return [found[row] for row in sorted(found)]


RUN = """
trainer: {{max_steps: 1}}
exp_manager: {{}}
data: {{name: none, tokenizer: {{library: huggingface, model: {where}}}, seq_length: 8, global_batch_size: 1}}
model: {{model_config: {where}, optim: {{lr: 0.0}}}}
"""


def test_transformers_writes_the_same_tokens_and_a_batch_those_of_each_prompt(
    family, tmp_path, caplog, recording, monkeypatch
):
    """Of a run on shorter sequences than these texts. What is recorded is one graph for prompts of all lengths, and one
    launch per token: all but the first, which is that of the prompts' pass, and the second, which is then recorded."""
    theirs = saved(tmp_path, family)
    (tmp_path / "run.yaml").write_text(RUN.format(where=tmp_path))
    loaded = load_model(str(tmp_path), config=str(tmp_path / "run.yaml"))
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, **SETTINGS_OF_BOTH}
        expected.append(theirs.generate(ids, **given)[0, len(prompt) :].tolist())
    assert len({token for text in expected for token in text}) > 8, "texts that repeat themselves show nothing"
    assert [continued(loaded, [prompt], **SETTINGS_OF_BOTH)[0] for prompt in PROMPTS] == expected
    assert continued(loaded, PROMPTS, **SETTINGS_OF_BOTH) == expected
    if any("experts" in key for key in FAMILIES[family]):  # how many rows one has is read in float32 on a host
        monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)
    device = recording()
    assert [continued(loaded, [prompt], **SETTINGS_OF_BOTH)[0] for prompt in PROMPTS] == expected
    assert (device.recordings, device.launches, counters["stats"]["unique_graphs"]) == (1, 3 * 39 - 1, 1)
    assert continued(loaded, PROMPTS, **SETTINGS_OF_BOTH) == expected
    assert (device.recordings, device.launches, counters["stats"]["unique_graphs"]) == (2, 3 * 39 - 1 + 38, 2)
    assert "again" not in caplog.text, "the cache was used, and no text was longer than the window"


DRAWN = {"max_new_tokens": 40, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.1}


@pytest.fixture
def gpt2(tmp_path, monkeypatch):
    """A model with fewer positions than the texts: looking up one beyond the last is an error."""
    monkeypatch.setitem(SIZES, "max_position_embeddings", 48)
    saved(tmp_path, "gpt2")
    return load_model(str(tmp_path))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_recorded_choices_are_those_of_the_host(gpt2, recording, backend):
    asked = {"samples": 2, "seed": 5, "repetition_penalty": 1.3, **DRAWN}
    expected = continued(gpt2, PROMPTS, **asked)
    device = recording(Recording(backend))
    assert continued(gpt2, PROMPTS, **asked) == expected
    assert continued(gpt2, PROMPTS, **asked) == expected
    assert (device.recordings, counters["stats"]["unique_graphs"]) == (1, 1)


def test_recorded_texts_end_where_they_end_on_the_host(gpt2, recording):
    """At the tokens that end a text, the last of which is within a block, and beyond the window. Rows that have ended
    are computed further, up to the last position of the model."""
    whole = continued(gpt2, PROMPTS, **DRAWN)
    writers = [
        replace(gpt2.writer, stop_ids={whole[0][3], whole[1][20]}),
        replace(gpt2.writer, window=30),
        replace(gpt2.writer, stop_ids={whole[0][2]}),
    ]
    expected = [continued(gpt2, PROMPTS, writer, **DRAWN) for writer in writers]
    assert len({len(text) for text in expected[0]}) > 1
    device = recording(Recording(None))
    assert [continued(gpt2, PROMPTS, writer, **DRAWN) for writer in writers] == expected
    assert device.launches < len(writers) * 39, "nothing is launched after the block in which the last text ends"
    assert gpt2.writer.answers(
        PROMPTS, {whole[0][3]}, Sampling(max_new_tokens=40, temperature=1.0), drawn=[(1,), (2,), (3,)]
    )[0][1]


def test_answers_end_once_those_of_all_ranks_have(gpt2):
    drawing, drawn = Sampling(max_new_tokens=60, temperature=1.0), [(1,), (2,), (3,)]
    whole = [answer for answer, _ in gpt2.writer.answers(PROMPTS, (), drawing, drawn=drawn)]
    stops = {answer[2] for answer in whole}
    asked: list[bool] = []

    def one_more(left):  # another rank's answers continue for one question longer
        asked.append(left)
        return len(asked) < 3

    found = gpt2.writer.answers(PROMPTS, stops, drawing, drawn=drawn, any_left=one_more)
    assert found == gpt2.writer.answers(PROMPTS, stops, drawing, drawn=drawn)
    assert all(ended for _, ended in found)
    assert asked == [True, False, False], "no question comes after the answer that none continues"


def test_a_stop_text_ends_an_answer_and_its_tokens_are_part_of_it(gpt2):
    drawing, drawn, tokenizer = Sampling(max_new_tokens=30, temperature=1.0), [(1,), (2,), (3,)], gpt2.tokenizer
    whole = [answer for answer, _ in gpt2.writer.answers(PROMPTS, (), drawing, drawn=drawn)]
    stop = completion(tokenizer, PROMPTS[0], whole[0])[2:4]
    found = gpt2.writer.answers(PROMPTS, (), replace(drawing, stop=(stop,)), drawn=drawn)
    assert found[0][1]
    for prompt, answer, (ids, ended) in zip(PROMPTS, whole, found, strict=True):
        assert ids == answer[: len(ids)]
        assert ended == (stop in completion(tokenizer, prompt, answer))
        assert (stop in completion(tokenizer, prompt, ids)) == ended
        assert completion(tokenizer, prompt, ids, (stop,)) == completion(tokenizer, prompt, answer).partition(stop)[0]


def test_texts_that_are_written_in_turns_have_separate_caches_and_weights_may_change(gpt2, recording):
    def both():
        texts = [gpt2.continuation(prompt, Sampling(**DRAWN)) for prompt in PROMPTS[:2]]
        return [*zip(*texts, strict=True)]

    def changed(by):
        with torch.no_grad():
            for _, parameter in gpt2.model.named_parameters():
                parameter.mul_(by)

    expected = [both()]
    changed(0.5)
    expected.append(both())
    changed(2.0)
    device = recording(Recording(None))
    found = [both()]
    changed(0.5)
    found.append(both())
    changed(2.0)
    assert found == expected
    assert device.recordings == 3, "the second pair has the recording that the first one left"
    with torch.no_grad():
        for module in gpt2.model.local_modules():
            module.double().float()  # weights are elsewhere
    assert both() == expected[0]
    assert device.recordings == 5


def test_where_a_pass_cannot_be_recorded_it_runs_as_it_is(gpt2, recording, caplog):
    class Waiting(Recording):
        def recorded(self, run, device):
            raise RuntimeError("operation not permitted when stream is capturing")

    expected = continued(gpt2, PROMPTS, **DRAWN)
    recording(Waiting())
    with caplog.at_level(logging.DEBUG, logger="nxdt_core.engine.decoding"):
        assert continued(gpt2, PROMPTS, **DRAWN) == expected
    assert "launched one by one: operation not permitted" in caplog.text


def test_recordings_take_compiled_layers(tmp_path, recording):
    """Layers share one graph."""
    saved(tmp_path, "llama")
    expected = continued(load_model(str(tmp_path)), PROMPTS, **SETTINGS_OF_BOTH)
    recording(Recording(None), compile_backend="eager")
    (tmp_path / "run.yaml").write_text(RUN.format(where=tmp_path).replace("model: {", "model: {compile: true, "))
    compiled = load_model(str(tmp_path), config=str(tmp_path / "run.yaml"))
    assert continued(compiled, PROMPTS, **SETTINGS_OF_BOTH) == expected
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.accelerator
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_an_accelerator_launches_once_per_token(compiled, tmp_path, monkeypatch):
    saved(tmp_path, "llama")
    run = RUN.format(where=tmp_path).replace("model: {", f"model: {{compile: {compiled}, ")
    (tmp_path / "run.yaml").write_text(run)
    loaded = load_model(str(tmp_path), config=str(tmp_path / "run.yaml"))
    profile = profile_of(current_device())
    if not profile.records:
        pytest.skip(f"{profile.device_type} records no passes")
    expected = [continued(loaded, PROMPTS, **settings) for settings in (SETTINGS_OF_BOTH, DRAWN)]
    assert [continued(loaded, PROMPTS, **settings) for settings in (SETTINGS_OF_BOTH, DRAWN)] == expected
    with torch.profiler.profile() as profiler:
        assert continued(loaded, PROMPTS, **DRAWN) == expected[1]
    assert sum(event.count for event in profiler.key_averages() if event.key == "cudaGraphLaunch") == 39
    monkeypatch.setitem(PROFILES, profile.device_type, replace(profile, records=False))
    assert [continued(loaded, PROMPTS, **settings) for settings in (SETTINGS_OF_BOTH, DRAWN)] == expected


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 5.0, 9.0]}


@pytest.mark.parametrize(
    ("kind", "rope", "cached"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, [False, False, False]),
        ("llama", {**LONGROPE, "original_max_position_embeddings": 30}, [False, False, False]),
        ("llama", {**LONGROPE, "original_max_position_embeddings": 8}, [True, False, True]),
        ("phi3", {**LONGROPE, "original_max_position_embeddings": 30}, [False, False, False]),
    ],
    ids=["dynamic", "longrope", "longrope-always-long", "longrope-of-transformers"],
)
def test_where_frequencies_follow_the_length_each_token_is_that_of_all_tokens(
    kind, rope, cached, tmp_path, monkeypatch
):
    """transformers keeps keys of other frequencies in its cache; without it, both write the same."""
    original = "original_max_position_embeddings"  # Phi-3's files have it next to the mapping
    shapes = {original: rope[original]} if original in rope else {"max_position_embeddings": 30}
    monkeypatch.setitem(FAMILIES, kind, {**shapes, "rope_parameters": {"rope_theta": 10_000.0, **rope}})
    theirs = saved(tmp_path, kind)
    loaded = load_model(str(tmp_path))
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": False, **SETTINGS_OF_BOTH}
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)  # which remembers longer texts
        expected.append(theirs.generate(ids, **given)[0, len(prompt) :].tolist())
    assert [continued(loaded, [prompt], **SETTINGS_OF_BOTH)[0] for prompt in PROMPTS] == expected
    assert continued(loaded, PROMPTS, **SETTINGS_OF_BOTH) == expected
    assert [keeps_keys(loaded.model, prompt) for prompt in PROMPTS] == cached


def keeps_keys(model, prompt):
    try:
        model.decoding([len(prompt)], len(prompt) + 40)
    except CacheUnsupported:
        return False
    return True


class Recited:
    """A model without a cache that writes the alphabet: the token that follows is the next number."""

    def __init__(self, size=272):
        self.size, self.asked = size, []

    def forward(self, ids):
        self.asked.append(tuple(ids.shape))
        return torch.nn.functional.one_hot((ids + 1) % self.size, self.size).float()

    writing = nullcontext

    def decoding(self, lengths, columns):
        raise CacheUnsupported("its engine has no cache")


class RecitedWithCache(Recited):
    def decoding(self, lengths, columns):
        self.rows = []

        class Passes(Decoding):
            def __call__(_, ids):
                self.rows.append(len(ids))
                return self.forward(ids)[:, -1]

            def keep(_, rows):
                pass

        return Passes()


def writer(model, window=100, stop_ids=()):
    return Writer(model=model, tokenizer=ByteTokenizer(None), window=window, stop_ids=stop_ids)


def ids(text):
    return [*text.encode()]


@pytest.fixture(autouse=True)
def told_anew():
    continuation._tell.cache_clear()


def test_rows_that_have_ended_are_computed_no_further():
    model = RecitedWithCache()
    found = list(writer(model, stop_ids={ord("f")}).tokens([ids("a"), ids("d")], Sampling(max_new_tokens=8)))
    assert found == [(0, ord("b")), (1, ord("e")), (0, ord("c")), (0, ord("d")), (0, ord("e"))]
    assert model.rows == [2, 2, 1, 1, 1]


def test_a_model_without_a_cache_writes_the_same_and_a_warning_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert [*writer(Recited()).texts([ids("a"), ids("x")], Sampling(max_new_tokens=2))] == [["bc"], ["yz"]]
    assert len(caplog.records) == 1
    assert "computes all earlier ones again: its engine has no cache" in caplog.text


def test_beyond_the_window_the_model_sees_the_last_tokens(caplog):
    model = RecitedWithCache()
    assert [*writer(model, window=4).texts([ids("abc")], Sampling(max_new_tokens=4))] == [["defg"]]
    assert model.asked == [(1, 3), (1, 1), (1, 4), (1, 4)]
    assert "longer than the model's window" in caplog.text


@pytest.mark.parametrize(
    ("stop", "expected"), [(("e",), "bcd"), (("zz", "cde"), "b"), (("efx",), "bcdefg"), ((), "bcdefg")]
)
def test_a_stop_text_ends_what_is_written_and_no_part_of_it_is_shown(stop, expected):
    sampling = Sampling(max_new_tokens=6, stop=stop)
    assert [*writer(Recited()).texts([ids("a")], sampling)] == [[expected]]
    pieces = [*writer(Recited()).pieces(ids("a"), sampling)]
    assert "".join(pieces) == expected
    assert all(pieces)


def test_characters_of_several_bytes_are_shown_whole():
    class Spelled(Recited):
        def forward(self, given):
            text = "aé€😀".encode()
            return torch.nn.functional.one_hot(torch.tensor([[text[given.shape[1]]]]), self.size).float()

    assert [*writer(Spelled()).pieces(ids("a"), Sampling(max_new_tokens=9))] == ["é", "€", "😀"]


def test_samples_differ_by_their_seeds_and_not_by_the_batch(tmp_path):
    saved(tmp_path, "llama")
    loaded = load_model(str(tmp_path))
    drawn = {"max_new_tokens": 12, "temperature": 1.0}
    several = continued(loaded, PROMPTS[:2], samples=3, seed=5, **drawn)
    rows = [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert several == [continued(loaded, [row], seed=5 + k, **drawn)[0] for k, row in enumerate(rows)]
    assert len({*map(tuple, several)}) == 6
    equal = Sampling(seed=5, samples=2, **drawn)
    texts = [text for batch in (1, 3) for text in loaded.writer.texts(PROMPTS[:1] * 3, equal, batch=batch)]
    assert texts[:3] == texts[3:]
    assert len({text for pair in texts for text in pair}) == 6, "equal prompts of a file get different samples"


SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_weights_of_draws_are_those_of_transformers_warpers(settings):
    pytest.importorskip("transformers")
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
    from transformers import TopPLogitsWarper as TopP

    made = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopP, "min_p": MinPLogitsWarper}
    theirs = LogitsProcessorList([made[name](settings[name]) for name in made if name in settings])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
    found = warped(logits, Sampling(**{"temperature": 1.0, **settings})).softmax(-1)
    expected = theirs(None, logits.clone()).double().softmax(-1)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 1e-6


def test_penalised_logits_are_those_of_transformers_to_the_last_bit():
    """A token that has not occurred is chosen if its logit is the next number above the penalised one, not below."""
    transformers = pytest.importorskip("transformers")
    logits = 4 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    penalised = theirs(torch.zeros(64, 1, dtype=torch.int64), logits[:, None].clone())[:, 0]
    for towards, token in (("-inf", 0), ("inf", 1)):
        other = torch.nextafter(penalised, torch.tensor(float(towards)))
        sampler = Sampler(Sampling(repetition_penalty=1.7), [[0]] * 64, 2)
        assert sampler(torch.stack([logits, other], dim=1)) == [token] * 64


def test_penalties_are_of_tokens_of_the_prompt_and_of_the_counts_of_what_was_written():
    prompts = [[1, 2, 3, 40], [4, 4]]  # an id that the tokenizer does not have
    sampler = Sampler(Sampling(repetition_penalty=1.7), prompts, 6)
    assert [sampler(torch.ones(2, 6)) for _ in range(4)] == [[0, 0], [4, 1], [5, 2], [0, 3]]
    counted = Sampler(Sampling(frequency_penalty=0.4), prompts, 30)
    flat = torch.zeros(2, 30)
    flat[:, 7] = 1.0
    assert [counted(flat) for _ in range(3)] == [[7, 7]] * 3, "1 and 0.6 and 0.2 are above 0"
    assert counted(flat)[0] != 7


def test_draws_follow_the_weights():
    sampler = Sampler(Sampling(temperature=1.0, samples=4000), [[0]], 3)
    found = torch.tensor(sampler(torch.tensor([[0.7, 0.2, 0.1]]).log().expand(4000, 3))).bincount(minlength=3) / 4000
    assert (found - torch.tensor([0.7, 0.2, 0.1])).abs().max() < 0.03
