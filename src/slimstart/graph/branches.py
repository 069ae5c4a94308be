"""Branches whose residual sum is in the forward around them: `x = x + attn(norm(x))`, in one run of the network.

The last module of a branch returns a tensor that is used once, by a sum with a stream on which its input depends. It
may be scaled by parameters before, or pass through dropout or an activation that keeps zero. With zero in its place the
sum is the stream.

All modules that compute something from the stream for this branch alone belong to it (`norm`). If there are others with
weights, or the forward around them treats their results in a way that depends on a shape, the branch cannot go: they
would be computed although nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slimstart.graph.flow import Flow, ModuleCall, Operation

_FAR = 4  # sums of parallel branches, as in `x + attn(h) + mlp(h)`


class NoBranchError(Exception):
    """A module whose result is added to a stream cannot go; the argument is the reason."""


def branch_of(flow: Flow, call: ModuleCall, may_go: Callable[[ModuleCall], bool]) -> list[ModuleCall] | None:
    """The calls of a branch in their order, of which the last one is given; None if it does not end a branch.

    Args:
        may_go: whether a call may belong to the branch, too.

    Raises:
        NoBranchError: its result is added to a stream, but the branch cannot go.
    """
    if call.before is None or call.after is None:
        return None
    same = flow.returned[call.after.serial]
    if any(may_go(other) for other in same[same.index(call) + 1 :]):  # dropout in evaluation mode returns its input
        return None
    return _Branch(flow, call, may_go).calls()


class _Branch:
    def __init__(self, flow: Flow, last: ModuleCall, may_go: Callable[[ModuleCall], bool]) -> None:
        self.flow, self.last, self.may_go = flow, last, may_go
        self.gone = [last]
        self.after: set[tuple[int, int]] = set()  # (operation, tensor): uses of the result, up to the sum

    def calls(self) -> list[ModuleCall] | None:
        stream = self._added_to()
        if stream is None:
            return None
        while found := self._for_it_alone(stream):
            self.gone.append(found)
        self._check_unread()
        self._check_memory()
        self._check_outside()
        return [call for call in self.flow.calls if call in self.gone]

    def _added_to(self) -> int | None:
        """The stream to which the result is added."""
        assert self.last.after is not None
        serial, start, reason = self.last.after.serial, self.last.end, ""
        for _ in range(2 * _FAR):
            numbers = [number for number in self.flow.readers.get(serial, ()) if number >= start]
            idle = [n for n in numbers if self._returns_it(n, serial)]  # dropout in evaluation mode
            self.after.update((number, serial) for number in idle)
            numbers = [number for number in numbers if number not in idle]
            sums = [number for number in numbers if self._stream_of(number, serial) is not None]
            several = [self.flow.operations[number] for number in numbers]
            if any(one.streams == (serial,) and self._depends_on(one.reads[1], self.gone) for one in several):
                raise NoBranchError("the stream is added to its result in place")
            if len(numbers) > 1 and sums:
                others = {one.name for one in several} - {"add", "add_"}
                what = "its size is read" if others == {"size"} else "its result is used more than once"
                raise NoBranchError(f"{what} before it is added to a stream")
            if len(numbers) != 1:
                return None
            (operation,), start = several, numbers[0] + 1
            self.after.add((numbers[0], serial))
            if sums and reason:
                raise NoBranchError(reason)
            if sums:
                stream = self._stream_of(numbers[0], serial)
                if stream is not None and not self._has_weights(stream):
                    raise NoBranchError("it is added to an input of the network")
                return stream
            if len(operation.results) == 0 or operation.reads.count(serial) != 1 or operation.weighs:
                return None
            if operation.scaled != serial and not operation.streams:
                if len(operation.reads) > 1:
                    return None
                reason = reason or f"{operation.name} is applied to its result before that is added to a stream"
            serial = operation.results[0]
        return None

    def _returns_it(self, number: int, serial: int) -> bool:
        """Whether an operation that could scale a tensor returns the tensor itself."""
        operation = self.flow.operations[number]
        return operation.scaled == serial == operation.results[0] and not operation.in_place

    def _stream_of(self, number: int, serial: int) -> int | None:
        """The other summand of an operation, if it is a sum with a stream on which the input depends."""
        operation = self.flow.operations[number]
        others = [other for other in operation.reads if other != serial]
        if len(others) != 1 or others[0] not in operation.streams or not self._depends_on(others[0], self.gone):
            return None
        return others[0]

    def _depends_on(self, stream: int, calls: list[ModuleCall]) -> bool:
        """Whether what calls read is computed from a stream, or from what parallel branches are added to."""
        operations, producers = self.flow.operations, self.flow.producers
        streams, found = {stream}, {stream}
        for _ in range(_FAR):
            sums = [operations[p] for serial in found for p in producers.get(serial, ())[-1:] if operations[p].streams]
            found = {serial for operation in sums for serial in operation.reads} - streams
            streams |= found
        first = min((producers[serial][0] for serial in streams if serial in producers), default=0)
        left, known = self._inputs(calls), set[int]()
        while left:
            serial = left.pop()
            if serial in streams:
                return True
            for number in producers.get(serial, ()):
                if number >= first and number not in known:
                    known.add(number)
                    left.extend(operations[number].reads)
        return False

    def _has_weights(self, serial: int) -> bool:
        """Whether a tensor depends on weights: if not, the branch may be the whole network."""
        left, known = [serial], set[int]()
        while left:
            for number in self.flow.producers.get(left.pop(), ()):
                if self.flow.operations[number].weighs:
                    return True
                if number not in known:
                    known.add(number)
                    left.extend(self.flow.operations[number].reads)
        return False

    def _inputs(self, calls: list[ModuleCall]) -> list[int]:
        """The tensors that calls read and do not compute."""
        found: dict[int, None] = {}
        for call in calls:
            assert call.before is not None
            found[call.before.serial] = None
            own = self.flow.operations[call.begin : call.end]
            found.update(dict.fromkeys(serial for operation in own for serial in operation.reads))
        first = {serial: self.flow.producers.get(serial, ())[:1] for serial in found}
        return [serial for serial in found if not any(call.has(n) for n in first[serial] for call in calls)]

    def _ours(self, number: int) -> bool:
        """Whether an operation belongs to the branch."""
        return any(call.has(number) for call in self.gone)

    def _spent(self, serial: int, start: int) -> bool:
        """Whether a tensor is for the branch alone, at most after operations that any other tensor can go through."""
        for number in self.flow.readers.get(serial, ()):
            operation = self.flow.operations[number]
            if number < start or (number, serial) in self.after or self._ours(number):
                continue
            if not operation.unary or not all(self._spent(one, number + 1) for one in operation.results):
                return False
        return True

    def _for_it_alone(self, stream: int) -> ModuleCall | None:
        """A call that computes something from the stream for the branch alone, and can go, too."""
        for serial in self._inputs_and_their_sources():
            calls = [c for c in self.flow.returned.get(serial, ()) if c.end <= self.last.begin and c not in self.gone]
            if not calls:
                continue
            call = calls[-1]
            results = [*(() if call.after is None else (call.after.serial,)), *call.others]
            if call.before is None or call.after is None or not all(self._spent(one, call.end) for one in results):
                continue
            if self.may_go(call) and self._depends_on(stream, [call]):
                return call
        return None

    def _inputs_and_their_sources(self) -> list[int]:
        """The inputs, and those of operations of the forward around the modules that lead to them."""
        found = self._inputs(self.gone)
        for serial in found:
            for number in self.flow.producers.get(serial, ()):
                if self.flow.operations[number].unary and not self._ours(number):
                    found.extend(one for one in self.flow.operations[number].reads if one not in found)
        return found

    def _check_unread(self) -> None:
        """Refuse a branch if weights remain whose products nothing reads without it."""
        operations, unread = self.flow.operations, set[int]()

        def idle(number: int, serial: int) -> bool:
            no_operation = operations[number].name == "size"
            return no_operation or number in unread or (number, serial) in self.after or self._ours(number)

        left = self._inputs(self.gone)
        while left:
            serial = left.pop()
            for number in reversed(self.flow.producers.get(serial, ())):
                operation = operations[number]
                if number in unread or self._ours(number):
                    continue
                readers = {one: self.flow.readers.get(one, ()) for one in operation.results}
                if all(idle(n, one) for one, numbers in readers.items() for n in numbers if n != number):
                    if operation.weighs:
                        raise NoBranchError(
                            "the forward around it computes what it reads from the results of other layers; "
                            "put the branch into one module"
                        )
                    unread.add(number)
                    left.extend(operation.reads)

    def _check_outside(self) -> None:
        """Refuse a branch if something else uses modules, weights or tensors in it."""
        for other in self.flow.calls:
            for gone in self.gone:
                inside = other.module == gone.module or other.module.startswith(gone.module + ".")
                if inside and not (gone.begin <= other.begin and other.end <= gone.end):
                    raise NoBranchError(f"{other.module} is called from outside, too")
        prefixes = tuple(f"{call.module}." for call in self.gone)
        results = {serial for call in self.gone if call.after for serial in (call.after.serial, *call.others)}
        for number, operation in enumerate(self.flow.operations):
            if self._ours(number):
                for serial in operation.results:
                    numbers = self.flow.readers.get(serial, ()) if serial not in results else ()
                    own = self._ours(self.flow.producers[serial][0])
                    if own and not all(map(self._ours, numbers)):
                        raise NoBranchError("a tensor that it computes and does not return is used")
            elif found := [name for name in operation.parameters if name.startswith(prefixes)]:
                raise NoBranchError(f"{found[0]} is used from outside, too")

    def _check_memory(self) -> None:
        """Refuse a branch that writes into a tensor that others read."""
        own = [operation for call in self.gone for operation in self.flow.operations[call.begin : call.end]]
        written = {operation.addresses[0] for operation in own if operation.in_place and operation.addresses} - {0}
        if not written:
            return
        begin = min(call.begin for call in self.gone)
        for serial in self._inputs(self.gone):
            numbers = self.flow.readers.get(serial, ())
            others = [n for n in numbers if (n, serial) not in self.after and not self._ours(n)]
            if any(number > begin for number in others) and written & self._addresses(serial, own):
                raise NoBranchError("it writes into its input")

    def _addresses(self, serial: int, operations: Iterable[Operation]) -> set[int]:
        return {
            address
            for operation in operations
            for one, address in zip(operation.reads, operation.addresses, strict=False)
            if one == serial
        }
