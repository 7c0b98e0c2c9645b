"""The page of errors, held against the code: each text of the page is one that the backend can give, and each error of the
backend is on the page or says itself what to do."""

import re

import pytest

from support.paths import ROOT

ANY = "…"
#: How the errors begin that the page leaves out, because their text says what to do or names the value that is wrong.
LEFT_OUT = """\
the stateful backend panicked
… cannot be converted as parameter
… was converted, and the check of the conversion failed
the graphs in … cannot be joined as parameter
the graphs in … were joined, and the check of the joined model failed
parameter '…' names '…', which a wire leads to
parameter '…': …
parameter '…': tokens=…: …
parameter 'padded_inputs' lists '…', but
… names '…', but the model has no such
… has <<<…, …>>>, but '…' is an output
parameter '…' names '…', which is not
the initial value of state
the initial_state_model's '…' …
input '…' is optional, but
output '…' has … in the model
… is …, but in the model it is
nothing feeds the model's input
the model's input '…' is
the state pair <<<…, …>>>
state '…' has … in the model
control_input '…' has a value
constant_inputs gives '…' the value
parameter '…' is '…', but
parameter '…' is not known…
parameter '…' is missing: …
parameter 'state_api' is 'true', but
'sequence_batching.oldest.max_candidate_sequences' is 0
--backend-config=stateful,…=…: …
no memory for … state slots of …
parameter 'enable_cuda_graph' is '1', but a graph replays
parameter 'enable_cuda_graph' is '1', but ONNX
parameter 'growing_padding' is '…', but
the … cannot be run:
…; without it: …
the request was cancelled
the request has … sequences, but a model with
parameter 'max_steps' of the request is
nothing ends the steps of the request
sequence id … is a string
sequence id … is too large
SEQUENCE_ID_NOT_PROVIDED:
INVALID_SEQUENCE_CONTROL_INPUT:
SEQUENCE_ID_CONFLICT:
SEQUENCE_QUEUE_FULL:
SEQUENCE_MOVED: sequence …
SEQUENCE_MOVED: this server
SEQUENCE_NOT_SAVED: sequence … has begun on another server
STATE_STORE_FAILED:
STATE_STORE_DAMAGED:
parameter 'state_store' (…): …
SEQUENCE_NOT_PARKED:
SEQUENCE_ALREADY_EXISTS: sequence … is live
SEQUENCE_MISSING: sequence … is parked
SEQUENCE_MISSING: no live sequence … to clone
STATE_API_OFF:
STATE_PARAMETER:
STATE_UNKNOWN:
STATE_CONFLICT:
STATE_NOT_LISTED:
the sequence's held inputs would have
no room for the sequence's held inputs
input '…' is missing
the request lacks input '…', which 'input_windows' cuts
input '…' is …, but
input '…' has shape …, but
input '…' has … bytes
input '…' has … elements,
input '…' lies in memory of GPU
no memory for input '…':
generated input '…' (…) would
no room for the sequence's growing states
the initial_state_model gave
output '…' is requested, but
output '…' is wanted in memory of GPU
the names of the model's inputs and outputs
parameter 'state_pairs' is '…', but
parameter 'state_pair_patterns' has '…', but
by their names all inputs
… may be states
max_batch_size is …, but the model has no recognizable batch dimension
max_batch_size is …, but the names of the model's dimensions
ONNX Runtime cannot use GPU
ONNX Runtime rejects the options
no ONNX Runtime library found;
the ONNX Runtime library …
this Triton server has backend API
… bytes more are needed
the Triton server in this process offers
""".splitlines()
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


SOURCES = [
    file
    for folder in ("src", "crates/gpu-rows", "crates/model-config", "crates/rows", "crates/sequences", "triton-sys/src")
    for file in (ROOT / folder).rglob("*.rs")
]
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
def test_an_error_of_the_code_is_documented_or_says_what_to_do(form):
    assert is_documented(form) or any(form.startswith(beginning) for beginning in LEFT_OUT)


@pytest.mark.parametrize("beginning", LEFT_OUT)
def test_an_error_that_is_left_out_is_one_of_the_code_and_not_on_the_page(beginning):
    assert len({form for form in errors() if form.startswith(beginning)}) == 1
    assert not any(text.startswith(beginning) for text in documented())


def test_each_code_word_is_on_the_page():
    page = (ROOT / "docs" / "errors.md").read_text()
    words = {match[0] for form in errors() if (match := re.match(r"[A-Z_]{5,}(?=: )", form))}
    assert len(words) > 15 and all(f"`{word}" in page for word in words)


def test_other_texts_are_told_apart():
    for text in ("input '…' is absent", "parameter '…' is '…', but … was expected", "… state slots of … bits: …"):
        assert not is_given(text), text
    for form in ("input '…' is absent", "the pool of … is closed"):
        assert not is_documented(form), form
    assert len(documented()) > 50 and len(errors()) > 70
