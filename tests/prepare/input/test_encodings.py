"""pkm/prepare/input/encodings.py: a page is read as it declares itself, and a byte that does not fit stays a local matter."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input.encodings import marked_encoding, page_text

FRENCH = "<p>Un café à Besançon, « déjà » – 5 €.</p>"
OTHERS = {
    "iso-8859-1": ("cp1252", FRENCH),
    "ISO-8859-15": ("iso-8859-15", "<p>Un café à Besançon, déjà : 5 €.</p>"),
    "windows-1250": ("cp1250", "<p>Příliš žluťoučký kůň úpěl ďábelské ódy.</p>"),
    "windows-1251": ("cp1251", "<p>Съешь ещё этих мягких французских булок.</p>"),
    "koi8-r": ("koi8-r", "<p>Съешь ещё этих мягких французских булок.</p>"),
    "iso-8859-7": ("iso-8859-7", "<p>Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.</p>"),
    "gb2312": ("gb18030", "<p>新闻：镕基说，价格会上涨。</p>"),
    "big5": ("big5", "<p>新聞：部長說，價格會上漲。</p>"),
    "x-sjis": ("cp932", "<p>ニュース：大臣は①価格が上がると述べた。</p>"),
    "euc-jp": ("euc-jp", "<p>ニュース：大臣は価格が上がると述べた。</p>"),
    "iso-2022-jp": ("iso2022_jp", "<p>ニュース：大臣は価格が上がると述べた。</p>"),
    "ks_c_5601-1987": ("cp949", "<p>뉴스: 장관은 값이 오른다고 말했다. 똠방각하</p>"),
    "utf-16": ("utf-16-le", FRENCH),
    "utf-16be": ("utf-16-be", FRENCH),
}


def header(label: str) -> str:
    return f"text/html; charset={label}"


@pytest.mark.parametrize("label", OTHERS)
def test_labels_mean_what_they_mean_on_the_web(label):
    codec, text = OTHERS[label]
    assert page_text(text.encode(codec), header(label)) == text
    assert page_text(text.encode(codec), f'text/html;Charset = "{label.upper()}"; x=y') == text
    if not label.startswith("utf-16"):
        for declared in (
            f"<meta charset={label}>",
            f'<meta http-equiv="Content-Type" content="text/html; charset={label}">',
        ):
            assert page_text((declared + text).encode(codec), "text/html") == declared + text
        declared = f'<?xml version="1.0" encoding="{label}"?>'
        assert page_text((declared + text).encode(codec), "application/xhtml+xml") == declared + text


@pytest.mark.parametrize("label", ["utf-8", "UTF8", "iso-8859-1", "", "no-such-thing"])
@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 400), byte=st.sampled_from([b"\xe9", b"\xff", b"\x80", b"\xc3", b"\xed\xa0\xbd"]))
def test_a_bad_byte_in_utf_8_stays_a_local_matter(label, position, byte):
    """Whatever the page declares: servers say ISO-8859-1 of all that they send."""
    text = FRENCH * 6
    content = text.encode()
    position = min(position, len(content))
    found = page_text(content[:position] + byte + content[position:], header(label) if label else "text/html")
    assert "Ã" not in found and "�" in found
    assert found.count("café") >= 5
    assert len(found) - len(text) <= 5


@pytest.mark.parametrize("end", range(1, 9))
def test_a_page_cut_inside_a_character_is_read_up_to_it(end):
    content = (FRENCH + "é€\U0001f600").encode()[:-end]
    for content_type in (header("utf-8"), "text/html"):
        assert page_text(content, content_type) == content.decode("utf-8", "replace")


def test_what_is_declared_as_utf_8_is_read_so_even_with_nothing_right_in_it():
    assert page_text(b"<p>caf\xe9</p>", header("utf-8")) == "<p>caf�</p>"
    assert page_text(b"<meta charset=utf-8><p>caf\xe9</p>", "text/html") == "<meta charset=utf-8><p>caf�</p>"


@pytest.mark.parametrize("label", [label for label in OTHERS if label != "iso-2022-jp"])
def test_a_bad_byte_in_another_encoding_stays_a_local_matter(label):
    codec, text = OTHERS[label]
    content = (text * 3).encode(codec)
    # 0xff begins no character in any of them; single-byte encodings have another for it, or none.
    found = page_text(content + b"\xff", header(label))
    assert found.startswith(text * 3) and len(found) == len(text) * 3 + 1
    cut = page_text(content[:-1], header(label))
    assert cut[:-2] == (text * 3)[: len(cut) - 2]


def test_the_header_goes_before_the_page_and_a_mark_before_both():
    cyrillic = "<meta charset=koi8-r><p>Съешь</p>"
    assert page_text(cyrillic.encode("cp1251"), header("windows-1251")) == cyrillic
    assert page_text(cyrillic.encode("koi8-r"), header("no-such-thing")) == cyrillic
    for mark, codec in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
    ):
        assert page_text(mark + cyrillic.encode(codec), header("windows-1251")) == cyrillic
    assert page_text(codecs.BOM_UTF8 + b"caf\xc3\xa9 \xe9", header("windows-1251")) == "café �"


def test_what_can_be_read_as_ascii_is_not_utf_16_whatever_it_declares():
    for content_type in (header("utf-16"), "text/html"):
        page = '<meta charset="utf-16"><p>café</p>'
        assert page_text(page.encode(), content_type) == page


def test_without_a_declaration_it_is_utf_8_or_the_webs_default():
    assert page_text(FRENCH.encode("cp1252"), "text/html") == FRENCH
    assert page_text(FRENCH.encode("cp1252"), "", "utf-8") == FRENCH.encode("cp1252").decode("utf-8", "replace")
    # U+FFFD in a page is a character like others, not a sign that it is not UTF-8.
    assert page_text("<p>��� already</p>".encode(), "text/html") == "<p>��� already</p>"


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=60),
    label=st.text(max_size=12)
    | st.sampled_from(["utf-7", "idna", "unicode_escape", "hz-gb-2312", "replacement", "x-user-defined", *OTHERS]),
)
def test_any_bytes_with_any_declaration_are_a_text_that_utf_8_can_hold(content, label):
    page_text(content, header(label)).encode("utf-8")
    page_text(f"<meta charset='{label}'>".encode() + content, "text/html").encode("utf-8")


def test_marks_are_told_from_damage():
    assert marked_encoding(codecs.BOM_UTF16_LE + "新闻新闻新闻".encode("utf-16-le")) == "utf-16"
    assert marked_encoding(codecs.BOM_UTF16_LE + b"plain text") is None
    assert marked_encoding(codecs.BOM_UTF8 + b"text") is None
    assert marked_encoding(b"") is None
