"""The page of errors, held against the code: each text of the page is one that the backend can give, and each error that
the backend has is on the page."""

import re

import pytest

from support.paths import ROOT

ANY = "…"
#: Literals of Rust, and what may hide a quote.
TOKEN = re.compile(r"""//[^\n]*|r#*"[^"]*"#*|'(?:\\.|[^\\'])'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def literals(code: str) -> set[str]:
    """The string literals, with `…` for what is filled in."""
    return {as_form(match[1]) for match in TOKEN.finditer(code) if match[1] is not None}


def as_form(text: str) -> str:
    text = re.sub(r"\\\n\s*", "", text).replace('\\"', '"').replace("\\\\", "\\")
    text = re.sub(r"\{[^{}]*\}", ANY, text.replace("{{", "\0").replace("}}", "\1"))
    return text.replace("\0", "{").replace("\1", "}")


def pattern(text: str) -> re.Pattern:
    """Matches texts that have anything in place of each `…`, which are groups."""
    return re.compile("(.*)".join(map(re.escape, text.split(ANY))), re.DOTALL)


SOURCES = [file for folder in ("src", "triton-sys/src") for file in (ROOT / folder).rglob("*.rs")]
CODE = [file.read_text().split("#[cfg(test)]\nmod ")[0] for file in SOURCES]
FORMS = set().union(*map(literals, CODE))
#: Forms with words of their own around what is filled in.
FRAMES = [form for form in FORMS if ANY in form and re.search(r"\w", form.replace(ANY, ""))]


def is_given(text: str) -> bool:
    """Whether the code has a form that gives this text, where a form may be filled in with others."""
    if not re.search(r"[^\W\d]", text.replace(ANY, "")):
        return True
    if any(pattern(text).fullmatch(form) for form in FORMS):
        return True
    fillings = (pattern(frame).fullmatch(text) for frame in FRAMES)
    return any(match and all(map(is_given, match.groups())) for match in fillings)


def errors() -> list[str]:
    """The forms of all errors with a text of their own."""
    attribute = re.compile(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
    return [as_form(text) for code in CODE for text in attribute.findall(code)]


def documented() -> list[str]:
    """The texts of the page's tables that come from the backend."""
    page = (ROOT / "docs" / "errors.md").read_text()
    sections = re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]
    ours = [section for section in sections if "core" not in section.splitlines()[0]]
    rows = [row for section in ours for row in re.findall(r"^\| (?!code|text|Triton)(.*\S) \|$", section, re.MULTILINE)]
    cells = [re.sub(r"^[A-Z_]+ \| ", "", row) for row in rows if "`" in row]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell.split(" | ")[0])]


def is_documented(form: str) -> bool:
    return any(pattern(text).fullmatch(form) or pattern(form).search(text) for text in documented())


@pytest.mark.parametrize("text", documented())
def test_a_documented_text_is_one_that_the_code_gives(text):
    assert is_given(text)


@pytest.mark.parametrize("form", errors())
def test_an_error_of_the_code_is_documented(form):
    assert is_documented(form)


def test_other_texts_are_told_apart():
    for text in ("input '…' is absent", "parameter '…' is '…', but … was expected", "… state slots of … bits: …"):
        assert not is_given(text), text
    for form in ("input '…' is absent", "the pool of … is closed"):
        assert not is_documented(form), form
    assert len(documented()) > 70 and len(errors()) > 70
