"""Swarms on a virtual clock: settings, simulation and results."""
