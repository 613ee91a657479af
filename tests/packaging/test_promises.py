"""Each sentence of the pages on security and checkpoints has a row in ``promises.csv``, with the tests that show it.

A row with ``-`` is a sentence that describes, advises or links. A row of a table counts as a sentence.
"""

import ast
import csv
import re
from collections import Counter
from functools import cache
from pathlib import Path

from scripts import prose
from tests.packaging.conftest import ROOT

TABLE = Path(__file__).with_name("promises.csv")
PARTS = (
    ("docs/security.md", "## Not trusted", "(the end of the page)"),
    ("docs/checkpoints.md", "## Guarantees", "## Resume"),
    ("docs/checkpoints.md", "## Asynchronous saves", "## What is saved as the model"),
    ("docs/checkpoints.md", "## Sign checkpoints", "## Import from NxD Training"),
    ("docs/checkpoints.md", "## One run at a time", "## Sign checkpoints"),
    ("docs/parallel.md", "## Launch", "### Runs that hang"),
)
"""Pages, and the headings where the parts of them begin and end."""

NO_PROMISE = "-"

WHOLE = re.compile(r"`[^`]+`|\*\*[^*]+\.\*\*\s|\bnxdt\b")
"""Code, bold words at the beginning, a name in small letters: a sentence may begin with each, and ends in none."""


def sentences(markdown):
    """Yield each sentence of the prose, then each row of the tables without its outer bars."""
    for _, paragraph in prose.paragraphs(re.sub(r"^!\[.*", "", markdown, flags=re.MULTILINE)):
        outline = WHOLE.sub(lambda found: "X" * len(found.group()), paragraph)
        ends = [found.end() for found in prose.SENTENCE_END.finditer(outline)]
        for begin, end in zip([0, *ends], [*ends, len(paragraph)], strict=True):
            yield " ".join(paragraph[begin:end].split())
    lines = markdown.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|") and above.startswith("|") and not line.startswith("|-"):
            yield line.strip("| ")


def of_the_pages():
    """Return the page and the text of each sentence that needs a row; once where a page repeats it."""
    found = []
    for page, begin, end in PARTS:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"\n{begin}\n" in text, f"{page} has no heading '{begin}': change PARTS"
        found += [(page, each) for each in sentences(text.partition(f"\n{begin}\n")[2].partition(f"\n{end}\n")[0])]
    return [*dict.fromkeys(found)]


def rows():
    """Return the rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


@cache
def names_in(path):
    """Return the names of the tests in a file; none where it is missing."""
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return frozenset(node.name for node in tree if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def listed(sentences):
    return "\n".join(f"  {page}: {sentence}" for page, sentence in sorted(sentences))


def test_each_sentence_has_one_row_and_each_row_a_sentence():
    pages, table = Counter(of_the_pages()), Counter((row["page"], row["sentence"]) for row in rows())
    lacking, stale = pages - table, table - pages
    assert not lacking, f"{TABLE.name} needs rows with the tests of these sentences, or '-':\n{listed(lacking)}"
    assert not stale, f"{TABLE.name} has rows of sentences that the pages do not have, or twice:\n{listed(stale)}"


def test_each_row_names_tests_that_exist():
    unknown = [
        (row["sentence"], name)
        for row in rows()
        if row["tests"] != NO_PROMISE
        for name in row["tests"].split() or [""]
        if name.partition("::")[2] not in names_in(name.partition("::")[0])
    ]
    assert not unknown, "\n".join(f"no test '{name}', which is to show: {sentence}" for sentence, name in unknown)


def test_sentences_begin_where_a_reader_sees_them_begin():
    text = """
* **Lead in.** First (see `a. B`). `code` begins the second. nxdt begins the third,
  over two lines: 1.5 GiB.

| Head | Head |
|---|---|
| a. B | `c` |
| | d |

```yaml
not: prose. At all
```

![no. Prose](a.svg)
"""
    assert [*sentences(text)] == [
        "**Lead in.** First (see `a. B`).",
        "`code` begins the second.",
        "nxdt begins the third, over two lines: 1.5 GiB.",
        "a. B | `c`",
        "d",
    ]
