"""The paper's two analyses, on runs of our own: `python benchmarks/run_study.py variance | flip`."""
