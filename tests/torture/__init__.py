"""Kills, damaged files, full disks, wrong clocks: what becomes of runs under them. `python -m torture` in tests/."""

import os

# Before JAX is imported. Children are forked: there must be no threads. Compiling is most of what there is to wait for.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
