"""Every kind of feature, imported when a recipe names it (FEATURES in recipe.py)."""
