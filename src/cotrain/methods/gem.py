"""GEM: a step must not raise the loss on any earlier task (Lopez-Paz and Ranzato 2017, "Gradient episodic memory")."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_positive, check_rate
from cotrain.memory import Memory, Ring, ring
from cotrain.methods.agem import whole
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, move, rates_of, slope
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.gradients import gradients
from cotrain.methods.method import Info
from cotrain.methods.quadratic import nonnegative
from cotrain.networks.network import Draws, Network

RIDGE = 1e-3  # as in the last version of Lopez-Paz and Ranzato's code


class GemState(NamedTuple):
    """What was learned, and what is remembered."""

    learner: Learned
    memory: Memory


class Noise(NamedTuple):
    """The random numbers of one update."""

    current: Draws  # for the routes of the current batch
    memory: UInt32[Array, "0 2"]  # for the memory's update
    examples: UInt32[Array, "T B 2"] | None  # for the examples on which the tasks' gradients are taken


class Gem(eqx.Module):
    """See `gem`."""

    network: Network
    memory: Ring
    rates: Rates
    margin: Float[Array, ""]  # γ
    ridge: Float[Array, ""]
    memory_batch: int | None = eqx.field(static=True)
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> GemState:
        return GemState(begin(self.network, self.optimizer, key), self.memory.init(self.network.spec))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        current, memory, examples = jax.random.split(key, 3)
        drawn = None
        if self.memory_batch is not None:
            drawn = jax.random.bits(examples, (self.network.spec.tasks, self.memory_batch, 2), jnp.uint32)
        return Noise(
            current=self.network.draw(current, batch.task.size, len(batch.y)),
            memory=self.memory.draw(memory, len(batch.y)),
            examples=drawn,
        )

    def update(self, state: GemState, batch: Batch, noise: Noise) -> tuple[GemState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "GEM learns one task after another")
        network, parameters = self.network, state.learner.parameters
        memory = self.memory.add(state.memory, batch, noise.memory)  # M_t ← M_t ∪ (x, y)
        path = network.sample(parameters, batch.task, batch.weight, noise.current)  # R̂ ← sample(R)
        there = slope(network, parameters, batch, path, rates=self.rates)  # g ← ∇ℓ(f(x, t), y)

        old = self.memory.of_each(memory, noise.examples)
        earlier = (old.weight.sum(axis=1) > 0) & (old.task != batch.task)
        tasks = gradients(network, parameters, old, there.gradient)  # G = (g_1, …, g_{t−1}), on M_1, …, M_{t−1}
        products = tasks.dot(there.gradient, there.part)  # ⟨g, g_k⟩
        violated = (earlier & (products < 0)).any()

        # Deviation: where Lopez-Paz and Ranzato's paper has v ≥ 0 and then adds γ to it, their code has v ≥ γ, as here.
        gram = tasks.gram() + self.ridge * jnp.eye(len(old.task))  # G Gᵀ
        margin = jnp.where(earlier & violated, self.margin, 0)
        u = nonnegative(gram, products + gram @ margin, earlier & violated)  # of v = u + γ
        v = u + margin  # min_v ½ vᵀG Gᵀv + gᵀGᵀv, v ≥ γ
        projected = there.part.add(tasks.weighted(v, parameters), there.gradient)  # g̃ = Gᵀv + g
        learner = move(network, self.optimizer, state.learner, projected, whole(parameters), self.rates)
        found = {"projected": violated.astype(float), "active": (v > margin).sum().astype(float)}
        return GemState(learner, memory), Info(there.value, found, together(old, earlier))

    def consolidate(self, state: GemState, batch: Batch, key: PRNGKeyArray) -> GemState:
        del batch, key
        return state


def together(old: Batch, earlier: Bool[Array, " T"]) -> Batch:
    """The examples of all earlier tasks in one batch."""
    x, y = (a.reshape(-1, *a.shape[2:]) for a in (old.x, old.y))
    task = jnp.repeat(old.task, old.y.shape[1])
    return Batch(x, y, task, (old.weight * earlier[:, None]).ravel())


def gem(
    network: Network,
    memory: Ring,
    *,
    memory_batch: int | None = None,
    margin: float = 0.5,
    ridge: float = RIDGE,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Gem:
    """One step on each minibatch, along the gradient nearest to its own that raises no earlier task's loss.

    That of a task is taken on `memory_batch` of its stored examples, drawn anew for each step, or on all. `margin` (γ)
    is how much of each earlier task's gradient there is at least in a step that had to be changed; `ridge` is added to
    the diagonal of G Gᵀ. `lr` is for the experts and heads, `router_lr` (by default the same) for the router.
    """
    if memory_batch is not None:
        check_positive("memory_batch", memory_batch)
    return Gem(
        network,
        memory,
        rates_of(lr, router_lr),
        jnp.asarray(check_rate("margin", margin), float),
        jnp.asarray(check_rate("ridge", ridge), float),
        memory_batch,
        optimizer,
    )


@dataclass(frozen=True)
class GemOptions(RoutedOptions):
    """a step must not raise the loss on any earlier task (GEM)"""

    memory: int = 5120
    """examples that the memory holds, as many of each task"""
    memory_batch: int | None = None
    """examples of each task on which its gradient is taken, drawn anew for each step; by default all"""
    by_class: bool = False
    """hold as many examples of each class of a task"""
    margin: float = 0.5
    """γ: how much of each earlier task's gradient a changed step has at least"""
    ridge: float = RIDGE
    """what is added to the diagonal of the quadratic programme"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("memory", self.memory)
        if self.memory_batch is not None:
            check_positive("memory_batch", self.memory_batch)
        check_rate("margin", self.margin)
        check_rate("ridge", self.ridge)

    def __call__(self, network: Network) -> Gem:
        return gem(
            network,
            ring(network.spec, self.memory, batch=0, by_class=self.by_class),
            memory_batch=self.memory_batch,
            margin=self.margin,
            ridge=self.ridge,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
        )
