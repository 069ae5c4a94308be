"""Width profiles by hand, with equal FLOPs, trained like the uniform network.

    python benchmarks/profiles.py --variants uniform,front --data-dir DIR --device cuda --precision bfloat16 \
        --seeds 0 --out results/ablation/resnet32-profiles.json

Profiles with names are for CIFAR ResNets with a mask for each filter (coupling "filter"): a profile also says which
channels of a stream a block writes. For other networks, give one width for each group, with slashes between them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import variants
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, trace
from slimstart.lab.methods.shares import largest_share
from slimstart.narrow import compact_fresh
from slimstart.policies import BoundBudget, Budget


@dataclasses.dataclass(frozen=True)
class Profile:
    """Factors on the widths of a uniform CIFAR ResNet.

    Attributes:
        text: description for the table.
        inner: factor on filters within blocks.
        written: factor on filters that blocks add to the stream.
        span: width of the stream divided by that of the stem or the shortcut; blocks write to consecutive channels of
            it, and start again at the first. 0: all blocks write to the first channels.
        first: factor on all widths of the stem and the first stage.
        last: factor on all widths of the last stage.
        inner_first: factor on filters within blocks of the first stage.
        every_other: factor on filters within every second block.
    """

    text: str
    inner: float = 1.0
    written: float = 1.0
    span: float = 0.0
    first: float = 1.0
    last: float = 1.0
    inner_first: float = 1.0
    every_other: float = 1.0

    def width(self, name: str, size: int, share: float) -> float:
        """The width of the group of a layer; without factors, every width would be `share` of its size."""
        stage, block = _place(name)
        width = share * size * {0: self.first, 1: self.first, 3: self.last}.get(stage, 1.0)
        if "conv1" in name:
            width *= self.inner * (self.inner_first if stage == 1 else 1) * (self.every_other if block % 2 else 1)
        elif "conv2" in name:
            width *= self.written
        return width


PROFILES = {
    "uniform": Profile("the same fraction of every group"),
    "front": Profile("a wide first stage, a thin last one", first=1.4, last=0.75),
    "back": Profile("a thin first stage, a wide last one", first=0.75, last=1.25),
    "far_back": Profile("a thinner first stage, a wider last one", first=0.55, last=1.4),
    "wide_blocks": Profile("wide blocks on a thin stream", inner=1.5),
    "wide_streams": Profile("thin blocks on a wide stream, a wide last stage", inner=0.6, last=1.3),
    "no_first_stage": Profile("hardly any first stage, a wide last one", inner_first=0.2, last=1.3),
    "no_first_stage_wide_streams": Profile(
        "hardly any first stage, a wide last one, wide streams", inner_first=0.2, inner=0.7, last=1.4
    ),
    "every_other": Profile("every second block very thin", every_other=0.2),
    "half": Profile("all blocks write to the same half of the stream", written=0.5),
    "spread": Profile("blocks write to consecutive channels of a stream three times as wide", span=3),
    "spread_half": Profile("the same, with half of the written filters", span=3, written=0.5),
    "spread_third": Profile("the same, with a third of the written filters", span=3, written=0.35),
    "spread_fifth": Profile("the same, with a fifth of the written filters", span=3, written=0.2),
    "spread_back": Profile("spread, a thin first stage and a wide last one", span=3, first=0.75, last=1.25),
    "spread_third_front": Profile(
        "spread_third, a wide first stage and a thin last one", span=3, written=0.35, first=1.4, last=0.75
    ),
    "spread_third_every_other": Profile(
        "spread_third, every second block very thin", span=3, written=0.35, every_other=0.2
    ),
}


def _place(name: str) -> tuple[int, int]:
    """The stage of a layer, 0 for the stem, and the block within it."""
    found = re.match(r"stage(\d)\.(\d+)", name)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def mask_of(profile: Profile, graph: ChannelGraph, budget: Budget) -> Tensor:
    """The largest mask of a profile within a budget; what rounding leaves of it goes to groups from front to back."""
    bound: BoundBudget = budget.bind(graph.costs)

    def mask(share: float, wider: frozenset[str] = frozenset()) -> Tensor:
        kept, next_place = torch.zeros(graph.num_units, dtype=torch.bool), dict[int, int]()
        for group in graph.groups:
            size, stage = len(group.units), max(1, _place(group.name)[0])
            width = max(1, min(size, round(profile.width(group.name, size, share)) + (group.name in wider)))
            around, start = size, 0
            if profile.span and "conv2" in group.name:
                alone = profile.width("stem" if stage == 1 else f"stage{stage}.0.shortcut", size, share)
                around = max(width, min(size, round(profile.span * alone)))
                start = next_place.get(stage, round(alone)) % around
                next_place[stage] = start + width
            kept[group.units.start + (start + torch.arange(width)) % around] = True
        return kept

    share = largest_share(bound, mask)
    wider: frozenset[str] = frozenset()
    for group in graph.groups:
        if bound.cost(mask(share, wider | {group.name})) <= bound.limit:
            wider |= {group.name}
    return mask(share, wider)


def mask_of_widths(widths: list[int], graph: ChannelGraph) -> Tensor:
    """The first units of every group."""
    kept = torch.zeros(graph.num_units, dtype=torch.bool)
    for group, width in zip(graph.groups, widths, strict=True):
        kept[group.units.start : group.units.start + width] = True
    return kept


def change_of(name: str) -> variants.Change:
    """A profile by its name, or widths with slashes."""
    widths = [int(width) for width in name.split("/")] if "/" in name else None

    def uniform(model: nn.Module, graph: ChannelGraph, budget: Budget, *_: Any) -> nn.Module:
        mask = mask_of_widths(widths, graph) if widths else mask_of(PROFILES[name], graph, budget)
        return compact_fresh(model, graph.select(mask))

    def by_filter(model: nn.Module, example: Tensor, coupling: str) -> ChannelGraph:
        return trace(model, example, coupling="filter")

    pieces = {"slimstart.lab.run.make_method.uniform": uniform, "slimstart.lab.run.make_method.trace": by_filter}
    return variants.Change("the width of each group" if widths else PROFILES[name].text, {"method": "uniform"}, pieces)


if __name__ == "__main__":
    about = f"of {', '.join(PROFILES)}, or widths with slashes; with commas"
    variants.main("profiles", __doc__, change_of, ",".join(PROFILES), about, model="resnet32")
