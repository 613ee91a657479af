"""Time from the command to the first optimizer step: ``nxdt train recipe:llama-tiny`` against a bare Lightning script.

Whole processes in turn; CPU and wall seconds until the first step is done, and the ratio of each pair as median and
range. Target: at most 1.2. Also says which heavy libraries nxdt imports that
Lightning does not (torchmetrics imports transformers wherever it is installed).
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
from pathlib import Path

MARK = "FIRST-STEP "

REPORT = textwrap.dedent(
    """
    import json, os, sys, time
    def first_step_done():
        heavy = [name for name in ("transformers", "sentencepiece", "tokenizers") if name in sys.modules]
        wall = time.time() - float(os.environ["BENCH_BORN"])
        row = {"cpu": time.process_time(), "wall": wall, "heavy": heavy}
        print("FIRST-STEP " + json.dumps(row), flush=True)
        os._exit(0)
    """
)

PLUGIN = REPORT + textwrap.dedent(
    """
    from nxdt_core.api import hookimpl
    @hookimpl
    def nxdt_step_end(context):
        first_step_done()
    """
)

LIGHTNING = REPORT + textwrap.dedent(
    """
    import pytorch_lightning as pl, torch
    from torch.utils.data import DataLoader, TensorDataset

    class Small(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(64, 4, 176, batch_first=True, dropout=0.0)
            self.embed, self.body = torch.nn.Embedding(272, 64), torch.nn.TransformerEncoder(layer, 4)
            self.head = torch.nn.Linear(64, 272)
        def training_step(self, batch, index):
            logits = self.head(self.body(self.embed(batch[0][:, :-1])))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        def on_train_batch_end(self, *args):
            first_step_done()

    data = DataLoader(TensorDataset(torch.randint(256, (64, 129))), batch_size=16)
    pl.Trainer(max_steps=40, accelerator="cpu", devices=1, enable_progress_bar=False,
               enable_model_summary=False, enable_checkpointing=False).fit(Small(), data)
    """
)


def run(command: list[str], cwd: Path) -> dict[str, float]:
    import time

    environment = {**os.environ, "BENCH_BORN": repr(time.time()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        sys.exit(f"{command} did not reach its first step:\n{done.stderr}")
    return json.loads(lines[0].removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "first_step_plugin.py").write_text(PLUGIN)
        (where / "bare_lightning.py").write_text(LIGHTNING)
        ours = [
            *(sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny"),
            f"plugins.local=[{where / 'first_step_plugin.py'}]",
            f"exp_manager.exp_dir={where}",
        ]
        bare = [sys.executable, str(where / "bare_lightning.py")]
        run(ours, where), run(bare, where)  # warm the disk's cache
        pairs = [(run(ours, where), run(bare, where)) for _ in range(rounds)]
    for kind in ("cpu", "wall"):
        ratios = [a[kind] / b[kind] for a, b in pairs]
        print(
            f"{kind} seconds to the first step: nxdt {statistics.median(a[kind] for a, _ in pairs):.2f}, "
            f"bare Lightning {statistics.median(b[kind] for _, b in pairs):.2f}, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) over {rounds} pairs; target 1.2"
        )
    extra = sorted(set(pairs[0][0]["heavy"]) - set(pairs[0][1]["heavy"]))
    print(f"imported by nxdt and not by bare Lightning: {', '.join(extra) or 'nothing heavy'}")


if __name__ == "__main__":
    main()
