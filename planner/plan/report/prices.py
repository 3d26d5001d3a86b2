"""Prices of devices, from the user or from a dated list of public prices.

Users give the price of a kind as ``kinds.NAME.price_per_hour`` of a cluster file or an
entry of ``prices=`` of ``wh.search``; its currency is unknown. ``prices.toml`` has
prices of the other kinds, with their currency and day.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyPrice:
    """Price of a cluster's devices for an hour.

    Attributes:
        amount: Price of all devices, used or not.
        currency: Code such as ``"USD"``; empty for prices from the user.
        as_of: Day of the oldest price, as ``"2026-05-01"``; empty for the user's.
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
    """Returns the price of a cluster for an hour; None if a kind has no price.

    Prices from users are not added to listed ones, since their currency is unknown.

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
    """Returns the public price of one device of a kind; None for unlisted kinds."""
    currency, listed = _list_prices()
    if kind.name not in listed:
        return None
    amount, as_of = listed[kind.name]
    return HourlyPrice(amount=amount, currency=currency, as_of=as_of)


def price_notes(clusters: Iterable[Cluster]) -> list[str]:
    """Returns the sources of the clusters' prices, for the reader of a table.

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
            "only if it is that of the list"
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
