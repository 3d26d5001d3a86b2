"""Processes of elastic runs on other machines, each held by an agent."""
