"""The command line: every command, and every error in one line with a remedy."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimstart.lab import records
from slimstart.lab.cli import main
from slimstart.lab.cli.display import TrainingDisplay, console
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.environment import Place
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from tests.integration.test_program import outcome

OWN = "tests.tiny_networks:with_dropout"
TINY = [
    *("--model", OWN, "--budget", "flops=0.4", "--epochs", "2", "--batch-size", "1000", "--num-masks", "2"),
    *("--settle-at", "0.5", "--lr", "0.05", "--device", "cpu"),
]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def slimstart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, in an empty folder: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 200)

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slimstart", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made by the program itself."""
    run = Run(tmp_path_factory.mktemp("runs") / "trained")
    recipe = Recipe(
        model=OWN, budget="flops=0.4", epochs=2, batch_size=1000, num_masks=2, settle_at=0.5, lr=0.05
    )  # as TINY says
    run.create(recipe)
    Program(recipe, run, Place("cpu")).train()
    return run.folder


def command(*arguments: Any, **kwargs: Any) -> subprocess.Popen[str]:
    """The program as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "slimstart", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


Slimstart = Callable[..., tuple[int, str, str]]


# --------------------------------------------------------------------------- the commands


def test_train_ends_with_a_table_and_a_report(slimstart: Slimstart, tmp_path: Path) -> None:
    status, output, _ = slimstart("train", *TINY)
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    record = records.read(folder)
    assert record.step_ms is None
    assert f"{record.accuracy:.2f}"[:4] in output
    assert "epoch 2/2" in output
    assert str(Path("runs") / folder.name / "report.html") in output
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    status, output, _ = slimstart("train", *TINY, "--step-times")  # a second one takes a name of its own
    assert status == 0
    (another,) = set((tmp_path / "runs").iterdir()) - {folder}
    second = records.read(another)
    assert second.step_ms is not None
    assert (second.accuracy, second.config_hash) == (record.accuracy, record.config_hash)
    status, output, _ = slimstart("report", "runs", "--out", "both.html")
    assert status == 0
    assert Path("both.html").is_file()


def test_evaluate_repeats_the_accuracy_of_the_record(slimstart: Slimstart, trained: Path) -> None:
    status, output, _ = slimstart("evaluate", trained, "--model", OWN, "--device", "cpu")
    assert (status, f"{records.read(trained).accuracy:.2f} %" in output) == (0, True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("onnx", "a.onnx", marks=pytest.mark.slow),
        ("torch", "a.pt2"),
        ("python", "a.py"),
        ("safetensors", "a.safetensors"),
    ],
)
def test_export_writes_what_computes_the_same(
    slimstart: Slimstart, trained: Path, kind: str, name: str, tmp_path: Path
) -> None:
    status, output, errors = slimstart("export", trained, "--model", OWN, "--format", kind, "--out", name)
    assert status == 0, errors
    assert (tmp_path / name).stat().st_size > 500
    if kind != "safetensors":
        (difference,) = re.findall(r"differs by (\S+) at most", output)
        assert float(difference) < 1e-4


def test_inspect_shows_groups_reasons_and_costs(slimstart: Slimstart) -> None:
    status, output, _ = slimstart("inspect", "resnet20", "--budget", "flops=0.25")
    assert status == 0
    assert "it is an output of the network" in output
    assert "40,813,184" in output
    assert "100.0% of the FLOPs can shrink" in output
    status, output, _ = slimstart("inspect", "resnet20", "--budget", "flops=0.25+params=0.1")
    found = dict(re.findall(r"^(flops|params) .* ([\d.]+) *$", output, re.MULTILINE))
    assert float(found["flops"]) <= 0.25
    assert 0.099 < float(found["params"]) <= 0.1
    status, output, _ = slimstart("inspect", OWN, "--image", "1x28x28", "--coupling", "stream")
    assert status == 0
    assert "8" in output


def test_recipes_lists_the_rows_of_the_paper(slimstart: Slimstart) -> None:
    status, output, _ = slimstart("recipes")
    assert status == 0
    assert re.search(r"^vgg16-cifar10 .* 92.5 % at 8.7 % FLOPs, 8.69×", output, re.MULTILINE)
    assert re.search(r"^l1-vgg16-cifar10-uniform .* flops=0.087 .* 91.8 % at 19.9 % FLOPs *$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_recipe_file_and_options_on_top_of_it(slimstart: Slimstart, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'extends = "fashion"\nwidth = 0.25\nepochs = 1\nbatch_size = 500\nnum_masks = 1\n'
    )
    status, _, errors = slimstart(
        "train", "--recipe", "mine.toml", "--lr", "0.02", "--device", "cpu", "--method", "dense"
    )
    assert status == 0, errors
    record = records.read(tmp_path / "runs" / "mine-dense")
    assert (record.config["lr"], record.config["width"], record.budget, record.epochs) == (0.02, 0.25, None, 1)
    assert record.step_ms is None


def test_bench_shows_the_time_of_a_step(slimstart: Slimstart) -> None:
    tiny = ["bench", "tests.tiny_networks:with_dropout", "--batch-size", "2", "--rounds", "1", "--device", "cpu"]
    status, output, _ = slimstart(*tiny, "--budget", "flops=0.5,params=0.6")
    assert status == 0
    titles, first, second = (line.split() for line in output.splitlines())
    assert titles[:4] == ["budget", "FLOPs,", "%", "dense,"]
    assert (first[0], second[0]) == ("flops=0.5", "params=0.6")
    assert all(float(cell) > 0 for cell in first[1:] + second[1:])
    for arguments, message in [
        (["--budget", ","], "`budget` is empty; give one value, or several with commas"),
        (["--budget", "flops=0.000001"], "feasible from"),
        (["--rounds", "0"], "`rounds` is 0; it must be at least 1"),
        (["--device", "toaster"], "cannot be used here"),
        (["--engine", "steam"], "`engine` is 'steam'; it must be one of"),
        (["--image", "32"], "it must be CHANNELSxHEIGHTxWIDTH"),
    ]:
        status, _, errors = slimstart(*tiny, *arguments)
        assert (status, errors.count("\n")) == (2, 1)
        assert message in errors


@pytest.mark.parametrize("name", ["train", "compare", "evaluate", "export", "inspect", "bench", "report", "recipes"])
def test_every_command_has_help_with_an_example(slimstart: Slimstart, name: str) -> None:
    status, output, _ = slimstart(name, "--help")
    assert status == 0
    assert f"Example: slimstart {name}" in output


HELP_AND_LOOK = """
import sys
from slimstart.lab.cli import main
sys.argv = ["slimstart", "train", "--help"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def test_help_answers_without_loading_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_AND_LOOK], cwd=REPOSITORY / "src", capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("False\n")


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vgg61"], "vgg16"),
        (["--model", "no_such_module:make"], "cannot be imported"),
        (["--budget", "flops=0.0001"], "feasible from"),
        (["--epochs", "0", "--batch-size", "0"], "`epochs` is 0; it must be at least 1; `batch_size` is 0"),
        (["--epochs", "many"], "--epochs"),
        (["--device", "toaster"], "cannot be used here"),
        (["--recipe", "vgg16"], "vgg16-cifar10"),
        (["--recipe", "missing.toml"], "cannot be used"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["--resume", "--out", "nowhere", "--epochs", "3"], "nowhere holds no run"),
        (["--batch-size", "100000"], "100000"),
        (["--unknown"], "--unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_status_2(slimstart: Slimstart, arguments: list[str], message: str) -> None:
    status, _, errors = slimstart("train", *arguments)
    assert status == 2
    assert re.search(message, errors)
    assert "Traceback" not in errors
    if errors.startswith("error: "):
        assert errors.count("\n") == 1


@pytest.mark.parametrize("words", [["train", *TINY, "--out", ""], ["train", "--out="], ["report", ".", "--out", ""]])
def test_an_empty_value_is_refused(slimstart: Slimstart, tmp_path: Path, words: list[str]) -> None:
    status, _, errors = slimstart(*words)
    assert (status, errors) == (2, "error: --out is empty; give it a value, or leave it out\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ["", pytest.param("ValueError('drawing failed')", marks=pytest.mark.slow)])
def test_a_termination_before_the_training_is_reported(tmp_path: Path, error: str) -> None:
    """Also where other code replaces the exception, as compiled code may."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n\n\n"
        "def make(batch_size):\n    Path('reached').touch()\n"
        f"    try:\n        time.sleep(120)\n    except BaseException:\n        raise {error}\n"
    )
    words = ["train", "--model", "small", "--data", "slow:make", "--out", "run"]
    path = os.pathsep.join([str(REPOSITORY / "src"), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "slimstart", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "stopped by SIGTERM" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_failures_have_status_1(slimstart: Slimstart, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, message in [
        (["train", "--model", "resnet20", "--data", "cifar10", "--no-download", "--data-dir", "empty"], "cifar"),
        (["report", "empty"], "empty"),
        (["train", *TINY, "--lr", "1e18", "--weight-decay", "1e18"], "the (reference )?loss is (nan|inf)"),
    ]:
        status, _, errors = slimstart(*arguments)
        assert status == 1, errors
        assert errors.startswith("error: ")
        assert re.search(message, errors)
        assert errors.count("\n") == 1


def test_a_network_too_large_for_the_host_is_refused_with_numbers(
    slimstart: Slimstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimstart.steps.host_memory.free_on_host", lambda: 0)
    status, _, errors = slimstart("train", *TINY, "--full-model-device", "cpu")
    assert status == 1
    assert re.match(r"error: the dense model does not fit on the host: it needs \S+ MiB more, .*state\n$", errors)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["slimstart", "train", "--recipe", "missing.toml", "--debug"])
    with pytest.raises(ValueError, match=r"missing\.toml"):
        main()


@pytest.mark.slow
def test_a_run_continues_after_its_output_is_closed(tmp_path: Path) -> None:
    process = command("train", *TINY, "--out", tmp_path / "run")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert Run(tmp_path / "run").finished


def test_folders_that_do_not_fit_are_refused(slimstart: Slimstart, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Run(tmp_path / "begun").create(Run(trained).recipe(OWN))
    for arguments, message in [
        (["train", *TINY, "--out", trained], "holds a run already; add --resume"),
        (["train", "--resume", "--out", trained, "--model", OWN, "--lr", "0.2"], "leave out --lr 0.2"),
        (["train", *TINY, "--out", "file/run"], "file/run cannot be made"),
        (["evaluate", "file"], "holds no run"),
        (["evaluate", "begun", "--model", OWN], "is not finished"),
    ]:
        status, _, errors = slimstart(*arguments)
        assert (status, message in errors) == (2, True), errors


def test_resuming_a_finished_run_writes_a_missing_report(slimstart: Slimstart, trained: Path) -> None:
    (trained / "report.html").unlink(missing_ok=True)  # as if killed between record and report
    status, output, _ = slimstart("train", "--resume", "--out", trained, "--model", OWN)
    assert (status, "is finished already" in output) == (0, True)
    assert (trained / "report.html").is_file()


@pytest.mark.slow
def test_a_full_disk_is_reported_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    def small_files_only() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    process = command("train", *TINY, "--out", tmp_path / "run", "--checkpoint-seconds", 0, preexec_fn=small_files_only)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert re.search(r"error: .*cannot be written: .*File too large", output)
    assert not list(tmp_path.rglob("*.partial"))
    assert Run(tmp_path / "run").latest() is None


# --------------------------------------------------------------------------- nothing in a file is executed


@pytest.mark.parametrize(("field", "own"), [("model", OWN), ("data", "fashion")])
def test_a_file_never_names_code(slimstart: Slimstart, tmp_path: Path, trained: Path, field: str, own: str) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    (tmp_path / "evil.toml").write_text(f'{field} = "evil:make"\n')
    status, _, errors = slimstart("train", "--recipe", "evil.toml")
    assert (status, "never run on the word of a file" in errors) == (2, True)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "record.json"):
        content = (trained / name).read_text()
        assert f'"{own}"' in content
        (run / name).write_text(content.replace(f'"{own}"', '"evil:make"'))
    for arguments in (
        ["train", "--resume", "--out", run, *([] if field == "model" else ["--model", OWN])],
        ["evaluate", run, *([] if field == "model" else ["--model", OWN])],
        ["export", run, "--format", "torch", "--out", "a.pt2"],
        ["report", run],
    ):
        slimstart(*arguments)
    assert not (tmp_path / "executed").exists()


# --------------------------------------------------------------------------- stopping


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path: Path, differences: Callable[[Any, Any], list[str]]) -> None:
    longer = [*TINY, "--epochs", "6"]
    process = command("train", *longer, "--out", tmp_path / "parts")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 2/6"):
            break
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    (resume,) = re.findall(r"to go on: slimstart (.*)", output)
    again = command(*resume.split(), "--device", "cpu")
    assert again.wait(120) == 0
    recipe = Run(tmp_path / "parts").recipe(OWN)
    Run(tmp_path / "whole").create(recipe)
    Program(recipe, Run(tmp_path / "whole"), Place("cpu")).train()
    assert differences(outcome(tmp_path / "parts"), outcome(tmp_path / "whole")) == []


def test_a_signal_while_a_line_is_written_asks_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to write from within a write, and the error would end the training without a checkpoint."""

    def write(*_: Any) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name=1>")

    display, before = TrainingDisplay(total_epochs=1), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(console, "print", write)
    with display.stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        assert display.stop_requested
        assert signal.getsignal(signal.SIGTERM) == before
