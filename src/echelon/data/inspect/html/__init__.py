"""A profile as one HTML file."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import UserError
from echelon.data.inspect.html.page import page
from echelon.data.inspect.profile import Profile

__all__ = ["write_html"]


def write_html(profile: Profile, path: str | Path) -> Path:
    """Write the page, in place of an earlier one, all of it or nothing."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, give the name of a file")
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(page(profile), encoding="utf-8", errors="replace")
        aside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be written: {error.strerror}") from None
    finally:
        aside.unlink(missing_ok=True)
    return path
