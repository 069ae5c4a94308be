"""The program `slimstart`: recipes, methods to compare with, networks, data sets, runs, reports.

Installed by `pip install slimstart[lab]`. It imports the library; the library never imports it. Open `cli/` for the
commands, `recipes/recipe.py` for what can be set, `run/program.py` for how a run trains.
"""
