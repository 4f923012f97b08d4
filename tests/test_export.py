"""Programs that predict without cotrain: the learner's probabilities, whatever the network, from JAX alone."""

import os
import runpy
import subprocess
import sys
import venv
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import filled, toy

from cotrain.data.stream import Spec
from cotrain.experiments import export
from cotrain.experiments.learner import Learner
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.finetune import finetune
from cotrain.methods.replay import replay
from cotrain.networks.experts import convolution, dense, mlp
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routers.sampling import noisy_top_k
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.steps import init, keys_of

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "load_exported.py"
SPEC = Spec((6, 5), classes=3, tasks=3, widths=(3, 2, 3))
SIZES = (1, 7, 33)
ALL = task_matrix(noisy_top_k(), gates="all")
IMAGES = [convolution(4), mlp((7, 5))]
OWN = runpy.run_path(str(ROOT / "examples" / "own_router.py"))["Options"](sharpness=1.0)()
NETWORKS = {
    "shared_bottom": lambda: shared_bottom(SPEC, (8, 6)),
    "one_head": lambda: shared_bottom(SPEC, (8,), one_head=True),
    "task_matrix": lambda: routing_network(SPEC, dense(8), experts=4, k=2),
    "every_expert": lambda: routing_network(SPEC, dense(8), layers=1, experts=3, k=3, router=ALL),
    "fixed": lambda: routing_network(SPEC, dense(8), layers=1, experts=4, k=2, router=fixed()),
    "by_input": lambda: routing_network(SPEC, dense(8), experts=4, k=2, router=by_input(balance=0.01)),
    "own": lambda: routing_network(SPEC, dense(8), layers=1, experts=4, k=2, router=OWN),
    "images": lambda: routing_network(SPEC, IMAGES, experts=4, k=2, aggregation="concatenate"),
    "images_by_input": lambda: routing_network(
        SPEC, IMAGES, experts=[4, 3], k=2, router=by_input(), aggregation="concatenate", activation=jax.nn.relu
    ),
}


def learner_of(network):
    """A learner whose parameters are random: every task has routes of its own, and no bias is 0."""
    method = finetune(network)
    return Learner(method, state=filled(init, method, keys_of([0])))


@pytest.fixture(scope="module")
def trained():
    """Algorithm 1 on a routing network, after three tasks."""
    stream = toy()
    network = routing_network(stream.spec, dense(12), layers=1, experts=4, k=2)
    learner = Learner(cotraining(replay(network, reservoir(100), lr=0.2)))
    for task in range(3):
        learner.observe(*stream[task].train.take(np.arange(40)), task)
        learner.finish(task)
    return learner


def inputs(size, shape=SPEC.shape):
    return np.random.default_rng(size).normal(size=(size, *shape)).astype(np.float32)


def agrees(predict, learner, tolerance):
    """Whether a program gives a learner's probabilities, for any number of examples, and 0 for classes not there."""
    spec, answers = learner.network.spec, []
    x = inputs(max(SIZES), spec.shape)
    for task in range(spec.tasks):
        wanted = learner.probabilities(x, task)
        for size in SIZES:
            found = np.asarray(predict(x[:size], np.int32(task)))
            assert found.shape == (size, spec.classes)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found[:, : wanted.shape[1]], wanted[:size], rtol=0, atol=tolerance)
            assert learner.network.one_head or not found[:, wanted.shape[1] :].any()
        answers.append(found)
    assert learner.network.one_head or np.abs(answers[0] - answers[2]).max() > 0.01  # the task matters
    assert np.isnan(predict(x, np.int32(-1))).all()
    assert np.isnan(predict(x, np.int32(spec.tasks))).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_gives_the_learners_probabilities(name, tmp_path):
    learner = learner_of(NETWORKS[name]())
    learner.export(tmp_path / "program")
    program = jax.export.deserialize(bytearray((tmp_path / "program").read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    agrees(jax.jit(program.call), learner, 1e-6)


def test_a_program_is_of_what_was_learned_until_then(trained, tmp_path):
    trained.export(tmp_path / "program")
    data = (tmp_path / "program").read_bytes()
    agrees(jax.jit(jax.export.deserialize(bytearray(data)).call), trained, 1e-6)
    assert export.as_program(trained) == data
    new = Learner(trained.method)
    assert export.as_program(new) != data


def test_a_program_names_no_files(trained):
    data = export.as_program(trained)
    assert b"cotrain" not in data
    assert b".py" not in data
    assert jax.config.values["jax_traceback_in_locations_limit"] != 0


def test_a_program_takes_what_the_network_sees_and_nothing_else(trained):
    predict = jax.jit(jax.export.deserialize(bytearray(export.as_program(trained))).call)
    with pytest.raises(ValueError, match="expected float32 and called with uint8"):
        predict(np.zeros((2, 2, 3), np.uint8), np.int32(0))
    with pytest.raises(ValueError, match="Shape mismatch"):
        predict(np.zeros((2, 3, 2), np.float32), np.int32(0))


# Without cotrain

ALONE = """
import runpy, sys

class Refuse:
    names = {"cotrain", "equinox", "jaxtyping", "optax"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is refused")

sys.meta_path.insert(0, Refuse())
for name in Refuse.names:
    try:
        __import__(name)
        raise SystemExit(f"{name} can be imported")
    except ImportError:
        pass
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def loaded(learner, directory, *command):
    """What the example's loader prints, run by a command, beside what the learner says."""
    learner.export(directory / "program")
    x = inputs(7, learner.network.spec.shape)
    np.save(directory / "x.npy", x)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX"))}
    arguments = [*command, EXAMPLE, directory / "program", directory / "x.npy", "1"]
    done = subprocess.run(arguments, cwd=directory, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.loadtxt(done.stdout.splitlines()), learner.probabilities(x, 1), rtol=0, atol=1e-6)


def test_the_loader_needs_nothing_of_ours(trained, tmp_path):
    loaded(trained, tmp_path, sys.executable, "-c", ALONE)


@pytest.mark.network
def test_the_loader_runs_where_there_is_jax_alone(trained, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "jax", "flatbuffers"], check=True)
    missing = (
        "import importlib.util as u; assert not any(map(u.find_spec, ['cotrain', 'equinox', 'jaxtyping', 'optax']))"
    )
    subprocess.run([python, "-I", "-c", missing], check=True)
    loaded(trained, tmp_path, python, "-I")


def test_the_documents_loader_is_the_one_that_runs():
    text = (ROOT / "docs" / "export.md").read_text()
    code = EXAMPLE.read_text().partition("import sys\n")[2]
    assert f"```python\nimport sys\n{code}```" in text


# ONNX


def test_without_the_converter_it_is_said_what_to_install(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'cotrain\[onnx\]'"):
        trained.export(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def converter():
    return pytest.importorskip("jax2onnx")


def run_onnx(path):
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x, task: session.run(["probabilities"], {"x": x, "task": np.asarray(task)})[0]


@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize("name", ["trained", "shared_bottom", "by_input", "images"])
def test_onnx_runtime_gives_the_learners_probabilities(name, trained, tmp_path):
    learner, cumsum = trained if name == "trained" else learner_of(NETWORKS[name]()), jnp.cumsum
    learner.export(tmp_path / "model.onnx")
    agrees(run_onnx(tmp_path / "model.onnx"), learner, 1e-5)
    assert jnp.cumsum is cumsum  # the converter puts another one in its place


@pytest.mark.usefixtures("converter")
def test_what_the_converter_cannot_do_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="the converter to ONNX cannot do this network"):
        learner_of(NETWORKS["images_by_input"]()).export(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_the_converter_gets_wrong_is_refused(trained, tmp_path, converter, monkeypatch):
    right = converter.to_onnx
    monkeypatch.setattr(
        converter, "to_onnx", lambda f, *args, **options: right(lambda x, task: f(x + 0.1, task), *args, **options)
    )
    with pytest.raises(RuntimeError, match="the converter to ONNX gets task 0 wrong"):
        trained.export(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
