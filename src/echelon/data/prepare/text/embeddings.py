"""Texts as dense vectors: word2vec trained here, or the sentence vectors of a transformer.

Word2vec (Mikolov et al. 2013): `Word2Vec` is the feature; `Corpus` keeps the token ids of all texts
on disk; `train_vectors` trains with negative sampling. Torch runs on one thread, so that sums are
added in the same order on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError, MissingExtra
from echelon.core.hashing import key
from echelon.data.prepare.steps import Array, Columns, Feature, Ragged, Values
from echelon.data.prepare.text.counts import count_known, numbers_of
from echelon.data.prepare.text.encode import RESERVED, Chosen, check_text, numbered, padded
from echelon.data.prepare.text.tokenise import plain
from echelon.data.prepare.workdir import Learnt

if TYPE_CHECKING:
    from torch import Tensor


# Word2vec


class Word2Vec(Chosen):
    """Kind `word2vec`: a mean vector per text, or token ids and the matrix they look up."""

    width: PositiveInt = 100
    """Length of a vector."""
    window: PositiveInt = 5
    """How many words to either side count as near."""
    model: Literal["skip_gram", "cbow"] = "skip_gram"
    """Words predict their neighbors (skip_gram), or neighbors predict the word (cbow)."""
    negative: PositiveInt = 5
    """Random words drawn for each near word."""
    epochs: PositiveInt = 5
    rate: PositiveFloat = 0.05
    subsample: Annotated[float, NonNegativeFloat, Field(lt=1)] = 1e-3
    """Words with a larger share than this are skipped at random; 0: never."""
    make: Literal["mean", "tokens"] = "mean"
    """One vector per text; or token ids as `tokens` makes them, and `vectors` with a row for each
    id among what is learnt."""
    length: PositiveInt | None = None
    """Of token ids: texts are cut or padded to this many."""

    @model_validator(mode="after")
    def _length_where_used(self) -> Self:
        if self.length is not None and self.make == "mean":
            raise SettingError("make = 'mean' does not look at length", "length", "make")
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        return (*super().stages, "corpus")

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        if self.stages[at] != "corpus":
            return super().look(at, block, learnt)
        tokens = self.tokens(block, learnt)
        numbers = numbers_of(tokens.terms, learnt["terms"])[tokens.codes]
        before = np.concatenate([[0], np.cumsum(numbers >= 0)])
        return {"tokens": numbers[numbers >= 0], "lengths": np.diff(before[tokens.offsets])}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if self.stages[at] != "corpus":
            return super().learn(at, partials, learnt, scratch)

        corpus = Corpus(partials, scratch / "corpus")
        cbow = self.model == "cbow"
        plan = Plan(
            self.width,
            self.window,
            self.negative,
            cbow,
            self.epochs,
            self.rate,
            self.subsample,
            self.seed,
        )
        vectors = train_vectors(corpus, learnt["counts"], plan)
        none = np.zeros((len(RESERVED), self.width), np.float32)
        return {**learnt, "vectors": np.concatenate([none, vectors])}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        if self.make == "mean":
            return {self.name: self._means(block, learnt)}
        tokens = self.tokens(block, learnt)
        ids = Ragged(numbered(tokens, learnt["terms"]), tokens.offsets)
        return {self.name: ids if self.length is None else padded(ids, self.length)}

    def different(self, learnt: Learnt) -> int | None:
        return len(learnt["vectors"]) if self.make == "tokens" else None

    def _means(self, block: Columns, learnt: Learnt) -> Array:
        from scipy.sparse import csr_matrix

        counts = count_known(self.tokens(block, learnt), learnt, 1)
        vectors = learnt["vectors"][len(RESERVED) :]
        rows = len(counts.offsets) - 1
        values = counts.values.astype(np.float32)
        matrix = csr_matrix((values, counts.indices, counts.offsets), (rows, len(vectors)))
        words = np.bincount(counts.rows(), counts.values, minlength=rows).astype(np.float32)
        means: Array = (matrix @ vectors) / np.maximum(words, 1)[:, None]
        return means


class Corpus:
    """The token ids of all texts in one file, read in passages of complete texts."""

    def __init__(self, partials: Iterable[Learnt], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = [np.empty(0, np.int64)]
        with path.open("wb") as file:
            for partial in partials:
                np.ascontiguousarray(partial["tokens"], np.int32).tofile(file)
                lengths.append(partial["lengths"].astype(np.int64))
        self._path = path
        self._offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        wanted = np.arange(0, self.size, _PIECE)
        self._cuts = np.unique([*np.searchsorted(self._offsets, wanted), len(self._offsets) - 1])

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._offsets[-1])

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._cuts) - 1

    def __getitem__(self, number: int) -> Passage:
        low, high = int(self._cuts[number]), int(self._cuts[number + 1])
        start, stop = int(self._offsets[low]), int(self._offsets[high])
        tokens = np.fromfile(self._path, np.int32, stop - start, offset=start * 4)
        lengths = np.diff(self._offsets[low : high + 1])
        return Passage(tokens, np.repeat(np.arange(high - low), lengths))


class Passage(NamedTuple):
    """Some texts: their concatenated tokens, and the text of each token."""

    tokens: NDArray[Any]
    texts: NDArray[Any]


_PIECE = 1 << 16


def train_vectors(corpus: Corpus, counts: NDArray[Any], plan: Plan) -> NDArray[np.float32]:
    """Train a vector for each word; a pure function of corpus, counts and plan."""
    with one_thread():
        tables = _Tables(len(counts), plan)
        draw = _Draw(counts, plan)
        size = min(_BATCH, max(1, corpus.size // _BATCHES))
        for epoch in range(plan.epochs):
            for number in draw.order(len(corpus), epoch):
                done = (epoch + draw.part) / plan.epochs
                for batch in _batches(draw.thinned(corpus[number]), plan.window, size, draw):
                    tables.learn(batch, draw.others(), plan.rate * max(0.05, 1 - done))
        vectors: NDArray[np.float32] = tables.inner.numpy()
        return vectors


class Plan(NamedTuple):
    """Settings of the training."""

    width: int
    window: int
    negative: int
    cbow: bool
    epochs: int
    rate: float
    subsample: float
    seed: int


_BATCH, _BATCHES = 2048, 64
"""Places of the corpus per step; fewer if an epoch would have less than _BATCHES steps."""


_DRAWN = 256
"""Random words per batch; together they weigh as `negative` words per pair would."""


class _Draw:
    """All random choices of the training."""

    def __init__(self, counts: NDArray[Any], plan: Plan) -> None:
        import torch

        self._chance = torch.Generator()
        self._plan = plan
        self.part = 0.0
        """The share of the epoch that is done."""
        shares = torch.from_numpy(counts / counts.sum())
        self._reach = torch.cumsum(shares**0.75, 0)
        ratio = plan.subsample / shares
        self._keep = (ratio.sqrt() + ratio).clamp(max=1.0) if plan.subsample else None

    def order(self, passages: int, epoch: int) -> Iterator[int]:
        self._chance.manual_seed(key(self._plan.seed, epoch) >> 1)
        for done, number in enumerate(self.shuffled(passages).tolist()):
            self.part = done / passages
            yield number

    def shuffled(self, count: int) -> Tensor:
        import torch

        return torch.randperm(count, generator=self._chance)

    def reach(self, count: int, window: int) -> Tensor:
        """Draw a window size per place, so that nearer words count more often."""
        import torch

        return torch.randint(1, window + 1, (count, 1), generator=self._chance)

    def others(self) -> Tensor:
        import torch

        places = torch.rand(_DRAWN, generator=self._chance, dtype=torch.float64)
        return torch.searchsorted(self._reach, places * self._reach[-1])

    def thinned(self, passage: Passage) -> tuple[Tensor, Tensor]:
        """Drop some occurrences of very frequent words."""
        import torch

        tokens = torch.from_numpy(passage.tokens.astype(np.int64))
        texts = torch.from_numpy(passage.texts)
        if self._keep is None:
            return tokens, texts
        luck = torch.rand(len(tokens), generator=self._chance, dtype=torch.float64)
        kept = luck < self._keep[tokens]
        return tokens[kept], texts[kept]


class _Batch(NamedTuple):
    words: Tensor
    """[B]"""
    near: Tensor
    """[B, 2 × window]"""
    there: Tensor
    """[B, 2 × window]: 1 where `near` has a word of the same text, within reach."""


def _batches(texts: tuple[Tensor, Tensor], window: int, size: int, draw: _Draw) -> Iterator[_Batch]:
    import torch

    tokens, owner = texts
    steps = torch.tensor([d for d in range(-window, window + 1) if d])
    for places in draw.shuffled(len(tokens)).split(size):
        at = places[:, None] + steps
        inside = at.clamp(0, len(tokens) - 1)
        there = (at == inside) & (owner[inside] == owner[places][:, None])
        there &= steps.abs() <= draw.reach(len(places), window)
        yield _Batch(tokens[places], tokens[inside], there.float())


class _Tables:
    """The two vectors of each word: as it is looked up (inner), and as it is predicted (outer)."""

    def __init__(self, words: int, plan: Plan) -> None:
        import torch

        chance = torch.Generator().manual_seed(key(plan.seed, -1) >> 1)
        self.inner = (torch.rand(words, plan.width, generator=chance) - 0.5) / plan.width
        self._outer = torch.zeros(words, plan.width)
        self._seen_inner = torch.full((words,), _EPSILON)
        self._seen_outer = torch.full((words,), _EPSILON)
        self._plan = plan

    def learn(self, batch: _Batch, others: Tensor, rate: float) -> None:
        if self._plan.cbow:
            self._learn_cbow(batch, others, rate)
        else:
            self._learn_skip_gram(batch, others, rate)

    def _learn_skip_gram(self, batch: _Batch, others: Tensor, rate: float) -> None:
        """Let each word predict every near word."""
        import torch

        hidden, targets, drawn = (
            self.inner[batch.words],
            self._outer[batch.near],
            self._outer[others],
        )
        right = _pull(torch.einsum("bd,bnd->bn", hidden, targets), 1.0) * batch.there
        weight = batch.there.sum(1, keepdim=True) * (self._plan.negative / _DRAWN)
        wrong = _pull(hidden @ drawn.T, 0.0) * weight
        toward = torch.einsum("bn,bnd->bd", right, targets) + wrong @ drawn
        outward = (right[:, :, None] * hidden[:, None, :])[batch.there > 0]
        self._move(self.inner, self._seen_inner, batch.words, toward, rate)
        near = batch.near[batch.there > 0]
        rows, pulls = torch.cat([near, others]), torch.cat([outward, wrong.T @ hidden])
        self._move(self._outer, self._seen_outer, rows, pulls, rate)

    def _learn_cbow(self, batch: _Batch, others: Tensor, rate: float) -> None:
        """Let the mean of the near words predict each word."""
        import torch

        share = batch.there / batch.there.sum(1, keepdim=True).clamp(min=1.0)
        hidden = torch.einsum("bn,bnd->bd", share, self.inner[batch.near])
        targets, drawn = self._outer[batch.words], self._outer[others]
        some = (batch.there.sum(1) > 0).float()
        right = _pull((hidden * targets).sum(1), 1.0) * some
        wrong = _pull(hidden @ drawn.T, 0.0) * (some * self._plan.negative / _DRAWN)[:, None]
        toward = right[:, None] * targets + wrong @ drawn
        inward = (share[:, :, None] * toward[:, None, :])[batch.there > 0]
        near = batch.near[batch.there > 0]
        self._move(self.inner, self._seen_inner, near, inward, rate)
        rows = torch.cat([batch.words, others])
        pulls = torch.cat([right[:, None] * hidden, wrong.T @ hidden])
        self._move(self._outer, self._seen_outer, rows, pulls, rate)

    def _move(self, table: Tensor, seen: Tensor, rows: Tensor, pulls: Tensor, rate: float) -> None:
        """Apply row-wise Adagrad: frequently updated words move less each time."""
        import torch

        touched, which = torch.unique(rows, return_inverse=True)
        total = torch.zeros(len(touched), table.shape[1]).index_add_(0, which, pulls)
        power = seen[touched] + total.square().mean(1)
        seen[touched] = power
        table[touched] += rate * total / power.sqrt()[:, None]


_EPSILON = 1e-6


def _pull(scores: Tensor, wanted: float) -> Tensor:
    """Return the gradient of the log-likelihood: `wanted` minus the predicted probability."""
    import torch

    return wanted - torch.sigmoid(scores)


# Sentence vectors


class Sentences(Feature):
    """Kind `sentences`: one vector per text, from the last layer of a transformer in a folder."""

    model: str
    """A folder as `save_pretrained` writes it: the model (safetensors) and its tokeniser."""
    pool: Literal["mean", "first"] = "mean"
    """The mean of all tokens' vectors, or the first token's."""
    length: PositiveInt = 256
    """Texts are cut to this many tokens."""
    batch: PositiveInt = 32
    """Texts per forward pass."""
    unit: bool = False
    """Scale vectors to length 1."""

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        check_text(self, names)
        if not (Path(self.model) / "config.json").is_file():
            raise DataError(
                f"feature sentences: {self.model} is no folder of a model: it has no config.json"
            )

    def stamp(self) -> str:
        """Return names, sizes and times of the model's files; hashing them would take too long."""
        files = [path for path in sorted(Path(self.model).glob("*")) if path.is_file()]
        known = [(path.name, path.stat()) for path in files]
        return " ".join(f"{name} {about.st_size} {about.st_mtime_ns}" for name, about in known)

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        texts = plain(block[self.sources[0]]).to_pylist()
        with one_thread():
            return {self.name: self._vectors(texts)}

    def _vectors(self, texts: list[str]) -> Array:
        tokeniser, model = _loaded(str(Path(self.model).resolve()))
        out = np.zeros((len(texts), model.config.hidden_size), np.float32)
        # Batch texts of similar length together, so that little of a batch is padding.
        order = np.argsort([len(text) for text in texts], kind="stable")
        for low in range(0, len(texts), self.batch):
            some = order[low : low + self.batch]
            ready = tokeniser(
                [texts[at] for at in some],
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
            )
            out[some] = self._pooled(model, ready)
        return out

    def _pooled(self, model: Any, ready: Any) -> Array:
        import torch

        with torch.inference_mode():
            states = model(**ready).last_hidden_state
            if self.pool == "first":
                vectors = states[:, 0]
            else:
                there = ready["attention_mask"].unsqueeze(-1).to(states.dtype)
                vectors = (states * there).sum(1) / there.sum(1).clamp(min=1)
            if self.unit:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            found: Array = vectors.float().numpy()
            return found


@lru_cache(maxsize=1)
def _loaded(folder: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtra("feature 'sentences'", "transformers") from error
    bars: Any = logging
    bars.disable_progress_bar()  # otherwise every worker draws a bar over ours
    try:
        tokeniser = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DataError(f"{folder}: the model cannot be loaded: {reason}") from None
    return tokeniser, model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
