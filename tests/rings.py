"""A memory of rings in plain Python, as the reference is; and how the engine's is compared with it."""

from typing import Any

import numpy as np
import reference


class Rings:
    """The last `places` examples of each task, or of each class of each task, at their places."""

    def __init__(self, places: int, by_class: bool):
        self.places, self.by_class = places, by_class
        self.held: dict[tuple[int, int], list[reference.Example]] = {}
        self.seen: dict[tuple[int, int], int] = {}

    def add(self, examples: list[reference.Example]) -> None:
        for example in examples:
            which = example.task, example.y if self.by_class else 0
            ring, seen = self.held.setdefault(which, []), self.seen.get(which, 0)
            if len(ring) < self.places:
                ring.append(example)
            else:
                ring[seen % self.places] = example
            self.seen[which] = seen + 1

    def of(self, tasks: list[int]) -> list[reference.Example]:
        """All that is held of some tasks, in the order of task, class and place."""
        return [example for which in sorted(self.held) if which[0] in tasks for example in self.held[which]]

    def drawn(self, tasks: list[int], bits: np.ndarray) -> list[reference.Example]:
        """As many examples as there are bits, drawn with replacement."""
        held = self.of(tasks)
        return [held[reference.below(len(held), words)] for words in bits] if held else []


def compared(memory: Any, rings: Rings) -> list[tuple[Any, Any]]:
    """The inputs that the engine's memory holds and those that it should, in pairs; all else must be the same."""
    tasks, classes = memory.seen.shape
    pairs = []
    x, y, of = (np.asarray(a).reshape(-1, *a.shape[2:]) for a in (memory.x, memory.y, memory.task))
    for task in range(tasks):
        for label in range(classes):
            held = rings.held.get((task, label), [])
            assert memory.seen[task, label] == rings.seen.get((task, label), 0)
            first = (task * classes + label) * rings.places
            at = slice(first, first + len(held))
            np.testing.assert_array_equal(y[at], [example.y for example in held])
            np.testing.assert_array_equal(of[at], [example.task for example in held])
            assert not x[first + len(held) : first + rings.places].any()
            if held:
                pairs.append((x[at], [example.x for example in held]))
    return pairs
