"""Learners in files: all of them is there, to the bit; damage is named; and what a file says does no harm."""

import copy
import fcntl
import functools
import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import equinox as eqx
import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OPTIONS, SAMPLINGS, STREAM, filled, identical
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from test_learner import EVERY, JOINT, PIECES, SOME, SPEC, every_answer, go_on, own_method, own_router, practised
from torture.damage import damaged

import cotrain
from cotrain import Invalid, Learner, dense, finetune, load_learner, routing_network
from cotrain.errors import Damaged, Diverged
from cotrain.experiments import provenance, saved
from cotrain.experiments.described import describe, rebuild
from cotrain.experiments.saved import NAME, decode, encode
from cotrain.experiments.sealed import unseal
from cotrain.steps import init, keys_of

PLAIN, COTRAINING, PROTOTYPES, EWC = SOME
OWN, REPLAY = [own_method, own_router], ("replay", "routing_network")
CHECKSUM = "(it is not a learner, or was cut short|its checksum does not agree with its content)$"


@functools.cache
def whole(case=PLAIN):
    return encode(practised(case))


def twin(learner):
    """The same learner, made without a file."""
    where = {name: getattr(learner, name) for name in ("seed", "batch", "finished", "step", "sample")}
    return Learner(learner.method, state=jax.tree.map(jnp.copy, learner.state), **where)


def made_of(activation):
    """A learner with a function of one's own."""
    method = finetune(routing_network(SPEC, dense(4, activation), layers=1, experts=3, k=2))
    return Learner(method, state=filled(init, method, keys_of([0])))


def names(directory):
    return {path.name for path in directory.iterdir()}


# Identity


@pytest.mark.parametrize("case", EVERY + JOINT, ids="-".join)
def test_what_is_loaded_is_what_was_saved_and_remains_so(tmp_path, case):
    learner, path, other = twin(practised(case)), tmp_path / "learner", tmp_path / "again"
    learner.save(path)
    again = load_learner(path, OWN)
    again.save(other)
    assert path.read_bytes() == other.read_bytes() == encode(again) == encode(learner)
    assert identical(again.state, learner.state)
    assert every_answer(again) == every_answer(learner)
    assert encode(go_on(again)) == encode(go_on(learner)) != path.read_bytes()
    assert every_answer(again) == every_answer(learner)


@st.composite
def learners(draw):
    """Any learner of this package's parts."""
    size, rate, share = st.integers(1, 5), st.floats(0, 1e6, width=32), st.floats(0.125, 1, width=32)
    shape, tasks, classes = draw(st.sampled_from([(5,), (2, 3), (4, 4, 2)])), draw(st.integers(1, 3)), draw(size)
    spec = cotrain.Spec(shape, classes, tasks, draw(st.just(()) | st.tuples(*[st.integers(1, classes)] * tasks)))
    activation = st.sampled_from([jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.tanh, jax.nn.log_softmax])
    kinds = [st.builds(dense, size, activation), st.builds(cotrain.mlp, st.tuples(size, size))]
    kinds += [st.builds(cotrain.convolution, size, st.sampled_from([1, 3]))] * (len(shape) > 1)
    sampling = st.builds(lambda make, noise: make(noise), st.sampled_from([*SAMPLINGS.values()]), share)
    gates = {"gates": st.sampled_from(["chosen", "all"]), "noisy_gates": st.booleans()}
    routers = [st.builds(cotrain.task_matrix, sampling, **gates), st.just(cotrain.fixed())]
    routers += [st.builds(cotrain.by_input, balance=st.just(0) | share, noisy=st.booleans())]
    experts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    ks, aggregation = [draw(st.integers(1, count)) for count in experts], draw(st.sampled_from(["sum", "concatenate"]))
    parts = {"experts": experts, "k": ks, "router": draw(st.one_of(routers)), "aggregation": aggregation}
    parts |= {"activation": draw(st.none() | activation), "one_head": draw(st.booleans())}
    network = routing_network(spec, draw(st.one_of(kinds)), layers=len(experts), **parts)
    momentum, adam = functools.partial(optax.sgd, momentum=0.9), functools.partial(optax.adam, mu_dtype="float16")
    options = {"lr": draw(rate), "optimizer": draw(st.sampled_from([optax.sgd, momentum, optax.nadam, adam]))}
    replay = cotrain.replay(network, cotrain.reservoir(draw(size), draw(size)), **options)
    methods = [finetune(network, router_lr=draw(rate), **options), replay]
    methods += [cotrain.cotraining(replay, cotrain_heads=draw(st.booleans()))] if network.by_task else []
    methods += [cotrain.private(network, **options)] if network.router is not None and min(experts) >= tasks else []
    method, where = draw(st.sampled_from(methods)), {name: st.integers(*ends) for name, ends in saved.WHERE.items()}
    return Learner(method, state=filled(init, method, keys_of([0])), **draw(st.fixed_dictionaries(where)))


@settings(max_examples=30)
@given(learners())
def test_any_learner_is_read_as_it_was(learner):
    data = encode(learner)
    again = decode(data, "mine")
    assert encode(again) == data
    assert identical(again.state, learner.state)
    assert identical(*([*jax.tree.leaves(one.method)] for one in (again, learner)))
    assert eqx.tree_pformat(again.method) == eqx.tree_pformat(learner.method)


THINGS = [np.float16(0.1), np.uint64(2**64 - 1), np.zeros((0, 3), bool), np.eye(2), jnp.float32(-0.0), jnp.ones(3)]
THINGS += [None, True, jax.nn.relu, functools.partial(optax.sgd, 1), dense(3), cotrain.Rates, cotrain.gumbel(0.5)]
ATOMS = st.sampled_from(THINGS) | st.text(max_size=3) | st.integers(1 - 2**63, 2**63 - 1) | st.floats(-1e300, 1e300)
TABLES = st.dictionaries(st.text(max_size=3), ATOMS, max_size=3)


@given(st.recursive(ATOMS, lambda some: st.lists(some, max_size=3).map(tuple) | TABLES))
def test_what_methods_are_made_of_is_put_in_words_and_made_anew(thing):
    said = json.dumps(describe(thing))
    made = rebuild(json.loads(said), {})
    assert type(made) is type(thing)
    assert json.dumps(describe(made)) == said


CHILD = """
import json, os, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_learner import every_answer, go_on, own_method
from cotrain import load_learner
from cotrain.experiments import provenance
provenance.software = lambda: json.loads(sys.argv[3])  # somebody may change the clone meanwhile
path = Path(sys.argv[1])
os.chdir(path.parent)
learner = load_learner(path, [own_method])
"""


def in_another_process(path, code):
    program = [sys.executable, "-c", CHILD + code, path, Path(__file__).parent, json.dumps(provenance.software())]
    return subprocess.run(program, capture_output=True, check=False, timeout=99)


@pytest.mark.parametrize("case", [EWC, COTRAINING], ids="-".join)
def test_another_process_predicts_and_goes_on_the_same(tmp_path, case):
    learner, path = twin(practised(case)), tmp_path / "learner"
    learner.save(path)
    done = in_another_process(path, "Path('said').write_bytes(every_answer(learner)); go_on(learner).save(path)")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "said").read_bytes() == every_answer(learner)
    assert path.read_bytes() == encode(go_on(learner))


@pytest.mark.parametrize("case", SOME, ids="-".join)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_a_copy_is_the_same_and_goes_its_own_way(case, copied):
    again = copied(practised(case))
    assert encode(again) == whole(case)
    assert every_answer(again) == every_answer(practised(case))
    again.observe(*PIECES, 1)
    assert encode(practised(case)) == whole(case) != encode(again)


# Writing


@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path, call, error):
    path = tmp_path / "learner"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, Mock(side_effect=error(28, "No space left on device")))
    with pytest.raises(error) as raised:
        practised(PLAIN).save(path)
    assert getattr(raised.value, "filename", str(path)) == str(path)
    assert (names(tmp_path), path.read_bytes()) == ({"learner"}, b"old")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_a_killed_process_leaves_is_the_old_file_and_is_tidied_up(tmp_path, call):
    path = tmp_path / "learner"
    path.write_bytes(whole())
    code = f"os.{call} = lambda *_: os.kill(os.getpid(), 9); go_on(learner).save(path)"
    assert in_another_process(path, code).returncode == -9
    assert encode(load_learner(path)) == whole()
    [left] = names(tmp_path) - {"learner"}
    assert re.fullmatch(r"\.learner\.\w+\.part", left)
    practised(PLAIN).save(path)
    assert names(tmp_path) == {"learner"}


def test_leftovers_of_other_files_and_of_those_at_work_stay(tmp_path):
    mine = {".learner.abc.part", ".learner.x_1.part"}
    others = {".learner.safetensors.abc.part", ".earner.abc.part", ".learner.abc.partly", "learner.abc.part", ".lock"}
    for name in others | mine:
        (tmp_path / name).touch()
    lock = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH); print(); input()"
    with subprocess.Popen([sys.executable, "-uc", lock, tmp_path], stdin=-1, stdout=-1) as other:  # as if it wrote
        assert other.stdout is not None
        other.stdout.readline()
        practised(PLAIN).save(tmp_path / "learner")
        assert names(tmp_path) == {"learner", *others, *mine}
        other.kill()
    practised(PLAIN).save(tmp_path / "learner")
    assert names(tmp_path) == {"learner", *others}


def test_who_writes_locks_the_directory_against_those_who_tidy_up(monkeypatch, tmp_path):
    def write(path, data):
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(tmp_path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.write_bytes(data)

    monkeypatch.setattr(saved, "write_bytes", write)
    practised(PLAIN).save(tmp_path / "learner")
    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    practised(PLAIN).save(tmp_path / "other")
    assert (tmp_path / "learner").read_bytes() == (tmp_path / "other").read_bytes() == whole()


def test_it_makes_the_directory_or_says_where_it_cannot_write(tmp_path):
    path = tmp_path / "one" / "two" / "[learner] *.x"
    practised(PLAIN).save(str(path))
    assert encode(load_learner(str(path))) == path.read_bytes() == whole()
    assert path.stat().st_mode & 0o777 == 0o644
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe", path / "learner", Path("/proc/learner")):
        with pytest.raises(OSError, match=r"it is not a plain file: |File exists: |No such file or dir") as error:
            practised(PLAIN).save(wrong)
        assert str(error.value.filename).startswith(str(wrong.parent))


# Damage


def test_every_flipped_bit_every_cut_and_other_damage_is_found(monkeypatch, tmp_path):
    data, draws, path, one = whole(), random.Random(0), tmp_path / "learner", {"a": np.zeros(3)}
    for place in range(len(data)):
        broken = data[:place] + bytes([data[place] ^ 1 << draws.randrange(8)]) + data[place + 1 :]
        for bad in (broken, data[:place]):
            with pytest.raises(Damaged, match=rf"^mine is damaged: {CHECKSUM}"):
                decode(bad, "mine")
    some = [damaged(draws, whole(COTRAINING))[1] for _ in range(200)]
    for bad in (*some, b"", b"{}", save(one), save(one, {"cotrain": "1"}), os.urandom(99)):
        path.write_bytes(bad)
        with pytest.raises(Damaged, match=rf"^{path} is damaged: {CHECKSUM}"):
            load_learner(path)
    with pytest.raises(Damaged, match="/dev/zero is damaged: it is not a file"):
        load_learner("/dev/zero")
    monkeypatch.setattr(saved, "LIMIT", 98)
    with pytest.raises(Damaged, match="it has more than 98 bytes"):
        load_learner(path)


# Files that mean harm


@functools.cache
def parts(case):
    """What a file says in words, and in numbers."""
    return unseal(whole(case), saved.FORMAT, "learner", "")


def resealed(notes, arrays):
    """A file of anybody's, whose checksum agrees."""
    return fuzz.sealed(save(arrays, {"cotrain": "0" * 64 + (notes if isinstance(notes, str) else json.dumps(notes))}))


def saying(case, place, value):
    """The file of a learner whose method is described otherwise at a place."""
    notes, arrays = copy.deepcopy(parts(case)[0]), parts(case)[1]
    *way, last = (int(name) if name.isdigit() else name for name in place.split("."))
    functools.reduce(lambda words, name: words[name], way, notes["method"])[last] = value
    return resealed(notes, arrays)


def outcome(data, own=()):
    """What becomes of a file, in a short time and with little memory."""
    reader = fuzz.Reader(list, lambda data: decode(data, "mine", own), (Damaged, Invalid), lambda data, found: None)
    with fuzz.bounded(), patch.object(fuzz, "SECONDS", 20):  # of which a busy machine may need some
        return fuzz.try_out(reader, data)


def why(data, own=()):
    """Why a file is refused, in a line."""
    assert outcome(data, own) == "refused"
    with pytest.raises((Damaged, Invalid), match=r"^(mine is damaged: |learner: 'mine' is|own: ).{,300}$") as error:
        decode(data, "mine", own)
    assert str(error.value).isprintable()
    return str(error.value)


NOTES = [
    ("another kind of file, '", "kind", ["checkpoint", "\x1b[2J\n" * 99]),
    ("its format is 2, of a newer cotrain; this reads 1", "format", [2]),
    ("its format is 0, of an older cotrain", "format", [0]),
    ("it is not a learner", "format", ["1", 1.5, None, [1]]),
    ("its numbers are of version", "numerics", [2, None, "1", [[]]]),
    ("it describes no learner", "method", [None, 5, "x", [], {}, [{}], {"table": {}}, {"name": "optax:sgd"}]),
]
for name, (least, most) in saved.WHERE.items():
    NOTES += [(f"no learner ({name}: ", name, [least - 1, most + 1, 0.5, "1", True, None, [1], {}, 1e999])]


def test_other_notes_are_refused():
    notes, arrays = parts(PLAIN)
    for reason, name, values in NOTES:
        assert all(reason in why(resealed(notes | {name: value}, arrays)) for value in values)
        why(resealed({key: value for key, value in notes.items() if key != name}, arrays))
    for text in ("", "[]", "7", '"notes"', "null", "{}", '{"format": NaN}', "9" * 9999, '{"format": 1, "kind": '):
        why(resealed(text, arrays))


@pytest.mark.parametrize("case", [EWC, COTRAINING], ids="-".join)
def test_other_arrays_are_refused(case):
    notes, arrays = parts(case)
    for name, array in arrays.items():
        for other in (array[:0], array[None], array.astype(np.float16), np.concatenate([array, array])):
            assert f"those of its method: {name} is " in why(resealed(notes, arrays | {name: other}), OWN)
        without = {key: value for key, value in arrays.items() if key != name}
        assert f"those of its method: {name} is absent" in why(resealed(notes, without), OWN)
    for extra in ("a", "state", "sample.more"):
        assert f"{extra} is float64[0, 3]" in why(resealed(notes, arrays | {extra: np.zeros((0, 3))}), OWN)


def test_arrays_may_hold_anything_but_must_be_of_the_bytes_there():
    (notes, arrays), data, shape = parts(PLAIN), whole(), b'"shape":[1,3,3]'
    unsound = resealed(notes, {name: np.full_like(array, np.nan) for name, array in arrays.items()})
    assert encode(decode(unsound, "mine")) == unsound
    for absurd in ("[9,9,9]", "[99999999999,99999999999]", "[-1,-3,3]", "[18446744073709551615,0]", "[]", '"x"'):
        longer = data.replace(shape, b'"shape":' + absurd.encode(), 1)
        header = int.from_bytes(data[:8], "little") + len(longer) - len(data)
        assert "it is not a learner" in why(fuzz.sealed(header.to_bytes(8, "little") + longer[8:]))
    assert "it is not a learner" in why(fuzz.sealed(data.replace(b'"dtype":"F32"', b'"dtype":"F99"', 1)))


NAMES = """
os:system builtins:eval subprocess:run noticed:run noticed:Record jax:numpy jax.nn:jnp jax.nn:nn.relu : noticed optax:
optax:__loader__ optax:__getattr__ optax:contrib optax:GradientTransformation optax._src.alias:sgd cotrain:run
cotrain.experiments.files:write_bytes cotrain.data.arrays:load_arrays cotrain.memory:jax cotrain.memory.os:system
cotrain.networks.experts:math cotrain.networks.experts:__loader__ cotrain.networks.experts:dense.__init__
cotrain.choice:Choice cotrain.networks.experts:check_positive cotrain.networks..experts:dense cotrain.networks.nothing:x
cotrain.networksx:dense cotrain.methods:METHODS cotrain.methods.descent:Optimizer dataclasses:dataclass
"""
NETWORK, OPTIMIZER = "with.network.network", "with.optimizer"


def called(words, *given, **named):
    return {"partial": words, "of": list(given), "with": {"table": named}}


@pytest.mark.parametrize("name", [*NAMES.split(), "", "\x1b[2J\nos:system", "os:system" * 9999], ids=ascii)
def test_what_is_not_of_this_package_is_neither_used_nor_imported(monkeypatch, tmp_path, name):
    (tmp_path / "noticed.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for place in (OPTIMIZER, "with.memory", f"{NETWORK}.makes.0", f"{NETWORK}.router", f"{NETWORK}.activation"):
        for words in ({"name": name}, {"is": name, "with": {}}, called({"name": name})):
            said = why(saying(REPLAY, place, words), OWN)
            assert said.startswith(f"own: {name[:80]!r} is not valid; it is not of this package; if you trust it, hand")
    assert "noticed" not in sys.modules


HUGE, ADAM, SGD, HOT = 10**15, {"name": "optax:adam"}, {"name": "optax:sgd"}, {"name": "jax.nn:one_hot"}
NO_COUNT = [None, "3", 3.0, True, [3], 0, -1, HUGE, 2**63]
NO_PART = [5, "x", True, [], {}, [5], [None], {"table": {}}, {"name": 5}, {"name": "jax.nn:glu"}, HOT, ADAM]
NO_PART += [called(5), called(None), called(SGD) | {"of": {}}, {"is": "x", "with": []}, {"network": {}}]
SAID = [
    (NETWORK, "spec spec.0 makes makes.0 makes.0.with makes.0.with.activation experts ks router", NO_PART),
    (NETWORK, "router.with.sampling one_head aggregation activation", NO_PART),
    (NETWORK, "spec.1 spec.2 spec.0.1 experts.0 ks.0 makes.0.with.units", NO_COUNT),
    (NETWORK, "spec.3", [[3, 3], [4, 4, 4], [HUGE] * 3, ["3"] * 3, "333", None, 3]),
    (NETWORK, "activation", [called(HOT, num_classes=HUGE)]),
    ("with", "memory optimizer", NO_PART),
    ("with.memory.with", "capacity batch", NO_COUNT),
    ("with", "optimizer", [called(SGD, 1, 2, 3, 4, 5), called({"name": "optax:scale_by_lbfgs"}, HUGE)]),
]


@pytest.mark.parametrize(("inside", "names", "values"), SAID)
def test_other_words_are_refused(inside, names, values):
    for name in names.split():
        for value in values:
            assert re.search("it describes no learner|^own: 'optax:", why(saying(REPLAY, f"{inside}.{name}", value))), (
                name,
                value,
            )


WORDS = [(kind, [], [0.1]) for kind in ("f4", "object", "bfloat16", "int32", "bool", "complex64", "", 5, None)]
WORDS += [(kind, [0], []) for kind in ("object", "str", "datetime64[s]", "float32")]
WORDS += [("float32", [], [value]) for value in ("0.1", None, True, [0.1], 1e999, 1e300, {})]
WORDS += [("float32", shape, [0.1]) for shape in ([2], [-1], [1], ["1"], [HUGE], [1.0], [1] * 99)]
WORDS += [("float32", [0, size], []) for size in (HUGE, 10**30)]


@pytest.mark.parametrize("what", ["array", "numpy", "number"])
def test_arrays_in_words_that_are_none_are_refused(what):
    for kind, shape, values in WORDS:
        words = {what: kind, "shape": shape, "values": values}
        assert "it describes no learner" in why(saying(REPLAY, "with.rates.with.experts", words)), words


@pytest.mark.parametrize("depth", [100, 400, 3000, 100_000])
def test_what_is_nested_deeply_is_refused(depth):
    kinds = ["[@]", '{"table": {"a": @}}', '{"partial": @, "of": [], "with": {"table": {}}}', '{"name": @}']
    kinds += ['{"is": "cotrain.methods.cotraining:Cotraining", "with": {"inner": @, "cotraining_rates": null}}']
    for opening, closing in (kind.split("@") for kind in kinds):
        text = json.dumps(parts(PLAIN)[0] | {"method": "@"}).replace('"@"', opening * depth + "5" + closing * depth)
        why(resealed(text, parts(PLAIN)[1]))


def places(words, way=()):
    """All places of a description."""
    inner = words.items() if isinstance(words, dict) else enumerate(words) if isinstance(words, list) else ()
    return [way, *(place for key, value in inner for place in places(value, (*way, key)))]


@pytest.mark.parametrize("case", [COTRAINING, PROTOTYPES], ids="-".join)
@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_a_description_with_parts_exchanged_is_read_or_refused(case, draws):
    words = parts(case)[0]["method"]
    place, other = (draws.choice(places(words)[1:]) for _ in range(2))
    value = draws.choice([functools.reduce(lambda words, name: words[name], other, words), 0, 7, 0.5, "sum", True])
    assert outcome(saying(case, ".".join(map(str, place)), value), OWN) in ("read", "refused")


# Classes and functions of one's own


def square(x):
    return x**2


@pytest.mark.parametrize("one", [own_method.EWC, own_router.Prototypes, square])
def test_what_is_of_ones_own_must_be_handed_in(tmp_path, one):
    learner = made_of(square) if one is square else practised(EWC if one is own_method.EWC else PROTOTYPES)
    learner.save(tmp_path / "learner")
    for others in ((), [own_method.State, own_router.Options], [cotrain], [os, sys, made_of]):
        with pytest.raises(Invalid, match=f"^own: '{one.__module__}:{one.__name__}' is not valid; it is not of this "):
            load_learner(tmp_path / "learner", others)
    for own in ([one], (one,), iter([one]), [*OWN, sys.modules[__name__]]):
        assert encode(load_learner(tmp_path / "learner", own=own)) == encode(learner)


def test_what_is_handed_in_lets_a_file_use_nothing_else():
    for name in ("own_method:jax", "own_method:cotrain", "own_method:EWC.init", "own_method:", "os:system"):
        for words in ({"name": name}, {"is": name, "with": {}}):
            assert why(saying(EWC, OPTIMIZER, words), OWN).startswith(f"own: '{name}' is not valid")
    assert why(saying(EWC, "is", "own_method:State"), [own_method.EWC]).startswith("own: 'own_method:State' is not")
    for own in (own_method, own_method.EWC, 5, "own_method", [None], [5], [jnp.ones(2)], [own_router.Options()()]):
        with pytest.raises(Invalid, match=r"^own: .* give (a list of )?modules, classes and functions$"):
            decode(whole(), "mine", own)


# Runs, and what cannot be saved


def test_the_learner_of_a_run_is_read_by_its_directory(tmp_path):
    options = OPTIONS | {"epochs": 1, "progress": False, "out": tmp_path / "runs"}
    [result] = cotrain.run(practised(PLAIN).method, STREAM, **options)
    path = tmp_path / "runs" / "seed-0" / NAME
    for name in (tmp_path / "runs", str(tmp_path / "runs"), path.parent, path):
        assert encode(load_learner(name)) == encode(result.learner) == path.read_bytes()
    [other] = cotrain.run(practised(PLAIN).method, STREAM, [7], **options)
    assert encode(load_learner(tmp_path / "runs" / "seed-7")) == encode(other.learner) != encode(result.learner)
    for place, there in ((tmp_path / "runs", "it has seed-0, seed-7"), (tmp_path, "it has no learner")):
        with pytest.raises(Invalid, match=rf"^learner: .*; name a file, or the directory of one seed \({there}\)$"):
            load_learner(place)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_learner(tmp_path / "nowhere")


def test_what_is_no_learner_any_more_is_not_written(tmp_path):
    diverged, interrupted = Learner(finetune(practised(PLAIN).network, lr=1e38)), twin(practised(PLAIN))
    with pytest.raises(Diverged):
        diverged.observe(*PIECES, 0)
    jax.tree.leaves(interrupted.state)[-1].delete()
    for learner in (diverged, interrupted):
        with pytest.raises(Invalid, match=r"^learner: .*; load it anew$"):
            learner.save(tmp_path / "no" / "learner")
    assert not names(tmp_path)


UNNAMED = [lambda x: x, functools.partial(lambda x: x), functools.wraps(square)(lambda x: x)]
NONE = [np.inf, np.nan, 2**63, [1], {1}, b"a", 1j, {1: 2}, object(), np.array(["a"]), jnp.array([jnp.nan])]


def test_what_cannot_be_put_in_words_is_refused_by_what_it_is(tmp_path):
    for learner in map(made_of, UNNAMED):
        with pytest.raises(Invalid, match=r"^method: .* it cannot be saved: give a function or a record with a name"):
            learner.save(tmp_path / "learner")
        with pytest.raises(Invalid, match=r"^method: .* it cannot be saved: give "):
            copy.deepcopy(learner)
    for value in (*NONE, np.float32("inf"), jnp.ones(2, jnp.bfloat16), jax.random.key(0)):
        with pytest.raises(Invalid, match=r"^method: .* it cannot be saved: give "):
            describe((value,))
    assert not names(tmp_path)


def test_a_run_with_what_has_no_name_says_so_and_finishes(tmp_path, capsys):
    method = finetune(practised(PLAIN).network, optimizer=lambda rate: optax.sgd(rate))
    [result] = cotrain.run(method, STREAM, out=tmp_path, progress=False)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "it cannot be saved: give a function or a record with a name in a module; what was learned is not" in said
    assert "result.json" in names(tmp_path / "seed-0")
    assert NAME not in names(tmp_path / "seed-0")
    assert result.learner.evaluate(*STREAM[2].test.take(np.arange(30)), 2) == result.accuracy[-1, 2]
