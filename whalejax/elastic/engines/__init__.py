"""Engines that start the agents of elastic runs on their machines."""
