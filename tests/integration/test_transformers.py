"""SlimmingCallback in trainings with Hugging Face's Trainer, and folders of narrow models."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import slimstart
from slimstart import EqualWorth, Flops, SparseTraining, flops
from slimstart.errors import CheckpointError
from slimstart.io.network_files import is_network

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from slimstart.integrations.transformers import SlimmingCallback, from_pretrained, save_pretrained  # noqa: E402
from tests.lines import stopped_at_every_line  # noqa: E402
from tests.transformers_cases import MODELS, SEARCHING, STEPS, Ordered, dataset, trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
Differences = Callable[[Any, Any], list[str]]


def example(kind: str = "bert") -> dict[str, Any]:
    rows = dataset(kind)[:2]
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


def ratio(model: Any, kind: str = "bert") -> float:
    return flops(model, example(kind)) / flops(MODELS[kind](), example(kind))


def weights(model: Any) -> dict[str, Any]:
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_trained_saved_and_read(kind: str, tmp_path: Path, differences: Differences) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    run = trainer(model, tmp_path, kind)
    run.train()
    assert run.state.global_step == STEPS
    assert ratio(model, kind) <= 0.7
    save_pretrained(model, tmp_path / "small")
    for read in (from_pretrained(tmp_path / "small"), from_pretrained(tmp_path / "small", type(model))):
        assert type(read) is type(model)
        assert differences(weights(read), weights(model)) == []
        inputs = example(kind)
        assert torch.equal(read(**inputs).logits, model.eval()(**inputs).logits)


def test_the_callback_does_what_the_loop_does(tmp_path: Path, differences: Differences) -> None:
    """With an optimizer of the user's own, which holds the narrow parameters."""

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = MODELS["bert"]()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = fresh()
    trainer(model, tmp_path, cls=Ordered, optimizers=(optimizer, None), max_grad_norm=0.0).train()
    by_hand, optimizer = fresh()
    sparse = SparseTraining(by_hand, optimizer, example(), Flops(0.7), total_steps=STEPS, policy=SEARCHING)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    rows = dataset("bert")
    for start in range(0, len(rows), 8):
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows[start : start + 8]]) for key in rows[0]}
        by_hand.train()
        optimizer.zero_grad()
        by_hand(**batch).loss.backward()
        optimizer.step()
        schedule.step()
    assert differences(weights(model), weights(sparse.finish())) == []


def test_a_uniform_structure_is_in_the_config(tmp_path: Path, differences: Differences) -> None:
    """Then transformers reads the folder by itself."""
    model = MODELS["bert"]()
    kept = [f"bert.encoder.layer.{i}.{part}" for i in (0, 1) for part in ("attention", "output")] + ["bert.pooler"]
    graph = slimstart.trace(model, example(), keep=kept)
    group = graph.costs.unit_group
    mask = torch.cat([torch.arange(n) < n // 2 for n in torch.bincount(group).tolist()])
    model = slimstart.compact(model, graph.select(mask))
    assert [layer.intermediate.dense.out_features for layer in model.bert.encoder.layer] == [32, 32]
    save_pretrained(model, tmp_path / "small")
    assert not is_network(tmp_path / "small" / "model.safetensors")
    read = type(model).from_pretrained(tmp_path / "small")
    assert read.config.intermediate_size == 32
    assert differences(weights(read), weights(model)) == []
    assert differences(weights(from_pretrained(tmp_path / "small")), weights(model)) == []


def test_widths_of_each_layer_are_in_the_config(tmp_path: Path, differences: Differences) -> None:
    """Gemma 3n takes a list."""
    size = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 32, "hidden_size_per_layer_input": 8}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "laurel_rank": 4, "altup_num_inputs": 2}
    layers = {"num_hidden_layers": 2, "intermediate_size": [64, 64], "layer_types": 2 * ["full_attention"]}
    layers |= {"activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**size, **layers, pad_token_id=0))
    inputs = {"input_ids": torch.randint(1, 64, (2, 6))}
    graph = slimstart.trace(model, inputs)
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    for group, kept in zip((one for one in graph.groups if "mlp" in one.name), (48, 16), strict=True):
        mask[group.units.start + kept : group.units.stop] = False
    model = slimstart.compact(model, graph.select(mask))
    save_pretrained(model, tmp_path / "small")
    assert not is_network(tmp_path / "small" / "model.safetensors")
    read = type(model).from_pretrained(tmp_path / "small")
    assert read.config.intermediate_size == [48, 16]
    assert differences(weights(read), weights(model)) == []
    assert torch.equal(read.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("before", ["in the config", "in a file"])
def test_the_files_of_a_folder_are_replaced_together(
    before: str, is_killed: bool, tmp_path: Path, differences: Differences
) -> None:
    """A structure that the config can express, and one that it cannot."""
    models, kept = {}, [f"bert.encoder.layer.{i}.{part}" for i in (0, 1) for part in ("attention", "output")]
    for where, sizes in (("in the config", (32, 32)), ("in a file", (24, 48))):
        graph = slimstart.trace(model := MODELS["bert"](), example(), keep=[*kept, "bert.pooler"])
        groups = torch.bincount(graph.costs.unit_group).tolist()
        mask = torch.cat([torch.arange(n) < size for n, size in zip(groups, sizes, strict=True)])
        models[where] = slimstart.compact(model, graph.select(mask)).eval()
    old = models.pop(before)
    (new,), folder, found = models.values(), tmp_path / "small", []
    stopped = stopped_at_every_line(
        lambda: save_pretrained(new, folder), lambda: save_pretrained(old, folder), is_killed, every=41
    )
    for _ in stopped:
        read = from_pretrained(folder)
        found.append([differences(weights(read), weights(model)) == [] for model in (old, new)])
        assert any(found[-1])
    assert found == sorted(found, reverse=True)
    save_pretrained(new, folder)
    assert differences(weights(from_pretrained(folder)), weights(new)) == []
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("steps", [6, 10, 26])
def test_resuming_is_exact(steps: int, tmp_path: Path, differences: Differences) -> None:
    torch.manual_seed(0)
    whole = MODELS["bert"]()
    trainer(whole, tmp_path / "whole", save_strategy="steps", save_steps=steps, max_grad_norm=0.5).train()
    saved = torch.load(tmp_path / "whole" / f"checkpoint-{steps}" / "slimstart.pt", weights_only=True)
    assert saved["settled"] is (steps == 26)
    torch.manual_seed(5)
    resumed = MODELS["bert"]()
    run = trainer(resumed, tmp_path / "whole", max_grad_norm=0.5)
    run.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{steps}"))
    assert run.state.global_step == STEPS
    assert differences(weights(resumed), weights(whole)) == []


def test_resuming_from_a_folder_elsewhere(tmp_path: Path, differences: Differences) -> None:
    torch.manual_seed(0)
    whole = MODELS["bert"]()
    trainer(whole, tmp_path / "out", save_strategy="steps", save_steps=10).train()
    moved = shutil.copytree(tmp_path / "out" / "checkpoint-10", tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"SlimmingCallback\("):
        trainer(MODELS["bert"](), tmp_path / "other").train(resume_from_checkpoint=str(moved))
    resumed, slimming = MODELS["bert"](), SlimmingCallback(Flops(0.7), SEARCHING, checkpoint=moved)
    trainer(resumed, tmp_path / "other", slimming=slimming).train(resume_from_checkpoint=str(moved))
    assert differences(weights(resumed), weights(whole)) == []


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, differences: Differences) -> None:
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 4}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "early", "save_total_limit": 2}
    model = MODELS["bert"]()
    run = trainer(model, tmp_path, **options)
    evaluate = run.evaluate

    def early(*args: Any, **kwargs: Any) -> Any:  # the best checkpoint is one of the search
        return {**evaluate(*args, **kwargs), "eval_early": -abs(run.state.global_step - 8)}

    run.evaluate = early
    run.args.greater_is_better = True
    run.train()
    best = Path(run.state.best_model_checkpoint)
    assert best.name == "checkpoint-8"
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert differences(weights(from_pretrained(best)), weights(model)) == []
    assert ratio(model) <= 0.7


@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 1e-3}, {"optim": "sgd"}],
    ids=str,
)
def test_arguments_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    model, slimming = MODELS["bert"](), SlimmingCallback(Flops(0.7), SEARCHING)
    run = trainer(model, tmp_path, slimming=slimming, **options)
    run.train()
    assert slimming.sparse is not None
    assert slimming.sparse.num_steps == run.state.global_step == STEPS // options.get("gradient_accumulation_steps", 1)
    assert ratio(model) <= 0.7


def test_the_log_has_the_flops_and_the_phase(tmp_path: Path) -> None:
    run = trainer(MODELS["bert"](), tmp_path, logging_steps=2)
    run.train()
    found = [(entry["phase"], entry["flops_ratio"]) for entry in run.state.log_history if "phase" in entry]
    assert found[0][0] == "search"
    assert found[-1][0] == "fixed"
    assert found[-1][1] <= 0.7


def test_a_policy_that_learns_from_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sparse\.update\(\*trainer\.losses\)"):
        SlimmingCallback(Flops(0.5), "paper")


def test_the_lines_for_the_papers_policy(tmp_path: Path) -> None:
    """What the error says to write."""
    model = MODELS["bert"]()

    class Own(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = model(**inputs).loss
            reference = sparse.reference(**inputs).loss.detach() if sparse.needs_reference else None
            self.losses = loss.detach(), reference
            return loss

    class Update(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            sparse.update(*run.losses)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparse = SparseTraining(model, optimizer, example(), Flops(0.7), total_steps=STEPS, policy="paper")
    run = trainer(model, tmp_path, slimming=Update(), cls=Own, optimizers=(optimizer, None))
    run.train()
    assert sparse.num_steps == STEPS
    assert ratio(sparse.finish()) <= 0.7


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config"):
        from_pretrained(tmp_path)


def test_a_folder_that_does_not_exist_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        from_pretrained("bert-base-uncased")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["TrainingArguments"]},
        {"architectures": ["pipeline"]},
        {"architectures": ["__loader__"]},
        {"architectures": [5]},
        {"architectures": 5},
        {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
        {"hidden_size": "wide"},
        {"hidden_size": 33},
    ],
)
def test_a_config_does_not_choose_what_is_called(changes: dict[str, Any], tmp_path: Path) -> None:
    folder, marker = tmp_path / "small", tmp_path / "marker"
    MODELS["bert"]().save_pretrained(folder)
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError):
        from_pretrained(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"5", save({}, {"slimstart": "{}"})])
def test_damaged_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    MODELS["bert"]().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path))}|{re.escape(name)}"):
        from_pretrained(tmp_path)


def test_the_default_policy_needs_no_settings(tmp_path: Path) -> None:
    model = MODELS["bert"]()
    trainer(model, tmp_path, slimming=SlimmingCallback(Flops(0.6), EqualWorth())).train()
    assert ratio(model) <= 0.6


def test_two_processes_equal_one(tmp_path: Path, differences: Differences) -> None:
    folders = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.transformers_cases", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert differences(dict(first), dict(second)) == []
    torch.manual_seed(0)
    model = MODELS["bert"]().double()
    trainer(model, tmp_path, cls=Ordered).train()
    for name, value in weights(model).items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-7)


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import transformers_training

    tiny = ["--width", "32", "--epochs", "1", "--batch-size", "200", "--out", str(tmp_path)]
    transformers_training.main(tiny)
    accuracy, share = map(float, re.findall(r"finished: (\S+) % at (\S+)%", capsys.readouterr().out)[0])
    assert share <= 60
    assert accuracy > 15  # chance is 10
