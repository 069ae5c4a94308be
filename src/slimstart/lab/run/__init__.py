"""One run of the program, from a recipe to a record.

Open `program.py` first: what is done, in which order. `task.py` has what a run begins with, `run_folder.py` its files,
`method.py` the protocol of a way to train (`fixed`, `search`, `pruned`, `relaxed`), `comparison.py` several runs.
"""
