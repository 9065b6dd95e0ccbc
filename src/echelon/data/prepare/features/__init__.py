"""Every kind of feature, imported when a recipe asks for it."""

from __future__ import annotations
