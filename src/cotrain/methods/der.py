"""Dark experience replay, DER and DER++: keeps what the network said of remembered examples (Buzzega et al. 2020).

Axes: B current examples, R replayed ones.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import check_rate
from cotrain.memory import Buffer, Memory
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, cross_entropy, move, rate, rates_of, slope
from cotrain.methods.method import Info
from cotrain.methods.replay import MemoryOptions, Noise, noise_of
from cotrain.networks.network import Network


class DerState(NamedTuple):
    """What was learned, and what is remembered; of each example, its logits too."""

    learner: Learned
    memory: Memory


class Der(eqx.Module):
    """See `der` and `der_plus_plus`."""

    network: Network
    memory: Buffer
    alpha: Float[Array, ""]
    beta: Float[Array, ""] | None  # None, and no second draw, for DER
    rates: Rates
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> DerState:
        spec = self.network.spec
        return DerState(begin(self.network, self.optimizer, key), self.memory.init(spec, logits=(spec.classes,)))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        return noise_of(self.network, self.memory, key, batch)

    def update(self, state: DerState, batch: Batch, noise: Noise) -> tuple[DerState, Info]:
        network, learner, size = self.network, state.learner, len(batch.y)
        old = self.memory.sample(state.memory)  # (x', z', y') ← sample(M); (x'', z'', y'') ← sample(M)
        stored = self.memory.columns(state.memory)["logits"]
        draws = self.memory.batch if self.beta is None else self.memory.batch // 2
        first, second = (Batch(*(a[part] for a in old)) for part in (slice(draws), slice(draws, None)))

        def loss(logits: Float[Array, "B+R classes"], both: Batch, part: Part) -> Float[Array, ""]:
            del both, part
            now, kept, labelled = jnp.split(logits, [size, size + draws])
            total = cross_entropy(now, batch)  # ℓ(y, f_θ(x))
            total += self.alpha * squares(kept, stored[:draws], first)  # α ‖z' − h_θ(x')‖²
            if self.beta is not None:
                total += self.beta * cross_entropy(labelled, second)  # β ℓ(y'', f_θ(x''))
            return total

        both = batch.union(old)
        spread = [None if now is None else jnp.broadcast_to(now, (size, now.shape[1])) for now in noise.current]
        drawn = jax.tree.map(lambda *parts: jnp.concatenate(parts), tuple(spread), noise.replayed)
        path = network.sample(learner.parameters, both.task, both.weight, drawn)  # R̂ ← sample(R)
        there = slope(network, learner.parameters, both, path, loss, self.rates)
        learner = move(network, self.optimizer, learner, there.gradient, there.part, self.rates)

        logits = there.logits[:size]  # z ← h_θ(x)
        memory = self.memory.add(state.memory, batch, noise.memory, {"logits": logits})  # M ← reservoir(M, (x, z, y))
        return DerState(learner, memory), Info(cross_entropy(logits, batch), replayed=old)

    def consolidate(self, state: DerState, batch: Batch, key: PRNGKeyArray) -> DerState:
        del batch, key
        return state


def squares(logits: Float[Array, "R classes"], stored: Float[Array, "R classes"], batch: Batch) -> Float[Array, ""]:
    """The mean squared difference of logits, over the classes and the examples that count."""
    # Deviation: the paper's norm is a sum over the classes; its code takes their mean, and so its α are meant.
    apart = jnp.where(batch.weight[:, None] > 0, logits - stored, 0)
    return (batch.weight * (apart**2).mean(axis=1)).sum() / jnp.maximum(batch.weight.sum(), 1)


def der(
    network: Network,
    memory: Buffer,
    *,
    alpha: float = 0.5,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Der:
    """One step on each minibatch and a batch from memory, whose logits are to be as they were when it was stored.

    `alpha` (α) weighs their mean squared difference.
    """
    return Der(network, memory, rate("alpha", alpha), None, rates_of(lr, router_lr), optimizer)


def der_plus_plus(
    network: Network,
    memory: Buffer,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Der:
    """As `der`, with a second batch from memory, of which it learns the labels; `beta` (β) weighs those.

    The memory's `batch` is the size of each of the two.
    """
    twice: Any = replace(cast(Any, memory), batch=2 * memory.batch)
    return Der(network, twice, rate("alpha", alpha), rate("beta", beta), rates_of(lr, router_lr), optimizer)


@dataclass(frozen=True)
class DerOptions(MemoryOptions):
    """dark experience replay: keeps the logits that remembered examples had"""

    alpha: float = 0.5
    """how much keeping the logits of remembered examples counts"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("alpha", self.alpha)

    def __call__(self, network: Network) -> Der:
        return der(
            network,
            self.buffer(network.spec, self.memory, self.memory_batch),
            alpha=self.alpha,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
        )


@dataclass(frozen=True)
class DerPlusPlusOptions(DerOptions):
    """dark experience replay that learns the labels of remembered examples too"""

    beta: float = 0.5
    """how much the labels of a second batch of remembered examples count"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("beta", self.beta)

    def __call__(self, network: Network) -> Der:
        return der_plus_plus(
            network,
            self.buffer(network.spec, self.memory, self.memory_batch),
            alpha=self.alpha,
            beta=self.beta,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
        )
