"""Fetching and cleaning of the training text, without any network."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest

from rapidkda.training import corpus, tasks


def test_text_becomes_tidy_ascii() -> None:
    assert (
        corpus.clean("\n\u201cIt\u2019s caf\u00e9\u201d \u2014 so\t\n\n\n\nend\u00a0here  \n")
        == '"It\'s cafe" - so\n\nend here\n'
    )


def test_pages_give_sentences_only(tmp_path: Path) -> None:
    sentence = "This is a <b>long</b> sentence of the page that says something about a matter of some interest."
    (tmp_path / "a.html").write_text(
        f"<html><head><title>{'Title ' * 20}</title></head><nav>{'Menu entry ' * 20}</nav><h1>Short</h1>"
        f"<p>{sentence}</p><pre>{'int code = 0; ' * 20}</pre><td>{'1 | 2 ; ' * 20}</td></html>"
    )
    (tmp_path / "print.html").write_text(f"<p>{sentence}</p>")
    assert list(corpus._pages("*.html")(tmp_path)) == [sentence.replace("<b>", "").replace("</b>", "")]


def test_novels_are_read_from_serialised_vectors(tmp_path: Path) -> None:
    def vector(*lines: str) -> bytes:
        strings = (b"\0\x04\0\x09" + len(line).to_bytes(4, "big") + line.encode() for line in lines)
        packed = zlib.compress(b"X\n header " + b"".join(strings) + b"\0\0\0\x01")
        return len(packed).to_bytes(4, "big") + packed

    place = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    place.mkdir(parents=True)
    (place / "Rdata.rdb").write_bytes(vector("EMMA", "", "Emma Woodhouse, handsome") + vector("Persuasion"))
    assert list(corpus._novels(tmp_path)) == ["EMMA\n\nEmma Woodhouse, handsome", "Persuasion"]


def test_a_package_with_another_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"package")
    right = hashlib.sha256(b"package").hexdigest()
    assert corpus.fetch("https://nowhere.invalid/pool/a.deb", right, tmp_path) == tmp_path / "a.deb"
    with pytest.raises(ValueError, match="must have sha256 0000"):
        corpus.fetch("https://nowhere.invalid/pool/a.deb", "0" * 64, tmp_path)


def test_sources_are_told_apart_and_none_is_the_held_out_text() -> None:
    assert len({source.sha256 for source in corpus.SOURCES}) == len(corpus.SOURCES)
    assert all(len(source.sha256) == 64 and source.licence for source in corpus.SOURCES)
    assert not any("miscfiles" in source.url for source in corpus.SOURCES)  # the package that holds the Constitution
    assert tasks.held_out_text().startswith("The Constitution")
