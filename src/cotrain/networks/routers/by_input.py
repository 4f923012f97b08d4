"""A router that reads its layer's input, and needs no task: noisy top-k gating (Shazeer et al. 2017).

Axes: E experts, K chosen, B examples.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from cotrain.errors import check_rate
from cotrain.networks.routers.router import Mixture, Size, largest, softmax
from cotrain.networks.routers.sampling import normal_noise
from cotrain.speed.randomness import normal_bits

LEAST = 1e-2  # of the noise's deviation, as in Tensor2Tensor


class Maps(eqx.Module):
    """A layer's linear maps; the leading axis has one entry, for all tasks."""

    weight: Float[Array, "1 E inputs"]  # W_g
    noise: Float[Array, "1 E inputs"] | None  # W_noise


class ByInput(eqx.Module):
    """See `by_input`."""

    balance: Float[Array, ""] | None
    noisy: bool = eqx.field(static=True)
    by_task: ClassVar[Literal[False]] = False
    learns: ClassVar[bool] = True

    def init(self, size: Size, key: PRNGKeyArray) -> Maps:
        # Deviation: Shazeer et al. start at zeros, whose ties only noise can break; predictions have none.
        shape = (1, size.experts, size.inputs)
        weight = jax.random.uniform(key, shape, minval=-1e-3, maxval=1e-3)
        return Maps(weight, jnp.zeros(shape) if self.noisy else None)

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "B E"] | None:
        return normal_bits(key, shape) if self.noisy else None

    def read(
        self,
        stack: Maps,
        draws: Shaped[Array, "B E"] | None,
        x: Float[Array, "B inputs"],
        k: int,
        weight: Float[Array, " B"],
    ) -> Mixture:
        clean = x @ stack.weight[0].T
        if draws is None or stack.noise is None:
            chosen = largest(clean, k)
            gates = softmax(clean, chosen)
            return Mixture(gates, chosen, self._penalty(_importance(gates, weight)))
        deviation = jax.nn.softplus(x @ stack.noise[0].T) + LEAST
        noisy = clean + normal_noise(draws) * deviation  # H(x) = x·W_g + StandardNormal() · Softplus(x·W_noise)
        chosen = largest(noisy, k)
        gates = softmax(noisy, chosen)  # G(x) = Softmax(KeepTopK(H(x), k))
        counts = (_importance(gates, weight), _load(clean, noisy, deviation, chosen, k, weight))
        return Mixture(gates, chosen, self._penalty(*counts))

    def _penalty(self, *counts: Float[Array, " E"]) -> Float[Array, ""] | None:
        """How unevenly the experts are used: w · CV(counts)², for each way to count."""
        if self.balance is None:
            return None
        squares = [count.var() / (count.mean() ** 2 + 1e-10) for count in counts]
        return self.balance * jnp.stack(squares).sum()


def _importance(gates: Float[Array, "B E"], weight: Float[Array, " B"]) -> Float[Array, " E"]:
    """The sum of an expert's gates over the batch."""
    return (gates * weight[:, None]).sum(axis=0)


def _load(
    clean: Float[Array, "B E"],
    noisy: Float[Array, "B E"],
    deviation: Float[Array, "B E"],
    chosen: Bool[Array, "B E"],
    k: int,
    weight: Float[Array, " B"],
) -> Float[Array, " E"]:
    """How many examples an expert may expect: Σ_x Φ((x·W_g − kth_excluding(H, k, e)) / Softplus(x·W_noise))."""
    if k == noisy.shape[1]:  # all are taken, whatever the noise
        return jnp.broadcast_to(weight.sum(), k)
    best = jax.lax.top_k(noisy, k + 1)[0]
    beyond, last = best[:, k:], best[:, k - 1 : k]
    bar = jnp.where(chosen, beyond, last)  # the k-th largest of the other experts
    return (norm.cdf((clean - bar) / deviation) * weight[:, None]).sum(axis=0)


def by_input(*, balance: float = 0.0, noisy: bool = True) -> ByInput:
    """A linear map of the layer's input, of which the K largest outputs are chosen for each example.

    While training, noise is added whose deviation is another linear map (`noisy`). `balance` is the weight of a penalty
    on uneven use: the squared coefficients of variation of the experts' importance and, with noise, of their load.
    """
    weight = check_rate("balance", balance)
    return ByInput(jnp.asarray(weight, float) if weight else None, noisy)


@dataclass(frozen=True)
class ByInputOptions:
    """reads the layer's input, for each example, and needs no task (Shazeer et al. 2017)"""

    balance: float = 0.0
    """weight of the penalty on uneven use of the experts"""
    noisy: bool = True
    """learn how much noise is added to the map's outputs while training"""

    def __post_init__(self):
        check_rate("balance", self.balance)

    def __call__(self) -> ByInput:
        return by_input(balance=self.balance, noisy=self.noisy)
