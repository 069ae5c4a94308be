"""Numbers in the README come from records under results/."""

from pathlib import Path

from slimstart import records

REPOSITORY = Path(__file__).parents[2]


def test_the_table_of_the_readme_is_that_of_the_records() -> None:
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    for name, label in [("dense", "dense"), ("narrow", "hand-narrowed"), ("slimstart", "slimstart, the paper's")]:
        record = records.read(REPOSITORY / "results" / "vgg16-cifar10-60" / f"{name}.json")
        (line,) = [line for line in lines if line.startswith(f"| {label}")]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [
            f"{record.accuracy:.1f}",
            f"{100 * record.flops_ratio:.1f}",
            f"{100 * record.params_ratio:.1f}",
            f"{record.executed_saving:.2f}x",
            f"{record.step_ms:.1f}",
            f"{record.train_seconds / 60:.1f}",
        ]
