"""A sweep as a file: options for all runs, products and lists of options, in one table or several.

seeds = 15                                # or a list of them
k = 4                                     # any option, in groups such as [method] or not

[product]                                 # every combination of these
benchmark = ["permuted-mnist", "rotated-mnist"]
lr = [0.03, 0.1]

[[runs]]                                  # each of these, in every combination that does not contradict it
label = "replay on a dense network"
network = "shared-bottom"
method = "replay"

[[tables]]                                # without any, all is one table
name = "small"
examples = 1000                           # a table adds to what is above it, and may have runs of its own
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.choice import flattened
from cotrain.errors import Invalid, check_positive
from cotrain.experiments.config import Config
from cotrain.experiments.paper import label_of
from cotrain.experiments.toml import read_toml

OWN = ("seeds", "product", "runs", "tables", "name", "label")


class Cell(NamedTuple):
    """A cell of a table: a configuration and what it is called."""

    table: str
    benchmark: str
    method: str
    config: Config


@dataclass(frozen=True)
class Sweep:
    """What a file says is to be run."""

    cells: list[Cell]
    seeds: list[int]


def read_sweep(path: Path, **options: Any) -> Sweep:
    """The sweep of a file, with some options in the place of its own."""
    tables = read_toml(path)
    seeds = tables.get("seeds", 1)
    seeds = seeds if isinstance(seeds, list) else list(range(check_positive("seeds", seeds)))
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len({*seeds}) < len(seeds):
        raise Invalid("seeds", seeds, "give their number, or a list of unlike whole numbers of at least 0")
    parts = _listed("tables", tables.get("tables", [{"name": path.stem}]))
    named = ({"name": f"{path.stem} {i}" if i > 1 else path.stem, **part} for i, part in enumerate(parts, 1))
    cells = [cell for part in named for cell in _cells(tables, part, options)]
    return Sweep(cells, seeds)


def _cells(above: Mapping[str, Any], table: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Cell]:
    """The cells of a table."""
    runs = _listed("runs", table.get("runs", above.get("runs", [{}])))
    varied = {**_table("product", above), **_table("product", table)}
    for name, values in varied.items():
        if not isinstance(values, list) or not values:
            raise Invalid(name, values, "a product has a list of values for each option")
    common = {**_options(above), **_options(table)}
    made: dict[Config, str | None] = {}
    for values in product(*varied.values()):
        for run in runs:
            config = Config(**{**common, **dict(zip(varied, values, strict=True)), **_options(run), **options})
            made.setdefault(config, run.get("label"))
    for config, label in _told_apart(made).items():
        yield Cell(str(table.get("name", "sweep")), _benchmark(config), label, config)


def _told_apart(made: Mapping[Config, str | None]) -> dict[Config, str]:
    """A label for each configuration; where others on its benchmark have the same, with the options that differ."""
    labels = {config: label or label_of(config) for config, label in made.items()}
    told = {config: config.told for config in labels}
    every = {config: _all_options(config) for config in labels}
    apart = {}
    for config, label in labels.items():
        same = [o for o, other in labels.items() if other == label and _benchmark(o) == _benchmark(config)]
        mine = {
            name: value
            for name, value in every[config].items()
            if any(name in told[o] for o in same) and len({repr(every[o].get(name)) for o in same}) > 1
        }
        apart[config] = f"{label} ({', '.join(f'{n} {v}' for n, v in mine.items())})" if mine else label
    return apart


def _all_options(config: Config) -> dict[str, Any]:
    """The options, and the protocol that they keep to, if any."""
    return config.flat if config.protocol is None else {"protocol": config.protocol, **config.flat}


def _benchmark(config: Config) -> str:
    """What the benchmark is called."""
    flat = config.flat
    return Path(flat["arrays"]).stem if "arrays" in flat else flat["benchmark"]


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return flattened({name: value for name, value in table.items() if name not in OWN})


def _table(name: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise Invalid(name, table, f"it is a table, [{name}]")
    return table


def _listed(name: str, tables: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise Invalid(name, tables, f"they are tables, [[{name}]]")
    return tables
