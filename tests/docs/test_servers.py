"""Each test that scripts/test --servers runs exists."""

import re

import pytest

from support.servers import CASES, TESTS


@pytest.mark.parametrize("case", [case for listed in CASES.values() for case in listed])
def test_the_tests_that_are_listed_exist(case):
    file, _, name = case.partition("::")
    assert re.search(rf"^def {name or 'test_'}", (TESTS / file).read_text(), re.MULTILINE)
