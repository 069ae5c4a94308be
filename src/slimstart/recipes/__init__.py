"""Recipes and the program that runs them: `slimstart train` without its command line.

Open `recipe.py` first (what can be set), then `task.py` (with what a run begins) and `program.py` (what is done).

- Recipes with a name: `presets.py` has the rows of the paper, `originals.py` the methods that it compares with, by
  their authors' recipes, `paper.py` what it reports of those.
- Ways to train, chosen by `methods.py`: `method.py` is what the program asks of one, `fixed.py` plain training,
  `search.py` a search, `pruned.py` a trained network that is cut, `relaxed.py` gates on the dense one.
- Around a run: `runs.py` its folder, `recording.py` the record, `measure.py` step times (`parts.py`: in parts),
  `evaluation.py` accuracy, `schedules.py` the learning rate, `events.py` TensorBoard, `progress.py` how far it is,
  `surroundings.py` device and facts, `watching.py` who looks on: nothing here shows anything, a `Watcher` may.
- Several runs: `comparison.py`. The paper's two analyses: `study.py`, with `study_variance.py`, `study_flip.py`,
  `study_losses.py` and `study_settings.py`. Step times against the limit: `bench.py` and the files of that name.
"""
