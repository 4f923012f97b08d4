"""A log for Weights & Biases: a run for each seed, offline unless the environment says otherwise."""

import os
import shutil
from typing import Any

from cotrain.experiments.loggers import Follower
from cotrain.experiments.toml import read_toml
from cotrain.experiments.watch import Watch


class WeightsAndBiases(Follower):
    """An offline run below `wandb` for each seed, which `wandb sync` uploads; nothing uses the network.

    That is so unless `WANDB_MODE` is set to online. Where a run of ours goes on, a new one of theirs begins with all
    that the CSV log has, and takes the place of an offline one that was not uploaded.
    """

    runs: tuple[Any, ...] = ()

    def begin(self, watch: Watch) -> None:
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which asks for an address even offline
        import wandb

        settings = wandb.Settings(silent=True, console="off", reinit="create_new")
        for seed, place in zip(watch.seeds, self.places, strict=True):
            for earlier in place.glob("wandb/offline-run-*"):
                if not any(earlier.glob("*.synced")):
                    shutil.rmtree(earlier)
            options = place.parent / "config.toml"
            run = wandb.init(
                mode=mode,
                dir=str(place),
                project=os.environ.get("WANDB_PROJECT", "cotrain"),
                group=place.parent.name,
                name=f"{place.parent.name}/{place.name}",
                config={**(read_toml(options) if options.is_file() else {}), "seed": seed},
                settings=settings,
            )
            run.define_metric("*", step_metric="minibatches")
            self.runs += (run,)

    def write(self, seed: int, minibatches: int, numbers: dict[str, float]) -> None:
        self.runs[seed].log({"minibatches": minibatches, **numbers})

    def close(self) -> None:
        super().close()
        for run in self.runs:
            run.finish()
