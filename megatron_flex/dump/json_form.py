"""The form of a dump's JSON, in plain data: what is read is held against it, and a test freezes it.

Whoever changes it gives `VERSION` in files.py another number. A form is a type's name (`any` is any plain
value; `int|str` is either), a list of one form, `{"*": form}` for any keys, or an object's keys, of which
those that end in `?` may be missing.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

Form = Any  # str | list[Form] | dict[str, Form]

CUT_FORM = {"axis": "str", "order?": "str", "copies?": "int", "partial?": "bool"}
DIM_FORM = {"name": "str", "cuts?": [CUT_FORM], "segments?": ["int"], "keep?": "int", "uneven?": "bool"}
LAYOUT_FORM = {"dims": [DIM_FORM], "partial?": ["str"], "shared?": ["str"], "permute?": ["int"]}
SITE_FORM = {
    "name": "str",
    "layout": LAYOUT_FORM,
    "shape": ["int|str"],
    "stage": "int",
    "chunk": "int",
    "inferred": "bool",
}
MANIFEST_FORM = {
    "format": "str",
    "version": "int",
    "run": "int",
    "created": "str",
    "versions": {"*": "str"},
    "framework": "str",
    "axes": {"*": "int"},
    "experts": {"*": "int"},
    "ranks": ["list"],
    "model": {"*": "any"},
    "identity": "str",
    "sites": [SITE_FORM],
    "parameters": [SITE_FORM],
    "settings": {"*": "any"},
    "skipped": ["str"],
}
ENTRY_FORM = {
    "site": "str",
    "kind": "str",
    "microbatch": "int",
    "call": "int",
    "layout": "int",
    "shape": ["int"],
    "dtype": "str",
    "picked": "bool",
    "span": "list|null",
    "crc": "int",
    "route?": "object|null",
    "turn": "int",
}
INDEX_FORM = {
    "rank": "int",
    "coords": {"*": "int"},
    "iteration": "int",
    "run_of": "int",
    "training": "bool",
    "microbatches": "int",
    "part": "int",
    "parts": "int",
    "layouts": [LAYOUT_FORM],
    "entries": [ENTRY_FORM],
}
TENSOR_FORM = {"dtype": "str", "shape": ["int"], "data_offsets": ["int"]}
META_FORM = {"format": "str", "index": "str", "crc": "str"}
FORM_TYPES: dict[str, type] = {
    "str": str,
    "int": int,
    "bool": bool,
    "list": list,
    "object": dict,
    "null": type(None),
    "any": object,
}
MOST_INTEGER = 1 << 62  # of an integer
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # which would break a line of a message


def load_json(text: str | bytes) -> Any:
    """Read JSON that has no key twice and no NaN.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicate_keys)


def check_form(value: Any, form: Form, at: str = "") -> None:
    """Hold values against a form.

    Raises:
        ValueError: they do not fit; the message says where.
    """
    if isinstance(form, str):
        types = _split_types(form)
        if type(value) not in types and object not in types:
            raise ValueError(f"{at or 'it'} is {str(value)[:40]!r}, and not {form}")
        if type(value) is str and CONTROL_CHARACTER.search(value):
            raise ValueError(f"{at or 'it'} is {value[:40]!r}, and has a control character")
        if type(value) is int and not -MOST_INTEGER <= value <= MOST_INTEGER:
            raise ValueError(f"{at} is out of range")
    elif isinstance(form, list):
        check_form(value, "list", at)
        for one in value:
            check_form(one, form[0], at)
    elif "*" in form:
        check_form(value, "object", at)
        for key, one in value.items():
            check_form(one, form["*"], key[:40])
    else:
        check_form(value, "object", at)
        wanted, needed = _split_keys(form)
        if not needed <= value.keys() <= wanted.keys():
            missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - wanted.keys())
            raise ValueError(f"{at or 'it'} lacks {missing} or has too much: {str(unknown)[:80]}")
        for key, one in value.items():
            check_form(one, wanted[key], key)


@lru_cache
def _split_types(form: str) -> frozenset[type]:
    return frozenset(FORM_TYPES[name] for name in form.split("|"))


def _split_keys(form: dict[str, Form]) -> tuple[dict[str, Form], frozenset[str]]:
    """The forms of an object's keys, and the keys that it must have."""
    known = _KEY_CACHE.get(id(form))
    if known is None or known[0] is not form:
        wanted = {key.removesuffix("?"): one for key, one in form.items()}
        known = form, wanted, frozenset(key for key in form if not key.endswith("?"))
        _KEY_CACHE[id(form)] = known
    return known[1], known[2]


_KEY_CACHE: dict[int, tuple[dict[str, Form], dict[str, Form], frozenset[str]]] = {}


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key that is there twice")
    return out
