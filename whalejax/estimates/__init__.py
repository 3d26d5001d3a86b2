"""Predictions for tables of published training runs."""
