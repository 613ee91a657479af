"""GPTs of every kind train in every kind of layout as one process trains them.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import sampled

GPT2 = {
    "name": "gpt",
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 16,
    "max_position_embeddings": 26,
    "init_method_std": 0.1,
}
NEOX = {
    **GPT2,
    "transformer_block_type": "gpt_j",
    "position_embedding_type": "rope",
    "rotary_percentage": 0.5,
    "share_embeddings_and_output_weights": False,
}
GROUPED = {**GPT2, "num_kv_heads": 2, "activation": "swiglu", "normalization": "rmsnorm", "has_bias": False}
POST_LN = {**GPT2, "transformer_block_type": "post_ln", "normalization": "layernorm1p", "activation": "geglu"}
NORMFORMER = {**GPT2, "transformer_block_type": "normformer", "activation": "reglu"}
MODELS = {"gpt2": GPT2, "neox": NEOX, "grouped": GROUPED, "post_ln": POST_LN, "normformer": NORMFORMER}

STEPS = 8
RING, GATHER = Layout(cp=2, cp_method="ring"), Layout(cp=2, cp_method="gather", packed=True)
CASES = {
    "gpt2-tp2": ("gpt2", Layout(tp=2)),
    "gpt2-tp4-sp": ("gpt2", Layout(tp=4, sp=True)),
    "gpt2-tp2-sp-packed": ("gpt2", Layout(tp=2, sp=True, packed=True)),
    "gpt2-pp2-tied": ("gpt2", Layout(pp=2)),
    "gpt2-cp2": ("gpt2", RING),
    "gpt2-dp2-tp2": ("gpt2", Layout(dp=2, tp=2)),
    "gpt2-pp2-tp2-sp": ("gpt2", Layout(pp=2, tp=2, sp=True)),
    "neox-tp2-sp": ("neox", Layout(tp=2, sp=True)),
    "neox-pp2-tp2": ("neox", Layout(pp=2, tp=2)),
    "neox-cp2-packed": ("neox", GATHER),
    "grouped-tp4": ("grouped", Layout(tp=4)),
    "grouped-dp2-zero3": ("grouped", Layout(dp=2, zero=3)),
    "post_ln-tp2-sp": ("post_ln", Layout(tp=2, sp=True)),
    "post_ln-pp2": ("post_ln", Layout(pp=2)),
    "normformer-tp2": ("normformer", Layout(tp=2)),
    "normformer-tp2-sp": ("normformer", Layout(tp=2, sp=True)),
    "normformer-pp2-tp2": ("normformer", Layout(pp=2, tp=2)),
}


SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, SAMPLE, default=("gpt2-tp2",)))


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, case):
    kind, layout = CASES[case]
    model = {**MODELS[kind], "num_layers": layout.least_layers}
    reports = ranks(layout.world).run(train, layout, "float64", steps(STEPS), model, timeout_s=120)
    wrong = computed_wrong("float64", reports, alone(layout, "float64", steps(STEPS), model))
    assert not wrong, "\n".join(wrong)
