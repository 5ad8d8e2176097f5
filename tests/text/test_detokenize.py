import pytest

from pkm.text.moses import detokenize, tokenize


@pytest.mark.parametrize(
    "text",
    [
        'He said "no," and left (at once).',
        "It isn't the dog's; it cost $5.00, or 5%!",
        "The Jones' house is in the U.S. now.",
        "Mr. Smith's 1,000 dogs... and cats",
        'One "quoted" and another "pair" of them.',
        "¿Qué? [sic] {so}",
        "中文字符",
    ],
)
def test_tokens_of_ordinary_text_come_back_as_the_text(text):
    assert detokenize(tokenize(text)) == text
    assert detokenize(tokenize(text, escape=True)) == text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("state @-@ of @-@ the @-@ art", "state-of-the-art"),
        ("&amp;lt; &#91; x &#93; &bar;", "&lt; [x] |"),
        ("<p> a tag , left alone </p>", "<p> a tag , left alone </p>"),
        ("' single ' and ' next", "'single' and 'next"),
        ("cars ' wheels", "cars' wheels"),
        ("„ low “ quotes", "„low“ quotes"),
        ("a 中 文 b 한 국", "a 中文 b 한국"),
        ("he 's there , 's there", "he's there, 's there"),
        ("€ 5 and £ ( 6 )", "€5 and £(6)"),
        ("   ", "   "),
        ("", ""),
    ],
)
def test_rules_of_the_detokenizer(tokens, text):
    assert detokenize(tokens) == text
