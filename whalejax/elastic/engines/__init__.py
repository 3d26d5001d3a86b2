"""Engines that place the agents of elastic runs on their machines."""
