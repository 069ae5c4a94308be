"""The kernels on a GPU: the tests of the CPU, then graphs and long tensors. Run by hand: pytest -m gpu."""

import pytest
import torch

from slimstart.kernels import Move, Moves, take_channels, use_triton
from tests.unit.test_kernels import (
    PADDING,
    assert_same,
    assert_same_memory,
    channels_example,
    example,
    memory_of,
    slow_gather_,
    slow_scatter_,
    slow_take,
    test_a_dense_tensor_may_repeat_itself_along_some_dimensions,  # noqa: F401  # here with the device below
    test_a_relu_may_write_over_the_channels,  # noqa: F401
    test_all_positions_may_be_padding,  # noqa: F401
    test_channels_and_their_gradients_equal_slices,  # noqa: F401
    test_channels_of_views_and_of_many_rows,  # noqa: F401
    test_moves_equal_a_loop,
    test_parameters_move_past_autograd,  # noqa: F401
    test_real_positions_are_gathered_from_ones,  # noqa: F401
    test_scatter_inverts_gather,  # noqa: F401
    test_tensors_of_one_number_and_of_none,  # noqa: F401
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device():
    return "cuda"


def capture(step):
    """A graph of `step`, which runs twice before, as it must, to build its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_triton_works_here():
    pytest.importorskip("triton")
    assert use_triton(torch.zeros(1, device="cuda"))


def onwards(moves):
    """From the narrow tensors of `moves` to other dense ones."""
    others, _ = example(9, moves[0].narrow.device)
    return [Move(other.dense, move.narrow, move.starts) for other, move in zip(others, moves, strict=True)]


def test_a_graph_of_moves_follows_the_positions():
    moves, positions = example(0, "cuda")
    back = onwards(moves)
    gather, scatter = Moves(moves), Moves(back)

    def step():
        gather.gather_(positions)
        scatter.scatter_(positions)

    graph = capture(step)
    for seed in range(1, 4):
        expected, new_positions = example(seed)
        expected_back = onwards(expected)
        positions.copy_(new_positions)
        for ours, its in zip(moves + back, expected + expected_back, strict=True):
            memory_of(ours.dense).copy_(memory_of(its.dense))
            memory_of(ours.narrow).copy_(memory_of(its.narrow))
        graph.replay()
        slow_gather_(expected, new_positions)
        slow_scatter_(expected_back, new_positions)
        assert_same_memory(moves, expected)
        assert_same_memory(back, expected_back)


@pytest.mark.parametrize("way", ["gather_", "scatter_"])
def test_plain_torch_moves_on_a_gpu_too(monkeypatch, way):
    monkeypatch.setattr("slimstart.kernels.moves.use_triton", lambda tensor: False)
    test_moves_equal_a_loop(0, way, "cuda")


def test_moves_beyond_32_bit_indices():
    dense = torch.empty((3, 2**30), dtype=torch.int8, device="cuda").random_()
    narrow = torch.zeros((1, 2**30), dtype=torch.int8, device="cuda")
    moves, positions = Moves([Move(dense, narrow, {0: 0})]), torch.tensor([2], dtype=torch.int32, device="cuda")
    moves.gather_(positions)
    assert torch.equal(narrow[0], dense[2])
    dense[2] = 0
    moves.scatter_(positions)
    assert torch.equal(narrow[0], dense[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_triton", [True, False])
def test_a_graph_of_channels_follows_the_index(monkeypatch, by_triton, dtype):
    if not by_triton:
        monkeypatch.setattr("slimstart.kernels.take_channels.use_triton", lambda tensor: False)
    x, index, inverse = channels_example((16, 40, 9, 9), -3, dtype, device="cuda")
    y, dx = torch.zeros(0), torch.zeros(0)
    grad = torch.randn(16, len(index), 9, 9, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)

    def step():
        nonlocal y, dx
        y = take_channels(x, index, inverse, -3)
        (dx,) = torch.autograd.grad(y, x, grad)

    graph = capture(step)
    for _ in range(3):
        new_x, new_index, new_inverse = channels_example((16, 40, 9, 9), -3, dtype)
        with torch.no_grad():
            x.copy_(new_x)
        index.copy_(new_index)
        inverse.copy_(new_inverse)
        graph.replay()
        expected = slow_take(new_x, new_index, -3)
        assert_same(y, expected)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert dx.is_contiguous(memory_format=torch.channels_last)
        assert_same(dx, torch.autograd.grad(expected, new_x, grad.cpu())[0])


@pytest.mark.parametrize("channels", [8, 24, 160, 640])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_of_whole_batches(channels, dtype, channels_last):
    x, index, inverse = channels_example((64, channels, 16, 16), -3, dtype, channels_last, capacity=2, device="cuda")
    y = take_channels(x, index, inverse, -3)
    expected = slow_take(x, index, -3)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, expected)))


def test_channels_beyond_32_bit_indices():
    rows = 2**31 // 100 + 1000
    x = torch.empty((rows, 100), dtype=torch.bfloat16, device="cuda")
    x.copy_(torch.arange(rows, device="cuda").remainder(251)[:, None])
    x += torch.tensor([0, 1] * 50, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(100, device="cuda").roll(1).int()  # odd and even change places
    index[7] = PADDING
    y = take_channels(x, index, torch.full((100,), PADDING, device="cuda"), -1)
    assert y.numel() > 2**31
    assert not y[:, 7].any()
    for i in (0, 1, 98, 99):
        assert torch.equal(y[:, i], x[:, index[i]])
