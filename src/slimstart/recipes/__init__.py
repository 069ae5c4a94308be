"""Recipes and the program that runs them: `slimstart train` without its command line.

Open `recipe.py` first (what can be set), then `program.py` (what is done). `presets.py` has the rows of the paper,
`methods.py` the ways to train, `runs.py` the folder of a run, `measure.py` step times, `recording.py` the record,
`events.py` TensorBoard, `schedules.py` the learning rate, `surroundings.py` device and facts. Nothing here
shows anything: a `Watcher` may.
"""
