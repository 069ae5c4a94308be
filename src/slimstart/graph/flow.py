"""The operations and module calls of one run in their order, and which tensors they read: the record of a trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor as a module met it.

    Attributes:
        serial: the same for the same tensor object, also where an operation has written into it.
        nodes: its node ids; None where it is not followed.
    """

    serial: int
    shape: torch.Size
    nodes: Tensor | None


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        module: its name.
        plain: whether it was called with one tensor and nothing else.
        num_results: length of the tuple that it returned, 0 for a tensor.
        before: the first argument, if that is a tensor.
        after: the tensor returned, or the first of a tuple of tensors and None.
        others: serial numbers of the other tensors of this tuple.
        begin, end: the operations of the call, as a range.
    """

    module: str
    plain: bool
    num_results: int
    before: Seen | None
    after: Seen | None
    others: tuple[int, ...]
    begin: int
    end: int

    def has(self, operation: int) -> bool:
        """Whether an operation ran within the call."""
        return self.begin <= operation < self.end


@dataclass(frozen=True)
class Operation:
    """One operation, or a use of tensors that is none: "size" where a shape is read, "output" of the network, "numpy".

    Attributes:
        name: as in its schema, without the overload.
        reads: serial numbers of the tensors that it reads.
        addresses: their memory.
        results: serial numbers of the tensors that it returns.
        streams: of a sum of two activations of equal shape, the summands that it may return where the other one is
            zero: in place only the one that is written.
        scaled: the tensor where, if it were zero, the result would be zero: it is multiplied by parameters and numbers,
            or an activation or dropout is applied to it.
        unary: whether it treats the entries of one tensor separately, whatever their number.
        in_place: whether it writes into the first tensor.
        weighs: whether it multiplies by a matrix of parameters.
        parameters: names of the parameters and buffers that it reads.
    """

    name: str
    reads: tuple[int, ...]
    addresses: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    scaled: int | None = None
    unary: bool = False
    in_place: bool = False
    weighs: bool = False
    parameters: tuple[str, ...] = ()


@dataclass
class Flow:
    """The operations of one run, and its module calls in the order in which they returned."""

    operations: list[Operation] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The operations that read each tensor; for a run that is over."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(self.operations):
            for serial in dict.fromkeys(operation.reads):
                found[serial].append(number)
        return found

    @cached_property
    def producers(self) -> dict[int, list[int]]:
        """The operations that return each tensor, several where they write in place or return what they were given."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(self.operations):
            for serial in dict.fromkeys(operation.results):
                found[serial].append(number)
        return found

    @cached_property
    def returned(self) -> dict[int, list[ModuleCall]]:
        """The calls that return each tensor: of nested ones, the innermost first."""
        found: dict[int, list[ModuleCall]] = defaultdict(list)
        for call in self.calls:
            for serial in (*(() if call.after is None else (call.after.serial,)), *call.others):
                found[serial].append(call)
        return found
