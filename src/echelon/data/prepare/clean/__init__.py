"""Every kind of cleaning step, imported when a recipe asks for it."""

from __future__ import annotations
