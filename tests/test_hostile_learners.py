"""Files of learners that somebody else may have written, and parts of one's own that are unlike others."""

import functools
import resource
import sys
from typing import Any, NamedTuple

import equinox as eqx
import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import deserialize
from test_learner import PIECES, practised
from test_saved import NETWORK, OPTIMIZER, PLAIN, REPLAY, called, made_of, parts, resealed, saying, whole, why

import cotrain
from cotrain import Invalid, Learner, finetune, load_learner
from cotrain.experiments.saved import decode, encode

THIS = sys.modules[__name__]


@pytest.mark.parametrize(
    ("name", "values"), [("spec.0", [[5 * 10**8], [2**62], [10**9] * 3]), ("makes.0.with.units", [10**9, 2**62])]
)
def test_no_memory_is_taken_for_inputs_and_units_that_are_only_spoken_of(name, values):
    for value in values:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert "it describes no learner" in why(saying(REPLAY, f"{NETWORK}.{name}", value)), value
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_what_a_file_says_is_called_with_nothing_that_it_says():
    many = called({"name": "cotrain.networks.routing_network:routing_network"}, 5, layers=10**8)
    options = {
        "is": "cotrain.methods.finetune:FinetuneOptions",
        "with": {"lr": 0.1, "router_lr": None, "optimizer": many},
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in (options, many):
        why(saying(REPLAY, OPTIMIZER, words))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_optax_computes_nothing_with_what_a_file_says():
    forever = called({"name": "optax:update_moment"}, 10**9, 10**9, order=10**9)
    assert why(saying(REPLAY, OPTIMIZER, forever)).startswith("own: 'optax:update_moment' is not valid")


ARRAY = {"shape": [2], "values": [1.0, 2.0]}


@pytest.mark.parametrize("what", ["array", "numpy"])
def test_a_file_that_is_refused_spoils_no_other(what):
    fixed = ["activation", "router.with.kind", "makes.0.with.activation", "makes.0.with.alone", "one_head"]
    for place in [
        *(f"{NETWORK}.{name}" for name in fixed),
        OPTIMIZER,
        "with.memory.with.capacity",
        "with.memory.with.batch",
    ]:
        jax.clear_caches()
        why(saying(REPLAY, place, {what: "float32"} | ARRAY))
        again = decode(whole(REPLAY), "mine")
        assert encode(again) == whole(REPLAY)
        again.observe(*PIECES, 1)


def test_names_of_arrays_are_shown_as_they_can_be():
    notes, arrays = parts(PLAIN)
    assert "\\x1b" in why(resealed(notes, arrays | {"\x1b[2J\x07": np.zeros(2)}))


@pytest.mark.parametrize(
    "place",
    [
        "rates",
        "rates.with.experts",
        "memory_rates",
        "network.network.router.with.sampling.with.scale",
        "network.network.router.with.noisy_gates",
    ],
)
def test_what_only_learning_uses_is_looked_at_too(place):
    for value in ("0.1", [0.1], {"name": "optax:sgd"}):
        why(saying(REPLAY, f"with.{place}", value))


def test_to_hand_in_none_is_not_to_trust_all(tmp_path):
    (tmp_path / "learner").write_bytes(saying(PLAIN, OPTIMIZER, {"name": "this:x"}))
    with pytest.raises(Invalid, match=r"^own: None is not valid; give a list of modules, classes and functions$"):
        load_learner(tmp_path / "learner", own=None)
    assert "this" not in sys.modules


def loud(x):
    return 2 * x


def quiet(x):
    return x


def in_disguise():
    return functools.wraps(quiet)(lambda x: 3 * x)


disguised = in_disguise()  # which says that it is quiet


def test_a_module_gives_what_has_the_name_in_it():
    learner = made_of(quiet)
    again = decode(encode(learner), "mine", [THIS])
    assert again.network.layers[0].make.activation is quiet


class Keyed(cotrain.Finetune):
    kind: str = eqx.field(static=True, default="rbg")

    def init(self, key):
        state = super().init(key)
        if self.kind == "rbg":
            return Keys(state.learner, jax.random.key(3, impl="rbg"))
        return Keys(state.learner, jnp.zeros(3, self.kind))


class Keys(NamedTuple):
    learner: cotrain.Learned
    more: Any


@pytest.mark.parametrize("kind", ["rbg", "bfloat16", "complex64", "float16", "uint8", "bool"])
def test_whatever_is_saved_can_be_read(kind):
    plain = finetune(practised(PLAIN).network)
    learner = Learner(Keyed(plain.network, plain.rates, plain.optimizer, kind))
    assert encode(decode(encode(learner), "mine", [Keyed])) == encode(learner)


@pytest.mark.parametrize("kind", ["int4", "float8_e4m3fn"])
def test_what_cannot_be_read_is_not_saved(kind):
    plain = finetune(practised(PLAIN).network)
    with pytest.raises(Invalid, match=r"state\.more: .* cannot be kept"):
        encode(Learner(Keyed(plain.network, plain.rates, plain.optimizer, kind)))


def test_adam_with_moments_of_16_bits(tmp_path):
    learner = Learner(finetune(practised(PLAIN).network, optimizer=functools.partial(optax.adam, mu_dtype="bfloat16")))
    learner.observe(*PIECES, 0)
    learner.save(tmp_path / "learner")
    assert encode(load_learner(tmp_path / "learner")) == encode(learner)


def test_truth_is_0_or_1():
    notes, arrays = parts(("cotraining", "routing_network"))
    [name] = [name for name, array in arrays.items() if array.dtype == bool]
    data = bytearray(resealed(notes, arrays))
    held = dict(deserialize(bytes(data)))[name]["data"]
    place = bytes(data).rindex(bytes(held))
    data[place] = 2
    assert "neither true nor false" in why(fuzz.sealed(bytes(data)))
