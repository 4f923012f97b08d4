"""The worker processes: what they compute, where they run, how they fail and end, and that they compile once."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import pytest
from conftest import arrays_file, identical

from cotrain.data.fetch import DataUnavailable
from cotrain.errors import Diverged, Invalid
from cotrain.experiments import pool
from cotrain.experiments.cache import shape_of, share_compiled
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.result import Result
from cotrain.experiments.run import run_config, run_jobs

# SIGINT is heeded even where pytest was started with it ignored, as in the background of a script.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
CLI = [sys.executable, "-c", f"{HEED}; from cotrain.cli import main; raise SystemExit(main())"]
ROUTED = {"layers": 1, "experts": 4, "k": 2}
OPTIONS = [*("--hidden", "8", "--memory", "20"), *(f"--{name}={value}" for name, value in ROUTED.items())]

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def arrays(tmp_path) -> str:
    """A file with two tasks."""
    return arrays_file(tmp_path / "tasks.npz")


@pytest.fixture
def config(arrays) -> Config:
    return Config(arrays=arrays, method="finetune", network="shared-bottom", hidden=(8,))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where the tests share what they compile."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def options(compiled):
    """Lets a test change JAX's options; workers get them too."""
    before = dict(jax.config.values)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    yield jax.config.update
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


def children(process: int) -> set[int]:
    return {int(pid) for path in Path(f"/proc/{process}/task").glob("*/children") for pid in path.read_text().split()}


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, what):
    """Waits for something that comes soon, or never."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within a minute")


def numbers(result):
    return result.seed, result.accuracy, result.initial, result.logits, result.gates


# What they compute


def test_workers_and_this_process_agree_to_the_bit(config, tmp_path):
    seeds = [5, 0, 3]
    pooled = run_config(config, seeds, tmp_path, workers=2, chunk=3)
    here = run_config(config, seeds, workers=1)
    assert [result.seed for result in pooled] == seeds
    for one, other in zip(pooled, here, strict=True):
        assert identical(numbers(one), numbers(other))
        record = read_record(tmp_path / f"seed-{one.seed}" / "result.json")
        assert record == json.loads(json.dumps({**one.record(config), "files": {}}))
    assert children(os.getpid()) == set()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_job_is_told_and_the_others_go_on(config, workers):
    jobs = [Job(config.but(lr=lr), seed) for seed in (0, 1) for lr in (0.1, 1e30, 0.2)]
    outcomes = dict(run_jobs(jobs, workers=workers))
    assert set(outcomes) == set(jobs)
    for job, outcome in outcomes.items():
        assert isinstance(outcome, Diverged if job.config.flat["lr"] > 1 else Result), (job, outcome)


def test_jobs_are_asked_for_when_a_worker_is_free(config):
    told = []

    def jobs():
        for seed in range(4):
            assert len(told) == max(0, seed - 1)
            yield Job(config, seed)

    for job, _ in execute(jobs(), workers=2):
        told.append(job.seed)
    assert sorted(told) == [0, 1, 2, 3]


def test_progress_is_told_until_the_end(config):
    seen = []
    jobs = [Job(config, 0), Job(config, 1)]
    results = dict(execute(jobs, workers=1, chunk=3, on_progress=lambda job, done: seen.append((job.seed, done))))
    assert [results[job].seed for job in jobs] == [0, 1]
    for seed in (0, 1):
        steps = [done.steps for of, done in seen if of == seed]
        assert steps == [0, 0, 3, 4, 4, 7, 8, 8]
        assert {done.total for of, done in seen if of == seed} == {8}


def test_there_are_as_many_workers_as_cores_and_no_more_than_jobs(monkeypatch):
    monkeypatch.setattr(pool, "available_cores", lambda: [2, 3, 5])
    assert [worker_count(None, jobs) for jobs in (1, 2, 9)] == [1, 2, 3]
    assert [worker_count(4, jobs) for jobs in (1, 9)] == [1, 4]
    with pytest.raises(Invalid, match=r"^workers: 0"):
        worker_count(0, 3)


# Where they run

LOOK = """
import json, os, sys
pin = os.sched_setaffinity

def pin_and_tell(process, cores):
    pin(process, cores)
    seen = {"cores": sorted(os.sched_getaffinity(0)), "heavy": sorted({"jax", "numpy", "equinox"} & {*sys.modules})}
    seen["threads"] = [os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "OPENBLAS", "MKL")]
    with open(os.path.join(os.path.dirname(__file__), f"pinned-{os.getpid()}"), "w") as file:
        json.dump(seen, file)

os.sched_setaffinity = pin_and_tell
"""


@linux
@pytest.mark.skipif(len(pool.available_cores()) < 2, reason="needs two cores")
def test_each_worker_has_a_core_of_its_own_before_anything_counts_cores(config, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(LOOK)
    monkeypatch.syspath_prepend(tmp_path)  # what is there is imported when an interpreter starts
    assert len(dict(execute([Job(config, 0), Job(config, 1)], workers=2))) == 2
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("pinned-*")]
    assert sorted(each["cores"] for each in seen) == [[core] for core in pool.available_cores()[:2]]
    assert [each["heavy"] for each in seen] == [[], []]
    assert [each["threads"] for each in seen] == [["1"] * 3] * 2


@linux
def test_no_thread_of_a_worker_takes_the_core_from_another():
    program = """if True:
        import os, threading
        from cotrain.experiments.pool import pin
        pin(min(os.sched_getaffinity(0)))
        tell = lambda: print(len(os.sched_getaffinity(0)), os.sched_getscheduler(0) == os.SCHED_BATCH)
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1 True\n"


# How they fail and end


@pytest.mark.parametrize("kind", [Diverged, Invalid, DataUnavailable])
def test_errors_travel(config, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COTRAIN_MIRRORS", "http://127.0.0.1:1")
    monkeypatch.setenv("PATH", str(tmp_path))
    wrong = {
        Diverged: (config.but(lr=1e30), r"^lr: the loss became .* \(seed 1\); choose a smaller one$"),
        Invalid: (config.but(arrays="nowhere.npz"), "^arrays: 'nowhere.npz' is not valid; "),
        DataUnavailable: (Config(tasks=2), "^no source has all of mnist"),
    }
    bad, message = wrong[kind]
    [(_, error)] = execute([Job(bad, 1)], workers=1)
    assert type(error) is kind
    assert re.search(message, str(error))
    assert children(os.getpid()) == set()


def test_an_error_that_cannot_be_sent_is_told_in_words():
    class Odd(Exception):
        pass

    try:
        raise Odd("so odd")
    except Odd as error:
        sent = pickle.loads(pickle.dumps(pool._portable(error)))
    assert str(sent) == "Odd: so odd"
    assert "test_pool.py" in sent.__notes__[0]


@linux
def test_the_death_of_a_worker_ends_its_job_alone(config):
    victims = []

    def kill(job, done):
        if job.seed == 1 and done.steps and not victims:
            victims.extend(children(os.getpid()))
            os.kill(victims[0], signal.SIGKILL)

    jobs = [Job(config, 0), Job(config.but(epochs=100_000), 1), Job(config, 2)]
    outcomes = dict(execute(jobs, workers=1, chunk=50, on_progress=kill))
    assert len(victims) == 1
    message = "finetune on shared-bottom, seed 1: its worker process was killed by SIGKILL (out of memory?)"
    assert str(outcomes.pop(jobs[1])) == message
    assert [outcomes[job].seed for job in (jobs[0], jobs[2])] == [0, 2]
    assert children(os.getpid()) == set()


@linux
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(arrays, tmp_path, how):
    """Ctrl-C reaches all processes of a terminal, and -9 the parent alone."""
    command = [*CLI, "run", "--arrays", arrays, "--epochs", "100000", "--seeds", "2", "--workers", "2", *OPTIONS]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: list(tmp_path.glob("*.lock")) or process.poll() is not None, "a worker compiles")
        workers = children(process.pid)
        assert len(workers) == 2
        if how == signal.SIGINT:
            os.killpg(process.pid, signal.SIGINT)
            assert process.communicate()[1] == "cotrain: error: interrupted\n"
            assert process.returncode == 130
        else:
            process.kill()
    until(lambda: not any(map(alive, workers)), "the workers have ended")


# What is compiled


def test_a_shape_is_compiled_once(config, tmp_path, options, capfd):
    options("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    options("jax_explain_cache_misses", True)
    config = config.but(network="routing-network", **ROUTED)
    jobs = [Job(config.but(lr=lr, noise=lr, router_lr=lr / 2), seed) for lr in (0.1, 0.2) for seed in (0, 1)]
    results = dict(execute(jobs, workers=2))
    assert len({result.logits[0].tobytes() for result in results.values()}) == 4
    logged = capfd.readouterr().err
    compiled = Counter(
        name for name in ("_init", "_advance", "_correct") for _ in range(logged.count(f"MISS for 'jit_{name}'"))
    )
    assert compiled == {"_init": 1, "_advance": 1, "_correct": 1}


def test_runs_of_one_shape_differ_in_numbers_alone():
    rates = dict.fromkeys(("lr", "router_lr", "memory_lr", "cotraining_lr", "noise", "rotation_step"), 0.5)
    same = {shape_of(Config(), 500), shape_of(Config(**rates), 500), shape_of(Config(stream_seed=3), 500)}
    assert len(same) == 1
    others = [Config(k=2), Config(batch=5), Config(method="replay"), Config(optimizer="adam"), Config(examples=100)]
    shapes = {shape_of(other, 500) for other in others} | {shape_of(Config(), 100), shape_of(Config(), 500, seeds=2)}
    assert len(shapes | same) == 8


@pytest.mark.parametrize("blocked", [False, True])
def test_compiled_programs_are_kept_where_there_is_room(tmp_path, options, monkeypatch, blocked):
    options("jax_compilation_cache_dir", None)
    home = tmp_path / "cache"
    if blocked:
        home.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    share_compiled()
    expected = None if blocked else str(home / "cotrain" / "compiled")
    assert jax.config.values["jax_compilation_cache_dir"] == expected
    options("jax_compilation_cache_dir", "the user's")
    share_compiled()
    assert jax.config.values["jax_compilation_cache_dir"] == "the user's"


# Several devices

SHARDED = """
import sys
from conftest import OPTIONS, STREAM, distance, jax, make, np, run
from cotrain.engine import learn

assert len(jax.local_devices()) == 2
case, sizes = tuple(sys.argv[1:3]), [int(size) for size in sys.argv[3:]]
options = {**OPTIONS, "epochs": 2}
alone = [run(learn(make(case), [STREAM], [seed], **options)) for seed in range(max(sizes))]
for seeds in sizes:
    devices = 1 if seeds == 3 else 2
    for together in learn(make(case), [STREAM] * seeds, range(seeds), **options):
        for leaf in jax.tree.leaves(together.state):
            shares = {shard.device: shard.data.shape[0] for shard in leaf.addressable_shards}
            assert list(shares.values()) == [seeds // devices] * devices, (together.event, shares)
    for i in range(seeds):
        assert distance(jax.tree.map(lambda a: a[i : i + 1], together.state), alone[i].state) < 1e-5
        np.testing.assert_array_equal(together.accuracy[i], alone[i].accuracy[0])
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("finetune", "shared_bottom", "2"),
        ("cotraining", "routing_network", "2"),
        pytest.param(("finetune", "routing_network", "2", "3", "4"), marks=pytest.mark.slow),
        pytest.param(("replay", "routing_network", "2", "3", "4"), marks=pytest.mark.slow),
        pytest.param(("cotraining", "routing_network", "3", "4"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_seeds_on_several_devices_agree_with_one_at_a_time(arguments):
    here = str(Path(__file__).parent)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": here}
    subprocess.run([sys.executable, "-W", "error", "-c", SHARDED, *arguments], env=environment, check=True)
