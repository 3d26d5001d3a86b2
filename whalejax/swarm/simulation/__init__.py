"""Swarms on a virtual clock: what is simulated, how, and what came of it."""
