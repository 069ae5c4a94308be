"""`slimstart bench`: step times of slimstart, the dense network and the narrow network, measured in one run.

Open `benchmark.py` first.
"""
