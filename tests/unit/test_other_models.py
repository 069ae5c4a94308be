"""The sweep over models of other libraries, on small networks of our own."""

from functools import partial

import pytest
import torch
import zoo
from torch import nn
from zoo_models import MODELS, Entry

import slimstart
from tests.zoo import ZOO, attention


def entry(name, attends=True):
    return Entry("ours", name, attends, ZOO[name].factory, ZOO[name].example_inputs)


def test_all_models_have_names_of_their_own():
    assert len(MODELS) == len({one.name for one in MODELS}) == 117


@pytest.mark.parametrize(
    ("network", "layers", "fewer"),
    [
        (attention.InputWidth, 1, 1),
        (partial(attention.InputWidth, heads=1), 0, 0),  # one head is as few as there can be
        (attention.BucketEmbedding, 2, 2),
    ],
)
def test_heads_of_the_narrowest_network_are_counted(network, layers, fewer):
    model, x = attention.Residual(network), torch.randn(2, 6, 5)
    found = zoo.heads(model, slimstart.trace(model, x), x)
    assert (found["attention_layers"], found["with_fewer_heads"]) == (layers, fewer)


def test_heads_that_must_remain_have_a_reason():
    model, x = attention.Residual(attention.InputWidth), torch.randn(2, 6, 5)
    found = zoo.heads(model, slimstart.trace(model, x, keep=["attention.qkv"]), x)
    assert (found["attention_layers"], found["with_fewer_heads"]) == (1, 0)


def test_a_model_is_tried_in_a_process_of_its_own():
    row = zoo.in_a_process(zoo.tried, entry("indexed_qkv"), zoo.Limits(60, 4))
    assert {key for key in row if key.endswith("error")} == {"verify_error"}
    assert row["verify_error"] < 1e-12
    assert row["trained"]
    assert 0.3 < row["flops_left"] <= 0.5
    assert row["coverage"] == 1.0


def loops(entry, tell):
    tell({"begun": True})
    while True:
        pass


def fails(entry, tell):
    raise ValueError("it cannot be built")


@pytest.mark.parametrize(
    ("work", "said"), [(loops, "ended after 1 seconds"), (fails, "ValueError: it cannot be built")]
)
def test_a_failure_does_not_stop_the_sweep(work, said):
    row = zoo.in_a_process(work, Entry("ours", "none", False, nn.Identity, list), zoo.Limits(1, 4))
    assert said in row[f"{work.__name__}_error"]
    assert ("begun" in row) == (work is loops)
