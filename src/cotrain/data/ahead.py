"""Reads ahead: what comes next is made in a thread of its own while the present is worked on."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """The same items, each begun when the one before is handed out; what goes wrong is raised when its turn comes.

    When this ends, however it does, so have the thread and the items.
    """
    end = object()
    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
        coming = reader.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, items, end)
            yield item  # pyright: ignore[reportReturnType]
