"""Files: checkpoints of a training, finished networks, ONNX and torch.export.

Open `training_state.py` first: the contents of a training's state dict. `checkpoints.py` writes and reads its file,
`network_files.py` saves finished networks, `export.py` is for other programs, `latency_tables.py` for budgets of time.
`atomic.py` writes a file completely or not at all, and `files.py` opens files that somebody else may have made.
"""
