"""Predicting where there is no cotrain, with a program that `Learner.export` has written: JAX and flatbuffers will do.

python load_exported.py PROGRAM INPUTS.npy TASK
"""

import sys
from pathlib import Path

import numpy as np
from jax import export, jit

program, inputs, task = sys.argv[1:]
predict = jit(export.deserialize(bytearray(Path(program).read_bytes())).call)
x = np.load(inputs)  # floats, as the network sees them: bytes divided by 255
probabilities = predict(x, np.int32(task))
np.savetxt(sys.stdout, probabilities, "%.7f")
