"""Agents, which run processes of elastic runs on other machines."""
