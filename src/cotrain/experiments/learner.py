"""A learner that one keeps: a method with what it has learned. It predicts, and it goes on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, Int

from cotrain.data.examples import Examples, check_arrays, check_inputs, native
from cotrain.data.feed import Room, laid_out
from cotrain.data.sample import Sample
from cotrain.errors import Invalid, check_positive
from cotrain.evaluation import answers, evaluate, fitting, inferred, matrices
from cotrain.growth import grown, resized
from cotrain.methods.method import Infers, Method, State
from cotrain.networks.network import Network
from cotrain.steps import DRAWN, Chunk, advance, consolidate, init, keys_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOM = 200  # minibatches that are learned in one call of the compiled program


class Learner:
    """A method with all that it has learned.

    What it is fed becomes minibatches of `batch` examples, from which it learns as the engine does, to the bit; a last
    one that is not full counts as it is. It may be fed in any pieces of whole minibatches. Tasks count from 0. One
    thread at a time may use it.
    """

    def __init__(
        self,
        method: Method,
        seed: int = 0,
        *,
        batch: int = 10,
        state: State | None = None,
        finished: int = 0,
        step: int = 0,
        sample: Sample | None = None,
    ):
        self.method = method
        self.seed = check_positive("seed", seed, least=0)
        self.batch = check_positive("batch", batch)
        self.finished = finished  # tasks, so far
        self.step = step  # minibatches since the last of them
        self.scalars: Mapping[str, Float[np.ndarray, " C"]] = {}  # of the steps of the last `observe`
        self._keys, self._room = keys_of([self.seed]), Room()
        self.state: State = init(method, self._keys) if state is None else state  # with a leading axis of 1
        self.sample = self._nothing() if sample is None else sample  # of the present task

    def __reduce__(self) -> Any:
        from cotrain.experiments.saved import encode, unpickled

        return unpickled, (encode(self),)

    @property
    def network(self) -> Network:
        """What learns."""
        return self.method.network

    @property
    def tasks(self) -> int:
        """How many tasks there is room for; see `add_tasks`."""
        return self.network.spec.tasks

    @property
    def routes(self) -> tuple[Float[np.ndarray, "T E"], ...]:
        """How much each task's predictions weigh each expert, for every layer with a router that goes by the task."""
        self.check()
        if not self.network.by_task:
            return ()
        found = matrices(self.network, self.state.learner.parameters)
        return tuple(np.asarray(gates[0]) for _, gates in found)

    def observe(self, x: Any, y: Any, task: int) -> float:
        """Learns from any number of examples of a task; returns their mean loss, each before its step."""
        examples, task = self._examples(x, y, task), self._task(task)
        size = -(-min(ROOM, max(fitting(self.network) // self.batch, 1)) // DRAWN) * DRAWN
        total, found = -(-len(examples) // self.batch), []
        for start in range(0, total, size):
            count = min(size, total - start)
            minibatches = self._laid_out(examples, start, count, size, task)
            batches = jax.tree.map(lambda a: a[None], minibatches)
            phase, first, steps = map(np.int32, (self.finished, self.step, count))
            chunk = Chunk(self.method, self._keys, phase, first, steps, batches)
            sample = self.sample.fed([minibatches], count, [self.seed], self.finished, self.step)
            state, scalars = advance(chunk, self.state, [self.seed], task)
            self.state, self.sample, self.step = state, sample, self.step + count
            found.append(scalars)
        self.scalars = {name: np.concatenate([part[name][0] for part in found]) for name in found[0]}
        sizes = np.full(total, self.batch)
        sizes[-1] = len(examples) - (total - 1) * self.batch
        return float(np.average(self.scalars["loss"], weights=sizes))

    def finish(self, task: int) -> None:
        """Ends a task, where a method has something to do about it, as to consolidate what was learned."""
        some = self.sample.batch(self._task(task))
        self.state = consolidate(self.method, self._keys, self.finished, self.step, some, self.state)
        self.finished, self.step = self.finished + 1, 0
        self.sample = self._nothing()

    def predict(self, x: Any, task: int) -> Int[np.ndarray, " N"]:
        """The labels that it gives to examples of a task."""
        return self._answers(x, task)[0]

    def probabilities(self, x: Any, task: int) -> Float[np.ndarray, "N classes"]:
        """The probabilities that it gives to each of the task's classes."""
        return self._answers(x, task)[1]

    def infer(self, x: Any) -> Int[np.ndarray, " N"]:
        """The tasks that examples seem to be of, if the method can tell, as `expert_gate` can."""
        self.check()
        if not isinstance(self.method, Infers):
            raise Invalid("method", type(self.method).__name__, "it cannot tell tasks apart; expert_gate can")
        if (inputs := self._inputs(x)) is None:
            return np.empty(0, np.int32)
        return np.concatenate([*inferred(self.method, self.network, self.state, inputs, self._room)])

    def evaluate(self, x: Any, y: Any, task: int) -> float:
        """The share of a task's examples to which it gives their labels."""
        tests = [self._examples(x, y, task)]
        return float(evaluate(self.network, self.state.learner.parameters, tests, [self._room], self._task(task))[0])

    def add_tasks(self, count: int, classes: int | None = None) -> None:
        """Makes room for more tasks: router rows and heads. What was learned stays, and so do all predictions.

        `classes` are those of the new tasks, by default as many as the heads are wide. There are as many experts as
        before. A learner that was made with more tasks from the start would be the same.
        """
        self.check()
        spec = self.network.spec
        classes = spec.classes if classes is None else check_positive("classes", classes)
        if classes > spec.classes:
            raise Invalid("classes", classes, f"the network's heads have {spec.classes} outputs")
        every = [spec.classes_of(task) for task in range(self.tasks)] + [classes] * check_positive("count", count)
        widths = tuple(every) if len({*every, spec.classes}) > 1 else ()
        method = resized(self.method, spec._replace(tasks=len(every), widths=widths))
        self.method, self.state = method, grown(method, self._keys, self.state)

    def check(self) -> None:
        """Refuses to go on if nothing is left of it, as when it diverged: steps take over the memory of what was."""
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            raise Invalid("learner", "nothing", "it diverged, or was interrupted while it learned; load it anew")

    def save(self, path: Path | str) -> None:
        """Writes it to a file that `cotrain.load_learner` reads; the file appears whole or not at all."""
        from cotrain.experiments.saved import save_learner

        save_learner(self, path)

    def export(self, path: Path | str) -> None:
        """Writes one program that predicts without cotrain: for any number of examples and a task, probabilities."""
        from cotrain.experiments.export import export

        export(self, Path(path))

    def _repr_html_(self) -> str:
        from cotrain.experiments.display import learner_html

        return learner_html(self)

    def _answers(self, x: Any, task: int) -> tuple[np.ndarray, np.ndarray]:
        task, inputs = self._task(task), self._inputs(x)
        classes = self.network.spec.classes_of(task)
        if inputs is None:
            return np.empty(0, np.int32), np.empty((0, classes), np.float32)
        found = answers(self.network, self.state.learner.parameters, inputs, self._room, task)
        labels, probabilities = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return labels, probabilities[:, :classes]

    def _inputs(self, x: Any) -> Examples | None:
        """Inputs without labels, if there are any."""
        x = native(np.asanyarray(x))
        check_inputs("x", x, self.network.spec.shape)
        return Examples(x, np.zeros(len(x), np.int8), name="x") if len(x) else None

    def _examples(self, x: Any, y: Any, task: int) -> Examples:
        x, y, spec = native(np.asanyarray(x)), native(np.asarray(y)), self.network.spec
        check_arrays("x and y", x, y, spec.shape, spec.classes_of(self._task(task)))
        return Examples(x, y, name="x and y")

    def _nothing(self) -> Sample:
        return Sample.empty(self.network.spec, 1, self.method.examples)

    def _task(self, task: int) -> int:
        self.check()
        if check_positive("task", task, least=0) >= self.tasks:
            raise Invalid("task", task, f"there are {self.tasks}, from 0; add_tasks makes room for more")
        return int(task)

    def _laid_out(self, examples: Examples, start: int, count: int, size: int, task: int) -> Any:
        """Some of the minibatches of examples, in room for `size` of them, which holds anything behind them."""
        places = np.arange(start * self.batch, (start + count) * self.batch)
        whole: list[np.ndarray] = []

        def room(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            whole.append(self._room((size * self.batch, *shape[1:]), dtype))
            return whole[0][: shape[0]]

        _, labels = examples.take(np.minimum(places, len(examples) - 1), room)
        y, weight = np.zeros(size * self.batch, np.int32), np.zeros(size * self.batch, np.float32)
        y[: len(places)], weight[: len(places)] = labels, places < len(examples)
        return laid_out(whole[0], y, np.full(size, task, np.int32), weight.reshape(size, self.batch))
