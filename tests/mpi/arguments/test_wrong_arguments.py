"""Whatever one passes: an error that names the argument, nothing sent, and the job goes on."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from typing import Any

import junk
import pytest
import torch
from horovod_calls import CALLS as HOROVOD_CALLS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from public_calls import CALLS as OWN_CALLS
from public_calls import NO_SUCH, NOT_CALLED, WITHOUT_ARGUMENTS, Call
from verdicts import everyone, same_on_all_ranks

import mpisgd
import mpisgd.checkpoint
import mpisgd.data
import mpisgd.elastic
import mpisgd.horovod as hvd

CALLS = {**OWN_CALLS, **HOROVOD_CALLS}

# Every rank draws the same: no clock, no memory of earlier runs, and no shrinking, which follows outcomes.
ALIKE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Junk that was taken for the name of a file would leave it here."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def complaint(call: Call, wrong: dict[str, Any]) -> str | None:
    """What is bad about the answer to wrong arguments; None if it is as promised."""
    name = call.function.__name__
    try:
        call.function(**{**call.good(), **wrong})
    except (mpisgd.MpisgdError, TypeError, ValueError) as exc:
        said = [word for argument in wrong for word in (argument, call.said_as.get(argument, argument))]
        if any(word in str(exc) for word in said) and len(str(exc)) < 2000:
            return None
        return f"{name}({wrong!r:.100}): {type(exc).__name__} names none of {said}: {str(exc)[:200]}"
    except Exception as exc:
        return f"{name}({wrong!r:.100}): {type(exc).__name__}: {str(exc)[:200]}"
    return f"{name}({wrong!r:.100}) was taken"


def arguments(call: Call) -> list[str]:
    """The names of its arguments; of a class, what its instances are made of."""
    made = inspect.isclass(call.function)
    signature = inspect.signature(call.function.__init__ if made else call.function)  # type: ignore[misc]
    by_name = [name for name, taken in signature.parameters.items() if taken.kind is not taken.VAR_KEYWORD]
    return [name for name in by_name if name != "self"]


def single_mistakes(call: Call, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    for argument in names:
        for _, sample in junk.samples():
            if not call.is_right(argument, sample()):
                yield argument, sample()


def the_job_goes_on() -> None:
    total = torch.tensor([mpisgd.rank() + 1.0])
    mpisgd.all_reduce(total)
    size = mpisgd.size()
    everyone(total.item() == size * (size + 1) / 2, f"{total}")


def agree(complaints: list[str]) -> None:
    everyone(not complaints, "\n".join(complaints[:20]))


@pytest.fixture(params=CALLS)
def call(request) -> Call:
    if request.param in HOROVOD_CALLS:
        hvd.init()
    if mpisgd.size() < CALLS[request.param].min_size:
        pytest.skip("no right arguments in a job this small")
    return CALLS[request.param]


def test_every_public_function_has_a_line():
    public = {*mpisgd.__all__, *mpisgd.data.__all__, *mpisgd.checkpoint.__all__, *mpisgd.elastic.__all__}
    exceptions = {name for name in mpisgd.__all__ if name in mpisgd.errors.__all__}
    everyone(public - exceptions == OWN_CALLS.keys() | WITHOUT_ARGUMENTS | NOT_CALLED.keys())


def test_a_wrong_argument_on_all_ranks(call):
    answers = (complaint(call, {arg: value}) for arg, value in single_mistakes(call, arguments(call)))
    agree([answer for answer in answers if answer])
    the_job_goes_on()


@pytest.mark.mpi(min_size=2)
def test_a_wrong_argument_on_one_rank_sends_nothing(call):
    complaints = []
    if mpisgd.rank() == mpisgd.size() - 1:
        local = [argument for argument in arguments(call) if argument not in call.together]
        answers = (complaint(call, {arg: value}) for arg, value in single_mistakes(call, local))
        complaints = [answer for answer in answers if answer]
    agree(complaints)
    the_job_goes_on()


@pytest.mark.parametrize("num_examples", [5, pytest.param(300, marks=pytest.mark.long)])
def test_any_junk_in_any_arguments(call, num_examples):
    complaints: list[str] = []
    drawn_here = hashlib.blake2b()

    @settings(ALIKE, max_examples=num_examples)
    @given(st.dictionaries(st.sampled_from([*arguments(call), NO_SUCH]), junk.random_junk(), min_size=1))
    def try_out(drawn: dict[str, Any]) -> None:
        wrong = call.mistakes(drawn)
        drawn_here.update(repr(sorted(wrong)).encode())
        if wrong and (answer := complaint(call, wrong)):
            complaints.append(answer)

    try_out()
    same_on_all_ranks(drawn_here.hexdigest())
    agree(complaints)
    the_job_goes_on()
