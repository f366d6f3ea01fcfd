"""Records as the maps that msgpack carries."""

from __future__ import annotations

from typing import Any

from p2pcast.wire.messages import Record


def plain(record: Record) -> dict[str, Any]:
    """The keys of ``record`` that are not missing, with arrays as lists."""
    found = {field.key: getattr(record, field.key) for field in record.fields}
    required = {field.key for field in record.fields if field.required}
    return {key: as_lists(value) for key, value in found.items() if value is not None or key in required}


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, list | tuple) else value


def as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tuples(each) for key, each in value.items()}
    return tuple(as_tuples(each) for each in value) if isinstance(value, list | tuple) else value
