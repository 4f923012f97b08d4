"""A process on one core, with one thread, that runs passes of one contestant when it is told to.

    python -m benchmarks.worker CORE MODULE FUNCTION WORKLOAD_FILE

It answers each line on its standard input with a line of JSON.
"""

import importlib
import json
import os
import pickle
import sys
import time
from pathlib import Path

from cotrain.experiments.pool import pin


def main() -> None:
    core, module, function, file = sys.argv[1:]
    pin(int(core))  # before anything counts the cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"

    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # whatever a contestant prints
        os.dup2(nowhere, output)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        start = time.perf_counter()
        workload = pickle.loads(Path(file).read_bytes())  # written by the parent, a moment ago
        if module.startswith("benchmarks.peers"):
            import torch

            torch.set_num_threads(1)
        one_pass = getattr(importlib.import_module(module), function)(workload)
        one_pass()  # compiles, and warms up
        answer(ready=time.perf_counter() - start)
    except Exception as error:  # the parent says what it was
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return
    for line in sys.stdin:
        if line.strip():
            _move(int(line))
        result = one_pass()
        answer(**{"iterations": result[0], "seconds": result[1]} if isinstance(result, tuple) else {"value": result})


def _move(core: int) -> None:
    """Moves all threads of this process to a core."""
    if hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


if __name__ == "__main__":
    main()
