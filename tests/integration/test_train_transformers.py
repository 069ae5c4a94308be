"""The GPT and the ViT of `benchmarks/train_transformers.py`, with few steps."""

import sysconfig
from pathlib import Path

import pytest
import torch
import train_transformers as script

TINY = ["--device", "cpu", "--dim", "64", "--rounds", "1", "--budget", "0.1"]
GPT = [*TINY, "--task", "gpt", "--length", "16", "--batch", "4", "--megabytes", "1"]


def test_text_to_validate_on_is_not_trained_on() -> None:
    train, validation = (part.numpy().tobytes() for part in script.standard_library(2**20))
    assert 2**20 <= len(train) < 2**21
    first, second = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:2]
    assert first.read_bytes() in validation
    assert first.read_bytes() not in train
    assert second.read_bytes() in train


@pytest.mark.parametrize("method", [["slimstart"], ["uniform", "--layers", "3"]])
def test_a_gpt_is_trained_within_its_budget(method: list[str]) -> None:
    row = script.main([*GPT, "--method", *method, "--steps", "2"])
    assert 0.09 < row["flops"] <= 0.1
    assert len(row["heads"]) == (3 if "uniform" in method else 2)  # by the rule, 8 * 0.1 ** 0.6 = 2.0
    assert max(row["hidden"]) - min(row["hidden"]) <= 16  # equal shares, but for rounding: two steps teach nothing


@pytest.mark.slow
def test_a_vit_is_trained_without_some_of_its_layers() -> None:
    options = ["--data", "fashion", "--batch", "50", "--steps", "40", "--depth", "0.1"]
    row = script.main([*TINY, "--task", "vit", *options])
    assert 0.09 < row["flops"] <= 0.1
    assert len(row["heads"]) < script.LAYERS["vit"]
    assert len(set(row["hidden"])) > 1
    assert row["accuracy"] > 15  # of ten classes


def test_a_network_built_directly_has_the_sizes_of_a_finished_one() -> None:
    network = script.Transformer("gpt", 32, [1, 2], [40, 24], 256, 16, 256)
    made = script.built_directly(network)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in network.named_parameters()}
    assert not torch.equal(made.positions, network.positions)
