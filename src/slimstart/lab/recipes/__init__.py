"""Recipes: everything that decides what a run computes.

Open `recipe.py` first: what can be set, and which combinations are refused. `presets.py` has the rows of the paper,
`originals.py` the methods that it compares with: their authors' recipes, and the numbers that the paper reports.
`schedules.py` is the learning rate as a function of the step.
"""
