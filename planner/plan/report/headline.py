"""Computes a plan's first numbers: model size, speed and price.

``planner.cost.model_work`` defines FLOP/s and the utilization of devices (MFU). The
utilization is relative to the peaks of the plan's devices in the dtype of most of the
model's products, such as TensorFloat-32 for float32 on an H100.

Users give the price of a device kind as ``kinds.NAME.price_per_hour`` in a cluster
file, or in ``prices=`` of ``wh.search``. The currency of such a price is unknown.
``prices.toml`` has the prices of other kinds, with currency and date.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from whalejax.meshes.checks import Arguments
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.units import count_digits, count_text, duration_text
from whalejax.planner.plan.report.table_text import whole_seconds
from whalejax.planner.plan.report.text_layout import Line, paragraph
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import ModelWork
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyPrice:
    """Price of a cluster's devices for one hour.

    Attributes:
        amount: Price of all devices, including idle ones.
        currency: Code such as ``"USD"``; empty for prices that the user gave.
        as_of: Date of the oldest price, as ``"2026-05-01"``; empty for the user's
            prices.
    """

    amount: float
    currency: str = ""
    as_of: str = ""

    def text(self, amount: float) -> str:
        """Formats an amount of this currency, with three digits.

        >>> HourlyPrice(amount=1.0, currency="USD").text(0.012345)
        '0.0123 USD'
        """
        digits = f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"
        return f"{digits} {self.currency}".rstrip()


def hourly_price(cluster: Cluster) -> HourlyPrice | None:
    """Returns the price of a cluster for one hour, or None if a kind has no price.

    The currency of users' prices is unknown, so they are not added to listed prices.

    >>> from whalejax.meshes import cluster
    >>> hourly_price(cluster("h100:8")).currency
    'USD'
    >>> hourly_price(cluster("h100:8").with_prices({"h100": 2.0})).amount
    16.0
    """
    given = cluster.price_per_hour
    if given is not None:
        return HourlyPrice(amount=given)
    if any(kind.price_per_hour is not None for kind in cluster.kinds):
        return None
    listed = [listed_price(kind) for kind in cluster.kinds]
    if any(price is None for price in listed):
        return None
    by_kind = cluster.with_prices(
        {
            kind.name: price.amount
            for kind, price in zip(cluster.kinds, listed, strict=True)
            if price is not None
        }
    )
    amount = by_kind.price_per_hour
    assert amount is not None
    days = [price.as_of for price in listed if price is not None]
    return HourlyPrice(amount=amount, currency=_list_prices()[0], as_of=min(days))


def listed_price(kind: DeviceKind) -> HourlyPrice | None:
    """Returns the list price of one device of a kind, or None if it has none."""
    currency, listed = _list_prices()
    if kind.name not in listed:
        return None
    amount, as_of = listed[kind.name]
    return HourlyPrice(amount=amount, currency=currency, as_of=as_of)


def price_notes(clusters: Iterable[Cluster]) -> list[str]:
    """Returns notes on the sources of the clusters' prices, for the reader of a table.

    >>> from whalejax.meshes import cluster
    >>> price_notes([cluster("h100:8"), cluster("v5p:2x2x2")])[0]
    'h100: 2.9 USD an hour (list price of 2026-05-01)'
    """
    kinds = {kind.name: kind for one in clusters for kind in one.kinds}
    listed, given, unknown = [], [], []
    for name, kind in kinds.items():
        price = listed_price(kind)
        if kind.price_per_hour is not None:
            given.append(name)
        elif price is None:
            unknown.append(name)
        else:
            text = price.text(price.amount)
            listed.append(f"{name}: {text} an hour (list price of {price.as_of})")
    notes = listed
    if given and listed:
        notes.append(
            f"prices of {', '.join(given)} are yours, in your currency: compare them "
            "with listed prices only if both have the same currency"
        )
    if unknown:
        first = unknown[0]
        notes.append(
            f"no price of {', '.join(unknown)} is listed: --price {first}=…, or "
            f'prices={{"{first}": …}}'
        )
    return notes


@functools.cache
def _list_prices() -> tuple[str, dict[str, tuple[float, str]]]:
    file = importlib.resources.files("whalejax.meshes") / "prices.toml"
    data = tomllib.loads(file.read_text())
    currency = data.pop("currency")
    return currency, {
        name: (float(entry["price_per_hour"]), entry["as_of"])
        for name, entry in data.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Throughput:
    """Speed and price of a plan's step.

    Attributes:
        work: Size of the model and work of a step.
        step_seconds: Seconds of a step, predicted or measured.
        num_devices: Number of devices that the plan uses.
        dtype: Dtype of most matrix products, such as ``"bf16"``. Several for devices of
            several kinds, as ``"f16 and f32"``.
        peak_flops_per_second: Sum of the devices' peak FLOP/s in that dtype.
        price: Price of the cluster for one hour, or None if unknown.
    """

    work: ModelWork
    step_seconds: float
    num_devices: int
    dtype: str
    peak_flops_per_second: float
    price: HourlyPrice | None

    @property
    def samples_per_second(self) -> float:
        """Samples that are trained per second."""
        return self.work.samples / self.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are trained per second; None if a batch has none."""
        return self.work.tokens / self.step_seconds if self.work.tokens else None

    @property
    def units_per_second(self) -> float:
        """Tokens per second, or samples if a batch has no tokens."""
        return self.work.units / self.step_seconds

    @property
    def device_flops_per_second(self) -> float:
        """Model FLOP/s per device on average, without recomputation."""
        return self.work.step_flops / self.step_seconds / self.num_devices

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization (MFU), from 0 to 1."""
        return self.work.step_flops / self.step_seconds / self.peak_flops_per_second

    @property
    def step_price(self) -> float | None:
        """Price of a step; None if a device kind has no price."""
        return None if self.price is None else self.run_price(self.work.units)

    @property
    def million_price(self) -> float | None:
        """Price of a million tokens, or samples; None if a device kind has no price."""
        return None if self.price is None else self.run_price(1_000_000)

    def run_seconds(self, units: float) -> float:
        """Returns the seconds that a run of some length takes.

        Args:
            units: Tokens of the run, or samples if a batch has no tokens.

        Raises:
            PlanError: ``units`` is not a number above 0.
        """
        problems = Arguments("Throughput", PlanError)
        problems.number("units", units, above=0)
        problems.raise_if_any()
        return units / self.units_per_second

    def run_price(self, units: float) -> float | None:
        """Returns the price of a run of some length; None if a kind has no price.

        Args:
            units: Tokens of the run, or samples if a batch has no tokens.
        """
        seconds = self.run_seconds(units)
        return None if self.price is None else self.price.amount * seconds / 3600

    def __str__(self) -> str:
        return " · ".join([*speed_words(self), *price_words(self)])

    def __repr__(self) -> str:
        return f"<Throughput {self}>"


def throughput(plan: PlanData, step_seconds: float | None = None) -> Throughput:
    """Returns the speed and price of a plan's step.

    Args:
        plan: The plan.
        step_seconds: Measured seconds of a step; default: the predicted seconds.

    Raises:
        PlanError: ``step_seconds`` is not a number above 0, or the plan lacks the work
            of its model, as older files and estimates do.
    """
    problems = Arguments("throughput", PlanError)
    problems.number("step_seconds", step_seconds, above=0, none=True)
    problems.raise_if_any()
    if plan.work is None:
        raise PlanError(
            "this plan lacks the work of its model, as its file was written by a "
            "version before 1.1. Make it again with wh.plan(...)"
        )
    dtype = plan.work.dtype
    kinds = _devices(plan)
    return Throughput(
        work=plan.work,
        step_seconds=step_seconds or whole_seconds(plan),
        num_devices=plan.num_devices,
        dtype=" and ".join(dict.fromkeys(_product_type(plan, kind) for kind in kinds)),
        peak_flops_per_second=sum(
            kind.peak_flops(kind.multiplies_in(dtype)) for kind in kinds
        ),
        price=hourly_price(plan.cluster),
    )


def _devices(plan: PlanData) -> list[DeviceKind]:
    every = [node.kind for node in plan.cluster.nodes for _ in range(node.count)]
    order = plan.device_order or range(plan.num_devices)
    return [every[number] for number in order]


def _product_type(plan: PlanData, kind: DeviceKind) -> str:
    assert plan.work is not None
    name = kind.multiplies_in(plan.work.dtype)
    return "bf16" if name == "f32" and plan.cluster.compiler.narrow_products else name


def model_words(work: ModelWork) -> list[str]:
    """Describes the size of a model and the work of a step."""
    size = f"{count_digits(work.parameters)} parameters"
    if work.trained < work.parameters:
        size += f", {count_digits(work.trained)} trained"
    if work.active < work.parameters:
        size += f", {count_digits(work.active)} active for a token"
    if work.chosen < work.active:
        size += (
            f", {count_digits(work.chosen)} chosen for a token, though every expert "
            "computes each token"
        )
    batch = count_text(work.samples, "sample")
    if work.tokens:
        batch += f", {work.tokens:,} tokens"
    return [size, f"{batch} a step", f"{flops_text(work.step_flops)} a step"]


def speed_words(speed: Throughput) -> list[str]:
    """Returns the throughput, the FLOP/s of a device and their fraction of its peak."""
    words = [f"{_rate(speed.units_per_second)} {speed.work.unit}/s"]
    if speed.work.step_flops:
        words.append(f"{flops_text(speed.device_flops_per_second)}/s a device")
        words.append(f"MFU {speed.utilization:.1%} ({speed.dtype})")
    return words


def price_words(speed: Throughput) -> list[str]:
    """Returns the prices of a step and of a million tokens or samples, if known."""
    price, step, million = speed.price, speed.step_price, speed.million_price
    if price is None or step is None or million is None:
        return []
    noun = "tokens" if speed.work.tokens else "samples"
    words = [f"{price.text(step)} a step", f"{price.text(million)} a million {noun}"]
    since = f", list prices of {price.as_of}" if price.as_of else ""
    return [*words, f"{price.text(price.amount)} an hour{since}"]


def run_words(speed: Throughput, units: float) -> str:
    """Returns the duration and price of a run as text.

    Args:
        speed: Speed and price of a step.
        units: Tokens of the run, or samples if a batch has no tokens.
    """
    text = f"{count_digits(units)} {speed.work.unit} in "
    text += duration_text(speed.run_seconds(units))
    cost = speed.run_price(units)
    if speed.price is None or cost is None:
        return text
    return f"{text} for {speed.price.text(cost)}"


def headline(plan: PlanData, width: int | None) -> list[Line]:
    """Renders the model's size, the predicted speed and the price."""
    lines: list[Line] = []
    for name, words in headline_words(plan):
        lines += paragraph(name, words, width, " · ")
    return lines


def headline_words(plan: PlanData) -> list[tuple[str, list[str]]]:
    """Returns (name, texts) of the model's size, the predicted speed and the price.

    The result is empty for plans of older files.
    """
    if plan.work is None:
        return []
    speed = throughput(plan)
    price = price_words(speed) or unknown_price_words(plan.cluster)
    rows = [("model", model_words(plan.work)), ("speed", speed_words(speed))]
    return [*rows, *([("price", price)] if price else [])]


def unknown_price_words(cluster: Cluster) -> list[str]:
    """Returns the note on device kinds without a price, and how to give one.

    CPUs need no price, as plans for CPUs are for trials on one machine.
    """
    kinds = [
        kind
        for kind in cluster.kinds
        if kind.platform != "cpu"
        and kind.price_per_hour is None
        and listed_price(kind) is None
    ]
    if not kinds:
        return []
    names = " and ".join(kind.display_name() for kind in kinds)
    return [
        f"no list price of {names}: give price_per_hour in a cluster file, or prices= "
        "of wh.search"
    ]


def flops_text(flops: float) -> str:
    """Formats FLOPs, or FLOP/s without ``/s``, with three digits: ``"28 TFLOP"``."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if flops < 999.5 or unit == "E":
            break
        flops /= 1000
    return f"{flops:.3g} {unit}FLOP"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
