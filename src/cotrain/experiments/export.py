"""A learner as one program, which predicts without cotrain: for any number of examples and a task, probabilities.

Axes: N examples.
"""

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int

from cotrain.experiments.files import write_bytes
from cotrain.experiments.learner import Learner

PLATFORMS = ("cpu", "cuda", "tpu")
OPSET = 21  # of ONNX; later ones have nothing that is needed
TOLERANCE = 1e-5  # within which ONNX Runtime must agree

Probabilities = Callable[[Float[Array, "N ..."], Int[Array, ""]], Float[Array, "N classes"]]


def export(learner: Learner, path: Path) -> None:
    """Writes a learner's predictions to a file: as an ONNX model if its name ends so, else as a program of JAX's."""
    write_bytes(path, as_onnx(learner) if path.suffix.lower() == ".onnx" else as_program(learner))


def as_program(learner: Learner) -> bytes:
    """A serialized program in StableHLO, with the parameters in it, which `jax.export.deserialize` reads."""
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)  # or it would name the files that it was made of
    try:
        make = jax.export.export(jax.jit(_probabilities(learner)), platforms=PLATFORMS)
        return bytes(make(*_arguments(learner)).serialize())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def as_onnx(learner: Learner) -> bytes:
    """An ONNX model, of which ONNX Runtime has been seen to give the learner's probabilities."""
    if importlib.util.find_spec("jax2onnx") is None:
        raise RuntimeError("exporting to ONNX needs a converter: pip install 'cotrain[onnx]'")
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]

    arguments, before = _arguments(learner), dict(jnp.__dict__)
    traced = jax.make_jaxpr(_probabilities(learner))(*arguments)  # while JAX's functions are its own
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # its warnings are about nothing that matters
    try:
        model = to_onnx(
            jaxpr_as_fun(traced),
            arguments,
            model_name="cotrain",
            opset=OPSET,
            input_names=["x", "task"],
            output_names=["probabilities"],
        )
    except Exception as error:  # whatever it stumbles over
        reason = " ".join(str(error).split())
        raise RuntimeError(f"the converter to ONNX cannot do this network ({reason:.200})") from error
    finally:
        jnp.__dict__.update(before)  # it leaves a function of its own among them
    data = model.SerializeToString()
    _check(learner, data)
    return data


def _probabilities(learner: Learner) -> Probabilities:
    network, tasks = learner.network, learner.tasks
    parameters = jax.tree.map(lambda a: jnp.asarray(np.asarray(a[0])), learner.state.learner.parameters)

    def probabilities(x: Float[Array, "N ..."], task: Int[Array, ""]) -> Float[Array, "N classes"]:
        logits = network.predict(parameters, jnp.clip(task, 0, tasks - 1), x)
        return jnp.where((task >= 0) & (task < tasks), jax.nn.softmax(logits), jnp.nan)

    return probabilities


def _arguments(learner: Learner) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of what the program takes: any number of inputs, and a task."""
    examples = jax.export.symbolic_shape("N")
    return (
        jax.ShapeDtypeStruct((*examples, *learner.network.spec.shape), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def _check(learner: Learner, model: bytes) -> None:
    """Refuses an ONNX model that gives other probabilities than the learner for random inputs."""
    from onnxruntime import InferenceSession, SessionOptions  # pyright: ignore[reportMissingImports]

    options, draws = SessionOptions(), np.random.default_rng(0)
    options.log_severity_level = 3  # errors
    session = InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for task in range(learner.tasks):
        x = draws.random((1 + task % 8, *learner.network.spec.shape), np.float32)
        wanted = learner.probabilities(x, task)
        found = np.asarray(session.run(None, {"x": x, "task": np.array(task, np.int32)})[0])[:, : wanted.shape[1]]
        if not np.allclose(found, wanted, rtol=0, atol=TOLERANCE, equal_nan=True):
            off = np.abs(found - wanted).max()
            raise RuntimeError(f"the converter to ONNX gets task {task} wrong: a probability is off by {off:.2g}")
