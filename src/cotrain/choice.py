"""Names, and what they stand for: tables of entries, each with options of its own.

An entry is a frozen dataclass. Its fields are its options, with their defaults and what they mean; its docstring says
in a line what it is; calling an instance makes the thing. A table gives entries short names. It refers to them as
"package.module:Class", so that only what is chosen is imported; and such a reference in the place of a name chooses
an entry of one's own from the Python path. An option may be a choice from a table too (`option`).

All options of a configuration stand in one flat space of names, in which each occurs once.
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from cotrain.errors import Invalid, check_name

Table = Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """An entry of a table, or one's own, with its options."""

    name: str
    options: Any

    def __call__(self, *arguments: Any) -> Any:
        """What the entry makes."""
        return self.options(*arguments)

    def flat(self, kind: str) -> dict[str, Any]:
        """The name and all options, those of the options' choices too; `kind` is what the choice itself is called."""
        named: dict[str, Any] = {kind: self.name}
        for name, value in _values(self.options):
            add(named, value.flat(name) if isinstance(value, Choice) else {name: value})
        return named

    def changed(self, kind: str, default: str) -> dict[str, Any]:
        """What of `flat` is not as by default; of an entry of one's own, whose defaults may change, all."""
        named: dict[str, Any] = {} if self.name == default else {kind: self.name}
        if isinstance(self.options, Unknown) or ":" in self.name:
            return named | {
                name: value for name, value in self.flat(kind).items() if name != kind and value is not None
            }
        for known in options_of(type(self.options)):
            value = getattr(self.options, known.name)
            if isinstance(value, Choice):
                add(named, value.changed(known.name, known.default))
            elif value != known.default:
                named[known.name] = value
        return named

    def nested(self) -> dict[str, Any]:
        """The same for JSON and TOML, which tells whose options they are."""
        plain = ((name, v.nested() if isinstance(v, Choice) else _plain(v)) for name, v in _values(self.options))
        return {"name": self.name, **dict(plain)}


@dataclass(frozen=True)
class Unknown:
    """The options of somebody's own entry as a record has them: nothing is imported for it, so it makes nothing."""

    values: tuple[tuple[str, Any], ...]


class NoOption(Invalid):
    """An option that nothing chosen has."""

    def __reduce__(self):
        return NoOption, (self.field, self.value, self.valid)


class Option(NamedTuple):
    """A field of an entry."""

    name: str
    type: Any
    default: Any  # of a choice, the name
    table: Table | None  # of a choice


def option(table: Table, default: str) -> Any:
    """A field that is a choice from a table."""
    return field(default_factory=lambda: choose("", default, table, {}), metadata={"table": table, "default": default})


@cache
def options_of(entry: Any) -> tuple[Option, ...]:
    """The options of an entry."""
    hints, options = get_type_hints(entry), []
    for one in fields(entry):
        table = one.metadata.get("table")
        default = one.default if table is None else one.metadata["default"]
        options.append(Option(one.name, hints[one.name], default, table))
    return tuple(options)


def known_options(kind: str, default: str, table: Table, given: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """All options that there are with the names that are given, each with the choice that it belongs to."""
    entry = entry_of(kind, given.get(kind, default), table)
    yield kind, Option(kind, str, default, table)
    rest = {name: value for name, value in given.items() if name != kind}  # as `choose` takes it, or there were no end
    for known in options_of(entry):
        if known.table is None:
            yield kind, known
        else:
            yield from known_options(known.name, known.default, known.table, rest)


@cache
def meanings(entry: Any) -> Mapping[str, str]:
    """What the options of an entry mean: the texts below them."""
    found = {}
    parts: list[Any] = [one for one in reversed(entry.__mro__) if is_dataclass(one)]
    for part in parts:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in pairwise(tree.body):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(line.target, ast.Name):
                found[line.target.id] = ast.literal_eval(after.value)
    return found


def entry_of(kind: str, name: Any, table: Table) -> Any:
    """The entry that a name, or a reference, stands for."""
    if not isinstance(name, str) or (":" not in name):
        check_name(kind, name, table)
    module, _, attribute = table.get(name, name).partition(":")
    if name in table:
        return getattr(importlib.import_module(module), attribute)
    if "" not in sys.path:
        sys.path.append("")  # the working directory, as with `python -m`
    try:
        entry = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise Invalid(kind, name, f"it cannot be imported ({reason}); give package.module:Class") from error
    called = isinstance(entry, type) and any("__call__" in vars(part) for part in entry.__mro__)
    if not (called and is_dataclass(entry) and entry.__hash__):
        raise Invalid(kind, name, "it is not a frozen dataclass with __call__ (see docs/design.md, how to add …)")
    for one in options_of(entry):
        if one.name == "name":
            raise Invalid(kind, name, "in a record, its option name would be taken for its own; rename it")
        if one.table is None and not all(part in _FORMS for part in _parts(one.type)):
            raise Invalid(kind, name, f"its option {one.name} has none of the types {', '.join(map(_words, _FORMS))}")
    return entry


def choose(kind: str, name: Any, table: Table, given: dict[str, Any]) -> Choice:
    """The choice of an entry by name; takes from `given` the options that it has."""
    entry = entry_of(kind, name, table)
    values: dict[str, Any] = {}
    for known in options_of(entry):
        if known.table is not None:
            values[known.name] = choose(known.name, given.pop(known.name, known.default), known.table, given)
        elif known.name in given:
            values[known.name] = fitted(known.name, given.pop(known.name), known.type)
    return _made(kind, name, entry, values)


def read(kind: str, node: Any, table: Table) -> Choice:
    """The choice that `nested` has made a record of; an entry of somebody's own is not imported."""
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        raise Invalid(kind, node, "a record has its name and its options")
    name, given = node["name"], {key: value for key, value in node.items() if key != "name"}
    if name not in table and ":" in name:
        return Choice(name, Unknown(tuple((key, _frozen(key, value)) for key, value in flattened(given).items())))
    entry, values = entry_of(kind, name, table), {}
    for known in options_of(entry):
        if known.table is not None and known.name in given:
            values[known.name] = read(known.name, given.pop(known.name), known.table)
        elif known.name in given:
            values[known.name] = fitted(known.name, given.pop(known.name), known.type)
    for key, value in given.items():
        raise NoOption(key, value, f"{name} has no such option")
    return _made(kind, name, entry, values)


def _made(kind: str, name: str, entry: Any, values: dict[str, Any]) -> Choice:
    try:
        return Choice(name, entry(**values))
    except TypeError as error:  # as of an option that has no default
        raise Invalid(kind, name, str(error)) from error


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names, from tables in tables in which `name` is that of a choice."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        add(flat, flattened({name if key == "name" else key: v for key, v in value.items()}) if isinstance(value, dict)
            else {name: value})  # fmt: skip
    return flat


def add(named: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds options to others; a name may be there once."""
    for name in more.keys() & named.keys():
        raise Invalid(name, more[name], "two parts of the configuration have an option of this name; rename yours")
    named.update(more)


def fitted(name: str, value: Any, kind: Any) -> Any:
    """A value as an option of this type, if it can be one."""
    for one in _parts(kind):
        fits, convert = _FORMS[one]
        if fits(value):
            return convert(value)
    raise Invalid(name, value, f"give {' or '.join(map(_words, _parts(kind)))}")


def _parts(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that it is."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(cast(float, value)) <= sys.float_info.max


def _sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_whole, value))


_FORMS: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    bool: (lambda value: isinstance(value, bool), bool),
    int: (_whole, int),
    float: (_number, float),
    str: (lambda value: isinstance(value, str), str),
    NoneType: (lambda value: value is None, lambda value: None),
    tuple[int, ...]: (_sizes, lambda value: tuple(map(int, value))),
}


def _words(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "nothing"}
    return words.get(kind, "a list of whole numbers")


def _values(options: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(options, Unknown):
        yield from options.values
    else:
        yield from ((one.name, getattr(options, one.name)) for one in fields(options))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        raise Invalid(name, value, "a list of a record has plain values")
    return tuple(_frozen(name, one) for one in value) if isinstance(value, list) else value
