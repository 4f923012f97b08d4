"""Methods in words: what a learner's file says of its method, and the method made anew of it.

A description is JSON: numbers and arrays as they are, records by the name of their class and their fields, functions by
name. Reading one makes nothing but records of this package, functions of `jax.nn` and Optax, and what the reader hands
in as their own: a file's word imports nothing else, and takes no more memory than it has bytes.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cotrain.data.stream import Spec
from cotrain.errors import Invalid, check_name, check_positive
from cotrain.experiments.sound import is_number
from cotrain.methods.descent import Rates
from cotrain.networks.layer import AGGREGATIONS
from cotrain.networks.network import Network, build

LIBRARIES: dict[str, Any] = {"jax.nn": jax.nn, "optax": optax}
PARTS = ("cotrain.networks", "cotrain.methods", "cotrain.memory")
MADE_OF = ("spec", "makes", "experts", "ks", "router", "one_head", "aggregation", "activation")  # a network
ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {"array": jnp.asarray, "numpy": np.asarray, "number": lambda a: a[()]}
PLAIN = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int)}  # what an array's values are in JSON, by its kind


def describe(thing: Any) -> Any:
    """A method, or a part of one, in words."""
    if thing is None or type(thing) in (bool, str) or is_number(thing):
        return thing
    if type(thing) is Network:
        makes, experts, ks = zip(*((layer.make, layer.experts, layer.k) for layer in thing.layers), strict=True)
        rest = (getattr(thing, name) for name in MADE_OF[4:])
        parts = zip(MADE_OF, (tuple(thing.spec), makes, experts, ks, *rest), strict=True)
        return {"network": {name: describe(part) for name, part in parts}}
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        return _described_array(thing)
    if type(thing) is functools.partial:
        return {"partial": describe(thing.func), "of": describe(thing.args), "with": describe(thing.keywords)}
    if type(thing) is tuple:
        return [describe(part) for part in thing]
    if type(thing) is dict and all(type(name) is str for name in thing):
        return {"table": {name: describe(part) for name, part in thing.items()}}
    if (names := _fields(type(thing))) is not None:
        return {"is": _name_of(type(thing)), "with": {name: describe(getattr(thing, name)) for name in names}}
    if callable(thing):
        return {"name": _name_of(thing)}
    raise _nameless(thing)


def _described_array(array: Any) -> dict[str, Any]:
    """An array, and whether it is JAX's, NumPy's, or a number of NumPy's."""
    what = "array" if isinstance(array, jax.Array) else "number" if isinstance(array, np.generic) else "numpy"
    known = getattr(array.dtype, "kind", "") in PLAIN and array.dtype.itemsize <= 8
    if not known or not np.isfinite(values := np.asarray(array)).all():
        raise Invalid("method", f"{array!r:.60}", "it cannot be saved: give finite numbers of at most 64 bits")
    return {what: values.dtype.name, "shape": list(values.shape), "values": values.ravel().tolist()}


def rebuild(words: Any, own: Mapping[str, Any] | None) -> Any:
    """What `describe` has put in words; `own` are the reader's own classes and functions in it, by name (see `known`).

    With None, whatever is named is imported.
    """
    return _rebuilt(words, _Importing() if own is None else own)


def known(own: Iterable[Any]) -> dict[str, Any]:
    """What somebody hands in, by name: classes and functions, and all that modules define."""
    if not isinstance(own, Iterable):
        raise Invalid("own", own, "give a list of modules, classes and functions")
    found = {}
    for given in own:
        if isinstance(given, ModuleType):
            defined = {f"{given.__name__}:{name}": one for name, one in vars(given).items()}
            found |= {name: one for name, one in defined.items() if _own_name(one) == name}
        elif (name := _own_name(given)) is not None:
            found[name] = given
        else:
            raise Invalid("own", given, "give modules, classes and functions")
    return found


class _Importing(dict[str, Any]):
    """All that can be imported, by name."""

    def __contains__(self, name: object) -> bool:
        return str(name).partition(":")[0] not in LIBRARIES

    def __missing__(self, name: str) -> Any:
        module, _, attribute = name.partition(":")
        return functools.reduce(getattr, attribute.split("."), import_module(module))


def _rebuilt(words: Any, own: Mapping[str, Any]) -> Any:
    if words is None or type(words) in (bool, str) or is_number(words):
        return words
    if isinstance(words, list):
        return tuple(_rebuilt(part, own) for part in words)
    match words:
        case {"network": dict(parts)} if parts.keys() == set(MADE_OF):
            return _network(**{name: _rebuilt(part, own) for name, part in parts.items()})
        case {"shape": list(shape), "values": list(values)} if len(what := words.keys() & ARRAYS.keys()) == 1:
            [name] = what
            return ARRAYS[name](_array(words[name], shape, values))
        case {"partial": function, "of": list(given), "with": {"table": dict(named)}}:
            made = {name: _rebuilt(part, own) for name, part in named.items()}
            call = _rebuilt(function, own)
            if str(getattr(call, "__module__", None)).startswith("cotrain."):
                raise ValueError("no function of this package is called with what a file says")
            return functools.partial(call, *_rebuilt(given, own), **made)
        case {"table": dict(parts)}:
            return {name: _rebuilt(part, own) for name, part in parts.items()}
        case {"is": str(name), "with": dict(parts)}:
            return _record(_named(name, own), {key: _rebuilt(part, own) for key, part in parts.items()})
        case {"name": str(name)}:
            return _named(name, own)
    raise ValueError(f"no description: {words!r:.80}")


def _network(spec: Any, aggregation: Any, one_head: Any, **parts: Any) -> Network:
    shape, classes, tasks, widths = spec
    if not (isinstance(shape, tuple) and isinstance(widths, tuple)):
        raise ValueError(f"no network has shape {shape!r:.40} and widths {widths!r:.40}")
    _check_static((parts["makes"], parts["activation"]))
    for size in (*shape, classes, tasks, *widths):
        check_positive("spec", size)
    if len(widths) not in (0, tasks) or max(widths, default=0) > classes or not isinstance(one_head, bool):
        raise ValueError(f"no network has widths {widths!r:.40} and one_head {one_head!r:.40}")
    check_name("aggregation", aggregation, AGGREGATIONS)
    makes, experts, ks, router = (parts.pop(name) for name in MADE_OF[1:5])
    made = Spec(shape, classes, tasks, widths)
    return build(made, makes, experts, ks, router, one_head=one_head, aggregation=aggregation, **parts)


def _array(kind: Any, shape: list[Any], values: list[Any]) -> np.ndarray:
    """An array of as many values as there are, all of them finite numbers."""
    dtype = np.dtype(kind) if isinstance(kind, str) else None
    if dtype is None or dtype.name != kind or not all(type(value) in PLAIN.get(dtype.kind, ()) for value in values):
        raise ValueError(f"no array of {kind!r:.40}")
    sizes = [check_positive("shape", size, least=0) for size in shape]
    if math.prod(sizes) != len(values) or not np.isfinite(array := np.array(values, dtype)).all():
        raise ValueError(f"no array of shape {sizes!r:.40}")
    return array.reshape(sizes)


def _record(kind: Any, values: dict[str, Any]) -> Any:
    """An instance of a class of records, with these values in its fields."""
    names = _fields(kind) if isinstance(kind, type) else None
    if names is None or set(names) != values.keys() or kind is Network:
        raise ValueError(f"{kind!r:.80} has other fields than {list(values)!r:.80}")
    annotated = Rates.__annotations__ if kind is Rates else {}
    if issubclass(kind, eqx.Module):
        annotated = {field.name: field.type for field in dataclasses.fields(kind)}
        for field in dataclasses.fields(kind):
            if field.metadata.get("static"):
                _check_static(values[field.name])
    if wrong := [name for name, wanted in annotated.items() if not _is_of(values[name], wanted)]:
        raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r:.40}")
    if not issubclass(kind, eqx.Module):
        return kind(**values)
    made = object.__new__(kind)  # a module may make its fields of other arguments
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _is_of(value: Any, wanted: Any) -> bool:
    """Whether a field's value is of its type, as far as the simple ones are concerned."""
    if wanted in (bool, int, str):
        return type(value) is wanted
    if wanted is Rates:
        return isinstance(value, Rates)
    choices = get_args(wanted) or (wanted,)
    if any(getattr(choice, "dim_str", None) == "" for choice in choices):  # jaxtyping's word for a single number
        array = isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == 0
        return array or is_number(value) or (value is None and type(None) in choices)
    return True


def _check_static(value: Any) -> None:
    """Refuses arrays in what JAX knows a program by: comparing those fails, for all programs like it ever after."""
    if isinstance(value, np.ndarray | jax.Array):
        raise ValueError("it has an array where there can be none")
    if isinstance(value, tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
    else:
        parts = (getattr(value, name) for name in _fields(type(value)) or ())
    for part in parts:
        _check_static(part)


def _fields(kind: type) -> list[str] | None:
    """The names of a record's fields, but those that it makes itself; None if it is none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init or issubclass(kind, eqx.Module)]
    return list(getattr(kind, "_fields", ())) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _name_of(thing: Any) -> str:
    """The name of a class or function, by which it can be found again."""
    for library, module in LIBRARIES.items():
        name = getattr(thing, "__name__", "")
        if getattr(module, name or "-", None) is thing:
            return f"{library}:{name}"
    name = _own_name(thing) or ":"
    try:
        found = functools.reduce(getattr, name.partition(":")[2].split("."), import_module(name.partition(":")[0]))
    except (ImportError, AttributeError, ValueError):
        raise _nameless(thing) from None
    if found is not thing:
        raise _nameless(thing)
    return name


def _own_name(thing: Any) -> str | None:
    """The module and the name in it by which a class or function goes; None if it is neither."""
    module, name = (getattr(thing, part, None) for part in ("__module__", "__qualname__"))
    return f"{module}:{name}" if callable(thing) and isinstance(module, str) and isinstance(name, str) else None


def _named(name: str, own: Mapping[str, Any]) -> Callable[..., Any]:
    """What a name stands for."""
    if name in own:
        return own[name]
    module, _, attribute = name.partition(":")
    if module in LIBRARIES and not attribute.startswith("_") and attribute in dir(LIBRARIES[module]):
        found = getattr(LIBRARIES[module], attribute)
        if callable(found) and not inspect.isclass(found) and (module != "optax" or _is_optimizer(found)):
            return found
    if f"{module}.".startswith(tuple(f"{part}." for part in PARTS)) and module.replace(".", "").isidentifier():
        with suppress(ImportError):  # as of a newer version's
            found = getattr(import_module(module), attribute, None)  # of this package alone
            if callable(found) and getattr(found, "__module__", None) == module and not _is_options(found):
                return found
    raise Invalid(
        "own", f"{name:.80}", "it is not of this package; if you trust it, hand it in: load_learner(path, own=[…])"
    )


def _is_optimizer(function: Callable[..., Any]) -> bool:
    """Whether it makes an optimizer of a learning rate: other functions of Optax compute with what they are given."""
    with suppress(ValueError):  # of some there is no telling
        return next(iter(inspect.signature(function).parameters), None) == "learning_rate"
    return False


def _is_options(thing: Any) -> bool:
    """Whether it is made to call what it is given: options of the command line, of which no method is made."""
    if not (isinstance(thing, type) and dataclasses.is_dataclass(thing)):
        return False
    return thing.__module__ != "cotrain.networks.experts" and not issubclass(thing, eqx.Module)


def _nameless(thing: Any) -> Invalid:
    what = f"{type(thing).__name__} {thing!r:.60}"
    return Invalid("method", what, "it cannot be saved: give a function or a record with a name in a module")
