"""What Horovod's environment variables mean here."""

from __future__ import annotations

import pytest

from mpisgd import InvalidArgument
from mpisgd.horovod.engine.settings import Settings, read_settings


def test_without_variables_the_defaults_hold():
    assert read_settings({}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1048576", "fusion_bytes", 2**20),
        ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_bytes", 0),
        ("HOROVOD_CYCLE_TIME", "3.5", "cycle_s", 0.0035),
        ("HOROVOD_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5", "stall_warning_s", 5.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7", "stall_end_s", 7.0),
    ],
)
def test_each_variable_sets_its_field_and_no_other(name, text, field, value):
    settings = read_settings({name: text})
    assert getattr(settings, field) == pytest.approx(value)
    assert settings._replace(**{field: getattr(Settings(), field)}) == Settings()


@pytest.mark.parametrize(("text", "limits"), [("0", (5.0, 7.0)), ("", (5.0, 7.0)), ("1", (0.0, 0.0))])
def test_stall_checks_can_be_switched_off(text, limits):
    env = {
        "HOROVOD_STALL_CHECK_DISABLE": text,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7",
    }
    settings = read_settings(env)
    assert (settings.stall_warning_s, settings.stall_end_s) == limits


@pytest.mark.parametrize("text", ["many", "-1", "", "(None,)", "nan", "inf"])
def test_what_is_no_number_is_refused_with_its_name(text):
    with pytest.raises(InvalidArgument, match="HOROVOD_CYCLE_TIME"):
        read_settings({"HOROVOD_CYCLE_TIME": text})
