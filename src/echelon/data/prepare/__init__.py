"""`prepare()`.

From raw files to shards: read, clean, split, make features, write.

Nothing is imported before it is used: a worker sets itself up before numpy is there, and no part
needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from echelon.core.errors import ConfigError, DataError, UserError
from echelon.core.files import replace_folder
from echelon.core.process import lazily

if TYPE_CHECKING:
    from echelon.data.formats.records import Source
    from echelon.data.prepare.encoders import Prepared, open_prepared
    from echelon.data.prepare.recipe import Recipe, RecipeFile, load_recipe, recipe_from
    from echelon.data.prepare.workers import Pool, Watch

__all__ = ["Prepared", "Recipe", "load_recipe", "open_prepared", "prepare", "recipe_from"]


# --- prepare ---

__getattr__ = lazily(
    __name__,
    {"encoders": ("Prepared", "open_prepared"), "recipe": ("Recipe", "load_recipe", "recipe_from")},
)


# --- preparing ---
# `prepare`: a recipe → a folder of shards.

Hire: TypeAlias = "Callable[[Mapping[str, Any], Sequence[Source]], Pool]"
"""Whoever does the work, given what they have to know and what is read."""


def prepare(
    recipe: Recipe | RecipeFile | Mapping[str, Any] | str | Path,
    *,
    workers: int | None = None,
    on: str | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Prepare data as a recipe says: one folder of shards per split, and what describes them.

    `workers` is the number of processes, by default that of cores; what is written does not depend
    on it. One that was ended, however, is gone on with by calling it again.

    `on` a Ray cluster, of machines that share a file system: "ray" is the one this machine belongs
    to, "ray:HOST:PORT" another, "ray:local" is started for it. `workers` are then by default as
    many as the cluster has cores.
    """
    from echelon.data.formats.remote import forget
    from echelon.data.prepare.workers import Unwatched

    given = _read(recipe)
    if workers is not None and workers < 1:
        raise DataError(f"workers is {workers}: it must be at least 1")
    hire = _on_ray(on, workers) if on is not None else partial(_here, workers or _cores())
    watch = watch or Unwatched()
    try:
        return _prepared(given.recipe, hire, overwrite, watch)
    except ConfigError as error:
        raise ConfigError(given.where(error.path) + error.message, error.path) from None
    except OSError as error:
        raise DataError(
            f"{error.filename or given.recipe.write.folder}: {error.strerror}"
        ) from None
    finally:
        forget()
        watch.ended()


def _read(recipe: Recipe | RecipeFile | Mapping[str, Any] | str | Path) -> RecipeFile:
    from echelon.data.prepare.recipe import Recipe, RecipeFile, load_recipe, recipe_from

    if isinstance(recipe, RecipeFile):
        return recipe
    if isinstance(recipe, Recipe):
        return RecipeFile(recipe)
    if isinstance(recipe, Mapping):
        return RecipeFile(recipe_from(recipe))
    return load_recipe(Path(recipe))


def _prepared(recipe: Recipe, hire: Hire, overwrite: bool, watch: Watch) -> Prepared:
    from echelon.data.formats.files import sources
    from echelon.data.prepare.encoders import Prepared, open_prepared
    from echelon.data.prepare.engine import Engine
    from echelon.data.prepare.finish import check_place, finish
    from echelon.data.prepare.workdir import Claim
    from echelon.data.prepare.write import OUT

    folder = Path(recipe.write.folder)
    read = sources(recipe.read)
    digest = _digest(recipe, read)
    desk = folder.with_name(f".{folder.name}.work")
    if check_place(folder, digest, overwrite=overwrite):
        if desk.exists():  # ended when all but this was done
            Claim(desk, digest).close(remove=True)
        return open_prepared(folder)
    claim = Claim(desk, digest)
    done = False
    try:
        engine = Engine(recipe, claim.desk, watch)
        with closing(engine.blocks()) as raw:
            coming = engine.fit(raw)
            with closing(hire(engine.setting, read)) as pool:
                engine.run(pool, coming)
        facts = finish(engine, read, digest)
        replace_folder(claim.desk.root / OUT, folder)
        done = True
        return Prepared(folder, facts)
    except UserError:  # with another recipe or other inputs all is to be done anew
        done = True
        raise
    finally:
        claim.close(remove=done)


def _here(workers: int, setting: Mapping[str, Any], _read: Sequence[Source]) -> Pool:
    from echelon.data.prepare.workers import Alone, Workers

    return Alone(setting) if workers == 1 else Workers(workers, setting)


def _on_ray(on: str, workers: int | None) -> Hire:
    from echelon.data.prepare.on_ray import LOCAL, OnRay, address_of

    address = address_of(on)
    if address == LOCAL:
        workers = workers or _cores()
    return partial(OnRay, address, workers)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _digest(recipe: Recipe, read: Sequence[Source]) -> str:
    """What the result depends on: where it goes to is no part of it."""
    from echelon.data.prepare.encoders import VERSION

    values = recipe.values()
    values["write"] = {key: value for key, value in values["write"].items() if key != "folder"}
    files = [[one.file, one.format, one.size, one.stamp, one.split] for one in read]
    beside = [stamp for feature in recipe.made() if (stamp := feature.stamp())]
    plain = json.dumps([VERSION, values, files, *beside], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
