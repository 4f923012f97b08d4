"""Your own stream: tasks as functions that return batches, of which nobody says how many there will be.

Here, a sensor whose three states look different each season; readings come in batches as they happen to arrive.
"""

import numpy as np

import cotrain


def season(number, batches, seed):
    """A function that returns an iterator of batches; it is called anew for each pass over the task."""

    def begin():
        generator = np.random.default_rng([number, seed])  # its own: training data is read in another thread than tests
        states = np.random.default_rng(number).normal(size=(3, 16))
        for size in generator.integers(0, 40, batches):
            y = generator.integers(0, 3, size)
            yield 1.5 * states[y] + generator.normal(size=(size, 16)), y

    return begin


stream = cotrain.Stream.from_tasks([(season(i, 100, 0), season(i, 20, 1)) for i in range(4)], classes=3)
network = cotrain.routing_network(stream.spec, cotrain.dense(32), layers=1, experts=8, k=2)
method = cotrain.replay(network, cotrain.reservoir(200), lr=0.05)
print(cotrain.run(method, stream, seeds=2))
