"""Where finished runs are kept: a run is found by the content of its configuration, its seed, and NUMERICS."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cotrain.errors import Damaged, Invalid
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.experiments.migration import is_old, old_key
from cotrain.experiments.result import NUMERICS, read


class Store:
    """A directory of records: BENCHMARK/NETWORK-METHOD/KEY/seed-N/result.json."""

    def __init__(self, root: Path):
        self.root = root
        self._older: dict[Path, dict[Config, list[Path]]] = {}  # runs that an earlier version named, by their content

    def place(self, config: Config | None, seed: int) -> Path:
        """The directory of a run, finished or not."""
        assert config is not None
        kind = self.root / _name(config.flat)
        place = kind / key_of(config) / f"seed-{seed}"
        if (place / "result.json").exists():
            return place
        older = (directory / place.name for directory in self._named_otherwise(kind).get(config, []))
        return next((path for path in older if (path / "result.json").exists()), place)

    def home(self, record: dict[str, Any], seed: int) -> Path:
        """The directory of the run with a record's configuration, as the version that wrote it names it."""
        config = Config.read(record)
        key = old_key(record, NUMERICS) if is_old(record) else key_of(config)
        return self.root / _name(config.flat) / key / f"seed-{seed}"

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

    def _named_otherwise(self, kind: Path) -> dict[Config, list[Path]]:
        """The directories of an earlier version's runs whose names tell of options that did not apply."""
        if kind not in self._older:
            self._older[kind] = found = {}
            known = set()
            for path in sorted(kind.glob("*/seed-*/result.json")):
                if path.parents[1] in known:
                    continue
                with suppress(Damaged, Invalid, OSError, KeyError):  # whoever reads that one says so
                    record = read_record(path)
                    if is_old(record["config"]) and record["numerics"] == NUMERICS:
                        found.setdefault(Config.read(record["config"]), []).append(path.parents[1])
                        known.add(path.parents[1])
        return self._older[kind]


def key_of(config: Config) -> str:
    """A name for a configuration's content: what is not as by default, so that new options leave old names alone."""
    content = json.dumps({"numerics": NUMERICS, **config.options}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _name(options: dict[str, Any]) -> Path:
    """The directory of a benchmark, a network and a method; a reference to one's own has no colon there."""
    benchmark = Path(options["arrays"]).stem if "arrays" in options else options["benchmark"]
    return Path(benchmark.replace(":", "."), f"{options['network']}-{options['method']}".replace(":", "."))
