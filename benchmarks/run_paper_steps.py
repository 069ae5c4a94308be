"""Step times of the paper's policy, compared with the dense network and a narrow one.

    python benchmarks/run_paper_steps.py --budgets flops=0.25 flops=0.1 --out results/bench-cpu/vgg19-64.json

The narrow network has the widths of a draw and is the limit. All take turns in one process, each in its fastest form.
The time of slimstart includes structure updates and both forwards.

`slimstart bench` is shorter: it times a model of yours with either policy, and writes no record.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmark_record
from paper_steps.benchmark import Benchmark

from slimstart.lab.run.environment import find_device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the record to this file, after every row")
    parser.add_argument("--model", default="vgg19", help="one of ours, timm:NAME, or your own code as module:factory")
    parser.add_argument("--budgets", nargs="+", default=["flops=0.10"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--resample-every", type=int, nargs="+", default=[10], help="steps between structure updates")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", help="float32, tf32 or bfloat16")
    parser.add_argument("--coupling", default="filter", help="filter or stream")
    parser.add_argument("--align", type=int, help="pad to multiples of this number; chosen for the device by default")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true", help="measure the plain networks with torch.compile, too")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each network")
    parser.add_argument("--seconds", type=float, default=30.0, help="no new round begins after this time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    device, rows = find_device(args.device), []
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "device")}
    for row in Benchmark(args, device).rows():
        rows.append(row)
        benchmark_record.write(args.out, "paper_steps", rows, str(device), settings=settings)
        print(
            f"{row['budget']} resample_every={row['resample_every']}: {row['ours_ms']:.3g} ms, {row['speedup']:.2f}x "
            f"dense, {row['of_limit']:.2f}x narrow ({row['num_turns']} turns)",
            flush=True,
        )


if __name__ == "__main__":
    main()
