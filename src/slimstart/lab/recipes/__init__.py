"""What a run computes, as data. Nothing here trains.

Open `recipe.py` first: every setting, with the sentence that `--help` shows about it. `contradictions.py` refuses
settings that do not go together, `schedules.py` has the learning rate of every step, `presets.py` the recipes with a
name: the rows of the paper's tables, and the methods that it compares with.
"""
