"""Methods in words: what a learner's file says of its method, and the method made anew of it.

A description is JSON: numbers and arrays as they are, records by the name of their class and their fields, functions by
name. Reading one makes nothing but records of this package, functions of `jax.nn` and Optax, and what the reader hands
in as their own: a file's word imports nothing.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from cotrain.data.stream import Spec
from cotrain.errors import Invalid
from cotrain.networks.network import Network, build

LIBRARIES: dict[str, Any] = {"jax.nn": jax.nn, "optax": optax}
PARTS = ("cotrain.networks", "cotrain.methods", "cotrain.memory")
MADE_OF = ("spec", "makes", "experts", "ks", "router", "one_head", "aggregation", "activation")  # a network
NUMBERS = "biuf"


def describe(thing: Any) -> Any:
    """A method, or a part of one, in words."""
    if thing is None or isinstance(thing, bool | int | str) or (isinstance(thing, float) and math.isfinite(thing)):
        return thing
    if isinstance(thing, Network):
        makes, experts, ks = zip(*((layer.make, layer.experts, layer.k) for layer in thing.layers), strict=True)
        parts = (
            tuple(thing.spec),
            makes,
            experts,
            ks,
            thing.router,
            thing.one_head,
            thing.aggregation,
            thing.activation,
        )
        return {"network": {name: describe(part) for name, part in zip(MADE_OF, parts, strict=True)}}
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        array = np.asarray(thing)
        if array.dtype.kind in NUMBERS and array.dtype.itemsize <= 8:
            return {"array": array.dtype.name, "shape": list(array.shape), "values": array.ravel().tolist()}
    if isinstance(thing, functools.partial):
        return {"partial": describe(thing.func), "of": describe(thing.args), "with": describe(thing.keywords)}
    if isinstance(thing, tuple) and not hasattr(thing, "_fields"):
        return [describe(part) for part in thing]
    if isinstance(thing, dict) and all(isinstance(name, str) for name in thing):
        return {"table": {name: describe(part) for name, part in thing.items()}}
    if (names := _fields(type(thing))) is not None:
        return {"is": _name_of(type(thing)), "with": {name: describe(getattr(thing, name)) for name in names}}
    if callable(thing):
        return {"name": _name_of(thing)}
    raise _nameless(thing)


def rebuild(words: Any, own: Iterable[Any] | None = ()) -> Any:
    """What `describe` has put in words; `own` are modules, classes and functions of the reader's own in it.

    With None, whatever is named is imported.
    """
    known = _Importing() if own is None else {_own_name(one): one for given in own for one in _all_of(given)}
    return _rebuilt(words, known)


class _Importing(dict[str, Any]):
    """All that can be imported, by name."""

    def __contains__(self, name: object) -> bool:
        return str(name).partition(":")[0] not in LIBRARIES

    def __missing__(self, name: str) -> Any:
        module, _, attribute = name.partition(":")
        return functools.reduce(getattr, attribute.split("."), import_module(module))


def _rebuilt(words: Any, own: dict[str, Any]) -> Any:
    if words is None or isinstance(words, bool | int | str | float):
        return words
    if isinstance(words, list):
        return tuple(_rebuilt(part, own) for part in words)
    match words:
        case {"network": dict(parts)} if parts.keys() == set(MADE_OF):
            made = {name: _rebuilt(part, own) for name, part in parts.items()}
            spec = Spec(*made.pop("spec"))
            return build(spec, *(made.pop(name) for name in MADE_OF[1:5]), **made)
        case {"array": str(kind), "shape": list(shape), "values": list(values)} if np.dtype(kind).kind in NUMBERS:
            return jax.numpy.asarray(np.array(values, kind).reshape(shape))
        case {"partial": function, "of": given, "with": {"table": dict(named)}}:
            made = {name: _rebuilt(part, own) for name, part in named.items()}
            return functools.partial(_rebuilt(function, own), *_rebuilt(given, own), **made)
        case {"table": dict(parts)}:
            return {name: _rebuilt(part, own) for name, part in parts.items()}
        case {"is": str(name), "with": dict(parts)}:
            return _record(_named(name, own), {key: _rebuilt(part, own) for key, part in parts.items()})
        case {"name": str(name)}:
            return _named(name, own)
    raise ValueError(f"no description: {words!r:.80}")


def _record(kind: Any, values: dict[str, Any]) -> Any:
    """An instance of a class of records, with these values in its fields."""
    names = _fields(kind)
    if names is None or set(names) != values.keys():
        raise ValueError(f"{kind!r:.80} has other fields than {', '.join(values)}")
    if issubclass(kind, tuple) or not issubclass(kind, eqx.Module):
        return kind(**values)
    made = object.__new__(kind)  # a module may make its fields of other arguments
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _fields(kind: type) -> list[str] | None:
    """The names of a record's fields; None if it is none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ())) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _name_of(thing: Any) -> str:
    """The name of a class or function, by which it can be found again."""
    for library, module in LIBRARIES.items():
        name = getattr(thing, "__name__", "")
        if getattr(module, name or "-", None) is thing:
            return f"{library}:{name}"
    try:
        name = _own_name(thing)
        found = functools.reduce(getattr, name.partition(":")[2].split("."), import_module(thing.__module__))
    except (ImportError, AttributeError):
        raise _nameless(thing) from None
    if found is not thing:
        raise _nameless(thing)
    return name


def _own_name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _all_of(given: Any) -> list[Any]:
    """What somebody hands in: a class or a function, or all that a module defines."""
    if not isinstance(given, ModuleType):
        return [given]
    return [
        one
        for one in vars(given).values()
        if (inspect.isclass(one) or inspect.isfunction(one)) and one.__module__ == given.__name__
    ]


def _named(name: str, own: dict[str, Any]) -> Callable[..., Any]:
    """What a name stands for."""
    if name in own:
        return own[name]
    module, _, attribute = name.partition(":")
    if module in LIBRARIES and not attribute.startswith("_") and attribute in dir(LIBRARIES[module]):
        found = getattr(LIBRARIES[module], attribute)
        if callable(found) and not inspect.isclass(found):
            return found
    if module.startswith(PARTS) and attribute.isidentifier():
        found = getattr(import_module(module), attribute, None)  # of this package alone
        if callable(found) and getattr(found, "__module__", None) == module:
            return found
    raise Invalid("own", name, "it is not of this package; if you trust it, hand it in: load_learner(path, own=[…])")


def _nameless(thing: Any) -> Invalid:
    what = f"{type(thing).__name__} {thing!r:.60}"
    return Invalid("method", what, "it cannot be saved: give a function or a record with a name in a module")
