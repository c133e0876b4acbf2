"""Phrases that documents, messages and docstrings avoid, each with the term of the field that says it.

Phrases only, never a single English word that has a meaning of its own. Each is a regular expression of lower
case words, matched on text in which all white space is one space.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.pages import ROOT

INSTEAD = {
    r"what passes": "the activation",
    r"(nothing|something|tensors?) passed (at|there|in)": "was recorded, was captured",
    r"what was read": "the captures",
    r"what is kept": "what is recorded, or the selection",
    r"what (is|was) asked for": "the request, or name what it is",
    r"(is|are|was|were) told": "the value is passed, or recorded",
    r"who is told": "which rank receives it",
    r"(is|was|were) said (of|here|there|at|about)": "the statement itself",
    r"(can|could|may) stand( at| in front)?": "can be registered",
    r"stands? (at|behind|before|in front)": "is at, is registered at",
    r"hooks stand": "hooks are registered",
    r"(was|is|are|were|be|it) taken for": "detected as",
    r"dearer": "more expensive",
    r"(is|are|was|were|be) torn": "is incomplete",
    r"torn (iteration|file|step|dump)s?": "incomplete",
    r"(hands|handed|hand) out": "returns",
    r"hands? (values )?on (to|from)": "passes to",
    r"(behind|in front of) (the |each |every )?layers?": "the layer's output, or its input",
    r"(be|is|are) had( at| with| without)?": "is available",
    r"whole (tensor|weight|gradient|shape|activation|parameter)s?": "full tensor",
    r"(of|on|needs|to|from) the whole(?=[.,:;)']| is\b| are\b|$)": "the full tensor",
    r"the whole is (the sum|needed|not known)": "the full tensor",
    r"answers for": "tests, covers",
    r"speaks? of": "names",
    r"lets? go of": "releases",
    r"taken apart": "split, scattered",
    r"taken out(?= of the|;|,|\.)": "removed",
    r"goes on (where|with (where|what))": "resumes",
    r"(everything|what|all) a person (wants|writes)": "name it: the report, the hand-written code",
    r"nobody (waits|holds)": "no rank, no reference",
    r"somebody (imports|holds|asks)": "name who",
    r"(lie|lies) on the ranks": "are sharded over the ranks",
    r"put right": "corrected",
    r"it anew": "again",
    r"one's own": "your own",
    r"claims nothing": "does not recognize the model",
    r"(is|are|be) taken as": "is treated as",
    r"what is known of": "what is known about",
    r"right runs?": "correct run",
    r"what there is": "name it",
}
BANNED = {re.compile(rf"\b{phrase}(?!\w)"): term for phrase, term in INSTEAD.items()}
SOURCES = sorted(
    p
    for folder in ("megatron_flex", "megatron_flex_patches", "scripts")
    for p in (ROOT / folder).rglob("*.py")
)


def found(text: str) -> list[str]:
    """Each phrase of a text that has a better term, with some of what is around it."""
    flat = re.sub(r"\s+", " ", text).lower()
    return [
        f"'{match[0]}' in '...{flat[max(0, match.start() - 40) : match.end() + 40]}...': say {term}"
        for phrase, term in BANNED.items()
        for match in phrase.finditer(flat)
    ]


@cache
def texts(path: Path) -> tuple[tuple[int, str], ...]:
    """The string literals of a source file, with their lines: docstrings too, f-strings in one piece."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    return tuple(strings(tree, parts))


def strings(tree: ast.AST, parts: set[int]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield node.lineno, "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", pages.pages())
def test_pages_use_the_terms_of_the_field(page: str) -> None:
    assert not found((ROOT / page).read_text(encoding="utf-8")), page


@pytest.mark.parametrize("folder", ["megatron_flex", "megatron_flex_patches", "scripts"])
def test_messages_and_docstrings_use_the_terms_of_the_field(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for line, text in texts(path)
        for phrase in found(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "what passes at each site",
        "a place where hooks can stand",
        "the stream behind\n    layer 2",
        "iteration 3 is torn",
        "what a model was taken for, and why",
        "reads are dearer there",
        "nothing of it can be had",
        "an edit of the whole, with its gradient",
        "a loop of one's own",
        "false alarms on pairs of right runs",
    ],
)
def test_a_phrase_is_found_across_lines(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "the whole model, as one process has it",
        "a key that is mistaken for another",
        "h stands for the hidden size",
        "it had no hook",
    ],
)
def test_plain_english_is_no_phrase(text: str) -> None:
    assert not found(text)
