"""What it takes to repeat a run besides its configuration and seed: software and data."""

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cotrain.data.benchmarks import Arrays, Images
from cotrain.data.fetch import SHA256
from cotrain.experiments.config import Config

PACKAGES = ("cotrain", "jax", "jaxlib", "numpy", "scipy", "equinox", "optax")


@cache
def software() -> dict[str, str | None]:
    """The versions that matter, the kind of machine, and the commit where this is a clone."""
    versions = {name: version(name) for name in PACKAGES}
    machine = f"{platform.system()} {platform.machine()}"
    return {
        "commit": _commit(Path(__file__).parents[3]),
        **versions,
        "python": platform.python_version(),
        "on": machine,
    }


def data(config: Config) -> dict[str, Any] | None:
    """The data's name and the digests of its files; None for a benchmark of somebody's own."""
    match config.benchmark.options:
        case Arrays(arrays=file):
            return {"name": Path(file).name, "sha256": [_digest(Path(file))]}
        case Images(dataset=name):
            return {"name": name, "sha256": list(SHA256[name])}
    return None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _commit(clone: Path) -> str | None:
    """The commit that the package was taken from, with a + if its source has changed since; None outside a clone."""
    git = ["git", "-C", str(clone)]
    if not (clone / ".git").exists():
        return None
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changed.returncode else commit
