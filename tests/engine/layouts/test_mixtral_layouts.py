"""Mixtrals of every kind of router train in every kind of layout as one process trains them, and report the same of
their experts.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import sampled

_SIZES = {
    "name": "mixtral",
    "hidden_size": 32,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 26,
    "init_method_std": 0.1,
}


def mixtral(**moe):
    return {**_SIZES, "moe": {"num_experts": 4, **moe}}


MODELS = {
    "dropless": mixtral(dropless=True, router_aux_loss_coef=0.1),
    "pooled": mixtral(pool_router_aux_loss=True, router_aux_loss_coef=0.1),
    "capacity": mixtral(capacity_factor=0.75, router_aux_loss_coef=0.1),
    "window": {**mixtral(router_aux_loss_coef=0.1), "sliding_window": 5},
    "shuffled": mixtral(output_router_logits=False),  # nothing is dropped, so that mixing changes nothing
    "plain": mixtral(top_k=3, capacity_factor=1.0, normalize_top_k_affinities=False, output_router_logits=False),
    "frequency": mixtral(frequency=2, capacity_factor=1.25),
    "sinkhorn": mixtral(routing_algorithm="sinkhorn", top_k=1, normalize_top_k_affinities=False, capacity_factor=0.75),
}
DROPPING = {"capacity", "plain", "frequency", "sinkhorn"}

STEPS = 6
EP2, EP2_TP2 = Layout(dp=2, ep=2), Layout(dp=2, ep=2, tp=2)
EP2_TP2_SP = Layout(dp=2, ep=2, tp=2, sp=True)
CASES = {
    "dropless-ep2": ("dropless", EP2),
    "dropless-ep2-packed": ("dropless", Layout(dp=2, ep=2, packed=True)),
    "dropless-ep4": ("dropless", Layout(dp=4, ep=4)),
    "dropless-ep2-tp2": ("dropless", EP2_TP2),
    "dropless-ep2-tp2-sp": ("dropless", EP2_TP2_SP),
    "dropless-ep2-dp4": ("dropless", Layout(dp=4, ep=2)),
    "dropless-ep2-zero0": ("dropless", Layout(dp=4, ep=2, zero=0)),
    "dropless-ep2-zero2": ("dropless", Layout(dp=4, ep=2, zero=2)),
    "dropless-ep2-zero3-packed": ("dropless", Layout(dp=4, ep=2, zero=3, packed=True)),
    "dropless-pp2-packed": ("dropless", Layout(pp=2, packed=True)),
    "dropless-ep2-pp2": ("dropless", Layout(dp=2, ep=2, pp=2)),
    "dropless-pp2-vpp2": ("dropless", Layout(pp=2, vpp=2)),
    "dropless-pp2-zbv": ("dropless", Layout(pp=2, zbv=True)),
    "dropless-ep2-cp2-packed": ("dropless", Layout(cp=2, ep=2, cp_method="ring", packed=True)),
    "window-ep2-tp2-sp": ("window", EP2_TP2_SP),
    "window-ep2-cp2": ("window", Layout(cp=2, ep=2, cp_method="ring")),
    "dropless-ep2-recompute": ("dropless", Layout(dp=2, ep=2, recompute="full")),
    "dropless-ep2-pp2-recompute": ("dropless", Layout(dp=2, ep=2, pp=2, recompute="MixtralDecoderLayer")),
    "dropless-replicas": ("dropless", Layout(dp=4, replicas=2, ep=2)),
    "pooled-pp2-packed": ("pooled", Layout(pp=2, packed=True)),
    "pooled-cp2-packed": ("pooled", Layout(cp=2, cp_method="ring", packed=True)),
    "capacity-dp2": ("capacity", Layout(dp=2)),
    "capacity-ep2": ("capacity", EP2),
    "capacity-ep2-tp2": ("capacity", EP2_TP2),
    "capacity-ep2-tp2-sp-packed": ("capacity", Layout(dp=2, ep=2, tp=2, sp=True, packed=True)),
    "capacity-tp4-sp": ("capacity", Layout(tp=4, sp=True)),
    "capacity-ep2-zero3": ("capacity", Layout(dp=2, ep=2, zero=3)),
    "capacity-ep2-pp2": ("capacity", Layout(dp=2, ep=2, pp=2)),
    "capacity-pp2-vpp2-tp2-sp": ("capacity", Layout(pp=2, vpp=2, tp=2, sp=True)),
    "capacity-cp2-packed": ("capacity", Layout(cp=2, cp_method="gather", packed=True)),
    "capacity-ep2-cp2-dp2": ("capacity", Layout(dp=2, cp=2, ep=2, cp_method="ring")),
    "capacity-recompute": ("capacity", Layout(tp=2, sp=True, recompute="LlamaMLP")),
    "shuffled-dp2": ("shuffled", Layout(dp=2, shuffle=2)),
    "shuffled-dp4-by2-ep4-zero3": ("shuffled", Layout(dp=4, ep=4, shuffle=2, zero=3)),
    "shuffled-ep2-tp2-sp-packed": ("shuffled", Layout(dp=2, ep=2, tp=2, sp=True, shuffle=2, packed=True)),
    "shuffled-ep2-pp2": ("shuffled", Layout(dp=2, ep=2, pp=2, shuffle=2)),
    "shuffled-cp2-packed": ("shuffled", Layout(dp=2, cp=2, cp_method="gather", packed=True, shuffle=2)),
    "shuffled-recompute": ("shuffled", Layout(dp=2, ep=2, shuffle=2, recompute="full")),
    "shuffled-recompute-block": ("shuffled", Layout(dp=2, tp=2, sp=True, shuffle=2, recompute="LlamaMLP")),
    "plain-ep2-tp2-sp": ("plain", EP2_TP2_SP),
    "plain-pp4-packed": ("plain", Layout(pp=4, packed=True)),
    "frequency-ep2-tp2": ("frequency", EP2_TP2),
    "frequency-ep2-pp2": ("frequency", Layout(dp=2, ep=2, pp=2)),
    "frequency-pp4": ("frequency", Layout(pp=4)),
    "sinkhorn-ep2": ("sinkhorn", EP2),
    "sinkhorn-tp2-sp-packed": ("sinkhorn", Layout(tp=2, sp=True, packed=True)),
    "sinkhorn-ep2-pp2-packed": ("sinkhorn", Layout(dp=2, ep=2, pp=2, packed=True)),
}

SAMPLE = 2
FIGURES = {"expert_load_max", "expert_load_layer_max", "expert_load_min", "dropped_tokens", "router_entropy"}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, SAMPLE, default=("dropless-ep2-packed",)))


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, case):
    kind, layout = CASES[case]
    model = {**MODELS[kind], "num_layers": layout.least_layers}
    reports = ranks(layout.world).run(train, layout, "float64", steps(STEPS), model, timeout_s=120)
    reference = alone(layout, "float64", steps(STEPS), model)
    wrong = computed_wrong("float64", reports, reference)
    assert not wrong, "\n".join(wrong)
    assert reference.figures.keys() == FIGURES
    assert all(share > 0 for share in reference.figures["dropped_tokens"]) is (kind in DROPPING)
