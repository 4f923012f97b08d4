"""A run that goes on with more tasks than it was begun with."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cotrain.errors import Damaged, Invalid
from cotrain.experiments.checkpoint import Checkpoints, decode
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_bytes
from cotrain.experiments.sealed import LIMIT


def continued(config: Config, places: Iterable[Path]) -> Config:
    """The configuration with which the runs in some directories go on, if there are any.

    It is the one that is wanted, but for this: experts that are as large as the budget of so many tasks allows stay as
    they are when there are more tasks.
    """
    found = next(filter(None, map(_config_in, places)), None)
    wanted, known = config.flat, {} if found is None else found.flat
    if "tasks" not in wanted or "tasks" not in known or "budget_tasks" not in wanted:
        return config
    if wanted["budget_tasks"] is not None or wanted["units"] is not None or known["tasks"] > wanted["tasks"]:
        return config
    of = known.get("budget_tasks") or known["tasks"]
    return config if of == wanted["tasks"] else config.but(budget_tasks=of)


def _config_in(place: Path) -> Config | None:
    """The configuration of the newest checkpoint in a directory that is whole."""
    for path in Checkpoints(place, {}).all():
        with suppress(Damaged, Invalid, OSError):
            notes, _ = decode(read_bytes(path, LIMIT), path)
            return Config.read(notes["config"]) if "config" in notes else None
    return None
