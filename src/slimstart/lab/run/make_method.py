"""The training method that a recipe names, as an object with the protocol of `method.py`.

`Fixed` trains a network whose structure does not change, `Search` learns it, `Pruned` trains the dense network and
cuts it, `Relaxed` trains the dense network with gates that learn by the chain rule. Each keeps its own ledger of the
FLOPs that it executes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from slimstart.errors import ConfigError
from slimstart.graph import trace
from slimstart.lab.methods import PRUNERS, RELAXATIONS, front_heavy, random_mask, uniform, wide_sibling
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.fixed import Fixed
from slimstart.lab.run.method import Batch, Loss, Method, Wrap, make_optimizer
from slimstart.lab.run.pruned import Pruned
from slimstart.lab.run.relaxed import Relaxed
from slimstart.lab.run.search import Search
from slimstart.narrow import compact, compact_fresh
from slimstart.policies.widths import ALIGN

__all__ = ["Batch", "Fixed", "Loss", "Method", "Pruned", "Relaxed", "Search", "make_method", "make_optimizer"]


def make_method(
    recipe: Recipe,
    model: nn.Module,
    example: Tensor,
    steps_per_epoch: int,
    engine: str = "auto",
    wrap: Wrap | None = None,
    make_sibling: Callable[[float], nn.Module] | None = None,
) -> Method:
    """The method that a recipe names, around a freshly initialised dense model.

    Args:
        example: one image, as a batch.
        engine: as for `SparseTraining`.
        wrap: as for `Stage`.
        make_sibling: builds the network of the method shallow, from a factor on its widths.

    Raises:
        ConfigError: `wrap` is given, but the method trains several networks, or gates in addition to a network.
    """
    relaxed = recipe.method == "grow-efficient" or (recipe.method == "slimstart" and recipe.estimator in RELAXATIONS)
    if wrap is not None and (relaxed or recipe.method in PRUNERS):
        name = recipe.method if recipe.method != "slimstart" else f"slimstart with the estimator {recipe.estimator}"
        raise ConfigError(f"`method` is {name}, which trains in a single process; start it without torchrun")
    if relaxed:
        return Relaxed(recipe, model, example, steps_per_epoch, engine)
    if recipe.method == "slimstart":
        return Search(recipe, model, example, steps_per_epoch, engine, wrap)
    if recipe.method in PRUNERS:
        return Pruned(recipe, model, example, engine)
    graph = trace(model, example, coupling="stream")
    budget = recipe.parsed_budget
    if budget is None:
        network = compact(model, graph.select(torch.ones(graph.num_units, dtype=torch.bool)))
    elif recipe.method == "shallow":
        assert make_sibling is not None
        sibling, graph = wide_sibling(make_sibling, graph, budget, example)
        network = uniform(sibling, graph, budget, recipe.align or ALIGN)
    elif recipe.method == "random":
        mask = random_mask(graph, budget, torch.Generator().manual_seed(recipe.seed))
        network = compact_fresh(model, graph.select(mask))
    else:
        profile = front_heavy(graph) if recipe.protocol == "front_heavy" else None
        network = uniform(model, graph, budget, recipe.align or ALIGN, profile)
    return Fixed(recipe, graph, network, example, engine, wrap)
