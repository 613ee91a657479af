"""A program over NxD Core's API, and the same training in plain torch."""

import nxdt_plugin_nxd_core as nxd
import torch
from nxdt_plugin_nxd_core import parallel_layers as layers
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS = 16, 8, 4
ROWS, LENGTH, STEPS, MICRO = 8, 6, 3, 2


def make(kind, *sizes, parallel, **options):
    """A parallel layer, or the layer of torch that it extends."""
    if parallel:
        return getattr(layers, kind)(*sizes, dtype=torch.float64, **options)
    plain = nn.Embedding if kind == "ParallelEmbedding" else nn.Linear
    return plain(*sizes, dtype=torch.float64, **{key: value for key, value in options.items() if key == "bias"})


class Attention(nn.Module):
    def __init__(self, parallel, kv_size_multiplier=1):
        super().__init__()
        self.grouped = kv_size_multiplier > 1 and parallel
        sizes = WIDTH, (WIDTH, WIDTH // 2)
        options = {"parallel": parallel, "gather_output": False}
        if self.grouped:
            self.qkv = layers.GQAQKVColumnParallelLinear(
                *sizes, gather_output=False, dtype=torch.float64, kv_size_multiplier=kv_size_multiplier
            )
        else:
            self.qkv = nn.Module()
            for name, size in (("q", sizes[1][0]), ("k", sizes[1][1]), ("v", sizes[1][1])):
                setattr(self.qkv, name, make("ColumnParallelLinear", WIDTH, size, **options))
        self.out = make("RowParallelLinear", WIDTH, WIDTH, parallel=parallel, input_is_parallel=True)

    def forward(self, hidden):
        if self.grouped:
            q, k, v = self.qkv(hidden)
        else:
            q, k, v = self.qkv.q(hidden), self.qkv.k(hidden), self.qkv.v(hidden)
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, parallel, kv_size_multiplier=1, whole=True):
        super().__init__()
        self.whole = whole
        self.first_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.attention = Attention(parallel, kv_size_multiplier)
        self.second_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = make("ColumnParallelLinear", WIDTH, 4 * WIDTH, parallel=parallel, gather_output=False)
        self.down = make("RowParallelLinear", 4 * WIDTH, WIDTH, parallel=parallel, input_is_parallel=True)
        if whole:
            self.gate = make("ColumnParallelLinear", WIDTH, WIDTH, parallel=parallel)  # gathers
            self.mix = make("RowParallelLinear", WIDTH, WIDTH, parallel=parallel, bias=False)  # takes its part

    def forward(self, hidden):
        hidden = hidden + self.attention(self.first_norm(hidden))
        hidden = hidden + self.down(functional.gelu(self.up(self.second_norm(hidden))))
        return hidden if not self.whole else hidden + self.mix(torch.tanh(self.gate(hidden)))


class Decoder(nn.Module):
    """With what a user's module has around its layers: positions, a mask, tied or untied logits, a loss."""

    def __init__(self, parallel=True, kv_size_multiplier=1, tied=False, whole=True, numbers=4):
        super().__init__()
        self.embed = make("ParallelEmbedding", VOCABULARY, WIDTH, parallel=parallel)
        self.positions = nn.Embedding(LENGTH, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(parallel, kv_size_multiplier, whole) for _ in range(numbers))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.head = make("ColumnParallelLinear", WIDTH, VOCABULARY, parallel=parallel, bias=False, gather_output=False)
        self.register_buffer("places", torch.arange(LENGTH), persistent=False)
        self.parallel = parallel
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids) * WIDTH**0.5 + self.positions(self.places[: input_ids.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return logits
        logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
        if self.parallel:
            losses = layers.parallel_cross_entropy(logits, labels)
        else:
            losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": losses.mean(), "logits": logits}


def batch(step):
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def groups_of(parameters):
    """Two groups of the caller's own: matrices decay, vectors do not."""
    named = list(parameters)
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def in_plain_torch(**options):
    """Losses, gradient norms, and weights after training in one process without nxdt."""
    torch.manual_seed(7)
    model = Decoder(parallel=False, **options)
    optimizer = torch.optim.AdamW(groups_of(model.named_parameters()), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses, norms = [], []
    for step in range(STEPS):
        ids = batch(step)
        loss = model(ids, labels=ids)["loss"]
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}


def with_the_api(config=None, options=None, forward=False):
    """The same as a rank of a program over the API; returns whole weights too."""
    torch.manual_seed(7)
    nxd_config = nxd.neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": (config or {}).pop("zero", False), "max_grad_norm": 0.5}, **(config or {})
    )
    model = nxd.initialize_parallel_model(nxd_config, Decoder, **(options or {}))
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config, torch.optim.AdamW, groups_of(model.named_parameters()), lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    place = nxd_config.engine.rank_info
    losses, norms = [], []
    for step in range(STEPS):
        ids = batch(step).chunk(place.dp_size)[place.dp_rank]
        if forward:
            loss = model(ids, labels=ids)["loss"]
            loss.backward()
        else:
            loss = model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(optimizer.grad_norm))
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    nxd_config.engine.shutdown()
    return losses, norms, weights


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
