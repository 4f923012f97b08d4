"""How a router's routes are sampled while training: what is added to its logits before the K largest are chosen.

Axes: T tasks, E experts, D rows.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from cotrain.errors import Invalid, check_rate
from cotrain.speed.randomness import normal, normal_bits

NOISE = 0.05


class Sampling(Protocol):
    """Noise for logits."""

    noisy_gates: ClassVar[bool]  # whether the gates are always of the noisy logits

    def spread(self, shape: tuple[int, int]) -> Float[Array, "T E"] | None:
        """What is learned of it for each task and expert."""
        ...

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "D E"] | None:
        """The random numbers that it takes."""
        ...

    def noise(self, spread: Float[Array, "D E"] | None, draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
        """The noise that is made of them."""
        ...


def normal_noise(draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
    """Normal numbers, of their random bits or as they are."""
    return normal(draws) if jnp.issubdtype(draws.dtype, jnp.unsignedinteger) else draws


class Gaussian(eqx.Module):
    """Normal noise."""

    scale: Float[Array, ""]
    noisy_gates: ClassVar[bool] = False

    def spread(self, shape: tuple[int, int]) -> None:
        del shape

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "D E"]:
        return normal_bits(key, shape)

    def noise(self, spread: Float[Array, "D E"] | None, draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
        del spread
        return self.scale * normal_noise(draws)


class NoisyTopK(eqx.Module):
    """Normal noise whose deviation is learned, for each task and expert (Shazeer et al. 2017)."""

    start: Float[Array, ""]
    noisy_gates: ClassVar[bool] = True  # by which the deviation gets its gradient

    def spread(self, shape: tuple[int, int]) -> Float[Array, "T E"]:
        return jnp.broadcast_to(jnp.log(jnp.expm1(self.start)), shape)

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "D E"]:
        return normal_bits(key, shape)

    def noise(self, spread: Float[Array, "D E"] | None, draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
        assert spread is not None
        return jax.nn.softplus(spread) * normal_noise(draws)


class Gumbel(eqx.Module):
    """Gumbel noise: the K largest are then a draw without replacement from the softmax of the logits."""

    scale: Float[Array, ""]
    noisy_gates: ClassVar[bool] = False

    def spread(self, shape: tuple[int, int]) -> None:
        del shape

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Float[Array, "D E"]:
        return jax.random.gumbel(key, shape)

    def noise(self, spread: Float[Array, "D E"] | None, draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
        del spread
        return self.scale * draws


class NoNoise(eqx.Module):
    """Always the best routes."""

    noisy_gates: ClassVar[bool] = False

    def spread(self, shape: tuple[int, int]) -> None:
        del shape

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> None:
        del key, shape

    def noise(self, spread: Float[Array, "D E"] | None, draws: Shaped[Array, "D E"]) -> Float[Array, "D E"]:
        del spread
        return jnp.zeros(draws.shape)


def gaussian(noise: float = NOISE) -> Gaussian:
    """Normal noise of this standard deviation."""
    return Gaussian(jnp.asarray(check_rate("noise", noise), float))


def noisy_top_k(noise: float = NOISE) -> NoisyTopK:
    """Normal noise of learned deviation, which starts at `noise`."""
    return NoisyTopK(jnp.asarray(_above_zero(noise), float))


def gumbel(noise: float = NOISE) -> Gumbel:
    """Gumbel noise of this scale."""
    return Gumbel(jnp.asarray(check_rate("noise", noise), float))


def no_noise() -> NoNoise:
    """The best routes, without noise."""
    return NoNoise()


@dataclass(frozen=True)
class GaussianOptions:
    """normal noise is added to the logits"""

    noise: float = NOISE
    """standard deviation of the noise that samples routes"""

    def __post_init__(self):
        check_rate("noise", self.noise)

    def __call__(self) -> Gaussian:
        return gaussian(self.noise)


@dataclass(frozen=True)
class NoisyTopKOptions:
    """normal noise of learned deviation, for each task and expert (Shazeer et al. 2017)"""

    noise: float = NOISE
    """standard deviation of the noise that samples routes, at the start"""

    def __post_init__(self):
        _above_zero(self.noise)

    def __call__(self) -> NoisyTopK:
        return noisy_top_k(self.noise)


@dataclass(frozen=True)
class GumbelOptions:
    """Gumbel noise is added to the logits"""

    noise: float = NOISE
    """scale of the noise that samples routes"""

    def __post_init__(self):
        check_rate("noise", self.noise)

    def __call__(self) -> Gumbel:
        return gumbel(self.noise)


@dataclass(frozen=True)
class NoneOptions:
    """always the best routes, without noise"""

    def __call__(self) -> NoNoise:
        return no_noise()


def _above_zero(noise: float) -> float:
    if check_rate("noise", noise) == 0:
        raise Invalid("noise", noise, "choose a number above 0")
    return float(noise)
