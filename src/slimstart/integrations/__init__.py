"""Trainers of other libraries: thin callbacks around `SparseTraining`.

`lightning.py` has `Slimming` for Lightning's `Trainer`, `transformers.py` has `SlimmingCallback` for Hugging Face's
`Trainer`, and `accelerate.py` has `register` for Accelerate's checkpoints. Each needs its library only when it is used.
What they have in common is in `trainers.py`. Nothing here knows how a network is narrowed.
"""
