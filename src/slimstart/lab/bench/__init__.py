"""`slimstart bench`: the time of a training step, of ours, of the dense network and of the uniform one, in one run.

Open `benchmark.py` first.
"""
