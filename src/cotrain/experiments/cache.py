"""Compiled programs are kept on disk and shared: between worker processes, and from one run to the next."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from platformdirs import user_cache_path

from cotrain.experiments.config import Config, all_options

EVERYTHING = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


def share_compiled() -> None:
    """Keeps compiled programs in the user's cache, or where JAX_COMPILATION_CACHE_DIR says.

    A directory that cannot be written keeps nothing, and stops no run. The cache grows without bounds, by less than a
    megabyte for each shape of a run, since JAX bounds it only with another package (filelock); it may be deleted.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return
    if jax.config.values["jax_compilation_cache_dir"] is None:
        directory = user_cache_path("cotrain") / "compiled"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        if not os.access(directory, os.W_OK | os.X_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    for option, value in EVERYTHING.items():
        if option.upper() not in os.environ:
            jax.config.update(option, value)


def shape_of(config: Config, chunk: int | None, seeds: int = 1) -> str:
    """A name that runs share if one compiled program does for all of them; rates and noise are its arguments."""
    flat = config.flat
    kinds = {option.name: option.type for _, option in all_options(flat)}
    traced = {name for name, kind in kinds.items() if kind in (float, float | None)}
    static = {name: value for name, value in flat.items() if name not in traced | {"stream_seed"}}
    return hashlib.sha256(repr((static, chunk, seeds)).encode()).hexdigest()[:16]


@contextmanager
def turn_to_compile(shape: str) -> Iterator[None]:
    """Waits until no other process compiles this shape: what it has compiled is then in the cache.

    The lock is the operating system's and ends with its process, however that ends.
    """
    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None or not jax.config.values["jax_enable_compilation_cache"]:
        yield
        return
    try:
        import fcntl

        file = Path(directory, f"{shape}.lock").open("w")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # no such locks here: at worst, a shape is compiled twice
        yield
        return
    with file:
        yield
