"""The shared bottom: a dense network under the tasks' heads."""

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain.data.stream import Spec
from cotrain.errors import Invalid, check_positive
from cotrain.networks.experts import dense
from cotrain.networks.network import Network, build

HIDDEN = (256, 256)


def shared_bottom(spec: Spec, hidden: Sequence[int] = HIDDEN, *, one_head: bool = False) -> Network:
    """Layers of one expert, where there is nothing to route, under a head per task, or one for all."""
    units = check_hidden(hidden)
    ones = [1] * len(units)
    return build(spec, [dense(n, alone=True) for n in units], ones, ones, one_head=one_head)


def check_hidden(hidden: Sequence[int]) -> list[int]:
    """Returns the layers' units if they are some."""
    if not hidden:
        raise Invalid("hidden", tuple(hidden), "give at least one layer")
    return [check_positive("hidden", units) for units in hidden]


@dataclass(frozen=True)
class SharedBottom:
    """a dense network under the tasks' heads"""

    hidden: tuple[int, ...] = HIDDEN
    """units of the layers"""
    one_head: bool = False
    """one head for all tasks, which then needs no task to predict"""

    def __post_init__(self):
        check_hidden(self.hidden)

    def __call__(self, spec: Spec) -> Network:
        return shared_bottom(spec, self.hidden, one_head=self.one_head)
