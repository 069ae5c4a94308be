"""Settings of `run_paper_steps.py`. Wrong values are refused all at once, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from paper_steps.records import STRUCTURES
from slimstart.errors import ConfigError
from slimstart.lab.recipes.recipe import Recipe, parse_budget


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        align: None leaves it to `SparseTraining`.
        compiled: None measures torch.compile on a GPU only.
    """

    budgets: tuple[str, ...]
    resample_every: tuple[int, ...] = (10,)
    structures: tuple[str, ...] = STRUCTURES
    keep_probs: str | None = None  # a run or a checkpoint, from which the structure "middle" is taken
    model: str = "vgg19"
    batch_size: int = 64
    image_size: int = 32
    num_classes: int = 10
    coupling: str = "filter"
    precision: str = "float32"
    align: int | None = None
    channels_last: bool = True
    compiled: bool | None = None
    rounds: int = 20
    seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))


def _problems(settings: Settings) -> Iterator[str]:
    named = {"budget": settings.budgets, "resample_every": settings.resample_every, "structure": settings.structures}
    for name, values in named.items():
        if not values:
            yield f"`{name}` is empty; give one value, or several with commas between them"
    for structure in set(settings.structures) - set(STRUCTURES):
        yield f"`structure` is {structure!r}; it must be one of {', '.join(STRUCTURES)}"
    # Settings that a recipe has, too, are checked by it.
    shared = ("batch_size", "coupling", "precision", "seed", *(("align",) if settings.align is not None else ()))
    checks: list[Callable[[], object]] = [
        lambda: Recipe(policy="paper", **{name: getattr(settings, name) for name in shared})
    ]
    checks += [partial(parse_budget, budget) for budget in settings.budgets]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    sizes = {"image_size": settings.image_size, "classes": settings.num_classes}
    for name, value in [*sizes.items(), *(("resample_every", every) for every in settings.resample_every)]:
        if value < 1:
            yield f"`{name}` is {value}; it must be at least 1"
    if settings.rounds < 2:
        yield f"`rounds` is {settings.rounds}; it must be at least 2, or there is no spread"
    if not settings.seconds > 0:
        yield f"`seconds` is {settings.seconds}; it must be positive"
    if settings.keep_probs is not None and "middle" not in settings.structures:
        yield "`keep_probs` is for the structure `middle`; add that to `structure`, or leave `keep_probs` out"
