"""Your own experts: any Equinox module. Here a small convolution below, an MLP above, on tiny made-up images."""

import numpy as np

import cotrain

generator = np.random.default_rng(0)


def task(angle):
    """Images of 12 × 12 with a bright bar; its side is the label, its direction belongs to the task."""
    x = generator.normal(scale=0.3, size=(600, 12, 12)).astype(np.float32)
    y = generator.integers(0, 2, size=600)
    x[np.arange(600), np.where(y == 1, 8, 3)] += 1.0
    x = np.rot90(x, angle, axes=(1, 2)).copy()
    return x[:500], y[:500], x[500:], y[500:]


stream = cotrain.Stream.from_arrays([task(angle) for angle in range(4)])
experts = [cotrain.convolution(channels=4), cotrain.mlp((32, 16))]
network = cotrain.routing_network(stream.spec, experts, experts=6, k=2)
print(f"{cotrain.parameter_count(network)} parameters")
method = cotrain.cotraining(cotrain.replay(network, cotrain.reservoir(100), lr=0.05))
print(cotrain.run(method, stream, seeds=2, epochs=4))
