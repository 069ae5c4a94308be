"""One run of the program, from a recipe to a record.

Open `program.py` first: the steps of a run in their order. `task.py` has device, data and dense network,
`run_folder.py` the files of a run, `method.py` the protocol of training methods (`fixed`, `search`, `pruned`,
`relaxed`), `recording.py` the record, `comparison.py` several runs.
"""
