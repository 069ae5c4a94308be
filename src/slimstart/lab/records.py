"""The record of a run, as in `record.json`. `run` writes it, `reports` reads it; torch is not needed for either.

The schema is versioned. Units: accuracy in percent; ratios as fractions of the dense network; one multiply-add = 1
FLOP; `*_flops` of a network are those of one forward on one image; `train_flops` are those of the whole training;
times as their names say. What a method does not have is None. A record checks itself: its numbers are finite and within
their range. docs/records.md describes every field.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from slimstart.errors import RecordError
from slimstart.io import atomic
from slimstart.io.files import read_bytes

Kind = TypeVar("Kind")
SCHEMA = "slimstart.record/1"
MAX_BYTES = 1 << 24  # of a file; one with 300 epochs has less than 1 MB
NUM_BINS = 20
PHASES = ("search", "train", "finetune")
# Names of methods in earlier versions, and their names now. Records on disk keep the old name; `read` translates it.
FORMER_METHODS = {"narrow": "uniform"}

# Fields by which something is divided, and those in percent; every other number has the range (0, LARGEST).
POSITIVE = frozenset("epochs batch_size epoch dense dense_flops dense_params dense_train_flops step_ms".split())
PERCENT = frozenset(("accuracy", "test_accuracy"))
SMALLEST, LARGEST = 1e-9, 1e30
# More than any network or data set has. These limits bound the memory that a report or a network takes.
MAX_LAYERS, MAX_STRUCTURES, MAX_CLASSES, MAX_IMAGE = 4096, 1000, 1 << 20, 1 << 26


@dataclass(frozen=True)
class Layer:
    """Filters of one layer, and its FLOPs for one image, in the dense and in the finished network."""

    name: str
    dense: int
    width: int
    dense_flops: int | None = None  # None where they are not known, and in older records
    flops: int | None = None


@dataclass(frozen=True)
class Epoch:
    """One epoch; `train_flops` and `seconds` do not include evaluation."""

    epoch: int  # from 1, over all phases
    phase: str  # "search" (the structure is learned), "train" (it is fixed), "finetune"
    lr: float  # at the end of the epoch
    train_loss: float
    test_loss: float | None  # None in epochs without an evaluation
    test_accuracy: float | None
    flops_ratio: float  # of the trained sub-network to dense, as executed, mean over the steps
    train_flops: int
    dense_train_flops: int  # what plain dense training takes for the same images
    seconds: float
    images_per_second: float
    formula_ratio: float | None = None  # cost of a step to dense, by the formulas of the paper's appendix
    expected_cost: float | None = None  # in the unit of the budget, as a fraction of dense
    certain: float | None = None  # share of keep-probabilities within 0.05 of 0 or 1
    keep_probs: tuple[int, ...] | None = None  # histogram over NUM_BINS equal bins of [0, 1]


@dataclass(frozen=True)
class Structure:
    """Widths from a moment of the training on, until those of the next `Structure`."""

    start: float  # epochs that were done by then, with the fraction of the current one
    widths: dict[str, int]  # filters of each layer in the network that is trained, padding included
    removed_layers: tuple[str, ...] = ()  # layers that are removed as a whole


@dataclass(frozen=True)
class Candidate:
    """A structure that was tried before the training."""

    stages: str
    accuracy: float  # on the held-out images
    flops: int
    params: int
    train_flops: int


@dataclass(frozen=True)
class Choosing:
    """The choice of a structure by trials, before the training of the best one."""

    chosen: str
    held_out_images: int  # training images by which it was chosen
    epochs: int  # of all trials together
    train_flops: int
    train_seconds: float
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Record:
    """One finished run."""

    # what was run
    name: str
    method: str
    model: str
    data: str
    num_classes: int
    image_shape: tuple[int, ...]  # channels, height, width
    budget: str | None  # "flops=0.1", or "flops=0.1+params=0.05"
    seed: int
    epochs: int  # all phases together
    batch_size: int
    config: dict[str, Any]
    config_hash: str  # of `config` without the seed
    command: str
    commit: str | None
    version: str
    # where
    device: str
    hardware: str
    torch: str
    python: str
    started: str  # ISO 8601, UTC
    finished: str
    # what came out
    accuracy: float
    test_loss: float
    flops: int
    dense_flops: int
    flops_ratio: float
    params: int
    dense_params: int
    params_ratio: float
    layers: tuple[Layer, ...]
    # what it took
    train_flops: int  # executed: both forwards, the backward, the choice of a mask
    dense_train_flops: int
    train_cost_saving: float  # by the formulas of the paper's appendix, over the epochs that they count
    executed_saving: float  # dense_train_flops / train_flops
    train_seconds: float
    step_ms: float | None  # None where no timing was asked for
    step_forward_ms: float | None
    step_backward_ms: float | None
    dense_step_ms: float | None
    narrow_step_ms: float | None
    peak_memory_bytes: int
    history: tuple[Epoch, ...]
    engine: str | None = None  # "eager" or "graphs"; None in records from before there were two
    ports: int | None = None  # layers with a port on a residual stream; `flops` are with ports; None in older records
    building_seconds: float | None = None  # of `train_seconds`: capturing graphs, and what runs eagerly before
    choosing: Choosing | None = None  # where a structure was chosen by trials; in `train_flops` and `train_seconds`
    # of several processes; None for a single one
    ranks: int | None = None
    batch_norm: str | None = None  # "synchronised" or "per-rank"
    gradient_bytes: int | None = None  # that a process exchanges in a step; mean over the steps
    dense_gradient_bytes: int | None = None  # what training the dense network would exchange
    structures: tuple[Structure, ...] | None = None  # where a structure was learned: the first one, then every change
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        for problem in itertools.chain(_out_of_range(self, ""), _contradictions(self)):
            raise RecordError(f"the field {problem}")


def budget_parts(text: str) -> list[tuple[str, str]]:
    """Kinds and fractions of a budget, as they are written: "flops=0.1+params=0.05" has two."""
    parts = (part.partition("=") for part in text.split("+"))
    return [(kind.strip(), number) for kind, _, number in parts]


def write(record: Any, path: str | os.PathLike[str]) -> None:
    """Write a record, a dataclass of plain values, as JSON with a digest, atomically; `read` is the inverse."""
    try:
        # allow_nan=False: NaN is not JSON, and a browser refuses the file.
        plain = json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RecordError(f"`record.config` cannot be written as JSON ({error}): give plain, finite values") from error
    atomic.write(path, (json.dumps(plain | {"digest": digest(plain)}, indent=1) + "\n").encode())


def read(path: str | os.PathLike[str]) -> Record:
    """Read the record of a run: a JSON file, or a run's folder that holds `record.json`.

    Raises:
        RecordError: there is none, or it is not of this schema; the message says which field.
    """
    return read_as(Record, path, SCHEMA, "a run")


def read_as(kind: type[Kind], path: str | os.PathLike[str], schema: str, what: str) -> Kind:
    """Read a record of any kind.

    Args:
        schema: schema that the file must name.
        what: has such records, for the message.
    """
    path = Path(path)
    file = path / "record.json" if path.is_dir() else path
    if not file.is_file():
        way_out = "the run is not finished; continue it with --resume" if path.is_dir() else "give a run's folder"
        raise RecordError(f"{file} does not exist: {way_out}")
    content = _content(file)
    for names in (content, content.get("config")) if isinstance(content, dict) else ():
        if isinstance(names, dict) and isinstance(former := names.get("method"), str):
            names["method"] = FORMER_METHODS.get(former, former)
    if not isinstance(content, dict) or content.get("schema") != schema:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise RecordError(
            f"{file} is not a record of {what}: its schema is {reprlib.repr(found)}, this version reads {schema!r}"
        )
    try:
        record: Kind = from_plain(kind, content)
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from error
    return record


def _content(file: Path) -> Any:
    """Content of a JSON file, without its digest; older files have none.

    Raises:
        RecordError: it cannot be read, or the digest is not that of the other fields.
    """
    try:
        content = json.loads(read_bytes(file, MAX_BYTES))
        # Python's reader accepts NaN, 1e999 and half a surrogate pair, which JSON does not; its strict writer refuses.
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
        changed = isinstance(content, dict) and "digest" in content and content.pop("digest") != digest(content)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}") from error
    if changed:
        raise RecordError(f"{file} has been changed after it was written: its digest is not that of its fields")
    return content


def from_plain(kind: Any, value: Any, where: str = "") -> Any:
    """A dataclass, tuple or plain value of the annotated `kind`, from what JSON or TOML gives.

    Raises:
        RecordError: a field is missing, unknown or of another type.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise RecordError(f"the field `{where}` is {reprlib.repr(value)}; it must be a table of fields")
        hints = _hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if odd := sorted(value.keys() - fields.keys()) or sorted(required - value.keys()):
            raise RecordError(f"the field `{_join(where, odd[0])}` is {'unknown' if odd[0] in value else 'missing'}")
        return kind(**{name: from_plain(hints[name], one, _join(where, name)) for name, one in value.items()})
    if origin is types.UnionType:
        return None if value is None and type(None) in args else from_plain(args[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(from_plain(args[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict and args[1] is not Any and isinstance(value, dict):
        return {name: from_plain(args[1], one, f"{where}[{name}]") for name, one in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is (origin or kind):
        return value
    wanted = {float: "a finite number", tuple: "a list"}.get(origin or kind, f"of type {(origin or kind).__name__}")
    raise RecordError(f"the field `{where}` is {reprlib.repr(value)}; it must be {wanted}")


@functools.cache  # annotations are evaluated at each call, and a history has many epochs
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _out_of_range(value: Any, where: str) -> Iterator[str]:
    """Numbers anywhere in a record, but for its configuration: that may hold any."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "config":
                yield from _out_of_range(getattr(value, field.name), _join(where, field.name))
    elif isinstance(value, tuple):
        for i, one in enumerate(value):
            yield from _out_of_range(one, f"{where}[{i}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _out_of_range(one, f"{where}[{name!r}]")
    elif isinstance(value, int | float):
        name = where.rpartition(".")[2]
        low, high = SMALLEST if name in POSITIVE else 0, 100 if name in PERCENT else LARGEST
        if not low <= value <= high:  # so written, NaN fails too
            yield f"`{where}` is {reprlib.repr(value)}; it must be from {low:g} to {high:g}"


def _contradictions(record: Record) -> Iterator[str]:
    for name, moment in (("started", record.started), ("finished", record.finished)):
        try:
            datetime.fromisoformat(moment)
        except ValueError:
            yield f"`{name}` is {reprlib.repr(moment)}; it must be a time by ISO 8601"
    if len(record.image_shape) != 3 or not 1 <= math.prod(record.image_shape) <= MAX_IMAGE:
        shape = reprlib.repr(record.image_shape)
        yield f"`image_shape` is {shape}; it must be channels, height and width, of at most {MAX_IMAGE:,} numbers"
    if record.num_classes > MAX_CLASSES:
        yield f"`num_classes` is {reprlib.repr(record.num_classes)}; it must be at most {MAX_CLASSES:,}"
    for name, entries, most in (
        ("layers", record.layers, MAX_LAYERS),
        ("structures", record.structures or (), MAX_STRUCTURES),
    ):
        if len(entries) > most:
            yield f"`{name}` has {len(entries):,} entries; it must have at most {most:,}"
    for i, layer in enumerate(record.layers):
        if layer.width > layer.dense:
            yield f"`layers[{i}].width` is {layer.width}; it must be at most `dense`, {layer.dense}"
    moments = [structure.start for structure in record.structures or ()]
    for i, (before, after) in enumerate(itertools.pairwise(moments), start=1):
        if after <= before:
            yield f"`structures[{i}].start` is {after}; it must be above that of the one before, {before}"
    last = 0
    for i, epoch in enumerate(record.history):
        where, bins = f"history[{i}]", NUM_BINS if epoch.keep_probs is None else len(epoch.keep_probs)
        if epoch.epoch <= last:
            yield f"`{where}.epoch` is {epoch.epoch}; it must be above that of the one before, {last}"
        if epoch.phase not in PHASES:
            yield f"`{where}.phase` is {reprlib.repr(epoch.phase)}; it must be one of {', '.join(PHASES)}"
        if bins != NUM_BINS:
            yield f"`{where}.keep_probs` has {bins} bins; it must have {NUM_BINS}"
        last = epoch.epoch


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def digest(config: Mapping[str, Any]) -> str:
    """A short hash of a configuration, the same for the same settings in any order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
