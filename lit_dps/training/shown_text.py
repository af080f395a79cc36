"""The text form of an object, and the parts of a table of pandas that decide its content."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

SCALARS = (bool, int, float, complex, str, bytes, type(None))
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def shown_without_address(item: Any) -> str:
    """Return the text form of an object; "" if it has an address or no content."""
    if type(item).__repr__ is object.__repr__:
        return ""
    try:
        shown = repr(item)
    # A method of the user may fail.
    except Exception:
        return ""
    if _ADDRESS.search(shown):
        return ""
    return shown


def pandas_parts(item: Any) -> dict[str, Any]:
    """Return the values and names of a table, a column or an index of pandas; {} for others.

    "values" is None if the text of a cell has an address, which differs between processes.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(item, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return {}
    if isinstance(item, pandas.DataFrame):
        parts = {"columns": list(item.columns), "types": [str(each) for each in item.dtypes]}
    else:
        parts = {"name": item.name, "types": str(item.dtype)}
    try:
        # The hash of an object in a cell is that of its text.
        parts["values"] = pandas.util.hash_pandas_object(item).to_numpy()
        if not all(map(shown_without_address, _object_cells(item))):
            parts["values"] = None
    except (TypeError, ValueError):  # a cell has a list or another value without a hash
        parts["values"] = item.to_numpy(dtype=object)
        parts["index"] = list(getattr(item, "index", []))
    return parts


def _object_cells(item: Any) -> Iterator[Any]:
    """Yield the cells of pandas that are objects, with those of the index."""
    columns = [item]
    if hasattr(item, "columns"):
        columns = [item.iloc[:, i] for i in range(item.shape[1])]
    columns.append(getattr(item, "index", item))
    for column in columns:
        if column.dtype == object:
            for cell in column:
                if type(cell) not in SCALARS:
                    yield cell
