"""A stream from a file: a NumPy archive (.npz) with train_x_0, train_y_0, test_x_0, test_y_0, train_x_1, …

It may also have `classes`, a number for each task or one for all.
"""

from pathlib import Path

from cotrain.data.npz import read_npz
from cotrain.data.stream import Stream
from cotrain.errors import Invalid

PARTS = ("train_x", "train_y", "test_x", "test_y")


def load_arrays(path: Path | str) -> Stream:
    """The tasks that a NumPy archive holds."""
    names = f"an .npz file with {', '.join(f'{part}_0' for part in PARTS)}, and so on for each task"
    try:
        arrays = read_npz(path)
        tasks = range(sum(name.startswith("train_x_") for name in arrays))
        parts = [[arrays[f"{part}_{task}"] for part in PARTS] for task in tasks]
    except (Invalid, KeyError) as error:
        reason = error.valid if isinstance(error, Invalid) else f"{error.args[0]} is missing"
        raise Invalid("arrays", str(path), f"give {names} ({reason})") from error
    classes = arrays.get("classes")
    return Stream.from_arrays(parts, None if classes is None else classes.tolist())
