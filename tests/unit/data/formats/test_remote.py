"""Files on web servers that lack features or fail, and files in archives."""

from __future__ import annotations

import gzip
import os
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec.asyn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echelon.core.errors import DataError, MissingExtra, UserError
from echelon.data.formats import remote
from echelon.data.formats.files import sources
from echelon.data.formats.records import Input
from echelon.data.formats.remote import Unreachable
from echelon.data.prepare import prepare
from echelon.data.prepare.recipe import load_recipe

from .reading import collect
from .serving import Server, serving

_ROWS = 5000
_TABLES = ("a.csv", "a.csv.gz", "a.csv.zst", "a.parquet")


@pytest.fixture(autouse=True, scope="module")
def _loop() -> None:
    """The thread of fsspec stays, once there is one."""
    fsspec.asyn.get_loop()


@pytest.fixture(autouse=True)
def _forgetting() -> Iterator[None]:
    yield
    remote.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    served = tmp_path / "served"
    served.mkdir()
    lines = b"n,t\n" + b"".join(b"%d,text %d\n" % (i, i * 7919) for i in range(_ROWS))
    (served / "a.csv").write_bytes(lines)
    (served / "a.csv.gz").write_bytes(gzip.compress(lines))
    (served / "a.csv.zst").write_bytes(pa.compress(lines, "zstd", asbytes=True))
    table = pa.table({"n": range(_ROWS), "t": [f"text {i * 7919}" for i in range(_ROWS)]})
    pq.write_table(table, served / "a.parquet", row_group_size=_ROWS // 4)
    with zipfile.ZipFile(served / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TABLES:
            archive.write(served / name, f"in/{name}")
    return served


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize("name", _TABLES)
@pytest.mark.parametrize("way", ["plain", "whole", "chunked"])
def test_a_server_may_lack_ranges_and_lengths(server: Server, way: str, name: str) -> None:
    result = collect(f"{server.url}/{way}/{name}", size=1 << 15)
    assert result.column("n") == list(range(_ROWS))
    assert not result.bad


@pytest.mark.parametrize("way", ["plain", "whole", "chunked"])
def test_archives_lie_on_servers_too(server: Server, way: str) -> None:
    for name in ("a.csv", "a.parquet"):
        result = collect(f"zip://in/{name}::{server.url}/{way}/all.zip")
        assert result.column("n") == list(range(_ROWS))


def test_what_cannot_be_had_in_parts_is_fetched_once(server: Server) -> None:
    collect(f"{server.url}/chunked/a.parquet", size=1 << 14)
    asked = [path for method, path in server.asked if method == "GET"]
    opened = sum(method == "HEAD" for method, _ in server.asked)
    assert len(asked) <= opened + 1, "of those that only ask for the length, one fetched it"


def test_a_large_file_comes_from_a_server_without_ranges(folder: Path, server: Server) -> None:
    content = b"n\n" + b"".join(b"%0100d\n" % i for i in range(60_000))
    assert len(content) > 6_000_000, "more than fsspec asks for at once"
    (folder / "large.csv").write_bytes(content)
    assert collect(f"{server.url}/whole/large.csv").column("n") == list(range(60_000))


def test_a_file_that_is_read_again_may_have_changed(folder: Path, server: Server) -> None:
    for rows in ([1, 2], [3]):
        pq.write_table(pa.table({"n": rows}), folder / "b.parquet")
        assert collect(f"{server.url}/chunked/b.parquet").column("n") == rows


def test_nothing_that_was_fetched_is_kept(server: Server) -> None:
    before = _temporary()
    collect(f"{server.url}/chunked/a.parquet")
    assert len(_temporary()) == len(before) + 1
    remote.forget()
    assert _temporary() == before


def _temporary() -> list[str]:
    """Open files that have no name any more."""
    found = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    links = [str(one.readlink()) for one in found if one.is_symlink()]
    return [link for link in links if link.endswith("(deleted)") and "memfd" not in link]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("way", "name", "why"),
    [
        ("500", "a.csv", "the server answers 500: Internal Server Error"),
        ("403", "a.csv", "the server answers 403: it may not be read"),
        ("403", "a.parquet", "the server answers 403"),
        ("plain", "gone.csv", "the server answers 404: there is no such file"),
        *(("short", name, "Not enough data to satisfy content length") for name in _TABLES),
        *(("closing", name, "breaks off after") for name in _TABLES),
    ],
)
def test_what_cannot_be_had_ends_it_in_one_line(
    server: Server, tmp_path: Path, way: str, name: str, why: str, workers: int
) -> None:
    url = f"{server.url}/{way}/{name}"
    recipe = {"read": url, "keep": ["n"], "write": {"folder": str(tmp_path / "out")}}
    with pytest.raises(DataError) as caught:
        prepare(recipe, workers=workers)
    message = str(caught.value)
    assert message.startswith(f"{url}: ")
    assert why in message
    assert "\n" not in message
    assert [one.name for one in tmp_path.iterdir()] == ["served"]


def test_a_worker_that_cannot_reach_a_file_ends_it(folder: Path) -> None:
    """The parent looks at the end of a parquet alone, workers at the rest."""
    with serving(folder) as server:
        url = f"{server.url}/plain/a.parquet"
        block = next(iter(collect(url).blocks))
    from echelon.data.formats import parse

    with pytest.raises(Unreachable, match=r"a\.parquet: cannot be opened: Connect call failed"):
        parse(block, pa.schema([("n", pa.int64())]))


def test_who_does_not_answer_is_told_with_the_reason(server: Server) -> None:
    gone = Server(server.folder)
    gone.server_close()
    for name in ("a.csv", "*.csv", ""):
        with pytest.raises(Unreachable, match="cannot be listed: Connect call failed"):
            sources([Input(path=f"{gone.url}/plain/{name}")])


def test_an_image_or_text_out_of_reach_is_not_a_bad_one(folder: Path) -> None:
    for kind in ("images", "text"):
        (folder / kind).mkdir()
        (folder / kind / ("1.png" if kind == "images" else "1.txt")).write_bytes(b"x")
    from echelon.data.formats import blocks, infer, parse

    with serving(folder) as server:
        found = list(blocks([Input(path=f"{server.url}/plain/{k}/") for k in ("images", "text")]))
    assert len(found) == 2
    for block in found:
        schema = infer(block, {})
        assert schema is not None
        with pytest.raises(Unreachable):
            parse(block, schema)


def test_folders_and_patterns_of_a_server_are_its_links(folder: Path, server: Server) -> None:
    (folder / "deep").mkdir()
    for name in ("b.csv", "c.csv", ".d.csv"):
        (folder / "deep" / name).write_text("n\n1\n")
    for path in ("deep/", "deep/*.csv"):
        found = sources([Input(path=f"{server.url}/plain/{path}")])
        assert [Path(one.file).name for one in found] == ["b.csv", "c.csv"]


@pytest.mark.parametrize("way", ["plain", "404"])
def test_an_archive_that_is_not_there_is_told_with_the_reason(server: Server, way: str) -> None:
    url = f"{server.url}/{way}/gone.zip"
    with pytest.raises(DataError, match=f"{url}: cannot be opened: the server answers 404: there"):
        sources([Input(path=f"zip://a.csv::{url}")])
    with pytest.raises(DataError, match=r"gone\.zip: cannot be opened: there is no such file"):
        sources([Input(path="zip://a.csv::gone.zip")])


def test_what_is_no_archive_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv: not a whole zip archive: File is not a zip"):
        sources([Input(path=f"zip://a.csv::{folder}/a.csv")])


def test_a_damaged_file_of_an_archive_is_damaged(folder: Path) -> None:
    content = bytearray((folder / "all.zip").read_bytes())
    with zipfile.ZipFile(folder / "all.zip") as archive:
        at = archive.getinfo("in/a.csv").header_offset
    content[at + 20_000 : at + 20_100] = bytes(100)
    (folder / "all.zip").write_bytes(content)
    result = collect(f"zip://in/a.csv::{folder}/all.zip")
    assert "damaged" in result.messages()[-1]


def test_a_packed_tar_is_an_archive_too(folder: Path, server: Server) -> None:
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        archive.add(folder / "a.csv", "in/a.csv")
    for place in (folder, f"{server.url}/plain", f"{server.url}/whole"):
        assert len(collect(f"tar://in/a.csv::{place}/all.tar.gz").rows) == _ROWS


def _idx(folder: Path, packed: str = "") -> None:
    images = struct.pack(">4B3I", 0, 0, 8, 3, 3, 2, 2) + bytes(12)
    labels = struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([5, 0, 7])
    (folder / "t-images-idx3-ubyte").write_bytes(images)
    name = f"t-labels-idx1-ubyte{packed}"
    (folder / name).write_bytes(gzip.compress(labels) if packed else labels)
    with zipfile.ZipFile(folder / "idx.zip", "w") as archive:
        for inner in ("", "deep/"):
            for one in ("t-images-idx3-ubyte", name):
                archive.write(folder / one, inner + one)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    "place", ["{url}/plain/{}", "zip://{}::{folder}/idx.zip", "zip://deep/{}::{url}/whole/idx.zip"]
)
def test_labels_lie_beside_images_wherever_these_are(
    folder: Path, server: Server, place: str, packed: str
) -> None:
    _idx(folder, packed)
    url = place.format("t-images-idx3-ubyte", url=server.url, folder=folder)
    assert collect(url).column("y") == [5, 0, 7]
    stamp = sources([Input(path=url)])[0].stamp
    assert f"t-labels-idx1-ubyte{packed}" in stamp


def test_images_without_labels_are_read_from_a_server(folder: Path, server: Server) -> None:
    _idx(folder)
    (folder / "t-labels-idx1-ubyte").unlink()
    assert collect(f"{server.url}/plain/t-images-idx3-ubyte").schema.names == ["x"]


def test_a_server_in_trouble_does_not_cost_the_labels(server: Server) -> None:
    with pytest.raises(Unreachable, match=r"t-labels-idx1-ubyte: cannot be reached: .* 500"):
        remote.beside(f"{server.url}/500/t-images-idx3-ubyte", ["t-labels-idx1-ubyte"])
    assert remote.beside(f"{server.url}/403/t-images-idx3-ubyte", ["t-labels-idx1-ubyte"]) is None


def test_without_aiohttp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _lacking(monkeypatch, "aiohttp")
    for url in ("http://127.0.0.1/a.csv", "zip://a.csv::https://127.0.0.1/a.zip"):
        with pytest.raises(MissingExtra, match=r"the URL http.* needs an extra: .*echelon\[remote"):
            sources([Input(path=url)])


@pytest.mark.parametrize(("kind", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs")])
def test_other_packages_are_named(monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"{kind}://b/a.csv needs a package: pip install {package}"):
        sources([Input(path=f"{kind}://b/a.csv")])


def test_what_fsspec_itself_lacks_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(UserError, match=r'needs a package: .*"paramiko"'):
        sources([Input(path="sftp://b/a.csv")])


def _lacking(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for name in ("http", "https"):
        monkeypatch.delitem(_registry, name, raising=False)


def test_an_archive_is_looked_for_beside_the_recipe(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipe.yaml").write_text(
        "read: [zip://in/a.csv::all.zip, zip://in/*.gz::here.zip, zip://a::http://b/all.zip]\n"
        "keep: [n]\nwrite: {folder: out}\n"
    )
    monkeypatch.chdir(tmp_path)
    read = load_recipe(Path("served/recipe.yaml")).recipe.read
    assert [one.path for one in read] == [
        "zip://in/a.csv::served/all.zip",
        "zip://in/*.gz::here.zip",
        "zip://a::http://b/all.zip",
    ]
    assert len(collect(read[0]).rows) == _ROWS
