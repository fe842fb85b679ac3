"""The training text: free English prose from Debian packages, fetched, checked and cleaned the same way every time.

The result is ASCII, documents separated by byte 0. Needs `dpkg-deb` to unpack, and an amd64 machine for the King James
Bible, whose package is read by its own program.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
import tempfile
import unicodedata
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

MAIN = "https://deb.debian.org/debian/pool/main/"
SECURITY = "https://deb.debian.org/debian-security/pool/updates/main/"
SHORTEST = 400  # characters of a document that is kept
READER = "https://deb.debian.org/debian/pool/main/b/bible-kjv/bible-kjv_4.38_amd64.deb"
READER_SHA256 = "75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d"
BLOCKS = frozenset(
    ("p", "div", "li", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "tr", "table", "ul", "ol", "dl", "section", "br")
)
SILENT = frozenset(("script", "style", "head", "nav", "footer", "pre"))
WHOLE_BOOK = "print.html"  # repeats the other pages of its book
RUST_BOOKS = ("book", "edition-guide", "nomicon", "reference", "rust-by-example", "rustc")
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u00a0", "''\"\"--. ")

Extract = Callable[[Path], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Source:
    """One package.

    Attributes:
        title: what the text is.
        url: of the Debian package.
        sha256: of the package.
        licence: of the text.
        extract: from the unpacked package to its documents.
    """

    title: str
    url: str
    sha256: str
    licence: str
    extract: Extract


def build(out: Path, downloads: Path) -> dict[str, int]:
    """Write the corpus to `out`, with packages cached in `downloads`; returns the characters of each source.

    Raises ValueError when a package has another checksum than the one it should have.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    with out.open("wb") as file:
        for source in SOURCES:
            with tempfile.TemporaryDirectory() as folder:
                _unpack(fetch(source.url, source.sha256, downloads), Path(folder))
                if source.title == BIBLE:
                    _unpack(fetch(READER, READER_SHA256, downloads), Path(folder))
                documents = [text for text in map(clean, source.extract(Path(folder))) if len(text) >= SHORTEST]
            file.writelines(text.encode("ascii") + b"\0" for text in documents)
            sizes[source.title] = sum(map(len, documents))
    return sizes


def fetch(url: str, sha256: str, folder: Path) -> Path:
    """A file with the given checksum, downloaded unless it is there."""
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        urllib.request.urlretrieve(url, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} must have sha256 {sha256}, got {found}")
    return path


def clean(text: str) -> str:
    """ASCII, no trailing spaces, at most one empty line in a row."""
    text = unicodedata.normalize("NFKD", text.translate(QUOTES)).encode("ascii", "ignore").decode()
    text = re.sub(r"[^\n\x20-\x7e]", " ", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Prose(HTMLParser):
    """The text of a page without code, navigation and style, one line a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in SILENT
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in SILENT
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._silent <= 0:
            self.pieces.append(re.sub(r"\s+", " ", data))


def _prose(page: str) -> str:
    """Lines of a page that read like sentences: links, headers and tables of symbols go."""
    parser = _Prose()
    parser.feed(page)
    lines = (line.replace("\u00b6", "").strip() for line in "".join(parser.pieces).split("\n"))
    return "\n\n".join(line for line in lines if len(line) >= 60 and _letters(line) > 0.7)


def _letters(line: str) -> float:
    return sum(c.isalpha() or c == " " for c in line) / len(line)


def _pages(*patterns: str) -> Extract:
    def extract(folder: Path) -> Iterator[str]:
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            if path.is_file() and not path.is_symlink() and path.name != WHOLE_BOOK:
                yield _prose(path.read_text("utf-8", errors="ignore"))

    return extract


def _dictionary(name: str) -> Extract:
    def extract(folder: Path) -> Iterator[str]:
        yield gzip.decompress((folder / f"usr/share/dictd/{name}.dict.dz").read_bytes()).decode("utf-8", "ignore")

    return extract


def _novels(folder: Path) -> Iterator[str]:
    """Strings of R's serialised vectors of lines: a header word, a length, the bytes."""
    data = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while data:
        stream = zlib.decompressobj()
        vector = stream.decompress(data[4:])
        data = stream.unused_data
        lines, place = [], vector.index(b"\0\x04\0\x09")
        while vector[place : place + 4] == b"\0\x04\0\x09":
            size = int.from_bytes(vector[place + 4 : place + 8], "big")
            lines.append(vector[place + 8 : place + 8 + size].decode("utf-8", "ignore"))
            place += 8 + size
        yield "\n".join(lines)


def _bible(folder: Path) -> Iterator[str]:
    program = [str(folder / "usr/bin/bible"), "-f", "-l", "0", "-p", str(folder / "usr/lib"), "gen1:1-rev22:21"]
    yield subprocess.run(program, capture_output=True, text=True, check=True).stdout


def _unpack(package: Path, folder: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


BIBLE = "The King James Bible"
SOURCES = (
    Source(
        BIBLE,
        f"{MAIN}b/bible-kjv/bible-kjv-text_4.38_all.deb",
        "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        "public domain",
        _bible,
    ),
    Source(
        "Jane Austen's six novels",
        f"{MAIN}r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        "public domain (the package around them: MIT)",
        _novels,
    ),
    Source(
        "The Devil's Dictionary, Ambrose Bierce",
        f"{MAIN}d/dict-devil/dict-devil_1.0-13.1_all.deb",
        "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        "public domain",
        _dictionary("devil"),
    ),
    Source(
        "The Jargon File 4.4.7",
        f"{MAIN}d/dict-jargon/dict-jargon_4.4.7-3.1_all.deb",
        "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        "public domain",
        _dictionary("jargon"),
    ),
    Source(
        "Python 3.11 documentation",
        f"{SECURITY}p/python3.11/python3.11-doc_3.11.2-6+deb12u9_all.deb",
        "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        "PSF License Version 2",
        _pages("usr/share/doc/python3.11/html/*/*.html"),
    ),
    Source(
        "PostgreSQL 15 documentation",
        f"{SECURITY}p/postgresql-15/postgresql-doc-15_15.20-0+deb12u1_all.deb",
        "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        "PostgreSQL License",
        _pages("usr/share/doc/postgresql-doc-15/html/*.html"),
    ),
    Source(
        "SQLite 3.40 documentation",
        f"{MAIN}s/sqlite3/sqlite3-doc_3.40.1-2+deb12u2_all.deb",
        "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        "public domain",
        _pages("usr/share/doc/sqlite3/**/*.html"),
    ),
    Source(
        "Apache HTTP Server 2.4 documentation",
        f"{SECURITY}a/apache2/apache2-doc_2.4.71-1~deb12u1_all.deb",
        "a7b3d1131c1c63dbf9999b28e75f9a133d30f70492b419936bd51759ac77a01f",
        "Apache License 2.0",
        _pages("usr/share/doc/apache2-doc/manual/en/**/*.html"),
    ),
    Source(
        "Django 3.2 documentation",
        f"{SECURITY}p/python-django/python-django-doc_3.2.25-0+deb12u7_all.deb",
        "87307f067916df72e17180d35b7cde5c7ea6080336cda518efd7f6e66988a7ca",
        "BSD 3-Clause",
        _pages("usr/share/doc/python-django-doc/html/**/*.html"),
    ),
    Source(
        "SQLAlchemy 1.4 documentation",
        f"{MAIN}s/sqlalchemy/python-sqlalchemy-doc_1.4.46+ds1-1_all.deb",
        "8805c3167ef75278ac6fd58ed9856321c2b2e3a7e441edba84b2eb955216d0fd",
        "MIT",
        _pages("usr/share/doc/python-sqlalchemy-doc/html/**/*.html"),
    ),
    Source(
        "The Rust books, 1.63",
        f"{MAIN}r/rustc/rust-doc_1.63.0+dfsg1-2_all.deb",
        "96ef96fe6df87d939ca713bd7df3d15c2b778ccb892eca025c4ee504146f697b",
        "MIT or Apache License 2.0",
        _pages(*(f"usr/share/doc/rust-doc/html/{book}/**/*.html" for book in RUST_BOOKS)),
    ),
    Source(
        "LLVM 14 documentation",
        f"{MAIN}l/llvm-toolchain-14/llvm-14-doc_14.0.6-12_all.deb",
        "d83d576ccf39dd9c698f983677f5569284cb4d55f084dd135859a73d31910b1a",
        "Apache License 2.0 with LLVM exceptions",
        _pages("usr/share/doc/llvm-14-doc/html/*.html"),
    ),
    Source(
        "Node.js 18 documentation",
        f"{SECURITY}n/nodejs/nodejs-doc_18.20.4+dfsg-1~deb12u3_all.deb",
        "d2fbd4f3aecccea9d901a03842ef8380379e0d33010a48af5e797ed68ae874ce",
        "MIT",
        _pages("usr/share/doc/nodejs/api/*.html"),
    ),
)
