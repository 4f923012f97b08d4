"""The same configuration gives the same numbers as before, or NUMERICS was raised.

When a change is meant to alter numbers: raise NUMERICS in cotrain/experiments/result.py, say so in the changelog, and
record them anew with `python tests/test_numerics.py` (`make numbers`).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import CASES, OPTIONS, leaves, make, run, streamed

from cotrain.engine import learn
from cotrain.experiments.result import NUMERICS

RECORDED = Path(__file__).parent / "numerics.json"
SEED = 7


def numbers(case):
    """What a run ends with: its accuracies, and the mean size of each array of parameters."""
    last = run(learn(make(case), [streamed(case)], [SEED], **OPTIONS))
    sizes = [float(np.abs(leaf.astype(float)).mean()) for leaf in leaves(last.state.learner.parameters)]
    return {"accuracy": np.nan_to_num(last.accuracy[0], nan=-1).round(6).tolist(), "parameters": sizes}


def test_numbers_are_recorded_for_this_version_and_every_case():
    recorded = json.loads(RECORDED.read_text())
    assert recorded["numerics"] == NUMERICS
    assert set(recorded["cases"]) == {" on ".join(case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=" on ".join)
def test_numbers_are_as_recorded(case):
    recorded, now = json.loads(RECORDED.read_text())["cases"][" on ".join(case)], numbers(case)
    # Other processors add up in another order; what is meant to change numbers changes more than that.
    np.testing.assert_allclose(now["parameters"], recorded["parameters"], rtol=1e-4)
    np.testing.assert_allclose(now["accuracy"], recorded["accuracy"], atol=0.04)


if __name__ == "__main__":
    cases = {" on ".join(case): numbers(case) for case in CASES}
    RECORDED.write_text(json.dumps({"numerics": NUMERICS, "cases": cases}, indent=1) + "\n")
