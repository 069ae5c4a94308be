"""Recipes: everything that decides what a run computes.

Open `recipe.py` first: what can be set, and which combinations are refused. `presets.py` has the rows of the paper,
`originals.py` the methods that it compares with, by their authors' recipes, `published.py` the paper's numbers.
`schedules.py` is the learning rate as a function of the step.
"""
