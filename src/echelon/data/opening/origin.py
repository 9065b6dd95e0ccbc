"""What every kind of opening begins with: the section's data, read and told apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.data.opening.frames import Frame, Usual, class_names, load
from echelon.data.opening.parts import Part, Parts, Recognise, find_parts
from echelon.data.readers.detect import format_of_name
from echelon.data.shards.manifest import PREPARED
from echelon.data.shipped import load_shipped

PREPARED_KIND = "prepared"


@dataclass(frozen=True, slots=True)
class Origin:
    """The records of a data set in memory."""

    train: Frame
    valid: Frame | None
    about: dict[str, Any]
    class_names: list[str] = field(default_factory=list)


def open_origin(
    section: DataSection,
    *,
    new: bool,
    own: Collection[str] = (),
    recognise: Recognise = format_of_name,
    usual: Usual | None = None,
) -> Origin:
    """Read the section's data set; `own` are options that are not for the reader.

    `usual` are options for the reader where the section does not say them.

    Of `new` data, which a trained model is tried on, one part is read: the held-out one if there
    are two. It is called the training part here all the same.
    """
    if section.name is not None:
        table, names = load_shipped(section.name, section.options)
        return Origin(Frame(table, section.name), None, {"name": section.name}, names)
    parts = locate(section, new=new, recognise=recognise)
    options = {key: value for key, value in section.options.items() if key not in own}
    train = load(parts.train, options, usual)
    valid = load(parts.valid, options, usual) if parts.valid is not None else None
    return Origin(train, valid, about_parts(parts), class_names(parts.train))


def locate(
    section: DataSection,
    *,
    new: bool,
    recognise: Recognise = format_of_name,
    one_text: bool = False,
) -> Parts:
    """The files of a section that has a path."""
    if section.path is None:
        what = f", not data.name={section.name}" if section.name else ""
        raise DataError(f"there is no data to read: set data.path{what}")
    if new and section.valid_path is not None:
        raise DataError(
            "data.valid_path is for training: all of new data is held out, so set data.path alone"
        )
    return find_parts(
        section.path,
        section.valid_path,
        section.format,
        recognise=recognise,
        one_text=one_text,
        new=new,
    )


def about_parts(parts: Parts) -> dict[str, Any]:
    about: dict[str, Any] = {"name": _name(parts.train), "path": parts.train.where}
    if parts.valid is not None:
        about["held_out"] = parts.valid.where
    return about


def _name(part: Part) -> str:
    """What people call the set: its folder, or its file without suffixes."""
    path: Path = part.paths[0].absolute()
    inner = path.name.lower().startswith(("train", "test", "valid", "dev", "t10k", "input"))
    return path.parent.name if inner else path.name.split(".")[0]


def check_fitted(fitted: Mapping[str, Any], kind: str) -> None:
    """Refuse what another kind of opening has fitted."""
    found = fitted.get("kind")
    if found != kind:
        raise DataError(f"the run was trained on {found} data; here {kind} data is opened")


def is_prepared(section: DataSection, fitted: Mapping[str, Any] | None = None) -> bool:
    """Whether this is prepared data, or new data for a model that was trained on such."""
    if fitted is not None:
        return fitted.get("kind") == PREPARED_KIND
    return section.path is not None and (Path(section.path).expanduser() / PREPARED).is_file()
