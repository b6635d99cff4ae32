"""Records as JSON, which knows no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """`value` with null for NaN and infinity, which JSON does not have: the loss of a training that diverged."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a file with one JSON object.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_text(json.dumps(finite(record), indent=1, allow_nan=False) + "\n")
