"""Shares of a batch that follow the speed of mixed devices."""

from whalejax.planner.balance.shares import Device as Device
from whalejax.planner.balance.shares import balance as balance
from whalejax.planner.balance.shares import water_fill as water_fill
