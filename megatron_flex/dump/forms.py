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

CUT = {"axis": "str", "order?": "str", "copies?": "int", "partial?": "bool"}
DIM = {"name": "str", "cuts?": [CUT], "segments?": ["int"], "keep?": "int", "uneven?": "bool"}
LAYOUT = {"dims": [DIM], "partial?": ["str"], "shared?": ["str"], "permute?": ["int"]}
PLACE = {
    "name": "str",
    "layout": LAYOUT,
    "shape": ["int|str"],
    "stage": "int",
    "chunk": "int",
    "inferred": "bool",
}
MANIFEST = {
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
    "sites": [PLACE],
    "parameters": [PLACE],
    "settings": {"*": "any"},
    "skipped": ["str"],
}
ENTRY = {
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
INDEX = {
    "rank": "int",
    "coords": {"*": "int"},
    "iteration": "int",
    "run_of": "int",
    "training": "bool",
    "microbatches": "int",
    "part": "int",
    "parts": "int",
    "layouts": [LAYOUT],
    "entries": [ENTRY],
}
TENSOR = {"dtype": "str", "shape": ["int"], "data_offsets": ["int"]}
META = {"format": "str", "index": "str", "crc": "str"}
TYPES: dict[str, type] = {
    "str": str,
    "int": int,
    "bool": bool,
    "list": list,
    "object": dict,
    "null": type(None),
    "any": object,
}
MOST = 1 << 62  # of an integer
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # which would break a line of a message


def loads(text: str | bytes) -> Any:
    """Read JSON that has no key twice and no NaN.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)


def check(value: Any, form: Form, at: str = "") -> None:
    """Hold values against a form.

    Raises:
        ValueError: they do not fit; the message says where.
    """
    if isinstance(form, str):
        types = _types(form)
        if type(value) not in types and object not in types:
            raise ValueError(f"{at or 'it'} is {str(value)[:40]!r}, and not {form}")
        if type(value) is str and CONTROL.search(value):
            raise ValueError(f"{at or 'it'} is {value[:40]!r}, and has a control character")
        if type(value) is int and not -MOST <= value <= MOST:
            raise ValueError(f"{at} is out of range")
    elif isinstance(form, list):
        check(value, "list", at)
        for one in value:
            check(one, form[0], at)
    elif "*" in form:
        check(value, "object", at)
        for key, one in value.items():
            check(one, form["*"], key[:40])
    else:
        check(value, "object", at)
        wanted, needed = _keys(form)
        if not needed <= value.keys() <= wanted.keys():
            missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - wanted.keys())
            raise ValueError(f"{at or 'it'} lacks {missing} or has too much: {str(unknown)[:80]}")
        for key, one in value.items():
            check(one, wanted[key], key)


@lru_cache
def _types(form: str) -> frozenset[type]:
    return frozenset(TYPES[name] for name in form.split("|"))


def _keys(form: dict[str, Form]) -> tuple[dict[str, Form], frozenset[str]]:
    """The forms of an object's keys, and the keys that it must have."""
    known = _KEYS.get(id(form))
    if known is None or known[0] is not form:
        wanted = {key.removesuffix("?"): one for key, one in form.items()}
        known = form, wanted, frozenset(key for key in form if not key.endswith("?"))
        _KEYS[id(form)] = known
    return known[1], known[2]


_KEYS: dict[int, tuple[dict[str, Form], dict[str, Form], frozenset[str]]] = {}


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key that is there twice")
    return out
