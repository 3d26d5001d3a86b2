"""Programs in parts: borders, who runs what, and what they hand each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from whalejax.planner.pipeline.program_cut import (
    Unit,
    Units,
    Value,
    divide_program,
    divided_by_marks,
)
from whalejax.planner.plan_errors import PlanError


def inputs(*numbers: int) -> list[Value]:
    return [((), n) for n in numbers]


def unit(
    index: int,
    reads: Sequence[Value],
    nbytes: int = 8,
    *,
    cheap: bool = False,
    kind: str = "",
) -> Unit:
    return Unit(
        position=(index,),
        reads=tuple(reads),
        writes=(((index,), 0),),
        tensors=(index,),
        sizes=(nbytes,),
        cheap=cheap,
        line=f"model.py:{index}",
        kind=kind,
    )


def made(*indices: int) -> list[Value]:
    return [((i,), 0) for i in indices]


def chain() -> Units:
    """Three layers on parameters 0, 1 and 2 and data 3, a mask, and a skip.

    The second is a product and an addition, behind which less is handed on.
    """
    units = (
        unit(0, inputs(3), cheap=True),  # a mask
        unit(1, [*inputs(0, 3), *made(0)]),
        unit(2, [*inputs(1), *made(1)], nbytes=64),
        unit(3, made(2), nbytes=4),
        unit(4, [*inputs(2), *made(3, 0)]),
        unit(5, made(4, 1)),
    )
    return Units(units=units, params=("a", "b", "c"), results=(((5,), 0),), fresh={})


def test_borders_lie_where_least_crosses() -> None:
    units = chain()
    assert units.borders == {"b": 2, "c": 4}
    assert units.border_bytes[2:5] == [8, 72, 12]
    assert units.free == (True, False, False, False, False, False)


def test_cheap_units_run_wherever_they_are_read() -> None:
    division = divide_program(chain(), ["b", "c"])
    assert [part.units for part in division.parts] == [(0, 1), (2, 3), (0, 4, 5)]
    assert [part.inputs for part in division.parts] == [(0, 3), (1,), (2, 3)]


def test_values_go_from_who_makes_them_to_all_who_read_them() -> None:
    division = divide_program(chain(), ["b", "c"])
    first, last = made(1)[0], made(3)[0]
    assert [part.imports for part in division.parts] == [(), (first,), (first, last)]
    assert [part.exports for part in division.parts] == [(first,), (last,), ()]
    assert division.made_at == {first: 0, last: 1}
    assert division.readers(first) == (1, 2)
    assert [division.owner(n, 3) for n in range(4)] == [0, 1, 2, 0]
    # Dealt out to two stages in turn, the third part is the first stage's.
    assert division.owner(2, 2) == 0


@pytest.mark.parametrize("starts", [["c", "b"], ["d"]])
def test_borders_that_are_none(starts: list[str]) -> None:
    with pytest.raises(PlanError, match="Plan again"):
        divide_program(chain(), starts)


def test_marks_cut_and_what_they_leave_follows() -> None:
    division = divided_by_marks(chain(), [None, None, 0, None, 1, None])
    # The first layer reads parameters and data alone: it goes to its first reader.
    assert [part.units for part in division.parts] == [(0, 1, 2, 3), (0, 4, 5)]


def test_values_that_flow_backwards_name_both_lines() -> None:
    with pytest.raises(PlanError) as caught:
        divided_by_marks(chain(), [None, 1, 0, None, 1, None])
    assert (
        "model.py:2 in stage 0 reads a value that model.py:1 makes in stage 1"
        in str(caught.value)
    )


def test_what_a_step_changes_is_made_where_it_is_read() -> None:
    units = dataclasses.replace(
        chain(), fresh={4: made(3)[0]}, others=("data", "statistics")
    )
    assert [part.fresh for part in divide_program(units, ["c"]).parts] == [(4,), ()]
    both = dataclasses.replace(units, fresh={3: made(3)[0]})
    with pytest.raises(PlanError, match="data is changed in part 0 of the model"):
        divide_program(both, ["c"])


def looked_up(indices: Value) -> Units:
    """A table, looked up by data or by constants and read by two layers."""
    units = (
        unit(0, [*inputs(0), indices], cheap=True, kind="gather"),
        unit(1, [*inputs(1), *made(0)]),
        unit(2, [*inputs(2), *made(1, 0)]),
    )
    return Units(units=units, params=("table", "b", "c"), results=(*made(2),), fresh={})


def test_what_data_look_up_in_a_parameter_is_handed_on() -> None:
    by_data = divide_program(looked_up(((), 3)), ["b", "c"])
    assert [part.units for part in by_data.parts] == [(0,), (1,), (2,)]
    assert [part.inputs for part in by_data.parts] == [(0, 3), (1,), (2,)]
    # Positions, say, are no data: every stage can look them up.
    by_constants = divide_program(looked_up(((), 0)), ["c"])
    assert [part.units for part in by_constants.parts] == [(0, 1), (0, 2)]


@pytest.mark.parametrize("position", [0, 3])
def test_a_parameter_is_summed_where_it_is_read(position: int) -> None:
    """A penalty on the first layer, added to the loss, written first or last."""
    layers = [inputs(0, 2), [*inputs(1)]]
    order = [0, 1, 2, 3] if position else [1, 2, 0, 3]
    a, b, penalty, loss = order
    found = [
        unit(a, layers[0]),
        unit(b, [*layers[1], *made(a)]),
        unit(penalty, inputs(0), cheap=True, kind="reduce_sum"),
        unit(loss, made(b, penalty)),
    ]
    units = Units(
        units=tuple(sorted(found, key=lambda u: u.position)),
        params=("a", "b"),
        results=(*made(loss),),
        fresh={},
    )
    division = divide_program(units, ["b"])
    assert [part.inputs for part in division.parts] == [(0, 2), (1,)]
    assert made(penalty)[0] in division.parts[0].exports


def test_what_a_step_changes_cheaply_is_made_beside_its_reader() -> None:
    """A counter that no layer changes, and that the second part reads."""
    first, *others = chain().units
    second = dataclasses.replace(others[3], reads=(*others[3].reads, *inputs(4)))
    counts = unit(6, inputs(4), cheap=True)
    units = dataclasses.replace(
        chain(),
        units=(first, *others[:3], second, others[4], counts),
        others=("data", "counter"),
        fresh={4: made(6)[0]},
    )
    division = divide_program(units, ["b", "c"])
    assert [part.fresh for part in division.parts] == [(), (), (4,)]
