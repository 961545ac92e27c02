"""Renders a document as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from stepscope.records.codec import dumps
from stepscope.report.kit.document import Document


def render(document: Document) -> str:
    """Return the document's data if it has any, otherwise its blocks."""
    return dumps(_tree(document) if document.data is None else document.data) + "\n"


def _tree(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: _tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__.lower(), **fields}
    return [_tree(each) for each in value] if isinstance(value, tuple) else value
