"""What is there for speed alone, each beside the plain version that it must agree with.

`products.py` multiplies in the parts that a CPU is quickest with, `loops.py` keeps XLA from copying what a step
changes, `randomness.py` draws JAX's random numbers in fewer kernels. Nothing here changes a result beyond the last
bits: the tests hold each against its plain version, and a run with all of them against one without (docs/performance.md
has what each gives).
"""
