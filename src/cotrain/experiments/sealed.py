"""Arrays and notes in a file that executes nothing and knows when it is damaged.

It is a safetensors file. Its metadata begin with a checksum, which is that of the whole file with zeros in its place;
then follow the notes, as JSON. So equal contents have equal files, to the byte.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cotrain.errors import Damaged, Invalid
from cotrain.experiments import provenance
from cotrain.experiments.result import NUMERICS

LIMIT = 1 << 34  # bytes
HEADER = b'{"__metadata__":{"cotrain":"'  # after 8 bytes for the length of the header
DIGEST = slice(8 + len(HEADER), 8 + len(HEADER) + 64)
DTYPES = {
    "BOOL": np.bool_,
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(jax.numpy.bfloat16),
    "C64": np.dtype("c8"),
}


def seal(arrays: dict[str, Any], version: int, notes: dict[str, Any]) -> bytes:
    """The file's bytes; the notes get the versions of the format, of the numbers and of the software around them."""
    notes = {"format": version, "numerics": NUMERICS, **notes, "software": provenance.software()}
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype not in map(np.dtype, DTYPES.values()):
            raise Invalid(name, array.dtype.name, "numbers of this type cannot be kept in a file")
    data = save(plain, {"cotrain": "0" * 64 + json.dumps(notes, allow_nan=False)})
    assert data[8 : DIGEST.start] == HEADER
    return b"".join((data[: DIGEST.start], hashlib.sha256(data).hexdigest().encode(), data[DIGEST.stop :]))


def unseal(data: bytes, version: int, kind: str, path: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `seal` has made a file of: its notes and arrays, which are views of the data."""
    view = memoryview(data)
    if view[8 : DIGEST.start] != HEADER or len(view) < DIGEST.stop:
        raise Damaged(path, f"it is not a {kind}, or was cut short")
    digest = hashlib.sha256(view[: DIGEST.start])
    digest.update(b"0" * 64)
    digest.update(view[DIGEST.stop :])
    if digest.hexdigest().encode() != view[DIGEST]:
        raise Damaged(path, "its checksum does not agree with its content")
    try:
        header = json.loads(bytes(view[8 : 8 + int.from_bytes(view[:8], "little")]))
        notes = json.loads(header["__metadata__"]["cotrain"][64:])
        found = notes["format"]
        if (other := notes.get("kind", "checkpoint")) != kind:
            raise Invalid(kind, str(path), f"it is another kind of file, {other!r:.40}")
        if not isinstance(found, int):
            raise ValueError(f"format {found!r:.40}")
        if found != version:
            other = "a newer" if found > version else "an older"
            raise Invalid(kind, str(path), f"its format is {found}, of {other} cotrain; this reads {version}")
        return notes, {name: _array(entry) for name, entry in deserialize(data)}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, Invalid):
            raise
        raise Damaged(path, f"it is not a {kind} ({error!r:.100})") from error


def plain(leaf: Any) -> Any:
    """A leaf of a state as numbers, or its shape: random keys are some too."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return (
        jax.eval_shape(jax.random.key_data, leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else jax.random.key_data(leaf)
    )


def named(prefix: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree as numbers, or their shapes, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": plain(leaf) for path, leaf in leaves}


def filled(prefix: str, like: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The tree with arrays in the place of its shapes."""

    def leaf(path: Any, shape: Any) -> Any:
        array = arrays[f"{prefix}{jax.tree_util.keystr(path)}"]
        return (
            jax.random.wrap_key_data(jax.numpy.asarray(array), impl=_implementation(shape))
            if jax.numpy.issubdtype(shape.dtype, jax.dtypes.prng_key)
            else array
        )

    return jax.tree_util.tree_map_with_path(leaf, like)


def _implementation(keys: jax.ShapeDtypeStruct) -> Any:
    """The generator that random keys are for."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), keys)
    return found[0]


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """What is of another type or shape than is wanted; None if all is as it should be."""
    for name in sorted(wanted.keys() | found.keys()):
        there, fits = (_form(known.get(name)) for known in (found, wanted))
        if there != fits:
            shown = name if name.isprintable() else ascii(name)  # which somebody else may have chosen
            return f"{shown:.200} is {there}, and {fits} is wanted"
    return None


def _array(entry: dict[str, Any]) -> np.ndarray:
    array = np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("a value is neither true nor false")
    return array


def _form(array: Any) -> str:
    return "absent" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"
