"""A log for TensorBoard, in its own words: event files that it and others read."""

import time

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cotrain.experiments.loggers import Follower
from cotrain.experiments.watch import Watch


class TensorBoard(Follower):
    """An event file below `tensorboard` for each seed; a step is a minibatch, counted over all tasks.

    Where a run goes on, the file is written anew from the CSV log.
    """

    writers: tuple[EventFileWriter, ...] = ()

    def begin(self, watch: Watch) -> None:
        del watch
        directories = [place / "tensorboard" for place in self.places]
        for directory in directories:
            for earlier in directory.glob("events.out.tfevents.*"):
                earlier.unlink()
        self.writers = tuple(EventFileWriter(str(directory)) for directory in directories)

    def write(self, seed: int, minibatches: int, numbers: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        event = Event(wall_time=time.time(), step=minibatches, summary=Summary(value=values))
        self.writers[seed].add_event(event)
        self.writers[seed].flush()

    def close(self) -> None:
        super().close()
        for writer in self.writers:
            writer.close()
