"""What a method is: a record of pure functions, and the state that they carry from minibatch to minibatch."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.methods.descent import Learned, Optimizer, Rates
from cotrain.networks.network import Network


class State(Protocol):
    """All that a method carries: a named record of its own, a pytree. A run goes on from it exactly where it was."""

    @property
    def learner(self) -> Learned: ...


class Info(NamedTuple):
    """What is only of interest about a step."""

    loss: Float[Array, ""]  # of the current batch, before its step
    scalars: Mapping[str, Float[Array, ""]] = {}  # what else there is to see
    replayed: Batch | None = None  # the earlier examples that it learned from too: x_M, y_M


class Method(Protocol):
    """A continual learner. Float hyperparameters are arrays, so that a sweep over them compiles once."""

    @property
    def network(self) -> Network: ...

    @property
    def rates(self) -> Rates:
        """Of its step on the current batch."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """Which the moments in its learner belong to."""
        ...

    @property
    def examples(self) -> int:
        """How many examples of a task `consolidate` wants to see."""
        ...

    def init(self, key: PRNGKeyArray) -> Any:
        """The state before the first task."""
        ...

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Any:
        """All random numbers that one update takes."""
        ...

    def update(self, state: Any, batch: Batch, noise: Any) -> tuple[Any, Info]:
        """Learns from one minibatch: a deterministic function of its arguments."""
        ...

    def consolidate(self, state: Any, batch: Batch, key: PRNGKeyArray) -> Any:
        """What is to be done once a task has been learned, of which the batch has as many examples as are wanted.

        They are drawn by seed, without replacement; where the task has fewer, the others have weight 0.
        """
        ...


@runtime_checkable
class Infers(Protocol):
    """A method that can tell of which task inputs are, without being told."""

    def infer(self, state: Any, x: Float[Array, "B ..."]) -> Int[Array, " B"]:
        """The task of each input, among those that it has seen."""
        ...
