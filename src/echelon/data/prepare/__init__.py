"""`prepare()`: from raw files to shards, as a recipe says.

    recipe file ─▶ recipe.py     the settings, checked
    inputs      ─▶ engine.py     all passes in order (drawn there), in a hidden work folder
                     workers.py    worker processes; on_ray.py: the same on a Ray cluster
                     passes.py     what a worker does with a block: parse, clean, learn
                     splits.py     the plan: split, shard and place of every record
                     write.py      features ─▶ shards
                     finish.py     manifests, what was learnt, quarantine
    folder      ─▶ encoders.py   `Prepared`: open the result, encode new records

Cleaning steps are in clean/, features in features/ and text/; steps.py is their interface.

Importing this package imports nothing else of it: a worker process limits its threads before numpy
is imported. No part needs torch.
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
from echelon.core.lazy import lazily

if TYPE_CHECKING:
    from echelon.data.formats.records import Source
    from echelon.data.prepare.encoders import Prepared, open_prepared
    from echelon.data.prepare.recipe import Recipe, RecipeFile, load_recipe, recipe_from
    from echelon.data.prepare.workers import Pool, Watch


__all__ = ["Prepared", "Recipe", "load_recipe", "open_prepared", "prepare", "recipe_from"]
__getattr__ = lazily(
    __name__,
    {"encoders": ("Prepared", "open_prepared"), "recipe": ("Recipe", "load_recipe", "recipe_from")},
)


def prepare(
    recipe: Recipe | RecipeFile | Mapping[str, Any] | str | Path,
    *,
    workers: int | None = None,
    on: str | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Prepare data as a recipe says: a folder with shards of each split and their description.

    `workers` is the number of processes, by default one per core; the output does not depend on it.
    If a preparation is interrupted, call it again: it resumes. A folder that holds this very data
    already is only opened, and one with other prepared data is refused, unless `overwrite` is set.

    `on` selects a Ray cluster whose machines share a file system: "ray" for the one this machine
    belongs to, "ray:HOST:PORT" for another, "ray:local" to start one here. The default of `workers`
    is then the number of cores of the cluster.
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
        if desk.exists():  # a preparation ended after the rename, before it could remove this
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
    except UserError:  # its remedy changes the recipe or the inputs, so nothing here can be reused
        done = True
        raise
    finally:
        claim.close(remove=done)


def _digest(recipe: Recipe, read: Sequence[Source]) -> str:
    """Return a digest of everything the output depends on; the output folder does not count."""
    from echelon.data.prepare.encoders import VERSION

    values = recipe.values()
    values["write"] = {key: value for key, value in values["write"].items() if key != "folder"}
    files = [[one.file, one.format, one.size, one.stamp, one.split] for one in read]
    beside = [stamp for feature in recipe.made() if (stamp := feature.stamp())]
    plain = json.dumps([VERSION, values, files, *beside], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


Hire: TypeAlias = "Callable[[Mapping[str, Any], Sequence[Source]], Pool]"
"""Starts the workers, given the engine's `setting` and the inputs."""


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
