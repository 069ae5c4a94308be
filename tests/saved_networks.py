"""Parts of files of `slimstart.save`, read and changed by hand."""

import json
from typing import Any

from safetensors.torch import load

from slimstart.io import network_files


def with_header(header: bytes, tensors: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def structure_of(content: bytes) -> Any:
    return json.loads(_header(content)["__metadata__"]["slimstart"])


def with_structure(content: bytes, text: str) -> bytes:
    """The same tensors with another structure."""
    header, size = _header(content), int.from_bytes(content[:8], "little")
    header["__metadata__"]["slimstart"] = text
    return with_header(json.dumps(header).encode(), content[8 + size :])


def sealed(content: bytes) -> bytes:
    """The same with the right digest, which is no secret."""
    structure = structure_of(content)
    return with_structure(content, json.dumps(structure | {"sha256": network_files._digest(structure, load(content))}))


def _header(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
