"""Step times of the paper's policy, of the dense network, and of the narrow network that it draws, in one run.

`../run_paper_steps.py` is the command; open `benchmark.py` first.
"""
