"""Cleaning steps of a recipe: one class per kind, listed in `prepare.recipe.STEPS`.

`values` has the steps that check and change values, `duplicates` the step that compares records,
and `label_noise` the step that reports doubtful labels. A file is imported when a recipe uses one
of its kinds.
"""
