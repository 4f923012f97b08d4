"""Configurations as TOML, to be read by people and by `cotrain run`."""

import json
import tomllib
from pathlib import Path
from typing import Any

from cotrain.errors import Invalid


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))  # as in names of files
    except FileNotFoundError as error:
        raise Invalid("file", str(path), "there is no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Invalid("file", str(path), f"it is not TOML ({error})") from error


def toml(tables: dict[str, Any], name: str = "") -> str:
    """Tables of plain values; None, which TOML does not have, is what an option is by default, and is left out."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict) and value is not None}
    lines = [f"{key} = {_plain(value)}" for key, value in plain.items()]
    if name and plain:
        lines.insert(0, f"[{name}]")
    inner = [toml(table, f"{name}.{key}" if name else key) for key, table in tables.items() if isinstance(table, dict)]
    return "\n\n".join(["\n".join(lines), *inner] if lines else inner)


def _plain(value: Any) -> str:
    """JSON, which is TOML but for characters beyond the first plane, if escaped, and for this one, if not."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).replace("\x7f", "\\u007f")
