"""The two analyses of the paper: `python benchmarks/run_study.py variance | flip`."""
