"""Errors of data, and of judging a model by what it writes: codes ``NXDT-D…`` and ``NXDT-E…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing


def nearby_paths(error: Any) -> dict[str, str]:
    """Return the end of a sentence: the close names of a path that is not there."""
    return {"near": f"; found nearby: {listing(error.candidates)}" if error.candidates else ""}


DataFileNotFound = NxdtError.define(
    "NXDT-D001",
    "A file or pattern of the data section that matches nothing.",
    "{key}: no file is found at '{path}'{near}.",
    "Correct the path; a relative path starts at the directory of the file that names it.",
    defaults={"candidates": (), "directory": False},
    also=lambda error: {"near": f"{', which is a directory' if error.directory else ''}{nearby_paths(error)['near']}"},
    example={"key": "data.train_files", "path": "shrot.txt", "candidates": ("short.txt",)},
)

EmptyTextFile = NxdtError.define(
    "NXDT-D002",
    "A data file without any text.",
    "{path} holds no text.",
    "Name another file, or fill it.",
)

DataFileUnreadable = NxdtError.define(
    "NXDT-D003",
    "A data file that the operating system or a decompressor refuses.",
    "{path} cannot be read: {reason}.",
    "Check that it is complete, of a format that is read, and that you may read it.",
    example={"path": "corpus.jsonl.gz", "reason": "Compressed file ended before the end-of-stream marker was reached"},
)

TextNotUtf8 = NxdtError.define(
    "NXDT-D004",
    "A data file with bytes that are not UTF-8.",
    "{path} is not UTF-8: byte {byte:#04x} at position {position} of line {line}{guess}.",
    "Convert it, and name the new file: {command}",
    also=lambda error: {
        "guess": f"; it looks like {error.encoding}, in which the text reads {error.shown!r}" if error.encoding else ""
    },
    example={
        "path": "latin.txt",
        "byte": 233,
        "position": 3,
        "line": 1,
        "encoding": "CP1252",
        "shown": "Café in the morning",
        "command": "iconv -f CP1252 -t UTF-8 latin.txt > latin.utf-8.txt",
    },
)

BadJsonLine = NxdtError.define(
    "NXDT-D005",
    "A line of a JSONL file that is not a JSON object.",
    "{path}:{line}: not a JSON object: {reason}.",
    "Each line holds one whole object{such}; correct or remove this one.",
    defaults={"example": ""},
    also=lambda error: {"such": f", such as {error.example}" if error.example else ""},
    example={
        "path": "chats.jsonl",
        "line": 2,
        "reason": "Expecting value at column 15",
        "example": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    },
)

JsonTextMissing = NxdtError.define(
    "NXDT-D006",
    "A JSON object without a string under the key that holds the text.",
    "{path}:{line}: no text under the key '{key}'; {found}.",
    "Set data.text_key to the key that holds the text, or correct the line.",
    example={"path": "corpus.jsonl", "line": 1, "key": "text", "found": "its keys are 'content'"},
)

DocumentWeightWrong = NxdtError.define(
    "NXDT-D015",
    "A JSON object whose weight in the loss is not a number from 0 to 1e30.",
    "{path}:{line}: the weight under the key '{key}' is {found}.",
    "Write a number from 0 to 1e30 there, or set data.weight_key to null.",
)

TooFewTokens = NxdtError.define(
    "NXDT-D007",
    "A split that is shorter than one sample.",
    "The {split} data has {found} tokens; one sample of sequence length {seq_length} needs {needed}.",
    "Add text, or lower the sequence length{hint}.",
    defaults={"hint": ""},
    example={"split": "train", "found": 19, "needed": 129, "seq_length": 128},
)

EmptyDataset = NxdtError.define(
    "NXDT-D008",
    "A dataset that yields no sample.",
    "The dataset yields no sample.",
    "Check which files and which split the data section names.",
)

BadBatchSize = NxdtError.define(
    "NXDT-D009",
    "Batch sizes that do not divide.",
    "A global batch of {global_batch_size} does not divide into micro-batches of {micro_batch_size} "
    "on {dp_size} data-parallel ranks.",
    "Make the global batch size a multiple of {unit} (micro-batch size x data-parallel ranks).",
    also=lambda error: {"unit": error.micro_batch_size * error.dp_size},
)

DataRankMissing = NxdtError.define(
    "NXDT-D025",
    "A loader in one of several processes that was not given the process's share of the data.",
    "GlobalBatchLoader has no dp_rank and dp_size, and this is one of {world_size} processes of a group.",
    "Build the loader with nxdt_core.train.build.batches(config, engine, dataset), or pass dp_rank and "
    "dp_size of engine.rank_info (0 and 1 where all processes read the same samples).",
)

DataChanged = NxdtError.define(
    "NXDT-D010",
    "A checkpoint whose data is not the data of this run, so that its position means nothing.",
    "The checkpoint was made with {aspect} {saved!r}; this run has {found!r}.",
    "Restore the data, tokenizer and settings of that run to resume it, or start a new run from its weights: another "
    "name=…, that checkpoint as checkpoint.resume_from, and checkpoint.weight_init_only=true.",
)

DataFileChanged = NxdtError.define(
    "NXDT-D026",
    "A data file that has another size than when the run began to read it.",
    "{path} has changed while the run reads it: it had {before} bytes, and now has {now}.",
    "Restore the file and start the same command again: the run resumes from its newest checkpoint.",
)

MixedSamples = NxdtError.define(
    "NXDT-D011",
    "Samples of one batch that do not fit together.",
    "Samples of one batch have different lengths: {lengths}.",
    "Let the dataset cut or pad every sample to the run's sequence length.",
)

DataNeedsTokenizer = NxdtError.define(
    "NXDT-D012",
    "Text without a tokenizer.",
    "The '{dataloader}' data is text, and the configuration names no tokenizer.",
    "Set data.tokenizer.model to a directory with a tokenizer.json, or data.tokenizer.library to 'byte', which needs "
    "no files.",
)

SpecialTokenMissing = NxdtError.define(
    "NXDT-D013",
    "A special token that is asked for and that the tokenizer does not have.",
    "{key} asks for a token that the tokenizer does not have ({token}).",
    "Set {key} to false, or name the token: in the tokenizer's files, or under data.tokenizer where it has a key.",
)

SplitMissing = NxdtError.define(
    "NXDT-D014",
    "A split that is asked for and that the configuration names no data for.",
    "The configuration names no {split} data.",
    "Name files for them in the data section, or ask for another split.",
    example={"split": "test"},
)

TokenizerLibraryMissing = NxdtError.define(
    "NXDT-D020",
    "A tokenizer whose library is not installed.",
    "The tokenizer '{tokenizer}' needs the package '{package}', which cannot be imported: {reason}.",
    "Run: pip install nxdt-core[{extra}]",
)

TokenizerFileNotFound = NxdtError.define(
    "NXDT-D021",
    "A tokenizer's file or directory that is not there.",
    "{key}: '{path}' is not a {wanted}{near}.",
    "Correct the path, or download the tokenizer's files there first.",
    defaults={"candidates": ()},
    also=nearby_paths,
    example={"key": "data.tokenizer.model", "path": "my-tokenizer", "wanted": "tokenizer.json or directory with one"},
)

BadTokenizerFile = NxdtError.define(
    "NXDT-D022",
    "A tokenizer's file that its library does not accept.",
    "{path} is not a {wanted}: {reason}.",
    "Replace the file with a whole one; an aborted download looks like this.",
)

BadTokenizerConfig = NxdtError.define(
    "NXDT-D023",
    "Settings of a tokenizer that exclude each other or do not fit its files.",
    "{key}: {reason}.",
    "Correct the section data.tokenizer.",
)

RanksForSentencePiece = NxdtError.define(
    "NXDT-D024",
    "A file of tiktoken's where a SentencePiece model is read; both are called ``tokenizer.model``.",
    "{path} is not a SentencePiece model: it holds lines of BPE ranks, as tiktoken reads them.",
    "Set data.tokenizer.library to tiktoken (nxdt data preprocess: --tokenizer-option library=tiktoken), and "
    "pattern and special_tokens too where they are not those of Llama 3.",
)

MixtureInSequence = NxdtError.define(
    "NXDT-D212",
    "Several training sources whose samples are not to be drawn at random.",
    "Sources {sources:list} are mixed by drawing samples at random, and data.shuffle is false.",
    "Set data.shuffle to true, or data.streaming to true, which interleaves the sources in their order.",
)

NoRecords = NxdtError.define(
    "NXDT-D305",
    "A file without records.",
    "{path} holds no records.",
    "Name another file, or fill it.",
)

BadJsonFile = NxdtError.define(
    "NXDT-D307",
    "A JSON file that is not a list of records.",
    "{path}: no list of JSON objects: {reason}.",
    "Write a list of objects, or one object per line in a file whose name ends in .jsonl.",
)

DataLibraryMissing = NxdtError.define(
    "NXDT-D308",
    "A data file or a chat template without the library that reads it.",
    "{path} needs the package '{package}', which cannot be imported: {reason}.",
    "Run: pip install 'nxdt-core[{extra}]'",
)

ArrowUnreadable = NxdtError.define(
    "NXDT-D309",
    "A file that Arrow does not accept.",
    "{path} is not an Arrow or Parquet file: {reason}.",
    "Replace it with a whole one, as 'save_to_disk' of Hugging Face's datasets writes it.",
)

ChatTemplateMissing = NxdtError.define(
    "NXDT-E001",
    "Messages, and nothing that says how they are written.",
    "{place} has messages, and the tokenizer brings no chat template.",
    "Take a tokenizer with a template, or name one where the data's section has a key for it.",
)

NoAnswerToJudge = NxdtError.define(
    "NXDT-E003",
    "A record without a question and a wanted answer.",
    "{place} cannot be judged: {reason}.",
    "Give 'messages' or 'conversations' that end with the assistant's turn, 'input' and 'output', or 'prompt' and "
    "'answer'.",
)

PromptMissing = NxdtError.define(
    "NXDT-E011",
    "A record without a prompt.",
    "{place} has neither a 'prompt', a text or a list of messages, nor a list 'messages'.",
    "Give each record one of the two.",
)

NothingToJudge = NxdtError.define(
    "NXDT-E004",
    "Neither records nor tasks.",
    "There is nothing to evaluate: {found}.",
    "Name files with held-out records, or tasks with --task.",
)

QuestionTooLong = NxdtError.define(
    "NXDT-E009",
    "A question so long that the model would see only its end.",
    "The question of {place} has {tokens} tokens, and the model sees {window} at once (its positions, or --window), "
    "what it answers included.",
    "Shorten the question or leave the record out (--limit takes the first records alone).",
)
