"""Forms of JSON, derived from dataclasses: what a document must hold, and how it is written and read.

A form is a type's name (`any` is any plain value; `int|str` is either), a list of one form, `{"*": form}` for
any keys, or an object's keys, of which those that end in `?` may be missing.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, lru_cache, partial
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Form = Any  # str | list[Form] | dict[str, Form]
DocumentT = TypeVar("DocumentT")

FORM_TYPES: dict[str, type] = {
    "str": str,
    "int": int,
    "bool": bool,
    "list": list,
    "object": dict,
    "null": type(None),
    "any": object,
}
MAX_INTEGER = 1 << 62  # of an integer
MAX_DIMS = 64  # of a tensor, as torch has it
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # which would break a line of a message


@dataclass(frozen=True, slots=True)
class Storage:
    """How a field of a document is stored.

    Attributes:
        form: its form; None for the one of its annotation.
        optional: whether it may be missing.
        omitted: whether it is left out where it has its default.
    """

    form: Form = None
    optional: bool = False
    omitted: bool = False


def stored(*, form: Form = None, optional: bool = False, omitted: bool = False) -> dict[Any, Storage]:
    """The metadata of a field of a document; arguments as the attributes of `Storage`."""
    return {Storage: Storage(form, optional or omitted, omitted)}


@cache
def list_storage(kind: Any, brief: bool = False) -> list[tuple[Field[Any], Storage]]:
    """The fields of a document, and how each is stored.

    Args:
        kind: the dataclass.
        brief: fields without a declared form are left out where they have their default, except for the first
            one.
    """
    out = []
    for number, entry in enumerate(fields(kind)):
        left_out = brief and number > 0 and entry.default is not MISSING
        usual = Storage(optional=left_out, omitted=left_out)
        out.append((entry, entry.metadata.get(Storage, usual)))
    return out


def derive_form(kind: Any, brief: bool = False) -> dict[str, Form]:
    """The form of a dataclass; `brief` as for `list_storage`."""
    hints, out = get_type_hints(kind), {}
    for entry, storage in list_storage(kind, brief):
        form = storage.form
        if form is None:
            form = _derive_value_form(hints[entry.name], brief)
        out[entry.name + "?" * storage.optional] = form
    return out


def _derive_value_form(hint: Any, brief: bool) -> Form:
    origin, inner = get_origin(hint), [a for a in get_args(hint) if a is not type(None)]
    if origin in (Union, types.UnionType):
        forms = [_derive_value_form(a, brief) for a in inner]
        return forms[0] if len(forms) == 1 else "|".join(forms)
    if origin is Literal:
        return type(inner[0]).__name__
    if is_dataclass(hint):
        return derive_form(hint, brief)
    if origin is Mapping:
        return {"*": _derive_value_form(inner[1], brief)}
    if origin in (tuple, Sequence):
        return [_derive_value_form(inner[0], brief)]
    return "any" if hint is Any else hint.__name__


def to_json(document: Any, brief: bool = False) -> dict[str, Any]:
    """A document in plain values, by the names of its fields; `brief` as for `list_storage`."""
    out: dict[str, Any] = {}
    kind: Any = type(document)
    for entry, storage in list_storage(kind, brief):
        value = getattr(document, entry.name)
        if not storage.omitted or value != entry.default:
            out[entry.name] = _to_plain(value, brief)
    return out


def _to_plain(value: Any, brief: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_plain(item, brief) for item in value]
    return to_json(value, brief) if is_dataclass(value) else value


def stringify_nonfinite(value: Any) -> Any:
    """Return the same values, with floats that JSON lacks (NaN, infinities) as strings."""
    if isinstance(value, float) and not isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: stringify_nonfinite(item) for key, item in value.items()}
    return [stringify_nonfinite(item) for item in value] if isinstance(value, (list, tuple)) else value


def format_json(content: Any) -> str:
    """Plain values as JSON that every parser reads: NaN and infinities are `"nan"`, `"inf"` and `"-inf"`.

    Args:
        content: the values; others are written as their text.
    """
    return json.dumps(stringify_nonfinite(content), indent=1, default=str, allow_nan=False)


def from_json(kind: type[DocumentT], record: Mapping[str, Any]) -> DocumentT:
    """A document from plain values, which have its form.

    Raises:
        KeyError, TypeError, ValueError: they do not.
    """
    any_kind: Any = kind
    readers = _list_readers(any_kind)
    values = {}
    for name, value in record.items():
        read = readers[name]
        values[name] = value if read is None else read(value)
    return kind(**values)


def pick_known(kind: type[DocumentT], record: Mapping[str, Any]) -> DocumentT:
    """A document from an object of no fixed form: other keys are left out, and missing ones have defaults."""
    return kind(**{f.name: record[f.name] for f in fields(kind) if f.name in record})  # type: ignore[arg-type]


def has_fields(kind: Any, record: Mapping[str, Any]) -> bool:
    """Whether an object has all keys of a document."""
    return {f.name for f in fields(kind)} <= record.keys()


def remove_fields(record: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """An object without the keys of a document that is in it."""
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in record.items() if key not in names}


@cache
def _list_readers(kind: Any) -> dict[str, Callable[[Any], Any] | None]:
    """The name of each field, and what makes its value."""
    hints = get_type_hints(kind)
    return {entry.name: _make_reader(hints[entry.name]) for entry in fields(kind)}


def _make_reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a tuple or a document of plain values; None where they stay as they are."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        read = _make_reader(inner[0])
        return None if read is None else lambda value: None if value is None else read(value)
    if is_dataclass(hint):
        any_kind: Any = hint
        return partial(from_json, any_kind)
    if origin is tuple and inner[-1] is not ...:
        return partial(_read_integers, len(inner))
    if origin in (tuple, Sequence):
        integers = get_origin(inner[0]) is tuple and set(get_args(inner[0])) == {int}
        read_item = _make_reader(inner[0]) if is_dataclass(inner[0]) or integers else None
        if read_item is not None:
            return lambda value: tuple(map(read_item, value))
        return tuple if origin is tuple else None
    return None


def _read_integers(count: int, value: Any) -> tuple[int, ...]:
    check_form(value, ["int"])
    if len(value) != count:
        raise ValueError(f"{len(value)} integers in place of {count}")
    return tuple(value)


def load_json(text: str | bytes) -> Any:
    """Read JSON that has no key twice and no NaN.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicate_keys)


def check_form(value: Any, form: Form, at: str = "") -> None:
    """Hold values against a form.

    Raises:
        ValueError: they do not fit; the message names the position.
    """
    if isinstance(form, str):
        types = _split_types(form)
        if type(value) not in types and object not in types:
            raise ValueError(f"{_name_place(at)} is {str(value)[:40]!r}, and not {form}")
        if type(value) is str and CONTROL_CHARACTER.search(value):
            raise ValueError(f"{_name_place(at)} is {value[:40]!r}, and has a control character")
        if type(value) is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(f"{_name_place(at)} is out of range")
    elif isinstance(form, list):
        check_form(value, "list", at)
        for item in value:
            check_form(item, form[0], at)
    elif "*" in form:
        check_form(value, "object", at)
        for key, item in value.items():
            check_form(item, form["*"], key[:40])
    else:
        check_form(value, "object", at)
        forms, needed = _split_keys(form)
        if not needed <= value.keys() <= forms.keys():
            missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - forms.keys())
            raise ValueError(
                f"{_name_place(at)} has wrong keys: missing {missing}, unknown {str(unknown)[:80]}"
            )
        for key, item in value.items():
            check_form(item, forms[key], key)


def _name_place(at: str) -> str:
    """Where an error is; keys of a file may hold anything."""
    return (at if at.isprintable() else ascii(at)) or "it"


@lru_cache
def _split_types(form: str) -> frozenset[type]:
    return frozenset(FORM_TYPES[name] for name in form.split("|"))


def _split_keys(form: dict[str, Form]) -> tuple[dict[str, Form], frozenset[str]]:
    """The forms of an object's keys, and the keys that it must have."""
    known = _KEY_CACHE.get(id(form))
    if known is None or known[0] is not form:
        forms = {key.removesuffix("?"): value_form for key, value_form in form.items()}
        known = form, forms, frozenset(key for key in form if not key.endswith("?"))
        _KEY_CACHE[id(form)] = known
    return known[1], known[2]


_KEY_CACHE: dict[int, tuple[dict[str, Form], dict[str, Form], frozenset[str]]] = {}


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out
