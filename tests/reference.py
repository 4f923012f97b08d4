"""The learning algorithm in plain NumPy: Algorithm 1 of Collier et al. (2020), one example and one expert at a time.

It shares no code with the engine and takes no care to be fast. All random numbers are given to it. Its values:

- an expert or head is a dict of `weight` [outputs, inputs] and `bias` [outputs];
- a state is a dict of `experts` (per layer, a list), `heads` (a list), `router` (per layer, logits [tasks, experts],
  or None where there is only one expert), `memory` and `used` (per layer, a mask [tasks, experts]);
- a batch is a dict of `x`, `y`, `weight` and `task`, the last one number for all examples or one for each;
- a memory is a dict of `kept` (a list of examples), `seen` (a count) and `next` (the batch to be replayed);
- a route is, per layer, a dict from the chosen experts to their gates;
- settings are a dict of `k` (per layer), `noise`, the learning rates, `cotrain_heads` and `capacity`.
"""

import math
from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
    x: np.ndarray
    y: int
    task: int


def softmax(logits):
    exponentials = np.exp(logits - np.max(logits))
    return exponentials / exponentials.sum()


def largest(values, k):
    """The indices of the k largest values."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:k]


def examples_of(batch):
    """The examples of a batch without its padding."""
    tasks = np.broadcast_to(batch["task"], len(batch["y"]))
    return [
        Example(x, int(y), int(task))
        for x, y, task, weight in zip(batch["x"], batch["y"], tasks, batch["weight"], strict=True)
        if weight == 1
    ]


def draw_of_each_task(batch):
    """Which of the draws each task in a batch takes: the only one, or that of its first example."""
    if np.ndim(batch["task"]) == 0:
        return {int(batch["task"]): 0}
    draws = {}
    for position, (task, weight) in enumerate(zip(batch["task"], batch["weight"], strict=True)):
        if weight == 1:
            draws.setdefault(int(task), position)
    return draws


def route_of(state, task, settings, draws=None, row=None):
    """A task's route: the k largest (noisy) logits of each layer, weighted by the softmax of the clean ones."""
    route = []
    for layer, logits in enumerate(state["router"]):
        if logits is None:
            route.append({0: 1.0})
            continue
        noisy = logits[task]
        if draws is not None and draws[layer] is not None:
            noisy = logits[task] + settings["noise"] * draws[layer][row]
        chosen = largest(noisy, settings["k"][layer])
        gates = softmax(logits[task][chosen])
        route.append(dict(zip(chosen, gates, strict=True)))
    return route


def forward(state, x, task, route):
    """The head's logits for one example, each layer's input and experts' outputs, and the head's input."""
    signal = x.ravel()
    trace = []
    for experts, gates in zip(state["experts"], route, strict=True):
        outputs = {e: np.maximum(experts[e]["weight"] @ signal + experts[e]["bias"], 0) for e in gates}
        trace.append((signal, outputs))
        signal = sum(gates[e] * outputs[e] for e in gates)
    head = state["heads"][task]
    return head["weight"] @ signal + head["bias"], trace, signal


def cross_entropy(logits, example, count):
    """An example's share of the mean over so many, and its gradient in the logits."""
    probabilities = softmax(logits)
    slope = probabilities / count
    slope[example.y] -= 1 / count
    return -math.log(probabilities[example.y]) / count, slope


def gradient(state, examples, routes, losses=None):
    """The loss, and its gradient in the experts, the heads and the gates of each task's route.

    The loss is the mean cross-entropy; or the sum of `losses`, functions of logits and example, one for each of those.
    """
    loss = 0.0
    expert_slopes = [[{name: np.zeros_like(a) for name, a in e.items()} for e in layer] for layer in state["experts"]]
    head_slopes = [{name: np.zeros_like(a) for name, a in head.items()} for head in state["heads"]]
    gate_slopes = {task: [dict.fromkeys(gates, 0.0) for gates in route] for task, route in routes.items()}
    for place, example in enumerate(examples):
        task, route = example.task, routes[example.task]
        logits, trace, signal = forward(state, example.x, task, route)
        if losses is None:
            value, slope = cross_entropy(logits, example, len(examples))
        else:
            value, slope = losses[place](logits, example)
        loss += value

        head_slopes[task]["weight"] += np.outer(slope, signal)
        head_slopes[task]["bias"] += slope
        slope = state["heads"][task]["weight"].T @ slope
        for layer in reversed(range(len(trace))):
            signal, outputs = trace[layer]
            slope_below = np.zeros_like(signal)
            for e, gate in route[layer].items():
                gate_slopes[task][layer][e] += slope @ outputs[e]
                before_relu = gate * slope * (outputs[e] > 0)
                expert_slopes[layer][e]["weight"] += np.outer(before_relu, signal)
                expert_slopes[layer][e]["bias"] += before_relu
                slope_below += state["experts"][layer][e]["weight"].T @ before_relu
            slope = slope_below
    return loss, expert_slopes, head_slopes, gate_slopes


def parameters(state):
    """All that is learned, as a list of arrays, which are those of the state: experts, heads, routers."""
    modules = [e for layer in state["experts"] for e in layer] + state["heads"]
    return [module[name] for module in modules for name in ("weight", "bias")] + [
        logits for logits in state["router"] if logits is not None
    ]


def rates_of(state, lr, router_lr):
    """The learning rate of each of the parameters."""
    routers = sum(logits is not None for logits in state["router"])
    return [lr] * (len(parameters(state)) - routers) + [router_lr] * routers


def whole_gradient(state, examples, routes, losses=None):
    """The loss, and its gradient in each of the parameters."""
    loss, expert_slopes, head_slopes, gate_slopes = gradient(state, examples, routes, losses)
    modules = [e for layer in expert_slopes for e in layer] + head_slopes
    slopes = [module[name] for module in modules for name in ("weight", "bias")]
    for layer, logits in enumerate(state["router"]):
        if logits is None:
            continue
        slopes.append(np.zeros_like(logits))
        for task, route in routes.items():
            gates, found = route[layer], gate_slopes[task][layer]
            mean = sum(gates[e] * found[e] for e in gates)
            for e in gates:  # through the softmax of the chosen logits
                slopes[-1][task, e] += gates[e] * (found[e] - mean)
    return loss, slopes


def sampled(state, batch, draws, settings):
    """The route of each task in a batch: R̂ ← sample(R)."""
    return {task: route_of(state, task, settings, draws, row) for task, row in draw_of_each_task(batch).items()}


def taking_part(state, routes):
    """For each of the parameters, whether it takes part in a step on these routes."""
    masks = [
        any(e in route[layer] for route in routes.values())
        for layer, experts in enumerate(state["experts"])
        for e in range(len(experts))
    ]
    masks += [task in routes for task in range(len(state["heads"]))]
    masks = [mask for mask in masks for _ in ("weight", "bias")]
    rows = [[task in routes] for task in range(len(state["heads"]))]
    return masks + [np.array(rows) for logits in state["router"] if logits is not None]


def step(state, slopes, lr, router_lr):
    """A step of all parameters down a gradient."""
    rates = rates_of(state, lr, router_lr)
    for parameter, slope, rate in zip(parameters(state), slopes, rates, strict=True):
        parameter -= rate * slope


def move(module, slopes, lr):
    for name in module:
        module[name] -= lr * slopes[name]


def learn(state, batch, draws, settings, lr, router_lr):
    """One step of the experts on sampled routes, the heads and the router; returns the loss before it."""
    examples = examples_of(batch)
    if not examples:
        return None
    loss, slopes = whole_gradient(state, examples, sampled(state, batch, draws, settings))
    step(state, slopes, lr, router_lr)
    return loss


def below(bound, bits):
    """A whole number in [0, bound) from 64 random bits, given as two words."""
    return bound * (int(bits[0]) << 32 | int(bits[1])) >> 64


def empty_memory():
    return {"kept": [], "seen": 0, "next": {"x": [], "y": [], "task": [], "weight": []}}


def remember(memory, batch, place_bits, pick_bits, capacity):
    """Reservoir sampling (Vitter's algorithm R); then draws the batch that will be replayed next."""
    position = [i for i, weight in enumerate(batch["weight"]) if weight == 1]
    for i, example in zip(position, examples_of(batch), strict=True):
        memory["seen"] += 1
        if memory["seen"] <= capacity:
            memory["kept"].append(example)
        else:
            place = below(memory["seen"], place_bits[i])
            if place < capacity:
                memory["kept"][place] = example
    picked = [memory["kept"][below(len(memory["kept"]), bits)] for bits in pick_bits] if memory["kept"] else []
    memory["next"] = {name: [getattr(example, name) for example in picked] for name in ("x", "y", "task")}
    memory["next"]["weight"] = [1] * len(picked)


def unused_experts(state):
    """For each layer, the experts that no task uses."""
    return [[e for e in range(used.shape[1]) if not used[:, e].any()] for used in state["used"]]


def cotrain(state, examples, task, settings):
    """One step of the experts that no task uses, with equal weights."""
    unused = unused_experts(state)
    if not any(unused):
        return
    best = route_of(state, task, settings)
    route = [
        {e: 1 / len(free) for e in free} if free else gates  # θ ⊙ (1 − E)
        for free, gates in zip(unused, best, strict=True)
    ]
    _, expert_slopes, head_slopes, _ = gradient(state, examples, {e.task: route for e in examples})
    for layer, free in enumerate(unused):
        for e in free:
            move(state["experts"][layer][e], expert_slopes[layer][e], settings["cotraining_lr"])
    if settings["cotrain_heads"]:
        for t, head in enumerate(state["heads"]):
            move(head, head_slopes[t], settings["cotraining_lr"])


def finetune(state, batch, noise, settings):
    """One minibatch of fine-tuning: on one task, on several at once, or on private experts."""
    return learn(state, batch, noise, settings, settings["lr"], settings["router_lr"])


def replay(state, batch, noise, settings):
    """One minibatch of replay."""
    loss = learn(state, batch, noise["current"], settings, settings["lr"], settings["router_lr"])
    old = state["memory"]["next"]  # (x_M, y_M) = sample_batch(M)
    learn(state, old, noise["replayed"], settings, settings["memory_lr"], settings["router_lr"])
    remember(state["memory"], batch, *noise["memory"], settings["capacity"])  # M ← M ∪ (x, y)
    return loss


def cotraining(state, batch, noise, settings, inner=replay):
    """One minibatch of co-training around another method."""
    old = state["memory"]["next"]
    loss = inner(state, batch, noise, settings)
    task = int(batch["task"])
    for layer, gates in enumerate(route_of(state, task, settings)):
        for e in range(len(state["experts"][layer])):
            state["used"][layer][task, e] = e in gates  # E[l,t,e] ← e ∈ argtop-k R[l,t,:]
    cotrain(state, examples_of(batch) + examples_of(old), task, settings)
    return loss


def accuracy(state, task, x, y, settings):
    """The share of a task's examples that its best route gets right."""
    route = route_of(state, task, settings)
    right = [np.argmax(forward(state, each, task, route)[0]) == label for each, label in zip(x, y, strict=True)]
    return np.mean(right)
