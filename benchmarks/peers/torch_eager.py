"""The methods in PyTorch: as one writes them plainly, with stacked experts, and compiled.

Each function takes a workload and returns a function that learns its whole stream once, from fresh parameters and
always with the same random numbers, one epoch per task.

Axes: T tasks, E experts of a layer, K chosen, M members (the experts that take part), B examples.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, _dynamo, nn
from torch.fx.experimental import _config
from torch.nn import functional

from benchmarks.workload import Pass

Step = Callable[[Tensor, Tensor, int], Tensor]  # learns a minibatch of a task; returns its loss before the step
Gradients = Callable[[Callable[..., Tensor], list[Tensor]], tuple[Tensor, Sequence[Tensor]]]  # a loss and its slopes


class Reservoir:
    """A memory that holds every example seen so far with the same probability (Vitter's algorithm R)."""

    def __init__(self, capacity: int, batch: int, pixels: int, seed: int):
        self.x = np.zeros((capacity, pixels), np.float32)
        self.y = np.zeros(capacity, np.int64)
        self.task = np.zeros(capacity, np.int64)
        self.batch = batch
        self.seen = 0
        self.random = np.random.default_rng(seed)

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of stored examples, each drawn uniformly: (x_M, y_M) = sample_batch(M)."""
        picked = (self.random.random(self.batch) * min(self.seen, len(self.y))).astype(np.int64)
        return torch.from_numpy(self.x[picked]), torch.from_numpy(self.y[picked]), torch.from_numpy(self.task[picked])

    def add(self, x: Tensor, y: Tensor, task: int) -> None:
        """Offers a batch to the memory, as if its examples came one by one: M ← M ∪ (x, y)."""
        seen = self.seen + np.arange(1, len(y) + 1)
        place = np.where(seen <= len(self.y), seen - 1, (self.random.random(len(y)) * seen).astype(np.int64))
        kept = np.flatnonzero(place < len(self.y))
        if len(kept):
            place = place[kept]  # of examples with the same place the last one stays
            self.x[place], self.y[place], self.task[place] = x.numpy()[kept], y.numpy()[kept], task
        self.seen += len(y)


class SharedBottom(nn.Module):
    """A dense network under the tasks' heads."""

    def __init__(self, pixels: int, hidden: Sequence[int], classes: int, tasks: int):
        super().__init__()
        sizes = (pixels, *hidden)
        layers = [(_linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        self.bottom = nn.Sequential(*(module for layer in layers for module in layer))
        self.heads = nn.ModuleList(_linear(sizes[-1], classes) for _ in range(tasks))

    def forward(self, x: Tensor, task: int | Tensor) -> Tensor:
        return _classify(self.heads, self.bottom(x), task)


def finetune(workload: Any) -> Callable[[], Pass]:
    """Plain SGD on a shared bottom."""

    def begin() -> tuple[nn.Module, Step]:
        model = _shared_bottom(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)

        def step(x: Tensor, y: Tensor, task: int) -> Tensor:
            return _descend(optimizer, model(x, task), y)

        return model, step

    return _passes(workload, begin)


def replay(workload: Any) -> Callable[[], Pass]:
    """A step on each minibatch, then one on a batch from memory, on a shared bottom."""

    def begin() -> tuple[nn.Module, Step]:
        model, memory = _shared_bottom(workload), _reservoir(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)

        def step(x: Tensor, y: Tensor, task: int) -> Tensor:
            loss = _descend(optimizer, model(x, task), y)
            if memory.seen:
                old_x, old_y, old_task = memory.sample()
                _descend(optimizer, model(old_x, old_task), old_y)
            memory.add(x, y, task)
            return loss

        return model, step

    return _passes(workload, begin)


class Routed(nn.Module):
    """A layer of experts, and the logits by which each task chooses K of them."""

    def __init__(self, inputs: int, units: int, experts: int, k: int, tasks: int, noise: float):
        super().__init__()
        self.experts = nn.ModuleList(_linear(inputs, units) for _ in range(experts))
        self.logits = nn.Parameter(torch.empty(tasks, experts).uniform_(-1e-3, 1e-3))
        self.k, self.noise = k, noise

    def sample(self, task: int | Tensor) -> tuple[list[int], Tensor]:
        """Members and gates [B or 1, M] of a sampled route for each task: R̂ ← sample(R)."""
        logits = self.logits.detach()
        if isinstance(task, int):
            chosen = (logits[task] + self.noise * torch.randn(logits.shape[1])).topk(self.k).indices
            return chosen.tolist(), self.gates(task, chosen)
        noisy = logits + self.noise * torch.randn_like(logits)  # a draw per task: its examples share the route
        chosen = torch.zeros(len(task), logits.shape[1], dtype=torch.bool)
        chosen.scatter_(1, noisy[task].topk(self.k).indices, True)
        members = chosen.any(0).nonzero()[:, 0]
        scores = self.logits[task].masked_fill(~chosen, -torch.inf)
        return members.tolist(), scores.softmax(1)[:, members]

    def best(self, task: int) -> Tensor:
        """The experts that a task uses: argtop-k R[l,t,:]."""
        return self.logits.detach()[task].topk(self.k).indices

    def gates(self, task: int, chosen: Tensor) -> Tensor:
        return self.logits[task, chosen].softmax(0)[None]

    def forward(self, x: Tensor, members: list[int], gates: Tensor) -> Tensor:
        outputs = torch.stack([self.experts[e](x) for e in members], dim=1).relu()  # [B, M, units]
        return torch.matmul(gates[:, None], outputs)[:, 0]


class RoutingNetwork(nn.Module):
    """Layers of experts under the tasks' heads."""

    def __init__(self, workload: Any):
        super().__init__()
        tasks, pixels = len(workload.tasks), workload.tasks[0][0].shape[1]
        sizes = (pixels, *[workload.units] * workload.layers)
        self.layers = nn.ModuleList(
            Routed(inputs, units, workload.experts, workload.k, tasks, workload.noise)
            for inputs, units in pairwise(sizes)
        )
        self.heads = nn.ModuleList(_linear(workload.units, workload.classes) for _ in range(tasks))

    def forward(self, x: Tensor, task: int | Tensor, routes: list[tuple[list[int], Tensor]]) -> Tensor:
        for layer, (members, gates) in zip(self.layers, routes, strict=True):
            x = layer(x, members, gates)
        return _classify(self.heads, x, task)

    def sample(self, task: int | Tensor) -> list[tuple[list[int], Tensor]]:
        return [layer.sample(task) for layer in self.layers]


def algorithm1(workload: Any) -> Callable[[], Pass]:
    """A routing network with replay and co-training: the paper's Algorithm 1, task by task.

    The tasks of a replayed batch go through the network one after another, each by its own route, as in Avalanche's
    multi-task modules.
    """

    def one_by_one(model: RoutingNetwork, x: Tensor, task: Tensor) -> Tensor:
        logits = x.new_empty(len(x), workload.classes)
        for t in task.unique().tolist():
            mine = task == t
            logits[mine] = model(x[mine], t, model.sample(t))
        return logits

    return _plain(workload, one_by_one)


def algorithm1_vectorised(workload: Any) -> Callable[[], Pass]:
    """The same, with all experts that a replayed batch needs on the whole batch, mixed by a matrix of gates."""
    return _plain(workload, lambda model, x, task: model(x, task, model.sample(task)))


def _plain(workload: Any, mixed: Callable[[RoutingNetwork, Tensor, Tensor], Tensor]) -> Callable[[], Pass]:
    def begin() -> tuple[nn.Module, Step]:
        model, memory = RoutingNetwork(workload), _reservoir(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
        used = [[set() for _ in workload.tasks] for _ in model.layers]  # E[l,t,:]

        def step(x: Tensor, y: Tensor, task: int) -> Tensor:
            loss = _descend(optimizer, model(x, task, model.sample(task)), y)
            both_x, both_y, both_task = x, y, task
            if memory.seen:
                old_x, old_y, old_task = memory.sample()
                _descend(optimizer, mixed(model, old_x, old_task), old_y)
                both_x, both_y = torch.cat([x, old_x]), torch.cat([y, old_y])
                both_task = torch.cat([torch.full_like(y, task), old_task])
            memory.add(x, y, task)

            routes, moving = [], []
            for layer, taken in zip(model.layers, used, strict=True):
                best = layer.best(task)
                taken[task] = set(best.tolist())  # E[l,t,:] ← argtop-k R[l,t,:]
                free = sorted(set(range(len(layer.experts))).difference(*taken))
                if free:
                    routes.append((free, torch.full((1, len(free)), 1 / len(free))))
                    moving += [parameter for e in free for parameter in layer.experts[e].parameters()]
                else:  # the current task's best route, which learns nothing
                    routes.append((best.tolist(), layer.gates(task, best)))
            if moving:
                _descend(optimizer, model(both_x, both_task, routes), both_y, moving)  # θ ⊙ (1 − E)
            return loss

        return model, step

    return _passes(workload, begin)


class Heads(NamedTuple):
    """The tasks' heads in stacks."""

    weights: Tensor  # [T, classes, units]
    biases: Tensor  # [T, classes]


class Stacks(NamedTuple):
    """A routing network's parameters in stacks; the leading axis counts experts, logits or tasks."""

    weights: list[Tensor]  # [E, units, inputs] of each layer
    biases: list[Tensor]  # [E, units]
    logits: Tensor  # [layers · T · E]
    heads: Heads

    @staticmethod
    def of(network: RoutingNetwork) -> "Stacks":
        return Stacks(
            weights=[_stack(layer.experts, "weight") for layer in network.layers],
            biases=[_stack(layer.experts, "bias") for layer in network.layers],
            logits=_stack(network.layers, "logits").flatten(),
            heads=_stack_heads(network.heads),
        )


def algorithm1_stacked(workload: Any) -> Callable[[], Pass]:
    """Algorithm 1 with the experts in stacks: a step gathers the part of them that it moves."""
    return _stacked(workload, partial(_move_sampled, _autograd), partial(_move_unused, _autograd))


def finetune_compiled(workload: Any) -> Callable[[], Pass]:
    """As `finetune`, with a whole step in one compiled graph; raises torch's error where it cannot compile."""
    return _dense(workload, torch.compile(_move_dense, fullgraph=True, dynamic=False), remember=False)


def replay_compiled(workload: Any) -> Callable[[], Pass]:
    """As `replay`, with a whole step in one compiled graph; raises torch's error where it cannot compile."""
    return _dense(workload, torch.compile(_move_dense, fullgraph=True, dynamic=False), remember=True)


def algorithm1_compiled(workload: Any) -> Callable[[], Pass]:
    """As `algorithm1_stacked`, with each of its steps in one compiled graph for any number of members.

    Raises torch's error where it cannot compile. A single member is a case of its own to the compiler: only the
    passes after the first are sure to compile nothing.
    """
    compile_any = partial(torch.compile, fullgraph=True, dynamic=True)
    moves = (compile_any(partial(move, _functional)) for move in (_move_sampled, _move_unused))
    one_pass = _stacked(workload, *moves)

    def compiled_pass() -> Pass:
        # Numbers that happen to be equal (of members in two layers, of examples) are not taken to be so always.
        with _dynamo.config.patch(recompile_limit=64), _config.patch(use_duck_shape=False):
            return one_pass()

    return compiled_pass


def _dense(workload: Any, move: Callable[..., Tensor], remember: bool) -> Callable[[], Pass]:
    rows = torch.arange(len(workload.tasks)).split(1)

    def begin() -> tuple[tuple[list[Tensor], Heads], Step]:
        network, memory = _shared_bottom(workload), _reservoir(workload)
        bottom, heads = [p.detach() for p in network.bottom.parameters()], _stack_heads(network.heads)

        def step(x: Tensor, y: Tensor, task: int) -> Tensor:
            loss = move(bottom, heads, x, y, rows[task], workload.lr)
            if remember:
                if memory.seen:
                    move(bottom, heads, *memory.sample(), workload.lr)
                memory.add(x, y, task)
            return loss

        return (bottom, heads), step

    return _passes(workload, begin)


def _stacked(
    workload: Any, move_sampled: Callable[..., Tensor], move_unused: Callable[..., Tensor]
) -> Callable[[], Pass]:
    layers, tasks, experts, k = workload.layers, len(workload.tasks), workload.experts, workload.k
    offsets = torch.arange(layers * tasks).view(layers, tasks, 1) * experts  # of a row among the logits
    rows = torch.arange(tasks).split(1)

    def begin() -> tuple[Stacks, Step]:
        stacks, memory = Stacks.of(RoutingNetwork(workload)), _reservoir(workload)
        logits = stacks.logits.view(layers, tasks, experts)
        used = [[set() for _ in range(tasks)] for _ in range(layers)]  # E[l,t,:]

        def learn(x: Tensor, y: Tensor, task: Tensor) -> Tensor:
            """A step on sampled routes, for a batch of one task ([1]) or of each example's own ([B])."""
            one = len(task) == 1
            candidates = logits.index_select(1, task) if one else logits
            noisy = torch.randn_like(candidates).mul_(workload.noise).add_(candidates)
            if not one:  # a draw per task: its examples share the route
                noisy = noisy.index_select(1, task)
            chosen = noisy.topk(k).indices  # R̂ ← sample(R), [layers, B or 1, K]
            place = (chosen + offsets.index_select(1, task)).flatten()
            if one:
                members = chosen.flatten(1).unbind()
            else:
                taken = torch.zeros(layers, experts).scatter_(1, chosen.flatten(1), 1)
                members = [row.nonzero().flatten() for row in taken.unbind()]
            return move_sampled(stacks, x, y, task, chosen, place, members, workload.lr)

        def step(x: Tensor, y: Tensor, task: int) -> Tensor:
            loss = learn(x, y, rows[task])
            both_x, both_y, both_task = x, y, rows[task].expand(len(y))
            if memory.seen:
                old_x, old_y, old_task = memory.sample()
                learn(old_x, old_y, old_task)
                both_x, both_y = torch.cat([x, old_x]), torch.cat([y, old_y])
                both_task = torch.cat([both_task, old_task])
            memory.add(x, y, task)

            free, members, gates = [], [], []
            scores, best = logits[:, task].topk(k)
            for layer, chosen in enumerate(best.tolist()):
                used[layer][task] = set(chosen)  # E[l,t,:] ← argtop-k R[l,t,:]
                unused = sorted(set(range(experts)).difference(*used[layer]))
                free.append(bool(unused))
                if unused:
                    members.append(torch.tensor(unused))
                    gates.append(torch.full((len(unused),), 1 / len(unused)))
                else:  # the current task's best route, which learns nothing
                    members.append(best[layer])
                    gates.append(scores[layer].softmax(0))
            if any(free):
                move_unused(stacks, both_x, both_y, both_task, free, members, gates, workload.lr)  # θ ⊙ (1 − E)
            return loss

        return stacks, step

    return _passes(workload, begin)


def _move_dense(bottom: list[Tensor], heads: Heads, x: Tensor, y: Tensor, task: Tensor, lr: float) -> Tensor:
    """A step of the shared bottom, and of the heads of one task ([1]) or of each example's own ([B])."""

    def loss(weight: Tensor, bias: Tensor, *bottom: Tensor) -> Tensor:
        features = x
        for layer in zip(bottom[::2], bottom[1::2], strict=True):
            features = functional.linear(features, *layer).relu()
        return _head_loss(features, y, weight, bias)

    entries = [(heads.weights, task), (heads.biases, task), *((parameter, None) for parameter in bottom)]
    return _move(_functional, loss, entries, lr)


def _move_sampled(
    gradients: Gradients,
    stacks: Stacks,
    x: Tensor,
    y: Tensor,
    task: Tensor,
    chosen: Tensor,
    place: Tensor,
    members: Sequence[Tensor],
    lr: float,
) -> Tensor:
    """A step of the chosen experts, and of the logits and heads of one task ([1]) or of each example's own ([B])."""
    layers, batch, k = chosen.shape
    experts = len(stacks.weights[0])

    def loss(weight: Tensor, bias: Tensor, scores: Tensor, *parts: Tensor) -> Tensor:
        shares = scores.view(layers, batch, k).softmax(2)
        if batch == 1:
            gates = shares.flatten(1).unbind()
        else:
            matrices = torch.zeros(layers, batch, experts).scatter(2, chosen, shares).unbind()
            gates = [matrix.index_select(1, e).unsqueeze(1) for matrix, e in zip(matrices, members, strict=True)]
        return _head_loss(_run(x, zip(parts[::2], parts[1::2], gates, strict=True)), y, weight, bias)

    entries = [(stacks.heads.weights, task), (stacks.heads.biases, task), (stacks.logits, place)]
    for weights, biases, e in zip(stacks.weights, stacks.biases, members, strict=True):
        entries += [(weights, e), (biases, e)]
    return _move(gradients, loss, entries, lr)


def _move_unused(
    gradients: Gradients,
    stacks: Stacks,
    x: Tensor,
    y: Tensor,
    task: Tensor,
    free: Sequence[bool],
    members: Sequence[Tensor],
    gates: Sequence[Tensor],
    lr: float,
) -> Tensor:
    """A step of the members of each layer whose members are free to learn, and of nothing else."""
    heads = [stack.index_select(0, task) for stack in stacks.heads]
    layers = list(zip(free, members, stacks.weights, stacks.biases, strict=True))
    still = [None if moves else (weights[e], biases[e]) for moves, e, weights, biases in layers]

    def loss(*moving: Tensor) -> Tensor:
        pairs = zip(moving[::2], moving[1::2], strict=True)
        parts = [next(pairs) if pair is None else pair for pair in still]
        return _head_loss(_run(x, [(*pair, gate) for pair, gate in zip(parts, gates, strict=True)]), y, *heads)

    entries = [(stack, e) for moves, e, *pair in layers if moves for stack in pair]
    return _move(gradients, loss, entries, lr)


def _run(x: Tensor, layers: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The features that the members' weights and biases give, with gates [M], or [B, 1, M] of each example."""
    for weight, bias, gates in layers:
        outputs = functional.linear(x, weight.flatten(0, 1), bias.flatten()).relu().view(-1, *bias.shape)
        x = torch.matmul(gates, outputs).flatten(1)
    return x


def _head_loss(features: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The loss with one head, or with each example's own."""
    if len(weight) == 1:
        logits = functional.linear(features, weight.flatten(0, 1), bias.flatten())
    else:
        logits = torch.baddbmm(bias.unsqueeze(2), weight, features.unsqueeze(2)).flatten(1)
    return functional.cross_entropy(logits, y)


def _move(
    gradients: Gradients, loss: Callable[..., Tensor], entries: list[tuple[Tensor, Tensor | None]], lr: float
) -> Tensor:
    """Moves entries of stacks (or all of one) down the gradient of their loss, which it returns too.

    An entry named twice has the sum of both gradients.
    """
    value, slopes = gradients(loss, [stack if e is None else stack.index_select(0, e) for stack, e in entries])
    for (stack, e), slope in zip(entries, slopes, strict=True):
        if e is None:
            stack.sub_(slope, alpha=lr)
        else:
            stack.index_add_(0, e, slope, alpha=-lr)
    return value


def _autograd(loss: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    value = loss(*(leaf.requires_grad_() for leaf in leaves))
    return value.detach(), torch.autograd.grad(value, leaves)


def _functional(loss: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """As `_autograd`, and traced by torch.compile together with the step around it."""
    slopes, value = torch.func.grad_and_value(loss, argnums=tuple(range(len(leaves))))(*leaves)
    return value, slopes


def _stack(modules: nn.ModuleList, name: str) -> Tensor:
    return torch.stack([getattr(module, name).detach() for module in modules])


def _stack_heads(heads: nn.ModuleList) -> Heads:
    return Heads(_stack(heads, "weight"), _stack(heads, "bias"))


def _classify(heads: nn.ModuleList, features: Tensor, task: int | Tensor) -> Tensor:
    """The logits of a batch of one task, or of each example by its own task's head."""
    if isinstance(task, int):
        return heads[task](features)
    own = [heads[t] for t in task.tolist()]
    weight, bias = torch.stack([head.weight for head in own]), torch.stack([head.bias for head in own])
    return torch.baddbmm(bias[:, :, None], weight, features[:, :, None])[:, :, 0]


def _descend(
    optimizer: torch.optim.Optimizer, logits: Tensor, y: Tensor, moving: Sequence[Tensor] | None = None
) -> Tensor:
    """A step of all parameters that the logits depend on, or of some of them."""
    loss = functional.cross_entropy(logits, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward(inputs=moving)
    optimizer.step()  # passes over parameters without a gradient
    return loss.detach()


def _linear(inputs: int, units: int) -> nn.Linear:
    """A dense layer with He-uniform weights and zero biases."""
    linear = nn.Linear(inputs, units)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return linear


def _shared_bottom(workload: Any) -> SharedBottom:
    return SharedBottom(workload.tasks[0][0].shape[1], workload.hidden, workload.classes, len(workload.tasks))


def _reservoir(workload: Any) -> Reservoir:
    return Reservoir(workload.memory, workload.memory_batch, workload.tasks[0][0].shape[1], workload.seed)


def _passes(workload: Any, begin: Callable[[], tuple[Any, Step]]) -> Callable[[], Pass]:
    """The function that learns the stream once, by the step that `begin` gives together with a fresh model."""
    tasks = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.tasks]

    def one_pass() -> Pass:
        torch.manual_seed(workload.seed)
        shuffle = torch.Generator().manual_seed(workload.seed)  # its own, so that all variants see the same stream
        model, step = begin()
        iterations, losses = 0, deque(maxlen=20)
        start = time.perf_counter()
        for task, (x, y) in enumerate(tasks):
            order = torch.randperm(len(y), generator=shuffle)
            batches = zip(x[order].split(workload.batch), y[order].split(workload.batch), strict=True)
            for batch_x, batch_y in batches:
                losses.append(step(batch_x, batch_y, task))
                iterations += 1
        seconds = time.perf_counter() - start
        return Pass(iterations, seconds, torch.stack(list(losses)).mean().item(), model)

    return one_pass
