"""The convolutional network for texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.textcnn import StrongestMatches, TextCNN, TextCNNOptions


def textcnn(vocabulary: int = 50, outputs: int = 3, **values: Any) -> TextCNN:
    chosen = {"width": 8, "filters": 5, **values}
    return TextCNN(vocabulary, outputs, TextCNNOptions.model_validate(chosen))


def texts(*lengths: int, longest: int | None = None) -> Tensor:
    """Random texts of these lengths, padded with 0."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.zeros(len(lengths), longest or max(lengths), dtype=torch.long)
    for row, length in zip(padded, lengths, strict=True):
        row[:length] = torch.randint(1, 50, (length,), generator=generator)
    return padded


def test_it_has_the_size_of_the_paper() -> None:
    with torch.device("meta"):
        options = TextCNNOptions(width=300, filters=100, windows=(3, 4, 5))
        model = TextCNN(20_000, 2, options)
    words = 20_000 * 300
    windows = sum(100 * 300 * size + 100 for size in (3, 4, 5))
    assert sum(p.numel() for p in model.parameters()) == words + windows + 300 * 2 + 2


def test_texts_of_any_length_are_taken() -> None:
    model = textcnn().eval()
    for length in (1, 2, 5, 40):
        scores = model(texts(length, length))
        assert scores.shape == (2, 3)
        assert bool(torch.isfinite(scores).all())


def test_an_empty_text_has_scores_too() -> None:
    assert bool(torch.isfinite(textcnn()(torch.zeros(2, 4, dtype=torch.long))).all())


def test_scores_of_a_text_do_not_depend_on_the_others_of_its_batch() -> None:
    model = textcnn().eval()
    alone, padded = texts(4), texts(4, longest=30)
    torch.testing.assert_close(model(alone), model(padded))
    together = model(texts(4, 17, 2))
    torch.testing.assert_close(together[:1], model(alone))


def test_padding_does_not_count_even_where_nothing_matches() -> None:
    model = textcnn(activation="leaky_relu").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "table" in name:
                p.abs_()
            elif "convolutions" in name and p.ndim == 3:
                p.abs_().neg_()  # every word is against every pattern: silence is the best match
    torch.testing.assert_close(model(texts(4)), model(texts(4, longest=30)))


def test_gradients_do_not_depend_on_padding_either() -> None:
    found: list[list[Tensor]] = []
    for longest in (6, 25):
        torch.manual_seed(0)
        model = textcnn(dropout=0.0)
        torch.autograd.backward(model(texts(6, 3, longest=longest)).square().sum())
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(short, long)


def test_a_pattern_is_found_anywhere() -> None:
    model = textcnn(windows=(2,)).eval()
    phrase = [7, 9]
    early = torch.tensor([[*phrase, 0, 0, 0, 0]])
    late = torch.tensor([[0, 0, 0, *phrase, 0]])
    torch.testing.assert_close(model(early), model(late))


def test_padding_is_zero_and_stays_so() -> None:
    model = textcnn()
    table = model.get_parameter("0.table.weight")
    assert bool((table[0] == 0).all())
    assert table[1:].abs().max().item() <= 0.05
    torch.autograd.backward(model(texts(5, 2)).sum())
    assert table.grad is not None
    assert bool((table.grad[0] == 0).all())
    assert bool((table.grad[1:] != 0).any())


def test_options_choose_the_parts() -> None:
    model = textcnn(windows=(2, 6), filters=9, activation="gelu", dropout=0.25)
    matches = next(part for part in model.modules() if isinstance(part, StrongestMatches))
    sizes = [(c.out_channels, *c.kernel_size) for c in matches.convolutions]  # type: ignore[misc]
    assert sizes == [(9, 2), (9, 6)]
    kinds = {type(part) for part in model.modules()}
    assert nn.GELU in kinds
    assert nn.Dropout in kinds
    assert nn.Dropout not in {type(part) for part in textcnn(dropout=0.0).modules()}


def test_words_and_matches_are_left_out_in_training_only() -> None:
    tokens = texts(20, 20)
    for words, matches in ((0.0, 0.5), (0.5, 0.0)):
        model = textcnn(dropout=matches, word_dropout=words).eval()
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))


def test_left_out_words_count_as_padding() -> None:
    model = textcnn(dropout=0.0, word_dropout=0.999)
    nothing = model.eval()(torch.zeros(1, 3, dtype=torch.long))
    torch.testing.assert_close(model.train()(texts(3)), nothing)
