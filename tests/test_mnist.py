"""Full-size runs on real MNIST, which take minutes and fetch the data once."""

import pytest

from cotrain import Config, run_config

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_replay_on_a_shared_bottom_is_where_the_paper_has_it():
    """The paper: ACC 0.920, BWT −0.057."""
    (result,) = run_config(Config(method="replay", network="shared-bottom"))
    assert result.acc == pytest.approx(0.92, abs=0.02)
    assert result.bwt == pytest.approx(-0.06, abs=0.02)


def test_private_experts_forget_nothing():
    (result,) = run_config(Config(method="private"))
    assert result.bwt == 0
    assert result.acc == pytest.approx(0.93, abs=0.01)
