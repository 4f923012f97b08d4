"""One pinned, single-threaded worker process per core, each given one job after another.

Nothing heavy is imported here: a worker imports this module, pins itself to its core, and only then imports JAX and
NumPy, which count the cores when they start. Workers are fresh interpreters and not forks, since JAX has threads; and
not multiprocessing's, which run the user's script once more.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cotrain.errors import Invalid, Stopped, check_positive
from cotrain.experiments import stop
from cotrain.experiments.config import Config

if TYPE_CHECKING:
    from cotrain.experiments.keep import Keep
    from cotrain.experiments.progress import Done
    from cotrain.experiments.result import Result

LOOK = 0.2  # seconds between two looks at whether to stop
# The last is for XLA, whose flags no longer bound its threads; it matters where workers cannot be pinned (macOS).
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC"), "1")


class Job(NamedTuple):
    """A run of one seed."""

    config: Config
    seed: int

    def __str__(self) -> str:
        return f"{self.config.method.name} on {self.config.network.name}, seed {self.seed}"


class Settings(NamedTuple):
    """What all jobs have in common."""

    data_dir: Path | None
    chunk: int | None
    keep: "Keep | None"
    learners: bool  # whether results are to have their learners
    jax: dict[str, Any]  # JAX's options, as they are in the parent


def execute(
    jobs: Iterable[Job],
    *,
    workers: int,
    data_dir: Path | None = None,
    chunk: int | None = None,
    keep: "Keep | None" = None,
    learners: bool = False,
    on_progress: Callable[[Job, "Done"], None] = lambda job, done: None,
    say: Callable[[str], None] = lambda line: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Generator[tuple[Job, "Result | Exception"], None, None]:
    """Runs jobs on cores of a CPU, and yields each with its result, or with the error that ended it, as it ends.

    A job is asked for when a worker is free, after what was yielded has been dealt with. The death of a worker ends its
    job alone; another takes its place. Workers take a while to start; `meanwhile` is done in that time, before any job.
    Where jobs are kept, the first SIGINT or SIGTERM has the workers save what they are at, and ends it all.
    """
    waiting, cores, team = iter(jobs), available_cores(), list[Worker]()
    settings = Settings(data_dir, chunk, keep, learners, _options())
    try:
        for i in range(workers):
            team.append(Worker(cores[i % len(cores)], settings))
        meanwhile()
        with nullcontext() if keep is None else stop.gently():
            for worker in team:
                worker.give(next(waiting, None))
            told = None
            while busy := {worker.connection: worker for worker in team if worker.job is not None}:
                if told is None and (told := stop.asked()) is not None:
                    for worker in busy.values():
                        worker.send(told)
                for connection in wait(list(busy), LOOK):
                    worker = busy[cast(Any, connection)]
                    job, (kind, content) = cast(Job, worker.job), worker.receive()
                    if kind == "done":
                        on_progress(job, content)
                    elif kind == "said":
                        say(content)
                    elif kind == "stopped":
                        worker.job = None
                    else:
                        yield job, content
                        if kind == "died":
                            worker.close()
                            team[team.index(worker)] = worker = Worker(worker.core, settings)
                        worker.give(None if told is not None else next(waiting, None))
            if told is not None:
                raise Stopped(told)
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.close()


def worker_count(workers: int | None, jobs: int) -> int:
    """As many workers as are wanted, by default one per core; at most one per job."""
    return min(len(available_cores()) if workers is None else check_positive("workers", workers), jobs)


def available_cores() -> Sequence[int | None]:
    """The cores that this process may use; None where a process cannot be pinned to one."""
    if hasattr(os, "sched_setaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [None] * (os.cpu_count() or 1)


def _options() -> dict[str, Any]:
    """JAX's options as the user has set them, in Python too; but workers are always on the CPU."""
    values = sys.modules["jax"].config.values if "jax" in sys.modules else {}
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in values.items() if isinstance(value, plain) and "platform" not in name}


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, core: int | None, settings: Settings):
        self.core, self.job = core, cast(Job | None, None)
        self.connection, theirs = Pipe()
        environment = {**os.environ, **SINGLE_THREADED, "JAX_PLATFORMS": "cpu"}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        program = f"from cotrain.experiments.pool import work; work({theirs.fileno()}, {core})"
        # Workers inherit what is blocked: it is the parent that tells them to stop, and how.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            command = [sys.executable, "-P", "-c", program]
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.send(settings)

    def give(self, job: Job | None) -> None:
        """The next job, or None: there are no more."""
        self.job = job
        self.send(job)

    def send(self, content: Settings | Job | int | None) -> None:
        """Tells it something; that it has died shows when it is to answer."""
        with suppress(OSError):
            self.connection.send(content)

    def receive(self) -> tuple[str, Any]:
        """What it has to say, and of what kind that is."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return "died", RuntimeError(f"{self.job}: its worker process {how}{hint}")

    def close(self) -> None:
        """Waits until it has ended."""
        self.connection.close()
        self.process.communicate()


def pin(core: int) -> None:
    """Keeps this process and the threads that it will start on a core, where none of them interrupts another.

    XLA has a thread of its own that it gives some of each step's work. With Linux' usual scheduling that thread takes
    the core at once and gives it back, in some runs twice in every step.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where that is not allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def work(descriptor: int, core: int | None) -> None:
    """What a worker process does: one job after another, until there are no more or its parent is gone."""
    if core is not None:
        pin(core)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        _take_jobs(Connection(descriptor))


def _take_jobs(connection: Connection) -> None:
    settings: Settings = connection.recv()

    import jax

    from cotrain.experiments.build import build
    from cotrain.experiments.cache import share_compiled
    from cotrain.experiments.run import run_seeds

    for option, value in settings.jax.items():
        if jax.config.values[option] != value:
            jax.config.update(option, value)
    share_compiled()

    def show(done: "Done") -> None:
        connection.send(("done", done))
        if connection.poll():  # while there is a job, there is one thing that it can be told
            stop.ask(connection.recv())

    def say(line: str) -> None:
        connection.send(("said", line))

    config = method = stream = cast(Any, None)
    while (job := connection.recv()) is not None:
        if isinstance(job, int):  # asked to stop when it had just finished
            continue
        try:
            if job.config != config:
                config, (method, stream) = job.config, build(job.config, settings.data_dir)
            options = settings.chunk, show, say, settings.keep, settings.learners
            [result] = run_seeds(config, method, stream, [job.seed], *options)
            connection.send(("result", _sendable(result)))
        except Stopped:
            connection.send(("stopped", None))
        except Exception as error:
            connection.send(("error", _portable(error)))


def _sendable(result: "Result") -> "Result":
    """A result without its learner, if that is of parts without a name."""
    try:
        pickle.dumps(result.learner)
    except Invalid:
        return replace(result, learner=None)
    return result


def _end_with_parent() -> None:
    """Ends the process, whatever it is doing, when standard input does: nothing is ever written to it."""
    os.read(0, 1)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """An error as it can be sent, with the place where it was raised."""
    place = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(place)
    return error
