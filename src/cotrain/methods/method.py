"""What a method is: a record of pure functions, and the state that they carry from minibatch to minibatch."""

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.memory import Memory
from cotrain.methods.descent import Learner
from cotrain.networks.routing import Network


class State(NamedTuple):
    """All that a method carries: a run goes on from it exactly where it was."""

    learner: Learner
    memory: Memory | None = None
    used: tuple[Bool[Array, "T E"], ...] = ()  # E in Algorithm 1: the experts that each task uses, per layer


class Info(NamedTuple):
    """What is only of interest about a step."""

    loss: Float[Array, ""]  # of the current batch, before its step


class Method(Protocol):
    """A continual learner. Float hyperparameters are arrays, so that a sweep over them compiles once."""

    @property
    def network(self) -> Network: ...

    def init(self, key: PRNGKeyArray) -> State:
        """The state before the first task."""
        ...

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Any:
        """All random numbers that one update takes."""
        ...

    def update(self, state: State, batch: Batch, noise: Any) -> tuple[State, Info]:
        """Learns from one minibatch: a deterministic function of its arguments."""
        ...

    def consolidate(self, state: State, task: Int[Array, ""]) -> State:
        """What is to be done once a task has been learned."""
        ...
