"""Files: training state (`checkpoints`), finished networks (`network_files`), ONNX and torch.export (`export`).

`atomic` writes a file as a whole or not at all. Open `checkpoints.py` for the format of a training's state.
"""
