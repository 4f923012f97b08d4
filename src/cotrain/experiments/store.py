"""Where finished runs are kept: a run is found by the content of its configuration, its seed, and NUMERICS."""

import hashlib
import json
from pathlib import Path
from typing import Any

from cotrain.experiments.config import Config
from cotrain.experiments.result import NUMERICS, Result, save


class Store:
    """A directory of records: BENCHMARK/NETWORK-METHOD/KEY/seed-N/result.json."""

    def __init__(self, root: Path):
        self.root = root

    def place(self, config: Config, seed: int) -> Path:
        """The directory of a run, finished or not."""
        name = Path(config.arrays).stem if config.arrays is not None else config.benchmark
        return self.root / name / f"{config.network}-{config.method}" / key_of(config) / f"seed-{seed}"

    def read(self, config: Config, seed: int) -> dict[str, Any] | None:
        """The record of a finished run; None if there is none."""
        path = self.place(config, seed) / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, config: Config, result: Result) -> None:
        """Writes the record of a run; it appears whole or not at all."""
        save(result, self.place(config, result.seed), config)


def key_of(config: Config) -> str:
    """A name for a configuration's content: what is not as by default, so that new options leave old names alone."""
    content = json.dumps({"numerics": NUMERICS, **config.options}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
