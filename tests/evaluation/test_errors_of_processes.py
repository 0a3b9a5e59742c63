"""Errors of one of several processes of an evaluation."""

import pickle

from ranks import own_rank, results

from ssvit.errors import Failure, OptionError, RootOptionError, UserError
from ssvit.evaluation.processes import all_gather_results

ERRORS = (
    OptionError("probes.knn.k", [1, 50], "must be at most 10, the number of images"),
    RootOptionError("data.root", "a  b\n", "must be a folder"),
    Failure("the disk is full", 3),
    UserError("the classes differ"),
)


def description(error: UserError) -> dict:
    """Return the class and the attributes of an error as JSON stores them."""
    return {"class": type(error).__name__, "arguments": list(error.args), **vars(error)}


def caught() -> list[dict]:
    """Return the error that `all_gather_results` raises in this process for each of ERRORS of the second process."""

    def act(error: UserError) -> None:
        if own_rank() == 1:
            raise error

    errors = []
    for error in ERRORS:
        try:
            all_gather_results(lambda error=error: act(error))
        except UserError as received:
            errors.append(description(received))
    return errors


def test_an_error_of_one_process_has_its_class_and_its_options_in_all(tmp_path):
    expected = [description(error) for error in ERRORS]
    assert results(caught, 2, tmp_path) == [expected] * 2
    assert [description(pickle.loads(pickle.dumps(error))) for error in ERRORS] == expected
