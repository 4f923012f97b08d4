"""A short torture; `make torture` is the whole of it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="forks, pins, mounts")
def test_nothing_is_lost_and_no_damage_goes_unnoticed():
    options = ["--kills", "6", "--corruptions", "30", "--fuzz-seconds", "0.2", "--seed", "0"]
    program = [sys.executable, "-m", "torture", *options]
    done = subprocess.run(program, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    last = "torture: 12 kills, 12 identical; 60 corruptions, 60 detected, 0 tracebacks"  # half of them of learners
    assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, [last], ""), done.stdout
