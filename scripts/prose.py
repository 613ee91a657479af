"""Check the wording of documentation, docstrings and messages; ``make lint`` runs it.

Usage: python scripts/prose.py [PATH ...]    without paths: every tracked file that a reader sees

Checked are Markdown outside code, and in Python docstrings, comments and string literals: help texts, errors,
descriptions of configuration keys. Tests are not, nor are decisions, which keep the words of their date.
In the README, the guide for contributors and ``docs/``, a sentence of prose has at most 25 words.
A line with ``prose: allow`` in a comment is skipped.

Vale and proselint were tried first. Vale's packages on PyPI and npm download the program from GitHub, which fails
without a network, and proselint has no rules of a project's own.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COMPARED = "such|need|room|place|end|way|one|time|longer|more|less|other|difference|slower|larger|smaller|later"

WORDS = {
    r"anew|afresh": "again",
    r"whoever": "the process that, the user who",
    r"whatever": "any, all, independent of",
    r"thereby|thereof|therein|whence": "by this, of it, so",
    r"shall": "must, is to",
    r"mend(?:s|ed|ing)?": "fix",
    r"told": "receives, is reported",
    r"tells?(?! (?:\w+ )?apart)": "report, show, describe, name",
    r"go(?:es|ing)? on(?! to)|went on": "continue, resume",
    r"in silence|without a word": "silently",
    r"to the bit": "bitwise identical",
    r"in words": "with an explanation",
    r"to be had": "available",
    rf"(?<!there\s)(?:is|are|was|were) no(?! (?:{_COMPARED})\b) [`\w]+": "is not a",
    r"learning-rate curves?": "learning-rate schedule",
    r"lies|lie|lay(?! out)|lain": "is, is stored",
    r"beside": "next to, with, compared with",
    r"others? than that": "another",
    r"as it were": "nothing: leave it out",
    r"(?:stands?|stood)(?! (?:in )?for\b)": "is",
    r"of (?:its|their|one's|your) own"
    r"(?!\s+(?!(?:and|as|at|for|from|in|of|on|or|so|that|to|under|where|with)\b)\w)": "its own, a separate",
    r"thrice|hence|thus|whilst|amongst|lest": "three times, so, while, among, so that not",
    r"what there is": "the name of the thing",
    r"ha(?:s|ve) become of": "happened to",
    r"which are there|that is there": "existing",
    r"nobody|somebody": "no process, no user, another user",
    r"hinder(?:s|ed)?": "prevent",
    r"(?:tokens|bytes|FLOP|micro-batches|one|object|entry|entries|stages?) "
    r"an? (?:token|step|rank|node|device|element|line|parameter|core|stage|second|CPU-second)"
    r"(?! (?:of its own|adds|has|must|can|begins))": "per",
    r"alike": "identical, in the same way",
    r"heed(?:s|ed)?": "use",
}
"""Pattern → what plain English says instead."""

FRAGMENT = re.compile(r"(?:Of|Nothing|As|For|By|Around|Within|That of|Those of|In the order)\b|\w+[.:;](?:\s|$)")
"""Beginnings of docstrings that are not a sentence."""

NOUN_PHRASE = re.compile(r"(?:The|What|Whether|An?|Number of|Names? of) ")
"""Beginnings that lack "Return" or "Yield" where the function gives something back."""

LONGEST = 25
"""Words that a sentence of documentation may have."""

ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
"""The beginning of an item of a list."""

NO_PROSE = re.compile(r"\s*(?:$|#|\||<|!!!|(?:[-*+]|\d+\.)\s+\[(?! ))")
"""Beginnings of lines that end a paragraph: blank lines, headings, tables, HTML and items that begin with a link."""

SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[(\[\"*_]*[A-Z0-9])")
"""The gap between two sentences."""

_GAP = r"\s+"

PATTERNS = [
    (re.compile(rf"(?<![-\w])(?:{words.replace(' ', _GAP)})\b(?!-)", re.IGNORECASE), instead)
    for words, instead in WORDS.items()
]
EXCLUDED = re.compile(r"(?:^|/)(?:tests/|conftest\.py$)|^(?:docs/decisions/.*|CHANGELOG\.md|scripts/prose\.py)$")
DOCUMENTATION = re.compile(r"^(?:README|CONTRIBUTING)\.md$|^docs/(?!decisions/|defects\.md$).*\.md$")
"""Pages whose sentences are measured."""

STYLE_GUIDE = "CONTRIBUTING.md"
"""The page that lists the words to avoid: only its sentences are measured."""


class Finding(NamedTuple):
    """A place whose wording is to be changed."""

    path: str
    line: int
    found: str
    instead: str


def main() -> int:
    """Print every finding; return 1 where there is one."""
    paths = sys.argv[1:] or tracked()
    findings = sorted({finding for path in paths for finding in check(path, Path(path).read_text())})
    for path, line, found, instead in findings:
        print(f"{path}:{line}: '{found}': write {instead}")
    print(f"{len(findings)} findings in {len(paths)} files")
    return 1 if findings else 0


def tracked() -> list[str]:
    """Return the files under version control whose text is checked."""
    done = subprocess.run(["git", "ls-files", "*.md", "*.py"], capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split() if not EXCLUDED.search(path)]


def check(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in the text of one file."""
    allowed = {number for number, line in enumerate(source.splitlines(), 1) if "prose: allow" in line}
    if DOCUMENTATION.search(path):
        for line, words, sentence in long_sentences(source):
            if line not in allowed:
                yield Finding(path, line, sentence, f"at most {LONGEST} words, not {words}")
    if path == STYLE_GUIDE:
        return
    for first, text in python_texts(source) if path.endswith(".py") else [(1, without_code(source))]:
        for pattern, instead in PATTERNS:
            for match in pattern.finditer(text):
                line = first + text.count("\n", 0, match.start())
                if line not in allowed:
                    yield Finding(path, line, " ".join(match.group().split()), instead)
    if path.endswith(".py"):
        for line, sentence in weak_docstrings(source):
            yield Finding(path, line, sentence, "what the function returns or does")


def without_code(markdown: str) -> str:
    """Return Markdown with fenced blocks, code spans and link targets blanked, line by line."""
    code = r"^( *)```.*?^ *```|`[^`\n]+`|\]\([^)\n]*\)"
    return re.sub(code, lambda match: re.sub(r"[^\n]", "_", match.group()), markdown, flags=re.DOTALL | re.MULTILINE)


def long_sentences(markdown: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, number of words and text of each sentence of prose that is longer than ``LONGEST`` words."""
    for first, paragraph in paragraphs(markdown):
        text = re.sub(r"`[^`]+`", lambda match: "Code" + "\n" * match.group().count("\n"), paragraph)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        start = 0
        for end in [match.start() for match in SENTENCE_END.finditer(text)] + [len(text)]:
            words = [word for word in text[start:end].split() if re.search(r"\w", word)]
            if len(words) > LONGEST:
                begun = start + len(text[start:end]) - len(text[start:end].lstrip())
                yield first + text.count("\n", 0, begun), len(words), " ".join(words[:6]) + " …"
            start = end


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph and list item, without code blocks, tables, headings and lists of links."""
    fences = r"^( *)```.*?^ *```|<!--.*?-->"
    blanked = re.sub(fences, lambda match: "\n" * match.group().count("\n"), markdown, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    skipped = False  # the lines that continue an item that begins with a link
    for number, line in enumerate([*blanked.splitlines(), ""], 1):
        begins = ITEM.match(line)
        if lines and (begins or NO_PROSE.match(line)):
            yield number - len(lines), "\n".join(lines)
            lines = []
        if NO_PROSE.match(line):
            skipped = begins is not None
        elif begins or not skipped:
            skipped = False
            lines.append(line[begins.end() :] if begins else line)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and source text of every comment, and of every literal with a space without expressions in braces."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    within: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            within |= {id(part) for part in ast.walk(node) if part is not node}
        elif not (isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value):
            continue
        if id(node) not in within and node.end_lineno is not None:
            rows = lines[node.lineno - 1 : node.end_lineno]
            rows[-1] = rows[-1].encode()[: node.end_col_offset].decode()
            rows[0] = rows[0].encode()[node.col_offset :].decode()
            text = re.sub(r"\{[^{}\n]*\}", lambda match: "_" * len(match.group()), "".join(rows))
            yield node.lineno, re.sub(r'"(\s*\n\s*)f?"', r" \1 ", text)  # literals side by side are one text


def weak_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and beginning of each public function's docstring that does not say what it returns or does."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if not text or not isinstance(node, ast.FunctionDef) or text.startswith("Args:"):
            continue
        decorators = [ast.unparse(each) for each in node.decorator_list]
        public = not node.name.startswith(("_", "test_")) and not any(
            "property" in decorator for decorator in decorators
        )
        returns = ast.unparse(node.returns) if node.returns else "None"
        if FRAGMENT.match(text) or (public and returns != "None" and NOUN_PHRASE.match(text)):
            yield node.body[0].lineno, text.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
