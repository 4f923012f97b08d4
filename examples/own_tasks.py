"""Your own tasks, as arrays: here, sums of random features, told apart by task-specific rules."""

import numpy as np

import cotrain

generator = np.random.default_rng(0)


def task(rule):
    """Inputs of 16 numbers, labelled by the largest of three random projections."""
    x = generator.normal(size=(1200, 16)).astype(np.float32)
    y = (x @ rule).argmax(axis=1)
    return x[:1000], y[:1000], x[1000:], y[1000:]


stream = cotrain.Stream.from_arrays([task(generator.normal(size=(16, 3))) for _ in range(4)])
network = cotrain.routing_network(stream.spec, cotrain.dense(32), layers=1, experts=8, k=2)
method = cotrain.cotraining(cotrain.replay(network, cotrain.reservoir(200), lr=0.1))
print(cotrain.run(method, stream, seeds=3, epochs=5))
