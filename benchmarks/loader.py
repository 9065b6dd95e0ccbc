"""How fast batches come, next to other loaders, and what a set larger than memory takes up.

Fashion-MNIST: every side goes through all images in a shuffled order and gives float32 batches of
128, normalised. Rounds of all sides take turns; a ratio is samples per second of Echelon ÷ those of
the peer, the median of the rounds' own ratios. Each peer is taken at its best: workers persist and
are started beforehand, and Hugging Face gives whole batches in its quickest format.

Then a synthetic set of shards is written and streamed once, shuffled, in a process of its own:
`anon_mb` is the peak of its anonymous memory (RssAnon) over that after its imports.
The last line is one JSON object; null stands for a peer that is not installed.

    python benchmarks/loader.py
"""

from __future__ import annotations

import argparse
import gc
import gzip
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from echelon.data.augment import Normalise
from echelon.data.ledger import Ledger
from echelon.data.loader import Loader
from echelon.data.shards import ShardSource, write_shards
from echelon.data.sources import ColumnSource

BATCH = 128
MEAN, STD = 72.9, 90.0
SIDE = 64
"""Synthetic images have this many pixels a side."""
FASHION = Path(__file__).resolve().parents[2] / "shared" / "data" / "fashion-mnist"

Pass = Callable[[int], Iterator[Tensor]]
"""One pass over the data in the order of this epoch: the images of each batch."""


def main() -> None:
    chosen = arguments()
    if chosen.stream:
        print(json.dumps(stream(chosen.stream)))
        return
    torch.set_num_threads(chosen.threads)
    images, labels = fashion(chosen.data)
    sides = all_sides(images, labels)
    rates = compare(sides, len(images), chosen.rounds)
    result: dict[str, float | None] = {}
    for side in ("dataloader0", "dataloader2", "hf_datasets"):
        result[side] = ratio(rates["echelon"], rates[side]) if side in rates else None
    result["anon_mb"] = anonymous_memory(chosen.gb, chosen.scratch)
    print(json.dumps(result))


class Samples(Dataset[tuple[Tensor, int]]):
    """The data set most people would write."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return (self.images[row].float() - MEAN) / STD, int(self.labels[row])


def all_sides(images: Tensor, labels: Tensor) -> dict[str, Pass]:
    sides = {
        "echelon": echelon(images, labels),
        "dataloader0": dataloader(images, labels, workers=0),
        "dataloader2": dataloader(images, labels, workers=2),
    }
    if importlib.util.find_spec("datasets"):
        sides["hf_datasets"] = hugging_face(images, labels)
    else:
        print("datasets is not installed: hf_datasets is left out", file=sys.stderr)
    return sides


def echelon(images: Tensor, labels: Tensor) -> Pass:
    loader = Loader(
        ColumnSource({"x": images, "y": labels}),
        seed=0,
        augment=Normalise(torch.tensor(MEAN), torch.tensor(STD)),
    )
    ledger = Ledger(len(images))

    def run(epoch: int) -> Iterator[Tensor]:
        for lease, (batch,) in loader.stream(ledger.leases(epoch, BATCH)):
            yield batch["x"]  # type: ignore[misc]  # dense
            ledger.commit(lease, 0)

    return run


def dataloader(images: Tensor, labels: Tensor, workers: int) -> Pass:
    loader = DataLoader(
        Samples(images, labels),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda _: (x for x, _ in loader)


def hugging_face(images: Tensor, labels: Tensor) -> Pass:
    import datasets

    datasets.disable_progress_bars()
    pixels = datasets.Sequence(datasets.Value("uint8"), length=images[0].numel())
    columns = {"x": images.flatten(1).numpy(), "y": labels.numpy()}
    features = datasets.Features({"x": pixels, "y": datasets.Value("int64")})
    data = datasets.Dataset.from_dict(columns, features=features).with_format("numpy")

    def run(epoch: int) -> Iterator[Tensor]:
        for batch in data.shuffle(seed=epoch).iter(BATCH):
            yield (torch.from_numpy(batch["x"]).view(-1, *images[0].shape) - MEAN) / STD

    return run


def compare(sides: dict[str, Pass], samples: int, rounds: int) -> dict[str, list[float]]:
    """Samples per second of every side in every round, after a rehearsal."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, run in sides.items():
            gc.collect()
            began = time.perf_counter()
            seen = consume(run(number))
            seconds = time.perf_counter() - began
            assert seen == samples, f"{side} gave {seen} of {samples} samples"
            if number:
                rates[side].append(samples / seconds)
    for side, values in rates.items():
        print(f"{side:<12} {statistics.median(values):>12,.0f} samples/s")
    return rates


def consume(batches: Iterator[Tensor]) -> int:
    seen = 0
    for x in batches:
        assert x.dtype == torch.float32
        seen += len(x)
    return seen


def ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)


def fashion(folder: Path) -> tuple[Tensor, Tensor]:
    """The training part, or as much noise where it is not at hand."""
    if not folder.is_dir():
        print(f"{folder} is not there: noise of the same size instead", file=sys.stderr)
        noise = torch.randint(0, 256, (60_000, 28, 28), dtype=torch.uint8)
        return noise, torch.randint(0, 10, (60_000,))
    pixels = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    classes = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(classes, np.uint8, offset=8)
    return torch.tensor(images), torch.tensor(labels).long()


def anonymous_memory(gigabytes: float, scratch: Path | None) -> float:
    """Write a set of shards of this size and stream it in another process."""
    rows = max(1, int(gigabytes * 1e9 / (SIDE * SIDE + 8)))
    with tempfile.TemporaryDirectory(dir=scratch, prefix="echelon-loader-") as folder:
        began = time.perf_counter()
        write_shards(Path(folder) / "set", synthetic(rows))
        print(f"{gigabytes:g} GB of shards written in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, __file__, "--stream", str(Path(folder) / "set")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    print(f"{told['rows']:,} rows streamed at {told['rate']:,.0f} rows/s, each once")
    return float(told["anon_mb"])


def synthetic(rows: int, block: int = 4096) -> Iterator[dict[str, Any]]:
    """Noise that cannot be compressed away; `row` tells the samples apart."""
    random = np.random.default_rng(0)
    for start in range(0, rows, block):
        numbers = np.arange(start, min(start + block, rows))
        shape = (len(numbers), SIDE, SIDE)
        yield {"x": random.integers(0, 256, shape, dtype=np.uint8), "row": numbers}


def stream(folder: Path) -> dict[str, float]:
    """One shuffled pass over a set of shards, watching this process's anonymous memory."""
    before = peak = anonymous_kilobytes()
    source = ShardSource(folder)
    ledger, loader = Ledger(len(source)), Loader(source, seed=0)
    seen = torch.zeros(len(source), dtype=torch.bool)
    began = time.perf_counter()
    with closing(loader.stream(ledger.leases(0, BATCH))) as batches:
        for version, (lease, (batch,)) in enumerate(batches):
            rows = batch["row"]
            assert isinstance(rows, Tensor)
            assert not seen[rows].any(), "a row came twice"
            seen[rows] = True
            ledger.commit(lease, version)
            peak = max(peak, anonymous_kilobytes())
    seconds = time.perf_counter() - began
    assert bool(seen.all()), "a row did not come"
    assert ledger.proof(0).once == len(source)
    anon = round((peak - before) / 1024, 1)
    return {"rows": len(source), "rate": len(source) / seconds, "anon_mb": anon}


def anonymous_kilobytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError("this kernel does not tell RssAnon")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=FASHION, help="folder of fashion-mnist")
    parser.add_argument("--gb", type=float, default=5.0, help="size of the synthetic set")
    parser.add_argument("--scratch", type=Path, help="where the synthetic set is written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="for one process's kernels")
    parser.add_argument("--stream", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
