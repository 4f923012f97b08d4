"""A stream from a file: a NumPy archive (.npz) with train_x_0, train_y_0, test_x_0, test_y_0, train_x_1, …"""

import zipfile
from pathlib import Path

import numpy as np

from cotrain.data.stream import Stream
from cotrain.errors import Invalid

PARTS = ("train_x", "train_y", "test_x", "test_y")


def load_arrays(path: Path | str) -> Stream:
    """The tasks that a NumPy archive holds."""
    names = f"an .npz file with {', '.join(f'{part}_0' for part in PARTS)}, and so on for each task"
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tasks = len([name for name in archive.files if name.startswith("train_x_")])
            return Stream.from_arrays([[archive[f"{part}_{task}"] for part in PARTS] for task in range(tasks)])
    except Invalid:
        raise
    except (OSError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        reason = str(error).strip("'\"").split("\n")[0]
        raise Invalid("arrays", str(path), f"give {names} ({reason})") from error
