"""``nxdt data preprocess`` against the bare tokenizer: tokens per second of all cores.

Claim: at least 0.8 of the batch call of the ``tokenizers`` library with its own threads, which is given texts that are
in memory already and whose ids are thrown away; the command reads JSONL, parses it, tokenises and writes, and the time
that its processes take to start counts too. One round times the two one after the other, each in separate processes,
so that a machine that drifts slows both equally. The tokenizer is a byte-level BPE trained on the shipped text, which
is also what is tokenised. The exit status is 1 where the claim fails.

    python benchmarks/data/data_preprocess.py --rounds 5 --megabytes 60
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nxdt_core.system.paths import resolve_path

WANTED = 0.8
CORES = len(os.sched_getaffinity(0))
BARE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
with open(sys.argv[1], encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]
tokenizer.encode_batch_fast(texts[:64], add_special_tokens=False)
begin, tokens = time.perf_counter(), 0
for start in range(0, len(texts), 1024):
    for encoding in tokenizer.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False):
        tokens += len(encoding.ids)
print(tokens / (time.perf_counter() - begin))
"""


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=60, help="of JSONL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        _prepare(where, args.megabytes)
        pairs = [(_command(where), _bare(where)) for _ in range(args.rounds)]
    ratios = sorted(ours / bare for ours, bare in pairs)
    ratio = statistics.median(ratios)
    print(f"nxdt data preprocess on {CORES} cores: {statistics.median(ours for ours, _ in pairs) / 1e6:.3f} M tokens/s")
    print(f"the bare tokenizer on {CORES} cores: {statistics.median(bare for _, bare in pairs) / 1e6:.3f} M tokens/s")
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {args.rounds} rounds"
    print(f"ratio {ratio:.2f} (spread {spread}), wanted at least {WANTED}")
    return 0 if ratio >= WANTED else 1


def _prepare(where: Path, megabytes: int) -> None:
    text = resolve_path("package://nxdt_plugin_text/data/kjv.txt").read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(where / "tokenizer.json"))
    documents = "".join(json.dumps({"text": document}) + "\n" for document in text.split("\n\n"))
    (where / "corpus.jsonl").write_text(documents * max(1, megabytes * 10**6 // len(documents)))


def _command(where: Path) -> float:
    command = [
        *(sys.executable, "-m", "nxdt_core", "data", "preprocess", "--input", "corpus.jsonl", "--output-prefix", "out"),
        *("--tokenizer", "tokenizer.json", "--tokenizer-option", "eos_token=<end>", "--overwrite", "--json"),
    ]
    return float(json.loads(_said(command, where))["tokens_per_second"])


def _bare(where: Path) -> float:
    return float(_said([sys.executable, "-c", BARE, "corpus.jsonl", "tokenizer.json"], where))


def _said(command: list[str], where: Path) -> str:
    return subprocess.run(command, cwd=where, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
