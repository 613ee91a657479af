"""Time from the command to the first optimizer step: ``nxdt train`` against a bare script of torch.

Claim: before its first step, ``nxdt train`` takes at most 1.3 times what the script takes. Both train a Llama of one
shape, 110M weights by default, on the text of ``llama-tiny``. The script reads a TOML file, builds the model on the
meta device, gives it memory, draws weights with ``normal_``, and has AdamW and a ``DataLoader``, as torchtitan does.

Whole processes in turn; CPU and wall seconds before and until the end of the first step, as medians, and the ratio of
each pair as median and range. Then what nxdt says of its start, and what it imports that the script does not. The claim
is about wall seconds on quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.resources import files
from pathlib import Path

MARK = "START "
HEAVY = ("pytorch_lightning", "torchmetrics", "scipy", "transformers", "matplotlib", "botocore")
MOMENTS = ("before the first step", "until its end")

REPORT = textwrap.dedent(
    f"""
    import json, os, sys, time
    heavy = {HEAVY}
    def report(moment):
        row = {{"moment": moment, "cpu": time.process_time(), "wall": time.time() - float(os.environ["BENCH_BORN"])}}
        print("{MARK}" + json.dumps(row | {{"heavy": [name for name in heavy if name in sys.modules]}}), flush=True)
    """
)

PLUGIN = REPORT + textwrap.dedent(
    f"""
    from nxdt_core.api import Callback, Component, hookimpl

    class Moments(Callback):
        def __init__(self, config, run_dir): ...

        def on_fit_start(self, run):
            report("{MOMENTS[0]}")

        def on_step_end(self, run):
            report("{MOMENTS[1]}")

    @hookimpl
    def nxdt_callbacks():
        return [Component(name="moments", target=f"{{__name__}}:Moments")]
    """
)

BARE = REPORT + textwrap.dedent(
    f"""
    import argparse, tomllib
    from pathlib import Path
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    run = tomllib.loads(parser.parse_args().config.read_text())
    hidden, ffn, heads, length = (run[key] for key in ("hidden_size", "ffn_hidden_size", "heads", "seq_length"))

    def rotated(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
            self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
            self.down = nn.Linear(ffn, hidden, bias=False)

        def forward(self, x, cos, sin):
            parts = self.qkv(self.before(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            normed = self.after(x)
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(run["vocab_size"], hidden), nn.RMSNorm(hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(run["num_layers"]))
            self.head = nn.Linear(hidden, run["vocab_size"], bias=False)

        def forward(self, ids, cos, sin):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x, cos, sin)
            return self.head(self.norm(x))

    torch.manual_seed(run["seed"])
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, hidden // heads, 2) / (hidden // heads)))
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run["lr"], fused=True)
    text = torch.tensor(list(Path(run["text"]).read_bytes()))
    rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    batches = iter(DataLoader(rows, batch_size=run["batch_size"], shuffle=True))
    report("{MOMENTS[0]}")
    batch = next(batches)
    loss = F.cross_entropy(model(batch[:, :-1], cos, sin).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
    report("{MOMENTS[1]}")
    """
)


def run(command: list[str], cwd: Path) -> tuple[dict[str, dict[str, float]], list[str], str]:
    """Return the row of each moment, the heavy libraries that were imported by the last, and what nxdt says."""
    environment = {**os.environ, "BENCH_BORN": repr(time.time())}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if len(rows) != len(MOMENTS):
        sys.exit(f"{command} did not reach the end of its first step:\n{done.stderr}")
    said = "".join(line for line in done.stderr.splitlines() if line.startswith("First step after"))
    return {row["moment"]: row for row in rows}, rows[-1]["heavy"], said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    asked = parser.parse_args()
    shape = {
        "num_layers": asked.layers,
        "hidden_size": asked.hidden,
        "ffn_hidden_size": 8 * asked.hidden // 3,
        "num_attention_heads": asked.hidden // 64,
        "vocab_size": 16384,
    }
    text = files("nxdt_plugin_text").joinpath("data", "kjv.txt")
    heads = shape["num_attention_heads"]
    more = {"heads": heads, "seq_length": 128, "batch_size": 1, "seed": 1234, "lr": 1e-4, "text": str(text)}
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "moments.py").write_text(PLUGIN)
        (where / "bare.py").write_text(BARE)
        (where / "bare.toml").write_text(
            "\n".join(f"{key} = {json.dumps(value)}" for key, value in (shape | more).items())
        )
        ours = [
            *(sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", "trainer.max_steps=1"),
            *(f"model.{key}={value}" for key, value in shape.items()),
            f"model.num_kv_heads={heads}",
            *("data.global_batch_size=1", "data.micro_batch_size=1", "trainer.val_check_interval=null"),
            *("checkpoint.enabled=false", "exp_manager.create_tensorboard_logger=false"),
            *(f"plugins.local=[{where / 'moments.py'}]", "trainer.callbacks=[moments]", f"exp_manager.exp_dir={where}"),
        ]
        bare = [sys.executable, str(where / "bare.py"), str(where / "bare.toml")]
        run(ours, where), run(bare, where)  # warm the disk's cache
        pairs = [(run(ours, where), run(bare, where)) for _ in range(asked.rounds)]
    for moment in MOMENTS:
        for kind in ("cpu", "wall"):
            rows = [(a[moment][kind], b[moment][kind]) for (a, _, _), (b, _, _) in pairs]
            ratios = [one / other for one, other in rows]
            print(
                f"{kind} seconds {moment}: nxdt {statistics.median(one for one, _ in rows):.2f}, bare script "
                f"{statistics.median(other for _, other in rows):.2f}, ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} … {max(ratios):.2f}) over {len(rows)} pairs"
            )
    (_, heavy, said), (_, others, _) = pairs[-1]
    print(said)
    print(f"imported by nxdt alone: {', '.join(name for name in heavy if name not in others) or 'nothing heavy'}")


if __name__ == "__main__":
    main()
