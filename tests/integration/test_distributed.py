"""Training in several processes: bit-identical, equal to one process, and lost processes end the others in time."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slimstart
from examples import distributed_training
from slimstart.distributed import joined, synchronise_batch_norm
from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup, reporting
from slimstart.errors import ConfigError, DesynchronisedError, ProcessGroupError
from slimstart.lab import records
from slimstart.lab.cli import main
from slimstart.lab.data import Share, load
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.run.environment import Place
from slimstart.lab.run.make_method import make_method
from slimstart.lab.run.run_folder import Run
from tests import distributed_cases as cases
from tests.processes import on_ranks
from tests.stopped_runs import killed_processes

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
RECIPE = Recipe(
    model="tests.distributed_cases:mortal", budget="flops=0.4", epochs=2, batch_size=999, settle_at=0.5, num_masks=2
)


def far(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nests of tensors and numbers differ by more than 1e-10."""
    if isinstance(a, dict):
        return [path] if a.keys() != b.keys() else [found for k in a for found in far(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, list):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in far(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and a.is_floating_point():
        same = a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        return [] if same else [path]
    return [] if (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b) else [path]


def in_all(case: Callable[..., Any], *arguments: Any, size: int = 2, **settings: Any) -> list[Any]:
    """As `on_ranks`; no process may fail."""
    found = on_ranks(size, case, *arguments, **settings)
    assert not [one for one in found if one is None or isinstance(one, Exception)], found
    return found


# --- many processes are one ------------------------------------------------------------------------------------------


QUICK = ["batch norm, padded", "equal worth", "loaded", "by hand", "plain"]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in cases.CASES if name not in QUICK], marks=pytest.mark.slow)]
)
def test_two_processes_equal_one(names: list[str], differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.several, names)
    assert differences(first, second) == []
    for name, found in first.items():
        assert far(cases.CASES[name](SINGLE_PROCESS), found) == [], name


@pytest.mark.slow
def test_four_processes_equal_one(differences: Callable[[Any, Any], list[str]]) -> None:
    first, *others = in_all(cases.several, QUICK, size=4)
    for other in others:
        assert differences(first, other) == []
    for name, found in first.items():
        assert far(cases.CASES[name](SINGLE_PROCESS), found) == [], name


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 14), marks=pytest.mark.slow)])
def test_two_processes_follow_one_in_float32(seeds: range, differences: Callable[[Any, Any], list[str]]) -> None:
    """Units of nearly equal importance are ordered by rounding, so a few seeds may choose others: until then, alike."""
    first, second = in_all(cases.in_float32, seeds)
    assert differences(first, second) == []
    apart = []
    for name, (losses, structures) in cases.in_float32(SINGLE_PROCESS, seeds).items():
        found_losses, found_structures = first[name]
        same = [torch.equal(a["mask"], b["mask"]) for a, b in zip(structures, found_structures, strict=True)]
        steps = same.index(False) if False in same else len(same)
        assert found_losses[:steps] == pytest.approx(losses[:steps], rel=1e-5), name
        for a, b in zip(structures[:steps], found_structures[:steps], strict=True):
            torch.testing.assert_close(a["keep_probs"], b["keep_probs"], rtol=0, atol=1e-5)
        assert sum(not torch.equal(a["mask"], b["mask"]) for a, b in itertools.pairwise(structures)) >= 2, name
        apart += [name] if steps < len(same) else []
    assert len(apart) <= len(seeds) // 6, apart


@pytest.mark.slow
def test_a_wrapper_may_come_before_or_after_and_be_given_or_not(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.all_ways)
    assert differences(first, second) == []
    alone = {loop: cases.train_widths(SINGLE_PROCESS, "after", "module", loop) for loop in ("own loop", "step")}
    assert differences(alone["own loop"], alone["step"]) == []
    for order, given, loop in cases.WAYS:
        found = first[f"{order} {given} {loop}"]
        assert far(alone[loop], found) == [], (order, given, loop)
        assert found["settled"]
        changes = sum(a != b for a, b in itertools.pairwise(found["structures"]))
        assert changes >= 3


def test_layers_are_removed_in_all_processes(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.with_layers_removed)
    assert differences(first, second) == []
    for loop, found in cases.with_layers_removed(SINGLE_PROCESS).items():
        assert far(found, first[loop]) == []
        assert found["model"].keys().isdisjoint(("inner.weight", "last.weight"))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_wrapper_may_be_compiled(order: str, differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.compiled, order)
    assert differences(first, second) == []
    assert first["processes"] == 2
    assert first["compiled"] > 1
    assert far(cases.compiled(SINGLE_PROCESS, "alone")["dense"], first["dense"]) == []


def test_gradients_may_be_accumulated_without_exchange(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.accumulated)
    assert differences(first, second) == []
    alone = cases.accumulated(SINGLE_PROCESS)
    assert alone["changes"] == 5
    assert far(alone, first) == []


@pytest.mark.slow
def test_per_process_batch_norm_keeps_processes_equal(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.per_rank_batch_norm)
    assert differences(first, second) == []
    means = [stem.mean((0, 2, 3)) for stem in first["stems"]]
    assert torch.allclose(first["mean"], 0.1 * (means[0] + means[1]) / 2, rtol=1e-10)  # momentum 0.1, from zero
    first, second = in_all(cases.batch_norm_of_each)  # in the plain loop
    assert differences(first, second) == []
    assert [first[name]["changes"] for name in ("sync", "no sync")] == [4, 4]


@pytest.mark.parametrize("loop", ["own loop", "step"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_all_processes_start_with_the_weights_of_the_first(
    loop: str, order: str, differences: Callable[[Any, Any], list[str]]
) -> None:
    first, second = in_all(cases.other_seeds, loop, order)
    assert (differences(first["before"], second["before"]) == []) == (order == "before")
    assert differences(first["before"], first["after"]) == []
    assert differences(first["before"], second["after"]) == []  # also what is not in the network
    assert differences(first["narrow"], second["narrow"]) == []
    assert first["narrow"]["stem.weight"].shape < first["after"]["stem.weight"].shape


# --- options of the wrapper -------------------------------------------------------------------------------------


def steps_since_change(masks: list[Any]) -> list[int]:
    """At every step, how many there have been with this mask."""
    found: list[int] = []
    for number, mask in enumerate(masks):
        found.append(found[-1] + 1 if number and mask == masks[number - 1] else 0)
    return found


@pytest.mark.slow
def test_options_and_hooks_outlast_changes(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.all_options)
    assert differences(first, second) == []
    without = first["none"]
    for name, found in first.items():
        sizes = [[sum(sent) for sent in found["sent"]], found["said"]]
        assert sizes[0] == sizes[1], name  # the hook has seen the narrow gradient, and nothing else
        assert steps_since_change(found["masks"]).count(0) > 2, name
        said = {
            option for option, value in found["said of itself"].items() if value != without["said of itself"][option]
        }
        assert said == ({name} if name != "none" else set())
        assert name == "find_unused_parameters" or far(without["model"], found["model"]) == [], name
    dense = 8 * (9 * 8 + 8) + 2 * 8 * (9 * 8 * 8 + 8) + 8 * (8 * 4 + 4)  # eight bytes a number
    assert without["dense_bytes"] == dense
    assert max(without["said"]) < 0.5 * dense
    assert set(without["views"]) == {8}
    assert set(first["gradient_as_bucket_view"]["views"]) == {1}  # all gradients are in one bucket
    capped = first["bucket_cap_bytes"]  # its first step is always one bucket
    assert [len(sent) for sent in capped["sent"]] == [1 if n == 0 else 3 for n in steps_since_change(capped["masks"])]


@pytest.mark.slow
def test_hooks_of_pytorch_outlast_changes(differences: Callable[[Any, Any], list[str]]) -> None:
    first, second = in_all(cases.hooks_of_pytorch)
    assert differences(first, second) == []
    assert first["built in"]["seen"] == 14 * [True]
    since = steps_since_change(first["power"]["masks"])
    assert since.count(0) > 2
    assert first["power"]["seen"] == [steps >= 2 for steps in since]  # two plain steps after a change


def test_wrappers_that_cannot_follow_are_refused() -> None:
    """Before anything has changed; of a wrapper that comes after, at the first step."""
    instead = {
        "mixed_precision": "use torch.autocast",
        "delay_all_reduce_named_params": "leave it out",
        "join()": "give all processes the same number of batches",
    }
    told = "DistributedDataParallel with {} cannot follow a change of structure; {}"
    for found in in_all(cases.refused):
        assert found == {option: 2 * [told.format(option, way)] for option, way in instead.items()}


def test_a_late_wrapper_is_found_and_one_around_more_is_refused(
    differences: Callable[[Any, Any], list[str]],
) -> None:
    first, second = in_all(cases.wrapped_late)
    assert differences(first, second) == []
    assert first["sizes"] == (1, 2)
    assert "no DistributedDataParallel around the model itself" in first["error"]


# --- batch norm over processes -------------------------------------------------------------------------------------


def test_synchronised_batch_norm_uses_the_whole_batch() -> None:
    alone = cases.batch_norm_layer(SINGLE_PROCESS)
    for found in on_ranks(2, cases.batch_norm_layer):
        assert far(alone, found) == []
    assert all("more than one value per channel" in error for error in on_ranks(2, cases.too_little))
    with pytest.raises(ValueError, match="`input` has 1 dimension"):
        synchronise_batch_norm(nn.BatchNorm1d(3))(torch.zeros(3))


def test_synchronised_batch_norm_is_traced_like_any_other() -> None:
    plain = cases.network("batch")
    parameters = list(plain.parameters())
    graph = slimstart.trace(plain, cases.EXAMPLE)
    together = synchronise_batch_norm(plain)
    assert [a is b for a, b in zip(parameters, together.parameters(), strict=True)] == [True] * len(parameters)
    assert slimstart.trace(together, cases.EXAMPLE).digest == graph.digest
    small = slimstart.compact(together, graph.select(torch.arange(graph.num_units) % 2 == 0))
    assert small.norm2.num_features == 4
    assert slimstart.recalibrate(small, [cases.batches(SINGLE_PROCESS)[0]], cases.cross_entropy) == 1


def test_the_structure_gradient_over_processes_is_exact() -> None:
    losses = torch.rand(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    s = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    chances = torch.stack([(1 - s[0]) * (1 - s[1]), (1 - s[0]) * s[1], s[0] * (1 - s[1]), s[0] * s[1]])
    (gradient,) = torch.autograd.grad(chances @ (3 * losses[0] + 5 * losses[1]) / 8, s)
    for found in in_all(cases.enumerated):
        assert torch.allclose(found, (s * (1 - s) * gradient).detach(), rtol=1e-12)  # H with alpha = 1


# --- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["equal_worth", "paper"])
def test_a_structure_change_that_fails_in_one_process_is_undone_in_all(
    policy: str, differences: Callable[[Any, Any], list[str]]
) -> None:
    first, second = in_all(cases.one_cannot_change, policy)
    assert first.pop("error") == (
        "ProcessGroupError: another process could not change its structure, so none did; look for its error"
    )
    assert second.pop("error") == "MemoryError: no room for the next structure"
    assert differences(first, second) == []
    assert differences(first["before"], first["after"]) == []
    assert first["end"]["shapes"] != first["after"]["shapes"]  # the next attempts have succeeded


def test_a_checkpoint_that_fits_in_one_process_only_is_loaded_in_none(
    differences: Callable[[Any, Any], list[str]],
) -> None:
    first, second = in_all(cases.one_cannot_load)
    assert first.pop("error").startswith("ProcessGroupError: another process could not change its structure")
    assert second.pop("error") == "CheckpointError: the state dict's masks do not fit the network"
    assert differences(first, second) == []
    assert differences(first["before"], first["after"]) == []
    assert differences(first["after"], first["end"]) != []


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("seed", "masks .*rank 1 .*at the start"),
        ("steps", "numbers of steps .*rank 1 .*at the start"),
        ("weight", "head.bias .*2 st"),
    ],
)
def test_differing_processes_are_detected(what: str, named: str) -> None:
    for found in on_ranks(2, cases.out_of_step, what):
        assert isinstance(found, DesynchronisedError)
        assert re.search(named, str(found)), found


def test_differing_processes_are_detected_with_the_dense_model_on_the_host() -> None:
    for found in on_ranks(2, cases.out_of_step_on_the_host):
        assert isinstance(found, DesynchronisedError)
        assert re.search("head.bias .*2 st", str(found)), found


def test_a_group_that_does_not_reach_the_host_is_refused() -> None:
    assert on_ranks(2, cases.out_of_reach, backend="cpu:gloo,cuda:gloo") == ["reached", "reached"]
    for found in on_ranks(2, cases.out_of_reach, backend="cuda:gloo"):
        assert isinstance(found, ConfigError), found
        assert re.match(r"the model is on cpu, .* is cuda:gloo\. .*'cpu:gloo,cuda:nccl'.*joined", str(found))


def test_the_program_joins_both_devices_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def init(backend: str, **_: Any) -> None:
        asked.append(backend)
        raise RuntimeError("enough seen")

    store = dist.HashStore()
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slimstart.distributed.launch.rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        with pytest.raises(RuntimeError, match="enough seen"), joined():
            pass
    assert asked == ["gloo", "cpu:gloo,cuda:nccl"]


def test_a_failure_of_rank_zero_is_raised_in_all_processes() -> None:
    assert on_ranks(2, cases.first_fails) == [("integer division or modulo by zero", rank) for rank in range(2)]


@pytest.mark.parametrize("loop", ["own loop", "step"])
def test_a_process_that_is_killed_ends_the_others(loop: str) -> None:
    *found, gone = on_ranks(3 if loop == "step" else 2, cases.lost, signal.SIGKILL, loop)
    assert gone is None
    for error, seconds in found:
        assert re.match("ProcessGroupError: another process has failed", error), error
        assert seconds < 10


@pytest.mark.slow
def test_a_process_that_does_not_answer_ends_the_others() -> None:
    (error, seconds), gone = on_ranks(2, cases.lost, signal.SIGSTOP, "step", timeout=4, patience=1.5)
    assert isinstance(gone, TimeoutError)
    assert re.match("ProcessGroupError: another process has failed", error), error
    assert 1.4 < seconds < 4


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(RuntimeError, match="mine") as caught, reporting():
        raise RuntimeError("mine")
    assert not isinstance(caught.value, ProcessGroupError)
    with pytest.raises(ProcessGroupError, match="another process has failed"), reporting():
        raise RuntimeError("[gloo/pair.cc] Connection closed by peer")


def test_a_destroyed_process_group_is_reported() -> None:
    class Group:
        pass

    with pytest.raises(ProcessGroupError, match="has been destroyed"):
        ProcessGroup(weakref.ref(Group())).group  # noqa: B018


# --- data ------------------------------------------------------------------------------------------------------------


def test_shares_make_up_the_batch() -> None:
    for length in (1, 4, 7, 8):
        parts = [list(range(10, 10 + length))[Share(rank, 4).of(0, length)] for rank in range(4)]
        assert [one for part in parts for one in part] == list(range(10, 10 + length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ConfigError, match="`rank` is 4"):
        Share(4, 4)


# --- the program -----------------------------------------------------------------------------------------------------


def outcome(record: records.Record) -> dict[str, Any]:
    found = dataclasses.asdict(record)
    for epoch in found["history"]:
        del epoch["seconds"], epoch["images_per_second"]
    for name in ("name", "started", "finished", "train_seconds", "peak_memory_bytes", "command"):
        del found[name]
    return found


def torchrun(size: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*command, *arguments], env=settings, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_run_resumes_after_a_process_was_killed(tmp_path: Path, differences: Callable[[Any, Any], list[str]]) -> None:
    error, gone = on_ranks(2, cases.killed_program, tmp_path / "killed", RECIPE)
    assert isinstance(error, ProcessGroupError)
    assert gone is None
    assert [path.stem for path in Run(tmp_path / "killed").checkpoints()] == ["step-000000004", "step-000000003"]
    for folder in ("killed", "whole"):
        found, again = on_ranks(2, cases.program, tmp_path / folder, RECIPE)
        assert found == again == records.read(tmp_path / folder)
    whole = records.read(tmp_path / "whole")
    assert differences(outcome(records.read(tmp_path / "killed")), outcome(whole)) == []
    assert Run(tmp_path / "killed").network.read_bytes() == Run(tmp_path / "whole").network.read_bytes()
    assert (whole.ranks, whole.batch_norm) == (2, "synchronised")
    assert whole.dense_gradient_bytes == 4 * whole.dense_params
    assert whole.gradient_bytes is not None
    assert whole.gradient_bytes < 0.7 * whole.dense_gradient_bytes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_a_run_resumes_after_a_process_was_killed_anywhere(policy: str, tmp_path: Path) -> None:
    """SLIMSTART_KILLS is the number of kills, 4 by default; releases are tested with 50."""
    for outcome in killed_processes(policy, int(os.environ.get("SLIMSTART_KILLS", "4")) // 2, tmp_path):
        assert outcome.is_stopped
        assert outcome.faults == []


@pytest.mark.slow
def test_torchrun_resumes_after_a_process_is_killed(
    tmp_path: Path, differences: Callable[[Any, Any], list[str]]
) -> None:
    settings = {"model": RECIPE.model, "budget": "flops=0.4", "epochs": "2", "batch-size": "999", "settle-at": "0.5"}
    settings |= {"num-masks": "2", "device": "cpu", "checkpoint-seconds": "0"}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    folder = tmp_path / "killed"
    module = ["--max-restarts", "1", "-m", "slimstart", "train", "--out", str(folder)]
    done = torchrun(2, *module, *options, **cases.killing(folder))
    assert done.returncode == 0, done.stderr
    assert "another process has failed" in done.stderr  # by the one that was not killed
    assert "going on in epoch 1, after 4 of its batches" in done.stdout
    assert done.stdout.count("epoch 1/2") == done.stdout.count("epoch 2/2") == 1
    on_ranks(2, cases.program, tmp_path / "whole", RECIPE)
    assert differences(*(outcome(records.read(tmp_path / name)) for name in ("killed", "whole"))) == []


def test_the_program_gives_equal_results_in_two_processes_and_one(tmp_path: Path) -> None:
    recipe = merged(RECIPE, {"model": "tests.distributed_cases:without_dropout", "epochs": 1, "settle_at": 1.0})
    for method in ("slimstart", "uniform"):
        chosen = merged(recipe, {"method": method})
        one = cases.program(SINGLE_PROCESS, tmp_path / f"{method}-1", chosen)
        two, _ = on_ranks(2, cases.program, tmp_path / f"{method}-2", chosen)
        assert isinstance(two, records.Record), two
        assert (two.ranks, one.ranks) == (2, None)
        assert (two.flops, two.train_flops, two.layers) == (one.flops, one.train_flops, one.layers)
        assert two.test_loss == pytest.approx(one.test_loss, rel=1e-3)  # in float32
        assert [e.train_loss for e in two.history] == pytest.approx([e.train_loss for e in one.history], rel=1e-4)
        assert json.loads((tmp_path / f"{method}-2" / "record.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("align", [1, 4])
def test_a_dense_model_on_the_host_changes_nothing_on_two_processes(
    tmp_path: Path, align: int, differences: Callable[[Any, Any], list[str]]
) -> None:
    recipe = merged(RECIPE, {"model": "tests.distributed_cases:without_dropout", "align": align})
    together, _ = on_ranks(2, cases.program, tmp_path / "together", recipe)
    apart, _ = on_ranks(2, cases.program, tmp_path / "apart", merged(recipe, {"full_model_device": "cpu"}))
    assert apart.config["full_model_device"] == "cpu"
    other = {"config": together.config, "config_hash": together.config_hash}
    assert differences(outcome(together), outcome(apart) | other) == []
    assert Run(tmp_path / "apart").network.read_bytes() == Run(tmp_path / "together").network.read_bytes()


@pytest.mark.slow
def test_the_example_runs_in_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny = ["--epochs", "1", "--batch-size", "500", "--width", "0.25", "--budget", "0.3"]
    distributed_training.main([*tiny, "--save", str(tmp_path / "training.pt")])
    sent, accuracy = map(float, re.findall(r"gradients are (\d+)%.*\nfinished: (\S+) %", capsys.readouterr().out)[0])
    assert sent < 60
    assert 0 < accuracy < 100
    assert (tmp_path / "training.pt").exists()


@pytest.mark.slow
def test_the_example_gives_equal_results_in_two_processes() -> None:
    tiny = ["--epochs", "1", "--batch-size", "500", "--width", "0.25", "--budget", "0.3"]
    both = [torchrun(size, str(ROOT / "examples" / "distributed_training.py"), *tiny) for size in (1, 2)]
    assert [done.returncode for done in both] == [0, 0], both[1].stderr
    one, two = (float(re.findall(r"loss (\S+),", done.stdout)[0]) for done in both)
    assert two == pytest.approx(one, abs=0.01)


def test_several_processes_need_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["slimstart", "train", "--epochs", "1"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "several processes need --out" in capsys.readouterr().err


def test_commands_for_one_process_are_refused_in_several() -> None:
    with pytest.raises(ConfigError, match="`method` is l1, which trains in a single process"):
        make_method(merged(RECIPE, {"method": "l1"}), nn.Identity(), torch.zeros(1), 1, wrap=lambda net: net)
    with pytest.raises(ConfigError, match="`batch_norm` is 'none'"):
        Place(batch_norm="none")
    with pytest.raises(ConfigError, match="`timeout` is 0"), joined(0):
        pass
    with pytest.raises(ConfigError, match="each of 2 processes"):
        load("fashion", batch_size=1, share=Share(1, 2))
    with joined() as ranks:
        assert ranks is SINGLE_PROCESS
