"""Where each case of OpenVINO Model Server is shown through the gateway.

`ovms/` has the cases as they are with Triton's own API. Most of its tests run a second time through the gateway, with
TensorFlow Serving's API. The others can't be expressed in that API, and have a test in this folder.
"""

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

#: Case: the tests, each with its file.
CASES = {
    "O01": ["ovms/test_control.py::test_o01"],
    "O02": ["ovms/test_control.py::test_o02"],
    "O03": ["ovms/test_control.py::test_o03"],
    "O04": ["ovms/test_control.py::test_o04"],
    "O05": ["ovms/test_control.py::test_o05"],
    "O06": ["ovms/test_control.py::test_o06"],
    "O07": ["ovms/test_control.py::test_o07"],
    "O08": ["ovms/test_control.py::test_o08"],
    "O09": ["ovms/test_control.py::test_o09"],
    "O10": ["ovms/test_control.py::test_o10"],
    "O11": ["ovms/test_control.py::test_o11"],
    "O12": ["ovms/test_control.py::test_o12"],
    "O13": ["ovms/test_control.py::test_o13"],
    "O14": ["ovms/test_control.py::test_o14", "gateway/test_errors.py::test_a_sequence_that_does_not_exist"],
    "O15": ["ovms/test_control.py::test_o15"],
    "O16": ["ovms/test_control.py::test_o16_a_second_start_is", "gateway/test_errors.py::test_a_sequence_that_already"],
    "O17": ["ovms/test_control.py::test_o17", "gateway/test_errors.py::test_no_id"],
    "O18": ["ovms/test_control.py::test_o18"],
    "O19": ["ovms/test_control.py::test_o19_an_unknown_control", "gateway/test_errors.py::test_an_unknown_control"],
    "O20": ["gateway/test_special_inputs.py::test_o20"],
    "O21": ["gateway/test_special_inputs.py::test_o21_o22_a_value_in_the_field"],
    "O22": ["gateway/test_special_inputs.py::test_o21_o22_not_one_value"],
    "O23": ["gateway/test_special_inputs.py::test_o23_several", "gateway/test_special_inputs.py::test_o23_a_size"],
    "O24": ["gateway/test_special_inputs.py::test_o24_a_scalar", "gateway/test_special_inputs.py::test_o24_an_empty"],
    "O25": ["gateway/test_special_inputs.py::test_o25_what_is_no_array"],
    "O26": ["gateway/test_special_inputs.py::test_o26_a_misspelt_name"],
    "O27": ["ovms/test_wrong_requests.py::test_o27", "gateway/test_errors.py::test_wrong_data_comes_before"],
    "O28": ["ovms/test_wrong_requests.py::test_o28_a_start_with_wrong_data_makes"],
    "O29": ["gateway/test_tensors.py::test_a_missing_input_is_named"],
    "O30": ["ovms/test_limits.py::test_o30", "gateway/test_errors.py::test_too_many_sequences"],
    "O31": ["ovms/test_limits.py::test_o31"],
    "O32": ["ovms/test_limits.py::test_o32"],
    "O33": ["ovms/test_limits.py::test_o33"],
    "O34": ["gateway/test_errors.py::test_a_start_after_an_end", "gateway/test_order.py::test_a_start_after_an_end"],
    "O35": ["gateway/test_order.py::test_a_start_after_an_end"],
    "O36": ["gateway/test_order.py::test_requests_on_one_connection"],
    "O37": ["gateway/test_order.py::test_other_sequences_do_not_wait"],
    "O38": ["gateway/test_order.py::test_a_start_after_an_end"],
    "O39": ["ovms/test_order.py::test_o39"],
    "O40": ["ovms/test_failures.py::test_o40"],
    "O41": ["ovms/test_failures.py::test_o41"],
    "O42": ["ovms/test_failures.py::test_o42"],
    "O43": ["ovms/test_idle.py::test_o43"],
    "O44": ["ovms/test_idle.py::test_o44"],
    "O45": ["ovms/test_idle.py::test_o45"],
    "O47": ["ovms/test_idle.py::test_o47"],
    "O49": ["ovms/test_versions.py::test_o49"],
    "O50": ["ovms/test_versions.py::test_o50", "gateway/test_managed.py::test_the_latest_version_is_served"],
    "O51": ["ovms/test_versions.py::test_o51_a_reload_ends", "gateway/test_managed.py::test_sequences_of_unchanged"],
    "O52": ["ovms/test_versions.py::test_o52"],
    "O53": ["ovms/test_versions.py::test_o53_a_refused_reload", "gateway/test_managed.py::test_stateful_switched_off"],
    "O54": ["ovms/test_answers.py::test_o54_o55"],
    "O55": ["ovms/test_answers.py::test_o54_o55"],
    "O56": ["gateway/test_tensors.py::test_o56", "gateway/test_tensors.py::test_a_filter_of_outputs"],
    "O57": ["ovms/test_answers.py::test_o57_an_error_has_the_id_in_its_text"],
    "O58": ["gateway/test_tensors.py::test_o58"],
    "O59": ["ovms/test_options.py::test_o59_options_of", "gateway/test_options.py::test_an_option_of_stateful_models"],
    "O60": ["gateway/test_kserve.py::test_sequences_of_the_backend"],
}

#: The gateway has no part in these: they are about runs during a scan, which happen in Triton.
NOT_OF_THE_GATEWAY = {"O46", "O48"}

THROUGH_THE_GATEWAY = {"every_client", "every_way", "every_protocol", "through_gateway"}


def test_each_case_has_a_test():
    assert CASES.keys() | NOT_OF_THE_GATEWAY == {f"O{number:02}" for number in range(1, 61)}


@functools.cache
def decorators(file: str) -> dict[str, set[str]]:
    """Those of each test of a file, by their names."""
    functions = [node for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {name.id for name in function.decorator_list if isinstance(name, ast.Name)}
        for function in functions
    }


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_shown_where_the_table_says(case):
    for entry in CASES[case]:
        file, name = entry.split("::")
        found = [of for test, of in decorators(file).items() if test.startswith(name)]
        assert found, entry
        if file.startswith("ovms/"):
            assert any(of & THROUGH_THE_GATEWAY for of in found), entry
