"""Peak memory of cases, from what ``cases`` says of their places; and what fits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from whalejax.planner.model.layer_chain import ENDS, EVERYWHERE, FIRST, LAST, LAYER
from whalejax.planner.search.batched.cases import PLACES, Cases, Group
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.parameter_bytes import HOLDERS
from whalejax.planner.search.batched.partition import cut_layers, fewest_layers
from whalejax.planner.terms import FETCHED, OFFLOADS


def share_of(cases: Cases, group: Group, place: int) -> Array:
    """Which part of a place lies on the fullest stage of a group."""
    if place == LAYER:
        return group.layers / cases.model.layers
    if place == EVERYWHERE:
        return cases.zeros + 1.0
    held = {FIRST: group.first, LAST: group.last, ENDS: group.first | group.last}
    found: Array = held[place] * 1.0
    return found


def mixed(shares: dict[int, Array], values: dict[int, Array]) -> Array:
    """What the parts of places on a stage come to, of values for whole places."""
    found: Array = np.zeros(1)
    for place, value in values.items():
        found = found + shares[place] * value
    return found


def fits_of(
    cases: Cases, micro_batches: Array, hosts: bool, *, any_cut: bool, any_policy: bool
) -> Array:
    """Whether memory holds each case; nothing is timed.

    Args:
        cases: nothing is cut yet.
        micro_batches: of one pipeline.
        hosts: memory of hosts counts.
        any_cut: memory may hold it however stages interleave.
        any_policy: memory may hold it whatever is computed again.
    """
    cut_layers(cases)
    for g in cases.groups if any_cut else ():
        g.layers = np.minimum(g.layers, fewest_layers(cases, g))
    return memory_of(cases, micro_batches, any_policy=any_policy, hosts=hosts)[1]


def keeps_of(cases: Cases, micro_batches: Array) -> Array:
    """Whether memory may hold what the backward pass reads, were that all.

    Args:
        cases: nothing is cut yet.
        micro_batches: of one pipeline.
    """
    cut_layers(cases)
    fits = np.ones(cases.number, dtype=bool)
    saved = {p: cases.saved(p) for p in PLACES}
    for g in cases.groups:
        g.layers = np.minimum(g.layers, fewest_layers(cases, g))
        shares = {place: share_of(cases, g, place) for place in PLACES}
        kept = cases.in_flight(g, micro_batches) * mixed(shares, saved)
        fits &= (g.count == 0) | (kept <= cases.capacity(g.kind)[0])
    return fits


def may_hold_residents(cases: Cases) -> Array:
    """Whether device memory may hold each case: what stays for the whole step fits.

    Args:
        cases: Cases that are not cut into stages yet. Everything that a case offloads
            is taken to be in host memory.
    """
    cut_layers(cases)
    fits = np.ones(cases.number, dtype=bool)
    away = {name: cases.offloads(name) for name in ("params", "optimizer")}
    params = {p: cases.held[p].params for p in cases.holders}
    state = {p: cases.owned(cases.held[p].state) for p in cases.holders}
    for g in cases.groups:
        shares = {place: share_of(cases, g, place) for place in HOLDERS}
        device = mixed(shares, params) * ~away["params"]
        device = device + mixed(shares, state) * ~away["optimizer"]
        fits &= (g.count == 0) | (device <= cases.capacity(g.kind)[0])
    return fits


def memory_of(
    cases: Cases, parts: Array, *, any_policy: bool = False, hosts: bool = True
) -> tuple[dict[str, Array], Array, Array]:
    """Terms on the fullest device, whether all fit, and the most on a host."""
    tables: dict[str, list[Array]] = {}
    left = []
    most = cases.zeros
    fits = np.ones(cases.number, dtype=bool)
    stages = _approximate_terms(cases, parts, any_policy=any_policy)
    exact = cases.model.exact
    if exact is not None and exact.covers(cases):
        stages = (exact.terms(cases, group) for group in cases.groups)
    for g, (terms, host) in zip(cases.groups, stages, strict=True):
        device_bytes, host_bytes = cases.capacity(g.kind)
        room = device_bytes - sum(terms.values(), np.zeros(1))
        there = g.count > 0
        enough = host <= host_bytes
        fits &= ~there | ((room >= 0) & (enough | (not hosts)))
        left.append(np.where(there, room, np.inf))
        most = np.maximum(most, np.where(there, host, 0.0))
        for name, values in terms.items():
            tables.setdefault(name, []).append(values)
    chosen = np.stack(left).argmin(axis=0)
    column = np.arange(cases.number)
    return {n: np.stack(v)[chosen, column] for n, v in tables.items()}, fits, most


def _approximate_terms(
    cases: Cases, parts: Array, *, any_policy: bool
) -> Iterable[tuple[dict[str, Array], Array]]:
    """For each group terms on a stage and bytes on a host, whenever they are there."""
    static = {
        "params": {p: cases.held[p].params for p in cases.holders},
        "gradients": {p: cases.gradients(p) for p in cases.holders},
        "state": {p: cases.owned(cases.held[p].state) for p in cases.holders},
    }
    saved = {p: cases.saved(p, least=any_policy) for p in PLACES}
    away = {name: cases.offloads(name) for name in OFFLOADS}
    for g in cases.groups:
        shares = {place: share_of(cases, g, place) for place in HOLDERS}
        held = cases.in_flight(g, parts)
        params, gradients, state = (mixed(shares, v) for v in static.values())
        activations = held * mixed(shares, saved)
        kept = np.minimum(activations, 2 * saved[LAYER] / cases.model.layers)
        two = FETCHED * cases.gradients(LAYER) / cases.model.layers
        least = np.minimum(gradients, two)
        terms = {
            "params": params * ~away["params"],
            "gradients": np.where(away["gradients"], least, gradients),
            "optimizer": state * ~away["optimizer"] + cases.model.optimizer_other_bytes,
            "state": np.full(cases.number, float(cases.model.state_bytes)),
            "batch": cases.model.batch_bytes / (cases.frames.data * cases.frames.fsdp),
            "activations": np.where(away["activations"], kept, activations),
            "working": _working(cases, shares, parts, any_policy),
        }
        host = (
            away["params"] * params
            + away["optimizer"] * state
            + away["activations"] * activations
            + away["gradients"] * gradients
        )
        yield terms, host


def _working(
    cases: Cases, shares: dict[int, Array], parts: Array, any_policy: bool
) -> Array:
    """Gathered leaves, casts, temporaries and what is computed again."""
    away = cases.offloads("params")
    gathered, copies, fresh = cases.zeros, cases.zeros, cases.zeros
    for place in cases.holders:
        held, here = cases.held[place], shares[place] > 0
        gathered = np.maximum(gathered, here * cases.owned(held.gathered, 2))
        copies = copies + shares[place] * held.copies
        fresh = np.maximum(fresh, here * cases.owned(held.fresh, 2))
    streamed = FETCHED * cases.held[LAYER].params / cases.model.layers
    found = np.where(away, streamed, copies) + 2 * gathered
    found = found + cases.cell(Column("rebuilt")) + 2 * cases.cell(Column("largest"))
    if not any_policy:
        found = found + _rebuilt(cases, shares)
    whole: Array = found + np.where(parts > 1, fresh, 0.0)
    return whole


def _rebuilt(cases: Cases, shares: dict[int, Array]) -> Array:
    """What the largest TaskGraph keeps while it is computed again, one layer of it."""
    found = np.zeros(cases.number)
    for home in cases.model.policies[0]:
        for place in PLACES:
            everything = cases.cell(Column("saved", home, place, phase="none"))
            kept = everything
            for name in ("dots", "named", "full"):
                column = Column("saved", home, place, phase=name)
                kept = np.where(cases.policy(home, name), cases.cell(column), kept)
            each = cases.model.layers if place == LAYER else 1
            again = np.maximum(0.0, everything - kept) / each
            found = np.maximum(found, again * (shares[place] > 0))
    return found
