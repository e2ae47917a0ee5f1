"""Pictures: nothing is cut off, and a method has one colour."""

from __future__ import annotations

import pytest

from mpisgd.tools.bench.report.plots import COLOURS, add_legend, colour_of, colours_and_styles


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("LocalSGD(8)", "LocalSGD(4, warmup_steps=3) with AdamW(lr=0.1)"),
        ("Synchronous + PowerSGD(rank=2)", "DiLoCo(4) + PowerSGD(rank=4) with SGD(lr=0.1)"),
        ("Synchronous", "Synchronous with AdamW(lr=0.1)"),
        ("Synchronous with OneBitAdam(lr=0.1, freeze_step=3)", "OneBitAdam"),
    ],
)
def test_a_method_has_one_colour_whatever_its_options(name, other):
    assert colour_of(name) is not None
    assert colour_of(name) == colour_of(other)


def test_libraries_and_methods_beside_each_other_differ():
    names = ("mpisgd", "one process", "gloo", "horovod", "MPI", "no communication")
    assert len({colour_of(name) for name in names}) == len(names)
    assert colour_of("mpisgd, LocalSGD(8)") == colour_of("mpisgd")


def test_unknown_names_get_what_is_left_and_equal_colours_are_told_apart():
    found = colours_and_styles(["mpisgd", "one", "two", "PowerSGD(1)", "PowerSGD(2)"])
    assert found["one"][0] != found["two"][0]
    assert not {found["one"][0], found["two"][0]} & {COLOURS[0], colour_of("PowerSGD(1)")}
    assert [found[name][1] for name in ("PowerSGD(1)", "PowerSGD(2)")] == [0, 1]


@pytest.mark.parametrize("length", [8, 30, 90])
def test_a_legend_fits_into_the_figure(length):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, ax = pyplot.subplots(figsize=(5, 4), layout="constrained")
    names = [f"{number} {'long name ' * 9}"[:length] for number in range(12)]
    lines = {name: ax.plot([0, 1], label=name)[0] for name in names}
    add_legend(figure, lines)
    (legend,) = figure.legends
    figure.draw_without_rendering()
    assert legend.get_window_extent().width <= figure.bbox.width
    pyplot.close(figure)
