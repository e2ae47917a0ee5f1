"""The exceptions are the builtins that programs for torch or for Python catch."""

from __future__ import annotations

import pytest

from mpisgd import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "MpisgdError"])
def test_every_exception_is_a_builtin_one_too(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.MpisgdError)
    assert any(base.__module__ == "builtins" and base is not Exception for base in kind.__mro__[1:-3])


@pytest.mark.parametrize(
    "kind", [errors.CollectiveTimeout, errors.Unreachable, errors.PeerLost, errors.Deadlock, errors.MpiFailed]
)
def test_what_torch_raises_as_a_runtime_error_is_one(kind):
    """Its backends and stores do: whoever is left without the other ranks catches that."""
    assert issubclass(kind, RuntimeError)


def test_a_timeout_and_a_lost_connection_are_what_python_calls_so():
    assert issubclass(errors.CollectiveTimeout, TimeoutError)
    assert issubclass(errors.PeerLost, ConnectionError)
    assert issubclass(errors.Unreachable, ConnectionError)


def test_a_message_ends_with_the_name_of_its_entry_in_the_catalogue():
    assert str(errors.CollectiveTimeout("waited")) == "waited [mpisgd:collective-timeout]"
    assert str(errors.OffloadError("full")) == "full [mpisgd:offload-error]"
    assert str(errors.MpiNotFound("none")) == "none [mpisgd:mpi-not-found]"

    class Refused(errors.InvalidArgument):
        pass

    assert str(Refused("no")) == "no [mpisgd:invalid-argument]"


def test_a_message_within_another_one_is_the_text_alone():
    inner = errors.PeerLost("rank 1 went away")
    assert str(errors.InvalidArgument(f"{inner}; start again")) == (
        "rank 1 went away; start again [mpisgd:invalid-argument]"
    )
    assert str(errors.CollectiveTimeout(str(inner))) == "rank 1 went away [mpisgd:collective-timeout]"


def test_what_a_program_tells_its_user_stays_as_it_is():
    assert str(errors.JobError("no such file: x")) == "no such file: x"
    assert str(errors.JobError(str(errors.InvalidRank("rank 9")))) == "rank 9 [mpisgd:invalid-rank]"
