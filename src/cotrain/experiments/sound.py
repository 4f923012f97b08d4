"""What a result and a checkpoint say, if all of it can be true.

Axes: T tasks, P phases (T, or 1 if joint), E experts.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cotrain.choice import Choice, NoOption
from cotrain.data.benchmarks import Arrays, Images
from cotrain.errors import Invalid
from cotrain.experiments import provenance
from cotrain.experiments.config import Config
from cotrain.experiments.result import METRICS, NUMERICS, Result
from cotrain.metrics import used_experts

MEND_OLD = "run it again, or use the version that wrote it"
MEND_NEW = "use the version that wrote it"
KEYS = {"numerics", "config", "seed", *METRICS, "accuracy", "initial_accuracy", "parameters", "files"}
MORE_KEYS = {"software", "data"}  # which the first records did not have
CLOSE = 1e-5  # sums of gates, which are float32
RESERVED = ("private", "expert-gate")  # methods whose experts are one for each task
SAME = 1e-9  # metrics


class Wrong(Exception):
    """What is wrong with a file, and how to mend it where that is not as usual."""

    def __init__(self, what: str, mend: str | None = None):
        super().__init__(what)
        self.what, self.mend = what, mend


class Sound(NamedTuple):
    """What a result without fault says."""

    config: Config | None
    seed: int
    accuracy: np.ndarray  # [P, T]
    record: dict[str, Any]


def result_of(record: dict[str, Any]) -> Sound:
    """What a record says, if all of it can be true."""
    _check_version(record)
    unknown, missing = record.keys() - KEYS - MORE_KEYS, KEYS - record.keys()
    if unknown:
        raise Wrong(f"it has an unknown entry {short(min(unknown))}, of a newer version perhaps", MEND_NEW)
    need(not missing, f"it has no {', '.join(sorted(missing))}")
    config = None if record["config"] is None else _config_of(record["config"])
    seed, parameters, rows = record["seed"], record["parameters"], record["accuracy"]
    need(is_count(seed), f"its seed is {short(seed)}")
    need(is_count(parameters) and parameters > 0, f"its number of parameters is {short(parameters)}")
    square = is_list_of(rows, lambda row: isinstance(row, list) and len(row) == len(rows)) and len(rows) > 0
    need(square, "its accuracies are not a square matrix")
    accuracy = np.array([_accuracies(row) for row in rows])
    initial = record["initial_accuracy"]
    need(isinstance(initial, list) and len(initial) == len(rows), "its initial accuracies are not one for each task")
    initial = np.array(_accuracies(initial))
    accuracy = _check_evaluated(accuracy, initial, config)
    _check_metrics(record, Result(seed, accuracy, initial, (), (), parameters, {}))
    if config is not None and config.method.name == "private" and not _own(config.network):
        experts = config.flat.get("experts", 1)
        need(experts >= len(rows), f"it has {experts} private experts for {len(rows)} tasks")
    _check_origin(record, config)
    return Sound(config, seed, accuracy, record)


def _check_version(entries: dict[str, Any]) -> None:
    version = entries.get("numerics")
    if type(version) is not int or version != NUMERICS:
        raise Wrong(f"its numbers are of another version ({short(version)}, and this one's {NUMERICS})", MEND_OLD)


def _config_of(entries: Any) -> Config:
    """The configuration of a record; what is not in it is as by default."""
    need(isinstance(entries, dict), f"its configuration is {short(entries)}")
    try:
        return Config.read(entries)
    except NoOption as error:
        raise Wrong(f"it has an unknown option {short(error.field)}, of a newer version perhaps", MEND_NEW) from error
    except Invalid as error:
        raise Wrong(f"its option {error.field} is {short(error.value)}") from error


def _tasks_of(config: Config | None) -> int | None:
    """The number of tasks, where the configuration tells it."""
    known = None if config is None else config.benchmark.options
    return known.tasks if isinstance(known, Images) else None


def _accuracies(values: list[Any]) -> list[float]:
    """Numbers of which each is an accuracy, or NaN where there is none."""
    for value in values:
        need(value is None or (is_number(value) and 0 <= value <= 1), f"it has an accuracy of {short(value)}")
    return [math.nan if value is None else float(value) for value in values]


def _check_evaluated(accuracy: np.ndarray, initial: np.ndarray, config: Config | None) -> np.ndarray:
    """The matrix [P, T], if it has numbers exactly where the configuration says; without one, where one could."""
    tasks = len(accuracy)
    wanted = _tasks_of(config)
    need(wanted in (None, tasks), f"it has {tasks} tasks, and not {short(wanted)}")
    last, seen, every = np.zeros((tasks, tasks), bool), np.tri(tasks, dtype=bool), np.ones((tasks, tasks), bool)
    last[-1] = True
    there = ~np.isnan(accuracy)
    if config is None:
        joint = tasks > 1 and bool((there == last).all())
        shapes, all_tasks = [last, seen, every], not np.isnan(initial).any()
    else:
        joint, all_tasks = config.joint, config.schedule.evaluate_all
        shapes = [last if joint else every if all_tasks else seen]
    need(any((there == shape).all() for shape in shapes), "its accuracies are not of the tasks that were tested")
    need(bool((np.isnan(initial) != all_tasks).all()), "its initial accuracies are not of the tasks that were tested")
    return accuracy[-1:] if joint else accuracy


def _check_metrics(record: dict[str, Any], result: Result) -> None:
    for name in METRICS:
        found, right = record[name], getattr(result, name)
        if math.isnan(right):
            need(found is None, f"its {name} is {short(found)}, and there is none")
        else:
            same = is_number(found) and abs(found - right) <= SAME
            need(same, f"its {name} is {short(found)}, and {right:.6f} by its accuracies")


def _check_origin(record: dict[str, Any], config: Config | None) -> None:
    """The files, the software and the data that a record names."""
    files, software, data = record["files"], record.get("software"), record.get("data")
    need(isinstance(files, dict) and files.keys() <= {"routing.npz"}, f"its files are {short(files)}")
    routed = None if config is None else _routed(config)
    if routed is not None:
        need(bool(files) == routed, f"it has {'no' if routed else 'a'} routing history, unlike its network")
    need(software is None or is_list_of(values(software), is_word), f"its software is {short(software)}")
    if data is None:
        return
    need(config is not None and isinstance(data, dict), f"its data are {short(data)}")
    assert config is not None
    known = config.benchmark.options
    if isinstance(known, Arrays) or _own(config.benchmark):
        named = data.get("name") == Path(known.arrays).name if isinstance(known, Arrays) else bool(data.get("name"))
        need(named and is_list_of(data.get("sha256"), is_word), f"its data are {short(data)}")
    else:
        need(data == provenance.data(config), "its data are not those of its benchmark")


def _routed(config: Config) -> bool | None:
    """Whether there is anything to route; None of somebody's own network, which may do as it likes."""
    if _own(config.network):
        return None
    return config.network.name == "routing-network" and config.flat["experts"] > 1


def _own(choice: Choice) -> bool:
    """Whether it is of somebody's own, which may do as it likes."""
    return ":" in choice.name


def check_times(times: dict[str, Any]) -> None:
    for name, value in times.items():
        need(is_number(value) and value >= 0, f"its time of {short(name)} is {short(value)}")


def check_routing(arrays: dict[str, np.ndarray], sound: Sound) -> None:
    """Per layer: gates [P, T, E] that route, the experts in use [P, E], and the logits [T, E] after the last phase.

    A router that reads its input has no logits, and gates only for the tasks that were learned.
    """
    (phases, tasks), config = sound.accuracy.shape, sound.config
    options = {} if config is None or _own(config.network) else config.flat
    layers = sum(name.startswith("gates_") for name in arrays)
    by_task = any(name.startswith("logits_") for name in arrays)
    kinds = ("gates", "used", "logits") if by_task else ("gates", "used")
    need(len(arrays) == len(kinds) * layers > 0, f"it has {len(arrays)} arrays")
    need(layers == options.get("layers", layers), f"it has {layers} layers")
    need(by_task == (options["router"] != "input") if _known(options) else True, "its router goes by something else")
    for layer in range(layers):
        need({f"{name}_{layer}" for name in kinds} <= arrays.keys(), f"it has no layer {layer}")
        gates, used = (arrays[f"{name}_{layer}"] for name in kinds[:2])
        logits = arrays[f"logits_{layer}"] if by_task else np.zeros((tasks, gates.shape[-1]))
        need(gates.dtype.kind == logits.dtype.kind == "f" and used.dtype == bool, f"layer {layer} is of another type")
        experts = (options["experts"],) if "experts" in options else gates.shape[-1:]
        shapes = (phases, tasks, *experts), (phases, *experts), (tasks, *experts)
        need((gates.shape, used.shape, logits.shape) == shapes, f"layer {layer} is of another shape")
        need(bool(np.isfinite(gates).all() and (gates >= 0).all()), f"layer {layer} has gates that are no weights")
        need(bool(np.isfinite(logits).all()), f"layer {layer} has logits that are no numbers")
        need(bool((used == used_experts(gates)).all()), f"layer {layer} has other experts in use than its gates say")
        if not _known(options):
            continue
        if by_task:
            with np.errstate(all="ignore"):
                _check_gates(gates, logits.astype(float), options, f"layer {layer}")
        else:
            total = gates.sum(axis=-1, dtype=float)[-1]
            need(bool((abs(total - 1) <= CLOSE).all()), f"layer {layer} has gates that do not add up to 1")


def _known(options: dict[str, Any]) -> bool:
    """Whether routes are by a router of this package."""
    return ":" not in options.get("router", ":")


def _check_gates(gates: np.ndarray, logits: np.ndarray, options: dict[str, Any], layer: str) -> None:
    """Gates are the softmax of the k largest logits, among those or among all; private experts have k = 1.

    In columns, task t has the first t + 1 experts.
    """
    method = options.get("inner", options["method"])
    if method not in RESERVED and (method == "progressive" or options["router"] == "columns"):
        need(bool((gates == np.tri(*logits.shape)).all()), f"{layer} has other gates than columns have")
        return
    k, kind = (1, "chosen") if method in RESERVED else (options["k"], options.get("gates", "chosen"))
    total = gates.sum(axis=-1, dtype=float)
    full = (total >= 1 - CLOSE) if kind == "chosen" else (total > 0)
    need(bool((full & (total <= 1 + CLOSE)).all()), f"{layer} has gates that do not add up to 1")
    need(int((gates > 0).sum(axis=-1).max()) <= k, f"{layer} has routes of more than {k} experts")
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, np.argsort(-logits, axis=1, kind="stable")[:, :k], True, axis=1)
    among = chosen if kind == "chosen" else np.ones_like(chosen)
    expected = np.where(chosen, weights, 0) / np.where(among, weights, 0).sum(axis=1, keepdims=True)
    need(bool((np.abs(gates[-1] - expected) <= CLOSE).all()), f"{layer} has other gates than its logits say")


def checkpoint_of(notes: dict[str, Any], arrays: dict[str, np.ndarray], at: tuple[int, int]) -> int:
    """The first seed of a checkpoint, if all that it says can be true."""
    _check_version(notes)
    config = _config_of(notes["config"]) if "config" in notes else None
    seeds, phase, step = (notes.get(name) for name in ("seeds", "phase", "step"))
    need(is_list_of(seeds, is_count) and bool(seeds), f"its seeds are {short(seeds)}")
    assert isinstance(seeds, list)
    need(
        is_list_of([phase, step], is_count) and (phase, step) == at,
        f"it is at phase {short(phase)}, step {short(step)}, and its name says otherwise",
    )
    accuracy = arrays.get("accuracy")
    need(accuracy is not None and accuracy.dtype.kind == "f" and accuracy.ndim == 3, "it has no accuracies")
    assert accuracy is not None
    runs, phases, tasks = accuracy.shape
    joint = phases != tasks if config is None else config.joint
    need(runs == len(seeds) and phases == (1 if joint else tasks) > 0, "its accuracies are not of its seeds and tasks")
    wanted = _tasks_of(config)
    need(wanted in (None, tasks), f"it has {tasks} tasks, and not {short(wanted)}")
    need(at[0] < phases or at == (phases, 0), f"it is at phase {at[0]} of {phases}")
    need(bool((np.isnan(accuracy) | ((accuracy >= 0) & (accuracy <= 1))).all()), "its accuracies are not from 0 to 1")
    parameters = [array for name, array in arrays.items() if ".learner.parameters" in name]
    need(len(parameters) > 0, "it has no parameters")
    need(all(bool(np.isfinite(array).all()) for array in parameters), "its parameters are not all numbers")
    return seeds[0]


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def is_list_of(values: Any, holds: Any) -> bool:
    return isinstance(values, list) and all(map(holds, values))


def values(entries: Any) -> list[Any] | None:
    return list(entries.values()) if isinstance(entries, dict) else None


def is_word(value: Any) -> bool:
    return value is None or isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number, which 1e999 and true are not."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 63)


def short(value: Any) -> str:
    return f"{value!r:.60}"
