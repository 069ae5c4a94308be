"""Kernels that move numbers, against loops that move one at a time; the last test runs all in Triton's interpreter."""

import importlib.util
import itertools
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slimstart.kernels import Move, Moves, backend, take_channels, use_triton
from slimstart.kernels import take_channels as channels
from slimstart.kernels.moves import BLOCK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PADDING = -1


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(autouse=INTERPRETED)
def _small_tiles(monkeypatch):
    """The interpreter runs one program after the other, masked lanes and all."""
    monkeypatch.setattr(channels, "ROWS", 2)
    monkeypatch.setattr(channels, "CHUNKS", 2)


# --- moves -----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A dense tensor, a `view` of this shape, and the capacity of its narrow one; None for a whole dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    capacity: tuple[int | None, ...]
    order: tuple[int, ...] | None = None  # of the dense dimensions in memory, the outermost first
    narrow_order: tuple[int, ...] | None = None
    view: Callable[[torch.Tensor], torch.Tensor] = lambda dense: dense


CHANNELS_LAST = (0, 2, 3, 1)
KINDS = [
    Kind(torch.float32, (6, 5, 3, 3), (4, 3, None, None)),
    Kind(torch.bfloat16, (6, 5, 3, 3), (4, 3, None, None), CHANNELS_LAST, CHANNELS_LAST),
    Kind(torch.float64, (6, 5, 3, 3), (4, 3, None, None), None, CHANNELS_LAST),
    Kind(torch.float32, (40, 2, 30), (31, None, 37)),  # several blocks, with more capacity than channels
    Kind(torch.int64, (9, 4), (3, None), view=lambda dense: dense.T[:, 2:7]),
    Kind(torch.bool, (11, 8), (4, 6), view=lambda dense: dense[1::2, 2:7]),
    Kind(torch.float32, (2, 3, 2, 3, 2), (2, None, 2, None, 1)),
    Kind(torch.bfloat16, (3, 4), (None, None)),
    Kind(torch.float32, (5, 4), (0, None)),  # no elements
    Kind(torch.int64, (), ()),
]


def random_kinds(num):
    """Few dimensions of few elements in any order: many of them are 1, and their strides say nothing."""
    generator = torch.Generator().manual_seed(0)

    def drawn(high):
        return int(torch.randint(high, (), generator=generator))

    for _ in range(num):
        num_dims = drawn(5)
        shape = tuple(1 + drawn(3) for _ in range(num_dims))
        orders = [tuple(torch.randperm(num_dims, generator=generator).tolist()) for _ in range(2)]
        dtype = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)[drawn(5)]
        yield Kind(dtype, shape, tuple(1 + drawn(4) if drawn(2) else None for _ in shape), *orders)


KINDS += random_kinds(40)


def laid_out(shape, order, dtype, generator, device):
    """Random bits, some of them NaN, with guard entries around: entries that are not moved must not change."""
    order = range(len(shape)) if order is None else order
    length = math.prod(shape) + 8
    if dtype == torch.bool:
        numbers = torch.randint(2, (length,), generator=generator, dtype=torch.bool)
    else:
        numbers = torch.randint(256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
        if dtype.is_floating_point:
            numbers[::7] = torch.nan
    memory = numbers.to(device)[3:-5].view([shape[dim] for dim in order])
    return memory.permute([list(order).index(dim) for dim in range(len(shape))])


def example(seed, device="cpu"):
    """Moves of all kinds, and positions that use a part of their capacity. The seed changes values alone."""
    generator = torch.Generator().manual_seed(seed)
    moves, row = [], []
    for kind in KINDS:
        dense = kind.view(laid_out(kind.shape, kind.order, kind.dtype, generator, device))
        starts = {}
        for dim, capacity in enumerate(kind.capacity):
            if capacity is not None:
                starts[dim] = len(row)
                filled = int(torch.randint(min(dense.shape[dim], capacity) + 1, (), generator=generator))
                positions = torch.full((capacity,), PADDING)
                taken = torch.randperm(capacity, generator=generator)[:filled]
                positions[taken] = torch.randperm(dense.shape[dim], generator=generator)[:filled]
                row += positions.tolist()
        shape = [whole if own is None else own for whole, own in zip(dense.shape, kind.capacity, strict=True)]
        narrow = laid_out(shape, kind.narrow_order, kind.dtype, generator, device)
        moves.append(Move(dense, narrow, starts))
    return moves, torch.tensor(row, dtype=torch.int32, device=device)


def pairs(move, row):
    """(narrow index, dense index or None), by the definition."""
    row = row.tolist()
    for coordinates in itertools.product(*map(range, move.narrow.shape)):
        index = [row[move.starts[dim] + c] if dim in move.starts else c for dim, c in enumerate(coordinates)]
        yield coordinates, None if PADDING in index else tuple(index)


def slow_gather_(moves, row):
    for move in moves:
        for here, there in pairs(move, row):
            move.narrow[here] = 0 if there is None else move.dense[there]


def slow_scatter_(moves, row):
    for move in moves:
        for here, there in pairs(move, row):
            if there is not None:
                move.dense[there] = move.narrow[here]


def memory_of(tensor):
    """All bytes around a tensor, gaps included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def assert_same_memory(actual, expected):
    for kind, ours, reference in zip(KINDS, actual, expected, strict=True):
        for side in ("dense", "narrow"):
            mine, its = (memory_of(getattr(move, side)).cpu() for move in (ours, reference))
            assert torch.equal(mine, its), f"{side} of {kind}"


def assert_same(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["gather_", "scatter_"])
@pytest.mark.parametrize("seed", range(2))
def test_moves_equal_a_loop(seed, way, device):
    (ours, row), (reference, slow_row) = example(seed, device), example(seed)
    getattr(Moves(ours), way)(row)
    {"gather_": slow_gather_, "scatter_": slow_scatter_}[way](reference, slow_row)
    assert_same_memory(ours, reference)


def test_programs_take_one_block_after_the_other(device):
    """As they do where few of them are to share a bus."""
    moves, row = example(0, device)
    reference, _ = example(0)
    together = Moves(moves)
    for table in together._tables:
        table._num_programs = 2
    together.gather_(row)
    slow_gather_(reference, row.cpu())
    assert_same_memory(moves, reference)


def test_scatter_inverts_gather(device):
    moves, row = example(0, device)
    together = Moves(moves)
    before, _ = example(0, device)
    together.gather_(row)
    gathered = [move.narrow.clone() for move in moves]
    together.scatter_(row)
    assert_same_memory(moves, [Move(b.dense, m.narrow, m.starts) for b, m in zip(before, moves, strict=True)])
    for move in moves:
        move.dense.zero_()
    together.scatter_(row)
    for move in moves:
        move.narrow.fill_(1)
    together.gather_(row)
    for move, narrow in zip(moves, gathered, strict=True):
        assert_same(move.narrow, narrow)


def test_all_positions_may_be_padding(device):
    moves, row = example(0, device)
    before, _ = example(0, device)
    cut = [number for number, move in enumerate(moves) if move.starts]
    row.fill_(PADDING)
    Moves([moves[number] for number in cut]).scatter_(row)
    assert_same_memory(moves, before)
    Moves(moves).gather_(row)
    assert not any(moves[number].narrow.any() for number in cut)
    for move in moves:
        if not move.starts:
            assert_same(move.narrow, move.dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_real_positions_are_gathered_from_ones(dtype, device):
    moves, row = example(0, device)
    one = torch.ones((), dtype=dtype, device=device)
    real = [torch.empty(move.narrow.shape, dtype=dtype, device=device).fill_(7) for move in moves]
    wanted = [Move(one.expand(m.dense.shape), narrow, m.starts) for m, narrow in zip(moves, real, strict=True)]
    Moves(wanted).gather_(row)
    for move in wanted:
        expected = [there is not None for _, there in pairs(move, row)]
        assert move.narrow.flatten().tolist() == expected


def test_a_dense_tensor_may_repeat_itself_along_some_dimensions(device):
    dense = torch.arange(6.0, device=device).view(3, 1, 2).expand(3, 4, 2)
    narrow = torch.full((2, 4, 2), 9.0, device=device)
    Moves([Move(dense, narrow, {0: 1})]).gather_(torch.tensor([5, 2, PADDING], dtype=torch.int32, device=device))
    assert narrow.tolist() == [[[4, 5]] * 4, [[0, 0]] * 4]


def test_tensors_of_one_number_and_of_none(device):
    dense, narrow = (torch.tensor(value, device=device) for value in (5.0, 0.0))
    vector, nothing = torch.arange(3.0, device=device), torch.zeros(0, device=device)
    moves = Moves([Move(dense, narrow, {}), Move(vector, nothing, {0: 0}), Move(nothing, nothing.clone(), {})])
    no_row = torch.zeros(0, dtype=torch.int32, device=device)
    moves.gather_(no_row)
    assert (dense.item(), narrow.item()) == (5, 5)
    narrow.fill_(6)
    moves.scatter_(no_row)
    assert (dense.item(), narrow.item(), vector.tolist()) == (6, 6, [0, 1, 2])
    for none in ([], [Move(vector, nothing, {0: 0})]):
        Moves(none).gather_(no_row)
        Moves(none).scatter_(no_row)
    assert vector.tolist() == [0, 1, 2]


def test_parameters_move_past_autograd(device):
    dense = nn.Parameter(torch.arange(4.0, device=device))
    narrow = nn.Parameter(torch.ones(2, device=device))
    moves, row = Moves([Move(dense, narrow, {0: 0})]), torch.tensor([3, PADDING], dtype=torch.int32, device=device)
    moves.gather_(row)
    assert narrow.tolist() == [3, 0]
    narrow.square().sum().backward()
    assert narrow.grad.tolist() == [6, 0]
    with torch.no_grad():
        narrow.add_(4)
    moves.scatter_(row)
    assert dense.tolist() == [0, 1, 2, 7]
    assert narrow.grad_fn is None
    assert dense.grad_fn is None


def test_examples_have_what_can_go_wrong():
    moves, row = example(0)
    counts = [move.narrow.numel() for move in moves]
    assert max(counts) > 2 * BLOCK
    assert 0 in counts
    assert len({move.dense.dtype for move in moves}) == 5
    found = [{there is None for _, there in pairs(move, row)} for move in moves]
    assert {True, False} in found  # some padding
    assert {True} in found  # nothing but padding
    assert any(1 in move.narrow.shape for move in moves)
    assert not all(move.dense.is_contiguous() for move in moves)


# --- dims: the kernel walks along them, plain torch does without -----------------------------------------------------


def test_dims_lead_to_the_same_elements():
    moves, row = example(0)

    def offset(index, tensor):
        return None if index is None else sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))

    for kind, move in zip(KINDS, moves, strict=True):
        expected = {offset(here, move.narrow): offset(there, move.dense) for here, there in pairs(move, row)}
        for element in range(move.narrow.numel()):
            rest, index, strides = element, [], []
            for size, stride, start in reversed(move.dims()):
                rest, coordinate = divmod(rest, size)
                index.append(coordinate if start < 0 else int(row[start + coordinate]))
                strides.append(stride)
            found = None if PADDING in index else sum(i * stride for i, stride in zip(index, strides, strict=True))
            assert (rest, found) == (0, expected[element]), kind


CONVOLUTION = torch.empty(6, 5, 3, 3)
MATRIX = torch.empty(3, 4)


@pytest.mark.parametrize(
    ("dense", "narrow", "starts", "dims"),
    [
        (CONVOLUTION, torch.empty(4, 2, 3, 3), {0: 8, 1: 0}, [(4, 45, 8), (2, 9, 0), (9, 1, -1)]),
        (CONVOLUTION, torch.empty(6, 2, 3, 3), {1: 0}, [(6, 45, -1), (2, 9, 0), (9, 1, -1)]),
        (CONVOLUTION, torch.empty(4, 5, 3, 3), {0: 8}, [(4, 45, 8), (45, 1, -1)]),
        (
            CONVOLUTION.contiguous(memory_format=torch.channels_last),
            torch.empty(4, 2, 3, 3).contiguous(memory_format=torch.channels_last),
            {0: 8, 1: 0},
            [(4, 45, 8), (9, 5, -1), (2, 1, 0)],
        ),
        (MATRIX, torch.empty(3, 4), {}, [(12, 1, -1)]),
        (MATRIX.T, torch.empty(4, 3), {}, [(4, 1, -1), (3, 4, -1)]),  # neighbours in the narrow one only
        (MATRIX.T, torch.empty(3, 4).T, {}, [(12, 1, -1)]),
        (MATRIX[:, :3], torch.empty(3, 3), {}, [(3, 4, -1), (3, 1, -1)]),
        (torch.ones(()).expand(3, 4), torch.empty(3, 4), {}, [(12, 0, -1)]),
        (MATRIX[:, None], torch.empty(3, 1, 4), {}, [(12, 1, -1)]),  # one element needs no dimension
        (MATRIX, torch.empty(1, 4), {0: 2}, [(1, 4, 2), (4, 1, -1)]),  # unless positions say which one
        (torch.ones(()), torch.ones(()), {}, []),
    ],
)
def test_adjacent_dimensions_are_merged(dense, narrow, starts, dims):
    assert Move(dense, narrow, starts).dims() == dims


# --- errors of moves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("narrow", "found"),
    [
        (torch.empty(3, 4).double(), "`narrow` torch.float64 with 2 on cpu"),
        (torch.empty(3, 4, 1), "`narrow` torch.float32 with 3 on cpu"),
        (torch.empty(3, 4, device="meta"), "`narrow` torch.float32 with 2 on meta"),
    ],
)
def test_tensors_of_two_kinds_are_refused(narrow, found):
    with pytest.raises(
        ValueError, match=rf"`dense` is torch.float32 with 2 dimensions on cpu, {found}; .* of one kind"
    ):
        Move(MATRIX, narrow, {})


def test_a_size_that_differs_where_nothing_is_cut_is_refused():
    with pytest.raises(ValueError, match="dimension 1 of `dense` is 4 and of `narrow` 2; only narrowed ones may"):
        Move(MATRIX, torch.empty(2, 2), {0: 0})


@pytest.mark.parametrize(
    "narrow", [torch.empty(3, 8)[:, ::2], torch.empty(1, 4).expand(3, 4), torch.empty(4, 4)[:, :3].T]
)
def test_a_narrow_tensor_with_gaps_is_refused(narrow):
    shape, strides = tuple(narrow.shape), narrow.stride()
    found = re.escape(f"`narrow` of shape {shape} has strides {strides}, with gaps")
    with pytest.raises(ValueError, match=found):
        Move(torch.empty(shape), narrow, {})


def test_a_tensor_of_too_many_elements_is_refused(monkeypatch):
    monkeypatch.setattr("slimstart.kernels.moves.use_triton", lambda tensor: True)
    many = torch.empty(2**31 - BLOCK + 1, dtype=torch.int8, device="meta")
    with pytest.raises(
        ValueError, match=rf"`narrow` has {many.numel()} elements; one tensor can have 2\^31 - {BLOCK} at"
    ):
        Moves([Move(many, many, {})])


# --- channels --------------------------------------------------------------------------------------------------------

CHANNELS = [
    ((3, 6, 5, 2), -3),
    ((5, 4, 37), -1),
    ((7, 9), -2),
    ((2, 3, 2, 3, 2), -4),
    ((2, 1, 3, 3), -3),
    ((3, 6, 5, 2), -1),
    ((1, 1200), -1),
]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_example(shape, dim, dtype, channels_last=True, index_dtype=torch.int32, capacity=3, device="cpu"):
    """x, and an index that takes about half of its channels, with some padding."""
    width = shape[dim]
    kept = torch.randperm(width)[: max(1, width // 2)]
    taken = torch.randperm(len(kept) + capacity)[: len(kept)]
    index = torch.full((len(kept) + capacity,), PADDING, dtype=index_dtype)
    inverse = torch.full((width,), PADDING, dtype=index_dtype)
    index[taken], inverse[kept] = kept.to(index_dtype), taken.to(index_dtype)
    memory = FORMATS[len(shape)] if channels_last and len(shape) in FORMATS else torch.contiguous_format
    # With one channel, torch calls a tensor channels-last only if it was made so.
    x = torch.empty(shape, dtype=dtype, device=device, memory_format=memory).copy_(torch.randn(shape))
    return x.requires_grad_(), index.to(device), inverse.to(device)


def slow_take(x, index, dim):
    """Channel by channel."""
    slices = [torch.zeros_like(x.select(dim, 0)) if i == PADDING else x.select(dim, i) for i in index.tolist()]
    return torch.stack(slices, dim)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), CHANNELS)
def test_channels_and_their_gradients_equal_slices(shape, dim, dtype, channels_last, device):
    x, index, inverse = channels_example(shape, dim, dtype, channels_last, device=device)
    y = take_channels(x, index, inverse, dim)
    expected = slow_take(x, index, dim)
    assert y.dtype == dtype
    assert_same(y, expected)
    grad = torch.randn(y.shape, device=device).to(dtype)
    (ours,) = torch.autograd.grad(y, x, grad)
    (reference,) = torch.autograd.grad(expected, x, grad)
    assert_same(ours, reference)
    if channels_last and len(shape) in FORMATS:
        assert y.is_contiguous(memory_format=FORMATS[len(shape)])
        assert y.stride(1) == 1
    else:
        assert y.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "dim", "channels_last"), [((3, 6, 5, 2), -3, True), ((3, 6, 5, 2), -3, False), ((5, 4, 37), -1, False)]
)
def test_a_relu_may_write_over_the_channels(shape, dim, channels_last, device):
    x, index, inverse = channels_example(shape, dim, torch.float32, channels_last, device=device)
    y = nn.ReLU(inplace=True)(take_channels(x, index, inverse, dim))
    expected = slow_take(x, index, dim).relu()
    assert_same(y, expected)
    assert expected.count_nonzero() < slow_take(x, index, dim).count_nonzero()
    grad = torch.randn(y.shape, device=device)
    ours, reference = (torch.autograd.grad(out, x, grad)[0] for out in (y, expected))
    assert_same(ours, reference)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_channels_of_views_and_of_many_rows(index_dtype, device):
    x, index, inverse = channels_example((5, 20, 11, 13), -3, torch.float32, index_dtype=index_dtype, device=device)
    assert_same(take_channels(x, index, inverse, -3), slow_take(x, index, -3))
    part = x[::2, :, 1:]
    assert_same(take_channels(part, index, inverse, -3), slow_take(part, index, -3))
    expanded = x[:1].expand(4, -1, -1, -1)
    assert_same(take_channels(expanded, index, inverse, -3), slow_take(expanded, index, -3))
    take_channels(x, index, inverse, -3).sum().backward()  # an expanded gradient
    kept = (inverse >= 0).to(x.dtype).view(-1, 1, 1)
    assert_same(x.grad, kept.expand_as(x))


def test_nan_in_padding_is_cleared():
    x = torch.full((2, 3, 2, 2), torch.nan)
    index, inverse = torch.tensor([PADDING, 1]), torch.tensor([PADDING, 1, PADDING])
    y = take_channels(x, index, inverse, -3)
    assert not y[:, 0].any()
    assert y[:, 1].isnan().all()


def test_no_channels_and_no_images():
    nothing = torch.zeros(0, dtype=torch.int32)
    x = torch.randn(2, 3, 4, 4)
    assert take_channels(x, nothing, torch.full((3,), PADDING), -3).shape == (2, 0, 4, 4)
    assert take_channels(x[:0], torch.tensor([2, 0]), torch.tensor([1, PADDING, 0]), -3).shape == (0, 2, 4, 4)


class Asks(TorchDispatchMode):
    """Operations that make the host wait for a device, or whose result has a size that only the device knows."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += [name for name in self.ASKING if func.__name__.startswith(name)]
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter reads everything")
def test_nothing_is_read_from_the_device():
    x, index, inverse = channels_example((2, 6, 3, 3), -3, torch.float32)
    with Asks() as asks:
        take_channels(x, index, inverse, -3).sum().backward()
    assert not asks.found


@pytest.mark.skipif(INTERPRETED, reason="too slow there")
@pytest.mark.parametrize(("shape", "dim"), [CHANNELS[0], CHANNELS[2], CHANNELS[3]])
def test_gradients_of_channels_are_those_of_finite_differences(shape, dim):
    x, index, inverse = channels_example(shape, dim, torch.float64)
    assert torch.autograd.gradcheck(lambda x: take_channels(x, index, inverse, dim), (x,))


def test_autocast_keeps_the_type_of_channels():
    x, index, inverse = channels_example((2, 6, 3, 3), -3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert take_channels(x, index, inverse, -3).dtype == torch.float32
        assert take_channels(x.bfloat16(), index, inverse, -3).dtype == torch.bfloat16


@pytest.mark.skipif(INTERPRETED, reason="the compiler has its own kernels")
@pytest.mark.slow
def test_channels_compile_as_one_graph():
    x, index, inverse = channels_example((2, 6, 3, 3), -3, torch.float32)
    compiled = torch.compile(take_channels, backend="aot_eager", fullgraph=True)
    y = compiled(x, index, inverse, -3)
    assert_same(y, slow_take(x, index, -3))
    y.square().sum().backward()
    kept = (inverse >= 0).to(x.dtype).view(-1, 1, 1)
    assert_same(x.grad, 2 * x.detach() * kept)


@pytest.mark.parametrize("dim", [0, 1, -5])
def test_a_dimension_counted_from_the_front_is_refused(dim):
    x, index, inverse = channels_example((2, 6, 3, 3), -3, torch.float32)
    with pytest.raises(ValueError, match=rf"`dim` is {dim}; it must be from -4 to -1 for `x` of shape \(2, 6, 3, 3\)"):
        take_channels(x, index, inverse, dim)


def test_indices_of_other_widths_are_refused():
    x, index, inverse = channels_example((2, 6, 3, 3), -3, torch.float32)
    with pytest.raises(ValueError, match=r"`index` has shape \(6,\) and `inverse` \(5,\); .* the 6 channels of `x`"):
        take_channels(x, index, inverse[:5], -3)
    with pytest.raises(ValueError, match=r"`index` has shape \(1, 6\) and `inverse` \(6,\)"):
        take_channels(x, index[None], inverse, -3)


# --- who does it -----------------------------------------------------------------------------------------------------


def test_a_cpu_uses_triton_only_to_interpret_it():
    assert use_triton(torch.zeros(1)) == INTERPRETED


@pytest.mark.skipif(torch.cuda.is_available(), reason="there Triton works")
def test_without_triton_torch_is_used_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert not backend._builds_for.__wrapped__(torch.device("cuda", 0))
    assert "Triton compiles no kernels for cuda:0, so plain torch is used" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the inner one")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_agree_in_the_interpreter():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    inner = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert inner.returncode == 0, inner.stdout + inner.stderr
    assert " passed" in inner.stdout


def test_rows_that_are_too_short_are_refused():
    moves = Moves([Move(torch.ones(4), torch.zeros(3), {0: 2})])
    for row in (torch.zeros(4, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)[::2]):
        for move in (moves.gather_, moves.scatter_):
            with pytest.raises(ValueError, match=r"`row` has shape .*; these moves need 5 positions in a row"):
                move(row)
