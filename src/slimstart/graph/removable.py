"""Layers that can go as a whole, from the module calls of a trace.

Three kinds of layers can go:

- *residual*: a module that adds something to its input, so its output channels have the writers of its input and more.
  The identity takes its place, and the stream goes on as it was. Streams and masks are not concerned.
- *branch*: a module whose result the forward around it adds to a stream, with the modules that only it reads, see
  `branches.py`. Zero takes its place, and the stream goes on as it was.
- *sequential*: a convolution or linear layer, with what belongs to it, whose output has the shape of its input. The
  identity takes its place: output channel i is input channel i, so the two exist at the same time. What belongs to it
  is the largest module around it that has no other such layer (a block with a depthwise and a pointwise convolution),
  or, in a flat chain, the normalisation and activation that follow, and a depthwise convolution that precedes.

The layers found are disjoint: of nested residual modules and branches the innermost, unless they leave out parameters
of a module that has only one of them (an attention block within a transformer layer).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from slimstart.graph.branches import NoBranchError, branch_of
from slimstart.graph.channels import RemovableLayer
from slimstart.graph.constraints import Presence, when_carried
from slimstart.graph.flow import Flow, ModuleCall
from slimstart.graph.solver import Atoms, Solver

_FOLLOWERS = frozenset(
    f"torch.nn.modules.{kind}" for kind in ("activation", "batchnorm", "dropout", "instancenorm", "normalization")
)


@dataclass(frozen=True, eq=False)
class Found:
    """A removable layer.

    Attributes:
        ties: for every output channel that the input's channel replaces, the filter that writes it, and when the
            input's channel exists.
    """

    layer: RemovableLayer
    ties: tuple[tuple[int, Presence], ...]


class _RefusedError(Exception):
    """A layer cannot go; the argument is the reason."""


def find_removable(solver: Solver, model: nn.Module, reasons: Mapping[str, str]) -> tuple[list[Found], dict[str, str]]:
    """The layers that can go, in network order, and {name: reason} for convolutions and linear layers that cannot.

    Args:
        reasons: names of modules and parameters to keep.
    """
    return _Search(solver, model, reasons).found()


class _Search:
    def __init__(self, solver: Solver, model: nn.Module, reasons: Mapping[str, str]) -> None:
        self.solver, self.constraints, self.reasons = solver, solver.constraints, reasons
        self.modules = dict(model.named_modules())
        self.flow = self.constraints.flows[False]
        self.calls = self.flow.calls
        self.aliased = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self.once = self._called_once(self.flow)
        self.order = {call.module: number for number, call in enumerate(self.calls)}
        self.atoms = {layer: set(self.constraints.writers[key]) for key, layer in self.constraints.layers.items()}
        self.mixing = [call.module for call in self.calls if call.module in self.atoms]
        self.leaves = [call for call in self.calls if not any(True for _ in self.modules[call.module].children())]
        self.parameters = [name for name, _ in model.named_parameters()]
        aliases: dict[int, list[str]] = defaultdict(list)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            aliases[id(tensor)].append(name)
        self.shared = [names for names in aliases.values() if len(names) > 1]
        self.without_ports = solver.carried_without_ports()

    def _called_once(self, flow: Flow) -> dict[str, ModuleCall]:
        """The calls of modules with one name that a run calls once."""
        counts = Counter(call.module for call in flow.calls)
        return {
            call.module: call
            for call in flow.calls
            if call.module and counts[call.module] == 1 and self.aliased[id(self.modules[call.module])] == 1
        }

    def found(self) -> tuple[list[Found], dict[str, str]]:
        accepted, refused = self._residual()
        refused |= self._branches(accepted)
        layers = [Found(layer, ()) for layer in accepted.values()]
        self.covered = list(accepted.values())
        for name in dict.fromkeys(self.mixing):
            if any(layer.has(name) for layer in self.covered):
                continue
            try:
                layers.append(self._sequential(name))
                self.covered.append(layers[-1].layer)
            except _RefusedError as error:
                around = next((reason for module, reason in refused.items() if _within(name, module)), None)
                refused[name] = around or str(error)
        layers.sort(key=lambda found: self.order[found.layer.modules[-1]])
        return layers, {name: reason for name, reason in refused.items() if name in self.mixing}

    # --- residual modules --------------------------------------------------------------------------------------------

    def _residual(self) -> tuple[dict[str, RemovableLayer], dict[str, str]]:
        accepted: dict[str, RemovableLayer] = {}
        refused: dict[str, str] = {}
        for call in self.calls:  # inner calls return before outer ones
            name = call.module
            if not name or name not in self.once or not self._adds_to_its_input(call):
                continue
            layer = RemovableLayer(name, (name,), (_results(call),))
            inner = self._inner(layer, accepted)
            if inner is None:
                continue
            try:
                self._check(layer)
            except _RefusedError as error:
                refused[name] = str(error)
                continue
            for other in inner:
                del accepted[other]
            accepted[name] = layer
        return accepted, refused

    def _inner(self, layer: RemovableLayer, accepted: Mapping[str, RemovableLayer]) -> list[str] | None:
        """The layers within another one, which would take their place; None if they should remain."""
        inner = [name for name, other in accepted.items() if any(layer.has(module) for module in other.modules)]
        rest = [p for p in self.parameters if layer.has(p) and not any(accepted[other].has(p) for other in inner)]
        return None if len(inner) > 1 or (inner and not rest) else inner

    def _adds_to_its_input(self, call: ModuleCall) -> bool:
        if call.before is None or call.after is None or call.before.shape != call.after.shape:
            return False
        before, after = call.before.nodes, call.after.nodes
        if before is None or after is None or before.shape != after.shape:
            return False
        if not any(_within(cost.module, call.module) for cost in self.constraints.costs):
            return False
        find, live = self.constraints.carriers.find, self.constraints.live
        grown = False
        for one, other in zip(before.reshape(-1).tolist(), after.reshape(-1).tolist(), strict=True):
            mine, more = live[one], live[other]
            if find(one) != find(other) or (more is not None and (mine is None or not mine <= more)):
                return False
            grown |= one != other
        return grown

    # --- branches that are added in the forward around them ----------------------------------------------------------

    def _branches(self, accepted: dict[str, RemovableLayer]) -> dict[str, str]:
        """Add branches to the accepted layers; returns why others cannot go."""
        refused: dict[str, str] = {}
        training = self.constraints.flows.get(True)
        trained = {} if training is None else self._called_once(training)
        for name, call in self.once.items():  # inner calls return before outer ones
            if any(layer.has(name) for layer in accepted.values()):
                continue
            try:
                found = self._branch(self.flow, call, accepted)
                if found is None:
                    continue
                modules = tuple(one.module for one in found)
                costly = [
                    module for module in modules if any(_within(c.module, module) for c in self.constraints.costs)
                ]
                layer = RemovableLayer((costly or modules)[-1], modules, tuple(map(_results, found)), added=True)
                inner = self._inner(layer, accepted)
                if inner is None or not costly:
                    continue
                again = self._branch(training, trained[name], accepted) if training and name in trained else None
                if tuple(one.module for one in again or ()) != modules:
                    why = "its result is used in another way" if training else "the forward could not be followed"
                    raise _RefusedError(f"in training mode {why}")
                self._check(layer)
            except (_RefusedError, NoBranchError) as error:
                # Of an activation or dropout, the layer before it should have the reason, too.
                sources = self.flow.returned.get(call.before.serial, ()) if call.before else ()
                refused |= dict.fromkeys((name, *(source.module for source in sources)), str(error))
                continue
            for other in inner:
                del accepted[other]
            accepted[layer.name] = layer
        return refused

    def _branch(self, flow: Flow, last: ModuleCall, accepted: Mapping[str, RemovableLayer]) -> list[ModuleCall] | None:
        def may_go(call: ModuleCall) -> bool:
            known = (module for layer in accepted.values() for module in layer.modules)
            return call.module in self.once and not any(
                _within(module, call.module) or _within(call.module, module) for module in known
            )

        return branch_of(flow, last, may_go)

    # --- sequential layers -------------------------------------------------------------------------------------------

    def _sequential(self, name: str) -> Found:
        around = self._block_around(name)
        calls = self._chain(name) if around is None else [around]
        layer = RemovableLayer(calls[0].module, tuple(c.module for c in calls), tuple(map(_results, calls)))
        self._check(layer)
        before, after = calls[0].before, calls[-1].after
        if before is None or after is None:
            raise _RefusedError("it is not called with a tensor, or returns none")
        if before.shape != after.shape:
            raise _RefusedError(f"its input is {tuple(before.shape)} and its output {tuple(after.shape)}")
        if before.nodes is None or after.nodes is None:
            raise _RefusedError("its input or its output is not followed")
        return Found(layer, self._ties(before.nodes, after.nodes, self.atoms[name]))

    def _block_around(self, name: str) -> ModuleCall | None:
        """The largest module with this one and no other convolution or linear layer that keeps its input's shape."""
        best = None
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            outer = ".".join(parts[:length])
            call = self.once.get(outer)
            if sum(_within(other, outer) for other in set(self.mixing)) > 1:
                break
            if call is not None and call.before and call.after and call.before.shape == call.after.shape:
                best = call
        return best

    def _chain(self, name: str) -> list[ModuleCall]:
        """The layer's call, with those of what belongs to it in a flat chain."""
        if name not in self.once:
            raise _RefusedError("it is called more than once, or has several names")
        position = next(i for i, call in enumerate(self.leaves) if call.module == name)
        chain = [self.leaves[position]]
        for call in self.leaves[position + 1 :]:
            if _feeds(chain[-1], call):
                if not self._follows(call) or any(layer.has(call.module) for layer in self.covered):
                    break
                chain.append(call)
        before: list[ModuleCall] = []
        for call in reversed(self.leaves[:position]):
            if _feeds(call, before[0] if before else chain[0]):
                if not self._follows(call) and not (self._is_depthwise(call) and self._keeps_channels(call)):
                    break
                if any(layer.has(call.module) for layer in self.covered):
                    break
                before.insert(0, call)
        while before and not self._is_depthwise(before[0]):
            del before[0]
        return before + chain

    def _follows(self, call: ModuleCall) -> bool:
        """Whether a layer is a normalisation or an activation that keeps the shape."""
        kinds = {base.__module__ for base in type(self.modules[call.module]).__mro__}
        keeps_shape = call.before is not None and call.after is not None and call.before.shape == call.after.shape
        return call.module in self.once and call.plain and keeps_shape and bool(kinds & _FOLLOWERS)

    def _keeps_channels(self, call: ModuleCall) -> bool:
        """Whether the tensors on both sides carry the same channels: not if a residual stream begins after it."""
        carried = [
            [self.solver.exists(when_carried(node)) for node in seen.nodes.reshape(-1).tolist()]
            for seen in (call.before, call.after)
            if seen is not None and seen.nodes is not None
        ]
        return len(carried) == 2 and carried[0] == carried[1]

    def _is_depthwise(self, call: ModuleCall) -> bool:
        module = self.modules[call.module]
        depthwise = isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels
        return depthwise and call.module in self.once

    def _ties(self, before: Tensor, after: Tensor, own: set[int]) -> tuple[tuple[int, Presence], ...]:
        """Conditions under which output channel i is input channel i; see `Found`."""
        if before.shape != after.shape or before.numel() != max(before.shape):
            raise _RefusedError("its channels are not along one dimension")
        solver, constraints = self.solver, self.constraints
        writers = Counter(solver.atoms.find(atom) for atoms in constraints.writers.values() for atom in atoms)
        mine = Counter(map(solver.atoms.find, own))
        ties: dict[int, tuple[Atoms, Presence]] = {}
        for one, other in zip(before.reshape(-1).tolist(), after.reshape(-1).tolist(), strict=True):
            source, target = solver.exists(when_carried(one)), solver.exists(when_carried(other))
            if (source is None) != (target is None):
                which = "input" if source is None else "output"
                raise _RefusedError(f"channels of its {which} are always there, and those on its other side are not")
            if (source, target) != (self.without_ports[one], self.without_ports[other]):
                raise _RefusedError("a normalisation or depthwise convolution next to it belongs to a residual stream")
            if source is None or target is None:
                continue
            if len(target) > 1 or any(writers[atom] > mine[atom] for atom in target):
                raise _RefusedError("other layers write to its output, or are tied to it")
            (atom,) = target
            if ties.setdefault(atom, (source, when_carried(one)))[0] != source:
                raise _RefusedError("channels of its output go together that do not in its input")
        return tuple((atom, presence) for atom, (_, presence) in ties.items())

    # --- what both kinds need ----------------------------------------------------------------------------------------

    def _check(self, layer: RemovableLayer) -> None:
        """Refuse a layer that is protected, has hooks, or has a tensor that another part of the network has, too."""
        for name, module in self.modules.items() if layer.added else ():
            if isinstance(module, nn.TransformerEncoderLayer) and any(_within(part, name) for part in layer.modules):
                raise _RefusedError("the fused forward of PyTorch's transformer layer reads its weights")
        for name, reason in self.reasons.items():
            if layer.has(name) or any(_within(module, name) for module in layer.modules):
                raise _RefusedError(reason)
        for name in layer.modules:
            call = self.once[name]
            if any(number >= call.end for other in call.others for number in self.flow.readers.get(other, ())):
                raise _RefusedError("another of its results is used")
        if any(self.modules[name]._forward_hooks or self.modules[name]._forward_pre_hooks for name in layer.modules):
            raise _RefusedError("it has forward hooks, which would not run without it")
        for names in self.shared:
            inside = [name for name in names if layer.has(name)]
            if inside and len(inside) < len(names):
                raise _RefusedError(f"{inside[0]} is used in another place, too")


def _feeds(call: ModuleCall, following: ModuleCall) -> bool:
    """Whether the second call has the result of the first, unchanged, as its input."""
    one, other = call.after, following.before
    return (
        one is not None
        and other is not None
        and one.serial == other.serial
        and one.nodes is not None
        and other.nodes is not None
        and one.nodes.shape == other.nodes.shape
        and torch.equal(one.nodes, other.nodes)
    )


def _results(call: ModuleCall) -> int | None:
    return None if call.plain and call.num_results == 0 else call.num_results


def _within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(module + ".")
