"""Where finished runs are kept: a run is found by the content of its configuration, its seed, and NUMERICS."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotrain.errors import Damaged
from cotrain.experiments.config import Config
from cotrain.experiments.result import NUMERICS, read


class Store:
    """A directory of records: BENCHMARK/NETWORK-METHOD/KEY/seed-N/result.json."""

    def __init__(self, root: Path):
        self.root = root

    def place(self, config: Config | None, seed: int) -> Path:
        """The directory of a run, finished or not."""
        assert config is not None
        name = Path(config.arrays).stem if config.arrays is not None else config.benchmark
        return self.root / name / f"{config.network}-{config.method}" / key_of(config) / f"seed-{seed}"

    def read(
        self, config: Config, seed: int, report: Callable[[str], None] = lambda line: None
    ) -> dict[str, Any] | None:
        """The record of a finished run; None if there is none, or a damaged one, which is told."""
        place = self.place(config, seed)
        if not (place / "result.json").exists():
            return None
        try:
            return read(place)
        except (Damaged, OSError) as error:
            report(f"{error}; the run counts as not finished")
            return None


def key_of(config: Config) -> str:
    """A name for a configuration's content: what is not as by default, so that new options leave old names alone."""
    content = json.dumps({"numerics": NUMERICS, **config.options}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
