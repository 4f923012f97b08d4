"""The README's example: five rotations of MNIST, learned one after another."""

import cotrain

stream = cotrain.rotated(cotrain.load("mnist"), tasks=5, examples=20_000)
network = cotrain.routing_network(stream.spec, cotrain.dense(19), experts=20, k=4)
method = cotrain.cotraining(cotrain.replay(network, cotrain.reservoir(1000), lr=0.1))  # Algorithm 1
results = cotrain.run(method, stream, seeds=3)
print(results)
print(results[0].accuracy.round(3))
