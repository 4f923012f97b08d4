"""The machine's limit: what the matrix products of a step cost in BLAS, and the most that BLAS does here."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.workload import Pass


def shared_bottom_products(workload: Any) -> Callable[[], Pass]:
    """The matrix products of a step on the shared bottom: forward, gradients of inputs, gradients of weights.

    Results go into arrays that exist. Weights are laid out as `inputs × units`, the quicker way round for BLAS.
    """
    random = np.random.default_rng(0)
    products = []
    sizes = (workload.tasks[0][0].shape[1], *workload.hidden, workload.classes)
    for layer, (inputs, units) in enumerate(pairwise(sizes)):
        x, weight, slope = (
            random.standard_normal(shape).astype(np.float32)
            for shape in ((workload.batch, inputs), (inputs, units), (workload.batch, units))
        )
        products += [(x, weight, np.empty_like(slope)), (x.T, slope, np.empty_like(weight))]
        if layer:  # the first layer's inputs need no gradient
            products.append((slope, weight.T, np.empty_like(x)))
    iterations = sum(-(-len(y) // workload.batch) for _, y in workload.tasks)

    def one_pass() -> Pass:
        start = time.perf_counter()
        for _ in range(iterations):
            for left, right, out in products:
                np.dot(left, right, out=out)
        return Pass(iterations, time.perf_counter() - start)

    return one_pass


def peak(workload: Any) -> Callable[[], float]:
    """Billions of floating-point operations a second in a large matrix product."""
    del workload
    size = 1024
    a = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    out = np.empty_like(a)

    def one_pass() -> float:
        start = time.perf_counter()
        for _ in range(3):
            np.dot(a, a, out=out)
        return 3 * 2 * size**3 / (time.perf_counter() - start) / 1e9

    return one_pass
