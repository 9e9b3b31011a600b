"""The words of the project: private language stays out, and a public name means one thing.

Words are counted in identifiers, docstrings and comments of Python files, and in all text of documents and templates.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "offramp"
BANNED = {"made", "said", "told", "asked", "nobody", "everybody", "dear"}
FORMER = {  # names of earlier versions, for which the field has other words
    *("lesson", "taught", "speaker", "wish", "wishes", "unsure", "hesitation", "doubt", "wrongness", "departures"),
    *("dearest", "loosest", "relive", "ramp", "ramps", "lexicon"),
}
ALLOWED = {  # file → words that it may hold: the error's own field, and the names of stored files
    "CONTRIBUTING.md": {"asked"},
    "CHANGELOG.md": {"lexicon"},
    "src/offramp/errors.py": {"asked"},
    "tests/test_errors.py": {"asked"},
    "tests/test_words.py": BANNED | FORMER,
}
FORMER_VERSIONS = ("tests/fixtures/make_format1.py",)  # written for an earlier version, and kept as it was
SHARED_NAMES = {  # public functions that several files define, because each file fills the same contract
    "names": "names of what a discovery package finds: backbones, engines, methods, tasks, peers, commands",
    "get": "one of them, by its name",
    "encoder": "backbones: one file a family",
    "head": "backbones",
    "decoder": "backbones",
    "make": "engines: one file or package an engine",
    "versions": "engines",
    "load_peer": "peers: one file a runtime",
    "command": "cli: one file a command",
    "predict": "files in, predictions out: in this process (commands) or on a cluster (distributed)",
}


def files(*patterns: str) -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(set(found) - set(FORMER_VERSIONS))


PYTHON = files(*(f"{folder}/**/*.py" for folder in ("src", "tests", "tests_browser", "benchmarks")))
TEXTS = files("*.md", "docs/**/*.md", "src/offramp/**/*.html", "src/offramp/**/*.js", "src/offramp/**/*.css",
              "src/offramp/**/*.yaml", "native/**/*.cpp", "native/**/*.h", "native/*.md")  # fmt: skip


def words_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and word of identifiers (their parts), comments and docstrings; other strings are data."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT):
            yield from ((token.start[0], word) for word in split_words(token.string))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node, clean=False)):
            yield from words_of_text(text, node.body[0].lineno)


def words_of_text(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), first_line):
        line = re.sub(r"\]\([^)]*\)|off-ramps?", " ", line)  # targets of links; the product's word for exits
        yield from ((number, word) for word in split_words(line))


def split_words(text: str) -> list[str]:
    """`exit_heads` and `ExitHeads` → exit, heads."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)]


def banned_words(file: str) -> list[str]:
    source = (ROOT / file).read_text(encoding="utf-8")
    words = words_of_python(source) if file.endswith(".py") else words_of_text(source)
    lines, banned = source.split("\n"), (BANNED | FORMER) - ALLOWED.get(file, set())
    return [
        f"{file}:{n} {word!r}: {lines[n - 1].strip()}" for n, word in words if word in banned and not error(lines, n)
    ]


def error(lines: list[str], number: int) -> bool:
    """Return whether a line fills or reads the error's field `asked`, the one place where that word stays."""
    nearby = "\n".join(lines[number - 1 : number + 2])
    return bool(re.search(r"\basked\b", lines[number - 1])) and bool(
        re.search(r"OfframpError\(|\.asked\b|\basked=|\basked, given =", nearby)
    )


@pytest.mark.parametrize("file", [*PYTHON, *TEXTS])
def test_no_banned_words(file: str) -> None:
    found = banned_words(file)
    assert not found, "\n".join(found)


def public_names(kinds: tuple[type[ast.AST], ...]) -> dict[str, list[str]]:
    """Return public names of classes or functions at module level, with the files that define them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):  # type: ignore[attr-defined]
                found[node.name].append(path.relative_to(PACKAGE).as_posix())  # type: ignore[attr-defined]
    return found


def repeated(found: dict[str, list[str]], exceptions: Iterable[str] = ()) -> list[str]:
    return [
        f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1 and name not in exceptions
    ]


def test_no_two_public_classes_share_a_name() -> None:
    assert repeated(public_names((ast.ClassDef,))) == []


def test_a_public_function_name_is_defined_in_one_file() -> None:
    functions = public_names((ast.FunctionDef, ast.AsyncFunctionDef))
    assert repeated(functions, SHARED_NAMES) == []
    unused = [name for name in SHARED_NAMES if len(functions[name]) < 2]
    assert unused == [], "these exceptions are no longer needed"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("made = 1", ["made"]),
        ("def is_made(): pass", ["made"]),
        ("class ThingMade: pass", ["made"]),
        ("x = 1  # what it said", ["said"]),
        ('"""The value that was\n\ntold."""', ["told"]),
        ('x = "made"', []),
        ("remade = madeira = 1", []),
    ],
)
def test_words_are_found_in_identifiers_comments_and_docstrings(source: str, words: list[str]) -> None:
    assert [word for _, word in words_of_python(source) if word in BANNED] == words
